//! The kernel programs (`netfilter/bpf/`) as functions of this process: the same text, compiled for the host.
//!
//! A shim (`shim/`) stands for the kernel: the helpers that the programs call, on a frame in memory, and their maps,
//! which the caller passes with each frame ([`Maps`]). P and C are the cells that the daemon's gate shares with the
//! programs in production. So the simulator runs the programs themselves in its network, and a test here gives random
//! frames to them and to the kernel and compares what becomes of them.
//!
//! Not in this model: packets of the network stack's offloads (GSO), packets whose headers do not lie in one piece,
//! several CPUs at once, and tags of a VLAN that the kernel has taken out of a frame.
//!
//! The programs are licensed under the GNU General Public License, version 2 only. What is linked with them is for
//! tests, and is not distributed.

mod call;
mod planted;

pub use planted::Planted;

use std::net::IpAddr;
use tidelock_protocol::ids::MonoNanos;
use tidelock_protocol::tag::{Form, IPV6_WRITERS_MAX};
use tidelock_tagging::{
    Addresses, CommittedCells, Config, CrossingCells, Direction, PendingCells, Settings,
    TaggingStats, Tried, WAY_ELSEWHERE, WAY_HERE, key_of,
};

/// Bytes of an Ethernet header.
const ETHERNET_BYTES: usize = 14;
/// `TC_ACT_UNSPEC`: other filters and the network may have the packet.
const GOES_ON: i32 = -1;

/// Maps of a member's programs, and the time.
#[derive(Clone, Copy, Debug)]
pub struct Maps<'a> {
    /// P of the member.
    pub pending: &'a PendingCells,
    /// C of the group, as this host knows it.
    pub committed: &'a CommittedCells,
    /// Progress of the gate's queue with what the programs have left to it.
    pub crossing: &'a CrossingCells,
    /// P of each member on this host, by its addresses.
    pub neighbours: &'a [(IpAddr, &'a PendingCells)],
    /// Interfaces of the group's members on this host.
    pub interfaces: &'a [u32],
    /// A daemon is there: covered packets to the outside may be judged, and others be held.
    pub has_judge: bool,
    /// `CLOCK_BOOTTIME`.
    pub now: MonoNanos,
}

/// The programs of one member, with what a loader fixes.
#[derive(Debug)]
pub struct Programs {
    config: Config,
    peers: Vec<call::AddressValue>,
    ways: Vec<call::WayValue>,
    cpu: Vec<u64>,
    planted: Option<Planted>,
}

impl Programs {
    /// Programs like those that [`MemberTags::load`](tidelock_tagging::MemberTags::load) loads. `run`: of the daemon, as
    /// in [`PendingCells::run`]. `pass_mark`: in the mark of a packet that may leave.
    #[must_use]
    pub fn new(settings: &Settings, addresses: &Addresses, run: u64, pass_mark: u32) -> Self {
        if let Form::Vector { writers } = settings.codec.form() {
            assert!(writers <= IPV6_WRITERS_MAX, "the programs have no room for a longer tag");
        }
        let mut this = Self {
            config: settings.config(run, pass_mark),
            peers: Vec::new(),
            ways: Vec::new(),
            cpu: vec![0; call::cpu_words()],
            planted: None,
        };
        for peer in &addresses.peers {
            let value = if peer.is_here { WAY_HERE } else { WAY_ELSEWHERE };
            let address = words_of(peer.address);
            this.peers.push(call::AddressValue { address, value });
            this.ways.extend(addresses.own.iter().map(|own| call::WayValue {
                source: words_of(*own),
                destination: address,
                value,
            }));
        }
        this
    }

    /// These programs with a planted fault.
    #[must_use]
    pub fn with_fault(self, planted: Option<Planted>) -> Self {
        Self { planted, ..self }
    }

    /// Gives one of the programs an Ethernet frame that has come by an interface.
    pub fn run(
        &mut self,
        direction: Direction,
        maps: &Maps<'_>,
        interface: u32,
        frame: &[u8],
    ) -> Tried {
        let of = call::Of {
            planted: self.planted,
            config: &self.config,
            peers: &self.peers,
            ways: &self.ways,
            cpu: &mut self.cpu,
        };
        let (verdict, mark, frame) = call::run(of, maps, direction, interface, frame);
        Tried { passed: verdict == GOES_ON, mark, frame }
    }

    /// Counters of the programs.
    #[must_use]
    pub fn stats(&self) -> TaggingStats {
        let counters = self.cpu[..TaggingStats::COUNT].try_into().expect("they come first");
        TaggingStats::of(counters)
    }
}

/// An address as the maps have it.
fn words_of(address: IpAddr) -> [u64; 2] {
    let key = key_of(address);
    [0, 8].map(|at| u64::from_ne_bytes(key[at..at + 8].try_into().expect("eight bytes")))
}
