//! The running server: threads, sockets and files around the groups' state machines.
//!
//! | module | what it is for |
//! |---|---|
//! | [`config`] | the configuration file |
//! | [`inbox`] | what waits for a group's owner, bounded in bytes |
//! | [`owner`] | one thread for each group, which alone touches its state |
//! | [`registry`] | the groups by name, and the lock on the data directory |
//! | [`connection`] | one host's connection |
//! | `peer` | the server, as a connection sees it |
//! | [`listener`] | accepting hosts, TLS |
//! | [`budget`] | room for connections, for each peer |
//! | `peer_log` | a bound on what peers write into the log |
//! | [`nbd`] | disks of recovered groups and views as NBD exports |
//! | [`nbd_client`] | images that `qemu-nbd` serves |
//! | [`exports`] | where those are offered |
//! | [`views`] | views of the past that are open |
//! | [`snapshots`] | snapshots that are made and kept |
//! | [`qemu`] | QEMU's tools for its image formats |
//! | `orders` | orders of operators that may have to wait in their group |
//! | `recovering` | a recovery, from the checks before the fence to the offer of its disks |
//! | `repair` | cutting a journal that cannot be opened |
//! | [`travel`] | requests about the past |
//! | `content` | what disks had at points, and its digests |
//! | [`bookmarks`] | bookmarks that hosts ask for |
//! | [`control`] | the socket of the command line |
//! | [`machines`] | recovered machines that run here |
//! | [`metrics`] | Prometheus over HTTP |

mod bookmarks;
pub mod budget;
pub mod clock;
pub mod config;
pub mod connection;
mod content;
pub mod control;
pub mod exports;
pub mod inbox;
pub mod listener;
pub mod machines;
pub mod metrics;
pub mod nbd;
pub mod nbd_client;
mod orders;
pub mod owner;
mod peer;
mod peer_log;
pub mod qemu;
mod recovering;
pub mod registry;
mod repair;
mod run;
pub mod snapshots;
pub mod stores;
pub mod travel;
pub mod views;

pub use run::{Role, Server, StartError};
