//! A local disk of the primary site: what is read, what is durable, and what a power loss leaves.

use crate::rng::Rng;
use std::collections::BTreeMap;
use std::ops::Range;

/// What the disk writes atomically.
pub const SECTOR_BYTES: u64 = 512;

/// A disk.
#[derive(Clone, Debug)]
pub struct LocalDisk {
    live: Vec<u8>,
    durable: Vec<u8>,
    /// Sectors in which the two may differ, with the number of the last write there.
    dirty: BTreeMap<u64, u64>,
    writes: u64,
}

impl LocalDisk {
    /// A disk with this content, durably.
    #[must_use]
    pub fn new(content: Vec<u8>) -> Self {
        Self { durable: content.clone(), live: content, dirty: BTreeMap::new(), writes: 0 }
    }

    /// What is read.
    #[must_use]
    pub fn live(&self) -> &[u8] {
        &self.live
    }

    /// What a power loss leaves at least.
    #[must_use]
    pub fn durable(&self) -> &[u8] {
        &self.durable
    }

    /// Where a power loss may take back what is read now, in bytes.
    pub fn unsynced(&self) -> impl Iterator<Item = u64> + '_ {
        self.dirty.keys().map(|sector| sector * SECTOR_BYTES)
    }

    /// The same as sectors, with the number of the last write to each.
    pub fn writes_unsynced(&self) -> impl Iterator<Item = (u64, u64)> + '_ {
        self.dirty.iter().map(|(sector, write)| (*sector, *write))
    }

    /// The number of the last write.
    #[must_use]
    pub fn last_write(&self) -> u64 {
        self.writes
    }

    /// Its size.
    #[must_use]
    pub fn size_bytes(&self) -> u64 {
        self.live.len() as u64
    }

    /// It becomes larger, durably: this follows what it holds.
    pub fn grow(&mut self, content: &[u8]) {
        self.live.extend_from_slice(content);
        self.durable.extend_from_slice(content);
    }

    /// A byte of it changes by itself, for good.
    pub fn spoil(&mut self, offset: u64) {
        self.live[offset as usize] ^= 0x40;
        self.durable[offset as usize] ^= 0x40;
    }

    /// Writes; durable at once if so asked.
    pub fn write(&mut self, offset: u64, data: &[u8], durable: bool) {
        let (from, to) = (offset as usize, offset as usize + data.len());
        self.live[from..to].copy_from_slice(data);
        self.writes += 1;
        let sectors = sectors(offset..offset + data.len() as u64);
        for sector in sectors {
            if durable {
                self.settle(sector, true);
            } else {
                self.dirty.insert(sector, self.writes);
            }
        }
    }

    /// A flush has ended.
    pub fn sync(&mut self) {
        let dirty = std::mem::take(&mut self.dirty);
        for sector in dirty.into_keys() {
            self.settle(sector, true);
        }
    }

    /// The power fails: each sector that was not flushed is the old one or the new one.
    pub fn power_loss(&mut self, rng: &mut Rng) {
        let dirty = std::mem::take(&mut self.dirty);
        let keep_percent = *rng.pick(&[0, 20, 50, 95]);
        for sector in dirty.into_keys() {
            self.settle(sector, rng.chance(keep_percent, 100));
        }
    }

    fn settle(&mut self, sector: u64, keep: bool) {
        let from = (sector * SECTOR_BYTES) as usize;
        let to = self.live.len().min(from + SECTOR_BYTES as usize);
        if keep {
            self.durable[from..to].copy_from_slice(&self.live[from..to]);
        } else {
            self.live[from..to].copy_from_slice(&self.durable[from..to]);
        }
        self.dirty.remove(&sector);
    }
}

/// The sectors that a range touches.
pub fn sectors(range: Range<u64>) -> Range<u64> {
    range.start / SECTOR_BYTES..range.end.div_ceil(SECTOR_BYTES)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_power_loss_keeps_what_was_flushed() {
        let mut disk = LocalDisk::new(vec![0; 2048]);
        disk.write(0, &[1; 512], false);
        disk.sync();
        disk.write(512, &[2; 512], true);
        disk.write(1000, &[3; 100], false);
        let mut kept = std::collections::BTreeSet::new();
        for seed in 0..20 {
            let mut after = disk.clone();
            after.power_loss(&mut Rng::new(seed));
            assert_eq!((after.live[0], after.live[600]), (1, 2));
            // Two sectors, each by itself.
            kept.insert((after.live[1023], after.live[1024]));
        }
        assert!(kept.contains(&(2, 0)) && kept.contains(&(3, 3)), "{kept:?}");
    }
}
