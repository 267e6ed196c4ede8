//! Failovers, slots, and peers that lie.

use crate::messages;
use crate::world::*;
use tidelock_protocol::hlc::Hlc;
use tidelock_shard::link::Origin;
use tidelock_shard::{LogIndex, LogPoint};
use tidelock_shard_agent::{Config, Conn};

/// A primary and a standby with its log, of which the agent has some.
fn pair() -> World {
    let mut standby = Host::new();
    standby.is_in_recovery = true;
    let mut world = World::of(vec![Host::new(), standby], config(2), LogPoint::default(), None);
    world.wait(2000);
    for n in 0..500 {
        world.hosts[0].commit(2_000_100 + n);
    }
    world.run();
    world
}

#[test]
fn a_promoted_standby_goes_on_without_a_gap_and_without_a_human() {
    let mut world = pair();
    let log = world.hosts[0].log.clone();
    world.hosts[1].log = log;
    world.hosts[0].is_up = false;
    world.cut();
    world.wait(2000);
    assert_eq!(world.kind(), Some("no-server"));
    assert!(world.failures.contains(&(0, "unreachable")), "{:?}", world.failures);
    assert!(world.failures.contains(&(1, "in-recovery")));
    assert_eq!(world.origins.len(), 1);
    let branch = world.hosts[1].end();
    world.hosts[1].promote(2);
    world.hosts[1].commit(3_900_000);
    world.wait(3000);
    assert_eq!(world.kind(), None);
    assert_eq!(world.origins.last().unwrap().timeline, 2);
    assert!(world.origins.last().unwrap().history.contains(&tidelock_wal::Lsn(branch).to_string()));
    // Another host has another clock: it is judged anew.
    assert_eq!(world.doubts.len(), 2);
    let last = world.hosts[1].commit(7_000_100);
    world.run();
    world.check(1);
    let entry = world.entries.last().unwrap();
    assert_eq!((entry.end.0, entry.stamp), (last, stamp(7_000_100)));
    assert_eq!(world.count("CREATE"), 2, "a promoted server has no slot");

    // The old primary comes back, with log that nobody has, and is refused. The backup never hears of it.
    world.hosts[0].is_up = true;
    world.hosts[0].commit(7_500_000);
    let origins = world.origins.len();
    world.hosts[1].is_up = false;
    world.cut();
    world.wait(2000);
    assert!(world.failures.contains(&(0, "old-timeline")), "{:?}", world.failures);
    assert_eq!((world.origins.len(), world.kind()), (origins, Some("no-server")));
    world.hosts[1].is_up = true;
    world.wait(3000);
    assert_eq!(world.kind(), None);
    world.check(1);
}

#[test]
fn a_server_that_has_parted_from_the_log_is_refused() {
    let mut world = pair();
    let log = world.hosts[0].log.clone();
    world.hosts[1].log = log;
    // The heir lacks the last commit that the backup has.
    world.hosts[0].commit(2_100_000);
    world.run();
    world.hosts[0].is_up = false;
    world.hosts[1].promote(2);
    world.hosts[1].commit(4_500_000);
    world.cut();
    world.wait(2000);
    assert!(world.failures.contains(&(1, "diverged")), "{:?}", world.failures);
    assert_eq!((world.origins.len(), world.kind()), (1, Some("no-server")));
    assert!(world.stands.last().unwrap().as_ref().unwrap().contains("copy the shard anew"));
    world.check(0);
}

#[test]
fn a_new_agent_refuses_by_the_origin_that_the_backup_has() {
    let origin = |system_id: u64, timeline: u32, history: &str| Origin {
        system_id,
        timeline,
        history: history.into(),
        segment_bytes: 1 << 20,
        version: 15,
    };
    let mut host = Host::new();
    let system = host.system;
    host.slot = Some(START);
    let end = host.end();
    host.commit(100);
    let at = LogPoint { index: LogIndex(end), stamp: Hlc(5) };
    let try_it = |host: &Host, at: LogPoint, origin: Origin| {
        let mut world = World::of(vec![host.clone()], config(1), at, Some(origin));
        world.wait(2000);
        let (failures, origins) = (world.failures.first().copied(), world.origins.len());
        (failures, origins)
    };
    assert_eq!(try_it(&host, at, origin(system, 1, "")), (None, 1));
    let (failure, origins) = try_it(&host, at, origin(system + 1, 1, ""));
    assert_eq!((failure, origins), (Some((0, "wrong-system")), 0));
    let later = origin(system, 2, &format!("1\t{}\t\n", tidelock_wal::Lsn(end)));
    assert_eq!(try_it(&host, at, later), (Some((0, "old-timeline")), 0));
    let beyond = LogPoint { index: LogIndex(host.end() + 8), ..at };
    assert_eq!(try_it(&host, beyond, origin(system, 1, "")).0, Some((0, "behind-backup")));
    // On the backup's timeline the log goes further than the server's branch.
    let mut heir = host.clone();
    heir.promote(2);
    heir.commit(200);
    let beyond = LogPoint { index: LogIndex(host.end() + 8), ..at };
    assert_eq!(try_it(&heir, beyond, origin(system, 1, "")).0, Some((0, "diverged")));
}

