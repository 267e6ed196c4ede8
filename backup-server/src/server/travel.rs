//! Requests about the past, on the control socket: everything is asked of a [`History`], which the group's owner
//! gives away, so that replication does not wait for what is read here.

use super::control::{Reply, ask};
use super::inbox::Event;
use super::orders::{self, order_at_once};
use super::registry::Registry;
use super::views::{Attended, ViewStatus, Views, Wanted};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::sync::Arc;
use tidelock_protocol::hlc::Hlc;
use tidelock_replica::group::CompressedStatus;
use tidelock_replica::group::NamedMark;
use tidelock_replica::group_loop::{Answer, Order};
use tidelock_replica::history::{Bucket, History, Hold, PastError, Point};
use tidelock_replica::text;
use tidelock_replica::travel::moment::Moment;
use tidelock_replica::travel::when::{FindError, When};
use tidelock_storage::files::OpenFile;
use tidelock_store::extents::DiskKey;
use tidelock_store::journal::{HostRequest, Mark, MarkKind};
use tokio::task::spawn_blocking;

/// Spans of a timeline.
pub const BUCKETS_MAX: usize = 10_000;

/// A bookmark or pin as it is told.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MarkStatus {
    /// Its name.
    pub name: String,
    /// What it is.
    pub kind: MarkKind,
    /// Its point.
    pub at: Moment,
    /// When it was set, in milliseconds since the Unix epoch.
    pub set_at_unix_ms: u64,
    /// When it goes by itself.
    pub expires_at_unix_ms: Option<u64>,
    /// Its point is gone.
    pub lost: bool,
    /// The host at which it was set; absent: here.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host: Option<String>,
}

/// The points in time that a damaged segment affects.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DamagedSpan {
    /// The segment; `None`: the disk images.
    pub segment: Option<u64>,
    /// From here on, in milliseconds since the Unix epoch.
    pub from_unix_ms: u64,
    /// The same by the group's clock.
    pub from: Hlc,
    /// Before this; `None`: the latest state is affected.
    pub until_unix_ms: Option<u64>,
    /// The same by the group's clock.
    pub until: Option<Hlc>,
    /// Points within it cannot be asked for.
    pub is_untold: bool,
}

/// What was written within a span of time.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Span {
    /// Its beginning, exclusive, in milliseconds since the Unix epoch.
    pub from_unix_ms: u64,
    /// Its end, inclusive.
    pub to_unix_ms: u64,
    /// Records that changed something.
    pub records: u64,
    /// Bytes that they changed.
    pub bytes: u64,
    /// The same by disk.
    pub disks: BTreeMap<String, u64>,
    /// States that guests meant to find again, because they flushed.
    pub flushes: u64,
    /// The last of them.
    pub last_flush: Option<FlushStatus>,
}

/// A state that a guest meant to find again: as a point in time, `MEMBER=SEQ`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FlushStatus {
    /// Whose guest.
    pub member: String,
    /// The last record before the flush.
    pub seq: u64,
    /// When that was written, in milliseconds since the Unix epoch.
    pub unix_ms: u64,
}

/// One record of the past.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RecordStatus {
    /// Who wrote it.
    pub member: String,
    /// Its seq.
    pub seq: u64,
    /// When, in milliseconds since the Unix epoch.
    pub unix_ms: u64,
    /// The same by the hybrid logical clock.
    pub hlc: String,
    /// The disk that it changes; `None`: it changes nothing.
    pub disk: Option<String>,
    /// Where.
    pub offset: u64,
    /// How much.
    pub len_bytes: u64,
}

/// What one disk has different.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DiskDiff {
    /// `member.disk`.
    pub name: String,
    /// Its size.
    pub size_bytes: u64,
    /// How many extents were written in between.
    pub extents: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Offset and length of each, if asked for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ranges: Option<Vec<(u64, u64)>>,
}

