//! One protected disk: the local file, its socket, and what its guests may ask of it.

use crate::copy_job::HOLE_MIN_BYTES;
use crate::sequencer::{Extent, Look};
use bytes::Bytes;
use std::io;
use std::os::fd::OwnedFd;
use tidelock_nbd::{
    BlockSize, Command, Errno, Export, ExportError, ExportTable, ExtentState, Features, Request,
    Users,
};
use tidelock_protocol::ids::DiskId;
use tidelock_protocol::message::DiskSpec;
use tidelock_protocol::record::Effect;
use tidelock_uring::{
    BufPool, Buffer, ExtentKind, FallocateMode, FileKind, LocalFile, Ring, SharedFd,
};

/// The longest answer to one BLOCK_STATUS.
const STATUS_EXTENTS_MAX: usize = 1024;
/// Pieces that are asked for at a time when a whole disk is listed.
const LIST_EXTENTS: usize = 4096;
/// Pieces that one look for a hole goes over.
const LOOK_EXTENTS: usize = 256;

/// A disk that is open and whose socket listens.
#[derive(Debug)]
pub struct DiskSetup {
    /// Number, name and size, as the backup knows it.
    pub spec: DiskSpec,
    /// The local file.
    pub file: LocalFile,
    /// Its socket, listening.
    pub listener: SharedFd,
    /// What clients see.
    pub exports: ExportTable,
}

impl DiskSetup {
    /// Describes the disk to its clients.
    ///
    /// At most `connections` clients have it open at once.
    pub fn new(
        spec: DiskSpec,
        file: LocalFile,
        listener: OwnedFd,
        connections: usize,
    ) -> Result<Self, ExportError> {
        // A regular file takes requests of any size (parts of blocks are read, changed and
        // written); a block device cannot be zeroed in parts of sectors, so clients are told.
        let min = match file.kind() {
            FileKind::Regular => 1,
            FileKind::BlockDevice => file.alignment().offset_bytes,
        };
        let export = Export {
            name: spec.name.clone(),
            description: String::new(),
            size_bytes: spec.size_bytes,
            read_only: false,
            block_size: BlockSize { min, ..BlockSize::default() },
            features: Features {
                flush: true,
                fua: true,
                trim: true,
                write_zeroes: true,
                fast_zero: true,
                cache: true,
                // One descriptor serves all connections, so one sync covers all their writes.
                multi_conn: connections > 1,
            },
            users: Some(Users::new(connections, in_use(&spec.name, connections))),
        };
        let exports = ExportTable::new(vec![export])?;
        Ok(Self { spec, file, listener: listener.into(), exports })
    }
}

/// What a client hears that finds no place at a disk.
fn in_use(disk: &str, connections: usize) -> String {
    format!(
        "disk {disk} is in use: {connections} client{} at once may use it, as two guests on one disk destroy it; \
         end the other one, or set `connections` in the disk's section of the daemon's configuration",
        if connections == 1 { "" } else { "s" }
    )
}

impl DiskSetup {
    /// Its name, and its identity when it was opened.
    pub fn mark_when_opened(&self) -> String {
        format!("{} {}", self.spec.name, self.file.mark_when_opened())
    }
}

/// How a read went on.
#[derive(Debug)]
pub enum ReadOutcome {
    /// The rest is being read.
    Continued,
    /// The data.
    Done(Bytes),
    /// The disk failed.
    Failed(io::Error),
}

/// A disk in the owner loop.
#[derive(Debug)]
pub struct Disk {
    setup: DiskSetup,
    /// Why nothing that the disk says about durability is believed any more.
    poisoned: Option<String>,
}

/// A disk's place. Numbers may have gaps: of disks that were removed.
pub fn nth(disks: &[Disk], disk: DiskId) -> usize {
    disks.iter().position(|of| of.id() == disk).expect("a disk of this member")
}

impl Disk {
    pub fn new(setup: DiskSetup) -> Self {
        Self { setup, poisoned: None }
    }

    pub fn id(&self) -> DiskId {
        self.setup.spec.id
    }

    pub fn name(&self) -> &str {
        &self.setup.spec.name
    }

    /// Its name and its identity.
    pub fn mark(&self) -> io::Result<String> {
        Ok(format!("{} {}", self.name(), self.setup.file.mark()?))
    }

    pub fn fd(&self) -> &SharedFd {
        self.setup.file.fd()
    }

    pub fn listener(&self) -> &SharedFd {
        &self.setup.listener
    }

    /// Clients that may have the disk open at once.
    pub fn connections_max(&self) -> usize {
        self.users().map_or(1, |users| users.max())
    }

    /// Whether another client may open the disk.
    pub fn has_place(&self) -> bool {
        self.users().is_none_or(|users| users.count() < users.max())
    }

    fn users(&self) -> Option<&Users> {
        self.setup.exports.as_slice().first()?.users.as_deref()
    }

    pub fn exports(&self) -> ExportTable {
        self.setup.exports.clone()
    }

    /// A failed sync may have dropped what it should have made durable, and the next one would say
    /// that all is well: from now on every flush fails, until the disk is opened anew.
    /// Returns whether it was the first.
    pub fn poison(&mut self, member: &str, error: &io::Error) -> bool {
        tracing::error!(
            member,
            disk = self.name(),
            %error,
            "the local disk failed a flush: flushes fail from now on; replace the disk or \
             restart the daemon, which compares the sites"
        );
        let first = self.poisoned.is_none();
        self.poisoned.get_or_insert_with(|| error.to_string());
        first
    }

