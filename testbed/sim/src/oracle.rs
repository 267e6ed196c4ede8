//! What must be true of one writer's disks at any cut: the slow, obvious record of everything that
//! its guest did.
//!
//! It knows nothing of copies, journals or images. A *life* is a run of the daemon: it begins with
//! what the local disks hold then, and goes on with the guest's writes in the order of their seqs.
//! The recovered state at a cut is the base of the last life that was wholly at the backup by then,
//! with the guest's writes of that life up to the cut.

use crate::disk::SECTOR_BYTES;
use crate::failure::{Checked, Checker, check, fail};
use crate::guest::Known;
use bytes::Bytes;
use std::sync::Arc;
use tidelock_daemon_core::sequencer::Extent;
use tidelock_protocol::hlc::Hlc;
use tidelock_protocol::ids::{DiskId, Seq};
use tidelock_protocol::record::{Effect, Payload, Record, Role};

/// A point in a writer's history, across lives. Seq 0: what the life began with.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Point {
    /// Which life.
    pub life: usize,
    /// A seq of that life.
    pub seq: Seq,
}

/// What a write left in its extent.
#[derive(Clone, Debug)]
enum Content {
    Data(Bytes),
    Zero(u64),
}

impl Content {
    fn of(effect: &Effect) -> Self {
        match effect {
            Effect::Write(payload) => Content::Data(payload.data().clone()),
            Effect::Zero { len_bytes, .. } => Content::Zero(u64::from(*len_bytes)),
            Effect::CopyDone | Effect::Idle => unreachable!("not a write"),
        }
    }
}

#[derive(Clone, Debug)]
struct Entry {
    seq: Seq,
    disk: DiskId,
    offset: u64,
    content: Content,
}

impl Entry {
    fn apply(&self, images: &mut [Vec<u8>]) {
        let image = &mut images[usize::from(self.disk.0)];
        let from = self.offset as usize;
        match &self.content {
            Content::Data(data) => image[from..from + data.len()].copy_from_slice(data),
            Content::Zero(len) => image[from..from + *len as usize].fill(0),
        }
    }
}

#[derive(Clone, Debug)]
struct Life {
    base: Vec<Vec<u8>>,
    base_seq: Seq,
    /// Up to where states have what the lives before wrote: what came after it, late, is only in this life's base.
    cut_before: Seq,
    /// From this seq on the backup has all of it.
    complete_at: Option<Seq>,
    /// What the backup was seeded with: nothing that is this writer's.
    is_seed: bool,
    log: Vec<Entry>,
}

#[derive(Clone, Debug)]
struct Rolled {
    point: Point,
    images: Arc<Vec<Vec<u8>>>,
}

/// Where a byte was changed behind everyone's back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// On the local disk.
    Here,
    /// In an image of the backup.
    Backup,
}

/// A byte that was changed so.
#[derive(Clone, Copy, Debug)]
struct Spoilt {
    disk: DiskId,
    offset: u64,
    side: Side,
    /// What it was, and is at the other site.
    was: u8,
    /// It was written since, or copied: both sites have the same.
    is_healed: bool,
    /// In an image: it was written since, and not all of its sector at once. That may not have been what its checksum says.
    is_in_part: bool,
}

impl Spoilt {
    fn extent(&self) -> Extent {
        Extent { disk: self.disk, offset: self.offset, len_bytes: 1 }
    }

    fn is_open_here(&self) -> bool {
        self.side == Side::Here && !self.is_healed
    }
}

/// The record of one writer.
#[derive(Clone, Debug)]
pub struct WriterOracle {
    lives: Vec<Life>,
    /// What the disks should hold when nothing is in flight.
    logical: Vec<Vec<u8>>,
    /// Where a failed write may have left anything.
    damaged: Vec<Extent>,
    /// What somebody changed behind everyone's back.
    spoilt: Vec<Spoilt>,
    /// Somewhere that the search for a state begins.
    rolled: Option<Rolled>,
    /// Every record of any life, in the order in which they were admitted, which is that of their
    /// times.
    admitted: Vec<(Point, Hlc)>,
    /// So many of them are known to be in every cut from now on.
    below_watermark: usize,
    newest_seq: Seq,
    /// The last record that is not idle.
    last_effect: Seq,
    /// The last one that has changed a disk's content.
    last_change: Seq,
    /// What each guest's write truly depends on.
    deps: Vec<(Point, Known)>,
}

