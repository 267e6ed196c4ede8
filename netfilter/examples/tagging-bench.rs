//! What tags cost, side by side in one run. Needs root; makes its own namespaces.
//!
//! `tagging-bench [SECONDS_PER_STREAM] [ROUNDS]` prints a table to standard error and JSON to
//! standard output. The rounds of all kinds take turns, and each figure is the median of them.
//!
//! | traffic | kinds |
//! |---|---|
//! | between two members | no gate; vector tags; HLC tags |
//! | from a member to the outside, all of it covered | no gate; the kernel programs let it pass; through the queue |
//! | releases, without a network | 100,000 packets, each with a stamp of its own: 1, 4, 9 entries, HLC |

#[allow(dead_code, reason = "the tests use more of it")]
#[path = "../tests/netns/lab.rs"]
mod lab;
#[allow(dead_code, reason = "the tests use more of it")]
#[path = "../tests/netns/town.rs"]
mod town;

use lab::{PATIENCE, in_namespace, obstacle, udp};
use serde_json::{Value, json};
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tidelock_netfilter::gate::{
    Gate, GroupConfig, MemberConfig, Pending, RulesAtStop, TaggedMember, TaggingConfig,
};
use tidelock_netfilter::nfqueue::QueueNumber;
use tidelock_netfilter::packet::classify;
use tidelock_netfilter::release_queue::{GateState, Kind, Packet, PacketId, ReleaseQueue};
use tidelock_netfilter::rules::{Firewall, Topology};
use tidelock_protocol::hlc::Hlc;
use tidelock_protocol::ids::{MonoNanos, Seq, WriterId};
use tidelock_protocol::message::Mode;
use tidelock_protocol::tag::Form;
use tidelock_protocol::vector::CountVector;
use town::{Plan, Town};

const ROUND_TRIPS: usize = 4_000;
const WARM_UP: usize = ROUND_TRIPS / 10;
const HELD: u32 = 100_000;

#[derive(Clone, Copy, Debug, PartialEq)]
enum Guard {
    None,
    Queue,
    Programs(Form),
}

fn main() {
    if let Some(why) = obstacle() {
        eprintln!("tagging-bench: {why}");
        std::process::exit(1);
    }
    let mut arguments = std::env::args().skip(1).filter_map(|a| a.parse::<u64>().ok());
    let span = Duration::from_secs(arguments.next().unwrap_or(3));
    let rounds = arguments.next().unwrap_or(5);
    let vector = Guard::Programs(Form::Vector { writers: 4 });
    let hlc = Guard::Programs(Form::Hlc);
    let mut rows = Vec::new();
    eprintln!(
        "{:10} {:8} {:8} {:>12} {:>12} {:>12} {:>10}",
        "path", "to", "guard", "UDP trip us", "p99 us", "TCP trip us", "TCP Gb/s"
    );
    for plan in Plan::ALL {
        for (to, kinds) in [
            ("db", [("none", Guard::None), ("vector", vector), ("hlc", hlc)]),
            ("client", [("none", Guard::None), ("programs", vector), ("queue", Guard::Queue)]),
        ] {
            let mut figures = kinds.map(|_| Vec::new());
            for _ in 0..rounds {
                for ((_, guard), figures) in kinds.iter().zip(&mut figures) {
                    figures.push(measure(plan, to, *guard, span));
                }
            }
            for ((name, _), figures) in kinds.iter().zip(figures) {
                let median = |of: fn(&Figures) -> f64| median(figures.iter().map(of).collect());
                let row = json!({
                    "path": format!("{plan:?}"),
                    "to": to,
                    "guard": name,
                    "udp_round_trip_us_median": median(|f| f.udp_us),
                    "udp_round_trip_us_p99": median(|f| f.udp_p99_us),
                    "tcp_round_trip_us_median": median(|f| f.tcp_us),
                    "tcp_gbit_per_s": median(|f| f.gbit),
                    "tagged": figures.iter().map(|f| f.tagged).sum::<u64>(),
                    "covered": figures.iter().map(|f| f.covered).sum::<u64>(),
                });
                eprintln!(
                    "{:10} {:8} {:8} {:>12} {:>12} {:>12} {:>10}",
                    format!("{plan:?}"),
                    to,
                    name,
                    row["udp_round_trip_us_median"],
                    row["udp_round_trip_us_p99"],
                    row["tcp_round_trip_us_median"],
                    row["tcp_gbit_per_s"],
                );
                rows.push(row);
            }
        }
    }
    let releases: Vec<Value> =
        [Some(1), Some(4), Some(9), None].into_iter().map(release_cost).collect();
    println!(
        "{}",
        json!({ "seconds": span.as_secs(), "rounds": rounds, "rows": rows, "releases": releases })
    );
}

