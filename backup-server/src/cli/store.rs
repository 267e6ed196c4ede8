//! Texts about stores.

use crate::server::stores::views::StoreViewStatus;
use std::fmt::Write;
use tidelock_protocol::hlc::Hlc;
use tidelock_replica::text;
use tidelock_shard::{LogIndex, unix_ns_of};
use tidelock_shard_logs::{ShardStatus, StandbyState, StandbyStatus, StoreStatus};

/// A stamp for people, to the microsecond.
fn stamp(stamp: Hlc) -> String {
    let us = unix_ns_of(stamp) % 1_000_000 / 1000;
    format!("{} +{us} us", text::utc_ms(stamp.physical_ms()))
}

/// Milliseconds by which one stamp is behind another.
fn behind(stamp: Hlc, newest: Hlc) -> f64 {
    unix_ns_of(newest).saturating_sub(unix_ns_of(stamp)) as f64 / 1e6
}

/// The status of a store.
pub(super) fn render(store: &StoreStatus) -> String {
    let mut out = format!("store {}\n", store.store);
    let mut line = |name: &str, value: String| {
        // A string takes everything.
        let _ = writeln!(out, "  {name:<12} {value}");
    };
    match (store.recovered, store.watermark) {
        (Some(at), _) => {
            line("recovered", format!("at {}: the old primary ships nothing any more", stamp(at)));
        }
        (None, Some(at)) if at > Hlc(0) => {
            let lag = behind(at, store.updated);
            line("watermark", format!("{}, {lag:.1} ms behind the newest update", stamp(at)));
        }
        _ => line("watermark", "none yet: not every shard has shipped something".to_owned()),
    }
    let held_back = store.held_back_by.as_ref().filter(|_| store.recovered.is_none());
    if let Some(shard) = held_back.filter(|_| store.watermark.unwrap_or_default() < store.updated) {
        line("held back by", shard.clone());
    }
    for shard in &store.shards {
        line("shard", shard.name.clone());
        match (&shard.host, store.recovered) {
            (_, Some(_)) => {}
            (Some(host), None) => line("  shipped by", host.clone()),
            (None, None) => {
                line("  SHIPPED BY", "nobody: no host that leads it is connected".to_owned())
            }
        }
        if let Some(why) = &shard.stands {
            line("  STANDS", why.clone());
        }
        let timeline = shard.timeline.map_or_else(String::new, |id| format!(", timeline {id}"));
        line("  log", format!("durable to {}{timeline}", position(shard, shard.durable)));
        line("  apply to", position(shard, shard.apply_to));
        if let Some(of) = &shard.standby {
            line("  standby", standby(shard, of));
            if let Some(problem) = &of.problem {
                line("  PROBLEM", problem.clone());
            }
            for kept in &of.kept {
                let (at, from) = (text::utc(kept.at_unix_ms), position(shard, kept.usable_from));
                line("  copy kept", format!("at {at}: the past from {from} on can be seen"));
            }
        }
    }
    out
}

/// A position in a shard's log, as the shard writes it.
fn position(shard: &ShardStatus, at: LogIndex) -> String {
    match shard.timeline {
        Some(1..) => format!("{:X}/{:X}", at.0 >> 32, at.0 & 0xffff_ffff),
        _ => at.to_string(),
    }
}

/// A standby's state, and its place.
fn standby(shard: &ShardStatus, of: &StandbyStatus) -> String {
    let place = format!("-h {} -p {}", of.socket_dir.display(), of.port);
    match of.state {
        StandbyState::Waiting => {
            "none yet: it is made when a host that leads the shard is connected".to_owned()
        }
        StandbyState::Copying => {
            let (done, all) = of.copied_kib.unwrap_or_default();
            let bytes = |kib: u64| text::bytes(kib.saturating_mul(1024));
            format!("the primary is being copied: {} of about {}", bytes(done), bytes(all))
        }
        StandbyState::Recovering => "replays what its copy needs before it can be used".to_owned(),
        StandbyState::Following => {
            let replayed = position(shard, of.replayed.unwrap_or_default());
            format!("follows, replayed to {replayed}; read-only: psql {place}")
        }
        StandbyState::Stopped => "stopped".to_owned(),
        StandbyState::Promoted => format!("promoted: psql {place}"),
    }
}

/// Commits that a report names for each shard; `--json` has all.
const LEFT_OUT_LINES: usize = 5;

/// The cut of a recovery, or of a rehearsal.
pub(super) fn recovered(store: &StoreStatus) -> String {
    let at = store.recovered.or(store.watermark).unwrap_or_default();
    let mut text = match store.recovered {
        Some(_) => format!("store {} is recovered at {}\n", store.store, stamp(at)),
        None => format!(
            "rehearsal, nothing was changed: store {} would be recovered at {}\n",
            store.store,
            stamp(at)
        ),
    };
    text += &format!(
        "  the newest update that is here is {:.1} ms later: what was committed in between is not in every shard's log\n",
        behind(at, store.updated)
    );
    match store.heard_unix_ms {
        Some(ms) => {
            text += &format!(
                "  a primary host was heard last at {}, by this site's clock\n",
                text::utc_ms(ms)
            )
        }
        None => text += "  no primary host was heard since this server was started\n",
    }
    for shard in &store.shards {
        text += &format!("  {}: the log up to {}\n", shard.name, position(shard, shard.apply_to));
        let beyond = &shard.left_out;
        if shard.durable > shard.apply_to && store.recovered.is_none() {
            text += &format!(
                "    what is here beyond it, up to {}, would be left out\n",
                position(shard, shard.durable)
            );
        } else if !beyond.is_empty() {
            text += &format!("    {} commits beyond it are left out:\n", beyond.len());
        }
        for out in beyond.iter().take(LEFT_OUT_LINES) {
            let of = out.transaction.map_or_else(String::new, |xid| format!(", transaction {xid}"));
            let time = text::utc_ms(out.unix_ns / 1_000_000);
            text += &format!("      {} at {time}{of}\n", position(shard, out.at));
        }
        if beyond.len() > LEFT_OUT_LINES {
            text +=
                &format!("      and {} more (--json names all)\n", beyond.len() - LEFT_OUT_LINES);
        }
        let Some(of) = &shard.standby else { continue };
        if let Some(promoted) = of.promoted {
            text += &format!(
                "    promoted: psql -h {} -p {} (ready after {} ms, writable {} ms later, timeline {})\n",
                of.socket_dir.display(),
                of.port,
                promoted.ready_ms,
                promoted.promoted_ms,
                promoted.timeline
            );
        } else if let Some(problem) = &of.problem {
            text += &format!("    NOT PROMOTED: {problem}\n");
        }
    }
    text
}

