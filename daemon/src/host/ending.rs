//! The clean end of the whole daemon.

use super::{Host, HostError, HostGroup};
use crate::owner::{Drained, Phase, ToOwner};
use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};
use tidelock_netfilter::gate::{RulesAtStop, RulesLeft};
use tidelock_protocol::message::Form;
use tokio::sync::oneshot;

/// How long a clean stop waits for the backup.
pub const DRAIN_TIMEOUT: Duration = Duration::from_secs(30);
/// How long a clean stop waits for the link to say goodbye.
const GOODBYE_TIMEOUT: Duration = Duration::from_secs(2);

impl Host {
    /// Ends cleanly: no new requests, everything to the backup, rules removed where that is safe.
    /// What could not be finished within the timeout is said, and left fail-closed.
    pub async fn stop(&self) -> Result<(), HostError> {
        self.stopping.store(true, Ordering::SeqCst);
        let until = Instant::now() + DRAIN_TIMEOUT;
        let mut drains = Vec::new();
        // Of groups whose packets could tell what the backup does not have.
        let mut stay_shut = HashSet::new();
        for group in &self.groups {
            let writers = || group.members.iter().filter_map(|m| Some((m, m.writer.as_ref()?)));
            // With times what one holds waits for all the others.
            let together = Arc::new(AtomicUsize::new(writers().count()));
            for (member, writer) in writers() {
                let (reply, drained) = oneshot::channel();
                let not_ready = match group.config.form {
                    Form::Hlc => together.clone(),
                    Form::Vector => Arc::new(AtomicUsize::new(1)),
                };
                writer.port.send(ToOwner::Drain(reply, not_ready));
                drains.push((group, member.config.name.as_str(), writer, drained));
            }
        }
        for (group, name, writer, drained) in drains {
            let left = until.saturating_duration_since(Instant::now());
            match tokio::time::timeout(left, drained).await {
                Ok(Ok(Drained { seq, hlc, whole })) => {
                    if whole {
                        writer.state.ended_cleanly(seq, hlc)?;
                    }
                    // The backup has not all that clients may be told from now on.
                    let phase = writer.view.phase();
                    if matches!(phase, Phase::Unrecorded | Phase::Overflowed | Phase::Fenced) {
                        stay_shut.extend(group.member_names());
                    }
                    tracing::info!(member = name, %seq, clean = whole, "drained");
                }
                _ => {
                    stay_shut.extend(group.member_names());
                    writer.port.send(ToOwner::Stop);
                    tracing::warn!(
                        member = name,
                        lag_writes = writer.lag_writes(),
                        "the backup did not take everything in time: packets stay held, and the \
                         next start compares the sites"
                    );
                }
            }
        }
        self.stop_gate(&stay_shut)?;
        drop(self.link.lock().expect("no panic while held").take());
        // The owner loops are gone; the link says goodbye and ends.
        let until = Instant::now() + GOODBYE_TIMEOUT;
        while self.link_is_running() && Instant::now() < until {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        for socket in self.groups.iter().flat_map(|g| &g.members).filter_map(|m| m.writer.as_ref())
        {
            for path in &socket.sockets {
                // Gone is as good.
                let _ = std::fs::remove_file(path);
            }
        }
        Ok(())
    }

    fn link_is_running(&self) -> bool {
        let thread = self.link_thread.lock().expect("no panic while held");
        thread.as_ref().is_some_and(|thread| !thread.is_finished())
    }

    fn stop_gate(&self, stay_shut: &HashSet<&str>) -> Result<(), HostError> {
        let Some(gate) = self.gate.lock().expect("no panic while held").take() else {
            return Ok(());
        };
        let rules = |member: &str| match stay_shut.contains(member) {
            true => RulesAtStop::Leave,
            false => RulesAtStop::RemoveWhenSettled,
        };
        for stopped in gate.stop(rules)? {
            match stopped.rules {
                RulesLeft::Removed => {
                    tracing::info!(member = stopped.member, "gate: rules removed");
                }
                RulesLeft::InPlace(why) => tracing::warn!(
                    member = stopped.member,
                    why,
                    dropped_packets = stopped.dropped_packets,
                    "gate: the rules stay, no packet of this guest leaves; if the daemon is not to run again: \
                     tidelock remove-rules"
                ),
                RulesLeft::Failed(error) => {
                    tracing::error!(member = stopped.member, %error, "gate: cannot remove rules");
                }
            }
        }
        Ok(())
    }
}

impl HostGroup {
    fn member_names(&self) -> impl Iterator<Item = &str> {
        self.members.iter().map(|member| member.config.name.as_str())
    }
}
