//! Events that the group has not taken yet. Each connection has a queue of its own, so that the work that one of them
//! asks for keeps no other from the group: what exceeds [`TURN_WORK_BYTES`] in a turn waits, in order, and beacons and
//! records of other hosts are taken in between.

use super::{Driver, GroupLoop, Phase};
use crate::connection::outbox::Outbox;
use crate::connection::room::Taken;
use crate::group::{ConnectionId, GuestEffect, Link, NotYet, Now, Output};
use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use tidelock_protocol::frame::Frame;
use tidelock_protocol::ids::WriterId;
use tidelock_protocol::limits;
use tidelock_protocol::message::{Attach, Message, RefusalKind};
use tidelock_store::extents::DiskKey;
use tidelock_store::journal::{Behind, Ticket};

/// Work that one connection may cause in a turn, beyond storing its records ([`work_bytes`]).
pub(super) const TURN_WORK_BYTES: u64 = 2 * limits::DIGEST_CHUNK_MAX_BYTES as u64;
/// Guests' writes that no flush has covered are made durable at this point anyway, so that they
/// can be folded.
const UNSYNCED_MAX_BYTES: u64 = 64 << 20;

/// An event of one connection that the group has not taken yet.
pub(super) enum Waiting {
    Frames {
        link: Link,
        frames: VecDeque<Frame>,
        _room: Taken,
    },
    /// An attachment behind frames that were sent before it.
    Attach {
        link: Link,
        host: String,
        attach: Box<Attach>,
        outbox: Arc<Outbox>,
        /// Tried once, and tried again when this is durable.
        until: Option<Ticket>,
        _room: Taken,
    },
    /// The end of the connection, likewise.
    Lost,
}

/// A request of a recovered group's guest.
pub enum GuestRequest {
    /// A write or zeroing.
    Write {
        /// The disk.
        key: DiskKey,
        /// The first byte.
        offset: u64,
        /// The content.
        effect: GuestEffect,
        /// Answer when it is durable, not only when it is readable.
        durable: bool,
    },
    /// All writes of this writer that were answered are to be durable.
    Flush(WriterId),
}

/// Requests of guests of a recovered group.
pub(super) struct Guests<Done> {
    /// The group has not taken them yet.
    queue: VecDeque<(GuestRequest, Done)>,
    /// Requests that the group has taken and that are not readable yet. True: the answer waits for stable storage.
    unanswered: Vec<(Done, bool)>,
    /// Answers that wait for stable storage.
    behind: VecDeque<Behind<Done>>,
    unsynced_bytes: u64,
}

impl<Done> Default for Guests<Done> {
    fn default() -> Self {
        Self {
            queue: VecDeque::new(),
            unanswered: Vec::new(),
            behind: VecDeque::new(),
            unsynced_bytes: 0,
        }
    }
}

impl<Done> Guests<Done> {
    pub(super) fn wait(&self) -> bool {
        !self.queue.is_empty()
    }
}

impl<D: Driver> GroupLoop<D> {
    pub(super) fn frames(
        &mut self,
        link: Link,
        frames: VecDeque<Frame>,
        room: Taken,
        now: Now,
        driver: &mut D,
    ) {
        self.tick(now);
        let waiting = self.waiting.entry(link.connection).or_default();
        waiting.push_back(Waiting::Frames { link, frames, _room: room });
        self.take_waiting_of(link.connection, now, driver);
    }

    /// A request of a recovered group's guest.
    pub fn guest(&mut self, request: GuestRequest, done: D::Done, now: Now, driver: &mut D) {
        self.tick(now);
        self.guests.queue.push_back((request, done));
        self.take_guests(now, driver);
    }

    /// Frames that the group has not taken yet.
    pub fn frames_waiting(&self) -> impl Iterator<Item = &Frame> {
        self.waiting.values().flatten().flat_map(|waiting| match waiting {
            Waiting::Frames { frames, .. } => frames.iter(),
            Waiting::Attach { .. } | Waiting::Lost => Default::default(),
        })
    }

    /// `true` if the group has not taken all frames of this link yet.
    pub(super) fn has_frames_waiting(&self, link: Link) -> bool {
        let mut waiting = self.waiting.get(&link.connection).into_iter().flatten();
        waiting.any(|one| matches!(one, Waiting::Frames { link: other, .. } if *other == link))
    }

    /// `true` once the connection has caused as much work as it may in this turn.
    pub(super) fn has_worked(&self, connection: ConnectionId) -> bool {
        self.worked.get(&connection).is_some_and(|bytes| *bytes >= TURN_WORK_BYTES)
    }

    /// Gives the group what it can take, for each connection in order.
    pub(super) fn take_waiting(&mut self, now: Now, driver: &mut D) {
        let connections: Vec<_> = self.waiting.keys().copied().collect();
        for connection in connections {
            self.take_waiting_of(connection, now, driver);
        }
        self.take_guests(now, driver);
    }

