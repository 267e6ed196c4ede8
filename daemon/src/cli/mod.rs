//! The `tidelock` command: what an operator types.
//!
//! Exit codes: 0 done; 1 refused or failed, with the reason on standard error; 2 the command line
//! is wrong; 3 no daemon answers; 4 (`status --check` only) some group is not protected; 5 (`verify` only)
//! the sites differ, or could not be compared.

pub mod adopt;
pub mod bookmark;
pub mod confirm;
pub mod human;
pub mod mode;
pub mod paint;
pub mod pki;
pub mod remove_rules;
pub mod status_text;
pub mod switchover;
pub mod top;
pub mod unfence;
pub mod verify;

use crate::config;
use crate::control::{BookmarkWish, Client, ClientError, VerifyWish};
use crate::stores::StoreReport;
use clap::{Args, Parser, Subcommand};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, SystemTime};
use tidelock_protocol::message::Mode;

const EXIT_FAILED: u8 = 1;
const EXIT_NO_DAEMON: u8 = 3;
const EXIT_NOT_PROTECTED: u8 = 4;
const EXIT_NOT_EQUAL: u8 = 5;

const EXIT_CODES: &str = "Exit codes:
  0  done
  1  refused or failed; the reason is on standard error
  2  the command line is wrong
  3  no daemon answers on the socket
  4  `status --check`: some group is not protected
  5  `verify`: the sites differ, or could not be compared";

/// Look at and steer a Tidelock host daemon
#[derive(Debug, Parser)]
#[command(name = "tidelock", version, after_help = EXIT_CODES)]
pub struct Cli {
    /// What to do
    #[command(subcommand)]
    pub command: Command,
}

/// Where the daemon is.
#[derive(Debug, Args)]
pub struct Daemon {
    /// The daemon's control socket: control.sock in its runtime_dir
    #[arg(long, value_name = "PATH", default_value = "/run/tidelock/control.sock")]
    pub socket: PathBuf,
}

