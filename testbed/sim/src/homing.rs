//! The way back of a recovered group (`docs/manual/way-back.md`, with an export): its guests are stopped at site B,
//! their disks become local disks of a new run there, the old site's disks seed a group at a backup server there by
//! production's code ([`seed`]), and the run goes on with the roles exchanged, under the same faults, to the next disaster or a
//! planned switch, from which there is a way back again.
//!
//! The machines of the simulation stand for those of the other site then: they have power, their state directories and activity
//! logs are empty, all connections are new. What goes on:
//! - rows that clients were told of, which every recovery must have for ever (`told-rows`);
//! - the oracle, which begins with what was seeded, whole at the empty cut, and the first life of the new run, which is at the
//!   backup when the comparison has ended: until then nothing but what was seeded can be shown, and nothing is recovered;
//! - what was seeded stays a point in time, as long as its pin is there (`marks`).

use crate::backup::{GroupSlot, options};
use crate::failure::{Checked, Checker, fail};
use crate::faults::Later;
use crate::hearsay::Leaks;
use crate::lan::Lan;
use crate::oracle::WriterOracle;
use crate::probe::{Recovered, read_disks};
use crate::rng::Rng;
use crate::scenario::{DiskPlan, FAULTS, Fault, Scenario};
use crate::schedule::{MS, S};
use crate::world::{Vm, World, note};
use std::io::{self, IoSlice};
use tidelock_protocol::ids::{DiskId, Seq, WriterId};
use tidelock_protocol::message::DiskSpec;
use tidelock_replica::group::{Group, SeededMember, seed, seeded_manifest};
use tidelock_replica::history::Point;
use tidelock_storage::forget;
use tidelock_storage::memory::{Faults, Memory};
use tidelock_storage::{Storage, StorageFile};

/// So often a group changes sites in a run.
const TIMES_MAX: u64 = 3;
/// Events until the faults stop, for each time.
const MORE_STEPS: u64 = 3_000;
/// An operator looks again.
const AGAIN_NS: u64 = 50 * MS;

/// The disks of one writer.
type Images = Vec<Vec<u8>>;

/// Draws whether there is a way back, and when the first disaster is. It draws its own numbers.
pub fn draw(rng: &mut Rng, plan: &mut Scenario) {
    // Machines stand for those of another site as a whole. And where links are narrow hardly any group is recovered.
    if plan.groups.len() > 1 || plan.narrow.is_some() || !rng.chance(1, 3) {
        return;
    }
    plan.disaster_after_ns = Some(rng.range(300 * MS..3 * S));
    let disaster = FAULTS.iter().position(|fault| *fault == Fault::Disaster).expect("is one");
    plan.fault_weights[disaster] = plan.fault_weights[disaster].max(1);
}

impl World {
    /// The first disaster of a seed with a way back, as soon as there is something to recover.
    pub(crate) fn first_disaster(&mut self, group: usize) {
        if !self.faulty || self.backup.groups[group].recovered.is_some() {
            return;
        }
        if self.is_recoverable(group) {
            return self.disaster(group);
        }
        self.later(Later::FirstDisaster { group }, 200 * MS);
    }

    /// A group was recovered: after a while it is protected again, from here to where it came from.
    pub(crate) fn begin_way_back(&mut self, group: usize) {
        if self.plan.disaster_after_ns.is_none() || self.counts.homecomings >= TIMES_MAX {
            return;
        }
        let after = self.rng.range(50 * MS..1_500 * MS);
        self.backup.groups[group].is_on_its_way = true;
        self.later(Later::WayBack { group }, after);
    }

    /// The way back, if nothing is in its way.
    pub(crate) fn way_back(&mut self, group: usize) -> Checked {
        let slot = &self.backup.groups[group];
        if slot.recovered.is_none() || !slot.is_on_its_way {
            return Ok(());
        }
        let of_plan = &self.plan.groups[group];
        if !of_plan.removed.is_empty()
            || !of_plan.leaving.is_empty()
            || slot.recovered.as_ref().is_some_and(Recovered::is_without_some)
        {
            // The numbers of its writers would change.
            note!(self, "group {group} has lost members, and stays where it is");
            self.backup.groups[group].is_on_its_way = false;
            return Ok(());
        }
        let is_busy = slot.is_busy() || slot.dying || slot.full;
        // What its guests have written is on the views.
        let of = self.backup.groups[group].group_mut().filter(|_| !is_busy);
        let is_written = of.is_some_and(|of| of.guest_written());
        if !is_written || self.hosts.iter().any(|host| host.changes) {
            self.wake_group_now(group);
            self.later(Later::WayBack { group }, AGAIN_NS);
            return Ok(());
        }
        let (new, old) = (self.take_over(group)?, self.let_go_of(group));
        let old = self.fitted(&new, old);
        let (storage, point) = self.seed(group, &new, &old)?;
        self.exchange(group, new, old, storage, point)
    }

