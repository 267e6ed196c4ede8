//! One protected disk in the owner loop.

use super::driver::{DiskFile, GuestOp};
use crate::copy_job::HOLE_MIN_BYTES;
use crate::sequencer::{DiskError, EOPNOTSUPP, Extent, Look};
use std::io;
use tidelock_buffers::{ExtentKind, FallocateMode};
use tidelock_protocol::ids::DiskId;
use tidelock_protocol::message::DiskSpec;
use tidelock_protocol::record::Effect;

/// Pieces that are asked for at a time when a whole disk is listed.
const LIST_EXTENTS: usize = 4096;
/// Pieces that one look for a hole goes over.
const LOOK_EXTENTS: usize = 256;

/// A disk in the owner loop.
#[derive(Debug)]
pub struct Disk<F> {
    spec: DiskSpec,
    file: F,
    /// Why nothing that the disk says about durability is believed any more.
    poisoned: Option<String>,
}

/// A disk's place. Numbers may have gaps: of disks that were removed.
pub fn nth<F: DiskFile>(disks: &[Disk<F>], disk: DiskId) -> usize {
    disks.iter().position(|of| of.id() == disk).expect("a disk of this member")
}

impl<F: DiskFile> Disk<F> {
    pub fn new((spec, file): (DiskSpec, F)) -> Self {
        Self { spec, file, poisoned: None }
    }

    pub fn id(&self) -> DiskId {
        self.spec.id
    }

    pub fn name(&self) -> &str {
        &self.spec.name
    }

    pub fn file(&self) -> &F {
        &self.file
    }

    /// Its name and its identity.
    pub fn mark(&self) -> io::Result<String> {
        Ok(format!("{} {}", self.name(), self.file.mark()?))
    }

    /// A failed sync may have dropped what it should have made durable, and the next one would say
    /// that all is well: from now on every flush fails, until the disk is opened anew.
    /// Returns whether it was the first.
    pub fn poison(&mut self, member: &str, error: &io::Error) -> bool {
        tracing::error!(
            member,
            disk = self.name(),
            %error,
            "the local disk failed a flush: flushes fail from now on; replace the disk or \
             restart the daemon, which compares the sites"
        );
        let first = self.poisoned.is_none();
        self.poisoned.get_or_insert_with(|| error.to_string());
        first
    }

    pub fn poisoned(&self) -> Option<&str> {
        self.poisoned.as_deref()
    }

    pub fn whole(&self) -> Extent {
        Extent { disk: self.spec.id, offset: 0, len_bytes: self.spec.size_bytes }
    }

    /// What of the disk may hold anything but zeroes.
    pub fn allocated(&self) -> io::Result<Vec<Extent>> {
        let Extent { disk, len_bytes: end, .. } = self.whole();
        let mut allocated: Vec<Extent> = Vec::new();
        let mut at = 0;
        while at < end {
            for piece in self.file.extents(at..end, LIST_EXTENTS)? {
                at = piece.end();
                if piece.kind == ExtentKind::Allocated {
                    allocated.push(Extent { disk, offset: piece.offset, len_bytes: piece.len });
                }
            }
        }
        Ok(allocated)
    }

    /// How the disk begins in an extent. Blocks, but reads no data.
    pub fn look(&self, extent: Extent) -> io::Result<Look> {
        let pieces = self.file.extents(extent.offset..extent.end(), LOOK_EXTENTS)?;
        let is_hole = |piece: &tidelock_buffers::Extent| {
            piece.kind == ExtentKind::Hole && piece.len >= HOLE_MIN_BYTES
        };
        Ok(match pieces.iter().position(is_hole) {
            Some(0) => Look::Hole(pieces[0].len),
            // The answer may end before the extent does.
            at => Look::Data(pieces[..at.unwrap_or(pieces.len())].iter().map(|p| p.len).sum()),
        })
    }

    /// The smallest range around `offset..end` that may be read or written directly.
    pub fn direct_range(&self, offset: u64, len_bytes: u64) -> (u64, usize) {
        let align = self.file.align_bytes();
        let lo = offset / align * align;
        let hi = (offset + len_bytes).div_ceil(align) * align;
        (lo, usize::try_from(hi - lo).expect("requests are bounded"))
    }

    pub fn is_aligned(&self, offset: u64, data: &[u8]) -> bool {
        self.file.allows(data, offset)
    }

    /// The effect of a request to zero or to discard a range. `None`: it has none, and is a success.
    pub fn zeroing(&self, op: &GuestOp, len_bytes: u64) -> Result<Option<Effect>, DiskError> {
        let len_bytes = u32::try_from(len_bytes).expect("requests are bounded");
        match *op {
            GuestOp::Zero { no_hole, only_if_fast, .. } => {
                if only_if_fast && self.fallocate_mode(no_hole).is_none() {
                    return Err(DiskError(EOPNOTSUPP));
                }
                Ok(Some(Effect::Zero { len_bytes, no_hole }))
            }
            // A hint: followed where the result is known to be the same at both sites.
            _ => {
                let effect = Effect::Zero { len_bytes, no_hole: false };
                Ok(self.file.can_punch_hole().then_some(effect))
            }
        }
    }

    /// How the file system zeroes without writing, if it can.
    pub fn fallocate_mode(&self, no_hole: bool) -> Option<FallocateMode> {
        let file = &self.file;
        if !no_hole && file.can_punch_hole() {
            Some(FallocateMode::PunchHole)
        } else if file.can_zero_range() {
            Some(FallocateMode::ZeroRange)
        } else {
            None
        }
    }
}
