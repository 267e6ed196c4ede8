//! `[[group]]`, `[[group.member]]` and `[[group.member.disk]]`.

use std::collections::HashMap;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use tidelock_config::{Located, Name, Rate, Section, Size, format_duration};
use tidelock_daemon_core::heartbeat::HeartbeatSettings;
use tidelock_protocol::ids::DiskId;
use tidelock_protocol::limits;
use tidelock_protocol::message::{Form, Mode};
use tidelock_protocol::tag;

use super::heartbeat::read_heartbeat;
use super::network::read_network;
use super::on_disk::read_backlog_on_disk;
use super::read::FileContext;
use super::unreachable::WhenUnreachable;
use super::{
    ActivitySettings, BeforeFirstContact, Boundary, CopySettings, Disk, Group, Member, Peer,
    RemovedDisk, Roles, TagSettings, VerifySettings,
};

const MODES: [(&str, Mode); 3] =
    [("sync", Mode::Sync), ("pipelined", Mode::Pipelined), ("async", Mode::Async)];

const CONTACTS: [(&str, BeforeFirstContact); 2] = [
    ("wait", BeforeFirstContact::Wait),
    ("serve-unprotected", BeforeFirstContact::ServeUnprotected),
];

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

/// A disk of 1 TiB takes six hours.
const VERIFY_RATE_DEFAULT: Rate = Rate { bytes_per_s: 50 << 20 };
const VERIFY_EVERY_MIN: Duration = Duration::from_secs(60);
const VERIFY_EVERY_DEFAULT: Duration = Duration::from_secs(7 * 86_400);

/// IPv4 options that are copied into fragments and have a meaning (IANA's registry): security, source routes, stream
/// identifiers, router alert and the like.
const ASSIGNED_OPTIONS: [u8; 15] =
    [130, 131, 133, 134, 136, 137, 142, 144, 145, 147, 148, 149, 151, 152, 205];
const EXTENT_DEFAULT: Size = Size::mib(1);
const EXTENT_MIN: Size = Size { bytes: 64 << 10 };
const EXTENT_MAX: Size = Size::mib(64);
const SLOTS_DEFAULT: u32 = 4096;
const SLOTS_MIN: u32 = 64;
const SLOTS_MAX: u32 = 65_536;

/// Linux's `sun_path` holds 108 bytes with its end mark, and the path is longer while the socket is made.
const SOCKET_PATH_MAX_BYTES: usize = 107 - crate::private_socket::SUFFIX.len();

/// Clients of one disk at once, at most.
const CONNECTIONS_MAX: u32 = 64;

const BOUNDARIES: [(&str, Boundary); 2] =
    [("group", Boundary::Group), ("member", Boundary::Member)];
/// `None`: vectors while they fit.
const FORMS: [(&str, Option<Form>); 3] =
    [("auto", None), ("vector", Some(Form::Vector)), ("hlc", Some(Form::Hlc))];

const CLOCK_LEAD_DEFAULT: Duration = Duration::from_secs(1);
const CLOCK_LEAD_MAX: Duration = Duration::from_secs(60);
const IDLE_DEFAULT: Duration = Duration::from_millis(10);
const IDLE_MIN: Duration = Duration::from_millis(1);
const IDLE_MAX: Duration = Duration::from_secs(10);

/// The least MTU of IPv4, with room for the longest option.
const MTU_MIN: u32 = 576;
/// Numbers below are not experimental, or not copied into fragments.
const COPIED: u8 = 0x80;