/// What to do.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Show how protected each group is, how far the backup is behind, and what is held
    #[command(after_help = EXIT_CODES)]
    Status {
        /// Where the daemon is
        #[command(flatten)]
        daemon: Daemon,
        /// Print the status as JSON; the fields are listed in docs/manual/commands.md
        #[arg(long)]
        json: bool,
        /// Exit with 4 unless every group is protected (or replicates in async mode, as configured)
        #[arg(long)]
        check: bool,
    },
    /// Watch the status live: lag, holds and rates as they change. q ends it
    Top {
        /// Where the daemon is
        #[command(flatten)]
        daemon: Daemon,
        /// Milliseconds between two looks
        #[arg(long, value_name = "MS", default_value_t = 500,
              value_parser = clap::value_parser!(u64).range(100..=60_000))]
        interval: u64,
    },
    /// Switch how a group's members on this host treat writes and packets, until the daemon's next start
    ///
    /// Each host of a group has a mode of its own: to switch a group that is spread over several hosts, run this on
    /// each of them.
    ///
    /// sync: each write of the guest waits for the backup.
    /// pipelined: writes complete locally, replies to clients wait for the backup.
    /// async: nothing waits; a disaster may undo what clients were told.
    Mode {
        /// Where the daemon is
        #[command(flatten)]
        daemon: Daemon,
        /// The group
        group: String,
        /// sync, pipelined or async
        mode: Mode,
        /// Do not ask before giving up the promise to clients
        #[arg(long)]
        yes: bool,
    },
    /// Compare the backup's disks with the local ones by digests, while guests write on
    ///
    /// Each extent is compared at one point of the stream of writes, so that what is found differs indeed. The
    /// daemon goes on with it if this command is ended; --stop ends it. The outcome is in `tidelock status`.
    #[command(after_help = EXIT_CODES)]
    Verify {
        /// Where the daemon is
        #[command(flatten)]
        daemon: Daemon,
        /// The group
        group: String,
        /// Only this member
        #[arg(long, value_name = "NAME")]
        member: Option<String>,
        /// Copy what differs from here to the backup
        #[arg(long)]
        repair: bool,
        /// End what runs instead
        #[arg(long)]
        stop: bool,
        /// Do not wait for the end
        #[arg(long)]
        no_wait: bool,
        /// Print the outcome as JSON
        #[arg(long)]
        json: bool,
    },
    /// Name this moment at the backup: the state with everything that was written before
    ///
    /// For a script around a deployment: when this returns, the bookmark is on stable storage at the backup and has
    /// all that any member of the group had written when it began, and nothing that is written from now on. While
    /// the backup is away it waits. There, `tidelock-backup` takes `bookmark:NAME` as a point in time.
    #[command(after_help = EXIT_CODES)]
    Bookmark {
        /// Where the daemon is
        #[command(flatten)]
        daemon: Daemon,
        /// The group
        group: String,
        /// Its name: letters, digits, `.`, `_` and `-`
        name: String,
        /// It goes by itself after so long, like 7d; it goes with its point in any case
        #[arg(long, value_name = "SPAN", value_parser = tidelock_config::duration_argument)]
        expires: Option<Duration>,
        /// Move a bookmark that has the name
        #[arg(long = "move")]
        moves: bool,
        /// Fail if it is not set within so long, like 30s
        #[arg(long, value_name = "SPAN", value_parser = tidelock_config::duration_argument)]
        timeout: Option<Duration>,
        /// Print it as JSON
        #[arg(long)]
        json: bool,
    },
    /// Hand a group to the backup site, as planned, with nothing lost
    ///
    /// The guests must be stopped: by you before this, or by --stop-command. Then no request is taken any more, the
    /// backup gets everything, this host's gate shuts for good, and its lease is given up, so that
    /// `tidelock-backup recover` at the backup site need not wait. If the backup does not get everything in time, it is
    /// refused, and the group goes on here as before.
    #[command(after_help = EXIT_CODES)]
    Switchover {
        /// Where the daemon is
        #[command(flatten)]
        daemon: Daemon,
        /// The group
        group: String,
        /// How
        #[command(flatten)]
        options: switchover::Options,
    },
    /// Bring the disks of a guest that runs elsewhere to this daemon, while it runs on
    ///
    /// For the way back: after `tidelock-backup recover` the guest writes to the backup site's exports. First, with the
    /// daemon stopped, --prepare: it makes blank disks of the right sizes. Then start the daemon, and give the command
    /// again: QEMU copies the disks while the guest runs, and moves the guest over. Until then nothing goes to the backup,
    /// clients are answered, and the group is `unprotected`; from then on it begins, by comparing.
    #[command(after_help = EXIT_CODES)]
    Adopt {
        /// Where the daemon is
        #[command(flatten)]
        daemon: Daemon,
        /// The group
        group: String,
        /// How
        #[command(flatten)]
        options: adopt::Options,
    },
    /// Take away the packet-filter rules that a daemon has left of a group whose guests are gone
    ///
    /// A daemon leaves its rules however it ends: nothing that its guest sends leaves. Given while the daemon runs, this
    /// tells the backup that a guest may answer clients from here; given again when the daemon has stopped, it removes the
    /// rules. After a recovery or a switchover the backup need not be told. Asks first, or takes --yes.
    #[command(after_help = EXIT_CODES)]
    RemoveRules {
        /// The daemon's configuration
        #[arg(short, long, value_name = "FILE", default_value = config::DEFAULT_PATH)]
        config: PathBuf,
        /// The group
        group: String,
        /// Do not ask
        #[arg(long)]
        yes: bool,
        /// Also if the backup does not know that a guest here may answer clients then
        #[arg(long)]
        force: bool,
    },
    /// Protect a group from this host again, although the backup had told it that the group was recovered there
    ///
    /// A host that was fenced stays so, whatever the backup says later: its data may be older then than what it said. For
    /// a backup whose data was reverted on purpose to a moment before the recovery, when nobody serves the group at the
    /// backup site any more. The daemon must be stopped. Asks first, or takes --yes.
    #[command(after_help = EXIT_CODES)]
    Unfence {
        /// The daemon's configuration
        #[arg(short, long, value_name = "FILE", default_value = config::DEFAULT_PATH)]
        config: PathBuf,
        /// The group
        group: String,
        /// Do not ask
        #[arg(long)]
        yes: bool,
        /// Print the outcome as JSON
        #[arg(long)]
        json: bool,
    },
    /// Stop the daemon cleanly, as SIGTERM does: what guests have written is sent first
    Stop {
        /// Where the daemon is
        #[command(flatten)]
        daemon: Daemon,
    },
    /// Make an authority and certificates for both sites
    #[command(subcommand)]
    Pki(pki::Pki),
    /// Work with configuration files
    #[command(subcommand)]
    Config(ConfigCommand),
}

/// `tidelock config`.
#[derive(Debug, Subcommand)]
pub enum ConfigCommand {
    /// Check a host's configuration: every mistake at once, each with its line and what to write
    Check {
        /// The file
        #[arg(default_value = config::DEFAULT_PATH)]
        file: PathBuf,
        /// Check only the file itself, not the disks, certificates and descriptions that it names
        #[arg(long)]
        file_only: bool,
    },
}

/// Runs the command line of this process.
#[must_use]
pub fn main() -> ExitCode {
    match run(Cli::parse()) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("tidelock: {}", human::chain(&error));
            let code = match error.downcast_ref::<ClientError>() {
                Some(ClientError::NotRunning { .. }) => EXIT_NO_DAEMON,
                _ => EXIT_FAILED,
            };
            ExitCode::from(code)
        }
    }
}

