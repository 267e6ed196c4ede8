//! Packets of noise, of tags among other options, and damaged ones, both ways, in every form: the programs do with each what the
//! reference says, to the last byte, and to P.

use crate::frames::*;
use crate::member::*;
use crate::reference::{
    DESTINATION, ipv4_options, ipv6_headers, is_pure_ack, without_quoted_tag4, without_quoted_tag6,
};
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use std::cell::Cell;
use std::collections::BTreeMap;
use std::sync::atomic::Ordering::SeqCst;
use tidelock_protocol::hlc::Hlc;
use tidelock_protocol::ids::{Seq, WriterId};
use tidelock_protocol::tag::{Codec, Form, IPV4_OPTION, IPV6_OPTION, Stamp, TagError, rebuild};
use tidelock_protocol::vector::CountVector;

const CASES: u32 = 2000;
const FORMS: [Form; 4] = [
    Form::Vector { writers: 1 },
    Form::Vector { writers: 3 },
    Form::Vector { writers: 7 },
    Form::Hlc,
];
/// What the members' clock shows when the machine starts.
const WALL_AT_BOOT_MS: u64 = 1_000_000_000;
const MSS: u8 = 2;
const ANOTHER_NUMBER: u8 = 222;
/// What a stranger's tag becomes where it cannot be taken out.
const SAYS_NOTHING: u8 = 0x3e;

/// A part of a header's options.
#[derive(Clone, Debug)]
enum Piece {
    Tag,
    /// By a number that is not the configured one.
    Renumbered,
    Damaged(usize, u8),
    /// Our number, and other bytes.
    Ours(Vec<u8>),
    Other(u8, Vec<u8>),
    Filling(u8),
    Raw(u8),
}

fn piece() -> impl Strategy<Value = Piece> {
    let bytes = || {
        let few = prop::collection::vec(any::<u8>(), 0..12);
        prop_oneof![4 => few, 1 => prop::collection::vec(any::<u8>(), 24..36)]
    };
    // Router alert, source routes, record route, and what nobody knows.
    let kind = prop_oneof![Just(148), Just(131), Just(137), Just(7), Just(5), any::<u8>()];
    prop_oneof![
        4 => Just(Piece::Tag),
        1 => Just(Piece::Renumbered),
        2 => (any::<usize>(), 1u8..).prop_map(|(at, change)| Piece::Damaged(at, change)),
        2 => bytes().prop_map(Piece::Ours),
        4 => (kind, bytes()).prop_map(|(kind, bytes)| Piece::Other(kind, bytes)),
        4 => (0u8..6).prop_map(Piece::Filling),
        1 => any::<u8>().prop_map(Piece::Raw),
    ]
}

/// A header between IPv6's own and what it carries.
#[derive(Clone, Debug)]
enum Header {
    /// As members write it.
    Tag,
    Options {
        hop_by_hop: bool,
        pieces: Vec<Piece>,
    },
    Routing,
    Fragment(u16),
    Authentication(u8),
}

fn header() -> impl Strategy<Value = Header> {
    let options = (prop::bool::weighted(0.2), prop::collection::vec(piece(), 0..4))
        .prop_map(|(hop_by_hop, pieces)| Header::Options { hop_by_hop, pieces });
    prop_oneof![
        4 => Just(Header::Tag),
        6 => options,
        1 => Just(Header::Routing),
        4 => fragment().prop_map(Header::Fragment),
        1 => (0u8..4).prop_map(Header::Authentication),
    ]
}

/// First, middle, last, and none.
fn fragment() -> impl Strategy<Value = u16> {
    prop_oneof![9 => Just(0), 2 => Just(1), 1 => Just(0x0101), 1 => Just(0x0100), 2 => Just(0x0018)]
}

/// What is left of what was drawn: else most packets would have something that is wrong.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Kept {
    All,
    /// Nothing of ours, nor what cannot be read.
    Others,
    /// The same, behind one tag as members write it.
    TagFirst,
}

