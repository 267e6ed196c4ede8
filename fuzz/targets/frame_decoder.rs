//! The link: no peer can make the frame decoder panic, take more than it announced, or hand on
//! something out of bounds; pieces make no difference; what is decoded encodes to the same again. The link of stores reads the
//! same bytes.
//!
//! Input: mode (bit 0: checksums are made right first, bit 1: lengths too), two bytes for the
//! pieces, the stream.
#![no_main]

use bytes::{BufMut, BytesMut};
use libfuzzer_sys::fuzz_target;
use tidelock_protocol::frame::{self, Frame, FrameError};
use tidelock_protocol::ids::{Incarnation, Nonce, RunId, Seq};
use tidelock_protocol::limits::{
    DISKS_MAX, PART_MAX_BYTES, RECORD_DEPS_MAX, RECORD_MAX_BYTES, RECORD_PAYLOAD_MAX_BYTES,
    WRITERS_MAX,
};
use tidelock_protocol::message::Message;
use tidelock_protocol::part::Gathering;
use tidelock_protocol::record::Record;
use tidelock_protocol::vector::CountVector;
use tidelock_shard::ShardEntry;
use tidelock_shard::link::{self, StoreMessage};

fuzz_target!(|data: &[u8]| {
    let [mode, first, second, rest @ ..] = data else { return };
    let mut stream = rest.to_vec();
    if mode & 1 != 0 {
        tidelock_fuzz::seal::frames(&mut stream, mode & 2 != 0);
    }
    let (whole, end) = decode(&stream, &[stream.len().max(1)]);
    let (pieced, pieced_end) = decode(&stream, &tidelock_fuzz::pieces(*first, *second));
    assert_eq!(whole, pieced);
    // How much of a wrong magic has arrived depends on the pieces.
    assert_eq!(
        end.as_ref().err().map(std::mem::discriminant),
        pieced_end.as_ref().err().map(std::mem::discriminant)
    );
    whole.iter().for_each(|(frame, bytes)| check(frame, bytes));
    check_store(stream);
});

/// A message of a shard's agent that is decoded encodes to frames that say the same.
fn check_store(stream: Vec<u8>) {
    let mut stream = BytesMut::from(&stream[..]);
    while let Ok(Some(frame)) = frame::decode_of::<StoreMessage, ShardEntry>(&mut stream) {
        let Ok((shard, backup)) = link::decode(frame) else { continue };
        let mut again = BytesMut::new();
        if link::encode(shard, &backup, &mut again).is_ok() {
            let frame = frame::decode_of(&mut again).expect("what was encoded is decoded");
            assert_eq!(frame.map(link::decode), Some(Ok((shard, backup))));
        }
    }
}

/// A frame, and the bytes that it was decoded from.
type WithBytes<'a> = (Frame, &'a [u8]);

/// Decode a stream that arrives in pieces of these lengths, over and over.
fn decode<'a>(stream: &'a [u8], pieces: &[usize]) -> (Vec<WithBytes<'a>>, Result<(), FrameError>) {
    let mut frames = vec![];
    let mut unread = stream;
    let mut buffer = BytesMut::new();
    let mut rest = stream;
    let mut pieces = pieces.iter().cycle();
    while !rest.is_empty() {
        let len = pieces.next().map_or(1, |&len| len.min(rest.len()));
        let (piece, later) = rest.split_at(len);
        rest = later;
        buffer.extend_from_slice(piece);
        loop {
            let before = buffer.len();
            match frame::decode(&mut buffer) {
                Ok(Some(frame)) => {
                    let (bytes, later) = unread.split_at(before - buffer.len());
                    unread = later;
                    frames.push((frame, bytes));
                }
                Ok(None) => {
                    assert!(frame::bytes_missing(&buffer) > 0, "nothing is missing");
                    break;
                }
                Err(error) => return (frames, Err(error)),
            }
        }
    }
    (frames, Ok(()))
}

fn check(frame: &Frame, bytes: &[u8]) {
    let mut again = BytesMut::new();
    match frame {
        Frame::Control(channel, message) => {
            check_message(message);
            frame::encode_control(*channel, message, &mut again);
        }
        Frame::Part(channel, part) => {
            assert!(!part.data.is_empty() && part.data.len() <= PART_MAX_BYTES as usize);
            assert!(part.at as usize + part.data.len() <= part.total_bytes as usize);
            assert!(part.total_bytes <= RECORD_MAX_BYTES);
            frame::encode_part(*channel, part, &mut again);
            assert_eq!(again, bytes, "one part has one encoding");
            let mut gathering = Gathering::default();
            let before = Seq(part.seq.0 - 1);
            let run = RunId { number: Incarnation(1), nonce: Nonce(0, 0) };
            gathering.attached(run, before);
            let taken = gathering.add(before, part);
            assert!(!matches!(taken, Ok(Some(_))), "a part is not a whole");
            assert_eq!(taken.is_ok(), part.at == 0);
        }
        Frame::Record(channel, record) => {
            check_record(record);
            frame::encode_record_head(*channel, record, &mut again);
            again.put_slice(record.payload().map_or(&[], |payload| payload.data()));
            assert_eq!(again.len(), frame::HEADER_BYTES + record.encoded_len());
            // The journal keeps what it makes of a record, and its checksum is end to end.
            assert_eq!(again, bytes, "one record has one encoding");
        }
    }
    let decoded = frame::decode(&mut again).expect("what was encoded is decoded");
    assert_eq!(decoded.as_ref(), Some(frame));
    assert!(again.is_empty());
}

fn check_record(record: &Record) {
    assert!(record.writer.0 < WRITERS_MAX && record.body.disk.0 < DISKS_MAX);
    assert!(record.seq.0 > 0 && record.epoch.0 > 0);
    assert!(record.body.offset.checked_add(record.body.len_bytes().into()).is_some());
    assert!(record.deps.entries().count() <= RECORD_DEPS_MAX.into());
    check_vector(&record.deps);
    if let Some(payload) = record.payload() {
        assert!(!payload.data().is_empty());
        assert!(payload.data().len() <= RECORD_PAYLOAD_MAX_BYTES as usize);
    }
}

fn check_message(message: &Message) {
    let _ = format!("{message:?}");
    match message {
        Message::Progress(progress) => check_vector(&progress.committed),
        Message::Attached(attached) => check_vector(&attached.progress.committed),
        _ => {}
    }
}

/// The gate's shared memory has this many places.
fn check_vector(vector: &CountVector) {
    assert!(vector.entries().all(|(writer, _)| writer.0 < WRITERS_MAX));
}
