//! Prometheus metrics over HTTP, made from the groups' status when they are asked for.

use super::control;
use super::registry::Registry;
use axum::Router;
use axum::extract::State;
use axum::http::header::CONTENT_TYPE;
use axum::response::IntoResponse;
use axum::routing::get;
use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry as Metrics;
use std::sync::Arc;
use tidelock_protocol::message::CopyState;
use tidelock_replica::group::GroupStatus;
use tidelock_shard::unix_ns_of;
use tidelock_shard_logs::{StandbyState, StoreStatus};
use tokio::net::TcpListener;

type Labels = Vec<(&'static str, String)>;
type Value = fn(&GroupStatus) -> u64;

/// Name, help and value of what is told of each group.
const OF_GROUPS: [(&str, &str, Value); 16] = [
    ("epoch", "The epoch in force", |g| g.epoch.0),
    ("recoverable", "1 if the group can be recovered", |g| u64::from(g.recoverable)),
    ("recovered", "1 if the group was recovered here", |g| u64::from(g.recovered.is_some())),
    ("stalled", "1 if nothing is acknowledged for now", |g| u64::from(g.stalled.is_some())),
    ("broken", "1 if the group does not work", |g| u64::from(g.broken.is_some())),
    ("implausible", "Messages refused because a number in them cannot be true", |g| g.implausible),
    ("damaged_segments", "Damaged segments of the journal", |g| g.damaged.len() as u64),
    ("damaged_latest_bytes", "Bytes of the latest state that cannot be read", |g| {
        g.latest_damaged.iter().map(|disk| disk.len_bytes).sum()
    }),
    ("journal_bytes", "Bytes of the journal", |g| g.journal_bytes),
    ("unfolded_bytes", "Bytes of the journal not in the images", |g| g.unfolded_bytes),
    ("journal_segments", "Segments of the journal", |g| g.journal_segments),
    ("journal_stored_bytes", "Bytes that the journal takes on disk", |g| g.journal_stored_bytes),
    ("compressed_segments", "Segments that are compressed", |g| g.compressed.segments),
    ("compressed_bytes", "Bytes of segments that are compressed", |g| g.compressed.bytes),
    ("compressed_stored_bytes", "Bytes that they take on disk", |g| g.compressed.stored_bytes),
    ("grace_remaining_milliseconds", "Until a recovery need not wait", |g| g.grace_remaining_ms),
];

/// Serves `/metrics`.
pub async fn run(listener: TcpListener, registry: Arc<Registry>) {
    let app = Router::new().route("/metrics", get(metrics)).with_state(registry);
    if let Err(error) = axum::serve(listener, app).await {
        tracing::error!("metrics: {error}");
    }
}

async fn metrics(State(registry): State<Arc<Registry>>) -> impl IntoResponse {
    let certificate = registry.config().certificate_valid_for().map(|valid| valid.as_secs());
    let stores = registry.stores().statuses().await;
    let stores: Vec<_> = stores.into_iter().filter_map(Result::ok).collect();
    let text = render(&control::statuses(&registry).await, &stores, certificate);
    ([(CONTENT_TYPE, "application/openmetrics-text; version=1.0.0; charset=utf-8")], text)
}

fn render(
    groups: &[GroupStatus],
    stores: &[StoreStatus],
    certificate_valid_s: Option<u64>,
) -> String {
    let mut metrics = Metrics::with_prefix("tidelock_backup");
    if let Some(valid_s) = certificate_valid_s {
        let gauge = Gauge::<i64>::default();
        gauge.set(valid_s as i64);
        metrics.register("certificate_valid_seconds", "Until no host can connect", gauge);
    }
    for (name, help, value) in OF_GROUPS {
        let family = Family::<Labels, Gauge>::default();
        for group in groups {
            family.get_or_create(&vec![("group", group.group.clone())]).set(value(group) as i64);
        }
        metrics.register(name, help, family);
    }
    let [durable, committed, connected, whole] =
        std::array::from_fn(|_| Family::<Labels, Gauge>::default());
    for group in groups {
        for writer in &group.writers {
            let labels = vec![("group", group.group.clone()), ("member", writer.member.clone())];
            let set = |family: &Family<Labels, Gauge>, value: u64| {
                family.get_or_create(&labels).set(value as i64);
            };
            set(&durable, writer.durable.0);
            set(&committed, writer.committed.0);
            set(&connected, u64::from(writer.connected_since_unix_ms.is_some()));
            set(&whole, u64::from(writer.copy == CopyState::Whole));
        }
    }
    metrics.register("durable_seq", "Last durable seq", durable);
    metrics.register("committed_seq", "Entry of the committed vector", committed);
    metrics.register("connected", "1 if the member is attached", connected);
    metrics.register("whole", "1 if its disks are wholly here", whole);
    of_stores(stores, &mut metrics);
    let mut text = String::new();
    encode(&mut text, &metrics).expect("a string takes everything");
    text
}

fn of_stores(stores: &[StoreStatus], metrics: &mut Metrics) {
    let [recovered, lag, journal, shipped, stands, durable, apply_to, follows, replayed] =
        std::array::from_fn(|_| Family::<Labels, Gauge>::default());
    for store in stores {
        let labels = vec![("store", store.store.clone())];
        let set = |family: &Family<Labels, Gauge>, value: u64| {
            family.get_or_create(&labels).set(value as i64);
        };
        set(&recovered, u64::from(store.recovered.is_some()));
        set(&journal, store.journal_bytes);
        if let Some(watermark) = store.watermark {
            let ns = unix_ns_of(store.updated).saturating_sub(unix_ns_of(watermark));
            set(&lag, ns / 1000);
        }
        for shard in &store.shards {
            let labels = vec![("store", store.store.clone()), ("shard", shard.name.clone())];
            let set = |family: &Family<Labels, Gauge>, value: u64| {
                family.get_or_create(&labels).set(value as i64);
            };
            set(&shipped, u64::from(shard.host.is_some()));
            set(&stands, u64::from(shard.stands.is_some()));
            set(&durable, shard.durable.0);
            set(&apply_to, shard.apply_to.0);
            if let Some(standby) = &shard.standby {
                set(&follows, u64::from(standby.state == StandbyState::Following));
                set(&replayed, standby.replayed.unwrap_or_default().0);
            }
        }
    }
    metrics.register("store_recovered", "1 if the store was recovered here", recovered);
    let help = "By how much the watermark is behind the newest update";
    metrics.register("store_watermark_lag_microseconds", help, lag);
    metrics.register("store_journal_bytes", "Bytes of the journal", journal);
    metrics.register("shard_shipped", "1 if a host that leads it is connected", shipped);
    metrics.register("shard_stands", "1 if its stamps stand still", stands);
    metrics.register("shard_durable", "End of what is durable, as the store counts", durable);
    metrics.register("shard_apply_to", "End of what may be applied, as the store counts", apply_to);
    metrics.register("standby_follows", "1 if the shard's standby runs and follows", follows);
    metrics.register("standby_replayed", "End of what the shard's standby shows", replayed);
}

#[cfg(test)]
mod tests {
    use super::*;
    use tidelock_shard::{LogIndex, stamp_at};
    use tidelock_shard_logs::ShardStatus;

    #[test]
    fn a_broken_group_shows() {
        let text = render(&[GroupStatus::of_broken("shop", "damaged")], &[], Some(7));
        assert!(text.contains("tidelock_backup_broken{group=\"shop\"} 1"), "{text}");
        assert!(text.contains("tidelock_backup_certificate_valid_seconds 7"), "{text}");
        assert!(text.ends_with("# EOF\n"));
    }

    #[test]
    fn a_store_shows_its_lag_and_each_shard() {
        let at = |ms: u64| stamp_at(ms * 1_000_000);
        let shard = ShardStatus {
            name: "s0".to_owned(),
            host: None,
            stands: Some("the clock is not believed".to_owned()),
            timeline: Some(1),
            received: LogIndex(90),
            durable: LogIndex(80),
            stamp: at(7),
            apply_to: LogIndex(70),
            left_out: Vec::new(),
            standby: None,
        };
        let store = StoreStatus {
            store: "orders".to_owned(),
            shards: vec![shard],
            watermark: Some(at(5)),
            updated: at(7),
            held_back_by: Some("s0".to_owned()),
            recovered: None,
            heard_unix_ms: None,
            journal_bytes: 1,
        };
        let text = render(&[], &[store], None);
        for line in [
            "store_watermark_lag_microseconds{store=\"orders\"} 2000",
            "shard_shipped{store=\"orders\",shard=\"s0\"} 0",
            "shard_stands{store=\"orders\",shard=\"s0\"} 1",
            "shard_durable{store=\"orders\",shard=\"s0\"} 80",
        ] {
            assert!(text.contains(line), "{line} in {text}");
        }
    }
}
