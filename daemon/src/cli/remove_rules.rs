//! `tidelock remove-rules`: takes away what a daemon has left in the packet filter, when its guest is gone for good.
//!
//! A daemon leaves its rules however it ends, so that its guest stays silent: the group may be recovered at the backup
//! site meanwhile. Only a person can know that nothing of that guest runs any more, or that it may answer unprotected.

use super::confirm::confirm;
use crate::config::{self, Config, ConfigError, Group};
use crate::control::Client;
use crate::host::{records_of, state_file};
use anyhow::{Context, bail};
use std::path::Path;
use std::time::{Duration, Instant};
use tidelock_netfilter::gate::{EndedGate, PIN_DIRECTORY};
use tidelock_netfilter::nfqueue::QueueNumber;
use tidelock_netfilter::rules::Firewall;

/// How long the backup is waited for.
const TELL_MAX: Duration = Duration::from_secs(15);
const ASK_EVERY: Duration = Duration::from_millis(100);

/// Removes the rules of a group, if the backup knows; or tells it, through the daemon that runs. Returns what to print.
pub fn run(config: &Path, group: &str, yes: bool, force: bool) -> anyhow::Result<String> {
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
    let is_told = is_told(&config, group)?;
    if let Ok(client) = Client::connect(&config.host.control_socket()) {
        return match is_told {
            true => bail!(
                "tidelockd runs here: stop it first (systemctl stop tidelockd), then give this command again"
            ),
            false => tell(client, group.name.as_str()),
        };
    }
    if !is_told && !force {
        bail!(
            "the backup does not know that a guest of {name} may answer clients from here: a recovery would say that this \
             host's gate is shut. Start tidelockd, give this command while it runs and reaches the backup, stop tidelockd, \
             and give it again. --force removes the rules without that: then see to it yourself that nobody recovers the \
             group while a guest runs here",
            name = group.name.as_str()
        );
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

/// Whether the backup has it on record that a guest here may answer clients, or has ended the epoch itself.
fn is_told(config: &Config, group: &Group) -> anyhow::Result<bool> {
    let mut is_told = true;
    for member in &group.members {
        let file = state_file(config, group, member);
        // An epoch ends for the whole group.
        if file.fence()?.is_some() {
            return Ok(true);
        }
        is_told &= file.may_be_left_open()?;
    }
    Ok(is_told || records_of(config, group).switched_at_unix_ms().is_some())
}

/// Tells the backup through the daemon.
fn tell(mut client: Client, group: &str) -> anyhow::Result<String> {
    let until = Instant::now() + TELL_MAX;
    while !client.leave_open(group)? {
        if Instant::now() > until {
            bail!(
                "the backup has not confirmed that it knows; see `tidelock status` for the link, and give this command again"
            );
        }
        std::thread::sleep(ASK_EVERY);
    }
    Ok(format!(
        "The backup knows that a guest of {group} may answer clients from here: a recovery will say so. No rule is removed yet. \
         Stop tidelockd (systemctl stop tidelockd), then give this command again.\n"
    ))
}

pub(super) fn find<'a>(config: &'a Config, name: &str) -> anyhow::Result<&'a Group> {
    let found = config.groups.iter().find(|group| group.name.as_str() == name);
    found.with_context(|| {
        let known: Vec<_> = config.groups.iter().map(|group| group.name.as_str()).collect();
        format!("there is no group \"{name}\" in the configuration; there is {}", known.join(", "))
    })
}

fn left_of(group: &Group) -> Vec<EndedGate<'_>> {
    let here = group.members.iter().flat_map(|member| {
        member
            .networks
            .iter()
            .enumerate()
            .map(|(nth, network)| (member.name.as_str(), nth, network))
    });
    here.map(|(member, nth, network)| EndedGate {
        group: group.name.as_str(),
        member,
        nth,
        interface: &network.interface.value,
        queue: QueueNumber(network.queue.value),
        pin_directory: Path::new(PIN_DIRECTORY),
    })
    .collect()
}

fn consequence(left: &[EndedGate<'_>]) -> String {
    let interfaces: Vec<_> = left.iter().map(|member| member.interface).collect();
    format!(
        "Whatever is behind {} will talk to anybody unheld, and what clients are told from now on is not protected. If the \
         group was recovered at the backup site, or ever is, and an old guest still runs here, both sites answer clients. Stop \
         the old guests first.",
        interfaces.join(", ")
    )
}

fn words(left: &[EndedGate<'_>]) -> String {
    left.iter()
        .map(|m| format!("{}: the rules of {} are gone; its packets pass\n", m.member, m.interface))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_becomes_of_each_interface_is_said() {
        let member = |member, interface| EndedGate {
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
