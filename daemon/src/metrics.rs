//! Prometheus metrics over HTTP: the status snapshot in another form, made anew for each scrape.
//!
//! Nothing is counted here. Each scrape takes one [`Status`] and encodes it, so metrics, status and
//! the live view never disagree, and a loop never waits for a scrape. `docs/manual/monitoring.md` lists
//! the names; a test compares.

use crate::control::ControlTarget;
use crate::stores::StoreReport;
use axum::Router;
use axum::http::header::CONTENT_TYPE;
use axum::response::IntoResponse;
use axum::routing::get;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric, MetricEncoder};
use prometheus_client::metrics::MetricType::{self, Counter, Gauge, Histogram};
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::registry::{Registry, Unit};
use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use tidelock_daemon_core::stats::{LATENCY_BOUNDS_US, LatencySnapshot};
use tidelock_daemon_core::status::{
    ActivityCompares, GateStatus, GroupStatus, GuestIo, Kind, LinkState, Status, TaggingStatus,
    Undoes, WriterStatus,
};
use tidelock_daemon_core::verified::Verified;
use tidelock_protocol::message::{Form, Mode};
use tokio::net::TcpListener;

const OPENMETRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// Binds the address, so that a taken port is an error at start, and returns what serves it.
pub async fn bind(
    address: SocketAddr,
    target: Arc<dyn ControlTarget>,
) -> io::Result<(SocketAddr, impl Future<Output = io::Result<()>> + Send)> {
    let listener = TcpListener::bind(address).await.map_err(|error| {
        let text = format!("[metrics] listen = \"{address}\": {error}");
        io::Error::new(error.kind(), text)
    })?;
    let bound = listener.local_addr()?;
    let app = Router::new()
        .route("/metrics", get(move || scrape(Arc::clone(&target))))
        .route("/", get(|| async { "Metrics are at /metrics\n" }));
    Ok((bound, async move { axum::serve(listener, app).await }))
}

async fn scrape(target: Arc<dyn ControlTarget>) -> impl IntoResponse {
    ([(CONTENT_TYPE, OPENMETRICS)], encode(&target.status(), &target.stores()))
}

/// A status in the OpenMetrics text form.
#[must_use]
pub fn encode(status: &Status, stores: &[StoreReport]) -> String {
    let mut registry = Registry::default();
    registry.register_collector(Box::new(Snapshot(status.clone(), stores.to_vec())));
    let mut text = String::new();
    prometheus_client::encoding::text::encode(&mut text, &registry)
        .expect("a String takes everything");
    text
}

#[derive(Debug)]
struct Snapshot(Status, Vec<StoreReport>);

type Labels<'a> = Vec<(&'static str, &'a str)>;
type NoExemplar = prometheus_client::metrics::exemplar::Exemplar<Vec<(String, String)>, f64>;

/// The samples of one family, which must follow each other.
struct Samples<'e>(MetricEncoder<'e>);

impl Samples<'_> {
    fn sample(&mut self, labels: &Labels<'_>, metric: &impl EncodeMetric) -> fmt::Result {
        metric.encode(self.0.encode_family(labels)?)
    }

    fn gauge(&mut self, labels: &Labels<'_>, value: u64) -> fmt::Result {
        // Gauges are signed in the library; no real value comes near the limit.
        self.sample(labels, &ConstGauge::new(i64::try_from(value).unwrap_or(i64::MAX)))
    }

    fn seconds(&mut self, labels: &Labels<'_>, ms: u64) -> fmt::Result {
        self.sample(labels, &ConstGauge::new(ms as f64 / 1e3))
    }

    fn counter(&mut self, labels: &Labels<'_>, value: u64) -> fmt::Result {
        self.sample(labels, &ConstCounter::new(value))
    }

    fn histogram(&mut self, labels: &Labels<'_>, times: &LatencySnapshot) -> fmt::Result {
        let bounds = LATENCY_BOUNDS_US.iter().map(|us| *us as f64 / 1e6);
        let buckets: Vec<_> =
            bounds.chain([f64::INFINITY]).zip(times.buckets.iter().copied()).collect();
        let (sum_s, count) = (times.sum_ns as f64 / 1e9, times.buckets.iter().sum());
        let exemplars = None::<&HashMap<usize, NoExemplar>>;
        self.0.encode_family(labels)?.encode_histogram(sum_s, count, &buckets, exemplars)
    }
}

