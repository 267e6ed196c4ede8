//! Programs of PostgreSQL are played by scripts here; `testbed/tests/test_standbys.py` has the real ones.

use super::bootstrap::copying;
use super::check::major_of;
use super::command::conninfo;
use super::control::Control;
use super::data::log_of_backup;
use super::server::state_of;
use super::*;
use rustix::fs::FlockOperation;
use std::fs::{self, File, Permissions};
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::process::Command;
use std::sync::Mutex;
use std::time::Duration;
use tempfile::TempDir;

const SYSTEM: u64 = 7_642_011_472_967_116_994;

const CONTROL: &str = "\
pg_control version number:            1300
Database system identifier:           7642011472967116994
Database cluster state:               in production
Latest checkpoint's REDO location:    0/2345678
Latest checkpoint's TimeLineID:       3
Minimum recovery ending location:     0/0
wal_level setting:                    replica
max_connections setting:              250
max_worker_processes setting:         8
max_wal_senders setting:              10
max_prepared_xacts setting:           5
max_locks_per_xact setting:           64
Bytes per WAL segment:                16777216
";

const MANIFEST: &str = r#"{ "PostgreSQL-Backup-Manifest-Version": 1,
"Files": [ { "Path": "\"WAL-Ranges\": x", "Size": 3 } ],
"WAL-Ranges": [
{ "Timeline": 1, "Start-LSN": "0/2000028", "End-LSN": "0/2000100" },
{ "Timeline": 2, "Start-LSN": "0/2000100", "End-LSN": "0/3000028" }
],
"Manifest-Checksum": "84cf0e"}
"#;

/// A copy as `pg_basebackup` leaves it, with `$to` for its directory.
const COPY: &str = r#"
mkdir -p "$to/pg_tblspc" && echo 15 > "$to/PG_VERSION" && cp "$here/control" "$to/control"
cp "$here/manifest" "$to/backup_manifest" && touch "$to/backup_label"
printf '   10/100 kB (10%%), 0/1 tablespace\r  100/100 kB (100%%), 1/1 tablespace\nNOTICE: something\n' >&2
"#;

/// A site with scripts in place of programs.
struct Stage {
    dir: TempDir,
}

