use super::*;
use crate::Ask;
use proptest::prelude::*;
use tidelock_shard_logs::Recovery;

const RECOVERY: Recovery = Recovery { at_unix_ms: 1, primary_declared_dead: true };

proptest! {
    /// Standbys have all of the log, whatever the store takes, allows and forgets, and wherever they begin: each up to
    /// apply-to, and nothing of it beyond.
    #[test]
    fn standbys_have_the_log_up_to_apply_to_and_not_a_byte_more(
        steps in prop::collection::vec((0u8..6, 1u64..900), 1..60),
    ) {
        let (mut store, wal) = (Store::new(), shard_wal(1, None));
        let mut standbys = vec![(BEGIN, Driven::started(&store, &wal, BEGIN))];
        for (kind, number) in steps {
            match kind {
                0..=2 => store.append(number),
                3 => {
                    let ahead = (store.end - store.allowed).min(number);
                    store.allow(store.allowed + ahead);
                }
                // Only what every standby has is forgotten.
                4 => store.log.forget(&[LogIndex(store.apply_to().0), LogIndex(store.other)]).unwrap(),
                _ => {
                    let at = store.apply_to().0;
                    standbys.push((at, Driven::started(&store, &wal, at)));
                }
            }
            let bound = store.apply_to().0;
            for (from, standby) in &mut standbys {
                standby.follow(&store);
                standby.heard.check(*from, bound);
                prop_assert_eq!(standby.heard.end().max(*from), bound);
                prop_assert!(!matches!(standby.events.last(), Some(Event::Ended(_))));
            }
        }
    }
}

#[test]
fn a_standby_that_streams_is_given_the_next_reader_with_apply_to() {
    let (mut store, wal) = (Store::new(), shard_wal(1, None));
    store.append(500);
    store.allow(store.end);
    let mut standby = Driven::started(&store, &wal, BEGIN);
    assert_eq!(standby.heard.end(), store.end);
    assert!(standby.standby.poll().is_none());
    for _ in 0..3 {
        // All that is durable has been read. The next reader is there when apply-to moves, so the store is not asked.
        let asked = standby.standby.ask();
        let Some((ask @ Ask::After(_), Need::WhenMoved)) = asked else { panic!("{asked:?}") };
        store.append(500);
        store.allow(store.end);
        standby.standby.advance(store.apply_to());
        standby.standby.supply(ask, ask.answer(&store.log, SHARD).unwrap());
        assert!(standby.standby.poll().is_none());
        standby.heard.take(&standby.standby.output().split());
        assert_eq!(standby.heard.end(), store.end);
    }
}

#[test]
fn a_reader_that_comes_after_the_standby_has_gone_elsewhere_is_dropped() {
    let (mut store, wal) = (Store::new(), shard_wal(1, None));
    for _ in 0..20 {
        store.append(300);
    }
    store.allow(store.end);
    let mut standby = Driven::new(&store, &wal).standby;
    standby.output().clear();
    standby.received(&start(store.end - 300, 1));
    while standby.poll().is_some() {}
    let (late, _) = standby.ask().unwrap();
    standby.received(&[message(b'c', b""), start(BEGIN, 1)].concat());
    while standby.poll().is_some() {}
    standby.supply(late, late.answer(&store.log, SHARD).unwrap());
    let mut standby = Driven { standby, heard: Heard::default(), events: Vec::new() };
    standby.settle(&store);
    assert_eq!(standby.heard.end(), store.end, "{:?}", standby.events);
}

#[test]
fn a_recovery_ends_the_log_at_the_final_apply_to() {
    let (mut store, wal) = (Store::new(), shard_wal(1, None));
    let mut standby = Driven::started(&store, &wal, BEGIN);
    for _ in 0..5 {
        store.append(300);
    }
    store.allow(BEGIN + 600);
    store.log.recover(RECOVERY);
    store.commit();
    assert!(store.log.final_watermark().is_some());
    standby.follow(&store);
    assert_eq!(standby.heard.end(), BEGIN + 600);
    standby.heard.check(BEGIN, BEGIN + 600);
    standby.say(&store, &status(BEGIN + 600));
    assert!(matches!(standby.events.last(), Some(Event::Status(_))), "{:?}", standby.events);
}

#[test]
fn log_that_the_journal_does_not_have_means_a_new_copy() {
    let (mut store, wal) = (Store::new(), shard_wal(1, None));
    // Begins before the beginning.
    let standby = Driven::started(&store, &wal, BEGIN - SEGMENT);
    assert!(matches!(standby.failure(), Failure::CopyAnew { at } if *at == Lsn(BEGIN - SEGMENT)));
    assert!(standby.failure().needs_copy());
    assert!(standby.heard.errors[0].contains("58P01"), "{:?}", standby.heard.errors);
    for _ in 0..20 {
        store.append(300);
    }
    store.allow(store.end);
    store.log.forget(&[LogIndex(store.end), LogIndex(store.other)]).unwrap();
    // Begins in what was forgotten.
    let standby = Driven::started(&store, &wal, BEGIN);
    assert!(matches!(standby.failure(), Failure::CopyAnew { at } if *at == Lsn(BEGIN)));
    // Over a jump: the log up to it is given, and nothing behind it.
    let end = store.end;
    store.jump(end + 5000);
    store.append(300);
    store.allow(store.end);
    let standby = Driven::started(&store, &wal, end - 10);
    assert!(matches!(standby.failure(), Failure::CopyAnew { at } if *at == Lsn(end)));
    standby.heard.check(end - 10, end);
    let standby = Driven::started(&store, &wal, end + 5000);
    assert_eq!(standby.heard.end(), store.end, "a copy that was made behind the jump goes on");
}

