//! The host daemon: drivers of its loops (rings, sockets, files, threads), the NBD tap, control API, metrics and the
//! `tidelock` CLI. The loops themselves are in `tidelock-daemon-core`.

#[macro_use(eprintln)]
extern crate tidelock_config;

pub mod adoption;
pub mod cli;
pub mod clock;
pub mod config;
pub mod control;
pub mod driver;
#[cfg(test)]
mod example_status;
pub mod gate_seen;
pub mod held_gate;
pub mod host;
pub mod metrics;
pub mod nbd_tap;
mod private_socket;
pub mod stores;
