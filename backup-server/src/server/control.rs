//! The socket of the command line: one JSON object a line, one request for each connection.
//!
//! | request | replies |
//! |---|---|
//! | `{"do": "status"}` | `{"is": "status", "server": ..., "groups": [...]}` |
//! | `{"do": "recover", "group": G, "primary_is_dead": false}` | `{"is": "waiting", "remaining_ms": n}` ..., then `{"is": "recovered", ...}` |
//! | `{"do": "machine", "group": G, "member": M}` | `{"is": "machine", "machine": ...}` |
//! | `{"do": "remove", "group": G, "member": M}` | `{"is": "removed"}` |
//! | `{"do": "view", "group": G}` | `{"is": "view", "cut": ..., "disks": [...]}`; the view goes when the connection is closed |
//!
//! Any of them may be answered by `{"is": "error", "reason": ...}`.

use super::exports::{ExportedDisk, Exports};
use super::inbox::{Event, Inbox};
use super::registry::Registry;
use crate::group::{GroupStatus, RecoverError, Recovery};
use serde::{Deserialize, Serialize};
use std::io;
use std::sync::Arc;
use std::time::Duration;
use tidelock_protocol::message::Machine;
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::unix::OwnedWriteHalf;
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::oneshot;
use tokio::time::{sleep, timeout};

/// The longest request.
const REQUEST_MAX_BYTES: u64 = 4096;
/// How often a waiting recovery says how long it still waits.
const COUNTDOWN: Duration = Duration::from_millis(200);
/// A group's owner that does not answer for so long is stuck in its disk.
const ANSWER_MAX: Duration = Duration::from_secs(10);

/// What is asked for.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(tag = "do", rename_all = "lowercase", deny_unknown_fields)]
pub enum Request {
    /// All groups.
    Status,
    /// Recover a group.
    Recover {
        /// Which.
        group: String,
        /// Do not wait for the grace.
        primary_is_dead: bool,
    },
    /// What to boot.
    Machine {
        /// In which group.
        group: String,
        /// Which member.
        member: String,
    },
    /// Remove a member from a group.
    Remove {
        /// From which.
        group: String,
        /// Which.
        member: String,
    },
    /// A read-only view at the cut.
    View {
        /// Of which group.
        group: String,
    },
}

/// An answer.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(tag = "is", rename_all = "lowercase")]
pub enum Reply {
    /// All groups.
    Status {
        /// The server's name.
        server: String,
        /// The groups.
        groups: Vec<GroupStatus>,
    },
    /// The recovery waits for the grace.
    Waiting {
        /// For so long.
        remaining_ms: u64,
    },
    /// The group is recovered.
    Recovered {
        /// What was recovered.
        recovery: Recovery,
        /// Its disks.
        disks: Vec<ExportedDisk>,
    },
    /// The member is removed.
    Removed,
    /// What to boot, if the host sent it.
    Machine {
        /// The description.
        machine: Option<Machine>,
    },
    /// A view.
    View {
        /// At this cut.
        cut: String,
        /// Its disks.
        disks: Vec<ExportedDisk>,
    },
    /// It cannot be done.
    Error {
        /// Why, and what to do.
        reason: String,
    },
}

/// Serves the socket.
pub async fn run(listener: UnixListener, registry: Arc<Registry>, exports: Arc<Exports>) {
    loop {
        let Ok((stream, _)) = listener.accept().await else {
            sleep(Duration::from_millis(100)).await;
            continue;
        };
        let (registry, exports) = (Arc::clone(&registry), Arc::clone(&exports));
        tokio::spawn(async move {
            // The command line is gone: nobody to tell.
            let _ = serve(stream, &registry, &exports).await;
        });
    }
}

