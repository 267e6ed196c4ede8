//! The invariant against a slow, obvious model of both sites: a sector in which they can differ after a
//! crash now, with any part of what is unsynced and any part of what is unacknowledged, is in the
//! map that is on stable storage.

use super::*;
use proptest::prelude::*;
use std::collections::{BTreeMap, BTreeSet};

const SECTOR: u64 = 512;
const SECTORS: usize = (64 * EXTENT / SECTOR) as usize;

/// Every value that a sector was given gets a new number, so equal means equal.
type Version = u64;

#[derive(Clone, Debug)]
struct Local {
    live: Vec<Version>,
    durable: Vec<Version>,
}

#[derive(Clone, Debug)]
struct Record {
    disk: usize,
    sector: usize,
    versions: Vec<Version>,
}

#[derive(Debug)]
struct Flush {
    number: u64,
    covers: Vec<Version>,
}

struct Sites {
    log: ActivityLog,
    file: Vec<u8>,
    /// The block under way.
    block: Option<(usize, Vec<u8>)>,
    local: [Local; 2],
    /// What the backup had when the run began, and the run's records after it.
    base: [Vec<Version>; 2],
    base_seq: u64,
    records: Vec<Record>,
    acked: u64,
    requests: BTreeMap<u64, Extent>,
    /// Admitted: the record is given out, the local write is under way.
    writing: BTreeMap<u64, Record>,
    flushes: [Vec<Flush>; 2],
    to_compare: Vec<Extent>,
    marker: Option<u64>,
    whole: bool,
    next: u64,
    incarnation: u64,
    now: MonoNanos,
}

#[derive(Clone, Debug)]
enum Step {
    Write { disk: u16, at: u64, len: u64 },
    LocalDone(u16),
    LogDone,
    FlushBegins(u16),
    FlushDone(u16),
    Ack(u64),
    Compare,
    Crash { power: bool, choices: u64, durable: u64 },
    LogFails,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let at = prop_oneof![4 => 0u64..12, 2 => 0u64..100];
    let len = prop_oneof![6 => 1u64..3, 2 => 1u64..6, 1 => 20u64..100];
    let step = prop_oneof![
        12 => (0u16..2, at, len).prop_map(|(disk, at, len)| Step::Write { disk, at, len }),
        10 => any::<u16>().prop_map(Step::LocalDone),
        10 => Just(Step::LogDone),
        1 => (0u16..2).prop_map(Step::FlushBegins),
        4 => (0u16..2).prop_map(Step::FlushDone),
        8 => (1u64..6).prop_map(Step::Ack),
        6 => Just(Step::Compare),
        2 => (any::<bool>(), any::<u64>(), 0u64..20)
            .prop_map(|(power, choices, durable)| Step::Crash { power, choices, durable }),
    ];
    prop::collection::vec(prop_oneof![300 => step, 1 => Just(Step::LogFails)], 1..250)
}

impl Sites {
    fn new() -> Self {
        let (log, file) = open_clean();
        let disk = Local { live: vec![0; SECTORS], durable: vec![0; SECTORS] };
        let mut sites = Self {
            log,
            file,
            block: None,
            local: [disk.clone(), disk],
            base: [vec![0; SECTORS], vec![0; SECTORS]],
            base_seq: 100,
            records: Vec::new(),
            acked: 100,
            requests: BTreeMap::new(),
            writing: BTreeMap::new(),
            flushes: [Vec::new(), Vec::new()],
            to_compare: Vec::new(),
            marker: None,
            whole: true,
            next: 1,
            incarnation: 9,
            now: MonoNanos(1),
        };
        let whole = Attachment { copy: CopyState::Whole, ..attachment(100) };
        assert_eq!(sites.log.attached(&whole), Compare::Nothing);
        sites
    }

    fn last_seq(&self) -> u64 {
        self.base_seq + self.records.len() as u64
    }

