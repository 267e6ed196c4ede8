//! Facts on members by their names, beside their records: the policy for the time without this server, and the machine
//! to boot.
//!
//! Every checkpoint has all of it, so the number of names and the bytes of each part are bounded here.

use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use tidelock_protocol::bounds::is_name;
use tidelock_protocol::limits::{MACHINES_MAX_BYTES, NAME_MAX_BYTES, PEERS_MAX, WRITERS_MAX};
use tidelock_protocol::machine::Machine;
use tidelock_protocol::message::{Mode, Policy};

/// Most names of members that the journal has something of: all writers, and all members that hosts may have agreed on.
pub const NAMES_MAX: usize = WRITERS_MAX as usize + PEERS_MAX;

/// Most bytes of [`MemberFacts`], and of a recovery's exposures: names, numbers, and the machines.
pub(super) const MEMBERS_MAX_BYTES: usize =
    NAMES_MAX * (4 * (NAME_MAX_BYTES + 2) + 64) + 2 * MACHINES_MAX_BYTES as usize;

/// A member's policy for the time without this server, as the member has said it last.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MemberPolicy {
    /// The mode in force.
    pub mode: Mode,
    /// Earliest time since when it may be in force, by this server's wall clock in milliseconds since the Unix epoch;
    /// 0: nobody knows.
    pub mode_since_unix_ms: u64,
    /// Milliseconds that something waits for this server before the member's gate opens; `None`: it never does.
    pub after_ms: Option<u64>,
    /// Time at which its gate was opened for that reason, by its own wall clock in milliseconds since the Unix epoch;
    /// `None`: it was not, or that is over.
    pub degraded_since_unix_ms: Option<u64>,
    /// True if the member's last run has ended with everything committed.
    pub has_left: bool,
    /// True if a run of the member that has not reached this server answers clients.
    pub serves_unreached: bool,
}

impl MemberPolicy {
    /// The policy as hosts say it.
    #[must_use]
    pub fn policy(&self) -> Policy {
        let Self { mode, after_ms, degraded_since_unix_ms, .. } = *self;
        Policy { mode, after_ms, degraded_since_unix_ms }
    }
}

/// A member whose clients may have seen what a recovery does not have.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Exposure {
    /// The member.
    pub member: String,
    /// The host that attached it last.
    pub host: String,
    /// The policy of its group there, in milliseconds; `None`: it holds, or what is known is that it was in mode async.
    pub after_ms: Option<u64>,
    /// True if the host has said that it does not hold. If not, it may have begun since it sent what was heard last.
    pub is_known: bool,
    /// Earliest beginning, in milliseconds since the Unix epoch: by the host's wall clock if it is
    /// known to have degraded, else by this server's. If the server was started since the host was heard
    /// last, it is the time of the member's last record, as far as the hosts' clocks are right. `None`: nobody
    /// knows.
    pub since_unix_ms: Option<u64>,
    /// True if the member answers clients also if it was started and has not reached this server, or after its gate was removed.
    pub serves_unreached: bool,
}

/// A member's machine.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct KeptMachine {
    /// Description that the member's host has said last; `None`: it has sent none.
    pub described: Option<Machine>,
    /// Description that an operator has approved last.
    pub approved: Option<Machine>,
}

impl KeptMachine {
    /// True if an operator has approved the host's present description.
    #[must_use]
    pub fn is_approved(&self) -> bool {
        let lines = |machine: &Option<Machine>| machine.as_ref().map(Machine::lines);
        lines(&self.described) == lines(&self.approved)
    }
}

/// Bytes of a machine description in the journal.
#[must_use]
pub fn machine_bytes(machine: &Machine) -> u64 {
    postcard::to_stdvec(machine).expect("plain data").len() as u64
}

/// Facts of the journal on members by name.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemberFacts {
    /// Policies for the time without this server.
    pub policies: BTreeMap<String, MemberPolicy>,
    /// Machines. Hosts' descriptions and approved ones have [`MACHINES_MAX_BYTES`] each.
    pub machines: BTreeMap<String, KeptMachine>,
}

impl MemberFacts {
    pub(super) fn is_in_bounds(&self) -> bool {
        are_names(self.policies.keys())
            && are_names(self.machines.keys())
            && are_machines_in_bounds(&self.machines)
    }
}

/// True if a map with this name more is within the bounds.
pub(super) fn fits<T>(map: &BTreeMap<String, T>, name: &str) -> bool {
    is_name(name) && (map.len() < NAMES_MAX || map.contains_key(name))
}

fn are_names<'a>(names: impl ExactSizeIterator<Item = &'a String>) -> bool {
    names.len() <= NAMES_MAX && names.into_iter().all(|name| is_name(name))
}

pub(super) fn are_machines_in_bounds(machines: &BTreeMap<String, KeptMachine>) -> bool {
    let fit = |of: fn(&KeptMachine) -> Option<&Machine>| {
        let mut all = machines.values().filter_map(of);
        all.clone().map(machine_bytes).sum::<u64>() <= MACHINES_MAX_BYTES
            && all.all(|machine| machine.check().is_ok())
    };
    fit(|of| of.described.as_ref()) && fit(|of| of.approved.as_ref())
}

/// True if a recovery's exposures are within the bounds.
pub(super) fn are_exposures_in_bounds(exposed: &[Exposure]) -> bool {
    exposed.len() <= NAMES_MAX && exposed.iter().all(|of| is_name(&of.member) && is_name(&of.host))
}
