//! How things are told to people.

use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;

/// A time as people in different places read it.
#[must_use]
pub fn utc(unix_ms: u64) -> String {
    OffsetDateTime::from_unix_timestamp((unix_ms / 1000) as i64)
        .ok()
        .and_then(|time| time.format(&Rfc3339).ok())
        .unwrap_or_else(|| format!("{unix_ms} ms after 1970"))
}

/// The same to the millisecond, as a point in time is asked for.
#[must_use]
pub fn utc_ms(unix_ms: u64) -> String {
    OffsetDateTime::from_unix_timestamp((unix_ms / 1000) as i64).ok().map_or_else(
        || format!("{unix_ms} ms after 1970"),
        |t| {
            let (date, ms) = (t.date(), unix_ms % 1000);
            let (h, m, s) = t.to_hms();
            format!("{date}T{h:02}:{m:02}:{s:02}.{ms:03}Z")
        },
    )
}

/// A number of bytes.
#[must_use]
pub fn bytes(bytes: u64) -> String {
    const UNITS: [&str; 5] = ["KiB", "MiB", "GiB", "TiB", "PiB"];
    if bytes < 1024 {
        return format!("{bytes} B");
    }
    let mut value = bytes as f64 / 1024.0;
    let mut unit = 0;
    while value >= 1024.0 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    format!("{value:.1} {}", UNITS[unit])
}

#[cfg(test)]
mod tests {
    #[test]
    fn people_can_read_it() {
        assert_eq!(super::utc(1_700_000_000_123), "2023-11-14T22:13:20Z");
        assert_eq!(super::utc_ms(1_700_000_000_023), "2023-11-14T22:13:20.023Z");
        assert_eq!(super::bytes(1023), "1023 B");
        assert_eq!(super::bytes(1536 << 20), "1.5 GiB");
    }
}
