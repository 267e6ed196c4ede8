//! What kind of packet it is, from the first bytes of its network header.
//!
//! Reads just enough of IPv4, IPv6 and TCP to find pure acknowledgements and neighbour discovery.
//! Whatever is cut short, fragmented, unknown or contradicts itself is [`Kind::Data`]: it waits,
//! which is always safe. Nothing here trusts a length field beyond the bytes at hand.

use crate::release_queue::{Flow, Kind};
use std::hash::{DefaultHasher, Hash, Hasher};
use tidelock_tagging::ACK_OPTIONS;

/// EtherType of IPv4.
pub const ETHERTYPE_IPV4: u16 = 0x0800;
/// EtherType of IPv6.
pub const ETHERTYPE_IPV6: u16 = 0x86dd;
/// How much of a packet [`classify`] can use: an IPv6 header, some extension headers, and a TCP
/// header.
pub const HEADERS_MAX_BYTES: u32 = 160;

const DATA: Kind = Kind::Data { flow: None };

const PROTOCOL_HOP_BY_HOP: u8 = 0;
const PROTOCOL_TCP: u8 = 6;
const PROTOCOL_ROUTING: u8 = 43;
const PROTOCOL_ICMPV6: u8 = 58;
const PROTOCOL_DESTINATION: u8 = 60;

const IPV4_HEADER_MIN_BYTES: usize = 20;
const IPV6_HEADER_BYTES: usize = 40;
const TCP_HEADER_MIN_BYTES: usize = 20;
/// Ethernet fills short frames up: so many bytes of a network packet may be filling.
const ETHERNET_PAYLOAD_MIN_BYTES: usize = 46;

const TCP_FIN: u8 = 0x01;
const TCP_SYN: u8 = 0x02;
const TCP_RST: u8 = 0x04;
const TCP_ACK: u8 = 0x10;
const TCP_URG: u8 = 0x20;

const TCP_OPTIONS_END: u8 = 0;
const TCP_NO_OPERATION: u8 = 1;

/// RFC 4861.
const ROUTER_SOLICITATION: u8 = 133;
const SOLICITATION: u8 = 135;
const ADVERTISEMENT: u8 = 136;
const SOURCE_LINK: u8 = 1;
const TARGET_LINK: u8 = 2;
/// A router lowers the hop limit, so only a packet from this very link has it (RFC 4861, 3.1).
const NEIGHBOUR_DISCOVERY_HOP_LIMIT: u8 = 255;

/// The kind of a packet whose network header begins at `head[0]`. `head` may be cut short;
/// `len_bytes` is the packet's whole length.
#[must_use]
pub fn classify(ethertype: u16, head: &[u8], len_bytes: u32) -> Kind {
    match ethertype {
        ETHERTYPE_IPV4 => ipv4(head, len_bytes as usize),
        ETHERTYPE_IPV6 => ipv6(head, len_bytes as usize),
        _ => None,
    }
    .unwrap_or(DATA)
}

fn ipv4(head: &[u8], len_bytes: usize) -> Option<Kind> {
    let fixed = head.get(..IPV4_HEADER_MIN_BYTES)?;
    let header_len = usize::from(fixed[0] & 0x0f) * 4;
    if fixed[0] >> 4 != 4 || header_len < IPV4_HEADER_MIN_BYTES || fixed[9] != PROTOCOL_TCP {
        return None;
    }
    let total_len = usize::from(be16(fixed, 2));
    let fragment = be16(fixed, 6) & 0x3fff;
    let fragment_offset = fragment & 0x1fff;
    if fragment_offset != 0 || !ends_where_it_says(total_len, len_bytes) {
        return None;
    }
    let kind = tcp(&fixed[12..20], head.get(header_len..)?, total_len.checked_sub(header_len)?)?;
    // Options of IP may carry anything.
    let is_plain = fragment == 0 && header_len == IPV4_HEADER_MIN_BYTES;
    Some(if is_plain { kind } else { Kind::Data { flow: kind_flow(kind) } })
}

