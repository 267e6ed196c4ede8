//! The small files beside a group's journal, each replaced as a whole:
//!
//! | file | what it says |
//! |---|---|
//! | `group.json` | what the group is: writers, members, their disks, mode, grace. The group exists when this is there |
//! | `fold.json` | up to where the journal is in the images, and the oldest time that can be shown |
//! | `damaged.json` | which segments are damaged (`damage.rs`) |
//!
//! Epochs, seqs and copy states are not here but in the journal, in one order with the records.

use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::net::IpAddr;
use tidelock_cut::HeldBack;
use tidelock_protocol::hlc::Hlc;
use tidelock_protocol::ids::{DiskId, Epoch, GroupId, Incarnation, RunId, Seq, WriterId};
use tidelock_protocol::message::{CleanEnd, DiskSpec, Mode};
use tidelock_protocol::tag::TagKey;
use tidelock_protocol::vector::CountVector;
use tidelock_storage::Storage;
use tidelock_storage::json::{self, FileError};
use tidelock_store::FORMAT;
use tidelock_store::extents::DiskKey;

/// One member.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Member {
    /// The host that it belongs to, or [`Member::NOBODY`].
    pub host: String,
    /// The newest run of its daemon that has attached it; 0: none since the member was given to the host.
    pub incarnation: Incarnation,
    /// The run in force: the last one that its host has on stable storage.
    pub run: Option<RunId>,
    /// The run that attached last, if its host has not said that yet.
    pub proposed: Option<RunId>,
    /// The clean end of the run in force, if there was one.
    pub clean: Option<CleanEnd>,
    /// Its disks, also those that are not protected any more.
    pub disks: Vec<DiskSpec>,
    /// Its mode.
    pub mode: Mode,
    /// The lease that its host asks for.
    pub lease_ms: u64,
    /// Disks of the member that are not protected any more.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub removed: Vec<RemovedDisk>,
}

/// A disk that its host has taken out of the group. What it held stays in the history.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RemovedDisk {
    /// Which of the member's.
    pub disk: DiskId,
    /// The member's last record before. States that go beyond it do not have the disk.
    pub after: Seq,
}

impl Member {
    /// In the place of a host's name: no host has attached it yet.
    pub const NOBODY: &str = "";

    /// One whose disks were here before any host attached it (`group/seed.rs`).
    #[must_use]
    pub fn seeded(disks: Vec<DiskSpec>) -> Self {
        let host = Self::NOBODY.to_owned();
        let (incarnation, mode) = (Incarnation(0), Mode::Pipelined);
        Self {
            host,
            incarnation,
            run: None,
            proposed: None,
            clean: None,
            disks,
            mode,
            lease_ms: 0,
            removed: Vec::new(),
        }
    }

    /// Whether a disk is not protected any more.
    #[must_use]
    pub fn is_removed(&self, disk: DiskId) -> bool {
        self.removed.iter().any(|removed| removed.disk == disk)
    }

    /// The disks that are protected.
    #[must_use]
    pub fn present_disks(&self) -> Vec<DiskSpec> {
        self.disks.iter().filter(|disk| !self.is_removed(disk.id)).cloned().collect()
    }

    /// Whether no host has attached it yet.
    #[must_use]
    pub fn is_seeded(&self) -> bool {
        self.host == Self::NOBODY
    }
}

/// The group.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Manifest {
    /// [`FORMAT`].
    pub format: u32,
    /// Its identity, which its hosts keep: a group that is made anew under its old name has another one.
    pub id: GroupId,
    /// Secret from which the keys of the group's tags are derived. Hosts get only the keys of the previous, the current
    /// and the next period, so that the keys of a host that was taken out of the group expire.
    pub tag_secret: TagKey,
    /// Its name.
    pub group: String,
    /// The host that created it; [`Member::NOBODY`]: none has come yet, and it is the first one's that does.
    pub created_by: String,
    /// Its writers, by index.
    pub writers: Vec<String>,
    /// By writer index; `None`: never attached.
    pub members: Vec<Option<Member>>,
    /// The longest grace that any host asked for: waited out by every recovery.
    pub grace_ms: u64,
    /// All members and their addresses, as every host's configuration has them (`Tagging`).
    #[serde(default)]
    pub peers: Vec<String>,
    /// Members without disks, and the host that each belongs to.
    #[serde(default)]
    pub followers: BTreeMap<String, String>,
    /// Why the last recovery left out what it did. For people: what it took is in the journal.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub left_out: Option<LeftOut>,
}