impl WriterOracle {
    /// Before the first run of the daemon.
    #[must_use]
    pub fn new(disks: Vec<Vec<u8>>) -> Self {
        Self {
            lives: Vec::new(),
            logical: disks,
            damaged: Vec::new(),
            spoilt: Vec::new(),
            rolled: None,
            admitted: Vec::new(),
            below_watermark: 0,
            newest_seq: Seq::ZERO,
            last_effect: Seq::ZERO,
            last_change: Seq::ZERO,
            deps: Vec::new(),
        }
    }

    /// The writer has a past, of which nothing is left but its last seq.
    #[must_use]
    pub fn after(self, past: Seq) -> Self {
        Self { newest_seq: past, last_effect: past, last_change: past, ..self }
    }

    /// A disk has grown. What the backup has of the time before reads as zeroes there.
    pub fn grow(&mut self, disk: usize, content: &[u8]) {
        self.rolled = None;
        // Before the first run with a disk that was added nothing has it.
        let logical = self.logical.get_mut(disk);
        logical.into_iter().for_each(|logical| logical.extend_from_slice(content));
        for base in self.lives.iter_mut().filter_map(|life| life.base.get_mut(disk)) {
            base.resize(base.len() + content.len(), 0);
        }
    }

    /// A writer with these disks, whose backup was seeded with others: what the empty cut shows.
    #[must_use]
    pub fn seeded(disks: Vec<Vec<u8>>, seeds: Vec<Vec<u8>>) -> Self {
        let seed = Life {
            base: seeds,
            base_seq: Seq::ZERO,
            cut_before: Seq::ZERO,
            complete_at: Some(Seq::ZERO),
            is_seed: true,
            log: Vec::new(),
        };
        Self { lives: vec![seed], ..Self::new(disks) }
    }

    /// The last run is over: whatever the disks hold now is what the guest reads.
    pub fn disks_hold(&mut self, disks: Vec<Vec<u8>>) {
        self.logical = disks;
        for spoilt in self.spoilt.iter().filter(|spoilt| spoilt.is_open_here()) {
            self.logical[usize::from(spoilt.disk.0)][spoilt.offset as usize] = spoilt.was;
        }
        self.damaged.clear();
    }

    /// The last run goes on in another process: the disks hold all that it has recorded.
    pub fn goes_on(&mut self, disks: &[&[u8]]) -> Checked {
        let mut there = self.logical.iter().zip(self.without_spoilt(disks));
        let differs = there.position(|(a, b)| *a != b);
        check(differs.is_none(), Checker::SitesEqual, || {
            format!("local disk {differs:?} is not what was recorded, and nothing is compared")
        })?;
        self.damaged.clear();
        Ok(())
    }

    /// A run of the daemon begins to admit writes after `base_seq`, with disks that hold this, when the backup's cut
    /// is `cut_before`.
    pub fn begin_life(&mut self, mut base: Vec<Vec<u8>>, base_seq: Seq, cut_before: Seq) {
        // If that is found, the copy of it is in this life.
        for spoilt in self.spoilt.iter_mut().filter(|spoilt| spoilt.is_open_here()) {
            let byte = &mut base[usize::from(spoilt.disk.0)][spoilt.offset as usize];
            spoilt.is_healed = *byte == spoilt.was;
            *byte = spoilt.was;
        }
        for life in &mut self.lives {
            // What was not durable when the next life began never was.
            life.log.retain(|e| e.seq <= base_seq);
            life.complete_at = life.complete_at.filter(|seq| *seq <= base_seq);
        }
        self.logical.clone_from(&base);
        self.damaged.clear();
        self.last_effect = self.last_effect.min(base_seq);
        self.last_change = self.last_change.min(base_seq);
        self.newest_seq = self.newest_seq.max(base_seq);
        let (complete_at, log) = (None, Vec::new());
        self.lives.push(Life { base, base_seq, cut_before, complete_at, is_seed: false, log });
    }

    /// The backup says that it has everything up to where this life began.
    ///
    /// Returns whether that was news.
    pub fn continues_whole(&mut self) -> Checked<bool> {
        let at = self.lives.len() - 1;
        if self.lives[at].complete_at.is_some() {
            return Ok(false);
        }
        let base_seq = self.lives[at].base_seq;
        if at > 0 {
            let before = self.state_at(base_seq)?;
            check(*before == self.lives[at].base, Checker::SitesEqual, || {
                format!("the backup is taken for whole at {base_seq}, but the disks differ")
            })?;
        }
        self.lives[at].complete_at = Some(base_seq);
        Ok(true)
    }

