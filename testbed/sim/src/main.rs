//! `make sim`: many seeds on all processors; a failing one is printed with the command that
//! replays it and the end of its trace.

use clap::Parser;
use indicatif::{ProgressBar, ProgressStyle};
use std::cell::Cell;
use std::collections::BTreeMap;
use std::io::IsTerminal;
use std::process::ExitCode;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::time::Instant;
use tidelock_sim::counts::Counts;
use tidelock_sim::failure::Checker;
use tidelock_sim::plant::Plant;
use tidelock_sim::{Options, Outcome, run};

/// Runs production's state machines against simulated disks, networks, guests and disasters.
#[derive(Debug, Parser)]
#[command(name = "tidelock-sim", version)]
struct Args {
    /// How many seeds to run.
    #[arg(long, default_value_t = 200)]
    seeds: u64,
    /// The first one.
    #[arg(long, default_value_t = 1)]
    start: u64,
    /// Events of each seed until its faults stop.
    #[arg(long, default_value_t = Options::default().steps)]
    steps: u64,
    /// Threads; 0: one for each processor.
    #[arg(long, default_value_t = 0)]
    jobs: usize,
    /// Plants a bug, to see it caught; "list" names them all.
    #[arg(long)]
    plant: Option<String>,
    /// Lets one checker look away, to see whether those behind it notice a planted bug, too.
    #[arg(long, value_name = "CHECKER", value_parser = checker)]
    without: Option<Checker>,
    /// Replays one seed and prints its whole trace.
    #[arg(long, value_name = "SEED")]
    trace: Option<u64>,
    /// Goes on after a failing seed.
    #[arg(long)]
    keep_going: bool,
    /// Prints the result as one JSON document.
    #[arg(long)]
    json: bool,
}

fn checker(name: &str) -> Result<Checker, String> {
    let names: Vec<_> = Checker::ALL.iter().map(|checker| checker.name()).collect();
    Checker::of(name).ok_or_else(|| format!("the checkers are {}", names.join(", ")))
}

thread_local! {
    static SEED: Cell<u64> = const { Cell::new(0) };
}

fn main() -> ExitCode {
    let args = Args::parse();
    let plant = match args.plant.as_deref() {
        None => None,
        Some("list") => {
            Plant::all().for_each(|plant| println!("{}", plant.name()));
            return ExitCode::SUCCESS;
        }
        Some(name) => match Plant::of(name) {
            Some(plant) => Some(plant),
            None => {
                eprintln!("there is no bug \"{name}\" to plant: --plant list names them");
                return ExitCode::from(2);
            }
        },
    };
    let options = Options {
        steps: args.steps,
        plant,
        live_trace: args.trace.is_some(),
        without: args.without,
    };
    report_panics(options);
    if let Some(seed) = args.trace {
        SEED.set(seed);
        let outcome = run(seed, &options);
        println!("{:?}, trace hash {:016x}", outcome.counts, outcome.hash);
        return match outcome.failure {
            Some(failure) => {
                println!("seed {seed} breaks {}: {}", failure.checker, failure.what);
                ExitCode::FAILURE
            }
            None => ExitCode::SUCCESS,
        };
    }
    let (done, failed, elapsed_s) = run_all(&args, &options);
    if args.json {
        print_json(&args, &done, &failed, elapsed_s);
    } else {
        print_text(&args, &options, &done, &failed, elapsed_s);
    }
    if failed.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// A panic ends a release build's process: say at least which seed it was.
fn report_panics(options: Options) {
    let default = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| {
        let seed = SEED.get();
        eprintln!("\nseed {seed} panics; {}", replay(seed, &options));
        default(info);
    }));
}

fn replay(seed: u64, options: &Options) -> String {
    let mut command = format!("replay: cargo run --release -p tidelock-sim -- --trace {seed}");
    if options.steps != Options::default().steps {
        command += &format!(" --steps {}", options.steps);
    }
    if let Some(plant) = options.plant {
        command += &format!(" --plant {}", plant.name());
    }
    if let Some(without) = options.without {
        command += &format!(" --without {without}");
    }
    command
}

