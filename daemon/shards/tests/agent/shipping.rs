//! The log arrives at the backup: in entries, without a gap, within bounds.

use crate::world::*;
use tidelock_protocol::hlc::Hlc;
use tidelock_shard::{LogIndex, LogPoint};
use tidelock_shard_agent::{Action, Conn};
use tidelock_wal::Ending;

#[test]
fn each_end_of_a_transaction_is_an_entry_with_its_stamp_and_nothing_waits_for_a_timer() {
    let mut world = World::settled();
    let log = &mut world.hosts[0].log;
    log.other(50);
    let host = &mut world.hosts[0];
    let first = host.commit(2_000_100);
    let second = host.commit(2_000_300);
    // Placed later, and stamped earlier.
    host.commit(2_000_200);
    let abort = host.ends(Ending::Abort, 2_000_400);
    host.log.other(300);
    let nop = host.nop(2_000_500);
    host.log.other(30);
    let before = world.entries.len();
    world.run();
    world.check(0);
    let stamped = world.stamped();
    let expected = [
        (first, stamp(2_000_100), false),
        (second, stamp(2_000_300), false),
        (abort, stamp(2_000_400), false),
        (nop, stamp(2_000_500), true),
    ];
    assert_eq!(stamped[stamped.len() - 4..], expected);
    // Five transactions, and what is behind them.
    assert_eq!(world.entries.len() - before, 6);
    assert_eq!(world.entries.last().unwrap().end.0, world.hosts[0].end());
    assert_eq!(world.flushed.last(), Some(&world.hosts[0].end()), "b-commit is reported");
    assert_eq!((world.kind(), world.agent.status().lag_bytes), (None, 0));
}

#[test]
fn long_records_and_bulk_loads_are_cut_and_only_their_commit_has_a_stamp() {
    let mut settings = config(1);
    settings.entry_max_bytes = 10_000;
    let mut world = World::settled_with(settings);
    let before = world.entries.len();
    world.hosts[0].log.other(2_500_000);
    // A long record leaves before it is whole.
    let rest = world.hosts[0].log.bytes.split_off(1_000_000);
    world.run();
    assert!(world.hosts[0].end() - world.entries.last().unwrap().end.0 < 10_000);
    world.hosts[0].log.bytes.extend(rest);
    (0..300).for_each(|_| world.hosts[0].log.other(700));
    let commit = world.hosts[0].commit(2_000_100);
    world.run();
    world.check(0);
    let entries = &world.entries[before..];
    assert!(entries.iter().all(|entry| entry.data.as_ref().unwrap().data().len() <= 10_000));
    let stamped: Vec<_> = entries.iter().filter(|entry| entry.stamp == stamp(2_000_100)).collect();
    assert_eq!((stamped.len(), stamped[0].end.0), (1, commit));
}

#[test]
fn what_is_not_durable_at_the_backup_is_kept_and_sent_again() {
    let mut world = World::settled();
    world.delays = true;
    let ends: Vec<_> = (0..5).map(|n| world.hosts[0].commit(2_000_100 + n)).collect();
    world.run();
    let received = world.wal_bytes;
    assert!(world.agent.status().sent > Some(ends[3]), "sending does not wait for answers");
    // Every message is lost, and the connection with them.
    world.under_way.clear();
    world.agent.backup_lost(time(world.ms));
    world.run();
    assert_eq!(world.kind(), Some("no-backup"));
    world.delays = false;
    world.agent.backup_connected(None, time(world.ms));
    world.run();
    world.check(0);
    assert_eq!(world.entries.last().unwrap().end.0, ends[4]);
    assert_eq!((world.wal_bytes, world.kind()), (received, None));
}

