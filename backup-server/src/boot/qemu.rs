//! QEMU's command line for a recovered machine.

use super::{Description, DiskDevice};
use crate::server::exports::ExportedDisk;
use std::path::{Path, PathBuf};
use thiserror::Error;

/// What the backup site decides by itself.
#[derive(Clone, Debug, Default)]
pub struct Overrides {
    /// QEMU.
    pub qemu: Option<PathBuf>,
    /// The accelerator: `kvm` or `tcg`, which works everywhere.
    pub accelerator: Option<String>,
    /// Another memory size.
    pub memory_mib: Option<u64>,
    /// Where the files that the description names are, if they are not absolute.
    pub boot_dir: PathBuf,
    /// What the networks are connected to: `lan=tap:tap0`, `net0=bridge:br0`, `net0=user`.
    pub networks: Vec<(String, String)>,
    /// More arguments, at the end. `{member}` in one is the member's name.
    pub arguments: Vec<String>,
}

impl Overrides {
    /// QEMU.
    #[must_use]
    pub fn qemu(&self) -> PathBuf {
        self.qemu.clone().unwrap_or_else(|| "qemu-system-x86_64".into())
    }
}

/// Why a machine cannot be booted.
#[derive(Debug, Error)]
pub enum BootError {
    /// The description.
    #[error("the machine description cannot be used: {0}")]
    Description(String),
    /// There is none.
    #[error(
        "the host sent no machine description for {member}: set group.member.machine in its \
         configuration next time, and now give one with --machine {member}=FILE"
    )]
    NoDescription {
        /// The member.
        member: String,
    },
    /// A file is not at this site.
    #[error(
        "the {what} {path} is not at this site: the description of {member} names it, so keep a \
         copy here (relative paths are below {boot_dir})"
    )]
    NoFile {
        /// Kernel, initrd, firmware.
        what: &'static str,
        /// Where it was looked for.
        path: PathBuf,
        /// The member.
        member: String,
        /// Where relative paths are.
        boot_dir: PathBuf,
    },
    /// A disk of the description is not protected.
    #[error(
        "the description of {member} names the disk {disk}, which is not protected: it has {has}"
    )]
    NoDisk {
        /// The member.
        member: String,
        /// The disk.
        disk: String,
        /// The protected ones.
        has: String,
    },
    /// An override that means nothing.
    #[error(
        "--network {0}: write NAME=tap:INTERFACE, NAME=bridge:BRIDGE, NAME=user or NAME=none, with \
         a name of the machines' networks ({1})"
    )]
    Network(String, String),
}

/// The command line of a member. `disks` are its protected disks, by name without the member's.
pub fn command_line(
    member: &str,
    description: &Description,
    disks: &[(String, ExportedDisk)],
    overrides: &Overrides,
) -> Result<Vec<String>, BootError> {
    let accelerator = overrides.accelerator.clone().unwrap_or_else(|| "tcg".to_owned());
    let cpu = description.cpu.clone().unwrap_or_else(|| {
        if accelerator.starts_with("kvm") { "host".to_owned() } else { "max".to_owned() }
    });
    let memory_mib = overrides.memory_mib.unwrap_or(description.memory_mib);
    let qemu = overrides.qemu();
    let mut line = vec![qemu.display().to_string()];
    let mut push = |parts: &[&str]| line.extend(parts.iter().map(|p| (*p).to_owned()));
    push(&["-name", member, "-accel", &accelerator, "-cpu", &cpu]);
    push(&["-machine", &description.machine, "-smp", &description.cpus.to_string()]);
    push(&["-m", &format!("{memory_mib}M"), "-nodefaults"]);
    let file = |what, path: &Path| {
        let path = overrides.boot_dir.join(path);
        if path.exists() {
            return Ok(path.display().to_string());
        }
        let (member, boot_dir) = (member.to_owned(), overrides.boot_dir.clone());
        Err(BootError::NoFile { what, path, member, boot_dir })
    };
    if let Some(firmware) = &description.firmware {
        push(&["-bios", &file("firmware", firmware)?]);
    }
    if let Some(kernel) = &description.kernel {
        push(&["-kernel", &file("kernel", kernel)?]);
    }
    if let Some(initrd) = &description.initrd {
        push(&["-initrd", &file("initrd", initrd)?]);
    }
    if let Some(append) = &description.append {
        push(&["-append", append]);
    }
    let extra: Vec<_> = description.extra_arguments.iter().map(String::as_str).collect();
    push(&extra);
    for (nth, (device, disk)) in pair(member, &description.disks, disks)?.iter().enumerate() {
        let socket = escaped(&disk.socket.display().to_string());
        let blockdev = format!(
            "driver=nbd,node-name=disk{nth},server.type=unix,server.path={socket},export={},\
             discard=unmap,reconnect-delay=60",
            escaped(&disk.name)
        );
        if nth == 0 && device.device == "scsi-hd" {
            push(&["-device", "virtio-scsi-pci"]);
        }
        let serial = device.serial.as_ref().map(|s| format!(",serial={}", escaped(s)));
        let device = format!("{},drive=disk{nth}{}", device.device, serial.unwrap_or_default());
        push(&["-blockdev", &blockdev, "-device", &device]);
    }
    for parts in networks(description, &overrides.networks)? {
        push(&parts.iter().map(String::as_str).collect::<Vec<_>>());
    }
    line.extend(overrides.arguments.iter().map(|argument| argument.replace("{member}", member)));
    Ok(line)
}

