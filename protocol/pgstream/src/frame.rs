//! Messages, cut out of a stream that arrives in pieces.

use bytes::{Buf, Bytes, BytesMut};

/// Bytes of a tag and a length.
const HEAD_BYTES: usize = 5;
const LENGTH_BYTES: usize = 4;

/// Input of a connection that is not a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum FrameError {
    /// The length does not even cover itself.
    #[error("message {tag:?} of length {length}: this is not PostgreSQL's protocol")]
    Length {
        /// Tag of the message.
        tag: char,
        /// Length in its head.
        length: u32,
    },
    /// The message is longer than any that is expected.
    #[error("message {tag:?} of {length} bytes, {max} are the most that is read")]
    TooLong {
        /// Tag of the message.
        tag: char,
        /// Length in its head.
        length: u32,
        /// Bound that it exceeds.
        max: usize,
    },
}

/// Received bytes that are not consumed yet.
#[derive(Debug)]
pub(crate) struct Frames {
    buffer: BytesMut,
    max: usize,
}

/// Message with a tag.
#[derive(Debug)]
pub(crate) struct Frame {
    pub tag: u8,
    /// The message with its tag and length.
    whole: BytesMut,
}

impl Frame {
    /// The message behind its length.
    pub fn body(self) -> Bytes {
        let mut whole = self.whole.freeze();
        whole.advance(HEAD_BYTES);
        whole
    }

    /// The message with its tag and length.
    pub fn whole(self) -> BytesMut {
        self.whole
    }
}

impl Frames {
    pub fn new(max: usize) -> Frames {
        Frames { buffer: BytesMut::new(), max }
    }

    pub fn push(&mut self, bytes: &[u8]) {
        self.buffer.extend_from_slice(bytes);
    }

    /// Bytes that wait to be consumed.
    pub fn len(&self) -> usize {
        self.buffer.len()
    }

    /// Drops what has not been consumed.
    pub fn clear(&mut self) {
        self.buffer.clear();
    }

    /// The next message with a tag. `None` until all of it is there.
    pub fn next(&mut self) -> Result<Option<Frame>, FrameError> {
        let [tag, length @ ..] =
            self.buffer[..].first_chunk::<HEAD_BYTES>().copied().unwrap_or([0; 5]);
        if self.buffer.len() < HEAD_BYTES {
            return Ok(None);
        }
        let whole = self.whole_bytes(tag, u32::from_be_bytes(length), 1)?;
        if self.buffer.len() < whole {
            return Ok(None);
        }
        Ok(Some(Frame { tag, whole: self.buffer.split_to(whole) }))
    }

    /// The body of the next message without a tag: a client's first ones have none.
    pub fn next_without_tag(&mut self) -> Result<Option<Bytes>, FrameError> {
        let Some(length) = self.buffer[..].first_chunk::<LENGTH_BYTES>() else { return Ok(None) };
        let whole = self.whole_bytes(b' ', u32::from_be_bytes(*length), 0)?;
        if self.buffer.len() < whole {
            return Ok(None);
        }
        let mut body = self.buffer.split_to(whole).freeze();
        body.advance(LENGTH_BYTES);
        Ok(Some(body))
    }

    fn whole_bytes(&self, tag: u8, length: u32, before: usize) -> Result<usize, FrameError> {
        let (tag, max) = (char::from(tag), self.max);
        let bytes = length as usize;
        if bytes < LENGTH_BYTES {
            return Err(FrameError::Length { tag, length });
        }
        if bytes > max - before {
            return Err(FrameError::TooLong { tag, length, max });
        }
        Ok(bytes + before)
    }
}

/// Numbers and texts at the front of a message. Every read is `None` where the message ends too early.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Fields<'a>(pub &'a [u8]);

impl<'a> Fields<'a> {
    fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (first, rest) = self.0.split_first_chunk::<N>()?;
        self.0 = rest;
        Some(*first)
    }

    pub fn u8(&mut self) -> Option<u8> {
        self.array::<1>().map(|[byte]| byte)
    }

    pub fn u32(&mut self) -> Option<u32> {
        self.array().map(u32::from_be_bytes)
    }

    pub fn u64(&mut self) -> Option<u64> {
        self.array().map(u64::from_be_bytes)
    }

    /// A text up to a zero byte, which must be UTF-8.
    pub fn text(&mut self) -> Option<&'a str> {
        let end = self.0.iter().position(|&byte| byte == 0)?;
        let text = str::from_utf8(&self.0[..end]).ok()?;
        self.0 = &self.0[end + 1..];
        Some(text)
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

/// A peer's text as it may be shown: on one line, and not longer than a bound.
pub(crate) fn shown(bytes: &[u8]) -> String {
    let cut = &bytes[..bytes.len().min(crate::limits::TEXT_BYTES_MAX)];
    let printable = |c: char| if c.is_control() { ' ' } else { c };
    String::from_utf8_lossy(cut).chars().map(printable).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_come_out_whole_whatever_the_pieces() {
        let stream = [&b"Z\0\0\0\x05I"[..], b"c\0\0\0\x04", b"d\0\0\0\x07abc"].concat();
        for piece in 1..=stream.len() {
            let (mut frames, mut found) = (Frames::new(8), vec![]);
            for bytes in stream.chunks(piece) {
                frames.push(bytes);
                while let Some(frame) = frames.next().unwrap() {
                    found.push((frame.tag, frame.body()));
                }
            }
            let expected = [(b'Z', &b"I"[..]), (b'c', b""), (b'd', b"abc")];
            assert_eq!(found, expected.map(|(tag, body)| (tag, Bytes::from_static(body))));
            assert_eq!(frames.len(), 0);
        }
    }

    #[test]
    fn lengths_are_bounded_from_both_sides() {
        let next = |bytes: &[u8]| {
            let mut frames = Frames::new(8);
            frames.push(bytes);
            (frames.next().map(|frame| frame.is_some()), frames)
        };
        assert_eq!(next(b"d\0\0\0\x03").0, Err(FrameError::Length { tag: 'd', length: 3 }));
        assert_eq!(next(b"d\0\0\0\x07").0, Ok(false));
        let too_long = |length| Err(FrameError::TooLong { tag: 'd', length, max: 8 });
        assert_eq!(next(b"d\0\0\0\x08").0, too_long(8));
        assert_eq!(next(b"d\xff\xff\xff\xff").0, too_long(u32::MAX));
        let mut start = Frames::new(8);
        start.push(b"\0\0\0\x09");
        let too_long = FrameError::TooLong { tag: ' ', length: 9, max: 8 };
        assert_eq!(start.next_without_tag(), Err(too_long));
    }

    #[test]
    fn texts_of_a_peer_are_shown_on_one_line_and_cut() {
        assert_eq!(shown(b"a\nb\x1b[1m\xff"), "a b [1m\u{fffd}");
        assert_eq!(shown(&[b'x'; 5000]).len(), 400);
    }
}