#[test]
fn a_backup_that_has_a_later_log_is_not_told_of_an_older_one() {
    let mut world = World::settled();
    let history = format!("1\t{}\t\n", tidelock_wal::Lsn(world.hosts[0].end()));
    let later = Origin { timeline: 2, history, ..world.origins[0].clone() };
    world.agent.backup_lost(time(world.ms));
    world.agent.backup_connected(Some(later), time(world.ms));
    world.run();
    assert_eq!((world.origins.len(), world.failures.first()), (1, Some(&(0, "old-timeline"))));
    let before = world.entries.len();
    world.hosts[0].commit(2_000_100);
    world.wait(5000);
    assert_eq!((world.origins.len(), world.entries.len()), (1, before));
}

#[test]
fn a_backup_that_is_lost_while_the_stream_starts_costs_nothing() {
    let mut host = Host::new();
    host.is_slow = true;
    let mut world = World::of(vec![host], config(1), LogPoint::default(), None);
    world.agent.backup_lost(time(world.ms));
    world.release();
    world.wait(2000);
    let end = world.hosts[0].commit(2_000_100);
    world.run();
    assert_eq!((world.kind(), world.agent.status().received), (Some("no-backup"), end));
    world.agent.backup_connected(None, time(world.ms));
    world.run();
    assert_eq!((world.kind(), world.failures.len()), (None, 0));
    world.check(0);
    assert_eq!(world.entries.last().unwrap().end.0, end);
}

#[test]
fn orders_for_a_gap_count_for_nothing_while_there_is_none() {
    let mut world = World::settled();
    world.agent.copied_anew(time(world.ms));
    world.hosts[0].log.other(2_000_000);
    world.delays = true;
    world.run();
    world.hosts[0].oldest = 2 * START;
    world.hosts[0].slot = None;
    world.wait(5000);
    assert_eq!(world.failures.last(), Some(&(0, "slot-missing")));
    assert!(world.entries[1..].iter().all(|entry| entry.data.is_some()));
}

#[test]
fn a_slot_in_danger_is_warned_of() {
    let mut world = World::settled();
    assert_eq!(world.agent.status().warnings, Vec::<String>::new());
    world.hosts[0].wal_status = "unreserved";
    world.wait(1000);
    let warnings = world.agent.status().warnings;
    assert!(warnings.len() == 1 && warnings[0].contains("raise the limit"), "{warnings:?}");
}

#[test]
fn a_slot_that_was_dropped_is_made_again_by_order_only() {
    let mut world = World::settled();
    world.hosts[0].slot = None;
    world.wait(1000);
    assert_eq!(
        (world.failures.clone(), world.kind()),
        (vec![(0, "slot-missing")], Some("no-server"))
    );
    world.hosts[0].commit(3_000_000);
    world.wait(10_000);
    assert_eq!(world.count("CREATE"), 1);
    world.agent.make_slot(time(world.ms));
    world.wait(2000);
    assert_eq!((world.count("CREATE"), world.kind()), (2, None));
    world.check(0);
    assert_eq!(world.entries.last().unwrap().end.0, world.hosts[0].end());
}

#[test]
fn a_gap_is_gone_over_only_if_a_copy_covers_it_and_no_cut_within_it_is_served() {
    let mut world = World::settled();
    world.hosts[0].commit(2_000_100);
    world.run();
    let end = world.hosts[0].end();
    world.hosts[0].wal_status = "lost";
    world.wait(1000);
    assert_eq!(world.failures, [(0, "slot-lost")]);
    let advice = world.stands.last().unwrap().clone().unwrap();
    assert!(advice.contains("pg_drop_replication_slot('tidelock')") && advice.contains("copy"));
    // Meanwhile the server has removed what the backup lacks.
    (0..1500).for_each(|_| world.hosts[0].log.other(1000));
    world.hosts[0].commit(3_000_000);
    world.hosts[0].oldest = 2 * START;
    world.hosts[0].slot = None;
    world.agent.make_slot(time(world.ms));
    world.wait(3000);
    assert!(world.failures.contains(&(0, "wal-removed")), "{:?}", world.failures);
    let entries = world.entries.len();
    world.wait(10_000);
    assert_eq!(world.entries.len(), entries);
    assert!(world.hosts[0].slot >= Some(2 * START), "a slot is never moved back");

    world.flushed.clear();
    world.agent.copied_anew(time(world.ms));
    world.wait(5000);
    assert_eq!(world.kind(), None);
    assert!(world.flushed.iter().all(|at| *at >= 2 * START), "{:x?}", world.flushed);
    let jump = &world.entries[entries];
    assert_eq!((jump.end.0, jump.data.is_none(), jump.nop), (2 * START, true, true));
    let (after, through) = world.doubts[1];
    assert_eq!((after, through), (stamp(2_000_100), jump.stamp.next()));
    assert_eq!(world.entries[entries - 1].end.0, end);
    assert_eq!(world.entries.last().unwrap().end.0, world.hosts[0].end());
}