pub(super) fn read_group(group: &mut Section<'_>, file: &FileContext<'_>) -> Option<Group> {
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
    let when_unreachable = group.or("when_unreachable", WhenUnreachable::Hold).value;
    let before_first_contact = group.choice("before_first_contact", &CONTACTS);
    let copy = group.optional_table("copy", read_copy);
    let verify = group
        .optional_table("verify", |verify| Some(read_verify(verify)))
        .unwrap_or(VerifySettings { every: Some(VERIFY_EVERY_DEFAULT), rate: VERIFY_RATE_DEFAULT });
    let activity_log = group
        .optional_table("activity_log", |log| Some(read_activity_log(log)))
        .unwrap_or(Some(ActivitySettings { extent: EXTENT_DEFAULT, slots: SLOTS_DEFAULT }));
    let heartbeat = group
        .optional_table("heartbeat", |heartbeat| Some(read_heartbeat(heartbeat)))
        .unwrap_or(Some(HeartbeatSettings::DEFAULT));
    let form = group.choice("form", &FORMS).and_then(|form| form.value);
    let boundary = group.choice("boundary", &BOUNDARIES).map_or(Boundary::Group, |b| b.value);
    let max_clock_lead = read_span(
        group,
        "max_clock_lead",
        CLOCK_LEAD_DEFAULT,
        (Duration::from_millis(1), CLOCK_LEAD_MAX),
    );
    let idle_interval = read_span(group, "idle_interval", IDLE_DEFAULT, (IDLE_MIN, IDLE_MAX));
    let tagging = group.choice("tagging", &[("on", false), ("off-for-a-demonstration", true)]);
    let off_for_a_demonstration = tagging.is_some_and(|off| off.value);
    let tag = group.optional_table("tag", read_tag).unwrap_or(TagSettings {
        option: tag::IPV4_OPTION,
        mtu: None,
        strip_path: false,
        mark_mask: tidelock_netfilter::gate::MARK_MASK,
        off_for_a_demonstration,
    });
    let group_name = name.as_ref().map_or("", |name| name.as_str()).to_owned();
    let directory = file.runtime_dir.join(&group_name);
    let read = group.tables("member", |member| read_member(member, &directory, file));
    if !group.has("member") {
        let what = "a group without a member protects nothing";
        group.fail(&group.place(), what, "[[group.member]] and its keys below this group");
    }
    let (roster, members): (Vec<_>, Vec<_>) = read.into_iter().unzip();
    let members: Vec<Member> = members.into_iter().flatten().collect();
    if !roster.is_empty() && members.is_empty() {
        let what = "no member of this group is on this host";
        let instead = "host = \"NAME\" of [host] in one of them, or no such group here";
        group.fail(&group.place(), what, instead);
    }
    let writers = roster.iter().filter(|peer| peer.roles.writer).count();
    let fits = writers <= usize::from(vectors_hold(&roster));
    let form = form.unwrap_or(if fits { Form::Vector } else { Form::Hlc });
    check_several(group, &roster, &members, boundary, form);
    let backlog_on_disk =
        group.optional_table("backlog_on_disk", |on_disk| read_backlog_on_disk(on_disk, &backlog));
    if let Some(contact) = before_first_contact.as_ref().filter(|c| c.value.serves())
        && roster.len() > 1
    {
        let what = "`before_first_contact` in [[group]]: in a group of several members nobody could know what a \
                    member that is served so has told the others";
        group.fail(&contact.place, what, "\"wait\", or a group for each member");
    }
    Some(Group {
        name: name?,
        mode,
        when_unreachable,
        before_first_contact: before_first_contact.map_or(BeforeFirstContact::Wait, |c| c.value),
        backlog: backlog.value,
        backlog_on_disk,
        lease,
        grace,
        copy: copy.unwrap_or(CopySettings { rate: None, window: WINDOW_DEFAULT }),
        verify,
        activity_log,
        heartbeat,
        members,
        roster,
        form,
        boundary,
        tag: TagSettings { off_for_a_demonstration, ..tag },
        max_clock_lead,
        idle_interval,
    })
}

fn read_span(
    group: &mut Section<'_>,
    key: &'static str,
    default: Duration,
    (min, max): (Duration, Duration),
) -> Duration {
    let span = group.or(key, default);
    if !(min..=max).contains(&span.value) {
        let what = format!(
            "`{key}` in [[group]]: {} is not between {} and {}",
            format_duration(span.value),
            format_duration(min),
            format_duration(max)
        );
        group.fail(&span.place, what, format!("\"{}\"", format_duration(default)));
    }
    span.value
}

/// The value in them is random.
const MARK_BITS_MIN: u32 = 8;

