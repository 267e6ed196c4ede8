//! Bookmarks and pins: answered when they are durable, and a pin on record is held.

use super::*;
use crate::group::{MarkError, NamedMark};
use tidelock_store::journal::{HostRequest, MARKS_MAX_BYTES, Mark, MarkKind, Point};

/// A group without a window, after seqs to this one.
fn without_window(disk: &Memory, to: u64) -> Group<Memory> {
    let mut group = whole(disk);
    for seq in 4..=to {
        send(&mut group, LINK, write(seq, 0, seq as u8, 100));
        group.flush();
    }
    group
}

fn open_without_window(disk: &Memory) -> Group<Memory> {
    let mut options = options();
    options.retention.window_ms = 0;
    Group::open(disk.crash(&mut || false), at_ms(0), options).unwrap().unwrap().0
}

fn point(group: &Group<Memory>, seq: u64) -> Point {
    group.history().unwrap().resolve(&At::Hlc(Hlc(seq))).unwrap()
}

fn mark(group: &Group<Memory>, kind: MarkKind, seq: u64) -> Mark {
    let (point, set_at_unix_ms) = (point(group, seq), group.now_ms());
    Mark { kind, point, set_at_unix_ms, expires_at_unix_ms: None, asked_by: None }
}

fn set(group: &mut Group<Memory>, name: &str, mark: &Mark) -> Result<Mark, MarkError> {
    let set = group.set_mark(name, mark, false)?;
    group.flush();
    Ok(set.open(&group.durable()).unwrap())
}

fn names(group: &Group<Memory>) -> Vec<String> {
    group.marks().into_iter().map(|of| of.name).collect()
}

/// The first byte of the disk at a point, if the images have not passed it.
fn shown(group: &Group<Memory>, point: &Point) -> Option<u8> {
    let history = group.history().unwrap();
    let views = history.open(&history.locate(point).ok()?).ok()?;
    let mut first = [0];
    views[&KEY].read(0, &mut first).unwrap();
    Some(first[0])
}

#[test]
fn a_mark_is_answered_and_listed_when_it_is_on_stable_storage() {
    let disk = Memory::new();
    let mut group = without_window(&disk, 9);
    let (deploy, other) =
        (mark(&group, MarkKind::Bookmark, 5), mark(&group, MarkKind::Bookmark, 6));
    let not_yet = group.set_mark("deploy", &deploy, false).unwrap();
    assert!(not_yet.open(&group.durable()).is_err() && names(&group).is_empty());
    assert!(names(&reopen(&disk.crash(&mut || false))).is_empty());
    group.flush();
    for group in [&reopen(&disk.crash(&mut || false)), &group] {
        let named = NamedMark { name: "deploy".into(), mark: deploy.clone(), lost: false };
        assert_eq!(group.marks(), [named]);
    }

    assert_eq!(set(&mut group, "deploy", &deploy).unwrap(), deploy, "said again");
    let exists = set(&mut group, "deploy", &other).unwrap_err().to_string();
    assert!(exists.contains("--move"), "{exists}");
    let pin = Mark { kind: MarkKind::Pin, ..deploy.clone() };
    let exists = group.set_mark("deploy", &pin, true).unwrap_err();
    assert!(matches!(exists, MarkError::Exists { kind: MarkKind::Bookmark, .. }), "{exists}");
    drop(group.set_mark("deploy", &other, true).unwrap());
    for bad in ["", "../up", "-x", "a b"] {
        assert!(matches!(set(&mut group, bad, &deploy), Err(MarkError::Name(_))), "{bad}");
    }
    let unknown = group.remove_mark("deploy", MarkKind::Pin).unwrap_err().to_string();
    assert!(unknown.contains("no pin deploy; there are: none"), "{unknown}");
    group.flush();
    assert_eq!(reopen(&disk.crash(&mut || false)).marks()[0].mark, other);

    let removed = group.remove_mark("deploy", MarkKind::Bookmark).unwrap();
    assert_eq!(names(&group), ["deploy"], "it is there until it is durable that it is not");
    group.flush();
    removed.open(&group.durable()).unwrap();
    assert!(names(&reopen(&disk.crash(&mut || false))).is_empty() && names(&group).is_empty());
}

#[test]
fn a_request_of_a_host_is_carried_out_once() {
    let mut group = without_window(&Memory::new(), 9);
    let asked = |group: &Group<Memory>, id, seq| Mark {
        asked_by: Some(HostRequest { host: "host-a".into(), id }),
        ..mark(group, MarkKind::Bookmark, seq)
    };
    let (first, again, later) = (asked(&group, 7, 5), asked(&group, 7, 6), asked(&group, 8, 6));
    assert_eq!(set(&mut group, "deploy", &first).unwrap(), first);
    assert_eq!(set(&mut group, "deploy", &again).unwrap(), first);
    assert!(matches!(set(&mut group, "deploy", &later), Err(MarkError::Exists { .. })));
}

