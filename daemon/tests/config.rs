//! The daemon's configuration: good files, wrong files with exactly what is said, and the checks
//! that need the machine.

use std::collections::BTreeSet;
use std::path::Path;
use std::time::{Duration, SystemTime};

use tidelock_config::{Diagnostics, Size};
use tidelock_daemon::adoption;
use tidelock_daemon::config::{
    Config, LogFormat, Security, Topology, check_for_start, check_machine, load, parse,
    read_machine,
};
use tidelock_protocol::ids::{DiskId, WriterId};
use tidelock_protocol::message::{Form, Mode};
use tidelock_tls::Role;
use tidelock_tls::pki::Authority;

const GOOD: &str = r#"[host]
name = "h"
[backup]
address = "b:1"
plaintext = true
[[group]]
name = "g"
[[group.member]]
name = "m"
[[group.member.disk]]
name = "d"
path = "/d.img"
[[group.member.network]]
interface = "tap0"
topology = "routed"
"#;

fn good() -> Config {
    parse("host.toml", GOOD).unwrap()
}

fn shown(found: &Diagnostics) -> Vec<String> {
    let one = |d: &tidelock_config::Diagnostic| {
        format!("{}:{} {} -> {}", d.place.line(), d.place.column(), d.what, d.instead)
    };
    found.iter().map(one).collect()
}

fn example(name: &str) -> std::path::PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("examples").join(name)
}

#[test]
fn the_defaults_are_as_documented() {
    let config = good();
    assert_eq!(config.host.control_socket(), Path::new("/run/tidelock/control.sock"));
    assert_eq!(config.host.state_dir, Path::new("/var/lib/tidelock"));
    assert_eq!((config.host.log.as_str(), config.host.log_format), ("info", LogFormat::Text));
    assert_eq!(config.backup.server_name, "b");
    assert!(matches!(config.backup.security, Security::Plaintext));
    assert_eq!(config.metrics, None);
    let group = &config.groups[0];
    assert_eq!((group.mode, group.backlog), (Mode::Pipelined, Size::mib(256)));
    assert_eq!((group.lease, group.grace), (Duration::from_secs(10), Duration::from_secs(15)));
    assert_eq!((group.copy.rate, group.copy.window), (None, Size::mib(16)));
    let log = group.activity_log.unwrap();
    assert_eq!((log.extent, log.slots), (Size::mib(1), 4096));
    assert_eq!(group.backlog_on_disk, None);
    let heartbeat = group.heartbeat.unwrap();
    assert_eq!(heartbeat.interval, Duration::from_secs(1));
    assert_eq!(heartbeat.alarm_after, Duration::from_secs(5));
    assert_eq!(group.writers(), ["m"]);
    let member = &group.members[0];
    assert_eq!(group.writer_id(&member.name), Some(WriterId(0)));
    assert!(member.roles.writer && member.roles.outbound && !member.roles.intermediate);
    assert_eq!(member.disks[0].id, DiskId(0));
    assert_eq!(member.disks[0].socket.value, Path::new("/run/tidelock/g/m/d.sock"));
    let network = &member.networks[0];
    assert_eq!((network.queue.value, network.held_packets_max), (7100, 65_536));
    assert_eq!(network.topology, Topology::Routed);
}

#[test]
fn several_groups_and_disks_are_counted_apart() {
    let second = GOOD[GOOD.find("[[group]]").unwrap()..]
        .replace("\"g\"", "\"g2\"")
        .replace("\"m\"", "\"m2\"")
        .replace("/d.img", "/e.img")
        .replace("tap0", "tap1")
        .replace(
            "[[group.member.network]]",
            "[[group.member.disk]]\nname = \"d2\"\npath = \"/f\"\n[[group.member.network]]",
        );
    let config = parse("f", &format!("{GOOD}{second}")).unwrap();
    let member = &config.groups[1].members[0];
    assert_eq!(member.networks[0].queue.value, 7101);
    assert_eq!(member.disks[1].id, DiskId(1));
    assert_eq!(config.groups[1].writer_id(&member.name), Some(WriterId(0)));
}

#[test]
fn a_disk_that_is_removed_holds_its_place_and_one_stays() {
    let before = "[[group.member.disk]]\nname = \"old\"\nremoved = true\n[[group.member.disk]]\nname = \"d\"";
    let text = GOOD.replace("[[group.member.disk]]\nname = \"d\"", before);
    let config = parse("f", &text).unwrap();
    let member = &config.groups[0].members[0];
    assert_eq!((member.disks.len(), member.disks[0].id), (1, DiskId(1)));
    assert_eq!((member.removed_disks.len(), member.removed_disks[0].id), (1, DiskId(0)));
    let none = GOOD.replace("path = \"/d.img\"", "path = \"/d.img\"\nremoved = true");
    let said = shown(&parse("f", &none).unwrap_err());
    assert!(said[0].contains("all disks of a member are removed"), "{said:?}");
    let twice = text.replace("\"old\"", "\"d\"");
    assert!(shown(&parse("f", &twice).unwrap_err())[0].contains("already taken"));
}

