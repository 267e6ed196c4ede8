//! Recovery: the epoch is raised first, then the disks are writable here (DESIGN 2.9, rule 4).

use super::left_out::RecoveryWriter;
use super::parts::Gathered;
use super::{Group, GroupError, Now};
use crate::history::{Hold, PastError, Point};
use crate::manifest::Member;
use crate::text;
use bytes::Bytes;
use serde::{Deserialize, Serialize};
use std::sync::{Arc, RwLock};
use thiserror::Error;
use tidelock_cut::CutTracker;
use tidelock_planted::Bug;
use tidelock_protocol::commit::GroupCommit;
use tidelock_protocol::ids::{Epoch, MonoNanos, Seq, WriterId};
use tidelock_protocol::message::{CopyState, Form, RefusalKind};
use tidelock_protocol::record::{DiskChange, Effect, Payload, Record};
use tidelock_protocol::vector::CountVector;
use tidelock_storage::Storage;
use tidelock_store::extents::DiskKey;
use tidelock_store::journal::{
    BATCH_TARGET_BYTES, EpochStart, Exposure, Note, Shape, Standing, StateError, Ticket,
};
use tidelock_store::view::View;

/// A recovery that has happened.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Recovery {
    /// The group.
    pub group: String,
    /// The epoch now.
    pub epoch: Epoch,
    /// When, in milliseconds since the Unix epoch.
    pub at_unix_ms: u64,
    /// The operator stated that the primary is dead.
    pub primary_declared_dead: bool,
    /// By writer.
    pub writers: Vec<RecoveryWriter>,
    /// Arrival of the newest record that was taken, by this site's clock.
    #[serde(default)]
    pub last_write_unix_ms: Option<u64>,
    /// When the primary was heard last, by this site's clock; `None`: not since the server was started.
    #[serde(default)]
    pub last_heard_unix_ms: Option<u64>,
    /// A point of the past was asked for: what came later is left out on purpose.
    #[serde(default)]
    pub is_of_the_past: bool,
    /// How the cut was found.
    pub form: Form,
    /// Members without disks: they are booted like the others.
    pub followers: Vec<String>,
    /// Members whose gate may not have waited for this site: what their clients have seen may not be
    /// here, and they may go on answering until their hosts hear of this recovery.
    #[serde(default)]
    pub exposed: Vec<Exposure>,
}

/// Why a group cannot be recovered.
#[derive(Debug, Error)]
pub enum RecoverError {
    /// There is no whole copy.
    #[error(
        "the initial copy of {member} was never complete ({copy}): there is no state of its disks \
         to recover. If the primary still runs, let the copy finish; `status` shows it"
    )]
    Initialising {
        /// Which member.
        member: String,
        /// How far it came.
        copy: &'static str,
    },
    /// What is here is not the disks of any host yet.
    #[error(
        "the disks of {member} are still those that were seeded: {why}. If the primary still runs, let it finish; \
         `status` shows how far it is. To give up what it has and recover what was seeded, give --at \
         bookmark:{pin}", pin = super::SEEDED
    )]
    Seeded {
        /// Which member.
        member: String,
        /// Why they are not more than that.
        why: &'static str,
    },
    /// The old primary may still answer clients.
    #[error(
        "the old primary's lease may hold for another {remaining_ms} ms. Wait, or give \
         --primary-is-dead if it is certain that it no longer runs"
    )]
    Grace {
        /// How long.
        remaining_ms: u64,
        /// Members that have not given up their leases, with their hosts, if others have.
        kept_by: Vec<String>,
    },
    /// A host was heard after the recovery was asked for.
    #[error(
        "the primary lives: {host} was heard {:.1} s ago, after this recovery was asked for. Nothing was changed. To \
         move the group here with nothing lost, run `tidelock switchover {group}` on {host}. If {host} must not go on, \
         stop it or cut it off, and ask again",
        *heard_ago_ms as f64 / 1e3
    )]
    Lives {
        /// The group.
        group: String,
        /// The host.
        host: String,
        /// Time since it was heard.
        heard_ago_ms: u64,
    },
    /// It has been recovered to another state.
    #[error(
        "the group was recovered at {}, to another state than this. Without --at, `recover` says \
         which; other points in time can still be looked at with `view`",
        text::utc(*at_unix_ms)
    )]
    Elsewhere {
        /// When.
        at_unix_ms: u64,
    },
    /// A member's disks had no state then.
    #[error(
        "the disks of {member} were not here yet at that time. Choose a later point, or look at \
         the others with `view`"
    )]
    NotYetThere {
        /// Which member.
        member: String,
    },
    /// The point cannot be shown any more.
    #[error(transparent)]
    Past(PastError),
    /// Some of it cannot be read.
    #[error("{0}")]
    Damaged(String),
    /// The recovery cannot be put on record.
    #[error("the recovery cannot be put on record: {0}")]
    Journal(String),
    /// Being put on record: to be asked again when this is durable.
    #[error("the recovery is being put on record")]
    NotYet(Ticket),
    /// It cannot for now: asked again, it goes on when there is room.
    #[error("the recovery cannot be put on record: {0}")]
    NoRoom(String),
    /// The group does not work.
    #[error(transparent)]
    Group(#[from] GroupError),
}

