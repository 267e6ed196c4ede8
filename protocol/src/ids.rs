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
