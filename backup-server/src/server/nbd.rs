//! Disks at the backup site as NBD exports: those of a recovered group, writable, and views of the past,
//! read-only or writable on a scratch file. The protocol itself is `tidelock-nbd`'s.

use super::exports::may_say;
use super::inbox::{Event, Inbox, LiveDisks};
use super::peer_log::peer_log;
use bytes::{Buf, Bytes, BytesMut};
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;
use tidelock_nbd::{
    BlockSize, Command, Errno, Event as NbdEvent, Export, ExportError, ExportTable, Extent,
    ExtentState, Features, ReplyEncoder, Request, Session, Users,
};
use tidelock_replica::group::GuestEffect;
use tidelock_replica::history::PastView;
use tidelock_replica::travel::disk::Disk;
use tidelock_replica::travel::scratch::Scratch;
use tidelock_storage::files::OpenFile;
use tidelock_store::extents::DiskKey;
use tidelock_store::view::{Content, View};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc, oneshot};
use tokio::time::Instant;

/// Bytes of requests that are under way on one connection, and of replies that are not sent.
const IN_FLIGHT_BYTES: usize = 64 << 20;
/// A client opens its export within this. A guest that has may be idle for ever.
const HANDSHAKE_MAX: Duration = Duration::from_secs(10);
/// Replies that wait to be sent on one connection.
const REPLIES_MAX: usize = 256;
const READ_BYTES: usize = 128 << 10;
/// Extents that one block status looks at.
const EXTENTS_MAX: usize = 4096;

/// A disk of a view of the past.
#[derive(Clone, Debug)]
pub enum Layer {
    /// That cannot be written to.
    Past(PastView<OpenFile>),
    /// That is written to a file which goes with the view.
    Scratch(Arc<Scratch<PastView<OpenFile>, OpenFile>>),
}

impl Layer {
    /// What is under what was written to it.
    #[must_use]
    pub fn past(&self) -> &PastView<OpenFile> {
        match self {
            Self::Past(past) => past,
            Self::Scratch(scratch) => scratch.lower(),
        }
    }

    fn disk(&self) -> &dyn Disk {
        match self {
            Self::Past(past) => past,
            Self::Scratch(scratch) => &**scratch,
        }
    }
}

/// The disks of a view, all at one point, to which they are moved together. Each request takes them once, so it is
/// done at one point, whatever happens meanwhile.
#[derive(Debug)]
pub struct Shown(RwLock<Arc<Vec<Layer>>>);

impl Shown {
    /// These disks.
    #[must_use]
    pub fn new(layers: Vec<Layer>) -> Self {
        Self(RwLock::new(Arc::new(layers)))
    }

    /// The disks as they are now.
    #[must_use]
    pub fn layers(&self) -> Arc<Vec<Layer>> {
        Arc::clone(&self.0.read().unwrap_or_else(PoisonError::into_inner))
    }

    /// From now on they are others, as many and of the same sizes in the same order.
    pub fn replace(&self, layers: Vec<Layer>) {
        *self.0.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(layers);
    }
}

/// Whose a disk is.
#[derive(Clone, Debug)]
enum Source {
    /// Of a recovered group: its owner is asked to write.
    Live { view: View<OpenFile>, inbox: Arc<Inbox>, key: DiskKey, alive: Arc<AtomicBool> },
    /// Of a view, the so manieth.
    Shown { all: Arc<Shown>, nth: usize, is_writable: bool },
}

/// One disk to be offered.
#[derive(Clone, Debug)]
pub struct ServedDisk {
    name: String,
    size_bytes: u64,
    source: Source,
    /// Clients that have it open, if their number is limited.
    users: Option<Arc<Users>>,
}

impl ServedDisk {
    /// The disks of a recovered group.
    #[must_use]
    pub fn live(live: LiveDisks, inbox: &Arc<Inbox>) -> Vec<Self> {
        let LiveDisks { disks, alive } = live;
        let disk = |(name, key, view): (String, DiskKey, View<OpenFile>)| {
            let (inbox, alive) = (Arc::clone(inbox), Arc::clone(&alive));
            let size_bytes = view.size_bytes();
            let source = Source::Live { view, inbox, key, alive };
            Self { name, size_bytes, source, users: None }
        };
        disks.into_iter().map(disk).collect()
    }

