//! Damaged segments of a group: on record, told, given up, taken off record again.
//!
//! What is known is told with the points in time that it affects ([`crate::history::AffectedSpan`]).
//! That is found out anew when damage is found or folded, and when something is written over it.

use super::{Group, GroupError, JOURNAL_DIR, Now, RecoverError};
use crate::history::{Affected, AffectedSpan, Point};
use crate::manifest::Manifest;
use crate::quarantine::{self, QUARANTINE_DIR, Quarantine, Quarantined};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::io::{self, IoSlice};
use std::sync::{Arc, PoisonError};
use thiserror::Error;
use tidelock_protocol::hlc::Hlc;
use tidelock_protocol::ids::MonoNanos;
use tidelock_protocol::record::{Body, Effect};
use tidelock_storage::Storage;
use tidelock_storage::json::FileError;
use tidelock_store::damage::{ImageDamage, Known, Noticed, SegmentDamage};
use tidelock_store::extents::DiskKey;
use tidelock_store::fold::{self, FoldPosition};
use tidelock_store::image;
use tidelock_store::journal::{
    ColdError, Entry, IndexEntry, Placed, Position, ScrubJob, Segment, SegmentHeader,
    cold_file_name, open_segment_file, payload_of,
};
use tidelock_store::view::Overlay;

/// It is not found out more often what is affected, in nanoseconds.
const PAUSE_NANOS: u64 = 1_000_000_000;
/// What is on record as damaged is looked at again after this, in milliseconds, and then each time after twice as long: a
/// disk that did not read for a while has damaged nothing.
pub(super) const LOOK_FIRST_MS: u64 = 10_000;
/// But not less often than this.
const LOOK_MAX_MS: u64 = 3_600_000;
/// So many parts are named in a refusal.
const SAID_MAX: usize = 8;

/// A damaged segment as it is told.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DamagedSegment {
    /// Its index.
    pub segment: u64,
    /// Its file, in the group's directory; `None`: it was given up, and is not there any more.
    pub file: Option<String>,
    /// When it was found, in milliseconds since the Unix epoch.
    pub found_unix_ms: u64,
    /// What is wrong, and where.
    pub reason: String,
    /// What can still be told of it.
    pub known: Known,
    /// Records whose data is damaged, as far as they are known.
    pub records: u64,
    /// Their bytes.
    pub bytes: u64,
    /// An operator has given it up.
    pub given_up: bool,
    /// States at this time and later are affected; `None`: no point in the window is.
    pub from: Option<Hlc>,
    /// Those at this time and later are not any more; `None`: the latest is.
    pub until: Option<Hlc>,
    /// Points within that span cannot be asked for.
    pub is_untold: bool,
}

/// What of a disk cannot be read in the state that a recovery would take.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DamagedDisk {
    /// member.disk
    pub name: String,
    /// The damaged segment that had it; `None`: the image had it.
    pub segment: Option<u64>,
    /// Where it begins, in bytes.
    pub offset: u64,
    /// Its bytes.
    pub len_bytes: u64,
}

impl DamagedDisk {
    /// With the disk's name.
    #[must_use]
    pub fn new(manifest: &Manifest, of: &Affected) -> Self {
        Self {
            name: manifest.disk_name(of.key),
            segment: of.segment,
            offset: of.range.start,
            len_bytes: of.range.end - of.range.start,
        }
    }
}

