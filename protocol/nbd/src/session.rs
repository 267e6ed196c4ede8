//! One client connection: cuts the stream into options and requests.
//!
//! ```text
//!  ClientFlags ──▶ OptionHeader ◀────────────────┐
//!                   │    │                       │
//!                   │    ├─▶ OptionData ─────────┤ executed; GO, EXPORT_NAME ──▶ RequestHeader
//!                   │    └─▶ OptionSkip ─────────┘ refused
//!                   └──────▶ OptionSkip ──▶ Closed   (ABORT)
//!
//!  RequestHeader ──▶ RequestHeader     request handed out, or answered here
//!                ──▶ Payload ─────┐    WRITE handed out; the caller takes its payload
//!                ──▶ PayloadSkip ─┤    WRITE refused; its payload is read past
//!                      ▲──────────┘
//!                ──▶ Closed            DISC
//!
//!  any ──▶ Failed                      ProtocolError; nothing is read any more
//! ```
//!
//! Invariant: the state says what the next input byte is. In particular a payload byte is
//! never read as a header: while payload is owed, [`Session::next`] refuses to go on.

use bytes::BytesMut;

use crate::errno::Errno;
use crate::error::ProtocolError;
use crate::export::ExportTable;
use crate::limits;
use crate::negotiation::{self, KnownOption, Negotiation, Outcome, Plan};
use crate::reply::ReplyEncoder;
use crate::request::{Command, Request, Rules, Verdict};
use crate::wire::{
    self, OPTION_HEADER_BYTES, OptionHeader, REQUEST_HEADER_BYTES, RequestHeader, cmd, rep,
};

/// What the caller has to act on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// The negotiation is over; requests for this export follow.
    Opened {
        /// Its index in the [`ExportTable`].
        export: usize,
    },
    /// The client wanted this export, whose places are all taken ([`crate::Users`]). It was
    /// told, and may ask for another one.
    Refused {
        /// Its index in the [`ExportTable`].
        export: usize,
    },
    /// To be executed and answered.
    ///
    /// After a WRITE the next `len` bytes of the stream are its payload: take them, report
    /// them with [`Session::payload_taken`], and only then call [`Session::next`] again.
    Request(Request),
    /// Send what [`Session::output`] holds before giving more input: the client asks
    /// without reading the answers.
    OutputFull,
    /// The client said goodbye. Answer what is in flight, send the output, close.
    Disconnected,
}

