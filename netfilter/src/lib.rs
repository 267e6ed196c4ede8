//! The gate: no packet leaves for a client before the far site holds every write that the packet
//! may depend on (PipeCloud 4.3).
//!
//! | module | what it is for |
//! |---|---|
//! | [`packet`] | what kind of packet it is, from its first bytes |
//! | [`release_queue`] | who waits and who may leave: the decision, without any I/O |
//! | [`verdicts`] | decisions as the kernel takes them: single ones and "all up to" |
//! | [`nfqueue`] | the kernel's packet queue, over netlink |
//! | [`rules`] | the packet-filter rules that send a guest's packets into the queue |
//! | [`paused`] | whether this host stood still while its lease ran |
//! | [`gate`] | the thread that ties them together, and the handles that drive it |
//!
//! The gate fails closed. The rules carry no bypass and outlive the daemon: while nobody listens,
//! the kernel drops what a guest sends, and TCP sends it again later.
#![deny(unsafe_code)]

pub mod gate;
mod netlink;
pub mod nfqueue;
pub mod packet;
pub mod paused;
pub mod release_queue;
pub mod rules;
mod sys;
pub mod verdicts;

pub use sys::now;
