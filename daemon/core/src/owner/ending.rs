//! The clean end: nothing new, everything to the backup, then the last word. And the same without an end: the guest's
//! disk holds still, for a switch to the backup site, until it is let go again or the loop ends.

use super::disk::Disk;
use super::driver::{DiskFile, Driver, Taking};
use super::idling::LastWord;
use super::replication::Clocks;
use super::{Drained, Owner, Several, ToOwner, replication};
use crate::link::port::{OwnerPort, ToLink};
use crate::state::{MemberState, StateError};
use futures_channel::oneshot;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use tidelock_planted::{Bug, is};
use tidelock_protocol::message::{CleanEnd, Form};
use tidelock_storage::Storage;

/// Nothing new is taken.
pub(super) struct Draining {
    /// Told once, when everything is at the backup.
    reply: Option<oneshot::Sender<Drained>>,
    /// Writers of the group on this host that are not ready to end.
    not_ready: Arc<AtomicUsize>,
    /// This one was.
    is_ready: bool,
    /// The loop ends then.
    ends: bool,
    last_word: LastWord,
}

/// Asks the owner loops of a group's writers on one host to end cleanly. Returns their answers, in order.
pub fn drain(form: Form, writers: &[&OwnerPort<ToOwner>]) -> Vec<oneshot::Receiver<Drained>> {
    // In the HLC form a held packet of one writer waits for all the others.
    let together = Arc::new(AtomicUsize::new(writers.len()));
    let ask = |port: &&OwnerPort<ToOwner>| {
        let (reply, drained) = oneshot::channel();
        let not_ready = match form {
            Form::Hlc => together.clone(),
            Form::Vector => Arc::new(AtomicUsize::new(1)),
        };
        port.send(ToOwner::Drain(reply, not_ready));
        drained
    };
    writers.iter().map(ask).collect()
}

impl Drained {
    /// Puts a clean end on record. Returns whether it is one.
    pub fn keep<S: Storage>(self, state: &MemberState<S>) -> Result<bool, StateError> {
        let Self { seq, hlc, marks } = self;
        let Some(marks) = marks else { return Ok(false) };
        state.ended_cleanly(seq, hlc, marks).map(|()| true)
    }
}

impl<D: Driver> Owner<D> {
    pub(super) fn begin_drain(
        &mut self,
        reply: oneshot::Sender<Drained>,
        not_ready: Arc<AtomicUsize>,
        ends: bool,
    ) {
        tracing::info!(member = self.member, "draining: no new requests");
        self.draining = Some(Draining {
            reply: Some(reply),
            not_ready,
            is_ready: false,
            ends,
            last_word: LastWord::default(),
        });
        if !self.switched_over {
            self.driver.take(Taking::Nothing);
        }
        self.copying.stop();
    }

    /// Requests are taken again.
    pub(super) fn end_hold(&mut self) {
        if self.draining.as_ref().is_none_or(|draining| draining.ends) {
            return;
        }
        tracing::info!(member = self.member, "requests are taken again");
        self.draining = None;
        self.copying.go_on();
        self.driver.take(if self.switched_over { Taking::TurnAway } else { Taking::All });
    }

    /// The group was switched over for good: who waits for requests to be taken again need not.
    pub(super) fn turn_away(&mut self) {
        self.switched_over = true;
        self.driver.take(Taking::TurnAway);
    }

    /// Whether everything that this member may depend on is in C, also of other writers: the next
    /// run begins with a P that does not name it.
    pub(super) fn is_covered(&mut self) -> bool {
        self.observe_tags();
        let (committed, watermark) = self.port.told();
        match self.several {
            None => true,
            Some(Several { form: Form::Vector, .. }) => committed.covers(&self.observed),
            Some(Several { form: Form::Hlc, .. }) => watermark >= self.observed_hlc,
        }
    }

