//! The guests' requests that are taken and not answered.

use super::ConnectionId;
use tidelock_daemon_core::sequencer::RequestId;
use tidelock_nbd::{Cookie, Request};

/// The table. Dropping it while requests are open is a bug: each must be ended, or given up by
/// name.
#[derive(Debug, Default)]
pub struct Requests {
    slots: Vec<Option<(ConnectionId, Request)>>,
    free: Vec<u32>,
}

impl Requests {
    /// A request was taken from a connection.
    pub fn begin(&mut self, connection: ConnectionId, request: Request) -> RequestId {
        let entry = Some((connection, request));
        match self.free.pop() {
            Some(index) => {
                self.slots[index as usize] = entry;
                RequestId(index.into())
            }
            None => {
                self.slots.push(entry);
                RequestId(self.slots.len() as u64 - 1)
            }
        }
    }

    /// The connection of an open request, and its name there.
    pub fn origin(&self, request: RequestId) -> (ConnectionId, Cookie) {
        let (id, request) = self.slots[request.0 as usize].as_ref().expect("an open request");
        (*id, request.cookie)
    }

    /// The request is about to be answered, or nobody is there to hear the answer.
    pub fn end(&mut self, request: RequestId) -> (ConnectionId, Request) {
        let index = u32::try_from(request.0).expect("connections bound their requests");
        let entry = self.slots[index as usize].take().expect("an open request");
        self.free.push(index);
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
