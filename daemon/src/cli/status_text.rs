//! `tidelock status` for people: the answer first, the figures below it.

use super::human;
use super::paint::{Paint, Tone, tone_of};
use super::verify;
use crate::config::certificate_warning;
use std::collections::BTreeMap;
use std::fmt::Write;
use std::time::Duration;
use tidelock_daemon_core::stats::LatencySnapshot;
use tidelock_daemon_core::status::{
    ActivityCompares, ActivityStatus, BacklogOnDiskStatus, CopyStatus, DiskStatus, ElsewhereStatus,
    GateStatus, GroupStatus, HeartbeatStatus, Kind, LinkState, LinkStatus, MemberStatus,
    MissingStatus, Risk, Role, Status, TaggingStatus, Told, Undoes, VerifyStatus, WriterStatus,
};
use tidelock_protocol::message::Form;

/// The whole status.
#[must_use]
pub fn render(status: &Status, paint: Paint) -> String {
    let mut out = String::new();
    let host = paint.tone(Tone::Strong, &status.host);
    line(&mut out, 0, "host", &format!("{host}, up {}", human::ms(status.uptime_ms)));
    if let Some(meaning) = &status.virtual_machine {
        line(&mut out, 0, "", &paint.tone(Tone::Faint, meaning));
    }
    // A host that only leads shards of stores has no link of groups.
    if !status.groups.is_empty() {
        line(&mut out, 0, "link", &link(&status.link, paint));
    }
    for group in &status.groups {
        out.push('\n');
        render_group(&mut out, group, paint);
    }
    out
}

fn line(out: &mut String, indent: usize, label: &str, text: &str) {
    writeln!(out, "{:indent$}{label:<9}{text}", "").expect("a String takes everything");
}

fn link(link: &LinkStatus, paint: Paint) -> String {
    let age = human::ms(link.state_age_ms);
    let security = if link.tls { String::new() } else { paint.tone(Tone::Bad, ", PLAINTEXT") };
    let mut text = match link.state {
        LinkState::Connected => {
            format!("{} to {} for {age}", paint.tone(Tone::Good, "connected"), link.backup)
        }
        LinkState::Connecting => {
            format!("{} to {}", paint.tone(Tone::Watch, "connecting"), link.backup)
        }
        LinkState::Disconnected => {
            format!("{} from {} for {age}", paint.tone(Tone::Bad, "DISCONNECTED"), link.backup)
        }
    };
    text += &security;
    let valid_for = link.certificate_valid_s.map(Duration::from_secs);
    if let Some(warning) = valid_for.and_then(certificate_warning) {
        text += &format!(", {}", paint.tone(Tone::Bad, &warning));
    }
    if let Some(retry) = link.retry_in_ms {
        write!(text, ", next attempt in {}", human::ms(retry)).expect("a String takes everything");
    }
    if let Some(problem) = &link.problem {
        write!(text, "\n         {problem}").expect("a String takes everything");
    }
    text
}

/// A group's word: it is protected, or why not.
pub(super) fn word(group: &GroupStatus) -> &'static str {
    if group.protected { "protected" } else { group.risk.why.kind.name() }
}

/// The line of what a disaster now would undo, and of who may have been told.
pub(super) fn risk(risk: &Risk) -> String {
    let undoes = match risk.undoes {
        Undoes::Nothing => "nothing: the backup has everything".to_owned(),
        Undoes::Lag(lag) if lag.writes == 0 => {
            "nothing that waits to be sent; the backup has not said that it has everything"
                .to_owned()
        }
        Undoes::Lag(lag) => {
            let (writes, bytes) = (human::count(lag.writes, "write"), human::bytes(lag.bytes));
            format!("the lag: {writes}, {bytes}, oldest {}", human::ms(lag.ms))
        }
        Undoes::Since { since_unix_ms: Some(since) } => {
            format!("everything since {}", human::utc(since))
        }
        Undoes::Since { since_unix_ms: None } => {
            "everything since the backup's last whole state, of a time before this run".to_owned()
        }
        Undoes::Everything => "everything: nothing can be recovered".to_owned(),
    };
    let told = match risk.told {
        None => "no client was told of it".to_owned(),
        Some(Told { since_unix_ms, leaves: true }) => {
            format!("clients may be told of it, since {}", human::utc(since_unix_ms))
        }
        Some(Told { since_unix_ms, leaves: false }) => format!(
            "clients may have been told of it since {}, and replies are held again",
            human::utc(since_unix_ms)
        ),
    };
    format!("{undoes}; {told}")
}

