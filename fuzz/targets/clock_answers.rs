//! Sources of time: whatever `ptp4l` and `chronyd` send, and whatever the clocks show, the guard goes on, and believes no
//! clock whose bound is above the maximum.
//!
//! Input: events, each a kind, a length and so many bytes. Kinds: 0 a datagram of `ptp4l`, 1 one of `chronyd`, 2 the
//! clocks go on (wall and raw, eight bytes each), 3 no answer, 4 the operator knows.
#![no_main]

use libfuzzer_sys::fuzz_target;
use tidelock_clock::ptp::{Asker, Look, PortIdentity, Progress};
use tidelock_clock::{ClockGuard, Limits, Reading, Sampled, Verdict, chrony};

const MAX_NS: u64 = 50_000_000;

fuzz_target!(|data: &[u8]| {
    let [kinds, data @ ..] = data else { return };
    let sampled =
        if kinds & 1 == 0 { Sampled::ThisClock } else { Sampled::Other { hop_ns: 1_000 } };
    let limits = Limits { sampled, samples_min: 1, settle_ns: 0, ..Limits::new(MAX_NS) };
    let mut guard = ClockGuard::new(limits);
    let source = PortIdentity { clock: [0; 8], port: 1 };
    let begin = || Look::new(Asker { source, domain: 0, transport_specific: 0 }, 0);
    let mut look = begin();
    let (mut now, mut asked) = (Reading::default(), Reading::default());
    let mut rest = data;
    while let [kind, length, behind @ ..] = rest {
        let (bytes, behind) = behind.split_at(behind.len().min(usize::from(*length)));
        rest = behind;
        match kind % 5 {
            0 => match look.take(bytes) {
                Ok(Progress::Waiting) => {}
                Ok(Progress::Done(answer)) => {
                    guard.on_answer(asked, now, &answer);
                    look = begin();
                }
                Err(error) => {
                    assert!(!error.to_string().is_empty());
                    guard.on_no_answer(now);
                    look = begin();
                }
            },
            1 => match chrony::decode(bytes) {
                Ok(tracking) => guard.on_answer(asked, now, &tracking.answer()),
                Err(error) => assert!(!error.to_string().is_empty()),
            },
            2 => {
                let number = |at: usize| {
                    bytes
                        .get(at..at + 8)
                        .and_then(|bytes| bytes.try_into().ok())
                        .map(u64::from_be_bytes)
                };
                asked = now;
                now.wall_ns = now.wall_ns.wrapping_add(number(0).unwrap_or(1_000).cast_signed());
                now.raw_ns = now.raw_ns.wrapping_add(number(8).unwrap_or(1_000));
            }
            3 => guard.on_no_answer(now),
            _ => guard.forget(),
        }
        if let Verdict::Believed { epsilon_ns } = guard.status(now).verdict {
            assert!(epsilon_ns <= MAX_NS);
            assert_eq!(guard.bound(now).map(|bound| bound.total_ns()), Some(epsilon_ns));
        }
    }
});
