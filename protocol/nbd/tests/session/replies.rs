//! Every kind of reply, byte by byte, and extents against a slow, obvious oracle.

use crate::common::*;
use bytes::BytesMut;
use proptest::prelude::*;
use tidelock_nbd::limits::MAX_EXTENTS_PER_REPLY;
use tidelock_nbd::{
    BlockSize, ChunkPosition, Command, Cookie, Errno, Export, Extent, ExtentState, ReplyEncoder,
    Request, RequestFlags,
};

const COOKIE: u64 = 0x0102_0304_0506_0708;

fn encoder(structured: bool) -> ReplyEncoder {
    opened(exports(), "disk0", structured).1
}

fn a_request(command: Command, offset: u64, len: u32, flags: RequestFlags) -> Request {
    Request { cookie: Cookie(COOKIE), offset, len, command, flags }
}

fn a_read(offset: u64, len: u32) -> Request {
    a_request(Command::Read, offset, len, RequestFlags::NONE)
}

fn error(structured: bool, request: &Request, errno: Errno, text: &str) -> Vec<u8> {
    let mut out = BytesMut::new();
    encoder(structured).error(request, errno, text, &mut out);
    out.to_vec()
}

#[test]
fn golden_done() {
    let simple = hex("67446698 00000000 0102030405060708");
    for structured in [false, true] {
        for command in
            [Command::Write, Command::Flush, Command::Trim, Command::WriteZeroes, Command::Cache]
        {
            let request = a_request(command, 0, 512, RequestFlags::NONE);
            assert_eq!(encoder(structured).done(&request)[..], simple);
        }
    }
}

#[test]
fn golden_read() {
    let read = a_read(0x1000, 0x200);
    let simple = hex("67446698 00000000 0102030405060708");
    assert_eq!(encoder(false).read(&read)[..], simple);
    // Length covers the offset field and the data.
    let data = hex("668e33ef 0001 0001 0102030405060708 00000208 0000000000001000");
    assert_eq!(encoder(true).read(&read)[..], data);
    // An empty content chunk is not allowed.
    let nothing = a_read(0x1000, 0);
    let none = hex("668e33ef 0001 0000 0102030405060708 00000000");
    assert_eq!(encoder(true).read(&nothing)[..], none);
    assert_eq!(encoder(true).done(&nothing)[..], none);
    assert_eq!(encoder(false).read(&nothing)[..], simple);
}

#[test]
fn golden_read_in_chunks() {
    let encoder = encoder(true);
    let read = a_read(0x1000, 0x400);
    assert!(encoder.can_split(&read));
    let hole = encoder.read_hole(&read, 0x1200, 0x200, ChunkPosition::More);
    assert_eq!(
        hole[..],
        hex("668e33ef 0000 0002 0102030405060708 0000000c 0000000000001200 00000200")
    );
    let data = encoder.read_chunk(&read, 0x1000, 0x200, ChunkPosition::Last);
    assert_eq!(data[..], hex("668e33ef 0001 0001 0102030405060708 00000208 0000000000001000"));
}

#[test]
fn a_read_with_df_or_simple_replies_is_not_split() {
    let df = a_request(Command::Read, 0, 512, RequestFlags::DF);
    assert!(!encoder(true).can_split(&df));
    assert!(!encoder(false).can_split(&a_read(0, 512)));
    assert!(!encoder(true).can_split(&a_request(Command::Write, 0, 512, RequestFlags::NONE)));
    // In one piece it works.
    assert_eq!(encoder(true).read(&df).len(), 28);
}

#[test]
#[should_panic(expected = "in one piece")]
fn splitting_a_df_read_panics() {
    let df = a_request(Command::Read, 0, 512, RequestFlags::DF);
    encoder(true).read_chunk(&df, 0, 256, ChunkPosition::More);
}

#[test]
#[should_panic(expected = "a part of its request")]
fn a_chunk_outside_its_request_panics() {
    encoder(true).read_hole(&a_read(512, 512), 512, 513, ChunkPosition::Last);
}

#[test]
fn golden_error() {
    let write = a_request(Command::Write, 0, 512, RequestFlags::NONE);
    let simple = error(false, &write, Errno::NoSpc, "disk full");
    assert_eq!(simple, hex("67446698 0000001c 0102030405060708"));
    let structured = error(true, &write, Errno::NoSpc, "disk full");
    let header = hex("668e33ef 0001 8001 0102030405060708 0000000f 0000001c 0009");
    assert_eq!(structured, [&header[..], b"disk full"].concat());
    let silent = error(true, &write, Errno::Shutdown, "");
    assert_eq!(silent, hex("668e33ef 0001 8001 0102030405060708 00000006 0000006c 0000"));
}

#[test]
fn a_long_error_text_is_cut_between_characters() {
    let write = a_request(Command::Write, 0, 512, RequestFlags::NONE);
    // 255 bytes, then a character of two bytes across the limit of 256.
    let text = format!("{}é and more", "x".repeat(255));
    let reply = error(true, &write, Errno::Io, &text);
    assert_eq!(reply[26..], text.as_bytes()[..255]);
    assert_eq!(reply[24..26], [0, 255]);
    let fits = "y".repeat(256);
    assert_eq!(error(true, &write, Errno::Io, &fits)[26..], *fits.as_bytes());
}

