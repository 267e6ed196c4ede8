//! What waits for the backup: the sender's records in memory, and behind them what is on disk only.
//!
//! Invariant: records reach the sender in seq order without a gap, whether they waited in memory or on disk, and a message
//! that keeps its place among the records keeps it also behind what is on disk. What comes after the records on disk
//! therefore waits only while some of those are unread: the owner never spills behind records that wait there.

use crate::backlog::{BacklogError, Meter, Position, Reader, cost_bytes};
use std::collections::VecDeque;
use std::sync::Arc;
use tidelock_protocol::ids::Seq;
use tidelock_protocol::message::{LastRun, Message};
use tidelock_protocol::part::PartialRecord;
use tidelock_protocol::record::Record;
use tidelock_protocol::sender::{Sender, SenderError, Transmit};
use tidelock_storage::unsynced::UnsyncedDir;

/// Records that are brought back at a time.
const LOADED_AT_ONCE: usize = 64;

/// A backlog on disk as the link sees it.
#[derive(Debug)]
pub struct OnDisk {
    /// Where its segments are.
    pub files: Arc<dyn UnsyncedDir>,
    /// Shared with the owner loop.
    pub meter: Arc<Meter>,
}

/// Why the stream cannot be gone on with.
#[derive(Debug, thiserror::Error)]
pub enum QueueError {
    /// The stream does not fit.
    #[error(transparent)]
    Stream(#[from] SenderError),
    /// What waits on disk cannot be read back.
    #[error(transparent)]
    Backlog(#[from] BacklogError),
}

/// Records that are on disk only, all that come after those that the sender has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Spilled {
    /// Where the first of them begins.
    pub at: Position,
    /// Its seq.
    pub first: Seq,
    /// The seq of the last one.
    pub last: Seq,
    /// Their payloads.
    pub payload_bytes: u64,
}

/// What comes after the records that are on disk only.
#[derive(Debug)]
enum After {
    /// The disk has failed: it is in memory.
    Record(Record),
    InOrder {
        /// Its place is behind this record.
        after: Seq,
        message: Message,
    },
}

/// The queue of one member.
#[derive(Debug)]
pub struct Queue {
    sender: Sender,
    on_disk: Option<Arc<OnDisk>>,
    /// What each record of the sender costs, until the backup has it.
    held: VecDeque<(Seq, u64)>,
    reader: Option<Reader>,
    /// The last record that is on disk only, and the payload bytes of all of them.
    spilled_to: Seq,
    spilled_bytes: u64,
    /// The last record that an earlier process has left. It may have sent any of them.
    left_to: Seq,
    after: VecDeque<After>,
    attached: bool,
}

impl Queue {
    /// An empty one whose stream continues after `durable`.
    #[must_use]
    pub fn new(durable: Seq, on_disk: Option<Arc<OnDisk>>) -> Self {
        Self {
            sender: Sender::new(durable),
            on_disk,
            held: VecDeque::new(),
            reader: None,
            spilled_to: Seq::ZERO,
            spilled_bytes: 0,
            left_to: Seq::ZERO,
            after: VecDeque::new(),
            attached: false,
        }
    }

    /// One with records that an earlier process has left on disk, before all others.
    #[must_use]
    pub fn left(spilled: Spilled, on_disk: Arc<OnDisk>) -> Self {
        let mut queue = Self::new(Seq(spilled.first.0 - 1), Some(on_disk));
        queue.left_to = spilled.last;
        queue.spill(spilled);
        queue
    }

    /// Takes over an admitted record that is in memory.
    pub fn push(&mut self, record: Record) {
        if self.is_spilled() {
            self.after.push_back(After::Record(record));
        } else {
            self.hold(record);
        }
    }

    fn hold(&mut self, record: Record) {
        if self.on_disk.is_some() {
            self.held.push_back((record.seq, cost_bytes(&record)));
        }
        self.sender.push(record);
    }

