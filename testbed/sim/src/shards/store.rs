//! The store as a whole: clients, faults, the watermark service, the disaster, and what must be true.

use super::journalled::Journalled;
use super::primary::Primary;
use super::replicated::Replicated;
use super::site::{From, Site};
use crate::failure::{Checked, Checker, check};
use crate::rng::Rng;
use tidelock_protocol::hlc::Hlc;
use tidelock_shard::LogIndex;

/// The most that a clock is off.
pub(super) const EPSILON_NS: u64 = 10_000;
/// Time of one way between the sites.
pub(super) const DELAY_NS: u64 = 500_000;
/// An agent asks after so long.
pub(super) const PATIENCE_NS: u64 = 4 * DELAY_NS;
/// A client that has no reply goes on to something else.
const GIVES_UP_NS: u64 = 3_000_000;
/// A step of the simulation takes so long at most.
const STEP_NS: u64 = 20_000;
/// Steps with faults.
const STEPS: u64 = 3000;
/// Without faults the backup commits something within so many steps, until everything has come back.
const CALM_STEPS: u64 = 20_000;

/// A write of a client.
#[derive(Clone, Debug)]
pub(super) struct Op {
    /// Time at which the client asked for it.
    asked: u64,
    /// Time from which its client, or a reader, could know of it.
    pub(super) visible: Option<u64>,
}

/// A store.
#[derive(Debug)]
pub(super) struct Store {
    rng: Rng,
    now: u64,
    faults: bool,
    busy: bool,
    primary: Vec<Primary>,
    backup: Box<dyn Site>,
    ops: Vec<Op>,
    /// The operation of each client.
    clients: Vec<Option<usize>>,
    disaster: bool,
    /// In a disaster the primary site is gone, or was only cut off.
    primary_lives: bool,
}

impl Store {
    pub(super) fn new(mut rng: Rng) -> Self {
        let shards = 2 + rng.index(4);
        let replicas = 2 + rng.index(2) as u16;
        let clients = 1 + rng.index(6);
        // A store that has a log of its own at the backup, or one whose logs are in Tidelock's journal there.
        let backup: Box<dyn Site> = match rng.chance(1, 2) {
            true => Box::new(Replicated::new(shards, replicas)),
            false => Box::new(Journalled::new(shards, &mut rng)),
        };
        let primary = (0..shards).map(|_| Primary::new(backup.replicas(), &mut rng)).collect();
        Self {
            now: 1_000_000_000,
            faults: true,
            busy: true,
            primary,
            backup,
            ops: Vec::new(),
            clients: vec![None; clients],
            disaster: false,
            primary_lives: true,
            rng,
        }
    }

    pub(super) fn updates(&self) -> u64 {
        self.ops.len() as u64
    }

    pub(super) fn is_recovered(&self) -> bool {
        self.disaster
    }

    /// Runs the store from beginning to end.
    pub(super) fn live(&mut self) -> Checked {
        let disaster_at = self.rng.chance(2, 3).then(|| self.rng.range(STEPS / 2..STEPS));
        for step in 0..STEPS {
            if disaster_at == Some(step) {
                self.disaster = true;
                self.primary_lives = self.rng.chance(1, 2);
                self.backup.recover();
            }
            self.fault()?;
            self.step()?;
        }
        (self.faults, self.busy) = (false, false);
        self.backup.calm();
        self.primary.iter_mut().for_each(Primary::reconnect);
        let (mut committed, mut steps) = (0, 0);
        while let Some(why) = self.restless() {
            let now = self.backup.committed();
            steps = if now > committed { 0 } else { steps + 1 };
            committed = now;
            check(steps < CALM_STEPS, Checker::ShardsComeBack, || why)?;
            self.step()?;
        }
        if self.disaster { self.check_recovered() } else { Ok(()) }
    }

    fn fault(&mut self) -> Checked {
        let shard = self.rng.index(self.primary.len());
        match self.rng.below(1000) {
            0..4 if self.primary_lives => self.primary[shard].change_leader(&mut self.rng),
            4..8 => self.primary[shard].reconnect(),
            8..26 => self.backup.fault(self.now, &mut self.rng)?,
            _ => {}
        }
        Ok(())
    }

