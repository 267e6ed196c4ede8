//! `recover`, its rehearsal and its machines, on the real server process and QEMU.

use crate::common::{
    CHANNEL, HANG, Host, Process, cli, cli_json, config, exported, has, refused, replicated,
    wait_until,
};
use std::fs::Permissions;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;
use tidelock_protocol::ids::MonoNanos;
use tidelock_protocol::message::Message;
use tokio::net::TcpStream;

const QEMU: &str = "qemu-system-x86_64";
const BOOT: [&str; 5] = ["recover", "shop", "--boot", "--accelerator", "tcg"];

/// A machine of the server's outlives the server: it must not outlive the test.
struct Ends(u32);

impl Drop for Ends {
    fn drop(&mut self) {
        let pid = rustix::process::Pid::from_raw(self.0 as i32).unwrap();
        let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
    }
}

fn machines(config: &Path) -> Vec<serde_json::Value> {
    let listed = cli_json(config, &["machine", "list", "--json"]);
    listed["machines"].as_array().unwrap().clone()
}

/// QEMU's process.
fn pid_of(machine: &serde_json::Value) -> u64 {
    machine["handle"]["process"]["pid"].as_u64().unwrap_or_else(|| panic!("{machine}"))
}

fn is_recovered(config: &Path) -> bool {
    !cli_json(config, &["status", "--json"])["groups"][0]["recovered"].is_null()
}

/// A field of a process's status.
fn of_process(pid: u64, field: &str) -> String {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix(field));
    line.unwrap_or_else(|| panic!("{field} in {status}")).trim().to_owned()
}

