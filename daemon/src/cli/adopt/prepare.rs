//! `tidelock adopt --prepare`: blank disks of the right sizes, and the record that they are blank.

use super::Options;
use super::guests::{sockets, source_of};
use super::qmp::{self, Node, Qmp};
use crate::adoption;
use crate::cli::human;
use crate::clock;
use crate::config::{self, Config, ConfigError, Group};
use crate::control::Client;
use crate::host::records_of;
use anyhow::{Context, bail};
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;
use tidelock_daemon_core::records::Records;
use tidelock_storage::files::Files;

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
    let with_disks = group.members.iter().filter(|member| !member.disks.is_empty());
    let members: Vec<_> = with_disks.clone().map(|member| member.name.as_str()).collect();
    let nodes = match options.qmp.as_slice() {
        [] => None,
        given => {
            let each = sockets(given, &members)?.into_iter();
            Some(
                each.map(|path| Ok(qmp::nodes(&mut Qmp::connect(path)?)?))
                    .collect::<anyhow::Result<Vec<_>>>()?,
            )
        }
    };
    // Nothing is made before all is known.
    let mut disks = Vec::new();
    for (nth, member) in with_disks.enumerate() {
        for disk in &member.disks {
            let (member, name, path) = (member.name.as_str(), disk.name.as_str(), &disk.path.value);
            let node = match &nodes {
                Some(nodes) => Some(source_of(&nodes[nth], member, name, &options.disks)?),
                None => None,
            };
            disks.push((format!("{member}.{name}"), path, node));
        }
    }
    let mut text = String::new();
    for (name, path, node) in disks {
        text += &blank_disk(&name, path, node)?;
    }
    let files = Files::make(config.host.state_dir.clone());
    let kept = files
        .and_then(|files| Records::new(files, group.name.as_str()).keep_adopting(clock::wall_ms()));
    kept.context("it cannot be put on record that the disks are blank")?;
    Ok(text + &format!("Now start tidelockd, and then: tidelock adopt {name}\n"))
}

/// Whether the group can be adopted by this host.
fn check_group(config: &Config, group: &Group) -> anyhow::Result<()> {
    let name = group.name.as_str();
    let elsewhere = adoption::elsewhere(group);
    if !elsewhere.is_empty() {
        bail!(
            "{} runs on another host: the guests of a group are adopted by one daemon, all together. Name this host for \
             each of them, or export the disks instead, as docs/manual/way-back.md says",
            elsewhere.join(", ")
        );
    }
    // One that starts just now has its socket already.
    if Client::connect(&config.host.control_socket()).is_ok() {
        bail!("tidelockd runs here: stop it first (systemctl stop tidelockd)");
    }
    let records = records_of(config, group);
    if records.is_adopting() {
        return Ok(());
    }
    let state = records.dir();
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
