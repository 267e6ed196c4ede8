//! The `tidelock` command.

fn main() -> std::process::ExitCode {
    tidelock_daemon::cli::main()
}
