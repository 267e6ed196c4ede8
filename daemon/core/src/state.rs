//! What a member's next run must know of this one: a small file per member in the state directory.
//!
//! The file is replaced as a whole ([`tidelock_storage::replace`]), so a crash leaves the old one or the new one. A start changes nothing in it that says how the run before
//! ended: the new run is put on record when the backup has attached it ([`EpochKeeper::begin`]), and the backup goes by the run before until it is told
//! of that. So a start that is cut short costs nothing, and one that the backup did not confirm is no evidence for the next one.

use crate::ceiling;
use crate::link::port::EpochKeeper;
use crate::owner::OwnerView;
use crate::stats::OwnerStats;
use crate::verified::Verified;
use serde::{Deserialize, Serialize};
use std::io;
use std::path::PathBuf;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use tidelock_planted::{Bug, is};
use tidelock_protocol::hlc::Hlc;
use tidelock_protocol::ids::{Epoch, GroupId, Incarnation, Nonce, RunId, Seq};
use tidelock_protocol::message::Basis;
use tidelock_storage::json::{self, FileError};
use tidelock_storage::{Storage, create_dirs, join};

const FORMAT: u32 = 1;
/// Why the state of a member cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum StateError {
    /// The disk or its permissions.
    #[error("cannot keep the state of the member in {path}: {source}")]
    Io {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// It is not ours, or was changed by hand.
    #[error(
        "{path} is not a member's state ({reason}). If it cannot be restored, remove it. The backup refuses the member then, \
         until `tidelock-backup member move` there gives it to this host again, and the sites are compared"
    )]
    Content {
        /// The file.
        path: PathBuf,
        /// Why.
        reason: String,
    },
    /// A newer daemon wrote it.
    #[error("{path} has format {found}, this daemon knows {FORMAT}: start the newer daemon")]
    Format {
        /// The file.
        path: PathBuf,
        /// Its format.
        found: u32,
    },
}

/// The clean end of the run on record.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CleanMark {
    /// Its last seq.
    pub seq: Seq,
    /// The time of that.
    pub hlc: Hlc,
    /// The identity of each disk when it was closed.
    pub marks: Vec<String>,
    /// Guests were served since, before the backup was reached: the disks are not as `marks` says any more, and where
    /// they were written is in the activity log.
    pub served: bool,
}

/// The backup has told this host that its epoch is over.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fence {
    /// The last epoch that is over.
    pub epoch: Epoch,
    /// The backup's own words.
    pub reason: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Content {
    format: u32,
    /// The group's identity, as the backup has told it.
    #[serde(default)]
    group_id: Option<GroupId>,
    epoch: Epoch,
    /// The run in force. `None`: the backup has attached none yet.
    run: Option<RunId>,
    /// The greatest number that a start has used.
    tried: Incarnation,
    /// The run that began the stream, whose backlog on disk this one goes on with.
    stream: Option<RunId>,
    /// The run that the activity log is of, if it is that of an earlier one that the backup has confirmed.
    log_run: Option<Incarnation>,
    /// The lasting part of each disk's mark (the part that writing leaves as it is) when the run began.
    disks: Vec<String>,
    clean: Option<CleanMark>,
    /// See [`ceiling`].
    #[serde(default)]
    hlc_ceiling_ms: u64,
    /// The last verification.
    #[serde(default)]
    verified: Option<Verified>,
    /// Stays until an epoch above it is granted, or an operator takes it away.
    #[serde(default)]
    fenced: Option<Fence>,
    /// The backup has it on record that this host serves before it has reached it, under this epoch.
    #[serde(default)]
    serves_unreached_kept: bool,
}

/// The place of a member's state.
#[derive(Clone, Debug)]
pub struct StateFile<S> {
    storage: S,
    dir: String,
    name: String,
}

/// The state of one member, for the loops that write it.
#[derive(Clone, Debug)]
pub struct MemberState<S>(Arc<Mutex<Inner<S>>>);

