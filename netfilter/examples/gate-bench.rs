//! What the gate costs: packets per second, latency and TCP throughput, for unprotected, covered
//! and uncovered traffic, side by side in one run. Needs root; makes its own namespaces.
//!
//! `gate-bench [SECONDS_PER_FIGURE]` prints a table to standard error and JSON to standard output.
//!
//! | traffic | what happens to a packet |
//! |---|---|
//! | unprotected | there are no rules |
//! | covered | queued, and its stamp is covered when it arrives |
//! | uncovered | P rises every millisecond and C follows a millisecond later: it is held |

#[allow(dead_code, reason = "the tests use more of it")]
#[path = "../tests/netns/lab.rs"]
mod lab;
mod measure;

use lab::{INTERFACE, Lab, PATIENCE, in_namespace, next, udp};
use measure::{percentile, require_namespaces};
use serde_json::{Value, json};
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use tidelock_netfilter::gate::{
    Gate, GateHandle, GroupConfig, InterfaceConfig, MemberConfig, Pending,
};
use tidelock_netfilter::nfqueue::QueueNumber;
use tidelock_netfilter::rules::{Firewall, Topology};
use tidelock_protocol::ids::{Seq, WriterId};
use tidelock_protocol::message::Mode;
use tidelock_protocol::vector::CountVector;

const WRITER: WriterId = WriterId(0);
const QUEUE_LEN: u32 = 1 << 16;
const ROUND_TRIPS: usize = 5_000;
const PORT: u16 = 7000;

#[derive(Clone, Copy, PartialEq)]
enum Traffic {
    Unprotected,
    Covered,
    Uncovered,
}

impl Traffic {
    const ALL: [Traffic; 3] = [Traffic::Unprotected, Traffic::Covered, Traffic::Uncovered];

    fn name(self) -> &'static str {
        match self {
            Traffic::Unprotected => "unprotected",
            Traffic::Covered => "covered",
            Traffic::Uncovered => "uncovered",
        }
    }
}

fn main() {
    require_namespaces("gate-bench");
    let seconds = measure::numbers().next().unwrap_or(3);
    let span = Duration::from_secs(seconds);
    let mut rows = Vec::new();
    let mut filter = String::new();
    eprintln!(
        "{:8} {:12} {:>12} {:>14} {:>14} {:>14} {:>10}",
        "path", "traffic", "packets/s", "round trip us", "p99 us", "release us", "TCP Gb/s"
    );
    for topology in [Topology::Routed, Topology::Bridged] {
        for traffic in Traffic::ALL {
            let bench = Bench::new(topology, traffic);
            if let Some(gate) = &bench.gate {
                filter = gate.gate.firewall().to_string();
            }
            let row = bench.run(span);
            eprintln!(
                "{:8} {:12} {:>12} {:>14} {:>14} {:>14} {:>10}",
                text(&row["path"]),
                text(&row["traffic"]),
                text(&row["packets_per_s"]),
                text(&row["round_trip_us_median"]),
                text(&row["round_trip_us_p99"]),
                text(&row["release_us_median"]),
                text(&row["tcp_gbit_per_s"]),
            );
            rows.push(row);
        }
    }
    println!("{}", json!({ "packet_filter": filter, "seconds": seconds, "rows": rows }));
}

fn text(value: &Value) -> String {
    match value {
        Value::Null => "-".to_owned(),
        Value::String(s) => s.clone(),
        other => other.to_string(),
    }
}

/// The gate in this process, in the host's namespace.
struct Running {
    gate: Gate,
    handle: GateHandle,
    pending: Arc<Pending>,
}

struct Bench {
    lab: Lab,
    traffic: Traffic,
    gate: Option<Running>,
}

impl Bench {
    fn new(topology: Topology, traffic: Traffic) -> Bench {
        let lab = Lab::new(topology);
        let start = || {
            let pending = Arc::new(Pending::new());
            let member = MemberConfig {
                name: "bench".into(),
                interfaces: vec![InterfaceConfig {
                    interface: INTERFACE.into(),
                    topology,
                    queue: QueueNumber(9),
                    queue_len_max: QUEUE_LEN,
                }],
                pending: Arc::clone(&pending),
            };
            let group = GroupConfig {
                name: "bench".into(),
                mode: Mode::Pipelined,
                lease_period_ms: 3_600_000,
                members: vec![member],
                tagging: None,
            };
            let firewall = Firewall::detect("bench").expect("a packet filter");
            let gate = Gate::start(firewall, vec![group]).expect("a gate");
            let handle = gate.handle("bench").expect("the group");
            let now = tidelock_netfilter::now();
            handle.lease_renewed(now);
            Running { gate, handle, pending }
        };
        let gate = (traffic != Traffic::Unprotected).then(|| in_namespace(&lab.host(), start));
        Bench { lab, traffic, gate }
    }

