//! The command line: `serve`, `status`, `recover`, `remove`, and what is done with the past.
//!
//! All but `serve` talk to the running server. When none runs, they open the data directory
//! themselves, with the same code, and serve what must be served until they are ended.

mod args;
mod bisect;
mod boot;
mod client;
mod confirm;
mod console;
mod damaged;
mod diff;
mod export;
mod machine;
mod marks;
mod member;
mod recover;
mod remove;
mod repair;
mod seed;
mod serve;
mod snapshot;
mod status;
mod store;
mod timeline;
mod view;

pub use args::Args;
pub use bisect::Inexact;

use crate::server::config::{Config, Security};
use anyhow::Result;
use args::Command;
use std::path::Path;
use tidelock_store::journal::MarkKind;
use tracing_subscriber::EnvFilter;

/// Runs a command to its end.
pub async fn run(args: Args) -> Result<()> {
    let command = match args.command {
        // It needs files only, and no configuration.
        Command::Apply(apply) => return diff::apply(&apply),
        command => command,
    };
    let config = load(&args.config)?;
    match command {
        Command::Serve { check: true } => {
            if let Security::Tls(files) = &config.security {
                files.load()?.backup_config(std::time::SystemTime::now())?;
            }
            println!("{} is good", args.config.display());
            Ok(())
        }
        Command::Serve { check: false } => serve::run(config, &args.config).await,
        Command::Status { json } => {
            start_log(&config, "warn");
            status::run(config, json).await
        }
        Command::Recover(recover) => {
            start_log(&config, "warn");
            recover::run(config, recover).await
        }
        Command::Machine(args) => {
            start_log(&config, "warn");
            machine::run(config, args).await
        }
        Command::Damaged(args) => {
            start_log(&config, "warn");
            damaged::run(config, args).await
        }
        Command::Repair(repair) => {
            start_log(&config, "warn");
            repair::run(config, repair).await
        }
        Command::Seed(seed) => {
            start_log(&config, "warn");
            seed::run(config, seed).await
        }
        Command::Member(command) => {
            start_log(&config, "warn");
            member::run(config, command).await
        }
        Command::Remove(remove) => {
            start_log(&config, "warn");
            remove::run(config, remove).await
        }
        Command::Export(export) => {
            start_log(&config, "warn");
            export::run(config, export).await
        }
        Command::View(view) => {
            start_log(&config, "warn");
            view::run(config, view).await
        }
        Command::Snapshot(snapshot) => {
            start_log(&config, "warn");
            snapshot::run(config, snapshot).await
        }
        Command::Timeline(timeline) => {
            start_log(&config, "warn");
            timeline::run(config, timeline).await
        }
        Command::Bookmark(mark) => {
            start_log(&config, "warn");
            marks::run(config, MarkKind::Bookmark, mark).await
        }
        Command::Pin(mark) => {
            start_log(&config, "warn");
            marks::run(config, MarkKind::Pin, mark).await
        }
        Command::Diff(diff) => {
            start_log(&config, "warn");
            diff::run(config, diff).await
        }
        Command::Apply(_) => unreachable!("done"),
        Command::Bisect(bisect) => {
            start_log(&config, "warn");
            bisect::run(config, bisect).await
        }
    }
}

fn load(path: &Path) -> Result<Config> {
    let text = std::fs::read_to_string(path)
        .map_err(|source| Unreadable { path: path.to_owned(), source })?;
    Ok(Config::parse(&path.display().to_string(), &text)?)
}

/// The configuration cannot be read.
#[derive(Debug, thiserror::Error)]
#[error("cannot read the configuration {path} (see --config): {source}")]
pub struct Unreadable {
    path: std::path::PathBuf,
    source: std::io::Error,
}

/// For commands that end by themselves: `RUST_LOG` wins over `level`.
fn start_log(config: &Config, level: &str) {
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new(level));
    let log = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_ansi(false)
        .with_target(false)
        .log_internal_errors(false)
        .with_writer(std::io::stderr);
    if config.log_json { log.json().init() } else { log.init() }
}

/// The filter of the log of `serve`: `RUST_LOG` wins over the configuration.
fn log_filter(config: &Config) -> EnvFilter {
    EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new(&config.log))
}

/// Waits for SIGINT or SIGTERM.
async fn asked_to_end() -> std::io::Result<&'static str> {
    use tokio::signal::unix::{SignalKind, signal};
    let (mut interrupt, mut terminate) =
        (signal(SignalKind::interrupt())?, signal(SignalKind::terminate())?);
    tokio::select! {
        _ = interrupt.recv() => Ok("SIGINT"),
        _ = terminate.recv() => Ok("SIGTERM"),
    }
}

/// The same, or until the terminal hangs up.
async fn asked_to_leave() -> std::io::Result<&'static str> {
    use tokio::signal::unix::{SignalKind, signal};
    let mut hangup = signal(SignalKind::hangup())?;
    tokio::select! {
        _ = hangup.recv() => Ok("SIGHUP"),
        signal = asked_to_end() => signal,
    }
}