#[derive(Clone, Debug)]
struct Case {
    kept: Kept,
    to_guest: bool,
    /// The member's own, a peer's, or a stranger's.
    addresses: [usize; 2],
    /// Of IPv4, and of IPv6.
    options: Vec<Piece>,
    headers: Vec<Header>,
    fragment: u16,
    tcp: Option<(u8, Vec<u8>)>,
    payload: usize,
    damage: Vec<(usize, u8)>,
    /// Cut off, or more than the header says.
    length: isize,
    /// P and C here, and what the tag says, for each writer.
    entries: Vec<(u64, u64, u64)>,
    /// It comes back in an ICMP error.
    error: Option<Quote>,
}

/// How a packet is quoted.
#[derive(Clone, Debug)]
struct Quote {
    /// Of each family.
    kinds: [u8; 2],
    by_a_peer: bool,
    /// The error's own header has options, or another header follows it.
    is_behind: bool,
    rest: [u8; 4],
    most: usize,
    /// What follows, behind a quote of so many times 8 bytes.
    followed: Option<(u8, Vec<u8>)>,
}

fn quote() -> impl Strategy<Value = Quote> {
    let kind = prop_oneof![
        6 => prop_oneof![Just([3, 1]), Just([4, 2]), Just([5, 137]), Just([11, 3]), Just([12, 4])],
        1 => any::<[u8; 2]>(),
    ];
    let rest = prop_oneof![3 => Just([0; 4]), 1 => any::<[u8; 4]>()];
    let most = prop_oneof![3 => Just(548), 1 => 0usize..120];
    let more = (16u8..40, prop::collection::vec(any::<u8>(), 0..16));
    let followed = prop_oneof![2 => Just(None), 1 => more.prop_map(Some)];
    (kind, any::<[bool; 2]>(), rest, most, followed).prop_map(
        |(kinds, [by_a_peer, is_behind], rest, most, followed)| Quote {
            kinds,
            by_a_peer,
            is_behind,
            rest,
            most,
            followed,
        },
    )
}

fn case() -> impl Strategy<Value = Case> {
    let from = prop_oneof![4 => Just([0, 1]), 1 => Just([2, 1]), 1 => Just([0, 2])];
    let to = prop_oneof![3 => Just([1, 0]), 1 => Just([2, 0])];
    let ways = prop_oneof![from.prop_map(|way| (false, way)), to.prop_map(|way| (true, way))];
    let flags = prop_oneof![2 => Just(ACK), 3 => Just(SYN), 1 => Just(ACK | 8), 1 => any::<u8>()];
    let tcp_option = prop_oneof![
        3 => Just(vec![MSS, 4, 5, 0xb4]),
        2 => Just(vec![1]),
        1 => Just(vec![0]),
        2 => Just(vec![8, 10, 1, 2, 3, 4, 5, 6, 7, 8]),
        1 => Just(vec![5, 10, 1, 2, 3, 4, 5, 6, 7, 8]),
        1 => Just(vec![30, 4, 0x20, 1]),
        1 => prop::collection::vec(any::<u8>(), 1..5),
    ];
    let tcp_options = prop::collection::vec(tcp_option, 0..4).prop_map(|parts| {
        let mut options = parts.concat();
        options.resize(options.len().next_multiple_of(4), 1);
        options
    });
    let payload = prop_oneof![3 => 0usize..40, 3 => Just(0), 1 => 1380usize..1500];
    let near = prop_oneof![0u64..9, Just(1u64 << 32), (1u64 << 32) - 9..(1 << 32) + 9];
    let kept =
        prop_oneof![2 => Just(Kept::All), 3 => Just(Kept::Others), 2 => Just(Kept::TagFirst)];
    let entry = (near.clone(), near.clone(), prop_oneof![2 => near, 1 => any::<u64>()]);
    let damage = prop::collection::vec((any::<usize>(), any::<u8>()), 1..4);
    (
        (ways, prop::collection::vec(piece(), 0..4), prop::collection::vec(header(), 0..4)),
        (fragment(), prop::option::of((flags, tcp_options)), payload, kept),
        (
            prop_oneof![3 => Just(vec![]), 1 => damage],
            prop_oneof![8 => Just(0isize), 1 => -80isize..0, 1 => 1isize..9],
            prop::collection::vec(entry, 9),
            prop::option::weighted(0.25, quote()),
        ),
    )
        .prop_map(|((way, options, headers), (fragment, tcp, payload, kept), rest)| {
            let (damage, length, entries, error) = rest;
            let (to_guest, addresses) = way;
            Case {
                kept,
                to_guest,
                addresses,
                options,
                headers,
                fragment,
                tcp,
                payload,
                damage,
                length,
                entries,
                error,
            }
        })
}

