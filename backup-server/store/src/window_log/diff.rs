//! What leads from one state of a store to another one.

use super::entry::Change;
use bytes::Bytes;
use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use tidelock_protocol::hlc::Hlc;

/// An item's value; `None`: it is not there.
pub type Value = Option<Bytes>;

/// The items that differ between two states, with their values in the second.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Diff {
    /// The time of the first state.
    pub from: Hlc,
    /// The time of the second.
    pub to: Hlc,
    /// By key.
    pub changes: BTreeMap<Bytes, Value>,
}

impl Diff {
    /// Makes the first state the second.
    pub fn apply(&self, state: &mut BTreeMap<Vec<u8>, Vec<u8>>) {
        for (key, value) in &self.changes {
            match value {
                Some(value) => drop(state.insert(key.to_vec(), value.to_vec())),
                None => drop(state.remove(&key[..])),
            }
        }
    }
}

/// Changes of a span of time as they come: of each key the value before the first and after the last.
#[derive(Debug, Default)]
pub(super) struct Span(BTreeMap<Bytes, (Value, Value)>);

impl Span {
    pub(super) fn push(&mut self, change: Change) {
        let Change { key, old, new } = change;
        match self.0.entry(key) {
            Entry::Vacant(entry) => drop(entry.insert((old, new))),
            Entry::Occupied(mut entry) => entry.get_mut().1 = new,
        }
    }

    pub(super) fn into_diff(self, from: Hlc, to: Hlc) -> Diff {
        let differing = self.0.into_iter().filter(|(_, (before, after))| before != after);
        let changes = differing
            .map(|(key, (before, after))| (key, if from <= to { after } else { before }))
            .collect();
        Diff { from, to, changes }
    }
}
