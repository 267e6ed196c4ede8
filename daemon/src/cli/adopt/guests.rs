//! The guests of a group, each with its QEMU.

use super::Options;
use super::mirror::{Mirror, MirrorProgress};
use super::qmp::{Node, Qmp, QmpError};
use crate::control::AdoptedDisk;
use anyhow::{Context, bail};
use std::path::{Path, PathBuf};

/// Where a guest's QEMU answers: `SOCKET`, or `MEMBER=SOCKET`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MonitorOf {
    /// Whose; `None`: of the only one.
    pub member: Option<String>,
    /// Its socket.
    pub socket: PathBuf,
}

impl MonitorOf {
    /// Reads it.
    ///
    /// # Errors
    /// One of both is missing.
    pub fn parse(text: &str) -> Result<Self, String> {
        // A path may have such a sign in it, a name has no slash.
        let (member, socket) = match text.split_once('=') {
            Some((member, socket)) if !member.contains('/') => (Some(member.to_owned()), socket),
            _ => (None, text),
        };
        if socket.is_empty() || member.as_ref().is_some_and(String::is_empty) {
            return Err("write SOCKET, or MEMBER=SOCKET".to_owned());
        }
        Ok(Self { member, socket: socket.into() })
    }
}

/// The socket of each member that has disks.
pub(super) fn sockets<'a>(
    monitors: &'a [MonitorOf],
    members: &[&str],
) -> anyhow::Result<Vec<&'a Path>> {
    for (nth, monitor) in monitors.iter().enumerate() {
        let Some(name) = &monitor.member else { continue };
        if !members.contains(&name.as_str()) {
            bail!("--qmp {name}=...: members with disks are {}", members.join(", "));
        }
        if monitors[..nth].iter().any(|other| other.member == monitor.member) {
            bail!("--qmp {name}=... is there twice");
        }
    }
    let of = |member: &str| {
        let named = monitors.iter().find(|m| m.member.as_deref() == Some(member));
        match monitors {
            [only @ MonitorOf { member: None, .. }] if members.len() == 1 => Some(only),
            _ => named,
        }
    };
    let found: Vec<_> = members.iter().filter_map(|member| of(member)).collect();
    if found.len() != members.len() || found.len() != monitors.len() {
        let wanted: Vec<_> = members.iter().map(|name| format!("--qmp {name}=SOCKET")).collect();
        bail!("each guest has a QEMU of its own, so give all of: {}", wanted.join(" "));
    }
    Ok(found.into_iter().map(|monitor| monitor.socket.as_path()).collect())
}

/// The members that these disks are of.
pub(super) fn members_of(disks: &[AdoptedDisk]) -> Vec<&str> {
    let mut members: Vec<&str> = Vec::new();
    for disk in disks {
        if !members.contains(&disk.member.as_str()) {
            members.push(&disk.member);
        }
    }
    members
}

/// All of them, with the copies of their disks.
#[derive(Debug)]
pub(super) struct Guests(Vec<Mirror>);

impl Guests {
    /// Connects to each one's QEMU.
    pub(super) fn connect(disks: &[AdoptedDisk], options: &Options) -> anyhow::Result<Self> {
        let members = members_of(disks);
        let sockets = sockets(&options.qmp, &members)?;
        let of = |member: &&str| {
            disks.iter().filter(|disk| disk.member == *member).cloned().collect::<Vec<_>>()
        };
        let each = members.iter().zip(sockets).map(|(member, socket)| {
            Ok(Mirror::new(Qmp::connect(socket)?, of(member), options.clone()))
        });
        each.collect::<anyhow::Result<_>>().map(Self)
    }

    /// Begins the copies of all disks, or goes on with such as were begun before.
    pub(super) fn begin(&mut self) -> anyhow::Result<()> {
        self.0.iter_mut().try_for_each(Mirror::begin)
    }

    /// How all copies stand together.
    pub(super) fn look(&mut self) -> anyhow::Result<MirrorProgress> {
        let mut all = MirrorProgress { is_ready: true, done_bytes: 0, total_bytes: 0 };
        for mirror in &mut self.0 {
            let seen = mirror.look()?;
            all.is_ready &= seen.is_ready;
            all.done_bytes += seen.done_bytes;
            all.total_bytes += seen.total_bytes;
        }
        Ok(all)
    }

    /// Every guest uses the copies from now on. What has not come to pass can be cancelled.
    pub(super) fn move_all(&mut self) -> anyhow::Result<()> {
        self.0.iter_mut().try_for_each(Mirror::move_guest)
    }

