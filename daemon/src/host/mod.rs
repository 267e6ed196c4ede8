//! The whole daemon: the gate, an owner loop for each writer, and the link, put together from a
//! configuration.
//!
//! Threads: one per writer (its owner loop), one for the gate, one for the link. What they share is
//! small and lock-free on the data path: P (owner → gate), C and the lease (link → gate), records
//! (owner → link), acknowledgements (link → owner).

mod gating;
mod snapshot;

use crate::clock;
use crate::config::{self, Config, Group, Member, Security};
use crate::control::{ControlError, ControlTarget, ModeChange};
use crate::copy_job::Bounds;
use crate::link::connection::Hello;
use crate::link::connector::{self, Endpoint};
use crate::link::member::{Member as LinkMember, MemberError, MemberParts, Presence};
use crate::link::port::OwnerPort;
use crate::link::{GateControl, LinkState};
use crate::owner::{
    DiskSetup, Drained, Owner, OwnerParts, OwnerView, PublishPending, Several, ToOwner,
};
use crate::sequencer::Settings;
use crate::state::{MemberState, Opened, StateError};
use crate::stats::{LinkStats, OwnerStats};
use crate::status::Status;
use gating::{HeldGate, PendingEntry, Unread};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant, SystemTime};
use tidelock_netfilter::gate::{Gate, GateError, GateHandle, RulesAtStop, RulesLeft};
use tidelock_protocol::hlc::Hlc;
use tidelock_protocol::ids::{Channel, MonoNanos, WriterId};
use tidelock_protocol::limits;
use tidelock_protocol::message::{Attach, DiskSpec, LastRun, Mode};
use tidelock_uring::{EventFd, FileError, LocalFile, OpenRequest, SizeRule};
use tokio::sync::{Notify, mpsc, oneshot, watch};