#[tokio::test(flavor = "multi_thread")]
async fn all_that_can_be_wrong_is_found_before_the_primary_is_fenced() {
    if !has(QEMU) {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let config = config(dir.path(), "");
    let (_server, mut host) = replicated(&config, 9).await;
    let with = |more: &[&'static str]| [&BOOT[..], more].concat();

    // Nobody has looked at what the host says of its machine.
    let told = refused(&config, &with(&[]));
    assert!(told.contains("nobody has approved") && told.contains("memory 64 MiB"), "{told}");
    for (more, reason) in [
        (&["--accept-machine", "--network", "lan=user"][..], "--network lan=user"),
        (&["--accept-machine", "--qemu", "/nowhere/qemu"], "/nowhere/qemu"),
        (&["--accept-machine", "--", "-no-such-option"], "no-such-option"),
        (&["--accept-machine", "--machine", "/nowhere/vm.json"], "/nowhere/vm.json"),
    ] {
        let told = refused(&config, &with(more));
        assert!(told.contains(reason), "{more:?}: {told}");
    }
    // A kernel that is not at this site.
    let boot = dir.path().join("boot.toml");
    let text = "[[machine]]\ngroup = \"shop\"\nmember = \"db\"\nkernel = \"vmlinuz\"\n";
    std::fs::write(&boot, text).unwrap();
    assert!(refused(&config, &with(&["--accept-machine"])).contains("vmlinuz of db is not there"));
    std::fs::write(&boot, text.replace("\"db\"", "\"bd\"")).unwrap();
    assert!(refused(&config, &with(&["--accept-machine"])).contains("no bd to boot, but db"));
    std::fs::remove_file(&boot).unwrap();

    let rehearsal = cli(&config, &with(&["--dry-run"]));
    let text = String::from_utf8_lossy(&rehearsal.stdout).into_owned();
    assert!(rehearsal.status.success(), "{rehearsal:?}");
    for part in ["-accel tcg", "export=db.root", "nothing was changed", "up to seq 9"] {
        assert!(text.contains(part), "{part} in {text}");
    }
    let plain = cli(&config, &["recover", "shop", "--dry-run"]);
    assert!(plain.status.success(), "{plain:?}");
    assert!(!is_recovered(&config), "a rehearsal fences nobody");
    // The host goes on as if nothing had been.
    crate::common::send(&mut host, 10, 12).await;
    assert!(machines(&config).is_empty());
}

/// A QEMU that ends with KVM at once, as where its user may not use it.
#[tokio::test(flavor = "multi_thread")]
async fn machines_run_without_kvm_where_qemu_does_not_start_with_it() {
    if !has(QEMU) {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let config = config(dir.path(), "");
    let (_server, _host) = replicated(&config, 9).await;
    let qemu = dir.path().join("qemu");
    let refuses = "case \"$*\" in *'-accel kvm'*) echo no KVM here >&2; exit 1;; esac";
    std::fs::write(&qemu, format!("#!/bin/sh\n{refuses}\nexec {QEMU} \"$@\"\n")).unwrap();
    // QEMU is another user.
    for path in [dir.path(), &qemu] {
        std::fs::set_permissions(path, Permissions::from_mode(0o755)).unwrap();
    }
    let words = ["recover", "shop", "--boot", "--accept-machine", "--dry-run", "--qemu"];
    let rehearsal = cli(&config, &[&words[..], &[qemu.to_str().unwrap()]].concat());
    let [line, notes] = [&rehearsal.stdout, &rehearsal.stderr].map(|s| String::from_utf8_lossy(s));
    assert!(rehearsal.status.success() && line.contains("-accel tcg -cpu max"), "{line} {notes}");
    let is_tried = Path::new("/dev/kvm").exists();
    let told = format!("{line}{notes}");
    assert_eq!(told.contains("does not start with KVM") && told.contains("no KVM here"), is_tried);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_machine_is_the_servers_and_each_disk_has_one_guest() {
    if !has(QEMU) {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let config = config(dir.path(), "");
    let (server, _host) = replicated(&config, 9).await;
    let boot = [&BOOT[..], &["--accept-machine"]].concat();
    let booted = cli(&config, &boot);
    let told = String::from_utf8_lossy(&booted.stderr).into_owned();
    assert!(booted.status.success(), "{told}");
    let running = machines(&config);
    let pid = pid_of(&running[0]);
    let _ends = Ends(pid as u32);
    assert!(told.contains(&format!("db runs as QEMU's process {pid}")), "{told}");

    // Without privileges, and in a filter of its own.
    assert_eq!(of_process(pid, "CapEff:"), "0000000000000000");
    assert_eq!(
        (of_process(pid, "NoNewPrivs:").as_str(), of_process(pid, "Seccomp:").as_str()),
        ("1", "2")
    );
    if of_process(std::process::id().into(), "CapEff:") != "0000000000000000" {
        assert!(!of_process(pid, "Uid:").split_whitespace().any(|uid| uid == "0"));
    }

    let again = refused(&config, &boot);
    assert!(again.contains("db runs here already") && again.contains("machine stop"), "{again}");
    assert_eq!(machines(&config).len(), 1);

    // It outlives the server, which finds it, and its disk comes back.
    server.kill();
    let server = Process::start(&config);
    assert_eq!(pid_of(&machines(&config)[0]), pid);
    assert!(refused(&config, &boot).contains("db runs here already"));
    let status = cli(&config, &["status"]);
    assert!(String::from_utf8_lossy(&status.stdout).contains("machine db of group shop runs here"));

    // Its console, from a pipe; leaving it does not end the machine.
    let mut attached = Command::new(env!("CARGO_BIN_EXE_tidelock-backup"))
        .args(["--config", config.to_str().unwrap(), "machine", "attach", "shop", "db"])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    std::thread::sleep(Duration::from_millis(500));
    let hangup = rustix::process::Pid::from_raw(attached.id() as i32).unwrap();
    let _ = rustix::process::kill_process(hangup, rustix::process::Signal::HUP);
    attached.wait().unwrap();
    assert_eq!(pid_of(&machines(&config)[0]), pid);

    stop_now(&config);
    wait_until("QEMU is gone", || {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat"));
        stat.map_or(true, |stat| stat.contains(") Z"))
    });

    // Somebody else on the disk.
    let socket = dir.path().join("data/exports/shop/db.root.sock");
    let _client = nbd_client(&socket, "db.root");
    let told = refused(&config, &boot);
    assert!(told.contains("connected to the recovered disk db.root"), "{told}");
    server.terminate();
}

/// Asks QEMU for one thing on the operator's monitor.
fn qmp(machine: &serde_json::Value, command: &serde_json::Value) -> serde_json::Value {
    let path = machine["handle"]["sockets"]["qmp"].as_str().unwrap();
    let mut stream = UnixStream::connect(path).unwrap();
    stream.set_read_timeout(Some(HANG)).unwrap();
    let mut lines = BufReader::new(stream.try_clone().unwrap()).lines();
    let mut answer = serde_json::Value::Null;
    for command in [&serde_json::json!({ "execute": "qmp_capabilities" }), command] {
        stream.write_all(format!("{command}\n").as_bytes()).unwrap();
        answer = loop {
            let line = lines.next().expect("an answer").unwrap();
            let told: serde_json::Value = serde_json::from_str(&line).unwrap();
            assert!(told.get("error").is_none(), "{told}");
            if let Some(answer) = told.get("return") {
                break answer.clone();
            }
        };
    }
    answer
}

fn state_of(machine: &serde_json::Value) -> String {
    let status = qmp(machine, &serde_json::json!({ "execute": "query-status" }));
    status["status"].as_str().unwrap().to_owned()
}

/// Writes to the machine's disk as the guest would.
fn write(machine: &serde_json::Value, pattern: u8, offset: u64) {
    let disk = "/machine/peripheral-anon/device[0]/virtio-backend";
    let line = format!("qemu-io -d {disk} \"write -P {pattern} {offset} 4k\"");
    let arguments = serde_json::json!({ "command-line": line });
    let execute = "human-monitor-command";
    let asked = serde_json::json!({ "execute": execute, "arguments": arguments });
    qmp(machine, &asked);
}

/// The terminal is gone before the machine has run at all: the server lets it run.
#[tokio::test(flavor = "multi_thread")]
async fn a_machine_that_was_started_runs_without_whoever_asked_for_it() {
    if !has(QEMU) {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let config = config(dir.path(), "");
    let (server, _host) = replicated(&config, 9).await;
    for signal in [rustix::process::Signal::KILL, rustix::process::Signal::HUP] {
        // Also if this run was started by nohup.
        let mut asked = Command::new("env")
            .args(["--default-signal=HUP", env!("CARGO_BIN_EXE_tidelock-backup")])
            .args(["--config", config.to_str().unwrap()])
            .args(BOOT)
            .args(["--accept-machine", "--console"])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut told = BufReader::new(asked.stderr.take().unwrap()).lines();
        assert!(told.any(|line| line.unwrap().starts_with("booting: ")), "{signal:?}");
        let pid = rustix::process::Pid::from_raw(asked.id() as i32).unwrap();
        rustix::process::kill_process(pid, signal).unwrap();
        asked.wait().unwrap();
        let running = machines(&config);
        let _ends = Ends(pid_of(&running[0]) as u32);
        wait_until("it runs", || state_of(&running[0]) == "running");
        stop_now(&config);
    }
    server.terminate();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_machine_waits_for_its_disks_while_the_server_is_killed_and_started_again() {
    if !has(QEMU) {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let config = config(dir.path(), "");
    let (server, _host) = replicated(&config, 9).await;
    let booted = cli(&config, &[&BOOT[..], &["--accept-machine"]].concat());
    assert!(booted.status.success(), "{booted:?}");
    let machine = machines(&config).remove(0);
    let _ends = Ends(pid_of(&machine) as u32);
    write(&machine, 7, 0);

    server.kill();
    let writes = {
        let machine = machine.clone();
        std::thread::spawn(move || write(&machine, 9, 4096))
    };
    std::thread::sleep(Duration::from_secs(1));
    assert!(!writes.is_finished(), "it waits, and has no error");
    let server = Process::start(&config);
    writes.join().unwrap();
    assert_eq!(machines(&config), std::slice::from_ref(&machine));
    assert_eq!(state_of(&machine), "running");
    write(&machine, 5, 8192);

    stop_now(&config);
    let disk = exported(&config, "latest", dir.path());
    for (nth, pattern) in [7, 9, 5].into_iter().enumerate() {
        let block = &disk[nth * 4096..][..4096];
        assert!(block.iter().all(|byte| *byte == pattern), "block {nth}: {}", block[0]);
    }
    server.terminate();
}

/// The record of a machine outlives it, if the server is away at its end, and its pid may be somebody else's by then.
#[tokio::test(flavor = "multi_thread")]
async fn a_machine_that_ended_without_the_server_is_forgotten_and_a_reused_pid_is_not_ended() {
    if !has(QEMU) {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let config = config(dir.path(), "");
    let (server, _host) = replicated(&config, 9).await;
    let boot = [&BOOT[..], &["--accept-machine"]].concat();
    assert!(cli(&config, &boot).status.success());
    let pid = pid_of(&machines(&config)[0]);
    server.kill();
    drop(Ends(pid as u32));
    let mut bystander = Command::new("sleep").arg("600").spawn().unwrap();
    let record = dir.path().join("data/guests/shop/db.json");
    let text = std::fs::read_to_string(&record).unwrap();
    let reused = text.replace(&format!("\"pid\": {pid}"), &format!("\"pid\": {}", bystander.id()));
    assert_ne!(text, reused);
    std::fs::write(&record, reused).unwrap();

    let server = Process::start(&config);
    assert!(machines(&config).is_empty() && !record.exists());
    assert!(bystander.try_wait().unwrap().is_none(), "it goes on");
    let again = cli(&config, &boot);
    assert!(again.status.success(), "{again:?}");
    let _ends = Ends(pid_of(&machines(&config)[0]) as u32);

    // A machine that ends by itself is noticed at once, without a question to the server.
    drop(Ends(pid_of(&machines(&config)[0]) as u32));
    wait_until("its record is gone", || !record.exists());
    bystander.kill().unwrap();
    bystander.wait().unwrap();
    server.terminate();
}

/// Stops the machine of the group, which has no other.
fn stop_now(config: &Path) {
    let stopped = cli(config, &["machine", "stop", "shop", "--now"]);
    assert!(stopped.status.success(), "{stopped:?}");
    assert!(machines(config).is_empty());
}

/// A client that has the export open (NBD_OPT_EXPORT_NAME).
fn nbd_client(socket: &Path, export: &str) -> UnixStream {
    let mut client = UnixStream::connect(socket).unwrap();
    let mut greeting = [0; 18];
    client.read_exact(&mut greeting).unwrap();
    let mut asks = 3u32.to_be_bytes().to_vec();
    asks.extend(b"IHAVEOPT");
    asks.extend(1u32.to_be_bytes());
    asks.extend((export.len() as u32).to_be_bytes());
    asks.extend(export.as_bytes());
    client.write_all(&asks).unwrap();
    let mut size_and_flags = [0; 10];
    client.read_exact(&mut size_and_flags).unwrap();
    client
}

/// Says that it lives, for as long as it is not dropped.
fn beats(mut host: Host<TcpStream>) -> tokio::task::JoinHandle<()> {
    tokio::spawn(async move {
        for nth in 1.. {
            host.send(CHANNEL, &Message::Beacon { sent_at: MonoNanos(nth) }).await;
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    })
}

#[tokio::test(flavor = "multi_thread")]
async fn a_primary_that_lives_is_said_to_live() {
    let dir = tempfile::tempdir().unwrap();
    let config = config(dir.path(), "");
    let (_server, host) = replicated(&config, 9).await;
    let beating = beats(host);
    let of = |args: &'static [&'static str]| {
        let config = config.clone();
        tokio::task::spawn_blocking(move || cli(&config, args))
    };
    let told = |output: &std::process::Output| String::from_utf8_lossy(&output.stderr).into_owned();

    // It does not wait for ever.
    let waited = of(&["recover", "shop"]).await.unwrap();
    let text = told(&waited);
    assert!(!waited.status.success() && text.contains("the primary lives: host-a"), "{text}");
    assert!(text.contains("tidelock switchover shop"), "{text}");
    let doubted = of(&["recover", "shop", "--primary-is-dead"]).await.unwrap();
    let text = told(&doubted);
    assert!(
        !doubted.status.success() && text.contains("host-a is connected and was heard"),
        "{text}"
    );
    assert!(text.contains("--although-connected"), "{text}");
    let status = of(&["status", "--json"]).await.unwrap();
    assert!(String::from_utf8_lossy(&status.stdout).contains("\"recovered\": null"));

    let sure = of(&["recover", "shop", "--primary-is-dead", "--although-connected"]).await.unwrap();
    let text = String::from_utf8_lossy(&sure.stdout).into_owned();
    assert!(sure.status.success(), "{sure:?}");
    for part in ["the newest write in it arrived at 20", "the primary was heard last at "] {
        assert!(text.contains(part), "{part} in {text}");
    }
    assert!(text.contains("Its lease was not waited for"), "{text}");
    beating.abort();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_reader_who_goes_is_no_reason_to_panic() {
    let dir = tempfile::tempdir().unwrap();
    let config = config(dir.path(), "");
    let (_server, _host) = replicated(&config, 2).await;
    for args in [&["status"][..], &["status", "--json"], &["machine", "list"]] {
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let output = Command::new(env!("CARGO_BIN_EXE_tidelock-backup"))
            .args(["--config", config.to_str().unwrap()])
            .args(args)
            .stdout(writer)
            .output()
            .unwrap();
        let told = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!told.contains("panicked"), "{told}");
        assert_eq!(output.status.code(), Some(141), "{told}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_bridge_that_cannot_be_used_is_told_with_what_to_write() {
    if !has(QEMU) {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let config = config(dir.path(), "");
    let (_server, _host) = replicated(&config, 9).await;
    let file = dir.path().join("lan.json");
    std::fs::write(&file, r#"{"memory_mib": 64, "networks": [{"name": "lan"}]}"#).unwrap();
    let machine = format!("--machine={}", file.display());
    let args =
        [&BOOT[..], &["--dry-run", &machine, "--network", "lan=bridge:nosuchbridge"]].concat();
    let told = refused(&config, &args);
    assert!(
        told.contains("there is no bridge nosuchbridge here") && told.contains("ip link add"),
        "{told}"
    );
}
