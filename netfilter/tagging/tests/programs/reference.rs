//! What the programs must find in a packet, written down anew from RFC 791, RFC 792, RFC 4443, RFC 4861, RFC 4884, RFC 8200
//! and the head of `protocol/src/tag.rs`.

use crate::frames::{DESTINATION, ETHERNET, ICMP, ICMPV6, TCP, sum, sum6};
use tidelock_protocol::tag::{IPV4_OPTION, IPV6_OPTION, TagError, find_ipv4, find_ipv6};
use tidelock_tagging::ACK_OPTIONS;

const HOP_BY_HOP: u8 = 0;
const ROUTING: u8 = 43;
const FRAGMENT: u8 = 44;
const AUTHENTICATION: u8 = 51;
const SOURCE_ROUTES: [u8; 2] = [131, 137];
/// More than anybody needs.
const HEADERS_MAX: usize = 8;
const OPTIONS_HEADER_MAX_BYTES: usize = 512;

/// Options of one header.
#[derive(Debug, Default)]
pub struct Options {
    /// Where tags begin, and their lengths. Those behind a break are not seen.
    pub tags: Vec<(usize, usize)>,
    /// Some option does not end within the header.
    pub broken: bool,
    /// A source route was before that.
    pub routed: bool,
}

/// Also asks the codec's own search, which must not think otherwise.
pub fn ipv4_options(bytes: &[u8], wanted: u8) -> Options {
    let mut options = Options::default();
    let mut at = 0;
    while at < bytes.len() && bytes[at] != 0 {
        let size = match (bytes[at], bytes.get(at + 1)) {
            (1, _) => 1,
            (_, Some(size)) if *size >= 2 && at + usize::from(*size) <= bytes.len() => {
                usize::from(*size)
            }
            _ => {
                options.broken = true;
                break;
            }
        };
        options.routed |= SOURCE_ROUTES.contains(&bytes[at]);
        if bytes[at] == wanted {
            options.tags.push((at, size));
        }
        at += size;
    }
    options.agree(bytes, find_ipv4(bytes, wanted));
    options
}

/// Of a hop-by-hop or destination options header, from its first option on.
fn ipv6_options(bytes: &[u8]) -> Options {
    let mut options = Options::default();
    let mut at = 0;
    while at < bytes.len() {
        let size = match (bytes[at], bytes.get(at + 1)) {
            (0, _) => 1,
            (_, Some(size)) if at + 2 + usize::from(*size) <= bytes.len() => 2 + usize::from(*size),
            _ => {
                options.broken = true;
                break;
            }
        };
        if bytes[at] == IPV6_OPTION {
            options.tags.push((at, size));
        }
        at += size;
    }
    options.agree(bytes, find_ipv6(bytes));
    options
}

impl Options {
    fn agree(&self, bytes: &[u8], codec: Result<Option<&[u8]>, TagError>) {
        let body = |(at, size): (usize, usize)| &bytes[at + 2..at + size];
        match (codec, self.tags.as_slice()) {
            (Ok(None), []) => assert!(!self.broken, "{bytes:?}"),
            (Ok(Some(found)), [tag]) => assert!(!self.broken && found == body(*tag), "{bytes:?}"),
            // It looks no further than the second.
            (Err(TagError::Twice), [_, _, ..]) => {}
            (Err(TagError::BadOptions), [] | [_]) => assert!(self.broken, "{bytes:?}"),
            (codec, _) => panic!("{codec:?} of {bytes:?}: {self:?}"),
        }
    }
}

/// The headers behind an IPv6 header.
#[derive(Debug, Default)]
pub struct Headers {
    /// Where tags begin in the frame, and their lengths.
    pub tags: Vec<(usize, usize)>,
    pub broken: bool,
    pub routed: bool,
    pub fragment: bool,
    later_fragment: bool,
    /// Where the last one lies in the frame, and which it is.
    pub at: usize,
    pub next: u8,
}

/// Of a frame whose IPv6 header is whole, up to the end that it names.
pub fn ipv6_headers(frame: &[u8], end: usize) -> Headers {
    let mut headers =
        Headers { at: ETHERNET + 40, next: frame[ETHERNET + 6], ..Headers::default() };
    headers.broken = !headers.walk(&frame[..end]);
    headers
}

