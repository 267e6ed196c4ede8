//! What a group is: its writers, the members that each host knows, the form. How it changes.
//!
//! A host that does not know a member takes its packets for an outsider's and merges no tag of
//! theirs, so two hosts that differ in this must never both answer clients. So a change is taken
//! from the first host that brings it when no member of another host is attached and no other
//! host's lease can hold any more; from then on whoever brings the old one is refused. Writers are
//! added at the end, and removed by the operator ([`Group::remove`]): their numbers stay.
//!
//! The form changes only while every record is in the cut: the records before it say what they
//! depend on in another way than those after it.

use super::attach::Unattached;
use super::durable::{NotOnRecord, NotYet};
use super::{Group, GroupError, HostStatus, Link, Now, WriterSlot};
use crate::manifest::{Manifest, Member};
use thiserror::Error;
use tidelock_protocol::ids::{MonoNanos, WriterId};
use tidelock_protocol::lease::Grace;
use tidelock_protocol::message::{RefusalKind, Tagging};
use tidelock_storage::Storage;
use tidelock_store::journal::{Note, Shape, Standing, Ticket};

/// Why a member is not removed.
#[derive(Debug, Error)]
pub enum RemoveError {
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
    /// Its host is connected.
    #[error("{member} is attached by {host}: take it out of the configuration there first")]
    Attached {
        /// The member.
        member: String,
        /// Its host.
        host: String,
    },
    /// It is the last one.
    #[error("{member} is the group's last writer: remove the group's directory instead")]
    Last {
        /// The member.
        member: String,
    },
    /// Being put on record: to be asked again when this is durable.
    #[error("the removal is being put on record")]
    NotYet(Ticket),
    /// It cannot be put on record.
    #[error("the removal cannot be put on record: {0}")]
    Journal(String),
    /// The group does not work.
    #[error(transparent)]
    Group(#[from] GroupError),
}

impl<S: Storage> Group<S> {
    /// A host attaches with this shape: the group's, or a change that can be taken now.
    pub(super) fn reshape(
        &mut self,
        now: Now,
        host: &str,
        writers: &[String],
        tagging: &Tagging,
    ) -> Result<(), Unattached> {
        let known = &self.manifest.writers;
        if writers == known && *tagging == self.tagging() {
            self.check_on_record(self.shaped_at)?;
            // Not before: who becomes a writer must not be lost as a follower without being one.
            return self.change_manifest(Manifest::forget_followers).map_err(cannot);
        }
        let mismatch = |reason| Err((RefusalKind::Mismatch, reason).into());
        if !writers.starts_with(known) {
            return mismatch(format!(
                "the host's configuration has the writers {writers:?}, the backup {known:?}. \
                 Writers are added at the end; to remove one, use `tidelock-backup remove` here \
                 and removed = true in every host's configuration"
            ));
        }
        self.options.check_new(&self.manifest.group, &writers[known.len()..])?;
        let others = self.other_hosts(host);
        if let Some(other) = others.iter().find(|other| self.is_connected(other)) {
            let differs = self.what_differs(writers, tagging);
            return mismatch(format!(
                "host {host} has another group in its configuration than host {other}, which is \
                 connected: {differs}. Both must have the same. \
                 Stop the daemon of {other}, change its configuration, and start it again"
            ));
        }
        let remaining_ms = others.iter().map(|other| self.lease_of(other, now)).max().unwrap_or(0);
        if remaining_ms > 0 {
            let reason = format!(
                "the group's members change, and the leases of the hosts that do not know it yet \
                 may hold for another {remaining_ms} ms"
            );
            return Err((RefusalKind::Stopping, reason).into());
        }
        // Everything received is looked at, and must be durable.
        self.check_on_record(self.journal.ticket())?;
        let state = self.journal.state();
        if tagging.form != state.form && !self.is_all_in_the_cut() {
            return mismatch(format!(
                "the group is in the {} form and has records that depend on others that have not \
                 arrived: let all of its hosts catch up in this form first",
                state.form
            ));
        }
        self.put_on_record(writers, tagging)
    }

    /// The group's tagging, as its hosts have agreed on it.
    fn tagging(&self) -> Tagging {
        Tagging { form: self.journal.state().form, peers: self.manifest.peers.clone() }
    }

    /// For people: what a host says of the group's shape that nobody else does, and the other way round.
    fn what_differs(&self, writers: &[String], tagging: &Tagging) -> String {
        let lines = |writers: &[String], tagging: &Tagging| {
            let form = format!("form={}", tagging.form);
            let order = format!("writers={}", writers.join(","));
            [form, order].into_iter().chain(tagging.peers.iter().cloned()).collect::<Vec<_>>()
        };
        let ours = lines(&self.manifest.writers, &self.tagging());
        let theirs = lines(writers, tagging);
        let only = |these: &[String], those: &[String]| {
            let only = these.iter().filter(|line| !those.contains(line));
            only.map(|line| format!(" {line}")).collect::<String>()
        };
        match (only(&theirs, &ours).as_str(), only(&ours, &theirs).as_str()) {
            ("", "") => "the members are in another order".to_owned(),
            (new, "") => format!("the first has{new}"),
            ("", old) => format!("the second has{old}"),
            (new, old) => format!("the first has{new}, the second{old}"),
        }
    }

