//! A directory of segment files and history files, under the names that PostgreSQL gives them.

use std::collections::BTreeMap;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use tidelock_pgstream::Position;
use tidelock_wal::{Lsn, TimelineId};

/// The directory.
#[derive(Clone, Debug)]
pub struct Segments {
    directory: PathBuf,
    segment_bytes: u64,
}

impl Segments {
    pub fn new(directory: &Path, segment_bytes: u32) -> Segments {
        Segments { directory: directory.into(), segment_bytes: u64::from(segment_bytes) }
    }

    /// The file that holds a position, and where in it.
    fn place(&self, position: Position) -> (PathBuf, u64) {
        let (number, at) = (position.at.0 / self.segment_bytes, position.at.0 % self.segment_bytes);
        let in_file = (1 << 32) / self.segment_bytes;
        let (upper, lower) = (number / in_file, number % in_file);
        let name = format!("{:08X}{upper:08X}{lower:08X}", position.timeline.0);
        (self.directory.join(name), at)
    }

    /// Appends log; it is durable when this returns.
    #[allow(dead_code)]
    pub fn append(&self, mut position: Position, mut bytes: &[u8]) -> io::Result<()> {
        while !bytes.is_empty() {
            let (path, at) = self.place(position);
            let left = usize::try_from(self.segment_bytes - at).unwrap_or(usize::MAX);
            let (part, rest) = bytes.split_at(bytes.len().min(left));
            let is_new = !path.exists();
            let file = OpenOptions::new().create(true).truncate(false).write(true).open(path)?;
            file.write_all_at(part, at)?;
            file.sync_data()?;
            if is_new {
                File::open(&self.directory)?.sync_all()?;
            }
            position.at.0 += part.len() as u64;
            bytes = rest;
        }
        Ok(())
    }

    /// Gives a timeline that begins within a segment its own file of it, as PostgreSQL does.
    #[allow(dead_code)]
    pub fn branch(&self, from: TimelineId, to: Position) -> io::Result<()> {
        let (_, at) = self.place(to);
        let begin = Lsn(to.at.0 - at);
        let mut shared = vec![0; usize::try_from(at).unwrap_or(0)];
        if !shared.is_empty() {
            let (path, _) = self.place(Position { timeline: from, at: begin });
            File::open(path)?.read_exact_at(&mut shared, 0)?;
            self.append(Position { at: begin, ..to }, &shared)?;
        }
        Ok(())
    }

    /// Reads log, not past the end of a segment. `earlier`: timelines whose files may hold it as well.
    #[allow(dead_code)]
    pub fn read(
        &self,
        position: Position,
        earlier: &[TimelineId],
        bytes: &mut [u8],
    ) -> io::Result<usize> {
        let timelines = [position.timeline].into_iter().chain(earlier.iter().rev().copied());
        for timeline in timelines.filter(|&id| id <= position.timeline) {
            let (path, at) = self.place(Position { timeline, ..position });
            if let Ok(file) = File::open(path) {
                let read = file.read_at(bytes, at)?;
                if read > 0 {
                    return Ok(read);
                }
            }
        }
        Ok(0)
    }
}

/// Position at which the last segment begins: the log is received from there on again after a restart, because the end
/// of a file says nothing of what is durable in it.
#[allow(dead_code)]
pub fn last_segment(directory: &Path, segment_bytes: u32) -> io::Result<Option<Position>> {
    let last = files(directory)?.into_iter().filter(|name| name.len() == 24).max();
    Ok(last.and_then(|name| {
        let number = |digits: std::ops::Range<usize>| u32::from_str_radix(&name[digits], 16).ok();
        let (timeline, upper, lower) = (number(0..8)?, number(8..16)?, number(16..24)?);
        let at = (u64::from(upper) << 32) + u64::from(lower) * u64::from(segment_bytes);
        Some(Position { timeline: TimelineId(timeline), at: Lsn(at) })
    }))
}

/// The history files, by their timelines.
#[allow(dead_code)]
pub fn histories(directory: &Path) -> io::Result<BTreeMap<TimelineId, Vec<u8>>> {
    let mut found = BTreeMap::new();
    for name in files(directory)? {
        let id = name.strip_suffix(".history").and_then(|id| u32::from_str_radix(id, 16).ok());
        if let Some(id) = id {
            found.insert(TimelineId(id), fs::read(directory.join(name))?);
        }
    }
    Ok(found)
}

/// Names of segment files and history files.
pub fn files(directory: &Path) -> io::Result<Vec<String>> {
    let mut names = vec![];
    for entry in fs::read_dir(directory)? {
        let name = entry?.file_name().into_string().unwrap_or_default();
        let stem = name.strip_suffix(".history").unwrap_or(&name);
        if matches!(stem.len(), 8 | 24) && stem.bytes().all(|byte| byte.is_ascii_hexdigit()) {
            names.push(name);
        }
    }
    names.sort();
    Ok(names)
}