/// What all seeds came to.
#[derive(Default)]
struct Done {
    seeds: u64,
    counts: Counts,
}

fn run_all(args: &Args, options: &Options) -> (Done, Vec<Outcome>, f64) {
    let began = Instant::now();
    let jobs = match args.jobs {
        0 => std::thread::available_parallelism().map_or(1, usize::from),
        jobs => jobs,
    };
    let (next, stop) = (AtomicU64::new(args.start), AtomicBool::new(false));
    let end = args.start.saturating_add(args.seeds);
    let shared = Mutex::new((Done::default(), Vec::new()));
    let bar = progress(args);
    std::thread::scope(|scope| {
        for _ in 0..jobs {
            scope.spawn(|| {
                loop {
                    let seed = next.fetch_add(1, SeqCst);
                    if seed >= end || stop.load(SeqCst) {
                        return;
                    }
                    SEED.set(seed);
                    let outcome = run(seed, options);
                    let mut shared = shared.lock().expect("no panic while held");
                    shared.0.seeds += 1;
                    shared.0.counts.add(&outcome.counts);
                    bar.inc(1);
                    let tenth = (args.seeds / 10).max(1);
                    if bar.is_hidden() && !args.json && shared.0.seeds.is_multiple_of(tenth) {
                        eprintln!("{} of {} seeds", shared.0.seeds, args.seeds);
                    }
                    if outcome.failure.is_some() {
                        shared.1.push(outcome);
                        if !args.keep_going {
                            stop.store(true, SeqCst);
                        }
                    }
                }
            });
        }
    });
    bar.finish_and_clear();
    let (done, mut failed) = shared.into_inner().expect("no panic while held");
    failed.sort_by_key(|outcome| outcome.seed);
    (done, failed, began.elapsed().as_secs_f64())
}

fn progress(args: &Args) -> ProgressBar {
    if args.json || !std::io::stderr().is_terminal() {
        return ProgressBar::hidden();
    }
    let style = ProgressStyle::with_template("{pos}/{len} seeds  {bar:40}  {per_sec}  {eta} left");
    ProgressBar::new(args.seeds).with_style(style.expect("a valid template"))
}

fn print_text(args: &Args, options: &Options, done: &Done, failed: &[Outcome], elapsed_s: f64) {
    for outcome in failed {
        let failure = outcome.failure.as_ref().expect("it failed");
        println!("seed {} breaks {}: {}", outcome.seed, failure.checker, failure.what);
        if !args.keep_going {
            for line in &outcome.tail[outcome.tail.len().saturating_sub(40)..] {
                println!("  {line}");
            }
        }
        println!("  {}", replay(outcome.seed, options));
    }
    for (name, count) in done.counts.named() {
        println!("{count:>14}  {}", name.replace('_', " "));
    }
    println!("{} of {} seeds failed, {elapsed_s:.1} s", failed.len(), done.seeds);
}

fn print_json(args: &Args, done: &Done, failed: &[Outcome], elapsed_s: f64) {
    let mut by_checker: BTreeMap<&str, u64> = BTreeMap::new();
    let failures: Vec<_> = failed
        .iter()
        .map(|outcome| {
            let failure = outcome.failure.as_ref().expect("it failed");
            *by_checker.entry(failure.checker.name()).or_default() += 1;
            serde_json::json!({
                "seed": outcome.seed,
                "checker": failure.checker.name(),
                "what": failure.what,
                "trace": outcome.tail,
            })
        })
        .collect();
    let report = serde_json::json!({
        "seeds": done.seeds,
        "start": args.start,
        "steps": args.steps,
        "plant": args.plant,
        "elapsed_s": elapsed_s,
        "counts": done.counts,
        "failed": failures,
        "by_checker": by_checker,
    });
    println!("{report:#}");
}
