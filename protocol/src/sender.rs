//! The sending half of the link, for one member: backlog, transmission order, resumption.
//!
//! Invariant: the backlog holds every admitted record that the backup has not called durable, in
//! seq order without a gap, so a broken connection costs nothing but its repetition. Its bound in
//! bytes is enforced where writes are admitted (the sequencer), because that is where waiting
//! turns into backpressure on the guest; the sender reports the bytes.
//!
//! A digest check holds for one exact point of the stream, so it stands in the same queue. Checks
//! that were lost with a connection are not sent again: whoever asked starts them anew.

use crate::ids::Seq;
use crate::message::{LastRun, Message};
use crate::part::{self, Part, PartialRecord};
use crate::record::{Body, DiskChange, Record};
use std::collections::VecDeque;
use thiserror::Error;

/// What goes out next.
#[derive(Clone, Debug, PartialEq)]
pub enum Transmit<B = DiskChange> {
    /// A record.
    Record(Record<B>),
    /// A part of a large record, so that nothing waits behind all of it.
    Part(Part),
    /// A control message that must keep its place among the records.
    InOrder(Message),
}

/// What an acknowledgement released.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Released {
    /// Records that the backlog no longer holds.
    pub records: u64,
    /// Their payload bytes.
    pub bytes: u64,
}

/// Why the stream cannot go on where the backup stands.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
pub enum SenderError {
    /// The backup has less than what was already forgotten here: it has lost acknowledged data or
    /// was replaced. Only a resync helps.
    #[error(
        "the backup has lost acknowledged writes: it has the stream up to seq {durable}, and what it had acknowledged, to \
         {forgotten}, is no longer kept here"
    )]
    Gap {
        /// What the backup has.
        durable: Seq,
        /// What is gone.
        forgotten: Seq,
    },
    /// The backup claims what was never sent.
    #[error("the backup has a stream up to seq {durable}, and this run has sent {sent}")]
    Unsent {
        /// The claim.
        durable: Seq,
        /// What was sent.
        sent: Seq,
    },
}

/// The sender of one member's stream.
#[derive(Debug)]
pub struct Sender<B = DiskChange> {
    queue: VecDeque<Transmit<B>>,
    /// Index into `queue` of what goes out next.
    next: usize,
    durable: Seq,
    /// The last that was ever sent: what came by a connection that is gone may be durable only
    /// after the next attachment.
    sent: Seq,
    admitted: Seq,
    backlog_bytes: u64,
    attached: bool,
    /// How much of the next record has been sent.
    begun: Option<PartialRecord>,
}

impl<B: Body> Sender<B> {
    /// A sender whose stream continues after `durable`.
    #[must_use]
    pub fn new(durable: Seq) -> Self {
        Self {
            queue: VecDeque::new(),
            next: 0,
            durable,
            sent: durable,
            admitted: durable,
            backlog_bytes: 0,
            attached: false,
            begun: None,
        }
    }

    /// Takes over an admitted record. Records come in seq order.
    pub fn push(&mut self, record: Record<B>) {
        assert_eq!(record.seq, self.admitted.next(), "records are admitted without a gap");
        self.admitted = record.seq;
        self.backlog_bytes += payload_bytes(&record);
        self.queue.push_back(Transmit::Record(record));
    }

    /// Puts a control message at this very point of the stream. Dropped when not attached.
    pub fn push_in_order(&mut self, message: Message) {
        if self.attached {
            self.queue.push_back(Transmit::InOrder(message));
        }
    }

    /// What to tell the backup at attach.
    #[must_use]
    pub fn last_run(&self) -> LastRun {
        LastRun::Continues { from: self.durable.next() }
    }

    /// The backup has attached this member and has its stream up to `durable`, and what has begun
    /// of a record after that: sending goes on there.
    pub fn attached(
        &mut self,
        durable: Seq,
        begun: Option<PartialRecord>,
    ) -> Result<Released, SenderError> {
        if durable < self.durable {
            return Err(SenderError::Gap { durable, forgotten: self.durable });
        }
        if durable > self.admitted {
            return Err(SenderError::Unsent { durable, sent: self.admitted });
        }
        // What was in flight when the connection broke may have arrived.
        self.sent = self.sent.max(durable);
        let released = self.committed(durable)?;
        self.rewind();
        self.begun = begun;
        self.attached = true;
        Ok(released)
    }

    /// The connection is gone: everything that is not durable goes out again after the next
    /// [`attached`](Self::attached).
    pub fn detached(&mut self) {
        self.attached = false;
        self.rewind();
    }

    fn rewind(&mut self) {
        self.queue.retain(|item| matches!(item, Transmit::Record(_)));
        self.next = 0;
        self.begun = None;
    }

