//! Booting a recovered member with QEMU, with nothing from the dead site: the description of the
//! machine was sent when protection began, and the files that it names must be at this site.
//!
//! | module | what it is for |
//! |---|---|
//! | [`description`] | Tidelock's own JSON (`docs/backup-server.md`) |
//! | [`libvirt`] | the useful part of a libvirt domain |
//! | [`qemu`] | QEMU's command line |
//! | [`accelerator`] | whether KVM works here |

pub mod accelerator;
pub mod description;
pub mod libvirt;
pub mod qemu;

pub use description::{Description, DiskDevice, NetworkDevice};
pub use qemu::{BootError, Overrides, command_line};

use tidelock_protocol::message::Machine;

/// Reads either form.
pub fn read(machine: &Machine) -> Result<Description, BootError> {
    match machine {
        Machine::Json(text) => Description::from_json(text),
        Machine::Libvirt(text) => libvirt::translate(text),
    }
}
