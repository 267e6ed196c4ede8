//! Networks of machines on this host: which connection is meant for which network card, taps and bridges.

use crate::jail::{self, Jail};
use crate::{Guest, Plan};

/// True if a network can be connected in this way.
fn is_connection(how: &str) -> bool {
    let names = |prefix: &str| how.strip_prefix(prefix).is_some_and(|name| !name.is_empty());
    how == "user" || how == "none" || names("tap:") || names("bridge:")
}

/// The operator's connections: the network's name, with or without its member's in front of it (either may have dots),
/// and how it is connected.
fn connections(plan: &Plan) -> impl Iterator<Item = (&str, &str)> {
    plan.settings.networks.iter().map(|text| text.split_once('=').unwrap_or((text, "")))
}

/// The network of this machine that is meant, if any.
fn network_of(network: &str, guest: &Guest) -> Option<String> {
    let with_member = network.strip_prefix(&guest.member).and_then(|n| n.strip_prefix('.'));
    let mut names = guest.machine.network_names().into_iter();
    names.find(|name| network == *name || with_member == Some(name))
}

/// Problems of the operator's connections: each is for a network that is there, and a tap for one machine only.
pub(crate) fn check(plan: &Plan) -> Vec<String> {
    let mut problems = Vec::new();
    for (network, how) in connections(plan) {
        let wanted: Vec<_> =
            plan.guests.iter().filter(|g| network_of(network, g).is_some()).collect();
        if wanted.is_empty() || !is_connection(how) {
            let known = plan.guests.iter().flat_map(|guest| {
                let names = guest.machine.network_names();
                names.into_iter().map(|name| format!("{}.{name}", guest.member))
            });
            let known = known.collect::<Vec<_>>().join(", ");
            let known = if known.is_empty() { "none".into() } else { known };
            problems.push(format!(
                "--network {network}={how}: write NAME=tap:INTERFACE, NAME=bridge:BRIDGE, NAME=user or NAME=none, \
                 with a name of the machines' networks ({known})"
            ));
        } else if wanted.len() > 1 && how.starts_with("tap:") {
            problems.push(format!(
                "--network {network}={how}: a tap is for one machine, and {} have a network {network}: write \
                 --network {}.{network}={how}, or connect all of them with --network {network}=bridge:BRIDGE",
                wanted.iter().map(|g| g.member.as_str()).collect::<Vec<_>>().join(", "),
                wanted[0].member,
            ));
        }
    }
    problems
}

/// Connections of this machine's networks. A connection for `MEMBER.NAME` takes precedence over one for `NAME`.
/// For a bridge, a tap is made in the bridge: QEMU itself may not make one.
pub(crate) async fn connect(
    plan: &Plan,
    guest: &Guest,
    jail: &Jail,
    taps: &mut Vec<String>,
) -> Result<Vec<(String, String)>, String> {
    let mut own: Vec<_> = connections(plan)
        .filter_map(|(network, how)| Some((network_of(network, guest)?, network, how)))
        .collect();
    own.sort_by_key(|(name, network, _)| name == network);
    let mut seen: Vec<(String, String)> = Vec::new();
    for (name, _, how) in own {
        if seen.iter().any(|(other, _)| *other == name) {
            continue;
        }
        let how = match how.strip_prefix("bridge:") {
            None => how.to_owned(),
            Some(bridge) => {
                let tap = tap_name(&plan.group, &guest.member, seen.len());
                make_tap(&tap, bridge, jail)
                    .await
                    .map_err(|reason| format!("--network {name}=bridge:{bridge}: {reason}"))?;
                taps.push(tap.clone());
                format!("tap:{tap}")
            }
        };
        seen.push((name, how));
    }
    Ok(seen)
}

/// An interface's name has 15 bytes.
fn tap_name(group: &str, member: &str, nth: usize) -> String {
    let digest = blake3::hash(format!("{group}/{member}/{nth}").as_bytes());
    format!("tl{}", &digest.to_hex()[..12])
}

/// Makes a tap that QEMU's user may open, in a bridge.
async fn make_tap(tap: &str, bridge: &str, jail: &Jail) -> Result<(), String> {
    let shown = jail::output(&["ip", "-d", "link", "show", "dev", bridge]).await;
    if !shown.is_ok_and(|text| text.contains("bridge forward_delay") || text.contains(" bridge ")) {
        return Err(format!(
            "there is no bridge {bridge} here. Make one: `ip link add {bridge} type bridge && ip link set {bridge} up`"
        ));
    }
    let user = jail.user().map_or_else(|| rustix::process::geteuid().as_raw(), |user| user.uid);
    if !jail::may_make_interfaces().map_err(|error| error.to_string())? {
        return Err(format!(
            "this server has no CAP_NET_ADMIN, so it cannot put a machine into a bridge. Make a tap for the machine \
             as root, `ip tuntap add dev {tap} mode tap user {user} && ip link set {tap} master {bridge} up`, and \
             write tap:{tap} in place of bridge:{bridge}; or give the server that capability (docs/manual/recovery.md)"
        ));
    }
    let uid = user.to_string();
    remove_taps(&[tap.to_owned()]).await;
    let add = ["ip", "tuntap", "add", "dev", tap, "mode", "tap", "user", &uid];
    let set = ["ip", "link", "set", tap, "master", bridge, "up"];
    for words in [&add[..], &set[..]] {
        if let Err(error) = jail::output(words).await {
            remove_taps(&[tap.to_owned()]).await;
            return Err(error.to_string());
        }
    }
    Ok(())
}

/// Removes interfaces that were made for a machine.
pub(crate) async fn remove_taps(taps: &[String]) {
    for tap in taps {
        let _ = jail::output(&["ip", "link", "delete", "dev", tap]).await;
    }
}
