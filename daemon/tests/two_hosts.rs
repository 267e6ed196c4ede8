//! Two `tidelockd` of one group, as on two hosts, and the real backup: in network and mount namespaces of their
//! own, so that neither rules nor pinned maps stay. What guests tell each other is the testbed's
//! (`testbed/tests/test_appdrill.py`, `make drill SCENARIO=two-hosts`).

use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// Far more than anything here takes; only a failure lasts so long.
const PATIENCE: Duration = Duration::from_secs(120);
const DISK_BYTES: u64 = 4 << 20;

/// Why this cannot run here.
fn obstacle() -> Option<String> {
    let has = |tool: &str| {
        let found = Command::new("sh").args(["-c", &format!("command -v {tool}")]).output();
        found.is_ok_and(|found| found.status.success())
    };
    if !rustix::process::geteuid().is_root() {
        return Some("needs root".to_owned());
    }
    if let Some(tool) = ["unshare", "nsenter", "ip", "nft", "qemu-io"].into_iter().find(|t| !has(t))
    {
        return Some(format!("needs {tool}"));
    }
    (!backup().exists())
        .then(|| format!("needs {}: build tidelock-backup-server", backup().display()))
}

fn backup() -> PathBuf {
    Path::new(env!("CARGO_BIN_EXE_tidelockd")).with_file_name("tidelock-backup")
}

/// A process that is killed when the test ends, however it ends.
struct Process(Child);

