//! The driver of a member's start ([`tidelock_daemon_core::start`]): its disks, sockets and files, its thread, and its end of the link.

use super::activity_file::{self, geometry_of};
use super::backlog_files::{backlog_limit_bytes, backlog_of, segments, warn_of_little_room};
use super::changed::written;
use super::{Follower, HostError, Writer, report, spawn, with_sources};
use crate::clock;
use crate::config::{self, Config, Group, Member};
use crate::driver::{DiskSetup, thread};
use crate::held_gate::PendingEntry;
use crate::private_socket;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::task::Waker;
use std::time::{Duration, Instant};
use tidelock_daemon_core::activity::place::LogPlace;
use tidelock_daemon_core::ceiling;
use tidelock_daemon_core::copy_job::Bounds;
use tidelock_daemon_core::group::GroupLoop;
use tidelock_daemon_core::link::GateControl;
use tidelock_daemon_core::link::member::Member as LinkMember;
use tidelock_daemon_core::link::port::{OwnerPort, ToLink};
use tidelock_daemon_core::owner::ToOwner;
use tidelock_daemon_core::records::Records;
use tidelock_daemon_core::start::{
    self, GroupStart, LogStart, MemberStart, StartError, StartedFollower, StartedWriter,
    WriterStart,
};
use tidelock_daemon_core::state::StateFile;
use tidelock_protocol::hlc::Hlc;
use tidelock_protocol::ids::{Channel, WriterId};
use tidelock_protocol::limits;
use tidelock_protocol::message::{DiskSpec, Form};
use tidelock_storage::files::Files;
use tidelock_uring::{BufPool, EventFd, LocalFile, OpenRequest, SizeRule};
use tokio::sync::{Notify, mpsc, watch};

/// How long a start waits for a disk's socket to be let go of by a daemon that was killed.
const SOCKET_WAIT_MAX: Duration = Duration::from_secs(2);
const SOCKET_RETRY_EVERY: Duration = Duration::from_millis(10);

/// Unused memory of a member that is kept for the next requests.
const POOL_RETAIN_BYTES: usize = 64 << 20;

/// The parts that one member is started with.
pub(super) struct Launch<'a> {
    pub(super) config: &'a Config,
    pub(super) group: &'a Group,
    pub(super) member: &'a Member,
    pub(super) channel: Channel,
    pub(super) gate: Arc<dyn GateControl>,
    pub(super) link: mpsc::UnboundedSender<(Channel, ToLink)>,
    pub(super) ceiling_wanted: Arc<Notify>,
    pub(super) failed: watch::Sender<Option<Arc<HostError>>>,
    pub(super) found: &'a GroupStart,
}

/// A group as its configuration has it, and the runs before have left it.
pub(super) fn group_start(
    config: &Config,
    group: &Group,
    state: &GroupLoop,
    awaits_adoption: bool,
) -> Result<GroupStart, HostError> {
    let members = group.members.iter().map(|member| state_file(config, group, member));
    let fenced = start::fence_of(group.name.as_str(), members).map_err(StartError::from)?;
    Ok(GroupStart {
        name: group.name.to_string(),
        writers: group.writers(),
        mode: group.mode,
        lease_ms: group.lease.as_millis() as u64,
        grace_ms: group.grace.as_millis() as u64,
        form: group.form,
        peers: is_one_of_several(group).then(|| group.peers()),
        idle_interval: group.idle_interval,
        max_clock_lead: group.max_clock_lead,
        serves_unreached: group.before_first_contact.serves(),
        awaits_adoption,
        switched_over: state.view().switched_at_unix_ms.is_some(),
        fenced,
        policy: state.policy(),
    })
}

