//! What tags and the kernel programs cost, side by side in one run. Needs root; makes its own
//! namespaces, and uses `ping` and `iperf3`.
//!
//! `tagging-bench members|outside [ROUNDS] [MILLISECONDS_PER_FLOOD]` prints JSON: for each path the
//! figures of every turn, and what one run of each kernel program takes by the kernel's own count.
//! `tagging-bench flood|stream PATH db|client GUARD MILLISECONDS` does only that, for a profiler to look at.
//!
//! Guests are namespaces, on cables of two kinds: a pair of veths, and taps between which frames are carried as
//! QEMU carries those of a VM.
//!
//! | traffic | guards that take turns |
//! |---|---|
//! | `members`: between two members of a group | no gate; vector tags of four writers; HLC tags; no tags, because all is covered |
//! | `outside`: from a member to the outside, all of it covered | no gate; the kernel programs; the queue |
//!
//! All guards of a path stand ready at once, each in a town of its own, and their turns are short: turn k of one ran
//! beside turn k of the others, each as often in each place. Every few rounds the towns are made anew.

#[allow(dead_code, reason = "the tests use more of it")]
#[path = "../tests/netns/lab.rs"]
mod lab;
mod measure;
#[allow(dead_code, reason = "the tests use more of it")]
#[path = "../tests/netns/town.rs"]
mod town;

use lab::{in_namespace, udp};
use measure::{connection, percentile, programs, require_namespaces};
use serde_json::{Value, json};
use std::net::{SocketAddr, TcpStream, UdpSocket};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;
use tidelock_netfilter::gate::{
    Gate, GroupConfig, InterfaceConfig, MemberConfig, Pending, TaggedMember, TaggingConfig,
};
use tidelock_netfilter::nfqueue::QueueNumber;
use tidelock_netfilter::rules::{Firewall, Topology};
use tidelock_protocol::hlc::Hlc;
use tidelock_protocol::ids::{Seq, WriterId};
use tidelock_protocol::limits::WRITERS_MAX;
use tidelock_protocol::message::Mode;
use tidelock_protocol::tag::{Form, TagKey, TagKeys, TagTerms};
use tidelock_protocol::vector::CountVector;
use town::{Plan, Town};

const TRIPS: usize = 1_000;
const PINGS: usize = 5_000;
const PORT: u16 = 7000;
/// What one turn of `iperf3` sends.
const STREAM: &str = "400M";
/// A burst of the stream whose bursts take turns, and how many there are in a round.
const BURST_BYTES: u64 = 16 << 20;
const BURSTS: usize = 48;
/// Then new towns are made: where their rules, programs and packets lie in memory is a matter of luck, which may be worth
/// more than what is to be told.
const ROUNDS_OF_A_TOWN: usize = 4;
/// What a fast network between hosts takes.
const PACE: &str = "-b 10G";
const VECTOR: Form = Form::Vector { writers: 4 };

#[derive(Clone, Copy, Debug, PartialEq)]
enum Guard {
    None,
    Queue,
    /// Writes are under way: P is ahead of C.
    Tags(Form),
    /// Nobody writes: C covers P.
    Covered(Form),
}

impl Guard {
    const MEMBERS: [Guard; 4] =
        [Guard::None, Guard::Tags(VECTOR), Guard::Tags(Form::Hlc), Guard::Covered(VECTOR)];
    const OUTSIDE: [Guard; 3] = [Guard::None, Guard::Covered(VECTOR), Guard::Queue];

    fn name(self) -> &'static str {
        match self {
            Guard::None => "none",
            Guard::Queue => "queue",
            Guard::Tags(Form::Vector { .. }) => "vector",
            Guard::Tags(Form::Hlc) => "hlc",
            Guard::Covered(_) => "covered",
        }
    }
}

fn main() {
    require_namespaces("tagging-bench");
    let words: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    let number = |nth: usize, usual: u64| words.get(nth).map_or(Some(usual), |w| w.parse().ok());
    let done = match words.first() {
        Some(&"members") => compare("db", Guard::MEMBERS, number(1, 9), number(2, 200)),
        Some(&"outside") => compare("client", Guard::OUTSIDE, number(1, 9), number(2, 200)),
        Some(&("flood" | "stream")) => load(&words),
        _ => None,
    };
    if done.is_none() {
        eprintln!("usage: tagging-bench members|outside [ROUNDS] [MILLISECONDS_PER_FLOOD]");
        eprintln!("       tagging-bench flood|stream PATH Veth|Tap db|client GUARD MILLISECONDS");
        std::process::exit(2);
    }
}

