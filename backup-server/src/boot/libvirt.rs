//! The part of a libvirt domain that a recovered machine needs: memory, processors, machine type,
//! kernel or firmware, disk buses, network cards. Everything else (cgroups, consoles, host
//! devices, seclabels) belongs to the site that is gone.

use super::{BootError, Description, DiskDevice, NetworkDevice};
use roxmltree::{Document, Node};

/// Translates a domain.
pub fn translate(xml: &str) -> Result<Description, BootError> {
    let wrong = |what: &str| BootError::Description(format!("libvirt domain: {what}"));
    let document = Document::parse(xml).map_err(|e| wrong(&e.to_string()))?;
    let domain = document.root_element();
    if domain.tag_name().name() != "domain" {
        return Err(wrong("the document is something else"));
    }
    let memory = child(domain, "memory").ok_or_else(|| wrong("it has no <memory>"))?;
    let os = child(domain, "os");
    let text_of = |name| os.and_then(|os| text(os, name));
    let machine = os.and_then(|os| child(os, "type")).and_then(|t| t.attribute("machine"));
    let devices = child(domain, "devices");
    let all = |name| {
        let nodes = devices.into_iter().flat_map(|d| d.children());
        nodes.filter(move |n: &Node<'_, '_>| n.has_tag_name(name))
    };
    let networks = all("interface").map(|interface| NetworkDevice {
        name: None,
        device: network_device(child(interface, "model").and_then(|m| m.attribute("type"))),
        mac: child(interface, "mac").and_then(|m| m.attribute("address")).map(str::to_owned),
    });
    let disks = all("disk").filter(|d| d.attribute("device").unwrap_or("disk") == "disk");
    Ok(Description {
        memory_mib: mib(memory).ok_or_else(|| wrong("its <memory> is not a size"))?,
        cpus: text(domain, "vcpu")
            .map_or(Some(1), |t| t.parse().ok())
            .filter(|n| *n > 0)
            .ok_or_else(|| wrong("its <vcpu> is not a number"))?,
        machine: machine_type(machine),
        cpu: None,
        firmware: text_of("loader").map(Into::into),
        kernel: text_of("kernel").map(Into::into),
        initrd: text_of("initrd").map(Into::into),
        append: text_of("cmdline"),
        // Names are libvirt's (vda, sda): matched with the protected disks by their order.
        disks: disks.map(disk).collect(),
        networks: networks.collect(),
        extra_arguments: Vec::new(),
    })
}

fn child<'a, 'd>(node: Node<'a, 'd>, name: &str) -> Option<Node<'a, 'd>> {
    node.children().find(|n| n.has_tag_name(name))
}

fn text(node: Node<'_, '_>, name: &str) -> Option<String> {
    child(node, name)?.text().map(|t| t.trim().to_owned())
}

fn mib(memory: Node<'_, '_>) -> Option<u64> {
    let number: u64 = memory.text()?.trim().parse().ok()?;
    let bytes = match memory.attribute("unit").unwrap_or("KiB") {
        "b" | "bytes" => number,
        "KB" => number.checked_mul(1000)?,
        "k" | "KiB" => number.checked_mul(1 << 10)?,
        "MB" => number.checked_mul(1_000_000)?,
        "M" | "MiB" => number.checked_mul(1 << 20)?,
        "GB" => number.checked_mul(1_000_000_000)?,
        "G" | "GiB" => number.checked_mul(1 << 30)?,
        _ => return None,
    };
    (bytes >= 1 << 20).then_some(bytes >> 20)
}

/// A version in the type's name is the dead site's QEMU's: take this site's own of the family.
fn machine_type(machine: Option<&str>) -> String {
    match machine {
        Some(m) if m.starts_with("pc-i440fx") => "pc".to_owned(),
        Some(m) if m.starts_with("pc-q35") => "q35".to_owned(),
        Some(m) => m.to_owned(),
        None => "q35".to_owned(),
    }
}

fn network_device(model: Option<&str>) -> String {
    match model {
        None | Some("virtio" | "virtio-non-transitional" | "virtio-transitional") => {
            "virtio-net-pci".to_owned()
        }
        Some(other) => other.to_owned(),
    }
}

fn disk(disk: Node<'_, '_>) -> DiskDevice {
    let target = child(disk, "target");
    let attribute = |name| target.and_then(|t| t.attribute(name)).unwrap_or("");
    let device = match attribute("bus") {
        "sata" | "ide" => "ide-hd",
        "scsi" => "scsi-hd",
        "usb" => "usb-storage",
        _ => "virtio-blk-pci",
    };
    DiskDevice {
        name: attribute("dev").to_owned(),
        device: device.to_owned(),
        serial: text(disk, "serial"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_useful_part_is_taken() {
        let xml = r#"<domain type='kvm'><name>db</name>
            <memory unit='GiB'>2</memory><vcpu placement='static'>4</vcpu>
            <os><type arch='x86_64' machine='pc-q35-7.2'>hvm</type><kernel>/k</kernel></os>
            <devices>
              <disk type='block' device='disk'><target dev='vda' bus='virtio'/></disk>
              <disk type='file' device='cdrom'><target dev='sda' bus='sata'/></disk>
              <disk type='block' device='disk'><target dev='sdb' bus='sata'/><serial>X1</serial></disk>
              <interface type='bridge'><mac address='52:54:00:00:00:01'/><model type='e1000'/></interface>
            </devices></domain>"#;
        let d = translate(xml).unwrap();
        assert_eq!((d.memory_mib, d.cpus, d.machine.as_str()), (2048, 4, "q35"));
        assert_eq!(d.kernel, Some("/k".into()));
        let disks: Vec<_> = d.disks.iter().map(|d| (d.name.as_str(), d.device.as_str())).collect();
        assert_eq!(disks, [("vda", "virtio-blk-pci"), ("sdb", "ide-hd")]);
        assert_eq!(d.disks[1].serial.as_deref(), Some("X1"));
        assert_eq!(d.networks[0].device, "e1000");
        for bad in ["", "<x/>", "<domain/>", "<domain><memory unit='XiB'>1</memory></domain>"] {
            assert!(translate(bad).is_err(), "{bad}");
        }
    }
}
