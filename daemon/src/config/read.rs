//! The file's sections, outermost first.

use std::net::SocketAddr;
use std::path::PathBuf;

use tidelock_config::{Diagnostics, HostPort, Located, Name, Section};

use super::group::read_group;
use super::rules;
use super::store::{read_clock, read_store};
use super::{Backup, Config, Host, LogFormat, Security};

/// Reads and checks a configuration. `file` is a name for the diagnostics.
pub fn parse(file: &str, text: &str) -> Result<Config, Diagnostics> {
    tidelock_config::read(file, text, |root| {
        let host = root.table("host", read_host);
        // The default of a disk's socket depends on it; a wrong one has been noted already.
        let fallback = PathBuf::from(super::DEFAULT_RUNTIME_DIR);
        let runtime_dir = host.as_ref().map_or(fallback, |host| host.runtime_dir.clone());
        let backup = read_backup(root);
        let metrics = root.optional_table("metrics", |metrics| {
            metrics.required::<SocketAddr>("listen", "listen = \"127.0.0.1:9641\"")
        });
        let here = host.as_ref().map(|host| host.name.value.clone());
        let place =
            FileContext { runtime_dir: &runtime_dir, host: here, count: Counters::default() };
        let groups = root.tables("group", |group| read_group(group, &place));
        let clock = read_clock(root);
        let stores = root.tables("store", read_store);
        if !root.has("group") && !root.has("store") {
            let (what, instead) =
                ("missing section [[group]]", "[[group]] and its keys, or [[store]]");
            root.fail(&root.place(), what, instead);
        }
        rules::check(root, &groups);
        let metrics = metrics.map(|m| m.value);
        Some(Config { host: host?, backup: backup?, metrics, groups, clock, stores })
    })
}

/// What a group's section is read with.
#[derive(Debug)]
pub(super) struct FileContext<'a> {
    pub(super) runtime_dir: &'a std::path::Path,
    /// This host; `None`: its name is missing, which has been noted.
    pub(super) host: Option<Name>,
    pub(super) count: Counters,
}

/// What is counted over the whole file for defaults.
#[derive(Debug, Default)]
pub(super) struct Counters {
    pub(super) networks: std::cell::Cell<u16>,
}

fn read_host(host: &mut Section<'_>) -> Option<Host> {
    let name = host.required::<Name>("name", "name = \"host-a\" (as in its certificate)");
    let runtime_dir = host.or("runtime_dir", PathBuf::from(super::DEFAULT_RUNTIME_DIR));
    let state_dir = host.or("state_dir", PathBuf::from(super::DEFAULT_STATE_DIR));
    let log = host.or("log", "info".to_owned());
    if let Err(error) = tracing_subscriber::EnvFilter::try_new(&log.value) {
        let what = format!("`log` in [host]: \"{}\" is not a filter: {error}", log.value);
        host.fail(&log.place, what, "\"info\" or \"info,tidelock_daemon_core::link=debug\"");
    }
    let formats = [("text", LogFormat::Text), ("json", LogFormat::Json)];
    let log_format = host.choice("log_format", &formats).map_or(LogFormat::Text, |f| f.value);
    Some(Host {
        name: name?,
        runtime_dir: runtime_dir.value,
        state_dir: state_dir.value,
        log: log.value,
        log_format,
    })
}

fn read_backup(root: &mut Section<'_>) -> Option<Backup> {
    let has_tls = root.has("tls");
    let security = root.optional_table("tls", |tls| {
        let ca = tls.required::<PathBuf>("ca", "ca = \"/etc/tidelock/ca.pem\"");
        let certificate =
            tls.required::<PathBuf>("certificate", "certificate = \"/etc/tidelock/host.pem\"");
        let key = tls.required::<PathBuf>("key", "key = \"/etc/tidelock/host.key\"");
        let files =
            tidelock_tls::Files { ca: ca?.value, certificate: certificate?.value, key: key?.value };
        Some(Security::Tls { files, place: tls.place() })
    });
    root.table("backup", |backup| {
        let address =
            backup.required::<HostPort>("address", "address = \"backup.example.org:9640\"");
        let name = backup.optional::<String>("server_name");
        if let Some(Located { value, place }) = &name
            && let Err(error) = tidelock_tls::server_name(value)
        {
            backup.fail(
                place,
                format!("`server_name` in [backup]: {error}"),
                "a name without port",
            );
        }
        let plaintext = backup.or("plaintext", false);
        let security = match (has_tls, plaintext.value) {
            (true, false) => security,
            (false, true) => Some(Security::Plaintext),
            (true, true) => {
                let what = "plaintext and [tls] at once: one of them is not meant";
                backup.fail(&plaintext.place, what, "remove this line, or the section [tls]");
                None
            }
            (false, false) => {
                let what = "the link would be neither encrypted nor authenticated";
                let instead = "[tls] with ca, certificate and key (`tidelock pki` makes them), \
                               or plaintext = true in [backup] on a link for tests";
                backup.fail(&backup.place(), what, instead);
                None
            }
        };
        let address = address?.value;
        let server_name = name.map_or_else(|| address.host.clone(), |name| name.value);
        Some(Backup { address, server_name, security: security? })
    })
}
