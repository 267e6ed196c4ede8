//! Compressed segments beside the real server: it is killed whenever, and the past is the same.

use crate::common::{
    Host, Process, at, cli_json, config, copy_done, disk_after, exported, has, journal_files, send,
    wait_until,
};
use std::path::Path;
use std::time::Duration;
use tidelock_protocol::ids::Seq;
use tidelock_protocol::message::LastRun;

/// A segment is compressed a second after its last record has arrived.
const COLD: &str =
    "[journal]\nsegment = \"1MiB\"\ncompress_after = \"1s\"\n[retention]\nwindow = \"1h\"\n";
const PLAIN: &str =
    "[journal]\nsegment = \"1MiB\"\nfold_min = \"1MiB\"\n[retention]\nwindow = \"1s\"\n";

fn group(config: &Path) -> serde_json::Value {
    cli_json(config, &["status", "--json"])["groups"][0].clone()
}

#[tokio::test(flavor = "multi_thread")]
async fn killed_at_any_moment_a_compressed_past_is_the_same_and_smaller() {
    let dir = tempfile::tempdir().unwrap();
    let path = config(dir.path(), COLD);
    let mut server = Process::start(&path);
    let (mut host, _) = Host::attached(server.address, 1, LastRun::Unknown).await;
    host.record(&copy_done(1)).await.unwrap();
    let mut last = 1;
    // Each kill hits another moment of sealing, indexing, mapping and compressing.
    for round in 1u64..=6 {
        let next = last + 1000 + 97 * round;
        send(&mut host, last + 1, next).await;
        last = next;
        std::thread::sleep(Duration::from_millis(37 * round));
        server.kill();
        server = Process::start(&path);
        let run = LastRun::Continues { from: Seq(last + 1) };
        let (again, attached) = Host::attached(server.address, 1, run).await;
        assert_eq!(attached.progress.durable, Seq(last));
        host = again;
    }
    // All but the one that is written.
    wait_until("all sealed segments are compressed", || {
        journal_files(dir.path(), ".seg").len() == 1 && journal_files(dir.path(), ".new").is_empty()
    });
    let cold = journal_files(dir.path(), ".zst");
    assert!(cold.len() > 10, "{} compressed", cold.len());
    let status = group(&path);
    let number = |name: &str| status["compressed"][name].as_u64().unwrap();
    assert_eq!(number("segments"), cold.len() as u64);
    let on_disk: u64 = cold.iter().map(|file| file.metadata().unwrap().len()).sum();
    assert_eq!(number("stored_bytes"), on_disk);
    assert!(on_disk < number("bytes") / 2, "{on_disk} of {}", number("bytes"));
    let timeline = cli_json(&path, &["timeline", "shop", "--json"]);
    assert_eq!(timeline["compressed"], status["compressed"]);
    for seq in [1, 2, 800, 1990, last - 1, last] {
        assert!(exported(&path, &at(seq), dir.path()) == disk_after(seq), "{seq}");
    }
    // Anyone who has zstd has the segment.
    if has("zstd") {
        let out = std::process::Command::new("zstd").arg("-dcq").arg(&cold[0]).output().unwrap();
        assert!(out.status.success(), "{out:?}");
        assert_eq!((&out.stdout[..8], out.stdout.len() >= 1 << 20), (&b"TLKJRNL\0"[..], true));
    }
    server.kill();
    // Turned off, they are read, and go to the images.
    config(dir.path(), PLAIN);
    let server = Process::start(&path);
    let run = LastRun::Continues { from: Seq(last + 1) };
    let (mut host, _) = Host::attached(server.address, 1, run).await;
    send(&mut host, last + 1, last + 3000).await;
    wait_until("they leave the window", || {
        journal_files(dir.path(), ".zst").len() < cold.len() / 2
    });
    let seq = last + 3000;
    assert!(exported(&path, &at(seq), dir.path()) == disk_after(seq));
    server.terminate();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_damaged_block_costs_itself_and_is_restored_by_a_copy_of_either_kind() {
    let dir = tempfile::tempdir().unwrap();
    let path = config(dir.path(), COLD);
    let server = Process::start(&path);
    let (mut host, _) = Host::attached(server.address, 1, LastRun::Unknown).await;
    host.record(&copy_done(1)).await.unwrap();
    send(&mut host, 2, 2500).await;
    wait_until("compressed", || journal_files(dir.path(), ".seg").len() == 1);
    server.kill();
    let damaged = journal_files(dir.path(), ".zst")[1].clone();
    let good = std::fs::read(&damaged).unwrap();
    let mut bad = good.clone();
    let middle = bad.len() / 2;
    bad[middle] ^= 1;
    std::fs::write(&damaged, &bad).unwrap();
    let server = Process::start(&path);
    let list = |more: &[&str]| {
        cli_json(&path, &[&["damaged", "shop", "--json"], more].concat())["segments"].clone()
    };
    wait_until("it is told", || list(&[]).as_array().is_some_and(|all| !all.is_empty()));
    let told = list(&[])[0].clone();
    assert!(told["file"].as_str().unwrap().ends_with(".seg.zst"), "{told}");
    assert_eq!(told["known"], "extents", "{told}");
    // One block is 64 KiB.
    let bytes = told["bytes"].as_u64().unwrap();
    assert!(bytes > 0 && bytes <= (64 << 10) + 2 * 4096, "{told}");
    assert!(group(&path)["broken"].is_null());
    if has("zstd") {
        // A copy that was decompressed is as good.
        let aside = dir.path().join("copy.seg.zst");
        std::fs::write(&aside, &good).unwrap();
        let out = damaged.with_extension("");
        let status = std::process::Command::new("zstd")
            .args(["-dq", aside.to_str().unwrap(), "-o", out.to_str().unwrap()])
            .status();
        assert!(status.unwrap().success());
    } else {
        std::fs::write(&damaged, &good).unwrap();
    }
    assert_eq!(list(&["--check"]).as_array().map(Vec::len), Some(0));
    server.terminate();
    let server = Process::start(&path);
    let run = LastRun::Continues { from: Seq(2501) };
    let (_, attached) = Host::attached(server.address, 1, run).await;
    assert_eq!(attached.progress.durable, Seq(2500));
    assert!(exported(&path, &at(1200), dir.path()) == disk_after(1200));
    server.terminate();
}
