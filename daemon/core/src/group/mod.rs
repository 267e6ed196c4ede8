//! One group on this host, sans-I/O: its mode, what it does without the backup, and its planned switch.
//!
//! | module | what it is for |
//! |---|---|
//! | this | the loop's state, and what surrounds it |
//! | `policy` | the mode in force, degrading and holding again, by [`crate::degrade`] |
//! | `told` | whether clients may have been told what a disaster would undo |
//! | `standing` | what a disaster now would undo, and all that status says |
//! | `switching` | the switch to the backup site, by [`crate::handover`] |
//!
//! The driver (`daemon/src/host`) calls [`GroupLoop::look`] ten times a second, and [`GroupLoop::look_at_switch`] while a
//! switch is under way. All that the loop sees and does goes through [`Surroundings`].
//!
//! Invariants: nothing leaves unheld that is not on record before; the gate is shut for good only when that is on record.

mod policy;
mod standing;
mod switching;
#[cfg(test)]
mod tests;
mod told;

pub use switching::{SwitchError, SwitchState};

use crate::degrade::{Degrade, Standing};
use crate::heartbeat::Pulse;
use crate::link::GateControl;
use crate::link::port::{OwnerPort, ToLink};
use crate::owner::{Clocks, Gap, OwnerView, Phase, ToOwner};
use crate::state::MemberState;
use crate::stats::LinkStats;
use crate::status::Told;
use crate::status::group::RiskHistory;
use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;
use std::time::Duration;
use switching::Stage;
use tidelock_protocol::hlc::Hlc;
use tidelock_protocol::ids::{MonoNanos, Seq};
use tidelock_protocol::message::{Form, Mode, Policy, RefusalKind};
use tidelock_protocol::vector::CountVector;
use tidelock_storage::Storage;
use told::Telling;

/// A group's settings, as far as its loop goes by them.
#[derive(Clone, Debug)]
pub struct GroupSettings {
    /// Its name.
    pub name: String,
    /// The mode of the configuration.
    pub mode: Mode,
    /// The vector form where its packets carry no tags.
    pub form: Form,
    /// True if it has several members, or ever had.
    pub is_of_several: bool,
    /// Members on other hosts, with those.
    pub elsewhere: BTreeMap<String, String>,
    /// Milliseconds without an answer of the backup after which replies leave all the same; `None`: never.
    pub after_ms: Option<u64>,
    /// The lease, in milliseconds.
    pub lease_ms: u64,
    /// A switch is given up if nobody has asked how far it is for so long.
    pub asked_within: Duration,
}

/// A member on this host, as it is now.
pub struct Member {
    /// Its name.
    pub name: String,
    /// The link's side.
    pub link: Arc<LinkStats>,
    /// Its gate.
    pub control: Arc<dyn GateControl>,
    /// Its owner loop, if it has disks.
    pub writer: Option<Writer>,
}

/// The owner loop of a member, as it is now.
pub struct Writer {
    /// The owner loop's phase.
    pub phase: Phase,
    /// The gap between the sites.
    pub gap: Option<Gap>,
    /// The backup has a newer run of this host's daemon.
    pub is_superseded: bool,
    /// A heartbeat has not come back.
    pub heartbeat_lost: bool,
    /// Clients may be answered before the backup was reached.
    pub may_answer_unreached: bool,
    /// A disk that has failed a flush, and why.
    pub failed_disk: Option<(String, String)>,
    /// The sites were found to differ.
    pub differs: bool,
    /// P\[self\].
    pub published: Seq,
    /// The last seq that the backup has acknowledged.
    pub durable: Seq,
    /// C and the watermark as the backup has told them.
    pub told: (CountVector, Hlc),
}

impl Writer {
    /// A member's owner loop as it shows itself, with what is on record of it.
    pub fn of<S: Storage>(
        view: &OwnerView,
        port: &OwnerPort<ToOwner>,
        state: &MemberState<S>,
        pulse: &Pulse,
    ) -> Self {
        let trouble = view.trouble();
        let is_superseded =
            trouble.refusal.is_some_and(|refusal| refusal.kind == RefusalKind::Superseded);
        Self {
            phase: view.phase(),
            gap: view.gap(),
            is_superseded,
            heartbeat_lost: pulse.lost().is_some(),
            may_answer_unreached: state.may_answer_unreached(),
            failed_disk: trouble.failed_disks.into_iter().next(),
            differs: state.verified().is_some_and(|verified| verified.differs()),
            published: view.published(),
            durable: port.acked().0,
            told: port.told(),
        }
    }
}

