//! The gate of a host: one thread for the packets of all its members.
//!
//! A group's [`GateHandle`] tells it of C, the lease, the mode and the fence; a member's
//! [`Pending`] holds P; its [`GateStats`] say what happens.
//!
//! # Start and stop
//! The queue is bound, then the rules are installed: from then on nothing leaves unheld. The gate
//! is shut until the first lease. Rules and kernel programs stay at every end of the process, however
//! it ends: the kernel drops what they queue, until the next start replaces them in one step. A guest
//! that lives on while nobody holds its packets would answer clients beside whoever was recovered at
//! the backup. Only [`EndedGate::remove`] takes rules and programs away.
//!
//! [`Gate::stop`] is for a clean end, after the taps have been closed, so that P stands still.
//! What is covered is released, then the queue is closed, and the kernel drops what still waited:
//! TCP sends it again, to whoever answers then.

mod ended;
mod group_gate;
mod interfaces;
mod rules_kept;
mod shared;
mod stats;
mod tagging;
mod worker;

pub use ended::EndedGate;
pub use group_gate::{GroupGate, PortParts};
pub use rules_kept::{RulesDoubt, RulesFound};
pub use shared::{GateHandle, GroupState, Pending, Surroundings, ToldPrograms};
pub use stats::{GateSnapshot, GateStats, HOLD_BUCKETS, HOLD_BUCKETS_MS};
pub use tagging::{
    HLC_AHEAD_MAX_MS, Hooks, MARK_MASK, MemberTagging, PIN_DIRECTORY, TaggedMember, TaggingConfig,
    TaggingStats, TaggingSwitch,
};

use crate::nfqueue::{KernelCounters, Nfqueue, QueueError, QueueNumber, kernel_counters};
use crate::rules::{Firewall, Installed, Marks, MemberRules, RulesError, Topology};
use crate::sys::{EventFd, now, wall_ms};
use std::collections::HashSet;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use tidelock_protocol::ids::MonoNanos;
use tidelock_protocol::message::Mode;
use tidelock_tagging::{GroupTags, MemberTags, TaggingError, interface_index};
use worker::Worker;

/// A group to guard.
#[derive(Clone, Debug)]
pub struct GroupConfig {
    /// Its name.
    pub name: String,
    /// The mode to start in.
    pub mode: Mode,
    /// How long a lease lasts.
    pub lease_period_ms: u64,
    /// Its members on this host that may talk to clients or to each other.
    pub members: Vec<MemberConfig>,
    /// How packets between members are tagged. `None`: there is one member, or each is protected
    /// by itself (everything that leaves a member waits).
    pub tagging: Option<TaggingConfig>,
}

/// A member to guard.
#[derive(Clone, Debug)]
pub struct MemberConfig {
    /// Its name.
    pub name: String,
    /// Its network cards. Each has rules, programs and a queue of its own; all go by one P.
    pub interfaces: Vec<InterfaceConfig>,
    /// P, as the member's sequencer publishes it.
    pub pending: Arc<Pending>,
}

/// A network card of a member.
#[derive(Clone, Debug)]
pub struct InterfaceConfig {
    /// The host's interface that the guest's packets come in by: its tap or veth.
    pub interface: String,
    /// How that interface leads outside.
    pub topology: Topology,
    /// A queue number that nothing else on this host uses.
    pub queue: QueueNumber,
    /// How many packets may wait.
    pub queue_len_max: u32,
}

/// What the packet filter's rules of a member's interface are called: numbers, because an interface may get another
/// name in the configuration, and the new rules must take the place of the old ones.
pub(crate) fn port_name(member: &str, nth: usize) -> String {
    match nth {
        0 => member.to_owned(),
        nth => format!("{member}#{}", nth + 1),
    }
}

/// What can go wrong with the gate. It fails closed.
#[derive(Debug, thiserror::Error)]
pub enum GateError {
    /// A member has no interface, or two members have one name.
    #[error("two members are called \"{0}\": give each member of the host a name of its own")]
    NameTwice(String),
    /// Two members have one queue.
    #[error("packet queue {0} is given to two members: give each one a number of its own")]
    QueueTwice(QueueNumber),
    /// The kernel queue.
    #[error("gate")]
    Queue(#[from] QueueError),
    /// The packet-filter rules.
    #[error("gate: rules of member \"{member}\"")]
    Rules {
        /// Whose rules.
        member: String,
        /// What is wrong.
        #[source]
        source: RulesError,
    },
    /// A group of several members needs tags, and there are none.
    #[error(
        "group \"{group}\" has several members, and their packets cannot be tagged; protect each \
         member by itself (boundary = \"member\"), or mend this"
    )]
    Tagging {
        /// Whose packets.
        group: String,
        /// What is wrong.
        #[source]
        source: TaggingError,
    },
    /// Rules are to go, and somebody judges by them.
    #[error("packet queue {queue} of member \"{member}\" is in use: stop tidelockd first")]
    InUse {
        /// Whose rules.
        member: String,
        /// Its queue.
        queue: QueueNumber,
    },
    /// The thread cannot wait for events.
    #[error("gate: cannot wait for events")]
    Wait(#[source] io::Error),
    /// The thread has panicked.
    #[error("gate: the thread has failed; packets are held until the daemon is started again")]
    Panicked,
}

