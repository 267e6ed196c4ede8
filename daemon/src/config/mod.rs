//! The daemon's configuration: what it may say, and what that means.
//!
//! A file is checked as a whole before anything starts ([`parse`]); what only the machine can tell
//! (do the files exist, are the disks as large as they should be) is checked after it
//! ([`check_machine`]) and points at the same lines. `docs/manual/host-configuration.md` lists every key, and
//! `daemon/examples/host.toml` shows each with a comment.
//!
//! Invariant: a [`Config`] that exists is consistent: names are unique, a lease is shorter than
//! its grace, a backlog takes the largest write, and no two things share a path, a socket, an
//! interface or a queue.

mod cards;
mod group;
mod heartbeat;
mod machine;
mod network;
mod on_disk;
mod read;
mod rules;
mod store;
mod unreachable;

use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use tidelock_config::{Diagnostics, HostPort, Located, Name, Place, Rate, Size};
use tidelock_daemon_core::heartbeat::HeartbeatSettings;
use tidelock_protocol::ids::{DiskId, WriterId};
use tidelock_protocol::message::{Form, Mode};
use tidelock_protocol::tag;

pub use machine::{certificate_warning, check_for_start, check_machine, disk_size, read_machine};
pub use read::parse;
pub use store::{ClockSource, Shard, Store};
pub use unreachable::WhenUnreachable;

/// Where the configuration is if nobody says otherwise.
pub const DEFAULT_PATH: &str = "/etc/tidelock/host.toml";
/// Where sockets are if nobody says otherwise.
pub const DEFAULT_RUNTIME_DIR: &str = "/run/tidelock";
/// Where what must outlive a restart is if nobody says otherwise.
pub const DEFAULT_STATE_DIR: &str = "/var/lib/tidelock";

/// Why a configuration cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file cannot be read.
    #[error(
        "cannot read the configuration {path}: {source}; `tidelock config check` takes its path"
    )]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// It says something wrong.
    #[error("{0}")]
    Wrong(Diagnostics),
}

/// Reads and checks a configuration file, without a look at the machine.
pub fn load(path: &Path) -> Result<Config, ConfigError> {
    let text = std::fs::read_to_string(path)
        .map_err(|source| ConfigError::Read { path: path.to_owned(), source })?;
    parse(&path.display().to_string(), &text).map_err(ConfigError::Wrong)
}

/// A whole configuration.
#[derive(Clone, Debug)]
pub struct Config {
    /// This host.
    pub host: Host,
    /// The backup.
    pub backup: Backup,
    /// Where metrics are served, if they are.
    pub metrics: Option<std::net::SocketAddr>,
    /// The groups, in order.
    pub groups: Vec<Group>,
    /// Source that measures the clock from which stamps of stores are taken.
    pub clock: ClockSource,
    /// The stores.
    pub stores: Vec<Store>,
}

/// This host.
#[derive(Clone, Debug)]
pub struct Host {
    /// Its name, which its certificate must have.
    pub name: Located<Name>,
    /// Sockets.
    pub runtime_dir: PathBuf,
    /// What must outlive a restart: granted epochs, clean-stop marks.
    pub state_dir: PathBuf,
    /// A `tracing` filter such as `info` or `info,tidelock_daemon_core::link=debug`.
    pub log: String,
    /// How log lines look.
    pub log_format: LogFormat,
}

impl Host {
    /// Where `tidelock` reaches the daemon.
    #[must_use]
    pub fn control_socket(&self) -> PathBuf {
        control_socket(&self.runtime_dir)
    }
}

/// Where `tidelock` reaches a daemon with this runtime directory.
#[must_use]
pub fn control_socket(runtime_dir: &Path) -> PathBuf {
    runtime_dir.join("control.sock")
}

/// How log lines look.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogFormat {
    /// For people: time, level, text, `key=value`.
    Text,
    /// One JSON object a line.
    Json,
}

/// The backup, and how the link to it is secured.
#[derive(Clone, Debug)]
pub struct Backup {
    /// Where to connect to.
    pub address: HostPort,
    /// The name that its certificate must have.
    pub server_name: String,
    /// TLS, or plaintext for a test link.
    pub security: Security,
}

/// The security of the link.
#[derive(Clone, Debug)]
pub enum Security {
    /// TLS 1.3 with certificates on both sides.
    Tls {
        /// The files.
        files: tidelock_tls::Files,
        /// Where `[tls]` stands.
        place: Place,
    },
    /// Nothing: anyone on the way can read and change every disk. For test links.
    Plaintext,
}

