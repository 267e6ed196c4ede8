//! A store that has logs of its own at the backup site: replicated, with an agent at each replica.

use super::mail::Mail;
use super::primary::Primary;
use super::site::{From, Replies, Site, check_entry};
use super::store::DELAY_NS;
use crate::failure::{Checked, Checker, Failure, check, fail};
use crate::rng::Rng;
use tidelock_protocol::hlc::Hlc;
use tidelock_shard::{
    ApplyTo, Backup, Bsa, Closing, Entry, LogIndex, LogPoint, Order, Reply, Report, Standing, Todo,
    WatermarkService,
};

/// Item of the log of a backup shard.
#[derive(Clone, Debug)]
enum Item {
    Entry(Entry),
    /// A recovery has closed it here.
    Closed,
}

/// A shard.
#[derive(Debug)]
struct BackupShard {
    log: Vec<Item>,
    /// Items that are committed.
    commit: usize,
    replicas: Vec<Bsa>,
    leader: usize,
    /// Entries that the leader may apply.
    apply: ApplyTo,
    /// Committed entries, and how many of the primary's they are.
    entries: usize,
    to_service: Mail<Report>,
    from_service: Mail<Order>,
    /// The last order to advance.
    advanced: Hlc,
    /// The final watermark, once it was obeyed.
    recovered: Option<Hlc>,
}

impl BackupShard {
    fn new(replicas: u16) -> Self {
        let mut replicas = vec![Bsa::following(); replicas.into()];
        replicas[0] = Bsa::leading(Standing::default(), Closing::Open);
        Self {
            log: Vec::new(),
            commit: 0,
            replicas,
            leader: 0,
            apply: ApplyTo::default(),
            entries: 0,
            to_service: Mail::default(),
            from_service: Mail::default(),
            advanced: Hlc(0),
            recovered: None,
        }
    }

    /// A message of an agent of the primary arrives at a replica.
    fn received(&mut self, replica: u16, message: Backup) -> Result<Reply, Failure> {
        let replica = usize::from(replica);
        let received = self.replicas[replica].received(message);
        let received =
            received.or_else(|error| fail(Checker::ShardLog, format!("refused: {error}")))?;
        // A replica that was deposed goes on as if it led, and what it appends is never committed.
        if replica == self.leader {
            check(
                received.append.is_empty() || self.closing() == Closing::Open,
                Checker::ShardPrefix,
                || {
                    "an entry of the old primary is taken after a recovery has closed the log"
                        .to_owned()
                },
            )?;
            self.log.extend(received.append.into_iter().map(Item::Entry));
        }
        Ok(received.reply)
    }

    /// The end of what is in the log up to some item.
    fn point(&self, items: usize) -> LogPoint {
        let entry = self.log[..items].iter().rev().find_map(|item| match item {
            Item::Entry(entry) => Some(entry.point()),
            Item::Closed => None,
        });
        entry.unwrap_or_default()
    }

    /// Progress of the mark of a recovery.
    fn closing(&self) -> Closing {
        match self.log.iter().position(|item| matches!(item, Item::Closed)) {
            None => Closing::Open,
            Some(at) if at < self.commit => Closing::Closed,
            Some(_) => Closing::Appended,
        }
    }

    /// Another replica leads. What was not committed may be lost.
    fn change_leader(&mut self, rng: &mut Rng) {
        let kept = rng.range(self.commit as u64..self.log.len() as u64 + 1);
        self.log.truncate(kept as usize);
        // The old one may not know it yet.
        if rng.chance(1, 2) {
            self.replicas[self.leader] = Bsa::following();
        }
        self.leader = (self.leader + 1 + rng.index(self.replicas.len() - 1)) % self.replicas.len();
        let log = Standing { append: self.point(self.log.len()), commit: self.point(self.commit) };
        self.replicas[self.leader] = Bsa::leading(log, self.closing());
        let applied = self.apply.apply_to();
        self.apply = ApplyTo::after(applied);
        for item in &self.log[..self.commit] {
            if let Item::Entry(entry) = item
                && entry.end > applied
            {
                self.apply.committed(entry.point());
            }
        }
        self.advanced = Hlc(0);
    }

    /// Replicas that were deposed find it out.
    fn depose(&mut self) {
        for (number, replica) in self.replicas.iter_mut().enumerate() {
            if number != self.leader {
                *replica = Bsa::following();
            }
        }
    }

    /// Commits some of the log.
    fn step(&mut self, primary: &Primary, rng: &mut Rng) -> Checked {
        if self.commit == self.log.len() || !rng.chance(1, 3) {
            return Ok(());
        }
        let before = self.commit;
        self.commit += 1 + rng.index(self.log.len() - self.commit);
        for item in &self.log[before..self.commit] {
            let bsa = &mut self.replicas[self.leader];
            match item {
                Item::Closed => bsa.closed(),
                Item::Entry(entry) => {
                    bsa.committed(entry.point());
                    self.apply.committed(entry.point());
                    check_entry(primary, self.entries, entry)?;
                    self.entries += 1;
                }
            }
        }
        Ok(())
    }

