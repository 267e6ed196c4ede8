//! Notes: what the journal says besides records. They never travel on a link.
//!
//! | at | bytes | field |
//! |---|---|---|
//! | 0 | 1 | kind: 128 checkpoint, 129 copy state, 130 epoch start, 131 clean end, 132 shape, 133 activity log, 134 policy, 135 machine, 136 mark, 137 shards |
//! | 1 | 3 | 0 |
//! | 4 | 4 | bytes of the body |
//! | 8 | 4 | CRC-32C of the body |
//! | 12 | 4 | CRC-32C of bytes 0 to 11 |
//!
//! The body is the note's fields in postcard's encoding.

use super::format::COUNT_MAX;
use super::marks::Mark;
use super::members::{Exposure, KeptMachine, MemberPolicy};
use super::state::State;
use bytes::{BufMut, BytesMut};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use thiserror::Error;
use tidelock_protocol::ids::{Epoch, WriterId};
use tidelock_protocol::message::{CopyState, Form, LogAge};
use tidelock_protocol::record::crc32c;
use tidelock_protocol::vector::CountVector;
use zerocopy::byteorder::little_endian::U32;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Bytes before the body.
pub const NOTE_HEADER_BYTES: usize = 16;
/// The largest body: a checkpoint is below it, since each part of a state is bounded (`state.rs`, `members.rs`).
pub const NOTE_BODY_MAX_BYTES: usize = 3 << 19;

/// One note.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Note {
    /// The state after everything before it. Begins every segment, so that the segments before
    /// it can go.
    Checkpoint(Box<State>),
    /// A writer's copy state changes by something other than a record.
    Copy {
        /// The writer.
        writer: WriterId,
        /// From here on.
        copy: CopyState,
    },
    /// The group is recovered.
    EpochStart(EpochStart),
    /// The server stopped cleanly: this is no torn tail.
    CleanEnd,
    /// The group's writers or its form have changed.
    Shape(Shape),
    /// A host's activity log is so far: records from here on may have been admitted under it.
    Log {
        /// The host.
        writer: WriterId,
        /// How far.
        age: LogAge,
    },
    /// A member has said what it does when this server cannot be reached.
    Policy {
        /// The member's name.
        member: String,
        /// Policy of the member; `None`: nothing is known of it any more.
        policy: Option<MemberPolicy>,
    },
    /// A member's machine is described or approved.
    Machine {
        /// The member's name.
        member: String,
        /// Machine of the member; `None`: nothing is known of it any more.
        machine: Option<KeptMachine>,
    },
    /// A bookmark or pin is set or taken out.
    Mark {
        /// Name of the mark.
        name: String,
        /// The mark; `None`: it is taken out.
        mark: Option<Mark>,
    },
    /// The store has so many shards from here on.
    Shards(u16),
}

/// What a group is from here on.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Shape {
    /// How many writers it has ever had: new ones are added at the end.
    pub writers: u16,
    /// Those that were removed.
    pub removed: Vec<WriterId>,
    /// The group could be recovered when these were added, and still can be without them.
    pub joining: bool,
    /// How records say what they depend on. It changes only while every record is in the cut.
    pub form: Form,
}

/// The beginning of an epoch: what belongs to older ones is void beyond its cut.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct EpochStart {
    /// The new epoch.
    pub epoch: Epoch,
    /// What of the older ones counts.
    pub cut: CountVector,
    /// What of them was in the journal.
    pub journaled: CountVector,
    /// Writers that were in the middle of a resync, and those that were left out because the end of their initial copies
    /// is beyond the cut, for people.
    pub resyncing: Vec<WriterId>,
    /// When, in milliseconds since the Unix epoch: for people.
    pub at_unix_ms: u64,
    /// The operator stated that the primary is dead, so the grace was not waited for.
    pub primary_declared_dead: bool,
    /// Members whose clients may have seen what the cut does not have. Forgotten with the next recovery.
    pub exposed: Vec<Exposure>,
}

