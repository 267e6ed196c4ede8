//! A disk image with a checksum of each sector, so that nothing is shown that the fold did not write.
//!
//! ```text
//! MEMBER.DISK.img    the disk, raw and sparse
//! MEMBER.DISK.sums   4 bytes for each sector of 512 bytes, little-endian, sparse where the image is:
//!                    0            zeroes, or never written
//!                    0xffffffff   not known: a fold writes to a part of the sector
//!                    else         CRC-32C of the sector, exclusive-or that of a sector of zeroes
//! ```
//!
//! A sum that would be 0xffffffff is stored as 0xfffffffe. Behind the end of an image a sector is zeroes.
//!
//! Invariants:
//! - Of a sector that no record behind the fold's position changes, the sum is the one of what was folded, or not known.
//!   Others are of no matter: nobody reads them here, because the journal has them ([`crate::view`]).
//! - A sector that a record changes in part is read here, too, for its other bytes. So its sum is durably "not known"
//!   before such a fold changes it, and known again only when the image is durable.
//! - A sector that does not fit its sum stays so until all of it is written.
//!
//! Source: the checksums of Linux' dm-integrity without its journal, which the group's own journal makes unnecessary.

use crate::damage::DamagedData;
use std::collections::BTreeSet;
use std::io::{self, IoSlice};
use std::ops::Range;
use std::sync::LazyLock;
use tidelock_planted::Bug;
use tidelock_protocol::record::crc32c;
use tidelock_storage::{Storage, StorageFile};

/// The unit that is checked.
pub const SECTOR_BYTES: u64 = 512;
const SECTOR: usize = SECTOR_BYTES as usize;
const SUM_BYTES: u64 = 4;
/// Read at once to make or to check sums.
const CHUNK_BYTES: u64 = 1 << 20;
/// A fold may write while somebody reads: so often it is read again before the sector is taken for damaged.
const READS_MAX: usize = 4;

const UNKNOWN: u32 = u32::MAX;
static CRC_OF_ZEROES: LazyLock<u32> = LazyLock::new(|| crc32c(&[0; SECTOR]));

fn sum_of(sector: &[u8]) -> u32 {
    match crc32c(sector) ^ *CRC_OF_ZEROES {
        UNKNOWN => UNKNOWN - 1,
        sum => sum,
    }
}

/// Suffix of the names of checksum files.
pub const SUMS: &str = ".sums";

/// The name of the sums beside an image's.
#[must_use]
pub fn sums_path(image_path: &str) -> String {
    format!("{}{SUMS}", image_path.strip_suffix(".img").unwrap_or(image_path))
}

/// An image. Clones are the same one.
#[derive(Clone, Debug)]
pub struct Image<F> {
    data: F,
    sums: F,
}

