//! The whole daemon: the gate, an owner loop for each writer, and the link, put together from a
//! configuration.
//!
//! Threads: one per writer (its owner loop), one for the gate, one that keeps its rules, one for the link, one that
//! watches over heartbeats. What they share is small and lock-free on the data path: P (owner → gate), C and the lease
//! (link → gate), records (owner → link), acknowledgements (link → owner).

mod activity_file;
mod adopting;
mod backlog_files;
mod beating;
mod bookmarking;
mod changed;
mod descriptors;
mod ending;
mod gating;
mod group_driver;
mod launch;
mod libvirt;
mod pauses;
mod redo;
mod rules_kept;
mod snapshot;
mod tending;
mod verifying;

use crate::clock;
use crate::config::{Config, Group, Member, Security};
use crate::control::{
    Adopting, BookmarkState, BookmarkWish, Bookmarking, ControlError, ControlTarget, ModeChange,
    SwitchState, SwitchWish, Switching, VerifyBegun, VerifyWish,
};
use crate::driver::link::{self as link_driver, Endpoint, Security as LinkSecurity};
use crate::held_gate::HeldGate;
use crate::stores::{StoreReport, Stores};
use gating::Unread;
use launch::{Launch, group_start};
pub(crate) use launch::{records_of, state_file};
use std::io;
use std::path::PathBuf;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use tidelock_daemon_core::group::GroupLoop;
use tidelock_daemon_core::heartbeat::Pulse;
use tidelock_daemon_core::link::connection::Hello;
use tidelock_daemon_core::link::member::MemberError;
use tidelock_daemon_core::link::port::{OwnerPort, ToLink};
use tidelock_daemon_core::link::{GateControl, LinkState};
use tidelock_daemon_core::owner::{OwnerView, ToOwner};
use tidelock_daemon_core::records::Records;
use tidelock_daemon_core::start::StartError;
use tidelock_daemon_core::state::{self, StateError};
use tidelock_daemon_core::stats::{LinkStats, OwnerStats};
use tidelock_daemon_core::status::{Status, UnheldHistory};
use tidelock_daemon_core::verifications::Verifications;
use tidelock_netfilter::gate::{Gate, GateError, GateHandle};
use tidelock_protocol::ids::{Channel, MonoNanos};
use tidelock_protocol::message::{Form, Mode};
use tidelock_storage::files::Files;
use tidelock_uring::FileError;
use tokio::sync::{Notify, mpsc, watch};

pub use ending::DRAIN_TIMEOUT;

/// The state of a member, on the files of this host.
type MemberState = state::MemberState<Files>;

/// Name and version, as the backup will log it.
pub const SOFTWARE: &str = concat!("tidelockd ", env!("CARGO_PKG_VERSION"));