    fn step(&mut self) -> Checked {
        self.now += 1 + self.rng.below(STEP_NS);
        let (now, faults) = (self.now, self.faults);
        if self.primary_lives {
            self.write();
            let heard: Hlc =
                self.primary.iter().map(Primary::last_update).max().unwrap_or_default();
            for primary in &mut self.primary {
                primary.step(now, heard, &mut self.ops, &mut self.rng);
                primary.ship(now, faults, &mut self.rng)?;
            }
        }
        let mut replies = Vec::new();
        for (shard, primary) in self.primary.iter_mut().enumerate() {
            for (agent, replica, message) in primary.arrived(now) {
                replies.extend(self.backup.received(
                    From { shard, agent, replica },
                    message,
                    now,
                )?);
            }
        }
        let advanced = self.backup.step(&self.primary, now, faults, &mut self.rng, &mut replies)?;
        for (From { shard, agent, replica }, reply) in replies {
            self.primary[shard].answer(agent, replica, reply, now, faults, &mut self.rng);
        }
        if self.primary_lives {
            for (shard, primary) in self.primary.iter_mut().enumerate() {
                primary.answered(now, self.backup.safe(shard))?;
            }
        }
        if advanced { self.check_prefix(|shard| self.backup.safe(shard)) } else { Ok(()) }
    }

    /// Clients write, each one thing after another.
    fn write(&mut self) {
        for client in 0..self.clients.len() {
            let waits = self.clients[client].is_some_and(|op| {
                self.ops[op].visible.is_none() && self.now < self.ops[op].asked + GIVES_UP_NS
            });
            if waits || !self.busy || !self.rng.chance(1, 8) {
                continue;
            }
            let op = self.ops.len();
            self.ops.push(Op { asked: self.now, visible: None });
            self.clients[client] = Some(op);
            // Some shards are nearly idle.
            let shards = self.primary.len();
            let shard = self.rng.index(shards).min(self.rng.index(shards));
            self.primary[shard].begin(Some(op), self.now, &mut self.rng);
        }
    }

    /// Rule 13: with an operation that is applied, all are there that were known before it was asked for. Shards hear of
    /// one watermark at different times, so until a recovery it is enough that they may be applied (Slogger 4).
    /// `available`: up to where, of each shard.
    fn check_prefix(&self, available: impl Fn(usize) -> LogIndex) -> Checked {
        let inside = self.primary.iter().enumerate().flat_map(|(shard, primary)| {
            let to = self.backup.apply_to(shard);
            let applied = primary.log.iter().filter(move |placed| placed.entry.end <= to);
            applied.filter_map(|placed| placed.op)
        });
        let Some(last) = inside.max_by_key(|op| self.ops[*op].asked) else { return Ok(()) };
        for (shard, primary) in self.primary.iter().enumerate() {
            let to = available(shard);
            let beyond = primary.log.iter().filter(|placed| placed.entry.end > to);
            for placed in beyond {
                let known = placed.op.and_then(|op| self.ops[op].visible);
                check(
                    known.is_none_or(|known| known >= self.ops[last].asked),
                    Checker::ShardPrefix,
                    || {
                        format!(
                            "operation {last} is applied, which was asked for at {}; {placed:?} of shard {shard} was known at \
                         {known:?}, and only what ends at {to} is there",
                            self.ops[last].asked
                        )
                    },
                )?;
            }
        }
        Ok(())
    }

    /// Work that is still to come, if any.
    fn restless(&self) -> Option<String> {
        if !self.disaster {
            for (shard, primary) in self.primary.iter().enumerate() {
                if let Some(lag) = primary.lag(self.backup.safe(shard)) {
                    return Some(format!("shard {shard}: {lag}"));
                }
                let last = primary.log.iter().rev().find(|placed| placed.op.is_some());
                let missing = last.filter(|last| last.entry.end > self.backup.apply_to(shard));
                if let Some(missing) = missing {
                    return Some(format!("shard {shard}: {missing:?} may not be applied"));
                }
            }
            return None;
        }
        if !self.backup.is_recovered() {
            return Some("not every shard is recovered".to_owned());
        }
        let learns = |primary: &Primary| !self.primary_lives || primary.is_fenced();
        let late = self.primary.iter().position(|primary| !learns(primary));
        late.map(|shard| format!("shard {shard} of the old primary does not know of the recovery"))
    }

    /// Checks that every shard is recovered at one cut.
    fn check_recovered(&self) -> Checked {
        let shards = 0..self.primary.len();
        let finals: Vec<_> = shards.map(|shard| self.backup.recovered(shard)).collect();
        let same = finals.iter().all(|of| of.is_some() && *of == finals[0]);
        check(same, Checker::ShardPrefix, || format!("final watermarks differ: {finals:?}"))?;
        self.check_prefix(|shard| self.backup.apply_to(shard))
    }
}
