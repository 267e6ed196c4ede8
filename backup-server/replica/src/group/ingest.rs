//! Frames of attached members: into the journal, made durable, acknowledged.

use super::durable::{Immediate, Later, OfDurable};
use super::parts::PartRefusal;
use super::{Group, GroupError, Link, Now, Output, Stall};
use std::io;
use tidelock_planted::Bug;
use tidelock_protocol::bounds::Implausible;
use tidelock_protocol::frame::Frame;
use tidelock_protocol::ids::{Incarnation, MonoNanos, Seq, WriterId};
use tidelock_protocol::limits;
use tidelock_protocol::message::{CleanEnd, Form, Message, Mode, Progress, RefusalKind};
use tidelock_protocol::part::Part;
use tidelock_protocol::receiver::{Admission, ReceiveError, Receiver};
use tidelock_protocol::record::{Record, Role};
use tidelock_protocol::vector::CountVector;
use tidelock_storage::Storage;
use tidelock_store::damage;
use tidelock_store::extents::DiskKey;
use tidelock_store::journal::{BATCH_TARGET_BYTES, JournalError, Note};
use tidelock_store::view::Content;

impl<S: Storage> Group<S> {
    /// A frame of an attached member. While the group does not accept, it comes back: keep it,
    /// and everything after it on that link, until [`Group::accepts`]. `None`: it was taken.
    #[must_use = "a frame that comes back is not taken"]
    pub fn receive(&mut self, now: Now, link: Link, frame: Frame) -> Option<Frame> {
        self.tick(now);
        let attached = self.slots.iter().position(|slot| slot.link == Some(link));
        let Some(i) = attached.or_else(|| self.named_in(&frame)) else {
            // A follower, or what a connection that was just refused or superseded had under way.
            return self.receive_follower(now, link, frame);
        };
        match frame {
            Frame::Record(..) | Frame::Part(..) if !self.accepts() => Some(frame),
            Frame::Record(_, record) => {
                let written_ms = record.hlc.physical_ms();
                let waits = record.role().is_of_copy();
                self.receive_record(now, i, link, record);
                if !waits {
                    self.slots[i].clock_ahead_ms = written_ms as i64 - now.unix_ms as i64;
                }
                None
            }
            Frame::Part(_, part) => {
                self.receive_part(now, i, link, &part);
                None
            }
            Frame::Control(channel, message) => self
                .receive_control(now, i, link, message)
                .map(|message| Frame::Control(channel, message)),
        }
    }

    /// The writer that a record names, whoever sends it.
    fn named_in(&self, frame: &Frame) -> Option<usize> {
        let Frame::Record(_, Record { writer, .. }) = frame else { return None };
        let slot = self.slots.get(writer.index()).filter(|slot| slot.receiver.is_some());
        slot.filter(|_| tidelock_planted::is(Bug::UnattachedIsHeard)).map(|_| writer.index())
    }

    fn receive_part(&mut self, now: Now, i: usize, link: Link, part: &Part) {
        let slot = &mut self.slots[i];
        let received = slot.receiver.as_ref().expect("attached").received();
        let host = self.manifest.member(WriterId(i as u16)).map_or("", |member| &member.host);
        let is_listed = self.options.hosts.is_some();
        let take_room = |bytes| self.options.parts.take(host, is_listed, bytes);
        match slot.gathered.add(received, part, take_room) {
            Ok(Some(record)) => self.receive_record(now, i, link, record),
            Ok(None) => {}
            Err(PartRefusal::Part(error)) => {
                self.end_link(link, RefusalKind::Invalid, error.to_string());
            }
            Err(PartRefusal::NoRoom) => {
                let reason = format!(
                    "there is no memory for record {} of {} bytes: large records of host {host} that arrive in parts take \
                     all that it may have at the backup server. The record is taken, from its beginning, when others of \
                     them are complete",
                    part.seq, part.total_bytes
                );
                self.end_link(link, RefusalKind::Quota, reason);
            }
        }
    }