/// Why the daemon cannot start, or had to end.
#[derive(Debug, thiserror::Error)]
pub enum HostError {
    /// A disk.
    #[error(transparent)]
    Disk(#[from] FileError),
    /// A disk's size is beyond what an export may have.
    #[error("disk {path}: {source}")]
    Export {
        /// The disk.
        path: PathBuf,
        /// Why.
        source: tidelock_nbd::ExportError,
    },
    /// A socket.
    #[error("cannot listen on {path}: {source}")]
    Socket {
        /// The socket.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// State that the runs before have left of a member.
    #[error(transparent)]
    Start(#[from] StartError),
    /// The id of this boot of the host.
    #[error(
        "it cannot be known which boot of the host this is: /proc/sys/kernel/random/boot_id: {0}"
    )]
    Boot(io::Error),
    /// The gate.
    #[error(transparent)]
    Gate(#[from] GateError),
    /// The packet filter.
    #[error(transparent)]
    Rules(#[from] tidelock_netfilter::rules::RulesError),
    /// A group waits to be adopted, and this daemon does not have all of it.
    #[error(
        "group {group} waits for `tidelock adopt`, and {} runs on another host: name this host for all its members until it \
         is `protected`",
        .elsewhere.join(", ")
    )]
    AdoptsAPart {
        /// The group.
        group: String,
        /// Members on other hosts.
        elsewhere: Vec<String>,
    },
    /// A machine description.
    #[error("{0}")]
    Machine(tidelock_config::Diagnostic),
    /// The backup's name.
    #[error(transparent)]
    ServerName(#[from] tidelock_tls::TlsError),
    /// Stores.
    #[error("the stores of this host cannot start: {0}")]
    Stores(io::Error),
    /// A thread.
    #[error("cannot start a thread: {0}")]
    Thread(io::Error),
    /// The stream of a member cannot go on in this run.
    #[error("{0}; start the daemon again: it will compare the sites")]
    Link(#[from] MemberError),
    /// A loop has ended that must not.
    #[error("{0}")]
    Loop(String),
}

impl HostError {
    /// `true` if a start fails in the same way until somebody corrects the configuration or the state of a member: there is no use
    /// in trying again. A file or a disk of the machine may be another one at the next start.
    #[must_use]
    pub fn needs_correction(&self) -> bool {
        matches!(
            self,
            Self::Start(StartError::State(StateError::Content { .. } | StateError::Format { .. }))
                | Self::AdoptsAPart { .. }
        )
    }
}

/// An error with all that is behind it, in one line.
fn with_sources(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(error) = source {
        text = format!("{text}: {error}");
        source = error.source();
    }
    text
}

/// A writer's loop, as the host sees it.
struct Writer {
    port: Arc<OwnerPort<ToOwner>>,
    thread: Option<JoinHandle<()>>,
    owner_stats: Arc<OwnerStats>,
    view: Arc<OwnerView>,
    pulse: Arc<Pulse>,
    link_stats: Arc<LinkStats>,
    state: MemberState,
    sockets: Vec<PathBuf>,
    verifications: Mutex<Verifications>,
    /// In the order of the configuration.
    disk_sizes_bytes: Vec<u64>,
}

/// A member, with what it has of both sides.
struct HostMember {
    config: Member,
    channel: Channel,
    control: Arc<dyn GateControl>,
    writer: Option<Writer>,
    /// The link's side of a member without disks.
    follower: Option<Follower>,
}

/// A member without disks, as the host sees it.
struct Follower {
    link_stats: Arc<LinkStats>,
    state: MemberState,
}

struct HostGroup {
    config: Group,
    state: Mutex<GroupLoop>,
    records: Records<Files>,
    /// Packets that left beside its gates.
    unheld: Mutex<UnheldHistory>,
    bookmarks: bookmarking::Bookmarks,
    adopting: adopting::Adopting,
    gate: Option<GateHandle>,
    members: Vec<HostMember>,
}

/// The running daemon.
pub struct Host {
    config: Config,
    stores: Stores,
    /// Kept by a host without groups, where no loop can fail.
    without_loops: Option<watch::Sender<Option<Arc<HostError>>>>,
    started_at: MonoNanos,
    /// Text for status: the clocks by which this host notices that it was paused. `None`: it is no virtual machine.
    virtual_machine: Option<String>,
    gate: Arc<Mutex<Option<Gate>>>,
    groups: Vec<HostGroup>,
    link_state: watch::Receiver<LinkState>,
    link_history: Arc<snapshot::LinkHistory>,
    link_thread: Mutex<Option<JoinHandle<()>>>,
    /// The link ends when the owner loops have, and this is gone: a host may have no writer.
    link: Mutex<Option<mpsc::UnboundedSender<(Channel, ToLink)>>>,
    stopping: Arc<AtomicBool>,
    /// The watch over heartbeats ends when this is gone.
    heartbeats: Option<beating::UntilDropped>,
    stop_asked: Notify,
    switch_asked: Notify,
    /// An owner waits until more of its times is on record.
    ceiling_wanted: Arc<Notify>,
    /// The first error that ended a loop.
    failure: watch::Receiver<Option<Arc<HostError>>>,
}

impl Host {
    /// Opens everything and starts all loops. The configuration has been checked.
    pub fn start(config: Config) -> Result<Host, HostError> {
        descriptors::check(&config);
        let state_dir = &config.host.state_dir;
        Files::make(state_dir.clone())
            .map_err(|source| StateError::Io { path: state_dir.clone(), source })
            .map_err(StartError::from)?;
        let (failed, failure) = watch::channel(None);
        let unread = Unread::of(&config);
        let gate = gating::start(&config, &unread)?;
        let (to_link, inbox) = mpsc::unbounded_channel();
        let ceiling_wanted = Arc::<Notify>::default();
        let mut link_members = Vec::new();
        let mut groups = Vec::new();
        for group in &config.groups {
            let gate_handle = gate.as_ref().and_then(|gate| gate.handle(group.name.as_str()));
            let records = records_of(&config, group);
            let state = group_driver::open(group, &records);
            let adopting = adopting::Adopting::open(group, &records)?;
            let found = group_start(&config, group, &state, adopting.waits())?;
            let mut members = Vec::new();
            for member in &group.members {
                let channel = Channel(link_members.len() as u16 + 1);
                let id = group.writer_id(&member.name.value);
                let control: Arc<dyn GateControl> = Arc::new(HeldGate {
                    handle: gate_handle.clone(),
                    writer: id,
                    pending: unread.get(group, member),
                    form: if group.is_tagged() { group.form } else { Form::Vector },
                    floor: Mutex::default(),
                });
                let control_of_member = control.clone();
                let launch = Launch {
                    config: &config,
                    group,
                    member,
                    channel,
                    gate: control,
                    link: to_link.clone(),
                    ceiling_wanted: ceiling_wanted.clone(),
                    failed: failed.clone(),
                    found: &found,
                };
                let (writer, follower, link_member) = match id {
                    None => {
                        let (follower, link_member) = launch.follower()?;
                        (None, Some(follower), link_member)
                    }
                    Some(id) => {
                        let (writer, link_member) =
                            launch.writer(id, unread.entry(group, member))?;
                        (Some(writer), None, link_member)
                    }
                };
                link_members.push(link_member);
                members.push(HostMember {
                    config: member.clone(),
                    channel,
                    control: control_of_member,
                    writer,
                    follower,
                });
            }
            groups.push(HostGroup {
                state: Mutex::new(state),
                records,
                unheld: Mutex::default(),
                bookmarks: bookmarking::Bookmarks::default(),
                adopting,
                gate: gate_handle,
                members,
                config: group.clone(),
            });
        }
        let (link_news, link_state) = watch::channel(LinkState::Connecting { after: None });
        let stopping = Arc::<AtomicBool>::default();
        let heartbeats = beating::start(&groups, stopping.clone())?;
        let gate = Arc::new(Mutex::new(gate));
        rules_kept::start(&gate)?;
        let handles = groups.iter().filter_map(|group| group.gate.clone()).collect();
        let virtual_machine = pauses::start(&gate, handles)?;
        let endpoint = endpoint(&config)?;
        let stores = Stores::start(&config, &endpoint).map_err(HostError::Stores)?;
        let mut host = Host {
            stores,
            without_loops: None,
            started_at: clock::mono_now(),
            virtual_machine,
            config,
            gate,
            groups,
            link_state,
            link_history: Arc::default(),
            link_thread: Mutex::default(),
            link: Mutex::new(Some(to_link)),
            stopping,
            heartbeats: Some(heartbeats),
            stop_asked: Notify::new(),
            switch_asked: Notify::new(),
            ceiling_wanted,
            failure,
        };
        host.begin_groups();
        if host.config.groups.is_empty() {
            host.without_loops = Some(failed);
            return Ok(host);
        }
        let link_thread = spawn("link", move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
            let result = match runtime {
                Ok(runtime) => runtime
                    .block_on(link_driver::run(endpoint, link_members, inbox, link_news))
                    .map_err(HostError::Link),
                Err(error) => Err(HostError::Thread(error)),
            };
            if let Err(error) = result {
                report(&failed, error);
            }
        })?;
        *host.link_thread.lock().expect("no panic while held") = Some(link_thread);
        Ok(host)
    }

    /// Waits until a loop has failed.
    pub async fn failed(&self) -> Arc<HostError> {
        let mut failure = self.failure.clone();
        let error = failure.wait_for(Option::is_some).await;
        match error {
            Ok(error) => error.clone().expect("waited for it"),
            Err(_) => Arc::new(HostError::Loop("every loop has ended".to_owned())),
        }
    }

    /// Waits until somebody has asked for a clean stop over the control API.
    pub async fn stop_asked(&self) {
        self.stop_asked.notified().await;
    }

    fn group(&self, name: &str) -> Result<&HostGroup, ControlError> {
        let known = || self.groups.iter().map(|g| g.config.name.as_str());
        let found = self.groups.iter().find(|g| g.config.name.as_str() == name);
        found.ok_or_else(|| ControlError::unknown_group(name, &known().collect::<Vec<_>>()))
    }

    /// Tells the backup that the gate's rules will be removed when this daemon has stopped. Returns whether it has that on
    /// record for every member here.
    fn leave_open(&self, group: &HostGroup) -> bool {
        if let Some(link) = &*self.link.lock().expect("no panic while held") {
            for member in &group.members {
                // A link that has ended tells nobody.
                let _ = link.send((member.channel, ToLink::LeaveOpen));
            }
        }
        let mut states = group.members.iter().filter_map(HostMember::state);
        states.all(MemberState::serves_unreached_is_kept)
    }

    fn writers(&self) -> impl Iterator<Item = (&str, &Writer)> {
        self.groups
            .iter()
            .flat_map(|g| &g.members)
            .filter_map(|m| Some((m.config.name.as_str(), m.writer.as_ref()?)))
    }
}

impl ControlTarget for Host {
    fn status(&self) -> Status {
        Host::status(self)
    }

    fn stores(&self) -> Vec<StoreReport> {
        self.stores.reports()
    }

    fn set_mode(&self, group: &str, mode: Mode) -> Result<ModeChange, ControlError> {
        let group = self.group(group)?;
        let name = group.config.name.to_string();
        let before = self.want_mode(group, mode)?;
        Ok(ModeChange { group: name, before, after: mode })
    }

    fn verify(&self, group: &str, wish: &VerifyWish) -> Result<VerifyBegun, ControlError> {
        Host::verify(self, self.group(group)?, wish)
    }

    fn bookmark(&self, group: &str, wish: BookmarkWish) -> Result<Bookmarking, ControlError> {
        Host::bookmark(self, self.group(group)?, wish)
    }

    fn bookmarked(&self, group: &str, id: u64) -> Result<BookmarkState, ControlError> {
        Host::bookmarked(self, self.group(group)?, id)
    }

    fn switchover(&self, group: &str, wish: SwitchWish) -> Result<Switching, ControlError> {
        Host::switchover(self, self.group(group)?, &wish)
    }

    fn switched(&self, group: &str) -> Result<SwitchState, ControlError> {
        Host::switched(self, self.group(group)?)
    }

    fn adopt(&self, group: &str) -> Result<Adopting, ControlError> {
        Host::adopt(self, self.group(group)?)
    }

    fn adopted(&self, group: &str) -> Result<(), ControlError> {
        Host::adopted(self, self.group(group)?)
    }

    fn leave_open(&self, group: &str) -> Result<bool, ControlError> {
        Ok(Host::leave_open(self, self.group(group)?))
    }

    fn stop(&self) -> Result<(), ControlError> {
        self.stop_asked.notify_one();
        Ok(())
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        drop(self.heartbeats.take());
        for group in &mut self.groups {
            for writer in group.members.iter_mut().filter_map(|m| m.writer.as_mut()) {
                writer.port.send(ToOwner::Stop);
                if let Some(thread) = writer.thread.take() {
                    // Its panic was reported when it happened.
                    let _ = thread.join();
                }
            }
        }
        drop(self.link.lock().map(|mut link| link.take()));
        // With the owner loops gone the link has nobody to serve; it ends with the process at the
        // latest, because a broken link may keep it from saying goodbye.
        drop(self.link_thread.lock().map(|mut thread| thread.take()));
    }
}

fn report(failed: &watch::Sender<Option<Arc<HostError>>>, error: HostError) {
    tracing::error!(%error, "cannot go on");
    failed.send_modify(|first| {
        first.get_or_insert(Arc::new(error));
    });
}

fn spawn(name: &str, run: impl FnOnce() + Send + 'static) -> Result<JoinHandle<()>, HostError> {
    std::thread::Builder::new().name(name.to_owned()).spawn(run).map_err(HostError::Thread)
}

fn endpoint(config: &Config) -> Result<Endpoint, HostError> {
    let security = match &config.backup.security {
        Security::Tls { files, .. } => LinkSecurity::Tls {
            files: files.clone(),
            server_name: tidelock_tls::server_name(&config.backup.server_name)?,
        },
        Security::Plaintext => LinkSecurity::Plaintext,
    };
    let hello = Hello { host: config.host.name.to_string(), software: SOFTWARE.to_owned() };
    Ok(Endpoint { address: config.backup.address.to_string(), security, hello })
}
