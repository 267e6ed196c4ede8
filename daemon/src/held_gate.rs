//! The gate and P as the other loops of a member see them.

use std::sync::{Arc, Mutex};
use tidelock_daemon_core::link::GateControl;
use tidelock_daemon_core::owner::PublishPending;
use tidelock_netfilter::gate::{GateHandle, Pending};
use tidelock_protocol::hlc::Hlc;
use tidelock_protocol::ids::{MonoNanos, Seq, WriterId};
use tidelock_protocol::lease::HoldReason;
use tidelock_protocol::message::Form;
use tidelock_protocol::tag;
use tidelock_protocol::vector::CountVector;

/// A group's gate, told by the link of one of its members on this host.
#[derive(Debug)]
pub struct HeldGate {
    /// The gate; `None`: no member of the group here has a network.
    pub handle: Option<GateHandle>,
    /// The member, if it is a writer.
    pub writer: Option<WriterId>,
    /// Its P.
    pub pending: Arc<Pending>,
    /// The form of stamps: a packet waits for a vector, or for a time.
    pub form: Form,
    /// The last floor.
    pub floor: Mutex<(CountVector, Hlc)>,
}

impl GateControl for HeldGate {
    fn committed(&self, committed: &CountVector) {
        if let Some(handle) = &self.handle {
            handle.set_committed(committed);
        }
    }

    fn tag_terms(&self, terms: &tag::TagTerms) {
        if let Some(handle) = &self.handle {
            handle.set_tag_terms(terms);
        }
    }

    fn lease_renewed(&self, sent_at: MonoNanos) {
        if let Some(handle) = &self.handle {
            handle.lease_renewed(sent_at);
        }
    }

    fn fence(&self) {
        if let Some(handle) = &self.handle {
            handle.fence();
        }
    }

    fn is_applied(&self) -> bool {
        self.handle.as_ref().is_none_or(GateHandle::is_applied)
    }

    fn hold(&self, reason: HoldReason, hold: bool) {
        if let (Some(handle), Some(writer)) = (&self.handle, self.writer) {
            handle.hold(writer, reason, hold);
        }
    }

    fn watermark(&self, watermark: Hlc) {
        if let Some(handle) = &self.handle {
            handle.set_watermark(watermark);
        }
    }

    fn awaits_floor(&self) -> Option<u64> {
        self.handle.as_ref()?.awaits_floor(&self.pending)
    }

    fn mark_incomplete(&self) {
        if let Some(handle) = &self.handle {
            handle.mark_incomplete(&self.pending);
        }
    }

    fn floor(&self, mark: u64, pending: &CountVector, hlc: Hlc) {
        self.pending.merge(pending);
        self.pending.publish_at(WriterId(0), Seq::ZERO, hlc);
        *self.floor.lock().expect("no panic while held") = (pending.clone(), hlc);
        if let Some(handle) = &self.handle {
            handle.complete(&self.pending, mark);
        }
    }

    fn is_catching_up(&self) -> bool {
        let Some(handle) = &self.handle else { return false };
        let floor = self.floor.lock().expect("no panic while held");
        let (committed, watermark) = handle.committed();
        let is_covered = match self.form {
            Form::Vector => committed.covers(&floor.0),
            Form::Hlc => watermark >= floor.1,
        };
        self.pending.incomplete().is_some() || !is_covered
    }

    fn pending(&self) -> (CountVector, Hlc) {
        (self.pending.read(), self.pending.read_hlc())
    }
}

/// A writer's entry in the P of a member.
#[derive(Debug)]
pub struct PendingEntry {
    /// P.
    pub pending: Arc<Pending>,
    /// The writer.
    pub writer: WriterId,
}

impl PublishPending for PendingEntry {
    fn publish(&self, seq: Seq, hlc: Hlc) {
        self.pending.publish_at(self.writer, seq, hlc);
    }

    fn read(&self, p: &mut CountVector) -> Hlc {
        p.merge(&self.pending.read());
        self.pending.read_hlc()
    }

    fn raise(&self, p: &CountVector, hlc: Hlc) {
        self.pending.merge(p);
        self.pending.publish_at(self.writer, Seq::ZERO, hlc);
    }
}
