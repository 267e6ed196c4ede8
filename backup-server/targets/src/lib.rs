//! Where a recovered member runs: with QEMU, with nothing from the dead site. The description of the machine was sent when
//! protection began, and says no more than sizes, kinds and names. Files and QEMU arguments are this site's own.
//!
//! | module | what it is for |
//! |---|---|
//! | [`site`] | `boot.toml`: what this site says about machines |
//! | [`qemu`] | QEMU's command line |
//! | [`jail`] | the user that QEMU runs as |
#![forbid(unsafe_code)]

mod disk;
pub mod jail;
pub mod qemu;
pub mod site;

pub use disk::ExportedDisk;
pub use qemu::{BootError, Guest, Overrides, Sockets, command_line};
