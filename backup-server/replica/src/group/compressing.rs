//! Which sealed segments are compressed, and when.
//!
//! Work for the fold's thread, when it has nothing to fold, no index to write and nothing to verify: it
//! is never waited for. Of segments that have an index, whose newest record has the configured age
//! by the wall clock, and that the next fold does not take away; not of damaged ones.
//!
//! Invariant: before there is a compressed segment `group.json` has the format that says so, because a
//! program that does not know of them would miss segments ([`crate::manifest`]).

use super::{Group, Now};
use serde::{Deserialize, Serialize};
use tidelock_protocol::ids::MonoNanos;
use tidelock_storage::{Storage, StorageFile};
use tidelock_store::journal::{Compress, CompressJob, Compressed, JournalError, Segment};

/// So many bytes of segments are compressed each second at most.
const RATE_BYTES_S: u64 = 64 << 20;
/// After a failure it is tried again so much later, in nanoseconds.
const RETRY_NANOS: u64 = 60_000_000_000;

/// What of the journal is compressed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CompressedStatus {
    /// Segments.
    pub segments: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Bytes that they take on disk.
    pub stored_bytes: u64,
}

impl CompressedStatus {
    /// What of these segments is compressed.
    #[must_use]
    pub fn of<F: StorageFile>(segments: &[Segment<F>]) -> Self {
        let mut status = Self::default();
        for of in segments.iter().filter(|of| of.file.cold().is_some()) {
            status.segments += 1;
            status.bytes += of.len_bytes;
            status.stored_bytes += of.stored_bytes();
        }
        status
    }
}

#[derive(Debug, Default)]
pub(super) struct Compressing {
    /// Up to this segment all are compressed, or not worth it.
    done: u64,
    next_at: MonoNanos,
    /// The last attempt has failed, which was told.
    failed: bool,
}

impl<S: Storage> Group<S> {
    /// A segment to compress, if one is due. Its outcome goes to [`Group::compress_done`]; until then
    /// there is no [`Group::fold_job`], [`Group::index_job`] or [`Group::scrub_job`].
    pub fn compress_job(&mut self, now: Now) -> Option<CompressJob<S>> {
        let how = self.options.compress?;
        let busy = self.fold.is_running || self.fold.aside;
        if busy || self.broken.is_some() || now.mono < self.compressing.next_at {
            return None;
        }
        self.tick(now);
        let segment = self.next_to_compress(how)?;
        let job = self.journal.compress_job(segment, how);
        self.fold.aside = job.is_some();
        job
    }

    fn next_to_compress(&mut self, how: Compress) -> Option<u64> {
        let mut stays = None;
        loop {
            let (segment, newest) = self.journal.next_plain(self.compressing.done)?;
            if newest.saturating_add(how.after_ms) > self.journal.now_ms() {
                return None;
            }
            let stays = *stays.get_or_insert_with(|| self.stays().segment);
            if segment >= stays && !self.damage.quarantine.contains_key(&segment) {
                return Some(segment);
            }
            self.compressing.done = segment;
        }
    }

    /// Such a job has ended, for this segment.
    pub fn compress_done(
        &mut self,
        now: Now,
        segment: u64,
        len_bytes: u64,
        result: Result<Compressed<S::File>, JournalError>,
    ) {
        self.fold.aside = false;
        self.tick(now);
        let file = match result {
            Ok(Compressed::Cold(file)) => Some(file),
            Ok(Compressed::NotSmaller) => None,
            Ok(Compressed::Damaged(damage)) => {
                if let Err(error) = self.quarantine(damage) {
                    let what = "damage of the journal cannot be put on record";
                    self.notices.push(format!("{what}: {error}"));
                }
                None
            }
            Err(error) => return self.compress_failed(now, &error),
        };
        self.compressing.failed = false;
        self.compressing.done = segment;
        let pause = u128::from(len_bytes) * 1_000_000_000 / u128::from(RATE_BYTES_S);
        self.compressing.next_at = MonoNanos(now.mono.0.saturating_add(pause as u64));
        let Some(file) = file else { return };
        if let Err(error) = self.journal.compressed(segment, file) {
            // It takes room until the segment goes; the next start tries again.
            self.notices.push(format!(
                "journal segment {segment} is compressed, but its own file cannot be removed: {error}"
            ));
        }
        // Who reads the disks as of now must not keep the file.
        if let Err(error) = self.refresh_overlay() {
            self.break_down(&error.into());
        }
    }

    fn compress_failed(&mut self, now: Now, error: &dyn std::fmt::Display) {
        self.compressing.next_at = MonoNanos(now.mono.0.saturating_add(RETRY_NANOS));
        if !std::mem::replace(&mut self.compressing.failed, true) {
            self.notices.push(format!(
                "the journal cannot be compressed: {error}. The server goes on, and tries again"
            ));
        }
    }

    /// Whether segments will be due as time goes by, and how long it is certain that none is, in
    /// nanoseconds.
    #[must_use]
    pub fn is_compressing(&self, now: Now) -> Option<u64> {
        self.options.compress.filter(|_| self.broken.is_none())?;
        self.journal.next_plain(self.compressing.done)?;
        Some(self.compressing.next_at.0.saturating_sub(now.mono.0))
    }

    pub(super) fn compressed_status(&self) -> CompressedStatus {
        CompressedStatus::of(self.journal.segments())
    }
}
