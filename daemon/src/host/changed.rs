//! Differences between a member's disks and those that the last run left, as far as this host can tell by itself. The backup judges
//! what remains.

use crate::state::Opened;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use tidelock_protocol::message::CleanEnd;

/// A local write that was begun ends within this, or hangs; and the times of files that a power loss has left may be apart
/// by what their file systems write back in.
const LAST_WRITE_MAX_S: i64 = 60;

/// Difference between the disks and those of the run on record, as text for people. After a clean end the whole marks are compared. After
/// a kill, or if guests were served since the clean end, only the lasting parts are, and each image's times with those of
/// the files in `evidence`, which the daemon writes before it writes to an image: the activity log and the segments of a
/// backlog on disk.
pub(super) fn changed_since<'a>(
    opened: &Opened,
    marks: &[String],
    evidence: &[impl AsRef<Path>],
    disks: impl Iterator<Item = &'a Path>,
) -> Option<String> {
    match opened.clean.as_ref().filter(|clean| !clean.served) {
        Some(clean) => CleanEnd::difference(&clean.marks, marks),
        None => {
            let lasting: Vec<_> = marks.iter().map(|mark| lasting(mark)).collect();
            CleanEnd::difference(&opened.disks, &lasting).or_else(|| written_since(evidence, disks))
        }
    }
}

/// The part of a disk's mark that stays the same while the disk is written to: its name and its kind, the inode of an image
/// and the identity of a device.
pub(super) fn lasting(mark: &str) -> String {
    let words = mark.split(' ').take(3);
    words.collect::<Vec<_>>().join(" ")
}

/// An image that was written to, or whose times were set, long after the daemon's last write: it was restored or changed in
/// place. Of a device nobody knows.
fn written_since<'a>(
    evidence: &[impl AsRef<Path>],
    mut disks: impl Iterator<Item = &'a Path>,
) -> Option<String> {
    let written_s = |path: &Path| fs::metadata(path).map(|meta| meta.mtime()).ok();
    let last_s = evidence.iter().filter_map(|path| written_s(path.as_ref())).max()?;
    disks.find_map(|path| {
        let meta = fs::metadata(path).ok().filter(fs::Metadata::is_file)?;
        let later_s = meta.mtime().max(meta.ctime()) - last_s;
        (later_s > LAST_WRITE_MAX_S).then(|| {
            format!(
                "{} was written to {later_s} s after the daemon's last write: it was restored or changed meanwhile",
                path.display()
            )
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::{Duration, SystemTime};

    #[test]
    fn the_lasting_part_of_a_mark() {
        let image = "root image inode=7 bytes=4096 mtime=1.000000001 ctime=1.000000001";
        assert_eq!(lasting(image), "root image inode=7");
        let device =
            "root device id=naa.5000 8:16 bytes=4096 diskseq=3 written=1/2 discarded=0/0 boot=b";
        assert_eq!(lasting(device), "root device id=naa.5000");
    }

    /// Whatever times the copy was given: the kernel alone sets the time of the last change.
    #[test]
    fn an_image_that_was_restored_in_place_after_a_kill_is_noticed() {
        let dir = tempfile::tempdir().unwrap();
        let [log, image] = ["log", "image"].map(|name| dir.path().join(name));
        let set = |path: &Path, at: SystemTime| {
            let file = fs::OpenOptions::new().append(true).create(true).open(path).unwrap();
            file.set_modified(at).unwrap();
        };
        let (now, then) = (SystemTime::now(), SystemTime::now() - Duration::from_secs(600));
        set(&image, now);
        let found = |evidence: &[&Path]| written_since(evidence, [image.as_path()].into_iter());
        assert_eq!(found(&[&log]), None, "nothing tells when the daemon wrote last");
        set(&log, now);
        assert_eq!(found(&[&log]), None);
        set(&log, then);
        assert!(found(&[&log]).unwrap().contains("image was written to 6"));
        set(&image, then);
        assert!(found(&[&log]).unwrap().contains("restored or changed"));
        let backlog = dir.path().join("backlog");
        set(&backlog, now);
        assert_eq!(found(&[&log, &backlog]), None, "the later one counts");
        assert_eq!(written_since(&[&log], [dir.path()].into_iter()), None, "no image");
    }
}
