//! The guests' requests that are taken and not answered.

use super::connection::ConnectionId;
use crate::sequencer::RequestId;
use tidelock_nbd::Request;

/// Where a request stands in the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Slot(pub u32);

/// The sequencer's name for a slot.
pub fn request_of(slot: Slot) -> RequestId {
    RequestId(slot.0.into())
}

/// The slot that the sequencer names.
pub fn slot_of(request: RequestId) -> Slot {
    Slot(u32::try_from(request.0).expect("made by request_of"))
}

/// The table. Dropping it while requests are open is a bug: each must be ended, or given up by
/// name.
#[derive(Debug, Default)]
pub struct Requests {
    slots: Vec<Option<(ConnectionId, Request)>>,
    free: Vec<u32>,
}

impl Requests {
    /// A request was taken from a connection.
    pub fn begin(&mut self, connection: ConnectionId, request: Request) -> Slot {
        let entry = Some((connection, request));
        match self.free.pop() {
            Some(index) => {
                self.slots[index as usize] = entry;
                Slot(index)
            }
            None => {
                self.slots.push(entry);
                Slot(u32::try_from(self.slots.len() - 1).expect("connections bound their requests"))
            }
        }
    }

    /// An open request.
    pub fn get(&self, slot: Slot) -> &Request {
        &self.slots[slot.0 as usize].as_ref().expect("an open request").1
    }

    /// Where an open request came from.
    pub fn connection(&self, slot: Slot) -> ConnectionId {
        self.slots[slot.0 as usize].as_ref().expect("an open request").0
    }

    /// The request is about to be answered, or nobody is there to hear the answer.
    pub fn end(&mut self, slot: Slot) -> (ConnectionId, Request) {
        let entry = self.slots[slot.0 as usize].take().expect("an open request");
        self.free.push(slot.0);
        entry
    }

    /// Whether every request is answered.
    pub fn is_empty(&self) -> bool {
        self.free.len() == self.slots.len()
    }

    /// The loop ends at once: the clients will see their connections close, and ask again.
    pub fn give_up_all(&mut self) {
        self.slots.clear();
        self.free.clear();
    }
}

impl Drop for Requests {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            debug_assert!(self.is_empty(), "requests were dropped without an answer");
        }
    }
}
