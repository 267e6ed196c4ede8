//! Questions and requests of operators to a group that are answered at once. An answer that nobody waits for any more
//! is dropped.

use super::Owner;
use crate::server::clock;
use crate::server::inbox::{Damage, DamagedAsk, Event, LiveDisks, RepairStatus};
use crate::server::repair;
use std::sync::Arc;
use tidelock_replica::group::{Group, GroupStatus, Link};
use tidelock_storage::files::Files;
use tokio::sync::oneshot;

impl Owner {
    pub(super) fn answer(&mut self, query: Event) {
        let now = clock::now();
        let unavailable = self.state.unavailable();
        match (query, self.state.group_mut()) {
            (Event::Damaged { ask, done }, Some(group)) => {
                let _ = done.send(damaged(group, ask));
            }
            (Event::Damaged { done, .. }, None) => {
                let _ = done.send(Err(unavailable.to_string()));
            }
            (Event::History { done }, Some(group)) => {
                let _ = done.send(group.history().map_err(|e| e.to_string()));
            }
            (Event::History { done }, None) => {
                let _ = done.send(Err(unavailable.to_string()));
            }
            (Event::Disks { done }, Some(group)) if group.recovery().is_some() => {
                let disks = group.recovered_disks();
                let failed = |e| tracing::error!(group = &*self.group, "recovered disks: {e}");
                let alive = Arc::clone(&self.driver.alive);
                let live = disks.map_err(failed).map(|disks| LiveDisks { disks, alive });
                let _ = done.send(live.ok());
            }
            (Event::Disks { done }, _) => {
                let _ = done.send(None);
            }
            (Event::Marks { done }, Some(group)) => {
                let _ = done.send(Ok(group.marks()));
            }
            (Event::Marks { done }, None) => {
                let _ = done.send(Err(unavailable.to_string()));
            }
            (Event::Machine { member, done }, Some(group)) => {
                let _ = done.send(Ok(group.machine(&member)));
            }
            (Event::Machine { done, .. }, None) => {
                let _ = done.send(Err(unavailable.to_string()));
            }
            (Event::Status { done }, Some(group)) => {
                let _ = done.send(Some(group.status(now)));
            }
            (Event::Status { done }, None) => {
                let broken = self.state.broken_because();
                let _ = done.send(broken.map(|why| GroupStatus::of_broken(&self.group, why)));
            }
            (other, _) => unreachable!("handled before: {other:?}"),
        }
    }

    pub(super) fn cover(&mut self, link: Link, done: oneshot::Sender<Result<Vec<String>, String>>) {
        let unavailable = self.state.unavailable().to_string();
        let id = match self.state.group_mut() {
            Some(group) => group.cover(link).ok_or("the member is not attached".to_owned()),
            None => Err(unavailable),
        };
        match id {
            Ok(id) => drop(self.driver.covering.insert(id, done)),
            // Nobody waits for it any more.
            Err(reason) => drop(done.send(Err(reason))),
        }
    }

    /// Cuts the journal of a group that cannot be opened, or only finds out where.
    pub(super) fn repair(&mut self, apply: bool) -> Result<RepairStatus, String> {
        if self.state.broken_because().is_none() {
            return Err(format!("group {}: its journal is open, nothing is to be cut", self.group));
        }
        let repaired = repair::run(&self.driver.dir, &self.options, apply)?;
        if apply {
            tracing::warn!(
                group = &*self.group,
                reason = repaired.reason,
                end = ?repaired.end,
                writers = ?repaired.writers,
                "the operator has cut the journal before the damage"
            );
            self.state.open(clock::now(), &mut self.driver);
        }
        Ok(repaired)
    }
}

fn damaged(group: &mut Group<Files>, ask: DamagedAsk) -> Result<Option<Damage>, String> {
    let now = clock::now();
    match ask {
        DamagedAsk::Tell => {}
        DamagedAsk::Check => {
            if !group.check_damaged(now).map_err(|e| e.to_string())? {
                return Ok(None);
            }
        }
        DamagedAsk::Forget(segment) => {
            group.forget_damaged(segment).map_err(|e| e.to_string())?;
        }
    }
    group.tend_damage(now);
    Ok(Some((group.damaged(), group.latest_damaged())))
}
