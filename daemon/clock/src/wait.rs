//! Stamps of a clock with a known bound, and commit wait (Spanner's rule).
//!
//! The clock shows `now`, and the true time is in `now - ε ..= now + ε`. A write is stamped with the upper end,
//! [`latest`], and its reply leaves when the lower end has passed the stamp, [`has_passed`].
//!
//! **Order.** Let a client hear of write A before it asks for write B, on any host. When A's reply left, the true time
//! was later than A's stamp, because the lower end of A's clock was. B is stamped afterwards, with the upper end of
//! B's clock, which is no earlier than the true time. So B's stamp is greater than A's, by whatever the two clocks are
//! wrong within their bounds. "True time" is that of the grandmaster: both hosts must follow the same one, or ones
//! whose own error is part of ε.
//!
//! **Cost.** A write that is stamped with ε and acknowledged with the same ε waits for 2ε from its stamp on. Waiting
//! and replicating run at the same time, so a replication that takes longer than 2ε hides it.
//!
//! The functions are pure; take `now` and ε from the same [verdict](crate::guard::ClockGuard::verdict). A store whose
//! stamps are coarser than nanoseconds rounds them *up*.

/// The time by which to stamp: nothing that was acknowledged before has a greater stamp.
#[must_use]
pub fn latest(now_ns: i64, epsilon_ns: u64) -> i64 {
    now_ns.saturating_add_unsigned(epsilon_ns)
}

/// The lower end of what the true time may be.
#[must_use]
pub fn earliest(now_ns: i64, epsilon_ns: u64) -> i64 {
    now_ns.saturating_sub_unsigned(epsilon_ns)
}

/// True if the true time is certainly later than the stamp.
#[must_use]
pub fn has_passed(stamp_ns: i64, now_ns: i64, epsilon_ns: u64) -> bool {
    earliest(now_ns, epsilon_ns) > stamp_ns
}

/// A reply that waits until its stamp has passed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct CommitWait {
    /// Stamp of the write that is acknowledged.
    pub stamp_ns: i64,
}

impl CommitWait {
    /// Time that the wall clock must show at least, with this ε, for the reply to leave.
    #[must_use]
    pub fn until_ns(&self, epsilon_ns: u64) -> i64 {
        self.stamp_ns.saturating_add_unsigned(epsilon_ns).saturating_add(1)
    }

    /// Nanoseconds still to wait; `None`: the reply may leave. ε may have changed when they are over: ask again.
    #[must_use]
    pub fn left_ns(&self, now_ns: i64, epsilon_ns: u64) -> Option<u64> {
        if has_passed(self.stamp_ns, now_ns, epsilon_ns) {
            return None;
        }
        let left = i128::from(self.until_ns(epsilon_ns)) - i128::from(now_ns);
        Some(u64::try_from(left).unwrap_or(u64::MAX).max(1))
    }
}