#[test]
fn no_more_is_given_to_the_link_than_it_takes() {
    let mut settings = config(1);
    settings.message_max_bytes = 1000;
    let mut world = World::settled_with(settings);
    world.agent.backup_room(0, time(world.ms));
    for n in 0..100 {
        world.hosts[0].commit(2_000_000 + n);
        world.hosts[0].log.other(100);
    }
    let before = world.agent.status().sent;
    world.run();
    assert_eq!(world.agent.status().sent, before);
    world.agent.backup_room(1500, time(world.ms));
    world.run();
    let sent = world.agent.status().sent.unwrap() - before.unwrap();
    assert!((1500..3000).contains(&sent), "{sent}");
    world.agent.backup_room(usize::MAX, time(world.ms));
    world.run();
    world.check(0);
    assert_eq!(world.entries.last().unwrap().end.0, world.hosts[0].end());
}

#[test]
fn a_backlog_that_is_full_stops_reading_and_the_slot_keeps_the_rest() {
    let mut settings = config(1);
    settings.backlog_max_bytes = 100_000;
    let mut world = World::settled_with(settings);
    world.delays = true;
    (0..1000).for_each(|n| {
        world.hosts[0].commit(2_000_000 + n);
        world.hosts[0].log.other(1000);
    });
    world.run();
    let end = world.hosts[0].end();
    let status = world.agent.status();
    assert_eq!(status.stands.unwrap().kind, "backlog-full");
    assert!(!world.agent.wants(Conn::Stream) && world.agent.wants(Conn::Look));
    assert!((100_000..140_000).contains(&status.backlog_bytes) && status.received < end);
    let flushed = world.flushed.last().copied();
    // The agent does not read for longer than a server may be silent.
    world.wait(100_000);
    assert_eq!(world.failures, []);
    assert_eq!(
        (world.flushed.last().copied(), world.agent.status().received),
        (flushed, status.received)
    );
    world.delays = false;
    world.wait(5000);
    world.check(0);
    assert_eq!((world.flushed.last(), world.kind()), (Some(&end), None));
}

#[test]
fn a_backup_that_stands_before_the_backlog_is_served_from_the_slot() {
    let mut world = World::settled();
    for n in 0..3000 {
        world.hosts[0].commit(2_000_000 + n);
    }
    world.run();
    world.check(0);
    // Restored from a copy: its log is shorter than it has said.
    let keep = world.entries.len() / 2;
    world.entries.truncate(keep);
    let at = world.entries.last().unwrap().point();
    let standing = tidelock_shard::Standing { append: at, commit: at };
    world.backup = tidelock_shard::Bsa::leading(standing, tidelock_shard::Closing::Open);
    world.agent.backup_connected(None, time(world.ms));
    world.wait(3000);
    world.check(0);
    assert_eq!(world.entries.last().unwrap().end.0, world.hosts[0].end());
    let starts: Vec<_> =
        world.commands.iter().filter(|text| text.starts_with("START_REPLICATION")).collect();
    let segment = at.index.0 & !(START - 1);
    let from = tidelock_wal::Lsn(segment);
    assert_eq!(
        *starts[1],
        format!("START_REPLICATION SLOT \"tidelock\" PHYSICAL {from} TIMELINE 1")
    );
    assert_eq!(world.failures, []);
}

#[test]
fn a_new_agent_goes_on_wherever_the_backup_stands() {
    let mut host = Host::new();
    (0..200).for_each(|n| {
        host.commit(100 + n);
        host.log.other(3000);
    });
    host.slot = Some(START);
    let whole = host.log.bytes.clone();
    // At ends of records, and anywhere within one.
    for at in [START + 160, START + 8192, START + 9000, START + 400_000, host.end()] {
        let point = LogPoint { index: LogIndex(at), stamp: Hlc(5) };
        let mut world = World::of(vec![host.clone()], config(1), point, None);
        world.wait(2000);
        let last = world.hosts[0].commit(2_000_100);
        world.run();
        let bytes: Vec<u8> = world
            .entries
            .iter()
            .flat_map(|entry| entry.data.as_ref().unwrap().data().to_vec())
            .collect();
        let log = &world.hosts[0].log.bytes;
        assert_eq!(bytes, log[(at - START) as usize..], "{at:x}");
        assert_eq!(log[..whole.len()], whole);
        let entry = world.entries.last().unwrap();
        assert_eq!((entry.end.0, entry.stamp), (last, stamp(2_000_100)));
        assert_eq!(world.count("CREATE"), 0);
    }
}