async fn serve(stream: UnixStream, registry: &Registry, exports: &Exports) -> io::Result<()> {
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
        Request::Recover { group, primary_is_dead } => {
            recover(registry, exports, &group, primary_is_dead, &mut writer).await?
        }
        Request::Remove { group, member } => remove(registry, &group, member).await,
        Request::Machine { group, member } => {
            match ask(registry, &group, |done| Event::Machine { member, done }).await {
                Ok(Ok(machine)) => Reply::Machine { machine },
                Ok(Err(reason)) | Err(reason) => Reply::Error { reason },
            }
        }
        Request::View { group } => {
            let offered = match ask(registry, &group, |done| Event::Pin { done }).await {
                Ok(Ok(pin)) => {
                    let cut = pin.cut.to_string();
                    exports.offer_pin(pin).map(|o| (cut, o)).map_err(|e| e.to_string())
                }
                Ok(Err(error)) => Err(error.to_string()),
                Err(reason) => Err(reason),
            };
            match offered {
                Ok((cut, offer)) => {
                    reply(&mut writer, &Reply::View { cut, disks: offer.disks.clone() }).await?;
                    // Until the other side closes.
                    let _ = reader.read_line(&mut line).await;
                    return Ok(());
                }
                Err(reason) => Reply::Error { reason },
            }
        }
    };
    reply(&mut writer, &answer).await
}

async fn reply(writer: &mut OwnedWriteHalf, reply: &Reply) -> io::Result<()> {
    let mut line = serde_json::to_vec(reply)?;
    line.push(b'\n');
    writer.write_all(&line).await
}

async fn ask<T>(
    registry: &Registry,
    group: &str,
    event: impl FnOnce(oneshot::Sender<T>) -> Event,
) -> Result<T, String> {
    let Some(owner) = registry.get(group) else {
        let known: Vec<_> = registry.all().iter().map(|o| o.group.to_string()).collect();
        let known = if known.is_empty() { "none".to_owned() } else { known.join(", ") };
        return Err(format!("there is no group {group} here; the groups are: {known}"));
    };
    ask_owner(&owner.inbox, event).await.ok_or_else(|| format!("group {group} is being closed"))
}

async fn ask_owner<T>(inbox: &Inbox, event: impl FnOnce(oneshot::Sender<T>) -> Event) -> Option<T> {
    let (done, answer) = oneshot::channel();
    inbox.push(event(done)).then_some(())?;
    answer.await.ok()
}

/// The status of all groups that answer in time.
pub async fn statuses(registry: &Registry) -> Vec<GroupStatus> {
    let mut groups = Vec::new();
    for owner in registry.all() {
        let asked = ask_owner(&owner.inbox, |done| Event::Status { done });
        match timeout(ANSWER_MAX, asked).await {
            Ok(Some(Some(status))) => groups.push(status),
            Ok(_) => {}
            Err(_) => {
                let reason = "no answer: its disk does not respond, or the journal is being read";
                groups.push(GroupStatus::of_broken(&owner.group, reason));
            }
        }
    }
    groups
}

async fn status(registry: &Registry) -> Reply {
    Reply::Status { server: registry.config().name.clone(), groups: statuses(registry).await }
}

async fn remove(registry: &Registry, group: &str, member: String) -> Reply {
    match ask(registry, group, |done| Event::Remove { member, done }).await {
        Ok(Ok(())) => Reply::Removed,
        Ok(Err(error)) => Reply::Error { reason: error.to_string() },
        Err(reason) => Reply::Error { reason },
    }
}

async fn recover(
    registry: &Registry,
    exports: &Exports,
    group: &str,
    primary_is_dead: bool,
    writer: &mut OwnedWriteHalf,
) -> io::Result<Reply> {
    loop {
        let event = |done| Event::Recover { primary_declared_dead: primary_is_dead, done };
        let recovery = match ask(registry, group, event).await {
            Ok(Ok(recovery)) => recovery,
            Ok(Err(RecoverError::Grace { remaining_ms })) => {
                // Fails when the command line is gone: then nobody wants it any more.
                reply(writer, &Reply::Waiting { remaining_ms }).await?;
                sleep(COUNTDOWN.min(Duration::from_millis(remaining_ms))).await;
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
