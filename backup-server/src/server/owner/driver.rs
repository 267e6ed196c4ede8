//! The surroundings of a group's loop: its directory, and the thread beside it.

use super::folder::Folder;
use crate::server::inbox::Inbox;
use crate::server::orders::Asker;
use crate::server::peer_log::peer_log;
use crate::server::snapshots;
use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use tidelock_replica::connection::outbox::Outbox;
use tidelock_replica::group::{Group, Moved, Now, Output};
use tidelock_replica::group_loop::{Answer, Driver, Job, Wait};
use tidelock_replica::history::Hold;
use tidelock_storage::files::{Files, OpenFile};
use tidelock_storage::reserve::Reserve;
use tidelock_store::journal::{SyncJob, TornTail};
use tokio::sync::oneshot;

pub(super) struct ThreadDriver {
    pub(super) group: Arc<str>,
    pub(super) dir: PathBuf,
    pub(super) snapshots_dir: PathBuf,
    pub(super) reserve: Arc<Reserve>,
    pub(super) inbox: Arc<Inbox>,
    /// Points that snapshots need which are not whole, by the snapshot's name.
    pub(super) snapshots: BTreeMap<String, Vec<Hold>>,
    /// Requests that wait for the cut, by the number that the group has given to each.
    pub(super) covering: BTreeMap<u64, oneshot::Sender<Result<Vec<String>, String>>>,
    pub(super) folder: Option<Folder>,
    /// To be done when the turn has ended.
    pub(super) sync: Option<(u64, SyncJob<OpenFile>)>,
    /// False for views that were handed out before the group broke.
    pub(super) alive: Arc<AtomicBool>,
    /// The reason that was logged last.
    pub(super) broken_because: Option<String>,
}

impl ThreadDriver {
    fn tell_covered(&mut self, group: &mut Group<Files>) {
        if self.covering.is_empty() {
            return;
        }
        for covered in group.take_covered() {
            if let Some(done) = self.covering.remove(&covered.id) {
                let _ = done.send(Ok(covered.without));
            }
        }
        self.covering.retain(|_, done| !done.is_closed());
    }
}

impl Driver for ThreadDriver {
    type Storage = Files;
    type Done = oneshot::Sender<io::Result<()>>;
    type Asker = Asker;

    fn storage(&self) -> Files {
        Files::new(self.dir.clone()).with_reserve(Arc::clone(&self.reserve))
    }

    fn exists(&self) -> bool {
        self.dir.join("group.json").exists()
    }

    fn make_directory(&mut self) -> io::Result<()> {
        std::fs::create_dir_all(&self.dir)?;
        let parent = self.dir.parent().unwrap_or(Path::new("."));
        std::fs::File::open(parent)?.sync_all()
    }

    fn remove_directory(&mut self) {
        let _ = std::fs::remove_dir(&self.dir);
    }

    fn opened(&mut self, group: &mut Group<Files>, torn: Option<TornTail>) {
        if let Some(torn) = torn {
            tracing::warn!(
                group = &*self.group,
                segment = torn.file,
                offset = torn.offset,
                bytes = torn.len_bytes,
                "the last write was not finished when the server stopped; nothing of it \
                 was acknowledged, and it is cut off"
            );
        }
        tracing::info!(
            group = &*self.group,
            epoch = %group.epoch(),
            committed = %group.committed(),
            recovered = group.recovery().is_some(),
            unfolded_bytes = group.unfolded_bytes(),
            "opened"
        );
        self.broken_because = None;
        self.alive = Arc::new(AtomicBool::new(true));
        self.snapshots.clear();
        for (name, record) in snapshots::needs(&self.snapshots_dir, &self.group) {
            // The job of a snapshot tells if it cannot have a point, or does without.
            let holds = record
                .needs()
                .into_iter()
                .filter_map(|at| group.hold(at, &format!("snapshot {name}")).ok());
            let holds = holds.collect();
            self.snapshots.insert(name, holds);
        }
    }

    fn broke(&mut self, reason: &str) {
        if self.broken_because.as_deref() != Some(reason) {
            tracing::error!(group = &*self.group, reason, "the group does not work");
            self.broken_because = Some(reason.to_owned());
        }
        self.covering.clear();
        self.alive.store(false, Ordering::Release);
    }

    fn tend(&mut self, group: &mut Group<Files>, _: Now) {
        self.tell_covered(group);
    }

    fn send(&mut self, outbox: &Arc<Outbox>, output: Output) {
        if let Output::Refuse(_, kind, reason) = &output {
            peer_log!(HOSTS, warn, group = &*self.group, ?kind, reason, "refused");
        }
        output.send(outbox);
    }

    fn answer(&mut self, done: oneshot::Sender<io::Result<()>>, result: io::Result<()>) {
        // Whoever has asked may be gone.
        let _ = done.send(result);
    }

    fn sync(&mut self, generation: u64, job: SyncJob<OpenFile>) {
        self.sync = Some((generation, job));
    }

    fn is_gone(&self, asker: &Asker) -> bool {
        asker.is_gone()
    }

    fn waits(&mut self, asker: &Asker, wait: Wait) {
        asker.waits(wait);
    }

    fn answer_order(&mut self, asker: Asker, answer: Answer) {
        if matches!(answer, Answer::Removed(Ok(()))) {
            tracing::warn!(group = &*self.group, "a member is removed by the operator");
        }
        if let Answer::Moved(Ok(Moved { member, from, to, .. })) = &answer {
            let from = from.as_deref().unwrap_or("nobody");
            tracing::warn!(group = &*self.group, member, from, to, "moved by the operator");
        }
        asker.answer(answer);
    }

    fn begin(&mut self, generation: u64, job: Job<Files>) {
        let Self { folder, group, inbox, .. } = self;
        let folder = folder.get_or_insert_with(|| Folder::spawn(group, Arc::clone(inbox)));
        folder.begin(generation, job);
    }
}
