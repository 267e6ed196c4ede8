//! The loop of a group whose only member writes, with surroundings that a test sets. Groups of several members:
//! `policy`, `told`, `switching`.

mod around;
mod policy;
mod switching;
mod told;

use super::*;
use crate::handover::Step;
use crate::link::NoGate;
use crate::owner::Drained;
use tidelock_protocol::ids::MonoNanos;

const SECOND: u64 = 1_000_000_000;
const ASKED_WITHIN: Duration = Duration::from_secs(30);

struct Around {
    now: MonoNanos,
    is_stopping: bool,
    phase: Phase,
    gate_is_open: bool,
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
