//! When a map that was too small is tried again.
//!
//! A map with fewer slots than there are extents that the backup lacks would be filled, given up and tried
//! again for ever, and each attempt costs guests the writes that fill it. So there is a hysteresis, in level and
//! in time. While everything may differ the extents that a map would have to have are counted in memory
//! (the *trial*). The map is tried again when they were no more than 1/[`LEVEL`] of its slots for the calm, and
//! for as long as it takes the backup to get all that was given out, twice.
//!
//! Invariant: the calm is [`CALM_MS`], doubled (up to 2^[`STRIKES_MAX`] times) by each overflow that comes
//! sooner after a return than [`STEADY`] calms. So in a span S a map is given up for want of slots
//! [`STRIKES_MAX`] + 1 + S / ([`STEADY`] × [`CALM_MS`]) times at most, and once more for each whole copy.
//!
//! The same rule as that of a group that goes on without the backup ([`crate::degrade`]).

use super::geometry::Entry;
use smallvec::SmallVec;
use std::collections::{HashMap, VecDeque};
use tidelock_protocol::ids::{MonoNanos, Seq};

/// A map is tried again when it would have been filled to one part in so many.
pub const LEVEL: u32 = 2;
/// For so long, in milliseconds.
pub const CALM_MS: u64 = 1_000;
/// How often the calm is doubled at most.
pub const STRIKES_MAX: u32 = 5;
/// A map that has lasted for so many of its calms is here for good: the next calm is the shortest again.
pub const STEADY: u64 = 16;
/// How often the backup must get all that was given out.
const ROUNDS: u32 = 2;

/// How long the next trial lasts.
#[derive(Debug, Default)]
pub(super) struct Calm {
    strikes: u32,
    returned_at: Option<MonoNanos>,
}

impl Calm {
    pub(super) fn ms(&self) -> u64 {
        CALM_MS << self.strikes
    }

    /// A map is tried.
    pub(super) fn returns(&mut self, now: MonoNanos) {
        self.returned_at = Some(now);
    }

    /// It was too small.
    pub(super) fn overflows(&mut self, now: MonoNanos) {
        let Some(returned_at) = self.returned_at else { return };
        let is_steady = now >= returned_at.plus_ms(self.ms() * STEADY);
        self.strikes = if is_steady { 0 } else { (self.strikes + 1).min(STRIKES_MAX) };
    }
}

/// An extent; several of one request that share a slot have one to themselves.
type Key = (Entry, u64);

#[derive(Debug, Default)]
struct Use {
    /// Requests under way in it.
    users: u32,
    /// The backup needs this much before it may be forgotten.
    needs: Seq,
}

/// What a map would have to have, counted.
#[derive(Debug)]
pub(super) struct Trial {
    extents_max: usize,
    ends_at: MonoNanos,
    rounds: u32,
    /// The round ends when the backup has this.
    barrier: Seq,
    extents: HashMap<Key, Use>,
    held: HashMap<u64, SmallVec<[Key; 2]>>,
    /// Extents in which a request has ended, with what the backup needs, in order.
    ended: VecDeque<(Seq, Key)>,
}

impl Trial {
    pub(super) fn new(slots: u32, ends_at: MonoNanos, last_seq: Seq) -> Self {
        Self {
            extents_max: (slots / LEVEL) as usize,
            ends_at,
            rounds: 0,
            barrier: last_seq,
            extents: HashMap::new(),
            held: HashMap::new(),
            ended: VecDeque::new(),
        }
    }

    /// A request begins. Returns whether the extents are still few enough.
    pub(super) fn admit(
        &mut self,
        request: u64,
        entries: impl IntoIterator<Item = Entry>,
        durable: Seq,
    ) -> bool {
        self.forget(durable);
        let key = |entry: Entry| (entry, if entry.is_narrow() { 0 } else { request });
        let keys: SmallVec<[Key; 2]> = entries.into_iter().map(key).collect();
        for key in &keys {
            self.extents.entry(*key).or_default().users += 1;
        }
        self.held.insert(request, keys);
        self.extents.len() <= self.extents_max
    }

