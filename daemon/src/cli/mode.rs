//! `tidelock mode`: switches how a group's members on this host treat writes and packets, after saying what that means.

use super::confirm::confirm;
use crate::control::Client;
use anyhow::bail;
use std::collections::BTreeSet;
use tidelock_daemon_core::status::GroupStatus;
use tidelock_protocol::message::Mode;

/// What a switch means for the guest and for the clients.
#[must_use]
pub fn consequence(to: Mode) -> &'static str {
    match to {
        Mode::Sync => "Each write of the guest will wait for the backup: one round trip for each.",
        Mode::Pipelined => {
            "Writes will complete locally, and replies to clients will wait for the backup."
        }
        Mode::Async => {
            "Nothing will wait for the backup, and no lease is needed. After a disaster, clients \
             may remember what the recovered disks do not have: up to the lag that `tidelock \
             status` shows. If the link is down and someone recovers the group at the backup, both \
             sites answer clients."
        }
    }
}

/// Whom a switch does not reach, where a group is spread over several hosts.
fn not_switched(group: &GroupStatus) -> Option<String> {
    let hosts: BTreeSet<_> =
        group.elsewhere.iter().filter_map(|member| member.host.as_deref()).collect();
    let others = Vec::from_iter(hosts).join(", ");
    let here: Vec<_> = group.members.iter().map(|member| member.name.as_str()).collect();
    (!others.is_empty()).then(|| {
        format!(
            "This is about the members on this host only ({}): each other host ({others}) has a mode of its own, and is \
             switched there.",
            here.join(", ")
        )
    })
}

/// How a group stands: a mode that is wanted may not be in force yet, and one may be in force that nobody wants.
#[derive(Clone, Copy, Debug)]
struct Modes {
    wanted: Mode,
    in_force: Mode,
}

impl Modes {
    fn of(group: &GroupStatus) -> Self {
        Self { wanted: group.wanted_mode, in_force: group.mode }
    }

    /// Whether there is nothing to switch.
    fn are(self, to: Mode) -> bool {
        (self.wanted, self.in_force) == (to, to)
    }

    /// Whether the switch gives up what clients were promised.
    fn give_up_the_promise(self, to: Mode) -> bool {
        to == Mode::Async && !self.are(to)
    }
}

/// Switches, and returns what to tell the operator.
pub fn run(client: &mut Client, group: &str, to: Mode, yes: bool) -> anyhow::Result<String> {
    let status = client.status()?;
    let (modes, not_switched) = match status.groups.iter().find(|known| known.name == group) {
        Some(known) => (Modes::of(known), not_switched(known)),
        None => {
            let known: Vec<_> = status.groups.iter().map(|group| group.name.as_str()).collect();
            bail!("there is no group \"{group}\" here; there is {}", known.join(", "));
        }
    };
    let not_switched = not_switched.map_or(String::new(), |text| text + "\n");
    if modes.are(to) {
        return Ok(format!("{group} is in {to} mode already.\n{not_switched}"));
    }
    if modes.give_up_the_promise(to) && !yes {
        let told = format!("{not_switched}{}", consequence(to));
        confirm(&told, &format!("Switch {group} to {to}?"), "not switched")?;
    }
    let change = client.set_mode(group, to)?;
    let groups = client.status()?.groups;
    let waits = groups.into_iter().find(|known| known.name == group && known.mode != to);
    let why = waits.and_then(|known| known.detail);
    let switched = match change.before == change.after {
        true => format!("{group} is to be in {to} mode"),
        false => format!("{group}: {} -> {to}", change.before),
    };
    Ok(format!(
        "{switched}, until the daemon's next start.\n{not_switched}{}\n{}",
        consequence(to),
        why.map_or(String::new(), |why| format!("Not yet: {why}.\n"))
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: [Mode; 3] = [Mode::Sync, Mode::Pipelined, Mode::Async];

    #[test]
    fn only_async_gives_up_the_promise() {
        for from in ALL {
            for to in ALL {
                let modes = Modes { wanted: from, in_force: from };
                let gives_up = from != to && to == Mode::Async;
                assert_eq!(modes.give_up_the_promise(to), gives_up, "{from} {to}");
                assert_eq!(modes.are(to), from == to, "{from} {to}");
            }
        }
    }

    #[test]
    fn where_a_group_has_other_hosts_it_says_that_they_are_not_switched() {
        let mut group = crate::example_status::status().groups.remove(0);
        let said = not_switched(&group).unwrap();
        assert!(
            said.contains("on this host only (db): each other host (host-b) has a mode"),
            "{said}"
        );
        group.elsewhere.clear();
        assert_eq!(not_switched(&group), None);
    }

    /// Async that waits to come into force can be called off and insisted on, and so can that of a degraded group.
    #[test]
    fn a_mode_that_is_only_wanted_or_only_in_force_is_not_had_already() {
        for (wanted, in_force) in [(Mode::Async, Mode::Pipelined), (Mode::Pipelined, Mode::Async)] {
            let modes = Modes { wanted, in_force };
            assert!(ALL.into_iter().all(|to| !modes.are(to)), "{modes:?}");
            assert!(modes.give_up_the_promise(Mode::Async), "{modes:?}");
            assert!(!modes.give_up_the_promise(Mode::Pipelined), "{modes:?}");
        }
    }
}
