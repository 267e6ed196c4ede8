//! What it costs to take up and to release packets of which 100,000 are held. Needs root; makes its
//! own namespaces.
//!
//! `release-bench [ROUNDS]` prints JSON: nanoseconds for each packet, in every round, with stamps of
//! 1, 4 and 9 entries and with an HLC.
//!
//! | figure | what is done |
//! |---|---|
//! | `take_up_ns` | the release queue takes up a packet: it is stamped, not covered, and waits |
//! | `release_at_once_ns` | C covers all 100,000 stamps, all different, in one step |
//! | `release_one_by_one_ns` | C rises 100,000 times, and each time covers one more |
//! | `let_out_ns` | 60,000 real packets in the kernel's queue, until the last one has arrived at the client |

#[allow(dead_code, reason = "the tests use more of it")]
#[path = "../tests/netns/lab.rs"]
mod lab;
mod measure;

use lab::{INTERFACE, Lab, in_namespace, udp, until};
use measure::require_namespaces;
use serde_json::{Value, json};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tidelock_netfilter::gate::{
    Gate, GroupConfig, InterfaceConfig, MemberConfig, Pending, TaggedMember, TaggingConfig,
};
use tidelock_netfilter::nfqueue::QueueNumber;
use tidelock_netfilter::packet::classify;
use tidelock_netfilter::release_queue::{GateState, Packet, PacketId, ReleaseQueue};
use tidelock_netfilter::rules::{Firewall, Topology};
use tidelock_protocol::hlc::Hlc;
use tidelock_protocol::ids::{MonoNanos, Seq, WriterId};
use tidelock_protocol::message::Mode;
use tidelock_protocol::tag::Form;
use tidelock_protocol::vector::CountVector;

const HELD: u32 = 100_000;
/// Linux 6.18 takes no more than 65,536 into one queue, whatever length is asked for.
const HELD_BY_KERNEL: u32 = 60_000;
/// Entries of the vectors; 0: HLCs.
const STAMPS: [u16; 4] = [1, 4, 9, 0];

fn main() {
    require_namespaces("release-bench");
    let rounds = measure::numbers().next().unwrap_or(5);
    let mut rows = STAMPS.map(|_| Vec::new());
    for round in 0..rounds {
        eprintln!("round {} of {rounds}", round + 1);
        for (entries, turns) in STAMPS.into_iter().zip(&mut rows) {
            turns.push(turn(entries));
        }
    }
    let row =
        |(entries, turns): (u16, Vec<Value>)| json!({ "stamp": name(entries), "turns": turns });
    let rows: Vec<Value> = STAMPS.into_iter().zip(rows).map(row).collect();
    println!(
        "{}",
        json!({ "held_packets": HELD, "held_by_kernel": HELD_BY_KERNEL, "rounds": rounds, "rows": rows })
    );
}

fn name(entries: u16) -> String {
    match entries {
        0 => "hlc".to_owned(),
        1 => "1 entry".to_owned(),
        n => format!("{n} entries"),
    }
}

fn turn(entries: u16) -> Value {
    let stamps: Vec<(CountVector, Hlc)> =
        (1..=HELD).map(|n| (vector(entries, n.into()), Hlc(n.into()))).collect();
    let (take_up, at_once) = decide(entries, &stamps, HELD as usize);
    let (_, one_by_one) = decide(entries, &stamps, 1);
    json!({
        "take_up_ns": each(take_up, HELD),
        "release_at_once_ns": each(at_once, HELD),
        "release_one_by_one_ns": each(one_by_one, HELD),
        "let_out_ns": each(let_out(entries), HELD_BY_KERNEL),
    })
}

fn each(span: Duration, packets: u32) -> f64 {
    measure::rounded(span.as_secs_f64() * 1e9 / f64::from(packets))
}

fn vector(entries: u16, n: u64) -> CountVector {
    (0..entries).map(|writer| (WriterId(writer), Seq(n))).collect()
}