/// How a guest is joined to its host.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Cable {
    Veth,
    Tap,
}

impl Cable {
    const ALL: [Cable; 2] = [Cable::Veth, Cable::Tap];
}

/// All paths, one after the other.
fn compare<const N: usize>(
    to: &'static str,
    guards: [Guard; N],
    rounds: Option<u64>,
    millis: Option<u64>,
) -> Option<()> {
    let (rounds, span) = (rounds?, Duration::from_millis(millis?));
    let path = |(cable, plan)| {
        eprintln!("{plan:?} to {to}, {cable:?}");
        take_turns(plan, cable, to, guards, rounds as usize, span)
    };
    let paths = Cable::ALL.into_iter().flat_map(|cable| Plan::ALL.map(|plan| (cable, plan)));
    println!("{}", json!({ "rounds": rounds, "paths": paths.map(path).collect::<Vec<_>>() }));
    Some(())
}

/// One flood or stream, for a profiler to look at.
fn load(words: &[&str]) -> Option<()> {
    let &[what, path, cable, to, guard, millis] = words else { return None };
    let plan = Plan::ALL.into_iter().find(|plan| format!("{plan:?}") == path)?;
    let cable = Cable::ALL.into_iter().find(|known| format!("{known:?}") == cable)?;
    let to = ["db", "client"].into_iter().find(|known| *known == to)?;
    let guard = Guard::MEMBERS.into_iter().chain(Guard::OUTSIDE).find(|g| g.name() == guard)?;
    let span = Duration::from_millis(millis.parse().ok()?);
    let site = Site::new(plan, cable, to, guard);
    eprintln!("the load begins");
    if what == "flood" {
        println!("{}", json!({ "packets_per_s": site.flood(span) }));
    } else {
        let rounds = (span.as_millis() / 4) as usize;
        let [rates] = in_bursts([&site], rounds);
        println!("{}", json!({ "gbit_per_s": measure::percentile(&rates, 50) }));
    }
    site.close();
    Some(())
}

fn take_turns<const N: usize>(
    plan: Plan,
    cable: Cable,
    to: &'static str,
    guards: [Guard; N],
    rounds: usize,
    span: Duration,
) -> Value {
    let set_up = || guards.map(|guard| Site::new(plan, cable, to, guard));
    let mut sites = set_up();
    let mut turns = [const { Vec::<Value>::new() }; N];
    for round in 0..rounds {
        if round > 0 && round.is_multiple_of(ROUNDS_OF_A_TOWN) {
            sites.into_iter().for_each(Site::close);
            sites = set_up();
        }
        let rates = in_bursts(sites.each_ref(), BURSTS);
        for nth in measure::order(N, round) {
            turns[nth].push(sites[nth].turn(&rates[nth], span));
        }
    }
    let filter = sites[1].gates[0].1.members()[0].installed().backend.clone();
    let row = |((guard, site), turns): ((Guard, Site), Vec<Value>)| {
        let row = json!({
            "guard": guard.name(),
            "turns": turns,
            "program_ns": site.programs(),
            "counted": site.counted(),
        });
        site.close();
        row
    };
    let rows: Vec<Value> = guards.into_iter().zip(sites).zip(turns).map(row).collect();
    json!({
        "path": format!("{plan:?}"),
        "cable": format!("{cable:?}"),
        "packet_filter": filter,
        "guards": rows,
    })
}

/// Gigabits per second of each burst of a stream on each site. Burst k of one stands beside burst k of the others: a
/// machine's memory may be faster or slower from one second to the next by more than what is to be told. All that a
/// packet meets runs on one core.
fn in_bursts<const N: usize>(sites: [&Site; N], rounds: usize) -> [Vec<f64>; N] {
    let keep_carriers_on = |core| {
        let carriers = sites.iter().flat_map(|site| &site.carriers);
        carriers.for_each(|carrier| measure::keep_on(*carrier, core));
    };
    keep_carriers_on(Some(0));
    // New ones each time: what the kernel makes of a window may be a matter of luck, and it stays with a connection.
    let connections = sites.map(|site| connected(&site.town, site.to, PORT + 3));
    connections.iter().for_each(measure::fixed_window);
    let took = measure::streams_in_turn(&connections.each_ref(), rounds, BURST_BYTES);
    keep_carriers_on(None);
    std::array::from_fn(|nth| took[nth].iter().map(gbit_per_s).collect())
}