/// VMs that are protected, cut and recovered together.
#[derive(Clone, Debug)]
pub struct Group {
    /// Its name.
    pub name: Located<Name>,
    /// The mode at start.
    pub mode: Mode,
    /// What becomes of packets that have waited too long for the backup.
    pub when_unreachable: WhenUnreachable,
    /// Whether guests wait for the backup at a start.
    pub before_first_contact: BeforeFirstContact,
    /// The limit of the backlog of each writer.
    pub backlog: Size,
    /// What of it is on disk, beyond what memory holds; `None`: nothing.
    pub backlog_on_disk: Option<BacklogOnDisk>,
    /// For how long the gate may be open after a renewal.
    pub lease: Duration,
    /// How long the backup waits after the last renewal before it may promote.
    pub grace: Duration,
    /// Limits of the initial copy and of a resync.
    pub copy: CopySettings,
    /// When and how gently the sites are compared while all is well.
    pub verify: VerifySettings,
    /// Where the sites may differ, kept for the time after a crash; `None`: not kept.
    pub activity_log: Option<ActivitySettings>,
    /// How soon it is found that replication has stopped without a word; `None`: not looked for.
    pub heartbeat: Option<HeartbeatSettings>,
    /// Its members on this host.
    pub members: Vec<Member>,
    /// Every member on whatever host, in the order of the file.
    pub roster: Vec<Peer>,
    /// How packets between members say what they depend on.
    pub form: Form,
    /// Where packets wait.
    pub boundary: Boundary,
    /// How they are tagged.
    pub tag: TagSettings,
    /// By how much a wall clock may jump, or another member's be ahead, before it is an error.
    pub max_clock_lead: Duration,
    /// How often a writer that has nothing to write says so, in the HLC form.
    pub idle_interval: Duration,
}

/// What becomes of guests until a start has reached the backup.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum BeforeFirstContact {
    /// Their writes wait.
    #[default]
    Wait,
    /// They are served, and clients are told what no backup has.
    ServeUnprotected,
}

impl BeforeFirstContact {
    /// Whether guests are served.
    #[must_use]
    pub fn serves(self) -> bool {
        self == Self::ServeUnprotected
    }
}

/// One member of a group, as every host must know it.
#[derive(Clone, Debug)]
pub struct Peer {
    /// Its name.
    pub name: Located<Name>,
    /// The host that it is on; `None`: this one.
    pub host: Option<Name>,
    /// What it does; a writer has a place in the count vectors.
    pub roles: Roles,
    /// It has been removed; a writer's place stays taken.
    pub removed: bool,
    /// What it sends from.
    pub addresses: Vec<IpAddr>,
}

/// Where a group's packets wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Boundary {
    /// Where they leave the group; inside it they are tagged.
    Group,
    /// Where they leave a member: each is protected by itself (PipeCloud's naive variant).
    Member,
}

/// How packets inside a group are tagged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TagSettings {
    /// The number of the IPv4 option.
    pub option: u8,
    /// The longest packet that every way between members takes, if it is not the interface's.
    pub mtu: Option<u32>,
    /// Something on the way takes options out: members' packets to each other wait, too.
    pub strip_path: bool,
    /// The bits of a packet's mark that the kernel programs use.
    pub mark_mask: u32,
    /// Nothing is tagged or merged, and packets inside the group pass: clients see what a disaster
    /// undoes. For drills that must notice.
    pub off_for_a_demonstration: bool,
}

impl Group {
    /// The names of all writers: a writer's index in the count vectors is its place here.
    #[must_use]
    pub fn writers(&self) -> Vec<String> {
        self.writing().map(|peer| peer.name.to_string()).collect()
    }

    /// Whether packets between members carry tags.
    #[must_use]
    pub fn is_tagged(&self) -> bool {
        self.boundary == Boundary::Group && self.present().count() > 1
    }

    /// Whether it has other writers than one.
    #[must_use]
    pub fn has_several_writers(&self) -> bool {
        self.present().filter(|peer| peer.roles.writer).count() > 1
    }

    /// Every member that was not removed.
    pub fn present(&self) -> impl Iterator<Item = &Peer> {
        self.roster.iter().filter(|peer| !peer.removed)
    }

    /// What every host of the group must agree on: one line for each member, after those for what is not usual.
    #[must_use]
    pub fn peers(&self) -> Vec<String> {
        let line = |peer: &Peer| {
            let addresses: Vec<_> = peer.addresses.iter().map(IpAddr::to_string).collect();
            format!("{}={}", peer.name.value, addresses.join(","))
        };
        let TagSettings { option, strip_path, off_for_a_demonstration, .. } = self.tag;
        let unusual = match self.boundary {
            Boundary::Member => vec![(true, "boundary=member".to_owned())],
            Boundary::Group => vec![
                (option != tag::IPV4_OPTION, format!("tag.option={option}")),
                (strip_path, "tag.strip_path=true".to_owned()),
                (off_for_a_demonstration, "tagging=off-for-a-demonstration".to_owned()),
            ],
        };
        let unusual = unusual.into_iter().filter_map(|(is_so, line)| is_so.then_some(line));
        unusual.chain(self.present().map(line)).collect()
    }

