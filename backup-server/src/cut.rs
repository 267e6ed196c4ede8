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
//! The cut only grows, and it is a function of the journal alone, so a restart finds at least the
//! cut that was told before. The fold goes up to it, too.

mod held_back;
#[cfg(test)]
mod tests;

pub use held_back::{Awaited, HeldBack};

use crate::journal::{Standing, State};
use crate::planted::{self, Bug};
use std::collections::VecDeque;
use tidelock_protocol::hlc::Hlc;
use tidelock_protocol::ids::{Seq, WriterId};
use tidelock_protocol::message::{CopyState, Form};
use tidelock_protocol::record::{Effect, Record};
use tidelock_protocol::vector::CountVector;

/// A record beyond the cut. In the vector form only those that depend on other writers.
#[derive(Clone, Debug)]
struct Waiting {
    seq: Seq,
    hlc: Hlc,
    deps: CountVector,
}

/// A resync that is not in the cut yet.
#[derive(Clone, Copy, Debug)]
struct Resync {
    /// The last seq before it.
    from: Seq,
    /// Its last record.
    done: Option<(Seq, Hlc)>,
}

#[derive(Clone, Debug, Default)]
struct Track {
    waiting: VecDeque<Waiting>,
    /// The time of the last record that does not wait any more.
    below: Hlc,
    /// In their order: one may begin before the cut has reached the end of the one before.
    resyncs: VecDeque<Resync>,
    /// The end of an initial copy that is not in the cut yet.
    whole_at: Option<Seq>,
    removed: bool,
}

impl Track {
    /// The time that the writer has reached with this seq, in the HLC form.
    fn hlc_at(&self, seq: Seq) -> Hlc {
        let reached = self.waiting.partition_point(|w| w.seq <= seq);
        reached.checked_sub(1).map_or(self.below, |last| self.waiting[last].hlc)
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
}

impl CutTracker {
    /// Of a journal whose every record is in the cut.
    #[must_use]
    pub fn new(state: &State) -> Self {
        let mut tracker = Self::default();
        tracker.reshape(state);
        tracker
    }

    /// The group's writers or its form have changed; in the latter case every record is in the
    /// cut.
    pub fn reshape(&mut self, state: &State) {
        // What the guests of a recovered group write depends on nothing that is not there.
        let form = if state.recovered().is_some() { Form::Vector } else { state.form };
        self.tracks.resize_with(state.writers.len(), Track::default);
        for (track, writer) in self.tracks.iter_mut().zip(&state.writers) {
            track.removed = writer.standing == Standing::Removed;
            if form != self.form {
                track.waiting.clear();
            }
            if track.waiting.is_empty() {
                track.below = writer.hlc;
            }
        }
        self.form = form;
    }

    /// The next record of the journal, which is not void, and the state before it.
    pub fn record(&mut self, before: &State, record: &Record) {
        let i = record.writer.index();
        let (Some(track), Some(writer)) = (self.tracks.get_mut(i), before.writers.get(i)) else {
            return;
        };
        if writer.copy == CopyState::Resyncing
            && track.resyncs.back().is_none_or(|r| r.done.is_some())
        {
            track.resyncs.push_back(Resync { from: writer.committed, done: None });
        }
        if record.effect == Effect::CopyDone {
            match (track.resyncs.back_mut(), writer.copy) {
                (Some(resync), CopyState::Resyncing) => {
                    resync.done = Some((record.seq, record.hlc));
                }
                (_, CopyState::Empty | CopyState::Partial | CopyState::Seeded) => {
                    track.whole_at = Some(record.seq)
                }
                _ => {}
            }
        }
        if self.form == Form::Hlc || record.deps.entries().next().is_some() {
            let (seq, hlc, deps) = (record.seq, record.hlc, record.deps.clone());
            track.waiting.push_back(Waiting { seq, hlc, deps });
        }
    }

    /// The cut under what is committed for each writer by itself.
    pub fn settle(&mut self, committed: &CountVector) -> &CountVector {
        let mut cut = match self.form {
            Form::Vector => self.settle_vectors(committed),
            Form::Hlc => self.settle_times(committed),
        };
        if planted::is(Bug::CutOfEachMaximum) {
            cut.clone_from(committed);
        }
        for (i, track) in self.tracks.iter_mut().enumerate() {
            let have = cut.get(WriterId(i as u16));
            while let Some(first) = track.waiting.front().filter(|w| w.seq <= have) {
                track.below = first.hlc;
                track.waiting.pop_front();
            }
            track.resyncs.retain(|r| r.done.is_none_or(|(done, _)| done > have));
            track.whole_at = track.whole_at.filter(|done| *done > have);
        }
        // C only grows, and so does this.
        self.cut.merge(&cut);
        &self.cut
    }

    fn settle_vectors(&self, committed: &CountVector) -> CountVector {
        let mut cut: Vec<Seq> =
            (0..self.tracks.len()).map(|i| committed.get(WriterId(i as u16))).collect();
        // From above: take away what depends on what is not there, until nothing does.
        loop {
            let mut fell = false;
            for (i, track) in self.tracks.iter().enumerate() {
                let blocked = track
                    .waiting
                    .iter()
                    .find(|w| w.seq <= cut[i] && self.missing(w, |of| cut[of.index()]).is_some());
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
            if !fell {
                break;
            }
        }
        (0..).map(WriterId).zip(cut).collect()
    }

    /// What a record depends on that is not there.
    fn missing(&self, of: &Waiting, have: impl Fn(WriterId) -> Seq) -> Option<(WriterId, Seq)> {
        of.deps.entries().find(|(writer, seq)| match self.tracks.get(writer.index()) {
            Some(track) => have(*writer) < *seq && !track.removed,
            None => true,
        })
    }

    fn settle_times(&mut self, committed: &CountVector) -> CountVector {
        let Reached { limit, least: (_, watermark), .. } = self.reached(committed);
        // A writer that was added is behind at first; what was true stays true.
        self.watermark = self.watermark.max(watermark);
        let cut = self.tracks.iter().zip(limit).map(|(track, limit)| {
            let beyond = track.waiting.partition_point(|w| w.hlc <= self.watermark);
            let first = track.waiting.get(beyond);
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
        let counts = |track: &Track| !track.removed || planted::is(Bug::RemovedHoldsWatermark);
        let speaks =
            |track: &Track| !track.waiting.is_empty() || !planted::is(Bug::WatermarkIgnoresIdle);
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
        let waiting = self.tracks.iter().flat_map(|track| &track.waiting);
        waiting.map(|w| w.deps.get(writer)).max().unwrap_or_default()
    }

    /// Whether the end of its initial copy is still beyond the cut.
    #[must_use]
    pub fn is_copying(&self, writer: WriterId) -> bool {
        self.tracks.get(writer.index()).is_some_and(|track| track.whole_at.is_some())
    }

    /// Records that are kept because they are beyond the cut: a measure of memory.
    #[must_use]
    pub fn waiting(&self) -> usize {
        self.tracks.iter().map(|track| track.waiting.len()).sum()
    }
}
