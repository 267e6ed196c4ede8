//! Newtypes for every id, count and epoch of the protocol.

use serde::{Deserialize, Serialize};
use std::fmt;

macro_rules! number {
    ($(#[$doc:meta])* $name:ident($inner:ty)) => {
        $(#[$doc])*
        #[derive(
            Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
        )]
        #[serde(transparent)]
        pub struct $name(pub $inner);

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.fmt(f)
            }
        }
    };
}

number! {
    /// A writer's count of its writes over all its protected disks: starts at 1, no gaps.
    /// 0 means "none yet".
    Seq(u64)
}
number! {
    /// A writer's index in the count vectors of its group.
    WriterId(u16)
}
number! {
    /// A disk's number within its writer.
    DiskId(u16)
}
number! {
    /// The fencing number of a group's primary site. The backup grants it, recovery raises it.
    /// 0 means "none granted yet".
    Epoch(u64)
}
number! {
    /// One run of a host daemon for one member. A new run takes over the stream of an older one;
    /// an older one never takes it back.
    Incarnation(u64)
}
number! {
    /// The handle of one attached member within one connection.
    Channel(u16)
}
number! {
    /// Nanoseconds on one machine's clock that never steps and counts suspended time
    /// (`CLOCK_BOOTTIME`). Never compared across machines.
    MonoNanos(u64)
}

/// The identity of a group, random, given by the backup that creates it. A group that is removed and created anew under
/// its old name has another one.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct GroupId(pub [u8; 16]);

impl fmt::Display for GroupId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (at, byte) in self.0.iter().enumerate() {
            let dash = if matches!(at, 4 | 6 | 8 | 10) { "-" } else { "" };
            write!(f, "{dash}{byte:02x}")?;
        }
        Ok(())
    }
}

impl fmt::Debug for GroupId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl std::str::FromStr for GroupId {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let digits: Vec<u8> = text.bytes().filter(|byte| *byte != b'-').collect();
        let mut id = [0; 16];
        let is_hex = digits.iter().all(u8::is_ascii_hexdigit);
        if digits.len() != 2 * id.len() || !is_hex {
            return Err("a group's identity is a UUID: 32 hexadecimal digits");
        }
        for (byte, pair) in id.iter_mut().zip(digits.chunks_exact(2)) {
            let value = |digit: u8| char::from(digit).to_digit(16).expect("checked") as u8;
            *byte = value(pair[0]) << 4 | value(pair[1]);
        }
        Ok(Self(id))
    }
}

/// A UUID's text in files for people, 16 bytes in messages.
impl Serialize for GroupId {
    fn serialize<S: serde::Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        if to.is_human_readable() { to.collect_str(self) } else { self.0.serialize(to) }
    }
}

impl<'de> Deserialize<'de> for GroupId {
    fn deserialize<D: serde::Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        if from.is_human_readable() {
            let text = String::deserialize(from)?;
            return text.parse().map_err(serde::de::Error::custom);
        }
        <[u8; 16]>::deserialize(from).map(Self)
    }
}

impl Seq {
    /// The count before the first write.
    pub const ZERO: Seq = Seq(0);

    /// The seq that must follow this one.
    #[must_use]
    pub fn next(self) -> Seq {
        Seq(self.0.checked_add(1).expect("2^64 writes"))
    }
}

impl WriterId {
    /// The position of this writer's entry in a count vector.
    #[must_use]
    pub fn index(self) -> usize {
        usize::from(self.0)
    }
}

impl Epoch {
    /// The epoch that fences this one.
    #[must_use]
    pub fn next(self) -> Epoch {
        Epoch(self.0.checked_add(1).expect("2^64 epochs"))
    }
}

impl MonoNanos {
    /// This time plus a span in milliseconds.
    #[must_use]
    pub fn plus_ms(self, span_ms: u64) -> MonoNanos {
        MonoNanos(self.0.saturating_add(span_ms.saturating_mul(1_000_000)))
    }

    /// How long ago `earlier` was, in nanoseconds; 0 if it was not.
    #[must_use]
    pub fn since_ns(self, earlier: MonoNanos) -> u64 {
        self.0.saturating_sub(earlier.0)
    }
}
/// A random number of 128 bits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Nonce(pub u64, pub u64);

impl Nonce {
    /// Its bytes.
    #[must_use]
    pub fn to_bytes(self) -> [u8; 16] {
        ((u128::from(self.0) << 64) | u128::from(self.1)).to_le_bytes()
    }

    /// From its bytes.
    #[must_use]
    pub fn from_bytes(bytes: [u8; 16]) -> Self {
        let all = u128::from_le_bytes(bytes);
        Self((all >> 64) as u64, all as u64)
    }
}

/// One run of a host's daemon for one member. A host that was cloned, or restored from an older
/// moment, can repeat the number of a run but cannot know the nonce of one that came later.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct RunId {
    /// Its number.
    pub number: Incarnation,
    /// Drawn at random when it begins.
    pub nonce: Nonce,
}

impl fmt::Display for RunId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}-{:08x}", self.number.0, self.nonce.0 >> 32)
    }
}
