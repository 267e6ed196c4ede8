use super::*;
use proptest::prelude::*;
use tidelock_protocol::ids::{Seq, WriterId};

const MS: u64 = 1_000_000;
const T_MS: u64 = 1_000;
const LOOK_MS: u64 = 50;
const WRITER: WriterId = WriterId(0);

/// A group on a link, with a clock.
struct Bench {
    degrade: Degrade,
    now_ms: u64,
    pending: u64,
    committed: u64,
    link: bool,
    is_whole: bool,
    is_complete: bool,
    may_open: bool,
    round_trip_ms: u64,
    steps: Vec<(u64, Step)>,
}

impl Bench {
    fn new(after_ms: Option<u64>) -> Self {
        Self {
            degrade: Degrade::new(after_ms, None),
            now_ms: 10_000,
            pending: 0,
            committed: 0,
            link: true,
            is_whole: true,
            is_complete: true,
            may_open: true,
            round_trip_ms: 0,
            steps: Vec::new(),
        }
    }

    fn look(&mut self) -> Option<Step> {
        let vector = |seq| CountVector::of(WRITER, Seq(seq));
        let step = self.degrade.look(&Sight {
            now: MonoNanos(self.now_ms * MS),
            unix_ms: 1_800_000_000_000 + self.now_ms,
            may_open: self.may_open,
            is_open: self.link,
            is_whole: self.is_whole,
            is_complete: self.is_complete,
            is_applied: true,
            form: Form::Vector,
            write_age_ns: 0,
            round_trip_ns: self.round_trip_ms * MS,
            pending: vec![(vector(self.pending), Hlc(0))],
            committed: vector(self.committed),
            watermark: Hlc(0),
        });
        self.steps.extend(step.map(|step| (self.now_ms, step)));
        step
    }

    /// Time passes; the guest writes at this rate and the link clears at that, per look.
    fn run(&mut self, span_ms: u64, writes: u64, clears: u64) {
        for _ in 0..span_ms / LOOK_MS {
            self.now_ms += LOOK_MS;
            self.pending += writes;
            if self.link {
                self.committed = (self.committed + clears).min(self.pending);
            }
            self.look();
        }
    }

    fn opened(&self) -> usize {
        self.steps.iter().filter(|(_, step)| matches!(step, Step::Open { .. })).count()
    }
}

#[test]
fn a_cut_link_opens_the_gate_after_t_and_not_before() {
    let mut bench = Bench::new(Some(T_MS));
    bench.run(5_000, 3, 10);
    assert_eq!(bench.steps, []);
    bench.link = false;
    bench.run(T_MS - LOOK_MS, 3, 10);
    assert_eq!(bench.degrade.standing(), Standing::Holding);
    bench.run(2 * LOOK_MS, 3, 10);
    let since_unix_ms = 1_800_000_000_000 + 15_000 + T_MS;
    assert!(bench.degrade.since_unix_ms().is_some_and(|at| at.abs_diff(since_unix_ms) <= LOOK_MS));
    assert_eq!(bench.degrade.mode(Mode::Sync), Mode::Async);
    let policy = bench.degrade.policy(Mode::Pipelined);
    assert_eq!((policy.mode, policy.after_ms), (Mode::Async, Some(T_MS)));
}

#[test]
fn who_holds_never_opens_nor_who_has_not_told_the_backup() {
    let mut bench = Bench::new(None);
    bench.link = false;
    bench.run(100 * T_MS, 1, 1);
    let mut untold = Bench { may_open: false, ..Bench::new(Some(T_MS)) };
    untold.link = false;
    untold.run(100 * T_MS, 1, 1);
    assert_eq!((bench.steps, untold.steps), (vec![], vec![]));
}

#[test]
fn it_can_be_switched_over_when_it_is_over_or_when_the_mode_promises_nothing() {
    let mut bench = Bench::new(Some(T_MS));
    let hinders =
        |bench: &Bench| [Mode::Pipelined, Mode::Async].map(|m| bench.degrade.hinders_switch(m));
    assert_eq!(hinders(&bench), [false, false]);
    bench.link = false;
    bench.run(3 * T_MS, 3, 10);
    assert_eq!(hinders(&bench), [true, true], "the backup is behind");
    (bench.link, bench.committed, bench.is_complete) = (true, bench.pending, false);
    bench.run(CALM * T_MS + LOOK_MS, 1, 1);
    assert!(matches!(bench.degrade.standing(), Standing::Returning { .. }));
    assert_eq!(hinders(&bench), [true, false]);
}

