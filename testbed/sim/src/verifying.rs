//! Verification of the sites while guests write on: production's jobs ([`Verifying`], `copy_job.rs`) and the backup's digests
//! in the stream, with what the host does around them ([`Verifications`]): a schedule, wishes of the operator, and the
//! outcome on record, from which status is judged.
//!
//! Somebody changes bytes behind everyone's back: of a local disk between all faults, of an image of the backup when
//! everything has come back, for from then on the past is not what it was. The checker ([`Checker::VerifyTruthful`]):
//! - nothing is told to differ but blocks of which a byte was changed so, and not written since, at some moment of the
//!   verification;
//! - what was changed so before it began, and is still at its end, is told; a repair leaves nothing of that;
//! - once it was told, status does not call the group protected until a verification has found the sites equal, or has
//!   made them so, whatever becomes of the daemon.

use crate::backup::GroupSlot;
use crate::disk::SECTOR_BYTES;
use crate::failure::{Checked, Checker, check, fail};
use crate::guest::Ask;
use crate::oracle::Side;
use crate::rng::Rng;
use crate::scenario::Scenario;
use crate::schedule::{MS, S};
use crate::world::{Event, Run, World, note};
use std::time::Duration;
use tidelock_daemon_core::owner::{Clocks, Phase, ToOwner};
use tidelock_daemon_core::sequencer::Extent;
use tidelock_daemon_core::status::Kind;
use tidelock_daemon_core::verifications::{Plan, Verifications, Writer};
use tidelock_daemon_core::verified::{DifferingExtent, Verified};
use tidelock_protocol::ids::{DiskId, WriterId};
use tidelock_replica::group::AtSizeMax;
use tidelock_storage::memory::Memory;
use tidelock_store::extents::DiskKey;

/// The blocks that a verification tells of.
const BLOCK_BYTES: u64 = 4 << 10;
/// So many bytes of a member's disks are changed and not written again at a time.
const SPOILT_MAX: usize = 3;
/// Within this some of it is compared when nothing goes wrong any more.
const PATIENCE_NS: u64 = 240 * S;
/// So often a link breaks meanwhile.
const BREAKS_MAX: u32 = 16;

/// Verifications of a seed.
#[derive(Clone, Copy, Debug)]
pub struct VerifyPlan {
    /// So long after one the next begins.
    every_ns: u64,
    /// What is read at most; 0: no limit.
    rate_bytes_per_s: u64,
    /// Bytes are changed behind everyone's back.
    spoils: bool,
}

/// What the checker has seen when a verification began.
#[derive(Clone, Debug)]
pub(crate) struct Looked {
    /// What was changed behind everyone's back and not written since.
    open: Vec<usize>,
    /// So many had been by then.
    count: usize,
    repair: bool,
}

/// Draws who verifies. It draws its own numbers.
pub fn draw(rng: &mut Rng, plan: &mut Scenario) {
    if !rng.chance(1, 4) {
        return;
    }
    plan.verify = Some(VerifyPlan {
        every_ns: rng.range(100 * MS..3 * S),
        rate_bytes_per_s: *rng.pick(&[0, 0, 1 << 20, 256 << 10]),
        spoils: rng.chance(2, 3),
    });
}

impl World {
    /// A daemon looks after verifications.
    pub(crate) fn begin_verifications(&mut self, host: usize, run: Run) {
        if self.plan.verify.is_some() {
            self.schedule.after(100 * MS, Event::Verify { host, run });
        }
    }

    /// A daemon begins what is due, and what its operator asks for.
    pub fn look_at_verifications(&mut self, host: usize, run: Run) -> Checked {
        let Some(plan) = self.plan.verify else { return Ok(()) };
        if self.hosts[host].daemon.as_ref().is_none_or(|daemon| daemon.run != run) {
            return Ok(());
        }
        for vm in self.vms_of(host) {
            if !self.plan.vms[vm].is_writer() {
                continue;
            }
            if plan.spoils && self.faulty && self.rng.chance(1, 12) {
                self.spoil_here(vm);
            }
            self.check_standing(vm)?;
            self.follow_verify(vm)?;
            match self.rng.below(40) {
                _ if !self.faulty => {}
                0 | 1 => self.want_verification(vm, true),
                2 | 3 => self.want_verification(vm, false),
                4 => self.tell_owner(vm, ToOwner::StopVerify),
                _ => {}
            }
        }
        let after = self.rng.range(50 * MS..400 * MS);
        self.schedule.after(after, Event::Verify { host, run });
        Ok(())
    }

