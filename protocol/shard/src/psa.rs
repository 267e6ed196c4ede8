//! Primary Slogger agent (Slogger 5.2): ships what one shard's log has committed.
//!
//! Sending goes on while acknowledgements are under way, up to a limit. Where the paper sends again what was not
//! acknowledged in time, this agent asks the backup where it stands and goes on from there: after a loss it costs one round
//! trip more, and nothing is sent twice because an acknowledgement was slow.
//!
//! Several active agents of one shard do no harm: each sends only what is committed, with the stamps that the log gives, and
//! the backup takes each entry once.

use crate::log::{Entry, LogIndex, LogPoint};
use crate::{Backup, Reply, Standing, Verdict};
use thiserror::Error;
use tidelock_planted::Bug;
use tidelock_protocol::ids::MonoNanos;

/// The limits of an agent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Terms {
    /// Replicas of the backup shard: any of them may lead it.
    pub replicas: u16,
    /// Limit of what is sent and not acknowledged, counted as the log counts ([`LogIndex`]): then nothing more is sent.
    pub unacked_max: u64,
    /// After so long without an answer, or while nothing of what was sent is committed, the backup is asked where it stands.
    pub patience_ns: u64,
}

/// Work that an agent wants to be done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// Send [`Psa::question`] to this replica of the backup shard.
    Ask {
        /// The replica, from 0.
        replica: u16,
    },
    /// Read entries of the log for one message, from the first one that ends after `after`, and give them to [`Psa::send`].
    Read {
        /// The end of the last entry that was sent.
        after: LogIndex,
        /// No entry that ends beyond it.
        up_to: LogIndex,
    },
}

/// Claims that cannot be true.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
pub enum PsaError {
    /// The backup has committed more than it has received.
    #[error(
        "the backup says that it has committed the log to {commit}, and received it to {append}"
    )]
    Impossible {
        /// The claim.
        commit: LogIndex,
        /// What it has received.
        append: LogIndex,
    },
    /// The store gave an entry that does not follow the one before.
    #[error("the log's entry that ends at {end} does not follow {after}")]
    NotNext {
        /// The entry.
        end: LogIndex,
        /// The end of the one before.
        after: LogIndex,
    },
    /// The store gave an entry that is not committed.
    #[error("the log's entry that ends at {end} is beyond what is committed, {commit}")]
    NotCommitted {
        /// The entry.
        end: LogIndex,
        /// The log's commit index.
        commit: LogIndex,
    },
}

/// Knowledge that an agent has of the backup.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Backs {
    /// Unknown: the backup's place is to be asked. `since`: the question is out.
    Unknown { since: Option<MonoNanos> },
    /// At work.
    Known {
        /// sent-spec: the last entry that was sent.
        sent: LogPoint,
        /// sent-acked: the end of the last entry that it has received.
        acked: LogIndex,
        /// The last time that it has committed something, or that there was nothing for it to do.
        progress: MonoNanos,
    },
    /// Without room, it said then: it is asked again later.
    Full { since: MonoNanos },
    /// Recovered: nothing is sent any more.
    Fenced,
}

/// The agent of one shard.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Psa {
    terms: Terms,
    /// The log's commit index at home.
    commit: LogIndex,
    /// b-commit: what the backup has committed.
    b_commit: LogIndex,
    backs: Backs,
    /// The replica that is believed to lead the backup shard.
    replica: u16,
    attempt: u64,
}

impl Psa {
    /// An agent that knows nothing yet.
    #[must_use]
    pub fn new(terms: Terms) -> Self {
        Self {
            terms,
            commit: LogIndex(0),
            b_commit: LogIndex(0),
            backs: Backs::Unknown { since: None },
            replica: 0,
            attempt: 0,
        }
    }

    /// The log's commit index at home. Entries up to here are on as many replicas of the primary shard as it takes to
    /// keep them.
    pub fn committed(&mut self, commit: LogIndex, now: MonoNanos) {
        if self.is_idle() {
            self.touch(now);
        }
        self.commit = self.commit.max(commit);
    }

    /// The connection to the backup shard is new: what was under way may be lost.
    pub fn reconnected(&mut self) {
        if self.backs != Backs::Fenced {
            self.backs = Backs::Unknown { since: None };
        }
    }

