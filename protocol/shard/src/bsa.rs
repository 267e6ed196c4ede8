//! Backup Slogger agent (Slogger 5.3): takes the entries of one shard in their order, and says what is committed.
//!
//! The agent works only in the replica that leads the backup shard. Its knowledge comes from that replica's log, also that
//! a recovery has closed the log: the mark of it stands there like an entry, and whoever leads the shard later finds it.

use crate::log::{Entry, LogIndex, LogPoint};
use crate::watermark::{Order, Report};
use crate::{Backup, Reply, Standing, Verdict};
use thiserror::Error;
use tidelock_planted::Bug;
use tidelock_protocol::hlc::Hlc;

/// A message of a PSA that breaks the rules. The connection must end; nothing of it was taken.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
pub enum BsaError {
    /// Entries are not in the order of the log.
    #[error("entry that ends at {end} stands after {after}")]
    Order {
        /// The entry.
        end: LogIndex,
        /// The one before.
        after: LogIndex,
    },
    /// Effective stamps never fall.
    #[error("entry that ends at {end} has the stamp {stamp}, and the log has reached {reached}")]
    StampFalls {
        /// The entry.
        end: LogIndex,
        /// Its stamp.
        stamp: Hlc,
        /// The log's.
        reached: Hlc,
    },
}

/// The outcome of a message of a PSA.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Received {
    /// The answer.
    pub reply: Reply,
    /// Entries to be appended to the backup shard's log, in this order.
    pub append: Vec<Entry>,
}

/// Work that an order of the watermark service asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Todo {
    /// advance-apply-to: entries up to this stamp may be applied.
    Advance(Hlc),
    /// A mark that closes the log to the old primary is to be appended to it; when that is committed, [`Bsa::closed`].
    Close,
    /// The store is recovered up to this stamp: what is beyond is not applied, ever. Then [`Bsa::recovered`].
    Recover(Hlc),
}

/// Progress of a recovery that closes the log.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Closing {
    /// Open to the primary.
    #[default]
    Open,
    /// The mark is in the log, and not committed.
    Appended,
    /// The mark is committed: the log ends here.
    Closed,
}

/// The agent of one replica of a backup shard.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Bsa {
    /// The log of the shard, if this replica leads it.
    log: Option<Standing>,
    closing: Closing,
    watermark: Hlc,
    is_recovered: bool,
}

impl Bsa {
    /// The agent of a replica that does not lead its shard.
    #[must_use]
    pub fn following() -> Self {
        Self::default()
    }

    /// The agent of a replica that begins to lead. `log`: the end of its log, committed or not, and the end of what is
    /// committed. `closing`: how far the mark of a recovery is in it.
    #[must_use]
    pub fn leading(log: Standing, closing: Closing) -> Self {
        Self { log: Some(log), closing, watermark: Hlc::default(), is_recovered: false }
    }

    /// A PSA has sent this.
    ///
    /// # Errors
    /// The message breaks the rules; nothing of it was taken.
    pub fn received(&mut self, message: Backup) -> Result<Received, BsaError> {
        let Backup { attempt, after, entries } = message;
        let reply = |verdict| Reply { attempt, verdict };
        let Some(log) = &mut self.log else {
            return Ok(Received { reply: reply(Verdict::NotLeader), append: Vec::new() });
        };
        if self.closing != Closing::Open && !tidelock_planted::is(Bug::ShardNotFenced) {
            return Ok(Received { reply: reply(Verdict::Fenced), append: Vec::new() });
        }
        if entries.is_empty() {
            return Ok(Received { reply: reply(Verdict::Asked(*log)), append: Vec::new() });
        }
        let mut last = LogPoint { index: after, stamp: Hlc::default() };
        let mut append = Vec::new();
        // The first entry that is new must begin where the log ends.
        let mut follows = true;
        for entry in entries {
            if entry.end <= last.index {
                return Err(BsaError::Order { end: entry.end, after: last.index });
            }
            if entry.stamp < last.stamp {
                let (end, stamp) = (entry.end, entry.stamp);
                return Err(BsaError::StampFalls { end, stamp, reached: last.stamp });
            }
            if entry.end > log.append.index {
                follows &= !append.is_empty() || last.index == log.append.index;
                if append.is_empty() && follows && entry.stamp < log.append.stamp {
                    let (end, stamp) = (entry.end, entry.stamp);
                    return Err(BsaError::StampFalls { end, stamp, reached: log.append.stamp });
                }
                append.push(entry.clone());
            }
            last = entry.point();
        }
        if !follows && !tidelock_planted::is(Bug::ShardLogWithGap) {
            return Ok(Received { reply: reply(Verdict::OutOfOrder(*log)), append: Vec::new() });
        }
        if let Some(entry) = append.last() {
            log.append = entry.point();
        }
        Ok(Received { reply: reply(Verdict::Taken(*log)), append })
    }

    /// Progress of the log. `None`: this replica does not lead.
    #[must_use]
    pub fn standing(&self) -> Option<Standing> {
        self.log
    }

    /// The backup shard has committed its log up to this entry.
    pub fn committed(&mut self, commit: LogPoint) {
        if let Some(log) = &mut self.log {
            log.commit = log.commit.max(commit);
        }
    }