#[test]
fn heartbeats_are_off_or_missed_after_several() {
    let heartbeat = |keys: &str| {
        let with = format!("name = \"g\"\n[group.heartbeat]\n{keys}");
        parse("f", &GOOD.replace("name = \"g\"", &with)).unwrap().groups[0].heartbeat
    };
    assert_eq!(heartbeat("interval = \"off\""), None);
    let alarm_after = |keys: &str| heartbeat(keys).unwrap().alarm_after;
    assert_eq!(alarm_after("interval = \"100ms\""), Duration::from_secs(5));
    assert_eq!(alarm_after("interval = \"10s\""), Duration::from_secs(50));
    assert_eq!(alarm_after("interval = \"10s\"\nalarm_after = \"30s\""), Duration::from_secs(30));
    assert_eq!(alarm_after("interval = \"100ms\"\nalarm_after = \"1s\""), Duration::from_secs(1));
}

#[test]
fn the_examples_are_good() {
    assert_eq!(load(&example("host.toml")).unwrap().groups.len(), 1);
    let config = load(&example("host-all-keys.toml")).unwrap();
    let group = &config.groups[0];
    assert_eq!(group.copy.rate.unwrap().bytes_per_s, 50_000_000);
    assert_eq!(group.activity_log.unwrap().slots, 8192);
    assert_eq!(group.members[0].disks[1].size.as_ref().unwrap().bytes, 500 << 30);
    assert_eq!(config.backup.address.to_string(), "[2001:db8::7]:9640");
    tidelock_machine::read(&std::fs::read_to_string(example("machine.json")).unwrap()).unwrap();
}

/// On either of its hosts, and with everything on one.
#[test]
fn the_example_of_several_members_is_good_everywhere() {
    let text = std::fs::read_to_string(example("host-several.toml")).unwrap();
    let on_the_other = text.replace("name = \"host-a\"", "name = \"host-b\"");
    let on_one: String = text
        .lines()
        .filter(|line| !line.starts_with("host = "))
        .flat_map(|line| [line, "\n"])
        .collect();
    let directory = tempfile::tempdir().unwrap();
    for (text, here) in [
        (text, &["web", "db"][..]),
        (on_the_other, &["ledger"][..]),
        (on_one, &["web", "db", "ledger"][..]),
    ] {
        let file = directory.path().join("host.toml");
        std::fs::write(&file, &text).unwrap();
        let checked = std::process::Command::new(env!("CARGO_BIN_EXE_tidelock"))
            .args(["config", "check", "--file-only"])
            .arg(&file)
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&checked.stderr);
        assert!(checked.status.success(), "{said}");
        let config = parse("host.toml", &text).unwrap();
        let group = &config.groups[0];
        assert_eq!(group.members.iter().map(|m| m.name.as_str()).collect::<Vec<_>>(), here);
        assert_eq!(group.writers(), ["db", "ledger"]);
        assert!(group.is_tagged());
    }
}

/// Every key that `docs/manual/host-configuration.md` names is in the example of all keys, and so parses; and
/// nothing that parses is undocumented.
#[test]
fn the_documented_keys_are_the_keys() {
    fn collect(prefix: &str, value: &toml::Value, keys: &mut BTreeSet<String>) {
        match value {
            toml::Value::Table(table) => {
                for (key, value) in table {
                    let path =
                        if prefix.is_empty() { key.clone() } else { format!("{prefix}.{key}") };
                    collect(&path, value, keys);
                }
            }
            toml::Value::Array(items) if items.iter().all(toml::Value::is_table) => {
                items.iter().for_each(|item| collect(prefix, item, keys));
            }
            _ => {
                keys.insert(prefix.to_owned());
            }
        }
    }
    let text = std::fs::read_to_string(example("host-all-keys.toml")).unwrap();
    let mut in_example = BTreeSet::new();
    collect("", &toml::Value::Table(text.parse().unwrap()), &mut in_example);

    let docs = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/manual/host-configuration.md");
    let docs = std::fs::read_to_string(docs).unwrap();
    let begin = docs.find("<!-- host keys -->").unwrap();
    let end = docs.find("<!-- end of host keys -->").unwrap();
    let key = |line: &str| Some(line.strip_prefix("| `")?.split('`').next()?.to_owned());
    let documented: BTreeSet<_> = docs[begin..end].lines().filter_map(key).collect();
    assert_eq!(documented, in_example);
}

