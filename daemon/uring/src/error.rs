//! Errors: a stable kind, a context, a source, and what to do about it.

use std::io;
use std::path::PathBuf;

/// Why no ring could be made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RingErrorKind {
    /// The system forbids io_uring: a sysctl, or a seccomp filter such as a container's.
    Disabled,
    /// The kernel lacks something that is needed.
    KernelTooOld,
    /// The limit for locked memory or open files does not allow a ring of this size.
    Limit,
    /// Anything else that the kernel said.
    Os,
}

/// A ring could not be made.
#[derive(Debug, thiserror::Error)]
#[error("cannot set up io_uring: {context}")]
pub struct RingError {
    /// Stable kind.
    pub kind: RingErrorKind,
    /// What happened and what to do, for the user.
    pub context: String,
    /// What the kernel said.
    #[source]
    pub source: io::Error,
}

/// Why a local file cannot serve as a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FileErrorKind {
    /// There is no such file.
    NotFound,
    /// The file may not be opened for reading and writing.
    Permission,
    /// Neither a regular file nor a block device.
    NotADisk,
    /// Another process uses the file.
    InUse,
    /// The size is not what was configured.
    WrongSize,
    /// It is not a raw image.
    WrongFormat,
    /// Anything else that the kernel said.
    Os,
}

/// A local file cannot serve as a disk.
#[derive(Debug, thiserror::Error)]
#[error("{}: {context}", path.display())]
pub struct FileError {
    /// Stable kind.
    pub kind: FileErrorKind,
    /// The file.
    pub path: PathBuf,
    /// What happened and what to do, for the user.
    pub context: String,
    /// What the kernel said.
    #[source]
    pub source: io::Error,
}
