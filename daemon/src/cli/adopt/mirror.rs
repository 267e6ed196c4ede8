//! The copies that QEMU makes of a guest's disks while it runs.
//!
//! Each is a `blockdev-mirror` with the copy mode `background`: what the guest writes meanwhile is noted, and copied again. No
//! request of the guest waits for this daemon before the guest is moved over, so a daemon that dies or hangs in the middle
//! is nothing to it. With `write-blocking` it would be, and more: as seen with QEMU 7.2, and as `mirror_run` is written, a
//! copy of that kind which fails or is cancelled while the guest writes uses memory that is freed, and takes QEMU along.
//!
//! QEMU moves the guest over when nothing is left to copy, with the guest's requests held for that moment.

use super::Options;
use super::guests::source_of;
use super::qmp::{self, Job, Qmp, QmpError};
use crate::control::AdoptedDisk;
use anyhow::bail;
use serde_json::json;
use std::thread::sleep;
use std::time::{Duration, Instant};

const LOOK_EVERY: Duration = Duration::from_millis(20);
/// A copy that was cancelled, or is told to move the guest, has ended by then.
const ENDS_WITHIN: Duration = Duration::from_secs(60);
/// For so long the guest's requests wait for a daemon that is restarted.
const RECONNECT_S: u64 = 3600;

/// How the copies stand together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct MirrorProgress {
    /// Each has had nothing left to copy, once.
    pub(super) is_ready: bool,
    /// Bytes.
    pub(super) done_bytes: u64,
    /// Of so many.
    pub(super) total_bytes: u64,
}

/// Where one disk is in QEMU.
#[derive(Debug)]
struct Copy {
    what: String,
    job: String,
    target: String,
    /// The node that the guest has had, if it is known.
    source: Option<String>,
}

/// The copies of one guest's disks.
#[derive(Debug)]
pub(super) struct Mirror {
    qmp: Qmp,
    disks: Vec<AdoptedDisk>,
    options: Options,
    copies: Vec<Copy>,
}

impl Mirror {
    /// Of these disks of the guest of this QEMU.
    pub(super) fn new(qmp: Qmp, disks: Vec<AdoptedDisk>, options: Options) -> Self {
        Self { qmp, disks, options, copies: Vec::new() }
    }

    /// Begins the copy of each disk, or goes on with one that was begun before. A disk that is here already is left as it is.
    pub(super) fn begin(&mut self) -> anyhow::Result<()> {
        let disks = self.disks.clone();
        disks.iter().enumerate().try_for_each(|(number, disk)| self.begin_copy(number, disk))
    }

    fn begin_copy(&mut self, number: usize, disk: &AdoptedDisk) -> anyhow::Result<()> {
        // Names of nodes have 31 bytes at most, those of disks more.
        let (job, target) = (format!("tidelock-adopt-{number}"), format!("tidelock-disk-{number}"));
        let what = format!("{}.{}", disk.member, disk.disk);
        let copy = Copy { what, job, target, source: None };
        let nodes = qmp::nodes(&mut self.qmp)?;
        let source = source_of(&nodes, &disk.member, &disk.disk, &self.options.disks);
        if let Some(under_way) = find_job(&mut self.qmp, &copy.job)? {
            if under_way.status != "concluded" {
                let speed = json!({ "device": copy.job, "speed": self.speed() });
                self.qmp.ask("block-job-set-speed", speed)?;
                let source = source.ok().map(|node| node.name.clone());
                self.copies.push(Copy { source, ..copy });
                return Ok(());
            }
            self.qmp.ask("job-dismiss", json!({ "id": copy.job }))?;
        }
        if nodes.iter().any(|node| node.name == copy.target) && !self.remove_unused(&copy.target)? {
            return Ok(());
        }
        let source = source?;
        if source.size_bytes != disk.size_bytes {
            bail!(
                "{}: the guest's disk has {} bytes, the one here {}: stop the daemon, remove it, and begin with --prepare",
                copy.what,
                source.size_bytes,
                disk.size_bytes
            );
        }
        let node = json!({
            "driver": "nbd", "node-name": copy.target, "export": disk.disk, "reconnect-delay": RECONNECT_S,
            "server": { "type": "unix", "path": disk.socket }, "discard": "unmap", "cache": { "direct": true },
        });
        self.qmp.ask("blockdev-add", node)?;
        let job = json!({
            "job-id": copy.job, "device": source.name, "target": copy.target, "sync": "full",
            "copy-mode": "background", "auto-dismiss": false,
            "speed": self.speed(),
        });
        let begun = self.qmp.ask("blockdev-mirror", job);
        if begun.is_err() {
            self.remove_unused(&copy.target)?;
        }
        begun?;
        self.copies.push(Copy { source: Some(source.name.clone()), ..copy });
        Ok(())
    }

