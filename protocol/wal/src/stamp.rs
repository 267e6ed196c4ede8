//! Times of PostgreSQL.

use std::fmt;

/// Microseconds from 1970-01-01 to 2000-01-01, both 00:00 UTC.
const PG_EPOCH_UNIX_US: i64 = 946_684_800_000_000;

/// Microseconds since 2000-01-01 00:00 UTC, PostgreSQL's `timestamptz`. The least and the greatest number mean "before
/// everything" and "after everything".
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PgTimestamp(pub i64);

impl PgTimestamp {
    /// Nanoseconds since the Unix epoch. `None` of a time that this number does not reach: before 1677 and after 2262.
    #[must_use]
    pub fn unix_ns(self) -> Option<i64> {
        self.0.checked_add(PG_EPOCH_UNIX_US)?.checked_mul(1000)
    }

    /// The last microsecond that is not after this time in nanoseconds since the Unix epoch.
    #[must_use]
    pub fn from_unix_ns(ns: i64) -> PgTimestamp {
        PgTimestamp(ns.div_euclid(1000) - PG_EPOCH_UNIX_US)
    }
}

impl fmt::Display for PgTimestamp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} us after 2000-01-01 00:00 UTC", self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stamps_are_times_of_the_unix_epoch() {
        // `date -u -d '2026-11-30 13:46:46.123456' +%s%N`
        let ns = 1_796_046_406_123_456_000;
        let stamp = PgTimestamp::from_unix_ns(ns);
        // `SELECT extract(epoch FROM timestamptz '2026-11-30 13:46:46.123456Z' - '2000-01-01Z') * 1000000`
        assert_eq!(stamp, PgTimestamp(849_361_606_123_456));
        assert_eq!(stamp.unix_ns(), Some(ns));
        assert_eq!(PgTimestamp(0).unix_ns(), Some(946_684_800_000_000_000));
    }

    #[test]
    fn parts_of_a_microsecond_are_cut_off_towards_the_past() {
        assert_eq!(PgTimestamp::from_unix_ns(1999), PgTimestamp(1 - PG_EPOCH_UNIX_US));
        assert_eq!(PgTimestamp::from_unix_ns(-1), PgTimestamp(-1 - PG_EPOCH_UNIX_US));
    }

    #[test]
    fn stamps_out_of_reach_are_no_times() {
        for far in [i64::MIN, i64::MIN + 1, i64::MAX, i64::MAX - 1, i64::MAX / 1000] {
            assert_eq!(PgTimestamp(far).unix_ns(), None);
        }
        for ns in [i64::MIN, i64::MAX] {
            let back = PgTimestamp::from_unix_ns(ns).unix_ns();
            assert!(back.is_none_or(|back| back <= ns && ns - back < 1000));
        }
        assert_eq!(PgTimestamp::from_unix_ns(i64::MAX).unix_ns(), Some(i64::MAX / 1000 * 1000));
    }
}
