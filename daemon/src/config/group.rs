//! `[[group]]`, `[[group.member]]` and `[[group.member.disk]]`.

use std::path::{Path, PathBuf};
use std::time::Duration;

use tidelock_config::{Located, Name, Rate, Section, Size, format_duration};
use tidelock_protocol::ids::DiskId;
use tidelock_protocol::limits;
use tidelock_protocol::message::Mode;

use super::network::read_network;
use super::read::Counters;
use super::{CopySettings, Disk, Group, Member, Roles};

const MODES: [(&str, Mode); 3] =
    [("sync", Mode::Sync), ("pipelined", Mode::Pipelined), ("async", Mode::Async)];

const LEASE_DEFAULT: Duration = Duration::from_secs(10);
/// A beacon goes out every quarter of a lease: below this, jitter of a long link would shut gates.
const LEASE_MIN: Duration = Duration::from_millis(200);
const LEASE_MAX: Duration = Duration::from_secs(3600);

/// A client may send one write of this size, and it must fit.
const BACKLOG_MIN: Size = Size { bytes: limits::RECORD_PAYLOAD_MAX_BYTES as u64 };
const BACKLOG_DEFAULT: Size = Size::mib(256);

/// One comparison of a resync covers up to this, so that less could never make progress.
const WINDOW_MIN: Size = Size { bytes: limits::DIGEST_CHUNK_MAX_BYTES as u64 };
const WINDOW_DEFAULT: Size = Size::mib(16);
const WINDOW_MAX: Size = Size::mib(1024);

/// Linux's `sun_path` holds 108 bytes with its end mark.
const SOCKET_PATH_MAX_BYTES: usize = 107;

pub(super) fn read_group(
    group: &mut Section<'_>,
    runtime_dir: &Path,
    count: &Counters,
) -> Option<Group> {
    let name = group.required::<Name>("name", "name = \"shop\"");
    let mode = group.choice("mode", &MODES).map_or(Mode::Pipelined, |mode| mode.value);
    let backlog = group.or("backlog", BACKLOG_DEFAULT);
    if backlog.value < BACKLOG_MIN {
        let what = format!(
            "`backlog` in [[group]]: {} is less than the largest write that a guest may send",
            backlog.value
        );
        group.fail(&backlog.place, what, format!("\"{BACKLOG_MIN}\" or more"));
    }
    let (lease, grace) = read_lease(group);
    let copy = group.optional_table("copy", read_copy);
    let group_name = name.as_ref().map_or("", |name| name.as_str()).to_owned();
    let members =
        group.tables("member", |member| read_member(member, &runtime_dir.join(&group_name), count));
    if !group.has("member") {
        let what = "a group without a member protects nothing";
        group.fail(&group.place(), what, "[[group.member]] and its keys below this group");
    }
    Some(Group {
        name: name?,
        mode,
        backlog: backlog.value,
        lease,
        grace,
        copy: copy.unwrap_or(CopySettings { rate: None, window: WINDOW_DEFAULT }),
        members,
    })
}

fn read_lease(group: &mut Section<'_>) -> (Duration, Duration) {
    let lease = group.or("lease", LEASE_DEFAULT);
    if !(LEASE_MIN..=LEASE_MAX).contains(&lease.value) {
        let (min, max) = (format_duration(LEASE_MIN), format_duration(LEASE_MAX));
        let what = format!(
            "`lease` in [[group]]: {} is not between {min} and {max}",
            format_duration(lease.value)
        );
        group.fail(&lease.place, what, format!("\"{}\"", format_duration(LEASE_DEFAULT)));
    }
    let half_more = lease.value + lease.value / 2;
    let grace = group.or("grace", half_more);
    // A tenth is far more than two clocks' rates differ by, and all that the proof needs.
    if grace.value < lease.value + lease.value / 10 {
        let what = format!(
            "`grace` in [[group]]: {} is not well above the lease of {}: the backup could be \
             promoted while this host still answers clients",
            format_duration(grace.value),
            format_duration(lease.value)
        );
        group.fail(&grace.place, what, format!("\"{}\" or more", format_duration(half_more)));
    }
    (lease.value, grace.value)
}

