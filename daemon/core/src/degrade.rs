//! When a group goes on without the backup, and how it comes back (`when_unreachable` of a group).
//!
//! With the policy `async after T` no reply waits for the backup longer than about T: then the gate
//! opens, as in mode async, and the group is *degraded*. Sans-I/O: the caller looks at the gate and at
//! C a few times a second and says what it sees, with the time ([`Degrade::look`]); it is told what to do.
//!
//! ```text
//!                               lag ≤ T/2, round trip < T, for the calm
//!            lag ≥ T                                                        C covers P as it was
//!  holding ─────────► degraded ─────────────────────────────► returning ─────────────────────────► holding
//!                        ▲                                        │         when the gate held again
//!                        └──────────────── lag ≥ T ───────────────┘
//! ```
//!
//! *Lag* is how long something has waited: the age of the oldest look whose P is not covered by C under a
//! lease, outside a resync. So it is the same measure for a link that is cut, a backup that stands still
//! and a link that is slower than the guests write, and in a group of several members it counts what
//! others have to send, too. While the gate is open a group may have nothing to send, and a link that others
//! have filled says nothing of itself: so the last round trip must be below T as well.
//!
//! Invariants:
//! - Between the moment that the gate may open and the moment that C covers everything that left until
//!   it held again, the group is not [`Standing::Holding`], so nothing calls it protected (rule 6).
//! - It opens only when the backup has the policy on stable storage ([`Sight::may_open`]): `recover`
//!   knows that the lease is no fence here.
//! - What is opened before the backup was reached ([`Degrade::open_unreached`]) holds again only when the backup's
//!   disks are whole: no stamp names what was written meanwhile, the comparison brings it.
//! - Mode async, wanted by the operator, is not in force as long as the backup may count a writer here as gone with all
//!   that it ever wrote ([`Degrade::await_contact`]): it would ask it for no floor, and a recovery would name nobody.
//! - It comes back whenever the lag stays small (rule 8), and does not oscillate: the calm is
//!   [`CALM`] × T, doubled (up to 2^[`STRIKES_MAX`] times) by each degrade that comes soon after a return.
//!   In any span S a group degrades at most [`STRIKES_MAX`] + 1 + S / ([`STEADY`] × [`CALM`] × T) times.
//!
//! DRBD's pull-ahead has no such rule, and can go ahead and behind for ever on a link that is a little
//! too slow (LINBIT/drbd, issue 46).

#[cfg(test)]
mod tests;

use tidelock_planted::Bug;
use tidelock_protocol::hlc::Hlc;
use tidelock_protocol::ids::MonoNanos;
use tidelock_protocol::message::{Form, Mode, Policy};
use tidelock_protocol::vector::CountVector;

/// The lag is small when it is at most T divided by this.
pub const LEVEL: u64 = 2;
/// It must be small for so many T. With [`LEVEL`] that is four round trips or more.
pub const CALM: u64 = 2;
/// How often the calm is doubled at most.
pub const STRIKES_MAX: u32 = 5;
/// A group that has held for so many of its calms after a return has come back for good: the next calm is
/// the shortest again.
pub const STEADY: u64 = 16;

/// P of each member on this host: by vector, and the greatest time.
pub type Stamps = Vec<(CountVector, Hlc)>;

/// What is seen of a group at one moment.
#[derive(Clone, Debug)]
pub struct Sight {
    /// The clock that never steps.
    pub now: MonoNanos,
    /// The wall clock, in milliseconds since the Unix epoch.
    pub unix_ms: u64,
    /// The backup keeps the policy, and the group is not fenced.
    pub may_open: bool,
    /// There is a lease, and no resync.
    pub is_open: bool,
    /// Neither an initial copy nor a resync is to come or under way.
    pub is_whole: bool,
    /// Each member's P names all that its guest may know. Of no meaning while it is degraded.
    pub is_complete: bool,
    /// The gate does what it was told last.
    pub is_applied: bool,
    /// What packets wait for.
    pub form: Form,
    /// The age of the oldest guest's write that is not durable at the backup. In mode sync P does not name
    /// it before it is.
    pub write_age_ns: u64,
    /// What the last question to the backup took until it was answered; 0: not known.
    pub round_trip_ns: u64,
    /// P of the members.
    pub pending: Stamps,
    /// C.
    pub committed: CountVector,
    /// What every writer has committed, by time.
    pub watermark: Hlc,
}

impl Sight {
    /// True if C covers these stamps.
    pub(crate) fn covers(&self, stamps: &Stamps) -> bool {
        stamps.iter().all(|(p, hlc)| match self.form {
            Form::Vector => self.committed.covers(p),
            Form::Hlc => self.watermark >= *hlc,
        })
    }
}

/// What the caller must do now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// Put on record that the group is degraded since then, and open the gate.
    Open {
        /// By the wall clock, in milliseconds since the Unix epoch.
        since_unix_ms: u64,
    },
    /// Hold again what is not covered. The group stays degraded for whoever asks.
    Hold,
    /// All that left meanwhile is covered: it is over.
    Covered,
}