    /// What to send now, if anything.
    pub fn poll_transmit(&mut self) -> Option<Transmit<B>> {
        if !self.attached {
            return None;
        }
        let item = self.queue.get(self.next)?;
        if let Transmit::Record(record) = item
            && part::is_cut(record)
        {
            let (seq, total_bytes) = (record.seq, record.encoded_len() as u32);
            let begun = self.begun.take().filter(|b| b.seq == seq && b.bytes < total_bytes);
            let part = part::part_of(record, begun.map_or(0, |b| b.bytes));
            let bytes = part.at + part.data.len() as u32;
            if bytes < total_bytes {
                self.begun = Some(PartialRecord { seq, bytes });
            } else {
                self.next += 1;
                self.sent = self.sent.max(seq);
            }
            return Some(Transmit::Part(part));
        }
        let item = item.clone();
        self.next += 1;
        if let Transmit::Record(record) = &item {
            self.sent = self.sent.max(record.seq);
        }
        Some(item)
    }

    /// The backup has everything up to `durable` on stable storage.
    pub fn committed(&mut self, durable: Seq) -> Result<Released, SenderError> {
        if durable > self.sent {
            return Err(SenderError::Unsent { durable, sent: self.sent });
        }
        let mut released = Released::default();
        while self.next > 0 {
            match self.queue.front() {
                Some(Transmit::Record(record)) if record.seq <= durable => {
                    released.records += 1;
                    released.bytes += payload_bytes(record);
                }
                Some(Transmit::InOrder(_)) => {}
                _ => break,
            }
            self.queue.pop_front();
            self.next -= 1;
        }
        // On attach, records that were never marked as sent on this connection may be durable.
        while let Some(Transmit::Record(record)) = self.queue.front() {
            if record.seq > durable {
                break;
            }
            released.records += 1;
            released.bytes += payload_bytes(record);
            self.queue.pop_front();
        }
        self.durable = self.durable.max(durable);
        self.backlog_bytes -= released.bytes;
        Ok(released)
    }

    /// Payload bytes that are admitted and not durable.
    #[must_use]
    pub fn backlog_bytes(&self) -> u64 {
        self.backlog_bytes
    }

    /// Items that have not been handed to the connection yet.
    #[must_use]
    pub fn unsent(&self) -> usize {
        self.queue.len() - self.next
    }

    /// The last seq of which the present connection has all bytes; all that was admitted before the first that waits.
    #[must_use]
    pub fn taken(&self) -> Seq {
        let waiting = self.queue.iter().skip(self.next).find_map(|item| match item {
            Transmit::Record(record) => Some(record.seq),
            Transmit::Part(_) | Transmit::InOrder(_) => None,
        });
        waiting.map_or(self.admitted, |seq| Seq(seq.0 - 1))
    }

    /// The last seq that the backup called durable.
    #[must_use]
    pub fn durable(&self) -> Seq {
        self.durable
    }

    /// The last seq that was ever sent.
    #[must_use]
    pub fn sent(&self) -> Seq {
        self.sent
    }

    /// The last seq that was admitted.
    #[must_use]
    pub fn admitted(&self) -> Seq {
        self.admitted
    }
}

