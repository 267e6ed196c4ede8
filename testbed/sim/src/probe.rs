//! Recoveries, real ones and rehearsed ones, and what must be true of them.
//!
//! A *probe* asks what would be if the backup lost power right now and the group was recovered:
//! the worst that the disk may keep is opened by production's code in a copy, recovered, and
//! compared byte by byte with the oracle and with what clients were told.

use crate::backup::options;
use crate::failure::{Checked, Checker, check, fail};
use crate::guest::{Known, Row, row_bytes};
use crate::oracle::Point;
use crate::schedule::MS;
use crate::server::INBOX_MAX_BYTES;
use crate::world::{Event, World, note};
use bytes::Bytes;
use tidelock_protocol::ids::{DiskId, Epoch, Seq, WriterId};
use tidelock_protocol::vector::CountVector;
use tidelock_replica::group::{Group, GuestEffect, Pin, RecoverError, Recovery};
use tidelock_storage::memory::{Memory, MemoryFile};
use tidelock_store::extents::DiskKey;

/// The disks of one writer.
type Images = Vec<Vec<u8>>;

/// A recovered group, as it must be.
#[derive(Clone, Debug)]
pub struct Recovered {
    /// Its epoch.
    pub epoch: Epoch,
    /// The cut.
    pub cut: CountVector,
    /// The disks at the cut, by writer index.
    base: Vec<Images>,
    /// What its guests wrote since, by writer index.
    log: Vec<Vec<GuestWrite>>,
    /// How far that is durable.
    flushed: CountVector,
}

#[derive(Clone, Debug)]
struct GuestWrite {
    seq: Seq,
    disk: DiskId,
    offset: u64,
    data: Vec<u8>,
}

impl Recovered {
    /// Whether the disks of some member are not among them.
    pub(crate) fn is_without_some(&self) -> bool {
        self.base.iter().any(Vec::is_empty)
    }

    /// The disks when so much of what was written since counts.
    pub(crate) fn images(&self, writer: usize, up_to: Seq) -> Images {
        let mut images = self.base[writer].clone();
        for write in self.log[writer].iter().take_while(|w| w.seq <= up_to) {
            let from = write.offset as usize;
            images[usize::from(write.disk.0)][from..from + write.data.len()]
                .copy_from_slice(&write.data);
        }
        images
    }
}

impl World {
    /// What would be if the worst happened now?
    pub fn probe(&mut self, group: usize) -> Checked {
        if self.is_past_spoilt {
            return Ok(());
        }
        // Mostly the worst: nothing that was not made durable is there.
        let keep_percent = *self.rng.pick(&[0, 0, 0, 50, 90]);
        let rng = &mut self.rng;
        let mut survives = || rng.chance(keep_percent, 100);
        let storage = self.backup.groups[group].storage.crash(&mut survives);
        self.rehearse(group, storage)?;
        self.rot(group)?;
        self.repair_journal(group)
    }

