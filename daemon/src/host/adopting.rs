//! A group whose disks are elsewhere still ([`crate::adoption`]), and the moment from which they are here.

use super::{Host, HostError, HostGroup};
use crate::adoption;
use crate::config::Group;
use crate::control::{AdoptedDisk, Adopting as Disks, ControlError, ControlErrorKind};
use std::sync::atomic::{AtomicBool, Ordering};
use tidelock_daemon_core::link::port::ToLink;
use tidelock_daemon_core::records::Records;
use tidelock_storage::files::Files;

/// Whether a group waits to be adopted.
#[derive(Debug)]
pub(super) struct Adopting {
    waits: AtomicBool,
}

fn refused(text: impl Into<String>) -> ControlError {
    ControlError::new(ControlErrorKind::Refused, text)
}

impl Adopting {
    pub(super) fn open(group: &Group, records: &Records<Files>) -> Result<Self, HostError> {
        let waits = records.is_adopting();
        if waits {
            tracing::warn!(
                group = group.name.as_str(),
                "the group waits for `tidelock adopt`: nothing of it goes to the backup before"
            );
        }
        let elsewhere = adoption::elsewhere(group);
        if waits && !elsewhere.is_empty() {
            let elsewhere = elsewhere.into_iter().map(str::to_owned).collect();
            return Err(HostError::AdoptsAPart { group: group.name.to_string(), elsewhere });
        }
        Ok(Self { waits: waits.into() })
    }

    /// Whether its disks are elsewhere still.
    pub(super) fn waits(&self) -> bool {
        self.waits.load(Ordering::SeqCst)
    }
}

impl Host {
    /// The disks that are to be brought here.
    pub(super) fn adopt(&self, group: &HostGroup) -> Result<Disks, ControlError> {
        let name = group.config.name.as_str();
        if !group.adopting.waits() {
            return Err(refused(format!(
                "the group does not wait to be adopted: its disks are here already. To adopt a guest, stop the daemon, \
                 and begin with `tidelock adopt {name} --prepare`"
            )));
        }
        let mut disks = Vec::new();
        for member in &group.members {
            let Some(writer) = &member.writer else { continue };
            let of_member = member.config.disks.iter().zip(&writer.disk_sizes_bytes);
            disks.extend(of_member.map(|(disk, size_bytes)| AdoptedDisk {
                member: member.config.name.to_string(),
                disk: disk.name.to_string(),
                size_bytes: *size_bytes,
                socket: disk.socket.value.clone(),
            }));
        }
        Ok(Disks { disks })
    }

    /// The guest writes here from now on: the group begins.
    pub(super) fn adopted(&self, group: &HostGroup) -> Result<(), ControlError> {
        self.adopt(group)?;
        let name = group.config.name.as_str();
        // For good first: a run after this one begins, too.
        group.records.forget_adopting().map_err(|error| {
            refused(format!("it cannot be put on record that the disks are here: {error}"))
        })?;
        group.adopting.waits.store(false, Ordering::SeqCst);
        tracing::warn!(group = name, "adopted: the guests' disks are here, and the group begins");
        if let Some(link) = &*self.link.lock().expect("no panic while held") {
            for member in &group.members {
                // A link that has ended tells nobody.
                let _ = link.send((member.channel, ToLink::Adopted));
            }
        }
        Ok(())
    }
}
