//! Packets of the guest to other members: tagged, or left to the queue.

use crate::frames::*;
use crate::member::*;
use std::sync::atomic::Ordering::SeqCst;
use tidelock_protocol::hlc::Hlc;
use tidelock_protocol::tag::{Codec, Form, IPV4_OPTION, Stamp};
use tidelock_tagging::{Direction, MemberTags, Settings, Tried};

#[test]
fn to_a_member_the_tag_is_what_the_codec_writes() {
    for (form, seqs) in [
        (vector(3), &[5, 0x1_0000_0007, u64::from(u32::MAX)][..]),
        (vector(1), &[1][..]),
        (vector(7), &[1, 2, 3, 4, 5, 6, 7][..]),
    ] {
        let Some(m) = load(&settings(form)) else { return };
        m.pend(seqs);
        let frame = ip4(OWN, PEER, UDP, &[], b"hello");
        let sent = m.send(&frame);
        m.is_passed(&sent, "tagged");
        assert_eq!(options_of(&sent.frame), m.own4(&stamp(seqs)));
        let end = sent.frame.len();
        assert_eq!(&sent.frame[end - 5..], b"hello");

        // And back again: another member's program merges it and gives the guest its packet.
        let Some(other) = load(&settings(form)) else { return };
        other.commit(seqs);
        let flipped = ip4(PEER, OWN, UDP, &m.tag4(&stamp(seqs)), b"hello");
        let received = other.receive(&flipped);
        assert!(received.passed);
        assert_eq!(received.frame, ip4(PEER, OWN, UDP, &[], b"hello"));
        assert_eq!(other.counted("merged"), 1);
        for (entry, seq) in other.tags.pending().entries.iter().zip(seqs) {
            assert_eq!(entry.load(SeqCst), *seq);
        }
    }
}

/// To a member, some with and some without room for a tag.
fn with_and_without_room() -> Vec<Vec<u8>> {
    let full = vec![7; MTU as usize - 28];
    vec![
        ip4(OWN, PEER, UDP, &[], b"hello"),
        ip4(OWN, PEER, UDP, &[1; 40], b"no room for a tag"),
        ip4(OWN, PEER, UDP, &[], &full),
        ip4_fragment(OWN, PEER, UDP, &[], b"the second of two", 64),
        ip6(OWN6, PEER6, UDP, b"hello"),
        ip6(OWN6, PEER6, UDP, &full[20..]),
    ]
}

/// Its receiver could come to depend on nothing that is not committed.
#[test]
fn what_is_covered_goes_to_a_member_without_a_tag() {
    for (form, strips) in
        [(vector(3), false), (vector(3), true), (vector(0), false), (Form::Hlc, false)]
    {
        let settings = Settings { path_strips_options: strips, ..settings(form) };
        let Some(m) = load(&settings) else { return };
        let raise = |by: u64| match form {
            Form::Hlc => m.tags.pending().hlc.store(70 + by, SeqCst),
            Form::Vector { .. } => m.pend(&[5, 9, (1 << 40) + by]),
        };
        m.group.committed().watermark.store(70, SeqCst);
        m.commit(&[7, 9, 1 << 40]);
        // Neither a lease nor that C is recent: what is committed stays so.
        m.group.committed().trusted_until.store(0, SeqCst);
        let frames = with_and_without_room();
        raise(0);
        for (nth, frame) in (1..).zip(&frames) {
            let sent = m.send(frame);
            assert!(sent.passed && sent.mark & MARK_MASK != 0, "{:?}", m.tags.stats());
            assert_eq!(&sent.frame, frame);
            assert_eq!(m.counted("untagged_covered"), nth);
        }
        // A packet waits while P is incomplete, and while P is above C.
        m.tags.pending().incomplete.store(1, SeqCst);
        m.is_left(&m.send(&frames[0]), &frames[0], "gated_incomplete");
        m.tags.pending().incomplete.store(0, SeqCst);
        if form != vector(0) {
            raise(1);
            let why = if strips { "gated_path" } else { "gated_untrusted" };
            m.is_left(&m.send(&frames[0]), &frames[0], why);
        }
        assert_eq!((m.counted("tagged"), m.counted("untagged_covered")), (0, 6));
    }
}

