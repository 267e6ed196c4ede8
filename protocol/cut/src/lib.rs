//! The cut: what a recovery would take now, and so what hosts are told as C (DESIGN 2.9, rules 1
//! and 2).
//!
//! What is durable is so for each writer by itself. The cut is the greatest part of it that
//! - is downward closed: with a record come all that it may depend on;
//! - has of a resync all or nothing: in the middle of one the disks are no state that they ever
//!   had.
//!
//! In the **vector form** a record names what it depends on. In the **HLC form** it does not: every
//! record that it may depend on has a smaller time, so the records up to the watermark, the least
//! time that every writer has reached, are closed.
//!
//! The cut only grows, and it is a function of the records alone, so a restart finds at least the
//! cut that was told before. The fold goes up to it, too.
//!
//! | module | what it is for |
//! |---|---|
//! | `times` | times of records that wait, in little memory |
//! | `held_back` | why a record is not in the cut |
#![forbid(unsafe_code)]

mod held_back;
#[cfg(test)]
mod tests;
mod times;

pub use held_back::{Awaited, HeldBack};

use std::collections::VecDeque;
use tidelock_planted::Bug;
use tidelock_protocol::hlc::Hlc;
use tidelock_protocol::ids::{Seq, WriterId};
use tidelock_protocol::message::{CopyState, Form};
use tidelock_protocol::record::{Body, Record, Role};
use tidelock_protocol::vector::CountVector;
use times::Times;

/// A writer after some record of the group, as far as the cut depends on it.
#[derive(Clone, Copy, Debug)]
pub struct Writer {
    /// Up to where its disks are a state that the primary had.
    pub committed: Seq,
    /// The time of its last record.
    pub hlc: Hlc,
    /// The part of its disks that is there.
    pub copy: CopyState,
    /// The group can be recovered without it until its initial copy is whole.
    pub is_joining: bool,
    /// Nothing waits for it any more.
    pub is_removed: bool,
}

/// The writers of a group after some record, as whoever keeps the records knows them.
pub trait Writers {
    /// The form in which records say what they depend on, from here on. If it has changed, all records before are in
    /// the cut.
    fn form(&self) -> Form;
    /// The number of writers.
    fn count(&self) -> usize;
    /// A writer. `None`: the group does not have it.
    fn get(&self, writer: WriterId) -> Option<Writer>;
}

/// What a record beyond the cut depends on, of one writer.
#[derive(Clone, Copy, Debug)]
struct Need {
    /// The record.
    seq: Seq,
    of: WriterId,
    needs: Seq,
}

/// A resync that is not in the cut yet.
#[derive(Clone, Copy, Debug)]
struct Resync {
    /// The last seq before it.
    from: Seq,
    /// Its last record.
    done: Option<(Seq, Hlc)>,
}

/// The end of an initial copy that is not in the cut yet.
#[derive(Clone, Copy, Debug)]
struct Copied {
    /// The record that ends it.
    done: Seq,
    /// The group can be recovered without it as long as that is not in the cut.
    is_joining: bool,
}

#[derive(Clone, Debug, Default)]
struct Track {
    /// In the vector form: what was not in the cut when the record came.
    needs: VecDeque<Need>,
    /// In the HLC form: the records beyond the cut.
    times: Times,
    /// The time of the last record that does not wait any more.
    below: Hlc,
    /// In their order: one may begin before the cut has reached the end of the one before.
    resyncs: VecDeque<Resync>,
    copied: Option<Copied>,
    removed: bool,
}

impl Track {
    /// The time that the writer has reached with this seq, in the HLC form.
    fn hlc_at(&self, seq: Seq) -> Hlc {
        self.times.last_up_to(seq).map_or(self.below, |last| last.hlc)
    }
}

/// How far the writers are, by time.
struct Reached {
    /// By writer: the last record that may be in the cut.
    limit: Vec<Seq>,
    /// Who is behind all others, and its time: the watermark.
    least: (WriterId, Hlc),
    /// By writer: the first resync that cannot be in the cut, because somebody has not reached the
    /// time of its end.
    held_back: Vec<Option<HeldResync>>,
}

#[derive(Clone, Copy)]
struct HeldResync {
    /// Its last record.
    done: Seq,
    /// The time of that.
    at: Hlc,
    /// Who has not reached it, and what it has reached.
    by: (WriterId, Hlc),
}