    /// A member's index in the count vectors, if it writes.
    #[must_use]
    pub fn writer_id(&self, member: &Name) -> Option<WriterId> {
        let index = self.writing().position(|peer| peer.name.value == *member)?;
        Some(WriterId(u16::try_from(index).expect("fewer writers than 65536")))
    }

    fn writing(&self) -> impl Iterator<Item = &Peer> {
        self.roster.iter().filter(|peer| peer.roles.writer)
    }
}

/// Limits of the initial copy and of a resync.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CopySettings {
    /// The most that copies send, if limited.
    pub rate: Option<Rate>,
    /// No copy is read while so much is sent and not acknowledged.
    pub window: Size,
}

/// Verification: comparing the sites while all is well.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VerifySettings {
    /// How long after the last one the next one begins by itself; `None`: only on command.
    pub every: Option<Duration>,
    /// The most that is read of the local disks for it.
    pub rate: Rate,
}

/// Sizes of a new activity log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ActivitySettings {
    /// What is compared as a whole after a crash: a power of two.
    pub extent: Size,
    /// How many extents may differ before all of the disks count as different.
    pub slots: u32,
}

/// Where the backlog is beyond what memory holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BacklogOnDisk {
    /// How far each writer may be ahead of the backup.
    pub size: Size,
    /// Where groups have their directories for it; `None`: where the state is.
    pub directory: Option<PathBuf>,
    /// What becomes of guests when it is full.
    pub at_limit: AtLimit,
}

/// What becomes of guests when their backlog on disk is full.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum AtLimit {
    /// They go on: nothing is recorded any more, and where they write is compared later.
    #[default]
    Map,
    /// Their writes wait.
    Wait,
}

/// One VM.
#[derive(Clone, Debug)]
pub struct Member {
    /// Its name.
    pub name: Located<Name>,
    /// What it does.
    pub roles: Roles,
    /// What to boot after a disaster: a JSON description or a libvirt domain document.
    pub machine: Option<Located<PathBuf>>,
    /// Its protected disks.
    pub disks: Vec<Disk>,
    /// Those that are protected no more.
    pub removed_disks: Vec<RemovedDisk>,
    /// Where its packets are held: one for each network card that talks to clients or to other members.
    pub networks: Vec<Network>,
    /// Cards of its machine that are not held, by MAC address or by name.
    pub ungated: Located<Vec<String>>,
}

/// What a member does (PipeCloud 3.2).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Roles {
    /// It has protected disks.
    pub writer: bool,
    /// It passes on what it hears from others of the group.
    pub intermediate: bool,
    /// It may talk to clients.
    pub outbound: bool,
}

/// One protected disk.
#[derive(Clone, Debug)]
pub struct Disk {
    /// Its number within its writer: its place in the file.
    pub id: DiskId,
    /// Its name, also of the NBD export.
    pub name: Located<Name>,
    /// A raw image or a block device.
    pub path: Located<PathBuf>,
    /// The size that it must have, if it is to be checked.
    pub size: Option<Located<Size>>,
    /// The operator says that it is raw, whatever it begins with.
    pub is_raw: bool,
    /// Where its NBD server listens.
    pub socket: Located<PathBuf>,
    /// The user whose socket it is; `None`: the daemon's own.
    pub socket_owner: Option<Located<String>>,
    /// Clients that may use it at once.
    pub connections: usize,
}

/// A disk that is protected no more. Its place in the file stays taken.
#[derive(Clone, Debug)]
pub struct RemovedDisk {
    /// Its number within its writer.
    pub id: DiskId,
    /// Its name.
    pub name: Located<Name>,
}

/// Where the packets of one network card of a member are held.
#[derive(Clone, Debug)]
pub struct Network {
    /// The host's interface that the guest's packets come in by (its tap).
    pub interface: Located<String>,
    /// How the packets go on from there.
    pub topology: Topology,
    /// The kernel's queue.
    pub queue: Located<u16>,
    /// The most packets that are held; above it the newest are dropped.
    pub held_packets_max: u32,
}

/// How a guest's packets leave the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Topology {
    /// The host routes them.
    Routed,
    /// The interface is a port of a bridge.
    Bridged,
}