#[test]
fn each_mistake_gets_its_words() {
    let cases = [
        (
            "name = \"h\"",
            "",
            "1:1 missing key `name` in [host] -> name = \"host-a\" (as in its certificate)",
        ),
        (
            "name = \"h\"",
            "name = \"h\"\nlog = \"info,=x=\"",
            "3:7 `log` in [host]: \"info,=x=\" is not a filter: invalid filter directive -> \"info\" or \"info,tidelock_daemon_core::link=debug\"",
        ),
        (
            "plaintext = true",
            "",
            "3:1 the link would be neither encrypted nor authenticated -> [tls] with ca, certificate and key (`tidelock pki` makes them), or plaintext = true in [backup] on a link for tests",
        ),
        (
            "[[group]]",
            "[tls]\nca = \"/a\"\ncertificate = \"/b\"\nkey = \"/c\"\n[[group]]",
            "5:13 plaintext and [tls] at once: one of them is not meant -> remove this line, or the section [tls]",
        ),
        (
            "plaintext = true",
            "server_name = \"b:1\"\nplaintext = true",
            "5:15 `server_name` in [backup]: \"b:1\" is neither a DNS name nor an IP address -> a name without port",
        ),
        (
            "[[group]]",
            "[metrics]\n[[group]]",
            "6:1 missing key `listen` in [metrics] -> listen = \"127.0.0.1:9641\"",
        ),
        (
            "name = \"g\"",
            "name = \"g\"\nlease = \"10s\"\ngrace = \"10s\"",
            "9:9 `grace` in [[group]]: 10s is not well above the lease of 10s: the backup could be promoted while this host still answers clients -> \"15s\" or more",
        ),
        (
            "name = \"g\"",
            "name = \"g\"\nlease = \"1ms\"",
            "8:9 `lease` in [[group]]: 1ms is not between 200ms and 1h -> \"10s\"",
        ),
        (
            "name = \"g\"",
            "name = \"g\"\nbacklog = \"1MiB\"",
            "8:11 `backlog` in [[group]]: 1MiB is less than the largest write that a guest may send -> \"32MiB\" or more",
        ),
        (
            "name = \"g\"",
            "name = \"g\"\nmode = \"pipeline\"",
            "8:8 `mode` in [[group]]: \"pipeline\" is none of the choices -> \"sync\" or \"pipelined\" or \"async\"",
        ),
        (
            "name = \"g\"",
            "name = \"g\"\nwhen_unreachable = \"async\"",
            "8:20 `when_unreachable` in [[group]]: it must be said after how long -> \"async after 30s\"",
        ),
        (
            "name = \"g\"",
            "name = \"g\"\nwhen_unreachable = \"async after 10ms\"",
            "8:20 `when_unreachable` in [[group]]: 10ms is not between 1s and 1d -> \"async after 30s\"",
        ),
        (
            "name = \"g\"",
            "name = \"g\"\nbefore_first_contact = \"serve\"",
            "8:24 `before_first_contact` in [[group]]: \"serve\" is none of the choices -> \"wait\" or \"serve-unprotected\"",
        ),
        (
            "name = \"g\"",
            "name = \"g\"\nmodes = \"sync\"",
            "8:1 unknown key `modes` in [[group]] -> mode",
        ),
        (
            "name = \"g\"",
            "name = \"g\"\n[group.copy]\nrate = \"0B/s\"",
            "9:8 `rate` in [group.copy]: at this rate the copy would never end -> \"50MiB/s\", or no `rate` for no limit",
        ),
        (
            "name = \"g\"",
            "name = \"g\"\n[group.copy]\nwindow = \"1MiB\"",
            "9:10 `window` in [group.copy]: 1MiB is out of range -> \"4MiB\" to \"1GiB\"",
        ),
        (
            "name = \"g\"",
            "name = \"g\"\n[group.verify]\nevery = \"1s\"",
            "9:9 `every` in [group.verify]: the disks would be read all the time -> \"7d\", or \"0s\" to verify only on command",
        ),
        (
            "name = \"g\"",
            "name = \"g\"\n[group.verify]\nrate = \"0B/s\"",
            "9:8 `rate` in [group.verify]: at this rate it would never end -> \"50MiB/s\"",
        ),
        (
            "name = \"g\"",
            "name = \"g\"\n[group.heartbeat]\ninterval = \"10ms\"",
            "9:12 `interval` in [group.heartbeat]: 10ms is not between 100ms and 1m -> \"1s\", or \"off\"",
        ),
        (
            "name = \"g\"",
            "name = \"g\"\n[group.heartbeat]\ninterval = \"10s\"\nalarm_after = \"20s\"",
            "10:15 `alarm_after` in [group.heartbeat]: 20s is not between 30s (3 intervals, 1s at least) and 1h -> \"50s\"",
        ),
        (
            "name = \"g\"",
            "name = \"g\"\n[group.heartbeat]\ninterval = \"off\"\nalarm_after = \"20s\"",
            "10:15 `alarm_after` in [group.heartbeat]: none is sent, so none is missed -> no `alarm_after`, or an interval",
        ),
        (
            "name = \"g\"",
            "name = \"g\"\n[group.backlog_on_disk]\nsize = \"100MiB\"",
            "9:8 `size` in [group.backlog_on_disk]: 100MiB is less than 256MiB; what waits in memory is on disk, too \
             (`backlog` is 256MiB) -> \"256MiB\" or more",
        ),
        (
            "name = \"g\"",
            "name = \"g\"\nbacklog = \"32MiB\"\n[group.backlog_on_disk]\nsize = \"48MiB\"",
            "10:8 `size` in [group.backlog_on_disk]: 48MiB is less than 64MiB; what waits in memory is on disk, too \
             (`backlog` is 32MiB) -> \"64MiB\" or more",
        ),
        (
            "name = \"g\"",
            "name = \"g\"\n[group.backlog_on_disk]\nsize = \"1GiB\"\nat_limit = \"fall\"",
            "10:12 `at_limit` in [group.backlog_on_disk]: \"fall\" is none of the choices -> \"map\" or \"wait\"",
        ),
        (
            "name = \"g\"",
            "name = \"g\"\n[group.backlog_on_disk]\ndirectory = \"/d\"",
            "8:1 missing key `size` in [group.backlog_on_disk] -> size = \"20GiB\"",
        ),
        (
            "name = \"g\"",
            "name = \"g\"\n[group.heartbeat]\ninterval = true",
            "9:12 `interval` in [group.heartbeat]: this is true or false -> \"1s\" or \"off\"",
        ),
        (
            "name = \"m\"",
            "name = \"m\"\nroles = []",
            "10:9 `roles` in [[group.member]]: a member without a role does nothing -> roles = [\"writer\", \"outbound\"]",
        ),
        (
            "name = \"m\"",
            "name = \"m\"\nroles = [\"outbound\"]",
            "8:1 a member that is no writer has a disk, which would not be protected -> \"writer\" among its roles, or no disk",
        ),
        (
            "[[group.member.disk]]\nname = \"d\"\npath = \"/d.img\"\n",
            "",
            "6:1 no member of this group has a disk: there is nothing to protect -> [[group.member.disk]] below one of its members",
        ),
        (
            "[[group.member.network]]\ninterface = \"tap0\"\ntopology = \"routed\"\n",
            "",
            "8:1 an outbound member has no network: its packets would leave unheld -> [[group.member.network]] with interface and topology, or roles = [\"writer\"] if it talks to no client",
        ),
        (
            "topology = \"routed\"",
            "",
            "13:1 missing key `topology` in [[group.member.network]] -> topology = \"bridged\" if the interface is a port of a bridge, else \"routed\"",
        ),
        (
            "\"tap0\"",
            "\"a-name-too-long-for-linux\"",
            "14:13 `interface` in [[group.member.network]]: \"a-name-too-long-for-linux\" is no interface's name -> the guest's tap, such as \"tap0\" (see `ip link`)",
        ),
        (
            "topology = \"routed\"",
            "topology = \"routed\"\nheld_packets_max = 0",
            "16:20 `held_packets_max` in [[group.member.network]]: 0 is out of range -> 1 to 1048576",
        ),
        (
            "path = \"/d.img\"",
            "path = \"d.img\"",
            "12:8 `path` in [[group.member.disk]]: \"d.img\" is not an absolute path -> an absolute path such as \"/etc/tidelock/ca.pem\"",
        ),
        (
            "path = \"/d.img\"",
            "path = \"/d.img\"\n[[group.member.disk]]\nname = \"d\"\npath = \"/e\"",
            "14:8 the disk of the member d is already taken in line 11 -> another one",
        ),
        (
            "path = \"/d.img\"",
            "path = \"/d.img\"\n[[group.member.disk]]\nname = \"e\"\npath = \"/d.img\"",
            "15:8 the disk path /d.img is already taken in line 12 -> another one",
        ),
        (
            "path = \"/d.img\"",
            "path = \"/d.img\"\nsocket = \"/s\"\n[[group.member.disk]]\nname = \"e\"\npath = \"/e\"\nsocket = \"/s\"",
            "17:10 the socket /s is already taken in line 13 -> another one",
        ),
        (
            "[[group.member.network]]",
            "[[group.member]]\nname = \"m2\"\nroles = [\"writer\"]\n[[group.member.disk]]\nname = \"d\"\npath = \"/e\"\n[[group]]\nname = \"z\"\n[[group.member]]\nname = \"y\"\nroles = [\"outbound\"]\n[[group.member.network]]",
            "8:1 an outbound member has no network: its packets would leave unheld -> [[group.member.network]] with interface and topology, or roles = [\"writer\"] if it talks to no client",
        ),
        (
            "topology = \"routed\"",
            "topology = \"routed\"\naddresses = [\"10.0.0.1\"]\n[[group.member]]\nname = \"m2\"\nroles = [\"writer\"]\n[[group.member.disk]]\nname = \"d\"\npath = \"/e\"",
            "18:8 m2 is one of several members and has no network -> [[group.member.network]] with interface, topology and addresses: what it sends to the others must be seen",
        ),
        (
            "topology = \"routed\"",
            "topology = \"routed\"\naddresses = [\"10.0.0.1\"]\n[[group.member]]\nname = \"m2\"\nhost = \"other\"",
            "18:8 m2 is one of several members and has no addresses -> addresses = [\"10.0.0.1\"] in its [[group.member.network]], on every host",
        ),
        (
            "topology = \"routed\"",
            "topology = \"routed\"\naddresses = [\"10.0.0.1\"]\n[[group.member]]\nname = \"m2\"\nhost = \"other\"\n[[group.member.network]]\naddresses = [\"10.0.0.1\"]",
            "18:8 the address 10.0.0.1 of m2 is already that of m in line 9 -> another one",
        ),
        (
            "topology = \"routed\"",
            "topology = \"routed\"\naddresses = [\"10.0.0\"]",
            "16:13 `addresses` in [[group.member.network]]: \"10.0.0\" is not an IP address -> a list: each entry an address such as \"10.0.0.1\" or \"fd00::1\"",
        ),
        (
            "name = \"m\"",
            "name = \"m\"\nhost = \"other\"",
            "6:1 no member of this group is on this host -> host = \"NAME\" of [host] in one of them, or no such group here",
        ),
        (
            "name = \"g\"",
            "name = \"g\"\nmax_clock_lead = \"2m\"",
            "8:18 `max_clock_lead` in [[group]]: 2m is not between 1ms and 1m -> \"1s\"",
        ),
        (
            "name = \"g\"",
            "name = \"g\"\n[group.tag]\noption = 30",
            "9:10 `option` in [group.tag]: 30 is no IPv4 option that is copied into fragments -> 158, or another from 128 to 255",
        ),
        (
            "name = \"g\"",
            "name = \"g\"\n[group.tag]\nmark_mask = 0x0c000000",
            "9:13 `mark_mask` in [group.tag]: 0xc000000 has fewer than 8 bits, so what is in them could be met by chance -> 0xffff0000, or other bits of a packet's mark",
        ),
        (
            "name = \"g\"",
            "name = \"g\"\n[group.tag]\noption = 137",
            "9:10 `option` in [group.tag]: 137 has a meaning of its own, which routers and guests may act on -> 158, or 222, the other experimental one",
        ),
    ];
    for (from, to, expected) in cases {
        assert!(GOOD.contains(from), "{from}");
        let text = GOOD.replacen(from, to, 1);
        let found = parse("host.toml", &text).expect_err(&text);
        assert_eq!(shown(&found).first().map(String::as_str), Some(expected), "{text}");
    }
    let no_group = &GOOD[..GOOD.find("[[group]]").unwrap()];
    let found = parse("f", no_group).unwrap_err();
    assert_eq!(
        shown(&found),
        ["1:1 missing section [[group]] -> [[group]] and its keys, or [[store]]"]
    );
    let long = GOOD.replace("\"h\"", &format!("\"h\"\nruntime_dir = \"/{}\"", "x".repeat(100)));
    assert!(shown(&parse("f", &long).unwrap_err())[0].contains("may have 103"));
}

