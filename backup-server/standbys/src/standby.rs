//! A connection of a standby: bytes, time, apply-to and readers of the journal in, bytes and events out.

use crate::failure::Failure;
use crate::hub::ShardWal;
use crate::source::{Ask, Source, Supply};
use bytes::BytesMut;
use tidelock_pgstream::{
    Access, Lineage, Now, Position, Proof, Sender, SenderEnd, SenderEvent, Served, StandbyStatus,
    Timing,
};
use tidelock_storage::StorageFile;
use tidelock_wal::{Lsn, TimelineId};

/// News of a standby.
#[derive(Debug)]
pub enum Event {
    /// The standby has logged in under this name.
    LoggedIn {
        /// `application_name`, or `cluster_name`.
        name: String,
    },
    /// The standby wants the log from here on.
    Started {
        /// Position of the first byte.
        from: Position,
    },
    /// The standby reports its positions.
    Status(StandbyStatus),
    /// A timeline was sent to its end, and the standby knows of the next one.
    TimelineEnded {
        /// Timeline that ended.
        timeline: TimelineId,
        /// Begin of the next one.
        next: Position,
    },
    /// The standby has ended the stream, and may start another one.
    Stopped,
    /// A command was refused, and the connection goes on.
    Refused {
        /// The command, cut off.
        command: String,
        /// Reason that the standby was told.
        reason: String,
    },
    /// The connection is over once the output has left. Last event.
    Ended(Failure),
}

/// The time by which a reader of the journal is needed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Need {
    /// The standby may be given log that only it has.
    Now,
    /// The standby has all that it may have: the reader can come along with the next apply-to.
    WhenMoved,
}

/// A standby that is connected.
#[derive(Debug)]
pub struct Standby<F> {
    sender: Sender,
    source: Source<F>,
    system: u64,
    lineage: Lineage,
    bound: Lsn,
    ask: Option<(Ask, Need)>,
    failure: Option<Failure>,
    /// The standby was told whose log this is, and has not started a stream.
    is_told: bool,
    part: Vec<u8>,
}

impl<F: StorageFile> Standby<F> {
    /// A connection that has just been accepted. Whoever reaches the socket is let in.
    #[must_use]
    pub fn new(
        shard: u16,
        wal: &ShardWal,
        bound: Lsn,
        timing: Timing,
        nonce: [u8; 18],
        now: Now,
    ) -> Self {
        let served = Served {
            system: wal.system,
            version: wal.version,
            segment_bytes: wal.segment_bytes,
            lineage: wal.lineage.clone(),
            bound,
        };
        let access = Access { user: None, proof: Proof::Trust };
        Self {
            sender: Sender::new(served, access, timing, nonce, now),
            source: Source::new(shard),
            system: wal.system,
            lineage: wal.lineage.clone(),
            bound,
            ask: None,
            failure: None,
            is_told: false,
            part: Vec::new(),
        }
    }

    /// Bytes to be sent to the standby. The caller takes them off the front as they leave.
    pub fn output(&mut self) -> &mut BytesMut {
        self.sender.output()
    }

    /// Takes bytes from the standby.
    pub fn received(&mut self, bytes: &[u8]) {
        self.sender.received(bytes);
    }

    /// False while the standby asks without reading the answers.
    #[must_use]
    pub fn takes_input(&self) -> bool {
        self.sender.takes_input()
    }

    /// Tells that the standby has closed the connection.
    pub fn closed(&mut self) {
        self.sender.closed();
    }

    /// Tells the time.
    pub fn tick(&mut self, now: Now) {
        self.sender.tick(now);
    }

    /// Time (of [`Now::mono`]) at which [`tick`](Self::tick) has something to do.
    #[must_use]
    pub fn deadline(&self) -> Option<std::time::Duration> {
        self.sender.deadline()
    }

    /// Moves the end of what may be sent forward.
    pub fn advance(&mut self, bound: Lsn) {
        if bound > self.bound {
            self.bound = bound;
            self.sender.advance(bound);
        }
    }