fn status(len: u32, flags: RequestFlags) -> Request {
    a_request(Command::BlockStatus, 0x2000, len, flags)
}

fn extents(parts: &[(u64, ExtentState)]) -> Vec<Extent> {
    parts.iter().map(|&(len, state)| Extent { len, state }).collect()
}

fn block_status(
    encoder: ReplyEncoder,
    request: &Request,
    extents: impl IntoIterator<Item = Extent>,
) -> Vec<u8> {
    let mut out = BytesMut::new();
    encoder.block_status(request, extents, &mut out);
    out.to_vec()
}

#[test]
fn golden_block_status() {
    let parts = extents(&[
        (0x1000, ExtentState::DATA),
        (0x1000, ExtentState::HOLE_ZERO),
        (0, ExtentState::ZERO),
        (0x1000, ExtentState::HOLE_ZERO),
        (0x800, ExtentState::ZERO),
        (1 << 40, ExtentState::HOLE),
    ]);
    let reply = block_status(encoder(true), &status(0x4000, RequestFlags::NONE), parts.clone());
    let expected = hex("
        668e33ef 0001 0005 0102030405060708 00000024 00000001
        00001000 00000000  00002000 00000003  00000800 00000002  00000800 00000001");
    assert_eq!(reply, expected);
    let first = block_status(encoder(true), &status(0x4000, RequestFlags::REQ_ONE), parts);
    let expected = hex("
        668e33ef 0001 0005 0102030405060708 0000000c 00000001
        00001000 00000000");
    assert_eq!(first, expected);
}

#[test]
fn block_status_without_knowledge_says_data() {
    let expected = hex("
        668e33ef 0001 0005 0102030405060708 0000000c 00000001
        00004000 00000000");
    for flags in [RequestFlags::NONE, RequestFlags::REQ_ONE] {
        assert_eq!(block_status(encoder(true), &status(0x4000, flags), []), expected);
    }
}

#[test]
fn one_extent_is_clipped_and_merged() {
    let parts = extents(&[(0x3000, ExtentState::ZERO), (1 << 50, ExtentState::ZERO)]);
    let request = status(0x4000, RequestFlags::REQ_ONE);
    let expected = hex("
        668e33ef 0001 0005 0102030405060708 0000000c 00000001
        00004000 00000002");
    assert_eq!(block_status(encoder(true), &request, parts), expected);
}

#[test]
fn no_more_extents_are_asked_for_than_fit() {
    let mut asked = 0_usize;
    let stripes = std::iter::from_fn(|| {
        asked += 1;
        let state = if asked.is_multiple_of(2) { ExtentState::ZERO } else { ExtentState::DATA };
        Some(Extent { len: 1, state })
    });
    let reply = block_status(encoder(true), &status(MIB as u32 / 2, RequestFlags::NONE), stripes);
    assert_eq!(reply.len(), 24 + 8 * MAX_EXTENTS_PER_REPLY);
    assert_eq!(asked, MAX_EXTENTS_PER_REPLY + 1);
}

/// The descriptors of a reply.
fn descriptors(reply: &[u8]) -> Vec<(u32, u32)> {
    let word = |bytes: &[u8]| u32::from_be_bytes(bytes.try_into().unwrap());
    reply[24..].chunks_exact(8).map(|d| (word(&d[..4]), word(&d[4..]))).collect()
}

/// What each byte of the request is, one by one, then what each block is.
fn oracle(len: u32, block: u32, parts: &[Extent]) -> Vec<(u32, u32)> {
    let mut bytes = vec![];
    for part in parts {
        let room = len as usize - bytes.len();
        bytes.extend(vec![part.state.bits(); room.min(part.len as usize)]);
    }
    // A reply ends where knowledge ends, at a block's end, or says data if it has nothing.
    let known = (bytes.len() as u32).next_multiple_of(block);
    bytes.resize(if known == 0 { len } else { known } as usize, 0);
    let mut result: Vec<(u32, u32)> = vec![];
    for block_bytes in bytes.chunks(block as usize) {
        let state = block_bytes.iter().fold(3, |all, one| all & one);
        match result.last_mut() {
            Some(last) if last.1 == state => last.0 += block,
            _ => result.push((block, state)),
        }
    }
    result
}

proptest! {
    #[test]
    fn extents_agree_with_the_oracle(
        block_log2 in 0_u32..5,
        blocks in 1_u32..20,
        parts in prop::collection::vec((0_u64..50, 0_usize..4), 0..40),
        only_one in any::<bool>(),
    ) {
        let block = 1 << block_log2;
        let len = blocks * block;
        let states =
            [ExtentState::DATA, ExtentState::HOLE, ExtentState::ZERO, ExtentState::HOLE_ZERO];
        let parts: Vec<Extent> =
            parts.iter().map(|&(len, state)| Extent { len, state: states[state] }).collect();
        let block_size = BlockSize { min: block, ..BlockSize::default() };
        let encoder = opened(one(Export { block_size, ..disk() }), "", true).1;
        let flags = if only_one { RequestFlags::REQ_ONE } else { RequestFlags::NONE };
        let found = descriptors(&block_status(encoder, &status(len, flags), parts.clone()));
        let mut expected = oracle(len, block, &parts);
        if only_one {
            expected.truncate(1);
        }
        prop_assert_eq!(found, expected);
    }
}