/// A group of three writers on two hosts and a front end, as it stands on `host`. `more`: of the group.
fn several(host: &str, more: &str) -> String {
    let (head, member) = GOOD.split_at(GOOD.find("[[group.member]]").unwrap());
    let head = head.replace("\"h\"", &format!("\"{host}\""));
    let writer = |name: &str, host: &str, addresses: &str| {
        let name = format!("\"{name}\"\nhost = \"{host}\"");
        member.replace("\"m\"", &name) + &format!("addresses = [{addresses}]\n")
    };
    let a = writer("a", "h", "\"10.0.0.1\", \"fd00::1\"");
    let b = writer("b", "other", "\"10.0.0.2\"");
    let gone = "[[group.member]]\nname = \"gone\"\nremoved = true\nroles = [\"writer\"]\n";
    let web = writer("web", "other", "\"10.0.0.3\"")
        .replace("tap0", "tap1")
        .replace("[[group.member.disk]]\nname = \"d\"\npath = \"/d.img\"\n", "");
    format!("{head}{more}{a}{b}{gone}{web}")
}

#[test]
fn one_group_section_stands_on_all_of_its_hosts() {
    let on = |host: &str| parse("f", &several(host, "")).unwrap();
    let (here, there) = (on("h"), on("other"));
    let names = |config: &Config| {
        config.groups[0].members.iter().map(|m| m.name.to_string()).collect::<Vec<_>>()
    };
    assert_eq!((names(&here), names(&there)), (vec!["a".into()], vec!["b".into(), "web".into()]));
    for config in [&here, &there] {
        let group = &config.groups[0];
        assert_eq!(group.writers(), ["a", "b", "gone"], "places stay");
        assert!(group.is_tagged() && group.has_several_writers());
        assert_eq!(group.peers(), ["a=10.0.0.1,fd00::1", "b=10.0.0.2", "web=10.0.0.3"]);
        assert_eq!(group.form, Form::Vector);
    }
    let web = &there.groups[0].members[1];
    assert!(!web.roles.writer && web.roles.outbound);
    assert_eq!(adoption::elsewhere(&here.groups[0]), ["b", "web"], "who was removed is nowhere");
    assert_eq!(adoption::elsewhere(&there.groups[0]), ["a"]);
    assert_eq!(web.networks[0].queue.value, 7101);
    let apart = parse("f", &several("h", "boundary = \"member\"\n")).unwrap();
    assert!(!apart.groups[0].is_tagged());
}

