//! One member put together: its disks and sockets, its state, its owner loop, and its end of the link.

use super::activity_file::{self, LogError, geometry_of};
use super::backlog_files::{OpenBacklog, OpenEnds, backlog_limit_bytes};
use super::changed::{changed_since, lasting};

use super::verifying::Verifications;
use super::{Follower, HostError, MemberState, Writer, report, spawn, with_sources};
use crate::activity::place::LogPlace;
use crate::activity::{Identity, LastEnd};
use crate::ceiling;
use crate::clock;
use crate::config::{self, Config, Group, Member};
use crate::copy_job::Bounds;
use crate::driver::{self, DiskSetup};
use crate::heartbeat::Pulse;
use crate::held_gate::PendingEntry;
use crate::link::GateControl;
use crate::link::member::{Member as LinkMember, MemberParts};
use crate::link::port::{OwnerPort, ToLink};
use crate::owner::{self, OwnerParts, OwnerView, PublishPending, Several, ToOwner};
use crate::private_socket;
use crate::records::Records;
use crate::sequencer::Settings;
use crate::state::{Opened, StateError, StateFile};
use crate::stats::{LinkStats, OwnerStats};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tidelock_protocol::hlc::Hlc;
use tidelock_protocol::ids::{Channel, Incarnation};
use tidelock_protocol::limits;
use tidelock_protocol::message::{
    Attach, DiskSpec, Form, LastRun, LogAge, Policy, Role, Tagging, Writing,
};
use tidelock_storage::files::Files;
use tidelock_uring::{BufPool, EventFd, LocalFile, OpenRequest, SizeRule};
use tokio::sync::{Notify, mpsc, watch};

/// How long a start waits for a disk's socket to be let go of by a daemon that was killed.
const SOCKET_WAIT_MAX: Duration = Duration::from_secs(2);
const SOCKET_RETRY_EVERY: Duration = Duration::from_millis(10);

/// Unused memory of a member that is kept for the next requests.
const POOL_RETAIN_BYTES: usize = 64 << 20;

/// What one writer is started with.
pub(super) struct Launch<'a> {
    pub(super) config: &'a Config,
    pub(super) group: &'a Group,
    pub(super) member: &'a Member,
    pub(super) channel: Channel,
    pub(super) gate: Arc<dyn GateControl>,
    pub(super) pending: PendingEntry,
    pub(super) link: mpsc::UnboundedSender<(Channel, ToLink)>,
    pub(super) ceiling_wanted: Arc<Notify>,
    pub(super) failed: watch::Sender<Option<Arc<HostError>>>,
    pub(super) found: Found,
    /// The guest's disks are elsewhere still.
    pub(super) awaits_adoption: bool,
}

/// The record of a group that the runs before have left.
#[derive(Clone)]
pub(super) struct Found {
    /// One has handed the group to the backup site.
    pub(super) switched_over: bool,
    /// The text of [`fence_of`].
    pub(super) fenced: Option<String>,
    /// The policy as the backup hears it first.
    pub(super) policy: Policy,
}

