//! What a writer of a group with several members does besides: it takes in what it has heard of the
//! others, and lets the watermark pass it.

use super::token::Token;
use super::{Owner, Several};
use crate::clock;
use std::sync::atomic::Ordering;
use tidelock_protocol::hlc::Hlc;
use tidelock_protocol::ids::Seq;
use tidelock_protocol::message::Form;
use tidelock_protocol::vector::CountVector;

impl Owner {
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

    pub(super) fn read_clock(&mut self) {
        self.wall_ms = self.wall.read(clock::wall_ms(), self.now);
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
        self.ring.timeout(Token::Idle.to_u64(), idle_interval);
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