/// Why bytes are not a note.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum NoteError {
    /// It ends too early.
    #[error("the entry ends inside a note")]
    Short,
    /// Damaged.
    #[error("checksum mismatch")]
    Checksum,
    /// The checksum is right but the content breaks the format.
    #[error("malformed: {0}")]
    Malformed(&'static str),
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned, Clone, Copy)]
#[repr(C)]
struct RawNote {
    kind: u8,
    zero: [u8; 3],
    body_len: U32,
    body_crc: U32,
    crc: U32,
}

const _: () = assert!(size_of::<RawNote>() == NOTE_HEADER_BYTES);

impl Note {
    /// The first kind of a note; below are records.
    pub const KIND_MIN: u8 = 128;

    /// Appends the note.
    pub fn encode(&self, out: &mut BytesMut) {
        let (kind, body) = match self {
            Note::Checkpoint(state) => (128, postcard::to_stdvec(state)),
            Note::Copy { writer, copy } => (129, postcard::to_stdvec(&(writer, copy))),
            Note::EpochStart(start) => (130, postcard::to_stdvec(start)),
            Note::CleanEnd => (131, Ok(Vec::new())),
            Note::Shape(shape) => (132, postcard::to_stdvec(shape)),
            Note::Log { writer, age } => (133, postcard::to_stdvec(&(writer, age))),
            Note::Policy { member, policy } => (134, postcard::to_stdvec(&(member, policy))),
            Note::Machine { member, machine } => (135, postcard::to_stdvec(&(member, machine))),
            Note::Mark { name, mark } => (136, postcard::to_stdvec(&(name, mark))),
            Note::Shards(shards) => (137, postcard::to_stdvec(shards)),
        };
        let body = body.expect("notes are plain data");
        assert!(body.len() <= NOTE_BODY_MAX_BYTES, "a note's parts are bounded where they arise");
        let mut raw = RawNote {
            kind,
            zero: [0; 3],
            body_len: (body.len() as u32).into(),
            body_crc: crc32c(&body).into(),
            crc: 0.into(),
        };
        raw.crc = crc32c(&raw.as_bytes()[..NOTE_HEADER_BYTES - 4]).into();
        out.put_slice(raw.as_bytes());
        out.put_slice(&body);
    }

    /// Reads the note at the front of `bytes`, and how many bytes it takes.
    pub fn decode(bytes: &[u8]) -> Result<(Note, usize), NoteError> {
        let Ok((raw, rest)) = RawNote::read_from_prefix(bytes) else {
            return Err(NoteError::Short);
        };
        if raw.crc.get() != crc32c(&raw.as_bytes()[..NOTE_HEADER_BYTES - 4]) {
            return Err(NoteError::Checksum);
        }
        let len = raw.body_len.get() as usize;
        if len > NOTE_BODY_MAX_BYTES || raw.zero != [0; 3] {
            return Err(NoteError::Malformed("header"));
        }
        let body = rest.get(..len).ok_or(NoteError::Short)?;
        if raw.body_crc.get() != crc32c(body) {
            return Err(NoteError::Checksum);
        }
        let note = match raw.kind {
            128 => {
                let state: Box<State> = parse(body)?;
                if !state.is_in_bounds() {
                    return Err(NoteError::Malformed("checkpoint out of bounds"));
                }
                Note::Checkpoint(state)
            }
            129 => {
                let (writer, copy) = parse(body)?;
                Note::Copy { writer, copy }
            }
            130 => {
                let start: EpochStart = parse(body)?;
                if start.epoch.0 > COUNT_MAX {
                    return Err(NoteError::Malformed("epoch out of bounds"));
                }
                Note::EpochStart(start)
            }
            131 if body.is_empty() => Note::CleanEnd,
            132 => Note::Shape(parse(body)?),
            133 => {
                let (writer, age) = parse(body)?;
                Note::Log { writer, age }
            }
            134 => {
                let (member, policy) = parse(body)?;
                Note::Policy { member, policy }
            }
            135 => {
                let (member, machine) = parse(body)?;
                Note::Machine { member, machine }
            }
            136 => {
                let (name, mark) = parse(body)?;
                Note::Mark { name, mark }
            }
            137 => Note::Shards(parse(body)?),
            _ => return Err(NoteError::Malformed("unknown kind")),
        };
        Ok((note, NOTE_HEADER_BYTES + len))
    }
}