    fn receive_record(&mut self, now: Now, i: usize, link: Link, record: Record) {
        let wall_ms = self.judging_ms(now);
        let has_deps = record.deps.entries().next().is_some();
        let have = if has_deps { self.heard_at_most() } else { CountVector::new() };
        if let Err(error) = self.plausible.record(&record, &have, wall_ms) {
            return self.implausible(link, &error);
        }
        let receiver = self.slots[i].receiver.as_mut().expect("attached");
        match receiver.admit(&record) {
            Ok(Admission::Append) => {}
            Ok(Admission::Duplicate) => return,
            Err(ReceiveError::Gap { .. }) if tidelock_planted::is(Bug::AckOverGap) => {
                let (writer, epoch) = (receiver.writer(), receiver.epoch());
                let disks = self.manifest.member(writer).expect("attached").present_disks();
                *receiver = Receiver::new(writer, epoch, disks, record.seq);
            }
            Err(error) => return self.refuse_member(link, &error),
        }
        let state = self.journal.state();
        if state.form == Form::Hlc && record.hlc <= state.writers[i].hlc {
            let reason = format!("record {} does not have a later time than the last", record.seq);
            return self.end_link(link, RefusalKind::Invalid, reason);
        }
        self.cut.record(state, &record);
        if record.role() != Role::Idle {
            self.frontier = self.frontier.max(record.hlc);
        }
        if let Err(error) = self.journal.stage_record(record) {
            // The receiver has checked the same: this is a fault of ours, so stop.
            let reason = format!("the journal refuses what the receiver admitted: {error}");
            return self.end_link(link, RefusalKind::Invalid, reason);
        }
        if self.journal.staged_bytes() >= BATCH_TARGET_BYTES {
            self.write();
        }
    }

    /// Ends a link whose host said what cannot be true.
    pub(super) fn implausible(&mut self, link: Link, error: &Implausible) {
        self.implausible += 1;
        self.end_link(link, RefusalKind::Implausible, error.to_string());
    }

    fn refuse_member(&mut self, link: Link, error: &ReceiveError) {
        let (kind, reason) = match error {
            ReceiveError::Epoch { granted, found } if found < granted => {
                (RefusalKind::Fenced, self.fenced_reason().unwrap_or_else(|| error.to_string()))
            }
            _ => (RefusalKind::Invalid, error.to_string()),
        };
        self.end_link(link, kind, reason);
    }

    pub(super) fn end_link(&mut self, link: Link, kind: RefusalKind, reason: String) {
        self.followers.retain(|follower| follower.link != link);
        for slot in &mut self.slots {
            if slot.link == Some(link) {
                slot.link = None;
            }
        }
        self.refuse_now(link, kind, reason);
        self.readiness_ends();
    }

    fn receive_control(
        &mut self,
        now: Now,
        i: usize,
        link: Link,
        message: Message,
    ) -> Option<Message> {
        match message {
            Message::Beacon { sent_at } => {
                self.beacon(now, link, sent_at);
            }
            Message::DigestCheck { .. } => return self.digest_check(i, link, message),
            Message::ZeroCheck { .. } => return self.zero_check(i, link, message),
            Message::Policy(_) | Message::ServesUnreached { .. } if !self.takes_policies(link) => {
                return Some(message);
            }
            Message::Policy(policy) => self.policy(now, link, policy),
            Message::ServesUnreached { serves } => self.serves_unreached(link, serves),
            Message::ModeChanged { mode } => self.mode_changed(WriterId(i as u16), mode),
            Message::Sounded { id, pending, hlc } => {
                if let Some((pending, hlc)) = self.plausible_sounded(now, link, pending, hlc) {
                    self.sounded(WriterId(i as u16), id, &pending, hlc);
                }
            }
            Message::GiveUpLease => self.lease_given_up(link),
            Message::ReadyToSwitch { ready } => self.ready_to_switch(link, ready),
            Message::AskFloor { mark, everyone } => self.ask_floor(link, mark, everyone),
            Message::Begun => {
                if let Err(error) = self.run_has_begun(WriterId(i as u16)) {
                    self.end_link(link, RefusalKind::Stopping, error.to_string());
                }
            }
            // A note takes hardly any room: a stall must not keep back the clean end that comes behind it.
            Message::Logged(_) if !self.takes_notes() => return Some(message),
            Message::Logged(age) => {
                let writer = WriterId(i as u16);
                let known = self.manifest.member(writer).map_or(Incarnation(0), |m| m.incarnation);
                match self.plausible.log(age, known, self.judging_ms(now)) {
                    Ok(()) => self.logged(writer, age),
                    Err(error) => self.implausible(link, &error),
                }
            }
            Message::Detach { end } => {
                if let Some(Err(error)) = end.as_ref().map(|end| self.plausible.end(end)) {
                    self.implausible(link, &error);
                    return None;
                }
                self.slots[i].link = None;
                self.readiness_ends();
                let name = self.manifest.writers[i].clone();
                self.later(name, Later::Ended(WriterId(i as u16), link, end));
            }
            _ => {
                let reason = "a message that hosts do not send".to_owned();
                self.end_link(link, RefusalKind::Invalid, reason);
            }
        }
        None
    }

