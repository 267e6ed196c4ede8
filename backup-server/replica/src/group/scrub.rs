//! Schedule of the reads that only verify sealed segments and images.
//!
//! On the fold's thread, when it has nothing else to do, a piece at a time: all sealed segments that are kept once
//! after the group was opened, and once a day from then on; after them all images, once a week. Before all others come
//! places at which somebody has found damage, and now and then what is on record as damaged. What is found goes on
//! record, and what is as it was written again goes off it (`damage.rs`); the group goes on.

use super::{DamagedDisk, Group, GroupError, Now};
use crate::history::Affected;
use serde::{Deserialize, Serialize};
use std::ops::Range;
use std::sync::{Arc, RwLock};
use tidelock_protocol::ids::MonoNanos;
use tidelock_storage::{Storage, StorageFile};
use tidelock_store::damage::LostWith;
use tidelock_store::extents::DiskKey;
use tidelock_store::journal;
use tidelock_store::view::{SharedOverlay, View};

/// Between two segments, in milliseconds: with segments of 64 MiB at most 64 MiB/s are read.
const PAUSE_MS: u64 = 1000;
/// From the beginning of one round through the segments to that of the next one, in milliseconds.
const ROUND_MS: u64 = 24 * 3600 * 1000;
/// The same through the images.
const IMAGES_ROUND_MS: u64 = 7 * ROUND_MS;
/// So much of an image is read at once.
const PIECE_BYTES: u64 = 32 << 20;
/// Bytes that are read of images in a millisecond, on average: 16 MiB/s.
const IMAGES_BYTES_MS: u64 = (16 << 20) / 1000;

/// What was verified.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ScrubStatus {
    /// A round through the segments runs.
    pub running: bool,
    /// Sealed segments that are not verified yet in this round.
    pub segments_left: u64,
    /// A round through the images runs.
    pub images_running: bool,
    /// Bytes that were verified since the group was opened.
    pub verified_bytes: u64,
    /// The oldest segment on record as damaged, with what is wrong.
    pub damaged: Option<String>,
}

/// Something to verify.
#[derive(Debug)]
pub enum ScrubJob<F> {
    /// A segment.
    Segment(journal::ScrubJob<F>),
    /// A part of an image, where the journal has nothing over it.
    Image {
        /// The disk.
        key: DiskKey,
        /// The part of it, in bytes.
        range: Range<u64>,
        /// A view of the disk.
        view: View<F>,
        /// Ranges of the image that are on record as damaged.
        marked: Vec<Range<u64>>,
    },
}

/// The outcome.
#[derive(Debug)]
pub enum ScrubDone {
    /// The outcome for this segment.
    Segment(u64, journal::Scrubbed),
    /// The outcome for a part of an image.
    Image {
        /// The disk.
        key: DiskKey,
        /// The part of it, in bytes.
        range: Range<u64>,
        /// Parts that are not what was written, with the bytes that were read; or the disk did not read.
        found: std::io::Result<(Vec<Range<u64>>, u64)>,
        /// Parts that were on record and are as they were written.
        whole: Vec<Range<u64>>,
    },
}

impl<F: StorageFile> ScrubJob<F> {
    /// Does it.
    #[must_use]
    pub fn run(self) -> ScrubDone {
        match self {
            Self::Segment(job) => ScrubDone::Segment(job.segment(), job.run()),
            Self::Image { key, range, view, marked } => {
                let is_whole = |part: &Range<u64>| {
                    let damaged = view.image().damaged_in(part.clone());
                    damaged.is_ok_and(|(damaged, _)| damaged.is_empty())
                };
                let whole = marked.into_iter().filter(is_whole).collect();
                let found = view.damaged_in_image(range.clone());
                ScrubDone::Image { key, range, found, whole }
            }
        }
    }
}

#[derive(Debug)]
pub(super) struct Scrub {
    /// Up to this segment all are verified.
    done: u64,
    running: bool,
    next_at: MonoNanos,
    round_began: MonoNanos,
    /// Up to where the images are verified in this round; `None`: none runs.
    images: Option<(DiskKey, u64)>,
    images_next_at: MonoNanos,
    images_round_began: MonoNanos,
    verified_bytes: u64,
}

