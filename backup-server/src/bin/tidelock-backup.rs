//! The backup server and its command line.

use clap::Parser;
use std::process::ExitCode;
use tidelock_backup_server::cli;
use tidelock_config::{Diagnostics, abort_on_panic, eprint, eprintln};

#[tokio::main]
async fn main() -> ExitCode {
    abort_on_panic();
    match cli::run(cli::Args::parse()).await {
        Ok(()) => ExitCode::SUCCESS,
        // A mistake in the configuration: starting again does not help, and says the same.
        Err(error) if error.is::<Diagnostics>() => {
            eprint!("{error}");
            ExitCode::from(2)
        }
        Err(error) if error.is::<cli::Unreadable>() => {
            eprintln!("tidelock-backup: {error}");
            ExitCode::from(2)
        }
        // It was told; this is for whoever asks for the exit code.
        Err(error) if error.is::<cli::Inexact>() => ExitCode::from(3),
        Err(error) => {
            eprintln!("tidelock-backup: {error:#}");
            ExitCode::FAILURE
        }
    }
}