/// Why a segment cannot be given up.
#[derive(Debug, Error)]
pub enum ForgetError {
    /// It is not damaged.
    #[error("segment {segment} is not on record as damaged; those are: {known}")]
    Unknown {
        /// Which.
        segment: u64,
        /// Which are.
        known: String,
    },
    /// The record cannot be replaced.
    #[error(transparent)]
    File(#[from] FileError),
    /// The file cannot be removed.
    #[error("cannot remove the file: {0}")]
    Io(#[from] io::Error),
}

#[derive(Debug, Default)]
pub(super) struct DamageState {
    pub(super) quarantine: Arc<Quarantine>,
    /// Found by readers.
    pub(super) noticed: Noticed,
    /// To be looked at before all others.
    pub(super) wanted: BTreeSet<u64>,
    /// When all are looked at again, and how long after the time before.
    look_at: Option<(MonoNanos, u64)>,
    /// What is affected may be something else by now.
    pub(super) is_due: bool,
    next_at: MonoNanos,
    spans: Vec<AffectedSpan>,
    latest: Vec<Affected>,
}

impl DamageState {
    pub(super) fn read<S: Storage>(storage: &S) -> Result<Self, FileError> {
        let quarantine = Arc::new(quarantine::read(storage)?);
        Ok(Self { quarantine, is_due: true, ..Self::default() })
    }

    /// A record was written: perhaps over what is damaged.
    pub(super) fn placed<F>(&mut self, placed: &Placed<'_, F>) {
        if self.latest.is_empty() || self.is_due {
            return;
        }
        let record = placed.record;
        let (key, fields) = (DiskKey::of(record), record.body.fields());
        let end = fields.offset + u64::from(fields.len_bytes);
        let over =
            |of: &Affected| of.key == key && of.range.start < end && fields.offset < of.range.end;
        self.is_due = self.latest.iter().any(over);
    }

    /// Those on record that may be looked at again now. From this segment on they are in the journal's directory.
    fn look_again(&mut self, now: MonoNanos, first: u64) {
        let kept = || self.quarantine.range(first..).filter(|(_, of)| !of.given_up);
        let after = |ms: u64| (MonoNanos(now.0.saturating_add(ms * 1_000_000)), ms);
        self.look_at = match self.look_at {
            _ if kept().next().is_none() => None,
            None => Some(after(LOOK_FIRST_MS)),
            Some((at, pause_ms)) if now >= at => {
                self.wanted.extend(kept().map(|(segment, _)| *segment));
                Some(after((pause_ms * 2).min(LOOK_MAX_MS)))
            }
            later => later,
        };
    }

    /// Whether some are to be looked at again when time passes.
    pub(super) fn looks_again(&self) -> bool {
        self.look_at.is_some()
    }

    pub(super) fn first_of_all(&self) -> Option<String> {
        self.quarantine.values().next().map(|of| reason(&of.damage))
    }
}

fn file_name(damage: &SegmentDamage) -> String {
    SegmentHeader::file_name(damage.segment, damage.id)
}

/// The names that its file may have: as it was written, and compressed.
fn file_names(damage: &SegmentDamage) -> [String; 2] {
    [file_name(damage), cold_file_name(damage.segment, damage.id)]
}

/// The name that its file has in a directory.
fn found_in<S: Storage>(storage: &S, dir: &str, damage: &SegmentDamage) -> String {
    let [plain, cold] = file_names(damage);
    let is_there = |name: &str| storage.open(&tidelock_storage::join(dir, name)).is_ok();
    if !is_there(&plain) && is_there(&cold) { cold } else { plain }
}

/// Removes them.
fn remove_files<S: Storage>(storage: &S, dir: &str, damage: &SegmentDamage) -> io::Result<()> {
    for name in file_names(damage) {
        match storage.remove(&tidelock_storage::join(dir, &name)) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
            _ => {}
        }
    }
    Ok(())
}

fn reason(damage: &SegmentDamage) -> String {
    let file = file_name(damage);
    format!("journal segment {file} is damaged at byte {}: {}", damage.at, damage.reason)
}

/// Damaged segments that a fold has passed go out of the journal's directory, to be kept.
pub(super) fn set_aside<S: Storage>(
    storage: &S,
    quarantine: &Quarantine,
    before: u64,
) -> Result<(), GroupError> {
    let mut moved = false;
    for of in quarantine.range(..before).map(|(_, of)| of).filter(|of| !of.given_up) {
        for name in file_names(&of.damage) {
            let (from, to) = (
                tidelock_storage::join(JOURNAL_DIR, &name),
                tidelock_storage::join(QUARANTINE_DIR, &name),
            );
            let rename = || {
                storage.create_dir(QUARANTINE_DIR)?;
                match storage.rename(&from, &to) {
                    Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(false),
                    renamed => renamed.map(|()| true),
                }
            };
            moved |= rename().map_err(|source| io_error("keep", &from, source))?;
        }
    }
    if moved {
        for dir in ["", QUARANTINE_DIR, JOURNAL_DIR] {
            storage.sync_dir(dir).map_err(|source| io_error("keep", QUARANTINE_DIR, source))?;
        }
    }
    Ok(())
}

fn io_error(what: &'static str, file: &str, source: io::Error) -> FileError {
    FileError::Io { what, file: file.to_owned(), source }
}

impl<S: Storage> Group<S> {
    /// The next segment that somebody wants to be looked at.
    pub(super) fn wanted_scrub(&mut self, now: Now) -> Option<ScrubJob<S::File>> {
        self.damage.wanted.extend(self.damage.noticed.take_segments());
        self.damage.look_again(now.mono, self.fold.position.segment);
        while let Some(segment) = self.damage.wanted.first().copied() {
            match self.journal.scrub_job_of(segment) {
                Some(job) => return Some(job),
                None => self.damage.wanted.remove(&segment),
            };
        }
        None
    }