/// A packet to a member on this host raises that member's P and is delivered unchanged.
#[test]
fn to_a_member_on_this_host_p_goes_without_a_tag() {
    for (form, own, theirs, after) in [
        (vector(3), &[5, 9, 1 << 40][..], &[7, 0, 4][..], &[7, 9, 1 << 40][..]),
        (vector(1), &[3], &[8], &[8]),
        (vector(0), &[], &[], &[]),
        (Form::Hlc, &[70], &[50], &[70]),
        (Form::Hlc, &[70], &[71], &[71]),
    ] {
        for strips in [false, true] {
            let settings = Settings { path_strips_options: strips, ..settings(form) };
            let Some(m) = load(&settings) else { return };
            let peer = load_peer(&settings, &m.group);
            // That others are here needs no C, and no trust in what came over a wire.
            m.group.committed().trusted_until.store(0, SeqCst);
            let store = |member: &MemberTags, values: &[u64]| {
                let cells = member.pending();
                match form {
                    Form::Hlc => cells.hlc.store(values[0], SeqCst),
                    Form::Vector { .. } => {
                        (cells.entries.iter().zip(values)).for_each(|(e, v)| e.store(*v, SeqCst));
                    }
                }
            };
            let is = |member: &MemberTags, values: &[u64]| {
                let cells = member.pending();
                match form {
                    Form::Hlc => assert_eq!(cells.hlc.load(SeqCst), values[0]),
                    Form::Vector { .. } => {
                        for (n, entry) in cells.entries.iter().enumerate() {
                            assert_eq!(entry.load(SeqCst), values.get(n).copied().unwrap_or(0));
                        }
                    }
                }
            };
            peer.join(&m.group).unwrap();
            let mut frames = with_and_without_room();
            frames.extend([
                ip4(OWN, PEER, TCP, &[], &segment(SYN, &[2, 4, 5, 0xb4], b"")),
                ip6(OWN6, PEER6, TCP, &segment(SYN, &[2, 4, 5, 0xb4], b"")),
            ]);
            for (nth, frame) in (1..).zip(&frames) {
                store(&m.tags, own);
                store(&peer, theirs);
                let sent = m.send(frame);
                assert!(sent.passed && sent.mark & MARK_MASK != 0, "{:?}", m.tags.stats());
                assert_eq!(&sent.frame, frame);
                assert_eq!(m.counted("merged_here"), nth);
                is(&peer, after);
                is(&m.tags, own);
            }
        }
    }
}

#[test]
fn a_member_on_this_host_is_told_nothing_that_a_tag_would_not_say() {
    let Some(m) = load(&settings(vector(3))) else { return };
    let peer = load_peer(&settings(vector(3)), &m.group);
    peer.join(&m.group).unwrap();
    let learnt = || peer.pending().entries[1].load(SeqCst);
    m.pend(&[0, 6, 0]);

    let ack = ip4(OWN, PEER, TCP, &[], &segment(ACK, &[], b""));
    m.is_passed(&m.send(&ack), "untagged_acks");
    let strangers = ip4(STRANGER, PEER, UDP, &[], b"x");
    m.is_left(&m.send(&strangers), &strangers, "left_to_queue");
    let own_tag = ip4(OWN, PEER, UDP, &m.tag4(&stamp(&[0, 9, 0])), b"x");
    m.is_dropped(&m.send(&own_tag), "dropped_guests_own");
    assert_eq!(learnt(), 0);

    // A packet waits while P is incomplete.
    let frame = ip4(OWN, PEER, UDP, &[], b"x");
    m.tags.pending().incomplete.store(1, SeqCst);
    m.is_left(&m.send(&frame), &frame, "gated_incomplete");
    assert_eq!(learnt(), 0);
    m.tags.pending().incomplete.store(0, SeqCst);

    // A member of that address which was loaded later takes its place.
    let anew = load_peer(&settings(vector(3)), &m.group);
    anew.join(&m.group).unwrap();
    m.is_passed(&m.send(&frame), "merged_here");
    assert_eq!((learnt(), anew.pending().entries[1].load(SeqCst)), (0, 6));
    m.pend(&[0, 7, 0]);

    // Nor one that a daemon which takes over has guarded since, and that may read in another form.
    let Some(next) = load(&settings(vector(3))) else { return };
    anew.pending().run.store(next.tags.pending().run.load(SeqCst), SeqCst);
    m.is_passed(&m.send(&frame), "tagged");
    assert_eq!(anew.pending().entries[1].load(SeqCst), 6);

    let off = Settings { off_for_a_demonstration: true, ..settings(vector(3)) };
    let Some(m) = load(&off) else { return };
    anew.join(&m.group).unwrap();
    m.pend(&[0, 8, 0]);
    m.is_passed(&m.send(&frame), "untagged_for_a_demonstration");
    assert_eq!(anew.pending().entries[1].load(SeqCst), 6);
}

