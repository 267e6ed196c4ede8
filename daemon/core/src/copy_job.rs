//! Going over whole disks while the VM runs: the initial copy, the resync after an unclean stop, and
//! verification.
//!
//! Sans-I/O: [`CopyJob::next`] says which extent the sequencer should read next and what for, and
//! the outcomes come back. Each extent is read while it is held, and is sent as a record with a
//! seq like any other, so a copy can never overwrite a newer write (DESIGN 5).
//!
//! An initial copy starts from a backup whose disks read as zeroes: only what is allocated and not
//! zero is sent. A comparison asks the backup for each chunk whether it has the same digest at that
//! very point of the stream, and copies what differs, in pieces. A verification asks the same. What differs is
//! looked at a second time at the end, [`SECOND_LOOK_AFTER`] later: a disk of the backup that could not be read for a
//! moment is no difference. What differs then is narrowed down to blocks, which are copied only if it is told to repair.
//!
//! Where the local disk has a hole of [`HOLE_MIN_BYTES`] or more nothing is read: the backup is asked whether it has zeroes there,
//! which it knows without reading, too. A hole that it does not have is narrowed down. So the cost follows the data.
//!
//! A digest check stands in the stream behind every record that was admitted before, and the extent is held
//! while it is read. So both sides are asked for the same state while guests write on, and what differs,
//! differs: there are no false alarms. An extent that was equal once stays equal by the records that follow.
//!
//! ```text
//! initial:  chunk ─ CopyUnlessZero ─► Sent | Zero ──────────────► done
//! compare:  range ─ Hole ─► AskedForZeroes ─► equal ────────────► done
//!              │                 └──► differs ─ Hole (parts), at last data
//!              └───► HasData: chunks
//! compare:  chunk ─ Digest ─► Asked ─► equal ───────────────────► done
//!                                └───► differs ─ Copy (pieces) ─► done
//! verify:   chunk ─ Digest ─► Asked ─► equal ───────────────────► done
//!                                └───► differs ─ later ─ Digest ─► equal ─► done
//!                                           └──► differs ─ Digest (finer) ─► ... ─► found, Copy if to be repaired ─► done
//! any:      Unreadable ─► set aside, tried again; the job cannot end before it was read (verify: said so)
//! ```
//!
//! Bounded: at most [`READING_MAX_BYTES`] are being read, [`ASKED_MAX`] digest checks are on their
//! way (what a comparison over a long link has in flight), and the caller keeps what was sent and
//! is not durable within [`Bounds::window_bytes`].

use crate::sequencer::{CopyKind, CopyOutcome, Extent};
use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;
use tidelock_protocol::ids::{DiskId, MonoNanos, Seq};
use tidelock_protocol::limits::{COPY_MAX_BYTES, DIGEST_CHUNK_MAX_BYTES};

/// A hole below this is read like data: a question for it costs more.
pub const HOLE_MIN_BYTES: u64 = 4 << 20;
/// What is looked at for holes at a time: guests' writes there wait for the look.
const LOOK_BYTES: u64 = 64 << 30;
/// A hole that the backup does not have is looked at again in so many parts.
const HOLE_PARTS: u64 = 16;

/// What one digest check covers.
const DIGEST_BYTES: u64 = 1 << 20;
const _: () = assert!(DIGEST_BYTES <= DIGEST_CHUNK_MAX_BYTES as u64);
const _: () = assert!(DIGEST_BYTES.is_multiple_of(COPY_MAX_BYTES as u64));

/// What one record of a copy carries at most: a guest's write behind it waits for all of it, and a smaller one costs more
/// than it brings.
pub const PIECE_BYTES: u64 = 64 << 10;
const _: () = assert!(PIECE_BYTES <= COPY_MAX_BYTES as u64);

/// So long after the first look at the last chunk a verification looks at those again that differed.
pub const SECOND_LOOK_AFTER: Duration = Duration::from_secs(10);

/// To what a verification narrows down a chunk that differs.
const FINER_BYTES: [u64; 2] = [64 << 10, 4 << 10];

/// Extents that a verification lists; what differs beyond is counted.
pub const FOUND_MAX: usize = 1000;

