//! Every bound of the protocol in one place, related to each other by assertions.

/// The largest payload of one record: the largest NBD request (32 MiB).
pub const RECORD_PAYLOAD_MAX_BYTES: u32 = 32 << 20;
/// The most dependency entries of one record: one for every writer of a group.
pub const RECORD_DEPS_MAX: u16 = 64;
/// The largest control message.
pub const CONTROL_MAX_BYTES: u32 = 1 << 20;
/// The longest head of a record: header and dependency entries.
pub const RECORD_HEAD_MAX_BYTES: u32 =
    crate::record::HEADER_BYTES as u32 + RECORD_DEPS_MAX as u32 * crate::record::DEP_BYTES as u32;
/// The longest record, encoded.
pub const RECORD_MAX_BYTES: u32 = RECORD_PAYLOAD_MAX_BYTES + RECORD_HEAD_MAX_BYTES;
/// The longest record, encoded, that travels in one frame. Longer ones travel in parts.
pub const WHOLE_RECORD_MAX_BYTES: u32 = COPY_MAX_BYTES + RECORD_HEAD_MAX_BYTES;
/// The longest part of a record.
pub const PART_MAX_BYTES: u32 = 64 << 10;
/// The largest frame body.
pub const FRAME_BODY_MAX_BYTES: u32 = CONTROL_MAX_BYTES;
/// The most writers of one group.
pub const WRITERS_MAX: u16 = 64;
/// The most members of one group, with and without disks.
pub const MEMBERS_MAX: usize = 256;
/// The most lines that hosts of a group must have the same: its members, and what is not usual.
pub const PEERS_MAX: usize = MEMBERS_MAX + 8;
/// The longest line that names a member with its addresses.
pub const PEER_MAX_BYTES: usize = 512;
/// The most disks of one writer.
pub const DISKS_MAX: u16 = 64;
/// The most shards of one store.
pub const SHARDS_MAX: u16 = 1024;
/// The longest identity of a disk ([`CleanEnd::marks`](crate::message::CleanEnd)).
pub const MARK_MAX_BYTES: usize = 256;
/// The longest group, member, disk or host name.
pub const NAME_MAX_BYTES: usize = 64;
/// The longest text for people in a message: a reason, the name of a software.
pub const TEXT_MAX_BYTES: usize = 4 << 10;
/// The largest hello. Nothing larger is read before a peer has said who it is.
pub const HELLO_MAX_BYTES: usize = 8 << 10;
/// The largest machine description, encoded.
pub const MACHINE_MAX_BYTES: usize = 16 << 10;
/// The machine descriptions of all members of one group, encoded.
pub const MACHINES_MAX_BYTES: u64 = 256 << 10;
/// The extent that one digest check covers at most.
pub const DIGEST_CHUNK_MAX_BYTES: u32 = 4 << 20;
/// The largest payload of a copy record: small, so that a guest's write waits behind little.
pub const COPY_MAX_BYTES: u32 = 256 << 10;

const _: () = assert!(WHOLE_RECORD_MAX_BYTES <= FRAME_BODY_MAX_BYTES);
const _: () = assert!(PART_MAX_BYTES < WHOLE_RECORD_MAX_BYTES);
const _: () = assert!(MACHINE_MAX_BYTES < CONTROL_MAX_BYTES as usize);
const _: () =
    assert!(MACHINE_MAX_BYTES + PEERS_MAX * PEER_MAX_BYTES < CONTROL_MAX_BYTES as usize / 2);
const _: () = assert!(2 * TEXT_MAX_BYTES <= HELLO_MAX_BYTES);
const _: () = assert!(MEMBERS_MAX * (NAME_MAX_BYTES + 16) * 2 < CONTROL_MAX_BYTES as usize);
const _: () = assert!(RECORD_DEPS_MAX <= WRITERS_MAX);
const _: () = assert!(DISKS_MAX <= SHARDS_MAX);
const _: () = assert!(COPY_MAX_BYTES <= RECORD_PAYLOAD_MAX_BYTES);
