//! Points in time as people write them: one parser for every command that takes one, and the point of a group that
//! each stands for.
//!
//! Invariant: what [`When`] prints is parsed to the same. Times are cut to the millisecond, downwards: a view
//! never shows anything later than was asked for.

use crate::group::NamedMark;
use crate::history::{At, History, PastError, Point};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;
use thiserror::Error;
use tidelock_protocol::bounds;
use tidelock_protocol::hlc::Hlc;
use tidelock_protocol::ids::{Seq, WriterId};
use tidelock_protocol::vector::CountVector;
use tidelock_storage::StorageFile;
use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;

/// What is accepted, for help texts and errors.
pub const ACCEPTED: &str = "latest or oldest; a time like 2026-11-22T13:05:00Z or \"2026-11-22 13:05\" (UTC unless it has a \
     zone); a time before now like -5min, -90s, -1h30min or now-2d; hlc:L.C; seqs by member like db=120,web=7; \
     bookmark:NAME";

/// A point in time, not looked up yet.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum When {
    /// The newest that there is.
    Latest,
    /// The oldest in the window.
    Oldest,
    /// A wall clock's time, in milliseconds since the Unix epoch.
    WallMs(u64),
    /// So many milliseconds before now.
    BeforeNowMs(u64),
    /// A time of the hybrid logical clock.
    Hlc(Hlc),
    /// Not after this seq of each named member; the others are not limited.
    Seqs(BTreeMap<String, u64>),
    /// A bookmark's or a pin's point.
    Bookmark(String),
}

/// Why a text is not a point in time.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[error("`{text}` is not a point in time: {reason}. Accepted are: {ACCEPTED}")]
pub struct WhenError {
    /// What was written.
    pub text: String,
    /// What is wrong with it.
    pub reason: String,
}

/// Why a group has no point for a text.
#[derive(Debug, Error)]
pub enum FindError {
    /// No mark has this name.
    #[error("there is no bookmark or pin {name}; there are: {known}")]
    NoMark {
        /// The name that was asked for.
        name: String,
        /// Names of the marks that there are.
        known: String,
    },
    /// No member with disks has this name.
    #[error("{name} is not a member with disks; those are: {known}")]
    NoMember {
        /// The name that was asked for.
        name: String,
        /// Names of the members with disks.
        known: String,
    },
    /// The history does not have it.
    #[error(transparent)]
    Past(#[from] PastError),
}

impl When {
    /// The point of a group's history, with the marks that are on record.
    pub fn find<F: StorageFile>(
        &self,
        history: &History<F>,
        marks: &[NamedMark],
    ) -> Result<Point, FindError> {
        let at = match self {
            When::Latest => At::Latest,
            When::Oldest => return Ok(history.oldest()?),
            When::WallMs(ms) => At::WallMs(*ms),
            When::BeforeNowMs(ms) => At::WallMs(history.now_ms().saturating_sub(*ms)),
            When::Hlc(hlc) => At::Hlc(*hlc),
            When::Seqs(seqs) => At::Vector(vector(history, seqs)?),
            When::Bookmark(name) => {
                let found = marks.iter().find(|mark| mark.name == *name).ok_or_else(|| {
                    let known: Vec<_> = marks.iter().map(|mark| mark.name.as_str()).collect();
                    let known = if known.is_empty() { "none".into() } else { known.join(", ") };
                    FindError::NoMark { name: name.clone(), known }
                })?;
                return Ok(history.locate(&found.mark.point)?);
            }
        };
        Ok(history.resolve(&at)?)
    }
}

/// Members that are not named are not limited.
fn vector<F: StorageFile>(
    history: &History<F>,
    seqs: &BTreeMap<String, u64>,
) -> Result<CountVector, FindError> {
    let writers = &history.manifest().writers;
    if let Some(unknown) = seqs.keys().find(|name| !writers.contains(name)) {
        return Err(FindError::NoMember { name: unknown.clone(), known: writers.join(", ") });
    }
    let newest = history.newest()?.cut;
    let entry = |(i, name): (usize, &String)| {
        let writer = WriterId(i as u16);
        (writer, seqs.get(name).map_or(newest.get(writer), |seq| Seq(*seq)))
    };
    Ok(writers.iter().enumerate().map(entry).collect())
}

impl FromStr for When {
    type Err = WhenError;

