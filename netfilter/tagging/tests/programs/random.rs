//! Packets of noise, of tags among other options, and damaged ones, both ways, in every form: the programs do with each what the
//! reference says, to the last byte, and to P.

use crate::case::*;
use crate::frames::*;
use crate::member::*;
use crate::reference::{
    ipv4_options, ipv6_headers, is_pure_ack, without_quoted_tag4, without_quoted_tag6,
};
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use std::cell::Cell;
use std::collections::BTreeMap;
use std::sync::atomic::Ordering::SeqCst;
use tidelock_protocol::hlc::Hlc;
use tidelock_protocol::ids::{Seq, WriterId};
use tidelock_protocol::tag::{Codec, Form, IPV4_OPTION, Stamp, TagError, rebuild};
use tidelock_protocol::vector::CountVector;

const CASES: u32 = 2000;
/// What a stranger's tag becomes where it cannot be taken out.
const SAYS_NOTHING: u8 = 0x3e;

impl Known {
    fn is_covered(&self) -> bool {
        self.p.iter().zip(&self.c).all(|(p, c)| p <= c)
    }

    /// What a member's tag makes of it; whether the packet may go on.
    fn merge(&mut self, codec: Codec, body: &[u8]) -> bool {
        let base: CountVector = (0..)
            .map(WriterId)
            .zip(self.p.iter().zip(&self.c).map(|(p, c)| Seq(*p.max(c))))
            .collect();
        match codec.decode(body, &base, &everything()) {
            Ok(Stamp::Vector(vector)) => {
                for (writer, p) in (0..).zip(&mut self.p) {
                    *p = vector.get(WriterId(writer)).0.max(*p);
                }
                true
            }
            Ok(Stamp::Hlc(hlc)) => {
                let is_ahead = hlc.0 >> 16 > WALL_AT_BOOT_MS + boot_ms() + 1000;
                if !is_ahead {
                    self.p[0] = hlc.0.max(self.p[0]);
                }
                !is_ahead
            }
            // An entry below 0 is found when those before it are merged: P may say too much then, never too little.
            Err(TagError::BelowZero) => {
                let lows =
                    body[2..].chunks(4).map(|low| u32::from_be_bytes(low.try_into().unwrap()));
                for ((p, c), low) in self.p.iter_mut().zip(&self.c).zip(lows) {
                    let Some(seq) = rebuild(low, (*p).max(*c)) else { break };
                    *p = seq.max(*p);
                }
                false
            }
            Err(_) => false,
        }
    }
}

/// What must become of a frame.
#[derive(Debug, PartialEq)]
enum Wanted {
    Dropped,
    /// It goes on, towards the guest, or to the queue. From the guest it has no mark then.
    GoesOn(Vec<u8>),
    /// It leaves at once, with the mark.
    Passes(Vec<u8>),
}
use Wanted::{Dropped, GoesOn, Passes};

fn word(bytes: &[u8], at: usize) -> usize {
    u16::from_be_bytes([bytes[at], bytes[at + 1]]).into()
}

/// Bytes of a frame from its network header on; those of a whole IPv4 header at least, or nothing.
fn ipv4_header(frame: &[u8]) -> Option<(&[u8], usize, usize)> {
    let h = &frame[ETHERNET..];
    let header = usize::from(h[0] & 15) * 4;
    let is_one = h.len() >= 20 && h[0] >> 4 == 4 && header >= 20;
    is_one.then(|| (h, header, word(h, 2)))
}

/// Frames are filled up to the least that Ethernet takes.
fn ends_where_it_says(h: &[u8], total: usize) -> bool {
    h.len() == total || total < h.len() && h.len() <= 46
}

