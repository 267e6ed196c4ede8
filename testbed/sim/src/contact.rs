//! Starts that do not reach the backup for longer than anybody waits for it (`before_first_contact`), and the checkers of
//! what guests are served then.

use crate::failure::{Checked, Checker, check};
use crate::faults::Later;
use crate::logging::is_mapped;
use crate::oracle::Point;
use crate::owner::Submitted;
use crate::rng::Rng;
use crate::scenario::Scenario;
use crate::schedule::MS;
use crate::world::{Run, World, note};
use tidelock_daemon_core::link::port::{AttachedStream, ToLink};
use tidelock_daemon_core::owner::PATIENCE;
use tidelock_daemon_core::sequencer::{Extent, OpId};
use tidelock_protocol::ids::Seq;
use tidelock_protocol::record::Effect;

const PATIENCE_NS: u64 = PATIENCE.as_nanos() as u64;

/// Draws which groups serve so, and whether starts are cut off from the backup. It draws its own numbers.
pub fn draw(rng: &mut Rng, plan: &mut Scenario) {
    if !rng.chance(1, 4) {
        return;
    }
    let Scenario { groups, vms, cut_off_starts, .. } = plan;
    for group in groups {
        // As they are while they are adopted: what members tell each other meanwhile, no other host may hear of.
        let hosts: Vec<_> = group.members().chain(group.candidate).map(|vm| vms[vm].host).collect();
        if hosts.iter().any(|host| *host != hosts[0]) {
            continue;
        }
        group.serves_unreached = rng.chance(3, 4);
        *cut_off_starts = true;
    }
}

impl World {
    /// Groups of several whose guests are served without the backup are adopted: their disks have just been brought here.
    pub(crate) fn begin_adoptions(&mut self) {
        for (group, of) in self.plan.groups.iter().enumerate() {
            if let (true, Some(vm)) =
                (of.serves_unreached && of.may_have_several(), of.members().next())
            {
                let host = self.plan.vms[vm].host;
                self.records(host, group).keep_adopting(1).expect("in memory");
            }
        }
    }

    /// A daemon has started with groups that wait to be adopted.
    pub(crate) fn begin_to_adopt(&mut self, host: usize, run: Run) {
        for group in 0..self.plan.groups.len() {
            if self.records(host, group).is_adopting() {
                let after = self.rng.range(0..3_000 * MS);
                self.later(Later::Adopted { host, group, run }, after);
            }
        }
    }

    /// The operator says that the disks are here (production: `daemon/src/host/adopting.rs`).
    pub(crate) fn adopted(&mut self, host: usize, group: usize, run: Run) {
        let runs = self.hosts[host].daemon.as_ref().is_some_and(|daemon| daemon.run == run);
        if !runs || self.records(host, group).forget_adopting().is_err() {
            return;
        }
        for vm in self.members_on(host, group) {
            self.tell_link(vm, ToLink::Adopted);
        }
    }

    /// A daemon has started: often the backup is not reached for longer than guests wait for it.
    pub(crate) fn cut_off_start(&mut self, host: usize) {
        if !self.plan.cut_off_starts || !self.faulty || !self.rng.chance(1, 2) {
            return;
        }
        let span = PATIENCE_NS + self.rng.range(0..3_000 * MS);
        note!(self, "the backup is out of reach for {} ms", span / MS);
        if self.rng.chance(1, 2) {
            let path = &mut self.net.paths[host];
            (path.up_stopped, path.down_stopped) = (true, true);
            self.later(Later::PathHeals { host }, span);
        } else {
            self.end_backup(false);
            self.later(Later::BackupStarts, span);
        }
    }

    /// A run begins to admit writes of which the backup does not know what they were made on.
    pub(crate) fn begin_compared_life(&mut self, vm: usize, attached: &AttachedStream) {
        let writer = self.plan.vms[vm].writer_id().expect("it has a stream");
        let group = self.backup.groups[self.plan.vms[vm].group].group();
        let cut = group.map_or(attached.durable, |group| group.cut().get(writer));
        self.begin_life(vm, attached.durable, cut.min(attached.durable));
        self.vms[vm].unrecorded.clear();
    }

    /// A write that has no record is begun. The copy of the disks that this run begins with has it.
    pub(crate) fn is_unrecorded(&mut self, vm: usize, op: OpId, extent: Extent, effect: &Effect) {
        let state = &mut self.vms[vm];
        let run = state.run.as_mut().expect("runs");
        let data = match effect {
            Effect::Write(payload) => Some(payload.data().as_ptr()),
            _ => None,
        };
        let is_it = |s: &Submitted| s.seq.is_none() && s.extent == extent && s.data == data;
        state.oracle.wrote_unrecorded(extent, effect, run.life);
        let owner = run.owner.as_ref().expect("it writes");
        let geometry = self.plan.vms[vm].log.filter(|_| owner.sequencer().serves_unrecorded());
        if let Some(geometry) = geometry {
            let unit = u64::from(geometry.extent_bytes);
            let units = extent.offset / unit..extent.end().div_ceil(unit);
            state.unrecorded.extend(units.map(|nth| (extent.disk, nth * unit)));
        }
        let found = run.submitted.iter().filter(|(_, s)| is_it(s)).min_by_key(|(_, s)| s.nth);
        let request = found.map(|(request, _)| *request);
        run.unrecorded.insert(op, (request, extent, effect.clone()));
        if let Some((_, submitted)) = found {
            let point = Point { life: run.life, seq: Seq::ZERO };
            state.oracle.knew(point, submitted.known.clone());
            state.guest.stores(self.plan.vms[vm].writer, point, &submitted.known);
        }
        self.counts.unrecorded += 1;
    }

    /// Rule 6: what has no record is in the map, as a power loss would leave it, as long as it cannot be compared.
    pub(crate) fn check_unrecorded(&self, vm: usize) -> Checked {
        let unrecorded = &self.vms[vm].unrecorded;
        let Some(found) = self.durable_log(vm).filter(|_| !unrecorded.is_empty()) else {
            return Ok(());
        };
        let outside = unrecorded.iter().find(|(disk, offset)| !is_mapped(&found, *disk, *offset));
        check(outside.is_none(), Checker::InMap, || {
            format!("vm {vm}: {outside:?} has no record and is not in the map")
        })
    }
}
