//! The link of a store: one connection from each primary host to the backup server, for all shards that are led there.
//!
//! Frames are those of the link of groups ([`tidelock_protocol::frame`]) with other messages: control messages are
//! [`StoreMessage`]s in frames of a kind of their own, by which the first frame tells the two links apart. Records are entries of
//! shards' logs ([`ShardEntry`](crate::ShardEntry)), and the channel is the shard's number.
//!
//! ```text
//!  host: Hello ─▶ Origin, Ask of each shard ─▶ records and Jumps ──────────────▶ Ask after a loss ─▶ …
//!  backup:     ◀─ Welcome               ◀─ Reply (Asked)        ◀─ Reply (Taken) of each, Progress
//! ```
//!
//! A record is a [`Backup`] of one entry: its seq is the attempt, its writer is 0, it has no dependencies, and `after` is where the
//! entry begins. An entry without content does not say where it begins, so it travels as [`StoreMessage::Jump`].
//!
//! Tunnels carry bytes from the backup to a shard's server at the primary site, for a copy of the shard
//! (`pg_basebackup`). Each end may send [`TUNNEL_WINDOW_BYTES`] that the other has not taken.

use crate::{Backup, Entry, LogIndex, LogPoint, Reply, ShardEntry, Verdict};
use bytes::{Bytes, BytesMut};
use serde::{Deserialize, Serialize};
use std::borrow::Cow;
use thiserror::Error;
use tidelock_protocol::bounds;
use tidelock_protocol::frame::{self, Control, Frame};
use tidelock_protocol::hlc::Hlc;
use tidelock_protocol::ids::{Channel, Epoch, MonoNanos, Seq, WriterId};
use tidelock_protocol::limits;
use tidelock_protocol::message::RefusalKind;
use tidelock_protocol::record::Record;
use tidelock_protocol::vector::CountVector;

/// The version of the messages.
pub const VERSION: u16 = 1;
/// The largest content of an entry.
pub const ENTRY_MAX_BYTES: usize = limits::COPY_MAX_BYTES as usize;
/// The largest timeline history of a shard, or another description of where it comes from.
pub const ORIGIN_MAX_BYTES: usize = 64 << 10;
/// The most bytes of a tunnel in one message.
pub const TUNNEL_DATA_MAX_BYTES: usize = 64 << 10;
/// The most bytes that an end of a tunnel sends before the other has taken them.
pub const TUNNEL_WINDOW_BYTES: usize = 1 << 20;

/// A frame of this link.
pub type StoreFrame = Frame<StoreMessage, ShardEntry>;

/// The log that a shard's positions are of: a standby is given a log only by the server whose copy it was made from.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Origin {
    /// PostgreSQL's system identifier; of another store any number that a new log of the shard changes.
    pub system_id: u64,
    /// PostgreSQL's timeline, or the term of another store.
    pub timeline: u32,
    /// PostgreSQL's timeline history file, as it is; empty for timeline 1.
    pub history: String,
    /// Bytes of a WAL segment; 0 of another store.
    pub segment_bytes: u32,
    /// PostgreSQL's major version; 0 of another store.
    pub version: u32,
}

