//! `tidelock verify`: compares the sites while all is well, waits for it, and says what was found.

use super::human;
use crate::control::{Client, VerifyWish};
use anyhow::{Context, bail};
use serde_json::json;
use std::fmt::Write as _;
use std::io::{IsTerminal, Write};
use std::path::Path;
use std::thread::sleep;
use std::time::Duration;
use tidelock_daemon_core::status::{CopyStatus, Status, VerifyStatus, WriterStatus};
use tidelock_daemon_core::verified::Verified;

const LOOK_EVERY: Duration = Duration::from_millis(500);
/// Places that are printed; `--json` has all that are listed.
const SHOWN_MAX: usize = 10;

/// What to print, and whether the sites are equal.
pub struct Outcome {
    /// For standard output.
    pub text: String,
    /// Whether all that was looked at is equal, or was made so.
    pub is_good: bool,
}

/// Begins, and waits for the end unless told not to.
pub fn run(
    socket: &Path,
    group: &str,
    wish: VerifyWish,
    no_wait: bool,
    json: bool,
) -> anyhow::Result<Outcome> {
    let mut client = Client::connect(socket)?;
    let at_first = client.status()?;
    let (repair, stop) = (wish.repair, wish.stop);
    let members = client.verify(group, wish)?.members;
    if stop || no_wait {
        let done = if stop { "stopped" } else { "begun" };
        let text = match json {
            true => json!({ done: members }).to_string() + "\n",
            false if stop => format!("Verifications of {group} are stopped.\n"),
            false => {
                format!("Begun: {}. `tidelock status` shows how it goes.\n", members.join(", "))
            }
        };
        return Ok(Outcome { text, is_good: true });
    }
    let mut ended = Vec::new();
    for name in &members {
        let before = find(&at_first, group, name)?.verify.ended;
        // A connection for each look: one that is silent for long is closed.
        let verify = loop {
            let status = Client::connect(socket)?.status()?;
            let verify = find(&status, group, name)?.verify.clone();
            if verify.ended > before {
                break verify;
            }
            progress(name, verify.running.as_ref());
            sleep(LOOK_EVERY);
        };
        ended.push((name.as_str(), verify));
    }
    progress_ends();
    let is_good = ended.iter().all(|(_, verify)| is_good(verify));
    let text = match json {
        true => as_json(group, &ended)?,
        false => ended.iter().map(|(name, v)| words(group, name, v, repair)).collect(),
    };
    Ok(Outcome { text, is_good })
}

fn find<'a>(status: &'a Status, group: &str, member: &str) -> anyhow::Result<&'a WriterStatus> {
    let groups = status.groups.iter().filter(|g| g.name == group);
    let mut members = groups.flat_map(|g| &g.members).filter(|m| m.name == member);
    let writer = members.next().and_then(|member| member.writer.as_ref());
    writer
        .with_context(|| format!("the daemon no longer has {member} in {group}: was it restarted?"))
}

fn is_good(verify: &VerifyStatus) -> bool {
    verify.given_up.is_none() && verify.last.as_ref().is_some_and(Verified::is_good)
}

/// On one line of a terminal, over and over.
fn progress(member: &str, running: Option<&CopyStatus>) {
    let mut out = std::io::stderr();
    let Some(copy) = running.filter(|_| out.is_terminal()) else { return };
    let left = copy.left_ms.map_or("waiting".to_owned(), |ms| human::ms(ms) + " left");
    let (done, total) = (human::bytes(copy.done_bytes), human::bytes(copy.total_bytes));
    // Progress that cannot be shown is no reason to fail.
    let _ = write!(out, "\r{member}: {done} of {total}, {left}\x1b[K");
}

fn progress_ends() {
    let mut out = std::io::stderr();
    if out.is_terminal() {
        let _ = write!(out, "\r\x1b[K");
    }
}

fn as_json(group: &str, ended: &[(&str, VerifyStatus)]) -> anyhow::Result<String> {
    let each = ended.iter().map(|(name, verify)| {
        let verified = verify.last.as_ref().filter(|_| verify.given_up.is_none());
        json!({ "member": name, "is_good": is_good(verify), "given_up": verify.given_up, "verified": verified })
    });
    let all = json!({ "group": group, "members": each.collect::<Vec<_>>() });
    Ok(serde_json::to_string_pretty(&all)? + "\n")
}