/// The tone of what a disaster would undo.
pub(super) fn risk_tone(group: &GroupStatus) -> Tone {
    if group.risk.told.is_some() && !group.is_fine() { Tone::Bad } else { tone_of(group) }
}

fn render_group(out: &mut String, group: &GroupStatus, paint: Paint) {
    let word = paint.tone(tone_of(group), &word(group).to_uppercase());
    let title = format!("{word} for {}", human::ms(group.why_age_ms));
    line(out, 0, "group", &format!("{}: {title}", paint.tone(Tone::Strong, &group.name)));
    line(out, 2, "", &group.risk.why.text);
    if let Some(detail) = &group.detail {
        line(out, 2, "", detail);
    }
    line(out, 2, "undone", &paint.tone(risk_tone(group), &risk(&group.risk)));
    let mut mode = group.mode.to_string();
    if group.mode != group.configured_mode {
        write!(mode, " (configured: {})", group.configured_mode).expect("a String takes all");
    }
    if group.when_unreachable != "hold" {
        write!(mode, ", {}", group.when_unreachable).expect("a String takes all");
    }
    line(out, 2, "mode", &format!("{mode}, epoch {}", group.epoch));
    let lease = &group.lease;
    let of = format!("(of {}, grace {})", human::ms(lease.period_ms), human::ms(lease.grace_ms));
    let text = if lease.held {
        format!("held, {} left {of}", human::ms(lease.left_ms))
    } else if group.mode == tidelock_protocol::message::Mode::Async {
        format!("{} {of}", paint.tone(Tone::Bad, "not held, and the mode needs none"))
    } else {
        format!("{} {of}", paint.tone(Tone::Bad, "not held: nothing leaves for clients"))
    };
    line(out, 2, "lease", &text);
    if let Some((text, tone)) = tags(group) {
        line(out, 2, "tags", &paint.tone(tone, &text));
    }
    for member in &group.members {
        render_member(out, member, group.risk.why.kind, paint);
    }
    for member in &group.elsewhere {
        line(out, 2, "member", &elsewhere(member, paint));
    }
}

/// How the group's members tell each other what they depend on, and whether that keeps up.
pub(super) fn tags(group: &GroupStatus) -> Option<(String, Tone)> {
    let form = group.form?;
    if !group.tagged {
        let text = "none: what leaves a member waits, also to other members";
        return Some((text.to_owned(), Tone::Good));
    }
    let Some(lag_ms) = group.watermark_lag_ms.filter(|_| form == Form::Hlc) else {
        return Some(("vectors".to_owned(), Tone::Good));
    };
    let behind = format!("HLC, watermark {} behind the newest record", human::ms(lag_ms));
    // Idle writers speak many times in a lease: one that is silent for so long is gone.
    Some(match lag_ms > group.lease.period_ms {
        false => (behind, Tone::Good),
        true => {
            let why = "some writer is silent or resyncs, and held replies of all members wait \
                       for it; `tidelock-backup status` says which";
            (format!("{behind}: {why}"), Tone::Bad)
        }
    })
}

/// A member that is not here, in one line.
pub(super) fn elsewhere(member: &ElsewhereStatus, paint: Paint) -> String {
    let name = paint.tone(Tone::Strong, &member.name);
    match &member.host {
        Some(host) => format!("{name}: {} on {host}, which says how it is", roles(&member.roles)),
        None => format!("{name}: removed"),
    }
}

