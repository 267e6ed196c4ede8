//! Verifications of one writer ([`crate::owner`] compares): begun by the schedule or on command, and their ends put on
//! record. Sans-I/O.
//!
//! An outcome is on stable storage before status tells of it.

use crate::link::port::OwnerPort;
use crate::owner::{Clocks, OwnerView, Phase, ToOwner, VerifyEnded};
use crate::state::MemberState;
use crate::stats::LinkStats;
use crate::verified::Verified;
use std::time::Duration;
use tidelock_protocol::ids::MonoNanos;
use tidelock_storage::Storage;

/// Pause between two looks at ends and at the schedule.
pub const LOOK_EVERY: Duration = Duration::from_millis(250);
/// Pause of the schedule after a verification that was given up.
const AGAIN_AFTER: Duration = Duration::from_secs(60);
/// Time that a member that was never verified replicates before a schedule of longer spans begins: a start and an
/// initial copy have the disks for themselves.
const FIRST_AFTER: Duration = Duration::from_secs(3600);

/// The verifications of one writer in this run of the daemon.
#[derive(Clone, Debug, Default)]
pub struct Verifications {
    /// The number that have ended.
    pub ended: u64,
    /// The reason why the last one was given up, if it was.
    pub given_up: Option<String>,
    /// True if a verification was asked for and has not ended.
    wanted: bool,
    scheduled_at: Option<MonoNanos>,
    replicates_since: Option<MonoNanos>,
}

/// The schedule of a group.
#[derive(Clone, Copy, Debug)]
pub struct Plan {
    /// So long after one the next begins; `None`: on command alone.
    pub every: Option<Duration>,
    /// The most that is read; 0: no limit.
    pub rate_bytes_per_s: u64,
}

/// A writer, by what its loops publish.
#[derive(Debug)]
pub struct Writer<'a, S> {
    /// Its name.
    pub name: &'a str,
    /// Its owner loop.
    pub port: &'a OwnerPort<ToOwner>,
    /// The owner loop's own account.
    pub view: &'a OwnerView,
    /// The link's.
    pub link: &'a LinkStats,
    /// Its state.
    pub state: &'a MemberState<S>,
}

/// Reason why a verification is not begun on command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MayNot {
    /// Another one runs.
    Runs,
    /// The sites are not in step.
    DoesNotReplicate,
}

impl<S> Writer<'_, S> {
    /// True if all is well between the sites. The link knows of a loss before the owner loop hears of it, and status
    /// says what the link knows.
    fn replicates(&self) -> bool {
        self.link.is_attached() && self.view.phase() == Phase::Replicating
    }
}

impl Verifications {
    /// Refuses what cannot be begun on command.
    pub fn may_begin<S>(&self, writer: &Writer<'_, S>) -> Result<(), MayNot> {
        match () {
            () if self.wanted => Err(MayNot::Runs),
            () if !writer.replicates() => Err(MayNot::DoesNotReplicate),
            () => Ok(()),
        }
    }

    /// Asks the owner loop. Returns whether it was asked: one runs at a time.
    pub fn begin<S>(&mut self, writer: &Writer<'_, S>, repair: bool, plan: Plan) -> bool {
        if std::mem::replace(&mut self.wanted, true) {
            return false;
        }
        let rate_bytes_per_s = plan.rate_bytes_per_s;
        writer.port.send(ToOwner::Verify { repair, rate_bytes_per_s });
        true
    }

    /// Puts on record how one has ended, if one has, and begins the one that is due. Returns the outcome that is on record
    /// since.
    pub fn look<S: Storage>(
        &mut self,
        writer: &Writer<'_, S>,
        plan: Plan,
        clocks: Clocks,
    ) -> Option<Verified> {
        let ended = self.note_end(writer);
        if let Some(every) = plan.every.filter(|_| writer.replicates()) {
            let last = writer.state.verified();
            let since_last = last.map(|last| last.age(clocks.wall_ms));
            if self.is_begun_by_schedule(every, since_last, clocks.now) {
                self.begin(writer, false, plan);
            }
        }
        ended
    }