/// An option as each family writes it.
fn option(kind: u8, body: &[u8], six: bool) -> Vec<u8> {
    let len = body.len() + if six { 0 } else { 2 };
    [&[kind, u8::try_from(len).expect("options are short")], body].concat()
}

impl Case {
    /// What the tag of this packet says.
    fn stamp(&self, form: Form) -> Stamp {
        let seqs = self.entries.iter().map(|(_, _, seq)| *seq);
        match form {
            Form::Vector { .. } => Stamp::Vector((0..).map(WriterId).zip(seqs.map(Seq)).collect()),
            // Long ago, now, or in an hour.
            Form::Hlc => {
                let (now, seq) = (WALL_AT_BOOT_MS + boot_ms(), self.entries[0].2);
                Stamp::Hlc(
                    [Hlc(seq), Hlc::new(now, 7), Hlc::new(now + 3_600_000, 1)][seq as usize % 3],
                )
            }
        }
    }

    fn known(&self, form: Form) -> Known {
        let p: Vec<u64> = self.entries.iter().map(|(p, _, _)| *p).collect();
        match form {
            Form::Vector { writers } => {
                let c = self.entries.iter().map(|(_, c, _)| *c);
                let writers = writers.into();
                Known { p: p[..writers].to_vec(), c: c.take(writers).collect() }
            }
            Form::Hlc => Known { p: p[..1].to_vec(), c: vec![0] },
        }
    }

    fn options(&self, m: &Member, pieces: &[Piece], six: bool) -> Vec<u8> {
        let tag = m.tag4(&self.stamp(m.codec.form()));
        let ours = if six { IPV6_OPTION } else { IPV4_OPTION };
        let foreign = |piece: &&Piece| match piece {
            Piece::Other(kind, _) => *kind != ours,
            Piece::Filling(_) => true,
            _ => self.kept == Kept::All,
        };
        let parts = pieces.iter().filter(foreign).map(|piece| match piece {
            Piece::Tag => option(ours, &tag[2..], six),
            Piece::Renumbered => option(ANOTHER_NUMBER, &tag[2..], six),
            Piece::Damaged(at, change) => {
                let mut body = tag[2..].to_vec();
                let at = at % body.len();
                body[at] ^= change;
                option(ours, &body, six)
            }
            Piece::Ours(body) => option(ours, body, six),
            Piece::Other(kind, body) => option(*kind, body, six),
            Piece::Filling(bytes) if six && *bytes >= 2 => {
                option(1, &vec![0; usize::from(*bytes) - 2], six)
            }
            Piece::Filling(bytes) => vec![u8::from(!six); usize::from(*bytes)],
            Piece::Raw(byte) => vec![*byte],
        });
        parts.flatten().collect()
    }

    /// The transport header and what it carries.
    fn body(&self) -> (u8, Vec<u8>) {
        let payload = vec![0x5a; self.payload];
        match &self.tcp {
            Some((flags, options)) => (TCP, segment(*flags, options, &payload)),
            None => (UDP, [&[0, 9, 0, 9, 0, 0, 0, 0][..], &payload].concat()),
        }
    }

    fn ipv4(&self, m: &Member) -> Vec<u8> {
        let mut options = self.options(m, &self.options, false);
        if self.kept == Kept::TagFirst {
            options.splice(0..0, m.tag4(&self.stamp(m.codec.form())));
        }
        options.truncate(40);
        options.resize(options.len().next_multiple_of(4), 0);
        let (protocol, body) = self.body();
        let [source, destination] = self.addresses.map(|who| [OWN, PEER, STRANGER][who]);
        // Fragments are counted in 8 bytes; the lowest bit says that more follow.
        let fragment = ((self.fragment & 1) << 13) | (self.fragment >> 3);
        ip4_fragment(source, destination, protocol, &options, &body, fragment)
    }

