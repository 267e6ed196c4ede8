//! `tidelock bookmark`: names the group's state at the backup that has all that was written before the command.

use super::human;
use crate::control::{BookmarkState, BookmarkWish, Client};
use anyhow::bail;
use serde_json::json;
use std::io::{IsTerminal, Write};
use std::path::Path;
use std::thread::sleep;
use std::time::{Duration, Instant};

const LOOK_EVERY: Duration = Duration::from_millis(50);
/// So long nothing is said: mostly it takes one round trip.
const QUIET: Duration = Duration::from_secs(2);

/// Sets one, and waits for it. Returns what to print.
pub fn run(
    socket: &Path,
    group: &str,
    wish: BookmarkWish,
    timeout: Option<Duration>,
    json: bool,
) -> anyhow::Result<String> {
    let name = wish.name.clone();
    let mut client = Client::connect(socket)?;
    let id = client.bookmark(group, wish)?;
    let began = Instant::now();
    let mut said = None;
    let set = loop {
        let why = match client.bookmarked(group, id)? {
            BookmarkState::Waiting { why } => why,
            set @ BookmarkState::Set { .. } => break set,
        };
        if timeout.is_some_and(|timeout| began.elapsed() >= timeout) {
            progress_ends();
            bail!(
                "{name} is not set in {}: {why}. It may still be set by what has been sent: \
                 `tidelock-backup bookmark {group} --list` shows it",
                human::duration(timeout.unwrap_or_default())
            );
        }
        if began.elapsed() >= QUIET && said.as_ref() != Some(&why) {
            progress(&why);
            said = Some(why);
        }
        sleep(LOOK_EVERY);
    };
    progress_ends();
    match json {
        true => Ok(json!({ "group": group, "name": name, "bookmark": set }).to_string() + "\n"),
        false => Ok(words(&name, &set)),
    }
}

fn words(name: &str, set: &BookmarkState) -> String {
    let BookmarkState::Set { unix_ms, hlc, seqs, without } = set else { unreachable!("it is set") };
    let seqs: Vec<_> = seqs.iter().map(|(writer, seq)| format!("{writer}={seq}")).collect();
    let mut text =
        format!("bookmark {name}  {}  hlc:{hlc}  {}\n", human::utc(*unix_ms), seqs.join(","));
    if !without.is_empty() {
        text += &format!(
            "The hosts of {} are not connected to the backup: what they have written meanwhile is not in it.\n",
            without.join(", ")
        );
    }
    text
}

/// On one line of a terminal; on a line of its own in a log.
fn progress(why: &str) {
    let mut err = std::io::stderr();
    let end = if err.is_terminal() { "\x1b[K" } else { "\n" };
    let begin = if err.is_terminal() { "\r" } else { "" };
    // Progress that cannot be shown is no reason to fail.
    let _ = write!(err, "{begin}waiting: {why}{end}");
}

fn progress_ends() {
    let mut err = std::io::stderr();
    if err.is_terminal() {
        let _ = write!(err, "\r\x1b[K");
    }
}
