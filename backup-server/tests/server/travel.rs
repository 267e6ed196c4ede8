//! What operators do with the past, with the real server and command line, and other people's NBD clients.

use crate::common::{
    Host, Process, WINDOW, at, cli, cli_json, config, copy_done, disk_after, exported, has, record,
    refused, replicated, send,
};
use serde_json::Value;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use tidelock_protocol::message::LastRun;
use tidelock_protocol::record::{DiskChange, Effect, Payload, Record};
use tokio::net::TcpStream;

/// What an NBD client reads from a disk of a view.
fn copied(view: &Value, dir: &Path) -> Vec<u8> {
    let image = dir.join("copied.img");
    let uri = view["disks"][0]["uri"].as_str().unwrap();
    let status = Command::new("nbdcopy").arg(uri).arg(&image).status().unwrap();
    assert!(status.success());
    std::fs::read(&image).unwrap()
}

fn qemu_io(view: &Value, commands: &[&str]) -> String {
    let mut io = Command::new("qemu-io");
    io.args(["-f", "raw"]);
    for command in commands {
        io.args(["-c", command]);
    }
    let output = io.arg(view["disks"][0]["uri"].as_str().unwrap()).output().unwrap();
    String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr)
}

/// A command that goes on until it is ended; ended when dropped.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn running(config: &Path, args: &[&str]) -> (Running, Value) {
    let mut child = Command::new(env!("CARGO_BIN_EXE_tidelock-backup"))
        .args(["--config", config.to_str().unwrap()])
        .args(args)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut line = String::new();
    let mut output = std::io::BufReader::new(child.stdout.take().unwrap());
    std::io::BufRead::read_line(&mut output, &mut line).unwrap();
    (Running(child), serde_json::from_str(&line).unwrap_or_else(|e| panic!("{e}: {line}")))
}

