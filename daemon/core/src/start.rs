//! The start of a member: what this run goes by of what the runs before have left, and the parts that are made of it.
//!
//! What is on record decides which run this one follows, whether the activity log and a backlog on disk say anything about
//! the disks, which times are free, whether guests are served before the backup is reached, and what the backup is told.
//! The drivers open disks and sockets before, and run the parts afterwards. Nothing is written but the state directory and
//! the backlog.
//!
//! Invariant (rule 12): what shortens a comparison is of the run on record, and the backup is told which run that is.

use crate::activity::place::LogPlace;
use crate::activity::{Found, Geometry, Identity, LastEnd, Unusable};
use crate::backlog::{self, BacklogError, Expected, Left, Redo, WhyNot};
use crate::copy_job::Bounds;
use crate::heartbeat::Pulse;
use crate::link::GateControl;
use crate::link::member::{Member as LinkMember, MemberParts};
use crate::link::port::OwnerPort;
use crate::link::queue::{OnDisk, Spilled};
use crate::owner::spilling::{DiskBacklog, Ends, Opening};
use crate::owner::{self, LeftOnDisk, OwnerParts, OwnerView, PublishPending, Several, ToOwner};
use crate::sequencer::Settings;
use crate::state::{MemberState, Opened, StateError, StateFile};
use crate::stats::LinkStats;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;
use thiserror::Error;
use tidelock_buffers::BufPool;
use tidelock_protocol::ids::{Channel, Epoch, Incarnation, RunId, WriterId};
use tidelock_protocol::lease::HoldReason;
use tidelock_protocol::machine::Machine;
use tidelock_protocol::message::{
    Attach, CleanEnd, DiskSpec, Form, LastRun, LogAge, Mode, Policy, Role, Tagging, Writing,
};
use tidelock_storage::Storage;
use tidelock_storage::unsynced::UnsyncedDir;

/// A local write that was begun ends within this, or hangs; and the times of files that a power loss has left may be apart
/// by what their file systems write back in.
const LAST_WRITE_MAX_S: i64 = 60;

/// Error of a member's start.
#[derive(Debug, Error)]
pub enum StartError {
    /// Its state.
    #[error(transparent)]
    State(#[from] StateError),
    /// Its activity log.
    #[error(
        "cannot keep the activity log in {path}: {source}; make room or mend the disk, or set \
         `enabled = false` in [group.activity_log] (then all is compared after a crash)"
    )]
    Log {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// The directory of its backlog on disk, or its files.
    #[error(
        "{0}; make room or mend the disk, choose another `directory` in [group.backlog_on_disk], or leave the table out \
         (then the backlog is in memory only)"
    )]
    Backlog(#[from] BacklogError),
}

/// A group, by its configuration and its records on this host.
#[derive(Clone, Debug)]
pub struct GroupStart {
    /// Its name.
    pub name: String,
    /// All its writers, by index.
    pub writers: Vec<String>,
    /// Its mode.
    pub mode: Mode,
    /// The lease that is asked for.
    pub lease_ms: u64,
    /// The time that the backup waits after the last renewal.
    pub grace_ms: u64,
    /// The form of dependencies.
    pub form: Form,
    /// Members that all hosts agree on, if the group has several members, or ever had.
    pub peers: Option<Vec<String>>,
    /// The interval at which a writer of several says that it has nothing to write.
    pub idle_interval: Duration,
    /// The most that the wall clock may jump.
    pub max_clock_lead: Duration,
    /// Guests are served also if the backup is not reached.
    pub serves_unreached: bool,
    /// Its disks are elsewhere still.
    pub awaits_adoption: bool,
    /// A run has handed it to the backup site.
    pub switched_over: bool,
    /// The text of [`fence_of`].
    pub fenced: Option<String>,
    /// The policy without the backup, as the backup hears it first.
    pub policy: Policy,
}

