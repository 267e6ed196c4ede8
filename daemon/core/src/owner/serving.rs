//! Guests' requests: what they ask of the disks, and what they are answered.

use super::Owner;
use super::driver::{DiskOp, Driver, GuestIo, GuestOp};
use super::logging::Logged;
use crate::sequencer::{DiskError, EIO, Extent, RequestId};
use bytes::Bytes;
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use tidelock_buffers::AlignedBuf;
use tidelock_protocol::ids::{DiskId, MonoNanos};
use tidelock_protocol::record::Effect;

/// Once in so long a failed read of a disk is logged.
const SAID_EVERY: Duration = Duration::from_secs(10);

impl<D: Driver> Owner<D> {
    /// A guest asks. The answer goes to the driver, mostly later.
    ///
    /// Writes that were under way when an earlier process was killed are done again first, as soon as the backup has
    /// confirmed its stream: until then a guest would read what is about to change.
    pub fn ask(&mut self, request: GuestIo) {
        self.open_requests += 1;
        match self.left {
            Some(_) => self.early.push(request),
            None => self.begin_request(request),
        }
    }

    pub(super) fn begin_request(&mut self, request: GuestIo) {
        let GuestIo { id, extent, op } = request;
        let count = |n: &AtomicU64, by: u64| n.fetch_add(by, Ordering::Relaxed);
        match op {
            GuestOp::Read => {
                count(&self.stats.reads, 1);
                count(&self.stats.read_bytes, extent.len_bytes);
                self.reads.insert(id, extent);
                let disk = &self.disks[self.nth(extent.disk)];
                let (at, len) = disk.direct_range(extent.offset, extent.len_bytes);
                let buf = self.pool.get(len);
                self.driver.read(DiskOp::Read(id), disk.file(), buf, 0..len, at);
            }
            GuestOp::Flush => {
                count(&self.stats.flushes, 1);
                let disk = &self.disks[self.nth(extent.disk)];
                if disk.poisoned().is_some() {
                    return self.answer(id, Err(DiskError(EIO)));
                }
                self.sequencer.flush_asked();
                self.driver.sync(DiskOp::Flush(id), disk.file());
                self.logging.guest_flush_begins(id, extent.disk);
            }
            GuestOp::Write { data, fua } => {
                count(&self.stats.writes, 1);
                count(&self.stats.written_bytes, extent.len_bytes);
                self.sequence(id, Logged { extent, effect: Effect::Write(data), fua });
            }
            GuestOp::Zero { fua, .. } | GuestOp::Discard { fua } => {
                count(&self.stats.writes, 1);
                match self.disks[self.nth(extent.disk)].zeroing(&op, extent.len_bytes) {
                    Ok(Some(effect)) => self.sequence(id, Logged { extent, effect, fua }),
                    Ok(None) => self.answer(id, Ok(Bytes::new())),
                    Err(error) => self.answer(id, Err(error)),
                }
            }
        }
    }

    /// A guest's write or zeroing: to the sequencer as soon as the activity log has its extent.
    fn sequence(&mut self, request: RequestId, logged: Logged) {
        if self.logging.activity.admit(request.0, logged.extent) {
            self.sequence_logged(request, logged);
        } else {
            self.logging.hold_back(request, logged);
        }
    }

    /// The log has its extent.
    pub(super) fn sequence_logged(&mut self, request: RequestId, logged: Logged) {
        let Logged { extent, effect, fua } = logged;
        self.observe_tags();
        self.touch_log();
        self.sequencer.submit(request, extent, effect, fua, self.now, self.wall_ms);
    }

    /// A guest's read of the local disk has ended, or a part of it.
    pub(super) fn has_read(
        &mut self,
        request: RequestId,
        result: io::Result<u32>,
        buffer: Option<AlignedBuf>,
    ) {
        let extent = self.reads[&request];
        let disk = &self.disks[self.nth(extent.disk)];
        let (at, len) = disk.direct_range(extent.offset, extent.len_bytes);
        let read = result.map(|count| (count, buffer.expect("the buffer of a read")));
        let answer = match read {
            Ok((0, buf)) if buf.len() < len => Err(io::ErrorKind::UnexpectedEof.into()),
            Ok((_, buf)) if buf.len() < len => {
                let filled = buf.len();
                let op = DiskOp::Read(request);
                return self.driver.read(op, disk.file(), buf, filled..len, at + filled as u64);
            }
            Ok((_, buf)) => {
                let from = (extent.offset - at) as usize;
                Ok(buf.freeze(from..from + extent.len_bytes as usize))
            }
            Err(error) => Err(error),
        };
        self.reads.remove(&request);
        match answer {
            Ok(data) => {
                // The sequencer publishes P, which is carried out before answers leave.
                self.sequencer.is_read(extent);
                self.answer(request, Ok(data));
            }
            Err(error) => {
                self.stats.disk_errors.fetch_add(1, Ordering::Relaxed);
                self.say_failed_read(extent, &error);
                self.answer(request, Err(DiskError::of(&error)));
            }
        }
    }

