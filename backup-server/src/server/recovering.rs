//! `recover`: the checks before the fence, the order to the group, which waits for leases that may hold, the offer of
//! its disks.

use super::clock;
use super::control::{Reply, ask, damaged, group_status};
use super::exports::Exports;
use super::inbox::{DamagedAsk, Event};
use super::orders::{self, order};
use super::registry::Registry;
use super::travel;
use std::io;
use tidelock_replica::group::{GroupStatus, HostStatus, RecoverError};
use tidelock_replica::group_loop::{Answer, Order};
use tidelock_replica::history::Point;
use tidelock_replica::travel::when::When;
use tidelock_shard_logs::Recovery;
use tidelock_store::journal::MarkKind;
use tokio::io::AsyncBufRead;
use tokio::net::unix::OwnedWriteHalf;

/// An operator's answers.
pub(super) struct RecoverHow {
    pub(super) primary_is_dead: bool,
    pub(super) although_connected: bool,
    pub(super) dry_run: bool,
    pub(super) accept_damage: bool,
    pub(super) drop_later_pins: bool,
}

/// Closes all logs of a store. Its clients waited for nothing that crosses the link, so there is no lease to wait for.
pub(super) async fn recover_store(
    registry: &Registry,
    store: &str,
    how: &RecoverHow,
    at: Option<When>,
) -> Reply {
    let reason = |reason: &str| Reply::Error { reason: reason.to_owned() };
    let now = match registry.stores().status(store).await {
        Ok(Some(now)) => now,
        Ok(None) => return reason("no host has shipped anything of this store yet"),
        Err(reason) => return Reply::Error { reason },
    };
    if how.dry_run {
        return Reply::RecoveredStore { store: now };
    }
    let hosts: Vec<_> = now.shards.iter().filter_map(|shard| shard.host.clone()).collect();
    if now.recovered.is_none() && !hosts.is_empty() && !how.primary_is_dead {
        return Reply::Error {
            reason: format!(
                "{} still ship the log of {store}. What they acknowledge from now on would be lost: stop the store there, or give \
                 --primary-is-dead",
                hosts.join(", ")
            ),
        };
    }
    let recovery =
        Recovery { at_unix_ms: clock::now().unix_ms, primary_declared_dead: how.primary_is_dead };
    match registry.stores().recover(store, recovery, at.as_ref()).await {
        Ok(store) => Reply::RecoveredStore { store },
        Err(reason) => Reply::Error { reason },
    }
}

pub(super) async fn recover(
    registry: &Registry,
    exports: &Exports,
    group: &str,
    how: RecoverHow,
    at: Option<When>,
    reader: &mut (impl AsyncBufRead + Unpin),
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
    let mut has_looked_again = false;
    loop {
        let recover = Order::Recover {
            primary_declared_dead: how.primary_is_dead,
            point: kept.as_ref().map(|(point, _hold)| point.clone()),
            accepts_damage: how.accept_damage,
        };
        let recovery = match order(registry, group, recover, reader, writer).await? {
            Ok(Answer::Recovered(Ok(recovery))) => recovery,
            // A disk that did not read for a while has damaged nothing.
            Ok(Answer::Recovered(Err(RecoverError::Damaged(_)))) if !has_looked_again => {
                has_looked_again = true;
                damaged(registry, group, DamagedAsk::Check).await;
                continue;
            }
            Ok(Answer::Recovered(Err(error))) => {
                return Ok(Reply::Error { reason: error.to_string() });
            }
            Ok(_) => unreachable!("a recovery was ordered"),
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
            let history = orders::history(registry, &now.group).await;
            history.ok().and_then(|history| history.newest().ok()).map(|point| point.arrived_ms)
        }
    };
    Reply::WouldRecover { group: now, last_write_unix_ms }
}

/// Refuses a recovery to a point before a pinned one: the recovery would lose the pinned point for good.
async fn check_later_pins(registry: &Registry, group: &str, point: &Point) -> Result<(), String> {
    let all_the_same = "or give --drop-later-pins to recover all the same";
    let marks = ask(registry, group, |done| Event::Marks { done }).await??;
    let later = marks.iter().filter(|of| of.mark.kind == MarkKind::Pin && !of.lost);
    let later = later.filter(|of| !point.cut.covers(&of.mark.point.cut));
    let names: Vec<&str> = later.map(|of| of.name.as_str()).collect();
    let Some(first) = names.first() else { return Ok(()) };
    Err(format!(
        "pins of later points would be lost for good: {}. Keep what they show (`tidelock-backup snapshot {group} {first} \
         --at bookmark:{first}`) and take them out (`tidelock-backup pin {group} {first} --remove`), {all_the_same}",
        names.join(", ")
    ))
}