impl<F: StorageFile> Image<F> {
    /// A new one, of zeroes; durable but for its names. What has them goes.
    pub fn create<S: Storage<File = F>>(
        storage: &S,
        path: &str,
        size_bytes: u64,
    ) -> io::Result<Self> {
        let create = |path: &str| match storage.remove(path) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => Err(e),
            _ => storage.create(path),
        };
        let image = Self { data: create(path)?, sums: create(&sums_path(path))? };
        image.set_size(size_bytes)?;
        Ok(image)
    }

    /// One that is there, of this size or larger.
    pub fn open<S: Storage<File = F>>(
        storage: &S,
        path: &str,
        size_bytes: u64,
    ) -> io::Result<Self> {
        let image = Self { data: storage.open(path)?, sums: storage.open(&sums_path(path))? };
        let needs = size_bytes.div_ceil(SECTOR_BYTES) * SUM_BYTES;
        if image.data.size_bytes()? < size_bytes || image.sums.size_bytes()? < needs {
            return Err(io::Error::other(
                "it, or the file of its checksums, is smaller than the disk",
            ));
        }
        Ok(image)
    }

    /// A file that is there without sums gets them; durable but for their name. All that it holds is read.
    pub fn adopt<S: Storage<File = F>>(
        storage: &S,
        path: &str,
        size_bytes: u64,
    ) -> io::Result<Self> {
        let sums_path = sums_path(path);
        match storage.remove(&sums_path) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
            _ => {}
        }
        let data = storage.open(path)?;
        if data.size_bytes()? != size_bytes {
            return Err(io::Error::other("its size is not the disk's"));
        }
        let image = Self { data, sums: storage.create(&sums_path)? };
        image.set_size(size_bytes)?;
        let mut at = 0;
        while let Some(found) = image.data.next_data(at)? {
            let sectors = found.start / SECTOR_BYTES..found.end.div_ceil(SECTOR_BYTES);
            for sectors in chunks(sectors) {
                let content = image.sectors(sectors.clone())?;
                image.write_sums(sectors.start, content.chunks(SECTOR).map(sum_of))?;
            }
            at = found.end;
        }
        image.data.sync()?;
        image.sums.sync()?;
        Ok(image)
    }

    /// Grows it, durably; what is new is zeroes.
    pub fn set_size(&self, size_bytes: u64) -> io::Result<()> {
        self.sums.set_size(size_bytes.div_ceil(SECTOR_BYTES) * SUM_BYTES)?;
        self.data.set_size(size_bytes)?;
        self.sums.sync()?;
        self.data.sync()
    }

    /// The first range at or after `offset` that may hold anything but zeroes, as the file or its sums say: a hole where
    /// data was is damage.
    pub fn next_data(&self, offset: u64) -> io::Result<Option<Range<u64>>> {
        let data = self.data.next_data(offset)?;
        let end = match &data {
            Some(data) if data.start <= offset => return Ok(Some(data.clone())),
            Some(data) => data.start,
            None => self.data.size_bytes()?,
        };
        let mut hole = sectors_around(&(offset..end.max(offset)));
        while let Some(sums) = self.sums.next_data(hole.start * SUM_BYTES)? {
            let sectors = sums.start / SUM_BYTES..sums.end.div_ceil(SUM_BYTES).min(hole.end);
            for sectors in chunks(sectors.start.max(hole.start)..sectors.end) {
                let sums = self.sums(sectors.clone())?;
                if let Some(nth) = sums.iter().position(|sum| *sum != 0) {
                    let at = (sectors.start + nth as u64) * SECTOR_BYTES;
                    return Ok(Some(at.max(offset)..at + SECTOR_BYTES));
                }
            }
            hole.start = sectors.end;
            if hole.is_empty() {
                break;
            }
        }
        Ok(data)
    }

    /// Fills the whole buffer with what was written. The error is [`DamagedData`] where the disk has something else.
    pub fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<()> {
        let sectors = sectors_around(&(offset..offset + buf.len() as u64));
        for sectors in chunks(sectors) {
            let (content, bad) = self.checked(sectors.clone())?;
            let from = sectors.start * SECTOR_BYTES;
            if let Some(sector) =
                bad.first().filter(|_| !tidelock_planted::is(Bug::ImageNotVerified))
            {
                let at = sector * SECTOR_BYTES;
                return Err(io::Error::other(DamagedData(format!(
                    "the disk image is damaged at byte {at}: what the disk has there is not what was written. It stands \
                     until newer data is written there; `tidelock-backup damaged` says more"
                ))));
            }
            let start = from.max(offset);
            let end = (from + content.len() as u64).min(offset + buf.len() as u64);
            let part = &content[(start - from) as usize..(end - from) as usize];
            buf[(start - offset) as usize..(end - offset) as usize].copy_from_slice(part);
        }
        Ok(())
    }

    /// The parts of a range that are not what was written, with the bytes that were read for that.
    pub fn damaged_in(&self, range: Range<u64>) -> io::Result<(Vec<Range<u64>>, u64)> {
        let (mut damaged, mut read_bytes) = (Vec::<Range<u64>>::new(), 0);
        let mut at = range.start;
        while let Some(found) = self.next_data(at)?.filter(|found| found.start < range.end) {
            let found = found.start.max(at)..found.end.min(range.end);
            for sectors in chunks(sectors_around(&found)) {
                let (content, bad) = self.checked(sectors)?;
                read_bytes += content.len() as u64;
                for sector in bad {
                    let bytes = sector * SECTOR_BYTES..(sector + 1) * SECTOR_BYTES;
                    let bytes = bytes.start.max(range.start)..bytes.end.min(range.end);
                    match damaged.last_mut() {
                        Some(last) if last.end == bytes.start => last.end = bytes.end,
                        _ => damaged.push(bytes),
                    }
                }
            }
            at = found.end;
        }
        Ok((damaged, read_bytes))
    }

    /// Some sectors, and which of them do not fit their sums.
    fn checked(&self, sectors: Range<u64>) -> io::Result<(Vec<u8>, Vec<u64>)> {
        let mut reads = 0;
        loop {
            reads += 1;
            let sums = self.sums(sectors.clone())?;
            let content = self.sectors(sectors.clone())?;
            let all = sectors.clone().zip(sums).zip(content.chunks(SECTOR));
            let bad = all.filter(|((_, sum), sector)| *sum != UNKNOWN && *sum != sum_of(sector));
            let bad: Vec<_> = bad.map(|((sector, _), _)| sector).collect();
            if bad.is_empty() || reads == READS_MAX {
                return Ok((content, bad));
            }
        }
    }

    fn sectors(&self, sectors: Range<u64>) -> io::Result<Vec<u8>> {
        let mut content = vec![0; (sectors.end - sectors.start) as usize * SECTOR];
        let from = sectors.start * SECTOR_BYTES;
        let there = self.data.size_bytes()?.saturating_sub(from).min(content.len() as u64);
        self.data.read_at(&mut content[..there as usize], from)?;
        Ok(content)
    }

    fn sums(&self, sectors: Range<u64>) -> io::Result<Vec<u32>> {
        let mut bytes = vec![0; ((sectors.end - sectors.start) * SUM_BYTES) as usize];
        self.sums.read_at(&mut bytes, sectors.start * SUM_BYTES)?;
        let sums = bytes.chunks_exact(SUM_BYTES as usize);
        Ok(sums.map(|sum| u32::from_le_bytes(sum.try_into().expect("four bytes"))).collect())
    }

    fn write_sums(&self, first: u64, sums: impl Iterator<Item = u32>) -> io::Result<()> {
        let bytes: Vec<u8> = sums.flat_map(u32::to_le_bytes).collect();
        self.sums.write_at(&[IoSlice::new(&bytes)], first * SUM_BYTES)
    }

    /// Begins to change it.
    pub fn change(&self) -> Change<F> {
        Change { image: self.clone(), parts: BTreeSet::new(), bad: BTreeSet::new() }
    }
}

