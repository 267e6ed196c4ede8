//! What the owner loop does for the activity log: its requests wait here until the log has their
//! extents, and the driver does its I/O.

use super::Owner;
use super::driver::{DiskOp, Driver};
use crate::activity::{Action, ActivityLog, BLOCK_BYTES, Standing};
use crate::sequencer::{Extent, RequestId};
use std::collections::HashMap;
use std::io;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;
use tidelock_protocol::ids::{DiskId, MonoNanos};
use tidelock_protocol::record::Effect;

const TOUCH_EVERY: Duration = Duration::from_secs(1);

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
    has_file: bool,
    held_back: HashMap<RequestId, Logged>,
    /// Guests' flushes under way: which disk, and which number.
    flushes: HashMap<RequestId, (DiskId, u64)>,
    /// The last time at which the file's time was set.
    touched: Option<MonoNanos>,
    said: Option<Standing>,
    said_at: Option<MonoNanos>,
}

impl Logging {
    pub(super) fn new(activity: ActivityLog, has_file: bool) -> Self {
        let (held_back, flushes) = (HashMap::new(), HashMap::new());
        Self { activity, has_file, held_back, flushes, touched: None, said: None, said_at: None }
    }

    pub(super) fn hold_back(&mut self, request: RequestId, logged: Logged) {
        self.held_back.insert(request, logged);
    }

    pub(super) fn guest_flush_begins(&mut self, request: RequestId, disk: DiskId) {
        let number = self.activity.flush_begins(disk);
        self.flushes.insert(request, (disk, number));
    }

    /// Returns the disk.
    pub(super) fn guest_flush_ended(&mut self, request: RequestId, ok: bool) -> Option<DiskId> {
        let (disk, number) = self.flushes.remove(&request)?;
        self.activity.flush_ended(disk, number, ok);
        Some(disk)
    }

    /// The disk of a guest's flush under way.
    pub(super) fn flushed_disk(&self, request: RequestId) -> Option<DiskId> {
        Some(self.flushes.get(&request)?.0)
    }
}

impl<D: Driver> Owner<D> {
    /// A local write begins. Once a second the file gets the time: an image that is written to long after that is another
    /// one at the next start.
    pub(super) fn touch_log(&mut self) {
        let is_due = |at: MonoNanos| self.now.since_ns(at) >= TOUCH_EVERY.as_nanos() as u64;
        if !self.logging.has_file || !self.logging.touched.is_none_or(is_due) {
            return;
        }
        self.logging.touched = Some(self.now);
        if let Err(error) = self.driver.touch_log() {
            let member = &self.member;
            tracing::debug!(member, %error, "the activity log's time cannot be set");
        }
    }

    /// Without the log the next start compares everything.
    fn discard_log(&mut self) -> bool {
        if !self.logging.has_file {
            return true;
        }
        match self.driver.remove_log() {
            Ok(()) => {
                tracing::error!(
                    member = self.member,
                    "the activity log is given up: after a crash all of the disks would be compared, \
                     until the daemon is started again"
                );
                self.logging.has_file = false;
                true
            }
            Err(error) => {
                tracing::error!(
                    member = self.member,
                    %error,
                    "the activity log can be neither written nor removed: guests' writes wait"
                );
                false
            }
        }
    }

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
                Action::Write { offset, block } => self.driver.write_log(&block, offset),
                Action::Flush { disk, number } => {
                    let file = self.disks[self.nth(disk)].file();
                    self.driver.sync(DiskOp::LogFlush(disk, number), file);
                }
                Action::Discard => {
                    let ok = self.discard_log();
                    self.logging.activity.discarded(ok);
                }
            }
        }
        if self.logging.activity.needs_tick() {
            self.arm_tick();
        }
    }

    pub(super) fn log_written(&mut self, result: &io::Result<u32>) {
        let ok = matches!(result, Ok(count) if *count as usize == BLOCK_BYTES);
        if let Err(error) = result {
            tracing::error!(member = self.member, %error, "cannot write the activity log");
        }
        self.logging.activity.written(ok);
    }

    pub(super) fn log_flushed(&mut self, disk: DiskId, number: u64, result: &io::Result<u32>) {
        if let Err(error) = result {
            self.flush_failed(self.nth(disk), error);
        }
        self.logging.activity.flush_ended(disk, number, result.is_ok());
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

#[cfg(test)]
mod tests {
    use super::super::PublishPending;
    use super::super::tests::{Recorder, owner};
    use super::*;
    use std::sync::Arc;
    use std::sync::atomic::Ordering::Relaxed;
    use tidelock_protocol::hlc::Hlc;
    use tidelock_protocol::ids::Seq;

    struct Nowhere;

    impl PublishPending for Nowhere {
        fn publish(&self, _: Seq, _: Hlc) {}
    }

    fn with_log(has_file: bool) -> Owner<Recorder> {
        let mut owner = owner(Arc::new(Nowhere), None);
        owner.logging.has_file = has_file;
        owner
    }

    #[test]
    fn a_log_that_is_given_up_is_gone_or_writes_wait() {
        let mut of = with_log(true);
        of.driver.cannot_remove_log.store(true, Relaxed);
        assert!(!of.discard_log() && of.logging.has_file, "it may still be gone by");
        of.driver.cannot_remove_log.store(false, Relaxed);
        assert!(of.discard_log());
        assert_eq!(of.driver.removed_logs, 1);
        // A second time there is none any more.
        assert!(of.discard_log());
        of.touch_log();
        assert_eq!((of.driver.removed_logs, of.driver.touched_logs), (1, 0));
    }

    #[test]
    fn the_file_of_the_log_gets_the_time_once_a_second() {
        let mut of = with_log(true);
        let (begin, second) = (of.now, TOUCH_EVERY.as_nanos() as u64);
        for (after_ns, touched) in [(0, 1), (second - 1, 1), (second, 2), (2 * second - 1, 2)] {
            of.now = MonoNanos(begin.0 + after_ns);
            of.touch_log();
            assert_eq!(of.driver.touched_logs, touched, "{after_ns}");
        }
        let mut without = with_log(false);
        without.touch_log();
        assert_eq!(without.driver.touched_logs, 0);
    }
}
