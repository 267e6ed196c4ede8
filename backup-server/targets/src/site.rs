//! `boot.toml`, beside the server's configuration: what QEMU is given that no host may say. It is read at each
//! `recover --boot`.

use serde::Deserialize;
use std::io;
use std::path::{Path, PathBuf};

/// The user that QEMU runs as where the server may choose.
const USER: &str = "nobody";
/// Debian's UEFI (package ovmf).
const UEFI: &str = "/usr/share/ovmf/OVMF.fd";

/// Content of `boot.toml`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Site {
    user: Option<String>,
    uefi: Option<PathBuf>,
    /// QEMU.
    pub qemu: Option<PathBuf>,
    /// QEMU's accelerator.
    pub accelerator: Option<String>,
    #[serde(default)]
    machine: Vec<OfMember>,
}

/// One `[[machine]]` table of `boot.toml`: this site's settings for a member's machine.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct OfMember {
    group: String,
    member: String,
    /// In place of the firmware that the description asks for.
    pub firmware: Option<PathBuf>,
    /// Kernel.
    pub kernel: Option<PathBuf>,
    /// Initial RAM disk.
    pub initrd: Option<PathBuf>,
    /// The kernel's command line.
    pub append: Option<String>,
    /// QEMU's processor model.
    pub cpu: Option<String>,
    /// More arguments.
    #[serde(default)]
    pub arguments: Vec<String>,
}

impl Site {
    /// Reads the file; one that is not there says nothing.
    pub fn read(path: &Path) -> io::Result<Self> {
        let wrong =
            |what: &dyn std::fmt::Display| io::Error::other(format!("{}: {what}", path.display()));
        match std::fs::read_to_string(path) {
            Ok(text) => toml::from_str(&text).map_err(|error| wrong(&error)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Self::default()),
            Err(error) => Err(wrong(&error)),
        }
    }

    /// The user that QEMU runs as where the server may choose.
    #[must_use]
    pub fn user(&self) -> &str {
        self.user.as_deref().unwrap_or(USER)
    }

    /// UEFI.
    #[must_use]
    pub fn uefi(&self) -> PathBuf {
        self.uefi.clone().unwrap_or_else(|| UEFI.into())
    }

    /// The settings for a member's machine; the defaults if `boot.toml` has no table for the member.
    #[must_use]
    pub fn of(&self, group: &str, member: &str) -> OfMember {
        let mut all = self.machine.iter();
        all.find(|of| of.group == group && of.member == member).cloned().unwrap_or_default()
    }

    /// A member of the group that is written about and is not there: its machine would boot without what is written.
    #[must_use]
    pub fn unknown_member(&self, group: &str, members: &[&str]) -> Option<&str> {
        let of_group = self.machine.iter().filter(|of| of.group == group);
        of_group.map(|of| of.member.as_str()).find(|member| !members.contains(member))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_member_has_its_own() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("boot.toml");
        assert_eq!(Site::read(&path).unwrap(), Site::default());
        let text = "user = \"vm\"\n[[machine]]\ngroup = \"shop\"\nmember = \"db\"\nkernel = \"k\"\n\
                    arguments = [\"-vga\", \"std\"]\n";
        std::fs::write(&path, text).unwrap();
        let site = Site::read(&path).unwrap();
        assert_eq!((site.user(), site.of("shop", "db").arguments.len()), ("vm", 2));
        assert_eq!(site.of("shop", "web"), OfMember::default());
        assert_eq!(site.unknown_member("shop", &["web"]), Some("db"));
        assert_eq!(site.unknown_member("other", &["web"]), None);
        std::fs::write(&path, "usr = \"vm\"\n").unwrap();
        assert!(Site::read(&path).unwrap_err().to_string().contains("usr"));
    }
}
