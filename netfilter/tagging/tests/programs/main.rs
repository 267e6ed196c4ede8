//! The kernel programs against the Rust codec, by the kernel's own test facility: no interface,
//! no packet leaves.

mod frames;
mod member;
mod quotes;
mod random;
mod reference;

use frames::*;
use member::*;
use std::sync::atomic::Ordering::SeqCst;
use tidelock_protocol::hlc::Hlc;
use tidelock_protocol::tag::{Codec, Form, IPV4_OPTION, IPV6_OPTION, Stamp, TagKey, find_ipv6};
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
        // What P does not name waits, and what C does not reach.
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

/// What one on this host is sent: its P rises, and the packet is as it was.
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

    // What P does not name waits.
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
fn what_is_sent_is_never_older_than_c() {
    let Some(m) = load(&settings(vector(3))) else { return };
    m.pend(&[3, 9, 0]);
    m.commit(&[7, 4, 1 << 33]);
    let sent = m.send(&ip4(OWN, PEER, UDP, &[], b"x"));
    assert_eq!(options_of(&sent.frame), m.own4(&stamp(&[7, 9, 1 << 33])));
}

#[test]
fn before_c_is_known_nothing_is_tagged_and_no_tag_believed() {
    let Some(m) = load(&settings(vector(3))) else { return };
    m.pend(&[0, 4, 0]);
    m.group.committed().trusted_until.store(0, SeqCst);
    let frame = ip4(OWN, PEER, UDP, &[], b"x");
    m.is_left(&m.send(&frame), &frame, "gated_untrusted");
    let tag = m.tag4(&stamp(&[1, 2, 3]));
    m.is_dropped(&m.receive(&ip4(PEER, OWN, UDP, &tag, b"x")), "dropped_untrusted");
    assert_eq!(m.pending(), [0, 4, 0]);
}

#[test]
fn nothing_is_left_to_rules_that_are_gone() {
    let Some(m) = load(&settings(vector(3))) else { return };
    m.pend(&[0, 4, 0]);
    m.group.committed().rules_gone.store(1, SeqCst);
    let outside = ip4(OWN, STRANGER, UDP, &[], b"x");
    m.is_dropped(&m.send(&outside), "dropped_no_rules");
    assert_eq!(m.counted("left_to_queue"), 0);
    m.is_passed(&m.send(&ip4(OWN, PEER, UDP, &[], b"x")), "tagged");
    m.open();
    m.commit(&[0, 4, 0]);
    m.is_passed(&m.send(&outside), "covered");
    m.pend(&[0, 5, 0]);
    m.group.committed().rules_gone.store(0, SeqCst);
    m.is_left(&m.send(&outside), &outside, "left_to_queue");
}

