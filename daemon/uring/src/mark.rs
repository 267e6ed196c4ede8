//! The identity of a disk: what changes when anybody restores, replaces or writes it.

use crate::file::FileKind;
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::MetadataExt;

/// One line for people and for comparison as a whole. Two lines that are equal were taken of the same disk with nothing
/// written to it in between, as far as the kernel tells:
///
/// - an image by inode, size, and the times of its last writing and last change in nanoseconds. The number of its file
///   system is left out: it may change with each boot of the host;
/// - a device by what it says of itself (WWID, serial number, device mapper's or MD's UUID, the file of a loop device;
///   `?` if it says nothing), number, size, `diskseq` and the sectors written to it since the host was booted. None of these says
///   what was written before this boot, so the boot is in it, too: after a reboot no device is known to be the same.
pub(crate) fn of(file: &File, kind: FileKind, len_bytes: u64) -> io::Result<String> {
    let meta = file.metadata()?;
    if kind == FileKind::Regular {
        return Ok(format!(
            "image inode={} bytes={len_bytes} mtime={}.{:09} ctime={}.{:09}",
            meta.ino(),
            meta.mtime(),
            meta.mtime_nsec(),
            meta.ctime(),
            meta.ctime_nsec(),
        ));
    }
    let (major, minor) = (libc::major(meta.rdev()), libc::minor(meta.rdev()));
    let attribute =
        |name: &str| fs::read_to_string(format!("/sys/dev/block/{major}:{minor}/{name}"));
    let told =
        |text: io::Result<String>| text.map_or("?".to_owned(), |text| text.trim().to_owned());
    let identity = identity(|name| attribute(name).ok());
    let diskseq = match attribute("diskseq") {
        // A partition has that of its disk.
        Err(_) => told(attribute("../diskseq")),
        found => told(found),
    };
    let stat = told(attribute("stat"));
    let mut counts = stat.split_whitespace();
    let (writes, sectors) = (counts.nth(4), counts.nth(1));
    let (discards, discarded) = (counts.nth(4), counts.nth(1));
    let boot = told(fs::read_to_string("/proc/sys/kernel/random/boot_id"));
    Ok(format!(
        "device id={identity} {major}:{minor} bytes={len_bytes} diskseq={diskseq} written={}/{} discarded={}/{} boot={boot}",
        writes.unwrap_or("?"),
        sectors.unwrap_or("?"),
        discards.unwrap_or("?"),
        discarded.unwrap_or("?"),
    ))
}

/// One word: the first of the attributes that is there. A partition has the identity of its disk and a number.
fn identity(attribute: impl Fn(&str) -> Option<String>) -> String {
    const NAMES: [&str; 6] =
        ["dm/uuid", "md/uuid", "wwid", "device/wwid", "serial", "loop/backing_file"];
    let found = |at: &str| {
        let values = NAMES.iter().filter_map(|name| attribute(&format!("{at}{name}")));
        let mut words = values.map(|value| value.split_whitespace().collect::<Vec<_>>().join("_"));
        words.find(|word| !word.is_empty())
    };
    let partition = attribute("partition");
    match partition {
        None => found("").unwrap_or_else(|| "?".to_owned()),
        Some(number) => {
            format!("{}/{}", found("../").unwrap_or_else(|| "?".to_owned()), number.trim())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_is_known_by_what_it_says_of_itself() {
        let of = |attributes: &[(&str, &str)]| {
            identity(|name| {
                let found = attributes.iter().find(|(of, _)| *of == name);
                found.map(|(_, value)| (*value).to_owned())
            })
        };
        assert_eq!(of(&[("wwid", "eui.0025 38\n"), ("serial", "S1")]), "eui.0025_38");
        assert_eq!(of(&[("serial", "\n"), ("loop/backing_file", "/a b")]), "/a_b");
        assert_eq!(of(&[("partition", "2\n"), ("../device/wwid", "naa.5")]), "naa.5/2");
        assert_eq!(of(&[]), "?");
    }
}