/// A control message of the link of a store. About the shard of its channel unless said otherwise.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum StoreMessage {
    /// Host: the first message of a connection.
    Hello {
        /// Oldest version spoken.
        oldest: u16,
        /// Newest version spoken.
        newest: u16,
        /// The host's name.
        host: String,
        /// Software and version, for the log.
        software: String,
        /// The store.
        store: String,
        /// All shards of the store by number, also those that other hosts lead. All hosts say the same.
        shards: Vec<String>,
    },
    /// Backup: the answer.
    Welcome {
        /// The version that both will speak.
        protocol: u16,
        /// The server's name.
        server: String,
        /// Software and version, for the log.
        software: String,
    },
    /// Backup: the connection ends.
    Refused {
        /// Why, for programs.
        kind: RefusalKind,
        /// Why, and what to do, for people.
        reason: String,
    },
    /// Host: which log of the shard is on record?
    AskOrigin,
    /// Backup: the log on record; none, if nothing of the shard was ever shipped.
    OnRecord {
        /// The log.
        origin: Option<Origin>,
    },
    /// Host: the log that the shard's positions are of. Before the first [`StoreMessage::Ask`], and whenever it changes.
    Origin(Origin),
    /// Host: where does the backup stand?
    Ask {
        /// Comes back with the reply.
        attempt: u64,
    },
    /// Host: an entry without content.
    Jump {
        /// The attempt, as in a [`Backup`].
        attempt: u64,
        /// The end of the entry before.
        after: LogIndex,
        /// The end of this one, and its effective stamp.
        to: LogPoint,
    },
    /// Backup: the answer to an entry or a question.
    Reply(Reply),
    /// Backup, on channel 0: progress of the store, whenever it has changed.
    Progress {
        /// Entries of all shards up to this effective stamp are at the backup.
        watermark: Hlc,
        /// The greatest effective stamp of an update of any shard that has arrived.
        updated: Hlc,
    },
    /// Host: the shard's stamps stand still (`Some`: why), or go on (`None`).
    Stands {
        /// For people.
        reason: Option<String>,
    },
    /// Host: a clock was not believed, so no cut is at a stamp later than `after` and earlier than `through`. Before the entries with
    /// these stamps.
    Doubt {
        /// The last stamp before.
        after: Hlc,
        /// The first stamp behind that of what was placed meanwhile: several entries have that one.
        through: Hlc,
    },
    /// Host, on channel 0: it is there.
    Beat {
        /// The host's clock when it was sent; comes back as it is.
        sent_at: MonoNanos,
    },
    /// Backup, on channel 0: the answer.
    Beaten {
        /// The beat's.
        sent_at: MonoNanos,
    },
    /// Backup: a tunnel to the shard's server.
    Open {
        /// Its number on this connection.
        tunnel: u32,
    },
    /// Either: bytes of a tunnel.
    Data {
        /// The tunnel.
        tunnel: u32,
        /// At most [`TUNNEL_DATA_MAX_BYTES`], not empty.
        data: Bytes,
    },
    /// Either: bytes of a tunnel were taken: as many more may be sent.
    Taken {
        /// The tunnel.
        tunnel: u32,
        /// Number of bytes.
        bytes: u32,
    },
    /// Either: the tunnel is closed, both ways.
    Close {
        /// The tunnel.
        tunnel: u32,
        /// Why, if it is not the end of the bytes.
        reason: Option<String>,
    },
}

const TEXT: &str = "a text is longer than 4 KiB or has control characters";

impl StoreMessage {
    /// The text for people in it.
    fn text(&mut self) -> Option<&mut String> {
        match self {
            Self::Hello { software: text, .. }
            | Self::Welcome { software: text, .. }
            | Self::Refused { reason: text, .. }
            | Self::Stands { reason: Some(text) }
            | Self::Close { reason: Some(text), .. } => Some(text),
            _ => None,
        }
    }

    fn has_long_text(&self) -> bool {
        let (Self::Hello { software: text, .. }
        | Self::Welcome { software: text, .. }
        | Self::Refused { reason: text, .. }
        | Self::Stands { reason: Some(text) }
        | Self::Close { reason: Some(text), .. }) = self
        else {
            return false;
        };
        !bounds::is_text(text)
    }
}

impl Control for StoreMessage {
    const KIND: u8 = frame::KIND_STORE_CONTROL;

    fn check(&self) -> Result<(), &'static str> {
        let holds = |holds: bool, what: &'static str| if holds { Ok(()) } else { Err(what) };
        holds(!self.has_long_text(), TEXT)?;
        match self {
            Self::Hello { host, store, shards, .. } => {
                let names = || [host, store].into_iter().chain(shards);
                holds(
                    names().all(|name| bounds::is_name(name)),
                    "a name is not 1 to 64 letters, digits, '.', '_', '-'",
                )?;
                holds(
                    (1..=usize::from(limits::SHARDS_MAX)).contains(&shards.len()),
                    "a store has 1 to 1024 shards",
                )
            }
            Self::Welcome { server, .. } => holds(bounds::is_text(server), TEXT),
            Self::Origin(origin) | Self::OnRecord { origin: Some(origin) } => {
                let history = &origin.history;
                holds(history.len() <= ORIGIN_MAX_BYTES, "a timeline history above 64 KiB")
            }
            Self::Data { data, .. } => holds(
                (1..=TUNNEL_DATA_MAX_BYTES).contains(&data.len()),
                "data of a tunnel is not 1 byte to 64 KiB",
            ),
            Self::Jump { after, to, .. } => holds(to.index > *after, "a jump that goes back"),
            Self::Refused { .. }
            | Self::AskOrigin
            | Self::OnRecord { origin: None }
            | Self::Doubt { .. }
            | Self::Ask { .. }
            | Self::Reply(_)
            | Self::Progress { .. }
            | Self::Stands { .. }
            | Self::Beat { .. }
            | Self::Beaten { .. }
            | Self::Open { .. }
            | Self::Taken { .. }
            | Self::Close { .. } => Ok(()),
        }
    }

    fn capped(&self) -> Cow<'_, Self> {
        if !self.has_long_text() {
            return Cow::Borrowed(self);
        }
        let mut capped = self.clone();
        if let Some(text) = capped.text() {
            *text = bounds::cap(text);
        }
        Cow::Owned(capped)
    }

    fn invalid(reason: String) -> Self {
        Self::Refused { kind: RefusalKind::Invalid, reason }
    }
}

