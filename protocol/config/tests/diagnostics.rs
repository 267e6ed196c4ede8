//! A table of wrong files and exactly what is said about each.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use tidelock_config::{HostPort, Name, Rate, Section, Size, read};

/// A small schema with one key of each kind.
fn schema(root: &mut Section<'_>) -> Option<()> {
    let host = root.table("host", |host| {
        let name = host.required::<Name>("name", "name = \"host-a\"");
        host.optional::<HostPort>("peer");
        host.optional::<SocketAddr>("listen");
        host.optional::<PathBuf>("state_dir");
        host.or("quick", false);
        host.or("lease", Duration::from_secs(10));
        host.or("backlog", Size::mib(256));
        host.optional::<Rate>("rate");
        host.or("queue", 0u16);
        host.optional::<Vec<String>>("tags");
        host.choice("mode", &[("sync", 1), ("async", 2)]);
        host.choices("roles", &[("writer", 1), ("outbound", 2)]);
        name.map(drop)
    });
    root.tables("disk", |disk| disk.required::<Name>("name", "name = \"root\"").map(drop));
    host
}

/// Every diagnostic as `line:column what -> instead`.
fn wrong(text: &str) -> Vec<String> {
    let Err(found) = read("f", text, schema) else { return Vec::new() };
    let one = |d: &tidelock_config::Diagnostic| {
        format!("{}:{} {} -> {}", d.place.line(), d.place.column(), d.what, d.instead)
    };
    found.iter().map(one).collect()
}

#[test]
fn a_good_file_is_taken() {
    let text = "[host]\nname = \"a\"\npeer = \"[fd00::1]:1\"\nlisten = \"[::1]:1\"\nquick = true\n\
                lease = \"1s\"\nbacklog = \"1MiB\"\nrate = \"8Mbit/s\"\nqueue = 0x10\n\
                tags = [\"x\"]\nmode = \"sync\"\nroles = [\"writer\"]\nstate_dir = \"/x\"\n\
                [[disk]]\nname = \"b\"\n[[disk]]\nname = \"c\"\n";
    assert_eq!(wrong(text), Vec::<String>::new());
}

