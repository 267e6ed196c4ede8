//! What the fuzz targets share. `scripts/fuzz` builds and runs them; docs are at the targets.
//!
//! A fuzzer gets nowhere if it must guess magic numbers and checksums. So the first byte of an
//! input says how much help it gets: [`nbd`] puts together a conversation from a short
//! program, [`seal`] makes the checksums of frames and journals right after the fuzzer changed
//! what they cover, [`wal`] writes pages of a log, [`replication`] both sides of its streams. Without help the bytes are
//! taken as they are.
//!
//! The targets `lying_host` and `lying_backup` begin where the decoders end: [`extremes`] makes well-formed messages with
//! extreme values of their inputs.

pub mod extremes;
pub mod nbd;
pub mod replication;
pub mod seal;
pub mod wal;

/// The lengths of the pieces in which a stream arrives, made from two bytes of the input.
#[must_use]
pub fn pieces(first: u8, second: u8) -> [usize; 3] {
    [1 + usize::from(first % 64), 1 + usize::from(second), 1 + usize::from(first / 64) * 1000]
}
