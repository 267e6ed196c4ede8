//! ARP, neighbour discovery, and frames to a bridge itself.

use crate::frames::*;
use crate::member::*;
use tidelock_tagging::{Settings, Tried};

/// From the guest's own link-layer address, to one or to all.
fn arp(to_all: bool, op: u8, about: [u8; 4], behind: &[u8]) -> Vec<u8> {
    let mut frame = ip4(OWN, about, UDP, &[], b"")[..ETHERNET].to_vec();
    if to_all {
        frame[..6].fill(0xff);
    }
    frame[12..].copy_from_slice(&[8, 6]);
    let own_link = frame[6..12].to_vec();
    frame.extend([0, 1, 8, 0, 6, 4, 0, op]);
    [&frame[..], &own_link, &OWN, b"secret", &about, behind].concat()
}

#[test]
fn arp_says_only_what_it_must_and_nothing_to_others_while_the_gate_is_shut() {
    for is_bridged in [true, false] {
        let Some(m) = load(&Settings { is_bridged, ..settings(vector(3)) }) else { return };
        for is_open in [false, true] {
            if is_open {
                m.open();
            }
            for (to_all, op, about) in [
                (true, 1, PEER),
                (true, 1, STRANGER),
                (false, 1, STRANGER),
                (false, 2, STRANGER),
                (true, 2, OWN),
            ] {
                let sent = m.send(&arp(to_all, op, about, b"what a guest may put behind it"));
                assert_eq!(sent.passed, is_open || !is_bridged, "{op} {about:?} {is_bridged}");
            }
            for op in [1, 2] {
                let frame = arp(false, op, PEER, b"what a guest may put behind it");
                let mut wanted = frame[..ETHERNET + 28].to_vec();
                let target = if op == 1 { [0; 6] } else { frame[..6].try_into().unwrap() };
                wanted[ETHERNET + 18..ETHERNET + 24].copy_from_slice(&target);
                let sent = m.send(&frame);
                assert_eq!((sent.passed, sent.mark, sent.frame), (true, 0, wanted), "{op}");
            }
        }
        // ARP packets from another link-layer address, with another operation, and cut short.
        let mut foreign = arp(true, 1, PEER, b"");
        foreign[11] ^= 1;
        for frame in
            [&foreign, &arp(true, 3, PEER, b"secret"), &arp(true, 1, PEER, b"")[..40].to_vec()]
        {
            assert!(!m.send(frame).passed);
        }
    }
}

/// A message of neighbour discovery from the guest's own link-layer address.
fn discovery(to: &str, kind: u8, about: &str, option: Option<u8>) -> Vec<u8> {
    let mut message = vec![kind, 0, 0, 0, 0, 0, 0, 0];
    if kind != 133 {
        message.extend(address(about));
    }
    if let Some(option) = option {
        message.extend([option, 1, 2, 0, 0, 0, 0, 1]);
    }
    let mut frame = ip6(OWN6, to, 58, &message);
    frame[ETHERNET..ETHERNET + 4].copy_from_slice(&[0x60, 0, 0, 0]);
    frame[ETHERNET + 7] = 255;
    if address(to)[0] == 0xff {
        frame[0] = 0x33;
    }
    let own_link = frame[6..12].to_vec();
    if option.is_some() {
        let at = frame.len() - 6;
        frame[at..].copy_from_slice(&own_link);
    }
    frame
}

#[test]
fn neighbour_discovery_says_only_what_it_must_and_nothing_to_others_while_the_gate_is_shut() {
    for is_bridged in [true, false] {
        let Some(m) = load(&Settings { is_bridged, ..settings(vector(3)) }) else { return };
        let passes = |frame: &[u8]| {
            let sent = m.send(frame);
            assert!(sent.passed && sent.frame == frame, "left to the queue as it is");
            sent.mark == m.tags.pass_mark()
        };
        let [known, to_all, near, far] = [
            discovery(PEER6, 136, OWN6, Some(2)),
            discovery("ff02::1", 136, OWN6, Some(2)),
            discovery("ff02::1:ff00:9", 135, STRANGER6, Some(1)),
            discovery(STRANGER6, 136, OWN6, None),
        ];
        assert_eq!(passes(&known), is_bridged, "a member is known");
        assert_eq!(
            [&to_all, &near, &far].map(|frame| passes(frame)),
            [!is_bridged, !is_bridged, false]
        );
        m.open();
        assert_eq!([&known, &to_all, &near].map(|frame| passes(frame)), [is_bridged, true, true]);
        assert_eq!(passes(&far), is_bridged, "a router would send it on");
        assert!(passes(&discovery("ff02::2", 133, "::", Some(1))));
        // A message with more than the least content is judged like any other packet, and P is not covered here.
        m.pend(&[1, 2, 3]);
        let more = discovery("ff02::1", 135, STRANGER6, Some(14));
        let mut label = near.clone();
        label[ETHERNET + 3] = 9;
        let mut hops = near.clone();
        hops[ETHERNET + 7] = 254;
        let mut reserved = near.clone();
        reserved[ETHERNET + 46] = 1;
        let mut link = near.clone();
        *link.last_mut().unwrap() ^= 1;
        let router = discovery("ff02::1", 134, STRANGER6, None);
        for frame in [more, label, hops, reserved, link, router, [&near[..], b"more"].concat()] {
            assert!(!passes(&frame), "{frame:?}");
        }
    }
}

#[test]
fn what_a_bridge_would_take_for_itself_is_dropped() {
    for is_bridged in [true, false] {
        let Some(m) = load(&Settings { is_bridged, ..settings(vector(3)) }) else { return };
        for last in [0, 0x0e, 0x0f, 0x10] {
            let mut frame = ip4(OWN, STRANGER, UDP, &[], b"x");
            frame[..6].copy_from_slice(&[1, 0x80, 0xc2, 0, 0, last]);
            assert_eq!(m.send(&frame).passed, !is_bridged || last == 0x10);
        }
    }
}

#[test]
fn to_the_guest_arp_and_neighbour_discovery_are_left_alone() {
    let Some(m) = load(&settings(vector(3))) else { return };
    for frame in [discovery(OWN6, 135, OWN6, Some(1)), arp(true, 1, OWN, b"filling")] {
        assert_eq!(m.receive(&frame), Tried { passed: true, mark: 0, frame: frame.clone() });
    }
    assert_eq!(m.tags.stats().unwrap(), Default::default());
}
