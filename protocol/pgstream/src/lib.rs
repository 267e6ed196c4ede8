//! Both ends of PostgreSQL's physical streaming replication, without I/O: bytes and time in, bytes and events out.
//!
//! A [`Receiver`] is what a shard's agent at the primary site is to its PostgreSQL: a physical replication client with
//! a slot, which reports as flushed what the backup has committed (Slogger 5.1: b-commit). A [`Sender`] is what the
//! backup is to its own standby: a walsender that gives the log up to a bound (Slogger 5.4: apply-to) and not a byte
//! more.
//!
//! The caller owns sockets and clocks. It gives received bytes to `received`, takes events from `poll` until there are
//! none, and sends what `output` holds. `deadline` says when `tick` has something to do.
//!
//! Invariants: a receiver hands out log without a gap and without a repetition, and never reports more than it handed
//! out. A sender sends nothing at or behind its bound. A peer may send anything: buffers are bounded ([`limits`]), and
//! a lie ends its connection with an error that has a name.
//!
//! | module | what it is for |
//! |---|---|
//! | `receiver` | the client's end |
//! | `login` | its login |
//! | `sql` | a client of the simple query protocol, to look at a server |
//! | `failure`, `server_error` | reasons for which it gives up, and errors of a server by SQLSTATE |
//! | `sender` | the server's end |
//! | `access`, `scram` | its login, and the server's side of SCRAM-SHA-256 |
//! | `command` | commands of a replication client |
//! | `lineage` | timelines of the log that is served |
//! | `encode` | messages of a server |
//! | `frame` | messages, cut out of a stream |
//! | `terms` | time, positions, names of slots |
//! | `limits` | bounds |
//!
//! `examples/wal-receive.rs` and `examples/wal-serve.rs` drive both ends with blocking sockets.
//!
//! The client's messages and the decoding of the server's are `postgres-protocol`'s, except for those that only
//! replication has.
//!
//! # Layout
//!
//! Facts of protocol 3.0 as PostgreSQL 15 to 17 speak it (chapters "Frontend/Backend Protocol" and "Streaming
//! Replication Protocol" of its documentation). Numbers are big-endian. Each message begins with a tag of one byte and
//! a length of four, which covers itself; a client's messages before its login have no tag:
//!
//! | content | meaning |
//! |---|---|
//! | 80877103 or 80877104 | may TLS (GSSAPI) be spoken? The answer is one byte, `N`: no |
//! | 80877102 and 8 bytes | cancel a command |
//! | 196608 (3.0), names and values with a zero byte behind each, a zero byte | start-up. `replication` is `true` |
//!
//! | tag | from | message | content |
//! |---|---|---|---|
//! | R | server | authentication | 0 let in; 3 password; 5 MD5, salt; 10 SCRAM, mechanisms; 11, 12 its next steps |
//! | p | client | password | password or hash and a zero byte, or data of SCRAM |
//! | S, K, N | server | setting, key to cancel by, notice | not looked at |
//! | Z | server | ready for a command | a state of one byte |
//! | Q | client | command | text and a zero byte |
//! | T, D, C | server | columns, a row, end of an answer | |
//! | E | server | error | fields: a letter, a text and a zero byte. C is the SQLSTATE, M the message, D the detail |
//! | W | server | the stream begins, both ways | format (1 byte), number of columns (2 bytes), all 0 |
//! | d | both | part of the stream | below |
//! | c | both | end of the stream in this direction | |
//! | X | client | goodbye | |
//!
//! | first byte of a part | from | then |
//! |---|---|---|
//! | w | server | log: position, end of the server's log, wall clock (8 bytes each), bytes |
//! | k | server | sign of life: end of the log, wall clock (8 bytes each), 1 if a reply is wanted |
//! | r | client | status: ends of what is written, flushed, applied, wall clock (8 bytes each), 1 for a reply |
//! | h | client | rows that queries of the standby still see; not looked at |
//!
//! Wall clocks count microseconds since 2000-01-01 00:00 UTC.
//!
//! | command | row of the answer |
//! |---|---|
//! | `IDENTIFY_SYSTEM` | system identifier, timeline, end of the log, NULL |
//! | `SHOW NAME` | value |
//! | `TIMELINE_HISTORY N` | name of the file, content |
//! | `READ_REPLICATION_SLOT S` | kind, position and timeline from which log is kept; three NULLs of an unknown slot |
//! | `CREATE_REPLICATION_SLOT S PHYSICAL RESERVE_WAL` | name, and three more |
//! | `START_REPLICATION SLOT S PHYSICAL X/X TIMELINE N` | none; the stream begins |
//!
//! A timeline that the server has left ends: after its last byte the server sends `c`, and the client sends `c`. A row
//! with the next timeline and the position of its begin follows, then twice the end of an answer, and Z. A start at
//! that very position is answered so without a stream. A server that shuts down sends the end of an answer within the
//! stream.

#![forbid(unsafe_code)]

mod access;
mod command;
mod encode;
mod failure;
mod frame;
pub mod limits;
mod lineage;
mod login;
mod receiver;
mod scram;
mod sender;
mod server_error;
mod sql;
mod terms;

pub use access::{Access, Client, Proof};
pub use failure::{Failure, Phase, SERVER_VERSION_MIN, ServerError};
pub use frame::FrameError;
pub use lineage::{Lineage, LineageError};
pub use login::{Login, LoginError, PasswordMethod};
pub use receiver::{Event, Identity, NotIdle, Receiver, SlotUse, Start};
pub use scram::{ScramVerifier, ScramVerifierError};
pub use sender::{NotWanted, Sender, SenderEnd, SenderEvent, Served, StandbyStatus, Wanted};
pub use sql::{Row, SqlClient, SqlEvent};
pub use terms::{Now, Position, SlotName, SlotNameError, Timing};
