//! The past of a group: any point in time that the journal still tells apart from the images.
//!
//! A [`History`] is made by the group's owner ([`crate::group::Group::history`]) and used by
//! any other thread: it has the journal's segments as they were then, which stay readable, and holds the images
//! where they are, so that nothing that it answers changes while it is there. It is meant to be
//! dropped soon; a [`PastView`] or [`Hold`] made from it holds only what it needs itself.
//!
//! ```text
//!  At ──resolve──▶ Point ──open──▶ PastView (one for each disk; holds until dropped)
//!                    ├────hold──▶ Hold      (of a pin that outlives the window)
//!                    └──changed, records, timeline
//! ```
//!
//! A [`Point`] may be kept (it is plain data) and found again later with [`History::locate`], also
//! by another run of the server. What must outlive the window is held again with
//! [`crate::group::Group::hold`] right after the group was opened, before anything is folded.
//!
//! # What "the state at T" is
//!
//! Each record has an **effective time** ([`effective`]): its HLC, but later than the group's last change of shape or
//! epoch, and of several writers not earlier than any record that had arrived before it. So these times only grow
//! along the journal, and the state at T is the cut (`tidelock_cut`) of the journal's longest beginning whose times are up
//! to T: what a recovery would have brought back when the newest record that had arrived was of T. It is given only
//! once no record with an effective time up to T can come any more, so it never changes (rule 5).
//!
//! Source: Retroscope 3 (window-log, retrospective snapshots by HLC); Slogger 5 (watermark).

mod affected;
mod hold;
mod settle;
mod walk;

pub use affected::{Affected, AffectedSpan};
pub use hold::{Hold, Holds, PIN};
pub use tidelock_store::journal::Point;
pub use walk::effective;

use crate::manifest::Manifest;
use crate::quarantine::Quarantine;
use settle::Limit;
use std::collections::BTreeMap;
use std::io;
use std::ops::{ControlFlow, Range};
use std::sync::{Arc, RwLock};
use thiserror::Error;
use tidelock_planted::Bug;
use tidelock_protocol::hlc::Hlc;
use tidelock_protocol::ids::{Seq, WriterId};
use tidelock_protocol::message::DiskSpec;
use tidelock_protocol::record::Role;
use tidelock_protocol::vector::CountVector;
use tidelock_storage::StorageFile;
use tidelock_store::damage::{ImageDamage, Noticed};
use tidelock_store::extents::DiskKey;
use tidelock_store::extents::{Extents, Slice};
use tidelock_store::image::Image;
use tidelock_store::journal::{
    Closed, JournalError, Position, Reader, Segment, SegmentHeader, Standing, State, Tail,
};
use tidelock_store::view::{Content, Overlay, View};

/// A point that somebody asks for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum At {
    /// By the group's own clock.
    Hlc(Hlc),
    /// What had arrived here by the end of this millisecond since the Unix epoch, by the backup's clock.
    WallMs(u64),
    /// Not after these seqs.
    Vector(CountVector),
    /// What a recovery would take now.
    Latest,
}

/// Why there is no such point, or it cannot be shown.
#[derive(Debug, Error)]
pub enum PastError {
    /// It has been folded into the images.
    #[error(
        "this is before the window: the oldest point in time that can be shown is {oldest} (HLC), \
         {} ms since 1970", oldest.physical_ms()
    )]
    BeforeWindow {
        /// The oldest time.
        oldest: Hlc,
    },
    /// Nothing has happened then yet.
    #[error(
        "this is in the future: the newest point in time is {newest} (HLC), {} ms since 1970",
        newest.physical_ms()
    )]
    Future {
        /// The newest time that can be asked for.
        newest: Hlc,
    },
    /// Records of that time may still arrive.
    #[error(
        "records of that time may still arrive: everything up to {complete} (HLC), {} ms since \
         1970, is there. Ask for that, or for the latest state", complete.physical_ms()
    )]
    NotComplete {
        /// Up to here nothing can arrive any more.
        complete: Hlc,
    },
    /// A recovery to an earlier point has left it out.
    #[error(
        "the group was recovered to {chosen} (HLC), and what came after that until {until} (HLC) was left out"
    )]
    LeftOut {
        /// The point that was chosen.
        chosen: Hlc,
        /// From here on there is a state again.
        until: Hlc,
    },
    /// The initial copy was not complete then.
    #[error("the initial copy of writer {writer} was not complete then: its disks had no state")]
    Initialising {
        /// The host.
        writer: WriterId,
    },
    /// A point that is not this group's, or whose records are no longer told apart.
    #[error("{0}")]
    Unknown(String),
    /// What held it was taken away, because the journal had reached its size.
    #[error("the journal has reached its size, so this point in time was given up")]
    Revoked,
    /// The group does not work.
    #[error("{0}")]
    Unavailable(String),
    /// The journal cannot be read or is damaged.
    #[error(transparent)]
    Journal(#[from] JournalError),
}

