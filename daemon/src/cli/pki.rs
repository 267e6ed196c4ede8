//! `tidelock pki`: an authority and certificates for both sites, without openssl.

use std::fs::OpenOptions;
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use anyhow::{Context, bail, ensure};
use clap::{Args, Subcommand};
use tidelock_config::Name;
use tidelock_tls::Role;
use tidelock_tls::pki::{Authority, Issued};

const DAY: Duration = Duration::from_secs(86_400);

/// What to make.
#[derive(Debug, Subcommand)]
pub enum Pki {
    /// Make the authority that signs the certificates of both sites: ca.pem and ca.key
    ///
    /// Do this once, on a machine that you trust. ca.key never needs to be on a host or a backup
    /// server: who has it can make certificates that both sites believe.
    Init(Init),
    /// Make a certificate for a host or for a backup server, signed by the authority
    Issue(Issue),
}

/// `tidelock pki init`.
#[derive(Debug, Args)]
pub struct Init {
    /// The directory for the files; it is made if it is missing
    #[arg(long, default_value = ".")]
    pub dir: PathBuf,
    /// The authority's name, as it is shown in certificates
    #[arg(long, default_value = "Tidelock authority")]
    pub name: String,
    /// For how many days the authority is valid
    #[arg(long, default_value_t = 3650, value_parser = clap::value_parser!(u32).range(1..=36_500))]
    pub days: u32,
}

/// `tidelock pki issue`.
#[derive(Debug, Args)]
#[command(group = clap::ArgGroup::new("role").required(true))]
pub struct Issue {
    /// For a host with this name: the `name` in [host] of its configuration
    #[arg(long, value_name = "NAME", group = "role")]
    pub host: Option<String>,
    /// For a backup server with this name: the DNS name or the address that hosts connect to
    #[arg(long, value_name = "NAME", group = "role")]
    pub backup: Option<String>,
    /// Another name or address for the same certificate; may be repeated
    #[arg(long, value_name = "NAME")]
    pub also: Vec<String>,
    /// The directory with ca.pem and ca.key; the new files go there, too
    #[arg(long, default_value = ".")]
    pub dir: PathBuf,
    /// For how many days the certificate is valid
    #[arg(long, default_value_t = 825, value_parser = clap::value_parser!(u32).range(1..=36_500))]
    pub days: u32,
}

/// Makes what is asked for, and returns what to tell the operator.
pub fn run(command: &Pki, now: SystemTime) -> anyhow::Result<String> {
    match command {
        Pki::Init(init) => make_authority(init, now),
        Pki::Issue(issue) => make_certificate(issue, now),
    }
}

fn make_authority(init: &Init, now: SystemTime) -> anyhow::Result<String> {
    std::fs::create_dir_all(&init.dir).with_context(|| init.dir.display().to_string())?;
    let issued = Authority::create(&init.name, now, DAY * init.days)?;
    let (certificate, key) = write_pair(&init.dir, "ca", &issued)?;
    Ok(format!(
        "Made the authority, valid for {} days:\n  \
           {}   goes to every host and to the backup server\n  \
           {}   stays here: who has it can make certificates that both sites believe\n\n\
         Next, in the same directory:\n  \
           tidelock pki issue --backup NAME   (the name or address that hosts connect to)\n  \
           tidelock pki issue --host NAME     (once for each host: `name` in its [host])\n",
        init.days,
        certificate.display(),
        key.display()
    ))
}

fn make_certificate(issue: &Issue, now: SystemTime) -> anyhow::Result<String> {
    let (role, name) = match (&issue.host, &issue.backup) {
        (Some(name), None) => (Role::Host, name),
        (None, Some(name)) => (Role::Backup, name),
        _ => bail!("say --host NAME or --backup NAME"),
    };
    if role == Role::Host
        && let Err(wrong) = Name::new(name)
    {
        bail!("{}; use the `name` in [host] of the host's configuration", wrong.what);
    }
    // A name is about to become part of a path; addresses have colons.
    let file = name.replace(':', "-");
    let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-');
    ensure!(
        file.chars().all(plain) && !file.starts_with(['.', '-']) && file != "ca",
        "\"{name}\" cannot be the name of a certificate's file: use a host name or an address"
    );
    let read = |what: &str| {
        let path = issue.dir.join(what);
        std::fs::read_to_string(&path).with_context(|| {
            format!("{}: make the authority first with `tidelock pki init`", path.display())
        })
    };
    let authority = Authority::from_pem(&read("ca.pem")?, &read("ca.key")?)?;
    let names: Vec<_> = std::iter::once(name).chain(&issue.also).cloned().collect();
    let issued = authority.issue(role, &names, now, DAY * issue.days)?;
    let (certificate, key) = write_pair(&issue.dir, &file, &issued)?;
    let (whom, section) = match role {
        Role::Host => ("this host", "/etc/tidelock/host.toml"),
        Role::Backup => ("the backup server", "/etc/tidelock/backup.toml"),
    };
    Ok(format!(
        "Made a certificate for {whom}, {}, valid for {} days:\n  \
           {}\n  \
           {}   (private: mode 0600, for {whom} alone)\n\n\
         Copy both and {} to {whom}, for example to /etc/tidelock/, and name them in {section}:\n  \
           [tls]\n  \
           ca = \"/etc/tidelock/ca.pem\"\n  \
           certificate = \"/etc/tidelock/{file}.pem\"\n  \
           key = \"/etc/tidelock/{file}.key\"\n",
        names.join(", "),
        issue.days,
        certificate.display(),
        key.display(),
        issue.dir.join("ca.pem").display(),
    ))
}

