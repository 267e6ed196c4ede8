//! What a part of the journal makes of the disks: the newest of each extent, in the order of the
//! disks, so that an image is written once for each place and in one direction.
//!
//! Source: the shadowing of Retroscope, IV (figure 6): of several changes of an item the last one
//! alone counts.

use crate::extents::DiskKey;
use crate::extents::{Extents, Slice};
use bytes::Bytes;
use std::collections::BTreeMap;
use std::ops::Range;

/// Each piece keeps its payload, and with it the batch that it is part of, in memory.
#[derive(Debug, Default)]
pub(super) struct Gathered {
    disks: BTreeMap<DiskKey, Extents<Piece>>,
    payloads: Vec<Bytes>,
    payload_bytes: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Piece {
    /// Of the payload with this number, without its first bytes.
    Payload {
        nth: usize,
        skip: usize,
    },
    Zero {
        no_hole: bool,
    },
    Lost {
        segment: u64,
    },
}

impl Slice for Piece {
    fn without_front(self, bytes: u64) -> Self {
        match self {
            Piece::Payload { nth, skip } => Piece::Payload { nth, skip: skip + bytes as usize },
            Piece::Zero { .. } | Piece::Lost { .. } => self,
        }
    }
}

/// What a run of bytes is to be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Change {
    /// These, one after the other.
    Write(Vec<Bytes>),
    Zero {
        /// It stays allocated.
        no_hole: bool,
    },
    /// What this segment had, and nobody knows.
    Lost { segment: u64 },
}

impl Gathered {
    pub(super) fn write(&mut self, key: DiskKey, offset: u64, payload: Bytes) {
        let range = offset..offset + payload.len() as u64;
        self.payload_bytes += payload.len() as u64;
        self.payloads.push(payload);
        let piece = Piece::Payload { nth: self.payloads.len() - 1, skip: 0 };
        self.disks.entry(key).or_default().insert(range, piece);
    }

    pub(super) fn zero(&mut self, key: DiskKey, range: Range<u64>, no_hole: bool) {
        self.disks.entry(key).or_default().insert(range, Piece::Zero { no_hole });
    }

    pub(super) fn lost(&mut self, key: DiskKey, range: Range<u64>, segment: u64) {
        self.disks.entry(key).or_default().insert(range, Piece::Lost { segment });
    }

    /// True if all bytes of the range are written.
    pub(super) fn covers(&self, key: DiskKey, range: Range<u64>) -> bool {
        let is_written = |piece: Option<Piece>| !matches!(piece, None | Some(Piece::Lost { .. }));
        let of = self.disks.get(&key);
        of.is_some_and(|extents| extents.pieces(range).all(|(_, piece)| is_written(piece)))
    }

    /// Bytes of payloads that it keeps, also of those that others stand over by now.
    pub(super) fn payload_bytes(&self) -> u64 {
        self.payload_bytes
    }

    /// What to do, disk by disk, from each one's beginning; neighbours that are written, or that
    /// become zeroes in the same way, are one change.
    pub(super) fn changes(&self) -> impl Iterator<Item = (DiskKey, Range<u64>, Change)> + '_ {
        self.disks.iter().flat_map(move |(key, extents)| {
            let mut pieces = extents.iter().peekable();
            std::iter::from_fn(move || {
                let (mut range, first) = pieces.next()?;
                let mut change = self.change(&range, *first);
                while let Some((next, piece)) = pieces
                    .next_if(|(next, piece)| next.start == range.end && is_more_of(piece, &change))
                {
                    if let (Change::Write(parts), Piece::Payload { nth, skip }) =
                        (&mut change, *piece)
                    {
                        parts.push(self.part(&next, nth, skip));
                    }
                    range.end = next.end;
                }
                Some((*key, range, change))
            })
        })
    }

    fn change(&self, range: &Range<u64>, piece: Piece) -> Change {
        match piece {
            Piece::Payload { nth, skip } => Change::Write(vec![self.part(range, nth, skip)]),
            Piece::Zero { no_hole } => Change::Zero { no_hole },
            Piece::Lost { segment } => Change::Lost { segment },
        }
    }

    fn part(&self, range: &Range<u64>, nth: usize, skip: usize) -> Bytes {
        self.payloads[nth].slice(skip..skip + (range.end - range.start) as usize)
    }
}

