//! Replies to requests, in any order: header bytes to be sent in front of the caller's data.

use std::ops::Deref;

use bytes::{BufMut, BytesMut};
use zerocopy::IntoBytes;

use crate::errno::Errno;
use crate::extents::{Descriptors, Extent};
use crate::limits;
use crate::request::{Command, Request};
use crate::wire::{self, ChunkHeader, SimpleReplyHeader, chunk};

const HEADER_CAPACITY: usize = 32;

/// A reply's bytes, or those that come before the data of a READ.
#[derive(Clone, Copy, Debug)]
pub struct ReplyHeader {
    bytes: [u8; HEADER_CAPACITY],
    len: u8,
}

impl ReplyHeader {
    fn new(parts: &[&[u8]]) -> Self {
        let mut bytes = [0; HEADER_CAPACITY];
        let mut len = 0;
        for part in parts {
            bytes[len..len + part.len()].copy_from_slice(part);
            len += part.len();
        }
        Self { bytes, len: len as u8 }
    }
}

impl Deref for ReplyHeader {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.bytes[..self.len.into()]
    }
}

impl AsRef<[u8]> for ReplyHeader {
    fn as_ref(&self) -> &[u8] {
        self
    }
}

/// Whether more chunks of the same reply follow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ChunkPosition {
    /// More follow.
    More,
    /// This one ends the reply: nothing can fail any more.
    Last,
}

/// Makes the replies of one session, in the style that it negotiated.
///
/// It is a copy of two numbers, so it can be kept beside requests that are in flight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReplyEncoder {
    structured: bool,
    min_block: u32,
}

impl ReplyEncoder {
    pub(crate) fn new(structured: bool, min_block: u32) -> Self {
        Self { structured, min_block }
    }

    /// Success of a request that returns no data.
    #[inline]
    pub fn done(&self, request: &Request) -> ReplyHeader {
        // A READ that is empty is answered by its own kind of reply.
        debug_assert!(request.command != Command::Read || request.len == 0);
        debug_assert!(request.command != Command::BlockStatus);
        if request.command == Command::Read && self.structured {
            let header = chunk_header(request, chunk::FLAG_DONE, chunk::NONE, 0);
            return ReplyHeader::new(&[header.as_bytes()]);
        }
        // Allowed with structured replies too, and shorter.
        ReplyHeader::new(&[simple_header(request, 0).as_bytes()])
    }

    /// Success of a READ: the whole of its data (`request.len` bytes) must follow.
    #[inline]
    pub fn read(&self, request: &Request) -> ReplyHeader {
        debug_assert!(request.command == Command::Read);
        if self.structured && request.len > 0 {
            return data_chunk(request, request.offset, request.len, ChunkPosition::Last);
        }
        if self.structured {
            return self.done(request);
        }
        ReplyHeader::new(&[simple_header(request, 0).as_bytes()])
    }

    /// Whether this READ may be answered in several chunks ([`ReplyEncoder::read_chunk`]).
    pub fn can_split(&self, request: &Request) -> bool {
        self.structured && request.command == Command::Read && !request.flags.df()
    }

    /// A part of a READ's data: `len` bytes must follow. Chunks may come in any order, must
    /// not overlap, and must cover the request unless an error chunk is sent as well.
    ///
    /// # Panics
    /// If the request must not be split or the part is not inside it: the client could not
    /// make sense of what would follow.
    pub fn read_chunk(
        &self,
        request: &Request,
        offset: u64,
        len: u32,
        position: ChunkPosition,
    ) -> ReplyHeader {
        self.check_part(request, offset, len);
        data_chunk(request, offset, len, position)
    }

    /// A part of a READ that is all zeroes; nothing follows.
    ///
    /// # Panics
    /// As [`ReplyEncoder::read_chunk`].
    pub fn read_hole(
        &self,
        request: &Request,
        offset: u64,
        len: u32,
        position: ChunkPosition,
    ) -> ReplyHeader {
        self.check_part(request, offset, len);
        let header = chunk_header(request, done_flag(position), chunk::OFFSET_HOLE, 12);
        let parts: [&[u8]; 3] = [header.as_bytes(), &offset.to_be_bytes(), &len.to_be_bytes()];
        ReplyHeader::new(&parts)
    }

