//! Tags: no options can make the parser panic; what it takes for a tag encodes to the same bytes
//! again; a tag is merged near what is known, or not at all.
//!
//! Input: form and style, eight bytes of base, the options.
#![no_main]

use libfuzzer_sys::fuzz_target;
use tidelock_protocol::ids::{Seq, WriterId};
use tidelock_protocol::tag::{
    Codec, Form, IPV4_OPTION, Stamp, TagError, find_ipv4, find_ipv6, rebuild,
};
use tidelock_protocol::vector::CountVector;

fuzz_target!(|data: &[u8]| {
    let [shape, b0, b1, b2, b3, b4, b5, b6, b7, options @ ..] = data else { return };
    let base = u64::from_be_bytes([*b0, *b1, *b2, *b3, *b4, *b5, *b6, *b7]);
    let form = match shape & 0x3f {
        63 => Form::Hlc,
        // More than any option holds.
        62 => return,
        writers => Form::Vector { writers: writers.into() },
    };
    let codec = Codec::new(form, "fuzz", ["a", "b"]);
    let all: CountVector = (0..63).map(|writer| (WriterId(writer), Seq(base))).collect();
    let reachable: CountVector =
        (0..63).map(|writer| (WriterId(writer), Seq(base.saturating_add(1 << 24)))).collect();
    let found =
        if shape & 0x80 == 0 { find_ipv4(options, IPV4_OPTION) } else { find_ipv6(options) };
    let body = match found {
        Ok(Some(body)) => body,
        // The shape's other bit: the bytes are a tag, without options around it.
        _ if shape & 0x40 != 0 => options,
        Ok(None) | Err(TagError::BadOptions | TagError::Twice) => return,
        Err(other) => panic!("{other}"),
    };
    let Ok(stamp) = codec.decode(body, &all, &reachable) else { return };
    if let Stamp::Vector(vector) = &stamp {
        for (_, seq) in vector.entries() {
            assert!(seq.0.abs_diff(base) <= 1 << 31 && seq.0 <= base.saturating_add(1 << 24));
            assert_eq!(rebuild(seq.0 as u32, base), Some(seq.0));
        }
    }
    let mut again = vec![];
    if codec.fits_ipv4() {
        codec.encode_ipv4(IPV4_OPTION, &stamp, &mut again);
        assert_eq!(find_ipv4(&again, IPV4_OPTION), Ok(Some(body)));
    } else {
        codec.encode_ipv6(6, &stamp, &mut again);
        assert_eq!(find_ipv6(&again[2..]), Ok(Some(body)));
    }
});
