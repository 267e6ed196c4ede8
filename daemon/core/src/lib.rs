//! Decisions of the host daemon, sans-I/O: events and the time go in, and what is to be done comes out.
//!
//! | module | what it is for |
//! |---|---|
//! | [`owner`] | the loop of one member, which holds the parts of the next four lines |
//! | [`sequencer`] | the order of a writer's operations: seq, HLC, dependencies, overlaps |
//! | [`copy_job`] | first copy, comparison and repair, as records in that order |
//! | [`activity`] | the extents in which the sites may differ after a crash |
//! | [`backlog`], [`overflow`] | records on disk while the backup is away, and what happens at the limit |
//! | [`link`] | the loop of a host's connection to the backup, and each member's end of it |
//! | [`group`] | the loop of a group: mode, policy ([`degrade`]), planned switch ([`handover`]) |
//! | [`start`] | what a member's run goes by of what the runs before have left ([`state`], [`records`], [`ceiling`]) |
//! | [`heartbeat`] | a watch that misses a record that does not come back |
//! | [`verifications`], [`verified`] | comparisons of the sites on a schedule, and what the last one found |
//! | [`status`], [`stats`], [`words`] | what all of this says of itself |
//!
//! The crate knows no tokio, io_uring, socket or clock, and files only through `tidelock-storage`. The daemon's
//! drivers run these loops in production, and the simulator runs the same.
#![forbid(unsafe_code)]

pub mod activity;
pub mod backlog;
pub mod ceiling;
pub mod copy_job;
pub mod degrade;
pub mod group;
pub mod handover;
pub mod heartbeat;
pub mod link;
pub mod overflow;
pub mod owner;
pub mod records;
pub mod sequencer;
pub mod start;
pub mod state;
pub mod stats;
pub mod status;
pub mod verifications;
pub mod verified;
pub mod words;