    fn ipv6(&self, m: &Member) -> Vec<u8> {
        let (mut next, mut body) = self.body();
        let foreign = |header: &&Header| self.kept == Kept::All || !matches!(header, Header::Tag);
        let first = (self.kept == Kept::TagFirst).then_some(&Header::Tag);
        for header in self.headers.iter().filter(foreign).rev().chain(first) {
            let (kind, bytes) = match header {
                Header::Tag => (DESTINATION, m.tag6(next, &self.stamp(m.codec.form()))),
                Header::Options { hop_by_hop, pieces } => {
                    let mut bytes = [&[next, 0][..], &self.options(m, pieces, true)].concat();
                    bytes.resize(bytes.len().next_multiple_of(8), 0);
                    bytes[1] = u8::try_from(bytes.len() / 8 - 1).expect("options are short");
                    (if *hop_by_hop { 0 } else { DESTINATION }, bytes)
                }
                Header::Routing => (43, vec![next, 0, 4, 1, 0, 0, 0, 0]),
                Header::Fragment(at) => {
                    let [high, low] = at.to_be_bytes();
                    (44, vec![next, 0, high, low, 0, 0, 0, 7])
                }
                Header::Authentication(words) => {
                    let mut bytes = vec![next, *words];
                    bytes.resize((usize::from(*words) + 2) * 4, 9);
                    (51, bytes)
                }
            };
            body.splice(0..0, bytes);
            next = kind;
        }
        let [source, destination] = self.addresses.map(|who| [OWN6, PEER6, STRANGER6][who]);
        ip6(source, destination, next, &body)
    }

    /// About a packet, which may be any.
    fn error(&self, quote: &Quote, packet: &[u8], six: bool) -> Vec<u8> {
        let mut quoted = packet[..packet.len().min(quote.most)].to_vec();
        let mut rest = quote.rest;
        if let Some((length, more)) = &quote.followed {
            quoted.resize(usize::from(*length) * 8, 0);
            quoted.extend(more);
            rest[usize::from(!six)] = if six { *length } else { length * 2 };
        }
        let kind = quote.kinds[usize::from(six)];
        if six && kind == 137 {
            quoted = redirect6(&quoted);
        }
        let before = if quote.is_behind { &[ICMPV6, 0, 1, 4, 0, 0, 0, 0][..] } else { &[] };
        let options = if quote.is_behind { &[7, 7, 4, 0, 0, 0, 0, 0][..] } else { &[] };
        if six {
            let source = if quote.by_a_peer { PEER6 } else { STRANGER6 };
            error6_behind(before, source, kind, rest, &quoted)
        } else {
            let source = if quote.by_a_peer { PEER } else { STRANGER };
            error4_behind(options, source, kind, rest, &quoted)
        }
    }

    fn frame(&self, m: &Member, six: bool) -> Vec<u8> {
        let mut frame = if six { self.ipv6(m) } else { self.ipv4(m) };
        if let Some(quote) = &self.error {
            frame = self.error(quote, &frame[ETHERNET..], six);
        }
        // Headers are hit more often than what they carry.
        let most = frame.len().min(ETHERNET + 120);
        for (at, byte) in &self.damage {
            frame[ETHERNET + at % (most - ETHERNET)] = *byte;
        }
        // The kernel tries no frame without a whole header.
        let least = ETHERNET + if six { 40 } else { 20 };
        let len = frame.len().saturating_add_signed(self.length).max(least);
        frame.resize(len, 0x77);
        frame
    }
}

/// P and C, for each writer; one time each in HLC form.
#[derive(Clone, Debug, PartialEq)]
struct Known {
    p: Vec<u64>,
    c: Vec<u64>,
}

impl Known {
    fn set(&self, m: &Member) {
        if m.codec.form() == Form::Hlc {
            m.tags.pending().hlc.store(self.p[0], SeqCst);
        } else {
            m.pend(&self.p);
            m.commit(&self.c);
        }
    }

    fn of(m: &Member) -> Known {
        let (pending, committed) = (m.tags.pending(), m.group.committed());
        match m.codec.form() {
            Form::Hlc => Known { p: vec![pending.hlc.load(SeqCst)], c: vec![0] },
            Form::Vector { writers } => {
                let load = |cells: &[std::sync::atomic::AtomicU64]| {
                    cells[..usize::from(writers)].iter().map(|e| e.load(SeqCst)).collect()
                };
                Known { p: load(&pending.entries), c: load(&committed.entries) }
            }
        }
    }

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