fn roles(roles: &[Role]) -> String {
    roles.iter().map(Role::to_string).collect::<Vec<_>>().join(", ")
}

fn render_member(out: &mut String, member: &MemberStatus, kind: Kind, paint: Paint) {
    let name = paint.tone(Tone::Strong, &member.name);
    line(out, 2, "member", &format!("{name}: {} here", roles(&member.roles)));
    if let Some(writer) = &member.writer {
        render_writer(out, writer, kind, paint);
    }
    for gate in &member.gates {
        line(out, 4, "gate", &render_gate(gate, paint));
    }
    if let Some(tagging) = &member.tagging {
        line(out, 4, "tags", &render_tagging(tagging, paint));
    }
}

fn render_tagging(tagging: &TaggingStatus, paint: Paint) -> String {
    let mut text = human::count(tagging.tagged_packets, "packet") + " tagged";
    write!(text, ", {} merged", tagging.merged_packets).expect("a String takes everything");
    write!(text, ", {} inside this host", tagging.here_packets).expect("a String takes everything");
    write!(text, ", {} covered", tagging.covered_packets).expect("a String takes everything");
    if let Some(reasons) = by_reason(&tagging.gated_packets) {
        write!(text, ", held instead: {reasons}").expect("a String takes everything");
    }
    if tagging.foreign_packets > 0 {
        let foreign = format!("{} with tags of outsiders", tagging.foreign_packets);
        write!(text, ", {}", paint.tone(Tone::Watch, &foreign)).expect("a String takes all");
    }
    if let Some(reasons) = by_reason(&tagging.dropped_packets) {
        let dropped = paint.tone(Tone::Watch, &format!("dropped: {reasons}"));
        write!(text, ", {dropped}").expect("a String takes everything");
    }
    text
}

/// `3 mtu, 1 no room`; `None` if there are none.
fn by_reason(counts: &BTreeMap<String, u64>) -> Option<String> {
    let some = counts.iter().filter(|(_, count)| **count > 0);
    let each: Vec<_> =
        some.map(|(reason, count)| format!("{count} {}", reason.replace('_', " "))).collect();
    (!each.is_empty()).then(|| each.join(", "))
}

/// What a crash now would cost.
fn exposure(activity: &ActivityStatus, paint: Paint) -> String {
    let bytes = human::bytes(activity.exposed_bytes);
    match (activity.compares, &activity.because) {
        (ActivityCompares::Map, _) => format!("a resync would compare {bytes}"),
        (ActivityCompares::Unlogged, _) => {
            format!("a resync would compare all of {bytes}: no activity log is kept")
        }
        (ActivityCompares::Everything, because) => {
            let because = because.as_deref().unwrap_or_default();
            paint.tone(Tone::Watch, &format!("a resync would compare all of {bytes}: {because}"))
        }
    }
}