    /// A request has ended. One that had begun before the trial is none of its own.
    pub(super) fn finished(&mut self, request: u64, last_seq: Seq) {
        for key in self.held.remove(&request).unwrap_or_default() {
            let of = self.extents.get_mut(&key).expect("a request was under way in it");
            of.users -= 1;
            of.needs = last_seq;
            self.ended.push_back((last_seq, key));
        }
    }

    /// What the backup has need not be in a map.
    fn forget(&mut self, durable: Seq) {
        while let Some((_, key)) = self.ended.front().filter(|(needs, _)| *needs <= durable) {
            let is_over = |of: &Use| of.users == 0 && of.needs <= durable;
            if self.extents.get(key).is_some_and(is_over) {
                self.extents.remove(key);
            }
            self.ended.pop_front();
        }
    }

    /// Whether a map is to be tried.
    pub(super) fn is_passed(&mut self, now: MonoNanos, durable: Seq, last_seq: Seq) -> bool {
        if self.rounds < ROUNDS && durable >= self.barrier {
            self.rounds += 1;
            self.barrier = last_seq;
        }
        self.rounds == ROUNDS && now >= self.ends_at
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tidelock_protocol::ids::DiskId;

    fn narrow(first: u32) -> Entry {
        Entry { disk: DiskId(0), first, more: 0 }
    }

    #[test]
    fn extents_that_the_backup_lacks_are_counted_once_each() {
        let mut trial = Trial::new(4, MonoNanos(0), Seq(0));
        assert!(trial.admit(1, [narrow(7)], Seq(0)) && trial.admit(2, [narrow(7)], Seq(0)));
        assert!(trial.admit(3, [narrow(8)], Seq(0)));
        trial.finished(3, Seq(1));
        assert!(!trial.admit(4, [narrow(9)], Seq(0)), "three of four are more than half");
        trial.finished(4, Seq(2));
        assert!(trial.admit(5, [narrow(7)], Seq(1)), "the backup has 8");
        assert_eq!(trial.extents.len(), 2, "7 is under way, and the backup lacks 9");
        trial.finished(1, Seq(3));
        assert!(trial.admit(6, [narrow(8)], Seq(2)), "7 is still under way");
        for request in [2, 5, 6] {
            trial.finished(request, Seq(4));
        }
        let wide = Entry { more: 20, ..narrow(0) };
        assert!(trial.admit(7, [wide], Seq(4)) && trial.admit(8, [wide], Seq(4)));
        assert!(!trial.admit(9, [wide], Seq(4)), "each has a slot of its own");
        trial.finished(99, Seq(5));
    }

    #[test]
    fn it_lasts_for_the_calm_and_two_rounds() {
        let second = |n: u64| MonoNanos(n * 1_000_000_000);
        let mut trial = Trial::new(4, second(1), Seq(10));
        assert!(!trial.is_passed(second(2), Seq(9), Seq(12)));
        assert!(!trial.is_passed(second(2), Seq(10), Seq(12)), "one round");
        assert!(!trial.is_passed(second(3), Seq(11), Seq(30)));
        assert!(trial.is_passed(second(4), Seq(12), Seq(40)));
        let mut idle = Trial::new(4, second(1), Seq(10));
        assert!(!idle.is_passed(second(0), Seq(10), Seq(10)));
        assert!(!idle.is_passed(second(0), Seq(10), Seq(10)), "it is too soon");
        assert!(idle.is_passed(second(1), Seq(10), Seq(10)));
    }

    #[test]
    fn overflows_that_follow_each_other_double_the_calm() {
        let ms = |n: u64| MonoNanos(n * 1_000_000);
        let mut calm = Calm::default();
        calm.overflows(ms(1));
        assert_eq!(calm.ms(), CALM_MS, "the first one");
        for nth in 1..9 {
            calm.returns(ms(10));
            calm.overflows(ms(20));
            assert_eq!(calm.ms(), CALM_MS << nth.min(STRIKES_MAX));
        }
        calm.returns(ms(0));
        calm.overflows(ms(STEADY * (CALM_MS << STRIKES_MAX)));
        assert_eq!(calm.ms(), CALM_MS);
    }
}
