//! Durations, sizes and rates with their units: a bare number is refused, because what it counts
//! would have to be guessed.

use std::borrow::Cow;
use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use crate::value::{FromToml, Value, Wrong, text};

const DURATION_UNITS: [(&str, u64); 6] = [
    ("us", 1),
    ("ms", 1_000),
    ("s", 1_000_000),
    ("m", 60_000_000),
    ("h", 3_600_000_000),
    ("d", 86_400_000_000),
];

const SIZE_UNITS: [(&str, u64); 9] = [
    ("B", 1),
    ("KiB", 1 << 10),
    ("MiB", 1 << 20),
    ("GiB", 1 << 30),
    ("TiB", 1 << 40),
    ("kB", 1_000),
    ("MB", 1_000_000),
    ("GB", 1_000_000_000),
    ("TB", 1_000_000_000_000),
];

/// Bits on a wire, in bytes per second. 8 bits make a byte, so the factors are an eighth.
const BIT_RATE_UNITS: [(&str, u64); 3] =
    [("kbit/s", 125), ("Mbit/s", 125_000), ("Gbit/s", 125_000_000)];

/// The number before the unit, and the unit.
fn split(text: &str) -> Option<(&str, &str)> {
    let at = text.find(|c: char| !(c.is_ascii_digit() || c == '.'))?;
    let (number, unit) = text.split_at(at);
    (!number.is_empty()).then_some((number, unit.trim_start()))
}

/// `number` × `factor`, exact to the last digit, fractions below one dropped.
fn scale(number: &str, factor: u64) -> Option<u64> {
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    if number.ends_with('.') || fraction.len() > 9 || fraction.contains('.') {
        return None;
    }
    let whole = whole.parse::<u64>().ok()?.checked_mul(factor)?;
    if fraction.is_empty() {
        return Some(whole);
    }
    let power = 10u128.pow(u32::try_from(fraction.len()).ok()?);
    let part = u128::from(fraction.parse::<u64>().ok()?) * u128::from(factor) / power;
    whole.checked_add(u64::try_from(part).ok()?)
}

fn factor(units: &[(&str, u64)], unit: &str) -> Option<u64> {
    units.iter().find(|(name, _)| *name == unit).map(|(_, factor)| *factor)
}

pub(crate) fn parse_duration(text: &str) -> Result<Duration, Wrong> {
    let micros = split(text)
        .and_then(|(number, unit)| scale(number, factor(&DURATION_UNITS, unit)?))
        .ok_or_else(|| Wrong::new(format!("\"{text}\" is not a duration")))?;
    Ok(Duration::from_micros(micros))
}

/// A duration of a command line, written as in a configuration file.
pub fn duration_argument(text: &str) -> Result<Duration, String> {
    parse_duration(text).map_err(|wrong| format!("{}: write one as 90s, 5m, 1h or 7d", wrong.what))
}

/// A duration as it would be written in a configuration file.
#[must_use]
pub fn format_duration(duration: Duration) -> String {
    let micros = duration.as_micros();
    let fits = |unit: &&(&str, u64)| micros.is_multiple_of(u128::from(unit.1));
    match DURATION_UNITS.iter().rev().find(fits) {
        Some((unit, factor)) if micros > 0 => format!("{}{unit}", micros / u128::from(*factor)),
        _ => "0s".into(),
    }
}

/// A number of bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Size {
    /// Bytes.
    pub bytes: u64,
}

impl Size {
    /// So many MiB.
    #[must_use]
    pub const fn mib(mib: u64) -> Self {
        Self { bytes: mib << 20 }
    }
}

/// As it would be written in a configuration file: the largest unit without a fraction.
impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let fits = |unit: &&(&str, u64)| self.bytes != 0 && self.bytes.is_multiple_of(unit.1);
        let (unit, factor) = SIZE_UNITS[..5].iter().rev().find(fits).unwrap_or(&SIZE_UNITS[0]);
        write!(f, "{}{unit}", self.bytes / factor)
    }
}

impl FromToml for Size {
    fn wanted() -> Cow<'static, str> {
        "a size with its unit, such as \"512KiB\", \"256MiB\" or \"40GiB\"".into()
    }

    fn from_toml(value: &Value<'_>) -> Result<Self, Wrong> {
        if let Value::Integer(number) = value {
            return Err(Wrong {
                what: "a size needs its unit".into(),
                instead: Some(format!("\"{number}MiB\" or \"{number}B\"")),
            });
        }
        parse_size(text::<Self>(value)?)
    }
}

fn parse_size(text: &str) -> Result<Size, Wrong> {
    let (number, unit) =
        split(text).ok_or_else(|| Wrong::new(format!("\"{text}\" is not a size")))?;
    let Some(factor) = factor(&SIZE_UNITS, unit) else {
        return Err(Wrong {
            what: format!("\"{text}\" is not a size"),
            instead: nearest_unit(unit).map(|unit| format!("\"{number}{unit}\"")),
        });
    };
    let bytes = scale(number, factor);
    bytes
        .map(|bytes| Size { bytes })
        .ok_or_else(|| Wrong::new(format!("\"{text}\" is not a size, or more than 2^64 bytes")))
}

