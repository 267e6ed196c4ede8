//! A store whose logs are in Tidelock's journal at the backup site: production's, on a disk that loses what was not synced.

use super::primary::Primary;
use super::site::{From, Replies, Site, check_entry};
use crate::failure::{Checked, Checker, Failure, check, fail};
use crate::rng::Rng;
use bytes::BytesMut;
use std::collections::BTreeSet;
use std::fmt::Debug;
use tidelock_protocol::bounds::CLOCK_BOUND_MS;
use tidelock_protocol::frame::{self, Frame};
use tidelock_protocol::hlc::Hlc;
use tidelock_protocol::ids::Channel;
use tidelock_shard::link::{self, Origin, StoreMessage};
use tidelock_shard::{Backup, LogIndex, Reply, Verdict};
use tidelock_shard_logs::{Limits, Link, Output, ReadError, Recovery, Store, StoreError};
use tidelock_storage::memory::{Faults, Memory, MemoryFile};
use tidelock_store::journal::{Options, SyncJob};

/// Usual time of a sync.
const SYNC_NS: u64 = 100_000;
/// Cuts of the past are looked at so far back.
const PAST_NS: u64 = 20_000_000;
/// Usual time for which the server is away.
const AWAY_NS: u64 = 2_000_000;

/// A shard as the world has seen it.
#[derive(Clone, Copy, Debug, Default)]
struct Seen {
    /// Entries that were read back from the journal, and their end.
    entries: usize,
    safe: LogIndex,
    apply_to: LogIndex,
    /// Up to here entries were given up.
    forgotten: LogIndex,
}

/// The site.
#[derive(Debug)]
pub(super) struct Journalled {
    disk: Memory,
    options: Options,
    limits: Limits,
    /// `None`: the server is away until then.
    store: Result<Store<Memory>, u64>,
    /// Agents that are connected.
    connected: BTreeSet<Link>,
    sync: Option<(u64, SyncJob<MemoryFile>)>,
    seen: Vec<Seen>,
    watermark: Hlc,
    /// The final watermark that was announced.
    last: Option<Hlc>,
    disaster: bool,
    is_recovered: bool,
}

/// An error of a journal whose disk is whole.
fn broken<T>(error: &impl Debug) -> Result<T, Failure> {
    fail(Checker::ShardLog, format!("the journal of the store: {error:?}"))
}

fn names(shards: usize) -> Vec<String> {
    (0..shards).map(|shard| format!("s{shard}")).collect()
}

/// Each agent has a connection of its own.
fn link_of(from: From) -> Link {
    Link(from.agent << 16 | from.shard as u64)
}

fn from_of(Link(link): Link) -> From {
    From { shard: (link & 0xffff) as usize, agent: link >> 16, replica: 0 }
}

impl Journalled {
    pub(super) fn new(shards: usize, rng: &mut Rng) -> Self {
        let disk = Memory::new();
        let options = Options { segment_bytes: 500 + rng.below(20_000) };
        let limits =
            Limits { taken_max_bytes: 200 + rng.index(20_000), waiting_max: 5 + rng.index(500) };
        let names = names(shards);
        let store = Store::create(disk.clone(), "store", &names, options, limits, CLOCK_BOUND_MS);
        Self {
            store: Ok(store.expect("the disk is whole")),
            connected: BTreeSet::new(),
            disk,
            options,
            limits,
            sync: None,
            seen: vec![Seen::default(); shards],
            watermark: Hlc(0),
            last: None,
            disaster: false,
            is_recovered: false,
        }
    }

    /// The server dies, and mostly its machine with it.
    fn dies(&mut self, now: u64, rng: &mut Rng) {
        self.disk = if rng.chance(1, 3) {
            self.disk.killed()
        } else {
            self.disk.crash(&mut || rng.chance(1, 2))
        };
        self.disk.set_faults(Faults::default());
        (self.sync, self.is_recovered) = (None, false);
        self.connected.clear();
        self.store = Err(now + rng.span(AWAY_NS));
    }

    /// Takes what the store sends: replies to agents.
    fn sent(&mut self) -> Result<Replies, Failure> {
        let Ok(store) = &mut self.store else { return Ok(Vec::new()) };
        let mut replies = Vec::new();
        for output in store.take_outputs() {
            match output {
                Output::Send { link, message: StoreMessage::Reply(reply), .. } => {
                    replies.push((from_of(link), reply));
                }
                Output::Send { .. } | Output::Advanced(_) | Output::Tunnel(..) => {}
                Output::Final(watermark) => self.last = Some(watermark),
                Output::End { why, .. } => return broken(&why),
            }
        }
        Ok(replies)
    }

