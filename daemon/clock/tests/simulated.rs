//! A clock that drifts, is steered by a servo like `ptp4l`'s over a network that delays, and is stepped by others. The
//! true error, which no real test knows, never exceeds ε while the clock is believed.

use proptest::prelude::*;
use std::collections::VecDeque;
use tidelock_clock::{
    Answer, ClockGuard, Limits, MasterId, NoSample, Reading, Sample, Sampled, Servo, Taken,
};

const SECOND: f64 = 1e9;
const MS: f64 = 1e6;
const PPM: f64 = 1e-6;
const WALL_AT_0: i64 = 1_700_000_000_000_000_000;
const MASTER: MasterId = MasterId([7; 8]);

/// Numbers that a seed decides (xorshift64*).
struct Dice(u64);

impl Dice {
    fn unit(&mut self) -> f64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 11) as f64 / (1u64 << 53) as f64
    }

    fn between(&mut self, low: f64, high: f64) -> f64 {
        low + self.unit() * (high - low)
    }

    /// Many small ones, and a few large ones.
    fn delay(&mut self, mean: f64) -> f64 {
        -mean * (1.0 - self.unit()).ln()
    }

    fn sign(&mut self) -> f64 {
        if self.unit() < 0.5 { -1.0 } else { 1.0 }
    }
}

/// The host's clocks. Times are nanoseconds since the start, true time is the grandmaster's.
struct Clocks {
    true_ns: f64,
    /// Wall clock less true time.
    error_ns: f64,
    /// The master's clock less true time.
    master_ns: f64,
    raw_ns: f64,
    /// Frequency error of the raw clock.
    raw_rate: f64,
    /// Correction of the wall clock's frequency.
    adjusted: f64,
}

impl Clocks {
    fn advance_to(&mut self, true_ns: f64) {
        let by = true_ns - self.true_ns;
        self.true_ns = true_ns;
        self.error_ns += by * (self.raw_rate + self.adjusted);
        self.raw_ns += by * (1.0 + self.raw_rate);
    }

    fn reading(&self) -> Reading {
        let wall_ns = WALL_AT_0 + (self.true_ns + self.error_ns).round() as i64;
        // Rounding to nanoseconds.
        Reading { wall_ns, raw_ns: self.raw_ns.round() as u64, slop_ns: 2 }
    }
}

/// `ptp4l`: median of ten delays, and a PI servo.
struct Ptp {
    /// Offset beyond which it steps the clock, after the first time.
    step_beyond_ns: f64,
    has_stepped: bool,
    delays: VecDeque<f64>,
    delay_ns: f64,
    last_path_ns: f64,
    offset_ns: f64,
    ingress_ns: i64,
    integral: f64,
    samples: u32,
    locked: bool,
}

impl Ptp {
    fn new(step_beyond_ns: f64) -> Ptp {
        Ptp {
            step_beyond_ns,
            has_stepped: false,
            delays: VecDeque::new(),
            delay_ns: 0.0,
            last_path_ns: 0.0,
            offset_ns: 0.0,
            ingress_ns: 0,
            integral: 0.0,
            samples: 0,
            locked: false,
        }
    }

    fn measure_delay(&mut self, back_ns: f64) {
        self.delays.push_back((self.last_path_ns + back_ns) / 2.0);
        if self.delays.len() > 10 {
            self.delays.pop_front();
        }
        let mut sorted: Vec<f64> = self.delays.iter().copied().collect();
        sorted.sort_by(f64::total_cmp);
        self.delay_ns = sorted[sorted.len() / 2];
    }

