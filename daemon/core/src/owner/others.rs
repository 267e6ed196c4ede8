//! What a writer of a group with several members does besides: it takes in what it has heard of the
//! others, and lets the watermark pass it.

use super::driver::{Driver, Timer};
use super::replication::Clocks;
use super::{Owner, Several};
use std::sync::atomic::Ordering;
use tidelock_protocol::hlc::Hlc;
use tidelock_protocol::ids::Seq;
use tidelock_protocol::message::Form;
use tidelock_protocol::vector::CountVector;

impl<D: Driver> Owner<D> {
    /// What the member has heard of others before it sent the request at hand: its record depends
    /// on it.
    pub(super) fn observe_tags(&mut self) {
        let Some(several) = self.several else { return };
        self.observed_hlc = self.pending.read(&mut self.observed);
        match several.form {
            Form::Vector => self.sequencer.depends_on(&self.observed),
            Form::Hlc => self.sequencer.observe(self.observed_hlc),
        }
    }

    /// What the guest tells others from now on may be of what no record before a comparison names. The first record after
    /// `last`, and the time `hlc`, which no record before has reached, are in C with all of that comparison.
    pub(super) fn depend_on_comparison(&self, last: Seq, hlc: Hlc) {
        if self.several.is_some() {
            self.pending.raise(&CountVector::of(self.writer, last.next()), hlc);
        }
    }

    /// The time at which what comes next happens, by both clocks of the host.
    pub fn set_time(&mut self, clocks: Clocks) {
        self.now = clocks.now;
        self.wall_ms = self.wall.read(clocks.wall_ms, self.now);
        let refused_ms = self.wall.refused_ms().unwrap_or(0);
        let before = self.stats.clock_refused_ms.swap(refused_ms, Ordering::Relaxed);
        if refused_ms != 0 && before == 0 {
            tracing::error!(
                member = self.member,
                jump_ms = refused_ms,
                "the wall clock has jumped and is not believed until it comes back; after a \
                 correction that is meant, start the daemon again"
            );
        }
        if let Some(ceiling_ms) = self.view.hlc_ceiling_ms() {
            self.sequencer.set_ceiling(ceiling_ms, self.now, self.wall_ms);
        }
    }

    /// In the HLC form a writer that has nothing to write says so, while others write.
    pub(super) fn drive_idle(&mut self) {
        let Some(Several { form: Form::Hlc, idle_interval }) = self.several else { return };
        if !self.attached || !self.sequencer.is_started() {
            return;
        }
        // Also what nobody has written here since: packets wait for it, and the backup may hear of that only with the next
        // beacon.
        self.observed_hlc = self.pending.read(&mut self.observed);
        let frontier = self.port.frontier().max(self.observed_hlc);
        self.idling.heard(frontier, self.now);
        if self.idling.armed {
            return;
        }
        if !self.wants_to_speak() {
            self.port.wake_at_frontier();
            // It may have risen between the look and the wish.
            if self.port.frontier() <= frontier {
                return;
            }
        }
        self.idling.armed = true;
        self.driver.set_timer(Timer::Idle, idle_interval);
    }

    fn wants_to_speak(&self) -> bool {
        let last = self.sequencer.record_hlc();
        match self.draining {
            None => self.idling.wants(last, self.now),
            Some(_) => self.idling.is_behind(last),
        }
    }

    pub(super) fn idle_due(&mut self) {
        self.idling.armed = false;
        let Some(Several { form: Form::Hlc, idle_interval }) = self.several else { return };
        self.idling.heard(self.port.frontier(), self.now);
        let last = self.sequencer.record_hlc();
        let quiet_since = last.physical_ms() + idle_interval.as_millis() as u64;
        let is_due = self.idling.is_behind(last) || quiet_since <= self.wall_ms;
        if self.attached && is_due && self.wants_to_speak() {
            self.sequencer.observe(self.idling.frontier);
            self.sequencer.idle(self.now, self.wall_ms);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::PublishPending;
    use super::super::tests::{Recorder, owner};
    use super::*;
    use std::sync::Arc;
    use std::sync::atomic::AtomicU64;
    use std::time::Duration;
    use tidelock_protocol::ids::{Epoch, MonoNanos};

    const INTERVAL: Duration = Duration::from_secs(3600);
    const WALL_MS: u64 = 1_000_000;

    /// P of a member, which only hears of others.
    #[derive(Default)]
    struct Heard(AtomicU64);

    impl PublishPending for Heard {
        fn publish(&self, _: Seq, _: Hlc) {}

        fn read(&self, _: &mut CountVector) -> Hlc {
            Hlc(self.0.load(Ordering::Relaxed))
        }
    }

    /// A writer among several, attached, that has nothing to write; and what it hears.
    fn listener() -> (Owner<Recorder>, Arc<Heard>) {
        let heard = Arc::<Heard>::default();
        let several = Several { form: Form::Hlc, idle_interval: INTERVAL };
        let mut owner = owner(heard.clone(), Some(several));
        owner.attached = true;
        owner.sequencer.start(Epoch(1), Seq(0), Hlc(0), owner.now, owner.wall_ms);
        (owner, heard)
    }

    /// Packets and C come all the time, each with a later time than the one before, and it is behind each of them.
    #[test]
    fn however_much_it_hears_it_speaks_once_in_an_interval_at_most() {
        let (mut owner, heard) = listener();
        let (intervals, events) = (8, 200);
        let interval_ms = INTERVAL.as_millis() as u64;
        let mut spoken = Vec::new();
        for interval in 0..intervals {
            let begin = owner.sequencer.last_seq();
            for event in 0..events {
                let ms = interval * interval_ms + event * (interval_ms / events);
                (owner.now, owner.wall_ms) = (MonoNanos(ms * 1_000_000), WALL_MS + ms);
                let later = Hlc::new(owner.wall_ms + 1, 0);
                match event % 2 {
                    0 => owner.port.set_frontier(later),
                    _ => heard.0.store(later.0, Ordering::Relaxed),
                }
                owner.observe_tags();
                owner.turn().unwrap();
            }
            assert_eq!(owner.sequencer.last_seq(), begin, "no event makes it speak");
            let timers = owner.driver.timers.iter().filter(|timer| **timer == Timer::Idle);
            assert_eq!(timers.count() as u64, interval + 1, "one timer for all of them");
            owner.idle_due();
            spoken.push(owner.sequencer.last_seq().0 - begin.0);
        }
        assert_eq!(spoken, vec![1; intervals as usize]);
    }

    /// The others hear of a writer only through a backup that has it.
    #[test]
    fn a_writer_says_nothing_before_the_backup_has_it_and_its_stream_has_begun() {
        for (attached, is_started, speaks) in
            [(true, true, true), (false, true, false), (true, false, false)]
        {
            let heard = Arc::<Heard>::default();
            let several = Several { form: Form::Hlc, idle_interval: INTERVAL };
            let mut owner = owner(heard.clone(), Some(several));
            owner.attached = attached;
            if is_started {
                owner.sequencer.start(Epoch(1), Seq(0), Hlc(0), owner.now, owner.wall_ms);
            }
            owner.port.set_frontier(Hlc::new(owner.wall_ms + 1, 0));
            owner.turn().unwrap();
            assert_eq!(owner.driver.timers.contains(&Timer::Idle), speaks);
        }
    }
}