impl Launch<'_> {
    pub(super) fn writer(self) -> Result<(Writer, LinkMember<ToOwner>), HostError> {
        let Launch { config, group, member, channel, gate, pending, link, ceiling_wanted, .. } =
            self;
        let Launch { failed, found, awaits_adoption, .. } = self;
        let Found { switched_over, fenced, policy } = found;
        let name = member.name.to_string();
        let disks = member.disks.iter().map(open_disk).collect::<Result<Vec<_>, _>>()?;
        let log_identity = identity(group, member, &disks);
        let marks: Vec<String> = disks.iter().map(DiskSetup::mark_when_opened).collect();
        let backlog = OpenBacklog::of(config, group, member, identity(group, member, &disks));
        let (state, opened) = open_state(config, group, member)?;
        state.found_disks(marks.iter().map(|mark| lasting(mark)).collect());
        let place = LogPlace::new(state_dir(config), group.name.as_str(), &name);
        let mut evidence = backlog.as_ref().map_or(Vec::new(), OpenBacklog::segments);
        evidence.push(place.path());
        let paths = member.disks.iter().map(|disk| disk.path.value.as_path());
        let changed = changed_since(&opened, &marks, &evidence, paths);
        let left = match &backlog {
            _ if changed.is_some() => None,
            // What the guest has heard must be known: the next records depend on it.
            Some(backlog)
                if !switched_over && fenced.is_none() && gate.awaits_floor().is_none() =>
            {
                backlog.find_left(&state_file(config, group, member))?
            }
            _ => None,
        };
        if let Some(why) = &changed {
            tracing::warn!(
                member = name,
                why,
                "all of the disks are compared, and the replica becomes what they are now"
            );
            state.forget_run()?;
        }
        let (found, last_end) =
            (activity_file::found(&place, &log_identity), last_end(&opened, changed.is_some()));
        let geometry = geometry_of(group.activity_log);
        let mut activity = place
            .open(found, geometry, &log_identity, opened.run.number, last_end)
            .map_err(|source| LogError::Io { path: place.path(), source })?;
        let log_file = geometry.map(|_| activity_file::open(place)).transpose()?;
        state.found_log_of(activity.confirmed());
        let age = activity.is_believed().then(|| activity.age());
        let last_run = last_run(&opened, changed.is_some(), age);
        if let Some(why) = changed.clone() {
            activity.must_not_be_believed(why);
        }
        let log_age = activity.age();
        let (backlog, on_disk, left_on_disk, left) = match backlog {
            None => (None, None, None, None),
            Some(backlog) => {
                let OpenEnds { owners, links, goes_on, left } = backlog.open(&opened, left)?;
                (Some(owners), Some(links), goes_on, left)
            }
        };
        if left_on_disk.is_some() {
            // A packet that was taken up before this has no stamp: the gate is shut until the backup has all of it.
            gate.hold_for_resync(true);
        }
        if is_one_of_several(group) && group.form == Form::Hlc {
            wait_for_the_clock(&name, opened.hlc_floor, group.max_clock_lead);
        }
        let writer = group.writer_id(&member.name.value).expect("a writer");
        let role = Role::Writer(Writing {
            writer,
            disks: with_removed(member, &disks),
            incarnation: opened.run.number,
            nonce: opened.run.nonce,
            before: opened.before.filter(|_| changed.is_none()),
            marks: match &opened.clean {
                // They are not as they were any more, and what was written is in the activity log.
                Some(clean) if clean.served => clean.marks.clone(),
                _ => marks,
            },
            last_run,
            mode: group.mode,
        });
        let attach = attach_of(group, member, &opened, role)?;
        let wake = EventFd::new().map_err(HostError::Thread)?;
        let (port, messages) = OwnerPort::new(wake.clone());
        let port = Arc::new(port);
        let (owner_stats, link_stats) = (Arc::<OwnerStats>::default(), Arc::<LinkStats>::default());
        let lock_align_bytes =
            disks.iter().map(|d| u64::from(d.file.alignment().offset_bytes)).max().unwrap_or(1);
        let disk_sizes_bytes = disks.iter().map(|d| d.spec.size_bytes).collect();
        let view = Arc::<OwnerView>::default();
        view.set_hlc_ceiling_ms(opened.hlc_ceiling_ms);
        let pulse = Arc::<Pulse>::default();
        let owner = OwnerParts {
            member: name.clone(),
            settings: Settings {
                writer,
                mode: group.mode,
                backlog_limit_bytes: backlog_limit_bytes(group),
                lock_align_bytes,
            },
            disks: disks.iter().map(|disk| (disk.spec.clone(), disk.file.clone())).collect(),
            port: port.clone(),
            pool: BufPool::new(POOL_RETAIN_BYTES),
            pending: Arc::new(pending) as Arc<dyn PublishPending>,
            gate: gate.clone(),
            stats: owner_stats.clone(),
            view: view.clone(),
            pulse: pulse.clone(),
            copy_bounds: Bounds {
                window_bytes: group.copy.window.bytes,
                rate_bytes_per_s: group.copy.rate.map_or(0, |rate| rate.bytes_per_s),
            },
            switched_over,
            serves_unreached_after: serves_unreached_after(group, awaits_adoption)
                .filter(|_| fenced.is_none()),
            several: is_one_of_several(group)
                .then_some(Several { form: group.form, idle_interval: group.idle_interval }),
            hlc_floor: opened.hlc_floor,
            max_clock_lead: group.max_clock_lead,
            activity,
            has_log_file: log_file.is_some(),
            backlog,
            left: left_on_disk,
        };
        let parts =
            driver::Parts { owner, disks, log_file, messages, wake, link, channel, ceiling_wanted };
        let thread = spawn(&format!("owner {name}"), move || {
            if let Err(error) = driver::run(parts) {
                let error = with_sources(&error);
                report(&failed, HostError::Loop(format!("the loop of {name} ended: {error}")));
            }
        })?;
        let mut link_member = LinkMember::new(MemberParts {
            policy,
            says_unreached: (group.before_first_contact.serves() || opened.serves_unreached_kept)
                .then_some(group.before_first_contact.serves()),
            attach,
            log: log_age,
            channel,
            port: port.clone(),
            to_owner: ToOwner::Link,
            gate,
            gives_up: switched_over,
            fenced,
            keeper: Box::new(state.clone()),
            stats: link_stats.clone(),
            on_disk,
            left,
        });
        if awaits_adoption {
            link_member.await_adoption();
        }
        let sockets = member.disks.iter().map(|d| d.socket.value.clone()).collect();
        let thread = Some(thread);
        let writer = Writer {
            port,
            thread,
            owner_stats,
            view,
            pulse,
            link_stats,
            state,
            sockets,
            verifications: Verifications::default(),
            disk_sizes_bytes,
        };
        Ok((writer, link_member))
    }
}

