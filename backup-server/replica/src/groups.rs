//! The groups of a server by name: which of them run, and who may create another one.

use std::collections::{BTreeMap, BTreeSet};
use thiserror::Error;
use tidelock_protocol::bounds;
use tidelock_protocol::message::RefusalKind;

/// The most groups of one server: each has a thread.
const GROUPS_MAX: usize = 1024;

/// Reason why there is no group of a name.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum NoGroup {
    /// Not a name.
    #[error("not a group's name")]
    Name,
    /// No room for another group.
    #[error("{0}")]
    Quota(String),
    /// Not now.
    #[error("{0}")]
    Stopping(String),
}

impl NoGroup {
    /// The kind of the refusal that a host gets.
    #[must_use]
    pub fn kind(&self) -> RefusalKind {
        match self {
            Self::Name => RefusalKind::Invalid,
            Self::Quota(_) => RefusalKind::Quota,
            Self::Stopping(_) => RefusalKind::Stopping,
        }
    }
}

/// Groups that the operator has listed, and how many others there may be.
pub struct Quota<'a> {
    /// True for a group of the configuration.
    pub is_listed: &'a dyn Fn(&str) -> bool,
    /// The number of groups in the configuration.
    pub listed: usize,
    /// The most groups beside these that one host may create.
    pub per_host: usize,
}

/// The groups. `G` is a run of one.
#[derive(Debug)]
pub struct Groups<G> {
    running: BTreeMap<String, Running<G>>,
    removing: BTreeSet<String>,
    stopped: bool,
}

#[derive(Debug)]
struct Running<G> {
    group: G,
    /// The host that made it, or is about to; `None`: no host has.
    made_by: Option<String>,
}

impl<G> Default for Groups<G> {
    fn default() -> Self {
        Self { running: BTreeMap::new(), removing: BTreeSet::new(), stopped: false }
    }
}

impl<G> Groups<G> {
    /// The run of a group. `None`: it may begin.
    pub fn find(
        &mut self,
        name: &str,
        is_closed: impl Fn(&G) -> bool,
    ) -> Result<Option<&G>, NoGroup> {
        if !bounds::is_name(name) {
            return Err(NoGroup::Name);
        }
        if self.stopped {
            return Err(NoGroup::Stopping("the backup server is stopping".to_owned()));
        }
        if self.removing.contains(name) {
            return Err(NoGroup::Stopping(format!("group {name} is being removed")));
        }
        self.running.retain(|_, of| !is_closed(&of.group));
        Ok(self.get(name))
    }

    /// Refuses a group that a host may not create. There is always room for groups that are listed.
    pub fn check_quota(&self, name: &str, host: &str, quota: &Quota<'_>) -> Result<(), NoGroup> {
        if (quota.is_listed)(name) {
            return Ok(());
        }
        let unlisted = || self.running.iter().filter(|(name, _)| !(quota.is_listed)(name));
        // A certificate speaks for its host in any case of letters.
        let is_own = |of: &Running<G>| {
            of.made_by.as_ref().is_some_and(|made_by| made_by.eq_ignore_ascii_case(host))
        };
        let of_host = unlisted().filter(|(_, of)| is_own(of)).count();
        let most = quota.per_host;
        if of_host >= most {
            return Err(NoGroup::Quota(format!(
                "host {host} has created {of_host} groups that are not in the backup server's configuration, and {most} is \
                 the most that it may (limits.groups_per_host): list group {name} there as a [[group]], or remove groups \
                 there by `tidelock-backup remove`"
            )));
        }
        let most = GROUPS_MAX.saturating_sub(quota.listed);
        if unlisted().count() >= most {
            return Err(NoGroup::Quota(format!(
                "there are {most} groups already that are not in the backup server's configuration, and no room for \
                 others: list group {name} there as a [[group]], or remove groups there by `tidelock-backup remove`"
            )));
        }
        Ok(())
    }

    /// A group runs from now on. `made_by`: the host that has created it, or is about to.
    pub fn begun(&mut self, name: &str, group: G, made_by: Option<String>) {
        self.running.insert(name.to_owned(), Running { group, made_by });
    }

    /// The last run of a group.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<&G> {
        self.running.get(name).map(|of| &of.group)
    }

    /// The last runs of all groups.
    pub fn all(&self) -> impl Iterator<Item = &G> {
        self.running.values().map(|of| &of.group)
    }

    /// A group is being removed, with its run if there is one. An error: it is already, or the server stops.
    pub fn begin_removal(&mut self, name: &str) -> Result<Option<G>, NoGroup> {
        if self.stopped || !self.removing.insert(name.to_owned()) {
            return Err(NoGroup::Stopping(format!("group {name} is being removed already")));
        }
        Ok(self.running.remove(name).map(|of| of.group))
    }

    /// The removal has ended.
    pub fn removed(&mut self, name: &str) {
        self.removing.remove(name);
    }

    /// No group runs any more; those that did are to be stopped.
    pub fn stop(&mut self) -> Vec<(String, G)> {
        self.stopped = true;
        let running = std::mem::take(&mut self.running);
        running.into_iter().map(|(name, of)| (name, of.group)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn quota(per_host: usize) -> Quota<'static> {
        Quota { is_listed: &|name| name == "listed", listed: 1, per_host }
    }

    #[test]
    fn a_host_creates_so_many_groups_and_the_listed_ones() {
        let mut groups = Groups::default();
        for name in ["a", "b"] {
            groups.check_quota(name, "host", &quota(2)).unwrap();
            groups.begun(name, (), Some("Host".to_owned()));
        }
        groups.check_quota("listed", "host", &quota(2)).unwrap();
        let refused = groups.check_quota("c", "host", &quota(2)).unwrap_err();
        assert_eq!(refused.kind(), RefusalKind::Quota);
        assert!(refused.to_string().contains("limits.groups_per_host"), "{refused}");
        groups.check_quota("c", "other", &quota(2)).unwrap();
    }

    #[test]
    fn all_hosts_together_create_no_more_than_the_server_has_threads_for() {
        let mut groups = Groups::default();
        for n in 0..GROUPS_MAX - 1 {
            groups.begun(&format!("g{n}"), (), Some(format!("h{n}")));
        }
        let refused = groups.check_quota("one-more", "host", &quota(8)).unwrap_err();
        assert_eq!(refused.kind(), RefusalKind::Quota);
        groups.check_quota("listed", "host", &quota(8)).unwrap();
    }

    #[test]
    fn nothing_begins_while_a_group_is_removed_or_the_server_stops() {
        let mut groups = Groups::default();
        assert_eq!(groups.find("-", |_| false), Err(NoGroup::Name));
        groups.begun("g", 1, None);
        assert_eq!(groups.find("g", |_| false), Ok(Some(&1)));
        assert_eq!(groups.find("g", |_| true), Ok(None), "its run has ended");
        groups.begun("g", 2, None);
        assert_eq!(groups.begin_removal("g"), Ok(Some(2)));
        assert!(groups.find("g", |_| false).is_err() && groups.begin_removal("g").is_err());
        groups.removed("g");
        assert_eq!(groups.find("g", |_| false), Ok(None));
        groups.begun("g", 3, None);
        assert_eq!(groups.stop(), [("g".to_owned(), 3)]);
        assert_eq!(groups.find("g", |_| false).unwrap_err().kind(), RefusalKind::Stopping);
    }
}
