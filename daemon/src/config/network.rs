//! `[[group.member.network]]`: where the packets of each network card of a member are held.

use std::net::IpAddr;

use tidelock_config::{Located, Section};

use super::read::Counters;
use super::{Network, Topology};

/// The first of the queues that are given out: far from 0, which other programs like.
const FIRST_QUEUE: u16 = 7100;
/// Linux's `IFNAMSIZ`, without its end mark.
const INTERFACE_MAX_BYTES: usize = 15;
const HELD_PACKETS_DEFAULT: u32 = 1 << 16;
/// The kernel's queue is made this long.
const HELD_PACKETS_MAX: u32 = 1 << 20;

/// One network card of a member: its addresses, and where its packets are held if it is on this host.
pub(super) fn read_network(
    network: &mut Section<'_>,
    count: &Counters,
    is_here: bool,
) -> Option<(Vec<IpAddr>, Option<Network>)> {
    let addresses = network.optional::<Vec<IpAddr>>("addresses").map_or(Vec::new(), |a| a.value);
    if is_here {
        return Some((addresses, Some(read_held(network, count)?)));
    }
    // One section stands on all hosts: what only the member's own host uses may be there.
    network.optional::<String>("interface");
    network.optional::<String>("topology");
    network.optional::<u16>("queue");
    network.optional::<u32>("held_packets_max");
    Some((addresses, None))
}

fn read_held(network: &mut Section<'_>, count: &Counters) -> Option<Network> {
    let interface = network.required::<String>("interface", "interface = \"tap0\"");
    if let Some(interface) = &interface {
        check_interface(network, interface);
    }
    let topologies = [("routed", Topology::Routed), ("bridged", Topology::Bridged)];
    let topology = network.choice("topology", &topologies);
    if !network.has("topology") {
        let example =
            "topology = \"bridged\" if the interface is a port of a bridge, else \"routed\"";
        network.missing("topology", example);
    }
    let given_out = FIRST_QUEUE + count.networks.get();
    count.networks.set(count.networks.get() + 1);
    let queue = network.or("queue", given_out);
    let held_packets_max = network.or("held_packets_max", HELD_PACKETS_DEFAULT);
    if !(1..=HELD_PACKETS_MAX).contains(&held_packets_max.value) {
        let what = format!(
            "`held_packets_max` in [[group.member.network]]: {} is out of range",
            held_packets_max.value
        );
        let instead = format!("1 to {HELD_PACKETS_MAX}");
        network.fail(&held_packets_max.place, what, instead);
    }
    Some(Network {
        interface: interface?,
        topology: topology?.value,
        queue,
        held_packets_max: held_packets_max.value,
    })
}

/// As the kernel has it (`dev_valid_name`).
fn check_interface(network: &Section<'_>, interface: &Located<String>) {
    let name = &interface.value;
    let odd = |c: char| c.is_whitespace() || c == '/' || c == ':' || c.is_control();
    if name.len() > INTERFACE_MAX_BYTES || name.contains(odd) || name == "." || name == ".." {
        let what =
            format!("`interface` in [[group.member.network]]: \"{name}\" is no interface's name");
        network.fail(&interface.place, what, "the guest's tap, such as \"tap0\" (see `ip link`)");
    }
}
