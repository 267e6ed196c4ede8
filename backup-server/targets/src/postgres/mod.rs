//! PostgreSQL on this host: a stock standby of a store's shard, which the backup server runs as a child under an
//! unprivileged user, and throw-away servers that show a shard as it was at a cut. A server is a process of its own
//! session: it outlives the backup server, and the next one finds it again.
//!
//! ```text
//!            bootstrap | copy              start           promote
//!  (nothing) ────────────────► Stopped ◄──────────► Runs ──────────► Runs as a primary
//!                                 └── remove ─► (nothing)
//! ```
//!
//! | module | what it is for |
//! |---|---|
//! | `check` | can it run here? |
//! | `bootstrap` | the copy of a primary, or of a standby, by `pg_basebackup`; copies of copies |
//! | `data` | content of a data directory: does it fit? |
//! | `control` | `pg_controldata` |
//! | `command` | settings and the command line |
//! | `server` | start, status, promotion, stop |
//! | `programs` | PostgreSQL's programs, run to their end |
//!
//! | in the directory | whose | |
//! |---|---|---|
//! | `own/data`, `own/data.new` | the user's | the data; a copy that is not whole |
//! | `own/run` | the user's | the socket for clients |
//! | `conf` | the backup server's | access rules, and an empty configuration |
//! | `log`, `copying` | the backup server's | messages of the server; who copies |
//!
//! Invariants:
//! - PostgreSQL never runs as root, has no capability, and can gain none. Files in the
//!   user's directory are read and written as the user alone: they came from another site.
//! - Settings that matter stand on the command line, and win over whatever the copy has brought.
//! - A data directory is used only if it is whole, of the right version and system, and in the role that is expected.
//! - A copy has no log of its own: all of it comes from the backup server, which gives none beyond apply-to.

mod bootstrap;
mod check;
mod command;
mod control;
mod data;
mod programs;
mod server;
#[cfg(test)]
mod tests;

pub use bootstrap::{Copied, Copying, Source};
pub use data::Role;
pub use server::{Promotion, State, Stopped};

use crate::jail::Jail;
use crate::process::Process;
use serde::{Deserialize, Serialize};
use std::io;
use std::path::{Path, PathBuf};
use thiserror::Error;
use tidelock_wal::Lsn;

/// Settings of this site.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Site {
    /// Directory of PostgreSQL's programs: `/usr/lib/postgresql/15/bin` on Debian.
    pub bin_dir: PathBuf,
    /// The user that PostgreSQL runs as, where the backup server may choose.
    pub user: String,
    /// The superuser of the database, for questions about its state.
    pub superuser: String,
}

/// The cluster that data must be of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Expected {
    /// Major version of PostgreSQL.
    pub major: u32,
    /// System identifier.
    pub system: u64,
}

/// Settings of one server.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Settings {
    /// Name of the server, in its own log and in the backup server's.
    pub name: String,
    /// Directory of the socket at which the backup server gives the log. `None`: a server that was promoted.
    pub upstream: Option<PathBuf>,
    /// Cut of a view: replay stops there for good.
    #[serde(with = "cut_text")]
    pub cut: Option<Lsn>,
    /// Addresses for clients besides the socket.
    pub listen_addresses: String,
    /// Port, of the socket's name as well.
    pub port: u16,
    /// Lines of `pg_hba.conf` behind the one for the socket.
    pub access: Vec<String>,
    /// More settings. They are the last ones, so they win.
    pub options: Vec<(String, String)>,
}

/// A server of one shard, as it is found again. The caller keeps it on record: before `start`, and after it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Server {
    dir: PathBuf,
    site: Site,
    jail: Jail,
    expected: Expected,
    /// Settings, which the next start uses.
    pub settings: Settings,
    process: Option<Process>,
}

