//! Attaching a member: who may, under which epoch, and what becomes of its copy.
//!
//! The copy state after an attachment, by what the backup believes of the last run ([`judging`](super::judging)):
//!
//! | copy | continues | clean | log, everything |
//! |---|---|---|---|
//! | empty | empty | empty | empty |
//! | partial | partial | partial | partial |
//! | whole | whole | whole | **resyncing** |
//! | resyncing | resyncing | resyncing | resyncing |
//! | seeded | seeded | seeded | seeded |
//!
//! A disk that is added, or has grown, makes a whole copy one that is resyncing, and a second run an empty one one
//! that has begun: of the first nothing may have arrived, but its guest was served.

use super::disks::{self, present};
use super::durable::{Immediate, NotOnRecord, NotYet, OfDurable};
use super::judging::{OnRecord, judge};
use super::ownership;
use super::{Group, GroupError, GroupOptions, JOURNAL_DIR, Link, Now, WriterSlot};
use crate::manifest::{Manifest, Member};
use std::collections::BTreeMap;
use std::io;
use tidelock_cut::CutTracker;
use tidelock_planted::Bug;
use tidelock_protocol::bounds::{self, Plausible};
use tidelock_protocol::hlc::Hlc;
use tidelock_protocol::ids::{Epoch, Incarnation, Seq, WriterId};
use tidelock_protocol::limits;
use tidelock_protocol::machine::Machine;
use tidelock_protocol::message::{
    Attach, Attached, Basis, CleanEnd, CopyState, LogAge, RefusalKind, Role, StreamState, Writing,
};
use tidelock_protocol::receiver::Receiver;
use tidelock_protocol::vector::CountVector;
use tidelock_storage::Storage;
use tidelock_storage::json::FileError;
use tidelock_store::FORMAT;
use tidelock_store::journal::{self, BATCH_TARGET_BYTES, Journal, Note, Position, Standing, State};

/// The longest grace that a host may ask for: an hour.
const GRACE_MAX_MS: u64 = 3_600_000;

pub(super) type Refusal = (RefusalKind, String);

pub(super) fn refuse<T>(kind: RefusalKind, reason: impl Into<String>) -> Result<T, Refusal> {
    Err((kind, reason.into()))
}

/// The reason why a member is not attached.
#[derive(Debug)]
pub(super) enum Unattached {
    Refused(Refusal),
    /// Something that it is to act on is not on stable storage.
    NotYet(NotYet),
}

impl From<Refusal> for Unattached {
    fn from(refusal: Refusal) -> Self {
        Self::Refused(refusal)
    }
}

impl From<NotOnRecord> for Unattached {
    fn from(not: NotOnRecord) -> Self {
        match not {
            NotOnRecord::NotYet(not_yet) => Self::NotYet(not_yet),
            NotOnRecord::Cannot(reason) => Self::Refused((RefusalKind::Stopping, reason)),
        }
    }
}

/// The copy state after an attachment.
#[must_use]
pub(super) fn after_attach(copy: CopyState, basis: &Basis) -> CopyState {
    match may_have_missed(basis) {
        true if copy == CopyState::Whole => CopyState::Resyncing,
        _ => copy,
    }
}

/// Whether the host's disks may hold what its records do not say.
fn may_have_missed(basis: &Basis) -> bool {
    matches!(basis, Basis::Log | Basis::Everything { .. })
}

/// Everything about an attachment that can be judged without the group.
fn check(attach: &Attach) -> Result<(), Refusal> {
    let invalid = |reason: &str| refuse(RefusalKind::Invalid, reason);
    let Attach { group, member, writers, tagging, .. } = attach;
    if ![group, member].into_iter().chain(writers).all(|name| bounds::is_name(name)) {
        return invalid(BAD_NAME);
    }
    if writers.is_empty() || writers.len() > usize::from(limits::WRITERS_MAX) {
        return invalid("a group has 1 to 64 writers");
    }
    if !are_unique(writers.iter()) {
        return invalid("two writers have the same name");
    }
    if attach.lease_ms >= attach.grace_ms || attach.grace_ms > GRACE_MAX_MS {
        return invalid("the lease must be shorter than the grace, and the grace at most an hour");
    }
    let peers = tagging.as_ref().map(|tagging| &*tagging.peers);
    bounds::check_peers(peers.unwrap_or_default()).or_else(invalid)?;
    attach.machine.as_ref().map_or(Ok(()), Machine::check).or_else(invalid)?;
    match (&attach.role, peers) {
        (Role::Follower, Some(_)) if writers.contains(member) => {
            invalid("the member is one of the group's writers, and was attached without disks")
        }
        (Role::Follower, Some(peers)) => ownership::check_is_named(peers, member),
        (Role::Writer(_), None) if writers.len() > 1 => invalid(NOT_TAGGED),
        (Role::Follower, None) => invalid(NOT_TAGGED),
        (Role::Writer(writing), _) => check_writing(attach, writing),
    }
}