/// The release queue alone: every packet waits with a stamp of its own, then C rises so that it
/// covers `step` more of them each time. Returns the times of all packets' taking up and release.
fn decide(entries: u16, stamps: &[(CountVector, Hlc)], step: usize) -> (Duration, Duration) {
    let kind = classify(0x0800, &[], 0);
    let mut queue = ReleaseQueue::new(HELD as usize, Mode::Pipelined);
    queue.set_gate(GateState::Open);
    let start = Instant::now();
    for (id, (vector, hlc)) in (1..=HELD).zip(stamps) {
        let packet = Packet { id: PacketId(id), kind, len_bytes: 100 };
        match entries {
            0 => queue.arrive_at(packet, *hlc, MonoNanos(0)),
            _ => queue.arrive(packet, vector, MonoNanos(0)),
        };
    }
    let taken_up = start.elapsed();
    assert_eq!(queue.len(), HELD as usize);
    let mut left = 0;
    let start = Instant::now();
    for (vector, hlc) in stamps.iter().skip(step - 1).step_by(step) {
        match entries {
            0 => queue.set_watermark(*hlc),
            _ => queue.set_committed(vector),
        }
        queue.release(MonoNanos(1), |_| left += 1);
    }
    let released = start.elapsed();
    assert_eq!(left, HELD);
    (taken_up, released)
}

/// From the moment that C is told until the last of the packets, all held, is at the client.
fn let_out(entries: u16) -> Duration {
    let lab = Lab::new(Topology::Routed);
    let pending = Arc::new(Pending::new());
    let gate = in_namespace(&lab.host(), || start(entries, Arc::clone(&pending)));
    let handle = gate.handle("bench").expect("the group");
    handle.set_committed(&CountVector::new());
    let now = tidelock_netfilter::now();
    handle.lease_renewed(now);
    for writer in 0..entries.max(1) {
        pending.publish_at(WriterId(writer), Seq(1), Hlc(1));
    }

    let client = SocketAddr::new(lab.client_ip().parse().expect("an address"), 7000);
    // Nobody reads it: what matters is that the packet got there.
    let _sink = udp(&lab.client(), "0.0.0.0:7000");
    let guest = udp(&lab.guest(), "0.0.0.0:0");
    let stats = Arc::clone(gate.members()[0].stats());
    let held = || stats.snapshot().held_packets;
    // Both neighbours are looked up before: packets would be lost meanwhile.
    lab.send_marker(7000);
    guest.send_to(&[0; 64], client).expect("it is sent");
    until("the first packet is held", || held() == 1);
    for sent in 2..=u64::from(HELD_BY_KERNEL) {
        guest.send_to(&[0; 64], client).expect("it is sent");
        // The kernel's socket for the daemon holds some thousands.
        if sent % 1024 == 0 {
            until("packets are held", || held() >= sent - 1024);
        }
    }
    until("all packets are held", || held() == u64::from(HELD_BY_KERNEL));
    let arrived = measure::Received::from_now_on(&lab.client(), "c0");
    let start = Instant::now();
    match entries {
        0 => handle.set_watermark(Hlc(1)),
        _ => handle.set_committed(&vector(entries, 1)),
    }
    while arrived.packets() < u64::from(HELD_BY_KERNEL) {
        assert!(start.elapsed() < lab::PATIENCE, "packets are missing");
        // Short beside the whole, and the cores are for the gate.
        std::thread::sleep(Duration::from_micros(100));
    }
    let span = start.elapsed();
    in_namespace(&lab.host(), || gate.stop().expect("an end"));
    span
}

/// A gate of one member, which has nobody to send tags to: their form says what stamps are.
fn start(entries: u16, pending: Arc<Pending>) -> Gate {
    let member = MemberConfig {
        name: "bench".into(),
        interfaces: vec![InterfaceConfig {
            interface: INTERFACE.into(),
            topology: Topology::Routed,
            queue: QueueNumber(9),
            queue_len_max: HELD_BY_KERNEL,
        }],
        pending,
    };
    let alone = TaggedMember { name: "bench".into(), addresses: Vec::new() };
    let tagging = (entries == 0).then(|| TaggingConfig::new(Form::Hlc, Vec::new(), vec![alone]));
    let group = GroupConfig {
        name: "bench".into(),
        mode: Mode::Pipelined,
        lease_period_ms: 3_600_000,
        members: vec![member],
        tagging,
    };
    Gate::start(Firewall::detect("bench").expect("a packet filter"), vec![group]).expect("a gate")
}
