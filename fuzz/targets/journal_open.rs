//! The journal: whatever a segment's file holds, opening it never panics; what opens can be read
//! from end to end; and where a torn tail was cut, what is left opens cleanly to the same state.
//!
//! Input: mode (bit 0: checksums are made right first, bit 1: the chain of batches too), the file.
#![no_main]

use libfuzzer_sys::fuzz_target;
use tidelock_store::journal::open_from_bytes;

fuzz_target!(|data: &[u8]| {
    let [mode, rest @ ..] = data else { return };
    let mut content = rest.to_vec();
    if mode & 1 != 0 {
        tidelock_fuzz::seal::segment(&mut content, mode & 2 != 0);
    }
    let opened = match open_from_bytes(&content) {
        Ok(opened) => opened,
        Err(error) => {
            assert!(!error.to_string().is_empty());
            return;
        }
    };
    let journal = &opened.journal;
    assert_eq!(journal.end(), journal.durable_end(), "all that it holds is durable");
    for batch in
        journal.reader::<tidelock_protocol::record::RawBody>(journal.start(), journal.end())
    {
        for entry in batch.expect("a batch of an opened journal").entries {
            entry.expect("an entry of an opened journal");
        }
    }
    if let Some(torn) = opened.torn {
        assert!(!opened.clean);
        let cut = torn.offset as usize;
        assert_eq!(cut as u64 + torn.len_bytes, content.len() as u64);
        let again = open_from_bytes(&content[..cut]).expect("what is left opens");
        assert_eq!(again.torn, None);
        assert_eq!(again.journal.state(), journal.state());
        assert_eq!(again.journal.end(), journal.end());
    }
});
