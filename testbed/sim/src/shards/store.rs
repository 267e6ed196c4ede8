//! The store as a whole: clients, faults, the watermark service, the disaster, and what must be true.

use super::backup::BackupShard;
use super::primary::Primary;
use crate::failure::{Checked, Checker, check, fail};
use crate::rng::Rng;
use tidelock_protocol::hlc::Hlc;
use tidelock_shard::{LogIndex, WatermarkService};

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
    backup: Vec<BackupShard>,
    ops: Vec<Op>,
    /// The operation of each client.
    clients: Vec<Option<usize>>,
    services: Vec<WatermarkService>,
    disaster: bool,
    /// In a disaster the primary site is gone, or was only cut off.
    primary_lives: bool,
}

impl Store {
    pub(super) fn new(mut rng: Rng) -> Self {
        let shards = 2 + rng.index(4);
        let replicas = 2 + rng.index(2) as u16;
        let clients = 1 + rng.index(6);
        let primary = (0..shards).map(|_| Primary::new(replicas, &mut rng)).collect();
        let mut store = Self {
            now: 1_000_000_000,
            faults: true,
            busy: true,
            primary,
            backup: (0..shards).map(|_| BackupShard::new(replicas)).collect(),
            ops: Vec::new(),
            clients: vec![None; clients],
            services: Vec::new(),
            disaster: false,
            primary_lives: true,
            rng,
        };
        store.serve();
        store
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
                self.services.iter_mut().for_each(WatermarkService::recover);
            }
            self.fault()?;
            self.step()?;
        }
        (self.faults, self.busy) = (false, false);
        self.backup.iter_mut().for_each(BackupShard::depose);
        self.primary.iter_mut().for_each(Primary::reconnect);
        let (mut committed, mut steps) = (0, 0);
        while let Some(why) = self.restless() {
            let now = self.backup.iter().map(|shard| shard.entries).sum();
            steps = if now > committed { 0 } else { steps + 1 };
            committed = now;
            check(steps < CALM_STEPS, Checker::ShardsComeBack, || why)?;
            self.step()?;
        }
        if self.disaster { self.check_recovered() } else { Ok(()) }
    }

    /// A watermark service begins.
    fn serve(&mut self) {
        let mut service = WatermarkService::new(self.backup.len() as u16);
        if self.disaster {
            service.recover();
        }
        self.services.push(service);
    }

    fn fault(&mut self) -> Checked {
        let shard = self.rng.index(self.primary.len());
        match self.rng.below(1000) {
            0..4 if self.primary_lives => self.primary[shard].change_leader(&mut self.rng),
            4..8 => self.backup[shard].change_leader(&mut self.rng),
            8..14 => self.backup[shard].depose(),
            14..18 => self.primary[shard].reconnect(),
            18..21 => {
                self.services.remove(0);
                self.serve();
            }
            // Somebody takes the service for dead that is not.
            21..23 if self.services.len() < 2 => self.serve(),
            23..26 if self.services.len() > 1 => {
                self.services.remove(0);
            }
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
        for (primary, backup) in self.primary.iter_mut().zip(&mut self.backup) {
            for (agent, replica, message) in primary.arrived(now) {
                let reply = backup.received(replica, message)?;
                primary.answer(agent, replica, reply, now, faults, &mut self.rng);
            }
            backup.step((&primary.log, primary.commit), &mut self.rng)?;
            if self.primary_lives {
                primary.answered(now, backup.safe())?;
            }
        }
        let mut advanced = false;
        for backup in &mut self.backup {
            if self.rng.chance(1, 4) {
                backup.report(now, faults, &mut self.rng);
            }
            advanced |= backup.obey(now)?;
        }
        self.serve_shards()?;
        if advanced { self.check_prefix(BackupShard::safe) } else { Ok(()) }
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

    /// Watermark services hear of shards, and tell them.
    fn serve_shards(&mut self) -> Checked {
        let (now, faults) = (self.now, self.faults);
        for shard in 0..self.backup.len() {
            for report in self.backup[shard].reported(now) {
                for service in &mut self.services {
                    let changed = match service.reported(shard as u16, report) {
                        Ok(changed) => changed,
                        Err(error) => return fail(Checker::ShardLog, error.to_string()),
                    };
                    let Some(order) = service.order() else { continue };
                    for (other, backup) in self.backup.iter_mut().enumerate() {
                        if changed || other == shard {
                            backup.order(order, now, faults, &mut self.rng);
                        }
                    }
                }
            }
        }
        Ok(())
    }

    /// Rule 13: with an operation that is applied, all are there that were known before it was asked for. Shards hear of
    /// one watermark at different times, so until a recovery it is enough that they may be applied (Slogger 4).
    /// `available`: up to where, of each shard.
    fn check_prefix(&self, available: impl Fn(&BackupShard) -> LogIndex) -> Checked {
        let inside = self.primary.iter().zip(&self.backup).flat_map(|(primary, backup)| {
            let applied = primary.log.iter().filter(|placed| placed.entry.end <= backup.apply_to());
            applied.filter_map(|placed| placed.op)
        });
        let Some(last) = inside.max_by_key(|op| self.ops[*op].asked) else { return Ok(()) };
        for (shard, (primary, backup)) in self.primary.iter().zip(&self.backup).enumerate() {
            let to = available(backup);
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
            for (shard, (primary, backup)) in self.primary.iter().zip(&self.backup).enumerate() {
                if let Some(lag) = primary.lag(backup.safe()) {
                    return Some(format!("shard {shard}: {lag}"));
                }
                let last = primary.log.iter().rev().find(|placed| placed.op.is_some());
                let missing = last.filter(|last| last.entry.end > backup.apply_to());
                if let Some(missing) = missing {
                    return Some(format!("shard {shard}: {missing:?} may not be applied"));
                }
            }
            return None;
        }
        let ready = self.services.iter().any(WatermarkService::is_recovered);
        if !ready {
            return Some(format!("not every shard is recovered: {:?}", self.services));
        }
        let learns = |primary: &Primary| !self.primary_lives || primary.is_fenced();
        let late = self.primary.iter().position(|primary| !learns(primary));
        late.map(|shard| format!("shard {shard} of the old primary does not know of the recovery"))
    }

    /// Checks that every shard is recovered at one cut.
    fn check_recovered(&self) -> Checked {
        let finals: Vec<_> = self.backup.iter().map(|shard| shard.recovered).collect();
        let same = finals.iter().all(|of| of.is_some() && *of == finals[0]);
        check(same, Checker::ShardPrefix, || format!("final watermarks differ: {finals:?}"))?;
        self.check_prefix(BackupShard::apply_to)
    }
}