#[test]
fn c_that_has_become_old_is_no_longer_believed() {
    for form in [vector(3), Form::Hlc] {
        let Some(m) = load(&settings(form)) else { return };
        m.pend(&[0, 4, 0]);
        m.tags.pending().hlc.store(4, SeqCst);
        let stamp = match form {
            Form::Hlc => Stamp::Hlc(Hlc(4)),
            Form::Vector { .. } => stamp(&[0, 4, 0]),
        };
        let frame = ip4(OWN, PEER, UDP, &[], b"x");
        let tagged = ip4(PEER, OWN, UDP, &m.tag4(&stamp), b"x");
        assert_eq!(options_of(&m.send(&frame).frame), m.own4(&stamp));
        assert!(m.receive(&tagged).passed);

        // Each CPU looks at the clock once in a tick of the kernel's timer.
        m.group.committed().trusted_until.store(boot_ms() * 1_000_000, SeqCst);
        let mut tries = std::iter::repeat_with(|| m.receive(&tagged));
        m.is_dropped(&tries.find(|tried| !tried.passed).unwrap(), "dropped_untrusted");
        let mut tries = std::iter::repeat_with(|| m.send(&frame));
        m.is_left(
            &tries.find(|tried| tried.mark & MARK_MASK == 0).unwrap(),
            &frame,
            "gated_untrusted",
        );
    }
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
fn to_outside_covered_packets_pass_while_the_gate_is_open() {
    for form in [vector(2), Form::Hlc] {
        let Some(m) = load(&settings(form)) else { return };
        let frame = ip4(OWN, STRANGER, UDP, &[], b"x");
        m.is_left(&m.send(&frame), &frame, "left_to_queue");
        let settle = || {
            let crossing = m.tags.crossing();
            crossing.decided.store(crossing.queued.load(SeqCst), SeqCst);
        };
        settle();
        m.open();
        let sent = m.send(&frame);
        m.is_passed(&sent, "covered");
        assert_eq!(sent.frame, frame);

        let raise = || match form {
            Form::Hlc => m.tags.pending().hlc.store(9, SeqCst),
            _ => m.pend(&[0, 9]),
        };
        let cover = || match form {
            Form::Hlc => m.group.committed().watermark.store(9, SeqCst),
            _ => m.commit(&[0, 9]),
        };
        raise();
        assert_eq!(m.send(&frame).mark & MARK_MASK, 0, "not covered");
        cover();
        assert_eq!(
            m.send(&frame).mark & MARK_MASK,
            0,
            "one waits in the queue, as far as is known"
        );
        settle();
        assert_ne!(m.send(&frame).mark & MARK_MASK, 0);
        m.tags.crossing().waiting.store(1, SeqCst);
        assert_eq!(m.send(&frame).mark & MARK_MASK, 0);
        m.tags.crossing().waiting.store(0, SeqCst);
        settle();
        m.group.committed().open_until.store(1, SeqCst);
        assert_eq!(m.send(&frame).mark & MARK_MASK, 0, "the lease has ended");
        settle();
        raise();
        m.group.committed().is_async.store(1, SeqCst);
        m.open();
        assert_ne!(m.send(&frame).mark & MARK_MASK, 0, "async holds nothing");
    }
}

#[test]
fn pure_acks_need_no_tag_and_other_segments_do() {
    let Some(m) = load(&settings(vector(3))) else { return };
    m.pend(&[0, 4, 0]);
    let ack = ip4(OWN, PEER, TCP, &[], &segment(ACK, &[1; 12], b""));
    let sent = m.send(&ack);
    m.is_passed(&sent, "untagged_acks");
    assert_eq!(sent.frame, ack);
    let sack = [1, 1, 8, 10, 1, 2, 3, 4, 5, 6, 7, 8, 1, 1, 5, 10, 0, 0, 0, 9, 0, 0, 1, 0];
    let with_sack = ip4(OWN, PEER, TCP, &[], &segment(ACK, &sack, b""));
    assert_eq!(m.send(&with_sack).frame, with_sack);
    // MPTCP's DATA_FIN, alone and behind timestamps.
    let data_fin = [30, 12, 0x20, 0x11, 0, 0, 0, 1, 0, 0, 0, 2];
    for options in [&data_fin[..], &[&sack[..12], &data_fin].concat(), &[0, 0, 0, 1]] {
        let sent = m.send(&ip4(OWN, PEER, TCP, &[], &segment(ACK, options, b"")));
        assert!(!options_of(&sent.frame).is_empty(), "{options:?}");
        let sent = m.send(&ip6(OWN6, PEER6, TCP, &segment(ACK, options, b"")));
        assert_eq!(sent.frame[ETHERNET + 6], 60, "{options:?}");
    }
    for (flags, payload) in [(ACK, &b"data"[..]), (ACK | 1, b""), (ACK | 4, b""), (SYN, b"")] {
        let sent = m.send(&ip4(OWN, PEER, TCP, &[], &segment(flags, &[], payload)));
        assert!(!options_of(&sent.frame).is_empty());
    }
    let behind = [&ip4(OWN, PEER, TCP, &[], &segment(ACK, &[1; 12], b""))[..], b"more"].concat();
    assert_eq!(m.send(&behind).mark & MARK_MASK, 0, "bytes behind the end");
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

    // Of what else is in front the kernel may have lost the beginning: nobody knows what it said.
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
        // Of another link-layer address, of another kind, and cut short.
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
        // What says more than it must is judged like any other packet: not covered.
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
            assert!(!four(m.codec.sealing(key, PEER.into(), OWN.into())));
            assert!(!six(m.codec.sealing(key, peer.into(), own.into())));
        }
        assert_eq!(m.pending(), [0, 0, 0]);
        assert_eq!(m.tags.pending().hlc.load(SeqCst), 0);
        assert!(four(m.sealing(PEER, OWN)) && six(m.sealing(peer, own)));
        // Before the backup has told the key, nothing is believed and nothing is tagged.
        m.group.committed().tag_key.iter().for_each(|half| half.store(0, SeqCst));
        assert!(!four(m.codec.sealing(other([0, 0]), PEER.into(), OWN.into())));
        m.pend(&[1 << 20, 0, 0]);
        m.tags.pending().hlc.store(1 << 40, SeqCst);
        let frame = ip4(OWN, PEER, UDP, &[], b"x");
        assert_eq!(m.send(&frame).frame, frame);
        assert_eq!(m.counted("gated_untrusted"), 1);
    }
}

/// Who is outside, or behind another interface, can write whatever address it likes.
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
