//! Small files of JSON, each replaced as a whole. Each says in `format` which version it is.

use crate::{Storage, is_full, read_all, replace};
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::io;
use thiserror::Error;

/// An error of a small file.
#[derive(Debug, Error)]
pub enum FileError {
    /// The file cannot be read or written.
    #[error("cannot {what} {file}: {source}")]
    Io {
        /// The operation, as a verb.
        what: &'static str,
        /// The file's name.
        file: String,
        /// The cause.
        source: io::Error,
    },
    /// The content is not what this program writes.
    #[error("{file} is damaged: {reason}")]
    Content {
        /// The file's name.
        file: String,
        /// The cause.
        reason: String,
    },
    /// The file is of a newer version.
    #[error("{file} has format {found}, this program knows {known}: use a newer one")]
    Version {
        /// The file's name.
        file: String,
        /// The format of the file.
        found: u32,
        /// The format of this program.
        known: u32,
    },
}

impl FileError {
    /// True if there is no room, which can get better.
    #[must_use]
    pub fn is_full(&self) -> bool {
        matches!(self, Self::Io { source, .. } if is_full(source))
    }
}

/// Reads a file of this format. `None`: there is none.
pub fn read<S: Storage, T: DeserializeOwned>(
    storage: &S,
    file: &str,
    known: u32,
) -> Result<Option<T>, FileError> {
    let bytes = read_all(storage, file).map_err(|source| FileError::Io {
        what: "read",
        file: file.to_owned(),
        source,
    })?;
    let Some(bytes) = bytes else { return Ok(None) };
    let damaged =
        |e: serde_json::Error| FileError::Content { file: file.to_owned(), reason: e.to_string() };
    // The format comes first: what a newer one means by its other fields is not known.
    let value: serde_json::Value = serde_json::from_slice(&bytes).map_err(damaged)?;
    let format = value.get("format").and_then(serde_json::Value::as_u64).unwrap_or(0);
    if format != u64::from(known) {
        let found = u32::try_from(format).unwrap_or(u32::MAX);
        return Err(FileError::Version { file: file.to_owned(), found, known });
    }
    serde_json::from_value(value).map(Some).map_err(damaged)
}

/// Replaces a file, durably.
pub fn write<S: Storage, T: Serialize>(
    storage: &S,
    dir: &str,
    file: &str,
    value: &T,
) -> Result<(), FileError> {
    let mut text = serde_json::to_vec_pretty(value).expect("plain data");
    text.push(b'\n');
    replace(storage, dir, file, &text).map_err(|source| FileError::Io {
        what: "write",
        file: file.to_owned(),
        source,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::Memory;

    #[test]
    fn a_file_survives_a_crash_and_a_newer_one_is_refused() {
        let disk = Memory::new();
        let content = serde_json::json!({ "format": 1, "name": "vm" });
        assert!(read::<_, serde_json::Value>(&disk, "f.json", 1).unwrap().is_none());
        write(&disk, "", "f.json", &content).unwrap();
        let after = disk.crash(&mut || false);
        assert_eq!(read(&after, "f.json", 1).unwrap(), Some(content));
        let error = read::<_, serde_json::Value>(&disk, "f.json", 2).unwrap_err();
        assert!(matches!(error, FileError::Version { found: 1, known: 2, .. }), "{error}");
        replace(&disk, "", "f.json", b"{").unwrap();
        let error = read::<_, serde_json::Value>(&disk, "f.json", 1).unwrap_err();
        assert!(matches!(error, FileError::Content { .. }), "{error}");
    }
}
