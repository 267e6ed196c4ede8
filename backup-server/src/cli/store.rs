//! Texts about stores.

use std::fmt::Write;
use tidelock_protocol::hlc::Hlc;
use tidelock_replica::text;
use tidelock_shard::unix_ns_of;
use tidelock_shard_logs::StoreStatus;

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
        line("  log", format!("durable to {}{timeline}", shard.durable));
        line("  apply to", shard.apply_to.to_string());
    }
    out
}

/// The cut of a recovery, or of a rehearsal.
pub(super) fn recovered(store: &StoreStatus) -> String {
    let mut text = match store.recovered {
        Some(at) => format!("store {} is recovered at {}\n", store.store, stamp(at)),
        None => format!(
            "rehearsal, nothing was changed: store {} would be recovered at {}\n",
            store.store,
            stamp(store.watermark.unwrap_or_default())
        ),
    };
    for shard in &store.shards {
        let beyond = shard.durable.0.saturating_sub(shard.apply_to.0);
        text += &format!("  {}: the log up to {}", shard.name, shard.apply_to);
        text += &match beyond {
            0 => "\n".to_owned(),
            _ => format!("; what is here beyond it, up to {}, is left out\n", shard.durable),
        };
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use tidelock_shard::{LogIndex, stamp_at};
    use tidelock_shard_logs::ShardStatus;

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
        };
        StoreStatus {
            store: "orders".to_owned(),
            shards: vec![shard("s0", 900, at(30), 700), shard("s1", 500, at(20), 500)],
            watermark: Some(at(20)),
            updated: at(30),
            held_back_by: Some("s1".to_owned()),
            recovered: None,
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
        let text = recovered(&store);
        assert!(
            text.contains("s0: the log up to 700; what is here beyond it, up to 900"),
            "{text}"
        );
        assert!(text.contains("s1: the log up to 500\n"), "{text}");
    }
}