    /// The agent connects, unless it is connected.
    fn connect(&mut self, link: Link, shard: usize, now_ms: u64) -> Checked {
        let Ok(store) = &mut self.store else { return Ok(()) };
        if !self.connected.contains(&link) {
            store.connected(link, "host", &names(self.seen.len())).or_else(|why| broken(&why))?;
            let origin = StoreMessage::Origin(Origin::default());
            store.received(link, Frame::Control(Channel(shard as u16), origin), now_ms);
            // A full disk keeps the shard's log from the record: its agent comes again.
            if store.origin_of(shard as u16).is_none() {
                store.take_outputs();
                return Ok(());
            }
            self.connected.insert(link);
        }
        Ok(())
    }

    /// Work that was not done for a while is done, in part.
    fn work(&mut self, now: u64, rng: &mut Rng) -> Checked {
        let Ok(store) = &mut self.store else { return Ok(()) };
        if rng.chance(1, 2) {
            match store.write() {
                // A full disk. What was taken waits.
                Err(StoreError::Journal(_)) if self.disk.faults().capacity_bytes.is_some() => {}
                Err(error) => return broken(&error),
                Ok(()) => {}
            }
        }
        if store.log().final_watermark().is_some() && rng.chance(1, 4) {
            let shard = rng.index(self.seen.len()) as u16;
            self.is_recovered |= store.ready(shard);
        }
        if self.sync.is_none() {
            self.sync = store.sync_job().map(|job| (now + rng.span(SYNC_NS), job));
        }
        let Some((_, job)) = self.sync.take_if(|(due, _)| *due <= now) else {
            return Ok(());
        };
        store.synced(job.run()).or_else(|error| broken(&error))
    }

    /// Checks that the journal says what the primary has committed and loses nothing that it has promised, and that each
    /// of its pasts is a cut of the primary's logs. Returns whether more may be applied.
    fn look(&mut self, primary: &[Primary], rng: &mut Rng) -> Result<bool, Failure> {
        let Ok(store) = &self.store else { return Ok(false) };
        let log = store.log();
        let mut advanced = false;
        for (shard, (seen, primary)) in self.seen.iter_mut().zip(primary).enumerate() {
            let number = shard as u16;
            let safe =
                log.standing(number).map(|standing| standing.commit.index).unwrap_or_default();
            let apply_to = log.apply_to(number).unwrap_or_default();
            check(safe >= seen.safe && apply_to >= seen.apply_to, Checker::ShardLog, || {
                format!("shard {shard}: committed {safe}, may apply {apply_to}, after {seen:?}")
            })?;
            let read = log.entries(number, seen.safe, safe).or_else(|error| broken(&error))?;
            for entry in read {
                let entry = entry.or_else(|error| broken(&error))?;
                check_entry(primary, seen.entries, &entry)?;
                seen.entries += 1;
                seen.safe = entry.end;
            }
            check(seen.safe == safe, Checker::ShardLog, || {
                format!(
                    "shard {shard}: {safe} is committed, and entries up to {} are there",
                    seen.safe
                )
            })?;
            advanced |= apply_to > seen.apply_to;
            seen.apply_to = apply_to;
        }
        let watermark = log.watermark().unwrap_or_default();
        check(watermark >= self.watermark, Checker::ShardPrefix, || {
            format!("the watermark goes from {} back to {watermark}", self.watermark)
        })?;
        self.watermark = watermark;
        if let (Some(last), Some(now)) = (self.last, log.final_watermark()) {
            check(last == now, Checker::ShardPrefix, || {
                format!("the final watermark is {last}, and then {now}")
            })?;
        }
        if rng.chance(1, 64) {
            self.look_back(primary, rng)?;
        }
        Ok(advanced)
    }

    /// A cut of the past.
    fn look_back(&self, primary: &[Primary], rng: &mut Rng) -> Checked {
        let Ok(store) = &self.store else { return Ok(()) };
        let log = store.log();
        let back = rng.below(PAST_NS.min(self.watermark.0) + 1);
        let stamp = Hlc(self.watermark.0 - back);
        let cut = match log.cut_at(stamp) {
            Ok(cut) => cut,
            Err(ReadError::Forgotten) if self.seen.iter().any(|of| of.forgotten > LogIndex(0)) => {
                return Ok(());
            }
            Err(error) => return broken(&error),
        };
        for (shard, (primary, end)) in primary.iter().zip(cut.ends).enumerate() {
            let log = &primary.log[..self.seen[shard].entries];
            let inside = log.iter().rfind(|placed| placed.effective <= stamp);
            let expected = inside.map_or(LogIndex(0), |placed| placed.entry.end);
            check(end == expected, Checker::ShardPrefix, || {
                format!("shard {shard}: the cut at {stamp} ends at {end}, and not at {expected}")
            })?;
        }
        Ok(())
    }