/// An entry that this link does not carry.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
pub enum TooLarge {
    /// The content.
    #[error(
        "the entry that ends at {end} has {bytes} bytes, and at most {ENTRY_MAX_BYTES} are sent"
    )]
    Content {
        /// The entry.
        end: LogIndex,
        /// Bytes of its content.
        bytes: usize,
    },
    /// Span of the log.
    #[error("the entry that ends at {end} takes more than 2^32 units of the log, or none")]
    Span {
        /// The entry.
        end: LogIndex,
    },
}

/// Appends the frames of a message of a shard's agent.
///
/// # Errors
/// The entry cannot be sent; those before it are appended.
pub fn encode(shard: u16, message: &Backup, out: &mut BytesMut) -> Result<(), TooLarge> {
    let Backup { attempt, mut after, ref entries } = *message;
    let channel = Channel(shard);
    if entries.is_empty() {
        frame::encode_control(channel, &StoreMessage::Ask { attempt }, out);
    }
    for entry in entries {
        let end = entry.end;
        match &entry.data {
            Some(data) => {
                let bytes = data.data().len();
                if bytes > ENTRY_MAX_BYTES {
                    return Err(TooLarge::Content { end, bytes });
                }
                let body = ShardEntry::after(shard, after, entry).ok_or(TooLarge::Span { end })?;
                let record = Record {
                    writer: WriterId(0),
                    seq: Seq(attempt),
                    epoch: Epoch(1),
                    hlc: entry.stamp,
                    deps: CountVector::new(),
                    body,
                };
                frame::encode_record_head(channel, &record, out);
                out.extend_from_slice(data.data());
            }
            None => {
                let jump = StoreMessage::Jump { attempt, after, to: entry.point() };
                frame::encode_control(channel, &jump, out);
            }
        }
        after = end;
    }
    Ok(())
}

/// The message that a frame of a host carries for the agent at the backup, with its shard; the frame itself, if it is for
/// somebody else.
///
/// # Errors
/// The frame contradicts itself.
pub fn decode(frame: StoreFrame) -> Result<(u16, Backup), Undecoded> {
    match frame {
        Frame::Record(Channel(shard), record) => {
            let begin = record.body.begin().filter(|_| record.body.shard == shard);
            let is_plain = record.writer == WriterId(0) && record.deps == CountVector::new();
            let Some(after) = begin.filter(|_| is_plain) else { return Err(Undecoded::Malformed) };
            let attempt = record.seq.0;
            Ok((shard, Backup { attempt, after, entries: vec![ShardEntry::entry(record)] }))
        }
        Frame::Control(Channel(shard), StoreMessage::Ask { attempt }) => {
            Ok((shard, Backup { attempt, after: LogIndex(0), entries: Vec::new() }))
        }
        Frame::Control(Channel(shard), StoreMessage::Jump { attempt, after, to }) => {
            Ok((shard, Backup { attempt, after, entries: vec![Entry::begins(to)] }))
        }
        Frame::Control(channel, message) => Err(Undecoded::Other(channel, message)),
        Frame::Part(..) => Err(Undecoded::Malformed),
    }
}

/// A frame that carries nothing for a shard's agent.
#[derive(Clone, Debug, PartialEq)]
pub enum Undecoded {
    /// Another message.
    Other(Channel, StoreMessage),
    /// A frame that contradicts itself.
    Malformed,
}