    pub(crate) fn rehearse(&mut self, group: usize, storage: Memory) -> Checked {
        let (now, options) = (self.backup_now(), options(&self.plan, group));
        let told_durable = self.backup.groups[group].told_durable.clone();
        let mut copy = match Group::open(storage, now, options) {
            Ok(Some((copy, _))) => copy,
            Ok(None) => {
                let seeded = self.backup.groups[group].is_seeded();
                let told = told_durable.entries().next().is_some();
                return check(!told && !seeded, Checker::AckDurable, || {
                    format!("after a crash there is no group {group}, told was {told_durable}")
                });
            }
            Err(error) => {
                return fail(Checker::OpensAgain, format!("after a crash, group {group}: {error}"));
            }
        };
        self.counts.probes += 1;
        // A recovery on its way to the record may be there after a crash, and what it leaves out is void.
        let is_recovered = |of: &Group<Memory>| {
            of.recovery().is_none() && of.state().recovered() == copy.state().recovered()
        };
        if copy.state().recovered().is_some()
            && self.backup.groups[group].group().is_some_and(is_recovered)
        {
            return Ok(());
        }
        let journaled = copy.state().journaled();
        self.check_reopened(group, &journaled)?;
        if !self.is_past_spoilt {
            self.ask_past(group, &mut copy, false)?;
            self.travel(group, &copy)?;
        }
        if self.backup.groups[group].recovered.is_some() {
            return self.check_recovered_disks(group, &mut copy);
        }
        match copy.recover(now, true) {
            Ok(recovery) => {
                let entries = recovery.writers.iter().enumerate();
                let cut: CountVector =
                    entries.map(|(i, w)| (WriterId(i as u16), w.recovered)).collect();
                self.check_cut(group, &cut)?;
                self.check_served(group, &recovery)?;
                let told = &self.backup.groups[group].told;
                check(cut.covers(told), Checker::OutputCommit, || {
                    format!("group {group} would be recovered at {cut}, C was told as {told}")
                })?;
                self.check_images(group, &mut copy, &cut).map(drop)
            }
            Err(
                RecoverError::Initialising { member, copy: why }
                | RecoverError::Seeded { member, why },
            ) => check(!self.is_whole_group(group), Checker::Prefix, || {
                format!("{member} was whole, and cannot be recovered now: {why}")
            }),
            Err(error) => fail(Checker::OpensAgain, format!("a rehearsed recovery: {error}")),
        }
    }

    /// Whether every writer is whole, also those that have come later: a group that could not be
    /// recovered when they did cannot be without them. One that could be can still, however far they are.
    pub(crate) fn is_whole_group(&self, group: usize) -> bool {
        let slot = &self.backup.groups[group];
        slot.shown || self.plan.groups[group].writers().all(|vm| self.is_whole(vm, &slot.told))
    }

    /// A recovery is without a writer only if that was taken out or was never whole, and never with
    /// one that is not.
    fn check_served(&self, group: usize, recovery: &Recovery) -> Checked {
        let told = &self.backup.groups[group].told;
        for (vm, of) in self.plan.groups[group].vms.iter().zip(&recovery.writers) {
            let cut = CountVector::of(WriterId(self.plan.vms[*vm].writer), of.recovered);
            let rightly = if of.is_recovered {
                self.is_whole(*vm, &cut)
            } else {
                self.is_left_out(*vm, told)
            };
            check(rightly, Checker::Prefix, || format!("vm {vm} is recovered: {of:?}"))?;
        }
        Ok(())
    }

    /// Rules 2 and 5: a view at the cut, while everything goes on, is a prefix, too.
    pub fn check_pin(&mut self, group: usize) -> Checked {
        if self.is_past_spoilt {
            return Ok(());
        }
        let pinned = self.with_open(group, |world, of| match of.pin() {
            Ok(pin) if world.backup.groups[group].recovered.is_none() => {
                world.backup.groups[group].shown = true;
                world.check_pinned(group, &pin)
            }
            // The disk may be full or fail; initialising has nothing to show.
            _ => Ok(()),
        });
        self.wake_group_now(group);
        pinned.unwrap_or(Ok(()))
    }

    fn check_pinned(&mut self, group: usize, pin: &Pin<MemoryFile>) -> Checked {
        self.counts.pins += 1;
        self.check_closed(group, &pin.cut)?;
        for vm in self.plan.groups[group].vms.clone() {
            if self.is_left_out(vm, &pin.cut) {
                continue;
            }
            let writer = WriterId(self.plan.vms[vm].writer);
            let expected = self.vms[vm].oracle.state_at(pin.cut.get(writer))?;
            let mut found = Vec::new();
            for (nth, image) in expected.iter().enumerate() {
                let name = format!("{}.d{nth}", self.plan.vms[vm].name);
                let view = pin.disks.iter().find(|(disk, _)| *disk == name);
                let (_, view) = view.expect("a view of each disk");
                let mut content = vec![0; image.len().min(view.size_bytes() as usize)];
                if let Err(error) = view.read(0, &mut content) {
                    return fail(Checker::Prefix, format!("a pinned disk of vm {vm}: {error}"));
                }
                found.push(content);
            }
            compare(vm, &pin.cut, &expected, &found)?;
        }
        Ok(())
    }

