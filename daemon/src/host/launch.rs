//! One member put together: its disks and sockets, its state, its owner loop, and its end of the link.

use super::activity_file::OpenLog;
use super::backlog_files::{OpenBacklog, backlog_limit_bytes};
use super::degrading;
use super::gating::PendingEntry;
use super::verifying::Verifications;
use super::{Follower, HostError, Writer, report, spawn, with_sources};
use crate::activity::Identity;
use crate::ceiling;
use crate::clock;
use crate::config::{self, Config, Group, Member};
use crate::copy_job::Bounds;
use crate::degrade::Degrade;
use crate::heartbeat::Pulse;
use crate::link::GateControl;
use crate::link::member::{Member as LinkMember, MemberParts, Presence};
use crate::link::port::{OwnerPort, ToLink};
use crate::owner::contact;
use crate::owner::spilling::Ends;
use crate::owner::{DiskSetup, Owner, OwnerParts, OwnerView, PublishPending, Several, ToOwner};
use crate::sequencer::Settings;
use crate::state::{MemberState, Opened, StateError};
use crate::stats::{LinkStats, OwnerStats};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tidelock_protocol::hlc::Hlc;
use tidelock_protocol::ids::{Channel, Incarnation, WriterId};
use tidelock_protocol::limits;
use tidelock_protocol::message::{Attach, DiskSpec, Form, LastRun, Policy};
use tidelock_uring::{EventFd, LocalFile, OpenRequest, SizeRule};
use tokio::sync::{Notify, mpsc, watch};

/// How long a start waits for a disk's socket to be let go of by a daemon that was killed.
const SOCKET_WAIT_MAX: Duration = Duration::from_secs(2);
const SOCKET_RETRY_EVERY: Duration = Duration::from_millis(10);

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
    /// A run before has handed the group to the backup site.
    pub(super) switched_over: bool,
    /// What [`fence_of`] says.
    pub(super) fenced: Option<String>,
    /// The guest's disks are elsewhere still.
    pub(super) awaits_adoption: bool,
}