#[test]
fn a_standby_that_is_ahead_is_named() {
    let (mut store, wal) = (Store::new(), shard_wal(1, None));
    store.append(800);
    store.allow(BEGIN + 400);
    let ahead = |standby: &Driven<_>, at: u64| {
        let Failure::Ahead { standby: has, apply_to } = standby.failure() else {
            panic!("{:?}", standby.events)
        };
        assert_eq!((has.0, *apply_to), (at, store.apply_to()));
    };
    ahead(&Driven::started(&store, &wal, BEGIN + 800), BEGIN + 800);
    // Within one segment a standby says only by its status what it has.
    let mut standby = Driven::started(&store, &wal, BEGIN);
    standby.say(&store, &status(BEGIN + 800));
    ahead(&standby, BEGIN + 800);
    // The end of a record is told rounded up.
    let (mut store, bound) = (Store::new(), BEGIN + 403);
    store.append(403);
    store.allow(bound);
    let mut standby = Driven::started(&store, &wal, BEGIN);
    standby.say(&store, &status(BEGIN + 408));
    assert!(matches!(standby.events.last(), Some(Event::Status(_))));
}

#[test]
fn a_standby_of_another_system_or_history_is_named() {
    let (store, wal) = (Store::new(), shard_wal(1, None));
    let mut standby = Driven::new(&store, &wal);
    standby.say(&store, &query("IDENTIFY_SYSTEM"));
    standby.say(&store, &message(b'X', b""));
    assert!(matches!(standby.failure(), Failure::LeftWhenTold { system: SYSTEM, .. }));
    let mut standby = Driven::new(&store, &wal);
    standby.say(&store, &start(BEGIN, 2));
    assert!(matches!(standby.failure(), Failure::OtherHistory { .. }), "{:?}", standby.events);
    // The log itself becomes another system's.
    let mut standby = Driven::started(&store, &wal, BEGIN);
    standby.standby.extend(&ShardWal { system: SYSTEM + 1, ..wal });
    standby.settle(&store);
    assert!(matches!(standby.failure(), Failure::Withdrawn));
}

#[test]
fn a_timeline_is_followed_by_the_next_one_when_apply_to_is_there() {
    let (mut store, wal) = (Store::new(), shard_wal(1, None));
    let mut standby = Driven::started(&store, &wal, BEGIN);
    store.append(400);
    let branch = store.end;
    let next = shard_wal(2, Some(&format!("1\t{}\tpromoted\n", Lsn(branch))));
    standby.standby.extend(&next);
    store.append(400);
    store.allow(branch - 1);
    standby.follow(&store);
    assert!(!standby.heard.tags.contains('c'), "nothing is said of what lies behind apply-to");
    store.allow(store.end);
    standby.follow(&store);
    assert_eq!(standby.heard.end(), branch);
    standby.say(&store, &message(b'c', b""));
    assert!(matches!(standby.events.last(), Some(Event::TimelineEnded { .. })));
    // A walreceiver begins with the segment.
    standby.heard = Heard::default();
    standby.say(&store, &start(BEGIN, 2));
    assert_eq!(standby.heard.end(), store.end);
    standby.heard.check(BEGIN, store.end);
}

#[test]
fn damage_in_the_journal_ends_the_connection_and_no_wrong_byte_leaves() {
    let (mut store, wal) = (Store::new(), shard_wal(1, None));
    for _ in 0..10 {
        store.append(300);
    }
    store.allow(store.end);
    let segments = store.log.journal().segments();
    let damaged = segments[segments.len() / 2].file_name();
    store.disk.flip(&format!("s/{damaged}"), 250);
    let standby = Driven::started(&store, &wal, BEGIN);
    let failure = standby.failure();
    assert!(matches!(failure, Failure::Damage(_) | Failure::Journal(_)), "{failure:?}");
    assert!(standby.heard.end() < store.end);
    standby.heard.check(BEGIN, store.end);
}

#[test]
fn an_entry_that_is_not_as_long_as_its_log_is_refused() {
    let (mut store, wal) = (Store::new(), shard_wal(1, None));
    let data = Some(Payload::new(vec![1; 10].into()));
    let (after, end) = (store.end, store.end + 11);
    store.take(SHARD, after, Entry { end: LogIndex(end), stamp: Hlc(end), data, nop: false });
    store.allow(end);
    let standby = Driven::started(&store, &wal, BEGIN);
    assert!(matches!(standby.failure(), Failure::Content { span: 11, bytes: 10, .. }));
    assert_eq!(standby.heard.end(), 0);
}
