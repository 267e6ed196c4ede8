//! Packets to the guest: which tags are believed, and what is merged.

use crate::frames::*;
use crate::member::*;
use std::sync::atomic::Ordering::SeqCst;
use tidelock_protocol::hlc::Hlc;
use tidelock_protocol::ids::{Epoch, Seq, WriterId};
use tidelock_protocol::tag::{
    Codec, Form, IPV4_OPTION, KEY_PERIOD_MS, Stamp, TagKey, TagKeys, TagTerms,
};

#[test]
fn entries_are_rebuilt_around_what_is_known_here_and_only_rise() {
    let Some(m) = load(&settings(vector(3))) else { return };
    let far = 5 << 32;
    m.pend(&[far + 10, 0, 77]);
    m.commit(&[0, far - 3, 0]);
    let tag = m.tag4(&stamp(&[far + 4, far + 2, 78]));
    assert!(m.receive(&ip4(PEER, OWN, UDP, &tag, b"x")).passed);
    assert_eq!(m.pending(), [far + 10, far + 2, 78]);
    // An entry below 0 is nobody's.
    let tag = m.tag4(&stamp(&[far, far, u64::from(u32::MAX)]));
    m.is_dropped(&m.receive(&ip4(PEER, OWN, UDP, &tag, b"x")), "dropped_malformed");
}

#[test]
fn hlc_tags_carry_the_time_and_one_too_far_ahead_is_dropped() {
    let Some(m) = load(&settings(Form::Hlc)) else { return };
    m.group.committed().wall_minus_boot.store(1_000_000_000_000_000, SeqCst);
    let wall_ms = 1_000_000_000 + boot_ms();
    let now = Hlc::new(wall_ms, 7);
    m.tags.pending().hlc.store(now.0, SeqCst);
    let sent = m.send(&ip4(OWN, PEER, UDP, &[], b"x"));
    assert_eq!(options_of(&sent.frame), m.own4(&Stamp::Hlc(now)));

    let from_peer = |hlc| ip4(PEER, OWN, UDP, &m.tag4(&Stamp::Hlc(hlc)), b"x");
    let ahead = Hlc::new(wall_ms + 900, 3);
    assert!(m.receive(&from_peer(ahead)).passed);
    assert_eq!(m.tags.pending().hlc.load(SeqCst), ahead.0);
    assert!(m.receive(&from_peer(now)).passed);
    assert_eq!(m.tags.pending().hlc.load(SeqCst), ahead.0, "a time never falls");
    let jumped = Hlc::new(wall_ms + 3_600_000, 0);
    m.is_dropped(&m.receive(&from_peer(jumped)), "dropped_ahead");
    assert_eq!(m.tags.pending().hlc.load(SeqCst), ahead.0);

    // All writers have passed it: it is this clock that is behind.
    m.group.committed().watermark.store(Hlc::new(wall_ms + 3_599_500, 0).0, SeqCst);
    assert!(m.receive(&from_peer(jumped)).passed);
    assert_eq!(m.tags.pending().hlc.load(SeqCst), jumped.0);
}

#[test]
fn tags_of_strangers_are_stripped_wherever_they_are_and_never_merged() {
    let Some(m) = load(&settings(vector(3))) else { return };
    let tag = m.tag4(&stamp(&[1, 2, 3]));
    let plain = ip4(STRANGER, OWN, UDP, &[], b"x");
    assert_eq!(m.receive(&ip4(STRANGER, OWN, UDP, &tag, b"x")).frame, plain);
    assert_eq!(m.receive(&ip4(STRANGER, OWN, UDP, &[158, 4, 9, 9], b"x")).frame, plain);
    for (options, left) in [
        (&[1u8, 158, 3, 0][..], &[1u8, 1, 1, 1][..]),
        (&[158, 2, 158, 2], &[1, 1, 1, 1]),
        (&[148, 4, 0, 0, 158, 4, 1, 2], &[148, 4, 0, 0, 1, 1, 1, 1]),
        (&[158, 3, 7, 158, 4, 1, 2, 0], &[1, 1, 1, 1, 1, 1, 1, 0]),
    ] {
        let received = m.receive(&ip4(STRANGER, OWN, UDP, options, b"x"));
        assert_eq!(options_of(&received.frame), left);
    }
    assert_eq!(m.counted("stripped_foreign"), 6);
    assert_eq!(m.pending(), [0, 0, 0]);
}

