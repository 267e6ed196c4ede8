//! Times and durations as people read them.

use std::time::Duration;

/// `850 us`, `48 ms`, `1.5 s`, `3 min 20 s`, `5 h 2 min`, `3 d 4 h`.
#[must_use]
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
#[must_use]
pub fn ms(ms: u64) -> String {
    duration(Duration::from_millis(ms))
}

/// A time of a wall clock, in milliseconds since the Unix epoch: `2023-11-14T22:13:20Z`.
#[must_use]
pub fn utc(unix_ms: u64) -> String {
    time::OffsetDateTime::from_unix_timestamp((unix_ms / 1000) as i64).map_or_else(
        |_| format!("{unix_ms} ms after 1970"),
        |t| {
            let (h, m, s) = t.to_hms();
            format!("{}T{h:02}:{m:02}:{s:02}Z", t.date())
        },
    )
}

/// A number with three digits at least, and no zeros behind its point.
#[must_use]
pub fn three_digits(value: f64) -> String {
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
    }
}
