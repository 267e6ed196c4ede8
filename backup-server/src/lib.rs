//! The backup site.
//!
//! | module | what it is for |
//! |---|---|
//! | [`journal`] | records and notes in segment files, durable before they are acknowledged |
//! | [`group`] | one group: attachment, ingest, acknowledgement, recovery; no I/O but the storage's |
//! | [`hearing`] | one host's connection: the hello, and what becomes of each frame |
//! | [`fold`] | the journal's records go into disk images, outside the acknowledgement path |
//! | [`image`] | what was folded of a disk, with checksums |
//! | [`view`] | a disk with what is not folded yet |
//! | [`history`] | any point in time of the window: resolved, held, shown |
//! | [`damage`] | what was acknowledged and cannot be read any more |
//! | [`quarantine`] | segments on record as damaged |
//! | [`travel`] | what operators do with the past |
//! | [`window_log`] | a past for other stores, by key and value |
//! | [`manifest`] | the small files beside a journal |
//! | `server` | threads, sockets and files around all that |
//! | `boot` | QEMU on recovered disks |
//! | `cli` | the command line |
#![forbid(unsafe_code)]

#[cfg(feature = "server")]
#[macro_use(eprint, eprintln, print, println)]
extern crate tidelock_config;

/// The version of all that is in a group's directory: the journal, the images and the small files beside them.
pub const FORMAT: u32 = 1;

#[cfg(feature = "server")]
pub mod boot;
#[cfg(feature = "server")]
pub mod cli;
pub mod damage;
pub mod extents;
pub mod fold;
pub mod group;
pub mod hearing;
pub mod history;
pub mod image;
pub mod journal;
pub mod manifest;
pub mod quarantine;
#[cfg(feature = "server")]
pub mod server;
pub mod text;
pub mod travel;
pub mod view;
pub mod window_log;
