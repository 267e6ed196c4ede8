//! Rules of the guard, one by one.

use tidelock_clock::{
    Answer, ClockGuard, Limits, MasterId, NoSample, Reading, Sample, Sampled, Servo, Taken,
    Verdict, Why,
};

const MS: u64 = 1_000_000;
const SECOND: u64 = 1_000 * MS;
const MAX: u64 = 2 * MS;
const WALL_AT_0: i64 = 1_700_000_000_000_000_000;

/// Limits without a time to settle.
fn limits() -> Limits {
    Limits { settle_ns: 0, ..Limits::new(MAX) }
}

/// A host whose wall clock goes as its raw clock does, `ahead_ns` ahead of its beginning; and the guard.
struct Host {
    guard: ClockGuard,
    raw_ns: u64,
    ahead_ns: i64,
    answer: Answer,
}

fn sample(offset_ns: i64) -> Sample {
    Sample {
        taken: Taken::At(0),
        offset_ns,
        delay_ns: 10_000,
        dispersion_ns: 0,
        master_error_ns: None,
        master: Some(MasterId([1; 8])),
    }
}

impl Host {
    fn with(limits: Limits) -> Host {
        let answer = Answer { servo: Servo::Locked, sample: Ok(sample(100)) };
        Host { guard: ClockGuard::new(limits), raw_ns: SECOND, ahead_ns: 0, answer }
    }

    /// A host whose clock is believed.
    fn new() -> Host {
        let mut host = Host::with(limits());
        host.run(6);
        assert!(host.epsilon().is_some(), "{:?}", host.why());
        host
    }

    fn now(&self) -> Reading {
        let wall_ns = WALL_AT_0 + self.raw_ns as i64 + self.ahead_ns;
        Reading { wall_ns, raw_ns: self.raw_ns, slop_ns: 100 }
    }

    /// A second later, the source has a new sample and is asked.
    fn look(&mut self) {
        self.raw_ns += SECOND - MS;
        let taken_ns = self.now().wall_ns;
        self.raw_ns += MS;
        let mut answer = self.answer;
        if let Ok(Sample { taken: taken @ Taken::At(_), .. }) = &mut answer.sample {
            *taken = Taken::At(taken_ns);
        }
        self.guard.on_answer(self.now(), self.now(), &answer);
    }

    fn run(&mut self, seconds: u32) {
        for _ in 0..seconds {
            self.look();
        }
    }

    fn why(&self) -> Option<Why> {
        match self.guard.verdict(self.now()) {
            Verdict::NotBelieved { why } => Some(why),
            Verdict::Believed { .. } => None,
        }
    }

    fn epsilon(&self) -> Option<u64> {
        self.guard.verdict(self.now()).epsilon_ns()
    }
}

#[test]
fn a_clock_is_believed_only_after_enough_samples_of_a_locked_servo() {
    let mut host = Host::with(limits());
    assert_eq!(host.why(), Some(Why::NoAnswerYet));
    host.answer.servo = Servo::Locking;
    host.run(5);
    assert_eq!(host.why(), Some(Why::NotLocked));
    host.answer.servo = Servo::Locked;
    for have in 1..4 {
        host.look();
        assert_eq!(host.why(), Some(Why::TooFewSamples { have, need: 4 }));
    }
    host.look();
    assert!(host.epsilon().is_some());
    host.answer.servo = Servo::Locking;
    host.look();
    assert_eq!(host.why(), Some(Why::NotLocked));
    host.answer.servo = Servo::Locked;
    host.look();
    assert_eq!(host.why(), Some(Why::TooFewSamples { have: 1, need: 4 }), "all begins anew");
}

#[test]
fn a_clock_is_believed_up_to_the_maximum_and_not_beyond() {
    let epsilon = Host::new().epsilon().expect("believed");
    let with_max = |max_clock_error_ns| {
        let mut host = Host::with(Limits { max_clock_error_ns, ..limits() });
        host.run(6);
        host.why()
    };
    assert_eq!(with_max(epsilon), None);
    let above = Why::AboveMax { epsilon_ns: epsilon, max_ns: epsilon - 1 };
    assert_eq!(with_max(epsilon - 1), Some(above));
}

