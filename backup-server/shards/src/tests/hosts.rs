//! Hosts that speak to a store by frames.

use super::{OPTIONS, RECOVERY, entry, message};
use crate::{Limits, Link, Output, Store, StoreError, TunnelEvent};
use bytes::BytesMut;
use tidelock_protocol::bounds::CLOCK_BOUND_MS;
use tidelock_protocol::frame::{self, Frame};
use tidelock_protocol::hlc::Hlc;
use tidelock_protocol::ids::{Channel, MonoNanos};
use tidelock_protocol::message::RefusalKind;
use tidelock_shard::link::{self, Origin, StoreFrame, StoreMessage, TUNNEL_WINDOW_BYTES};
use tidelock_shard::{Backup, Entry, LogIndex, LogPoint, Verdict};
use tidelock_storage::memory::{Faults, Memory, each_power_loss};
use tidelock_store::journal::JournalError;

const NOW_MS: u64 = 1_800_000_000_000;
const HOST: Link = Link(4);
const OTHER: Link = Link(5);

fn names(shards: &[&str]) -> Vec<String> {
    shards.iter().map(|name| (*name).to_owned()).collect()
}

fn create(disk: &Memory, shards: &[&str]) -> Store<Memory> {
    let (options, limits) = (OPTIONS, Limits::default());
    Store::create(disk.clone(), "orders", &names(shards), options, limits, CLOCK_BOUND_MS).unwrap()
}

fn open(disk: &Memory) -> Option<Store<Memory>> {
    let opened = Store::open(disk.clone(), OPTIONS, Limits::default(), CLOCK_BOUND_MS);
    opened.unwrap().map(|(store, _)| store)
}

/// A store of two shards that are both shipped by one host.
fn served(disk: &Memory) -> Store<Memory> {
    let mut store = create(disk, &["s0", "s1"]);
    store.connected(HOST, "h0", &names(&["s0", "s1"])).unwrap();
    for shard in 0..2 {
        say(&mut store, HOST, shard, StoreMessage::Origin(origin(1, "")));
    }
    store.take_outputs();
    store
}

fn origin(timeline: u32, history: &str) -> Origin {
    let history = history.to_owned();
    Origin { system_id: 7, timeline, history, segment_bytes: 16 << 20, version: 15 }
}

fn say(store: &mut Store<Memory>, link: Link, shard: u16, message: StoreMessage) {
    store.received(link, Frame::Control(Channel(shard), message), NOW_MS);
}

fn ship(store: &mut Store<Memory>, link: Link, shard: u16, backup: &Backup) {
    let mut bytes = BytesMut::new();
    link::encode(shard, backup, &mut bytes).unwrap();
    let frames: Vec<StoreFrame> =
        std::iter::from_fn(|| frame::decode_of(&mut bytes).unwrap()).collect();
    frames.into_iter().for_each(|frame| store.received(link, frame, NOW_MS));
}

/// Makes everything durable, and takes what comes of it.
fn settle(store: &mut Store<Memory>) -> Vec<Output> {
    loop {
        store.write().unwrap();
        let Some(job) = store.sync_job() else { return store.take_outputs() };
        store.synced(job.run()).unwrap();
    }
}

/// Messages that a host hears.
fn heard(outputs: &[Output], of: Link) -> Vec<(u16, StoreMessage)> {
    let of_it = outputs.iter().filter_map(|output| match output {
        Output::Send { link, channel, message } if *link == of => Some((channel.0, message)),
        _ => None,
    });
    of_it.map(|(shard, message)| (shard, message.clone())).collect()
}

fn end_of(store: &mut Store<Memory>, of: Link) -> Option<RefusalKind> {
    let outputs = store.take_outputs();
    let mut ends = outputs.into_iter().filter_map(|output| match output {
        Output::End { link, why: (kind, _) } if link == of => Some(kind),
        _ => None,
    });
    ends.next()
}