/// The cut of a group, and the records beyond it.
#[derive(Clone, Debug, Default)]
pub struct CutTracker {
    form: Form,
    tracks: Vec<Track>,
    cut: CountVector,
    watermark: Hlc,
    /// By writer, the greatest seq that any record depends on.
    awaited: CountVector,
    /// How often a need was looked at.
    #[cfg(test)]
    looks: std::cell::Cell<u64>,
}

impl CutTracker {
    /// Of a group whose every record so far is in the cut.
    #[must_use]
    pub fn new(writers: &impl Writers) -> Self {
        let mut tracker = Self::default();
        tracker.reshape(writers);
        tracker
    }

    /// The group's writers or its form have changed; in the latter case every record is in the
    /// cut.
    pub fn reshape(&mut self, writers: &impl Writers) {
        let form = writers.form();
        self.tracks.resize_with(writers.count(), Track::default);
        for (id, track) in (0..).map(WriterId).zip(&mut self.tracks) {
            let Some(writer) = writers.get(id) else { continue };
            track.removed = writer.is_removed;
            if form != self.form {
                track.needs.clear();
                track.times.clear();
            }
            if track.times.is_empty() {
                track.below = writer.hlc;
            }
        }
        self.form = form;
    }

    /// The next record that counts, and the writers before it.
    pub fn record(&mut self, before: &impl Writers, record: &Record<impl Body>) {
        let track = self.tracks.get_mut(record.writer.index());
        let (Some(track), Some(writer)) = (track, before.get(record.writer)) else {
            return;
        };
        if writer.copy == CopyState::Resyncing
            && track.resyncs.back().is_none_or(|r| r.done.is_some())
        {
            track.resyncs.push_back(Resync { from: writer.committed, done: None });
        }
        if record.role() == Role::CopyDone {
            match (track.resyncs.back_mut(), writer.copy) {
                (Some(resync), CopyState::Resyncing) => {
                    resync.done = Some((record.seq, record.hlc));
                }
                (_, CopyState::Empty | CopyState::Partial | CopyState::Seeded) => {
                    let Writer { is_joining, .. } = writer;
                    track.copied = Some(Copied { done: record.seq, is_joining });
                }
                _ => {}
            }
        }
        self.awaited.merge(&record.deps);
        match self.form {
            Form::Hlc => track.times.push(record.seq, record.hlc),
            // What is in the cut stays there.
            Form::Vector => {
                let beyond = record.deps.entries().filter(|(of, seq)| self.cut.get(*of) < *seq);
                let need = |(of, needs)| Need { seq: record.seq, of, needs };
                track.needs.extend(beyond.map(need));
            }
        }
    }

    /// The cut under what is committed for each writer by itself.
    pub fn settle(&mut self, committed: &CountVector) -> &CountVector {
        let mut cut = match self.form {
            Form::Vector => self.settle_vectors(committed),
            Form::Hlc => self.settle_times(committed),
        };
        if tidelock_planted::is(Bug::CutOfEachMaximum) {
            cut.clone_from(committed);
        }
        for (i, track) in self.tracks.iter_mut().enumerate() {
            let have = cut.get(WriterId(i as u16));
            while track.needs.front().is_some_and(|need| need.seq <= have) {
                track.needs.pop_front();
            }
            track.below = track.times.pass(have).map_or(track.below, |last| last.hlc);
            track.resyncs.retain(|r| r.done.is_none_or(|(done, _)| done > have));
            track.copied = track.copied.filter(|copied| copied.done > have);
        }
        // C only grows, and so does this.
        self.cut.merge(&cut);
        &self.cut
    }

    fn settle_vectors(&self, committed: &CountVector) -> CountVector {
        let mut cut: Vec<Seq> =
            (0..self.tracks.len()).map(|i| committed.get(WriterId(i as u16))).collect();
        // From above: take away what depends on what is not there, until nothing does. At first by what each waits for
        // first: who waits is not to be looked through before it is known that it does.
        while self.take_away(&mut cut, true) {}
        while self.take_away(&mut cut, false) {}
        (0..).map(WriterId).zip(cut).collect()
    }

    /// Takes away once, by the first record of each that has needs, or by all. Whether there was anything.
    fn take_away(&self, cut: &mut [Seq], by_first: bool) -> bool {
        let mut fell = false;
        for (i, track) in self.tracks.iter().enumerate() {
            let first = track.needs.front().map(|need| need.seq).filter(|_| by_first);
            let last = first.map_or(cut[i], |first| first.min(cut[i]));
            let mut within = track.needs.iter().take_while(|need| need.seq <= last);
            let blocked = within.find(|need| self.is_missing(need, |of| cut[of.index()]));
            if let Some(blocked) = blocked {
                cut[i] = Seq(blocked.seq.0 - 1);
                fell = true;
            }
            for resync in &track.resyncs {
                if let Resync { from, done: Some((done, _)) } = *resync
                    && (from.next()..done).contains(&cut[i])
                {
                    cut[i] = from;
                    fell = true;
                }
            }
        }
        fell
    }