#[tokio::test(flavor = "multi_thread")]
async fn views_show_what_was_then_while_replication_goes_on_and_change_nothing() {
    if !["qemu-img", "qemu-io", "nbdcopy"].into_iter().all(has) {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let config = config(dir.path(), WINDOW);
    let (server, mut host) = replicated(&config, 400).await;
    for seq in [1, 2, 137, 399, 400] {
        assert!(exported(&config, &at(seq), dir.path()) == disk_after(seq), "{seq}");
    }
    let wall = exported(&config, "hlc:200.65535", dir.path());
    assert!(wall == disk_after(200));
    assert!(exported(&config, "db=77", dir.path()) == disk_after(77));
    assert!(exported(&config, "oldest", dir.path()) == disk_after(1));

    let old = &["view", "shop", "--at", "hlc:123.9", "--detach", "--name", "old", "--json"];
    let old = cli_json(&config, old);
    assert_eq!(old["at"]["seqs"]["db"], 123);
    assert_eq!(old["at"]["hlc"], "123.0");
    let taken = refused(&config, &["view", "shop", "--detach", "--name", "old"]);
    assert!(taken.contains("view --close old"), "{taken}");

    let write = ["view", "shop", "--at", "hlc:300.0", "--write", "--quota", "128KiB", "--json"];
    let (drill, view) = running(&config, &write);
    assert_eq!((&view["writable"], &view["quota_bytes"]), (&true.into(), &(128 << 10).into()));
    let done = qemu_io(
        &view,
        &["write -P 9 1000000 4096", "write -z 0 65536", "write -f -P 7 513 3", "flush"],
    );
    assert!(!done.contains("failed"), "{done}");
    let mut expected = disk_after(300);
    expected[1_000_000..1_004_096].fill(9);
    expected[..65536].fill(0);
    expected[513..516].fill(7);
    assert!(copied(&view, dir.path()) == expected);
    let full = qemu_io(&view, &["write -P 5 2097152 131072"]);
    assert!(full.contains("No space left on device"), "{full}");
    assert!(copied(&view, dir.path()) == expected, "nothing of it was written");

    // Replication goes on under it, and neither sees the other (rules 5 and 7).
    send(&mut host, 401, 700).await;
    assert!(copied(&old, dir.path()) == disk_after(123));
    assert!(copied(&view, dir.path()) == expected);
    assert!(exported(&config, &at(300), dir.path()) == disk_after(300));
    assert!(exported(&config, "latest", dir.path()) == disk_after(700));

    let open = cli_json(&config, &["view", "--list", "--json"]);
    let names: Vec<_> = open["views"].as_array().unwrap().iter().map(|v| &v["name"]).collect();
    assert_eq!(names, ["old", "view-1"]);
    assert!(open["views"][1]["used_bytes"].as_u64().unwrap() >= 8192);
    assert_eq!(std::fs::read_dir(dir.path().join("data/views")).unwrap().count(), 0, "no names");
    drop(drill);
    cli_json(&config, &["view", "--close", "old", "--json"]);
    let socket = old["disks"][0]["socket"].as_str().unwrap();
    assert!(!Path::new(socket).exists());
    assert!(refused(&config, &["view", "--close", "old"]).contains("there is no view old"));
    server.terminate();

    // With no server this process serves it.
    let (_alone, view) = running(&config, &["view", "shop", "--at", "hlc:650.0", "--json"]);
    assert!(copied(&view, dir.path()) == disk_after(650));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_view_is_moved_under_its_clients_and_a_request_sees_one_point() {
    use tidelock_backup_server::server::nbd_client::Client;
    let dir = tempfile::tempdir().unwrap();
    let config = config(dir.path(), WINDOW);
    let (_server, mut host) = replicated(&config, 300).await;
    let open = ["view", "shop", "--at", "hlc:100.0", "--detach", "--name", "v", "--json"];
    let view = cli_json(&config, &open);
    let socket = view["disks"][0]["socket"].as_str().unwrap().to_owned();
    let read = |client: &mut Client| {
        let mut content = vec![0; crate::common::DISK_BYTES as usize];
        client.read(0, &mut content).unwrap();
        content
    };
    let mut client = Client::connect(Path::new(&socket), "db.root").unwrap();
    assert_eq!(client.size_bytes(), crate::common::DISK_BYTES);
    assert!(read(&mut client) == disk_after(100));
    let roll = |to: &str, more: &[&str]| {
        cli_json(&config, &[&["view", "--roll", "v", "--to", to, "--json"], more].concat())
    };
    // One client reads the disk in one request again and again, while it is moved.
    let (one, other) = (disk_after(100), disk_after(250));
    let hammering = std::thread::spawn(move || {
        let mut client = Client::connect(Path::new(&socket), "db.root").unwrap();
        let (mut ones, mut others) = (0, 0);
        let since = std::time::Instant::now();
        while (ones < 3 || others < 3) && since.elapsed() < crate::common::HANG {
            let found = read(&mut client);
            ones += u32::from(found == one);
            others += u32::from(found == other);
            assert!(found == one || found == other, "a mixture");
        }
        (ones, others)
    });
    let mut times = 0;
    while !hammering.is_finished() {
        let forward = roll("hlc:250.0", &[]);
        assert_eq!(forward["from"]["seqs"]["db"], 100);
        assert_eq!(forward["at"]["seqs"]["db"], 250);
        let back = roll("hlc:100.0", &[]);
        assert_eq!(forward["changed"], back["changed"]);
        times += 1;
    }
    let (ones, others) = hammering.join().unwrap();
    assert!(ones >= 3 && others >= 3, "{ones} and {others} in {times} rounds");
    let rolled = roll("latest", &[]);
    assert!(read(&mut client) == disk_after(300), "the same connection");
    let mut written = vec![false; crate::common::DISK_BYTES as usize];
    for record in (101..=300).map(record) {
        written[record.body.offset as usize..][..record.body.len_bytes() as usize].fill(true);
    }
    let bytes = written.iter().filter(|written| **written).count() as u64;
    assert_eq!(rolled["changed"][0]["bytes"], bytes);

    // What is written to a view belongs to its point.
    let write =
        ["view", "shop", "--at", "hlc:50.0", "--write", "--detach", "--name", "w", "--json"];
    let writable = cli_json(&config, &write);
    let socket = writable["disks"][0]["socket"].as_str().unwrap();
    let mut client = Client::connect(Path::new(socket), "db.root").unwrap();
    client.write(8192, &[9; 4096]).unwrap();
    let kept = refused(&config, &["view", "--roll", "w", "--to", "hlc:60.0"]);
    assert!(kept.contains("--discard-writes"), "{kept}");
    let mut content = [0; 4096];
    client.read(8192, &mut content).unwrap();
    assert_eq!(content, [9; 4096]);
    let discard = ["view", "--roll", "w", "--to", "hlc:60.0", "--discard-writes", "--json"];
    let discarded = cli_json(&config, &discard);
    assert_eq!(discarded["discarded_bytes"], 4096);
    assert_eq!((&discarded["used_bytes"], &discarded["writable"]), (&0.into(), &true.into()));
    assert!(read(&mut client) == disk_after(60));
    client.zero(0, 65536).unwrap();
    client.flush().unwrap();
    assert!(read(&mut client)[..65536] == [0; 65536]);

    // Where it cannot be moved to it stays.
    for (args, part) in [
        (["view", "--roll", "x", "--to", "latest"], "open are: v, w"),
        (["view", "--roll", "v", "--to", "hlc:999.0"], "`latest`"),
    ] {
        let errors = refused(&config, &args);
        assert!(errors.contains(part), "{args:?}: {errors}");
    }
    send(&mut host, 301, 310).await;
    let v = &cli_json(&config, &["view", "--list", "--json"])["views"][0];
    assert_eq!(v["at"]["seqs"]["db"], 300);
    let text = cli(&config, &["view", "--roll", "v"]);
    let text = String::from_utf8_lossy(&text.stdout).into_owned();
    assert!(text.contains("it was at") && text.contains("were written, in"), "{text}");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_cannot_be_shown_is_refused_with_what_can() {
    let dir = tempfile::tempdir().unwrap();
    let config = config(dir.path(), WINDOW);
    let server = Process::start(&config);
    let (mut host, _) = Host::attached(server.address, 1, LastRun::Unknown).await;
    for seq in 1..=4 {
        host.record(&record(seq)).await.unwrap();
    }
    host.durable(4).await;
    let initialising = refused(&config, &["view", "shop", "--at", "hlc:3.0"]);
    assert!(initialising.contains("initial copy of db"), "{initialising}");
    host.record(&copy_done(5)).await.unwrap();
    send(&mut host, 6, 20).await;
    for (args, part) in [
        (["view", "shop", "--at", "2999-01-01"], "hlc:20.0"),
        (["view", "shop", "--at", "hlc:21.0"], "`latest`"),
        (["view", "shop", "--at", "yesterday"], "bookmark:yesterday"),
        (["view", "shop", "--at", "bookmark:x"], "no bookmark or pin x"),
        (["view", "shop", "--at", "web=3"], "those are: db"),
        (["view", "shop", "--at", "hlc:3.0"], "initial copy of db"),
        (["view", "other", "--at", "latest"], "the groups are: shop"),
        (["view", "shop", "--name", "a/b"], "cannot be a view's name"),
        (["diff", "shop", "hlc:6.0", "hlc:99.0"], "is not complete yet"),
        (["timeline", "shop", "--from", "db=1,db=2"], "twice"),
    ] {
        let errors = refused(&config, &args);
        assert!(errors.contains(part), "{args:?}: {errors}");
    }
    let huge = ["view", "shop", "--write", "--quota", "8000TiB"];
    assert!(refused(&config, &huge).contains("give a smaller --quota"));
    server.terminate();
    let detached = refused(&config, &["view", "shop", "--detach"]);
    assert!(detached.contains("no server runs"), "{detached}");
}

#[tokio::test(flavor = "multi_thread")]
async fn bookmarks_and_pins_survive_a_kill_and_are_moved_only_when_told() {
    if !has("qemu-img") {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let config = config(dir.path(), WINDOW);
    let (server, _host) = replicated(&config, 50).await;
    let set = ["bookmark", "shop", "before-deploy", "--at", "hlc:20.0", "--json"];
    assert_eq!(cli_json(&config, &set)["mark"]["at"]["seqs"]["db"], 20);
    cli_json(&config, &["pin", "shop", "gold", "--at", "bookmark:before-deploy", "--json"]);
    let soon = ["pin", "shop", "soon", "--expires", "1ms", "--json"];
    cli_json(&config, &soon);
    let taken = refused(&config, &["bookmark", "shop", "before-deploy", "--at", "hlc:30.0"]);
    assert!(taken.contains("at 20.0") && taken.contains("--move"), "{taken}");
    let kept = refused(&config, &["bookmark", "shop", "gold"]);
    assert!(kept.contains("there is a pin gold already"), "{kept}");
    server.kill();

    let server = Process::start(&config);
    let pins = cli_json(&config, &["pin", "shop", "--list", "--json"]);
    assert_eq!(pins["marks"].as_array().unwrap().len(), 1, "one has expired: {pins}");
    assert_eq!(
        (&pins["marks"][0]["name"], &pins["marks"][0]["lost"]),
        (&"gold".into(), &false.into())
    );
    for name in ["bookmark:before-deploy", "bookmark:gold"] {
        assert!(exported(&config, name, dir.path()) == disk_after(20), "{name}");
    }
    let moved = ["bookmark", "shop", "before-deploy", "--at", "hlc:30.0", "--move", "--json"];
    cli_json(&config, &moved);
    let again = ["bookmark", "shop", "before-deploy", "--at", "hlc:30.0", "--json"];
    cli_json(&config, &again);
    server.terminate();

    // With no server as well.
    let timeline = cli_json(&config, &["timeline", "shop", "--buckets", "7", "--json"]);
    let marks = timeline["marks"].as_array().unwrap();
    let marks =
        marks.iter().map(|m| (m["name"].as_str().unwrap(), m["at"]["hlc"].as_str().unwrap()));
    assert_eq!(marks.collect::<Vec<_>>(), [("before-deploy", "30.0"), ("gold", "20.0")]);
    let spans = timeline["spans"].as_array().unwrap();
    let sum = |what: &str| spans.iter().map(|span| span[what].as_u64().unwrap()).sum::<u64>();
    let bytes: u64 = (2..=50).map(|seq| u64::from(record(seq).body.len_bytes())).sum();
    assert_eq!((spans.len(), sum("records"), sum("bytes")), (7, 49, bytes));
    // After records 9, 19, ... 49, as the ones that follow them say.
    assert_eq!(sum("flushes"), 5);
    let last = spans.iter().rev().find_map(|span| span["last_flush"].as_object()).unwrap();
    assert_eq!((last["member"].as_str(), last["seq"].as_u64()), (Some("db"), Some(49)));
    cli_json(&config, &["bookmark", "shop", "before-deploy", "--remove", "--json"]);
    let gone = refused(&config, &["bookmark", "shop", "before-deploy", "--remove"]);
    assert!(gone.contains("there are: none"), "{gone}");
    let text = cli(&config, &["timeline", "shop", "--from", "hlc:10.0", "--to", "latest"]);
    let text = String::from_utf8_lossy(&text.stdout).into_owned();
    assert!(text.contains("* pin") && text.contains("records"), "{text}");
    assert!(text.contains("flush") && text.contains("after db=49"), "{text}");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_increment_makes_one_image_of_another_in_both_directions() {
    if !has("qemu-img") {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let config = config(dir.path(), WINDOW);
    let (_server, _host) = replicated(&config, 300).await;
    let diff = cli_json(&config, &["diff", "shop", "hlc:100.0", "db=120", "--extents", "--json"]);
    let mut written = vec![false; crate::common::DISK_BYTES as usize];
    for record in (101..=120).map(record) {
        written[record.body.offset as usize..][..record.body.len_bytes() as usize].fill(true);
    }
    let disk = &diff["disks"][0];
    assert_eq!(disk["bytes"], written.iter().filter(|w| **w).count() as u64);
    for range in disk["ranges"].as_array().unwrap() {
        let (offset, len) =
            (range[0].as_u64().unwrap() as usize, range[1].as_u64().unwrap() as usize);
        assert!(written[offset..offset + len].iter().all(|w| *w), "{range}");
    }
    let (up, down) = (dir.path().join("up"), dir.path().join("down"));
    let make = |from: &str, to: &str, out: &Path| {
        let out = out.to_str().unwrap();
        cli_json(
            &config,
            &["diff", "shop", from, to, "--disk", "db.root", "--output", out, "--json"],
        )
    };
    make("hlc:100.0", "latest", &up);
    make("latest", "hlc:100.0", &down);
    let image = dir.path().join("image");
    std::fs::write(&image, disk_after(100)).unwrap();
    let apply =
        |file: &Path| cli(&config, &["apply", file.to_str().unwrap(), image.to_str().unwrap()]);
    assert!(apply(&up).status.success());
    assert!(std::fs::read(&image).unwrap() == disk_after(300));
    assert!(apply(&down).status.success());
    assert!(std::fs::read(&image).unwrap() == disk_after(100));

    let mut damaged = std::fs::read(&up).unwrap();
    let last = damaged.len() - 40;
    damaged[last] ^= 1;
    std::fs::write(dir.path().join("damaged"), damaged).unwrap();
    let refused_one = apply(&dir.path().join("damaged"));
    assert!(!refused_one.status.success());
    assert!(std::fs::read(&image).unwrap() == disk_after(100), "nothing of it");
    std::fs::write(&image, [0; 512]).unwrap();
    let other = apply(&up);
    assert!(String::from_utf8_lossy(&other.stderr).contains("not a raw image of that disk"));
    let exists =
        ["diff", "shop", "oldest", "latest", "--disk", "db.root", "--output", up.to_str().unwrap()];
    assert!(refused(&config, &exists).contains("exists"));
    let leftovers = std::fs::read_dir(dir.path()).unwrap();
    assert!(leftovers.flatten().all(|e| !e.file_name().to_string_lossy().contains("unfinished")));
}

/// The last block of the disk, where no other record writes, gets this content.
fn accident(seq: u64) -> Record {
    let data = Payload::new(vec![0xee; 512].into());
    Record {
        body: DiskChange {
            offset: crate::common::DISK_BYTES - 512,
            effect: Effect::Write(data),
            ..record(seq).body
        },
        ..record(seq)
    }
}

/// Looks at the last byte of the disk, writes to the disk, and says what it saw.
const CHECK: &str = r#"
    set -e
    uri="nbd+unix:///db.root?socket=$TIDELOCK_VIEW_DB_ROOT"
    test -S "$TIDELOCK_VIEW_DIR/db.root.sock"
    last=$(nbdcopy "$uri" - | tail -c 1 | od -An -tu1 | tr -d ' ')
    qemu-io -f raw -c "write -P 1 0 4194304" "$uri" > /dev/null
    echo "step $TIDELOCK_STEP of $TIDELOCK_GROUP at $TIDELOCK_AT_SEQS"
    case "$SKIP_FROM,$last" in ,238) exit 1;; ,0) exit 0;; esac
    seq=${TIDELOCK_AT_SEQS#db=}
    if [ "$seq" -ge "$SKIP_FROM" ] && [ "$seq" -le "$SKIP_TO" ]; then exit 125; fi
    test "$last" = 0
"#;

#[tokio::test(flavor = "multi_thread")]
async fn bisect_finds_the_record_that_did_it() {
    if !["nbdcopy", "qemu-io"].into_iter().all(has) {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let config = config(dir.path(), WINDOW);
    let (_server, mut host) = replicated(&config, 276).await;
    host.record(&accident(277)).await.unwrap();
    send(&mut host, 278, 500).await;
    let bisect = |more: &[&str], env: &[(&str, &str)], check: &str| {
        Command::new(env!("CARGO_BIN_EXE_tidelock-backup"))
            .args(["--config", config.to_str().unwrap(), "bisect", "shop", "--json"])
            .args(more)
            .args(["--", "sh", "-c", check])
            .env_remove("SKIP_FROM")
            .envs(env.iter().copied())
            .stdin(Stdio::null())
            .output()
            .unwrap()
    };
    let exact = bisect(&["--from", "oldest", "--pin", "clean"], &[], CHECK);
    assert_eq!(exact.status.code(), Some(0), "{exact:?}");
    let found: Value = serde_json::from_slice(&exact.stdout).unwrap();
    assert_eq!(found["exact"], true);
    assert_eq!(
        (&found["last_good"]["seqs"]["db"], &found["first_bad"]["seqs"]["db"]),
        (&276.into(), &277.into())
    );
    let records = found["records"].as_array().unwrap();
    assert_eq!((records.len(), &records[0]["seq"]), (1, &277.into()));
    assert_eq!((&records[0]["disk"], &records[0]["len_bytes"]), (&"db.root".into(), &512.into()));
    let steps = found["steps"].as_array().unwrap().len();
    assert!((3..=12).contains(&steps), "{steps} steps for 500 records");
    let pin = cli_json(&config, &["pin", "shop", "--list", "--json"]);
    assert_eq!(
        (&pin["marks"][0]["name"], &pin["marks"][0]["at"]["hlc"]),
        (&"clean".into(), &"276.0".into())
    );

    // Of some around it nothing can be said.
    let skips = [("SKIP_FROM", "270"), ("SKIP_TO", "279")];
    let inexact = bisect(&["--from", "hlc:200.0", "--to", "db=300"], &skips, CHECK);
    assert_eq!(inexact.status.code(), Some(3), "{inexact:?}");
    let found: Value = serde_json::from_slice(&inexact.stdout).unwrap();
    assert_eq!(
        (&found["last_good"]["seqs"]["db"], &found["first_bad"]["seqs"]["db"]),
        (&269.into(), &280.into())
    );
    assert_eq!(found["skipped"].as_array().unwrap().len(), 10);

    for (more, check, part) in [
        (&["--from", "hlc:300.0"][..], CHECK, "is bad already"),
        (&["--from", "hlc:9.0", "--to", "hlc:99.0"], CHECK, "is still good"),
        (&["--from", "hlc:9.0"], "exit 125", "cannot say what --from"),
        (&["--from", "hlc:9.0"], "exit 200", "so the search ends"),
        (&["--from", "hlc:9.0"], "/nonexistent/check", "was it found"),
    ] {
        let output = bisect(more, &[], check);
        let errors = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(1), "{more:?}: {errors}");
        assert!(errors.contains(part), "{more:?}: {errors}");
    }
    // No view is left.
    crate::common::wait_until("the last view has ended", || {
        let open = cli_json(&config, &["view", "--list", "--json"]);
        open["views"].as_array().unwrap().is_empty()
    });
    assert!(exact.status.signal().is_none());
}

/// Folds as soon as there is a MiB, and keeps no window.
const NO_WINDOW: &str =
    "[journal]\nsegment = \"1MiB\"\nfold_min = \"1MiB\"\n[retention]\nwindow = \"0s\"\n";

/// Sends until what is asked for holds, with enough in each round for a fold.
async fn send_until(host: &mut Host<TcpStream>, sent: &mut u64, holds: impl Fn() -> bool) {
    for _ in 0..40 {
        if holds() {
            return;
        }
        send(host, *sent + 1, *sent + 600).await;
        *sent += 600;
    }
    panic!("it does not come to be after {sent} records");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pin_outlives_the_window_and_a_kill_and_lets_go_when_it_is_removed() {
    if !has("qemu-img") {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let config = config(dir.path(), NO_WINDOW);
    let (server, mut host) = replicated(&config, 100).await;
    cli_json(&config, &["pin", "shop", "gold", "--at", "hlc:50.0", "--json"]);
    cli_json(&config, &["bookmark", "shop", "later", "--at", "hlc:60.0", "--json"]);
    let unfolded = || {
        let status = cli_json(&config, &["status", "--json"]);
        status["groups"][0]["unfolded_bytes"].as_u64().unwrap()
    };
    let mut sent = 100;
    send_until(&mut host, &mut sent, || unfolded() > 3 << 20).await;
    let shows =
        |at: &str, seq| assert!(exported(&config, at, dir.path()) == disk_after(seq), "{at}");
    shows("bookmark:gold", 50);
    shows("bookmark:later", 60);
    server.kill();

    let server = Process::start(&config);
    let continues = LastRun::Continues { from: tidelock_protocol::ids::Seq(sent + 1) };
    let (mut host, _) = Host::attached(server.address, 1, continues).await;
    let before = unfolded();
    send_until(&mut host, &mut sent, || unfolded() > before + (2 << 20)).await;
    shows("bookmark:gold", 50);
    shows("latest", sent);
    cli_json(&config, &["pin", "shop", "gold", "--remove", "--json"]);
    let is_gone = || {
        let marks = cli_json(&config, &["bookmark", "shop", "--list", "--json"]);
        marks["marks"].as_array().unwrap().is_empty()
    };
    send_until(&mut host, &mut sent, is_gone).await;
    let gone = refused(&config, &["view", "shop", "--at", "hlc:50.0"]);
    assert!(gone.contains("is before the window"), "{gone}");
    shows("latest", sent);
    server.terminate();
}