#[test]
fn a_host_hears_what_is_durable_and_how_far_the_store_is() {
    let mut store = served(&Memory::new());
    ship(&mut store, HOST, 0, &message(0, vec![entry(10, 5), entry(20, 9)]));
    assert!(heard(&store.take_outputs(), HOST).iter().all(|(_, said)| matches!(
        said,
        StoreMessage::Progress { watermark: Hlc(0), updated: Hlc(9) }
    )));
    let outputs = settle(&mut store);
    let replies = heard(&outputs, HOST);
    let commits: Vec<_> = replies
        .iter()
        .filter_map(|(shard, said)| match said {
            StoreMessage::Reply(reply) => Some((*shard, reply.verdict.standing()?.commit.index)),
            _ => None,
        })
        .collect();
    assert_eq!(commits, [(0, LogIndex(10)), (0, LogIndex(20))]);
    // A NOP of the other shard lets the watermark pass, and is no update.
    let nop = Entry { nop: true, ..entry(3, 12) };
    ship(&mut store, HOST, 1, &message(0, vec![nop]));
    let outputs = settle(&mut store);
    assert!(outputs.contains(&Output::Advanced(Hlc(9))));
    let progress = StoreMessage::Progress { watermark: Hlc(9), updated: Hlc(9) };
    assert!(heard(&outputs, HOST).contains(&(0, progress)));
}

#[test]
fn entries_are_taken_only_of_the_log_on_record() {
    let mut store = served(&Memory::new());
    store.connected(OTHER, "h1", &names(&["s0", "s1"])).unwrap();
    store.take_outputs();
    say(&mut store, OTHER, 0, StoreMessage::AskOrigin);
    let on_record = StoreMessage::OnRecord { origin: Some(origin(1, "")) };
    assert_eq!(heard(&store.take_outputs(), OTHER), [(0, on_record)]);
    ship(&mut store, OTHER, 0, &message(0, vec![entry(10, 5)]));
    assert_eq!(end_of(&mut store, OTHER), Some(RefusalKind::Invalid), "no log was named");
    ship(&mut store, HOST, 0, &message(0, vec![entry(10, 5)]));
    settle(&mut store);
    // A standby was promoted, and its agent goes on.
    store.connected(OTHER, "h1", &names(&["s0", "s1"])).unwrap();
    let second = origin(2, "1\t0/A\tpromoted\n");
    say(&mut store, OTHER, 0, StoreMessage::Origin(second));
    ship(&mut store, OTHER, 0, &message(10, vec![entry(20, 6)]));
    settle(&mut store);
    assert_eq!(store.status().shards[0].host.as_deref(), Some("h1"));
    assert_eq!(store.status().shards[0].durable, LogIndex(20));
    // The old primary goes on, too: another log.
    ship(&mut store, HOST, 0, &message(10, vec![entry(21, 7)]));
    assert_eq!(end_of(&mut store, HOST), Some(RefusalKind::Superseded));
    settle(&mut store);
    assert_eq!(store.status().shards[0].received, LogIndex(20));
}

#[test]
fn a_host_that_lies_is_refused_and_nothing_of_it_is_kept() {
    let mut store = served(&Memory::new());
    let far = Hlc::new(NOW_MS + CLOCK_BOUND_MS + 1, 0);
    let ahead = Entry { stamp: far, ..entry(10, 0) };
    ship(&mut store, HOST, 0, &message(0, vec![ahead]));
    assert_eq!(end_of(&mut store, HOST), Some(RefusalKind::Implausible));
    type Lie = dyn Fn(&mut Store<Memory>);
    let lies: [&Lie; 5] = [
        &|store| ship(store, HOST, 9, &message(0, vec![entry(10, 5)])),
        &|store| say(store, HOST, 9, StoreMessage::Origin(origin(1, ""))),
        &|store| {
            say(store, HOST, 0, StoreMessage::Origin(Origin { system_id: 8, ..origin(1, "") }))
        },
        &|store| say(store, HOST, 0, StoreMessage::Open { tunnel: 1 }),
        &|store| {
            let beginning = Entry::begins(LogPoint { index: LogIndex(8), stamp: Hlc(9) });
            ship(store, HOST, 0, &message(0, vec![beginning]));
            ship(store, HOST, 0, &message(8, vec![entry(9, 3)]));
        },
    ];
    for (nth, lie) in lies.into_iter().enumerate() {
        let mut store = served(&Memory::new());
        lie(&mut store);
        assert!(end_of(&mut store, HOST).is_some(), "lie {nth}");
        ship(&mut store, HOST, 0, &message(0, vec![entry(10, 5)]));
        assert!(settle(&mut store).is_empty(), "lie {nth}: its connection has ended");
    }
}

