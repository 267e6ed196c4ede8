//! Tags in IPv6 extension headers.

use crate::frames::*;
use crate::member::*;
use std::sync::atomic::Ordering::SeqCst;
use tidelock_protocol::tag::{IPV6_OPTION, find_ipv6};
use tidelock_tagging::{Direction, Tried};

#[test]
fn ipv6_tags_are_what_the_codec_writes_and_come_out_again() {
    for writers in [1, 2, 3, 10, 61] {
        let Some(m) = load(&settings(vector(writers))) else { return };
        let seqs: Vec<u64> = (1..=u64::from(writers)).collect();
        m.pend(&seqs);
        let plain = ip6(OWN6, PEER6, UDP, b"12345678hello");
        let sent = m.send(&plain);
        m.is_passed(&sent, "tagged");
        let header = m.own6(UDP, &stamp(&seqs));
        let tagged = ip6(OWN6, PEER6, 60, &[&header[..], b"12345678hello"].concat());
        assert_eq!(sent.frame, tagged);

        let Some(other) = load(&settings(vector(writers))) else { return };
        let header = m.tag6(UDP, &stamp(&seqs));
        let tagged = ip6(PEER6, OWN6, 60, &[&header[..], b"12345678hello"].concat());
        let received = other.receive(&tagged);
        assert_eq!(received.frame, ip6(PEER6, OWN6, UDP, b"12345678hello"));
        let merged: Vec<u64> =
            other.tags.pending().entries.iter().map(|e| e.load(SeqCst)).collect();
        assert_eq!(merged[..seqs.len()], seqs);
    }
}

#[test]
fn ipv6_extension_headers_are_walked() {
    let Some(m) = load(&settings(vector(3))) else { return };
    let tag = m.tag6(UDP, &stamp(&[1, 2, 3]));
    let body = b"12345678";
    let from = |source: &str, next: u8, parts: &[&[u8]]| {
        m.receive(&ip6(source, OWN6, next, &parts.concat()))
    };
    // A stranger's, behind another header, with others: turned into one that says nothing.
    let hop = [60u8, 0, 1, 4, 0, 0, 0, 0];
    let received = from(STRANGER6, 0, &[&hop, &tag, body]);
    assert_eq!(received.frame.len(), 14 + 40 + 8 + tag.len() + 8);
    let options = &received.frame[14 + 40 + 8 + 2..14 + 40 + 8 + tag.len()];
    assert_eq!(find_ipv6(options), Ok(None));
    assert_eq!(options[..24], [&[0x3e, 22][..], &[0; 22]].concat(), "no entry is left");
    assert_eq!(m.counted("stripped_foreign"), 1);
    assert_eq!(m.pending(), [0, 0, 0]);

    // A member's must be where ours are, and only once.
    let mut second = tag.clone();
    second[0] = 60;
    assert!(!from(PEER6, 0, &[&hop, &tag, body]).passed);
    assert!(!from(PEER6, 60, &[&second, &tag, body]).passed);
    let mut damaged = tag.clone();
    damaged[7] ^= 1;
    assert!(!from(PEER6, 60, &[&damaged, body]).passed);
    assert_eq!(m.counted("dropped_malformed"), 3);
    for unreadable in [
        &[17u8, 9, IPV6_OPTION, 4, 0, 0, 0, 0][..],
        &[17, 0, IPV6_OPTION, 9, 0, 0, 0, 0],
        &[17, 0, 1, 3, 0, 0, 0, IPV6_OPTION],
    ] {
        assert!(!from(PEER6, 60, &[unreadable, body]).passed);
    }
    assert_eq!(m.counted("dropped_unreadable"), 3);

    // The guest's own headers: ours comes first, but never before hop-by-hop.
    m.pend(&[0, 0, 9]);
    let own = [17u8, 0, 1, 4, 0, 0, 0, 0];
    let sent = m.send(&ip6(OWN6, PEER6, 60, &[&own[..], body].concat()));
    m.is_passed(&sent, "tagged");
    assert_eq!(sent.frame[14 + 40..][..tag.len()], m.own6(60, &stamp(&[0, 0, 9])));
    let received = from(PEER6, 60, &[&m.tag6(60, &stamp(&[0, 0, 9])), &own, body]);
    assert_eq!(received.frame, ip6(PEER6, OWN6, 60, &[&own[..], body].concat()));
    let frame = ip6(OWN6, PEER6, 0, &[&own[..], body].concat());
    m.is_left(&m.send(&frame), &frame, "gated_no_room");
}

/// A GSO packet that is longer than its header can say. The kernel tries no frame that is so long, so these only say so.
#[test]
fn big_tcp_comes_to_the_guest() {
    let Some(m) = load(&settings(vector(3))) else { return };
    let receive = |frame: &[u8], gso| m.tags.try_frame(Direction::ToGuest, frame, gso).unwrap();
    let big = |source: &str, next: u8, parts: &[&[u8]]| {
        let mut frame = ip6(source, OWN6, next, &parts.concat());
        frame[ETHERNET + 4..ETHERNET + 6].fill(0);
        frame
    };
    let tcp = segment(ACK, &[], &[7; 2000]);
    let jumbo = |next| [next, 0, 0xc2, 4, 0, 1, 0, 0];
    // With the jumbo option, and as newer kernels have it.
    let frames = [PEER6, STRANGER6]
        .map(|from| [big(from, 0, &[&jumbo(TCP), &tcp]), big(from, TCP, &[&tcp])])
        .concat();
    for frame in frames {
        assert_eq!(receive(&frame, 1000), Tried { passed: true, mark: 0, frame });
    }
    assert_eq!(m.tags.stats().unwrap(), Default::default());

    // The kernel may have lost the first bytes of any other header, so such a packet cannot be read.
    let tag = m.tag6(TCP, &stamp(&[1, 2, 3]));
    let own = [TCP, 0, 1, 4, 0, 0, 0, 0];
    let frames = [
        big(PEER6, 0, &[&jumbo(60), &tag, &tcp]),
        big(PEER6, 0, &[&jumbo(60), &own, &tcp]),
        big(PEER6, 60, &[&tag, &tcp]),
        big(PEER6, 0, &[&jumbo(UDP), &tcp]),
    ];
    for (nth, frame) in (1..).zip(&frames) {
        assert!(!receive(frame, 1000).passed);
        assert_eq!(m.counted("dropped_unreadable"), nth);
    }
    assert_eq!(m.pending(), [0, 0, 0]);
    // No GSO packet: it has what it says, so nothing, and not the header that would have to come.
    assert!(!receive(&big(PEER6, 0, &[&jumbo(TCP), &tcp]), 0).passed);
}