#[test]
fn an_agent_that_mends_makes_its_slot_again_and_goes_over_a_gap_without_an_order() {
    let mut world = World::settled_with(Config { mends: true, ..config(1) });
    world.hosts[0].slot = None;
    world.wait(5000);
    assert_eq!((world.failures.clone(), world.kind()), (vec![(0, "slot-missing")], None));
    world.hosts[0].commit(3_000_000);
    world.wait(1000);
    world.check(0);
    assert!(world.entries[1..].iter().all(|entry| entry.data.is_some()), "nothing was missing");

    // The slot is lost, and the server has removed what the backup lacks.
    let (entries, doubts) = (world.entries.len(), world.doubts.len());
    world.hosts[0].wal_status = "lost";
    (0..1500).for_each(|_| world.hosts[0].log.other(1000));
    world.hosts[0].oldest = 2 * START;
    world.hosts[0].commit(4_000_000);
    world.wait(10_000);
    assert_eq!((world.count("SELECT pg_drop_replication_slot"), world.kind()), (1, None));
    let jump = &world.entries[entries];
    assert_eq!((jump.end.0, jump.data.is_none(), jump.nop), (2 * START, true, true));
    assert!(world.doubts.len() > doubts, "no cut within the gap is served");
    assert_eq!(world.entries.last().unwrap().end.0, world.hosts[0].end());
    // One that is well is never dropped.
    assert!(world.hosts[0].slot.is_some());
}

#[test]
fn a_damaged_log_is_refused_by_name_and_what_was_verified_stays() {
    let mut world = World::settled();
    let good = world.hosts[0].commit(2_000_100);
    let whole = world.hosts[0].log.bytes.len();
    world.hosts[0].commit(2_000_200);
    let last = world.hosts[0].log.bytes.len() - 9;
    world.hosts[0].log.bytes[last] ^= 1;
    world.run();
    assert_eq!(world.failures, [(0, "checksum")]);
    assert_eq!(world.entries.last().unwrap().end.0, good);
    assert!(world.stands.last().unwrap().as_ref().unwrap().contains("pg_waldump"));
    world.wait(5000);
    assert_eq!(world.entries.last().unwrap().end.0, good);
    // The server recovers from its standby's log, say.
    world.hosts[0].log.bytes[last] ^= 1;
    world.wait(5000);
    assert_eq!(world.kind(), None);
    world.check(0);
    assert!(world.hosts[0].log.bytes.len() > whole);
}

#[test]
fn whatever_a_server_sends_ends_its_connection_at_most() {
    let mut number = 88_172_645_463_325_252_u64;
    let mut random = move |below: usize| {
        number ^= number << 13;
        number ^= number >> 7;
        number ^= number << 17;
        (number % below as u64) as usize
    };
    for round in 0..300 {
        let mut world = World::settled();
        let bytes: Vec<u8> = match round % 3 {
            0 => (0..random(200)).map(|_| random(256) as u8).collect(),
            1 => {
                let tag = b"RSKZTDCEWdcNAn1234"[random(18)];
                let body: Vec<u8> = (0..random(60)).map(|_| random(256) as u8).collect();
                messages::message(tag, &body)
            }
            _ => messages::wal(
                world.hosts[0].end() - random(2) as u64,
                &vec![random(256) as u8; random(9000)],
            ),
        };
        let conn = if random(2) == 0 { Conn::Look } else { Conn::Stream };
        world.arrive(conn, &bytes);
        world.run();
        let before = world.entries.len();
        // The server has come to its senses.
        world.cut();
        world.wait(5000);
        let end = world.hosts[0].commit(9_000_000);
        world.wait(5000);
        assert!(world.entries.len() > before && world.entries.last().unwrap().end.0 == end);
        world.check(0);
    }
}

#[test]
fn a_backup_that_lies_is_found_out() {
    let mut world = World::settled();
    world.delays = true;
    world.hosts[0].commit(2_000_100);
    world.run();
    let attempt = world.under_way.pop_front().unwrap().attempt;
    let at = |index: u64| LogPoint { index: LogIndex(index), stamp: Hlc(9) };
    let standing = tidelock_shard::Standing { append: at(5), commit: at(6) };
    let verdict = tidelock_shard::Verdict::Taken(standing);
    let reply = tidelock_shard::Reply { attempt, verdict };
    assert!(world.agent.reply(&reply, time(world.ms)).is_err());
    // More than there is: nothing is reported as flushed that was not received.
    let end = world.hosts[0].end();
    let far = tidelock_shard::Standing { append: at(u64::MAX), commit: at(u64::MAX) };
    let verdict = tidelock_shard::Verdict::Taken(far);
    world.agent.reply(&tidelock_shard::Reply { attempt, verdict }, time(world.ms)).unwrap();
    world.run();
    assert_eq!((world.kind(), world.flushed.iter().max()), (Some("backup-ahead"), Some(&end)));
}