    fn tell_owner(&mut self, vm: usize, message: ToOwner) {
        if let Some(run) = self.vms[vm].run.as_ref().filter(|run| !run.ended) {
            run.port.send(message);
        }
    }

    /// Gives the writer, as its daemon sees it, to its verifications.
    fn with_verifications<R>(
        &mut self,
        vm: usize,
        what: impl FnOnce(&mut Verifications, &Writer<'_, Memory>, Plan, Clocks) -> R,
    ) -> Option<R> {
        let plan = self.plan.verify?;
        let clocks = self.member_clocks(vm);
        let of = &self.plan.vms[vm];
        let daemon = self.hosts[of.host].daemon.as_ref()?;
        let run = self.vms[vm].run.as_mut().filter(|run| !run.ended)?;
        let (port, view, state) = (&*run.port, &*run.view, &run.state);
        let writer = Writer { name: &of.name, port, view, link: daemon.link.stats_of(vm)?, state };
        let every = self.faulty.then(|| Duration::from_nanos(plan.every_ns));
        let plan = Plan { every, rate_bytes_per_s: plan.rate_bytes_per_s };
        Some(what(&mut run.verifications, &writer, plan, clocks))
    }

    /// The operator wants one.
    fn want_verification(&mut self, vm: usize, repair: bool) {
        self.with_verifications(vm, |verifications, writer, plan, _| {
            if verifications.may_begin(writer).is_ok() {
                verifications.begin(writer, repair, plan);
            }
        });
    }

    /// The owner loop is about to be told to begin one.
    pub(crate) fn verification_begins(&mut self, vm: usize, repair: bool) {
        let oracle = &self.vms[vm].oracle;
        let looked = Looked { open: oracle.spoilt(), count: oracle.spoilt_count(), repair };
        note!(self, "vm {vm}: a verification is to begin, repair {repair}");
        self.vms[vm].run.as_mut().expect("runs").looked.get_or_insert(looked);
    }

    /// A daemon looks whether one has ended, and whether one is due.
    fn follow_verify(&mut self, vm: usize) -> Checked {
        let ended = |world: &Self| {
            let run = world.vms[vm].run.as_ref();
            run.map_or(0, |run| run.verifications.ended)
        };
        let before = ended(self);
        let verified = self
            .with_verifications(vm, |verifications, writer, plan, clocks| {
                verifications.look(writer, plan, clocks)
            })
            .flatten();
        if ended(self) == before {
            return Ok(());
        }
        let run = self.vms[vm].run.as_mut().expect("it has looked");
        let looked = run.looked.take().expect("it began");
        note!(self, "vm {vm}: a verification has ended: {verified:?}");
        let Some(verified) = verified else { return Ok(()) };
        self.counts.verified += 1;
        self.vms[vm].repaired_or_verified[usize::from(looked.repair)] += 1;
        self.check_verified(vm, &looked, &verified)?;
        self.vms[vm].is_told_to_differ = verified.differs();
        self.check_standing(vm)
    }

    // ---- the checker

    fn check_verified(&mut self, vm: usize, looked: &Looked, verified: &Verified) -> Checked {
        let oracle = &self.vms[vm].oracle;
        let may: Vec<_> = looked
            .open
            .iter()
            .copied()
            .chain(looked.count..oracle.spoilt_count())
            .chain(oracle.spoilt_in_part())
            .map(|nth| oracle.spoilt_at(nth))
            .collect();
        let (mut told_bytes, is_all) = (0, verified.unreadable_bytes == 0);
        for extent in &verified.differing {
            told_bytes += extent.len_bytes;
            let end = extent.offset + extent.len_bytes;
            let mut at = extent.offset;
            while at < end {
                let next = (at / BLOCK_BYTES + 1) * BLOCK_BYTES;
                let is_in = |(disk, offset): &(DiskId, u64)| {
                    is_disk(extent, *disk) && (at..next.min(end)).contains(offset)
                };
                check(may.iter().any(is_in), Checker::VerifyTruthful, || {
                    format!(
                        "vm {vm}: {} is told to differ at {at}, and nobody has changed it",
                        extent.disk
                    )
                })?;
                at = next;
            }
        }
        check(told_bytes == verified.differing_bytes, Checker::VerifyTruthful, || {
            format!("vm {vm}: {told_bytes} bytes are listed, {verified:?}")
        })?;
        let open = oracle.spoilt();
        for nth in looked.open.iter().filter(|nth| is_all && open.contains(nth)) {
            let (disk, offset) = oracle.spoilt_at(*nth);
            let is_told = verified.differing.iter().any(|extent| {
                let range = extent.offset..extent.offset + extent.len_bytes;
                is_disk(extent, disk) && range.contains(&offset)
            });
            check(is_told && !looked.repair, Checker::VerifyTruthful, || {
                format!(
                    "vm {vm}: disk {disk} differs at {offset}, which was not found: {verified:?}"
                )
            })?;
        }
        if looked.repair && is_all {
            check(!verified.differs(), Checker::VerifyTruthful, || {
                format!("vm {vm}: not all was repaired: {verified:?}")
            })?;
        }
        self.counts.differing += u64::from(verified.differing_bytes > 0);
        Ok(())
    }

    /// What was told is still known, and status says so.
    fn check_standing(&mut self, vm: usize) -> Checked {
        // Status is asked of a daemon that runs.
        if !self.vms[vm].is_told_to_differ || self.vms[vm].run.is_none() {
            return Ok(());
        }
        let (host, group) = (self.plan.vms[vm].host, self.plan.vms[vm].group);
        let risk = self.with_group(host, group, |of, here| of.risk(here))?;
        let is_said = risk.as_ref().is_none_or(|risk| risk.why.kind != Kind::Following);
        check(is_said, Checker::VerifyTruthful, || {
            format!("vm {vm}: the sites were found to differ, and status is {risk:?}")
        })
    }

    // ---- what goes wrong

    /// A byte of a local disk changes by itself.
    fn spoil_here(&mut self, vm: usize) {
        let disk = self.rng.index(self.vms[vm].disks.len());
        let offset = self.rng.below(self.vms[vm].disks[disk].size_bytes());
        let byte = Extent { disk: DiskId(disk as u16), offset, len_bytes: 1 };
        if !self.may_spoil(vm, byte) {
            return;
        }
        note!(self, "vm {vm}: disk {disk} changes at {offset}");
        self.counts.spoilt += 1;
        let state = &mut self.vms[vm];
        state.disks[disk].spoil(offset);
        state.oracle.spoil(byte.disk, offset, Side::Here);
        // What is being read now may have been read before, or after.
        for ask in state.guest.asked.values_mut() {
            if let Ask::Read { extent, expected, .. } = ask
                && extent.overlaps(&byte)
            {
                *expected = None;
            }
        }
    }

    /// Only what the backup has, and nobody is just writing: it is known then where the sites differ. And no row that
    /// somebody was told of.
    fn may_spoil(&self, vm: usize, byte: Extent) -> bool {
        let state = &self.vms[vm];
        let Some(run) = &state.run else { return false };
        let block = byte.aligned_to(SECTOR_BYTES);
        let is_busy = run.is_writing(block)
            || run.local_ops.values().any(|op| op.aligned_to(SECTOR_BYTES).overlaps(&block));
        let Some(owner) = &run.owner else { return false };
        run.attached
            && run.refusal.is_none()
            && owner.sequencer().is_started()
            && run.phase() == Phase::Replicating
            && owner.copying().is_whole()
            && !is_busy
            && !state.oracle.is_damaged(block)
            && state.oracle.spoilt().len() < SPOILT_MAX
            && !(byte.disk == DiskId(0) && self.plan.vms[vm].ledger().contains(&byte.offset))
    }

    /// A byte of an image at the backup does, where a view of now shows it.
    fn spoil_there(&mut self, vm: usize) {
        let (group, writer) = (self.plan.vms[vm].group, WriterId(self.plan.vms[vm].writer));
        let disk = self.rng.index(self.vms[vm].disks.len());
        let offset = self.rng.below(self.vms[vm].disks[disk].size_bytes());
        let byte = Extent { disk: DiskId(disk as u16), offset, len_bytes: 1 };
        if !self.may_spoil(vm, byte) {
            return;
        }
        let slot = &mut self.backup.groups[group];
        let Some(of) = slot.run.as_mut().and_then(|run| run.state.group_mut()) else { return };
        let key = DiskKey { writer, disk: byte.disk };
        let Some(spec) = of.manifest().disk(writer, byte.disk).cloned() else { return };
        let path = of.manifest().image_path(writer, &spec);
        let mut read = || {
            let mut found = [0];
            of.view(key).ok()?.read(offset, &mut found).ok()?;
            Some(found[0])
        };
        let before = read();
        slot.storage.flip(&path, offset);
        if before.is_none() || before == read() {
            // What is in front of it has not been folded.
            return slot.storage.flip(&path, offset);
        }
        note!(self, "vm {vm}: the image of disk {disk} changes at {offset}");
        self.counts.spoilt += 1;
        self.vms[vm].oracle.spoil(byte.disk, offset, Side::Backup);
    }

    // ---- at the end

    /// Everything has come back: now images at the backup change, too, all is verified while guests write, a daemon
    /// dies, and all is repaired. Returns whether anything was done.
    pub fn verify_all(&mut self) -> Checked<bool> {
        if self.plan.verify.is_none_or(|plan| !plan.spoils) {
            return Ok(false);
        }
        let staying = (0..self.plan.groups.len()).filter(|group| {
            self.backup.groups[*group].recovered.is_none() && !self.is_leaving(*group)
        });
        let writers: Vec<_> = staying
            .flat_map(|group| self.plan.groups[group].writers().collect::<Vec<_>>())
            .collect();
        if writers.is_empty() {
            return Ok(false);
        }
        note!(self, "all is verified");
        self.is_past_spoilt = true;
        for vm in &writers {
            for _ in 0..6 {
                match self.rng.chance(1, 2) {
                    true => self.spoil_there(*vm),
                    false => self.spoil_here(*vm),
                }
            }
        }
        // What guests write is not found any more. Where a group stops at its size, a verification behind them lasts as
        // long as the journal needs for all that they write.
        let stops = self.plan.groups.iter().any(|of| of.retention.at_size_max == AtSizeMax::Stop);
        if self.rng.chance(1, 2) && !stops {
            self.guests_go_on();
        }
        self.verify_now(&writers, false)?;
        if self.rng.chance(1, 2) {
            let host = self.plan.vms[*self.rng.pick(&writers)].host;
            self.end_daemon(host);
            let after = self.rng.range(MS..300 * MS);
            self.later(crate::faults::Later::DaemonStarts { host }, after);
        }
        self.verify_now(&writers, true)?;
        self.busy = false;
        Ok(true)
    }

    /// How far the comparison that comes first is, and the verification, in bytes.
    fn compared_bytes(&self, vm: usize) -> [u64; 2] {
        let owner = self.vms[vm].run.as_ref().and_then(|run| run.owner.as_ref());
        let Some(owner) = owner else { return [0; 2] };
        let now = self.host_now(self.plan.vms[vm].host);
        let of = [owner.copying().progress(now), owner.copying().verify_progress(now)];
        of.map(|progress| progress.map_or(0, |progress| progress.done_bytes))
    }

    fn verify_now(&mut self, writers: &[usize], repair: bool) -> Checked {
        let ended =
            |world: &World, vm: usize| world.vms[vm].repaired_or_verified[usize::from(repair)];
        let before: Vec<_> = writers.iter().map(|vm| ended(self, *vm)).collect();
        let mut until = self.schedule.now_ns() + PATIENCE_NS;
        let mut farthest = vec![[0; 2]; self.vms.len()];
        let mut breaks = 0;
        let stood = self.counts.stood;
        loop {
            let open =
                writers.iter().zip(&before).filter(|(vm, before)| ended(self, **vm) == **before);
            let open: Vec<_> = open.map(|(vm, _)| *vm).collect();
            if open.is_empty() {
                return Ok(());
            }
            // One that compares little at a time over a narrow link lasts, and gets on, as does a resync before it.
            for vm in &open {
                for (bytes, farthest) in
                    self.compared_bytes(*vm).into_iter().zip(&mut farthest[*vm])
                {
                    if bytes > *farthest {
                        (until, *farthest) = (self.schedule.now_ns() + PATIENCE_NS, bytes);
                    }
                }
            }
            if self.schedule.now_ns() > until {
                // Of a stream that stands again and again, for what guests write, all can be verified when they rest.
                if !std::mem::replace(&mut self.busy, false) || self.counts.stood == stood {
                    return fail(Checker::ComesBack, format!("vms {open:?} are not verified"));
                }
                until = self.schedule.now_ns() + PATIENCE_NS;
                farthest.fill([0; 2]);
            }
            for vm in open {
                self.follow_verify(vm)?;
                self.want_verification(vm, repair);
                self.check_standing(vm)?;
            }
            // Who degrades again and again stays so for long.
            let degrades = self.plan.groups.iter().any(|of| of.degrade_after_ms.is_some());
            // A narrow link carries little between two of them.
            if !degrades && breaks < BREAKS_MAX && self.rng.chance(1, 300) {
                breaks += 1;
                let host = self.rng.index(self.hosts.len());
                self.break_link(host)?;
            }
            for _ in 0..32 {
                self.step()?;
            }
            // A group that stops at its size waits for whoever holds a point.
            self.backup.groups.iter_mut().for_each(GroupSlot::forget_views);
            self.take_marks_out();
        }
    }
}

fn is_disk(extent: &DifferingExtent, disk: DiskId) -> bool {
    extent.disk == format!("d{}", disk.0)
}
