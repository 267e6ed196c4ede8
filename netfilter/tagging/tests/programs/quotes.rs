//! ICMP errors quote what a guest has sent with the tag that it got on the way: the guest sees its own packet.

use crate::frames::*;
use crate::member::*;
use std::sync::atomic::Ordering::SeqCst;
use tidelock_protocol::hlc::Hlc;
use tidelock_protocol::tag::{Form, IPV4_OPTION, IPV6_OPTION, Stamp};
use tidelock_tagging::{Settings, Tried};

const ERRORS: [u8; 5] = [3, 4, 5, 11, 12];
const ERRORS6: [u8; 4] = [1, 2, 3, 4];
const PARAMETER_PROBLEM: u8 = 12;
const PARAMETER_PROBLEM6: u8 = 4;
const ALERT: [u8; 4] = [148, 4, 0, 0];
const RECORD_ROUTE: [u8; 8] = [7, 7, 8, 10, 0, 0, 1, 0];
/// A destination options header of the guest's own, in front of UDP.
const OWN_HEADER: [u8; 8] = [UDP, 0, 1, 4, 0, 0, 0, 0];
/// What routers put behind a quote (RFC 4884): here an MPLS label.
const EXTENSION: [u8; 12] = [0x20, 0, 0xd9, 0xab, 0, 8, 1, 1, 0, 1, 0x41, 0xff];

fn said(form: Form) -> Stamp {
    match form {
        Form::Hlc => Stamp::Hlc(Hlc(7)),
        Form::Vector { writers } => stamp(&vec![5; usize::from(writers)]),
    }
}

/// What a guest sends, and the same as it is on the way.
fn sent4(m: &Member, options: &[u8], payload: &[u8]) -> (Vec<u8>, Vec<u8>) {
    let body = [&[0, 9, 0, 9, 0, 0, 0, 0], payload].concat();
    let on_the_way = [&m.tag4(&said(m.codec.form())), options].concat();
    let packet = |options: &[u8]| ip4(OWN, PEER, UDP, options, &body)[ETHERNET..].to_vec();
    (packet(options), packet(&on_the_way))
}

fn sent6(m: &Member, next: u8, body: &[u8]) -> (Vec<u8>, Vec<u8>) {
    let mut header = vec![];
    m.codec.encode_ipv6(next, &said(m.codec.form()), &mut header);
    let packet = |next, body: &[u8]| ip6(OWN6, PEER6, next, body)[ETHERNET..].to_vec();
    (packet(next, body), packet(60, &[&header[..], body].concat()))
}

/// Nothing is learnt from what the guest has said itself.
fn knows_nothing(m: &Member) {
    assert_eq!((m.pending(), m.tags.pending().hlc.load(SeqCst)), (vec![0; 3], 0));
    assert_eq!(m.tags.stats().unwrap(), Default::default());
}

#[test]
fn a_guest_finds_its_own_packet_in_errors_of_every_kind() {
    for form in [vector(1), vector(3), vector(7), Form::Hlc] {
        let Some(m) = load(&settings(form)) else { return };
        for payload in [&b""[..], b"odd", &[7; 600]] {
            // Behind seven entries there is no room for another option.
            let options = if m.codec.ipv4_bytes() > 36 { &[][..] } else { &ALERT };
            for options in [&[][..], options] {
                let (plain, tagged) = sent4(&m, options, payload);
                for (kind, source) in ERRORS.into_iter().zip([STRANGER, PEER].into_iter().cycle()) {
                    let received = m.receive(&error4(source, kind, [0; 4], &tagged));
                    assert!(received.passed);
                    assert_eq!(received.frame, error4(source, kind, [0; 4], &plain), "{kind}");
                }
            }
        }
        knows_nothing(&m);
    }
    for form in [vector(1), vector(2), vector(3), vector(61), Form::Hlc] {
        let Some(m) = load(&settings(form)) else { return };
        for payload in [&b"12345678"[..], b"12345678odd", &[7; 600]] {
            for (next, headers) in
                [(UDP, &[][..]), (60, &OWN_HEADER), (44, &[UDP, 0, 0, 1, 0, 0, 0, 9])]
            {
                let (plain, tagged) = sent6(&m, next, &[headers, payload].concat());
                for (kind, source) in
                    ERRORS6.into_iter().zip([STRANGER6, PEER6].into_iter().cycle())
                {
                    let received = m.receive(&error6(source, kind, [0; 4], &tagged));
                    assert!(received.passed);
                    assert_eq!(received.frame, error6(source, kind, [0; 4], &plain), "{kind}");
                }
            }
        }
        knows_nothing(&m);
    }
}