fn ipv6(head: &[u8], len_bytes: usize) -> Option<Kind> {
    let fixed = head.get(..IPV6_HEADER_BYTES)?;
    let payload_len = usize::from(be16(fixed, 4));
    // A payload length of 0 means a jumbogram, or nothing at all.
    if fixed[0] >> 4 != 6
        || payload_len == 0
        || !ends_where_it_says(IPV6_HEADER_BYTES + payload_len, len_bytes)
    {
        return None;
    }
    let mut next = fixed[6];
    let mut at = IPV6_HEADER_BYTES;
    if next == PROTOCOL_ICMPV6 {
        let is_whole = len_bytes == IPV6_HEADER_BYTES + payload_len;
        let message = head.get(at..at + payload_len)?;
        return (is_whole && is_discovery(fixed, message)).then_some(Kind::NeverHeld);
    }
    // Each extension header is at least 8 bytes long, so the bytes at hand bound the walk.
    while matches!(next, PROTOCOL_HOP_BY_HOP | PROTOCOL_ROUTING | PROTOCOL_DESTINATION) {
        let extension = head.get(at..at + 2)?;
        next = extension[0];
        at += (usize::from(extension[1]) + 1) * 8;
    }
    if next != PROTOCOL_TCP {
        return None;
    }
    let extensions_len = at - IPV6_HEADER_BYTES;
    let kind = tcp(&fixed[8..40], head.get(at..)?, payload_len.checked_sub(extensions_len)?)?;
    Some(if extensions_len == 0 { kind } else { Kind::Data { flow: kind_flow(kind) } })
}

/// Whether a message of ICMPv6 asks for a neighbour or a router on this link, or answers a neighbour, and says nothing more than
/// it must. As the kernel programs find it (`netfilter/bpf/discovery.h`), which also see link-layer addresses.
fn is_discovery(ip: &[u8], message: &[u8]) -> bool {
    let (plain, link) = match message.first() {
        Some(&ROUTER_SOLICITATION) => (8, SOURCE_LINK),
        Some(&SOLICITATION) => (24, SOURCE_LINK),
        Some(&ADVERTISEMENT) => (24, TARGET_LINK),
        _ => return false,
    };
    let Some((fixed, options)) = message.split_at_checked(plain) else { return false };
    // Three bits of it are flags.
    let reserved = if fixed[0] == ADVERTISEMENT { fixed[4] & 0x1f } else { fixed[4] };
    let is_near = ip[24..26] == [0xff, 2] || (ip[24] == 0xfe && ip[25] & 0xc0 == 0x80);
    ip[..4] == [0x60, 0, 0, 0]
        && ip[7] == NEIGHBOUR_DISCOVERY_HOP_LIMIT
        && is_near
        && fixed[1] == 0
        && [reserved, fixed[5], fixed[6], fixed[7]] == [0; 4]
        && matches!(options, [] | [_, 1, _, _, _, _, _, _])
        && options.first().is_none_or(|kind| *kind == link)
}

/// Bytes behind the end that the header names would travel without being looked at.
fn ends_where_it_says(named_len: usize, len_bytes: usize) -> bool {
    named_len <= len_bytes && len_bytes <= named_len.max(ETHERNET_PAYLOAD_MIN_BYTES)
}

/// `segment_len`: header and payload, as the network header says.
fn tcp(addresses: &[u8], segment: &[u8], segment_len: usize) -> Option<Kind> {
    let fixed = segment.get(..TCP_HEADER_MIN_BYTES)?;
    let header_len = usize::from(fixed[12] >> 4) * 4;
    if header_len < TCP_HEADER_MIN_BYTES || header_len > segment_len {
        return None;
    }
    let mut hasher = DefaultHasher::new();
    addresses.hash(&mut hasher);
    fixed[..4].hash(&mut hasher);
    let flow = Flow(hasher.finish());
    let flags = fixed[13];
    let pure_ack = header_len == segment_len
        && flags & TCP_ACK != 0
        && flags & (TCP_SYN | TCP_FIN | TCP_RST | TCP_URG) == 0
        && has_only_ack_options(segment.get(TCP_HEADER_MIN_BYTES..header_len)?);
    Some(if pure_ack { Kind::PureAck { flow } } else { Kind::Data { flow: Some(flow) } })
}