#[test]
fn a_group_that_has_nothing_to_send_does_not_return_to_a_link_that_others_have_filled() {
    let mut bench = Bench::new(Some(T_MS));
    bench.run(5_000, 1, 1);
    bench.link = false;
    bench.run(3 * T_MS, 1, 1);
    (bench.link, bench.committed) = (true, bench.pending);
    bench.round_trip_ms = 3 * T_MS;
    bench.run(100 * T_MS, 0, 1);
    assert!(matches!(bench.degrade.standing(), Standing::Degraded { .. }));
    bench.round_trip_ms = T_MS / 8;
    bench.run(10 * T_MS, 0, 1);
    assert_eq!(bench.degrade.standing(), Standing::Holding);
}

#[test]
fn it_is_over_only_when_c_covers_what_has_left() {
    let mut bench = Bench::new(Some(T_MS));
    bench.link = false;
    bench.run(3 * T_MS, 3, 10);
    bench.link = true;
    bench.committed = bench.pending;
    let since = bench.degrade.since_unix_ms();
    bench.run(CALM * T_MS + LOOK_MS, 1, 1);
    // Held again; what members have heard is asked for.
    assert!(matches!(bench.degrade.standing(), Standing::Returning { .. }), "{:?}", bench.steps);
    bench.is_complete = false;
    bench.run(T_MS / 2, 1, 1);
    assert_eq!(bench.degrade.since_unix_ms(), since, "degraded, for whoever asks");
    bench.is_complete = true;
    bench.pending += 5;
    bench.run(LOOK_MS, 0, 0);
    bench.run(T_MS / 4, 1, 0);
    assert_eq!(bench.degrade.since_unix_ms(), since, "not covered");
    // Guests go on writing: only what had left counts.
    bench.run(T_MS / 4, 2, 2);
    bench.committed += 5;
    bench.run(LOOK_MS, 1, 1);
    assert_eq!(bench.degrade.standing(), Standing::Holding, "{:?}", bench.steps);
    assert_eq!(bench.steps.last().map(|(_, step)| *step), Some(Step::Covered));
}

#[test]
fn a_return_that_fails_is_the_same_degrade() {
    let mut bench = Bench::new(Some(T_MS));
    bench.link = false;
    bench.run(2 * T_MS, 1, 1);
    let since = bench.degrade.since_unix_ms();
    bench.link = true;
    bench.committed = bench.pending;
    bench.run(CALM * T_MS + LOOK_MS, 0, 0);
    bench.is_complete = false;
    bench.run(T_MS + 2 * LOOK_MS, 0, 0);
    assert!(matches!(bench.degrade.standing(), Standing::Degraded { .. }));
    assert_eq!(bench.degrade.since_unix_ms(), since);
    assert_eq!(bench.degrade.calm_ns(), 2 * CALM * T_MS * MS, "the next calm is longer");
}

#[test]
fn a_run_that_was_killed_has_not_forgotten() {
    let mut bench = Bench::new(Some(T_MS));
    bench.degrade = Degrade::new(Some(T_MS), Some(77));
    bench.link = false;
    bench.run(T_MS / 2, 0, 0);
    assert_eq!(bench.degrade.since_unix_ms(), Some(77));
    assert_eq!(bench.degrade.mode(Mode::Pipelined), Mode::Pipelined, "the gate holds");
    bench.link = true;
    bench.run(2 * LOOK_MS, 0, 0);
    assert_eq!(bench.degrade.standing(), Standing::Holding);
    // Also where the policy is gone from the configuration.
    let held = Degrade::new(None, Some(77));
    assert_eq!(held.policy(Mode::Sync).degraded_since_unix_ms, Some(77));
}

/// A link that is slower than the guest writes degrades once and stays; one just faster comes back once.
#[test]
fn links_near_the_rate_of_writes_do_not_oscillate() {
    let mut slow = Bench::new(Some(T_MS));
    slow.run(1_000 * T_MS, 10, 9);
    assert_eq!(slow.opened(), 1, "{:?}", slow.steps);
    assert!(matches!(slow.degrade.standing(), Standing::Degraded { .. }));
    slow.run(1_000 * T_MS, 10, 11);
    assert_eq!(slow.opened(), 1, "{:?}", slow.steps);
    assert_eq!(slow.degrade.standing(), Standing::Holding);
}