#[derive(Debug)]
struct Inner<S> {
    file: StateFile<S>,
    content: Content,
    /// The run that the activity log was found to be of.
    found_log: Option<Incarnation>,
    /// The lasting part of each disk's mark in this run. The next record of a run takes it over.
    disks: Vec<String>,
}

/// What the last run left.
#[derive(Clone, Debug)]
pub struct Opened {
    /// The group's identity; `None`: the backup has told none yet.
    pub group_id: Option<GroupId>,
    /// This run.
    pub run: RunId,
    /// The run in force before it.
    pub before: Option<RunId>,
    /// The runs that an activity log may be of.
    pub log_runs: Vec<Incarnation>,
    /// The epoch that was granted; 0: none yet.
    pub epoch: Epoch,
    /// The lasting part of each disk's mark in the run before.
    pub disks: Vec<String>,
    /// How the run before ended, if it ended cleanly.
    pub clean: Option<CleanMark>,
    /// No time of this run is below.
    pub hlc_floor: Hlc,
    /// Nor does one pass this, as said in [`ceiling`].
    pub hlc_ceiling_ms: u64,
    /// The backup has ended the epoch.
    pub fenced: bool,
    /// The backup knows that this host serves before it has reached it.
    pub serves_unreached_kept: bool,
}

impl<S: Storage> StateFile<S> {
    /// The state of a member, in the state directory of its host.
    pub fn new(state_dir: S, group: &str, member: &str) -> Self {
        Self { storage: state_dir, dir: group.to_owned(), name: format!("{member}.json") }
    }

    /// The path, for people.
    #[must_use]
    pub fn path(&self) -> PathBuf {
        self.storage.display_path(&self.file())
    }

    /// True if a run has left it, readable or not.
    #[must_use]
    pub fn exists(&self) -> bool {
        let opened = self.storage.open(&self.file());
        !opened.is_err_and(|error| error.kind() == io::ErrorKind::NotFound)
    }

    /// The run that began the stream and the epoch, if the run on record has not ended cleanly.
    pub fn unclean(&self) -> Result<Option<(RunId, Epoch)>, StateError> {
        let unclean =
            self.read()?.filter(|content| content.clean.is_none() && content.fenced.is_none());
        Ok(unclean.and_then(|content| Some((content.stream?, content.epoch))))
    }

    /// What the backup has ended for this member, if it is on record.
    pub fn fence(&self) -> Result<Option<Fence>, StateError> {
        Ok(self.read()?.and_then(|content| content.fenced))
    }

    /// Whether the backup has it on record that this member's guest may answer clients from here.
    pub fn may_be_left_open(&self) -> Result<bool, StateError> {
        Ok(self.read()?.is_some_and(|content| content.serves_unreached_kept))
    }

    /// The operator says that the fence does not hold any more. The next run compares the sites and asks the backup before
    /// it serves anybody. Returns the fence that there was.
    pub fn remove_fence(&self) -> Result<Option<Fence>, StateError> {
        let Some(mut content) = self.read()?.filter(|content| content.fenced.is_some()) else {
            return Ok(None);
        };
        let fence = content.fenced.take();
        (content.run, content.clean, content.serves_unreached_kept) = (None, None, false);
        self.write(&content)?;
        Ok(fence)
    }

