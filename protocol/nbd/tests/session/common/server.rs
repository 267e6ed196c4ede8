//! A disk in memory, served over a Unix socket with plain threads: the least that a caller of
//! the session can be. It answers whatever arrived together in reverse order, and reads that
//! may be split in several chunks, so that clients see everything that is allowed.

use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};

use bytes::BytesMut;
use tidelock_nbd::{
    ChunkPosition, Command, Errno, Event, ExportTable, Extent, ExtentState, ReplyEncoder, Request,
    Session,
};

pub const CHUNK: usize = 64 << 10;

/// Reading here fails, if the export is called `bad`.
pub const BAD_CHUNK: usize = 2;

#[derive(Default)]
pub struct Counters {
    pub fua: AtomicU64,
    pub flush: AtomicU64,
    pub trim: AtomicU64,
    pub zeroes: AtomicU64,
    pub split_reads: AtomicU64,
    pub df_reads: AtomicU64,
    pub connections: AtomicU64,
}

/// Chunks that were never written, or were trimmed, are holes.
struct Disk {
    chunks: Vec<Option<Box<[u8]>>>,
    size_bytes: usize,
    bad: bool,
}

impl Disk {
    fn new(size_bytes: u64, bad: bool) -> Self {
        let size_bytes = size_bytes as usize;
        Self { chunks: vec![None; size_bytes.div_ceil(CHUNK)], size_bytes, bad }
    }

    /// The parts of a range that lie in one chunk each: chunk, offset in it, length.
    fn parts(request: &Request) -> Vec<(usize, usize, usize)> {
        let (start, end) = (request.offset as usize, request.end() as usize);
        let part = |chunk| {
            let from = start.max(chunk * CHUNK);
            let to = end.min((chunk + 1) * CHUNK);
            (chunk, from - chunk * CHUNK, to - from)
        };
        (start / CHUNK..end.div_ceil(CHUNK)).map(part).collect()
    }

    fn chunk_mut(&mut self, chunk: usize) -> &mut [u8] {
        self.chunks[chunk].get_or_insert_with(|| vec![0; CHUNK].into())
    }

    fn write(&mut self, request: &Request, payload: &[u8]) {
        let mut payload = payload;
        for (chunk, at, len) in Self::parts(request) {
            let (part, rest) = payload.split_at(len);
            self.chunk_mut(chunk)[at..at + len].copy_from_slice(part);
            payload = rest;
        }
    }

    /// The chunk's length: the last one may be short.
    fn chunk_len(&self, chunk: usize) -> usize {
        CHUNK.min(self.size_bytes - chunk * CHUNK)
    }

    fn zero(&mut self, request: &Request, allocate: bool) {
        for (chunk, at, len) in Self::parts(request) {
            if !allocate && len == self.chunk_len(chunk) {
                self.chunks[chunk] = None;
            } else if allocate || self.chunks[chunk].is_some() {
                self.chunk_mut(chunk)[at..at + len].fill(0);
            }
        }
    }

    fn read(&self, request: &Request, encoder: ReplyEncoder, counters: &Counters) -> Reply {
        let parts = Self::parts(request);
        if self.bad && parts.iter().any(|&(chunk, ..)| chunk == BAD_CHUNK) {
            return Err((Errno::Io, "the disk is broken there"));
        }
        let mut out = BytesMut::new();
        if !encoder.can_split(request) {
            if request.flags.df() {
                counters.df_reads.fetch_add(1, Ordering::Relaxed);
            }
            out.extend_from_slice(&encoder.read(request));
            for (chunk, at, len) in parts {
                match &self.chunks[chunk] {
                    Some(data) => out.extend_from_slice(&data[at..at + len]),
                    None => out.resize(out.len() + len, 0),
                }
            }
            return Ok(out);
        }
        if parts.len() > 1 {
            counters.split_reads.fetch_add(1, Ordering::Relaxed);
        }
        for (index, &(chunk, at, len)) in parts.iter().enumerate().rev() {
            let position = if index == 0 { ChunkPosition::Last } else { ChunkPosition::More };
            let offset = (chunk * CHUNK + at) as u64;
            let len = len as u32;
            match &self.chunks[chunk] {
                Some(data) => {
                    let header = encoder.read_chunk(request, offset, len, position);
                    out.extend_from_slice(&header);
                    out.extend_from_slice(&data[at..at + len as usize]);
                }
                None => {
                    out.extend_from_slice(&encoder.read_hole(request, offset, len, position));
                }
            }
        }
        Ok(out)
    }

    fn extents(&self, offset: u64) -> impl Iterator<Item = Extent> {
        let first = offset as usize / CHUNK;
        (first..self.chunks.len()).map(move |chunk| {
            let start = (chunk * CHUNK).max(offset as usize);
            let end = chunk * CHUNK + self.chunk_len(chunk);
            let state = match self.chunks[chunk] {
                Some(_) => ExtentState::DATA,
                None => ExtentState::HOLE_ZERO,
            };
            Extent { len: (end - start) as u64, state }
        })
    }