/// How a group stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Standing {
    /// The mode that the operator wants is in force, and keeps its promise.
    Holding,
    /// The gate is open.
    Degraded {
        /// Since then clients may have seen what a disaster would undo.
        since_unix_ms: u64,
    },
    /// The gate holds again, and C does not cover yet what has left.
    Returning {
        /// As before.
        since_unix_ms: u64,
    },
}

impl Standing {
    /// Since when clients may have seen what a disaster would undo, by the wall clock.
    #[must_use]
    pub fn since_unix_ms(self) -> Option<u64> {
        match self {
            Self::Holding => None,
            Self::Degraded { since_unix_ms } | Self::Returning { since_unix_ms } => {
                Some(since_unix_ms)
            }
        }
    }
}

/// Whether a group goes on without the backup.
#[derive(Debug)]
pub struct Degrade {
    after_ns: Option<u64>,
    standing: Standing,
    /// P at the oldest look that is not covered, and when that was.
    probe: Option<(Stamps, MonoNanos)>,
    /// While it is degraded: since when the lag is small.
    calm_since: Option<MonoNanos>,
    /// P when the gate held again.
    externalised: Option<Stamps>,
    returned_at: Option<MonoNanos>,
    strikes: u32,
    /// It was opened before the backup was reached in this run.
    unreached: bool,
    /// So it was, or may have been in a run before: what has left is covered by no C before the disks are whole.
    needs_whole: bool,
    /// The backup may count a writer here as gone.
    awaits_contact: bool,
}

impl Degrade {
    /// A group with this policy, in milliseconds (`None`: it always holds). `since_unix_ms`: an earlier
    /// run has put on record that it was degraded, and not that this was over.
    #[must_use]
    pub fn new(after_ms: Option<u64>, since_unix_ms: Option<u64>) -> Self {
        Self {
            after_ns: after_ms.map(|ms| ms * 1_000_000),
            standing: since_unix_ms
                .map_or(Standing::Holding, |since_unix_ms| Standing::Returning { since_unix_ms }),
            probe: None,
            calm_since: None,
            externalised: None,
            returned_at: None,
            strikes: 0,
            unreached: false,
            needs_whole: since_unix_ms.is_some(),
            awaits_contact: false,
        }
    }

    /// How it stands.
    #[must_use]
    pub fn standing(&self) -> Standing {
        self.standing
    }

    /// A run before may have left with everything at the backup: it counts a writer as gone that is here again.
    pub fn await_contact(&mut self) {
        self.awaits_contact = true;
    }

    /// The backup knows better by now, or there is nobody who counts on it. Once and for all in this run.
    pub fn has_contact(&mut self) {
        self.awaits_contact = false;
    }

    /// Whether mode async is not in force although it is wanted, and why: see [`await_contact`](Self::await_contact).
    #[must_use]
    pub fn awaits_contact(&self) -> bool {
        self.awaits_contact
    }

    /// Opens the gate before the backup was reached in this run. That it may is for the caller to see to.
    pub fn open_unreached(&mut self, unix_ms: u64) -> Step {
        let since_unix_ms = self.since_unix_ms().unwrap_or(unix_ms);
        self.standing = Standing::Degraded { since_unix_ms };
        (self.calm_since, self.externalised) = (None, None);
        (self.unreached, self.needs_whole) = (true, true);
        Step::Open { since_unix_ms }
    }

    /// Whether what has left since [`open_unreached`](Self::open_unreached) is not all at the backup.
    #[must_use]
    pub fn is_unreached(&self) -> bool {
        self.unreached && self.standing != Standing::Holding
    }

    /// Since when clients may have seen what a disaster would undo, by the wall clock.
    #[must_use]
    pub fn since_unix_ms(&self) -> Option<u64> {
        self.standing.since_unix_ms()
    }

    /// The mode in force where the operator wants this one.
    #[must_use]
    pub fn mode(&self, wanted: Mode) -> Mode {
        match self.standing {
            Standing::Degraded { .. } => Mode::Async,
            _ if self.awaits_contact && wanted == Mode::Async => Mode::Pipelined,
            _ => wanted,
        }
    }

    /// What the backup is told: also what is in force only when it has heard of it.
    #[must_use]
    pub fn policy(&self, wanted: Mode) -> Policy {
        let is_degraded = matches!(self.standing, Standing::Degraded { .. });
        Policy {
            mode: if is_degraded { Mode::Async } else { wanted },
            after_ms: self.after_ns.map(|ns| ns / 1_000_000),
            degraded_since_unix_ms: self.since_unix_ms(),
        }
    }

    /// Whether what has left keeps the group from being switched over, where the operator wants this mode. In mode async
    /// nothing is held that could tell when C covers it: that the group is drained must do.
    #[must_use]
    pub fn hinders_switch(&self, wanted: Mode) -> bool {
        match self.standing {
            Standing::Holding => false,
            Standing::Degraded { .. } => true,
            Standing::Returning { .. } => wanted != Mode::Async,
        }
    }