    /// Next step. After [`Step::Ask`] and [`Psa::send`] there may be more.
    pub fn poll(&mut self, now: MonoNanos) -> Option<Step> {
        if self.deadline().is_some_and(|deadline| deadline <= now) {
            // A replica that does not answer may be dead, and another one leads. One that answers and makes no progress
            // is asked itself first.
            if matches!(self.backs, Backs::Unknown { .. }) {
                self.next_replica();
            }
            self.backs = Backs::Unknown { since: None };
        }
        match self.backs {
            Backs::Unknown { since: None } => {
                self.attempt += 1;
                self.backs = Backs::Unknown { since: Some(now) };
                Some(Step::Ask { replica: self.replica })
            }
            Backs::Unknown { since: Some(_) } | Backs::Full { .. } | Backs::Fenced => None,
            Backs::Known { sent, acked, .. } => {
                let early = tidelock_planted::is(Bug::SentBeforeCommitted);
                let up_to = if early { LogIndex(u64::MAX) } else { self.commit };
                let has_room = sent.index.0.saturating_sub(acked.0) < self.terms.unacked_max;
                let is_due = sent.index < up_to && has_room;
                is_due.then_some(Step::Read { after: sent.index, up_to })
            }
        }
    }

    /// The message that asks the backup where it stands.
    #[must_use]
    pub fn question(&self) -> Backup {
        Backup { attempt: self.attempt, after: LogIndex(0), entries: Vec::new() }
    }

    /// The replica of the backup shard that messages go to.
    #[must_use]
    pub fn replica(&self) -> u16 {
        self.replica
    }

    /// Entries that were read for [`Step::Read`]: the message that carries them. `None`: there are none, or the backup's
    /// place has changed meanwhile.
    ///
    /// # Errors
    /// The store has not given what was asked for.
    pub fn send(&mut self, mut entries: Vec<Entry>) -> Result<Option<Backup>, PsaError> {
        let Backs::Known { sent, .. } = &mut self.backs else { return Ok(None) };
        let mut last = *sent;
        for entry in &mut entries {
            if entry.end <= last.index {
                return Err(PsaError::NotNext { end: entry.end, after: last.index });
            }
            if entry.end > self.commit && !tidelock_planted::is(Bug::SentBeforeCommitted) {
                return Err(PsaError::NotCommitted { end: entry.end, commit: self.commit });
            }
            if !tidelock_planted::is(Bug::StampsNotMonotone) {
                entry.stamp = entry.stamp.max(last.stamp);
            }
            last = entry.point();
        }
        let after = sent.index;
        *sent = last;
        Ok((!entries.is_empty()).then(|| Backup { attempt: self.attempt, after, entries }))
    }

    /// A replica of the backup shard has answered.
    ///
    /// # Errors
    /// The replica says what cannot be true; the connection must end.
    pub fn received(&mut self, from: u16, reply: &Reply, now: MonoNanos) -> Result<(), PsaError> {
        // An answer to what was sent before the agent began anew says nothing of now.
        if from != self.replica || reply.attempt != self.attempt {
            return Ok(());
        }
        match reply.verdict {
            Verdict::Taken(standing) => self.taken(standing, now),
            Verdict::OutOfOrder(standing) | Verdict::Asked(standing) => {
                self.note_commit(standing)?;
                self.attempt += 1;
                let acked = standing.append.index;
                self.backs = Backs::Known { sent: standing.append, acked, progress: now };
                Ok(())
            }
            Verdict::Full(standing) => {
                self.note_commit(standing)?;
                self.backs = Backs::Full { since: now };
                Ok(())
            }
            Verdict::NotLeader => {
                self.next_replica();
                self.backs = Backs::Unknown { since: None };
                Ok(())
            }
            Verdict::Fenced => {
                self.backs = Backs::Fenced;
                Ok(())
            }
        }
    }

    fn taken(&mut self, standing: Standing, now: MonoNanos) -> Result<(), PsaError> {
        let is_new = self.note_commit(standing)?;
        let Backs::Known { sent, acked, progress } = &mut self.backs else { return Ok(()) };
        if is_new {
            *progress = now;
        }
        *acked = (*acked).max(standing.append.index);
        // Another agent of the shard has sent more.
        if standing.append.index > sent.index {
            *sent = standing.append;
        }
        Ok(())
    }

    /// True if the backup has committed more than was known.
    fn note_commit(&mut self, Standing { append, commit }: Standing) -> Result<bool, PsaError> {
        if commit.index > append.index {
            return Err(PsaError::Impossible { commit: commit.index, append: append.index });
        }
        let is_new = commit.index > self.b_commit;
        self.b_commit = self.b_commit.max(commit.index);
        Ok(is_new)
    }

    fn next_replica(&mut self) {
        self.replica = (self.replica + 1) % self.terms.replicas.max(1);
    }

