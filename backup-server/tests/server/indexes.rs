//! Indexes of segments beside the real server: it is killed whenever, they are lost and damaged.

use crate::common::{
    Host, Process, at, cli_json, config, copy_done, disk_after, exported, has, journal_files, send,
    wait_until,
};
use std::path::Path;
use tidelock_protocol::ids::Seq;
use tidelock_protocol::message::LastRun;

/// A past, in small segments.
const SMALL: &str = "[journal]\nsegment = \"1MiB\"\n[retention]\nwindow = \"1h\"\n";

fn flip(path: &Path, from_end: usize) {
    let mut content = std::fs::read(path).unwrap();
    let at = content.len() - from_end;
    content[at] ^= 1;
    std::fs::write(path, content).unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn killed_between_seal_and_index_and_whatever_is_lost_of_them_the_past_is_the_same() {
    if !has("qemu-img") {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let config = config(dir.path(), SMALL);
    let mut server = Process::start(&config);
    let (mut host, _) = Host::attached(server.address, 1, LastRun::Unknown).await;
    host.record(&copy_done(1)).await.unwrap();
    let mut last = 1;
    // Segments are sealed every 450 records or so: each kill hits another moment of it.
    for round in 1u64..=6 {
        let next = last + 1000 + 97 * round;
        send(&mut host, last + 1, next).await;
        last = next;
        server.kill();
        server = Process::start(&config);
        let run = LastRun::Continues { from: Seq(last + 1) };
        let (again, attached) = Host::attached(server.address, 1, run).await;
        assert_eq!(attached.progress.durable, Seq(last));
        host = again;
    }
    let sealed = || journal_files(dir.path(), ".seg").len() - 1;
    wait_until("all sealed segments get an index", || {
        journal_files(dir.path(), ".idx").len() >= sealed()
    });
    // A map may be in the making; what the kills have left is not made any more.
    wait_until("nothing half made is left", || journal_files(dir.path(), ".new").is_empty());
    assert!(sealed() > 10, "{} sealed", sealed());
    for seq in [1, 2, 800, 1990, last - 1, last] {
        assert!(exported(&config, &at(seq), dir.path()) == disk_after(seq), "{seq}");
    }
    server.kill();
    for (nth, index) in journal_files(dir.path(), ".idx").iter().enumerate() {
        match nth % 3 {
            0 => std::fs::remove_file(index).unwrap(),
            1 => flip(index, 50),
            _ => {}
        }
    }
    let server = Process::start(&config);
    wait_until("they are made again", || journal_files(dir.path(), ".idx").len() >= sealed());
    for seq in [1, 2, 800, 1990, last - 1, last] {
        assert!(exported(&config, &at(seq), dir.path()) == disk_after(seq), "{seq}");
    }
    server.terminate();
}

#[tokio::test(flavor = "multi_thread")]
async fn damage_in_the_middle_is_found_beside_and_named_and_costs_only_itself() {
    let dir = tempfile::tempdir().unwrap();
    let config = config(dir.path(), SMALL);
    let server = Process::start(&config);
    let (mut host, _) = Host::attached(server.address, 1, LastRun::Unknown).await;
    host.record(&copy_done(1)).await.unwrap();
    send(&mut host, 2, 2500).await;
    wait_until("indexes", || {
        journal_files(dir.path(), ".idx").len() + 1 >= journal_files(dir.path(), ".seg").len()
    });
    server.kill();
    let segments = journal_files(dir.path(), ".seg");
    assert!(segments.len() > 3, "{segments:?}");
    let damaged = segments[1].clone();
    flip(&damaged, 100_000);
    let server = Process::start(&config);
    let group = || cli_json(&config, &["status", "--json"])["groups"][0].clone();
    let list = |more: &[&str]| {
        cli_json(&config, &[&["damaged", "shop", "--json"], more].concat())["segments"].clone()
    };
    wait_until("it is told", || group()["damaged"][0]["reason"].is_string());
    let name = damaged.file_name().unwrap().to_str().unwrap().to_owned();
    let reason = group()["damaged"][0]["reason"].to_string();
    assert!(reason.contains(&name) && reason.contains("damaged at byte"), "{reason}");
    assert!(group()["broken"].is_null());
    // Replication goes on, and what is not damaged is shown.
    let run = LastRun::Continues { from: Seq(2501) };
    let (mut host, _) = Host::attached(server.address, 1, run).await;
    send(&mut host, 2501, 2600).await;
    if has("qemu-img") {
        assert!(exported(&config, &at(300), dir.path()) == disk_after(300));
    }
    let timeline = cli_json(&config, &["timeline", "shop", "--json"]);
    assert_eq!(timeline["damaged"][0]["segment"], list(&[])[0]["segment"]);
    // Restored from a copy, which is another file.
    assert_eq!(list(&["--check"]).as_array().map(Vec::len), Some(1), "still damaged");
    let aside = dir.path().join("copy");
    std::fs::copy(&damaged, &aside).unwrap();
    flip(&aside, 100_000);
    std::fs::rename(&aside, &damaged).unwrap();
    assert_eq!(list(&["--check"]).as_array().map(Vec::len), Some(0));
    assert!(group()["damaged"].as_array().unwrap().is_empty());
    assert_eq!(group()["writers"][0]["durable"], 2600);
    server.terminate();
}