    /// The disks of a view, with these names.
    #[must_use]
    pub fn shown(names: Vec<String>, all: &Arc<Shown>) -> Vec<Self> {
        let layers = all.layers();
        let disk = |(nth, (name, layer)): (usize, (String, &Layer))| {
            let is_writable = matches!(layer, Layer::Scratch(_));
            let source = Source::Shown { all: Arc::clone(all), nth, is_writable };
            Self { name, size_bytes: layer.disk().size_bytes(), source, users: None }
        };
        names.into_iter().zip(layers.iter()).enumerate().map(disk).collect()
    }

    /// The same, counting who has it open.
    #[must_use]
    pub fn counted(mut self, users: Arc<Users>) -> Self {
        self.users = Some(users);
        self
    }

    /// The same with the group's name before its own.
    #[must_use]
    pub fn named_in(mut self, group: &str) -> Self {
        self.name = format!("{group}/{}", self.name);
        self
    }

    /// Its name: `member.disk`.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Its size.
    #[must_use]
    pub fn size_bytes(&self) -> u64 {
        self.size_bytes
    }

    /// Whether clients may write to it.
    #[must_use]
    pub fn is_writable(&self) -> bool {
        !matches!(self.source, Source::Shown { is_writable: false, .. })
    }

    /// Does something with the disk as it is now.
    fn with<T>(&self, f: impl FnOnce(&dyn Disk) -> io::Result<T>) -> io::Result<T> {
        match &self.source {
            Source::Live { view, alive, .. } => {
                let done = f(view)?;
                // Afterwards: what was read may have been another group's.
                if alive.load(Ordering::Acquire) { Ok(done) } else { Err(gone()) }
            }
            Source::Shown { all, nth, .. } => f(all.layers()[*nth].disk()),
        }
    }

    fn read(&self, offset: u64, len: u32) -> io::Result<Bytes> {
        let mut data = vec![0; len as usize];
        self.with(|disk| disk.read(offset, &mut data))?;
        Ok(data.into())
    }

    fn extents(&self, offset: u64, len: u32) -> io::Result<Vec<Extent>> {
        let mut extents = Vec::new();
        let range = offset..offset + u64::from(len);
        let mut found = |len, content| {
            let state = match content {
                Content::Data => ExtentState::DATA,
                Content::Zero => ExtentState::HOLE_ZERO,
            };
            extents.push(Extent { len, state });
            extents.len() < EXTENTS_MAX
        };
        self.with(|disk| disk.describe(range, &mut found))?;
        Ok(extents)
    }

    /// The answer to a change or flush.
    async fn change(&self, request: &Request, data: Bytes) -> io::Result<()> {
        let (inbox, key) = match &self.source {
            Source::Live { inbox, key, .. } => (inbox, key),
            Source::Shown { all, nth, .. } => match &all.layers()[*nth] {
                Layer::Scratch(scratch) => {
                    let (scratch, request) = (Arc::clone(scratch), *request);
                    // Files are written in threads that may wait.
                    let work =
                        tokio::task::spawn_blocking(move || scribble(&scratch, &request, &data));
                    return work.await.unwrap_or_else(|e| Err(io::Error::other(e)));
                }
                // Nothing was written that a flush could miss.
                Layer::Past(_) if request.command == Command::Flush => return Ok(()),
                Layer::Past(_) => return Err(io::ErrorKind::PermissionDenied.into()),
            },
        };
        let (done, answer) = oneshot::channel();
        let zero = |no_hole| GuestEffect::Zero { len_bytes: request.len, no_hole };
        let effect = match request.command {
            Command::Write => GuestEffect::Write(data),
            Command::WriteZeroes => zero(request.flags.no_hole()),
            Command::Trim => zero(false),
            Command::Flush => {
                return ask(inbox, Event::GuestFlush { writer: key.writer, done }, answer).await;
            }
            Command::Read | Command::BlockStatus | Command::Cache => return Ok(()),
        };
        let durable = request.flags.fua();
        let offset = request.offset;
        ask(inbox, Event::GuestWrite { key: *key, offset, effect, durable, done }, answer).await
    }
}

/// A change of a view's scratch file.
fn scribble(
    scratch: &Scratch<PastView<OpenFile>, OpenFile>,
    request: &Request,
    data: &[u8],
) -> io::Result<()> {
    let (offset, len) = (request.offset, u64::from(request.len));
    match request.command {
        Command::Write => scratch.write(offset, data)?,
        Command::WriteZeroes => scratch.zero(offset, len, request.flags.no_hole())?,
        Command::Trim => scratch.zero(offset, len, false)?,
        Command::Flush => return scratch.flush(),
        Command::Read | Command::BlockStatus | Command::Cache => return Ok(()),
    }
    if request.flags.fua() { scratch.flush() } else { Ok(()) }
}

