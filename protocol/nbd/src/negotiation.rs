//! Options: what a client may ask before it opens an export.
//!
//! Here an option is complete: its data is one slice, already bounded. What it changes is
//! kept in [`Negotiation`]; its replies are appended to the output.

use bytes::{BufMut, BytesMut};
use zerocopy::IntoBytes;

use crate::error::ProtocolError;
use crate::export::{Export, ExportTable};
use crate::limits;
use crate::users::Place;
use crate::wire::{self, OptionReplyHeader, handshake, info, option, rep};

/// What the client agreed to so far.
#[derive(Debug, Default)]
pub(crate) struct Negotiation {
    fixed_newstyle: bool,
    no_zeroes: bool,
    pub(crate) structured: bool,
    /// The export for which `base:allocation` is selected.
    pub(crate) allocation_of: Option<usize>,
    pub(crate) shutting_down: bool,
    /// At the open export.
    pub(crate) place: Option<Place>,
}

/// What happens to an option whose header arrived.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Plan {
    /// Collect its data, then [`Negotiation::execute`].
    Collect(KnownOption),
    /// Read past its data, then refuse it.
    Refuse(u32, &'static str),
    /// Read past its data, acknowledge, and close.
    Abort,
}

/// Options that are carried out here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum KnownOption {
    ExportName,
    List,
    Info,
    Go,
    StructuredReply,
    ListMetaContext,
    SetMetaContext,
}

impl KnownOption {
    fn new(option: u32) -> Option<Self> {
        Some(match option {
            option::EXPORT_NAME => Self::ExportName,
            option::LIST => Self::List,
            option::INFO => Self::Info,
            option::GO => Self::Go,
            option::STRUCTURED_REPLY => Self::StructuredReply,
            option::LIST_META_CONTEXT => Self::ListMetaContext,
            option::SET_META_CONTEXT => Self::SetMetaContext,
            _ => return None,
        })
    }

    pub(crate) fn number(self) -> u32 {
        match self {
            Self::ExportName => option::EXPORT_NAME,
            Self::List => option::LIST,
            Self::Info => option::INFO,
            Self::Go => option::GO,
            Self::StructuredReply => option::STRUCTURED_REPLY,
            Self::ListMetaContext => option::LIST_META_CONTEXT,
            Self::SetMetaContext => option::SET_META_CONTEXT,
        }
    }
}

/// What an executed option leads to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// The next option.
    Continue,
    /// The export with this index is open.
    Open(usize),
    /// All places at this export are taken; the client was told, if the option has an answer.
    Refused(usize),
}

/// The greeting, sent before the client sends anything.
pub(crate) fn greeting(out: &mut BytesMut) {
    out.put_u64(wire::GREETING_MAGIC);
    out.put_u64(wire::OPTION_MAGIC);
    out.put_u16(handshake::FIXED_NEWSTYLE | handshake::NO_ZEROES);
}

impl Negotiation {
    pub(crate) fn client_flags(&mut self, flags: u32) -> Result<(), ProtocolError> {
        let known = u32::from(handshake::FIXED_NEWSTYLE | handshake::NO_ZEROES);
        if flags & !known != 0 {
            return Err(ProtocolError::ClientFlags { flags });
        }
        self.fixed_newstyle = flags & u32::from(handshake::FIXED_NEWSTYLE) != 0;
        self.no_zeroes = flags & u32::from(handshake::NO_ZEROES) != 0;
        Ok(())
    }

    /// Decide by the header alone, before any data is kept.
    pub(crate) fn plan(&self, option: u32, len: u32) -> Result<Plan, ProtocolError> {
        if !self.fixed_newstyle && option != option::EXPORT_NAME {
            return Err(ProtocolError::NotFixedNewstyle { option });
        }
        if len > limits::MAX_SKIPPED_OPTION_BYTES {
            return Err(ProtocolError::OptionTooLong { option, len });
        }
        if option == option::EXPORT_NAME {
            if self.shutting_down {
                return Err(ProtocolError::ShuttingDown);
            }
            if len as usize > limits::MAX_STRING_BYTES {
                return Err(ProtocolError::UnknownExport);
            }
        }
        if option == option::ABORT {
            return Ok(Plan::Abort);
        }
        if self.shutting_down {
            return Ok(Plan::Refuse(rep::ERR_SHUTDOWN, "the server is shutting down"));
        }
        if option == option::STARTTLS {
            // TLS is not implemented at all, hence not ERR_POLICY.
            return Ok(Plan::Refuse(rep::ERR_UNSUP, "TLS is not supported here"));
        }
        let Some(known) = KnownOption::new(option) else {
            return Ok(Plan::Refuse(rep::ERR_UNSUP, "unknown option"));
        };
        use KnownOption::{List, ListMetaContext, SetMetaContext, StructuredReply};
        Ok(match known {
            List | StructuredReply if len > 0 => {
                Plan::Refuse(rep::ERR_INVALID, "this option takes no data")
            }
            ListMetaContext | SetMetaContext if !self.structured => {
                Plan::Refuse(rep::ERR_INVALID, "agree on structured replies first")
            }
            _ if len as usize > limits::MAX_OPTION_BYTES => {
                Plan::Refuse(rep::ERR_TOO_BIG, "the option is too long")
            }
            _ => Plan::Collect(known),
        })
    }