/// A member of it.
pub struct MemberStart<S> {
    /// Its name.
    pub name: String,
    /// Its number on the link.
    pub channel: Channel,
    /// The machine to boot after a disaster.
    pub machine: Option<Machine>,
    /// Its state.
    pub state: StateFile<S>,
    /// Its gate.
    pub gate: Arc<dyn GateControl>,
    /// The link's end of its owner loop. Without one nobody hears what is sent there.
    pub port: Arc<OwnerPort<ToOwner>>,
    /// The wall clock.
    pub wall_ms: u64,
}

/// The parts of a writer besides those of a member.
pub struct WriterStart<S, F> {
    /// Its index.
    pub writer: WriterId,
    /// Its disks, by id.
    pub disks: Vec<(DiskSpec, F)>,
    /// Disks that it has no more.
    pub removed_disks: Vec<DiskSpec>,
    /// The identity of each disk as it was opened.
    pub marks: Vec<String>,
    /// The last writes.
    pub written: Written,
    /// Its activity log.
    pub log: LogStart<S>,
    /// Its backlog on disk, if it has one.
    pub backlog: Option<BacklogStart>,
    /// Bytes that the writer may be ahead of the backup.
    pub backlog_limit_bytes: u64,
    /// The alignment of extents that are ordered.
    pub lock_align_bytes: u64,
    /// Bounds of copies.
    pub copy_bounds: Bounds,
    /// Memory for data of disks.
    pub pool: BufPool,
    /// The writer's entry in P.
    pub pending: Arc<dyn PublishPending>,
}

/// The times of the last writes, in seconds since the Unix epoch.
#[derive(Clone, Debug, Default)]
pub struct Written {
    /// The last write to the activity log or to a segment of a backlog on disk, which precede writes to disks.
    pub evidence_s: Option<i64>,
    /// The last write to each image, with its path.
    pub images: Vec<(PathBuf, i64)>,
}

/// An activity log that is to be opened.
pub struct LogStart<S> {
    /// Its place.
    pub place: LogPlace<S>,
    /// The geometry of a new one; `None`: none is kept.
    pub geometry: Option<Geometry>,
    /// The log that was found.
    pub found: Result<Found, Unusable>,
}

/// A backlog on disk that is to be opened.
pub struct BacklogStart {
    /// Its directory.
    pub files: Arc<dyn UnsyncedDir>,
    /// At what size segments are closed.
    pub segment_bytes: u64,
    /// The most in memory.
    pub memory_limit_bytes: u64,
    /// At the limit guests go on.
    pub stands_at_limit: bool,
    /// The id of this boot of the host.
    pub boot: [u8; 16],
    /// Does again on the local disks what may not have ended.
    pub redo: Box<dyn FnOnce(Redo) -> Result<u64, String> + Send>,
}

/// The parts of a writer.
pub struct StartedWriter<S, F> {
    /// The parts of its owner loop.
    pub owner: OwnerParts<F>,
    /// Its end of the link.
    pub link: LinkMember<ToOwner>,
    /// Its state.
    pub state: MemberState<S>,
    /// Counters of the link.
    pub link_stats: Arc<LinkStats>,
    /// State that the last run has left.
    pub opened: Opened,
    /// The disks are not those of the run on record.
    pub changed: Option<String>,
    /// The reason why the backlog of that run is given up.
    pub not_gone_on: Option<WhyNot>,
}

/// The parts of a member without disks.
pub struct StartedFollower<S> {
    /// Its end of the link.
    pub link: LinkMember<ToOwner>,
    /// Its state.
    pub state: MemberState<S>,
    /// Counters of the link.
    pub link_stats: Arc<LinkStats>,
}