fn run(cli: Cli) -> anyhow::Result<ExitCode> {
    match cli.command {
        Command::Status { daemon, json, check } => {
            let mut client = Client::connect(&daemon.socket)?;
            let (status, stores) = (client.status()?, client.stores()?);
            if json {
                let mut all = serde_json::to_value(&status)?;
                all["stores"] = stores.iter().map(|store| store.status.clone()).collect();
                print(&(serde_json::to_string_pretty(&all)? + "\n"))?;
            } else {
                print(&status_text::render(&status, paint::Paint::for_stdout()))?;
                stores.iter().try_for_each(|store| print(&store.text))?;
            }
            let fine = !check || status.is_fine() && stores.iter().all(StoreReport::is_fine);
            return Ok(if fine { ExitCode::SUCCESS } else { EXIT_NOT_PROTECTED.into() });
        }
        Command::Top { daemon, interval } => {
            top::run(&daemon.socket, Duration::from_millis(interval))?;
        }
        Command::Mode { daemon, group, mode, yes } => {
            let mut client = Client::connect(&daemon.socket)?;
            print(&mode::run(&mut client, &group, mode, yes)?)?;
        }
        Command::Verify { daemon, group, member, repair, stop, no_wait, json } => {
            let wish = VerifyWish { member, repair, stop };
            verify::check(&wish, no_wait)?;
            let outcome = verify::run(&daemon.socket, &group, wish, no_wait, json)?;
            print(&outcome.text)?;
            return Ok(if outcome.is_good { ExitCode::SUCCESS } else { EXIT_NOT_EQUAL.into() });
        }
        Command::Bookmark { daemon, group, name, expires, moves, timeout, json } => {
            let expires_in_ms = expires.map(|span| span.as_millis() as u64);
            let wish = BookmarkWish { name, expires_in_ms, moves };
            print(&bookmark::run(&daemon.socket, &group, wish, timeout, json)?)?;
        }
        Command::Switchover { daemon, group, options } => {
            print(&switchover::run(&daemon.socket, &group, &options)?)?;
        }
        Command::Adopt { daemon, group, options } => {
            print(&adopt::run(&daemon.socket, &group, &options)?)?;
        }
        Command::RemoveRules { config, group, yes, force } => {
            print(&remove_rules::run(&config, &group, yes, force)?)?;
        }
        Command::Unfence { config, group, yes, json } => {
            print(&unfence::run(&config, &group, yes, json)?)?;
        }
        Command::Stop { daemon } => {
            Client::connect(&daemon.socket)?.stop()?;
            print("The daemon is stopping; it sends what guests have written first.\n")?;
        }
        Command::Pki(command) => print(&pki::run(&command, SystemTime::now())?)?,
        Command::Config(ConfigCommand::Check { file, file_only }) => {
            print(&check_config(&file, file_only)?)?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

fn check_config(file: &Path, file_only: bool) -> anyhow::Result<String> {
    let count = |found: &tidelock_config::Diagnostics| human::count(found.len() as u64, "mistake");
    let wrong = |found| anyhow::anyhow!("{}:\n{found}", count(&found));
    let config = config::load(file).map_err(|error| match error {
        config::ConfigError::Wrong(found) => wrong(found),
        other => other.into(),
    })?;
    if !file_only {
        config::check_machine(&config, SystemTime::now()).map_err(wrong)?;
    }
    let members = config.groups.iter().flat_map(|group| &group.members);
    let disks: usize = members.clone().map(|member| member.disks.len()).sum();
    let parts = [
        human::count(config.groups.len() as u64, "group"),
        human::count(members.count() as u64, "member"),
        human::count(disks as u64, "disk"),
    ];
    Ok(format!("{} is good: {}.\n", file.display(), parts.join(", ")))
}

/// Prints. A reader that has gone away (`| head`) is not an error.
fn print(text: &str) -> anyhow::Result<()> {
    use std::io::Write;
    let mut out = std::io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => Ok(()),
        result => Ok(result?),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn modes_are_words() {
        let parse = |mode| Cli::try_parse_from(["tidelock", "mode", "g", mode]);
        assert!(parse("async").is_ok());
        let error = parse("fast").unwrap_err().to_string();
        assert!(error.contains("use sync, pipelined or async"), "{error}");
    }

    #[test]
    fn a_certificate_is_for_one_role() {
        let parse = |args: &[&str]| {
            Cli::try_parse_from(["tidelock", "pki", "issue"].iter().chain(args)).is_ok()
        };
        assert!(parse(&["--host", "a"]));
        assert!(parse(&["--backup", "b", "--also", "c"]));
        assert!(!parse(&[]));
        assert!(!parse(&["--host", "a", "--backup", "b"]));
    }
}
