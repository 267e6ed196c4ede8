//! The client half of an NBD connection, as a guest's hypervisor has it: bytes in, what they say and bytes to send out.

use bytes::{Buf, BufMut, Bytes, BytesMut};
use std::collections::BTreeMap;
use tidelock_nbd::wire::{
    self, ChunkHeader, OptionHeader, OptionReplyHeader, RequestHeader, SimpleReplyHeader, chunk,
    cmd, handshake, option, rep,
};
use zerocopy::{FromBytes, IntoBytes};

/// Bytes of the greeting.
const GREETING_BYTES: usize = 18;
/// Bytes of the answer to EXPORT_NAME without its zeroes.
const EXPORT_BYTES: usize = 10;

/// Message of the server.
#[derive(Debug)]
pub(crate) enum Heard {
    /// Requests may be sent.
    Opened,
    /// No place is free, or the server refuses.
    Refused,
    /// The reply to the request of this cookie: data, or an error number.
    Reply(u64, Result<Bytes, u32>),
}

/// Options by which the client opens the disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Style {
    /// EXPORT_NAME, which old clients say.
    Old,
    /// GO.
    Simple,
    /// GO, with structured replies and block status.
    Structured,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Greeting,
    /// The answer to this option comes next.
    Option(u32),
    Open,
    Closed,
}

/// A client.
#[derive(Debug)]
pub(crate) struct NbdClient {
    export: String,
    style: Style,
    state: State,
    input: BytesMut,
    /// To be sent.
    pub(crate) output: BytesMut,
    /// Reads that are not answered: how long the answer is.
    reads: BTreeMap<u64, usize>,
    /// Data of chunks of a reply that has not ended, and its error.
    chunks: BTreeMap<u64, (BytesMut, u32)>,
}

impl NbdClient {
    pub(crate) fn new(export: String, style: Style) -> Self {
        Self {
            export,
            style,
            state: State::Greeting,
            input: BytesMut::new(),
            output: BytesMut::new(),
            reads: BTreeMap::new(),
            chunks: BTreeMap::new(),
        }
    }

    pub(crate) fn is_open(&self) -> bool {
        self.state == State::Open
    }

    /// Block status may be asked for.
    pub(crate) fn has_block_status(&self) -> bool {
        self.style == Style::Structured
    }

    /// Sends a request.
    pub(crate) fn request(
        &mut self,
        flags: u16,
        command: u16,
        cookie: u64,
        offset: u64,
        len: u32,
        data: &[u8],
    ) {
        let header = RequestHeader {
            magic: wire::REQUEST_MAGIC.into(),
            flags: flags.into(),
            command: command.into(),
            cookie: cookie.into(),
            offset: offset.into(),
            len: len.into(),
        };
        self.output.put_slice(header.as_bytes());
        self.output.put_slice(data);
        if command == cmd::READ {
            self.reads.insert(cookie, len as usize);
        }
    }

    /// Bytes have come.
    pub(crate) fn hear(&mut self, bytes: &[u8]) {
        self.input.put_slice(bytes);
    }

    /// The next message, if it is complete. An error: the server has broken the protocol.
    pub(crate) fn next(&mut self) -> Result<Option<Heard>, String> {
        loop {
            let (before, state) = (self.input.len(), self.state);
            let heard = match self.state {
                State::Greeting => self.greeting()?,
                State::Option(option::EXPORT_NAME) => self.export()?,
                State::Option(option) => self.option_reply(option)?,
                State::Open => self.reply()?,
                State::Closed => return Ok(None),
            };
            if heard.is_some() || (self.input.len() == before && self.state == state) {
                return Ok(heard);
            }
        }
    }

    fn greeting(&mut self) -> Result<Option<Heard>, String> {
        if self.input.len() < GREETING_BYTES {
            return Ok(None);
        }
        let (first, second) = (self.input.get_u64(), self.input.get_u64());
        let flags = self.input.get_u16();
        if (first, second) != (wire::GREETING_MAGIC, wire::OPTION_MAGIC) {
            return Err("it does not greet".to_owned());
        }
        self.output.put_u32(u32::from(flags & (handshake::FIXED_NEWSTYLE | handshake::NO_ZEROES)));
        match self.style {
            Style::Old => {
                let name = self.export.clone();
                self.option(option::EXPORT_NAME, name.as_bytes());
            }
            Style::Simple => self.go(),
            Style::Structured => self.option(option::STRUCTURED_REPLY, &[]),
        }
        Ok(None)
    }

    fn option(&mut self, number: u32, data: &[u8]) {
        self.put_option(number, data);
        self.state = State::Option(number);
    }

    /// Asks for an option.
    pub(crate) fn put_option(&mut self, number: u32, data: &[u8]) {
        let header = OptionHeader {
            magic: wire::OPTION_MAGIC.into(),
            option: number.into(),
            len: (data.len() as u32).into(),
        };
        self.output.put_slice(header.as_bytes());
        self.output.put_slice(data);
    }

