//! Crashes at any moment, with every part of the block that is being written.

use super::*;

const SECTOR: usize = 512;

/// The file with some sectors of one block as they were before.
fn torn(new: &[u8], old: &[u8], at: usize, keep: u32) -> Vec<u8> {
    let mut file = new.to_vec();
    for sector in 0..BLOCK_BYTES / SECTOR {
        if keep >> sector & 1 == 0 {
            let range = at + sector * SECTOR..at + (sector + 1) * SECTOR;
            file[range.clone()].copy_from_slice(&old[range]);
        }
    }
    file
}

/// Over several turns of the ring: whatever part of a block has reached the disk, the log reads as it
/// was before the block or as it is after it.
#[test]
fn a_torn_block_is_as_if_it_had_not_been_written() {
    let (mut log, mut file) = open_clean();
    let mut last = format::read(&file, &identity()).unwrap();
    for nth in 0..40u64 {
        log.admit(nth, extent((nth % 2) as u16, nth % 23));
        while let Some(action) = log.poll_action() {
            match action {
                Action::Go(request) => log.finished(request, Seq(101 + nth)),
                Action::Flush { disk, number } => log.flush_ended(disk, number, true),
                Action::Discard => panic!("nothing failed"),
                Action::Write { offset, block } => {
                    let (old, at) = (file.clone(), offset as usize);
                    file[at..at + BLOCK_BYTES].copy_from_slice(&block);
                    let new = format::read(&file, &identity()).unwrap();
                    for keep in 0..1 << (BLOCK_BYTES / SECTOR) {
                        let found = format::read(&torn(&file, &old, at, keep), &identity());
                        let found = found.unwrap_or_else(|why| panic!("{keep:b} of {nth}: {why}"));
                        assert!(found == last || found == new, "{keep:b} of {nth}");
                    }
                    last = new;
                    log.written(true);
                }
            }
        }
        log.committed(Seq(101 + nth));
        log.step(true, Seq(101 + nth), START);
    }
    assert!(last.head.number > 3 * u64::from(GEOMETRY.ring()), "{}", last.head.number);
}

/// What is read after a crash is what was in memory: also when the last block was torn and is
/// written again by the next run.
#[test]
fn runs_that_tear_their_last_block_take_over_from_each_other() {
    let (mut log, mut file) = open_clean();
    let mut before = std::collections::BTreeSet::new();
    for run_nth in 0..30u64 {
        for nth in 0..3 {
            let at = extent((nth % 2) as u16, (run_nth + nth * 7) % 31);
            log.admit(nth, at);
            for request in run(&mut log, &mut file) {
                log.finished(request, Seq(100));
                before.insert((at.disk, at.offset));
            }
            log.step(true, Seq(100), START);
        }
        log.admit(99, extent(0, 40));
        if let Some(Action::Write { offset, block }) = log.poll_action() {
            let half = offset as usize..offset as usize + BLOCK_BYTES / 2;
            file[half].copy_from_slice(&block[..BLOCK_BYTES / 2]);
        }
        let of_memory = log.ranges();
        log = reopen(&mut file, 100 + run_nth);
        for extent in log.ranges() {
            assert!(of_memory.iter().any(|m| m.overlaps(&extent)), "{extent:?} was never in it");
        }
        for (nth, number) in [(0, 1), (1, 2)] {
            let _ = log.flush_begins(DiskId(nth));
            log.flush_ended(DiskId(nth), number, true);
        }
        log.attached(&attachment(100));
        log.step(true, Seq(100), START);
        run(&mut log, &mut file);
    }
    assert!(before.len() > 20);
}