/// The reason why the group is fenced, if the backup has told any of its members here. A fence holds for all of them
/// until an operator says otherwise: the backup's data may be older by now than what it said.
pub fn fence_of<S: Storage>(
    group: &str,
    members: impl IntoIterator<Item = StateFile<S>>,
) -> Result<Option<String>, StateError> {
    for member in members {
        if let Some(fence) = member.fence()? {
            tracing::error!(
                group, epoch = %fence.epoch, reason = fence.reason,
                "the group stays fenced: the backup had said so before this start"
            );
            return Ok(Some(format!(
                "{} (The backup said so before this start, and is not asked again. Only if an operator knows that nobody \
                 else serves the group: stop tidelockd, `tidelock unfence {group}`, start it.)",
                fence.reason
            )));
        }
    }
    Ok(None)
}

/// The identity of a log: whose disks it is of.
#[must_use]
pub fn identity<F>(
    group: &GroupStart,
    member: &str,
    disks: &[(DiskSpec, F)],
    removed: &[DiskSpec],
) -> Identity {
    let all = with_removed(disks, removed).into_iter();
    Identity {
        group: group.name.clone(),
        member: member.to_owned(),
        disks: all.map(|disk| (disk.id, disk.name, disk.size_bytes)).collect(),
    }
}

/// A member without disks: its host hears of C for it, and gets a lease.
pub fn follower<S: Storage + Send + 'static>(
    group: &GroupStart,
    member: MemberStart<S>,
) -> Result<StartedFollower<S>, StartError> {
    if group.switched_over {
        member.gate.fence();
    }
    let (state, opened) = member.state.clone().open(member.wall_ms * 1000)?;
    // Its rules may have been removed since: the backup hears that they are back.
    let says_unreached = opened.serves_unreached_kept.then_some(false);
    let end = LinkEnd { says_unreached, role: Role::Follower, log: LogAge::default() };
    let (link, link_stats) = link_member(group, member, &opened, state.clone(), end, None, None);
    Ok(StartedFollower { link, state, link_stats })
}