/// How one interface of a member was left at a clean stop. Its rules are in place.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stopped {
    /// Whose gate it was.
    pub member: String,
    /// The interface.
    pub interface: String,
    /// Packets that still waited and were dropped.
    pub dropped_packets: usize,
}

/// One interface of a member as the daemon sees it.
#[derive(Debug)]
pub struct MemberGate {
    name: String,
    /// What its rules are called.
    port: String,
    queue: QueueNumber,
    stats: Arc<GateStats>,
    installed: Installed,
    tagging: MemberTagging,
    pending: Arc<Pending>,
    /// What packets may be long, if it was the interface that said so.
    interface_mtu: Option<u32>,
    /// Why the interface is not watched, as it was said last.
    trouble: Option<String>,
    /// What is wrong with its rules, as it was said last.
    rules_trouble: Option<String>,
    /// Its rules are known not to stand as they were installed.
    rules_are_gone: bool,
    /// Its interface was made anew, and rules that would have cut it off were gone.
    has_heard_unseen: bool,
}

impl MemberGate {
    /// Whether its packets are tagged, and what was done to them.
    #[must_use]
    pub fn tagging(&self) -> &MemberTagging {
        &self.tagging
    }

    /// The member's name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// What the interface's rules are called: the member's name, with a number from the second interface on.
    #[must_use]
    pub fn port(&self) -> &str {
        &self.port
    }

    /// The interface.
    #[must_use]
    pub fn interface(&self) -> &str {
        &self.installed.rules.interface
    }

    /// Whether there is an interface of that name. Without one nothing that the guest sends is seen here, and it may
    /// send by another one.
    #[must_use]
    pub fn is_interface_there(&self) -> bool {
        tidelock_tagging::interface_index(self.interface()).is_some()
    }

    /// Whether packets may leave unheld now: the rules are gone, and no programs drop what they would hold.
    #[must_use]
    pub fn is_open_to_all(&self) -> bool {
        let is_watched = self.tagging.tags().is_some_and(MemberTags::are_attached);
        self.rules_are_gone && !is_watched
    }

    /// What is wrong with the interface and its rules, for people.
    #[must_use]
    pub fn trouble(&self) -> Option<String> {
        let both = [&self.trouble, &self.rules_trouble].into_iter().flatten();
        let text = both.map(String::as_str).collect::<Vec<_>>().join("; ");
        Some(text).filter(|text| !text.is_empty())
    }

    /// Its counters.
    #[must_use]
    pub fn stats(&self) -> &Arc<GateStats> {
        &self.stats
    }

    /// Its rules as they were installed.
    #[must_use]
    pub fn installed(&self) -> &Installed {
        &self.installed
    }

    /// What the kernel dropped before the gate saw it.
    pub fn kernel_counters(&self) -> Result<KernelCounters, QueueError> {
        kernel_counters(self.queue).map(Option::unwrap_or_default)
    }
}

/// The clocks of this machine, and the gate's thread.
#[derive(Debug)]
struct ThreadSurroundings {
    wake: Arc<EventFd>,
}

impl Surroundings for ThreadSurroundings {
    fn now(&self) -> MonoNanos {
        now()
    }

    fn wall_ms(&self) -> u64 {
        wall_ms()
    }

    fn wake(&self) {
        self.wake.wake();
    }
}

/// The running gate. Dropping it without [`stop`](Self::stop) leaves the rules in place.
pub struct Gate {
    handles: Vec<(String, GateHandle)>,
    members: Vec<MemberGate>,
    firewall: Firewall,
    /// Rules that were put back are not relied on before this.
    relies_at: MonoNanos,
    rules_doubt: RulesDoubt,
    wake: Arc<EventFd>,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<Result<Vec<Stopped>, GateError>>>,
}