/// The past of a group, with its bookmarks.
#[derive(Debug)]
pub(super) struct Look {
    pub(super) history: History<OpenFile>,
    marks: Vec<NamedMark>,
}

pub(super) async fn look(registry: &Registry, group: &str) -> Result<Look, String> {
    let history = orders::history(registry, group).await?;
    let marks = ask(registry, group, |done| Event::Marks { done }).await??;
    Ok(Look { history, marks })
}

/// Looks at the past where waiting for files is allowed.
pub(super) async fn looking<T: Send + 'static>(
    registry: &Registry,
    group: &str,
    f: impl FnOnce(&Look) -> Result<T, String> + Send + 'static,
) -> Result<T, String> {
    let look = look(registry, group).await?;
    spawn_blocking(move || f(&look)).await.map_err(|e| format!("the server failed: {e}"))?
}

impl Look {
    /// The point that is asked for.
    pub(super) fn resolve(&self, when: &When) -> Result<Point, String> {
        when.find(&self.history, &self.marks).map_err(|error| match error {
            FindError::Past(error) => self.explain(when, &error),
            error => error.to_string(),
        })
    }

    /// The same for a span of time: what is outside of the window is cut off.
    fn inside(&self, when: &When, oldest: &Point, newest: &Point) -> Result<Point, String> {
        if let Some(ms) = self.arrival(when) {
            return match ms {
                _ if ms <= oldest.arrived_ms => Ok(oldest.clone()),
                _ if ms >= newest.arrived_ms => Ok(newest.clone()),
                _ => self.resolve(when),
            };
        }
        let time = match when {
            When::Hlc(hlc) => *hlc,
            When::Latest => newest.hlc,
            When::Seqs(_) | When::Bookmark(_) => return self.resolve(when),
            _ => oldest.hlc,
        };
        match time {
            _ if time <= oldest.hlc => Ok(oldest.clone()),
            _ if time >= newest.hlc.min(self.history.newest_time()) => Ok(newest.clone()),
            _ => self.resolve(when),
        }
    }

    /// The arrival that is asked for, in milliseconds since the Unix epoch.
    fn arrival(&self, when: &When) -> Option<u64> {
        match when {
            When::WallMs(ms) => Some(*ms),
            When::BeforeNowMs(ms) => Some(self.history.now_ms().saturating_sub(*ms)),
            _ => None,
        }
    }

    /// With times and names that people know.
    fn explain(&self, when: &When, error: &PastError) -> String {
        let at = |ms: u64, hlc: Hlc| format!("{} (hlc:{hlc})", text::utc_ms(ms));
        match error {
            PastError::BeforeWindow { oldest } => format!(
                "{when} is before the window: the oldest point in time that can be seen is {}; ask for `oldest`",
                at(self.history.oldest_ms(), *oldest)
            ),
            PastError::Future { newest: known } | PastError::NotComplete { complete: known } => {
                format!(
                    "{when} is not complete yet: records of that time may still arrive. Everything up to {} is here; ask \
                 for that, or for `latest`",
                    at(self.history.newest_ms(), *known)
                )
            }
            PastError::Initialising { writer } => format!(
                "at {when} the initial copy of {} was not complete: its disks had no state",
                self.history.manifest().name_of(*writer)
            ),
            PastError::Journal(error) => format!("{when}: {error}{}", self.near(when)),
            error => error.to_string(),
        }
    }

    /// Which points are not damaged, near one that cannot be told.
    fn near(&self, when: &When) -> String {
        let time = match when {
            When::Hlc(hlc) => *hlc,
            When::WallMs(_) | When::BeforeNowMs(_) => {
                self.history.time_at(self.arrival(when).unwrap_or_default())
            }
            When::Oldest => self.history.oldest_time(),
            When::Latest | When::Seqs(_) | When::Bookmark(_) => return String::new(),
        };
        let Ok(spans) = self.history.spans() else { return String::new() };
        let (before, after) = self.history.unaffected_near(&spans, time);
        let at = |hlc: Hlc| format!("{} (hlc:{hlc})", text::utc_ms(hlc.physical_ms()));
        let near: Vec<_> = before.into_iter().chain(after).map(at).collect();
        match near.is_empty() {
            true => String::new(),
            false => format!(". The nearest undamaged points are {}", near.join(" and ")),
        }
    }

