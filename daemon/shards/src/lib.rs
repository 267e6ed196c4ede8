//! The primary side of one PostgreSQL shard: its log goes to the backup with stamps (Slogger 5.1, 5.2), from an
//! unmodified PostgreSQL. Bytes, events and time in, actions out.
//!
//! ```text
//!                     ┌──────────────────────── ShardAgent ────────────────────────┐
//!  PostgreSQL ══ log ═╪═▶ Receiver ─▶ Cutter ─▶ Backlog ─▶ Psa ─▶ Backup, Doubt ───╪═▶ backup
//!      ▲  ▲           │      ▲          ▲ Belief ◀─ verdicts      │                │
//!      │  └ b-commit ─╪──────┘          │ (the clock)             ▼                │
//!      └ looks, NOPs ═╪═▶ SqlClient ────┴── what standbys have ─▶ commit   Reply ◀─╪══ backup
//!                     └────────────────────────────────────────────────────────────┘
//! ```
//!
//! The caller owns sockets and clocks: it carries out [`Action`]s, gives received bytes, and sends what
//! [`ShardAgent::output`] holds. Before each piece of the log it tells the clock guard's verdict
//! ([`ShardAgent::clock`]). `examples/shard-agent.rs` is such a caller.
//!
//! Invariants:
//! - No entry is handed out that the log does not have, that synchronous standbys lack, or whose stamp is not believed.
//! - Memory is bounded: [`Config::backlog_max_bytes`], an unfinished entry, and what one read of a socket gives.
//! - Never more than the backup's b-commit is reported as flushed, so the server's slot keeps the rest.
//! - A peer may send anything; a lie ends its connection with a failure that has a name.
//!
//! `docs/shard-logs.md`, *PostgreSQL at the primary site*, has the rules for operators and the argument for the stamps.
//!
//! | module | what it is for |
//! |---|---|
//! | `agent` | the machine: its inputs, and its actions |
//! | `server` | its two connections to the shard's primary |
//! | `ship` | what goes to the backup |
//! | `cutter` | the log, cut into entries |
//! | `backlog` | entries that are not durable at the backup |
//! | `belief` | the clock guard's verdicts, and stamps that are believed |
//! | `look` | queries about the server, and their answers |
//! | `failure` | why a server is given up, why a shard stands, and what to do |
//! | `store` | [`StoreHost`]: all agents of a store at this host, and their link to the backup |
//! | `status` | state for operators |
//! | `config` | configuration |
#![forbid(unsafe_code)]

mod agent;
mod backlog;
mod belief;
mod config;
mod cutter;
mod failure;
mod look;
mod server;
mod ship;
mod status;
mod store;

pub use agent::{Action, Conn, ShardAgent};
pub use config::Config;
pub use failure::{ClockStand, HostFailure, Stand};
pub use look::{SlotStanding, WalStatus};
pub use status::{FailureStatus, ServerStatus, StandStatus, Status};
pub use store::{StoreAction, StoreHost, StoreHostStatus, StoreNames};
