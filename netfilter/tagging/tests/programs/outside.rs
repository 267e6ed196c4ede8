//! Packets of the guest to the outside, and what passes while C is not known.

use crate::frames::*;
use crate::member::*;
use std::sync::atomic::Ordering::SeqCst;
use tidelock_protocol::hlc::Hlc;
use tidelock_protocol::tag::{Form, Stamp};

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
