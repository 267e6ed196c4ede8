//! What a disk can do besides reading and writing, found out without changing any data.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;

use crate::align::queue_attribute;
use crate::ops::raw_mode;
use crate::sys;
use tidelock_buffers::FallocateMode;

/// A length that every file system handles.
const PROBE_LEN_BYTES: u64 = 4096;

/// Which ways of zeroing work. What is not known to work is `false`: writing zeroes always works.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Abilities {
    pub(crate) punch_hole: bool,
    pub(crate) zero_range: bool,
}

/// Tried on a nameless file in the same directory: on the disk itself it would change the disk's times, by which it is
/// known to be as it was ([`crate::mark`]). Where there are no nameless files a hole is punched behind the end of the disk.
pub(crate) fn of_regular_file(file: &File, path: &Path, len_bytes: u64) -> Abilities {
    let works = |file: &File, mode: FallocateMode, offset| {
        sys::fallocate(file, raw_mode(mode), offset, PROBE_LEN_BYTES).is_ok()
    };
    let Some(nameless) = nameless_beside(path) else {
        let end = len_bytes.next_multiple_of(PROBE_LEN_BYTES);
        return Abilities {
            punch_hole: works(file, FallocateMode::PunchHole, end),
            zero_range: false,
        };
    };
    let punch_hole = works(&nameless, FallocateMode::PunchHole, 0);
    let zero_range = works(&nameless, FallocateMode::ZeroRange, 0);
    Abilities { punch_hole, zero_range }
}

/// A file on the same file system that is gone when it is closed.
fn nameless_beside(path: &Path) -> Option<File> {
    let real = path.canonicalize().ok()?;
    OpenOptions::new()
        .read(true)
        .write(true)
        .mode(0o600)
        .custom_flags(libc::O_TMPFILE)
        .open(real.parent()?)
        .ok()
}

/// On a block device, both are one request to the device, if it knows that request.
pub(crate) fn of_block_device(file: &File) -> Abilities {
    let works = file
        .metadata()
        .ok()
        .and_then(|meta| queue_attribute(meta.rdev(), "write_zeroes_max_bytes"))
        .and_then(|max| max.parse::<u64>().ok())
        .is_some_and(|max_bytes| max_bytes > 0);
    Abilities { punch_hole: works, zero_range: works }
}
