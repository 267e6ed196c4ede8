//! A group that begins with disks that were here already.

use super::*;
use crate::group::{SeedError, SeededMember, seed, seeded_manifest};
use crate::storage::StorageFile;
use std::io::IoSlice;

fn members() -> Vec<SeededMember> {
    let disks = attach_message(1, 0, LastRun::Unknown).disks;
    vec![SeededMember { name: "vm".into(), disks }]
}

/// An image of one byte all over, as it is found by `seed`.
fn image(disk: &Memory, byte: u8) {
    disk.create_dir("images").unwrap();
    let file = disk.create("images/vm.root.img").unwrap();
    file.write_at(&[IoSlice::new(&[byte; SIZE as usize])], 0).unwrap();
    file.sync().unwrap();
    disk.sync_dir("images").unwrap();
}

fn seeded(disk: &Memory) -> Group<Memory> {
    image(disk, 7);
    seed(disk, &seeded_manifest("g", &members()).unwrap(), options().journal).unwrap();
    reopen(&disk.crash(&mut || false))
}

#[test]
fn what_is_here_is_compared_and_nothing_is_recovered_before() {
    let mut group = seeded(&Memory::new());
    let status = group.status(at_ms(0));
    assert_eq!((status.recoverable, &status.writers[0].host), (false, &None));
    let refused = group.recover(at_ms(1_000_000), true).unwrap_err().to_string();
    assert!(refused.contains("its disks were seeded, and no host has compared them"), "{refused}");

    // Whatever the host says of its last run.
    let attached = join(&mut group, LINK, 1, LastRun::Unknown);
    assert_eq!((attached.copy, attached.durable), (CopyState::Partial, Seq::ZERO));
    assert!(check_digest(&mut group, LINK, 0..4096, &[7; 4096]));
    assert!(!check_digest(&mut group, LINK, 4096..SIZE, &[8; 4096]));
    send(&mut group, LINK, write(1, 4096, 8, 4096));
    assert!(check_digest(&mut group, LINK, 4096..SIZE, &[8; 4096]));
    group.flush();
    assert!(group.recover(at_ms(1_000_000), true).is_err(), "the comparison has not ended");
    send(&mut group, LINK, copy_done(2));
    group.flush();
    let recovery = group.recover(at_ms(1_000_000), true).unwrap();
    assert_eq!(recovery.writers[0].recovered, Seq(2));
    assert_eq!(read_disk(&mut group), [[7; 4096], [8; 4096]].concat());
}

#[test]
fn it_becomes_the_group_of_the_first_host_that_comes() {
    let disk = Memory::new();
    let mut group = seeded(&disk);
    let other_size = DiskSpec { size_bytes: SIZE / 2, ..members()[0].disks[0].clone() };
    let other = Attach { disks: vec![other_size], ..attach_message(1, 0, LastRun::Unknown) };
    group.attach(at_ms(0), LINK, "host-b", &other);
    assert_eq!(refusal(&group.take_outputs()), Some((LINK, RefusalKind::Mismatch)));
    join(&mut group, LINK, 1, LastRun::Unknown);
    group.attach(at_ms(0), OTHER, "host-b", &attach_message(2, 0, LastRun::Unknown));
    assert_eq!(refusal(&group.take_outputs()), Some((OTHER, RefusalKind::Forbidden)));
    assert_eq!(group.status(at_ms(0)).writers[0].host.as_deref(), Some("host-a"));
}

#[test]
fn after_a_power_cut_at_any_moment_it_is_there_or_it_can_be_made_again() {
    let manifest = seeded_manifest("g", &members()).unwrap();
    let (mut before, mut after) = (0, 0);
    for power_off_at in 0.. {
        let disk = Memory::new();
        image(&disk, 7);
        let from = disk.ops();
        disk.set_faults(Faults { power_off_at: Some(from + power_off_at), ..Faults::default() });
        let made = seed(&disk, &manifest, options().journal);
        let mut keeps = false;
        // What was not synced is there, is not, or is there in part.
        for part in 0..3 {
            let left = disk.crash(&mut || {
                keeps = !keeps;
                part == 1 || (part == 2 && keeps)
            });
            if Manifest::read(&left).unwrap().is_none() {
                assert!(made.is_err());
                seed(&left, &manifest, options().journal).unwrap();
                before += 1;
            } else {
                after += 1;
            }
            let mut group = reopen(&left);
            assert_eq!(join(&mut group, LINK, 1, LastRun::Unknown).copy, CopyState::Partial);
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
    let disk = Memory::new();
    let manifest = seeded_manifest("g", &members()).unwrap();
    assert!(seed(&disk, &manifest, options().journal).is_err(), "there is no image");
}
