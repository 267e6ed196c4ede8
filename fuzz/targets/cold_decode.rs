//! A compressed segment: whatever its file holds, reading it never panics, no block is longer than it
//! must be, and what is read twice is the same.
//!
//! Input: mode (bit 0: checksums are made right first), the file.
#![no_main]

use libfuzzer_sys::fuzz_target;
use tidelock_store::journal::cold_from_bytes;

fuzz_target!(|data: &[u8]| {
    let [mode, rest @ ..] = data else { return };
    let mut content = rest.to_vec();
    if mode & 1 != 0 {
        tidelock_fuzz::seal::cold(&mut content);
    }
    match cold_from_bytes(&content) {
        Ok(blocks) => {
            assert!(blocks.iter().all(|block| !block.is_empty() && block.len() <= 1 << 20));
            assert_eq!(cold_from_bytes(&content).ok(), Some(blocks));
        }
        Err(error) => assert!(!error.to_string().is_empty()),
    }
});
