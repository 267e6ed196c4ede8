//! The image while it is being made: what is there is checked by its digests and kept, the rest comes from the server,
//! and at the end all of it is read back.

use super::record::{self, Base, BaseRecord, ExportRequest};
use super::{explain, progress};
use crate::server::control::{Reply, Request};
use crate::server::qemu::{self, QemuImage};
use anyhow::{Context, Result, bail, ensure};
use indicatif::ProgressBar;
use rustix::fs::{FlockOperation, flock};
use serde::Deserialize;
use std::ffi::OsStr;
use std::fs::File;
use std::io::{self, BufRead, BufReader, Write};
use std::ops::Range;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use tidelock_replica::travel::copy::{Image, Raw};
use tidelock_replica::travel::digest::{self, BLOCK_BYTES, Table, UNKNOWN};
use tidelock_replica::travel::increment::{self, IncrementError, Piece};
use tidelock_replica::travel::moment::Moment;
use tidelock_replica::travel::when::When;
use tidelock_storage::Storage;
use tidelock_storage::StorageFile;
use tidelock_storage::files::{Files, OpenFile};

const PAGE_BYTES: usize = 4096;

/// An image that is to be made.
pub(super) struct Unmade {
    /// The server's socket.
    pub(super) control: PathBuf,
    pub(super) group: String,
    pub(super) disk: String,
    /// Held by whoever asks.
    pub(super) at: When,
    pub(super) out: PathBuf,
    pub(super) format: &'static str,
    pub(super) size_bytes: u64,
    pub(super) base: Option<Base>,
    /// It is to end.
    pub(super) stop: Arc<AtomicBool>,
}

impl Unmade {
    /// Makes it. Returns its digest, and what it is over.
    pub(super) fn make(&self) -> Result<(String, Option<BaseRecord>)> {
        let path = record::unfinished(&self.out);
        let over = self.base.as_ref().map(|base| self.backing(base)).transpose()?;
        match self.format {
            // One that was killed before it had set the size has left it shorter.
            "raw" => {
                let file = File::options().write(true).create(true).truncate(false).open(&path);
                file?.set_len(self.size_bytes)?;
            }
            _ if path.symlink_metadata().is_ok() => {}
            _ => {
                let empty = record::empty(&self.out);
                let over = over.as_ref().map(|(file, format)| (file.as_path(), format.as_str()));
                qemu::create(&empty, self.size_bytes, over)?;
                File::open(&empty)?.sync_all()?;
                std::fs::rename(&empty, &path)?;
            }
        }
        let lock = File::open(&path)?;
        ensure!(
            flock(&lock, FlockOperation::NonBlockingLockExclusive).is_ok(),
            "another export makes {} right now",
            self.out.display()
        );
        let mut image = open(&path, self.format, false)?;
        let base = match &self.base {
            None => {
                self.fill(&mut *image.0)?;
                None
            }
            Some(base) => {
                let from = self.change(&mut *image.0, base)?;
                let digest = base.known.as_ref().map(|known| known.digest.clone());
                over.map(|(file, _)| BaseRecord { file, at: from, digest })
            }
        };
        image.0.sync().map_err(|e| explain(e, &self.out))?;
        drop(image);
        File::open(&path)?.sync_all()?;
        let request =
            Request::Digest { group: self.group.clone(), at: self.when(), disk: self.disk.clone() };
        let (reply, _) = ask(&self.control, &request)?;
        let Reply::Digest { digest: wanted } = reply else {
            bail!("the server answered something else")
        };
        let found = digest(&path, self.format, self.size_bytes, &self.stop)?;
        if found != wanted {
            ExportRequest::remove(&self.out)?;
            let why = if base.is_some() {
                ". Its base is not what the disk was at that point"
            } else {
                ""
            };
            bail!(
                "{} was read back and is not the disk (digest {found}, not {wanted}){why}; it is removed",
                path.display()
            );
        }
        Ok((found, base))
    }

    fn when(&self) -> When {
        self.at.clone()
    }

