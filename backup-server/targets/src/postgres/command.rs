//! Settings and the command line. The copy may have brought settings of its own, in `postgresql.auto.conf` as well, and
//! with them commands: what matters stands on the command line, and wins.

use super::control::Control;
use super::{PostgresError, Result, Server};
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

/// Port in the name of the socket at which the backup server gives the log.
const SOCKET_PORT: u16 = 5432;

/// Settings whose values on the primary mean nothing here, or harm.
const EMPTY: [&str; 18] = [
    "external_pid_file",
    "unix_socket_group",
    "primary_slot_name",
    "restore_command",
    "archive_cleanup_command",
    "recovery_end_command",
    "recovery_target",
    "recovery_target_name",
    "recovery_target_time",
    "recovery_target_xid",
    "archive_command",
    "synchronous_standby_names",
    "shared_preload_libraries",
    "session_preload_libraries",
    "local_preload_libraries",
    "ssl_passphrase_command",
    "temp_tablespaces",
    "default_tablespace",
];

const FIXED: [(&str, &str); 13] = [
    ("unix_socket_permissions", "0700"),
    ("hot_standby", "on"),
    ("recovery_target_timeline", "latest"),
    ("recovery_target_inclusive", "off"),
    ("recovery_target_action", "pause"),
    ("recovery_min_apply_delay", "0"),
    ("archive_mode", "off"),
    ("ssl", "off"),
    ("logging_collector", "off"),
    ("log_destination", "stderr"),
    ("log_checkpoints", "off"),
    ("wal_receiver_status_interval", "1s"),
    // The backup server may start again.
    ("wal_retrieve_retry_interval", "200ms"),
];

impl Server {
    /// Writes the files that are not the user's.
    pub(super) fn write_conf(&self) -> Result<()> {
        let mut access = String::from("local all,replication all trust\n");
        for line in &self.settings.access {
            access.push_str(line);
            access.push('\n');
        }
        for (name, text) in
            [("postgresql.conf", ""), ("pg_ident.conf", ""), ("pg_hba.conf", access.as_str())]
        {
            let path = self.dir.join("conf").join(name);
            let wrong = || PostgresError::io(format!("write {}", path.display()));
            fs::write(&path, text).map_err(wrong())?;
            fs::set_permissions(&path, fs::Permissions::from_mode(0o644)).map_err(wrong())?;
        }
        Ok(())
    }

    /// Arguments of `postgres`.
    pub(super) fn arguments(&self, control: &Control) -> Vec<String> {
        let Self { dir, settings, .. } = self;
        let conf = |name: &str| dir.join("conf").join(name).display().to_string();
        let mut all: Vec<(&str, String)> = vec![
            ("config_file", conf("postgresql.conf")),
            ("hba_file", conf("pg_hba.conf")),
            ("ident_file", conf("pg_ident.conf")),
            ("unix_socket_directories", quoted(&self.socket_dir().display().to_string())),
            ("listen_addresses", settings.listen_addresses.clone()),
            ("port", settings.port.to_string()),
            ("cluster_name", settings.name.clone()),
            ("wal_level", control.wal_level.clone()),
        ];
        all.extend(EMPTY.map(|name| (name, String::new())));
        if self.expected.major < 16 {
            all.push(("promote_trigger_file", String::new()));
        }
        all.extend(FIXED.map(|(name, value)| (name, value.to_owned())));
        all.extend(control.at_least.iter().map(|(name, value)| (*name, value.to_string())));
        let upstream = settings.upstream.as_deref().map(|dir| conninfo(dir, &settings.name));
        all.push(("primary_conninfo", upstream.unwrap_or_default()));
        all.push((
            "recovery_target_lsn",
            settings.cut.map_or_else(String::new, |cut| cut.to_string()),
        ));
        all.extend(settings.options.iter().map(|(name, value)| (name.as_str(), value.clone())));
        let mut arguments = vec!["-D".to_owned(), self.data().display().to_string()];
        for (name, value) in all {
            arguments.extend(["-c".to_owned(), format!("{name}={value}")]);
        }
        arguments
    }
}

/// The standby's way to the backup server.
pub(super) fn conninfo(dir: &Path, name: &str) -> String {
    let value = |text: &str| text.replace('\\', "\\\\").replace('\'', "\\'");
    format!(
        "host='{}' port={SOCKET_PORT} user=standby application_name='{}'",
        value(&dir.display().to_string()),
        value(name)
    )
}

/// An element of a list of names.
fn quoted(text: &str) -> String {
    format!("\"{}\"", text.replace('"', "\"\""))
}
