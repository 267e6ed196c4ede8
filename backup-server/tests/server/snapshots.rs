//! Snapshots of every kind, made by the real server, ended by kill -9 and gone on with, and read with other people's tools.

use crate::common::{
    DISK_BYTES, HANG, Host, NO_WINDOW, Process, WINDOW, at, cli, cli_json, config, disk_after, has,
    record, refused, replicated, send,
};
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};
use tidelock_protocol::ids::Seq;
use tidelock_protocol::message::LastRun;
use tokio::net::TcpStream;

async fn again(config: &Path, next: u64) -> (Process, Host<TcpStream>) {
    let server = Process::start(config);
    let continues = LastRun::Continues { from: Seq(next) };
    let (host, _) = Host::attached(server.address, 1, continues).await;
    (server, host)
}

fn snapshot(config: &Path, args: &[&str]) -> Value {
    cli_json(config, &[&["snapshot", "shop", "--json"], args].concat())
}

/// The snapshot of this name; null: there is none.
fn listed(config: &Path, name: &str) -> Value {
    let all = snapshot(config, &["--list"]);
    let found = all["snapshots"].as_array().unwrap().iter().find(|one| one["name"] == name);
    found.cloned().unwrap_or_default()
}

fn wait_for(config: &Path, name: &str, what: impl Fn(&Value) -> bool) -> Value {
    let since = Instant::now();
    loop {
        let one = listed(config, name);
        if what(&one) {
            return one;
        }
        assert!(since.elapsed() < 2 * HANG, "it does not come to be: {one}");
        std::thread::sleep(Duration::from_millis(30));
    }
}

fn path(one: &Value) -> PathBuf {
    PathBuf::from(one["disks"][0]["path"].as_str().unwrap())
}

/// As QEMU reads it.
fn content(one: &Value) -> Vec<u8> {
    let (path, format) = (path(one), one["disks"][0]["format"].as_str().unwrap());
    if format == "raw" {
        return std::fs::read(path).unwrap();
    }
    let checked = Command::new("qemu-img").args(["check", "-q", "-f", "qcow2"]).arg(&path).status();
    assert!(checked.unwrap().success(), "{}", path.display());
    let raw = path.with_extension("as-raw");
    let converted = Command::new("qemu-img")
        .args(["convert", "-f", "qcow2", "-O", "raw"])
        .args([&path, &raw])
        .status();
    assert!(converted.unwrap().success());
    let content = std::fs::read(&raw).unwrap();
    std::fs::remove_file(raw).unwrap();
    content
}

/// BLAKE3 of the BLAKE3s of its MiBs.
fn digest(content: &[u8]) -> String {
    let mut whole = blake3::Hasher::new();
    for block in content.chunks(1 << 20) {
        whole.update(blake3::hash(block).as_bytes());
    }
    whole.finalize().to_hex().to_string()
}

/// It is whole, and what the disk was after this seq.
#[track_caller]
fn check(config: &Path, name: &str, seq: u64) {
    let one = listed(config, name);
    assert_eq!((&one["phase"], &one["at"]["seqs"]["db"]), (&"whole".into(), &seq.into()), "{one}");
    let expected = disk_after(seq);
    assert!(content(&one) == expected, "{name} is not the disk at {seq}");
    assert_eq!(one["disks"][0]["digest"], digest(&expected), "{one}");
}

/// A command under way.
fn running(config: &Path, args: &[&str]) -> Child {
    Command::new(env!("CARGO_BIN_EXE_tidelock-backup"))
        .args(["--config", config.to_str().unwrap(), "snapshot", "shop"])
        .args(args)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap()
}

fn is_under_way(one: &Value) -> bool {
    one["done_bytes"].as_u64().is_some_and(|bytes| bytes > 0) && one["phase"] != "whole"
}

