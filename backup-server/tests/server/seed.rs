//! `tidelock-backup seed` with the real server: copies and moves, what is refused, and what a kill leaves.

use crate::common::{
    CHANNEL, DISK_BYTES, Host, Process, attach, cli, cli_json, config, copy_done, refused, send,
    stream,
};
use rustix::fs::{FlockOperation, fcntl_lock};
use std::fs::{self, File};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use tidelock_protocol::ids::DiskId;
use tidelock_protocol::message::{CopyState, LastRun, Message};

/// Half of it is a hole.
fn old_disk(dir: &Path) -> PathBuf {
    let path = dir.join("old.img");
    let content: Vec<u8> = (0..DISK_BYTES / 2).map(|at| (at / 4096 % 250) as u8 + 1).collect();
    fs::write(&path, content).unwrap();
    File::options().write(true).open(&path).unwrap().set_len(DISK_BYTES).unwrap();
    path
}

fn seed_of(file: &Path) -> String {
    format!("db.root={}", file.display())
}

async fn is_equal(host: &mut Host<tokio::net::TcpStream>, offset: u64, content: &[u8]) -> bool {
    let message = Message::DigestCheck {
        disk: DiskId(0),
        offset,
        len_bytes: content.len() as u32,
        digest: *blake3::hash(content).as_bytes(),
    };
    host.send(CHANNEL, &message).await;
    loop {
        match host.next().await.expect("an answer") {
            (CHANNEL, Message::DigestResult { equal, .. }) => return equal,
            (CHANNEL, Message::Progress(_)) => {}
            other => panic!("{other:?}"),
        }
    }
}

