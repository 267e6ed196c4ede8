//! The receiving half of the link, for one attached member, at the backup.
//!
//! It admits a record to the journal only if it is the next one of its writer, of the epoch that
//! was granted, and inside its disk. It never hands out an acknowledgement before the journal is
//! durable: [`Receiver::unsynced`] gives a token for everything admitted so far, and only a token
//! that went through an fdatasync turns into an [`Ack`] (the two types of raft-rs' `Ready`).

use crate::ids::{Epoch, Seq, WriterId};
use crate::record::{Body, DiskChange, Misplaced, Record};
use thiserror::Error;

/// Whether a record is for the journal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Admission {
    /// The next one: append it.
    Append,
    /// Already in the journal: a repetition after a reconnect.
    Duplicate,
}

/// Why the connection must end: the peer breaks the protocol or has been fenced.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum ReceiveError {
    /// A record of another writer than the one attached.
    #[error("record of writer {found} on the channel of writer {expected}")]
    Writer {
        /// As attached.
        expected: WriterId,
        /// As received.
        found: WriterId,
    },
    /// A record of another epoch than the one granted.
    #[error("record of epoch {found}, but the group is in epoch {granted}")]
    Epoch {
        /// As granted.
        granted: Epoch,
        /// As received.
        found: Epoch,
    },
    /// A record is missing.
    #[error("record {found} arrived, but {expected} is next: the stream has a gap")]
    Gap {
        /// The next one.
        expected: Seq,
        /// As received.
        found: Seq,
    },
    /// A change of what was not attached.
    #[error("record {seq} {misplaced}")]
    Misplaced {
        /// The record.
        seq: Seq,
        /// The reason.
        misplaced: Misplaced,
    },
}

/// Everything admitted up to a seq, not yet on stable storage. It cannot be copied, compared or
/// sent: the only way on is [`Unsynced::synced`].
#[derive(Debug)]
#[must_use = "what was admitted is never acknowledged without this"]
pub struct Unsynced(Seq);

/// Proof that the journal is durable up to a seq of the writer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Ack(Seq);

impl Unsynced {
    /// To be called after the fdatasync that covers the records, and at no other place.
    pub fn synced(self) -> Ack {
        Ack(self.0)
    }
}

impl Ack {
    /// The writer's durable seq.
    #[must_use]
    pub fn durable(self) -> Seq {
        self.0
    }
}

/// The receiver of one attached member.
#[derive(Debug)]
pub struct Receiver<B: Body = DiskChange> {
    writer: WriterId,
    epoch: Epoch,
    objects: B::Objects,
    received: Seq,
}

impl<B: Body> Receiver<B> {
    /// A receiver that goes on after `journaled`, the last record of the writer in the journal.
    #[must_use]
    pub fn new(writer: WriterId, epoch: Epoch, objects: B::Objects, journaled: Seq) -> Self {
        Self { writer, epoch, objects, received: journaled }
    }

    /// Judges a record. After an error the connection must be closed; nothing of it was admitted.
    pub fn admit(&mut self, record: &Record<B>) -> Result<Admission, ReceiveError> {
        if record.writer != self.writer {
            return Err(ReceiveError::Writer { expected: self.writer, found: record.writer });
        }
        if record.epoch != self.epoch {
            return Err(ReceiveError::Epoch { granted: self.epoch, found: record.epoch });
        }
        if record.seq <= self.received {
            return Ok(Admission::Duplicate);
        }
        let expected = self.received.next();
        if record.seq != expected {
            return Err(ReceiveError::Gap { expected, found: record.seq });
        }
        let fits = record.body.fits(&self.objects);
        fits.map_err(|misplaced| ReceiveError::Misplaced { seq: record.seq, misplaced })?;
        self.received = record.seq;
        Ok(Admission::Append)
    }

    /// A token for everything admitted so far.
    pub fn unsynced(&self) -> Unsynced {
        Unsynced(self.received)
    }

    /// The last record admitted.
    #[must_use]
    pub fn received(&self) -> Seq {
        self.received
    }

    /// The attached writer.
    #[must_use]
    pub fn writer(&self) -> WriterId {
        self.writer
    }

    /// The granted epoch.
    #[must_use]
    pub fn epoch(&self) -> Epoch {
        self.epoch
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hlc::Hlc;
    use crate::ids::DiskId;
    use crate::message::DiskSpec;
    use crate::record::Effect;
    use crate::vector::CountVector;

    fn receiver() -> Receiver {
        let disk = DiskSpec { id: DiskId(1), name: "data".into(), size_bytes: 8192 };
        Receiver::new(WriterId(0), Epoch(2), vec![disk], Seq(10))
    }

    fn zero(seq: u64, offset: u64, len_bytes: u32) -> Record {
        Record {
            writer: WriterId(0),
            seq: Seq(seq),
            epoch: Epoch(2),
            hlc: Hlc(0),
            deps: CountVector::new(),
            body: DiskChange {
                disk: DiskId(1),
                offset,
                copy: false,
                flushed: false,
                effect: Effect::Zero { len_bytes, no_hole: false },
            },
        }
    }

    #[test]
    fn only_the_next_record_is_admitted() {
        let mut r = receiver();
        assert_eq!(r.admit(&zero(10, 0, 1)), Ok(Admission::Duplicate));
        assert_eq!(
            r.admit(&zero(12, 0, 1)),
            Err(ReceiveError::Gap { expected: Seq(11), found: Seq(12) })
        );
        assert_eq!(r.admit(&zero(11, 0, 1)), Ok(Admission::Append));
        assert_eq!(r.admit(&zero(12, 0, 1)), Ok(Admission::Append));
        assert_eq!(r.unsynced().synced().durable(), Seq(12));
    }

    #[test]
    fn extents_end_at_the_disk_and_not_one_byte_past_it() {
        let mut r = receiver();
        assert_eq!(r.admit(&zero(11, 8191, 1)), Ok(Admission::Append));
        let beyond = Misplaced::Extent { disk: DiskId(1), end: 8193, size_bytes: 8192 };
        let refused = |misplaced| Err(ReceiveError::Misplaced { seq: Seq(12), misplaced });
        assert_eq!(r.admit(&zero(12, 8191, 2)), refused(beyond));
        let other = Record {
            body: DiskChange { disk: DiskId(0), ..zero(12, 0, 1).body },
            ..zero(12, 0, 1)
        };
        assert_eq!(r.admit(&other), refused(Misplaced::Object(0)));
        assert_eq!(r.received(), Seq(11), "what was refused was not admitted");
    }

    #[test]
    fn an_ended_epoch_and_a_strange_writer_are_refused() {
        let mut r = receiver();
        let old = Record { epoch: Epoch(1), ..zero(11, 0, 1) };
        assert!(matches!(r.admit(&old), Err(ReceiveError::Epoch { .. })));
        let strange = Record { writer: WriterId(1), ..zero(11, 0, 1) };
        assert!(matches!(r.admit(&strange), Err(ReceiveError::Writer { .. })));
    }
}