#[tokio::test(flavor = "multi_thread")]
async fn instant_and_retrospective_snapshots_are_moved_and_outlive_the_window() {
    let dir = tempfile::tempdir().unwrap();
    let config = config(dir.path(), NO_WINDOW);
    let (server, mut host) = replicated(&config, 300).await;
    cli_json(&config, &["pin", "shop", "all", "--at", "hlc:100.0", "--json"]);
    let instant = snapshot(&config, &["now"]);
    assert_eq!(instant["snapshots"][0]["disks"][0]["size_bytes"], DISK_BYTES);
    check(&config, "now", 300);
    snapshot(&config, &["then", "--at", &at(150)]);
    check(&config, "then", 150);
    for (args, part) in [
        (&["then"][..], "there is a snapshot then already"),
        (&["a/b"], "cannot be a snapshot's name"),
        (&["@one"], "cannot be a snapshot's name"),
        (&["x", "--at", "hlc:999.0"], "`latest`"),
        (&["x", "x"], "twice"),
        (&["x", "--base", "y"], "there are: now, then"),
        (&["y", "--roll-to", "latest"], "there are: now, then"),
        (&["--remove", "y"], "there is no snapshot y"),
        (&["--verify", "y"], "there is no snapshot y"),
        (&["x", "--not-before", "-5min"], "--not-before is a time"),
    ] {
        let errors = refused(&config, &[&["snapshot", "shop"], args].concat());
        assert!(errors.contains(part), "{args:?}: {errors}");
    }
    assert!(refused(&config, &["snapshot", "other", "x"]).contains("the groups are: shop"));

    // Forward and back by the difference, and to where it is.
    let moved = snapshot(&config, &["then", "--roll-to", &at(280)]);
    let written = moved["snapshots"][0]["written_bytes"].as_u64().unwrap();
    let difference: u64 = (151..=280).map(|seq| u64::from(record(seq).body.len_bytes())).sum();
    assert!(written > 0 && written <= difference, "{written} of {difference}");
    check(&config, "then", 280);
    snapshot(&config, &["then", "--roll-to", &at(120)]);
    check(&config, "then", 120);
    let same = snapshot(&config, &["then", "--roll-to", &at(120)]);
    assert_eq!(same["snapshots"][0]["written_bytes"], 0);

    // What it is of has left the window, so all is compared.
    cli_json(&config, &["pin", "shop", "all", "--remove", "--json"]);
    let oldest = || {
        let timeline = cli_json(&config, &["timeline", "shop", "--json"]);
        timeline["oldest"]["seqs"]["db"].as_u64().unwrap()
    };
    let mut sent = 300;
    while oldest() <= 300 {
        send(&mut host, sent + 1, sent + 600).await;
        sent += 600;
        assert!(sent < 30_000, "nothing leaves the window");
    }
    assert!(refused(&config, &["view", "shop", "--at", &at(120)]).contains("before the window"));
    check(&config, "then", 120);
    server.kill();
    let (server, _host) = again(&config, sent + 1).await;
    check(&config, "then", 120);
    snapshot(&config, &["then", "--roll-to", "latest"]);
    check(&config, "then", sent);
    assert!(snapshot(&config, &["--verify", "then"])["good"] == true);

    // Damage is found.
    let image = path(&listed(&config, "now"));
    let mut bytes = std::fs::read(&image).unwrap();
    bytes[(2 << 20) + 77] ^= 1;
    std::fs::write(&image, bytes).unwrap();
    let damaged = cli(&config, &["snapshot", "shop", "--verify", "now", "--json"]);
    assert!(!damaged.status.success());
    let damaged: Value = serde_json::from_slice(&damaged.stdout).unwrap();
    assert_eq!(damaged["disks"][0]["damaged"], serde_json::json!([2 << 20]));
    server.terminate();

    // With no server, too.
    snapshot(&config, &["alone"]);
    check(&config, "alone", sent);
    snapshot(&config, &["--remove", "now"]);
    assert!(!image.parent().unwrap().exists());
    let detached = refused(&config, &["snapshot", "shop", "x", "--detach"]);
    assert!(detached.contains("no server runs"), "{detached}");
}

