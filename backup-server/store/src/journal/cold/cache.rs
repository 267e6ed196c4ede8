//! Blocks that were decompressed, so that neighbours of what was read need not be read again; and the
//! contexts to decompress with. Of one journal, for all who read it.

use std::collections::VecDeque;
use std::fmt;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use zstd::bulk::Decompressor;

/// Blocks that are kept: 4 MiB of 64 KiB each.
const BLOCKS_MAX: usize = 64;
/// Contexts that are kept, of some 100 KiB each: as many readers as are at it at once.
const CONTEXTS_MAX: usize = 8;

/// The segment's id, and the number of the block.
type Key = (u64, u32);

/// The least recently used go first.
#[derive(Default)]
pub(crate) struct BlockCache {
    blocks: Mutex<VecDeque<(Key, Arc<[u8]>)>>,
    contexts: Mutex<Vec<Decompressor<'static>>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // What is in there is whole at any time.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl BlockCache {
    pub(super) fn get(&self, key: Key) -> Option<Arc<[u8]>> {
        let mut blocks = lock(&self.blocks);
        let at = blocks.iter().position(|(of, _)| *of == key)?;
        let found = blocks.remove(at)?;
        let block = Arc::clone(&found.1);
        blocks.push_back(found);
        Some(block)
    }

    pub(super) fn put(&self, key: Key, block: &Arc<[u8]>) {
        let mut blocks = lock(&self.blocks);
        // Two readers may have read it at once.
        blocks.retain(|(of, _)| *of != key);
        if blocks.len() == BLOCKS_MAX {
            blocks.pop_front();
        }
        blocks.push_back((key, Arc::clone(block)));
    }

    /// Forgets the blocks of a segment: what is read next is what the disk has.
    pub(super) fn forget(&self, id: u64) {
        lock(&self.blocks).retain(|((of, _), _)| *of != id);
    }

    /// Decompresses a frame that must give so many bytes.
    pub(super) fn decompress(&self, frame: &[u8], len: usize) -> io::Result<Vec<u8>> {
        let context = lock(&self.contexts).pop();
        let mut context = match context {
            Some(context) => context,
            None => Decompressor::new()?,
        };
        let mut block = Vec::with_capacity(len);
        let result = context.decompress_to_buffer(frame, &mut block);
        let mut contexts = lock(&self.contexts);
        if contexts.len() < CONTEXTS_MAX {
            contexts.push(context);
        }
        result.map(|_| block)
    }
}

impl fmt::Debug for BlockCache {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BlockCache").field("blocks", &lock(&self.blocks).len()).finish()
    }
}