#[test]
fn a_wrong_tag_from_a_member_is_dropped() {
    let Some(m) = load(&settings(vector(3))) else { return };
    let tag = m.tag4(&stamp(&[1, 2, 3]));
    let mut dropped = 0;
    let mut wrong = |options: &[u8], why: &str| {
        assert!(!m.receive(&ip4(PEER, OWN, UDP, options, b"x")).passed, "{why}");
        dropped += 1;
        assert_eq!(m.counted("dropped_malformed"), dropped, "{why}");
    };
    for at in 2..tag.len() {
        let mut damaged = tag.clone();
        damaged[at] ^= 0x40;
        wrong(&damaged, "damage");
    }
    wrong(&[&tag[..], &[158, 4, 0, 0]].concat(), "twice");
    wrong(&[&[1, 1, 1, 1], &tag[..]].concat(), "not the first");
    wrong(&[158, 4, 0x11, 0], "too short");
    wrong(&[158, 2, 1, 1], "empty");
    let other = Codec::new(vector(3), "shop", ["web", "db", "files"]);
    let mut option = vec![];
    other.encode_ipv4(IPV4_OPTION, &stamp(&[1, 2, 3]), &mut option);
    wrong(&option, "other writers");
    let hlc = Codec::new(Form::Hlc, "shop", ["db", "web", "files"]);
    let mut option = vec![];
    hlc.encode_ipv4(IPV4_OPTION, &Stamp::Hlc(Hlc(7)), &mut option);
    wrong(&option, "another form");
    for unreadable in [&[158u8, 0, 0, 0], &[158, 5, 0, 0], &[1, 1, 1, 158]] {
        assert!(!m.receive(&ip4(PEER, OWN, UDP, unreadable, b"x")).passed);
        assert!(!m.receive(&ip4(STRANGER, OWN, UDP, unreadable, b"x")).passed);
    }
    assert_eq!(m.counted("dropped_unreadable"), 6);
    assert_eq!(m.pending(), [0, 0, 0], "nothing was merged");
}

#[test]
fn a_tag_is_believed_only_with_the_seal_of_the_groups_key_for_its_packets_addresses() {
    for form in [vector(3), vector(2), Form::Hlc] {
        let Some(m) = load(&settings(form)) else { return };
        let said = if form == Form::Hlc { Stamp::Hlc(Hlc(7)) } else { stamp(&[9, 9, 9]) };
        let six = |codec: Codec| {
            let mut header = vec![];
            codec.encode_ipv6(UDP, &said, &mut header);
            m.receive(&ip6(PEER6, OWN6, 60, &[&header[..], b"12345678"].concat())).passed
        };
        let four = |codec: Codec| {
            let mut option = vec![];
            codec.encode_ipv4(IPV4_OPTION, &said, &mut option);
            m.receive(&ip4(PEER, OWN, UDP, &option, b"x")).passed
        };
        let [own, peer] = [address(OWN6), address(PEER6)];
        let other = |key| TagKey(key);
        assert!(!four(m.codec) && !six(m.codec), "nobody's");
        assert!(!four(m.sealing(OWN, PEER)) && !six(m.sealing(own, peer)), "sent back");
        assert!(!four(m.sealing(PEER, STRANGER)) && !six(m.sealing(peer, address(STRANGER6))));
        for key in [other([3, 5]), other([2, 4]), other([0, 0])] {
            assert!(!four(m.codec.sealing(TagKeys::only(key), PEER.into(), OWN.into())));
            assert!(!six(m.codec.sealing(TagKeys::only(key), peer.into(), own.into())));
        }
        assert_eq!(m.pending(), [0, 0, 0]);
        assert_eq!(m.tags.pending().hlc.load(SeqCst), 0);
        assert!(four(m.sealing(PEER, OWN)) && six(m.sealing(peer, own)));
        // Before the backup has told the key, nothing is believed and nothing is tagged.
        let unknown = TagKeys::only(other([0, 0]));
        m.group.committed().set_tag_terms(&terms(unknown));
        assert!(!four(m.codec.sealing(unknown, PEER.into(), OWN.into())));
        m.pend(&[1 << 20, 0, 0]);
        m.tags.pending().hlc.store(1 << 40, SeqCst);
        let frame = ip4(OWN, PEER, UDP, &[], b"x");
        assert_eq!(m.send(&frame).frame, frame);
        assert_eq!(m.counted("gated_untrusted"), 1);
    }
}

/// A host outside, or a guest behind another interface, can forge a member's source address.
#[test]
fn a_tag_is_believed_only_from_where_that_member_sends() {
    let settings = settings(vector(3));
    let Some(m) = load(&settings) else { return };
    let tag = m.tag4(&stamp(&[9, 9, 9]));
    let six = m.tag6(UDP, &stamp(&[9, 9, 9]));
    let frames = [
        ip4(PEER, OWN, UDP, &tag, b"12345678"),
        ip6(PEER6, OWN6, 60, &[&six[..], b"12345678"].concat()),
    ];
    for (nth, frame) in (1..).zip(&frames) {
        m.is_dropped_times(&m.receive_by(ELSEWHERE, frame), "dropped_wrong_way", nth);
        assert_eq!(m.pending(), [0, 0, 0]);
    }
    for frame in &frames {
        assert!(m.receive_by(HERE, frame).passed);
    }
    assert_eq!(m.pending(), [9, 9, 9]);
    // One on another host sends by none of the interfaces of this one's members.
    let Some(m) = load_with(&settings, false) else { return };
    for (nth, frame) in (1..).zip(&frames) {
        m.is_dropped_times(&m.receive_by(HERE, frame), "dropped_wrong_way", nth);
        assert_eq!(m.pending(), [0, 0, 0]);
    }
    for frame in &frames {
        assert!(m.receive_by(ELSEWHERE, frame).passed);
    }
    assert_eq!(m.pending(), [9, 9, 9]);
    // Without a tag nobody is asked where it comes from.
    assert!(m.receive_by(HERE, &ip4(PEER, OWN, UDP, &[], b"x")).passed);
}

