//! Frames off the input and into their groups.

use super::channels::{Greeting, Heard};
use super::{BOOKMARKS_MAX, Connection, ConnectionError, Phase, Server};
use crate::group::Link;
use crate::group_loop::{HostEvent, work_bytes};
use std::collections::VecDeque;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;
use tidelock_planted::Bug;
use tidelock_protocol::frame::{self, Frame};
use tidelock_protocol::ids::{Channel, MonoNanos};
use tidelock_protocol::limits;
use tidelock_protocol::message::{Attach, Bookmark, Message, RefusalKind};

/// Interval at which a host hears that bytes of a frame arrive that is not whole yet.
const ARRIVING_EVERY: Duration = Duration::from_secs(1);

/// Frames of one channel that follow each other.
pub(super) struct Run<G> {
    link: Link,
    group: G,
    frames: VecDeque<Frame>,
    bytes: u64,
}

/// A step of the connection that waits for room.
pub(super) enum Step<G> {
    Run(Run<G>),
    /// An attachment. `None`: its group was not looked up yet.
    Attach(Channel, Box<Attach>, u64, Option<G>),
}

fn refuse<T>(kind: RefusalKind, reason: impl Into<String>) -> Result<T, ConnectionError> {
    Err(ConnectionError::Refused(kind, reason.into()))
}

impl<S: Server> Connection<S> {
    /// Takes whole frames off the input and gives them to their groups. Pending: a group has no room, and `context` is
    /// woken when it has. An error ends the connection.
    pub fn take(
        &mut self,
        server: &mut S,
        now: MonoNanos,
        context: &mut Context<'_>,
    ) -> Poll<Result<(), ConnectionError>> {
        loop {
            while !self.steps.is_empty() {
                ready!(self.poll_step(server, context))?;
            }
            if let Some(error) = self.ends.take() {
                return Poll::Ready(Err(error));
            }
            if !self.sort(server, now)? {
                break;
            }
        }
        if let Phase::Serving { heard_at, said_at, .. } = &mut self.phase {
            *heard_at = now;
            // A whole question is answered by itself.
            let are_parts = std::mem::take(&mut self.has_parts);
            let is_due = u128::from(now.since_ns(*said_at)) >= ARRIVING_EVERY.as_nanos();
            if is_due && (are_parts || !self.input.is_empty()) {
                self.outbox.send(Channel(0), Message::Arriving);
                *said_at = now;
            }
        }
        Poll::Ready(Ok(()))
    }

    /// Decodes frames up to the next step, or to the end of the input. True: there may be more behind it.
    fn sort(&mut self, server: &mut S, now: MonoNanos) -> Result<bool, ConnectionError> {
        loop {
            let before = self.input.len();
            let frame = match frame::decode(&mut self.input) {
                Ok(Some(frame)) => frame,
                Ok(None) => {
                    self.close_run();
                    if !self.is_greeted()
                        && frame::bytes_missing(&self.input) > limits::HELLO_MAX_BYTES
                    {
                        let reason = "the first message is larger than a hello";
                        return refuse(RefusalKind::Invalid, reason);
                    }
                    return Ok(self.is_full());
                }
                Err(error) => return Ok(self.ends_with(error.into())),
            };
            let bytes = (before - self.input.len()) as u64;
            match self.hear(frame, bytes, server, now) {
                Ok(()) if self.is_full() => return Ok(true),
                Ok(()) => {}
                Err(error) => return Ok(self.ends_with(error)),
            }
        }
    }

    /// The connection ends behind what was taken off the input.
    fn ends_with(&mut self, error: ConnectionError) -> bool {
        self.close_run();
        self.ends = Some(error);
        true
    }

    fn close_run(&mut self) {
        self.steps.extend(self.run.take().map(Step::Run));
    }

    fn hear(
        &mut self,
        frame: Frame,
        bytes: u64,
        server: &mut S,
        now: MonoNanos,
    ) -> Result<(), ConnectionError> {
        let Phase::Serving { host, .. } = &self.phase else {
            return self.greet(frame, server, now);
        };
        self.has_parts |= matches!(frame, Frame::Part(..));
        let link = Link { connection: self.id, channel: frame.channel() };
        match self.channels.hear(frame)? {
            Heard::Attach(channel, attach) => {
                self.close_run();
                self.steps.push_back(Step::Attach(channel, attach, bytes, None));
            }
            Heard::Beacon(group, sent_at) => {
                if let Some(room) = self.own_room.beacon() {
                    server.give(group, HostEvent::Beacon { link, sent_at, room });
                }
            }
            Heard::Bookmark(group, wanted) => {
                if self.bookmarks >= BOOKMARKS_MAX {
                    let outcome =
                        Err(format!("{BOOKMARKS_MAX} bookmarks of this host wait already"));
                    let Bookmark { id, .. } = *wanted;
                    self.outbox.send(link.channel, Message::Bookmarked { id, outcome });
                } else {
                    self.bookmarks += 1;
                    server.bookmark(link.channel, group, host, *wanted);
                }
            }
            Heard::Frame(group, frame) => match &mut self.run {
                Some(run) if run.link == link => {
                    run.frames.push_back(frame);
                    run.bytes += bytes;
                }
                run => {
                    let group = group.clone();
                    let next = Run { link, group, frames: VecDeque::from([frame]), bytes };
                    self.steps.extend(run.replace(next).map(Step::Run));
                }
            },
        }
        Ok(())
    }

