//! The command line: `serve`, `status`, `recover`, `remove`, and what is done with the past.
//!
//! All but `serve` talk to the running server. When none runs, they open the data directory
//! themselves, with the same code, and serve what must be served until they are ended.

mod args;
mod bisect;
mod boot;
mod client;
mod confirm;
mod damaged;
mod diff;
mod export;
mod marks;
mod member;
mod recover;
mod remove;
mod repair;
mod seed;
mod serve;
mod snapshot;
mod status;
mod timeline;
mod view;

pub use args::Args;
pub use bisect::Inexact;

use crate::server::config::{Config, Security};
use crate::travel::marks::Kind;
use anyhow::{Context, Result};
use args::Command;
use std::path::Path;
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
        Command::Serve { check: false } => {
            start_log(&config, None);
            serve::run(config).await
        }
        Command::Status { json } => {
            start_log(&config, Some("warn"));
            status::run(config, json).await
        }
        Command::Recover(recover) => {
            start_log(&config, Some("warn"));
            recover::run(config, recover).await
        }
        Command::Damaged(args) => {
            start_log(&config, Some("warn"));
            damaged::run(config, args).await
        }
        Command::Repair(repair) => {
            start_log(&config, Some("warn"));
            repair::run(config, repair).await
        }
        Command::Seed(seed) => {
            start_log(&config, Some("warn"));
            seed::run(config, seed).await
        }
        Command::Member(command) => {
            start_log(&config, Some("warn"));
            member::run(config, command).await
        }
        Command::Remove(remove) => {
            start_log(&config, Some("warn"));
            remove::run(config, remove).await
        }
        Command::Export(export) => {
            start_log(&config, Some("warn"));
            export::run(config, export).await
        }
        Command::View(view) => {
            start_log(&config, Some("warn"));
            view::run(config, view).await
        }
        Command::Snapshot(snapshot) => {
            start_log(&config, Some("warn"));
            snapshot::run(config, snapshot).await
        }
        Command::Timeline(timeline) => {
            start_log(&config, Some("warn"));
            timeline::run(config, timeline).await
        }
        Command::Bookmark(mark) => {
            start_log(&config, Some("warn"));
            marks::run(config, Kind::Bookmark, mark).await
        }
        Command::Pin(mark) => {
            start_log(&config, Some("warn"));
            marks::run(config, Kind::Pin, mark).await
        }
        Command::Diff(diff) => {
            start_log(&config, Some("warn"));
            diff::run(config, diff).await
        }
        Command::Apply(_) => unreachable!("done"),
        Command::Bisect(bisect) => {
            start_log(&config, Some("warn"));
            bisect::run(config, bisect).await
        }
    }
}

fn load(path: &Path) -> Result<Config> {
    let text = std::fs::read_to_string(path).with_context(|| {
        format!("cannot read the configuration {} (see --config)", path.display())
    })?;
    Ok(Config::parse(&path.display().to_string(), &text)?)
}

/// `RUST_LOG` wins over the command's own level, and that over the configuration's.
fn start_log(config: &Config, level: Option<&str>) {
    let wanted = level.unwrap_or(&config.log);
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new(wanted));
    let log = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_ansi(false)
        .with_target(false)
        .with_writer(std::io::stderr);
    if config.log_json { log.json().init() } else { log.init() }
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
