//! A server that runs: start, status, promotion, stop.

use super::programs::end_of;
use super::{PostgresError, Result, Role, Server};
use crate::process::{self, Held, Process};
use rustix::process::Signal;
use std::fs::{self, File};
use std::io::{Read, Seek, SeekFrom};
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;
use std::process::Stdio;
use std::time::Duration;
use tidelock_wal::Lsn;
use tokio::time::{Instant, sleep, timeout};

/// The server listens by then, or hangs. It does so before it replays anything.
const STARTS_WITHIN: Duration = Duration::from_secs(60);
/// The init process has taken note of a process that has ended by then.
const NUMBER_FREE_WITHIN: Duration = Duration::from_secs(10);
/// Pause between attempts to reach a server that starts.
const LOOKS_EACH: Duration = Duration::from_millis(20);
/// A server answers a question about its state by then.
const ANSWERS_WITHIN: Duration = Duration::from_secs(10);
/// A standby that was told to end has done so by then, with its clients disconnected.
const FAST_WITHIN: Duration = Duration::from_secs(60);
/// The same without a checkpoint.
const IMMEDIATE_WITHIN: Duration = Duration::from_secs(10);
/// Time that a promotion may take once the log is there.
const PROMOTES_WITHIN: Duration = Duration::from_secs(600);
/// A log of messages that is longer is put aside at the next start.
const LOG_MAX_BYTES: u64 = 16 << 20;

/// State of a server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum State {
    /// Stopped.
    Stopped,
    /// Running, and serving nobody yet: the log has not come to where the copy is usable.
    Recovering {
        /// Words of the server.
        said: String,
    },
    /// Following, and serving readers.
    Standby {
        /// End of the log that it has.
        received: Option<Lsn>,
        /// End of what readers see.
        replayed: Option<Lsn>,
        /// Replay stands: the server is at its cut, or the primary's settings have grown, for which it must be started
        /// again.
        is_paused: bool,
    },
    /// Promoted.
    Primary {
        /// Timeline that it writes.
        timeline: u32,
        /// End of what it has replayed of the old primary, if it was not started since.
        replayed: Option<Lsn>,
    },
    /// Running, and not to be asked.
    Unknown {
        /// The reason.
        said: String,
    },
}

/// A promotion that has been done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Promotion {
    /// End of the log of the old primary that it has, if the server was not started since its promotion.
    pub replayed: Option<Lsn>,
    /// Timeline that it writes.
    pub timeline: u32,
    /// Milliseconds until the log was there.
    pub waited_ms: u64,
    /// Milliseconds from then until it took writes.
    pub promoted_ms: u64,
}

/// The way in which a server was stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stopped {
    /// The server did not run.
    Before,
    /// In order.
    Fast,
    /// Without a checkpoint: it has more to do at its next start.
    Immediate,
    /// Killed by force.
    Killed,
}

const STATUS: &str = "SELECT pg_is_in_recovery(), pg_last_wal_receive_lsn(), pg_last_wal_replay_lsn(), \
    CASE WHEN pg_is_in_recovery() THEN pg_get_wal_replay_pause_state() \
    ELSE substr(pg_walfile_name(pg_current_wal_lsn()), 1, 8) END";

impl Server {
    /// Holds the process, unless it has ended or was never started. A server that was started without being on record
    /// is found by its socket.
    pub(super) async fn hold(&self) -> Result<Option<Held>> {
        let socket = self.socket();
        let held = match &self.process {
            Some(process) => match process.hold(&socket).await {
                // Started by a run of the backup server that was killed before it put this on record.
                Ok(None) => process::listener(&socket).await,
                held => held,
            },
            None => process::listener(&socket).await,
        };
        let held = held.map_err(PostgresError::io("find the server's process"))?;
        match held {
            // A child that is not waited for keeps its number, and PostgreSQL would take it for a server that runs.
            Some(held) if held.has_ended() => {
                held.ended().await;
                Ok(None)
            }
            held => Ok(held),
        }
    }

    /// Waits until the number of the last process is free. PostgreSQL takes one that has ended for a server that runs, until
    /// its parent has taken note: the init process, if an earlier backup server has started it.
    async fn let_go(&mut self) {
        let until = Instant::now() + NUMBER_FREE_WITHIN;
        while self.process.as_ref().is_some_and(Process::has_number) && Instant::now() < until {
            sleep(LOOKS_EACH).await;
        }
    }

