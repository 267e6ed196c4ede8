//! Numbers and fixed headers as they are on the wire, all big-endian.

use zerocopy::byteorder::big_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// First magic of the greeting, `NBDMAGIC`.
pub const GREETING_MAGIC: u64 = u64::from_be_bytes(*b"NBDMAGIC");
/// Second magic of the greeting and of every option, `IHAVEOPT`.
pub const OPTION_MAGIC: u64 = u64::from_be_bytes(*b"IHAVEOPT");
/// Magic of every option reply.
pub const OPTION_REPLY_MAGIC: u64 = 0x0003_e889_0455_65a9;
/// Magic of every request.
pub const REQUEST_MAGIC: u32 = 0x2560_9513;
/// Magic of a simple reply.
pub const SIMPLE_REPLY_MAGIC: u32 = 0x6744_6698;
/// Magic of a structured reply chunk.
pub const STRUCTURED_REPLY_MAGIC: u32 = 0x668e_33ef;

/// Handshake flags (server) and client flags share their bits.
pub mod handshake {
    /// Options other than `EXPORT_NAME` are understood.
    pub const FIXED_NEWSTYLE: u16 = 1 << 0;
    /// The 124 zero bytes after `EXPORT_NAME` are left out.
    pub const NO_ZEROES: u16 = 1 << 1;
}

/// Bytes of zeroes after an `EXPORT_NAME` reply, unless `NO_ZEROES` was agreed.
pub const EXPORT_NAME_ZEROES: usize = 124;

/// Transmission flags: what an export can do.
pub mod transmission {
    /// Always set.
    pub const HAS_FLAGS: u16 = 1 << 0;
    /// Writes are refused.
    pub const READ_ONLY: u16 = 1 << 1;
    /// FLUSH is supported.
    pub const SEND_FLUSH: u16 = 1 << 2;
    /// The FUA command flag is supported.
    pub const SEND_FUA: u16 = 1 << 3;
    /// TRIM is supported.
    pub const SEND_TRIM: u16 = 1 << 5;
    /// WRITE_ZEROES and the NO_HOLE command flag are supported.
    pub const SEND_WRITE_ZEROES: u16 = 1 << 6;
    /// The DF command flag is supported.
    pub const SEND_DF: u16 = 1 << 7;
    /// A flush on one connection covers writes completed on all others.
    pub const CAN_MULTI_CONN: u16 = 1 << 8;
    /// CACHE is supported.
    pub const SEND_CACHE: u16 = 1 << 10;
    /// The FAST_ZERO command flag is supported.
    pub const SEND_FAST_ZERO: u16 = 1 << 11;
}

/// Option numbers.
pub mod option {
    /// Choose an export without the possibility of an error reply.
    pub const EXPORT_NAME: u32 = 1;
    /// End the negotiation.
    pub const ABORT: u32 = 2;
    /// Name all exports.
    pub const LIST: u32 = 3;
    /// Begin TLS.
    pub const STARTTLS: u32 = 5;
    /// Describe an export.
    pub const INFO: u32 = 6;
    /// Describe an export and open it.
    pub const GO: u32 = 7;
    /// Agree on structured replies.
    pub const STRUCTURED_REPLY: u32 = 8;
    /// Name the metadata contexts of an export.
    pub const LIST_META_CONTEXT: u32 = 9;
    /// Select metadata contexts of an export.
    pub const SET_META_CONTEXT: u32 = 10;
}

/// Option reply types.
pub mod rep {
    /// Success, no more replies to this option.
    pub const ACK: u32 = 1;
    /// An export's name.
    pub const SERVER: u32 = 2;
    /// A fact about an export.
    pub const INFO: u32 = 3;
    /// A metadata context.
    pub const META_CONTEXT: u32 = 4;
    const ERROR: u32 = 1 << 31;
    /// The option is unknown.
    pub const ERR_UNSUP: u32 = ERROR | 1;
    /// The server does not allow it.
    pub const ERR_POLICY: u32 = ERROR | 2;
    /// The option is malformed.
    pub const ERR_INVALID: u32 = ERROR | 3;
    /// There is no such export.
    pub const ERR_UNKNOWN: u32 = ERROR | 6;
    /// The server is shutting down.
    pub const ERR_SHUTDOWN: u32 = ERROR | 7;
    /// The option is too long.
    pub const ERR_TOO_BIG: u32 = ERROR | 9;
}

/// Information types of `INFO` and `GO`.
pub mod info {
    /// Size and transmission flags.
    pub const EXPORT: u16 = 0;
    /// Canonical name.
    pub const NAME: u16 = 1;
    /// Text for humans.
    pub const DESCRIPTION: u16 = 2;
    /// Block size constraints.
    pub const BLOCK_SIZE: u16 = 3;
}