#[test]
fn what_is_sent_is_never_older_than_c() {
    let Some(m) = load(&settings(vector(3))) else { return };
    m.pend(&[3, 9, 0]);
    m.commit(&[7, 4, 1 << 33]);
    let sent = m.send(&ip4(OWN, PEER, UDP, &[], b"x"));
    assert_eq!(options_of(&sent.frame), m.own4(&stamp(&[7, 9, 1 << 33])));
}

#[test]
fn a_syn_announces_segments_that_leave_room() {
    let Some(m) = load(&settings(vector(3))) else { return };
    m.pend(&[0, 4, 0]);
    let mss = |mss: u16| {
        let [high, low] = mss.to_be_bytes();
        let tcp = segment(SYN, &[1, 1, 1, 1, 2, 4, high, low], b"");
        let sent = m.send(&ip4(OWN, PEER, TCP, &[], &summed(OWN, PEER, tcp)));
        let tcp = &sent.frame[ETHERNET + 20 + m.codec.ipv4_bytes()..];
        assert_eq!(tcp_sum(OWN, PEER, tcp), 0xffff, "TCP checksum");
        u16::from_be_bytes([tcp[26], tcp[27]])
    };
    assert_eq!(mss(1460), 1460 - 24);
    assert_eq!(mss(1436), 1436);
    assert_eq!(mss(536), 536);
    assert_eq!(m.counted("mss_lowered"), 1);
    // Also that of a packet which needs none: later ones of the connection may.
    m.commit(&[0, 4, 0]);
    let tcp = segment(SYN, &[1, 1, 1, 1, 2, 4, 0x05, 0xb4], b"");
    let sent = m.send(&ip4(OWN, PEER, TCP, &[], &summed(OWN, PEER, tcp)));
    m.is_passed(&sent, "untagged_covered");
    assert_eq!(sent.frame[ETHERNET + 20 + 26..][..2], (1460u16 - 24).to_be_bytes());
    let body = segment(SYN, &[2, 4, 5, 0xa0], b"");
    let sent = m.send(&ip6(OWN6, PEER6, TCP, &body));
    let end = sent.frame.len();
    assert_eq!(&sent.frame[end - 2..], (1500u16 - 60 - 32).to_be_bytes());
    // A header that ends behind the packet has no options that could be read.
    let mut cut = segment(SYN, &[2, 4, 5, 0xb4, 0, 0, 0, 0], b"");
    cut[12] += 1 << 4;
    let frame = ip6(OWN6, PEER6, TCP, &cut);
    assert!(m.send(&frame).frame.ends_with(&frame[ETHERNET + 40..]));
}

