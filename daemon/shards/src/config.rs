//! Configuration of an agent.

use std::time::Duration;
use tidelock_pgstream::{Login, SlotName, Timing};
use tidelock_shard::link::ENTRY_MAX_BYTES;

/// Configuration of an agent.
#[derive(Clone, Debug)]
pub struct Config {
    /// Hosts that may run the shard's primary, from 0; the caller knows their addresses. At least one.
    pub hosts: usize,
    /// Login of both connections. The role has the attributes LOGIN and REPLICATION, and is a member of `pg_monitor`.
    pub login: Login,
    /// Any database that the role may connect to.
    pub database: String,
    /// Physical replication slot, which the agent makes on each host that becomes the primary.
    pub slot: SlotName,
    /// System identifier of the shard's PostgreSQL. `None`: the backup's, or the first server's.
    pub system: Option<u64>,
    /// Times of the connections to PostgreSQL.
    pub timing: Timing,
    /// Log that is kept until it is durable at the backup. Beyond it nothing is read from PostgreSQL, whose slot keeps
    /// the rest.
    pub backlog_max_bytes: usize,
    /// Longest entry; at most [`ENTRY_MAX_BYTES`].
    pub entry_max_bytes: usize,
    /// Content of one message to the backup, about.
    pub message_max_bytes: usize,
    /// Log that is sent and not acknowledged, at most: the product of bandwidth and round trip, and more.
    pub unacked_max_bytes: u64,
    /// Time without an answer of the backup, after which it is asked where it stands.
    pub patience: Duration,
    /// Least time between two NOPs.
    pub nop_every: Duration,
    /// Time between two looks at the server.
    pub look_every: Duration,
    /// Time between two looks while log waits for a synchronous standby.
    pub look_pause: Duration,
    /// Time for which the clock must be believed before stamps are: longer than a commit takes from its stamp to its
    /// place in the log.
    pub settle: Duration,
    /// Age up to which a verdict of the clock guard counts.
    pub verdict_age_max: Duration,
    /// `max_clock_error`, the same on all hosts of the store: greatest ε with which a clock is believed.
    pub clock_error_max_ns: u64,
    /// True: a slot that is missing or lost is made again without an order, and the log goes on behind a gap. The backup
    /// copies the shard anew by itself then ([`ShardAgent::copied_anew`](crate::ShardAgent::copied_anew)).
    pub mends: bool,
    /// Pause before the next host is tried.
    pub retry: Duration,
    /// Pause after all hosts have failed, one of them for a reason that does not pass by itself.
    pub retry_long: Duration,
}

impl Config {
    /// Usual values.
    #[must_use]
    pub fn new(hosts: usize, login: Login, slot: SlotName, clock_error_max_ns: u64) -> Self {
        Self {
            hosts: hosts.max(1),
            login,
            database: "postgres".into(),
            slot,
            system: None,
            timing: Timing::default(),
            backlog_max_bytes: 64 << 20,
            entry_max_bytes: ENTRY_MAX_BYTES,
            message_max_bytes: 1 << 20,
            unacked_max_bytes: 16 << 20,
            patience: Duration::from_secs(2),
            nop_every: Duration::from_millis(5),
            look_every: Duration::from_secs(1),
            look_pause: Duration::from_millis(1),
            settle: Duration::from_secs(1),
            verdict_age_max: Duration::from_secs(2),
            clock_error_max_ns,
            mends: false,
            retry: Duration::from_millis(100),
            retry_long: Duration::from_secs(2),
        }
    }
}
