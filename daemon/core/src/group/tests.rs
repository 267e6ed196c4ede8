//! The loop of a group whose only member writes, with surroundings that a test sets. Groups of several members:
//! `policy`, `told`, `switching`.

mod around;
mod policy;
mod switching;
mod told;

use super::*;
use crate::handover::Step;
use crate::link::NoGate;
use crate::owner::{Drained, OwnerView};
use crate::stats::OwnerStats;
use crate::status::{GroupSeen, GroupStatus, GroupTerms, Kind, MemberSeen, Role, WriterSeen};
use crate::verifications::Verifications;
use tidelock_protocol::ids::Epoch;

const SECOND: u64 = 1_000_000_000;
const ASKED_WITHIN: Duration = Duration::from_secs(30);

struct Around {
    now: MonoNanos,
    is_stopping: bool,
    phase: Phase,
    gate_is_open: bool,
    lease_until: Option<MonoNanos>,
    left_unheld: bool,
    said_ready: Vec<bool>,
    link: Arc<LinkStats>,
    owner: Vec<ToOwner>,
}

impl Around {
    /// The backup has all that was written.
    fn new() -> Self {
        let link = Arc::new(LinkStats::default());
        link.set_attached(true);
        link.set_policy_kept(true);
        Self {
            now: MonoNanos(SECOND),
            is_stopping: false,
            phase: Phase::Replicating,
            gate_is_open: true,
            lease_until: None,
            left_unheld: false,
            said_ready: Vec::new(),
            link,
            owner: Vec::new(),
        }
    }
}

impl Surroundings for Around {
    fn clocks(&self) -> Clocks {
        Clocks { now: self.now, wall_ms: 1_800_000_000_000 + self.now.0 / 1_000_000 }
    }

    fn is_stopping(&self) -> bool {
        self.is_stopping
    }

    fn members(&self) -> Vec<Member> {
        let writer = Writer {
            phase: self.phase,
            gap: None,
            is_superseded: false,
            heartbeat_lost: false,
            may_answer_unreached: false,
            failed_disk: None,
            differs: false,
            published: Seq(0),
            durable: Seq(0),
            told: (CountVector::new(), Hlc(0)),
        };
        vec![Member {
            name: "web".into(),
            link: self.link.clone(),
            control: Arc::new(NoGate),
            writer: Some(writer),
        }]
    }

    fn gate(&self) -> Option<GateSight> {
        Some(GateSight {
            is_open: self.gate_is_open,
            committed: CountVector::new(),
            watermark: Hlc(0),
            is_applied: true,
            lease_until: self.lease_until,
        })
    }

    fn left_unheld(&mut self) -> bool {
        self.left_unheld
    }

    fn held_packets(&self) -> Option<u64> {
        Some(0)
    }

    fn disk_hang(&self) -> Option<String> {
        None
    }

    fn set_gate_mode(&mut self, _: Mode) {}

    fn tell_owner(&mut self, _: usize, message: ToOwner) {
        self.owner.push(message);
    }

    fn tell_link(&mut self, _: usize, message: ToLink) {
        if let ToLink::ReadyToSwitch(ready, _) = message {
            self.said_ready.push(ready);
        }
    }

    fn keep_degraded(&mut self, _: u64) -> io::Result<()> {
        Ok(())
    }

    fn forget_degraded(&mut self) -> io::Result<()> {
        Ok(())
    }

    fn keep_switched(&mut self, _: u64) -> io::Result<()> {
        Ok(())
    }
}

fn settings(mode: Mode) -> GroupSettings {
    GroupSettings {
        name: "shop".into(),
        mode,
        form: Form::Vector,
        is_of_several: false,
        elsewhere: BTreeMap::new(),
        after_ms: None,
        lease_ms: 5_000,
        asked_within: ASKED_WITHIN,
    }
}

fn group(mode: Mode) -> GroupLoop {
    GroupLoop::new(settings(mode), None, None)
}

