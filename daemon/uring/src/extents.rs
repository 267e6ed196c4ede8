//! Which ranges of a file have storage, for NBD's `base:allocation` and for copies that skip holes.
//!
//! Invariant: the extents of an answer are in order, without gaps, and begin where the range begins.
//! A range that is called a hole reads as zeroes; one that is called allocated may read as anything.

use std::io;
use std::ops::Range;
use std::os::fd::AsFd;

use crate::sys::{self, Seek};
use tidelock_buffers::{Extent, ExtentKind};

/// At most `max` extents from the start of `range` on.
pub(crate) fn of_file(fd: impl AsFd, range: Range<u64>, max: usize) -> io::Result<Vec<Extent>> {
    let fd = fd.as_fd();
    let mut extents = Vec::new();
    let mut at = range.start;
    while at < range.end && extents.len() < max {
        let data = sys::seek(fd, at, Seek::Data)?.unwrap_or(range.end).min(range.end);
        if data > at {
            extents.push(Extent { offset: at, len: data - at, kind: ExtentKind::Hole });
            at = data;
            continue;
        }
        let hole = sys::seek(fd, at, Seek::Hole)?.unwrap_or(range.end).min(range.end);
        if hole <= at {
            // Somebody freed it between the two questions: ask again, it is a hole now. Calling
            // the rest allocated is always right and always ends.
            extents.push(all_allocated(at..range.end));
            break;
        }
        extents.push(Extent { offset: at, len: hole - at, kind: ExtentKind::Allocated });
        at = hole;
    }
    Ok(extents)
}

/// The answer that is right for everything.
pub(crate) fn all_allocated(range: Range<u64>) -> Extent {
    let len = range.end - range.start;
    Extent { offset: range.start, len, kind: ExtentKind::Allocated }
}