    /// Puts a damaged segment on record.
    pub(super) fn quarantine(&mut self, damage: SegmentDamage) -> Result<(), GroupError> {
        let segment = damage.segment;
        let before = self.damage.quarantine.get(&segment);
        if before.is_some_and(|before| before.damage == damage) {
            return Ok(());
        }
        if before.is_none() {
            self.damage.look_at = None;
        }
        let start = self.journal.starts().find(|(index, _)| *index == segment);
        let quarantined = Quarantined {
            found_unix_ms: before.map_or(self.fold.wall_ms, |before| before.found_unix_ms),
            given_up: before.is_some_and(|before| before.given_up),
            after: start.map_or(Hlc(0), |(_, state)| state.newest_effective()),
            damage,
        };
        let notice = format!(
            "{}. What it affects is told by `tidelock-backup damaged {}`; everything else can be used",
            reason(&quarantined.damage),
            self.manifest.group
        );
        let mut quarantine = (*self.damage.quarantine).clone();
        quarantine.insert(segment, quarantined);
        self.record_quarantine(quarantine)?;
        self.notices.push(notice);
        Ok(())
    }

    fn record_quarantine(&mut self, quarantine: Quarantine) -> Result<(), FileError> {
        quarantine::write(&self.storage, &quarantine)?;
        self.damage.quarantine = Arc::new(quarantine);
        self.damage.is_due = true;
        self.damage.next_at = MonoNanos(0);
        Ok(())
    }

    /// Replaces what is on record of the images' damage.
    pub(super) fn record_image_damage(&mut self, damaged: ImageDamage) -> Result<(), GroupError> {
        let (position, oldest) = (self.fold.position, self.fold.oldest.clone());
        let folding = self.fold.ahead.clone();
        let fold = FoldPosition { position, oldest, folding, damaged };
        fold::write_position(&self.storage, &fold)?;
        self.fold.damaged = Arc::new(fold.damaged);
        self.refresh_overlay()?;
        self.damage.is_due = true;
        self.damage.next_at = MonoNanos(0);
        Ok(())
    }

    /// Takes a segment that is as it was written off the record. Data that a fold has left out of the images goes there
    /// first.
    pub(super) fn is_whole_again(&mut self, segment: u64) -> Result<(), GroupError> {
        if self.fold.damaged.waits_for(segment) {
            let of = self.damage.quarantine.get(&segment).map(|of| of.damage.clone());
            let there = self.journal.segments().iter().find(|of| of.index == segment).cloned();
            let is_folding = self.fold.is_running || self.fold.aside;
            let (Some(damage), Some(there), false) = (of, there, is_folding) else { return Ok(()) };
            // Later records lie over the images.
            let up_to = match segment == self.fold.position.segment {
                true => self.fold.position.offset,
                false => 0,
            };
            if !self.restore_to_images(&there, &damage, up_to)? {
                return Ok(());
            }
        }
        self.take_out_of_quarantine(segment)
    }

    /// A segment is as it was written: if it was on record as damaged, it was restored.
    fn take_out_of_quarantine(&mut self, segment: u64) -> Result<(), GroupError> {
        let Some(of) = self.damage.quarantine.get(&segment) else { return Ok(()) };
        let notice = format!("journal segment {} is whole again", file_name(&of.damage));
        let mut quarantine = (*self.damage.quarantine).clone();
        quarantine.remove(&segment);
        self.record_quarantine(quarantine)?;
        self.notices.push(notice);
        Ok(())
    }

    /// Damaged segments that are not needed any more go to where they are kept, or go.
    pub(super) fn set_aside(&mut self) -> Result<(), GroupError> {
        let before = self.fold.position.segment;
        set_aside(&self.storage, &self.damage.quarantine, before)?;
        let is_over = |of: &Quarantined| of.given_up && of.damage.segment < before;
        if self.damage.quarantine.values().any(is_over) {
            let mut quarantine = (*self.damage.quarantine).clone();
            quarantine.retain(|_, of| !is_over(of));
            self.record_quarantine(quarantine)?;
        }
        Ok(())
    }