    pub(super) fn moment(&self, point: &Point) -> Moment {
        Moment::new(point, self.history.manifest())
    }

    fn mark_status(&self, mark: &NamedMark) -> MarkStatus {
        MarkStatus {
            name: mark.name.clone(),
            kind: mark.mark.kind,
            at: self.moment(&mark.mark.point),
            set_at_unix_ms: mark.mark.set_at_unix_ms,
            expires_at_unix_ms: mark.mark.expires_at_unix_ms,
            lost: mark.lost,
            host: mark.mark.asked_by.as_ref().map(|asker| asker.host.clone()),
        }
    }

    /// What is different between two points, by disk.
    fn diffs(
        &self,
        from: &Point,
        to: &Point,
        disk: Option<&str>,
        with_ranges: bool,
    ) -> Result<Vec<DiskDiff>, String> {
        let diff = |(key, name, size_bytes)| {
            let changed = self.history.changed(from, to, key).map_err(|e| e.to_string())?;
            let ranges = with_ranges.then(Vec::new);
            let mut diff = DiskDiff { name, size_bytes, extents: 0, bytes: 0, ranges };
            for range in changed {
                let len = range.end - range.start;
                diff.extents += 1;
                diff.bytes += len;
                diff.ranges.iter_mut().for_each(|ranges| ranges.push((range.start, len)));
            }
            Ok(diff)
        };
        chosen(self.disks(from, to), disk)?.into_iter().map(diff).collect()
    }

    /// The disks that have a state at both points.
    pub(super) fn disks(&self, from: &Point, to: &Point) -> Vec<(DiskKey, String, u64)> {
        let manifest = self.history.manifest();
        let before: Vec<_> = self.history.disks_at(from).collect();
        let disks = self.history.disks_at(to).filter(|disk| before.contains(disk));
        let named = disks.map(|(writer, disk)| {
            let key = DiskKey { writer, disk: disk.id };
            (key, manifest.disk_name(key), disk.size_bytes)
        });
        named.collect()
    }
}

pub(super) fn or_error(reply: Result<Reply, String>) -> Reply {
    reply.unwrap_or_else(|reason| Reply::Error { reason })
}

/// Which point is meant.
pub(super) async fn resolve(registry: &Registry, group: &str, at: When) -> Reply {
    let found = looking(registry, group, move |look| {
        let complete = look.history.newest_time();
        match look.resolve(&at) {
            Ok(point) => Ok(Reply::Point { at: look.moment(&point) }),
            Err(reason) if matches!(at, When::Hlc(hlc) if hlc > complete) => {
                Ok(Reply::Incomplete { complete, reason })
            }
            Err(reason) => Err(reason),
        }
    });
    or_error(found.await)
}

/// Which point is meant, and what keeps it until it is recovered to.
pub(super) async fn keep(
    registry: &Registry,
    group: &str,
    at: When,
) -> Result<(Point, Hold), String> {
    let found = looking(registry, group, move |look| {
        let point = look.resolve(&at)?;
        let hold = look.history.hold(&point, "a recovery").map_err(|e| e.to_string())?;
        Ok((point, hold))
    });
    found.await
}

