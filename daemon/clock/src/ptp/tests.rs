//! Bytes that a real `ptp4l` 3.1.1 sent (Debian 12; two of them over a veth pair), with the values that `pmc` printed
//! for them, and bytes that nobody should send.

use super::data::{PortState, accuracy_ns};
use super::look::{Look, LookError, Progress};
use super::*;
use crate::sample::{Answer, MasterId, NoSample, Sample, Servo, Taken};
use proptest::prelude::*;

/// Responses of a client that listens, with sequences from 0x100 on.
const LISTENING: [&str; 4] = [
    "0d02005000000000000000000000000000000000da1ee2fffe31206400010100047f00000000000001020304000002000001001c2004\
     da1ee2fffe312064000104fe0000000000000000fe03fe010002",
    "0d02004800000000000000000000000000000000da1ee2fffe31206400000101047f0000000000000102030400000200000100142001\
     000000000000000000000000000000000000",
    "0d02005600000000000000000000000000000000da1ee2fffe31206400000102047f0000000000000102030400000200000100222002\
     da1ee2fffe31206400000000ffff7fffffff65ff25ffff80da1ee2fffe312064",
    "0d02006800000000000000000000000000000000da1ee2fffe31206400000103047f000000000000010203040000020000010034c000\
     000000000000000000000000000000000000000000000000000000000000000000000000000000000000da1ee2fffe312064",
];

/// Responses of the same client when it follows a master, with sequences from 0x12c on.
const FOLLOWING: [&str; 4] = [
    "0d02005000000000000000000000000000000000da1ee2fffe3120640001012c047f00000000000001020304000002000001001c2004\
     da1ee2fffe312064000109fe0000000000000000fe03fe010002",
    "0d02004800000000000000000000000000000000da1ee2fffe3120640000012d047f0000000000000102030400000200000100142001\
     0001fffffffffd3800000000000005200000",
    "0d02005600000000000000000000000000000000da1ee2fffe3120640000012e047f0000000000000102030400000200000100222002\
     f2a394fffec8316f00010000ffff7fffffff64f825ffff80f2a394fffec8316f",
    "0d02006800000000000000000000000000000000da1ee2fffe3120640000012f047f000000000000010203040000020000010034c000\
     fffffffffffffd3818ecd8a06267157a0000000000000000000000000000000000000000000000000001f2a394fffec8316f",
];

/// Responses of the same client some seconds after the master was killed, with sequences from 0x200 on.
const ABANDONED: [&str; 4] = [
    "0d02005000000000000000000000000000000000da1ee2fffe31206400010200047f00000000000001020304000002000001001c2004\
     da1ee2fffe312064000104fe0000000000000000fe03fe010002",
    "0d02004800000000000000000000000000000000da1ee2fffe31206400000201047f0000000000000102030400000200000100142001\
     0001fffffffffcea00000000000004b30000",
    "0d02005600000000000000000000000000000000da1ee2fffe31206400000202047f0000000000000102030400000200000100222002\
     f2a394fffec8316f00010000ffff7fffffff64f825ffff80f2a394fffec8316f",
    "0d02006800000000000000000000000000000000da1ee2fffe31206400000203047f000000000000010203040000020000010034c000\
     fffffffffffffcea00000000000000000000000000000000000000000000000000000000000000000001f2a394fffec8316f",
];

/// The kind of timestamps of a port named `ptp`, by software, sequence 0x101.
const PROPERTIES: &str = "0d020046000000000000000000000000000000001abf1afffeec48eb00010101047f000000000000010203040000\
     020000010012c0041abf1afffeec48eb0001040003707470";

/// Refusal of `PATH_TRACE_LIST`, sequence 0x777.
const REFUSED: &str = "0d02003c000000000000000000000000000000005aeebbfffebbb23e00000777047f000000000000010203040000\
     020000020008000620150000\
     0000";

const ASKER: Asker = Asker {
    source: PortIdentity { clock: [0, 0, 0, 0, 0, 0, 1, 2], port: 0x304 },
    domain: 0,
    transport_specific: 0,
};

fn bytes(hex: &str) -> Vec<u8> {
    let digits: Vec<u8> = hex.bytes().filter(|b| b.is_ascii_hexdigit()).collect();
    let pairs = digits.chunks(2).map(|pair| std::str::from_utf8(pair).expect("digits"));
    pairs.map(|pair| u8::from_str_radix(pair, 16).expect("digits")).collect()
}

