//! The host daemon. See `tidelockd --help`, and docs/operations.md.

use anyhow::Context;
use clap::Parser;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::SystemTime;
use tidelock_daemon::config::{self, Config, LogFormat};
use tidelock_daemon::control;
use tidelock_daemon::host::{Host, SOFTWARE};
use tidelock_daemon::metrics;
use tokio::signal::unix::{SignalKind, signal};
use tracing_subscriber::EnvFilter;

const AT_ONCE: &str =
    "ended by a second signal: the rules stay, nothing leaves until the next start";

/// Serves the disks of protected VMs, replicates their writes to the backup, and holds their
/// packets until the backup has what they depend on.
///
/// SIGTERM and SIGINT end it cleanly: requests that were taken are answered, everything goes to
/// the backup, and the packet-filter rules are removed. A second one ends it at once; the rules
/// stay then, and nothing leaves until it runs again.
///
/// Exit status: 0 after a clean end, 1 after a failure, 2 if the configuration is wrong.
#[derive(Parser)]
#[command(version, name = "tidelockd")]
struct Args {
    /// The configuration; `tidelock config check` checks it without starting anything.
    #[arg(short, long, default_value = config::DEFAULT_PATH)]
    config: PathBuf,
}

fn main() -> ExitCode {
    let args = Args::parse();
    let config = match checked(&args) {
        Ok(config) => config,
        Err(text) => {
            eprintln!("{text}");
            return ExitCode::from(2);
        }
    };
    start_log(&config);
    match run(config) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            tracing::error!("{error:#}");
            ExitCode::FAILURE
        }
    }
}

fn checked(args: &Args) -> Result<Config, String> {
    let config = config::load(&args.config).map_err(|error| error.to_string())?;
    config::check_machine(&config, SystemTime::now()).map_err(|found| found.to_string())?;
    Ok(config)
}

fn start_log(config: &Config) {
    let filter = EnvFilter::try_new(&config.host.log).unwrap_or_else(|_| EnvFilter::new("info"));
    let log = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr);
    match config.host.log_format {
        LogFormat::Text => log.with_target(false).with_ansi(false).init(),
        LogFormat::Json => log.json().init(),
    }
}

fn run(config: Config) -> anyhow::Result<()> {
    // The data path has threads of its own: these serve status, metrics and signals.
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(1)
        .thread_name("control")
        .enable_all()
        .build()
        .context("cannot start the control runtime")?;
    runtime.block_on(serve(config))
}

async fn serve(config: Config) -> anyhow::Result<()> {
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
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
    let failure = tokio::select! {
        _ = terminate.recv() => None,
        _ = interrupt.recv() => None,
        () = host.stop_asked() => None,
        error = host.failed() => Some(error),
    };
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
    result
}