    /// Finds out what is affected, if that may have changed. To be called now and then.
    pub fn tend_damage(&mut self, now: Now) {
        if !self.damage.is_due || self.broken.is_some() || now.mono < self.damage.next_at {
            return;
        }
        self.damage.next_at = MonoNanos(now.mono.0.saturating_add(PAUSE_NANOS));
        if self.damage.quarantine.is_empty() && self.fold.damaged.is_empty() {
            (self.damage.spans, self.damage.latest) = (Vec::new(), Vec::new());
            self.damage.is_due = false;
            return;
        }
        let Ok(history) = self.history() else { return };
        let Ok(spans) = history.spans() else { return };
        let latest = history.newest().and_then(|point| history.affected(&point));
        self.damage.spans = spans;
        // What was written over it may not be in the cut yet.
        let state = self.journal.state();
        self.damage.is_due = !state.is_all_in(self.cut.cut(), &state.journaled(), state.epoch);
        if let Ok(latest) = latest {
            self.damage.latest = latest;
        }
    }

    /// The damaged segments, oldest first, as of the last [`Group::tend_damage`].
    #[must_use]
    pub fn damaged(&self) -> Vec<DamagedSegment> {
        let span =
            |segment: u64| self.damage.spans.iter().find(|span| span.segment == Some(segment));
        let told = |segment: u64, of: Option<&Quarantined>| {
            let span = span(segment);
            let dir = match segment < self.fold.position.segment {
                true => QUARANTINE_DIR,
                false => JOURNAL_DIR,
            };
            let extents = of.map_or(&[][..], |of| &of.damage.extents);
            DamagedSegment {
                segment,
                file: of.map(|of| {
                    tidelock_storage::join(dir, &found_in(&self.storage, dir, &of.damage))
                }),
                found_unix_ms: of.map_or(0, |of| of.found_unix_ms),
                reason: of.map_or("it was given up".to_owned(), |of| reason(&of.damage)),
                known: of.map_or(Known::Nothing, |of| of.damage.known),
                records: extents.len() as u64,
                bytes: extents.iter().map(|extent| u64::from(extent.len_bytes)).sum(),
                given_up: of.is_none_or(|of| of.given_up),
                from: span.map(|span| span.from),
                until: span.and_then(|span| span.until),
                is_untold: span.is_some_and(|span| span.is_untold),
            }
        };
        let mut all: BTreeMap<u64, DamagedSegment> = BTreeMap::new();
        let with_segments = self.fold.damaged.iter().filter_map(|(_, _, with)| with.0);
        for segment in with_segments {
            all.entry(segment).or_insert_with(|| told(segment, None));
        }
        for (segment, of) in self.damage.quarantine.iter() {
            all.insert(*segment, told(*segment, Some(of)));
        }
        all.into_values().collect()
    }

    /// What cannot be read of the state that a recovery would take.
    #[must_use]
    pub fn latest_damaged(&self) -> Vec<DamagedDisk> {
        self.damage.latest.iter().map(|of| DamagedDisk::new(&self.manifest, of)).collect()
    }

    /// Whether all of a point can be read, as far as is known; `None`: of the latest.
    pub(super) fn check_undamaged(&mut self, point: Option<&Point>) -> Result<(), RecoverError> {
        if self.damage.quarantine.is_empty() && self.fold.damaged.is_empty() {
            return Ok(());
        }
        let history = self.history()?;
        let point = match point {
            Some(point) => point.clone(),
            None => history.newest()?,
        };
        let affected = history.affected(&point)?;
        if affected.is_empty() {
            return Ok(());
        }
        let near = history.unaffected_near(&history.spans()?, point.hlc);
        drop(history);
        Err(RecoverError::Damaged(self.say_affected(&affected, near)))
    }

