//! The packet-filter rules that send a guest's packets into the queue.
//!
//! | topology | what comes from the guest is judged in |
//! |---|---|
//! | routed: the interface has addresses and the host routes | PREROUTING by in-interface |
//! | bridged: the interface is a port of a bridge | PREROUTING by bridge port |
//!
//! That is before the host decides where a packet goes, so it also holds what goes to the host itself: a guest that
//! talks to its host talks to the outside. And the host makes no ICMP error that quotes what is held: it has not looked at it.
//! It is also before connections are tracked: no rule can have saved the programs' mark in a connection and restored it
//! on another packet.
//!
//! | packet filter | it queues by |
//! |---|---|
//! | `nft` | nftables' `queue` |
//! | `iptables-nft` | NFQUEUE in the raw table; nftables drops beside it |
//!
//! The first that works here is used. Invariants:
//! - Rules are replaced in one transaction of the packet filter: there is no moment in which a
//!   packet passes unheld, not even while stale rules of a crashed daemon give way.
//! - No rule has a bypass: without a listener the kernel drops what is queued.
//! - IPv6 neighbour discovery is judged like the rest, by the programs and the queue. ARP does not come by here at all: the
//!   programs judge it.
//! - In a bridged topology, what is neither IP nor ARP is dropped: the queue cannot judge it.
//! - What is queued goes by the interface's name. An interface that gets another name (Linux 6.2 and
//!   later rename one that is up) tells nothing any more: what comes from its index is dropped.
//! - A member with tags: packets that its kernel programs have marked return before the queue, without the mark
//!   ([`Marks`]). An interface of its name but of another index than the one that the programs are attached to is
//!   cut off, both ways.
//! - Both take nftables (with or without a queue): iptables knows names only.
//! - nftables has one table for all members of a host (`nft/table.rs`).
//! - Rules that somebody has changed can be told from those that were installed, and the kernel tells
//!   of changes of nftables ([`RuleChanges`]).
//! - Rules of one topology do not see what takes the other way: where an interface is not what its topology says
//!   (`port.rs`), they are not installed, and those that are count as changed.
//! - Rules sit ahead of the user's own rules and take none of them away: a packet that is let through goes on to
//!   them (iptables: ours are the first of raw; nftables: a table of our own with the earliest priority).

mod changes;
mod iptables;
mod listing;
mod names;
mod nft;
mod port;
mod tool;

pub use changes::{Change, RuleChanges};

use crate::nfqueue::QueueNumber;
use iptables::Iptables;
use listing::difference;
use nft::Nft;

/// How the guest's interface leads outside.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Topology {
    /// The host routes between the guest's interface and the outside.
    Routed,
    /// The guest's interface is a port of a bridge.
    Bridged,
}

/// As in the configuration.
impl std::fmt::Display for Topology {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Topology::Routed => "routed",
            Topology::Bridged => "bridged",
        })
    }
}

/// What the mark of a packet has that may pass beside the queue. The programs clear these bits when they take a packet up, and the
/// rules when they have judged it: nobody else sees the value, which is random for each start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Marks {
    /// The bits.
    pub mask: u32,
    /// The value in them.
    pub pass: u32,
}

/// The rules of one member.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemberRules {
    /// The member's name; it names the chains.
    pub member: String,
    /// The interface that the guest's packets come in by.
    pub interface: String,
    /// How it leads outside.
    pub topology: Topology,
    /// Where its packets go.
    pub queue: QueueNumber,
    /// What the kernel programs of a member whose packets are tagged say of them.
    pub marks: Option<Marks>,
    /// The index that the interface has, if it is there: what comes from it under another name is
    /// dropped.
    pub index: Option<u32>,
    /// What comes from an interface of this name and another index is dropped, too, and so is what goes to
    /// it: it was made anew, and nobody sees yet what its guest hears.
    pub only_that_index: bool,
}