    /// Rules 3 and 9: what was acknowledged is there.
    pub fn check_reopened(&mut self, group: usize, journaled: &CountVector) -> Checked {
        let slot = &self.backup.groups[group];
        if let Some(recovered) = &slot.recovered {
            return check(journaled.covers(&recovered.flushed), Checker::OpensAgain, || {
                let flushed = &recovered.flushed;
                format!("recovered group {group} has {journaled}, its guest flushed {flushed}")
            });
        }
        check(journaled.covers(&slot.told_durable), Checker::AckDurable, || {
            let told = &slot.told_durable;
            format!("group {group} has {journaled} after a crash, acknowledged was {told}")
        })
    }

    /// Rules 1 and 2 of a cut: everything that was told is in it, and what depends is closed.
    fn check_cut(&mut self, group: usize, cut: &CountVector) -> Checked {
        for vm in self.plan.groups[group].members() {
            let missing = self.missing(group, cut, &self.vms[vm].client.known);
            check(missing.is_none(), Checker::OutputCommit, || {
                let (peer, point) = missing.expect("just seen");
                format!("a client of vm {vm} knows {point:?} of vm {peer}, recovered is {cut}")
            })?;
        }
        self.check_closed(group, cut)
    }

    /// Rule 2 under what really depends on what.
    pub(crate) fn check_closed(&self, group: usize, cut: &CountVector) -> Checked {
        for vm in &self.plan.groups[group].vms {
            // Nothing of it is recovered.
            if self.is_left_out(*vm, cut) {
                continue;
            }
            let have = cut.get(WriterId(self.plan.vms[*vm].writer));
            for (write, known) in self.vms[*vm].oracle.deps_in(have) {
                let missing = self.missing(group, cut, known);
                check(missing.is_none(), Checker::Closed, || {
                    let (peer, point) = missing.expect("just seen");
                    format!(
                        "{write:?} of vm {vm} depends on {point:?} of vm {peer}, the cut is {cut}"
                    )
                })?;
            }
        }
        Ok(())
    }

    /// Something of this that is not in the cut.
    pub fn missing(
        &self,
        group: usize,
        cut: &CountVector,
        known: &Known,
    ) -> Option<(usize, Point)> {
        let writers = self.plan.groups[group].vms.iter().copied();
        writers.zip(known.iter().copied()).find(|(peer, point)| {
            if self.is_left_out(*peer, cut) {
                return false;
            }
            let have = cut.get(WriterId(self.plan.vms[*peer].writer));
            !self.vms[*peer].oracle.has(*point, have)
        })
    }

    /// Rule 2, byte by byte, and rule 1 for the ledger.
    fn check_images(
        &mut self,
        group: usize,
        of: &mut Group<Memory>,
        cut: &CountVector,
    ) -> Checked<Vec<Images>> {
        let mut all = Vec::new();
        for vm in self.plan.groups[group].vms.clone() {
            if self.is_left_out(vm, cut) {
                all.push(Vec::new());
                continue;
            }
            let writer = WriterId(self.plan.vms[vm].writer);
            let expected = self.vms[vm].oracle.state_at(cut.get(writer))?;
            let found = read_disks(of, writer, &expected)?;
            compare(vm, cut, &expected, &found)?;
            self.check_rows(vm, &found)?;
            all.push(found);
        }
        Ok(all)
    }

    /// Everything that a client was told is on the disk, or something newer.
    pub(crate) fn check_rows(&self, vm: usize, disks: &Images) -> Checked {
        for (slot, told) in &self.vms[vm].client.rows {
            let extent = self.row_extent(vm, *slot);
            let found = &disks[0][extent.offset as usize..extent.end() as usize];
            let version = u64::from_le_bytes(found[8..16].try_into().expect("8 bytes"));
            let row = Row { slot: *slot, version };
            check(version >= *told && found == row_bytes(vm, row), Checker::ToldRows, || {
                format!(
                    "a client of vm {vm} was told of version {told} of row {slot}, found is {version}"
                )
            })?;
        }
        Ok(())
    }