fn render_writer(out: &mut String, writer: &WriterStatus, kind: Kind, paint: Paint) {
    let lag = &writer.lag;
    let text = if lag.writes == 0 && matches!(kind, Kind::Unrecorded | Kind::Copying) {
        "none of what is recorded; what was written before is to be compared".to_owned()
    } else if writer.backup_has_all {
        "none: the backup has everything".to_owned()
    } else if lag.writes == 0 {
        // Not attached, or what the disks held before is not there yet.
        "nothing waits to be sent; the backup does not have everything, or has not said so"
            .to_owned()
    } else {
        let (writes, bytes) = (human::count(lag.writes, "write"), human::bytes(lag.bytes));
        format!("{writes}, {bytes}, oldest {}", human::ms(lag.ms))
    };
    line(out, 4, "lag", &text);
    let backlog = &writer.backlog;
    let (used, limit) = (human::bytes(backlog.used_bytes), human::bytes(backlog.limit_bytes));
    let mut text = format!("{used} of {limit}");
    if backlog.writes_wait {
        let requests = human::count(backlog.waiting_requests, "request");
        text += &paint.tone(Tone::Bad, &format!(", FULL: {requests} of the guest wait"));
    }
    line(out, 4, "backlog", &text);
    if let Some(on_disk) = &backlog.on_disk {
        line(out, 4, "on disk", &backlog_on_disk(on_disk, paint));
    }
    if let Some((text, tone)) = heartbeat(&writer.heartbeat) {
        line(out, 4, "beat", &paint.tone(tone, &text));
    }
    line(out, 4, "crash", &exposure(&writer.activity, paint));
    if let Some(text) = latency(&writer.commit_latency) {
        line(out, 4, "commits", &text);
    }
    if let Some(copy) = &writer.copy {
        line(out, 4, "copy", &render_copy(copy));
        if let Some(because) = &copy.because {
            line(out, 4, "why", because);
        }
    }
    line(out, 4, "verify", &verification(&writer.verify, paint));
    let io = &writer.guest_io;
    if io.disk_errors > 0 {
        let text = human::count(io.disk_errors, "request") + " failed on the local disk";
        line(out, 4, "errors", &paint.tone(Tone::Bad, &text));
    }
    for disk in &writer.disks {
        let mut text = render_disk(disk, paint);
        if let Some(hang) =
            writer.disk_hang.as_ref().filter(|h| h.disk.as_ref() == Some(&disk.name))
        {
            let waited = human::ms(hang.ms);
            text += &paint.tone(Tone::Bad, &format!(", HANGS: no answer for {waited}"));
        }
        line(out, 4, "disk", &text);
    }
}

/// What of the backlog is not in memory.
fn backlog_on_disk(on_disk: &BacklogOnDiskStatus, paint: Paint) -> String {
    if on_disk.overflowed {
        return paint.tone(Tone::Bad, "OVERFLOWED: nothing that the guest writes is recorded");
    }
    if on_disk.failed {
        return paint.tone(Tone::Bad, "FAILED: the backlog is in memory only, and full sooner");
    }
    let records = match on_disk.records {
        0 => "all of the backlog is in memory, too".to_owned(),
        records => human::count(records, "record") + " not in memory",
    };
    let (memory, limit) = (on_disk.memory_bytes, on_disk.memory_limit_bytes);
    let (memory, limit) = (human::bytes(memory), human::bytes(limit));
    format!("{records}; memory {memory} of {limit}, files {}", human::bytes(on_disk.file_bytes))
}

/// Whether what is admitted comes back; `None`: nobody looks.
pub(super) fn heartbeat(heartbeat: &HeartbeatStatus) -> Option<(String, Tone)> {
    let every = human::ms(heartbeat.interval_ms?);
    let age = match heartbeat.age_ms {
        Some(age_ms) => format!("the last that came back was sent {} ago", human::ms(age_ms)),
        None => "none has come back yet".to_owned(),
    };
    Some(match heartbeat.missing {
        None => (format!("{age}, one each {every}"), Tone::Good),
        Some(MissingStatus::Daemon) => {
            (format!("MISSING: this daemon's loop admits nothing; {age}"), Tone::Bad)
        }
        Some(MissingStatus::Backup) => {
            (format!("MISSING: the backup acknowledges nothing; {age}"), Tone::Bad)
        }
    })
}

/// Whether the sites were seen to be equal, and how long ago.
fn verification(verify: &VerifyStatus, paint: Paint) -> String {
    let mut parts: Vec<String> = verify.running.iter().map(render_copy).collect();
    parts.push(match &verify.last {
        None => "not verified yet".to_owned(),
        Some(last) => {
            let ago =
                verify.age_ms.map_or_else(String::new, |age| format!(" {} ago", human::ms(age)));
            let text = format!("verified{ago}: {}", verify::summary(last));
            if last.is_good() { text } else { paint.tone(Tone::Bad, &text) }
        }
    });
    if let Some(why) = &verify.given_up {
        parts.push(paint.tone(Tone::Watch, &format!("one was given up since: {why}")));
    }
    parts.join("; ")
}

