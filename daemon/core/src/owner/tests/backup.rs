//! The loop and the backup: first contact, acknowledgements that are waited for, a full backlog, and a verification.

use super::guests::{Published, answers, ask, brings, ends, write};
use super::*;
use crate::link::port::{AttachedStream, FromLink};
use crate::link::{GateControl, HoldReason};
use crate::owner::spilling::{DiskBacklog, Opening};
use crate::owner::{Gap, GapWhy, PATIENCE, Phase, ToOwner, VerifyEnded};
use crate::sequencer::RECORD_OVERHEAD_BYTES;
use futures_channel::oneshot;
use std::path::Path;
use std::sync::atomic::AtomicUsize;
use std::task::Wake;
use tidelock_protocol::ids::{Epoch, Incarnation, Seq};
use tidelock_protocol::message::{Basis, CopyState, Message, StreamState};
use tidelock_protocol::vector::CountVector;
use tidelock_storage::unsynced::Directory;

/// Turns that the loop was woken for.
#[derive(Default)]
struct Woken(AtomicUsize);

impl Wake for Woken {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, Relaxed);
    }
}

/// A gate that is as slow as the test says.
#[derive(Default)]
struct Gate {
    is_behind: AtomicBool,
    held: Mutex<Vec<(HoldReason, bool)>>,
}

impl GateControl for Gate {
    fn committed(&self, _: &CountVector) {}
    fn lease_renewed(&self, _: MonoNanos) {}
    fn fence(&self) {}

    fn is_applied(&self) -> bool {
        !self.is_behind.load(Relaxed)
    }

    fn hold(&self, reason: HoldReason, hold: bool) {
        self.held.lock().unwrap().push((reason, hold));
    }
}

/// A member whose backup, gate and wake-ups the test sees.
struct Rig {
    of: Owner<Recorder>,
    woken: Arc<Woken>,
    gate: Arc<Gate>,
}

fn rig(change: impl FnOnce(&mut OwnerParts<NoFile>)) -> Rig {
    let (woken, gate) = (Arc::<Woken>::default(), Arc::<Gate>::default());
    let (port, _) = OwnerPort::new(woken.clone().into());
    let mut parts = OwnerParts {
        port: Arc::new(port),
        gate: gate.clone(),
        ..parts(Arc::<Published>::default(), None)
    };
    change(&mut parts);
    let mut of = Owner::new(parts, Recorder::default(), CLOCKS);
    of.begin();
    Rig { of, woken, gate }
}

impl Rig {
    fn attached(&mut self, copy: CopyState, durable: u64, compares: bool) {
        let basis = if copy == CopyState::Whole { Basis::Clean } else { Basis::Log };
        let stream = StreamState { last_hlc: Hlc::new(7_000, 0), copy, begun: None, basis };
        let attached = AttachedStream { epoch: Epoch(1), durable: Seq(durable), stream };
        let first = !self.of.sequencer.is_started();
        self.of.hear(ToOwner::Link(FromLink::Attached { attached, first, compares }));
        self.of.turn().unwrap();
    }

    /// An acknowledgement comes. Returns whether it has woken the loop, whose turn it is in any case.
    fn acked(&mut self, seq: u64) -> bool {
        let before = self.woken.0.load(Relaxed);
        self.of.port.set_acked(Seq(seq), Seq(seq));
        let wakes = self.woken.0.load(Relaxed) > before;
        self.of.turn().unwrap();
        wakes
    }

    fn turn_at(&mut self, now: MonoNanos) {
        self.of.now = now;
        self.of.turn().unwrap();
    }

    fn told(&mut self) -> Vec<ToLink> {
        std::mem::take(&mut self.of.driver.told)
    }

    /// A guest writes. Returns whether that begins on the local disk, where it then ends.
    fn writes(&mut self, nth: u64) -> bool {
        ask(&mut self.of, nth, nth * 4096, 4096, write(4096, false));
        self.has_written()
    }

    /// The local disk has read what copies look at.
    fn reads(&mut self) {
        while let Some((_, Asked::Read { range, .. })) = self.of.driver.asked.front() {
            let count = range.len();
            brings(&mut self.of, count, 3);
        }
    }

