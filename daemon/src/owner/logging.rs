//! What the owner loop does for the activity log: its requests wait here until the log has their
//! extents, and its I/O is operations of the loop's ring.

use super::Owner;
use super::requests::Slot;
use super::token::Token;
use crate::activity::{Action, ActivityLog, BLOCK_BYTES, Standing};
use crate::durable;
use crate::sequencer::{Extent, RequestId};
use std::collections::HashMap;
use std::io;
use std::path::PathBuf;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;
use tidelock_protocol::ids::{DiskId, MonoNanos};
use tidelock_protocol::record::Effect;
use tidelock_uring::{Durability, LocalFile, SyncKind};

const TOUCH_EVERY: Duration = Duration::from_secs(1);

/// The log's file, open.
#[derive(Debug)]
pub struct LogFile {
    /// It, locked.
    pub file: LocalFile,
    /// Where it is.
    pub path: PathBuf,
}

/// A guest's request that the log has to know of first.
#[derive(Debug)]
pub(super) struct Logged {
    pub(super) extent: Extent,
    pub(super) effect: Effect,
    pub(super) fua: bool,
}

/// The log and what waits for it.
#[derive(Debug)]
pub(super) struct Logging {
    pub(super) activity: ActivityLog,
    file: Option<LogFile>,
    held_back: HashMap<RequestId, Logged>,
    /// Guests' flushes under way: which disk, and which number.
    flushes: HashMap<u32, (DiskId, u64)>,
    /// The last time at which the file's time was set.
    touched: Option<MonoNanos>,
    said: Option<Standing>,
    said_at: Option<MonoNanos>,
}

impl Logging {
    pub(super) fn new(activity: ActivityLog, file: Option<LogFile>) -> Self {
        let (held_back, flushes) = (HashMap::new(), HashMap::new());
        Self { activity, file, held_back, flushes, touched: None, said: None, said_at: None }
    }

    pub(super) fn hold_back(&mut self, request: RequestId, logged: Logged) {
        self.held_back.insert(request, logged);
    }

    pub(super) fn guest_flush_begins(&mut self, slot: Slot, disk: DiskId) {
        let number = self.activity.flush_begins(disk);
        self.flushes.insert(slot.0, (disk, number));
    }

    /// Returns the disk.
    pub(super) fn guest_flush_ended(&mut self, slot: Slot, ok: bool) -> Option<DiskId> {
        let (disk, number) = self.flushes.remove(&slot.0)?;
        self.activity.flush_ended(disk, number, ok);
        Some(disk)
    }

    /// A local write begins. Once a second the file gets the time: an image that is written to long after that is another
    /// one at the next start.
    pub(super) fn touch(&mut self, now: MonoNanos) {
        let Some(LogFile { file, path }) = &self.file else { return };
        let is_due = |at: MonoNanos| now.since_ns(at) >= TOUCH_EVERY.as_nanos() as u64;
        if !self.touched.is_none_or(is_due) {
            return;
        }
        self.touched = Some(now);
        let (omit, now) = (rustix::fs::UTIME_OMIT, rustix::fs::UTIME_NOW);
        let time = |tv_nsec| rustix::fs::Timespec { tv_sec: 0, tv_nsec };
        let times =
            rustix::fs::Timestamps { last_access: time(omit), last_modification: time(now) };
        if let Err(error) = rustix::fs::futimens(file.fd(), &times) {
            tracing::debug!(path = %path.display(), %error, "the activity log's time cannot be set");
        }
    }

    /// Without it the next start compares everything.
    fn discard(&mut self, member: &str) -> bool {
        let Some(LogFile { path, .. }) = &self.file else { return true };
        match durable::remove(path) {
            Ok(()) => {
                tracing::error!(
                    member,
                    path = %path.display(),
                    "the activity log is given up: after a crash all of the disks would be compared, \
                     until the daemon is started again"
                );
                self.file = None;
                true
            }
            Err(error) => {
                tracing::error!(
                    member,
                    path = %path.display(),
                    %error,
                    "the activity log can be neither written nor removed: guests' writes wait"
                );
                false
            }
        }
    }
}

impl Owner {
    /// Tells the log what the turn has shown, and does what it asks for.
    pub(super) fn drive_log(&mut self) {
        let Self { logging, sequencer, copying, now, .. } = self;
        super::replication::drive_activity(&mut logging.activity, sequencer, copying, *now);
        while let Some(action) = self.logging.activity.poll_action() {
            match action {
                Action::Go(request) => {
                    let request = RequestId(request);
                    let logged = self.logging.held_back.remove(&request).expect("held back");
                    self.sequence_logged(request, logged);
                }
                Action::Write { offset, block } => self.write_log(offset, &block),
                Action::Flush { disk, number } => {
                    let token = Token::LogFlush(disk.0, number).to_u64();
                    let disk = &self.disks[self.nth(disk)];
                    self.ring.fsync(token, disk.fd(), SyncKind::Data);
                }
                Action::Discard => {
                    let ok = self.logging.discard(&self.member);
                    self.logging.activity.discarded(ok);
                }
            }
        }
        if self.logging.activity.needs_tick() {
            self.arm_tick();
        }
    }

    fn write_log(&mut self, offset: u64, block: &[u8]) {
        let file = &self.logging.file.as_ref().expect("a log that is on has a file").file;
        let data = self.pool.copy_of(block).freeze_all();
        self.ring.write(Token::LogWrite.to_u64(), file.fd(), data, offset, Durability::Durable);
    }

    pub(super) fn log_written(&mut self, result: &io::Result<u32>) {
        let ok = matches!(result, Ok(count) if *count as usize == BLOCK_BYTES);
        if let Err(error) = result {
            tracing::error!(member = self.member, %error, "cannot write the activity log");
        }
        self.logging.activity.written(ok);
    }

    pub(super) fn log_flushed(&mut self, disk: u16, number: u64, result: &io::Result<u32>) {
        if let Err(error) = result {
            self.flush_failed(self.nth(DiskId(disk)), error);
        }
        self.logging.activity.flush_ended(DiskId(disk), number, result.is_ok());
    }

    pub(super) fn publish_log_stats(&mut self) {
        let activity = &self.logging.activity;
        let (stats, counts) = (&self.stats.activity, activity.counts());
        let (entries, exposed_bytes) = activity.exposure();
        stats.entries.store(entries.into(), Relaxed);
        stats.exposed_bytes.store(exposed_bytes, Relaxed);
        stats.hits.store(counts.hits, Relaxed);
        stats.misses.store(counts.misses, Relaxed);
        stats.transactions.store(counts.transactions, Relaxed);
        stats.overflows.store(counts.overflows, Relaxed);
        let standing = activity.standing();
        stats.set_standing(standing);
        if self.logging.said == Some(standing) {
            return;
        }
        let is_news =
            |said: MonoNanos| self.now.since_ns(said) >= super::FULL_SAID_EVERY.as_nanos() as u64;
        if !self.logging.said_at.is_none_or(is_news) {
            return;
        }
        (self.logging.said, self.logging.said_at) = (Some(standing), Some(self.now));
        let member = &self.member;
        match standing {
            Standing::Mapped => tracing::info!(
                member,
                exposed_bytes,
                "after a crash only what the activity log has would be compared"
            ),
            Standing::Everything(why) => tracing::warn!(
                member,
                exposed_bytes,
                why = %why,
                "after a crash all of the disks would be compared"
            ),
            Standing::Off | Standing::Failing => {}
        }
    }
}
