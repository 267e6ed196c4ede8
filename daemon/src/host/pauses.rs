//! A host that is itself a virtual machine, and was paused: its lease is over.

use super::{HostError, spawn};
use std::sync::{Arc, Mutex};
use tidelock_netfilter::gate::{Gate, GateHandle};
use tidelock_netfilter::paused::{PauseWatch, READ_EVERY};

/// Drops every group's lease when this host was paused. On a thread of its own, which ends with the gate. Returns what is
/// noticed, and what cannot be, if this is a virtual machine.
pub(super) fn start(
    gate: &Arc<Mutex<Option<Gate>>>,
    handles: Vec<GateHandle>,
) -> Result<Option<String>, HostError> {
    let Some(mut watch) = PauseWatch::open() else { return Ok(None) };
    let meaning = watch.meaning();
    tracing::info!("this host is {meaning}");
    let gate = Arc::downgrade(gate);
    spawn("pauses", move || {
        while gate.strong_count() > 0 {
            if let Some(paused) = watch.read() {
                let now = tidelock_netfilter::now();
                handles.iter().for_each(|handle| handle.drop_lease(now));
                tracing::error!(
                    paused_ms = paused.as_millis() as u64,
                    "this host was paused by its hypervisor: no packet leaves before the backup has renewed the lease; if \
                     the pause was longer than the grace, a group may have been recovered meanwhile"
                );
            }
            std::thread::sleep(READ_EVERY);
        }
    })?;
    Ok(Some(meaning))
}
