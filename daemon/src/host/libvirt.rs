//! Resumes domains of libvirt that have paused because their disks here did not answer.
//!
//! libvirt 9.0 (Debian 12) drops `<reconnect>` from a network disk, so QEMU fails requests as soon as the daemon is away. With
//! `error_policy='stop' rerror_policy='stop'` the domain pauses instead and no guest sees an error, but nobody resumes it. This
//! watch does: it looks for domains that are paused by an I/O error, and resumes those whose failed disks are all exports of
//! this daemon. libvirt is asked through `virsh`, so the daemon needs no library of libvirt.

use super::Host;
use crate::status::GroupState;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, Instant};
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

impl Host {
    /// Resumes paused domains for as long as the daemon runs. Ends at once where there is no `virsh`.
    pub(super) async fn follow_libvirt(&self) {
        let mut resumes = Resumes::default();
        let mut failed: Option<String> = None;
        loop {
            match self.resume_paused(&mut resumes).await {
                Ok(()) => failed = None,
                Err(Virsh::NotInstalled) => {
                    tracing::debug!("no virsh on this host: paused domains are not looked for");
                    return;
                }
                Err(Virsh::Failed(reason)) => {
                    if failed.as_ref() != Some(&reason) {
                        tracing::debug!("libvirt does not answer: {reason}");
                    }
                    failed = Some(reason);
                }
            }
            tokio::time::sleep(if failed.is_some() { ABSENT_LOOK_EVERY } else { LOOK_EVERY }).await;
        }
    }

    async fn resume_paused(&self, resumes: &mut Resumes) -> Result<(), Virsh> {
        let paused = virsh(&["list", "--state-paused", "--name"]).await?;
        let paused: BTreeSet<&str> =
            paused.lines().map(str::trim).filter(|l| !l.is_empty()).collect();
        for domain in paused {
            if !virsh(&["domstate", domain, "--reason"]).await?.contains("I/O error") {
                continue;
            }
            let document = virsh(&["dumpxml", domain]).await?;
            let failed = failed_disks(&virsh(&["domblkerror", domain]).await?);
            let Some(groups) = self.groups_of(&document, &failed) else { continue };
            if let Some(group) = groups.iter().find(|group| self.has_ended(group)) {
                if resumes.left_paused.insert(domain.to_owned()) {
                    tracing::warn!(
                        domain,
                        group,
                        "the domain is paused and stays so: the group runs at the backup site now. Shut the domain down"
                    );
                }
                continue;
            }
            let now = Instant::now();
            if resumes.not_before(domain).is_some_and(|at| now < at) {
                continue;
            }
            let again_after = resumes.is_resumed(domain, now);
            let disks = failed.into_iter().collect::<Vec<_>>().join(", ");
            match virsh(&["resume", domain]).await {
                Ok(_) => tracing::warn!(
                    domain,
                    disks,
                    "libvirt had paused the domain because its disks did not answer; they answer again, and the domain was \
                     resumed"
                ),
                Err(Virsh::Failed(reason)) => tracing::error!(
                    domain,
                    disks,
                    reason,
                    "libvirt has paused the domain because its disks did not answer, and does not resume it; the next attempt \
                     comes in {} s. `virsh resume {domain}` does the same",
                    again_after.as_secs()
                ),
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// The groups whose exports are the failed disks of a domain. `None` if one of these disks is no export of this daemon, or
    /// if no disk has failed.
    fn groups_of(&self, document: &str, failed: &BTreeSet<String>) -> Option<BTreeSet<String>> {
        let sources = unix_sources(document)?;
        let of_socket = |socket: &Path| {
            self.groups.iter().find(|group| {
                let writers = group.members.iter().filter_map(|member| member.writer.as_ref());
                writers.flat_map(|writer| &writer.sockets).any(|own| own == socket)
            })
        };
        let group_of = |disk: &String| Some(of_socket(sources.get(disk)?)?.config.name.to_string());
        let groups = failed.iter().map(group_of).collect::<Option<BTreeSet<_>>>()?;
        (!groups.is_empty()).then_some(groups)
    }

    /// Whether guests of the group must not run on here: the backup site has the group.
    fn has_ended(&self, group: &str) -> bool {
        let status = self.status();
        let group = status.groups.iter().find(|other| other.name == group);
        group.is_some_and(|group| group.state == GroupState::Fenced)
    }
}

/// Why `virsh` has no answer.
enum Virsh {
    NotInstalled,
    Failed(String),
}

async fn virsh(arguments: &[&str]) -> Result<String, Virsh> {
    let mut command = Command::new("virsh");
    command
        .arg("--quiet")
        .args(arguments)
        .env("LC_ALL", "C")
        .stdin(Stdio::null())
        .kill_on_drop(true);
    let output = match tokio::time::timeout(ANSWER_WITHIN, command.output()).await {
        Ok(Ok(output)) => output,
        Ok(Err(error)) if error.kind() == std::io::ErrorKind::NotFound => {
            return Err(Virsh::NotInstalled);
        }
        Ok(Err(error)) => return Err(Virsh::Failed(error.to_string())),
        Err(_) => return Err(Virsh::Failed(format!("no answer in {} s", ANSWER_WITHIN.as_secs()))),
    };
    if output.status.success() {
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    } else {
        Err(Virsh::Failed(String::from_utf8_lossy(&output.stderr).trim().to_owned()))
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
}
