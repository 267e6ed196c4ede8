//! Resumes domains of libvirt that have paused because their disks here did not answer.
//!
//! libvirt 9.0 (Debian 12) drops `<reconnect>` from a network disk, so QEMU fails requests as soon as the daemon is away. With
//! `error_policy='stop' rerror_policy='stop'` the domain pauses instead and no guest sees an error, but nobody resumes it. This
//! watch does: it looks for domains that are paused by an I/O error, and resumes those whose failed disks are all exports of
//! this daemon. libvirt is asked through `virsh`, so the daemon needs no library of libvirt.

use super::Host;
use super::snapshot::writers_of;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, Instant};
use tidelock_daemon_core::owner::Phase;
use tokio::process::Command;

/// The time between two looks for paused domains.
const LOOK_EVERY: Duration = Duration::from_secs(2);
/// The time between two looks for libvirt where it does not answer.
const ABSENT_LOOK_EVERY: Duration = Duration::from_secs(30);
/// The first connection to libvirt may wait for its probe of QEMU.
const ANSWER_WITHIN: Duration = Duration::from_secs(120);
/// A domain that has run for this long since it was resumed is not in a row of failures.
const STEADY: Duration = Duration::from_secs(60);
const PAUSE_MAX: Duration = Duration::from_secs(300);

/// The directory of libvirt's configuration: a host without it has no libvirt.
const LIBVIRT_CONFIG_DIR: &str = "/etc/libvirt";
/// Looks that fail in a row until it is logged. The first one may come before libvirt has started.
const FAILED_LOOKS_SAID: u32 = 2;

impl Host {
    /// Resumes paused domains for as long as the daemon runs. Ends at once where there is no `virsh`.
    pub(super) async fn follow_libvirt(&self) {
        let virsh = Virsh("virsh".into());
        let mut resumes = Resumes::default();
        let mut failed_looks = 0;
        loop {
            match resumes.resume_paused(&virsh, self).await {
                Ok(()) => {
                    if failed_looks >= FAILED_LOOKS_SAID {
                        tracing::info!("libvirt answers virsh again");
                    }
                    failed_looks = 0;
                }
                Err(VirshError::NotInstalled) => {
                    if Path::new(LIBVIRT_CONFIG_DIR).exists() {
                        tracing::warn!(
                            "libvirt is on this host and virsh is not: a domain that pauses while the daemon is away stays paused. \
                             Install virsh (libvirt-clients) and start the daemon again"
                        );
                    }
                    return;
                }
                Err(VirshError::Failed(reason)) => {
                    failed_looks += 1;
                    if failed_looks == FAILED_LOOKS_SAID {
                        tracing::warn!(
                            "libvirt does not answer virsh: domains that have paused are not resumed until it does: {reason}"
                        );
                    }
                }
            }
            tokio::time::sleep(if failed_looks > 0 { ABSENT_LOOK_EVERY } else { LOOK_EVERY }).await;
        }
    }
}

/// The facts about this daemon's groups that the watch needs.
trait Exports {
    /// The group of the export that listens on the socket.
    fn group_of(&self, socket: &Path) -> Option<String>;

    /// Guests of the group must not run on here: the backup site has the group.
    fn has_ended(&self, group: &str) -> bool;
}

impl Exports for Host {
    fn group_of(&self, socket: &Path) -> Option<String> {
        let group = self.groups.iter().find(|group| {
            let writers = group.members.iter().filter_map(|member| member.writer.as_ref());
            writers.flat_map(|writer| &writer.sockets).any(|own| own == socket)
        });
        Some(group?.config.name.to_string())
    }

    fn has_ended(&self, group: &str) -> bool {
        let group = self.groups.iter().find(|other| other.config.name.as_str() == group);
        group.is_some_and(|group| {
            let mut writers = writers_of(group);
            group.view().switched_at_unix_ms.is_some()
                || writers.any(|w| w.view.phase() == Phase::Fenced && !w.seen().is_superseded)
        })
    }
}

