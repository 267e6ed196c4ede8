//! The kernel programs on the interface of each member: production's text, compiled for the host. A daemon sets them
//! up; they outlive it, as its C does.

use crate::frames::{Family, Node, PATH_MTU};
use crate::gate::SimGate;
use crate::host::CLOCK_LEAD_MS;
use crate::plant::Plant;
use crate::world::{Kernel, World};
use std::sync::Arc;
use tidelock_native::{Maps, Programs};
use tidelock_protocol::tag::IPV4_OPTION;
use tidelock_tagging::{Addresses, Direction, Hooks, Peer, Settings, TaggingStats, Tried};

const MARK_MASK: u32 = 0xffff_0000;
const PASS_MARK: u32 = 0x5a5a_0000;
/// The interface of a host that leads to the other hosts. Those of members have smaller numbers.
const UPLINK: u32 = 1 << 16;

/// The programs of one member.
#[derive(Debug)]
pub(crate) struct Loaded {
    /// The gate of the daemon that has set them up.
    gate: Arc<SimGate>,
    programs: Programs,
}

/// A frame after one of the programs.
#[derive(Debug)]
pub(crate) struct Ran {
    /// Verdict, mark and bytes.
    pub tried: Tried,
    /// The counter that has risen, of the last one that had a say: a packet that goes the way to the outside is
    /// counted for its reason as well (`gated_..`). None: the packet is nothing that the program does anything about.
    pub counted: Option<&'static str>,
}

fn difference(before: &TaggingStats, after: &TaggingStats) -> Option<&'static str> {
    let risen = before.named().zip(after.named()).filter(|(before, after)| before.1 != after.1);
    risen.map(|((name, _), _)| name).find(|name| !name.starts_with("gated_"))
}

impl World {
    /// Gives a frame to the programs of a member. `None`: its interface has none.
    pub(crate) fn run_programs(
        &mut self,
        vm: usize,
        direction: Direction,
        interface: u32,
        frame: &[u8],
    ) -> Option<Ran> {
        let loaded = self.vms[vm].programs.take();
        let kernel = self.vms[vm].kernel.as_ref()?;
        let loaded = loaded.filter(|loaded| Arc::ptr_eq(&loaded.gate, &kernel.gate));
        let mut loaded = loaded.unwrap_or_else(|| self.load(vm, kernel));
        // Members set up by the same daemon.
        let beside = |other: &usize| {
            let theirs = self.vms[*other].kernel.as_ref();
            theirs.is_some_and(|theirs| Arc::ptr_eq(&theirs.gate, &kernel.gate))
        };
        let here: Vec<_> = (0..self.vms.len()).filter(beside).collect();
        let neighbours: Vec<_> = here
            .iter()
            .flat_map(|other| {
                let cells = self.vms[*other].pending.cells();
                addresses_of(*other).map(|address| (address, cells))
            })
            .collect();
        let interfaces: Vec<_> = here.iter().map(|other| interface_of(*other)).collect();
        let maps = Maps {
            pending: self.vms[vm].pending.cells(),
            committed: kernel.gate.cells(),
            crossing: kernel.gate.crossing(vm),
            neighbours: &neighbours,
            interfaces: &interfaces,
            has_judge: self.vms[vm].run.is_some(),
            now: self.host_now(self.plan.vms[vm].host),
        };
        let before = loaded.programs.stats();
        let tried = loaded.programs.run(direction, &maps, interface, frame);
        let counted = difference(&before, &loaded.programs.stats());
        self.vms[vm].programs = Some(loaded);
        Some(Ran { tried, counted })
    }

    /// Loads programs like a daemon at its start: nothing of this changes while it runs.
    fn load(&self, vm: usize, kernel: &Kernel) -> Loaded {
        let settings = Settings {
            codec: kernel.codec,
            ipv4_option: IPV4_OPTION,
            mark_mask: MARK_MASK,
            path_mtu: PATH_MTU as u32,
            path_strips_options: false,
            hlc_ahead_max_ms: CLOCK_LEAD_MS,
            is_bridged: true,
            off_for_a_demonstration: false,
            hooks: Hooks::Best,
        };
        let host = self.plan.vms[vm].host;
        let others = kernel.peers.iter().filter(|other| **other != vm);
        let peers = others.flat_map(|other| {
            let is_here = self.plan.vms[*other].host == host;
            addresses_of(*other).map(|address| Peer { address, is_here })
        });
        let addresses = Addresses { own: addresses_of(vm).to_vec(), peers: peers.collect() };
        let programs = Programs::new(&settings, &addresses, kernel.gate.run(), PASS_MARK);
        let fault = match self.plant {
            Some(Plant::Programs(fault)) => Some(fault),
            _ => None,
        };
        Loaded { gate: kernel.gate.clone(), programs: programs.with_fault(fault) }
    }

    /// The interface by which packets of a sender come to the host of a receiver.
    pub(crate) fn interface_from(&self, from: Node, to: usize) -> u32 {
        match from {
            Node::Vm(from) if self.plan.vms[from].host == self.plan.vms[to].host => {
                interface_of(from)
            }
            _ => UPLINK,
        }
    }
}

fn addresses_of(vm: usize) -> [std::net::IpAddr; 2] {
    [Family::Four, Family::Six].map(|family| Node::Vm(vm).address(family))
}

/// The host's end of a VM's network card.
pub(crate) fn interface_of(vm: usize) -> u32 {
    u32::try_from(vm).expect("few VMs") + 1
}