    /// The mark that [`Todo::Close`] asked for is committed, and so is all before it.
    pub fn closed(&mut self) {
        self.closing = Closing::Closed;
    }

    /// The watermark service has sent this.
    pub fn ordered(&mut self, order: Order) -> Option<Todo> {
        self.log?;
        match order {
            Order::Advance(watermark) => {
                if watermark <= self.watermark && !tidelock_planted::is(Bug::WatermarkFalls) {
                    return None;
                }
                self.watermark = watermark;
                Some(Todo::Advance(watermark))
            }
            Order::Close if self.closing == Closing::Open => {
                self.closing = Closing::Appended;
                Some(Todo::Close)
            }
            Order::Recover(watermark) if self.closing == Closing::Closed => {
                (!self.is_recovered).then_some(Todo::Recover(watermark))
            }
            Order::Close | Order::Recover(_) => None,
        }
    }

    /// The store has applied all up to the final watermark, and is ready to serve.
    pub fn recovered(&mut self) {
        self.is_recovered = true;
    }

    /// Report to the watermark service, all of it each time. `None`: this replica does not lead.
    #[must_use]
    pub fn report(&self) -> Option<Report> {
        let log = self.log?;
        let early = tidelock_planted::is(Bug::AppliedBeforeCommitted);
        Some(Report {
            lcommit: if early { log.append.stamp } else { log.commit.stamp },
            is_closed: self.closing == Closing::Closed,
            is_recovered: self.is_recovered,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tidelock_protocol::record::Payload;

    fn point(index: u64, stamp: u64) -> LogPoint {
        LogPoint { index: LogIndex(index), stamp: Hlc(stamp) }
    }

    fn entry(end: u64, stamp: u64) -> Entry {
        Entry::update(LogIndex(end), Hlc(stamp), Payload::new(vec![end as u8].into()))
    }

    fn backup(after: u64, entries: Vec<Entry>) -> Backup {
        Backup { attempt: 1, after: LogIndex(after), entries }
    }

    /// A leader whose log ends at 5, with 3 committed.
    fn leader() -> Bsa {
        Bsa::leading(Standing { append: point(5, 5), commit: point(3, 3) }, Closing::Open)
    }

    #[test]
    fn entries_are_taken_once_whoever_sends_them() {
        let mut bsa = leader();
        let received = bsa.received(backup(3, vec![entry(5, 5), entry(7, 7)])).unwrap();
        assert_eq!(received.append, [entry(7, 7)]);
        let again = bsa.received(backup(5, vec![entry(7, 7)])).unwrap();
        assert!(again.append.is_empty());
        let log = Standing { append: point(7, 7), commit: point(3, 3) };
        assert_eq!(again.reply.verdict, Verdict::Taken(log));
    }

    #[test]
    fn what_does_not_follow_is_refused_with_the_place_to_go_on() {
        let out_of_order =
            Verdict::OutOfOrder(Standing { append: point(5, 5), commit: point(3, 3) });
        // Beyond the end, and across it: another agent cuts its entries at other places.
        for message in [backup(6, vec![entry(7, 7)]), backup(3, vec![entry(4, 4), entry(6, 6)])] {
            let received = leader().received(message).unwrap();
            assert_eq!((received.reply.verdict, received.append), (out_of_order, vec![]));
        }
    }

    #[test]
    fn a_peer_that_lies_about_order_or_stamps_is_refused_and_nothing_is_taken() {
        let mut bsa = leader();
        let falls = BsaError::StampFalls { end: LogIndex(6), stamp: Hlc(4), reached: Hlc(5) };
        assert_eq!(bsa.received(backup(5, vec![entry(6, 4)])), Err(falls));
        let falls = BsaError::StampFalls { end: LogIndex(7), stamp: Hlc(6), reached: Hlc(7) };
        assert_eq!(bsa.received(backup(5, vec![entry(6, 7), entry(7, 6)])), Err(falls));
        let order = BsaError::Order { end: LogIndex(6), after: LogIndex(6) };
        assert_eq!(bsa.received(backup(5, vec![entry(6, 6), entry(6, 6)])), Err(order));
        assert_eq!(bsa, leader());
    }

    #[test]
    fn a_closed_log_takes_nothing_and_is_final_when_the_mark_is_committed() {
        let mut bsa = leader();
        assert_eq!(bsa.ordered(Order::Recover(Hlc(5))), None, "before it is closed");
        assert_eq!(bsa.ordered(Order::Close), Some(Todo::Close));
        assert_eq!(bsa.ordered(Order::Close), None, "once");
        assert_eq!(
            bsa.received(backup(5, vec![entry(6, 6)])).unwrap().reply.verdict,
            Verdict::Fenced
        );
        bsa.committed(point(5, 5));
        assert!(!bsa.report().unwrap().is_closed);
        bsa.closed();
        let report = Report { lcommit: Hlc(5), is_closed: true, is_recovered: false };
        assert_eq!(bsa.report(), Some(report));
        assert_eq!(bsa.ordered(Order::Recover(Hlc(4))), Some(Todo::Recover(Hlc(4))));
    }
}
