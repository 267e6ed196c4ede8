//! A member's machine description. The host sends it, and the backup keeps it for `recover --boot`.
//!
//! Invariant: a description that passes [`Machine::check`] holds no text that QEMU could read as more than a name: no
//! path, no option, no command. Everything else that QEMU is given comes from the backup site.

use crate::bounds::is_name;
use crate::limits;
use serde::{Deserialize, Serialize};
use std::fmt;

/// The longest serial of a disk.
const SERIAL_MAX_BYTES: usize = 36;
const MEMORY_MAX_MIB: u64 = 16 << 20;
const CPUS_MAX: u32 = 1024;
const NETWORKS_MAX: usize = 32;

/// The kind of mainboard.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Chipset {
    /// Intel Q35, with PCI Express.
    #[default]
    Q35,
    /// Intel 440FX.
    Pc,
}

/// The kind of firmware.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Firmware {
    /// QEMU's own BIOS.
    #[default]
    Bios,
    /// The backup site's UEFI.
    Uefi,
}

/// How the guest sees a disk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Bus {
    /// virtio-blk.
    #[default]
    Virtio,
    /// virtio-scsi.
    Scsi,
    /// AHCI, or IDE on a 440FX.
    Sata,
    /// USB storage.
    Usb,
}

/// How the guest sees a network card.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Card {
    /// virtio-net.
    #[default]
    Virtio,
    /// Intel 82540EM.
    E1000,
    /// Intel 82574L.
    E1000e,
    /// Realtek 8139.
    Rtl8139,
    /// VMware's.
    Vmxnet3,
}

/// A protected disk of a machine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MachineDisk {
    /// The disk's name within its member.
    pub name: String,
    /// How the guest sees it.
    #[serde(default)]
    pub bus: Bus,
    /// The serial that the guest sees.
    #[serde(default)]
    pub serial: Option<String>,
}

/// A network card of a machine.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MachineNetwork {
    /// Its name for `--network`; `net0`, `net1`, ... if it has none.
    #[serde(default)]
    pub name: Option<String>,
    /// How the guest sees it.
    #[serde(default)]
    pub model: Card,
    /// Its hardware address.
    #[serde(default)]
    pub mac: Option<String>,
}

/// A machine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Machine {
    /// Memory.
    pub memory_mib: u64,
    /// Processors.
    #[serde(default = "one")]
    pub cpus: u32,
    /// The mainboard.
    #[serde(default)]
    pub chipset: Chipset,
    /// The firmware.
    #[serde(default)]
    pub firmware: Firmware,
    /// The protected disks, in the order in which the guest finds them; all of them if empty.
    #[serde(default)]
    pub disks: Vec<MachineDisk>,
    /// Network cards.
    #[serde(default)]
    pub networks: Vec<MachineNetwork>,
}

fn one() -> u32 {
    1
}

fn is_serial(text: &str) -> bool {
    let fits = (1..=SERIAL_MAX_BYTES).contains(&text.len());
    fits && text.bytes().all(|b| b.is_ascii_alphanumeric() || b"._+-: ".contains(&b))
}

fn is_mac(text: &str) -> bool {
    let is_byte = |part: &str| part.len() == 2 && part.bytes().all(|b| b.is_ascii_hexdigit());
    text.len() == 17 && text.split(':').all(is_byte)
}