fn render_disk(disk: &DiskStatus, paint: Paint) -> String {
    let size = human::bytes(disk.size_bytes);
    let socket = paint.tone(Tone::Faint, &format!("NBD at {}", disk.socket.display()));
    format!("{}, {size}, {}, {socket}", disk.name, disk.path.display())
}

fn render_copy(copy: &CopyStatus) -> String {
    const WIDTH: usize = 20;
    let full = (copy.share() * WIDTH as f64) as usize;
    let left = match copy.left_ms {
        Some(left) => format!("{} left", human::ms(left)),
        None => "standing still".to_owned(),
    };
    format!(
        "{} [{}{}] {:.1} %, {} of {}, {}, {left}",
        copy.kind,
        "#".repeat(full),
        ".".repeat(WIDTH - full),
        // Not rounded up: 100 % is said when it is done.
        (copy.share() * 1000.0).floor() / 10.0,
        human::bytes(copy.done_bytes),
        human::bytes(copy.total_bytes),
        human::rate(copy.rate_bytes_per_s),
    )
}

fn render_gate(gate: &GateStatus, paint: Paint) -> String {
    let state = if gate.open {
        paint.tone(Tone::Good, "open")
    } else {
        let because = gate.shut_because.as_deref().unwrap_or("no lease");
        paint.tone(Tone::Bad, &format!("SHUT ({because})"))
    };
    let mut text = format!("{} {state}", gate.interface);
    if gate.held_packets > 0 {
        let packets = human::count(gate.held_packets, "packet");
        let oldest = human::ms(gate.oldest_hold_ms);
        write!(text, ", {packets} held, oldest {oldest}").expect("a String takes everything");
    }
    if let Some(latency) = latency(&gate.hold_time) {
        write!(text, ", holds: {latency}").expect("a String takes everything");
    }
    if gate.dropped_packets > 0 {
        let dropped = human::count(gate.dropped_packets, "packet") + " dropped";
        write!(text, ", {}", paint.tone(Tone::Watch, &dropped)).expect("a String takes all");
    }
    if gate.may_have_left > 0 {
        let changed = human::count(gate.may_have_left, "time");
        let left = format!("rules changed {changed}: packets may have left unheld");
        write!(text, ", {}", paint.tone(Tone::Bad, &left)).expect("a String takes all");
    }
    if gate.rules_restored > 0 {
        let restored = format!("rules put back {}", human::count(gate.rules_restored, "time"));
        write!(text, ", {}", paint.tone(Tone::Bad, &restored)).expect("a String takes all");
    }
    if let Some(why) = &gate.unwatched_because {
        let watch = format!("no kernel programs, so packets leave while its rules are gone: {why}");
        write!(text, ", {}", paint.tone(Tone::Watch, &watch)).expect("a String takes all");
    }
    if gate.unheld_because.is_some() {
        write!(text, ", {}", paint.tone(Tone::Bad, "UNHELD")).expect("a String takes all");
    }
    text
}