/// A servo that follows a queue: the offsets that the looks see are small, and the clock moves.
#[test]
fn a_clock_that_strays_from_a_straight_line_has_a_larger_epsilon() {
    let mut host = Host::new();
    let calm = host.epsilon().expect("believed");
    // A steady correction of the frequency is no straying: only the movement since the sample counts.
    for _ in 0..32 {
        host.ahead_ns += 20_000;
        host.look();
    }
    assert_eq!(host.epsilon(), Some(calm + 20_000));
    for _ in 0..2 {
        host.ahead_ns -= 60_000;
        host.look();
    }
    host.ahead_ns += 20_000;
    host.look();
    // Two seconds at 80 us less than the straight line, which itself bends down by a part of it.
    let strayed = host.guard.bound(host.now()).expect("a bound").wander_ns;
    assert!((140_000..=160_000).contains(&strayed), "{strayed}");
}

#[test]
fn a_servo_that_has_just_locked_has_to_settle() {
    let mut host = Host::with(Limits::new(MAX));
    host.run(11);
    assert_eq!(host.why(), Some(Why::Settling { for_ns: 9 * SECOND, need_ns: 10 * SECOND }));
    host.look();
    assert!(host.epsilon().is_some());
    host.answer = Answer { servo: Servo::Locking, sample: Err(NoSample::NotMeasured) };
    host.look();
    host.answer = Answer { servo: Servo::Locked, sample: Ok(sample(100)) };
    host.run(10);
    assert!(matches!(host.why(), Some(Why::Settling { .. })), "{:?}", host.why());
    host.look();
    assert!(host.epsilon().is_some());
}

#[test]
fn a_sample_that_is_told_again_is_no_new_one_and_grows_old() {
    let mut host = Host::with(Limits::new(MAX));
    let taken = Taken::At(WALL_AT_0);
    host.answer.sample = Ok(Sample { taken, ..sample(100) });
    for _ in 0..10 {
        host.raw_ns += SECOND;
        host.guard.on_answer(host.now(), host.now(), &host.answer);
    }
    // The age of a sample that was there at the first look is not known.
    assert_eq!(host.why(), Some(Why::TooFewSamples { have: 0, need: 4 }));

    let mut host = Host::new();
    let fresh = host.epsilon().expect("believed");
    let told = host.now().wall_ns - MS as i64;
    host.answer.sample = Ok(Sample { taken: Taken::At(told), ..sample(100) });
    for _ in 0..4 {
        host.raw_ns += SECOND;
        host.guard.on_answer(host.now(), host.now(), &host.answer);
    }
    let old = host.epsilon().expect("believed");
    assert_eq!(old - fresh, 4 * SECOND / 1_000_000 * 200, "4 s with 200 ppm");
    for _ in 0..6 {
        host.raw_ns += SECOND;
        host.guard.on_answer(host.now(), host.now(), &host.answer);
    }
    assert!(matches!(host.why(), Some(Why::AboveMax { max_ns: MAX, .. })), "{:?}", host.why());
}

#[test]
fn epsilon_counts_the_worst_sample_of_the_window_and_forgets_it_with_the_window() {
    let mut host = Host::new();
    let calm = host.epsilon().expect("believed");
    host.answer.sample = Ok(Sample { delay_ns: 50_000, ..sample(-200_000) });
    host.look();
    host.answer.sample = Ok(sample(100));
    host.look();
    // |offset| 200,000 in place of 100; delay 50,000 in place of 10,000; changes of 200,100 and 40,000.
    let worst = host.epsilon().expect("believed");
    assert_eq!(worst - calm, 199_900 + 40_000 + 200_100 + 40_000);
    host.run(28);
    assert_eq!(host.epsilon(), Some(worst));
    host.run(4);
    assert_eq!(host.epsilon(), Some(calm));
}