/// Whether no option of a segment carries anything of the guest's state: see `ack_options.h`.
fn has_only_ack_options(mut options: &[u8]) -> bool {
    loop {
        let len = match options {
            [] => return true,
            [TCP_OPTIONS_END, filling @ ..] => return filling.iter().all(|byte| *byte == 0),
            [TCP_NO_OPERATION, ..] => 1,
            [kind, len, ..] if ACK_OPTIONS.iter().any(|option| option.is(*kind, *len)) => *len,
            _ => return false,
        };
        let Some(rest) = options.get(usize::from(len)..) else { return false };
        options = rest;
    }
}

fn kind_flow(kind: Kind) -> Option<Flow> {
    match kind {
        Kind::Data { flow } => flow,
        Kind::PureAck { flow } => Some(flow),
        Kind::NeverHeld => None,
    }
}

fn be16(bytes: &[u8], at: usize) -> u16 {
    u16::from_be_bytes([bytes[at], bytes[at + 1]])
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const ACK_ONLY: u8 = TCP_ACK;

    fn segment(flags: u8, options_len: usize, payload_len: usize) -> Vec<u8> {
        let mut tcp = vec![0; TCP_HEADER_MIN_BYTES + options_len];
        tcp[..4].copy_from_slice(&[0x15, 0x38, 0xc0, 0x01]);
        tcp[12] = u8::try_from(tcp.len() / 4).unwrap() << 4;
        tcp[13] = flags;
        tcp.resize(tcp.len() + payload_len, 0x55);
        tcp
    }

    fn ip4(protocol: u8, options_len: usize, body: &[u8]) -> Vec<u8> {
        let header_len = IPV4_HEADER_MIN_BYTES + options_len;
        let mut packet = vec![0; header_len];
        packet[0] = 0x40 | u8::try_from(header_len / 4).unwrap();
        let total_len = u16::try_from(header_len + body.len()).unwrap();
        packet[2..4].copy_from_slice(&total_len.to_be_bytes());
        packet[9] = protocol;
        packet[12..20].copy_from_slice(&[10, 0, 0, 1, 10, 0, 0, 2]);
        packet.extend_from_slice(body);
        packet
    }

    fn ip6(next: u8, hop_limit: u8, body: &[u8]) -> Vec<u8> {
        let mut packet = vec![0; IPV6_HEADER_BYTES];
        packet[0] = 0x60;
        packet[4..6].copy_from_slice(&u16::try_from(body.len()).unwrap().to_be_bytes());
        packet[6] = next;
        packet[7] = hop_limit;
        packet.extend_from_slice(body);
        packet
    }

    fn classify4(packet: &[u8]) -> Kind {
        classify(ETHERTYPE_IPV4, packet, u32::try_from(packet.len()).unwrap())
    }

    fn classify6(packet: &[u8]) -> Kind {
        classify(ETHERTYPE_IPV6, packet, u32::try_from(packet.len()).unwrap())
    }

    fn is_pure_ack(kind: Kind) -> bool {
        matches!(kind, Kind::PureAck { .. })
    }

    fn is_tcp_data(kind: Kind) -> bool {
        matches!(kind, Kind::Data { flow: Some(_) })
    }

    #[test]
    fn an_acknowledgement_is_pure_only_without_payload_and_other_flags() {
        for (ip_options, tcp_options) in [(0, 0), (0, 12), (8, 0), (40, 40)] {
            let pure = ip4(6, ip_options, &segment(ACK_ONLY, tcp_options, 0));
            assert_eq!(
                is_pure_ack(classify4(&pure)),
                ip_options == 0,
                "IP's own may carry anything"
            );
            let data = ip4(6, ip_options, &segment(ACK_ONLY, tcp_options, 1));
            assert!(is_tcp_data(classify4(&data)));
        }
        for flags in [TCP_SYN, TCP_FIN, TCP_RST, TCP_URG] {
            assert!(is_tcp_data(classify4(&ip4(6, 0, &segment(ACK_ONLY | flags, 0, 0)))));
        }
        assert!(is_tcp_data(classify4(&ip4(6, 0, &segment(0, 0, 0)))), "no ACK flag");
        assert!(is_pure_ack(classify6(&ip6(6, 64, &segment(ACK_ONLY, 12, 0)))));
        assert!(is_tcp_data(classify6(&ip6(6, 64, &segment(ACK_ONLY, 12, 1)))));
    }

    #[test]
    fn an_acknowledgement_is_pure_only_with_options_that_carry_nothing_of_the_guest() {
        let with = |options: &[u8]| {
            let mut tcp = segment(ACK_ONLY, options.len(), 0);
            tcp[TCP_HEADER_MIN_BYTES..].copy_from_slice(options);
            [ip4(6, 0, &tcp), ip6(6, 64, &tcp)].map(|packet| {
                let ethertype = if packet[0] >> 4 == 4 { ETHERTYPE_IPV4 } else { ETHERTYPE_IPV6 };
                is_pure_ack(classify(ethertype, &packet, u32::try_from(packet.len()).unwrap()))
            })
        };
        let timestamps = [8, 10, 1, 2, 3, 4, 5, 6, 7, 8];
        let sack =
            |blocks: u8| [&[5, 2 + 8 * blocks][..], &vec![7; 8 * usize::from(blocks)]].concat();
        let padded = |options: &[&[u8]]| {
            let mut all = options.concat();
            all.resize(all.len().next_multiple_of(4), 1);
            all
        };
        for pure in [
            padded(&[&timestamps]),
            padded(&[&[1, 1], &timestamps, &[1, 1], &sack(3)]),
            padded(&[&sack(4)]),
            vec![1, 0, 0, 0],
        ] {
            assert_eq!(with(&pure), [true, true], "{pure:?}");
        }
        // MPTCP with DATA_FIN, window scale, experiments, and what does not fit.
        for other in [
            padded(&[&[30, 12, 0x20, 0x11, 0, 0, 0, 1, 0, 0, 0, 2]]),
            padded(&[&timestamps, &[30, 8, 0x20, 1, 0, 0, 0, 1]]),
            vec![3, 3, 7, 1],
            vec![2, 4, 5, 180],
            padded(&[&[253, 8, 1, 2, 3, 4, 5, 6]]),
            padded(&[&[5, 12, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]]),
            padded(&[&[8, 6, 0, 0, 0, 0]]),
            vec![0, 0, 0, 5],
            vec![1, 1, 8, 10],
            vec![1, 1, 1, 8],
        ] {
            assert_eq!(with(&other), [false, false], "{other:?}");
        }
    }

    #[test]
    fn one_connection_is_one_flow_and_the_other_direction_is_another() {
        let ack = classify4(&ip4(6, 0, &segment(ACK_ONLY, 0, 0)));
        let data = classify4(&ip4(6, 8, &segment(ACK_ONLY, 12, 400)));
        assert_eq!(kind_flow(ack), kind_flow(data));
        let mut back = ip4(6, 0, &segment(ACK_ONLY, 0, 0));
        back[12..20].rotate_left(4);
        assert_ne!(kind_flow(classify4(&back)), kind_flow(ack));
    }

    #[test]
    fn fragments_wait() {
        let mut first = ip4(6, 0, &segment(ACK_ONLY, 0, 0));
        first[6] = 0x20;
        assert!(is_tcp_data(classify4(&first)));
        let mut later = ip4(6, 0, &segment(ACK_ONLY, 0, 0));
        later[7] = 1;
        assert_eq!(classify4(&later), DATA);
        let mut unfragmentable = ip4(6, 0, &segment(ACK_ONLY, 0, 0));
        unfragmentable[6] = 0x40;
        assert!(is_pure_ack(classify4(&unfragmentable)));
        let mut body = vec![6, 0, 0, 1, 0, 0, 0, 7];
        body.extend(segment(ACK_ONLY, 0, 0));
        assert_eq!(classify6(&ip6(44, 64, &body)), DATA);
    }

    #[test]
    fn extension_headers_are_walked() {
        let mut body = vec![60, 1];
        body.resize(16, 0);
        body.extend([6, 0, 0, 0, 0, 0, 0, 0]);
        body.extend(segment(ACK_ONLY, 0, 0));
        // Their options may carry anything.
        assert!(is_tcp_data(classify6(&ip6(0, 64, &body))));
    }

    #[test]
    fn neighbour_discovery_is_only_what_never_crosses_a_router_and_says_no_more_than_it_must() {
        let of = |hop_limit, to: [u8; 2], message: &[u8]| {
            let mut packet = ip6(58, hop_limit, message);
            packet[24..26].copy_from_slice(&to);
            classify6(&packet)
        };
        let message = |kind: u8, plain: usize, option: u8| {
            let mut message = vec![0; plain];
            message[0] = kind;
            if option != 0 {
                message.extend([option, 1, 2, 0, 0, 0, 0, 1]);
            }
            message
        };
        let genuine = [
            message(133, 8, 0),
            message(133, 8, 1),
            message(135, 24, 0),
            message(135, 24, 1),
            message(136, 24, 0),
            message(136, 24, 2),
        ];
        for message in &genuine {
            for near in [[0xff, 2], [0xfe, 0x80]] {
                assert_eq!(of(255, near, message), Kind::NeverHeld, "{message:?}");
                assert_eq!(of(254, near, message), DATA);
            }
            assert_eq!(of(255, [0xfd, 0], message), DATA, "a router would send it on");
            for at in [1, 5, 7] {
                let mut other = message.clone();
                other[at] = 1;
                assert_eq!(of(255, [0xff, 2], &other), DATA, "{other:?}");
            }
            let longer = [&message[..], &[14, 1, 1, 2, 3, 4, 5, 6]].concat();
            assert_eq!(of(255, [0xff, 2], &longer), DATA, "{longer:?}");
        }
        let others =
            [message(134, 16, 0), message(137, 40, 0), message(128, 8, 0), message(135, 24, 2)];
        for message in others.iter().chain([&message(136, 24, 14), &message(135, 8, 0)]) {
            assert_eq!(of(255, [0xff, 2], message), DATA, "{message:?}");
        }
    }

    #[test]
    fn what_contradicts_itself_waits() {
        let pure = ip4(6, 0, &segment(ACK_ONLY, 0, 0));
        assert!(is_pure_ack(classify(ETHERTYPE_IPV4, &pure, 46)), "Ethernet's filling");
        assert_eq!(classify(ETHERTYPE_IPV4, &pure, 47), DATA, "bytes behind the end");
        assert_eq!(classify(ETHERTYPE_IPV4, &pure, 39), DATA, "shorter than it says");
        assert_eq!(classify(ETHERTYPE_IPV6, &pure, 40), DATA);
        assert_eq!(classify(0x0806, &pure, 40), DATA);
        let mut no_length = pure.clone();
        no_length[2..4].copy_from_slice(&[0, 0]);
        assert_eq!(classify(ETHERTYPE_IPV4, &no_length, 40), DATA, "BIG TCP has length 0");
        let mut long_header = pure;
        long_header[32] = 0x60;
        assert_eq!(classify(ETHERTYPE_IPV4, &long_header, 40), DATA);
    }

    proptest! {
        #[test]
        fn any_bytes_are_survived(
            ethertype in prop_oneof![Just(ETHERTYPE_IPV4), Just(ETHERTYPE_IPV6), any::<u16>()],
            head in prop::collection::vec(any::<u8>(), 0..200),
            len_bytes in any::<u32>(),
        ) {
            let _ = classify(ethertype, &head, len_bytes);
        }

        /// Nearly right packets reach further than noise does.
        #[test]
        fn damaged_packets_are_survived_and_cut_ones_wait(
            six in any::<bool>(),
            flags in any::<u8>(),
            payload in 0usize..64,
            damage in prop::collection::vec((0usize..120, any::<u8>()), 0..4),
            cut in 0usize..120,
        ) {
            let tcp = segment(flags, 12, payload);
            let mut packet = if six { ip6(6, 64, &tcp) } else { ip4(6, 0, &tcp) };
            let len_bytes = u32::try_from(packet.len()).unwrap();
            let ethertype = if six { ETHERTYPE_IPV6 } else { ETHERTYPE_IPV4 };
            let headers_len = packet.len() - payload - 12;
            prop_assert_eq!(is_pure_ack(classify(ethertype, &packet, len_bytes)),
                payload == 0 && flags & 0x37 == TCP_ACK);
            let head = &packet[..cut.min(packet.len())];
            if head.len() < headers_len {
                prop_assert_eq!(classify(ethertype, head, len_bytes), DATA);
            }
            for (at, byte) in damage {
                if let Some(b) = packet.get_mut(at) {
                    *b = byte;
                }
            }
            let _ = classify(ethertype, &packet[..cut.min(packet.len())], len_bytes);
        }
    }
}
