//! Ethernet frames, made up byte by byte.

pub const OWN: [u8; 4] = [10, 0, 0, 1];
pub const PEER: [u8; 4] = [10, 0, 0, 2];
pub const STRANGER: [u8; 4] = [10, 0, 0, 9];
pub const OWN6: &str = "fd00::1";
pub const PEER6: &str = "fd00::2";
pub const STRANGER6: &str = "fd00::9";
pub const ETHERNET: usize = 14;

pub const ICMP: u8 = 1;
/// The next header of destination options.
pub const DESTINATION: u8 = 60;
pub const ICMPV6: u8 = 58;
pub const UDP: u8 = 17;
pub const TCP: u8 = 6;
pub const SYN: u8 = 2;
pub const ACK: u8 = 16;

pub fn sum(bytes: &[u8]) -> u16 {
    let mut sum = bytes
        .chunks(2)
        .map(|pair| u32::from(pair[0]) << 8 | u32::from(pair.get(1).copied().unwrap_or(0)))
        .sum::<u32>();
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    sum as u16
}

pub fn ip4(
    source: [u8; 4],
    destination: [u8; 4],
    protocol: u8,
    options: &[u8],
    body: &[u8],
) -> Vec<u8> {
    ip4_fragment(source, destination, protocol, options, body, 0)
}

pub fn ip4_fragment(
    source: [u8; 4],
    destination: [u8; 4],
    protocol: u8,
    options: &[u8],
    body: &[u8],
    fragment: u16,
) -> Vec<u8> {
    assert_eq!(options.len() % 4, 0);
    let header_len = 20 + options.len();
    let total = u16::try_from(header_len + body.len()).unwrap();
    let mut h = vec![0x40 | u8::try_from(header_len / 4).unwrap(), 0];
    h.extend(total.to_be_bytes());
    h.extend([0x12, 0x34]);
    h.extend(fragment.to_be_bytes());
    h.extend([64, protocol, 0, 0]);
    h.extend(source);
    h.extend(destination);
    h.extend(options);
    let check = !sum(&h);
    h[10..12].copy_from_slice(&check.to_be_bytes());
    let mut frame = vec![2, 0, 0, 0, 0, 2, 2, 0, 0, 0, 0, 1, 8, 0];
    frame.extend(h);
    frame.extend(body);
    frame
}

pub fn ip6(source: &str, destination: &str, next: u8, body: &[u8]) -> Vec<u8> {
    let mut frame = vec![2, 0, 0, 0, 0, 2, 2, 0, 0, 0, 0, 1, 0x86, 0xdd, 0x60, 1, 2, 3];
    frame.extend(u16::try_from(body.len()).unwrap().to_be_bytes());
    frame.extend([next, 64]);
    frame.extend(address(source));
    frame.extend(address(destination));
    frame.extend(body);
    frame
}

pub fn address(ipv6: &str) -> [u8; 16] {
    ipv6.parse::<std::net::Ipv6Addr>().unwrap().octets()
}

pub fn segment(flags: u8, options: &[u8], payload: &[u8]) -> Vec<u8> {
    let mut tcp = vec![0x13, 0x88, 0x13, 0x89, 0, 0, 0, 1, 0, 0, 0, 2];
    tcp.extend([u8::try_from((20 + options.len()) / 4).unwrap() << 4, flags, 1, 0, 0, 0, 0, 0]);
    tcp.extend(options);
    tcp.extend(payload);
    tcp
}

/// With the right checksum over the IPv4 pseudo header.
pub fn summed(source: [u8; 4], destination: [u8; 4], mut tcp: Vec<u8>) -> Vec<u8> {
    let check = !tcp_sum(source, destination, &tcp);
    tcp[16..18].copy_from_slice(&check.to_be_bytes());
    tcp
}

pub fn tcp_sum(source: [u8; 4], destination: [u8; 4], tcp: &[u8]) -> u16 {
    let mut all = [&source[..], &destination[..], &[0, TCP][..]].concat();
    all.extend(u16::try_from(tcp.len()).unwrap().to_be_bytes());
    all.extend(tcp);
    sum(&all)
}

/// Everything that an IPv4 receiver looks at.
#[track_caller]
pub fn options_of(frame: &[u8]) -> &[u8] {
    let h = &frame[ETHERNET..];
    let header_len = usize::from(h[0] & 15) * 4;
    assert_eq!(h[0] >> 4, 4);
    assert_eq!(usize::from(u16::from_be_bytes([h[2], h[3]])), h.len(), "total length");
    assert_eq!(sum(&h[..header_len]), 0xffff, "header checksum");
    &h[20..header_len]
}

/// An ICMP error from somewhere to the member, with the right checksum: `quote` is a packet from its network header on.
pub fn error4(source: [u8; 4], kind: u8, rest: [u8; 4], quote: &[u8]) -> Vec<u8> {
    error4_behind(&[], source, kind, rest, quote)
}

/// One whose sender has written these options into its own header.
pub fn error4_behind(
    options: &[u8],
    source: [u8; 4],
    kind: u8,
    rest: [u8; 4],
    quote: &[u8],
) -> Vec<u8> {
    let mut icmp = [&[kind, 1, 0, 0], &rest[..], quote].concat();
    let check = !sum(&icmp);
    icmp[2..4].copy_from_slice(&check.to_be_bytes());
    ip4(source, OWN, ICMP, options, &icmp)
}

pub fn error6(source: &str, kind: u8, rest: [u8; 4], quote: &[u8]) -> Vec<u8> {
    error6_behind(&[], source, kind, rest, quote)
}

/// One behind a destination options header of the sender's.
pub fn error6_behind(
    header: &[u8],
    source: &str,
    kind: u8,
    rest: [u8; 4],
    quote: &[u8],
) -> Vec<u8> {
    let mut icmp = [&[kind, 1, 0, 0], &rest[..], quote].concat();
    let check = !sum6(&address(source), &address(OWN6), &icmp);
    icmp[2..4].copy_from_slice(&check.to_be_bytes());
    let next = if header.is_empty() { ICMPV6 } else { 60 };
    ip6(source, OWN6, next, &[header, &icmp].concat())
}

/// What a redirect has behind its first 8 bytes: where to and by whom, a link-layer address, and the quote.
pub fn redirect6(quote: &[u8]) -> Vec<u8> {
    let mut quoted = [&[4, 0, 0, 0, 0, 0, 0, 0], quote].concat();
    quoted.resize(quoted.len().next_multiple_of(8), 0);
    quoted[1] = u8::try_from(quoted.len() / 8).unwrap();
    [&address(STRANGER6)[..], &address(PEER6), &[2, 1, 2, 0, 0, 0, 0, 9], &quoted].concat()
}

/// Over the IPv6 pseudo header, too.
pub fn sum6(source: &[u8], destination: &[u8], icmp: &[u8]) -> u16 {
    let len = u32::try_from(icmp.len()).unwrap().to_be_bytes();
    sum(&[source, destination, &len, &[0, 0, 0, ICMPV6], icmp].concat())
}