    /// Opens or creates the file, and draws the new run. What it says of the run before stays.
    pub fn open(self, wall_us: u64) -> Result<(MemberState<S>, Opened), StateError> {
        create_dirs(&self.storage, &self.dir).map_err(|source| self.io(source))?;
        let old = self.read()?;
        let tried = old.as_ref().map_or(0, |c| c.tried.0);
        // Larger than any before, also if the file was lost.
        let number = Incarnation(wall_us.max(tried.saturating_add(1)));
        let floor_ms = old.as_ref().map_or(0, |c| c.hlc_ceiling_ms);
        let content = Content {
            format: FORMAT,
            tried: number,
            hlc_ceiling_ms: ceiling::first(floor_ms, wall_us / 1000),
            ..old.unwrap_or_else(Content::new)
        };
        self.write(&content)?;
        let Content { run, log_run, epoch, clean, hlc_ceiling_ms, fenced, .. } = &content;
        let opened = Opened {
            group_id: content.group_id,
            run: RunId { number, nonce: Nonce(self.storage.fresh_id(), self.storage.fresh_id()) },
            before: *run,
            log_runs: run.iter().map(|run| run.number).chain(*log_run).collect(),
            epoch: *epoch,
            // After a clean end the last time itself is known.
            hlc_floor: match clean {
                _ if is(Bug::HlcGoesBack) => Hlc(0),
                Some(clean) if !clean.served => clean.hlc,
                _ => ceiling::floor_above(floor_ms),
            },
            disks: content.disks.clone(),
            clean: clean.clone(),
            hlc_ceiling_ms: *hlc_ceiling_ms,
            fenced: fenced.is_some(),
            serves_unreached_kept: content.serves_unreached_kept,
        };
        let state = Inner { file: self, content, found_log: None, disks: Vec::new() };
        Ok((MemberState(Arc::new(Mutex::new(state))), opened))
    }

    fn file(&self) -> String {
        join(&self.dir, &self.name)
    }

    fn io(&self, source: io::Error) -> StateError {
        StateError::Io { path: self.path(), source }
    }

    fn error(&self, error: FileError) -> StateError {
        match error {
            FileError::Io { source, .. } => self.io(source),
            FileError::Content { reason, .. } => StateError::Content { path: self.path(), reason },
            FileError::Version { found, .. } => StateError::Format { path: self.path(), found },
        }
    }

    fn read(&self) -> Result<Option<Content>, StateError> {
        let content: Option<Content> =
            json::read(&self.storage, &self.file(), FORMAT).map_err(|error| self.error(error))?;
        Ok(content.map(|mut content| {
            if is(Bug::DifferenceForgotten) {
                content.verified = None;
            }
            content
        }))
    }

    fn write(&self, content: &Content) -> Result<(), StateError> {
        json::write(&self.storage, &self.dir, &self.name, content)
            .map_err(|error| self.error(error))
    }
}

impl<S: Storage> MemberState<S> {
    /// The disks are not those of the run on record: nothing that is told of it says anything about them.
    pub fn forget_run(&self) -> Result<(), StateError> {
        self.change(|content| (content.run, content.log_run, content.clean) = (None, None, None))
    }

    /// Keeps the lasting part of each disk's mark for the next record of a run.
    pub fn found_disks(&self, disks: Vec<String>) {
        self.lock().disks = disks;
    }

    /// The activity log is of this run.
    pub fn found_log_of(&self, run: Option<Incarnation>) {
        self.lock().found_log = run;
    }

    /// The run has ended with everything up to `seq` at the backup, and equal disks.
    pub fn ended_cleanly(&self, seq: Seq, hlc: Hlc, marks: Vec<String>) -> Result<(), StateError> {
        self.change(|content| content.clean = Some(CleanMark { seq, hlc, marks, served: false }))
    }

    /// Moves the ceiling when the greatest time that was given out or heard comes near it. `wall_ms`: the wall
    /// clock as far as it is believed. Returns what is on record.
    pub fn keep_ahead_of(&self, hlc: Hlc, wall_ms: u64) -> Result<u64, StateError> {
        let raised_ms = ceiling::raised(self.lock().content.hlc_ceiling_ms, hlc, wall_ms);
        self.change(|content| content.hlc_ceiling_ms = raised_ms)?;
        Ok(raised_ms)
    }

    /// Raises the ceiling above the times that an owner loop publishes, and tells the loop. True if it waits for that.
    pub fn keep_ceiling(&self, stats: &OwnerStats, view: &OwnerView) -> Result<bool, StateError> {
        let greatest = Hlc(stats.greatest_hlc.load(Ordering::Relaxed));
        let wall_ms = stats.wall_ms.load(Ordering::Relaxed);
        view.set_hlc_ceiling_ms(self.keep_ahead_of(greatest, wall_ms)?);
        Ok(stats.waits_for_ceiling.load(Ordering::Relaxed))
    }