    /// Gives the group what it can take of one connection.
    fn take_waiting_of(&mut self, connection: ConnectionId, now: Now, driver: &mut D) {
        while !self.has_worked(connection) {
            let Some(waiting) = self.waiting.get_mut(&connection) else { return };
            match waiting.front_mut() {
                None => {
                    self.waiting.remove(&connection);
                    return;
                }
                Some(Waiting::Frames { link, frames, .. }) => {
                    let link = *link;
                    let Some(frame) = frames.pop_front() else {
                        waiting.pop_front();
                        continue;
                    };
                    let Phase::Live(group) = &mut self.phase else { continue };
                    let work = work_bytes(&frame);
                    driver.observe_frame(link, &frame, group);
                    let back = group.receive(now, link, frame);
                    driver.observe_taken(back.is_none());
                    if let Some(back) = back {
                        frames.push_front(back);
                        return self.take_others_of(connection, now, driver);
                    }
                    *self.worked.entry(connection).or_default() += work;
                }
                Some(Waiting::Attach { until: Some(ticket), .. })
                    if let Phase::Live(group) = &self.phase
                        && !group.must_try_again(*ticket) =>
                {
                    return;
                }
                Some(Waiting::Attach { .. } | Waiting::Lost) => {
                    let Some(other) = waiting.pop_front() else { continue };
                    if let Err(other) = self.take_other(connection, other, now, driver) {
                        return self.waiting.entry(connection).or_default().push_front(other);
                    }
                }
            }
        }
    }

    /// Gives the group all that it can take, whatever the work: checks are answered without it.
    pub(super) fn take_all_waiting(&mut self, now: Now, driver: &mut D) {
        if let Phase::Live(group) = &mut self.phase {
            for one in self.waiting.values_mut().flatten() {
                if let Waiting::Frames { link, frames, .. } = one {
                    frames.retain(|frame| !group.decline_check(*link, frame));
                }
            }
        }
        while !self.waiting.is_empty() {
            self.worked.clear();
            let before = self.waiting_frames();
            self.take_waiting(now, driver);
            if self.waiting_frames() == before {
                // The group does not accept.
                return;
            }
        }
    }

    /// The group does not accept frames for now: attachments and ends of connections do not wait for that.
    fn take_others_of(&mut self, connection: ConnectionId, now: Now, driver: &mut D) {
        let Some(waiting) = self.waiting.get_mut(&connection) else { return };
        let (frames, others): (VecDeque<_>, _) = std::mem::take(waiting)
            .into_iter()
            .partition(|one| matches!(one, Waiting::Frames { .. }));
        *waiting = frames;
        let mut others = others.into_iter();
        while let Some(other) = others.next() {
            if let Err(other) = self.take_other(connection, other, now, driver) {
                let waiting = self.waiting.entry(connection).or_default();
                others.rev().for_each(|other| waiting.push_front(other));
                return waiting.push_front(other);
            }
        }
    }

    fn waiting_frames(&self) -> usize {
        let frames = self.waiting.values().flatten().map(|one| match one {
            Waiting::Frames { frames, .. } => frames.len() + 1,
            Waiting::Attach { .. } | Waiting::Lost => 1,
        });
        frames.sum()
    }

    /// Handles an attachment or the end of a connection after the frames that wait for their turn.
    pub(super) fn in_order(
        &mut self,
        connection: ConnectionId,
        event: Waiting,
        now: Now,
        driver: &mut D,
    ) {
        self.tick(now);
        self.take_waiting_of(connection, now, driver);
        let waits = self.has_worked(connection) || self.has_attach_waiting(connection);
        match self.waiting.get_mut(&connection) {
            Some(waiting) if waits => waiting.push_back(event),
            _ => {
                if let Err(event) = self.take_other(connection, event, now, driver) {
                    self.waiting.entry(connection).or_default().push_front(event);
                }
            }
        }
    }

    fn has_attach_waiting(&self, connection: ConnectionId) -> bool {
        let mut waiting = self.waiting.get(&connection).into_iter().flatten();
        waiting.any(|one| matches!(one, Waiting::Attach { .. }))
    }

    /// Gives it back if it waits for something that is not durable yet: what comes after it waits, too.
    fn take_other(
        &mut self,
        connection: ConnectionId,
        event: Waiting,
        now: Now,
        driver: &mut D,
    ) -> Result<(), Waiting> {
        match event {
            Waiting::Attach { link, host, attach, outbox, _room, .. } => {
                match self.attach(link, &host, &attach, &outbox, now, driver) {
                    Ok(()) => Ok(()),
                    Err(NotYet(ticket)) => {
                        let until = Some(ticket);
                        Err(Waiting::Attach { link, host, attach, outbox, until, _room })
                    }
                }
            }
            Waiting::Lost => {
                self.lose(connection, driver);
                Ok(())
            }
            Waiting::Frames { .. } => unreachable!("frames are taken one by one"),
        }
    }