impl Verdict {
    /// The standing that it tells.
    #[must_use]
    pub fn standing(&self) -> Option<crate::Standing> {
        match self {
            Self::Taken(at) | Self::OutOfOrder(at) | Self::Asked(at) | Self::Full(at) => Some(*at),
            Self::NotLeader | Self::Fenced => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use tidelock_protocol::record::Payload;

    fn frames(bytes: &mut BytesMut) -> Vec<StoreFrame> {
        std::iter::from_fn(|| frame::decode_of(bytes).unwrap()).collect()
    }

    fn some_entry() -> impl Strategy<Value = (u64, u64, Option<Vec<u8>>, bool)> {
        let data = prop::option::of(prop::collection::vec(any::<u8>(), 1..50));
        (1u64..1000, 0u64..9, data, any::<bool>())
    }

    proptest! {
        #[test]
        fn a_message_arrives_as_one_for_each_entry(
            shard in 0..limits::SHARDS_MAX, attempt: u64, after in 0u64..1 << 50,
            entries in prop::collection::vec(some_entry(), 0..6),
        ) {
            let mut end = after;
            let entries: Vec<_> = entries.into_iter().map(|(span, stamp, data, nop)| {
                end += span;
                let (end, stamp) = (LogIndex(end), Hlc(stamp));
                match data {
                    Some(data) => Entry { nop, ..Entry::update(end, stamp, Payload::new(data.into())) },
                    None => Entry::begins(LogPoint { index: end, stamp }),
                }
            }).collect();
            let message = Backup { attempt, after: LogIndex(after), entries };
            let mut bytes = BytesMut::new();
            encode(shard, &message, &mut bytes).unwrap();
            let mut next = message.after;
            let mut arrived = Vec::new();
            for frame in frames(&mut bytes) {
                let (of, backup) = decode(frame).unwrap();
                prop_assert_eq!((of, backup.attempt), (shard, attempt));
                if !backup.entries.is_empty() {
                    prop_assert_eq!(backup.after, next);
                    next = backup.entries[0].end;
                }
                arrived.extend(backup.entries);
            }
            prop_assert_eq!(arrived, message.entries);
            prop_assert!(bytes.is_empty());
        }
    }

    #[test]
    fn a_message_out_of_bounds_is_refused_and_one_with_a_long_text_is_cut() {
        let hello = |store: &str, shards: usize| StoreMessage::Hello {
            oldest: 1,
            newest: 1,
            host: "h0".into(),
            software: "test".into(),
            store: store.into(),
            shards: vec!["s0".into(); shards],
        };
        assert!(hello("orders", 1024).check().is_ok());
        for wrong in [hello("../orders", 1), hello("orders", 0), hello("orders", 1025)] {
            assert!(wrong.check().is_err(), "{wrong:?}");
        }
        let at = |index| LogPoint { index: LogIndex(index), stamp: Hlc(0) };
        let jump = |to| StoreMessage::Jump { attempt: 1, after: LogIndex(5), to: at(to) };
        assert!(jump(6).check().is_ok() && jump(5).check().is_err());
        let data = |len| StoreMessage::Data { tunnel: 1, data: vec![0; len].into() };
        assert!(data(TUNNEL_DATA_MAX_BYTES).check().is_ok());
        assert!(data(0).check().is_err() && data(TUNNEL_DATA_MAX_BYTES + 1).check().is_err());
        let stands = StoreMessage::Stands { reason: Some("clock\u{7} ".repeat(1000)) };
        assert!(stands.check().is_err());
        assert!(stands.capped().check().is_ok());
    }

    #[test]
    fn a_record_that_is_no_entry_of_its_channel_is_malformed() {
        let entry = Entry::update(LogIndex(7), Hlc(1), Payload::new(vec![1].into()));
        let backup = Backup { attempt: 1, after: LogIndex(5), entries: vec![entry] };
        let mut bytes = BytesMut::new();
        encode(3, &backup, &mut bytes).unwrap();
        let Some(Frame::Record(channel, record)) = frames(&mut bytes).pop() else { panic!() };
        let at = |channel, record| decode(Frame::Record(channel, record));
        assert!(at(channel, record.clone()).is_ok());
        assert_eq!(at(Channel(4), record.clone()), Err(Undecoded::Malformed));
        let foreign = Record { writer: WriterId(1), ..record };
        assert_eq!(at(channel, foreign), Err(Undecoded::Malformed));
        let entry = |end: u64, bytes: usize| {
            let data = Payload::new(vec![0; bytes].into());
            Entry::update(LogIndex(end), Hlc(1), data)
        };
        let sent = |entry: Entry| {
            let backup = Backup { attempt: 1, after: LogIndex(5), entries: vec![entry] };
            encode(3, &backup, &mut BytesMut::new())
        };
        assert_eq!(sent(entry(6, ENTRY_MAX_BYTES)), Ok(()));
        let end = LogIndex(6);
        let bytes = ENTRY_MAX_BYTES + 1;
        assert_eq!(sent(entry(6, bytes)), Err(TooLarge::Content { end, bytes }));
        let end = LogIndex(6 + (1 << 32));
        assert_eq!(sent(entry(end.0, 1)), Err(TooLarge::Span { end }));
    }
}
