//! A driver that carries out nothing, for tests of the loop. Guests' requests, step by step: `guests`. The backup:
//! `backup`.

mod backup;
mod guests;

use super::driver::{DiskOp, Driver, Taking, Timer};
use super::no_file::{NoFile, failing};
use super::replication::Clocks;
use super::{Owner, OwnerParts, PublishPending, Several};
use crate::activity::ActivityLog;
use crate::copy_job::Bounds;
use crate::link::NoGate;
use crate::link::port::{OwnerPort, ToLink};
use crate::sequencer::{DiskError, RequestId, Settings};
use bytes::Bytes;
use std::collections::VecDeque;
use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::task::Waker;
use std::time::Duration;
use tidelock_buffers::{AlignedBuf, BufPool, Durability, FallocateMode};
use tidelock_protocol::hlc::Hlc;
use tidelock_protocol::ids::{DiskId, MonoNanos, WriterId};
use tidelock_protocol::message::{DiskSpec, Mode};

const DISK_BYTES: u64 = 1 << 20;
const CLOCKS: Clocks = Clocks { now: MonoNanos(1), wall_ms: 1_000_000 };

/// An operation on a disk that a driver was asked for.
#[derive(Debug)]
enum Asked {
    Read { buf: AlignedBuf, range: Range<usize>, at: u64 },
    Write { data: Bytes, at: u64, how: Durability },
    Zero { mode: FallocateMode, range: Range<u64> },
    Sync,
}

/// A driver that keeps account: timers, messages to the link and the tap, operations, and the fate of the activity log's
/// file.
#[derive(Debug, Default)]
pub(super) struct Recorder {
    pub(super) timers: Vec<Timer>,
    pub(super) told: Vec<ToLink>,
    pub(super) taking: Vec<Taking>,
    pub(super) answers_wait: bool,
    pub(super) cannot_remove_log: AtomicBool,
    pub(super) removed_logs: usize,
    pub(super) touched_logs: usize,
    asked: VecDeque<(DiskOp, Asked)>,
    answers: Vec<(RequestId, Result<Bytes, DiskError>)>,
    oldest: Option<(DiskOp, Duration)>,
}

impl Driver for Recorder {
    type File = NoFile;

    fn read(&mut self, op: DiskOp, _: &NoFile, buf: AlignedBuf, range: Range<usize>, at: u64) {
        self.asked.push_back((op, Asked::Read { buf, range, at }));
    }

    fn write(&mut self, op: DiskOp, _: &NoFile, data: Bytes, at: u64, how: Durability) {
        self.asked.push_back((op, Asked::Write { data, at, how }));
    }

    fn zero(&mut self, op: DiskOp, _: &NoFile, mode: FallocateMode, range: Range<u64>) {
        self.asked.push_back((op, Asked::Zero { mode, range }));
    }

    fn sync(&mut self, op: DiskOp, _: &NoFile) {
        self.asked.push_back((op, Asked::Sync));
    }

    fn write_log(&mut self, _: &[u8], _: u64) {}

    fn touch_log(&mut self) -> io::Result<()> {
        self.touched_logs += 1;
        Ok(())
    }

    fn remove_log(&mut self) -> io::Result<()> {
        failing(&self.cannot_remove_log).inspect(|()| self.removed_logs += 1)
    }

    fn oldest_op(&mut self) -> Option<(DiskOp, Duration)> {
        self.oldest
    }

    fn submit(&mut self) -> io::Result<()> {
        Ok(())
    }

    fn answer(&mut self, request: RequestId, answer: Result<Bytes, DiskError>) {
        self.answers.push((request, answer));
    }

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
    Owner::new(parts(pending, several), Recorder::default(), CLOCKS)
}

fn parts(pending: Arc<dyn PublishPending>, several: Option<Several>) -> OwnerParts<NoFile> {
    let (port, _) = OwnerPort::new(Waker::noop().clone());
    let settings = Settings {
        writer: WriterId(0),
        mode: Mode::Pipelined,
        backlog_limit_bytes: 1 << 20,
        lock_align_bytes: 512,
    };
    let spec = DiskSpec { id: DiskId(0), name: "disk".into(), size_bytes: DISK_BYTES };
    OwnerParts {
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
    }
}
