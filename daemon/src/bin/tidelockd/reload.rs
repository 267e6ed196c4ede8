//! SIGHUP: reads again what can change while guests run.
//!
//! The log level changes at once. Certificates are read at each connection to the backup anyway; SIGHUP checks the files, so
//! that an operator learns of a mistake before the next connection does. Nothing here ends the daemon.

use std::path::PathBuf;
use std::time::SystemTime;
use tidelock_daemon::config::{self, Config, LogFormat, Security};
use tracing_subscriber::prelude::*;
use tracing_subscriber::{EnvFilter, Registry, fmt, reload};

/// Decides which events are logged.
pub type LogFilter = reload::Handle<EnvFilter, Registry>;

/// The parts of the daemon that follow the configuration file without a restart.
pub struct Reload {
    /// The configuration file.
    pub path: PathBuf,
    /// The log's filter.
    pub log: LogFilter,
}

impl Reload {
    /// Reads the configuration again. A file that is wrong changes nothing.
    pub fn again(&self) {
        let config = match config::load(&self.path) {
            Ok(config) => config,
            Err(error) => {
                tracing::error!("SIGHUP: the configuration stays as it was: {error}");
                return;
            }
        };
        if let Err(error) = self.log.reload(filter(&config)) {
            tracing::error!("SIGHUP: the log level stays as it was: {error}");
        }
        if let Security::Tls { files, .. } = &config.backup.security {
            let usable = files.load().and_then(|found| found.host_config(SystemTime::now()));
            if let Err(error) = usable {
                tracing::error!("SIGHUP: the next connection to the backup will fail: {error}");
            }
        }
        tracing::info!(
            log = config.host.log,
            "SIGHUP: log level and certificates are as in {}; everything else in it takes effect at the next start",
            self.path.display()
        );
    }
}

/// Begins to log to standard error. Returns the means to change the filter later.
pub fn start_log(config: &Config) -> LogFilter {
    let (filter, handle) = reload::Layer::new(filter(config));
    let layer = fmt::layer().with_writer(std::io::stderr);
    let layer = match config.host.log_format {
        LogFormat::Text => layer.with_target(false).with_ansi(false).boxed(),
        LogFormat::Json => layer.json().boxed(),
    };
    tracing_subscriber::registry().with(filter).with(layer).init();
    handle
}

fn filter(config: &Config) -> EnvFilter {
    EnvFilter::try_new(&config.host.log).unwrap_or_else(|_| EnvFilter::new("info"))
}