/// A member with disks.
pub fn writer<S: Storage + Send + 'static, F>(
    group: &GroupStart,
    member: MemberStart<S>,
    with: WriterStart<S, F>,
) -> Result<StartedWriter<S, F>, StartError> {
    let WriterStart { writer, disks, removed_disks, marks, written, log, backlog, .. } = with;
    let (name, port, gate) = (member.name.clone(), member.port.clone(), member.gate.clone());
    if group.switched_over {
        gate.fence();
    }
    let identity = identity(group, &name, &disks, &removed_disks);
    let unclean = member.state.unclean()?;
    let (state, opened) = member.state.clone().open(member.wall_ms * 1000)?;
    state.found_disks(marks.iter().map(|mark| lasting(mark)).collect());
    let changed = changed_since(&opened, &marks, &written);
    let (mut left, mut not_gone_on) = (None, None);
    // The next records depend on all that the guest has heard.
    let may_go_on = !group.switched_over && group.fenced.is_none() && gate.awaits_floor().is_none();
    if let (Some(backlog), Some((run, epoch)), None) = (&backlog, unclean, &changed)
        && may_go_on
    {
        match backlog.find(&identity, run, epoch) {
            Ok(found) => left = Some(found),
            Err(why) => not_gone_on = Some(why),
        }
    }
    if let Some(why) = &changed {
        tracing::warn!(
            member = name,
            why,
            "all of the disks are compared, and the replica becomes what they are now"
        );
        state.forget_run()?;
    }
    let LogStart { place, geometry, found } = log;
    let mut activity = place
        .open(found, geometry, &identity, opened.run.number, last_end(&opened, changed.is_some()))
        .map_err(|source| StartError::Log { path: place.path(), source })?;
    state.found_log_of(activity.confirmed());
    let age = activity.is_believed().then(|| activity.age());
    let last_run = last_run(&opened, changed.is_some(), age);
    if let Some(why) = changed.clone() {
        activity.must_not_be_believed(why);
    }
    let log = activity.age();
    let limit_bytes = with.backlog_limit_bytes;
    let (backlog, on_disk, goes_on, left) = match backlog {
        None => (None, None, None, None),
        Some(backlog) => backlog.open(&identity, limit_bytes, &opened, left)?,
    };
    if goes_on.is_some() {
        // A packet that was taken up before this has no stamp: the gate is shut until the backup has all of it.
        gate.hold(HoldReason::LeftBacklog, true);
    }
    let role = Role::Writer(Writing {
        writer,
        disks: with_removed(&disks, &removed_disks),
        incarnation: opened.run.number,
        nonce: opened.run.nonce,
        before: opened.before.filter(|_| changed.is_none()),
        marks: match &opened.clean {
            // The disks were written to since; the activity log has the extents.
            Some(clean) if clean.served => clean.marks.clone(),
            _ => marks,
        },
        last_run,
        mode: group.mode,
    });
    let serves = group.serves_unreached;
    let says_unreached = (serves || opened.serves_unreached_kept).then_some(serves);
    let end = LinkEnd { says_unreached, role, log };
    let (link, link_stats) = link_member(group, member, &opened, state.clone(), end, on_disk, left);
    let view = Arc::<OwnerView>::default();
    view.set_hlc_ceiling_ms(opened.hlc_ceiling_ms);
    let owner = OwnerParts {
        member: name,
        settings: Settings {
            writer,
            mode: group.mode,
            backlog_limit_bytes: limit_bytes,
            lock_align_bytes: with.lock_align_bytes,
        },
        disks,
        port,
        pool: with.pool,
        pending: with.pending,
        gate,
        stats: Arc::default(),
        view,
        pulse: Arc::<Pulse>::default(),
        copy_bounds: with.copy_bounds,
        switched_over: group.switched_over,
        serves_unreached_after: group.serves_unreached_after(),
        several: group
            .peers
            .is_some()
            .then_some(Several { form: group.form, idle_interval: group.idle_interval }),
        hlc_floor: opened.hlc_floor,
        max_clock_lead: group.max_clock_lead,
        activity,
        has_log_file: geometry.is_some(),
        backlog,
        left: goes_on,
    };
    Ok(StartedWriter { owner, link, state, link_stats, opened, changed, not_gone_on })
}

/// Parts of a member's end of the link.
struct LinkEnd {
    says_unreached: Option<bool>,
    role: Role,
    log: LogAge,
}

fn link_member<S: Storage + Send + 'static>(
    group: &GroupStart,
    member: MemberStart<S>,
    opened: &Opened,
    state: MemberState<S>,
    end: LinkEnd,
    on_disk: Option<OnDisk>,
    left: Option<Spilled>,
) -> (LinkMember<ToOwner>, Arc<LinkStats>) {
    let stats = Arc::<LinkStats>::default();
    let peers = group.peers.clone();
    let mut link = LinkMember::new(MemberParts {
        policy: group.policy,
        says_unreached: end.says_unreached,
        attach: Attach {
            group: group.name.clone(),
            group_id: opened.group_id,
            member: member.name,
            writers: group.writers.clone(),
            epoch: opened.epoch,
            lease_ms: group.lease_ms,
            grace_ms: group.grace_ms,
            machine: member.machine,
            tagging: peers.map(|peers| Tagging { form: group.form, peers }),
            role: end.role,
        },
        log: end.log,
        channel: member.channel,
        port: member.port,
        to_owner: ToOwner::Link,
        gate: member.gate,
        gives_up: group.switched_over,
        fenced: group.fenced.clone(),
        keeper: Box::new(state),
        stats: stats.clone(),
        on_disk,
        left,
    });
    if group.awaits_adoption {
        link.await_adoption();
    }
    (link, stats)
}

impl GroupStart {
    /// After how long guests are served without the backup, if they are.
    fn serves_unreached_after(&self) -> Option<Duration> {
        match (self.serves_unreached, self.awaits_adoption) {
            _ if self.fenced.is_some() => None,
            // Nobody waits for the backup here: clients of the guest are answered elsewhere at this moment.
            (_, true) => Some(Duration::ZERO),
            (true, false) => Some(owner::PATIENCE),
            (false, false) => None,
        }
    }
}