    pub(super) fn finish_drain(&mut self) {
        let Some(draining) = &self.draining else { return };
        let others = draining.not_ready.clone();
        if draining.ends && self.is_fenced() {
            return self.end_unacknowledged();
        }
        let is_ready = self.open_requests == 0
            && self.driver.has_sent_answers()
            && (replication::is_settled(&self.sequencer) && self.is_covered()
                || is(Bug::EndsUnsettled));
        let draining = self.draining.as_mut().expect("just seen");
        if is_ready && !std::mem::replace(&mut draining.is_ready, true) {
            others.fetch_sub(1, Ordering::SeqCst);
        }
        // What the others hold may wait for a time of this writer: it speaks until they are ready.
        if !is_ready || others.load(Ordering::SeqCst) > 0 {
            return self.arm_tick();
        }
        let draining = self.draining.as_mut().expect("just seen");
        // Alone, or without a backup that listens, it has nobody to tell.
        let has_peers = matches!(self.several, Some(Several { form: Form::Hlc, .. }));
        let may_tell = has_peers && self.attached && self.sequencer.is_started();
        let clocks = Clocks { now: self.now, wall_ms: self.wall_ms };
        let frontier = self.idling.frontier.max(self.port.frontier());
        if draining.ends
            && may_tell
            && !draining.last_word.say(&mut self.sequencer, frontier, clocks)
        {
            return self.arm_tick();
        }
        let (reply, ends) = (draining.reply.take(), draining.ends);
        let Some(reply) = reply else { return };
        let (seq, hlc) = (self.sequencer.last_seq(), self.sequencer.last_hlc());
        // The backup is told: a clean end that it has not heard of is none.
        let is_equal = self.sequencer.is_started() && self.copying.is_whole() && self.attached;
        let marks = if is_equal && self.sync_disks() { self.marks() } else { None };
        if ends {
            self.draining = None;
            // Who has left has nothing that is not at the backup: what has no record is not.
            if !self.spilling.stands() && !self.sequencer.serves_unrecorded() {
                let end = marks.clone().map(|marks| CleanEnd { seq, marks });
                self.driver.to_link(ToLink::Detach(end));
            }
        }
        let _ = reply.send(Drained { seq, hlc, marks });
        self.stopped = ends;
    }

    /// The backup has ended the epoch, so it acknowledges nothing more: only what is under way on the local disk is
    /// waited for. What waits for the backup is given up, as in a crash.
    fn end_unacknowledged(&mut self) {
        if !self.local_ops.is_empty() {
            return;
        }
        let Some(draining) = self.draining.take() else { return };
        tracing::warn!(
            member = self.member,
            unacknowledged = self.sequencer.last_seq().0.saturating_sub(self.sequencer.durable().0),
            "draining: the backup has ended this primary's epoch and takes nothing more"
        );
        if !draining.is_ready {
            draining.not_ready.fetch_sub(1, Ordering::SeqCst);
        }
        self.driver.to_link(ToLink::Detach(None));
        if let Some(reply) = draining.reply {
            // Whoever asked may not wait any more.
            let _ = reply.send(Drained {
                seq: self.sequencer.last_seq(),
                hlc: self.sequencer.last_hlc(),
                marks: None,
            });
        }
        self.stopped = true;
    }

    /// The identity of each disk, by which a later start knows that nobody has changed it.
    fn marks(&self) -> Option<Vec<String>> {
        let marks = self.disks.iter().map(Disk::mark).collect::<std::io::Result<_>>();
        if let Err(error) = &marks {
            let member = &self.member;
            tracing::error!(member, %error, "a disk cannot be identified: the next start compares the sites");
        }
        marks.ok()
    }

    /// Makes durable what the backup has. A clean end says that the sites are equal, and must
    /// stay true if the host loses power right after it.
    pub(super) fn sync_disks(&self) -> bool {
        self.disks.iter().all(|disk| {
            let synced = disk.file().sync();
            if let Err(error) = &synced {
                tracing::error!(
                    member = self.member,
                    disk = disk.name(),
                    %error,
                    "the local disk failed its last flush: the next start compares the sites"
                );
            }
            synced.is_ok() && disk.poisoned().is_none()
        })
    }
}