    fn say_affected(&self, affected: &[Affected], near: (Option<Hlc>, Option<Hlc>)) -> String {
        let bytes: u64 = affected.iter().map(|of| of.range.end - of.range.start).sum();
        let mut text = format!("{bytes} bytes of that state are damaged and could not be read:");
        for of in affected.iter().take(SAID_MAX) {
            let of = DamagedDisk::new(&self.manifest, of);
            let DamagedDisk { name, segment, offset, len_bytes } = of;
            let had = segment.map_or("disk image".to_owned(), |of| format!("journal segment {of}"));
            text += &format!(" {name}: {len_bytes} bytes at {offset} ({had});");
        }
        if affected.len() > SAID_MAX {
            text += &format!(" and {} more;", affected.len() - SAID_MAX);
        }
        let at = |hlc: Hlc| format!("hlc:{hlc} ({})", crate::text::utc_ms(hlc.physical_ms()));
        let near = match near {
            (Some(before), Some(after)) => {
                format!("the nearest undamaged points are {} and {}", at(before), at(after))
            }
            (Some(before), None) => format!("the nearest undamaged point is {}", at(before)),
            (None, Some(after)) => format!("the nearest undamaged point is {}", at(after)),
            (None, None) => "no point in the window is undamaged".to_owned(),
        };
        text + &format!(
            " {near}. Restore the segment's file from a copy and run `tidelock-backup damaged {} --check`, choose \
             another point with --at, or give --accept-damage: reads of these parts will fail",
            self.manifest.group
        )
    }

    /// An operator gives a damaged segment up: its file is not kept. What is damaged stays so until
    /// something newer is written there.
    pub fn forget_damaged(&mut self, segment: u64) -> Result<(), ForgetError> {
        let mut quarantine = (*self.damage.quarantine).clone();
        let Some(of) = quarantine.get_mut(&segment) else {
            let known: Vec<_> = quarantine.keys().map(u64::to_string).collect();
            let known = if known.is_empty() { "none".to_owned() } else { known.join(", ") };
            return Err(ForgetError::Unknown { segment, known });
        };
        if segment < self.fold.position.segment {
            remove_files(&self.storage, QUARANTINE_DIR, &of.damage)?;
            self.storage.sync_dir(QUARANTINE_DIR)?;
            quarantine.remove(&segment);
        } else {
            of.given_up = true;
        }
        self.record_quarantine(quarantine)?;
        Ok(())
    }

    /// Looks at all damaged segments again: of those whose files were restored what they had is as
    /// it was written. `false`: a fold runs, so ask again.
    pub fn check_damaged(&mut self, now: Now) -> Result<bool, GroupError> {
        if self.fold.is_running || self.fold.aside || self.broken.is_some() {
            return Ok(false);
        }
        self.tick(now);
        self.check_images_again()?;
        let segments: Vec<Quarantined> = self.damage.quarantine.values().cloned().collect();
        for of in segments {
            let segment = of.damage.segment;
            if segment < self.fold.position.segment {
                self.check_set_aside(&of.damage)?;
                continue;
            }
            // A copy may have been put in its place as another file.
            self.journal.reopen_segment(segment)?;
            let Some(job) = self.journal.scrub_job_of(segment) else { continue };
            match job.run().damage {
                Some(damage) => self.quarantine(damage)?,
                None => self.is_whole_again(segment)?,
            }
            self.remake_overlay()?;
        }
        Ok(true)
    }

    /// Verifies the images where they are on record as damaged. A place that fits its checksum again goes off the record.
    fn check_images_again(&mut self) -> Result<(), GroupError> {
        let mut damaged = (*self.fold.damaged).clone();
        for (key, range, _) in self.fold.damaged.iter().filter(|(_, _, with)| with.0.is_none()) {
            let Some(image) = self.images.get(&key) else { continue };
            if image.damaged_in(range.clone()).is_ok_and(|(damaged, _)| damaged.is_empty()) {
                damaged.image_is_whole(key, range);
            }
        }
        if damaged == *self.fold.damaged { Ok(()) } else { self.record_image_damage(damaged) }
    }

    fn remake_overlay(&mut self) -> Result<(), GroupError> {
        let Some(overlay) = &self.overlay else { return Ok(()) };
        let (tail, base) = (self.journal.tail(), self.fold.position.segment);
        let made = Overlay::live(&tail, self.journal.state(), base)?
            .over(Arc::clone(&self.fold.damaged), self.damage.noticed.clone());
        *overlay.write().unwrap_or_else(PoisonError::into_inner) = made;
        Ok(())
    }

    /// A segment that a fold has passed: if its file was restored, the images get what it had,
    /// where nothing newer stands.
    fn check_set_aside(&mut self, damage: &SegmentDamage) -> Result<(), GroupError> {
        let path = tidelock_storage::join(QUARANTINE_DIR, &file_name(damage));
        let SegmentDamage { segment: index, id, len_bytes, .. } = *damage;
        let file = match open_segment_file(&self.storage, QUARANTINE_DIR, index, id) {
            Ok(Some(file)) => file,
            Ok(None) => return Ok(()),
            Err(ColdError::Io(e)) => return Err(io_error("open", &path, e).into()),
            // It is what it was before: damaged.
            Err(_) => return Ok(()),
        };
        let segment = Segment { index, id, file, len_bytes };
        if !self.restore_to_images(&segment, damage, u64::MAX)? {
            return Ok(());
        }
        self.take_out_of_quarantine(index)?;
        // The images have its data.
        remove_files(&self.storage, QUARANTINE_DIR, damage)
            .map_err(|e| io_error("remove", &path, e))?;
        Ok(())
    }