fn read_tag(tag: &mut Section<'_>) -> Option<TagSettings> {
    let option = tag.or("option", u16::from(tag::IPV4_OPTION));
    let number = u8::try_from(option.value).unwrap_or(0);
    if number & COPIED == 0 {
        let what = format!(
            "`option` in [group.tag]: {} is no IPv4 option that is copied into fragments",
            option.value
        );
        tag.fail(&option.place, what, format!("{}, or another from 128 to 255", tag::IPV4_OPTION));
    } else if ASSIGNED_OPTIONS.contains(&number) {
        let what = format!(
            "`option` in [group.tag]: {number} has a meaning of its own, which routers and guests may act on"
        );
        tag.fail(
            &option.place,
            what,
            format!("{}, or 222, the other experimental one", tag::IPV4_OPTION),
        );
    }
    let mtu = tag.optional::<u32>("mtu");
    if let Some(mtu) = mtu.as_ref().filter(|mtu| mtu.value < MTU_MIN) {
        let what = format!("`mtu` in [group.tag]: {} is less than {MTU_MIN}", mtu.value);
        tag.fail(&mtu.place, what, "1500, or what every way between the members takes");
    }
    let strip_path = tag.or("strip_path", false);
    let mark_mask = tag.or("mark_mask", tidelock_netfilter::gate::MARK_MASK);
    if mark_mask.value.count_ones() < MARK_BITS_MIN {
        let what = format!(
            "`mark_mask` in [group.tag]: {:#x} has fewer than {MARK_BITS_MIN} bits, so what is in them could be met by chance",
            mark_mask.value
        );
        tag.fail(&mark_mask.place, what, "0xffff0000, or other bits of a packet's mark");
    }
    Some(TagSettings {
        option: number,
        mtu: mtu.map(|m| m.value),
        strip_path: strip_path.value,
        mark_mask: mark_mask.value,
        off_for_a_demonstration: false,
    })
}

/// How many writers a vector has room for, on every way between members.
fn vectors_hold(roster: &[Peer]) -> u16 {
    let present = roster.iter().filter(|peer| !peer.removed);
    let mut addresses = present.flat_map(|peer| &peer.addresses).peekable();
    let only_ipv6 = addresses.peek().is_some() && addresses.all(IpAddr::is_ipv6);
    if only_ipv6 { tag::IPV6_WRITERS_MAX } else { tag::IPV4_WRITERS_MAX }
}