    /// A recovery is on record.
    pub fn is_recovered(&mut self, group: usize, cut: CountVector, epoch: Epoch) -> Checked {
        note!(self, "group {group} is recovered: cut {cut} epoch {epoch}");
        // What was acknowledged right before it, and the refusals that follow it.
        let slot = &mut self.backup.groups[group];
        let outputs = slot.group_mut().expect("has just been recovered").take_outputs();
        slot.outputs_now(outputs);
        self.send_outputs(group)?;
        self.check_no_lease_holds(group)?;
        self.check_cut(group, &cut)?;
        self.check_nothing_lost(group, &cut)?;
        let slot = &mut self.backup.groups[group];
        check(cut.covers(&slot.told), Checker::AckDurable, || {
            format!("group {group} is recovered at {cut}, committed was {}", slot.told)
        })?;
        let images = self.with_open(group, |world, of| {
            if let Some(recovery) = of.recovery() {
                world.check_served(group, &recovery)?;
                world.check_exposed(group, &recovery, of.policies())?;
            }
            world.check_images(group, of, &cut)
        });
        let base = images.expect("has just been recovered")?;
        let slot = &mut self.backup.groups[group];
        let log = vec![Vec::new(); base.len()];
        slot.recovered = Some(Recovered { epoch, flushed: cut.clone(), cut, base, log });
        self.schedule.after(MS, Event::BackupGuest { group });
        self.begin_way_back(group);
        Ok(())
    }

    /// The guest of a recovered group writes, and flushes now and then.
    pub fn backup_guest(&mut self, group: usize) -> Checked {
        if !self.busy || self.backup.groups[group].recovered.is_none() {
            return Ok(());
        }
        let after = self.rng.span(4 * MS);
        self.schedule.after(after, Event::BackupGuest { group });
        let now = self.backup_now();
        let vm = *self.rng.pick(&self.plan.groups[group].vms);
        let writer = WriterId(self.plan.vms[vm].writer);
        let recovered = self.backup.groups[group].recovered.as_ref();
        let sizes: Vec<_> = recovered.map_or(Vec::new(), |of| {
            of.base[usize::from(writer.0)].iter().map(|disk| disk.len() as u64).collect()
        });
        if sizes.is_empty() {
            return Ok(());
        }
        let disk = self.rng.index(sizes.len());
        // What clients were told stays.
        let size = if disk == 0 { self.plan.vms[vm].ledger().start } else { sizes[disk] };
        let offset = self.rng.below(size);
        let len = self.rng.range(1..2000).min(size - offset);
        let zero = self.rng.chance(1, 4);
        let byte = self.rng.number() as u8;
        let flush = self.rng.chance(1, 4);
        let slot = &mut self.backup.groups[group];
        let Some(of) = slot.run.as_mut().and_then(|run| run.state.group_mut()) else {
            return Ok(());
        };
        let Some(recovered) = &mut slot.recovered else { return Ok(()) };
        let key = DiskKey { writer, disk: DiskId(disk as u16) };
        let data = vec![if zero { 0 } else { byte }; len as usize];
        let effect = if zero {
            GuestEffect::Zero { len_bytes: len as u32, no_hole: false }
        } else {
            GuestEffect::Write(Bytes::from(data.clone()))
        };
        // The journal numbers what was taken, also if it is not written yet.
        let log = &mut recovered.log[usize::from(writer.0)];
        if of.guest_write(now, key, offset, effect) {
            let seq = of.state().journaled().get(writer);
            log.retain(|w| w.seq < seq);
            log.push(GuestWrite { seq, disk: key.disk, offset, data });
        }
        let written = of.guest_written();
        if flush && written && !of.is_syncing() {
            of.flush();
            if of.accepts() {
                recovered.flushed.merge(&of.state().journaled());
            }
        }
        Ok(())
    }