struct Figures {
    udp_us: f64,
    udp_p99_us: f64,
    tcp_us: f64,
    gbit: f64,
    tagged: u64,
    covered: u64,
}

fn measure(plan: Plan, to: &str, guard: Guard, span: Duration) -> Figures {
    let town = Town::new(plan);
    // Room for the tag, so that segments are as large with it as without.
    town.widen(1600);
    let gates = start(&town, guard);
    let mut udp_times = udp_round_trips(&town, to);
    let tcp_times = tcp_round_trips(&town, to);
    let gbit = stream(&town, to, span);
    let (mut tagged, mut covered) = (0, 0);
    for (_, gate) in &gates {
        for member in gate.members() {
            if let Some(stats) = member.tagging().stats() {
                let stats = stats.expect("counters");
                tagged += stats.tagged;
                covered += stats.covered;
            }
        }
    }
    for (host, gate) in gates {
        in_namespace(&host, || gate.stop(RulesAtStop::Leave).expect("an end"));
    }
    udp_times.sort_by(f64::total_cmp);
    let udp_p99_us = udp_times[udp_times.len() * 99 / 100];
    Figures {
        udp_us: median(udp_times),
        udp_p99_us,
        tcp_us: median(tcp_times),
        gbit,
        tagged,
        covered,
    }
}

/// A member's name, interface and queue.
type Guarded = (&'static str, &'static str, u16);

/// Open gates that have nothing to hold: P is covered.
fn start(town: &Town, guard: Guard) -> Vec<(String, Gate)> {
    let hosts: &[(&str, &[Guarded])] = match (guard, town.plan) {
        (Guard::None, _) => &[],
        (_, Plan::TwoHosts) => &[("host", &[("web", "w0", 11)]), ("other", &[("db", "d0", 12)])],
        _ => &[("host", &[("web", "w0", 11), ("db", "d0", 12)])],
    };
    let topology = match town.plan {
        Plan::OneBridge => Topology::Bridged,
        Plan::OneRouter | Plan::TwoHosts => Topology::Routed,
    };
    let one = |(host, members): &(&str, &[Guarded])| {
        let tagging = match guard {
            Guard::Programs(form) => {
                let members = ["web", "db"].map(|name| TaggedMember {
                    name: name.to_owned(),
                    addresses: vec![town.ip(name), town.ip6(name)],
                });
                let mut config = TaggingConfig::new(form, Vec::new(), members.into());
                config.pin_directory = town.pin().to_owned();
                Some(config)
            }
            Guard::None | Guard::Queue => None,
        };
        let member = |(name, interface, queue): &Guarded| MemberConfig {
            name: (*name).to_owned(),
            interface: (*interface).to_owned(),
            topology,
            queue: QueueNumber(*queue),
            queue_len_max: 1 << 16,
            pending: Arc::new(Pending::new()),
        };
        let group = GroupConfig {
            name: "bench".into(),
            mode: Mode::Pipelined,
            lease_period_ms: 3_600_000,
            members: members.iter().map(member).collect(),
            tagging,
        };
        let host = town.ns(host);
        let gate = in_namespace(&host, || {
            let firewall = Firewall::detect().expect("a packet filter");
            Gate::start(firewall, vec![group]).expect("a gate")
        });
        let handle = gate.handle("bench").expect("the group");
        handle.set_committed(&CountVector::new());
        let now = tidelock_netfilter::now();
        handle.lease_renewed(now, now);
        (host, gate)
    };
    hosts.iter().map(one).collect()
}

/// Microseconds from `to` to web and back.
fn udp_round_trips(town: &Town, to: &str) -> Vec<f64> {
    let web = udp(&town.ns("web"), "0.0.0.0:7000");
    let peer = udp(&town.ns(to), "0.0.0.0:7000");
    let address = (town.ip("web"), 7000);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut buffer = [0; 64];
            for _ in 0..ROUND_TRIPS + WARM_UP {
                let (len, from) = web.recv_from(&mut buffer).expect("a request");
                web.send_to(&buffer[..len], from).expect("a reply");
            }
        });
        timed(|| {
            peer.send_to(&[0; 64], address).expect("a request");
            peer.recv(&mut [0; 64]).expect("a reply");
        })
    })
}