/// How one has ended, for people.
fn words(group: &str, member: &str, verify: &VerifyStatus, repair: bool) -> String {
    let mut text = match (&verify.given_up, &verify.last) {
        (Some(why), _) => format!("{member}: not verified: {why}\n"),
        (None, Some(verified)) => format!("{member}: {}\n", summary(verified)),
        (None, None) => format!("{member}: not verified\n"),
    };
    let Some(verified) = verify.last.as_ref().filter(|_| verify.given_up.is_none()) else {
        return text;
    };
    for place in verified.differing.iter().take(SHOWN_MAX) {
        let (disk, offset) = (&place.disk, place.offset);
        writeln!(text, "  {disk}, offset {offset}, {} bytes", place.len_bytes)
            .expect("a String takes all");
    }
    if verified.differing.len() > SHOWN_MAX {
        text += "  and more: --json lists them\n";
    }
    if verified.differs() && !repair {
        text += "Nothing was changed. Find out why first: a disk or a memory that lies will do so again. Then\n";
        writeln!(
            text,
            "`tidelock verify {group} --repair` copies what differs from here to the backup."
        )
        .expect("a String takes all");
    }
    text
}

/// One verification in a line, as `status` shows it, too.
#[must_use]
pub fn summary(verified: &Verified) -> String {
    let compared = human::bytes(verified.compared_bytes);
    let at = format!("at write {}, {}", verified.to_seq, human::utc(verified.ended_unix_ms));
    let unreadable = match verified.unreadable_bytes {
        0 => String::new(),
        bytes => format!("; the local disk could not be read in {}", human::bytes(bytes)),
    };
    let differing = human::bytes(verified.differing_bytes);
    let found = if verified.differs() {
        format!("the sites DIFFER in {differing} of {compared}")
    } else if verified.repaired_bytes > 0 {
        format!("{differing} of {compared} differed and were copied: equal")
    } else {
        format!("equal, {compared} compared")
    };
    format!("{found}, {at}{unreadable}")
}

/// Checks what the command line cannot.
pub fn check(wish: &VerifyWish, no_wait: bool) -> anyhow::Result<()> {
    if wish.stop && (wish.repair || no_wait) {
        bail!("--stop ends what runs: it goes with no other option than --member");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use tidelock_daemon_core::verified::DifferingExtent;
    use tidelock_protocol::ids::{Epoch, Seq};

    fn verified(differing_bytes: u64, repaired_bytes: u64) -> VerifyStatus {
        let place = DifferingExtent { disk: "root".into(), offset: 8192, len_bytes: 4096 };
        let last = Verified {
            begun_unix_ms: 1_700_000_000_000,
            ended_unix_ms: 1_700_000_060_000,
            epoch: Epoch(1),
            from_seq: Seq(7),
            to_seq: Seq(9),
            compared_bytes: 1 << 30,
            differing: vec![place; usize::from(differing_bytes > 0)],
            differing_bytes,
            repaired_bytes,
            unreadable_bytes: 0,
        };
        VerifyStatus { last: Some(last), ended: 1, ..VerifyStatus::default() }
    }

    #[test]
    fn what_was_found_is_said_with_what_to_do() {
        let equal = words("shop", "db", &verified(0, 0), false);
        assert_eq!(equal, "db: equal, 1 GiB compared, at write 9, 2023-11-14T22:14:20Z\n");
        let differs = words("shop", "db", &verified(4096, 0), false);
        assert!(
            differs.contains("DIFFER in 4 KiB")
                && differs.contains("root, offset 8192, 4096 bytes")
        );
        assert!(differs.contains("tidelock verify shop --repair"), "{differs}");
        let repaired = words("shop", "db", &verified(4096, 4096), true);
        assert!(repaired.contains("4 KiB of 1 GiB differed and were copied"), "{repaired}");
        let given_up = VerifyStatus { given_up: Some("why".into()), ..verified(0, 0) };
        assert_eq!(words("shop", "db", &given_up, false), "db: not verified: why\n");
        assert!(!is_good(&given_up) && is_good(&verified(0, 0)) && !is_good(&verified(4096, 0)));
    }
}