/// What was found out about records that a recovery left out, when it happened.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LeftOut {
    /// The epoch that the recovery began, if it came to that.
    pub epoch: Epoch,
    /// By writer index.
    pub held_back: Vec<Option<HeldBack>>,
    /// The time of the point that was asked for; `None`: everything that could be recovered was.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub chosen: Option<Hlc>,
    /// Arrival of the newest record that was taken, by this site's clock.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_write_unix_ms: Option<u64>,
    /// When the primary was heard last, by this site's clock.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_heard_unix_ms: Option<u64>,
}

const GROUP: &str = "group.json";

impl Manifest {
    /// The time that the recovery of this epoch was asked for, if it was.
    #[must_use]
    pub fn chosen(&self, epoch: Epoch) -> Option<Hlc> {
        self.left_out.as_ref().filter(|left_out| left_out.epoch == epoch)?.chosen
    }

    /// Reads a group's. `None`: there is no group.
    pub fn read<S: Storage>(storage: &S) -> Result<Option<Self>, FileError> {
        let Some(manifest) = json::read::<S, Self>(storage, GROUP, FORMAT)? else {
            return Ok(None);
        };
        if manifest.members.len() != manifest.writers.len() {
            let reason = "as many members as writers must be listed".to_owned();
            return Err(FileError::Content { file: GROUP.to_owned(), reason });
        }
        Ok(Some(manifest))
    }

    /// Forgets members without disks that are none any more: those that all hosts have taken out of
    /// their configuration, and those that are writers by now.
    pub(crate) fn forget_followers(&mut self) {
        let Self { followers, peers, writers, .. } = self;
        // Who has said no peers does not know of members without disks.
        let is_there = |name: &str| peers.is_empty() || peers.iter().any(|peer| is_of(peer, name));
        followers.retain(|name, _| is_there(name) && !writers.contains(name));
    }

    /// Makes it durable.
    pub fn write<S: Storage>(&self, storage: &S) -> Result<(), FileError> {
        json::write(storage, "", GROUP, self)
    }

    /// A member.
    #[must_use]
    pub fn member(&self, writer: WriterId) -> Option<&Member> {
        self.members.get(writer.index())?.as_ref()
    }

    /// The name of a writer.
    #[must_use]
    pub fn name_of(&self, writer: WriterId) -> &str {
        self.writers.get(writer.index()).map_or("?", String::as_str)
    }

    /// The name of a disk among those of its group: `member.disk`.
    #[must_use]
    pub fn disk_name(&self, key: DiskKey) -> String {
        let disk = self.disk(key.writer, key.disk).map_or("?", |disk| &disk.name);
        format!("{}.{disk}", self.name_of(key.writer))
    }

    /// The disks that are in the group's state at a cut.
    pub fn disks_at<'a>(
        &'a self,
        cut: &'a CountVector,
    ) -> impl Iterator<Item = (WriterId, &'a DiskSpec)> {
        self.disks().filter(|(writer, disk)| {
            let removed = self
                .member(*writer)
                .and_then(|member| member.removed.iter().find(|removed| removed.disk == disk.id));
            removed.is_none_or(|removed| cut.get(*writer) <= removed.after)
        })
    }

    /// Every disk that is known, also those that were removed.
    pub fn disks(&self) -> impl Iterator<Item = (WriterId, &DiskSpec)> {
        let members = self.members.iter().enumerate();
        members.flat_map(|(i, member)| {
            let disks = member.iter().flat_map(|m| &m.disks);
            disks.map(move |disk| (WriterId(i as u16), disk))
        })
    }

    /// Where a disk's image is.
    #[must_use]
    pub fn image_path(&self, writer: WriterId, disk: &DiskSpec) -> String {
        tidelock_storage::join("images", &format!("{}.{}.img", self.name_of(writer), disk.name))
    }

    /// The disk of this number.
    #[must_use]
    pub fn disk(&self, writer: WriterId, id: DiskId) -> Option<&DiskSpec> {
        self.member(writer)?.disks.iter().find(|d| d.id == id)
    }
}

/// Whether this line of the peers is of this member: its name and its addresses. Other lines are settings.
pub(crate) fn is_of(peer: &str, member: &str) -> bool {
    let line = peer.split_once('=').filter(|(name, _)| *name == member);
    let is_address = |address: &str| address.parse::<IpAddr>().is_ok();
    line.is_some_and(|(_, of)| of.is_empty() || of.split(',').all(is_address))
}

#[cfg(test)]
mod tests {
    use super::*;
    use tidelock_storage::memory::Memory;

    #[test]
    fn files_survive_and_newer_ones_are_refused() {
        let disk = Memory::new();
        assert!(Manifest::read(&disk).unwrap().is_none());
        tidelock_storage::replace(&disk, "", "group.json", br#"{"format": 2, "new": true}"#)
            .unwrap();
        let error = Manifest::read(&disk).unwrap_err();
        assert!(matches!(error, FileError::Version { found: 2, .. }), "{error}");
    }
}
