//! The user that QEMU or PostgreSQL runs as. A guest that breaks out of QEMU must not be the server, let alone root: a server
//! that may change users runs QEMU as another one. One that may not has no privileges to lose, and QEMU gets the server's own
//! user. Either way QEMU has no capability, can gain none, and has QEMU's own seccomp filter. PostgreSQL, whose data came
//! from another site, is held the same way.

use serde::{Deserialize, Serialize};
use std::ffi::OsStr;
use std::io;
use std::process::{Command, Stdio};

const CAP_SETUID: u32 = 7;
const CAP_NET_ADMIN: u32 = 12;
/// Members of this group may use `/dev/kvm` on Debian.
const KVM_GROUP: &str = "kvm";

/// QEMU's own filter of system calls.
pub const SANDBOX: &str = "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny";

/// Confinement of a program.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Jail {
    user: Option<User>,
}

/// A user that is not the server's.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct User {
    /// Its name.
    pub name: String,
    /// Its number.
    pub uid: u32,
    /// Its group.
    pub gid: u32,
    kvm: Option<u32>,
}

impl Jail {
    /// QEMU's jail, of a server with these privileges. `user` is looked up only if QEMU is to run as it.
    pub async fn new(user: &str) -> io::Result<Self> {
        let mut jail = Self::of("QEMU", user, "boot.toml").await?;
        if let Some(user) = &mut jail.user {
            let kvm = output(&["getent", "group", KVM_GROUP]).await.ok();
            user.kvm = kvm.and_then(|line| line.split(':').nth(2)?.parse().ok());
        }
        Ok(jail)
    }

    /// The same for any program. `file` is where an operator sets the user.
    pub async fn of(program: &str, user: &str, file: &str) -> io::Result<Self> {
        if !has_capability(CAP_SETUID)? {
            return Ok(Self { user: None });
        }
        let wrong = |e| {
            io::Error::other(format!(
                "{program} is to run as user {user}, and that user cannot be found ({e}): set `user` in {file}"
            ))
        };
        let uid = number(&["id", "-u", user]).await.map_err(wrong)?;
        let gid = number(&["id", "-g", user]).await.map_err(wrong)?;
        if uid == 0 {
            return Err(io::Error::other(format!(
                "{program} must not run as root: set `user` in {file}"
            )));
        }
        Ok(Self { user: Some(User { name: user.to_owned(), uid, gid, kvm: None }) })
    }

    /// The user, if it is not the server's own.
    #[must_use]
    pub fn user(&self) -> Option<&User> {
        self.user.as_ref()
    }

    /// A program in a session of its own, without privileges.
    pub fn command(&self, program: impl AsRef<OsStr>) -> Command {
        let mut command = Command::new("setsid");
        command.args(["setpriv", "--no-new-privs", "--inh-caps=-all", "--ambient-caps=-all"]);
        if let Some(user) = &self.user {
            command.arg("--bounding-set=-all");
            command.args([format!("--reuid={}", user.uid), format!("--regid={}", user.gid)]);
            match user.kvm {
                Some(kvm) => command.arg(format!("--groups={kvm}")),
                None => command.arg("--clear-groups"),
            };
        }
        command.arg("--").arg(program).stdin(Stdio::null());
        command
    }
}

/// True if this process may make network interfaces.
pub fn may_make_interfaces() -> io::Result<bool> {
    has_capability(CAP_NET_ADMIN)
}

fn has_capability(number: u32) -> io::Result<bool> {
    let status = std::fs::read_to_string("/proc/self/status")?;
    let line = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
    let effective = line.and_then(|hex| u64::from_str_radix(hex.trim(), 16).ok());
    effective.map(|effective| effective >> number & 1 == 1).ok_or_else(|| {
        io::Error::other("/proc/self/status does not say which capabilities this process has")
    })
}

async fn number(words: &[&str]) -> io::Result<u32> {
    output(words).await?.trim().parse().map_err(io::Error::other)
}

/// Runs a program and returns its standard output. A failed exit status is an error that holds its standard error.
pub async fn output(words: &[&str]) -> io::Result<String> {
    let mut command = tokio::process::Command::new(words[0]);
    let ended = command.args(&words[1..]).stdin(Stdio::null()).output().await?;
    if ended.status.success() {
        return Ok(String::from_utf8_lossy(&ended.stdout).into_owned());
    }
    let said = String::from_utf8_lossy(&ended.stderr);
    Err(io::Error::other(format!("{}: {}", words.join(" "), said.trim())))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn whoever_runs_in_it_has_no_capability_and_is_not_root() {
        let jail = Jail::new("nobody").await.unwrap();
        let ended = jail.command("cat").arg("/proc/self/status").output().unwrap();
        let status = String::from_utf8_lossy(&ended.stdout).into_owned();
        let of = |name: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(name));
            line.unwrap_or_else(|| panic!("{ended:?}")).trim().to_owned()
        };
        assert_eq!(of("CapEff:"), "0000000000000000");
        assert_eq!(of("NoNewPrivs:"), "1");
        if has_capability(CAP_SETUID).unwrap() {
            assert_eq!(of("CapBnd:"), "0000000000000000");
            assert!(!of("Uid:").split_whitespace().any(|uid| uid == "0"), "{status}");
            assert!(Jail::new("root").await.is_err());
        }
    }
}
