//! What an owner loop tells of itself. Written by the loop after each turn, read by anyone; no
//! reader makes it wait.

use super::gap::Gap;
use crate::copy_job;
use crate::link::Refusal;
use crate::verified::Verified;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use tidelock_protocol::ids::Seq;

use Ordering::Relaxed;

/// Where a member stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Phase {
    /// Not attached since the daemon started, and nothing is known to go on from: writes wait.
    WaitingForBackup,
    /// The same, but guests are served: nothing of what they write is recorded.
    Unrecorded,
    /// Nothing of what guests write is recorded, because the backlog was full; the backup is to have what was recorded
    /// before.
    Overflowed,
    /// The initial copy runs: nothing could be recovered.
    Initialising,
    /// The sites are being compared after an unclean stop: recovery would go back to before it,
    /// and no packet leaves.
    Resyncing,
    /// The local disk failed writes: the sites may differ there.
    DiskFailing,
    /// Everything is in order but the link is down: writes gather in the backlog.
    Disconnected,
    /// Every write reaches the backup.
    Replicating,
    /// The backup refuses the member.
    Refused,
    /// The group was recovered, or a newer run has taken over: for good.
    Fenced,
}

impl Phase {
    /// Every phase.
    pub(crate) const ALL: [Phase; 10] = [
        Phase::WaitingForBackup,
        Phase::Unrecorded,
        Phase::Overflowed,
        Phase::Initialising,
        Phase::Resyncing,
        Phase::DiskFailing,
        Phase::Disconnected,
        Phase::Replicating,
        Phase::Refused,
        Phase::Fenced,
    ];
}

/// What went wrong, in words.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Trouble {
    /// Why the backup refuses, if it does.
    pub refusal: Option<Refusal>,
    /// Disks whose flushes fail, and why.
    pub failed_disks: Vec<(String, String)>,
}

/// How a verification ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum VerifyEnded {
    /// It has looked at everything.
    Whole(Verified),
    /// It has not, or was not begun.
    GivenUp(String),
}

/// The state of an owner loop.
#[derive(Debug)]
pub struct OwnerView {
    phase: AtomicU8,
    published: AtomicU64,
    suspect_bytes: AtomicU64,
    gap: Mutex<Option<Gap>>,
    /// What the state file has, see [`crate::ceiling`]. 0: none is kept.
    hlc_ceiling_ms: AtomicU64,
    /// The copy that runs; changes with every piece of it.
    copy: Mutex<Option<copy_job::Progress>>,
    /// Why it is a comparison of whole disks, if it is.
    compares_all_because: Mutex<Option<String>>,
    /// The verification that runs; likewise.
    verify: Mutex<Option<copy_job::Progress>>,
    /// A verification that has ended and is not on record yet.
    verify_ended: Mutex<Option<VerifyEnded>>,
    trouble: Mutex<Trouble>,
}

impl Default for OwnerView {
    fn default() -> Self {
        Self {
            phase: AtomicU8::new(Phase::WaitingForBackup as u8),
            published: AtomicU64::new(0),
            suspect_bytes: AtomicU64::new(0),
            gap: Mutex::new(Some(Gap::STARTED)),
            hlc_ceiling_ms: AtomicU64::new(0),
            copy: Mutex::new(None),
            compares_all_because: Mutex::new(None),
            verify: Mutex::new(None),
            verify_ended: Mutex::new(None),
            trouble: Mutex::default(),
        }
    }
}

impl OwnerView {
    pub(super) fn set(&self, phase: Phase, published: Seq, suspect_bytes: u64) {
        self.phase.store(phase as u8, Relaxed);
        self.published.store(published.0, Relaxed);
        self.suspect_bytes.store(suspect_bytes, Relaxed);
    }

    pub(super) fn set_gap(&self, gap: Option<Gap>) {
        *self.gap.lock().expect("no panic while held") = gap;
    }

    pub(super) fn set_copy(&self, copy: Option<copy_job::Progress>) {
        *self.copy.lock().expect("no panic while held") = copy;
    }

    pub(super) fn set_compares_all_because(&self, why: Option<String>) {
        *self.compares_all_because.lock().expect("no panic while held") = why;
    }

    pub(super) fn set_verify(&self, verify: Option<copy_job::Progress>) {
        *self.verify.lock().expect("no panic while held") = verify;
    }