/// The group's disks at one cut, read-only, while everything goes on. The images do not move until
/// it is dropped, unless the journal grows to its limit meanwhile.
#[derive(Debug)]
pub struct Pin<F> {
    /// Name, key and view of each disk.
    pub disks: Vec<(String, View<F>)>,
    /// The cut.
    pub cut: CountVector,
    hold: Hold,
}

/// An operator's answers to the questions of a recovery.
#[derive(Clone, Copy, Debug)]
pub struct RecoverHow<'a> {
    /// The primary is dead.
    pub primary_declared_dead: bool,
    /// To a point of the past; `None`: with everything that can be.
    pub point: Option<&'a Point>,
    /// Also if some of it cannot be read.
    pub accepts_damage: bool,
}

/// A disk's name (member.disk), key and view.
pub type NamedView<F> = (String, DiskKey, View<F>);

impl<F> Pin<F> {
    /// Whether it was taken away: what is read from now on is of no cut.
    #[must_use]
    pub fn is_revoked(&self) -> bool {
        self.hold.is_revoked()
    }
}

impl<S: Storage> Group<S> {
    /// The recovery that made this site the primary, if it is.
    #[must_use]
    pub fn recovery(&self) -> Option<Recovery> {
        let state = self.journal.state();
        let start = state.recovered().filter(|_| self.promoted)?;
        let writers = (0..self.manifest.writers.len() as u16).map(WriterId);
        let writers = writers.map(|writer| self.taken_of(writer, start));
        let of = self.manifest.left_out.as_ref().filter(|of| of.epoch == start.epoch);
        Some(Recovery {
            group: self.manifest.group.clone(),
            epoch: start.epoch,
            at_unix_ms: start.at_unix_ms,
            primary_declared_dead: start.primary_declared_dead,
            writers: writers.collect(),
            last_write_unix_ms: of.and_then(|of| of.last_write_unix_ms),
            last_heard_unix_ms: of.and_then(|of| of.last_heard_unix_ms),
            is_of_the_past: self.manifest.chosen(start.epoch).is_some(),
            form: state.form,
            followers: self.manifest.followers.keys().cloned().collect(),
            exposed: start.exposed.clone(),
        })
    }

    /// Recovers the group with everything that can be: once. Asked again it gives the same answer. Waits for its disk.
    pub fn recover(
        &mut self,
        now: Now,
        primary_declared_dead: bool,
    ) -> Result<Recovery, RecoverError> {
        self.recover_and_wait(now, primary_declared_dead, None, false)
    }

    /// The same at a point of the past: what came later is left out for good.
    pub fn recover_at(
        &mut self,
        now: Now,
        primary_declared_dead: bool,
        point: &Point,
    ) -> Result<Recovery, RecoverError> {
        self.recover_and_wait(now, primary_declared_dead, Some(point), false)
    }

    /// The same, also if some of the disks' data is damaged: reads of that fail.
    pub fn recover_accepting(
        &mut self,
        now: Now,
        primary_declared_dead: bool,
        point: Option<&Point>,
    ) -> Result<Recovery, RecoverError> {
        self.recover_and_wait(now, primary_declared_dead, point, true)
    }

    fn recover_and_wait(
        &mut self,
        now: Now,
        primary_declared_dead: bool,
        point: Option<&Point>,
        accepts_damage: bool,
    ) -> Result<Recovery, RecoverError> {
        let how = RecoverHow { primary_declared_dead, point, accepts_damage };
        let mut has_settled = false;
        loop {
            match self.try_recover(now, how, has_settled) {
                Err(RecoverError::NotYet(_)) => self.flush(),
                recovered => return recovered,
            }
            has_settled = true;
        }
    }