/// Which of two hosts hears of a new period first is not known, and packets are under way meanwhile.
#[test]
fn a_key_gives_way_to_the_next_one_and_no_packet_under_way_is_lost() {
    for form in [vector(3), Form::Hlc] {
        let Some(m) = load(&settings(form)) else { return };
        let said = if form == Form::Hlc { Stamp::Hlc(Hlc(7)) } else { stamp(&[9, 9, 9]) };
        let at = |day| TagKeys::at(TagKey([7, 8]), Epoch(1), day * KEY_PERIOD_MS);
        let is_believed = |keys| {
            let codec = m.codec.sealing(keys, PEER.into(), OWN.into());
            let mut option = vec![];
            codec.encode_ipv4(IPV4_OPTION, &said, &mut option);
            m.receive(&ip4(PEER, OWN, UDP, &option, b"x")).passed
        };
        m.pend(&[9, 9, 9]);
        m.tags.pending().hlc.store(9, SeqCst);
        // Through all places of keys, and back as after a clock that was put right.
        for day in [20_000, 20_001, 20_002, 20_003, 20_004, 20_005, 20_004, 20_003] {
            m.group.committed().set_tag_terms(&terms(at(day)));
            let expected = [false, true, true, true, false];
            let days = [day - 2, day - 1, day, day + 1, day + 2];
            assert_eq!(days.map(|of| is_believed(at(of))), expected, "{day}");
            assert!(!is_believed(TagKeys::only(TagKey([0, 0]))));
            let sent = m.send(&ip4(OWN, PEER, UDP, &[], b"x"));
            let mut option = vec![];
            let codec = m.codec.sealing(at(day), OWN.into(), PEER.into());
            let own = if form == Form::Hlc { Stamp::Hlc(Hlc(9)) } else { stamp(&[9, 9, 9]) };
            codec.encode_ipv4(IPV4_OPTION, &own, &mut option);
            assert_eq!(options_of(&sent.frame), option, "{day}");
        }
    }
}

/// Not even with the group's key: a host of the group may lie. Nor does it send what others would not believe.
#[test]
fn an_entry_that_no_writer_can_have_never_enters_p() {
    let Some(m) = load(&settings(vector(3))) else { return };
    let reaches = |seqs: &[u64]| {
        let reachable = (0..).map(WriterId).zip(seqs.iter().map(|seq| Seq(*seq))).collect();
        let keys = TagKeys::only(KEY);
        m.group.committed().set_tag_terms(&TagTerms { keys, reachable });
    };
    let says = |seqs: &[u64]| m.receive(&ip4(PEER, OWN, UDP, &m.tag4(&stamp(seqs)), b"x"));
    let says6 = |seqs: &[u64]| {
        let header = m.tag6(UDP, &stamp(seqs));
        m.receive(&ip6(PEER6, OWN6, 60, &[&header[..], b"12345678"].concat()))
    };
    reaches(&[100, 100, u64::MAX]);
    m.commit(&[1, 200, u64::MAX]);
    assert!(says(&[100, 200, u64::MAX]).passed && says6(&[100, 200, u64::MAX]).passed);
    assert_eq!(m.pending(), [100, 200, u64::MAX]);
    m.is_dropped_times(&says(&[101, 200, u64::MAX]), "dropped_malformed", 1);
    m.is_dropped_times(&says6(&[101, 200, u64::MAX]), "dropped_malformed", 2);
    m.is_dropped_times(&says(&[100, 201, u64::MAX]), "dropped_malformed", 3);
    m.is_dropped_times(&says(&[1 << 30, 200, u64::MAX]), "dropped_malformed", 4);
    assert_eq!(m.pending(), [100, 200, u64::MAX]);
    // Members that have not heard yet that the third writer was removed, one of them after more than 2^31 writes.
    for before in [500, (1 << 32) - 87] {
        assert!(says(&[100, 200, before]).passed && says6(&[100, 200, before]).passed);
        assert_eq!(m.pending(), [100, 200, u64::MAX]);
    }
    // Once it was believed, it is not asked for again.
    reaches(&[90, 100, u64::MAX]);
    assert!(says(&[100, 200, u64::MAX]).passed);

    let frame = ip4(OWN, PEER, UDP, &[], b"x");
    assert_eq!(m.send(&frame).frame, frame);
    assert_eq!(m.counted("gated_untrusted"), 1);
    reaches(&[100, 100, u64::MAX]);
    assert_eq!(options_of(&m.send(&frame).frame), m.own4(&stamp(&[100, 200, u64::MAX])));
}