/// The owner has ended, or the group was opened again: clients connect anew.
fn gone() -> io::Error {
    const ESHUTDOWN: i32 = 108;
    io::Error::from_raw_os_error(ESHUTDOWN)
}

async fn ask(
    inbox: &Inbox,
    event: Event,
    answer: oneshot::Receiver<io::Result<()>>,
) -> io::Result<()> {
    if !inbox.push(event) {
        return Err(gone());
    }
    answer.await.map_err(|_| gone())?
}

/// The exports of some disks, by their names.
pub fn exports(disks: &[ServedDisk]) -> Result<ExportTable, ExportError> {
    let export = |disk: &ServedDisk| Export {
        name: disk.name.clone(),
        description: String::new(),
        size_bytes: disk.size_bytes(),
        read_only: !disk.is_writable(),
        block_size: BlockSize::default(),
        features: Features {
            flush: true,
            fua: disk.is_writable(),
            trim: true,
            write_zeroes: true,
            // A zeroing is one small record.
            fast_zero: true,
            cache: false,
            // All connections write through one journal.
            multi_conn: disk.users.as_ref().is_none_or(|users| users.max() > 1),
        },
        users: disk.users.clone(),
    };
    ExportTable::new(disks.iter().map(export).collect())
}

struct Reply {
    head: Bytes,
    data: Bytes,
    /// Given back when it is sent: a client that reads nothing gets no more.
    permit: Option<OwnedSemaphorePermit>,
}

/// Serves one client to its end. `disks` are in the order of the exports.
pub async fn serve<T>(
    stream: T,
    exports: ExportTable,
    disks: Arc<Vec<ServedDisk>>,
) -> io::Result<()>
where
    T: AsyncRead + AsyncWrite + Send + 'static,
{
    let (mut reader, writer) = tokio::io::split(stream);
    let (replies, waiting) = mpsc::channel(REPLIES_MAX);
    let sender = tokio::spawn(send(writer, waiting));
    let mut client = Client {
        session: Session::new(exports),
        disks,
        replies,
        in_flight: Arc::new(Semaphore::new(IN_FLIGHT_BYTES)),
    };
    let mut input = BytesMut::new();
    let ended = client.run(&mut reader, &mut input).await;
    drop(client);
    // Requests under way hold the channel open until they are answered.
    let _ = sender.await;
    ended
}

struct Client {
    session: Session,
    disks: Arc<Vec<ServedDisk>>,
    replies: mpsc::Sender<Reply>,
    in_flight: Arc<Semaphore>,
}

impl Client {
    async fn run(
        &mut self,
        reader: &mut (impl AsyncRead + Unpin),
        input: &mut BytesMut,
    ) -> io::Result<()> {
        let deadline = Instant::now() + HANDSHAKE_MAX;
        loop {
            let step = self.session.next(input);
            self.send_output().await?;
            let step = step.map_err(|e| io::Error::new(io::ErrorKind::InvalidData, e))?;
            input.advance(step.consumed);
            match step.event {
                Some(NbdEvent::Request(request)) => self.request(request, reader, input).await?,
                Some(NbdEvent::Disconnected) => return Ok(()),
                Some(NbdEvent::Opened { .. } | NbdEvent::OutputFull) => {}
                Some(NbdEvent::Refused { export }) => {
                    let disk = &self.disks[export];
                    if let Some(users) = &disk.users
                        && may_say()
                    {
                        tracing::warn!(disk = disk.name, "refused a client: {}", users.refusal());
                    }
                }
                None if self.session.export().is_none() => {
                    let filled = tokio::time::timeout_at(deadline, fill(reader, input, 1)).await;
                    if !filled.unwrap_or(Ok(false))? {
                        return Ok(());
                    }
                }
                None => {
                    if !fill(reader, input, 1).await? {
                        return Ok(());
                    }
                }
            }
        }
    }

    async fn send_output(&mut self) -> io::Result<()> {
        let head = self.session.output().split().freeze();
        if head.is_empty() {
            return Ok(());
        }
        let gone = |_| io::Error::from(io::ErrorKind::BrokenPipe);
        self.replies.send(Reply { head, data: Bytes::new(), permit: None }).await.map_err(gone)
    }

