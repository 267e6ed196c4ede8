//! The clean end of the whole daemon.

use super::{Host, HostError};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};
use tidelock_daemon_core::owner::ToOwner;
use tidelock_daemon_core::owner::ending::drain;
use tidelock_daemon_core::start::StartError;

/// How long a clean stop waits for the backup.
pub const DRAIN_TIMEOUT: Duration = Duration::from_secs(30);
/// How long a clean stop waits for the link to say goodbye.
const GOODBYE_TIMEOUT: Duration = Duration::from_secs(2);

impl Host {
    /// Ends cleanly: no new requests, everything to the backup. The gate's rules stay: a guest that lives on answers
    /// nobody while it is not protected. What could not be finished within the timeout is said.
    pub async fn stop(&self) -> Result<(), HostError> {
        self.stopping.store(true, Ordering::SeqCst);
        self.stores.stop();
        let until = Instant::now() + DRAIN_TIMEOUT;
        let mut drains = Vec::new();
        for group in &self.groups {
            let writers = group.members.iter().filter_map(|m| Some((m, m.writer.as_ref()?)));
            let writers: Vec<_> = writers.collect();
            let ports: Vec<_> = writers.iter().map(|(_, writer)| &*writer.port).collect();
            let answers = drain(group.config.form, &ports);
            for ((member, writer), drained) in writers.into_iter().zip(answers) {
                drains.push((member.config.name.as_str(), writer, drained));
            }
        }
        for (name, writer, drained) in drains {
            let left = until.saturating_duration_since(Instant::now());
            match tokio::time::timeout(left, drained).await {
                Ok(Ok(drained)) => {
                    let seq = drained.seq;
                    let whole = drained.keep(&writer.state).map_err(StartError::from)?;
                    tracing::info!(member = name, %seq, clean = whole, "drained");
                }
                _ => {
                    writer.port.send(ToOwner::Stop);
                    tracing::warn!(
                        member = name,
                        lag_writes = writer.lag_writes(),
                        "the backup did not take everything in time: the next start compares the sites"
                    );
                }
            }
        }
        self.stop_gate()?;
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

    fn stop_gate(&self) -> Result<(), HostError> {
        let Some(gate) = self.gate.lock().expect("no panic while held").take() else {
            return Ok(());
        };
        for stopped in gate.stop()? {
            tracing::warn!(
                member = stopped.member,
                interface = stopped.interface,
                dropped_packets = stopped.dropped_packets,
                "gate: the rules stay, and nothing of this guest leaves before the daemon runs again; if it is not to run \
                 again: tidelock remove-rules"
            );
        }
        Ok(())
    }
}
