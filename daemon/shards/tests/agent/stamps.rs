//! Stamps that are believed, and times of doubt.

use crate::world::*;
use tidelock_protocol::hlc::Hlc;
use tidelock_shard::LogPoint;

/// The stamp beyond a doubt that ended now.
fn beyond(ms: u64) -> Hlc {
    let us = (EPSILON_NS + CLOCK_ERROR_MAX_NS) as i64 / 1000;
    stamp(ms as i64 * 1000 + us).next()
}

#[test]
fn what_was_written_before_the_clock_was_judged_has_a_stamp_beyond_that_time() {
    let mut host = Host::new();
    host.commit(-5_000_000);
    let old = host.commit(-4_000_000);
    let mut world = World::of(vec![host], config(1), LogPoint::default(), None);
    world.wait(950);
    assert_eq!((world.kind(), world.entries.len()), (Some("clock-settling"), 0));
    world.wait(100);
    assert_eq!(world.kind(), None);
    let through = beyond(1000);
    assert_eq!(world.doubts, [(Hlc(0), through.next())]);
    assert!(world.entries.iter().all(|entry| entry.stamp == through), "{:?}", world.stamped());
    assert_eq!(world.entries.last().unwrap().end.0, old);
    // Stamps are the server's from here on, once they are beyond the doubt.
    let early = world.hosts[0].commit(1_001_000);
    let own = world.hosts[0].commit(1_040_000);
    world.run();
    let of = |end: u64| world.entries.iter().find(|entry| entry.end.0 == end).unwrap().stamp;
    assert_eq!((of(early), of(own)), (through, stamp(1_040_000)));
    assert_eq!(world.doubts.len(), 1);
}

#[test]
fn while_the_clock_is_not_believed_the_log_stands_before_the_first_commit() {
    let mut world = World::settled();
    let last = world.hosts[0].commit(2_000_100);
    world.run();
    world.verdict = BAD;
    world.tick();
    // Log that is no end of a transaction goes on.
    world.hosts[0].log.other(500);
    world.run();
    let part = world.hosts[0].end();
    assert_eq!(world.entries.last().unwrap().end.0, part);
    let first = world.hosts[0].commit(2_500_000);
    world.hosts[0].log.other(500);
    let second = world.hosts[0].commit(-99_000_000);
    world.wait(3000);
    assert_eq!(world.entries.last().unwrap().end.0, part);
    let status = world.agent.status();
    assert_eq!((status.held, status.received), (2, world.hosts[0].end()));
    let stands = status.stands.unwrap();
    assert_eq!((stands.kind, stands.for_ms), ("clock-not-believed", 3000));
    assert!(stands.text.contains("2 ends of transactions wait") && last < part);

    world.verdict = GOOD;
    world.wait(900);
    assert_eq!(world.entries.last().unwrap().end.0, part);
    assert_eq!(world.kind(), Some("clock-settling"));
    world.wait(300);
    let through = beyond(world.ms - 150);
    assert_eq!(world.doubts[1], (stamp(2_000_100), through.next()));
    let of = |end: u64| world.entries.iter().find(|entry| entry.end.0 == end).unwrap().stamp;
    assert_eq!((of(first), of(second)), (through, through));
    world.check(0);
    // A break within the time to settle begins it anew.
    world.verdict = BAD;
    world.tick();
    world.hosts[0].commit(7_000_000);
    world.verdict = GOOD;
    world.wait(500);
    world.verdict = BAD;
    world.tick();
    world.verdict = GOOD;
    world.wait(950);
    assert_eq!(world.agent.status().held, 1);
    world.wait(150);
    assert_eq!((world.agent.status().held, world.doubts.len()), (0, 3));
}

#[test]
fn a_guard_that_falls_silent_is_not_believed() {
    let mut world = World::settled();
    world.ms += 2001;
    world.agent.tick(time(world.ms));
    assert_eq!(world.kind(), Some("clock-not-judged"));
    assert!(!world.agent.status().is_clock_trusted);
    world.wait(1500);
    assert_eq!(world.kind(), None);
}

#[test]
fn a_stamp_that_the_clock_cannot_have_given_is_not_given_out() {
    for odd_us in [60_000_000, -60_000_000] {
        let mut world = World::settled();
        let before = world.entries.len();
        world.hosts[0].commit(2_000_000 + odd_us);
        world.run();
        assert_eq!((world.entries.len(), world.kind()), (before, Some("stamp-not-of-this-clock")));
        world.wait(1500);
        assert_eq!((world.kind(), world.doubts.len()), (None, 2));
        let last = world.entries.last().unwrap();
        assert_eq!((last.end.0, last.stamp.next()), (world.hosts[0].end(), world.doubts[1].1));
    }
}

#[test]
fn a_log_whose_stamps_are_ahead_of_the_clock_waits_for_it() {
    let mut host = Host::new();
    host.slot = Some(START);
    let at = LogPoint { index: tidelock_shard::LogIndex(host.end()), stamp: stamp(10_000_000) };
    let mut world = World::of(vec![host], config(1), at, None);
    world.hosts[0].commit(500_000);
    world.wait(5000);
    assert_eq!((world.kind(), world.entries.len()), (Some("clock-behind-log"), 0));
    world.wait(6000);
    assert_eq!((world.kind(), world.entries.len()), (None, 1));
    assert!(world.entries[0].stamp > stamp(10_000_000));
}

#[test]
fn another_agent_of_the_shard_does_no_harm() {
    let mut world = World::settled();
    for n in 0..20 {
        world.hosts[0].commit(2_000_100 + n);
    }
    world.delays = true;
    world.run();
    // The other one has sent more, and cut the log elsewhere.
    let taken = world.hosts[0].end() - 20;
    let at = LogPoint { index: tidelock_shard::LogIndex(taken), stamp: stamp(2_000_118) };
    let standing = tidelock_shard::Standing { append: at, commit: at };
    world.backup = tidelock_shard::Bsa::leading(standing, tidelock_shard::Closing::Open);
    world.delays = false;
    world.run();
    let last = world.hosts[0].commit(2_000_200);
    world.run();
    let new: Vec<_> = world.entries.iter().filter(|entry| entry.end.0 > taken).collect();
    assert_eq!(new[0].data.as_ref().unwrap().data().len(), 20);
    assert_eq!(new.last().unwrap().end.0, last);
}