    /// True if nothing is under way to the backup.
    fn is_idle(&self) -> bool {
        matches!(self.backs, Backs::Known { sent, .. } if sent.index <= self.b_commit)
    }

    fn touch(&mut self, now: MonoNanos) {
        if let Backs::Known { progress, .. } = &mut self.backs {
            *progress = now;
        }
    }

    /// The time of the next [`Psa::poll`] if nothing else happens.
    #[must_use]
    pub fn deadline(&self) -> Option<MonoNanos> {
        let since = match self.backs {
            Backs::Unknown { since } => since?,
            Backs::Full { since } => since,
            Backs::Known { progress, .. } if !self.is_idle() => progress,
            Backs::Known { .. } | Backs::Fenced => return None,
        };
        Some(MonoNanos(since.0.saturating_add(self.terms.patience_ns)))
    }

    /// b-commit: the log may be trimmed up to here, and no further. Never beyond what is committed at home, whatever the
    /// backup says.
    #[must_use]
    pub fn b_commit(&self) -> LogIndex {
        self.b_commit.min(self.commit)
    }

    /// The end of what the backup says that it has, if that is beyond what is known to be committed here. A new leader learns
    /// soon that it is; where that lasts, the backup has another log than this one, or lies. Nothing is sent meanwhile.
    #[must_use]
    pub fn ahead(&self) -> Option<LogIndex> {
        self.reached().map(|sent| sent.index).filter(|sent| *sent > self.commit)
    }

    /// sent-spec and sent-acked, if the backup has said where it stands.
    #[must_use]
    pub fn sent(&self) -> Option<(LogIndex, LogIndex)> {
        match self.backs {
            Backs::Known { sent, acked, .. } => Some((sent.index, acked)),
            Backs::Unknown { .. } | Backs::Full { .. } | Backs::Fenced => None,
        }
    }

    /// The last entry that was sent, with its effective stamp, if the backup has said where it stands.
    #[must_use]
    pub fn reached(&self) -> Option<LogPoint> {
        match self.backs {
            Backs::Known { sent, .. } => Some(sent),
            Backs::Unknown { .. } | Backs::Full { .. } | Backs::Fenced => None,
        }
    }

    /// True if the backup has no room: it is asked again later.
    #[must_use]
    pub fn is_backup_full(&self) -> bool {
        matches!(self.backs, Backs::Full { .. })
    }

