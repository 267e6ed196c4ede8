//! The bytes at the beginning of a segment, and its name.

use super::Position;
use std::path::{Path, PathBuf};
use tidelock_protocol::ids::{Incarnation, Seq};
use tidelock_protocol::record::crc32c;

/// Bytes before the first record of a segment.
pub const HEADER_BYTES: usize = 128;
/// Bytes after each record: its keyed check.
pub const TAG_BYTES: usize = 16;
/// The version of the format.
pub const VERSION: u32 = 1;

const MAGIC: &[u8; 8] = b"TLKBKLG1";
const EXTENSION: &str = "segment";

/// What a segment says of itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// The run that wrote it.
    pub incarnation: Incarnation,
    /// Its number, from 1.
    pub number: u64,
    /// The seq of its first record.
    pub first: Seq,
    /// Of all records before this one the local write had ended when the segment was begun.
    pub redo_from: Seq,
    /// The boot of the host in which it was written.
    pub boot: [u8; 16],
    /// Secret of the run, group, member and disks: the key of the checks. It is not in the file.
    pub identity: [u8; 32],
}

/// Why a segment, or all of them, are of no use.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Unusable {
    /// It ends within its header.
    #[error("it is shorter than its header")]
    Short,
    /// It does not begin as one.
    #[error("it is no segment of a backlog")]
    Magic,
    /// The header's checksum is wrong.
    #[error("its header is damaged")]
    Damaged,
    /// Another version wrote it.
    #[error("it has version {0}, this daemon knows {VERSION}")]
    Version(u32),
    /// The keyed check is wrong.
    #[error("it is of another run of the daemon, or of other disks")]
    Foreign,
}

const VERSION_AT: usize = 8;
const INCARNATION_AT: usize = 16;
const NUMBER_AT: usize = 24;
const FIRST_AT: usize = 32;
const REDO_AT: usize = 40;
const BOOT_AT: usize = 48;
const CHECK_AT: usize = 64;
const CRC_AT: usize = HEADER_BYTES - 4;

const _: () = assert!(CHECK_AT + 32 <= CRC_AT);

impl Header {
    /// The bytes.
    #[must_use]
    pub fn encode(&self) -> [u8; HEADER_BYTES] {
        let mut bytes = [0; HEADER_BYTES];
        let mut put = |at: usize, field: &[u8]| bytes[at..at + field.len()].copy_from_slice(field);
        put(0, MAGIC);
        put(VERSION_AT, &VERSION.to_le_bytes());
        put(INCARNATION_AT, &self.incarnation.0.to_le_bytes());
        put(NUMBER_AT, &self.number.to_le_bytes());
        put(FIRST_AT, &self.first.0.to_le_bytes());
        put(REDO_AT, &self.redo_from.0.to_le_bytes());
        put(BOOT_AT, &self.boot);
        let check = blake3::keyed_hash(&self.identity, &bytes[..CHECK_AT]);
        bytes[CHECK_AT..CHECK_AT + 32].copy_from_slice(check.as_bytes());
        let crc = crc32c(&bytes[..CRC_AT]);
        bytes[CRC_AT..].copy_from_slice(&crc.to_le_bytes());
        bytes
    }

    /// Reads and checks them, as a header of this identity.
    pub fn decode(bytes: &[u8], identity: &[u8; 32]) -> Result<Self, Unusable> {
        let header = Self { identity: *identity, ..Self::decode_unkeyed(bytes)? };
        let check = blake3::keyed_hash(identity, &bytes[..CHECK_AT]);
        if check != bytes[CHECK_AT..CHECK_AT + 32] {
            return Err(Unusable::Foreign);
        }
        Ok(header)
    }

    /// Reads them without the keyed check: of files that this process has written or verified. The identity is zeroes.
    pub fn decode_unkeyed(bytes: &[u8]) -> Result<Self, Unusable> {
        let bytes: &[u8; HEADER_BYTES] = bytes.first_chunk().ok_or(Unusable::Short)?;
        if !bytes.starts_with(MAGIC) {
            return Err(Unusable::Magic);
        }
        // A later version may have its checksum elsewhere.
        let version = u32::from_le_bytes(field(bytes, VERSION_AT));
        if version != VERSION {
            return Err(Unusable::Version(version));
        }
        if u32::from_le_bytes(field(bytes, CRC_AT)) != crc32c(&bytes[..CRC_AT]) {
            return Err(Unusable::Damaged);
        }
        Ok(Self {
            incarnation: Incarnation(u64::from_le_bytes(field(bytes, INCARNATION_AT))),
            number: u64::from_le_bytes(field(bytes, NUMBER_AT)),
            first: Seq(u64::from_le_bytes(field(bytes, FIRST_AT))),
            redo_from: Seq(u64::from_le_bytes(field(bytes, REDO_AT))),
            boot: field(bytes, BOOT_AT),
            identity: [0; 32],
        })
    }
}

/// The keyed check of a record. It holds for this place alone.
#[must_use]
pub fn record_tag(identity: &[u8; 32], at: Position, parts: &[&[u8]]) -> [u8; TAG_BYTES] {
    let mut hasher = blake3::Hasher::new_keyed(identity);
    hasher.update(&at.segment.to_le_bytes()).update(&at.offset.to_le_bytes());
    for part in parts {
        hasher.update(part);
    }
    *hasher.finalize().as_bytes().first_chunk().expect("a digest is longer")
}

fn field<const N: usize>(bytes: &[u8; HEADER_BYTES], at: usize) -> [u8; N] {
    bytes[at..at + N].try_into().expect("of this size")
}

/// The name of a segment.
#[must_use]
pub fn name_of(number: u64) -> String {
    format!("{number:012}.{EXTENSION}")
}

/// Where it is.
#[must_use]
pub fn path_of(directory: &Path, number: u64) -> PathBuf {
    directory.join(name_of(number))
}

/// The number of the segment of this name, if it is one's.
#[must_use]
pub fn number_of(name: &str) -> Option<u64> {
    let (stem, extension) = name.rsplit_once('.')?;
    stem.parse().ok().filter(|_| extension == EXTENSION)
}