fn body(hex: &str) -> Body {
    decode(&bytes(hex)).expect("recorded").body
}

/// Takes all datagrams; the last one ends the look.
fn answer_of(first: u16, datagrams: &[Vec<u8>]) -> Result<Answer, LookError> {
    let mut look = Look::new(ASKER, first);
    for datagram in datagrams {
        if let Progress::Done(answer) = look.take(datagram)? {
            return Ok(answer);
        }
    }
    panic!("the look waits for more");
}

/// A whole look: the recorded datagrams, and the kind of timestamps after the first of them.
fn recorded(datagrams: &[&str; 4]) -> Vec<Vec<u8>> {
    let mut datagrams: Vec<_> = datagrams.iter().map(|hex| bytes(hex)).collect();
    let first = u16::from_be_bytes([datagrams[0][30], datagrams[0][31]]);
    datagrams.insert(1, bytes(PROPERTIES));
    for (sequence, datagram) in (first..).zip(&mut datagrams) {
        datagram[30..32].copy_from_slice(&sequence.to_be_bytes());
    }
    datagrams
}

#[test]
fn a_request_is_what_ptp4l_answered() {
    let expected = "0d0200360000000000000000000000000000000000000000000001020304\
                    0102047fffffffffffffffffffff000000000001000220 02";
    assert_eq!(request(&ASKER, 0x102, Id::ParentDataSet).to_vec(), bytes(expected));
    let asker = Asker { domain: 24, transport_specific: 1, ..ASKER };
    let other = request(&asker, 0x102, Id::ParentDataSet);
    assert_eq!((other[0], other[4]), (0x1d, 24));
}

#[test]
fn recorded_data_sets_have_the_values_that_pmc_prints() {
    let Body::Port(port) = body(FOLLOWING[0]) else { panic!() };
    assert_eq!((port.state, port.port.port), (PortState::Slave, 1));
    assert_eq!((port.peer_delay_ns, port.is_peer_to_peer), (0, false));
    let Body::Current(current) = body(FOLLOWING[1]) else { panic!() };
    assert_eq!((current.steps_removed, current.offset_ns, current.path_delay_ns), (1, -712, 1312));
    let Body::Parent(parent) = body(FOLLOWING[2]) else { panic!() };
    let grandmaster = [0xf2, 0xa3, 0x94, 0xff, 0xfe, 0xc8, 0x31, 0x6f];
    assert_eq!(parent.parent, PortIdentity { clock: grandmaster, port: 1 });
    assert_eq!((parent.master_class, parent.master_accuracy), (248, 0x25));
    assert_eq!(parent.master, grandmaster);
    let Body::TimeStatus(status) = body(FOLLOWING[3]) else { panic!() };
    assert_eq!((status.offset_ns, status.ingress_ns), (-712, 1_796_048_534_771_275_130));
    assert!(status.has_master && status.master == grandmaster);
    assert_eq!(MasterId(grandmaster).to_string(), "f2a394.fffe.c8316f");
    assert_eq!(body(REFUSED), Body::Refused { id: 0x2015, error: 6 });
}

#[test]
fn recorded_looks_say_whether_the_clock_follows_a_master() {
    let none = Answer { servo: Servo::NoMaster, sample: Err(NoSample::NotMeasured) };
    assert_eq!(answer_of(0x100, &recorded(&LISTENING)), Ok(none));
    let sample = Sample {
        taken: Taken::At(1_796_048_534_771_275_130),
        offset_ns: -712,
        delay_ns: 1312,
        dispersion_ns: 0,
        master_error_ns: Some(10_000),
        master: Some(MasterId([0xf2, 0xa3, 0x94, 0xff, 0xfe, 0xc8, 0x31, 0x6f])),
    };
    let locked = Answer { servo: Servo::Locked, sample: Ok(sample) };
    assert_eq!(answer_of(0x12c, &recorded(&FOLLOWING)), Ok(locked));
    // A clock that is its own grandmaster follows nobody, whatever its ports say.
    let mut alone = recorded(&FOLLOWING);
    alone[4][92..96].fill(0);
    assert_eq!(answer_of(0x12c, &alone), Ok(none));
    // The grandmaster is still named, and the last offset told.
    assert_eq!(answer_of(0x200, &recorded(&ABANDONED)), Ok(none));
}

