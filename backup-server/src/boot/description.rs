//! What a machine is, in Tidelock's own JSON.

use super::BootError;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// A protected disk as a device of the machine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DiskDevice {
    /// The disk's name within its member.
    pub name: String,
    /// QEMU's device.
    #[serde(default = "virtio_blk")]
    pub device: String,
    /// The serial that the guest sees.
    #[serde(default)]
    pub serial: Option<String>,
}

/// A network card.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NetworkDevice {
    /// How `--network` calls it; `net0`, `net1`, ... if it has none.
    #[serde(default)]
    pub name: Option<String>,
    /// QEMU's device.
    #[serde(default = "virtio_net")]
    pub device: String,
    /// Its address.
    #[serde(default)]
    pub mac: Option<String>,
}

/// A machine.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Description {
    /// Memory.
    pub memory_mib: u64,
    /// Processors.
    #[serde(default = "one")]
    pub cpus: u32,
    /// QEMU's machine type.
    #[serde(default = "q35")]
    pub machine: String,
    /// QEMU's processor model.
    #[serde(default)]
    pub cpu: Option<String>,
    /// Firmware, at this site.
    #[serde(default)]
    pub firmware: Option<PathBuf>,
    /// Kernel, at this site.
    #[serde(default)]
    pub kernel: Option<PathBuf>,
    /// Initial RAM disk, at this site.
    #[serde(default)]
    pub initrd: Option<PathBuf>,
    /// The kernel's command line.
    #[serde(default)]
    pub append: Option<String>,
    /// The protected disks, in the order in which the guest finds them; all of them if empty.
    #[serde(default)]
    pub disks: Vec<DiskDevice>,
    /// Network cards.
    #[serde(default)]
    pub networks: Vec<NetworkDevice>,
    /// Whatever else QEMU is given, before the disks and networks.
    #[serde(default)]
    pub extra_arguments: Vec<String>,
}

fn virtio_blk() -> String {
    "virtio-blk-pci".to_owned()
}

fn virtio_net() -> String {
    "virtio-net-pci".to_owned()
}

fn one() -> u32 {
    1
}

fn q35() -> String {
    "q35".to_owned()
}

impl Description {
    /// Reads the JSON form.
    pub fn from_json(text: &str) -> Result<Self, BootError> {
        let description: Self =
            serde_json::from_str(text).map_err(|e| BootError::Description(e.to_string()))?;
        if description.memory_mib == 0 || description.cpus == 0 {
            return Err(BootError::Description("memory_mib and cpus must not be 0".into()));
        }
        Ok(description)
    }

    /// What `--network` calls its networks, in their order.
    #[must_use]
    pub fn network_names(&self) -> Vec<String> {
        let devices = self.networks.iter().enumerate();
        devices.map(|(nth, d)| d.name.clone().unwrap_or_else(|| format!("net{nth}"))).collect()
    }
}

impl DiskDevice {
    /// A disk by its name, as a virtio device.
    #[must_use]
    pub fn named(name: &str) -> Self {
        Self { name: name.to_owned(), device: virtio_blk(), serial: None }
    }
}
