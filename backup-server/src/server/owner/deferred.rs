//! Frames that the group has not taken yet. Each connection has a queue of its own, so that the work that one of them asks
//! for keeps no other from the group.

use super::{Owner, Phase};
use crate::server::clock;
use crate::server::inbox::{Event, FramesRoom};
use std::collections::VecDeque;
use tidelock_protocol::frame::Frame;
use tidelock_protocol::limits;
use tidelock_protocol::message::{Message, RefusalKind};
use tidelock_replica::group::{ConnectionId, Link};

/// Work that one connection may cause in a turn, beyond storing its records ([`work_bytes`]).
pub(super) const TURN_WORK_BYTES: u64 = 2 * limits::DIGEST_CHUNK_MAX_BYTES as u64;

/// An event of one connection that the group has not taken yet.
pub(super) enum Deferred {
    Frames {
        link: Link,
        frames: VecDeque<Frame>,
        _room: FramesRoom,
    },
    /// An attachment, or the end of the connection, behind frames that were sent before it.
    Other(Event),
}

impl Owner {
    /// `true` if the group has not taken all frames of this link yet.
    pub(super) fn has_deferred(&self, link: Link) -> bool {
        let mut deferred = self.deferred.get(&link.connection).into_iter().flatten();
        deferred.any(|one| matches!(one, Deferred::Frames { link: other, .. } if *other == link))
    }

    /// `true` once the connection has caused as much work as it may in this turn.
    pub(super) fn has_worked(&self, connection: ConnectionId) -> bool {
        self.worked.get(&connection).is_some_and(|bytes| *bytes >= TURN_WORK_BYTES)
    }

    /// Gives the group what it can take, for each connection in order.
    pub(super) fn take_deferred(&mut self) {
        let connections: Vec<_> = self.deferred.keys().copied().collect();
        for connection in connections {
            self.take_deferred_of(connection);
        }
        self.take_guests();
    }

    /// Gives the group what it can take of one connection.
    pub(super) fn take_deferred_of(&mut self, connection: ConnectionId) {
        while !self.has_worked(connection) {
            let Some(deferred) = self.deferred.get_mut(&connection) else { return };
            match deferred.front_mut() {
                None => {
                    self.deferred.remove(&connection);
                    return;
                }
                Some(Deferred::Frames { link, frames, .. }) => {
                    let link = *link;
                    let Some(frame) = frames.pop_front() else {
                        deferred.pop_front();
                        continue;
                    };
                    let Phase::Live(group) = &mut self.phase else { continue };
                    let work = work_bytes(&frame);
                    if let Some(back) = group.receive(clock::now(), link, frame) {
                        frames.push_front(back);
                        return self.take_others_of(connection);
                    }
                    *self.worked.entry(connection).or_default() += work;
                }
                Some(Deferred::Other(_)) => {
                    if let Some(Deferred::Other(event)) = deferred.pop_front() {
                        self.take_other(event);
                    }
                }
            }
        }
    }

    /// Gives the group all that it can take, whatever the work: checks are answered without it.
    pub(super) fn take_all_deferred(&mut self) {
        if let Phase::Live(group) = &mut self.phase {
            for one in self.deferred.values_mut().flatten() {
                if let Deferred::Frames { link, frames, .. } = one {
                    frames.retain(|frame| !group.decline_check(*link, frame));
                }
            }
        }
        while !self.deferred.is_empty() {
            self.worked.clear();
            let before = self.deferred_frames();
            self.take_deferred();
            if self.deferred_frames() == before {
                // It does not accept.
                return;
            }
        }
    }

    /// The group does not accept frames for now: attachments and ends of connections do not wait for that.
    pub(super) fn take_others_of(&mut self, connection: ConnectionId) {
        let Some(deferred) = self.deferred.get_mut(&connection) else { return };
        let (others, frames): (VecDeque<_>, _) =
            std::mem::take(deferred).into_iter().partition(|one| matches!(one, Deferred::Other(_)));
        *deferred = frames;
        for other in others {
            if let Deferred::Other(event) = other {
                self.take_other(event);
            }
        }
    }

    pub(super) fn deferred_frames(&self) -> usize {
        let frames = self.deferred.values().flatten().map(|one| match one {
            Deferred::Frames { frames, .. } => frames.len() + 1,
            Deferred::Other(_) => 1,
        });
        frames.sum()
    }

    /// Handles an attachment or the end of a connection after the frames that wait for their turn.
    pub(super) fn in_order(&mut self, connection: ConnectionId, event: Event) {
        self.take_deferred_of(connection);
        let waits = self.has_worked(connection);
        match self.deferred.get_mut(&connection) {
            Some(deferred) if waits => deferred.push_back(Deferred::Other(event)),
            _ => self.take_other(event),
        }
    }

    pub(super) fn take_other(&mut self, event: Event) {
        match event {
            Event::Attach { link, host, attach, outbox, permit: _permit } => {
                self.attach(link, &host, &attach, outbox);
            }
            Event::ConnectionLost(connection) => {
                if let Phase::Live(group) = &mut self.phase {
                    group.connection_lost(connection);
                }
                self.outboxes.remove(&connection);
            }
            other => unreachable!("handled at once: {other:?}"),
        }
    }

    /// The group does not work: nothing that waits is taken.
    pub(super) fn drop_deferred(&mut self, reason: &str) {
        self.guests.clear();
        for one in std::mem::take(&mut self.deferred).into_values().flatten() {
            match one {
                Deferred::Other(Event::Attach { link, outbox, .. }) => {
                    let (kind, reason) = (RefusalKind::Stopping, reason.to_owned());
                    outbox.send(link.channel, Message::Refused { kind, reason });
                }
                Deferred::Other(event) => self.take_other(event),
                Deferred::Frames { .. } => {}
            }
        }
    }

    pub(super) fn take_guests(&mut self) {
        while !self.guests.is_empty() {
            let Phase::Live(group) = &mut self.phase else { return self.guests.clear() };
            if group.broken().is_none() && !group.accepts() {
                return;
            }
            let Some(event) = self.guests.pop_front() else { return };
            self.guest(event);
        }
    }
}

/// The work that a frame causes, as bytes that are read from the disk for it. What records and parts of them cost is
/// bounded by their own bytes.
pub(in crate::server) fn work_bytes(frame: &Frame) -> u64 {
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