    /// A host attaches a member that is alone. If the group had other members, they were left out of its configuration.
    pub(super) fn reshape_alone(
        &mut self,
        now: Now,
        host: &str,
        writers: &[String],
    ) -> Result<(), Unattached> {
        let others = self.other_hosts(host);
        if let Some(other) = others.iter().find(|other| self.is_connected(other)) {
            let reason = format!(
                "the group has members on host {other}, which is connected, and this host has no other members in its \
                 configuration: give both hosts the same configuration"
            );
            return Err((RefusalKind::Mismatch, reason).into());
        }
        // Who is alone tags nothing, so the form stays.
        let tagging = Tagging { peers: Vec::new(), ..self.tagging() };
        self.reshape(now, host, writers, &tagging)?;
        self.change_manifest(|manifest| manifest.followers.clear()).map_err(cannot)
    }

    fn put_on_record(&mut self, writers: &[String], tagging: &Tagging) -> Result<(), Unattached> {
        // The journal last: writers that only the manifest has do not exist yet.
        self.change_manifest(|manifest| {
            manifest.writers = writers.to_vec();
            manifest.members.resize(writers.len(), None);
            manifest.peers.clone_from(&tagging.peers);
        })
        .map_err(cannot)?;
        let shape = Shape {
            writers: writers.len() as u16,
            removed: self.removed(),
            joining: self.is_recoverable(),
            form: tagging.form,
        };
        self.shaped(shape).map_err(cannot)?;
        self.check_on_record(self.shaped_at)?;
        self.change_manifest(Manifest::forget_followers).map_err(cannot)
    }

    fn change_manifest(&mut self, change: impl FnOnce(&mut Manifest)) -> Result<(), String> {
        let mut manifest = self.manifest.clone();
        change(&mut manifest);
        if manifest != self.manifest {
            manifest.write(&self.storage).map_err(|e| e.to_string())?;
            self.manifest = manifest;
            self.forget_strangers();
        }
        Ok(())
    }

    fn shaped(&mut self, shape: Shape) -> Result<(), String> {
        let state = self.journal.state();
        let same = state.form == shape.form
            && state.writers.len() == usize::from(shape.writers)
            && self.removed() == shape.removed;
        if !same {
            self.journal.stage_note(&Note::Shape(shape)).map_err(|e| e.to_string())?;
            // In one batch with it.
            self.forget_strangers();
            let state = self.journal.state();
            self.slots.resize_with(state.writers.len(), WriterSlot::empty);
            self.cut.reshape(state);
            self.shaped_at = self.journal.ticket();
        }
        Ok(())
    }

    pub(super) fn removed(&self) -> Vec<WriterId> {
        let writers = (0..).map(WriterId).zip(&self.journal.state().writers);
        writers.filter(|(_, w)| w.standing == Standing::Removed).map(|(w, _)| w).collect()
    }

    pub(super) fn is_all_in_the_cut(&self) -> bool {
        let state = self.journal.state();
        self.journal.staged_bytes() == 0
            && self.floors.is_empty()
            && state.is_all_in(self.cut.cut(), &state.journaled(), state.epoch)
    }

    /// Hosts that have members of this group, but for this one.
    fn other_hosts(&self, host: &str) -> Vec<String> {
        let state = self.journal.state();
        let writers = self.manifest.members.iter().zip(&state.writers);
        let writers = writers.filter(|(_, w)| w.standing != Standing::Removed);
        let hosts = writers.filter_map(|(member, _)| Some(&member.as_ref()?.host));
        let mut hosts: Vec<_> = hosts.chain(self.manifest.followers.values()).cloned().collect();
        hosts.retain(|other| other != host && other != Member::NOBODY);
        hosts.sort_unstable();
        hosts.dedup();
        hosts
    }

    /// How long a host's lease may hold still.
    pub(super) fn lease_of(&self, host: &str, now: Now) -> u64 {
        self.grace_of(host).remaining_ms(now.mono)
    }

    pub(super) fn grace_of(&self, host: &str) -> Grace {
        let heard = self.heard.get(host).copied().unwrap_or(self.opened_at);
        Grace::new(heard, self.manifest.grace_ms)
    }

    /// A host that is connected and was heard after this time, and the milliseconds since it was heard.
    #[must_use]
    pub fn heard_after(&self, at: MonoNanos, now: Now) -> Option<(String, u64)> {
        let mut hosts = self.hosts(now).into_iter().filter(|host| host.is_connected);
        hosts.find_map(|HostStatus { host, heard_ago_ms, .. }| {
            let is_after = self.heard.get(&host).is_some_and(|heard| *heard > at);
            is_after.then_some((host, heard_ago_ms.unwrap_or(0)))
        })
    }