/// What can go wrong with rules.
#[derive(Debug, thiserror::Error)]
pub enum RulesError {
    /// Nothing here can queue packets.
    #[error(
        "no packet filter here can queue packets; install nftables and load nft_queue, or install \
         iptables 1.8 or later and load xt_NFQUEUE and nft_compat (tried: {tried})"
    )]
    NoBackend {
        /// Each tool and why it does not do.
        tried: String,
    },
    /// The process may not do this.
    #[error(
        "{tool} is not allowed to change rules: run tidelockd as root or with CAP_NET_ADMIN and CAP_NET_RAW"
    )]
    NotAllowed {
        /// Which tool.
        tool: String,
    },
    /// A tool refused.
    #[error("{tool} could not {doing}: {output}")]
    Refused {
        /// Which tool.
        tool: String,
        /// What it was to do.
        doing: &'static str,
        /// What it said.
        output: String,
    },
    /// A tool could not be run.
    #[error("cannot run {tool}")]
    Run {
        /// Which tool.
        tool: String,
        /// The system's reason.
        #[source]
        source: std::io::Error,
    },
    /// Bridged packets do not come by iptables.
    #[error(
        "bridged packets do not pass through iptables, because {sysctl} is {found}: run `modprobe \
         br_netfilter` and `sysctl -w {sysctl}=1`, and keep both in /etc, or use a kernel with \
         nftables' queue"
    )]
    BridgeNetfilter {
        /// The setting.
        sysctl: &'static str,
        /// Its value.
        found: String,
    },
    /// Its packets do not come by where its rules are.
    #[error(
        "{interface} is {found}, and rules for topology = \"{topology}\" do not see what it sends: {instead}"
    )]
    WrongTopology {
        /// The interface.
        interface: String,
        /// What it is instead.
        found: String,
        /// What it should be.
        topology: Topology,
        /// What to do.
        instead: String,
    },
    /// What the kernel does not say.
    #[error("cannot find out what {interface} is a port of")]
    UnknownPort {
        /// The interface.
        interface: String,
        /// The system's reason.
        #[source]
        source: std::io::Error,
    },
    /// Nothing can tell an interface from another one of its name.
    #[error(
        "members of a group of several need nftables ({family} tables) beside {tool}, which cannot tell a tap \
         that was made anew from the one before: install nftables and load nf_tables, or protect each \
         member by itself (boundary = \"member\")"
    )]
    NoIndexMatch {
        /// Which tool is in use.
        tool: String,
        /// The family that is missing.
        family: &'static str,
    },
    /// Only the implementation of iptables without nftables is here.
    #[error(
        "only iptables-legacy is here ({version}), which Tidelock does not use: install the iptables that uses \
         nftables (`iptables-nft`, in Debian's package iptables)"
    )]
    LegacyIptables {
        /// The name that it gives.
        version: String,
    },
    /// What queues where the host routes cannot do so on bridges, and nothing else can.
    #[error(
        "{tool} cannot queue bridged packets with this kernel: install iptables, or use a kernel \
         with nftables' queue"
    )]
    NotOnBridges {
        /// Which tool.
        tool: String,
    },
    /// iptables cannot match bridge ports.
    #[error(
        "{tool} cannot match bridge ports: load xt_physdev, or use a kernel with nftables' queue"
    )]
    NoPhysdev {
        /// Which tool.
        tool: String,
    },
    /// Not the name of an interface.
    #[error(
        "\"{0}\" is not the name of a network interface: 1 to 15 letters, digits, '.', '_', ':', \
         '@' or '-'"
    )]
    BadInterface(String),
    /// A table of ours has what we have not written.
    #[error(
        "table {table} of nftables has a line that Tidelock has not written ({line}): find out who changes it; to \
         begin anew, stop tidelockd and the guests of this host, and run `nft delete table {table}`"
    )]
    NotOurs {
        /// Family and name.
        table: String,
        /// What it has.
        line: String,
    },
    /// Rules are not as they were installed.
    #[error(
        "the rules in {tool} are not as they were installed ({what}), so packets may pass unheld: \
         a running tidelockd puts them back; find out what changes the packet filter"
    )]
    Changed {
        /// Which tool.
        tool: String,
        /// What is different.
        what: String,
    },
}

