//! One thread for each group, which runs its loop ([`GroupLoop`]): nobody else touches the group's state, so there are no
//! locks. Each turn takes everything from the inbox.

mod driver;
mod folder;
mod queries;
#[cfg(test)]
mod tests;

use super::clock;
use super::inbox::{Event, Inbox};
use driver::ThreadDriver;
use std::collections::BTreeMap;
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::thread::JoinHandle;
use tidelock_replica::group::GroupOptions;
use tidelock_replica::group_loop::{GroupLoop, GuestRequest};
use tidelock_storage::reserve::Reserve;

/// A group's owner, from outside.
#[derive(Clone, Debug)]
pub struct OwnerHandle {
    /// The group's name.
    pub group: Arc<str>,
    /// Its inbox.
    pub inbox: Arc<Inbox>,
}

/// The owner of a group.
pub(super) struct Owner {
    group: Arc<str>,
    options: GroupOptions,
    state: GroupLoop<ThreadDriver>,
    driver: ThreadDriver,
    is_stopping: bool,
}

/// Starts the thread of an owner.
pub(super) fn spawn(mut owner: Owner) -> io::Result<(OwnerHandle, JoinHandle<()>)> {
    let (group, inbox) = (Arc::clone(&owner.group), Arc::clone(&owner.driver.inbox));
    let handle = OwnerHandle { group: Arc::clone(&group), inbox: Arc::clone(&inbox) };
    let thread = std::thread::Builder::new().name(format!("group-{group}")).spawn(move || {
        // Whatever happens here, nobody waits for an answer that never comes.
        let _closer = Closer(inbox);
        owner.state.open(clock::now(), &mut owner.driver);
        owner.run();
    })?;
    Ok((handle, thread))
}

struct Closer(Arc<Inbox>);

impl Drop for Closer {
    fn drop(&mut self) {
        self.0.close();
    }
}

impl Owner {
    /// The owner of a group whose directory is `dir`; it need not exist yet.
    pub(super) fn new(
        group: &str,
        dir: &Path,
        snapshots_dir: &Path,
        options: GroupOptions,
        input_max_bytes: u64,
        reserve: Arc<Reserve>,
    ) -> Self {
        let group: Arc<str> = group.into();
        let driver = ThreadDriver {
            group: Arc::clone(&group),
            dir: dir.to_owned(),
            snapshots_dir: snapshots_dir.to_owned(),
            reserve,
            inbox: Arc::new(Inbox::new(input_max_bytes)),
            snapshots: BTreeMap::new(),
            covering: BTreeMap::new(),
            folder: None,
            sync: None,
            alive: Arc::default(),
            broken_because: None,
        };
        let state = GroupLoop::new(&group, options.clone());
        Self { group, options, state, driver, is_stopping: false }
    }

    fn run(&mut self) {
        while !self.is_stopping {
            let events = self.driver.inbox.take(self.state.timeout(clock::now()));
            self.state.begin_turn();
            for event in events {
                self.handle(event);
            }
            self.state.turn(clock::now(), &mut self.driver);
            self.sync();
            if self.state.came_to_nothing() && self.driver.inbox.close_if_empty() {
                // An attachment that was refused: no group came of it.
                return;
            }
        }
    }

    /// Makes durable what the turn has written. Everything that arrives meanwhile waits in the inbox.
    fn sync(&mut self) {
        if let Some((generation, job)) = self.driver.sync.take() {
            let end = job.run();
            self.state.synced(generation, end, clock::now(), &mut self.driver);
        }
    }

    fn handle(&mut self, event: Event) {
        let Self { state, driver, .. } = self;
        let now = clock::now();
        match event {
            Event::Host(event) => state.host(event, now, driver),
            Event::GuestWrite { key, offset, effect, durable, done } => {
                let request = GuestRequest::Write { key, offset, effect, durable };
                state.guest(request, done, now, driver);
            }
            Event::GuestFlush { writer, done } => {
                state.guest(GuestRequest::Flush(writer), done, now, driver);
            }
            Event::JobDone { generation, end } => state.job_done(generation, end, now),
            Event::SnapshotOver { name } => {
                driver.snapshots.remove(&name);
            }
            Event::Cover { link, done } => self.cover(link, done),
            Event::Repair { apply, done } => {
                let _ = done.send(self.repair(apply));
            }
            Event::Stop => self.stop(),
            Event::OpenAgain { done } => {
                state.open_if_broken(now, driver);
                let _ = done.send(());
            }
            Event::Order { order, asker } => state.order(order, asker, now),
            query => self.answer(query),
        }
    }

    fn stop(&mut self) {
        self.state.stop(clock::now(), &mut self.driver);
        self.is_stopping = true;
        if let Some(folder) = self.driver.folder.take() {
            // Whoever opens the group next must be the only one who writes to its images. What
            // the job did is not put on record, and done again.
            folder.end();
        }
    }
}