/// Before all disks.
const FIRST: (DiskKey, u64) = (DiskKey::FIRST, 0);

impl Scrub {
    pub(super) fn new(now: MonoNanos) -> Self {
        Self {
            done: 0,
            running: true,
            next_at: after_ms(now, PAUSE_MS),
            round_began: now,
            images: Some(FIRST),
            images_next_at: after_ms(now, PAUSE_MS),
            images_round_began: now,
            verified_bytes: 0,
        }
    }
}

fn after_ms(now: MonoNanos, ms: u64) -> MonoNanos {
    MonoNanos(now.0.saturating_add(ms * 1_000_000))
}

impl<S: Storage> Group<S> {
    /// Something to verify, if anything is due. Its outcome goes to [`Group::scrub_done`]; until then
    /// there is no [`Group::fold_job`] and no [`Group::index_job`].
    pub fn scrub_job(&mut self, now: Now) -> Option<ScrubJob<S::File>> {
        let busy = self.fold.is_running || self.fold.aside;
        if busy || self.broken.is_some() {
            return None;
        }
        let wanted = self.wanted_scrub(now).map(ScrubJob::Segment);
        let job = wanted
            .or_else(|| self.wanted_image_scrub())
            .or_else(|| self.segment_scrub(now).map(ScrubJob::Segment))
            .or_else(|| self.image_scrub(now));
        self.fold.aside = job.is_some();
        job
    }

    /// The next segment of a round.
    fn segment_scrub(&mut self, now: Now) -> Option<journal::ScrubJob<S::File>> {
        if now.mono < self.scrub.next_at {
            return None;
        }
        if !self.scrub.running {
            self.scrub.running = true;
            self.scrub.done = 0;
            self.scrub.round_began = now.mono;
        }
        let from = self.scrub.done.max(self.fold.position.segment.saturating_sub(1));
        let job = self.journal.scrub_job(from);
        if job.is_none() {
            self.scrub.running = false;
            self.scrub.next_at = after_ms(self.scrub.round_began, ROUND_MS);
        }
        job
    }

    /// The next piece of a round through the images.
    fn image_scrub(&mut self, now: Now) -> Option<ScrubJob<S::File>> {
        if now.mono < self.scrub.images_next_at || self.scrub.running {
            return None;
        }
        if self.scrub.images.is_none() {
            self.scrub.images_round_began = now.mono;
        }
        let (key, offset) = self.scrub.images.unwrap_or(FIRST);
        let keys: Vec<DiskKey> = self.images.range(key..).map(|(key, _)| *key).collect();
        let job = keys.into_iter().find_map(|of| {
            let from = if of == key { offset } else { 0 };
            self.image_piece(of, from)
        });
        match &job {
            Some(ScrubJob::Image { key, range, .. }) => self.scrub.images = Some((*key, range.end)),
            _ => {
                let began = self.scrub.images_round_began;
                self.scrub.images = None;
                self.scrub.images_next_at = after_ms(began, IMAGES_ROUND_MS);
            }
        }
        job
    }

    /// A place at which a reader has found damage.
    fn wanted_image_scrub(&mut self) -> Option<ScrubJob<S::File>> {
        let noticed = self.damage.noticed.clone();
        std::iter::from_fn(|| noticed.take_place())
            .find_map(|(key, offset)| self.image_piece(key, offset))
    }

    /// `None`: the disk has nothing there, or is not there.
    fn image_piece(&mut self, key: DiskKey, offset: u64) -> Option<ScrubJob<S::File>> {
        let size_bytes = self.manifest.disk(key.writer, key.disk)?.size_bytes;
        let image = self.images.get(&key)?;
        // An I/O error now is reported to the next reader.
        let from = image.next_data(offset).ok()??.start.max(offset);
        let range = from..size_bytes.min(from.saturating_add(PIECE_BYTES));
        if range.is_empty() {
            return None;
        }
        let of_image = |(range, lost): (Range<u64>, Option<LostWith>)| {
            (lost == Some(LostWith(None))).then_some(range)
        };
        let marked = self.fold.damaged.pieces(key, range.clone()).into_iter();
        let marked = marked.filter_map(of_image).collect();
        let image = image.clone();
        let overlay = self.overlay_of_oldest().or_else(|| self.overlay_of_now().ok())?;
        let view = View::new(key, size_bytes, image, overlay);
        Some(ScrubJob::Image { key, range, view, marked })
    }

