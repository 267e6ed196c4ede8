//! QEMU's command line for a recovered machine.

use crate::ExportedDisk;
use crate::jail::SANDBOX;
use crate::site::{OfMember, Site};
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};
use thiserror::Error;
use tidelock_protocol::machine::{Bus, Card, Chipset, Firmware, Machine, MachineDisk};

/// Settings of one boot that replace parts of the machine's description or add to it.
#[derive(Clone, Debug, Default)]
pub struct Overrides {
    /// The accelerator: `kvm` or `tcg`, which works everywhere.
    pub accelerator: String,
    /// Another memory size.
    pub memory_mib: Option<u64>,
    /// Directory that relative paths in `boot.toml` start from.
    pub boot_dir: PathBuf,
    /// Name and connection of each network: (`lan`, `tap:tap0`), (`net0`, `user`).
    pub networks: Vec<(String, String)>,
    /// More arguments, at the end. `{member}` in one is the member's name.
    pub arguments: Vec<String>,
    /// The machine is not to run: its disks are empty and nobody's.
    pub rehearses: bool,
}

/// A machine to be started.
#[derive(Clone, Debug)]
pub struct Guest {
    /// The member's name.
    pub member: String,
    /// Its description.
    pub machine: Machine,
    /// The member's entry in `boot.toml`.
    pub of_site: OfMember,
    /// Its protected disks, by name without the member's.
    pub disks: Vec<(String, ExportedDisk)>,
}

/// The sockets of a machine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Sockets {
    /// The serial console.
    pub console: PathBuf,
    /// A QMP monitor for the operator and `tidelock adopt`.
    pub qmp: PathBuf,
    /// The server's own QMP monitor.
    pub monitor: PathBuf,
}

impl Sockets {
    /// Those of a member below a directory.
    #[must_use]
    pub fn of(dir: &Path, member: &str) -> Self {
        let path = |kind: &str| dir.join(format!("{member}.{kind}"));
        Self { console: path("console"), qmp: path("qmp"), monitor: path("monitor") }
    }
}