    /// Starts the server, if it does not run, and waits until it listens. Its data must be in the role that is
    /// expected.
    ///
    /// # Errors
    /// The data does not fit, or the server ends at once.
    pub async fn start(&mut self, role: Role) -> Result<()> {
        let wrong_log = |log: PathBuf| PostgresError::io(format!("write {}", log.display()));
        if let Some(held) = self.hold().await? {
            // A start that was given up when its process was there is gone on with.
            self.process = Some(Process::of(held.pid));
            let log = self.open_log().map_err(wrong_log(self.log()))?;
            return self.listens(&held, log).await;
        }
        self.let_go().await;
        let found = self.inspect(&self.data()).await?;
        if found.role != role {
            let (dir, found, needed) = (self.data(), found.role, role);
            return Err(PostgresError::OtherRole { dir, found, needed });
        }
        self.make_dirs()?;
        self.write_conf()?;
        self.run_on(&["mkdir", "-p"], &[&self.socket_dir()]).await?;
        let socket = self.socket();
        // A socket at which nobody listens, and its lock.
        self.run_on(
            &["rm", "-f"],
            &[&socket, &socket.with_extension(format!("{}.lock", self.settings.port))],
        )
        .await?;
        let (log, begin) = self.open_log().map_err(wrong_log(self.log()))?;
        let mut command = self.command(self.program("postgres"));
        command.args(self.arguments(&found.control)).stdout(Stdio::null());
        command.stderr(log.try_clone().map_err(wrong_log(self.log()))?);
        // The process is waited for by its descriptor, and must not end with this value.
        let child = command.spawn().map_err(PostgresError::io("run postgres"))?;
        let process = Process::of(child.id());
        self.process = Some(process.clone());
        let held = process.hold(&socket).await.map_err(PostgresError::io("hold postgres"))?;
        match held {
            Some(held) => self.listens(&held, (log, begin)).await,
            None => Err(self.not_started((log, begin))),
        }
    }

    /// Waits until the process listens, or has ended.
    async fn listens(&self, held: &Held, log: (File, u64)) -> Result<()> {
        let (socket, until) = (self.socket(), Instant::now() + STARTS_WITHIN);
        let mut ended = std::pin::pin!(held.ended());
        loop {
            tokio::select! {
                _ = &mut ended => return Err(self.not_started(log)),
                listens = process::listener(&socket) => {
                    if listens.is_ok_and(|found| found.is_some_and(|found| found.pid == held.pid)) {
                        return Ok(());
                    }
                }
            }
            if Instant::now() > until {
                held.kill().map_err(PostgresError::io("end postgres"))?;
                let _ = ended.await;
                return Err(self.not_started(log));
            }
            sleep(LOOKS_EACH).await;
        }
    }

    /// A start that has failed, with what the server has said since.
    fn not_started(&self, (mut log, begin): (File, u64)) -> PostgresError {
        let mut text = Vec::new();
        let read = log.seek(SeekFrom::Start(begin)).and_then(|_| log.read_to_end(&mut text));
        let said = read.map_or_else(|error| error.to_string(), |_| end_of(&text));
        PostgresError::NotStarted { dir: self.dir.clone(), said }
    }

    /// The log of messages, and its length.
    fn open_log(&self) -> std::io::Result<(File, u64)> {
        let path = self.log();
        let mut options = File::options();
        options.read(true).append(true).create(true).mode(0o600);
        let log = options.open(&path)?;
        let bytes = log.metadata()?.len();
        if bytes <= LOG_MAX_BYTES {
            return Ok((log, bytes));
        }
        fs::rename(&path, path.with_extension("old"))?;
        Ok((options.open(&path)?, 0))
    }

    /// Asks the server.
    async fn ask(&self, sql: &str, within: Duration) -> Result<String> {
        let mut command = self.command(self.program("psql"));
        command.arg("-h").arg(self.socket_dir()).args(["-p", &self.settings.port.to_string()]);
        command.args(["-U", &self.site.superuser, "-d", "template1"]);
        command.args(["-qAtXw", "-v", "ON_ERROR_STOP=1", "-c", sql]);
        command.env("PGCONNECT_TIMEOUT", "5").env("PGOPTIONS", "-c statement_timeout=0");
        self.run(command, within).await
    }

    /// State of the server.
    ///
    /// # Errors
    /// The server's process cannot be found.
    pub async fn status(&self) -> Result<State> {
        if self.hold().await?.is_none() {
            return Ok(State::Stopped);
        }
        let row = match self.ask(STATUS, ANSWERS_WITHIN).await {
            Ok(row) => row,
            Err(PostgresError::Failed { said, .. }) => {
                // The socket is there before anybody is let in.
                let waits = ["starting up", "not yet accepting", "not accepting connections"];
                return Ok(if waits.iter().any(|words| said.contains(words)) {
                    State::Recovering { said }
                } else {
                    State::Unknown { said }
                });
            }
            Err(error) => return Ok(State::Unknown { said: error.to_string() }),
        };
        Ok(state_of(&row).unwrap_or(State::Unknown { said: end_of(row.as_bytes()) }))
    }