/// The gate of a group, as it is now.
pub struct GateSight {
    /// True if it lets out what is covered.
    pub is_open: bool,
    /// C.
    pub committed: CountVector,
    /// The watermark.
    pub watermark: Hlc,
    /// True if all that it was told is in force.
    pub is_applied: bool,
    /// The end of the lease; `None`: there was none.
    pub lease_until: Option<MonoNanos>,
}

/// A host, as the loop of one of its groups sees it and acts on it. Members are named by their index in
/// [`members`](Self::members).
pub trait Surroundings {
    /// The time.
    fn clocks(&self) -> Clocks;
    /// True if the daemon is about to end.
    fn is_stopping(&self) -> bool;
    /// All members of the group on this host, in the order of the configuration.
    fn members(&self) -> Vec<Member>;
    /// `None`: no member of the group here has a network.
    fn gate(&self) -> Option<GateSight>;
    /// True if packets of a guest may leave beside the gate, or may have left so since the last time that this was asked.
    fn left_unheld(&mut self) -> bool;
    /// Packets that are held; `None`: not known at this moment.
    fn held_packets(&self) -> Option<u64>;
    /// A local disk that does not answer, for people.
    fn disk_hang(&self) -> Option<String>;
    /// The gate goes by this mode.
    fn set_gate_mode(&mut self, mode: Mode);
    /// A message for the owner loop of a member that has one.
    fn tell_owner(&mut self, member: usize, message: ToOwner);
    /// A message for the link. A link that has ended hears nothing.
    fn tell_link(&mut self, member: usize, message: ToLink);
    /// Puts on record since when clients may see what a disaster undoes, by the wall clock.
    fn keep_degraded(&mut self, since_unix_ms: u64) -> io::Result<()>;
    /// That is over.
    fn forget_degraded(&mut self) -> io::Result<()>;
    /// Puts on record that the group was handed to the backup site, by the wall clock.
    fn keep_switched(&mut self, at_unix_ms: u64) -> io::Result<()>;
}

/// The loop of one group.
#[derive(Debug)]
pub struct GroupLoop {
    settings: GroupSettings,
    /// As the operator wants it.
    wanted: Mode,
    degrade: Degrade,
    telling: Telling,
    risk_history: RiskHistory,
    /// An error of the record was logged.
    error_said: bool,
    stage: Stage,
}

/// The state of a group on this host.
#[derive(Clone, Copy, Debug)]
pub struct GroupView {
    /// The mode that the operator wants.
    pub wanted: Mode,
    /// The mode in force: what becomes of writes and packets now.
    pub mode: Mode,
    /// The standing without the backup.
    pub standing: Standing,
    /// True if clients may have been told what a disaster would undo.
    pub told: Option<Told>,
    /// The gate was opened before the backup was reached, and that is not over.
    pub is_unreached: bool,
    /// Mode async is wanted, and not in force before the backup has heard of this run.
    pub awaits_contact: bool,
    /// The time by the wall clock at which the group was switched over, if it was.
    pub switched_at_unix_ms: Option<u64>,
}

impl GroupView {
    /// Since when clients may have seen what a disaster would undo, by the wall clock.
    #[must_use]
    pub fn degraded_since_unix_ms(&self) -> Option<u64> {
        self.standing.since_unix_ms()
    }
}

impl GroupLoop {
    /// A loop of a run that finds this on record: since when the group is degraded, and when it was switched over.
    #[must_use]
    pub fn new(
        settings: GroupSettings,
        degraded_since_unix_ms: Option<u64>,
        switched_at_unix_ms: Option<u64>,
    ) -> Self {
        Self {
            wanted: settings.mode,
            degrade: Degrade::new(settings.after_ms, degraded_since_unix_ms),
            telling: Telling::default(),
            risk_history: RiskHistory::default(),
            error_said: false,
            stage: Stage::found(switched_at_unix_ms),
            settings,
        }
    }

    /// The state of the group.
    #[must_use]
    pub fn view(&self) -> GroupView {
        GroupView {
            wanted: self.wanted,
            mode: self.mode(),
            standing: self.degrade.standing(),
            told: self.told(),
            is_unreached: self.degrade.is_unreached(),
            awaits_contact: self.wanted == Mode::Async && self.degrade.awaits_contact(),
            switched_at_unix_ms: self.switched_at_unix_ms(),
        }
    }

    /// The policy as the backup hears it.
    #[must_use]
    pub fn policy(&self) -> Policy {
        self.degrade.policy(self.wanted)
    }

    fn mode(&self) -> Mode {
        self.degrade.mode(self.wanted)
    }
}