#[test]
fn hosts_name_the_same_shards_and_more_are_added_at_the_end() {
    let disk = Memory::new();
    let mut store = served(&disk);
    let mut connect = |shards: &[&str]| store.connected(OTHER, "h1", &names(shards));
    for wrong in [&["s0"][..], &["s1", "s0"], &["s0", "s2"], &["s0", "s1", "s0"]] {
        assert!(connect(wrong).is_err(), "{wrong:?}");
    }
    connect(&["s0", "s1", "s2"]).unwrap();
    assert_eq!(store.log().shards(), 2, "not durable yet");
    let mut killed = open(&disk.killed()).unwrap();
    settle(&mut killed);
    assert_eq!(killed.log().shards(), 3, "only the name was kept");
    settle(&mut store);
    assert_eq!(store.log().shards(), 3);
    let names: Vec<_> = store.status().shards.into_iter().map(|shard| shard.name).collect();
    assert_eq!(names, ["s0", "s1", "s2"]);
}

#[test]
fn a_store_is_there_as_a_whole_or_not_at_all() {
    let live = |disk: &Memory| {
        let (options, limits) = (OPTIONS, Limits::default());
        let shards = names(&["s0", "s1"]);
        Store::create(disk.clone(), "orders", &shards, options, limits, CLOCK_BOUND_MS).is_ok()
    };
    let (mut made, mut none) = (0, 0);
    each_power_loss(live, |is_made, disk| match open(&disk) {
        Some(store) => {
            assert_eq!(store.status().shards.len(), 2);
            made += 1;
        }
        None => {
            assert!(!is_made);
            assert_eq!(create(&disk, &["other"]).status().shards.len(), 1);
            none += 1;
        }
    });
    assert!(made > 0 && none > 0, "{made} made, {none} not");
}

#[test]
fn without_room_the_shape_stays_and_the_host_may_come_again() {
    let disk = Memory::new();
    let mut store = served(&disk);
    disk.set_faults(Faults { capacity_bytes: Some(disk.used_bytes()), ..Faults::default() });
    let refused = store.connected(OTHER, "h1", &names(&["s0", "s1", "s2"]));
    assert_eq!(refused.unwrap_err().0, RefusalKind::Quota);
    say(&mut store, HOST, 0, StoreMessage::Origin(origin(2, "1\t0/A\tpromoted\n")));
    assert_eq!(end_of(&mut store, HOST), Some(RefusalKind::Quota));
    assert_eq!(store.origin_of(0), Some(&origin(1, "")));
    for _ in 0..2 {
        store.connected(HOST, "h0", &names(&["s0", "s1"])).unwrap();
        say(&mut store, HOST, 0, StoreMessage::Origin(origin(1, "")));
        say(&mut store, HOST, 0, StoreMessage::Doubt { after: Hlc(1), through: Hlc(4) });
        assert_eq!(end_of(&mut store, HOST), Some(RefusalKind::Quota), "it is not on record");
    }
    store.connected(HOST, "h0", &names(&["s0", "s1"])).unwrap();
    say(&mut store, HOST, 0, StoreMessage::Origin(origin(1, "")));
    ship(&mut store, HOST, 0, &message(0, vec![entry(10, 5)]));
    let full = store.write().unwrap_err();
    assert!(matches!(full, StoreError::Journal(JournalError::Full { .. })), "{full}");
    disk.set_faults(Faults::default());
    settle(&mut store);
    assert_eq!(store.status().shards[0].durable, LogIndex(10));
}

#[test]
fn after_a_recovery_every_agent_hears_that_it_is_fenced() {
    let disk = Memory::new();
    let mut store = served(&disk);
    ship(&mut store, HOST, 0, &message(0, vec![entry(10, 5)]));
    ship(&mut store, HOST, 1, &message(0, vec![entry(10, 4)]));
    store.recover(RECOVERY);
    let outputs = settle(&mut store);
    assert!(outputs.contains(&Output::Final(Hlc(4))));
    ship(&mut store, HOST, 0, &message(10, vec![entry(20, 9)]));
    let said = heard(&store.take_outputs(), HOST);
    let is_fenced = |said: &(u16, StoreMessage)| match &said.1 {
        StoreMessage::Reply(reply) => reply.verdict == Verdict::Fenced,
        _ => false,
    };
    assert!(said.iter().any(is_fenced), "{said:?}");
    assert_eq!(open(&disk).unwrap().status().recovered, Some(Hlc(4)));
}