    pub fn poisoned(&self) -> Option<&str> {
        self.poisoned.as_deref()
    }

    pub fn extent(&self, request: &Request) -> Extent {
        Extent { disk: self.setup.spec.id, offset: request.offset, len_bytes: request.len.into() }
    }

    pub fn whole(&self) -> Extent {
        Extent { disk: self.setup.spec.id, offset: 0, len_bytes: self.setup.spec.size_bytes }
    }

    /// What of the disk may hold anything but zeroes.
    pub fn allocated(&self) -> io::Result<Vec<Extent>> {
        let Extent { disk, len_bytes: end, .. } = self.whole();
        let mut allocated: Vec<Extent> = Vec::new();
        let mut at = 0;
        while at < end {
            for piece in self.setup.file.extents(at..end, LIST_EXTENTS)? {
                at = piece.end();
                if piece.kind == ExtentKind::Allocated {
                    allocated.push(Extent { disk, offset: piece.offset, len_bytes: piece.len });
                }
            }
        }
        Ok(allocated)
    }

    /// How the disk begins in an extent. Blocks, but reads no data.
    pub fn look(&self, extent: Extent) -> io::Result<Look> {
        let pieces = self.setup.file.extents(extent.offset..extent.end(), LOOK_EXTENTS)?;
        let is_hole = |piece: &tidelock_uring::Extent| {
            piece.kind == ExtentKind::Hole && piece.len >= HOLE_MIN_BYTES
        };
        Ok(match pieces.iter().position(is_hole) {
            Some(0) => Look::Hole(pieces[0].len),
            // The answer may end before the extent does.
            at => Look::Data(pieces[..at.unwrap_or(pieces.len())].iter().map(|p| p.len).sum()),
        })
    }

    /// The smallest range around `offset..end` that may be read or written directly.
    pub fn direct_range(&self, offset: u64, len_bytes: u64) -> (u64, usize) {
        let align = self.setup.file.alignment().offset_bytes.into();
        let lo = offset / align * align;
        let hi = (offset + len_bytes).div_ceil(align) * align;
        (lo, usize::try_from(hi - lo).expect("requests are bounded"))
    }

    pub fn is_aligned(&self, offset: u64, data: &Bytes) -> bool {
        self.setup.file.alignment().allows(data.as_ptr(), offset, data.len())
    }

    pub fn start_read(&self, request: &Request, ring: &mut Ring, pool: &BufPool, token: u64) {
        let (lo, len) = self.direct_range(request.offset, request.len.into());
        ring.read(token, self.fd(), pool.get(len), 0..len, lo);
    }

    pub fn read_done(
        &self,
        request: &Request,
        result: io::Result<u32>,
        buffer: Buffer,
        ring: &mut Ring,
        token: u64,
    ) -> ReadOutcome {
        let buf = buffer.into_aligned();
        let (lo, len) = self.direct_range(request.offset, request.len.into());
        match result {
            Err(error) => ReadOutcome::Failed(error),
            Ok(_) if buf.len() == len => {
                let from = (request.offset - lo) as usize;
                ReadOutcome::Done(buf.freeze(from..from + request.len as usize))
            }
            Ok(0) => ReadOutcome::Failed(io::ErrorKind::UnexpectedEof.into()),
            Ok(_) => {
                let filled = buf.len();
                ring.read(token, self.fd(), buf, filled..len, lo + filled as u64);
                ReadOutcome::Continued
            }
        }
    }

    /// What a TRIM or WRITE_ZEROES does. `None`: nothing, and that is a success.
    pub fn zeroing(&self, request: &Request) -> Result<Option<Effect>, Errno> {
        if request.command == Command::Trim {
            // A hint: followed where the result is known to be the same at both sites.
            let effect = Effect::Zero { len_bytes: request.len, no_hole: false };
            return Ok(self.setup.file.can_punch_hole().then_some(effect));
        }
        let no_hole = request.flags.no_hole();
        if request.flags.fast_zero() && self.fallocate_mode(no_hole).is_none() {
            return Err(Errno::NotSup);
        }
        Ok(Some(Effect::Zero { len_bytes: request.len, no_hole }))
    }

    /// How the file system zeroes without writing, if it can.
    pub fn fallocate_mode(&self, no_hole: bool) -> Option<FallocateMode> {
        let file = &self.setup.file;
        if !no_hole && file.can_punch_hole() {
            Some(FallocateMode::PunchHole)
        } else if file.can_zero_range() {
            Some(FallocateMode::ZeroRange)
        } else {
            None
        }
    }

    pub fn block_status(&self, request: &Request) -> io::Result<Vec<tidelock_nbd::Extent>> {
        let extents = self.setup.file.extents(request.offset..request.end(), STATUS_EXTENTS_MAX)?;
        let state = |kind| match kind {
            ExtentKind::Allocated => ExtentState::DATA,
            ExtentKind::Hole => ExtentState::HOLE_ZERO,
        };
        Ok(extents
            .into_iter()
            .map(|e| tidelock_nbd::Extent { len: e.len, state: state(e.kind) })
            .collect())
    }
}