    /// A verification has ended.
    pub fn keep_verified(&self, verified: Verified) -> Result<(), StateError> {
        self.change(|content| content.verified = Some(verified))
    }

    /// The last verification.
    #[must_use]
    pub fn verified(&self) -> Option<Verified> {
        self.lock().content.verified.clone()
    }

    /// Whether clients may be answered before the backup was reached, if that is configured. Either no backup can have
    /// been promoted in the place of this host, because none has granted it an epoch; or the backup knows what this
    /// host does, and whoever recovers the group there is told so.
    #[must_use]
    pub fn may_answer_unreached(&self) -> bool {
        let inner = self.lock();
        let Content { epoch, ref fenced, serves_unreached_kept, .. } = inner.content;
        fenced.is_none() && (epoch == Epoch(0) || serves_unreached_kept)
    }

    /// Whether the backup has it on record that this member's guest may answer clients without it.
    #[must_use]
    pub fn serves_unreached_is_kept(&self) -> bool {
        self.lock().content.serves_unreached_kept
    }

    /// The epoch in force.
    #[must_use]
    pub fn epoch(&self) -> Epoch {
        self.lock().content.epoch
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Inner<S>> {
        self.0.lock().expect("no panic while it is held")
    }

    fn change(&self, change: impl FnOnce(&mut Content)) -> Result<(), StateError> {
        let mut inner = self.lock();
        let mut content = inner.content.clone();
        change(&mut content);
        if content != inner.content {
            if !(is(Bug::EpochNotDurable) && content.epoch > inner.content.epoch) {
                inner.file.write(&content)?;
            }
            inner.content = content;
        }
        Ok(())
    }
}

impl<S: Storage> MemberState<S> {
    fn check_fence(&self, epoch: Epoch) -> io::Result<()> {
        match self.lock().content.fenced.as_ref().filter(|fence| epoch <= fence.epoch) {
            None => Ok(()),
            Some(fence) => Err(io::Error::other(format!(
                "the backup grants epoch {epoch}, and had ended epoch {} before: {}",
                fence.epoch, fence.reason
            ))),
        }
    }
}

impl<S: Storage + Send> EpochKeeper for MemberState<S> {
    fn keep(&mut self, epoch: Epoch, group_id: GroupId) -> io::Result<()> {
        self.check_fence(epoch)?;
        self.change(|content| content.grant(epoch, group_id)).map_err(io::Error::other)
    }

    fn begin(
        &mut self,
        run: RunId,
        epoch: Epoch,
        group_id: GroupId,
        basis: &Basis,
    ) -> io::Result<()> {
        self.check_fence(epoch)?;
        let (found_log, disks) = {
            let inner = self.lock();
            (inner.found_log, inner.disks.clone())
        };
        let change = |content: &mut Content| {
            content.grant(epoch, group_id);
            if content.run == Some(run) {
                return;
            }
            // The log that was found stays the one to go by until this run has written in it.
            content.log_run = found_log.filter(|_| !matches!(basis, Basis::Everything { .. }));
            if *basis != Basis::Continues {
                content.stream = Some(run);
            }
            (content.run, content.clean) = (Some(run), None);
            content.disks.clone_from(&disks);
        };
        self.change(change).map_err(io::Error::other)
    }

    fn greatest(&self) -> Hlc {
        Hlc::new(self.lock().content.hlc_ceiling_ms, 0)
    }

    fn keep_served(&mut self) -> io::Result<()> {
        let served = |content: &mut Content| {
            if let Some(clean) = &mut content.clean {
                clean.served = true;
            }
        };
        self.change(served).map_err(io::Error::other)
    }

    fn keep_fenced(&mut self, reason: &str) -> io::Result<()> {
        let change = |content: &mut Content| {
            content.fenced = Some(Fence { epoch: content.epoch, reason: reason.to_owned() });
        };
        self.change(change).map_err(io::Error::other)
    }

