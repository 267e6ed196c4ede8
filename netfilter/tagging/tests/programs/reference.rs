//! What the programs must find in a packet, written down anew from RFC 791, RFC 8200 and the head of `protocol/src/tag.rs`.

use crate::frames::{ETHERNET, TCP};
use tidelock_protocol::tag::{IPV6_OPTION, TagError, find_ipv4, find_ipv6};

const HOP_BY_HOP: u8 = 0;
const ROUTING: u8 = 43;
const FRAGMENT: u8 = 44;
const AUTHENTICATION: u8 = 51;
pub const DESTINATION: u8 = 60;
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
}
