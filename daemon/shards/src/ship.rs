//! Messages to the backup.

use crate::agent::{Action, Phase, ShardAgent, index};
use crate::backlog::{Backlog, DoubtIn, Read};
use crate::server::Home;
use tidelock_protocol::hlc::Hlc;
use tidelock_shard::{Backup, LogIndex, Step};
use tidelock_wal::Lsn;

impl ShardAgent {
    /// Sends what can be sent, and reports to PostgreSQL what need not be kept.
    pub(crate) fn ship(&mut self) {
        let now = self.mono();
        if let Some(backlog) = &self.backlog {
            let commit = match self.home {
                Home::Unknown => None,
                Home::All => Some(backlog.sendable()),
                Home::UpTo(at) => Some(backlog.sendable().min(index(at))),
            };
            if let Some(commit) = commit {
                self.psa.committed(commit, now);
            }
        }
        // The backup must know which log it gets.
        if self.is_backup_there && self.origin.is_some() {
            self.pump();
        }
        let durable = self.psa.b_commit();
        // A backup that was restored has less than it had committed once.
        if let (Some(backlog), Some((_, acked))) = (&mut self.backlog, self.psa.sent()) {
            backlog.trim(durable.min(acked));
        }
        // A server takes the report for the slot's place, also backwards: to log that it may no longer have.
        let is_of_stream = self.phase == Phase::Streaming && durable >= index(self.stream_from);
        if let Some(stream) = self.stream.as_mut().filter(|_| is_of_stream) {
            stream.flushed(Lsn(durable.0));
        }
    }

    fn pump(&mut self) {
        let now = self.mono();
        while let Some(step) = self.psa.poll(now) {
            let (after, up_to) = match step {
                Step::Ask { .. } => {
                    self.actions.push_back(Action::Backup(self.psa.question()));
                    continue;
                }
                Step::Read { after, up_to } => (after, up_to),
            };
            let Some(backlog) = self.backlog.as_ref().filter(|_| self.room_bytes > 0) else {
                return;
            };
            let (entries, doubt) = match backlog.read(after, up_to, self.config.message_max_bytes) {
                Read::Gone => return self.rewind(),
                Read::Entries(entries, _) if entries.is_empty() => return,
                Read::Entries(entries, doubt) => (entries, doubt),
            };
            let before = self.psa.reached().map_or(Hlc::default(), |at| at.stamp);
            match self.psa.send(entries) {
                Ok(Some(message)) => {
                    self.tell_doubt(before, doubt, &message);
                    let bytes = message.entries.iter().filter_map(|entry| entry.data.as_ref());
                    let bytes = bytes.map(|data| data.data().len()).sum();
                    self.room_bytes = self.room_bytes.saturating_sub(bytes);
                    self.actions.push_back(Action::Backup(message));
                }
                Ok(None) => return,
                // The backlog gives what was asked for; if it does not, the backup's place is asked for again.
                Err(_) => return self.psa.reconnected(),
            }
        }
    }

    fn tell_doubt(&mut self, before: Hlc, doubt: Option<DoubtIn>, message: &Backup) {
        let Some(DoubtIn { at, through }) = doubt else { return };
        let last = at.checked_sub(1).and_then(|last| message.entries.get(last));
        let after = last.map_or(before, |entry| entry.stamp);
        if self.doubt_told != Some(through) && after < through {
            self.doubt_told = Some(through);
            let through = through.next();
            self.actions.push_back(Action::Doubt { after, through });
        }
    }

    /// End of what was received.
    pub(crate) fn end(&self) -> Option<LogIndex> {
        self.backlog.as_ref().map(Backlog::end)
    }
}