    /// A sync that was under way for `path_ns` has come.
    fn sync(&mut self, path_ns: f64, every_ns: f64, clocks: &mut Clocks) {
        self.last_path_ns = path_ns;
        self.ingress_ns = clocks.reading().wall_ns;
        if self.delay_ns == 0.0 {
            return;
        }
        self.offset_ns = clocks.error_ns - clocks.master_ns + path_ns - self.delay_ns;
        self.samples += 1;
        if self.samples < 2 {
            return;
        }
        let beyond_ns = if self.has_stepped { self.step_beyond_ns } else { 20_000.0 };
        self.has_stepped = true;
        if self.offset_ns.abs() > beyond_ns {
            clocks.error_ns -= self.offset_ns;
            (self.ingress_ns, self.samples, self.locked) = (0, 0, false);
            return;
        }
        self.locked = true;
        let rate = self.offset_ns / every_ns;
        self.integral = (self.integral + 0.3 * rate).clamp(-500.0 * PPM, 500.0 * PPM);
        clocks.adjusted = -(0.7 * rate + self.integral).clamp(-900.0 * PPM, 900.0 * PPM);
    }

    fn answer(&self) -> Answer {
        let servo = if self.locked { Servo::Locked } else { Servo::Locking };
        let sample = if self.ingress_ns == 0 {
            Err(NoSample::NotMeasured)
        } else if self.delay_ns == 0.0 {
            Err(NoSample::DelayUnknown)
        } else {
            Ok(sample(self.ingress_ns, self.offset_ns, self.delay_ns))
        };
        Answer { servo, sample }
    }
}

fn sample(taken_ns: i64, offset_ns: f64, delay_ns: f64) -> Sample {
    Sample {
        taken: Taken::At(taken_ns),
        offset_ns: offset_ns.round() as i64,
        delay_ns: delay_ns.ceil() as u64,
        dispersion_ns: 0,
        master_error_ns: None,
        master: Some(MASTER),
    }
}

/// Misfortune of the clock besides drift.
#[derive(Clone, Copy, Debug)]
enum Mishap {
    Nothing,
    /// Somebody steps the wall clock, by 1 us to 1 h, every now and then.
    Steps,
    /// Somebody sets a wrong frequency.
    Frequency,
    /// The master, or `ptp4l`, is away for a while.
    Absences,
    /// Syncs are queued, and delay requests are not.
    Congestion,
    /// Somebody steps the master's clock once, by 240 ms to 1 h: 350 ppm, for a raw clock that is
    /// wrong by 150 one way and may be wrong by 200 the other, hide no such step within the run.
    MasterSteps,
}

#[derive(Debug, Default)]
struct Outcome {
    believed: u32,
    verdicts: u32,
    epsilon_max_ns: u64,
    contradictions: u64,
    violation: Option<String>,
}