fn payload_bytes(record: &Record<impl Body>) -> u64 {
    record.payload().map_or(0, |p| p.data().len() as u64)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hlc::Hlc;
    use crate::ids::{DiskId, Epoch, WriterId};
    use crate::record::{Effect, Payload};
    use crate::vector::CountVector;

    fn record(seq: u64) -> Record {
        Record {
            writer: WriterId(0),
            seq: Seq(seq),
            epoch: Epoch(1),
            hlc: Hlc(seq),
            deps: CountVector::new(),
            body: DiskChange {
                disk: DiskId(0),
                offset: 0,
                copy: false,
                flushed: false,
                effect: Effect::Write(Payload::new(vec![0; 10].into())),
            },
        }
    }

    fn drain(sender: &mut Sender) -> Vec<u64> {
        std::iter::from_fn(|| sender.poll_transmit())
            .map(|t| match t {
                Transmit::Record(r) => r.seq.0,
                Transmit::Part(p) => p.seq.0,
                Transmit::InOrder(_) => 0,
            })
            .collect()
    }

    const CHECK: Message = Message::Stalled { reason: None };

    #[test]
    fn a_broken_connection_repeats_exactly_what_is_not_durable() {
        let mut s = Sender::new(Seq(4));
        (5..=9).for_each(|n| s.push(record(n)));
        assert_eq!(drain(&mut s), [0u64; 0], "nothing leaves before the attachment");
        s.attached(Seq(4), None).unwrap();
        assert_eq!(drain(&mut s), [5, 6, 7, 8, 9]);
        assert_eq!(s.committed(Seq(6)), Ok(Released { records: 2, bytes: 20 }));
        s.detached();
        s.push(record(10));
        assert_eq!(s.attached(Seq(8), None), Ok(Released { records: 2, bytes: 20 }));
        assert_eq!(drain(&mut s), [9, 10]);
        assert_eq!(s.backlog_bytes(), 20);
    }

    #[test]
    fn a_connection_has_taken_what_stands_before_the_first_that_waits() {
        let mut s = Sender::new(Seq(4));
        assert_eq!(s.taken(), Seq(4));
        s.attached(Seq(4), None).unwrap();
        (5..=7).for_each(|n| s.push(record(n)));
        s.push_in_order(CHECK);
        assert_eq!(s.taken(), Seq(4));
        s.poll_transmit().unwrap();
        assert_eq!(s.taken(), Seq(5));
        drain(&mut s);
        assert_eq!(s.taken(), Seq(7));
        s.committed(Seq(5)).unwrap();
        s.detached();
        assert_eq!(s.taken(), Seq(5), "the next connection takes the rest again");
    }

    /// What a backup that gathers has at the end is what was sent, each byte of it once.
    #[test]
    fn a_large_record_goes_on_where_the_last_connection_ended() {
        let large = |seq: u64| Record {
            body: DiskChange {
                effect: Effect::Write(Payload::new(vec![seq as u8; 400_000].into())),
                ..record(seq).body
            },
            ..record(seq)
        };
        let run = crate::ids::RunId::default();
        let mut s = Sender::new(Seq(0));
        (1..=2).for_each(|n| s.push(large(n)));
        s.push(record(3));
        let (mut gathering, mut received, mut bytes) = (part::Gathering::default(), Seq(0), 0);
        let mut whole = Vec::new();
        while received < Seq(3) {
            gathering.attached(run, received);
            s.attached(received, gathering.begun()).unwrap();
            s.push_in_order(CHECK);
            // Each connection carries three frames.
            for _ in 0..3 {
                match s.poll_transmit() {
                    Some(Transmit::Part(part)) => {
                        assert!(part.data.len() <= crate::limits::PART_MAX_BYTES as usize);
                        if part.at + (part.data.len() as u32) < part.total_bytes {
                            let early = s.committed(part.seq);
                            assert!(matches!(early, Err(SenderError::Unsent { .. })), "{early:?}");
                        }
                        bytes += part.data.len();
                        if let Some(record) = gathering.add(received, &part).unwrap() {
                            received = record.seq;
                            whole.push(record);
                        }
                    }
                    Some(Transmit::Record(record)) => {
                        received = record.seq;
                        whole.push(record);
                    }
                    _ => {}
                }
            }
            s.detached();
        }
        assert_eq!(whole, [large(1), large(2), record(3)]);
        assert_eq!(bytes, 2 * large(1).encoded_len());
    }

    #[test]
    fn what_came_by_an_earlier_connection_may_be_durable_before_it_is_sent_again() {
        let mut s = Sender::new(Seq(0));
        (1..=5).for_each(|n| s.push(record(n)));
        s.attached(Seq(0), None).unwrap();
        assert_eq!(drain(&mut s), [1, 2, 3, 4, 5]);
        s.detached();
        s.push(record(6));
        s.attached(Seq(0), None).unwrap();
        assert!(matches!(s.poll_transmit(), Some(Transmit::Record(r)) if r.seq == Seq(1)));
        // The backup had no room for them until now.
        assert_eq!(s.committed(Seq(5)), Ok(Released { records: 5, bytes: 50 }));
        assert!(matches!(s.committed(Seq(6)), Err(SenderError::Unsent { .. })), "never sent");
        assert_eq!(drain(&mut s), [6]);
    }

    #[test]
    fn what_an_older_connection_brought_may_become_durable_late() {
        let mut s = Sender::new(Seq(0));
        s.attached(Seq(0), None).unwrap();
        (1..=2).for_each(|n| s.push(record(n)));
        assert_eq!(drain(&mut s), [1, 2]);
        s.detached();
        s.push(record(3));
        s.attached(Seq(0), None).unwrap();
        assert_eq!(s.committed(Seq(2)), Ok(Released { records: 2, bytes: 20 }));
        assert!(matches!(s.committed(Seq(3)), Err(SenderError::Unsent { .. })));
        assert_eq!(drain(&mut s), [3]);
    }

    #[test]
    fn digest_checks_keep_their_place_and_die_with_the_connection() {
        let mut s = Sender::new(Seq(0));
        s.push_in_order(CHECK);
        s.attached(Seq(0), None).unwrap();
        s.push(record(1));
        s.push_in_order(CHECK);
        s.push(record(2));
        assert_eq!(drain(&mut s), [1, 0, 2], "the one from before the attachment is gone");
        s.committed(Seq(2)).unwrap();
        assert_eq!(s.unsent(), 0);
        s.push_in_order(CHECK);
        s.detached();
        s.attached(Seq(2), None).unwrap();
        assert_eq!(drain(&mut s), [0u64; 0]);
    }

    #[test]
    fn a_backup_that_has_less_or_more_is_refused() {
        let mut s = Sender::new(Seq(4));
        assert!(matches!(s.attached(Seq(3), None), Err(SenderError::Gap { .. })));
        assert!(matches!(s.attached(Seq(5), None), Err(SenderError::Unsent { .. })));
        s.push(record(5));
        s.attached(Seq(4), None).unwrap();
        assert!(matches!(s.committed(Seq(5)), Err(SenderError::Unsent { .. })), "not sent yet");
        drain(&mut s);
        assert!(s.committed(Seq(5)).is_ok());
        assert_eq!(s.committed(Seq(5)), Ok(Released::default()), "acks repeat harmlessly");
        assert!(matches!(s.committed(Seq(6)), Err(SenderError::Unsent { .. })));
    }
}
