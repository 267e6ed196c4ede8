//! A gate without a daemon, driven by lines on standard input: for this crate's tests and
//! benchmarks, and for trying the gate by hand.
//!
//! ```text
//! start member=M interface=I topology=routed|bridged queue=N len=N mode=M lease_ms=N backend=B|any
//!       [tagging=WRITERS|hlc members=NAME@IP,IP/NAME@IP pin=DIRECTORY [mtu=N] [option=N] [strips=yes]
//!       [off=yes] [floor=yes] [anew=NAME]]
//!                           several members: commas between names, interfaces, queue numbers;
//!                           several interfaces of one member: + between interfaces, queue numbers
//! pending WRITER SEQ [HLC]  commit WRITER SEQ        watermark HLC
//! on MEMBER COMMAND         pending, stats or tags of another member than the first
//! tags                      P, and what the kernel programs have done
//! tide DELAY_MS             P rises every millisecond, C follows DELAY_MS later; 0: C = P
//! lease                     mode sync|pipelined|async        fence
//! stats                     verify         stop
//! remove member=M interface=I queue=N pin=DIRECTORY [nth=N]
//!                           takes away the rules and programs that a gate has left
//! complete                  P names what the guest knows, after floor=yes or a mode async
//! contact no|yes            the backup may count the member as gone; it knows better
//! look                      follows the interfaces; answers whose P is not complete any more
//! rules                     follows the rules: in_place, put_back or failing
//! ```
//! Each line is answered by one line, `ok ...` or `error ...`, once the gate acts on it. The end
//! of the input ends the process as a crash does: the rules stay.

use std::collections::HashMap;
use std::error::Error;
use std::io::{BufRead, Write};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;
use tidelock_netfilter::gate::{
    EndedGate, Gate, GateHandle, GroupConfig, Hooks, InterfaceConfig, MemberConfig, MemberTagging,
    Pending, RulesFound, TaggedMember, TaggingConfig, TaggingSwitch,
};
use tidelock_netfilter::nfqueue::QueueNumber;
use tidelock_netfilter::rules::{Firewall, Topology};
use tidelock_protocol::hlc::Hlc;
use tidelock_protocol::ids::{Seq, WriterId};
use tidelock_protocol::limits::WRITERS_MAX;
use tidelock_protocol::tag::{Form, TagKey, TagKeys, TagTerms};
use tidelock_protocol::vector::CountVector;

type Answer = Result<String, Box<dyn Error>>;

/// What a backup would tell: tests seal with it, too.
const TAG_KEY: TagKey = TagKey([5, 6]);
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
            (["remove", options @ ..], None) => remove(options),
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
    /// Of the member of each interface, in the order of the gate's.
    pending: Vec<Arc<Pending>>,
    tide: Option<(Arc<AtomicBool>, JoinHandle<()>)>,
}

