//! The host daemon: taps, sequencer, local disk, link, control API and the `tidelock` CLI.

pub mod activity;
pub mod adoption;
pub mod backlog;
pub mod ceiling;
pub mod cli;
pub mod clock;
pub mod config;
pub mod control;
pub mod copy_job;
mod copy_window;
pub mod degrade;
mod durable;
pub mod handover;
pub mod heartbeat;
pub mod host;
pub mod link;
pub mod metrics;
pub mod overflow;
pub mod owner;
pub mod sequencer;
pub mod state;
pub mod stats;
pub mod status;
pub mod verified;