    /// The life that goes on.
    #[must_use]
    pub fn life(&self) -> usize {
        self.lives.len() - 1
    }

    /// Whether any life has begun.
    #[must_use]
    pub fn has_begun(&self) -> bool {
        self.lives.iter().any(|life| !life.is_seed)
    }

    /// Where the life that goes on began.
    #[must_use]
    pub fn base_seq(&self) -> Seq {
        self.lives.last().map_or(Seq::ZERO, |l| l.base_seq)
    }

    /// A record was admitted, of whatever kind: a writer's times grow, across restarts.
    pub fn admitted(&mut self, record: &Record) -> Checked {
        let newest = self.newest_hlc();
        check(record.hlc > newest, Checker::HlcGrows, || {
            format!("record {} has time {}, an earlier one has {newest}", record.seq, record.hlc)
        })?;
        self.admitted.push((Point { life: self.life(), seq: record.seq }, record.hlc));
        self.newest_seq = self.newest_seq.max(record.seq);
        if record.role() != Role::Idle {
            self.last_effect = record.seq;
        }
        Ok(())
    }

    /// The greatest seq of any life.
    #[must_use]
    pub fn newest_seq(&self) -> Seq {
        self.newest_seq
    }

    /// The last record of this life that is not idle, or where it began.
    #[must_use]
    pub fn last_effect(&self) -> Seq {
        self.last_effect
    }

    /// The last record of this life that has changed a disk's content, or where it began: what a copy brings is the same, or nobody has written it.
    #[must_use]
    pub fn last_change(&self) -> Seq {
        self.last_change
    }

    /// The greatest time of any record.
    #[must_use]
    pub fn newest_hlc(&self) -> Hlc {
        self.admitted.last().map_or(Hlc(0), |(_, hlc)| *hlc)
    }

    /// The time of some record.
    #[must_use]
    pub fn some_time(&self, draw: u64) -> Option<Hlc> {
        let nth = (draw % (self.admitted.len() as u64).max(1)) as usize;
        self.admitted.get(nth).map(|(_, hlc)| *hlc)
    }

    /// The greatest time of any record that the state at `cut` has.
    #[must_use]
    pub fn newest_in(&self, cut: Seq) -> Hlc {
        let mut newest = self.admitted.iter().rev();
        newest.find(|(point, _)| self.has(*point, cut)).map_or(Hlc(0), |(_, hlc)| *hlc)
    }

    /// The greatest cut of what the backup has without a record after a time, of this writer alone.
    #[must_use]
    pub fn greatest_at(&self, time: Hlc, journaled: Seq) -> Seq {
        let is_there = |point: &Point| {
            let end = self.lives.get(point.life + 1).map(|l| l.cut_before);
            point.seq <= journaled && end.is_none_or(|end| point.seq <= end)
        };
        let up_to = self.admitted.iter().rev().filter(|(_, hlc)| *hlc <= time);
        let Some((point, _)) = up_to.into_iter().find(|(point, _)| is_there(point)) else {
            return Seq::ZERO;
        };
        let mut seq = point.seq;
        for life in self.lives[..=point.life].iter().rev() {
            // A resync is in it as a whole or not at all.
            if seq > life.base_seq {
                if life.complete_at.is_some_and(|at| at <= seq) {
                    break;
                }
                seq = life.cut_before;
            }
        }
        seq
    }

    /// A record up to the watermark that is not in the cut, if there is one.
    pub fn outside_of(&mut self, cut: Seq, watermark: Hlc) -> Option<(Point, Hlc)> {
        let up_to = self.admitted.partition_point(|(_, hlc)| *hlc <= watermark);
        let new = self.admitted.get(self.below_watermark..up_to).unwrap_or_default();
        let outside = new.iter().find(|(point, _)| !self.has(*point, cut)).copied();
        self.below_watermark = self.below_watermark.max(up_to);
        outside
    }

    /// Guests' writes that the state at `cut` has, with what they truly depend on.
    pub fn deps_in(&self, cut: Seq) -> impl Iterator<Item = &(Point, Known)> {
        self.deps.iter().filter(move |(point, _)| self.has(*point, cut))
    }

    /// A guest's write was admitted, which knew this when it asked.
    pub fn wrote(&mut self, record: &Record, known: Known) {
        self.knew(Point { life: self.life(), seq: record.seq }, known);
        self.push(record);
        let written = extent_of(record);
        self.damaged.retain(|d| !contains(&written, d));
        self.heal(written);
    }

