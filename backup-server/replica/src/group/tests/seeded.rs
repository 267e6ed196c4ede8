//! A group that begins with disks that were here already.

use super::*;
use crate::group::{RecoverError, SeedError, SeededMember, seed, seeded_manifest};
use crate::history::{At, PastError, Point};
use std::io::IoSlice;
use tidelock_protocol::limits::{DISKS_MAX, WRITERS_MAX};

fn members() -> Vec<SeededMember> {
    let disks = attach_message(1, 0, LastRun::Unknown).writing().unwrap().disks.clone();
    vec![SeededMember { name: "vm".into(), disks }]
}

/// An image of one byte all over, as it is found by `seed`.
fn image(disk: &Memory, byte: u8) {
    disk.create_dir("images").unwrap();
    let file = disk.create("images/vm.root.img").unwrap();
    file.write_at(&[IoSlice::new(&[byte; SIZE as usize])], 0).unwrap();
    file.sync().unwrap();
    disk.sync_dir("images").and_then(|()| disk.sync_dir("")).unwrap();
}

fn make(disk: &Memory) -> Result<Point, SeedError> {
    seed(disk, &seeded_manifest("g", &members()).unwrap(), options().journal, 5, false)
}

fn seeded(disk: &Memory) -> (Group<Memory>, Point) {
    image(disk, 7);
    let as_found = make(disk).unwrap();
    (reopen(&disk.crash(&mut || false)), as_found)
}

/// A host whose disk differs in the second half; `whole`: it has compared all.
fn compare(group: &mut Group<Memory>, whole: bool) {
    join(group, LINK, 1, LastRun::Unknown);
    send(group, LINK, write(1, 4096, 8, 4096));
    if whole {
        send(group, LINK, copy_done(2));
    }
    group.flush();
}

fn disk_at(group: &mut Group<Memory>, point: &Point) -> Result<Vec<u8>, PastError> {
    let history = group.history().unwrap();
    let views = history.open(&history.locate(point)?)?;
    let mut content = vec![0; SIZE as usize];
    views[&KEY].read(0, &mut content).unwrap();
    Ok(content)
}

#[test]
fn what_is_here_is_compared_and_nothing_is_recovered_before() {
    let (mut group, _) = seeded(&Memory::new());
    let status = group.status(at_ms(0));
    assert_eq!((status.recoverable, &status.writers[0].host), (false, &None));
    let refused = group.recover(at_ms(1_000_000), true).unwrap_err().to_string();
    assert!(refused.contains("no host has compared its own with them"), "{refused}");
    assert!(refused.contains("--at bookmark:seeded"), "{refused}");

    // Whatever the host says of its last run.
    let attached = join(&mut group, LINK, 1, LastRun::Unknown);
    assert_eq!((copy_of(&attached), attached.progress.durable), (CopyState::Partial, Seq::ZERO));
    assert!(check_digest(&mut group, LINK, 0..4096, &[7; 4096]));
    assert!(!check_digest(&mut group, LINK, 4096..SIZE, &[8; 4096]));
    send(&mut group, LINK, write(1, 4096, 8, 4096));
    assert!(check_digest(&mut group, LINK, 4096..SIZE, &[8; 4096]));
    group.flush();
    let refused = group.recover(at_ms(1_000_000), true).unwrap_err().to_string();
    assert!(refused.contains("the comparison with its host's has not ended"), "{refused}");
    send(&mut group, LINK, copy_done(2));
    group.flush();
    let recovery = group.recover(at_ms(1_000_000), true).unwrap();
    assert_eq!(recovery.writers[0].recovered, Seq(2));
    assert_eq!(read_disk(&mut group), [[7; 4096], [8; 4096]].concat());
}

/// Both sites took writes: neither timeline is lost, whichever is chosen, and when.
#[test]
fn what_was_seeded_and_what_came_are_two_points_of_one_past() {
    let (old, new) = (vec![7; SIZE as usize], [[7; 4096], [8; 4096]].concat());
    for whole in [false, true] {
        let (mut group, as_found) = seeded(&Memory::new());
        let hold = group.hold(&as_found, "pin seeded").unwrap();
        compare(&mut group, whole);
        while fold(&mut group) {}
        assert_eq!(disk_at(&mut group, &as_found).unwrap(), old);
        let history = group.history().unwrap();
        match history.resolve(&At::Latest) {
            Ok(latest) => {
                assert!(whole && latest.hlc >= as_found.hlc);
                let mut changed = history.changed(&as_found, &latest, KEY).unwrap();
                assert_eq!((changed.next(), changed.next()), (Some(4096..SIZE), None));
                assert_eq!(read_disk(&mut group), new);
            }
            Err(refused) => assert!(!whole, "{refused}"),
        }
        drop((history, hold));

        // After a crash it is held again before anything is folded, and can be what the group goes on with.
        let left = group.storage.crash(&mut || true);
        let mut group = reopen(&left);
        let _hold = group.hold(&as_found, "pin seeded").unwrap();
        while fold(&mut group) {}
        let came = group.history().unwrap().newest();
        let recovery = group.recover_at(at_ms(1_000_000), true, &as_found).unwrap();
        let of = &recovery.writers[0];
        assert_eq!((of.recovered, of.left_out), (Seq::ZERO, if whole { 2 } else { 1 }));
        assert!(group.guest_write(at_ms(1_000_001), KEY, 0, GuestEffect::Write(vec![9].into())));
        group.flush();
        let mut went_on = old.clone();
        went_on[0] = 9;
        assert_eq!(read_disk(&mut group), went_on);
        let mut again = reopen(&left.crash(&mut || false));
        assert_eq!(read_disk(&mut again), went_on);

        // What came is none of its past any more.
        for group in [&mut group, &mut again] {
            let Ok(came) = &came else { continue };
            let gone = group.history().unwrap().locate(came).unwrap_err();
            assert!(matches!(gone, PastError::Unknown(_)), "{gone}");
        }
    }
}

