//! Bytes that a real `chronyd` 4.3 sent (Debian 12; two of them over a veth pair), with the values that `chronyc`
//! printed for them, and bytes that nobody should send.

use super::*;
use proptest::prelude::*;

/// A client of 10.79.0.1, 15 s after its start.
const FOLLOWING: &str = "060200000021000500000000000000000102030400000000000000000a4f00010a4f0001000000000000000000\
    0000000001000000040000000000006b0d86bf1de8719edd027d39d4d4638edace718bfd71d377f29a6a0afc9c4760e28f4b51dea296d5\
    048137ae";
/// The server itself, whose reference is its own clock.
const LOCAL: &str = "060200000021000500000000000000000102030400000000000000007f7f010100000000000000000000000000000000\
    0000000000030000000000006b0d86b01a5b80370000000000000000000000000000000000000000000000000000000000000000\
    00000000";
/// The answer to a command that does not exist.
const UNKNOWN_COMMAND: &str = "06020000006300010003000000000000010203040000000000000000";

fn bytes(hex: &str) -> Vec<u8> {
    let digits: Vec<u8> = hex.bytes().filter(|b| b.is_ascii_hexdigit()).collect();
    let pairs = digits.chunks(2).map(|pair| std::str::from_utf8(pair).expect("digits"));
    pairs.map(|pair| u8::from_str_radix(pair, 16).expect("digits")).collect()
}

#[test]
fn a_recorded_report_has_the_values_that_chronyc_prints() {
    let tracking = decode(&bytes(FOLLOWING)).expect("recorded");
    assert_eq!((tracking.sequence, tracking.reference), (0x0102_0304, 0x0a4f_0001));
    assert_eq!((tracking.stratum, tracking.leap), (4, 0));
    // "System time: 0.000001888 seconds fast of NTP time", "Root delay: 0.000008541", "Root dispersion: 0.000002430";
    // chronyc asked some milliseconds later than these bytes were asked for.
    let near = |value: f64, printed: f64| (value - printed).abs() < 15e-9;
    assert!(near(tracking.correction_s, -0.000_001_888), "{tracking:?}");
    assert!(near(tracking.root_delay_s, 0.000_008_541), "{tracking:?}");
    assert!(near(tracking.root_dispersion_s, 0.000_002_430), "{tracking:?}");
    let Answer { servo: Servo::Locked, sample: Ok(sample) } = tracking.answer() else { panic!() };
    assert_eq!((sample.offset_ns, sample.delay_ns), (1_889, 4_271));
    assert!((2_400..2_450).contains(&sample.dispersion_ns), "{sample:?}");
}

#[test]
fn a_chronyd_that_follows_nobody_else_is_no_source() {
    let none = Answer { servo: Servo::NoMaster, sample: Err(NoSample::NotMeasured) };
    assert_eq!(decode(&bytes(LOCAL)).expect("recorded").answer(), none);
    let following = decode(&bytes(FOLLOWING)).expect("recorded");
    assert_eq!(Tracking { leap: 3, ..following }.answer(), none);
    assert_eq!(Tracking { reference: 0, ..following }.answer(), none);
    assert_eq!(Tracking { leap: 1, ..following }.answer().servo, Servo::Locked);
}

#[test]
fn a_request_is_what_chronyd_answered() {
    let mut expected = bytes("0601000000210000 01020304");
    expected.resize(104, 0);
    assert_eq!(request(0x0102_0304).to_vec(), expected);
}

#[test]
fn floats_are_chrony_s_own() {
    // 1 is 2^23 · 2^(2 - 25).
    assert_eq!(float((2 << 25) | (1 << 23)), 1.0);
    assert_eq!(float((2 << 25) | ((1 << 25) - (1 << 23))), -1.0);
    assert_eq!(float((0x7f << 25) | (1 << 23)), 0.125);
    assert_eq!(float(0), 0.0);
    assert_eq!(ns_of(float((0x3f << 25) | 0x00ff_ffff)), i64::MAX, "as large as it can be");
    assert_eq!((ns_of(1.1e-9), ns_of(-1.1e-9), ns_of(0.0)), (2, -2, 0));
}

#[test]
fn garbage_has_a_name() {
    let good = bytes(FOLLOWING);
    let with = |at: usize, value: u8| {
        let mut bad = good.clone();
        bad[at] = value;
        decode(&bad).expect_err("garbage")
    };
    assert_eq!(decode(&[]), Err(ChronyError::Length(0)));
    assert_eq!(with(0, 5), ChronyError::Version(5));
    assert_eq!(with(1, 1), ChronyError::NotAReply(1));
    assert_eq!(with(5, 34), ChronyError::WrongReply { command: 34, reply: 5 });
    assert_eq!(with(7, 6), ChronyError::WrongReply { command: 33, reply: 6 });
    assert_eq!(with(9, 2), ChronyError::Refused(2));
    // The sign of a coefficient: of the root delay, and of the root dispersion.
    assert_eq!(with(92, good[92] | 1), ChronyError::NegativeBound);
    assert_eq!(with(96, good[96] | 1), ChronyError::NegativeBound);
    let unknown = decode(&bytes(UNKNOWN_COMMAND));
    assert_eq!(unknown, Err(ChronyError::WrongReply { command: 0x63, reply: 1 }));
    let mut long = good.clone();
    long.push(0);
    assert_eq!(decode(&long), Err(ChronyError::Length(105)));
}

proptest! {
    #[test]
    fn a_datagram_that_was_cut_is_refused(keep in 0usize..104) {
        prop_assert!(decode(&bytes(FOLLOWING)[..keep]).is_err());
    }

    #[test]
    fn whatever_comes_ends_nothing(
        noise in prop::collection::vec(any::<u8>(), 0..120),
        changes in prop::collection::vec((28usize..104, any::<u8>()), 0..16),
    ) {
        let _ = decode(&noise);
        let mut changed = bytes(FOLLOWING);
        for (at, value) in changes {
            changed[at] = value;
        }
        if let Ok(tracking) = decode(&changed) {
            prop_assert!(tracking.correction_s.is_finite());
            let _ = tracking.answer();
        }
    }
}