/// Reasons for which something cannot be done with PostgreSQL. Each says what to do, where it is not plain.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum PostgresError {
    /// A program is missing.
    #[error(
        "{program} is not there: is PostgreSQL {major} installed (Debian: postgresql-{major})?"
    )]
    NoProgram {
        /// Path of the program.
        program: PathBuf,
        /// The version that is needed.
        major: u32,
    },
    /// The programs are of another version.
    #[error(
        "{program} is of PostgreSQL {found}, and the shard's primary is of {needed}: a standby must be of the same"
    )]
    OtherProgram {
        /// Path of the program.
        program: PathBuf,
        /// Version of the program.
        found: String,
        /// Major version that is needed.
        needed: u32,
    },
    /// The user is root.
    #[error("PostgreSQL must not run as root, and this process may not change users")]
    Root,
    /// The user cannot be had.
    #[error("{0}")]
    User(io::Error),
    /// The user cannot get there.
    #[error(
        "user {user} cannot write below {dir}: let it pass through the directories above (chmod o+x)"
    )]
    Unreachable {
        /// The user.
        user: String,
        /// The directory.
        dir: PathBuf,
    },
    /// The name of a socket is too long.
    #[error(
        "the path of the socket, {path}, has more than {max} bytes: choose a shorter data directory"
    )]
    LongPath {
        /// The path.
        path: PathBuf,
        /// Most bytes that the kernel takes.
        max: usize,
    },
    /// Too little room.
    #[error("{dir} has room for {free} bytes, and the copy has {needed}")]
    NoRoom {
        /// The directory.
        dir: PathBuf,
        /// Free bytes.
        free: u64,
        /// Bytes that are needed.
        needed: u64,
    },
    /// No data.
    #[error("there is no data in {dir}: a copy must be made first")]
    NoData {
        /// The directory.
        dir: PathBuf,
    },
    /// The data is of another version.
    #[error(
        "the data in {dir} is of PostgreSQL {found}, and {needed} is expected: remove it, and copy it anew"
    )]
    OtherVersion {
        /// The directory.
        dir: PathBuf,
        /// Content of `PG_VERSION`.
        found: String,
        /// Major version that is expected.
        needed: u32,
    },
    /// The data is of another cluster.
    #[error(
        "the data in {dir} is of system {found}, and the shard is system {needed}: remove it, and copy it anew"
    )]
    OtherSystem {
        /// The directory.
        dir: PathBuf,
        /// System identifier of the data.
        found: u64,
        /// The expected one.
        needed: u64,
    },
    /// The data cannot be what it should be.
    #[error("the data in {dir} is damaged: {why}. Remove it, and copy it anew")]
    Damaged {
        /// The directory.
        dir: PathBuf,
        /// The fault.
        why: String,
    },
    /// The data is not that of a standby, or not that of a server that was promoted.
    #[error("the data in {dir} is that of a {found}, and a {needed} is expected")]
    OtherRole {
        /// The directory.
        dir: PathBuf,
        /// Role of the data.
        found: Role,
        /// The expected one.
        needed: Role,
    },
    /// Tablespaces lie outside of the data directory.
    #[error(
        "the cluster has tablespaces ({names}), whose files lie outside of its data directory: they are not supported"
    )]
    Tablespaces {
        /// Their numbers.
        names: String,
    },
    /// The base of a view is newer than its cut.
    #[error(
        "the copy is usable from {usable_from} on, which is after the cut, {cut}: an older copy is needed"
    )]
    TooNew {
        /// Position from which on the copy can be used.
        usable_from: Lsn,
        /// The cut.
        cut: Lsn,
    },
    /// The server runs.
    #[error("the server in {dir} runs")]
    Running {
        /// The directory.
        dir: PathBuf,
    },
    /// The server does not run.
    #[error("the server in {dir} does not run")]
    NotRunning {
        /// The directory.
        dir: PathBuf,
    },
    /// The server ended when it was started.
    #[error("PostgreSQL in {dir} does not start: {said}")]
    NotStarted {
        /// The directory.
        dir: PathBuf,
        /// End of its log.
        said: String,
    },
    /// The log has not come so far.
    #[error("the standby has not been given the log up to {wanted} in {seconds} s: {said}")]
    Behind {
        /// Position that was waited for.
        wanted: Lsn,
        /// Time that was waited.
        seconds: u64,
        /// Words of the server.
        said: String,
    },
    /// A program has failed.
    #[error("{program} has failed: {said}")]
    Failed {
        /// The program.
        program: String,
        /// Words of the program.
        said: String,
    },
    /// A program does not end.
    #[error("{program} has not ended after {seconds} s")]
    TooLong {
        /// The program.
        program: String,
        /// Time that it had.
        seconds: u64,
    },
    /// Files or processes cannot be used.
    #[error("cannot {what}: {source}")]
    Io {
        /// The attempt.
        what: String,
        /// The reason.
        source: io::Error,
    },
}

impl PostgresError {
    fn io(what: impl Into<String>) -> impl FnOnce(io::Error) -> Self {
        let what = what.into();
        move |source| Self::Io { what, source }
    }
}

/// A cut on record, as PostgreSQL writes it.
mod cut_text {
    use serde::{Deserialize, Deserializer, Serialize, Serializer, de::Error};
    use tidelock_wal::Lsn;