    fn number(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    /// Both the record and the local write start.
    fn admitted(&mut self, request: u64) {
        let extent = self.requests.remove(&request).expect("asked for");
        let (first, count) = ((extent.offset / SECTOR) as usize, extent.len_bytes / SECTOR);
        let versions = (0..count).map(|_| self.number()).collect();
        let record = Record { disk: extent.disk.0.into(), sector: first, versions };
        self.records.push(record.clone());
        self.writing.insert(request, record);
    }

    fn drive(&mut self) {
        let last_seq = Seq(self.last_seq());
        if self.to_compare.is_empty() && self.marker.is_none() && !self.whole {
            self.records.push(Record { disk: 0, sector: 0, versions: Vec::new() });
            self.marker = Some(self.last_seq());
        }
        if self.marker.is_some_and(|marker| marker <= self.acked) {
            self.whole = true;
        }
        self.log.committed(Seq(self.acked));
        self.now = self.now.plus_ms(400);
        self.log.step(self.whole, last_seq, self.now);
        while let Some(action) = self.log.poll_action() {
            match action {
                Action::Go(request) => self.admitted(request),
                Action::Write { offset, block } => self.block = Some((offset as usize, block)),
                Action::Flush { disk, number } => self.flush_begins(disk, number),
                Action::Discard => {
                    self.file.clear();
                    self.log.discarded(true);
                }
            }
        }
    }

    fn flush_begins(&mut self, disk: DiskId, number: u64) {
        let covers = self.local[usize::from(disk.0)].live.clone();
        self.flushes[usize::from(disk.0)].push(Flush { number, covers });
    }

    fn backup_at(&self, durable: u64) -> [Vec<Version>; 2] {
        let mut content = self.base.clone();
        for record in &self.records[..(durable - self.base_seq) as usize] {
            content[record.disk][record.sector..][..record.versions.len()]
                .copy_from_slice(&record.versions);
        }
        content
    }

    fn apply(&mut self, step: &Step) {
        match step {
            Step::Write { disk, at, len } => {
                let at = *at % (SECTORS as u64 - 1);
                let len_bytes = (*len).min(SECTORS as u64 - at) * SECTOR;
                let extent = Extent { disk: DiskId(*disk), offset: at * SECTOR, len_bytes };
                // The sequencer keeps overlapping writes apart.
                let busy = |r: &Record| {
                    let offset = r.sector as u64 * SECTOR;
                    let len_bytes = r.versions.len() as u64 * SECTOR;
                    Extent { disk: DiskId(r.disk as u16), offset, len_bytes }.overlaps(&extent)
                };
                if self.writing.values().any(busy)
                    || self.requests.values().any(|other| other.overlaps(&extent))
                {
                    return;
                }
                let request = self.number();
                self.requests.insert(request, extent);
                if self.log.admit(request, extent) {
                    self.admitted(request);
                }
            }
            Step::LocalDone(which) => {
                if self.writing.is_empty() {
                    return;
                }
                let request =
                    *self.writing.keys().nth(usize::from(*which) % self.writing.len()).unwrap();
                let record = self.writing.remove(&request).expect("just seen");
                self.local[record.disk].live[record.sector..][..record.versions.len()]
                    .copy_from_slice(&record.versions);
                self.log.finished(request, Seq(self.last_seq()));
            }
            Step::LogDone => {
                if let Some((at, block)) = self.block.take() {
                    self.file[at..at + BLOCK_BYTES].copy_from_slice(&block);
                    self.log.written(true);
                }
            }
            Step::LogFails => {
                if self.block.take().is_some() {
                    self.log.written(false);
                }
            }
            Step::FlushBegins(disk) => {
                let number = self.log.flush_begins(DiskId(*disk));
                self.flush_begins(DiskId(*disk), number);
            }
            Step::FlushDone(disk) => {
                if let Some(Flush { number, covers }) = self.flushes[usize::from(*disk)].pop() {
                    let durable = &mut self.local[usize::from(*disk)].durable;
                    durable.iter_mut().zip(covers).for_each(|(old, new)| *old = new.max(*old));
                    self.log.flush_ended(DiskId(*disk), number, true);
                }
            }
            Step::Ack(count) => self.acked = (self.acked + count).min(self.last_seq()),
            Step::Compare => self.compare(),
            Step::Crash { power, choices, durable } => self.crash(*power, *choices, *durable),
        }
    }

    /// A chunk of the resync: what the stream has at this point is compared, what differs is copied.
    fn compare(&mut self) {
        let Some(range) = self.to_compare.pop() else { return };
        let chunk = Extent { len_bytes: range.len_bytes.min(2 * EXTENT), ..range };
        if self.writing.values().any(|r| {
            let offset = r.sector as u64 * SECTOR;
            let len_bytes = r.versions.len() as u64 * SECTOR;
            Extent { disk: DiskId(r.disk as u16), offset, len_bytes }.overlaps(&chunk)
        }) {
            return self.to_compare.push(range);
        }
        if chunk.len_bytes < range.len_bytes {
            let offset = chunk.end();
            let len_bytes = range.len_bytes - chunk.len_bytes;
            self.to_compare.push(Extent { offset, len_bytes, ..range });
        }
        let (disk, first) = (usize::from(chunk.disk.0), (chunk.offset / SECTOR) as usize);
        let count = (chunk.len_bytes / SECTOR) as usize;
        let own = self.local[disk].live[first..first + count].to_vec();
        let backup = &self.backup_at(self.last_seq())[disk][first..first + count];
        if own != backup {
            self.records.push(Record { disk, sector: first, versions: own });
        }
        self.log.compared(chunk, Seq(self.last_seq()));
    }

    /// What a sector can hold locally after a crash.
    fn local_values(&self, power: bool) -> [Vec<BTreeSet<Version>>; 2] {
        let mut values = [0, 1].map(|disk: usize| -> Vec<BTreeSet<Version>> {
            let Local { live, durable } = &self.local[disk];
            let durable = if power { durable } else { live };
            live.iter().zip(durable).map(|(a, b)| BTreeSet::from([*a, *b])).collect()
        });
        for record in self.writing.values() {
            for (nth, version) in record.versions.iter().enumerate() {
                values[record.disk][record.sector + nth].insert(*version);
            }
        }
        values
    }

    /// The log as a crash may leave it.
    fn log_after(&self, choices: u64) -> Vec<u8> {
        let mut file = self.file.clone();
        if let Some((at, block)) = &self.block {
            for sector in (0..BLOCK_BYTES / 512).filter(|sector| choices >> sector & 1 == 1) {
                let range = sector * 512..(sector + 1) * 512;
                file[at + range.start..at + range.end].copy_from_slice(&block[range]);
            }
        }
        file
    }

    /// The invariant.
    fn check(&self) {
        let values = self.local_values(true);
        let mut backups: [Vec<BTreeSet<Version>>; 2] =
            self.backup_at(self.acked).map(|disk| disk.into_iter().map(|v| [v].into()).collect());
        for record in &self.records[(self.acked - self.base_seq) as usize..] {
            for (nth, version) in record.versions.iter().enumerate() {
                backups[record.disk][record.sector + nth].insert(*version);
            }
        }
        // Before, after, and a torn block.
        for choices in [0, 0xff, 0x5a] {
            let Ok(found) = format::read(&self.log_after(choices), &identity()) else { continue };
            if found.head.everything {
                continue;
            }
            let ranges: Vec<Extent> = found
                .slots
                .iter()
                .flatten()
                .map(|entry| GEOMETRY.extent_of(*entry, 64 * EXTENT))
                .collect();
            for disk in 0..2 {
                for sector in 0..SECTORS {
                    let (local, backup) = (&values[disk][sector], &backups[disk][sector]);
                    let same = local.len() == 1 && local == backup;
                    let at = Extent {
                        disk: DiskId(disk as u16),
                        offset: sector as u64 * SECTOR,
                        len_bytes: SECTOR,
                    };
                    let is_mapped = ranges.iter().any(|range| range.overlaps(&at));
                    assert!(same || is_mapped, "{at:?}: {local:?} and {backup:?} are not mapped");
                }
            }
        }
    }

    fn crash(&mut self, power: bool, mut choices: u64, durable: u64) {
        let durable = (self.acked + durable).min(self.last_seq());
        self.file = self.log_after(choices);
        let values = self.local_values(power);
        for (disk, values) in values.into_iter().enumerate() {
            for (sector, values) in values.into_iter().enumerate() {
                choices = choices.rotate_left(7).wrapping_mul(0x9e37_79b9_7f4a_7c15);
                let value = *values.iter().nth(choices as usize % values.len()).unwrap();
                self.local[disk].live[sector] = value;
                if power {
                    self.local[disk].durable[sector] = value;
                }
            }
        }
        self.base = self.backup_at(durable);
        (self.base_seq, self.acked) = (durable, durable);
        self.records.clear();
        self.requests.clear();
        self.writing.clear();
        self.flushes = [Vec::new(), Vec::new()];
        self.block = None;
        self.incarnation += 1;
        let found = match self.file.is_empty() {
            true => Err(Unusable::Missing),
            false => format::read(&self.file, &identity()),
        };
        let was_usable = found.as_ref().is_ok_and(|found| !found.head.everything);
        let run = Incarnation(self.incarnation);
        let last_end = unclean(&found);
        let opening = open(found, GEOMETRY, &identity(), run, last_end);
        match opening.change {
            FileChange::Replace(file) => self.file = file,
            FileChange::Append { offset, block } => {
                self.file[offset as usize..][..BLOCK_BYTES].copy_from_slice(&block);
            }
        }
        self.log = opening.log;
        self.to_compare = match self.log.attached(&attachment(durable)) {
            Compare::Mapped(ranges) => {
                assert!(was_usable);
                ranges
            }
            Compare::All(_) => {
                assert!(!was_usable);
                [0, 1].map(|disk| Extent { len_bytes: 64 * EXTENT, ..extent(disk, 0) }).into()
            }
            Compare::Nothing => panic!("the sites must be compared"),
        };
        (self.marker, self.whole) = (None, false);
    }

    /// Everything ends: both sites are the same, and the log has a map again.
    fn settle(&mut self) {
        for _ in 0..2000 {
            self.apply(&Step::LogDone);
            self.apply(&Step::LocalDone(0));
            self.apply(&Step::FlushDone(0));
            self.apply(&Step::FlushDone(1));
            self.apply(&Step::Compare);
            self.apply(&Step::Ack(1000));
            self.drive();
        }
        assert!(self.requests.is_empty() && self.writing.is_empty(), "nothing waits for ever");
        assert!(self.whole);
        let backup = self.backup_at(self.acked);
        for (local, backup) in self.local.iter().zip(&backup) {
            assert_eq!(&local.live, backup);
        }
        assert!(matches!(self.log.standing(), Standing::Mapped | Standing::Off));
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 120, ..ProptestConfig::default() })]
    #[test]
    fn what_can_differ_is_in_the_map(steps in steps()) {
        let mut sites = Sites::new();
        for step in &steps {
            sites.apply(step);
            sites.check();
            sites.drive();
            sites.check();
        }
        sites.settle();
    }
}