    fn execute(
        &mut self,
        request: &Request,
        payload: &[u8],
        encoder: ReplyEncoder,
        counters: &Counters,
    ) -> Reply {
        let count = |counter: &AtomicU64| counter.fetch_add(1, Ordering::Relaxed);
        if request.flags.fua() {
            count(&counters.fua);
        }
        match request.command {
            Command::Read => return self.read(request, encoder, counters),
            Command::Write => self.write(request, payload),
            Command::Flush => {
                count(&counters.flush);
            }
            Command::Trim => {
                count(&counters.trim);
                self.zero(request, false);
            }
            Command::WriteZeroes => {
                count(&counters.zeroes);
                // Quick only where whole chunks are dropped.
                let whole = (request.offset | u64::from(request.len)).is_multiple_of(CHUNK as u64);
                if request.flags.fast_zero() && (!whole || request.flags.no_hole()) {
                    return Err((Errno::NotSup, "not quicker than writing"));
                }
                self.zero(request, request.flags.no_hole());
            }
            Command::Cache => {}
            Command::BlockStatus => {
                let mut out = BytesMut::new();
                encoder.block_status(request, self.extents(request.offset), &mut out);
                return Ok(out);
            }
        }
        Ok(BytesMut::from(&encoder.done(request)[..]))
    }
}

type Reply = Result<BytesMut, (Errno, &'static str)>;

struct Shared {
    exports: ExportTable,
    disks: Vec<Mutex<Disk>>,
    counters: Counters,
    stop: AtomicBool,
}

pub struct Server {
    directory: tempfile::TempDir,
    shared: Arc<Shared>,
    listener: Option<JoinHandle<()>>,
}

impl Server {
    pub fn start(exports: ExportTable) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let disks = exports.as_slice().iter();
        let disks = disks.map(|e| Mutex::new(Disk::new(e.size_bytes, e.name == "bad"))).collect();
        let shared = Arc::new(Shared {
            exports,
            disks,
            counters: Counters::default(),
            stop: AtomicBool::new(false),
        });
        let socket = UnixListener::bind(directory.path().join("nbd.sock")).unwrap();
        let for_listener = Arc::clone(&shared);
        let listener = thread::spawn(move || {
            let mut connections = vec![];
            for stream in socket.incoming() {
                if for_listener.stop.load(Ordering::Relaxed) {
                    break;
                }
                let shared = Arc::clone(&for_listener);
                let stream = stream.unwrap();
                connections.push(thread::spawn(move || serve(&shared, stream)));
            }
            // A panic of the server is a failure of the test.
            connections.into_iter().for_each(|connection| connection.join().unwrap());
        });
        Self { directory, shared, listener: Some(listener) }
    }

    pub fn counters(&self) -> &Counters {
        &self.shared.counters
    }

    pub fn directory(&self) -> &Path {
        self.directory.path()
    }

    fn socket(&self) -> PathBuf {
        self.directory.path().join("nbd.sock")
    }

    pub fn uri(&self, export: &str) -> String {
        format!("nbd+unix:///{export}?socket={}", self.socket().display())
    }

    /// Wait for the connections to end, and see that the server survived them.
    pub fn stop(mut self) {
        self.end().expect("the server panicked");
    }

    fn end(&mut self) -> thread::Result<()> {
        let Some(listener) = self.listener.take() else { return Ok(()) };
        self.shared.stop.store(true, Ordering::Relaxed);
        // Wakes the listener up.
        drop(UnixStream::connect(self.socket()));
        listener.join()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        if !thread::panicking() {
            self.end().expect("the server panicked");
        }
    }
}

fn serve(shared: &Shared, mut stream: UnixStream) {
    shared.counters.connections.fetch_add(1, Ordering::Relaxed);
    let mut session = Session::new(shared.exports.clone());
    let mut buffer = vec![0; 128 << 10];
    let mut waiting: Vec<(Request, Vec<u8>)> = vec![];
    loop {
        for (request, payload) in waiting.drain(..).rev() {
            let encoder = session.encoder().unwrap();
            let mut disk = shared.disks[session.export().unwrap()].lock().unwrap();
            let reply = disk.execute(&request, &payload, encoder, &shared.counters);
            let out = session.output();
            match reply {
                Ok(bytes) => out.extend_from_slice(&bytes),
                Err((errno, text)) => encoder.error(&request, errno, text, out),
            }
        }
        // A client may leave without reading everything.
        if stream.write_all(&session.output().split()).is_err() || session.is_closed() {
            return;
        }
        let Ok(received @ 1..) = stream.read(&mut buffer) else { return };
        let mut input = &buffer[..received];
        while !input.is_empty() {
            let Ok(step) = session.next(input) else {
                stream.write_all(&session.output().split()).ok();
                return;
            };
            input = &input[step.consumed..];
            match step.event {
                Some(Event::Request(request)) => {
                    let owed = session.payload_owed() as usize;
                    let (have, rest) = input.split_at(owed.min(input.len()));
                    input = rest;
                    let mut payload = have.to_vec();
                    payload.resize(owed, 0);
                    if stream.read_exact(&mut payload[have.len()..]).is_err() {
                        return;
                    }
                    session.payload_taken(owed as u32);
                    waiting.push((request, payload));
                }
                Some(Event::OutputFull) => {
                    if stream.write_all(&session.output().split()).is_err() {
                        return;
                    }
                }
                Some(Event::Opened { .. } | Event::Refused { .. }) | None => {}
                Some(Event::Disconnected) => break,
            }
        }
    }
}