#[test]
fn nothing_is_sent_that_synchronous_standbys_lack() {
    let mut world = World::settled();
    let first = world.hosts[0].commit(2_000_100);
    world.run();
    let host = &mut world.hosts[0];
    host.standby_names = "ANY 1 (a, b)".into();
    host.standbys = vec![first, 0];
    world.wait(2000);
    let second = world.hosts[0].commit(4_000_100);
    let third = world.hosts[0].commit(4_000_200);
    world.hosts[0].standbys = vec![first, second];
    // Looks follow each other while something waits.
    world.hosts[0].standbys[0] = third - 1;
    world.wait(50);
    assert_eq!(world.entries.last().unwrap().end.0, second);
    assert_eq!((world.agent.status().received, world.kind()), (third, None));
    // Too few standbys: the log stands, and says so.
    world.hosts[0].standbys.clear();
    world.wait(2000);
    assert_eq!(world.kind(), Some("standbys-missing"));
    assert_eq!(world.entries.last().unwrap().end.0, second);
    world.hosts[0].standby_names.clear();
    world.wait(2000);
    assert_eq!((world.entries.last().unwrap().end.0, world.kind()), (third, None));
    world.check(0);
}

#[test]
fn nops_are_appended_only_while_another_shard_is_ahead_and_the_clock_is_believed() {
    let mut world = World::settled();
    world.wait(5000);
    assert_eq!(world.count("SELECT pg_logical_emit_message"), 0);
    let updated = |world: &mut World, at_us: i64| {
        world.agent.progress(Hlc(0), stamp(at_us), time(world.ms));
        world.run();
    };
    updated(&mut world, 7_000_000);
    assert_eq!(world.count("SELECT pg_logical_emit_message"), 1);
    // The commit of the NOP arrives, and no other one follows.
    let nop = world.hosts[0].nop(7_000_100);
    world.run();
    world.wait(1000);
    assert_eq!(world.count("SELECT pg_logical_emit_message"), 1);
    assert_eq!(world.stamped().last(), Some(&(nop, stamp(7_000_100), true)));
    updated(&mut world, 7_000_050);
    world.wait(1000);
    assert_eq!(world.count("SELECT pg_logical_emit_message"), 1, "the log is further");
    world.verdict = BAD;
    world.tick();
    updated(&mut world, 9_000_000);
    world.wait(1000);
    assert_eq!(world.count("SELECT pg_logical_emit_message"), 1, "it would count for nothing");
    assert!(world.agent.deadline().is_some_and(|at| at > time(world.ms).mono));
}

#[test]
fn a_recovered_store_gets_nothing_any_more() {
    let mut world = World::settled();
    let attempt = {
        world.hosts[0].commit(2_000_100);
        world.delays = true;
        world.run();
        world.under_way.pop_front().unwrap().attempt
    };
    let verdict = tidelock_shard::Verdict::Fenced;
    world.reply(&tidelock_shard::Reply { attempt, verdict });
    world.run();
    assert!(world.agent.is_fenced());
    assert_eq!(world.kind(), Some("fenced"));
    world.under_way.clear();
    world.wait(10_000);
    assert!(world.under_way.is_empty() && world.agent.output(Conn::Stream).is_none());
    assert!(world.stands.last().unwrap().as_ref().unwrap().contains("drop its slot"));
    assert!(
        !std::iter::from_fn(|| world.agent.poll()).any(|of| matches!(of, Action::Connect { .. }))
    );
}