/// The same for a writer's disks.
fn check_writing(attach: &Attach, writing: &Writing) -> Result<(), Refusal> {
    let invalid = |reason: &str| refuse(RefusalKind::Invalid, reason);
    let disks = &writing.disks;
    if !disks.iter().all(|disk| bounds::is_name(&disk.name)) {
        return invalid(BAD_NAME);
    }
    if !are_unique(disks.iter().map(|disk| &disk.name)) {
        return invalid("two disks have the same name");
    }
    if attach.writers.get(writing.writer.index()) != Some(&attach.member) {
        return invalid("the member is not the writer of that index");
    }
    if present(disks).is_empty() || disks.len() > usize::from(limits::DISKS_MAX) {
        return invalid("a writer has 1 to 64 disks");
    }
    for (nth, disk) in disks.iter().enumerate() {
        if i64::try_from(disk.size_bytes).is_err() {
            return invalid("a disk has more than 8 EiB");
        }
        if disk.id.0 >= limits::DISKS_MAX || disks[..nth].iter().any(|d| d.id == disk.id) {
            return invalid("disk numbers are not different, or not below 64");
        }
    }
    Ok(())
}

const NOT_TAGGED: &str =
    "the group has several members, and the attachment does not say how their packets are tagged";

const BAD_NAME: &str = "a group, member or disk name is not 1 to 64 letters, digits, '.', '_', '-'";

pub(super) fn are_unique<'a>(names: impl Iterator<Item = &'a String>) -> bool {
    let mut names: Vec<_> = names.collect();
    names.sort_unstable();
    names.windows(2).all(|pair| pair[0] != pair[1])
}

impl<S: Storage> Group<S> {
    /// Makes a new group in an empty directory, as the first member to attach describes it.
    /// The group exists when this has returned; the member is not attached yet.
    pub fn create(
        storage: S,
        host: &str,
        attach: &Attach,
        now: Now,
        options: GroupOptions,
    ) -> Result<Self, GroupCreateError> {
        check(attach).map_err(GroupCreateError::Refused)?;
        if attach.writing().is_none() {
            let reason =
                format!("group {} is not there yet: its first writer makes it", attach.group);
            return Err(GroupCreateError::Refused((RefusalKind::Stopping, reason)));
        }
        if options.hosts.as_ref().is_some_and(|hosts| !hosts.iter().any(|h| h == host)) {
            let reason = forbidden(host, &attach.group);
            return Err(GroupCreateError::Refused((RefusalKind::Forbidden, reason)));
        }
        if let Some(id) = attach.group_id {
            // Not the backup that this host knows.
            let reason = format!(
                "there is no group {} at this backup server, but the host knows it as {id}: it was protected by another \
                 backup server or from another data directory, or the group was removed here. Nothing is replicated. \
                 Check backup.address at the host. To begin anew at this server, stop tidelockd there, remove the \
                 group's directory below state_dir, and start it: the disks are copied",
                attach.group
            );
            return Err(GroupCreateError::Refused((RefusalKind::Mismatch, reason)));
        }
        options
            .check_member(&attach.group, host, &attach.member)
            .and_then(|()| options.check_new(&attach.group, &attach.writers))
            .map_err(GroupCreateError::Refused)?;
        let (judge, none) = (Plausible::of_hosts(options.clock_bound_ms, Hlc(0)), Incarnation(0));
        judge.attach(attach, none, now.unix_ms).map_err(|error| {
            GroupCreateError::Refused((RefusalKind::Implausible, error.to_string()))
        })?;
        let manifest = Manifest {
            format: FORMAT,
            id: super::fresh_id(&storage),
            tag_secret: super::fresh_secret(&storage),
            group: attach.group.clone(),
            created_by: host.to_owned(),
            writers: attach.writers.clone(),
            members: attach.writers.iter().map(|_| None).collect(),
            grace_ms: attach.grace_ms,
            peers: Vec::new(),
            followers: BTreeMap::new(),
            left_out: None,
        };
        let wrong = |source| GroupError::Image { path: "directory".into(), source };
        if holds_data(&storage, options.journal).map_err(wrong)? {
            let reason = format!(
                "group {} has no group.json at the backup, but its directory holds data: restore that file, or move the \
                 directory away to begin anew",
                attach.group
            );
            return Err(GroupCreateError::Refused((RefusalKind::Damaged, reason)));
        }
        clear(&storage).map_err(wrong)?;
        let state = State::new(manifest.writers.len());
        let cut = CutTracker::new(&state);
        let journal = Journal::create(storage.clone(), JOURNAL_DIR, state, options.journal)
            .map_err(|e| GroupCreateError::Group(e.into()))?;
        manifest.write(&storage).map_err(|e| GroupCreateError::Group(e.into()))?;
        Self::assemble(
            storage,
            options,
            manifest,
            journal,
            cut,
            BTreeMap::new(),
            super::FoldState::default(),
            now,
        )
        .map_err(GroupCreateError::Group)
    }

