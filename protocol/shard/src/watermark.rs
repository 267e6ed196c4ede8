//! The watermark service (Slogger 5.4): the least stamp that every shard has committed at the backup.
//!
//! The state is what the shards report, so a new instance is right as soon as all have reported once, and two at once do no
//! harm.
//!
//! A recovery (5.6) closes the log of every shard, for good, and then the final watermark is the least stamp at which one was
//! closed. Nothing can be committed there later, so every instance that hears of all shards finds the same.

use crate::doubt::Doubts;
use thiserror::Error;
use tidelock_planted::Bug;
use tidelock_protocol::hlc::Hlc;

/// BSA to service: all that there is to know of a shard.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Report {
    /// lcommit-ts: the effective stamp of the last entry that the shard has committed.
    pub lcommit: Hlc,
    /// A recovery has closed its log: `lcommit` is final.
    pub is_closed: bool,
    /// Ready to serve: everything up to the final watermark is applied.
    pub is_recovered: bool,
}

/// Service to BSA.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Order {
    /// The watermark.
    Advance(Hlc),
    /// A disaster: take no entries any more, and report what is committed (final round).
    Close,
    /// The final watermark.
    Recover(Hlc),
}

/// A shard that the store does not have.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
#[error("shard {shard} reports, but the store has {shards}, numbered from 0")]
pub struct NoShard {
    /// The shard.
    pub shard: u16,
    /// How many there are.
    pub shards: usize,
}

/// A shard, as far as an instance has heard of it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
struct Slot {
    /// Entry of the shard timestamp vector (STV).
    lcommit: Hlc,
    /// True once the shard has reported to this instance.
    is_known: bool,
    is_closed: bool,
    is_recovered: bool,
}

/// An instance of the service.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct WatermarkService {
    shards: Vec<Slot>,
    /// Shards that have not reported.
    unknown: usize,
    /// The least stamp of all, and how many shards have it: a batch has reports of hundreds of shards, and each must not look
    /// at all of them.
    least: (Hlc, usize),
    doubts: Doubts,
    /// A disaster was declared, or an earlier instance had heard of one.
    is_recovery: bool,
}

impl WatermarkService {
    /// A service for a store of so many shards that has heard of none yet.
    #[must_use]
    pub fn new(shards: u16) -> Self {
        Self::with_doubts(shards, Doubts::default())
    }

    /// The same of a store whose clocks were in doubt.
    #[must_use]
    pub fn with_doubts(shards: u16, doubts: Doubts) -> Self {
        let slots = vec![Slot::default(); shards.into()];
        let (unknown, least) = (slots.len(), (Hlc::default(), slots.len()));
        Self { shards: slots, unknown, least, doubts, is_recovery: false }
    }

    /// A shard reports. True: [`WatermarkService::order`] has changed, for all shards.
    ///
    /// # Errors
    /// The store has no such shard.
    pub fn reported(&mut self, shard: u16, report: Report) -> Result<bool, NoShard> {
        let before = self.order();
        let Self { shards, unknown, least, is_recovery, .. } = self;
        let no_shard = NoShard { shard, shards: shards.len() };
        let slot = shards.get_mut(usize::from(shard)).ok_or(no_shard)?;
        *unknown -= usize::from(!std::mem::replace(&mut slot.is_known, true));
        // A replica that does not lead any more may report late.
        let was = slot.lcommit;
        slot.lcommit = was.max(report.lcommit);
        least.1 -= usize::from(was == least.0 && slot.lcommit > was);
        slot.is_closed |= report.is_closed;
        slot.is_recovered |= report.is_recovered;
        // A recovery that has closed a shard must end, also if the service that has begun it is dead.
        *is_recovery |= report.is_closed;
        if least.1 == 0 {
            let stamp = shards.iter().map(|slot| slot.lcommit).min().unwrap_or_default();
            *least = (stamp, shards.iter().filter(|slot| slot.lcommit == stamp).count());
        }
        Ok(before != self.order())
    }

    /// A clock of the primary site is in doubt: no watermark is between these stamps. The watermark of now stays.
    pub fn doubt(&mut self, after: Hlc, through: Hlc) {
        let after = after.max(self.watermark().unwrap_or_default());
        self.doubts.add(after, through);
    }

    /// Times of doubt: to be kept with the logs.
    #[must_use]
    pub fn doubts(&self) -> &Doubts {
        &self.doubts
    }

    /// A disaster was declared.
    pub fn recover(&mut self) {
        self.is_recovery = true;
    }

    /// Order to every shard now: sent when it changes, to a shard that reports, and again if it may be lost.
    /// [`None`]: not all shards have reported yet.
    #[must_use]
    pub fn order(&self) -> Option<Order> {
        if !self.is_recovery {
            return self.watermark().map(Order::Advance);
        }
        let open = self.shards.iter().filter(|slot| !slot.is_closed).count();
        let forgotten = usize::from(tidelock_planted::is(Bug::FinalRoundForgetsShard));
        if open > forgotten {
            return Some(Order::Close);
        }
        self.least(|slot| slot.is_closed).map(Order::Recover)
    }

    fn least(&self, counts: impl Fn(&Slot) -> bool) -> Option<Hlc> {
        let least = self.shards.iter().filter(|slot| counts(slot)).map(|slot| slot.lcommit).min();
        least.map(|least| self.doubts.before(least))
    }

    /// The watermark: entries up to this stamp may be applied.
    #[must_use]
    pub fn watermark(&self) -> Option<Hlc> {
        if self.unknown == 0 && !self.shards.is_empty() {
            return Some(self.doubts.before(self.least.0));
        }
        tidelock_planted::is(Bug::SilentShardIgnored).then(|| self.least(|slot| slot.is_known))?
    }

    /// The shard that holds the watermark back: the first that has not reported, or the one that is furthest behind.
    #[must_use]
    pub fn held_back_by(&self) -> Option<u16> {
        let behind = (0..).zip(&self.shards).min_by_key(|(_, slot)| (slot.is_known, slot.lcommit));
        behind.map(|(shard, _)| shard)
    }

    /// True if every shard is recovered and ready to serve.
    #[must_use]
    pub fn is_recovered(&self) -> bool {
        self.is_recovery && self.shards.iter().all(|slot| slot.is_recovered)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn the_watermark_is_the_least_that_all_have_reported(
            reports in prop::collection::vec((0u16..4, 0u64..12), 0..80),
        ) {
            let mut service = WatermarkService::new(4);
            let mut known = [None; 4];
            for (shard, stamp) in reports {
                let before = service.order();
                let report =
                    Report { lcommit: Hlc(stamp), is_closed: false, is_recovered: false };
                let is_news = service.reported(shard, report).unwrap();
                let slot = &mut known[usize::from(shard)];
                *slot = (*slot).max(Some(Hlc(stamp)));
                let all = known.iter().all(Option::is_some);
                prop_assert_eq!(service.watermark(), all.then(|| known.iter().flatten().min().copied()).flatten());
                prop_assert_eq!(is_news, before != service.order());
            }
        }
    }
}
