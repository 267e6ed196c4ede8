//! A gate without a daemon, driven by lines on standard input: for this crate's tests and
//! benchmarks, and for trying the gate by hand.
//!
//! ```text
//! start member=M interface=I topology=routed|bridged queue=N len=N mode=M lease_ms=N backend=B|any
//! pending WRITER SEQ        commit WRITER SEQ
//! tide DELAY_MS             P rises every millisecond, C follows DELAY_MS later; 0: C = P
//! lease                     mode sync|pipelined|async        fence
//! stats                     verify         stop
//! ```
//! Each line is answered by one line, `ok ...` or `error ...`, once the gate acts on it. The end
//! of the input ends the process as a crash does: the rules stay.

use std::collections::HashMap;
use std::error::Error;
use std::io::{BufRead, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;
use tidelock_netfilter::gate::{
    Gate, GateHandle, GroupConfig, MemberConfig, Pending, RulesAtStop, RulesLeft,
};
use tidelock_netfilter::nfqueue::QueueNumber;
use tidelock_netfilter::rules::{Firewall, Topology};
use tidelock_protocol::ids::{Seq, WriterId};
use tidelock_protocol::vector::CountVector;

type Answer = Result<String, Box<dyn Error>>;

const GROUP: &str = "drive";

fn main() {
    let mut drive = None;
    for line in std::io::stdin().lock().lines() {
        let Ok(line) = line else { break };
        let words: Vec<&str> = line.split_whitespace().collect();
        let answer = match (words.as_slice(), &mut drive) {
            (["start", options @ ..], None) => start(options).map(|(started, said)| {
                drive = Some(started);
                said
            }),
            (["stop"], Some(_)) => drive.take().map_or(Ok(String::new()), Drive::stop),
            (words, Some(drive)) => drive.command(words),
            (_, None) => Err("start comes first".into()),
        };
        let text = match answer {
            Ok(said) => format!("ok {said}"),
            Err(e) => format!("error {}", chain(e.as_ref())),
        };
        // A driver that is gone needs no answers.
        if writeln!(std::io::stdout(), "{}", text.trim_end()).is_err() {
            break;
        }
    }
    // Not by return: that would run destructors, and a crash does not.
    std::process::exit(0);
}

fn chain(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(e) = source {
        text = format!("{text}: {e}");
        source = e.source();
    }
    text
}

struct Drive {
    gate: Gate,
    handle: GateHandle,
    pending: Arc<Pending>,
    tide: Option<(Arc<AtomicBool>, JoinHandle<()>)>,
}

fn start(options: &[&str]) -> Result<(Drive, String), Box<dyn Error>> {
    let options: HashMap<&str, &str> = options.iter().filter_map(|o| o.split_once('=')).collect();
    let get = |name: &str| options.get(name).copied().ok_or(format!("{name}= is missing"));
    let backend = get("backend")?;
    let firewall = Firewall::detect_only(|name| backend == "any" || backend == name)?;
    let pending = Arc::new(Pending::new());
    let member = MemberConfig {
        name: get("member")?.to_owned(),
        interface: get("interface")?.to_owned(),
        topology: match get("topology")? {
            "routed" => Topology::Routed,
            "bridged" => Topology::Bridged,
            _ => return Err("topology is routed or bridged".into()),
        },
        queue: QueueNumber(get("queue")?.parse()?),
        queue_len_max: get("len")?.parse()?,
        pending: Arc::clone(&pending),
    };
    let group = GroupConfig {
        name: GROUP.to_owned(),
        mode: get("mode")?.parse()?,
        lease_period_ms: get("lease_ms")?.parse()?,
        members: vec![member],
    };
    let gate = Gate::start(firewall, vec![group])?;
    let notes = gate.members()[0].installed().notes.join("; ");
    let said = format!("backend={} notes={notes}", gate.firewall().name());
    let handle = gate.handle(GROUP).ok_or("the group is there")?;
    Ok((Drive { gate, handle, pending, tide: None }, said))
}

impl Drive {
    fn command(&mut self, words: &[&str]) -> Answer {
        match words {
            ["pending", writer, seq] => {
                self.pending.publish(WriterId(writer.parse()?), Seq(seq.parse()?));
            }
            ["commit", writer, seq] => {
                let c = CountVector::of(WriterId(writer.parse()?), Seq(seq.parse()?));
                self.handle.set_committed(&c);
            }
            ["tide", delay_ms] => self.tide(delay_ms.parse()?),
            ["lease"] => {
                let now = tidelock_netfilter::now();
                self.handle.lease_renewed(now, now);
            }
            ["mode", mode] => self.handle.set_mode(mode.parse()?),
            ["fence"] => self.handle.fence(),
            ["stats"] => return self.stats(),
            ["verify"] => self.gate.verify_rules()?,
            _ => return Err("unknown command".into()),
        }
        // Without held packets the thread need not hear of a new C at once.
        self.handle.wake();
        while !self.handle.is_applied() {
            if !self.gate.is_running() {
                return Err("the gate's thread has ended".into());
            }
            std::thread::yield_now();
        }
        Ok(String::new())
    }

    fn end_tide(&mut self) {
        if let Some((stop, thread)) = self.tide.take() {
            stop.store(true, Ordering::SeqCst);
            // It only ever ends by this flag.
            let _ = thread.join();
        }
    }

    fn tide(&mut self, delay_ms: u64) {
        self.end_tide();
        if delay_ms == 0 {
            self.handle.set_committed(&self.pending.read());
            return;
        }
        let stop = Arc::new(AtomicBool::new(false));
        let (pending, handle, flag) =
            (Arc::clone(&self.pending), self.handle.clone(), Arc::clone(&stop));
        let thread = std::thread::spawn(move || {
            let first = pending.read().get(WriterId(0)).0;
            for tick in 1.. {
                if flag.load(Ordering::SeqCst) {
                    return;
                }
                pending.publish(WriterId(0), Seq(first + tick));
                if tick > delay_ms {
                    let c = CountVector::of(WriterId(0), Seq(first + tick - delay_ms));
                    handle.set_committed(&c);
                }
                std::thread::sleep(Duration::from_millis(1));
            }
        });
        self.tide = Some((stop, thread));
    }

    fn stats(&self) -> Answer {
        let member = &self.gate.members()[0];
        let s = member.stats().snapshot();
        let kernel = member.kernel_counters()?;
        Ok(format!(
            "held_packets={} held_bytes={} released_packets={} released_bytes={} \
             passed_covered={} passed_pure_acks={} passed_never_held={} passed_async={} \
             refused={} overruns={} late_verdicts={} unread={} longest_hold_ns={} shut={} \
             async={} kernel_queued={} kernel_dropped_full={} kernel_dropped_socket={}",
            s.held_packets,
            s.held_bytes,
            s.released_packets,
            s.released_bytes,
            s.passed_covered,
            s.passed_pure_acks,
            s.passed_never_held,
            s.passed_async,
            s.refused,
            s.socket_overruns,
            s.late_verdicts,
            s.unread,
            s.hold_ns_longest,
            u8::from(s.shut.is_some()),
            u8::from(s.async_since.is_some()),
            kernel.queued,
            kernel.dropped_full,
            kernel.dropped_socket,
        ))
    }

    fn stop(mut self) -> Answer {
        self.end_tide();
        let stopped = self.gate.stop(RulesAtStop::RemoveWhenSettled)?;
        let member = stopped.into_iter().next().ok_or("there is one member")?;
        Ok(match member.rules {
            RulesLeft::Removed => format!("removed dropped={}", member.dropped_packets),
            RulesLeft::InPlace(why) => format!("left dropped={} {why}", member.dropped_packets),
            RulesLeft::Failed(e) => return Err(e.into()),
        })
    }
}