    /// The same without waiting for the disk: [`RecoverError::NotYet`] is answered until the recovery is on stable
    /// storage. `has_settled`: what had arrived when the recovery was asked for is durable, as far as it can be.
    pub fn try_recover(
        &mut self,
        now: Now,
        how: RecoverHow<'_>,
        has_settled: bool,
    ) -> Result<Recovery, RecoverError> {
        let RecoverHow { primary_declared_dead, point, accepts_damage } = how;
        self.tick(now);
        self.write();
        if self.is_stuck() {
            self.storage.use_reserve();
            self.write_anyway();
            self.storage.end_use_of_reserve();
        }
        self.check_journal()?;
        if let Some(recovery) = self.recovery() {
            // There may have been no room for the manifest's part of it.
            let _ = self.manifest.write(&self.storage);
            return match point.filter(|point| !self.is_recovered_to(point)) {
                Some(_) => Err(RecoverError::Elsewhere { at_unix_ms: recovery.at_unix_ms }),
                None => Ok(recovery),
            };
        }
        let ticket = self.journal.ticket();
        // Records that have arrived are part of it, as far as they can be.
        let waits = !has_settled && !self.is_durable(ticket);
        if self.is_being_recovered() || waits {
            return Err(RecoverError::NotYet(ticket));
        }
        self.check_whole(point)?;
        if !accepts_damage {
            self.check_undamaged(point)?;
        }
        let remaining_ms = self.grace.remaining_ms(now.mono);
        let is_waited_for = !primary_declared_dead && !tidelock_planted::is(Bug::GraceCutShort);
        if remaining_ms > 0 && is_waited_for {
            return Err(RecoverError::Grace { remaining_ms, kept_by: self.lease_kept_by() });
        }
        self.storage.use_reserve();
        let recovered = self.put_recovery_on_record(now, primary_declared_dead, point);
        self.storage.end_use_of_reserve();
        recovered?;
        Err(RecoverError::NotYet(self.journal.ticket()))
    }

    /// A full disk does not keep it from that: the reserve is used.
    fn put_recovery_on_record(
        &mut self,
        now: Now,
        primary_declared_dead: bool,
        point: Option<&Point>,
    ) -> Result<(), RecoverError> {
        // The images must not pass it before it is on record.
        let kept = point.map(|point| self.keep_for_recovery(point)).transpose()?;
        let cut = match &kept {
            Some((point, _)) => point.cut.clone(),
            None => self.cut.settle(self.commit.committed()).clone(),
        };
        let state = self.journal.state();
        let writers = || (0..state.writers.len() as u16).map(WriterId);
        let joining: Vec<_> = writers().filter(|writer| self.cut.is_joining(*writer)).collect();
        let is_copying = |writer: &WriterId| {
            let of = &state.writers[writer.index()];
            let resyncs = of.copy == CopyState::Resyncing && of.standing != Standing::Removed;
            resyncs || joining.contains(writer)
        };
        let start = EpochStart {
            epoch: state.epoch.next(),
            cut,
            journaled: state.journaled(),
            resyncing: writers().filter(is_copying).collect(),
            at_unix_ms: now.unix_ms,
            primary_declared_dead,
            exposed: self.exposed(now),
        };
        let cut = start.cut.clone();
        self.bring_back_disks(&cut)?;
        let chosen = kept.as_ref().map(|(point, _)| point.hlc);
        let newest = || self.history().ok()?.newest().ok().map(|point| point.arrived_ms);
        let last_write_unix_ms = kept.map(|(point, _)| point.arrived_ms).or_else(newest);
        self.remember_left_out(start.epoch, chosen, last_write_unix_ms, now);
        self.leave_out(joining).map_err(|e| RecoverError::Journal(e.to_string()))?;
        let note = Note::EpochStart(start);
        self.journal.stage_note(&note).map_err(|e| RecoverError::Journal(e.to_string()))?;
        // From here on nothing of the old primary is taken. That it is fenced it hears when this
        // is durable: it never forgets, and so must this site.
        self.fenced.extend(self.followers.drain(..).map(|follower| follower.link));
        for slot in &mut self.slots {
            slot.receiver = None;
            slot.gathered = Gathered::default();
            self.fenced.extend(slot.link.take());
        }
        self.floors.clear();
        self.asked.clear();
        self.for_everyone = None;
        self.commit = GroupCommit::new(cut);
        self.cut = CutTracker::new(self.journal.state());
        // The status may be asked for while the note is on its way.
        self.cut.settle(self.commit.committed());
        if let Some(in_flight) = &mut self.in_flight {
            in_flight.forget_receivers();
        }
        self.write_anyway();
        self.check_journal()
    }

    /// Writes what is staged, if need be in the reserve's room.
    fn write_anyway(&mut self) {
        if let Err(error) = self.write_staged_anyway() {
            self.journal_failed(error);
        }
    }

