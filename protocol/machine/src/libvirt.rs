//! The part of a libvirt domain that a recovered machine needs: memory, processors, chipset, firmware, disk buses, network
//! cards. Everything else (cgroups, consoles, host devices, seclabels) belongs to the primary site.

use super::DescriptionError;
use roxmltree::{Document, Node};
use tidelock_protocol::machine::{
    Bus, Card, Chipset, Firmware, Machine, MachineDisk, MachineNetwork,
};

fn wrong(what: impl std::fmt::Display) -> DescriptionError {
    let what = format!("libvirt domain: {what}");
    DescriptionError::new(what, "the output of `virsh dumpxml`, or Tidelock's own JSON")
}

/// Translates a domain.
pub(super) fn translate(xml: &str) -> Result<Machine, DescriptionError> {
    let document = Document::parse(xml).map_err(wrong)?;
    let domain = document.root_element();
    if domain.tag_name().name() != "domain" {
        return Err(wrong("the document is something else"));
    }
    let memory = child(domain, "memory").ok_or_else(|| wrong("it has no <memory>"))?;
    let memory_mib = mib(memory).ok_or_else(|| wrong("its <memory> is not a size"))?;
    let cpus = text(domain, "vcpu").map_or(Some(1), |text| text.parse().ok());
    let os = child(domain, "os");
    if let Some(kernel) = os.and_then(|os| child(os, "kernel")) {
        let what = format!("its <{}> is for the backup site to name", kernel.tag_name().name());
        let instead = "no <kernel>, <initrd> and <cmdline>, and `kernel`, `initrd` and `append` in boot.toml at \
                       the backup (docs/manual/recovery.md)";
        return Err(DescriptionError { what, instead: instead.to_owned() });
    }
    let devices = child(domain, "devices");
    let all = |name| {
        let nodes = devices.into_iter().flat_map(|devices| devices.children());
        nodes.filter(move |node: &Node<'_, '_>| node.has_tag_name(name))
    };
    let disks = all("disk").filter(|disk| disk.attribute("device").unwrap_or("disk") == "disk");
    Ok(Machine {
        memory_mib,
        cpus: cpus.ok_or_else(|| wrong("its <vcpu> is not a number"))?,
        chipset: chipset(os.and_then(|os| child(os, "type")))?,
        firmware: firmware(os),
        disks: disks.map(disk).collect::<Result<_, _>>()?,
        networks: all("interface").map(network).collect::<Result<_, _>>()?,
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

/// A version in the type's name is of the primary site's QEMU: the backup site takes its own of the family.
fn chipset(of: Option<Node<'_, '_>>) -> Result<Chipset, DescriptionError> {
    let attribute = |name| of.and_then(|of| of.attribute(name));
    if let Some(arch) = attribute("arch").filter(|arch| *arch != "x86_64") {
        return Err(wrong(format_args!("its architecture is {arch}, and only x86_64 is booted")));
    }
    match attribute("machine") {
        None => Ok(Chipset::Q35),
        Some(machine) if machine == "q35" || machine.starts_with("pc-q35") => Ok(Chipset::Q35),
        Some(machine) if machine == "pc" || machine.starts_with("pc-i440fx") => Ok(Chipset::Pc),
        Some(machine) => {
            Err(wrong(format_args!("its machine type {machine} is neither q35 nor pc")))
        }
    }
}

fn firmware(os: Option<Node<'_, '_>>) -> Firmware {
    let is_efi = os.and_then(|os| os.attribute("firmware")) == Some("efi");
    let loader = os.and_then(|os| child(os, "loader"));
    let is_flash = loader.and_then(|loader| loader.attribute("type")) == Some("pflash");
    if is_efi || is_flash { Firmware::Uefi } else { Firmware::Bios }
}

/// Names of disks are libvirt's (vda, sda): they are matched with the protected disks by their order.
fn disk(disk: Node<'_, '_>) -> Result<MachineDisk, DescriptionError> {
    let target = child(disk, "target");
    let attribute = |name| target.and_then(|t| t.attribute(name)).unwrap_or("");
    let name = attribute("dev").to_owned();
    let bus = match attribute("bus") {
        "" | "virtio" => Bus::Virtio,
        "sata" | "ide" => Bus::Sata,
        "scsi" => Bus::Scsi,
        "usb" => Bus::Usb,
        other => return Err(wrong(format_args!("its disk {name} is on an unknown bus, {other}"))),
    };
    Ok(MachineDisk { name, bus, serial: text(disk, "serial") })
}

fn network(interface: Node<'_, '_>) -> Result<MachineNetwork, DescriptionError> {
    let model = child(interface, "model").and_then(|m| m.attribute("type"));
    let model = match model {
        None | Some("virtio" | "virtio-non-transitional" | "virtio-transitional") => Card::Virtio,
        Some("e1000") => Card::E1000,
        Some("e1000e") => Card::E1000e,
        Some("rtl8139") => Card::Rtl8139,
        Some("vmxnet3") => Card::Vmxnet3,
        Some(other) => {
            return Err(wrong(format_args!("the model {other} of an interface is not known")));
        }
    };
    let mac = child(interface, "mac").and_then(|m| m.attribute("address")).map(str::to_owned);
    // A name of libvirt's own is another one at each start.
    let name = child(interface, "target").and_then(|target| target.attribute("dev"));
    let name = name.filter(|name| !name.starts_with("vnet")).map(str::to_owned);
    Ok(MachineNetwork { name, model, mac })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_useful_part_is_taken() {
        let xml = r#"<domain type='kvm'><name>db</name>
            <memory unit='GiB'>2</memory><vcpu placement='static'>4</vcpu>
            <os firmware='efi'><type arch='x86_64' machine='pc-q35-7.2'>hvm</type></os>
            <devices>
              <emulator>/tmp/evil</emulator>
              <disk type='block' device='disk'><target dev='vda' bus='virtio'/></disk>
              <disk type='file' device='cdrom'><target dev='sda' bus='sata'/></disk>
              <disk type='block' device='disk'><target dev='sdb' bus='sata'/><serial>X1</serial></disk>
              <interface type='bridge'><mac address='52:54:00:00:00:01'/><model type='e1000'/><target dev='vnet7'/></interface>
            </devices></domain>"#;
        let machine = translate(xml).unwrap();
        let disk = |name: &str, bus, serial: Option<&str>| MachineDisk {
            name: name.into(),
            bus,
            serial: serial.map(str::to_owned),
        };
        let expected = Machine {
            memory_mib: 2048,
            cpus: 4,
            chipset: Chipset::Q35,
            firmware: Firmware::Uefi,
            disks: vec![disk("vda", Bus::Virtio, None), disk("sdb", Bus::Sata, Some("X1"))],
            networks: vec![MachineNetwork {
                name: None,
                model: Card::E1000,
                mac: Some("52:54:00:00:00:01".into()),
            }],
        };
        assert_eq!(machine, expected);
    }

    #[test]
    fn what_cannot_be_booted_is_refused() {
        let of = |inner: &str| format!("<domain><memory unit='MiB'>64</memory>{inner}</domain>");
        for (bad, told) in [
            ("<x/>".to_owned(), "something else"),
            ("<domain/>".to_owned(), "no <memory>"),
            ("<domain><memory unit='XiB'>1</memory></domain>".to_owned(), "not a size"),
            (of("<vcpu>many</vcpu>"), "<vcpu>"),
            (of("<os><kernel>/etc/shadow</kernel></os>"), "backup site"),
            (of("<os><type machine='isapc'/></os>"), "isapc"),
            (of("<os><type arch='aarch64'/></os>"), "aarch64"),
            (of("<devices><disk><target dev='fda' bus='fdc'/></disk></devices>"), "fdc"),
            (of("<devices><interface><model type='x,y'/></interface></devices>"), "x,y"),
        ] {
            let error = translate(&bad).unwrap_err();
            assert!(error.what.contains(told), "{error}");
        }
    }
}
