//! Checks a host's account of a member's last run against the backup's record of that run. The result decides how much
//! of the member's disks must be compared.
//!
//! State directory and disks of a host can be restored, cloned and edited, each by itself and all together. So
//! nothing that the host says shortens a comparison unless this record confirms it: the run by its nonce, the
//! activity log by its age, a clean end by the seq and by the identity of each disk.

use tidelock_protocol::ids::{RunId, Seq};
use tidelock_protocol::message::{Basis, CleanEnd, LastRun, LogAge, Writing};

/// The backup's record of a member's last run.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct OnRecord {
    /// The run in force: the last one that has said [`Message::Begun`](tidelock_protocol::message::Message::Begun).
    pub run: Option<RunId>,
    /// The run that attached last, if it has not said so yet.
    pub proposed: Option<RunId>,
    /// The clean end of the run in force, if there was one.
    pub clean: Option<CleanEnd>,
    /// Age of its activity log, as its host has told it last.
    pub log: LogAge,
    /// The last record on stable storage.
    pub durable: Seq,
}

impl OnRecord {
    /// True if this record is of that run, or of one that was to follow it.
    #[must_use]
    pub fn knows(&self, run: RunId) -> bool {
        [self.run, self.proposed].contains(&Some(run))
    }

    /// True if no run was ever heard of.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.run.is_none() && self.proposed.is_none()
    }
}

const OTHER_RUN: &str = "the host's record is not of the run that the backup last heard: the member ran elsewhere \
                         meanwhile, or the host was cloned or restored from an older moment";

/// Checks the host's account in `writing` against the backup's record. If several reasons call for a whole comparison,
/// the result names the first.
#[must_use]
pub fn judge(record: &OnRecord, writing: &Writing) -> Basis {
    let everything = |why: String| Basis::Everything { why };
    let because = |why: &str| Basis::Everything { why: why.to_owned() };
    let Some(before) = writing.before.filter(|_| writing.last_run != LastRun::Unknown) else {
        return because(
            "the host has no record of how this member's last run ended with these disks",
        );
    };
    if record.is_empty() {
        return because("the backup has no record of a run of this member");
    }
    if !record.knows(before) {
        return because(OTHER_RUN);
    }
    match writing.last_run {
        LastRun::Unknown => unreachable!("seen above"),
        LastRun::Continues { from } if from > record.durable.next() => everything(format!(
            "the host can send from {from} on, and the backup has {} at most: it has lost what it acknowledged",
            record.durable
        )),
        LastRun::Continues { .. } => Basis::Continues,
        LastRun::Unclean { log } if log < record.log => because(
            "the activity log is older than the backup has heard: host and disks were restored from an older moment",
        ),
        LastRun::Unclean { .. } => Basis::Log,
        LastRun::Clean { seq, served } => {
            let Some(clean) = record.clean.as_ref().filter(|_| Some(before) == record.run) else {
                return because("the backup has not heard that the last run ended cleanly");
            };
            if clean.seq != seq || clean.seq != record.durable {
                return everything(format!(
                    "the last run ended at {seq} by the host's record and at {} by the backup's, which has {}",
                    clean.seq, record.durable
                ));
            }
            if let Some(difference) = CleanEnd::difference(&clean.marks, &writing.marks) {
                return everything(difference);
            }
            if served { Basis::Log } else { Basis::Clean }
        }
    }
}