impl Stage {
    fn new() -> Self {
        let this = Self { dir: tempfile::tempdir().unwrap() };
        fs::set_permissions(this.dir.path(), Permissions::from_mode(0o711)).unwrap();
        this.write("control", CONTROL);
        this.write("manifest", MANIFEST);
        for name in ["postgres", "psql", "pg_controldata"] {
            this.script(name, "exit 1");
        }
        this.script("pg_controldata", r#"cat "$1/control""#);
        this.basebackup(COPY);
        this
    }

    fn write(&self, name: &str, text: &str) {
        let path = self.dir.path().join(name);
        fs::write(&path, text).unwrap();
        fs::set_permissions(&path, Permissions::from_mode(0o755)).unwrap();
    }

    /// A program of version 15 that does this.
    fn script(&self, name: &str, text: &str) {
        let version =
            format!("[ \"$1\" != --version ] || exec echo '{name} (PostgreSQL) 15.18 (Debian)'");
        self.write(
            name,
            &format!("#!/bin/sh\nhere={}\n{version}\n{text}\n", self.dir.path().display()),
        );
    }

    fn basebackup(&self, text: &str) {
        self.script("pg_basebackup", &format!("to=$2\n{text}"));
    }

    async fn server(&self, name: &str) -> Server {
        let site = Site {
            bin_dir: self.dir.path().to_owned(),
            user: "nobody".into(),
            superuser: "postgres".into(),
        };
        let settings = Settings { name: name.into(), port: 5432, ..Settings::default() };
        let expected = Expected { major: 15, system: SYSTEM };
        Server::new(self.dir.path().join(name), site, expected, settings).await.unwrap()
    }
}

fn source() -> Source {
    Source {
        conninfo: "host=/nowhere".into(),
        password: None,
        fast_checkpoint: true,
        rate_max_kib: None,
    }
}

async fn copy(server: &Server) -> Result<Copied> {
    server.bootstrap(&source(), |_| {}).await
}

#[test]
fn output_of_programs_is_read_and_other_text_is_not() {
    assert_eq!(major_of("postgres (PostgreSQL) 15.18 (Debian 15.18-0+deb12u1)\n"), Some(15));
    assert_eq!(major_of("pg_basebackup (PostgreSQL) 17beta1"), Some(17));
    for text in ["", "psql 15", "(PostgreSQL) ", "(PostgreSQL) x"] {
        assert_eq!(major_of(text), None, "{text}");
    }
    let read = copying(b"  23166/23167 kB (99%), 0/1 tablespace (/data/base/1)");
    assert_eq!(read, Some(Copying { done_kib: 23166, all_kib: 23167 }));
    for text in ["", "1/2", "1/2 MB (3%)", "-1/2 kB (3%)", "a/b kB ("] {
        assert_eq!(copying(text.as_bytes()), None, "{text}");
    }
    let log = "0/2000028".parse().unwrap().."0/3000028".parse().unwrap();
    assert_eq!(log_of_backup(MANIFEST), Some(log));
    for text in ["", "\"WAL-Ranges\": ", "\"WAL-Ranges\": []", "\"WAL-Ranges\": [{\"End-LSN\": 3}]"]
    {
        assert_eq!(log_of_backup(text), None, "{text}");
    }
    let lsn = |text: &str| Some(text.parse().unwrap());
    let standby = State::Standby { received: None, replayed: lsn("0/30"), is_paused: true };
    assert_eq!(state_of("t||0/30|paused\n"), Some(standby));
    let primary = State::Primary { timeline: 16, replayed: lsn("0/30") };
    assert_eq!(state_of("f|0/40|0/30|00000010"), Some(primary));
    for row in ["", "t", "t|x|0/1|", "f|||no"] {
        assert_eq!(state_of(row), None, "{row}");
    }
}

#[test]
fn a_control_file_says_all_of_it_or_what_is_wrong() {
    let control = Control::parse(CONTROL).unwrap();
    assert_eq!((control.system, control.timeline), (SYSTEM, 3));
    assert_eq!(control.at_least[0], ("max_connections", 250));
    assert_eq!(control.at_least[3], ("max_prepared_transactions", 5));
    for line in CONTROL.lines().skip(1) {
        let without = CONTROL.replace(line, "");
        assert!(Control::parse(&without).unwrap_err().contains("has no"), "{line}");
    }
    let warned = format!("WARNING: Calculated CRC checksum does not match\n{CONTROL}");
    assert!(Control::parse(&warned).unwrap_err().contains("checksum"));
    let minimal = CONTROL.replace("replica", "minimal");
    assert!(Control::parse(&minimal).unwrap_err().contains("no standby can follow"));
}

#[tokio::test]
async fn every_problem_of_a_site_is_in_one_answer() {
    let stage = Stage::new();
    let mut server = stage.server("db").await;
    assert!(server.check(1000).await.is_empty());
    server.expected.major = 17;
    let problems = server.check(u64::MAX).await;
    assert!(matches!(
        &problems[..],
        [PostgresError::OtherProgram { needed: 17, .. }, PostgresError::NoRoom { .. }]
    ));
    server.site.bin_dir = "/nowhere".into();
    server.dir = stage.dir.path().join("x".repeat(100));
    let problems = server.check(0).await;
    assert!(matches!(
        &problems[..],
        [PostgresError::NoProgram { .. }, PostgresError::LongPath { .. }]
    ));
    // The user may not pass.
    let hidden = stage.dir.path().join("hidden");
    fs::create_dir(&hidden).unwrap();
    fs::set_permissions(&hidden, Permissions::from_mode(0o700)).unwrap();
    let mut server = stage.server("db").await;
    server.dir = hidden.join("db");
    let problems = server.check(0).await;
    if server.user().is_some() {
        assert!(matches!(&problems[..], [PostgresError::Unreachable { .. }]), "{problems:?}");
    }
    let site = Site { user: "root".into(), ..server.site.clone() };
    if server.user().is_some() {
        let made = Server::new("/x".into(), site, server.expected, Settings::default()).await;
        assert!(matches!(made, Err(PostgresError::User(_))));
    }
}

#[tokio::test]
async fn a_copy_counts_when_it_is_whole() {
    let stage = Stage::new();
    let server = stage.server("db").await;
    assert!(matches!(server.whole().await, Err(PostgresError::NoData { .. })));
    stage.basebackup(&format!("{COPY}\necho 'the connection is gone' >&2; exit 1"));
    let failed = copy(&server).await.unwrap_err();
    assert!(failed.to_string().contains("the connection is gone"), "{failed}");
    assert!(server.new_data().exists() && !server.data().exists());
    // Remains of an interrupted copy are removed: a real one would stop at them.
    stage.basebackup(&format!("[ ! -e \"$to\" ] || exit 3\n{COPY}"));
    let seen = Mutex::new(Vec::new());
    let told = |copying: Copying| seen.lock().unwrap().push(copying.done_kib);
    let copied = server.bootstrap(&source(), told).await.unwrap();
    let [usable_from, needs_from] = ["0/3000028", "0/2000000"].map(|text| text.parse().unwrap());
    assert_eq!(copied, Copied { usable_from, needs_from, timeline: 3 });
    assert_eq!(*seen.lock().unwrap(), [10, 100]);
    assert_eq!(server.role().await.unwrap(), Role::Standby);
    // Data that is there is left.
    stage.basebackup("exit 1");
    assert_eq!(copy(&server).await.unwrap(), copied);
    server.remove().await.unwrap();
    assert!(!server.dir.exists());
}

#[tokio::test]
async fn an_earlier_copy_that_goes_on_is_ended() {
    let stage = Stage::new();
    let server = stage.server("db").await;
    server.make_dirs().unwrap();
    let mut lock =
        File::options().append(true).create(true).open(server.dir.join("copying")).unwrap();
    rustix::fs::flock(&lock, FlockOperation::LockExclusive).unwrap();
    let mut orphan =
        Command::new("sleep").arg("600").stdin(lock.try_clone().unwrap()).spawn().unwrap();
    lock.write_all(&serde_json::to_vec(&Process::of(orphan.id())).unwrap()).unwrap();
    drop(lock);
    copy(&server).await.unwrap();
    assert!(!orphan.wait().unwrap().success());
}

#[tokio::test]
async fn data_that_does_not_fit_is_refused_by_name() {
    let stage = Stage::new();
    let refused = async |name: &str, after: &str| {
        stage.basebackup(&format!("{COPY}\n{after}"));
        let server = stage.server(&format!("with-{name}")).await;
        let refused = copy(&server).await.unwrap_err();
        assert!(!server.data().exists(), "{refused}");
        refused
    };
    let system =
        r#"sed -i 's/^Database system identifier:.*/Database system identifier: 9/' "$to/control""#;
    let error = refused("system", system).await;
    assert!(matches!(error, PostgresError::OtherSystem { found: 9, .. }), "{error}");
    let error = refused("version", r#"echo 16 > "$to/PG_VERSION""#).await;
    assert!(matches!(error, PostgresError::OtherVersion { needed: 15, .. }), "{error}");
    let error = refused("control", r#"echo garbage > "$to/control""#).await;
    assert!(matches!(error, PostgresError::Damaged { .. }), "{error}");
    let error = refused("manifest", r#"echo "{}" > "$to/backup_manifest""#).await;
    assert!(matches!(error, PostgresError::Damaged { .. }), "{error}");
    let error = refused("spaces", r#"mkdir "$to/pg_tblspc/16384""#).await;
    assert!(matches!(error, PostgresError::Tablespaces { .. }), "{error}");
}

#[tokio::test]
async fn a_server_starts_in_the_role_that_is_expected_and_as_nobody_else() {
    let stage = Stage::new();
    let mut server = stage.server("db").await;
    copy(&server).await.unwrap();
    let error = server.start(Role::Primary).await.unwrap_err();
    assert!(matches!(error, PostgresError::OtherRole { found: Role::Standby, .. }), "{error}");
    stage.script("postgres", "id -u >&2; echo no luck >&2; exit 1");
    let error = server.start(Role::Standby).await.unwrap_err();
    let PostgresError::NotStarted { said, .. } = &error else { panic!("{error}") };
    assert!(said.ends_with("no luck") && !said.starts_with("0\n"), "{said}");
    assert_eq!(server.status().await.unwrap(), State::Stopped);
    assert_eq!(server.stop().await.unwrap(), Stopped::Before);
    // A promotion removes the signal, and the base backup's label goes long before.
    for name in ["standby.signal", "backup_label"] {
        fs::remove_file(server.data().join(name)).unwrap();
    }
    let error = server.start(Role::Standby).await.unwrap_err();
    assert!(matches!(error, PostgresError::OtherRole { found: Role::Primary, .. }), "{error}");
    let text = CONTROL.replace("in production", "shut down in recovery");
    fs::write(server.data().join("control"), text).unwrap();
    let error = server.start(Role::Primary).await.unwrap_err();
    assert!(matches!(error, PostgresError::Damaged { .. }), "{error}");
}

#[tokio::test]
async fn a_start_that_was_given_up_is_gone_on_with_and_makes_no_second_process() {
    let stage = Stage::new();
    let mut server = stage.server("db").await;
    copy(&server).await.unwrap();
    // Its messages are the server's log, which the user cannot write by name.
    stage.script("postgres", "echo process >&2; exec sleep 300");
    let processes = |server: &Server| {
        fs::read_to_string(server.log()).unwrap_or_default().matches("process").count()
    };
    // Nobody ever listens: both starts are given up.
    let log = server.clone();
    let begun = async {
        while processes(&log) == 0 {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    tokio::select! {
        started = server.start(Role::Standby) => panic!("{started:?}"),
        () = begun => {}
    }
    let again = tokio::time::timeout(Duration::from_secs(1), server.start(Role::Standby)).await;
    assert!(again.is_err(), "{again:?}");
    assert_eq!(processes(&server), 1);
    assert_ne!(server.stop().await.unwrap(), Stopped::Before);
    assert_eq!(processes(&server), 1);
}

#[tokio::test]
async fn a_view_needs_a_base_that_is_usable_at_its_cut() {
    let stage = Stage::new();
    let base = stage.server("base").await;
    copy(&base).await.unwrap();
    let mut view = stage.server("view").await;
    view.settings.cut = Some("0/3000027".parse().unwrap());
    let error = view.copy_of(&base).await.unwrap_err();
    assert!(matches!(error, PostgresError::TooNew { .. }), "{error}");
    view.settings.cut = Some("0/3000028".parse().unwrap());
    view.copy_of(&base).await.unwrap();
    assert!(base.data().exists() && view.data().exists());
    // The record is found again as it was.
    let text = serde_json::to_string(&view).unwrap();
    assert_eq!(serde_json::from_str::<Server>(&text).unwrap(), view);
}

#[tokio::test]
async fn settings_that_a_copy_brings_do_not_win() {
    let stage = Stage::new();
    let mut server = stage.server("db").await;
    server.settings.upstream = Some("/run/it's \\here".into());
    server.settings.options = vec![("shared_preload_libraries".into(), "x".into())];
    let control = Control::parse(CONTROL).unwrap();
    let arguments = server.arguments(&control);
    let last = |name: &str| {
        let of = |word: &&String| word.split_once('=').is_some_and(|(found, _)| found == name);
        let found = arguments.iter().rfind(of).unwrap_or_else(|| panic!("{name} is not set"));
        found.split_once('=').unwrap().1.to_owned()
    };
    for name in
        ["restore_command", "archive_command", "recovery_end_command", "recovery_target_lsn"]
    {
        assert_eq!(last(name), "");
    }
    assert_eq!((last("max_connections"), last("archive_mode")), ("250".into(), "off".into()));
    assert_eq!(last("synchronous_standby_names"), "", "a promoted server waits for nobody");
    assert_eq!(last("shared_preload_libraries"), "x", "the operator's settings win");
    assert_eq!(last("primary_conninfo"), conninfo(Path::new("/run/it's \\here"), "db"));
    assert!(last("primary_conninfo").starts_with("host='/run/it\\'s \\\\here' port=5432 "));
}