/// The owner loop's end of a backlog on disk, the link's end, and what is left there for each.
type BacklogEnds = (Option<DiskBacklog>, Option<OnDisk>, Option<LeftOnDisk>, Option<Spilled>);

impl BacklogStart {
    /// Backlog of the last run, if the files on this host let this process go on with it. None of its records is written
    /// to the local disks before the backup confirms that no other host has run the member since.
    fn find(&self, identity: &Identity, run: RunId, epoch: Epoch) -> Result<Left, WhyNot> {
        let identity = key_of(identity, run);
        let expected = Expected { incarnation: run.number, epoch, boot: self.boot, identity };
        let directory = self.files.path().display();
        let found = backlog::find(&self.files, &expected);
        match &found {
            Ok(left) => tracing::info!(
                %directory,
                first = %left.first(),
                last = %left.last(),
                "the daemon had not stopped cleanly: the backlog on disk is gone on with if the backup confirms it"
            ),
            Err(WhyNot::Nothing) => {}
            Err(why) => {
                tracing::warn!(%directory, %why, "the backlog on disk is not gone on with: the sites are compared");
            }
        }
        found
    }

    fn open(
        self,
        identity: &Identity,
        limit_bytes: u64,
        opened: &Opened,
        left: Option<Left>,
    ) -> Result<BacklogEnds, BacklogError> {
        let again = left.as_ref().map(Left::again);
        let opening = Opening {
            files: self.files,
            segment_bytes: self.segment_bytes,
            limit_bytes,
            memory_limit_bytes: self.memory_limit_bytes,
            stands_at_limit: self.stands_at_limit,
            epoch: opened.epoch,
            incarnation: opened.run.number,
            boot: self.boot,
            identity: key_of(identity, opened.run),
        };
        let Ends { owners, links, goes_on, left } = opening.open(left)?;
        let redo = self.redo;
        let goes_on = goes_on
            .zip(again)
            .map(|(goes_on, again)| LeftOnDisk { goes_on, redo: Box::new(move || redo(again)) });
        Ok((Some(owners), Some(links), goes_on, left))
    }
}

/// The key of the checks in the segments of a run. It is derived from the run's nonce, which only the state file holds and which
/// the backup confirms, so whatever somebody else has put into the directory is rejected.
fn key_of(identity: &Identity, run: RunId) -> [u8; 32] {
    let key = blake3::derive_key("tidelock backlog on disk, key of a run", &run.nonce.to_bytes());
    let mut hasher = blake3::Hasher::new_keyed(&key);
    let mut add = |bytes: &[u8]| {
        hasher.update(&(bytes.len() as u64).to_le_bytes()).update(bytes);
    };
    add(identity.group.as_bytes());
    add(identity.member.as_bytes());
    for (id, name, size_bytes) in &identity.disks {
        add(&id.0.to_le_bytes());
        add(name.as_bytes());
        add(&size_bytes.to_le_bytes());
    }
    *hasher.finalize().as_bytes()
}

/// All disks by number, with those that the group has no more.
fn with_removed<F>(disks: &[(DiskSpec, F)], removed: &[DiskSpec]) -> Vec<DiskSpec> {
    let mut all: Vec<_> = disks.iter().map(|(spec, _)| spec).chain(removed).cloned().collect();
    all.sort_by_key(|disk| disk.id);
    all
}

/// The last run's end, for opening the activity log.
fn last_end(opened: &Opened, has_changed: bool) -> LastEnd {
    match (&opened.clean, opened.before) {
        _ if has_changed => LastEnd::UNKNOWN,
        (Some(clean), Some(before)) if !clean.served => {
            LastEnd::Clean { incarnation: before.number, epoch: opened.epoch, seq: clean.seq }
        }
        _ => {
            let mut runs = [Incarnation(0); 2];
            runs.iter_mut().zip(&opened.log_runs).for_each(|(run, of)| *run = *of);
            LastEnd::Unclean { runs }
        }
    }
}

