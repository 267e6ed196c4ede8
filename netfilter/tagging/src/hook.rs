//! Where on an interface the programs run, and how they stay there when the process ends.
//!
//! | | stays because of | is replaced in one step by | goes |
//! |---|---|---|---|
//! | tcx (Linux 6.6 and later) | its link, pinned beside P | an update of the link | with the interface, or with link and pin |
//! | clsact | itself | a filter of the same handle and priority | with the interface, or with its qdisc |
//!
//! tcx costs a packet less, runs before what clsact has, and a `tc qdisc del` does not take it off.

use crate::{Direction, Hooks, TaggingError, cannot, forget_what_libbpf_said, mapped, pins};
use libbpf_rs::query::LinkTypeInfo;
use libbpf_rs::{Link, Program, TC_EGRESS, TC_INGRESS, TcHook, TcHookBuilder};
use std::os::fd::{AsFd, BorrowedFd};
use std::path::{Path, PathBuf};

/// Other filters of clsact come before or after by their number.
const PRIORITY: u32 = 100;
const HANDLE: u32 = 1;

/// A program on an interface.
#[derive(Debug)]
pub(crate) struct Hook {
    direction: Direction,
    interface: i32,
    by: By,
}

#[derive(Debug)]
enum By {
    Link { link: Link, pin: Option<PathBuf> },
    Filter,
}

impl Hook {
    /// Puts a program there, in the place of that of an earlier run. `pin`: where its link is kept, if it is to outlive
    /// the process. Also returns whether that run's program may have been there until now; clsact cannot tell one that
    /// was taken off from one that went with its interface.
    pub(crate) fn attach(
        program: &Program<'_>,
        (direction, interface): (Direction, i32),
        pin: Option<&Path>,
        hooks: Hooks,
    ) -> Result<(Hook, bool), TaggingError> {
        let mut filter = filter(program.as_fd(), direction, interface);
        let was_there = pin.is_none_or(Path::exists) || filter.query().is_ok();
        let link = match hooks {
            Hooks::Best => attach_link(program, interface, pin)?,
            Hooks::Clsact => None,
        };
        let (by, was_there) = match link {
            Some(link) => {
                // Of a run without tcx. Until now both were there: one drops what the other has tagged.
                take_off(filter)?;
                (By::Link { link, pin: pin.map(Path::to_owned) }, was_there)
            }
            None => {
                filter.create().map_err(|e| cannot("make a clsact qdisc", &e))?;
                filter.attach().map_err(|e| cannot("attach the programs", &e))?;
                pin.map_or(Ok(()), pins::remove)?;
                (By::Filter, true)
            }
        };
        Ok((Hook { direction, interface, by }, was_there))
    }

    /// Whether it is still there: others may have taken it off.
    pub(crate) fn has(&self, program: &Program<'_>) -> bool {
        let Ok(ours) = Program::id_from_fd(program.as_fd()) else { return false };
        match &self.by {
            By::Link { link, pin } => {
                let is_there = link.info().is_ok_and(|info| info.prog_id == ours)
                    && interface_of(link) == Some(self.interface);
                is_there && pin.as_deref().is_none_or(Path::exists)
            }
            By::Filter => {
                let there = filter(program.as_fd(), self.direction, self.interface).query();
                there.is_ok_and(|there| there == ours)
            }
        }
    }
}

/// Takes off what an ended run has left. An interface that is gone has nothing.
pub(crate) fn detach_left(
    direction: Direction,
    interface: &str,
    pin: &Path,
) -> Result<(), TaggingError> {
    pins::remove(pin)?;
    match mapped::interface_index(interface) {
        Ok(index) => take_off(filter_of_nobody(direction, index)),
        Err(_) => Ok(()),
    }
}

/// `None`: this kernel has no tcx.
fn attach_link(
    program: &Program<'_>,
    interface: i32,
    pin: Option<&Path>,
) -> Result<Option<Link>, TaggingError> {
    let left = pin.filter(|pin| pin.exists()).map(Link::open);
    if let Some(Ok(mut link)) = left
        && interface_of(&link) == Some(interface)
    {
        link.update_prog(program).map_err(|e| cannot("replace the programs", &e))?;
        return Ok(Some(link));
    }
    let mut link = match mapped::attach_tcx(program, interface) {
        Ok(link) => link,
        Err(e) if e.raw_os_error() == Some(libc::EINVAL) => {
            forget_what_libbpf_said();
            return Ok(None);
        }
        Err(e) => return Err(cannot("attach the programs", &e.into())),
    };
    if let Some(pin) = pin {
        // Of an interface that is gone, or that has another name by now.
        pins::remove(pin)?;
        link.pin(pin).map_err(|e| cannot("pin the programs", &e))?;
    }
    Ok(Some(link))
}

/// The index of the interface that a link is attached to.
fn interface_of(link: &Link) -> Option<i32> {
    match link.info().ok()?.info {
        LinkTypeInfo::Tcx(tcx) => i32::try_from(tcx.ifindex).ok(),
        _ => None,
    }
}

fn filter(program: BorrowedFd<'_>, direction: Direction, interface: i32) -> TcHook {
    let point = match direction {
        Direction::FromGuest => TC_INGRESS,
        Direction::ToGuest => TC_EGRESS,
    };
    TcHookBuilder::new(program)
        .ifindex(interface)
        .replace(true)
        .handle(HANDLE)
        .priority(PRIORITY)
        .hook(point)
}

/// Only names a place: a program is not needed to find what is there.
fn filter_of_nobody(direction: Direction, interface: i32) -> TcHook {
    filter(std::io::stdin().as_fd(), direction, interface)
}

/// A place that has nothing is fine.
fn take_off(mut filter: TcHook) -> Result<(), TaggingError> {
    match filter.query() {
        Ok(_) => filter.detach().map_err(|e| cannot("detach the programs", &e)),
        Err(_) => Ok(()),
    }
}