    /// Carries out what the service has ordered. True: more may be applied.
    fn obey(&mut self, now: u64) -> Result<bool, Failure> {
        let before = self.apply.apply_to();
        while let Some(order) = self.from_service.take(now) {
            match self.replicas[self.leader].ordered(order) {
                None => {}
                Some(Todo::Close) => self.log.push(Item::Closed),
                Some(Todo::Recover(watermark)) => {
                    let last = *self.recovered.get_or_insert(watermark);
                    check(watermark == last, Checker::ShardPrefix, || {
                        format!("the final watermark is {last}, and then {watermark}")
                    })?;
                    self.apply.advance(watermark);
                    self.replicas[self.leader].recovered();
                }
                Some(Todo::Advance(watermark)) => {
                    let last = std::mem::replace(&mut self.advanced, watermark);
                    check(watermark >= last, Checker::ShardPrefix, || {
                        format!("the watermark goes from {last} back to {watermark}")
                    })?;
                    self.apply.advance(watermark);
                }
            }
        }
        Ok(self.apply.apply_to() > before)
    }

    /// The leader reports.
    fn report(&mut self, now: u64, faults: bool, rng: &mut Rng) {
        if let Some(report) = self.replicas[self.leader].report() {
            self.to_service.send(report, now, DELAY_NS / 16, faults, rng);
        }
        // A replica that was deposed may report, too.
        for replica in &self.replicas {
            if faults
                && rng.chance(1, 16)
                && let Some(report) = replica.report()
            {
                self.to_service.send(report, now, DELAY_NS / 16, faults, rng);
            }
        }
    }

    /// Reports that have arrived.
    fn reported(&mut self, now: u64) -> Vec<Report> {
        std::iter::from_fn(|| self.to_service.take(now)).collect()
    }

    /// The service tells the shard something.
    fn order(&mut self, order: Order, now: u64, faults: bool, rng: &mut Rng) {
        self.from_service.send(order, now, DELAY_NS / 16, faults, rng);
    }

    /// The end of what is committed.
    fn safe(&self) -> LogIndex {
        self.point(self.commit).index
    }

    /// The end of what may be applied.
    fn apply_to(&self) -> LogIndex {
        self.apply.apply_to()
    }
}

/// The site.
#[derive(Debug)]
pub(super) struct Replicated {
    shards: Vec<BackupShard>,
    replicas: u16,
    services: Vec<WatermarkService>,
    disaster: bool,
}

impl Replicated {
    pub(super) fn new(shards: usize, replicas: u16) -> Self {
        let shards = (0..shards).map(|_| BackupShard::new(replicas)).collect();
        let mut site = Self { shards, replicas, services: Vec::new(), disaster: false };
        site.serve();
        site
    }

    /// A watermark service begins.
    fn serve(&mut self) {
        let mut service = WatermarkService::new(self.shards.len() as u16);
        if self.disaster {
            service.recover();
        }
        self.services.push(service);
    }

    /// Watermark services hear of shards, and tell them.
    fn serve_shards(&mut self, now: u64, faults: bool, rng: &mut Rng) -> Checked {
        for shard in 0..self.shards.len() {
            for report in self.shards[shard].reported(now) {
                for service in &mut self.services {
                    let changed = match service.reported(shard as u16, report) {
                        Ok(changed) => changed,
                        Err(error) => return fail(Checker::ShardLog, error.to_string()),
                    };
                    let Some(order) = service.order() else { continue };
                    for (other, backup) in self.shards.iter_mut().enumerate() {
                        if changed || other == shard {
                            backup.order(order, now, faults, rng);
                        }
                    }
                }
            }
        }
        Ok(())
    }
}

impl Site for Replicated {
    fn replicas(&self) -> u16 {
        self.replicas
    }

    fn received(&mut self, from: From, message: Backup, _: u64) -> Result<Replies, Failure> {
        let reply = self.shards[from.shard].received(from.replica, message)?;
        Ok(vec![(from, reply)])
    }

    fn step(
        &mut self,
        primary: &[Primary],
        now: u64,
        faults: bool,
        rng: &mut Rng,
        _: &mut Replies,
    ) -> Result<bool, Failure> {
        let mut advanced = false;
        for (shard, primary) in self.shards.iter_mut().zip(primary) {
            shard.step(primary, rng)?;
            if rng.chance(1, 4) {
                shard.report(now, faults, rng);
            }
            advanced |= shard.obey(now)?;
        }
        self.serve_shards(now, faults, rng)?;
        Ok(advanced)
    }

    fn fault(&mut self, _: u64, rng: &mut Rng) -> Checked {
        let shard = rng.index(self.shards.len());
        match rng.below(18) {
            0..4 => self.shards[shard].change_leader(rng),
            4..10 => self.shards[shard].depose(),
            10..13 => {
                self.services.remove(0);
                self.serve();
            }
            // Somebody takes the service for dead that is not.
            13..15 if self.services.len() < 2 => self.serve(),
            15..18 if self.services.len() > 1 => {
                self.services.remove(0);
            }
            _ => {}
        }
        Ok(())
    }

    fn calm(&mut self) {
        self.shards.iter_mut().for_each(BackupShard::depose);
    }

    fn recover(&mut self) {
        self.disaster = true;
        self.services.iter_mut().for_each(WatermarkService::recover);
    }

    fn committed(&self) -> usize {
        self.shards.iter().map(|shard| shard.entries).sum()
    }

    fn safe(&self, shard: usize) -> LogIndex {
        self.shards[shard].safe()
    }

    fn apply_to(&self, shard: usize) -> LogIndex {
        self.shards[shard].apply_to()
    }

    fn is_recovered(&self) -> bool {
        self.services.iter().any(WatermarkService::is_recovered)
    }

    fn recovered(&self, shard: usize) -> Option<Hlc> {
        self.shards[shard].recovered
    }
}