#[test]
fn each_wrong_line_is_named_with_what_to_write() {
    let cases = [
        ("", "1:1 missing section [host] -> [host] and its keys"),
        ("[host]", "1:1 missing key `name` in [host] -> name = \"host-a\""),
        ("host = 1", "1:8 `host` must be a section, not a number -> [host] on a line of its own"),
        (
            "[host]\nname = \"a\"\n[disk]\nname = \"b\"",
            "3:1 `disk` must be a list of sections, not a section -> [[disk]] on a line of its own",
        ),
        (
            "[host]\nname = \"a\"\n[[disk]]\n",
            "3:1 missing key `name` in [[disk]] -> name = \"root\"",
        ),
        ("[host]\nname = \"a\"\n[hots]\n", "3:2 unknown key `hots` -> host"),
        ("[host]\nname = \"a\"\nleese = \"1s\"", "3:1 unknown key `leese` in [host] -> lease"),
        (
            "[host]\nname = \"a\"\nstate-dir = \"/x\"",
            "3:1 unknown key `state-dir` in [host] -> state_dir",
        ),
        (
            "[host]\nname = \"a\"\n[[disk]]\nname = \"b\"\nsize = 1",
            "5:1 unknown key `size` in [[disk]] -> one of name, or remove it",
        ),
        (
            "[host]\nname = 7",
            "2:8 `name` in [host]: this is a number -> a name of letters, digits, \".\", \"_\" and \"-\" that starts with a letter or digit",
        ),
        (
            "[host]\nname = \"a b\"",
            "2:8 `name` in [host]: the name \"a b\" contains ' ' -> a name of letters, digits, \".\", \"_\" and \"-\" that starts with a letter or digit",
        ),
        (
            "[host]\nname = \"../x\"",
            "2:8 `name` in [host]: the name \"../x\" contains '/' -> a name of letters, digits, \".\", \"_\" and \"-\" that starts with a letter or digit",
        ),
        (
            "[host]\nname = \"a\"\nlease = 10",
            "3:9 `lease` in [host]: a duration needs its unit -> \"10s\" or \"10ms\"",
        ),
        (
            "[host]\nname = \"a\"\nlease = \"ten\"",
            "3:9 `lease` in [host]: \"ten\" is not a duration -> a duration with its unit, such as \"250ms\", \"10s\" or \"5m\"",
        ),
        (
            "[host]\nname = \"a\"\nbacklog = \"256M\"",
            "3:11 `backlog` in [host]: \"256M\" is not a size -> \"256MiB\"",
        ),
        (
            "[host]\nname = \"a\"\nbacklog = 5",
            "3:11 `backlog` in [host]: a size needs its unit -> \"5MiB\" or \"5B\"",
        ),
        (
            "[host]\nname = \"a\"\nquick = \"yes\"",
            "3:9 `quick` in [host]: this is a string -> true or false (without quotes)",
        ),
        (
            "[host]\nname = \"a\"\nqueue = 65536",
            "3:9 `queue` in [host]: 65536 is out of range -> a whole number from 0 to 65535",
        ),
        (
            "[host]\nname = \"a\"\nqueue = \"7\"",
            "3:9 `queue` in [host]: a number stands without quotes -> 7",
        ),
        (
            "[host]\nname = \"a\"\nqueue = 99999999999999999999999999999999999999999",
            "3:9 `queue` in [host]: this is a number out of range -> a whole number from 0 to 65535",
        ),
        (
            "[host]\nname = \"a\"\nmode = \"fast\"",
            "3:8 `mode` in [host]: \"fast\" is none of the choices -> \"sync\" or \"async\"",
        ),
        (
            "[host]\nname = \"a\"\nroles = \"writer\"",
            "3:9 `roles` in [host]: this is a string -> a list of \"writer\" or \"outbound\"",
        ),
        (
            "[host]\nname = \"a\"\nroles = [\"riter\"]",
            "3:9 `roles` in [host]: \"riter\" is none of the choices -> \"writer\" or \"outbound\"",
        ),
        (
            "[host]\nname = \"a\"\ntags = [\"\"]",
            "3:8 `tags` in [host]: it is empty -> a list: each entry text in quotes",
        ),
        (
            "[host]\nname = \"a\"\npeer = \"backup\"",
            "3:8 `peer` in [host]: \"backup\" is not a host with a port -> a host and a port such as \"backup.example.org:9640\"",
        ),
        (
            "[host]\nname = \"a\"\npeer = \"fd00::1:9\"",
            "3:8 `peer` in [host]: \"fd00::1:9\" is not a host with a port -> a host and a port such as \"backup.example.org:9640\"",
        ),
        (
            "[host]\nname = \"a\"\nlisten = \"9641\"",
            "3:10 `listen` in [host]: \"9641\" is not an address with a port -> an address and a port such as \"127.0.0.1:9641\" or \"[::1]:9641\"",
        ),
        (
            "[host]\nname = \"a\"\nstate_dir = \"var\"",
            "3:13 `state_dir` in [host]: \"var\" is not an absolute path -> an absolute path such as \"/etc/tidelock/ca.pem\"",
        ),
        (
            "[host]\nname = \"a\"\nrate = \"50MiB\"",
            "3:8 `rate` in [host]: \"50MiB\" is not a rate -> a rate such as \"50MiB/s\" or \"400Mbit/s\"",
        ),
        (
            "[host]\nname = \"é\" # ü\nquick = 1",
            "2:8 `name` in [host]: the name \"é\" contains 'é' -> a name of letters, digits, \".\", \"_\" and \"-\" that starts with a letter or digit",
        ),
    ];
    let distinct: BTreeSet<_> = cases.iter().map(|(text, _)| text).collect();
    assert_eq!(distinct.len(), cases.len());
    for (text, expected) in cases {
        assert_eq!(wrong(text).first().map(String::as_str), Some(expected), "{text}");
    }
}

#[test]
fn everything_wrong_comes_at_once_in_the_order_of_the_file() {
    let text = "[[disk]]\nnmae = \"x\"\n[host]\nlease = 1\nquick = 1\nbogus_key = 1\n";
    let lines: Vec<_> = wrong(text).iter().map(|line| line[..3].to_owned()).collect();
    assert_eq!(lines, ["1:1", "2:1", "3:1", "4:9", "5:9", "6:1"]);
}

#[test]
fn the_line_is_shown_with_marks_under_what_is_meant() {
    let text = "[host]\nname = \"a\"\n\tlease\t= 10 # é\n";
    let shown = read("host.toml", text, schema).unwrap_err().to_string();
    assert_eq!(
        shown,
        "host.toml:3:10: `lease` in [host]: a duration needs its unit\n    \
         \tlease\t= 10 # é\n    \t     \t  ^^\n  write instead: \"10s\" or \"10ms\"\n"
    );
}