    /// A run has ended, and everything that it sent is durable.
    pub(super) fn has_ended(
        &mut self,
        name: &str,
        writer: WriterId,
        link: Link,
        end: Option<CleanEnd>,
    ) {
        if let Err(error) = self.run_has_ended(writer, end) {
            let reason = format!(
                "the clean end cannot be put on record ({error}): the next start compares the disks"
            );
            self.refuse_now(link, RefusalKind::Stopping, reason);
        }
        self.slots[writer.index()].has_left = true;
        self.policy_has_left(name);
        self.tell_floors();
    }

    /// A beacon asks for the lease to be renewed. Answered also while the group is stalled: the
    /// lease says who is primary, not how far the copy is.
    pub fn beacon(&mut self, now: Now, link: Link, sent_at: MonoNanos) {
        if let Some(member) = self.name_of_link(link).filter(|_| self.is_heard_on(link)) {
            self.held.beacon(now.mono, &member, link, sent_at);
        }
        self.beacon_ahead(now, link, sent_at);
    }

    /// The same of a beacon that has overtaken frames which were sent before it and cannot be taken for now: one of
    /// them may say that the member holds its packets no more.
    pub fn beacon_ahead(&mut self, now: Now, link: Link, sent_at: MonoNanos) {
        if self.is_heard_on(link) {
            self.grace.heard(now.mono);
            self.heard(link, now);
            self.say_now(link, Immediate::Lease(sent_at));
            self.tell_tag_terms(now, link);
            self.ask_for_awaited(link);
        }
    }

    fn is_heard_on(&self, link: Link) -> bool {
        let attached = self.all_links().contains(&link);
        let gave_up = self.name_of_link(link).is_some_and(|name| self.given_up.contains(&name));
        attached && !gave_up && self.broken.is_none()
    }

    /// Answers a check without looking, if the frame is one: the host sends the extent. `false`: it is none.
    pub fn decline_check(&mut self, link: Link, frame: &Frame) -> bool {
        let (disk, offset) = match frame {
            Frame::Control(_, Message::DigestCheck { disk, offset, .. })
            | Frame::Control(_, Message::ZeroCheck { disk, offset, .. }) => (*disk, *offset),
            _ => return false,
        };
        if self.slots.iter().any(|slot| slot.link == Some(link)) {
            let message = Message::DigestResult { disk, offset, equal: false };
            self.say(Output::Send(link, message));
        }
        true
    }

    /// Answers for the disk as it is with every record received before.
    fn digest_check(&mut self, i: usize, link: Link, message: Message) -> Option<Message> {
        let Message::DigestCheck { disk, offset, len_bytes, digest } = message else {
            unreachable!("matched by the caller")
        };
        let key = DiskKey { writer: WriterId(i as u16), disk };
        let size = self.manifest.disk(key.writer, disk).map_or(0, |d| d.size_bytes);
        let end = offset.checked_add(u64::from(len_bytes));
        if len_bytes == 0
            || len_bytes > limits::DIGEST_CHUNK_MAX_BYTES
            || end.is_none_or(|end| end > size)
        {
            let reason = "a digest check is empty, too large or outside its disk".to_owned();
            self.end_link(link, RefusalKind::Invalid, reason);
            return None;
        }
        if !self.accepts() {
            return Some(message);
        }
        // What is staged must be readable; it need not be durable for this.
        self.write();
        if self.broken.is_some() || self.journal.staged_bytes() > 0 {
            return self.broken.is_none().then_some(message);
        }
        let mut extent = vec![0; len_bytes as usize];
        let failed = |source| GroupError::Image { path: disk_path(key), source };
        let read = match tidelock_planted::is(Bug::DigestOfImage) {
            true => self.images[&key].read_at(&mut extent, offset).map_err(failed),
            false => self.view(key).and_then(|view| view.read(offset, &mut extent).map_err(failed)),
        };
        match read {
            // What is damaged here is not what is there: the host sends it if it is to be mended.
            Err(GroupError::Image { source, .. }) if damage::is_damage(&source) => {
                let message = Message::DigestResult { disk, offset, equal: false };
                self.say(Output::Send(link, message));
            }
            Ok(()) => {
                let equal = blake3::hash(&extent) == blake3::Hash::from_bytes(digest);
                let message = Message::DigestResult { disk, offset, equal };
                self.say(Output::Send(link, message));
            }
            Err(error) => self.break_down(&error),
        }
        None
    }

