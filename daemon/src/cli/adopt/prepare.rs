//! `tidelock adopt --prepare`: blank disks of the right sizes, and the record that they are blank.

use super::Options;
use super::qmp::{self, Node, Qmp};
use super::source_of;
use crate::adoption;
use crate::cli::human;
use crate::clock;
use crate::config::{self, Config, ConfigError, Group};
use crate::control::Client;
use anyhow::{Context, bail};
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;

/// Prepares a group. Returns what to print.
pub(super) fn run(name: &str, options: &Options) -> anyhow::Result<String> {
    let config = config::load(&options.config).map_err(|error| match error {
        ConfigError::Wrong(found) => anyhow::anyhow!("the configuration is wrong:\n{found}"),
        other => other.into(),
    })?;
    let group = config.groups.iter().find(|group| group.name.as_str() == name);
    let group =
        group.with_context(|| format!("there is no group \"{name}\" in the configuration"))?;
    check_group(&config, group)?;
    let nodes = match &options.qmp {
        Some(path) => qmp::nodes(&mut Qmp::connect(path)?)?,
        None => Vec::new(),
    };
    let mut text = String::new();
    for member in &group.members {
        for disk in &member.disks {
            let (member, name, path) = (member.name.as_str(), disk.name.as_str(), &disk.path.value);
            let node = match &options.qmp {
                Some(_) => Some(source_of(&nodes, member, name, &options.disks)?),
                None => None,
            };
            text += &blank_disk(name, path, node)?;
        }
    }
    adoption::put_on_record(&adoption::record_path(&config, group), clock::wall_ms())
        .context("it cannot be put on record that the disks are blank")?;
    Ok(text + &format!("Now start tidelockd, and then: tidelock adopt {name}\n"))
}

/// Whether the group can be adopted by this host.
fn check_group(config: &Config, group: &Group) -> anyhow::Result<()> {
    let name = group.name.as_str();
    if group.roster.len() > 1 {
        bail!(
            "{name} has several members: nobody could know what one of them has told the others while its disk is \
             elsewhere. Export its disks instead, as docs/operations.md says"
        );
    }
    // One that starts just now has its socket already.
    if Client::connect(&config.host.control_socket()).is_ok() {
        bail!("tidelockd runs here: stop it first (systemctl stop tidelockd)");
    }
    if adoption::is_on_record(&adoption::record_path(config, group))? {
        return Ok(());
    }
    let state = adoption::state_dir(config, group);
    let is_empty = match fs::read_dir(&state) {
        Ok(mut entries) => entries.next().is_none(),
        Err(error) if error.kind() == io::ErrorKind::NotFound => true,
        Err(error) => return Err(error).with_context(|| format!("{}", state.display())),
    };
    if !is_empty {
        bail!(
            "this host has protected {name} before: {} has its epoch. If that is over, remove this directory",
            state.display()
        );
    }
    Ok(())
}

/// Makes the disk if it is not there. One that is there must have nothing on it.
fn blank_disk(name: &str, path: &Path, node: Option<&Node>) -> anyhow::Result<String> {
    let said = |what: &str| Ok(format!("{name}: {}: {what}\n", path.display()));
    match fs::metadata(path) {
        Ok(found) if found.file_type().is_block_device() => {
            said("a block device, all of which will be replaced")
        }
        Ok(found) => {
            if found.blocks() > 0 {
                bail!(
                    "{name}: {} has something on it, which would be replaced: remove it first",
                    path.display()
                );
            }
            match node {
                Some(node) if node.size_bytes != found.len() => bail!(
                    "{name}: {} has {} bytes, the guest's disk {}: remove it",
                    path.display(),
                    found.len(),
                    node.size_bytes
                ),
                _ => said("it is there, and blank"),
            }
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            let node = node.with_context(|| {
                format!(
                    "{name}: {} does not exist: give --qmp, so that its size is known, or make it",
                    path.display()
                )
            })?;
            File::create_new(path)
                .and_then(|file| file.set_len(node.size_bytes))
                .with_context(|| format!("{name}: {} cannot be made", path.display()))?;
            said(&format!("made, blank, {}", human::bytes(node.size_bytes)))
        }
        Err(error) => Err(error).with_context(|| format!("{name}: {}", path.display())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_that_is_on_a_disk_is_given_away() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("db.img");
        let node = Node { name: "disk0".into(), export: None, size_bytes: 1 << 20 };
        let error = blank_disk("root", &path, None).unwrap_err().to_string();
        assert!(error.contains("give --qmp"), "{error}");
        assert!(blank_disk("root", &path, Some(&node)).unwrap().contains("made, blank, 1 MiB"));
        assert_eq!(fs::metadata(&path).unwrap().len(), 1 << 20);
        assert!(blank_disk("root", &path, Some(&node)).unwrap().contains("it is there"));
        let other = Node { size_bytes: 2 << 20, ..node.clone() };
        assert!(blank_disk("root", &path, Some(&other)).is_err(), "of another size");
        fs::write(&path, vec![7; 1 << 20]).unwrap();
        File::open(&path).unwrap().sync_all().unwrap();
        let error = blank_disk("root", &path, Some(&node)).unwrap_err().to_string();
        assert!(error.contains("has something on it"), "{error}");
    }
}