    /// A member attaches: the answer is among the outputs. Waits for its disk.
    pub fn attach(&mut self, now: Now, link: Link, host: &str, attach: &Attach) {
        self.flush();
        while self.try_attach(now, link, host, attach).is_err() {
            self.flush();
        }
    }

    /// The same without waiting for the disk: what the member acts on is on stable storage when it is answered.
    pub fn try_attach(
        &mut self,
        now: Now,
        link: Link,
        host: &str,
        attach: &Attach,
    ) -> Result<(), NotYet> {
        let attached = match self.attached(now, link, host, attach) {
            Ok(attached) => attached,
            Err(Unattached::Refused((kind, reason))) => {
                self.refuse_now(link, kind, reason);
                return Ok(());
            }
            Err(Unattached::NotYet(not_yet)) => return Err(not_yet),
        };
        let copy = attached.stream.as_ref().map(|stream| stream.copy);
        self.outputs.forget(link, &self.journal.durable());
        self.say_of_durable(link, OfDurable::Attached(attached));
        self.held.is_attached(now.mono, link, &self.all_links());
        let is_of_several = attach.tagging.is_some();
        if is_of_several {
            self.tell_tag_terms(now, link);
            self.tell_for_everyone(link);
        }
        self.say_stalled(link);
        if let Some((writing, copy)) = attach.writing().zip(copy).filter(|_| is_of_several) {
            self.sound(writing.writer, copy);
        }
        Ok(())
    }

    fn say_stalled(&mut self, link: Link) {
        if let Some(reason) = self.stall_reason() {
            self.say_now(link, Immediate::Stalled(Some(reason)));
        }
    }

