//! Machine descriptions of members: as hosts say them, and as an operator has approved them. Notes of the journal.
//!
//! Invariant: a host is attached, and an operator is answered, only when the description is on stable storage.

use super::attach::{Refusal, Unattached, refuse};
use super::durable::{NotOnRecord, NotYet};
use super::{Group, GroupError};
use thiserror::Error;
use tidelock_protocol::limits::MACHINES_MAX_BYTES;
use tidelock_protocol::machine::Machine;
use tidelock_protocol::message::RefusalKind;
use tidelock_storage::Storage;
use tidelock_store::journal::{
    BATCH_TARGET_BYTES, Behind, KeptMachine, Note, State, StateError, Ticket, machine_bytes,
};

/// Why a description is not approved.
#[derive(Debug, Error)]
pub enum ApproveError {
    /// The group has no such member.
    #[error("group {group} has no member {member}; it has: {known}")]
    Unknown {
        /// The group.
        group: String,
        /// The name that was asked for.
        member: String,
        /// The members that it has.
        known: String,
    },
    /// The descriptions would be too large for the journal's checkpoints.
    #[error("the description cannot be approved: {0}")]
    Bounds(StateError),
    /// The note is not durable: to be asked again when this is.
    #[error("the approval is being put on record")]
    NotYet(Ticket),
    /// The note cannot be written.
    #[error("the approval cannot be put on record: {0}")]
    Journal(String),
    /// The group does not work.
    #[error(transparent)]
    Group(#[from] GroupError),
}

fn described<'a>(state: &'a State, member: &str) -> Option<&'a Machine> {
    state.members.machines.get(member)?.described.as_ref()
}

fn approved<'a>(state: &'a State, member: &str) -> Option<&'a Machine> {
    state.members.machines.get(member)?.approved.as_ref()
}

impl<S: Storage> Group<S> {
    /// A member's machine, as far as it is on stable storage.
    #[must_use]
    pub fn machine(&self, member: &str) -> KeptMachine {
        self.durable_state.members.machines.get(member).cloned().unwrap_or_default()
    }

    /// Descriptions of hosts have a budget for each group.
    pub(super) fn check_machine_budget(
        &self,
        member: &str,
        machine: Option<&Machine>,
    ) -> Result<(), Refusal> {
        let Some(machine) = machine else { return Ok(()) };
        let machines = &self.journal.state().members.machines;
        let others = machines.iter().filter(|(name, _)| *name != member);
        let others = others.filter_map(|(_, of)| of.described.as_ref()).map(machine_bytes);
        if others.sum::<u64>() + machine_bytes(machine) <= MACHINES_MAX_BYTES {
            return Ok(());
        }
        refuse(
            RefusalKind::Quota,
            format!(
                "the machine descriptions of group {} together are larger than {}: make them smaller",
                self.manifest.group,
                crate::text::bytes(MACHINES_MAX_BYTES)
            ),
        )
    }

    /// Puts the description of a member's host on record, if it is another than before.
    pub(super) fn keep_machine(
        &mut self,
        member: &str,
        machine: Option<&Machine>,
    ) -> Result<(), Unattached> {
        let Some(machine) = machine else { return Ok(()) };
        if described(self.journal.state(), member) != Some(machine) {
            self.check_takes_machine()?;
            let change = |kept: &mut KeptMachine| kept.described = Some(machine.clone());
            let staged = self.change_machine(member, change);
            staged.map_err(|error| (RefusalKind::Quota, error.to_string()))?;
        }
        Ok(self.check_machine_on_record(member)?)
    }

    /// An operator approves what is to be booted. Answered once that is durable; [`ApproveError::NotYet`]: to be tried
    /// again.
    pub fn approve(&mut self, member: &str, machine: &Machine) -> Result<Behind<()>, ApproveError> {
        if !self.known_members().iter().any(|known| known == member) {
            let (group, known) = (self.manifest.group.clone(), self.known_members().join(", "));
            return Err(ApproveError::Unknown { group, member: member.to_owned(), known });
        }
        if approved(self.journal.state(), member) != Some(machine) {
            self.check_takes_machine()?;
            let change = |kept: &mut KeptMachine| kept.approved = Some(machine.clone());
            self.change_machine(member, change).map_err(ApproveError::Bounds)?;
        }
        Ok(Behind::new(self.journal.ticket(), ()))
    }

    /// Descriptions are large: none waits in a batch that is full, or has no room.
    fn check_takes_machine(&self) -> Result<(), NotOnRecord> {
        match self.is_stuck() || self.journal.staged_bytes() >= BATCH_TARGET_BYTES {
            true => self.check_on_record(self.journal.ticket()),
            false => Ok(()),
        }
    }

    fn check_machine_on_record(&self, member: &str) -> Result<(), NotOnRecord> {
        let noted = self.machines_noted.get(member);
        noted.map_or(Ok(()), |ticket| self.check_on_record(*ticket))
    }

    fn change_machine(
        &mut self,
        member: &str,
        change: impl FnOnce(&mut KeptMachine),
    ) -> Result<(), StateError> {
        let machines = &self.journal.state().members.machines;
        let mut machine = machines.get(member).cloned().unwrap_or_default();
        change(&mut machine);
        let machine = Some(machine);
        self.stage_of_member(&Note::Machine { member: member.to_owned(), machine })?;
        let durable = self.journal.durable();
        self.machines_noted.retain(|_, ticket| !durable.covers(*ticket));
        self.machines_noted.insert(member.to_owned(), self.journal.ticket());
        Ok(())
    }
}

impl From<NotOnRecord> for ApproveError {
    fn from(not: NotOnRecord) -> Self {
        match not {
            NotOnRecord::NotYet(NotYet(ticket)) => Self::NotYet(ticket),
            NotOnRecord::Cannot(reason) => Self::Journal(reason),
        }
    }
}