    /// Writes the content of a segment up to an offset to the images, where that was lost and nothing newer stands. `false`:
    /// the segment is still damaged.
    fn restore_to_images(
        &mut self,
        segment: &Segment<S::File>,
        damage: &SegmentDamage,
        up_to: u64,
    ) -> Result<bool, GroupError> {
        let (index, path) = (segment.index, file_name(damage));
        let Some(content) = self.content_of(segment, damage, up_to) else { return Ok(false) };
        let failed = |source| io_error("restore to an image from", &path, source);
        let (mut changes, mut parts) = (BTreeMap::new(), Vec::new());
        for (key, offset, effect) in content {
            let Some(image) = self.images.get(&key) else { continue };
            let change = changes.entry(key).or_insert_with(|| image.change());
            let len = match &effect {
                Restored::Data(data) => data.len() as u64,
                Restored::Zero(len) => *len,
            };
            for part in self.fold.damaged.parts_for(index, key, offset..offset + len) {
                change.in_part(image::sectors_in_part(&part), |_| false).map_err(failed)?;
                let written = match &effect {
                    Restored::Data(data) => {
                        let (from, to) = (part.start - offset, part.end - offset);
                        let part_of = &data[from as usize..to as usize];
                        change.write_at(&[IoSlice::new(part_of)], part.start)
                    }
                    Restored::Zero(_) => change.zero_at(part.start, part.end - part.start, false),
                };
                written.map_err(failed)?;
                parts.push((key, part));
            }
        }
        let mut damaged = (*self.fold.damaged).clone();
        damaged.restored(index, parts);
        for (_, change) in changes {
            change.end().map_err(failed)?;
        }
        self.record_image_damage(damaged)?;
        Ok(true)
    }

    /// Content of a segment that is lost with it, up to an offset, in order. `None`: the segment is still damaged.
    fn content_of(
        &self,
        segment: &Segment<S::File>,
        damage: &SegmentDamage,
        up_to: u64,
    ) -> Option<Vec<(DiskKey, u64, Restored)>> {
        let mut content = Vec::new();
        // A fold may have known less than what is known now.
        if damage.known == Known::Nothing || self.fold.damaged.is_unknown(segment.index) {
            let from = Position { segment: segment.index, offset: 0 };
            let to = Position { segment: segment.index, offset: segment.len_bytes.min(up_to) };
            for batch in tidelock_store::journal::reader_of(segment.clone(), from, to) {
                let batch = batch.ok().filter(|batch| !batch.is_damaged)?;
                for entry in batch.entries {
                    let Entry::Record { head, payload, .. } = entry.ok()? else { continue };
                    let record = head.peek();
                    if self.journal.state().is_void(record) {
                        continue;
                    }
                    let restored = match record.body.effect {
                        Effect::Write(_) => Restored::Data(payload.to_vec()),
                        Effect::Zero { len_bytes, .. } => Restored::Zero(u64::from(len_bytes)),
                        Effect::CopyDone | Effect::Idle => continue,
                    };
                    content.push((DiskKey::of(record), record.body.offset, restored));
                }
            }
            return Some(content);
        }
        let mut extents = damage.extents.clone();
        extents.sort_unstable_by_key(|extent| (extent.writer, extent.epoch, extent.seq));
        for of in extents {
            let entry = IndexEntry {
                writer: of.writer,
                disk: of.disk,
                offset: of.offset,
                epoch: of.epoch,
                seq: of.seq,
                len_bytes: of.len_bytes,
                at: of.at,
                crc: of.crc,
            };
            let payload = payload_of(segment, &entry)?;
            let counts = of.seq <= self.journal.state().last_that_counts(of.writer, of.epoch);
            if counts && of.at < up_to {
                content.push((of.key(), of.offset, Restored::Data(payload)));
            }
        }
        Some(content)
    }
}

/// What goes back to an image.
enum Restored {
    Data(Vec<u8>),
    Zero(u64),
}
