//! Memory for direct I/O ([`BufPool`], [`AlignedBuf`]), and the words in which a loop asks for operations on a disk.
//!
//! No I/O is done here: a loop without a ring knows this crate, and the ring knows it, too.

mod buf;

pub use buf::{AlignedBuf, BufPool, CAPACITY_MAX_BYTES, CAPACITY_MIN_BYTES, PoolUsage};

/// Promise of a write's completion.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Durability {
    /// The write is visible to later reads. A later sync makes it durable.
    Cached,
    /// The data, and what is needed to find it, is on stable storage (`RWF_DSYNC`, NBD's FUA).
    Durable,
}

/// Change of the storage of a range of a file. The size of the file never changes, except by `Allocate`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FallocateMode {
    /// Give the storage back; the range reads as zeroes.
    PunchHole,
    /// Make the range read as zeroes and keep storage for it.
    ZeroRange,
    /// Make sure that there is storage for the range; data stays as it is, the file may grow.
    Allocate,
}

/// State of an extent's storage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExtentKind {
    /// Has storage, or may have, and may read as anything.
    Allocated,
    /// Has none, and reads as zeroes.
    Hole,
}

/// A piece of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// First byte.
    pub offset: u64,
    /// Length in bytes, never 0.
    pub len: u64,
    /// State of its storage.
    pub kind: ExtentKind,
}

impl Extent {
    /// First byte behind it.
    #[must_use]
    pub fn end(&self) -> u64 {
        self.offset + self.len
    }
}
