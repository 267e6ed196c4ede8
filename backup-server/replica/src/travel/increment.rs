//! What one disk has different at one point than at another, as a file: extents with their content at the second.
//! Applied to an image of the first point it makes one of the second; forwards or backwards in time alike
//! (Retroscope 3.2: incremental snapshots from a base).
//!
//! The bytes are in `docs/manual/copies.md`: a head with a description, extents in ascending order, an end that
//! counts them. Each part has a CRC-32C. Invariant: a file is applied only after all of it was read and found good, so
//! one that was cut off changes nothing.

use crate::travel::disk::Disk;
use crate::travel::moment::Moment;
use serde::{Deserialize, Serialize};
use std::collections::VecDeque;
use std::io::{self, Read};
use std::ops::Range;
use thiserror::Error;
use tidelock_planted::Bug;
use tidelock_protocol::record::crc32c;
use tidelock_store::view::Content;

const MAGIC: [u8; 8] = *b"TLKINCR\0";
/// The version of the format.
pub const FORMAT: u32 = 1;
const HEAD_BYTES: usize = 32;
/// The longest data of one extent.
pub const EXTENT_MAX_BYTES: u64 = 1 << 20;
const DESCRIPTION_MAX_BYTES: usize = 1 << 20;

const DATA: u8 = 1;
const ZERO: u8 = 2;
const END: u8 = 3;

/// What a file is of.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Description {
    /// The group.
    pub group: String,
    /// The disk, as `member.disk`.
    pub disk: String,
    /// Its size.
    pub size_bytes: u64,
    /// What it is applied to.
    pub from: Moment,
    /// What it makes of it.
    pub to: Moment,
}

/// What a file has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Extent {
    /// Where on the disk.
    pub offset: u64,
    /// How much.
    pub len_bytes: u64,
}

/// Why a file is not taken.
#[derive(Debug, Error)]
pub enum IncrementError {
    /// It cannot be read, or what it makes not written.
    #[error(transparent)]
    Io(#[from] io::Error),
    /// It is something else.
    #[error("this is not an increment of tidelock-backup")]
    Other,
    /// A newer program wrote it.
    #[error("it has format {0}, this program knows {FORMAT}: use a newer one")]
    Version(u32),
    /// It is damaged or not whole.
    #[error("it is damaged at byte {at}: {what}. Nothing was changed; make it again")]
    Damaged {
        /// Where.
        at: u64,
        /// The security of the link.
        what: &'static str,
    },
}

/// Makes a file, part after part.
#[derive(Debug)]
pub struct Writer<D> {
    disk: D,
    todo: VecDeque<(Range<u64>, Content)>,
    head: Option<Vec<u8>>,
    count: u64,
    bytes: u64,
    has_ended: bool,
}

impl<D: Disk> Writer<D> {
    /// Of these extents of a disk as it is at the second point.
    pub fn new(
        disk: D,
        description: &Description,
        extents: impl IntoIterator<Item = Range<u64>>,
    ) -> io::Result<Self> {
        let mut todo = VecDeque::new();
        for extent in extents {
            let mut at = extent.start;
            disk.describe(extent, &mut |len, content| {
                todo.push_back((at..at + len, content));
                at += len;
                true
            })?;
        }
        if tidelock_planted::is(Bug::LastExtentForgotten) {
            todo.pop_back();
        }
        let text = serde_json::to_vec(description).expect("plain data");
        assert!(text.len() <= DESCRIPTION_MAX_BYTES, "names are short and writers few");
        let mut head = Vec::with_capacity(HEAD_BYTES + text.len());
        head.extend(MAGIC);
        head.extend(FORMAT.to_le_bytes());
        head.extend((text.len() as u32).to_le_bytes());
        head.extend(disk.size_bytes().to_le_bytes());
        head.extend(crc32c(&text).to_le_bytes());
        head.extend(crc32c(&head).to_le_bytes());
        head.extend(text);
        Ok(Self { disk, todo, head: Some(head), count: 0, bytes: 0, has_ended: false })
    }