/// A router repeats options of the packet that it could not deliver, such as a recorded route (RFC 1122 3.2.2).
#[test]
fn an_error_may_have_options_of_its_own() {
    for form in [vector(3), Form::Hlc] {
        let Some(m) = load(&settings(form)) else { return };
        for payload in [&b"12345678"[..], b"12345678odd", &[7; 600]] {
            let (plain, tagged) = sent4(&m, &RECORD_ROUTE, payload);
            let error = |quote: &[u8]| error4_behind(&RECORD_ROUTE, STRANGER, 11, [0; 4], quote);
            assert_eq!(m.receive(&error(&tagged)).frame, error(&plain));
            let (plain, tagged) = sent6(&m, UDP, payload);
            let header = [ICMPV6, 0, 1, 4, 0, 0, 0, 0];
            let error = |quote: &[u8]| error6_behind(&header, STRANGER6, 3, [0; 4], quote);
            assert_eq!(m.receive(&error(&tagged)).frame, error(&plain));
        }
        knows_nothing(&m);
    }
}

/// Its quote is one of its options, whose length stays.
#[test]
fn a_redirect_quotes_in_an_option() {
    for form in [vector(1), vector(3), vector(61), Form::Hlc] {
        let Some(m) = load(&settings(form)) else { return };
        for payload in [&b"12345678"[..], b"12345678odd", &[7; 1000]] {
            let (plain, tagged) = sent6(&m, UDP, payload);
            let redirect = |quote: &[u8]| error6(STRANGER6, 137, [0; 4], &redirect6(quote));
            let mut left = plain;
            left.resize(tagged.len(), 0);
            let received = m.receive(&redirect(&tagged));
            assert!(received.passed);
            assert_eq!(received.frame, redirect(&left));
        }
        knows_nothing(&m);
    }
    // No quote, and options that do not end.
    let Some(m) = load(&settings(vector(3))) else { return };
    let tagged = sent6(&m, UDP, b"12345678").1;
    let options = redirect6(&tagged)[32..].to_vec();
    for options in [&options[..8], &[9, 0][..], &[&[4, 200], &options[10..]].concat(), &[]] {
        let frame = error6(STRANGER6, 137, [0; 4], &[&[0; 32], options].concat());
        assert_eq!(m.receive(&frame), Tried { passed: true, mark: 0, frame });
    }
}

/// What is in a fragment is no error, what is behind another option no tag of ours, and what is no error quotes nothing.
#[test]
fn other_messages_and_other_quotes_stay_as_they_are() {
    let Some(m) = load(&settings(vector(3))) else { return };
    let (plain, tagged) = sent4(&m, &[], b"x");
    let (plain6, tagged6) = sent6(&m, UDP, b"12345678");
    let tag = m.tag4(&said(vector(3)));
    let with = |options: &[u8]| {
        error4(STRANGER, 3, [0; 4], &ip4(OWN, PEER, UDP, options, b"12345678")[ETHERNET..])
    };
    let with6 = |header: &[u8]| {
        let quote = ip6(OWN6, PEER6, 60, &[header, b"12345678"].concat());
        error6(STRANGER6, 1, [0; 4], &quote[ETHERNET..])
    };
    let mut fragment = error4(STRANGER, 3, [0; 4], &tagged);
    fragment[ETHERNET + 6] = 0x20;
    let mut no_ipv4 = tagged.clone();
    no_ipv4[0] = 0x69;
    let mut no_ipv6 = tagged6.clone();
    no_ipv6[0] = 0x40;
    let mut short_header = tagged.clone();
    short_header[0] = 0x48;
    let mut longer = error4(STRANGER, 3, [0; 4], &tagged);
    longer[ETHERNET + 2] = 1;
    let mut frames = vec![
        error4(STRANGER, 3, [0; 4], &plain),
        error4(STRANGER, 3, [0; 4], &tagged[..20]),
        error4(STRANGER, 3, [0; 4], &no_ipv4),
        error4(STRANGER, 3, [0; 4], &short_header),
        error4(STRANGER, 3, [0; 4], b""),
        fragment,
        longer,
        with(&ALERT),
        with(&[&ALERT, &tag[..]].concat()),
        with(&[IPV4_OPTION, 3, 0, 0]),
        with(&[IPV4_OPTION, 6, 0, 0, 0, 0, 0, 0]),
        with(&[222, 4, 0x11, 0]),
        error6(STRANGER6, 1, [0; 4], &plain6),
        error6(STRANGER6, 1, [0; 4], &tagged6[..40]),
        error6(STRANGER6, 1, [0; 4], &no_ipv6),
        error6(STRANGER6, 1, [0; 4], b""),
        with6(&OWN_HEADER),
        with6(&[UDP, 0, 1, 0, IPV6_OPTION, 2, 0, 0]),
        with6(&[UDP, 1, IPV6_OPTION, 2, 0, 0, 1, 8, 0, 0, 0, 0, 0, 0, 0, 0]),
    ];
    let others = (0..=255).filter(|kind| !ERRORS.contains(kind));
    frames.extend(others.map(|kind| error4(STRANGER, kind, [0; 4], &tagged)));
    let others = (0..=255).filter(|kind| !ERRORS6.contains(kind));
    frames.extend(others.map(|kind| error6(STRANGER6, kind, [0; 4], &tagged6)));
    // In TCP and UDP such bytes mean something else.
    frames.extend([UDP, TCP].map(|protocol| {
        ip4(PEER, OWN, protocol, &[], &error4(PEER, 3, [0; 4], &tagged)[ETHERNET + 20..])
    }));
    for frame in frames {
        let received = m.receive(&frame);
        assert_eq!(received, Tried { passed: true, mark: 0, frame });
    }
    knows_nothing(&m);
}