#[test]
fn what_cannot_be_tagged_is_left_to_the_queue() {
    let Some(m) = load(&settings(vector(3))) else { return };
    m.pend(&[0, 4, 0]);
    let full = vec![0; MTU as usize - 20 - 23];
    let frame = ip4(OWN, PEER, UDP, &[], &full);
    m.is_left(&m.send(&frame), &frame, "gated_mtu");
    let fits = ip4(OWN, PEER, UDP, &[], &full[1..]);
    m.is_passed(&m.send(&fits), "tagged");
    let frame = ip4_fragment(OWN, PEER, UDP, &[], &full, 0x2000);
    m.is_left(&m.send(&frame), &frame, "gated_fragment");
    let frame = ip4(OWN, PEER, UDP, &[1; 28], b"x");
    m.is_left(&m.send(&frame), &frame, "gated_no_room");
    for (nth, broken) in [&[7u8, 0, 0, 0], &[7, 9, 0, 0], &[1, 1, 1, 7]].into_iter().enumerate() {
        let frame = ip4(OWN, PEER, UDP, broken, b"x");
        let sent = m.send(&frame);
        assert_eq!((sent.mark & MARK_MASK, sent.frame), (0, frame));
        assert_eq!(m.counted("gated_unreadable"), nth as u64 + 1);
    }
    let mut short = ip4(OWN, PEER, UDP, &[], b"x");
    short[ETHERNET + 3] = 200;
    assert_eq!(m.send(&short).mark & MARK_MASK, 0, "shorter than it says");
    // To a member by way of somebody else.
    let frame = ip4(OWN, PEER, UDP, &[131, 7, 4, 10, 0, 0, 9, 0], b"x");
    assert_eq!(m.send(&frame), Tried { passed: true, mark: 0, frame: frame.clone() });
    let frame = ip6(OWN6, PEER6, 43, &[&[UDP, 0, 4, 1, 0, 0, 0, 0], &b"12345678"[..]].concat());
    assert_eq!(m.send(&frame), Tried { passed: true, mark: 0, frame: frame.clone() });
    // Without the type of a GSO packet, the kernel makes no room in one: gated, not lost.
    let frame = ip4(OWN, PEER, UDP, &[], &[0; 2000]);
    let sent = m.tags.try_frame(Direction::FromGuest, &frame, 1000).unwrap();
    m.is_left(&sent, &frame, "gated_refused");

    let Some(m) = load(&Settings { path_strips_options: true, ..settings(vector(3)) }) else {
        return;
    };
    m.pend(&[0, 4, 0]);
    let frame = ip4(OWN, PEER, UDP, &[], b"x");
    m.is_left(&m.send(&frame), &frame, "gated_path");
}

/// How long the segments of a tunnel will be its outer headers do not say.
#[test]
fn gso_packets_of_a_tunnel_are_gated() {
    const IPIP: u8 = 4;
    const IPV6: u8 = 41;
    const GRE: u8 = 47;
    let Some(m) = load(&settings(vector(3))) else { return };
    m.pend(&[0, 4, 0]);
    let protocols = [IPIP, IPV6, GRE];
    let frames = protocols
        .map(|protocol| ip4(OWN, PEER, protocol, &[], &[0; 2000]))
        .into_iter()
        .chain(protocols.map(|protocol| ip6(OWN6, PEER6, protocol, &[0; 2000])));
    for (nth, frame) in (1..).zip(frames) {
        let sent = m.tags.try_frame(Direction::FromGuest, &frame, 1000).unwrap();
        assert_eq!(sent, Tried { passed: true, mark: 0, frame });
        assert_eq!(m.counted("gated_mtu"), nth);
    }
    // One that is not cut has the length that it has.
    m.is_passed(&m.send(&ip4(OWN, PEER, GRE, &[], b"whole")), "tagged");
}

#[test]
fn a_guests_own_options_stay_behind_ours_and_come_out_alone() {
    let Some(m) = load(&settings(vector(3))) else { return };
    m.pend(&[0, 4, 0]);
    let alert = [148, 4, 0, 0];
    let sent = m.send(&ip4(OWN, PEER, UDP, &alert, b"x"));
    m.is_passed(&sent, "tagged");
    assert_eq!(options_of(&sent.frame), [&m.own4(&stamp(&[0, 4, 0]))[..], &alert].concat());
    let from_peer = [&m.tag4(&stamp(&[0, 4, 0]))[..], &alert].concat();
    let received = m.receive(&ip4(PEER, OWN, UDP, &from_peer, b"x"));
    assert_eq!(received.frame, ip4(PEER, OWN, UDP, &alert, b"x"));
}

#[test]
fn a_guest_that_sends_a_tag_itself_is_not_heard() {
    let Some(m) = load(&settings(vector(3))) else { return };
    let tag = m.tag4(&stamp(&[1, 2, 3]));
    for to in [PEER, STRANGER] {
        assert!(!m.send(&ip4(OWN, to, UDP, &tag, b"x")).passed);
    }
    assert!(!m.send(&ip4(OWN, PEER, UDP, &[1, 1, 158, 2], b"x")).passed);
    let six = m.tag6(UDP, &stamp(&[1, 2, 3]));
    assert!(!m.send(&ip6(OWN6, PEER6, 60, &[&six[..], b"x"].concat())).passed);
    assert_eq!(m.counted("dropped_guests_own"), 4);
}

