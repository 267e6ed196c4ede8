//! The report `tracking` of chrony, over its command protocol (version 6, as of chrony 2 and later).
//!
//! The crate `chrony-candm` does this too, but its licence (GPL-2.0-only) excludes this program's.
//!
//! The request has 104 bytes, as many as the reply, so that nobody can amplify traffic by it; big-endian:
//!
//! | offset | bytes | field | here |
//! |---|---|---|---|
//! | 0 | 1 | version | 6 |
//! | 1 | 1 | type | 1 |
//! | 2 | 2 | reserved | |
//! | 4 | 2 | command | 33, `tracking` |
//! | 6 | 2 | attempt | 0 |
//! | 8 | 4 | sequence | echoed by the reply |
//! | 12 | 92 | padding | |
//!
//! The reply:
//!
//! | offset | bytes | field | here |
//! |---|---|---|---|
//! | 0 | 1 | version | 6 |
//! | 1 | 1 | type | 2 |
//! | 2 | 2 | reserved | |
//! | 4 | 2 | command | 33 |
//! | 6 | 2 | format of the reply | 5 |
//! | 8 | 2 | status | 0 |
//! | 10 | 6 | padding | |
//! | 16 | 4 | sequence | |
//! | 20 | 8 | padding | |
//! | 28 | 4 | reference ID | 0: none; 127.127.1.1: the local clock itself |
//! | 32 | 20 | address of the reference | not looked at |
//! | 52 | 2 | stratum | |
//! | 54 | 2 | leap status | 3: not synchronised |
//! | 56 | 12 | time of the last update: seconds (8), nanoseconds (4) | not looked at |
//! | 68 | 4 | current correction, seconds | by this the clock is slow of what chronyd believes |
//! | 72 | 4 | last offset | not looked at |
//! | 76 | 4 | RMS offset | not looked at |
//! | 80 | 12 | frequency, residual frequency, skew, ppm | not looked at |
//! | 92 | 4 | root delay, seconds | the round trip |
//! | 96 | 4 | root dispersion, seconds | all other error, as of the request |
//! | 100 | 4 | last interval of updates | not looked at |
//!
//! A number is a float of 32 bits of chrony's own: exponent (7 bits, signed), coefficient (25 bits, signed); its value
//! is coefficient · 2^(exponent - 25).
//!
//! chrony bounds the error of the clock by |current correction| + root dispersion + root delay / 2, and chronyd
//! calculates all of them for the moment of the request. In the dispersion the frequency is assumed to be wrong by
//! `maxclockerror` (1 ppm unless configured) and by the skew of its estimate.

use crate::bytes::Bytes;
use crate::sample::{Answer, NoSample, Sample, Servo, Taken};

const VERSION: u8 = 6;
const TYPE_REQUEST: u8 = 1;
const TYPE_REPLY: u8 = 2;
const COMMAND_TRACKING: u16 = 33;
const REPLY_TRACKING: u16 = 5;
const LEAP_UNSYNCHRONISED: u16 = 3;
/// 127.127.1.1, which `local` and `manual` have as reference.
const LOCAL_REFERENCE: u32 = 0x7f7f_0101;
/// Bytes of a request, and of its reply.
pub const MESSAGE_BYTES: usize = 104;

/// The bytes of a request for `tracking`.
#[must_use]
pub fn request(sequence: u32) -> [u8; MESSAGE_BYTES] {
    let mut message = [0; MESSAGE_BYTES];
    message[..2].copy_from_slice(&[VERSION, TYPE_REQUEST]);
    message[4..6].copy_from_slice(&COMMAND_TRACKING.to_be_bytes());
    message[8..12].copy_from_slice(&sequence.to_be_bytes());
    message
}

/// The report `tracking`, as far as it bounds the error.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Tracking {
    /// Sequence of the request.
    pub sequence: u32,
    /// Identity of the reference; 0: none.
    pub reference: u32,
    /// Distance from a reference clock.
    pub stratum: u16,
    /// 0 to 2: synchronised, with a leap second ahead or not; 3: not synchronised.
    pub leap: u16,
    /// Seconds by which the clock is slow.
    pub correction_s: f64,
    /// Seconds of the round trip to the reference clock.
    pub root_delay_s: f64,
    /// Seconds of all other error.
    pub root_dispersion_s: f64,
}

