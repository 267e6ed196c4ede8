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
    let text = render(&control::statuses(&registry).await, certificate);
    ([(CONTENT_TYPE, "application/openmetrics-text; version=1.0.0; charset=utf-8")], text)
}

fn render(groups: &[GroupStatus], certificate_valid_s: Option<u64>) -> String {
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
    let mut text = String::new();
    encode(&mut text, &metrics).expect("a string takes everything");
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_broken_group_shows() {
        let text = render(&[GroupStatus::of_broken("shop", "damaged")], Some(7));
        assert!(text.contains("tidelock_backup_broken{group=\"shop\"} 1"), "{text}");
        assert!(text.contains("tidelock_backup_certificate_valid_seconds 7"), "{text}");
        assert!(text.ends_with("# EOF\n"));
    }
}
