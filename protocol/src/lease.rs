//! Who may answer clients, and until when (PacificA 2.3).
//!
//! The host sends beacons; the backup answers each. The lease runs at the host for `lease` from
//! the moment that the answered beacon was **sent**; the backup counts `grace` from the moment
//! that the last beacon **arrived**. A beacon arrives after it was sent, and the grace is longer
//! than the lease, so the lease has ended at the host before the grace ends at the backup, as long
//! as the two clocks' rates differ by less than grace / lease (1.5 by default).
//!
//! A host that gives its lease up shuts its gate first, for good in this epoch, and says so then. So the backup need not
//! wait: the message comes after the shutting.
//!
//! ```text
//! host     ──sent──────────────── lease ──────────┤ gate shut
//!              ╲        ╱ answer
//! backup        arrived ───────────────── grace ───────────┤ may be recovered
//! ```

use crate::ids::MonoNanos;

/// The host's side: the gate may be open while [`holds`](Self::holds).
#[derive(Clone, Debug)]
pub struct Lease {
    period_ms: u64,
    until: Option<MonoNanos>,
    /// Beacons that were sent before this renew nothing.
    counts_from: MonoNanos,
    fenced: bool,
}

impl Lease {
    /// No lease yet: the gate is shut.
    #[must_use]
    pub fn new(period_ms: u64) -> Self {
        Self { period_ms, until: None, counts_from: MonoNanos(0), fenced: false }
    }

    /// The backup has answered the beacon that was sent at this time of the host's clock.
    /// Times that lie in the future of `now` are not ours and do nothing.
    pub fn renewed(&mut self, now: MonoNanos, sent_at: MonoNanos) {
        if sent_at > now || sent_at < self.counts_from {
            return;
        }
        self.until = self.until.max(Some(sent_at.plus_ms(self.period_ms)));
    }

    /// The clock that the lease runs by has stood still: the lease may have ended, and so may what a beacon that is under
    /// way would renew.
    pub fn drop_at(&mut self, now: MonoNanos) {
        self.until = None;
        self.counts_from = now;
    }

    /// The backup has ended this primary's epoch, or the host gives its lease up: there will be no lease again.
    pub fn fence(&mut self) {
        self.fenced = true;
    }

    /// Until when the lease holds, if it ever did.
    #[must_use]
    pub fn until(&self) -> Option<MonoNanos> {
        if self.fenced { None } else { self.until }
    }

    /// Whether the lease holds now.
    #[must_use]
    pub fn holds(&self, now: MonoNanos) -> bool {
        self.until().is_some_and(|until| now < until)
    }
}

/// The backup's side: the group must not be recovered before [`ended`](Self::ended).
#[derive(Clone, Copy, Debug)]
pub struct Grace {
    grace_ms: u64,
    last_heard: MonoNanos,
    given_up: bool,
}

impl Grace {
    /// From the moment that the server started: a beacon may have been answered right before.
    #[must_use]
    pub fn new(now: MonoNanos, grace_ms: u64) -> Self {
        Self { grace_ms, last_heard: now, given_up: false }
    }

    /// A beacon arrived and will be answered.
    pub fn heard(&mut self, now: MonoNanos) {
        self.last_heard = self.last_heard.max(now);
        self.given_up = false;
    }

    /// Every host has said that it has shut its gate for good: no lease can hold any more.
    pub fn give_up(&mut self) {
        self.given_up = true;
    }

    /// A host is there again, which may ask for a lease.
    pub fn take_up(&mut self) {
        self.given_up = false;
    }

    /// The host's configuration asks for at least this grace. It never gets shorter while the
    /// server runs: an older run of the host may still hold a lease that it covers.
    pub fn set_grace_ms(&mut self, grace_ms: u64) {
        self.grace_ms = self.grace_ms.max(grace_ms);
    }

    /// The time from which on the old primary's lease is certain to have ended, unless a beacon arrives before.
    #[must_use]
    pub fn until(&self) -> MonoNanos {
        match self.given_up {
            true => MonoNanos(0),
            false => self.last_heard.plus_ms(self.grace_ms),
        }
    }

    /// Milliseconds until the old primary's lease is certain to have ended; 0 if it has.
    #[must_use]
    pub fn remaining_ms(&self, now: MonoNanos) -> u64 {
        self.until().since_ns(now).div_ceil(1_000_000)
    }

    /// Whether the old primary's lease is certain to have ended.
    #[must_use]
    pub fn ended(&self, now: MonoNanos) -> bool {
        self.remaining_ms(now) == 0
    }
}

/// The reason why nothing of a group leaves for the sake of one of its writers, whatever C covers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(usize)]
pub enum HoldReason {
    /// The sites differ by writes that no stamp names: until the comparison has ended.
    Gap,
    /// Packets of an earlier process of the run have no stamp here: until C has what it left in the backlog on disk.
    LeftBacklog,
}

impl HoldReason {
    /// Every reason.
    pub const ALL: [Self; 2] = [Self::Gap, Self::LeftBacklog];
}

