//! The thread beside a group's owner: folds, indexes, verification, compression.

use crate::server::inbox::{Event, Inbox};
use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;
use tidelock_replica::group_loop::Job;
use tidelock_storage::files::Files;

/// The fold's thread: jobs one after the other, with less claim on the processor than what
/// acknowledges. Not none: a fold that starves stops everything at the limit of unfolded bytes.
#[derive(Debug)]
pub(super) struct Folder {
    jobs: mpsc::Sender<(u64, Job<Files>)>,
    thread: Option<JoinHandle<()>>,
}

impl Folder {
    pub(super) fn spawn(group: &str, inbox: Arc<Inbox>) -> Self {
        const NICE: i32 = 10;
        let (jobs, waiting) = mpsc::channel::<(u64, Job<Files>)>();
        let builder = std::thread::Builder::new().name(format!("fold-{group}"));
        let spawned = builder.spawn(move || {
            let tid = rustix::thread::gettid();
            if let Err(error) = rustix::process::setpriority_process(Some(tid), NICE) {
                tracing::debug!("the fold runs at normal priority: {error}");
            }
            while let Ok((generation, job)) = waiting.recv() {
                if !inbox.push(Event::JobDone { generation, end: job.run() }) {
                    return;
                }
            }
        });
        let failed = |error| tracing::error!("no thread for the fold: {error}");
        Self { jobs, thread: spawned.map_err(failed).ok() }
    }

    /// The thread ends only with this sender.
    pub(super) fn begin(&self, generation: u64, job: Job<Files>) {
        let _ = self.jobs.send((generation, job));
    }

    pub(super) fn end(self) {
        drop(self.jobs);
        if self.thread.is_some_and(|thread| thread.join().is_err()) {
            tracing::error!("the fold ended by a fault");
        }
    }
}
