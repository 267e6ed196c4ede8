//! A group at the backup site: what its hosts send, what a recovery takes, what its past was.
//!
//! No threads, no sockets and no I/O but the storage's, so the simulator runs all of it.
//!
//! | module | what it is for |
//! |---|---|
//! | [`group`] | one group: attachment, ingest, acknowledgement, recovery |
//! | [`group_loop`] | the loop of a group: batches, what waits, jobs beside it |
//! | [`connection`] | one host's connection: hello, frames to groups, room, deadlines |
//! | [`groups`] | the groups of a server by name, and their number |
//! | [`places`] | the number of connections, for each peer |
//! | [`history`] | any point in time of the window: resolved, held, shown |
//! | [`travel`] | what operators do with the past |
//! | [`manifest`] | the small files beside a journal |
//! | [`quarantine`] | segments on record as damaged |
//! | [`text`] | times and sizes, for people |
#![forbid(unsafe_code)]

pub mod connection;
pub mod group;
pub mod group_loop;
pub mod groups;
pub mod history;
pub mod manifest;
pub mod places;
pub mod quarantine;
pub mod text;
pub mod travel;
