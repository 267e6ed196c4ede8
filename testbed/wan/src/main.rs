//! `tidelock-wan run` is the cable, `tidelock-wan ctl` changes it while it runs.

use std::io::Write;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::sync::Arc;

use anyhow::{Context, bail};
use clap::{Args, Parser, Subcommand};
use serde_json::{Map, Value};
use tidelock_wan::control::{self, Controls, Direction, Request};
use tidelock_wan::line::Params;
use tidelock_wan::pump::Pump;
use tidelock_wan::sys;

#[derive(Parser)]
#[command(about = "A WAN between two network namespaces, for kernels without sch_netem")]
enum Command {
    /// Be the cable: opens a TAP in each namespace, prints "ready", runs until killed.
    Run(Run),
    /// Change a running cable, or ask it for its counters.
    Ctl {
        /// The cable's control socket.
        socket: PathBuf,
        #[command(subcommand)]
        what: Ctl,
    },
}

#[derive(Args)]
struct Run {
    /// The left end, as NETNS:IFNAME.
    #[arg(long, value_parser = parse_end)]
    left: (String, String),
    /// The right end, as NETNS:IFNAME.
    #[arg(long, value_parser = parse_end)]
    right: (String, String),
    /// Path of the control socket to make.
    #[arg(long)]
    control: PathBuf,
    /// Decides losses, jitter and duplicates.
    #[arg(long, default_value_t = 1)]
    seed: u64,
}

#[derive(Subcommand)]
enum Ctl {
    /// Set parameters: delay_ms jitter_ms rate_bytes_per_s queue_bytes loss duplicate corrupt reorder cut.
    Set {
        /// NAME=VALUE, for example delay_ms=25 cut=true.
        #[arg(required = true)]
        assignments: Vec<String>,
    },
    /// Print parameters and counters.
    Stats,
}

fn parse_end(text: &str) -> Result<(String, String), String> {
    match text.rsplit_once(':') {
        Some((netns, ifname)) if !netns.is_empty() && !ifname.is_empty() => {
            Ok((netns.to_owned(), ifname.to_owned()))
        }
        _ => Err("write NETNS:IFNAME".to_owned()),
    }
}

fn main() -> anyhow::Result<()> {
    tidelock_config::abort_on_panic();
    match Command::parse() {
        Command::Run(run) => be_the_cable(run),
        Command::Ctl { socket, what } => control_cable(&socket, what),
    }
}

fn be_the_cable(run: Run) -> anyhow::Result<()> {
    let open = |(netns, ifname): &(String, String)| {
        sys::open_tap(netns, ifname)
            .map(Arc::new)
            .with_context(|| format!("cannot open TAP {ifname} in network namespace {netns}"))
    };
    let (left, right) = (open(&run.left)?, open(&run.right)?);
    let listener = UnixListener::bind(&run.control)
        .with_context(|| format!("cannot make control socket {}", run.control.display()))?;
    let params = Params::default();
    let (to_right, left_to_right) =
        Pump::new(Arc::clone(&left), Arc::clone(&right), params, run.seed)?;
    // Another stream of random numbers, still decided by the seed.
    let (to_left, right_to_left) = Pump::new(right, left, params, !run.seed)?;
    for (name, pump) in [("left-to-right", to_right), ("right-to-left", to_left)] {
        std::thread::Builder::new().name(name.to_owned()).spawn(move || {
            if let Err(error) = pump.run() {
                eprintln!("tidelock-wan: {name}: {error}");
            }
            // A cable with one direction is no cable.
            std::process::exit(1);
        })?;
    }
    println!("ready");
    std::io::stdout().flush()?;
    control::serve(&listener, &mut Controls { left_to_right, right_to_left })?;
    Ok(())
}

fn control_cable(socket: &PathBuf, what: Ctl) -> anyhow::Result<()> {
    let stream = UnixStream::connect(socket)
        .with_context(|| format!("no cable listens at {}", socket.display()))?;
    let request = match what {
        Ctl::Stats => Request { stats: true, ..Request::default() },
        Ctl::Set { assignments } => Request {
            set: parse_assignments(&assignments)?,
            direction: Direction::Both,
            stats: false,
        },
    };
    let answer = control::ask(&stream, &request)?;
    if let Some(error) = answer.get("error") {
        bail!("{error}");
    }
    println!("{}", serde_json::to_string_pretty(&answer)?);
    Ok(())
}

fn parse_assignments(assignments: &[String]) -> anyhow::Result<Map<String, Value>> {
    let mut set = Map::new();
    for assignment in assignments {
        let Some((name, value)) = assignment.split_once('=') else {
            bail!("{assignment}: write NAME=VALUE");
        };
        let value = serde_json::from_str(value)
            .with_context(|| format!("{assignment}: the value is a number, true or false"))?;
        set.insert(name.to_owned(), value);
    }
    Ok(set)
}