#[test]
fn only_a_host_with_all_members_adopts_a_group() {
    let text = std::fs::read_to_string(example("host-several.toml")).unwrap();
    let directory = tempfile::tempdir().unwrap();
    let own = format!("\n[host]\nruntime_dir = {0:?}\nstate_dir = {0:?}\n", directory.path());
    let text = text.replace("\n[host]\n", &own).replace("/var/lib/", "/nowhere/");
    let on_one = text.replace("host = \"host-b\"", "host = \"host-a\"");
    for (text, why) in [
        (&text, "ledger runs on another host"),
        // It has looked no further than at the first disk.
        (&on_one, "does not exist: give --qmp"),
    ] {
        let file = directory.path().join("host.toml");
        std::fs::write(&file, text).unwrap();
        let prepared = std::process::Command::new(env!("CARGO_BIN_EXE_tidelock"))
            .args(["adopt", "shop", "--prepare", "--config"])
            .arg(&file)
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&prepared.stderr);
        assert!(!prepared.status.success() && said.contains(why), "{said}");
    }
}

#[test]
fn vectors_are_taken_while_they_fit() {
    let group = |net: &str, writers: usize, form: &str| {
        let more: String = (2..=writers)
            .map(|n| {
                format!(
                    "[[group.member]]\nname = \"w{n}\"\nhost = \"o\"\nroles = [\"writer\"]\n\
                     [[group.member.network]]\naddresses = [\"{net}{n}\"]\n"
                )
            })
            .collect();
        let first = GOOD.replace("name = \"g\"", &format!("name = \"g\"\n{form}"));
        parse("f", &format!("{first}addresses = [\"{net}1\"]\n{more}"))
    };
    let of = |writers, form| group("10.0.1.", writers, form);
    assert_eq!(of(7, "").unwrap().groups[0].form, Form::Vector);
    assert_eq!(of(8, "").unwrap().groups[0].form, Form::Hlc);
    assert_eq!(of(2, "form = \"hlc\"").unwrap().groups[0].form, Form::Hlc);
    let found = of(8, "form = \"vector\"").unwrap_err();
    assert!(shown(&found)[0].contains("vectors of 8 writers do not fit"), "{found}");
    // Where no member has an IPv4 address their packets have IPv6's larger option.
    let six = |writers, form| group("fd00::", writers, form);
    assert_eq!(six(61, "").unwrap().groups[0].form, Form::Vector);
    assert_eq!(six(61, "form = \"vector\"").unwrap().groups[0].form, Form::Vector);
    assert_eq!(six(62, "").unwrap().groups[0].form, Form::Hlc);
    let found = six(62, "form = \"vector\"").unwrap_err();
    assert!(shown(&found)[0].contains("do not fit into an IPv6 option"), "{found}");
}

