//! `recover`: the checks before the fence, the wait for leases that may hold, the recovery, the offer of its disks.

use super::control::{COUNTDOWN, Reply, ask, damaged, group_status, reply};
use super::exports::Exports;
use super::inbox::{DamagedAsk, Event};
use super::registry::Registry;
use super::travel;
use std::io;
use std::time::Duration;
use tidelock_replica::group::{GroupStatus, HostStatus, RecoverError};
use tidelock_replica::history::Point;
use tidelock_replica::travel::marks::Kind;
use tidelock_replica::travel::when::When;
use tokio::net::unix::OwnedWriteHalf;
use tokio::time::{Instant, sleep};

/// An operator's answers.
pub(super) struct RecoverHow {
    pub(super) primary_is_dead: bool,
    pub(super) although_connected: bool,
    pub(super) dry_run: bool,
    pub(super) accept_damage: bool,
    pub(super) drop_later_pins: bool,
}

pub(super) async fn recover(
    registry: &Registry,
    exports: &Exports,
    group: &str,
    how: RecoverHow,
    at: Option<When>,
    writer: &mut OwnedWriteHalf,
) -> io::Result<Reply> {
    let kept = match at {
        Some(at) => match travel::keep(registry, group, at).await {
            Ok(kept) => Some(kept),
            Err(reason) => return Ok(Reply::Error { reason }),
        },
        None => None,
    };
    if let Some((point, _)) = &kept
        && !how.drop_later_pins
        && let Err(reason) = check_later_pins(registry, group, point).await
    {
        return Ok(Reply::Error { reason });
    }
    let began = Instant::now();
    let mut has_looked_again = false;
    if let Err(reason) = ask(registry, group, |done| Event::OpenAgain { done }).await {
        return Ok(Reply::Error { reason });
    }
    let now = match group_status(registry, group).await {
        Ok(now) => now,
        Err(reason) => return Ok(Reply::Error { reason }),
    };
    if how.dry_run {
        return Ok(rehearse(registry, now, kept.map(|(point, _hold)| point), &how).await);
    }
    let hosts: Vec<_> = now.hosts.iter().filter(|host| is_alive(&now, host)).cloned().collect();
    let is_new = now.recovered.is_none() && !now.lease_given_up;
    if how.primary_is_dead && !how.although_connected && is_new && !hosts.is_empty() {
        return Ok(Reply::Connected { hosts });
    }
    loop {
        let point = kept.as_ref().map(|(point, _hold)| point.clone());
        let event = |done| Event::Recover {
            primary_declared_dead: how.primary_is_dead,
            point,
            accepts_damage: how.accept_damage,
            done,
        };
        let recovery = match ask(registry, group, event).await {
            Ok(Ok(recovery)) => recovery,
            Ok(Err(RecoverError::Grace { remaining_ms, kept_by })) => {
                // With part of the group switched over, the operator already knows the hosts that are waited for.
                if kept_by.is_empty()
                    && let Ok(now) = group_status(registry, group).await
                    && let Some(host) = now.hosts.iter().find(|host| has_spoken_since(host, began))
                {
                    return Ok(Reply::Error { reason: lives(group, host) });
                }
                // Fails when the command line is gone: the recovery ends then.
                reply(writer, &Reply::Waiting { remaining_ms, kept_by }).await?;
                sleep(COUNTDOWN.min(Duration::from_millis(remaining_ms))).await;
                continue;
            }
            // The journal may be making room by itself, by shortening the window.
            Ok(Err(error @ RecoverError::NoRoom(_))) => {
                reply(writer, &Reply::NoRoom { reason: error.to_string() }).await?;
                sleep(COUNTDOWN).await;
                continue;
            }
            // A disk that did not read for a while has damaged nothing.
            Ok(Err(RecoverError::Damaged(_))) if !has_looked_again => {
                has_looked_again = true;
                damaged(registry, group, DamagedAsk::Check).await;
                continue;
            }
            Ok(Err(error)) => return Ok(Reply::Error { reason: error.to_string() }),
            Err(reason) => return Ok(Reply::Error { reason }),
        };
        return Ok(match exports.offer(group).await {
            Ok(Some(disks)) => Reply::Recovered { recovery, disks },
            Ok(None) => Reply::Error { reason: "its disks cannot be read; see the log".into() },
            Err(error) => Reply::Error { reason: format!("cannot offer its disks: {error}") },
        });
    }
}

/// Connected, and heard within the grace: a connection may outlive its host by minutes.
fn is_alive(group: &GroupStatus, host: &HostStatus) -> bool {
    host.is_connected && host.heard_ago_ms.is_some() && group.grace_remaining_ms > 0
}

/// Messages that a host had sent before the disaster arrive within this time; later ones show that it lives.
const ON_ITS_WAY_MAX: Duration = Duration::from_secs(3);

fn has_spoken_since(host: &HostStatus, began: Instant) -> bool {
    let heard_ago = host.heard_ago_ms.map(Duration::from_millis);
    let waited = began.elapsed();
    heard_ago.is_some_and(|ago| host.is_connected && ago + ON_ITS_WAY_MAX < waited)
}

fn lives(group: &str, host: &HostStatus) -> String {
    let HostStatus { host, heard_ago_ms, .. } = host;
    let ago = heard_ago_ms.unwrap_or(0) as f64 / 1e3;
    format!(
        "the primary lives: {host} was heard {ago:.1} s ago, after this recovery was asked for. Nothing was changed. To \
         move the group here with nothing lost, run `tidelock switchover {group}` on {host}. If {host} must not go on, \
         stop it or cut it off, and ask again"
    )
}

/// Tells an operator the outcome of a recovery, or its refusal, and changes nothing.
async fn rehearse(
    registry: &Registry,
    now: GroupStatus,
    point: Option<Point>,
    how: &RecoverHow,
) -> Reply {
    if now.recovered.is_none() && point.is_none() && !now.recoverable && !how.accept_damage {
        let group = &now.group;
        return Reply::Error {
            reason: format!("group {group} cannot be recovered: `tidelock-backup status` says why"),
        };
    }
    let last_write_unix_ms = match point {
        Some(point) => Some(point.arrived_ms),
        None => {
            let asked = ask(registry, &now.group, |done| Event::History { done }).await;
            let history = asked.and_then(|answer| answer);
            history.ok().and_then(|history| history.newest().ok()).map(|point| point.arrived_ms)
        }
    };
    Reply::WouldRecover { group: now, last_write_unix_ms }
}

/// Refuses a recovery to a point before a pinned one: the recovery would lose the pinned point for good.
async fn check_later_pins(registry: &Registry, group: &str, point: &Point) -> Result<(), String> {
    let all_the_same = "or give --drop-later-pins to recover all the same";
    let marks = ask(registry, group, |done| Event::Marks { done }).await?;
    let marks = marks.map_err(|reason| {
        format!("it is not known whether pins are of later points, which would be lost ({reason}): mend that, {all_the_same}")
    })?;
    let later = marks.iter().filter(|of| of.mark.kind == Kind::Pin && !of.lost);
    let later = later.filter(|of| !point.cut.covers(&of.mark.point.cut));
    let names: Vec<&str> = later.map(|of| of.name.as_str()).collect();
    let Some(first) = names.first() else { return Ok(()) };
    Err(format!(
        "pins of later points would be lost for good: {}. Keep what they show (`tidelock-backup snapshot {group} {first} \
         --at bookmark:{first}`) and take them out (`tidelock-backup pin {group} {first} --remove`), {all_the_same}",
        names.join(", ")
    ))
}