    fn keep_serves_unreached(&mut self, kept: bool) -> io::Result<()> {
        self.change(|content| content.serves_unreached_kept = kept).map_err(io::Error::other)
    }
}

impl Content {
    fn grant(&mut self, epoch: Epoch, group_id: GroupId) {
        self.serves_unreached_kept &= self.epoch == epoch;
        (self.epoch, self.fenced) = (epoch, None);
        self.group_id = Some(group_id);
    }

    fn new() -> Self {
        Self {
            format: FORMAT,
            group_id: None,
            epoch: Epoch(0),
            run: None,
            tried: Incarnation(0),
            stream: None,
            log_run: None,
            disks: Vec::new(),
            clean: None,
            hlc_ceiling_ms: 0,
            verified: None,
            fenced: None,
            serves_unreached_kept: false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tidelock_storage::memory::{Memory, each_power_loss};
    use tidelock_storage::replace;

    const ID: GroupId = GroupId([7; 16]);

    fn file(disk: &Memory) -> StateFile<Memory> {
        StateFile::new(disk.clone(), "group", "member")
    }

    /// A start that the backup does not confirm is no evidence for the next one.
    #[test]
    fn what_is_on_record_of_the_run_before_stays_until_the_backup_has_attached_the_next() {
        let disk = Memory::new();
        let (mut state, first) = file(&disk).open(1000).unwrap();
        assert_eq!((first.run.number, first.before), (Incarnation(1000), None));
        state.begin(first.run, Epoch(4), ID, &Basis::Continues).unwrap();
        state.ended_cleanly(Seq(9), Hlc(5), vec!["a".into()]).unwrap();
        for nth in 1..3 {
            let (_, next) = file(&disk).open(0).unwrap();
            assert_eq!(next.run.number, Incarnation(1000 + nth), "the wall clock went back");
            assert_ne!(next.run.nonce, first.run.nonce);
            assert_eq!((next.before, next.epoch), (Some(first.run), Epoch(4)));
            assert_eq!(next.clean.unwrap().marks, ["a"]);
            assert_eq!(file(&disk).unclean().unwrap(), None);
        }
        let (mut state, second) = file(&disk).open(2000).unwrap();
        state.keep_served().unwrap();
        let (_, third) = file(&disk).open(2000).unwrap();
        assert!(third.clean.unwrap().served, "it is not as the marks say any more");
        state.begin(second.run, Epoch(4), ID, &Basis::Log).unwrap();
        let (_, fourth) = file(&disk).open(2000).unwrap();
        assert_eq!((fourth.before, fourth.clean), (Some(second.run), None));
        assert_eq!(file(&disk).unclean().unwrap(), Some((second.run, Epoch(4))));
    }

    /// A process that goes on with a backlog on disk finds it again when it was killed.
    #[test]
    fn a_stream_keeps_the_run_that_began_it() {
        let disk = Memory::new();
        let everything = Basis::Everything { why: "first".into() };
        let (mut state, first) = file(&disk).open(1000).unwrap();
        state.begin(first.run, Epoch(1), ID, &everything).unwrap();
        let (mut state, second) = file(&disk).open(2000).unwrap();
        state.found_log_of(Some(first.run.number));
        state.begin(second.run, Epoch(1), ID, &Basis::Continues).unwrap();
        assert_eq!(file(&disk).unclean().unwrap(), Some((first.run, Epoch(1))));
        let (mut state, third) = file(&disk).open(3000).unwrap();
        assert_eq!(third.log_runs, [second.run.number, first.run.number]);
        state.begin(third.run, Epoch(1), ID, &everything).unwrap();
        assert_eq!(file(&disk).unclean().unwrap(), Some((third.run, Epoch(1))));
        let (_, fourth) = file(&disk).open(4000).unwrap();
        assert_eq!(
            fourth.log_runs,
            [third.run.number],
            "a log that was not confirmed says nothing"
        );
    }

    #[test]
    fn no_time_of_the_next_run_is_below_one_that_was_given_out() {
        let disk = Memory::new();
        let (state, first) = file(&disk).open(50_000_000).unwrap();
        assert_eq!((first.hlc_floor, first.hlc_ceiling_ms), (Hlc(0), 52_000));
        assert_eq!(state.keep_ahead_of(Hlc::new(51_000, 3), 51_000).unwrap(), 52_000);
        assert_eq!(state.keep_ahead_of(Hlc::new(51_001, 3), 51_001).unwrap(), 53_001);
        // An hour without a write, and then one: it could not follow the wall clock at once.
        let hour_ms = 3_600_000;
        assert_eq!(state.keep_ahead_of(Hlc::new(53_001, 1), hour_ms).unwrap(), hour_ms + 2_000);
        // Another member's clock is ahead.
        let last = Hlc::new(hour_ms + 1_990, 0);
        assert_eq!(state.keep_ahead_of(last, hour_ms).unwrap(), hour_ms + 2_090);
        // Killed, and the wall clock has gone back by years.
        let floor = Hlc::new(hour_ms + 2_190, 0);
        let (state, second) = file(&disk).open(0).unwrap();
        assert_eq!((second.hlc_floor, second.hlc_ceiling_ms), (floor, hour_ms + 2_190));
        state.ended_cleanly(Seq(1), Hlc::new(66_000, 9), Vec::new()).unwrap();
        let (_, third) = file(&disk).open(0).unwrap();
        assert_eq!(third.hlc_floor, Hlc::new(66_000, 9));
        // Guests were served since, with times of their own.
        let (mut state, third) = file(&disk).open(0).unwrap();
        state.keep_served().unwrap();
        let (_, fourth) = file(&disk).open(0).unwrap();
        assert_eq!(fourth.hlc_floor, ceiling::floor_above(third.hlc_ceiling_ms));
        assert!(fourth.hlc_floor > third.hlc_floor);
    }

    /// Nobody has looked since the first of these writes.
    #[test]
    fn a_run_that_is_killed_right_after_an_idle_spell_has_none_above_the_next() {
        let disk = Memory::new();
        let (_, opened) = file(&disk).open(50_000_000).unwrap();
        let mut clock = ceiling::BoundedClock::default();
        clock.set_ceiling(opened.hlc_ceiling_ms);
        clock.observe(opened.hlc_floor);
        let last = (0..70_000).map(|_| clock.tick(3_600_000)).last().unwrap();
        assert!(last > Hlc::new(opened.hlc_ceiling_ms, 0), "it counts on where it may not follow");
        let (_, next) = file(&disk).open(3_600_000_000).unwrap();
        assert!(next.hlc_floor > last);
    }

    /// However often the daemon is killed, no run begins further ahead of the wall clock than the
    /// ceiling is put; and none below a time of the run before.
    #[test]
    fn runs_that_are_killed_do_not_add_up() {
        for (lives_ms, records) in [(150, 0), (150, 7), (600, 7), (5_000, 7)] {
            let disk = Memory::new();
            let (mut wall_ms, mut greatest) = (1_000_000, Hlc(0));
            for run in 0..50 {
                let (state, opened) = file(&disk).open(wall_ms * 1000).unwrap();
                assert!(opened.hlc_floor > greatest || run == 0 || records == 0);
                let ahead_ms = opened.hlc_floor.physical_ms().saturating_sub(wall_ms);
                let ahead_max_ms = ceiling::AHEAD_MS + ceiling::CARRIES_MS;
                assert!(ahead_ms <= ahead_max_ms, "run {run} begins {ahead_ms} ms ahead");
                let mut clock = ceiling::BoundedClock::default();
                clock.set_ceiling(opened.hlc_ceiling_ms);
                clock.observe(opened.hlc_floor);
                for _ in 0..records {
                    wall_ms += lives_ms / 7;
                    greatest = clock.tick(wall_ms);
                    clock.set_ceiling(state.keep_ahead_of(greatest, wall_ms).unwrap());
                }
                wall_ms += if records == 0 { lives_ms } else { lives_ms % 7 };
            }
        }
    }

    #[test]
    fn clients_are_answered_without_the_backup_only_where_it_knows_or_never_was() {
        let disk = Memory::new();
        let open = |wall_us| file(&disk).open(wall_us).unwrap();
        let (mut state, _) = open(1);
        assert!(state.may_answer_unreached(), "no backup has granted anything");
        state.keep(Epoch(1), ID).unwrap();
        assert!(!state.may_answer_unreached());
        state.keep_serves_unreached(true).unwrap();
        let (mut state, opened) = open(2);
        assert!(state.may_answer_unreached() && !opened.fenced);
        state.keep(Epoch(1), ID).unwrap();
        assert!(state.may_answer_unreached());
        state.keep(Epoch(2), ID).unwrap();
        assert!(!state.may_answer_unreached(), "who granted this has not said so");
        state.keep_serves_unreached(true).unwrap();
        state.keep_fenced("it was recovered").unwrap();
        let (mut state, opened) = open(3);
        assert!(!state.may_answer_unreached() && opened.fenced);
        assert!(state.keep(Epoch(2), ID).is_err(), "a backup that does not know of it any more");
        assert!(!state.may_answer_unreached() && open(4).1.fenced);
        state.keep(Epoch(3), ID).unwrap();
        assert!(!open(5).1.fenced, "an epoch above was granted");
    }

    #[test]
    fn a_state_file_says_what_the_member_s_next_run_may_do() {
        let disk = Memory::new();
        assert!(!file(&disk).exists() && !file(&disk).may_be_left_open().unwrap());
        let (mut state, opened) = file(&disk).open(50_000_000).unwrap();
        assert!(file(&disk).exists());
        assert_eq!(state.greatest(), Hlc::new(opened.hlc_ceiling_ms, 0), "no time is above it");
        state.begin(opened.run, Epoch(3), ID, &Basis::Clean).unwrap();
        assert_eq!(state.epoch(), Epoch(3));
        assert!(!state.serves_unreached_is_kept());
        state.keep_serves_unreached(true).unwrap();
        assert!(state.serves_unreached_is_kept() && file(&disk).may_be_left_open().unwrap());
        assert!(file(&disk).open(1).unwrap().1.serves_unreached_kept);
        let verified = Verified {
            begun_unix_ms: 1,
            ended_unix_ms: 2,
            epoch: Epoch(3),
            from_seq: Seq(4),
            to_seq: Seq(5),
            compared_bytes: 6,
            differing: Vec::new(),
            differing_bytes: 0,
            repaired_bytes: 0,
            unreadable_bytes: 0,
        };
        assert_eq!(state.verified(), None);
        state.keep_verified(verified.clone()).unwrap();
        assert_eq!(file(&disk).open(1).unwrap().0.verified(), Some(verified));
        // Other disks than those of the run on record.
        state.ended_cleanly(Seq(9), Hlc(5), vec!["a".into()]).unwrap();
        state.forget_run().unwrap();
        let (state, next) = file(&disk).open(1).unwrap();
        assert!(next.before.is_none() && next.clean.is_none() && next.log_runs.is_empty());
        // Times that an owner loop has given out.
        let (stats, view) = (OwnerStats::default(), OwnerView::default());
        let hour_ms = 3_600_000;
        stats.wall_ms.store(hour_ms, Ordering::Relaxed);
        stats.greatest_hlc.store(Hlc::new(hour_ms, 0).0, Ordering::Relaxed);
        assert!(!state.keep_ceiling(&stats, &view).unwrap());
        let kept_ms = view.hlc_ceiling_ms().unwrap();
        assert!(kept_ms > hour_ms && state.greatest() == Hlc::new(kept_ms, 0));
        stats.waits_for_ceiling.store(true, Ordering::Relaxed);
        assert!(state.keep_ceiling(&stats, &view).unwrap());
    }

    #[test]
    fn a_fence_is_taken_away_by_the_operator_and_leaves_nothing_to_go_on_from() {
        let disk = Memory::new();
        let (mut state, _) = file(&disk).open(1).unwrap();
        state.keep(Epoch(1), ID).unwrap();
        state.keep_serves_unreached(true).unwrap();
        assert_eq!(file(&disk).remove_fence().unwrap(), None, "there is none");
        state.keep_fenced("it was recovered").unwrap();
        let fence = Fence { epoch: Epoch(1), reason: "it was recovered".into() };
        assert_eq!(file(&disk).fence().unwrap(), Some(fence.clone()));
        assert_eq!(file(&disk).remove_fence().unwrap(), Some(fence));
        let (mut state, opened) = file(&disk).open(2).unwrap();
        assert_eq!((opened.group_id, opened.epoch), (Some(ID), Epoch(1)));
        assert!(!opened.fenced && opened.before.is_none() && opened.clean.is_none());
        assert!(!state.may_answer_unreached(), "the backup is asked first");
        state.keep(Epoch(1), ID).unwrap();
    }

    #[test]
    fn damage_is_named_and_not_overwritten() {
        let disk = Memory::new();
        replace(&disk, "group", "member.json", b"{").unwrap();
        let error = file(&disk).open(1).unwrap_err();
        assert!(matches!(error, StateError::Content { .. }), "{error}");
        assert!(error.to_string().contains("group/member.json"), "{error}");
        let left = tidelock_storage::read_all(&disk, "group/member.json").unwrap();
        assert_eq!(left.unwrap(), b"{");
        let newer = r#"{"format":2,"epoch":0,"incarnation":1,"clean":null}"#;
        replace(&disk, "group", "member.json", newer.as_bytes()).unwrap();
        assert!(matches!(file(&disk).open(1), Err(StateError::Format { .. })));
    }

    /// Values that a member's daemon was told to be on record.
    #[derive(Clone, Debug, Default)]
    struct Promised {
        incarnation: Incarnation,
        epoch: Epoch,
        ceiling_ms: u64,
        /// The last call that has returned was that of a clean end.
        clean: bool,
        /// A call may have changed it: a clean end that has not returned, or a start after one.
        clean_is_open: bool,
    }

    /// Three runs, until the power is lost.
    fn live(disk: &Memory, promised: &mut Promised) -> Option<()> {
        for run in 1..4u64 {
            let (mut state, opened) = file(disk).open(run * 50_000_000).ok()?;
            promised.incarnation = opened.run.number;
            promised.ceiling_ms = opened.hlc_ceiling_ms;
            promised.clean_is_open = true;
            state.begin(opened.run, Epoch(run), ID, &Basis::Clean).ok()?;
            promised.epoch = Epoch(run);
            (promised.clean, promised.clean_is_open) = (false, false);
            let wall_ms = run * 50_000 + 9_000;
            promised.ceiling_ms = state.keep_ahead_of(Hlc::new(wall_ms, 0), wall_ms).ok()?;
            if run != 2 {
                promised.clean_is_open = true;
                state.ended_cleanly(Seq(run), Hlc::new(wall_ms, 7), Vec::new()).ok()?;
                (promised.clean, promised.clean_is_open) = (true, false);
            }
        }
        Some(())
    }

    #[test]
    fn the_state_is_what_was_promised_wherever_the_power_is_lost() {
        let lived = |disk: &Memory| {
            let mut promised = Promised::default();
            live(disk, &mut promised);
            promised
        };
        let ways = each_power_loss(lived, |promised, disk| {
            let opened = file(&disk).open(0);
            let (_, opened) = opened.unwrap_or_else(|error| panic!("{promised:?}: {error}"));
            let place = || format!("{promised:?}, {opened:?}");
            assert!(opened.run.number > promised.incarnation, "{}", place());
            assert!(opened.epoch >= promised.epoch, "{}", place());
            let is_clean = opened.clean.is_some();
            assert!(is_clean == promised.clean || promised.clean_is_open, "{}", place());
            let floor = Hlc::new(promised.ceiling_ms, 0);
            let is_above = is_clean || promised.ceiling_ms == 0 || opened.hlc_floor > floor;
            assert!(is_above, "{}", place());
        });
        assert!(ways > 100, "{ways}");
    }
}