/// What is known of a segment without reading it.
#[derive(Clone, Debug)]
pub struct SegmentStart {
    /// Its index.
    pub index: u64,
    /// The state before its first record.
    pub state: Arc<State>,
    /// Set: everything before it is in the group's cut.
    pub closed: Option<Closed>,
}

/// The past of a group, as it was when this was made.
#[derive(Debug)]
pub struct History<F> {
    pub(crate) manifest: Manifest,
    pub(crate) tail: Tail<F>,
    pub(crate) starts: Vec<SegmentStart>,
    /// Up to here the journal is in the images.
    pub(crate) base: Position,
    /// End and cut of a fold that may have brought more into the images.
    pub(crate) ahead: Option<(Position, CountVector)>,
    /// What can be seen.
    pub(crate) oldest: Closed,
    /// Up to here it is durable.
    pub(crate) end: Position,
    /// The state there.
    pub(crate) state: State,
    /// What comes from now on arrives at this time or later.
    pub(crate) now_ms: u64,
    pub(crate) cut: CountVector,
    pub(crate) images: BTreeMap<DiskKey, Image<F>>,
    /// What of the images is damaged, and which segments are.
    pub(crate) damaged: Arc<ImageDamage>,
    pub(crate) quarantine: Arc<Quarantine>,
    pub(crate) noticed: Noticed,
    pub(crate) holds: Holds,
    /// Keeps the base.
    pub(crate) hold: Hold,
}

/// How much was written within a span of time.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Bucket {
    /// Its beginning, exclusive, as an arrival in milliseconds since the Unix epoch.
    pub from_ms: u64,
    /// Its end, inclusive.
    pub to_ms: u64,
    /// Records, without those that change nothing.
    pub records: u64,
    /// Bytes that they change.
    pub bytes: u64,
    /// The same by disk.
    pub disks: BTreeMap<DiskKey, u64>,
    /// States that a guest meant to find again, because it flushed.
    pub flushes: u64,
    /// The last of them: right after this record.
    pub last_flush: Option<FlushPoint>,
}

/// A state that a guest meant to find again: everything up to this record of its.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FlushPoint {
    /// When the record arrived, in milliseconds since the Unix epoch.
    pub arrived_ms: u64,
    /// The host.
    pub writer: WriterId,
    /// Its seq.
    pub seq: Seq,
}

/// One record of the past.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RecordAt {
    /// Its effective time.
    pub hlc: Hlc,
    /// When it arrived, in milliseconds since the Unix epoch.
    pub arrived_ms: u64,
    /// The host.
    pub writer: WriterId,
    /// Its seq.
    pub seq: Seq,
    /// The disk and extent that it changes; `None`: nothing.
    pub extent: Option<(DiskKey, u64, u64)>,
    /// Its guest has flushed since the record before it.
    pub flushed: bool,
}

impl<F: StorageFile> History<F> {
    /// What the group is.
    #[must_use]
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// The journal's segments, oldest first.
    #[must_use]
    pub fn segments(&self) -> &[Segment<F>] {
        self.tail.segments()
    }

    /// The oldest time that may be asked for.
    #[must_use]
    pub fn oldest_time(&self) -> Hlc {
        self.oldest.at
    }

    /// The newest time that may be asked for: no record up to it can come any more.
    #[must_use]
    pub fn newest_time(&self) -> Hlc {
        complete(&self.state)
    }

    /// The backup's clock when this was made, in milliseconds since the Unix epoch.
    #[must_use]
    pub fn now_ms(&self) -> u64 {
        self.now_ms
    }

    /// The arrival of the oldest state that may be asked for, in milliseconds since the Unix epoch.
    #[must_use]
    pub fn oldest_ms(&self) -> u64 {
        self.oldest.arrived_ms
    }