    /// The oldest state that can be seen: a fold that was interrupted has changed nothing of it in the images, and
    /// later states see less of these. `None`: the journal is damaged there.
    fn overlay_of_oldest(&mut self) -> Option<SharedOverlay<S::File>> {
        let history = self.history().ok()?;
        let overlay = history.overlay(&history.oldest().ok()?).ok()?;
        Some(Arc::new(RwLock::new(overlay)))
    }

    /// Such a job has ended.
    pub fn scrub_done(&mut self, now: Now, done: ScrubDone) {
        self.fold.aside = false;
        self.tick(now);
        let recorded = match done {
            ScrubDone::Segment(segment, scrubbed) => self.segment_scrubbed(now, segment, scrubbed),
            ScrubDone::Image { key, range, found: Err(error), .. } => {
                let DamagedDisk { name, offset, .. } = self.part_of_image(key, range);
                let notice = format!("the image of disk {name} cannot be read at byte {offset}");
                self.notices.push(format!("{notice}: {error}. It is verified again in a day"));
                self.scrub.images = None;
                self.scrub.images_next_at = after_ms(now.mono, ROUND_MS);
                Ok(())
            }
            ScrubDone::Image { key, found: Ok((damaged, bytes)), whole, .. } => {
                self.scrub.verified_bytes += bytes;
                self.scrub.images_next_at = after_ms(now.mono, bytes / IMAGES_BYTES_MS);
                self.image_scrubbed(key, &damaged, &whole)
            }
        };
        if let Err(error) = recorded {
            // Found again in the next round, and by whoever reads it.
            self.notices.push(format!("damage cannot be put on record: {error}"));
        }
    }

    fn segment_scrubbed(
        &mut self,
        now: Now,
        segment: u64,
        scrubbed: journal::Scrubbed,
    ) -> Result<(), GroupError> {
        self.scrub.verified_bytes += scrubbed.bytes;
        if !self.damage.wanted.remove(&segment) {
            self.scrub.done = segment;
            self.scrub.next_at = after_ms(now.mono, PAUSE_MS);
        }
        match scrubbed.damage {
            Some(damage) => self.quarantine(damage),
            None => self.is_whole_again(segment),
        }
    }

    fn image_scrubbed(
        &mut self,
        key: DiskKey,
        damaged: &[Range<u64>],
        whole: &[Range<u64>],
    ) -> Result<(), GroupError> {
        let mut record = (*self.fold.damaged).clone();
        for range in damaged {
            record.mark(key, range.clone(), LostWith(None));
        }
        for range in whole {
            record.image_is_whole(key, range.clone());
        }
        if record == *self.fold.damaged {
            return Ok(());
        }
        for range in damaged {
            let DamagedDisk { name, offset, len_bytes, .. } =
                self.part_of_image(key, range.clone());
            self.notices.push(format!(
                "the image of disk {name} is damaged: {len_bytes} bytes at byte {offset} are not what was written. While \
                 the primary is there, `tidelock verify --repair` on its host writes them again"
            ));
        }
        self.record_image_damage(record)
    }

    fn part_of_image(&self, key: DiskKey, range: Range<u64>) -> DamagedDisk {
        DamagedDisk::new(&self.manifest, &Affected { key, range, segment: None })
    }

    /// Whether a round of verification runs, or something is to be looked at again: both go on by the clock.
    #[must_use]
    pub fn is_scrubbing(&self) -> bool {
        let Scrub { running, images, .. } = self.scrub;
        (running || images.is_some() || self.damage.looks_again()) && self.broken.is_none()
    }

    pub(super) fn scrub_status(&self) -> ScrubStatus {
        let Scrub { running, images, verified_bytes, .. } = self.scrub;
        ScrubStatus {
            running,
            segments_left: if running { self.journal.sealed_after(self.scrub.done) } else { 0 },
            images_running: images.is_some(),
            verified_bytes,
            damaged: self.damage.first_of_all(),
        }
    }
}
