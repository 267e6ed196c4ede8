//! Which accelerator a machine gets where nobody says.
//!
//! `/dev/kvm` alone proves nothing: inside some virtual machines it is there, and a guest hangs on it
//! or crawls. So a machine of one boot sector is started with it. Where it works, firmware and
//! sector are through in a fraction of a second; where it does not within [`PROBE_MAX`], guests
//! run without.

use crate::jail::Jail;
use std::fs::Permissions;
use std::io::{self, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::time::Duration;
use tempfile::NamedTempFile;
use tokio::time::timeout;

/// Even without any acceleration the probe takes a thirtieth of it. A site that takes over is busy,
/// and a guest that runs without KVM for want of patience is slow for good.
const PROBE_MAX: Duration = Duration::from_secs(10);
const SECTOR_BYTES: usize = 512;
/// QEMU's debug exit device ends with (value written * 2 + 1).
const EXIT_CODE: i32 = 0x10 * 2 + 1;

/// Loaded at 0x7c00. It takes the processor from real mode through paging into 64-bit mode, as
/// every kernel does, and then ends the machine.
#[rustfmt::skip]
const PROBE: [u8; 111] = [
    0xfa,                               //     cli
    0x66, 0x31, 0xc0,                   //     xor   %eax, %eax
    0x8e, 0xd8,                         //     mov   %ax, %ds
    0x8e, 0xc0,                         //     mov   %ax, %es
    0xbf, 0x00, 0x10,                   //     mov   $0x1000, %di
    0xb9, 0x00, 0x0c,                   //     mov   $0xc00, %cx
    0xfc,                               //     cld
    0x66, 0xf3, 0xab,                   //     rep stosl              three empty page tables
    0xc7, 0x06, 0x00, 0x10, 0x03, 0x20, //     movw  $0x2003, 0x1000  to the second
    0xc7, 0x06, 0x00, 0x20, 0x03, 0x30, //     movw  $0x3003, 0x2000  to the third
    0xc7, 0x06, 0x00, 0x30, 0x83, 0x00, //     movw  $0x83, 0x3000    the first 2 MiB
    0x0f, 0x01, 0x16, 0x69, 0x7c,       //     lgdt  gdtr
    0xb0, 0x20,                         //     mov   $0x20, %al       PAE
    0x0f, 0x22, 0xe0,                   //     mov   %eax, %cr4
    0xb8, 0x00, 0x10,                   //     mov   $0x1000, %ax
    0x0f, 0x22, 0xd8,                   //     mov   %eax, %cr3
    0x66, 0xb9, 0x80, 0x00, 0x00, 0xc0, //     mov   $0xc0000080, %ecx
    0x0f, 0x32,                         //     rdmsr
    0x80, 0xcc, 0x01,                   //     or    $1, %ah          long mode
    0x0f, 0x30,                         //     wrmsr
    0x66, 0xb8, 0x01, 0x00, 0x00, 0x80, //     mov   $0x80000001, %eax
    0x0f, 0x22, 0xc0,                   //     mov   %eax, %cr0       paging, protection
    0xea, 0x4f, 0x7c, 0x08, 0x00,       //     ljmp  $8, $long
    0x66, 0xba, 0x01, 0x05,             // long: mov $0x501, %dx
    0xb0, 0x10,                         //     mov   $0x10, %al
    0xee,                               //     out   %al, (%dx)
    0xf4,                               // end: hlt
    0xeb, 0xfd,                         //     jmp   end
    0, 0, 0, 0, 0, 0, 0, 0,             // gdt: nothing
    0, 0, 0, 0, 0x00, 0x9a, 0x20, 0x00, //     64-bit code
    0x0f, 0x00, 0x59, 0x7c, 0, 0,       // gdtr: 15, gdt
];

/// What machines run on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Accelerator {
    /// As QEMU calls it.
    pub name: &'static str,
    /// Why not KVM, if it is there.
    pub why: Option<String>,
}

/// KVM where it works, else TCG.
pub async fn choose(qemu: &Path, jail: &Jail) -> Accelerator {
    if !Path::new("/dev/kvm").exists() {
        return Accelerator { name: "tcg", why: None };
    }
    match probe(qemu, jail, "kvm", "host", PROBE_MAX).await {
        Ok(()) => Accelerator { name: "kvm", why: None },
        Err(error) => Accelerator { name: "tcg", why: Some(error.to_string()) },
    }
}

async fn probe(
    qemu: &Path,
    jail: &Jail,
    accelerator: &str,
    cpu: &str,
    max: Duration,
) -> io::Result<()> {
    let mut sector = [0; SECTOR_BYTES];
    sector[..PROBE.len()].copy_from_slice(&PROBE);
    sector[SECTOR_BYTES - 2..].copy_from_slice(&[0x55, 0xaa]);
    let mut image = NamedTempFile::new()?;
    image.write_all(&sector)?;
    // The sector is no secret, and QEMU is another user.
    image.as_file().set_permissions(Permissions::from_mode(0o644))?;
    let drive = format!("file={},format=raw,if=floppy,readonly=on", image.path().display());
    let ended = jail
        .command(qemu)
        .args(["-accel", accelerator, "-cpu", cpu, "-m", "16", "-nodefaults", "-no-reboot"])
        .args(["-display", "none", "-device", "isa-debug-exit,iobase=0x501,iosize=1"])
        .args(["-drive", &drive])
        .kill_on_drop(true)
        .output();
    let Ok(ended) = timeout(max, ended).await else {
        let text = format!("a boot sector did not run within {} s", max.as_secs());
        return Err(io::Error::other(text));
    };
    let ended = ended?;
    if ended.status.code() == Some(EXIT_CODE) {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&ended.stderr);
    let said = said.lines().next().unwrap_or("QEMU said nothing");
    Err(io::Error::other(format!("{said} ({})", ended.status)))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Only a guest that hangs takes it.
    const HANGS: Duration = Duration::from_secs(600);

    #[tokio::test]
    async fn the_probe_passes_where_machines_run() {
        let jail = Jail::new("nobody").await.unwrap();
        probe(Path::new("qemu-system-x86_64"), &jail, "tcg", "max", HANGS).await.unwrap();
    }

    #[tokio::test]
    async fn an_accelerator_that_does_not_work_is_told_with_the_reason() {
        let jail = Jail::new("nobody").await.unwrap();
        let qemu = Path::new("qemu-system-x86_64");
        let error = probe(qemu, &jail, "hvf", "max", HANGS).await.unwrap_err();
        assert!(error.to_string().contains("hvf"), "{error}");
        let nowhere = Path::new("/nowhere/qemu");
        let error = probe(nowhere, &jail, "tcg", "max", HANGS).await.unwrap_err();
        assert!(error.to_string().contains("/nowhere/qemu"), "{error}");
    }
}