/// Rules as they stand after [`Firewall::install`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Installed {
    /// What was asked for.
    pub rules: MemberRules,
    /// Which packet filter they are in.
    pub backend: String,
    /// What the operator should know.
    pub notes: Vec<String>,
    /// What iptables has of it, in its own words, to compare with later.
    listing: Vec<String>,
}

/// The packet filters in use: one for routed members, and the same one or another for bridged ones.
#[derive(Clone, Debug)]
pub struct Firewall {
    /// All that are here. What they have of a member is stale, but for the one that queues for it.
    known: Vec<Backend>,
    routed: usize,
    bridged: Option<usize>,
}

#[derive(Clone, Debug)]
enum Backend {
    Nft(Nft),
    Iptables(Iptables),
}

impl Firewall {
    /// Finds a packet filter that can queue, by trying each one with a scratch chain that is gone
    /// at once. nftables comes first: it has both address families and bridges in one transaction.
    ///
    /// `host` names what it makes in nftables: two daemons on one machine need two names.
    pub fn detect(host: &str) -> Result<Firewall, RulesError> {
        Self::detect_only(host, |_| true)
    }

    /// As [`detect`](Self::detect), among those whose [`name`](Self::name) is wanted.
    pub fn detect_only(host: &str, wanted: impl Fn(&str) -> bool) -> Result<Firewall, RulesError> {
        let (mut routed, mut bridged, mut unable) = (None, None, Vec::new());
        let iptables = Iptables::find().unwrap_or_else(|why| {
            unable.push(format!("iptables: {why}"));
            None
        });
        let nft = Nft::find(host).map(Backend::Nft);
        let mut known: Vec<_> = nft.into_iter().chain(iptables.map(Backend::Iptables)).collect();
        for (at, backend) in known.iter_mut().enumerate() {
            if routed.is_some() && bridged.is_some() {
                break;
            }
            match backend.look(wanted(backend.name())) {
                None => {}
                Some(why @ RulesError::NotAllowed { .. }) => return Err(why),
                Some(why) => unable.push(format!("{}: {why}", backend.name())),
            }
            let queues = |topology| backend.queues(topology).then_some(at);
            routed = routed.or_else(|| queues(Topology::Routed));
            bridged = bridged.or_else(|| queues(Topology::Bridged));
        }
        let Some(routed) = routed else {
            if unable.is_empty() {
                unable.push("neither nft nor iptables is installed".to_owned());
            }
            return Err(RulesError::NoBackend { tried: unable.join("; ") });
        };
        Ok(Firewall { known, routed, bridged })
    }

    /// The packet filter's name where the host routes: `nft` or `iptables-nft`.
    #[must_use]
    pub fn name(&self) -> &str {
        self.known[self.routed].name()
    }

    /// The name of what queues for such members.
    pub fn name_for(&self, topology: Topology) -> Result<&str, RulesError> {
        self.queueing(topology).map(|at| self.known[at].name())
    }

    fn queueing(&self, topology: Topology) -> Result<usize, RulesError> {
        let at = match topology {
            Topology::Routed => Some(self.routed),
            Topology::Bridged => self.bridged,
        };
        at.ok_or_else(|| RulesError::NotOnBridges { tool: self.name().to_owned() })
    }

    /// Whether an earlier run has left rules that hold this member's packets, in whatever packet filter, and cut off
    /// an interface of another index, where that is needed.
    pub fn has_left(&self, rules: &MemberRules) -> Result<bool, RulesError> {
        let (mut are_held, mut is_cut_off) = (false, false);
        for backend in &self.known {
            match backend {
                Backend::Nft(nft) => {
                    let left = nft.left_of(&rules.member)?;
                    are_held |= left.queue;
                    is_cut_off |= left.queue || left.beside;
                }
                Backend::Iptables(iptables) => are_held |= iptables.has_left(&rules.member)?,
            }
        }
        Ok(are_held && (is_cut_off || !rules.only_that_index))
    }

