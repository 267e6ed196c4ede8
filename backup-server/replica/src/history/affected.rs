//! Which points in time damage affects, and what of their disks.
//!
//! Of one point the answer is exact: the same layers are asked that a read asks. Of the span of a
//! segment's damage it is never less than the truth: from the first damaged record on until all of
//! it is overwritten, as far as that can be told.

use super::walk::{self, Step};
use super::{History, Marked, PastError, Point};
use crate::quarantine::Quarantined;
use std::collections::{BTreeMap, HashSet};
use std::ops::{ControlFlow, Range};
use std::sync::{Arc, RwLock};
use tidelock_planted::Bug;
use tidelock_protocol::hlc::Hlc;
use tidelock_protocol::ids::{Epoch, Seq, WriterId};
use tidelock_storage::StorageFile;
use tidelock_store::damage::{Known, LostWith};
use tidelock_store::extents::DiskKey;
use tidelock_store::extents::Extents;
use tidelock_store::journal::{JournalError, Position, read_payload};
use tidelock_store::view::View;

/// A part of a disk that cannot be read at some point.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Affected {
    /// Which disk.
    pub key: DiskKey,
    /// Which part of it, in bytes.
    pub range: Range<u64>,
    /// The damaged segment that had it; `None`: the image had it.
    pub segment: Option<u64>,
}

/// The points in time that a damaged segment affects, or damage of the images.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AffectedSpan {
    /// The segment; `None`: the images.
    pub segment: Option<u64>,
    /// States at this time and later are affected,
    pub from: Hlc,
    /// and those at this time and later are not any more; `None`: the latest is.
    pub until: Option<Hlc>,
    /// Within the span points cannot be asked for: in which order its records came is lost.
    pub is_untold: bool,
}

impl AffectedSpan {
    fn has(&self, time: Hlc) -> bool {
        self.from <= time && self.until.is_none_or(|until| time < until)
    }
}

/// What is not overwritten yet.
type Remaining = BTreeMap<DiskKey, Extents<Marked>>;

fn cover(remaining: &mut Remaining, key: DiskKey, range: Range<u64>) {
    if let Some(extents) = remaining.get_mut(&key) {
        extents.remove(range);
        if extents.is_empty() {
            remaining.remove(&key);
        }
    }
}

impl<F: StorageFile> History<F> {
    /// What of the disks cannot be read at a point, as far as damage is known, in order.
    pub fn affected(&self, point: &Point) -> Result<Vec<Affected>, PastError> {
        if self.quarantine.is_empty() && self.damaged.is_empty() {
            return Ok(Vec::new());
        }
        let overlay = Arc::new(RwLock::new(self.overlay(point)?));
        let mut asked: Remaining = BTreeMap::new();
        let mut payloads = HashSet::new();
        // Of these a map may still say where something was: each payload is looked at.
        let mut unlisted = HashSet::new();
        for of in self.quarantine.range(self.base.segment..=point.end.segment).map(|(_, of)| of) {
            if of.damage.known == Known::Nothing {
                unlisted.insert(of.damage.segment);
            }
            for extent in &of.damage.extents {
                payloads.insert((of.damage.segment, extent.at));
                asked.entry(extent.key()).or_default().insert(extent.range(), Marked);
            }
        }
        if !tidelock_planted::is(Bug::DamageNotListed) {
            for (key, range, _) in self.damaged.iter() {
                asked.entry(key).or_default().insert(range, Marked);
            }
        }
        let mut affected: Vec<Affected> = Vec::new();
        for (writer, disk) in self.disks_at(point) {
            let key = DiskKey { writer, disk: disk.id };
            let whole = 0..disk.size_bytes;
            let ranges: Vec<Range<u64>> = match (!unlisted.is_empty(), asked.get(&key)) {
                (true, _) => vec![whole],
                (false, Some(extents)) => {
                    let inside = |range: Range<u64>| range.start..range.end.min(disk.size_bytes);
                    extents.iter().map(|(range, _)| inside(range)).collect()
                }
                (false, None) => continue,
            };
            let image = self.images[&key].clone();
            let view = View::new(key, disk.size_bytes, image, Arc::clone(&overlay));
            for range in ranges.into_iter().filter(|range| !range.is_empty()) {
                let found = view.damaged_in(range, |segment, at, len_bytes, crc| {
                    match unlisted.contains(&segment.index) {
                        true => read_payload(segment, at, len_bytes, crc).is_none(),
                        false => payloads.contains(&(segment.index, at)),
                    }
                });
                let found = found.map_err(|e| PastError::Unavailable(e.to_string()))?;
                for (range, LostWith(segment)) in found {
                    match affected.last_mut() {
                        Some(last)
                            if (last.key, last.range.end, last.segment)
                                == (key, range.start, segment) =>
                        {
                            last.range.end = range.end;
                        }
                        _ => affected.push(Affected { key, range, segment }),
                    }
                }
            }
        }
        Ok(affected)
    }

