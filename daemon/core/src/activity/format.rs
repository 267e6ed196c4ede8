//! The bytes of the log (`docs/activity-log.md`): what is written, and what is found after a crash.
//!
//! A file is made as a whole and then only its ring is written, one block at a time, each before
//! the next is begun. So a crash can tear one block, which is then as if it had not been written:
//! the others still have the whole map.

use super::geometry::{BLOCK_BYTES, ENTRY_EXTENTS_MAX, Entry, Geometry, SUPERBLOCKS, UPDATES_MAX};
use tidelock_protocol::ids::{DiskId, Epoch, Incarnation, Seq};
use tidelock_protocol::limits::{DISKS_MAX, NAME_MAX_BYTES};
use tidelock_protocol::record::crc32c;

const SUPERBLOCK_MAGIC: &[u8; 8] = b"TLKACTS1";
const TRANSACTION_MAGIC: &[u8; 8] = b"TLKACTT1";
const FORMAT: u32 = 1;

const CRC_AT: usize = BLOCK_BYTES - 4;
const NAME_BYTES: usize = 64;
const GROUP_AT: usize = 48;
const MEMBER_AT: usize = GROUP_AT + NAME_BYTES;
const DISKS_AT: usize = MEMBER_AT + NAME_BYTES;
const DISK_BYTES: usize = 24;
const UPDATES_AT: usize = 80;
const UPDATE_BYTES: usize = 12;
const CONTEXT_AT: usize = UPDATES_AT + UPDATES_MAX * UPDATE_BYTES;
const EVERYTHING: u32 = 1;

const _: () = assert!(NAME_MAX_BYTES <= NAME_BYTES);
const _: () = assert!(DISKS_AT + DISKS_MAX as usize * DISK_BYTES <= CRC_AT);
const _: () = assert!(CONTEXT_AT + super::geometry::CONTEXT_MAX as usize * 8 <= CRC_AT);
const _: () = assert!(ENTRY_EXTENTS_MAX == u16::MAX as u64 + 1);

/// Whose log it is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Identity {
    /// The group.
    pub group: String,
    /// The member.
    pub member: String,
    /// Its disks, numbered without a gap: number, name, size in bytes; 0 if it was removed.
    pub disks: Vec<(DiskId, String, u64)>,
}

/// What every transaction says besides its slots.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Head {
    /// Counts the transactions of this file, from 1.
    pub number: u64,
    /// The run of the daemon that wrote it.
    pub incarnation: Incarnation,
    /// The last run that is known to have attached.
    pub confirmed: Incarnation,
    /// The epoch that was granted.
    pub epoch: Epoch,
    /// What left the map did so because the backup had everything up to this seq, or less.
    pub covered: Seq,
    /// The sites may differ anywhere, whatever the map says.
    pub everything: bool,
    /// Number of the last transaction of a run that had attached. A run that has not must not make a log that was
    /// restored look newer than it is.
    pub age: u64,
}

/// What a log says after its daemon is gone.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Found {
    /// The number of the file: the run that made it.
    pub id: u64,
    /// Its sizes.
    pub geometry: Geometry,
    /// Of the last transaction.
    pub head: Head,
    /// By slot.
    pub slots: Vec<Option<Entry>>,
    /// The sizes of the disks when it was made: they may have grown since.
    pub disk_bytes: Vec<u64>,
}

pub(super) const OTHER_DISKS: &str = "set of disks, or disks of other sizes";

/// Why a log says nothing: the sites have to be compared as a whole.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Unusable {
    /// There is none.
    #[error("there is no activity log")]
    Missing,
    /// It cannot be read.
    #[error("the activity log cannot be read: {0}")]
    Unreadable(String),
    /// A newer daemon wrote it.
    #[error("the activity log has format {0}, this daemon knows {FORMAT}")]
    Version(u32),
    /// It is not that of these disks.
    #[error("the activity log is of another {0}")]
    Foreign(&'static str),
    /// It was damaged.
    #[error("the activity log is damaged: {0}")]
    Damaged(String),
}

fn put(block: &mut [u8], at: usize, bytes: &[u8]) {
    block[at..at + bytes.len()].copy_from_slice(bytes);
}

fn u16_at(block: &[u8], at: usize) -> u16 {
    u16::from_le_bytes(block[at..at + 2].try_into().expect("two bytes"))
}

fn u32_at(block: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(block[at..at + 4].try_into().expect("four bytes"))
}

fn u64_at(block: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(block[at..at + 8].try_into().expect("eight bytes"))
}

fn seal(block: &mut [u8]) {
    let crc = crc32c(&block[..CRC_AT]);
    put(block, CRC_AT, &crc.to_le_bytes());
}

fn is_sealed(block: &[u8], magic: &[u8; 8]) -> bool {
    block.len() == BLOCK_BYTES
        && block[..8] == *magic
        && u32_at(block, CRC_AT) == crc32c(&block[..CRC_AT])
}