    /// The disks of a recovered group, from the views of now.
    fn take_over(&mut self, group: usize) -> Checked<Vec<Images>> {
        let taken = self.with_open(group, |world, of| world.recovered_disks(group, of));
        let all = taken.expect("it is open")?;
        for (vm, disks) in self.plan.groups[group].vms.clone().into_iter().zip(&all) {
            self.check_rows(vm, disks)?;
        }
        Ok(all)
    }

    fn recovered_disks(&mut self, group: usize, of: &mut Group<Memory>) -> Checked<Vec<Images>> {
        let journaled = of.state().journaled();
        let checked = self.check_recovered_disks(group, of);
        let mut all = Ok(Vec::new());
        for vm in self.plan.groups[group].vms.clone() {
            let writer = WriterId(self.plan.vms[vm].writer);
            let recovered = self.backup.groups[group].recovered.as_ref().expect("it is recovered");
            let like = recovered.images(usize::from(writer.0), journaled.get(writer));
            all = all.and_then(|mut all: Vec<Images>| {
                all.push(read_disks(of, writer, &like)?);
                Ok(all)
            });
        }
        checked?;
        all
    }

    /// What is left of the old site: its guests and daemons are stopped for good.
    fn let_go_of(&mut self, group: usize) -> Vec<Images> {
        for host in 0..self.hosts.len() {
            self.end_daemon(host);
        }
        for vm in self.plan.groups[group].members().collect::<Vec<_>>() {
            self.kill_guest(vm);
        }
        let disks =
            |vm: &usize| self.vms[*vm].disks.iter().map(|disk| disk.live().to_vec()).collect();
        self.plan.groups[group].vms.iter().map(disks).collect()
    }

    /// Of disks that the recovered group never heard of, or heard of as smaller, so much as it has.
    fn fitted(&self, new: &[Images], mut old: Vec<Images>) -> Vec<Images> {
        for (new, old) in new.iter().zip(&mut old) {
            old.truncate(new.len());
            for (new, old) in new.iter().zip(old) {
                old.truncate(new.len());
                debug_assert_eq!(new.len(), old.len());
            }
        }
        old
    }

    /// `tidelock-backup seed`, which the power may fail in the middle.
    fn seed(&mut self, group: usize, new: &[Images], old: &[Images]) -> Checked<(Memory, Point)> {
        let of = &self.plan.groups[group];
        let members: Vec<_> = of
            .vms
            .iter()
            .zip(new)
            .map(|(vm, disks)| SeededMember {
                name: self.plan.vms[*vm].name.clone(),
                disks: disks.iter().enumerate().map(|(nth, disk)| spec(nth, disk)).collect(),
            })
            .collect();
        let failed =
            |error: String| fail(Checker::Seed, format!("group {group} is not seeded: {error}"));
        let manifest = match seeded_manifest(&of.name, &members) {
            Ok(manifest) => manifest,
            Err(error) => return failed(error.to_string()),
        };
        let mut storage = Memory::new();
        let mut names = manifest.disks().map(|(writer, disk)| manifest.image_path(writer, disk));
        let written: io::Result<()> = storage.create_dir("images").and_then(|()| {
            for disk in old.iter().flatten() {
                let image = storage.create(&names.next().expect("one of each disk"))?;
                image.set_size(disk.len() as u64)?;
                image.write_at(&[IoSlice::new(disk)], 0)?;
            }
            Ok(())
        });
        if let Err(error) = written {
            return failed(error.to_string());
        }
        let (journal, now) = (options(&self.plan, group).journal, self.backup_now().unix_ms);
        if self.rng.chance(1, 3) {
            // The files are there, as they were at the old site.
            storage.sync_dir("images").and_then(|()| storage.sync_dir("")).expect("in memory");
            for (writer, disk) in manifest.disks() {
                let image = storage.open(&manifest.image_path(writer, disk)).expect("just made");
                image.sync().expect("in memory");
            }
            let at = storage.ops() + self.rng.below(16);
            storage.set_faults(Faults { power_off_at: Some(at), ..Faults::default() });
            let seeded = seed(&storage, &manifest, journal, now, true).is_ok();
            let rng = &mut self.rng;
            storage = storage.crash(&mut || rng.chance(1, 2));
            note!(self, "the power fails while group {group} is seeded, which it was: {seeded}");
            if storage.open("group.json").is_ok() {
                // It says that the group is there, so it is. The operator begins again all the same.
                storage.remove("group.json").expect("in memory");
            }
        }
        let seeded = seed(&storage, &manifest, journal, now, true);
        match seeded {
            Ok(point) => Ok((storage, point)),
            Err(error) => failed(error.to_string()),
        }
    }