    /// By damaged segment: the points in time that it affects. Those that affect none are left out.
    pub fn spans(&self) -> Result<Vec<AffectedSpan>, PastError> {
        let mut spans: BTreeMap<Option<u64>, AffectedSpan> = BTreeMap::new();
        let mut add = |span: AffectedSpan| {
            let of = spans.entry(span.segment).or_insert(span);
            of.from = of.from.min(span.from);
            of.until = of.until.zip(span.until).map(|(a, b)| a.max(b));
            of.is_untold |= span.is_untold;
        };
        for of in self.quarantine.range(self.base.segment..).map(|(_, of)| of) {
            self.span_of(of)?.map(&mut add);
        }
        let mut folded: BTreeMap<Option<u64>, Remaining> = BTreeMap::new();
        for (key, range, with) in self.damaged.iter() {
            let remaining = folded.entry(with.0).or_default();
            remaining.entry(key).or_default().insert(range, Marked);
        }
        for (segment, mut remaining) in folded {
            let first = self.base.segment;
            let mut until = self.covered_in(first, &mut remaining)?;
            if until.is_none() {
                until = self.covered_after(first, remaining)?;
            }
            if until.is_none_or(|until| until > self.oldest.at) {
                let from = self.oldest.at;
                add(AffectedSpan { segment, from, until, is_untold: false });
            }
        }
        Ok(spans.into_values().collect())
    }

    /// The nearest times before and after a time at which nothing is damaged.
    #[must_use]
    pub fn unaffected_near(&self, spans: &[AffectedSpan], time: Hlc) -> (Option<Hlc>, Option<Hlc>) {
        let mut before = time;
        while let Some(span) = spans.iter().find(|span| span.has(before)) {
            match span.from.0.checked_sub(1) {
                Some(earlier) => before = Hlc(earlier),
                None => break,
            }
        }
        let mut after = Some(time);
        while let Some(span) = after.and_then(|at| spans.iter().find(|span| span.has(at))) {
            after = span.until;
        }
        let newest = self.newest_time();
        let before = Some(before).filter(|at| *at >= self.oldest.at && *at < time);
        (before, after.filter(|at| *at > time && *at <= newest))
    }

    fn span_of(&self, of: &Quarantined) -> Result<Option<AffectedSpan>, PastError> {
        let segment = of.damage.segment;
        let mut remaining = Remaining::new();
        let mut from = None;
        let mut until = None;
        let is_untold = of.damage.known != Known::Records;
        if is_untold {
            // At the time of the last record before it, too, it must be seen that the next one is later.
            let is_first = self.starts.iter().all(|start| start.index >= segment);
            from = Some(match is_first || segment <= self.base.segment {
                true => self.oldest.at.min(of.after),
                false => of.after,
            });
            for extent in &of.damage.extents {
                if extent.seq <= self.state.last_that_counts(extent.writer, extent.epoch) {
                    remaining.entry(extent.key()).or_default().insert(extent.range(), Marked);
                }
            }
            if of.damage.known == Known::Nothing {
                for (writer, disk) in self.manifest.disks() {
                    let key = DiskKey { writer, disk: disk.id };
                    remaining.entry(key).or_default().insert(0..disk.size_bytes, Marked);
                }
            }
        } else {
            let named: HashSet<(WriterId, Epoch, Seq)> =
                of.damage.extents.iter().map(|e| (e.writer, e.epoch, e.seq)).collect();
            self.walk_one(segment, |record, len_bytes, at| {
                let (key, range) =
                    (DiskKey::of(record), record.body.offset..record.body.offset + len_bytes);
                if named.contains(&(record.writer, record.epoch, record.seq)) {
                    from.get_or_insert(at);
                    remaining.entry(key).or_default().insert(range, Marked);
                    until = None;
                } else if !remaining.is_empty() {
                    cover(&mut remaining, key, range);
                    until = remaining.is_empty().then_some(at);
                }
                ControlFlow::Continue(())
            })?;
        }
        let Some(from) = from else { return Ok(None) };
        if remaining.is_empty() {
            until = match is_untold || self.state.writers.len() > 1 {
                true => self.closed_after(segment),
                false => until,
            };
        } else {
            until = self.covered_after(segment, remaining)?;
        }
        if is_untold {
            let told = self.closed_after(segment);
            until = until.zip(told).map(|(covered, told)| covered.max(told));
        }
        Ok(Some(AffectedSpan { segment: Some(segment), from, until, is_untold }))
    }

