//! A group that begins with images that are there already: the disks of a site that was the primary, or disks that
//! were shipped.
//!
//! They are no host's until one has compared its own with them by digests and has sent what differs
//! ([`CopyState::Seeded`]): until then a recovery takes them only if it is asked for them. They are a point in time
//! like any other, the one of the empty cut: if both sites took writes, it is one timeline, what comes is the other, and
//! neither is lost as long as the point is held.

use super::{GroupError, JOURNAL_DIR, attach, fresh_id, fresh_secret};
use crate::history::Point;
use crate::manifest::{Manifest, Member};
use std::collections::BTreeMap;
use std::io;
use thiserror::Error;
use tidelock_protocol::bounds;
use tidelock_protocol::hlc::Hlc;
use tidelock_protocol::ids::{GroupId, WriterId};
use tidelock_protocol::limits;
use tidelock_protocol::message::{CopyState, DiskSpec};
use tidelock_protocol::tag::TagKey;
use tidelock_protocol::vector::CountVector;
use tidelock_storage::Storage;
use tidelock_store::FORMAT;
use tidelock_store::image::{Image, SECTOR_BYTES};
use tidelock_store::journal::{self, Journal, Mark, MarkKind, Note, State};

/// What the pin at the disks as they were found is called.
pub const SEEDED: &str = "seeded";

/// A writer whose disks are there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SeededMember {
    /// Its name.
    pub name: String,
    /// Its disks, numbered as in its host's configuration.
    pub disks: Vec<DiskSpec>,
}

/// Why no group is made.
#[derive(Debug, Error)]
pub enum SeedError {
    /// A group, member or disk cannot be called so.
    #[error("\"{0}\" is not a name: 1 to 64 letters, digits, '.', '_', '-'")]
    Name(String),
    /// Too much, too little, or twice the same.
    #[error("{0}")]
    Shape(String),
    /// The storage.
    #[error(transparent)]
    Group(#[from] GroupError),
}

impl SeedError {
    /// Whether there is no room.
    #[must_use]
    pub fn is_full(&self) -> bool {
        match self {
            Self::Group(GroupError::Journal(journal::JournalError::Full(_))) => true,
            Self::Group(GroupError::File(error)) => error.is_full(),
            Self::Group(GroupError::Image { source, .. }) => tidelock_storage::is_full(source),
            _ => false,
        }
    }
}

/// What the group is, before any host has attached it. Says what is wrong with the names and sizes.
pub fn manifest(group: &str, members: &[SeededMember]) -> Result<Manifest, SeedError> {
    let shape = |reason: String| Err(SeedError::Shape(reason));
    let disks = || members.iter().flat_map(|m| &m.disks);
    let all = [group].into_iter().chain(members.iter().map(|m| m.name.as_str()));
    if let Some(bad) = all.chain(disks().map(|d| d.name.as_str())).find(|n| !bounds::is_name(n)) {
        return Err(SeedError::Name(bad.to_owned()));
    }
    if members.is_empty() || members.len() > usize::from(limits::WRITERS_MAX) {
        return shape("a group has 1 to 64 members with disks".to_owned());
    }
    if !attach::are_unique(members.iter().map(|m| &m.name)) {
        return shape("two members have the same name".to_owned());
    }
    for member in members {
        if member.disks.is_empty() || member.disks.len() > usize::from(limits::DISKS_MAX) {
            return shape(format!("{} has not 1 to 64 disks", member.name));
        }
        if !attach::are_unique(member.disks.iter().map(|d| &d.name)) {
            return shape(format!("two disks of {} have the same name", member.name));
        }
    }
    if let Some(disk) =
        disks().find(|d| d.size_bytes == 0 || !d.size_bytes.is_multiple_of(SECTOR_BYTES))
    {
        let bytes = disk.size_bytes;
        return shape(format!(
            "disk {} has {bytes} bytes: the size of a disk is a multiple of {SECTOR_BYTES}. Is it a raw image?",
            disk.name
        ));
    }
    Ok(Manifest {
        format: FORMAT,
        // [`seed`] gives it both.
        id: GroupId([0; 16]),
        tag_secret: TagKey([0; 2]),
        group: group.to_owned(),
        created_by: Member::NOBODY.to_owned(),
        writers: members.iter().map(|m| m.name.clone()).collect(),
        members: members.iter().map(|m| Some(Member::seeded(m.disks.clone()))).collect(),
        grace_ms: 0,
        peers: Vec::new(),
        followers: BTreeMap::new(),
        left_out: None,
    })
}

/// Makes the group in a directory that holds its images and nothing else of it. Durable when it returns: the point at
/// which the disks are as they were found. `pins` it, so that the images do not pass it.
pub fn seed<S: Storage>(
    storage: &S,
    manifest: &Manifest,
    options: journal::Options,
    now_unix_ms: u64,
    pins: bool,
) -> Result<Point, SeedError> {
    for (writer, disk) in manifest.disks() {
        let path = manifest.image_path(writer, disk);
        Image::adopt(storage, &path, disk.size_bytes)
            .and_then(|_| storage.sync_dir("images"))
            .map_err(|source| GroupError::Image { path, source })?;
    }
    let wrong = |source| GroupError::Image { path: "directory".into(), source };
    clear_journal(storage).map_err(wrong)?;
    let writers: Vec<_> = (0..manifest.writers.len() as u16).map(WriterId).collect();
    let mut state = State::new(writers.len());
    state.barrier = Hlc::new(now_unix_ms, 0);
    state.arrived_ms = now_unix_ms;
    let hlc = state.newest_effective();
    let journal = Journal::create(storage.clone(), JOURNAL_DIR, state, options);
    let mut journal = journal.map_err(GroupError::from)?;
    for writer in &writers {
        let note = Note::Copy { writer: *writer, copy: CopyState::Seeded };
        journal.stage_note(&note).expect("nothing of it was here");
    }
    journal.write(|_| ()).and_then(|()| journal.sync()).map_err(GroupError::from)?;
    let (cut, epoch) = (CountVector::new(), journal.state().epoch);
    let (end, beyond, arrived_ms) = (journal.start(), journal.end(), now_unix_ms);
    let point = Point { cut, hlc, arrived_ms, epoch, writers, end, beyond };
    if pins {
        let mark = Mark {
            kind: MarkKind::Pin,
            point: point.clone(),
            set_at_unix_ms: now_unix_ms,
            expires_at_unix_ms: None,
            asked_by: None,
        };
        let note = Note::Mark { name: SEEDED.to_owned(), mark: Some(mark) };
        journal.stage_note(&note).expect("the first mark");
        journal.write(|_| ()).and_then(|()| journal.sync()).map_err(GroupError::from)?;
    }
    // The group is there when this is.
    let (id, tag_secret) = (fresh_id(storage), fresh_secret(storage));
    let manifest = Manifest { id, tag_secret, ..manifest.clone() };
    manifest.write(storage).map_err(GroupError::from)?;
    Ok(point)
}

/// Of an attempt that was not finished.
fn clear_journal<S: Storage>(storage: &S) -> io::Result<()> {
    storage.create_dir(JOURNAL_DIR)?;
    for name in storage.list(JOURNAL_DIR)? {
        storage.remove(&tidelock_storage::join(JOURNAL_DIR, &name))?;
    }
    storage.sync_dir(JOURNAL_DIR)
}
