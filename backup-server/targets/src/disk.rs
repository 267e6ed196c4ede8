//! A disk that a machine is given.

use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// A disk that can be connected to.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExportedDisk {
    /// `member.disk`, also the export's name.
    pub name: String,
    /// Its size.
    pub size_bytes: u64,
    /// The NBD socket.
    pub socket: PathBuf,
}

impl ExportedDisk {
    /// What NBD clients take.
    #[must_use]
    pub fn uri(&self) -> String {
        format!("nbd+unix:///{}?socket={}", self.name, self.socket.display())
    }
}