/// Changes of an image, durable together when they have ended.
#[derive(Debug)]
pub struct Change<F> {
    image: Image<F>,
    /// Sectors that are written in part: their sums are made at the end.
    parts: BTreeSet<u64>,
    /// Sectors in `parts` that were damaged before this change: their sums stay as they are.
    bad: BTreeSet<u64>,
}

impl<F: StorageFile> Change<F> {
    /// These sectors will be written in part. Of those in `is_covered` all bytes will be.
    pub fn in_part(
        &mut self,
        sectors: impl IntoIterator<Item = u64>,
        is_covered: impl Fn(Range<u64>) -> bool,
    ) -> io::Result<()> {
        let new: Vec<u64> = sectors.into_iter().filter(|of| !self.parts.contains(of)).collect();
        let mut is_any = false;
        for sector in new {
            let bytes = sector * SECTOR_BYTES..(sector + 1) * SECTOR_BYTES;
            if !is_covered(bytes) && !self.image.checked(sector..sector + 1)?.1.is_empty() {
                self.bad.insert(sector);
                continue;
            }
            self.image.write_sums(sector, [UNKNOWN].into_iter())?;
            self.parts.insert(sector);
            is_any = true;
        }
        if is_any { self.image.sums.sync() } else { Ok(()) }
    }

