//! A disk's socket, and the file behind it, for the driver.

use crate::nbd_tap::TapDisk;
use std::io;
use std::ops::{Deref, Range};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use tidelock_daemon_core::owner::driver::DiskFile;
use tidelock_nbd::ExportError;
use tidelock_protocol::message::DiskSpec;
use tidelock_uring::{Extent, FileKind, LocalFile, SharedFd};

/// A protected disk, open. A clone is another handle to the same file.
#[derive(Clone, Debug)]
pub struct OpenDisk(Arc<LocalFile>);

/// A disk that is open and whose socket listens.
#[derive(Debug)]
pub struct DiskSetup {
    /// Number, name and size, as the backup knows it.
    pub spec: DiskSpec,
    /// The local file.
    pub file: OpenDisk,
    /// Its socket, listening.
    pub listener: SharedFd,
    /// The disk as clients see it.
    pub tap: TapDisk<OpenDisk>,
}

impl DiskSetup {
    /// At most `connections` clients have the disk open at once.
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
        let file = OpenDisk(Arc::new(file));
        let tap = TapDisk::new(spec.clone(), file.clone(), min, connections)?;
        Ok(Self { spec, file, listener: listener.into(), tap })
    }

    /// Its name, and its identity when it was opened.
    pub fn mark_when_opened(&self) -> String {
        format!("{} {}", self.spec.name, self.file.mark_when_opened())
    }
}

impl Deref for OpenDisk {
    type Target = LocalFile;

    fn deref(&self) -> &LocalFile {
        &self.0
    }
}

impl DiskFile for OpenDisk {
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