    /// Takes note of admitted records that are on disk only.
    pub fn spill(&mut self, spilled: Spilled) {
        let on_disk = self.on_disk.as_ref().expect("there is a backlog on disk");
        debug_assert!(
            !self.after.iter().any(|a| matches!(a, After::Record(_))),
            "it would overtake"
        );
        if self.reader.is_none() {
            let reader = Reader::new(on_disk.files.clone(), spilled.at, spilled.first);
            self.reader = Some(reader);
        }
        self.spilled_to = spilled.last;
        self.spilled_bytes += spilled.payload_bytes;
    }

    fn is_spilled(&self) -> bool {
        self.reader.is_some()
    }

    /// Puts a message at this very point of the stream. Dropped when not attached.
    pub fn push_in_order(&mut self, message: Message) {
        if !self.attached {
        } else if self.is_spilled() {
            self.after.push_back(After::InOrder { after: self.admitted(), message });
        } else {
            self.sender.push_in_order(message);
        }
    }

    /// As [`Sender::last_run`].
    #[must_use]
    pub fn last_run(&self) -> LastRun {
        self.sender.last_run()
    }

    /// As [`Sender::attached`].
    pub fn attached(
        &mut self,
        durable: Seq,
        begun: Option<PartialRecord>,
    ) -> Result<(), QueueError> {
        self.skip(durable)?;
        self.sender.attached(durable, begun)?;
        self.attached = true;
        self.release(durable);
        Ok(())
    }

    /// An earlier process has sent some of what it left.
    fn skip(&mut self, durable: Seq) -> Result<(), BacklogError> {
        let Some(on_disk) = self.on_disk.clone() else { return Ok(()) };
        let is_there = durable > self.sender.admitted() && durable <= self.spilled_to;
        while is_there && let Some(reader) = &mut self.reader {
            if reader.next_seq() > durable {
                self.sender = Sender::new(durable);
                self.held.clear();
                self.settle();
                break;
            }
            let record = reader.read()?;
            self.spilled_bytes -= record.payload().map_or(0, |p| p.data().len() as u64);
            on_disk.meter.unspill(1);
        }
        Ok(())
    }

    /// As [`Sender::detached`].
    pub fn detached(&mut self) {
        self.attached = false;
        self.sender.detached();
        self.after.retain(|after| matches!(after, After::Record(_)));
    }

    /// What to send now, if anything.
    pub fn poll_transmit(&mut self) -> Result<Option<Transmit>, BacklogError> {
        if self.attached && self.sender.unsent() == 0 {
            self.load()?;
        }
        Ok(self.sender.poll_transmit())
    }

    /// Brings back what memory has room for; one record if there is no other.
    fn load(&mut self) -> Result<(), BacklogError> {
        loop {
            self.settle();
            let Some(reader) = &mut self.reader else { return Ok(()) };
            if self.sender.unsent() >= LOADED_AT_ONCE {
                return Ok(());
            }
            let on_disk = self.on_disk.clone().expect("there is a backlog on disk");
            let cost_bytes = reader.next_cost_bytes()?;
            if !self.held.is_empty() && !on_disk.meter.has_room(cost_bytes) {
                return Ok(());
            }
            let record = reader.read()?;
            on_disk.meter.hold(cost_bytes);
            self.spilled_bytes -= record.payload().map_or(0, |p| p.data().len() as u64);
            self.hold(record);
            on_disk.meter.unspill(1);
        }
    }

    /// Takes out of `after` what has its place here. Follows every read at once: with the last record the owner may keep
    /// records in memory again, and then spill again behind those.
    fn settle(&mut self) {
        let Some(reader) = &self.reader else { return };
        let read_to = Seq(reader.next_seq().0 - 1);
        let is_end = read_to >= self.spilled_to;
        if is_end {
            self.reader = None;
        }
        while let Some(next) = self.after.front() {
            match next {
                After::InOrder { after, .. } if is_end || *after <= read_to => {}
                After::Record(_) if is_end => {}
                _ => break,
            }
            match self.after.pop_front() {
                Some(After::Record(record)) => self.hold(record),
                Some(After::InOrder { message, .. }) => self.sender.push_in_order(message),
                None => {}
            }
        }
    }

    /// Whether the backup can have it: it was sent, or an earlier process may have sent it.
    #[must_use]
    pub fn may_be_durable(&self, seq: Seq) -> bool {
        seq <= self.sender.sent().max(self.left_to)
    }

