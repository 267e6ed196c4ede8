//! Operators who use the past (rule 5): points as they are written, differences between two of them, digests, increments,
//! scratch disks and the search for a first bad instant ([`tidelock_replica::travel`]), each compared with the oracle's
//! replay. Snapshots are in [`crate::snapshots`].
//!
//! Random numbers are drawn apart from all others, so that nothing else in a run depends on these checks.

use crate::failure::{Checked, Checker, check, fail};
use crate::past::Asked;
use crate::rng::Rng;
use crate::world::World;
use std::collections::BTreeMap;
use std::fmt::Debug;
use std::ops::Range;
use tidelock_protocol::hlc::Hlc;
use tidelock_protocol::ids::{DiskId, WriterId};
use tidelock_replica::group::{Group, NamedMark};
use tidelock_replica::history::{At, History, PastError, PastView, Point, RecordAt};
use tidelock_replica::travel::bisect::{Bisect, Verdict};
use tidelock_replica::travel::digest::{self, Whole};
use tidelock_replica::travel::disk::Disk;
use tidelock_replica::travel::increment::{self, Description, IncrementError, Piece};
use tidelock_replica::travel::moment::Moment;
use tidelock_replica::travel::scratch::{BLOCK_BYTES, Quota, Scratch};
use tidelock_replica::travel::when::{FindError, When};
use tidelock_storage::Storage;
use tidelock_storage::memory::{Memory, MemoryFile};
use tidelock_store::extents::DiskKey;

/// Keeps these numbers apart from those of others who draw from the same place.
const SALT: u64 = 0x7472_6176;
/// Resolutions of one search: a span of times has 64 halves, and the last of them may be seen already.
const LOOKS_MAX: u32 = 256;

/// Views of a point.
pub(crate) type Views = BTreeMap<DiskKey, PastView<MemoryFile>>;

/// A point as production and the oracle show it.
pub(crate) struct Place {
    pub(crate) point: Point,
    pub(crate) views: Views,
    /// The oracle's disks, each of its view's size.
    pub(crate) content: BTreeMap<DiskKey, Vec<u8>>,
}

/// Fails if production did not do what it always can.
pub(crate) fn must<T, E: Debug>(result: Result<T, E>, what: impl FnOnce() -> String) -> Checked<T> {
    result.or_else(|error| fail(Checker::Past, format!("{}: {error:?}", what())))
}

