//! The socket of the command line: serves [`Request`]s ([`messages`]).

mod messages;

pub use messages::{Reply, Request};

use super::content;
use super::exports::Exports;
use super::inbox::{DamagedAsk, Event, Inbox};
use super::machines::Machines;
use super::orders::order;
use super::owner::OwnerHandle;
use super::recovering::{RecoverHow, recover, recover_store};
use super::registry::Registry;
use super::snapshots::{self, Snapshots};
use super::travel::{self, WantedMark};
use super::views::{Views, Wanted};
use std::io;
use std::sync::Arc;
use std::time::Duration;
use tidelock_replica::group::GroupStatus;
use tidelock_replica::group_loop::{Answer, Order};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::unix::OwnedWriteHalf;
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::oneshot;
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};

/// The longest request.
const REQUEST_MAX_BYTES: u64 = 1 << 20;
/// The pause before a fold that runs is looked at again.
const FOLD_WAIT: Duration = Duration::from_millis(200);
/// Whoever wants the console of a machine from its first line on is connected to it by then.
const CONSOLES_WITHIN: Duration = Duration::from_secs(10);
/// Time between two words on a recovery that goes on.
const PROGRESS_EACH: Duration = Duration::from_secs(1);
/// So often a fold is waited for.
const FOLD_WAITS: usize = 300;
/// A group's owner that does not answer for so long is stuck in its disk.
const ANSWER_MAX: Duration = Duration::from_secs(10);

/// Serves the socket.
pub async fn run(
    listener: UnixListener,
    registry: Arc<Registry>,
    exports: Arc<Exports>,
    views: Arc<Views>,
    snapshots: Arc<Snapshots>,
    machines: Arc<Machines>,
) {
    loop {
        let Ok((stream, _)) = listener.accept().await else {
            sleep(Duration::from_millis(100)).await;
            continue;
        };
        let (registry, exports) = (Arc::clone(&registry), Arc::clone(&exports));
        let (views, snapshots) = (Arc::clone(&views), Arc::clone(&snapshots));
        let machines = Arc::clone(&machines);
        tokio::spawn(async move {
            // The command line is gone: nobody to tell.
            let _ = serve(stream, &registry, &exports, &views, &snapshots, &machines).await;
        });
    }
}