/// Encodes one family over all `items`. The library appends the unit, and `_total` to counters.
fn each<T>(
    encoder: &mut DescriptorEncoder<'_>,
    (name, unit, kind): (&str, Option<&Unit>, MetricType),
    help: &str,
    items: &[(Labels<'_>, T)],
    mut sample: impl FnMut(&mut Samples<'_>, &Labels<'_>, &T) -> fmt::Result,
) -> fmt::Result {
    let mut samples = Samples(encoder.encode_descriptor(name, help, unit, kind)?);
    items.iter().try_for_each(|(labels, item)| sample(&mut samples, labels, item))
}

const SECONDS: Option<&Unit> = Some(&Unit::Seconds);
const BYTES: Option<&Unit> = Some(&Unit::Bytes);

impl Collector for Snapshot {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let Self(status, stores) = self;
        let groups: Vec<_> =
            status.groups.iter().map(|group| (vec![("group", &*group.name)], group)).collect();
        let mut writers = Vec::new();
        let mut gates = Vec::new();
        let mut tagging = Vec::new();
        for (labels, group) in &groups {
            for member in &group.members {
                let labels = [labels.as_slice(), &[("member", &*member.name)]].concat();
                writers.extend(member.writer.as_ref().map(|writer| (labels.clone(), writer)));
                gates.extend(member.gates.iter().map(|gate| {
                    ([labels.as_slice(), &[("interface", &*gate.interface)]].concat(), gate)
                }));
                tagging.extend(member.tagging.as_ref().map(|tags| (labels, tags)));
            }
        }
        encode_daemon(&mut encoder, status)?;
        encode_groups(&mut encoder, &groups)?;
        encode_lag(&mut encoder, &writers)?;
        encode_guest_io(&mut encoder, &writers)?;
        encode_gates(&mut encoder, &gates)?;
        encode_tagging(&mut encoder, &tagging)?;
        encode_stores(&mut encoder, stores)
    }
}

fn encode_stores(e: &mut DescriptorEncoder<'_>, stores: &[StoreReport]) -> fmt::Result {
    let of_store = |store: &'_ StoreReport| -> Vec<_> {
        let labels = |shard: &str| (store.store.clone(), shard.to_owned());
        store.shards.iter().map(|(name, figures)| (labels(name), *figures)).collect()
    };
    let named: Vec<_> = stores.iter().flat_map(of_store).collect();
    let shards: Vec<_> = named
        .iter()
        .map(|((store, shard), of)| (vec![("store", &**store), ("shard", &**shard)], of))
        .collect();
    let links: Vec<_> = stores.iter().map(|of| (vec![("store", &*of.store)], of)).collect();
    let help = "1 while the store's connection to the backup is there";
    each(e, ("tidelock_store_link_up", None, Gauge), help, &links, |f, l, s| {
        f.gauge(l, u64::from(s.is_linked))
    })?;
    let help = "1 while the shard's stamps stand still";
    each(e, ("tidelock_shard_stands", None, Gauge), help, &shards, |f, l, s| {
        f.gauge(l, u64::from(s.stands))
    })?;
    let help = "Log that the backup does not have yet";
    each(e, ("tidelock_shard_lag", BYTES, Gauge), help, &shards, |f, l, s| {
        f.gauge(l, s.lag_bytes)
    })?;
    let help = "Age of the oldest commit in it";
    each(e, ("tidelock_shard_lag", SECONDS, Gauge), help, &shards, |f, l, s| {
        f.sample(l, &ConstGauge::new(s.lag_us as f64 / 1e6))
    })?;
    let help = "By how much the clock may be off; absent while it is not believed";
    let believed: Vec<_> =
        shards.iter().filter_map(|(labels, of)| Some((labels.clone(), of.epsilon_ns?))).collect();
    each(e, ("tidelock_shard_clock_error", SECONDS, Gauge), help, &believed, |f, l, ns| {
        f.sample(l, &ConstGauge::new(*ns as f64 / 1e9))
    })
}