    /// Some of what is applied may go.
    fn forget(&mut self, rng: &mut Rng) -> Checked {
        let Ok(store) = &mut self.store else { return Ok(()) };
        let ends = self.seen.iter().map(|of| LogIndex(rng.below(of.apply_to.0 + 1)));
        let ends: Vec<_> = ends.collect();
        for (seen, end) in self.seen.iter_mut().zip(&ends) {
            seen.forgotten = seen.forgotten.max(*end);
        }
        store.forget(&ends).or_else(|error| broken(&error))
    }

    /// Everything that is needed can be read, from a random place on.
    fn reopen(&mut self, primary: &[Primary], rng: &mut Rng) -> Checked {
        let opened = Store::open(self.disk.clone(), self.options, self.limits, CLOCK_BOUND_MS);
        let store = match opened {
            Ok(Some((store, _))) => store,
            Ok(None) => return broken(&"the store is gone"),
            // The journal is opened again when there is room.
            Err(_) if self.disk.faults().capacity_bytes.is_some() => return Ok(()),
            Err(error) => return broken(&error),
        };
        for (shard, (seen, primary)) in self.seen.iter().zip(primary).enumerate() {
            let from = LogIndex(rng.range(seen.forgotten.0..seen.safe.0.max(seen.forgotten.0) + 1));
            let read = store
                .log()
                .entries(shard as u16, from, seen.safe)
                .or_else(|error| broken(&error))?;
            let mut nth = primary.log.partition_point(|placed| placed.entry.end <= from);
            for entry in read {
                check_entry(primary, nth, &entry.or_else(|error| broken(&error))?)?;
                nth += 1;
            }
            check(nth >= seen.entries, Checker::ShardLog, || {
                format!(
                    "shard {shard}: {} entries were committed, and {nth} are left",
                    seen.entries
                )
            })?;
        }
        self.store = Ok(store);
        Ok(())
    }
}

impl Site for Journalled {
    fn replicas(&self) -> u16 {
        1
    }

    fn received(&mut self, from: From, message: Backup, now: u64) -> Result<Replies, Failure> {
        let (link, now_ms) = (link_of(from), Hlc(now).physical_ms());
        self.connect(link, from.shard, now_ms)?;
        let Ok(store) = &mut self.store else { return Ok(Vec::new()) };
        let closed = store.log().journal().state().recovered().is_some();
        let has_entries = !message.entries.is_empty();
        let mut bytes = BytesMut::new();
        link::encode(from.shard as u16, &message, &mut bytes).or_else(|error| broken(&error))?;
        while let Some(frame) = frame::decode_of(&mut bytes).or_else(|error| broken(&error))? {
            store.received(link, frame, now_ms);
        }
        let replies = self.sent()?;
        let taken = |(_, reply): &(From, Reply)| matches!(reply.verdict, Verdict::Taken(_));
        check(!(closed && has_entries && replies.iter().any(taken)), Checker::ShardPrefix, || {
            "an entry of the old primary is taken after a recovery has closed the log".to_owned()
        })?;
        Ok(replies)
    }

    fn step(
        &mut self,
        primary: &[Primary],
        now: u64,
        faults: bool,
        rng: &mut Rng,
        replies: &mut Replies,
    ) -> Result<bool, Failure> {
        if let Err(until) = &self.store
            && (*until <= now || !faults)
        {
            self.reopen(primary, rng)?;
        }
        if self.disaster
            && let Ok(store) = &mut self.store
        {
            // The operator asks again, if the server died before the mark was durable.
            store.recover(Recovery { at_unix_ms: 1, primary_declared_dead: true });
        }
        self.work(now, rng)?;
        let advanced = self.look(primary, rng)?;
        replies.extend(self.sent()?);
        Ok(advanced)
    }

    fn fault(&mut self, now: u64, rng: &mut Rng) -> Checked {
        match rng.below(12) {
            0..3 if self.store.is_ok() => self.dies(now, rng),
            3..7 => return self.forget(rng),
            7..9 => {
                let capacity_bytes = Some(self.disk.used_bytes() + rng.below(300));
                self.disk.set_faults(Faults { capacity_bytes, ..Faults::default() });
            }
            _ => self.disk.set_faults(Faults::default()),
        }
        Ok(())
    }

    fn calm(&mut self) {
        self.disk.set_faults(Faults::default());
    }

    fn recover(&mut self) {
        self.disaster = true;
    }

    fn committed(&self) -> usize {
        self.seen.iter().map(|of| of.entries).sum()
    }

    fn safe(&self, shard: usize) -> LogIndex {
        self.seen[shard].safe
    }

    fn apply_to(&self, shard: usize) -> LogIndex {
        self.seen[shard].apply_to
    }

    fn is_recovered(&self) -> bool {
        self.is_recovered
    }

    fn recovered(&self, _: usize) -> Option<Hlc> {
        self.store.as_ref().ok()?.log().final_watermark()
    }
}