    /// Whether an extent of any length is known to be zeroes here, from what the journal and the images have no data of.
    /// Data that happens to be zero counts as data: the host looks closer.
    fn zero_check(&mut self, i: usize, link: Link, message: Message) -> Option<Message> {
        let Message::ZeroCheck { disk, offset, len_bytes } = message else {
            unreachable!("matched by the caller")
        };
        let key = DiskKey { writer: WriterId(i as u16), disk };
        let size = self.manifest.disk(key.writer, disk).map_or(0, |d| d.size_bytes);
        let end = offset.checked_add(len_bytes).filter(|end| len_bytes > 0 && *end <= size);
        let Some(end) = end else {
            let reason = "a zero check is empty or outside its disk".to_owned();
            self.end_link(link, RefusalKind::Invalid, reason);
            return None;
        };
        if !self.accepts() {
            return Some(message);
        }
        self.write();
        if self.broken.is_some() || self.journal.staged_bytes() > 0 {
            return self.broken.is_none().then_some(message);
        }
        let mut equal = true;
        let mut is_zero = |_, content| {
            equal = content == Content::Zero;
            equal
        };
        let failed = |source| GroupError::Image { path: disk_path(key), source };
        let looked =
            self.view(key).and_then(|v| v.describe(offset..end, &mut is_zero).map_err(failed));
        match looked {
            Ok(()) => {}
            Err(GroupError::Image { source, .. }) if damage::is_damage(&source) => equal = false,
            Err(error) => {
                self.break_down(&error);
                return None;
            }
        }
        let message = Message::DigestResult { disk, offset, equal };
        self.say(Output::Send(link, message));
        None
    }

    fn mode_changed(&mut self, writer: WriterId, mode: Mode) {
        let mut manifest = self.manifest.clone();
        if let Some(member) = &mut manifest.members[writer.index()] {
            member.mode = mode;
        }
        if manifest == self.manifest {
            return;
        }
        // For people only: with a full disk it is told again at the next attachment.
        match manifest.write(&self.storage) {
            Err(error) if !error.is_full() => self.break_down(&error.into()),
            _ => self.manifest = manifest,
        }
    }

    /// The connection is gone. What it sent before counts.
    pub fn connection_lost(&mut self, connection: super::ConnectionId) {
        for slot in &mut self.slots {
            if slot.link.is_some_and(|link| link.connection == connection) {
                slot.link = None;
            }
        }
        self.followers.retain(|follower| follower.link.connection != connection);
        self.fenced.retain(|link| link.connection != connection);
        self.outputs.forget_connection(connection, &self.journal.durable());
        self.readiness_ends();
    }

    /// Tells C, and each writer what of it is durable. All of it is.
    pub(super) fn tell_committed(&mut self) {
        let committed = self.told();
        let writers =
            self.links().map(|(i, link)| (link, self.commit.durable_of(WriterId(i as u16))));
        let followers = self.followers.iter().map(|follower| (follower.link, Seq::ZERO));
        for (link, durable) in writers.chain(followers).collect::<Vec<_>>() {
            let progress = self.progress(durable, &committed);
            self.say_of_durable(link, OfDurable::Progress(progress));
        }
    }

    pub(super) fn progress(&self, durable: Seq, committed: &CountVector) -> Progress {
        let (committed, watermark) = (committed.clone(), self.cut.watermark());
        Progress { durable, committed, watermark, frontier: self.frontier }
    }

    pub(super) fn journal_failed(&mut self, error: JournalError) {
        match error {
            JournalError::Full(ref source) => {
                let is_used = source.kind() == io::ErrorKind::ResourceBusy;
                match (is_used, &self.stall) {
                    (true, None) => self.stall(Stall::Reserve),
                    // The group's own fold, or another one's beside what is known.
                    (true, Some(_)) => {}
                    (false, _) => self.stall(Stall::NoRoom(error.to_string())),
                }
            }
            error => self.break_down(&error.into()),
        }
    }

    pub(super) fn waits_for_room(&self) -> bool {
        matches!(self.stall, Some(Stall::NoRoom(_) | Stall::Reserve))
    }

    /// Tries again what a full disk prevented. To be called now and then while stalled.
    pub fn retry(&mut self) {
        if self.waits_for_room() {
            self.write();
        }
    }

    /// The server stops, and waits for its disk: the journal's end is no torn tail. No sync runs.
    pub fn close(&mut self) {
        self.flush();
        for link in self.all_links() {
            let reason = "the backup server is stopping".to_owned();
            self.end_link(link, RefusalKind::Stopping, reason);
        }
        if self.accepts() && self.journal.stage_note(&Note::CleanEnd).is_ok() {
            self.flush();
        }
    }
}

fn disk_path(key: DiskKey) -> String {
    format!("of disk {} of writer {}", key.disk, key.writer)
}
