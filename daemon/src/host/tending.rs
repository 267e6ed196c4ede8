//! What the daemon looks after while its loops run.

use super::{Host, HostMember};
use crate::config::{self, Security};
use std::sync::{Arc, TryLockError};
use std::time::{Duration, SystemTime};
use tidelock_daemon_core::ceiling;
use tidelock_daemon_core::link::port::ToLink;
use tidelock_daemon_core::state::StateError;
use tidelock_netfilter::gate::Gate;

/// How often ceilings are looked at if no owner waits for one.
const LOOK_EVERY: Duration = Duration::from_millis(ceiling::LOOK_EVERY_MS);
/// How often members' interfaces are looked at.
const INTERFACES_LOOK_EVERY: Duration = Duration::from_millis(250);

impl Host {
    /// Follows the link and every group, and logs what changes. Runs as long as the daemon does.
    pub async fn watch(self: Arc<Self>) {
        tokio::join!(
            self.link_history.follow(self.link_state.clone()),
            self.monitor(),
            self.keep_ceilings(),
            self.follow_interfaces(),
            self.follow_policies(),
            self.follow_verifications(),
            self.follow_switches(),
            self.follow_libvirt(),
            self.watch_certificate()
        );
    }

    /// Keeps what is on record of each writer's times ahead of those that it gives out.
    async fn keep_ceilings(&self) {
        let mut failed: Option<StateError> = None;
        loop {
            let had_failed = failed.take().is_some();
            for (_, writer) in self.writers() {
                match writer.state.keep_ceiling(&writer.owner_stats, &writer.view) {
                    Ok(true) => writer.port.wake(),
                    Ok(false) => {}
                    Err(error) => failed = Some(error),
                }
            }
            match &failed {
                Some(error) if !had_failed => tracing::error!(
                    %error,
                    "times cannot be put on record and no longer follow the clock; guests' writes wait where they must \
                     come after what others have said: make room, or mend the disk of the state directory"
                ),
                None if had_failed => tracing::info!("times are put on record again"),
                _ => {}
            }
            tokio::select! {
                () = tokio::time::sleep(LOOK_EVERY) => {}
                // What cannot be written now is tried again with the next look.
                () = self.ceiling_wanted.notified(), if failed.is_none() => {}
            }
        }
    }

    /// Takes in members' interfaces that were made anew. Until then the rules cut them off.
    async fn follow_interfaces(&self) {
        loop {
            tokio::time::sleep(INTERFACES_LOOK_EVERY).await;
            let mut gate = match self.gate.try_lock() {
                Ok(gate) => gate,
                // Most likely its rules are looked at. That runs tools: not to be waited for here.
                Err(TryLockError::WouldBlock) => continue,
                Err(TryLockError::Poisoned(e)) => panic!("no panic while held: {e}"),
            };
            let incomplete = gate.as_mut().map(Gate::follow_interfaces).unwrap_or_default();
            let members = self.groups.iter().flat_map(|group| &group.members);
            for member in members.filter(|m| incomplete.iter().any(|n| n == m.config.name.as_str()))
            {
                self.ask_floor(member, false);
            }
        }
    }

    /// It is not known what the member's guest has heard.
    pub(super) fn ask_floor(&self, member: &HostMember, everyone: bool) {
        if let Some(link) = &*self.link.lock().expect("no panic while held") {
            // A link that has ended has nobody to ask; the member is held.
            let _ = link.send((member.channel, ToLink::AskFloor { everyone }));
        }
    }

    /// Warns in time of a certificate that ends: now, and once a day.
    async fn watch_certificate(&self) {
        let Security::Tls { files, .. } = &self.config.backup.security else { return };
        loop {
            // What is wrong with the files is said by each attempt to connect.
            if let Ok(credentials) = files.load()
                && let Some(text) =
                    config::certificate_warning(credentials.valid_for(SystemTime::now()))
            {
                tracing::warn!("{text}");
            }
            tokio::time::sleep(Duration::from_secs(86_400)).await;
        }
    }
}
