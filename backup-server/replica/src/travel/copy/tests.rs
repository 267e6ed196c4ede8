//! Copies against plain arrays: every plan, ended by a power loss at any place and done again.

use super::*;
use crate::travel::disk::Plain;
use proptest::prelude::*;
use tidelock_storage::Storage;
use tidelock_storage::memory::{Faults, Memory, MemoryFile};

const SIZE: u64 = 2 * BLOCK_BYTES + 8192;

/// Sector, number of sectors, byte.
type Write = (u64, u64, u8);

fn written(disk: &Plain, writes: &[Write]) -> (Plain, Vec<Range<u64>>) {
    let (mut disk, mut touched) = (disk.clone(), vec![false; (SIZE / 512) as usize]);
    for (at, len, byte) in writes {
        let sectors = at % (SIZE / 512)..(at % (SIZE / 512) + len).min(SIZE / 512);
        disk.0[sectors.start as usize * 512..sectors.end as usize * 512].fill(*byte);
        touched[sectors.start as usize..sectors.end as usize].fill(true);
    }
    let mut at = 0;
    let mut changed = Vec::new();
    for run in touched.chunk_by(|a, b| a == b) {
        let end = at + run.len() as u64 * 512;
        if run[0] {
            changed.push(at..end);
        }
        at = end;
    }
    (disk, changed)
}

fn open(disk: &Memory, name: &str) -> (Raw<MemoryFile>, Table<MemoryFile>) {
    let file = |name: &str| disk.open(name).or_else(|_| disk.create(name)).unwrap();
    let image = file(name);
    if image.size_bytes().unwrap() != SIZE {
        image.set_size(SIZE).unwrap();
    }
    (Raw(image), Table::open(file(&format!("{name}.digests")), SIZE).unwrap())
}

type OfMemory = Copier<Plain, Raw<MemoryFile>, MemoryFile>;

fn copier(disk: &Memory, copies: Vec<(&str, &Plain, Plan)>) -> OfMemory {
    let copy = |(name, of, plan): (&str, &Plain, Plan)| {
        let (image, digests) = open(disk, name);
        Copy { disk: of.clone(), image, digests, plan }
    };
    Copier::new(copies.into_iter().map(copy).collect())
}

fn run(copier: &mut OfMemory) -> io::Result<()> {
    while copier.step()?.is_some() {}
    copier.sync()
}

fn check(disk: &Memory, name: &str, expected: &Plain) {
    let (mut image, digests) = open(disk, name);
    let mut found = vec![0; SIZE as usize];
    image.read(0, &mut found).unwrap();
    assert!(found == expected.0, "{name}");
    assert_eq!(digests.whole().unwrap(), digest::of_disk(expected, |_| Ok(())).unwrap(), "{name}");
    assert!(verify(&mut image, &digests, SIZE, |_, _| Ok(())).unwrap().is_empty());
}

/// Runs it on a disk that loses power after so many operations, keeps what a crash keeps, and runs it to its end there.
fn crashed(disk: &Memory, after_ops: u64, seed: u64, make: &dyn Fn(&Memory) -> OfMemory) -> Memory {
    let mut first = make(disk);
    disk.sync_dir("").unwrap();
    let off = Faults { power_off_at: Some(disk.ops() + after_ops), ..Faults::default() };
    disk.set_faults(off);
    let _ = run(&mut first);
    let mut random = seed | 1;
    let after = disk.crash(&mut || {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        random.is_multiple_of(2)
    });
    run(&mut make(&after)).unwrap();
    after.crash(&mut || false)
}

fn fill(unlike_previous: Option<Vec<Range<u64>>>) -> Plan {
    Plan::Fill { is_new: false, unlike_previous }
}

fn some_writes() -> impl Strategy<Value = Vec<Write>> {
    prop::collection::vec((any::<u64>(), 1u64..600, 0u8..3), 0..8)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]
    #[test]
    fn every_copy_is_the_disk_at_its_point_whatever_has_ended_it(
        first in some_writes(), second in some_writes(), third in some_writes(),
        ops in 0u64..40, seed in any::<u64>(),
    ) {
        let (one, _) = written(&Plain(vec![0; SIZE as usize]), &first);
        let (two, to_two) = written(&one, &second);
        let (three, to_three) = written(&two, &third);
        // Three at once.
        let all = |disk: &Memory| copier(disk, vec![
            ("one", &one, fill(None)),
            ("two", &two, fill(Some(to_two.clone()))),
            ("three", &three, fill(Some(to_three.clone()))),
        ]);
        let disk = crashed(&Memory::new(), ops, seed, &all);
        check(&disk, "one", &one);
        check(&disk, "two", &two);
        check(&disk, "three", &three);
        // Forward and back, by the difference and by comparing.
        let forward = |disk: &Memory| copier(disk, vec![("one", &two, Plan::Change(to_two.clone()))]);
        let disk = crashed(&disk, ops / 2, seed, &forward);
        check(&disk, "one", &two);
        let back = |disk: &Memory| copier(disk, vec![("three", &two, Plan::Change(to_three.clone()))]);
        let disk = crashed(&disk, ops / 2, seed, &back);
        check(&disk, "three", &two);
        let compare = |disk: &Memory| copier(disk, vec![("two", &three, Plan::Compare)]);
        let disk = crashed(&disk, ops / 2, seed, &compare);
        check(&disk, "two", &three);
    }
}

#[test]
fn what_is_there_is_kept_and_what_is_damaged_is_made_anew() {
    let (of, _) = written(&Plain(vec![0; SIZE as usize]), &[(0, 100, 1), (2048, 2048, 2)]);
    let disk = Memory::new();
    run(&mut copier(&disk, vec![("a", &of, Plan::Fill { is_new: true, unlike_previous: None })]))
        .unwrap();
    check(&disk, "a", &of);
    let mut again = copier(&disk, vec![("a", &of, fill(None))]);
    run(&mut again).unwrap();
    assert_eq!(again.done(), Done { kept_blocks: 3, ..Done::default() });
    disk.flip("a", BLOCK_BYTES + 5);
    let (mut image, digests) = open(&disk, "a");
    assert_eq!(verify(&mut image, &digests, SIZE, |_, _| Ok(())).unwrap(), [1]);
    let mut again = copier(&disk, vec![("a", &of, fill(None))]);
    run(&mut again).unwrap();
    assert_eq!((again.done().kept_blocks, again.done().read_bytes), (2, BLOCK_BYTES));
    check(&disk, "a", &of);
    // A change reads and writes what changed.
    let (next, changed) = written(&of, &[(7, 1, 9)]);
    let mut change = copier(&disk, vec![("a", &next, Plan::Change(changed))]);
    run(&mut change).unwrap();
    assert_eq!(change.done(), Done { kept_blocks: 2, read_bytes: 512, written_bytes: 512 });
    check(&disk, "a", &next);
}

#[test]
fn a_sync_that_fails_is_told_and_it_goes_on_afterwards() {
    let (of, _) = written(&Plain(vec![0; SIZE as usize]), &[(0, 4096, 1)]);
    let disk = Memory::new();
    let mut first = copier(&disk, vec![("a", &of, fill(None))]);
    disk.set_faults(Faults { sync_fails: true, ..Faults::default() });
    assert!(run(&mut first).is_err(), "it must not be taken for whole");
    disk.set_faults(Faults::default());
    let after = disk.crash(&mut || false);
    run(&mut copier(&after, vec![("a", &of, fill(None))])).unwrap();
    check(&after.crash(&mut || true), "a", &of);
}