    fn from_str(text: &str) -> Result<Self, WhenError> {
        let text = text.trim();
        parse(text).map_err(|reason| WhenError { text: text.to_owned(), reason })
    }
}

fn parse(text: &str) -> Result<When, String> {
    if text.is_empty() {
        return Err("nothing is written".into());
    }
    if text == "latest" || text == "now" {
        return Ok(When::Latest);
    }
    if text == "oldest" {
        return Ok(When::Oldest);
    }
    if let Some(name) = text.strip_prefix("bookmark:") {
        if !bounds::is_name(name) {
            return Err(format!("{name:?} cannot be a bookmark's name"));
        }
        return Ok(When::Bookmark(name.to_owned()));
    }
    if let Some(hlc) = text.strip_prefix("hlc:") {
        return parse_hlc(hlc).map(When::Hlc);
    }
    if text.contains('=') {
        return parse_seqs(text).map(When::Seqs);
    }
    if let Some(span) = text.strip_prefix("now-").or_else(|| text.strip_prefix('-')) {
        return parse_span_ms(span).map(When::BeforeNowMs);
    }
    if text.starts_with(|c: char| c.is_ascii_digit()) {
        return parse_wall_ms(text).map(When::WallMs);
    }
    if bounds::is_name(text) {
        return Err(format!("for a bookmark write bookmark:{text}"));
    }
    Err("it begins like none of them".into())
}

fn parse_hlc(text: &str) -> Result<Hlc, String> {
    let wrong =
        || "a hybrid logical clock's time is L.C, milliseconds since 1970 and a count".to_owned();
    let (physical, logical) = text.split_once('.').ok_or_else(wrong)?;
    let physical_ms = digits(physical).filter(|ms| *ms < 1 << 48).ok_or_else(wrong)?;
    let logical = digits(logical).and_then(|c| u16::try_from(c).ok()).ok_or_else(wrong)?;
    Ok(Hlc::new(physical_ms, logical))
}

fn parse_seqs(text: &str) -> Result<BTreeMap<String, u64>, String> {
    let mut seqs = BTreeMap::new();
    for part in text.split(',') {
        let part = part.trim();
        let (member, seq) =
            part.split_once('=').ok_or_else(|| format!("{part:?} is not like db=120"))?;
        if !bounds::is_name(member) {
            return Err(format!("{member:?} cannot be a member's name"));
        }
        let seq = digits(seq).ok_or_else(|| format!("{seq:?} is not a seq"))?;
        if seqs.insert(member.to_owned(), seq).is_some() {
            return Err(format!("{member} is named twice"));
        }
    }
    Ok(seqs)
}

/// A span like `90s`, `5min` or `1h30min`, in milliseconds.
pub fn parse_span_ms(text: &str) -> Result<u64, String> {
    let example = "a span of time is like 90s, 5min, 1h30min or 2d";
    let mut rest = text;
    let mut total_ms = 0u64;
    while !rest.is_empty() || text.is_empty() {
        let numbers = rest.len() - rest.trim_start_matches(|c: char| c.is_ascii_digit()).len();
        let (number, after) = rest.split_at(numbers);
        let units = after.len() - after.trim_start_matches(|c: char| c.is_ascii_alphabetic()).len();
        let (unit, after) = after.split_at(units);
        let unit_ms = match unit {
            "ms" => 1,
            "s" | "sec" => 1000,
            "min" | "m" => 60_000,
            "h" => 3_600_000,
            "d" => 86_400_000,
            "" => return Err(format!("a unit is missing: {example}")),
            other => return Err(format!("{other:?} is not ms, s, min, h or d: {example}")),
        };
        let number = digits(number).ok_or_else(|| example.to_owned())?;
        total_ms = number
            .checked_mul(unit_ms)
            .and_then(|ms| total_ms.checked_add(ms))
            .ok_or("that is longer than any journal")?;
        rest = after;
    }
    Ok(total_ms)
}

fn parse_wall_ms(text: &str) -> Result<u64, String> {
    let example = "a time is like 2026-11-22T13:05:00Z, seconds and zone may be left out";
    if !text.is_ascii() {
        return Err(example.into());
    }
    let (date, rest) = text.split_at(text.len().min(10));
    let rest = rest.strip_prefix(['T', 't', ' ', '_']).unwrap_or(rest);
    let zone_at = rest.find(['Z', 'z', '+', '-']).unwrap_or(rest.len());
    let (clock, zone) = rest.split_at(zone_at);
    let clock = match clock.matches(':').count() {
        _ if clock.is_empty() => "00:00:00".to_owned(),
        1 => format!("{clock}:00"),
        _ => clock.to_owned(),
    };
    let zone = match zone.len() {
        0 => "Z".to_owned(),
        // +0100
        5 => format!("{}:{}", &zone[..3], &zone[3..]),
        _ => zone.to_owned(),
    };
    let time = OffsetDateTime::parse(&format!("{date}T{clock}{zone}"), &Rfc3339)
        .map_err(|_| example.to_owned())?;
    let ms = time.unix_timestamp_nanos().div_euclid(1_000_000);
    u64::try_from(ms).map_err(|_| "it is before 1970".into())
}

/// A number of digits only: no sign, no space.
fn digits(text: &str) -> Option<u64> {
    let plain = !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
    plain.then(|| text.parse().ok())?
}

impl fmt::Display for When {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            When::Latest => f.write_str("latest"),
            When::Oldest => f.write_str("oldest"),
            When::WallMs(ms) => f.write_str(&crate::text::utc_ms(*ms)),
            When::BeforeNowMs(ms) => write!(f, "-{ms}ms"),
            When::Hlc(hlc) => write!(f, "hlc:{hlc}"),
            When::Seqs(seqs) => {
                let parts: Vec<_> =
                    seqs.iter().map(|(member, seq)| format!("{member}={seq}")).collect();
                f.write_str(&parts.join(","))
            }
            When::Bookmark(name) => write!(f, "bookmark:{name}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn ok(text: &str) -> When {
        text.parse().unwrap_or_else(|e| panic!("{e}"))
    }

