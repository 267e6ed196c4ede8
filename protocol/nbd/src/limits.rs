//! Every limit of the NBD server, and how they depend on each other.

/// Longest WRITE payload and READ answer. The NBD document asks servers to take this much
/// from any client and clients not to exceed it unasked.
pub const MAX_PAYLOAD_BYTES: u32 = 32 << 20;

/// A WRITE that is too long is read past and answered by an error up to this length. Beyond
/// it the connection is closed: the client does not follow the advertised limits.
pub const MAX_SKIPPED_PAYLOAD_BYTES: u32 = 2 * MAX_PAYLOAD_BYTES;

/// Longest string of the protocol (export names, descriptions, queries).
pub const MAX_STRING_BYTES: usize = 4096;

/// Longest option data that is kept in memory. Longer options are read past and refused.
pub const MAX_OPTION_BYTES: usize = 16 << 10;

/// Longest option data that is read past. Beyond it the connection is closed.
pub const MAX_SKIPPED_OPTION_BYTES: u32 = MAX_PAYLOAD_BYTES;

/// Options of one connection. A client needs about four, plus some for each export it looks at.
pub const MAX_OPTIONS: u32 = 1024;

/// Exports of one server.
pub const MAX_EXPORTS: usize = 1024;

/// Largest export: offsets must fit the kernel's signed file offsets.
pub const MAX_EXPORT_BYTES: u64 = i64::MAX as u64;

/// Largest minimum block size that the NBD document allows.
pub const MAX_MIN_BLOCK_BYTES: u32 = 64 << 10;

/// Smallest preferred block size that the NBD document allows.
pub const MIN_PREFERRED_BLOCK_BYTES: u32 = 512;

/// When this much output waits to be sent, no further input is taken. What one option or
/// request adds comes on top of it.
pub const OUTPUT_HIGH_WATER_BYTES: usize = 64 << 10;

/// Descriptors of one block status reply. A shorter answer than asked for is allowed: the
/// client asks again from where it ended.
pub const MAX_EXTENTS_PER_REPLY: usize = 16 << 10;

/// Longest text in an error reply.
pub const MAX_MESSAGE_BYTES: usize = 256;

const _: () = {
    assert!(MAX_SKIPPED_PAYLOAD_BYTES >= MAX_PAYLOAD_BYTES);
    // A structured chunk carries its offset before the data.
    assert!(MAX_PAYLOAD_BYTES <= u32::MAX - 8);
    // The longest name and the longest query fit into one option that is kept.
    assert!(4 + MAX_STRING_BYTES + 4 + 4 + MAX_STRING_BYTES <= MAX_OPTION_BYTES);
    assert!(MAX_OPTION_BYTES <= MAX_SKIPPED_OPTION_BYTES as usize);
    // The text length of an error chunk has 16 bits, and texts are protocol strings.
    assert!(MAX_MESSAGE_BYTES <= MAX_STRING_BYTES && MAX_STRING_BYTES <= u16::MAX as usize);
    // A block status chunk is itself a payload.
    assert!(4 + 8 * MAX_EXTENTS_PER_REPLY <= MAX_PAYLOAD_BYTES as usize);
    assert!(MAX_MIN_BLOCK_BYTES <= MAX_PAYLOAD_BYTES);
    // Any reply that the session makes by itself to one request fits below the mark.
    assert!(32 + MAX_MESSAGE_BYTES <= OUTPUT_HIGH_WATER_BYTES);
};