/// Bytes that are being read: what a guest's write may have to wait behind.
pub const READING_MAX_BYTES: u64 = 1 << 20;

/// Digest checks without an answer.
pub const ASKED_MAX: usize = 64;

/// What the job is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// The backup's disks are all zeroes.
    Initial,
    /// The backup's disks hold something, which may differ.
    Compare,
    /// They should be equal, and are looked at.
    Verify {
        /// What differs is copied.
        repair: bool,
    },
}

/// What a verification has found.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Findings {
    /// Where the sites differed, in order, [`FOUND_MAX`] at most.
    pub differing: Vec<Extent>,
    /// Their bytes, of those that are not listed, too.
    pub differing_bytes: u64,
    /// Bytes of them that were copied.
    pub repaired_bytes: u64,
    /// Bytes that the local disk did not let us read: of these nothing is known.
    pub unreadable_bytes: u64,
}

/// Bounds of the job.
#[derive(Clone, Copy, Debug)]
pub struct Bounds {
    /// Bytes that were sent and are not durable, of copies and guests' writes together: above it
    /// no copy is begun.
    pub window_bytes: u64,
    /// Bytes per second that may be read; 0: no limit.
    pub rate_bytes_per_s: u64,
}

/// How far the job is.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Progress {
    /// What it is for.
    pub purpose: Purpose,
    /// Bytes that need no more work.
    pub done_bytes: u64,
    /// Bytes in all.
    pub total_bytes: u64,
    /// Bytes that had to be sent.
    pub sent_bytes: u64,
    /// Bytes that the local disk did not let us read so far.
    pub unreadable_bytes: u64,
    /// Since the start of the job.
    pub rate_bytes_per_s: u64,
}

impl Progress {
    /// Seconds left at the rate so far.
    #[must_use]
    pub fn seconds_left(&self) -> Option<u64> {
        (self.total_bytes - self.done_bytes).checked_div(self.rate_bytes_per_s)
    }
}

/// When a verification looks at what has differed again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum SecondLook {
    /// Not everything was looked at once.
    Later,
    At(MonoNanos),
    /// What differs now, differs.
    Begun,
}

fn is_copy(kind: CopyKind) -> bool {
    matches!(kind, CopyKind::Copy | CopyKind::CopyUnlessZero)
}

/// What is read of an extent for this.
fn read_bytes(extent: Extent, kind: CopyKind) -> u64 {
    if kind == CopyKind::Hole { 0 } else { extent.len_bytes }
}

/// A running initial copy or resync of all disks of a member.
#[derive(Debug)]
pub struct CopyJob {
    purpose: Purpose,
    bounds: Bounds,
    /// What has not been looked at, as whole ranges.
    ranges: VecDeque<Extent>,
    /// What of it is no hole here, and is to be compared.
    data: VecDeque<Extent>,
    /// Pieces of chunks that differ, and what is tried again: they go first.
    pieces: VecDeque<(Extent, CopyKind)>,
    /// At the sequencer.
    reading: BTreeMap<(DiskId, u64), (Extent, CopyKind)>,
    /// At the backup.
    asked: BTreeMap<(DiskId, u64), (Extent, CopyKind)>,
    unreadable: Vec<(Extent, CopyKind)>,
    /// Chunks that differed at the first look of a verification, [`FOUND_MAX`] at most.
    doubted: Vec<Extent>,
    second_look: SecondLook,
    reading_bytes: u64,
    asked_bytes: u64,
    done_bytes: u64,
    /// Of these, holes at both sites.
    hole_bytes: u64,
    total_bytes: u64,
    sent_bytes: u64,
    started_at: MonoNanos,
    marker: Option<Seq>,
    /// What is done since somebody asked. Only of comparisons: they may end in parts.
    finished: Vec<Extent>,
    findings: Findings,
}

