//! Memory for large records that arrive in parts ([`tidelock_protocol::part`]), bounded over all groups of a server.
//!
//! The parts of such a record outlive their connection, so nothing that bounds connections bounds them. Room for the
//! whole record is taken with its first part: a record that was begun can always be finished. A record that finds no
//! room is refused, and the host sends it again from its beginning.
//!
//! | whose | bound |
//! |---|---|
//! | one host | [`PER_HOST_MAX_BYTES`], whatever others have |
//! | hosts in groups that are not listed, all together | [`UNLISTED_MAX_BYTES`]; none of them may have more than is free, so one that has little finds room beside those that have much |

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tidelock_protocol::ids::{RunId, Seq};
use tidelock_protocol::limits;
use tidelock_protocol::part::{Gathering, Part, PartError, PartialRecord};
use tidelock_protocol::record::Record;

/// Records in parts of one host: eight of the longest.
pub const PER_HOST_MAX_BYTES: u64 = 8 * limits::RECORD_MAX_BYTES as u64;
/// Records in parts of all hosts in groups that the configuration does not list.
pub const UNLISTED_MAX_BYTES: u64 = 4 * PER_HOST_MAX_BYTES;

/// The memory of a server.
#[derive(Debug, Default)]
pub struct PartsMemory {
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    hosts: BTreeMap<String, u64>,
    unlisted_bytes: u64,
}

impl PartsMemory {
    /// Room for a record of a host, given back when it is dropped. `None`: there is none.
    pub(super) fn take(
        self: &Arc<Self>,
        host: &str,
        is_listed: bool,
        bytes: u64,
    ) -> Option<PartsRoom> {
        // A certificate speaks for its host in any case of letters.
        let host = host.to_ascii_lowercase();
        let mut state = self.lock();
        let of_host = state.hosts.get(&host).copied().unwrap_or(0) + bytes;
        let free = UNLISTED_MAX_BYTES - state.unlisted_bytes;
        let most = if is_listed { PER_HOST_MAX_BYTES } else { PER_HOST_MAX_BYTES.min(free) };
        if of_host > most {
            return None;
        }
        state.hosts.insert(host.clone(), of_host);
        state.unlisted_bytes += if is_listed { 0 } else { bytes };
        drop(state);
        Some(PartsRoom { memory: Arc::clone(self), host, is_listed, bytes })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Room for one record.
#[derive(Debug)]
pub(super) struct PartsRoom {
    memory: Arc<PartsMemory>,
    host: String,
    is_listed: bool,
    bytes: u64,
}

impl Drop for PartsRoom {
    fn drop(&mut self) {
        let mut state = self.memory.lock();
        state.unlisted_bytes -= if self.is_listed { 0 } else { self.bytes };
        let Some(of_host) = state.hosts.get_mut(&self.host) else { return };
        *of_host -= self.bytes;
        if *of_host == 0 {
            state.hosts.remove(&self.host);
        }
    }
}

/// The parts of one writer's next record that have arrived, with their room.
#[derive(Debug, Default)]
pub(super) struct Gathered {
    gathering: Gathering,
    /// Is there as long as bytes are.
    room: Option<PartsRoom>,
}

/// Why a part is not taken.
#[derive(Debug)]
pub(super) enum PartRefusal {
    /// It is not the next one, or the record is damaged.
    Part(PartError),
    /// There is no room for the record.
    NoRoom,
}

impl Gathered {
    pub(super) fn attached(&mut self, run: RunId, received: Seq) {
        self.gathering.attached(run, received);
        self.settle();
    }

    pub(super) fn begun(&self) -> Option<PartialRecord> {
        self.gathering.begun()
    }

    /// Takes a part of the record after `received`. Returns the record when it is whole.
    pub(super) fn add(
        &mut self,
        received: Seq,
        part: &Part,
        take_room: impl FnOnce(u64) -> Option<PartsRoom>,
    ) -> Result<Option<Record>, PartRefusal> {
        if part.at == 0 && part.seq == received.next() {
            // A record that is replaced gives its room back first.
            self.gathering.clear();
            self.room = None;
            let room = take_room(part.total_bytes.into()).ok_or(PartRefusal::NoRoom)?;
            self.room = Some(room);
        }
        let taken = self.gathering.add(received, part).map_err(PartRefusal::Part);
        self.settle();
        taken
    }

    fn settle(&mut self) {
        if self.gathering.begun().is_none() {
            self.room = None;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LONGEST: u64 = limits::RECORD_MAX_BYTES as u64;

    fn all_of(memory: &Arc<PartsMemory>, host: &str, is_listed: bool) -> Vec<PartsRoom> {
        std::iter::from_fn(|| memory.take(host, is_listed, LONGEST)).collect()
    }

    #[test]
    fn a_host_has_its_share_and_gives_it_back() {
        let memory = Arc::new(PartsMemory::default());
        let rooms = all_of(&memory, "host-a", true);
        assert_eq!(rooms.len() as u64, PER_HOST_MAX_BYTES / LONGEST);
        for spelling in ["host-a", "Host-A"] {
            assert!(
                memory.take(spelling, true, 1).is_none()
                    && memory.take(spelling, false, 1).is_none()
            );
        }
        drop(rooms);
        assert!(memory.lock().hosts.is_empty());
        assert_eq!(all_of(&memory, "host-a", true).len() as u64, PER_HOST_MAX_BYTES / LONGEST);
    }

    #[test]
    fn hosts_of_groups_that_are_not_listed_take_no_room_from_others() {
        let memory = Arc::new(PartsMemory::default());
        let hogs: Vec<_> = (0..5).map(|n| all_of(&memory, &format!("hog-{n}"), false)).collect();
        let total: u64 = hogs.iter().flatten().map(|room| room.bytes).sum();
        assert!(total <= UNLISTED_MAX_BYTES);
        assert_eq!(all_of(&memory, "listed", true).len() as u64, PER_HOST_MAX_BYTES / LONGEST);
        assert!(memory.take("quiet", false, LONGEST).is_some(), "who has little finds room");
        drop(hogs);
        assert_eq!(memory.lock().unlisted_bytes, 0);
    }
}