/// A view of a store.
pub(super) fn view(view: &StoreViewStatus) -> String {
    let mut text = format!(
        "view {} of store {}\n  at         {}\n  read-only\n",
        view.name,
        view.store,
        stamp(view.stamp)
    );
    for of in &view.shards {
        text += &format!("  {:<10} psql -h {} -p {}\n", of.name, of.socket_dir.display(), of.port);
    }
    text
}

/// Progress of a recovery.
pub(super) fn promoting(store: &StoreStatus) -> String {
    let of = |shard: &ShardStatus| {
        let standby = shard.standby.as_ref().filter(|standby| standby.promoted.is_none())?;
        let (has, wants) = (standby.replayed.unwrap_or_default(), shard.apply_to);
        let replayed = format!("{} of {}", position(shard, has), position(shard, wants));
        Some(format!("{} (replayed to {replayed})", shard.name))
    };
    let waiting: Vec<_> = store.shards.iter().filter_map(of).collect();
    format!("not promoted yet: {}", waiting.join(", "))
}

/// Shards that a recovery should have promoted, and has not.
pub(super) fn not_promoted(store: &StoreStatus) -> Vec<&str> {
    let missing = |shard: &&ShardStatus| {
        store.recovered.is_some() && shard.standby.as_ref().is_some_and(|of| of.promoted.is_none())
    };
    store.shards.iter().filter(missing).map(|shard| shard.name.as_str()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use tidelock_shard::stamp_at;
    use tidelock_shard_logs::{LeftOut, Promoted};

    fn status() -> StoreStatus {
        let at = |ms: u64| stamp_at((1_800_000_000_000 + ms) * 1_000_000);
        let shard = |name: &str, durable, stamp, apply_to| ShardStatus {
            name: name.to_owned(),
            host: Some("h0".to_owned()),
            stands: None,
            timeline: Some(1),
            received: LogIndex(durable),
            durable: LogIndex(durable),
            stamp,
            apply_to: LogIndex(apply_to),
            left_out: Vec::new(),
            standby: None,
        };
        StoreStatus {
            store: "orders".to_owned(),
            shards: vec![shard("s0", 900, at(30), 700), shard("s1", 500, at(20), 500)],
            watermark: Some(at(20)),
            updated: at(30),
            held_back_by: Some("s1".to_owned()),
            recovered: None,
            heard_unix_ms: None,
            journal_bytes: 1 << 20,
        }
    }

    #[test]
    fn a_status_names_the_shard_that_holds_the_watermark_back_and_why() {
        let mut store = status();
        store.shards[1].stands = Some("the clock is not believed: 40 ms off".to_owned());
        let text = render(&store);
        assert!(text.contains("10.0 ms behind the newest update"), "{text}");
        assert!(text.contains("held back by s1") && text.contains("40 ms off"), "{text}");
        store.shards[0].host = None;
        assert!(render(&store).contains("SHIPPED BY"));
    }

    #[test]
    fn a_recovery_says_what_is_left_out() {
        let mut store = status();
        assert!(recovered(&store).starts_with("rehearsal"));
        store.recovered = store.watermark;
        let out = |at| LeftOut {
            at: LogIndex(at),
            unix_ns: 1_800_000_000_025_000_000,
            transaction: Some(7),
        };
        store.shards[0].left_out = (0..7).map(|nth| out(800 + nth)).collect();
        let text = recovered(&store);
        assert!(text.contains("7 commits beyond it are left out"), "{text}");
        assert!(text.contains("0/320 at ") && text.contains("and 2 more"), "{text}");
        assert!(text.contains("s1: the log up to 0/1F4\n"), "{text}");
    }

    #[test]
    fn a_shard_that_could_not_be_promoted_is_named() {
        let mut store = status();
        let standby = |problem: Option<&str>, promoted| {
            let problem = problem.map(str::to_owned);
            Some(StandbyStatus { problem, promoted, ..StandbyStatus::default() })
        };
        let promoted = Promoted { at: LogIndex(500), timeline: 2, ready_ms: 3, promoted_ms: 40 };
        store.shards[0].standby = standby(Some("there is no room"), None);
        store.shards[1].standby = standby(None, Some(promoted));
        assert!(not_promoted(&store).is_empty(), "nothing was ordered yet");
        store.recovered = store.watermark;
        assert_eq!(not_promoted(&store), ["s0"]);
        let text = recovered(&store);
        assert!(text.contains("NOT PROMOTED: there is no room"), "{text}");
        assert!(text.contains("ready after 3 ms, writable 40 ms later, timeline 2"), "{text}");
    }
}