/// Command numbers.
pub mod cmd {
    /// READ.
    pub const READ: u16 = 0;
    /// WRITE.
    pub const WRITE: u16 = 1;
    /// Disconnect.
    pub const DISC: u16 = 2;
    /// FLUSH.
    pub const FLUSH: u16 = 3;
    /// TRIM.
    pub const TRIM: u16 = 4;
    /// CACHE.
    pub const CACHE: u16 = 5;
    /// WRITE_ZEROES.
    pub const WRITE_ZEROES: u16 = 6;
    /// BLOCK_STATUS.
    pub const BLOCK_STATUS: u16 = 7;
}

/// Command flags.
pub mod cmd_flag {
    /// Answer when the effect is on stable storage.
    pub const FUA: u16 = 1 << 0;
    /// WRITE_ZEROES must leave the range allocated.
    pub const NO_HOLE: u16 = 1 << 1;
    /// READ must be answered in one piece.
    pub const DF: u16 = 1 << 2;
    /// BLOCK_STATUS wants one extent.
    pub const REQ_ONE: u16 = 1 << 3;
    /// WRITE_ZEROES must fail unless it is quicker than a write.
    pub const FAST_ZERO: u16 = 1 << 4;
}

/// Structured reply chunk types and flags.
pub mod chunk {
    /// The last chunk of a reply.
    pub const FLAG_DONE: u16 = 1 << 0;
    /// No content.
    pub const NONE: u16 = 0;
    /// Data at an offset.
    pub const OFFSET_DATA: u16 = 1;
    /// Zeroes at an offset.
    pub const OFFSET_HOLE: u16 = 2;
    /// Extents of a metadata context.
    pub const BLOCK_STATUS: u16 = 5;
    /// An error with a text.
    pub const ERROR: u16 = (1 << 15) | 1;
}

/// The one metadata context that is served.
pub const BASE_ALLOCATION: &str = "base:allocation";
/// Query for all contexts of the `base` namespace, valid when listing only.
pub const BASE_WILDCARD: &str = "base:";
/// Id given to `base:allocation` when it is selected. Not 0, so that a client which mixes
/// up listing (where the id is 0) and selecting is found out.
pub const BASE_ALLOCATION_ID: u32 = 1;

/// What precedes the data of an option.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct OptionHeader {
    /// [`OPTION_MAGIC`].
    pub magic: U64,
    /// One of [`option`].
    pub option: U32,
    /// Bytes of data that follow.
    pub len: U32,
}

/// What precedes the data of an option reply.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct OptionReplyHeader {
    /// [`OPTION_REPLY_MAGIC`].
    pub magic: U64,
    /// The option that is answered.
    pub option: U32,
    /// One of [`rep`].
    pub reply: U32,
    /// Bytes of data that follow.
    pub len: U32,
}

/// A request, without a WRITE's payload.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct RequestHeader {
    /// [`REQUEST_MAGIC`].
    pub magic: U32,
    /// Bits of [`cmd_flag`].
    pub flags: U16,
    /// One of [`cmd`].
    pub command: U16,
    /// Chosen by the client, returned in the reply.
    pub cookie: U64,
    /// First byte concerned.
    pub offset: U64,
    /// Bytes concerned.
    pub len: U32,
}

/// A simple reply, without a READ's data.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct SimpleReplyHeader {
    /// [`SIMPLE_REPLY_MAGIC`].
    pub magic: U32,
    /// 0 or an error number.
    pub error: U32,
    /// The request's cookie.
    pub cookie: U64,
}

/// What precedes the payload of a structured reply chunk.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct ChunkHeader {
    /// [`STRUCTURED_REPLY_MAGIC`].
    pub magic: U32,
    /// [`chunk::FLAG_DONE`] or 0.
    pub flags: U16,
    /// One of [`chunk`].
    pub kind: U16,
    /// The request's cookie.
    pub cookie: U64,
    /// Bytes of payload that follow.
    pub len: U32,
}

/// Bytes of a [`RequestHeader`].
pub const REQUEST_HEADER_BYTES: usize = size_of::<RequestHeader>();
/// Bytes of an [`OptionHeader`].
pub const OPTION_HEADER_BYTES: usize = size_of::<OptionHeader>();

const _: () = {
    assert!(OPTION_HEADER_BYTES == 16);
    assert!(size_of::<OptionReplyHeader>() == 20);
    assert!(REQUEST_HEADER_BYTES == 28);
    assert!(size_of::<SimpleReplyHeader>() == 16);
    assert!(size_of::<ChunkHeader>() == 20);
};