#[test]
fn from_an_address_that_is_not_the_members_a_packet_goes_the_way_to_outside() {
    let Some(m) = load(&settings(vector(3))) else { return };
    let frame = ip4(STRANGER, PEER, UDP, &[], b"x");
    m.is_left(&m.send(&frame), &frame, "left_to_queue");
    let frame = ip6(STRANGER6, PEER6, UDP, b"12345678");
    assert_eq!(m.send(&frame).mark & MARK_MASK, 0);
}

/// `group.tag.option`: whatever number it is, no other one is ours.
#[test]
fn another_number_of_the_option_is_written_found_and_taken_out() {
    for number in [222, 128, 255, 159] {
        for form in [vector(3), Form::Hlc] {
            let own_number = Settings { ipv4_option: number, ..settings(form) };
            let Some(m) = load(&own_number) else { return };
            m.pend(&[4, 5, 6]);
            m.tags.pending().hlc.store(7, SeqCst);
            let said = if form == Form::Hlc { Stamp::Hlc(Hlc(7)) } else { stamp(&[4, 5, 6]) };
            let (mut tag, mut own) = (vec![], vec![]);
            m.sealing(PEER, OWN).encode_ipv4(number, &said, &mut tag);
            m.sealing(OWN, PEER).encode_ipv4(number, &said, &mut own);
            let sent = m.send(&ip4(OWN, PEER, UDP, &[], b"x"));
            m.is_passed(&sent, "tagged");
            assert_eq!(options_of(&sent.frame), own);

            let Some(other) = load(&own_number) else { return };
            let received = other.receive(&ip4(PEER, OWN, UDP, &tag, b"x"));
            assert_eq!(received.frame, ip4(PEER, OWN, UDP, &[], b"x"));
            assert_eq!(other.counted("merged"), 1);
            let known = (other.pending(), other.tags.pending().hlc.load(SeqCst));
            assert_eq!(known, if form == Form::Hlc { (vec![0; 3], 7) } else { (vec![4, 5, 6], 0) });
            let received = other.receive(&ip4(
                STRANGER,
                OWN,
                UDP,
                &[&tag[..], &[148, 4, 0, 0]].concat(),
                b"x",
            ));
            assert_eq!(received.frame, ip4(STRANGER, OWN, UDP, &[148, 4, 0, 0], b"x"));
            assert!(!m.send(&ip4(OWN, PEER, UDP, &[number, 4, 0, 0], b"x")).passed);

            // The usual one is somebody else's now.
            let usual = ip4(PEER, OWN, UDP, &[IPV4_OPTION, 4, 9, 9], b"x");
            assert_eq!(m.receive(&usual).frame, usual);
            // But what a member's host writes that has not heard of the change is not lost without a word.
            for late in [vector(1), vector(3), vector(7), Form::Hlc] {
                let said = if late == Form::Hlc { Stamp::Hlc(Hlc(7)) } else { stamp(&[4, 5, 6]) };
                let mut tag = vec![];
                Codec::new(late, "shop", ["db"]).encode_ipv4(IPV4_OPTION, &said, &mut tag);
                let dropped = m.counted("dropped_malformed");
                assert!(!m.receive(&ip4(PEER, OWN, UDP, &tag, b"x")).passed);
                assert_eq!(m.counted("dropped_malformed"), dropped + 1);
                let strangers = ip4(STRANGER, OWN, UDP, &tag, b"x");
                assert_eq!(m.receive(&strangers).frame, strangers);
            }
            let sent = m.send(&ip4(OWN, PEER, UDP, &[IPV4_OPTION, 4, 9, 9], b"x"));
            assert_eq!(options_of(&sent.frame), [&own[..], &[IPV4_OPTION, 4, 9, 9]].concat());
        }
    }
}

#[test]
fn switched_off_for_a_demonstration_nothing_is_tagged_or_merged() {
    let off = Settings { off_for_a_demonstration: true, ..settings(vector(3)) };
    let Some(m) = load(&off) else { return };
    m.pend(&[1, 2, 3]);
    let frame = ip4(OWN, PEER, UDP, &[], b"x");
    let sent = m.send(&frame);
    m.is_passed(&sent, "untagged_for_a_demonstration");
    assert_eq!(sent.frame, frame);
    let tag = m.tag4(&stamp(&[9, 9, 9]));
    let received = m.receive(&ip4(PEER, OWN, UDP, &tag, b"x"));
    assert_eq!(received.frame, ip4(PEER, OWN, UDP, &[], b"x"));
    assert_eq!(m.pending(), [1, 2, 3]);
}