/// After how long guests are served without the backup, if they are.
fn serves_unreached_after(group: &Group, awaits_adoption: bool) -> Option<Duration> {
    match (group.before_first_contact.serves(), awaits_adoption) {
        // It is not looked for, and clients of the guest are answered elsewhere at this moment.
        (_, true) => Some(Duration::ZERO),
        (true, false) => Some(owner::PATIENCE),
        (false, false) => None,
    }
}

/// After an unclean stop times go on where the run before may have got, ahead of the wall clock; others
/// drop packets that are too far ahead.
fn wait_for_the_clock(member: &str, floor: Hlc, lead: Duration) {
    let ahead_ms = floor.physical_ms().saturating_sub(clock::wall_ms());
    let wait = Duration::from_millis(ahead_ms).saturating_sub(lead / 2);
    if ahead_ms > 2 * ceiling::AHEAD_MS {
        tracing::error!(
            member,
            ahead_ms,
            "the wall clock is behind the times that an earlier run has given out: other hosts drop packets of \
             this group until it, or every other writer, has caught up"
        );
    } else if !wait.is_zero() {
        tracing::info!(member, wait_ms = wait.as_millis() as u64, "waiting for the wall clock");
        std::thread::sleep(wait);
    }
}

/// True if a group has several members, or ever had.
pub(super) fn is_one_of_several(group: &Group) -> bool {
    group.roster.len() > 1
}

/// The attachment of a member as at the start of this run.
fn attach_of(
    group: &Group,
    member: &Member,
    opened: &Opened,
    role: Role,
) -> Result<Attach, HostError> {
    let machine = match &member.machine {
        Some(path) => Some(config::read_machine(path).map_err(HostError::Machine)?),
        None => None,
    };
    Ok(Attach {
        group: group.name.to_string(),
        group_id: opened.group_id,
        member: member.name.to_string(),
        writers: group.writers(),
        epoch: opened.epoch,
        lease_ms: group.lease.as_millis() as u64,
        grace_ms: group.grace.as_millis() as u64,
        machine,
        tagging: is_one_of_several(group)
            .then(|| Tagging { form: group.form, peers: group.peers() }),
        role,
    })
}

/// A member without disks: its host hears of C for it, and gets a lease.
pub(super) fn follow(
    config: &Config,
    group: &Group,
    member: &Member,
    channel: Channel,
    gate: Arc<dyn GateControl>,
    found: Found,
) -> Result<(Follower, LinkMember<ToOwner>), HostError> {
    let Found { switched_over, fenced, policy } = found;
    let (state, opened) = open_state(config, group, member)?;
    let attach = attach_of(group, member, &opened, Role::Follower)?;
    // There is no owner loop behind it: what is sent there goes nowhere.
    let (port, _) = OwnerPort::new(EventFd::new().map_err(HostError::Thread)?);
    let link_stats = Arc::<LinkStats>::default();
    let link_member = LinkMember::new(MemberParts {
        policy,
        // Its rules may have been removed since: the backup hears that they are back.
        says_unreached: opened.serves_unreached_kept.then_some(false),
        attach,
        log: LogAge::default(),
        channel,
        port: Arc::new(port),
        to_owner: ToOwner::Link,
        gate,
        gives_up: switched_over,
        fenced,
        keeper: Box::new(state.clone()),
        stats: link_stats.clone(),
        on_disk: None,
        left: None,
    });
    Ok((Follower { link_stats, state }, link_member))
}

/// Why the group is fenced, if the backup has told that to any of its members here. It holds for all of them, and until an
/// operator says otherwise: the backup's data may be older by now than what it said.
pub(super) fn fence_of(config: &Config, group: &Group) -> Result<Option<String>, StateError> {
    for member in &group.members {
        if let Some(fence) = state_file(config, group, member).fence()? {
            let name = group.name.as_str();
            tracing::error!(
                group = name, epoch = %fence.epoch, reason = fence.reason,
                "the group stays fenced: the backup had said so before this start"
            );
            return Ok(Some(format!(
                "{} (The backup said so before this start, and is not asked again. Only if an operator knows that nobody \
                 else serves the group: stop tidelockd, `tidelock unfence {name}`, start it.)",
                fence.reason
            )));
        }
    }
    Ok(None)
}

fn open_state(
    config: &Config,
    group: &Group,
    member: &Member,
) -> Result<(MemberState, Opened), StateError> {
    state_file(config, group, member).open(clock::wall_ms() * 1000)
}