    /// Tidelock sends what a disk holds: `live` is what it really holds there.
    pub fn copied(&mut self, record: &Record, live: &[u8]) -> Checked {
        if record.role() == Role::CopyDone {
            let life = self.lives.last_mut().expect("begun");
            life.complete_at.get_or_insert(record.seq);
            return Ok(());
        }
        let extent = extent_of(record);
        let sent = match &record.body.effect {
            Effect::Write(payload) => payload.data().clone(),
            _ => Bytes::from(vec![0; extent.len_bytes as usize]),
        };
        check(sent == live, Checker::CopyIsCurrent, || {
            format!("copy {} of {extent:?} is not what the disk holds", record.seq)
        })?;
        let (is_damaged, before) = (self.is_damaged(extent), self.last_change);
        let is_of_guest = self.damaged.iter().any(|d| d.overlaps(&extent));
        self.heal(extent);
        if is_damaged {
            // From here on this is what the disk holds.
            self.push(record);
            // What was changed behind everyone's back nobody loses.
            self.last_change = if is_of_guest { record.seq } else { before };
            self.damaged.retain(|d| !contains(&extent, d));
            return Ok(());
        }
        check(sent == self.logical(extent), Checker::CopyIsCurrent, || {
            format!("copy {} of {extent:?} is not what the guest wrote last", record.seq)
        })
    }

    /// So many lives have begun.
    #[must_use]
    pub fn lives(&self) -> usize {
        self.lives.len()
    }

    /// A guest's write is begun that has no record. Life number `life` begins with it, if that has begun: its copy of
    /// the disks waits for the end.
    pub fn wrote_unrecorded(&mut self, extent: Extent, effect: &Effect, life: usize) {
        let Extent { disk, offset, .. } = extent;
        let entry = Entry { seq: Seq::ZERO, disk, offset, content: Content::of(effect) };
        entry.apply(&mut self.logical);
        self.heal(extent);
        if let Some(life) = self.lives.get_mut(life) {
            entry.apply(&mut life.base);
        }
    }

    /// Whoever asked for it knew this.
    pub fn knew(&mut self, point: Point, known: Known) {
        self.deps.push((point, known));
    }

    /// It has failed: this is what the disk holds there.
    pub fn failed_unrecorded(&mut self, extent: Extent, live: &[u8], life: usize) {
        let effect = Effect::Write(Payload::new(Bytes::copy_from_slice(live)));
        self.wrote_unrecorded(extent, &effect, life);
    }

    fn push(&mut self, record: &Record) {
        let (seq, disk, offset) = (record.seq, record.body.disk, record.body.offset);
        let entry = Entry { seq, disk, offset, content: Content::of(&record.body.effect) };
        entry.apply(&mut self.logical);
        self.last_change = seq;
        self.lives.last_mut().expect("begun").log.push(entry);
    }

    /// A write failed: its extent may hold anything until it is written again.
    pub fn damage(&mut self, extent: Extent) {
        self.damaged.push(extent);
    }

    /// Whether the extent may hold anything.
    #[must_use]
    pub fn is_damaged(&self, extent: Extent) -> bool {
        let mut spoilt = self.spoilt.iter().filter(|spoilt| spoilt.is_open_here());
        self.damaged.iter().any(|d| d.overlaps(&extent))
            || spoilt.any(|spoilt| spoilt.extent().overlaps(&extent))
    }

    /// Somebody changes a byte behind everyone's back, where both sites have the same.
    pub fn spoil(&mut self, disk: DiskId, offset: u64, side: Side) {
        let was = self.logical[usize::from(disk.0)][offset as usize];
        self.spoilt.push(Spoilt { disk, offset, side, was, is_healed: false, is_in_part: false });
    }

    fn heal(&mut self, extent: Extent) {
        for spoilt in &mut self.spoilt {
            let sector = spoilt.extent().aligned_to(SECTOR_BYTES);
            let covers = extent.offset <= sector.offset && sector.end() <= extent.end();
            if !spoilt.is_healed && spoilt.extent().overlaps(&extent) {
                spoilt.is_healed = true;
                spoilt.is_in_part = spoilt.side == Side::Backup && !covers;
            }
        }
    }

    /// A process that goes on has written this again on its own disks.
    pub fn done_again(&mut self, record: &Record) {
        let extent = extent_of(record);
        for spoilt in self.spoilt.iter_mut().filter(|spoilt| spoilt.is_open_here()) {
            spoilt.is_healed = spoilt.extent().overlaps(&extent);
        }
    }