    fn attached(
        &mut self,
        now: Now,
        link: Link,
        host: &str,
        attach: &Attach,
    ) -> Result<Attached, Unattached> {
        check(attach)?;
        self.check_host(host)?;
        let writing = attach.writing();
        let known = writing.and_then(|writing| self.manifest.member(writing.writer));
        let known = known.map_or(Incarnation(0), |member| member.incarnation);
        if let Err(error) = self.plausible.attach(attach, known, self.judging_ms(now)) {
            self.implausible += 1;
            return Err((RefusalKind::Implausible, error.to_string()).into());
        }
        if attach.group != self.manifest.group {
            let reason = format!("this is group {}", self.manifest.group);
            return Err((RefusalKind::Mismatch, reason).into());
        }
        self.check_identity(attach.group_id)?;
        self.check_epoch(attach.epoch)?;
        self.check_claim(host, &attach.member)?;
        match writing {
            Some(writing) => self.check_run(link, host, attach, writing)?,
            None => self.check_newest(&attach.member, link)?,
        }
        self.check_machine_budget(&attach.member, attach.machine.as_ref())?;
        self.check_received(&attach.member, writing)?;
        match &attach.tagging {
            Some(tagging) => self.reshape(now, host, &attach.writers, tagging)?,
            None => self.reshape_alone(now, host, &attach.writers)?,
        }
        if let Some(reason) = self.broken.clone() {
            return Err((RefusalKind::Stopping, reason).into());
        }
        let judged = writing.map(|writing| self.judge_run(attach, writing)).transpose()?;
        self.keep_machine(&attach.member, attach.machine.as_ref())?;
        self.remember(host, attach).map_err(|e| (RefusalKind::Stopping, e.to_string()))?;
        self.grace.set_grace_ms(self.manifest.grace_ms);
        self.may_have_lease(&attach.member);
        self.attached_by.insert(attach.member.clone(), link.connection);
        match writing {
            Some(writing) => self.take_over(now, link, attach, writing),
            None => self.follow(now, link, &attach.member),
        }
        let durable = writing.map_or(Seq::ZERO, |writing| self.commit.durable_of(writing.writer));
        let stream = writing.zip(judged).map(|(writing, (copy, basis))| StreamState {
            last_hlc: self.journal.state().last_hlc,
            copy: copy.told(),
            begun: self.slots[writing.writer.index()].gathered.begun(),
            basis,
        });
        let progress = self.progress(durable, &self.told());
        Ok(Attached { group_id: self.manifest.id, epoch: self.epoch(), progress, stream })
    }

    /// Records of the member's run before are durable, as far as there is room for it, and what follows from its end
    /// is done.
    fn check_received(&self, member: &str, writing: Option<&Writing>) -> Result<(), Unattached> {
        if let Some(ticket) = self.ends_behind(member) {
            self.check_on_record(ticket)?;
        }
        let is_durable = writing.is_none_or(|writing| !self.has_undurable(writing.writer));
        if !is_durable && !self.is_stuck() {
            self.check_on_record(self.journal.ticket())?;
        }
        Ok(())
    }

    fn has_undurable(&self, writer: WriterId) -> bool {
        let slot = self.slots.get(writer.index());
        let received = slot.and_then(|slot| slot.receiver.as_ref()).map(Receiver::received);
        received.is_some_and(|received| received > self.commit.durable_of(writer))
    }

    /// A writer may be attached by the newest run of its host, with the disks that it had.
    fn check_run(
        &self,
        link: Link,
        host: &str,
        attach: &Attach,
        writing: &Writing,
    ) -> Result<(), Refusal> {
        self.check_has_record(host, attach, writing)?;
        self.check_disks(&attach.member, writing)?;
        if self.links().any(|(i, other)| other == link && i != writing.writer.index()) {
            return refuse(RefusalKind::Invalid, "the channel is another member's");
        }
        let last = self.manifest.member(writing.writer).map(|m| m.incarnation);
        if last.is_some_and(|last| writing.incarnation < last) {
            let (group, member) = (&self.manifest.group, &attach.member);
            return refuse(
                RefusalKind::Superseded,
                format!(
                    "a newer run of {host}'s daemon has attached {member}, so this run must not write to it. If no other \
                     tidelockd runs with this host's name and disks, the host's state directory is from an older \
                     moment, or its clock was put back since it was installed: then stop it, run `tidelock-backup member \
                     move {group} {member} --to {host}` at the backup server, and start it"
                ),
            );
        }
        if last == Some(writing.incarnation) {
            self.check_newest(&attach.member, link)?;
        }
        Ok(())
    }

