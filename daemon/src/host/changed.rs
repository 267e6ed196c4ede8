//! The times of the last writes to a member's files, by which a start sees that a disk was changed by somebody else.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use tidelock_daemon_core::start::Written;

/// `evidence`: files that the daemon writes before it writes to an image. Images alone of the disks have times.
pub(super) fn written<'a>(
    evidence: &[impl AsRef<Path>],
    disks: impl Iterator<Item = &'a Path>,
) -> Written {
    let written_s = |path: &Path| fs::metadata(path).map(|meta| meta.mtime()).ok();
    let images = disks.filter_map(|path| {
        let meta = fs::metadata(path).ok().filter(fs::Metadata::is_file)?;
        Some((path.to_owned(), meta.mtime().max(meta.ctime())))
    });
    Written {
        evidence_s: evidence.iter().filter_map(|path| written_s(path.as_ref())).max(),
        images: images.collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::{Duration, SystemTime};

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
        let found = |evidence: &[&Path]| written(evidence, [image.as_path()].into_iter()).since();
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
        assert_eq!(written(&[&log], [dir.path()].into_iter()).since(), None, "no image");
    }
}