fn name_digest(name: &str) -> [u8; 8] {
    blake3::hash(name.as_bytes()).as_bytes()[..8].try_into().expect("eight bytes")
}

/// The superblock.
fn superblock(id: u64, geometry: &Geometry, identity: &Identity) -> Vec<u8> {
    let mut block = vec![0; BLOCK_BYTES];
    put(&mut block, 0, SUPERBLOCK_MAGIC);
    put(&mut block, 8, &FORMAT.to_le_bytes());
    put(&mut block, 12, &geometry.extent_bytes.to_le_bytes());
    put(&mut block, 16, &geometry.slots.to_le_bytes());
    put(&mut block, 20, &geometry.ring().to_le_bytes());
    put(&mut block, 24, &geometry.context.to_le_bytes());
    put(&mut block, 26, &(identity.disks.len() as u16).to_le_bytes());
    block[28] = identity.group.len() as u8;
    block[29] = identity.member.len() as u8;
    put(&mut block, 32, &id.to_le_bytes());
    put(&mut block, GROUP_AT, identity.group.as_bytes());
    put(&mut block, MEMBER_AT, identity.member.as_bytes());
    for (nth, (disk, name, size_bytes)) in identity.disks.iter().enumerate() {
        let at = DISKS_AT + nth * DISK_BYTES;
        put(&mut block, at, &disk.0.to_le_bytes());
        put(&mut block, at + 8, &size_bytes.to_le_bytes());
        put(&mut block, at + 16, &name_digest(name));
    }
    seal(&mut block);
    block
}

/// One transaction: the slots that it changes, and those that it repeats.
#[must_use]
pub fn transaction(
    id: u64,
    geometry: &Geometry,
    head: &Head,
    updates: &[(u32, Option<Entry>)],
    slot: impl Fn(u32) -> Option<Entry>,
) -> Vec<u8> {
    assert!(updates.len() <= UPDATES_MAX);
    let packed = |entry: Option<Entry>| entry.map_or(Entry::EMPTY, Entry::to_u64).to_le_bytes();
    let context = geometry.context_of(head.number);
    let mut block = vec![0; BLOCK_BYTES];
    put(&mut block, 0, TRANSACTION_MAGIC);
    put(&mut block, 8, &id.to_le_bytes());
    put(&mut block, 16, &head.number.to_le_bytes());
    put(&mut block, 24, &head.incarnation.0.to_le_bytes());
    put(&mut block, 32, &head.confirmed.0.to_le_bytes());
    put(&mut block, 40, &head.epoch.0.to_le_bytes());
    put(&mut block, 48, &head.covered.0.to_le_bytes());
    put(&mut block, 56, &if head.everything { EVERYTHING } else { 0 }.to_le_bytes());
    put(&mut block, 60, &(updates.len() as u16).to_le_bytes());
    put(&mut block, 62, &(context.len() as u16).to_le_bytes());
    put(&mut block, 64, &context.start.to_le_bytes());
    put(&mut block, 72, &head.age.to_le_bytes());
    for (nth, (slot, entry)) in updates.iter().enumerate() {
        let at = UPDATES_AT + nth * UPDATE_BYTES;
        put(&mut block, at, &slot.to_le_bytes());
        put(&mut block, at + 4, &packed(*entry));
    }
    for (nth, at) in context.enumerate() {
        put(&mut block, CONTEXT_AT + nth * 8, &packed(slot(at)));
    }
    seal(&mut block);
    block
}

/// A whole new file with one transaction and an empty map.
#[must_use]
pub fn new_file(id: u64, geometry: &Geometry, identity: &Identity, head: &Head) -> Vec<u8> {
    assert!(geometry.is_sound() && head.number == 1);
    let mut file = vec![0; geometry.file_bytes() as usize];
    let superblock = superblock(id, geometry, identity);
    for copy in 0..SUPERBLOCKS as usize {
        put(&mut file, copy * BLOCK_BYTES, &superblock);
    }
    let first = transaction(id, geometry, head, &[], |_| None);
    put(&mut file, geometry.place_of(head.number) as usize, &first);
    file
}