impl CopyJob {
    /// A job over these ranges: for an initial copy what is allocated, else whole disks.
    #[must_use]
    pub fn new(purpose: Purpose, ranges: Vec<Extent>, bounds: Bounds, now: MonoNanos) -> Self {
        let ranges: VecDeque<Extent> = ranges.into_iter().filter(|r| r.len_bytes > 0).collect();
        Self {
            purpose,
            bounds,
            total_bytes: ranges.iter().map(|r| r.len_bytes).sum(),
            ranges,
            data: VecDeque::new(),
            pieces: VecDeque::new(),
            reading: BTreeMap::new(),
            asked: BTreeMap::new(),
            unreadable: Vec::new(),
            doubted: Vec::new(),
            second_look: SecondLook::Later,
            reading_bytes: 0,
            asked_bytes: 0,
            done_bytes: 0,
            hole_bytes: 0,
            sent_bytes: 0,
            started_at: now,
            marker: None,
            finished: Vec::new(),
            findings: Findings::default(),
        }
    }

    /// What to read next, if the rate has room.
    pub fn next(&mut self, now: MonoNanos) -> Option<(Extent, CopyKind)> {
        if self.is_throttled(now) {
            return None;
        }
        if self.wants_second_look(now) {
            self.drive_second_look(now);
        }
        let next = match self.next_of_pieces() {
            Some(next) => next,
            None => self.next_of_ranges()?,
        };
        let (extent, kind) = next;
        self.reading_bytes += read_bytes(extent, kind);
        self.reading.insert((extent.disk, extent.offset), next);
        Some(next)
    }

    fn has_more(&self) -> bool {
        !self.pieces.is_empty() || !self.data.is_empty() || !self.ranges.is_empty()
    }

    fn wants_second_look(&self, now: MonoNanos) -> bool {
        let is_due = match self.second_look {
            SecondLook::Later => true,
            SecondLook::At(at) => now >= at,
            SecondLook::Begun => false,
        };
        is_due && !self.doubted.is_empty() && !self.has_more() && self.is_idle()
    }

    fn drive_second_look(&mut self, now: MonoNanos) {
        self.second_look = match self.second_look {
            SecondLook::Later => SecondLook::At(now.plus_ms(SECOND_LOOK_AFTER.as_millis() as u64)),
            SecondLook::At(_) | SecondLook::Begun => {
                let doubted = self.doubted.drain(..).map(|chunk| (chunk, CopyKind::Digest));
                self.pieces.extend(doubted);
                SecondLook::Begun
            }
        };
    }

    fn next_of_pieces(&mut self) -> Option<(Extent, CopyKind)> {
        let (mut extent, kind) = self.pieces.pop_front()?;
        if is_copy(kind) && extent.len_bytes > PIECE_BYTES {
            let (offset, len_bytes) = (extent.offset + PIECE_BYTES, extent.len_bytes - PIECE_BYTES);
            self.pieces.push_front((Extent { offset, len_bytes, ..extent }, kind));
            extent.len_bytes = PIECE_BYTES;
        }
        Some((extent, kind))
    }

    fn next_of_ranges(&mut self) -> Option<(Extent, CopyKind)> {
        let (unit, kind) = match self.purpose {
            Purpose::Initial => (PIECE_BYTES, CopyKind::CopyUnlessZero),
            Purpose::Compare | Purpose::Verify { .. } => (DIGEST_BYTES, CopyKind::Digest),
        };
        let looks = kind == CopyKind::Digest;
        let is_far = |range: &&mut Extent| looks && range.len_bytes >= HOLE_MIN_BYTES;
        let (unit, kind, range) = match (self.data.front_mut(), self.ranges.front_mut()) {
            (Some(data), _) => (unit, kind, data),
            (None, Some(range)) if is_far(&range) => (LOOK_BYTES, CopyKind::Hole, range),
            (None, range) => (unit, kind, range?),
        };
        // Cut at multiples of the unit, so that chunks stay aligned whatever the range.
        let len_bytes = (unit - range.offset % unit).min(range.len_bytes);
        let extent = Extent { len_bytes, ..*range };
        range.offset += len_bytes;
        range.len_bytes -= len_bytes;
        if range.len_bytes == 0 {
            let of = if self.data.is_empty() { &mut self.ranges } else { &mut self.data };
            of.pop_front();
        }
        Some((extent, kind))
    }

    /// Whether [`next`](Self::next) would give out something.
    #[must_use]
    pub fn has_next(&self, now: MonoNanos) -> bool {
        (self.has_more() || self.wants_second_look(now)) && !self.is_throttled(now)
    }

