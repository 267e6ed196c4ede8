//! Sentences of a group's status, for people: what its policy does, what hangs, fails or is refused, and what to do.

use super::WriterSeen;
use super::group::Instant;
use crate::degrade::Standing;
use crate::group::{GroupSettings, GroupView, Member};
use crate::heartbeat::Missing;
use crate::owner::Phase;
use crate::verified::Verified;
use crate::words;
use std::sync::atomic::Ordering::Relaxed;
use tidelock_protocol::message::Mode;

/// More about the state of a group.
pub(super) fn of_group(of: &Instant<'_>) -> Option<String> {
    let mut parts: Vec<String> = policy(of).into_iter().collect();
    if of.is_stopping {
        parts.push("the daemon is ending".to_owned());
    }
    let pairs = || of.members.iter().zip(&of.seen.members);
    for (member, seen) in pairs() {
        let why = seen.gates.iter().filter_map(|gate| gate.unheld_because(seen.is_in_use()));
        parts.extend(why.map(|why| format!("{}: {why}", member.name)));
    }
    if let Some(at) = of.view.switched_at_unix_ms {
        parts.push(format!(
            "switched over to the backup site at {}: this host has given up its lease",
            words::utc(at)
        ));
    }
    for (member, seen) in pairs() {
        let mut said = Vec::new();
        match (&member.writer, &seen.writer) {
            (Some(_), Some(seen)) => of_writer(of, member, seen, &mut said),
            _ => said.extend(member.link.stalled().or_else(|| member.link.refusal())),
        }
        parts.extend(said.into_iter().map(|text| format!("{}: {text}", member.name)));
    }
    (!parts.is_empty()).then(|| parts.join("; "))
}

/// Effect of the policy now, or why it has none.
fn policy(of: &Instant<'_>) -> Option<String> {
    let GroupSettings { name, is_of_several, after_ms, .. } = of.settings;
    let policy = &of.seen.terms.when_unreachable;
    if of.seen.awaits_adoption {
        return Some(format!(
            "the guest's disks are elsewhere still: `tidelock adopt {name}` brings them here; until then nothing goes to \
             the backup, and replies leave"
        ));
    }
    if let Some(text) = unreached(of.view, &of.members) {
        return Some(text.to_owned());
    }
    if of.view.awaits_contact {
        let why = "replies are held although the mode is async: the last run may have left with everything at the \
                   backup, which counts on no more from here before it has heard of this one";
        let way_out = match is_of_several {
            false => ". `tidelock mode` with async lets them out",
            true => ", and what the other members are covered by goes by that",
        };
        return Some(format!("{why}{way_out}"));
    }
    match of.view.standing {
        Standing::Degraded { .. } => Some(format!(
            "nothing is held ({policy}): replies had waited for the backup for too long"
        )),
        Standing::Returning { .. } => {
            Some("replies are held again; not all that has left before is at the backup".to_owned())
        }
        Standing::Holding if after_ms.is_none() => None,
        Standing::Holding => {
            let mut links = of.members.iter().map(|member| &member.link);
            let is_told = links.all(|link| !link.is_attached() || link.is_policy_kept());
            (!is_told)
                .then(|| format!("\"{policy}\" is not in force: the backup has no room to keep it"))
        }
    }
}

/// Fate of replies while, and after, guests are served without the backup.
fn unreached(view: GroupView, members: &[Member]) -> Option<&'static str> {
    let mut writers = members.iter().filter_map(|member| member.writer.as_ref());
    let is_unrecorded = writers.any(|writer| writer.phase == Phase::Unrecorded);
    let is_returning = matches!(view.standing, Standing::Returning { .. });
    match (is_unrecorded, view.is_unreached) {
        (true, true) => {
            Some("guests are served and replies leave, the backup has nothing of it yet")
        }
        (true, false) if view.mode == Mode::Async => {
            Some("guests are served and replies leave (async), the backup has nothing of it yet")
        }
        (true, false) => Some(
            "guests are served, replies are held: the backup has not confirmed that it knows that this host serves \
             without it, and somebody may have recovered the group there. `tidelock mode` with async lets them out",
        ),
        (false, true) if is_returning => None,
        (false, true) => Some("nothing is held until the backup has all of the disks"),
        (false, false) => None,
    }
}

fn of_writer(of: &Instant<'_>, member: &Member, seen: &WriterSeen, parts: &mut Vec<String>) {
    let (terms, group) = (&of.seen.terms, &of.settings.name);
    let (stats, view) = (&seen.stats, &seen.view);
    let trouble = view.trouble();
    parts.extend(member.link.stalled());
    parts.extend(member.link.refusal());
    parts.extend(seen.pulse.lost().map(missing).map(str::to_owned));
    parts.extend(seen.disk_hang(terms, of.clocks.now).map(|hang| hang.to_string()));
    parts.extend(trouble.refusal.map(|refusal| refusal.reason));
    let mut say = |text: String| parts.push(text);
    if stats.backlog_full.load(Relaxed) {
        say("the backlog is full, guests' writes wait".to_owned());
    }
    if stats.backlog_disk_failed.load(Relaxed) {
        say("the backlog on disk has failed: it is in memory only, and full sooner".to_owned());
    }
    if stats.waits_for_ceiling.load(Relaxed) {
        say("guests' writes wait until the state file has a greater time".to_owned());
    }
    let refused_ms = stats.clock_refused_ms.load(Relaxed);
    if refused_ms != 0 {
        say(format!(
            "the wall clock has jumped by {refused_ms} ms and is not believed: set it right, or, after a correction that \
             is meant, start the daemon again"
        ));
    }
    let lead_ms = stats.clock_lead_ms.load(Relaxed);
    if lead_ms > terms.max_clock_lead_ms {
        say(format!(
            "another member's clock is {lead_ms} ms ahead of this host's, more than `max_clock_lead`: set the clocks of \
             the hosts"
        ));
    }
    if let Some(verified) = seen.verified.as_ref().filter(|of| of.differs()) {
        say(differ(group, verified));
    }
    let unreadable_bytes = view.copy().map_or(0, |copy| copy.unreadable_bytes);
    if unreadable_bytes > 0 {
        say(format!(
            "the local disk does not let {unreadable_bytes} bytes be read: the copy cannot end before it does, and is \
             not protected until then; replace the disk, or restore what cannot be read"
        ));
    }
    let suspect_bytes = view.suspect_bytes();
    if suspect_bytes > 0 {
        say(format!("the local disk failed; the sites may differ in {suspect_bytes} bytes"));
    }
    for (disk, why) in trouble.failed_disks {
        say(format!("disk {disk} failed a flush, so flushes fail: {why}"));
    }
}

fn differ(group: &str, verified: &Verified) -> String {
    format!(
        "the sites differed in {} bytes when they were compared last, first at {}; `tidelock verify {group} --repair` \
         copies what differs from here to the backup",
        verified.differing_bytes - verified.repaired_bytes,
        verified.first()
    )
}

/// Place at which a heartbeat is missing.
fn missing(missing: Missing) -> &'static str {
    match missing {
        Missing::Owner => "a heartbeat is missing: this daemon's loop admits nothing",
        Missing::Backup => {
            "a heartbeat is missing: the backup acknowledges nothing and does not say why"
        }
    }
}