/// Devices with their disks: by name; or, if no name fits (libvirt's names are its own), by
/// order.
fn pair<'a>(
    member: &str,
    devices: &[DiskDevice],
    disks: &'a [(String, ExportedDisk)],
) -> Result<Vec<(DiskDevice, &'a ExportedDisk)>, BootError> {
    if devices.is_empty() {
        return Ok(disks.iter().map(|(name, disk)| (DiskDevice::named(name), disk)).collect());
    }
    let find = |name: &str| disks.iter().find(|(n, _)| n == name).map(|(_, disk)| disk);
    if devices.len() == disks.len() && devices.iter().all(|d| find(&d.name).is_none()) {
        let pairs = devices.iter().zip(disks);
        return Ok(pairs.map(|(device, (_, disk))| (device.clone(), disk)).collect());
    }
    let known = || disks.iter().map(|(n, _)| n.as_str()).collect::<Vec<_>>().join(", ");
    devices
        .iter()
        .map(|device| match find(&device.name) {
            Some(disk) => Ok((device.clone(), disk)),
            None => Err(BootError::NoDisk {
                member: member.to_owned(),
                disk: device.name.clone(),
                has: known(),
            }),
        })
        .collect()
}

fn networks(
    description: &Description,
    connections: &[(String, String)],
) -> Result<Vec<Vec<String>>, BootError> {
    let names = description.network_names();
    let known = || if names.is_empty() { "none".to_owned() } else { names.join(", ") };
    for (name, how) in connections {
        let good = how == "user"
            || how == "none"
            || ["tap:", "bridge:"].iter().any(|p| how.len() > p.len() && how.starts_with(p));
        if !good || !names.contains(name) {
            return Err(BootError::Network(format!("{name}={how}"), known()));
        }
    }
    let mut lines = Vec::new();
    for (nth, (device, name)) in description.networks.iter().zip(&names).enumerate() {
        let how = connections.iter().find(|(n, _)| n == name).map_or("none", |(_, how)| how);
        let mac = device.mac.as_ref().map(|m| format!(",mac={}", escaped(m))).unwrap_or_default();
        let backend = match how.split_once(':') {
            Some(("tap", interface)) => Some(format!(
                "tap,id=net{nth},ifname={},script=no,downscript=no",
                escaped(interface)
            )),
            Some((_, bridge)) => Some(format!("bridge,id=net{nth},br={}", escaped(bridge))),
            None if how == "user" => Some(format!("user,id=net{nth}")),
            None => None,
        };
        let mut line = Vec::new();
        let mut card = format!("{}{mac}", device.device);
        if let Some(backend) = backend {
            line.extend(["-netdev".to_owned(), backend]);
            card = format!("{card},netdev=net{nth}");
        }
        line.extend(["-device".to_owned(), card]);
        lines.push(line);
    }
    Ok(lines)
}