async fn serve(
    stream: UnixStream,
    registry: &Arc<Registry>,
    exports: &Exports,
    views: &Arc<Views>,
    snapshots: &Arc<Snapshots>,
    machines: &Arc<Machines>,
) -> io::Result<()> {
    let (reader, mut writer) = stream.into_split();
    let mut line = String::new();
    let mut reader = BufReader::new(reader.take(REQUEST_MAX_BYTES));
    reader.read_line(&mut line).await?;
    let request = match serde_json::from_str(&line) {
        Ok(request) => request,
        Err(error) => {
            return reply(&mut writer, &Reply::Error { reason: error.to_string() }).await;
        }
    };
    let answer = match request {
        Request::Status => status(registry).await,
        Request::Recover {
            group,
            primary_is_dead,
            although_connected,
            dry_run,
            at,
            accept_damage,
            drop_later_pins,
        } => {
            let how = RecoverHow {
                primary_is_dead,
                although_connected,
                dry_run,
                accept_damage,
                drop_later_pins,
            };
            if registry.stores().has(&group) {
                let mut recovered = std::pin::pin!(recover_store(registry, &group, &how, at));
                loop {
                    let told = tokio::select! {
                        told = &mut recovered => return reply(&mut writer, &told).await,
                        () = sleep(PROGRESS_EACH) => registry.stores().status(&group).await,
                    };
                    if let Ok(Some(store)) = told {
                        // The recovery goes on if nobody listens any more.
                        let _ = reply(&mut writer, &Reply::Promoting { store }).await;
                    }
                }
            }
            recover(registry, exports, &group, how, at, &mut reader, &mut writer).await?
        }
        Request::Damaged { group, check, forget } => {
            let ask = match (forget, check) {
                (Some(segment), _) => DamagedAsk::Forget(segment),
                (None, true) => DamagedAsk::Check,
                (None, false) => DamagedAsk::Tell,
            };
            damaged(registry, &group, ask).await
        }
        Request::Repair { group, apply } => {
            match ask(registry, &group, |done| Event::Repair { apply, done }).await {
                Ok(Ok(repair)) => Reply::Repaired { repair },
                Ok(Err(reason)) | Err(reason) => Reply::Error { reason },
            }
        }
        Request::Adopt { group } => adopt(registry, &group).await,
        Request::MoveMember { group, member, to } => {
            let moved = Order::Move { member, to };
            match order(registry, &group, moved, &mut reader, &mut writer).await? {
                Ok(Answer::Moved(Ok(moved))) => Reply::Moved { moved },
                Ok(Answer::Moved(Err(error))) => Reply::Error { reason: error.to_string() },
                Ok(_) => unreachable!("a move was ordered"),
                Err(reason) => Reply::Error { reason },
            }
        }
        Request::Remove { group, member } => {
            let removal = Order::Remove { member };
            match order(registry, &group, removal, &mut reader, &mut writer).await? {
                Ok(Answer::Removed(Ok(()))) => Reply::Removed,
                Ok(Answer::Removed(Err(error))) => Reply::Error { reason: error.to_string() },
                Ok(_) => unreachable!("a removal was ordered"),
                Err(reason) => Reply::Error { reason },
            }
        }
        Request::RemoveGroup { group, apply } => {
            let removed = remove_group(registry, views, snapshots, &group, apply).await;
            removed.unwrap_or_else(|reason| Reply::Error { reason })
        }
        Request::Describe { group } => match machines.described(&group).await {
            Ok(machines) => Reply::Described { machines },
            Err(reason) => Reply::Error { reason },
        },
        Request::Approve { group, member, machine } => {
            let approval = Order::Approve { member, machine };
            match order(registry, &group, approval, &mut reader, &mut writer).await? {
                Ok(Answer::Approved(Ok(()))) => Reply::Approved,
                Ok(Answer::Approved(Err(error))) => Reply::Error { reason: error.to_string() },
                Ok(_) => unreachable!("an approval was ordered"),
                Err(reason) => Reply::Error { reason },
            }
        }
        Request::Boot { group, ask, rehearse: true } => match machines.rehearse(&group, &ask).await
        {
            Ok(booted) => Reply::Booted { booted },
            Err(reason) => Reply::Error { reason },
        },
        Request::Boot { group, ask, rehearse: false } => match machines.boot(&group, &ask).await {
            Ok(booted) => {
                let started = booted.machines.clone();
                // Whatever becomes of the command line: machines that were started are to run.
                if reply(&mut writer, &Reply::Booted { booted }).await.is_ok() {
                    let _ = timeout(CONSOLES_WITHIN, reader.read_line(&mut line)).await;
                }
                match machines.resume(&started).await {
                    Ok(()) => Reply::Resumed,
                    Err(reason) => Reply::Error { reason },
                }
            }
            Err(reason) => Reply::Error { reason },
        },
        Request::Machines => Reply::Machines { machines: machines.running(None) },
        Request::StopMachines { group, member, now, within_ms } => {
            let within = Duration::from_millis(within_ms);
            match machines.stop(&group, member.as_deref(), now, within).await {
                Ok(machines) => Reply::Machines { machines },
                Err(reason) => Reply::Error { reason },
            }
        }
        Request::View { group, at, wanted, detach } if registry.stores().has(&group) => {
            let opened = match wanted {
                Wanted { write: true, .. } => Err("a view of a store is read-only".to_owned()),
                Wanted { name, .. } => {
                    registry.stores().open_view(&group, &at, name.as_deref()).await
                }
            };
            match opened {
                Ok(view) if detach => Reply::StoreView { view },
                Ok(view) => {
                    let name = view.name.clone();
                    let told = reply(&mut writer, &Reply::StoreView { view }).await;
                    // Until the other side closes.
                    let _ = reader.read_line(&mut line).await;
                    registry.stores().views().close(&name).await;
                    return told;
                }
                Err(reason) => Reply::Error { reason },
            }
        }
        Request::View { group, at, wanted, detach } => {
            match travel::open_view(registry, views, &group, at, wanted).await {
                Ok((view, attended)) if detach => match views.detach(attended) {
                    Some(view) => Reply::View { view },
                    None => Reply::Error { reason: format!("view {} was closed", view.name) },
                },
                Ok((view, _attended)) => {
                    reply(&mut writer, &Reply::View { view }).await?;
                    // Until the other side closes.
                    let _ = reader.read_line(&mut line).await;
                    return Ok(());
                }
                Err(reason) => Reply::Error { reason },
            }
        }
        Request::Views => {
            Reply::Views { views: views.all(), of_stores: registry.stores().views().all() }
        }
        Request::CloseView { name } if registry.stores().views().close(&name).await => {
            Reply::Closed
        }
        Request::CloseView { name } => match views.close(&name) {
            Ok(()) => Reply::Closed,
            Err(reason) => Reply::Error { reason },
        },
        Request::RollView { name, to, discard_writes } => {
            travel::roll_view(registry, views, name, to, discard_writes).await
        }
        Request::Snapshot { ask } => {
            snapshots::serve(snapshots, ask, &mut reader, &mut writer).await?
        }
        Request::Resolve { group, at } => travel::resolve(registry, &group, at).await,
        Request::Timeline { group, from, to, buckets } => {
            travel::timeline(registry, &group, from, to, buckets).await
        }
        Request::Records { group, from, to, max } => {
            travel::records(registry, &group, (from, to), max).await
        }
        Request::Diff { group, from, to, disk, ranges } => {
            travel::diff(registry, &group, (from, to), disk, ranges).await
        }
        Request::Increment { group, from, to, disk } => {
            let wanted = content::Wanted { disk, at: to, from: Some(from), offset: 0 };
            match content::send(registry, group, wanted, &mut writer).await? {
                Some(answer) => answer,
                None => return Ok(()),
            }
        }
        Request::Content { group, at, disk, offset } => {
            let wanted = content::Wanted { disk, at, from: None, offset };
            match content::send(registry, group, wanted, &mut writer).await? {
                Some(answer) => answer,
                None => return Ok(()),
            }
        }
        Request::Digest { group, at, disk } => content::digest(registry, &group, disk, at).await,
        Request::Marks { group } => travel::marks(registry, &group).await,
        Request::Mark { group, name, kind, at, expires_in_ms, moves } => {
            let mark = WantedMark { name, kind, at, expires_in_ms, moves, asked_by: None };
            let set = travel::mark(registry, &group, mark).await;
            set.map_or_else(|reason| Reply::Error { reason }, |mark| Reply::Marked { mark })
        }
        Request::Unmark { group, name, kind } => travel::unmark(registry, &group, name, kind).await,
    };
    reply(&mut writer, &answer).await
}

