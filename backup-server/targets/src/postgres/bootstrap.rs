//! Copies: of a running server by `pg_basebackup`, and of another copy on this host. A copy is made beside the data,
//! and takes its name when it is whole and durable. A copy that was interrupted is begun anew.

use super::data::Data;
use super::programs::end_of;
use super::{PostgresError, Result, Role, Server};
use crate::process::Process;
use rustix::fs::FlockOperation;
use serde::{Deserialize, Serialize};
use std::fs::{self, File};
use std::io::{self, Read, Seek, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;
use tidelock_wal::Lsn;
use tokio::io::AsyncReadExt;

/// Pause between attempts to have the lock of a copy whose process was ended.
const LOCKS_EACH: Duration = Duration::from_millis(20);
/// A process that was ended is gone by then.
const ENDS_WITHIN: Duration = Duration::from_secs(30);
/// A copy of files on this host ends by then.
const COPIES_WITHIN: Duration = Duration::from_secs(24 * 3600);

/// Longest line of `pg_basebackup` that is read as one, and most of its complaints that are kept.
const LINE_MAX_BYTES: usize = 4 << 10;

/// A running server to be copied.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Source {
    /// Way to the server, without `dbname` or `replication`.
    pub conninfo: String,
    /// Password, if the server asks for one.
    pub password: Option<String>,
    /// The source makes a checkpoint at once, and not over minutes.
    pub fast_checkpoint: bool,
    /// Most KiB in a second.
    pub rate_max_kib: Option<u32>,
}

/// Progress of a copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Copying {
    /// KiB that have come.
    pub done_kib: u64,
    /// KiB that there are, as the source has guessed.
    pub all_kib: u64,
}

/// A whole copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Copied {
    /// Position that replay must reach before the copy serves or can be promoted.
    pub usable_from: Lsn,
    /// Begin of the segment of the log from which on the copy needs the log: the journal must keep it.
    pub needs_from: Lsn,
    /// Timeline of the source.
    pub timeline: u32,
}

impl Server {
    /// Copies a running server: the primary, or a standby of this host, to keep as the base of views. What is there
    /// already and fits is left. The copy has no log: the journal must have it from the beginning of the segment on in
    /// which the copy was begun.
    ///
    /// # Errors
    /// The copy failed, or is not what is expected. Nothing of it counts then.
    pub async fn bootstrap(
        &self,
        source: &Source,
        progress: impl Fn(Copying) + Send + Sync,
    ) -> Result<Copied> {
        let Some(lock) = self.begin_copy().await? else { return self.whole().await };
        let mut command = self.command(self.program("pg_basebackup"));
        command.arg("-D").arg(self.new_data()).arg("-d").arg(&source.conninfo);
        command.args(["-X", "none", "-F", "plain", "-P", "-w", "-l", "tidelock"]);
        command.args(["-c", if source.fast_checkpoint { "fast" } else { "spread" }]);
        if let Some(rate) = source.rate_max_kib {
            command.arg(format!("--max-rate={rate}k"));
        }
        if let Some(password) = &source.password {
            command.env("PGPASSWORD", password);
        }
        let wrong = PostgresError::io("run pg_basebackup");
        let stdin = lock.try_clone().map_err(PostgresError::io("copy a descriptor"))?;
        // The process holds the lock as well: it may outlive this one.
        command.stdin(stdin).stdout(Stdio::null()).stderr(Stdio::piped());
        let mut child = tokio::process::Command::from(command);
        let mut child = child.kill_on_drop(true).spawn().map_err(wrong)?;
        self.note_copy(&lock, child.id())?;
        let mut said = Vec::new();
        if let Some(mut stderr) = child.stderr.take() {
            let (mut part, mut line) = ([0; 4096], Vec::new());
            while let Ok(count @ 1..) = stderr.read(&mut part).await {
                for &byte in &part[..count] {
                    if !matches!(byte, b'\n' | b'\r') {
                        line.push(byte);
                    } else if let Some(copying) = copying(&line) {
                        progress(copying);
                        line.clear();
                    }
                    if byte == b'\n' || line.len() >= LINE_MAX_BYTES {
                        said.append(&mut line);
                        said.push(b' ');
                        let surplus = said.len().saturating_sub(LINE_MAX_BYTES);
                        said.drain(..surplus);
                    }
                }
            }
            said.append(&mut line);
        }
        let status = child.wait().await.map_err(PostgresError::io("wait for pg_basebackup"))?;
        if !status.success() {
            let program = "pg_basebackup".to_owned();
            return Err(PostgresError::Failed { program, said: end_of(&said) });
        }
        self.end_copy().await
    }

