mod hosts;

use super::*;
use proptest::prelude::*;
use tidelock_protocol::hlc::Hlc;
use tidelock_protocol::record::Payload;
use tidelock_shard::{Backup, Doubts, Entry, LogIndex, LogPoint, Reply, Standing, Verdict};
use tidelock_storage::memory::{Faults, Memory, each_power_loss};
use tidelock_store::journal::{Options, Position};

const RECOVERY: Recovery = Recovery { at_unix_ms: 1, primary_declared_dead: true };
const AGENT: Agent = Agent(7);
/// So small that every few entries begin a segment.
const OPTIONS: Options = Options { segment_bytes: 400 };

fn entry(end: u64, stamp: u64) -> Entry {
    let data = Payload::new(vec![end as u8; 40].into());
    Entry::update(LogIndex(end), Hlc(stamp), data)
}

fn message(after: u64, entries: Vec<Entry>) -> Backup {
    Backup { attempt: 3, after: LogIndex(after), entries }
}

fn create(disk: &Memory, shards: u16, limits: Limits) -> StoreLog<Memory> {
    StoreLog::create(disk.clone(), "s", shards, OPTIONS, limits).unwrap()
}

fn open(disk: &Memory) -> StoreLog<Memory> {
    let limits = Limits::default();
    StoreLog::open(disk.clone(), "s", Position::default(), OPTIONS, limits, Doubts::default())
        .unwrap()
        .0
}

/// Takes entries, the first of which begins at `after`.
fn take(log: &mut StoreLog<Memory>, shard: u16, after: u64, entries: Vec<Entry>) {
    assert_eq!(log.received(AGENT, shard, message(after, entries)), Ok(None));
}

/// Makes everything durable that can be.
fn commit(log: &mut StoreLog<Memory>) -> Result<Vec<Event>, StoreError> {
    let mut events = Vec::new();
    loop {
        log.write()?;
        let Some(job) = log.sync_job() else { return Ok(events) };
        events.extend(log.synced(job.run())?);
    }
}

fn apply_to(log: &StoreLog<Memory>) -> Vec<u64> {
    (0..log.shards()).map(|shard| log.apply_to(shard).unwrap().0).collect()
}

fn ends(log: &StoreLog<Memory>, shard: u16, after: u64) -> Vec<u64> {
    let entries = log.entries(shard, LogIndex(after), LogIndex(u64::MAX)).unwrap();
    entries.map(|entry| entry.unwrap().end.0).collect()
}

#[test]
fn an_agent_hears_that_an_entry_is_committed_when_it_is_durable_and_the_watermark_follows() {
    let mut log = create(&Memory::new(), 2, Limits::default());
    take(&mut log, 0, 0, vec![entry(10, 100), entry(25, 200)]);
    log.write().unwrap();
    let received = LogPoint { index: LogIndex(25), stamp: Hlc(200) };
    let standing = Standing { append: received, commit: LogPoint::default() };
    assert_eq!(log.standing(0), Some(standing));
    let reply = Reply {
        attempt: 3,
        verdict: Verdict::Taken(Standing { append: received, commit: received }),
    };
    assert_eq!(commit(&mut log).unwrap(), [Event::Reply { agent: AGENT, shard: 0, reply }]);
    assert_eq!((log.watermark(), log.held_back_by()), (Some(Hlc(0)), Some(1)));
    assert_eq!(apply_to(&log), [0, 0], "the other shard may still have something older");
    take(&mut log, 1, 0, vec![entry(1, 150)]);
    assert!(commit(&mut log).unwrap().contains(&Event::Advanced(Hlc(150))));
    assert_eq!(apply_to(&log), [10, 1]);
    assert_eq!(ends(&log, 0, 10), [25], "what waits is there to be read");
}

#[test]
fn whatever_a_power_loss_leaves_has_all_that_was_answered() {
    let live = |disk: &Memory| {
        let mut answered = [0; 2];
        let limits = Limits::default();
        let Ok(mut log) = StoreLog::create(disk.clone(), "s", 2, OPTIONS, limits) else {
            return (false, answered, None);
        };
        let mut events = Vec::new();
        for nth in 1..8u64 {
            let shard = (nth % 2) as u16;
            let from = nth / 2 * 2 + nth % 2;
            let message = message(from.saturating_sub(2), vec![entry(from, 10 * nth)]);
            let _ = log.received(AGENT, shard, message);
            events.extend(commit(&mut log).unwrap_or_default());
        }
        log.recover(RECOVERY);
        events.extend(commit(&mut log).unwrap_or_default());
        let mut last = None;
        for event in events {
            match event {
                Event::Reply {
                    shard, reply: Reply { verdict: Verdict::Taken(at), .. }, ..
                } => {
                    answered[usize::from(shard)] = at.commit.index.0;
                }
                Event::Final(watermark) => last = Some(watermark),
                Event::Reply { .. } | Event::Advanced(_) => {}
            }
        }
        (true, answered, last)
    };
    let mut finals = 0;
    let disks = each_power_loss(live, |(is_made, answered, last), disk| {
        let opened = StoreLog::open(
            disk,
            "s",
            Position::default(),
            OPTIONS,
            Limits::default(),
            Doubts::default(),
        );
        if !*is_made {
            return;
        }
        let (log, _) = opened.unwrap();
        for (shard, answered) in (0..).zip(answered) {
            let standing = log.standing(shard).unwrap();
            assert!(standing.commit.index.0 >= *answered, "{standing:?}, {answered} was answered");
            assert_eq!(ends(&log, shard, 0).last().copied().unwrap_or(0), standing.commit.index.0);
        }
        if let Some(last) = last {
            assert_eq!(log.final_watermark(), Some(*last), "a recovery stays");
            finals += 1;
        }
    });
    assert!(disks > 50 && finals > 0, "{disks} disks, {finals} of them recovered");
}

