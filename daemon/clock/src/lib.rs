//! Clock guard: a bound ε on the error of the host's wall clock, and whether stamps of that clock are believed
//! (Slogger 4).
//!
//! Shard logs order the writes of several hosts by stamps of synchronised clocks. A stamp of a clock whose error is
//! unknown can put a write before another that was acknowledged earlier. The guard therefore *fails closed*: without
//! a fresh measurement by a locked servo, and without a bound below the configured maximum, the clock is not
//! believed. Slogger trusts that replication takes longer than the error of the clocks; with ε known, [commit
//! wait](wait) makes a guarantee of that assumption.
//!
//! Everything but [`driver`] takes bytes and readings of the clocks as arguments, and does no I/O.
//!
//! | module | what it is for |
//! |---|---|
//! | [`reading`] | a reading of the wall clock, beside a clock that nobody steers |
//! | [`ptp`] | management messages of PTP, as linuxptp's `ptp4l` speaks them |
//! | [`chrony`] | the report `tracking` of chrony |
//! | [`sample`] | what a source says of the clock, whichever source |
//! | [`bound`] | ε: the formula, what each term covers, and what none covers |
//! | [`guard`] | samples and time in, believed or not out |
//! | [`wait`] | stamps, and the time until which a reply waits (Spanner's commit wait) |
//! | [`driver`] | sockets to `ptp4l` and `chronyd`, and the clocks of this host |
#![forbid(unsafe_code)]

mod bytes;

pub mod bound;
pub mod chrony;
pub mod driver;
pub mod guard;
pub mod ptp;
pub mod reading;
pub mod sample;
pub mod wait;

pub use bound::ErrorBound;
pub use guard::{ClockGuard, Limits, Sampled, Verdict, Why};
pub use reading::Reading;
pub use sample::{Answer, MasterId, NoSample, Sample, Servo, Taken};
