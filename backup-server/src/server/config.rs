//! The configuration file (`docs/manual/backup-configuration.md`), checked as a whole.

use super::stores::config::{self as store, StoreSection};
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};
use tidelock_config::{Diagnostics, Located, Name, Section, Size};
use tidelock_protocol::bounds;
use tidelock_replica::group::{AtSizeMax, GroupOptions, Retention};
use tidelock_store::journal::{self, BATCH_BODY_MAX_BYTES, Compress};

/// The longest path of a Unix socket.
pub const SOCKET_PATH_MAX_BYTES: usize = 107;

/// So long before its end a certificate is warned of.
pub const CERTIFICATE_WARN: Duration = Duration::from_secs(30 * 86_400);
/// The window, unless another is asked for: none.
const WINDOW_MS: u64 = 0;
/// The most that a group's journal takes, unless another size is asked for.
const SIZE_MAX_BYTES: u64 = 64 << 30;

/// Groups that one host may create which are not listed, unless configured.
const GROUPS_PER_HOST: u32 = 32;

/// How hosts prove who they are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Security {
    /// TLS with certificates on both sides.
    Tls(tidelock_tls::Files),
    /// Nothing: only on a link for tests.
    Plaintext,
}

/// Clients of one export at once, at most.
const EXPORT_CONNECTIONS_MAX: u32 = 16;

/// The whole configuration.
#[derive(Clone, Debug)]
pub struct Config {
    /// This server's name.
    pub name: String,
    /// Where hosts connect to.
    pub listen: SocketAddr,
    /// How they prove who they are.
    pub security: Security,
    /// Where everything is kept.
    pub data_dir: PathBuf,
    /// The command line's socket.
    pub control: PathBuf,
    /// Where disks are offered: `GROUP/MEMBER.DISK.sock`.
    pub exports_dir: PathBuf,
    /// What writable views write goes here.
    pub views_dir: PathBuf,
    /// Where snapshots are kept: `GROUP/NAME/`.
    pub snapshots_dir: PathBuf,
    /// Clients of a disk that can be written to, at once.
    pub export_connections: usize,
    /// Offer them here, too.
    pub exports_tcp: Option<SocketAddr>,
    /// Prometheus.
    pub metrics: Option<SocketAddr>,
    /// What is logged.
    pub log: String,
    /// Log as JSON.
    pub log_json: bool,
    /// Path of `boot.toml`, beside the configuration: this site's settings for recovered machines.
    pub boot_file: PathBuf,
    /// Bytes that wait for one group's owner at most.
    pub input_max_bytes: u64,
    /// Groups that one host may create which are not listed here.
    pub groups_per_host: usize,
    options: GroupOptions,
    groups: BTreeMap<String, GroupSection>,
    stores: BTreeMap<String, StoreSection>,
}

/// What is said of one group.
#[derive(Clone, Debug)]
struct GroupSection {
    hosts: Vec<String>,
    members: BTreeMap<String, String>,
    retention: Option<Retention>,
    compress_after: Option<Duration>,
}

impl Config {
    /// How this group is kept.
    #[must_use]
    pub fn options(&self, group: &str) -> GroupOptions {
        let of = self.groups.get(group);
        let after = of.and_then(|of| of.compress_after);
        GroupOptions {
            compress: after.map_or(self.options.compress, compress),
            hosts: of.map(|of| of.hosts.clone()),
            members: of.map(|of| of.members.clone()).unwrap_or_default(),
            retention: of.and_then(|of| of.retention).unwrap_or(self.options.retention),
            ..self.options.clone()
        }
    }

    /// How long the server's certificate is valid; zero: it is not, or cannot be read. `None`: none is used.
    #[must_use]
    pub fn certificate_valid_for(&self) -> Option<Duration> {
        let Security::Tls(files) = &self.security else { return None };
        Some(files.load().map_or(Duration::ZERO, |own| own.valid_for(SystemTime::now())))
    }

    /// Room that is reserved for folding and recovery: a segment that goes into images, and what is staged.
    #[must_use]
    pub fn reserve_bytes(&self) -> u64 {
        self.options.journal.segment_bytes + BATCH_BODY_MAX_BYTES as u64
    }

    /// Whether the group is listed: there is always room for it.
    #[must_use]
    pub fn is_listed(&self, group: &str) -> bool {
        self.groups.contains_key(group)
    }

    /// Stores by name.
    pub(super) fn stores(&self) -> impl Iterator<Item = (&str, &StoreSection)> {
        self.stores.iter().map(|(name, of)| (name.as_str(), of))
    }

