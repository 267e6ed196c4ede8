//! Belief in the server's stamps: the guard's verdicts and positions of the log in, stamps out.
//!
//! ```text
//!             verdict: believed        for `settle` without a break     position of the server's log
//!  Doubted ──────────────────────► Settling ───────────────────────► Settled ──────────► Trusted from there on
//!     ▲                               │                                │                    │
//!     └── verdict: not believed, no verdict for too long, a stamp that such a clock does not give ──┘
//! ```
//!
//! PostgreSQL has taken a stamp before its record comes here, so that a verdict says nothing of the record in hand
//! but what it says of the clock *then*. Records behind a position that the server has told while the clock was
//! believed were placed later than that. Their stamps were taken later, too, unless a commit took longer than
//! `settle` from its stamp to its place; such a stamp is older than the belief, and ends it.
//!
//! The stamp of a record in doubt is later than whatever a believed clock of the store can have said when it was
//! placed: the clock at the end of the doubt, its ε, and the greatest ε of any other host. `docs/shard-logs.md` has
//! the argument.

use crate::backlog::Stamp;
use std::time::Duration;
use tidelock_clock::{Verdict, Why};
use tidelock_pgstream::Now;
use tidelock_protocol::hlc::Hlc;
use tidelock_shard::stamp_at;
use tidelock_wal::{Lsn, PgTimestamp};

/// Reason for which stamps are not believed, though the clock may be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Doubt {
    /// Verdict missing, or too old.
    NoVerdict,
    /// The guard does not believe it.
    Clock(Why),
    /// The clock is believed, and not long enough.
    Settling,
    /// The server's stamp cannot be of the clock that is judged.
    Stamp { ahead_us: i64 },
    /// The log has stamps that the clock has not reached.
    LogAhead,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Trust {
    Doubted,
    Settling { since: Now },
    Trusted { since: Now, from: Lsn },
}

#[derive(Debug)]
pub(crate) struct Belief {
    settle: Duration,
    verdict_age_max: Duration,
    clock_error_max_ns: u64,
    verdict: Option<(Verdict, Now)>,
    trust: Trust,
    /// Stamp that ended the belief, by so much.
    odd_us: Option<i64>,
    /// True if the log's last stamp is beyond the clock.
    is_log_ahead: bool,
    /// Time at which the belief ended.
    doubted_since: Option<Duration>,
    /// Stamp of what was in doubt.
    through: Hlc,
}

impl Belief {
    pub fn new(settle: Duration, verdict_age_max: Duration, clock_error_max_ns: u64) -> Self {
        Self {
            settle,
            verdict_age_max,
            clock_error_max_ns,
            verdict: None,
            trust: Trust::Doubted,
            odd_us: None,
            is_log_ahead: false,
            doubted_since: None,
            through: Hlc::default(),
        }
    }

    pub fn judged(&mut self, verdict: Verdict, now: Now) {
        self.tick(now);
        let verdict = self.bounded(verdict);
        self.verdict = Some((verdict, now));
        match (verdict, self.trust) {
            (Verdict::NotBelieved { .. }, _) => self.doubt(now),
            (Verdict::Believed { .. }, Trust::Doubted) => {
                self.trust = Trust::Settling { since: now };
            }
            (Verdict::Believed { .. }, _) => {}
        }
    }

    /// The verdict by the store's own bound: a guard serves several stores, or none, as an operator's word does.
    fn bounded(&self, verdict: Verdict) -> Verdict {
        let max_ns = self.clock_error_max_ns;
        match verdict {
            Verdict::Believed { epsilon_ns } if epsilon_ns > max_ns => {
                Verdict::NotBelieved { why: Why::AboveMax { epsilon_ns, max_ns } }
            }
            other => other,
        }
    }

    /// Ends the belief if nobody has judged the clock for too long.
    pub fn tick(&mut self, now: Now) {
        let is_old = |at: Now| now.mono.saturating_sub(at.mono) > self.verdict_age_max;
        if self.verdict.is_none_or(|(_, at)| is_old(at)) {
            self.verdict = None;
            self.doubt(now);
        }
    }

    /// Another server, with another clock or another log.
    pub fn begin_anew(&mut self, now: Now) {
        self.doubt(now);
        self.odd_us = None;
        if self.epsilon_ns().is_some() {
            self.trust = Trust::Settling { since: now };
        }
    }

    fn doubt(&mut self, now: Now) {
        if self.trust != Trust::Doubted || self.doubted_since.is_none() {
            self.doubted_since = Some(now.mono);
        }
        self.trust = Trust::Doubted;
    }

    pub fn is_trusted(&self) -> bool {
        matches!(self.trust, Trust::Trusted { .. })
    }

    pub fn epsilon_ns(&self) -> Option<u64> {
        self.verdict.and_then(|(verdict, _)| verdict.epsilon_ns())
    }