pub(super) async fn reply(writer: &mut OwnedWriteHalf, reply: &Reply) -> io::Result<()> {
    let mut line = serde_json::to_vec(reply)?;
    line.push(b'\n');
    writer.write_all(&line).await
}

pub(super) async fn ask<T>(
    registry: &Registry,
    group: &str,
    event: impl FnOnce(oneshot::Sender<T>) -> Event,
) -> Result<T, String> {
    let owner = find(registry, group)?;
    ask_owner(&owner.inbox, event).await.ok_or_else(|| format!("group {group} is being closed"))
}

pub(super) fn find(registry: &Registry, group: &str) -> Result<OwnerHandle, String> {
    registry.get(group).ok_or_else(|| {
        let known: Vec<_> = registry.all().iter().map(|o| o.group.to_string()).collect();
        let known = if known.is_empty() { "none".to_owned() } else { known.join(", ") };
        format!("there is no group {group} here; the groups are: {known}")
    })
}

async fn ask_owner<T>(inbox: &Inbox, event: impl FnOnce(oneshot::Sender<T>) -> Event) -> Option<T> {
    let (done, answer) = oneshot::channel();
    inbox.push(event(done)).then_some(())?;
    answer.await.ok()
}

/// The status of all groups: those that do not answer in time are told as broken.
pub async fn statuses(registry: &Registry) -> Vec<GroupStatus> {
    let mut asked = JoinSet::new();
    for (nth, owner) in registry.all().into_iter().enumerate() {
        asked.spawn(async move {
            let asked = ask_owner(&owner.inbox, |done| Event::Status { done });
            let status = match timeout(ANSWER_MAX, asked).await {
                Ok(answer) => answer.flatten(),
                Err(_) => {
                    let reason =
                        "no answer: its disk does not respond, or the journal is being read";
                    Some(GroupStatus::of_broken(&owner.group, reason))
                }
            };
            (nth, status)
        });
    }
    let mut groups = asked.join_all().await;
    groups.sort_by_key(|(nth, _)| *nth);
    groups.into_iter().filter_map(|(_, status)| status).collect()
}

