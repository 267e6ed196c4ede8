//! A member's activity log as a file in the state directory: what a start finds there, and what it puts there before
//! anything is admitted.
//!
//! Fails closed: a log that can be neither kept nor removed ends the start, because a stale one would be believed later.

use super::format::{self, Found, Identity, Unusable};
use super::{ActivityLog, FileChange, Geometry, LastEnd, Opening, open};
use std::io::{self, IoSlice};
use std::path::PathBuf;
use tidelock_protocol::ids::Incarnation;
use tidelock_storage::{Storage, StorageFile, forget, join, read_all, replace};

/// The place of a member's log.
#[derive(Clone, Debug)]
pub struct LogPlace<S> {
    storage: S,
    dir: String,
    name: String,
}

impl<S: Storage> LogPlace<S> {
    /// The log of a member, in the state directory of its host.
    pub fn new(state_dir: S, group: &str, member: &str) -> Self {
        Self { storage: state_dir, dir: group.to_owned(), name: format!("{member}.activity") }
    }

    /// The path, for people.
    #[must_use]
    pub fn path(&self) -> PathBuf {
        self.storage.display_path(&self.file())
    }

    /// The file's path in the state directory.
    #[must_use]
    pub fn file(&self) -> String {
        join(&self.dir, &self.name)
    }

    /// The log that a run has left.
    pub fn read(&self, identity: &Identity) -> Result<Found, Unusable> {
        match read_all(&self.storage, &self.file()) {
            Ok(Some(bytes)) => format::read(&bytes, identity),
            Ok(None) => Err(Unusable::Missing),
            Err(error) => Err(Unusable::Unreadable(error.to_string())),
        }
    }

    /// Opens the log for this run, or makes a new one; without a geometry none is kept. What is written says of no run but
    /// those before: that this one is in force comes with the backup's answer.
    pub fn open(
        &self,
        found: Result<Found, Unusable>,
        geometry: Option<Geometry>,
        identity: &Identity,
        run: Incarnation,
        last_end: LastEnd,
    ) -> io::Result<ActivityLog> {
        let Some(geometry) = geometry else {
            self.remove()?;
            return Ok(ActivityLog::off());
        };
        let Opening { log, change, .. } = open(found, geometry, identity, run, last_end);
        match change {
            FileChange::Replace(bytes) => replace(&self.storage, &self.dir, &self.name, &bytes)?,
            FileChange::Append { offset, block } => {
                let file = self.storage.open(&self.file())?;
                file.write_at(&[IoSlice::new(&block)], offset)?;
                file.sync()?;
            }
        }
        Ok(log)
    }

    /// Removes the file durably, if there is one.
    pub fn remove(&self) -> io::Result<()> {
        forget(&self.storage, &self.dir, &self.name)
    }
}
