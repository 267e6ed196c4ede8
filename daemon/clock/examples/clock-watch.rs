//! Follows a source of time, and prints the guard's status after each look, as a line of JSON; `raw_ns` is the time of
//! the status by the raw clock.
//!
//! `clock-watch ptp4l SOCKET [SETTINGS]` or `clock-watch chronyd ADDRESS [SETTINGS]`; settings are `max-error-ns=N`
//! (1,000,000), `every-ms=N` (250), `drift-ppm=N` (200), `samples-min=N` (4), `settle-ms=N` (10,000), `window-ms=N`
//! (30,000), `silence-max-ms=N` (5,000), `hop-ns=N` (none: the source measures the wall clock), `domain=N` (0),
//! `specific=N` (0).

use std::io::Write;
use std::path::Path;
use std::time::Duration;
use tidelock_clock::driver::{Chronyd, Ptp4l, Source, look, read_clocks};
use tidelock_clock::{ClockGuard, Limits, Sampled};

struct Settings {
    limits: Limits,
    every: Duration,
    domain: u8,
    specific: u8,
}

fn settings(words: &[String]) -> Result<Settings, String> {
    let mut settings = Settings {
        limits: Limits::new(1_000_000),
        every: Duration::from_millis(250),
        domain: 0,
        specific: 0,
    };
    for word in words {
        let (name, value) = word.split_once('=').ok_or(format!("{word}: NAME=VALUE is wanted"))?;
        let value: u64 = value.parse().map_err(|error| format!("{word}: {error}"))?;
        let small = u8::try_from(value).map_err(|error| format!("{word}: {error}"));
        let limits = &mut settings.limits;
        match name {
            "max-error-ns" => limits.max_clock_error_ns = value,
            "every-ms" => settings.every = Duration::from_millis(value),
            "drift-ppm" => limits.drift_ppm = u32::try_from(value).unwrap_or(u32::MAX),
            "samples-min" => limits.samples_min = usize::from(small?),
            "settle-ms" => limits.settle_ns = value.saturating_mul(1_000_000),
            "window-ms" => limits.window_ns = value.saturating_mul(1_000_000),
            "silence-max-ms" => limits.silence_max_ns = value.saturating_mul(1_000_000),
            "hop-ns" => limits.sampled = Sampled::Other { hop_ns: value },
            "domain" => settings.domain = small?,
            "specific" => settings.specific = small?,
            _ => return Err(format!("{word}: unknown")),
        }
    }
    Ok(settings)
}

fn watch(source: &mut impl Source, settings: &Settings) -> Result<(), String> {
    let mut guard = ClockGuard::new(settings.limits);
    loop {
        let error = look(&mut guard, source, Duration::from_millis(500)).err();
        let now = read_clocks();
        let mut line =
            serde_json::to_value(guard.status(now)).map_err(|error| error.to_string())?;
        line["raw_ns"] = now.raw_ns.into();
        line["error"] = error.map(|error| error.to_string()).into();
        writeln!(std::io::stdout(), "{line}").map_err(|error| error.to_string())?;
        std::thread::sleep(settings.every);
    }
}

fn main() -> Result<(), String> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let [kind, whom, words @ ..] = words.as_slice() else {
        return Err("clock-watch ptp4l SOCKET | chronyd ADDRESS, and settings".to_owned());
    };
    let settings = settings(words)?;
    match kind.as_str() {
        "ptp4l" => {
            let (domain, specific) = (settings.domain, settings.specific);
            let source = Ptp4l::new(Path::new(whom), &std::env::temp_dir(), domain, specific);
            watch(&mut source.map_err(|error| error.to_string())?, &settings)
        }
        "chronyd" => {
            let server = whom.parse().map_err(|error| format!("{whom}: {error}"))?;
            watch(&mut Chronyd::new(server), &settings)
        }
        other => Err(format!("{other}: ptp4l or chronyd is wanted")),
    }
}