    /// Installs the rules, in place of any older ones of the same member.
    pub fn install(&mut self, rules: &MemberRules) -> Result<Installed, RulesError> {
        check_interface(&rules.interface)?;
        port::check(&rules.interface, rules.topology)?;
        let at = self.queueing(rules.topology)?;
        let mut notes = Vec::new();
        let mut listing = Vec::new();
        match &mut self.known[at] {
            Backend::Nft(nft) => nft.install(rules)?,
            Backend::Iptables(iptables) => {
                iptables.install(rules)?;
                listing = iptables.listing(rules)?;
                self.drop_what_iptables_cannot_see(rules, &mut notes)?;
            }
        }
        // Only now: stale rules in another packet filter held packets until these took over.
        let is_iptables = matches!(self.known[at], Backend::Iptables(_));
        for (other, backend) in self.known.iter_mut().enumerate() {
            // While iptables is in use, nftables has its companion: told already, with or without something to do.
            let is_told = is_iptables && matches!(backend, Backend::Nft(_));
            if other == at || is_told {
                continue;
            }
            if let Err(e) = backend.remove(&rules.member) {
                notes.push(format!("stale rules may be left in {}: {e}", backend.name()));
            }
        }
        let backend = self.known[at].name().to_owned();
        Ok(Installed { rules: rules.clone(), backend, notes, listing })
    }

    /// Of each of these rules, whether they still stand as they were installed.
    pub fn verify<'a>(
        &self,
        all: impl IntoIterator<Item = &'a Installed>,
    ) -> Vec<Result<(), RulesError>> {
        let nft = self.known.iter().find_map(Backend::nft);
        // If that cannot be told, it is found out again for each of them, with the error.
        let look = nft.and_then(|nft| nft.look_at_tables().ok());
        all.into_iter().map(|installed| self.verify_one(installed, look.as_ref())).collect()
    }

    fn verify_one(
        &self,
        installed: &Installed,
        look: Option<&nft::Look>,
    ) -> Result<(), RulesError> {
        let rules = &installed.rules;
        if let Err(e) = self.check_way(rules) {
            // What to do is said when they cannot be put back.
            let what = match e {
                RulesError::WrongTopology { interface, found, .. } => {
                    format!("{interface} is {found}")
                }
                RulesError::BridgeNetfilter { sysctl, found } => format!("{sysctl} is {found}"),
                e => e.to_string(),
            };
            return Err(RulesError::Changed { tool: installed.backend.clone(), what });
        }
        let verify_nft = |nft: &Nft, queues| match look {
            Some(look) => nft.verify(rules, queues, look),
            None => nft.verify(rules, queues, &nft.look_at_tables()?),
        };
        match &self.known[self.queueing(rules.topology)?] {
            Backend::Nft(nft) => verify_nft(nft, true),
            Backend::Iptables(iptables) => {
                if let Some(what) = difference(&installed.listing, &iptables.listing(rules)?) {
                    return Err(RulesError::Changed { tool: installed.backend.clone(), what });
                }
                let companion = self.companion_of(rules).and_then(|at| self.known[at].nft());
                companion.map_or(Ok(()), |nft| verify_nft(nft, false))
            }
        }
    }

    /// Whether what the interface sends still comes by its rules. Quick: no tool is run for it.
    pub(crate) fn check_way(&self, rules: &MemberRules) -> Result<(), RulesError> {
        port::check(&rules.interface, rules.topology)?;
        match &self.known[self.queueing(rules.topology)?] {
            Backend::Iptables(_) => iptables::check_way(rules.topology),
            Backend::Nft(_) => Ok(()),
        }
    }

    /// Removes a member's rules wherever they are. Its packets pass unheld from now on.
    pub fn remove(&mut self, member: &str) -> Result<(), RulesError> {
        self.known.iter_mut().try_for_each(|backend| backend.remove(member))
    }

    /// nftables without `queue` can still drop, and does so for iptables: what comes neither by IP
    /// nor by ARP, and what comes by an interface that was made anew.
    fn drop_what_iptables_cannot_see(
        &mut self,
        rules: &MemberRules,
        notes: &mut Vec<String>,
    ) -> Result<(), RulesError> {
        if let Some(at) = self.companion_of(rules) {
            return self.known[at].nft_mut().map_or(Ok(()), |nft| nft.install_companion(rules));
        }
        if rules.only_that_index {
            let family = nft::family(rules.topology);
            return Err(RulesError::NoIndexMatch { tool: iptables::NAME.to_owned(), family });
        }
        if rules.topology == Topology::Bridged {
            notes.push(
                "frames that are neither IP nor ARP cross the bridge unheld: install nftables \
                 and use a kernel with its bridge family, and they are dropped"
                    .to_owned(),
            );
        }
        if rules.index.is_some() {
            notes.push(format!(
                "whoever renames {} lets its packets pass unheld: install nftables, and they are dropped",
                rules.interface
            ));
        }
        // What it may have of an earlier run.
        let nft = self.known.iter_mut().find_map(Backend::nft_mut);
        nft.map_or(Ok(()), |nft| nft.remove(&rules.member))
    }

    /// nftables beside iptables, if there is something for it to do here and it can.
    fn companion_of(&self, rules: &MemberRules) -> Option<usize> {
        let wanted = rules.topology == Topology::Bridged || rules.index.is_some();
        let can = |backend: &Backend| backend.nft().is_some_and(|nft| nft.has(rules.topology));
        self.known.iter().position(|backend| wanted && can(backend))
    }
}