#[test]
fn clients_may_be_told_only_while_replies_leave_unheld_or_before_anything_can_be_recovered() {
    let is_told = |mode, phase, gate_is_open, left_unheld| {
        let mut around = Around { phase, gate_is_open, left_unheld, ..Around::new() };
        let mut group = group(mode);
        group.look(&mut around);
        group.view().told.is_some_and(|told| told.leaves)
    };
    let (sync, held) = (Mode::Sync, false);
    assert!(!is_told(sync, Phase::Replicating, true, held), "what is covered leaves");
    assert!(!is_told(sync, Phase::Replicating, false, held));
    assert!(!is_told(sync, Phase::Initialising, false, held), "nothing leaves");
    assert!(is_told(sync, Phase::Initialising, true, held));
    assert!(is_told(sync, Phase::WaitingForBackup, true, held));
    assert!(is_told(sync, Phase::Replicating, true, true));
    assert!(is_told(Mode::Async, Phase::Replicating, true, held));
    assert!(!is_told(Mode::Async, Phase::Fenced, false, held), "the gate is shut for good");
}

#[test]
fn a_switch_that_nobody_asks_about_any_more_is_given_up() {
    let why = |is_stopping, asked_again| {
        let mut around = Around::new();
        let mut group = group(Mode::Pipelined);
        group.begin_switch(Duration::from_secs(3600), Duration::from_secs(3600), &mut around);
        assert!(matches!(around.owner[..], [ToOwner::Hold(..)]));
        around.now = MonoNanos(SECOND + ASKED_WITHIN.as_nanos() as u64 - 1);
        assert_eq!(group.look_at_switch(&mut around), Some(Step::Wait));
        if asked_again {
            assert_eq!(group.switch_state(around.now), Ok(SwitchState::Draining));
        }
        around.now.0 += 1;
        around.is_stopping = is_stopping;
        match group.look_at_switch(&mut around) {
            Some(Step::GoOn(why)) => {
                assert!(
                    matches!(around.owner[..], [_, ToOwner::LetGo]),
                    "requests are taken again"
                );
                assert_eq!(group.switch_state(around.now), Err(why.clone()));
                Some(why)
            }
            step => {
                assert_eq!(step, Some(Step::Wait));
                None
            }
        }
    };
    assert_eq!(why(false, true), None);
    assert!(why(false, false).unwrap().contains("does not wait any more"));
    assert!(why(true, true).unwrap().contains("the daemon is stopping"));
}

/// The other host may have heard that all are ready, and gone over.
#[test]
fn a_host_that_has_said_that_it_is_ready_goes_on_only_when_the_backup_knows_or_is_gone() {
    for is_lost in [false, true] {
        let mut around = Around::new();
        let elsewhere = [("db".to_owned(), "host-b".to_owned())].into();
        let spread = GroupSettings { is_of_several: true, elsewhere, ..settings(Mode::Pipelined) };
        let mut group = GroupLoop::new(spread, None, None);
        let (hour, minute) = (Duration::from_secs(3600), Duration::from_secs(60));
        group.begin_switch(hour, minute, &mut around);
        let Some(ToOwner::Hold(reply, _)) = around.owner.pop() else { panic!() };
        reply.send(Drained { seq: Seq(7), hlc: Hlc(7), marks: Some(Vec::new()) }).unwrap();
        assert_eq!(group.look_at_switch(&mut around), Some(Step::Say(true)));
        around.is_stopping = true;
        assert_eq!(group.look_at_switch(&mut around), Some(Step::Say(false)));
        assert_eq!(around.said_ready, [true, false]);
        assert_eq!(group.look_at_switch(&mut around), Some(Step::Wait));
        around.link.set_attached(!is_lost);
        let step = group.look_at_switch(&mut around);
        assert_eq!(matches!(step, Some(Step::GoOn(_))), is_lost, "{step:?}");
    }
}

#[test]
fn mode_async_is_in_force_when_the_backup_has_heard_of_it() {
    for mode in [Mode::Async, Mode::Pipelined, Mode::Sync] {
        let mut around = Around::new();
        around.link.set_policy_kept(false);
        let mut group = group(mode);
        group.begin(&mut around);
        for _ in 0..3 {
            group.look(&mut around);
            let view = group.view();
            assert_ne!(view.mode, Mode::Async);
            assert_eq!(view.awaits_contact, mode == Mode::Async);
        }
        around.link.set_policy_kept(true);
        group.look(&mut around);
        assert_eq!((group.view().mode, group.view().awaits_contact), (mode, false));
    }
}