/// The groups whose exports are the failed disks of a domain. `None` if one of these disks is no export of this daemon, or
/// if no disk has failed.
fn groups_of(
    exports: &impl Exports,
    document: &str,
    failed: &BTreeSet<String>,
) -> Option<BTreeSet<String>> {
    let sources = unix_sources(document)?;
    let group_of = |disk: &String| exports.group_of(sources.get(disk)?);
    let groups = failed.iter().map(group_of).collect::<Option<BTreeSet<_>>>()?;
    (!groups.is_empty()).then_some(groups)
}

impl Resumes {
    /// Looks once at all domains that are paused. A domain about which libvirt fails keeps no other one from being resumed.
    async fn resume_paused(
        &mut self,
        virsh: &Virsh,
        exports: &impl Exports,
    ) -> Result<(), VirshError> {
        let paused = virsh.run(&["list", "--state-paused", "--name"]).await?;
        let paused: BTreeSet<&str> =
            paused.lines().map(str::trim).filter(|l| !l.is_empty()).collect();
        self.failing.retain(|domain| paused.contains(domain.as_str()));
        for domain in paused {
            match self.resume(domain, virsh, exports).await {
                Ok(()) => {
                    self.failing.remove(domain);
                }
                Err(VirshError::Failed(reason)) => {
                    if self.failing.insert(domain.to_owned()) {
                        tracing::warn!(
                            domain,
                            reason,
                            "the domain is paused, and libvirt does not say why: it is not resumed until libvirt does"
                        );
                    }
                }
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Resumes a paused domain, if its disks here have paused it.
    async fn resume(
        &mut self,
        domain: &str,
        virsh: &Virsh,
        exports: &impl Exports,
    ) -> Result<(), VirshError> {
        if !virsh.run(&["domstate", domain, "--reason"]).await?.contains("I/O error") {
            return Ok(());
        }
        let document = virsh.run(&["dumpxml", domain]).await?;
        let failed = failed_disks(&virsh.run(&["domblkerror", domain]).await?);
        let Some(groups) = groups_of(exports, &document, &failed) else { return Ok(()) };
        if let Some(group) = groups.iter().find(|group| exports.has_ended(group)) {
            if self.left_paused.insert(domain.to_owned()) {
                tracing::warn!(
                    domain,
                    group,
                    "the domain is paused and stays so: the group runs at the backup site now. Shut the domain down"
                );
            }
            return Ok(());
        }
        let now = Instant::now();
        if self.not_before(domain).is_some_and(|at| now < at) {
            return Ok(());
        }
        let again_after = self.is_resumed(domain, now);
        let disks = failed.into_iter().collect::<Vec<_>>().join(", ");
        match virsh.run(&["resume", domain]).await {
            Ok(_) => tracing::warn!(
                domain,
                disks,
                "libvirt had paused the domain because its disks did not answer; they answer again, and the domain was \
                 resumed"
            ),
            Err(VirshError::Failed(reason)) => tracing::error!(
                domain,
                disks,
                reason,
                "libvirt has paused the domain because its disks did not answer, and does not resume it; the next attempt \
                 comes in {} s. `virsh resume {domain}` does the same",
                again_after.as_secs()
            ),
            Err(error) => return Err(error),
        }
        Ok(())
    }
}

/// Why `virsh` has no answer.
#[derive(Debug)]
enum VirshError {
    NotInstalled,
    Failed(String),
}

/// The program.
struct Virsh(PathBuf);

impl Virsh {
    async fn run(&self, arguments: &[&str]) -> Result<String, VirshError> {
        let mut command = Command::new(&self.0);
        command
            .arg("--quiet")
            .args(arguments)
            .env("LC_ALL", "C")
            .stdin(Stdio::null())
            .kill_on_drop(true);
        let output = match tokio::time::timeout(ANSWER_WITHIN, command.output()).await {
            Ok(Ok(output)) => output,
            Ok(Err(error)) if error.kind() == std::io::ErrorKind::NotFound => {
                return Err(VirshError::NotInstalled);
            }
            Ok(Err(error)) => return Err(VirshError::Failed(error.to_string())),
            Err(_) => {
                let seconds = ANSWER_WITHIN.as_secs();
                return Err(VirshError::Failed(format!("no answer in {seconds} s")));
            }
        };
        if output.status.success() {
            Ok(String::from_utf8_lossy(&output.stdout).into_owned())
        } else {
            Err(VirshError::Failed(String::from_utf8_lossy(&output.stderr).trim().to_owned()))
        }
    }
}

/// The disks that `virsh domblkerror` names, one `TARGET: REASON` a line.
fn failed_disks(text: &str) -> BTreeSet<String> {
    text.lines().filter_map(|line| Some(line.split_once(':')?.0.trim().to_owned())).collect()
}

/// For each disk of a domain document that is a unix socket (NBD or vhost-user): its target and the socket. `None` if the
/// document cannot be read.
fn unix_sources(document: &str) -> Option<BTreeMap<String, PathBuf>> {
    let document = roxmltree::Document::parse(document).ok()?;
    let mut sources = BTreeMap::new();
    for disk in document.descendants().filter(|node| node.has_tag_name("disk")) {
        let child = |name| disk.children().find(|node| node.has_tag_name(name));
        let (Some(source), Some(target)) = (child("source"), child("target")) else { continue };
        let host = source.children().find(|node| node.has_tag_name("host"));
        let socket = host.and_then(|host| host.attribute("socket")).or(source.attribute("path"));
        if let (Some(socket), Some(target)) = (socket, target.attribute("dev")) {
            sources.insert(target.to_owned(), socket.into());
        }
    }
    Some(sources)
}

/// Bounds how often a domain is resumed that pauses again and again.
#[derive(Default)]
struct Resumes {
    last: BTreeMap<String, Resumed>,
    /// Domains of groups that the backup site has: each is logged once.
    left_paused: BTreeSet<String>,
    /// Paused domains about which libvirt does not answer: each is logged once.
    failing: BTreeSet<String>,
}

struct Resumed {
    at: Instant,
    pause: Duration,
}

impl Resumes {
    /// The earliest time at which a domain may be resumed again. `None`: it was never resumed.
    fn not_before(&self, domain: &str) -> Option<Instant> {
        self.last.get(domain).map(|last| last.at + last.pause)
    }

    /// Notes that the domain is resumed at `now`. Returns the pause before the next time.
    fn is_resumed(&mut self, domain: &str, now: Instant) -> Duration {
        let pause = match self.last.get(domain) {
            Some(last) if now < last.at + last.pause + STEADY => {
                (last.pause * 2).clamp(LOOK_EVERY, PAUSE_MAX)
            }
            _ => Duration::ZERO,
        };
        self.last.insert(domain.to_owned(), Resumed { at: now, pause });
        pause
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failed_disks_and_their_sockets_are_found() {
        let failed = failed_disks("vda: unspecified error\nvdb: no space\n");
        assert_eq!(failed, ["vda", "vdb"].map(str::to_owned).into());
        assert_eq!(failed_disks("No errors found\n"), BTreeSet::new());
        let xml = "<domain><devices>
            <disk type='network'><source protocol='nbd' name='root'><host transport='unix' socket='/s/root'/></source>
              <target dev='vda'/></disk>
            <disk type='vhostuser'><source type='unix' path='/s/data'/><target dev='vdb'/></disk>
            <disk type='file'><source file='/images/x'/><target dev='vdc'/></disk>
            <disk type='network'><source protocol='nbd'><host name='n' port='1'/></source><target dev='vdd'/></disk>
            </devices></domain>";
        let sources = unix_sources(xml).unwrap();
        let expected = [("vda", "/s/root"), ("vdb", "/s/data")];
        assert_eq!(sources, expected.map(|(t, s)| (t.to_owned(), s.into())).into());
        assert_eq!(unix_sources("<domain"), None);
    }

    #[test]
    fn a_domain_that_pauses_again_is_resumed_more_and_more_rarely() {
        let mut resumes = Resumes::default();
        let mut now = Instant::now();
        assert_eq!(resumes.not_before("db"), None);
        assert_eq!(resumes.is_resumed("db", now), Duration::ZERO);
        let mut pauses = Vec::new();
        for _ in 0..10 {
            now = now.max(resumes.not_before("db").unwrap());
            pauses.push(resumes.is_resumed("db", now));
        }
        assert_eq!(pauses[0], LOOK_EVERY);
        assert!(pauses.windows(2).all(|two| two[1] == (two[0] * 2).min(PAUSE_MAX)));
        now = resumes.not_before("db").unwrap() + STEADY;
        assert_eq!(resumes.is_resumed("db", now), Duration::ZERO, "it ran well in between");
    }

    struct OneGroup {
        has_ended: bool,
    }

    impl Exports for OneGroup {
        fn group_of(&self, socket: &Path) -> Option<String> {
            (socket == Path::new("/s/root")).then(|| "shop".to_owned())
        }

        fn has_ended(&self, _: &str) -> bool {
            self.has_ended
        }
    }

    /// A `virsh` for which the domains are paused by an I/O error; those that begin with `x` it cannot describe, and those
    /// that begin with `o` have a disk of somebody else. Returns what it has resumed after a look.
    async fn resumed(domains: &str, resumes: &mut Resumes, has_ended: bool) -> String {
        use std::os::unix::fs::PermissionsExt;
        let dir = tempfile::tempdir().unwrap();
        let (program, resumed) = (dir.path().join("virsh"), dir.path().join("resumed"));
        let script = format!(
            "#!/bin/sh\ncase $2-$3 in\nlist-*) printf '%s\\n' {domains} ;;\ndomstate-*) echo 'paused (I/O error)' ;;\n\
             dumpxml-x*) echo 'error: gone' >&2; exit 1 ;;\n\
             dumpxml-o*) echo '<domain><disk><source path=\"/other\"/><target dev=\"vda\"/></disk></domain>' ;;\n\
             dumpxml-*) echo '<domain><disk><source path=\"/s/root\"/><target dev=\"vda\"/></disk></domain>' ;;\n\
             domblkerror-*) echo 'vda: unspecified error' ;;\nresume-*) echo $3 >> {} ;;\nesac\n",
            resumed.display()
        );
        std::fs::write(&program, script).unwrap();
        std::fs::set_permissions(&program, PermissionsExt::from_mode(0o700)).unwrap();
        resumes.resume_paused(&Virsh(program), &OneGroup { has_ended }).await.unwrap();
        std::fs::read_to_string(resumed).unwrap_or_default()
    }

    #[tokio::test]
    async fn a_domain_that_libvirt_cannot_describe_keeps_no_other_one_paused() {
        let mut resumes = Resumes::default();
        assert_eq!(resumed("xa za", &mut resumes, false).await, "za\n");
        assert_eq!(resumes.failing, ["xa".to_owned()].into());
        resumed("za", &mut resumes, false).await;
        assert_eq!(resumes.failing, BTreeSet::new(), "it is said again if it fails again");
    }

    #[tokio::test]
    async fn domains_with_a_disk_of_somebody_else_and_of_fenced_groups_stay_paused() {
        let mut resumes = Resumes::default();
        assert_eq!(resumed("oa", &mut resumes, false).await, "");
        assert_eq!(resumed("db", &mut resumes, true).await, "");
        assert_eq!(resumes.left_paused, ["db".to_owned()].into());
        assert_eq!(resumed("db", &mut resumes, false).await, "db\n");
    }
}
