//! Verifications of the host's writers: begun on command or by the schedule, and their ends put on record.
//!
//! What status says of one is on stable storage before it is said.

use super::{Host, HostGroup, MemberState, Writer};
use crate::clock;
use crate::control::{ControlError, ControlErrorKind, VerifyBegun, VerifyWish};
use crate::owner::{Phase, ToOwner, VerifyEnded};
use crate::status::VerifyStatus;
use crate::verified::Verified;
use std::sync::Mutex;
use std::time::Duration;
use tidelock_protocol::ids::MonoNanos;

/// How often their ends, and the schedule, are looked at.
const LOOK_EVERY: Duration = Duration::from_millis(250);
/// How long after one that was given up the schedule tries again.
const AGAIN_AFTER: Duration = Duration::from_secs(60);
/// How long a member that was never verified replicates before a schedule of longer spans begins: a start and an
/// initial copy have the disks for themselves.
const FIRST_AFTER: Duration = Duration::from_secs(3600);

/// The verifications of one writer in this run of the daemon.
#[derive(Debug, Default)]
pub(super) struct Verifications(Mutex<Past>);

#[derive(Clone, Debug, Default)]
struct Past {
    ended: u64,
    given_up: Option<String>,
    /// One was asked for, and has not ended.
    wanted: bool,
    scheduled_at: Option<MonoNanos>,
    replicates_since: Option<MonoNanos>,
}

impl Verifications {
    fn lock(&self) -> std::sync::MutexGuard<'_, Past> {
        self.0.lock().expect("no panic while held")
    }

    /// All but what runs and the schedule.
    pub(super) fn status(&self, state: &MemberState) -> VerifyStatus {
        let past = self.lock();
        let last = state.verified();
        VerifyStatus {
            age_ms: last.as_ref().map(age_ms),
            last,
            ended: past.ended,
            given_up: past.given_up.clone(),
            ..VerifyStatus::default()
        }
    }
}

impl Writer {
    /// Whether the sites are known to differ.
    pub(super) fn differs(&self) -> bool {
        self.state.verified().is_some_and(|verified| verified.differs())
    }

    /// Whether all is well between the sites. The link knows of a loss before the owner loop hears of it, and status
    /// says what the link knows.
    fn replicates(&self) -> bool {
        self.link_stats.is_attached() && self.view.phase() == Phase::Replicating
    }

    /// Asks the owner loop. Returns whether it was asked: one runs at a time.
    fn begin_verify(&self, group: &HostGroup, repair: bool) -> bool {
        let mut past = self.verifications.lock();
        if std::mem::replace(&mut past.wanted, true) {
            return false;
        }
        let rate_bytes_per_s = group.config.verify.rate.bytes_per_s;
        self.port.send(ToOwner::Verify { repair, rate_bytes_per_s });
        true
    }

    /// Puts on record how one has ended, if one has.
    fn note_verify(&self, name: &str) {
        let Some(ended) = self.view.take_verify_ended() else { return };
        let given_up = match ended {
            VerifyEnded::GivenUp(why) => Some(why),
            VerifyEnded::Whole(verified) => {
                say(name, &verified);
                let kept = self.state.keep_verified(verified);
                kept.err().map(|error| format!("its outcome cannot be kept: {error}"))
            }
        };
        if let Some(why) = &given_up {
            tracing::warn!(member = name, why, "a verification was given up");
        }
        let mut past = self.verifications.lock();
        *past = Past {
            ended: past.ended + 1,
            given_up,
            wanted: false,
            scheduled_at: past.scheduled_at,
            replicates_since: past.replicates_since,
        };
    }

    /// Whether the schedule begins one now.
    fn is_verify_due(&self, every: Duration, now: MonoNanos) -> bool {
        if !self.replicates() {
            return false;
        }
        let since_last = self.state.verified().map(|last| age_ms(&last)).map(Duration::from_millis);
        self.verifications.lock().is_begun_by_schedule(every, since_last, now)
    }
}

