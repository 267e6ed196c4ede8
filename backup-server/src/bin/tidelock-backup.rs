//! The backup server and its command line.

use clap::Parser;
use std::process::ExitCode;
use tidelock_backup_server::cli;

#[tokio::main]
async fn main() -> ExitCode {
    match cli::run(cli::Args::parse()).await {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("tidelock-backup: {error:#}");
            ExitCode::FAILURE
        }
    }
}