    /// As [`Sender::committed`].
    pub fn committed(&mut self, durable: Seq) -> Result<(), QueueError> {
        // An earlier process has sent it, and the backup had no room for it when this one was attached. Messages that keep
        // their place are behind all that was left.
        while durable > self.sender.sent()
            && durable <= self.left_to
            && let Some(sent) = self.poll_transmit()?
        {
            let seq = match sent {
                Transmit::Record(record) => record.seq,
                Transmit::Part(part) if self.sender.sent() >= part.seq => part.seq,
                Transmit::Part(_) => continue,
                Transmit::InOrder(_) => break,
            };
            self.sender.committed(seq)?;
            self.release(seq);
        }
        self.sender.committed(durable)?;
        self.release(durable);
        Ok(())
    }

    fn release(&mut self, durable: Seq) {
        let Some(on_disk) = &self.on_disk else { return };
        let mut released_bytes = 0;
        while let Some((_, cost_bytes)) = self.held.front().filter(|(seq, _)| *seq <= durable) {
            released_bytes += cost_bytes;
            self.held.pop_front();
        }
        on_disk.meter.release(released_bytes);
    }

    /// Payload bytes that are admitted and not durable.
    #[must_use]
    pub fn backlog_bytes(&self) -> u64 {
        let after = self.after.iter().map(|after| match after {
            After::Record(record) => record.payload().map_or(0, |p| p.data().len() as u64),
            After::InOrder { .. } => 0,
        });
        self.sender.backlog_bytes() + self.spilled_bytes + after.sum::<u64>()
    }

    /// As [`Sender::taken`]: what waits on disk comes after it.
    #[must_use]
    pub fn taken(&self) -> Seq {
        self.sender.taken()
    }

    /// The last seq that the backup called durable.
    #[must_use]
    pub fn durable(&self) -> Seq {
        self.sender.durable()
    }