/// Runs for ten minutes. An honest `ptp4l` throughout.
fn run(seed: u64, mishap: Mishap, limits: Limits) -> Outcome {
    let mut dice = Dice(seed | 1);
    let mut clocks = Clocks {
        true_ns: 0.0,
        error_ns: dice.between(-1.0, 1.0) * 50.0 * MS,
        master_ns: 0.0,
        raw_ns: 5.0 * SECOND,
        raw_rate: dice.between(-100.0, 100.0) * PPM,
        adjusted: 0.0,
    };
    let mut ptp = Ptp::new([MS, f64::INFINITY][usize::from(dice.unit() < 0.5)]);
    let mut guard = ClockGuard::new(limits);
    let there_ns = dice.between(5_000.0, 100_000.0);
    let back_ns = dice.between(5_000.0, 100_000.0);
    let jitter_ns = dice.between(100.0, 10_000.0);
    let queue_ns = 10f64.powf(dice.between(4.0, 6.3));
    let sync_every = [0.125, 1.0][usize::from(dice.unit() < 0.5)] * SECOND;
    let look_every = sync_every.max(0.25 * SECOND);
    let (mut next_sync, mut next_delay, mut next_look) = (SECOND, 1.5 * SECOND, 0.3 * SECOND);
    let mut next_mishap = 30.0 * SECOND;
    let (mut away_until, mut congested_until) = (0.0, 0.0);
    let mut outcome = Outcome::default();
    while clocks.true_ns < 600.0 * SECOND {
        let next = next_sync.min(next_delay).min(next_look).min(next_mishap);
        // A stamp somewhere before the next event, and one just before it.
        for share in [dice.unit(), 1.0] {
            let now = clocks.true_ns;
            clocks.advance_to(now + (next - now) * share);
            judge(&guard, &clocks, &mut outcome);
        }
        let is_away = next < away_until;
        if next == next_sync {
            next_sync += sync_every;
            let queued =
                if next < congested_until { dice.between(0.5, 1.0) * queue_ns } else { 0.0 };
            let path_ns = there_ns + dice.delay(jitter_ns) + queued;
            if !is_away {
                ptp.sync(path_ns, sync_every, &mut clocks);
            }
        } else if next == next_delay {
            next_delay += dice.between(0.5, 1.5) * SECOND;
            if !is_away {
                ptp.measure_delay(back_ns + dice.delay(jitter_ns));
            }
        } else if next == next_look {
            next_look += dice.between(0.5, 1.0) * look_every;
            let asked = clocks.reading();
            let answer = ptp.answer();
            clocks.advance_to(next + dice.between(10_000.0, 300_000.0));
            match mishap {
                Mishap::Absences if is_away && seed.is_multiple_of(2) => {
                    guard.on_no_answer(clocks.reading())
                }
                _ => guard.on_answer(asked, clocks.reading(), &answer),
            }
        } else {
            next_mishap += dice.between(5.0, 90.0) * SECOND;
            match mishap {
                Mishap::Nothing => {}
                Mishap::Steps => {
                    let size_ns = 10f64.powf(dice.between(3.0, 12.55));
                    clocks.error_ns += dice.sign() * size_ns;
                }
                Mishap::Frequency => clocks.adjusted += dice.between(-400.0, 400.0) * PPM,
                Mishap::Absences => {
                    away_until = next + dice.between(1.0, 60.0) * SECOND;
                    // The clock goes on with what the servo has last set, which may be an extreme.
                    clocks.adjusted += dice.between(-20.0, 20.0) * PPM;
                }
                Mishap::Congestion => congested_until = next + dice.between(1.0, 40.0) * SECOND,
                Mishap::MasterSteps => {
                    let slewed_in_time_ns = dice.between(240.0, 400.0) * MS;
                    let any_ns = 10f64.powf(dice.between(8.4, 12.55));
                    let step_ns = [slewed_in_time_ns, any_ns][usize::from(dice.unit() < 0.5)];
                    let step_ns = dice.sign() * step_ns;
                    clocks.master_ns =
                        if clocks.master_ns == 0.0 { step_ns } else { clocks.master_ns };
                }
            }
        }
        clocks.raw_rate =
            (clocks.raw_rate + dice.between(-0.01, 0.01) * PPM).clamp(-150.0 * PPM, 150.0 * PPM);
    }
    outcome.contradictions = guard.status(clocks.reading()).contradictions;
    outcome
}

