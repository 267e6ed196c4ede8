//! The backup site.
//!
//! | module | what it is for |
//! |---|---|
//! | [`group`] | one group: attachment, ingest, acknowledgement, recovery; no I/O but the storage's |
//! | [`hearing`] | one host's connection: the hello, and what becomes of each frame |
//! | [`history`] | any point in time of the window: resolved, held, shown |
//! | [`quarantine`] | segments on record as damaged |
//! | [`travel`] | what operators do with the past |
//! | [`manifest`] | the small files beside a journal |
//! | `server` | threads, sockets and files around all that |
//! | `boot` | QEMU on recovered disks |
//! | `cli` | the command line |
#![forbid(unsafe_code)]

#[cfg(feature = "server")]
#[macro_use(eprint, eprintln, print, println)]
extern crate tidelock_config;

#[cfg(feature = "server")]
pub mod boot;
#[cfg(feature = "server")]
pub mod cli;
pub mod group;
pub mod hearing;
pub mod history;
pub mod manifest;
pub mod quarantine;
#[cfg(feature = "server")]
pub mod server;
pub mod text;
pub mod travel;