    /// Time at which the clock has been believed for long enough. `None`: it is not, or nothing is waited for.
    pub fn settles_at(&self) -> Option<Duration> {
        match self.trust {
            Trust::Settling { since } => Some(since.mono + self.settle),
            Trust::Doubted | Trust::Trusted { .. } => None,
        }
    }

    /// The end of the server's log, which it was asked for at a time. Returns the stamp for all that was in doubt:
    /// later than the last one of the log, without which there is no order.
    pub fn placed(&mut self, end: Lsn, asked: Duration, last: Hlc, now: Now) -> Option<Hlc> {
        let Trust::Settling { since } = self.trust else { return None };
        let epsilon_ns = self.epsilon_ns()?;
        if asked < since.mono + self.settle {
            return None;
        }
        let later_ns = epsilon_ns.saturating_add(self.clock_error_max_ns);
        let latest = now.wall.unix_ns().unwrap_or(0).saturating_add_unsigned(later_ns);
        let through = stamp_at(u64::try_from(latest).unwrap_or(0)).next();
        self.is_log_ahead = last >= through;
        if self.is_log_ahead {
            return None;
        }
        self.trust = Trust::Trusted { since, from: end };
        (self.odd_us, self.doubted_since, self.through) = (None, None, through);
        Some(through)
    }

    /// Stamp of a record that ends at a position, and has this one of the server's. `None`: it was not read, and may
    /// be any up to now, so that a time of doubt begins.
    pub fn stamp(&mut self, end: Lsn, stamp: Option<PgTimestamp>, now: Now) -> Stamp {
        let Trust::Trusted { since, from } = self.trust else { return Stamp::Unknown };
        let Some(stamp) = stamp else {
            self.begin_anew(now);
            return Stamp::Unknown;
        };
        if end <= from {
            return Stamp::Doubted(self.through);
        }
        let error_us = i64::try_from(self.clock_error_max_ns.div_ceil(1000)).unwrap_or(i64::MAX);
        let error_us = error_us.saturating_mul(2);
        let ahead_us = stamp.0.saturating_sub(now.wall.0.saturating_add(error_us));
        let behind_us = since.wall.0.saturating_sub(error_us).saturating_sub(stamp.0);
        let unix_ns = stamp.unix_ns().and_then(|ns| u64::try_from(ns).ok());
        match unix_ns.filter(|_| ahead_us <= 0 && behind_us <= 0) {
            Some(ns) => Stamp::Taken(stamp_at(ns)),
            None => {
                self.odd_us =
                    Some(if ahead_us > 0 { ahead_us } else { behind_us.saturating_neg() });
                self.doubt(now);
                // The guard has to say again that it believes the clock.
                Stamp::Unknown
            }
        }
    }