    /// How the image names its base: relative if both are in one directory. And that one's format.
    fn backing(&self, base: &Base) -> Result<(PathBuf, String)> {
        let dir = |path: &Path| path.parent().map(Path::to_owned).unwrap_or_default();
        let file = match base.file.file_name() {
            Some(name) if dir(&base.file) == dir(&self.out) => PathBuf::from(name),
            _ => base.file.canonicalize()?,
        };
        let format = match &base.known {
            Some(known) => known.format.clone(),
            None => {
                let info =
                    qemu::img(["info".as_ref(), "--output=json".as_ref(), base.file.as_os_str()])?;
                let info: serde_json::Value = serde_json::from_slice(&info)?;
                info["format"]
                    .as_str()
                    .context("qemu-img does not know the base's format")?
                    .to_owned()
            }
        };
        Ok((file, format))
    }

    /// All of the disk, from the first block on that is not there.
    fn fill(&self, image: &mut dyn Image) -> Result<()> {
        let of_digests = record::digests(&self.out);
        let name = of_digests.file_name().context("a name")?.to_string_lossy().into_owned();
        let files = Files::new(of_digests.parent().unwrap_or(Path::new("")).to_owned());
        let (file, is_new) = match files.open(&name) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => (files.create(&name)?, true),
            file => (file?, false),
        };
        let table = Table::open(file, self.size_bytes)?;
        let bar = progress("writing", self.size_bytes);
        let mut block = 0;
        let mut buf = vec![0; BLOCK_BYTES as usize];
        let zeroes = digest::of_zeroes();
        let data = match is_new {
            true => Vec::new(),
            false => data_of(&record::unfinished(&self.out), self.format, self.size_bytes)?,
        };
        while !is_new && block < digest::blocks(self.size_bytes) {
            self.check_stop()?;
            let (known, range) = (table.get(block)?, digest::range(block, self.size_bytes));
            let buf = &mut buf[..(range.end - range.start) as usize];
            if known == UNKNOWN {
                break;
            }
            if known == zeroes && !has_data(&data, &range) {
                block += 1;
                continue;
            }
            image.read(range.start, buf).map_err(|e| explain(e, &self.out))?;
            if digest::of_block(buf) != known {
                break;
            }
            bar.set_position(range.end);
            block += 1;
        }
        let offset = block * BLOCK_BYTES;
        if offset >= self.size_bytes {
            return Ok(());
        }
        let (group, disk, at) = (self.group.clone(), self.disk.clone(), self.when());
        let mut filling =
            Filling { image, table, block, buf: Vec::new(), size_bytes: self.size_bytes, is_new };
        let request = Request::Content { group, at, disk, offset };
        self.receive(
            &request,
            |_| Ok(()),
            |piece| {
                let (at, data) = match piece {
                    Piece::Data(at, data) => (at, Some(data)),
                    Piece::Zero(at) => (at, None),
                };
                bar.set_position(at.offset);
                filling.add(at.offset, at.len_bytes, data)
            },
        )?;
        bar.finish_and_clear();
        Ok(())
    }

    /// What is unlike the base. What is there already is not written again. Returns the base's point.
    fn change(&self, image: &mut dyn Image, base: &Base) -> Result<Moment> {
        let (group, disk) = (self.group.clone(), self.disk.clone());
        let request = Request::Increment { group, from: base.at.clone(), to: self.when(), disk };
        let bar = progress("writing", self.size_bytes);
        let mut buf = Vec::new();
        let is_of_base = |of: &increment::Description| {
            let Some(known) = &base.known else { return Ok(()) };
            if known.at.seqs == of.from.seqs
                && known.at.epoch == of.from.epoch
                && known.size_bytes == self.size_bytes
            {
                return Ok(());
            }
            ExportRequest::remove(&self.out)?;
            if known.size_bytes != self.size_bytes {
                bail!(
                    "the disk has grown: it had {} bytes when {} was made, and has {} now. An increment does not change the \
                     size: export the disk without --base",
                    known.size_bytes,
                    base.file.display(),
                    self.size_bytes
                );
            }
            bail!(
                "{} is of {}, and the base's point is {}: it is not the base of this",
                base.file.display(),
                known.at,
                of.from
            );
        };
        let of = self.receive(&request, is_of_base, |piece| {
            let (at, zeroes) = match piece {
                Piece::Data(at, _) => (at, false),
                Piece::Zero(at) => (at, true),
            };
            bar.set_position(at.offset);
            let mut done = 0;
            while done < at.len_bytes {
                let len = (at.len_bytes - done).min(BLOCK_BYTES);
                buf.resize(len as usize, 0);
                image.read(at.offset + done, &mut buf)?;
                match piece {
                    Piece::Data(_, data) => {
                        let data = &data[done as usize..(done + len) as usize];
                        if buf != data {
                            image.write(at.offset + done, data)?;
                        }
                    }
                    Piece::Zero(_) if zeroes && buf.iter().any(|byte| *byte != 0) => {
                        image.zero(at.offset + done, len)?;
                    }
                    Piece::Zero(_) => {}
                }
                done += len;
            }
            Ok(())
        })?;
        bar.finish_and_clear();
        Ok(of.from)
    }

    fn receive(
        &self,
        request: &Request,
        is_right: impl FnOnce(&increment::Description) -> Result<()>,
        mut f: impl FnMut(Piece<'_>) -> io::Result<()>,
    ) -> Result<increment::Description> {
        let (reply, stream) = ask(&self.control, request)?;
        let Reply::Increment { description } = reply else {
            bail!("the server answered something else")
        };
        is_right(&description)?;
        let received = increment::read(stream, |_, piece| {
            self.check_stop()?;
            f(piece)
        });
        match received {
            Ok(_) => Ok(description),
            Err(IncrementError::Io(error)) => Err(explain(error, &self.out)),
            Err(error) => Err(error).context(
                "the server could not send all of it, its log says why; the same command goes on",
            ),
        }
    }

    fn check_stop(&self) -> io::Result<()> {
        check(&self.stop)
    }
}

