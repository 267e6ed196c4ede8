//! `tidelock adopt`: brings the disks of a group's running guests to this daemon, and lets the group begin.
//!
//! ```text
//!            QEMU copies, also what            nothing is left       told to the daemon
//!  prepared ─ the guests write ────▶ ready ──────────────▶ moved ──────────────────────▶ begun
//!     ▲                                │
//!     └─────── cancelled, or failed ───┘ the guests go on where they were, nothing has changed
//! ```
//!
//! Invariant: the group begins only when every guest writes through this daemon with each of its disks. What fails before leaves
//! the guests where they were, or some of them here, unprotected as before; after it, the same command goes on.

mod guests;
mod mirror;
mod prepare;
pub mod qmp;

use super::confirm::confirm;
use super::human;
use crate::config;
use crate::control::{AdoptedDisk, Client};
use anyhow::{Context, bail};
use clap::Args;
use guests::{Guests, MonitorOf};
use serde_json::json;
use std::io::{IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::sleep;
use std::time::{Duration, Instant};
use tidelock_config::Rate;

const LOOK_EVERY: Duration = Duration::from_millis(100);
/// A daemon that is away for so long does not come back by itself.
const DAEMON_AWAY_MAX: Duration = Duration::from_secs(10);

/// Which guests, and what of them is to be done.
#[derive(Clone, Debug, Args)]
pub struct Options {
    /// A guest's QMP socket: QEMU's -qmp unix:SOCKET,server=on,wait=off; of a group with several guests one for each, as
    /// MEMBER=SOCKET
    #[arg(long, value_name = "[MEMBER=]SOCKET", value_parser = MonitorOf::parse, required_unless_present_any = ["done", "prepare"])]
    pub qmp: Vec<MonitorOf>,
    /// Make the blank disks that the guests' are copied to, before the daemon is started
    #[arg(long, conflicts_with = "done")]
    pub prepare: bool,
    /// The daemon's configuration, for --prepare
    #[arg(short, long, value_name = "FILE", default_value = config::DEFAULT_PATH)]
    pub config: PathBuf,
    /// Which node of QEMU is this disk, if the name of its export does not say it
    #[arg(long = "disk", value_name = "[MEMBER.]DISK=NODE", value_parser = disk_and_node)]
    pub disks: Vec<(String, String)>,
    /// The most that is copied each second, of each disk; what the guests write comes on top
    #[arg(long, value_name = "RATE", value_parser = tidelock_config::rate_argument)]
    pub rate: Option<Rate>,
    /// The guests write to this daemon's disks already: only let the group begin. Asks first, or takes --yes
    #[arg(long, conflicts_with = "qmp")]
    pub done: bool,
    /// Do not ask
    #[arg(long)]
    pub yes: bool,
    /// Print the outcome as JSON
    #[arg(long)]
    pub json: bool,
}

fn disk_and_node(text: &str) -> Result<(String, String), String> {
    let (disk, node) = text.split_once('=').ok_or("write DISK=NODE, or MEMBER.DISK=NODE")?;
    Ok((disk.to_owned(), node.to_owned()))
}

/// Adopts a group. Returns what to print.
pub fn run(socket: &Path, group: &str, options: &Options) -> anyhow::Result<String> {
    if options.prepare {
        return prepare::run(group, options);
    }
    let disks = Client::connect(socket)?.adopt(group)?;
    if options.done {
        return begin_as_it_is(socket, group, &disks, options);
    }
    let interrupted = watch_for_interrupts()?;
    let mut guests = Guests::connect(&disks, options)?;
    let began = Instant::now();
    let copied = copy_all(&mut guests, socket, group, &interrupted);
    progress_ends();
    if let Err(why) = copied {
        let undone = guests.cancel();
        let why = why.context(format!("not adopted; {}", guests.goes_on_where_it_was()));
        return Err(match undone {
            Ok(()) => why,
            Err(error) => {
                why.context(format!("QEMU still copies ({error}): give the command again"))
            }
        });
    }
    let copied = began.elapsed();
    if let Err(why) = guests.move_all() {
        let rest = guests
            .cancel()
            .map_or_else(|error| format!(", and QEMU still copies ({error})"), |()| String::new());
        return Err(why.context(format!(
            "the group has not begun{rest}. Its guests go on, and nothing of them is lost: give the command again"
        )));
    }
    let moved = began.elapsed() - copied;
    begin(socket, group)?;
    if options.json {
        let disks: Vec<_> = disks
            .iter()
            .map(|disk| {
                json!({
                    "member": disk.member, "disk": disk.disk, "size_bytes": disk.size_bytes,
                })
            })
            .collect();
        let (copied_ms, moved_ms) = (copied.as_millis() as u64, moved.as_millis() as u64);
        let all = json!({
            "group": group, "adopted": disks, "copied_ms": copied_ms, "moved_ms": moved_ms,
        });
        return Ok(all.to_string() + "\n");
    }
    Ok(words(group, &disks, copied, moved))
}

/// The guests' disks are here by other means than ours.
fn begin_as_it_is(
    socket: &Path,
    group: &str,
    disks: &[AdoptedDisk],
    options: &Options,
) -> anyhow::Result<String> {
    let names: Vec<_> = disks.iter().map(|disk| format!("{}.{}", disk.member, disk.disk)).collect();
    if !options.yes {
        let text = format!(
            "The backup will get what is on {} now, and will be called whole. If a guest still writes elsewhere, that is \
             not what its clients know.",
            names.join(", ")
        );
        confirm(&text, "Do the guests write to these disks, all of them?", "nothing has begun")?;
    }
    begin(socket, group)?;
    match options.json {
        true => Ok(json!({ "group": group, "adopted": names }).to_string() + "\n"),
        false => Ok(words(group, disks, Duration::ZERO, Duration::ZERO)),
    }
}

fn begin(socket: &Path, group: &str) -> anyhow::Result<()> {
    let told = Client::connect(socket).and_then(|mut client| client.adopted(group));
    told.context("the guests write to this daemon's disks, but the group has not begun: give the command again")
}

fn words(group: &str, disks: &[AdoptedDisk], copied: Duration, moved: Duration) -> String {
    let is_one = disks.iter().all(|disk| disk.member == disks[0].member);
    let write = if is_one { "its guest writes" } else { "its guests write" };
    let mut text = format!("group {group} is adopted: {write} to this daemon's disks\n");
    for disk in disks {
        let size = human::bytes(disk.size_bytes);
        text += &format!("  {}.{}  {size}\n", disk.member, disk.disk);
    }
    if !copied.is_zero() {
        text += &format!("  copied  {}\n", human::duration(copied));
        text += &format!("  moved   {} ms\n", moved.as_millis());
    }
    text + "It is `unprotected` until the backup has been compared with all of it: tidelock status\n"
}

/// Copies every disk, until what is left is what the guests write.
fn copy_all(
    guests: &mut Guests,
    socket: &Path,
    group: &str,
    interrupted: &AtomicBool,
) -> anyhow::Result<()> {
    guests.begin()?;
    let mut heard_at = Instant::now();
    loop {
        if interrupted.load(Ordering::SeqCst) {
            bail!("it was ended by hand");
        }
        match Client::connect(socket).and_then(|mut client| client.adopt(group)) {
            Ok(_) => heard_at = Instant::now(),
            // It was restarted perhaps: QEMU connects again, and sends again what was not answered.
            Err(error) if heard_at.elapsed() < DAEMON_AWAY_MAX => {
                tracing::debug!(%error, "the daemon does not answer");
            }
            Err(error) => return Err(error).context("the daemon does not answer"),
        }
        let seen = guests.look()?;
        if seen.is_ready && heard_at.elapsed() < LOOK_EVERY {
            return Ok(());
        }
        progress(seen.done_bytes, seen.total_bytes);
        sleep(LOOK_EVERY);
    }
}

/// Ctrl-C and SIGTERM are to be answered by putting back what has begun.
fn watch_for_interrupts() -> anyhow::Result<Arc<AtomicBool>> {
    use tokio::signal::unix::{SignalKind, signal};
    let interrupted = Arc::<AtomicBool>::default();
    let told = interrupted.clone();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let (mut int, mut term) = {
        let _context = runtime.enter();
        (signal(SignalKind::interrupt())?, signal(SignalKind::terminate())?)
    };
    std::thread::spawn(move || {
        runtime.block_on(async {
            tokio::select! {
                _ = int.recv() => {}
                _ = term.recv() => {}
            }
        });
        told.store(true, Ordering::SeqCst);
    });
    Ok(interrupted)
}

/// On one line of a terminal, over and over.
fn progress(done_bytes: u64, total_bytes: u64) {
    let mut out = std::io::stderr();
    if out.is_terminal() {
        let (done, total) = (human::bytes(done_bytes), human::bytes(total_bytes));
        // Progress that cannot be shown is no reason to fail.
        let _ = write!(out, "\rcopied {done} of {total}; guests go on\x1b[K");
    }
}

fn progress_ends() {
    let mut out = std::io::stderr();
    if out.is_terminal() {
        let _ = write!(out, "\r\x1b[K");
    }
}