    fn reason(text: &str) -> String {
        let error = text.parse::<When>().unwrap_err();
        assert!(error.to_string().contains("bookmark:NAME"), "{error}");
        error.reason
    }

    #[test]
    fn every_form_is_read() {
        let noon_ms = 1_795_348_800_000; // 2026-11-22T12:00:00Z
        for text in [
            "2026-11-22T12:00:00Z",
            "2026-11-22 12:00",
            "2026-11-22_12:00:00",
            "2026-11-22T13:00:00+01:00",
            "2026-11-22T13:00+0100",
            "2026-11-22t06:30:00-05:30",
            " 2026-11-22T12:00:00.0004Z ",
        ] {
            assert_eq!(ok(text), When::WallMs(noon_ms), "{text}");
        }
        assert_eq!(ok("2026-11-22"), When::WallMs(noon_ms - 12 * 3_600_000));
        assert_eq!(ok("2026-11-22 12:00:00.0579"), When::WallMs(noon_ms + 57), "downwards");
        assert_eq!(ok("-5min"), When::BeforeNowMs(300_000));
        assert_eq!(ok("-5m"), When::BeforeNowMs(300_000), "as in configuration files");
        assert_eq!(ok("-90s"), When::BeforeNowMs(90_000));
        assert_eq!(ok("now-1h30min5s7ms"), When::BeforeNowMs(5_405_007));
        assert_eq!(ok("hlc:1795348800000.3"), When::Hlc(Hlc::new(noon_ms, 3)));
        let seqs = BTreeMap::from([("db".to_owned(), 120), ("web-1".to_owned(), 7)]);
        assert_eq!(ok("db=120, web-1=7"), When::Seqs(seqs));
        assert_eq!(ok("bookmark:before-deploy"), When::Bookmark("before-deploy".into()));
        assert_eq!((ok("latest"), ok("oldest")), (When::Latest, When::Oldest));
    }

    #[test]
    fn what_is_wrong_is_said() {
        for (text, part) in [
            ("", "nothing"),
            ("before-deploy", "write bookmark:before-deploy"),
            ("bookmark:../x", "cannot be a bookmark's name"),
            ("-5", "a unit is missing"),
            ("-", "a unit is missing"),
            ("-5parsec", "not ms, s, min, h or d"),
            ("-99999999999999999999d", "a span"),
            ("-999999999999999d", "longer than any journal"),
            ("2026-13-22", "a time is like"),
            ("2026-11-22T25:00", "a time is like"),
            ("2026-11-22T12:00:00+99", "a time is like"),
            ("1950-01-01", "before 1970"),
            ("hlc:7", "L.C"),
            ("hlc:7.70000", "L.C"),
            ("hlc:281474976710656.0", "L.C"),
            ("db=", "not a seq"),
            ("db=-1", "not a seq"),
            ("db=1,db=2", "twice"),
            ("db=1,web", "not like db=120"),
            ("=1", "cannot be a member's name"),
            ("?", "none of them"),
        ] {
            let reason = reason(text);
            assert!(reason.contains(part), "{text}: {reason}");
        }
    }

    fn any_when() -> impl Strategy<Value = When> {
        let name = "[a-z][a-z0-9._-]{0,20}";
        prop_oneof![
            Just(When::Latest),
            Just(When::Oldest),
            (0u64..4_000_000_000_000).prop_map(When::WallMs),
            any::<u64>().prop_map(When::BeforeNowMs),
            (0u64..1 << 48, any::<u16>()).prop_map(|(l, c)| When::Hlc(Hlc::new(l, c))),
            prop::collection::btree_map(name, any::<u64>(), 1..5).prop_map(When::Seqs),
            name.prop_map(When::Bookmark),
        ]
    }

    proptest! {
        #[test]
        fn what_is_printed_is_read_again(when in any_when()) {
            prop_assert_eq!(&ok(&when.to_string()), &when);
            let json = serde_json::to_string(&when).unwrap();
            prop_assert_eq!(serde_json::from_str::<When>(&json).unwrap(), when);
        }

        #[test]
        fn a_zone_moves_the_clock_and_not_the_time(
            ms in 86_400_000u64..4_000_000_000_000, hours in -12i8..=14, minutes in 0i8..60,
        ) {
            let offset = time::UtcOffset::from_hms(hours, minutes * hours.signum(), 0).unwrap();
            let time = OffsetDateTime::from_unix_timestamp_nanos(i128::from(ms) * 1_000_000).unwrap();
            let text = time.to_offset(offset).format(&Rfc3339).unwrap();
            prop_assert_eq!(ok(&text), When::WallMs(ms));
        }

        #[test]
        fn no_text_does_any_harm(text in "\\PC{0,40}", tail in "[-0-9TZ:.=a-z+ ]{0,30}") {
            for text in [text, format!("2026-11-22{tail}"), format!("-{tail}"), tail] {
                if let Err(error) = text.parse::<When>() {
                    prop_assert!(error.to_string().contains("Accepted are"));
                }
            }
        }
    }
}
