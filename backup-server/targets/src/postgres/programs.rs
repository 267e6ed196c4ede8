//! PostgreSQL's programs, and the system's, run as the user to their end, in a bounded time and with a bounded output.

use super::{PostgresError, Result, Server};
use std::ffi::OsStr;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;
use tokio::io::AsyncReadExt;
use tokio::time::timeout;

/// Programs that only look end by then.
pub(super) const LOOKS_WITHIN: Duration = Duration::from_secs(30);
/// Most bytes of a program's output that are kept.
const OUTPUT_MAX_BYTES: u64 = 64 << 10;
/// Most bytes of a program's complaint that are told.
const SAID_MAX_BYTES: usize = 1000;

/// The end of what a program has said.
pub(super) fn end_of(text: &[u8]) -> String {
    let text = &text[text.len().saturating_sub(SAID_MAX_BYTES)..];
    String::from_utf8_lossy(text).trim().to_owned()
}

impl Server {
    /// A program as the user, with an environment of its own.
    pub(super) fn command(&self, program: impl AsRef<OsStr>) -> Command {
        let mut command = self.jail.command(program);
        command.env_clear().current_dir("/");
        let path = std::env::var_os("PATH").unwrap_or_else(|| "/usr/bin:/bin".into());
        command.env("PATH", path).env("LC_ALL", "C").env("TZ", "UTC");
        command
    }

    /// Runs a program to its end, and returns its output. A failed exit status is an error with its complaint.
    pub(super) async fn run(&self, command: Command, within: Duration) -> Result<String> {
        let program = name_of(&command);
        let wrong = |error| PostgresError::io(format!("run {program}"))(error);
        let mut command = tokio::process::Command::from(command);
        command.stdout(Stdio::piped()).stderr(Stdio::piped()).kill_on_drop(true);
        let mut child = command.spawn().map_err(wrong)?;
        let (stdout, stderr) = (child.stdout.take(), child.stderr.take());
        let (mut output, mut said) = (Vec::new(), Vec::new());
        let ends = async {
            tokio::try_join!(read_all(&mut output, stdout), read_all(&mut said, stderr))?;
            child.wait().await
        };
        let ended = timeout(within, ends).await;
        let status = match ended {
            Ok(status) => status.map_err(wrong)?,
            Err(_) => {
                return Err(PostgresError::TooLong { program, seconds: within.as_secs() });
            }
        };
        if !status.success() {
            let said = if said.is_empty() { format!("{status}") } else { end_of(&said) };
            return Err(PostgresError::Failed { program, said });
        }
        Ok(String::from_utf8_lossy(&output).into_owned())
    }

    /// Runs a program of the system on some files.
    pub(super) async fn run_on(&self, words: &[&str], files: &[&Path]) -> Result<String> {
        let mut command = self.command(words[0]);
        command.args(&words[1..]).args(files);
        self.run(command, LOOKS_WITHIN).await
    }
}

/// Name of the program that a command runs in the jail.
fn name_of(command: &Command) -> String {
    let program = command.get_args().skip_while(|word| *word != "--").nth(1);
    let program = program.map_or_else(Default::default, |word| word.to_string_lossy());
    program.rsplit('/').next().unwrap_or_default().to_owned()
}

/// Reads to the end, and keeps no more than is needed.
async fn read_all(
    kept: &mut Vec<u8>,
    from: Option<impl tokio::io::AsyncRead + Unpin>,
) -> std::io::Result<()> {
    let Some(from) = from else { return Ok(()) };
    let mut limited = from.take(OUTPUT_MAX_BYTES);
    limited.read_to_end(kept).await?;
    tokio::io::copy(&mut limited.into_inner(), &mut tokio::io::sink()).await.map(drop)
}