    /// For how long the lag must be small before the gate holds again.
    #[must_use]
    pub fn calm_ns(&self) -> u64 {
        self.after_ns.unwrap_or(0).saturating_mul(CALM << self.strikes)
    }

    /// One look. It is to be called several times in each T.
    pub fn look(&mut self, sight: &Sight) -> Option<Step> {
        let is_degraded = matches!(self.standing, Standing::Degraded { .. });
        let is_open = sight.is_open && (is_degraded || sight.is_complete);
        let is_whole = sight.is_whole || !self.needs_whole;
        let lag_ns = self.lag_ns(sight, is_open).max(sight.write_age_ns);
        match self.standing {
            Standing::Holding => self.open_if(sight, lag_ns, sight.unix_ms),
            Standing::Degraded { since_unix_ms } => self.hold_if(sight, lag_ns, since_unix_ms),
            Standing::Returning { since_unix_ms } => {
                if self.externalised.is_none() && sight.is_complete && sight.is_applied {
                    self.externalised = Some(sight.pending.clone());
                }
                let is_covered = self.externalised.as_ref().is_some_and(|p| sight.covers(p));
                let is_over = is_open && is_covered || tidelock_planted::is(Bug::OverBeforeCovered);
                if is_over && is_whole {
                    self.standing = Standing::Holding;
                    self.externalised = None;
                    (self.unreached, self.needs_whole) = (false, false);
                    return Some(Step::Covered);
                }
                self.open_if(sight, lag_ns, since_unix_ms)
            }
        }
    }

    /// Whether [`look`](Self::look) may answer [`Step::Open`] to this.
    #[must_use]
    pub fn is_about_to_open(&self, sight: &Sight) -> bool {
        let is_open = sight.is_open && sight.is_complete;
        let lag_ns = match &self.probe {
            Some((stamps, at)) if !(is_open && sight.covers(stamps)) => sight.now.since_ns(*at),
            _ => 0,
        };
        let is_late =
            self.after_ns.is_some_and(|after_ns| lag_ns.max(sight.write_age_ns) >= after_ns);
        sight.may_open && is_late && !matches!(self.standing, Standing::Degraded { .. })
    }

    fn lag_ns(&mut self, sight: &Sight, is_open: bool) -> u64 {
        let is_covered = match &self.probe {
            Some((stamps, _)) => is_open && sight.covers(stamps),
            None => true,
        };
        if is_covered {
            self.probe = Some((sight.pending.clone(), sight.now));
        }
        self.probe.as_ref().map_or(0, |(_, at)| sight.now.since_ns(*at))
    }

    fn open_if(&mut self, sight: &Sight, lag_ns: u64, since_unix_ms: u64) -> Option<Step> {
        let after_ns = self.after_ns.filter(|after_ns| lag_ns >= *after_ns)?;
        if !sight.may_open {
            return None;
        }
        if let Some(returned_at) = self.returned_at {
            let held_ns = sight.now.since_ns(returned_at);
            let is_steady = held_ns >= self.calm_ns().saturating_mul(STEADY);
            self.strikes = if is_steady { 0 } else { (self.strikes + 1).min(STRIKES_MAX) };
        }
        debug_assert!(after_ns > 0, "no time at all is refused where it is read");
        self.standing = Standing::Degraded { since_unix_ms };
        (self.calm_since, self.externalised) = (None, None);
        Some(Step::Open { since_unix_ms })
    }

    fn hold_if(&mut self, sight: &Sight, lag_ns: u64, since_unix_ms: u64) -> Option<Step> {
        // Who returns has questions of its own to the backup, and packets wait for the answers.
        let is_small = self
            .after_ns
            .is_none_or(|after_ns| lag_ns <= after_ns / LEVEL && sight.round_trip_ns < after_ns);
        let is_small = is_small && (!tidelock_planted::is(Bug::OnlyWhenIdle) || lag_ns == 0);
        let is_whole = sight.is_whole || !self.needs_whole;
        let is_level = sight.is_open && is_whole && is_small;
        if !is_level {
            self.calm_since = None;
        }
        let since = is_level.then(|| *self.calm_since.get_or_insert(sight.now));
        let is_calm = since.is_some_and(|since| sight.now.since_ns(since) >= self.calm_ns());
        let is_calm = is_calm || tidelock_planted::is(Bug::NoCalm);
        if !is_calm {
            return None;
        }
        self.standing = Standing::Returning { since_unix_ms };
        self.returned_at = Some(sight.now);
        // From now on packets wait: what they wait for counts from now on.
        self.probe = None;
        Some(Step::Hold)
    }
}

/// How a gate begins where this is configured. Mode async is in force when it may be, which is not known yet.
#[must_use]
pub fn mode_at_start(configured: Mode) -> Mode {
    match configured {
        Mode::Async => Mode::Pipelined,
        other => other,
    }
}