#[test]
fn hosts_must_agree_on_how_tags_travel() {
    let of = |more: &str| parse("f", &several("h", more)).unwrap().groups[0].peers();
    let usual = of("");
    assert!(usual.iter().all(|line| !line.contains("option")), "{usual:?}");
    assert_eq!(of("[group.tag]\noption = 158\n"), usual);
    let other = of("[group.tag]\noption = 222\n");
    assert_eq!((other[0].as_str(), &other[1..]), ("tag.option=222", &usual[..]));
    let all =
        of("tagging = \"off-for-a-demonstration\"\n[group.tag]\noption = 222\nstrip_path = true\n");
    let unusual = ["tag.option=222", "tag.strip_path=true", "tagging=off-for-a-demonstration"];
    assert_eq!((&all[..3], &all[3..]), (&unusual.map(str::to_owned)[..], &usual[..]));
    // Without tags they have no meaning.
    let apart = of("boundary = \"member\"\n[group.tag]\noption = 222\n");
    assert_eq!((apart[0].as_str(), &apart[1..]), ("boundary=member", &usual[..]));
}

#[test]
fn a_members_name_is_used_once_on_a_host() {
    let second = GOOD[GOOD.find("[[group]]").unwrap()..]
        .replace("\"g\"", "\"g2\"")
        .replace("/d.img", "/e.img")
        .replace("tap0", "tap1");
    let found = parse("f", &format!("{GOOD}{second}")).unwrap_err();
    assert_eq!(shown(&found), ["19:8 the member m is already taken in line 9 -> another one"]);
}

#[test]
fn a_queue_or_an_interface_is_used_once() {
    let second = GOOD[GOOD.find("[[group]]").unwrap()..]
        .replace("\"g\"", "\"g2\"")
        .replace("\"m\"", "\"m2\"")
        .replace("/d.img", "/e.img")
        + "queue = 7100\n";
    let found = parse("f", &format!("{GOOD}{second}")).unwrap_err();
    assert_eq!(
        shown(&found),
        [
            "24:13 the interface tap0 is already taken in line 14 -> another one",
            "26:9 the queue 7100 is already taken in line 13 -> another one",
        ]
    );
}

#[test]
fn all_mistakes_come_at_once() {
    let text = GOOD
        .replace("name = \"h\"", "nmae = \"h\"")
        .replace("\"b:1\"", "\"b\"")
        .replace("/d.img", "d.img")
        .replace("routed", "rooted");
    let lines: Vec<_> = parse("f", &text).unwrap_err().iter().map(|d| d.place.line()).collect();
    assert_eq!(lines, [1, 2, 4, 12, 15]);
}

/// A good configuration with its disk and a machine description in a directory.
fn on_disk(dir: &Path, disk_bytes: u64, more: &str) -> Config {
    std::fs::File::create(dir.join("d.img")).unwrap().set_len(disk_bytes).unwrap();
    let text = GOOD.replace("/d.img\"", &format!("{}\"{more}", dir.join("d.img").display()));
    parse("host.toml", &text).unwrap()
}

fn check(config: &Config) -> Vec<String> {
    check_machine(config, SystemTime::now()).err().map(|found| shown(&found)).unwrap_or_default()
}

#[test]
fn a_disk_must_be_there_and_as_large_as_it_says() {
    let dir = tempfile::tempdir().unwrap();
    let image = dir.path().join("d.img");
    assert_eq!(check(&on_disk(dir.path(), 1 << 20, "")), Vec::<String>::new());
    assert_eq!(check(&on_disk(dir.path(), 1 << 20, "\nsize = \"1MiB\"")), Vec::<String>::new());
    let smaller = check(&on_disk(dir.path(), 1 << 19, "\nsize = \"1MiB\""));
    let expected = format!(
        "13:8 the disk {} has 512KiB: smaller than configured -> \"512KiB\", if this is the right disk",
        image.display()
    );
    assert_eq!(smaller, [expected]);
    let odd = check(&on_disk(dir.path(), 1000, ""));
    assert!(odd[0].contains("not a whole number of sectors"), "{odd:?}");
    let empty = check(&on_disk(dir.path(), 0, ""));
    assert!(empty[0].contains("not a whole number of sectors"), "{empty:?}");

    let config = on_disk(dir.path(), 1 << 20, "");
    std::fs::write(&image, [b"QFI\xfb".as_slice(), &[0; 508]].concat()).unwrap();
    assert!(check(&config)[0].contains("qcow2"));
    std::fs::remove_file(&image).unwrap();
    assert!(check(&config)[0].contains("No such file"));
    std::fs::create_dir(&image).unwrap();
    assert!(check(&config)[0].contains("neither a file nor a block device"));
}