#[test]
fn without_a_pin_what_was_seeded_goes_with_the_window() {
    let (mut group, as_found) = seeded(&Memory::new());
    compare(&mut group, true);
    while fold(&mut group) {}
    let error = disk_at(&mut group, &as_found).unwrap_err();
    assert!(matches!(error, PastError::BeforeWindow { .. }), "{error}");
    let refused = group.recover_at(at_ms(1_000_000), true, &as_found).unwrap_err();
    assert!(matches!(refused, RecoverError::Past(PastError::BeforeWindow { .. })), "{refused}");
    assert_eq!(read_disk(&mut group), [[7; 4096], [8; 4096]].concat());
}

#[test]
fn it_becomes_the_group_of_the_first_host_that_comes() {
    let disk = Memory::new();
    let (mut group, _) = seeded(&disk);
    let other = attach_message(1, 0, LastRun::Unknown);
    let other = but(other, |of| of.disks[0].size_bytes = SIZE / 2);
    group.attach(at_ms(0), LINK, "host-b", &other);
    assert_eq!(refusal(&group.take_outputs()), Some((LINK, RefusalKind::Mismatch)));
    join(&mut group, LINK, 1, LastRun::Unknown);
    group.attach(at_ms(0), OTHER, "host-b", &attach_message(2, 0, LastRun::Unknown));
    assert_eq!(refusal(&group.take_outputs()), Some((OTHER, RefusalKind::Forbidden)));
    assert_eq!(group.status(at_ms(0)).writers[0].host.as_deref(), Some("host-a"));
}

#[test]
fn after_a_power_cut_at_any_moment_it_is_there_or_it_can_be_made_again() {
    let (mut before, mut after) = (0, 0);
    for power_off_at in 0.. {
        let disk = Memory::new();
        image(&disk, 7);
        let from = disk.ops();
        disk.set_faults(Faults { power_off_at: Some(from + power_off_at), ..Faults::default() });
        let made = make(&disk);
        let mut keeps = false;
        // What was not synced is there, is not, or is there in part.
        for part in 0..3 {
            let left = disk.crash(&mut || {
                keeps = !keeps;
                part == 1 || (part == 2 && keeps)
            });
            if Manifest::read(&left).unwrap().is_none() {
                assert!(made.is_err());
                make(&left).unwrap();
                before += 1;
            } else {
                after += 1;
            }
            let mut group = reopen(&left);
            assert_eq!(copy_of(&join(&mut group, LINK, 1, LastRun::Unknown)), CopyState::Partial);
            assert_eq!(read_disk(&mut group), [7; SIZE as usize]);
        }
        if made.is_ok() {
            break;
        }
    }
    assert!(before > 0 && after > 0, "{before}, {after}");
}

#[test]
fn what_is_no_group_is_refused() {
    let shape = |edit: fn(&mut Vec<SeededMember>)| {
        let mut members = members();
        edit(&mut members);
        seeded_manifest("g", &members).unwrap_err()
    };
    assert!(matches!(shape(|m| m[0].name = "../x".into()), SeedError::Name(_)));
    assert!(matches!(seeded_manifest("a/b", &members()), Err(SeedError::Name(_))));
    assert!(matches!(shape(Vec::clear), SeedError::Shape(_)));
    assert!(matches!(shape(|m| m.push(m[0].clone())), SeedError::Shape(_)));
    assert!(matches!(shape(|m| m[0].disks.clear()), SeedError::Shape(_)));
    let odd = shape(|m| m[0].disks[0].size_bytes = 1000).to_string();
    assert!(odd.contains("multiple of 512"), "{odd}");
    assert!(make(&Memory::new()).is_err(), "there is no image");
}

#[test]
fn a_group_has_1_to_64_members_with_1_to_64_disks_each() {
    let disk = |nth: u32| DiskSpec { id: DiskId(0), name: format!("disk{nth}"), size_bytes: 4096 };
    let is_taken = |members: u32, disks: u32| {
        let member =
            |nth| SeededMember { name: format!("vm{nth}"), disks: (0..disks).map(disk).collect() };
        let members: Vec<_> = (0..members).map(member).collect();
        seeded_manifest("g", &members).is_ok()
    };
    let (members_max, disks_max) = (WRITERS_MAX.into(), DISKS_MAX.into());
    assert!(is_taken(1, 1) && is_taken(members_max, 1) && is_taken(1, disks_max));
    assert!(!is_taken(0, 1) && !is_taken(members_max + 1, 1));
    assert!(!is_taken(1, 0) && !is_taken(1, disks_max + 1));
}
