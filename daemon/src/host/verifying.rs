//! Verifications of the host's writers: begun on command or by the schedule, and their ends put on record.
//!
//! What status says of one is on stable storage before it is said.

use super::{Host, HostGroup, Writer};
use crate::clock;
use crate::control::{ControlError, ControlErrorKind, VerifyBegun, VerifyWish};
use crate::owner::{Phase, ToOwner, VerifyEnded};
use crate::state::MemberState;
use crate::status::VerifyStatus;
use crate::verified::Verified;
use std::sync::Mutex;
use std::time::Duration;
use tidelock_protocol::ids::MonoNanos;

/// How often their ends, and the schedule, are looked at.
const LOOK_EVERY: Duration = Duration::from_millis(250);
/// How long after one that was given up the schedule tries again.
const AGAIN_AFTER: Duration = Duration::from_secs(60);

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
}

impl Verifications {
    fn lock(&self) -> std::sync::MutexGuard<'_, Past> {
        self.0.lock().expect("no panic while held")
    }

    /// All but what runs and the schedule.
    pub(super) fn status(&self, state: &MemberState) -> VerifyStatus {
        let past = self.lock();
        VerifyStatus {
            last: state.verified(),
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
        };
    }

    /// Whether the schedule begins one now.
    fn is_verify_due(&self, every: Duration, now: MonoNanos) -> bool {
        if self.view.phase() != Phase::Replicating {
            return false;
        }
        let since_ms = |at_ms: u64| clock::wall_ms().saturating_sub(at_ms);
        let last = self.state.verified();
        let is_due =
            last.is_none_or(|last| since_ms(last.ended_unix_ms) >= every.as_millis() as u64);
        let mut past = self.verifications.lock();
        let is_rested = |at: MonoNanos| now.since_ns(at) >= AGAIN_AFTER.as_nanos() as u64;
        let begins = is_due && !past.wanted && past.scheduled_at.is_none_or(is_rested);
        if begins {
            past.scheduled_at = Some(now);
        }
        begins
    }
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
            if writer.view.phase() != Phase::Replicating {
                return Err(refused(format!(
                    "{name} does not replicate now (`tidelock status` says why): verify when it does"
                )));
            }
        }
        let begun = meant.iter().filter(|(_, writer)| writer.begin_verify(group, wish.repair));
        Ok(VerifyBegun { members: begun.map(|(name, _)| (*name).to_owned()).collect() })
    }
}
