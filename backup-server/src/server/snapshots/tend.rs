//! Removal of snapshots whose time is over.

use super::Snapshots;
use crate::server::clock;
use std::sync::Arc;
use std::time::Duration;
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
}
