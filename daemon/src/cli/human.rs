//! Numbers as people read them.

use std::time::Duration;
use tidelock_daemon_core::words::three_digits;

pub use tidelock_daemon_core::words::{duration, ms, utc};

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

/// A duration in nanoseconds.
pub fn ns(ns: u64) -> String {
    duration(Duration::from_nanos(ns))
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
    fn one_thing_is_no_plural() {
        assert_eq!(count(1, "write"), "1 write");
        assert_eq!(count(0, "write"), "0 writes");
    }
}
