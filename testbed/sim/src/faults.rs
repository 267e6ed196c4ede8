//! What goes wrong, and how it ends.

use crate::change::Change;
use crate::failure::Checked;
use crate::net::{ConnId, Path};
use crate::scenario::{FAULTS, Fault};
use crate::schedule::{MS, S};
use crate::switching::Strike;
use crate::world::{Event, Run, World, note};
use std::sync::Arc;
use tidelock_netfilter::gate::Pending;
use tidelock_protocol::ids::MonoNanos;
use tidelock_protocol::message::Mode;
use tidelock_storage::memory::Faults;

/// The end of a fault, or its second act.
#[allow(missing_docs)] // The fields are what their names say.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Later {
    /// A daemon is started.
    DaemonStarts { host: usize },
    /// A daemon that was told to stop has stopped, or was given up.
    DaemonEnds { host: usize, run: Run },
    /// A guest boots again.
    GuestBoots { vm: usize },
    /// A host has power again.
    PowerOn { host: usize },
    /// The disks of a group's guests are here.
    Adopted { host: usize, group: usize, run: Run },
    /// The power of a host fails at the latest now.
    PowerFails { host: usize, boots: u64 },
    /// The backup's power fails now.
    BackupDies { run: u64 },
    /// The server is started.
    BackupStarts,
    /// The network of a host goes on.
    PathHeals { host: usize },
    /// A link is quick again.
    LinkFast { host: usize },
    /// A connection that was damaged breaks.
    MangledBreaks { conn: ConnId },
    /// There is room again.
    BackupRoom { group: usize },
    /// Disks work again.
    DisksHeal { vm: usize },
    /// The backup's disk is quick again.
    BackupFast,
    /// An operator does not wait for an answer any longer.
    OperatorLeaves { group: usize, asker: u64 },
    /// An order that was to be tried again at a time of the backup's clock is over, or waits for something else.
    OrderIsDue { group: usize, asker: u64, at: MonoNanos },
    /// A group is changed: its daemons have had time to end.
    Change { group: usize, change: Change },
    /// A new member boots as soon as everybody knows it.
    NewcomerBoots { vm: usize },
    /// A group is to be switched over to the backup site, by all its hosts.
    SwitchOver { group: usize, tries: u32, recovers: bool },
    /// A host's operator begins.
    SwitchHost { host: usize, group: usize },
    /// The operators look whether all hosts have gone over.
    SwitchEnds { group: usize, tries: u32, recovers: bool },
    /// A group has its first disaster at this site.
    FirstDisaster { group: usize },
    /// A recovered group is protected again, from where it is to where it was.
    WayBack { group: usize },
    /// Something goes wrong in the middle of it.
    Strike { host: usize, group: usize, strike: Strike },
}

