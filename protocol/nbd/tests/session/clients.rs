//! Clients that know nothing of us: libnbd's tools and library, QEMU's tools, fio.
//!
//! A test whose client is not installed says `SKIPPED` and the Debian package.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::common::server::{CHUNK, Server};
use crate::common::*;
use serde_json::Value;
use tidelock_nbd::{BlockSize, Export, ExportTable};

const SIZE: u64 = 16 * MIB;

/// `disk`, writable; `odd`, whose size is no multiple of anything; `ro`, read-only in blocks
/// of 512; `bad`, with a chunk that cannot be read.
fn exports() -> ExportTable {
    ExportTable::new(vec![
        Export { name: "disk".into(), size_bytes: SIZE, ..disk() },
        Export { name: "odd".into(), size_bytes: 1_000_001, ..disk() },
        blocks(),
        Export { name: "bad".into(), ..disk() },
        Export {
            name: "sectors".into(),
            block_size: BlockSize { min: 4096, preferred: 64 << 10, max: 1 << 20 },
            ..disk()
        },
    ])
    .unwrap()
}

/// Whether the client is there; if not, says so.
fn has(client: &str, package: &str) -> bool {
    let found = match client {
        "python3-libnbd" => Command::new("/usr/bin/python3")
            .args(["-c", "import nbd"])
            .output()
            .is_ok_and(|output| output.status.success()),
        _ => std::env::var_os("PATH").is_some_and(|path| {
            std::env::split_paths(&path).any(|directory| directory.join(client).is_file())
        }),
    };
    if !found {
        eprintln!("SKIPPED: {client} is not installed (Debian package {package})");
    }
    found
}

/// Run a client to its end and return what it printed. A client that hangs is killed.
fn run(program: &str, arguments: &[&str]) -> String {
    let output = Command::new("timeout").arg("300").arg(program).args(arguments).output().unwrap();
    let printed = String::from_utf8_lossy(&output.stdout);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{program} {arguments:?}:\n{printed}{errors}");
    assert!(!printed.contains("verification failed"), "{printed}");
    printed.into_owned()
}

fn count(counter: &AtomicU64) -> u64 {
    counter.load(Ordering::Relaxed)
}

/// A file with data and holes, different everywhere.
fn image(path: &Path, seed: u64) {
    let mut bytes = vec![0; SIZE as usize];
    let mut state = seed;
    for (index, chunk) in bytes.chunks_mut(CHUNK).enumerate() {
        if index % 3 != 0 {
            for word in chunk.chunks_mut(8) {
                // xorshift64
                state ^= state << 13;
                state ^= state >> 7;
                state ^= state << 17;
                word.copy_from_slice(&state.to_le_bytes());
            }
        }
    }
    fs::write(path, bytes).unwrap();
}

#[test]
fn nbdinfo_sees_every_export() {
    if !has("nbdinfo", "libnbd-bin") {
        return;
    }
    let server = Server::start(exports());
    let list: Value =
        serde_json::from_str(&run("nbdinfo", &["--list", "--json", &server.uri("")])).unwrap();
    assert_eq!(list["protocol"], "newstyle-fixed");
    assert_eq!(list["structured"], true);
    let names: Vec<&str> = list["exports"]
        .as_array()
        .unwrap()
        .iter()
        .filter_map(|e| e["export-name"].as_str())
        .collect();
    assert_eq!(names, ["disk", "odd", "ro", "bad", "sectors"]);

    let info: Value =
        serde_json::from_str(&run("nbdinfo", &["--json", &server.uri("disk")])).unwrap();
    let export = &info["exports"][0];
    assert_eq!(export["export-size"], SIZE);
    assert_eq!(export["description"], "first");
    assert_eq!(export["contexts"][0], "base:allocation");
    assert_eq!(export["is_read_only"], false);
    for can in [
        "can_cache",
        "can_df",
        "can_fast_zero",
        "can_flush",
        "can_fua",
        "can_multi_conn",
        "can_trim",
        "can_zero",
    ] {
        assert_eq!(export[can], true, "{can}");
    }
    assert_eq!(export["block_size_minimum"], 1);
    assert_eq!(export["block_size_preferred"], 4096);
    assert_eq!(export["block_size_maximum"], 32 << 20);

    let info: Value =
        serde_json::from_str(&run("nbdinfo", &["--json", &server.uri("ro")])).unwrap();
    let export = &info["exports"][0];
    assert_eq!(export["is_read_only"], true);
    assert_eq!(export["can_trim"], false);
    assert_eq!(export["block_size_minimum"], 512);
    server.stop();
}