impl Launch<'_> {
    fn member(&self, port: Arc<OwnerPort<ToOwner>>) -> Result<MemberStart<Files>, HostError> {
        let machine = match &self.member.machine {
            Some(path) => Some(config::read_machine(path).map_err(HostError::Machine)?),
            None => None,
        };
        Ok(MemberStart {
            name: self.member.name.to_string(),
            channel: self.channel,
            machine,
            state: state_file(self.config, self.group, self.member),
            gate: self.gate.clone(),
            port,
            wall_ms: clock::wall_ms(),
        })
    }

    /// A member without disks. There is no owner loop behind it: what is sent there goes nowhere.
    pub(super) fn follower(self) -> Result<(Follower, LinkMember<ToOwner>), HostError> {
        let (port, _) = OwnerPort::new(Waker::noop().clone());
        let started = start::follower(self.found, self.member(Arc::new(port))?)?;
        let StartedFollower { link, state, link_stats } = started;
        Ok((Follower { link_stats, state }, link))
    }

    pub(super) fn writer(
        self,
        writer: WriterId,
        pending: PendingEntry,
    ) -> Result<(Writer, LinkMember<ToOwner>), HostError> {
        let (config, group, member) = (self.config, self.group, self.member);
        let name = member.name.to_string();
        let setups = member.disks.iter().map(open_disk).collect::<Result<Vec<_>, _>>()?;
        let disks: Vec<_> =
            setups.iter().map(|disk| (disk.spec.clone(), disk.file.clone())).collect();
        let removed = member.removed_disks.iter();
        let removed_disks: Vec<_> =
            removed.map(|disk| DiskSpec::removed(disk.id, disk.name.to_string())).collect();
        let backlog = backlog_of(config, group, member)?;
        let backlog_directory = backlog.as_ref().map(|backlog| backlog.files.path().to_owned());
        let place = LogPlace::new(state_dir(config), group.name.as_str(), &name);
        let mut evidence = backlog.as_ref().map_or(Vec::new(), segments);
        evidence.push(place.path());
        let paths = member.disks.iter().map(|disk| disk.path.value.as_path());
        let identity = start::identity(self.found, &name, &disks, &removed_disks);
        let wake = EventFd::new().map_err(HostError::Thread)?;
        let (port, messages) = OwnerPort::new(wake.clone().into());
        let port = Arc::new(port);
        let disk_sizes_bytes = disks.iter().map(|(spec, _)| spec.size_bytes).collect();
        let limit_bytes = backlog_limit_bytes(group);
        let aligned = setups.iter().map(|disk| u64::from(disk.file.alignment().offset_bytes));
        let with = WriterStart {
            writer,
            disks,
            removed_disks,
            marks: setups.iter().map(DiskSetup::mark_when_opened).collect(),
            written: written(&evidence, paths),
            log: LogStart {
                geometry: geometry_of(group.activity_log),
                found: activity_file::found(&place, &identity),
                place: place.clone(),
            },
            backlog,
            backlog_limit_bytes: limit_bytes,
            lock_align_bytes: aligned.max().unwrap_or(1),
            copy_bounds: Bounds {
                window_bytes: group.copy.window.bytes,
                rate_bytes_per_s: group.copy.rate.map_or(0, |rate| rate.bytes_per_s),
            },
            pool: BufPool::new(POOL_RETAIN_BYTES),
            pending: Arc::new(pending),
        };
        let started = start::writer(self.found, self.member(port.clone())?, with)?;
        let StartedWriter { owner, link: link_member, state, link_stats, opened, .. } = started;
        let log_file = owner.has_log_file.then(|| activity_file::open(place)).transpose()?;
        if let Some(directory) = backlog_directory {
            warn_of_little_room(&directory, limit_bytes);
        }
        if is_one_of_several(group) && group.form == Form::Hlc {
            wait_for_the_clock(&name, opened.hlc_floor, group.max_clock_lead);
        }
        let (owner_stats, view, pulse) =
            (owner.stats.clone(), owner.view.clone(), owner.pulse.clone());
        let Self { link, channel, ceiling_wanted, failed, .. } = self;
        let parts = thread::Parts {
            owner,
            disks: setups,
            log_file,
            messages,
            wake,
            link,
            channel,
            ceiling_wanted,
        };
        let thread = spawn(&format!("owner {name}"), move || {
            if let Err(error) = thread::run(parts) {
                let error = with_sources(&error);
                report(&failed, HostError::Loop(format!("the loop of {name} ended: {error}")));
            }
        })?;
        let writer = Writer {
            port,
            thread: Some(thread),
            owner_stats,
            view,
            pulse,
            link_stats,
            state,
            sockets: member.disks.iter().map(|d| d.socket.value.clone()).collect(),
            verifications: Mutex::default(),
            disk_sizes_bytes,
        };
        Ok((writer, link_member))
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

fn state_dir(config: &Config) -> Files {
    Files::new(config.host.state_dir.clone())
}

/// A member's state file. Without it the member, or its whole group, is begun anew.
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