impl World {
    /// Something goes wrong.
    pub fn fault(&mut self) -> Checked {
        if !self.faulty {
            return Ok(());
        }
        let after = self.rng.span(self.plan.fault_ns);
        self.schedule.after(after, Event::Fault);
        if self.plan.fault_weights.iter().all(|w| *w == 0) {
            return Ok(());
        }
        let fault = FAULTS[self.rng.weighted(&self.plan.fault_weights)];
        self.counts.faults += 1;
        note!(self, "FAULT {fault:?}");
        let host = self.rng.index(self.hosts.len());
        let vm = self.rng.index(self.vms.len());
        let group = self.rng.index(self.plan.groups.len());
        let span = self.rng.span(600 * MS);
        match fault {
            Fault::Break => return self.break_link(host),
            Fault::Partition => self.partition(host, span * 3),
            Fault::SlowLink => {
                self.net.paths[host].slow_factor = self.rng.range(2..20);
                self.later(Later::LinkFast { host }, span * 2);
            }
            Fault::Mangle => {
                if let Some(conn) = self.hosts[host].daemon.as_ref().and_then(|d| d.link.conn())
                    && let Some(of) = self.net.conns.get_mut(&conn)
                {
                    of.mangled = true;
                    let after = self.rng.range(50 * MS..2 * S);
                    self.later(Later::MangledBreaks { conn }, after);
                }
            }
            Fault::KillDaemon if self.tears(host) => {}
            Fault::KillDaemon => {
                self.end_daemon(host);
                self.later(Later::DaemonStarts { host }, span);
            }
            Fault::StopDaemon => self.stop_daemon(host),
            Fault::KillGuest => {
                if self.vms[vm].guest.alive && self.plan.is_member(vm) {
                    self.kill_guest(vm);
                    let after = self.draw_reboot_ns();
                    self.later(Later::GuestBoots { vm }, after);
                }
            }
            Fault::PowerHost => {
                let after = self.power_fails_soon(host);
                self.later(Later::PowerOn { host }, after + span * 2);
            }
            Fault::RestartHost => {
                self.hosts[host].restarts = true;
                self.stop_daemon(host);
            }
            Fault::KillBackup => {
                match self.rng.chance(1, 2) {
                    true => self.stop_backup()?,
                    false => self.end_backup(false),
                }
                self.later(Later::BackupStarts, span);
            }
            Fault::PowerBackup => self.backup_power_fails(span),
            Fault::BackupFull => {
                let slot = &mut self.backup.groups[group];
                slot.full = true;
                slot.storage.set_faults(slot.faults());
                self.later(Later::BackupRoom { group }, span);
            }
            Fault::BackupSyncFails => {
                let slot = &mut self.backup.groups[group];
                // Until the group is opened again.
                slot.storage.set_faults(Faults { sync_fails: true, ..slot.faults() });
            }
            Fault::SlowDisk => {
                self.vms[vm].slow_factor = self.rng.range(2..100);
                self.later(Later::DisksHeal { vm }, span);
            }
            Fault::LocalErrors => {
                let one_in = self.rng.range(2..30);
                self.local_errors(vm, one_in);
                self.later(Later::DisksHeal { vm }, span);
            }
            Fault::SlowBackup => {
                self.backup.slow_factor = self.rng.range(2..60);
                self.later(Later::BackupFast, span);
            }
            Fault::Mode => return self.change_mode(group),
            Fault::WallClock => {
                let step = self.rng.range(0..10_000) as i64 - 5_000;
                self.plan.hosts[host].wall_offset_ms += step;
            }
            Fault::Disaster => self.disaster(group),
            Fault::Change => self.begin_change(group),
        }
        Ok(())
    }

    /// Requests of a VM's local disks fail in one of so many cases, and the disk of its backlog is full now and then; 0: never.
    fn local_errors(&mut self, vm: usize, one_in: u64) {
        self.vms[vm].errors_one_in = one_in;
        if let Some(files) = &self.vms[vm].backlog_files {
            files.is_full_for(one_in * 8);
        }
    }

    pub(crate) fn later(&mut self, what: Later, after_ns: u64) {
        self.schedule.after(after_ns, Event::After(what));
    }

    /// A connection breaks: either end may notice first, or only one of them soon.
    pub(crate) fn break_link(&mut self, host: usize) -> Checked {
        let Some(conn) = self.hosts[host].daemon.as_ref().and_then(|d| d.link.conn()) else {
            return Ok(());
        };
        if self.rng.chance(2, 3) {
            return self.host_hangup(conn);
        }
        self.backup_loses(conn)?;
        self.backup_closes(conn);
        Ok(())
    }

    pub(crate) fn partition(&mut self, host: usize, span_ns: u64) {
        let path = &mut self.net.paths[host];
        match self.rng.below(4) {
            0 => path.up_stopped = true,
            1 => path.down_stopped = true,
            _ => (path.up_stopped, path.down_stopped) = (true, true),
        }
        self.later(Later::PathHeals { host }, span_ns);
    }

    pub(crate) fn stop_daemon(&mut self, host: usize) {
        let Some(daemon) = &self.hosts[host].daemon else { return };
        let run = daemon.run;
        self.drain(host);
        // What cannot be drained in time is given up, and the next run compares the sites.
        let patience = self.rng.range(100 * MS..3 * S);
        self.later(Later::DaemonEnds { host, run }, patience);
    }

    pub(crate) fn power_off(&mut self, host: usize) {
        note!(self, "host {host} loses power");
        self.end_daemon(host);
        self.hosts[host].power = false;
        self.hosts[host].boots += 1;
        let rng = &mut self.rng;
        let state_dir = self.hosts[host].state_dir.crash(&mut || rng.chance(1, 2));
        self.hosts[host].state_dir = state_dir;
        self.hosts[host].restarts = false;
        self.lan.lose(host);
        for vm in self.vms_of(host) {
            self.kill_guest(vm);
            self.vms[vm].pending = Arc::new(Pending::new());
            self.vms[vm].kernel = None;
            for disk in &mut self.vms[vm].disks {
                disk.power_loss(&mut self.rng);
            }
            self.backlog_loses_power(vm);
        }
    }