    /// The arrival of the newest record, in milliseconds since the Unix epoch.
    #[must_use]
    pub fn newest_ms(&self) -> u64 {
        self.state.arrived_ms
    }

    /// About when records of this effective time arrived, to a segment.
    #[must_use]
    pub fn arrival_of(&self, time: Hlc) -> u64 {
        let later = self.starts.iter().find(|start| start.state.newest_effective() >= time);
        later.map_or(self.state.arrived_ms, |start| start.state.arrived_ms)
    }

    /// No state as of this arrival has a record of a later effective time.
    #[must_use]
    pub fn time_at(&self, arrived_ms: u64) -> Hlc {
        let later = self.starts.iter().find(|start| start.state.arrived_ms > arrived_ms);
        later.map_or(self.state.newest_effective(), |start| start.state.newest_effective())
    }

    /// The oldest point: of the window, or when the initial copy was complete if that is later.
    pub fn oldest(&self) -> Result<Point, PastError> {
        match self.resolve(&At::Hlc(self.oldest.at)) {
            Err(PastError::Initialising { .. }) => {}
            Err(PastError::NotComplete { .. } | PastError::Future { .. }) => {
                return self.resolve(&At::Latest);
            }
            found => return found,
        }
        // When the last initial copy was complete: each end of one is tried.
        let mut ends = Vec::new();
        self.walk(self.base.segment, |_, step| {
            if let walk::Step::Record { record, at, is_void: false, .. } = step
                && record.role() == Role::CopyDone
            {
                ends.push(at);
            }
            Ok(ControlFlow::Continue(()))
        })?;
        for end in ends {
            match self.resolve(&At::Hlc(end)) {
                // The copy of one writer ended before the window, and that of another in it.
                Err(PastError::Initialising { .. } | PastError::BeforeWindow { .. }) => {}
                Err(PastError::NotComplete { .. }) => break,
                found => return found,
            }
        }
        self.resolve(&At::Latest)
    }

    /// The newest point: what a recovery would take.
    pub fn newest(&self) -> Result<Point, PastError> {
        self.resolve(&At::Latest)
    }

    /// The greatest downward-closed cut that is not after what is asked for.
    pub fn resolve(&self, at: &At) -> Result<Point, PastError> {
        match at {
            At::Hlc(time) => self.at_time(*time),
            At::WallMs(ms) => self.at_arrival(*ms),
            At::Vector(vector) => {
                if !self.state.journaled().covers(vector) {
                    return Err(PastError::Future { newest: self.newest_time() });
                }
                if !vector.covers(&self.oldest.cut) {
                    return Err(PastError::BeforeWindow { oldest: self.oldest.at });
                }
                self.settle(&Limit::Vector(vector))
            }
            At::Latest => self.settle(&Limit::Exact(&self.cut, None)),
        }
    }

    fn at_arrival(&self, ms: u64) -> Result<Point, PastError> {
        if ms < self.oldest.arrived_ms {
            return Err(PastError::BeforeWindow { oldest: self.oldest.at });
        }
        if ms >= self.now_ms {
            return Err(PastError::Future { newest: self.newest_time() });
        }
        self.settle(&Limit::Arrived(ms))
    }

    fn at_time(&self, time: Hlc) -> Result<Point, PastError> {
        if time < self.oldest.at {
            return Err(PastError::BeforeWindow { oldest: self.oldest.at });
        }
        let chosen = self.state.recovered().and_then(|start| self.manifest.chosen(start.epoch));
        if let Some(chosen) =
            chosen.filter(|chosen| (*chosen..self.state.barrier).contains(&time) && time != *chosen)
        {
            return Err(PastError::LeftOut { chosen, until: self.state.barrier });
        }
        let complete = self.newest_time();
        if time > self.state.newest_effective() {
            return Err(PastError::Future { newest: complete });
        }
        if time > complete {
            return Err(PastError::NotComplete { complete });
        }
        self.settle(&Limit::Time(time))
    }