    /// Copies data of this host in which no server runs, with shared blocks where the file system can. With a cut in
    /// the settings the copy must be usable there.
    ///
    /// # Errors
    /// The copy failed, or is not what is expected. Nothing of it counts then.
    pub async fn copy_of(&self, base: &Server) -> Result<Copied> {
        if base.hold().await?.is_some() {
            return Err(PostgresError::Running { dir: base.dir.clone() });
        }
        let found = base.inspect(&base.data()).await?;
        if found.role != Role::Standby {
            let (dir, found, needed) = (base.dir.clone(), found.role, Role::Standby);
            return Err(PostgresError::OtherRole { dir, found, needed });
        }
        if let Some(cut) = self.settings.cut.filter(|cut| *cut < found.usable_from) {
            return Err(PostgresError::TooNew { usable_from: found.usable_from, cut });
        }
        let Some(lock) = self.begin_copy().await? else { return self.whole().await };
        let mut command = self.command("cp");
        command.args(["-a", "--reflink=auto", "--"]).arg(base.data()).arg(self.new_data());
        let stdin = lock.try_clone().map_err(PostgresError::io("copy a descriptor"))?;
        command.stdin(stdin);
        self.run(command, COPIES_WITHIN).await?;
        self.end_copy().await
    }

    /// Locks the copy, and removes what an earlier one has left. `None`: there is data already.
    async fn begin_copy(&self) -> Result<Option<File>> {
        self.make_dirs()?;
        let path = self.dir.join("copying");
        let wrong = || PostgresError::io(format!("use {}", path.display()));
        let mut options = File::options();
        let lock = options.read(true).write(true).create(true).truncate(false).mode(0o600);
        let mut lock = lock.open(&path).map_err(wrong())?;
        let mut text = String::new();
        (&mut lock).take(4096).read_to_string(&mut text).map_err(wrong())?;
        let mut left = ENDS_WITHIN;
        loop {
            match rustix::fs::flock(&lock, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) => break,
                Err(rustix::io::Errno::WOULDBLOCK) if !left.is_zero() => {}
                Err(error) => return Err(wrong()(error.into())),
            }
            // An earlier run of the backup server has been killed, and its copy goes on.
            if let Ok(process) = serde_json::from_str::<Process>(&text)
                && let Some(held) = process.hold(&path).await.unwrap_or(None)
            {
                held.kill().map_err(PostgresError::io("end an earlier copy"))?;
            }
            tokio::time::sleep(LOCKS_EACH).await;
            left = left.saturating_sub(LOCKS_EACH);
        }
        if self.run_on(&["test", "-e"], &[&self.data()]).await.is_ok() {
            return Ok(None);
        }
        let mut remove = self.command("rm");
        remove.args(["-rf", "--"]).arg(self.new_data());
        self.run(remove, COPIES_WITHIN).await?;
        Ok(Some(lock))
    }

    /// Puts on record which process copies.
    fn note_copy(&self, mut lock: &File, pid: Option<u32>) -> Result<()> {
        let Some(pid) = pid else { return Ok(()) };
        let text = serde_json::to_vec(&Process::of(pid)).expect("plain data");
        let noted =
            lock.rewind().and_then(|()| lock.set_len(0)).and_then(|()| lock.write_all(&text));
        noted.map_err(PostgresError::io("note who copies"))
    }

    /// Looks at a copy, makes it a standby's, and gives it its name.
    async fn end_copy(&self) -> Result<Copied> {
        let (new, data) = (self.new_data(), self.data());
        let spaces = self.run_on(&["ls", "-A"], &[&new.join("pg_tblspc")]).await?;
        if !spaces.trim().is_empty() {
            let names = spaces.split_whitespace().take(10).collect::<Vec<_>>().join(", ");
            return Err(PostgresError::Tablespaces { names });
        }
        let signal = new.join("standby.signal");
        self.run_on(&["touch"], &[&signal]).await?;
        // Files of an earlier life of the data.
        let stale = [new.join("postmaster.pid"), new.join("recovery.signal")];
        self.run_on(&["rm", "-f"], &[&stale[0], &stale[1]]).await?;
        self.run_on(&["sync"], &[&signal, &new]).await?;
        let found = self.inspect(&new).await?;
        fs::rename(&new, &data)
            .and_then(|()| sync_dir(&self.dir.join("own")))
            .map_err(PostgresError::io(format!("rename {}", new.display())))?;
        Ok(copied(&found))
    }

    /// The copy that is there.
    ///
    /// # Errors
    /// No data is there, or it does not fit.
    pub async fn whole(&self) -> Result<Copied> {
        let found = self.inspect(&self.data()).await?;
        Ok(copied(&found))
    }

    /// Role of the data that is there.
    ///
    /// # Errors
    /// No data is there, or it does not fit.
    pub async fn role(&self) -> Result<Role> {
        Ok(self.inspect(&self.data()).await?.role)
    }
}

fn copied(found: &Data) -> Copied {
    Copied {
        usable_from: found.usable_from,
        needs_from: found.needs_from,
        timeline: found.control.timeline,
    }
}

fn sync_dir(dir: &Path) -> io::Result<()> {
    File::open(dir)?.sync_all()
}

/// A line of progress: ` 12345/67890 kB (18%), 0/1 tablespace`.
pub(super) fn copying(line: &[u8]) -> Option<Copying> {
    let line = str::from_utf8(line).ok()?;
    let (done, rest) = line.trim_start().split_once('/')?;
    let (all, rest) = rest.split_once(' ')?;
    rest.starts_with("kB (").then_some(())?;
    Some(Copying { done_kib: done.parse().ok()?, all_kib: all.parse().ok()? })
}
