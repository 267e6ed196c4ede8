//! Can a standby run here? Everything that can be known without a copy.

use super::programs::LOOKS_WITHIN;
use super::{PostgresError, Result, Server};

/// Programs that are needed.
const PROGRAMS: [&str; 4] = ["postgres", "pg_basebackup", "pg_controldata", "psql"];
/// Longest path of a Unix socket.
const SOCKET_PATH_MAX_BYTES: usize = 107;

impl Server {
    /// Every reason why the server cannot run here, or cannot be copied to here if that takes so many bytes. The
    /// directory is made.
    pub async fn check(&self, copy_bytes: u64) -> Vec<PostgresError> {
        let mut problems = Vec::new();
        problems.extend(self.check_programs().await.err());
        problems.extend(self.check_dir(copy_bytes).await.err());
        problems
    }

    async fn check_programs(&self) -> Result<()> {
        let major = self.expected.major;
        for name in PROGRAMS {
            let program = self.program(name);
            if !program.exists() {
                return Err(PostgresError::NoProgram { program, major });
            }
            let mut command = self.command(&program);
            command.arg("--version");
            let text = self.run(command, LOOKS_WITHIN).await?;
            if major_of(&text) != Some(major) {
                let found = text.trim().chars().take(100).collect();
                return Err(PostgresError::OtherProgram { program, found, needed: major });
            }
        }
        Ok(())
    }

    async fn check_dir(&self, copy_bytes: u64) -> Result<()> {
        let path = self.socket();
        if path.as_os_str().len() > SOCKET_PATH_MAX_BYTES {
            return Err(PostgresError::LongPath { path, max: SOCKET_PATH_MAX_BYTES });
        }
        self.make_dirs()?;
        let own = self.dir.join("own");
        if self.run_on(&["test", "-w"], &[&own]).await.is_err() {
            let user = self.jail.user().map_or("of this process", |user| &user.name).to_owned();
            return Err(PostgresError::Unreachable { user, dir: self.dir.clone() });
        }
        let room = rustix::fs::statvfs(&self.dir).map_err(std::io::Error::from);
        let room = room.map_err(PostgresError::io(format!("look at {}", self.dir.display())))?;
        let free = room.f_bavail.saturating_mul(room.f_frsize);
        if free < copy_bytes {
            return Err(PostgresError::NoRoom { dir: self.dir.clone(), free, needed: copy_bytes });
        }
        Ok(())
    }
}

/// Major version in what a program says of itself: `postgres (PostgreSQL) 15.18 (Debian 15.18-0+deb12u1)`.
pub(super) fn major_of(text: &str) -> Option<u32> {
    let (_, version) = text.split_once("(PostgreSQL) ")?;
    let digits = version.split(|c: char| !c.is_ascii_digit()).next()?;
    digits.parse().ok()
}