    fn has_written(&mut self) -> bool {
        let Some((op, Asked::Write { .. })) = self.of.driver.asked.pop_front() else {
            return false;
        };
        ends(&mut self.of, op, Ok(4096));
        true
    }
}

#[test]
fn guests_of_a_group_that_may_are_served_when_the_backup_is_not_reached_in_time() {
    let mut rig = rig(|parts| parts.serves_unreached_after = Some(PATIENCE));
    assert!(!rig.writes(1), "it waits for the backup");
    let late = CLOCKS.now.plus_ms(PATIENCE.as_millis() as u64);
    rig.turn_at(MonoNanos(late.0 - 1));
    assert!(rig.told().is_empty() && rig.of.driver.timers.contains(&Timer::Tick));
    rig.turn_at(late);
    assert!(matches!(rig.told()[..], [ToLink::ServeUnrecorded]), "the link is to say so first");
    rig.turn_at(late);
    assert!(rig.told().is_empty() && answers(&mut rig.of).is_empty());
    for _ in 0..2 {
        rig.of.hear(ToOwner::Link(FromLink::MayServeUnrecorded));
        rig.of.turn().unwrap();
        assert_eq!(rig.of.view.phase(), Phase::Unrecorded);
    }
    assert!(rig.has_written() && answers(&mut rig.of).len() == 1);
    assert_eq!(rig.of.sequencer.last_seq(), Seq(0), "nothing is recorded");
}

#[test]
fn a_loop_that_is_to_end_or_hold_still_begins_to_serve_nobody() {
    let mut rig = rig(|parts| parts.serves_unreached_after = Some(PATIENCE));
    let (reply, _drained) = oneshot::channel();
    rig.of.hear(ToOwner::Drain(reply, Arc::new(AtomicUsize::new(2))));
    rig.turn_at(CLOCKS.now.plus_ms(PATIENCE.as_millis() as u64));
    assert!(rig.told().is_empty());
}

#[test]
fn acknowledgements_wake_a_loop_that_is_to_end_or_hold_still_and_none_that_has_nothing_to_do() {
    let mut rig = rig(|_| ());
    rig.attached(CopyState::Whole, 0, false);
    assert!(rig.writes(1) && answers(&mut rig.of).len() == 1);
    assert!(!rig.acked(1));
    let (reply, mut drained) = oneshot::channel();
    assert!(rig.writes(2));
    rig.of.hear(ToOwner::Hold(reply, Arc::new(AtomicUsize::new(1))));
    rig.of.turn().unwrap();
    assert!(drained.try_recv().unwrap().is_none(), "the backup does not have it");
    assert!(rig.acked(2) && drained.try_recv().unwrap().is_some());
}

/// The time is shown, and a disaster goes back to it. C may be behind what is durable: then it is not known.
#[test]
fn a_comparison_is_of_disks_that_were_equal_at_a_time_if_the_backup_had_all_in_its_cut() {
    for (committed, since_unix_ms) in [(4, None), (5, Some(7_000)), (6, Some(7_000))] {
        let mut rig = rig(|_| ());
        rig.of.port.set_acked(Seq(5), Seq(committed));
        rig.attached(CopyState::Resyncing, 5, false);
        let gap = Gap { since_unix_ms, why: GapWhy::UncleanStop };
        assert_eq!(rig.of.view.gap(), Some(gap), "C at {committed}");
    }
}

const RECORD_BYTES: u64 = 4096 + RECORD_OVERHEAD_BYTES;

/// Room for two records of a page, in memory and with the disk.
fn backlog(directory: &Path) -> DiskBacklog {
    let opening = Opening {
        files: Directory::at(directory),
        segment_bytes: 1 << 20,
        limit_bytes: 2 * RECORD_BYTES,
        memory_limit_bytes: 2 * RECORD_BYTES,
        stands_at_limit: true,
        epoch: Epoch(1),
        incarnation: Incarnation(7),
        boot: [1; 16],
        identity: [2; 32],
    };
    opening.open(None).unwrap().owners
}

