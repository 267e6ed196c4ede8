//! Records of a group in the state directory: since when it is degraded, and that it was switched over.
//!
//! Their names are no member's: those begin with a letter or digit.

use crate::config::{Config, Group};
use crate::durable;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use tidelock_protocol::ids::Epoch;

/// The version of both files.
const FORMAT: u32 = 1;

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

/// The records of one group.
#[derive(Debug)]
pub(super) struct Records {
    degraded: PathBuf,
    switched: PathBuf,
}

impl Records {
    /// The records of this group.
    pub(super) fn of(config: &Config, group: &Group) -> Self {
        let directory = config.host.state_dir.join(group.name.as_str());
        Self {
            degraded: directory.join("_degraded.json"),
            switched: directory.join("_switched.json"),
        }
    }

    /// Since when the group is degraded, by the wall clock, as a run before has put on record. A record that cannot be
    /// read was written when the gate was open, so it has been since some time.
    pub(super) fn degraded_since_unix_ms(&self) -> Option<u64> {
        found(&self.degraded, |record: &Degraded| (record.format, record.since_unix_ms))
            .unwrap_or_else(|error| {
                tracing::error!(
                    path = %self.degraded.display(), %error,
                    "since when the group is degraded cannot be read; it is taken to be so until all is covered"
                );
                Some(0)
            })
    }

    /// The time by the wall clock at which a run before has switched the group over. A record that cannot be read was written when
    /// the gate was shut for good.
    pub(super) fn switched_at_unix_ms(&self) -> Option<u64> {
        found(&self.switched, |record: &Switched| (record.format, record.at_unix_ms))
            .unwrap_or_else(|error| {
                tracing::error!(
                    path = %self.switched.display(), %error,
                    "the record of a switch cannot be read: the group stays shut here"
                );
                Some(0)
            })
    }

    /// Clients may see what a disaster undoes, since this time.
    pub(super) fn keep_degraded(&self, since_unix_ms: u64) -> io::Result<()> {
        let record = Degraded { format: FORMAT, since_unix_ms };
        keep(&self.degraded, &record)
    }

    /// That is over.
    pub(super) fn forget_degraded(&self) -> io::Result<()> {
        durable::remove(&self.degraded).map_err(|error| at(&self.degraded, &error))
    }

    /// The group was switched over in this epoch.
    pub(super) fn keep_switched(&self, epoch: Epoch, at_unix_ms: u64) -> io::Result<()> {
        keep(&self.switched, &Switched { format: FORMAT, epoch, at_unix_ms })
    }
}

/// True if this host has handed the group to the backup site.
pub(crate) fn switched_over(config: &Config, group: &Group) -> bool {
    Records::of(config, group).switched.exists()
}

/// `read`: the format and the time of a record.
fn found<R: DeserializeOwned>(
    path: &Path,
    read: impl Fn(&R) -> (u32, u64),
) -> io::Result<Option<u64>> {
    let bytes = match fs::read(path) {
        Ok(bytes) => bytes,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error),
    };
    match read(&serde_json::from_slice(&bytes)?) {
        (FORMAT, at) => Ok(Some(at)),
        (found, _) => Err(io::Error::other(format!("format {found}, this daemon knows {FORMAT}"))),
    }
}

fn keep(path: &Path, record: &impl Serialize) -> io::Result<()> {
    let bytes = serde_json::to_vec_pretty(record).expect("plain data");
    durable::replace(path, &bytes).map_err(|error| at(path, &error))
}

fn at(path: &Path, error: &io::Error) -> io::Error {
    io::Error::new(error.kind(), format!("{}: {error}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn records(dir: &Path) -> Records {
        Records {
            degraded: dir.join("shop/_degraded.json"),
            switched: dir.join("shop/_switched.json"),
        }
    }

    #[test]
    fn the_next_run_finds_what_is_on_record() {
        let dir = tempfile::tempdir().unwrap();
        let records = records(dir.path());
        assert_eq!(records.degraded_since_unix_ms(), None);
        assert_eq!(records.switched_at_unix_ms(), None);
        records.keep_degraded(1_800_000_000_123).unwrap();
        records.keep_switched(Epoch(3), 1_800_000_000_456).unwrap();
        assert_eq!(records.degraded_since_unix_ms(), Some(1_800_000_000_123));
        assert_eq!(records.switched_at_unix_ms(), Some(1_800_000_000_456));
        records.forget_degraded().unwrap();
        records.forget_degraded().unwrap();
        assert_eq!(records.degraded_since_unix_ms(), None);
    }

    #[test]
    fn a_record_that_cannot_be_read_counts_as_one_of_the_worst() {
        let dir = tempfile::tempdir().unwrap();
        let records = records(dir.path());
        records.keep_degraded(7).unwrap();
        records.keep_switched(Epoch(3), 7).unwrap();
        for content in
            [r#"{"format": 2, "epoch": 1, "since_unix_ms": 7, "at_unix_ms": 7}"#, "", "{}"]
        {
            fs::write(&records.degraded, content).unwrap();
            fs::write(&records.switched, content).unwrap();
            assert_eq!(records.degraded_since_unix_ms(), Some(0), "{content}");
            assert_eq!(records.switched_at_unix_ms(), Some(0), "{content}");
        }
        // As format 1 was written.
        fs::write(&records.degraded, r#"{"format": 1, "since_unix_ms": 7}"#).unwrap();
        fs::write(&records.switched, r#"{"format": 1, "epoch": 3, "at_unix_ms": 8}"#).unwrap();
        let found = (records.degraded_since_unix_ms(), records.switched_at_unix_ms());
        assert_eq!(found, (Some(7), Some(8)));
    }
}