    /// The next part of the file; `None`: it is whole.
    pub fn next_part(&mut self) -> io::Result<Option<Vec<u8>>> {
        if let Some(head) = self.head.take() {
            return Ok(Some(head));
        }
        let Some((range, content)) = self.todo.pop_front() else {
            if std::mem::replace(&mut self.has_ended, true) {
                return Ok(None);
            }
            return Ok(Some(extent_head(END, self.count, self.bytes, 0).to_vec()));
        };
        let end = match content {
            Content::Data => range.end.min(range.start + EXTENT_MAX_BYTES),
            Content::Zero => range.end,
        };
        let len = end - range.start;
        let part = match content {
            Content::Zero => extent_head(ZERO, range.start, len, 0).to_vec(),
            Content::Data => {
                let mut part = vec![0; HEAD_BYTES + len as usize];
                self.disk.read(range.start, &mut part[HEAD_BYTES..])?;
                let crc = crc32c(&part[HEAD_BYTES..]);
                part[..HEAD_BYTES].copy_from_slice(&extent_head(DATA, range.start, len, crc));
                part
            }
        };
        self.count += 1;
        self.bytes += len;
        if end < range.end {
            self.todo.push_front((end..range.end, content));
        }
        Ok(Some(part))
    }
}

fn extent_head(kind: u8, offset: u64, len: u64, crc: u32) -> [u8; HEAD_BYTES] {
    let mut head = [0; HEAD_BYTES];
    head[0] = kind;
    head[4..8].copy_from_slice(&crc.to_le_bytes());
    head[8..16].copy_from_slice(&offset.to_le_bytes());
    head[16..24].copy_from_slice(&len.to_le_bytes());
    let own = crc32c(&head[..28]);
    head[28..].copy_from_slice(&own.to_le_bytes());
    head
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(bytes[at..at + 4].try_into().expect("four bytes"))
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes"))
}

/// One step of a file that is read.
#[derive(Debug, PartialEq, Eq)]
pub enum Piece<'a> {
    /// This extent has this content.
    Data(Extent, &'a [u8]),
    /// This extent is zeroes.
    Zero(Extent),
}

/// Reads a file to its end, showing each piece, and checks everything on the way.
pub fn read(
    mut file: impl Read,
    mut f: impl FnMut(&Description, Piece<'_>) -> io::Result<()>,
) -> Result<(Description, Extent), IncrementError> {
    let mut head = [0; HEAD_BYTES];
    let short = |at| {
        move |e: io::Error| match e.kind() {
            io::ErrorKind::UnexpectedEof => {
                IncrementError::Damaged { at, what: "it ends too early" }
            }
            _ => IncrementError::Io(e),
        }
    };
    file.read_exact(&mut head).map_err(|e| match e.kind() {
        io::ErrorKind::UnexpectedEof => IncrementError::Other,
        _ => IncrementError::Io(e),
    })?;
    if head[..8] != MAGIC {
        return Err(IncrementError::Other);
    }
    let damaged = |at, what| IncrementError::Damaged { at, what };
    if u32_at(&head, 28) != crc32c(&head[..28]) {
        return Err(damaged(0, "the head's checksum is wrong"));
    }
    if u32_at(&head, 8) != FORMAT {
        return Err(IncrementError::Version(u32_at(&head, 8)));
    }
    let len = u32_at(&head, 12) as usize;
    if len > DESCRIPTION_MAX_BYTES {
        return Err(damaged(12, "the description is too long"));
    }
    let mut at = HEAD_BYTES as u64;
    let mut data = vec![0; len];
    file.read_exact(&mut data).map_err(short(at))?;
    let description = serde_json::from_slice::<Description>(&data).ok();
    let description = description
        .filter(|of| crc32c(&data) == u32_at(&head, 24) && of.size_bytes == u64_at(&head, 16))
        .ok_or(damaged(at, "the description"))?;
    at += len as u64;
    let mut total = Extent::default();
    let mut last_end = 0;
    loop {
        file.read_exact(&mut head).map_err(short(at))?;
        if u32_at(&head, 28) != crc32c(&head[..28]) {
            return Err(damaged(at, "an extent's checksum is wrong"));
        }
        let extent = Extent { offset: u64_at(&head, 8), len_bytes: u64_at(&head, 16) };
        at += HEAD_BYTES as u64;
        if head[0] == END {
            // The end counts the extents where others have their place.
            return if extent == total && file.read(&mut [0])? == 0 {
                Ok((description, total))
            } else {
                Err(damaged(at, "the end does not fit what is before it"))
            };
        }
        let end = extent.offset.checked_add(extent.len_bytes);
        let end = end.filter(|end| *end <= description.size_bytes && extent.offset >= last_end);
        last_end = end.ok_or(damaged(at, "an extent is out of order or beyond the disk"))?;
        match head[0] {
            DATA if extent.len_bytes <= EXTENT_MAX_BYTES => {
                data.resize(extent.len_bytes as usize, 0);
                file.read_exact(&mut data).map_err(short(at))?;
                if crc32c(&data) != u32_at(&head, 4) {
                    return Err(damaged(at, "the data's checksum is wrong"));
                }
                at += extent.len_bytes;
                f(&description, Piece::Data(extent, &data))?;
            }
            ZERO => f(&description, Piece::Zero(extent))?,
            _ => return Err(damaged(at, "an extent of an unknown kind")),
        }
        total.offset += 1;
        total.len_bytes += extent.len_bytes;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::travel::disk::Plain;
    use proptest::prelude::*;
    use std::collections::BTreeMap;
    use tidelock_protocol::hlc::Hlc;
    use tidelock_protocol::ids::Epoch;

    fn moment(seq: u64) -> Moment {
        let (hlc_raw, epoch) = (Hlc::new(seq, 0), Epoch(1));
        let seqs = BTreeMap::from([("db".to_owned(), seq)]);
        Moment { time: "t".into(), unix_ms: seq, hlc: hlc_raw.to_string(), hlc_raw, epoch, seqs }
    }

    fn description(size_bytes: u64) -> Description {
        let (group, disk) = ("shop".into(), "db.root".into());
        Description { group, disk, size_bytes, from: moment(1), to: moment(9) }
    }

    fn file(disk: &Plain, extents: impl IntoIterator<Item = Range<u64>>) -> Vec<u8> {
        let of = description(disk.size_bytes());
        let mut writer = Writer::new(disk.clone(), &of, extents).unwrap();
        let mut file = Vec::new();
        while let Some(part) = writer.next_part().unwrap() {
            file.extend(part);
        }
        assert!(writer.next_part().unwrap().is_none());
        file
    }

    fn apply(file: &[u8], image: &mut [u8]) -> Result<Extent, IncrementError> {
        read(file, |_, piece| {
            match piece {
                Piece::Data(at, data) => {
                    image[at.offset as usize..][..data.len()].copy_from_slice(data);
                }
                Piece::Zero(at) => image[at.offset as usize..][..at.len_bytes as usize].fill(0),
            }
            Ok(())
        })
        .map(|(_, total)| total)
    }

    #[test]
    fn a_long_extent_is_cut_and_nothing_is_a_file_too() {
        let disk = Plain(vec![7; 5 << 19]);
        let bytes = file(&disk, std::iter::once(0..5 << 19));
        let mut image = vec![0; 5 << 19];
        let total = apply(&bytes, &mut image).unwrap();
        assert_eq!(total, Extent { offset: 3, len_bytes: 5 << 19 });
        assert!(image == disk.0);
        assert_eq!(apply(&file(&disk, []), &mut image).unwrap(), Extent::default());
        let other = apply(b"QFI\xfb and so on, at least as long as a head", &mut image);
        assert!(matches!(other, Err(IncrementError::Other)));
        let mut newer = bytes;
        newer[8] = 2;
        let crc = crc32c(&newer[..28]);
        newer[28..32].copy_from_slice(&crc.to_le_bytes());
        assert!(matches!(apply(&newer, &mut image), Err(IncrementError::Version(2))));
    }

    proptest! {
        #[test]
        fn the_first_image_becomes_the_second_and_damage_is_seen(
            before in prop::collection::vec(0u8..3, 200), after in prop::collection::vec(0u8..3, 200),
            parts in prop::collection::vec((0u64..20, 1u64..20), 0..8),
            hit in any::<prop::sample::Index>(), bit in 0u8..8,
        ) {
            let mut extents: Vec<Range<u64>> = Vec::new();
            for (gap, len) in parts {
                let start = extents.last().map_or(0, |e| e.end) + gap;
                if start < 200 {
                    extents.push(start..(start + len).min(200));
                }
            }
            let mut expected = before.clone();
            for extent in &extents {
                let range = extent.start as usize..extent.end as usize;
                expected[range.clone()].copy_from_slice(&after[range]);
            }
            let bytes = file(&Plain(after), extents.clone());
            let mut image = before.clone();
            let total = apply(&bytes, &mut image).unwrap();
            prop_assert_eq!(total.len_bytes, extents.iter().map(|e| e.end - e.start).sum::<u64>());
            prop_assert!(image == expected);
            let cut_off = &bytes[..hit.index(bytes.len())];
            prop_assert!(apply(cut_off, &mut image.clone()).is_err());
            let mut flipped = bytes.clone();
            let at = hit.index(bytes.len());
            flipped[at] ^= 1 << bit;
            prop_assert!(apply(&flipped, &mut before.clone()).is_err());
            let mut longer = bytes;
            longer.extend(b"x");
            prop_assert!(apply(&longer, &mut image).is_err());
        }
    }
}
