//! What goes by itself: snapshots whose time is over are removed, and one for each group that has the policy is kept near
//! the present (Retroscope 7: speculative snapshots).

use super::Snapshots;
use super::ask::Wanted;
use super::job::is_speculative;
use crate::server::clock;
use std::sync::Arc;
use std::time::Duration;
use tidelock_replica::travel::snapshot::{Pace, SPECULATIVE, Stage};
use tidelock_replica::travel::when::When;
use tokio::time::sleep;

const LOOK: Duration = Duration::from_millis(500);

impl Snapshots {
    /// Looks now and then, for ever.
    pub async fn tend(self: Arc<Self>) {
        loop {
            sleep(LOOK).await;
            let now = clock::now().unix_ms;
            let this = Arc::clone(&self);
            let expiring = tokio::task::spawn_blocking(move || this.expire(now));
            let _ = expiring.await;
            for owner in self.registry.all() {
                self.speculate(&owner.group, now).await;
            }
        }
    }

    fn expire(&self, now_unix_ms: u64) {
        let over: Vec<_> = {
            let all = self.lock();
            let is_over = |at: Option<u64>| at.is_some_and(|at| at <= now_unix_ms);
            let over = all.iter().filter(|(_, entry)| is_over(entry.record.expires_at_unix_ms));
            // Those that others are over stay until these are gone.
            let free = over.filter(|((group, name), _)| Self::over(&all, group, name).is_empty());
            free.map(|(key, _)| key.clone()).collect()
        };
        for (group, name) in over {
            match self.remove(&group, &name) {
                Ok(()) => tracing::info!(group, snapshot = name, "its time is over: removed"),
                Err(error) => tracing::warn!(group, snapshot = name, "its time is over: {error}"),
            }
        }
    }

    async fn speculate(self: &Arc<Self>, group: &str, now_unix_ms: u64) {
        let policy = self.registry.config().speculative(group);
        let there = {
            let all = self.lock();
            let entry = all.iter().find(|((of, name), _)| of == group && is_speculative(name));
            entry.map(|(_, entry)| (entry.record.clone(), entry.job.is_some()))
        };
        let Some(policy) = policy else {
            if there.is_some() {
                let (this, group) = (Arc::clone(self), group.to_owned());
                // The policy is gone, so it is of no use.
                let _ = tokio::task::spawn_blocking(move || this.remove(&group, SPECULATIVE)).await;
            }
            return;
        };
        let every_ms = u64::try_from(policy.every.as_millis()).unwrap_or(u64::MAX);
        let is_due = match &there {
            None => true,
            Some((record, is_busy)) => {
                !is_busy
                    && record.stage == Stage::Whole
                    && now_unix_ms.saturating_sub(record.asked_at_unix_ms) >= every_ms
            }
        };
        if !is_due {
            return;
        }
        let pace = Pace { rate_bytes_s: Some(policy.rate_bytes_s), ..Pace::default() };
        let wanted = Wanted { pace, ..Wanted::default() };
        // A group that has no state yet, or that does not work, is looked at again.
        if let Err(error) = self.keep_near(group, &When::Latest, wanted, there.is_some()).await {
            tracing::debug!(group, "no speculative snapshot: {error}");
        }
    }
}