    /// Tells of timelines that have come to the log.
    pub fn extend(&mut self, wal: &ShardWal) {
        if wal.system != self.system {
            self.give_up(Failure::Withdrawn);
        } else if wal.lineage != self.lineage {
            self.lineage = wal.lineage.clone();
            self.sender.extend(wal.lineage.clone());
        }
    }

    /// Ends the connection, with a reason that the standby is told.
    pub fn give_up(&mut self, failure: Failure) {
        if self.failure.is_none() {
            self.sender.give_up(failure.told());
            self.failure = Some(failure);
        }
    }

    /// A reader of the journal that is needed to go on; the answer comes by [`supply`](Self::supply).
    pub fn ask(&mut self) -> Option<(Ask, Need)> {
        self.ask.take()
    }

    /// Takes the answer to an [`Ask`], unless the standby has gone elsewhere since.
    pub fn supply(&mut self, ask: Ask, supply: Supply<F>) {
        if self.source.ask() == Some(ask)
            && let Err(failure) = self.source.supply(supply)
        {
            self.give_up(failure);
        }
    }

    /// The next event. Reads of the journal what may be sent, and as much as there is room for.
    pub fn poll(&mut self) -> Option<Event> {
        loop {
            while let Some(event) = self.sender.poll() {
                if let Some(event) = self.event(event) {
                    return Some(event);
                }
            }
            match self.send() {
                Ok(true) => {}
                Ok(false) => return None,
                Err(failure) => self.give_up(failure),
            }
        }
    }

    /// Sends log. False: nothing is wanted, or a reader is needed first.
    fn send(&mut self) -> Result<bool, Failure> {
        let Some(wanted) = self.sender.wanted() else {
            self.source.read_ahead();
            let next = self.source.ask().filter(|ask| matches!(ask, Ask::After(_)));
            self.ask = next.map(|ask| (ask, Need::WhenMoved));
            return Ok(false);
        };
        self.source.seek(wanted.from.at);
        self.part.clear();
        self.source.fill(wanted.bytes_max, &mut self.part)?;
        if self.part.is_empty() {
            self.ask = self.source.ask().map(|ask| (ask, Need::Now));
            return Ok(false);
        }
        let sent = self.sender.wal(wanted.from.at, &self.part);
        sent.map_err(|error| SenderEnd::Owner { reason: error.to_string() })?;
        Ok(true)
    }

    fn event(&mut self, event: SenderEvent) -> Option<Event> {
        Some(match event {
            SenderEvent::LoggedIn(client) => Event::LoggedIn { name: client.application_name },
            SenderEvent::Identified => {
                self.is_told = true;
                return None;
            }
            SenderEvent::Started { from, .. } => {
                self.is_told = false;
                Event::Started { from }
            }
            SenderEvent::Status(status) => {
                // At its start a standby names as written what it has applied.
                let has = status.applied.max(status.flushed);
                if Some(has.0) > self.bound.0.checked_next_multiple_of(8) {
                    self.give_up(Failure::Ahead { standby: has, apply_to: self.bound });
                }
                Event::Status(status)
            }
            SenderEvent::TimelineEnded { timeline, next } => {
                Event::TimelineEnded { timeline, next }
            }
            SenderEvent::Stopped => Event::Stopped,
            SenderEvent::Refused { command, reason, start } => {
                if let Some(from) = start {
                    let (standby, apply_to) = (from.at, self.bound);
                    self.give_up(if standby > apply_to {
                        Failure::Ahead { standby, apply_to }
                    } else {
                        Failure::OtherHistory { from }
                    });
                }
                Event::Refused { command, reason }
            }
            SenderEvent::Ended(end) => Event::Ended(self.failure.take().unwrap_or_else(|| {
                let has_left = matches!(end, SenderEnd::Goodbye | SenderEnd::Closed);
                if self.is_told && has_left {
                    let timeline = self.lineage.timeline_at(self.bound);
                    return Failure::LeftWhenTold { system: self.system, timeline };
                }
                Failure::Connection(end)
            })),
        })
    }
}
