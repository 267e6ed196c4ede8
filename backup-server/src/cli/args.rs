//! The arguments.

use clap::{Args as ClapArgs, Parser, Subcommand, ValueEnum};
use std::path::PathBuf;

/// Tidelock's backup site: receives what protected VMs write, and recovers them.
#[derive(Debug, Parser)]
#[command(name = "tidelock-backup", version)]
pub struct Args {
    /// The configuration
    #[arg(long, global = true, default_value = "/etc/tidelock/backup.toml", value_name = "FILE")]
    pub config: PathBuf,
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Run the server
    Serve {
        /// Only check the configuration
        #[arg(long)]
        check: bool,
    },
    /// Show the groups
    Status {
        /// For programs
        #[arg(long)]
        json: bool,
    },
    /// Make this site the primary of a group: fence the old primary, serve the disks
    Recover(Recover),
    /// Take a member out of a group for good: nothing waits for it any more, and it is not recovered
    Remove(Remove),
    /// Copy a disk of a group into an image, before or after a recovery, without stopping anything
    Export(Export),
}

#[derive(Debug, ClapArgs)]
pub(crate) struct Recover {
    /// The group
    pub(crate) group: String,
    /// It is certain that the old primary no longer runs: do not wait for its lease to end
    #[arg(long)]
    pub(crate) primary_is_dead: bool,
    /// Boot the group's VMs with QEMU
    #[arg(long)]
    pub(crate) boot: bool,
    /// For programs: one JSON object on standard output
    #[arg(long)]
    pub(crate) json: bool,
    /// Connect a network: NAME=tap:INTERFACE, NAME=bridge:BRIDGE, NAME=user; of one VM of several: MEMBER.NAME=...
    #[arg(long = "network", value_name = "[MEMBER.]NAME=HOW", requires = "boot")]
    pub(crate) networks: Vec<String>,
    /// Boot this description in place of the one that the host sent; with several VMs say whose it is
    #[arg(long = "machine", value_name = "[MEMBER=]FILE", requires = "boot")]
    pub(crate) machines: Vec<String>,
    /// Where kernels and the like are that the description names [default: DATA_DIR/boot]
    #[arg(long, value_name = "DIR", requires = "boot")]
    pub(crate) boot_dir: Option<PathBuf>,
    /// QEMU's accelerator: kvm or tcg [default: kvm where a machine really starts with it]
    #[arg(long, value_name = "NAME", requires = "boot")]
    pub(crate) accelerator: Option<String>,
    /// Another memory size
    #[arg(long, value_name = "MIB", requires = "boot")]
    pub(crate) memory_mib: Option<u64>,
    /// Another QEMU
    #[arg(long, value_name = "FILE", requires = "boot")]
    pub(crate) qemu: Option<PathBuf>,
    /// Print QEMU's command lines and do not run them
    #[arg(long, requires = "boot")]
    pub(crate) dry_run: bool,
    /// More arguments for QEMU, after `--`
    #[arg(last = true, requires = "boot")]
    pub(crate) qemu_arguments: Vec<String>,
}

#[derive(Debug, ClapArgs)]
pub(crate) struct Remove {
    /// The group
    pub(crate) group: String,
    /// The member
    pub(crate) member: String,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum Format {
    Raw,
    Qcow2,
}

#[derive(Debug, ClapArgs)]
pub(crate) struct Export {
    /// The group
    pub(crate) group: String,
    /// The disk, as member.disk
    pub(crate) disk: String,
    /// The image to make; it must not exist
    pub(crate) out: PathBuf,
    /// The image's format
    #[arg(long, value_enum, default_value = "raw")]
    pub(crate) format: Format,
}
