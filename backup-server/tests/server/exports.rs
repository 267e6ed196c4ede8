//! Exports: whole images and chains, ended by kill -9 and gone on with, read with QEMU's own tools.

use crate::common::{
    DISK_BYTES, NO_WINDOW, WINDOW, cli_json, config, disk_after, has, record, replicated, send,
};
use serde_json::Value;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

fn tools() -> bool {
    ["qemu-img", "qemu-nbd", "setpriv"].into_iter().all(has)
}

fn export(config: &Path, out: &Path, args: &[&str]) -> Value {
    let words = ["export", "shop", "db.root", out.to_str().unwrap(), "--json"];
    cli_json(config, &[&words, args].concat())
}

fn refused(config: &Path, out: &Path, args: &[&str]) -> String {
    let words = ["export", "shop", "db.root", out.to_str().unwrap()];
    crate::common::refused(config, &[&words, args].concat())
}

/// As QEMU reads it, with all that is below it.
fn content(image: &Path) -> Vec<u8> {
    let raw = image.with_extension("as-raw");
    let converted =
        Command::new("qemu-img").args(["convert", "-O", "raw"]).args([image, &raw]).status();
    assert!(converted.unwrap().success(), "{}", image.display());
    let content = std::fs::read(&raw).unwrap();
    std::fs::remove_file(raw).unwrap();
    content
}

fn checked(image: &Path) {
    let checked = Command::new("qemu-img").args(["check", "-q", "-f", "qcow2"]).arg(image).status();
    assert!(checked.unwrap().success(), "{}", image.display());
}

/// BLAKE3 of the BLAKE3s of its MiBs.
fn digest(content: &[u8]) -> String {
    let mut whole = blake3::Hasher::new();
    for block in content.chunks(1 << 20) {
        whole.update(blake3::hash(block).as_bytes());
    }
    whole.finalize().to_hex().to_string()
}