#[tokio::test(flavor = "multi_thread")]
async fn incremental_snapshots_are_overlays_of_their_base_in_both_directions() {
    if !["qemu-img", "qemu-nbd", "setpriv"].into_iter().all(has) {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let config = config(dir.path(), WINDOW);
    let (_server, _host) = replicated(&config, 300).await;
    snapshot(&config, &["base", "--at", &at(150)]);
    let forward = snapshot(&config, &["forward", "--base", "base", "--at", &at(200)]);
    let back = snapshot(&config, &["back", "--base", "base", "--at", &at(140)]);
    snapshot(&config, &["further", "--base", "forward", "--at", &at(300)]);
    check(&config, "forward", 200);
    check(&config, "back", 140);
    check(&config, "further", 300);
    let stored = |of: &Value| of["snapshots"][0]["disks"][0]["stored_bytes"].as_u64().unwrap();
    assert!(stored(&back) < DISK_BYTES, "{back}");
    assert_eq!(forward["snapshots"][0]["base"], "base");
    assert!(snapshot(&config, &["--verify", "further"])["good"] == true);
    // A base stays, and stays as it is.
    let kept = refused(&config, &["snapshot", "shop", "--remove", "base"]);
    assert!(kept.contains("back, forward"), "{kept}");
    let kept = refused(&config, &["snapshot", "shop", "base", "--roll-to", "latest"]);
    assert!(kept.contains("back, forward"), "{kept}");
    // An overlay is moved like any other.
    snapshot(&config, &["back", "--roll-to", &at(290)]);
    check(&config, "back", 290);
    check(&config, "base", 150);
    for name in ["back", "further", "forward", "base"] {
        snapshot(&config, &["--remove", name]);
    }
    let all = snapshot(&config, &["--list"]);
    assert_eq!(all["snapshots"].as_array().unwrap().len(), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn several_at_once_are_made_in_one_pass_that_a_kill_does_not_undo() {
    let dir = tempfile::tempdir().unwrap();
    let config = config(dir.path(), WINDOW);
    let (server, _host) = replicated(&config, 300).await;
    let names = ["c=hlc:280.0", "a=hlc:100.0", "b=db=190"];
    let slowly = [&names[..], &["--over", "16s", "--detach"]].concat();
    let begun = snapshot(&config, &slowly);
    assert_eq!(begun["snapshots"].as_array().unwrap().len(), 3);
    wait_for(&config, "b", is_under_way);
    let running = refused(&config, &["snapshot", "shop", "a", "--roll-to", "latest"]);
    assert!(running.contains("is being made"), "{running}");
    server.kill();
    let (_server, _host) = again(&config, 301).await;
    for (name, seq) in [("a", 100), ("b", 190), ("c", 280)] {
        wait_for(&config, name, |one| one["phase"] == "whole");
        check(&config, name, seq);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_was_begun_holds_its_points_and_goes_on_after_a_kill_or_an_interrupt() {
    let dir = tempfile::tempdir().unwrap();
    let config = config(dir.path(), NO_WINDOW);
    let (server, mut host) = replicated(&config, 200).await;
    // Whoever asks is interrupted: it waits, with what there is.
    let mut asking = running(&config, &["one", "--over", "20s"]);
    wait_for(&config, "one", is_under_way);
    let pid = rustix::process::Pid::from_raw(asking.id() as i32).unwrap();
    rustix::process::kill_process(pid, rustix::process::Signal::INT).unwrap();
    assert!(!asking.wait().unwrap().success());
    wait_for(&config, "one", |one| one["phase"] == "paused");
    // Much more than what is folded at once arrives, and the server is killed. The point stays.
    let mut sent = 200;
    while sent < 3000 {
        send(&mut host, sent + 1, sent + 700).await;
        sent += 700;
    }
    server.kill();
    let (server, mut host) = again(&config, sent + 1).await;
    send(&mut host, sent + 1, sent + 1400).await;
    sent += 1400;
    assert_eq!(listed(&config, "one")["phase"], "paused");
    let other = refused(&config, &["snapshot", "shop", "one", "--at", "latest"]);
    assert!(other.contains("was begun for another point"), "{other}");
    let whole = snapshot(&config, &["one"]);
    assert!(whole["notes"][0].as_str().unwrap().contains("is kept"), "{whole}");
    check(&config, "one", 200);

    // On the way to another point.
    snapshot(&config, &["one", "--roll-to", "latest", "--over", "16s", "--detach"]);
    let rolling = wait_for(&config, "one", is_under_way);
    assert_eq!(
        (&rolling["phase"], &rolling["from"]["seqs"]["db"]),
        (&"rolling".into(), &200.into())
    );
    assert_eq!(rolling["disks"][0]["digest"], Value::Null, "it is of no one point");
    let aim = sent;
    server.kill();
    let (_server, mut host) = again(&config, sent + 1).await;
    send(&mut host, sent + 1, sent + 1400).await;
    sent += 1400;
    wait_for(&config, "one", |one| one["phase"] == "whole");
    check(&config, "one", aim);

    // Elsewhere before it is there.
    let mut asking = running(&config, &["one", "--roll-to", "latest", "--over", "20s"]);
    wait_for(&config, "one", is_under_way);
    send(&mut host, sent + 1, sent + 100).await;
    let pid = rustix::process::Pid::from_raw(asking.id() as i32).unwrap();
    rustix::process::kill_process(pid, rustix::process::Signal::INT).unwrap();
    asking.wait().unwrap();
    wait_for(&config, "one", |one| one["phase"] == "paused");
    snapshot(&config, &["one", "--roll-to", "latest"]);
    check(&config, "one", sent + 100);
}

#[tokio::test(flavor = "multi_thread")]
async fn one_is_deferred_and_one_expires() {
    let dir = tempfile::tempdir().unwrap();
    let config = config(dir.path(), WINDOW);
    let (server, mut host) = replicated(&config, 220).await;

    // The point of one that is deferred is that of the asking.
    let later = std::time::SystemTime::now() + Duration::from_secs(3);
    let later = later.duration_since(std::time::UNIX_EPOCH).unwrap().as_secs();
    let later = tidelock_replica::text::utc(later * 1000);
    let deferred = ["later", "--at", "hlc:210.0", "--not-before", &later, "--detach"];
    let deferred = snapshot(&config, &deferred);
    assert!(
        ["waiting", "rolling", "making"]
            .contains(&deferred["snapshots"][0]["phase"].as_str().unwrap())
    );
    send(&mut host, 221, 260).await;
    assert_eq!(listed(&config, "later")["phase"], "waiting");
    wait_for(&config, "later", |one| one["phase"] == "whole");
    check(&config, "later", 210);

    // One that waits is taken out.
    let never = ["rated", "--rate", "1MiB/s", "--not-before", "2100-01-01T00:00:00Z", "--detach"];
    snapshot(&config, &never);
    assert_eq!(wait_for(&config, "rated", |one| one["phase"] == "waiting")["done_bytes"], 0);
    snapshot(&config, &["--remove", "rated"]);
    assert!(!dir.path().join("data/snapshots/shop/rated").exists());
    snapshot(&config, &["soon", "--expires", "300ms", "--detach"]);
    let since = Instant::now();
    let has = |name: &str| {
        let all = snapshot(&config, &["--list"]);
        all["snapshots"].as_array().unwrap().iter().any(|one| one["name"] == name)
    };
    while has("soon") {
        assert!(since.elapsed() < HANG, "it does not expire");
        std::thread::sleep(Duration::from_millis(50));
    }
    server.terminate();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_group_that_is_recovered_has_snapshots_of_what_its_guests_write_and_of_what_was_before() {
    use tidelock_backup_server::server::nbd_client::Client;
    let dir = tempfile::tempdir().unwrap();
    let config = config(dir.path(), WINDOW);
    let (server, host) = replicated(&config, 200).await;
    snapshot(&config, &["before", "--at", &at(100)]);
    drop(host);
    let recovered =
        cli_json(&config, &["recover", "shop", "--primary-is-dead", "--at", &at(150), "--json"]);
    let socket = recovered["disks"][0]["socket"].as_str().unwrap();
    let mut client = Client::connect(Path::new(socket), "db.root").unwrap();
    client.write(0, &[7; 4096]).unwrap();
    client.flush().unwrap();
    let mut expected = disk_after(150);
    expected[..4096].fill(7);
    snapshot(&config, &["after"]);
    assert!(content(&listed(&config, "after")) == expected);
    snapshot(&config, &["then", "--at", &at(120)]);
    check(&config, "then", 120);
    // From before the recovery to after it, and back.
    snapshot(&config, &["before", "--roll-to", "latest"]);
    assert!(content(&listed(&config, "before")) == expected);
    snapshot(&config, &["before", "--roll-to", &at(100)]);
    check(&config, "before", 100);
    let left_out = refused(&config, &["snapshot", "shop", "x", "--at", &at(180)]);
    assert!(left_out.contains("left out"), "{left_out}");
    server.terminate();
}
