//! Content of a data directory. Any of it may be old, damaged, or of something else, and is read as the user.

use super::control::Control;
use super::programs::LOOKS_WITHIN;
use super::{PostgresError, Result, Server};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::path::Path;
use tidelock_wal::Lsn;

/// Part of `backup_manifest` in which the ranges of the log are.
const MANIFEST_END_BYTES: &str = "4096";

/// The role in which a data directory starts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Role {
    /// Follows the log that it is given.
    Standby,
    /// Was promoted, and writes a log of its own.
    Primary,
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Standby => "standby",
            Self::Primary => "promoted server",
        })
    }
}

/// A data directory that fits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Data {
    pub control: Control,
    pub role: Role,
    /// Position that replay must have reached before it can be used.
    pub usable_from: Lsn,
    /// Begin of the segment of the log from which on it needs what it does not have itself.
    pub needs_from: Lsn,
}

impl Server {
    /// Looks at a data directory, and refuses one that does not fit.
    pub(super) async fn inspect(&self, data: &Path) -> Result<Data> {
        let dir = || data.to_owned();
        if self.run_on(&["test", "-d"], &[data]).await.is_err() {
            return Err(PostgresError::NoData { dir: dir() });
        }
        let damaged = |why: String| PostgresError::Damaged { dir: dir(), why };
        let version = self.run_on(&["head", "-c", "16"], &[&data.join("PG_VERSION")]).await;
        let version = version.map_err(|_| damaged("it has no PG_VERSION".into()))?;
        let (found, needed) = (version.trim(), self.expected.major);
        if found != needed.to_string() {
            let found = found.chars().filter(|c| !c.is_control()).collect();
            return Err(PostgresError::OtherVersion { dir: dir(), found, needed });
        }
        let mut command = self.command(self.program("pg_controldata"));
        command.arg(data);
        let text = self.run(command, LOOKS_WITHIN).await;
        let text = text.map_err(|error| match error {
            PostgresError::Failed { said, .. } => damaged(said),
            other => other,
        })?;
        let control = Control::parse(&text).map_err(damaged)?;
        if control.system != self.expected.system {
            let (found, needed) = (control.system, self.expected.system);
            return Err(PostgresError::OtherSystem { dir: dir(), found, needed });
        }
        let is_there = async |name: &str| self.run_on(&["test", "-e"], &[&data.join(name)]).await;
        let is_standby = is_there("standby.signal").await.is_ok();
        let role = if is_standby { Role::Standby } else { Role::Primary };
        if role == Role::Primary && control.state == "shut down in recovery" {
            return Err(damaged("its standby.signal is gone".into()));
        }
        let (mut usable_from, mut begin) = (control.min_recovery, control.redo);
        if is_there("backup_label").await.is_ok() {
            if role == Role::Primary {
                return Err(damaged("it is a copy that was never started, and no standby".into()));
            }
            let manifest = data.join("backup_manifest");
            let end = self.run_on(&["tail", "-c", MANIFEST_END_BYTES], &[&manifest]).await;
            let range = end.ok().as_deref().and_then(log_of_backup);
            let range = range.ok_or_else(|| damaged("its backup_manifest has no end".into()))?;
            (begin, usable_from) = (range.start, usable_from.max(range.end));
        }
        let needs_from = Lsn(begin.0 & !(control.segment_bytes - 1));
        Ok(Data { control, role, usable_from, needs_from })
    }
}

/// The log that a base backup needs, from the end of its manifest.
pub(super) fn log_of_backup(text: &str) -> Option<std::ops::Range<Lsn>> {
    #[derive(Deserialize)]
    struct Part {
        #[serde(rename = "Start-LSN")]
        start: String,
        #[serde(rename = "End-LSN")]
        end: String,
    }
    let (_, text) = text.rsplit_once("\"WAL-Ranges\":")?;
    let parts = serde_json::Deserializer::from_str(text).into_iter::<Vec<Part>>().next()?.ok()?;
    let all = |of: fn(&Part) -> &str| -> Option<Vec<Lsn>> {
        parts.iter().map(|part| of(part).parse().ok()).collect()
    };
    Some(all(|part| &part.start)?.into_iter().min()?..all(|part| &part.end)?.into_iter().max()?)
}