/// A router may quote less than the header that it quotes from: what is there of the tag goes.
#[test]
fn of_a_quote_that_ends_in_the_tag_no_part_of_the_tag_is_seen() {
    let Some(m) = load(&settings(vector(3))) else { return };
    for options in [&[][..], &ALERT] {
        let (plain, tagged) = sent4(&m, options, b"hello");
        let tag_bytes = tagged.len() - plain.len();
        for quoted in 22..=tagged.len() {
            let received = m.receive(&error4(STRANGER, 11, [0; 4], &tagged[..quoted]));
            let mut left = plain[..20.max(quoted - tag_bytes.min(quoted))].to_vec();
            if quoted < 20 + tag_bytes {
                left[10..12].fill(0);
                let check = !sum(&left);
                left[10..12].copy_from_slice(&check.to_be_bytes());
            }
            assert_eq!(received.frame, error4(STRANGER, 11, [0; 4], &left), "{quoted}");
        }
    }
    let (plain, tagged) = sent6(&m, UDP, b"12345678hello");
    let tag_bytes = tagged.len() - plain.len();
    for quoted in 44..=tagged.len() {
        let received = m.receive(&error6(STRANGER6, 3, [0; 4], &tagged[..quoted]));
        let left = &plain[..40.max(quoted - tag_bytes.min(quoted))];
        assert_eq!(received.frame, error6(STRANGER6, 3, [0; 4], left), "{quoted}");
    }
    knows_nothing(&m);
}

/// It stays where it is found: the quote before it is as long as before.
#[test]
fn what_follows_a_quote_stays_behind_it() {
    for form in [vector(3), vector(7), Form::Hlc] {
        let Some(m) = load(&settings(form)) else { return };
        for (payload, quoted) in
            [(&b"hello"[..], 128), (&[7; 600], 128), (&[7; 600], 256), (&[7; 1000], 1016)]
        {
            let ((plain, tagged), (plain6, tagged6)) =
                (sent4(&m, &[], payload), sent6(&m, UDP, &[b"12345678", payload].concat()));
            let followed = |tagged: &[u8]| {
                let mut quote = tagged.to_vec();
                quote.resize(quoted, 0);
                [&quote[..], &EXTENSION].concat()
            };
            // What of the packet was quoted, without the tag, and zeros.
            let wanted = |tagged: &[u8], plain: &[u8]| {
                let mut quote = plain.to_vec();
                quote.truncate(quoted - (tagged.len() - plain.len()));
                followed(&quote)
            };
            for kind in [3, 11, 12] {
                let rest = [0, u8::try_from(quoted / 4).unwrap(), 0, 0];
                let received = m.receive(&error4(STRANGER, kind, rest, &followed(&tagged)));
                let wanted = error4(STRANGER, kind, rest, &wanted(&tagged, &plain));
                assert_eq!(received.frame, wanted, "{quoted}");
            }
            for kind in [1, 3] {
                let rest = [u8::try_from(quoted / 8).unwrap(), 0, 0, 0];
                let received = m.receive(&error6(STRANGER6, kind, rest, &followed(&tagged6)));
                let wanted = error6(STRANGER6, kind, rest, &wanted(&tagged6, &plain6));
                assert_eq!(received.frame, wanted, "{quoted}");
            }
        }
        knows_nothing(&m);
    }
    // The longest tag is longer than what must be quoted.
    let Some(m) = load(&settings(vector(61))) else { return };
    let (plain, tagged) = sent6(&m, UDP, b"12345678");
    let quote = |packet: &[u8]| {
        let mut quote = packet[..packet.len().min(128)].to_vec();
        quote.resize(128, 0);
        [&quote[..], &EXTENSION].concat()
    };
    let received = m.receive(&error6(STRANGER6, 1, [16, 0, 0, 0], &quote(&tagged)));
    assert_eq!(received.frame, error6(STRANGER6, 1, [16, 0, 0, 0], &quote(&plain[..40])));
}