#[test]
fn one_disk_under_two_names_is_found() {
    let dir = tempfile::tempdir().unwrap();
    let alias = dir.path().join("alias");
    std::os::unix::fs::symlink(dir.path().join("d.img"), &alias).unwrap();
    let second = format!("\n[[group.member.disk]]\nname = \"e\"\npath = \"{}\"", alias.display());
    let found = check(&on_disk(dir.path(), 1 << 20, &second));
    assert_eq!(found.len(), 1);
    assert!(found[0].starts_with("15:8") && found[0].contains("in line 12"), "{found:?}");
}

#[test]
fn a_machine_description_is_json_or_libvirt() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("machine");
    let text =
        GOOD.replace("name = \"m\"", &format!("name = \"m\"\nmachine = \"{}\"", file.display()));
    let config = parse("f", &text).unwrap();
    let path = config.groups[0].members[0].machine.as_ref().unwrap();
    let read = |text: &str| {
        std::fs::write(&file, text).unwrap();
        read_machine(path)
    };
    assert_eq!(read("{\"memory_mib\": 64, \"cpus\": 2}").unwrap().cpus, 2);
    let xml = "<?xml version='1.0'?><domain type='kvm'><memory unit='MiB'>64</memory></domain>";
    assert_eq!(read(xml).unwrap().memory_mib, 64);
    for bad in ["{\"cpus\": 2}", "<network/>", "<domain/>", "[1]", "hello", "{\"memory_mib\": 0}"] {
        assert!(read(bad).is_err(), "{bad}");
    }
    // It would run a program at the backup site.
    let bad = read("{\"memory_mib\": 16, \"extra_arguments\": [\"-incoming\", \"exec:id\"]}");
    assert!(bad.unwrap_err().what.contains("extra_arguments"));
    let large = format!("{{\"x\": \"{}\"}}", "x".repeat(256 << 10));
    assert!(read(&large).unwrap_err().what.contains("more than 262144"));
    std::fs::remove_file(&file).unwrap();
    let missing = read_machine(path).unwrap_err();
    assert!(missing.what.contains("No such file") && missing.place.line() == 10);
}

#[test]
fn each_network_card_has_a_queue_of_its_own() {
    let second = "[[group.member.network]]\ninterface = \"tap1\"\ntopology = \"bridged\"\naddresses = [\"10.0.0.2\"]\n";
    let config = parse("f", &format!("{GOOD}{second}")).unwrap();
    let networks = &config.groups[0].members[0].networks;
    let of_each: Vec<_> =
        networks.iter().map(|n| (n.interface.as_str(), n.topology, n.queue.value)).collect();
    assert_eq!(of_each, [("tap0", Topology::Routed, 7100), ("tap1", Topology::Bridged, 7101)]);
    assert_eq!(config.groups[0].roster[0].addresses.len(), 1);
    let twice = parse("f", &format!("{GOOD}{}", second.replace("tap1", "tap0"))).unwrap_err();
    assert!(
        shown(&twice)[0].contains("the interface tap0 is already taken"),
        "{:?}",
        shown(&twice)
    );
    let single = GOOD.replace("[[group.member.network]]", "[group.member.network]");
    let said = shown(&parse("f", &single).unwrap_err());
    assert!(said[0].contains("`network` must be a list of sections"), "{said:?}");
}

#[test]
fn a_machine_with_a_card_that_is_neither_held_nor_named_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let machine = dir.path().join("machine");
    let check_with = |description: &str, ungated: &str| {
        std::fs::write(&machine, description).unwrap();
        let image = dir.path().join("d.img");
        std::fs::File::create(&image).unwrap().set_len(1 << 20).unwrap();
        let keys = format!("name = \"m\"\nmachine = \"{}\"\n{ungated}", machine.display());
        let text =
            GOOD.replace("name = \"m\"", &keys).replace("/d.img", &image.display().to_string());
        check(&parse("f", &text).unwrap())
    };
    let json = r#"{"memory_mib": 64, "networks": [{"mac": "52:54:00:00:00:01"}, {"mac": "52:54:00:00:00:02"}, {"name": "san"}]}"#;
    let xml = "<domain type='kvm'><memory unit='MiB'>64</memory><devices><interface type='bridge'><mac address='52:54:00:00:00:01'/>\
               <target dev='tap0'/></interface><interface type='network'><mac address='52:54:00:00:00:02'/></interface>\
               <interface type='direct'><target dev='san'/></interface></devices></domain>";
    for description in [json, xml] {
        let said = check_with(description, "");
        assert!(said[0].contains("3 network cards that are not in `ungated`"), "{said:?}");
        assert!(
            said[0].contains("52:54:00:00:00:02") && said[0].contains("1 of them is held"),
            "{said:?}"
        );
        let said = check_with(description, "ungated = [\"san\"]");
        assert!(said[0].contains("2 network cards"), "{said:?}");
        let said = check_with(description, "ungated = [\"SAN\", \"net1\"]");
        assert_eq!(said, Vec::<String>::new());
        let said = check_with(description, "ungated = [\"san\", \"net1\", \"52:54:00:00:00:09\"]");
        assert!(said[0].contains("has no network card \"52:54:00:00:00:09\""), "{said:?}");
    }
    assert_eq!(check_with("{\"memory_mib\": 64}", ""), Vec::<String>::new());
}