/// Content of a file, if it is the log of these disks at their size, and whole. A disk may have been removed since.
pub fn read(file: &[u8], expected: &Identity) -> Result<Found, Unusable> {
    let damaged = |what: &str| Err(Unusable::Damaged(what.to_owned()));
    let mut superblocks = file.chunks_exact(BLOCK_BYTES).take(SUPERBLOCKS as usize);
    let Some(superblock) = superblocks.find(|block| is_sealed(block, SUPERBLOCK_MAGIC)) else {
        return damaged("neither superblock is whole");
    };
    let (id, geometry, disk_bytes) = read_superblock(superblock, expected)?;
    if file.len() as u64 != geometry.file_bytes() {
        return damaged("the file does not have its length");
    }
    let mut blocks: Vec<(Head, &[u8])> = file
        .chunks_exact(BLOCK_BYTES)
        .skip(SUPERBLOCKS as usize)
        .enumerate()
        .filter_map(|(nth, block)| {
            let head = read_head(block, id)?;
            (head.number % u64::from(geometry.ring()) == nth as u64).then_some((head, block))
        })
        .collect();
    blocks.sort_unstable_by_key(|(head, _)| head.number);
    let Some((head, _)) = blocks.last().copied() else {
        return damaged("no transaction is whole");
    };
    // The place after the last one may hold what a crash has torn.
    let oldest = head.number.saturating_sub(u64::from(geometry.ring()) - 2).max(1);
    let needed = blocks.iter().filter(|(head, _)| head.number >= oldest);
    if needed.clone().count() as u64 != head.number - oldest + 1 {
        return damaged("a transaction is missing");
    }
    let mut slots = vec![None; geometry.slots as usize];
    for (head, block) in needed {
        if apply(head, block, &geometry, expected, &mut slots).is_none() {
            return damaged("a transaction names what is not there");
        }
    }
    Ok(Found { id, geometry, head, slots, disk_bytes })
}

fn read_superblock(
    block: &[u8],
    expected: &Identity,
) -> Result<(u64, Geometry, Vec<u64>), Unusable> {
    let format = u32_at(block, 8);
    if format != FORMAT {
        return Err(Unusable::Version(format));
    }
    let geometry = Geometry {
        extent_bytes: u32_at(block, 12),
        slots: u32_at(block, 16),
        context: u16_at(block, 24),
    };
    if !geometry.is_sound() || geometry.ring() != u32_at(block, 20) {
        return Err(Unusable::Damaged("its sizes are impossible".to_owned()));
    }
    let name = |at: usize, len: u8| &block[at..at + usize::from(len).min(NAME_BYTES)];
    if name(GROUP_AT, block[28]) != expected.group.as_bytes() {
        return Err(Unusable::Foreign("group"));
    }
    if name(MEMBER_AT, block[29]) != expected.member.as_bytes() {
        return Err(Unusable::Foreign("member"));
    }
    let disk_bytes = |nth: usize| u64_at(block, DISKS_AT + nth * DISK_BYTES + 8);
    let is_same = |(nth, (disk, name, size_bytes)): (usize, &(DiskId, String, u64))| {
        let at = DISKS_AT + nth * DISK_BYTES;
        u16_at(block, at) == disk.0
            && (disk_bytes(nth) == *size_bytes || *size_bytes == 0)
            && block[at + 16..at + 24] == name_digest(name)
    };
    let same_count = usize::from(u16_at(block, 26)) == expected.disks.len();
    if !same_count || !expected.disks.iter().enumerate().all(is_same) {
        return Err(Unusable::Foreign(OTHER_DISKS));
    }
    let disk_bytes = (0..expected.disks.len()).map(disk_bytes).collect();
    Ok((u64_at(block, 32), geometry, disk_bytes))
}

fn read_head(block: &[u8], id: u64) -> Option<Head> {
    (is_sealed(block, TRANSACTION_MAGIC) && u64_at(block, 8) == id).then(|| Head {
        number: u64_at(block, 16),
        incarnation: Incarnation(u64_at(block, 24)),
        confirmed: Incarnation(u64_at(block, 32)),
        epoch: Epoch(u64_at(block, 40)),
        covered: Seq(u64_at(block, 48)),
        everything: u32_at(block, 56) & EVERYTHING != 0,
        age: u64_at(block, 72),
    })
}

/// `None`: the block's checksum is right and its content is not, so it is of somebody else's making.
fn apply(
    head: &Head,
    block: &[u8],
    geometry: &Geometry,
    identity: &Identity,
    slots: &mut [Option<Entry>],
) -> Option<()> {
    let mut set = |slot: u32, packed: u64| {
        let entry = Entry::from_u64(packed);
        let known = |entry: Entry| identity.disks.iter().any(|(disk, ..)| *disk == entry.disk);
        if !entry.is_none_or(known) {
            return None;
        }
        *slots.get_mut(slot as usize)? = entry;
        Some(())
    };
    let (updates, context) = (u16_at(block, 60), u16_at(block, 62));
    let expected = geometry.context_of(head.number);
    let context_is_right =
        usize::from(context) == expected.len() && u32_at(block, 64) == expected.start;
    if usize::from(updates) > UPDATES_MAX || !context_is_right {
        return None;
    }
    for nth in 0..usize::from(updates) {
        let at = UPDATES_AT + nth * UPDATE_BYTES;
        set(u32_at(block, at), u64_at(block, at + 4))?;
    }
    for (nth, slot) in expected.enumerate() {
        set(slot, u64_at(block, CONTEXT_AT + nth * 8))?;
    }
    Some(())
}
