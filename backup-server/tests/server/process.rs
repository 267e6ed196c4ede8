//! The real server process: killed under load, stopped, recovered, exported.

use crate::common::{
    Host, Process, attach, cli, cli_json, config, copy_done, disk_after, has, record, stream,
};
use std::path::Path;
use std::process::Command;
use tidelock_protocol::ids::Seq;
use tidelock_protocol::message::{CopyState, LastRun, Message, RefusalKind};

/// Small segments and eager folds, so that all of it happens within a test.
const BUSY: &str =
    "[journal]\nsegment = \"1MiB\"\nunfolded_max = \"64MiB\"\nfold_min = \"256KiB\"\n";

fn export(config: &Path, out: &Path) -> Vec<u8> {
    let out_text = out.to_str().unwrap();
    let output = cli(config, &["export", "shop", "db.root", out_text]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    std::fs::read(out).unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn kill_9_under_a_stream_loses_nothing_acknowledged() {
    if !has("qemu-img") {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let config = config(dir.path(), BUSY);
    let mut server = Process::start(&config);
    let (mut host, attached) = Host::attached(server.address, 1, LastRun::Unknown).await;
    assert_eq!(stream(&attached).copy, CopyState::Empty);
    host.record(&copy_done(1)).await.unwrap();
    host.durable(1).await;
    let mut acknowledged = 1;
    for round in 1u64..=6 {
        // The stream breaks wherever the kill hits it.
        let target = acknowledged + 700 * round;
        let mut next = acknowledged + 1;
        let kill_at = acknowledged + 311 * round;
        let mut kill = Some(server);
        while next <= target {
            if host.record(&record(next)).await.is_err() {
                break;
            }
            next += 1;
            if next == kill_at {
                // What is acknowledged by now counts; the rest may or may not be there.
                acknowledged = acknowledged.max(kill_at - 200);
                host.durable(acknowledged).await;
                kill.take().unwrap().kill();
            }
        }
        server = Process::start(&config);
        let last_run = LastRun::Continues { from: Seq(acknowledged + 1) };
        let (again, attached) = Host::attached(server.address, 1, last_run).await;
        host = again;
        assert_eq!(stream(&attached).copy, CopyState::Whole);
        assert!(attached.progress.durable.0 >= acknowledged && attached.progress.durable.0 < next);
        // The cut before anything is sent again: exactly what is durable.
        let image = dir.path().join(format!("round-{round}.img"));
        assert!(
            export(&config, &image) == disk_after(attached.progress.durable.0),
            "round {round}"
        );
        for seq in attached.progress.durable.0 + 1..=target {
            host.record(&record(seq)).await.unwrap();
        }
        host.durable(target).await;
        acknowledged = target;
    }
    server.terminate();
    // Also with no server at all.
    let image = dir.path().join("alone.img");
    assert!(export(&config, &image) == disk_after(acknowledged));
    let status = cli_json(&config, &["status", "--json"]);
    assert_eq!(status["running"], false);
    assert_eq!(status["groups"][0]["writers"][0]["durable"], acknowledged);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_recovered_group_is_written_to_survives_a_restart_and_fences_the_old_primary() {
    if !["qemu-img", "qemu-io", "nbdcopy", "nbdinfo"].into_iter().all(has) {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let config = config(dir.path(), BUSY);
    let server = Process::start(&config);
    let (mut host, _) = Host::attached(server.address, 1, LastRun::Unknown).await;
    host.record(&copy_done(1)).await.unwrap();
    for seq in 2..=900 {
        host.record(&record(seq)).await.unwrap();
    }
    host.durable(900).await;
    let recovered = cli_json(&config, &["recover", "shop", "--json"]);
    assert_eq!(recovered["recovery"]["epoch"], 2);
    assert_eq!(recovered["recovery"]["writers"][0]["recovered"], 900);
    let refused = host.next().await;
    let fenced = matches!(refused, Some((_, Message::Refused { kind: RefusalKind::Fenced, .. })));
    assert!(fenced, "{refused:?}");
    let uri = recovered["disks"][0]["uri"].as_str().unwrap().to_owned();

    let mut expected = disk_after(900);
    let image = dir.path().join("copied.img");
    let copied = Command::new("nbdcopy").args([&uri, image.to_str().unwrap()]).status().unwrap();
    assert!(copied.success());
    assert!(std::fs::read(&image).unwrap() == expected);
    let qemu_io = |commands: &[&str]| {
        let mut io = Command::new("qemu-io");
        io.args(["-f", "raw"]);
        commands.iter().for_each(|c| {
            io.args(["-c", c]);
        });
        let output = io.arg(&uri).output().unwrap();
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(output.status.success() && !text.contains("failed"), "{output:?}");
    };
    qemu_io(&["write -P 7 4096 65536", "write -z 8192 4096", "flush"]);
    expected[4096..4096 + 65536].fill(7);
    expected[8192..12288].fill(0);
    // Killed right after a flush: it is there.
    server.kill();
    let server = Process::start(&config);
    let again = cli_json(&config, &["recover", "shop", "--json", "--primary-is-dead"]);
    assert_eq!(again["recovery"], recovered["recovery"], "the same answer");
    qemu_io(&["read -P 7 4096 4096", "read -P 0 8192 4096", "read -P 7 12288 57344"]);
    qemu_io(&["write -f -P 9 1048576 512"]);
    expected[1 << 20..(1 << 20) + 512].fill(9);

    let mut host = Host::plain(server.address).await;
    host.hello("host-a").await;
    let refused = host.attach(attach(1, LastRun::Continues { from: Seq(901) })).await;
    assert!(matches!(refused, Err(Message::Refused { kind: RefusalKind::Fenced, .. })));
    server.terminate();

    // An image in another format, with no server.
    let qcow2 = dir.path().join("out.qcow2");
    let args = ["export", "shop", "db.root", "--format", "qcow2", qcow2.to_str().unwrap()];
    let output = cli(&config, &args);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let raw = dir.path().join("out.raw");
    let convert = Command::new("qemu-img")
        .args(["convert", "-f", "qcow2", "-O", "raw"])
        .args([&qcow2, &raw])
        .status()
        .unwrap();
    assert!(convert.success());
    assert!(std::fs::read(&raw).unwrap() == expected);
    let output = cli(&config, &args);
    assert!(!output.status.success(), "never over a file that is there");
    assert!(String::from_utf8_lossy(&output.stderr).contains("exists"));
    let leftovers = std::fs::read_dir(dir.path()).unwrap();
    assert!(leftovers.flatten().all(|e| !e.file_name().to_string_lossy().contains("unfinished")));
}

#[tokio::test(flavor = "multi_thread")]
async fn recovery_refuses_what_it_cannot_do_and_says_why() {
    let dir = tempfile::tempdir().unwrap();
    let config = config(dir.path(), "");
    let server = Process::start(&config);
    let (mut host, _) = Host::attached(server.address, 1, LastRun::Unknown).await;
    for seq in 1..=5 {
        host.record(&record(seq)).await.unwrap();
    }
    host.durable(5).await;
    let refuses = |args: &[&str], reason: &str| {
        let output = cli(&config, args);
        let errors = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!output.status.success() && errors.contains(reason), "{args:?}: {errors}");
    };
    refuses(&["recover", "shop", "--primary-is-dead"], "initial copy");
    refuses(&["recover", "other"], "the groups are: shop");
    refuses(&["export", "shop", "db.root", "/nonexistent/x"], "initial copy");
    refuses(&["serve"], "another tidelock-backup uses");
    host.record(&copy_done(6)).await.unwrap();
    host.durable(6).await;
}