/// What one call of [`Session::next`] did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Step {
    /// Input bytes taken: all of them if there is no event.
    pub consumed: usize,
    /// What happened, if the caller must act.
    pub event: Option<Event>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    ClientFlags,
    OptionHeader,
    OptionData { option: KnownOption, len: usize },
    OptionSkip { option: u32, left: u32, then: AfterSkip },
    RequestHeader,
    Payload { owed: u32 },
    PayloadSkip { left: u32, cookie: u64, errno: Errno, why: &'static str },
    Closed,
    Failed(ProtocolError),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum AfterSkip {
    Refuse(u32, &'static str),
    Close,
}

/// What is known once an export is open.
#[derive(Clone, Copy, Debug)]
struct Open {
    export: usize,
    rules: Rules,
    encoder: ReplyEncoder,
}

/// The server's side of one connection.
#[derive(Debug)]
pub struct Session {
    state: State,
    open: Option<Open>,
    header: PartialHeader,
    output: BytesMut,
    exports: ExportTable,
    negotiation: Negotiation,
    option_data: Vec<u8>,
    option_count: u32,
}

impl Session {
    /// A new connection. The greeting is in [`Session::output`].
    pub fn new(exports: ExportTable) -> Self {
        let mut output = BytesMut::new();
        negotiation::greeting(&mut output);
        Self {
            state: State::ClientFlags,
            open: None,
            header: PartialHeader::default(),
            output,
            exports,
            negotiation: Negotiation::default(),
            option_data: Vec::new(),
            option_count: 0,
        }
    }

    /// Bytes to be sent to the client, in order, and in order with the caller's own replies.
    /// The caller drains it (`split`, `advance`); it may append its replies to it as well.
    pub fn output(&mut self) -> &mut BytesMut {
        &mut self.output
    }

    /// Take input up to the next event. Without an event all input was taken and more is
    /// needed; with one, call again with what is left.
    ///
    /// After an error the connection must be closed; what [`Session::output`] holds may still
    /// be sent. The same error is returned from then on.
    #[inline]
    pub fn next(&mut self, input: &[u8]) -> Result<Step, ProtocolError> {
        let mut rest = input;
        match self.advance(&mut rest) {
            Ok(event) => Ok(Step { consumed: input.len() - rest.len(), event }),
            Err(error) => {
                self.state = State::Failed(error);
                Err(error)
            }
        }
    }

    /// Payload bytes of the last WRITE that the caller has not reported yet. They come next
    /// in the stream.
    pub fn payload_owed(&self) -> u32 {
        match self.state {
            State::Payload { owed } => owed,
            _ => 0,
        }
    }

    /// The caller took this many payload bytes from the stream, at most what is owed.
    #[inline]
    pub fn payload_taken(&mut self, bytes: u32) {
        let owed = self.payload_owed();
        debug_assert!(bytes <= owed, "{bytes} payload bytes taken, {owed} owed");
        self.state = match self.state {
            State::Payload { owed } if bytes == owed => State::RequestHeader,
            State::Payload { owed } if bytes < owed => State::Payload { owed: owed - bytes },
            other if bytes == 0 => other,
            // The place in the stream is lost.
            _ => State::Failed(ProtocolError::PayloadAccounting { bytes: bytes - owed }),
        };
    }

    /// The index of the open export.
    pub fn export(&self) -> Option<usize> {
        self.open.map(|open| open.export)
    }

    /// Makes the replies to requests; there is one once an export is open.
    pub fn encoder(&self) -> Option<ReplyEncoder> {
        self.open.map(|open| open.encoder)
    }

    /// From now on answer requests and options by saying that the server shuts down.
    /// Requests that were handed out are still to be answered.
    pub fn begin_shutdown(&mut self) {
        self.negotiation.shutting_down = true;
        if let Some(open) = &mut self.open {
            open.rules.begin_shutdown();
        }
    }

    /// The client has gone: its place at the export is free.
    pub fn leave(&mut self) {
        self.negotiation.place = None;
    }

    /// The client said goodbye or broke the protocol: nothing more is read.
    pub fn is_closed(&self) -> bool {
        matches!(self.state, State::Closed | State::Failed(_))
    }

    /// The transition function: repeats until an event, or until the input is used up.
    fn advance(&mut self, rest: &mut &[u8]) -> Result<Option<Event>, ProtocolError> {
        loop {
            match self.state {
                State::RequestHeader => {
                    if self.must_wait(rest) {
                        return Ok(Some(Event::OutputFull));
                    }
                    let Some(bytes) = self.header.take::<REQUEST_HEADER_BYTES>(rest) else {
                        return Ok(None);
                    };
                    if let Some(event) = self.request(&bytes)? {
                        return Ok(Some(event));
                    }
                }
                State::Payload { owed } => {
                    debug_assert!(false, "next() while {owed} payload bytes are owed");
                    return Err(ProtocolError::PayloadAccounting { bytes: owed });
                }
                State::PayloadSkip { left, cookie, errno, why } => {
                    let left = skip(rest, left);
                    self.state = State::PayloadSkip { left, cookie, errno, why };
                    if left > 0 {
                        return Ok(None);
                    }
                    self.refuse_request(cookie, errno, why);
                    self.state = State::RequestHeader;
                }
                State::ClientFlags => {
                    let Some(bytes) = self.header.take::<4>(rest) else {
                        return Ok(None);
                    };
                    self.negotiation.client_flags(u32::from_be_bytes(bytes))?;
                    self.state = State::OptionHeader;
                }
                State::OptionHeader => {
                    if self.must_wait(rest) {
                        return Ok(Some(Event::OutputFull));
                    }
                    let Some(bytes) = self.header.take::<OPTION_HEADER_BYTES>(rest) else {
                        return Ok(None);
                    };
                    self.option_header(&bytes)?;
                }
                State::OptionData { option, len } => {
                    let wanted = len - self.option_data.len();
                    let (taken, left) = rest.split_at(wanted.min(rest.len()));
                    self.option_data.extend_from_slice(taken);
                    *rest = left;
                    if self.option_data.len() < len {
                        return Ok(None);
                    }
                    if let Some(event) = self.option(option)? {
                        return Ok(Some(event));
                    }
                }
                State::OptionSkip { option, left, then } => {
                    let left = skip(rest, left);
                    self.state = State::OptionSkip { option, left, then };
                    if left > 0 {
                        return Ok(None);
                    }
                    match then {
                        AfterSkip::Refuse(error, why) => {
                            self.negotiation.refused(option);
                            negotiation::refuse(&mut self.output, option, error, why);
                            self.state = State::OptionHeader;
                        }
                        AfterSkip::Close => {
                            negotiation::reply(&mut self.output, option, rep::ACK, &[]);
                            self.state = State::Closed;
                        }
                    }
                }
                State::Closed => {
                    // A client must send nothing after its goodbye. Whatever it is, drop it.
                    *rest = &[];
                    return Ok(Some(Event::Disconnected));
                }
                State::Failed(error) => return Err(error),
            }
        }
    }

    /// Whether to begin nothing new before the output is sent. What was begun is finished,
    /// so that no answer waits for input that may never come.
    fn must_wait(&self, rest: &[u8]) -> bool {
        self.output.len() >= limits::OUTPUT_HIGH_WATER_BYTES && !rest.is_empty()
    }

    fn option_header(&mut self, bytes: &[u8; OPTION_HEADER_BYTES]) -> Result<(), ProtocolError> {
        let header: OptionHeader = zerocopy::transmute!(*bytes);
        if header.magic.get() != wire::OPTION_MAGIC {
            return Err(ProtocolError::OptionMagic { magic: header.magic.get() });
        }
        self.option_count += 1;
        if self.option_count > limits::MAX_OPTIONS {
            return Err(ProtocolError::TooManyOptions);
        }
        let (option, len) = (header.option.get(), header.len.get());
        self.state = match self.negotiation.plan(option, len)? {
            Plan::Collect(option) => {
                self.option_data.clear();
                State::OptionData { option, len: len as usize }
            }
            Plan::Refuse(error, why) => {
                State::OptionSkip { option, left: len, then: AfterSkip::Refuse(error, why) }
            }
            Plan::Abort => State::OptionSkip { option, left: len, then: AfterSkip::Close },
        };
        Ok(())
    }

    fn option(&mut self, option: KnownOption) -> Result<Option<Event>, ProtocolError> {
        let outcome =
            self.negotiation.execute(&self.exports, option, &self.option_data, &mut self.output)?;
        match outcome {
            Outcome::Continue => {
                self.state = State::OptionHeader;
                Ok(None)
            }
            Outcome::Refused(export) => {
                // EXPORT_NAME has no answer that is not a success.
                let has_answer = option != KnownOption::ExportName;
                self.state = if has_answer { State::OptionHeader } else { State::Closed };
                Ok(Some(Event::Refused { export }))
            }
            Outcome::Open(index) => {
                let export = &self.exports.as_slice()[index];
                let structured = self.negotiation.structured;
                let block_status = self.negotiation.allocation_of == Some(index);
                let mut rules = Rules::new(export, structured, block_status);
                if self.negotiation.shutting_down {
                    rules.begin_shutdown();
                }
                let encoder = ReplyEncoder::new(structured, export.block_size.min);
                self.open = Some(Open { export: index, rules, encoder });
                // Negotiation is over, give its memory back.
                self.option_data = Vec::new();
                self.state = State::RequestHeader;
                Ok(Some(Event::Opened { export: index }))
            }
        }
    }

    fn request(
        &mut self,
        bytes: &[u8; REQUEST_HEADER_BYTES],
    ) -> Result<Option<Event>, ProtocolError> {
        let header: RequestHeader = zerocopy::transmute!(*bytes);
        if header.magic.get() != wire::REQUEST_MAGIC {
            return Err(ProtocolError::RequestMagic { magic: header.magic.get() });
        }
        let command = header.command.get();
        if command == cmd::DISC {
            self.state = State::Closed;
            return Ok(Some(Event::Disconnected));
        }
        let len = header.len.get();
        if command == cmd::WRITE && len > limits::MAX_SKIPPED_PAYLOAD_BYTES {
            return Err(ProtocolError::WriteTooLong { len });
        }
        let open = self.open.as_ref().expect("requests are read after an export was opened");
        match open.rules.check(&header) {
            Verdict::Pass(request) => {
                if request.command == Command::Write {
                    self.state = State::Payload { owed: len };
                }
                Ok(Some(Event::Request(request)))
            }
            Verdict::Empty(request) => {
                self.output.extend_from_slice(&open.encoder.done(&request));
                Ok(None)
            }
            Verdict::Refuse(errno, why) => {
                let cookie = header.cookie.get();
                if command == cmd::WRITE {
                    self.state = State::PayloadSkip { left: len, cookie, errno, why };
                } else {
                    self.refuse_request(cookie, errno, why);
                }
                Ok(None)
            }
        }
    }

    fn refuse_request(&mut self, cookie: u64, errno: Errno, why: &str) {
        let open = self.open.as_ref().expect("requests are read after an export was opened");
        open.encoder.error_cookie(cookie, errno, why, &mut self.output);
    }
}

/// Drop up to `left` bytes of input; returns how many are still to come.
fn skip(rest: &mut &[u8], left: u32) -> u32 {
    let taken = (left as usize).min(rest.len());
    *rest = &rest[taken..];
    left - taken as u32
}

/// The beginning of a header whose rest has not arrived.
#[derive(Debug, Default)]
struct PartialHeader {
    bytes: [u8; REQUEST_HEADER_BYTES],
    len: usize,
}

impl PartialHeader {
    /// The next `N` bytes of the stream, if they are there. If not, all input is kept.
    #[inline]
    fn take<const N: usize>(&mut self, rest: &mut &[u8]) -> Option<[u8; N]> {
        const { assert!(N <= REQUEST_HEADER_BYTES) };
        if self.len == 0
            && let Some((header, left)) = rest.split_first_chunk::<N>()
        {
            *rest = left;
            return Some(*header);
        }
        let (taken, left) = rest.split_at((N - self.len).min(rest.len()));
        self.bytes[self.len..self.len + taken.len()].copy_from_slice(taken);
        self.len += taken.len();
        *rest = left;
        if self.len < N {
            return None;
        }
        self.len = 0;
        self.bytes.first_chunk::<N>().copied()
    }
}
