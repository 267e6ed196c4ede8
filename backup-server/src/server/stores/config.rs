//! `[[store]]` of the configuration (`docs/manual/backup-configuration.md`).

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;
use tidelock_config::{Name, Section};
use tidelock_targets::postgres::Site;

/// Kept copies of each standby, unless another number is asked for.
const KEEP_COPIES: u32 = 2;
/// Time between two of them.
const COPY_EVERY: Duration = Duration::from_secs(86_400);
/// Port of the first shard's standby. Not PostgreSQL's own, which a server of this machine may have.
const PORT: u16 = 6432;

/// Settings of one store.
#[derive(Clone, Debug)]
pub(in crate::server) struct StoreSection {
    /// Hosts that may ship its shards.
    pub hosts: Vec<String>,
    /// False: every shard is applied as far as its own log is durable, for comparison.
    pub has_watermark: bool,
    /// `None`: no standbys are run.
    pub standbys: Option<StandbysSection>,
}

/// Settings of a store's standbys.
#[derive(Clone, Debug)]
pub(in crate::server) struct StandbysSection {
    /// Directory of all of them.
    pub dir: PathBuf,
    /// Directories of the backup server above it, through which PostgreSQL's user must pass.
    pub above: Vec<PathBuf>,
    /// Directory of PostgreSQL's programs; `None`: Debian's for the version.
    bin_dir: Option<PathBuf>,
    user: String,
    superuser: String,
    /// Role by which the primary is copied.
    pub primary_user: String,
    primary_password_file: Option<PathBuf>,
    /// Addresses for clients besides the socket.
    pub listen_addresses: String,
    /// Port of the first shard's standby; the others' follow.
    pub port: u16,
    /// Lines of `pg_hba.conf`.
    pub access: Vec<String>,
    /// Kept copies.
    pub keep_copies: usize,
    /// Time between two of them.
    pub copy_every: Duration,
}

impl StandbysSection {
    /// Settings of the site for a major version.
    pub fn site(&self, major: u32) -> Site {
        let of_debian = || PathBuf::from(format!("/usr/lib/postgresql/{major}/bin"));
        Site {
            bin_dir: self.bin_dir.clone().unwrap_or_else(of_debian),
            user: self.user.clone(),
            superuser: self.superuser.clone(),
        }
    }

    /// The password at the primary, read anew each time.
    pub fn password(&self) -> Result<Option<String>, String> {
        let Some(path) = &self.primary_password_file else { return Ok(None) };
        let text = fs::read_to_string(path).map_err(|error| {
            format!("`primary_password_file` {} cannot be read: {error}", path.display())
        })?;
        Ok(Some(text.trim_end_matches(['\n', '\r']).to_owned()))
    }
}

/// Reads a `[[store]]`.
pub(in crate::server) fn read(
    store: &mut Section<'_>,
    data_dir: Option<&Path>,
) -> Option<(String, StoreSection)> {
    let name = store.required::<Name>("name", "name = \"orders\"");
    let hosts = store.required::<Vec<Name>>("hosts", "hosts = [\"host-a\", \"host-b\"]");
    let has_watermark =
        store.choice("watermark", &[("on", true), ("off", false)]).is_none_or(|on| *on);
    let name = name.map(|name| name.value.to_string());
    let standbys = store.optional_table("standbys", |section| {
        let own = data_dir.zip(name.as_deref());
        read_standbys(section, own)
    });
    let hosts = hosts?.value.iter().map(ToString::to_string).collect();
    Some((name?, StoreSection { hosts, has_watermark, standbys }))
}

fn read_standbys(section: &mut Section<'_>, own: Option<(&Path, &str)>) -> Option<StandbysSection> {
    let (dir, above) = match (section.optional::<PathBuf>("dir"), own) {
        (Some(dir), _) => (dir.value, Vec::new()),
        (None, Some((data_dir, name))) => {
            let all = data_dir.join("standbys");
            (all.join(name), vec![data_dir.to_owned(), all])
        }
        (None, None) => return None,
    };
    let bin_dir = section.optional::<PathBuf>("bin_dir").map(|dir| dir.value);
    let text =
        |section: &mut Section<'_>, key, default: &str| section.or(key, default.to_owned()).value;
    let user = text(section, "user", "postgres");
    let superuser = text(section, "superuser", "postgres");
    let primary_user = text(section, "primary_user", "tidelock");
    let primary_password_file =
        section.optional::<PathBuf>("primary_password_file").map(|file| file.value);
    let listen_addresses = text(section, "listen_addresses", "");
    let port = section.or("port", PORT);
    if port.value == 0 {
        section.fail(&port.place, "`port` is 0", "port = 6432: the first shard's; others follow");
    }
    let access = section.or("access", Vec::<String>::new()).value;
    let keep_copies = section.or("keep_copies", KEEP_COPIES).value as usize;
    let copy_every = section.or("copy_every", COPY_EVERY);
    if copy_every.value.is_zero() {
        let what = "`copy_every` is no time";
        section.fail(&copy_every.place, what, "\"1d\", or keep_copies = 0 for no kept copies");
    }
    Some(StandbysSection {
        dir,
        above,
        bin_dir,
        user,
        superuser,
        primary_user,
        primary_password_file,
        listen_addresses,
        port: port.value,
        access,
        keep_copies,
        copy_every: copy_every.value,
    })
}