/// The packet filters that queue, by name: `nft, on bridges iptables-nft`.
impl std::fmt::Display for Firewall {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())?;
        match self.name_for(Topology::Bridged) {
            Ok(name) if name != self.name() => write!(f, ", on bridges {name}"),
            _ => Ok(()),
        }
    }
}

impl Backend {
    /// Finds out whether it can queue, if that is wanted, and why not.
    fn look(&mut self, is_wanted: bool) -> Option<RulesError> {
        match self {
            // Even without a queue it can help iptables.
            Backend::Nft(nft) => nft.look(is_wanted),
            Backend::Iptables(iptables) if is_wanted => iptables.look(),
            Backend::Iptables(_) => None,
        }
    }

    fn queues(&self, topology: Topology) -> bool {
        match self {
            Backend::Nft(nft) => nft.queues(topology),
            Backend::Iptables(iptables) => iptables.queues(),
        }
    }

    fn name(&self) -> &'static str {
        match self {
            Backend::Nft(_) => nft::NAME,
            Backend::Iptables(_) => iptables::NAME,
        }
    }

    fn nft(&self) -> Option<&Nft> {
        match self {
            Backend::Nft(nft) => Some(nft),
            Backend::Iptables(_) => None,
        }
    }

    fn nft_mut(&mut self) -> Option<&mut Nft> {
        match self {
            Backend::Nft(nft) => Some(nft),
            Backend::Iptables(_) => None,
        }
    }

    fn remove(&mut self, member: &str) -> Result<(), RulesError> {
        match self {
            Backend::Nft(nft) => nft.remove(member),
            Backend::Iptables(iptables) => iptables.remove(member),
        }
    }
}

/// Also keeps the name from meaning anything else in a rule: iptables takes a trailing '+' as
/// "any interface that begins so".
fn check_interface(name: &str) -> Result<(), RulesError> {
    let allowed = |c: char| c.is_ascii_alphanumeric() || "._:@-".contains(c);
    if (1..=15).contains(&name.len()) && name.chars().all(allowed) && !name.starts_with('-') {
        Ok(())
    } else {
        Err(RulesError::BadInterface(name.to_owned()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Those of a member without kernel programs.
    pub(super) fn rules(topology: Topology) -> MemberRules {
        MemberRules {
            member: "web".into(),
            interface: "tap0".into(),
            topology,
            queue: QueueNumber(40),
            marks: None,
            index: None,
            only_that_index: false,
        }
    }

    #[test]
    fn interface_names_cannot_smuggle_anything() {
        for good in ["tap0", "vnet12", "br-lan.7", "abcdefghijklmno"] {
            check_interface(good).unwrap();
        }
        for bad in ["", "abcdefghijklmnop", "tap+", "a b", "a\"b", "a\nCOMMIT", "-j", "a/b", "!x"] {
            assert!(matches!(check_interface(bad), Err(RulesError::BadInterface(_))), "{bad:?}");
        }
    }
}