/// Sight of a driver beside the loop: no gate, and an owner loop of which nothing is told.
fn seen(awaits_adoption: bool) -> GroupSeen {
    let writer = WriterSeen {
        disks: Vec::new(),
        stats: Arc::new(OwnerStats::default()),
        view: Arc::new(OwnerView::default()),
        pulse: Arc::default(),
        committed: Seq(0),
        verified: None,
        verifications: Verifications::default(),
    };
    let member = MemberSeen {
        roles: vec![Role::Writer],
        epoch: Epoch(3),
        gates: Vec::new(),
        tagging: None,
        writer: Some(writer),
    };
    let terms = GroupTerms {
        when_unreachable: "async after 30s".into(),
        grace_ms: 9_000,
        elsewhere: Vec::new(),
        form: Form::Hlc,
        is_tagged: false,
        heartbeat: None,
        verify_every: None,
        max_clock_lead_ms: 500,
        backlog_limit_bytes: 1 << 20,
        backlog_memory_bytes: None,
    };
    GroupSeen { terms, awaits_adoption, members: vec![member] }
}

fn status(group: &mut GroupLoop, around: &Around) -> GroupStatus {
    group.status(around, seen(false))
}

/// The lease is what the gate has left of it, and nothing once the epoch of this host is over.
#[test]
fn status_tells_of_the_lease_that_the_gate_goes_by() {
    let mut around = Around { lease_until: Some(MonoNanos(3 * SECOND)), ..Around::new() };
    let mut group = group(Mode::Pipelined);
    let lease = |group: &mut GroupLoop, around: &Around| {
        let lease = status(group, around).lease;
        assert_eq!((lease.period_ms, lease.grace_ms), (5_000, 9_000));
        (lease.held, lease.left_ms)
    };
    assert_eq!(lease(&mut group, &around), (true, 2_000));
    around.now = MonoNanos(3 * SECOND);
    assert_eq!(lease(&mut group, &around), (false, 0));
    (around.now, around.phase) = (MonoNanos(SECOND), Phase::Fenced);
    assert_eq!(lease(&mut group, &around), (false, 0), "shut for good");
}

/// The age is that of the kind: what else changes of a risk does not begin it anew.
#[test]
fn status_tells_since_when_the_risk_is_of_its_kind() {
    let mut around = Around::new();
    let mut group = group(Mode::Pipelined);
    let told = status(&mut group, &around);
    assert_eq!((told.risk.why.kind, told.why_age_ms, told.protected), (Kind::Following, 0, true));
    around.now.0 += SECOND;
    around.link.set_lag(3, 4096, None);
    let told = status(&mut group, &around);
    assert_eq!((told.risk.why.kind, told.why_age_ms), (Kind::Following, 1_000));
    assert_eq!((told.epoch, told.members[0].writer.as_ref().unwrap().lag.writes), (Epoch(3), 3));
    around.link.set_attached(false);
    let told = status(&mut group, &around);
    assert_eq!((told.risk.why.kind, told.why_age_ms), (Kind::Disconnected, 0));
    assert!(!told.protected);
}

/// A person reads why, of which member, and what to do.
#[test]
fn status_says_in_words_what_hinders() {
    let around = Around::new();
    assert_eq!(status(&mut group(Mode::Pipelined), &around).detail, None);
    let adopted = group(Mode::Pipelined).status(&around, seen(true));
    assert!(adopted.awaits_adoption && adopted.detail.unwrap().contains("tidelock adopt shop"));
    around.link.set_stalled(Some("its disk is full".into()));
    let stalled = status(&mut group(Mode::Pipelined), &around);
    assert_eq!(stalled.detail.as_deref(), Some("web: its disk is full"));
    around.link.set_stalled(None);
    around.link.set_policy_kept(false);
    let degrades = GroupSettings { after_ms: Some(30_000), ..settings(Mode::Pipelined) };
    let mut degrades = GroupLoop::new(degrades, None, None);
    assert!(status(&mut degrades, &around).detail.unwrap().contains("not in force"));
    let mut switched = GroupLoop::new(settings(Mode::Pipelined), None, Some(1_700_000_000_000));
    let switched = status(&mut switched, &Around { is_stopping: true, ..Around::new() });
    assert_eq!(switched.risk.why.kind, Kind::Fenced);
    let detail = switched.detail.unwrap();
    assert!(detail.contains("2023-11-14T22:13:20Z") && detail.contains("is ending"), "{detail}");
}