#[test]
fn a_recovery_closes_all_logs_at_one_watermark_and_says_what_is_beyond() {
    let disk = Memory::new();
    let mut log = create(&disk, 2, Limits::default());
    take(&mut log, 0, 0, vec![entry(10, 100), entry(20, 200), entry(30, 300)]);
    take(&mut log, 1, 0, vec![entry(5, 150)]);
    commit(&mut log).unwrap();
    // Under way when the disaster comes: before the mark, so it counts.
    take(&mut log, 1, 5, vec![entry(6, 220)]);
    log.recover(RECOVERY);
    let fenced = Some(Reply { attempt: 3, verdict: Verdict::Fenced });
    assert_eq!(log.received(AGENT, 0, message(30, vec![entry(40, 400)])), Ok(fenced.clone()));
    assert_eq!(log.final_watermark(), None);
    let events = commit(&mut log).unwrap();
    assert_eq!(events.iter().filter(|event| **event == Event::Final(Hlc(220))).count(), 1);
    for log in [&mut log, &mut open(&disk)] {
        assert_eq!((log.final_watermark(), log.watermark()), (Some(Hlc(220)), Some(Hlc(220))));
        assert_eq!(apply_to(log), [20, 6]);
        assert_eq!(ends(log, 0, 20), [30], "beyond the cut");
        assert_eq!(log.received(AGENT, 1, message(6, vec![entry(7, 400)])), Ok(fenced.clone()));
        log.recover(RECOVERY);
        assert_eq!(commit(log).unwrap(), [], "once");
        assert!(!log.ready(0));
        assert!(log.ready(1), "the last one");
    }
}

#[test]
fn nothing_is_taken_that_has_no_room_and_nothing_is_lost_by_it() {
    let limits = Limits { taken_max_bytes: 300, waiting_max: 2 };
    let disk = Memory::new();
    let mut log = create(&disk, 2, limits);
    for nth in 0..4 {
        take(&mut log, 0, nth, vec![entry(nth + 1, 100 + nth)]);
    }
    let is_full = |reply: Result<Option<Reply>, Refused>| {
        matches!(reply, Ok(Some(Reply { verdict: Verdict::Full(_), .. })))
    };
    assert!(is_full(log.received(AGENT, 0, message(4, vec![entry(5, 104)]))));
    disk.set_faults(Faults { capacity_bytes: Some(disk.used_bytes() + 10), ..Faults::default() });
    assert!(matches!(log.write(), Err(StoreError::Journal(_))), "the disk is full");
    disk.set_faults(Faults::default());
    assert_eq!(commit(&mut log).unwrap().len(), 4, "replies");
    // Four stamps wait for the other shard, which is always taken.
    assert!(is_full(log.received(AGENT, 0, message(4, vec![entry(5, 104)]))));
    assert!(is_full(log.received(AGENT, 0, message(0, vec![]))), "nothing is to be sent");
    take(&mut log, 1, 0, vec![entry(1, 200)]);
    commit(&mut log).unwrap();
    take(&mut log, 0, 4, vec![entry(5, 104)]);
}

#[test]
fn an_agent_that_breaks_the_rules_loses_its_connection_and_changes_nothing() {
    let mut log = create(&Memory::new(), 2, Limits::default());
    take(&mut log, 0, 0, vec![entry(10, 100)]);
    commit(&mut log).unwrap();
    let lies = [
        (2, message(0, vec![entry(1, 1)])),
        (0, message(10, vec![entry(11, 99)])),
        (0, message(10, vec![entry(12, 100), entry(12, 100)])),
        (0, message(10, vec![entry(12 + (1 << 32), 100)])),
    ];
    for (shard, lie) in lies {
        assert!(log.received(AGENT, shard, lie.clone()).is_err(), "{lie:?}");
    }
    assert_eq!(commit(&mut log).unwrap(), []);
    assert_eq!((ends(&log, 0, 0), ends(&log, 1, 0)), (vec![10], vec![]));
}

