//! The driver of the host's verifications ([`tidelock_daemon_core::verifications`]): a look at all writers now and then, and commands.

use super::{Host, HostGroup, Writer};
use crate::clock;
use crate::control::{ControlError, ControlErrorKind, VerifyBegun, VerifyWish};
use std::sync::MutexGuard;
use tidelock_daemon_core::owner::{Clocks, ToOwner};
use tidelock_daemon_core::verifications::{self, LOOK_EVERY, MayNot, Plan, Verifications};
use tidelock_storage::files::Files;

fn plan_of(group: &HostGroup) -> Plan {
    let verify = &group.config.verify;
    Plan { every: verify.every, rate_bytes_per_s: verify.rate.bytes_per_s }
}

impl Writer {
    pub(super) fn verifications(&self) -> MutexGuard<'_, Verifications> {
        self.verifications.lock().expect("no panic while held")
    }

    fn verified<'a>(&'a self, name: &'a str) -> verifications::Writer<'a, Files> {
        let Self { port, view, link_stats: link, state, .. } = self;
        verifications::Writer { name, port, view, link, state }
    }
}

impl Host {
    /// Notes ends and begins what is due. Runs as long as the daemon does.
    pub(super) async fn follow_verifications(&self) {
        loop {
            tokio::time::sleep(LOOK_EVERY).await;
            let clocks = Clocks { now: clock::mono_now(), wall_ms: clock::wall_ms() };
            for group in &self.groups {
                for member in &group.members {
                    let Some(writer) = &member.writer else { continue };
                    let (name, plan) = (member.config.name.as_str(), plan_of(group));
                    writer.verifications().look(&writer.verified(name), plan, clocks);
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
            let text = match writer.verifications().may_begin(&writer.verified(name)) {
                Ok(()) => continue,
                Err(MayNot::Runs) => format!(
                    "a verification of {name} runs already: `tidelock status` shows it, --stop ends it"
                ),
                Err(MayNot::DoesNotReplicate) => format!(
                    "{name} does not replicate now (`tidelock status` says why): verify when it does"
                ),
            };
            return Err(refused(text));
        }
        let plan = plan_of(group);
        let begun = meant.iter().filter(|(name, writer)| {
            writer.verifications().begin(&writer.verified(name), wish.repair, plan)
        });
        Ok(VerifyBegun { members: begun.map(|(name, _)| (*name).to_owned()).collect() })
    }
}