    /// The copy state that the run goes on with, which is on record when this returns, and the verdict behind it.
    fn judge_run(
        &mut self,
        attach: &Attach,
        writing: &Writing,
    ) -> Result<(CopyState, Basis), Unattached> {
        let writer = writing.writer;
        let last = self.manifest.member(writer).map(|m| m.incarnation);
        let record = self.on_record(writer);
        let basis = judge(&record, writing);
        let goes_on = basis == Basis::Continues;
        let is_of_another = last == Some(writing.incarnation) && !record.knows(writing.run());
        if writing.before == Some(writing.run()) && is_of_another {
            // A daemon that has sent records goes on, and another run has taken its place. Were its number above all that
            // were heard of, the record would be of an older moment, and no other run there.
            let reason = format!(
                "another run has taken {} over: this host's disks are not what the backup has any more",
                attach.member
            );
            return Err((RefusalKind::Superseded, reason).into());
        }
        if !goes_on && self.has_undurable(writer) {
            // Records of the run before are taken and cannot be written: a new run cannot be
            // told where the stream ends.
            return Err((RefusalKind::Stopping, self.stall_reason().unwrap_or_default()).into());
        }
        let was = self.journal.state().writers[writer.index()];
        if was.standing == Standing::Removed {
            let reason = format!("{} was removed from this group", attach.member);
            return Err((RefusalKind::Mismatch, reason).into());
        }
        let known = self.manifest.member(writer);
        let has_more = known.is_some_and(|member| disks::has_more(member, writing));
        let mut copy = after_attach(was.copy, &basis);
        if has_more && copy == CopyState::Whole {
            copy = CopyState::Resyncing;
        }
        if has_more && tidelock_planted::is(Bug::GrownIsWhole) {
            copy = was.copy;
        }
        if copy == CopyState::Empty && last.is_some() && !goes_on {
            // Nothing of that run has arrived. But its guest was served, and may have heard of others.
            copy = CopyState::Partial;
        }
        if copy != was.copy {
            self.begin_copy(writer, copy);
        }
        // Also if it has begun: it may have been staged before.
        self.check_on_record(self.slots[writer.index()].noted)?;
        if copy == CopyState::Seeded && tidelock_planted::is(Bug::SeededIsWhole) {
            copy = CopyState::Whole;
        }
        Ok((copy, basis))
    }

    /// The backup's record of a member's last run.
    fn on_record(&self, writer: WriterId) -> OnRecord {
        let member = self.manifest.member(writer);
        OnRecord {
            run: member.and_then(|member| member.run),
            proposed: member.and_then(|member| member.proposed),
            clean: member.and_then(|member| member.clean.clone()),
            log: self.journal.state().log_of(writer),
            durable: self.commit.durable_of(writer),
        }
    }

    /// The host has its run on stable storage: from here on that is the run in force.
    pub(super) fn run_has_begun(&mut self, writer: WriterId) -> Result<(), FileError> {
        let run = self.manifest.member(writer).and_then(|member| member.proposed);
        let Some(run) = run else { return Ok(()) };
        self.change_member(writer, |member| {
            (member.run, member.proposed, member.clean) = (Some(run), None, None);
        })
    }

    /// The run in force has ended cleanly, or not.
    pub(super) fn run_has_ended(
        &mut self,
        writer: WriterId,
        end: Option<CleanEnd>,
    ) -> Result<(), FileError> {
        self.change_member(writer, |member| member.clean = end)
    }

    /// As if this run had ended so.
    #[cfg(test)]
    pub(super) fn as_if_ended(&mut self, attach: &Attach) {
        let Some(writing) = attach.writing() else { return };
        let tidelock_protocol::message::LastRun::Clean { seq, .. } = writing.last_run else {
            return;
        };
        let end = CleanEnd { seq, marks: writing.marks.clone() };
        let ended = |member: &mut Member| (member.run, member.clean) = (writing.before, Some(end));
        self.change_member(writing.writer, ended).unwrap();
    }

    fn change_member(
        &mut self,
        writer: WriterId,
        change: impl FnOnce(&mut Member),
    ) -> Result<(), FileError> {
        let mut manifest = self.manifest.clone();
        if let Some(Some(member)) = manifest.members.get_mut(writer.index()) {
            change(member);
        }
        if manifest != self.manifest {
            manifest.write(&self.storage)?;
            self.manifest = manifest;
        }
        Ok(())
    }

    /// The activity log of a run is so far. On record in one order with the records.
    pub(super) fn logged(&mut self, writer: WriterId, age: LogAge) {
        if self.journal.state().log_of(writer) != age {
            self.journal.stage_note(&Note::Log { writer, age }).expect("it follows what there is");
            if self.journal.staged_bytes() >= BATCH_TARGET_BYTES {
                self.write();
            }
        }
    }

