//! The host daemon. See `tidelockd --help`, and docs/manual/README.md.

use anyhow::Context;
use clap::Parser;
use sd_notify::NotifyState;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::SystemTime;
use tidelock_config::eprintln;
use tidelock_daemon::config::{self, Config, ConfigError};
use tidelock_daemon::control;
use tidelock_daemon::host::{Host, HostError, SOFTWARE};
use tidelock_daemon::metrics;
use tokio::signal::unix::{SignalKind, signal};

mod reload;

const AT_ONCE: &str =
    "ended by a second signal: the rules stay, nothing leaves until the next start";

/// Serves the disks of protected VMs, replicates their writes to the backup, and holds their
/// packets until the backup has what they depend on.
///
/// SIGHUP reads the log level and the certificates again, and never ends the daemon.
///
/// SIGTERM and SIGINT end it cleanly: requests that were taken are answered, everything goes to
/// the backup. A second one ends it at once. The packet-filter rules stay at every end, and nothing
/// leaves until it runs again.
///
/// Exit status: 0 after a clean end, 1 after a failure, 2 if a file has to be corrected first: the
/// configuration, or the state of a member. A disk, a certificate or a mount that is missing is a
/// failure: it may be there at the next start.
#[derive(Parser)]
#[command(version, name = "tidelockd")]
struct Args {
    /// The configuration; `tidelock config check` checks it without starting anything.
    #[arg(short, long, default_value = config::DEFAULT_PATH)]
    config: PathBuf,
}

fn main() -> ExitCode {
    tidelock_config::abort_on_panic();
    let args = Args::parse();
    let config = match config::load(&args.config) {
        Ok(config) => config,
        Err(error) => {
            eprintln!("{error}");
            let needs_correction = matches!(error, ConfigError::Wrong(_));
            return ExitCode::from(if needs_correction { 2 } else { 1 });
        }
    };
    // Everything here can change without an edit of the file: a mount comes late, a clock is set.
    let expired = match config::check_for_start(&config, SystemTime::now()) {
        Ok(expired) => expired,
        Err(found) => {
            eprintln!("{found}");
            return ExitCode::FAILURE;
        }
    };
    let log = reload::start_log(&config);
    if let Some(expired) = expired {
        tracing::error!(
            "guests have their disks, and nothing reaches the backup until there is another certificate: {}",
            expired.what
        );
    }
    match run(config, reload::Reload { path: args.config, log }) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            tracing::error!("{error:#}");
            let needs_correction = error.downcast_ref().is_some_and(HostError::needs_correction);
            ExitCode::from(if needs_correction { 2 } else { 1 })
        }
    }
}

fn run(config: Config, reload: reload::Reload) -> anyhow::Result<()> {
    // The data path has threads of its own: these serve status, metrics and signals.
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(1)
        .thread_name("control")
        .enable_all()
        .build()
        .context("cannot start the control runtime")?;
    runtime.block_on(serve(config, reload))
}

async fn serve(config: Config, reload: reload::Reload) -> anyhow::Result<()> {
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    let mut hangup = signal(SignalKind::hangup())?;
    let (control_socket, metrics_at) = (config.host.control_socket(), config.metrics);
    let host = Arc::new(Host::start(config)?);
    let watch = tokio::spawn(host.clone().watch());
    let control = control::server::serve(&control_socket, host.clone())
        .with_context(|| format!("cannot serve the control socket {}", control_socket.display()))?;
    if let Some(address) = metrics_at {
        let (address, serve) = metrics::bind(address, host.clone()).await?;
        tracing::info!(%address, "metrics");
        tokio::spawn(serve);
    }
    tracing::info!(software = SOFTWARE, "ready");
    // Every socket accepts now: guests that systemd starts after this unit find their disks.
    tell_systemd(&[NotifyState::Ready]);
    let reloading = tokio::spawn(async move {
        while hangup.recv().await.is_some() {
            reload.again();
        }
    });
    let failure = tokio::select! {
        _ = terminate.recv() => None,
        _ = interrupt.recv() => None,
        () = host.stop_asked() => None,
        error = host.failed() => Some(error),
    };
    tell_systemd(&[NotifyState::Stopping]);
    let result = match failure {
        // Without a clean end the rules stay, and nothing leaves until the next start.
        Some(error) => Err(anyhow::anyhow!("{error}")),
        None => {
            tracing::info!("stopping; a second signal ends at once");
            tokio::select! {
                stopped = host.stop() => stopped.map_err(Into::into),
                _ = terminate.recv() => Err(anyhow::anyhow!(AT_ONCE)),
                _ = interrupt.recv() => Err(anyhow::anyhow!(AT_ONCE)),
            }
        }
    };
    control.abort();
    watch.abort();
    reloading.abort();
    result
}

/// Does nothing where systemd has not started this process.
fn tell_systemd(state: &[NotifyState<'_>]) {
    if let Err(error) = sd_notify::notify(state) {
        tracing::warn!("cannot tell systemd how far the daemon is: {error}");
    }
}