/// Writes both files, neither over one that exists.
fn write_pair(dir: &Path, name: &str, issued: &Issued) -> anyhow::Result<(PathBuf, PathBuf)> {
    let certificate = dir.join(format!("{name}.pem"));
    let key = dir.join(format!("{name}.key"));
    for path in [&certificate, &key] {
        ensure!(
            !path.exists(),
            "{} exists and is not overwritten: move it away, or use another --dir",
            path.display()
        );
    }
    // The key first: a certificate without its key would look finished.
    write_new(&key, &issued.key_pem, 0o600)?;
    write_new(&certificate, &issued.certificate_pem, 0o644)?;
    Ok((certificate, key))
}

fn write_new(path: &Path, text: &str, mode: u32) -> anyhow::Result<()> {
    let write = || -> io::Result<()> {
        let mut file = OpenOptions::new().write(true).create_new(true).mode(mode).open(path)?;
        file.write_all(text.as_bytes())?;
        file.sync_all()
    };
    write().with_context(|| format!("cannot write {}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;
    use tidelock_tls::Files;

    fn issue(dir: &Path, host: Option<&str>, backup: Option<&str>) -> anyhow::Result<String> {
        let (host, backup) = (host.map(str::to_owned), backup.map(str::to_owned));
        let issue = Issue { host, backup, also: vec!["alias".into()], dir: dir.into(), days: 1 };
        run(&Pki::Issue(issue), SystemTime::now())
    }

    fn init(dir: &Path) -> anyhow::Result<String> {
        let init = Init { dir: dir.into(), name: "t".into(), days: 10 };
        run(&Pki::Init(init), SystemTime::now())
    }

    #[test]
    fn what_is_made_can_be_used_and_is_not_overwritten() {
        let dir = tempfile::tempdir().unwrap();
        let dir = dir.path();
        let early = issue(dir, Some("host-a"), None).unwrap_err();
        assert!(format!("{early:#}").contains("pki init"), "{early:#}");
        init(dir).unwrap();
        let told = issue(dir, Some("host-a"), None).unwrap();
        assert!(told.contains("certificate = \"/etc/tidelock/host-a.pem\""), "{told}");
        issue(dir, None, Some("fd00::1")).unwrap();
        let mode = |name: &str| dir.join(name).metadata().unwrap().permissions().mode() & 0o777;
        for key in ["ca.key", "host-a.key", "fd00--1.key"] {
            assert_eq!(mode(key), 0o600, "{key}");
        }
        let files = |name: &str| Files {
            ca: dir.join("ca.pem"),
            certificate: dir.join(format!("{name}.pem")),
            key: dir.join(format!("{name}.key")),
        };
        let host = files("host-a").load().unwrap();
        assert!(host.identity().speaks_for("alias"));
        host.host_config(SystemTime::now()).unwrap();
        files("fd00--1").load().unwrap().backup_config(SystemTime::now()).unwrap();

        let before = std::fs::read(dir.join("host-a.key")).unwrap();
        let again = issue(dir, Some("host-a"), None).unwrap_err();
        assert!(again.to_string().contains("not overwritten"), "{again}");
        assert!(init(dir).unwrap_err().to_string().contains("not overwritten"));
        assert_eq!(std::fs::read(dir.join("host-a.key")).unwrap(), before);
    }

    #[test]
    fn odd_names_do_not_become_paths() {
        let dir = tempfile::tempdir().unwrap();
        init(dir.path()).unwrap();
        for name in ["../x", "a/b", "", ".hidden", "ca", "*.example", "a b"] {
            assert!(issue(dir.path(), None, Some(name)).is_err(), "{name}");
            if name != "ca" {
                assert!(issue(dir.path(), Some(name), None).is_err(), "{name}");
            }
        }
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 2);
    }
}