    /// A recovered group's disks are its base and a prefix of what its guest wrote.
    pub fn check_recovered_disks(&mut self, group: usize, of: &mut Group<Memory>) -> Checked {
        let journaled = of.state().journaled();
        let epoch = of.epoch();
        for vm in self.plan.groups[group].vms.clone() {
            let writer = WriterId(self.plan.vms[vm].writer);
            let recovered = self.backup.groups[group].recovered.as_ref().expect("asked for it");
            check(epoch == recovered.epoch, Checker::OneEpoch, || {
                format!("group {group} is in epoch {epoch} after its recovery")
            })?;
            if recovered.base[usize::from(writer.0)].is_empty() {
                continue;
            }
            let expected = recovered.images(usize::from(writer.0), journaled.get(writer));
            let found = read_disks(of, writer, &expected)?;
            for (nth, (want, have)) in expected.iter().zip(&found).enumerate() {
                let difference = first_difference(want, have);
                check(difference.is_none(), Checker::OpensAgain, || {
                    format!("recovered disk {nth} of vm {vm} differs at {difference:?}")
                })?;
            }
        }
        Ok(())
    }

    /// Rule 10: queues that no single place bounds.
    pub fn check_bounds(&self) -> Checked {
        for (vm, state) in self.vms.iter().enumerate() {
            let Some(run) = &state.run else { continue };
            // A guest has so many requests, and copies so many reads under way.
            let most =
                self.plan.vms[vm].queue_depth + 2 + tidelock_daemon_core::copy_job::ASKED_MAX;
            check(run.queued() <= 2 * most, Checker::Bounded, || {
                format!("vm {vm}: {} operations at the sequencer", run.queued())
            })?;
        }
        for (nth, host) in self.hosts.iter().enumerate() {
            let Some(daemon) = &host.daemon else { continue };
            let out = daemon.link.out_bytes();
            check(out <= 2 << 20, Checker::Bounded, || {
                format!("host {nth}: {out} bytes encoded ahead of the network")
            })?;
        }
        for (nth, slot) in self.backup.groups.iter().enumerate() {
            // All that one read has brought goes in together. A link that mangles may bring things twice.
            let most = (INBOX_MAX_BYTES as usize).max(2 * self.plan.window_bytes + (64 << 10));
            let waits = slot.waiting_bytes();
            check(waits <= most, Checker::Bounded, || {
                format!("group {nth}: {waits} bytes wait at the backup")
            })?;
        }
        Ok(())
    }
}

/// Reads the disks of a writer as the backup has them now.
pub fn read_disks(of: &mut Group<Memory>, writer: WriterId, like: &Images) -> Checked<Images> {
    let mut found = Vec::new();
    for (nth, image) in like.iter().enumerate() {
        let key = DiskKey { writer, disk: DiskId(nth as u16) };
        let read = of.view(key).map_err(|e| e.to_string()).and_then(|view| {
            let mut content = vec![0; image.len().min(view.size_bytes() as usize)];
            view.read(0, &mut content).map_err(|e| e.to_string())?;
            Ok(content)
        });
        match read {
            Ok(content) => found.push(content),
            Err(error) => {
                return fail(Checker::OpensAgain, format!("disk {nth} of {writer}: {error}"));
            }
        }
    }
    Ok(found)
}

fn compare(vm: usize, cut: &CountVector, expected: &Images, found: &Images) -> Checked {
    for (nth, (want, have)) in expected.iter().zip(found).enumerate() {
        let difference = first_difference(want, have);
        check(difference.is_none(), Checker::Prefix, || {
            let at = difference.expect("just seen");
            format!(
                "disk {nth} of vm {vm} at cut {cut} differs from byte {at} on: {:02x?} instead of {:02x?}",
                &have[at.min(have.len())..have.len().min(at + 8)],
                &want[at..want.len().min(at + 8)]
            )
        })?;
    }
    Ok(())
}

/// Where a disk at the backup is not what it should be. It may be smaller, if it has not heard that it has grown: what
/// is missing counts as zeroes.
pub(crate) fn first_difference(want: &[u8], have: &[u8]) -> Option<usize> {
    if want == have {
        return None;
    }
    let both = want.iter().zip(have).position(|(a, b)| a != b);
    let beyond = || want[have.len()..].iter().position(|byte| *byte != 0).map(|at| have.len() + at);
    both.or_else(beyond)
}
