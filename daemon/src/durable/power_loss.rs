//! The daemon's small files after a power loss between any two operations, with each order in which what was not synced
//! may have become durable.

use super::recorded::{self, Disk, Operation};
use crate::link::port::EpochKeeper;
use crate::state::MemberState;
use std::fs;
use std::path::Path;
use tempfile::TempDir;
use tidelock_protocol::hlc::Hlc;
use tidelock_protocol::ids::{Epoch, GroupId, Incarnation, Seq};
use tidelock_protocol::message::Basis;

/// More ways than any place of these tests has.
const WAYS_MAX: usize = 100_000;

/// Without a disk below it where that can be: it is synced very often.
fn in_memory() -> TempDir {
    let memory = Path::new("/dev/shm");
    if memory.is_dir() { tempfile::tempdir_in(memory) } else { tempfile::tempdir() }.unwrap()
}

/// Calls `check` with each state that a power loss may leave after the first so many operations. Returns how many.
fn each_loss(root: &Path, operations: &[Operation], mut check: impl FnMut(&Path)) -> usize {
    let disk = Disk::after(operations);
    let mut choices: Vec<(usize, usize)> = Vec::new();
    for ways in 1..=WAYS_MAX {
        let left = in_memory();
        let mut nth = 0;
        disk.lose_power(root, left.path(), &mut |below| {
            if nth == choices.len() {
                choices.push((0, below));
            }
            nth += 1;
            choices[nth - 1].0
        });
        check(left.path());
        while choices.last().is_some_and(|(choice, below)| choice + 1 == *below) {
            choices.pop();
        }
        match choices.last_mut() {
            Some((choice, _)) => *choice += 1,
            None => return ways,
        }
    }
    panic!("more than {WAYS_MAX} ways after {} operations", operations.len());
}

/// What a member's daemon was told to be on record.
#[derive(Clone, Debug, Default)]
struct Promised {
    incarnation: Incarnation,
    epoch: Epoch,
    ceiling_ms: u64,
    /// The last call that has returned was that of a clean end.
    clean: bool,
    /// A call may have changed it: a clean end that has not returned, or a start after one.
    clean_is_open: bool,
}

/// Promises, with the number of operations after which each holds.
type Promises = Vec<(usize, Promised)>;

fn live(path: &Path) -> Promises {
    let mut promises: Promises = vec![(0, Promised::default())];
    let mut promise = |change: &dyn Fn(&mut Promised)| {
        let mut promised = promises.last().unwrap().1.clone();
        change(&mut promised);
        promises.push((recorded::so_far(), promised));
    };
    for run in 1..4u64 {
        let (mut state, opened) = MemberState::open(path.to_owned(), run * 50_000_000).unwrap();
        promise(&|of| {
            of.incarnation = opened.run.number;
            of.ceiling_ms = opened.hlc_ceiling_ms;
        });
        promise(&|of| of.clean_is_open = true);
        let id = GroupId([7; 16]);
        EpochKeeper::begin(&mut state, opened.run, Epoch(run), id, &Basis::Clean).unwrap();
        promise(&|of| {
            of.epoch = Epoch(run);
            (of.clean, of.clean_is_open) = (false, false);
        });
        let wall_ms = run * 50_000 + 9_000;
        let ceiling_ms = state.keep_ahead_of(Hlc::new(wall_ms, 0), wall_ms).unwrap();
        promise(&|of| of.ceiling_ms = ceiling_ms);
        if run != 2 {
            promise(&|of| of.clean_is_open = true);
            state.ended_cleanly(Seq(run), Hlc::new(wall_ms, 7), Vec::new()).unwrap();
            promise(&|of| (of.clean, of.clean_is_open) = (true, false));
        }
    }
    promises
}

#[test]
fn a_members_state_is_what_was_promised_wherever_the_power_is_lost() {
    let root = tempfile::tempdir().unwrap();
    let file = "state/shop/db.json";
    recorded::begin();
    let promises = live(&root.path().join(file));
    let operations = recorded::end();
    let mut ways = 0;
    for end in 0..=operations.len() {
        // Of those at the same place the last: what it has opened may be under way.
        let (_, promised) = promises.iter().rfind(|(from, _)| *from <= end).unwrap();
        ways += each_loss(root.path(), &operations[..end], |left| {
            let path = left.join(file);
            let (_, opened) = MemberState::open(path, 0).unwrap_or_else(|error| {
                panic!("after {end} operations: {error}");
            });
            let place = || format!("after {end} operations: {promised:?}, {opened:?}");
            assert!(opened.run.number > promised.incarnation, "{}", place());
            assert!(opened.epoch >= promised.epoch, "{}", place());
            let is_clean = opened.clean.is_some();
            assert!(is_clean == promised.clean || promised.clean_is_open, "{}", place());
            let floor = Hlc::new(promised.ceiling_ms, 0);
            assert!(
                is_clean || promised.ceiling_ms == 0 || opened.hlc_floor > floor,
                "{}",
                place()
            );
        });
    }
    assert!(operations.len() > 50 && ways > operations.len(), "{ways}");
}

#[test]
fn a_file_is_what_it_was_or_what_it_becomes() {
    let root = tempfile::tempdir().unwrap();
    let path = root.path().join("a/b/file.json");
    recorded::begin();
    let mut contents: Vec<(usize, Option<&str>)> = vec![(0, None)];
    for content in ["one", "another one"] {
        super::replace(&path, content.as_bytes()).unwrap();
        contents.push((recorded::so_far(), Some(content)));
    }
    super::remove(&path).unwrap();
    contents.push((recorded::so_far(), None));
    super::remove(&path).unwrap();
    let operations = recorded::end();
    for end in 0..=operations.len() {
        let done = contents.iter().rposition(|(at, _)| *at <= end).unwrap();
        let next = contents.get(done + 1).map(|(_, content)| *content);
        each_loss(root.path(), &operations[..end], |left| {
            let found = fs::read_to_string(left.join("a/b/file.json")).ok();
            let found = found.as_deref();
            assert!(
                found == contents[done].1 || next.is_some_and(|next| found == next),
                "after {end} operations: {found:?}"
            );
        });
    }
}

/// The model loses what no sync holds: without that no test here says anything.
#[test]
fn what_is_not_synced_may_be_lost_or_torn() {
    let root = Path::new("/root-of-the-test");
    let (directory, file) = (root.join("d"), root.join("d/f"));
    let made = [
        Operation::MakeDirectory(directory.clone()),
        Operation::SyncDirectory(root.to_owned()),
        Operation::Write(file.clone(), b"whole".to_vec()),
    ];
    let found = |operations: &[Operation]| {
        let mut found = std::collections::BTreeSet::new();
        each_loss(root, operations, |left| {
            found.insert(fs::read_to_string(left.join("d/f")).ok());
        });
        found.into_iter().collect::<Vec<_>>()
    };
    let of = |content: &str| Some(content.to_owned());
    assert_eq!(found(&made), [None, of(""), of("wh"), of("whole")]);
    let synced = [&made[..], &[Operation::SyncFile(file.clone())]].concat();
    assert_eq!(found(&synced), [None, of("whole")], "its name is not durable");
    let named = [&synced[..], &[Operation::SyncDirectory(directory)]].concat();
    assert_eq!(found(&named), [of("whole")]);
    let part = [&named[..], &[Operation::WriteAt(file, 1, b"HO".to_vec())]].concat();
    assert_eq!(found(&part), [of("wHOle"), of("wHole"), of("whole")]);
}
