//! Each member belongs to one host, on record in `group.json`.
//!
//! ```text
//!  nobody's ──first attachment──▶ host A's ──`tidelock-backup member move`──▶ host B's, which has no run yet
//! ```
//!
//! Invariants:
//! - Nothing that another host sends changes the owner, the disks, the machine description or the run of a member, whatever
//!   numbers it gives.
//! - A host that has no record of a member that it owns was installed anew, or has lost its state directory. Its disks may be
//!   anybody's, so it is refused until the operator gives the member to it again.
//! - After a move the new owner's disks are compared as a whole, whatever its own record says.

use super::attach::{Refusal, refuse};
use super::{Group, GroupError, Now};
use crate::manifest;
use serde::{Deserialize, Serialize};
use thiserror::Error;
use tidelock_protocol::ids::{GroupId, Incarnation, MonoNanos};
use tidelock_protocol::message::{Attach, RefusalKind, Writing};
use tidelock_storage::Storage;
use tidelock_store::journal::Standing;

/// A member that was given to a host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Moved {
    /// The group.
    pub group: String,
    /// The member.
    pub member: String,
    /// Its owner before; `None`: no host had attached it yet.
    pub from: Option<String>,
    /// Its owner now.
    pub to: String,
}

/// Why a member is not moved.
#[derive(Debug, Error)]
pub enum MoveError {
    /// There is none of this name.
    #[error("group {group} has no member {member}; it has: {known}")]
    Unknown {
        /// The group.
        group: String,
        /// As asked for.
        member: String,
        /// Those that there are.
        known: String,
    },
    /// The configuration forbids the host this member.
    #[error("{0}")]
    Forbidden(String),
    /// The owner is connected.
    #[error(
        "{member} is attached by {host} at this moment: stop tidelockd there, or take the group out of its configuration, \
         and move the member then"
    )]
    Attached {
        /// The member.
        member: String,
        /// Its owner.
        host: String,
    },
    /// The owner may still answer clients.
    #[error(
        "{host}, which has {member} now, may hold its lease for another {remaining_ms} ms, and so answer clients: ask again \
         then"
    )]
    Lease {
        /// The member.
        member: String,
        /// Its owner.
        host: String,
        /// How long.
        remaining_ms: u64,
    },
    /// Hosts attach members of a recovered group no more.
    #[error(
        "group {0} was recovered at this site: no host can attach its members any more, so there is nothing to move"
    )]
    Recovered(String),
    /// The group does not work.
    #[error(transparent)]
    Group(#[from] GroupError),
    /// The group is not open.
    #[error("{0}")]
    Unavailable(String),
}

impl<S: Storage> Group<S> {
    /// The group's identity.
    #[must_use]
    pub fn id(&self) -> GroupId {
        self.manifest.id
    }

    /// A host that was told another identity knows another group of this name.
    pub(super) fn check_identity(&self, told: Option<GroupId>) -> Result<(), Refusal> {
        match told {
            Some(told) if told != self.manifest.id => {
                let (group, id) = (&self.manifest.group, self.manifest.id);
                refuse(
                    RefusalKind::Mismatch,
                    format!(
                        "this host knows group {group} as {told}, but the group of that name at this backup server is {id}: \
                         the group was removed and created anew, or the host's state directory or this server's data was \
                         copied from another installation. Nothing is replicated. Check backup.address at the host. If this \
                         is the group to protect to, stop tidelockd there, remove the group's directory below state_dir, and \
                         start it: the disks are compared"
                    ),
                )
            }
            _ => Ok(()),
        }
    }

    /// A writer's owner has a record of it, if it has attached it before.
    pub(super) fn check_has_record(
        &self,
        host: &str,
        attach: &Attach,
        writing: &Writing,
    ) -> Result<(), Refusal> {
        let Some(known) = self.manifest.member(writing.writer).filter(|of| of.run.is_some()) else {
            return Ok(());
        };
        let has_record = writing.before.is_some() || attach.group_id.is_some();
        if !has_record && writing.incarnation != known.incarnation {
            let (group, member) = (&self.manifest.group, &attach.member);
            return refuse(
                RefusalKind::Mismatch,
                format!(
                    "{host} has attached {member} of group {group} before, and has no record of it now: it was installed \
                     anew, or its state directory was lost. Nothing is replicated. If its disks are the ones to protect, \
                     run `tidelock-backup member move {group} {member} --to {host}` at the backup server: the disks are \
                     compared as a whole then"
                ),
            );
        }
        Ok(())
    }

    /// A member belongs to this host, or to nobody yet.
    pub(super) fn check_claim(&self, host: &str, member: &str) -> Result<(), Refusal> {
        self.options.check_member(&self.manifest.group, host, member)?;
        match self.owner_of(member) {
            Some(owner) if owner != host => {
                let group = &self.manifest.group;
                refuse(
                    RefusalKind::Forbidden,
                    format!(
                        "{member} of group {group} belongs to host {owner}, not to {host}. Nothing of {host} is taken. If \
                         {host} is to have it from now on, stop tidelockd at {owner}, and run `tidelock-backup member move \
                         {group} {member} --to {host}` at the backup server"
                    ),
                )
            }
            _ => Ok(()),
        }
    }

