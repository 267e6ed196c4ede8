//! The backup site of a store, of either kind.

use super::primary::Primary;
use crate::failure::{Checked, Checker, Failure, check};
use crate::rng::Rng;
use std::fmt::Debug;
use tidelock_protocol::hlc::Hlc;
use tidelock_shard::{Backup, Entry, LogIndex, Reply};

/// An agent at the primary site, and the replica that it has sent to.
#[derive(Clone, Copy, Debug)]
pub(super) struct From {
    pub(super) shard: usize,
    pub(super) agent: u64,
    pub(super) replica: u16,
}

/// Replies on their way to agents.
pub(super) type Replies = Vec<(From, Reply)>;

/// A backup site.
pub(super) trait Site: Debug {
    /// Replicas of each shard.
    fn replicas(&self) -> u16;
    /// A message of an agent arrives. The answer may come later, from a step.
    fn received(&mut self, from: From, message: Backup, now: u64) -> Result<Replies, Failure>;
    /// Goes on. True: more may be applied.
    fn step(
        &mut self,
        primary: &[Primary],
        now: u64,
        faults: bool,
        rng: &mut Rng,
        replies: &mut Replies,
    ) -> Result<bool, Failure>;
    /// Something fails.
    fn fault(&mut self, now: u64, rng: &mut Rng) -> Checked;
    /// Ends all faults.
    fn calm(&mut self);
    /// A disaster is declared.
    fn recover(&mut self);
    /// Entries that are committed, of all shards.
    fn committed(&self) -> usize;
    /// The end of what is committed of a shard.
    fn safe(&self, shard: usize) -> LogIndex;
    /// The end of what a shard may apply.
    fn apply_to(&self, shard: usize) -> LogIndex;
    /// True if every shard is recovered.
    fn is_recovered(&self) -> bool;
    /// The final watermark that a shard has obeyed.
    fn recovered(&self, shard: usize) -> Option<Hlc>;
}

/// The entry that a backup shard has committed as the nth is the primary's nth, with its effective stamp.
pub(super) fn check_entry(primary: &Primary, nth: usize, entry: &Entry) -> Checked {
    let placed = primary.log[..primary.commit].get(nth);
    let equal = placed.is_some_and(|placed| {
        (placed.entry.end, &placed.entry.data) == (entry.end, &entry.data)
            && placed.effective == entry.stamp
    });
    check(equal, Checker::ShardLog, || {
        format!("committed {entry:?}, and the primary's entry {nth} is {placed:?}")
    })
}