/// The last run's end, for the attachment to the backup.
fn last_run(opened: &Opened, has_changed: bool, log: Option<LogAge>) -> LastRun {
    match (&opened.clean, log) {
        _ if has_changed => LastRun::Unknown,
        (Some(clean), _) => LastRun::Clean { seq: clean.seq, served: clean.served },
        (None, Some(log)) => LastRun::Unclean { log },
        (None, None) => LastRun::Unknown,
    }
}

/// Difference between the disks and those of the run on record, as far as this host can tell by itself, as text for people.
/// After a clean end the whole marks are compared. After a kill, or if guests were served since the clean end, only the lasting
/// parts are, and each image's times with those of the evidence.
fn changed_since(opened: &Opened, marks: &[String], written: &Written) -> Option<String> {
    match opened.clean.as_ref().filter(|clean| !clean.served) {
        Some(clean) => CleanEnd::difference(&clean.marks, marks),
        None => {
            let lasting: Vec<_> = marks.iter().map(|mark| lasting(mark)).collect();
            CleanEnd::difference(&opened.disks, &lasting).or_else(|| written.since())
        }
    }
}

/// The part of a disk's mark that stays the same while the disk is written to: its name and its kind, the inode of an image
/// and the identity of a device.
fn lasting(mark: &str) -> String {
    let words = mark.split(' ').take(3);
    words.collect::<Vec<_>>().join(" ")
}