#[test]
fn a_tunnel_leads_to_the_host_that_ships_the_shard_and_ends_with_its_connection() {
    let mut store = served(&Memory::new());
    assert_eq!(store.open_tunnel(9), None);
    let id = store.open_tunnel(1).unwrap();
    assert_eq!(heard(&store.take_outputs(), HOST), [(1, StoreMessage::Open { tunnel: 0 })]);
    let room = store.tunnel_room(id);
    store.tunnel_send(id, vec![1; room].into());
    say(&mut store, HOST, 1, StoreMessage::Data { tunnel: 0, data: vec![2; 9].into() });
    let outputs = store.take_outputs();
    assert!(outputs.contains(&Output::Tunnel(id, TunnelEvent::Data(vec![2; 9].into()))));
    store.tunnel_taken(id, 9);
    let taken = StoreMessage::Taken { tunnel: 0, bytes: 9 };
    assert_eq!(heard(&store.take_outputs(), HOST), [(1, taken)]);
    // More than it may send.
    for _ in 0..=TUNNEL_WINDOW_BYTES / 65536 {
        say(&mut store, HOST, 1, StoreMessage::Data { tunnel: 0, data: vec![2; 65536].into() });
    }
    let outputs = store.take_outputs();
    assert!(outputs.iter().any(|of| matches!(of, Output::End { link: HOST, .. })));
    let closed =
        |of: &Output| matches!(of, Output::Tunnel(of, TunnelEvent::Closed(Some(_))) if *of == id);
    assert!(outputs.iter().any(closed));
    assert_eq!(store.tunnel_room(id), 0);
}

/// Entries that were placed while a clock was not believed may be older than their stamps say.
#[test]
fn no_cut_is_in_a_time_of_doubt_also_after_a_restart() {
    let disk = Memory::new();
    let mut store = served(&disk);
    ship(&mut store, HOST, 0, &message(0, vec![entry(10, 5)]));
    ship(&mut store, HOST, 1, &message(0, vec![entry(10, 5)]));
    settle(&mut store);
    say(&mut store, HOST, 0, StoreMessage::Doubt { after: Hlc(5), through: Hlc(40) });
    let progress = StoreMessage::Progress { watermark: Hlc(5), updated: Hlc(40) };
    assert!(
        heard(&store.take_outputs(), HOST).contains(&(0, progress)),
        "idle shards must pass it"
    );
    ship(&mut store, HOST, 0, &message(10, vec![entry(20, 40), entry(30, 50)]));
    ship(&mut store, HOST, 1, &message(10, vec![entry(20, 20), entry(30, 39)]));
    settle(&mut store);
    assert_eq!(store.status().watermark, Some(Hlc(5)));
    assert_eq!(store.status().shards[1].apply_to, LogIndex(10), "20 may know what 40 is");
    let again = open(&disk.crash(&mut || false)).unwrap();
    assert_eq!(
        (again.status().watermark, again.status().shards[1].apply_to),
        (Some(Hlc(5)), LogIndex(10))
    );
    ship(&mut store, HOST, 1, &message(30, vec![entry(40, 45)]));
    settle(&mut store);
    assert_eq!(store.status().watermark, Some(Hlc(45)));
    assert_eq!(store.log().cut_at(Hlc(39)).unwrap().stamp, Hlc(5), "also of the past");
    assert_eq!(store.log().cut_at(Hlc(40)).unwrap().ends, [LogIndex(20), LogIndex(30)]);
    store.recover(RECOVERY);
    settle(&mut store);
    assert_eq!(store.status().recovered, Some(Hlc(45)));
}

#[test]
fn a_beat_comes_back() {
    let mut store = served(&Memory::new());
    let sent_at = MonoNanos(77);
    say(&mut store, HOST, 0, StoreMessage::Beat { sent_at });
    assert_eq!(heard(&store.take_outputs(), HOST), [(0, StoreMessage::Beaten { sent_at })]);
}