fn ipv4_to_guest(m: &Member, frame: &[u8], known: &mut Known) -> Wanted {
    let Some((h, header, total)) = ipv4_header(frame) else { return Dropped };
    if header == 20 {
        return GoesOn(without_quoted_tag4(frame));
    }
    if total < header || total > h.len() {
        return Dropped;
    }
    let options = ipv4_options(&h[20..header], IPV4_OPTION);
    if options.broken {
        return Dropped;
    }
    let is_renumbered = h[20] & 0x80 != 0 && h[20] != IPV4_OPTION && [0x11, 0x12].contains(&h[22]);
    if h[12..16] == PEER && options.tags.is_empty() && is_renumbered {
        return Dropped;
    }
    if options.tags.is_empty() {
        return GoesOn(without_quoted_tag4(frame));
    }
    let mut out = frame.to_vec();
    if h[12..16] == PEER {
        let size = m.codec.ipv4_bytes();
        let [source, destination] = [12, 16].map(|at| <[u8; 4]>::try_from(&h[at..at + 4]).unwrap());
        let codec = m.sealing(source, destination);
        if options.tags != [(0, size)] || !known.merge(codec, &h[22..20 + size]) {
            return Dropped;
        }
    }
    match options.tags.as_slice() {
        [(0, size)] if size % 4 == 0 => {
            out.drain(ETHERNET + 20..ETHERNET + 20 + size);
            out[ETHERNET] -= (size / 4) as u8;
            let total = u16::try_from(total - size).unwrap().to_be_bytes();
            out[ETHERNET + 2..ETHERNET + 4].copy_from_slice(&total);
        }
        tags => tags.iter().for_each(|(at, size)| out[ETHERNET + 20 + at..][..*size].fill(1)),
    }
    GoesOn(out)
}

fn ipv6_to_guest(m: &Member, frame: &[u8], known: &mut Known) -> Wanted {
    let h = &frame[ETHERNET..];
    if h.len() < 40 || h[0] >> 4 != 6 || h.len() < 40 + word(h, 4) {
        return Dropped;
    }
    let headers = ipv6_headers(frame, ETHERNET + 40 + word(h, 4));
    if headers.broken {
        return Dropped;
    }
    if headers.tags.is_empty() {
        return GoesOn(without_quoted_tag6(frame, &headers));
    }
    let mut out = frame.to_vec();
    if h[8..24] != address(PEER6) {
        for (at, size) in headers.tags {
            out[at] = SAYS_NOTHING;
            out[at + 2..at + size].fill(0);
        }
        return GoesOn(out);
    }
    let (size, all) = (m.codec.ipv4_bytes(), m.codec.ipv6_bytes());
    let is_ours = h[6] == DESTINATION && usize::from(h[41]) == all / 8 - 1;
    let [source, destination] = [8, 24].map(|at| <[u8; 16]>::try_from(&h[at..at + 16]).unwrap());
    let codec = m.sealing(source, destination);
    if !is_ours || headers.tags != [(ETHERNET + 42, size)] || !known.merge(codec, &h[44..42 + size])
    {
        return Dropped;
    }
    out.drain(ETHERNET + 40..ETHERNET + 40 + all);
    out[ETHERNET + 6] = h[40];
    let payload = u16::try_from(word(h, 4) - all).unwrap().to_be_bytes();
    out[ETHERNET + 4..ETHERNET + 6].copy_from_slice(&payload);
    GoesOn(out)
}

/// `stamp`: none if C covers P.
fn ipv4_from_guest(m: &Member, frame: &[u8], stamp: Option<&Stamp>) -> Wanted {
    let left = || GoesOn(frame.to_vec());
    let Some((h, header, total)) = ipv4_header(frame) else { return left() };
    if total < header || !ends_where_it_says(h, total) {
        return left();
    }
    let options = ipv4_options(&h[20..header], IPV4_OPTION);
    if !options.tags.is_empty() {
        return Dropped;
    }
    if options.broken || options.routed || h[12..16] != OWN || h[16..20] != PEER {
        return left();
    }
    let fragment = word(h, 6) & 0x3fff;
    let mut out = frame.to_vec();
    if h[9] == TCP && fragment & 0x1fff == 0 {
        if h.len() < header + 20 {
            return left();
        }
        if fragment == 0
            && header == 20
            && is_pure_ack(&h[header..total.max(header + 20)][..total - header])
        {
            return Passes(out);
        }
        lower_mss(&mut out[ETHERNET + header..], MTU as usize - 40 - m.codec.ipv4_bytes());
    }
    let Some(stamp) = stamp else { return Passes(out) };
    let room = m.codec.ipv4_bytes();
    if header + room > 60 || total + room > MTU as usize {
        return GoesOn(out);
    }
    let tag = m.own4(stamp);
    out.splice(ETHERNET + 20..ETHERNET + 20, tag);
    out[ETHERNET] += (room / 4) as u8;
    let total = u16::try_from(total + room).unwrap().to_be_bytes();
    out[ETHERNET + 2..ETHERNET + 4].copy_from_slice(&total);
    Passes(out)
}

