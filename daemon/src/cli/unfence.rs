//! `tidelock unfence`: the operator says that a group is to be protected from here again, although the backup had told this
//! host that it was recovered there.
//!
//! The host cannot know that by itself: what the backup says may be older than what it said. So the fence is on record here,
//! and only a person takes it away.

use super::confirm::confirm;
use crate::config::{self, Config, ConfigError, Group};
use crate::control::Client;
use crate::host::state_file;
use anyhow::{Context, bail};
use std::path::Path;
use tidelock_daemon_core::state::{Fence, StateFile};
use tidelock_storage::files::Files;

/// Takes the fence of a group away. Returns what to print.
pub fn run(config: &Path, group: &str, yes: bool, json: bool) -> anyhow::Result<String> {
    let config = config::load(config).map_err(|error| match error {
        ConfigError::Wrong(found) => anyhow::anyhow!("the configuration is wrong:\n{found}"),
        other => other.into(),
    })?;
    let group = super::remove_rules::find(&config, group)?;
    if Client::connect(&config.host.control_socket()).is_ok() {
        bail!("tidelockd runs here: stop it first (systemctl stop tidelockd)");
    }
    let name = group.name.as_str();
    let fences = fences(&config, group)?;
    let Some((_, fence)) = fences.first() else {
        bail!("group {name} is not fenced on this host: nothing was changed");
    };
    if !yes {
        confirm(&consequence(name, fence), "Take the fence away?", "nothing was changed")?;
    }
    for (file, _) in &fences {
        file.remove_fence().context("the group stays fenced")?;
    }
    if json {
        let outcome =
            serde_json::json!({ "group": name, "epoch": fence.epoch, "reason": fence.reason });
        return Ok(format!("{outcome}\n"));
    }
    Ok(format!(
        "group {name} is not fenced on this host any more. When tidelockd starts, it asks the backup, and all disks are \
         compared\n"
    ))
}

/// Those of the group's members here, with the files that have them.
fn fences(config: &Config, group: &Group) -> anyhow::Result<Vec<(StateFile<Files>, Fence)>> {
    let mut fences = Vec::new();
    for member in &group.members {
        let file = state_file(config, group, member);
        fences.extend(file.fence()?.map(|fence| (file, fence)));
    }
    Ok(fences)
}

fn consequence(group: &str, fence: &Fence) -> String {
    format!(
        "The backup has told this host that epoch {} of group {group} is over: {}\n\
         If the backup site, or a guest that was recovered there, still serves the group, both sites answer clients and take \
         writes after this. It is for a backup whose data was reverted on purpose to a moment before the recovery.",
        fence.epoch, fence.reason
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use tidelock_protocol::ids::Epoch;

    #[test]
    fn the_question_names_what_the_backup_had_said() {
        let fence = Fence { epoch: Epoch(3), reason: "it was recovered at noon".into() };
        let text = consequence("shop", &fence);
        for part in ["epoch 3 of group shop", "recovered at noon", "both sites answer"] {
            assert!(text.contains(part), "{part} in {text}");
        }
    }
}