#[test]
fn nbdcopy_there_and_back() {
    if !has("nbdcopy", "libnbd-bin") {
        return;
    }
    let server = Server::start(exports());
    let (original, copy) = (server.directory().join("original"), server.directory().join("copy"));
    image(&original, 1);
    let parallel = ["--threads=4", "--connections=4", "--requests=64", "--request-size=262144"];
    let uri = server.uri("disk");
    let there = [&parallel[..], &["--flush", original.to_str().unwrap(), &uri]].concat();
    run("nbdcopy", &there);
    assert!(count(&server.counters().connections) >= 4, "multi-conn is used");
    assert!(count(&server.counters().flush) >= 1);
    let back = [&parallel[..], &[&uri, copy.to_str().unwrap()]].concat();
    run("nbdcopy", &back);
    assert!(fs::read(&original).unwrap() == fs::read(&copy).unwrap(), "the copy differs");

    // From disk to disk, one that is all holes, and through 1 MiB requests only.
    run("nbdcopy", &[&server.uri("odd"), copy.to_str().unwrap()]);
    assert!(fs::read(&copy).unwrap() == vec![0; 1_000_001]);
    run("nbdcopy", &[&server.uri("odd"), "null:"]);
    server.stop();
}

#[test]
fn qemu_io_patterns() {
    if !has("qemu-io", "qemu-utils") {
        return;
    }
    let server = Server::start(exports());
    let mut arguments = vec!["-f", "raw"];
    for command in [
        "write -P 0xab 0 1M",
        "write -P 0xcd -f 1000 3000",
        "read -P 0xab 0 1000",
        "read -P 0xcd 1000 3000",
        "read -P 0xab 4000 1044576",
        "flush",
        "write -z 512k 64k",
        "read -P 0 512k 64k",
        "read -P 0xab 576k 64k",
        "write -z -u 640k 64k",
        "read -P 0 640k 64k",
        "discard 768k 64k",
        "read -P 0 768k 64k",
        "aio_write -P 1 2M 1M",
        "aio_write -P 2 3M 1M",
        "aio_write -P 3 4M 1M",
        "aio_flush",
        "read -P 1 2M 1M",
        "read -P 2 3M 1M",
        "read -P 3 4M 1M",
        "write -P 9 8M 8M",
        "read -P 9 8M 8M",
    ] {
        arguments.extend(["-c", command]);
    }
    let uri = server.uri("disk");
    arguments.push(&uri);
    run("qemu-io", &arguments);
    let counters = server.counters();
    assert!(count(&counters.fua) >= 1 && count(&counters.flush) >= 1);
    assert!(count(&counters.zeroes) >= 2 && count(&counters.trim) >= 1);
    assert!(count(&counters.split_reads) >= 1);

    // QEMU opens a read-only export read-only.
    run("qemu-io", &["-r", "-f", "raw", "-c", "read -P 0 0 64k", &server.uri("ro")]);
    server.stop();
}

#[test]
fn qemu_img_maps_converts_and_compares() {
    if !has("qemu-img", "qemu-utils") {
        return;
    }
    let server = Server::start(exports());
    let original = server.directory().join("original");
    let original = original.to_str().unwrap();
    image(Path::new(original), 2);
    let uri = server.uri("disk");
    run("qemu-img", &["convert", "-n", "-f", "raw", "-O", "raw", original, &uri]);
    run("qemu-img", &["compare", "-f", "raw", "-F", "raw", original, &uri]);
    let map: Value =
        serde_json::from_str(&run("qemu-img", &["map", "--output=json", "-f", "raw", &uri]))
            .unwrap();
    let mut at = 0;
    for extent in map.as_array().unwrap() {
        let (start, length) =
            (extent["start"].as_u64().unwrap(), extent["length"].as_u64().unwrap());
        assert_eq!(start, at);
        at += length;
        // One chunk of zeroes, then two of data, and so on.
        let zero = (start / CHUNK as u64).is_multiple_of(3);
        assert_eq!((extent["zero"].as_bool(), extent["data"].as_bool()), (Some(zero), Some(!zero)));
        let expected = if zero { CHUNK } else { 2 * CHUNK } as u64;
        assert_eq!(length, expected.min(SIZE - start));
    }
    assert_eq!(at, SIZE);
    server.stop();
}

/// Everything that the tools above do not send: see the script.
#[test]
fn libnbd_from_python() {
    if !has("python3-libnbd", "python3-libnbd") {
        return;
    }
    let server = Server::start(exports());
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/session/clients.py");
    let printed = run("/usr/bin/python3", &[script, &server.uri("")]);
    assert!(printed.ends_with("all done\n"), "{printed}");
    assert!(count(&server.counters().df_reads) >= 1);
    server.stop();
}

#[test]
fn fio_verifies_random_writes() {
    if !has("fio", "fio") {
        return;
    }
    let server = Server::start(exports());
    let uri = format!("--uri={}", server.uri("disk"));
    run(
        "fio",
        &[
            "--name=verify",
            "--ioengine=nbd",
            &uri,
            "--rw=randwrite",
            "--bsrange=512-64k",
            "--bs_unaligned=1",
            "--iodepth=32",
            "--size=8m",
            "--randseed=1",
            "--verify=crc32c",
            "--do_verify=1",
            "--verify_fatal=1",
            "--verify_state_save=0",
            "--serialize_overlap=1",
        ],
    );
    server.stop();
}