impl Past {
    /// Whether the schedule begins one now, which is noted. `since_last`: how long ago one has looked at everything.
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

/// How long ago it ended, by the wall clock.
fn age_ms(verified: &Verified) -> u64 {
    clock::wall_ms().saturating_sub(verified.ended_unix_ms)
}

/// In the log.
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

impl Host {
    /// Notes ends and begins what is due. Runs as long as the daemon does.
    pub(super) async fn follow_verifications(&self) {
        loop {
            tokio::time::sleep(LOOK_EVERY).await;
            self.writers().for_each(|(name, writer)| writer.note_verify(name));
            for group in &self.groups {
                let Some(every) = group.config.verify.every else { continue };
                for writer in group.members.iter().filter_map(|member| member.writer.as_ref()) {
                    if writer.is_verify_due(every, clock::mono_now()) {
                        writer.begin_verify(group, false);
                    }
                }
            }
        }
    }

    /// Begins or ends verifications on command.
    pub(super) fn verify(
        &self,
        group: &HostGroup,
        wish: &VerifyWish,
    ) -> Result<VerifyBegun, ControlError> {
        let refused = |text: String| ControlError::new(ControlErrorKind::Refused, text);
        let writers = || {
            let members = group.members.iter();
            members.filter_map(|m| Some((m.config.name.as_str(), m.writer.as_ref()?)))
        };
        let meant: Vec<_> = writers()
            .filter(|(name, _)| wish.member.as_ref().is_none_or(|member| member == name))
            .collect();
        if meant.is_empty() {
            let known: Vec<_> = writers().map(|(name, _)| name).collect();
            let text = match known.is_empty() {
                true => "no member of this group has protected disks on this host".to_owned(),
                false => format!(
                    "that is no member with disks on this host; those are: {}",
                    known.join(", ")
                ),
            };
            return Err(refused(text));
        }
        if wish.stop {
            meant.iter().for_each(|(_, writer)| {
                writer.port.send(ToOwner::StopVerify);
            });
            return Ok(VerifyBegun { members: Vec::new() });
        }
        for (name, writer) in &meant {
            if writer.verifications.lock().wanted {
                return Err(refused(format!(
                    "a verification of {name} runs already: `tidelock status` shows it, --stop ends it"
                )));
            }
            if !writer.replicates() {
                return Err(refused(format!(
                    "{name} does not replicate now (`tidelock status` says why): verify when it does"
                )));
            }
        }
        let begun = meant.iter().filter(|(_, writer)| writer.begin_verify(group, wish.repair));
        Ok(VerifyBegun { members: begun.map(|(name, _)| (*name).to_owned()).collect() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const EVERY: Duration = Duration::from_secs(600);

    fn at(s: u64) -> MonoNanos {
        MonoNanos(s * 1_000_000_000)
    }

    /// Whether the schedule begins one at this second, if the last one ended at that one.
    fn begins(past: &mut Past, last: Option<u64>, now: u64) -> bool {
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
        let mut past = Past::default();
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
        let (mut past, week) = (Past::default(), Duration::from_secs(7 * 86_400));
        assert!(!past.is_begun_by_schedule(week, None, at(1000)));
        assert!(!past.is_begun_by_schedule(week, None, at(4599)));
        assert!(past.is_begun_by_schedule(week, None, at(4600)));
    }

    #[test]
    fn one_that_was_given_up_is_begun_again_a_minute_later() {
        let mut past = Past::default();
        assert!(begins(&mut past, Some(1000), 1600));
        past.wanted = false;
        assert!(!begins(&mut past, Some(1000), 1659));
        assert!(begins(&mut past, Some(1000), 1660));
    }

    #[test]
    fn one_that_was_asked_for_counts() {
        let mut past = Past { wanted: true, ..Past::default() };
        assert!(!begins(&mut past, Some(1000), 1700), "it runs");
        past.wanted = false;
        assert!(!begins(&mut past, Some(1710), 1720), "it has ended");
        assert!(begins(&mut past, Some(1710), 2310));
    }
}