    /// What a run has sent before it connected anew may be read after what it sends since, and also after the end of that
    /// connection: a server that was stopped reads all of it at once. It must neither take the member from the connection
    /// that the daemon has, nor have its say about the copy.
    fn check_newest(&self, member: &str, link: Link) -> Result<(), Refusal> {
        let has_newer =
            self.attached_by.get(member).is_some_and(|newest| *newest > link.connection);
        if has_newer && !tidelock_planted::is(Bug::OlderConnectionWins) {
            let reason = format!("{member} was attached by a newer connection of its daemon");
            return refuse(RefusalKind::Stopping, reason);
        }
        Ok(())
    }

    pub(super) fn check_host(&self, host: &str) -> Result<(), Refusal> {
        let allowed = match &self.options.hosts {
            Some(hosts) => hosts.iter().any(|h| h == host),
            None => [host, Member::NOBODY].contains(&&*self.manifest.created_by),
        };
        if !allowed {
            return refuse(RefusalKind::Forbidden, forbidden(host, &self.manifest.group));
        }
        Ok(())
    }

    fn check_epoch(&self, granted: Epoch) -> Result<(), Refusal> {
        if tidelock_planted::is(Bug::OldEpochAccepted) {
            return Ok(());
        }
        if let Some(reason) = self.fenced_reason() {
            if !self.promoted {
                let reason = "a recovery of the group is being put on record".to_owned();
                return refuse(RefusalKind::Stopping, reason);
            }
            return refuse(RefusalKind::Fenced, reason);
        }
        let epoch = self.epoch();
        if granted != Epoch(0) && granted != epoch {
            return refuse(
                RefusalKind::Mismatch,
                format!(
                    "the host was granted epoch {}, but group {} is in epoch {epoch} here: is \
                     this the backup server that it was protected by?",
                    granted, self.manifest.group
                ),
            );
        }
        Ok(())
    }

    /// Why no primary is taken any more: the group was recovered.
    pub(super) fn fenced_reason(&self) -> Option<String> {
        let start = self.journal.state().recovered()?;
        Some(format!(
            "group {} was recovered at the backup site at {} (epoch {}, cut {}). What this \
             primary wrote after the cut is not part of it, and its gate stays shut. Shut its \
             VMs down",
            self.manifest.group,
            crate::text::utc(start.at_unix_ms),
            start.epoch,
            start.cut,
        ))
    }

    /// Keeps what the attachment says, durably, with images for new disks and of the new sizes. An image may be larger
    /// than its disk, if this is cut short.
    fn remember(&mut self, host: &str, attach: &Attach) -> Result<(), GroupError> {
        let mut manifest = self.manifest.clone();
        manifest.grace_ms = manifest.grace_ms.max(attach.grace_ms);
        match &attach.role {
            Role::Writer(writing) => self.remember_writer(&mut manifest, host, attach, writing)?,
            Role::Follower => {
                manifest.followers.insert(attach.member.clone(), host.to_owned());
            }
        }
        if manifest != self.manifest {
            manifest.write(&self.storage)?;
            self.manifest = manifest;
        }
        Ok(())
    }

    fn remember_writer(
        &mut self,
        manifest: &mut Manifest,
        host: &str,
        attach: &Attach,
        writing: &Writing,
    ) -> Result<(), GroupError> {
        self.create_images(writing)?;
        self.grow_images(writing)?;
        if manifest.created_by == Member::NOBODY {
            manifest.created_by = host.to_owned();
        }
        let (disks, removed) = self.disks_after(writing);
        let before = manifest.members[writing.writer.index()].take();
        let (run, clean) = match before {
            // A run that comes after the proposed one says that that had begun: its own word for it got lost.
            Some(member) if member.proposed.is_some() && member.proposed == writing.before => {
                (member.proposed, None)
            }
            Some(member) => (member.run, member.clean),
            None => (None, None),
        };
        manifest.members[writing.writer.index()] = Some(Member {
            host: host.to_owned(),
            incarnation: writing.incarnation,
            run,
            // The run in force attaches again and again.
            proposed: Some(writing.run()).filter(|proposed| Some(*proposed) != run),
            clean,
            disks,
            mode: writing.mode,
            lease_ms: attach.lease_ms,
            removed,
        });
        // It may have had no disks before.
        manifest.forget_followers();
        Ok(())
    }