fn check(stop: &AtomicBool) -> io::Result<()> {
    if stop.load(Ordering::Acquire) { Err(io::ErrorKind::Interrupted.into()) } else { Ok(()) }
}

/// Puts pieces together to blocks.
struct Filling<'a> {
    image: &'a mut dyn Image,
    table: Table<OpenFile>,
    block: u64,
    /// What the block has so far.
    buf: Vec<u8>,
    size_bytes: u64,
    is_new: bool,
}

impl Filling<'_> {
    /// The next bytes; `None`: zeroes.
    fn add(&mut self, offset: u64, len_bytes: u64, data: Option<&[u8]>) -> io::Result<()> {
        let mut done = 0;
        while done < len_bytes {
            let range = digest::range(self.block, self.size_bytes);
            let at = range.start + self.buf.len() as u64;
            if at != offset + done {
                return Err(io::Error::other("the server has left something out"));
            }
            let whole = (len_bytes - done) / BLOCK_BYTES;
            if data.is_none() && self.buf.is_empty() && whole > 0 {
                if !self.is_new {
                    self.image.zero(at, whole * BLOCK_BYTES)?;
                }
                self.table.fill(self.block, whole, &digest::of_zeroes())?;
                self.block += whole;
                done += whole * BLOCK_BYTES;
                continue;
            }
            let len = (range.end - at).min(len_bytes - done);
            match data {
                Some(data) => self.buf.extend(&data[done as usize..(done + len) as usize]),
                None => self.buf.resize(self.buf.len() + len as usize, 0),
            }
            done += len;
            if range.start + self.buf.len() as u64 == range.end {
                self.put(range.start)?;
                self.table.set(self.block, &digest::of_block(&self.buf))?;
                self.buf.clear();
                self.block += 1;
            }
        }
        Ok(())
    }

    fn put(&mut self, start: u64) -> io::Result<()> {
        let is_zero = |page: &[u8]| page.iter().all(|byte| *byte == 0);
        let pages: Vec<&[u8]> = self.buf.chunks(PAGE_BYTES).collect();
        let mut at = 0;
        for run in pages.chunk_by(|a, b| is_zero(a) == is_zero(b)) {
            let len: usize = run.iter().map(|page| page.len()).sum();
            let offset = start + at as u64;
            match is_zero(run[0]) {
                true if self.is_new => {}
                true => self.image.zero(offset, len as u64)?,
                false => self.image.write(offset, &self.buf[at..at + len])?,
            }
            at += len;
        }
        Ok(())
    }
}

/// An image, and where the socket is that it is read by.
struct Opened(Box<dyn Image>, Option<tempfile::TempDir>);