fn start(options: &[&str]) -> Result<(Drive, String), Box<dyn Error>> {
    let options: HashMap<&str, &str> = options.iter().filter_map(|o| o.split_once('=')).collect();
    let get = |name: &str| options.get(name).copied().ok_or(format!("{name}= is missing"));
    let backend = get("backend")?;
    let firewall = Firewall::detect_only("drive", |name| backend == "any" || backend == name)?;
    let topology = match get("topology")? {
        "routed" => Topology::Routed,
        "bridged" => Topology::Bridged,
        _ => return Err("topology is routed or bridged".into()),
    };
    let mut members = Vec::new();
    let (names, interfaces) = (get("member")?.split(','), get("interface")?.split(','));
    for ((name, interface), queue) in names.zip(interfaces).zip(get("queue")?.split(',')) {
        let queue_len_max = get("len")?.parse()?;
        let interfaces = interface.split('+').zip(queue.split('+')).map(|(interface, queue)| {
            let (interface, queue) = (interface.to_owned(), QueueNumber(queue.parse()?));
            Ok(InterfaceConfig { interface, topology, queue, queue_len_max })
        });
        let interfaces = interfaces.collect::<Result<_, std::num::ParseIntError>>()?;
        let pending = Arc::new(Pending::new());
        members.push(MemberConfig { name: name.to_owned(), interfaces, pending });
    }
    let pending = members
        .iter()
        .flat_map(|member| member.interfaces.iter().map(|_| Arc::clone(&member.pending)))
        .collect();
    let group = GroupConfig {
        name: GROUP.to_owned(),
        mode: get("mode")?.parse()?,
        lease_period_ms: get("lease_ms")?.parse()?,
        members,
        tagging: tagging(&options)?,
    };
    let gate = Gate::start(firewall, vec![group])?;
    let installed = gate.members()[0].installed();
    let (backend, notes) = (&installed.backend, installed.notes.join("; "));
    let found: Vec<&str> = gate
        .members()
        .iter()
        .map(|member| match member.tagging() {
            MemberTagging::On(tags) if tags.found_pending() => "found",
            MemberTagging::On(_) => "new",
            MemberTagging::Off => "off",
            MemberTagging::Unavailable(_) => "unavailable",
        })
        .collect();
    let said = format!("backend={backend} tagging={} notes={notes}", found.join(","));
    let handle = gate.handle(GROUP).ok_or("the group is there")?;
    let reachable = (0..WRITERS_MAX).map(|writer| (WriterId(writer), Seq(u64::MAX))).collect();
    handle.set_tag_terms(&TagTerms { keys: TagKeys::only(TAG_KEY), reachable });
    Ok((Drive { gate, handle, pending, tide: None }, said))
}

fn remove(options: &[&str]) -> Answer {
    let options: HashMap<&str, &str> = options.iter().filter_map(|o| o.split_once('=')).collect();
    let get = |name: &str| options.get(name).copied().ok_or(format!("{name}= is missing"));
    let left = EndedGate {
        group: GROUP,
        member: get("member")?,
        nth: options.get("nth").map_or(Ok(0), |nth| nth.parse())?,
        interface: get("interface")?,
        queue: QueueNumber(get("queue")?.parse()?),
        pin_directory: Path::new(get("pin")?),
    };
    left.remove(&mut Firewall::detect("drive")?)?;
    Ok(String::new())
}

fn tagging(options: &HashMap<&str, &str>) -> Result<Option<TaggingConfig>, Box<dyn Error>> {
    let Some(form) = options.get("tagging") else { return Ok(None) };
    let form = match *form {
        "hlc" => Form::Hlc,
        writers => Form::Vector { writers: writers.parse()? },
    };
    let mut members = Vec::new();
    for member in options.get("members").ok_or("members= is missing")?.split('/') {
        let (name, addresses) = member.split_once('@').ok_or("a member is NAME@IP,IP")?;
        let addresses = addresses.split(',').filter(|address| !address.is_empty());
        let addresses = addresses.map(str::parse).collect::<Result<_, _>>()?;
        members.push(TaggedMember { name: name.to_owned(), addresses });
    }
    let mut config = TaggingConfig::new(form, Vec::new(), members);
    config.pin_directory = options.get("pin").ok_or("pin= is missing")?.into();
    config.path_mtu = options.get("mtu").map(|mtu| mtu.parse()).transpose()?;
    if let Some(option) = options.get("option") {
        config.ipv4_option = option.parse()?;
    }
    config.path_strips_options = options.contains_key("strips");
    config.await_floor = options.contains_key("floor");
    config.begun_anew = options.get("anew").map(|name| (*name).to_owned()).into_iter().collect();
    if options.contains_key("clsact") {
        config.hooks = Hooks::Clsact;
    }
    if options.contains_key("off") {
        config.switch = TaggingSwitch::OffForADemonstration;
    }
    Ok(Some(config))
}

