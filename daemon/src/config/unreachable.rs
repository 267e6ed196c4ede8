//! `when_unreachable`: what a group does while the backup cannot be reached.

use std::borrow::Cow;
use std::fmt;
use std::time::Duration;

use tidelock_config::{FromToml, Value, Wrong, format_duration};

/// The shortest time: the link's own round trips, and beacons, are no outage.
const AFTER_MIN: Duration = Duration::from_secs(1);
const AFTER_MAX: Duration = Duration::from_secs(86_400);

/// What a group does while the backup cannot be reached.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum WhenUnreachable {
    /// Packets wait, and when the backlog is full, writes do.
    #[default]
    Hold,
    /// When something has waited for so long, nothing is held until the backup has caught up: clients
    /// may come to know what a disaster undoes.
    AsyncAfter(Duration),
}

impl WhenUnreachable {
    /// For how long packets wait at most, in milliseconds; `None`: for ever.
    #[must_use]
    pub fn after_ms(self) -> Option<u64> {
        match self {
            Self::Hold => None,
            Self::AsyncAfter(after) => Some(after.as_millis() as u64),
        }
    }
}

/// As in the configuration.
impl fmt::Display for WhenUnreachable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Hold => f.write_str("hold"),
            Self::AsyncAfter(after) => write!(f, "async after {}", format_duration(*after)),
        }
    }
}

impl FromToml for WhenUnreachable {
    fn wanted() -> Cow<'static, str> {
        "\"hold\" or \"async after 30s\"".into()
    }

    fn from_toml(value: &Value<'_>) -> Result<Self, Wrong> {
        let Value::String(text) = value else { return Err(value.is_not(&Self::wanted())) };
        let words: Vec<&str> = text.split_whitespace().collect();
        let after = match words[..] {
            ["hold"] => return Ok(Self::Hold),
            ["async", "after", after] => after,
            ["async"] => {
                return Err(Wrong {
                    what: "it must be said after how long".into(),
                    instead: Some("\"async after 30s\"".into()),
                });
            }
            _ => return Err(Wrong::new(format!("\"{text}\" is none of the policies"))),
        };
        let after = Duration::from_toml(&Value::String(after))?;
        if !(AFTER_MIN..=AFTER_MAX).contains(&after) {
            return Err(Wrong {
                what: format!(
                    "{} is not between {} and {}",
                    format_duration(after),
                    format_duration(AFTER_MIN),
                    format_duration(AFTER_MAX)
                ),
                instead: Some("\"async after 30s\"".into()),
            });
        }
        Ok(Self::AsyncAfter(after))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Result<WhenUnreachable, Wrong> {
        WhenUnreachable::from_toml(&Value::String(text))
    }

    #[test]
    fn what_is_written_is_what_is_read() {
        for text in ["hold", "async after 1s", "async after 30s", "async after 2m"] {
            assert_eq!(read(text).unwrap().to_string(), text);
        }
        let after = WhenUnreachable::AsyncAfter(Duration::from_millis(1_500));
        assert_eq!((read("async  after 1.5s").unwrap(), after.after_ms()), (after, Some(1_500)));
        assert_eq!(WhenUnreachable::Hold.after_ms(), None);
    }

    #[test]
    fn what_is_wrong_is_said_with_what_to_write() {
        for (text, what) in [
            ("async", "it must be said after how long"),
            ("open", "\"open\" is none of the policies"),
            ("async after", "\"async after\" is none of the policies"),
            ("async after 30", "\"30\" is not a duration"),
            ("async after 10ms", "10ms is not between 1s and 1d"),
            ("async after 2d", "2d is not between 1s and 1d"),
        ] {
            assert_eq!(read(text).unwrap_err().what, what);
        }
        assert!(WhenUnreachable::from_toml(&Value::Boolean(true)).is_err());
    }
}
