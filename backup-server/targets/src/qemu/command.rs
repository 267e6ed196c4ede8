//! QEMU's command line for a recovered machine.

use crate::jail::SANDBOX;
use crate::site::{OfMember, Site};
use crate::{ExportedDisk, Guest};
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};
use thiserror::Error;
use tidelock_protocol::machine::{Bus, Card, Chipset, Firmware, Machine, MachineDisk};

/// Settings of one boot that replace parts of the machine's description or add to it.
#[derive(Clone, Debug, Default)]
pub(super) struct Overrides {
    /// The accelerator: `kvm` or `tcg`, which works everywhere.
    pub(super) accelerator: String,
    /// Another memory size.
    pub(super) memory_mib: Option<u64>,
    /// Directory that relative paths in `boot.toml` start from.
    pub(super) boot_dir: PathBuf,
    /// Name and connection of each network: (`lan`, `tap:tap0`), (`net0`, `user`).
    pub(super) networks: Vec<(String, String)>,
    /// More arguments, at the end. `{member}` in one is the member's name.
    pub(super) arguments: Vec<String>,
    /// The machine is not to run: its disks are empty and nobody's.
    pub(super) rehearses: bool,
}

/// The sockets of a machine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Sockets {
    /// The serial console.
    pub(super) console: PathBuf,
    /// A QMP monitor for the operator and `tidelock adopt`.
    pub(super) qmp: PathBuf,
    /// The server's own QMP monitor.
    pub(super) monitor: PathBuf,
}

impl Sockets {
    /// Those of a member below a directory.
    pub(super) fn of(dir: &Path, member: &str) -> Self {
        let path = |kind: &str| dir.join(format!("{member}.{kind}"));
        Self { console: path("console"), qmp: path("qmp"), monitor: path("monitor") }
    }
}

/// Why a machine cannot be booted.
#[derive(Debug, Error)]
pub(super) enum BootError {
    /// A file is not at this site.
    #[error(
        "the {what} {path} of {member} is not there: boot.toml names it (relative paths are below {boot_dir})"
    )]
    MissingFile {
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
    MissingUefi {
        /// The member.
        member: String,
        /// The path where the firmware was expected.
        path: PathBuf,
    },
    /// A disk of the description is not protected.
    #[error(
        "the description of {member} names the disk {disk}, which is not protected: it has {has}"
    )]
    UnprotectedDisk {
        /// The member.
        member: String,
        /// The disk.
        disk: String,
        /// The protected ones.
        has: String,
    },
}

/// Seconds that a machine waits for a disk whose server is away. Its guest sees a slow disk and no error. Errors
/// that the server reports are the guest's at once.
const RECONNECT_DELAY_S: u32 = 30 * 24 * 3600;

/// The arguments of a machine, or everything that is wrong with it. The machine is halted until it is told to go on
/// (`cont`), so that whoever wants its console is connected before it runs.
pub(super) fn command_line(
    guest: &Guest,
    of_site: &OfMember,
    site: &Site,
    sockets: &Sockets,
    overrides: &Overrides,
) -> Result<Vec<String>, Vec<BootError>> {
    let Guest { member, machine, disks } = guest;
    let mut wrong = Vec::new();
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
    let mut file = |what, path: &Path| {
        let path = overrides.boot_dir.join(path);
        let shown = path.display().to_string();
        if !path.exists() {
            let (member, boot_dir) = (member.clone(), overrides.boot_dir.clone());
            wrong.push(BootError::MissingFile { what, path, member, boot_dir });
        }
        shown
    };
    match (&of_site.firmware, machine.firmware) {
        (Some(firmware), _) => push(&["-bios", &file("firmware", firmware)]),
        (None, Firmware::Bios) => {}
        (None, Firmware::Uefi) => push(&["-bios", &site.uefi().display().to_string()]),
    }
    if let Some(kernel) = &of_site.kernel {
        push(&["-kernel", &file("kernel", kernel)]);
    }
    if let Some(initrd) = &of_site.initrd {
        push(&["-initrd", &file("initrd", initrd)]);
    }
    if of_site.firmware.is_none() && machine.firmware == Firmware::Uefi && !site.uefi().exists() {
        wrong.push(BootError::MissingUefi { member: member.clone(), path: site.uefi() });
    }
    if let Some(append) = &of_site.append {
        push(&["-append", append]);
    }
    push(&of_site.arguments.iter().map(String::as_str).collect::<Vec<_>>());
    let paired = pair(member, &machine.disks, disks).unwrap_or_else(|error| {
        wrong.push(error);
        Vec::new()
    });
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
                 discard=unmap,reconnect-delay={RECONNECT_DELAY_S}",
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
    for parts in networks(machine, &overrides.networks) {
        push(&parts.iter().map(String::as_str).collect::<Vec<_>>());
    }
    line.extend(overrides.arguments.iter().map(|argument| argument.replace("{member}", member)));
    if wrong.is_empty() { Ok(line) } else { Err(wrong) }
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
            None => Err(BootError::UnprotectedDisk {
                member: member.to_owned(),
                disk: device.name.clone(),
                has: known(),
            }),
        })
        .collect()
}

/// The devices of the networks. A network of a bridge is connected by a tap.
fn networks(machine: &Machine, connections: &[(String, String)]) -> Vec<Vec<String>> {
    let names = machine.network_names();
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
    lines
}

/// QEMU's option lists double a comma that is meant.
fn escaped(value: &str) -> String {
    value.replace(',', ",,")
}

/// A command line as a shell would take it.
pub(super) fn shell(line: &[String]) -> String {
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

    fn line(json: &str, site: &Site, overrides: &Overrides) -> Result<String, Vec<BootError>> {
        let guest = Guest {
            member: "vm".into(),
            machine: serde_json::from_str(json).unwrap(),
            disks: disks(),
        };
        let sockets = Sockets::of(Path::new("/run"), "vm");
        let overrides = Overrides { accelerator: "tcg".into(), ..overrides.clone() };
        let of_site = site.of("shop", "vm");
        Ok(command_line(&guest, &of_site, site, &sockets, &overrides)?.join(" "))
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
            server.path=/e,,x/vm.data.sock,export=vm.data,discard=unmap,reconnect-delay=2592000 \
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
        let text = "uefi = \"/nowhere/uefi\"\n[[machine]]\ngroup = \"shop\"\nmember = \"vm\"\n\
                    kernel = \"vmlinuz\"\ninitrd = \"rd\"\n";
        let site = toml::from_str(text).unwrap();
        let json = r#"{"memory_mib": 1, "firmware": "uefi", "disks": [{"name": "x"}]}"#;
        let wrong = line(json, &site, &overrides).unwrap_err();
        let told: Vec<_> = wrong.iter().map(ToString::to_string).collect();
        for part in [
            "/nowhere/vmlinuz of vm is not there",
            "/nowhere/rd of vm is not there",
            "/nowhere/uefi is not there",
            "names the disk x",
        ] {
            assert!(told.iter().any(|text| text.contains(part)), "{part} in {told:?}");
        }
        assert_eq!(told.len(), 4, "{told:?}");
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
