//! Targets: the places where recovered members run, with nothing from the dead site. The description of the machine was
//! sent when protection began, and has sizes, kinds and names alone. Files and QEMU arguments are this site's own. A shard of
//! PostgreSQL is no machine: it has a standby, from the beginning on.
//!
//! | module | what it is for |
//! |---|---|
//! | `target` | the trait that each target implements, and the steps of a machine's life |
//! | [`qemu`] | QEMU on this host |
//! | [`postgres`] | PostgreSQL on this host: standbys of a store's shards, and views of them |
//! | `site` | `boot.toml`: what this site says about machines |
//! | `jail` | the user that QEMU or PostgreSQL runs as |
//! | `process` | processes that are found again |
//! | `network` | taps and bridges of this host |
#![forbid(unsafe_code)]

mod disk;
mod jail;
mod network;
pub mod postgres;
mod process;
pub mod qemu;
mod site;
mod target;

pub use disk::ExportedDisk;
pub use target::{Checked, DiskUser, Guest, Later, Plan, Prepared, Settings, Status, Stop, Target};

use std::path::PathBuf;
use std::sync::Arc;

/// Files of this site that say how machines run.
#[derive(Clone, Debug)]
pub struct Places {
    /// `boot.toml`.
    pub boot_file: PathBuf,
    /// Directory that relative paths in it start from.
    pub boot_dir: PathBuf,
}

/// All targets of this site. New machines run at the first one.
#[must_use]
pub fn targets(places: &Places) -> Vec<Arc<dyn Target>> {
    vec![Arc::new(qemu::Qemu::new(places.clone()))]
}
