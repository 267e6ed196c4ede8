//! A shard at the primary site: its log, its leader's clock, and the agents that ship it.

use super::mail::Mail;
use super::store::{DELAY_NS, EPSILON_NS, Op, PATIENCE_NS};
use crate::failure::{Checked, Checker, check, fail};
use crate::rng::Rng;
use tidelock_protocol::hlc::Hlc;
use tidelock_protocol::ids::MonoNanos;
use tidelock_protocol::record::Payload;
use tidelock_shard::{Backup, Entry, IdleShard, LogIndex, Psa, Reply, Step, Terms};

/// Least time between two NOPs of a shard that has nothing to write.
const NOP_EVERY_NS: u64 = 200_000;

/// An entry as the leader has placed it.
#[derive(Clone, Debug)]
pub(super) struct Placed {
    pub(super) entry: Entry,
    /// The greatest stamp up to here.
    pub(super) effective: Hlc,
    /// The operation; [`None`]: a NOP.
    pub(super) op: Option<usize>,
}

/// An append that has its stamp and no place in the log.
#[derive(Clone, Debug)]
struct Begun {
    at: u64,
    stamp: Hlc,
    op: Option<usize>,
}

/// An agent of a leader, or of one that was deposed.
#[derive(Debug)]
struct Agent {
    /// Number of the agent among those of the shard.
    id: u64,
    psa: Psa,
    /// Log as it was when the agent's leader was deposed.
    frozen: Option<(Vec<Placed>, usize)>,
    to_backup: Mail<(u16, Backup)>,
    from_backup: Mail<(u16, Reply)>,
}

/// A shard.
#[derive(Debug)]
pub(super) struct Primary {
    pub(super) log: Vec<Placed>,
    /// Entries that are committed.
    pub(super) commit: usize,
    /// Entries whose clients have a reply.
    answered: usize,
    /// The leader's clock is off by so much.
    off_ns: i64,
    begun: Vec<Begun>,
    idle: IdleShard,
    agents: Vec<Agent>,
    /// Agents so far.
    agents_made: u64,
    replicas: u16,
}

impl Primary {
    pub(super) fn new(replicas: u16, rng: &mut Rng) -> Self {
        let mut primary = Self {
            log: Vec::new(),
            commit: 0,
            answered: 0,
            off_ns: 0,
            begun: Vec::new(),
            idle: IdleShard::new(NOP_EVERY_NS),
            agents: Vec::new(),
            agents_made: 0,
            replicas,
        };
        primary.lead(rng);
        primary
    }

    /// A new leader, with its own clock and agent. What it knows of stamps is in its log.
    fn lead(&mut self, rng: &mut Rng) {
        self.idle = IdleShard::new(NOP_EVERY_NS);
        self.idle.appended(self.log.last().map_or(Hlc(0), |last| last.effective));
        self.off_ns = rng.below(2 * EPSILON_NS + 1).cast_signed() - EPSILON_NS.cast_signed();
        let unacked_max = 1 + rng.below(40);
        let terms = Terms { replicas: self.replicas, unacked_max, patience_ns: PATIENCE_NS };
        let psa = Psa::new(terms);
        let (to_backup, from_backup) = (Mail::default(), Mail::default());
        self.agents_made += 1;
        let id = self.agents_made;
        self.agents.push(Agent { id, psa, frozen: None, to_backup, from_backup });
    }

    /// The leader dies or is cut off. What it had not committed may be lost, and fails for its clients.
    pub(super) fn change_leader(&mut self, rng: &mut Rng) {
        if let Some(agent) = self.agents.last_mut() {
            agent.frozen = Some((self.log.clone(), self.commit));
        }
        if rng.chance(1, 2) || self.agents.len() > 2 {
            self.agents.remove(0);
        }
        let kept = rng.range(self.commit as u64..self.log.len() as u64 + 1);
        self.log.truncate(kept as usize);
        self.begun.clear();
        self.lead(rng);
    }

    fn clock(&self, now: u64) -> u64 {
        now.saturating_add_signed(self.off_ns)
    }

    /// An append begins: here the store takes the stamp, the latest that it can be now.
    pub(super) fn begin(&mut self, op: Option<usize>, now: u64, rng: &mut Rng) {
        let stamp = Hlc(self.clock(now) + EPSILON_NS);
        self.begun.push(Begun { at: now + rng.span(40_000), stamp, op });
    }