    /// The last seq that was admitted.
    #[must_use]
    pub fn admitted(&self) -> Seq {
        let after = self.after.iter().rev().find_map(|after| match after {
            After::Record(record) => Some(record.seq),
            After::InOrder { .. } => None,
        });
        after.unwrap_or_else(|| self.sender.admitted().max(self.spilled_to))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backlog::Journal;
    use crate::sequencer::RECORD_OVERHEAD_BYTES;
    use tidelock_protocol::hlc::Hlc;
    use tidelock_protocol::ids::{DiskId, Epoch, Incarnation, WriterId};
    use tidelock_protocol::limits::WHOLE_RECORD_MAX_BYTES;
    use tidelock_protocol::record::DiskChange;
    use tidelock_protocol::record::{Effect, Payload};
    use tidelock_protocol::vector::CountVector;
    use tidelock_storage::unsynced::Directory;

    const CHECK: Message = Message::Stalled { reason: None };
    const PAYLOAD_BYTES: u64 = 1000;
    const COST_BYTES: u64 = PAYLOAD_BYTES + RECORD_OVERHEAD_BYTES;

    fn record(seq: u64) -> Record {
        Record {
            writer: WriterId(0),
            seq: Seq(seq),
            epoch: Epoch(1),
            hlc: Hlc(seq),
            deps: CountVector::new(),
            body: DiskChange {
                disk: DiskId(0),
                offset: seq * 4096,
                copy: false,
                flushed: false,
                effect: Effect::Write(Payload::new(vec![seq as u8; PAYLOAD_BYTES as usize].into())),
            },
        }
    }

    /// Both ends of a backlog, with room for so many records in memory.
    struct Bench {
        _dir: tempfile::TempDir,
        journal: Journal,
        meter: Arc<Meter>,
        queue: Queue,
        last: u64,
        room: u64,
    }

    impl Bench {
        fn new(room: u64) -> Self {
            let dir = tempfile::tempdir().unwrap();
            let files = Directory::at(dir.path());
            let journal = Journal::begin(files.clone(), 5000, Incarnation(1), [0; 16], [0; 32]);
            let meter = Arc::new(Meter::new(room * COST_BYTES));
            let on_disk = Arc::new(OnDisk { files, meter: meter.clone() });
            let queue = Queue::new(Seq(0), Some(on_disk));
            Self { _dir: dir, journal: journal.unwrap(), meter, queue, last: 0, room }
        }

        /// As the owner loop does it.
        fn admit(&mut self, records: u64) {
            for _ in 0..records {
                self.last += 1;
                let record = record(self.last);
                let at = self.journal.append(&record, || record.seq).unwrap();
                if self.meter.may_hold(COST_BYTES) {
                    self.meter.hold(COST_BYTES);
                    self.queue.push(record);
                } else {
                    self.meter.spill(1);
                    self.queue.spill(Spilled {
                        at,
                        first: record.seq,
                        last: record.seq,
                        payload_bytes: PAYLOAD_BYTES,
                    });
                }
            }
        }

        /// Seqs as they go out; 0 is a message.
        fn sent(&mut self) -> Vec<u64> {
            let mut sent = Vec::new();
            while let Some(next) = self.queue.poll_transmit().unwrap() {
                match next {
                    Transmit::Record(sent_record) => {
                        assert_eq!(sent_record, record(sent_record.seq.0));
                        sent.push(sent_record.seq.0);
                    }
                    Transmit::Part(part) => panic!("{part:?}"),
                    Transmit::InOrder(_) => sent.push(0),
                }
            }
            assert!(self.meter.held_bytes() <= self.room * COST_BYTES, "memory is bounded");
            sent
        }

        /// All that goes out on an attachment, each time as much as fits.
        fn all_from(&mut self, durable: u64) -> Vec<u64> {
            self.queue.attached(Seq(durable), None).unwrap();
            let mut sent = self.sent();
            while sent.last() != Some(&self.last) {
                self.commit(*sent.last().unwrap());
                sent.extend(self.sent());
            }
            sent
        }

        /// Another process finds the first records on disk, which are all so far.
        fn restart(&mut self, records: u64) {
            let files = self.queue.on_disk.clone().unwrap().files.clone();
            self.meter = Arc::new(Meter::new(self.room * COST_BYTES));
            self.meter.spill(records);
            let on_disk = OnDisk { files, meter: self.meter.clone() };
            let at = Position { segment: 1, offset: 128 };
            let payload_bytes = records * PAYLOAD_BYTES;
            let left = Spilled { at, first: Seq(1), last: Seq(records), payload_bytes };
            self.queue = Queue::left(left, Arc::new(on_disk));
        }

        fn commit(&mut self, durable: u64) {
            self.queue.committed(Seq(durable)).unwrap();
            self.journal.release(Seq(durable)).unwrap();
        }
    }

    #[test]
    fn an_outage_longer_than_memory_goes_out_in_order_and_memory_stays_bounded() {
        let mut b = Bench::new(4);
        b.admit(100);
        assert_eq!((b.meter.spilled(), b.meter.held_bytes()), (96, 4 * COST_BYTES));
        assert_eq!(b.queue.backlog_bytes(), 100 * PAYLOAD_BYTES);
        assert_eq!((b.queue.taken(), b.queue.admitted()), (Seq(0), Seq(100)));
        assert_eq!(b.sent(), [0u64; 0], "nothing leaves before the attachment");
        b.queue.attached(Seq(0), None).unwrap();
        let mut sent = b.sent();
        assert_eq!(sent, [1, 2, 3, 4], "no more fits");
        assert_eq!(b.queue.taken(), Seq(4));
        while sent.len() < 100 {
            let durable = *sent.last().unwrap() - 1;
            b.commit(durable);
            let more = b.sent();
            assert!(!more.is_empty());
            sent.extend(more);
        }
        assert_eq!(sent, (1..=100).collect::<Vec<_>>());
        b.commit(100);
        assert_eq!((b.meter.spilled(), b.meter.held_bytes(), b.queue.backlog_bytes()), (0, 0, 0));
        b.admit(2);
        assert_eq!(b.meter.spilled(), 0, "memory takes them again");
        assert_eq!(b.sent(), [101, 102]);
    }

    #[test]
    fn what_is_admitted_during_the_catch_up_comes_behind_it() {
        let mut b = Bench::new(4);
        b.admit(20);
        b.queue.attached(Seq(0), None).unwrap();
        let mut sent = Vec::new();
        while sent.len() < 60 {
            if b.last < 60 {
                b.admit(1);
            }
            sent.extend(b.sent());
            b.commit(*sent.last().unwrap());
        }
        assert_eq!(sent, (1..=60).collect::<Vec<_>>());
        assert_eq!(b.meter.spilled(), 0);
    }

    #[test]
    fn a_cut_in_the_middle_of_the_catch_up_repeats_what_is_not_durable() {
        let mut b = Bench::new(4);
        b.admit(30);
        b.queue.attached(Seq(0), None).unwrap();
        assert_eq!(b.sent(), [1, 2, 3, 4]);
        b.commit(2);
        assert_eq!(b.sent(), [5, 6]);
        b.queue.detached();
        b.admit(5);
        assert_eq!(b.queue.admitted(), Seq(35));
        // Seq 3 had arrived.
        b.queue.attached(Seq(3), None).unwrap();
        assert_eq!(b.sent(), [4, 5, 6, 7]);
        b.commit(7);
        assert_eq!(b.sent(), [8, 9, 10, 11]);
    }

    #[test]
    fn messages_keep_their_place_behind_what_is_on_disk() {
        let mut b = Bench::new(2);
        b.queue.push_in_order(CHECK);
        b.queue.attached(Seq(0), None).unwrap();
        b.admit(4);
        b.queue.push_in_order(CHECK);
        b.admit(1);
        b.queue.push_in_order(CHECK);
        b.queue.push_in_order(CHECK);
        assert_eq!(b.sent(), [1, 2]);
        b.commit(2);
        assert_eq!(b.sent(), [3, 4, 0]);
        b.commit(4);
        assert_eq!(b.sent(), [5, 0, 0]);
        b.admit(3);
        b.queue.push_in_order(CHECK);
        b.queue.detached();
        b.queue.attached(Seq(5), None).unwrap();
        assert_eq!(b.sent(), [6, 7], "the check died with the connection");
    }

    /// The last of what is on disk comes back, memory takes records again and is full again, all within one outage.
    #[test]
    fn what_is_spilled_behind_records_in_memory_does_not_overtake_them() {
        let loaded = LOADED_AT_ONCE as u64;
        for left in [1, loaded - 1, loaded] {
            let mut b = Bench::new(100);
            b.admit(100 + left);
            b.queue.attached(Seq(0), None).unwrap();
            assert_eq!(b.sent().len(), 100);
            b.commit(100);
            assert!(b.queue.poll_transmit().unwrap().is_some());
            assert_eq!(b.meter.spilled(), 0, "all are back at once");
            b.queue.detached();
            b.admit(100);
            assert_eq!(b.meter.spilled(), left, "the rest is in memory");
            assert_eq!(b.all_from(100), (101..=b.last).collect::<Vec<_>>());
        }
    }

    #[test]
    fn what_the_backup_has_of_an_earlier_process_may_be_all_of_it() {
        let mut b = Bench::new(4);
        b.admit(10);
        b.restart(10);
        b.queue.attached(Seq(10), None).unwrap();
        b.queue.detached();
        b.admit(6);
        assert_eq!(b.meter.spilled(), 2);
        assert_eq!(b.all_from(10), (11..=16).collect::<Vec<_>>());
    }

    /// What an earlier process has left goes out first; what of it the backup has already does not.
    #[test]
    fn what_an_earlier_process_left_goes_out_from_where_the_backup_is() {
        for durable in 0..=10 {
            let mut b = Bench::new(4);
            b.admit(10);
            b.restart(10);
            assert_eq!(b.queue.last_run(), LastRun::Continues { from: Seq(1) });
            assert!(b.sent().is_empty());
            assert_eq!(b.meter.spilled(), 10, "nothing is read back before the attachment");
            b.admit(3);
            let sent = b.all_from(durable);
            assert_eq!(sent, (durable + 1..=13).collect::<Vec<_>>());
            b.commit(13);
            let rest = (b.meter.spilled(), b.meter.held_bytes(), b.queue.backlog_bytes());
            assert_eq!(rest, (0, 0, 0));
        }
        let mut b = Bench::new(4);
        b.admit(10);
        assert!(
            matches!(b.queue.attached(Seq(11), None), Err(QueueError::Stream(_))),
            "never sent"
        );
    }

    /// The backup had no room for it when this process was attached, and has some now.
    #[test]
    fn what_an_earlier_process_has_sent_may_become_durable_late() {
        for durable in 1..=10 {
            let mut b = Bench::new(4);
            b.admit(10);
            b.restart(10);
            b.admit(3);
            b.queue.attached(Seq(0), None).unwrap();
            b.queue.push_in_order(CHECK);
            assert!(b.queue.committed(Seq(11)).is_err(), "never sent");
            b.commit(durable);
            assert_eq!(b.queue.durable(), Seq(durable));
            let mut sent = Vec::new();
            while sent.last() != Some(&0) {
                sent.extend(b.sent());
                b.commit(sent.iter().copied().max().unwrap());
            }
            assert_eq!(sent, (durable + 1..=13).chain([0]).collect::<Vec<_>>());
            let rest = (b.meter.spilled(), b.meter.held_bytes(), b.queue.backlog_bytes());
            assert_eq!(rest, (0, 0, 0));
        }
    }

    /// The backup has such a record with its last part, not before.
    #[test]
    fn large_records_that_an_earlier_process_has_sent_may_become_durable_late() {
        const LARGE_BYTES: u64 = 5 * WHOLE_RECORD_MAX_BYTES as u64;
        let dir = tempfile::tempdir().unwrap();
        let files = Directory::at(dir.path());
        let mut journal =
            Journal::begin(files.clone(), 1 << 30, Incarnation(1), [0; 16], [0; 32]).unwrap();
        let append = |seq| {
            let mut large = record(seq);
            let data = vec![seq as u8; LARGE_BYTES as usize];
            large.body.effect = Effect::Write(Payload::new(data.into()));
            journal.append(&large, || Seq(seq)).unwrap()
        };
        let at = (1..=3).map(append).min().unwrap();
        let meter = Arc::new(Meter::new(1 << 30));
        meter.spill(3);
        let left = Spilled { at, first: Seq(1), last: Seq(3), payload_bytes: 3 * LARGE_BYTES };
        let mut queue = Queue::left(left, Arc::new(OnDisk { files, meter: meter.clone() }));
        queue.attached(Seq(0), None).unwrap();
        for durable in [1, 3] {
            queue.committed(Seq(durable)).unwrap();
            assert_eq!(queue.durable(), Seq(durable));
            assert_eq!(queue.backlog_bytes(), (3 - durable) * LARGE_BYTES);
        }
        assert_eq!((meter.spilled(), meter.held_bytes()), (0, 0));
    }

    /// The disk fails in an outage: what comes then is in memory, behind what is on disk.
    #[test]
    fn records_in_memory_wait_behind_those_on_disk() {
        let mut b = Bench::new(2);
        b.admit(4);
        for seq in 5..=6 {
            b.meter.hold(COST_BYTES);
            b.queue.push(record(seq));
        }
        b.room += 2;
        assert_eq!(b.queue.admitted(), Seq(6));
        assert_eq!(b.queue.backlog_bytes(), 6 * PAYLOAD_BYTES);
        b.queue.attached(Seq(0), None).unwrap();
        let mut sent = b.sent();
        while sent.len() < 6 {
            b.commit(*sent.last().unwrap());
            sent.extend(b.sent());
        }
        assert_eq!(sent, [1, 2, 3, 4, 5, 6]);
    }

    #[test]
    fn what_cannot_be_read_back_is_an_error_and_not_a_gap() {
        let mut b = Bench::new(2);
        b.admit(20);
        let path = b.journal.directory().join("000000000002.segment");
        std::fs::remove_file(path).unwrap();
        b.queue.attached(Seq(0), None).unwrap();
        let mut last = 0;
        let error = loop {
            match b.queue.poll_transmit() {
                Ok(Some(Transmit::Record(record))) => last = record.seq.0,
                Ok(_) => b.queue.committed(Seq(last)).unwrap(),
                Err(error) => break error,
            }
        };
        assert!(last < 20);
        assert!(error.to_string().contains("ends before seq"), "{error}");
    }
}