    /// Promotes the standby when it has the log up to here, and all of that is replayed. One that was promoted already
    /// is left.
    ///
    /// # Errors
    /// The log does not come in that time, or the server cannot be asked.
    pub async fn promote(&self, up_to: Lsn, within: Duration) -> Result<Promotion> {
        if self.hold().await?.is_none() {
            return Err(PostgresError::NotRunning { dir: self.dir.clone() });
        }
        let begun = Instant::now();
        let told = loop {
            let left = within.saturating_sub(begun.elapsed());
            match self.ask(&promotion(up_to, left), left + PROMOTES_WITHIN).await {
                Ok(told) => break told,
                Err(PostgresError::Failed { .. }) if self.hold().await?.is_none() => {
                    return Err(PostgresError::NotRunning { dir: self.dir.clone() });
                }
                // The copy is not usable yet.
                Err(PostgresError::Failed { said, .. })
                    if !left.is_zero() && !said.contains(NO_LOG) =>
                {
                    sleep(LOOKS_EACH).await
                }
                Err(PostgresError::Failed { said, .. }) => {
                    let seconds = within.as_secs();
                    return Err(PostgresError::Behind { wanted: up_to, seconds, said });
                }
                Err(error) => return Err(error),
            }
        };
        let all_ms = u64::try_from(begun.elapsed().as_millis()).unwrap_or(u64::MAX);
        let promoted_ms = told.trim().lines().last().and_then(|line| line.parse().ok());
        let promoted_ms: u64 = promoted_ms.unwrap_or(all_ms);
        let waited_ms = all_ms.saturating_sub(promoted_ms);
        match self.status().await? {
            State::Primary { timeline, replayed } => {
                Ok(Promotion { replayed, timeline, waited_ms, promoted_ms })
            }
            state => {
                let said = format!("after its promotion it is {state:?}");
                Err(PostgresError::Failed { program: "postgres".into(), said })
            }
        }
    }

    /// Stops the server: in order, then without a checkpoint, then by force.
    ///
    /// # Errors
    /// The server's process cannot be found or signalled.
    pub async fn stop(&mut self) -> Result<Stopped> {
        let Some(held) = self.hold().await? else { return Ok(Stopped::Before) };
        let signal = |signal| held.signal(signal).map_err(PostgresError::io("signal postgres"));
        let ways = [
            (Signal::INT, FAST_WITHIN, Stopped::Fast),
            (Signal::QUIT, IMMEDIATE_WITHIN, Stopped::Immediate),
        ];
        for (number, within, how) in ways {
            signal(number)?;
            if timeout(within, held.ended()).await.is_ok() {
                self.process = None;
                return Ok(how);
            }
        }
        signal(Signal::KILL)?;
        held.ended().await;
        self.process = None;
        Ok(Stopped::Killed)
    }
}

/// First words of the server where the log has not come in time.
const NO_LOG: &str = "tidelock: the log ends at";

/// A program that waits for the log, promotes, and waits until the server takes writes. It does so inside of the
/// server, which is asked once. The result is the time that the promotion took, in milliseconds.
fn promotion(up_to: Lsn, within: Duration) -> String {
    let (wait_ms, promote_ms) = (within.as_millis(), PROMOTES_WITHIN.as_millis());
    format!(
        "DO $$
        DECLARE begun timestamptz := clock_timestamp(); has pg_lsn;
        BEGIN
            WHILE pg_is_in_recovery() LOOP
                has := greatest(pg_last_wal_receive_lsn(), pg_last_wal_replay_lsn());
                EXIT WHEN has >= '{up_to}'::pg_lsn;
                IF clock_timestamp() > begun + interval '{wait_ms} ms' THEN
                    RAISE EXCEPTION '{NO_LOG} %', has;
                END IF;
                PERFORM pg_sleep(0.002);
            END LOOP;
            begun := clock_timestamp();
            IF pg_is_in_recovery() THEN PERFORM pg_promote(false); END IF;
            WHILE pg_is_in_recovery() LOOP
                IF clock_timestamp() > begun + interval '{promote_ms} ms' THEN
                    RAISE EXCEPTION 'tidelock: the promotion does not end';
                END IF;
                PERFORM pg_sleep(0.002);
            END LOOP;
            PERFORM set_config('tidelock.promoted_ms',
                (1000 * extract(epoch FROM clock_timestamp() - begun))::bigint::text, false);
        END $$;
        SELECT current_setting('tidelock.promoted_ms')"
    )
}

/// The row that [`STATUS`] gives.
pub(super) fn state_of(row: &str) -> Option<State> {
    let mut fields = row.trim().split('|');
    let is_standby = fields.next()? == "t";
    let mut lsn = || match fields.next()? {
        "" => Some(None),
        text => text.parse().ok().map(Some),
    };
    let (received, replayed) = (lsn()?, lsn()?);
    let last = fields.next()?;
    Some(if is_standby {
        State::Standby { received, replayed, is_paused: last == "paused" }
    } else {
        State::Primary { timeline: u32::from_str_radix(last, 16).ok()?, replayed }
    })
}