/// As on a command line: the same units.
impl FromStr for Size {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        parse_size(text).map_err(|wrong| {
            let instead = wrong.instead.unwrap_or_else(|| Self::wanted().into_owned());
            format!("{}; write {instead}", wrong.what)
        })
    }
}

/// `M`, `mb`, `Mib`, ... all mean MiB; a `B` alone is never guessed.
fn nearest_unit(unit: &str) -> Option<&'static str> {
    let binary = &SIZE_UNITS[1..5];
    let letter = unit.chars().next()?.to_ascii_uppercase();
    binary.iter().find(|(name, _)| name.starts_with(letter)).map(|(name, _)| *name)
}

/// A number of bytes per second.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Rate {
    /// Bytes per second.
    pub bytes_per_s: u64,
}

impl fmt::Display for Rate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/s", Size { bytes: self.bytes_per_s })
    }
}

impl FromToml for Rate {
    fn wanted() -> Cow<'static, str> {
        "a rate such as \"50MiB/s\" or \"400Mbit/s\"".into()
    }

    fn from_toml(value: &Value<'_>) -> Result<Self, Wrong> {
        let text = text::<Self>(value)?;
        let wrong = || Wrong::new(format!("\"{text}\" is not a rate"));
        let (number, unit) = split(text).ok_or_else(wrong)?;
        let bytes = unit.strip_suffix("/s").and_then(|unit| factor(&SIZE_UNITS, unit));
        let factor = bytes.or_else(|| factor(&BIT_RATE_UNITS, unit));
        let bytes_per_s = factor.and_then(|factor| scale(number, factor)).ok_or_else(wrong)?;
        Ok(Self { bytes_per_s })
    }
}

/// A rate of a command line, written as in a configuration file.
pub fn rate_argument(text: &str) -> Result<Rate, String> {
    let written = Rate::from_toml(&Value::String(text));
    written.map_err(|wrong| format!("{}: write one as 50MiB/s or 400Mbit/s", wrong.what))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn size(text: &str) -> Result<u64, Wrong> {
        Size::from_toml(&Value::String(text)).map(|size| size.bytes)
    }

    #[test]
    fn sizes() {
        assert_eq!(size("256MiB"), Ok(256 << 20));
        assert_eq!(size("1.5 GiB"), Ok(3 << 29));
        assert_eq!(size("500GB"), Ok(500_000_000_000));
        assert_eq!(size("0B"), Ok(0));
        for (text, instead) in [
            ("256M", Some("\"256MiB\"")),
            ("4k", Some("\"4KiB\"")),
            ("1Gb", Some("\"1GiB\"")),
            ("17179869184GiB", None),
            ("12", None),
            ("MiB", None),
            ("1..5MiB", None),
            ("-1MiB", None),
        ] {
            assert_eq!(size(text).unwrap_err().instead.as_deref(), instead, "{text}");
        }
        assert_eq!("2GiB".parse(), Ok(Size::mib(2048)));
        assert!("2G".parse::<Size>().unwrap_err().ends_with("write \"2GiB\""));
        assert!("2".parse::<Size>().unwrap_err().contains("with its unit"));
    }

    #[test]
    fn durations() {
        for (text, ms) in [("250ms", 250), ("10s", 10_000), ("1.5s", 1_500), ("2m", 120_000)] {
            assert_eq!(parse_duration(text).unwrap(), Duration::from_millis(ms), "{text}");
        }
        for text in ["", "10", "s", "1e3s", "10 seconds", "-1s", "99999999999999999999d"] {
            assert!(parse_duration(text).is_err(), "{text}");
        }
        let number = Duration::from_toml(&Value::Integer(10)).unwrap_err();
        assert_eq!(number.instead.unwrap(), "\"10s\" or \"10ms\"");
    }

    #[test]
    fn rates() {
        let rate = |text| Rate::from_toml(&Value::String(text)).map(|rate| rate.bytes_per_s);
        assert_eq!(rate("50MiB/s"), Ok(50 << 20));
        assert_eq!(rate("400Mbit/s"), Ok(50_000_000));
        assert!(rate("50MiB").is_err());
        assert!(rate("50").is_err());
        assert_eq!(rate_argument("2MiB/s").unwrap().bytes_per_s, 2 << 20);
        assert!(rate_argument("2").unwrap_err().contains("50MiB/s"));
    }

    #[test]
    fn what_is_shown_can_be_written() {
        for text in ["10s", "250ms", "3us", "2h", "1d"] {
            assert_eq!(format_duration(parse_duration(text).unwrap()), text);
        }
        for text in ["256MiB", "1000B", "3TiB", "0B"] {
            assert_eq!(Size { bytes: size(text).unwrap() }.to_string(), text);
        }
    }
}
