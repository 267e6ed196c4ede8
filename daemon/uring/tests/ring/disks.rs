//! Opening disks: sizes, locks, alignment, abilities, extents; images and block devices.

use std::fs::File;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use crate::common::{LOST_AFTER, Random, complete_one, directories};
use tidelock_uring::{
    Alignment, BufPool, Durability, Extent, ExtentKind, FallocateMode, FileErrorKind, FileKind,
    IoMode, LocalFile, OpenRequest, Ring, SizeRule, WhyBuffered,
};

const BLOCK: u64 = 4096;
const LEN: u64 = 64 * BLOCK;

fn image(dir: &Path, name: &str, len: u64) -> PathBuf {
    let path = dir.join(name);
    File::create_new(&path).unwrap().set_len(len).unwrap();
    path
}

fn open(path: &Path) -> Result<LocalFile, tidelock_uring::FileError> {
    LocalFile::open(path, &OpenRequest::default())
}

/// The error of an attempt that does not wait for the present user.
fn refusal(path: &Path) -> FileErrorKind {
    let request = OpenRequest { lock_wait_max: Duration::ZERO, ..OpenRequest::default() };
    LocalFile::open(path, &request).expect_err("it is in use").kind
}

#[test]
fn sizes_are_checked() {
    let dir = tempfile::tempdir().unwrap();
    let path = image(dir.path(), "disk", LEN);
    let with = |size| LocalFile::open(&path, &OpenRequest { size, ..OpenRequest::default() });
    for right in
        [SizeRule::Any, SizeRule::Exactly(LEN), SizeRule::AtLeast(LEN), SizeRule::AtLeast(LEN - 1)]
    {
        assert_eq!(with(right).unwrap().len_bytes(), LEN, "{right:?}");
    }
    for (wrong, relation) in [
        (SizeRule::Exactly(LEN + 1), "smaller"),
        (SizeRule::Exactly(LEN - 1), "larger"),
        (SizeRule::AtLeast(LEN + 1), "smaller"),
    ] {
        let error = with(wrong).unwrap_err();
        assert_eq!(error.kind, FileErrorKind::WrongSize, "{wrong:?}");
        assert!(error.to_string().contains(relation), "{error}");
    }
}

#[test]
fn what_is_no_disk_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    for (path, kind) in [
        (dir.path().join("missing"), FileErrorKind::NotFound),
        (dir.path().to_owned(), FileErrorKind::NotADisk),
        (PathBuf::from("/dev/null"), FileErrorKind::NotADisk),
    ] {
        let error = open(&path).unwrap_err();
        assert_eq!(error.kind, kind, "{error}");
        assert!(error.to_string().starts_with(path.to_str().unwrap()), "{error}");
    }
}

#[test]
fn an_image_has_one_user() {
    for dir in directories() {
        let path = image(dir.path(), "disk", LEN);
        let first = open(&path).unwrap();
        assert_eq!(refusal(&path), FileErrorKind::InUse);
        let link = dir.path().join("other-name");
        std::fs::hard_link(&path, &link).unwrap();
        assert_eq!(refusal(&link), FileErrorKind::InUse);
        // The lock lives as long as somebody can still use the descriptor.
        let fd = first.fd().clone();
        drop(first);
        assert_eq!(refusal(&path), FileErrorKind::InUse);
        drop(fd);
        open(&path).unwrap();
    }
}

#[test]
fn the_next_user_waits_for_the_last_one_to_be_gone() {
    let dir = tempfile::tempdir().unwrap();
    let path = image(dir.path(), "disk", LEN);
    let first = open(&path).unwrap();
    let request = OpenRequest { lock_wait_max: LOST_AFTER, ..OpenRequest::default() };
    std::thread::scope(|scope| {
        let next = scope.spawn(|| LocalFile::open(&path, &request));
        std::thread::sleep(Duration::from_millis(30)); // right either way; usually it waits now
        drop(first);
        next.join().unwrap().expect("the image is free");
    });
}

#[test]
fn qemu_and_a_daemon_keep_each_other_out() {
    let qemu_io = |path: &Path| {
        Command::new("qemu-io")
            .args(["-f", "raw", "-c", "read 0 4096"])
            .arg(path)
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .status()
            .map(|status| status.success())
    };
    let dir = tempfile::tempdir().unwrap();
    let path = image(dir.path(), "disk", LEN);
    match qemu_io(&path) {
        Err(error) => return println!("skipped: qemu-io cannot be run: {error}"),
        Ok(works) => assert!(works, "qemu-io reads an image that nobody has"),
    }
    let disk = open(&path).unwrap();
    assert!(!qemu_io(&path).unwrap(), "QEMU refuses an image that a daemon has");
    drop(disk);

    let mut qemu = Command::new("qemu-io")
        .args(["-f", "raw"])
        .arg(&path)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    // It answers the first command, so it has the image open.
    let mut stdin = qemu.stdin.take().unwrap();
    std::io::Write::write_all(&mut stdin, b"length\n").unwrap();
    let mut answer = [0; 1];
    std::io::Read::read_exact(qemu.stdout.as_mut().unwrap(), &mut answer).unwrap();
    let kind = refusal(&path);
    drop(stdin); // it ends at the end of its input
    qemu.wait().unwrap();
    assert_eq!(kind, FileErrorKind::InUse);
    open(&path).unwrap();
}