/// A datagram that is no report.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ChronyError {
    /// Another number of bytes than a report, or a refusal, has.
    #[error("a reply of {0} bytes is no report of tracking")]
    Length(usize),
    /// Another protocol.
    #[error("version {0} of chrony's protocol is not known")]
    Version(u8),
    /// A request, or something else.
    #[error("packet type {0} is not a reply")]
    NotAReply(u8),
    /// A reply to another command.
    #[error("the reply is to command {command}, in format {reply}")]
    WrongReply {
        /// The command.
        command: u16,
        /// The format.
        reply: u16,
    },
    /// The command failed.
    #[error("chronyd refuses to report tracking, with status {0}")]
    Refused(u16),
    /// A bound below zero.
    #[error("chronyd reports a negative root delay or dispersion")]
    NegativeBound,
}

/// Decodes a datagram of `chronyd`.
///
/// # Errors
/// Bytes that are not exactly a report of tracking.
pub fn decode(datagram: &[u8]) -> Result<Tracking, ChronyError> {
    let length = ChronyError::Length(datagram.len());
    let mut rest = Bytes(datagram);
    let version = rest.u8().ok_or(length)?;
    if version != VERSION {
        return Err(ChronyError::Version(version));
    }
    let kind = rest.u8().ok_or(length)?;
    if kind != TYPE_REPLY {
        return Err(ChronyError::NotAReply(kind));
    }
    rest.skip(2).ok_or(length)?;
    let (command, reply) = (rest.u16().ok_or(length)?, rest.u16().ok_or(length)?);
    let status = rest.u16().ok_or(length)?;
    if command == COMMAND_TRACKING && status != 0 {
        return Err(ChronyError::Refused(status));
    }
    if (command, reply) != (COMMAND_TRACKING, REPLY_TRACKING) {
        return Err(ChronyError::WrongReply { command, reply });
    }
    let tracking =
        decode_tracking(rest).filter(|_| datagram.len() == MESSAGE_BYTES).ok_or(length)?;
    // The sign bit of a zero does not make it negative.
    if tracking.root_delay_s < 0.0 || tracking.root_dispersion_s < 0.0 {
        return Err(ChronyError::NegativeBound);
    }
    Ok(tracking)
}

fn decode_tracking(mut rest: Bytes<'_>) -> Option<Tracking> {
    rest.skip(6)?;
    let sequence = rest.u32()?;
    rest.skip(8)?;
    let reference = rest.u32()?;
    rest.skip(20)?;
    let (stratum, leap) = (rest.u16()?, rest.u16()?);
    rest.skip(12)?;
    let correction_s = float(rest.u32()?);
    rest.skip(5 * 4)?;
    let (root_delay_s, root_dispersion_s) = (float(rest.u32()?), float(rest.u32()?));
    Some(Tracking {
        sequence,
        reference,
        stratum,
        leap,
        correction_s,
        root_delay_s,
        root_dispersion_s,
    })
}

/// The value of chrony's float: never infinite, never no number.
fn float(bits: u32) -> f64 {
    // Arithmetic shifts keep the signs.
    let exponent = bits.cast_signed() >> 25;
    let coefficient = (bits << 7).cast_signed() >> 7;
    f64::from(coefficient) * f64::from(exponent - 25).exp2()
}

/// Nanoseconds, rounded away from zero: a bound does not shrink.
fn ns_of(seconds: f64) -> i64 {
    let ns = seconds * 1e9;
    (if ns < 0.0 { ns.floor() } else { ns.ceil() }) as i64
}

impl Tracking {
    /// Translates the report into the words of every source.
    #[must_use]
    pub fn answer(&self) -> Answer {
        if matches!(self.reference, 0 | LOCAL_REFERENCE) || self.leap == LEAP_UNSYNCHRONISED {
            return Answer { servo: Servo::NoMaster, sample: Err(NoSample::NotMeasured) };
        }
        let sample = Sample {
            taken: Taken::WhenAsked,
            offset_ns: ns_of(-self.correction_s),
            delay_ns: ns_of(self.root_delay_s / 2.0).unsigned_abs(),
            dispersion_ns: ns_of(self.root_dispersion_s).unsigned_abs(),
            // Part of the dispersion, and the reference changes among servers that are all right.
            master_error_ns: None,
            master: None,
        };
        Answer { servo: Servo::Locked, sample: Ok(sample) }
    }
}

#[cfg(test)]
mod tests;