/// The records between two points, so many at most.
pub(super) async fn records(
    registry: &Registry,
    group: &str,
    (from, to): (When, When),
    max: usize,
) -> Reply {
    let found = looking(registry, group, move |look| {
        let (from, to) = (look.resolve(&from)?, look.resolve(&to)?);
        let records = look.history.records(&from, &to, max).map_err(|e| e.to_string())?;
        let manifest = look.history.manifest();
        let told = records.into_iter().map(|record| RecordStatus {
            member: manifest.name_of(record.writer).to_owned(),
            seq: record.seq.0,
            unix_ms: record.arrived_ms,
            hlc: record.hlc.to_string(),
            disk: record.extent.map(|(key, _, _)| manifest.disk_name(key)),
            offset: record.extent.map_or(0, |(_, offset, _)| offset),
            len_bytes: record.extent.map_or(0, |(_, _, len)| len),
        });
        Ok(Reply::Records { records: told.collect() })
    });
    or_error(found.await)
}

/// Opens a view.
pub(super) async fn open_view(
    registry: &Registry,
    views: &Arc<Views>,
    group: &str,
    at: When,
    wanted: Wanted,
) -> Result<(ViewStatus, Attended), String> {
    let (views, runtime) = (Arc::clone(views), tokio::runtime::Handle::current());
    looking(registry, group, move |look| {
        let point = look.resolve(&at)?;
        // Its sockets are served by the runtime.
        let _in = runtime.enter();
        views.open(&look.history, &point, &wanted)
    })
    .await
}

/// Moves a view, and says what that has changed.
pub(super) async fn roll_view(
    registry: &Registry,
    views: &Arc<Views>,
    name: String,
    at: When,
    discards_writes: bool,
) -> Reply {
    let views = Arc::clone(views);
    let rolled = async {
        let group = views.group_of(&name)?;
        looking(registry, &group, move |look| {
            let point = look.resolve(&at)?;
            let rolled = views.roll(&look.history, &name, &point, discards_writes)?;
            // A view that had lost its point is moved all the same, and what is different cannot be told.
            let from = look.history.locate(&rolled.from).ok();
            let changed = from.map(|from| look.diffs(&from, &point, None, false)).transpose()?;
            let from = look.moment(&rolled.from);
            let (view, discarded_bytes) = (rolled.view, rolled.discarded_bytes);
            Ok(Reply::Rolled { view, from, changed, discarded_bytes })
        })
        .await
    };
    or_error(rolled.await)
}

/// The bookmarks and pins.
pub(super) async fn marks(registry: &Registry, group: &str) -> Reply {
    let listed = async {
        // Here the reason why there are none counts.
        let marks = ask(registry, group, |done| Event::Marks { done }).await??;
        looking(registry, group, move |look| {
            Ok(marks.iter().map(|mark| look.mark_status(mark)).collect())
        })
        .await
    };
    or_error(listed.await.map(|marks| Reply::Marks { marks }))
}

/// What a bookmark or pin is to be.
pub(super) struct WantedMark {
    pub(super) name: String,
    pub(super) kind: MarkKind,
    pub(super) at: When,
    pub(super) expires_in_ms: Option<u64>,
    pub(super) moves: bool,
    pub(super) asked_by: Option<HostRequest>,
}

/// Sets a bookmark or pin.
pub(super) async fn mark(
    registry: &Registry,
    group: &str,
    wanted: WantedMark,
) -> Result<MarkStatus, String> {
    let WantedMark { name, kind, at, expires_in_ms, moves, asked_by } = wanted;
    let look = look(registry, group).await?;
    let (look, point) = spawn_blocking(move || {
        let point = look.resolve(&at);
        (look, point)
    })
    .await
    .map_err(|e| format!("the server failed: {e}"))?;
    let now = look.history.now_ms();
    let expires_at_unix_ms = expires_in_ms.map(|ms| now.saturating_add(ms));
    let mark = Mark { kind, point: point?, set_at_unix_ms: now, expires_at_unix_ms, asked_by };
    let of = name.clone();
    let setting = Order::SetMark { name: of, mark, moves };
    let Answer::Marked(set) = order_at_once(registry, group, setting).await? else {
        unreachable!("a mark was ordered")
    };
    let mark = set.map_err(|e| e.to_string())?;
    // Until here the look has kept the point.
    Ok(look.mark_status(&NamedMark { name, mark, lost: false }))
}

