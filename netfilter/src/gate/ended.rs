//! What a gate has left that is not to come back: a stop leaves the rules of a member that must stay silent, and so
//! does a crash. Whoever knows that its guest is gone for good takes them away.

use super::{GateError, port_name};
use crate::nfqueue::{QueueNumber, kernel_counters};
use crate::rules::Firewall;
use std::path::Path;
use tidelock_tagging::{Pinned, detach_left, forget_left};

/// A member whose gate has ended.
#[derive(Clone, Copy, Debug)]
pub struct EndedGate<'a> {
    /// Its group.
    pub group: &'a str,
    /// Its name.
    pub member: &'a str,
    /// Which of its interfaces on this host this is, from 0.
    pub nth: usize,
    /// The interface.
    pub interface: &'a str,
    /// Its queue.
    pub queue: QueueNumber,
    /// Where P and the programs are pinned.
    pub pin_directory: &'a Path,
}

impl EndedGate<'_> {
    /// Whether somebody judges its packets: then they are not left.
    pub fn is_in_use(&self) -> Result<bool, GateError> {
        Ok(kernel_counters(self.queue)?.is_some())
    }

    /// Removes its rules, its programs and its P. Its packets pass unheld from now on. P goes first: the next run must
    /// not take it for one that was guarded all the time.
    pub fn remove(&self, firewall: &mut Firewall) -> Result<(), GateError> {
        if self.is_in_use()? {
            return Err(GateError::InUse { member: self.member.to_owned(), queue: self.queue });
        }
        let tagging = |source| GateError::Tagging { group: self.group.to_owned(), source };
        let Self { group, member, .. } = *self;
        let directory = self.pin_directory;
        let pinned = Pinned { keeps_pending: true, anew: true, directory, group, member };
        forget_left(pinned).map_err(tagging)?;
        firewall
            .remove(&port_name(member, self.nth))
            .map_err(|source| GateError::Rules { member: self.member.to_owned(), source })?;
        detach_left(self.interface, pinned).map_err(tagging)
    }
}
