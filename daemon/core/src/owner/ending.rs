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
        if draining.ends && may_tell && !draining.last_word.say(&mut self.sequencer, clocks) {
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
    use super::super::tests::{Recorder, owner};
    use super::*;
    use std::time::Duration;
    use tidelock_protocol::hlc::Hlc;
    use tidelock_protocol::ids::{Epoch, Seq};

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
}
