//! Commit wait: of two writes of which the second was asked for after the first was acknowledged, the second has the
//! greater stamp, on whichever hosts.

use proptest::prelude::*;
use tidelock_clock::wait::{CommitWait, earliest, has_passed, latest};

const START: i64 = 1_700_000_000_000_000_000;

proptest! {
    #[test]
    fn a_write_that_was_asked_for_after_an_acknowledgement_has_a_greater_stamp(
        epsilons in prop::array::uniform2(0u64..5_000_000),
        // Errors at three moments, as shares of ε: a clock may drift within its bound.
        shares in prop::array::uniform3(-1.0f64..=1.0),
        later_ns in 0i64..1_000,
    ) {
        let error = |epsilon: u64, share: f64| (epsilon as f64 * share) as i64;
        let [first, second] = epsilons;
        let stamp = latest(START + error(first, shares[0]), first);
        // The earliest true time at which the reply of the first may leave.
        let wait = CommitWait { stamp_ns: stamp };
        let reply = wait.until_ns(first) - error(first, shares[1]);
        prop_assert!(has_passed(stamp, wait.until_ns(first), first));
        prop_assert!(!has_passed(stamp, wait.until_ns(first) - 1, first));
        let next = latest(reply + later_ns + error(second, shares[2]), second);
        prop_assert!(next > stamp);
    }

    #[test]
    fn a_reply_waits_for_as_long_as_its_stamp_has_not_passed(
        stamp in any::<i64>(), now in any::<i64>(), epsilon in any::<u64>(),
    ) {
        let left = CommitWait { stamp_ns: stamp }.left_ns(now, epsilon);
        prop_assert_eq!(left.is_none(), has_passed(stamp, now, epsilon));
        if let Some(then) = left.and_then(|left| now.checked_add_unsigned(left))
            && then < i64::MAX
        {
            prop_assert!(has_passed(stamp, then, epsilon));
        }
        prop_assert!(earliest(now, epsilon) <= now && now <= latest(now, epsilon));
    }
}

/// A test of the test above: two clocks that differ by less than their bounds put a cause after its effect.
#[test]
fn without_the_wait_the_order_breaks() {
    let epsilon = 1_000_000;
    let fast = START + 900_000;
    let slow = START + 1_000 - 900_000;
    assert!(latest(slow, epsilon) < latest(fast, epsilon));
}

#[test]
fn the_wait_is_twice_epsilon_if_the_clock_stays_as_it_is() {
    let stamp_ns = latest(START, 300);
    assert_eq!(CommitWait { stamp_ns }.left_ns(START, 300), Some(601));
}
