//! The change of the store that has its shards shipped. An entry of the log begins with its stamp, and says whether it is a NOP.

use crate::store::{Shard, encode_put};
use bytes::Bytes;
use std::io;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tidelock_shard_library::{
    Entry, Hlc, LogIndex, LogPoint, NotBelieved, Payload, ReadError, ShardHandle, ShardLog,
    Shipping, StampClock,
};

/// A reply waits for so long at most.
const PATIENCE: Duration = Duration::from_secs(2);
/// An entry's stamp, and its kind.
const HEAD_BYTES: usize = 9;

/// A shard whose log is shipped.
pub struct Shipped {
    inner: Arc<Inner>,
    handle: ShardHandle,
}

struct Inner {
    state: Mutex<State>,
    clock: StampClock,
}

struct State {
    shard: Shard,
    /// The greatest stamp of the log.
    effective: Hlc,
    /// The log may be trimmed up to here.
    b_commit: u64,
    /// Once the shard is led here.
    handle: Option<ShardHandle>,
}

fn stamp_of(entry: &Bytes) -> Hlc {
    Hlc(u64::from_le_bytes(entry[..8].try_into().expect("an entry has a head")))
}

fn put_of(entry: &Bytes) -> Option<Bytes> {
    (entry[8] == 0).then(|| entry.slice(HEAD_BYTES..))
}

impl Inner {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn append(&self, stamp: Hlc, put: Option<&[u8]>) -> io::Result<LogPoint> {
        let mut entry = stamp.0.to_le_bytes().to_vec();
        entry.push(put.is_none().into());
        entry.extend(put.unwrap_or_default());
        let entry = Bytes::from(entry);
        let mut state = self.state();
        state.effective = state.effective.max(stamp);
        let index = LogIndex(state.shard.append(entry.clone())?);
        if let Some(put) = put_of(&entry) {
            state.shard.apply(put);
        }
        let at = LogPoint { index, stamp: state.effective };
        if let Some(handle) = &state.handle {
            handle.committed(at);
        }
        Ok(at)
    }
}

impl Shipped {
    /// Opens the shard, which is led here from now on.
    pub fn open(
        dir: &Path,
        is_durable: bool,
        clock: StampClock,
        shipping: &Shipping,
        number: u16,
    ) -> io::Result<Self> {
        let shard = Shard::open(dir, is_durable, put_of)?;
        let stamps =
            shard.after(shard.head).into_iter().flatten().map(|(_, entry)| stamp_of(entry));
        let effective = stamps.max().unwrap_or_default();
        let committed = LogPoint { index: LogIndex(shard.end()), stamp: effective };
        let log = LogOf {
            id: shard.id,
            inner: Arc::new(Inner {
                state: Mutex::new(State { shard, effective, b_commit: 0, handle: None }),
                clock,
            }),
        };
        let inner = Arc::clone(&log.inner);
        let handle = shipping.lead(number, Box::new(log), committed);
        inner.state().handle = Some(handle.clone());
        Ok(Self { inner, handle })
    }

    /// Stamps, appends and commits; the reply may not leave yet.
    pub fn begin_put(&self, stamp: Hlc, key: &[u8], value: &[u8]) -> io::Result<LogPoint> {
        self.inner.append(stamp, Some(&encode_put(key, value)))
    }

    pub fn put(&self, key: &[u8], value: &[u8]) -> io::Result<()> {
        let stamp = self.inner.clock.begin().map_err(io::Error::other)?;
        let at = self.begin_put(stamp, key, value)?;
        self.inner.clock.wait(at.stamp, PATIENCE).map_err(io::Error::other)
    }

    /// Nothing is returned of an entry whose stamp may not have passed.
    pub fn get(&self, key: &[u8]) -> Result<Option<Bytes>, NotBelieved> {
        let (value, effective) = {
            let state = self.inner.state();
            (state.shard.map.get(key).cloned(), state.effective)
        };
        self.inner.clock.wait(effective, PATIENCE).map(|()| value)
    }

    /// Trims the log; returns its head and its end.
    pub fn compact(&self) -> io::Result<(u64, u64)> {
        let mut state = self.inner.state();
        let b_commit = state.b_commit;
        state.shard.compact(b_commit)?;
        Ok((state.shard.head, state.shard.end()))
    }

    pub fn resign(self) {
        self.handle.resign();
    }
}

struct LogOf {
    id: u64,
    inner: Arc<Inner>,
}

impl ShardLog for LogOf {
    fn id(&self) -> u64 {
        self.id
    }

    fn read(
        &mut self,
        after: LogIndex,
        up_to: LogIndex,
        max_bytes: usize,
    ) -> Result<Vec<Entry>, ReadError> {
        let state = self.inner.state();
        let entries = state.shard.after(after.0).ok_or(ReadError::Trimmed(after))?;
        let mut bytes = 0;
        let entries = entries.take_while(|(index, entry)| {
            bytes += entry.len();
            *index <= up_to.0 && (bytes <= max_bytes || *index == after.0 + 1)
        });
        let shipped = |(index, entry): (u64, &Bytes)| {
            let update =
                Entry::update(LogIndex(index), stamp_of(entry), Payload::new(entry.clone()));
            Entry { nop: put_of(entry).is_none(), ..update }
        };
        Ok(entries.map(shipped).collect())
    }

    fn trim(&mut self, b_commit: LogIndex) {
        self.inner.state().b_commit = b_commit.0;
    }

    fn nop(&mut self) {
        if let Ok(stamp) = self.inner.clock.begin() {
            let _ = self.inner.append(stamp, None);
        }
    }
}