#[test]
fn the_certificate_must_be_this_hosts() {
    let dir = tempfile::tempdir().unwrap();
    let now = SystemTime::now();
    let day = Duration::from_secs(86_400);
    let ca = Authority::create("t", now, day).unwrap();
    let authority = Authority::from_pem(&ca.certificate_pem, &ca.key_pem).unwrap();
    let path = |name: &str| dir.path().join(name);
    let tls = format!(
        "[tls]\nca = \"{}\"\ncertificate = \"{}\"\nkey = \"{}\"\n[[group]]",
        path("ca.pem").display(),
        path("h.pem").display(),
        path("h.key").display()
    );
    let mut config = on_disk(dir.path(), 1 << 20, "");
    let text = GOOD
        .replace("/d.img", &path("d.img").display().to_string())
        .replace("plaintext = true\n", "")
        .replacen("[[group]]", &tls, 1);
    config.backup = parse("f", &text).unwrap().backup;
    let missing = check(&config);
    assert!(missing[0].starts_with("5:1") && missing[0].contains("ca.pem"), "{missing:?}");

    let issue = |role, name: &str| {
        use std::os::unix::fs::PermissionsExt;
        let issued = authority.issue(role, &[name.into()], now, day).unwrap();
        std::fs::write(path("ca.pem"), &ca.certificate_pem).unwrap();
        std::fs::write(path("h.pem"), issued.certificate_pem).unwrap();
        std::fs::write(path("h.key"), issued.key_pem).unwrap();
        std::fs::set_permissions(path("h.key"), PermissionsExt::from_mode(0o600)).unwrap();
    };
    issue(Role::Host, "h");
    assert_eq!(check(&config), Vec::<String>::new());
    issue(Role::Host, "other");
    let other = check(&config);
    assert!(other[0].contains("for other, not for h"), "{other:?}");
    issue(Role::Backup, "h");
    let role = check(&config);
    assert!(role[0].contains("not for a host"), "{role:?}");

    // Guests get their disks with a certificate that has expired. With one that is not valid yet the clock is wrong.
    issue(Role::Host, "h");
    let later = check_for_start(&config, now + 2 * day).unwrap();
    assert!(later.is_some_and(|expired| expired.what.contains("expired on")));
    assert!(check_machine(&config, now + 2 * day).is_err());
    let earlier = check_for_start(&config, now - 2 * day).unwrap_err();
    assert!(shown(&earlier)[0].contains("valid only from"), "{earlier}");
    assert!(check_for_start(&config, now).unwrap().is_none());
}

/// systemd does not start the daemon again after exit status 2.
#[test]
fn a_mistake_of_the_file_is_final_and_the_state_of_the_machine_is_not() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("host.toml");
    let own = format!("[host]\nruntime_dir = {0:?}\nstate_dir = {0:?}\n", dir.path());
    let (good, _) = GOOD.split_once("[[group.member.network]]").unwrap();
    let image = dir.path().join("d.img");
    let good = good.replace("[host]\n", &own).replace("/d.img", &image.display().to_string());
    let good = good.replace("name = \"m\"", "name = \"m\"\nroles = [\"writer\"]");
    let start = || {
        let daemon = std::process::Command::new(env!("CARGO_BIN_EXE_tidelockd"))
            .arg("--config")
            .arg(&file)
            .output()
            .unwrap();
        (daemon.status.code(), String::from_utf8_lossy(&daemon.stderr).into_owned())
    };
    let is = |code, why: &str| {
        let (status, said) = start();
        assert!(status == Some(code) && said.contains(why), "{status:?}: {said}");
    };
    is(1, "cannot read the configuration");
    std::fs::write(&file, good.replace("address", "adress")).unwrap();
    is(2, "unknown key `adress`");
    std::fs::write(&file, format!("{good}size = \"large\"\n")).unwrap();
    is(2, "size");
    std::fs::write(&file, &good).unwrap();
    is(1, "No such file");
    let description = good.replace("name = \"m\"", "name = \"m\"\nmachine = \"/nowhere\"");
    std::fs::write(&file, description).unwrap();
    std::fs::File::create(&image).unwrap().set_len(1 << 20).unwrap();
    is(1, "/nowhere");
    std::fs::write(&file, format!("{good}socket_owner = \"no-such-user\"\n")).unwrap();
    is(1, "there is no such user");
}

proptest::proptest! {
    /// Whatever is done to a file, it is read or explained; and what is explained has a line of
    /// the file and something to write.
    #[test]
    fn a_mangled_file_is_read_or_explained(
        edits in proptest::collection::vec(
            (proptest::prelude::any::<proptest::sample::Index>(), 0usize..6, ".{0,3}"), 1..8),
    ) {
        let text = std::fs::read_to_string(example("host-all-keys.toml")).unwrap();
        let mut lines: Vec<String> =
            text.lines().filter(|line| !line.starts_with('#')).map(str::to_owned).collect();
        for (at, kind, noise) in edits {
            let at = at.index(lines.len());
            match kind {
                0 => drop(lines.remove(at)),
                1 => lines.insert(at, lines[at].clone()),
                2 => lines[at].push_str(&noise),
                3 => lines[at].insert_str(0, &noise),
                4 => lines[at] = lines[at].replace('"', &noise),
                _ => lines[at] = lines[at].split('=').next().unwrap_or("").to_owned() + "= 7",
            }
            if lines.is_empty() {
                break;
            }
        }
        if let Err(found) = parse("f", &lines.join("\n")) {
            for diagnostic in found.iter() {
                proptest::prop_assert!(diagnostic.place.line() <= lines.len().max(1));
                proptest::prop_assert!(!diagnostic.instead.is_empty());
            }
            proptest::prop_assert!(!found.to_string().is_empty());
        }
    }
}