impl Written {
    /// An image that was written to, or whose times were set, long after the daemon's last write: it was restored or changed
    /// in place. Of a device nobody knows.
    pub fn since(&self) -> Option<String> {
        let last_s = self.evidence_s?;
        let later = self.images.iter().map(|(path, written_s)| (path, written_s - last_s));
        later.into_iter().find(|(_, later_s)| *later_s > LAST_WRITE_MAX_S).map(|(path, later_s)| {
            format!(
                "{} was written to {later_s} s after the daemon's last write: it was restored or changed meanwhile",
                path.display()
            )
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::state::CleanMark;
    use tidelock_protocol::hlc::Hlc;
    use tidelock_protocol::ids::{DiskId, Nonce, Seq};

    #[test]
    fn the_lasting_part_of_a_mark() {
        let image = "root image inode=7 bytes=4096 mtime=1.000000001 ctime=1.000000001";
        assert_eq!(lasting(image), "root image inode=7");
        let device =
            "root device id=naa.5000 8:16 bytes=4096 diskseq=3 written=1/2 discarded=0/0 boot=b";
        assert_eq!(lasting(device), "root device id=naa.5000");
    }

    fn opened(clean: Option<bool>) -> Opened {
        let run = |number| RunId { number: Incarnation(number), ..RunId::default() };
        let clean = clean.map(|served| CleanMark {
            seq: Seq(5),
            hlc: Hlc(5),
            marks: vec!["root image inode=7 bytes=4096 mtime=1.0".into()],
            served,
        });
        Opened {
            group_id: None,
            run: run(2),
            before: Some(run(1)),
            log_runs: Vec::new(),
            epoch: Epoch(1),
            disks: vec!["root image inode=7".into()],
            clean,
            hlc_floor: Hlc(0),
            hlc_ceiling_ms: 0,
            fenced: false,
            serves_unreached_kept: false,
        }
    }

    #[test]
    fn after_a_clean_end_a_disk_is_as_it_was_and_after_a_kill_the_same_one() {
        let changed = |clean, mark: &str, later_s| {
            let images = vec![("root.img".into(), 1000 + later_s)];
            let written = Written { evidence_s: Some(1000), images };
            changed_since(&opened(clean), &[mark.to_owned()], &written).is_some()
        };
        let (same, written) =
            ("root image inode=7 bytes=4096 mtime=1.0", "root image inode=7 bytes=4096 mtime=2.0");
        let other = "root image inode=8 bytes=4096 mtime=1.0";
        let (ended, killed, served) = (Some(false), None, Some(true));
        assert!(!changed(ended, same, 0) && changed(ended, written, 0) && changed(ended, other, 0));
        for not_clean in [killed, served] {
            assert!(!changed(not_clean, same, 0) && !changed(not_clean, written, 0));
            assert!(changed(not_clean, other, 0));
            assert!(!changed(not_clean, same, LAST_WRITE_MAX_S));
            assert!(changed(not_clean, same, LAST_WRITE_MAX_S + 1), "long after the daemon's own");
        }
        assert!(!changed(ended, same, LAST_WRITE_MAX_S + 1), "the mark has the time");
    }

    /// The log names where the sites may differ; after a clean end that is nowhere.
    #[test]
    fn the_activity_log_is_of_a_clean_end_only_if_no_guest_was_served_since() {
        let end = |clean, has_changed| last_end(&opened(clean), has_changed);
        let (incarnation, epoch, seq) = (Incarnation(1), Epoch(1), Seq(5));
        assert_eq!(end(Some(false), false), LastEnd::Clean { incarnation, epoch, seq });
        for clean in [None, Some(true)] {
            assert!(matches!(end(clean, false), LastEnd::Unclean { .. }));
        }
        for clean in [None, Some(true), Some(false)] {
            assert_eq!(end(clean, true), LastEnd::UNKNOWN);
        }
    }

    /// Segments of another run, group, member or disk are not this one's.
    #[test]
    fn a_backlog_on_disk_is_checked_with_a_key_of_the_run_and_of_all_that_it_is_for() {
        let identity = |group: &str, member: &str, disk: &str, size_bytes| Identity {
            group: group.into(),
            member: member.into(),
            disks: vec![(DiskId(0), disk.into(), size_bytes)],
        };
        let run = |nonce| RunId { number: Incarnation(1), nonce: Nonce(nonce, 2) };
        let key = key_of(&identity("shop", "web", "root", 4096), run(1));
        assert_eq!(key, key_of(&identity("shop", "web", "root", 4096), run(1)));
        for (other, nonce) in [
            (identity("shop", "web", "root", 4096), 2),
            (identity("shopw", "eb", "root", 4096), 1),
            (identity("shop", "db", "root", 4096), 1),
            (identity("shop", "web", "data", 4096), 1),
            (identity("shop", "web", "root", 8192), 1),
        ] {
            assert_ne!(key, key_of(&other, run(nonce)), "{other:?}");
        }
    }

    #[test]
    fn a_fenced_group_serves_nobody_before_the_backup_is_reached() {
        let after = |serves_unreached, awaits_adoption, is_fenced: bool| {
            let group = GroupStart {
                name: "shop".into(),
                writers: vec!["web".into()],
                mode: Mode::Pipelined,
                lease_ms: 5_000,
                grace_ms: 15_000,
                form: Form::Vector,
                peers: None,
                idle_interval: Duration::from_secs(1),
                max_clock_lead: Duration::from_secs(1),
                serves_unreached,
                awaits_adoption,
                switched_over: false,
                fenced: is_fenced.then(|| "the epoch has ended".into()),
                policy: Policy::holding(Mode::Pipelined),
            };
            group.serves_unreached_after()
        };
        assert_eq!(after(false, false, false), None);
        assert_eq!(after(true, false, false), Some(owner::PATIENCE));
        assert_eq!(after(true, true, false), Some(Duration::ZERO));
        for (serves_unreached, awaits_adoption) in [(false, false), (true, false), (true, true)] {
            assert_eq!(after(serves_unreached, awaits_adoption, true), None);
        }
    }
}