    /// Writes all the parts, one after the other.
    pub fn write_at(&mut self, parts: &[IoSlice<'_>], offset: u64) -> io::Result<()> {
        self.image.data.write_at(parts, offset)?;
        let len_bytes: u64 = parts.iter().map(|part| part.len() as u64).sum();
        let whole = self.whole_sectors(&(offset..offset + len_bytes));
        let mut bytes = Parts { parts, nth: 0, at: 0 };
        bytes.skip((whole.start * SECTOR_BYTES - offset).min(len_bytes) as usize);
        let mut sector = [0; SECTOR];
        let sums: Vec<u32> = (whole.clone())
            .map(|of| {
                bytes.fill(&mut sector);
                if self.parts.contains(&of) { UNKNOWN } else { sum_of(&sector) }
            })
            .collect();
        self.image.write_sums(whole.start, sums.into_iter())
    }

    /// Makes a range read as zeroes; its blocks stay allocated if so asked.
    pub fn zero_at(&mut self, offset: u64, len_bytes: u64, keep_allocated: bool) -> io::Result<()> {
        self.image.data.zero_at(offset, len_bytes, keep_allocated)?;
        let whole = self.whole_sectors(&(offset..offset + len_bytes));
        let mut at = whole.start;
        let kept: Vec<u64> = self.parts.range(whole.clone()).copied().collect();
        for part in kept.into_iter().chain([whole.end]) {
            if at < part {
                self.image.sums.zero_at(at * SUM_BYTES, (part - at) * SUM_BYTES, false)?;
            }
            at = part + 1;
        }
        Ok(())
    }

    /// The sectors that lie in a range as a whole. Those that are at its ends must have been announced.
    fn whole_sectors(&mut self, range: &Range<u64>) -> Range<u64> {
        let announced = |at: u64| {
            let sector = at / SECTOR_BYTES;
            at.is_multiple_of(SECTOR_BYTES)
                || self.parts.contains(&sector)
                || self.bad.contains(&sector)
        };
        debug_assert!(announced(range.start) && announced(range.end), "{range:?}");
        let whole = range.start.div_ceil(SECTOR_BYTES)..range.end / SECTOR_BYTES;
        let whole = whole.start..whole.end.max(whole.start);
        self.bad.retain(|sector| !whole.contains(sector));
        whole
    }

    /// Makes it all durable. Returns what was damaged before and was written in part: it still is, as a whole.
    pub fn end(self) -> io::Result<Vec<Range<u64>>> {
        self.image.data.sync()?;
        for sector in self.parts {
            let content = self.image.sectors(sector..sector + 1)?;
            self.image.write_sums(sector, [sum_of(&content)].into_iter())?;
        }
        self.image.sums.sync()?;
        let bytes = |sector: u64| sector * SECTOR_BYTES..(sector + 1) * SECTOR_BYTES;
        Ok(self.bad.into_iter().map(bytes).collect())
    }
}

/// Bytes that lie in several pieces.
struct Parts<'a, 'b> {
    parts: &'a [IoSlice<'b>],
    nth: usize,
    at: usize,
}

impl Parts<'_, '_> {
    fn skip(&mut self, mut bytes: usize) {
        while bytes > 0 {
            let left = self.parts[self.nth].len() - self.at;
            let step = left.min(bytes);
            self.advance(step);
            bytes -= step;
        }
    }

    fn fill(&mut self, mut buf: &mut [u8]) {
        while !buf.is_empty() {
            let part = &self.parts[self.nth][self.at..];
            let step = part.len().min(buf.len());
            buf[..step].copy_from_slice(&part[..step]);
            buf = &mut buf[step..];
            self.advance(step);
        }
    }

    fn advance(&mut self, bytes: usize) {
        self.at += bytes;
        if self.at == self.parts[self.nth].len() {
            (self.nth, self.at) = (self.nth + 1, 0);
        }
    }
}

fn sectors_around(range: &Range<u64>) -> Range<u64> {
    range.start / SECTOR_BYTES..range.end.div_ceil(SECTOR_BYTES)
}

/// Sectors that a range has only a part of.
pub fn sectors_in_part(range: &Range<u64>) -> impl Iterator<Item = u64> + use<> {
    let ends = [range.start, range.end].into_iter().filter(|_| !range.is_empty());
    let ends: Vec<u64> = ends.filter(|at| !at.is_multiple_of(SECTOR_BYTES)).collect();
    ends.into_iter().map(|at| at / SECTOR_BYTES)
}