fn nothing_unfinished(dir: &Path) {
    let names = std::fs::read_dir(dir).unwrap().flatten();
    let names: Vec<_> = names.map(|entry| entry.file_name().into_string().unwrap()).collect();
    assert!(names.iter().all(|name| !name.contains("unfinished")), "{names:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_whole_image_and_increments_over_it_in_both_directions() {
    if !tools() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let config = config(dir.path(), WINDOW);
    let (_server, _host) = replicated(&config, 300).await;
    let at = |name: &str| dir.path().join(name);
    let raw = export(&config, &at("a.img"), &["--at", "hlc:120.0"]);
    assert!(std::fs::read(at("a.img")).unwrap() == disk_after(120));
    assert_eq!(raw["images"][0]["digest"], digest(&disk_after(120)));
    let full = export(&config, &at("full.qcow2"), &["--format", "qcow2", "--at", "hlc:150.0"]);
    assert_eq!(
        (&full["images"][0]["at"]["seqs"]["db"], &full["images"][0]["size_bytes"]),
        (&150.into(), &DISK_BYTES.into())
    );
    let base = at("full.qcow2");
    let over = |name: &str, to: &str, base: &Path| {
        let base = base.to_str().unwrap();
        export(&config, &at(name), &["--format", "qcow2", "--at", to, "--base", base])
    };
    let later = over("later.qcow2", "latest", &base);
    over("earlier.qcow2", "hlc:140.0", &base);
    over("over-raw.qcow2", "hlc:130.0", &at("a.img"));
    for (name, seq) in [("full", 150), ("later", 300), ("earlier", 140), ("over-raw", 130)] {
        let image = at(&format!("{name}.qcow2"));
        checked(&image);
        assert!(content(&image) == disk_after(seq), "{name}");
    }
    assert_eq!(later["images"][0]["base"]["file"], "full.qcow2");
    assert_eq!(later["images"][0]["digest"], digest(&disk_after(300)));
    assert!(std::fs::metadata(at("earlier.qcow2")).unwrap().len() < 3 << 20);

    // What is not the base is refused, by what is beside it and by what it has.
    let exists = refused(&config, &base, &[]);
    assert!(exists.contains("exists"), "{exists}");
    let base_text = base.to_str().unwrap();
    let qcow2 = ["--format", "qcow2", "--base", base_text];
    let raw = refused(&config, &at("x.img"), &["--base", base_text]);
    assert!(raw.contains("--format qcow2"), "{raw}");
    let wrong =
        refused(&config, &at("x.qcow2"), &[&qcow2[..], &["--base-at", "hlc:151.0"]].concat());
    assert!(wrong.contains("it is not the base of this"), "{wrong}");
    nothing_unfinished(dir.path());
    let beside = at("full.qcow2.tidelock.json");
    let good = std::fs::read_to_string(&beside).unwrap();
    std::fs::write(&beside, good.replace("db.root", "db.data")).unwrap();
    let other = refused(&config, &at("y.qcow2"), &qcow2);
    assert!(other.contains("it cannot be the base of another disk"), "{other}");
    std::fs::remove_file(&beside).unwrap();
    let unknown = refused(&config, &at("y.qcow2"), &qcow2);
    assert!(unknown.contains("--base-at"), "{unknown}");
    let lie = refused(&config, &at("y.qcow2"), &[&qcow2[..], &["--base-at", "hlc:290.0"]].concat());
    assert!(lie.contains("is not the disk") && lie.contains("Its base is not"), "{lie}");
    assert!(!at("y.qcow2").exists() && !at("y.qcow2.unfinished").exists());
    let truth = [&qcow2[..], &["--base-at", "hlc:150.0", "--at", "hlc:160.0"]].concat();
    export(&config, &at("z.qcow2"), &truth);
    assert!(content(&at("z.qcow2")) == disk_after(160));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_chain_goes_on_where_it_was_and_what_is_damaged_is_told() {
    if !tools() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let config = config(dir.path(), WINDOW);
    let (server, _host) = replicated(&config, 300).await;
    let out = dir.path().join("chain.qcow2");
    let two = ["--format", "qcow2", "--chain", "hlc:100.0", "--chain", "db=200"];
    export(&config, &out, &two);
    server.kill();
    // With no server, and one more.
    let three = export(&config, &out, &[&two[..], &["--chain", "latest"]].concat());
    let kept: Vec<_> = three["images"].as_array().unwrap().iter().map(|i| &i["kept"]).collect();
    assert_eq!(kept, [&Value::Bool(true), &Value::Bool(true), &Value::Bool(false)]);
    for (n, seq) in [(0, 100), (1, 200), (2, 300)] {
        let image = dir.path().join(format!("chain.{n}.qcow2"));
        checked(&image);
        assert!(content(&image) == disk_after(seq), "{n}");
    }
    nothing_unfinished(dir.path());
    let first = dir.path().join("chain.0.qcow2");
    let scribbled = Command::new("qemu-io")
        .args(["-f", "qcow2", "-c", "write -P 3 4096 512"])
        .arg(&first)
        .output()
        .unwrap();
    assert!(scribbled.status.success(), "{scribbled:?}");
    let damaged = refused(&config, &out, &two);
    assert!(damaged.contains("is not what it was"), "{damaged}");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_export_that_is_killed_again_and_again_is_right_in_the_end() {
    if !tools() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let config = config(dir.path(), WINDOW);
    let (_server, mut host) = replicated(&config, 500).await;
    let first = dir.path().join("first.qcow2");
    export(&config, &first, &["--format", "qcow2", "--at", "hlc:100.0"]);
    let base = ["--format", "qcow2", "--base", first.to_str().unwrap()];
    let (mut killed, mut went_on, mut last) = (0, 0, 500);
    for (name, args) in
        [("a.img", &[][..]), ("b.qcow2", &["--format", "qcow2"]), ("c.qcow2", &base)]
    {
        let out = dir.path().join(name);
        // Later each time, so that it is hit at many places.
        for ms in (0..12).map(|n| 8 * 3_u64.pow(n) / 2_u64.pow(n)) {
            let mut child = Command::new(env!("CARGO_BIN_EXE_tidelock-backup"))
                .args(["--config", config.to_str().unwrap(), "export", "shop", "db.root"])
                .arg(&out)
                .args(args)
                .env("TMPDIR", dir.path())
                .stdin(Stdio::null())
                .stdout(Stdio::null())
                .stderr(Stdio::null())
                .spawn()
                .unwrap();
            std::thread::sleep(Duration::from_millis(ms));
            went_on += u32::from(dir.path().join(format!("{name}.unfinished")).exists());
            child.kill().unwrap();
            child.wait().unwrap();
            killed += 1;
            if out.exists() {
                break;
            }
            // `latest` is what it was when it was begun.
            last += 1;
            host.record(&record(last)).await.unwrap();
            host.durable(last).await;
        }
        if !out.exists() {
            export(&config, &out, args);
        }
        let beside = std::fs::read(dir.path().join(format!("{name}.tidelock.json"))).unwrap();
        let beside: Value = serde_json::from_slice(&beside).unwrap();
        let seq = beside["at"]["seqs"]["db"].as_u64().unwrap();
        assert!(content(&out) == disk_after(seq), "{name} at {seq}");
        assert_eq!(beside["digest"], digest(&disk_after(seq)));
        if name.ends_with("qcow2") {
            // Clusters that a kill has left unused are no damage.
            let status = Command::new("qemu-img").args(["check", "-q"]).arg(&out).status().unwrap();
            assert!(matches!(status.code(), Some(0 | 3)), "{status}");
        }
    }
    assert!(killed >= 3 && went_on >= 1, "{killed} and {went_on}");
}

/// Not left to chance: what one that is killed between two of its steps has left.
#[tokio::test(flavor = "multi_thread")]
async fn it_goes_on_from_whatever_a_kill_has_left() {
    if !tools() || !has("prlimit") {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let config = config(dir.path(), WINDOW);
    let (_server, _host) = replicated(&config, 400).await;
    let unfinished = |suffix: &str| dir.path().join(format!("x.img.unfinished{suffix}"));
    for format in ["raw", "qcow2"] {
        let out = dir.path().join("x.img");
        // Its record is there, and a part of the image: no file of it may be larger.
        let begin = || {
            let limited = Command::new("prlimit")
                .args(["--fsize=1500000", env!("CARGO_BIN_EXE_tidelock-backup"), "--config"])
                .arg(&config)
                .args(["export", "shop", "db.root", out.to_str().unwrap(), "--format", format])
                .env("TMPDIR", dir.path())
                .output()
                .unwrap();
            assert!(!limited.status.success() && unfinished(".json").exists());
        };
        let leave: [(&str, &dyn Fn()); 5] = [
            ("no image", &|| std::fs::remove_file(unfinished("")).unwrap()),
            ("an image without its size", &|| {
                std::fs::remove_file(unfinished("")).unwrap();
                let name = if format == "raw" { "" } else { ".new" };
                std::fs::write(unfinished(name), []).unwrap();
            }),
            ("digests without their size", &|| {
                std::fs::write(unfinished(".digests"), [1; 40]).unwrap();
            }),
            ("no digests", &|| {
                let _ = std::fs::remove_file(unfinished(".digests"));
            }),
            ("a record that is being written", &|| {
                std::fs::write(unfinished(".json.new"), "{").unwrap();
            }),
        ];
        for (what, leave) in leave {
            begin();
            leave();
            let made = export(&config, &out, &["--format", format]);
            assert_eq!(made["images"][0]["at"]["seqs"]["db"], 400, "{format}, {what}");
            assert!(content(&out) == disk_after(400), "{format}, {what}");
            std::fs::remove_file(&out).unwrap();
            std::fs::remove_file(dir.path().join("x.img.tidelock.json")).unwrap();
            let _ = std::fs::remove_file(unfinished(".json.new"));
            nothing_unfinished(dir.path());
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn without_room_it_stops_with_a_reason_and_goes_on_with_room() {
    if !tools() || !has("prlimit") {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let config = config(dir.path(), NO_WINDOW);
    let (_server, mut host) = replicated(&config, 400).await;
    let out = dir.path().join("x.qcow2");
    // No file of it may be larger than this, which is what QEMU's write fails at.
    let limited = Command::new("prlimit")
        .args(["--fsize=1500000", env!("CARGO_BIN_EXE_tidelock-backup"), "--config"])
        .arg(&config)
        .args(["export", "shop", "db.root", out.to_str().unwrap(), "--format", "qcow2"])
        .env("TMPDIR", dir.path())
        .output()
        .unwrap();
    assert!(!limited.status.success() && !out.exists());
    assert!(dir.path().join("x.qcow2.unfinished").exists());
    // The point is held until it is made, although the window has nothing else.
    send(&mut host, 401, 1500).await;
    let pins = || cli_json(&config, &["pin", "shop", "--list", "--json"])["marks"].clone();
    let held = pins();
    assert!(held[0]["name"].as_str().unwrap().starts_with("export-"), "{held}");
    assert_eq!((&held[0]["at"]["seqs"]["db"], &held[0]["lost"]), (&400.into(), &false.into()));
    let other = refused(&config, &out, &["--format", "qcow2", "--at", "hlc:7.0"]);
    assert!(other.contains("give the same arguments"), "{other}");
    let made = export(&config, &out, &["--format", "qcow2"]);
    assert_eq!(made["images"][0]["at"]["seqs"]["db"], 400, "where it was begun");
    assert!(content(&out) == disk_after(400));
    nothing_unfinished(dir.path());
    assert_eq!(pins(), serde_json::json!([]));
}