    /// The host behind a link was heard.
    pub(super) fn heard(&mut self, link: Link, now: Now) {
        let writer = self.links().find(|(_, other)| *other == link).map(|(i, _)| i);
        let host = match writer {
            Some(i) => self.manifest.members[i].as_ref().map(|m| m.host.clone()),
            None => {
                let follower = self.followers.iter().find(|f| f.link == link);
                follower.and_then(|f| self.manifest.followers.get(&f.member).cloned())
            }
        };
        if let Some(host) = host {
            self.heard.insert(host, now.mono);
        }
    }

    /// The hosts of the group's members, and when each was heard last.
    pub(super) fn hosts(&self, now: Now) -> Vec<HostStatus> {
        let hosts = self.other_hosts(Member::NOBODY).into_iter();
        let status = hosts.map(|host| HostStatus {
            is_connected: self.is_connected(&host),
            heard_ago_ms: self
                .heard
                .get(&host)
                .map(|at| now.mono.0.saturating_sub(at.0) / 1_000_000),
            host,
        });
        status.collect()
    }

    /// The last sign of a host of the group, by the clock that dates what arrives.
    pub(super) fn last_heard_unix_ms(&self, now: Now) -> Option<u64> {
        let ago_ms = self.hosts(now).iter().filter_map(|of| of.heard_ago_ms).min()?;
        Some(self.now_ms().saturating_sub(ago_ms))
    }

    fn is_connected(&self, host: &str) -> bool {
        let writer = |i: usize| self.manifest.members[i].as_ref().is_some_and(|m| m.host == host);
        self.links().any(|(i, _)| writer(i))
            || self
                .followers
                .iter()
                .any(|f| self.manifest.followers.get(&f.member).is_some_and(|of| of == host))
    }

    /// Removes a member: nothing waits for it any more, and it is not recovered. What it wrote
    /// stays in the journal and its image; what of it had not arrived is given up, also where
    /// others depend on it, and so is a resync that had not ended. Waits for its disk.
    pub fn remove(&mut self, member: &str) -> Result<(), RemoveError> {
        self.flush();
        match self.try_remove(member) {
            Err(RemoveError::NotYet(_)) => {
                self.flush();
                self.try_remove(member)
            }
            removed => removed,
        }
    }

    /// The same without waiting for the disk: [`RemoveError::NotYet`] is answered until the removal is on stable
    /// storage.
    pub fn try_remove(&mut self, member: &str) -> Result<(), RemoveError> {
        let host = self.host_of(member).ok_or_else(|| RemoveError::Unknown {
            group: self.manifest.group.clone(),
            member: member.to_owned(),
            known: self.known_members().join(", "),
        })?;
        let index = self.manifest.writers.iter().position(|name| name == member);
        let attached = index.is_some_and(|i| self.slots[i].link.is_some())
            || self.followers.iter().any(|f| f.member == member);
        let member = || member.to_owned();
        if attached {
            return Err(RemoveError::Attached { member: member(), host });
        }
        let Some(index) = index else {
            let mut manifest = self.manifest.clone();
            manifest.followers.remove(&member());
            manifest.write(&self.storage).map_err(GroupError::from)?;
            self.manifest = manifest;
            self.forget_strangers();
            return Ok(());
        };
        let mut removed = self.removed();
        let writer = WriterId(index as u16);
        if !removed.contains(&writer) {
            removed.push(writer);
            removed.sort_unstable();
        }
        let state = self.journal.state();
        if removed.len() == state.writers.len() {
            return Err(RemoveError::Last { member: member() });
        }
        let (writers, form) = (state.writers.len() as u16, state.form);
        self.shaped(Shape { writers, removed, joining: false, form })
            .map_err(RemoveError::Journal)?;
        self.check_on_record(self.shaped_at).map_err(|error| match error {
            NotOnRecord::NotYet(NotYet(ticket)) => RemoveError::NotYet(ticket),
            NotOnRecord::Cannot(reason) => RemoveError::Journal(reason),
        })?;
        self.floors.retain(|floor| !floor.is_of(writer));
        self.tell_floors();
        self.tell_committed();
        Ok(())
    }

    fn host_of(&self, member: &str) -> Option<String> {
        if let Some(host) = self.manifest.followers.get(member) {
            return Some(host.clone());
        }
        let index = self.manifest.writers.iter().position(|name| name == member)?;
        let member = self.manifest.members[index].as_ref().filter(|m| !m.is_seeded());
        let host = member.map(|m| m.host.clone());
        Some(host.unwrap_or_else(|| "no host yet".to_owned()))
    }

    pub(super) fn known_members(&self) -> Vec<String> {
        let followers = self.manifest.followers.keys();
        self.manifest.writers.iter().chain(followers).cloned().collect()
    }
}

fn cannot(reason: String) -> Unattached {
    (RefusalKind::Stopping, reason).into()
}