fn read_copy(copy: &mut Section<'_>) -> Option<CopySettings> {
    let rate = copy.optional::<Rate>("rate");
    if let Some(rate) = rate.as_ref().filter(|rate| rate.bytes_per_s == 0) {
        let what = "`rate` in [group.copy]: at this rate the copy would never end";
        copy.fail(&rate.place, what, "\"50MiB/s\", or no `rate` for no limit");
    }
    let window = copy.or("window", WINDOW_DEFAULT);
    if !(WINDOW_MIN..=WINDOW_MAX).contains(&window.value) {
        let what = format!("`window` in [group.copy]: {} is out of range", window.value);
        copy.fail(&window.place, what, format!("\"{WINDOW_MIN}\" to \"{WINDOW_MAX}\""));
    }
    Some(CopySettings { rate: rate.map(|rate| rate.value), window: window.value })
}

fn read_member(member: &mut Section<'_>, runtime_dir: &Path, count: &Counters) -> Option<Member> {
    let name = member.required::<Name>("name", "name = \"db\"");
    let roles = read_roles(member);
    let machine = member.optional::<PathBuf>("machine");
    let directory = runtime_dir.join(name.as_ref().map_or("", |name| name.as_str()));
    let mut next_id = 0u16;
    let disks = member.tables("disk", |disk| {
        let id = DiskId(next_id);
        next_id = next_id.saturating_add(1);
        read_disk(disk, id, &directory)
    });
    let network = member.optional_table("network", |network| read_network(network, count));
    check_roles(member, roles);
    if usize::from(next_id) > usize::from(limits::DISKS_MAX) {
        let what = format!("a member has at most {} disks, this has {next_id}", limits::DISKS_MAX);
        member.fail(&member.place(), what, "fewer [[group.member.disk]]");
    }
    Some(Member { name: name?, roles, machine, disks, network })
}

fn read_roles(member: &mut Section<'_>) -> Roles {
    let only = |writer, intermediate, outbound| Roles { writer, intermediate, outbound };
    let choices = [
        ("writer", only(true, false, false)),
        ("intermediate", only(false, true, false)),
        ("outbound", only(false, false, true)),
    ];
    let Some(list) = member.choices("roles", &choices) else { return only(true, false, true) };
    if list.value.is_empty() {
        let what = "`roles` in [[group.member]]: a member without a role does nothing";
        member.fail(&list.place, what, "roles = [\"writer\", \"outbound\"]");
        return only(true, false, true);
    }
    list.value.iter().fold(Roles::default(), |all, role| {
        only(
            all.writer || role.writer,
            all.intermediate || role.intermediate,
            all.outbound || role.outbound,
        )
    })
}

/// What a role needs, and what is of no use without it.
fn check_roles(member: &Section<'_>, roles: Roles) {
    let place = member.place();
    match (roles.writer, member.has("disk")) {
        (true, false) => {
            let what = "a writer has no disk";
            let instead = "[[group.member.disk]] with name and path, or roles without \"writer\"";
            member.fail(&place, what, instead);
        }
        (false, true) => {
            let what = "a member that is no writer has a disk, which would not be protected";
            member.fail(&place, what, "\"writer\" among its roles, or no disk");
        }
        _ => {}
    }
    match (roles.outbound, member.has("network")) {
        (true, false) => {
            let what = "an outbound member has no network: its packets would leave unheld";
            let instead = "[group.member.network] with interface and topology, or roles = \
                           [\"writer\"] if it talks to no client";
            member.fail(&place, what, instead);
        }
        (false, true) => {
            let what = "a member that is not outbound has a network";
            member.fail(&place, what, "\"outbound\" among its roles, or no [group.member.network]");
        }
        _ => {}
    }
}

fn read_disk(disk: &mut Section<'_>, id: DiskId, directory: &Path) -> Option<Disk> {
    let name = disk.required::<Name>("name", "name = \"root\"");
    let path = disk.required::<PathBuf>("path", "path = \"/var/lib/vms/db.img\"");
    let size = disk.optional::<Size>("size");
    let file = format!("{}.sock", name.as_ref().map_or("", |name| name.as_str()));
    let socket = disk.or("socket", directory.join(file));
    check_socket(disk, &socket);
    Some(Disk { id, name: name?, path: path?, size, socket })
}

fn check_socket(disk: &Section<'_>, socket: &Located<PathBuf>) {
    let len = socket.value.as_os_str().len();
    if len > SOCKET_PATH_MAX_BYTES {
        let what = format!(
            "the socket's path has {len} bytes, and Linux takes {SOCKET_PATH_MAX_BYTES}: {}",
            socket.value.display()
        );
        disk.fail(&socket.place, what, "socket = \"/run/short.sock\", or a shorter runtime_dir");
    }
}