    fn greet(
        &mut self,
        first: Frame,
        server: &mut S,
        now: MonoNanos,
    ) -> Result<(), ConnectionError> {
        let Greeting { host, software, protocol } = Greeting::of(first)?;
        if let Err(names) = server.speaks_for(&host)
            && !tidelock_planted::is(Bug::CertificateIgnored)
        {
            let reason = format!("the certificate is for {names}, not for {host}");
            return refuse(RefusalKind::Forbidden, reason);
        }
        server.enter(&host, &software)?;
        let (name, software) = self.greeting.clone();
        self.outbox.send(Channel(0), Message::Welcome { protocol, server: name, software });
        self.phase = Phase::Serving { host, greeted_at: now, heard_at: now, said_at: now };
        Ok(())
    }

    /// Does the first step when its group has room for it.
    fn poll_step(
        &mut self,
        server: &mut S,
        context: &mut Context<'_>,
    ) -> Poll<Result<(), ConnectionError>> {
        if self.asked.is_none() {
            match self.ask(server) {
                Ok(true) => {}
                Ok(false) => {
                    self.steps.pop_front();
                    return Poll::Ready(Ok(()));
                }
                Err(error) => return Poll::Ready(Err(error)),
            }
        }
        let Some(asked) = &mut self.asked else { return Poll::Ready(Ok(())) };
        let taken = ready!(asked.as_mut().poll(context));
        self.asked = None;
        Poll::Ready(match (self.steps.pop_front(), taken) {
            (Some(Step::Run(Run { link, group, frames, .. })), Some(room)) => {
                server.give(&group, HostEvent::Frames { link, frames, room });
                Ok(())
            }
            (Some(Step::Run(_)), None) => refuse(RefusalKind::Stopping, "the group stops"),
            (Some(Step::Attach(channel, attach, _, Some(group))), room) => {
                self.attach(channel, attach, group, room, server);
                Ok(())
            }
            (Some(Step::Attach(.., None)) | None, _) => Ok(()),
        })
    }

    /// Asks for room for the first step. False: the step came to nothing.
    fn ask(&mut self, server: &mut S) -> Result<bool, ConnectionError> {
        let Phase::Serving { host, .. } = &self.phase else { return Ok(false) };
        let (group, bytes, work) = match self.steps.front_mut() {
            None => return Ok(false),
            Some(Step::Run(run)) => {
                (&run.group, run.bytes, run.frames.iter().map(work_bytes).sum())
            }
            Some(Step::Attach(channel, attach, bytes, group)) => {
                let found = match server.group(&attach.group, host) {
                    Ok(found) => found,
                    Err((kind, reason)) => {
                        self.outbox.send(*channel, Message::Refused { kind, reason });
                        return Ok(false);
                    }
                };
                let is_others =
                    |other: &S::Group| !S::is_same(other, &found) && !S::is_closed(other);
                if self.channels.get(*channel).is_some_and(is_others) {
                    return refuse(RefusalKind::Invalid, "the channel is another group's");
                }
                (&*group.insert(found), *bytes, 0)
            }
        };
        self.asked = Some(self.own_room.ask(S::room(group), bytes, work));
        Ok(true)
    }

    fn attach(
        &mut self,
        channel: Channel,
        attach: Box<Attach>,
        group: S::Group,
        room: Option<super::room::Taken>,
        server: &mut S,
    ) {
        let Phase::Serving { host, .. } = &self.phase else { return };
        let link = Link { connection: self.id, channel };
        let (host, outbox) = (host.clone(), Arc::clone(&self.outbox));
        let event = room.map(|room| HostEvent::Attach { link, host, attach, outbox, room });
        if event.is_some_and(|event| server.give(&group, event)) {
            self.channels.give(channel, group);
        } else {
            // The group ended this very moment: the host asks again.
            let reason = "the group is being closed, ask again".to_owned();
            self.outbox.send(channel, Message::Refused { kind: RefusalKind::Stopping, reason });
        }
    }
}