#[test]
fn the_source_s_own_error_and_the_grandmaster_s_are_part_of_epsilon() {
    let mut host = Host::new();
    let calm = host.epsilon().expect("believed");
    host.answer.sample =
        Ok(Sample { dispersion_ns: 3_000, master_error_ns: Some(70_000), ..sample(100) });
    host.look();
    assert_eq!(host.epsilon(), Some(calm + 73_000));
    host.answer.sample = Ok(Sample { master_error_ns: Some(u64::MAX), ..sample(100) });
    host.look();
    assert!(matches!(host.why(), Some(Why::AboveMax { epsilon_ns: u64::MAX, .. })));
}

#[test]
fn a_silent_source_is_gone_and_comes_back() {
    let mut host = Host::new();
    let before = host.epsilon().expect("believed");
    host.raw_ns += 4 * SECOND;
    host.guard.on_no_answer(host.now());
    assert!(host.epsilon().is_some_and(|epsilon| epsilon > before), "a lost answer is no silence");
    host.raw_ns += 2 * SECOND;
    // Time passes, and nobody looks.
    assert_eq!(host.why(), Some(Why::SourceGone { for_ns: 6 * SECOND }));
    host.guard.on_no_answer(host.now());
    assert_eq!(host.guard.status(host.now()).servo, Servo::Gone);
    host.run(3);
    assert_eq!(host.why(), Some(Why::TooFewSamples { have: 3, need: 4 }));
    host.look();
    assert!(host.epsilon().is_some());
}

#[test]
fn a_source_that_is_locked_without_a_sample_is_not_believed() {
    let mut host = Host::new();
    host.answer.sample = Err(NoSample::NotMeasured);
    host.look();
    assert_eq!(host.why(), Some(Why::NoSample { reason: NoSample::NotMeasured }));
    host.answer = Answer { servo: Servo::NoMaster, ..host.answer };
    host.look();
    assert_eq!(host.why(), Some(Why::NoMaster));
}

/// A step between two looks, as the next stamp sees it and as the next look does.
#[test]
fn a_step_is_part_of_epsilon_for_the_first_stamp_after_it() {
    for step_ns in [500_000, -500_000] {
        let mut host = Host::new();
        let before = host.epsilon().expect("believed");
        host.ahead_ns += step_ns;
        assert_eq!(host.epsilon(), Some(before + step_ns.unsigned_abs()));
    }
    for step_ns in [10_000_000, -10_000_000, 3_600_000_000_000, -3_600_000_000_000] {
        let mut host = Host::new();
        host.ahead_ns += step_ns;
        assert_eq!(host.why(), Some(Why::ClockMoved { by_ns: step_ns }));
    }
}

/// The source measures the clock of a network card, and that one is right.
#[test]
fn a_step_that_the_source_does_not_see_is_not_believed_until_it_is_undone() {
    let limits = Limits { sampled: Sampled::Other { hop_ns: 20_000 }, ..limits() };
    for step_ns in [10_000_000, -10_000_000, 3_600_000_000_000, -3_600_000_000_000] {
        let mut host = Host::with(limits);
        host.run(6);
        host.ahead_ns += step_ns;
        for _ in 0..30 {
            host.look();
            assert_eq!(host.why(), Some(Why::ClockMoved { by_ns: step_ns }));
        }
        assert_eq!(host.guard.status(host.now()).contradictions, 1);
        host.ahead_ns -= step_ns;
        host.run(3);
        assert_eq!(host.why(), Some(Why::TooFewSamples { have: 3, need: 4 }));
        host.look();
        assert!(host.epsilon().is_some(), "{:?}", host.why());
    }
}