    fn run(self, span: Duration) -> Value {
        let packets_per_s = self.with_tide(|bench| bench.flood(span));
        let tcp = self.with_tide(|bench| bench.stream(span));
        let (round_trips, releases) = match (&self.gate, self.traffic) {
            (Some(gate), Traffic::Uncovered) => (Vec::new(), self.releases(gate)),
            _ => (self.round_trips(), Vec::new()),
        };
        let stats = self.gate.as_ref().map(|gate| gate.gate.members()[0].stats().snapshot());
        let kernel = self.gate.as_ref().map(|gate| {
            let read = || gate.gate.members()[0].kernel_counters().expect("counters");
            in_namespace(&self.lab.host(), read)
        });
        if let Some(gate) = self.gate {
            in_namespace(&self.lab.host(), || gate.gate.stop().expect("an end"));
        }
        json!({
            "path": match self.lab.topology() {
                Topology::Routed => "routed",
                Topology::Bridged => "bridged",
            },
            "traffic": self.traffic.name(),
            "packets_per_s": packets_per_s,
            "round_trip_us_median": percentile(&round_trips, 50),
            "round_trip_us_p99": percentile(&round_trips, 99),
            "release_us_median": percentile(&releases, 50),
            "release_us_p99": percentile(&releases, 99),
            "tcp_gbit_per_s": tcp,
            "held_packets": stats.as_ref().map(|s| s.released_packets),
            "passed_covered": stats.as_ref().map(|s| s.passed_covered),
            "dropped_by_kernel": kernel.map(|k| k.dropped_full + k.dropped_socket),
        })
    }

    /// Lets P rise and C follow meanwhile, if the traffic is to be uncovered.
    fn with_tide<T>(&self, measure: impl FnOnce(&Bench) -> T) -> T {
        let gate = match &self.gate {
            Some(gate) if self.traffic == Traffic::Uncovered => gate,
            _ => return measure(self),
        };
        let ended = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !ended.load(Ordering::SeqCst) {
                    let before = gate.pending.read();
                    gate.pending.publish(WRITER, before.get(WRITER).next());
                    std::thread::sleep(Duration::from_millis(1));
                    gate.handle.set_committed(&before);
                }
                gate.handle.set_committed(&gate.pending.read());
            });
            let result = measure(self);
            ended.store(true, Ordering::SeqCst);
            result
        })
    }

    fn to_client(&self) -> SocketAddr {
        SocketAddr::new(self.lab.client_ip().parse().expect("an address"), PORT)
    }

    /// Small datagrams as fast as the guest can send them; counted where they arrive.
    fn flood(&self, span: Duration) -> f64 {
        // Nobody reads it: what matters is that the packet got to the client.
        let _client = udp(&self.lab.client(), "0.0.0.0:7000");
        let guest = udp(&self.lab.guest(), "0.0.0.0:0");
        measure::flood(&guest, self.to_client(), &self.lab.client(), "c0", span)
    }

    /// Gigabits per second of one TCP stream from the guest to the client.
    fn stream(&self, span: Duration) -> f64 {
        let ends = measure::connection(&self.lab.guest(), &self.lab.client(), self.to_client());
        measure::stream(ends, span)
    }

    /// Microseconds from the client to the guest and back.
    fn round_trips(&self) -> Vec<f64> {
        let client = udp(&self.lab.client(), "0.0.0.0:0");
        let guest = udp(&self.lab.guest(), "0.0.0.0:7000");
        let address = SocketAddr::new([10, 71, 0, 2].into(), PORT);
        measure::udp_round_trips(&client, &guest, address, ROUND_TRIPS)
    }

    /// Microseconds from the moment that C is told to the packet's arrival at the client.
    fn releases(&self, gate: &Running) -> Vec<f64> {
        let client = udp(&self.lab.client(), "0.0.0.0:7000");
        let guest = udp(&self.lab.guest(), "0.0.0.0:0");
        let stats = Arc::clone(gate.gate.members()[0].stats());
        let mut seq = gate.pending.read().get(WRITER);
        let mut times = Vec::new();
        for _ in 0..ROUND_TRIPS / 5 {
            seq = seq.next();
            gate.pending.publish(WRITER, Seq(seq.0));
            guest.send_to(&[0; 64], self.to_client()).expect("a reply");
            let limit = Instant::now() + PATIENCE;
            while stats.snapshot().held_packets == 0 {
                assert!(Instant::now() < limit, "the packet is not held");
                std::thread::yield_now();
            }
            let start = Instant::now();
            gate.handle.set_committed(&CountVector::of(WRITER, seq));
            next(&client);
            times.push(start.elapsed().as_secs_f64() * 1e6);
        }
        times
    }
}