/// `half within 52 ms, 99 % within 75 ms, longest 120 ms`.
pub(super) fn latency(latency: &LatencySnapshot) -> Option<String> {
    let within = |share| latency.quantile_ns(share).map(human::ns);
    Some(format!(
        "half within {}, 99 % within {}, longest {}",
        within(0.5)?,
        within(0.99)?,
        human::ns(latency.max_ns)
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::example_status::status;
    use tidelock_daemon_core::status::{CopyKindStatus, LagStatus};
    use tidelock_daemon_core::verified::Verified;
    use tidelock_protocol::ids::{Epoch, Seq};
    use tidelock_protocol::message::Mode;

    #[test]
    fn a_healthy_group_reads_at_a_glance() {
        let expected = "\
host     host-a, up 3 h 12 min
link     connected to backup.example.org:9640 for 3 h 12 min

group    shop: PROTECTED for 3 h 10 min
           the backup has every write but those on their way
  undone   the lag: 12 writes, 48 KiB, oldest 52 ms; no client was told of it
  mode     pipelined, epoch 1
  lease    held, 8.1 s left (of 10 s, grace 15 s)
  tags     HLC, watermark 60 ms behind the newest record
  member   db: writer here
    lag      12 writes, 48 KiB, oldest 52 ms
    backlog  1 MiB of 256 MiB
    beat     the last that came back was sent 230 ms ago, one each 1 s
    crash    a resync would compare 37 MiB
    commits  half within 60 ms, 99 % within 60 ms, longest 60 ms
    verify   not verified yet
    disk     root, 40 GiB, /var/lib/vms/db.img, NBD at /run/tidelock/shop/db/root.sock
    gate     tap0 open, 4 packets held, oldest 48 ms, holds: half within 50 ms, 99 % within 70 ms, longest 70 ms
    tags     700 packets tagged, 650 merged, 40 inside this host, 1200 covered, held instead: 3 mtu
  member   web: outbound on host-b, which says how it is
";
        assert_eq!(render(&status(), Paint::PLAIN), expected);
    }

    #[test]
    fn it_is_said_when_the_sites_were_seen_to_be_equal() {
        let mut status = status();
        let of = |status: &mut Status, verify: VerifyStatus| {
            status.groups[0].members[0].writer.as_mut().unwrap().verify = verify;
            let text = render(status, Paint::PLAIN);
            let line = text.lines().find_map(|line| line.strip_prefix("    verify   "));
            line.expect("a line of its own").to_owned()
        };
        // Protected or not, with a schedule or without.
        assert_eq!(of(&mut status, VerifyStatus::default()), "not verified yet");
        let last = Verified {
            begun_unix_ms: 1_700_000_000_000,
            ended_unix_ms: 1_700_000_060_000,
            epoch: Epoch(1),
            from_seq: Seq(5),
            to_seq: Seq(9),
            compared_bytes: 64 << 20,
            differing: Vec::new(),
            differing_bytes: 0,
            repaired_bytes: 0,
            unreadable_bytes: 0,
        };
        let verify =
            VerifyStatus { last: Some(last), age_ms: Some(7_200_000), ..VerifyStatus::default() };
        assert_eq!(
            of(&mut status, verify),
            "verified 2 h ago: equal, 64 MiB compared, at write 9, 2023-11-14T22:14:20Z"
        );
        let given_up = VerifyStatus { given_up: Some("why".into()), ..VerifyStatus::default() };
        assert_eq!(of(&mut status, given_up), "not verified yet; one was given up since: why");
    }

    #[test]
    fn trouble_is_said_aloud() {
        let mut status = status();
        status.link.state = LinkState::Disconnected;
        status.link.tls = false;
        status.link.certificate_valid_s = Some(5 * 86_400);
        status.link.retry_in_ms = Some(1_500);
        status.virtual_machine = Some("a virtual machine: a pause is noticed".into());
        status.link.problem = Some("connection refused".into());
        let group = &mut status.groups[0];
        group.risk.why.kind = Kind::Disconnected;
        group.risk.undoes = Undoes::Lag(LagStatus { writes: 2, bytes: 2048, ms: 3_000 });
        group.risk.told = Some(Told { since_unix_ms: 1_700_000_000_123, leaves: true });
        group.protected = false;
        group.mode = Mode::Async;
        group.when_unreachable = "async after 30s".into();
        group.lease.held = false;
        group.watermark_lag_ms = Some(61_000);
        group.elsewhere[0].host = None;
        let member = &mut group.members[0];
        let writer = member.writer.as_mut().unwrap();
        writer.backlog.writes_wait = true;
        writer.backlog.waiting_requests = 3;
        writer.guest_io.disk_errors = 1;
        let disk = Some(writer.disks[0].name.clone());
        writer.disk_hang = Some(tidelock_daemon_core::status::DiskHangStatus { disk, ms: 7_000 });
        writer.heartbeat.missing = Some(MissingStatus::Backup);
        writer.heartbeat.age_ms = Some(7_000);
        writer.lag = tidelock_daemon_core::status::LagStatus::default();
        writer.copy = Some(CopyStatus {
            kind: CopyKindStatus::Resync,
            done_bytes: 99_999,
            total_bytes: 100_000,
            rate_bytes_per_s: 0,
            left_ms: None,
            because: Some("the host was restored".into()),
        });
        let gate = &mut member.gates[0];
        gate.open = false;
        gate.shut_because = Some("the lease has ended".into());
        gate.dropped_packets = 1;
        gate.rules_restored = 2;
        gate.may_have_left = 3;
        gate.unheld_because = Some("why".into());
        gate.unwatched_because = Some("no right".into());
        let tagging = member.tagging.as_mut().unwrap();
        tagging.foreign_packets = 2;
        tagging.dropped_packets.insert("guests_own".into(), 4);
        let text = render(&status, Paint::PLAIN);
        for part in [
            "DISCONNECTED from backup.example.org:9640 for 3 h 12 min, PLAINTEXT, the own certificate ends in 5d: issue a new one with \
             `tidelock pki issue`, it is taken up at the next connection, next attempt in 1.5 s\n         connection refused",
            "a virtual machine: a pause is noticed",
            "shop: DISCONNECTED",
            "undone   the lag: 2 writes, 2 KiB, oldest 3 s; clients may be told of it, since 2023-11-14T22:13:20Z",
            "async (configured: pipelined), async after 30s, epoch 1",
            "not held, and the mode needs none",
            "nothing waits to be sent; the backup does not have everything, or has not said so",
            "FULL: 3 requests of the guest wait",
            "resync [###################.] 99.9 %, 97.7 KiB of 97.7 KiB, 0 B/s, standing still",
            "the host was restored",
            "1 request failed on the local disk",
            "MISSING: the backup acknowledges nothing; the last that came back was sent 7 s ago",
            "tap0 SHUT (the lease has ended)",
            "1 packet dropped, rules changed 3 times: packets may have left unheld, rules put back 2 times, no kernel \
             programs, so packets leave while its rules are gone: no right, UNHELD",
            "watermark 1 min 1 s behind the newest record: some writer is silent or resyncs",
            "2 with tags of outsiders, dropped: 4 guests own",
            "web: removed",
        ] {
            assert!(text.contains(part), "{part} is missing in:\n{text}");
        }
        let group = &mut status.groups[0];
        group.risk.why.kind = Kind::Unrecorded;
        group.risk.told = Some(Told { since_unix_ms: 1_700_000_000_123, leaves: false });
        group.risk.undoes = Undoes::Since { since_unix_ms: None };
        let text = render(&status, Paint::PLAIN);
        let undone = "undone   everything since the backup's last whole state, of a time before this run; clients may have been told \
                      of it since 2023-11-14T22:13:20Z, and replies are held again\n";
        assert!(text.contains(undone), "{text}");
        assert!(!text.contains("the backup has everything"), "{text}");
    }

    #[test]
    fn what_a_disaster_would_undo_is_said_in_words() {
        let of = |undoes| risk(&Risk { undoes, ..status().groups.remove(0).risk });
        assert_eq!(
            of(Undoes::Nothing),
            "nothing: the backup has everything; no client was told of it"
        );
        assert_eq!(
            of(Undoes::Since { since_unix_ms: Some(1_700_000_000_123) }),
            "everything since 2023-11-14T22:13:20Z; no client was told of it"
        );
        assert_eq!(
            of(Undoes::Lag(LagStatus::default())),
            "nothing that waits to be sent; the backup has not said that it has everything; no client was told of it"
        );
        assert_eq!(
            of(Undoes::Everything),
            "everything: nothing can be recovered; no client was told of it"
        );
    }
}