#[test]
fn opening_changes_nothing() {
    for dir in directories() {
        let path = image(dir.path(), "disk", LEN);
        let file = File::options().write(true).open(&path).unwrap();
        file.write_all_at(&[1; 8192], 3 * BLOCK).unwrap();
        file.sync_all().unwrap();
        drop(file);
        let content = std::fs::read(&path).unwrap();
        let before = std::fs::metadata(&path).unwrap();
        drop(open(&path).unwrap());
        let after = std::fs::metadata(&path).unwrap();
        assert_eq!((after.len(), after.blocks()), (before.len(), before.blocks()));
        assert!(std::fs::read(&path).unwrap() == content);
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1, "no file stays behind");
    }
}

#[test]
fn the_alignment_that_is_told_works() {
    for dir in directories() {
        let path = image(dir.path(), "disk", LEN);
        let disk = open(&path).unwrap();
        println!("{}: {}, {:?}", path.display(), disk.io_mode(), disk.alignment());
        assert_eq!(disk.kind(), FileKind::Regular);
        let step = disk.alignment().offset_bytes as usize;
        let mut ring = Ring::new(8).unwrap();
        let pool = BufPool::new(0);
        let data = pool.copy_of(&vec![3; step]).freeze_all();
        let offset = step as u64; // aligned to no more than what is told
        assert!(disk.alignment().allows(data.as_ptr(), offset, step));
        ring.write(1, disk.fd(), data, offset, Durability::Cached);
        assert_eq!(complete_one(&mut ring).result.unwrap() as usize, step);
        ring.read(2, disk.fd(), pool.get(step), 0..step, offset);
        assert_eq!(complete_one(&mut ring).buffer.into_aligned()[..], vec![3; step]);
    }
}

#[test]
fn alignment_is_judged_by_all_three() {
    let alignment = Alignment { memory_bytes: 4, offset_bytes: 512 };
    let at = |address| std::ptr::without_provenance::<u8>(address);
    assert!(alignment.allows(at(4), 512, 1024));
    assert!(!alignment.allows(at(2), 512, 1024));
    assert!(!alignment.allows(at(4), 256, 1024));
    assert!(!alignment.allows(at(4), 512, 100));
    assert!(Alignment::ANY.allows(at(1), 1, 1));
}

#[test]
fn a_tail_that_direct_io_cannot_write_makes_it_buffered() {
    let dir = tempfile::tempdir().unwrap();
    let path = image(dir.path(), "disk", LEN + 1);
    let disk = open(&path).unwrap();
    match disk.io_mode() {
        IoMode::Buffered(WhyBuffered::SizeNotAligned { .. }) => {}
        IoMode::Buffered(WhyBuffered::NoDirectIo) => {
            println!("skipped: the temporary directory has no direct I/O");
        }
        other => panic!("{other}"),
    }
    assert_eq!(disk.alignment(), Alignment::ANY);
    // The last byte can be written.
    let mut ring = Ring::new(8).unwrap();
    let data = BufPool::new(0).copy_of(b"!").freeze_all();
    ring.write(1, disk.fd(), data, LEN, Durability::Cached);
    assert_eq!(complete_one(&mut ring).result.unwrap(), 1);
    assert_eq!(std::fs::read(&path).unwrap().last(), Some(&b'!'));
}

#[test]
fn buffered_when_asked() {
    let dir = tempfile::tempdir().unwrap();
    let path = image(dir.path(), "disk", LEN);
    let disk =
        LocalFile::open(&path, &OpenRequest { direct: false, ..OpenRequest::default() }).unwrap();
    assert_eq!(disk.io_mode(), IoMode::Buffered(WhyBuffered::Asked));
    assert_eq!(disk.io_mode().to_string(), "buffered I/O (as configured)");
}

/// All extents, asked for `max` at a time.
fn all_extents(disk: &LocalFile, range: std::ops::Range<u64>, max: usize) -> Vec<Extent> {
    let mut all: Vec<Extent> = Vec::new();
    let mut at = range.start;
    while at < range.end {
        let part = disk.extents(at..range.end, max).unwrap();
        assert!(!part.is_empty() && part.len() <= max);
        for extent in part {
            assert!(extent.len > 0);
            assert_eq!(extent.offset, at, "no gap");
            at = extent.end();
            match all.last_mut() {
                Some(last) if last.kind == extent.kind => last.len += extent.len,
                _ => all.push(extent),
            }
        }
    }
    assert_eq!(at, range.end);
    all
}

