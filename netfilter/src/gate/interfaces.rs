//! A member's interface that goes away and comes back, as a tap does that QEMU or libvirt makes.
//!
//! The new one has another index, and no programs. The rules cut it off, both ways, from its first
//! packet on (`MemberRules::only_index`), whether or not this process lives: its guest hears nothing
//! and tells nothing that P does not name. So nothing depends on when it is noticed here. The
//! programs are attached to it, and only then the rules let it in.
//!
//! Programs that somebody has taken off an interface that is still there are another matter: what the
//! guest has heard meanwhile was not seen. They are attached again, and the member is held until its
//! P is complete.

use super::{Gate, MemberGate};
use crate::rules::{Firewall, Installed, MemberRules, RulesError};
use crate::sys::now;
use tidelock_tagging::{TaggingError, interface_index, interface_mtu};

/// Why an interface cannot be taken in.
#[derive(Debug, thiserror::Error)]
enum Trouble {
    #[error("interface {0} is gone; its guest is cut off until it is there again")]
    Gone(String),
    #[error(
        "interface {interface} was made anew with an MTU of {found}, and other members count on {wanted}; its \
         guest is cut off: `ip link set {interface} mtu {wanted}`, or restart tidelockd"
    )]
    Narrow { interface: String, found: u32, wanted: u32 },
    #[error("its interface was made anew and is cut off, because it cannot be watched: {0}")]
    Tagging(#[from] TaggingError),
    #[error("its interface was made anew and stays cut off: {0}")]
    Rules(#[from] RulesError),
}

/// What became of an interface.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Change {
    None,
    /// It was made anew, and is let in.
    Anew(u32),
    /// Programs were attached again to one that had been without.
    WasBare,
}

impl Gate {
    /// Looks at the interfaces of tagged members, and takes in those that were made anew. To be
    /// called a few times a second. Returns whose P is not complete any more.
    pub fn follow_interfaces(&mut self) -> Vec<String> {
        let mut incomplete = Vec::new();
        for member in &mut self.members {
            match member.follow_interface(&self.firewall) {
                Ok(change) => {
                    member.trouble = None;
                    match change {
                        Change::None => {}
                        Change::Anew(index) => tracing::info!(
                            member = member.name,
                            index,
                            "gate: the interface was made anew and is watched again"
                        ),
                        Change::WasBare => {
                            tracing::error!(
                                member = member.name,
                                "gate: somebody has taken the tagging programs off its interface; \
                                 they are back, and its packets are held until every writer of the \
                                 group has said how far it is"
                            );
                            for (_, handle) in &self.handles {
                                handle.look_again();
                            }
                            incomplete.push(member.name.clone());
                        }
                    }
                }
                Err(trouble) => {
                    let said = trouble.to_string();
                    if member.trouble.as_ref() != Some(&said) {
                        tracing::warn!(member = member.name, "gate: {said}");
                        member.trouble = Some(said);
                    }
                }
            }
        }
        incomplete
    }
}

impl MemberGate {
    fn follow_interface(&mut self, firewall: &Firewall) -> Result<Change, Trouble> {
        let rules = &self.installed.rules;
        let (Some(known), Some(tags)) = (rules.only_index, self.tagging.tags_mut()) else {
            return Ok(Change::None);
        };
        let Some(index) = interface_index(&rules.interface) else {
            return Err(Trouble::Gone(rules.interface.clone()));
        };
        if index == known {
            if tags.are_attached() {
                return Ok(Change::None);
            }
            self.pending.mark_incomplete(now());
            tags.attach(&rules.interface)?;
            return Ok(Change::WasBare);
        }
        if let Some(wanted) = self.interface_mtu {
            let found = interface_mtu(&rules.interface)?;
            if found < wanted {
                let interface = rules.interface.clone();
                return Err(Trouble::Narrow { interface, found, wanted });
            }
        }
        // The programs may sit on yet another one by now: the rules let in only theirs.
        tags.attach(&rules.interface)?;
        let only_index = tags.attached_to();
        self.installed = let_in(firewall, &self.installed, only_index)?;
        Ok(Change::Anew(only_index.unwrap_or(index)))
    }
}

fn let_in(
    firewall: &Firewall,
    installed: &Installed,
    only_index: Option<u32>,
) -> Result<Installed, RulesError> {
    firewall.install(&MemberRules { only_index, ..installed.rules.clone() })
}
