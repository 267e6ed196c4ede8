//! The operator changes a group as `docs/causality.md`, section 7, says: on every host the daemon is
//! stopped, the configuration changed, and the daemon started again. A writer is first taken out
//! at the backup. A new member's guest is started when every host knows it: until then its packets
//! would be an outsider's. A disk grows while the daemon of its host alone is stopped: see `growing`.

use crate::disk::LocalDisk;
use crate::failure::Checked;
use crate::faults::Later;
use crate::schedule::{MS, S};
use crate::world::{World, note};
use tidelock_replica::group::RemoveError;

/// What is changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    /// The group's candidate becomes a member.
    Join,
    /// A member is taken out.
    Leave(usize),
    /// A disk is added.
    Disk(usize),
    /// A disk becomes larger.
    Grow(usize),
}

impl World {
    /// Every host of a group is asked to stop its daemon, and may not start it for a while.
    pub fn begin_change(&mut self, group: usize) {
        let busy = self.hosts_of(group).iter().any(|host| self.hosts[*host].changes);
        if busy || self.backup.groups[group].recovered.is_some() || self.is_leaving(group) {
            return;
        }
        let Some(change) = self.draw_change(group) else { return };
        let hosts = self.hosts_to_change(group, change);
        note!(self, "group {group} is to be changed: {change:?}");
        for host in hosts {
            self.stop_daemon(host);
            self.hosts[host].changes = true;
        }
        let patience = self.rng.range(100 * MS..3 * S);
        self.later(Later::Change { group, change }, patience);
    }

    fn draw_change(&mut self, group: usize) -> Option<Change> {
        let of = &self.plan.groups[group];
        let writers: Vec<_> = of.writers().collect();
        let mut changes: Vec<_> = of.followers.iter().map(|vm| Change::Leave(*vm)).collect();
        if writers.len() > 1 {
            changes.extend(writers.iter().map(|vm| Change::Leave(*vm)));
        }
        let with_spare = writers.iter().filter(|vm| self.plan.vms[**vm].spare.is_some());
        changes.extend(with_spare.map(|vm| Change::Disk(*vm)));
        if of.candidate.is_some() {
            changes.extend([Change::Join; 3]);
        }
        if self.plan.grows {
            changes.extend(writers.iter().flat_map(|vm| [Change::Grow(*vm); 2]));
        }
        if changes.is_empty() { None } else { Some(*self.rng.pick(&changes)) }
    }

    /// Hosts that have members of a group, or will have.
    fn hosts_of(&self, group: usize) -> Vec<usize> {
        let of = &self.plan.groups[group];
        let mut hosts: Vec<_> =
            of.members().chain(of.candidate).map(|vm| self.plan.vms[vm].host).collect();
        hosts.sort_unstable();
        hosts.dedup();
        hosts
    }

    /// Those whose daemons must not run meanwhile.
    fn hosts_to_change(&self, group: usize, change: Change) -> Vec<usize> {
        match change {
            Change::Grow(vm) => vec![self.plan.vms[vm].host],
            _ => self.hosts_of(group),
        }
    }

    /// Daemons that have not ended are killed. Then the configuration is changed.
    pub fn change(&mut self, group: usize, change: Change) -> Checked {
        let hosts = self.hosts_to_change(group, change);
        for host in &hosts {
            self.end_daemon(*host);
        }
        let gone = self.backup.groups[group].recovered.is_some() || self.is_leaving(group);
        if !gone && !self.apply(group, change) {
            // The backup is away, or has not heard that a host is gone: the operator tries again.
            self.later(Later::Change { group, change }, 50 * MS);
            return Ok(());
        }
        note!(self, "group {group} is changed: {change:?}, {}", !gone);
        for host in hosts {
            self.hosts[host].changes = false;
            let after = self.rng.range(MS..500 * MS);
            self.later(Later::DaemonStarts { host }, after);
        }
        Ok(())
    }

    /// Whether it is done.
    fn apply(&mut self, group: usize, change: Change) -> bool {
        match change {
            Change::Grow(vm) => self.grow(vm),
            Change::Disk(vm) => {
                let Some(disk) = self.plan.vms[vm].spare.take() else { return true };
                self.vms[vm].disks.push(LocalDisk::new(disk.content.clone()));
                self.plan.vms[vm].disks.push(disk);
                // All of its disks are compared.
                self.vms[vm].must_go_on = false;
            }
            Change::Join => {
                let of = &mut self.plan.groups[group];
                let Some(vm) = of.candidate.take() else { return true };
                // Nobody joins from a site that is gone.
                if self.hosts[self.plan.vms[vm].host].lost {
                    return true;
                }
                if self.plan.vms[vm].is_writer() {
                    self.plan.vms[vm].writer = of.vms.len() as u16;
                    of.vms.push(vm);
                } else {
                    of.followers.push(vm);
                }
                self.later(Later::NewcomerBoots { vm }, MS);
            }
            // Nobody has attached yet: there is nothing to take anything out of.
            Change::Leave(_) if !self.exists(group) => return true,
            Change::Leave(vm) => {
                let removed = match self.plan.vms[vm].is_writer() {
                    true => self.take_out(group, vm),
                    false => Some(Ok(())),
                };
                let is_unknown = matches!(removed, Some(Err(RemoveError::Unknown { .. })));
                // What a run that has ended has sent may still bring it.
                if is_unknown && self.net.conns.values().any(|c| c.backup_open && !c.host_open) {
                    return false;
                }
                let of = &mut self.plan.groups[group];
                match removed {
                    Some(Ok(())) if self.plan.vms[vm].is_writer() => of.removed.push(vm),
                    Some(Ok(())) => of.followers.retain(|follower| *follower != vm),
                    // It had been added, and no host has come with it since: it can go as it came.
                    Some(Err(RemoveError::Unknown { .. })) => of.vms.retain(|writer| *writer != vm),
                    // The others have never attached: the operator has to wait for one of them.
                    Some(Err(RemoveError::Last { .. })) => return true,
                    _ => return false,
                }
                self.kill_guest(vm);
                self.vms[vm].kernel = None;
            }
        }
        self.counts.changes += 1;
        true
    }

    /// `tidelock-backup remove`. `None`: the server does not answer.
    fn take_out(&mut self, group: usize, vm: usize) -> Option<Result<(), RemoveError>> {
        let slot = &mut self.backup.groups[group];
        if slot.is_busy() {
            return None;
        }
        let Some(of) = slot.group_mut() else {
            self.wake_group_now(group);
            return None;
        };
        let removed = of.remove(&self.plan.vms[vm].name);
        if matches!(removed, Ok(()) | Err(RemoveError::Journal(_) | RemoveError::Group(_))) {
            self.plan.groups[group].leaving.push(vm);
        }
        let outputs = of.take_outputs();
        slot.outputs_now(outputs);
        note!(self, "vm {vm} is taken out: {removed:?}");
        self.wake_group_now(group);
        Some(removed)
    }

    /// Whether every daemon that runs, or has left its kernel programs behind, knows this member.
    pub(crate) fn is_known_to_all(&self, vm: usize) -> bool {
        let group = &self.plan.groups[self.plan.vms[vm].group];
        group.members().all(|peer| {
            let kernel = self.vms[peer].kernel.as_ref();
            kernel.is_none_or(|kernel| kernel.peers.contains(&vm))
        })
    }
}