    fn check_part(&self, request: &Request, offset: u64, len: u32) {
        assert!(self.can_split(request), "this READ must be answered in one piece");
        let end = offset.checked_add(len.into());
        let inside = offset >= request.offset && end.is_some_and(|end| end <= request.end());
        assert!(len > 0 && inside, "a chunk must be a part of its request");
    }

    /// Failure. `message` is for humans and reaches those clients that use structured replies.
    ///
    /// Also ends a reply of which some chunks were sent. Without structured replies a READ
    /// whose header was sent cannot fail any more: close the connection.
    pub fn error(&self, request: &Request, errno: Errno, message: &str, out: &mut BytesMut) {
        self.error_cookie(request.cookie.0, errno, message, out);
    }

    pub(crate) fn error_cookie(&self, cookie: u64, errno: Errno, text: &str, out: &mut BytesMut) {
        if !self.structured {
            out.put_slice(simple_header_for(cookie, errno.number()).as_bytes());
            return;
        }
        let text = &text.as_bytes()[..text.floor_char_boundary_to(limits::MAX_MESSAGE_BYTES)];
        let header = ChunkHeader {
            magic: wire::STRUCTURED_REPLY_MAGIC.into(),
            flags: chunk::FLAG_DONE.into(),
            kind: chunk::ERROR.into(),
            cookie: cookie.into(),
            len: (4 + 2 + text.len() as u32).into(),
        };
        out.put_slice(header.as_bytes());
        out.put_u32(errno.number());
        out.put_u16(text.len() as u16);
        out.put_slice(text);
    }

    /// Success of a BLOCK_STATUS. `extents` describe the disk from the request's offset on,
    /// without gaps; they may reach beyond the request and may end before it. No more of them
    /// are taken than are needed.
    pub fn block_status(
        &self,
        request: &Request,
        extents: impl IntoIterator<Item = Extent>,
        out: &mut BytesMut,
    ) {
        debug_assert!(request.command == Command::BlockStatus && self.structured);
        let only_one = request.flags.req_one();
        let mut descriptors = Descriptors::new(request.len, self.min_block, only_one);
        for extent in extents {
            if !descriptors.push(extent) {
                break;
            }
        }
        let descriptors = descriptors.finish();
        let len = 4 + 8 * descriptors.len() as u32;
        let header = chunk_header(request, chunk::FLAG_DONE, chunk::BLOCK_STATUS, len);
        out.reserve(size_of::<ChunkHeader>() + len as usize);
        out.put_slice(header.as_bytes());
        out.put_u32(wire::BASE_ALLOCATION_ID);
        for (len, state) in descriptors {
            out.put_u32(len);
            out.put_u32(state.bits());
        }
    }
}

fn done_flag(position: ChunkPosition) -> u16 {
    match position {
        ChunkPosition::More => 0,
        ChunkPosition::Last => chunk::FLAG_DONE,
    }
}

fn data_chunk(request: &Request, offset: u64, len: u32, position: ChunkPosition) -> ReplyHeader {
    let header = chunk_header(request, done_flag(position), chunk::OFFSET_DATA, 8 + len);
    ReplyHeader::new(&[header.as_bytes(), &offset.to_be_bytes()])
}

fn simple_header(request: &Request, error: u32) -> SimpleReplyHeader {
    simple_header_for(request.cookie.0, error)
}

fn simple_header_for(cookie: u64, error: u32) -> SimpleReplyHeader {
    SimpleReplyHeader {
        magic: wire::SIMPLE_REPLY_MAGIC.into(),
        error: error.into(),
        cookie: cookie.into(),
    }
}

fn chunk_header(request: &Request, flags: u16, kind: u16, len: u32) -> ChunkHeader {
    ChunkHeader {
        magic: wire::STRUCTURED_REPLY_MAGIC.into(),
        flags: flags.into(),
        kind: kind.into(),
        cookie: request.cookie.0.into(),
        len: len.into(),
    }
}

trait FloorCharBoundary {
    fn floor_char_boundary_to(&self, max: usize) -> usize;
}

impl FloorCharBoundary for str {
    /// The longest prefix of at most `max` bytes that ends between two characters.
    fn floor_char_boundary_to(&self, max: usize) -> usize {
        (0..=max.min(self.len())).rev().find(|&at| self.is_char_boundary(at)).unwrap_or(0)
    }
}