    /// A point that was found before, perhaps by another run: where it is now.
    pub fn locate(&self, point: &Point) -> Result<Point, PastError> {
        let is_gone = || {
            let what = "this point is not in the group's history any more".to_owned();
            Err(PastError::Unknown(what))
        };
        if self.state.leaves_out(point.epoch, &point.cut) {
            return is_gone();
        }
        let located = match self.settle(&Limit::Exact(&point.cut, Some(point.hlc))) {
            // Of what cannot be replayed any more its places are still where they were.
            Err(PastError::Journal(_)) if self.still_is(point) => return Ok(point.clone()),
            located => located?,
        };
        if located.cut != point.cut || located.epoch != point.epoch {
            return is_gone();
        }
        let (hlc, arrived_ms) = (point.hlc.max(located.hlc), point.arrived_ms);
        Ok(Point { hlc, arrived_ms, ..located })
    }

    /// Whether the images have not passed a point that no recovery since has left out.
    fn still_is(&self, point: &Point) -> bool {
        point.epoch <= self.state.epoch && point.beyond >= self.base
    }

    /// The disks as they were at a point, read-only. Their state does not change until they are
    /// dropped, unless the journal reaches its size ([`PastView::is_revoked`]).
    pub fn open(&self, point: &Point) -> Result<BTreeMap<DiskKey, PastView<F>>, PastError> {
        let hold = Arc::new(self.hold(point, "a view")?);
        let overlay = Arc::new(RwLock::new(self.overlay(point)?));
        let views = self.disks_at(point).map(|(writer, disk)| {
            let key = DiskKey { writer, disk: disk.id };
            let image = self.images[&key].clone();
            let view = View::new(key, disk.size_bytes, image, Arc::clone(&overlay));
            (key, PastView { view, hold: Arc::clone(&hold) })
        });
        Ok(views.collect())
    }