    /// Listed groups.
    pub fn listed(&self) -> impl Iterator<Item = &str> {
        self.groups.keys().map(String::as_str)
    }

    /// Whether the host is listed for any group: there is always room for its connections.
    #[must_use]
    pub fn is_listed_host(&self, host: &str) -> bool {
        let of_groups = self.groups.values().map(|of| &of.hosts);
        let of_stores = self.stores.values().map(|of| &of.hosts);
        of_groups.chain(of_stores).any(|hosts| hosts.iter().any(|listed| listed == host))
    }

    /// Reads a configuration. `file` is its name in messages.
    pub fn parse(file: &str, text: &str) -> Result<Self, Diagnostics> {
        let mut config = tidelock_config::read(file, text, read)?;
        config.boot_file = Path::new(file).with_file_name("boot.toml");
        Ok(config)
    }
}

fn read(root: &mut Section<'_>) -> Option<Config> {
    let security = read_security(root);
    let server = root.table("server", |server| {
        let name = server.required::<Name>("name", "name = \"backup-a\"");
        let listen = server.or("listen", SocketAddr::from(([0, 0, 0, 0], 9640)));
        let data_dir =
            server.required::<PathBuf>("data_dir", "data_dir = \"/var/lib/tidelock-backup\"");
        let control = server.optional::<PathBuf>("control");
        let exports_dir = server.optional::<PathBuf>("exports_dir");
        let views_dir = server.optional::<PathBuf>("views_dir");
        let snapshots_dir = server.optional::<PathBuf>("snapshots_dir");
        let exports_tcp = server.optional::<SocketAddr>("exports_tcp");
        let export_connections = server.or("export_connections", 1u32);
        if !(1..=EXPORT_CONNECTIONS_MAX).contains(&export_connections.value) {
            let what = format!(
                "`export_connections` is not between 1 and {EXPORT_CONNECTIONS_MAX}: {}",
                export_connections.value
            );
            server.fail(&export_connections.place, what, "1, or as many clients as may write");
        }
        let metrics = server.optional::<SocketAddr>("metrics");
        let log = server.or("log", "info".to_owned());
        let json =
            server.choice("log_format", &[("text", false), ("json", true)]).is_some_and(|j| *j);
        if let Some(tcp) = exports_tcp.as_ref().filter(|tcp| !tcp.ip().is_loopback()) {
            let what = "`exports_tcp` is not a loopback address, and NBD has no passwords";
            server.fail(&tcp.place, what, "\"127.0.0.1:10809\", and a tunnel to elsewhere");
        }
        let data_dir = data_dir?.value;
        let control = control.map_or_else(|| data_dir.join("control.sock"), |c| c.value);
        let exports_dir = exports_dir.map_or_else(|| data_dir.join("exports"), |e| e.value);
        let views_dir = views_dir.map_or_else(|| data_dir.join("views"), |v| v.value);
        let snapshots_dir = snapshots_dir.map_or_else(|| data_dir.join("snapshots"), |s| s.value);
        let place = server.place();
        check_socket(server, &place, &control);
        // The longest name that can be put below it.
        check_socket(server, &place, &exports_dir.join("group/member.disk.sock"));
        Some((
            name?.value.to_string(),
            listen.value,
            data_dir,
            control,
            exports_dir,
            views_dir,
            snapshots_dir,
            export_connections.value as usize,
            exports_tcp.map(|tcp| tcp.value),
            metrics.map(|m| m.value),
            log.value,
            json,
        ))
    });
    let options = root.optional_table("journal", read_journal).unwrap_or_default();
    let default = Retention { window_ms: WINDOW_MS, ..Retention::default() };
    let default = Retention { size_max_bytes: SIZE_MAX_BYTES, ..default };
    let retention = root.optional_table("retention", |r| read_retention(r, default, &options));
    let retention = retention.unwrap_or(default);
    let options = GroupOptions { retention, ..options };
    let (input, clock_bound_ms, groups_per_host) = root
        .optional_table("limits", |limits| {
            let input = limits.or("input", Size::mib(64));
            let clock = limits.or("clock", Duration::from_millis(bounds::CLOCK_BOUND_MS));
            let groups = limits.or("groups_per_host", GROUPS_PER_HOST);
            let most = Duration::from_millis(bounds::CLOCK_BOUND_OF_BACKUPS_MS);
            if clock.value < Duration::from_secs(1) {
                let what = "`clock` is less than clocks that are set by NTP may differ";
                limits.fail(&clock.place, what, "\"1m\", at least \"1s\"");
            } else if clock.value > most {
                let what = "`clock` is more than the other hosts of a group take from a backup";
                limits.fail(&clock.place, what, "\"1m\", at most \"2m\"");
            }
            if input.bytes < 40 << 20 {
                let what = "`input` is less than the largest record and some room";
                limits.fail(&input.place, what, "\"40MiB\" or more");
            }
            let clock_ms = u64::try_from(clock.value.as_millis()).unwrap_or(u64::MAX);
            Some((input.bytes, clock_ms, groups.value))
        })
        .unwrap_or((Size::mib(64).bytes, bounds::CLOCK_BOUND_MS, GROUPS_PER_HOST));
    let options = GroupOptions { clock_bound_ms, ..options };
    let groups = root.tables("group", |group| {
        let name = group.required::<Name>("name", "name = \"shop\"");
        let hosts = group.required::<Vec<Name>>("hosts", "hosts = [\"host-a\"]");
        let members = group.optional::<Vec<String>>("members");
        let of_group =
            group.optional_table("retention", |r| read_retention(r, retention, &options));
        let compress_after = group.optional::<Duration>("compress_after").map(|after| after.value);
        let hosts = hosts?.value.iter().map(ToString::to_string).collect::<Vec<_>>();
        let members =
            members.map(|listed| read_members(group, &listed, &hosts)).unwrap_or_default();
        let of = GroupSection { hosts, members, retention: of_group, compress_after };
        Some((name?.value.to_string(), of))
    });
    let data_dir = server.as_ref().map(|server| server.2.as_path());
    let stores = root.tables("store", |section| store::read(section, data_dir));
    let (
        name,
        listen,
        data_dir,
        control,
        exports_dir,
        views_dir,
        snapshots_dir,
        export_connections,
        exports_tcp,
        metrics,
        log,
        log_json,
    ) = server?;
    Some(Config {
        name,
        listen,
        security: security?,
        data_dir,
        control,
        exports_dir,
        views_dir,
        snapshots_dir,
        export_connections,
        exports_tcp,
        metrics,
        log,
        log_json,
        boot_file: PathBuf::new(),
        input_max_bytes: input,
        groups_per_host: groups_per_host as usize,
        options,
        groups: groups.into_iter().collect(),
        stores: stores.into_iter().collect(),
    })
}