    /// What was changed so, and was not written since, by number.
    #[must_use]
    pub fn spoilt(&self) -> Vec<usize> {
        (0..self.spoilt.len()).filter(|nth| !self.spoilt[*nth].is_healed).collect()
    }

    /// Bytes that were changed so in an image, and written since with a part of their sector, by number.
    pub fn spoilt_in_part(&self) -> impl Iterator<Item = usize> + '_ {
        (0..self.spoilt.len()).filter(|nth| self.spoilt[*nth].is_in_part)
    }

    /// So much ever was.
    #[must_use]
    pub fn spoilt_count(&self) -> usize {
        self.spoilt.len()
    }

    /// Where.
    #[must_use]
    pub fn spoilt_at(&self, nth: usize) -> (DiskId, u64) {
        (self.spoilt[nth].disk, self.spoilt[nth].offset)
    }

    /// Local disks, but for what was changed so.
    fn without_spoilt(&self, disks: &[&[u8]]) -> Vec<Vec<u8>> {
        let mut disks: Vec<_> = disks.iter().map(|disk| disk.to_vec()).collect();
        for spoilt in self.spoilt.iter().filter(|spoilt| spoilt.is_open_here()) {
            disks[usize::from(spoilt.disk.0)][spoilt.offset as usize] =
                self.logical[usize::from(spoilt.disk.0)][spoilt.offset as usize];
        }
        disks
    }

    /// What the guest wrote last there.
    #[must_use]
    pub fn logical(&self, extent: Extent) -> &[u8] {
        let image = &self.logical[usize::from(extent.disk.0)];
        &image[extent.offset as usize..extent.end() as usize]
    }

    /// Compares the local disks with what they should hold, when nothing is in flight.
    #[must_use]
    pub fn equals(&self, disks: &[&[u8]]) -> bool {
        let disks = self.without_spoilt(disks);
        self.damaged.is_empty() && self.logical == disks
    }

    /// Whether the state at `cut` has the guest's write at `point`.
    #[must_use]
    pub fn has(&self, point: Point, cut: Seq) -> bool {
        if point.seq == Seq::ZERO {
            // Written without a record: a life began with it. Or never, before the first one.
            let mut later = self.lives.iter().skip(point.life);
            return point.life == 0 || later.any(|l| l.complete_at.is_some_and(|at| at <= cut));
        }
        let end = self.lives.get(point.life + 1).map(|l| l.base_seq);
        let in_its_life = point.seq <= cut && end.is_none_or(|end| point.seq <= end);
        let in_a_later_base = self
            .lives
            .iter()
            .skip(point.life + 1)
            .any(|life| life.complete_at.is_some_and(|at| at <= cut));
        in_its_life || in_a_later_base
    }

    /// Whether the backup can have a whole copy by this seq.
    #[must_use]
    pub fn is_whole_at(&self, cut: Seq) -> bool {
        let mut own = self.lives.iter().filter(|life| !life.is_seed);
        own.any(|l| l.complete_at.is_some_and(|at| at <= cut))
    }

    /// Whether the backup has this life from its base on: both sites hold the same, but for what
    /// is on its way, or waits for other writers.
    #[must_use]
    pub fn is_in_sync_at(&self, durable: Seq, committed: Seq) -> bool {
        self.lives.last().filter(|life| !life.is_seed).is_some_and(|life| {
            let goes_on = life.complete_at == Some(life.base_seq) && life.base_seq <= durable;
            goes_on || life.complete_at.is_some_and(|at| at <= committed)
        })
    }

    /// The disks at a cut.
    pub fn state_at(&mut self, cut: Seq) -> Checked<Arc<Vec<Vec<u8>>>> {
        let whole = |l: &Life| l.complete_at.is_some_and(|at| at <= cut);
        let Some(at) = self.lives.iter().rposition(whole) else {
            return fail(Checker::Prefix, format!("nothing was whole at {cut}"));
        };
        if let Some(later) = self.lives[at + 1..].iter().find(|l| l.base_seq < cut) {
            let base = later.base_seq;
            let what = format!("cut {cut} is inside the copy that began after {base}");
            return fail(Checker::Prefix, what);
        }
        let from = match self.rolled.take() {
            Some(rolled) if rolled.point.life == at && rolled.point.seq <= cut => rolled,
            _ => {
                let life = &self.lives[at];
                let point = Point { life: at, seq: life.base_seq };
                Rolled { point, images: Arc::new(life.base.clone()) }
            }
        };
        let Rolled { point, mut images } = from;
        let log = &self.lives[at].log;
        let first = log.partition_point(|e| e.seq <= point.seq);
        let end = log.partition_point(|e| e.seq <= cut).max(first);
        if first < end {
            let images = Arc::make_mut(&mut images);
            log[first..end].iter().for_each(|entry| entry.apply(images));
        }
        let point = Point { life: at, seq: cut };
        self.rolled = Some(Rolled { point, images: images.clone() });
        Ok(images)
    }
}

