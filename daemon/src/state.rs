//! What a member's next run must know of this one: a small file per member in the state directory.
//!
//! The file is replaced as a whole ([`durable`]), so a crash leaves the old one or the new one. A clean mark is removed before the first write of a run may
//! be admitted: what the mark says is true as long as it is there.

use crate::ceiling;
use crate::durable;
use crate::link::port::EpochKeeper;
use crate::owner::Resume;
use crate::verified::Verified;
use serde::{Deserialize, Serialize};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use tidelock_protocol::hlc::Hlc;
use tidelock_protocol::ids::{Epoch, GroupId, Incarnation, Seq};
use tidelock_protocol::message::LastRun;

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
        "{path} is not a member's state ({source}). If it cannot be restored, remove it. The backup refuses the member then, \
         until `tidelock-backup member move` there gives it to this host again, and the sites are compared"
    )]
    Content {
        /// The file.
        path: PathBuf,
        /// Why.
        source: serde_json::Error,
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

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct CleanMark {
    seq: Seq,
    hlc: Hlc,
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
    incarnation: Incarnation,
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

/// The state file of one member, for the loops that write it.
#[derive(Clone, Debug)]
pub struct MemberState(Arc<Mutex<Inner>>);

#[derive(Debug)]
struct Inner {
    path: PathBuf,
    content: Content,
}

/// What the last run left.
#[derive(Clone, Debug)]
pub struct Opened {
    /// The group's identity; `None`: the backup has told none yet.
    pub group_id: Option<GroupId>,
    /// This run's number.
    pub incarnation: Incarnation,
    /// That of the run before; 0: none.
    pub last_incarnation: Incarnation,
    /// The epoch that was granted; 0: none yet.
    pub epoch: Epoch,
    /// What to tell the backup.
    pub last_run: LastRun,
    /// Where to go on without asking it.
    pub resume: Option<Resume>,
    /// No time of this run is below.
    pub hlc_floor: Hlc,
    /// Nor does one pass this, as said in [`ceiling`].
    pub hlc_ceiling_ms: u64,
    /// The backup has ended the epoch.
    pub fenced: bool,
    /// The backup knows that this host serves before it has reached it.
    pub serves_unreached_kept: bool,
}

impl MemberState {
    /// The run before and its epoch, if it has not ended cleanly.
    pub fn unclean(path: &Path) -> Result<Option<(Incarnation, Epoch)>, StateError> {
        let unclean =
            read(path)?.filter(|content| content.clean.is_none() && content.fenced.is_none());
        Ok(unclean.map(|content| (content.incarnation, content.epoch)))
    }

    /// What the backup has ended for this member, if it is on record.
    pub fn fence(path: &Path) -> Result<Option<Fence>, StateError> {
        Ok(read(path)?.and_then(|content| content.fenced))
    }

    /// The operator says that the fence does not hold any more. The next run compares the sites and asks the backup before
    /// it serves anybody. Returns the fence that there was.
    pub fn remove_fence(path: &Path) -> Result<Option<Fence>, StateError> {
        let Some(mut content) = read(path)?.filter(|content| content.fenced.is_some()) else {
            return Ok(None);
        };
        let fence = content.fenced.take();
        (content.clean, content.serves_unreached_kept) = (None, false);
        Inner { path: path.to_owned(), content }.write()?;
        Ok(fence)
    }

    /// Opens or creates the file, and marks the new run as begun.
    pub fn open(path: PathBuf, wall_us: u64) -> Result<(Self, Opened), StateError> {
        Self::open_as(path, wall_us, None)
    }

    /// The same for a process that goes on with the run before, which has not ended: it has all that is to be sent.
    pub fn go_on(
        path: PathBuf,
        wall_us: u64,
        run: Incarnation,
    ) -> Result<(Self, Opened), StateError> {
        Self::open_as(path, wall_us, Some(run))
    }

    fn open_as(
        path: PathBuf,
        wall_us: u64,
        run: Option<Incarnation>,
    ) -> Result<(Self, Opened), StateError> {
        let directory = path.parent().unwrap_or(Path::new("."));
        durable::make_directory(directory)
            .map_err(|source| StateError::Io { path: path.clone(), source })?;
        let old = read(&path)?;
        let last = old.as_ref().map_or(Incarnation(0), |c| c.incarnation);
        // Larger than any before, also if the file was lost.
        let incarnation = run.unwrap_or(Incarnation(wall_us.max(last.0.saturating_add(1))));
        let epoch = old.as_ref().map_or(Epoch(0), |c| c.epoch);
        let floor_ms = old.as_ref().map_or(0, |c| c.hlc_ceiling_ms);
        let hlc_ceiling_ms = ceiling::first(floor_ms, wall_us / 1000);
        let clean = old.as_ref().and_then(|c| c.clean);
        let fenced = old.as_ref().and_then(|c| c.fenced.clone());
        let is_fenced = fenced.is_some();
        let group_id = old.as_ref().and_then(|c| c.group_id);
        let serves_unreached_kept = old.as_ref().is_some_and(|c| c.serves_unreached_kept);
        let verified = old.and_then(|c| c.verified);
        let content = Content {
            format: FORMAT,
            group_id,
            epoch,
            incarnation,
            clean: None,
            hlc_ceiling_ms,
            verified,
            fenced,
            serves_unreached_kept,
        };
        let state = Inner { path, content };
        state.write()?;
        let opened = Opened {
            group_id,
            incarnation,
            last_incarnation: last,
            epoch,
            last_run: clean.map_or(LastRun::Unknown, |mark| LastRun::Clean { seq: mark.seq }),
            // After a clean end the last time itself is known.
            hlc_floor: if clean.is_some() { Hlc(0) } else { ceiling::floor_above(floor_ms) },
            hlc_ceiling_ms,
            fenced: is_fenced,
            serves_unreached_kept,
            resume: clean.map(|mark| Resume { epoch, seq: mark.seq, hlc: mark.hlc }),
        };
        Ok((Self(Arc::new(Mutex::new(state))), opened))
    }

    /// The run has ended with everything up to `seq` at the backup, and equal disks.
    pub fn ended_cleanly(&self, seq: Seq, hlc: Hlc) -> Result<(), StateError> {
        self.change(|content| content.clean = Some(CleanMark { seq, hlc }))
    }

    /// Moves the ceiling when the greatest time that was given out or heard comes near it. `wall_ms`: the wall
    /// clock as far as it is believed. Returns what is on record.
    pub fn keep_ahead_of(&self, hlc: Hlc, wall_ms: u64) -> Result<u64, StateError> {
        let raised_ms = ceiling::raised(self.lock().content.hlc_ceiling_ms, hlc, wall_ms);
        self.change(|content| content.hlc_ceiling_ms = raised_ms)?;
        Ok(raised_ms)
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

    /// The epoch in force.
    #[must_use]
    pub fn epoch(&self) -> Epoch {
        self.lock().content.epoch
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Inner> {
        self.0.lock().expect("no panic while it is held")
    }

    fn change(&self, change: impl FnOnce(&mut Content)) -> Result<(), StateError> {
        let mut inner = self.lock();
        let mut content = inner.content.clone();
        change(&mut content);
        if content != inner.content {
            let old = std::mem::replace(&mut inner.content, content);
            if let Err(error) = inner.write() {
                inner.content = old;
                return Err(error);
            }
        }
        Ok(())
    }
}

impl EpochKeeper for MemberState {
    fn keep(&mut self, epoch: Epoch, group_id: GroupId) -> io::Result<()> {
        if let Some(fence) = self.lock().content.fenced.clone().filter(|f| epoch <= f.epoch) {
            return Err(io::Error::other(format!(
                "the backup grants epoch {epoch}, and had ended epoch {} before: {}",
                fence.epoch, fence.reason
            )));
        }
        let change = |content: &mut Content| {
            content.serves_unreached_kept &= content.epoch == epoch;
            (content.epoch, content.fenced) = (epoch, None);
            content.group_id = Some(group_id);
        };
        self.change(change).map_err(io::Error::other)
    }

    fn greatest(&self) -> Hlc {
        Hlc::new(self.lock().content.hlc_ceiling_ms, 0)
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

impl Inner {
    fn write(&self) -> Result<(), StateError> {
        let bytes = serde_json::to_vec_pretty(&self.content).expect("plain data");
        durable::replace(&self.path, &bytes)
            .map_err(|source| StateError::Io { path: self.path.clone(), source })
    }
}

fn read(path: &Path) -> Result<Option<Content>, StateError> {
    let bytes = match fs::read(path) {
        Ok(bytes) => bytes,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(source) => return Err(StateError::Io { path: path.to_owned(), source }),
    };
    let content: Content = serde_json::from_slice(&bytes)
        .map_err(|source| StateError::Content { path: path.to_owned(), source })?;
    if content.format != FORMAT {
        return Err(StateError::Format { path: path.to_owned(), found: content.format });
    }
    Ok(Some(content))
}

#[cfg(test)]
mod tests {
    use super::*;

    const ID: GroupId = GroupId([7; 16]);

    #[test]
    fn a_clean_mark_holds_for_one_start() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("group/member.json");
        let (mut state, first) = MemberState::open(path.clone(), 1000).unwrap();
        assert_eq!(first.incarnation, Incarnation(1000));
        assert_eq!(first.last_run, LastRun::Unknown);
        state.keep(Epoch(4), ID).unwrap();
        state.ended_cleanly(Seq(9), Hlc(5)).unwrap();
        let (_, second) = MemberState::open(path.clone(), 0).unwrap();
        assert_eq!(second.incarnation, Incarnation(1001), "the wall clock went back");
        assert_eq!(second.epoch, Epoch(4));
        assert_eq!(second.last_run, LastRun::Clean { seq: Seq(9) });
        let (_, third) = MemberState::open(path, 2000).unwrap();
        assert_eq!(third.last_run, LastRun::Unknown, "the second run did not end cleanly");
        assert_eq!(third.epoch, Epoch(4));
    }

    #[test]
    fn no_time_of_the_next_run_is_below_one_that_was_given_out() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("m.json");
        let (state, first) = MemberState::open(path.clone(), 50_000_000).unwrap();
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
        let (state, second) = MemberState::open(path.clone(), 0).unwrap();
        assert_eq!((second.hlc_floor, second.hlc_ceiling_ms), (floor, hour_ms + 2_190));
        state.ended_cleanly(Seq(1), Hlc::new(66_000, 9)).unwrap();
        let (_, third) = MemberState::open(path, 0).unwrap();
        assert_eq!(third.resume.unwrap().hlc, Hlc::new(66_000, 9));
    }

    /// Nobody has looked since the first of these writes.
    #[test]
    fn a_run_that_is_killed_right_after_an_idle_spell_has_none_above_the_next() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("m.json");
        let (_, opened) = MemberState::open(path.clone(), 50_000_000).unwrap();
        let mut clock = ceiling::BoundedClock::default();
        clock.set_ceiling(opened.hlc_ceiling_ms);
        clock.observe(opened.hlc_floor);
        let last = (0..70_000).map(|_| clock.tick(3_600_000)).last().unwrap();
        assert!(last > Hlc::new(opened.hlc_ceiling_ms, 0), "it counts on where it may not follow");
        let (_, next) = MemberState::open(path, 3_600_000_000).unwrap();
        assert!(next.hlc_floor > last);
    }

    /// However often the daemon is killed, no run begins further ahead of the wall clock than the
    /// ceiling is put; and none below a time of the run before.
    #[test]
    fn runs_that_are_killed_do_not_add_up() {
        for (lives_ms, records) in [(150, 0), (150, 7), (600, 7), (5_000, 7)] {
            let dir = tempfile::tempdir().unwrap();
            let path = dir.path().join("m.json");
            let (mut wall_ms, mut greatest) = (1_000_000, Hlc(0));
            for run in 0..50 {
                let (state, opened) = MemberState::open(path.clone(), wall_ms * 1000).unwrap();
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
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("m.json");
        let open = |wall_us| MemberState::open(path.clone(), wall_us).unwrap();
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
    fn a_fence_is_taken_away_by_the_operator_and_leaves_nothing_to_go_on_from() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("m.json");
        let (mut state, _) = MemberState::open(path.clone(), 1).unwrap();
        state.keep(Epoch(1), ID).unwrap();
        state.keep_serves_unreached(true).unwrap();
        assert_eq!(MemberState::remove_fence(&path).unwrap(), None, "there is none");
        state.keep_fenced("it was recovered").unwrap();
        let fence = Fence { epoch: Epoch(1), reason: "it was recovered".into() };
        assert_eq!(MemberState::fence(&path).unwrap(), Some(fence.clone()));
        assert_eq!(MemberState::remove_fence(&path).unwrap(), Some(fence));
        let (mut state, opened) = MemberState::open(path, 2).unwrap();
        assert_eq!((opened.group_id, opened.epoch), (Some(ID), Epoch(1)));
        assert!(!opened.fenced && opened.last_run == LastRun::Unknown);
        assert!(!state.may_answer_unreached(), "the backup is asked first");
        state.keep(Epoch(1), ID).unwrap();
    }

    #[test]
    fn damage_is_named_and_not_overwritten() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("m.json");
        fs::write(&path, "{").unwrap();
        let error = MemberState::open(path.clone(), 1).unwrap_err();
        assert!(matches!(error, StateError::Content { .. }), "{error}");
        assert_eq!(fs::read(&path).unwrap(), b"{");
        let newer = r#"{"format":2,"epoch":0,"incarnation":1,"clean":null}"#;
        fs::write(&path, newer).unwrap();
        assert!(matches!(MemberState::open(path, 1), Err(StateError::Format { .. })));
    }
}