fn chunks(sectors: Range<u64>) -> impl Iterator<Item = Range<u64>> {
    const STEP: u64 = CHUNK_BYTES / SECTOR_BYTES;
    let end = sectors.end;
    sectors.step_by(STEP as usize).map(move |at| at..(at + STEP).min(end))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::damage::is_damage;
    use tidelock_storage::files::Files;
    use tidelock_storage::memory::{Memory, MemoryFile};

    /// Two sectors and a half.
    const SIZE: u64 = 1280;

    fn image(disk: &Memory) -> Image<MemoryFile> {
        Image::create(disk, "a.img", SIZE).unwrap()
    }

    fn write<F: StorageFile>(image: &Image<F>, offset: u64, data: &[u8]) {
        let mut change = image.change();
        let range = offset..offset + data.len() as u64;
        change.in_part(sectors_in_part(&range), |_| false).unwrap();
        let (first, second) = data.split_at(data.len() / 3);
        change.write_at(&[IoSlice::new(first), IoSlice::new(second)], offset).unwrap();
        change.end().unwrap();
    }

    fn read<F: StorageFile>(image: &Image<F>, range: Range<u64>) -> Option<Vec<u8>> {
        let mut found = vec![0xee; (range.end - range.start) as usize];
        match image.read_at(&mut found, range.start) {
            Ok(()) => Some(found),
            Err(error) => {
                assert!(is_damage(&error), "{error}");
                None
            }
        }
    }

    fn damaged<F: StorageFile>(image: &Image<F>) -> Vec<(u64, u64)> {
        let (ranges, _) = image.damaged_in(0..SIZE).unwrap();
        ranges.into_iter().map(|range| (range.start, range.end)).collect()
    }

    #[test]
    fn what_was_not_written_is_not_shown_until_all_of_its_sector_is_written_again() {
        let disk = Memory::new();
        let image = image(&disk);
        write(&image, 0, &[7; SIZE as usize]);
        assert_eq!(read(&image, 0..SIZE), Some(vec![7; SIZE as usize]));
        assert!(damaged(&image).is_empty());
        disk.flip("a.img", 600);
        assert_eq!(damaged(&image), [(512, 1024)]);
        assert_eq!((read(&image, 1000..1001), read(&image, 0..513)), (None, None));
        assert_eq!(read(&image, 1024..SIZE), Some(vec![7; 256]));
        assert_eq!(read(&image, 3..512), Some(vec![7; 509]));
        // Over a part of it, and over what is beside.
        write(&image, 100, &[8; 600]);
        assert_eq!(read(&image, 100..512), Some(vec![8; 412]));
        assert_eq!(damaged(&image), [(512, 1024)]);
        write(&image, 500, &[9; 600]);
        assert_eq!(read(&image, 499..1101), Some([&[8][..], &[9; 600], &[7]].concat()));
        assert!(damaged(&image).is_empty());
    }

    #[test]
    fn a_hole_where_data_was_is_damage_and_no_hole() {
        let dir = tempfile::tempdir().unwrap();
        let disk = Files::new(dir.path().to_owned());
        let image = Image::create(&disk, "a.img", SIZE).unwrap();
        assert!(image.next_data(0).unwrap().is_none() && read(&image, 0..SIZE).is_some());
        write(&image, 512, &[7; 512]);
        let file = disk.open("a.img").unwrap();
        file.set_size(0).unwrap();
        file.set_size(SIZE).unwrap();
        assert_eq!(image.next_data(5).unwrap(), Some(512..1024));
        assert_eq!(damaged(&image), [(512, 1024)]);
        let mut change = image.change();
        change.zero_at(512, 512, false).unwrap();
        change.end().unwrap();
        assert!(damaged(&image).is_empty());
        // And data where nothing was.
        file.write_at(&[IoSlice::new(b"x")], 1030).unwrap();
        assert_eq!(damaged(&image), [(1024, SIZE)]);
    }

    #[test]
    fn an_image_that_is_found_gets_its_sums_and_grows() {
        let disk = Memory::new();
        let file = disk.create("a.img").unwrap();
        file.write_at(&[IoSlice::new(&[3; 700])], 0).unwrap();
        file.set_size(SIZE).unwrap();
        assert!(Image::open(&disk, "a.img", SIZE).is_err(), "it has no sums");
        assert!(Image::adopt(&disk, "a.img", SIZE + 1).is_err());
        let image = Image::adopt(&disk, "a.img", SIZE).unwrap();
        image.set_size(4 * SIZE).unwrap();
        let image = Image::open(&disk, "a.img", 4 * SIZE).unwrap();
        let expected = [&[3; 700][..], &[0; 4 * SIZE as usize - 700]].concat();
        assert_eq!(read(&image, 0..4 * SIZE), Some(expected));
        assert!(Image::open(&disk, "a.img", 4 * SIZE + 1).is_err());
    }
}
