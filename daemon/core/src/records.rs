//! Records of a group in the state directory: since when it is degraded, that it was switched over, and that it waits to be
//! adopted.
//!
//! Their names are no member's: those begin with a letter or digit.

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use std::io;
use std::path::PathBuf;
use tidelock_planted::{Bug, is};
use tidelock_protocol::ids::Epoch;
use tidelock_storage::json::{self, FileError};
use tidelock_storage::{Storage, create_dirs, forget, join};

/// The version of all files.
const FORMAT: u32 = 1;

const DEGRADED: &str = "_degraded.json";
const SWITCHED: &str = "_switched.json";
const ADOPTING: &str = "_adopting.json";

/// The record of a degraded group. It is written before the gate opens and removed when that is over, so a run that is
/// killed in between does not make anybody forget.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Degraded {
    format: u32,
    since_unix_ms: u64,
}

/// The record of a switch.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Switched {
    format: u32,
    epoch: Epoch,
    at_unix_ms: u64,
}

/// The record of a group whose disks are elsewhere still.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Adopting {
    format: u32,
    prepared_unix_ms: u64,
}

/// The records of one group.
#[derive(Clone, Debug)]
pub struct Records<S> {
    storage: S,
    dir: String,
}

impl<S: Storage> Records<S> {
    /// The records of a group, in the state directory of its host.
    pub fn new(state_dir: S, group: &str) -> Self {
        Self { storage: state_dir, dir: group.to_owned() }
    }

    /// Since when the group is degraded, by the wall clock, as a run before has put on record. A record that cannot be
    /// read was written when the gate was open, so it has been since some time.
    pub fn degraded_since_unix_ms(&self) -> Option<u64> {
        let record = self.read(DEGRADED).unwrap_or_else(|error| {
            tracing::error!(
                path = %self.path(DEGRADED).display(), %error,
                "since when the group is degraded cannot be read; it is taken to be so until all is covered"
            );
            Some(Degraded { format: FORMAT, since_unix_ms: 0 })
        });
        record.map(|record| record.since_unix_ms)
    }

    /// The time by the wall clock at which a run before has switched the group over. A record that cannot be read was written when
    /// the gate was shut for good.
    pub fn switched_at_unix_ms(&self) -> Option<u64> {
        if is(Bug::SwitchForgotten) {
            return None;
        }
        let record = self.read(SWITCHED).unwrap_or_else(|error| {
            tracing::error!(
                path = %self.path(SWITCHED).display(), %error,
                "the record of a switch cannot be read: the group stays shut here"
            );
            Some(Switched { format: FORMAT, epoch: Epoch(0), at_unix_ms: 0 })
        });
        record.map(|record| record.at_unix_ms)
    }

    /// True if the disks of the group are elsewhere still. A record that cannot be read was written before they were here.
    pub fn is_adopting(&self) -> bool {
        let record = self.read::<Adopting>(ADOPTING);
        let is_adopting = record.as_ref().map_or(true, Option::is_some);
        if let Err(error) = record {
            tracing::error!(
                path = %self.path(ADOPTING).display(), %error,
                "whether the group waits to be adopted cannot be read: it does"
            );
        }
        is_adopting
    }

    /// Clients may see what a disaster undoes, since this time.
    pub fn keep_degraded(&self, since_unix_ms: u64) -> io::Result<()> {
        self.keep(DEGRADED, &Degraded { format: FORMAT, since_unix_ms })
    }

    /// Clients see nothing any more that a disaster undoes.
    pub fn forget_degraded(&self) -> io::Result<()> {
        self.forget(DEGRADED)
    }

    /// The group was switched over in this epoch.
    pub fn keep_switched(&self, epoch: Epoch, at_unix_ms: u64) -> io::Result<()> {
        self.keep(SWITCHED, &Switched { format: FORMAT, epoch, at_unix_ms })
    }

    /// The disks of the group are elsewhere.
    pub fn keep_adopting(&self, prepared_unix_ms: u64) -> io::Result<()> {
        self.keep(ADOPTING, &Adopting { format: FORMAT, prepared_unix_ms })
    }

    /// The disks are here, for good.
    pub fn forget_adopting(&self) -> io::Result<()> {
        self.forget(ADOPTING)
    }

    /// The directory of the group's state, for people.
    pub fn dir(&self) -> PathBuf {
        self.storage.display_path(&self.dir)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.storage.display_path(&join(&self.dir, name))
    }

    fn read<R: DeserializeOwned>(&self, name: &str) -> Result<Option<R>, FileError> {
        json::read(&self.storage, &join(&self.dir, name), FORMAT)
    }

    fn keep(&self, name: &str, record: &impl Serialize) -> io::Result<()> {
        create_dirs(&self.storage, &self.dir).map_err(|error| self.at(name, &error))?;
        json::write(&self.storage, &self.dir, name, record).map_err(|error| match error {
            FileError::Io { source, .. } => self.at(name, &source),
            other => io::Error::other(other),
        })
    }

    fn forget(&self, name: &str) -> io::Result<()> {
        forget(&self.storage, &self.dir, name).map_err(|error| self.at(name, &error))
    }

    fn at(&self, name: &str, error: &io::Error) -> io::Error {
        io::Error::new(error.kind(), format!("{}: {error}", self.path(name).display()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tidelock_storage::memory::Memory;
    use tidelock_storage::replace;

    #[test]
    fn the_next_run_finds_what_is_on_record() {
        let disk = Memory::new();
        let records = Records::new(disk.clone(), "shop");
        assert_eq!(records.degraded_since_unix_ms(), None);
        assert_eq!(records.switched_at_unix_ms(), None);
        assert!(!records.is_adopting());
        records.keep_degraded(1_800_000_000_123).unwrap();
        records.keep_switched(Epoch(3), 1_800_000_000_456).unwrap();
        records.keep_adopting(7).unwrap();
        let records = Records::new(disk.crash(&mut || false), "shop");
        assert_eq!(records.degraded_since_unix_ms(), Some(1_800_000_000_123));
        assert_eq!(records.switched_at_unix_ms(), Some(1_800_000_000_456));
        assert!(records.is_adopting());
        records.forget_degraded().unwrap();
        records.forget_degraded().unwrap();
        records.forget_adopting().unwrap();
        assert_eq!(records.degraded_since_unix_ms(), None);
        assert!(!records.is_adopting());
    }

    #[test]
    fn a_record_that_cannot_be_read_counts_as_one_of_the_worst() {
        let disk = Memory::new();
        let records = Records::new(disk.clone(), "shop");
        records.keep_degraded(7).unwrap();
        let put =
            |name: &str, content: &str| replace(&disk, "shop", name, content.as_bytes()).unwrap();
        let newer = r#"{"format": 2, "epoch": 1, "since_unix_ms": 7, "at_unix_ms": 7, "prepared_unix_ms": 7}"#;
        for content in [newer, "", "{}"] {
            [DEGRADED, SWITCHED, ADOPTING].iter().for_each(|name| put(name, content));
            assert_eq!(records.degraded_since_unix_ms(), Some(0), "{content}");
            assert_eq!(records.switched_at_unix_ms(), Some(0), "{content}");
            assert!(records.is_adopting(), "{content}");
        }
        // Files of format 1.
        put(DEGRADED, r#"{"format": 1, "since_unix_ms": 7}"#);
        put(SWITCHED, r#"{"format": 1, "epoch": 3, "at_unix_ms": 8}"#);
        let found = (records.degraded_since_unix_ms(), records.switched_at_unix_ms());
        assert_eq!(found, (Some(7), Some(8)));
    }
}