impl Drive {
    fn command(&mut self, words: &[&str]) -> Answer {
        let (nth, words) = match words {
            ["on", name, words @ ..] => {
                let nth = self.gate.members().iter().position(|member| member.port() == *name);
                (nth.ok_or("no such member")?, words)
            }
            words => (0, words),
        };
        match words {
            ["pending", writer, seq] => {
                self.pending[nth].publish(WriterId(writer.parse()?), Seq(seq.parse()?));
            }
            ["pending", writer, seq, hlc] => {
                let (writer, seq) = (WriterId(writer.parse()?), Seq(seq.parse()?));
                self.pending[nth].publish_at(writer, seq, Hlc(hlc.parse()?));
            }
            ["commit", writer, seq] => {
                let c = CountVector::of(WriterId(writer.parse()?), Seq(seq.parse()?));
                self.handle.set_committed(&c);
            }
            ["watermark", hlc] => self.handle.set_watermark(Hlc(hlc.parse()?)),
            ["tide", delay_ms] => self.tide(delay_ms.parse()?),
            ["lease"] => {
                let now = tidelock_netfilter::now();
                self.handle.lease_renewed(now);
            }
            ["mode", mode] => self.handle.set_mode(mode.parse()?),
            ["fence"] => self.handle.fence(),
            ["stats"] => return self.stats(nth),
            ["tags"] => return self.tags(nth),
            ["contact", "no"] => self.pending[nth].await_contact(),
            ["contact", "yes"] => self.pending[nth].has_contact(),
            ["complete"] => {
                let mark = self.handle.awaits_floor(&self.pending[nth]).ok_or("it is complete")?;
                self.handle.complete(&self.pending[nth], mark);
            }
            ["look"] => return Ok(self.gate.follow_interfaces().join(",")),
            ["rules"] => {
                let found = match self.gate.follow_rules() {
                    RulesFound::InPlace => "in_place",
                    RulesFound::PutBack => "put_back",
                    RulesFound::Failing => "failing",
                };
                return Ok(found.to_owned());
            }
            ["doubt"] => self.gate.rules_doubt().doubt(),
            ["verify"] => self.gate.verify_rules()?,
            _ => return Err("unknown command".into()),
        }
        // Without held packets the thread need not hear of a new C at once.
        self.handle.look_again();
        while !self.handle.is_applied() {
            if !self.gate.is_running() {
                return Err("the gate's thread has ended".into());
            }
            std::thread::yield_now();
        }
        Ok(String::new())
    }

    fn tags(&self, nth: usize) -> Answer {
        let stats = self.gate.members()[nth].tagging().stats().ok_or("no tagging")??;
        let p = self.pending[nth].read();
        let entries = (0..4).map(|w| format!("p{w}={} ", p.get(WriterId(w)))).collect::<String>();
        let counters: Vec<String> = stats.named().map(|(name, n)| format!("{name}={n}")).collect();
        Ok(format!("{entries}hlc={} {}", self.pending[nth].read_hlc().0, counters.join(" ")))
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
            self.handle.set_committed(&self.pending[0].read());
            return;
        }
        let stop = Arc::new(AtomicBool::new(false));
        let (pending, handle, flag) =
            (Arc::clone(&self.pending[0]), self.handle.clone(), Arc::clone(&stop));
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

    fn stats(&self, nth: usize) -> Answer {
        let member = &self.gate.members()[nth];
        let s = member.stats().snapshot();
        let kernel = member.kernel_counters()?;
        Ok(format!(
            "held_packets={} held_bytes={} released_packets={} released_bytes={} \
             passed_covered={} passed_pure_acks={} passed_never_held={} passed_async={} \
             refused={} overruns={} late_verdicts={} unread={} longest_hold_ns={} shut={} \
             async={} rules_restored={} may_have_left={} open_to_all={} kernel_queued={} kernel_dropped_full={} \
             kernel_dropped_socket={}",
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
            s.rules_restored,
            s.may_have_left,
            u8::from(member.is_open_to_all()),
            kernel.queued,
            kernel.dropped_full,
            kernel.dropped_socket,
        ))
    }

    fn stop(mut self) -> Answer {
        self.end_tide();
        let stopped = self.gate.stop()?.into_iter();
        Ok(stopped.map(|s| format!("dropped={}", s.dropped_packets)).collect::<Vec<_>>().join(", "))
    }
}
