//! What all disks that can be read have in common, whatever they are made of.

use crate::history::PastView;
use std::fmt::Debug;
use std::io;
use std::ops::Range;
use tidelock_storage::StorageFile;
use tidelock_store::view::{Content, View};

/// A disk that can be read by anybody at any time.
pub trait Disk: Debug + Send + Sync {
    /// Its size.
    fn size_bytes(&self) -> u64;
    /// Fills the buffer from this offset on.
    fn read(&self, offset: u64, buf: &mut [u8]) -> io::Result<()>;
    /// What the range is made of, in order and without a hole: lengths in bytes; `false` from `f` ends it.
    fn describe(
        &self,
        range: Range<u64>,
        f: &mut dyn FnMut(u64, Content) -> bool,
    ) -> io::Result<()>;
}

impl<D: Disk + ?Sized> Disk for std::sync::Arc<D> {
    fn size_bytes(&self) -> u64 {
        (**self).size_bytes()
    }

    fn read(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        (**self).read(offset, buf)
    }

    fn describe(
        &self,
        range: Range<u64>,
        f: &mut dyn FnMut(u64, Content) -> bool,
    ) -> io::Result<()> {
        (**self).describe(range, f)
    }
}

impl<F: StorageFile + Send + Sync> Disk for View<F> {
    fn size_bytes(&self) -> u64 {
        View::size_bytes(self)
    }

    fn read(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        View::read(self, offset, buf)
    }

    fn describe(
        &self,
        range: Range<u64>,
        f: &mut dyn FnMut(u64, Content) -> bool,
    ) -> io::Result<()> {
        View::describe(self, range, f)
    }
}

impl<F: StorageFile + Send + Sync> Disk for PastView<F> {
    fn size_bytes(&self) -> u64 {
        PastView::size_bytes(self)
    }

    fn read(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        PastView::read(self, offset, buf)
    }

    fn describe(
        &self,
        range: Range<u64>,
        f: &mut dyn FnMut(u64, Content) -> bool,
    ) -> io::Result<()> {
        PastView::describe(self, range, f)
    }
}

/// A disk that is an array, for tests.
#[cfg(test)]
#[derive(Clone, Debug)]
pub(super) struct Plain(pub(super) Vec<u8>);

#[cfg(test)]
impl Disk for Plain {
    fn size_bytes(&self) -> u64 {
        self.0.len() as u64
    }

    fn read(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        buf.copy_from_slice(&self.0[offset as usize..offset as usize + buf.len()]);
        Ok(())
    }

    fn describe(
        &self,
        range: Range<u64>,
        f: &mut dyn FnMut(u64, Content) -> bool,
    ) -> io::Result<()> {
        let bytes = &self.0[range.start as usize..range.end as usize];
        for run in bytes.chunk_by(|a, b| (*a == 0) == (*b == 0)) {
            let content = if run[0] == 0 { Content::Zero } else { Content::Data };
            if !f(run.len() as u64, content) {
                break;
            }
        }
        Ok(())
    }
}
