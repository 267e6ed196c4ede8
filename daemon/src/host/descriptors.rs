//! Room for descriptors: what clients of disks can take is bounded, so that the link and the control socket always get theirs.

use crate::config::Config;
use crate::nbd_tap::HANDSHAKES_MAX;

/// The link, control and metrics sockets, and what each member keeps open besides its disks.
const OWN: u64 = 128;
const OF_MEMBER: u64 = 32;
/// A disk, and its listening socket.
const OF_DISK: u64 = 4;

/// Says so if clients of the disks could use up the descriptors that the process may have.
pub(super) fn check(config: &Config) {
    let needed = needed(config);
    if let Some(limit) = limit().filter(|limit| *limit < needed) {
        tracing::warn!(
            limit,
            needed,
            "clients of the disks may use up the descriptors, and the link and `tidelock` would find none: raise LimitNOFILE= \
             in the unit (or `ulimit -n`), or lower `connections` of the disks"
        );
    }
}

/// Read, not asked for: the unit's sandbox allows no call that could also change it.
fn limit() -> Option<u64> {
    let limits = std::fs::read_to_string("/proc/self/limits").ok()?;
    let line = limits.lines().find_map(|line| line.strip_prefix("Max open files"))?;
    line.split_whitespace().next()?.parse().ok()
}

/// What is open at most.
fn needed(config: &Config) -> u64 {
    let members = config.groups.iter().flat_map(|group| &group.members);
    let of_member = |member: &crate::config::Member| {
        let clients = |disk: &crate::config::Disk| (disk.connections + HANDSHAKES_MAX) as u64;
        let disks = member.disks.iter().map(|disk| clients(disk) + OF_DISK);
        OF_MEMBER + disks.sum::<u64>()
    };
    OWN + members.map(of_member).sum::<u64>()
}