#[test]
fn extents_show_every_byte_that_is_not_zero() {
    for (seed, dir) in directories().into_iter().enumerate() {
        let path = image(dir.path(), "disk", LEN);
        let disk = open(&path).unwrap();
        assert_eq!(disk.extents(0..0, 1).unwrap(), []);
        let hole = Extent { offset: 0, len: LEN, kind: ExtentKind::Hole };
        assert_eq!(all_extents(&disk, 0..LEN, 8), [hole], "a new sparse file is one hole");

        let mut random = Random(seed as u64);
        let mut ring = Ring::new(8).unwrap();
        let pool = BufPool::new(0);
        for step in 0..100 {
            let offset = random.below(LEN / BLOCK) * BLOCK;
            if random.below(3) == 0 && disk.can_punch_hole() {
                ring.fallocate(step, disk.fd(), FallocateMode::PunchHole, offset, BLOCK);
            } else {
                let data = pool.copy_of(&[0xee; BLOCK as usize]).freeze_all();
                ring.write(step, disk.fd(), data, offset, Durability::Cached);
            }
            complete_one(&mut ring).result.unwrap();

            let content = std::fs::read(&path).unwrap();
            let start = random.below(LEN);
            let range = start..start + 1 + random.below(LEN - start);
            let extents = all_extents(&disk, range.clone(), 1 + random.below(4) as usize);
            for extent in extents.iter().filter(|extent| extent.kind == ExtentKind::Hole) {
                let hole = &content[extent.offset as usize..extent.end() as usize];
                assert!(hole.iter().all(|byte| *byte == 0), "{extent:?} hides data");
            }
        }
        ring.write(
            0,
            disk.fd(),
            pool.copy_of(&[1; BLOCK as usize]).freeze_all(),
            0,
            Durability::Cached,
        );
        complete_one(&mut ring).result.unwrap();
        assert_eq!(disk.extents(0..BLOCK, 9).unwrap()[0].kind, ExtentKind::Allocated);
    }
}

/// A loop device over an image, detached when dropped.
struct LoopDevice(PathBuf);

impl LoopDevice {
    fn attach(image: &Path) -> Result<LoopDevice, String> {
        let output = Command::new("losetup")
            .args(["--find", "--show"])
            .arg(image)
            .output()
            .map_err(|error| error.to_string())?;
        if !output.status.success() {
            return Err(String::from_utf8_lossy(&output.stderr).into_owned());
        }
        let name = String::from_utf8(output.stdout).map_err(|error| error.to_string())?;
        Ok(LoopDevice(PathBuf::from(name.trim())))
    }
}

impl Drop for LoopDevice {
    fn drop(&mut self) {
        let detached = Command::new("losetup").arg("--detach").arg(&self.0).status();
        assert!(detached.is_ok_and(|status| status.success()), "{} stays", self.0.display());
    }
}

#[test]
fn a_block_device_is_a_disk() {
    let dir = tempfile::tempdir().unwrap();
    let path = image(dir.path(), "backing", 1 << 20);
    let device = match LoopDevice::attach(&path) {
        Ok(device) => device,
        Err(why) => return println!("skipped: no loop device: {}", why.trim()),
    };
    let request = OpenRequest { size: SizeRule::Exactly(1 << 20), ..OpenRequest::default() };
    let disk = LocalFile::open(&device.0, &request).unwrap();
    assert_eq!((disk.kind(), disk.len_bytes()), (FileKind::BlockDevice, 1 << 20));
    assert_eq!(disk.io_mode(), IoMode::Direct);
    assert!([512, 4096].contains(&disk.alignment().offset_bytes));
    assert_eq!(refusal(&device.0), FileErrorKind::InUse);

    let mut ring = Ring::new(8).unwrap();
    let pool = BufPool::new(0);
    let data = pool.copy_of(&[9; 2 * BLOCK as usize]).freeze_all();
    ring.write(1, disk.fd(), data, BLOCK, Durability::Durable);
    assert_eq!(complete_one(&mut ring).result.unwrap(), 2 * BLOCK as u32);
    let modes = [
        (FallocateMode::PunchHole, disk.can_punch_hole(), BLOCK),
        (FallocateMode::ZeroRange, disk.can_zero_range(), 2 * BLOCK),
    ];
    for (mode, able, offset) in modes {
        if !able {
            println!("skipped: {mode:?}, not on this device");
            continue;
        }
        ring.fallocate(2, disk.fd(), mode, offset, BLOCK);
        complete_one(&mut ring).result.unwrap();
        let len = BLOCK as usize;
        ring.read(3, disk.fd(), pool.get(len), 0..len, offset);
        let buf = complete_one(&mut ring).buffer.into_aligned();
        assert!(buf.len() == len && buf.iter().all(|byte| *byte == 0), "{mode:?}");
    }
    let all = Extent { offset: 5, len: 1000, kind: ExtentKind::Allocated };
    assert_eq!(disk.extents(5..1005, 3).unwrap(), [all]);
}