impl Headers {
    /// Returns whether all could be read.
    fn walk(&mut self, bytes: &[u8]) -> bool {
        let is_extension =
            |next| [HOP_BY_HOP, ROUTING, FRAGMENT, AUTHENTICATION, DESTINATION].contains(&next);
        for _ in 0..HEADERS_MAX {
            if !is_extension(self.next) || self.later_fragment {
                return true;
            }
            let Some([next, len, ..]) = bytes.get(self.at..self.at + 8) else { return false };
            let size = match self.next {
                FRAGMENT => 8,
                AUTHENTICATION => (usize::from(*len) + 2) * 4,
                _ => (usize::from(*len) + 1) * 8,
            };
            let Some(header) = bytes.get(self.at..self.at + size) else { return false };
            match self.next {
                FRAGMENT => {
                    self.fragment = true;
                    self.later_fragment = u16::from_be_bytes([header[2], header[3]]) & !7 != 0;
                }
                ROUTING => self.routed = true,
                AUTHENTICATION => {}
                _ => {
                    if size > OPTIONS_HEADER_MAX_BYTES {
                        return false;
                    }
                    let options = ipv6_options(&header[2..]);
                    if options.broken {
                        return false;
                    }
                    let start = self.at + 2;
                    self.tags.extend(options.tags.iter().map(|(at, size)| (start + at, *size)));
                }
            }
            self.next = *next;
            self.at += size;
        }
        !is_extension(self.next) || self.later_fragment
    }

    /// What a TCP header would be that the packet has.
    pub fn tcp<'a>(&self, frame: &'a [u8], end: usize) -> Option<&'a [u8]> {
        (self.next == TCP && !self.later_fragment).then(|| &frame[self.at..end])
    }
}

/// A TCP segment that says nothing but how much has arrived.
pub fn is_pure_ack(segment: &[u8]) -> bool {
    segment.len() >= 20
        && usize::from(segment[12] >> 4) * 4 == segment.len()
        && segment[13] & 0x10 != 0
        && segment[13] & 0x27 == 0
        && has_only_ack_options(&segment[20..])
}

fn has_only_ack_options(options: &[u8]) -> bool {
    match options {
        [] => true,
        [0, rest @ ..] => rest.iter().all(|byte| *byte == 0),
        [1, rest @ ..] => has_only_ack_options(rest),
        [kind, len, ..] if ACK_OPTIONS.iter().any(|option| option.is(*kind, *len)) => {
            options.get(usize::from(*len)..).is_some_and(has_only_ack_options)
        }
        _ => false,
    }
}

fn word(bytes: &[u8], at: usize) -> usize {
    u16::from_be_bytes([bytes[at], bytes[at + 1]]).into()
}

fn set_word(bytes: &mut [u8], at: usize, value: usize) {
    bytes[at..at + 2].copy_from_slice(&(value as u16).to_be_bytes());
}

/// A checksum with which a sum that is `now` becomes what it was (RFC 1624): what was wrong stays wrong.
fn kept(check: usize, before: u16, now: u16) -> usize {
    sum(&[!now, before, check as u16].map(u16::to_be_bytes).concat()).into()
}

/// Where a quote ends of which the ICMP header says that it is `named` bytes long, and whether that is before the packet's end.
fn quote_end(named: usize, packet_end: usize) -> (usize, bool) {
    let is_followed = named >= 128 && named <= packet_end;
    (if is_followed { named } else { packet_end }, is_followed)
}

/// Takes so many bytes out of a quote that ends at `end`, or what there is of them. Returns how many.
fn take_out(
    of: &mut Vec<u8>,
    at: usize,
    bytes: usize,
    (end, keeps_length): (usize, bool),
) -> usize {
    let taken = bytes.min(end - at);
    of.drain(at..at + taken);
    if keeps_length {
        of.splice(end - taken..end - taken, vec![0; taken]);
    }
    taken
}

