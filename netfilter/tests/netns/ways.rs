//! Interfaces whose packets do not come by where the rules are.

use crate::lab::{INTERFACE, Lab, MARKER, in_namespace, next, udp, until};
use crate::tagging::{PORT, any, at, socket, until_packets_pass_by_themselves};
use crate::town::{Plan, Town};
use crate::{TOPOLOGIES, backends, can_run};
use tidelock_netfilter::nfqueue::QueueNumber;
use tidelock_netfilter::rules::{Firewall, MemberRules, RulesError, Topology};

#[test]
fn an_interface_that_is_not_what_its_topology_says_is_refused() {
    if !can_run("wrong_topology") {
        return;
    }
    for topology in TOPOLOGIES {
        for backend in backends("wrong_topology", &Lab::new(topology)) {
            let lab = Lab::new(topology);
            let wrong = match topology {
                Topology::Routed => format!("ip link set {INTERFACE} master br9"),
                Topology::Bridged => format!("ip link set {INTERFACE} nomaster"),
            };
            let right = match topology {
                Topology::Routed => format!("ip link set {INTERFACE} nomaster"),
                Topology::Bridged => format!("ip link set {INTERFACE} master br0"),
            };
            lab.on_host("ip link add br9 type bridge; ip link set br9 up");
            in_namespace(&lab.host(), || {
                let mut firewall = Firewall::detect_only("test", |name| name == backend).unwrap();
                let rules = MemberRules {
                    member: "web".into(),
                    interface: INTERFACE.into(),
                    topology,
                    queue: QueueNumber(4),
                    marks: None,
                    index: None,
                    only_that_index: false,
                };
                lab.on_host(&wrong);
                let refused = firewall.install(&rules).unwrap_err();
                assert!(matches!(refused, RulesError::WrongTopology { .. }), "{refused}");
                lab.on_host(&right);
                let installed = firewall.install(&rules).unwrap();
                let verify = |firewall: &Firewall| firewall.verify([&installed]).remove(0);
                verify(&firewall).unwrap();
                lab.on_host(&wrong);
                let changed = verify(&firewall).unwrap_err();
                assert!(matches!(changed, RulesError::Changed { .. }), "{changed}");
                assert!(changed.to_string().contains(INTERFACE), "{changed}");
                lab.on_host(&right);
                verify(&firewall).unwrap();
                firewall.remove("web").unwrap();
            });
        }
    }
}

/// From the first look on, and until what was changed is as it was.
#[test]
fn where_the_programs_run_nothing_is_led_past_the_rules() {
    if !can_run("led_past") {
        return;
    }
    for plan in Plan::ALL {
        let town = Town::new(plan);
        let mut gates = town.gates("2");
        let (web, client) = (socket(&town, "web"), socket(&town, "client"));
        let to = at(town.ip("client"));
        let host = udp(&town.ns("host"), &any(PORT));
        gates.tell("web", "pending 0 3");
        gates.tell_all("commit 0 3");
        until_packets_pass_by_themselves(&mut gates, &web, &client, to);
        gates.tell("web", "pending 0 4");
        let (wrong, right) = match plan {
            Plan::OneBridge if gates.said.contains("iptables") => (
                "sysctl -qw net.bridge.bridge-nf-call-iptables=0",
                "sysctl -qw net.bridge.bridge-nf-call-iptables=1",
            ),
            Plan::OneBridge => continue,
            // What it is a port of leads on to the same router.
            Plan::OneRouter | Plan::TwoHosts => (
                "ip link add br9 address $(ip -br link show w0 | awk '{print $3}') type bridge; ip link set br9 up
                 ip link set w0 master br9; ip addr add 10.71.1.1/24 dev br9; ip addr del 10.71.1.1/24 dev w0",
                "ip link del br9; ip addr add 10.71.1.1/24 dev w0",
            ),
        };
        town.on("host", wrong);
        let passes = || {
            web.send_to(b"unheld", to).unwrap();
            host.send_to(MARKER, to).unwrap();
            let first = next(&client) != MARKER;
            while first && next(&client) != MARKER {}
            first
        };
        until("it is led past", passes);
        gates.of("web").tell("look");
        assert!(!passes(), "{plan:?}");
        assert!(gates.tags("web")["dropped_no_rules"] > 0, "{plan:?}");
        assert_eq!(gates.of("web").tell("rules"), "failing", "{plan:?}");
        assert!(!passes(), "{plan:?}");
        town.on("host", right);
        assert_eq!(gates.of("web").tell("rules"), "in_place", "{plan:?}");
        // It is held, as ever, until it is covered.
        assert!(!passes(), "{plan:?}");
        gates.tell_all("commit 0 4");
        until("it is let go", passes);
    }
}