#[cfg(test)]
mod tests {
    use super::super::PublishPending;
    use super::super::driver::Timer;
    use super::super::tests::{Recorder, owner};
    use super::*;
    use crate::link::Refusal;
    use crate::sequencer::{Extent, RequestId};
    use crate::state::StateFile;
    use std::time::Duration;
    use tidelock_protocol::hlc::Hlc;
    use tidelock_protocol::ids::{DiskId, Epoch, Seq, WriterId};
    use tidelock_protocol::message::{CopyState, RefusalKind};
    use tidelock_protocol::record::{Effect, Payload};
    use tidelock_protocol::vector::CountVector;
    use tidelock_storage::memory::Memory;

    struct Nowhere;

    impl PublishPending for Nowhere {
        fn publish(&self, _: Seq, _: Hlc) {}
    }

    fn started(several: Option<Several>, attached: bool) -> Owner<Recorder> {
        let mut owner = owner(Arc::new(Nowhere), several);
        owner.attached = attached;
        owner.sequencer.start(Epoch(1), Seq(0), Hlc(0), owner.now, owner.wall_ms);
        owner
    }

    /// The answer to a drain that began just now, if there is one.
    fn drained(owner: &mut Owner<Recorder>, ends: bool) -> Option<Drained> {
        let (reply, mut drained) = oneshot::channel();
        owner.begin_drain(reply, Arc::new(AtomicUsize::new(1)), ends);
        owner.finish_drain();
        drained.try_recv().unwrap()
    }

    #[test]
    fn a_writer_with_nothing_under_way_and_nobody_to_tell_is_drained_at_once() {
        let peers = || Some(Several { form: Form::Hlc, idle_interval: Duration::from_secs(1) });
        for (several, attached) in [(None, true), (None, false), (peers(), false)] {
            let mut of = started(several, attached);
            assert_eq!(drained(&mut of, true).unwrap().seq, Seq(0));
            assert!(of.has_ended());
            assert!(matches!(of.driver.told[..], [ToLink::Detach(_)]), "the end is told");
        }
        let mut of = owner(Arc::new(Nowhere), None);
        assert!(drained(&mut of, true).is_some() && of.has_ended(), "the backup was not reached");
        let mut of = started(None, true);
        assert!(drained(&mut of, false).is_some() && !of.has_ended(), "held, and no more");
        assert!(of.driver.told.is_empty());
    }

    #[test]
    fn a_writer_is_drained_when_the_others_of_its_host_are() {
        let (reply, mut drained) = oneshot::channel();
        let not_ready = Arc::new(AtomicUsize::new(2));
        let mut of = started(None, true);
        of.begin_drain(reply, not_ready.clone(), true);
        for _ in 0..3 {
            of.finish_drain();
            assert!(drained.try_recv().unwrap().is_none() && !of.has_ended());
            assert_eq!(not_ready.load(Ordering::SeqCst), 1, "it is counted once");
        }
        not_ready.fetch_sub(1, Ordering::SeqCst);
        of.finish_drain();
        assert!(drained.try_recv().unwrap().is_some() && of.has_ended());
    }

    fn peers(form: Form) -> Option<Several> {
        Some(Several { form, idle_interval: Duration::from_secs(1) })
    }

    /// The backup's disks equal the local ones.
    fn make_whole(owner: &mut Owner<Recorder>) {
        owner.copying.attached("web", CopyState::Whole, None, |_| Vec::new(), owner.now);
        assert!(owner.copying.is_whole());
    }

    fn detached(owner: &Owner<Recorder>) -> Option<CleanEnd> {
        let [ToLink::Detach(end)] = &owner.driver.told[..] else {
            panic!("{:?}", owner.driver.told)
        };
        end.clone()
    }