    /// The disks that have a state at a point.
    pub fn disks_at<'a>(
        &'a self,
        point: &'a Point,
    ) -> impl Iterator<Item = (WriterId, &'a DiskSpec)> {
        self.manifest.disks_at(&point.cut).filter(|(writer, _)| point.writers.contains(writer))
    }

    /// What the journal has of a point beyond the images.
    pub(crate) fn overlay(&self, point: &Point) -> Result<Overlay<F>, JournalError> {
        let range = self.base.segment..point.end.segment + 1;
        let overlay = Overlay::past(&self.tail, &self.state, range, &point.cut)?;
        Ok(overlay.over(Arc::clone(&self.damaged), self.noticed.clone()))
    }

    /// Keeps a point: as long as the hold is there it can be opened, whatever the window is.
    pub fn hold(&self, point: &Point, why: &str) -> Result<Hold, PastError> {
        if self.hold.is_revoked() {
            return Err(PastError::Revoked);
        }
        let passes =
            |(to, cut): &(Position, CountVector)| point.beyond < *to && !point.cut.covers(cut);
        if point.beyond < self.base || self.ahead.as_ref().is_some_and(passes) {
            return Err(PastError::BeforeWindow { oldest: self.oldest.at });
        }
        Ok(self.holds.hold(point.beyond, point.hlc, why))
    }

    /// Extents of a disk that records between two points have written, in order and merged. It is
    /// as much as may differ between the two. Read from the segments' indexes, not from the data.
    pub fn changed(
        &self,
        from: &Point,
        to: &Point,
        disk: DiskKey,
    ) -> Result<impl Iterator<Item = Range<u64>> + use<F>, PastError> {
        let seq = |point: &Point| point.cut.get(disk.writer);
        // Times do not say it: of several writers many states have one time, and the latest may have an earlier time than a
        // state that it follows.
        let is_in_order = match tidelock_planted::is(Bug::OrderedByTime) {
            true => from.hlc <= to.hlc,
            false => seq(from) <= seq(to),
        };
        let (from, to) = if is_in_order { (from, to) } else { (to, from) };
        let between = from.beyond.max(self.base).segment..=to.end.segment;
        let (after, last) = (seq(from), seq(to));
        let mut extents = Extents::default();
        for segment in self.tail.segments().iter().filter(|of| between.contains(&of.index)) {
            for entry in self.tail.entries_of(segment.index, disk.writer)? {
                let counts = self.state.last_that_counts(disk.writer, entry.epoch);
                let is_between = entry.seq > after && entry.seq <= last.min(counts);
                if is_between && entry.disk == disk.disk {
                    extents.insert(entry.range(), Marked);
                }
            }
        }
        let mut merged: Vec<Range<u64>> = Vec::new();
        for (range, marked) in extents.pieces(0..u64::MAX) {
            match merged.last_mut() {
                _ if marked.is_none() => {}
                Some(last) if last.end == range.start => last.end = range.end,
                _ => merged.push(range),
            }
        }
        Ok(merged.into_iter())
    }

    /// The records that the later of two points has and the earlier has not, in journal order, so
    /// many at most.
    pub fn records(
        &self,
        from: &Point,
        to: &Point,
        max: usize,
    ) -> Result<Vec<RecordAt>, PastError> {
        let mut records = Vec::new();
        self.between(from, to, true, |at| {
            if records.len() == max {
                return ControlFlow::Break(());
            }
            records.push(at);
            ControlFlow::Continue(())
        })?;
        Ok(records)
    }

    /// A segment of which headers are damaged is told by its index: of its records those that
    /// change something, as of its end. One of which nothing is known is an error, or left out.
    fn between(
        &self,
        from: &Point,
        to: &Point,
        needs_all: bool,
        mut f: impl FnMut(RecordAt) -> ControlFlow<()>,
    ) -> Result<(), PastError> {
        let mut first = from.beyond.max(self.base);
        let mut ended = false;
        let mut told = BTreeMap::new();
        let is_asked =
            |writer: WriterId, seq: Seq| seq > from.cut.get(writer) && seq <= to.cut.get(writer);
        while !ended {
            let walked = self.walk(first.segment, |place, step| {
                if place.start >= to.end {
                    return Ok(ControlFlow::Break(()));
                }
                let walk::Step::Record { record, len_bytes, at, is_void: false } = step else {
                    return Ok(ControlFlow::Continue(()));
                };
                let (writer, seq) = (record.writer, record.seq);
                if !is_asked(writer, seq) || place.start < first {
                    return Ok(ControlFlow::Continue(()));
                }
                told.insert(writer, seq);
                let key = DiskKey::of(record);
                let extent = (len_bytes > 0).then_some((key, record.body.offset, len_bytes));
                let (arrived_ms, flushed) = (place.arrived_ms, record.body.flushed);
                let went = f(RecordAt { hlc: at, arrived_ms, writer, seq, extent, flushed });
                ended |= went.is_break();
                Ok(went)
            });
            let damaged = match walked {
                Err(PastError::Journal(JournalError::Corrupt { file, offset, damage })) => {
                    let index = SegmentHeader::parse_file_name(&file).map_or(0, |(index, _)| index);
                    let listed = self.tail.listed_entries(index);
                    match (listed, needs_all) {
                        (None, true) => {
                            let error = JournalError::Corrupt { file, offset, damage };
                            return Err(PastError::Journal(error));
                        }
                        (listed, _) => (index, listed.unwrap_or_default()),
                    }
                }
                walked => return walked,
            };
            let (index, entries) = damaged;
            let end = self.starts.iter().find(|start| start.index == index + 1);
            let Some(end) = end else { return Ok(()) };
            for entry in entries {
                let (writer, seq) = (entry.writer, entry.seq);
                let counts = seq <= self.state.last_that_counts(writer, entry.epoch);
                let is_new = told.get(&writer).is_none_or(|last| seq > *last);
                if !counts || !is_new || !is_asked(writer, seq) {
                    continue;
                }
                let key = DiskKey { writer, disk: entry.disk };
                let extent = Some((key, entry.offset, u64::from(entry.len_bytes)));
                let (hlc, arrived_ms) = (end.state.newest_effective(), end.state.arrived_ms);
                // An index does not say where a guest has flushed.
                let told = RecordAt { hlc, arrived_ms, writer, seq, extent, flushed: false };
                if f(told).is_break() {
                    return Ok(());
                }
            }
            first = Position { segment: index + 1, offset: 0 };
            ended |= first >= to.end;
        }
        Ok(())
    }

    /// How much was written between two points, and where guests flushed, in so many spans of equal length. A flush
    /// is told by the record that follows it.
    pub fn timeline(
        &self,
        from: &Point,
        to: &Point,
        buckets: usize,
    ) -> Result<Vec<Bucket>, PastError> {
        let (start, end) = (from.arrived_ms, to.arrived_ms.max(from.arrived_ms));
        let buckets = buckets.max(1) as u64;
        let edge = |nth: u64| {
            start + ((u128::from(end - start) * u128::from(nth)) / u128::from(buckets)) as u64
        };
        let spans = (0..buckets).map(|nth| (edge(nth), edge(nth + 1)));
        let mut spans: Vec<_> =
            spans.map(|(from_ms, to_ms)| Bucket { from_ms, to_ms, ..Bucket::default() }).collect();
        let nth_of = |spans: &[Bucket], ms: u64| {
            spans.partition_point(|span| span.to_ms < ms).min(spans.len() - 1)
        };
        let mut last: BTreeMap<WriterId, FlushPoint> = BTreeMap::new();
        self.between(from, to, false, |at| {
            let RecordAt { arrived_ms, writer, seq, .. } = at;
            let before = last.insert(writer, FlushPoint { arrived_ms, writer, seq });
            if let Some(point) = before.filter(|_| at.flushed) {
                let nth = nth_of(&spans, point.arrived_ms);
                spans[nth].flushes += 1;
                spans[nth].last_flush = Some(point);
            }
            if let Some((key, _, len)) = at.extent {
                let nth = nth_of(&spans, arrived_ms);
                let span = &mut spans[nth];
                span.records += 1;
                span.bytes += len;
                *span.disks.entry(key).or_default() += len;
            }
            ControlFlow::Continue(())
        })?;
        Ok(spans)
    }

    fn reader(&self, from: Position, to: Position) -> Reader<F> {
        self.tail.reader(from, to)
    }

    /// Whether the later part of its images may have moved.
    #[must_use]
    pub fn is_revoked(&self) -> bool {
        self.hold.is_revoked()
    }
}