    fn note_end<S: Storage>(&mut self, writer: &Writer<'_, S>) -> Option<Verified> {
        let ended = writer.view.take_verify_ended()?;
        let kept = match ended {
            VerifyEnded::GivenUp(why) => Err(why),
            VerifyEnded::Whole(verified) => {
                say(writer.name, &verified);
                let kept = writer.state.keep_verified(verified.clone());
                kept.map(|()| verified)
                    .map_err(|error| format!("its outcome cannot be kept: {error}"))
            }
        };
        if let Err(why) = &kept {
            tracing::warn!(member = writer.name, why, "a verification was given up");
        }
        (self.ended, self.wanted) = (self.ended + 1, false);
        self.given_up = kept.as_ref().err().cloned();
        kept.ok()
    }

    /// True if the schedule begins a verification now, which is noted. `since_last`: the age of the last whole one.
    fn is_begun_by_schedule(
        &mut self,
        every: Duration,
        since_last: Option<Duration>,
        now: MonoNanos,
    ) -> bool {
        let began = *self.replicates_since.get_or_insert(now);
        let is_new = every > FIRST_AFTER && now.since_ns(began) < FIRST_AFTER.as_nanos() as u64;
        let is_due = since_last.map_or(!is_new, |since| since >= every);
        let is_rested = |at: MonoNanos| now.since_ns(at) >= AGAIN_AFTER.as_nanos() as u64;
        let begins = is_due && !self.wanted && self.scheduled_at.is_none_or(is_rested);
        if begins {
            self.scheduled_at = Some(now);
        }
        begins
    }
}

/// Logs the result.
fn say(member: &str, verified: &Verified) {
    let (compared_bytes, to_seq) = (verified.compared_bytes, verified.to_seq.0);
    if verified.differs() {
        let (differing_bytes, first) = (verified.differing_bytes, verified.first());
        tracing::error!(
            member,
            compared_bytes,
            differing_bytes,
            first,
            to_seq,
            "the backup's disks differ from the local ones"
        );
    } else if verified.unreadable_bytes > 0 {
        let unreadable_bytes = verified.unreadable_bytes;
        tracing::error!(member, unreadable_bytes, "the local disk could not be read: not verified");
    } else {
        let repaired_bytes = verified.repaired_bytes;
        tracing::info!(
            member,
            compared_bytes,
            repaired_bytes,
            to_seq,
            "verified: the backup's disks equal the local ones"
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const EVERY: Duration = Duration::from_secs(600);

    fn at(s: u64) -> MonoNanos {
        MonoNanos(s * 1_000_000_000)
    }

    /// True if the schedule begins a verification at this second after one that ended at `last`.
    fn begins(past: &mut Verifications, last: Option<u64>, now: u64) -> bool {
        let begins = past.is_begun_by_schedule(
            EVERY,
            last.map(|last| Duration::from_secs(now - last)),
            at(now),
        );
        past.wanted |= begins;
        begins
    }

    #[test]
    fn the_schedule_begins_one_after_the_other() {
        let mut past = Verifications::default();
        assert!(begins(&mut past, None, 1000), "at once, if there was none");
        assert!(!begins(&mut past, None, 5000), "not while it runs, however long that takes");
        let mut ended = 5001;
        for _ in 0..3 {
            past.wanted = false;
            assert!(!begins(&mut past, Some(ended), ended), "not at its end");
            assert!(!begins(&mut past, Some(ended), ended + 599));
            assert!(begins(&mut past, Some(ended), ended + 600), "and again");
            ended += 600 + 30;
        }
    }

    #[test]
    fn by_default_the_first_one_waits_for_an_hour_of_replication() {
        let (mut past, week) = (Verifications::default(), Duration::from_secs(7 * 86_400));
        assert!(!past.is_begun_by_schedule(week, None, at(1000)));
        assert!(!past.is_begun_by_schedule(week, None, at(4599)));
        assert!(past.is_begun_by_schedule(week, None, at(4600)));
    }

    #[test]
    fn one_that_was_given_up_is_begun_again_a_minute_later() {
        let mut past = Verifications::default();
        assert!(begins(&mut past, Some(1000), 1600));
        past.wanted = false;
        assert!(!begins(&mut past, Some(1000), 1659));
        assert!(begins(&mut past, Some(1000), 1660));
    }

    #[test]
    fn one_that_was_asked_for_counts() {
        let mut past = Verifications { wanted: true, ..Verifications::default() };
        assert!(!begins(&mut past, Some(1000), 1700), "it runs");
        past.wanted = false;
        assert!(!begins(&mut past, Some(1710), 1720), "it has ended");
        assert!(begins(&mut past, Some(1710), 2310));
    }
}