    /// Ends the copies. Guests that were not moved go on where they were, also if they wait for a daemon that is away.
    pub(super) fn cancel(&mut self) -> Result<(), QmpError> {
        let mut result = Ok(());
        for mirror in &mut self.0 {
            result = result.and(mirror.cancel());
        }
        result
    }

    /// Said after [`cancel`](Self::cancel).
    pub(super) fn goes_on_where_it_was(&self) -> &'static str {
        match self.0.len() {
            1 => "the guest goes on where it was",
            _ => "all guests go on where they were",
        }
    }
}

/// The node by which the guest reads a disk.
pub(super) fn source_of<'a>(
    nodes: &'a [Node],
    member: &str,
    disk: &str,
    named: &[(String, String)],
) -> anyhow::Result<&'a Node> {
    let known = || nodes.iter().map(|node| node.name.as_str()).collect::<Vec<_>>().join(", ");
    let full = format!("{member}.{disk}");
    let named_so = |name: &str| named.iter().find(|(of, _)| of == name);
    if let Some((_, name)) = named_so(&full).or_else(|| named_so(disk)) {
        let found = nodes.iter().find(|node| node.name == *name);
        return found.with_context(|| format!("QEMU has no node \"{name}\"; it has {}", known()));
    }
    let mut found = nodes.iter().filter(|node| node.export.as_ref() == Some(&full));
    match (found.next(), found.next()) {
        (Some(node), None) => Ok(node),
        _ => bail!(
            "it is not clear which node of QEMU is {full}: none, or more than one, reads an export {full}. Say it with \
             --disk {full}=NODE; there is {}",
            known()
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::super::disk_and_node;
    use super::*;

    #[test]
    fn a_disk_is_found_by_its_export_or_by_the_name_that_is_given() {
        let node = |name: &str, export: Option<&str>| Node {
            name: name.to_owned(),
            export: export.map(str::to_owned),
            size_bytes: 1,
        };
        let mut nodes = vec![node("disk0", Some("db.root")), node("rootfs", None)];
        assert_eq!(source_of(&nodes, "db", "root", &[]).unwrap().name, "disk0");
        let error = source_of(&nodes, "db", "wal", &[]).unwrap_err().to_string();
        assert!(error.contains("--disk db.wal=NODE; there is disk0, rootfs"), "{error}");
        let named = [("wal".to_owned(), "rootfs".to_owned())];
        assert_eq!(source_of(&nodes, "db", "wal", &named).unwrap().name, "rootfs");
        let both = [named[0].clone(), ("db.wal".to_owned(), "disk0".to_owned())];
        assert_eq!(source_of(&nodes, "db", "wal", &both).unwrap().name, "disk0", "the whole name");
        assert_eq!(source_of(&nodes, "ledger", "wal", &both).unwrap().name, "rootfs");
        let named = [("wal".to_owned(), "x".to_owned())];
        assert!(source_of(&nodes, "db", "wal", &named).is_err());
        nodes.push(node("disk1", Some("db.root")));
        assert!(source_of(&nodes, "db", "root", &[]).is_err(), "two of them");
        assert!(disk_and_node("root").is_err());
    }

    #[test]
    fn each_guest_has_a_socket_of_its_own() {
        let monitors = |texts: &[&str]| {
            texts.iter().map(|text| MonitorOf::parse(text).unwrap()).collect::<Vec<_>>()
        };
        let one = monitors(&["/run/a=b/qmp"]);
        assert_eq!(sockets(&one, &["db"]).unwrap(), [Path::new("/run/a=b/qmp")]);
        let error = |texts: &[&str], members: &[&str]| {
            sockets(&monitors(texts), members).unwrap_err().to_string()
        };
        let both = ["db", "ledger"];
        let named = monitors(&["ledger=/l", "db=/d"]);
        assert_eq!(sockets(&named, &both).unwrap(), [Path::new("/d"), Path::new("/l")]);
        for texts in [&["/d"][..], &["db=/d"], &["db=/d", "/l"], &["/d", "/l"]] {
            assert!(
                error(texts, &both).contains("--qmp db=SOCKET --qmp ledger=SOCKET"),
                "{texts:?}"
            );
        }
        assert!(error(&["db=/d", "web=/w"], &both).contains("members with disks are db, ledger"));
        assert!(error(&["db=/d", "db=/e"], &["db"]).contains("twice"));
        assert!(MonitorOf::parse("db=").is_err() && MonitorOf::parse("").is_err());
        assert!(MonitorOf::parse("=/d").is_err());
    }
}
