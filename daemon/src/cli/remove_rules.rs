//! `tidelock remove-rules`: takes away what a daemon has left in the packet filter, when its guest is gone for good.
//!
//! A daemon leaves its rules however it ends, so that its guest stays silent: the group may be recovered at the backup
//! site meanwhile. Only a person can know that nothing of that guest runs any more, or that it may answer unprotected.

use super::confirm::confirm;
use crate::config::{self, Config, ConfigError, Group};
use crate::control::Client;
use anyhow::{Context, bail};
use std::path::Path;
use tidelock_netfilter::gate::{Left, PIN_DIRECTORY};
use tidelock_netfilter::nfqueue::QueueNumber;
use tidelock_netfilter::rules::Firewall;

/// Removes the rules of a group. Returns what to print.
pub fn run(config: &Path, group: &str, yes: bool) -> anyhow::Result<String> {
    let config = config::load(config).map_err(|error| match error {
        ConfigError::Wrong(found) => anyhow::anyhow!("the configuration is wrong:\n{found}"),
        other => other.into(),
    })?;
    let group = find(&config, group)?;
    let left = left_of(group);
    if left.is_empty() {
        bail!("no member of {} has a network on this host", group.name.as_str());
    }
    // One that is started, but has not bound its queues yet, has its socket already; and the other way round.
    if Client::connect(&config.host.control_socket()).is_ok() {
        bail!("tidelockd runs here: stop it first (systemctl stop tidelockd)");
    }
    if !yes {
        confirm(&consequence(&left), "Remove the rules?", "nothing was removed")?;
    }
    let mut firewall = Firewall::detect(config.host.name.as_str())?;
    for member in &left {
        member
            .remove(&mut firewall)
            .with_context(|| format!("{} keeps its rules", member.member))?;
    }
    Ok(words(&left))
}

pub(super) fn find<'a>(config: &'a Config, name: &str) -> anyhow::Result<&'a Group> {
    let found = config.groups.iter().find(|group| group.name.as_str() == name);
    found.with_context(|| {
        let known: Vec<_> = config.groups.iter().map(|group| group.name.as_str()).collect();
        format!("there is no group \"{name}\" in the configuration; there is {}", known.join(", "))
    })
}

fn left_of(group: &Group) -> Vec<Left<'_>> {
    let here = group.members.iter().flat_map(|member| {
        member
            .networks
            .iter()
            .enumerate()
            .map(|(nth, network)| (member.name.as_str(), nth, network))
    });
    here.map(|(member, nth, network)| Left {
        group: group.name.as_str(),
        member,
        nth,
        interface: &network.interface.value,
        queue: QueueNumber(network.queue.value),
        pin_directory: Path::new(PIN_DIRECTORY),
    })
    .collect()
}

fn consequence(left: &[Left<'_>]) -> String {
    let interfaces: Vec<_> = left.iter().map(|member| member.interface).collect();
    format!(
        "Whatever is behind {} will talk to anybody unheld. If the group was recovered at the backup site, and an old \
         guest still runs here, both sites answer clients. Stop the old guests first.",
        interfaces.join(", ")
    )
}

fn words(left: &[Left<'_>]) -> String {
    left.iter()
        .map(|m| format!("{}: the rules of {} are gone; its packets pass\n", m.member, m.interface))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_becomes_of_each_interface_is_said() {
        let member = |member, interface| Left {
            group: "shop",
            member,
            nth: 0,
            interface,
            queue: QueueNumber(7100),
            pin_directory: Path::new(PIN_DIRECTORY),
        };
        let left = [member("db", "tap-db"), member("web", "tap-web")];
        let text = consequence(&left);
        assert!(text.contains("tap-db, tap-web") && text.contains("both sites answer"), "{text}");
        assert_eq!(
            words(&left),
            "db: the rules of tap-db are gone; its packets pass\n\
             web: the rules of tap-web are gone; its packets pass\n"
        );
    }
}