impl Launch<'_> {
    pub(super) fn writer(self) -> Result<(Writer, LinkMember<ToOwner>), HostError> {
        let Launch { config, group, member, channel, gate, pending, link, ceiling_wanted, .. } =
            self;
        let Launch { failed, switched_over, fenced, awaits_adoption, .. } = self;
        let name = member.name.to_string();
        let disks = member.disks.iter().map(open_disk).collect::<Result<Vec<_>, _>>()?;
        let backlog_identity = identity(group, member, &disks);
        let backlog = OpenBacklog::of(config, group, member, &backlog_identity);
        let left = match &backlog {
            // What the guest has heard must be known: the next records depend on it.
            Some(backlog)
                if !switched_over && fenced.is_none() && gate.awaits_floor().is_none() =>
            {
                backlog.find_left(&state_path(config, group, member))?
            }
            _ => None,
        };
        let run = left.as_ref().map(|left| left.incarnation());
        let (state, mut opened) = open_state(config, group, member, run)?;
        let log = OpenLog {
            path: state_path(config, group, member).with_extension("activity"),
            settings: group.activity_log,
            identity: backlog_identity,
        };
        let (mut activity, log_file) = log.open(&mut opened)?;
        let (backlog, on_disk, goes_on, left) = match backlog {
            None => (None, None, None, None),
            Some(backlog) => {
                let Ends { owners, links, goes_on, left } = backlog.open(&opened, left)?;
                (Some(owners), Some(links), goes_on, left)
            }
        };
        if let Some(goes_on) = &goes_on {
            goes_on.begin(&mut activity, &*gate);
            pending.publish(goes_on.last(), goes_on.last_hlc);
        }
        // It serves its guest before it has reached the backup.
        if is_one_of_several(group) && (opened.resume.is_some() || goes_on.is_some()) {
            gate.await_contact();
        }
        if is_one_of_several(group) && group.form == Form::Hlc {
            wait_for_the_clock(&name, opened.hlc_floor, group.max_clock_lead);
        }
        let machine = match &member.machine {
            Some(path) => Some(config::read_machine(path).map_err(HostError::Machine)?),
            None => None,
        };
        let writer = group.writer_id(&member.name.value).expect("a writer");
        let attach = Attach {
            group: group.name.to_string(),
            group_id: opened.group_id,
            member: name.clone(),
            writer,
            writers: group.writers(),
            disks: with_removed(member, &disks),
            incarnation: opened.incarnation,
            previous: opened.last_incarnation,
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
        let pulse = Arc::<Pulse>::default();
        let parts = OwnerParts {
            member: name.clone(),
            settings: Settings {
                writer,
                mode: group.mode,
                backlog_limit_bytes: backlog_limit_bytes(group),
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
            ceiling_wanted,
            stats: owner_stats.clone(),
            view: view.clone(),
            pulse: pulse.clone(),
            copy_bounds: Bounds {
                window_bytes: group.copy.window.bytes,
                rate_bytes_per_s: group.copy.rate.map_or(0, |rate| rate.bytes_per_s),
            },
            switched_over,
            resume: opened.resume,
            serves_unreached_after: serves_unreached_after(group, awaits_adoption)
                .filter(|_| fenced.is_none()),
            several: is_one_of_several(group)
                .then_some(Several { form: group.form, idle_interval: group.idle_interval }),
            hlc_floor: opened.hlc_floor,
            max_clock_lead: group.max_clock_lead,
            activity,
            log_file,
            backlog,
            goes_on,
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
        let mut link_member = LinkMember::new(MemberParts {
            presence,
            policy: policy_of(config, group),
            says_unreached: (group.before_first_contact.serves() || opened.serves_unreached_kept)
                .then_some(group.before_first_contact.serves()),
            attach,
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
        (true, false) => Some(contact::PATIENCE),
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

/// Whether a group has other members than one, or ever had: then version 1 of the protocol does
/// not do.
pub(super) fn is_one_of_several(group: &Group) -> bool {
    group.roster.len() > 1
}

/// A member without disks: its host hears of C for it, and gets a lease.
pub(super) fn follow(
    config: &Config,
    group: &Group,
    member: &Member,
    channel: Channel,
    gate: Arc<dyn GateControl>,
    switched_over: bool,
    fenced: Option<String>,
) -> Result<(Follower, LinkMember<ToOwner>), HostError> {
    let (state, opened) = open_state(config, group, member, None)?;
    let machine = match &member.machine {
        Some(path) => Some(config::read_machine(path).map_err(HostError::Machine)?),
        None => None,
    };
    let attach = Attach {
        group: group.name.to_string(),
        group_id: opened.group_id,
        member: member.name.to_string(),
        // It has no place in the vectors, and this is not sent.
        writer: WriterId(0),
        writers: group.writers(),
        disks: Vec::new(),
        incarnation: opened.incarnation,
        previous: opened.last_incarnation,
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
        policy: policy_of(config, group),
        says_unreached: None,
        attach,
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
        if let Some(fence) = MemberState::fence(&state_path(config, group, member))? {
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
    run: Option<Incarnation>,
) -> Result<(MemberState, Opened), StateError> {
    let (path, wall_us) = (state_path(config, group, member), clock::wall_ms() * 1000);
    match run {
        Some(run) => MemberState::go_on(path, wall_us, run),
        None => MemberState::open(path, wall_us),
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

/// What the backup is told first of what a group does without it.
fn policy_of(config: &Config, group: &Group) -> Policy {
    let since_unix_ms = degrading::on_record(config, group).unwrap_or(Some(0));
    Degrade::new(group.when_unreachable.after_ms(), since_unix_ms).policy(group.mode)
}

/// Where a member's state is. Without it the member, or its whole group, is begun anew.
pub(crate) fn state_path(config: &Config, group: &Group, member: &Member) -> PathBuf {
    let directory = config.host.state_dir.join(group.name.as_str());
    directory.join(format!("{}.json", member.name.as_str()))
}

fn open_disk(disk: &config::Disk) -> Result<DiskSetup, HostError> {
    // Without a size it would be one that was removed.
    let size =
        disk.size.as_ref().map_or(SizeRule::AtLeast(1), |size| SizeRule::Exactly(size.bytes));
    let file = LocalFile::open(&disk.path.value, &OpenRequest { size, ..OpenRequest::default() })?;
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

/// Listens on a Unix socket that a crashed daemon may have left.
fn listen(path: &Path, owner: Option<&str>) -> io::Result<OwnedFd> {
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
    // One owner: whoever may open the socket has the disk. `socket_owner` gives it to the
    // hypervisor's user.
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600))?;
    if let Some(owner) = owner {
        let user = nix::unistd::User::from_name(owner)?.ok_or_else(|| {
            let what = format!("`socket_owner` names {owner}, and there is no such user");
            io::Error::new(io::ErrorKind::NotFound, what)
        })?;
        std::os::unix::fs::chown(path, Some(user.uid.as_raw()), None)?;
    }
    Ok(listener.into())
}