/// Name and version, as the backup will log it.
pub const SOFTWARE: &str = concat!("tidelockd ", env!("CARGO_PKG_VERSION"));
/// How long a clean stop waits for the backup.
pub const DRAIN_TIMEOUT: Duration = Duration::from_secs(30);
/// How often the ceilings of times are looked at: far oftener than they are reached.
const CEILING_LOOK_EVERY: Duration = Duration::from_millis(500);
/// How long a clean stop waits for the link to say goodbye.
const GOODBYE_TIMEOUT: Duration = Duration::from_secs(2);
/// How long a start waits for a disk's socket to be let go of by a daemon that was killed.
const SOCKET_WAIT_MAX: Duration = Duration::from_secs(2);
const SOCKET_RETRY_EVERY: Duration = Duration::from_millis(10);

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
    /// A member's state.
    #[error(transparent)]
    State(#[from] StateError),
    /// The gate.
    #[error("{}", with_sources(.0))]
    Gate(#[from] GateError),
    /// The packet filter.
    #[error("{}", with_sources(.0))]
    Rules(#[from] tidelock_netfilter::rules::RulesError),
    /// A machine description.
    #[error("{0}")]
    Machine(tidelock_config::Diagnostic),
    /// The backup's name.
    #[error(transparent)]
    ServerName(#[from] tidelock_tls::TlsError),
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
    link_stats: Arc<LinkStats>,
    state: MemberState,
    sockets: Vec<PathBuf>,
    /// In the order of the configuration.
    disk_sizes_bytes: Vec<u64>,
}

/// A member, with what it has of both sides.
struct HostMember {
    config: Member,
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
    mode: Mutex<Mode>,
    history: snapshot::GroupHistory,
    gate: Option<GateHandle>,
    members: Vec<HostMember>,
}

/// The running daemon.
pub struct Host {
    config: Config,
    started_at: MonoNanos,
    gate: Mutex<Option<Gate>>,
    groups: Vec<HostGroup>,
    link_state: watch::Receiver<LinkState>,
    link_history: Arc<snapshot::LinkHistory>,
    link_thread: Mutex<Option<JoinHandle<()>>>,
    stopping: AtomicBool,
    stop_asked: Notify,
    /// The first error that ended a loop.
    failure: watch::Receiver<Option<Arc<HostError>>>,
}

impl Host {
    /// Opens everything and starts all loops. The configuration has been checked.
    pub fn start(config: Config) -> Result<Host, HostError> {
        let (failed, failure) = watch::channel(None);
        let unread = Unread::of(&config);
        let gate = gating::start(&config, &unread)?;
        let (to_link, inbox) = mpsc::unbounded_channel();
        let mut link_members = Vec::new();
        let mut groups = Vec::new();
        for group in &config.groups {
            let gate_handle = gate.as_ref().and_then(|gate| gate.handle(group.name.as_str()));
            let mut members = Vec::new();
            for member in &group.members {
                let channel = Channel(link_members.len() as u16 + 1);
                let id = group.writer_id(&member.name.value);
                let control: Arc<dyn GateControl> = Arc::new(HeldGate {
                    handle: gate_handle.clone(),
                    writer: id,
                    pending: unread.get(group, member),
                });
                let mut follower = None;
                let writer = match id {
                    None => {
                        let (stats, link_member) =
                            follow(&config, group, member, channel, control)?;
                        link_members.push(link_member);
                        follower = Some(stats);
                        None
                    }
                    Some(_) => {
                        let launch = Launch {
                            config: &config,
                            group,
                            member,
                            channel,
                            gate: control,
                            pending: unread.entry(group, member),
                            link: to_link.clone(),
                            failed: failed.clone(),
                        };
                        let (writer, link_member) = launch.writer()?;
                        link_members.push(link_member);
                        Some(writer)
                    }
                };
                members.push(HostMember { config: member.clone(), writer, follower });
            }
            groups.push(HostGroup {
                mode: Mutex::new(group.mode),
                history: snapshot::GroupHistory::default(),
                gate: gate_handle,
                members,
                config: group.clone(),
            });
        }
        let endpoint = endpoint(&config)?;
        let (state, link_state) =
            watch::channel(LinkState::Down { reason: "connecting".to_owned() });
        let link_thread = spawn("link", move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
            let result = match runtime {
                Ok(runtime) => runtime
                    .block_on(connector::run(endpoint, link_members, inbox, state))
                    .map_err(HostError::Link),
                Err(error) => Err(HostError::Thread(error)),
            };
            if let Err(error) = result {
                report(&failed, error);
            }
        })?;
        Ok(Host {
            started_at: clock::mono_now(),
            config,
            gate: Mutex::new(gate),
            groups,
            link_state,
            link_history: Arc::default(),
            link_thread: Mutex::new(Some(link_thread)),
            stopping: AtomicBool::new(false),
            stop_asked: Notify::new(),
            failure,
        })
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

    /// Follows the link and every group, and logs what changes. Runs as long as the daemon does.
    pub async fn watch(self: Arc<Self>) {
        tokio::join!(
            self.link_history.follow(self.link_state.clone()),
            self.monitor(),
            self.keep_ceilings(),
            self.watch_certificate()
        );
    }

    /// Keeps what is on record of each writer's times ahead of those that it gives out.
    async fn keep_ceilings(&self) {
        let mut said = false;
        loop {
            for (name, writer) in self.writers() {
                let last = Hlc(writer.owner_stats.last_hlc.load(Ordering::Relaxed));
                match writer.state.keep_ahead_of(last) {
                    Ok(ceiling_ms) => writer.view.set_hlc_ceiling_ms(ceiling_ms),
                    Err(_) if said => {}
                    Err(error) => {
                        said = true;
                        tracing::error!(member = name, %error, "times no longer follow the clock");
                    }
                }
            }
            tokio::time::sleep(CEILING_LOOK_EVERY).await;
        }
    }

    /// Warns in time of a certificate that ends: now, and once a day.
    async fn watch_certificate(&self) {
        let Security::Tls { files, .. } = &self.config.backup.security else { return };
        loop {
            // What is wrong with the files is said by each attempt to connect.
            if let Ok(credentials) = files.load()
                && let Some(text) =
                    config::certificate_warning(credentials.valid_for(SystemTime::now()))
            {
                tracing::warn!("{text}");
            }
            tokio::time::sleep(Duration::from_secs(86_400)).await;
        }
    }

    /// Waits until somebody has asked for a clean stop over the control API.
    pub async fn stop_asked(&self) {
        self.stop_asked.notified().await;
    }

    /// Ends cleanly: no new requests, everything to the backup, rules removed where that is safe.
    /// What could not be finished within the timeout is said, and left fail-closed.
    pub async fn stop(&self) -> Result<(), HostError> {
        self.stopping.store(true, Ordering::SeqCst);
        let until = Instant::now() + DRAIN_TIMEOUT;
        let mut drains = Vec::new();
        for (name, writer) in self.writers() {
            let (reply, drained) = oneshot::channel();
            writer.port.send(ToOwner::Drain(reply));
            drains.push((name, writer, drained));
        }
        let mut all = true;
        for (name, writer, drained) in drains {
            let left = until.saturating_duration_since(Instant::now());
            match tokio::time::timeout(left, drained).await {
                Ok(Ok(Drained { seq, hlc, whole })) => {
                    if whole {
                        writer.state.ended_cleanly(seq, hlc)?;
                    }
                    tracing::info!(member = name, %seq, clean = whole, "drained");
                }
                _ => {
                    all = false;
                    writer.port.send(ToOwner::Stop);
                    tracing::warn!(
                        member = name,
                        lag_writes = writer.link_stats.lag_writes(),
                        "the backup did not take everything in time: packets stay held, and the \
                         next start compares the sites"
                    );
                }
            }
        }
        self.stop_gate(all)?;
        // The owner loops are gone; the link says goodbye and ends.
        let until = Instant::now() + GOODBYE_TIMEOUT;
        while self.link_is_running() && Instant::now() < until {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        for socket in self.groups.iter().flat_map(|g| &g.members).filter_map(|m| m.writer.as_ref())
        {
            for path in &socket.sockets {
                // Gone is as good.
                let _ = std::fs::remove_file(path);
            }
        }
        Ok(())
    }

    fn link_is_running(&self) -> bool {
        let thread = self.link_thread.lock().expect("no panic while held");
        thread.as_ref().is_some_and(|thread| !thread.is_finished())
    }

    fn writers(&self) -> impl Iterator<Item = (&str, &Writer)> {
        self.groups
            .iter()
            .flat_map(|g| &g.members)
            .filter_map(|m| Some((m.config.name.as_str(), m.writer.as_ref()?)))
    }

    fn stop_gate(&self, drained: bool) -> Result<(), HostError> {
        let Some(gate) = self.gate.lock().expect("no panic while held").take() else {
            return Ok(());
        };
        let rules = if drained { RulesAtStop::RemoveWhenSettled } else { RulesAtStop::Leave };
        for stopped in gate.stop(rules)? {
            match stopped.rules {
                RulesLeft::Removed => {
                    tracing::info!(member = stopped.member, "gate: rules removed");
                }
                RulesLeft::InPlace(why) => tracing::warn!(
                    member = stopped.member,
                    why,
                    dropped_packets = stopped.dropped_packets,
                    "gate: the rules stay, no packet of this guest leaves until the daemon runs"
                ),
                RulesLeft::Failed(error) => {
                    tracing::error!(member = stopped.member, %error, "gate: cannot remove rules");
                }
            }
        }
        Ok(())
    }
}

impl ControlTarget for Host {
    fn status(&self) -> Status {
        Host::status(self)
    }

    fn set_mode(&self, group: &str, mode: Mode) -> Result<ModeChange, ControlError> {
        let Some(group) = self.groups.iter().find(|g| g.config.name.as_str() == group) else {
            let known: Vec<&str> = self.groups.iter().map(|g| g.config.name.as_str()).collect();
            return Err(ControlError::unknown_group(group, &known));
        };
        let name = group.config.name.to_string();
        let mut current = group.mode.lock().expect("no panic while held");
        let before = std::mem::replace(&mut *current, mode);
        if before != mode {
            // The gate first: towards async nothing is lost by it; away from async nothing that
            // depends on later writes can leave any more.
            if let Some(gate) = &group.gate {
                gate.set_mode(mode);
            }
            for writer in group.members.iter().filter_map(|m| m.writer.as_ref()) {
                writer.port.send(ToOwner::SetMode(mode));
            }
        }
        Ok(ModeChange { group: name, before, after: mode })
    }

    fn stop(&self) -> Result<(), ControlError> {
        self.stop_asked.notify_one();
        Ok(())
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        for group in &mut self.groups {
            for writer in group.members.iter_mut().filter_map(|m| m.writer.as_mut()) {
                writer.port.send(ToOwner::Stop);
                if let Some(thread) = writer.thread.take() {
                    // Its panic was reported when it happened.
                    let _ = thread.join();
                }
            }
        }
        // With the owner loops gone the link has nobody to serve; it ends with the process at the
        // latest, because a broken link may keep it from saying goodbye.
        drop(self.link_thread.lock().map(|mut thread| thread.take()));
    }
}

/// What one writer is started with.
struct Launch<'a> {
    config: &'a Config,
    group: &'a Group,
    member: &'a Member,
    channel: Channel,
    gate: Arc<dyn GateControl>,
    pending: PendingEntry,
    link: mpsc::UnboundedSender<(Channel, crate::link::port::ToLink)>,
    failed: watch::Sender<Option<Arc<HostError>>>,
}

impl Launch<'_> {
    fn writer(self) -> Result<(Writer, LinkMember<ToOwner>), HostError> {
        let Launch { config, group, member, channel, gate, pending, link, failed } = self;
        let name = member.name.to_string();
        let disks = member.disks.iter().map(open_disk).collect::<Result<Vec<_>, _>>()?;
        let (state, opened) = open_state(config, group, member)?;
        let machine = match &member.machine {
            Some(path) => Some(config::read_machine(path).map_err(HostError::Machine)?),
            None => None,
        };
        let writer = group.writer_id(&member.name.value).expect("a writer");
        let attach = Attach {
            group: group.name.to_string(),
            member: name.clone(),
            writer,
            writers: group.writers(),
            disks: disks.iter().map(|d| d.spec.clone()).collect(),
            incarnation: opened.incarnation,
            epoch: opened.epoch,
            last_run: opened.last_run,
            mode: group.mode,
            lease_ms: group.lease.as_millis() as u64,
            grace_ms: group.grace.as_millis() as u64,
            machine,
        };
        let wake = EventFd::new().map_err(HostError::Thread)?;
        let (port, messages) = OwnerPort::new(wake.clone());
        let port = Arc::new(port);
        let (owner_stats, link_stats) = (Arc::<OwnerStats>::default(), Arc::<LinkStats>::default());
        let lock_align_bytes =
            disks.iter().map(|d| u64::from(d.file.alignment().offset_bytes)).max().unwrap_or(1);
        let disk_sizes_bytes = disks.iter().map(|d| d.spec.size_bytes).collect();
        let view = Arc::<OwnerView>::default();
        view.set_hlc_ceiling_ms(opened.hlc_ceiling_ms);
        let parts = OwnerParts {
            member: name.clone(),
            settings: Settings {
                writer,
                mode: group.mode,
                backlog_limit_bytes: group.backlog.bytes,
                lock_align_bytes,
            },
            disks,
            port: port.clone(),
            messages,
            wake,
            link,
            channel,
            pending: Arc::new(pending) as Arc<dyn PublishPending>,
            gate: gate.clone(),
            stats: owner_stats.clone(),
            view: view.clone(),
            copy_bounds: Bounds {
                window_bytes: group.copy.window.bytes,
                rate_bytes_per_s: group.copy.rate.map_or(0, |rate| rate.bytes_per_s),
            },
            resume: opened.resume,
            several: is_one_of_several(group)
                .then_some(Several { form: group.form, idle_interval: group.idle_interval }),
            hlc_floor: opened.hlc_floor,
            max_clock_lead: group.max_clock_lead,
        };
        let thread = spawn(&format!("owner {name}"), move || {
            let result = Owner::new(parts)
                .map_err(|error| with_sources(&error))
                .and_then(|owner| owner.run().map_err(|error| error.to_string()));
            if let Err(error) = result {
                report(&failed, HostError::Loop(format!("the loop of {name} ended: {error}")));
            }
        })?;
        let presence = match is_one_of_several(group) {
            false => Presence::Alone,
            true => Presence::Writer { form: group.form, peers: group.peers() },
        };
        let link_member = LinkMember::new(MemberParts {
            presence,
            attach,
            channel,
            port: port.clone(),
            to_owner: ToOwner::Link,
            gate,
            keeper: Box::new(state.clone()),
            stats: link_stats.clone(),
        });
        let sockets = member.disks.iter().map(|d| d.socket.value.clone()).collect();
        let thread = Some(thread);
        let writer = Writer {
            port,
            thread,
            owner_stats,
            view,
            link_stats,
            state,
            sockets,
            disk_sizes_bytes,
        };
        Ok((writer, link_member))
    }
}

/// Whether a group has other members than one, or ever had: then version 1 of the protocol does
/// not do.
fn is_one_of_several(group: &Group) -> bool {
    group.roster.len() > 1
}

/// A member without disks: its host hears of C for it, and gets a lease.
fn follow(
    config: &Config,
    group: &Group,
    member: &Member,
    channel: Channel,
    gate: Arc<dyn GateControl>,
) -> Result<(Follower, LinkMember<ToOwner>), HostError> {
    let (state, opened) = open_state(config, group, member)?;
    let machine = match &member.machine {
        Some(path) => Some(config::read_machine(path).map_err(HostError::Machine)?),
        None => None,
    };
    let attach = Attach {
        group: group.name.to_string(),
        member: member.name.to_string(),
        // It has no place in the vectors, and this is not sent.
        writer: WriterId(0),
        writers: group.writers(),
        disks: Vec::new(),
        incarnation: opened.incarnation,
        epoch: opened.epoch,
        last_run: LastRun::Unknown,
        mode: group.mode,
        lease_ms: group.lease.as_millis() as u64,
        grace_ms: group.grace.as_millis() as u64,
        machine,
    };
    // There is no owner loop behind it: what is sent there goes nowhere.
    let (port, _) = OwnerPort::new(EventFd::new().map_err(HostError::Thread)?);
    let link_stats = Arc::<LinkStats>::default();
    let link_member = LinkMember::new(MemberParts {
        presence: Presence::Follower { form: group.form, peers: group.peers() },
        attach,
        channel,
        port: Arc::new(port),
        to_owner: ToOwner::Link,
        gate,
        keeper: Box::new(state.clone()),
        stats: link_stats.clone(),
    });
    Ok((Follower { link_stats, state }, link_member))
}

fn open_state(
    config: &Config,
    group: &Group,
    member: &Member,
) -> Result<(MemberState, Opened), StateError> {
    let directory = config.host.state_dir.join(group.name.as_str());
    let path = directory.join(format!("{}.json", member.name.as_str()));
    MemberState::open(path, clock::wall_ms() * 1000)
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
        Security::Tls { files, .. } => connector::Security::Tls {
            files: files.clone(),
            server_name: tidelock_tls::server_name(&config.backup.server_name)?,
        },
        Security::Plaintext => connector::Security::Plaintext,
    };
    let hello = Hello { host: config.host.name.to_string(), software: SOFTWARE.to_owned() };
    Ok(Endpoint { address: config.backup.address.to_string(), security, hello })
}

fn open_disk(disk: &config::Disk) -> Result<DiskSetup, HostError> {
    let size = disk.size.as_ref().map_or(SizeRule::Any, |size| SizeRule::Exactly(size.bytes));
    let file = LocalFile::open(&disk.path.value, &OpenRequest { size, ..OpenRequest::default() })?;
    tracing::info!(
        disk = disk.name.as_str(),
        path = %disk.path.value.display(),
        io = %file.io_mode(),
        "disk opened"
    );
    let spec = DiskSpec { id: disk.id, name: disk.name.to_string(), size_bytes: file.len_bytes() };
    assert!(spec.name.len() <= limits::NAME_MAX_BYTES, "names are checked");
    let listener = listen(&disk.socket.value)
        .map_err(|source| HostError::Socket { path: disk.socket.value.clone(), source })?;
    DiskSetup::new(spec, file, listener)
        .map_err(|source| HostError::Export { path: disk.path.value.clone(), source })
}

/// Listens on a Unix socket that a crashed daemon may have left.
fn listen(path: &Path) -> io::Result<OwnedFd> {
    use std::os::unix::fs::PermissionsExt;
    if let Some(directory) = path.parent() {
        std::fs::create_dir_all(directory)?;
    }
    let deadline = Instant::now() + SOCKET_WAIT_MAX;
    loop {
        match UnixStream::connect(path) {
            // Killed with an accept in flight: the kernel lets go of that a moment after the process.
            Ok(_) if Instant::now() < deadline => std::thread::sleep(SOCKET_RETRY_EVERY),
            Ok(_) => {
                return Err(io::Error::new(io::ErrorKind::AddrInUse, "another process serves it"));
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => break,
            // Nobody listens: it was left behind. The disk's lock is ours, so no daemon lives.
            Err(_) => break std::fs::remove_file(path)?,
        }
    }
    let listener = UnixListener::bind(path)?;
    // The directory says who may come; the hypervisor may run under another user of the group.
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o660))?;
    Ok(listener.into())
}
