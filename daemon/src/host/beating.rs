//! The watch over all heartbeats, on a thread of its own: it takes no lock and waits for no loop, so that it finds
//! any of them that has stopped, the runtime that answers `tidelock status` included.

use super::{HostError, HostGroup, spawn};
use crate::clock;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use tidelock_daemon_core::heartbeat::{HeartbeatSettings, LOOK_EVERY, Missing, Step, Watched};
use tidelock_daemon_core::stats::OwnerStats;
use tidelock_protocol::ids::MonoNanos;

/// The thread ends when this is dropped.
pub(super) type UntilDropped = mpsc::Sender<()>;

/// One writer under watch.
struct Writer {
    group: String,
    member: String,
    settings: HeartbeatSettings,
    watched: Watched,
    owner: Arc<OwnerStats>,
    disks: Vec<String>,
    /// So many looks in a row a local disk has not answered.
    disk_hangs: u32,
}

/// Starts it.
pub(super) fn start(
    groups: &[HostGroup],
    stopping: Arc<AtomicBool>,
) -> Result<UntilDropped, HostError> {
    let mut watched: Vec<Writer> = groups.iter().flat_map(of_group).collect();
    let (until_dropped, dropped) = mpsc::channel();
    spawn("heartbeat", move || {
        while dropped.recv_timeout(LOOK_EVERY) == Err(RecvTimeoutError::Timeout) {
            let is_stopping = stopping.load(Ordering::SeqCst);
            watched.iter_mut().for_each(|watched| watched.look(is_stopping));
        }
    })?;
    Ok(until_dropped)
}

fn of_group(group: &HostGroup) -> impl Iterator<Item = Writer> {
    let settings = group.config.heartbeat;
    let writers =
        group.members.iter().filter_map(move |m| Some((m, m.writer.as_ref()?, settings?)));
    writers.map(|(member, writer, settings)| {
        let super::Writer { port, link_stats, view, pulse, owner_stats, .. } = writer;
        let (port, link, view) = (port.clone(), link_stats.clone(), view.clone());
        let is_alone = group.config.roster.len() < 2;
        Writer {
            group: group.config.name.to_string(),
            member: member.config.name.to_string(),
            settings,
            watched: Watched::new(settings, is_alone, port, link, view, pulse.clone()),
            owner: owner_stats.clone(),
            disks: member.config.disks.iter().map(|disk| disk.name.to_string()).collect(),
            disk_hangs: 0,
        }
    })
}

impl Writer {
    fn look(&mut self, is_stopping: bool) {
        let now = clock::mono_now();
        // Told before it is logged: a log that hangs must not keep it from those who ask.
        match self.watched.look(&self.watched.sight(now, is_stopping)) {
            Some(Step::Lost(missing)) => self.say_lost(missing, now),
            Some(Step::Back) => tracing::info!(
                group = self.group,
                member = self.member,
                "heartbeats come back again"
            ),
            Some(Step::Ask(_)) | None => {}
        }
        self.look_at_the_disk(now);
    }

    /// No heartbeat needs the local disk, and its guest hangs with it.
    fn look_at_the_disk(&mut self, now: MonoNanos) {
        let hangs = self.owner.disk_wait.longer_than(self.settings.alarm_after, now);
        let before = self.disk_hangs;
        self.disk_hangs = hangs.map_or(0, |_| before.saturating_add(1));
        match hangs {
            // Who was stopped itself has not heard at once of what has ended meanwhile: it is looked at twice.
            Some((waited, disk)) if self.disk_hangs == 2 => tracing::error!(
                group = self.group,
                member = self.member,
                disk = disk.and_then(|nth| self.disks.get(nth)),
                waited_ms = waited.as_millis() as u64,
                "DISK HANGS: a request to the local disk is not answered, and guests wait. What they have written is \
                 at the backup. Look at the disk (`iostat -x`, `dmesg`); all goes on when it answers"
            ),
            None if before >= 2 => tracing::info!(
                group = self.group,
                member = self.member,
                "the local disk answers again"
            ),
            _ => {}
        }
    }

    fn say_lost(&self, missing: Missing, now: MonoNanos) {
        let waited_ms = self.watched.waited_ms(now);
        match missing {
            Missing::Owner => tracing::error!(
                group = self.group,
                member = self.member,
                waited_ms,
                "NO HEARTBEAT: this daemon's loop for the member admits nothing. If the guest's disk hangs, too, look \
                 at the local disk (`dmesg`); then start the daemon again, it compares the sites"
            ),
            Missing::Backup => tracing::error!(
                group = self.group,
                member = self.member,
                waited_ms,
                alarm_after_ms = self.settings.alarm_after.as_millis() as u64,
                "NO HEARTBEAT: the backup acknowledges nothing, and has not said why. Is its server alive and its \
                 disk answering? Do packets get through to it?"
            ),
        }
    }
}
