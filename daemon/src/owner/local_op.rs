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
use crate::sequencer::{DiskError, Extent, OpId};
use bytes::{Buf, Bytes};
use std::io;
use tidelock_protocol::ids::DiskId;
use tidelock_protocol::record::Effect;
use tidelock_uring::{BufPool, Buffer, Durability, FallocateMode, Ring, SharedFd, SyncKind};

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
    fd: SharedFd,
    fua: bool,
    step: Step,
}

fn disk_error(error: &io::Error) -> DiskError {
    DiskError(error.raw_os_error().unwrap_or(libc::EIO))
}

fn token(op: OpId) -> u64 {
    super::token::Token::Local(op).to_u64()
}

impl LocalOp {
    /// A guest's write or zeroing.
    pub fn write(disk: &Disk, extent: Extent, effect: Effect, fua: bool) -> Self {
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
        Self { extent, fd: disk.fd().clone(), fua, step }
    }

    /// Tidelock's own read.
    pub fn read(disk: &Disk, extent: Extent) -> Self {
        let (lo, len) = disk.direct_range(extent.offset, extent.len_bytes);
        Self { extent, fd: disk.fd().clone(), fua: false, step: Step::Read { lo, len } }
    }

    /// The disk that it is on.
    pub fn disk(&self) -> DiskId {
        self.extent.disk
    }

    /// Starts the first step.
    pub fn start(self, op: OpId, ring: &mut Ring, pool: &BufPool) -> Progress {
        let token = token(op);
        match &self.step {
            Step::Write { data, at } => {
                ring.write(token, &self.fd, data.clone(), *at, self.durability());
            }
            Step::Patch { lo, len, .. } | Step::Read { lo, len } => {
                ring.read(token, &self.fd, pool.get(*len), 0..*len, *lo);
            }
            Step::Zero { mode } => {
                ring.fallocate(token, &self.fd, *mode, self.extent.offset, self.extent.len_bytes);
            }
            Step::Fill { at } => {
                let mut zeroes = pool.get(FILL_BYTES as usize);
                zeroes.extend_zeroed(FILL_BYTES.min(self.extent.end() - at) as usize);
                ring.write(token, &self.fd, zeroes.freeze_all(), *at, Durability::Cached);
            }
            Step::Sync => ring.fsync(token, &self.fd, SyncKind::Data),
        }
        Progress::InFlight(self)
    }

    fn durability(&self) -> Durability {
        if self.fua { Durability::Durable } else { Durability::Cached }
    }

    /// A step has ended.
    pub fn advance(
        self,
        op: OpId,
        result: io::Result<u32>,
        buffer: Buffer,
        disk: &mut Disk,
        ring: &mut Ring,
        pool: &BufPool,
    ) -> Progress {
        let count = match result {
            Ok(count) => count as usize,
            Err(error) => return self.failed(&error, op, ring, pool),
        };
        match self.step {
            Step::Write { data, .. } if count == data.len() => Progress::Written(Ok(())),
            Step::Write { .. } | Step::Fill { .. } if count == 0 => {
                Progress::Written(Err(DiskError(libc::EIO)))
            }
            Step::Write { ref data, at } => {
                let (mut data, at) = (data.clone(), at + count as u64);
                data.advance(count);
                if !disk.is_aligned(at, &data) {
                    return Progress::Written(Err(DiskError(libc::EIO)));
                }
                Self { step: Step::Write { data, at }, ..self }.start(op, ring, pool)
            }
            Step::Patch { lo, len, .. } | Step::Read { lo, len } => {
                let mut buf = buffer.into_aligned();
                let filled = buf.len();
                if filled < len {
                    if count == 0 {
                        return self.failed(&io::ErrorKind::UnexpectedEof.into(), op, ring, pool);
                    }
                    ring.read(token(op), &self.fd, buf, filled..len, lo + filled as u64);
                    return Progress::InFlight(self);
                }
                let from = (self.extent.offset - lo) as usize;
                let Step::Patch { data, .. } = &self.step else {
                    let end = from + self.extent.len_bytes as usize;
                    return Progress::Read(Ok(buf.freeze(from..end)));
                };
                buf[from..from + data.len()].copy_from_slice(data);
                let data = buf.freeze_all();
                Self { step: Step::Write { data, at: lo }, ..self }.start(op, ring, pool)
            }
            Step::Fill { at } => {
                let at = at + count as u64;
                if at < self.extent.end() {
                    return Self { step: Step::Fill { at }, ..self }.start(op, ring, pool);
                }
                self.zeroed(op, ring, pool)
            }
            Step::Zero { .. } => self.zeroed(op, ring, pool),
            Step::Sync => Progress::Written(Ok(())),
        }
    }

    fn zeroed(self, op: OpId, ring: &mut Ring, pool: &BufPool) -> Progress {
        if self.fua {
            Self { step: Step::Sync, ..self }.start(op, ring, pool)
        } else {
            Progress::Written(Ok(()))
        }
    }

    fn failed(self, error: &io::Error, op: OpId, ring: &mut Ring, pool: &BufPool) -> Progress {
        match self.step {
            Step::Zero { .. } if error.raw_os_error() == Some(libc::EOPNOTSUPP) => {
                let at = self.extent.offset;
                Self { step: Step::Fill { at }, ..self }.start(op, ring, pool)
            }
            Step::Read { .. } => Progress::Read(Err(disk_error(error))),
            _ => Progress::Written(Err(disk_error(error))),
        }
    }
}
