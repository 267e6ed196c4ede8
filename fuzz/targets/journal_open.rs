//! The journal: whatever a segment's file holds, opening it never panics; what opens can be read
//! from end to end; and where a torn tail was cut, what is left opens cleanly to the same state.
//!
//! Input: mode (bit 0: checksums are made right first, bit 1: the chain of batches too), the file.
#![no_main]

use libfuzzer_sys::fuzz_target;
use tidelock_protocol::record::RawBody;
use tidelock_storage::memory::Memory;
use tidelock_store::journal::{Journal, JournalError, Opened, Options, Position, disk_of_bytes};

fn open(disk: &Memory) -> Result<Opened<Memory>, JournalError> {
    Journal::open(disk.clone(), "journal", Position::default(), Options::default())
}

fuzz_target!(|data: &[u8]| {
    let [mode, rest @ ..] = data else { return };
    let mut content = rest.to_vec();
    if mode & 1 != 0 {
        tidelock_fuzz::seal::segment(&mut content, mode & 2 != 0);
    }
    let disk = disk_of_bytes(&content).expect("in memory");
    let opened = match open(&disk) {
        Ok(opened) => opened,
        Err(error) => {
            assert!(!error.to_string().is_empty());
            return;
        }
    };
    let journal = &opened.journal;
    assert_eq!(journal.end(), journal.durable_end(), "all that it holds is durable");
    for batch in journal.reader::<RawBody>(journal.start(), journal.end()) {
        for entry in batch.expect("a batch of an opened journal").entries {
            entry.expect("an entry of an opened journal");
        }
    }
    if let Some(torn) = opened.torn {
        assert!(!opened.clean);
        let cut = torn.offset as usize;
        assert_eq!(cut as u64 + torn.len_bytes, content.len() as u64);
        let again = open(&disk.killed()).expect("what is left opens");
        // The tail is there still if only it shows that what is damaged was durable.
        assert!(again.torn.is_none_or(|kept| kept == torn && !opened.damaged.is_empty()));
        assert_eq!(again.journal.state(), journal.state());
        assert_eq!(again.journal.end(), journal.end());
    }
});