    /// When all that is in segments after this one has covered what remains.
    fn covered_after(
        &self,
        segment: u64,
        mut remaining: Remaining,
    ) -> Result<Option<Hlc>, PastError> {
        let later: Vec<u64> = self.tail.segments().iter().map(|of| of.index).collect();
        for index in later.into_iter().filter(|index| *index > segment) {
            if remaining.is_empty() {
                break;
            }
            let before = remaining.clone();
            for writer in (0..self.state.writers.len() as u16).map(WriterId) {
                // What nothing is known of covers nothing.
                let Ok(entries) = self.tail.entries_of(index, writer) else { continue };
                for entry in entries {
                    if entry.seq <= self.state.last_that_counts(writer, entry.epoch) {
                        let key = DiskKey { writer, disk: entry.disk };
                        cover(&mut remaining, key, entry.range());
                    }
                }
            }
            if remaining.is_empty() {
                let mut before = before;
                return match self.covered_in(index, &mut before) {
                    Err(PastError::Journal(_)) => Ok(self.closed_after(index)),
                    covered => covered,
                };
            }
        }
        Ok(None)
    }

    /// When records of this segment cover what remains; of the first one only those that are not in
    /// the images.
    fn covered_in(
        &self,
        segment: u64,
        remaining: &mut Remaining,
    ) -> Result<Option<Hlc>, PastError> {
        let mut until = None;
        let walked = self.walk_one(segment, |record, len_bytes, at| {
            let range = record.body.offset..record.body.offset + len_bytes;
            cover(remaining, DiskKey::of(record), range);
            if remaining.is_empty() {
                until = Some(at);
                return ControlFlow::Break(());
            }
            ControlFlow::Continue(())
        });
        match walked {
            // Of those that follow it is not known whether they do.
            Err(PastError::Journal(JournalError::Corrupt { .. } | JournalError::Io { .. }))
                if segment == self.base.segment => {}
            walked => walked?,
        }
        // Of several writers the cut may not have it yet.
        match until.is_some() && self.state.writers.len() > 1 {
            true => Ok(self.closed_after(segment)),
            false => Ok(until),
        }
    }

    /// Since when everything up to the end of a segment is in every state.
    fn closed_after(&self, segment: u64) -> Option<Hlc> {
        let later = self.starts.iter().filter(|start| start.index > segment);
        later.filter_map(|start| Some(start.closed.as_ref()?.at)).next()
    }

    /// The records of a segment that count and are not in the images, with their effective times.
    fn walk_one(
        &self,
        segment: u64,
        mut f: impl FnMut(&tidelock_protocol::record::Record, u64, Hlc) -> ControlFlow<()>,
    ) -> Result<(), PastError> {
        let from = Position { segment, offset: 0 };
        let Some(of) = self.tail.segment(segment) else { return Ok(()) };
        let to = Position { segment, offset: of.len_bytes }.min(self.end);
        walk::walk(self.reader(from, to), None, &self.state, |place, step| {
            let Step::Record { record, len_bytes, at, is_void: false } = step else {
                return Ok(ControlFlow::Continue(()));
            };
            if place.start < self.base || len_bytes == 0 {
                return Ok(ControlFlow::Continue(()));
            }
            Ok(f(record, len_bytes, at))
        })
    }
}