fn encode_daemon(e: &mut DescriptorEncoder<'_>, status: &Status) -> fmt::Result {
    let all = [(vec![("host", &*status.host)], status)];
    let help = "How long the daemon has been running";
    each(e, ("tidelock_uptime", SECONDS, Gauge), help, &all, |f, l, s| f.seconds(l, s.uptime_ms))?;
    let help = "1 while the backup is connected";
    each(e, ("tidelock_link_up", None, Gauge), help, &all, |f, l, s| {
        f.gauge(l, u64::from(s.link.state == LinkState::Connected))
    })?;
    let help = "1 if the link is encrypted and both sides are authenticated";
    each(e, ("tidelock_link_tls", None, Gauge), help, &all, |f, l, s| {
        f.gauge(l, u64::from(s.link.tls))
    })?;
    let with_certificate: Vec<_> = all
        .iter()
        .filter_map(|(labels, status)| Some((labels.clone(), status.link.certificate_valid_s?)))
        .collect();
    let help = "Until this host's certificate ends; 0: it is not valid, or cannot be read";
    each(e, ("tidelock_certificate_valid", SECONDS, Gauge), help, &with_certificate, |f, l, s| {
        f.gauge(l, *s)
    })?;
    let help = "Connections to the backup made since the start";
    each(e, ("tidelock_link_connects", None, Counter), help, &all, |f, l, s| {
        f.counter(l, s.link.connects)
    })
}

