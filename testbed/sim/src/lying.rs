//! Peers of the backup with a certificate of their own that say what other hosts say: rule 11.
//!
//! Each has one connection, on which it repeats the attachment of a member as a newer run, and goes on with records and
//! messages of it. None of them is told anything but a refusal, and nothing that they say changes what is checked of others.

use crate::failure::Checked;
use crate::net::ConnId;
use crate::schedule::{MS, S};
use crate::server::encode;
use crate::world::{Event, World, note};
use bytes::BytesMut;
use std::net::{IpAddr, Ipv4Addr};
use tidelock_protocol::frame::Frame;
use tidelock_protocol::hlc::Hlc;
use tidelock_protocol::ids::{Channel, DiskId, WriterId};
use tidelock_protocol::message::{Attach, LastRun, Message, PROTOCOL};
use tidelock_protocol::record::{DiskChange, Effect, Payload, Record};
use tidelock_protocol::vector::CountVector;
use tidelock_replica::group::Link;

/// Liars have connections of these numbers and above. There is no network to them: what they are told, nobody reads.
const FIRST_LIAR: ConnId = 1 << 32;
/// The name in their certificate.
const NAME: &str = "liar";

/// True if a liar is at the other end.
pub(crate) fn is_of_liar(link: Link) -> bool {
    link.connection.0 >= FIRST_LIAR
}

impl World {
    /// A liar connects and speaks.
    pub(crate) fn peer_lies(&mut self) -> Checked {
        if !self.faulty {
            return Ok(());
        }
        let after = self.rng.span(S);
        self.schedule.after(after, Event::Lie);
        let group = self.rng.index(self.plan.groups.len());
        let attaches = &self.backup.groups[group].attaches;
        if !self.backup.is_up() || attaches.is_empty() {
            return Ok(());
        }
        let nth = self.rng.index(attaches.len());
        let attach = attaches.values().nth(nth).expect("one of them").clone();
        let mut words = BytesMut::new();
        for frame in self.lies(group, attach) {
            encode(&frame, &mut words);
        }
        self.liars += 1;
        let id = FIRST_LIAR + self.liars;
        note!(self, "a liar connects: {id}, {} bytes", words.len());
        self.backup_accepts(id, NAME, IpAddr::V4(Ipv4Addr::new(10, 9, 9, 9)))?;
        while !words.is_empty() {
            let count = self.rng.index(words.len()) + 1;
            self.backup_hears(id, &words.split_to(count))?;
        }
        let after = self.rng.span(500 * MS);
        self.schedule.after(after, Event::LiarLeaves { conn: id });
        Ok(())
    }

    /// The words of one connection, in the name of a member that attached so.
    fn lies(&mut self, group: usize, mut attach: Attach) -> Vec<Frame> {
        let (oldest, newest) = PROTOCOL;
        // The name is another host's, or its own.
        let name = if self.rng.chance(1, 2) { "h0" } else { NAME };
        let (host, software) = (name.to_owned(), "lies".to_owned());
        let hello = Message::Hello { oldest, newest, host, software };
        let channel = Channel(self.rng.range(1..3) as u16);
        let seqs = self.backup.groups[group].contiguous.clone();
        let epoch = self.backup.groups[group].group().map_or(attach.epoch, |of| of.epoch());
        let writer = attach.writing().map_or(WriterId(0), |writing| writing.writer);
        if let Some(writing) = attach.writing_mut() {
            writing.incarnation.0 += self.rng.below(3);
            writing.last_run = LastRun::Unknown;
        }
        attach.epoch = epoch;
        if self.rng.chance(1, 8) {
            attach.group = "another".to_owned();
        }
        let mut frames = vec![Frame::Control(Channel(0), hello)];
        if self.rng.chance(7, 8) {
            frames.push(Frame::Control(channel, Message::Attach(Box::new(attach))));
        }
        let mut seq = seqs.get(writer);
        for _ in 0..self.rng.below(6) {
            let sent_at = self.backup_now().mono;
            frames.push(match self.rng.below(6) {
                0 => Frame::Control(channel, Message::Beacon { sent_at }),
                1 => Frame::Control(channel, Message::Detach { end: None }),
                2 => Frame::Control(channel, Message::GiveUpLease),
                _ => {
                    seq = seq.next();
                    Frame::Record(
                        channel,
                        Record {
                            writer,
                            seq,
                            epoch,
                            hlc: Hlc::new(self.backup_now().unix_ms, 0),
                            deps: CountVector::new(),
                            body: DiskChange {
                                disk: DiskId(0),
                                offset: 0,
                                copy: false,
                                flushed: false,
                                effect: Effect::Write(Payload::new(vec![0xee; 512].into())),
                            },
                        },
                    )
                }
            });
        }
        frames
    }
}