/// A connection from the guarded end to another one.
fn connected(town: &Town, to: &str, port: u16) -> (TcpStream, TcpStream) {
    connection(&town.ns("web"), &town.ns(to), SocketAddr::new(town.ip(to), port))
}

/// Of a burst.
fn gbit_per_s(took: &Duration) -> f64 {
    measure::rounded((BURST_BYTES * 8) as f64 / took.as_secs_f64() / 1e9)
}

/// A town with a guard, and what is measured with: `web` is the guarded end of all traffic.
struct Site {
    town: Town,
    cable: Cable,
    /// The threads that carry frames between taps.
    carriers: Vec<libc::pid_t>,
    to: &'static str,
    gates: Vec<(String, Gate)>,
    web: UdpSocket,
    peer: UdpSocket,
    /// Where the flood goes; nobody reads it.
    _sink: UdpSocket,
    tcp: (TcpStream, TcpStream),
    iperf3: Child,
}

impl Site {
    fn new(plan: Plan, cable: Cable, to: &'static str, guard: Guard) -> Site {
        let town = Town::new(plan);
        let mut carriers = Vec::new();
        if cable == Cable::Tap {
            for member in ["web", "db"] {
                town.remake_as(member, |host, port, guest| {
                    carriers.extend(measure::taps::connect(host, port, guest, "e0"));
                });
            }
        }
        // Room for the tag, so that segments are as large with it as without.
        town.widen(1600);
        let gates = start(&town, guard);
        let bound = |who: &str, port: u16| udp(&town.ns(who), &format!("0.0.0.0:{port}"));
        let (web, peer, _sink) = (bound("web", PORT), bound(to, PORT), bound(to, PORT + 1));
        let tcp = connected(&town, to, PORT);
        let mut iperf3 = Command::new("ip");
        // It ends with this process, however that ends.
        iperf3.args(["netns", "exec", &town.ns(to), "setpriv", "--pdeathsig", "KILL"]);
        iperf3.args(["iperf3", "-s", "-p", "7002"]).stdout(Stdio::null()).stderr(Stdio::null());
        let iperf3 = iperf3.spawn().expect("iperf3 starts");
        let site = Site { town, cable, carriers, to, gates, web, peer, _sink, tcp, iperf3 };
        let listening = || site.town.on(to, "ss -Htln sport = :7002");
        lab::until("iperf3 listens", || !listening().is_empty());
        site
    }

    fn turn(&self, gbit_per_s: &[f64], span: Duration) -> Value {
        let mut figures = json!({
            "gbit_per_s": gbit_per_s,
            "paced_gbit_per_s": self.paced(),
            "packets_per_s": self.flood(span),
        });
        if self.cable == Cable::Veth {
            let trips = self.round_trips();
            figures.as_object_mut().expect("figures").extend(trips);
        }
        figures
    }

    /// On taps they would tell when threads are woken, and not what the kernel does on the way.
    fn round_trips(&self) -> serde_json::Map<String, Value> {
        let of = |who: &str| SocketAddr::new(self.town.ip(who), PORT);
        let udp = measure::udp_round_trips(&self.peer, &self.web, of("web"), TRIPS);
        let tcp = measure::tcp_round_trips(&self.tcp.1, &self.tcp.0, TRIPS);
        let trips = json!({
            "ping_us": self.ping(),
            "udp_us": percentile(&udp, 50),
            "udp_p99_us": percentile(&udp, 99),
            "tcp_us": percentile(&tcp, 50),
            "tcp_p99_us": percentile(&tcp, 99),
        });
        trips.as_object().expect("figures").clone()
    }

    fn flood(&self, span: Duration) -> f64 {
        let sink = SocketAddr::new(self.town.ip(self.to), PORT + 1);
        measure::flood(&self.web, sink, &self.town.ns(self.to), "e0", span)
    }