    fn say_failed_read(&mut self, extent: Extent, error: &io::Error) {
        let is_news = |at: &MonoNanos| self.now.since_ns(*at) > SAID_EVERY.as_nanos() as u64;
        if !self.said_at.get(&extent.disk).is_none_or(is_news) {
            return;
        }
        self.said_at.insert(extent.disk, self.now);
        tracing::error!(
            member = self.member, disk = self.disks[self.nth(extent.disk)].name(), %error,
            offset = extent.offset, len = extent.len_bytes,
            "the local disk failed a read; further ones are said every {} s, `tidelock_disk_errors_total` counts \
             all of them",
            SAID_EVERY.as_secs()
        );
    }

    /// A guest's flush has ended.
    pub(super) fn flushed(&mut self, request: RequestId, result: io::Result<u32>) {
        let disk = self.logging.guest_flush_ended(request, result.is_ok());
        if let (Err(error), Some(disk)) = (&result, disk) {
            self.flush_failed(self.nth(disk), error);
        }
        self.answer(request, result.map(|_| Bytes::new()).map_err(|e| DiskError::of(&e)));
    }

    /// A disk has failed a flush.
    pub(super) fn flush_failed(&mut self, disk: usize, error: &io::Error) {
        self.stats.disk_errors.fetch_add(1, Ordering::Relaxed);
        if self.disks[disk].poison(&self.member, error) {
            let entry = (self.disks[disk].name().to_owned(), error.to_string());
            self.view.change_trouble(|trouble| trouble.failed_disks.push(entry));
        }
    }

    /// A request has its answer.
    pub(super) fn answer(&mut self, request: RequestId, answer: Result<Bytes, DiskError>) {
        self.open_requests -= 1;
        self.driver.answer(request, answer);
    }

    /// Tells for how long the local disk has not ended what it was asked for.
    pub(super) fn publish_disk_wait(&mut self) {
        let wait = self.driver.oldest_op().map(|(op, waited)| {
            let disk = match op {
                DiskOp::Local(op) => Some(self.local_ops[&op].disk()),
                DiskOp::LogFlush(disk, _) => Some(disk),
                DiskOp::Read(request) => self.reads.get(&request).map(|extent| extent.disk),
                DiskOp::Flush(request) => self.logging.flushed_disk(request),
                DiskOp::LogWrite => None,
            };
            let since = MonoNanos(self.now.0.saturating_sub(waited.as_nanos() as u64));
            (since, disk.map(|disk: DiskId| self.nth(disk)))
        });
        self.stats.disk_wait.set(wait);
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::owner;
    use super::*;
    use crate::owner::PublishPending;
    use std::sync::Arc;
    use tidelock_protocol::hlc::Hlc;
    use tidelock_protocol::ids::Seq;

    struct Nowhere;

    impl PublishPending for Nowhere {
        fn publish(&self, _: Seq, _: Hlc) {}
    }

    #[test]
    fn failed_reads_are_logged_once_in_ten_seconds_for_each_disk() {
        let mut owner = owner(Arc::new(Nowhere), None);
        let begin = MonoNanos(1);
        let said = (0..1000).filter(|step: &u64| {
            owner.now = MonoNanos(begin.0 + step * 20_000_000);
            let before = owner.said_at.get(&DiskId(0)).copied();
            let extent = Extent { disk: DiskId(0), offset: 0, len_bytes: 512 };
            owner.say_failed_read(extent, &io::Error::from_raw_os_error(EIO));
            owner.said_at.get(&DiskId(0)).copied() != before
        });
        assert_eq!(said.count(), 2, "a thousand failures in 20 s");
    }
}