    /// What the host's disks hold, and what it may have known, is not certain. In a resync C stands
    /// still until a copy is done.
    fn begin_copy(&mut self, writer: WriterId, copy: CopyState) {
        let note = Note::Copy { writer, copy };
        self.journal.stage_note(&note).expect("it follows what there is");
        self.slots[writer.index()].noted = self.journal.ticket();
        if copy == CopyState::Resyncing {
            self.commit.hold(writer);
        }
    }

    fn take_over(&mut self, now: Now, link: Link, attach: &Attach, writing: &Writing) {
        let state = self.journal.state();
        let epoch = if tidelock_planted::is(Bug::OldEpochAccepted) && attach.epoch != Epoch(0) {
            attach.epoch
        } else {
            state.epoch
        };
        let journaled = state.writers[writing.writer.index()].seq;
        let receiver = Receiver::new(writing.writer, epoch, present(&writing.disks), journaled);
        let slot = &mut self.slots[writing.writer.index()];
        let (admitted, noted) = (slot.admitted, slot.noted);
        let mut gathered = std::mem::take(&mut slot.gathered);
        gathered.attached(writing.run(), journaled);
        let old = std::mem::replace(
            slot,
            WriterSlot {
                receiver: Some(receiver),
                gathered,
                link: Some(link),
                attached_at: Some(now),
                is_of_several: attach.tagging.is_some(),
                has_left: false,
                flushed: false,
                clock_ahead_ms: 0,
                admitted,
                noted,
            },
        );
        if let Some(old) = old.link.filter(|old| *old != link) {
            let reason = attached_again(&attach.member);
            self.refuse_now(old, RefusalKind::Superseded, reason);
        }
    }
}

pub(super) fn attached_again(member: &str) -> String {
    format!(
        "{member} was attached on a newer connection of its host, so nothing more is taken on this one. If two daemons run \
         with this host's name and certificate, such as on a clone of the host, stop the wrong one"
    )
}

fn forbidden(host: &str, group: &str) -> String {
    format!(
        "host {host} may not attach members of group {group}: list it under groups.{group}.hosts \
         in the backup server's configuration"
    )
}

/// Whether a directory without a `group.json` holds more than an unfinished creation leaves: that
/// makes an empty journal, and no images.
fn holds_data<S: Storage>(storage: &S, options: journal::Options) -> io::Result<bool> {
    for dir in [JOURNAL_DIR, "images"] {
        storage.create_dir(dir)?;
    }
    let segments = storage.list(JOURNAL_DIR)?.len();
    let opened = Journal::open(storage.clone(), JOURNAL_DIR, Position::default(), options);
    let written = opened.is_ok_and(|o| o.journal.state().journaled() != CountVector::new());
    Ok(segments > 1 || written || !storage.list("images")?.is_empty())
}

/// Empties a directory in which a group was begun and never came to be.
fn clear<S: Storage>(storage: &S) -> io::Result<()> {
    for dir in [JOURNAL_DIR, "images"] {
        storage.create_dir(dir)?;
        for name in storage.list(dir)? {
            storage.remove(&tidelock_storage::join(dir, &name))?;
        }
        storage.sync_dir(dir)?;
    }
    storage.sync_dir("")
}

/// Why a group was not created.
#[derive(Debug, thiserror::Error)]
pub enum GroupCreateError {
    /// The request is not acceptable.
    #[error("{}", .0.1)]
    Refused((RefusalKind, String)),
    /// The storage.
    #[error(transparent)]
    Group(#[from] GroupError),
}

impl GroupCreateError {
    /// What the host is told.
    #[must_use]
    pub fn refusal(&self) -> (RefusalKind, String) {
        match self {
            Self::Refused(refusal) => refusal.clone(),
            Self::Group(error) => (RefusalKind::Stopping, error.to_string()),
        }
    }
}

impl From<FileError> for GroupCreateError {
    fn from(error: FileError) -> Self {
        Self::Group(error.into())
    }
}
