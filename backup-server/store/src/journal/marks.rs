//! Bookmarks and pins: names for points in time.
//!
//! A **bookmark** is a name, and lives as long as its point: when the window has left it behind, it is gone. A
//! **pin** also holds its point, so that the window's end does not pass it (Retroscope 3: snapshots that outlive the
//! window-log). Either may expire.
//!
//! Every checkpoint has all of them, so their bytes are bounded together.

use super::{Point, StateError};
use serde::{Deserialize, Serialize, Serializer};
use std::collections::BTreeMap;
use std::ops::Deref;
use tidelock_protocol::bounds::is_name;

/// Most bytes of a group's marks in a checkpoint: thousands of a group of three writers, hundreds of one of 64.
pub const MARKS_MAX_BYTES: usize = 384 << 10;

/// Effect of a mark on its point.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MarkKind {
    /// A name of the point.
    Bookmark,
    /// A name of the point that holds it.
    Pin,
}

impl MarkKind {
    /// In sentences.
    #[must_use]
    pub fn word(self) -> &'static str {
        match self {
            MarkKind::Bookmark => "bookmark",
            MarkKind::Pin => "pin",
        }
    }
}

/// A request of a host, not of this server's own command line.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostRequest {
    /// The host.
    pub host: String,
    /// Number of the request, by the host.
    pub id: u64,
}

/// A bookmark or pin.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Mark {
    /// Bookmark or pin.
    pub kind: MarkKind,
    /// The point that it names.
    pub point: Point,
    /// Time at which it was set, in milliseconds since the Unix epoch.
    pub set_at_unix_ms: u64,
    /// Time at which it goes by itself, in milliseconds since the Unix epoch.
    pub expires_at_unix_ms: Option<u64>,
    /// The host that has asked for it; `None`: this server's command line has.
    pub asked_by: Option<HostRequest>,
}

impl Mark {
    /// True if this is what a host has asked for and asks for again.
    #[must_use]
    pub fn is_same_request(&self, other: &Mark) -> bool {
        self.kind == other.kind && self.asked_by.is_some() && self.asked_by == other.asked_by
    }

    /// True if its time is over.
    #[must_use]
    pub fn is_expired(&self, now_unix_ms: u64) -> bool {
        self.expires_at_unix_ms.is_some_and(|at| at <= now_unix_ms)
    }
}

/// Marks of a group by name, within their bounds.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(try_from = "BTreeMap<String, Mark>")]
pub struct Marks {
    by_name: BTreeMap<String, Mark>,
    /// Bytes of all of them.
    bytes: usize,
}

impl Marks {
    /// Sets a mark, and moves one of this name.
    pub(super) fn set(&mut self, name: &str, mark: &Mark) -> Result<(), StateError> {
        if !is_name(name) || mark.asked_by.as_ref().is_some_and(|of| !is_name(&of.host)) {
            return Err(StateError::Marks);
        }
        let moved = self.by_name.get(name).map_or(0, |old| bytes_of(name, old));
        let bytes = self.bytes - moved + bytes_of(name, mark);
        if bytes > MARKS_MAX_BYTES {
            return Err(StateError::Marks);
        }
        self.bytes = bytes;
        self.by_name.insert(name.to_owned(), mark.clone());
        Ok(())
    }

    pub(super) fn remove(&mut self, name: &str) {
        if let Some(mark) = self.by_name.remove(name) {
            self.bytes -= bytes_of(name, &mark);
        }
    }
}

impl Deref for Marks {
    type Target = BTreeMap<String, Mark>;

    fn deref(&self) -> &Self::Target {
        &self.by_name
    }
}

impl Serialize for Marks {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        self.by_name.serialize(serializer)
    }
}

impl TryFrom<BTreeMap<String, Mark>> for Marks {
    type Error = StateError;

    fn try_from(by_name: BTreeMap<String, Mark>) -> Result<Self, StateError> {
        let mut marks = Self::default();
        by_name.iter().try_for_each(|(name, mark)| marks.set(name, mark))?;
        Ok(marks)
    }
}

fn bytes_of(name: &str, mark: &Mark) -> usize {
    postcard::to_stdvec(&(name, mark)).expect("plain data").len()
}