    /// What a refused option changes nevertheless: a failed attempt to select contexts
    /// leaves none selected.
    pub(crate) fn refused(&mut self, option: u32) {
        if option == option::SET_META_CONTEXT {
            self.allocation_of = None;
        }
    }

    /// Carry out an option that [`Negotiation::plan`] let through.
    pub(crate) fn execute(
        &mut self,
        exports: &ExportTable,
        known: KnownOption,
        data: &[u8],
        out: &mut BytesMut,
    ) -> Result<Outcome, ProtocolError> {
        let option = known.number();
        match known {
            KnownOption::ExportName => {
                let index = exports.find(data).ok_or(ProtocolError::UnknownExport)?;
                let export = &exports.as_slice()[index];
                if !self.enter(export) {
                    return Ok(Outcome::Refused(index));
                }
                out.put_u64(export.size_bytes);
                out.put_u16(export.transmission_flags(self.structured));
                if !self.no_zeroes {
                    out.put_bytes(0, wire::EXPORT_NAME_ZEROES);
                }
                return Ok(Outcome::Open(index));
            }
            KnownOption::List => {
                for export in exports.as_slice() {
                    let name = export.name.as_bytes();
                    let name_len = (name.len() as u32).to_be_bytes();
                    let parts = [&name_len[..], name, export.description.as_bytes()];
                    reply(out, option, rep::SERVER, &parts);
                }
                reply(out, option, rep::ACK, &[]);
            }
            KnownOption::StructuredReply => {
                self.structured = true;
                reply(out, option, rep::ACK, &[]);
            }
            KnownOption::Info => {
                self.describe(exports, option, data, out);
            }
            KnownOption::Go => {
                // Asked before it is described: an answer ends with an acknowledgement or an error.
                if let Some((name, _)) = parse_info(data)
                    && let Some(index) = exports.find(name)
                    && let export = &exports.as_slice()[index]
                    && !self.enter(export)
                {
                    let why = export.users.as_ref().map_or("", |users| users.refusal());
                    refuse(out, option, rep::ERR_POLICY, why);
                    return Ok(Outcome::Refused(index));
                }
                if let Some(index) = self.describe(exports, option, data, out) {
                    return Ok(Outcome::Open(index));
                }
            }
            KnownOption::ListMetaContext => {
                self.meta_context(exports, option, false, data, out);
            }
            KnownOption::SetMetaContext => {
                self.meta_context(exports, option, true, data, out);
            }
        }
        Ok(Outcome::Continue)
    }

    /// Whether there is a place for this client.
    fn enter(&mut self, export: &Export) -> bool {
        if let Some(users) = &export.users {
            self.place = users.enter();
        }
        export.users.is_none() || self.place.is_some()
    }

    /// `INFO` and `GO`.
    fn describe(
        &self,
        exports: &ExportTable,
        option: u32,
        data: &[u8],
        out: &mut BytesMut,
    ) -> Option<usize> {
        let Some((name, requests)) = parse_info(data) else {
            refuse(out, option, rep::ERR_INVALID, "lengths in the option contradict each other");
            return None;
        };
        let index = find(exports, option, name, out)?;
        let export = &exports.as_slice()[index];
        let wants = |kind: u16| requests.chunks_exact(2).any(|ask| ask == kind.to_be_bytes());
        let kind = info::EXPORT.to_be_bytes();
        let size = export.size_bytes.to_be_bytes();
        let flags = export.transmission_flags(self.structured).to_be_bytes();
        reply(out, option, rep::INFO, &[&kind, &size, &flags]);
        if wants(info::NAME) {
            reply_info(out, option, info::NAME, export.name.as_bytes());
        }
        if wants(info::DESCRIPTION) {
            reply_info(out, option, info::DESCRIPTION, export.description.as_bytes());
        }
        // Also unasked where it matters, so that a client may find out before its requests
        // are refused for it.
        if wants(info::BLOCK_SIZE) || export.block_size.min > 1 {
            reply_info(out, option, info::BLOCK_SIZE, &block_size(export));
        }
        reply(out, option, rep::ACK, &[]);
        Some(index)
    }

