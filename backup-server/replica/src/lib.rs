//! A group at the backup site: what its hosts send, what a recovery takes, what its past was.
//!
//! No threads, no sockets and no I/O but the storage's, so the simulator runs all of it.
//!
//! | module | what it is for |
//! |---|---|
//! | [`group`] | one group: attachment, ingest, acknowledgement, recovery |
//! | [`group_loop`] | the loop of a group: batches, what waits, jobs beside it |
//! | [`hearing`] | one host's connection: the hello, and what becomes of each frame |
//! | [`history`] | any point in time of the window: resolved, held, shown |
//! | [`places`] | the number of connections, for each peer |
//! | [`travel`] | what operators do with the past |
//! | [`manifest`] | the small files beside a journal |
//! | [`quarantine`] | segments on record as damaged |
//! | [`text`] | times and sizes, for people |
#![forbid(unsafe_code)]

pub mod group;
pub mod group_loop;
pub mod hearing;
pub mod history;
pub mod manifest;
pub mod places;
pub mod quarantine;
pub mod text;
pub mod travel;