/// `MEMBER=HOST` each.
fn read_members(
    section: &Section<'_>,
    listed: &Located<Vec<String>>,
    hosts: &[String],
) -> BTreeMap<String, String> {
    let mut members = BTreeMap::new();
    for line in &listed.value {
        let pair = line.split_once('=').filter(|(member, _)| Name::new(member).is_ok());
        match pair.filter(|(_, host)| hosts.iter().any(|listed| listed == host)) {
            Some((member, host)) => drop(members.insert(member.to_owned(), host.to_owned())),
            None => {
                let what = format!("`members` has \"{line}\"");
                section.fail(
                    &listed.place,
                    what,
                    "members = [\"db=host-a\"], with hosts of `hosts`",
                );
            }
        }
    }
    members
}

fn check_socket(section: &Section<'_>, place: &tidelock_config::Place, path: &Path) {
    if path.as_os_str().len() > SOCKET_PATH_MAX_BYTES {
        let what = format!("the path of the socket {} is too long", path.display());
        section.fail(place, what, format!("at most {SOCKET_PATH_MAX_BYTES} bytes"));
    }
}

fn read_security(root: &mut Section<'_>) -> Option<Security> {
    let has_tls = root.has("tls");
    let tls = root.optional_table("tls", |tls| {
        let ca = tls.required::<PathBuf>("ca", "ca = \"/etc/tidelock/ca.pem\"");
        let certificate =
            tls.required::<PathBuf>("certificate", "certificate = \"/etc/tidelock/backup.pem\"");
        let key = tls.required::<PathBuf>("key", "key = \"/etc/tidelock/backup.key\"");
        Some(tidelock_tls::Files {
            ca: ca?.value,
            certificate: certificate?.value,
            key: key?.value,
        })
    });
    let plaintext = root.or("plaintext", false);
    match (has_tls, plaintext.value) {
        (true, false) => tls.map(Security::Tls),
        (false, true) => Some(Security::Plaintext),
        (true, true) => {
            let what = "plaintext and [tls] at once: one of them is not meant";
            root.fail(&plaintext.place, what, "remove this line, or the section [tls]");
            None
        }
        (false, false) => {
            let what = "the link would be neither encrypted nor authenticated";
            let instead = "[tls] with ca, certificate and key (`tidelock pki` makes them), or \
                           plaintext = true at the top for a link for tests";
            root.fail(&root.place(), what, instead);
            None
        }
    }
}