async fn status(registry: &Registry) -> Reply {
    let (mut stores, mut broken_stores) = (Vec::new(), Vec::new());
    for status in registry.stores().statuses().await {
        match status {
            Ok(status) => stores.push(status),
            Err(reason) => broken_stores.push(reason),
        }
    }
    let (server, groups) = (registry.config().name.clone(), statuses(registry).await);
    Reply::Status { server, groups, stores, broken_stores }
}

/// A fold that runs is waited for.
pub(super) async fn damaged(registry: &Registry, group: &str, how: DamagedAsk) -> Reply {
    for _ in 0..FOLD_WAITS {
        let asked = ask(registry, group, |done| Event::Damaged { ask: how, done }).await;
        match asked.and_then(|answer| answer) {
            Ok(Some((segments, latest))) => return Reply::Damaged { segments, latest },
            Ok(None) => sleep(FOLD_WAIT).await,
            Err(reason) => return Reply::Error { reason },
        }
    }
    Reply::Error { reason: "a fold has been running all the time: ask again later".into() }
}

async fn adopt(registry: &Registry, group: &str) -> Reply {
    let error = |reason| Reply::Error { reason };
    if let Err(reason) = registry.adopt(group) {
        return error(reason.to_string());
    }
    match ask(registry, group, |done| Event::Status { done }).await {
        Ok(Some(status)) => status.broken.map_or(Reply::Adopted, error),
        Ok(None) => error(format!("there is no group {group}")),
        Err(reason) => error(reason),
    }
}

/// Removes a group that nothing uses, with all that is here of it.
async fn remove_group(
    registry: &Arc<Registry>,
    views: &Views,
    snapshots: &Snapshots,
    group: &str,
    apply: bool,
) -> Result<Reply, String> {
    let status = ask(registry, group, |done| Event::Status { done }).await?;
    let status = status.ok_or_else(|| format!("there is no group {group}"))?;
    if let Some(reason) = used_by(&status) {
        return Err(format!("group {group} is in use: {reason}"));
    }
    if let Some(view) = views.all().iter().find(|view| view.group == group) {
        let name = &view.name;
        return Err(format!("group {group} is in use: view {name} is open, close it first"));
    }
    if let Some(kept) = snapshots.told(Some(group)).first() {
        let name = &kept.name;
        return Err(format!("group {group} has snapshot {name}: remove its snapshots first"));
    }
    if apply {
        let (registry, name) = (Arc::clone(registry), group.to_owned());
        let removed = tokio::task::spawn_blocking(move || registry.remove(&name)).await;
        removed.map_err(|e| e.to_string())?.map_err(|e| format!("group {group}: {e}"))?;
        tracing::warn!(group, "removed by the operator, with its journal and images");
    }
    Ok(Reply::GroupRemoved { status: Box::new(status), is_done: apply })
}

/// Why a group cannot be removed.
fn used_by(status: &GroupStatus) -> Option<String> {
    let writers = status.writers.iter().filter(|w| w.connected_since_unix_ms.is_some());
    let followers = status.followers.iter().filter(|f| f.connected_since_unix_ms.is_some());
    let writers = writers.map(|w| (&w.member, w.host.as_deref().unwrap_or("a host")));
    let mut connected = writers.chain(followers.map(|f| (&f.member, &*f.host)));
    if let Some((member, host)) = connected.next() {
        return Some(format!("member {member} is attached by {host}, stop the daemon there first"));
    }
    if status.recovered.is_some() {
        let reason = "it was recovered here and its disks are served. Stop the VMs and the backup server, and \
                      remove its directory";
        return Some(reason.to_owned());
    }
    let remaining_ms = status.grace_remaining_ms;
    (remaining_ms > 0).then(|| {
        format!("the lease of a host may hold for another {remaining_ms} ms, ask again after that")
    })
}

/// The status of a group that works.
pub(super) async fn group_status(registry: &Registry, group: &str) -> Result<GroupStatus, String> {
    let status = ask(registry, group, |done| Event::Status { done }).await?;
    let status = status.ok_or_else(|| format!("there is no group {group}"))?;
    match status.broken.clone() {
        Some(reason) => Err(format!("group {group} cannot be opened: {reason}")),
        None => Ok(status),
    }
}