/// The reason why a gate is shut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ShutWhy {
    /// There was never a lease, or it has ended.
    NoLease,
    /// A writer's guest may have told what no stamp names.
    Held(HoldReason),
    /// The guest may know what P does not name: nothing of it leaves before every writer of the
    /// group has said how far it is.
    FloorUnknown,
    /// The backup has ended this primary's epoch: shut in every mode, for good.
    Fenced,
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn at_ms(ms: u64) -> MonoNanos {
        MonoNanos(ms * 1_000_000)
    }

    #[test]
    fn the_lease_runs_from_sending_and_ends_on_the_dot() {
        let mut lease = Lease::new(10_000);
        assert!(!lease.holds(at_ms(0)), "shut before the first answer");
        lease.renewed(at_ms(900), at_ms(100));
        assert!(lease.holds(at_ms(10_099)));
        assert!(!lease.holds(at_ms(10_100)));
        lease.renewed(at_ms(10_200), at_ms(50));
        assert!(!lease.holds(at_ms(10_200)), "an older answer does not shorten or revive");
        lease.renewed(at_ms(10_300), at_ms(99_999));
        assert!(!lease.holds(at_ms(10_300)), "a beacon from the future is not ours");
    }

    #[test]
    fn a_fenced_lease_never_comes_back() {
        let mut lease = Lease::new(10_000);
        lease.renewed(at_ms(1), at_ms(1));
        lease.fence();
        lease.renewed(at_ms(2), at_ms(2));
        assert!(!lease.holds(at_ms(3)));
    }

    proptest! {
        /// Rule 4: whatever the delays, the gate is shut when the backup may be recovered.
        #[test]
        fn the_lease_ends_before_the_grace(
            beacons in prop::collection::vec((0u64..3_000, 0u64..20_000, 0u64..20_000), 0..40),
            probe in 0u64..200_000,
        ) {
            let (lease_ms, grace_ms) = (10_000, 15_000);
            let mut lease = Lease::new(lease_ms);
            let mut grace = Grace::new(at_ms(0), grace_ms);
            let mut sent = 0;
            for (gap, there, back) in beacons {
                sent += gap;
                if sent + there <= probe {
                    grace.heard(at_ms(sent + there));
                    if sent + there + back <= probe {
                        lease.renewed(at_ms(sent + there + back), at_ms(sent));
                    }
                }
            }
            prop_assert!(!(lease.holds(at_ms(probe)) && grace.ended(at_ms(probe))));
        }

        /// The same with hosts that give their leases up, and runs of the daemon that come back: the words of a
        /// connection come in order, and what a run before had under way is not listened to.
        #[test]
        fn a_lease_that_was_given_up_holds_nowhere(
            runs in prop::collection::vec(
                (
                    prop::collection::vec((0u64..3_000, 0u64..9_000, 0u64..9_000), 0..10),
                    any::<bool>(),
                    0u64..9_000,
                ),
                1..4,
            ),
            probe in 0u64..100_000,
        ) {
            let (lease_ms, grace_ms) = (10_000, 15_000);
            // What comes to the backup: when, of which run, and what.
            let mut arrivals: Vec<(u64, usize, Word)> = Vec::new();
            let mut leases = Vec::new();
            let mut clock = 0;
            for (run, (beacons, gives_up, delay)) in runs.into_iter().enumerate() {
                let mut lease = Lease::new(lease_ms);
                let mut come = clock + delay;
                arrivals.push((come, run, Word::Attach));
                let mut sent = clock;
                for (gap, there, back) in beacons {
                    sent += gap;
                    come = come.max(sent + there);
                    arrivals.push((come, run, Word::Beacon));
                    if come + back <= probe {
                        lease.renewed(at_ms(come + back), at_ms(sent));
                    }
                }
                if gives_up {
                    sent += 1;
                    come = come.max(sent + delay);
                    arrivals.push((come, run, Word::GiveUp));
                    if sent <= probe {
                        lease.fence();
                    }
                }
                // The next run begins when this one is dead, whose gate is shut then.
                clock = sent + 1;
                if clock <= probe {
                    lease.fence();
                }
                leases.push(lease);
            }
            arrivals.sort_by_key(|(at, ..)| *at);
            let mut grace = Grace::new(at_ms(0), grace_ms);
            let mut attached = None;
            for (at, run, word) in arrivals.into_iter().filter(|(at, ..)| *at <= probe) {
                match word {
                    // An older run that comes late is refused.
                    Word::Attach if attached < Some(run) => {
                        attached = Some(run);
                        grace.take_up();
                    }
                    Word::Beacon if attached == Some(run) => grace.heard(at_ms(at)),
                    Word::GiveUp if attached == Some(run) => grace.give_up(),
                    _ => {}
                }
            }
            let holds = leases.iter().any(|lease| lease.holds(at_ms(probe)));
            prop_assert!(!(holds && grace.ended(at_ms(probe))));
        }
    }

    #[derive(Clone, Copy, Debug)]
    enum Word {
        Attach,
        Beacon,
        GiveUp,
    }
}
