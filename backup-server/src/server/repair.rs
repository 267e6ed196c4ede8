//! What `tidelock-backup repair` does in the directory of a group that cannot be opened ([`tidelock_store::journal::plan_repair`]).

use super::inbox::{RepairStatus, RepairedWriter};
use std::path::Path;
use tidelock_protocol::ids::WriterId;
use tidelock_replica::group::{GroupOptions, JOURNAL_DIR};
use tidelock_replica::manifest::Manifest;
use tidelock_replica::quarantine::QUARANTINE_DIR;
use tidelock_storage::files::Files;
use tidelock_storage::json::FileError;
use tidelock_store::fold;
use tidelock_store::journal::{self, Repair};

/// Finds out where the journal is to be cut, and cuts it if so asked.
pub(super) fn run(dir: &Path, options: &GroupOptions, apply: bool) -> Result<RepairStatus, String> {
    let storage = Files::new(dir.to_owned());
    let text = |error: FileError| error.to_string();
    let manifest = Manifest::read(&storage).map_err(text)?.ok_or("there is no group")?;
    let folded = fold::read_position(&storage).map_err(text)?;
    let planned = journal::plan_repair(&storage, JOURNAL_DIR, &folded.in_images(), options.journal);
    let Some(plan) = planned.map_err(|error| error.to_string())? else {
        return Err("nothing is wrong with the journal: what else is, `status` says".to_owned());
    };
    if apply {
        journal::repair(&storage, JOURNAL_DIR, QUARANTINE_DIR, &plan)
            .map_err(|error| error.to_string())?;
    }
    Ok(told(&manifest, plan, apply))
}

fn told(manifest: &Manifest, plan: Repair, is_done: bool) -> RepairStatus {
    let writers = (0..).zip(plan.writers).map(|(nth, (kept, lost))| {
        let member = manifest.name_of(WriterId(nth)).to_owned();
        RepairedWriter { member, kept, lost }
    });
    let files = plan.files.iter().map(|file| tidelock_storage::join(JOURNAL_DIR, file));
    RepairStatus {
        reason: plan.reason,
        files: files.collect(),
        end: (plan.end.segment, plan.end.offset),
        writers: writers.collect(),
        is_done,
    }
}