    /// The sites change their roles.
    fn exchange(
        &mut self,
        group: usize,
        new: Vec<Images>,
        old: Vec<Images>,
        storage: Memory,
        point: Point,
    ) -> Checked {
        note!(self, "group {group} is on the way back: seeded at {point:?}");
        self.counts.homecomings += 1;
        self.more_steps += MORE_STEPS;
        for conn in self.net.conns.keys().copied().collect::<Vec<_>>() {
            self.backup_loses(conn)?;
            self.net.conns.remove(&conn);
        }
        self.lan = Lan::default();
        self.leaks[group] = Leaks::default();
        for host in &mut self.hosts {
            (host.power, host.lost, host.restarts) = (true, false, false);
            host.state_dir.set_faults(Faults::default());
            host.boots += 1;
        }
        self.plan.groups[group].past = Seq::ZERO;
        let members: Vec<_> = self.plan.groups[group].members().collect();
        for vm in &members {
            self.plan.vms[*vm].joins = false;
            let state_dir = &self.hosts[self.plan.vms[*vm].host].state_dir;
            let dir = &self.plan.groups[group].name;
            for name in state_dir.list(dir).expect("in memory") {
                forget(state_dir, dir, &name).expect("in memory");
            }
        }
        let writers = self.plan.groups[group].vms.clone();
        for ((vm, new), old) in writers.iter().copied().zip(new).zip(old) {
            self.plan.vms[vm].disks = new.iter().map(|disk| whole(disk.clone())).collect();
            self.move_vm(vm, WriterOracle::seeded(new, old));
        }
        for vm in members.iter().copied().filter(|vm| !writers.contains(vm)) {
            self.move_vm(vm, WriterOracle::new(Vec::new()));
        }
        let slot = &mut self.backup.groups[group];
        *slot = GroupSlot::seeded(storage, point, slot);
        self.is_served(group);
        self.wake_group_now(group);
        for host in 0..self.hosts.len() {
            let after = self.rng.range(MS..500 * MS);
            self.later(Later::DaemonStarts { host }, after);
        }
        for vm in members {
            let after = self.rng.range(MS..800 * MS);
            self.later(Later::GuestBoots { vm }, after);
        }
        if self.faulty {
            let after = self.rng.range(500 * MS..5 * S);
            match self.rng.below(3) {
                0 => {}
                1 => self.later(Later::FirstDisaster { group }, after),
                _ => self.later(Later::SwitchOver { group, tries: 0, recovers: true }, after),
            }
        }
        Ok(())
    }

    /// A VM begins anew at the other site. What its clients were told stays told.
    fn move_vm(&mut self, vm: usize, oracle: WriterOracle) {
        let before = std::mem::replace(&mut self.vms[vm], Vm::new(&self.plan, vm, oracle));
        let now = &mut self.vms[vm];
        now.guest.rows = before.guest.rows;
        now.guest.next = before.guest.next;
        now.client.rows = before.client.rows;
        now.errors_one_in = before.errors_one_in;
        now.slow_factor = before.slow_factor;
    }
}

fn spec(nth: usize, disk: &[u8]) -> DiskSpec {
    DiskSpec { id: DiskId(nth as u16), name: format!("d{nth}"), size_bytes: disk.len() as u64 }
}

fn whole(content: Vec<u8>) -> DiskPlan {
    let all = 0..content.len() as u64;
    DiskPlan { content, allocated: vec![all] }
}