    /// Of writers whose initial copies end beyond the cut the journal says that they are whole, and nothing of the
    /// recovery would say that they are not: they are removed. In one batch with that, so both are lost or neither.
    fn leave_out(&mut self, joining: Vec<WriterId>) -> Result<(), StateError> {
        if joining.is_empty() {
            return Ok(());
        }
        let mut removed = self.removed();
        removed.extend(joining);
        removed.sort_unstable();
        removed.dedup();
        let state = self.journal.state();
        let (writers, form) = (state.writers.len() as u16, state.form);
        self.journal.stage_note(&Note::Shape(Shape { writers, removed, joining: false, form }))
    }

    fn is_recovered_to(&self, point: &Point) -> bool {
        self.journal.state().recovered().is_some_and(|start| start.cut == point.cut)
    }

    /// Where the point is now, and what keeps it.
    fn keep_for_recovery(&mut self, point: &Point) -> Result<(Point, Hold), RecoverError> {
        let history = self.history()?;
        let point = history.locate(point)?;
        let served = (0..self.manifest.writers.len() as u16).map(WriterId);
        if let Some(missing) =
            served.filter(|w| self.is_served(*w)).find(|w| !point.writers.contains(w))
        {
            let member = self.manifest.name_of(missing).to_owned();
            return Err(RecoverError::NotYetThere { member });
        }
        let hold = history.hold(&point, "a recovery")?;
        Ok((point, hold))
    }

    /// A recovery is not on record yet: there may be no room for it.
    pub(super) fn is_being_recovered(&self) -> bool {
        !self.promoted && self.journal.state().recovered().is_some()
    }

    /// A recovery that is durable by now: the disks are this site's.
    pub(super) fn finish_recovery(&mut self) -> Result<(), GroupError> {
        if self.promoted || self.durable_state.recovered().is_none() {
            return Ok(());
        }
        self.restart_receivers();
        // Made again: without what is void now.
        self.overlay = None;
        self.overlay()?;
        self.promoted = true;
        self.has_become_void();
        let reason = self.fenced_reason().expect("recovered");
        for link in std::mem::take(&mut self.fenced) {
            self.refuse_now(link, RefusalKind::Fenced, reason.clone());
        }
        Ok(())
    }

    /// The time from which on a recovery waits for no lease.
    #[must_use]
    pub fn may_recover_from(&self) -> MonoNanos {
        self.grace.until()
    }

    /// Whether `recover` would work, but for the grace.
    pub(super) fn is_recoverable(&self) -> bool {
        self.broken.is_none() && self.check_whole(None).is_ok()
    }

    /// What a writer is to a recovery: one that was added is not waited for before the end of its initial copy is in
    /// the cut.
    pub(super) fn standing(&self, writer: WriterId) -> Standing {
        match self.journal.state().writers[writer.index()].standing {
            Standing::Member if self.cut.is_joining(writer) => Standing::Joining,
            standing => standing,
        }
    }

    /// Whether a writer's disks are those of a recovered group.
    pub(super) fn is_served(&self, writer: WriterId) -> bool {
        let is_whole =
            |copy| copy == CopyState::Whole || tidelock_planted::is(Bug::NewcomerNotWaitedFor);
        let of = self.journal.state().writer(writer);
        of.is_some_and(|of| of.standing != Standing::Removed && is_whole(of.copy))
            && !self.cut.is_joining(writer)
    }

    /// Whether every member's disks have a state, or had one at that point.
    fn check_whole(&self, point: Option<&Point>) -> Result<(), RecoverError> {
        for (i, copy) in self.durable_state.writers.iter().map(|of| of.copy).enumerate() {
            let writer = WriterId(i as u16);
            let before_all = point.is_some_and(|point| point.cut.get(writer) == Seq::ZERO);
            let copy = match copy {
                _ if self.standing(writer) != Standing::Member => continue,
                CopyState::Seeded if before_all => continue,
                CopyState::Seeded => {
                    let member = self.manifest.writers[i].clone();
                    let why = match self.is_seeded(i) {
                        true => "no host has compared its own with them",
                        false => "the comparison with its host's has not ended",
                    };
                    return Err(RecoverError::Seeded { member, why });
                }
                CopyState::Whole | CopyState::Resyncing
                    if self.cut.is_copying(writer) && !before_all =>
                {
                    "its end depends on records of other members that have not arrived"
                }
                CopyState::Whole | CopyState::Resyncing => continue,
                CopyState::Empty => "nothing has arrived",
                CopyState::Partial => "a part has arrived",
            };
            let member = self.manifest.writers[i].clone();
            return Err(RecoverError::Initialising { member, copy });
        }
        Ok(())
    }