/// A length that is none, and where other things are in its place.
#[test]
fn what_is_no_length_of_a_quote_is_not_taken_for_one() {
    let Some(m) = load(&settings(vector(3))) else { return };
    let (plain, tagged) = sent4(&m, &[], &[7; 200]);
    let (plain6, tagged6) = sent6(&m, UDP, &[7; 200]);
    for (length, length6) in [(1, 1), (31, 15), (255, 127)] {
        let rest = [0, length, 0, 0];
        let received = m.receive(&error4(STRANGER, 3, rest, &tagged));
        assert_eq!(received.frame, error4(STRANGER, 3, rest, &plain));
        let rest = [length6, 0, 0, 0];
        let received = m.receive(&error6(STRANGER6, 1, rest, &tagged6));
        assert_eq!(received.frame, error6(STRANGER6, 1, rest, &plain6));
    }
    // A gateway's address, and the MTU of a path.
    let received = m.receive(&error4(STRANGER, 5, [10, 40, 0, 1], &tagged));
    assert_eq!(received.frame, error4(STRANGER, 5, [10, 40, 0, 1], &plain));
    let received = m.receive(&error6(STRANGER6, 2, [20, 0, 5, 220], &tagged6));
    assert_eq!(received.frame, error6(STRANGER6, 2, [20, 0, 5, 220], &plain6));
}

#[test]
fn where_something_is_wrong_is_told_as_in_the_guests_own_packet() {
    let Some(m) = load(&settings(vector(3))) else { return };
    let (plain, tagged) = sent4(&m, &ALERT, b"x");
    // Before the tag, in it, and behind it.
    for (at, told) in [(8, 8), (19, 19), (22, 22), (44, 20), (46, 22)] {
        let received = m.receive(&error4(STRANGER, PARAMETER_PROBLEM, [at, 0, 0, 0], &tagged));
        assert_eq!(received.frame, error4(STRANGER, PARAMETER_PROBLEM, [told, 0, 0, 0], &plain));
    }
    let (plain, tagged) = sent6(&m, 60, &[&OWN_HEADER, &b"12345678"[..]].concat());
    for (at, told) in [(6u32, 6u32), (42, 42), (72, 40), (74, 42)] {
        let kind = PARAMETER_PROBLEM6;
        let received = m.receive(&error6(STRANGER6, kind, at.to_be_bytes(), &tagged));
        assert_eq!(received.frame, error6(STRANGER6, kind, told.to_be_bytes(), &plain));
    }
}

/// Another number of the option is the tag's, and the usual one somebody else's.
#[test]
fn the_tag_in_a_quote_has_the_configured_number() {
    let Some(m) = load(&Settings { ipv4_option: 222, ..settings(vector(3)) }) else { return };
    let quote = |options: &[u8]| {
        let packet = ip4(OWN, PEER, UDP, options, b"12345678");
        error4(STRANGER, 3, [0; 4], &packet[ETHERNET..])
    };
    let mut tag = vec![];
    m.codec.encode_ipv4(222, &said(vector(3)), &mut tag);
    assert_eq!(m.receive(&quote(&tag)).frame, quote(&[]));
    let usual = quote(&m.tag4(&said(vector(3))));
    assert_eq!(m.receive(&usual).frame, usual);
}