    /// The group does not work: nothing that waits is taken.
    pub(super) fn drop_waiting(&mut self, reason: &str, driver: &mut D) {
        self.guests.queue.clear();
        for (done, _) in self.guests.unanswered.drain(..) {
            driver.answer(done, Err(io::Error::other(reason.to_owned())));
        }
        // The asker of an order that is dropped hears that it has failed.
        self.guests.behind.clear();
        for (connection, waiting) in std::mem::take(&mut self.waiting) {
            for one in waiting {
                match one {
                    Waiting::Attach { link, outbox, .. } => {
                        let reason = reason.to_owned();
                        driver.send(&outbox, Output::Refuse(link, RefusalKind::Stopping, reason));
                    }
                    Waiting::Lost => self.lose(connection, driver),
                    Waiting::Frames { .. } => {}
                }
            }
        }
    }

    fn take_guests(&mut self, now: Now, driver: &mut D) {
        while !self.guests.queue.is_empty() {
            let Phase::Live(group) = &mut self.phase else { return self.guests.queue.clear() };
            if group.broken().is_none() && !group.accepts() {
                return;
            }
            let Some((request, done)) = self.guests.queue.pop_front() else { return };
            match request {
                GuestRequest::Write { key, offset, effect, durable } => {
                    let bytes = match &effect {
                        GuestEffect::Write(data) => data.len() as u64,
                        GuestEffect::Zero { .. } => 0,
                    };
                    if !group.guest_write(now, key, offset, effect) {
                        driver.answer(done, Err(io::ErrorKind::PermissionDenied.into()));
                        continue;
                    }
                    if durable {
                        group.guest_flush(key.writer);
                    }
                    self.guests.unsynced_bytes += bytes + 64;
                    self.guests.unanswered.push((done, durable));
                }
                GuestRequest::Flush(writer) => {
                    group.guest_flush(writer);
                    self.guests.unanswered.push((done, true));
                }
            }
        }
    }

    /// Writes the batch, and has it made durable. A recovered group's guests decide when something must be.
    pub(super) fn commit(&mut self, driver: &mut D) {
        let awaits_durable = self.order_awaits_durable();
        let Phase::Live(group) = &mut self.phase else { return };
        let guests = &mut self.guests;
        if group.recovery().is_some() {
            // If there is no room, or the next segment waits for a sync, those who wait go on waiting.
            if group.guest_written() {
                for (done, durable) in guests.unanswered.drain(..) {
                    match durable {
                        true => guests.behind.push_back(Behind::new(group.ticket(), done)),
                        false => driver.answer(done, Ok(())),
                    }
                }
            }
            let must_sync = awaits_durable
                || !guests.behind.is_empty()
                || guests.unanswered.iter().any(|(_, durable)| *durable)
                || guests.unsynced_bytes >= UNSYNCED_MAX_BYTES;
            if must_sync {
                guests.unsynced_bytes = 0;
                self.sync(driver);
            }
            return self.answer_guests(driver);
        }
        group.write();
        self.sync(driver);
    }

    fn sync(&mut self, driver: &mut D) {
        let Phase::Live(group) = &mut self.phase else { return };
        if self.is_stopping {
            return group.flush();
        }
        if let Some(job) = group.begin_sync() {
            driver.sync(self.generation, job);
        }
    }

    /// Answers guests whose requests are on stable storage.
    pub(super) fn answer_guests(&mut self, driver: &mut D) {
        let Phase::Live(group) = &mut self.phase else { return };
        let durable = group.durable();
        for behind in std::mem::take(&mut self.guests.behind) {
            match behind.open(&durable) {
                Ok(done) => driver.answer(done, Ok(())),
                Err(behind) => self.guests.behind.push_back(behind),
            }
        }
    }
}

/// The work that a frame causes, as bytes that are read from the disk for it. The cost of records and parts of them is
/// bounded by their own bytes.
#[must_use]
pub fn work_bytes(frame: &Frame) -> u64 {
    const SMALL: u64 = 4 << 10;
    const FILE: u64 = 1 << 20;
    let Frame::Control(_, message) = frame else { return 0 };
    match message {
        Message::DigestCheck { len_bytes, .. } => {
            SMALL + u64::from((*len_bytes).min(limits::DIGEST_CHUNK_MAX_BYTES))
        }
        // Maps are read, or a file is written and synced.
        Message::ZeroCheck { .. }
        | Message::ModeChanged { .. }
        | Message::Policy(_)
        | Message::ServesUnreached { .. } => FILE,
        _ => SMALL,
    }
}