impl Gate {
    /// Binds the queues, installs the rules and starts the thread, in the network namespace of
    /// the calling thread. The gate is shut until the first lease.
    pub fn start(mut firewall: Firewall, groups: Vec<GroupConfig>) -> Result<Gate, GateError> {
        refuse_doubles(&groups)?;
        let wake = Arc::new(EventFd::new().map_err(GateError::Wait)?);
        let stop = Arc::new(AtomicBool::new(false));
        let (mut handles, mut members, mut gates) = (Vec::new(), Vec::new(), Vec::new());
        for config in groups {
            let (tags, without) = match tagging::start_group(&config.name, config.tagging.as_ref())?
            {
                Ok(tags) => (tags, None),
                Err(why) => (None, Some(why)),
            };
            let with = config.tagging.as_ref().zip(tags.as_ref());
            let mut gate = GroupGate::new(
                config.name.clone(),
                config.mode,
                config.lease_period_ms,
                with.map(|(tagging, tags)| {
                    let cells = Arc::clone(tags.committed());
                    ToldPrograms::new(cells, tagging.hlc_ahead_max_ms, !tagging.is_hlc())
                }),
                Arc::new(ThreadSurroundings { wake: Arc::clone(&wake) }),
            );
            for interface in config.members.iter().flat_map(|member| &member.interfaces) {
                let index = interface_index(&interface.interface);
                if let Some((tags, index)) = tags.as_ref().zip(index) {
                    let group = config.name.clone();
                    tags.sends_by(index).map_err(|source| GateError::Tagging { group, source })?;
                }
            }
            let here: Vec<_> = config.members.iter().map(|member| member.name.clone()).collect();
            for member in config.members {
                let first = members.len();
                for (nth, interface) in member.interfaces.into_iter().enumerate() {
                    let tagging = match with {
                        Some((tagging, tags)) => Tagging::With {
                            group: &config.name,
                            config: tagging,
                            tags,
                            here: &here,
                            beside: members
                                .get(first)
                                .and_then(|view: &MemberGate| view.tagging.tags()),
                        },
                        None => Tagging::Without(without.clone()),
                    };
                    let port = Port { member: &member.name, nth, pending: &member.pending };
                    members.push(start_port(&mut firewall, port, interface, &mut gate, tagging)?);
                }
                remove_more(&mut firewall, &members[first..]);
            }
            handles.push((config.name, gate.handle()));
            gates.push(gate);
        }
        let worker = Worker::new(gates, Arc::clone(&wake), Arc::clone(&stop))?;
        let thread = std::thread::Builder::new()
            .name("gate".into())
            .spawn(move || worker.run())
            .map_err(GateError::Wait)?;
        let rules_doubt =
            RulesDoubt::of(handles.iter().map(|(_, handle)| handle.clone()).collect());
        Ok(Gate {
            handles,
            members,
            firewall,
            relies_at: MonoNanos(0),
            rules_doubt,
            wake,
            stop,
            thread: Some(thread),
        })
    }

    /// The handle of a group.
    #[must_use]
    pub fn handle(&self, group: &str) -> Option<GateHandle> {
        self.handles.iter().find(|(name, _)| name == group).map(|(_, handle)| handle.clone())
    }

    /// Every interface of every member.
    #[must_use]
    pub fn members(&self) -> &[MemberGate] {
        &self.members
    }

    /// Which packet filter is in use.
    #[must_use]
    pub fn firewall(&self) -> &Firewall {
        &self.firewall
    }

    /// Whether the thread is still there. If not, [`stop`](Self::stop) says why.
    #[must_use]
    pub fn is_running(&self) -> bool {
        self.thread.as_ref().is_some_and(|thread| !thread.is_finished())
    }

    /// Whether every member's rules still stand as they were installed. Runs the packet filter's
    /// tools, so not for every scrape.
    pub fn verify_rules(&self) -> Result<(), GateError> {
        self.members.iter().zip(self.look_at_rules()).try_for_each(|(member, looked)| {
            looked.map_err(|source| GateError::Rules { member: member.name.clone(), source })
        })
    }

    /// Ends the gate cleanly, and leaves rules and programs. Close the taps first: see the module's text.
    pub fn stop(mut self) -> Result<Vec<Stopped>, GateError> {
        self.end_thread()
    }

    fn end_thread(&mut self) -> Result<Vec<Stopped>, GateError> {
        self.stop.store(true, Ordering::SeqCst);
        self.wake.wake();
        match self.thread.take() {
            Some(thread) => thread.join().map_err(|_| GateError::Panicked)?,
            None => Ok(Vec::new()),
        }
    }
}

impl Drop for Gate {
    fn drop(&mut self) {
        // Whatever the thread says, its queues are closed and the rules stay: shut.
        let _ = self.end_thread();
    }
}

fn refuse_doubles(groups: &[GroupConfig]) -> Result<(), GateError> {
    let (mut names, mut queues) = (HashSet::new(), HashSet::new());
    for member in groups.iter().flat_map(|group| &group.members) {
        if !names.insert(&member.name) {
            return Err(GateError::NameTwice(member.name.clone()));
        }
        if let Some(twice) = member.interfaces.iter().find(|i| !queues.insert(i.queue)) {
            return Err(GateError::QueueTwice(twice.queue));
        }
    }
    Ok(())
}

