//! Errors: a client that broke the protocol, and an export that cannot be offered.

use crate::limits;

/// The client broke the protocol in a way that has no error reply. Close the connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ProtocolError {
    /// The client's flags have bits that the server did not offer.
    #[error(
        "client flags {flags:#010x} have bits that were not offered: use an NBD client that speaks fixed newstyle"
    )]
    ClientFlags {
        /// As received.
        flags: u32,
    },
    /// An option does not begin with its magic.
    #[error(
        "option magic {magic:#018x} is wrong: the client does not speak NBD newstyle, or the stream lost its place"
    )]
    OptionMagic {
        /// As received.
        magic: u64,
    },
    /// Only `EXPORT_NAME` is allowed without fixed newstyle.
    #[error(
        "option {option} needs fixed newstyle, which the client did not agree to: use a newer NBD client"
    )]
    NotFixedNewstyle {
        /// As received.
        option: u32,
    },
    /// An option's data is too long to be read past.
    #[error(
        "option {option} announces {len} bytes, at most {} are taken: use a client that follows the NBD document",
        limits::MAX_SKIPPED_OPTION_BYTES
    )]
    OptionTooLong {
        /// As received.
        option: u32,
        /// As received.
        len: u32,
    },
    /// The client goes on negotiating without end.
    #[error(
        "more than {} options on one connection: let the client choose an export",
        limits::MAX_OPTIONS
    )]
    TooManyOptions,
    /// `EXPORT_NAME` named an export that does not exist; it has no error reply.
    #[error(
        "the client asked by EXPORT_NAME for an export that does not exist: see the server's list of exports"
    )]
    UnknownExport,
    /// `EXPORT_NAME` while the server shuts down; it has no error reply.
    #[error("the client asked by EXPORT_NAME while the server shuts down: connect again later")]
    ShuttingDown,
    /// A request does not begin with its magic.
    #[error("request magic {magic:#010x} is wrong: the stream lost its place, connect again")]
    RequestMagic {
        /// As received.
        magic: u32,
    },
    /// A WRITE's payload is too long to be read past.
    #[error(
        "write of {len} bytes: at most {} are accepted and {} are read past, limit the client's request size",
        limits::MAX_PAYLOAD_BYTES,
        limits::MAX_SKIPPED_PAYLOAD_BYTES
    )]
    WriteTooLong {
        /// As received.
        len: u32,
    },
    /// Fault of the caller: [`Session::next`](crate::Session::next) before the payload of the
    /// last WRITE was taken, or more taken than was owed. Going on would read the guest's data
    /// as commands.
    #[error("internal fault: write payload accounting is off by {bytes} bytes, please report it")]
    PayloadAccounting {
        /// Bytes still owed, or taken too much.
        bytes: u32,
    },
}

impl ProtocolError {
    /// A stable name for logs and metrics.
    pub const fn kind(&self) -> &'static str {
        match self {
            Self::ClientFlags { .. } => "client-flags",
            Self::OptionMagic { .. } => "option-magic",
            Self::NotFixedNewstyle { .. } => "not-fixed-newstyle",
            Self::OptionTooLong { .. } => "option-too-long",
            Self::TooManyOptions => "too-many-options",
            Self::UnknownExport => "unknown-export",
            Self::ShuttingDown => "shutting-down",
            Self::RequestMagic { .. } => "request-magic",
            Self::WriteTooLong { .. } => "write-too-long",
            Self::PayloadAccounting { .. } => "payload-accounting",
        }
    }
}

/// Why an export cannot be offered.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ExportError {
    /// More exports than the server takes.
    #[error(
        "{count} exports: at most {} fit on one server, use several sockets",
        limits::MAX_EXPORTS
    )]
    TooMany {
        /// As given.
        count: usize,
    },
    /// Two exports have one name.
    #[error("two exports are called {name:?}: give each its own name")]
    DuplicateName {
        /// As given.
        name: String,
    },
    /// A name or description cannot be put on the wire.
    #[error(
        "export {name:?}: {field} must be at most {} bytes and without NUL",
        limits::MAX_STRING_BYTES
    )]
    BadString {
        /// The export.
        name: String,
        /// Which string.
        field: &'static str,
    },
    /// The size is out of bounds or not a multiple of the minimum block size.
    #[error(
        "export {name:?}: size {size_bytes} must be at most {} and a multiple of the minimum block size",
        limits::MAX_EXPORT_BYTES
    )]
    BadSize {
        /// The export.
        name: String,
        /// As given.
        size_bytes: u64,
    },
    /// The block sizes break a rule of the NBD document.
    #[error("export {name:?}: {rule}")]
    BadBlockSize {
        /// The export.
        name: String,
        /// The rule.
        rule: &'static str,
    },
    /// Fast zero without write zeroes.
    #[error("export {name:?}: fast_zero needs write_zeroes")]
    FastZeroAlone {
        /// The export.
        name: String,
    },
}
