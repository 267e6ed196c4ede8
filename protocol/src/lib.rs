//! What both Tidelock sites speak.
//!
//! Everything here is sans-I/O: bytes and time are arguments, actions are return values. The same
//! code runs under the daemon's and the backup server's loops and under the simulator.
//!
//! | module | what it is for |
//! |---|---|
//! | [`ids`] | newtypes for every id, count and epoch |
//! | [`vector`] | count vectors: what a packet depends on, what is committed (PipeCloud 3.2.2) |
//! | [`hlc`] | hybrid logical clock (Retroscope 2) |
//! | [`record`] | one write as it travels and as it stands in the journal: the same bytes |
//! | [`frame`] | the framing of the link: versioned, bounded, checksummed |
//! | [`message`] | control messages |
//! | [`sender`] | backlog, transmission and resumption, at the primary |
//! | [`receiver`] | contiguity, epoch and checksum checks, at the backup |
//! | [`tag`] | what a packet between two members carries (PipeCloud 4.2) |
//! | [`commit`] | the committed vector C as a host sees it |
//! | [`lease`] | who may answer clients, and until when (PacificA 2.3) |
//! | [`bounds`] | what a peer may say: names, texts, and numbers that can be true |
//! | [`rate`] | how often something is done at most |
//! | [`limits`] | every bound of the protocol in one place |
#![forbid(unsafe_code)]

pub mod bounds;
pub mod commit;
pub mod frame;
pub mod hlc;
pub mod ids;
pub mod lease;
pub mod limits;
pub mod machine;
pub mod message;
pub mod part;
pub mod rate;
pub mod receiver;
pub mod record;
pub mod sender;
pub mod tag;
pub mod vector;
