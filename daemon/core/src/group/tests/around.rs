//! Surroundings that a test sets, with an account of all that a loop has done, in order.

use super::super::*;
use crate::owner::Drained;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use tidelock_protocol::ids::{MonoNanos, WriterId};
use tidelock_protocol::lease::HoldReason;

pub(super) const SECOND: u64 = 1_000_000_000;
pub(super) const WALL_MS: u64 = 1_800_000_000_000;
pub(super) const LEASE_MS: u64 = 5_000;

/// A deed of the loop. Members are named by their index.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Act {
    GateMode(Mode),
    SetMode(usize, Mode),
    Hold(usize),
    LetGo(usize),
    SwitchedOver(usize),
    Policy(usize, Policy),
    AskFloor(usize),
    Ready(usize, bool),
    Fence(usize),
    GiveUp(usize),
    KeepDegraded(u64),
    ForgetDegraded,
    KeepSwitched(u64),
}

type Acts = Arc<Mutex<Vec<Act>>>;

/// A member's gate.
pub(super) struct Gate {
    nth: usize,
    acts: Acts,
    pub(super) state: Mutex<GateState>,
}

#[derive(Clone)]
pub(super) struct GateState {
    pub(super) pending: (CountVector, Hlc),
    pub(super) awaits_floor: Option<u64>,
    pub(super) is_applied: bool,
}

impl GateControl for Gate {
    fn committed(&self, _: &CountVector) {}
    fn lease_renewed(&self, _: MonoNanos) {}

    fn fence(&self) {
        self.acts.lock().unwrap().push(Act::Fence(self.nth));
    }

    fn is_applied(&self) -> bool {
        self.state.lock().unwrap().is_applied
    }

    fn hold(&self, _: HoldReason, _: bool) {}

    fn awaits_floor(&self) -> Option<u64> {
        self.state.lock().unwrap().awaits_floor
    }

    fn pending(&self) -> (CountVector, Hlc) {
        self.state.lock().unwrap().pending.clone()
    }
}

/// A writer as [`Surroundings::members`] is to tell it.
pub(super) struct WriterNow {
    pub(super) phase: Phase,
    pub(super) gap: Option<Gap>,
    pub(super) may_answer_unreached: bool,
    pub(super) failed_disk: Option<(String, String)>,
    pub(super) differs: bool,
    pub(super) told: (CountVector, Hlc),
}

pub(super) struct MemberNow {
    pub(super) name: &'static str,
    pub(super) link: Arc<LinkStats>,
    pub(super) gate: Arc<Gate>,
    pub(super) writer: Option<WriterNow>,
}

/// The gate of the group.
pub(super) struct GateNow {
    pub(super) is_open: bool,
    pub(super) committed: CountVector,
    pub(super) watermark: Hlc,
    pub(super) is_applied: bool,
}

/// A host with three members: two writers, and between them a member without disks.
pub(super) struct Host {
    pub(super) now: MonoNanos,
    pub(super) is_stopping: bool,
    pub(super) members: Vec<MemberNow>,
    pub(super) gate: Option<GateNow>,
    pub(super) left_unheld: bool,
    pub(super) held_packets: Option<u64>,
    pub(super) can_keep: bool,
    pub(super) acts: Acts,
    pub(super) holds: Vec<(futures_channel::oneshot::Sender<Drained>, Arc<AtomicUsize>)>,
    pub(super) given_up: Vec<crate::link::port::LeaseGivenUp>,
    pub(super) agreements: Vec<Arc<crate::link::port::Agreement>>,
}

impl Host {
    /// The backup has all that was written.
    pub(super) fn new() -> Self {
        let acts = Acts::default();
        let now = MonoNanos(SECOND);
        let member = |(nth, name): (usize, &'static str)| {
            let link = Arc::new(LinkStats::default());
            link.set_attached(true);
            link.set_policy_kept(true);
            link.lease_renewed(now, now);
            let state = GateState {
                pending: (CountVector::of(WriterId(0), Seq(7)), Hlc(7)),
                awaits_floor: None,
                is_applied: true,
            };
            let writer = WriterNow {
                phase: Phase::Replicating,
                gap: None,
                may_answer_unreached: false,
                failed_disk: None,
                differs: false,
                told: (CountVector::of(WriterId(0), Seq(7)), Hlc(7)),
            };
            MemberNow {
                name,
                link,
                gate: Arc::new(Gate { nth, acts: acts.clone(), state: Mutex::new(state) }),
                writer: (nth != 1).then_some(writer),
            }
        };
        Self {
            now,
            is_stopping: false,
            members: ["db", "proxy", "web"].into_iter().enumerate().map(member).collect(),
            gate: Some(GateNow {
                is_open: true,
                committed: CountVector::of(WriterId(0), Seq(7)),
                watermark: Hlc(7),
                is_applied: true,
            }),
            left_unheld: false,
            held_packets: Some(0),
            can_keep: true,
            acts,
            holds: Vec::new(),
            given_up: Vec::new(),
            agreements: Vec::new(),
        }
    }