/// The last run's end, for opening the activity log.
fn last_end(opened: &Opened, has_changed: bool) -> LastEnd {
    match (&opened.clean, opened.before) {
        _ if has_changed => LastEnd::UNKNOWN,
        (Some(clean), Some(before)) if !clean.served => {
            LastEnd::Clean { incarnation: before.number, epoch: opened.epoch, seq: clean.seq }
        }
        _ => {
            let mut runs = [Incarnation(0); 2];
            runs.iter_mut().zip(&opened.log_runs).for_each(|(run, of)| *run = *of);
            LastEnd::Unclean { runs }
        }
    }
}

/// The last run's end, for the attachment to the backup.
fn last_run(opened: &Opened, has_changed: bool, log: Option<LogAge>) -> LastRun {
    match (&opened.clean, log) {
        _ if has_changed => LastRun::Unknown,
        (Some(clean), _) => LastRun::Clean { seq: clean.seq, served: clean.served },
        (None, Some(log)) => LastRun::Unclean { log },
        (None, None) => LastRun::Unknown,
    }
}

/// Whose disks these are.
fn identity(group: &Group, member: &Member, disks: &[DiskSetup]) -> Identity {
    Identity {
        group: group.name.to_string(),
        member: member.name.to_string(),
        disks: with_removed(member, disks)
            .into_iter()
            .map(|disk| (disk.id, disk.name, disk.size_bytes))
            .collect(),
    }
}

/// By number: also those that the group has no more.
fn with_removed(member: &Member, disks: &[DiskSetup]) -> Vec<DiskSpec> {
    let removed = member.removed_disks.iter();
    let removed = removed.map(|disk| DiskSpec::removed(disk.id, disk.name.to_string()));
    let mut all: Vec<_> = disks.iter().map(|disk| disk.spec.clone()).chain(removed).collect();
    all.sort_by_key(|disk| disk.id);
    all
}

fn state_dir(config: &Config) -> Files {
    Files::new(config.host.state_dir.clone())
}

/// Where a member's state is. Without it the member, or its whole group, is begun anew.
pub(crate) fn state_file(config: &Config, group: &Group, member: &Member) -> StateFile<Files> {
    StateFile::new(state_dir(config), group.name.as_str(), member.name.as_str())
}

/// The records of a group.
pub(crate) fn records_of(config: &Config, group: &Group) -> Records<Files> {
    Records::new(state_dir(config), group.name.as_str())
}

fn open_disk(disk: &config::Disk) -> Result<DiskSetup, HostError> {
    // Without a size it would be one that was removed.
    let size =
        disk.size.as_ref().map_or(SizeRule::AtLeast(1), |size| SizeRule::Exactly(size.bytes));
    let request = OpenRequest { size, alone: true, raw: !disk.is_raw, ..OpenRequest::default() };
    let file = LocalFile::open(&disk.path.value, &request)?;
    tracing::info!(
        disk = disk.name.as_str(),
        path = %disk.path.value.display(),
        io = %file.io_mode(),
        "disk opened"
    );
    let spec = DiskSpec { id: disk.id, name: disk.name.to_string(), size_bytes: file.len_bytes() };
    assert!(spec.name.len() <= limits::NAME_MAX_BYTES, "names are checked");
    let owner = disk.socket_owner.as_ref().map(|owner| owner.value.as_str());
    let listener = listen(&disk.socket.value, owner)
        .map_err(|source| HostError::Socket { path: disk.socket.value.clone(), source })?;
    DiskSetup::new(spec, file, listener, disk.connections)
        .map_err(|source| HostError::Export { path: disk.path.value.clone(), source })
}

/// Listens on a Unix socket that a crashed daemon may have left. `socket_owner` gives it to the hypervisor's user: whoever may open
/// the socket has the disk.
fn listen(path: &Path, owner: Option<&str>) -> io::Result<OwnedFd> {
    let owner = owner.map(|owner| match nix::unistd::User::from_name(owner)? {
        Some(user) => Ok(user.uid.as_raw()),
        None => {
            let what = format!("`socket_owner` names {owner}, and there is no such user");
            Err(io::Error::new(io::ErrorKind::NotFound, what))
        }
    });
    let owner = owner.transpose()?;
    let deadline = Instant::now() + SOCKET_WAIT_MAX;
    loop {
        match UnixStream::connect(path) {
            // Killed with an accept in flight: the kernel lets go of that a moment after the process.
            Ok(_) if Instant::now() < deadline => std::thread::sleep(SOCKET_RETRY_EVERY),
            Ok(_) => {
                return Err(io::Error::new(io::ErrorKind::AddrInUse, "another process serves it"));
            }
            // Nobody listens. The disk's lock is ours, so no daemon lives: a socket that is there was left behind.
            Err(_) => break,
        }
    }
    Ok(private_socket::bind(path, owner)?.into())
}
