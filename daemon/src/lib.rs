//! The host daemon: taps, sequencer, local disk, link, control API and the `tidelock` CLI.

// Some of what the state machines offer is for the drivers alone.
#![cfg_attr(not(feature = "host"), allow(dead_code))]

#[cfg(feature = "host")]
#[macro_use(eprintln)]
extern crate tidelock_config;

pub mod activity;
#[cfg(feature = "host")]
pub mod adoption;
pub mod backlog;
pub mod ceiling;
#[cfg(feature = "host")]
pub mod cli;
pub mod clock;
#[cfg(feature = "host")]
pub mod config;
#[cfg(feature = "host")]
pub mod control;
pub mod copy_job;
#[cfg(feature = "host")]
pub mod degrade;
#[cfg(feature = "host")]
pub mod driver;
#[cfg(test)]
mod example_status;
#[cfg(feature = "host")]
pub mod group;
pub mod handover;
#[cfg(feature = "host")]
pub mod heartbeat;
#[cfg(feature = "host")]
pub mod held_gate;
#[cfg(feature = "host")]
pub mod host;
pub mod link;
#[cfg(feature = "host")]
pub mod metrics;
#[cfg(feature = "host")]
pub mod nbd_tap;
pub mod overflow;
#[cfg(feature = "host")]
pub mod owner;
#[cfg(feature = "host")]
mod private_socket;
#[cfg(feature = "host")]
pub mod records;
pub mod sequencer;
#[cfg(feature = "host")]
pub mod start;
#[cfg(feature = "host")]
pub mod state;
pub mod stats;
#[cfg(feature = "host")]
pub mod status;
#[cfg(feature = "host")]
pub mod verifications;
pub mod verified;
