//! The status of a group, and its risk: what a disaster now would undo, from what the loops of its members say.

use super::{GroupLoop, Member, Surroundings, Writer};
use crate::owner::Phase;
use crate::stats::LinkStats;
use crate::status::group::Instant;
use crate::status::{Facts, GroupSeen, GroupStatus, LagStatus, Risk, WriterFacts, assess};
use tidelock_planted::Bug;

impl GroupLoop {
    /// The status of the group: from what its loop sees, and what is seen beside it at the same moment. Logs what has
    /// changed of its risk since the last one.
    pub fn status(&mut self, around: &dyn Surroundings, seen: GroupSeen) -> GroupStatus {
        let (risk, clocks) = (self.risk(around), around.clocks());
        let since = self.risk_history.note(&self.settings.name, &risk, clocks.now);
        let instant = Instant {
            settings: &self.settings,
            view: self.view(),
            risk,
            since,
            gate: around.gate(),
            is_stopping: around.is_stopping(),
            clocks,
            members: around.members(),
            seen,
        };
        instant.status()
    }

    /// The risk of the members on this host: what a disaster now would undo, who may have been told, and why.
    #[must_use]
    pub fn risk(&self, around: &dyn Surroundings) -> Risk {
        let members = around.members();
        let now = around.clocks().now;
        let facts = |member: &Member| {
            let (writer, link) = (member.writer.as_ref()?, &member.link);
            let lag = LagStatus {
                writes: writer.lag_writes(link),
                bytes: link.lag_bytes(),
                ms: link.lag_ns(now) / 1_000_000,
            };
            Some(WriterFacts {
                phase: writer.phase,
                gap: writer.gap.filter(|_| !tidelock_planted::is(Bug::StatusForgetsGap)),
                is_superseded: writer.is_superseded,
                heartbeat_lost: writer.heartbeat_lost,
                differs: writer.differs,
                has_all: writer.has_all(link),
                lag,
            })
        };
        let links = || members.iter().map(|member| &member.link);
        assess(&Facts {
            switched_at_unix_ms: self.switched_at_unix_ms(),
            attached: links().all(|link| link.is_attached()),
            stalled: links().any(|link| link.stalled().is_some() || link.refusal().is_some()),
            told: self.told(),
            writers: members.iter().filter_map(facts).collect(),
        })
    }
}

impl Writer {
    /// Writes that the backup lacks. The link counts what it has taken up. On a busy host it may not have run since the
    /// guest has written more: P says so, where each write has a record.
    #[must_use]
    pub fn lag_writes(&self, link: &LinkStats) -> u64 {
        let of_link = link.lag_writes();
        match self.phase {
            Phase::Replicating | Phase::Disconnected => {
                of_link.max(self.published.0.saturating_sub(self.durable.0))
            }
            _ => of_link,
        }
    }

    /// True if the backup has every write of the guest now.
    #[must_use]
    pub fn has_all(&self, link: &LinkStats) -> bool {
        self.lag_writes(link) == 0 && self.phase == Phase::Replicating && link.is_attached()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tidelock_protocol::hlc::Hlc;
    use tidelock_protocol::ids::Seq;
    use tidelock_protocol::vector::CountVector;

    #[test]
    fn what_the_link_has_not_taken_up_yet_lags_too() {
        let lag = |of_link, phase, p, durable| {
            let link = LinkStats::default();
            link.set_lag(of_link, 0, None);
            let writer = Writer {
                phase,
                gap: None,
                is_superseded: false,
                heartbeat_lost: false,
                may_answer_unreached: false,
                failed_disk: None,
                differs: false,
                published: Seq(p),
                durable: Seq(durable),
                told: (CountVector::new(), Hlc(0)),
            };
            writer.lag_writes(&link)
        };
        assert_eq!(lag(0, Phase::Replicating, 700, 348), 352);
        assert_eq!(lag(400, Phase::Replicating, 700, 348), 400, "idle records and copies");
        assert_eq!(lag(0, Phase::Replicating, 0, 348), 0, "nothing was written in this run");
        assert_eq!(lag(0, Phase::Disconnected, 700, 348), 352);
        assert_eq!(lag(3, Phase::Unrecorded, 700, 0), 3, "writes without a record");
    }
}
