//! A daemon was killed between the append of a write to the backlog on disk and its end on the local disk: it is done
//! again before a guest is served, and after the backup has confirmed that no other run has had these disks since.

use rustix::fs::{FallocateFlags, fallocate};
use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use tidelock_daemon_core::backlog::{BacklogError, Redo};
use tidelock_protocol::ids::DiskId;
use tidelock_protocol::record::{Effect, Record};

/// What is written at a time where zeroes have to be written.
static ZEROES: [u8; 64 << 10] = [0; 64 << 10];

/// Why it cannot be done.
#[derive(Debug, thiserror::Error)]
pub(super) enum RedoError {
    /// The backlog.
    #[error(transparent)]
    Backlog(#[from] BacklogError),
    /// A local disk.
    #[error("{path}: {source}")]
    Disk { path: PathBuf, source: io::Error },
}

/// Does again what may not have ended, in its order. Nobody else may have the disks open for writing. Returns how many
/// writes these were.
pub(super) fn redo(again: Redo, disks: &BTreeMap<DiskId, PathBuf>) -> Result<u64, RedoError> {
    let failed = |path: &PathBuf| {
        let path = path.clone();
        move |source| RedoError::Disk { path, source }
    };
    let open = |(id, path): (&DiskId, &PathBuf)| {
        let file = File::options().write(true).open(path).map_err(failed(path))?;
        Ok((*id, (file, path.clone())))
    };
    let files = disks.iter().map(open).collect::<Result<BTreeMap<_, _>, RedoError>>()?;
    let done = again.run(|record| {
        if matches!(record.body.effect, Effect::CopyDone | Effect::Idle) {
            return Ok(());
        }
        let (file, path) = &files[&record.body.disk];
        apply(record, file).map_err(failed(path))
    })?;
    // The daemon reads past the page cache.
    files.values().try_for_each(|(file, path)| file.sync_data().map_err(failed(path)))?;
    Ok(done)
}

fn apply(record: &Record, file: &File) -> io::Result<()> {
    match &record.body.effect {
        Effect::Write(payload) => file.write_all_at(payload.data(), record.body.offset),
        Effect::Zero { len_bytes, no_hole } => {
            let flags = match no_hole {
                true => FallocateFlags::ZERO_RANGE | FallocateFlags::KEEP_SIZE,
                false => FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE,
            };
            match fallocate(file, flags, record.body.offset, u64::from(*len_bytes)) {
                Ok(()) => Ok(()),
                Err(_) => fill(file, record.body.offset, u64::from(*len_bytes)),
            }
        }
        Effect::CopyDone | Effect::Idle => Ok(()),
    }
}

fn fill(file: &File, offset: u64, len_bytes: u64) -> io::Result<()> {
    let mut at = 0;
    while at < len_bytes {
        let len = (len_bytes - at).min(ZEROES.len() as u64);
        file.write_all_at(&ZEROES[..len as usize], offset + at)?;
        at += len;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use tidelock_daemon_core::backlog::{Expected, Journal, find};
    use tidelock_protocol::hlc::Hlc;
    use tidelock_protocol::ids::{Epoch, Incarnation, Seq, WriterId};
    use tidelock_protocol::record::DiskChange;
    use tidelock_protocol::record::Payload;
    use tidelock_protocol::vector::CountVector;
    use tidelock_storage::unsynced::Directory;

    const DISK_BYTES: usize = 64 << 10;

    fn record(seq: u64, disk: u16, offset: u64, effect: Effect) -> Record {
        let (writer, epoch, deps) = (WriterId(0), Epoch(1), CountVector::new());
        let (seq, hlc, disk) = (Seq(seq), Hlc(seq), DiskId(disk));
        Record {
            writer,
            seq,
            epoch,
            hlc,
            deps,
            body: DiskChange { disk, offset, copy: seq.0 == 5, flushed: false, effect },
        }
    }

    fn write(byte: u8, len: usize) -> Effect {
        Effect::Write(Payload::new(vec![byte; len].into()))
    }

    /// In order, over two disks, from the first that may not have ended: what comes before is left alone.
    #[test]
    fn what_may_not_have_ended_is_done_again_in_order() {
        let dir = tempfile::tempdir().unwrap();
        // The disks 0 and 2 were removed.
        let disks = BTreeMap::from([1, 3].map(|id| (DiskId(id), dir.path().join(format!("{id}")))));
        disks.values().for_each(|disk| fs::write(disk, [9; DISK_BYTES]).unwrap());
        let directory = Directory::at(dir.path().join("backlog"));
        // Each record has a segment of its own.
        let mut journal =
            Journal::begin(directory.clone(), 1, Incarnation(1), [0; 16], [0; 32]).unwrap();
        let records = [
            record(1, 1, 0, write(1, 4096)),
            record(2, 1, 8192, write(2, 1000)),
            record(3, 3, 512, write(3, 5000)),
            record(4, 1, 8200, Effect::Zero { len_bytes: 100, no_hole: false }),
            record(5, 1, 8250, write(5, 10)),
            record(6, 3, 0, Effect::Zero { len_bytes: 4096, no_hole: true }),
            record(7, 0, 0, Effect::Idle),
        ];
        for record in &records {
            journal.append(record, || Seq(2).min(record.seq)).unwrap();
        }
        journal.set_sound(true).unwrap();
        let expected = Expected {
            incarnation: Incarnation(1),
            epoch: Epoch(1),
            boot: [0; 16],
            identity: [0; 32],
        };
        let left = find(&directory, &expected).unwrap();
        assert_eq!((left.redo_from, redo(left.again(), &disks).unwrap()), (Seq(2), 5));
        let mut a = vec![9; DISK_BYTES];
        a[8192..9192].fill(2);
        a[8200..8300].fill(0);
        a[8250..8260].fill(5);
        let mut b = vec![9; DISK_BYTES];
        b[512..5512].fill(3);
        b[..4096].fill(0);
        assert!(fs::read(&disks[&DiskId(1)]).unwrap() == a);
        assert!(fs::read(&disks[&DiskId(3)]).unwrap() == b);
    }
}