/// The same over an established connection.
fn tcp_round_trips(town: &Town, to: &str) -> Vec<f64> {
    let (mut web, mut peer) = connection(town, to);
    std::thread::scope(|scope| {
        scope.spawn(move || {
            let mut buffer = [0; 64];
            for _ in 0..ROUND_TRIPS + WARM_UP {
                web.read_exact(&mut buffer).expect("a request");
                web.write_all(&buffer).expect("a reply");
            }
        });
        timed(|| {
            peer.write_all(&[0; 64]).expect("a request");
            peer.read_exact(&mut [0; 64]).expect("a reply");
        })
    })
}

fn timed(mut one: impl FnMut()) -> Vec<f64> {
    let mut times = Vec::new();
    for _ in 0..ROUND_TRIPS + WARM_UP {
        let start = Instant::now();
        one();
        times.push(start.elapsed().as_secs_f64() * 1e6);
    }
    times.split_off(WARM_UP)
}

/// Gigabits per second of one TCP stream from web.
fn stream(town: &Town, to: &str, span: Duration) -> f64 {
    let (mut web, mut peer) = connection(town, to);
    std::thread::scope(|scope| {
        scope.spawn(move || {
            let block = vec![0; 256 << 10];
            let start = Instant::now();
            while start.elapsed() < span {
                web.write_all(&block).expect("written");
            }
        });
        let (start, mut bytes, mut buffer) = (Instant::now(), 0u64, vec![0; 256 << 10]);
        loop {
            match peer.read(&mut buffer).expect("read") {
                0 => break,
                len => bytes += len as u64,
            }
        }
        bytes as f64 * 8.0 / 1e9 / start.elapsed().as_secs_f64()
    })
}

/// web's end first.
fn connection(town: &Town, to: &str) -> (TcpStream, TcpStream) {
    let listener = in_namespace(&town.ns(to), || TcpListener::bind("0.0.0.0:7100")).expect("bound");
    let address = (town.ip(to), 7100);
    let web = in_namespace(&town.ns("web"), || TcpStream::connect(address)).expect("connected");
    let (peer, _) = listener.accept().expect("accepted");
    for socket in [&web, &peer] {
        socket.set_nodelay(true).expect("a socket");
        socket.set_read_timeout(Some(PATIENCE)).expect("a socket");
    }
    (web, peer)
}

/// Every packet waits with a stamp of its own; what one costs to take up and to release, if C
/// covers them all at once, and if it does so one by one.
fn release_cost(entries: Option<u16>) -> Value {
    let stamps: Vec<(CountVector, Hlc)> = (1..=u64::from(HELD))
        .map(|n| {
            let vector = (0..entries.unwrap_or(0)).map(|w| (WriterId(w), Seq(n)));
            (vector.collect(), Hlc(if entries.is_some() { 0 } else { n }))
        })
        .collect();
    let kind = classify(0x0800, &[], 0);
    assert!(matches!(kind, Kind::Data { .. }));
    let mut figures = Vec::new();
    for at_once in [true, false] {
        let mut queue = ReleaseQueue::new(HELD as usize, Mode::Pipelined);
        queue.set_gate(GateState::Open);
        let start = Instant::now();
        for (id, (vector, hlc)) in (1..=HELD).zip(&stamps) {
            let packet = Packet { id: PacketId(id), kind, len_bytes: 100 };
            match entries {
                Some(_) => queue.arrive(packet, vector, MonoNanos(0)),
                None => queue.arrive_at(packet, *hlc, MonoNanos(0)),
            };
        }
        let taken_up = start.elapsed();
        assert_eq!(queue.len(), HELD as usize);
        let mut left = 0;
        let start = Instant::now();
        let step = if at_once { HELD as usize } else { 1 };
        for (vector, hlc) in stamps.iter().skip(step - 1).step_by(step) {
            queue.set_committed(vector);
            queue.set_watermark(*hlc);
            queue.release(MonoNanos(1), |_| left += 1);
        }
        let released = start.elapsed();
        assert_eq!(left, HELD);
        let each = |span: Duration| (span.as_secs_f64() * 1e10 / f64::from(HELD)).round() / 10.0;
        figures.push((each(taken_up), each(released)));
    }
    let row = json!({
        "stamp": entries.map_or("hlc".to_owned(), |n| format!("{n} entries")),
        "held_packets": HELD,
        "take_up_ns": figures[0].0,
        "release_at_once_ns": figures[0].1,
        "release_one_by_one_ns": figures[1].1,
    });
    eprintln!("release {row}");
    row
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    (values[values.len() / 2] * 100.0).round() / 100.0
}