#[test]
fn at_a_full_backlog_guests_go_on_behind_a_shut_gate_and_the_backup_is_asked_to_compare() {
    let dir = tempfile::tempdir().unwrap();
    let mut rig = rig(|parts| {
        parts.backlog = Some(backlog(dir.path()));
        parts.settings.backlog_limit_bytes = 2 * RECORD_BYTES;
    });
    rig.attached(CopyState::Whole, 0, false);
    assert!(rig.writes(1) && rig.writes(2));
    assert!(dir.path().join("sound").exists(), "a later process could go on with it");
    rig.told();
    rig.of.driver.timers.clear();
    rig.gate.is_behind.store(true, Relaxed);

    assert!(!rig.writes(3), "the gate is not shut yet");
    assert_eq!(*rig.gate.held.lock().unwrap(), [(HoldReason::Gap, true)]);
    assert!(!dir.path().join("sound").exists());
    assert_eq!(rig.of.driver.timers, [Timer::Tick], "nobody says when it is");
    assert!(rig.told().is_empty());
    rig.gate.is_behind.store(false, Relaxed);
    rig.of.due(Timer::Tick);
    rig.of.turn().unwrap();
    assert!(matches!(rig.told()[..], [ToLink::Stands]));
    assert_eq!((rig.of.view.phase(), rig.of.stats.overflows.load(Relaxed)), (Phase::Overflowed, 1));
    assert!(rig.has_written() && rig.writes(4));
    assert_eq!(answers(&mut rig.of).len(), 4);
    assert_eq!(rig.of.sequencer.last_seq(), Seq(2), "what guests write now has no record");

    assert!(rig.acked(1) && rig.told().is_empty(), "the backup is to have all of the stream");
    assert!(rig.acked(2), "it is waited for, although no guest waits");
    assert!(matches!(rig.told()[..], [ToLink::AskToCompare]));
    rig.attached(CopyState::Resyncing, 2, true);
    assert_eq!(rig.of.view.phase(), Phase::Resyncing);
    rig.reads();
    assert!(rig.writes(5));
    assert_eq!(rig.of.sequencer.last_seq(), Seq(3), "it has a record again");
    let last = rig.gate.held.lock().unwrap().last().copied();
    assert_eq!(last, Some((HoldReason::Gap, true)), "until the comparison has ended");
}

#[test]
fn a_verification_looks_at_every_byte_and_what_it_has_found_is_told_once() {
    for equal in [true, false] {
        let mut rig = rig(|_| ());
        let verify = |rig: &mut Rig| {
            rig.of.hear(ToOwner::Verify { repair: false, rate_bytes_per_s: 0 });
            rig.of.turn().unwrap();
        };
        verify(&mut rig);
        let ended = rig.of.view.take_verify_ended();
        assert!(matches!(ended, Some(VerifyEnded::GivenUp(_))), "nothing is there to compare with");
        rig.attached(CopyState::Whole, 0, false);
        verify(&mut rig);
        let mut ended = None;
        for turn in 0..64 {
            assert!(rig.of.view.verify().is_some(), "it runs");
            rig.reads();
            for message in rig.told() {
                let ToLink::InOrder(Message::DigestCheck { disk, offset, .. }) = message else {
                    continue;
                };
                rig.of.hear(ToOwner::Link(FromLink::Digest { disk, offset, equal }));
            }
            // Chunks that differ are looked at again later.
            rig.turn_at(MonoNanos((turn + 1) * 11_000_000_000));
            ended = rig.of.view.take_verify_ended();
            if ended.is_some() {
                break;
            }
        }
        let Some(VerifyEnded::Whole(found)) = ended else { panic!("{ended:?}") };
        let differing = if equal { 0 } else { DISK_BYTES };
        assert_eq!((found.compared_bytes, found.differing_bytes), (DISK_BYTES, differing));
        assert!(found.differing.iter().all(|extent| extent.disk == "disk"));
        assert!(rig.of.view.verify().is_none());
        rig.of.turn().unwrap();
        assert!(rig.of.view.take_verify_ended().is_none());
    }
}