#[test]
fn responses_to_an_earlier_look_are_passed_over() {
    let mut datagrams = recorded(&LISTENING);
    datagrams.extend(recorded(&FOLLOWING));
    let answer = answer_of(0x12c, &datagrams).expect("an answer");
    assert_eq!(answer.servo, Servo::Locked);
}

#[test]
fn one_port_that_follows_a_master_is_enough() {
    for (states, servo) in [
        ([9, 4], Servo::Locked),
        ([4, 9], Servo::Locked),
        ([8, 6], Servo::Locking),
        ([4, 6], Servo::NoMaster),
    ] {
        let mut datagrams = recorded(&FOLLOWING);
        datagrams.insert(0, datagrams[0].clone());
        for (datagram, state) in datagrams.iter_mut().zip(states) {
            datagram[64] = state;
        }
        assert_eq!(answer_of(0x12c, &datagrams).expect("an answer").servo, servo, "{states:?}");
    }
}

#[test]
fn a_delay_that_was_not_measured_is_no_delay_of_zero() {
    let mut datagrams = recorded(&FOLLOWING);
    datagrams[2][64..72].fill(0);
    let sample = |datagrams: &[Vec<u8>]| answer_of(0x12c, datagrams).expect("an answer").sample;
    assert_eq!(sample(&datagrams), Err(NoSample::DelayUnknown));
    // Delay from peer to peer is the port's.
    datagrams[0][77] = 2;
    assert_eq!(sample(&datagrams), Err(NoSample::DelayUnknown));
    datagrams[0][66..74].copy_from_slice(&(900i64 << 16).to_be_bytes());
    assert_eq!(sample(&datagrams).map(|sample| sample.delay_ns), Ok(900));
    datagrams[0][66..74].copy_from_slice(&(-900i64 << 16).to_be_bytes());
    assert_eq!(sample(&datagrams).map(|sample| sample.delay_ns), Ok(900));
}

/// The kinds of timestamps (`enum timestamp_type` of linuxptp): software, hardware, hardware in the wall clock's time,
/// two kinds of one-step hardware, and one that nobody knows yet.
#[test]
fn a_sample_by_the_clock_of_a_network_card_is_told_from_one_by_the_wall_clock() {
    let taken = |datagrams: &[Vec<u8>]| {
        answer_of(0x12c, datagrams).expect("an answer").sample.expect("a sample").taken
    };
    let at = 1_796_048_534_771_275_130;
    for (kind, is_card) in [(0, false), (1, true), (2, false), (3, true), (4, true), (5, true)] {
        let mut datagrams = recorded(&FOLLOWING);
        datagrams[1][65] = kind;
        let expected = if is_card { Taken::OnCard(at) } else { Taken::At(at) };
        assert_eq!(taken(&datagrams), expected, "{kind}");
        // A second port, with timestamps by software, changes nothing.
        datagrams.insert(2, bytes(PROPERTIES));
        datagrams[2][30..32].copy_from_slice(&0x12du16.to_be_bytes());
        assert_eq!(taken(&datagrams), expected, "{kind}");
    }
    // A read-only socket does not tell.
    let mut refused = recorded(&FOLLOWING);
    refused[1] = bytes(REFUSED);
    refused[1][30..32].copy_from_slice(&0x12du16.to_be_bytes());
    assert_eq!(taken(&refused), Taken::At(at));
}

#[test]
fn a_master_that_changes_within_a_look_makes_no_sample() {
    let mut datagrams = recorded(&FOLLOWING);
    let end = datagrams[3].len() - 1;
    datagrams[3][end] ^= 1;
    let answer = answer_of(0x12c, &datagrams).expect("an answer");
    assert_eq!(answer.sample, Err(NoSample::MasterChanged));
}