/// What becomes of an IPv4 packet without a tag, which may be an ICMP error.
pub fn without_quoted_tag4(frame: &[u8]) -> Vec<u8> {
    let unchanged = frame.to_vec();
    let h = &frame[ETHERNET..];
    let (at, total) = (usize::from(h[0] & 15) * 4, word(h, 2));
    let is_whole = word(h, 6) & 0x3fff == 0 && total <= h.len() && total >= at + 30;
    if !is_whole || h[9] != ICMP || ![3, 4, 5, 11, 12].contains(&h[at]) {
        return unchanged;
    }
    let (mut icmp, mut quote) = (h[at..at + 8].to_vec(), h[at + 8..total].to_vec());
    let size = usize::from(quote[21]);
    let options = (usize::from(quote[0] & 15) * 4).saturating_sub(20);
    let is_tag = quote[0] >> 4 == 4 && quote[20] == IPV4_OPTION && size >= 4 && size % 4 == 0;
    if !is_tag || size > options {
        return unchanged;
    }
    let before = (
        sum(&h[at..total]),
        sum(&[&quote[..20], &quote[20..][..size.min(quote.len() - 20)]].concat()),
    );
    let named = if [3, 11, 12].contains(&icmp[0]) { usize::from(icmp[5]) * 4 } else { 0 };
    let end = quote_end(named, quote.len());
    let taken = take_out(&mut quote, 20, size, end);
    quote[0] -= (size / 4) as u8;
    let quoted_total = word(&quote, 2).wrapping_sub(size);
    set_word(&mut quote, 2, quoted_total);
    if taken == size {
        let check = kept(word(&quote, 10), before.1, sum(&quote[..20]));
        set_word(&mut quote, 10, check);
    } else {
        set_word(&mut quote, 10, 0);
        let check = !sum(&quote[..20]);
        set_word(&mut quote, 10, check.into());
    }
    if icmp[0] == 12 && usize::from(icmp[4]) >= 20 + size {
        icmp[4] -= size as u8;
    }
    let check = kept(word(&icmp, 2), before.0, sum(&[&icmp[..], &quote].concat()));
    set_word(&mut icmp, 2, check);
    let mut header = h[..at].to_vec();
    // What fills a frame up goes, too.
    let mut filling = &h[total..];
    if !end.1 {
        set_word(&mut header, 2, total - taken);
        let check = kept(word(h, 10), sum(&h[..at]), sum(&header));
        set_word(&mut header, 10, check);
        filling = &[];
    }
    [&frame[..ETHERNET], &header, &icmp, &quote, filling].concat()
}

/// Where the quote of an IPv6 error is, how long it is, and whether that is before the packet's end.
fn quote6(icmp: &[u8]) -> Option<(usize, (usize, bool))> {
    if icmp[0] != 137 {
        let named = if [1, 3].contains(&icmp[0]) { usize::from(icmp[4]) * 8 } else { 0 };
        return Some((8, quote_end(named, icmp.len() - 8)));
    }
    let mut at = 40;
    for _ in 0..8 {
        let &[kind, units] = icmp.get(at..at + 2)? else { unreachable!() };
        let end = at + usize::from(units) * 8;
        if units == 0 || end > icmp.len() {
            return None;
        }
        if kind == 4 {
            return Some((at + 8, (end - at - 8, true)));
        }
        at = end;
    }
    None
}

/// The same of an IPv6 packet that is whole and has no tag.
pub fn without_quoted_tag6(frame: &[u8], headers: &Headers) -> Vec<u8> {
    let unchanged = frame.to_vec();
    let h = &frame[ETHERNET..];
    let (at, end) = (headers.at - ETHERNET, 40 + word(h, 4));
    if headers.next != ICMPV6 || headers.fragment || end < at + 8 {
        return unchanged;
    }
    let old = &h[at..end];
    if ![1, 2, 3, 4, 137].contains(&old[0]) {
        return unchanged;
    }
    let Some((from, quote_end)) = quote6(old) else { return unchanged };
    if quote_end.0 < 44 {
        return unchanged;
    }
    let (mut icmp, mut quote) = (old[..from].to_vec(), old[from..].to_vec());
    let size = (usize::from(quote[41]) + 1) * 8;
    let is_tag = quote[0] >> 4 == 6 && quote[6] == DESTINATION && quote[42] == IPV6_OPTION;
    if !is_tag || size != (usize::from(quote[43]) + 4).next_multiple_of(8) {
        return unchanged;
    }
    quote[6] = quote[40];
    let payload = word(&quote, 4).wrapping_sub(size);
    set_word(&mut quote, 4, payload);
    let taken = take_out(&mut quote, 40, size, quote_end);
    icmp.extend(quote);
    let mut header = h[..at].to_vec();
    let mut filling = &h[end..];
    if !quote_end.1 {
        set_word(&mut header, 4, end - 40 - taken);
        filling = &[];
    }
    let pointer = u32::from_be_bytes(icmp[4..8].try_into().expect("four bytes"));
    if icmp[0] == 4 && pointer as usize >= 40 + size {
        icmp[4..8].copy_from_slice(&(pointer - size as u32).to_be_bytes());
    }
    let sum_of = |icmp: &[u8]| sum6(&h[8..24], &h[24..40], icmp);
    let check = kept(word(&icmp, 2), sum_of(old), sum_of(&icmp));
    set_word(&mut icmp, 2, check);
    [&frame[..ETHERNET], &header, &icmp, filling].concat()
}
