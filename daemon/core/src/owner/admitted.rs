//! What was admitted in a turn, for the link: in memory, or on disk only ([`super::spilling`]).

use crate::backlog::Position;
use crate::link::port::ToLink;
use crate::link::queue::Spilled;
use smallvec::SmallVec;
use tidelock_protocol::ids::{MonoNanos, Seq};
use tidelock_protocol::record::{Record, Role};

/// What was admitted in a turn, in its order.
#[derive(Debug, Default)]
pub struct Admitted(SmallVec<[Batch; 1]>);

#[derive(Debug)]
enum Batch {
    InMemory(Vec<Record>),
    OnDisk { spilled: Spilled, last_of_guest: Option<Seq> },
}

impl Admitted {
    /// Whether nothing was.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// What the link is told, in this order.
    pub fn take(&mut self, admitted_at: MonoNanos) -> impl Iterator<Item = ToLink> + use<> {
        std::mem::take(&mut self.0).into_iter().map(move |batch| match batch {
            Batch::InMemory(records) => ToLink::Records { records, admitted_at },
            Batch::OnDisk { spilled, last_of_guest } => {
                ToLink::Spilled { spilled, last_of_guest, admitted_at }
            }
        })
    }

    /// A record waits in memory.
    pub fn hold(&mut self, record: Record) {
        match self.0.last_mut() {
            Some(Batch::InMemory(records)) => records.push(record),
            _ => self.0.push(Batch::InMemory(vec![record])),
        }
    }

    /// It waits on disk only, there.
    pub fn spill(&mut self, record: &Record, at: Position) {
        let payload_bytes = record.payload().map_or(0, |p| p.data().len() as u64);
        let is_of_guest = record.role() == Role::Change;
        let of_guest = is_of_guest.then_some(record.seq);
        match self.0.last_mut() {
            Some(Batch::OnDisk { spilled, last_of_guest }) => {
                spilled.last = record.seq;
                spilled.payload_bytes += payload_bytes;
                *last_of_guest = of_guest.or(*last_of_guest);
            }
            _ => self.0.push(Batch::OnDisk {
                spilled: Spilled { at, first: record.seq, last: record.seq, payload_bytes },
                last_of_guest: of_guest,
            }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tidelock_protocol::hlc::Hlc;
    use tidelock_protocol::ids::{DiskId, Epoch, WriterId};
    use tidelock_protocol::record::Payload;
    use tidelock_protocol::record::{DiskChange, Effect};
    use tidelock_protocol::vector::CountVector;

    const NOW: MonoNanos = MonoNanos(5);

    fn record(seq: u64, effect: Effect) -> Record {
        Record {
            writer: WriterId(0),
            seq: Seq(seq),
            epoch: Epoch(1),
            hlc: Hlc(seq),
            deps: CountVector::new(),
            body: DiskChange { disk: DiskId(0), offset: 0, copy: false, flushed: false, effect },
        }
    }

    fn write(seq: u64) -> Record {
        record(seq, Effect::Write(Payload::new(vec![1; 100].into())))
    }

    /// The disk has failed in the middle of a turn: what comes then is in memory, behind what is on disk.
    #[test]
    fn the_link_is_told_in_the_order_of_seqs_where_each_record_is() {
        let at = |offset| Position { segment: 1, offset };
        let mut admitted = Admitted::default();
        assert!(admitted.is_empty());
        admitted.hold(write(1));
        admitted.hold(write(2));
        admitted.spill(&write(3), at(128));
        admitted.spill(&record(4, Effect::Idle), at(400));
        admitted.hold(write(5));
        let told: Vec<_> = admitted.take(NOW).collect();
        assert!(admitted.is_empty());
        let [first, second, third] = &told[..] else { panic!("{told:?}") };
        let in_memory = |message: &ToLink| match message {
            ToLink::Records { records, admitted_at: NOW } => {
                records.iter().map(|r| r.seq.0).collect()
            }
            _ => Vec::new(),
        };
        assert_eq!((in_memory(first), in_memory(third)), (vec![1, 2], vec![5]));
        let ToLink::Spilled { spilled, last_of_guest, admitted_at: NOW } = second else {
            panic!("{second:?}");
        };
        let expected = Spilled { at: at(128), first: Seq(3), last: Seq(4), payload_bytes: 100 };
        assert_eq!((*spilled, *last_of_guest), (expected, Some(Seq(3))));
    }
}