    /// The backup is told of it, and the next run goes by it only if all of it is so.
    #[test]
    fn an_end_is_clean_if_the_backup_has_the_disks_and_they_are_durable_here() {
        let end = |is_whole, attached, change: fn(&mut Owner<Recorder>)| {
            let mut of = started(None, attached);
            if is_whole {
                make_whole(&mut of);
            }
            change(&mut of);
            let end = drained(&mut of, true).unwrap();
            assert_eq!(detached(&of).map(|end| end.marks), end.marks);
            let state = StateFile::new(Memory::default(), "shop", "web").open(1).unwrap().0;
            assert_eq!(end.clone().keep(&state).unwrap(), end.marks.is_some());
            end.marks
        };
        assert_eq!(end(true, true, |_| ()), Some(vec!["disk no file".to_owned()]));
        assert_eq!(end(false, true, |_| ()), None, "the disks are not there");
        assert_eq!(end(true, false, |_| ()), None, "the backup is not told");
        let cannot_sync = |of: &mut Owner<Recorder>| {
            of.disks[0].file().cannot_sync.store(true, Ordering::SeqCst);
        };
        assert_eq!(end(true, true, cannot_sync), None);
        let has_failed = |of: &mut Owner<Recorder>| {
            of.disks[0].poison("web", &std::io::ErrorKind::Other.into());
        };
        assert_eq!(end(true, true, has_failed), None, "an earlier flush has failed");
        let has_no_mark = |of: &mut Owner<Recorder>| {
            of.disks[0].file().has_no_mark.store(true, Ordering::SeqCst);
        };
        assert_eq!(end(true, true, has_no_mark), None);
    }

    #[test]
    fn a_writer_is_not_drained_before_all_is_done_and_at_the_backup() {
        let waits = |change: fn(&mut Owner<Recorder>), is_over: fn(&mut Owner<Recorder>)| {
            let mut of = started(peers(Form::Vector), true);
            change(&mut of);
            let (reply, mut drained) = oneshot::channel();
            let not_ready = Arc::new(AtomicUsize::new(1));
            of.begin_drain(reply, not_ready.clone(), true);
            of.finish_drain();
            assert_eq!(not_ready.load(Ordering::SeqCst), 1);
            assert!(drained.try_recv().unwrap().is_none() && !of.has_ended());
            assert_eq!(of.driver.timers, [Timer::Tick], "it looks again");
            is_over(&mut of);
            of.finish_drain();
            assert!(drained.try_recv().unwrap().is_some() && of.has_ended());
        };
        waits(|of| of.open_requests = 1, |of| of.open_requests = 0);
        waits(|of| of.driver.answers_wait = true, |of| of.driver.answers_wait = false);
        let write = |of: &mut Owner<Recorder>| of.sequencer.idle(of.now, of.wall_ms);
        waits(write, |of| {
            while of.sequencer.poll_action().is_some() {}
            of.sequencer.committed(of.sequencer.last_seq(), of.now, of.wall_ms);
        });
        let other = || CountVector::of(WriterId(1), Seq(3));
        waits(
            |of| of.observed = CountVector::of(WriterId(1), Seq(3)),
            |of| of.port.set_told(&CountVector::of(WriterId(1), Seq(3)), Hlc(0)),
        );

        // The watermark says it in the form of times.
        let mut of = started(peers(Form::Hlc), false);
        of.pending = Arc::new(Heard(Hlc(5)));
        of.port.set_told(&other(), Hlc(4));
        assert!(!of.is_covered());
        of.port.set_told(&other(), Hlc(5));
        assert!(of.is_covered());
        let mut alone = started(None, true);
        alone.observed = other();
        assert!(alone.is_covered());
    }

    /// The greatest time that a member has heard of others.
    struct Heard(Hlc);

    impl PublishPending for Heard {
        fn publish(&self, _: Seq, _: Hlc) {}

        fn read(&self, _: &mut CountVector) -> Hlc {
            self.0
        }
    }

