//! Tags in fragments.

use crate::frames::*;
use crate::member::*;
use std::sync::atomic::Ordering::SeqCst;
use tidelock_protocol::hlc::Hlc;
use tidelock_protocol::tag::{Form, IPV6_OPTION, Stamp};

#[test]
fn fragments_carry_and_lose_their_tags_like_whole_packets() {
    let Some(m) = load(&settings(vector(3))) else { return };
    m.pend(&[4, 5, 6]);
    for fragment in [0x2000, 0x2010, 0x0020] {
        let plain = ip4_fragment(OWN, PEER, UDP, &[], b"part of it", fragment);
        let sent = m.send(&plain);
        assert_eq!(options_of(&sent.frame), m.own4(&stamp(&[4, 5, 6])));
        let tag = m.tag4(&stamp(&[4, 5, 6]));
        let tagged = ip4_fragment(PEER, OWN, UDP, &tag, b"part of it", fragment);
        let received = m.receive(&tagged);
        assert_eq!(received.frame, ip4_fragment(PEER, OWN, UDP, &[], b"part of it", fragment));
    }
}

/// A fragment header, in front of UDP.
fn fragment6(at: u16, more: bool) -> [u8; 8] {
    let [high, low] = (at | u16::from(more)).to_be_bytes();
    [UDP, 0, high, low, 0, 0, 0, 9]
}

#[test]
fn ipv6_fragments_carry_and_lose_their_tags_like_whole_packets() {
    for form in [vector(3), Form::Hlc] {
        let Some(m) = load(&settings(form)) else { return };
        m.pend(&[4, 5, 6]);
        m.tags.pending().hlc.store(7, SeqCst);
        let said = if form == Form::Hlc { Stamp::Hlc(Hlc(7)) } else { stamp(&[4, 5, 6]) };
        let (tag, own) = (m.tag6(44, &said), m.own6(44, &said));
        let room = tag.len();
        for (nth, (at, more)) in
            [(0, true), (16, true), (8, false), (0, false)].into_iter().enumerate()
        {
            let body = [&fragment6(at, more)[..], b"part of it"].concat();
            let sent = m.send(&ip6(OWN6, PEER6, 44, &body));
            let tagged = [&tag[..], &body].concat();
            assert_eq!(sent.frame, ip6(OWN6, PEER6, 60, &[&own[..], &body].concat()));
            assert_ne!(sent.mark & MARK_MASK, 0);
            let received = m.receive(&ip6(PEER6, OWN6, 60, &tagged));
            assert_eq!(received.frame, ip6(PEER6, OWN6, 44, &body));
            assert_eq!(m.counted("merged"), nth as u64 + 1);

            // The longest that has room, and one that has none.
            let full = vec![7; MTU as usize - 40 - 8 - room + 1];
            let frame = ip6(OWN6, PEER6, 44, &[&fragment6(at, more)[..], &full].concat());
            let sent = m.send(&frame);
            assert_eq!((sent.mark & MARK_MASK, sent.frame), (0, frame));
            assert_eq!(m.counted("gated_fragment"), nth as u64 + 1);
            let frame = ip6(OWN6, PEER6, 44, &[&fragment6(at, more)[..], &full[1..]].concat());
            assert_eq!(m.send(&frame).frame.len(), ETHERNET + MTU as usize);
        }
    }
}

/// A tag that is wrong, or of the guest itself, is that in a fragment, too.
#[test]
fn fragments_do_not_hide_what_is_wrong() {
    let Some(m) = load(&settings(vector(3))) else { return };
    let good = m.tag4(&stamp(&[1, 2, 3]));
    let mut damaged = good.clone();
    damaged[3] ^= 1;
    let six = m.tag6(44, &stamp(&[1, 2, 3]));
    let mut damaged6 = six.clone();
    damaged6[5] ^= 1;
    let (mut malformed, mut unreadable, mut own) = (0, 0, 0);
    for (at, more) in [(0, true), (16, true), (16, false)] {
        let four = |from: [u8; 4], to: [u8; 4], options: &[u8]| {
            let fragment = (at / 8) | (u16::from(more) << 13);
            ip4_fragment(from, to, UDP, options, b"part of it", fragment)
        };
        let body = [&fragment6(at, more)[..], b"part of it"].concat();
        let behind = |header: &[u8]| [header, &body].concat();
        for options in [&damaged[..], &[158, 4, 0, 0], &[&good[..], &[158, 4, 0, 0]].concat()] {
            assert!(!m.receive(&four(PEER, OWN, options)).passed);
            malformed += 1;
        }
        assert!(!m.receive(&ip6(PEER6, OWN6, 60, &behind(&damaged6))).passed);
        malformed += 1;
        assert_eq!(m.counted("dropped_malformed"), malformed);
        for options in [[158, 0, 0, 0], [158, 5, 0, 0], [1, 1, 1, 158]] {
            assert!(!m.receive(&four(PEER, OWN, &options)).passed);
            unreadable += 1;
        }
        for header in [[44, 0, IPV6_OPTION, 5, 0, 0, 0, 0], [44, 200, IPV6_OPTION, 4, 0, 0, 0, 0]] {
            assert!(!m.receive(&ip6(PEER6, OWN6, 60, &behind(&header))).passed);
            unreadable += 1;
        }
        assert_eq!(m.counted("dropped_unreadable"), unreadable);
        for to in [(PEER, PEER6), (STRANGER, STRANGER6)] {
            assert!(!m.send(&four(OWN, to.0, &good)).passed);
            assert!(!m.send(&ip6(OWN6, to.1, 60, &behind(&six))).passed);
            own += 2;
        }
        assert_eq!(m.counted("dropped_guests_own"), own);
    }
    // Behind the fragment header a tag is part of what is fragmented: no member writes it there.
    let mut inside = six.clone();
    inside[0] = UDP;
    let first = [&[60, 0, 0, 1, 0, 0, 0, 9], &inside[..], b"12345678"].concat();
    assert!(!m.receive(&ip6(PEER6, OWN6, 44, &first)).passed);
    assert_eq!(m.counted("dropped_malformed"), malformed + 1);
    let received = m.receive(&ip6(STRANGER6, OWN6, 44, &first));
    let blank =
        [&[60, 0, 0, 1, 0, 0, 0, 9, UDP, 3, 0x3e, 22][..], &[0; 22], &six[26..], b"12345678"];
    assert_eq!(received.frame, ip6(STRANGER6, OWN6, 44, &blank.concat()));
    assert!(!m.send(&ip6(OWN6, PEER6, 44, &first)).passed);
    assert_eq!(m.pending(), [0, 0, 0], "nothing was merged");
}
