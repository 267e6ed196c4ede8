//! Who needs the images to stay where they are.
//!
//! Invariant: a fold does not pass the position of any hold that is not revoked. A hold is revoked
//! before the fold may pass it, so whoever finds it unrevoked after reading has read the state that
//! it holds.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tidelock_protocol::hlc::Hlc;
use tidelock_store::journal::Position;

/// Beginning of the reason of a pin's hold; the pin's name follows.
pub const PIN: &str = "pin ";

#[derive(Debug)]
struct Entry {
    position: Position,
    hlc: Hlc,
    why: String,
    revoked: Arc<AtomicBool>,
}

#[derive(Debug, Default)]
struct Held {
    last: u64,
    entries: BTreeMap<u64, Entry>,
}

/// All holds of a group.
#[derive(Clone, Debug, Default)]
pub struct Holds(Arc<Mutex<Held>>);

/// One hold, until it is dropped.
#[derive(Debug)]
pub struct Hold {
    of: Holds,
    id: u64,
    revoked: Arc<AtomicBool>,
}

impl Holds {
    fn lock(&self) -> MutexGuard<'_, Held> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The fold does not pass this position, and this time can be asked for.
    pub(crate) fn hold(&self, position: Position, hlc: Hlc, why: &str) -> Hold {
        let revoked = Arc::new(AtomicBool::new(false));
        let mut held = self.lock();
        held.last += 1;
        let id = held.last;
        let why = why.to_owned();
        held.entries.insert(id, Entry { position, hlc, why, revoked: Arc::clone(&revoked) });
        drop(held);
        Hold { of: self.clone(), id, revoked }
    }

    /// The least position and the least time that are held.
    #[must_use]
    pub fn least(&self) -> Option<(Position, Hlc)> {
        let held = self.lock();
        let position = held.entries.values().map(|entry| entry.position).min()?;
        let hlc = held.entries.values().map(|entry| entry.hlc).min()?;
        Some((position, hlc))
    }

    /// How many there are.
    #[must_use]
    pub fn count(&self) -> usize {
        self.lock().entries.len()
    }

    /// Takes away those that hold the least position, and says what they were for.
    pub(crate) fn revoke_least(&self) -> Vec<String> {
        let mut held = self.lock();
        let Some(least) = held.entries.values().map(|entry| entry.position).min() else {
            return Vec::new();
        };
        let of_least: Vec<u64> = held
            .entries
            .iter()
            .filter(|(_, entry)| entry.position == least)
            .map(|(id, _)| *id)
            .collect();
        let entries = of_least.into_iter().filter_map(|id| held.entries.remove(&id));
        entries.map(Self::revoke).collect()
    }

    /// Takes all away. Whether there was any.
    pub(crate) fn revoke_all(&self) -> bool {
        let all = std::mem::take(&mut self.lock().entries);
        let any = !all.is_empty();
        for (_, entry) in all {
            Self::revoke(entry);
        }
        any
    }

    /// The same of all that are not pins.
    pub(crate) fn revoke_all_but_pins(&self) -> bool {
        let mut held = self.lock();
        let all = std::mem::take(&mut held.entries);
        let (pins, others): (BTreeMap<_, _>, BTreeMap<_, _>) =
            all.into_iter().partition(|(_, entry)| entry.why.starts_with(PIN));
        held.entries = pins;
        let any = !others.is_empty();
        for (_, entry) in others {
            Self::revoke(entry);
        }
        any
    }

    fn revoke(entry: Entry) -> String {
        entry.revoked.store(true, Ordering::Release);
        entry.why
    }
}

impl Hold {
    /// Whether it was taken away, because the journal had reached its size.
    #[must_use]
    pub fn is_revoked(&self) -> bool {
        self.revoked.load(Ordering::Acquire)
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        self.of.lock().entries.remove(&self.id);
    }
}
