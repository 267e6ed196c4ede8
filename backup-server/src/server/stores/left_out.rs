//! The rest that a recovery leaves out: commits that are in a shard's log here, and beyond the final cut.

use tidelock_shard::link::Origin;
use tidelock_shard::{Entry, LogIndex, unix_ns_of};
use tidelock_shard_logs::{EntryReader, LeftOut, ReadError, Store};
use tidelock_standbys::ShardWal;
use tidelock_storage::files::{Files, OpenFile};
use tidelock_wal::{Lsn, WalReader};

/// A shard's log from before the final cut on, to be read on any thread.
pub(super) struct Beyond {
    pub(super) shard: u16,
    origin: Option<Origin>,
    cut: LogIndex,
    /// Begin of reading.
    from: LogIndex,
    entries: Result<EntryReader<OpenFile>, ReadError>,
}

impl Beyond {
    /// The logs of all shards that go beyond the final cut.
    pub(super) fn all(store: &Store<Files>) -> Vec<Self> {
        let log = store.log();
        let of = |shard| {
            let (cut, end) = (log.apply_to(shard)?, log.standing(shard)?.commit.index);
            let origin = store.origin_of(shard).filter(|origin| origin.version > 0).cloned();
            // Records can be told apart from the begin of a segment on.
            let segment =
                origin.as_ref().map_or(1, |origin| u64::from(origin.segment_bytes.max(1)));
            let from = LogIndex(cut.0 - cut.0 % segment);
            let entries = log.entries(shard, from, end);
            (cut < end).then_some(Self { shard, origin, cut, from, entries })
        };
        (0..log.shards()).filter_map(of).collect()
    }

    /// Reads the commits that are left out; at most so many.
    pub(super) fn read(self, max: usize) -> Result<Vec<LeftOut>, String> {
        let entries = self.entries.map_err(|error| error.to_string())?;
        let entries = entries.map(|entry| entry.map_err(|error| error.to_string()));
        match &self.origin {
            Some(origin) => of_wal(origin, self.from, self.cut, entries, max),
            None => of_entries(self.cut, entries, max),
        }
    }
}

/// Each entry that is no NOP, of a store with entries of its own.
fn of_entries(
    cut: LogIndex,
    entries: impl Iterator<Item = Result<Entry, String>>,
    max: usize,
) -> Result<Vec<LeftOut>, String> {
    let updates = entries.filter(|entry| {
        entry.as_ref().map_or(true, |entry| !entry.nop && entry.data.is_some() && entry.end > cut)
    });
    let left_out = updates.take(max).map(|entry| {
        let Entry { end, stamp, .. } = entry?;
        Ok(LeftOut { at: end, unix_ns: unix_ns_of(stamp), transaction: None })
    });
    left_out.collect()
}

/// Each commit that is no NOP, of PostgreSQL's log.
fn of_wal(
    origin: &Origin,
    from: LogIndex,
    cut: LogIndex,
    entries: impl Iterator<Item = Result<Entry, String>>,
    max: usize,
) -> Result<Vec<LeftOut>, String> {
    let wal = ShardWal::of(origin).map_err(|error| error.to_string())?;
    let history = wal.lineage.history().clone();
    let reader = WalReader::new(Lsn(from.0), origin.segment_bytes, history);
    let mut reader = reader.map_err(|error| error.to_string())?.of_system(origin.system_id);
    let mut left_out = Vec::new();
    for entry in entries {
        let entry = entry?;
        let Some(data) = &entry.data else { continue };
        let data = data.data();
        // The first entry may begin before the segment.
        let begin = entry.end.0.saturating_sub(data.len() as u64);
        let skip = usize::try_from(from.0.saturating_sub(begin)).unwrap_or(data.len());
        reader.push(&data[skip.min(data.len())..]);
        for item in reader.by_ref() {
            let item = item.map_err(|error| error.to_string())?;
            let tidelock_wal::Kind::Transaction(of) = &item.kind else { continue };
            if entry.nop || !of.ending.is_commit() || item.end <= Lsn(cut.0) {
                continue;
            }
            let xid = of.two_phase.as_ref().map_or(item.xid, |prepared| prepared.xid);
            let unix_ns = of.stamp.unix_ns().and_then(|ns| u64::try_from(ns).ok());
            left_out.push(LeftOut {
                at: LogIndex(item.end.0),
                unix_ns: unix_ns.unwrap_or_default(),
                transaction: Some(xid.0),
            });
            if left_out.len() == max {
                return Ok(left_out);
            }
        }
    }
    Ok(left_out)
}

#[cfg(test)]
mod tests {
    use super::*;
    use bytes::Bytes;
    use tidelock_protocol::record::Payload;
    use tidelock_shard::stamp_at;

    #[test]
    fn updates_beyond_the_cut_are_listed_and_nops_are_not() {
        let data = || Payload::new(Bytes::from_static(b"x"));
        let entry = |end, ns| Entry::update(LogIndex(end), stamp_at(ns), data());
        let entries = vec![
            Ok(entry(1, 1_000)),
            Ok(entry(2, 2_000)),
            Ok(Entry { nop: true, ..entry(3, 3_000) }),
            Ok(entry(4, 4_000)),
            Ok(entry(5, 5_000)),
        ];
        let of = |max| of_entries(LogIndex(1), entries.clone().into_iter(), max).unwrap();
        assert_eq!(of(10).iter().map(|out| out.at.0).collect::<Vec<_>>(), [2, 4, 5]);
        assert_eq!(of(2).len(), 2);
        assert_eq!(of(10)[0].unix_ns, unix_ns_of(stamp_at(2_000)));
    }
}
