//! Numbers as people read them.

use std::time::Duration;

/// `1.2 MiB`: three digits, binary units.
pub fn bytes(bytes: u64) -> String {
    const UNITS: [&str; 6] = ["KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
    if bytes < 1024 {
        return format!("{bytes} B");
    }
    let mut value = bytes as f64 / 1024.0;
    let mut unit = 0;
    // 1023.95 would be shown as 1024.
    while value >= 1023.5 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    format!("{} {}", three_digits(value), UNITS[unit])
}

/// `12.5 MiB/s`.
pub fn rate(bytes_per_s: u64) -> String {
    format!("{}/s", bytes(bytes_per_s))
}

/// `850 us`, `48 ms`, `1.5 s`, `3 min 20 s`, `5 h 2 min`, `3 d 4 h`.
pub fn duration(duration: Duration) -> String {
    let us = duration.as_micros();
    let s = duration.as_secs();
    let two = |large: u64, large_unit: &str, small: u64, small_unit: &str| {
        if small == 0 {
            format!("{large} {large_unit}")
        } else {
            format!("{large} {large_unit} {small} {small_unit}")
        }
    };
    match s {
        0 if us == 0 => "0 ms".into(),
        0 if us < 1_000 => format!("{us} us"),
        0 => format!("{} ms", three_digits(us as f64 / 1e3)),
        1..60 => format!("{} s", three_digits(duration.as_secs_f64())),
        60..3_600 => two(s / 60, "min", s % 60, "s"),
        3_600..86_400 => two(s / 3_600, "h", s % 3_600 / 60, "min"),
        _ => two(s / 86_400, "d", s % 86_400 / 3_600, "h"),
    }
}

/// A duration in milliseconds.
pub fn ms(ms: u64) -> String {
    duration(Duration::from_millis(ms))
}

/// A duration in nanoseconds.
pub fn ns(ns: u64) -> String {
    duration(Duration::from_nanos(ns))
}

/// A time of a wall clock, in milliseconds since the Unix epoch: `2023-11-14T22:13:20Z`.
pub fn utc(unix_ms: u64) -> String {
    time::OffsetDateTime::from_unix_timestamp((unix_ms / 1000) as i64).map_or_else(
        |_| format!("{unix_ms} ms after 1970"),
        |t| {
            let (h, m, s) = t.to_hms();
            format!("{}T{h:02}:{m:02}:{s:02}Z", t.date())
        },
    )
}

/// `1 packet`, `2 packets`.
pub fn count(number: u64, thing: &str) -> String {
    if number == 1 { format!("1 {thing}") } else { format!("{number} {thing}s") }
}

/// An error and its causes, each said once: many of our errors name their cause themselves.
pub fn chain(error: &anyhow::Error) -> String {
    error.chain().fold(String::new(), |mut text, cause| {
        let cause = cause.to_string();
        if !text.contains(&cause) {
            if !text.is_empty() {
                text += ": ";
            }
            text += &cause;
        }
        text
    })
}

fn three_digits(value: f64) -> String {
    let digits = if value >= 99.95 {
        0
    } else if value >= 9.995 {
        1
    } else {
        2
    };
    let text = format!("{value:.digits$}");
    if text.contains('.') {
        text.trim_end_matches('0').trim_end_matches('.').to_owned()
    } else {
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_short() {
        for (number, text) in [
            (0, "0 B"),
            (1023, "1023 B"),
            (1024, "1 KiB"),
            (1_048_575, "1 MiB"),
            (1_300_000, "1.24 MiB"),
            (256 << 20, "256 MiB"),
            (u64::MAX, "16 EiB"),
        ] {
            assert_eq!(bytes(number), text);
        }
        assert_eq!(rate(12 << 20), "12 MiB/s");
    }

    #[test]
    fn a_cause_is_said_once() {
        let io = || std::io::Error::other("no space");
        let plain = anyhow::Error::new(io()).context("cannot write x");
        assert_eq!(chain(&plain), "cannot write x: no space");
        let named = anyhow::Error::new(io()).context("cannot write x (no space)");
        assert_eq!(chain(&named), "cannot write x (no space)");
    }

    #[test]
    fn times_have_two_units_at_most() {
        for (number, text) in [
            (0, "0 ms"),
            (850, "850 us"),
            (48_100, "48.1 ms"),
            (1_500_000, "1.5 s"),
            (59_960_000, "60 s"),
            (60_000_000, "1 min"),
            (200_000_000, "3 min 20 s"),
            (18_120_000_000, "5 h 2 min"),
            (273_600_000_000, "3 d 4 h"),
        ] {
            assert_eq!(duration(Duration::from_micros(number)), text);
        }
        assert_eq!(utc(1_700_000_000_123), "2023-11-14T22:13:20Z");
        assert_eq!(count(1, "write"), "1 write");
        assert_eq!(count(0, "write"), "0 writes");
    }
}