    pub fn serialize<S: Serializer>(cut: &Option<Lsn>, to: S) -> Result<S::Ok, S::Error> {
        cut.map(|cut| cut.to_string()).serialize(to)
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Option<Lsn>, D::Error> {
        let text = Option::<String>::deserialize(from)?;
        text.map(|text| text.parse().map_err(D::Error::custom)).transpose()
    }
}

type Result<T> = std::result::Result<T, PostgresError>;

impl Server {
    /// A server in a directory that is for it alone, and need not exist.
    ///
    /// # Errors
    /// The user is root, or there is none.
    pub async fn new(
        dir: PathBuf,
        site: Site,
        expected: Expected,
        settings: Settings,
    ) -> Result<Self> {
        let jail = Jail::of("PostgreSQL", &site.user, "the store's configuration").await;
        let jail = jail.map_err(PostgresError::User)?;
        if jail.user().is_none() && rustix::process::geteuid().is_root() {
            return Err(PostgresError::Root);
        }
        Ok(Self { dir, site, jail, expected, settings, process: None })
    }

    /// Number of the user and of its group, unless it is the backup server's own: the sockets that the server connects
    /// to must be open to it.
    #[must_use]
    pub fn user(&self) -> Option<(u32, u32)> {
        self.jail.user().map(|user| (user.uid, user.gid))
    }

    /// A server with the same settings in another directory, which does not run.
    #[must_use]
    pub fn beside(&self, dir: PathBuf) -> Self {
        Self { dir, process: None, ..self.clone() }
    }

    /// Its directory.
    #[must_use]
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// The superuser of the database.
    #[must_use]
    pub fn superuser(&self) -> &str {
        &self.site.superuser
    }

    /// Directory of the socket for clients.
    #[must_use]
    pub fn socket_dir(&self) -> PathBuf {
        self.dir.join("own/run")
    }

    /// The directory with the server's messages.
    #[must_use]
    pub fn log(&self) -> PathBuf {
        self.dir.join("log")
    }

    fn data(&self) -> PathBuf {
        self.dir.join("own/data")
    }

    fn new_data(&self) -> PathBuf {
        self.dir.join("own/data.new")
    }

    fn socket(&self) -> PathBuf {
        self.socket_dir().join(format!(".s.PGSQL.{}", self.settings.port))
    }

    fn program(&self, name: &str) -> PathBuf {
        self.site.bin_dir.join(name)
    }

    /// Makes the directories, with their owners.
    fn make_dirs(&self) -> Result<()> {
        use std::fs::{self, DirBuilder, Permissions};
        use std::os::unix::fs::{DirBuilderExt, PermissionsExt, lchown};
        let wrong = |path: &Path| PostgresError::io(format!("make {}", path.display()));
        let make = |path: &Path, mode: u32| match DirBuilder::new().mode(mode).create(path) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => Err(error),
            _ => Ok(()),
        };
        fs::create_dir_all(&self.dir).map_err(wrong(&self.dir))?;
        let (own, conf) = (self.dir.join("own"), self.dir.join("conf"));
        for path in [&self.dir, &conf] {
            make(path, 0o711).map_err(wrong(path))?;
            fs::set_permissions(path, Permissions::from_mode(0o711)).map_err(wrong(path))?;
        }
        make(&own, 0o700).map_err(wrong(&own))?;
        if let Some((uid, gid)) = self.user() {
            lchown(&own, Some(uid), Some(gid)).map_err(wrong(&own))?;
        }
        Ok(())
    }

    /// Removes the server's files. The server must have been stopped.
    ///
    /// # Errors
    /// The server runs, or files cannot be removed.
    pub async fn remove(&self) -> Result<()> {
        if self.hold().await?.is_some() {
            return Err(PostgresError::Running { dir: self.dir.clone() });
        }
        use std::fs::{remove_dir, remove_dir_all, remove_file};
        let path = |name: &str| self.dir.join(name);
        // Other people's files stay, and with them the directory.
        let removed = [
            remove_dir_all(path("own")),
            remove_dir_all(path("conf")),
            remove_file(path("log")),
            remove_file(path("log.old")),
            remove_file(path("copying")),
            remove_dir(&self.dir),
        ];
        for result in removed {
            match result {
                Err(error) if error.kind() != io::ErrorKind::NotFound => {
                    return Err(PostgresError::io(format!("remove {}", self.dir.display()))(error));
                }
                _ => {}
            }
        }
        Ok(())
    }
}