/// What a group of several members needs: each is known by its addresses, and none sends unseen.
fn check_several(
    group: &Section<'_>,
    roster: &[Peer],
    members: &[Member],
    boundary: Boundary,
    form: Form,
) {
    let present: Vec<_> = roster.iter().filter(|peer| !peer.removed).collect();
    let writers = roster.iter().filter(|peer| peer.roles.writer).count();
    if roster.len() > limits::MEMBERS_MAX || writers > usize::from(limits::WRITERS_MAX) {
        let what = format!("the group has {} members, {writers} of them writers", roster.len());
        let instead =
            format!("at most {} members and {} writers", limits::MEMBERS_MAX, limits::WRITERS_MAX);
        group.fail(&group.place(), what, instead);
    }
    let is_bare = members.iter().all(|member| member.disks.is_empty());
    if !present.is_empty() && is_bare && !present.iter().any(|peer| peer.roles.writer) {
        let what = "no member of this group has a disk: there is nothing to protect";
        group.fail(&group.place(), what, "[[group.member.disk]] below one of its members");
    }
    if present.len() < 2 {
        return;
    }
    for member in members.iter().filter(|member| member.networks.is_empty()) {
        let what = format!("{} is one of several members and has no network", member.name.value);
        let instead = "[[group.member.network]] with interface, topology and addresses: what it \
                       sends to the others must be seen";
        group.fail(&member.name.place, what, instead);
    }
    if boundary == Boundary::Member {
        return;
    }
    let mut taken: HashMap<IpAddr, &Peer> = HashMap::new();
    for peer in &present {
        if peer.addresses.is_empty() {
            let what =
                format!("{} is one of several members and has no addresses", peer.name.value);
            let instead =
                "addresses = [\"10.0.0.1\"] in its [[group.member.network]], on every host";
            group.fail(&peer.name.place, what, instead);
        }
        for address in &peer.addresses {
            if let Some(other) = taken.insert(*address, peer) {
                let what = format!(
                    "the address {address} of {} is already that of {} in line {}",
                    peer.name.value,
                    other.name.value,
                    other.name.place.line()
                );
                group.fail(&peer.name.place, what, "another one");
            }
        }
    }
    let most = vectors_hold(roster);
    if form == Form::Vector && writers > usize::from(most) {
        let way = if most == tag::IPV4_WRITERS_MAX { "an IPv4 header" } else { "an IPv6 option" };
        let what =
            format!("vectors of {writers} writers do not fit into {way}, which holds {most}");
        group.fail(&group.place(), what, "form = \"hlc\", or no `form`");
    }
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

fn read_verify(verify: &mut Section<'_>) -> VerifySettings {
    let every = verify.or("every", VERIFY_EVERY_DEFAULT);
    if !every.value.is_zero() && every.value < VERIFY_EVERY_MIN {
        let what = "`every` in [group.verify]: the disks would be read all the time";
        verify.fail(&every.place, what, "\"7d\", or \"0s\" to verify only on command");
    }
    let rate = verify.or("rate", VERIFY_RATE_DEFAULT);
    if rate.value.bytes_per_s == 0 {
        let what = "`rate` in [group.verify]: at this rate it would never end";
        verify.fail(&rate.place, what, format!("\"{VERIFY_RATE_DEFAULT}\""));
    }
    let every = Some(every.value).filter(|every| !every.is_zero());
    VerifySettings { every, rate: rate.value }
}

fn read_activity_log(log: &mut Section<'_>) -> Option<ActivitySettings> {
    let enabled = log.or("enabled", true).value;
    let extent = log.or("extent", EXTENT_DEFAULT);
    let is_in_range = (EXTENT_MIN..=EXTENT_MAX).contains(&extent.value);
    if !is_in_range || !extent.value.bytes.is_power_of_two() {
        let what = format!(
            "`extent` in [group.activity_log]: {} is not a power of two from {EXTENT_MIN} to {EXTENT_MAX}",
            extent.value
        );
        log.fail(&extent.place, what, format!("\"{EXTENT_DEFAULT}\""));
    }
    let slots = log.or("slots", SLOTS_DEFAULT);
    if !(SLOTS_MIN..=SLOTS_MAX).contains(&slots.value) {
        let what = format!("`slots` in [group.activity_log]: {} is out of range", slots.value);
        log.fail(&slots.place, what, format!("{SLOTS_MIN} to {SLOTS_MAX}"));
    }
    enabled.then_some(ActivitySettings { extent: extent.value, slots: slots.value })
}

/// The member as every host knows it, and what this host needs if it is here.
fn read_member(
    member: &mut Section<'_>,
    runtime_dir: &Path,
    file: &FileContext<'_>,
) -> Option<(Peer, Option<Member>)> {
    let name = member.required::<Name>("name", "name = \"db\"");
    let host = member.optional::<Name>("host").map(|host| host.value);
    let host = host.filter(|host| file.host.as_ref() != Some(host));
    let removed = member.or("removed", false).value;
    let is_here = host.is_none() && !removed;
    let roles = read_roles(member);
    let machine = member.optional::<PathBuf>("machine");
    let directory = runtime_dir.join(name.as_ref().map_or("", |name| name.as_str()));
    let mut next_id = 0u16;
    let mut removed_disks = Vec::new();
    let disks = member.tables("disk", |disk| {
        let id = DiskId(next_id);
        next_id = next_id.saturating_add(1);
        if disk.or("removed", false).value {
            removed_disks.extend(read_removed_disk(disk, id));
            return None;
        }
        read_disk(disk, id, &directory)
    });
    if disks.is_empty() && !removed_disks.is_empty() {
        let what = "all disks of a member are removed";
        member.fail(&member.place(), what, "one that stays, or removed = true for the member");
    }
    let mut is_whole = true;
    let read = member.tables("network", |network| {
        let read = read_network(network, &file.count, is_here);
        is_whole &= read.is_some();
        read
    });
    let (addresses, networks): (Vec<_>, Vec<_>) = read.into_iter().unzip();
    let addresses = addresses.concat();
    let networks: Vec<_> = networks.into_iter().flatten().collect();
    let ungated = member.or("ungated", Vec::<String>::new());
    if is_here {
        check_roles(member, roles);
    }
    if usize::from(next_id) > usize::from(limits::DISKS_MAX) {
        let what = format!("a member has at most {} disks, this has {next_id}", limits::DISKS_MAX);
        member.fail(&member.place(), what, "fewer [[group.member.disk]]");
    }
    let name = name?;
    // What is wrong with one of them has been noted.
    if !is_whole {
        return None;
    }
    let peer = Peer { name: name.clone(), host, roles, removed, addresses };
    let here =
        is_here.then_some(Member { name, roles, machine, disks, removed_disks, networks, ungated });
    Some((peer, here))
}

fn read_roles(member: &mut Section<'_>) -> Roles {
    let only = |writer, intermediate, outbound| Roles { writer, intermediate, outbound };
    let choices = [
        ("writer", only(true, false, false)),
        ("intermediate", only(false, true, false)),
        ("outbound", only(false, false, true)),
    ];
    let Some(list) = member.choices("roles", &choices) else {
        return only(member.has("disk"), false, true);
    };
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
    if roles.outbound && !member.has("network") {
        let what = "an outbound member has no network: its packets would leave unheld";
        let instead = "[[group.member.network]] with interface and topology, or roles = \
                       [\"writer\"] if it talks to no client";
        member.fail(&place, what, instead);
    }
}

fn read_disk(disk: &mut Section<'_>, id: DiskId, directory: &Path) -> Option<Disk> {
    let name = disk.required::<Name>("name", "name = \"root\"");
    let path = disk.required::<PathBuf>("path", "path = \"/var/lib/vms/db.img\"");
    let size = disk.optional::<Size>("size");
    let is_raw = disk.choice("format", &[("raw", true)]).is_some();
    let file = format!("{}.sock", name.as_ref().map_or("", |name| name.as_str()));
    let socket = disk.or("socket", directory.join(file));
    check_socket(disk, &socket);
    let socket_owner = disk.optional::<String>("socket_owner");
    let connections = disk.or("connections", 1u32);
    if !(1..=CONNECTIONS_MAX).contains(&connections.value) {
        let what = format!(
            "`connections` in [[group.member.disk]]: {} is not between 1 and {CONNECTIONS_MAX}",
            connections.value
        );
        disk.fail(&connections.place, what, "1, or as many clients as may use the disk at once");
    }
    let connections = connections.value as usize;
    Some(Disk { id, name: name?, path: path?, size, is_raw, socket, socket_owner, connections })
}

/// What else its section says may stay there, and means nothing.
fn read_removed_disk(disk: &mut Section<'_>, id: DiskId) -> Option<RemovedDisk> {
    let name = disk.required::<Name>("name", "name = \"root\"");
    let _ = (disk.optional::<PathBuf>("path"), disk.optional::<Size>("size"));
    let _ = (disk.optional::<PathBuf>("socket"), disk.choice("format", &[("raw", true)]));
    let _ = (disk.optional::<u32>("connections"), disk.optional::<String>("socket_owner"));
    Some(RemovedDisk { id, name: name? })
}

fn check_socket(disk: &Section<'_>, socket: &Located<PathBuf>) {
    let len = socket.value.as_os_str().len();
    if len > SOCKET_PATH_MAX_BYTES {
        let what = format!(
            "the socket's path has {len} bytes, and may have {SOCKET_PATH_MAX_BYTES}: {}",
            socket.value.display()
        );
        disk.fail(&socket.place, what, "socket = \"/run/short.sock\", or a shorter runtime_dir");
    }
}