impl Drop for Process {
    fn drop(&mut self) {
        // Both fail only if it has ended already.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A process that does nothing, in namespaces of its own, which are there by then.
fn in_namespaces(which: &[&str]) -> Process {
    let mut command = Command::new("unshare");
    command.args(which).args(["sleep", "infinity"]);
    let holder = Process(command.spawn().unwrap());
    // Unshare makes all of them in one call.
    let own = fs::read_link("/proc/self/ns/net").unwrap();
    let theirs = format!("/proc/{}/ns/net", holder.0.id());
    until("the namespaces are there", || fs::read_link(&theirs).is_ok_and(|ns| ns != own));
    holder
}

/// The namespaces, the files, and the backup.
struct World {
    /// Lives as long as the namespaces.
    holder: Process,
    directory: tempfile::TempDir,
    backup: Option<Process>,
}

impl World {
    fn new(form: &str) -> World {
        let members = [("a", "host-a"), ("c", "host-a"), ("b", "host-a"), ("web", "host-b")];
        World::of(&members, &format!("form = \"{form}\""))
    }

    /// With these members, of which only `web` has no disk, and these settings of the group.
    fn of(members: &[(&str, &str)], settings: &str) -> World {
        let holder = in_namespaces(&["--net", "--mount", "--propagation", "private"]);
        let mut world = World { holder, directory: tempfile::tempdir().unwrap(), backup: None };
        world.sh(
            "ip link set lo up; umount /sys/fs/bpf 2>/dev/null || true; mount -t bpf bpf /sys/fs/bpf
             for t in a c b web; do ip link add t-$t type veth peer name g-$t; ip link set t-$t up; done",
        );
        let at = world.directory.path().display().to_string();
        for member in ["a", "c", "b"] {
            fs::File::create(world.file(&format!("{member}.img")))
                .unwrap()
                .set_len(DISK_BYTES)
                .unwrap();
        }
        fs::write(
            world.file("backup.toml"),
            format!(
                "plaintext = true\n[server]\nname = \"backup\"\nlisten = \"127.0.0.1:9640\"\n\
                 data_dir = \"{at}/backup\"\n[[group]]\nname = \"g\"\nhosts = [\"host-a\", \"host-b\"]\n"
            ),
        )
        .unwrap();
        let member = |nth: usize, name: &str, host: &str| {
            let disk = if name == "web" {
                String::new()
            } else {
                format!("[[group.member.disk]]\nname = \"d\"\npath = \"{at}/{name}.img\"\n")
            };
            format!(
                "[[group.member]]\nname = \"{name}\"\nhost = \"{host}\"\n{disk}[[group.member.network]]\n\
                 interface = \"t-{name}\"\ntopology = \"routed\"\nqueue = {}\naddresses = [\"10.9.0.{nth}\"]\n",
                7200 + nth
            )
        };
        let members: String =
            (1..).zip(members).map(|(nth, (name, host))| member(nth, name, host)).collect();
        for host in ["host-a", "host-b"] {
            fs::write(
                world.file(&format!("{host}.toml")),
                format!(
                    "[host]\nname = \"{host}\"\nruntime_dir = \"{at}/{host}\"\nstate_dir = \"{at}/{host}.state\"\n\
                     [backup]\naddress = \"127.0.0.1:9640\"\nplaintext = true\n[[group]]\nname = \"g\"\n\
                     {settings}\n{members}"
                ),
            )
            .unwrap();
        }
        fs::create_dir(world.file("backup")).unwrap();
        world.start_backup();
        world
    }

    fn start_backup(&mut self) {
        let config = self.file("backup.toml");
        let arguments = ["serve", "--config", config.to_str().unwrap()];
        self.backup = Some(self.start(&backup(), &arguments, "backup.log"));
    }

    fn file(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    fn inside(&self, program: &Path, arguments: &[&str]) -> Command {
        let mut command = Command::new("nsenter");
        command
            .args(["-t", &self.holder.0.id().to_string(), "-n", "-m"])
            .arg(program)
            .args(arguments);
        command
    }

    fn sh(&self, script: &str) -> String {
        let output = self.inside(Path::new("sh"), &["-ec", script]).output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{script}: {said}");
        String::from_utf8_lossy(&output.stdout).into_owned()
    }

    fn start(&self, program: &Path, arguments: &[&str], log: &str) -> Process {
        let log = fs::OpenOptions::new().create(true).append(true).open(self.file(log)).unwrap();
        let mut command = self.inside(program, arguments);
        command.stdout(log.try_clone().unwrap()).stderr(log).stdin(Stdio::null());
        Process(command.spawn().unwrap())
    }

    fn daemon(&self, host: &str) -> Process {
        let config = self.file(&format!("{host}.toml"));
        let arguments = ["--config", config.to_str().unwrap()];
        let daemon = Path::new(env!("CARGO_BIN_EXE_tidelockd"));
        self.start(daemon, &arguments, &format!("{host}.log"))
    }

    /// The group in a host's status.
    fn group(&self, host: &str) -> Option<Value> {
        let socket = self.file(host).join("control.sock");
        let arguments = ["status", "--json", "--socket", socket.to_str().unwrap()];
        let tidelock = Path::new(env!("CARGO_BIN_EXE_tidelock"));
        let output = self.inside(tidelock, &arguments).output().unwrap();
        let status: Value = serde_json::from_slice(&output.stdout).ok()?;
        Some(status["groups"][0].clone())
    }

    fn until_protected(&self, hosts: &[&str]) {
        for host in hosts {
            let is_so = || {
                let Some(group) = self.group(host) else { return false };
                let gates = group["members"].as_array().unwrap();
                group["protected"] == true
                    && gates.iter().all(|m| m["gates"][0]["shut_because"].is_null())
            };
            let said = || {
                let log = fs::read_to_string(self.file(&format!("{host}.log"))).unwrap_or_default();
                format!("{host} is protected and open: {:#?}\n{log}", self.group(host))
            };
            until_or(said, is_so);
        }
    }

    fn write(&self, host: &str, member: &str, nth: u64) {
        let socket = self.file(host).join(format!("g/{member}/d.sock"));
        self.sh(&format!(
            "qemu-io -f raw -c 'write -P {} {} 4096' 'nbd+unix:///d?socket={}'",
            nth % 255 + 1,
            nth * 4096 % DISK_BYTES,
            socket.display()
        ));
    }

    /// `tidelock mode`, and what it says.
    fn set_mode(&self, host: &str, mode: &str) -> String {
        let socket = self.file(host).join("control.sock");
        let arguments = ["mode", "g", mode, "--yes", "--socket", socket.to_str().unwrap()];
        let tidelock = Path::new(env!("CARGO_BIN_EXE_tidelock"));
        let output = self.inside(tidelock, &arguments).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8_lossy(&output.stdout).into_owned()
    }

    /// Whether nothing is held on a host.
    fn lets_all_out(&self, host: &str) -> bool {
        self.group(host).is_some_and(|group| group["mode"] == "async")
    }

    /// `tidelock remove-rules`; what it says, and why not if it refuses.
    fn remove_rules(&self, host: &str) -> Result<String, String> {
        let config = self.file(&format!("{host}.toml"));
        let arguments = ["remove-rules", "g", "--yes", "--config", config.to_str().unwrap()];
        let tidelock = Path::new(env!("CARGO_BIN_EXE_tidelock"));
        let output = self.inside(tidelock, &arguments).output().unwrap();
        match output.status.success() {
            true => Ok(String::from_utf8_lossy(&output.stdout).into_owned()),
            false => Err(String::from_utf8_lossy(&output.stderr).into_owned()),
        }
    }

    /// The mark of a clean end in a member's state.
    fn clean(&self, host: &str, member: &str) -> Value {
        let file = self.file(&format!("{host}.state/g/{member}.json"));
        serde_json::from_slice::<Value>(&fs::read(file).unwrap()).unwrap()["clean"].clone()
    }
}

fn until(what: &str, is_so: impl FnMut() -> bool) {
    until_or(|| what.to_owned(), is_so);
}

fn until_or(what: impl Fn() -> String, mut is_so: impl FnMut() -> bool) {
    let end = Instant::now() + PATIENCE;
    while !is_so() {
        assert!(Instant::now() < end, "never came true: {}", what());
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// SIGTERM, and the end.
fn stop(mut daemon: Process) {
    let pid = rustix::process::Pid::from_child(&daemon.0);
    rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
    assert!(daemon.0.wait().unwrap().success());
}

#[test]
fn two_daemons_of_one_group_stop_cleanly_crash_and_come_back() {
    if let Some(why) = obstacle() {
        eprintln!("skipped: two_hosts: {why}");
        return;
    }
    for form in ["vector", "hlc"] {
        let world = World::new(form);
        let (a, b) = (world.daemon("host-a"), world.daemon("host-b"));
        world.until_protected(&["host-a", "host-b"]);

        // Each write is later than all before, of whichever writer: with times, each of the three
        // must speak once more before what the last one holds is covered.
        for nth in 0..3 {
            world.write("host-a", "b", nth);
            world.write("host-a", "a", nth);
            world.write("host-a", "c", nth);
        }
        stop(a);
        for member in ["a", "b", "c"] {
            assert!(!world.clean("host-a", member).is_null(), "{form}: {member} would resync");
        }
        // The other host goes on: its members' packets are still seen on this one.
        assert!(world.sh("nft list ruleset").contains("t-a"), "{form}: the rules stay");
        let a = world.daemon("host-a");
        world.until_protected(&["host-a", "host-b"]);
        let log = fs::read_to_string(world.file("host-a.log")).unwrap();
        assert!(!log.contains("Compare"), "{form}: {log}");

        // A crash of both: each is asked for the other.
        drop((a, b));
        let (a, b) = (world.daemon("host-a"), world.daemon("host-b"));
        world.until_protected(&["host-a", "host-b"]);
        let log = fs::read_to_string(world.file("host-a.log")).unwrap();
        assert!(log.contains("Compare"), "{form}: {log}");

        // A tap that is made anew is taken in.
        world.sh(
            "ip link del t-web; ip link add t-web type veth peer name g-web; ip link set t-web up",
        );
        until("the new tap is watched", || {
            let log = fs::read_to_string(world.file("host-b.log")).unwrap();
            log.contains("the interface was made anew and is let in")
        });

        // Out of mode async nobody goes on before everyone has said how far it is.
        for host in ["host-a", "host-b"] {
            world.set_mode(host, "async");
            until("it lets all out", || world.lets_all_out(host));
            world.set_mode(host, "pipelined");
        }
        world.until_protected(&["host-a", "host-b"]);
        let log = fs::read_to_string(world.file("host-b.log")).unwrap();
        assert!(log.contains("all that the guest may know is known"), "{form}: {log}");
        for host in ["host-a", "host-b"] {
            assert!(world.remove_rules(host).unwrap().contains("The backup knows"));
        }
        stop(b);
        stop(a);

        // Nobody goes on: what was left is taken away, on each host what is of it.
        let pins = world.sh("ls /sys/fs/bpf/tidelock");
        assert!(pins.contains("from_guest-g-a-"), "{form}: the programs stay: {pins}");
        world.remove_rules("host-b").unwrap();
        let left = world.sh("nft list ruleset; ls /sys/fs/bpf/tidelock");
        assert!(!left.contains("t-web") && !left.contains("-web-"), "{form}: {left}");
        assert!(left.contains("t-a") && left.contains("-g-a-"), "{form}: {left}");
        world.remove_rules("host-a").unwrap();
        let filters = "for t in a b c web; do tc filter show dev t-$t ingress; done";
        let left = world.sh(&format!("nft list ruleset; ls /sys/fs/bpf; {filters}"));
        for trace in ["t-a", "TL-", "tidelock", "from_guest"] {
            assert!(!left.contains(trace), "{form}: {trace} in {left}");
        }
    }
}

/// As a restart of nftables.service does.
#[test]
fn rules_that_somebody_flushes_are_put_back_and_it_is_said() {
    if let Some(why) = obstacle() {
        eprintln!("skipped: two_hosts: {why}");
        return;
    }
    let world = World::of(&[("a", "host-a"), ("b", "host-a")], "form = \"vector\"");
    let a = world.daemon("host-a");
    world.until_protected(&["host-a"]);
    let restored = || {
        let group = world.group("host-a")?;
        let members = group["members"].as_array()?;
        members.iter().map(|m| m["gates"][0]["rules_restored"].as_u64()).collect::<Option<Vec<_>>>()
    };
    assert_eq!(restored(), Some(vec![0, 0]));
    for nth in 1..=2 {
        world.sh("nft flush ruleset");
        until_or(
            || format!("the rules are back: {:?} {}", restored(), world.log("host-a.log")),
            || restored().is_some_and(|counts| counts.iter().all(|count| *count >= nth)),
        );
        // What the daemon does itself is told, too, and looked at, but is nobody's change.
        assert_eq!(restored(), Some(vec![nth, nth]));
        let rules = world.sh("nft list ruleset; iptables-save -t raw 2>/dev/null || true");
        assert!(rules.contains("t-a") && rules.contains("t-b"), "{rules}");
    }
    let log = world.log("host-a.log");
    let said = log.lines().filter(|line| {
        line.contains("ERROR") && line.contains("may have left unheld") && line.contains("back")
    });
    assert_eq!(said.count(), 4, "{log}");
    world.until_protected(&["host-a"]);
    stop(a);
    let left = world.sh("nft list ruleset");
    assert!(
        left.contains("t-a") && left.contains("t-b"),
        "no end of the daemon takes them away: {left}"
    );
}

/// Rules stay at every end of the daemon, and go by order when the backup knows: a recovery names who may still answer.
#[test]
fn rules_are_removed_by_order_when_the_backup_knows() {
    if let Some(why) = obstacle() {
        eprintln!("skipped: two_hosts: {why}");
        return;
    }
    let world = World::of(&[("a", "host-a")], "lease = \"1s\"\ngrace = \"2s\"");
    let rules = || world.sh("nft list ruleset; iptables-save 2>/dev/null || true");
    let a = world.daemon("host-a");
    world.until_protected(&["host-a"]);
    stop(a);
    assert!(!world.clean("host-a", "a").is_null());
    let refused = world.remove_rules("host-a").unwrap_err();
    assert!(
        refused.contains("the backup does not know") && refused.contains("--force"),
        "{refused}"
    );
    assert!(rules().contains("t-a"), "{}", rules());

    let a = world.daemon("host-a");
    world.until_protected(&["host-a"]);
    let said = world.remove_rules("host-a").unwrap();
    assert!(said.contains("No rule is removed yet") && rules().contains("t-a"), "{said}");
    stop(a);
    let said = world.remove_rules("host-a").unwrap();
    assert!(said.contains("the rules of t-a are gone") && !rules().contains("t-a"), "{said}");

    let mut recovery = world.recover("recovered.log");
    assert!(recovery.0.wait().unwrap().success(), "{}", world.log("recovered.log"));
    let said = world.log("recovered.log");
    let said: Value = serde_json::from_str(said.lines().last().unwrap()).unwrap();
    let exposed = &said["recovery"]["exposed"][0];
    assert_eq!((&exposed["member"], &exposed["host"]), (&"a".into(), &"host-a".into()), "{said:#}");
}

/// Not even while they cannot be put back.
#[test]
fn nothing_is_left_to_rules_that_are_gone() {
    if let Some(why) = obstacle() {
        eprintln!("skipped: two_hosts: {why}");
        return;
    }
    let world = World::of(&[("a", "host-a"), ("b", "host-a")], "form = \"vector\"");
    let guest = in_namespaces(&["--net"]);
    let in_guest = format!("nsenter -t {} -n", guest.0.id());
    world.sh(&format!(
        "ip link set g-a netns {}; ip addr add 10.9.0.254/24 dev t-a; sysctl -qw net.ipv4.ip_forward=1
         {in_guest} sh -ec 'ip addr add 10.9.0.1/24 dev g-a; ip link set g-a up; ip route add default via 10.9.0.254'
         ip link add outside type veth peer name beyond; sysctl -qw net.ipv6.conf.outside.disable_ipv6=1
         ip addr add 10.8.0.1/24 dev outside; ip link set beyond up; ip link set outside up
         ip neigh add 10.8.0.9 lladdr 02:00:00:00:00:09 dev outside",
        guest.0.id()
    ));
    // Sends ten datagrams, and returns how many packets have left for the outside so far.
    let send = || -> u64 {
        let ten = "for n in 0 1 2 3 4 5 6 7 8 9; do echo x > /dev/udp/10.8.0.9/9; done";
        let left = world.sh(&format!(
            "{in_guest} bash -ec '{ten}'; set -- $(sed -n 's/ *outside: *//p' /proc/net/dev); echo ${{10}}"
        ));
        left.trim().parse().unwrap()
    };
    let member = || Some(world.group("host-a")?["members"][0].clone());
    let daemon = world.daemon("host-a");
    world.until_protected(&["host-a"]);
    until("what is covered leaves", || send() < send());

    // Nothing more gets to the backup, so from this write on nothing is covered.
    let backup = world.backup.as_ref().unwrap().0.id();
    world.sh(&format!("kill -9 {backup}"));
    world.write("host-a", "a", 1);
    until("what is not covered is held", || {
        send();
        member().is_some_and(|m| m["gates"][0]["held_packets"].as_u64() > Some(0))
    });
    let nft = world.file("nft").display().to_string();
    world.sh(&format!(
        "cp $(command -v nft) {nft}
         for tool in nft iptables iptables-nft; do
             ! at=$(command -v $tool) || mount --bind /bin/false $at
         done
         {nft} flush ruleset"
    ));
    let dropped = || member()?["tagging"]["dropped_packets"]["no_rules"].as_u64();
    // As many as one round sends: what was sent before the first of them is not on its way any more.
    let drop_a_round = |after: u64| {
        let mut unheld = 0;
        until_or(
            || format!("what is sent is dropped: {}", world.log("host-a.log")),
            || {
                unheld = send();
                dropped() >= Some(after + 10)
            },
        );
        unheld
    };
    let unheld = drop_a_round(0);
    let unheld = [unheld, drop_a_round(dropped().unwrap())].into_iter().max().unwrap();
    assert_eq!(drop_a_round(dropped().unwrap()), unheld, "{}", world.log("host-a.log"));
    drop(daemon);
}

/// A time that the next run could give out again is not given out, whatever the others' clocks say.
#[test]
fn writes_wait_for_a_time_that_cannot_be_put_on_record() {
    if let Some(why) = obstacle() {
        eprintln!("skipped: two_hosts: {why}");
        return;
    }
    let world = World::new("hlc");
    let (a, b) = (world.daemon("host-a"), world.daemon("host-b"));
    world.until_protected(&["host-a", "host-b"]);
    let waits = "guests' writes wait until the state file has a greater time";
    let says_so = || world.group("host-a").is_some_and(|g| g["detail"].to_string().contains(waits));

    // Its state file cannot be made anew, the others' can.
    let in_the_way = world.file("host-a.state/g/b.json.new");
    fs::create_dir(&in_the_way).unwrap();
    let mut nth = 0;
    until("it hears of a time beyond its ceiling", || {
        nth += 1;
        world.write("host-a", "a", nth);
        says_so()
    });
    let log = fs::read_to_string(world.file("host-a.log")).unwrap();
    assert!(log.contains("cannot be put on record"), "{log}");

    fs::remove_dir(&in_the_way).unwrap();
    until("no write waits any more", || !says_so());
    for member in ["a", "b", "c"] {
        world.write("host-a", member, nth);
    }
    let log = fs::read_to_string(world.file("host-a.log")).unwrap();
    assert!(log.contains("put on record again"), "{log}");
    stop(b);
    stop(a);
}

/// Writers on both hosts, and a grace that nothing here waits out.
fn shared(form: &str) -> World {
    let members = [("a", "host-a"), ("b", "host-b"), ("c", "host-b"), ("web", "host-b")];
    World::of(&members, &format!("form = \"{form}\"\nlease = \"60s\"\ngrace = \"600s\""))
}

impl World {
    fn log(&self, name: &str) -> String {
        fs::read_to_string(self.file(name)).unwrap_or_default()
    }

    /// `tidelock switchover` on a host, as far as it is said in this log.
    fn switch(&self, host: &str, log: &str, more: &[&str]) -> Process {
        let socket = self.file(host).join("control.sock");
        let socket = socket.to_str().unwrap();
        let words = ["switchover", "g", "--guest-is-stopped", "--json", "--socket", socket];
        self.start(Path::new(env!("CARGO_BIN_EXE_tidelock")), &[&words, more].concat(), log)
    }

    fn recover(&self, log: &str) -> Process {
        let config = self.file("backup.toml");
        let words = ["recover", "g", "--json", "--config", config.to_str().unwrap()];
        self.start(&backup(), &words, log)
    }

    /// Recovered at once, with disks that equal those of the hosts.
    fn check_recovered(&self) {
        let mut recovery = self.recover("recovered.log");
        assert!(recovery.0.wait().unwrap().success(), "{}", self.log("recovered.log"));
        let said = self.log("recovered.log");
        assert!(!said.contains("waiting until"), "{said}");
        let said: Value = serde_json::from_str(said.lines().last().unwrap()).unwrap();
        assert_eq!(said["disks"].as_array().unwrap().len(), 3, "{said:#}");
        for disk in said["disks"].as_array().unwrap() {
            let name = disk["name"].as_str().unwrap();
            let uri = disk["uri"].as_str().unwrap();
            let copy = self.file(&format!("{name}.copy"));
            self.sh(&format!("qemu-img convert -f raw -O raw '{uri}' {}", copy.display()));
            let image = self.file(&format!("{}.img", name.split('.').next().unwrap()));
            assert!(fs::read(&copy).unwrap() == fs::read(image).unwrap(), "{name} differs");
        }
    }
}

fn succeeds(world: &World, mut command: Process, log: &str) -> Value {
    assert!(command.0.wait().unwrap().success(), "{}", world.log(log));
    let said = world.log(log);
    let last = said.lines().last().unwrap();
    serde_json::from_str::<Value>(last).unwrap()["switchover"].clone()
}

#[test]
fn two_hosts_hand_their_group_over_together() {
    if let Some(why) = obstacle() {
        eprintln!("skipped: two_hosts: {why}");
        return;
    }
    for form in ["vector", "hlc"] {
        let world = shared(form);
        let (_a, _b) = (world.daemon("host-a"), world.daemon("host-b"));
        world.until_protected(&["host-a", "host-b"]);
        for nth in 0..3 {
            world.write("host-b", "b", nth);
            world.write("host-a", "a", nth);
            world.write("host-b", "c", nth);
        }
        // The first one waits; what the guests of the other one write meanwhile is not lost.
        let first = world.switch("host-a", "switch-a.log", &[]);
        until("it waits", || {
            let said = world.log("switch-a.log");
            ["b on host-b", "c on host-b", "web on host-b"].iter().all(|who| said.contains(who))
        });
        world.write("host-b", "b", 7);
        world.write("host-b", "c", 8);
        assert_eq!(world.group("host-a").unwrap()["protected"], true, "it can still go back");
        let second = world.switch("host-b", "switch-b.log", &[]);
        for (command, log) in [(first, "switch-a.log"), (second, "switch-b.log")] {
            let over = succeeds(&world, command, log);
            assert_eq!((&over["state"], &over["problem"]), (&"over".into(), &Value::Null));
        }
        for host in ["host-a", "host-b"] {
            assert_eq!(world.group(host).unwrap()["why"]["kind"], "fenced", "{form}: {host}");
        }
        world.check_recovered();
    }
}

#[test]
fn a_host_goes_on_when_the_other_one_dies_instead_of_getting_ready() {
    if let Some(why) = obstacle() {
        eprintln!("skipped: two_hosts: {why}");
        return;
    }
    let world = shared("vector");
    let (_a, b) = (world.daemon("host-a"), world.daemon("host-b"));
    world.until_protected(&["host-a", "host-b"]);
    world.write("host-a", "a", 1);
    let mut first = world.switch("host-a", "switch-a.log", &["--wait-for-hosts", "3s"]);
    until("it waits", || world.log("switch-a.log").contains("waiting for"));
    drop(b);
    assert!(!first.0.wait().unwrap().success());
    let said = world.log("switch-a.log");
    assert!(said.contains("b on host-b") && said.contains("did not get ready"), "{said}");
    assert!(!world.file("host-a.state/g/_switched.json").exists());
    // Requests are taken again, and it can be tried again.
    world.write("host-a", "a", 2);
    let _b = world.daemon("host-b");
    world.until_protected(&["host-a", "host-b"]);
    world.write("host-b", "b", 3);
    let first = world.switch("host-a", "again-a.log", &[]);
    let second = world.switch("host-b", "again-b.log", &[]);
    succeeds(&world, first, "again-a.log");
    succeeds(&world, second, "again-b.log");
    world.check_recovered();
}

#[test]
fn a_host_that_dies_after_the_other_one_has_gone_is_waited_for_and_follows() {
    if let Some(why) = obstacle() {
        eprintln!("skipped: two_hosts: {why}");
        return;
    }
    for form in ["vector", "hlc"] {
        let world = shared(form);
        let (_a, b) = (world.daemon("host-a"), world.daemon("host-b"));
        world.until_protected(&["host-a", "host-b"]);
        world.write("host-a", "a", 1);
        world.write("host-b", "b", 2);
        // All agree, and one of them cannot put it on record.
        let in_the_way = world.file("host-b.state/g/_switched.json.new");
        fs::create_dir(&in_the_way).unwrap();
        let first = world.switch("host-a", "switch-a.log", &[]);
        let mut second = world.switch("host-b", "switch-b.log", &[]);
        let over = succeeds(&world, first, "switch-a.log");
        assert_eq!(over["problem"], Value::Null, "{form}: {}", world.log("host-a.log"));
        assert!(!second.0.wait().unwrap().success());
        let said = world.log("switch-b.log");
        assert!(said.contains("The other hosts have switched over"), "{form}: {said}");
        drop(b);
        let _b = world.daemon("host-b");
        until("it serves again", || world.group("host-b").is_some_and(|g| g["protected"] == true));
        world.write("host-b", "c", 3);
        // It may answer clients: its lease is waited for, and who it is is said.
        let recovery = world.recover("early.log");
        until("the recovery waits", || world.log("early.log").contains("waiting until"));
        let said = world.log("early.log");
        assert!(said.contains("b on host-b, c on host-b, web on host-b may still"), "{said}");
        assert!(!said.contains("a on host-a"), "{form}: {said}");
        drop(recovery);
        fs::remove_dir(&in_the_way).unwrap();
        let second = world.switch("host-b", "again-b.log", &[]);
        succeeds(&world, second, "again-b.log");
        world.check_recovered();
    }
}

/// The backup counts a writer that has left as one that has nothing that it lacks. So nothing of it leaves unheld before
/// it knows that it is back, also by order: members on other hosts go by what the backup says.
#[test]
fn mode_async_is_in_force_once_the_backup_has_heard_of_the_run() {
    if let Some(why) = obstacle() {
        eprintln!("skipped: two_hosts: {why}");
        return;
    }
    let alone = [("a", "host-a")];
    let spread = [("a", "host-a"), ("b", "host-b"), ("web", "host-b")];
    for members in [&alone[..], &spread[..]] {
        let mut world = World::of(members, "mode = \"async\"");
        let is_spread = members.len() > 1;
        let a = world.daemon("host-a");
        let _b = is_spread.then(|| world.daemon("host-b"));
        until("host-a replicates", || {
            let is_so = |group: Value| group["why"]["kind"] == "following";
            world.lets_all_out("host-a") && world.group("host-a").is_some_and(is_so)
        });
        until("nobody waits for host-b", || !is_spread || world.lets_all_out("host-b"));
        stop(a);
        assert!(!world.clean("host-a", "a").is_null());

        world.backup = None;
        let a = world.daemon("host-a");
        let is_held = || world.group("host-a").is_some_and(|group| group["mode"] == "pipelined");
        until("it holds replies", is_held);
        let group = world.group("host-a").unwrap();
        let gate = &group["members"][0]["gates"][0];
        assert!(!gate["shut_because"].is_null(), "{gate:#}");
        let detail = group["detail"].as_str().unwrap();
        assert!(detail.contains("before it has heard of this one"), "{detail}");

        let said = world.set_mode("host-a", "async");
        assert_eq!(said.contains("Not yet: replies are held"), is_spread, "{said}");
        assert_eq!(world.lets_all_out("host-a"), !is_spread);
        if is_spread {
            // What is not in force yet can be called off.
            let said = world.set_mode("host-a", "pipelined");
            assert!(said.contains("async -> pipelined"), "{said}");
            let wanted = || world.group("host-a").unwrap()["wanted_mode"].clone();
            assert_eq!(wanted(), "pipelined");
            world.set_mode("host-a", "async");
            assert_eq!(wanted(), "async");
            world.start_backup();
            until("the backup has heard of it", || world.lets_all_out("host-a"));
        }
        drop(a);
    }
}