    /// The power fails in the middle of something: after a few more operations of the disk, of
    /// which the last one is done in part.
    fn backup_power_fails(&mut self, span_ns: u64) {
        let Some(run) = self.backup.run() else { return };
        for slot in &mut self.backup.groups {
            slot.dying = true;
            let at = slot.storage.ops() + self.rng.below(12);
            slot.storage.set_faults(Faults { power_off_at: Some(at), ..slot.faults() });
        }
        let after = self.rng.range(0..40 * MS);
        self.later(Later::BackupDies { run }, after);
        self.later(Later::BackupStarts, after + span_ns);
    }

    fn change_mode(&mut self, group: usize) -> Checked {
        let mode = *self.rng.pick(&[Mode::Sync, Mode::Pipelined, Mode::Pipelined, Mode::Async]);
        note!(self, "group {group} goes to {mode}");
        (0..self.hosts.len()).try_for_each(|host| self.want_mode(host, group, mode))
    }

    /// The primary site is gone, or cut off and alive, or only believed to be: recover the group.
    pub(crate) fn disaster(&mut self, group: usize) {
        let early = !self.is_recoverable(group) && !self.rng.chance(1, 10);
        if self.backup.groups[group].recovered.is_some() || early {
            return;
        }
        let mut hosts: Vec<_> =
            self.plan.groups[group].members().map(|vm| self.plan.vms[vm].host).collect();
        hosts.sort_unstable();
        hosts.dedup();
        let kind = self.rng.below(5);
        let away = self.rng.range(S..6 * S);
        for host in hosts {
            match kind {
                0 | 1 => {
                    self.power_off(host);
                    if kind == 0 {
                        self.hosts[host].lost = true;
                    } else {
                        self.later(Later::PowerOn { host }, away);
                    }
                }
                2 | 3 => self.partition(host, away),
                _ => {}
            }
        }
        let after = self.rng.range(MS..S);
        // Nothing has happened to the primary site: it is left behind as planned, or only believed to be gone.
        match kind {
            4 if !after.is_multiple_of(3) => {
                self.later(Later::SwitchOver { group, tries: 0, recovers: true }, after)
            }
            _ => self.schedule.after(after, Event::Recover { group }),
        }
    }

    /// Whether everything of the group at the primary site is certain not to run.
    #[must_use]
    pub fn is_dead(&self, group: usize) -> bool {
        self.plan.groups[group].members().all(|vm| !self.hosts[self.plan.vms[vm].host].power)
    }

    /// Whether it will not come back.
    #[must_use]
    pub fn is_lost(&self, group: usize) -> bool {
        self.plan.groups[group].members().any(|vm| self.hosts[self.plan.vms[vm].host].lost)
    }

    /// A fault ends, or goes on.
    pub fn later_event(&mut self, later: Later) -> Checked {
        note!(self, "{later:?}");
        match later {
            Later::Adopted { host, group, run } => self.adopted(host, group, run),
            Later::PowerFails { host, boots } => {
                if self.faulty && self.hosts[host].boots == boots {
                    self.power_off(host);
                }
            }
            Later::DaemonStarts { host } => return self.start_daemon(host),
            Later::SwitchOver { group, tries, recovers } => {
                self.switch_over(group, tries, recovers);
            }
            Later::SwitchHost { host, group } => return self.switch_host(host, group),
            Later::SwitchEnds { group, tries, recovers } => {
                self.switch_ends(group, tries, recovers);
            }
            Later::FirstDisaster { group } => self.first_disaster(group),
            Later::WayBack { group } => return self.way_back(group),
            Later::Strike { host, group, strike } => return self.strike(host, group, strike),
            Later::DaemonEnds { host, run } => {
                if self.hosts[host].daemon.as_ref().is_some_and(|d| d.run == run) {
                    self.end_daemon(host);
                    let after = self.rng.range(MS..500 * MS);
                    if self.hosts[host].restarts {
                        self.power_off(host);
                        self.later(Later::PowerOn { host }, after);
                    }
                    self.later(Later::DaemonStarts { host }, after);
                }
            }
            Later::GuestBoots { vm } => {
                self.boot_if_off(vm)?;
            }
            Later::PowerOn { host } => return self.power_on(host),
            Later::BackupDies { run } => {
                if self.backup.run() == Some(run) {
                    self.end_backup(true);
                }
            }
            Later::BackupStarts => return self.start_backup(),
            Later::PathHeals { host } => self.heal_path(host),
            Later::LinkFast { host } => self.net.paths[host].slow_factor = 1,
            Later::MangledBreaks { conn } => {
                self.backup_loses(conn)?;
                self.backup_closes(conn);
            }
            Later::BackupRoom { group } => {
                let slot = &mut self.backup.groups[group];
                slot.full = false;
                if !slot.dying {
                    slot.storage.set_faults(slot.faults());
                }
            }
            Later::DisksHeal { vm } => {
                self.vms[vm].slow_factor = 1;
                self.local_errors(vm, 0);
            }
            Later::BackupFast => self.backup.slow_factor = 1,
            Later::OperatorLeaves { group, asker } => self.operator_leaves(group, asker),
            Later::OrderIsDue { group, asker, at } => return self.order_is_due(group, asker, at),
            Later::Change { group, change } => return self.change(group, change),
            Later::NewcomerBoots { vm } => {
                self.boot_if_off(vm)?;
                if !self.vms[vm].guest.alive && self.plan.is_member(vm) {
                    self.later(Later::NewcomerBoots { vm }, 100 * MS);
                }
            }
        }
        Ok(())
    }