/// What a member's start is told of tags.
enum Tagging<'a> {
    With {
        /// The group's name.
        group: &'a str,
        /// What is configured.
        config: &'a TaggingConfig,
        /// Its C.
        tags: &'a GroupTags,
        /// Its members on this host.
        here: &'a [String],
        /// The programs of the member's first interface, if this is another one.
        beside: Option<&'a MemberTags>,
    },
    /// Why not, if it was asked for.
    Without(Option<String>),
}

/// Installs a member's rules, and says what the operator should know of them.
fn install(firewall: &mut Firewall, rules: &MemberRules) -> Result<Installed, RulesError> {
    let installed = firewall.install(rules)?;
    for note in &installed.notes {
        tracing::warn!(member = rules.member, "gate: {note}");
    }
    Ok(installed)
}

/// Removes the rules of interfaces that a member had in an earlier run and has no more.
fn remove_more(firewall: &mut Firewall, now: &[MemberGate]) {
    let Some(last) = now.last() else { return };
    for nth in now.len().. {
        let port = port_name(&last.name, nth);
        let rules = MemberRules {
            member: port.clone(),
            only_that_index: false,
            ..last.installed.rules.clone()
        };
        match firewall.has_left(&rules) {
            Ok(true) => {}
            Ok(false) | Err(_) => return,
        }
        if let Err(e) = firewall.remove(&port) {
            tracing::warn!(
                member = last.name,
                "gate: rules of an interface that it has no more: {e}"
            );
            return;
        }
    }
}

/// Which interface of which member is started.
#[derive(Clone, Copy)]
struct Port<'a> {
    member: &'a str,
    nth: usize,
    pending: &'a Arc<Pending>,
}

fn start_port(
    firewall: &mut Firewall,
    Port { member, nth, pending }: Port<'_>,
    config: InterfaceConfig,
    gate: &mut GroupGate<Nfqueue>,
    tagging: Tagging<'_>,
) -> Result<MemberGate, GateError> {
    let wrong = |source| GateError::Rules { member: member.to_owned(), source };
    let port = port_name(member, nth);
    let nfqueue = Nfqueue::bind(config.queue, config.queue_len_max)?;
    let with = match &tagging {
        Tagging::With { config, .. } => Some(*config),
        Tagging::Without(_) => None,
    };
    // Before the rules let marked packets pass: the programs clear the mark of what others marked.
    let (tagging, mask, is_hlc) = match tagging {
        Tagging::With { group, config: tagging, tags, here, beside } => {
            let started = tagging::start_member(
                (group, tags),
                tagging,
                (member, here),
                (&config.interface, config.topology, beside),
                pending,
            )?;
            (started, tagging.mark_mask, tagging.is_hlc())
        }
        Tagging::Without(Some(why)) => (MemberTagging::Unavailable(why), 0, false),
        Tagging::Without(None) => (MemberTagging::Off, 0, false),
    };
    let interface_mtu = match with {
        Some(with) if with.path_mtu.is_none() => {
            tidelock_tagging::interface_mtu(&config.interface).ok()
        }
        _ => None,
    };
    let index =
        tagging.tags().map_or_else(|| interface_index(&config.interface), MemberTags::attached_to);
    let rules = MemberRules {
        member: port.clone(),
        interface: config.interface.clone(),
        topology: config.topology,
        queue: config.queue,
        marks: tagging.tags().map(|tags| Marks { mask, pass: tags.pass_mark() }),
        index,
        only_that_index: tagging.tags().is_some() && with.is_some_and(TaggingConfig::is_needed),
    };
    if let Some(tags) = tagging.tags() {
        let has_left = firewall.has_left(&rules).map_err(wrong)?;
        if tags.found_pending() && !has_left {
            tracing::error!(
                member,
                "gate: an earlier run has left its programs and P, but somebody has taken its rules away: its packets \
                 may have left unheld since, and a disaster can undo what they told clients"
            );
        }
        if with.is_some_and(|config| config.await_floor) {
            gate.depends_on_others(pending, tags.found_pending() && has_left);
        }
    }
    let installed = install(firewall, &rules).map_err(wrong)?;
    let stats = Arc::new(GateStats::default());
    let view = MemberGate {
        name: member.to_owned(),
        port,
        queue: config.queue,
        stats: Arc::clone(&stats),
        installed,
        tagging,
        pending: Arc::clone(pending),
        interface_mtu,
        trouble: None,
        rules_trouble: None,
        rules_are_gone: false,
        has_heard_unseen: false,
    };
    gate.add_port(PortParts {
        member: member.to_owned(),
        interface: config.interface,
        queue: nfqueue,
        queue_len_max: config.queue_len_max as usize,
        pending: Arc::clone(pending),
        stats,
        is_hlc,
        crossing: view.tagging.tags().map(|tags| Arc::clone(tags.crossing())),
    });
    Ok(view)
}