    fn is_seeded(&self, writer: usize) -> bool {
        self.manifest.members[writer].as_ref().is_some_and(Member::is_seeded)
    }

    pub(super) fn check_journal(&self) -> Result<(), RecoverError> {
        if let Some(reason) = self.broken.clone() {
            return Err(RecoverError::Journal(reason));
        }
        let stuck = self.journal.staged_bytes() > 0;
        match self.stall_reason().filter(|_| stuck) {
            Some(reason) => Err(RecoverError::NoRoom(reason)),
            None => Ok(()),
        }
    }

    /// The group's disks, for serving them: member.disk and the view of now.
    pub fn recovered_disks(&mut self) -> Result<Vec<NamedView<S::File>>, GroupError> {
        let disks: Vec<_> = self
            .manifest
            .disks()
            .filter(|(writer, disk)| {
                let member = self.manifest.member(*writer);
                self.is_served(*writer) && member.is_some_and(|m| !m.is_removed(disk.id))
            })
            .map(|(writer, disk)| {
                let key = DiskKey { writer, disk: disk.id };
                (self.manifest.disk_name(key), key)
            })
            .collect();
        let view = |(name, key)| Ok((name, key, self.view(key)?));
        disks.into_iter().map(view).collect()
    }

    /// A write to a disk of a recovered group. It is readable and ordered after
    /// [`Group::guest_written`], durable when its ticket is. Whether it was taken.
    pub fn guest_write(
        &mut self,
        now: Now,
        key: DiskKey,
        offset: u64,
        effect: GuestEffect,
    ) -> bool {
        self.tick(now);
        if !self.accepts() || !self.promoted {
            return false;
        }
        let super::WriterSlot { receiver: Some(receiver), flushed, .. } =
            &mut self.slots[key.writer.index()]
        else {
            return false;
        };
        let effect = match effect {
            GuestEffect::Write(data) => Effect::Write(Payload::new(data)),
            GuestEffect::Zero { len_bytes, no_hole } => Effect::Zero { len_bytes, no_hole },
        };
        let record = Record {
            writer: key.writer,
            seq: receiver.received().next(),
            epoch: receiver.epoch(),
            hlc: self.clock.tick(now.unix_ms),
            deps: CountVector::new(),
            body: DiskChange {
                disk: key.disk,
                offset,
                copy: false,
                flushed: std::mem::take(flushed),
                effect,
            },
        };
        if receiver.admit(&record).is_err() {
            return false;
        }
        self.journal.stage_record(record).expect("admitted");
        if self.journal.staged_bytes() >= BATCH_TARGET_BYTES {
            self.guest_written();
        }
        true
    }

    /// A recovered guest asks for a flush, which the next sync does; or its write was one with FUA. Its next record
    /// says so.
    pub fn guest_flush(&mut self, writer: WriterId) {
        self.slots[writer.index()].flushed = true;
    }

    /// Makes guests' writes readable. Whether it worked: if not, they are not completed.
    pub fn guest_written(&mut self) -> bool {
        self.write();
        self.accepts() && self.journal.staged_bytes() == 0
    }

    /// The disks at the group's cut, while everything goes on.
    pub fn pin(&mut self) -> Result<Pin<S::File>, RecoverError> {
        self.check_journal()?;
        self.check_whole(None)?;
        let cut = self.cut.cut().clone();
        // The images hold nothing beyond the cut and, held, stay there; a fold that runs right now
        // was given this cut or an older one.
        let history = self.history()?;
        let point = history.newest()?;
        let hold = history.hold(&point, "an export")?;
        let overlay = history.overlay(&point).map_err(GroupError::from)?;
        let overlay = Arc::new(RwLock::new(overlay));
        let is_served = |writer| self.standing(writer) == Standing::Member;
        let served = self.manifest.disks_at(&point.cut).filter(|(writer, _)| is_served(*writer));
        let disks = served.map(|(writer, disk)| {
            let key = DiskKey { writer, disk: disk.id };
            let name = self.manifest.disk_name(key);
            let image = self.images[&key].clone();
            (name, View::new(key, disk.size_bytes, image, Arc::clone(&overlay)))
        });
        let disks = disks.collect();
        Ok(Pin { disks, cut, hold })
    }
}

/// What a guest of a recovered group asks for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum GuestEffect {
    /// Data.
    Write(Bytes),
    /// Zeroes.
    Zero {
        /// Length of the extent.
        len_bytes: u32,
        /// Blocks stay allocated.
        no_hole: bool,
    },
}