    fn heal_path(&mut self, host: usize) {
        let Path { slow_factor, bytes_per_ms, .. } = self.net.paths[host];
        self.net.paths[host] = Path { slow_factor, bytes_per_ms, ..Path::default() };
        self.network_goes_on(host);
    }

    fn power_on(&mut self, host: usize) -> Checked {
        if self.hosts[host].power || self.hosts[host].lost {
            return Ok(());
        }
        self.hosts[host].power = true;
        self.is_not_dead(host);
        self.start_daemon(host)?;
        for vm in self.vms_of(host) {
            self.boot_if_off(vm)?;
        }
        Ok(())
    }

    fn boot_if_off(&mut self, vm: usize) -> Checked {
        let has_power = self.hosts[self.plan.vms[vm].host].power;
        let may_run = has_power && self.plan.is_member(vm) && self.is_known_to_all(vm);
        if self.vms[vm].guest.alive || !may_run { Ok(()) } else { self.boot_guest(vm) }
    }

    /// A group that has lost a host for good moves to the backup site as a whole: the operator
    /// shuts down what is left of it.
    fn give_up_lost_groups(&mut self) {
        loop {
            let half_lost = (0..self.vms.len()).find(|vm| {
                let host = self.plan.vms[*vm].host;
                self.plan.is_member(*vm)
                    && !self.hosts[host].lost
                    && self.is_lost(self.plan.vms[*vm].group)
            });
            let Some(vm) = half_lost else { return };
            let host = self.plan.vms[vm].host;
            self.power_off(host);
            self.hosts[host].lost = true;
        }
    }

    /// No more faults, and everything that was broken works again.
    pub fn heal(&mut self) -> Checked {
        note!(self, "no more faults");
        self.faulty = false;
        self.give_up_lost_groups();
        self.operators_go();
        if self.backup.groups.iter().any(|slot| slot.dying) {
            self.end_backup(true);
        }
        self.backup.slow_factor = 1;
        for slot in &mut self.backup.groups {
            slot.full = false;
            slot.initialising = false;
            slot.storage.set_faults(slot.faults());
        }
        self.start_backup()?;
        let mangled: Vec<_> =
            self.net.conns.iter().filter(|(_, c)| c.mangled).map(|(id, _)| *id).collect();
        for conn in mangled {
            self.backup_loses(conn)?;
            self.backup_closes(conn);
        }
        for vm in 0..self.vms.len() {
            self.vms[vm].slow_factor = 1;
            self.local_errors(vm, 0);
        }
        for host in 0..self.hosts.len() {
            self.hosts[host].state_dir.set_faults(Faults::default());
            self.net.paths[host].slow_factor = 1;
            self.heal_path(host);
            self.power_on(host)?;
            self.start_daemon(host)?;
        }
        for vm in 0..self.vms.len() {
            self.boot_if_off(vm)?;
        }
        for group in 0..self.plan.groups.len() {
            let goes = self.is_lost(group) || self.is_switched(group);
            if goes && self.backup.groups[group].recovered.is_none() {
                self.schedule.after(MS, Event::Recover { group });
            }
        }
        Ok(())
    }
}
