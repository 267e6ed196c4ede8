//! Packets of noise, of tags among other options, and damaged ones, both ways, in every form.

use crate::frames::*;
use crate::member::*;
use proptest::prelude::*;
use std::sync::atomic::Ordering::SeqCst;
use tidelock_protocol::hlc::Hlc;
use tidelock_protocol::ids::{Seq, WriterId};
use tidelock_protocol::tag::{Form, IPV4_OPTION, IPV6_OPTION, Stamp};

pub const FORMS: [Form; 4] = [
    Form::Vector { writers: 1 },
    Form::Vector { writers: 3 },
    Form::Vector { writers: 7 },
    Form::Hlc,
];
/// The members' wall clock at the machine's start.
pub const WALL_AT_BOOT_MS: u64 = 1_000_000_000;
pub const MSS: u8 = 2;
pub const ANOTHER_NUMBER: u8 = 222;

/// A part of a header's options.
#[derive(Clone, Debug)]
pub enum Piece {
    Tag,
    /// A tag with a number that is not the configured one.
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
pub enum Header {
    /// A tag as members write it.
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

/// The part of the drawn pieces that is kept: else most packets would have something that is wrong.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Kept {
    All,
    /// Nothing of ours, nor what cannot be read.
    Others,
    /// Nothing of ours but a first tag as members write it.
    TagFirst,
}

#[derive(Clone, Debug)]
pub struct Case {
    kept: Kept,
    pub to_guest: bool,
    /// The member's own, a peer's, or a stranger's.
    addresses: [usize; 2],
    /// Options of IPv4, and of IPv6.
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
    /// The ICMP error that the packet comes back in.
    pub error: Option<Quote>,
}

/// A quote of a packet in an ICMP error.
#[derive(Clone, Debug)]
pub struct Quote {
    /// The ICMP type in each family.
    kinds: [u8; 2],
    by_a_peer: bool,
    /// The error's own header has options, or another header follows it.
    is_behind: bool,
    rest: [u8; 4],
    most: usize,
    /// Extensions behind a quote of so many times 8 bytes.
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

pub fn case() -> impl Strategy<Value = Case> {
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
    /// The stamp in the tag of this packet.
    pub fn stamp(&self, form: Form) -> Stamp {
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

    pub fn known(&self, form: Form) -> Known {
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

    pub fn frame(&self, m: &Member, six: bool) -> Vec<u8> {
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
pub struct Known {
    pub p: Vec<u64>,
    pub c: Vec<u64>,
}

impl Known {
    pub fn set(&self, m: &Member) {
        if m.codec.form() == Form::Hlc {
            m.tags.pending().hlc.store(self.p[0], SeqCst);
        } else {
            m.pend(&self.p);
            m.commit(&self.c);
        }
    }

    pub fn of(m: &Member) -> Known {
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
}