/// A disk at two points: production's view of the later one, the oracle's content of both.
struct Changes<'a> {
    name: String,
    view: &'a PastView<MemoryFile>,
    ranges: Vec<Range<u64>>,
    from: (Moment, &'a [u8]),
    to: (Moment, &'a [u8]),
}

impl World {
    /// Operators look at a group's status, and use its past.
    pub(crate) fn travel(&mut self, group: usize, of: &Group<Memory>) -> Checked {
        self.check_status(group, of)?;
        let mut rng = Rng::new(self.rng.clone().number() ^ SALT);
        if !rng.chance(1, 6) {
            return Ok(());
        }
        let Ok(past) = of.history() else { return Ok(()) };
        // A group without a record has no point to ask for.
        if past.oldest_time() > past.newest_time() || past.newest_time().physical_ms() == 0 {
            return Ok(());
        }
        let marks = of.marks();
        let first = self.find_point(group, of, &past, &marks, &mut rng)?;
        let second = self.find_point(group, of, &past, &marks, &mut rng)?;
        let (Some(first), Some(second)) = (first, second) else { return Ok(()) };
        let (from, to) = if second.point.cut.covers(&first.point.cut) {
            (first, second)
        } else {
            (second, first)
        };
        self.counts.travels += 1;
        check_between(&past, &from, &to, &mut rng)?;
        let keys: Vec<DiskKey> = to.content.keys().copied().collect();
        if keys.is_empty() {
            return Ok(());
        }
        let key = *rng.pick(&keys);
        check_digest(&to.views[&key], &to.content[&key])?;
        check_scratch(to.views[&key].clone(), &to.content[&key], &mut rng)?;
        if rng.chance(1, 2) {
            self.bisect(group, &past, (&from, &to), key, &mut rng)?;
        }
        if rng.chance(1, 2) {
            crate::snapshots::together(&past, &from, &to)?;
        }
        self.keep_snapshot(group, &past, to, &mut rng)
    }

    /// A point that an operator writes down, and what there is at it; `None`: there is none.
    fn find_point(
        &mut self,
        group: usize,
        of: &Group<Memory>,
        past: &History<MemoryFile>,
        marks: &[NamedMark],
        rng: &mut Rng,
    ) -> Checked<Option<Place>> {
        let (oldest, newest) = (past.oldest_time(), past.newest_time());
        let (oldest_ms, now_ms) = (past.oldest_ms(), past.now_ms());
        let ms = oldest_ms + rng.below(now_ms.saturating_sub(oldest_ms).max(1));
        let when = match rng.below(6) {
            0 => When::Latest,
            1 => When::Oldest,
            2 if ms < now_ms => When::WallMs(ms),
            3 if ms < now_ms => When::BeforeNowMs(now_ms - ms),
            4 if !marks.is_empty() => When::Bookmark(rng.pick(marks).name.clone()),
            _ => When::Hlc(Hlc(oldest.0 + rng.below(newest.0 - oldest.0 + 1))),
        };
        let is_mark = matches!(when, When::Bookmark(_));
        let what = format!("group {group} at {when}");
        let point = match read_again(&when)?.find(past, marks) {
            Ok(point) => point,
            Err(FindError::Past(PastError::Initialising { .. } | PastError::LeftOut { .. })) => {
                return Ok(None);
            }
            // Bookmarks and lost pins do not keep their points.
            Err(FindError::Past(_)) if is_mark => return Ok(None),
            Err(error) => return fail(Checker::Past, format!("{what}: {error}")),
        };
        let is_late = match when {
            When::WallMs(_) | When::BeforeNowMs(_) => point.arrived_ms > ms,
            When::Hlc(time) => point.hlc > time,
            _ => false,
        };
        check(!is_late, Checker::Past, || format!("{what} is after it: {point:?}"))?;
        if !of.state().recoveries.iter().any(|start| start.epoch == point.epoch) {
            self.check_closed(group, &point.cut)?;
        }
        // Names of a point lead to it again, but of several writers other points may have the same time.
        let moment = Moment::new(&point, past.manifest());
        let mut names = Vec::new();
        // Members that are not named are not limited.
        let are_all_named = moment.seqs.len() == past.manifest().writers.len();
        if are_all_named && !is_mark && of.state().recoveries.is_empty() {
            names.push(must(moment.seqs_text().parse::<When>(), || what.clone())?);
        }
        if matches!(when, When::Hlc(_)) {
            names.push(must(format!("hlc:{}", moment.hlc).parse::<When>(), || what.clone())?);
        }
        let found = names.iter().map(|name| (name.clone(), name.find(past, marks)));
        let located = past.locate(&point).map_err(FindError::from);
        for (name, again) in found.chain([(when.clone(), located)]) {
            let is_same = again.as_ref().is_ok_and(|again| again.cut == point.cut);
            check(is_same, Checker::Past, || {
                format!("{what} is {point:?}, told as {name}, and that is {again:?}")
            })?;
        }
        let views = match past.open(&point) {
            Err(PastError::BeforeWindow { .. }) if is_mark => return Ok(None),
            opened => must(opened, || what)?,
        };
        self.counts.pasts += 1;
        let asked = Asked { time: point.hlc, point };
        self.check_views(group, &asked, &views)?;
        let content = self.content_at(group, &asked.point, &views)?;
        Ok(Some(Place { point: asked.point, views, content }))
    }

    /// The oracle's disks at a point, each of its view's size.
    pub(crate) fn content_at(
        &mut self,
        group: usize,
        point: &Point,
        views: &Views,
    ) -> Checked<BTreeMap<DiskKey, Vec<u8>>> {
        let mut all = BTreeMap::new();
        for vm in self.plan.groups[group].vms.clone() {
            let writer = WriterId(self.plan.vms[vm].writer);
            let Some(disks) = self.disks_at(vm, point)? else { continue };
            for (nth, content) in disks.iter().enumerate() {
                let key = DiskKey { writer, disk: DiskId(nth as u16) };
                if let Some(view) = views.get(&key) {
                    let mut content = content.clone();
                    content.resize(view.size_bytes() as usize, 0);
                    all.insert(key, content);
                }
            }
        }
        Ok(all)
    }

    /// The first instant at which a byte is what it is at the later point.
    fn bisect(
        &mut self,
        group: usize,
        past: &History<MemoryFile>,
        (from, to): (&Place, &Place),
        key: DiskKey,
        rng: &mut Rng,
    ) -> Checked {
        let Some(before) = from.content.get(&key) else { return Ok(()) };
        let after = &to.content[&key];
        let differing: Vec<usize> =
            (0..before.len().min(after.len())).filter(|at| before[*at] != after[*at]).collect();
        let times = past.oldest_time()..=past.newest_time();
        let (low, high) = (from.point.hlc, to.point.hlc);
        // Times name both, and no other state.
        let is_at = |time: Hlc, point: &Point| {
            times.contains(&time)
                && past.resolve(&At::Hlc(time)).is_ok_and(|found| found.cut == point.cut)
        };
        let is_named = low < high && is_at(low, &from.point) && is_at(high, &to.point);
        if differing.is_empty() || !is_named {
            return Ok(());
        }
        let at = *rng.pick(&differing);
        let mut search = Bisect::new(low.0, high.0, 0);
        let mut looks = 0;
        while let Some(time) = search.next() {
            looks += 1;
            let point = match past.resolve(&At::Hlc(Hlc(time))) {
                Ok(point) if looks < LOOKS_MAX => point,
                // The group has had no state for a while.
                Err(PastError::Initialising { .. } | PastError::LeftOut { .. }) => return Ok(()),
                found => {
                    return fail(Checker::Past, format!("group {group}, {search:?}: {found:?}"));
                }
            };
            let beginning = point.hlc.0.min(time);
            if !search.resolved(time, beginning) {
                continue;
            }
            let views = must(past.open(&point), || format!("group {group} at {point:?}"))?;
            let mut byte = [0];
            let read = views.get(&key).map_or(Ok(()), |view| view.read(at as u64, &mut byte));
            must(read, || format!("group {group} at {point:?}"))?;
            let is_bad = byte[0] == after[at];
            search.tested(time, beginning, if is_bad { Verdict::Bad } else { Verdict::Good });
        }
        let outcome = search.outcome();
        let exact = !outcome.is_given_up && outcome.skipped.is_empty();
        let mut is_bad_at = |time: u64| -> Checked<bool> {
            let found = past.resolve(&At::Hlc(Hlc(time)));
            let point = must(found, || format!("group {group} at {}", Hlc(time)))?;
            let views = must(past.open(&point), || format!("group {group} at {point:?}"))?;
            let content = self.content_at(group, &point, &views)?;
            Ok(content.get(&key).is_some_and(|disk| disk[at] == after[at]))
        };
        let is_found = exact && is_bad_at(outcome.bad)? && !is_bad_at(outcome.bad - 1)?;
        check(is_found, Checker::Past, || {
            format!(
                "group {group}: byte {at} of {key:?} changes between {low} and {high}, not at {outcome:?}"
            )
        })
    }
}

/// Prints a point in time and parses it again.
fn read_again(when: &When) -> Checked<When> {
    let again = must(when.to_string().parse::<When>(), || format!("{when:?}"))?;
    check(again == *when, Checker::Past, || format!("{when:?} is printed as {when}: {again:?}"))?;
    Ok(again)
}

/// Checks records, timeline and changed extents between two points: all that differs, and nothing else.
fn check_between(past: &History<MemoryFile>, from: &Place, to: &Place, rng: &mut Rng) -> Checked {
    let (a, b) = (&from.point, &to.point);
    let what = || format!("from {a:?} to {b:?}");
    let records = must(past.records(a, b, usize::MAX), what)?;
    let mut last: BTreeMap<WriterId, u64> = a.cut.entries().map(|(w, seq)| (w, seq.0)).collect();
    for record in &records {
        let RecordAt { writer, seq, hlc, arrived_ms, .. } = *record;
        let before = last.insert(writer, seq.0).unwrap_or_default();
        let is_inside = seq > a.cut.get(writer) && seq <= b.cut.get(writer);
        let is_next = seq.0 == before + 1 || before == 0;
        let is_in_time = hlc <= b.hlc && arrived_ms <= b.arrived_ms;
        check(is_inside && is_next && is_in_time, Checker::Past, || {
            format!("{}: {record:?} after {before}", what())
        })?;
    }
    let some = rng.index(records.len() + 1);
    check(must(past.records(a, b, some), what)? == records[..some], Checker::Past, || {
        format!("{}: the first {some} records", what())
    })?;
    check_timeline(past, (a, b), &records, rng)?;
    for (key, after) in &to.content {
        let Some(before) = from.content.get(key) else { continue };
        // The order of the two must not matter.
        let (x, y) = if rng.chance(1, 2) { (a, b) } else { (b, a) };
        let ranges: Vec<_> = must(past.changed(x, y, *key), what)?.collect();
        let mut told = vec![false; after.len().max(before.len())];
        ranges.iter().for_each(|range| told[range.start as usize..range.end as usize].fill(true));
        let is_in_order = ranges.windows(2).all(|two| two[0].end < two[1].start);
        let byte = |of: &[u8], at: usize| of.get(at).copied().unwrap_or(0);
        let untold = (0..told.len()).find(|at| !told[*at] && byte(before, *at) != byte(after, *at));
        check(is_in_order && untold.is_none(), Checker::Past, || {
            format!("{}: {key:?} differs at {untold:?}, told is {ranges:?}", what())
        })?;
        for record in records.iter().filter_map(|record| record.extent) {
            let (_, offset, len) = record;
            if record.0 == *key {
                told[offset as usize..(offset + len) as usize].fill(false);
            }
        }
        check(!told.contains(&true), Checker::Past, || {
            format!(
                "{}: no record of {key:?} is where it is told to have changed: {ranges:?}",
                what()
            )
        })?;
        let moment = |point| Moment::new(point, past.manifest());
        let changes = Changes {
            name: past.manifest().disk_name(*key),
            view: &to.views[key],
            ranges: ranges.clone(),
            from: (moment(a), before),
            to: (moment(b), after),
        };
        check_increment(&changes, rng)?;
        // Increments go backwards in time alike.
        let (view, from, to) = (&from.views[key], changes.to, changes.from);
        check_increment(&Changes { name: changes.name, view, ranges, from, to }, rng)?;
    }
    Ok(())
}

fn check_timeline(
    past: &History<MemoryFile>,
    (from, to): (&Point, &Point),
    records: &[RecordAt],
    rng: &mut Rng,
) -> Checked {
    let count = rng.range(1..9) as usize;
    let what = || format!("from {from:?} to {to:?}");
    let spans = must(past.timeline(from, to, count), what)?;
    let changes = || records.iter().filter_map(|record| record.extent);
    let sums = spans.iter().fold((0, 0, 0), |(records, bytes, of_disks), span| {
        (records + span.records, bytes + span.bytes, of_disks + span.disks.values().sum::<u64>())
    });
    let bytes: u64 = changes().map(|(_, _, len)| len).sum();
    let is_whole = sums == (changes().count() as u64, bytes, bytes);
    let edges = spans.windows(2).all(|two| two[0].to_ms == two[1].from_ms);
    let (first, last) = (spans.first().map(|span| span.from_ms), spans.last().map(|of| of.to_ms));
    let ends = (first, last) == (Some(from.arrived_ms), Some(to.arrived_ms.max(from.arrived_ms)));
    let flushes: u64 = spans.iter().map(|span| span.flushes).sum();
    let flushed = records.iter().filter(|record| record.flushed).count() as u64;
    let is_right = is_whole && edges && ends && spans.len() == count && flushes <= flushed;
    check(is_right, Checker::Past, || format!("{}: {records:?} are told as {spans:?}", what()))
}

/// Applies an increment to the one state, which gives the other. Cut off or damaged it is refused.
fn check_increment(of: &Changes<'_>, rng: &mut Rng) -> Checked {
    let (before, after) = (of.from.1, of.to.1);
    let description = Description {
        group: "simulated".to_owned(),
        disk: of.name.clone(),
        size_bytes: of.view.size_bytes(),
        from: of.from.0.clone(),
        to: of.to.0.clone(),
    };
    let what = || format!("an increment of {description:?}");
    // A disk that was smaller has nothing beyond its end.
    let size = of.view.size_bytes();
    let ranges = of.ranges.iter().map(|range| range.start..range.end.min(size));
    let inside = ranges.filter(|range| !range.is_empty());
    let mut writer = must(increment::Writer::new(of.view.clone(), &description, inside), what)?;
    let mut file = Vec::new();
    while let Some(part) = must(writer.next_part(), what)? {
        file.extend(part);
    }
    let mut image = before.to_vec();
    image.resize(after.len(), 0);
    let (described, total) = must(apply(&file, &mut image), what)?;
    let bytes: u64 =
        of.ranges.iter().map(|range| range.end.min(size).saturating_sub(range.start)).sum();
    let is_right = described == description && image == after && total.len_bytes == bytes;
    check(is_right, Checker::Past, || {
        format!("{} of {:?} gives another state: {total:?}", what(), of.ranges)
    })?;
    let cut = rng.index(file.len());
    let mut damaged = file.clone();
    let at = rng.index(file.len());
    damaged[at] ^= 1 << rng.below(8);
    for bad in [&file[..cut], &damaged] {
        check(apply(bad, &mut image.clone()).is_err(), Checker::Past, || {
            format!("{} cut at {cut} or damaged at {at} is taken", what())
        })?;
    }
    Ok(())
}

fn apply(
    file: &[u8],
    image: &mut [u8],
) -> Result<(Description, increment::Extent), IncrementError> {
    increment::read(file, |_, piece| {
        let at = |extent: increment::Extent| {
            extent.offset as usize..(extent.offset + extent.len_bytes) as usize
        };
        match piece {
            Piece::Data(extent, data) => image[at(extent)].copy_from_slice(data),
            Piece::Zero(extent) => image[at(extent)].fill(0),
        }
        Ok(())
    })
}

/// The digest of a disk's content, which is in memory.
pub(crate) fn digest_of(content: &[u8]) -> digest::Digest {
    let mut whole = Whole::default();
    for block in content.chunks(digest::BLOCK_BYTES as usize) {
        whole.add(&digest::of_block(block));
    }
    whole.end()
}

fn check_digest(view: &PastView<MemoryFile>, content: &[u8]) -> Checked {
    let found = must(digest::of_disk(view, |_| Ok(())), || "a digest".to_owned())?;
    check(found == digest_of(content), Checker::Past, || {
        format!("the digest of {} bytes is another one", content.len())
    })
}

/// Writes to a disk on top of a view, which stays what it was.
fn check_scratch(view: PastView<MemoryFile>, below: &[u8], rng: &mut Rng) -> Checked {
    let size = below.len() as u64;
    let blocks = size.div_ceil(BLOCK_BYTES);
    let quota = std::sync::Arc::new(Quota::new(rng.range(1..blocks + 2) * BLOCK_BYTES));
    let what = || format!("a scratch disk of {size} bytes, {quota:?}");
    let file = must(Memory::new().create("scratch"), what)?;
    let scratch = must(Scratch::new(view, file, quota.clone()), what)?;
    let mut expected = below.to_vec();
    for _ in 0..rng.range(1..12) {
        let offset = rng.below(size);
        let len = rng.range(1..3 * BLOCK_BYTES).min(size - offset);
        let part = offset as usize..(offset + len) as usize;
        let byte = rng.number() as u8;
        let (done, byte) = match rng.below(4) {
            0 => (scratch.zero(offset, len, rng.chance(1, 2)), Some(0)),
            1 => (scratch.flush(), None),
            _ => (scratch.write(offset, &vec![byte; len as usize]), Some(byte)),
        };
        let is_full = done.as_ref().is_err_and(tidelock_storage::is_full);
        check(done.is_ok() || is_full, Checker::Past, || format!("{}: {done:?}", what()))?;
        match byte {
            Some(byte) if done.is_ok() => expected[part].fill(byte),
            // Zeroes are made part by part.
            Some(0) => {
                let mut found = vec![0; part.len()];
                must(scratch.read(offset, &mut found), what)?;
                let either =
                    expected[part.clone()].iter().zip(&found).all(|(a, b)| *b == 0 || a == b);
                check(either, Checker::Past, || format!("{} after zeroes were refused", what()))?;
                expected[part].copy_from_slice(&found);
            }
            _ => {}
        }
        check(quota.used_bytes() <= quota.max_bytes(), Checker::Past, what)?;
    }
    let mut found = vec![0; size as usize];
    must(scratch.read(0, &mut found), what)?;
    check(found == expected, Checker::Past, || format!("{} has other content", what()))?;
    must(scratch.lower().read(0, &mut found), what)?;
    check(found == below, Checker::Past, || format!("{} has changed what is below", what()))?;
    let mut at = 0;
    let described = scratch.describe(0..size, &mut |len, content| {
        let part = &expected[at..at + len as usize];
        at += len as usize;
        content == tidelock_store::view::Content::Data || part.iter().all(|byte| *byte == 0)
    });
    must(described, what)?;
    check(at as u64 == size, Checker::Past, || format!("{} is described up to {at}", what()))
}