#[test]
fn a_log_may_begin_anywhere_and_a_new_shard_never_takes_the_watermark_back() {
    let disk = Memory::new();
    let mut log = create(&disk, 1, Limits::default());
    let begins = Entry::begins(LogPoint { index: LogIndex(1 << 40), stamp: Hlc(0) });
    take(&mut log, 0, 0, vec![begins, entry((1 << 40) + 3, 100)]);
    commit(&mut log).unwrap();
    assert_eq!(log.watermark(), Some(Hlc(100)));
    assert!(log.set_shards(0).is_err() && log.set_shards(1025).is_err());
    log.set_shards(2).unwrap();
    commit(&mut log).unwrap();
    for log in [&mut log, &mut open(&disk)] {
        assert_eq!((log.shards(), log.watermark()), (2, Some(Hlc(100))));
    }
    take(&mut log, 0, (1 << 40) + 3, vec![entry((1 << 40) + 5, 200)]);
    take(&mut log, 1, 0, vec![entry(9, 150)]);
    commit(&mut log).unwrap();
    for log in [&log, &open(&disk)] {
        assert_eq!((log.watermark(), apply_to(log)), (Some(Hlc(150)), vec![(1 << 40) + 3, 9]));
        assert_eq!(log.cut_at(Hlc(99)).unwrap().ends, [LogIndex(1 << 40), LogIndex(0)]);
    }
}

/// Entries of up to four shards: the shard, what the entry takes of its log, and what the stamp grows by.
fn histories() -> impl Strategy<Value = Vec<(u16, u64, u64)>> {
    prop::collection::vec((0u16..4, 1u64..5, 0u64..3), 1..60)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn cuts_and_reads_of_any_past_are_what_was_taken(
        history in histories(), closes in any::<bool>(), kept in 0u64..100,
    ) {
        let disk = Memory::new();
        let mut log = create(&disk, 4, Limits::default());
        let mut logs = vec![vec![LogPoint::default()]; 4];
        let mut clock = 0;
        for (nth, (shard, span, ticks)) in history.iter().enumerate() {
            clock += ticks;
            let of = &mut logs[usize::from(*shard)];
            let last = of.last().unwrap().index.0;
            take(&mut log, *shard, last, vec![entry(last + span, clock)]);
            of.push(LogPoint { index: LogIndex(last + span), stamp: Hlc(clock) });
            if nth % 3 == 0 {
                commit(&mut log).unwrap();
            }
        }
        if closes {
            log.recover(RECOVERY);
        }
        commit(&mut log).unwrap();
        let watermark = logs.iter().map(|of| of.last().unwrap().stamp).min().unwrap();
        let cut = |stamp: Hlc| -> Vec<LogIndex> {
            let end = |of: &Vec<LogPoint>| of.iter().rfind(|point| point.stamp <= stamp).unwrap().index;
            logs.iter().map(end).collect()
        };
        for log in [&log, &open(&disk)] {
            prop_assert_eq!(log.watermark(), Some(watermark));
            let applied: Vec<_> = (0..4).map(|shard| log.apply_to(shard).unwrap()).collect();
            prop_assert_eq!(&applied, &cut(watermark));
            for stamp in 0..=watermark.0 {
                prop_assert_eq!(&log.cut_at(Hlc(stamp)).unwrap().ends, &cut(Hlc(stamp)));
            }
            prop_assert!(log.cut_at(watermark.next()).is_err());
            for (shard, of) in (0..).zip(&logs) {
                let all: Vec<_> = of[1..].iter().map(|point| point.index.0).collect();
                prop_assert_eq!(ends(log, shard, 0), &all[..]);
                let middle = all.get(all.len() / 2).copied().unwrap_or(0);
                let later: Vec<_> = all.iter().copied().filter(|end| *end > middle).collect();
                prop_assert_eq!(ends(log, shard, middle), later);
                let few = log.entries(shard, LogIndex(0), LogIndex(middle)).unwrap();
                let few: Vec<_> = few.map(|entry| entry.unwrap().point()).collect();
                prop_assert_eq!(&few[..], &of[1..=few.len()]);
                prop_assert!(few.len() == of.len() - 1 || few.last().is_some_and(|last| last.index.0 == middle));
            }
        }
        // Entries that are needed stay, whatever goes.
        let needed: Vec<_> = logs.iter().map(|of| of[kept as usize % of.len()].index).collect();
        log.forget(&needed).unwrap();
        for log in [&log, &open(&disk)] {
            for ((shard, of), needed) in (0..).zip(&logs).zip(&needed) {
                let later = of.iter().map(|point| point.index.0).filter(|end| *end > needed.0);
                prop_assert_eq!(ends(log, shard, needed.0), later.collect::<Vec<_>>());
            }
        }
    }
}