#[test]
fn a_look_without_all_of_its_responses_or_with_too_many_fails() {
    let mut refused = recorded(&FOLLOWING);
    refused[2] = bytes(REFUSED);
    refused[2][30..32].copy_from_slice(&0x12eu16.to_be_bytes());
    assert_eq!(answer_of(0x12c, &refused), Err(LookError::Refused { id: 0x2015, error: 6 }));
    for missing in 0..4 {
        let mut datagrams = recorded(&FOLLOWING);
        datagrams.remove(missing);
        assert_eq!(answer_of(0x12c, &datagrams), Err(LookError::WrongAnswer));
    }
    let mut exchanged = recorded(&FOLLOWING);
    exchanged[1][30..32].copy_from_slice(&0x12eu16.to_be_bytes());
    assert_eq!(answer_of(0x12c, &exchanged), Err(LookError::WrongAnswer));
    let stale = vec![bytes(LISTENING[0]); 513];
    assert_eq!(answer_of(0x12c, &stale), Err(LookError::TooMany));
}

#[test]
fn garbage_has_a_name() {
    let good = bytes(FOLLOWING[1]);
    let with = |at: usize, value: u8| {
        let mut bad = good.clone();
        bad[at] = value;
        decode(&bad).expect_err("garbage")
    };
    assert_eq!(decode(&[]), Err(PtpError::Short(0)));
    assert_eq!(with(0, 0x0b), PtpError::NotManagement(0xb));
    assert_eq!(with(1, 1), PtpError::Version(1));
    assert_eq!(with(3, 71), PtpError::Length { said: 71, got: 72 });
    assert_eq!(with(46, 0), PtpError::NotAResponse(0));
    assert_eq!(with(49, 3), PtpError::TlvType(3));
    assert_eq!(with(51, 21), PtpError::TlvLength { said: 21, got: 20 });
    assert_eq!(with(53, 3), PtpError::UnknownId(0x2003));
    assert_eq!(with(53, 2), PtpError::DataLength { id: 0x2002, got: 18 });
    let mut long = good.clone();
    long.extend([0, 0]);
    (long[3], long[51]) = (74, 22);
    assert_eq!(decode(&long), Err(PtpError::DataLength { id: 0x2001, got: 20 }));
}

#[test]
fn an_accuracy_that_the_grandmaster_does_not_know_is_none() {
    assert_eq!(accuracy_ns(0x17), Some(1));
    assert_eq!(accuracy_ns(0x1e), Some(3));
    assert_eq!(accuracy_ns(0x20), Some(25));
    assert_eq!(accuracy_ns(0x23), Some(1_000));
    assert_eq!(accuracy_ns(0x29), Some(1_000_000));
    assert_eq!(accuracy_ns(0x2f), Some(1_000_000_000));
    assert_eq!(accuracy_ns(0x30), Some(10_000_000_000));
    assert_eq!(accuracy_ns(0x31), Some(u64::MAX), "worse than 10 s");
    for unknown in [0, 0x16, 0x32, 0x80, 0xfe, 0xff] {
        assert_eq!(accuracy_ns(unknown), None);
    }
}

proptest! {
    /// A shorter datagram is never taken for the whole one, even if its lengths agree with it.
    #[test]
    fn a_datagram_that_was_cut_is_refused(nth in 0usize..6, keep in 0usize..104) {
        let whole = bytes([REFUSED, PROPERTIES].into_iter().chain(FOLLOWING).nth(nth).expect("six"));
        let keep = keep.min(whole.len() - 1);
        let mut cut = whole[..keep].to_vec();
        prop_assert!(decode(&cut).is_err());
        if keep >= 4 {
            cut[2..4].copy_from_slice(&(keep as u16).to_be_bytes());
        }
        if keep >= 52 {
            cut[50..52].copy_from_slice(&(keep as u16 - 52).to_be_bytes());
        }
        prop_assert!(decode(&cut).is_err());
    }

    #[test]
    fn whatever_comes_ends_nothing(
        noise in prop::collection::vec(any::<u8>(), 0..120),
        nth in 0usize..5,
        changes in prop::collection::vec((0usize..104, any::<u8>()), 0..8),
    ) {
        let _ = decode(&noise);
        let mut datagrams = recorded(&FOLLOWING);
        for (at, value) in changes {
            let len = datagrams[nth].len();
            datagrams[nth][at % len] = value;
        }
        let mut look = Look::new(ASKER, 0x12c);
        for datagram in &datagrams {
            let _ = look.take(datagram);
        }
    }
}