/// Takes a bookmark or pin out.
pub(super) async fn unmark(
    registry: &Registry,
    group: &str,
    name: String,
    kind: MarkKind,
) -> Reply {
    let removed = async {
        let removal = Order::RemoveMark { name, kind };
        let Answer::Unmarked(removed) = order_at_once(registry, group, removal).await? else {
            unreachable!("a removal was ordered")
        };
        removed.map(|()| Reply::Unmarked).map_err(|e| e.to_string())
    };
    or_error(removed.await)
}

/// The window, what was written when, and the marks.
pub(super) async fn timeline(
    registry: &Registry,
    group: &str,
    from: When,
    to: When,
    buckets: usize,
) -> Reply {
    let told = looking(registry, group, move |look| {
        let (oldest, newest) = (look.resolve(&When::Oldest)?, look.resolve(&When::Latest)?);
        let (from, to) =
            (look.inside(&from, &oldest, &newest)?, look.inside(&to, &oldest, &newest)?);
        if from.hlc > to.hlc {
            return Err("--from is later than --to".into());
        }
        let spans = look.history.timeline(&from, &to, buckets.clamp(1, BUCKETS_MAX));
        let spans = spans.map_err(|e| e.to_string())?;
        let manifest = look.history.manifest();
        let span = |bucket: Bucket| Span {
            from_unix_ms: bucket.from_ms,
            to_unix_ms: bucket.to_ms,
            records: bucket.records,
            bytes: bucket.bytes,
            disks: bucket
                .disks
                .iter()
                .map(|(key, bytes)| (manifest.disk_name(*key), *bytes))
                .collect(),
            flushes: bucket.flushes,
            last_flush: bucket.last_flush.map(|point| FlushStatus {
                member: manifest.name_of(point.writer).to_owned(),
                seq: point.seq.0,
                unix_ms: point.arrived_ms,
            }),
        };
        let marks = look.marks.iter().map(|mark| look.mark_status(mark));
        let damaged = look.history.spans().map_err(|e| e.to_string())?;
        let damaged = damaged.into_iter().map(|span| DamagedSpan {
            segment: span.segment,
            from_unix_ms: look.history.arrival_of(span.from),
            from: span.from,
            until_unix_ms: span.until.map(|until| look.history.arrival_of(until)),
            until: span.until,
            is_untold: span.is_untold,
        });
        Ok(Reply::Timeline {
            compressed: CompressedStatus::of(look.history.segments()),
            damaged: damaged.collect(),
            oldest: look.moment(&oldest),
            newest: look.moment(&newest),
            from: look.moment(&from),
            to: look.moment(&to),
            spans: spans.into_iter().map(span).collect(),
            marks: marks.collect(),
        })
    });
    or_error(told.await)
}

/// What is different between two points.
pub(super) async fn diff(
    registry: &Registry,
    group: &str,
    (from, to): (When, When),
    disk: Option<String>,
    with_ranges: bool,
) -> Reply {
    let told = looking(registry, group, move |look| {
        let (from, to) = (look.resolve(&from)?, look.resolve(&to)?);
        let disks = look.diffs(&from, &to, disk.as_deref(), with_ranges)?;
        Ok(Reply::Diff { from: look.moment(&from), to: look.moment(&to), disks })
    });
    or_error(told.await)
}

pub(super) fn chosen(
    mut disks: Vec<(DiskKey, String, u64)>,
    disk: Option<&str>,
) -> Result<Vec<(DiskKey, String, u64)>, String> {
    let Some(disk) = disk else { return Ok(disks) };
    let names: Vec<_> = disks.iter().map(|(_, name, _)| name.clone()).collect();
    disks.retain(|(_, name, _)| name == disk);
    if disks.is_empty() {
        return Err(format!(
            "there is no disk {disk} at both points; there are: {}",
            names.join(", ")
        ));
    }
    Ok(disks)
}