    fn is_missing(&self, need: &Need, have: impl Fn(WriterId) -> Seq) -> bool {
        #[cfg(test)]
        self.looks.update(|looks| looks + 1);
        let of = self.tracks.get(need.of.index());
        of.is_none_or(|track| have(need.of) < need.needs && !track.removed)
    }

    fn settle_times(&mut self, committed: &CountVector) -> CountVector {
        let Reached { limit, least: (_, watermark), .. } = self.reached(committed);
        // A writer that was added is behind at first; what was true stays true.
        self.watermark = self.watermark.max(watermark);
        let cut = self.tracks.iter().zip(limit).map(|(track, limit)| {
            let first = track.times.first_after(self.watermark);
            first.map_or(limit, |first| limit.min(Seq(first.seq.0 - 1)))
        });
        (0..).map(WriterId).zip(cut).collect()
    }

    /// From above, as with vectors: a resync is in only if every other writer has reached the time
    /// of its end.
    fn reached(&self, committed: &CountVector) -> Reached {
        let mut limit: Vec<Seq> =
            (0..self.tracks.len()).map(|i| committed.get(WriterId(i as u16))).collect();
        let mut held_back = vec![None; self.tracks.len()];
        let counts =
            |track: &Track| !track.removed || tidelock_planted::is(Bug::RemovedHoldsWatermark);
        let speaks = |track: &Track| {
            !track.times.is_empty() || !tidelock_planted::is(Bug::WatermarkIgnoresIdle)
        };
        loop {
            let reached = (0..).map(WriterId).zip(&self.tracks).zip(&limit);
            let reached = reached.filter(|((_, track), _)| counts(track) && speaks(track));
            let least = reached.map(|((writer, track), seq)| (writer, track.hlc_at(*seq)));
            let least = least.min_by_key(|(_, hlc)| *hlc).unwrap_or_default();
            let mut fell = false;
            for (i, track) in self.tracks.iter().enumerate() {
                for resync in &track.resyncs {
                    if let Resync { from, done: Some((done, at)) } = *resync
                        && limit[i] >= done
                        && at > least.1
                    {
                        limit[i] = from;
                        held_back[i] = Some(HeldResync { done, at, by: least });
                        fell = true;
                    }
                }
            }
            if !fell {
                return Reached { limit, least, held_back };
            }
        }
    }

    /// The cut as last settled.
    #[must_use]
    pub fn cut(&self) -> &CountVector {
        &self.cut
    }

    /// Every record up to this time is in the cut; 0 in the vector form.
    #[must_use]
    pub fn watermark(&self) -> Hlc {
        self.watermark
    }

    /// The last seq before the first resync of this writer that is not in the cut, if there is one.
    #[must_use]
    pub fn resync_from(&self, writer: WriterId) -> Option<Seq> {
        Some(self.tracks.get(writer.index())?.resyncs.front()?.from)
    }

    /// The greatest seq of this writer that a record beyond the cut depends on.
    #[must_use]
    pub fn waited_for(&self, writer: WriterId) -> Seq {
        // What a record in the cut depends on is there, too.
        let awaited = self.awaited.get(writer);
        if awaited > self.cut.get(writer) { awaited } else { Seq::ZERO }
    }

    /// Whether the end of its initial copy is still beyond the cut.
    #[must_use]
    pub fn is_copying(&self, writer: WriterId) -> bool {
        self.tracks.get(writer.index()).is_some_and(|track| track.copied.is_some())
    }

    /// The same of a writer that was added to a group that could be recovered.
    #[must_use]
    pub fn is_joining(&self, writer: WriterId) -> bool {
        let copied = self.tracks.get(writer.index()).and_then(|track| track.copied);
        copied.is_some_and(|copied| copied.is_joining)
    }

    /// Memory for records beyond the cut.
    #[must_use]
    pub fn bytes(&self) -> usize {
        let needs: usize = self.tracks.iter().map(|track| track.needs.capacity()).sum();
        let times: usize = self.tracks.iter().map(|track| track.times.bytes()).sum();
        times + needs * size_of::<Need>()
    }
}
