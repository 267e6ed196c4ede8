//! The ceiling of a writer's times: what is on record of them, so that a restart never goes back (HLC form).
//!
//! No time that is given out follows the wall clock beyond the ceiling that is durable. One record of it
//! serves for half of [`AHEAD_MS`] while the member writes, and the next run after an unclean stop begins above it.
//! At the ceiling itself times count on, with the counter's carries: after an idle spell, or
//! where another member's clock is ahead. So what begins above it begins [`CARRIES_MS`] above it.

use tidelock_protocol::hlc::Hlc;

/// How far it is put ahead of the wall clock. So far ahead, and by what carries add, begins the next run
/// after an unclean stop, at most.
pub const AHEAD_MS: u64 = 2_000;
/// How far it is kept ahead of times that have passed the wall clock: for what carries of the
/// counter may add between two looks, 65,536 records each. Less than a start takes.
pub const CARRIES_MS: u64 = 100;
/// How often it is looked at: far oftener than it is reached.
pub const LOOK_EVERY_MS: u64 = AHEAD_MS / 8;

/// Of a run that begins after one with `before_ms` on record; 0: after none.
#[must_use]
pub fn first(before_ms: u64, wall_ms: u64) -> u64 {
    ahead_of(before_ms, wall_ms)
}

/// Below every time of a run that begins after an unclean stop.
#[must_use]
pub fn floor_above(before_ms: u64) -> Hlc {
    if before_ms == 0 { Hlc(0) } else { Hlc::new(before_ms + CARRIES_MS, 0) }
}

/// What is to be on record when the last time that was given out is `last`. `wall_ms`: the wall clock as
/// far as it is believed.
#[must_use]
pub fn raised(ceiling_ms: u64, last: Hlc, wall_ms: u64) -> u64 {
    let last_ms = last.physical_ms();
    let room_ms = if last_ms > wall_ms { CARRIES_MS / 2 } else { AHEAD_MS / 2 };
    if last_ms + room_ms <= ceiling_ms {
        return ceiling_ms;
    }
    ahead_of(last_ms, wall_ms).max(ceiling_ms)
}

/// Ahead of the wall clock, not of the times: those of a run that follows an unclean stop begin ahead of
/// the wall clock themselves, and several such runs must not add up. Peers drop what is too far
/// ahead.
fn ahead_of(last_ms: u64, wall_ms: u64) -> u64 {
    (wall_ms + AHEAD_MS).max(last_ms + CARRIES_MS)
}