/// QEMU's option lists double a comma that is meant.
fn escaped(value: &str) -> String {
    value.replace(',', ",,")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn disks() -> Vec<(String, ExportedDisk)> {
        ["root", "data"]
            .map(|name| {
                let disk = ExportedDisk {
                    name: format!("vm.{name}"),
                    size_bytes: 1,
                    socket: format!("/e,x/vm.{name}.sock").into(),
                };
                (name.to_owned(), disk)
            })
            .to_vec()
    }

    fn line(json: &str, overrides: &Overrides) -> Result<String, BootError> {
        let description = Description::from_json(json)?;
        Ok(command_line("vm", &description, &disks(), overrides)?.join(" "))
    }

    #[test]
    fn disks_come_in_the_described_order_and_networks_as_told() {
        let overrides = Overrides {
            accelerator: Some("tcg".into()),
            networks: vec![("net0".into(), "tap:t0".into())],
            arguments: vec!["-qmp".into(), "unix:/run/{member}.qmp,server=on,wait=off".into()],
            ..Overrides::default()
        };
        let json = r#"{"memory_mib": 512, "disks": [{"name": "data"}, {"name": "root", "device": "ide-hd"}],
            "networks": [{"mac": "52:54:00:00:00:01"}, {}], "extra_arguments": ["-nographic"]}"#;
        let line = line(json, &overrides).unwrap();
        let expected = "-nographic -blockdev driver=nbd,node-name=disk0,server.type=unix,\
            server.path=/e,,x/vm.data.sock,export=vm.data,discard=unmap,reconnect-delay=60 \
            -device virtio-blk-pci,drive=disk0 -blockdev";
        assert!(line.contains(expected), "{line}");
        assert!(line.contains("-device ide-hd,drive=disk1"), "{line}");
        assert!(line.contains("-netdev tap,id=net0,ifname=t0,script=no,downscript=no -device virtio-net-pci,mac=52:54:00:00:00:01,netdev=net0 -device virtio-net-pci"), "{line}");
        assert!(line.contains("-cpu max"), "{line}");
        assert!(line.ends_with("-qmp unix:/run/vm.qmp,server=on,wait=off"), "{line}");
    }

    #[test]
    fn what_is_not_at_this_site_is_named() {
        let overrides = Overrides { boot_dir: "/nowhere".into(), ..Overrides::default() };
        let error = line(r#"{"memory_mib": 1, "kernel": "vmlinuz"}"#, &overrides).unwrap_err();
        assert!(error.to_string().contains("/nowhere/vmlinuz is not at this site"), "{error}");
        let error = line(r#"{"memory_mib": 1, "disks": [{"name": "x"}]}"#, &overrides);
        assert!(matches!(error, Err(BootError::NoDisk { .. })));
        let error = line(r#"{"memory_mib": 1, "memroy": 2}"#, &overrides).unwrap_err();
        assert!(error.to_string().contains("memroy"), "{error}");
        let overrides = Overrides { networks: vec![("x".into(), "user".into())], ..overrides };
        let error = line(r#"{"memory_mib": 1}"#, &overrides);
        assert!(matches!(error, Err(BootError::Network(..))));
    }

    #[test]
    fn a_libvirt_domain_is_matched_by_order() {
        let xml = "<domain><memory unit='MiB'>64</memory><devices>\
            <disk><target dev='vda' bus='virtio'/></disk><disk><target dev='vdb' bus='virtio'/></disk>\
            </devices></domain>";
        let description = crate::boot::libvirt::translate(xml).unwrap();
        let line = command_line("vm", &description, &disks(), &Overrides::default()).unwrap();
        let line = line.join(" ");
        assert!(line.find("export=vm.root").unwrap() < line.find("export=vm.data").unwrap());
    }
}
