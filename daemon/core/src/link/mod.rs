//! The link to the backup: one ordered, authenticated connection for all members of this host.
//!
//! Batches form by themselves: while the socket is busy, records gather in the senders, and what
//! is there when it has room goes out together. Nothing waits for a timer. The kernel is asked to
//! take no more than [`NOTSENT_LOWAT_BYTES`] ahead of the network, so that a guest's write never
//! queues behind more of an initial copy than that.
//!
//! The link owns the sender of each member (the backlog), so a broken connection loses nothing:
//! after a new attachment sending goes on after what the backup has.
//!
//! | module | what it is for |
//! |---|---|
//! | [`member`] | one member's half of the conversation, sans-I/O |
//! | [`port`] | what the owner loop and the link share |
//! | `bookmarks` | bookmarks that wait for the backup |
//! | [`turns`] | whose turn it is to send |
//! | [`connection`] | one connection: hello, attachments, bytes in and bytes out |
//! | [`host_link`] | the link of one host: connecting again and again |
//!
//! All of it is sans-I/O. Sockets, TLS and timers are `driver/link.rs`.

mod bookmarks;
pub mod connection;
pub mod host_link;
pub mod member;
pub mod port;
pub mod queue;
#[cfg(test)]
mod tests;
pub mod turns;

pub use tidelock_protocol::lease::HoldReason;

use tidelock_protocol::hlc::Hlc;
use tidelock_protocol::ids::MonoNanos;
use tidelock_protocol::message::RefusalKind;
use tidelock_protocol::tag::TagTerms;
use tidelock_protocol::vector::CountVector;

/// What the kernel may hold that the network has not taken yet.
pub const NOTSENT_LOWAT_BYTES: u32 = 256 << 10;

/// What the link tells a member's gate. A member without one has [`NoGate`].
pub trait GateControl: Send + Sync {
    /// C rose.
    fn committed(&self, committed: &CountVector);
    /// The backup has told the keys that seal the group's tags, and the greatest seq that a tag may name for each writer.
    fn tag_terms(&self, _: &TagTerms) {}
    /// The backup answered the beacon that was sent at this time.
    fn lease_renewed(&self, sent_at: MonoNanos);
    /// The epoch of this primary has ended: shut for good.
    fn fence(&self);
    /// Whether all that was told to the gate is in force: after [`fence`](Self::fence), that nothing leaves any more.
    fn is_applied(&self) -> bool {
        true
    }
    /// While a reason holds nothing passes, whatever its stamp.
    fn hold(&self, reason: HoldReason, hold: bool);
    /// The group's watermark rose (HLC form).
    fn watermark(&self, _watermark: Hlc) {}
    /// What names the moment since which it is not known what the guest has heard, if it is not:
    /// nothing leaves before the others have said how far they are.
    fn awaits_floor(&self) -> Option<u64> {
        None
    }
    /// Whether C does not cover the last floor yet, or the floor is not known.
    fn is_catching_up(&self) -> bool {
        false
    }
    /// It is not known.
    fn mark_incomplete(&self) {}
    /// All that any writer had admitted after the moment of this mark; 0: raises P, and no more.
    fn floor(&self, _mark: u64, _pending: &CountVector, _hlc: Hlc) {}
    /// P of the member: what it may depend on, and the greatest time of that.
    fn pending(&self) -> (CountVector, Hlc) {
        (CountVector::new(), Hlc(0))
    }
}

/// For a member that talks to nobody outside.
#[derive(Debug, Default)]
pub struct NoGate;

impl GateControl for NoGate {
    fn committed(&self, _: &CountVector) {}
    fn lease_renewed(&self, _: MonoNanos) {}
    fn fence(&self) {}
    fn hold(&self, _: HoldReason, _: bool) {}
}

/// How the link is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LinkState {
    /// An attempt is under way.
    Connecting {
        /// What ended the one before or its connection, for people.
        after: Option<String>,
    },
    /// Not connected.
    Down {
        /// Why, for people.
        reason: String,
        /// When the next attempt begins, if there will be one.
        retry_at: Option<MonoNanos>,
    },
    /// Connected and greeted.
    Up {
        /// The server's name.
        server: String,
        /// Its software.
        software: String,
    },
}

/// What ends a member's protection until someone acts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// Why, for programs.
    pub kind: RefusalKind,
    /// Why and what to do, for people.
    pub reason: String,
}

impl Refusal {
    /// Whether the backup will never take this run of the daemon back.
    #[must_use]
    pub fn is_final(&self) -> bool {
        matches!(self.kind, RefusalKind::Fenced | RefusalKind::Superseded)
    }
}