    pub(super) fn verify_has_ended(&self, ended: VerifyEnded) {
        *self.verify_ended.lock().expect("no panic while held") = Some(ended);
    }

    pub(super) fn change_trouble(&self, change: impl FnOnce(&mut Trouble)) {
        change(&mut self.trouble.lock().expect("no panic while held"));
    }

    /// Where the member stands.
    #[must_use]
    pub fn phase(&self) -> Phase {
        Phase::ALL[usize::from(self.phase.load(Relaxed))]
    }

    /// P\[self\].
    #[must_use]
    pub fn published(&self) -> Seq {
        Seq(self.published.load(Relaxed))
    }

    /// Bytes in which the sites may differ after errors of the local disk.
    #[must_use]
    pub fn suspect_bytes(&self) -> u64 {
        self.suspect_bytes.load(Relaxed)
    }

    /// The gap between the sites, if there is one.
    #[must_use]
    pub fn gap(&self) -> Option<Gap> {
        *self.gap.lock().expect("no panic while held")
    }

    /// A ceiling is on record.
    pub fn set_hlc_ceiling_ms(&self, ceiling_ms: u64) {
        self.hlc_ceiling_ms.fetch_max(ceiling_ms, Relaxed);
    }

    /// It.
    #[must_use]
    pub fn hlc_ceiling_ms(&self) -> Option<u64> {
        Some(self.hlc_ceiling_ms.load(Relaxed)).filter(|ceiling_ms| *ceiling_ms > 0)
    }

    /// The initial copy or resync that runs.
    #[must_use]
    pub fn copy(&self) -> Option<copy_job::Progress> {
        *self.copy.lock().expect("no panic while held")
    }

    /// Why that compares whole disks, if it does.
    #[must_use]
    pub fn compares_all_because(&self) -> Option<String> {
        self.compares_all_because.lock().expect("no panic while held").clone()
    }

    /// The verification that runs.
    #[must_use]
    pub fn verify(&self) -> Option<copy_job::Progress> {
        *self.verify.lock().expect("no panic while held")
    }

    /// How one ended, once.
    pub fn take_verify_ended(&self) -> Option<VerifyEnded> {
        self.verify_ended.lock().expect("no panic while held").take()
    }

    /// What went wrong.
    #[must_use]
    pub fn trouble(&self) -> Trouble {
        self.trouble.lock().expect("no panic while held").clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn phases_come_back_as_they_were_set() {
        let view = OwnerView::default();
        for phase in Phase::ALL {
            view.set(phase, Seq(3), 0);
            assert_eq!(view.phase(), phase);
        }
    }

    #[test]
    fn a_view_shows_what_it_was_told_last_and_a_ceiling_only_rises() {
        let view = OwnerView::default();
        assert_eq!((view.gap(), view.phase()), (Some(Gap::STARTED), Phase::WaitingForBackup));
        assert_eq!(view.hlc_ceiling_ms(), None);
        view.set(Phase::Replicating, Seq(7), 512);
        assert_eq!((view.published(), view.suspect_bytes()), (Seq(7), 512));
        view.set_gap(None);
        assert_eq!(view.gap(), None);
        for (ceiling_ms, kept_ms) in [(5, 5), (3, 5), (8, 8)] {
            view.set_hlc_ceiling_ms(ceiling_ms);
            assert_eq!(view.hlc_ceiling_ms(), Some(kept_ms));
        }
        let progress = copy_job::Progress {
            purpose: copy_job::Purpose::Initial,
            done_bytes: 1,
            total_bytes: 2,
            sent_bytes: 1,
            unreadable_bytes: 0,
            rate_bytes_per_s: 1,
        };
        assert!(view.copy().is_none() && view.verify().is_none());
        view.set_copy(Some(progress));
        view.set_verify(Some(progress));
        assert!(view.copy().is_some() && view.verify().is_some());
        view.set_compares_all_because(Some("no log".into()));
        assert_eq!(view.compares_all_because().as_deref(), Some("no log"));
        view.verify_has_ended(VerifyEnded::GivenUp("it was stopped".into()));
        assert!(view.take_verify_ended().is_some() && view.take_verify_ended().is_none(), "once");
        view.change_trouble(|trouble| trouble.failed_disks.push(("root".into(), "EIO".into())));
        assert_eq!(view.trouble().failed_disks.len(), 1);
    }
}