fn extent_of(record: &Record) -> Extent {
    Extent {
        disk: record.body.disk,
        offset: record.body.offset,
        len_bytes: record.body.len_bytes().into(),
    }
}

fn contains(outer: &Extent, inner: &Extent) -> bool {
    outer.disk == inner.disk && outer.offset <= inner.offset && inner.end() <= outer.end()
}

#[cfg(test)]
mod tests {
    use super::*;
    use tidelock_protocol::hlc::Hlc;
    use tidelock_protocol::ids::{Epoch, WriterId};
    use tidelock_protocol::record::DiskChange;
    use tidelock_protocol::vector::CountVector;

    fn write(seq: u64, offset: u64, byte: u8) -> Record {
        Record {
            writer: WriterId(0),
            seq: Seq(seq),
            epoch: Epoch(1),
            hlc: Hlc(seq),
            deps: CountVector::new(),
            body: DiskChange {
                disk: DiskId(0),
                offset,
                copy: false,
                flushed: false,
                effect: Effect::Write(Payload::new(vec![byte; 2].into())),
            },
        }
    }

    fn done(seq: u64) -> Record {
        Record {
            body: DiskChange { effect: Effect::CopyDone, copy: true, ..write(seq, 0, 0).body },
            ..write(seq, 0, 0)
        }
    }

    #[test]
    fn a_state_is_a_base_and_a_prefix() {
        let mut o = WriterOracle::new(vec![vec![0; 4]]);
        o.begin_life(vec![vec![9; 4]], Seq(0), Seq(0));
        o.wrote(&write(1, 0, 1), Vec::new());
        assert!(!o.is_whole_at(Seq(1)) && o.state_at(Seq(1)).is_err());
        o.copied(&done(2), &[]).unwrap();
        o.wrote(&write(3, 1, 3), Vec::new());
        assert_eq!(*o.state_at(Seq(2)).unwrap(), [[1, 1, 9, 9]]);
        assert_eq!(*o.state_at(Seq(3)).unwrap(), [[1, 3, 3, 9]]);
        assert_eq!(*o.state_at(Seq(2)).unwrap(), [[1, 1, 9, 9]], "backwards, too");
        let point = Point { life: 0, seq: Seq(3) };
        assert!(o.has(point, Seq(3)) && !o.has(point, Seq(2)));
        // A run that ended uncleanly: 3 was durable here and never at the backup.
        o.begin_life(vec![vec![7; 4]], Seq(2), Seq(2));
        assert!(!o.has(point, Seq(3)), "a 3 of the new life is another write");
        o.wrote(&write(3, 0, 5), Vec::new());
        assert_eq!(*o.state_at(Seq(2)).unwrap(), [[1, 1, 9, 9]]);
        assert!(o.state_at(Seq(3)).is_err(), "inside the resync");
        o.copied(&done(4), &[]).unwrap();
        assert_eq!(*o.state_at(Seq(4)).unwrap(), [[5, 5, 7, 7]]);
        assert!(o.has(point, Seq(4)), "the base has it");
    }

    #[test]
    fn a_copy_must_be_what_the_disk_holds() {
        let mut o = WriterOracle::new(vec![vec![0; 4]]);
        o.begin_life(vec![vec![0; 4]], Seq(0), Seq(0));
        o.wrote(&write(1, 0, 1), Vec::new());
        let copy = |seq, byte| Record {
            body: DiskChange { copy: true, ..write(seq, 0, byte).body },
            ..write(seq, 0, byte)
        };
        assert!(o.copied(&copy(2, 0), &[0, 0]).is_err(), "older than the guest's write");
        assert!(o.copied(&copy(2, 1), &[1, 1]).is_ok());
        o.damage(Extent { disk: DiskId(0), offset: 0, len_bytes: 2 });
        assert!(o.copied(&copy(3, 4), &[4, 4]).is_ok());
        assert!(o.equals(&[&[4, 4, 0, 0]]));
    }
}
