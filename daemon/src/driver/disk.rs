//! A disk's socket, and the file behind it, for the driver.

use crate::owner::driver::DiskFile;
use std::io;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use tidelock_nbd::{
    BlockSize, Export, ExportError, ExportTable, ExtentState, Features, Request, Users,
};
use tidelock_protocol::message::DiskSpec;
use tidelock_uring::{Extent, ExtentKind, FileKind, LocalFile, SharedFd};

/// The longest answer to one BLOCK_STATUS.
const STATUS_EXTENTS_MAX: usize = 1024;

/// A disk that is open and whose socket listens.
#[derive(Debug)]
pub struct DiskSetup {
    /// Number, name and size, as the backup knows it.
    pub spec: DiskSpec,
    /// The local file.
    pub file: Arc<LocalFile>,
    /// Its socket, listening.
    pub listener: SharedFd,
    /// The exports that clients see.
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
        Ok(Self { spec, file: Arc::new(file), listener: listener.into(), exports })
    }
}

/// The refusal of a client that finds no place at a disk.
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

    /// Clients that may have the disk open at once.
    pub(super) fn connections_max(&self) -> usize {
        self.users().map_or(1, |users| users.max())
    }

    /// True if another client may open the disk.
    pub(super) fn has_place(&self) -> bool {
        self.users().is_none_or(|users| users.count() < users.max())
    }

    fn users(&self) -> Option<&Users> {
        self.exports.as_slice().first()?.users.as_deref()
    }

    pub(super) fn block_status(&self, request: &Request) -> io::Result<Vec<tidelock_nbd::Extent>> {
        let extents = self.file.extents(request.offset..request.end(), STATUS_EXTENTS_MAX)?;
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

impl DiskFile for Arc<LocalFile> {
    fn align_bytes(&self) -> u64 {
        self.alignment().offset_bytes.into()
    }

    fn allows(&self, data: &[u8], at: u64) -> bool {
        self.alignment().allows(data.as_ptr(), at, data.len())
    }

    fn can_punch_hole(&self) -> bool {
        LocalFile::can_punch_hole(self)
    }

    fn can_zero_range(&self) -> bool {
        LocalFile::can_zero_range(self)
    }

    fn extents(&self, range: Range<u64>, max: usize) -> io::Result<Vec<Extent>> {
        LocalFile::extents(self, range, max)
    }

    fn mark(&self) -> io::Result<String> {
        LocalFile::mark(self)
    }

    fn sync(&self) -> io::Result<()> {
        Ok(rustix::fs::fdatasync(self.fd())?)
    }
}
