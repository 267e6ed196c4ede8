//! The disks of a writer: added, grown and removed by what its host attaches with.
//!
//! A disk's number is its place in the host's configuration and stays its own. The host says of a disk that was removed
//! that it has no size ([`DiskSpec`]): nothing more of it is taken, and it is in no state from the writer's next record
//! on. What it held stays in the journal and its image, so it is shown at all points up to that record, and a recovery
//! to one of them has it again.

use super::attach::{Refusal, refuse};
use super::{Group, GroupError};
use crate::manifest::{Member, RemovedDisk};
use tidelock_protocol::ids::WriterId;
use tidelock_protocol::message::{DiskSpec, RefusalKind, Writing};
use tidelock_protocol::vector::CountVector;
use tidelock_storage::Storage;
use tidelock_store::extents::DiskKey;
use tidelock_store::image::Image;

/// Those that the host has.
pub(super) fn present(disks: &[DiskSpec]) -> Vec<DiskSpec> {
    disks.iter().filter(|disk| !disk.is_removed()).cloned().collect()
}

/// Whether the host has disks, or parts of disks, that the backup has not.
pub(super) fn has_more(member: &Member, writing: &Writing) -> bool {
    let is_more = |disk: &DiskSpec| {
        let known = member.disks.iter().find(|known| known.id == disk.id);
        known.is_none_or(|known| known.size_bytes < disk.size_bytes)
    };
    writing.disks.iter().filter(|disk| !disk.is_removed()).any(is_more)
}

impl<S: Storage> Group<S> {
    /// Disks are added at the end, grow and are removed; everything else about them stays.
    pub(super) fn check_disks(&self, name: &str, writing: &Writing) -> Result<(), Refusal> {
        let mismatch = |reason| refuse(RefusalKind::Mismatch, reason);
        let Some(member) = self.manifest.member(writing.writer) else { return Ok(()) };
        for had in &member.disks {
            let has = writing.disks.iter().find(|disk| disk.id == had.id);
            let Some(has) = has.filter(|has| has.name == had.name) else {
                return mismatch(format!(
                    "the host's configuration gives {} the disks {}, the backup has {}. Disks are added at the end, \
                     and keep their order and names; to remove one, write removed = true in its section, and leave the \
                     section where it is",
                    name,
                    list(&writing.disks),
                    list(&member.disks)
                ));
            };
            if has.is_removed() {
                continue;
            }
            if member.is_removed(had.id) {
                return mismatch(format!(
                    "disk {} of {name} was removed from this group, and what was written to it since is not here: protect \
                     it as another disk, of another name",
                    had.name
                ));
            }
            if has.size_bytes < had.size_bytes {
                return mismatch(format!(
                    "disk {} of {name} has {} bytes at the host, and {} at the backup: disks grow, they do not shrink. \
                     Give it its size back, or protect it as another disk",
                    had.name, has.size_bytes, had.size_bytes
                ));
            }
        }
        Ok(())
    }

    /// The member's disks from this attachment on, and which of them are removed. A removed disk keeps its size here.
    pub(super) fn disks_after(&self, writing: &Writing) -> (Vec<DiskSpec>, Vec<RemovedDisk>) {
        let member = self.manifest.member(writing.writer);
        let known = |disk: &DiskSpec| member?.disks.iter().find(|known| known.id == disk.id);
        let after = self.journal.state().writers[writing.writer.index()].seq;
        let mut removed = member.map_or(Vec::new(), |member| member.removed.clone());
        let mut disks = Vec::new();
        for disk in &writing.disks {
            match (disk.is_removed(), known(disk)) {
                (false, _) => disks.push(disk.clone()),
                // It was never here.
                (true, None) => {}
                (true, Some(known)) => {
                    disks.push(known.clone());
                    if member.is_some_and(|member| !member.is_removed(disk.id)) {
                        removed.push(RemovedDisk { disk: disk.id, after });
                    }
                }
            }
        }
        (disks, removed)
    }

    /// A recovery takes this cut: disks that were removed later are there again.
    pub(super) fn bring_back_disks(&mut self, cut: &CountVector) -> Result<(), GroupError> {
        let mut manifest = self.manifest.clone();
        for (writer, member) in (0..).map(WriterId).zip(&mut manifest.members) {
            let Some(member) = member else { continue };
            member.removed.retain(|removed| removed.after < cut.get(writer));
        }
        if manifest != self.manifest {
            manifest.write(&self.storage)?;
            self.manifest = manifest;
        }
        Ok(())
    }

    /// What is beyond the old end reads as zeroes, at every point in time, until the host has brought it across.
    pub(super) fn grow_images(&self, writing: &Writing) -> Result<(), GroupError> {
        for disk in &writing.disks {
            let known = self.manifest.disk(writing.writer, disk.id);
            if known.is_none_or(|known| known.size_bytes >= disk.size_bytes) {
                continue;
            }
            let image = &self.images[&DiskKey { writer: writing.writer, disk: disk.id }];
            let path = self.manifest.image_path(writing.writer, disk);
            image.set_size(disk.size_bytes).map_err(|source| GroupError::Image { path, source })?;
        }
        Ok(())
    }

    /// For disks that have none.
    pub(super) fn create_images(&mut self, writing: &Writing) -> Result<(), GroupError> {
        for disk in writing.disks.iter().filter(|disk| !disk.is_removed()) {
            if self.manifest.disk(writing.writer, disk.id).is_some() {
                continue;
            }
            let path = self.manifest.image_path(writing.writer, disk);
            // A file of that name is left over from an attachment that was not finished.
            let created = Image::create(&self.storage, &path, disk.size_bytes)
                .and_then(|image| self.storage.sync_dir("images").map(|()| image));
            let image =
                created.map_err(|source| GroupError::Image { path: path.clone(), source })?;
            self.images.insert(DiskKey { writer: writing.writer, disk: disk.id }, image);
        }
        Ok(())
    }
}

fn list(disks: &[DiskSpec]) -> String {
    let one = |disk: &DiskSpec| match disk.is_removed() {
        true => format!("{} (removed)", disk.name),
        false => format!("{} ({} bytes)", disk.name, disk.size_bytes),
    };
    disks.iter().map(one).collect::<Vec<_>>().join(", ")
}
