//! A driver that carries out nothing, for tests of the loop.

use super::driver::{DiskFile, DiskOp, Driver, Taking, Timer};
use super::replication::Clocks;
use super::{Owner, OwnerParts, PublishPending, Several};
use crate::activity::ActivityLog;
use crate::copy_job::Bounds;
use crate::link::NoGate;
use crate::link::port::{OwnerPort, ToLink};
use crate::sequencer::{DiskError, RequestId, Settings};
use bytes::Bytes;
use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::task::Waker;
use std::time::Duration;
use tidelock_buffers::{AlignedBuf, BufPool, Durability, FallocateMode};
use tidelock_protocol::hlc::Hlc;
use tidelock_protocol::ids::{DiskId, MonoNanos, WriterId};
use tidelock_protocol::message::{DiskSpec, Mode};

const DISK_BYTES: u64 = 1 << 20;

/// A file without content.
#[derive(Debug, Default)]
pub(super) struct NoFile {
    pub(super) cannot_sync: AtomicBool,
    pub(super) has_no_mark: AtomicBool,
}

fn failing(is_so: &AtomicBool) -> io::Result<()> {
    match is_so.load(Relaxed) {
        true => Err(io::ErrorKind::Other.into()),
        false => Ok(()),
    }
}

impl DiskFile for NoFile {
    fn align_bytes(&self) -> u64 {
        512
    }

    fn allows(&self, _: &[u8], _: u64) -> bool {
        true
    }

    fn can_punch_hole(&self) -> bool {
        true
    }

    fn can_zero_range(&self) -> bool {
        true
    }

    fn extents(&self, _: Range<u64>, _: usize) -> io::Result<Vec<tidelock_buffers::Extent>> {
        Ok(Vec::new())
    }

    fn mark(&self) -> io::Result<String> {
        failing(&self.has_no_mark).map(|()| "no file".to_owned())
    }

    fn sync(&self) -> io::Result<()> {
        failing(&self.cannot_sync)
    }
}

/// A driver that keeps the timers that the loop has asked for, what it has told the link and the tap, and what has become
/// of the activity log's file.
#[derive(Debug, Default)]
pub(super) struct Recorder {
    pub(super) timers: Vec<Timer>,
    pub(super) told: Vec<ToLink>,
    pub(super) taking: Vec<Taking>,
    pub(super) answers_wait: bool,
    pub(super) cannot_remove_log: AtomicBool,
    pub(super) removed_logs: usize,
    pub(super) touched_logs: usize,
}

impl Driver for Recorder {
    type File = NoFile;

    fn read(&mut self, _: DiskOp, _: &NoFile, _: AlignedBuf, _: Range<usize>, _: u64) {}
    fn write(&mut self, _: DiskOp, _: &NoFile, _: Bytes, _: u64, _: Durability) {}
    fn zero(&mut self, _: DiskOp, _: &NoFile, _: FallocateMode, _: Range<u64>) {}
    fn sync(&mut self, _: DiskOp, _: &NoFile) {}
    fn write_log(&mut self, _: &[u8], _: u64) {}

    fn touch_log(&mut self) -> io::Result<()> {
        self.touched_logs += 1;
        Ok(())
    }

    fn remove_log(&mut self) -> io::Result<()> {
        failing(&self.cannot_remove_log).inspect(|()| self.removed_logs += 1)
    }

    fn oldest_op(&mut self) -> Option<(DiskOp, Duration)> {
        None
    }

    fn submit(&mut self) -> io::Result<()> {
        Ok(())
    }

    fn answer(&mut self, _: RequestId, _: Result<Bytes, DiskError>) {}

    fn take(&mut self, what: Taking) {
        self.taking.push(what);
    }

    fn has_sent_answers(&self) -> bool {
        !self.answers_wait
    }

    fn set_timer(&mut self, timer: Timer, _: Duration) {
        self.timers.push(timer);
    }

    fn want_ceiling(&mut self) {}

    fn to_link(&mut self, message: ToLink) {
        self.told.push(message);
    }
}

/// A member with one disk.
pub(super) fn owner(pending: Arc<dyn PublishPending>, several: Option<Several>) -> Owner<Recorder> {
    let (port, _) = OwnerPort::new(Waker::noop().clone());
    let settings = Settings {
        writer: WriterId(0),
        mode: Mode::Pipelined,
        backlog_limit_bytes: 1 << 20,
        lock_align_bytes: 512,
    };
    let spec = DiskSpec { id: DiskId(0), name: "disk".into(), size_bytes: DISK_BYTES };
    let parts = OwnerParts {
        member: "web".into(),
        settings,
        disks: vec![(spec, NoFile::default())],
        port: Arc::new(port),
        pool: BufPool::new(0),
        pending,
        gate: Arc::new(NoGate),
        stats: Arc::default(),
        view: Arc::default(),
        pulse: Arc::default(),
        copy_bounds: Bounds { window_bytes: 1 << 20, rate_bytes_per_s: 0 },
        switched_over: false,
        serves_unreached_after: None,
        several,
        hlc_floor: Hlc(0),
        max_clock_lead: Duration::from_secs(1),
        activity: ActivityLog::off(),
        has_log_file: false,
        backlog: None,
        left: None,
    };
    let clocks = Clocks { now: MonoNanos(1), wall_ms: 1_000_000 };
    Owner::new(parts, Recorder::default(), clocks)
}