#[test]
fn a_step_that_the_source_does_not_see_is_explained_by_drift_or_by_the_operator() {
    let limits = Limits { sampled: Sampled::Other { hop_ns: 20_000 }, ..limits() };
    let mut host = Host::with(limits);
    host.run(6);
    host.ahead_ns += 10_000_000;
    host.run(48);
    assert_eq!(host.why(), Some(Why::ClockMoved { by_ns: 10_000_000 }));
    // The raw clock itself may have drifted as far, with 200 ppm.
    host.run(8);
    assert!(host.epsilon().is_some(), "{:?}", host.why());
    host.ahead_ns += 3_600_000_000_000;
    host.look();
    host.guard.forget();
    host.run(4);
    assert!(host.epsilon().is_some(), "{:?}", host.why());
}

#[test]
fn a_step_while_the_servo_is_not_locked_is_noticed_too() {
    let limits = Limits { sampled: Sampled::Other { hop_ns: 20_000 }, ..limits() };
    let mut host = Host::with(limits);
    host.run(6);
    host.answer.servo = Servo::Locking;
    host.run(2);
    host.ahead_ns += 1_000_000_000;
    host.answer.servo = Servo::Locked;
    host.run(10);
    assert_eq!(host.why(), Some(Why::ClockMoved { by_ns: 1_000_000_000 }));
}

#[test]
fn a_step_that_the_source_sees_is_believed_again_once_the_clock_is_set_back() {
    let mut host = Host::new();
    host.ahead_ns += 10_000_000;
    host.answer.sample = Ok(sample(10_000_000));
    host.look();
    assert_eq!(host.why(), Some(Why::ClockMoved { by_ns: 10_000_000 }));
    host.look();
    assert!(matches!(host.why(), Some(Why::AboveMax { .. })), "{:?}", host.why());
    host.ahead_ns -= 10_000_000;
    host.answer = Answer { servo: Servo::Locking, sample: Err(NoSample::NotMeasured) };
    host.look();
    host.answer = Answer { servo: Servo::Locked, sample: Ok(sample(50)) };
    host.run(4);
    assert!(host.epsilon().is_some(), "{:?}", host.why());
    assert_eq!(host.guard.status(host.now()).contradictions, 0);
}

/// The samples alone say what has happened: the offset jumps, and the clock has not moved.
#[test]
fn a_step_of_the_master_is_not_believed_when_the_servo_has_followed_it() {
    for step_ns in [10_000_000, -10_000_000, 3_600_000_000_000, -3_600_000_000_000] {
        let mut host = Host::new();
        host.answer.sample = Ok(sample(100 - step_ns));
        host.look();
        assert_eq!(host.why(), Some(Why::ClockMoved { by_ns: step_ns }));
        host.ahead_ns += step_ns;
        host.answer.sample = Ok(sample(100));
        host.run(30);
        assert_eq!(host.why(), Some(Why::ClockMoved { by_ns: step_ns }));
        assert_eq!(host.guard.status(host.now()).contradictions, 1);
    }
    // A sync that was queued: the next one says that all is well.
    let mut host = Host::new();
    host.answer.sample = Ok(sample(10_000_000));
    host.look();
    assert_eq!(host.why(), Some(Why::ClockMoved { by_ns: -9_999_900 }));
    host.answer.sample = Ok(sample(100));
    host.run(4);
    assert!(host.epsilon().is_some(), "{:?}", host.why());
}

#[test]
fn a_drift_that_the_source_does_not_see_shows_within_the_window() {
    let limits = Limits { sampled: Sampled::Other { hop_ns: 20_000 }, ..limits() };
    let mut host = Host::with(limits);
    host.run(6);
    // 220 ppm: 20 more than the raw clock may be wrong, a second of which hides behind what each sample may be wrong.
    for _ in 0..30 {
        host.ahead_ns += 220_000;
        host.look();
    }
    assert!(matches!(host.why(), Some(Why::ClockMoved { .. })), "{:?}", host.why());
}

#[test]
fn a_source_that_measures_another_clock_is_found_out() {
    let mut host = Host::with(limits());
    let tai_ns = 37_000_000_000;
    for _ in 0..6 {
        host.raw_ns += SECOND;
        let taken = Taken::At(host.now().wall_ns + tai_ns - 500 * MS as i64);
        let answer = Answer { sample: Ok(Sample { taken, ..sample(0) }), ..host.answer };
        host.guard.on_answer(host.now(), host.now(), &answer);
    }
    let Some(Why::OtherClock { apart_ns }) = host.why() else { panic!("{:?}", host.why()) };
    assert!((apart_ns - tai_ns).unsigned_abs() < SECOND);
}

