//! A member's interface that goes away and comes back, as a tap does that QEMU or libvirt makes.
//!
//! The new one has another index, and no programs. Where others depend on tags, the rules cut it off,
//! both ways, from its first packet on (`MemberRules::only_that_index`), whether or not this process
//! lives: its guest hears nothing and tells nothing that P does not name. So nothing depends on when it
//! is noticed here, unless somebody had taken the rules away: then P is not complete. The programs are
//! attached to it, and only then the rules let it in. A member that is
//! alone in its group is let in at once, and its packets take the way through the queue until then. Its interface need
//! not be there when the gate starts: it may come with its VM.
//!
//! One that gets another name is cut off by its index until it has its own again: the queue's rules go
//! by the name.
//!
//! One that was put into a bridge, or taken out of one, sends past its rules: what they would hold is dropped then
//! (`rules_kept.rs`).
//!
//! Programs that somebody has taken off an interface that is still there are another matter: what the
//! guest has heard meanwhile was not seen. They are attached again, and the member is held until its
//! P is complete.

use super::{Gate, MemberGate, install};
use crate::rules::{Firewall, MemberRules, RulesError};
use crate::sys::now;
use tidelock_tagging::{TaggingError, interface_index, interface_mtu, interface_name};

/// Why an interface cannot be taken in.
#[derive(Debug, thiserror::Error)]
enum Trouble {
    #[error("interface {0} is gone; its guest is cut off until it is there again")]
    Gone(String),
    #[error(
        "there is no interface {0}: nothing that its guest sends by another one is held; if the guest runs, set \
         `interface` in [[group.member.network]] to its tap (`ip link` lists them)"
    )]
    Absent(String),
    #[error(
        "interface {was} is called {now} by now, and what its guest sends is dropped until it has its name again: \
         `ip link set {now} name {was}`"
    )]
    Renamed { was: String, now: String },
    #[error(
        "interface {interface} was made anew with an MTU of {found}, and other members count on {wanted}; its \
         guest is cut off: `ip link set {interface} mtu {wanted}`, or restart tidelockd"
    )]
    Narrow { interface: String, found: u32, wanted: u32 },
    #[error(
        "the programs cannot be attached to its interface, and none of its packets leaves: {0}"
    )]
    Unwatched(#[source] TaggingError),
    #[error(
        "the programs cannot be attached to its interface: all its packets take the way through the queue, and while \
         somebody has taken the rules away they leave unheld: {0}"
    )]
    Slow(#[source] TaggingError),
    #[error("its interface was made anew, and the rules are those of the one before: {0}")]
    Rules(#[from] RulesError),
}

/// What became of an interface.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Change {
    None,
    /// It was made anew, or is there for the first time, and is let in.
    Anew(u32),
    /// What its guest has heard meanwhile was not seen, because of this.
    Unseen(&'static str),
}

impl Gate {
    /// Looks at the members' interfaces, and takes in those that were made anew. To be called a few
    /// times a second. Returns whose P is not complete any more.
    pub fn follow_interfaces(&mut self) -> Vec<String> {
        let mut incomplete = Vec::new();
        let is_led_past = |member: &MemberGate| member.is_led_past(&self.firewall);
        if self.members.iter().any(|member| member.is_anew() || is_led_past(member)) {
            // New rules of one bring back those that somebody has taken away: that must be told first.
            self.follow_rules();
        }
        for member in &mut self.members {
            match member.follow_interface(&mut self.firewall) {
                Ok(change) => {
                    member.trouble = None;
                    match change {
                        Change::None => {}
                        Change::Anew(index) => tracing::info!(
                            member = member.name,
                            index,
                            "gate: the interface was made anew and is let in"
                        ),
                        Change::Unseen(why) => {
                            tracing::error!(
                                member = member.name,
                                "gate: {why}; they are back, and its packets are held until every \
                                 writer of the group has said how far it is"
                            );
                            for (_, handle) in &self.handles {
                                handle.look_again();
                            }
                            if !incomplete.contains(&member.name) {
                                incomplete.push(member.name.clone());
                            }
                        }
                    }
                }
                Err(trouble) => {
                    let said = trouble.to_string();
                    if member.trouble.as_ref() != Some(&said) {
                        match trouble {
                            // A tap that comes and goes with its VM. Who knows of the VM's disks says whether it runs.
                            Trouble::Absent(_) => {
                                tracing::info!(member = member.name, "gate: {said}")
                            }
                            _ => tracing::warn!(member = member.name, "gate: {said}"),
                        }
                        member.trouble = Some(said);
                    }
                }
            }
        }
        incomplete
    }
}

impl MemberGate {
    /// Whether what it sends does not come by its rules any more, and that is news.
    fn is_led_past(&self, firewall: &Firewall) -> bool {
        self.rules_trouble.is_none() && firewall.check_way(&self.installed.rules).is_err()
    }

    fn is_anew(&self) -> bool {
        let rules = &self.installed.rules;
        interface_index(&rules.interface).is_some_and(|index| rules.index != Some(index))
    }

    fn follow_interface(&mut self, firewall: &mut Firewall) -> Result<Change, Trouble> {
        let rules = &self.installed.rules;
        let (interface, is_needed) = (rules.interface.clone(), rules.only_that_index);
        let tags = self.tagging.tags_mut();
        let Some(index) = interface_index(&interface) else {
            let now = rules.index.and_then(interface_name);
            return match now {
                Some(now) if now != interface => Err(Trouble::Renamed { was: interface, now }),
                _ if is_needed => Err(Trouble::Gone(interface)),
                _ => Err(Trouble::Absent(interface)),
            };
        };
        if rules.index == Some(index) {
            return match tags {
                Some(tags) if !tags.are_attached() => {
                    if !is_needed {
                        return tags
                            .attach(&interface)
                            .map(|()| Change::None)
                            .map_err(Trouble::Slow);
                    }
                    self.pending.mark_incomplete(now());
                    tags.attach(&interface).map_err(Trouble::Unwatched)?;
                    Ok(Change::Unseen("somebody has taken the tagging programs off its interface"))
                }
                _ => Ok(Change::None),
            };
        }
        if let Some(wanted) = self.interface_mtu.filter(|_| is_needed) {
            let found = interface_mtu(&interface).map_err(Trouble::Unwatched)?;
            if found < wanted {
                return Err(Trouble::Narrow { interface, found, wanted });
            }
        }
        let unseen = self.has_heard_unseen;
        if unseen {
            self.pending.mark_incomplete(now());
        }
        let mut anew = MemberRules { index: Some(index), ..rules.clone() };
        let mut slow = None;
        if let Some(tags) = tags {
            match tags.attach(&interface) {
                // The programs may sit on yet another one by now: the rules let in only theirs.
                Ok(()) => anew.index = tags.attached_to(),
                Err(e) if is_needed => return Err(Trouble::Unwatched(e)),
                Err(e) => slow = Some(e),
            }
        }
        self.installed = install(firewall, &anew)?;
        self.has_heard_unseen = false;
        match slow {
            Some(e) => Err(Trouble::Slow(e)),
            None if unseen => {
                Ok(Change::Unseen("its interface was made anew while its rules were gone"))
            }
            None => Ok(Change::Anew(index)),
        }
    }
}
