//! The server of the backup site, and its command line: threads, sockets and processes around the groups of
//! `tidelock-replica`.
//!
//! | module | what it is for |
//! |---|---|
//! | [`server`] | connections, owners of groups, exports, snapshots, machines |
//! | [`cli`] | the command line |
#![forbid(unsafe_code)]

#[macro_use(eprint, eprintln, print, println)]
extern crate tidelock_config;

pub mod cli;
pub mod server;
