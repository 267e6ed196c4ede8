//! Extents of `base:allocation`: clipped to the request, merged where equal, and rounded to
//! the export's minimum block size.
//!
//! Invariant: the result describes consecutive non-empty ranges that begin at the request's
//! offset and lie inside it, neighbours differ, and no part of it claims more than what was
//! given: a block with mixed contents gets the flags that hold for all of it.

use crate::limits;

/// What is known of a range. A range of which nothing is known is [`ExtentState::DATA`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ExtentState(u32);

impl ExtentState {
    /// Allocated, or not known better.
    pub const DATA: Self = Self(0);
    /// Not allocated, and what it reads as is not known.
    pub const HOLE: Self = Self(1);
    /// Allocated, reads as zeroes.
    pub const ZERO: Self = Self(2);
    /// Not allocated, reads as zeroes: what a hole in a file is.
    pub const HOLE_ZERO: Self = Self(3);

    /// The flags as they are on the wire.
    pub const fn bits(self) -> u32 {
        self.0
    }

    /// What holds for both.
    const fn common(self, other: Self) -> Self {
        Self(self.0 & other.0)
    }
}

/// A range in one state. Its place follows from the lengths of those before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// Length in bytes.
    pub len: u64,
    /// Its state.
    pub state: ExtentState,
}

/// Collects the descriptors of one reply.
pub(crate) struct Descriptors {
    done: Vec<(u32, ExtentState)>,
    count_max: usize,
    /// Bytes of the request for which nothing was pushed yet.
    left: u32,
    block: u32,
    /// The beginning of a block whose rest is still to come: fewer bytes than a block.
    open_block: Option<(u32, ExtentState)>,
}

impl Descriptors {
    /// For a request of `len` bytes, a multiple of `block`.
    pub(crate) fn new(len: u32, block: u32, only_one: bool) -> Self {
        let count_max = if only_one { 1 } else { limits::MAX_EXTENTS_PER_REPLY };
        Self { done: Vec::new(), count_max, left: len, block, open_block: None }
    }

    /// Add what comes next. False when no more is wanted.
    pub(crate) fn push(&mut self, extent: Extent) -> bool {
        let mut len = extent.len.min(self.left.into()) as u32;
        if let Some((begun, state)) = self.open_block {
            let state = if len > 0 { state.common(extent.state) } else { state };
            let taken = len.min(self.block - begun);
            self.left -= taken;
            len -= taken;
            if begun + taken < self.block {
                self.open_block = Some((begun + taken, state));
                return true;
            }
            self.open_block = None;
            if !self.emit(self.block, state) {
                return false;
            }
        }
        let whole = len - len % self.block;
        self.left -= len;
        if whole > 0 && !self.emit(whole, extent.state) {
            return false;
        }
        if len > whole {
            self.open_block = Some((len - whole, extent.state));
        }
        self.left > 0 || self.open_block.is_some()
    }

    /// False when it did not fit.
    fn emit(&mut self, len: u32, state: ExtentState) -> bool {
        match self.done.last_mut() {
            Some(last) if last.1 == state => last.0 += len,
            _ => {
                if self.done.len() == self.count_max {
                    return false;
                }
                self.done.push((len, state));
            }
        }
        true
    }

    /// The descriptors, at least one.
    pub(crate) fn finish(mut self) -> Vec<(u32, ExtentState)> {
        if let Some((begun, _)) = self.open_block {
            // The extents ended inside a block: of its rest nothing is known.
            let len = u64::from(self.block - begun);
            self.push(Extent { len, state: ExtentState::DATA });
        }
        if self.done.is_empty() {
            self.emit(self.left, ExtentState::DATA);
        }
        self.done
    }
}