fn judge(guard: &ClockGuard, clocks: &Clocks, outcome: &mut Outcome) {
    outcome.verdicts += 1;
    let now = clocks.reading();
    let Some(epsilon_ns) = guard.verdict(now).epsilon_ns() else { return };
    outcome.believed += 1;
    outcome.epsilon_max_ns = outcome.epsilon_max_ns.max(epsilon_ns);
    if clocks.error_ns.abs() > epsilon_ns as f64 + 1.0 && outcome.violation.is_none() {
        outcome.violation = Some(format!(
            "at {:.3} s the clock is wrong by {:.0} ns, and ε is {epsilon_ns}: {:?}",
            clocks.true_ns / SECOND,
            clocks.error_ns,
            guard.bound(now)
        ));
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    #[test]
    fn the_true_error_never_exceeds_epsilon_while_the_clock_is_believed(
        seed in any::<u64>(),
        mishap in prop_oneof![
            Just(Mishap::Nothing),
            Just(Mishap::Steps),
            Just(Mishap::Frequency),
            Just(Mishap::Absences),
            Just(Mishap::Congestion),
            Just(Mishap::MasterSteps),
        ],
        max_ms in 1u64..20,
    ) {
        let outcome = run(seed, mishap, Limits::new(max_ms * 1_000_000));
        prop_assert!(outcome.violation.is_none(), "{outcome:?}");
    }

    /// The new time is not the time of before, however small the offsets are when the servo has followed.
    #[test]
    fn a_master_that_was_stepped_is_not_believed(seed in any::<u64>(), max_ms in 1u64..20) {
        let outcome = run(seed, Mishap::MasterSteps, Limits::new(max_ms * 1_000_000));
        prop_assert!(outcome.violation.is_none(), "{outcome:?}");
    }

    /// A guard that believes nothing would be right, too.
    #[test]
    fn a_clock_that_is_well_is_believed_and_never_contradicted(seed in any::<u64>()) {
        let outcome = run(seed, Mishap::Nothing, Limits::new(2_000_000));
        prop_assert!(outcome.violation.is_none(), "{outcome:?}");
        prop_assert!(outcome.believed * 10 > outcome.verdicts * 9, "{outcome:?}");
        prop_assert_eq!(outcome.contradictions, 0);
    }

    /// The source measures the clock of a network card, which is right; whatever copies it into the wall clock is dead.
    #[test]
    fn no_stamp_after_a_large_step_is_believed_though_the_source_says_that_all_is_well(
        seed in any::<u64>(),
        step_ms in prop_oneof![Just(10.0), Just(-10.0), Just(3_600_000.0), Just(-3_600_000.0)],
        is_known in any::<bool>(),
    ) {
        let sampled = if is_known { Sampled::Other { hop_ns: 50_000 } } else { Sampled::ThisClock };
        let limits = Limits { sampled, ..Limits::new(2_000_000) };
        let mut dice = Dice(seed | 1);
        let mut clocks = Clocks {
            true_ns: 0.0,
            error_ns: 0.0,
            master_ns: 0.0,
            raw_ns: SECOND,
            raw_rate: dice.between(-50.0, 50.0) * PPM,
            adjusted: 0.0,
        };
        clocks.adjusted = -clocks.raw_rate;
        let mut guard = ClockGuard::new(limits);
        let mut looks = |clocks: &mut Clocks, guard: &mut ClockGuard, count: u32| {
            let mut believed = 0;
            for _ in 0..count {
                clocks.advance_to(clocks.true_ns + dice.between(0.2, 0.9) * SECOND);
                let card_ns = WALL_AT_0 + (clocks.true_ns - dice.between(0.0, 0.1) * SECOND) as i64;
                believed += u32::from(guard.verdict(clocks.reading()).epsilon_ns().is_some());
                let answer = Answer {
                    servo: Servo::Locked,
                    sample: Ok(sample(card_ns, dice.between(-500.0, 500.0), 10_000.0)),
                };
                let asked = clocks.reading();
                clocks.advance_to(clocks.true_ns + 20_000.0);
                guard.on_answer(asked, clocks.reading(), &answer);
                believed += u32::from(guard.verdict(clocks.reading()).epsilon_ns().is_some());
            }
            believed
        };
        prop_assert!(looks(&mut clocks, &mut guard, 100) > 100);
        clocks.error_ns += step_ms * MS;
        // 40 looks are 36 s at most: less than the 50 s in which a raw clock may drift by 10 ms.
        prop_assert_eq!(looks(&mut clocks, &mut guard, 40), 0);
        clocks.error_ns -= step_ms * MS;
        prop_assert!(looks(&mut clocks, &mut guard, 100) > 100);
    }
}

/// Each mishap is met: the guard must have had to say no.
#[test]
fn steps_and_absences_are_met_by_disbelief() {
    for mishap in [Mishap::Steps, Mishap::Absences, Mishap::MasterSteps] {
        let outcome = run(11, mishap, Limits::new(2_000_000));
        assert!(outcome.violation.is_none(), "{outcome:?}");
        assert!(
            outcome.believed > 0 && outcome.believed * 10 < outcome.verdicts * 9,
            "{outcome:?}"
        );
    }
}