    /// The host that a member belongs to.
    pub(super) fn owner_of(&self, member: &str) -> Option<&str> {
        if let Some(host) = self.manifest.followers.get(member) {
            return Some(host);
        }
        let index = self.manifest.writers.iter().position(|name| name == member)?;
        let owner = self.manifest.members[index].as_ref().filter(|of| !of.is_seeded());
        owner.map(|of| of.host.as_str())
    }

    /// The time from which on a member may be given to another host; `None`: no lease of its owner is waited for.
    #[must_use]
    pub fn may_move_from(&self, member: &str) -> Option<MonoNanos> {
        let host = self.owner_of(member).filter(|_| !self.given_up.contains(member))?;
        Some(self.grace_of(host).until())
    }

    /// Gives a member to a host: its next attachment is a first one. Durable when it returns.
    pub fn move_member(&mut self, now: Now, member: &str, to: &str) -> Result<Moved, MoveError> {
        let group = self.manifest.group.clone();
        let writer = self.manifest.writers.iter().position(|name| name == member);
        let is_removed = |i: usize| self.journal.state().writers[i].standing == Standing::Removed;
        let is_there =
            self.manifest.followers.contains_key(member) || writer.is_some_and(|i| !is_removed(i));
        if !is_there {
            let known = self.known_members().join(", ");
            return Err(MoveError::Unknown { group, member: member.to_owned(), known });
        }
        if self.fenced_reason().is_some() {
            return Err(MoveError::Recovered(group));
        }
        let forbidden = |(_, reason)| MoveError::Forbidden(reason);
        self.check_host(to).map_err(forbidden)?;
        self.options.check_member(&group, to, member).map_err(forbidden)?;
        let from = self.owner_of(member).map(str::to_owned);
        if let Some(host) = &from {
            let (member, host) = (member.to_owned(), host.clone());
            let attached = writer.is_some_and(|i| self.slots[i].link.is_some())
                || self.followers.iter().any(|f| f.member == member);
            if attached {
                return Err(MoveError::Attached { member, host });
            }
            let has_lease = !self.given_up.contains(&member);
            let remaining_ms = if has_lease { self.lease_of(&host, now) } else { 0 };
            if remaining_ms > 0 {
                return Err(MoveError::Lease { member, host, remaining_ms });
            }
        }
        let mut manifest = self.manifest.clone();
        match writer {
            Some(i) => {
                if let Some(of) = manifest.members[i].as_mut().filter(|of| !of.is_seeded()) {
                    of.host = to.to_owned();
                    of.incarnation = Incarnation(0);
                    (of.run, of.proposed, of.clean) = (None, None, None);
                }
            }
            None => drop(manifest.followers.insert(member.to_owned(), to.to_owned())),
        }
        manifest.write(&self.storage).map_err(GroupError::from)?;
        self.manifest = manifest;
        self.attached_by.remove(member);
        Ok(Moved { group, member: member.to_owned(), from, to: to.to_owned() })
    }
}

impl super::GroupOptions {
    /// The operator's list of members and hosts, where there is one.
    pub(super) fn check_member(
        &self,
        group: &str,
        host: &str,
        member: &str,
    ) -> Result<(), Refusal> {
        if self.members.is_empty() || self.members.get(member).is_some_and(|of| of == host) {
            return Ok(());
        }
        let listed = match self.members.get(member) {
            Some(other) => format!("the backup server's configuration gives it to {other}"),
            None => "the backup server's configuration does not name it".to_owned(),
        };
        refuse(
            RefusalKind::Forbidden,
            format!(
                "host {host} may not attach {member} of group {group}: {listed} (groups.{group}.members). Change the list \
                 there and restart the server, or correct the host's configuration"
            ),
        )
    }

    /// A writer keeps its place in the group for good, and the hosts that do not name it are refused. So where there is a
    /// list, no host adds one that is not on it.
    pub(super) fn check_new(&self, group: &str, writers: &[String]) -> Result<(), Refusal> {
        let unlisted = |name: &&String| !self.members.contains_key(*name);
        match writers.iter().find(unlisted).filter(|_| !self.members.is_empty()) {
            None => Ok(()),
            Some(name) => refuse(
                RefusalKind::Forbidden,
                format!(
                    "the host's configuration adds the writer {name} to group {group}, and the backup server's does not \
                     name it (groups.{group}.members). Add it to the list there and restart the server, or correct the \
                     host's configuration"
                ),
            ),
        }
    }
}

/// A member without disks must be one of those that the group's hosts have agreed on.
pub(super) fn check_is_named(peers: &[String], member: &str) -> Result<(), Refusal> {
    if peers.iter().any(|peer| manifest::is_of(peer, member)) {
        return Ok(());
    }
    refuse(
        RefusalKind::Invalid,
        format!(
            "{member} is not among the group's members, as the host's own configuration names them"
        ),
    )
}