impl Machine {
    /// Checks every bound. The reason quotes nothing of the description.
    pub fn check(&self) -> Result<(), &'static str> {
        let good = |is_good: bool, reason| if is_good { Ok(()) } else { Err(reason) };
        let memory = (1..=MEMORY_MAX_MIB).contains(&self.memory_mib);
        good(memory, "memory_mib must be 1 to 16777216 (16 TiB)")?;
        good((1..=CPUS_MAX).contains(&self.cpus), "cpus must be 1 to 1024")?;
        good(self.disks.len() <= usize::from(limits::DISKS_MAX), "a machine has at most 64 disks")?;
        good(self.networks.len() <= NETWORKS_MAX, "a machine has at most 32 networks")?;
        let names = self.disks.iter().map(|disk| disk.name.as_str());
        let names = names.chain(self.networks.iter().filter_map(|network| network.name.as_deref()));
        good(
            names.into_iter().all(is_name),
            "names of disks and networks have 1 to 64 letters, digits, `.`, `_` and `-`, and begin with none of `.` and `-`",
        )?;
        good(
            self.disks.iter().filter_map(|disk| disk.serial.as_deref()).all(is_serial),
            "the serial of a disk is of at most 36 letters, digits, blanks and `._+-:`",
        )?;
        good(
            self.networks.iter().filter_map(|network| network.mac.as_deref()).all(is_mac),
            "the mac of a network is of six bytes, as 52:54:00:12:34:56",
        )?;
        let names = self.network_names();
        let is_once = |name| names.iter().filter(|other| *other == name).count() == 1;
        good(names.iter().all(is_once), "two networks of the machine have the same name")
    }

    /// Names of the networks for `--network`, in the description's order. A network without a name is called `net` and
    /// its index.
    #[must_use]
    pub fn network_names(&self) -> Vec<String> {
        let networks = self.networks.iter().enumerate();
        networks.map(|(nth, of)| of.name.clone().unwrap_or_else(|| format!("net{nth}"))).collect()
    }

    /// One line for each field, for operators.
    #[must_use]
    pub fn lines(&self) -> Vec<String> {
        let Self { memory_mib, cpus, chipset, firmware, disks, networks } = self;
        let mut lines = vec![
            format!("memory {memory_mib} MiB"),
            format!("cpus {cpus}"),
            format!("chipset {}", word(chipset)),
            format!("firmware {}", word(firmware)),
        ];
        lines.extend(disks.iter().enumerate().map(|(nth, disk)| {
            let serial = disk.serial.as_ref().map_or_else(String::new, |s| format!(", serial {s}"));
            format!("disk {nth}: {} on {}{serial}", disk.name, word(&disk.bus))
        }));
        lines.extend(networks.iter().zip(self.network_names()).enumerate().map(
            |(nth, (network, name))| {
                let mac = network.mac.as_deref().unwrap_or("none given");
                format!("network {nth}: {name}, {}, mac {mac}", word(&network.model))
            },
        ));
        lines
    }
}

/// A word of a list, as it stands in descriptions.
fn word(of: &impl fmt::Debug) -> String {
    format!("{of:?}").to_lowercase()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn machine() -> Machine {
        Machine {
            memory_mib: 512,
            cpus: 2,
            chipset: Chipset::Q35,
            firmware: Firmware::Uefi,
            disks: vec![MachineDisk { name: "root".into(), bus: Bus::Scsi, serial: None }],
            networks: vec![MachineNetwork {
                mac: Some("52:54:00:12:34:56".into()),
                ..MachineNetwork::default()
            }],
        }
    }

    #[test]
    fn names_sizes_and_counts_are_bounded() {
        assert_eq!(machine().check(), Ok(()));
        type Change = fn(&mut Machine);
        let wrong: [(Change, &str); 13] = [
            (|m| m.memory_mib = 0, "memory_mib"),
            (|m| m.memory_mib = u64::MAX, "memory_mib"),
            (|m| m.cpus = 0, "cpus"),
            (|m| m.cpus = u32::MAX, "cpus"),
            (|m| m.disks = vec![m.disks[0].clone(); 65], "64 disks"),
            (|m| m.networks = vec![m.networks[0].clone(); 33], "32 networks"),
            (|m| m.disks[0].name = "a,file=/etc/shadow".into(), "names"),
            (|m| m.disks[0].name = "x".repeat(65), "names"),
            (|m| m.disks[0].serial = Some("1,bootindex=0".into()), "serial"),
            (|m| m.disks[0].serial = Some("1".repeat(37)), "serial"),
            (|m| m.networks[0].mac = Some("52:54:00:12:34:5,".into()), "mac"),
            (|m| m.networks[0].name = Some("../net".into()), "names"),
            (
                |m| {
                    let name = Some("net1".to_owned());
                    m.networks = vec![
                        MachineNetwork { name, ..MachineNetwork::default() },
                        MachineNetwork::default(),
                    ];
                },
                "same name",
            ),
        ];
        for (change, told) in wrong {
            let mut machine = machine();
            change(&mut machine);
            let reason = machine.check().unwrap_err();
            assert!(reason.contains(told), "{reason}");
        }
    }

    #[test]
    fn each_field_has_its_line() {
        let lines = machine().lines();
        let expected = [
            "memory 512 MiB",
            "cpus 2",
            "chipset q35",
            "firmware uefi",
            "disk 0: root on scsi",
            "network 0: net0, virtio, mac 52:54:00:12:34:56",
        ];
        assert_eq!(lines, expected);
    }
}