    /// Reason for which no stamp is given out, and since when.
    pub fn doubted(&self) -> Option<(Doubt, Option<Duration>)> {
        let doubt = match (self.trust, self.verdict) {
            (Trust::Trusted { .. }, _) => return None,
            (_, None) => Doubt::NoVerdict,
            (_, Some((Verdict::NotBelieved { why }, _))) => Doubt::Clock(why),
            (_, Some((Verdict::Believed { .. }, _))) => match self.odd_us {
                Some(ahead_us) => Doubt::Stamp { ahead_us },
                None if self.is_log_ahead => Doubt::LogAhead,
                None => Doubt::Settling,
            },
        };
        Some((doubt, self.doubted_since))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SETTLE: Duration = Duration::from_secs(1);
    const EPSILON: Verdict = Verdict::Believed { epsilon_ns: 100_000 };
    const GONE: Verdict = Verdict::NotBelieved { why: Why::NoMaster };

    fn at(ms: u64) -> Now {
        Now { mono: Duration::from_millis(ms), wall: PgTimestamp(1_000_000_000 + ms as i64 * 1000) }
    }

    fn stamp(ms: u64) -> Option<PgTimestamp> {
        Some(at(ms).wall)
    }

    fn taken(ms: u64) -> Stamp {
        Stamp::Taken(stamp_at(at(ms).wall.unix_ns().unwrap() as u64))
    }

    fn belief() -> Belief {
        Belief::new(SETTLE, Duration::from_secs(5), 1_000_000)
    }

    /// Believed since 0, and trusted behind position 100 since 1.5 s.
    fn trusted() -> Belief {
        let mut belief = belief();
        belief.judged(EPSILON, at(0));
        assert_eq!(belief.placed(Lsn(90), at(999).mono, Hlc(0), at(1000)), None, "asked too early");
        let through = belief.placed(Lsn(100), at(1400).mono, Hlc(0), at(1500)).unwrap();
        // Beyond the clock by its ε and the greatest of another host.
        let latest = at(1500).wall.unix_ns().unwrap() as u64 + 1_100_000;
        assert_eq!(through, stamp_at(latest).next());
        belief
    }

    #[test]
    fn records_up_to_the_position_are_in_doubt_and_later_ones_have_their_own_stamp() {
        let mut belief = trusted();
        let through = belief.through;
        assert_eq!(belief.stamp(Lsn(100), stamp(1450), at(1600)), Stamp::Doubted(through));
        assert_eq!(belief.stamp(Lsn(101), stamp(1450), at(1600)), taken(1450));
        assert_eq!(belief.doubted(), None);
        assert_eq!(belief.stamp(Lsn(200), None, at(1600)), Stamp::Unknown);
        assert_eq!(belief.stamp(Lsn(201), stamp(1600), at(1600)), Stamp::Unknown);
        let later = belief.placed(Lsn(210), at(2600).mono, Hlc(0), at(2600)).unwrap();
        assert!(later > through);
    }

    #[test]
    fn without_belief_no_stamp_is_given_out_whatever_it_says() {
        let mut belief = trusted();
        belief.judged(GONE, at(2000));
        assert_eq!(belief.stamp(Lsn(200), stamp(1999), at(2001)), Stamp::Unknown);
        assert_eq!(belief.doubted(), Some((Doubt::Clock(Why::NoMaster), Some(at(2000).mono))));
        // Belief alone is not enough, nor is a short one.
        belief.judged(EPSILON, at(3000));
        assert_eq!(belief.stamp(Lsn(210), stamp(2999), at(3001)), Stamp::Unknown);
        belief.judged(GONE, at(3500));
        belief.judged(EPSILON, at(3600));
        assert_eq!(belief.placed(Lsn(300), at(4100).mono, Hlc(0), at(4200)), None);
        assert!(belief.placed(Lsn(300), at(4600).mono, Hlc(0), at(4700)).is_some());
        assert_eq!(belief.stamp(Lsn(301), stamp(4650), at(4700)), taken(4650));
    }

    #[test]
    fn a_clock_that_may_be_off_by_more_than_the_store_takes_is_not_believed() {
        let mut belief = trusted();
        belief.judged(Verdict::Believed { epsilon_ns: 1_000_000 }, at(2000));
        assert_eq!(belief.stamp(Lsn(200), stamp(2000), at(2000)), taken(2000));
        belief.judged(Verdict::Believed { epsilon_ns: 1_000_001 }, at(2100));
        assert_eq!(belief.stamp(Lsn(201), stamp(2100), at(2100)), Stamp::Unknown);
        assert_eq!(belief.epsilon_ns(), None);
        let why = Why::AboveMax { epsilon_ns: 1_000_001, max_ns: 1_000_000 };
        assert_eq!(belief.doubted().unwrap().0, Doubt::Clock(why));
    }

    #[test]
    fn a_guard_that_says_nothing_any_more_is_not_believed() {
        let mut belief = trusted();
        belief.judged(EPSILON, at(4000));
        belief.tick(at(9000));
        assert!(belief.is_trusted());
        belief.tick(at(9001));
        assert_eq!(belief.doubted(), Some((Doubt::NoVerdict, Some(at(9001).mono))));
        belief.judged(EPSILON, at(9002));
        assert_eq!(belief.stamp(Lsn(300), stamp(9002), at(9002)), Stamp::Unknown);
    }

    #[test]
    fn stamps_that_the_clock_cannot_have_given_end_the_belief() {
        // Up to twice the greatest error: two hosts.
        let odd_by = |limit_us: i64, by_us: i64| {
            let mut belief = trusted();
            let good = PgTimestamp(at(2000).wall.0 + limit_us);
            assert!(matches!(belief.stamp(Lsn(200), Some(good), at(2000)), Stamp::Taken(_)));
            let odd = PgTimestamp(good.0.saturating_add(by_us));
            assert_eq!(belief.stamp(Lsn(201), Some(odd), at(2000)), Stamp::Unknown);
            assert_eq!(belief.stamp(Lsn(202), stamp(2000), at(2000)), Stamp::Unknown);
            belief.doubted().unwrap().0
        };
        assert_eq!(odd_by(2000, 1), Doubt::Stamp { ahead_us: 1 });
        assert_eq!(odd_by(-2_002_000, -1), Doubt::Stamp { ahead_us: -1 });
        for far in [i64::MIN, i64::MAX] {
            assert!(matches!(odd_by(0, far), Doubt::Stamp { .. }));
        }
    }

    #[test]
    fn a_clock_that_is_behind_the_log_gives_no_stamps() {
        let mut belief = belief();
        belief.judged(EPSILON, at(0));
        let last = stamp_at(at(3000).wall.unix_ns().unwrap() as u64);
        assert_eq!(belief.placed(Lsn(100), at(1400).mono, last, at(1500)), None);
        assert_eq!(belief.doubted().unwrap().0, Doubt::LogAhead);
        assert!(belief.placed(Lsn(100), at(3100).mono, last, at(3100)).is_some());
    }
}
