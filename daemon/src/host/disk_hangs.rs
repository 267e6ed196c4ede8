//! A local disk that does not answer. Replication goes on without it, so no heartbeat misses it, and only its guests
//! would know.

use super::{HostGroup, HostMember};
use crate::cli::human;
use tidelock_daemon_core::heartbeat::HeartbeatSettings;
use tidelock_daemon_core::status::DiskHangStatus;
use tidelock_protocol::ids::MonoNanos;

/// The disk of a member that has not answered for as long as heartbeats are waited for.
pub(super) fn disk_hang(
    group: &HostGroup,
    member: &HostMember,
    now: MonoNanos,
) -> Option<DiskHangStatus> {
    let stats = &member.writer.as_ref()?.owner_stats;
    let alarm_after = group.config.heartbeat.unwrap_or(HeartbeatSettings::DEFAULT).alarm_after;
    let (waited, nth) = stats.disk_wait.longer_than(alarm_after, now)?;
    let disk = nth.and_then(|nth| member.config.disks.get(nth));
    let disk = disk.map(|disk| disk.name.to_string());
    Some(DiskHangStatus { disk, ms: waited.as_millis() as u64 })
}

/// It, for people.
pub(super) fn said(hang: &DiskHangStatus) -> String {
    let disk = match &hang.disk {
        Some(name) => format!("disk {name}"),
        None => "the local disk".to_owned(),
    };
    format!("{disk} has not answered a request for {}, so guests wait", human::ms(hang.ms))
}