    /// Bytes that the sequencer is reading to send them.
    #[must_use]
    pub fn reading_copies_bytes(&self) -> u64 {
        let copies = self.reading.values().filter(|(_, kind)| is_copy(*kind));
        copies.map(|(extent, _)| extent.len_bytes).sum()
    }

    /// Whether nothing of it is being read or asked.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.reading.is_empty() && self.asked.is_empty()
    }

    /// What the sequencer has of the job, by disk and offset.
    pub fn reading(&self) -> impl Iterator<Item = (DiskId, u64)> + '_ {
        self.reading.keys().copied()
    }

    /// What the backup was asked and has not answered, by disk and offset.
    pub fn asked(&self) -> impl Iterator<Item = (DiskId, u64)> + '_ {
        self.asked.keys().copied()
    }

    /// Whether there is more to read, but not now.
    #[must_use]
    pub fn is_throttled(&self, now: MonoNanos) -> bool {
        let allowed = match self.bounds.rate_bytes_per_s {
            0 => u64::MAX,
            rate => {
                let elapsed_ns = u128::from(now.since_ns(self.started_at));
                // One piece may always be ahead of its time.
                (u128::from(rate) * elapsed_ns / 1_000_000_000) as u64 + PIECE_BYTES
            }
        };
        self.reading_bytes >= READING_MAX_BYTES
            || self.asked.len() + self.reading.len() >= ASKED_MAX
            || self.done_bytes - self.hole_bytes + self.reading_bytes + self.asked_bytes >= allowed
    }

    /// The sequencer is done with an extent that [`next`](Self::next) gave out. Extents of others
    /// are none of this job's.
    pub fn copied(&mut self, extent: Extent, outcome: CopyOutcome) {
        let Some(work) = self.reading.remove(&(extent.disk, extent.offset)) else { return };
        self.reading_bytes -= read_bytes(extent, work.1);
        match outcome {
            CopyOutcome::Asked => {
                self.asked_bytes += extent.len_bytes;
                self.asked.insert((extent.disk, extent.offset), (extent, CopyKind::Digest));
            }
            CopyOutcome::AskedForZeroes(len_bytes) => {
                let hole = Extent { len_bytes, ..extent };
                self.asked.insert((extent.disk, extent.offset), (hole, CopyKind::Hole));
                self.look_behind(extent, len_bytes);
            }
            CopyOutcome::HasData(len_bytes) => {
                self.data.push_back(Extent { len_bytes, ..extent });
                self.look_behind(extent, len_bytes);
            }
            CopyOutcome::Unreadable if matches!(self.purpose, Purpose::Verify { .. }) => {
                self.done_bytes += extent.len_bytes;
                self.findings.unreadable_bytes += extent.len_bytes;
            }
            CopyOutcome::Unreadable => self.unreadable.push(work),
            CopyOutcome::Withdrawn => self.pieces.push_back(work),
            CopyOutcome::Sent | CopyOutcome::Zero => {
                self.done_bytes += extent.len_bytes;
                if outcome == CopyOutcome::Sent {
                    self.sent_bytes += extent.len_bytes;
                    self.findings.repaired_bytes += extent.len_bytes;
                }
                self.finish(extent);
            }
        }
    }

    /// The backup's answer to a digest check.
    pub fn digest_result(&mut self, disk: DiskId, offset: u64, equal: bool) {
        // An answer from before a reconnect may be late; the check was asked again.
        let Some((chunk, kind)) = self.asked.remove(&(disk, offset)) else { return };
        if kind == CopyKind::Hole {
            return self.zeroes_result(chunk, equal);
        }
        self.asked_bytes -= chunk.len_bytes;
        if equal {
            self.done_bytes += chunk.len_bytes;
            return self.finish(chunk);
        }
        match self.purpose {
            Purpose::Initial | Purpose::Compare => {
                self.pieces.push_back((chunk, CopyKind::Copy));
            }
            Purpose::Verify { .. }
                if self.second_look != SecondLook::Begun && self.doubted.len() < FOUND_MAX =>
            {
                self.doubted.push(chunk);
            }
            Purpose::Verify { repair } => {
                match FINER_BYTES.into_iter().find(|unit| *unit < chunk.len_bytes) {
                    Some(unit) => self.check_closer(chunk, unit),
                    None => {
                        self.found(chunk);
                        match repair {
                            true => self.pieces.push_back((chunk, CopyKind::Copy)),
                            false => self.done_bytes += chunk.len_bytes,
                        }
                    }
                }
            }
        }
    }

    /// What is behind the beginning that was told.
    fn look_behind(&mut self, extent: Extent, len_bytes: u64) {
        let rest = Extent {
            offset: extent.offset + len_bytes,
            len_bytes: extent.len_bytes - len_bytes,
            ..extent
        };
        if rest.len_bytes > 0 {
            self.ranges.push_front(rest);
        }
    }

    fn zeroes_result(&mut self, hole: Extent, are_zeroes: bool) {
        if are_zeroes {
            self.done_bytes += hole.len_bytes;
            self.hole_bytes += hole.len_bytes;
            return self.finish(hole);
        }
        if hole.len_bytes < 2 * HOLE_MIN_BYTES {
            return self.data.push_back(hole);
        }
        let unit = (hole.len_bytes / HOLE_PARTS).max(HOLE_MIN_BYTES).next_multiple_of(DIGEST_BYTES);
        let mut at = hole.offset;
        while at < hole.end() {
            let len_bytes = unit.min(hole.end() - at);
            self.pieces.push_back((Extent { offset: at, len_bytes, ..hole }, CopyKind::Hole));
            at += len_bytes;
        }
    }

    fn check_closer(&mut self, chunk: Extent, unit: u64) {
        let mut at = chunk.offset;
        while at < chunk.end() {
            let len_bytes = unit.min(chunk.end() - at);
            self.pieces.push_back((Extent { offset: at, len_bytes, ..chunk }, CopyKind::Digest));
            at += len_bytes;
        }
    }

    fn found(&mut self, extent: Extent) {
        let Findings { differing, differing_bytes, .. } = &mut self.findings;
        *differing_bytes += extent.len_bytes;
        let at = differing.partition_point(|e| (e.disk, e.offset) < (extent.disk, extent.offset));
        let touches = |a: &Extent, b: &Extent| a.disk == b.disk && a.end() == b.offset;
        let joins_next = differing.get(at).is_some_and(|next| touches(&extent, next));
        if let Some(before) = at.checked_sub(1).filter(|i| touches(&differing[*i], &extent)) {
            differing[before].len_bytes += extent.len_bytes;
            if joins_next {
                differing[before].len_bytes += differing.remove(at).len_bytes;
            }
        } else if joins_next {
            differing[at].offset = extent.offset;
            differing[at].len_bytes += extent.len_bytes;
        } else if differing.len() < FOUND_MAX {
            differing.insert(at, extent);
        }
    }

    /// What a verification has found so far.
    #[must_use]
    pub fn findings(&self) -> &Findings {
        &self.findings
    }

    fn finish(&mut self, extent: Extent) {
        if self.purpose == Purpose::Compare {
            self.finished.push(extent);
        }
    }

    /// What was found equal or was sent since the last call, in a comparison.
    pub fn take_finished(&mut self) -> Vec<Extent> {
        std::mem::take(&mut self.finished)
    }

    /// The connection was made anew: digest checks without an answer are asked again.
    pub fn reattached(&mut self) {
        self.asked_bytes = 0;
        self.pieces.extend(std::mem::take(&mut self.asked).into_values());
    }

    /// Tries again what could not be read.
    pub fn retry_unreadable(&mut self) {
        self.pieces.extend(self.unreadable.drain(..));
    }

    /// Whether every byte is done and only the marker is missing.
    #[must_use]
    pub fn is_complete(&self) -> bool {
        self.done_bytes == self.total_bytes && self.marker.is_none()
    }

    /// The record that ends the job was admitted as `seq`.
    pub fn set_marker(&mut self, seq: Seq) {
        assert!(self.is_complete());
        self.marker = Some(seq);
    }

    /// The record that ends the job, once admitted.
    #[must_use]
    pub fn marker(&self) -> Option<Seq> {
        self.marker
    }

    /// Whether something only goes on when time passes.
    #[must_use]
    pub fn needs_time(&self) -> bool {
        let waits = !self.unreadable.is_empty() || !self.doubted.is_empty();
        self.marker.is_none() && (self.bounds.rate_bytes_per_s > 0 || waits)
    }

    /// How far the job is.
    #[must_use]
    pub fn progress(&self, now: MonoNanos) -> Progress {
        let elapsed_ms = (now.since_ns(self.started_at) / 1_000_000).max(1);
        Progress {
            purpose: self.purpose,
            done_bytes: self.done_bytes,
            total_bytes: self.total_bytes,
            sent_bytes: self.sent_bytes,
            unreadable_bytes: self.unreadable.iter().map(|(e, _)| e.len_bytes).sum(),
            rate_bytes_per_s: self.done_bytes.saturating_mul(1000) / elapsed_ms,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;
    const NOW: MonoNanos = MonoNanos(0);
    const BOUNDS: Bounds = Bounds { window_bytes: 2 * MIB, rate_bytes_per_s: 0 };

    /// A comparison of a large disk with little data, of which the backup lacks some and has more.
    #[test]
    fn the_cost_of_a_comparison_follows_the_data() {
        const TIB: u64 = 1 << 40;
        let here = [range(5 * MIB, 3 * MIB), range(9 * TIB, MIB)];
        let there = [range(5 * MIB, 3 * MIB), range(2 * TIB, MIB)];
        let within = |all: &[Extent], e: Extent| {
            all.iter().any(|data| data.offset < e.end() && e.offset < data.end())
        };
        for purpose in [Purpose::Compare, Purpose::Verify { repair: true }] {
            let mut job = CopyJob::new(purpose, vec![range(0, 16 * TIB)], BOUNDS, NOW);
            let (mut steps, mut read_bytes, mut copied) = (0, 0, Vec::new());
            let mut now = NOW;
            while !job.is_complete() {
                now = now.plus_ms(100);
                assert!(now < NOW.plus_ms(600_000), "{:?}", job.progress(now));
                while let Some((extent, kind)) = job.next(now) {
                    steps += 1;
                    assert!(steps < 5000, "{:?}", job.progress(now));
                    match kind {
                        CopyKind::Hole => {
                            let end =
                                here.iter().map(|data| data.offset).find(|at| *at >= extent.offset);
                            let data = here
                                .iter()
                                .find(|data| within(&[**data], Extent { len_bytes: 1, ..extent }));
                            let outcome = match data {
                                Some(data) => {
                                    let len = data.end().min(extent.end()) - extent.offset;
                                    CopyOutcome::HasData(len)
                                }
                                None => {
                                    let end = end.unwrap_or(u64::MAX).min(extent.end());
                                    CopyOutcome::AskedForZeroes(end - extent.offset)
                                }
                            };
                            job.copied(extent, outcome);
                            if let CopyOutcome::AskedForZeroes(len_bytes) = outcome {
                                let hole = Extent { len_bytes, ..extent };
                                job.digest_result(
                                    extent.disk,
                                    extent.offset,
                                    !within(&there, hole),
                                );
                            }
                        }
                        CopyKind::Digest => {
                            read_bytes += extent.len_bytes;
                            job.copied(extent, CopyOutcome::Asked);
                            let equal = within(&here, extent) == within(&there, extent);
                            job.digest_result(extent.disk, extent.offset, equal);
                        }
                        CopyKind::Copy | CopyKind::CopyUnlessZero => {
                            copied.push(extent);
                            job.copied(extent, CopyOutcome::Sent);
                        }
                    }
                }
            }
            assert_eq!(job.progress(now).done_bytes, 16 * TIB);
            let missing = [range(2 * TIB, MIB), range(9 * TIB, MIB)];
            assert!(missing.iter().all(|m| copied.iter().any(|c| within(&[*m], *c))));
            assert!(copied.iter().all(|c| within(&missing, *c)), "{copied:?}");
            assert!(read_bytes < 100 * MIB, "{read_bytes}");
        }
    }

    fn range(offset: u64, len_bytes: u64) -> Extent {
        Extent { disk: DiskId(0), offset, len_bytes }
    }

    fn take(job: &mut CopyJob) -> Vec<(Extent, CopyKind)> {
        std::iter::from_fn(|| job.next(NOW)).collect()
    }

    #[test]
    fn initial_copy_covers_every_byte_once_within_its_window() {
        let ranges = vec![range(100, 3 * MIB), range(8 * MIB, 1), range(9 * MIB, 0)];
        let mut job = CopyJob::new(Purpose::Initial, ranges, BOUNDS, NOW);
        let mut covered = Vec::new();
        loop {
            let batch = take(&mut job);
            if batch.is_empty() {
                break;
            }
            assert!(
                batch.iter().map(|(e, _)| e.len_bytes).sum::<u64>()
                    < READING_MAX_BYTES + PIECE_BYTES
            );
            for (extent, kind) in batch {
                assert_eq!(kind, CopyKind::CopyUnlessZero);
                assert!(extent.len_bytes <= PIECE_BYTES);
                covered.push((extent.offset, extent.len_bytes));
                job.copied(extent, CopyOutcome::Sent);
            }
        }
        let mut at = 100;
        for (offset, len) in &covered[..covered.len() - 1] {
            assert_eq!(*offset, at);
            at += len;
        }
        assert_eq!(at, 100 + 3 * MIB);
        assert_eq!(covered.last(), Some(&(8 * MIB, 1)));
        assert!(job.is_complete());
        job.set_marker(Seq(5));
        assert!(!job.is_complete());
    }

    #[test]
    fn only_what_differs_is_copied_and_lost_checks_are_asked_again() {
        let mut job = CopyJob::new(Purpose::Compare, vec![range(0, 2 * MIB)], BOUNDS, NOW);
        for _ in 0..2 {
            let checks = take(&mut job);
            assert_eq!(checks.len(), 1);
            job.copied(checks[0].0, CopyOutcome::Asked);
        }
        job.digest_result(DiskId(0), 0, true);
        job.reattached();
        job.digest_result(DiskId(0), MIB, true);
        assert!(!job.is_complete(), "an answer to a check that was lost counts for nothing");
        let again = take(&mut job);
        assert_eq!(again, [(range(MIB, MIB), CopyKind::Digest)]);
        job.copied(again[0].0, CopyOutcome::Asked);
        job.digest_result(DiskId(0), MIB, false);
        let pieces = take(&mut job);
        assert_eq!(pieces.len() as u64, MIB / PIECE_BYTES);
        for (extent, kind) in pieces {
            assert_eq!(kind, CopyKind::Copy);
            job.copied(extent, CopyOutcome::Sent);
        }
        assert!(job.is_complete());
        assert_eq!(job.progress(NOW).sent_bytes, MIB);
    }

    /// Answers checks as a backup whose bytes at `bad` are others, until nothing is left to read.
    fn verify(job: &mut CopyJob, bad: &[u64]) -> u64 {
        verify_while(job, |_, extent| has_one_of(extent, bad))
    }

    fn has_one_of(extent: Extent, bad: &[u64]) -> bool {
        bad.iter().any(|at| (extent.offset..extent.end()).contains(at))
    }

    /// The same, with extents that differ at that time only.
    fn verify_while(job: &mut CopyJob, is_bad: impl Fn(MonoNanos, Extent) -> bool) -> u64 {
        let (mut copied, mut now) = (0, NOW);
        while !job.is_complete() {
            now = now.plus_ms(1000);
            let work: Vec<_> = std::iter::from_fn(|| job.next(now)).collect();
            assert!(work.is_empty() || job.needs_time() || job.doubted.is_empty());
            for (extent, kind) in work {
                if kind == CopyKind::Copy {
                    copied += extent.len_bytes;
                    job.copied(extent, CopyOutcome::Sent);
                    continue;
                }
                job.copied(extent, CopyOutcome::Asked);
                let equal = !is_bad(now, extent);
                job.digest_result(extent.disk, extent.offset, equal);
            }
        }
        copied
    }

    #[test]
    fn a_verification_finds_the_blocks_and_changes_nothing() {
        let purpose = Purpose::Verify { repair: false };
        let mut job = CopyJob::new(purpose, vec![range(0, 3 * MIB + 512)], BOUNDS, NOW);
        let bad = [5, 4096, 8191, 70_000, MIB + 9, 3 * MIB + 3];
        assert_eq!(verify(&mut job, &bad), 0, "nothing is copied");
        let expected = [range(0, 8192), range(69_632, 4096), range(MIB, 4096), range(3 * MIB, 512)];
        assert_eq!(job.findings().differing, expected);
        assert_eq!(job.findings().differing_bytes, 4 * 4096 + 512);
        assert_eq!(job.findings().repaired_bytes, 0);
        assert_eq!(job.progress(NOW).done_bytes, 3 * MIB + 512);

        let mut job = CopyJob::new(purpose, vec![range(0, 3 * MIB)], BOUNDS, NOW);
        verify(&mut job, &[]);
        assert_eq!(*job.findings(), Findings::default());
    }

    /// The backup's disk could not be read for a moment.
    #[test]
    fn what_differs_once_and_not_again_is_no_difference() {
        let purpose = Purpose::Verify { repair: false };
        let mut job = CopyJob::new(purpose, vec![range(0, 3 * MIB)], BOUNDS, NOW);
        let first = NOW.plus_ms(SECOND_LOOK_AFTER.as_millis() as u64);
        verify_while(&mut job, |now, extent| {
            has_one_of(extent, &[5]) || (now < first && has_one_of(extent, &[MIB]))
        });
        assert_eq!(job.findings().differing, [range(0, 4096)]);
        assert_eq!(job.progress(NOW).done_bytes, 3 * MIB);
        assert!(!job.needs_time() && !job.has_next(first));
    }

    #[test]
    fn a_repair_copies_what_differs_and_no_more() {
        let purpose = Purpose::Verify { repair: true };
        let mut job = CopyJob::new(purpose, vec![range(0, 3 * MIB)], BOUNDS, NOW);
        assert_eq!(verify(&mut job, &[4096, 2 * MIB]), 8192);
        assert_eq!(job.findings().repaired_bytes, job.findings().differing_bytes);
    }

    #[test]
    fn a_list_of_findings_ends_and_their_count_does_not() {
        let purpose = Purpose::Verify { repair: false };
        let mut job = CopyJob::new(purpose, vec![range(0, 16 * MIB)], BOUNDS, NOW);
        let bad: Vec<u64> = (0..16 * MIB).step_by(8192).collect();
        verify(&mut job, &bad);
        assert_eq!(job.findings().differing.len(), FOUND_MAX);
        assert_eq!(job.findings().differing_bytes, 4096 * bad.len() as u64);
    }

    #[test]
    fn what_a_verification_cannot_read_is_said() {
        let purpose = Purpose::Verify { repair: false };
        let mut job = CopyJob::new(purpose, vec![range(0, 10)], BOUNDS, NOW);
        let (extent, _) = job.next(NOW).unwrap();
        job.copied(extent, CopyOutcome::Unreadable);
        assert!(job.is_complete());
        assert_eq!(job.findings().unreadable_bytes, 10);
    }

    #[test]
    fn what_cannot_be_read_keeps_the_job_open() {
        let mut job = CopyJob::new(Purpose::Initial, vec![range(0, 10)], BOUNDS, NOW);
        let (extent, _) = job.next(NOW).unwrap();
        job.copied(extent, CopyOutcome::Unreadable);
        assert_eq!(job.progress(NOW).unreadable_bytes, 10);
        assert!(!job.is_complete() && job.next(NOW).is_none());
        job.retry_unreadable();
        let (extent, _) = job.next(NOW).unwrap();
        job.copied(extent, CopyOutcome::Zero);
        assert!(job.is_complete());
    }

    #[test]
    fn the_rate_bounds_what_is_given_out() {
        let bounds = Bounds { window_bytes: 64 * MIB, rate_bytes_per_s: MIB };
        let mut job = CopyJob::new(Purpose::Initial, vec![range(0, 16 * MIB)], bounds, NOW);
        let given = |job: &mut CopyJob, at_s: u64| {
            let mut sum = 0;
            while let Some((e, _)) = job.next(MonoNanos(at_s * 1_000_000_000)) {
                job.copied(e, CopyOutcome::Zero);
                sum += e.len_bytes;
            }
            sum
        };
        assert_eq!(given(&mut job, 0), PIECE_BYTES);
        assert_eq!(given(&mut job, 2), 2 * MIB);
    }
}
