//! `tidelock-backup serve`.

use super::{load, log_filter};
use crate::server::config::{Config, Security};
use crate::server::{Role, Server};
use anyhow::Result;
use sd_notify::NotifyState;
use std::path::{Path, PathBuf};
use std::time::SystemTime;
use tokio::signal::unix::{SignalKind, signal};
use tracing_subscriber::prelude::*;
use tracing_subscriber::{EnvFilter, Registry, fmt, reload};

/// Decides which events are logged.
type LogFilter = reload::Handle<EnvFilter, Registry>;

pub(super) async fn run(config: Config, path: &Path) -> Result<()> {
    let reload = Reload { path: path.to_owned(), log: start_log(&config) };
    let mut hangup = signal(SignalKind::hangup())?;
    if config.security == Security::Plaintext {
        tracing::warn!(
            "plaintext = true: anyone on the way can read and change every disk; only for tests"
        );
    }
    let (name, data_dir) = (config.name.clone(), config.data_dir.display().to_string());
    let server = Server::start(config, Role::Serve).await?;
    let address = server.address().map(|a| a.to_string());
    tracing::info!(name, data_dir, address, "ready");
    tell_systemd(NotifyState::Ready);
    let reloading = tokio::spawn(async move {
        while hangup.recv().await.is_some() {
            reload.again();
        }
    });
    let signal = super::asked_to_end().await?;
    tracing::info!(signal, "stopping: what was received is made durable first");
    tell_systemd(NotifyState::Stopping);
    server.stop().await;
    reloading.abort();
    tracing::info!("stopped");
    Ok(())
}

/// Does nothing where systemd has not started this process.
fn tell_systemd(state: NotifyState<'_>) {
    if let Err(error) = sd_notify::notify(&[state]) {
        tracing::warn!("cannot tell systemd how far the server is: {error}");
    }
}

/// The parts of the server that follow the configuration file without a restart.
struct Reload {
    path: PathBuf,
    log: LogFilter,
}

impl Reload {
    /// SIGHUP: the log level changes at once. Certificates are read at each connection anyway; their check here tells of a
    /// mistake before a host meets it. A file that is wrong changes nothing.
    fn again(&self) {
        let config = match load(&self.path) {
            Ok(config) => config,
            Err(error) => {
                tracing::error!("SIGHUP: the configuration stays as it was: {error}");
                return;
            }
        };
        if let Err(error) = self.log.reload(log_filter(&config)) {
            tracing::error!("SIGHUP: the log level stays as it was: {error}");
        }
        if let Security::Tls(files) = &config.security {
            let usable = files.load().and_then(|found| found.backup_config(SystemTime::now()));
            if let Err(error) = usable {
                tracing::error!("SIGHUP: no host can connect with these certificates: {error}");
            }
        }
        tracing::info!(
            log = config.log,
            "SIGHUP: log level and certificates are as in {}; everything else in it takes effect at the next start",
            self.path.display()
        );
    }
}

/// Begins to log to standard error. Returns the means to change the filter later.
fn start_log(config: &Config) -> LogFilter {
    let (filter, handle) = reload::Layer::new(log_filter(config));
    let layer = fmt::layer().with_ansi(false).with_target(false).with_writer(std::io::stderr);
    let layer = if config.log_json { layer.json().boxed() } else { layer.boxed() };
    tracing_subscriber::registry().with(filter).with(layer).init();
    handle
}