/// A load that comes in bursts just too large, for ever: the worst that there is for this rule.
#[test]
fn bursts_degrade_it_no_oftener_than_is_stated() {
    for (burst_ms, pause_ms) in [(1_300, 2_100), (1_500, 4_000), (2_500, 9_000), (1_200, 70_000)] {
        let mut bench = Bench::new(Some(T_MS));
        let began_ms = bench.now_ms;
        for _ in 0..400 {
            bench.link = false;
            bench.run(burst_ms, 1, 1);
            bench.link = true;
            bench.committed = bench.pending;
            bench.run(pause_ms, 0, 0);
        }
        check_bound(&bench, bench.now_ms - began_ms);
        assert!(bench.opened() > 0);
    }
}

fn check_bound(bench: &Bench, span_ms: u64) {
    let most = u64::from(STRIKES_MAX) + 1 + span_ms / (STEADY * CALM * T_MS);
    assert!(bench.opened() as u64 <= most, "{} of {most}: {:?}", bench.opened(), bench.steps);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Whatever the link does: no more degrades than stated, gate steps in their order, and when the link
    /// is good for long enough it is over.
    #[test]
    fn any_link(
        spans in prop::collection::vec((1u64..8_000, any::<bool>(), 0u64..12, 0u64..12), 1..120),
    ) {
        let mut bench = Bench::new(Some(T_MS));
        let began_ms = bench.now_ms;
        for (span_ms, link, writes, clears) in spans {
            bench.link = link;
            bench.run(span_ms, writes, clears);
        }
        check_bound(&bench, bench.now_ms - began_ms);
        let mut is_open = false;
        let mut is_degraded = false;
        for (_, step) in &bench.steps {
            match step {
                Step::Open { .. } => { prop_assert!(!is_open); (is_open, is_degraded) = (true, true); }
                Step::Hold => { prop_assert!(is_open); is_open = false; }
                Step::Covered => { prop_assert!(!is_open && is_degraded); is_degraded = false; }
            }
        }
        bench.link = true;
        bench.committed = bench.pending;
        bench.run(((CALM << STRIKES_MAX) + 2) * T_MS, 1, 1);
        prop_assert_eq!(bench.degrade.standing(), Standing::Holding);
    }
}

/// What is opened before the backup was reached is over when the disks there are whole and C covers what has left
/// since, with every policy.
#[test]
fn what_is_opened_before_the_first_contact_ends_when_the_disks_are_whole() {
    for after_ms in [None, Some(T_MS)] {
        let mut bench = Bench::new(after_ms);
        (bench.link, bench.is_whole) = (false, false);
        let step = bench.degrade.open_unreached(1_800_000_000_000);
        assert_eq!(step, Step::Open { since_unix_ms: 1_800_000_000_000 });
        assert!(bench.degrade.is_unreached());
        assert_eq!(bench.degrade.mode(Mode::Pipelined), Mode::Async);
        let degraded = Some(1_800_000_000_000);
        assert_eq!(bench.degrade.policy(Mode::Sync).degraded_since_unix_ms, degraded);
        bench.run(20_000, 3, 10);
        // The backup is there, the comparison runs.
        bench.link = true;
        bench.run(20_000, 3, 10);
        assert_eq!(bench.steps, [], "{after_ms:?}");
        bench.is_whole = true;
        bench.run(10_000, 3, 0);
        bench.run(10_000, 3, 10);
        let steps: Vec<Step> = bench.steps.iter().map(|(_, step)| *step).collect();
        assert_eq!(steps[..2], [Step::Hold, Step::Covered], "{after_ms:?}");
        assert!(!bench.degrade.is_unreached());
    }
}

/// A run that was killed meanwhile may have left it on record.
#[test]
fn a_run_after_one_that_was_killed_is_not_over_before_the_disks_are_whole() {
    let mut bench = Bench::new(None);
    bench.degrade = Degrade::new(None, Some(7));
    bench.is_whole = false;
    bench.run(5_000, 0, 0);
    assert_eq!(bench.steps, []);
    assert_eq!(bench.degrade.open_unreached(9), Step::Open { since_unix_ms: 7 });
    bench.is_whole = true;
    bench.run(5_000, 0, 0);
    let steps: Vec<Step> = bench.steps.iter().map(|(_, step)| *step).collect();
    assert_eq!(steps, [Step::Hold, Step::Covered]);
}