    /// Places what is due, commits some, and completes what may be answered. `heard`: the last stamp of any shard's update.
    pub(super) fn step(&mut self, now: u64, heard: Hlc, ops: &mut [Op], rng: &mut Rng) {
        while let Some(at) = self.begun.iter().position(|begun| begun.at <= now) {
            let Begun { stamp, op, .. } = self.begun.remove(at);
            let last = self.log.last();
            let end = last.map_or(0, |last| last.entry.end.0) + 1 + rng.below(3);
            let effective = stamp.max(last.map_or(Hlc(0), |last| last.effective));
            let data = op.map_or(u64::MAX, |op| op as u64).to_le_bytes();
            let data = Payload::new(data.to_vec().into());
            let entry = Entry { nop: op.is_none(), ..Entry::update(LogIndex(end), stamp, data) };
            self.log.push(Placed { entry, effective, op });
            self.idle.appended(effective);
        }
        if self.commit < self.log.len() && rng.chance(1, 3) {
            self.commit += 1 + rng.index(self.log.len() - self.commit);
        }
        // Commit wait: the reply leaves when the clock has passed the stamp for sure.
        let passed = self.clock(now).saturating_sub(EPSILON_NS);
        while let Some(placed) = self.log[self.answered..self.commit].first()
            && placed.effective < Hlc(passed)
        {
            if let Some(op) = placed.op {
                ops[op].visible = Some(now);
            }
            self.answered += 1;
        }
        self.idle.heard(heard);
        if self.idle.poll(MonoNanos(now)) {
            self.begin(None, now, rng);
        }
    }

    /// Agents read and send.
    pub(super) fn ship(&mut self, now: u64, faults: bool, rng: &mut Rng) -> Checked {
        let (log, commit) = (&self.log, self.commit);
        for agent in &mut self.agents {
            let (log, commit) =
                agent.frozen.as_ref().map_or((log, commit), |(log, commit)| (log, *commit));
            if let Some(last) = log[..commit].last() {
                agent.psa.committed(last.entry.end, MonoNanos(now));
            }
            // More than one message may be under way.
            for _ in 0..3 {
                let message = match agent.psa.poll(MonoNanos(now)) {
                    None => break,
                    Some(Step::Ask { .. }) => Some(agent.psa.question()),
                    Some(Step::Read { after, up_to }) => {
                        let begin = log.partition_point(|placed| placed.entry.end <= after);
                        let entries = log[begin..].iter().map(|placed| placed.entry.clone());
                        let entries = entries.take_while(|entry| entry.end <= up_to);
                        let entries: Vec<_> = entries.take(1 + rng.index(6)).collect();
                        match agent.psa.send(entries) {
                            Ok(message) => message,
                            Err(error) => return fail(Checker::ShardLog, error.to_string()),
                        }
                    }
                };
                let Some(message) = message else { break };
                let to = agent.psa.replica();
                agent.to_backup.send((to, message), now, DELAY_NS, faults, rng);
            }
        }
        Ok(())
    }

    /// Messages that have arrived at the backup, with the agent's number.
    pub(super) fn arrived(&mut self, now: u64) -> Vec<(u64, u16, Backup)> {
        let mut arrived = Vec::new();
        for agent in &mut self.agents {
            while let Some((replica, message)) = agent.to_backup.take(now) {
                arrived.push((agent.id, replica, message));
            }
        }
        arrived
    }

    /// A replica of the backup answers to an agent, which may be gone.
    pub(super) fn answer(
        &mut self,
        agent: u64,
        from: u16,
        reply: Reply,
        now: u64,
        faults: bool,
        rng: &mut Rng,
    ) {
        if let Some(agent) = self.agents.iter_mut().find(|of| of.id == agent) {
            agent.from_backup.send((from, reply), now, DELAY_NS, faults, rng);
        }
    }

    /// Answers arrive. `safe`: the end of what the backup has committed.
    pub(super) fn answered(&mut self, now: u64, safe: LogIndex) -> Checked {
        for agent in &mut self.agents {
            while let Some((from, reply)) = agent.from_backup.take(now) {
                if let Err(error) = agent.psa.received(from, &reply, MonoNanos(now)) {
                    return fail(Checker::ShardLog, error.to_string());
                }
                let b_commit = agent.psa.b_commit();
                check(b_commit <= safe, Checker::ShardLog, || {
                    format!(
                        "b-commit is {b_commit}, and the backup has committed {safe}: a trimmed log would have a gap"
                    )
                })?;
            }
        }
        Ok(())
    }

    /// The last stamp of an update, for shards that are idle.
    pub(super) fn last_update(&self) -> Hlc {
        let updates = self.log.iter().rev().find(|placed| placed.op.is_some());
        updates.map_or(Hlc(0), |placed| placed.effective)
    }

    /// The connection of the leader's agent is new.
    pub(super) fn reconnect(&mut self) {
        if let Some(agent) = self.agents.last_mut() {
            agent.psa.reconnected();
        }
    }

    /// Lag of the backup behind what is committed at home, for people.
    pub(super) fn lag(&self, safe: LogIndex) -> Option<String> {
        let last = self.log[..self.commit].last().map_or(LogIndex(0), |last| last.entry.end);
        (last > safe || self.commit < self.log.len()).then(|| {
            let agent = self.agents.last().map(|agent| &agent.psa);
            format!(
                "committed {last} of {} entries, at the backup {safe}, agent {agent:?}",
                self.log.len()
            )
        })
    }

    /// True if the leader's agent knows that the backup was recovered.
    pub(super) fn is_fenced(&self) -> bool {
        self.agents.last().is_some_and(|agent| agent.psa.is_fenced())
    }
}