fn read_journal(section: &mut Section<'_>) -> Option<GroupOptions> {
    let default = GroupOptions::default();
    let segment = section.or("segment", Size { bytes: default.journal.segment_bytes });
    let unfolded = section.or("unfolded_max", Size { bytes: default.unfolded_max_bytes });
    let fold_min = section.or("fold_min", Size { bytes: default.fold_min_bytes });
    let compress_after = section.or("compress_after", Duration::ZERO);
    if !(1 << 20..=1 << 32).contains(&segment.bytes) {
        section.fail(&segment.place, "`segment` is out of bounds", "\"1MiB\" to \"4GiB\"");
    }
    let fold_rate = section.optional::<Size>("fold_rate");
    if let Some(rate) = fold_rate.as_ref().filter(|rate| rate.bytes < 1 << 20) {
        let what = "`fold_rate` is so small that folding would not keep up";
        section.fail(&rate.place, what, "\"1MiB\" or more (each second), or leave it out");
    }
    if unfolded.bytes < 4 * segment.bytes.max(fold_min.bytes) {
        let what = "`unfolded_max` is less than four times `segment` or `fold_min`";
        section.fail(&unfolded.place, what, "\"8GiB\"");
    }
    Some(GroupOptions {
        journal: journal::Options { segment_bytes: segment.bytes },
        unfolded_max_bytes: unfolded.bytes,
        fold_min_bytes: fold_min.bytes,
        compress: compress(compress_after.value),
        fold_rate_bytes_s: fold_rate.map(|rate| rate.bytes),
        ..default
    })
}

/// What is compressed; of `"0s"` nothing is.
fn compress(after: Duration) -> Option<Compress> {
    let after_ms = u64::try_from(after.as_millis()).unwrap_or(u64::MAX);
    (!after.is_zero()).then(|| Compress { after_ms, ..Compress::default() })
}