    /// Of each copy, in bytes per second; 0: as fast as it goes.
    fn speed(&self) -> u64 {
        self.options.rate.map_or(0, |rate| rate.bytes_per_s)
    }

    /// How they stand. One that has ended is an error.
    pub(super) fn look(&mut self) -> anyhow::Result<MirrorProgress> {
        let jobs = qmp::jobs(&mut self.qmp)?;
        let mut seen = MirrorProgress { is_ready: true, done_bytes: 0, total_bytes: 0 };
        for copy in &self.copies {
            let Some(job) = jobs.iter().find(|job| job.id == copy.job) else {
                bail!("{}: somebody has ended its copy", copy.what);
            };
            if job.status == "concluded" {
                bail!("{}: its copy has ended: {}", copy.what, reason(job));
            }
            seen.is_ready &= job.status == "ready";
            seen.done_bytes += job.done_bytes;
            seen.total_bytes += job.total_bytes;
        }
        Ok(seen)
    }

    /// The guest uses the copies from now on. What has not come to pass can be cancelled.
    pub(super) fn move_guest(&mut self) -> anyhow::Result<()> {
        for copy in &self.copies {
            self.qmp.ask("job-complete", json!({ "id": copy.job }))?;
        }
        while let Some(copy) = self.copies.last() {
            let job = wait_concluded(&mut self.qmp, &copy.job)?;
            let copy = self.copies.pop().expect("just seen");
            self.qmp.ask("job-dismiss", json!({ "id": copy.job }))?;
            if let Some(error) = job.error {
                bail!("{}: the guest was not moved: {error}", copy.what);
            }
            // What can be removed is nobody's disk.
            if self.remove_unused(&copy.target)? {
                bail!(
                    "{}: the guest was not moved: its copy was ended by somebody else",
                    copy.what
                );
            }
            if let Some(source) = copy.source {
                // It may be in use: then it goes with QEMU.
                self.remove_unused(&source)?;
            }
        }
        Ok(())
    }

    /// Ends the copies. The guest goes on where it was, also if it waits for a daemon that is away.
    pub(super) fn cancel(&mut self) -> Result<(), QmpError> {
        for copy in &self.copies {
            if find_job(&mut self.qmp, &copy.job)?.is_some_and(|job| job.status != "concluded") {
                // By force: requests that wait for the copy are not waited for.
                self.qmp.ask("job-cancel", json!({ "id": copy.job }))?;
            }
        }
        for copy in std::mem::take(&mut self.copies) {
            if find_job(&mut self.qmp, &copy.job)?.is_some() {
                wait_concluded(&mut self.qmp, &copy.job)?;
                self.qmp.ask("job-dismiss", json!({ "id": copy.job }))?;
            }
            self.remove_unused(&copy.target)?;
        }
        Ok(())
    }

    /// Removes a node that nothing uses. Returns whether it is gone.
    fn remove_unused(&mut self, node: &str) -> Result<bool, QmpError> {
        match self.qmp.ask("blockdev-del", json!({ "node-name": node })) {
            Ok(_) => Ok(true),
            Err(QmpError::Refused { .. }) => Ok(false),
            Err(error) => Err(error),
        }
    }
}

fn wait_concluded(qmp: &mut Qmp, id: &str) -> Result<Job, QmpError> {
    let since = Instant::now();
    loop {
        match find_job(qmp, id)? {
            Some(job) if job.status == "concluded" => return Ok(job),
            Some(_) if since.elapsed() < ENDS_WITHIN => sleep(LOOK_EVERY),
            _ => {
                let reason = format!("{id} does not end");
                return Err(QmpError::Refused { command: "the end of a copy", reason });
            }
        }
    }
}

fn find_job(qmp: &mut Qmp, id: &str) -> Result<Option<Job>, QmpError> {
    Ok(qmp::jobs(qmp)?.into_iter().find(|job| job.id == id))
}

fn reason(job: &Job) -> &str {
    job.error.as_deref().unwrap_or("it was ended by somebody else")
}