#[test]
fn a_pin_on_record_is_held_and_lets_go_when_it_is_off_record() {
    let disk = Memory::new();
    let mut group = without_window(&disk, 9);
    let (pin, bookmark) = (mark(&group, MarkKind::Pin, 5), mark(&group, MarkKind::Bookmark, 5));
    set(&mut group, "gold", &pin).unwrap();
    set(&mut group, "name", &bookmark).unwrap();

    let mut group = open_without_window(&disk);
    while fold(&mut group) {}
    assert_eq!(shown(&group, &pin.point), Some(5));
    assert_eq!(names(&group), ["gold"], "the bookmark goes with the window");
    let _ = group.remove_mark("gold", MarkKind::Pin).unwrap();
    while fold(&mut group) {}
    assert_eq!(shown(&group, &pin.point), Some(5), "its removal is not durable");
    group.flush();
    while fold(&mut group) {}
    assert_eq!(shown(&group, &pin.point), None);
    assert!(names(&group).is_empty());
    assert_eq!(group.tend_marks(at_ms(5000)), ["name"]);
    let lost = group.set_mark("gold", &pin, false).unwrap_err();
    assert!(matches!(lost, MarkError::Past(_)), "{lost}");
}

#[test]
fn a_pin_that_is_moved_holds_both_points_until_the_move_is_durable() {
    let disk = Memory::new();
    let mut group = without_window(&disk, 9);
    let (old, new) = (mark(&group, MarkKind::Pin, 5), mark(&group, MarkKind::Pin, 7));
    set(&mut group, "gold", &old).unwrap();
    let mut group = open_without_window(&disk);
    drop(group.set_mark("gold", &new, true).unwrap());
    while fold(&mut group) {}
    assert_eq!((shown(&group, &old.point), shown(&group, &new.point)), (Some(5), Some(7)));
    group.flush();
    while fold(&mut group) {}
    assert_eq!((shown(&group, &old.point), shown(&group, &new.point)), (None, Some(7)));
}

#[test]
fn a_mark_whose_time_is_over_is_not_shown_and_its_name_is_free() {
    let mut group = without_window(&Memory::new(), 9);
    let of = mark(&group, MarkKind::Pin, 5);
    let until = |ms| Mark { expires_at_unix_ms: Some(of.set_at_unix_ms + ms), ..of.clone() };
    assert!(matches!(set(&mut group, "x", &until(0)), Err(MarkError::ExpiresAtOnce)));
    set(&mut group, "x", &until(1000)).unwrap();
    group.tick(at_ms(999));
    assert_eq!((names(&group), group.tend_marks(at_ms(999))), (vec!["x".to_owned()], vec![]));
    group.tick(at_ms(1999));
    assert!(names(&group).is_empty());
    let free = Mark { set_at_unix_ms: group.now_ms(), ..mark(&group, MarkKind::Bookmark, 6) };
    set(&mut group, "x", &free).unwrap();
    assert_eq!(names(&group), ["x"]);
}

#[test]
fn marks_have_a_bound_together_and_one_can_be_moved_at_it() {
    let disk = Memory::new();
    drop(without_window(&disk, 9));
    let mut options = options();
    options.journal.segment_bytes = 1 << 20;
    let mut group = Group::open(disk.killed(), at_ms(0), options).unwrap().unwrap().0;
    let (of, moved) = (mark(&group, MarkKind::Bookmark, 5), mark(&group, MarkKind::Bookmark, 6));
    let set_some = |group: &mut Group<Memory>| {
        for n in 0..MARKS_MAX_BYTES {
            if let Err(error) = group.set_mark(&format!("m{n:063}"), &of, false) {
                assert!(matches!(error, MarkError::TooMany), "{error}");
                return n;
            }
            if n % 100 == 0 {
                group.flush();
            }
        }
        panic!("there is no bound");
    };
    let n = set_some(&mut group);
    assert!(n > 1000, "{n}");
    drop(group.set_mark(&format!("m{:063}", 0), &moved, true).unwrap());
    group.flush();
    assert_eq!(reopen(&group.storage().crash(&mut || false)).marks().len(), n);
}

#[test]
fn without_room_no_mark_is_set_or_waits_in_memory() {
    let disk = Memory::new();
    let mut group = without_window(&disk, 9);
    let of = mark(&group, MarkKind::Bookmark, 5);
    disk.set_faults(Faults { capacity_bytes: Some(0), ..Faults::default() });
    drop(group.set_mark("first", &of, false).unwrap());
    group.flush();
    for n in 0..100 {
        let refused = group.set_mark(&format!("m{n}"), &of, false).unwrap_err().to_string();
        assert!(refused.contains("make room"), "{refused}");
    }
    assert!(group.journal().staged_bytes() < 1000 && names(&group).is_empty());
}
