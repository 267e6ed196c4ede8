//! Others who use a disk in ways that no lock shows.

use std::fs::{self, File};
use std::os::unix::fs::MetadataExt;
use std::path::Path;

/// Why an image or a device cannot be had alone, and what to do; `None`: nothing is found. A mounted device, a swap
/// area, and a device below LVM, MD or dm-crypt are refused by `O_EXCL` alone, where this says by whom.
pub(crate) fn by_others(file: &File, path: &Path) -> Option<String> {
    let meta = file.metadata().ok()?;
    if meta.rdev() != 0 {
        return holder(meta.rdev()).or_else(|| mounted(meta.rdev()));
    }
    let device = loop_over(meta.dev(), meta.ino(), path)?;
    Some(format!(
        "the loop device {device} is set up over it; unmount whatever is on that, then `losetup -d {device}`"
    ))
}

/// The mount, the swap or the upper device that uses a block device, and how to end that use. `None`: none was found.
pub(crate) fn holder_of(path: &Path) -> Option<String> {
    let device = fs::metadata(path).ok()?.rdev();
    mounted(device).or_else(|| swap(device)).or_else(|| holder(device))
}

fn numbers(device: u64) -> (u32, u32) {
    (libc::major(device), libc::minor(device))
}

fn mounted(device: u64) -> Option<String> {
    let (major, minor) = numbers(device);
    let mounts = fs::read_to_string("/proc/self/mountinfo").ok()?;
    let wanted = format!("{major}:{minor}");
    let point = mounts.lines().find_map(|line| {
        let mut fields = line.split(' ').skip(2);
        (fields.next()? == wanted).then(|| fields.nth(1)).flatten()
    })?;
    Some(format!("a file system on it is mounted at {point}; `umount {point}`"))
}

fn swap(device: u64) -> Option<String> {
    let swaps = fs::read_to_string("/proc/swaps").ok()?;
    let mut paths = swaps.lines().skip(1).filter_map(|line| line.split_whitespace().next());
    let path = paths.find(|path| fs::metadata(path).is_ok_and(|meta| meta.rdev() == device))?;
    Some(format!("it is in use as swap; `swapoff {path}`"))
}

/// Device mapper (LVM, dm-crypt, multipath) and MD name themselves below the device.
fn holder(device: u64) -> Option<String> {
    let (major, minor) = numbers(device);
    let holders = fs::read_dir(format!("/sys/dev/block/{major}:{minor}/holders")).ok()?;
    let name = holders.flatten().next()?.file_name();
    let name = name.to_string_lossy();
    let named = fs::read_to_string(format!("/sys/block/{name}/dm/name"));
    let named = named.map_or(name.to_string(), |named| named.trim().to_owned());
    Some(format!(
        "the device {named} is set up over it (LVM, RAID, encryption or multipath); protect that one instead, or take \
         it away first"
    ))
}

/// Backing files are named by path: they are compared by what the path leads to.
fn loop_over(dev: u64, ino: u64, path: &Path) -> Option<String> {
    let real = fs::canonicalize(path).ok();
    for entry in fs::read_dir("/sys/block").ok()?.flatten() {
        let name = entry.file_name();
        let Ok(backing) = fs::read_to_string(entry.path().join("loop/backing_file")) else {
            continue;
        };
        let backing = Path::new(backing.trim_end_matches('\n'));
        let is_same = fs::metadata(backing).is_ok_and(|m| (m.dev(), m.ino()) == (dev, ino));
        if is_same || real.as_deref() == Some(backing) {
            return Some(format!("/dev/{}", name.to_string_lossy()));
        }
    }
    None
}

/// The format that a raw image begins with, if it is one that QEMU would have written into a file.
pub(crate) fn foreign_format(file: &File) -> Option<&'static str> {
    use std::os::unix::fs::FileExt;
    const MAGICS: [(&[u8], &str); 8] = [
        (b"QFI\xfb", "qcow2"),
        (b"QED\0", "qed"),
        (b"KDMV", "vmdk"),
        (b"# Disk DescriptorFile", "vmdk"),
        (b"vhdxfile", "vhdx"),
        (b"conectix", "vpc"),
        (b"WithoutFreeSpace", "parallels"),
        (b"<<< Oracle VM VirtualBox Disk Image >>>", "vdi"),
    ];
    let mut head = [0; 64];
    let len = file.read_at(&mut head, 0).unwrap_or(0);
    MAGICS.iter().find(|(magic, _)| head[..len].starts_with(magic)).map(|(_, format)| *format)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    #[test]
    fn formats_that_are_not_raw_are_named() {
        for (head, expected) in [
            (&b"QFI\xfb\0\0\0\x03"[..], Some("qcow2")),
            (b"KDMV\x01", Some("vmdk")),
            (b"vhdxfile", Some("vhdx")),
            (b"QFI", None),
            (b"", None),
            (b"\xeb\x63\x90", None),
        ] {
            let mut file = tempfile::tempfile().unwrap();
            file.write_all(head).unwrap();
            assert_eq!(foreign_format(&file), expected, "{head:?}");
        }
    }
}
