//! A shard of a tiny key-value store, without Tidelock: a map, and a write-ahead log in one file beside a snapshot of the map.
//!
//! An entry of the log is bytes, and counted from 1. In the file: length, checksum, bytes.

use bytes::Bytes;
use std::collections::{BTreeMap, VecDeque};
use std::fs::{self, File, OpenOptions};
use std::hash::{BuildHasher, RandomState};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

pub struct Shard {
    dir: PathBuf,
    /// Made with the log.
    pub id: u64,
    log: File,
    /// The entries of the file.
    entries: VecDeque<Bytes>,
    /// The end of what is not in the file any more.
    pub head: u64,
    pub map: BTreeMap<Bytes, Bytes>,
    /// False: only `compact` writes, for measurements.
    is_durable: bool,
}

fn checksum(bytes: &[u8]) -> u32 {
    bytes.iter().fold(0x811c_9dc5, |sum, byte| (sum ^ u32::from(*byte)).wrapping_mul(0x0100_0193))
}

fn framed(bytes: &[u8]) -> Vec<u8> {
    let mut frame = (bytes.len() as u32).to_le_bytes().to_vec();
    frame.extend(checksum(bytes).to_le_bytes());
    frame.extend(bytes);
    frame
}

/// Takes whole frames; what is torn at the end was never acknowledged.
fn unframed(mut bytes: &[u8]) -> Vec<Bytes> {
    let mut frames = Vec::new();
    while let Some((head, rest)) = bytes.split_first_chunk::<8>() {
        let (len, sum) = (u32::from_le_bytes(head[..4].try_into().unwrap()), &head[4..]);
        let Some((frame, rest)) = rest.split_at_checked(len as usize) else { break };
        if checksum(frame).to_le_bytes() != sum {
            break;
        }
        frames.push(Bytes::copy_from_slice(frame));
        bytes = rest;
    }
    frames
}

pub fn encode_put(key: &[u8], value: &[u8]) -> Vec<u8> {
    let mut put = (key.len() as u16).to_le_bytes().to_vec();
    put.extend(key);
    put.extend(value);
    put
}

impl Shard {
    /// Opens a shard, or makes it. `op` finds what an entry puts: nothing, if it has none.
    pub fn open(
        dir: &Path,
        is_durable: bool,
        op: impl Fn(&Bytes) -> Option<Bytes>,
    ) -> io::Result<Self> {
        fs::create_dir_all(dir)?;
        let read = |name: &str| match fs::read(dir.join(name)) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
            read => read,
        };
        // First frame of the snapshot: the log's identity, and the position that the map is of.
        let snapshot = unframed(&read("snapshot")?);
        let number = |at: usize| {
            let bytes = snapshot.first().and_then(|first| first.get(at..at + 8));
            bytes.map(|bytes| u64::from_le_bytes(bytes.try_into().unwrap()))
        };
        let id = number(0).unwrap_or_else(|| RandomState::new().hash_one(0) | 1);
        let applied = number(8).unwrap_or(0);
        let mut log = unframed(&read("log")?).into_iter();
        let head = log.next().map_or(0, |first| u64::from_le_bytes(first[..8].try_into().unwrap()));
        let (map, entries) = (BTreeMap::new(), log.collect());
        let file = OpenOptions::new().append(true).create(true).open(dir.join("log"))?;
        let mut shard = Self { dir: dir.to_owned(), id, log: file, entries, head, map, is_durable };
        snapshot.iter().skip(1).for_each(|put| shard.apply(put.clone()));
        for index in applied + 1..=shard.end() {
            let entry = &shard.entries[(index - head - 1) as usize];
            op(entry).into_iter().for_each(|put| shard.apply(put));
        }
        shard.compact(head)?;
        Ok(shard)
    }

    pub fn end(&self) -> u64 {
        self.head + self.entries.len() as u64
    }

    pub fn apply(&mut self, mut put: Bytes) {
        let len = u16::from_le_bytes(put.split_to(2)[..].try_into().unwrap());
        let key = put.split_to(len.into());
        self.map.insert(key, put);
    }

    /// Appends an entry, and makes it durable: there is one replica. Returns its number.
    pub fn append(&mut self, entry: Bytes) -> io::Result<u64> {
        if self.is_durable {
            self.log.write_all(&framed(&entry))?;
            self.log.sync_data()?;
        }
        self.entries.push_back(entry);
        Ok(self.end())
    }

    /// Entries after a number. [`None`]: they are gone.
    pub fn after(&self, index: u64) -> Option<impl Iterator<Item = (u64, &Bytes)>> {
        let skip = usize::try_from(index.checked_sub(self.head)?).ok()?;
        Some((index + 1..).zip(self.entries.range(skip.min(self.entries.len())..)))
    }

    /// Trims the log up to a number: what is before it is in the snapshot.
    pub fn compact(&mut self, up_to: u64) -> io::Result<()> {
        let mut snapshot = framed(&[self.id.to_le_bytes(), self.end().to_le_bytes()].concat());
        self.map.iter().for_each(|(key, value)| snapshot.extend(framed(&encode_put(key, value))));
        let gone = up_to.clamp(self.head, self.end()) - self.head;
        self.entries.drain(..gone as usize);
        self.head += gone;
        let mut log = framed(&self.head.to_le_bytes());
        self.entries.iter().for_each(|entry| log.extend(framed(entry)));
        // The snapshot first: entries that it has already are not applied again.
        for (name, bytes) in [("snapshot", snapshot), ("log", log)] {
            let new = self.dir.join("new");
            fs::write(&new, bytes)?;
            File::open(&new)?.sync_all()?;
            fs::rename(&new, self.dir.join(name))?;
        }
        File::open(&self.dir)?.sync_all()?;
        self.log = OpenOptions::new().append(true).open(self.dir.join("log"))?;
        Ok(())
    }
}