/// The host compares with what was seeded, sends a little, and the group can be recovered.
async fn compare_and_send(config: &Path, server: &Process, old: &[u8]) {
    let mut host = Host::plain(server.address).await;
    host.hello("host-a").await;
    let attached = host.attach(attach(1, LastRun::Unknown)).await.unwrap();
    assert_eq!(stream(&attached).copy, CopyState::Partial);
    for (nth, part) in old.chunks(1 << 20).enumerate() {
        assert!(is_equal(&mut host, (nth as u64) << 20, part).await, "MiB {nth}");
    }
    send(&mut host, 1, 20).await;
    assert!(refused(config, &["recover", "shop"]).contains("has not ended"));
    host.record(&copy_done(21)).await.unwrap();
    host.durable(21).await;
    assert_eq!(cli_json(config, &["status", "--json"])["groups"][0]["recoverable"], true);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_copy_is_seeded_beside_the_running_server() {
    let dir = tempfile::tempdir().unwrap();
    let config = config(dir.path(), "");
    let server = Process::start(&config);
    let file = old_disk(dir.path());
    let old = fs::read(&file).unwrap();
    let seeded = cli_json(&config, &["seed", "shop", &seed_of(&file), "--json"]);
    assert_eq!(seeded["server_runs"], true);
    let how = seeded["disks"][0]["how"].as_str().unwrap();
    assert!(["copied", "reflinked"].contains(&how), "{seeded}");
    let image = dir.path().join("data/groups/shop/images/db.root.img");
    assert!(fs::read(&image).unwrap() == old);
    assert!(fs::metadata(&image).unwrap().blocks() * 512 < DISK_BYTES, "the hole is one");
    let status = String::from_utf8(cli(&config, &["status"]).stdout).unwrap();
    assert!(status.contains("seeded, no host has compared it"), "{status}");
    let why = refused(&config, &["recover", "shop", "--primary-is-dead"]);
    assert!(why.contains("no host has compared its own with them"), "{why}");
    let why = refused(&config, &["seed", "shop", &seed_of(&file)]);
    assert!(why.contains("group shop exists"), "{why}");
    compare_and_send(&config, &server, &old).await;
    assert!(fs::read(&file).unwrap() == old, "the file was only read");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_move_is_seeded_without_a_server_and_takes_no_room() {
    let dir = tempfile::tempdir().unwrap();
    let config = config(dir.path(), "");
    let file = old_disk(dir.path());
    let (old, inode) = (fs::read(&file).unwrap(), fs::metadata(&file).unwrap().ino());
    let seeded = cli_json(&config, &["seed", "shop", &seed_of(&file), "--move", "--json"]);
    assert_eq!(
        (&seeded["server_runs"], &seeded["disks"][0]["how"]),
        (&false.into(), &"moved".into())
    );
    assert!(!file.exists());
    let image = dir.path().join("data/groups/shop/images/db.root.img");
    assert_eq!(fs::metadata(&image).unwrap().ino(), inode);
    let server = Process::start(&config);
    compare_and_send(&config, &server, &old).await;
}

#[test]
fn what_cannot_be_a_disk_is_refused_and_nothing_is_left() {
    let dir = tempfile::tempdir().unwrap();
    let config = config(dir.path(), "");
    let file = old_disk(dir.path());
    let odd = dir.path().join("odd.img");
    fs::write(&odd, [1; 1000]).unwrap();
    let link = dir.path().join("link.img");
    std::os::unix::fs::symlink(&file, &link).unwrap();
    let (file, odd, link) = (seed_of(&file), seed_of(&odd), seed_of(&link));
    let cases: [(&[&str], &str); 9] = [
        (&["shop", "db.root=/nowhere"], "cannot open /nowhere"),
        (&["shop", "db.root=/dev/null"], "is no disk image"),
        (&["shop", "db.root"], "MEMBER.DISK=FILE"),
        (&["shop", &odd], "has 1000 bytes: the size of a disk is a multiple of 512"),
        (&["shop", &file, &file], "two disks of db have the same name"),
        (&["shop", &file, &file.replace("root", "data")], "are one file"),
        (&["shop", &link, "--move"], "is a symbolic link"),
        (&["../shop", &file], "is not a name"),
        // The second cannot be taken: the first goes back.
        (&["shop", &file, &odd.replace("root", "data"), "--move"], "multiple of 512"),
    ];
    for (args, why) in cases {
        let said = refused(&config, &[&["seed"], args].concat());
        assert!(said.contains(why), "{args:?}: {said}");
        assert!(dir.path().join("old.img").exists(), "{args:?}");
        let groups = fs::read_dir(dir.path().join("data/groups"));
        assert_eq!(groups.map_or(0, Iterator::count), 0, "{args:?}");
    }
}

#[test]
fn what_was_moved_goes_back_if_the_group_cannot_be_made() {
    let dir = tempfile::tempdir().unwrap();
    let config = config(dir.path(), "");
    let file = old_disk(dir.path());
    let old = fs::read(&file).unwrap();
    // In the place of the journal's directory.
    fs::create_dir_all(dir.path().join("data/seeding/shop")).unwrap();
    fs::write(dir.path().join("data/seeding/shop/journal"), b"").unwrap();
    refused(&config, &["seed", "shop", &seed_of(&file), "--move"]);
    assert!(fs::read(&file).unwrap() == old);
    assert!(!dir.path().join("data/seeding/shop/images").exists());
}

#[test]
fn a_file_that_somebody_has_open_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let config = config(dir.path(), "");
    let file = old_disk(dir.path());
    let open = File::options().read(true).write(true).open(&file).unwrap();
    // This process is another one than the command: its lock is as the daemon's.
    fcntl_lock(&open, FlockOperation::NonBlockingLockShared).unwrap();
    for how in ["--copy", "--move"] {
        let why = refused(&config, &["seed", "shop", &seed_of(&file), how]);
        assert!(why.contains("is in use: stop the VM, or the daemon"), "{why}");
    }
    drop(open);
    cli_json(&config, &["seed", "shop", &seed_of(&file), "--json"]);
}

#[test]
fn what_a_kill_has_left_is_gone_on_with() {
    let dir = tempfile::tempdir().unwrap();
    let config = config(dir.path(), "");
    let images = dir.path().join("data/seeding/shop/images");
    fs::create_dir_all(&images).unwrap();
    // As `--move` of two disks leaves it, killed after the first; and an unfinished copy.
    let (first, second) = (dir.path().join("old.img"), dir.path().join("second.img"));
    fs::rename(old_disk(dir.path()), images.join("db.root.img")).unwrap();
    fs::rename(old_disk(dir.path()), &second).unwrap();
    fs::write(images.join("db.data.img.unfinished"), b"half").unwrap();
    fs::create_dir(dir.path().join("data/seeding/shop/journal")).unwrap();
    fs::write(dir.path().join("data/seeding/shop/journal/1.seg"), b"half").unwrap();
    let other = refused(&config, &["seed", "shop", &format!("db.other={}", second.display())]);
    assert!(other.contains("is left of a seed of other disks"), "{other}");
    assert!(images.join("db.root.img").exists(), "the only copy");
    let disks = [seed_of(&first), format!("db.data={}", second.display())];
    let args = ["seed", "shop", &disks[0], &disks[1], "--move", "--json"];
    let seeded = cli_json(&config, &args);
    let how = |nth: usize| seeded["disks"][nth]["how"].as_str().unwrap();
    assert_eq!((how(0), how(1)), ("kept", "moved"));
    let content = |name: &str| fs::read(dir.path().join("data/groups/shop/images").join(name));
    assert!(content("db.root.img").unwrap() == content("db.data.img").unwrap());
    assert!(!images.exists());
}
