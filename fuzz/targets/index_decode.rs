//! The index of a journal segment: whatever its file holds, reading it never panics, and what it
//! gives is in order, not empty, and ends on a disk that a number can count.
//!
//! Input: mode (bit 0: checksums are made right first), number of blocks (3 at most), the used part
//! of each of them (368 bytes), what stands behind the blocks.
#![no_main]

use libfuzzer_sys::fuzz_target;
use tidelock_store::journal::{BLOCK_BYTES, IndexEntry, index_from_bytes};

const USED_BYTES: usize = 368;

fuzz_target!(|data: &[u8]| {
    let [mode, blocks, rest @ ..] = data else { return };
    let mut rest = rest;
    let mut content = Vec::new();
    for _ in 0..blocks & 3 {
        let (used, behind) = rest.split_at(USED_BYTES.min(rest.len()));
        content.extend_from_slice(used);
        content.resize(content.len().next_multiple_of(BLOCK_BYTES), 0);
        rest = behind;
    }
    content.extend_from_slice(rest);
    if mode & 1 != 0 {
        tidelock_fuzz::seal::index(&mut content);
    }
    match index_from_bytes(&content) {
        Ok(entries) => {
            let key = |e: &IndexEntry| (e.writer, e.disk, e.offset);
            assert!(entries.is_sorted_by_key(key));
            for entry in entries {
                let end = entry.offset.checked_add(u64::from(entry.len_bytes));
                assert!(entry.len_bytes > 0 && end.is_some());
            }
        }
        Err(error) => assert!(!error.to_string().is_empty()),
    }
});