fn read_retention(
    section: &mut Section<'_>,
    default: Retention,
    options: &GroupOptions,
) -> Option<Retention> {
    let window = section.or("window", Duration::from_millis(default.window_ms));
    let size_max = section.or("size_max", Size { bytes: default.size_max_bytes });
    if size_max.bytes < 4 * options.journal.segment_bytes.max(options.fold_min_bytes) {
        let what = "`size_max` is less than four times `journal.segment` or `journal.fold_min`";
        section.fail(&size_max.place, what, "\"2GiB\"");
    }
    let at_size_max = section
        .choice("at_size_max", &[("shorten", AtSizeMax::Shorten), ("stop", AtSizeMax::Stop)])
        .map_or(default.at_size_max, |chosen| *chosen);
    Some(Retention {
        window_ms: u64::try_from(window.as_millis()).unwrap_or(u64::MAX),
        size_max_bytes: size_max.bytes,
        at_size_max,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_examples_are_right() {
        for file in ["backup.toml", "backup-all-keys.toml"] {
            let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("examples").join(file);
            let text = std::fs::read_to_string(path).unwrap();
            Config::parse(file, &text).unwrap_or_else(|e| panic!("{e}"));
        }
    }

    /// The documented keys are those of the example with all keys, which parses.
    #[test]
    fn the_documented_keys_are_the_keys() {
        let read = |path: &str| {
            let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(path);
            std::fs::read_to_string(path).unwrap()
        };
        let (docs, example) =
            (read("../docs/manual/backup-configuration.md"), read("examples/backup-all-keys.toml"));
        let rows = docs.lines().filter(|l| l.starts_with("| `"));
        let cells: String = rows.filter_map(|l| l.split('|').nth(1)).collect();
        let (mut section, mut keys) = (String::new(), 0);
        for line in example.lines() {
            if let Some(title) = line.strip_prefix('[') {
                section = title.trim_matches(['[', ']']).to_owned();
            } else if let Some((key, _)) = line.split_once(" = ") {
                let key = key.trim_start_matches("# ");
                let name = match key {
                    "plaintext" => key.to_owned(),
                    key => format!("{section}.{key}"),
                };
                assert!(cells.contains(&format!("`{name}`")), "{name} is not documented");
                keys += 1;
            }
        }
        // All but `plaintext` have a section.
        let documented = cells.split('`').skip(1).step_by(2).filter(|key| key.contains('.'));
        assert_eq!(documented.count() + 1, keys, "documented, but not in the example");
    }

    #[test]
    fn standbys_without_a_port_or_a_time_are_refused() {
        let text = "plaintext = true\n[server]\nname = \"b\"\ndata_dir = \"/d\"\n[[store]]\nname = \"orders\"\n\
                    hosts = [\"a\"]\n[store.standbys]\n";
        let config = Config::parse("b.toml", text).unwrap();
        let (_, store) = config.stores().next().unwrap();
        let standbys = store.standbys.as_ref().unwrap();
        assert_eq!(standbys.dir, Path::new("/d/standbys/orders"));
        let found = Config::parse("b.toml", &format!("{text}port = 0\ncopy_every = \"0s\"\n"));
        let found = found.unwrap_err().to_string();
        assert!(
            found.contains("`port` is 0") && found.contains("`copy_every` is no time"),
            "{found}"
        );
    }

    #[test]
    fn everything_wrong_is_told_at_once() {
        let text = "[server]\nname = \"b\"\ndata_dir = \"/d\"\nexports_tcp = \"1.2.3.4:1\"\n\
                    [journal]\nsegment = \"1KiB\"\nunfoldd_max = \"1GiB\"\n[limits]\nclock = \"3m\"\n";
        let found = Config::parse("b.toml", text).unwrap_err().to_string();
        for part in
            ["loopback", "out of bounds", "unfoldd_max", "neither encrypted", "at most \"2m\""]
        {
            assert!(found.contains(part), "{part} in {found}");
        }
    }

    #[test]
    fn a_group_without_a_list_belongs_to_the_host_that_creates_it() {
        let text = "plaintext = true\n[server]\nname = \"b\"\ndata_dir = \"/d\"\n\
                    [[group]]\nname = \"g\"\nhosts = [\"x\", \"y\"]\n";
        let config = Config::parse("b.toml", text).unwrap();
        assert_eq!(config.options("g").hosts, Some(vec!["x".into(), "y".into()]));
        assert_eq!(config.options("other").hosts, None);
    }

    #[test]
    fn members_are_given_to_hosts_of_the_list() {
        let text = |members: &str| {
            format!(
                "plaintext = true\n[server]\nname = \"b\"\ndata_dir = \"/d\"\n\
                 [[group]]\nname = \"g\"\nhosts = [\"x\", \"y\"]\nmembers = {members}\n"
            )
        };
        let config = Config::parse("b.toml", &text("[\"db=x\", \"web=y\"]")).unwrap();
        let members = config.options("g").members;
        assert_eq!((&*members["db"], &*members["web"], members.len()), ("x", "y", 2));
        assert!(config.options("other").members.is_empty());
        for wrong in ["db", "db=z", "=x", "d b=x"] {
            let found = Config::parse("b.toml", &text(&format!("[\"{wrong}\"]"))).unwrap_err();
            assert!(found.to_string().contains(wrong), "{wrong}: {found}");
        }
    }

    #[test]
    fn a_group_keeps_its_past_as_the_server_does_unless_it_says_otherwise() {
        let text = "plaintext = true\n[server]\nname = \"b\"\ndata_dir = \"/d\"\n\
                    [retention]\nwindow = \"2h\"\n\
                    [[group]]\nname = \"g\"\nhosts = [\"x\"]\n\
                    [group.retention]\nwindow = \"7d\"\n";
        let config = Config::parse("b.toml", text).unwrap();
        let of = |group: &str| config.options(group).retention;
        assert_eq!(of("g").window_ms, 7 * 86_400_000);
        assert_eq!(of("other").window_ms, 7_200_000);
        assert_eq!(of("other").size_max_bytes, SIZE_MAX_BYTES);
        assert_eq!(of("g").at_size_max, AtSizeMax::Stop);
        let shortens = text.replace("window = \"2h\"", "at_size_max = \"shorten\"");
        let config = Config::parse("b.toml", &shortens).unwrap();
        assert_eq!(config.options("other").retention.at_size_max, AtSizeMax::Shorten);
        assert_eq!(config.options("g").retention.at_size_max, AtSizeMax::Shorten, "as the server");
        let text = text.replace("hosts = [\"x\"]", "hosts = [\"x\"]\ncompress_after = \"0s\"");
        let text = format!("{text}[journal]\ncompress_after = \"90m\"\n");
        let config = Config::parse("b.toml", &text).unwrap();
        assert_eq!(config.options("g").compress, None);
        assert_eq!(config.options("other").compress.unwrap().after_ms, 5_400_000);
        let small = text.replace("window = \"2h\"", "size_max = \"1MiB\"");
        assert!(Config::parse("b.toml", &small).unwrap_err().to_string().contains("size_max"));
    }
}
