use super::*;
use crate::ExportedDisk;
use crate::process::Process;
use std::time::Duration;
use tokio::net::UnixListener;

fn guest(member: &str, json: &str) -> Guest {
    let (name, socket) = (format!("{member}.root"), "/nowhere/root.sock".into());
    let disk = ExportedDisk { name, size_bytes: 1 << 20, socket };
    let machine = serde_json::from_str(json).unwrap();
    Guest { member: member.into(), machine, disks: vec![("root".into(), disk)] }
}

#[tokio::test]
async fn every_problem_is_in_one_answer() {
    let dir = tempfile::tempdir().unwrap();
    let boot_file = dir.path().join("boot.toml");
    let of = |member: &str| {
        format!(
            "[[machine]]\ngroup = \"shop\"\nmember = \"{member}\"\nkernel = \"vmlinuz-{member}\"\n"
        )
    };
    fs::write(&boot_file, of("db") + &of("web") + &of("typo")).unwrap();
    let target = Qemu::new(Places { boot_file, boot_dir: dir.path().into() });
    let plan = Plan {
        group: "shop".into(),
        members: vec!["db".into(), "web".into()],
        guests: vec![
            guest("db", r#"{"memory_mib": 64, "disks": [{"name": "root"}, {"name": "log"}]}"#),
            guest("web", r#"{"memory_mib": 16777216}"#),
        ],
        settings: Settings {
            networks: vec!["lan=user".into()],
            qemu: Some("/nowhere/qemu".into()),
            ..Settings::default()
        },
        dir: dir.path().into(),
    };
    let checked = Target::check(&target, &plan).await;
    for part in [
        "has no typo to boot, but db, web",
        "vmlinuz-db of db is not there",
        "vmlinuz-web of web is not there",
        "names the disk log, which is not protected: it has root",
        "--network lan=user",
        "cannot run /nowhere/qemu",
        "MiB of memory, and this host has",
    ] {
        let with = checked.problems.iter().filter(|problem| problem.contains(part)).count();
        assert_eq!(with, 1, "{part} in {:?}", checked.problems);
    }
    assert_eq!(checked.problems.len(), 7, "{:?}", checked.problems);
    assert!(checked.commands.is_empty());
}

/// A process of another number's record, which must not be touched.
struct Bystander(std::process::Child);

impl Bystander {
    fn new() -> Self {
        Self(std::process::Command::new("sleep").arg("600").spawn().unwrap())
    }
}

impl Drop for Bystander {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The process as a server knows it that has it on record with another start, or that sees no start in `/proc`.
fn with_another_start(process: &Process) -> Process {
    let mut value = serde_json::to_value(process).unwrap();
    value["start"]["ticks"] = 1.into();
    serde_json::from_value(value).unwrap()
}

#[tokio::test]
async fn a_process_is_known_by_its_start_or_by_the_monitor_that_it_listens_on() {
    let dir = tempfile::tempdir().unwrap();
    let monitor = dir.path().join("db.monitor");
    let is_held = async |process: &Process| process.hold(&monitor).await.unwrap().is_some();

    let bystander = Bystander::new();
    let process = Process::of(bystander.0.id());
    assert!(is_held(&process).await);
    let reused = with_another_start(&process);
    assert!(!is_held(&reused).await, "nobody listens");

    let listening = UnixListener::bind(&monitor).unwrap();
    assert!(!is_held(&reused).await, "another process listens");
    let this = with_another_start(&Process::of(std::process::id()));
    assert!(is_held(&this).await);
    drop(listening);
    // A socket that nobody listens on is left, once children that other tests have just forked have closed their copies.
    while is_held(&this).await {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

#[tokio::test]
async fn a_reused_pid_is_not_ended() {
    let dir = tempfile::tempdir().unwrap();
    let boot_file = dir.path().join("boot.toml");
    let target = Qemu::new(Places { boot_file, boot_dir: dir.path().into() });
    let mut bystander = Bystander::new();
    let process = with_another_start(&Process::of(bystander.0.id()));
    let machine = Machine {
        member: "db".into(),
        jail: Jail::new("nobody").await.unwrap(),
        program: PROGRAM.into(),
        arguments: Vec::new(),
        without_kvm: None,
        sockets: Sockets::of(dir.path(), "db"),
        taps: Vec::new(),
        process: Some(process),
    };
    let machine = machine.told(Vec::new());
    assert_eq!(target.status(&machine).await, Status::Ended);
    target.stop(&machine, Stop::Now).await.unwrap();
    assert_eq!(target.ended(&machine).await, None);
    assert!(bystander.0.try_wait().unwrap().is_none(), "it goes on");
}