    async fn request(
        &mut self,
        request: Request,
        reader: &mut (impl AsyncRead + Unpin),
        input: &mut BytesMut,
    ) -> io::Result<()> {
        let owed = self.session.payload_owed();
        // A zeroing carries no data however long it is.
        let holds = if matches!(request.command, Command::Read | Command::Write) {
            request.len.max(4096)
        } else {
            4096
        };
        let permit = Arc::clone(&self.in_flight)
            .acquire_many_owned(holds)
            .await
            .map_err(|_| io::ErrorKind::BrokenPipe)?;
        if !fill(reader, input, owed as usize).await? {
            // The client vanished in the middle of a write: it never was one.
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let data = input.split_to(owed as usize).freeze();
        self.session.payload_taken(owed);
        let (Some(encoder), Some(export)) = (self.session.encoder(), self.session.export()) else {
            return Err(io::ErrorKind::InvalidData.into());
        };
        let disks = Arc::clone(&self.disks);
        let replies = self.replies.clone();
        tokio::spawn(async move {
            let mut reply = execute(disks, export, request, data, encoder).await;
            reply.permit = Some(permit);
            let _ = replies.send(reply).await;
        });
        Ok(())
    }
}

/// A guest may read a damaged place again and again.
fn log_failure(disk: &str, at: u64, error: &io::Error) {
    peer_log!(NBD_CLIENTS, error, disk, at, "{error}");
}

async fn execute(
    disks: Arc<Vec<ServedDisk>>,
    export: usize,
    request: Request,
    data: Bytes,
    encoder: ReplyEncoder,
) -> Reply {
    let mut head = BytesMut::new();
    let outcome = match request.command {
        Command::Read | Command::BlockStatus => {
            // Files are read in threads that may wait.
            let work = tokio::task::spawn_blocking(move || {
                let disk = &disks[export];
                let found = match request.command {
                    Command::Read => {
                        disk.read(request.offset, request.len).map(|data| (data, Vec::new()))
                    }
                    _ => disk.extents(request.offset, request.len).map(|e| (Bytes::new(), e)),
                };
                // The client hears only that it failed.
                found.inspect_err(|error| log_failure(&disk.name, request.offset, error))
            });
            work.await.unwrap_or_else(|e| Err(io::Error::other(e)))
        }
        _ => disks[export].change(&request, data).await.map(|()| (Bytes::new(), Vec::new())),
    };
    let data = match outcome {
        Ok((data, _)) if request.command == Command::Read => {
            head.extend_from_slice(&encoder.read(&request));
            data
        }
        Ok((_, extents)) if request.command == Command::BlockStatus => {
            encoder.block_status(&request, extents, &mut head);
            Bytes::new()
        }
        Ok(_) => {
            head.extend_from_slice(&encoder.done(&request));
            Bytes::new()
        }
        Err(error) => {
            encoder.error(&request, Errno::from(&error), &error.to_string(), &mut head);
            Bytes::new()
        }
    };
    Reply { head: head.freeze(), data, permit: None }
}

/// Reads until there are at least so many bytes. `false`: the client has closed before.
async fn fill(
    reader: &mut (impl AsyncRead + Unpin),
    input: &mut BytesMut,
    bytes: usize,
) -> io::Result<bool> {
    while input.len() < bytes {
        let missing = bytes - input.len();
        input.reserve(missing.max(READ_BYTES));
        if reader.read_buf(input).await? == 0 {
            return Ok(false);
        }
    }
    Ok(true)
}

async fn send<W: AsyncWrite + Unpin>(mut writer: W, mut replies: mpsc::Receiver<Reply>) {
    while let Some(reply) = replies.recv().await {
        let written = async {
            writer.write_all(&reply.head).await?;
            writer.write_all(&reply.data).await
        };
        if written.await.is_err() {
            break;
        }
    }
    // Whoever still answers must not wait for room here.
    replies.close();
    while replies.recv().await.is_some() {}
    let _ = writer.shutdown().await;
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn a_damaged_place_that_is_read_again_and_again_writes_few_lines_into_the_log() {
        let log = tempfile::NamedTempFile::new().unwrap();
        let file = Arc::new(log.reopen().unwrap());
        let subscriber = tracing_subscriber::fmt().with_writer(file).finish();
        tracing::subscriber::with_default(subscriber, || {
            for _ in 0..10_000 {
                log_failure("db.root", 4096, &io::Error::other("damaged"));
            }
        });
        let lines = fs::read_to_string(log.path()).unwrap().lines().count();
        assert!((1..500).contains(&lines), "{lines} lines");
    }
}