fn open(path: &Path, format: &str, read_only: bool) -> Result<Opened> {
    if format == "raw" {
        let name = path.file_name().context("a name")?.to_string_lossy().into_owned();
        let file = Files::new(path.parent().unwrap_or(Path::new("")).to_owned()).open(&name)?;
        return Ok(Opened(Box::new(Raw(file)), None));
    }
    let sockets = tempfile::tempdir()?;
    let image = QemuImage::open(path, format, read_only, sockets.path())?;
    Ok(Opened(Box::new(image), Some(sockets)))
}

/// Of an image's content, which is read.
pub(super) fn digest(
    path: &Path,
    format: &str,
    size_bytes: u64,
    stop: &AtomicBool,
) -> Result<String> {
    let data = data_of(path, format, size_bytes)?;
    let Opened(mut image, _sockets) = open(path, format, true)?;
    let zeroes = digest::of_zeroes();
    let bar: ProgressBar = progress("reading back", size_bytes);
    let (mut whole, mut buf) = (digest::Whole::default(), vec![0; BLOCK_BYTES as usize]);
    let mut block = 0;
    while block < digest::blocks(size_bytes) {
        check(stop)?;
        let range = digest::range(block, size_bytes);
        let next = data.partition_point(|data| data.end <= range.start);
        let next = data.get(next).map_or(size_bytes, |data| data.start.max(range.start));
        let skipped = (next - range.start) / BLOCK_BYTES;
        if skipped > 0 {
            whole.add_many(&zeroes, skipped);
            block += skipped;
            bar.set_position(next);
            continue;
        }
        let buf = &mut buf[..(range.end - range.start) as usize];
        image.read(range.start, buf).with_context(|| format!("cannot read {}", path.display()))?;
        whole.add(&digest::of_block(buf));
        block += 1;
        bar.set_position(range.end);
    }
    bar.finish_and_clear();
    Ok(digest::hex(&whole.end()))
}

/// The parts of an image that may have anything but zeroes, in order.
fn data_of(path: &Path, format: &str, size_bytes: u64) -> Result<Vec<Range<u64>>> {
    if format == "raw" {
        let file = open_raw(path)?;
        let (mut data, mut at) = (Vec::new(), 0);
        while let Some(next) = file.next_data(at)?.filter(|next| next.start < size_bytes) {
            at = next.end;
            data.push(next);
        }
        return Ok(data);
    }
    let args = ["map", "-U", "--output=json", "-f", format].map(OsStr::new);
    let map = qemu::img(args.into_iter().chain([path.as_os_str()]))?;
    let map: Vec<MapEntry> = serde_json::from_slice(&map).context("what qemu-img map says")?;
    let data = map.into_iter().filter(|entry| !entry.zero);
    Ok(data.map(|entry| entry.start..entry.start.saturating_add(entry.length)).collect())
}

/// What `qemu-img map` says of a part.
#[derive(Deserialize)]
struct MapEntry {
    start: u64,
    length: u64,
    zero: bool,
}

/// Whether any of it is within a range.
fn has_data(data: &[Range<u64>], range: &Range<u64>) -> bool {
    let next = data.partition_point(|data| data.end <= range.start);
    data.get(next).is_some_and(|data| data.start < range.end)
}

fn open_raw(path: &Path) -> Result<OpenFile> {
    let name = path.file_name().context("a name")?.to_string_lossy().into_owned();
    Ok(Files::new(path.parent().unwrap_or(Path::new("")).to_owned()).open(&name)?)
}

/// One request, and what follows the answer.
fn ask(control: &Path, request: &Request) -> Result<(Reply, BufReader<UnixStream>)> {
    let mut stream = UnixStream::connect(control).with_context(|| {
        format!("the server at {} is gone; the same command goes on", control.display())
    })?;
    let mut line = serde_json::to_vec(request)?;
    line.push(b'\n');
    stream.write_all(&line)?;
    let mut replies = BufReader::with_capacity(1 << 20, stream);
    let mut line = String::new();
    ensure!(
        replies.read_line(&mut line)? > 0,
        "the server has closed the connection; its log says why"
    );
    match serde_json::from_str(&line)? {
        Reply::Error { reason } => bail!("{reason}"),
        reply => Ok((reply, replies)),
    }
}
