//! Error numbers of the protocol. They look like Linux's, but are the protocol's own.

use std::io;

/// Why a request failed, as told to the client.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u32)]
pub enum Errno {
    /// The export is read-only.
    Perm = 1,
    /// The disk failed.
    Io = 5,
    /// Out of memory. The document asks servers to avoid it.
    NoMem = 12,
    /// The request breaks a rule.
    Inval = 22,
    /// A write beyond the end, or the disk is full.
    NoSpc = 28,
    /// A READ with DF is too long to be answered in one piece.
    Overflow = 75,
    /// A WRITE_ZEROES with FAST_ZERO would not be fast. Allowed for nothing else.
    NotSup = 95,
    /// The server is shutting down.
    Shutdown = 108,
}

impl Errno {
    /// The number on the wire.
    pub const fn number(self) -> u32 {
        self as u32
    }

    /// The protocol's number for a Linux error number of the disk.
    ///
    /// What the protocol has no number for becomes an I/O error, and so do `EOVERFLOW` and
    /// `ENOTSUP`: a server may send them in one documented case each, which only the caller
    /// knows ([`Errno::Overflow`], [`Errno::NotSup`]).
    pub const fn from_os(errno: i32) -> Self {
        match errno {
            // EPERM, EACCES, EROFS
            1 | 13 | 30 => Self::Perm,
            // ENOMEM
            12 => Self::NoMem,
            // EINVAL
            22 => Self::Inval,
            // EFBIG, ENOSPC, EDQUOT
            27 | 28 | 122 => Self::NoSpc,
            // ESHUTDOWN
            108 => Self::Shutdown,
            _ => Self::Io,
        }
    }
}

impl From<&io::Error> for Errno {
    fn from(error: &io::Error) -> Self {
        error.raw_os_error().map_or(Self::Io, Self::from_os)
    }
}