fn ipv6_from_guest(m: &Member, frame: &[u8], stamp: Option<&Stamp>) -> Wanted {
    let left = || GoesOn(frame.to_vec());
    let h = &frame[ETHERNET..];
    if h.len() < 40 || h[0] >> 4 != 6 || word(h, 4) == 0 {
        return left();
    }
    let total = 40 + word(h, 4);
    if !ends_where_it_says(h, total) || h[6] == 58 && (133..=137).contains(&h[40]) {
        return left();
    }
    let headers = ipv6_headers(frame, ETHERNET + total);
    if !headers.tags.is_empty() {
        return Dropped;
    }
    let is_between = h[8..24] == address(OWN6) && h[24..40] == address(PEER6);
    if headers.broken || headers.routed || !is_between {
        return left();
    }
    let mut out = frame.to_vec();
    if let Some(tcp) = headers.tcp(frame, ETHERNET + total) {
        if frame.len() < headers.at + 20 {
            return left();
        }
        if h[6] == TCP && is_pure_ack(tcp) {
            return Passes(out);
        }
        lower_mss(&mut out[headers.at..], MTU as usize - 60 - m.codec.ipv6_bytes());
    }
    let Some(stamp) = stamp else { return Passes(out) };
    let room = m.codec.ipv6_bytes();
    if h[6] == 0 || total + room > MTU as usize {
        return GoesOn(out);
    }
    let tag = m.own6(h[6], stamp);
    out.splice(ETHERNET + 40..ETHERNET + 40, tag);
    out[ETHERNET + 6] = DESTINATION;
    let payload = u16::try_from(total - 40 + room).unwrap().to_be_bytes();
    out[ETHERNET + 4..ETHERNET + 6].copy_from_slice(&payload);
    Passes(out)
}

/// A SYN that announces segments larger than `most`, once and where it is even, announces those.
fn lower_mss(tcp: &mut [u8], most: usize) {
    let bytes = usize::from(tcp[12] >> 4) * 4;
    if tcp[13] & SYN == 0 || bytes <= 20 || bytes > tcp.len() {
        return;
    }
    let options = ipv4_options(&tcp[20..bytes], MSS);
    if let ([(at, 4)], false) = (options.tags.as_slice(), options.broken)
        && at % 2 == 0
        && word(tcp, 20 + at + 2) > most
    {
        let before = sum(tcp);
        tcp[20 + at + 2..20 + at + 4].copy_from_slice(&u16::try_from(most).unwrap().to_be_bytes());
        // RFC 1624: what was wrong stays wrong.
        let check = u16::try_from(word(tcp, 16)).unwrap();
        let fixed = sum(&[!sum(tcp), before, check].map(u16::to_be_bytes).concat());
        tcp[16..18].copy_from_slice(&fixed.to_be_bytes());
    }
}

