//! Which segments opening need not read, because their indexes say what there is to know.
//!
//! Invariant: what is skipped was sealed, its header and checkpoint are whole, its index names
//! the length and the end of its chain as the header of the next segment does, and everything
//! before the first segment that is read and shown is in every cut from here on.
//!
//! ```text
//!  index, closed │ index, closed │ none: read, and made again │ index, closed │ index │ last
//!  ── skipped ───┼── skipped ────┼── read, not shown ─────────┼────── read and shown ──────▶
//!                                                             from
//! ```

use super::index::{SegmentFacts, SegmentIndex, index_file_name, parse_index_file_name};
use super::open::FoundSegment;
use super::{IndexError, JournalError, SegmentHeader};
use std::collections::BTreeMap;
use tidelock_protocol::hlc::Hlc;
use tidelock_protocol::vector::CountVector;
use tidelock_storage::{Storage, StorageFile};

/// Since when everything before a segment is in every state; by the segment's index.
pub type ClosedSegments = BTreeMap<u64, (Hlc, CountVector)>;

/// An index that was missing or damaged, and is made again.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MadeAgain {
    /// Its file.
    pub file: String,
    /// What was wrong with it.
    pub reason: String,
}

/// What the indexes say of the segments that were found.
pub(super) struct Indexed<F> {
    /// By place in the list: the segment need not be read for what it leads to.
    pub(super) whole: Vec<bool>,
    /// The place of the first segment that must be read for the cut.
    pub(super) from: usize,
    /// Of the segments up to there.
    pub(super) closed: ClosedSegments,
    pub(super) made_again: Vec<MadeAgain>,
    /// By segment.
    pub(super) files: BTreeMap<u64, F>,
}

/// How a segment ends, as the header of the next one says.
pub(super) fn facts_of<F>(of: &FoundSegment<F>, next: &SegmentHeader) -> SegmentFacts {
    SegmentFacts {
        index: of.segment.index,
        id: of.segment.id,
        len_bytes: next.prev_len,
        last_batch: next.first_batch.wrapping_sub(1),
        chain: next.chain,
    }
}

impl<F: StorageFile> Indexed<F> {
    /// Reads the indexes of all segments but the last, and removes those of segments that are gone
    /// and those that were not finished.
    pub(super) fn read<S: Storage<File = F>>(
        storage: &S,
        dir: &str,
        segments: &[FoundSegment<F>],
    ) -> Result<Self, JournalError> {
        remove_left_over(storage, dir, segments)?;
        let mut indexed = Self {
            whole: vec![false; segments.len()],
            from: 0,
            closed: BTreeMap::new(),
            made_again: Vec::new(),
            files: BTreeMap::new(),
        };
        let mut found = ClosedSegments::new();
        for (at, pair) in segments.windows(2).enumerate() {
            let (segment, next) = (&pair[0].segment, &pair[1].header);
            let name = index_file_name(segment.index, segment.id);
            let facts = facts_of(&pair[0], next);
            let opened = storage
                .open(&tidelock_storage::join(dir, &name))
                .map_err(IndexError::from)
                .and_then(|file| Ok((SegmentIndex::open_of(file.clone(), &facts)?, file)));
            match opened {
                Ok((index, file)) => {
                    indexed.files.insert(segment.index, file);
                    indexed.whole[at] = true;
                    if let Some(closed) = index.footer().closed.clone() {
                        found.insert(segment.index, closed);
                        indexed.from = at;
                    }
                }
                Err(IndexError::Io(e)) if e.kind() == std::io::ErrorKind::NotFound => {
                    let reason = "it is missing".to_owned();
                    indexed.made_again.push(MadeAgain { file: name, reason });
                }
                Err(error) => {
                    indexed.made_again.push(MadeAgain { file: name, reason: error.to_string() });
                }
            }
        }
        // An upper bound does: of one that does not say, that of the next one that does.
        let mut next = None;
        for of in segments[..segments.len().min(indexed.from + 1)].iter().rev() {
            next = found.remove(&of.segment.index).or(next);
            if let Some(closed) = &next {
                indexed.closed.insert(of.segment.index, closed.clone());
            }
        }
        for whole in indexed.whole.iter_mut().skip(indexed.from) {
            *whole = false;
        }
        Ok(indexed)
    }

    /// Whether the segment at this place has an index that must be made.
    pub(super) fn is_missing(&self, name: &str) -> bool {
        self.made_again.iter().any(|made| made.file == name)
    }
}

fn remove_left_over<S: Storage>(
    storage: &S,
    dir: &str,
    segments: &[FoundSegment<S::File>],
) -> Result<(), JournalError> {
    let names = storage.list(dir).map_err(JournalError::io("list the journal"))?;
    for name in names {
        let Some((index, id)) = parse_index_file_name(&name) else { continue };
        let is_of = |of: &FoundSegment<S::File>| (of.segment.index, of.segment.id) == (index, id);
        if name == index_file_name(index, id) && segments.iter().any(is_of) {
            continue;
        }
        storage
            .remove(&tidelock_storage::join(dir, &name))
            .map_err(JournalError::io("remove an index that is not needed"))?;
    }
    Ok(())
}
