//! A segment's file, as it was written or compressed: whoever reads it need not know which.

use super::cache::BlockCache;
use super::file::{ColdError, ColdFile};
use super::format::cold_file_name;
use crate::journal::SegmentHeader;
use std::io::{self, IoSlice};
use std::ops::Range;
use std::sync::Arc;
use tidelock_storage::{Storage, StorageFile};

/// A segment's file. Positions in it are those of the segment.
#[derive(Clone, Debug)]
pub enum SegmentFile<F> {
    /// As it was written.
    Plain(F),
    /// Compressed: it does not change any more.
    Cold(Arc<ColdFile<F>>),
}

impl<F: StorageFile> SegmentFile<F> {
    /// The compressed one.
    #[must_use]
    pub fn cold(&self) -> Option<&ColdFile<F>> {
        match self {
            Self::Plain(_) => None,
            Self::Cold(cold) => Some(cold),
        }
    }

    /// Whatever of it was kept in memory is read again.
    pub(in crate::journal) fn forget_cached(&self) {
        if let Some(cold) = self.cold() {
            cold.forget_cached();
        }
    }

    /// Its name.
    #[must_use]
    pub fn name(&self, index: u64, id: u64) -> String {
        match self {
            Self::Plain(_) => SegmentHeader::file_name(index, id),
            Self::Cold(_) => cold_file_name(index, id),
        }
    }

    fn plain(&self) -> io::Result<&F> {
        match self {
            Self::Plain(file) => Ok(file),
            Self::Cold(_) => Err(io::Error::new(
                io::ErrorKind::Unsupported,
                "a compressed segment of the journal does not change",
            )),
        }
    }
}

impl<F: StorageFile> StorageFile for SegmentFile<F> {
    fn size_bytes(&self) -> io::Result<u64> {
        match self {
            Self::Plain(file) => file.size_bytes(),
            Self::Cold(cold) => Ok(cold.facts().len_bytes),
        }
    }

    fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<()> {
        match self {
            Self::Plain(file) => file.read_at(buf, offset),
            Self::Cold(cold) => cold.read_at(buf, offset),
        }
    }

    fn write_at(&self, parts: &[IoSlice<'_>], offset: u64) -> io::Result<()> {
        self.plain()?.write_at(parts, offset)
    }

    fn zero_at(&self, offset: u64, len_bytes: u64, keep_allocated: bool) -> io::Result<()> {
        self.plain()?.zero_at(offset, len_bytes, keep_allocated)
    }

    fn set_size(&self, size_bytes: u64) -> io::Result<()> {
        self.plain()?.set_size(size_bytes)
    }

    fn sync(&self) -> io::Result<()> {
        self.plain()?.sync()
    }

    fn next_data(&self, offset: u64) -> io::Result<Option<Range<u64>>> {
        match self {
            Self::Plain(file) => file.next_data(offset),
            Self::Cold(cold) => {
                let len = cold.facts().len_bytes;
                Ok((offset < len).then_some(offset..len))
            }
        }
    }
}

/// The file of a segment, and the name of one beside it that is not needed.
pub(crate) struct FoundSegment<F> {
    pub(crate) file: SegmentFile<F>,
    pub(crate) left_over: Option<String>,
}

/// Opens a segment's file, whichever is there. Of both it is the segment's own: it was there when
/// the other one was made of it, or it is a copy that somebody has put there. Only one that is too
/// short to be that is not. `None`: there is none.
pub(crate) fn find_segment_file<S: Storage>(
    storage: &S,
    dir: &str,
    index: u64,
    id: u64,
    cache: &Arc<BlockCache>,
) -> Result<Option<FoundSegment<S::File>>, ColdError> {
    let open = |name: &str| match storage.open(&tidelock_storage::join(dir, name)) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
        file => file.map(Some),
    };
    let (plain_name, cold_name) = (SegmentHeader::file_name(index, id), cold_file_name(index, id));
    let plain = open(&plain_name)?;
    let cold = open(&cold_name)?.map(|file| {
        let cold = ColdFile::open(file, Arc::clone(cache))?;
        match (cold.facts().index, cold.facts().id) == (index, id) {
            true => Ok(cold),
            false => Err(ColdError::Damaged("it is of another segment")),
        }
    });
    let found = |file, left_over| Ok(Some(FoundSegment { file, left_over }));
    match (plain, cold) {
        (None, None) => Ok(None),
        (Some(plain), None) => found(SegmentFile::Plain(plain), None),
        (None, Some(cold)) => found(SegmentFile::Cold(Arc::new(cold?)), None),
        (Some(plain), Some(cold)) => match cold {
            Ok(cold) if plain.size_bytes()? < cold.facts().len_bytes => {
                found(SegmentFile::Cold(Arc::new(cold)), Some(plain_name))
            }
            _ => found(SegmentFile::Plain(plain), Some(cold_name)),
        },
    }
}