/// Why a machine cannot be booted.
#[derive(Debug, Error)]
pub enum BootError {
    /// A file is not at this site.
    #[error(
        "the {what} {path} of {member} is not there: boot.toml names it (relative paths are below {boot_dir})"
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
    /// The machine wants UEFI, and this site has none.
    #[error(
        "{member} boots by UEFI, and {path} is not there: install the package ovmf, or set `uefi` in boot.toml"
    )]
    NoUefi {
        /// The member.
        member: String,
        /// The path where the firmware was expected.
        path: PathBuf,
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

/// The arguments of a machine. It stands still until it is told to go on (`cont`), so that it is on record, and whoever
/// wants its console is connected, before it runs.
pub fn command_line(
    guest: &Guest,
    site: &Site,
    sockets: &Sockets,
    overrides: &Overrides,
) -> Result<Vec<String>, BootError> {
    let Guest { member, machine, of_site, disks } = guest;
    let accelerator = &overrides.accelerator;
    let cpu = of_site.cpu.as_deref();
    let cpu = cpu.unwrap_or(if accelerator.starts_with("kvm") { "host" } else { "max" });
    let memory_mib = overrides.memory_mib.unwrap_or(machine.memory_mib);
    let chipset = match machine.chipset {
        Chipset::Q35 => "q35",
        Chipset::Pc => "pc",
    };
    let mut line = Vec::new();
    let mut push = |parts: &[&str]| line.extend(parts.iter().map(|p| (*p).to_owned()));
    push(&["-name", member, "-accel", accelerator, "-cpu", cpu, "-machine", chipset]);
    push(&["-smp", &machine.cpus.to_string(), "-m", &format!("{memory_mib}M")]);
    push(&["-nodefaults", "-no-user-config", "-sandbox", SANDBOX, "-display", "none", "-S"]);
    let path = |path: &Path| escaped(&path.display().to_string());
    let listens = |id: &str, socket: &Path| {
        format!("socket,id={id},path={},server=on,wait=off", path(socket))
    };
    push(&["-chardev", &listens("console", &sockets.console), "-serial", "chardev:console"]);
    for (id, socket) in [("qmp", &sockets.qmp), ("monitor", &sockets.monitor)] {
        push(&["-chardev", &listens(id, socket), "-mon"]);
        push(&[&format!("chardev={id},mode=control")]);
    }
    let file = |what, path: &Path| {
        let path = overrides.boot_dir.join(path);
        if path.exists() {
            return Ok(path.display().to_string());
        }
        let (member, boot_dir) = (member.clone(), overrides.boot_dir.clone());
        Err(BootError::NoFile { what, path, member, boot_dir })
    };
    match (&of_site.firmware, machine.firmware) {
        (Some(firmware), _) => push(&["-bios", &file("firmware", firmware)?]),
        (None, Firmware::Bios) => {}
        (None, Firmware::Uefi) => {
            let path = site.uefi();
            if !path.exists() {
                return Err(BootError::NoUefi { member: member.clone(), path });
            }
            push(&["-bios", &path.display().to_string()]);
        }
    }
    if let Some(kernel) = &of_site.kernel {
        push(&["-kernel", &file("kernel", kernel)?]);
    }
    if let Some(initrd) = &of_site.initrd {
        push(&["-initrd", &file("initrd", initrd)?]);
    }
    if let Some(append) = &of_site.append {
        push(&["-append", append]);
    }
    push(&of_site.arguments.iter().map(String::as_str).collect::<Vec<_>>());
    let paired = pair(member, &machine.disks, disks)?;
    let has = |bus| paired.iter().any(|(device, _)| device.bus == bus);
    if has(Bus::Scsi) {
        push(&["-device", "virtio-scsi-pci"]);
    }
    if has(Bus::Usb) {
        push(&["-device", "qemu-xhci"]);
    }
    for (nth, (device, disk)) in paired.iter().enumerate() {
        let blockdev = match overrides.rehearses {
            true => {
                let size = disk.size_bytes;
                format!("driver=null-co,node-name=disk{nth},size={size},read-zeroes=on")
            }
            false => format!(
                "driver=nbd,node-name=disk{nth},server.type=unix,server.path={},export={},\
                 discard=unmap,reconnect-delay=60",
                path(&disk.socket),
                escaped(&disk.name)
            ),
        };
        let kind = match device.bus {
            Bus::Virtio => "virtio-blk-pci",
            Bus::Scsi => "scsi-hd",
            Bus::Sata => "ide-hd",
            Bus::Usb => "usb-storage",
        };
        let serial = device.serial.as_ref().map(|s| format!(",serial={}", escaped(s)));
        let device = format!("{kind},drive=disk{nth}{}", serial.unwrap_or_default());
        push(&["-blockdev", &blockdev, "-device", &device]);
    }
    for parts in networks(machine, &overrides.networks)? {
        push(&parts.iter().map(String::as_str).collect::<Vec<_>>());
    }
    line.extend(overrides.arguments.iter().map(|argument| argument.replace("{member}", member)));
    Ok(line)
}

/// Devices with their disks: by name; or, if no name fits (libvirt's names are its own), by
/// order.
fn pair<'a>(
    member: &str,
    devices: &[MachineDisk],
    disks: &'a [(String, ExportedDisk)],
) -> Result<Vec<(MachineDisk, &'a ExportedDisk)>, BootError> {
    if devices.is_empty() {
        let device =
            |name: &String| MachineDisk { name: name.clone(), bus: Bus::Virtio, serial: None };
        return Ok(disks.iter().map(|(name, disk)| (device(name), disk)).collect());
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

/// The devices of the networks. A bridge is a tap by now: see `server/machines`.
fn networks(
    machine: &Machine,
    connections: &[(String, String)],
) -> Result<Vec<Vec<String>>, BootError> {
    let names = machine.network_names();
    let known = || if names.is_empty() { "none".to_owned() } else { names.join(", ") };
    for (name, how) in connections {
        if !is_connection(how) || !names.contains(name) {
            return Err(BootError::Network(format!("{name}={how}"), known()));
        }
    }
    let mut lines = Vec::new();
    for (nth, (device, name)) in machine.networks.iter().zip(&names).enumerate() {
        let how = connections.iter().find(|(n, _)| n == name).map_or("none", |(_, how)| how);
        let mac = device.mac.as_ref().map(|m| format!(",mac={}", escaped(m))).unwrap_or_default();
        let backend = match how.split_once(':') {
            Some((_, interface)) => Some(format!(
                "tap,id=net{nth},ifname={},script=no,downscript=no",
                escaped(interface)
            )),
            None if how == "user" => Some(format!("user,id=net{nth}")),
            None => None,
        };
        let mut line = Vec::new();
        let card = match device.model {
            Card::Virtio => "virtio-net-pci",
            Card::E1000 => "e1000",
            Card::E1000e => "e1000e",
            Card::Rtl8139 => "rtl8139",
            Card::Vmxnet3 => "vmxnet3",
        };
        let mut card = format!("{card}{mac}");
        if let Some(backend) = backend {
            line.extend(["-netdev".to_owned(), backend]);
            card = format!("{card},netdev=net{nth}");
        }
        line.extend(["-device".to_owned(), card]);
        lines.push(line);
    }
    Ok(lines)
}

/// True if a network can be connected in this way.
#[must_use]
pub fn is_connection(how: &str) -> bool {
    let names = |prefix: &str| how.strip_prefix(prefix).is_some_and(|name| !name.is_empty());
    how == "user" || how == "none" || names("tap:") || names("bridge:")
}

/// QEMU's option lists double a comma that is meant.
fn escaped(value: &str) -> String {
    value.replace(',', ",,")
}

/// A command line as a shell would take it.
#[must_use]
pub fn shell(line: &[String]) -> String {
    let plain = |b: u8| b.is_ascii_alphanumeric() || b"-_./=,:+@%".contains(&b);
    let quote = |arg: &String| {
        if !arg.is_empty() && arg.bytes().all(plain) {
            arg.clone()
        } else {
            format!("'{}'", arg.replace('\'', r"'\''"))
        }
    };
    line.iter().map(quote).collect::<Vec<_>>().join(" ")
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

    fn line(json: &str, site: &Site, overrides: &Overrides) -> Result<String, BootError> {
        let guest = Guest {
            member: "vm".into(),
            machine: serde_json::from_str(json).unwrap(),
            of_site: site.of("shop", "vm"),
            disks: disks(),
        };
        let sockets = Sockets::of(Path::new("/run"), "vm");
        let overrides = Overrides { accelerator: "tcg".into(), ..overrides.clone() };
        Ok(command_line(&guest, site, &sockets, &overrides)?.join(" "))
    }

    fn site(keys: &str) -> Site {
        let text = format!("[[machine]]\ngroup = \"shop\"\nmember = \"vm\"\n{keys}\n");
        toml::from_str(&text).unwrap()
    }

    #[test]
    fn disks_come_in_the_described_order_and_networks_as_told() {
        let overrides = Overrides {
            networks: vec![("net0".into(), "tap:t0".into())],
            arguments: vec!["-pidfile".into(), "/run/{member}.pid".into()],
            ..Overrides::default()
        };
        let json = r#"{"memory_mib": 512, "disks": [{"name": "data"}, {"name": "root", "bus": "sata"}],
            "networks": [{"mac": "52:54:00:00:00:01"}, {}]}"#;
        let site = site("arguments = [\"-vga\", \"std\"]");
        let real = line(json, &site, &overrides).unwrap();
        let expected = "-vga std -blockdev driver=nbd,node-name=disk0,server.type=unix,\
            server.path=/e,,x/vm.data.sock,export=vm.data,discard=unmap,reconnect-delay=60 \
            -device virtio-blk-pci,drive=disk0 -blockdev";
        assert!(real.contains(expected), "{real}");
        assert!(real.contains("-device ide-hd,drive=disk1"), "{real}");
        assert!(real.contains("-netdev tap,id=net0,ifname=t0,script=no,downscript=no -device virtio-net-pci,mac=52:54:00:00:00:01,netdev=net0 -device virtio-net-pci"), "{real}");
        assert!(real.contains("-cpu max") && real.contains("spawn=deny"), "{real}");
        assert!(real.ends_with("-pidfile /run/vm.pid"), "{real}");
        let rehearsal = Overrides { rehearses: true, ..overrides };
        let rehearsal = line(json, &site, &rehearsal).unwrap();
        assert!(real.contains(" -S ") && !rehearsal.contains("driver=nbd"), "{rehearsal}");
    }

    #[test]
    fn what_is_not_at_this_site_is_named() {
        let overrides = Overrides { boot_dir: "/nowhere".into(), ..Overrides::default() };
        let plain = r#"{"memory_mib": 1}"#;
        let error = line(plain, &site("kernel = \"vmlinuz\""), &overrides).unwrap_err();
        assert!(error.to_string().contains("/nowhere/vmlinuz of vm is not there"), "{error}");
        let uefi = toml::from_str("uefi = \"/nowhere/uefi\"").unwrap();
        let error =
            line(r#"{"memory_mib": 1, "firmware": "uefi"}"#, &uefi, &overrides).unwrap_err();
        assert!(error.to_string().contains("/nowhere/uefi"), "{error}");
        let none = Site::default();
        let error = line(r#"{"memory_mib": 1, "disks": [{"name": "x"}]}"#, &none, &overrides);
        assert!(matches!(error, Err(BootError::NoDisk { .. })));
        let overrides = Overrides { networks: vec![("x".into(), "user".into())], ..overrides };
        assert!(matches!(line(plain, &none, &overrides), Err(BootError::Network(..))));
    }

    #[test]
    fn a_libvirt_domain_is_matched_by_order() {
        let json =
            r#"{"memory_mib": 64, "disks": [{"name": "vda"}, {"name": "sda", "bus": "scsi"}]}"#;
        let line = line(json, &Site::default(), &Overrides::default()).unwrap();
        assert!(line.find("export=vm.root").unwrap() < line.find("export=vm.data").unwrap());
        assert!(line.contains("-device virtio-scsi-pci"), "{line}");
    }
}