/// A sum of 0 can be written in two ways; what is checked by it cannot tell.
fn without_sums(mut frame: Vec<u8>, six: bool) -> (Vec<u8>, u16) {
    let mut header_sum = 0;
    let at = if six {
        let end = frame.len();
        let headers = (end >= ETHERNET + 40).then(|| ipv6_headers(&frame, end));
        headers.filter(|headers| [TCP, ICMPV6].contains(&headers.next)).map(|headers| headers.at)
    } else {
        ipv4_header(&frame.clone()).map(|(h, header, _)| {
            header_sum = sum(&h[..header.min(h.len())]) % 0xffff;
            frame[ETHERNET + 10..ETHERNET + 12].fill(0);
            ETHERNET + header
        })
    };
    // Of TCP, of ICMP, and of what that quotes.
    for at in at.into_iter().flat_map(|at| [at + 16, at + 2, at + 18]) {
        if let Some(check) = frame.get_mut(at..at + 2)
            && check == [0xff, 0xff]
        {
            check.fill(0);
        }
    }
    (frame, header_sum)
}

fn try_cases(six: bool) {
    let mut seen = BTreeMap::<&str, u64>::new();
    let quoted_tags = Cell::new(0);
    for form in FORMS {
        let Some(m) = load(&settings(form)) else { return };
        m.group.committed().wall_minus_boot.store(WALL_AT_BOOT_MS * 1_000_000, SeqCst);
        let config = Config { cases: CASES, failure_persistence: None, ..Config::default() };
        TestRunner::new(config)
            .run(&case(), |case| {
                let mut known = case.known(form);
                known.set(&m);
                let frame = case.frame(&m, six);
                let (tried, wanted) = if case.to_guest {
                    let to_guest = if six { ipv6_to_guest } else { ipv4_to_guest };
                    (m.receive(&frame), to_guest(&m, &frame, &mut known))
                } else {
                    let from_guest = if six { ipv6_from_guest } else { ipv4_from_guest };
                    // What C covers is named, too.
                    let named = known.p.iter().zip(&known.c).map(|(p, c)| *p.max(c));
                    let stamp = match form {
                        Form::Hlc => Stamp::Hlc(Hlc(known.p[0])),
                        Form::Vector { .. } => stamp(&named.collect::<Vec<_>>()),
                    };
                    let stamp = (!known.is_covered()).then_some(stamp);
                    (m.send(&frame), from_guest(&m, &frame, stamp.as_ref()))
                };
                prop_assert_eq!(Known::of(&m), known, "P");
                let is_error = case.to_guest && case.error.is_some();
                if is_error && matches!(&wanted, GoesOn(other) if *other != frame) {
                    quoted_tags.set(quoted_tags.get() + 1);
                }
                let (wanted, mark) = match wanted {
                    Dropped => {
                        prop_assert!(!tried.passed, "not dropped");
                        return Ok(());
                    }
                    GoesOn(frame) => (frame, 0),
                    Passes(frame) => (frame, m.tags.pass_mark()),
                };
                prop_assert!(tried.passed, "dropped: {:?}", m.tags.stats());
                prop_assert_eq!(tried.mark, mark);
                let sum_before = without_sums(frame, six).1;
                let ((found, sum_after), (wanted, _)) =
                    (without_sums(tried.frame, six), without_sums(wanted, six));
                prop_assert_eq!(found, wanted);
                prop_assert_eq!(sum_after, sum_before, "a header that was right stays right");
                Ok(())
            })
            .unwrap();
        let stats = m.tags.stats().unwrap();
        assert_eq!(stats.dropped_failed + stats.gated_refused, 0, "{stats:?}");
        for (name, n) in stats.named() {
            *seen.entry(name).or_default() += n;
        }
    }
    // It has come to all that this is about.
    seen.insert("quoted_tags", quoted_tags.get());
    for what in [
        "quoted_tags",
        "tagged",
        "untagged_acks",
        "untagged_covered",
        "gated_no_room",
        "gated_fragment",
        "gated_mtu",
        "gated_unreadable",
        "dropped_guests_own",
        "mss_lowered",
        "merged",
        "stripped_foreign",
        "dropped_malformed",
        "dropped_unreadable",
        "dropped_ahead",
    ] {
        assert!(seen[what] > 0, "{what}: {seen:?}");
    }
}

#[test]
fn any_ipv4_packet_is_read_as_the_codec_reads_it() {
    try_cases(false);
}

#[test]
fn any_ipv6_packet_is_read_as_the_codec_reads_it() {
    try_cases(true);
}