    fn go(&mut self) {
        let mut data = BytesMut::new();
        put_text(&mut data, &self.export);
        data.put_u16(0);
        self.option(option::GO, &data);
    }

    fn export(&mut self) -> Result<Option<Heard>, String> {
        if self.input.len() < EXPORT_BYTES {
            return Ok(None);
        }
        self.input.advance(EXPORT_BYTES);
        self.state = State::Open;
        Ok(Some(Heard::Opened))
    }

    fn option_reply(&mut self, asked: u32) -> Result<Option<Heard>, String> {
        let Ok((header, rest)) = OptionReplyHeader::read_from_prefix(&self.input[..]) else {
            return Ok(None);
        };
        let len = header.len.get() as usize;
        if rest.len() < len {
            return Ok(None);
        }
        self.input.advance(size_of::<OptionReplyHeader>() + len);
        if header.magic.get() != wire::OPTION_REPLY_MAGIC || header.option.get() != asked {
            return Err(format!("option {asked} is answered by {header:?}"));
        }
        match (asked, header.reply.get()) {
            (option::STRUCTURED_REPLY, rep::ACK) => {
                let mut data = BytesMut::new();
                put_text(&mut data, &self.export);
                data.put_u32(1);
                put_text(&mut data, wire::BASE_ALLOCATION);
                self.option(option::SET_META_CONTEXT, &data);
            }
            (option::SET_META_CONTEXT, rep::ACK) => self.go(),
            (option::GO, rep::ACK) => {
                self.state = State::Open;
                return Ok(Some(Heard::Opened));
            }
            (option::SET_META_CONTEXT, rep::META_CONTEXT) | (option::GO, rep::INFO) => {}
            (option::GO, rep::ERR_POLICY) => {
                self.state = State::Closed;
                return Ok(Some(Heard::Refused));
            }
            (asked, reply) => return Err(format!("option {asked} is answered by {reply:#x}")),
        }
        Ok(None)
    }

    fn reply(&mut self) -> Result<Option<Heard>, String> {
        let Some(magic) = self.input.first_chunk().copied().map(u32::from_be_bytes) else {
            return Ok(None);
        };
        match magic {
            wire::SIMPLE_REPLY_MAGIC => Ok(self.simple_reply()),
            wire::STRUCTURED_REPLY_MAGIC if self.style == Style::Structured => self.chunk(),
            other => Err(format!("a reply begins with {other:#x}")),
        }
    }

    fn simple_reply(&mut self) -> Option<Heard> {
        let (header, rest) = SimpleReplyHeader::read_from_prefix(&self.input[..]).ok()?;
        let (cookie, error) = (header.cookie.get(), header.error.get());
        // Structured replies to reads are chunks.
        let is_data = error == 0 && self.style != Style::Structured;
        let len = self.reads.get(&cookie).copied().filter(|_| is_data).unwrap_or(0);
        if rest.len() < len {
            return None;
        }
        self.reads.remove(&cookie);
        self.input.advance(size_of::<SimpleReplyHeader>());
        let data = self.input.split_to(len).freeze();
        Some(Heard::Reply(cookie, if error == 0 { Ok(data) } else { Err(error) }))
    }

    fn chunk(&mut self) -> Result<Option<Heard>, String> {
        let Ok((header, rest)) = ChunkHeader::read_from_prefix(&self.input[..]) else {
            return Ok(None);
        };
        let len = header.len.get() as usize;
        if rest.len() < len {
            return Ok(None);
        }
        self.input.advance(size_of::<ChunkHeader>());
        let (mut payload, cookie) = (self.input.split_to(len), header.cookie.get());
        let (data, error) = self.chunks.entry(cookie).or_default();
        match header.kind.get() {
            chunk::NONE => {}
            chunk::OFFSET_DATA if len >= 8 => data.put_slice(&payload[8..]),
            chunk::BLOCK_STATUS if len >= 12 => data.put_slice(&payload[4..]),
            chunk::ERROR if len >= 4 => *error = payload.get_u32(),
            kind => return Err(format!("a chunk of kind {kind} has {len} bytes")),
        }
        if header.flags.get() & chunk::FLAG_DONE == 0 {
            return Ok(None);
        }
        let (data, error) = self.chunks.remove(&cookie).expect("just seen");
        let expected = self.reads.remove(&cookie);
        if error == 0 && expected.is_some_and(|len| len != data.len()) {
            return Err(format!("{} bytes of {expected:?} are read", data.len()));
        }
        let data = data.freeze();
        Ok(Some(Heard::Reply(cookie, if error == 0 { Ok(data) } else { Err(error) })))
    }
}

fn put_text(into: &mut BytesMut, text: &str) {
    into.put_u32(text.len() as u32);
    into.put_slice(text.as_bytes());
}