/// No record with an effective time up to this can come any more.
pub(crate) fn complete(state: &State) -> Hlc {
    if state.recovered().is_some() {
        // One clock for all writers.
        return state.last_hlc.max(state.barrier);
    }
    match &state.writers[..] {
        [only] if only.standing != Standing::Removed => only.hlc.max(state.barrier),
        // Another writer may still bring a record of the newest time.
        _ => Hlc(state.newest_effective().0.saturating_sub(1)).max(state.barrier),
    }
}

#[derive(Clone, Copy)]
struct Marked;

impl Slice for Marked {
    fn without_front(self, _: u64) -> Self {
        self
    }
}

/// A disk at a point in the past.
#[derive(Clone, Debug)]
pub struct PastView<F> {
    view: View<F>,
    hold: Arc<Hold>,
}

impl<F: StorageFile> PastView<F> {
    /// Its size.
    #[must_use]
    pub fn size_bytes(&self) -> u64 {
        self.view.size_bytes()
    }

    /// Fills the buffer from this offset on.
    pub fn read(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        self.view.read(offset, buf)?;
        // Afterwards: the images do not move before this is set.
        self.check()
    }

    /// What the range is made of, in order and without a hole; `false` from `f` ends it.
    pub fn describe(
        &self,
        range: Range<u64>,
        f: impl FnMut(u64, Content) -> bool,
    ) -> io::Result<()> {
        self.view.describe(range, f)?;
        self.check()
    }

    /// Whether it was given up: what is read from now on is an error.
    #[must_use]
    pub fn is_revoked(&self) -> bool {
        self.hold.is_revoked()
    }

    fn check(&self) -> io::Result<()> {
        if self.is_revoked() {
            return Err(io::Error::other(PastError::Revoked.to_string()));
        }
        Ok(())
    }
}

impl<F: StorageFile> History<F> {
    fn settle(&self, limit: &Limit<'_>) -> Result<Point, PastError> {
        settle::settle(self, limit)
    }

    fn walk(
        &self,
        segment: u64,
        f: impl FnMut(&walk::Place<'_>, walk::Step<'_>) -> Result<ControlFlow<()>, PastError>,
    ) -> Result<(), PastError> {
        self.walk_from(Position { segment, offset: 0 }, None, f)
    }

    /// The same from a place on where this is the state.
    fn walk_from(
        &self,
        from: Position,
        state: Option<State>,
        f: impl FnMut(&walk::Place<'_>, walk::Step<'_>) -> Result<ControlFlow<()>, PastError>,
    ) -> Result<(), PastError> {
        walk::walk(self.reader(from, self.end), state, &self.state, f)
    }

    fn state_before(&self, segment: u64) -> State {
        let start = self.starts.iter().find(|start| start.index == segment);
        start.map_or_else(State::default, |start| (*start.state).clone())
    }
}