    /// Microseconds from one request of a flooding `ping` to the next: it sends one when it has
    /// the answer to the last. (The round trips that it tells itself are in whole microseconds.)
    fn ping(&self) -> f64 {
        let command = format!("taskset -c 0 ping -q -f -c {PINGS} {}", self.town.ip("web"));
        let said = self.town.on(self.to, &command);
        let took =
            said.split_once(" 0% packet loss, time ").and_then(|(_, rest)| rest.split_once("ms"));
        let took = took.and_then(|(millis, _)| millis.parse::<f64>().ok());
        measure::rounded(took.unwrap_or_else(|| panic!("ping said {said}")) * 1e3 / PINGS as f64)
    }

    /// Gigabits per second that arrived of a stream that is held to what a fast network takes, as `iperf3` tells.
    fn paced(&self) -> f64 {
        // No congestion control whose timer decides (BBR is usual here).
        let options = format!("-J -p 7002 -n {STREAM} -C cubic {PACE}");
        let command = format!("iperf3 {options} -c {}", self.town.ip(self.to));
        let said: Value = serde_json::from_str(&self.town.on("web", &command)).expect("JSON");
        let bits = said["end"]["sum_received"]["bits_per_second"].as_f64();
        measure::rounded(bits.unwrap_or_else(|| panic!("iperf3 said {said}")) / 1e9)
    }

    /// Nanoseconds that each run of a program takes in round trips: measured apart, since counting
    /// costs something too.
    fn programs(&self) -> Value {
        let of = |who: &str| SocketAddr::new(self.town.ip(who), PORT);
        let trips = || {
            measure::udp_round_trips(&self.peer, &self.web, of("web"), TRIPS);
        };
        json!(programs::times(trips))
    }

    /// What the programs did with the packets.
    fn counted(&self) -> Value {
        let (mut tagged, mut covered, mut merged) = (0, 0, 0);
        for member in self.gates.iter().flat_map(|(_, gate)| gate.members()) {
            if let Some(stats) = member.tagging().stats() {
                let stats = stats.expect("counters");
                tagged += stats.tagged;
                covered += stats.covered;
                merged += stats.merged;
            }
        }
        json!({ "tagged": tagged, "covered": covered, "merged": merged })
    }

    fn close(mut self) {
        self.iperf3.kill().expect("iperf3 ends");
        self.iperf3.wait().expect("iperf3 has ended");
        for (host, gate) in self.gates {
            in_namespace(&host, || gate.stop().expect("an end"));
        }
    }
}

/// A member's name, interface and queue.
type Guarded = (&'static str, &'static str, u16);

/// Open gates that have nothing to hold.
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
            Guard::Tags(form) | Guard::Covered(form) => {
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
        let pending: Vec<_> = members.iter().map(|_| Arc::new(Pending::new())).collect();
        let member =
            |((name, interface, queue), pending): (&Guarded, &Arc<Pending>)| MemberConfig {
                name: (*name).to_owned(),
                interfaces: vec![InterfaceConfig {
                    interface: (*interface).to_owned(),
                    topology,
                    queue: QueueNumber(*queue),
                    queue_len_max: 1 << 16,
                }],
                pending: Arc::clone(pending),
            };
        let group = GroupConfig {
            name: "bench".into(),
            mode: Mode::Pipelined,
            lease_period_ms: 3_600_000,
            members: members.iter().zip(&pending).map(member).collect(),
            tagging,
        };
        let host = town.ns(host);
        let gate = in_namespace(&host, || {
            let firewall = Firewall::detect("bench").expect("a packet filter");
            Gate::start(firewall, vec![group]).expect("a gate")
        });
        let handle = gate.handle("bench").expect("the group");
        let reachable = (0..WRITERS_MAX).map(|writer| (WriterId(writer), Seq(u64::MAX))).collect();
        handle.set_tag_terms(&TagTerms { keys: TagKeys::only(TagKey([1, 2])), reachable });
        handle.set_committed(&CountVector::new());
        let now = tidelock_netfilter::now();
        handle.lease_renewed(now);
        if matches!(guard, Guard::Tags(_)) {
            pending.iter().for_each(|p| p.publish_at(WriterId(0), Seq(1), Hlc(1)));
        }
        (host, gate)
    };
    hosts.iter().map(one).collect()
}
