//! A data directory without room, for real: a small tmpfs in a mount namespace of the server's own.

use crate::common::{CHANNEL, Host, config, copy_done, has, record};
use std::process::{Command, Stdio};
use tidelock_protocol::ids::{MonoNanos, Seq, WriterId};
use tidelock_protocol::message::{LastRun, Message};

#[tokio::test(flavor = "multi_thread")]
async fn without_room_it_stops_acknowledging_says_so_and_folding_makes_room() {
    if !has("unshare") || !has("nsenter") {
        return;
    }
    if !rustix::process::geteuid().is_root() {
        eprintln!("SKIPPED: mounting a tmpfs needs root");
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let data = dir.path().join("data");
    std::fs::create_dir(&data).unwrap();
    // Nothing is folded, so the journal fills what the filler leaves.
    let config = config(dir.path(), "[journal]\nsegment = \"1MiB\"\nfold_min = \"1GiB\"\n");
    let script = "mount -t tmpfs -o size=24m tmpfs \"$0\" && \
                  head -c 12M /dev/zero > \"$0/filler\" && exec \"$1\" --config \"$2\" serve";
    let log = std::fs::File::create(dir.path().join("log")).unwrap();
    let mut server = Command::new("unshare")
        .args(["--mount", "--propagation", "private", "sh", "-c", script])
        .arg(&data)
        .arg(env!("CARGO_BIN_EXE_tidelock-backup"))
        .arg(&config)
        .env("RUST_LOG", "info")
        .env("NO_COLOR", "1")
        .stdin(Stdio::null())
        .stderr(log)
        .spawn()
        .unwrap();
    let pid = server.id().to_string();
    let inside =
        |args: &[&str]| Command::new("nsenter").args(["-t", &pid, "-m"]).args(args).output();
    let address = loop {
        let log = std::fs::read_to_string(dir.path().join("log")).unwrap();
        if let Some((_, rest)) = log.split_once("address=\"") {
            break rest.split('"').next().unwrap().parse().unwrap();
        }
        assert!(server.try_wait().unwrap().is_none(), "{log}");
        std::thread::yield_now();
    };
    let (mut host, _) = Host::attached(address, 1, LastRun::Unknown).await;
    host.record(&copy_done(1)).await.unwrap();
    let (mut next, mut durable, mut reason) = (2, 0, None);
    while reason.is_none() {
        for _ in 0..64 {
            host.record(&record(next)).await.unwrap();
            next += 1;
        }
        // The answer to the last of them, one way or the other.
        while durable < next - 1 && reason.is_none() {
            match host.next().await.expect("an answer").1 {
                Message::Progress(told) => durable = told.durable.0,
                Message::Stalled { reason: Some(told) } => reason = Some(told),
                other => panic!("{other:?}"),
            }
        }
    }
    let told = reason.unwrap();
    assert!(told.contains("room"), "{told}");
    // The lease is still renewed.
    host.send(CHANNEL, &Message::Beacon { sent_at: MonoNanos(5) }).await;
    let binary = env!("CARGO_BIN_EXE_tidelock-backup");
    let config_text = config.to_str().unwrap();
    // More comes in meanwhile.
    for _ in 0..64 {
        host.record(&record(next)).await.unwrap();
        next += 1;
    }
    // Nobody makes room: what was acknowledged goes to the images, in the room that is reserved for that.
    let (mut goes_on, mut is_renewed) = (false, false);
    while durable < next - 1 || !is_renewed {
        match host.next().await.expect("an answer").1 {
            Message::Stalled { reason } => goes_on = reason.is_none(),
            Message::Lease { sent_at } => is_renewed = sent_at == MonoNanos(5),
            Message::Progress(told) => {
                assert!(told.durable.0 >= durable);
                durable = told.durable.0;
                assert_eq!(told.committed.get(WriterId(0)), Seq(durable));
            }
            other => panic!("{other:?}"),
        }
    }
    assert!(goes_on);
    let filler = data.join("filler");
    assert!(inside(&["rm", filler.to_str().unwrap()]).unwrap().status.success());
    let out = dir.path().join("out.img");
    if has("qemu-img") {
        let out_text = out.to_str().unwrap();
        let args = [binary, "--config", config_text, "export", "shop", "db.root", out_text];
        let output = inside(&args).unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        assert!(std::fs::read(&out).unwrap() == crate::common::disk_after(durable));
    }
    // What would fill the disk again is not begun.
    let snapshot = [binary, "--config", config_text, "snapshot", "shop", "x"];
    let refused = inside(&snapshot).unwrap();
    let errors = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(!refused.status.success() && errors.contains("server.snapshots_dir"), "{errors}");
    assert!(!data.join("snapshots/shop").exists());
    server.kill().unwrap();
    server.wait().unwrap();
}