    /// Deeds since this was asked last.
    pub(super) fn acts(&self) -> Vec<Act> {
        std::mem::take(&mut *self.acts.lock().unwrap())
    }

    pub(super) fn wall_ms(&self) -> u64 {
        WALL_MS + self.now.0 / 1_000_000
    }

    pub(super) fn pass_ms(&mut self, ms: u64) {
        self.now = self.now.plus_ms(ms);
    }

    pub(super) fn writer(&mut self, nth: usize) -> &mut WriterNow {
        self.members[nth].writer.as_mut().unwrap()
    }

    /// The backup answers nothing: C stays below P.
    pub(super) fn fall_silent(&mut self) {
        for member in &self.members {
            member.gate.state.lock().unwrap().pending.0 = CountVector::of(WriterId(0), Seq(9));
        }
    }

    /// C covers P again.
    pub(super) fn catch_up(&mut self) {
        self.gate.as_mut().unwrap().committed = CountVector::of(WriterId(0), Seq(9));
    }

    fn act(&self, act: Act) {
        self.acts.lock().unwrap().push(act);
    }

    fn kept(&self) -> io::Result<()> {
        match self.can_keep {
            true => Ok(()),
            false => Err(io::ErrorKind::StorageFull.into()),
        }
    }
}

impl Surroundings for Host {
    fn clocks(&self) -> Clocks {
        Clocks { now: self.now, wall_ms: self.wall_ms() }
    }

    fn is_stopping(&self) -> bool {
        self.is_stopping
    }

    fn members(&self) -> Vec<Member> {
        let member = |of: &MemberNow| Member {
            name: of.name.into(),
            link: of.link.clone(),
            control: of.gate.clone(),
            writer: of.writer.as_ref().map(|writer| Writer {
                phase: writer.phase,
                gap: writer.gap,
                is_superseded: false,
                heartbeat_lost: false,
                may_answer_unreached: writer.may_answer_unreached,
                failed_disk: writer.failed_disk.clone(),
                differs: writer.differs,
                published: Seq(0),
                durable: Seq(0),
                told: writer.told.clone(),
            }),
        };
        self.members.iter().map(member).collect()
    }

    fn gate(&self) -> Option<GateSight> {
        self.gate.as_ref().map(|gate| GateSight {
            is_open: gate.is_open,
            committed: gate.committed.clone(),
            watermark: gate.watermark,
            is_applied: gate.is_applied,
            lease_until: None,
        })
    }

    fn left_unheld(&mut self) -> bool {
        self.left_unheld
    }

    fn held_packets(&self) -> Option<u64> {
        self.held_packets
    }

    fn disk_hang(&self) -> Option<String> {
        None
    }

    fn set_gate_mode(&mut self, mode: Mode) {
        self.act(Act::GateMode(mode));
    }

    fn tell_owner(&mut self, member: usize, message: ToOwner) {
        assert!(self.members[member].writer.is_some(), "there is no owner loop");
        let act = match message {
            ToOwner::SetMode(mode) => Act::SetMode(member, mode),
            ToOwner::Hold(reply, not_ready) => {
                self.holds.push((reply, not_ready));
                Act::Hold(member)
            }
            ToOwner::LetGo => Act::LetGo(member),
            ToOwner::SwitchedOver => Act::SwitchedOver(member),
            _ => panic!("an owner loop hears no more of its group"),
        };
        self.act(act);
    }

    fn tell_link(&mut self, member: usize, message: ToLink) {
        let act = match message {
            ToLink::Policy(policy) => Act::Policy(member, policy),
            ToLink::AskFloor { everyone: true } => Act::AskFloor(member),
            ToLink::ReadyToSwitch(ready, agreement) => {
                self.agreements.push(agreement);
                Act::Ready(member, ready)
            }
            ToLink::GiveUpLease(given_up) => {
                self.given_up.extend(given_up);
                Act::GiveUp(member)
            }
            _ => panic!("a link hears no more of its group"),
        };
        self.act(act);
    }

    fn keep_degraded(&mut self, since_unix_ms: u64) -> io::Result<()> {
        self.kept().inspect(|()| self.act(Act::KeepDegraded(since_unix_ms)))
    }

    fn forget_degraded(&mut self) -> io::Result<()> {
        self.kept().inspect(|()| self.act(Act::ForgetDegraded))
    }

    fn keep_switched(&mut self, at_unix_ms: u64) -> io::Result<()> {
        self.kept().inspect(|()| self.act(Act::KeepSwitched(at_unix_ms)))
    }
}

/// Counts of writers that are not ready, as each that holds is told.
pub(super) fn not_ready(host: &Host) -> Vec<usize> {
    host.holds.iter().map(|(_, not_ready)| not_ready.load(Ordering::SeqCst)).collect()
}