    #[test]
    fn only_a_writer_that_ends_and_has_peers_that_go_by_times_says_a_last_word() {
        let says = |several, attached, ends| {
            let mut of = started(several, attached);
            let is_over = drained(&mut of, ends).is_some();
            let wants_time = of.sequencer.greatest_hlc().physical_ms() > of.wall_ms;
            assert_eq!(is_over, !wants_time, "once it is said and durable");
            wants_time
        };
        assert!(says(peers(Form::Hlc), true, true));
        assert!(!says(peers(Form::Hlc), true, false), "it goes on");
        assert!(!says(peers(Form::Hlc), false, true));
        assert!(!says(peers(Form::Vector), true, true));
        assert!(!says(None, true, true));
    }

    #[test]
    fn no_requests_are_taken_while_a_writer_is_drained_or_held() {
        use Taking::{All, Nothing, TurnAway};
        for (switched_over, before, after) in [(false, &[Nothing][..], All), (true, &[], TurnAway)]
        {
            let mut of = started(None, true);
            of.switched_over = switched_over;
            of.end_hold();
            assert!(of.driver.taking.is_empty(), "nothing is held");
            let (reply, _answer) = oneshot::channel();
            of.begin_drain(reply, Arc::new(AtomicUsize::new(2)), false);
            assert_eq!(of.driver.taking, before);
            of.end_hold();
            assert_eq!(of.driver.taking.pop(), Some(after));
            assert!(of.draining.is_none());
            // An end is not taken back.
            let (reply, _answer) = oneshot::channel();
            of.begin_drain(reply, Arc::new(AtomicUsize::new(2)), true);
            of.driver.taking.clear();
            of.end_hold();
            assert!(of.driver.taking.is_empty() && of.draining.is_some());
        }
        let mut of = started(None, true);
        of.turn_away();
        assert!(of.switched_over && of.driver.taking == [TurnAway]);
    }

    #[test]
    fn after_the_end_of_its_epoch_a_writer_waits_for_its_local_disk_alone() {
        for (is_ready, count) in [(false, 1), (true, 2)] {
            let mut of = started(None, true);
            let extent = Extent { disk: DiskId(0), offset: 0, len_bytes: 512 };
            let effect = Effect::Write(Payload::new(vec![1; 512].into()));
            of.sequencer.submit(RequestId(1), extent, effect, false, of.now, of.wall_ms);
            of.act();
            let (op, local) = of.local_ops.drain().next().unwrap();
            let (reply, mut drained) = oneshot::channel();
            let not_ready = Arc::new(AtomicUsize::new(2));
            of.begin_drain(reply, not_ready.clone(), true);
            of.draining.as_mut().unwrap().is_ready = is_ready;
            let (kind, reason) = (RefusalKind::Fenced, String::new());
            of.refusal = Some(Refusal { kind, reason });
            of.local_ops.insert(op, local);
            of.finish_drain();
            assert!(drained.try_recv().unwrap().is_none() && !of.has_ended());
            of.local_ops.clear();
            of.driver.told.clear();
            of.finish_drain();
            let end = drained.try_recv().unwrap().unwrap();
            assert_eq!((end.seq, end.marks), (of.sequencer.last_seq(), None));
            assert!(of.has_ended() && detached(&of).is_none());
            assert_eq!(not_ready.load(Ordering::SeqCst), count, "it is counted once");
        }
    }

    #[test]
    fn the_writers_of_a_host_end_together_in_the_form_of_times_and_each_by_itself_else() {
        for (form, counts) in [(Form::Hlc, [3, 3, 3]), (Form::Vector, [1, 1, 1])] {
            let ports = [(); 3].map(|()| OwnerPort::new(std::task::Waker::noop().clone()));
            let answers = drain(form, &ports.each_ref().map(|(port, _)| port));
            assert_eq!(answers.len(), 3);
            let counted = ports.map(|(_, messages)| match messages.try_recv() {
                Ok(ToOwner::Drain(_, not_ready)) => not_ready,
                _ => panic!("it is not told to end"),
            });
            let now = |of: &Arc<AtomicUsize>| of.load(Ordering::SeqCst);
            assert_eq!(counted.each_ref().map(now), counts);
            counted[0].store(9, Ordering::SeqCst);
            assert_eq!(now(&counted[1]) == 9, form == Form::Hlc);
        }
    }
}