fn is_more_of(piece: &Piece, change: &Change) -> bool {
    match (piece, change) {
        (Piece::Payload { .. }, Change::Write(_)) => true,
        (Piece::Zero { no_hole }, Change::Zero { no_hole: so_far }) => no_hole == so_far,
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use tidelock_protocol::ids::{DiskId, WriterId};

    const DISK: usize = 64;

    fn key(disk: u16) -> DiskKey {
        DiskKey { writer: WriterId(0), disk: DiskId(disk) }
    }

    #[derive(Clone, Copy, Debug, PartialEq)]
    enum Byte {
        Written(u8),
        Zero(bool),
        Lost(u64),
    }

    #[test]
    fn neighbours_are_written_at_once_and_what_is_older_is_not() {
        let mut gathered = Gathered::default();
        gathered.write(key(0), 8, Bytes::from_static(b"old!"));
        gathered.write(key(0), 12, Bytes::from_static(b"next"));
        gathered.write(key(0), 8, Bytes::from_static(b"new!"));
        gathered.zero(key(0), 16..18, false);
        gathered.zero(key(0), 18..20, false);
        gathered.zero(key(0), 20..21, true);
        let parts = vec![Bytes::from_static(b"new!"), Bytes::from_static(b"next")];
        let expected = [
            (key(0), 8..16, Change::Write(parts)),
            (key(0), 16..20, Change::Zero { no_hole: false }),
            (key(0), 20..21, Change::Zero { no_hole: true }),
        ];
        assert_eq!(gathered.changes().collect::<Vec<_>>(), expected);
        assert_eq!(gathered.payload_bytes(), 12);
    }

    proptest! {
        #[test]
        fn is_what_doing_one_after_the_other_would_come_to(
            ops in prop::collection::vec((0u16..2, 0..DISK, 1..20usize, 0u8..8), 0..40),
        ) {
            let mut gathered = Gathered::default();
            let mut disks = vec![vec![None; DISK + 20]; 2];
            for (n, (disk, start, len, kind)) in ops.into_iter().enumerate() {
                let range = start as u64..(start + len) as u64;
                for (i, byte) in disks[usize::from(disk)].iter_mut().enumerate().skip(start).take(len) {
                    *byte = Some(match kind {
                        0 => Byte::Lost(n as u64),
                        1 | 2 => Byte::Zero(kind == 1),
                        _ => Byte::Written((n * 31 + i) as u8),
                    });
                }
                match kind {
                    0 => gathered.lost(key(disk), range, n as u64),
                    1 | 2 => gathered.zero(key(disk), range, kind == 1),
                    _ => {
                        let bytes = (start..start + len).map(|i| (n * 31 + i) as u8);
                        gathered.write(key(disk), range.start, bytes.collect());
                    }
                }
            }
            let mut done = vec![vec![None; DISK + 20]; 2];
            let mut last = None;
            for (key, range, change) in gathered.changes() {
                // In order, and nothing twice.
                prop_assert!(last < Some((key, range.start)) && !range.is_empty());
                last = Some((key, range.end - 1));
                let bytes = match change {
                    Change::Write(parts) => {
                        parts.concat().into_iter().map(Byte::Written).collect::<Vec<_>>()
                    }
                    Change::Zero { no_hole } => {
                        vec![Byte::Zero(no_hole); (range.end - range.start) as usize]
                    }
                    Change::Lost { segment } => {
                        vec![Byte::Lost(segment); (range.end - range.start) as usize]
                    }
                };
                prop_assert_eq!(bytes.len() as u64, range.end - range.start);
                for (i, byte) in range.zip(bytes) {
                    done[usize::from(key.disk.0)][i as usize] = Some(byte);
                }
            }
            prop_assert_eq!(done, disks);
        }
    }
}