    /// `LIST_META_CONTEXT` and `SET_META_CONTEXT`.
    fn meta_context(
        &mut self,
        exports: &ExportTable,
        option: u32,
        set: bool,
        data: &[u8],
        out: &mut BytesMut,
    ) {
        if set {
            self.allocation_of = None;
        }
        let Some(queries) = parse_queries(data) else {
            refuse(out, option, rep::ERR_INVALID, "lengths in the option contradict each other");
            return;
        };
        let Some(index) = find(exports, option, queries.export, out) else {
            return;
        };
        let selected =
            queries.names_allocation || !set && (queries.count == 0 || queries.has_base_wildcard);
        if selected {
            let id = if set { wire::BASE_ALLOCATION_ID } else { 0 };
            let parts = [&id.to_be_bytes()[..], wire::BASE_ALLOCATION.as_bytes()];
            reply(out, option, rep::META_CONTEXT, &parts);
            if set {
                self.allocation_of = Some(index);
            }
        }
        reply(out, option, rep::ACK, &[]);
    }
}

fn find(exports: &ExportTable, option: u32, name: &[u8], out: &mut BytesMut) -> Option<usize> {
    if name.len() > limits::MAX_STRING_BYTES {
        refuse(out, option, rep::ERR_TOO_BIG, "the export's name is too long");
        return None;
    }
    let found = exports.find(name);
    if found.is_none() {
        refuse(out, option, rep::ERR_UNKNOWN, "there is no such export");
    }
    found
}

fn block_size(export: &Export) -> [u8; 12] {
    let sizes = export.block_size;
    let mut bytes = [0; 12];
    for (place, size) in bytes.chunks_exact_mut(4).zip([sizes.min, sizes.preferred, sizes.max]) {
        place.copy_from_slice(&size.to_be_bytes());
    }
    bytes
}

fn take_u32(data: &mut &[u8]) -> Option<u32> {
    let (number, rest) = data.split_first_chunk::<4>()?;
    *data = rest;
    Some(u32::from_be_bytes(*number))
}

fn take_string<'a>(data: &mut &'a [u8]) -> Option<&'a [u8]> {
    let len = take_u32(data)?;
    let (string, rest) = data.split_at_checked(len as usize)?;
    *data = rest;
    Some(string)
}

/// The name and the list of information requests, two bytes each.
fn parse_info(mut data: &[u8]) -> Option<(&[u8], &[u8])> {
    let name = take_string(&mut data)?;
    let (count, requests) = data.split_first_chunk::<2>()?;
    let expected = 2 * usize::from(u16::from_be_bytes(*count));
    (requests.len() == expected).then_some((name, requests))
}

struct Queries<'a> {
    export: &'a [u8],
    count: u32,
    names_allocation: bool,
    has_base_wildcard: bool,
}

fn parse_queries(mut data: &[u8]) -> Option<Queries<'_>> {
    let export = take_string(&mut data)?;
    let count = take_u32(&mut data)?;
    let mut queries = Queries { export, count, names_allocation: false, has_base_wildcard: false };
    // A false count ends the loop by itself: every query takes four bytes or more.
    for _ in 0..count {
        let query = take_string(&mut data)?;
        queries.names_allocation |= query == wire::BASE_ALLOCATION.as_bytes();
        queries.has_base_wildcard |= query == wire::BASE_WILDCARD.as_bytes();
    }
    data.is_empty().then_some(queries)
}

/// Append an option reply.
pub(crate) fn reply(out: &mut BytesMut, option: u32, reply: u32, parts: &[&[u8]]) {
    let len: usize = parts.iter().map(|part| part.len()).sum();
    let header = OptionReplyHeader {
        magic: wire::OPTION_REPLY_MAGIC.into(),
        option: option.into(),
        reply: reply.into(),
        len: (len as u32).into(),
    };
    out.put_slice(header.as_bytes());
    for part in parts {
        out.put_slice(part);
    }
}

/// Append an error reply with its text.
pub(crate) fn refuse(out: &mut BytesMut, option: u32, error: u32, text: &str) {
    reply(out, option, error, &[text.as_bytes()]);
}

fn reply_info(out: &mut BytesMut, option: u32, kind: u16, payload: &[u8]) {
    reply(out, option, rep::INFO, &[&kind.to_be_bytes(), payload]);
}
