//! `tidelock mode`: switches how a group treats writes and packets, after saying what that means.

use super::confirm::confirm;
use crate::control::Client;
use anyhow::bail;
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

/// Whether the switch gives up what clients were promised.
#[must_use]
pub fn gives_up_the_promise(from: Mode, to: Mode) -> bool {
    from != Mode::Async && to == Mode::Async
}

/// Switches, and returns what to tell the operator.
pub fn run(client: &mut Client, group: &str, to: Mode, yes: bool) -> anyhow::Result<String> {
    let status = client.status()?;
    let from = match status.groups.iter().find(|known| known.name == group) {
        Some(known) => known.mode,
        None => {
            let known: Vec<_> = status.groups.iter().map(|group| group.name.as_str()).collect();
            bail!("there is no group \"{group}\" here; there is {}", known.join(", "));
        }
    };
    if from == to {
        return Ok(format!("{group} is in {to} mode already.\n"));
    }
    if gives_up_the_promise(from, to) && !yes {
        confirm(consequence(to), &format!("Switch {group} to {to}?"), "not switched")?;
    }
    let change = client.set_mode(group, to)?;
    let groups = client.status()?.groups;
    let waits = groups.into_iter().find(|known| known.name == group && known.mode != to);
    let why = waits.and_then(|known| known.detail);
    Ok(format!(
        "{group}: {} -> {}, until the daemon's next start.\n{}\n{}",
        change.before,
        change.after,
        consequence(to),
        why.map_or(String::new(), |why| format!("Not yet: {why}.\n"))
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_async_gives_up_the_promise() {
        for from in [Mode::Sync, Mode::Pipelined, Mode::Async] {
            for to in [Mode::Sync, Mode::Pipelined, Mode::Async] {
                let gives_up = from != to && to == Mode::Async;
                assert_eq!(gives_up_the_promise(from, to), gives_up, "{from} {to}");
            }
        }
    }
}
