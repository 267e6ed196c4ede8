//! A member's activity log as a file in the state directory: what a start finds there, and what it
//! puts there before anything is admitted.
//!
//! Fails closed: a log that can be neither kept nor removed ends the start, because a stale one would
//! be believed later.

use crate::activity::{
    self, ActivityLog, FileChange, Geometry, Identity, LastEnd, Opening, Unusable, format,
};
use crate::config::ActivitySettings;
use crate::driver::LogFile;
use crate::durable;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use tidelock_protocol::ids::Incarnation;
use tidelock_protocol::message::LogAge;
use tidelock_uring::{FileError, LocalFile, OpenRequest};

/// Why the log cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum LogError {
    /// The file cannot be written.
    #[error(
        "cannot keep the activity log in {path}: {source}; make room or mend the disk, or set \
         `enabled = false` in [group.activity_log] (then all is compared after a crash)"
    )]
    Io {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The file cannot be opened.
    #[error(transparent)]
    Open(#[from] FileError),
}

/// What a log is opened with.
pub(super) struct OpenLog {
    pub(super) path: PathBuf,
    pub(super) settings: Option<ActivitySettings>,
    pub(super) identity: Identity,
}

/// A log that is open.
pub(super) struct OpenedLog {
    pub(super) log: ActivityLog,
    pub(super) file: Option<LogFile>,
    /// How far it is; `None`: it says nothing about the disks.
    pub(super) age: Option<LogAge>,
    /// The run that it is of.
    pub(super) of: Option<Incarnation>,
}

/// Slots that each transaction repeats.
const CONTEXT: u16 = activity::geometry::CONTEXT_MAX;

impl OpenLog {
    /// Opens the log for this run, or makes a new one. What is written says of no run but those before: that this one is
    /// in force comes with the backup's answer.
    pub(super) fn open(self, run: Incarnation, last_end: LastEnd) -> Result<OpenedLog, LogError> {
        let Some(ActivitySettings { extent, slots }) = self.settings else {
            durable::remove(&self.path).map_err(|source| self.failed(source))?;
            return Ok(OpenedLog { log: ActivityLog::off(), file: None, age: None, of: None });
        };
        let extent_bytes = u32::try_from(extent.bytes).expect("checked with the configuration");
        let geometry = Geometry { extent_bytes, slots, context: CONTEXT };
        let found = read(&self.path, &self.identity);
        let Opening { log, change, .. } =
            activity::open(found, geometry, &self.identity, run, last_end);
        match change {
            FileChange::Replace(bytes) => durable::replace(&self.path, &bytes),
            FileChange::Append { offset, block } => durable::write_at(&self.path, offset, &block),
        }
        .map_err(|source| self.failed(source))?;
        let file = LocalFile::open(&self.path, &OpenRequest::default())?;
        let (age, of) = (log.is_believed().then(|| log.age()), log.confirmed());
        Ok(OpenedLog { log, file: Some(LogFile { file, path: self.path }), age, of })
    }

    fn failed(&self, source: io::Error) -> LogError {
        LogError::Io { path: self.path.clone(), source }
    }
}

fn read(path: &Path, identity: &Identity) -> Result<format::Found, Unusable> {
    if !path.exists() {
        return Err(Unusable::Missing);
    }
    // A daemon that was killed may have a write under way: the kernel ends it, and lets go of the
    // lock then.
    let locked = LocalFile::open(path, &OpenRequest::default());
    let read = locked
        .map_err(|error| error.to_string())
        .and_then(|_locked| fs::read(path).map_err(|error| error.to_string()));
    format::read(&read.map_err(Unusable::Unreadable)?, identity)
}