/// The two clocks may be the same at the moment, and drift apart later.
#[test]
fn the_clock_of_a_network_card_says_nothing_of_the_wall_clock_without_the_operator_s_word() {
    let hop_ns = 20_000;
    for sampled in [Sampled::ThisClock, Sampled::Other { hop_ns }] {
        let mut host = Host::with(Limits { sampled, ..limits() });
        for _ in 0..6 {
            host.raw_ns += SECOND;
            let taken = Taken::OnCard(host.now().wall_ns - 500 * MS as i64);
            let answer = Answer { sample: Ok(Sample { taken, ..sample(0) }), ..host.answer };
            host.guard.on_answer(host.now(), host.now(), &answer);
        }
        if sampled == Sampled::ThisClock {
            assert_eq!(host.why(), Some(Why::CardClock));
            host.run(4);
            assert!(host.epsilon().is_some(), "software again: {:?}", host.why());
        } else {
            assert_eq!(host.guard.bound(host.now()).map(|bound| bound.hop_ns), Some(hop_ns));
            assert!(host.epsilon().is_some(), "{:?}", host.why());
        }
    }
}

#[test]
fn another_master_begins_anew_and_does_not_explain_a_step() {
    let mut host = Host::new();
    host.answer.sample = Ok(Sample { master: Some(MasterId([2; 8])), ..sample(0) });
    host.look();
    assert_eq!(host.why(), Some(Why::TooFewSamples { have: 1, need: 4 }));
    assert_eq!(host.guard.status(host.now()).master, Some(MasterId([2; 8])));

    let limits = Limits { sampled: Sampled::Other { hop_ns: 20_000 }, ..limits() };
    let mut host = Host::with(limits);
    host.run(6);
    host.ahead_ns += 1_000_000_000;
    host.look();
    host.answer.sample = Ok(Sample { master: Some(MasterId([2; 8])), ..sample(0) });
    host.run(10);
    assert_eq!(host.why(), Some(Why::ClockMoved { by_ns: 1_000_000_000 }));
}

#[test]
fn samples_that_come_slowly_or_fast_are_enough_and_not_too_many() {
    let mut host = Host::with(Limits { window_ns: 2 * SECOND, ..limits() });
    host.run(20);
    assert_eq!(host.guard.status(host.now()).samples, 4);
    let mut host = Host::with(Limits { window_ns: u64::MAX, ..limits() });
    host.run(2_000);
    assert_eq!(host.guard.status(host.now()).samples, 512);
}

#[test]
fn extremes_of_every_number_end_nothing() {
    let times = [i64::MIN, -1, 0, 1, i64::MAX];
    let sizes = [0, 1, u64::MAX];
    let mut guard = ClockGuard::new(Limits {
        max_clock_error_ns: u64::MAX,
        drift_ppm: u32::MAX,
        window_ns: u64::MAX,
        samples_min: 0,
        settle_ns: 0,
        silence_max_ns: u64::MAX,
        sampled: Sampled::Other { hop_ns: u64::MAX },
    });
    for wall_ns in times {
        for raw_ns in sizes {
            for time in times {
                for size in sizes {
                    let now = Reading { wall_ns, raw_ns, slop_ns: size };
                    let sample = Sample {
                        taken: Taken::At(time),
                        offset_ns: time,
                        delay_ns: size,
                        dispersion_ns: size,
                        master_error_ns: Some(size),
                        master: None,
                    };
                    let answer = Answer { servo: Servo::Locked, sample: Ok(sample) };
                    guard.on_answer(now, now, &answer);
                    guard.on_no_answer(now);
                    let _ = guard.status(Reading { wall_ns: time, raw_ns: size, slop_ns: 0 });
                }
            }
        }
    }
}