fn parse<T: DeserializeOwned>(body: &[u8]) -> Result<T, NoteError> {
    match postcard::take_from_bytes(body) {
        Ok((value, [])) => Ok(value),
        _ => Err(NoteError::Malformed("body")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tidelock_protocol::ids::Seq;
    use tidelock_protocol::message::Mode;

    #[test]
    fn a_checkpoint_from_which_counting_would_overflow_is_refused() {
        let decode = |change: &dyn Fn(&mut State)| {
            let mut state = State::new(64);
            change(&mut state);
            let mut bytes = BytesMut::new();
            Note::Checkpoint(Box::new(state)).encode(&mut bytes);
            Note::decode(&bytes)
        };
        assert!(decode(&|s| s.writers[63].seq = Seq(COUNT_MAX)).is_ok());
        assert!(decode(&|s| s.epoch = Epoch(COUNT_MAX)).is_ok());
        let refused = Err(NoteError::Malformed("checkpoint out of bounds"));
        assert_eq!(decode(&|s| s.writers[63].seq = Seq(COUNT_MAX + 1)), refused);
        assert_eq!(decode(&|s| s.epoch = Epoch(u64::MAX)), refused);
        assert_eq!(decode(&|s| s.writers.push(s.writers[0])), refused);
    }

    #[test]
    fn notes_survive_and_flips_are_noticed() {
        let notes = [
            Note::Checkpoint(Box::default()),
            Note::Copy { writer: WriterId(3), copy: CopyState::Resyncing },
            Note::Log { writer: WriterId(3), age: LogAge { file: 1 << 60, number: 77 } },
            Note::EpochStart(EpochStart {
                epoch: Epoch(2),
                cut: CountVector::of(WriterId(1), Seq(77)),
                journaled: CountVector::of(WriterId(1), Seq(79)),
                resyncing: vec![WriterId(1)],
                at_unix_ms: 1,
                primary_declared_dead: true,
                exposed: vec![Exposure {
                    member: "vm".into(),
                    host: "host-a".into(),
                    after_ms: Some(30_000),
                    is_known: true,
                    since_unix_ms: None,
                    serves_unreached: true,
                }],
            }),
            Note::CleanEnd,
            Note::Shards(7),
            Note::Policy { member: "vm".into(), policy: None },
            Note::Machine { member: "vm".into(), machine: Some(KeptMachine::default()) },
            Note::Policy {
                member: "vm".into(),
                policy: Some(MemberPolicy {
                    mode: Mode::Async,
                    mode_since_unix_ms: 5,
                    after_ms: Some(30_000),
                    degraded_since_unix_ms: Some(7),
                    has_left: false,
                    serves_unreached: true,
                }),
            },
            Note::Shape(Shape {
                writers: 3,
                removed: vec![WriterId(1)],
                joining: true,
                form: Form::Hlc,
            }),
        ];
        for note in notes {
            let mut bytes = BytesMut::new();
            note.encode(&mut bytes);
            assert!(bytes[0] >= Note::KIND_MIN);
            assert_eq!(Note::decode(&bytes), Ok((note.clone(), bytes.len())));
            for bit in 0..bytes.len() * 8 {
                let mut bad = bytes.clone();
                bad[bit / 8] ^= 1 << (bit % 8);
                assert!(Note::decode(&bad).is_err(), "{note:?} bit {bit}");
            }
            for cut in 0..bytes.len() {
                assert!(Note::decode(&bytes[..cut]).is_err());
            }
        }
    }
}