    /// True if the backup was recovered: this primary ships nothing any more.
    #[must_use]
    pub fn is_fenced(&self) -> bool {
        self.backs == Backs::Fenced
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tidelock_protocol::hlc::Hlc;
    use tidelock_protocol::record::Payload;

    const TERMS: Terms = Terms { replicas: 2, unacked_max: 2, patience_ns: 100 };
    const START: MonoNanos = MonoNanos(1000);

    fn entry(end: u64, stamp: u64) -> Entry {
        Entry::update(LogIndex(end), Hlc(stamp), Payload::new(vec![end as u8].into()))
    }

    fn standing(append: u64, commit: u64) -> Standing {
        let at = |index: u64| LogPoint { index: LogIndex(index), stamp: Hlc(index) };
        Standing { append: at(append), commit: at(commit) }
    }

    /// An agent that was told where the backup stands, and whose log is committed up to `commit`.
    fn agent(at: Standing, commit: u64) -> Psa {
        let mut psa = Psa::new(TERMS);
        psa.committed(LogIndex(commit), START);
        assert_eq!(psa.poll(START), Some(Step::Ask { replica: 0 }));
        let reply = Reply { attempt: psa.question().attempt, verdict: Verdict::Asked(at) };
        psa.received(0, &reply, START).unwrap();
        psa
    }

    fn read(psa: &mut Psa) -> Option<(u64, u64)> {
        match psa.poll(START)? {
            Step::Read { after, up_to } => Some((after.0, up_to.0)),
            Step::Ask { .. } => panic!("nothing is to be asked"),
        }
    }

    #[test]
    fn sending_goes_on_while_acknowledgements_are_under_way_up_to_the_limit() {
        let mut psa = agent(standing(3, 3), 9);
        assert_eq!(read(&mut psa), Some((3, 9)));
        let sent = psa.send(vec![entry(4, 4)]).unwrap().unwrap();
        assert_eq!(read(&mut psa), Some((4, 9)));
        psa.send(vec![entry(5, 5), entry(6, 6)]).unwrap().unwrap();
        assert_eq!(read(&mut psa), None);
        let reply = Reply { attempt: sent.attempt, verdict: Verdict::Taken(standing(5, 4)) };
        psa.received(0, &reply, START).unwrap();
        assert_eq!((psa.sent(), psa.b_commit()), (Some((LogIndex(6), LogIndex(5))), LogIndex(4)));
        assert_eq!(read(&mut psa), Some((6, 9)));
    }

    #[test]
    fn many_refusals_for_one_loss_cost_one_repetition() {
        let mut psa = agent(standing(0, 0), 9);
        let first = psa.send(vec![entry(1, 1)]).unwrap().unwrap();
        let refused =
            Reply { attempt: first.attempt, verdict: Verdict::OutOfOrder(standing(0, 0)) };
        psa.received(0, &refused, START).unwrap();
        assert_eq!(read(&mut psa), Some((0, 9)));
        let again = psa.send(vec![entry(1, 1)]).unwrap().unwrap();
        assert_ne!(again.attempt, first.attempt);
        psa.received(0, &refused, START).unwrap();
        assert_eq!(
            psa.sent(),
            Some((LogIndex(1), LogIndex(0))),
            "the second refusal is of what was sent before"
        );
    }

    #[test]
    fn stamps_go_on_from_what_the_backup_has() {
        let mut psa = agent(standing(7, 7), 9);
        let sent = psa.send(vec![entry(8, 5), entry(9, 8)]).unwrap().unwrap();
        assert_eq!(sent.entries.iter().map(|entry| entry.stamp.0).collect::<Vec<_>>(), [7, 8]);
    }

    #[test]
    fn a_silent_replica_is_followed_by_the_next_and_a_stuck_one_is_asked_itself() {
        let mut psa = agent(standing(0, 0), 1);
        psa.send(vec![entry(1, 1)]).unwrap().unwrap();
        let late = MonoNanos(START.0 + TERMS.patience_ns);
        assert_eq!(psa.deadline(), Some(late));
        assert_eq!(psa.poll(late), Some(Step::Ask { replica: 0 }));
        let later = MonoNanos(late.0 + TERMS.patience_ns);
        assert_eq!(psa.poll(late), None);
        assert_eq!(psa.poll(later), Some(Step::Ask { replica: 1 }));
    }

    #[test]
    fn a_backup_without_room_is_asked_again_later_and_sent_nothing_until_then() {
        let mut psa = agent(standing(3, 3), 9);
        let sent = psa.send(vec![entry(4, 4)]).unwrap().unwrap();
        let full = Reply { attempt: sent.attempt, verdict: Verdict::Full(standing(3, 3)) };
        psa.received(0, &full, START).unwrap();
        assert_eq!((psa.poll(START), psa.is_backup_full()), (None, true));
        let late = MonoNanos(START.0 + TERMS.patience_ns);
        assert_eq!(psa.poll(late), Some(Step::Ask { replica: 0 }), "it is not dead");
        let attempt = psa.question().attempt;
        let reply = Reply { attempt, verdict: Verdict::Asked(standing(3, 3)) };
        psa.received(0, &reply, late).unwrap();
        assert_eq!(psa.poll(late), Some(Step::Read { after: LogIndex(3), up_to: LogIndex(9) }));
    }

    #[test]
    fn a_backup_that_claims_too_much_has_nothing_trimmed_that_is_not_committed() {
        let mut psa = agent(standing(9, 8), 5);
        assert_eq!((psa.b_commit(), psa.ahead()), (LogIndex(5), Some(LogIndex(9))));
        assert_eq!(read(&mut psa), None);
        psa.committed(LogIndex(10), START);
        assert_eq!((psa.b_commit(), psa.ahead()), (LogIndex(8), None));
        assert_eq!(read(&mut psa), Some((9, 10)));
    }

    #[test]
    fn what_cannot_be_true_is_refused() {
        let mut psa = agent(standing(3, 3), 5);
        let not_next = PsaError::NotNext { end: LogIndex(3), after: LogIndex(3) };
        assert_eq!(psa.send(vec![entry(3, 3)]), Err(not_next));
        let early = PsaError::NotCommitted { end: LogIndex(6), commit: LogIndex(5) };
        assert_eq!(psa.send(vec![entry(6, 6)]), Err(early));
        let reply =
            Reply { attempt: psa.question().attempt, verdict: Verdict::Taken(standing(3, 4)) };
        let impossible = PsaError::Impossible { commit: LogIndex(4), append: LogIndex(3) };
        assert_eq!(psa.received(0, &reply, START), Err(impossible));
    }
}
