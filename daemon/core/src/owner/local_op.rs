//! One operation of the sequencer on the local disk, which may take several steps.
//!
//! ```text
//! write, aligned   ── Write ──────────────────────────────► Written
//! write, unaligned ── Patch (read its blocks) ── Write ───► Written
//! zero             ── Zero (fallocate) ─┬─ Sync (if FUA) ─► Written
//!                       └ unsupported ─► Fill (writes) ──┘
//! read             ── Read ───────────────────────────────► Read
//! ```
//!
//! The extent is held by the sequencer throughout, in whole blocks, so nothing changes under the
//! read-change-write of an unaligned write.

use super::disk::Disk;
use super::driver::{DiskFile, DiskOp, Driver};
use crate::sequencer::{DiskError, EIO, EOPNOTSUPP, Extent, OpId};
use bytes::{Buf, Bytes};
use std::io;
use tidelock_buffers::{AlignedBuf, BufPool, Durability, FallocateMode};
use tidelock_protocol::ids::DiskId;
use tidelock_protocol::record::Effect;

/// What is written at a time where zeroes have to be written.
const FILL_BYTES: u64 = 1 << 20;

/// How an operation goes on.
#[derive(Debug)]
pub enum Progress {
    /// A step is in flight.
    InFlight(LocalOp),
    /// A write or zeroing has ended.
    Written(Result<(), DiskError>),
    /// A read has ended.
    Read(Result<Bytes, DiskError>),
}

#[derive(Debug)]
enum Step {
    Write { data: Bytes, at: u64 },
    Patch { data: Bytes, lo: u64, len: usize },
    Zero { mode: FallocateMode },
    Fill { at: u64 },
    Sync,
    Read { lo: u64, len: usize },
}

/// An operation in flight.
#[derive(Debug)]
pub struct LocalOp {
    extent: Extent,
    fua: bool,
    step: Step,
}

/// The disk of an operation, and what carries it out.
pub struct On<'a, D: Driver> {
    /// The disk.
    pub disk: &'a Disk<D::File>,
    /// Its driver.
    pub driver: &'a mut D,
    /// Memory for what is read.
    pub pool: &'a BufPool,
}

impl LocalOp {
    /// A guest's write or zeroing.
    pub fn write(disk: &Disk<impl DiskFile>, extent: Extent, effect: Effect, fua: bool) -> Self {
        let step = match effect {
            Effect::Write(payload) => {
                let (data, at) = (payload.data().clone(), extent.offset);
                if disk.is_aligned(at, &data) {
                    Step::Write { data, at }
                } else {
                    let (lo, len) = disk.direct_range(at, extent.len_bytes);
                    Step::Patch { data, lo, len }
                }
            }
            Effect::Zero { no_hole, .. } => match disk.fallocate_mode(no_hole) {
                Some(mode) => Step::Zero { mode },
                None => Step::Fill { at: extent.offset },
            },
            Effect::CopyDone | Effect::Idle => unreachable!("not an operation on a disk"),
        };
        Self { extent, fua, step }
    }

    /// Tidelock's own read.
    pub fn read(disk: &Disk<impl DiskFile>, extent: Extent) -> Self {
        let (lo, len) = disk.direct_range(extent.offset, extent.len_bytes);
        Self { extent, fua: false, step: Step::Read { lo, len } }
    }

    /// The disk that it is on.
    pub fn disk(&self) -> DiskId {
        self.extent.disk
    }

    /// Starts the first step.
    pub fn start<D: Driver>(self, op: OpId, on: &mut On<'_, D>) -> Progress {
        let (disk_op, On { disk, driver, pool }) = (DiskOp::Local(op), on);
        let file = disk.file();
        match &self.step {
            Step::Write { data, at } => {
                driver.write(disk_op, file, data.clone(), *at, self.durability());
            }
            Step::Patch { lo, len, .. } | Step::Read { lo, len } => {
                driver.read(disk_op, file, pool.get(*len), 0..*len, *lo);
            }
            Step::Zero { mode } => {
                driver.zero(disk_op, file, *mode, self.extent.offset..self.extent.end());
            }
            Step::Fill { at } => {
                let mut zeroes = pool.get(FILL_BYTES as usize);
                zeroes.extend_zeroed(FILL_BYTES.min(self.extent.end() - at) as usize);
                driver.write(disk_op, file, zeroes.freeze_all(), *at, Durability::Cached);
            }
            Step::Sync => driver.sync(disk_op, file),
        }
        Progress::InFlight(self)
    }

    fn durability(&self) -> Durability {
        if self.fua { Durability::Durable } else { Durability::Cached }
    }

    /// A step has ended.
    pub fn advance<D: Driver>(
        self,
        op: OpId,
        result: io::Result<u32>,
        buffer: Option<AlignedBuf>,
        on: &mut On<'_, D>,
    ) -> Progress {
        let count = match result {
            Ok(count) => count as usize,
            Err(error) => return self.failed(&error, op, on),
        };
        match self.step {
            Step::Write { data, .. } if count == data.len() => Progress::Written(Ok(())),
            Step::Write { .. } | Step::Fill { .. } if count == 0 => {
                Progress::Written(Err(DiskError(EIO)))
            }
            Step::Write { ref data, at } => {
                let (mut data, at) = (data.clone(), at + count as u64);
                data.advance(count);
                if !on.disk.is_aligned(at, &data) {
                    return Progress::Written(Err(DiskError(EIO)));
                }
                Self { step: Step::Write { data, at }, ..self }.start(op, on)
            }
            Step::Patch { lo, len, .. } | Step::Read { lo, len } => {
                let mut buf = buffer.expect("the buffer of a read");
                let filled = buf.len();
                if filled < len {
                    if count == 0 {
                        return self.failed(&io::ErrorKind::UnexpectedEof.into(), op, on);
                    }
                    let (file, at) = (on.disk.file(), lo + filled as u64);
                    on.driver.read(DiskOp::Local(op), file, buf, filled..len, at);
                    return Progress::InFlight(self);
                }
                let from = (self.extent.offset - lo) as usize;
                let Step::Patch { data, .. } = &self.step else {
                    let end = from + self.extent.len_bytes as usize;
                    return Progress::Read(Ok(buf.freeze(from..end)));
                };
                buf[from..from + data.len()].copy_from_slice(data);
                let data = buf.freeze_all();
                Self { step: Step::Write { data, at: lo }, ..self }.start(op, on)
            }
            Step::Fill { at } => {
                let at = at + count as u64;
                if at < self.extent.end() {
                    return Self { step: Step::Fill { at }, ..self }.start(op, on);
                }
                self.zeroed(op, on)
            }
            Step::Zero { .. } => self.zeroed(op, on),
            Step::Sync => Progress::Written(Ok(())),
        }
    }

    fn zeroed<D: Driver>(self, op: OpId, on: &mut On<'_, D>) -> Progress {
        if self.fua {
            Self { step: Step::Sync, ..self }.start(op, on)
        } else {
            Progress::Written(Ok(()))
        }
    }

    fn failed<D: Driver>(self, error: &io::Error, op: OpId, on: &mut On<'_, D>) -> Progress {
        match self.step {
            Step::Zero { .. } if error.raw_os_error() == Some(EOPNOTSUPP) => {
                let at = self.extent.offset;
                Self { step: Step::Fill { at }, ..self }.start(op, on)
            }
            Step::Read { .. } => Progress::Read(Err(DiskError::of(error))),
            _ => Progress::Written(Err(DiskError::of(error))),
        }
    }
}