fn encode_groups(
    e: &mut DescriptorEncoder<'_>,
    groups: &[(Labels<'_>, &GroupStatus)],
) -> fmt::Result {
    let help =
        "1 while the backup follows and a disaster now would undo nothing that a client was told";
    each(e, ("tidelock_protected", None, Gauge), help, groups, |f, l, g| {
        f.gauge(l, u64::from(g.protected))
    })?;
    let help = "What a disaster now would undo: 1 for nothing, the lag, everything since a time, or everything";
    each(e, ("tidelock_undone", None, Gauge), help, groups, |f, l, g| {
        Undoes::ALL.iter().try_for_each(|what| {
            let labels = [l.as_slice(), &[("what", *what)]].concat();
            f.gauge(&labels, u64::from(g.risk.undoes.name() == *what))
        })
    })?;
    let help =
        "If it is everything since a time: that time, as seconds since 1970; 0 if it is not known";
    each(e, ("tidelock_undone_since", SECONDS, Gauge), help, groups, |f, l, g| {
        match g.risk.undoes {
            Undoes::Since { since_unix_ms } => f.seconds(l, since_unix_ms.unwrap_or(0)),
            _ => Ok(()),
        }
    })?;
    let help = "1 while clients may have been told what a disaster would undo";
    each(e, ("tidelock_clients_told", None, Gauge), help, groups, |f, l, g| {
        f.gauge(l, u64::from(g.risk.told.is_some()))
    })?;
    let help = "Since when, as seconds since 1970; 0 if they have not";
    each(e, ("tidelock_clients_told_since", SECONDS, Gauge), help, groups, |f, l, g| {
        f.seconds(l, g.risk.told.map_or(0, |told| told.since_unix_ms))
    })?;
    let help = "1 for the kind of reason, 0 for the others";
    each(e, ("tidelock_why", None, Gauge), help, groups, |f, l, g| {
        Kind::ALL.iter().try_for_each(|kind| {
            let labels = [l.as_slice(), &[("kind", kind.name())]].concat();
            f.gauge(&labels, u64::from(g.risk.why.kind == *kind))
        })
    })?;
    let help = "1 for the mode in force, 0 for the others";
    each(e, ("tidelock_group_mode", None, Gauge), help, groups, |f, l, g| {
        [Mode::Sync, Mode::Pipelined, Mode::Async].iter().try_for_each(|mode| {
            let name = mode.to_string();
            let labels: Vec<_> = l.iter().copied().chain([("mode", &*name)]).collect();
            f.gauge(&labels, u64::from(g.mode == *mode))
        })
    })?;
    let help = "How long replies may still leave if the backup is not heard again; 0 if not at all";
    each(e, ("tidelock_lease_left", SECONDS, Gauge), help, groups, |f, l, g| {
        f.seconds(l, if g.lease.held { g.lease.left_ms } else { 0 })
    })?;
    let help = "The fencing number granted by the backup";
    each(e, ("tidelock_epoch", None, Gauge), help, groups, |f, l, g| f.gauge(l, g.epoch.0))?;
    let help = "In a group of several members: 1 for the form in which they tell each other what \
                they depend on, 0 for the other";
    each(e, ("tidelock_group_form", None, Gauge), help, groups, |f, l, g| {
        let Some(form) = g.form else { return Ok(()) };
        [("vector", Form::Vector), ("hlc", Form::Hlc)].iter().try_for_each(|(name, each)| {
            let labels = [l.as_slice(), &[("form", *name)]].concat();
            f.gauge(&labels, u64::from(form == *each))
        })
    })?;
    let help = "In the HLC form: by how much the watermark is behind the group's newest record";
    each(e, ("tidelock_watermark_lag", SECONDS, Gauge), help, groups, |f, l, g| {
        g.watermark_lag_ms.map_or(Ok(()), |lag_ms| f.seconds(l, lag_ms))
    })
}

fn encode_lag(
    e: &mut DescriptorEncoder<'_>,
    writers: &[(Labels<'_>, &WriterStatus)],
) -> fmt::Result {
    let help = "P: the last guest write admitted";
    each(e, ("tidelock_pending_seq", None, Gauge), help, writers, |f, l, w| {
        f.gauge(l, w.pending.0)
    })?;
    let help = "C: the last write durable at the backup, contiguously";
    each(e, ("tidelock_committed_seq", None, Gauge), help, writers, |f, l, w| {
        f.gauge(l, w.committed.0)
    })?;
    let help = "Records that the backup does not have yet";
    each(e, ("tidelock_lag_writes", None, Gauge), help, writers, |f, l, w| {
        f.gauge(l, w.lag.writes)
    })?;
    let help = "Bytes of the records that the backup does not have yet";
    each(e, ("tidelock_lag", BYTES, Gauge), help, writers, |f, l, w| f.gauge(l, w.lag.bytes))?;
    let help = "Age of the oldest guest write that the backup does not have yet";
    each(e, ("tidelock_lag", SECONDS, Gauge), help, writers, |f, l, w| f.seconds(l, w.lag.ms))?;
    let help = "Bytes in the backlog";
    each(e, ("tidelock_backlog_used", BYTES, Gauge), help, writers, |f, l, w| {
        f.gauge(l, w.backlog.used_bytes)
    })?;
    let help = "The backlog's limit";
    each(e, ("tidelock_backlog_limit", BYTES, Gauge), help, writers, |f, l, w| {
        f.gauge(l, w.backlog.limit_bytes)
    })?;
    let on_disk = |w: &WriterStatus| w.backlog.on_disk.unwrap_or_default();
    let help = "Bytes of the backlog's files on disk";
    each(e, ("tidelock_backlog_disk", BYTES, Gauge), help, writers, |f, l, w| {
        f.gauge(l, on_disk(w).file_bytes)
    })?;
    let help = "Records of the backlog that are on disk and not in memory";
    each(e, ("tidelock_backlog_disk_records", None, Gauge), help, writers, |f, l, w| {
        f.gauge(l, on_disk(w).records)
    })?;
    let help = "1 if the backlog's disk has failed";
    each(e, ("tidelock_backlog_disk_failed", None, Gauge), help, writers, |f, l, w| {
        f.gauge(l, u64::from(on_disk(w).failed))
    })?;
    let help = "1 while nothing is recorded because the backlog was full";
    each(e, ("tidelock_backlog_overflowed", None, Gauge), help, writers, |f, l, w| {
        f.gauge(l, u64::from(on_disk(w).overflowed))
    })?;
    let help = "How often nothing was recorded from then on because the backlog was full";
    each(e, ("tidelock_backlog_overflows", None, Counter), help, writers, |f, l, w| {
        f.counter(l, on_disk(w).overflows)
    })?;
    let help = "1 while guests' writes wait for room in the backlog";
    each(e, ("tidelock_backlog_writes_wait", None, Gauge), help, writers, |f, l, w| {
        f.gauge(l, u64::from(w.backlog.writes_wait))
    })?;
    let help = "How often the backlog has become full";
    each(e, ("tidelock_backlog_full", None, Counter), help, writers, |f, l, w| {
        f.counter(l, w.backlog.full_count)
    })?;
    let help = "How long ago the newest heartbeat that has come back had been sent, or a write that was as good";
    each(e, ("tidelock_heartbeat_age", SECONDS, Gauge), help, writers, |f, l, w| {
        w.heartbeat.age_ms.map_or(Ok(()), |age_ms| f.seconds(l, age_ms))
    })?;
    let help = "1 while a heartbeat is missing";
    each(e, ("tidelock_heartbeat_missing", None, Gauge), help, writers, |f, l, w| {
        f.gauge(l, u64::from(w.heartbeat.missing.is_some()))
    })?;
    let help = "Heartbeats that were sent because nothing else was";
    each(e, ("tidelock_heartbeats_sent", None, Counter), help, writers, |f, l, w| {
        f.counter(l, w.heartbeat.sent)
    })?;
    let help = "1 while a local disk does not answer a request, and guests wait";
    each(e, ("tidelock_disk_hangs", None, Gauge), help, writers, |f, l, w| {
        f.gauge(l, u64::from(w.disk_hang.is_some()))
    })?;
    let help = "Bytes that a resync would compare after a crash now";
    each(e, ("tidelock_activity_exposed", BYTES, Gauge), help, writers, |f, l, w| {
        f.gauge(l, w.activity.exposed_bytes)
    })?;
    let help = "Entries of the activity log's map";
    each(e, ("tidelock_activity_entries", None, Gauge), help, writers, |f, l, w| {
        f.gauge(l, w.activity.entries)
    })?;
    let help = "1 while a resync would compare all of the disks after a crash";
    each(e, ("tidelock_activity_everything", None, Gauge), help, writers, |f, l, w| {
        f.gauge(l, u64::from(w.activity.compares != ActivityCompares::Map))
    })?;
    let help = "Requests whose extents were in the activity log's map";
    each(e, ("tidelock_activity_hits", None, Counter), help, writers, |f, l, w| {
        f.counter(l, w.activity.hits)
    })?;
    let help = "Requests that waited for a write of the activity log";
    each(e, ("tidelock_activity_misses", None, Counter), help, writers, |f, l, w| {
        f.counter(l, w.activity.misses)
    })?;
    let help = "How often the activity log's map was full and given up";
    each(e, ("tidelock_activity_overflows", None, Counter), help, writers, |f, l, w| {
        f.counter(l, w.activity.overflows)
    })?;
    let help = "Bytes done by the initial copy or resync under way";
    each(e, ("tidelock_copy_done", BYTES, Gauge), help, writers, |f, l, w| {
        f.gauge(l, w.copy.as_ref().map_or(0, |copy| copy.done_bytes))
    })?;
    let help = "Bytes of the initial copy or resync under way; 0 if none is";
    each(e, ("tidelock_copy_size", BYTES, Gauge), help, writers, |f, l, w| {
        f.gauge(l, w.copy.as_ref().map_or(0, |copy| copy.total_bytes))
    })?;
    let help = "When the last verification ended, as seconds since 1970; 0: there was none";
    each(e, ("tidelock_verified_at", SECONDS, Gauge), help, writers, |f, l, w| {
        f.seconds(l, w.verify.last.as_ref().map_or(0, |last| last.ended_unix_ms))
    })?;
    let help = "Bytes in which the last verification found the sites to differ, and which were not repaired";
    each(e, ("tidelock_verify_differing", BYTES, Gauge), help, writers, |f, l, w| {
        let differing = |last: &Verified| last.differing_bytes - last.repaired_bytes;
        f.gauge(l, w.verify.last.as_ref().map_or(0, differing))
    })?;
    let help = "Bytes that the last verification could not read";
    each(e, ("tidelock_verify_unreadable", BYTES, Gauge), help, writers, |f, l, w| {
        f.gauge(l, w.verify.last.as_ref().map_or(0, |last| last.unreadable_bytes))
    })?;
    let help = "From a write's admission to the backup's acknowledgement";
    each(e, ("tidelock_commit_latency", SECONDS, Histogram), help, writers, |f, l, w| {
        f.histogram(l, &w.commit_latency)
    })
}

fn encode_guest_io(
    e: &mut DescriptorEncoder<'_>,
    writers: &[(Labels<'_>, &WriterStatus)],
) -> fmt::Result {
    type Field = fn(&GuestIo) -> u64;
    let counters: [(&str, Option<&Unit>, &str, Field); 6] = [
        ("tidelock_guest_reads", None, "Guests' reads", |io| io.reads),
        ("tidelock_guest_read", BYTES, "Bytes that guests have read", |io| io.read_bytes),
        ("tidelock_guest_writes", None, "Guests' writes and zeroings", |io| io.writes),
        ("tidelock_guest_written", BYTES, "Bytes that guests have written", |io| io.written_bytes),
        ("tidelock_guest_flushes", None, "Guests' flushes", |io| io.flushes),
        ("tidelock_disk_errors", None, "Requests that failed on the local disk", |io| {
            io.disk_errors
        }),
    ];
    for (name, unit, help, value) in counters {
        each(e, (name, unit, Counter), help, writers, |f, l, w| f.counter(l, value(&w.guest_io)))?;
    }
    let help = "Open NBD connections";
    each(e, ("tidelock_nbd_connections", None, Gauge), help, writers, |f, l, w| {
        f.gauge(l, w.guest_io.connections)
    })
}

fn encode_gates(e: &mut DescriptorEncoder<'_>, gates: &[(Labels<'_>, &GateStatus)]) -> fmt::Result {
    let help = "1 while covered packets leave";
    each(e, ("tidelock_gate_open", None, Gauge), help, gates, |f, l, g| {
        f.gauge(l, u64::from(g.open))
    })?;
    let help = "Packets held now";
    each(e, ("tidelock_held_packets", None, Gauge), help, gates, |f, l, g| {
        f.gauge(l, g.held_packets)
    })?;
    let help = "Bytes of the packets held now";
    each(e, ("tidelock_held", BYTES, Gauge), help, gates, |f, l, g| f.gauge(l, g.held_bytes))?;
    let help = "How long the oldest of the packets held now has been held";
    each(e, ("tidelock_oldest_hold", SECONDS, Gauge), help, gates, |f, l, g| {
        f.seconds(l, g.oldest_hold_ms)
    })?;
    let help = "Packets that were held and released";
    each(e, ("tidelock_released_packets", None, Counter), help, gates, |f, l, g| {
        f.counter(l, g.released_packets)
    })?;
    let help = "Packets that were covered on arrival, or need no hold";
    each(e, ("tidelock_passed_packets", None, Counter), help, gates, |f, l, g| {
        f.counter(l, g.passed_packets)
    })?;
    let help = "Packets dropped because a queue was full; TCP sends them again";
    each(e, ("tidelock_dropped_packets", None, Counter), help, gates, |f, l, g| {
        f.counter(l, g.dropped_packets)
    })?;
    let help = "How often somebody had changed the member's packet-filter rules, so that packets may have left \
                unheld; the rules were put back";
    each(e, ("tidelock_gate_rules_restored", None, Counter), help, gates, |f, l, g| {
        f.counter(l, g.rules_restored)
    })?;
    let help = "How often the member's packet-filter rules were found changed, so that packets may have left unheld";
    each(e, ("tidelock_gate_may_have_left", None, Counter), help, gates, |f, l, g| {
        f.counter(l, g.may_have_left)
    })?;
    let help = "1 while packets of the guest may leave unheld: the gate's rules are gone, or the interface is while the \
                guest's disk is in use";
    each(e, ("tidelock_gate_unheld", None, Gauge), help, gates, |f, l, g| {
        f.gauge(l, u64::from(g.unheld_because.is_some()))
    })?;
    let help = "1 if no kernel programs watch the interface: packets leave unheld while its rules are gone";
    each(e, ("tidelock_gate_unwatched", None, Gauge), help, gates, |f, l, g| {
        f.gauge(l, u64::from(g.unwatched_because.is_some()))
    })?;
    let help = "How long released packets were held";
    each(e, ("tidelock_hold_time", SECONDS, Histogram), help, gates, |f, l, g| {
        f.histogram(l, &g.hold_time)
    })
}

fn encode_tagging(
    e: &mut DescriptorEncoder<'_>,
    tagging: &[(Labels<'_>, &TaggingStatus)],
) -> fmt::Result {
    let help = "Packets to members that got a tag";
    each(e, ("tidelock_tagged_packets", None, Counter), help, tagging, |f, l, t| {
        f.counter(l, t.tagged_packets)
    })?;
    let help = "Packets to members on this host, which need no tag";
    each(e, ("tidelock_untagged_inside_host_packets", None, Counter), help, tagging, |f, l, t| {
        f.counter(l, t.here_packets)
    })?;
    let help = "Packets to members that needed no tag: all that they may depend on is committed";
    each(e, ("tidelock_untagged_covered_packets", None, Counter), help, tagging, |f, l, t| {
        f.counter(l, t.covered_packets)
    })?;
    let help = "Packets from members whose tag was merged and taken out";
    each(e, ("tidelock_merged_packets", None, Counter), help, tagging, |f, l, t| {
        f.counter(l, t.merged_packets)
    })?;
    let help = "Packets from outsiders whose tag was taken out and not believed";
    each(e, ("tidelock_foreign_tag_packets", None, Counter), help, tagging, |f, l, t| {
        f.counter(l, t.foreign_packets)
    })?;
    let by_reason = |f: &mut Samples<'_>, l: &Labels<'_>, counts: &BTreeMap<String, u64>| {
        counts.iter().try_for_each(|(reason, count)| {
            let labels: Vec<_> = l.iter().copied().chain([("reason", reason.as_str())]).collect();
            f.counter(&labels, *count)
        })
    };
    let help = "Packets to members that could not be tagged and waited like those to clients";
    each(e, ("tidelock_gated_packets", None, Counter), help, tagging, |f, l, t| {
        by_reason(f, l, &t.gated_packets)
    })?;
    let help = "Packets dropped because nobody can know what they depend on";
    each(e, ("tidelock_tagging_dropped_packets", None, Counter), help, tagging, |f, l, t| {
        by_reason(f, l, &t.dropped_packets)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::control::{
        Adopting, BookmarkState, BookmarkWish, Bookmarking, ControlError, ModeChange, SwitchState,
        SwitchWish, Switching, VerifyBegun, VerifyWish,
    };
    use crate::example_status::status;
    use std::collections::BTreeSet;
    use std::io::{Read, Write};

    #[test]
    fn values_and_units_are_right() {
        let text = encode(&status(), &[StoreReport::example()]);
        for line in [
            "tidelock_link_up{host=\"host-a\"} 1",
            "tidelock_protected{group=\"shop\"} 1",
            "tidelock_undone{group=\"shop\",what=\"lag\"} 1",
            "tidelock_clients_told{group=\"shop\"} 0",
            "tidelock_why{group=\"shop\",kind=\"following\"} 1",
            "tidelock_why{group=\"shop\",kind=\"fenced\"} 0",
            "tidelock_group_mode{group=\"shop\",mode=\"pipelined\"} 1",
            "tidelock_lag_bytes{group=\"shop\",member=\"db\"} 49152",
            "tidelock_lag_seconds{group=\"shop\",member=\"db\"} 0.052",
            "tidelock_lag_writes{group=\"shop\",member=\"db\"} 12",
            "tidelock_heartbeat_age_seconds{group=\"shop\",member=\"db\"} 0.23",
            "tidelock_heartbeat_missing{group=\"shop\",member=\"db\"} 0",
            "tidelock_disk_hangs{group=\"shop\",member=\"db\"} 0",
            "tidelock_held_packets{group=\"shop\",member=\"db\",interface=\"tap0\"} 4",
            "tidelock_gate_rules_restored_total{group=\"shop\",member=\"db\",interface=\"tap0\"} 0",
            "tidelock_gate_may_have_left_total{group=\"shop\",member=\"db\",interface=\"tap0\"} 0",
            "tidelock_gate_unheld{group=\"shop\",member=\"db\",interface=\"tap0\"} 0",
            "tidelock_guest_writes_total{group=\"shop\",member=\"db\"} 1012",
            "tidelock_hold_time_seconds_count{group=\"shop\",member=\"db\",interface=\"tap0\"} 2",
            "tidelock_hold_time_seconds_sum{group=\"shop\",member=\"db\",interface=\"tap0\"} 0.12",
            // Cumulative: 50 ms is within its own bound, both are within 75 ms and without bound.
            "tidelock_hold_time_seconds_bucket{le=\"0.025\",group=\"shop\",member=\"db\",interface=\"tap0\"} 0",
            "tidelock_hold_time_seconds_bucket{le=\"0.05\",group=\"shop\",member=\"db\",interface=\"tap0\"} 1",
            "tidelock_hold_time_seconds_bucket{le=\"0.075\",group=\"shop\",member=\"db\",interface=\"tap0\"} 2",
            "tidelock_hold_time_seconds_bucket{le=\"+Inf\",group=\"shop\",member=\"db\",interface=\"tap0\"} 2",
            "tidelock_group_form{group=\"shop\",form=\"hlc\"} 1",
            "tidelock_group_form{group=\"shop\",form=\"vector\"} 0",
            "tidelock_watermark_lag_seconds{group=\"shop\"} 0.06",
            "tidelock_tagged_packets_total{group=\"shop\",member=\"db\"} 700",
            "tidelock_untagged_inside_host_packets_total{group=\"shop\",member=\"db\"} 40",
            "tidelock_untagged_covered_packets_total{group=\"shop\",member=\"db\"} 1200",
            "tidelock_gated_packets_total{group=\"shop\",member=\"db\",reason=\"mtu\"} 3",
            "tidelock_tagging_dropped_packets_total{group=\"shop\",member=\"db\",reason=\"malformed\"} 0",
            "tidelock_store_link_up{store=\"orders\"} 1",
            "tidelock_shard_stands{store=\"orders\",shard=\"s0\"} 0",
            "tidelock_shard_lag_bytes{store=\"orders\",shard=\"s0\"} 300",
            "tidelock_shard_lag_seconds{store=\"orders\",shard=\"s0\"} 0.0025",
            "tidelock_shard_clock_error_seconds{store=\"orders\",shard=\"s0\"} 0.00004",
            "# UNIT tidelock_lag_bytes bytes",
            "# EOF",
        ] {
            assert!(text.lines().any(|l| l == line), "{line} is missing:\n{text}");
        }
    }

    /// Every family is in the table of `docs/manual/monitoring.md`, and nothing else is.
    #[test]
    fn the_documented_metrics_are_the_metrics() {
        let text = encode(&status(), &[StoreReport::example()]);
        let type_of = |line: &str| -> Option<String> {
            let (name, kind) = line.strip_prefix("# TYPE ")?.split_once(' ')?;
            Some(format!("{name}{}", if kind == "counter" { "_total" } else { "" }))
        };
        let families: Vec<_> = text.lines().filter_map(type_of).collect();
        let distinct: BTreeSet<_> = families.iter().cloned().collect();
        assert_eq!(families.len(), distinct.len(), "each family stands in one piece");
        let docs = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/manual/monitoring.md");
        let docs = std::fs::read_to_string(docs).unwrap();
        let documented: BTreeSet<_> = docs
            .lines()
            .filter_map(|line| line.strip_prefix("| `tidelock_")?.split(['`', '{']).next())
            .map(|name| format!("tidelock_{name}"))
            .collect();
        assert_eq!(documented, distinct);
    }

    struct Fixed;

    impl ControlTarget for Fixed {
        fn status(&self) -> Status {
            status()
        }

        fn stores(&self) -> Vec<crate::stores::StoreReport> {
            Vec::new()
        }

        fn set_mode(&self, _: &str, _: Mode) -> Result<ModeChange, ControlError> {
            unreachable!("metrics switch nothing")
        }

        fn verify(&self, _: &str, _: &VerifyWish) -> Result<VerifyBegun, ControlError> {
            unreachable!("metrics verify nothing")
        }

        fn bookmark(&self, _: &str, _: BookmarkWish) -> Result<Bookmarking, ControlError> {
            unreachable!("metrics set nothing")
        }

        fn bookmarked(&self, _: &str, _: u64) -> Result<BookmarkState, ControlError> {
            unreachable!("metrics set nothing")
        }

        fn switchover(&self, _: &str, _: SwitchWish) -> Result<Switching, ControlError> {
            unreachable!("metrics hand nothing over")
        }

        fn switched(&self, _: &str) -> Result<SwitchState, ControlError> {
            unreachable!("metrics hand nothing over")
        }

        fn adopt(&self, _: &str) -> Result<Adopting, ControlError> {
            unreachable!("metrics adopt nothing")
        }

        fn adopted(&self, _: &str) -> Result<(), ControlError> {
            unreachable!("metrics adopt nothing")
        }

        fn leave_open(&self, _: &str) -> Result<bool, ControlError> {
            unreachable!("nobody asks")
        }

        fn stop(&self) -> Result<(), ControlError> {
            unreachable!("metrics stop nothing")
        }
    }

    fn fetch(address: SocketAddr, path: &str) -> String {
        let mut stream = std::net::TcpStream::connect(address).unwrap();
        let request = format!("GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n");
        stream.write_all(request.as_bytes()).unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        answer
    }

    #[test]
    fn a_scrape_over_http() {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()
            .unwrap();
        let any = SocketAddr::from(([127, 0, 0, 1], 0));
        let (address, serving) = runtime.block_on(bind(any, Arc::new(Fixed))).unwrap();
        runtime.spawn(serving);
        let answer = fetch(address, "/metrics");
        assert!(answer.starts_with("HTTP/1.1 200 OK"), "{answer}");
        assert!(answer.contains("application/openmetrics-text"), "{answer}");
        assert!(answer.contains("tidelock_link_up{host=\"host-a\"} 1"), "{answer}");
        assert!(fetch(address, "/").contains("/metrics"));
        assert!(fetch(address, "/x").starts_with("HTTP/1.1 404"));
        let taken = runtime.block_on(bind(address, Arc::new(Fixed))).err().unwrap();
        assert!(taken.to_string().contains("[metrics] listen"), "{taken}");
    }
}
