//! Values of the file and what they are turned into.

use std::borrow::Cow;
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

use toml::de::DeValue;

use crate::units;

/// A value as it stands in the file.
#[derive(Clone, Debug)]
pub enum Value<'v> {
    /// `"text"`.
    String(&'v str),
    /// `1`, if it fits.
    Integer(i128),
    /// `true` or `false`.
    Boolean(bool),
    /// `[1, 2]`.
    Array(Vec<Value<'v>>),
    /// Something that no key of ours takes.
    Other(&'static str),
}

impl<'v> Value<'v> {
    pub(crate) fn new(value: &'v DeValue<'v>) -> Self {
        match value {
            DeValue::String(text) => Value::String(text),
            DeValue::Integer(number) => i128::from_str_radix(number.as_str(), number.radix())
                .map_or(Value::Other("a number out of range"), Value::Integer),
            DeValue::Boolean(flag) => Value::Boolean(*flag),
            DeValue::Array(items) => {
                Value::Array(items.iter().map(|item| Value::new(item.get_ref())).collect())
            }
            DeValue::Float(_) => Value::Other("a number with a fraction"),
            DeValue::Datetime(_) => Value::Other("a date"),
            DeValue::Table(_) => Value::Other("a section"),
        }
    }

    /// What it is, for people.
    #[must_use]
    pub fn kind(&self) -> &'static str {
        match self {
            Value::String(_) => "a string",
            Value::Integer(_) => "a number",
            Value::Boolean(_) => "true or false",
            Value::Array(_) => "a list",
            Value::Other(kind) => kind,
        }
    }

    /// The error that this is not what is wanted.
    #[must_use]
    pub fn is_not(&self, wanted: &str) -> Wrong {
        Wrong { what: format!("this is {}", self.kind()), instead: Some(wanted.to_owned()) }
    }
}

/// Why a value cannot be taken.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Wrong {
    /// What is wrong.
    pub what: String,
    /// What to write instead; what the type wants in general if there is nothing better.
    pub instead: Option<String>,
}

impl Wrong {
    /// With nothing better to offer than what the type wants.
    #[must_use]
    pub fn new(what: impl Into<String>) -> Self {
        Self { what: what.into(), instead: None }
    }
}

/// What a value of the file can be turned into.
pub trait FromToml: Sized {
    /// What to write, with an example.
    fn wanted() -> Cow<'static, str>;
    /// The conversion.
    fn from_toml(value: &Value<'_>) -> Result<Self, Wrong>;
}

/// The text of a string value, for conversions that start from one.
pub(crate) fn text<'v, T: FromToml>(value: &'v Value<'_>) -> Result<&'v str, Wrong> {
    match value {
        Value::String(text) => Ok(text),
        other => Err(other.is_not(&T::wanted())),
    }
}

impl FromToml for String {
    fn wanted() -> Cow<'static, str> {
        "text in quotes".into()
    }

    fn from_toml(value: &Value<'_>) -> Result<Self, Wrong> {
        match text::<Self>(value)? {
            "" => Err(Wrong::new("it is empty")),
            text => Ok(text.to_owned()),
        }
    }
}

impl FromToml for bool {
    fn wanted() -> Cow<'static, str> {
        "true or false (without quotes)".into()
    }

    fn from_toml(value: &Value<'_>) -> Result<Self, Wrong> {
        match value {
            Value::Boolean(flag) => Ok(*flag),
            other => Err(other.is_not(&Self::wanted())),
        }
    }
}

impl FromToml for PathBuf {
    fn wanted() -> Cow<'static, str> {
        "an absolute path such as \"/etc/tidelock/ca.pem\"".into()
    }

    fn from_toml(value: &Value<'_>) -> Result<Self, Wrong> {
        let path = PathBuf::from(text::<Self>(value)?);
        if path.is_absolute() && !path.as_os_str().as_encoded_bytes().contains(&0) {
            return Ok(path);
        }
        // A daemon's working directory is nothing that an operator should have to know.
        Err(Wrong::new(format!("\"{}\" is not an absolute path", path.display())))
    }
}

impl FromToml for IpAddr {
    fn wanted() -> Cow<'static, str> {
        "an address such as \"10.0.0.1\" or \"fd00::1\"".into()
    }

    fn from_toml(value: &Value<'_>) -> Result<Self, Wrong> {
        let text = text::<Self>(value)?;
        text.parse().map_err(|_| Wrong::new(format!("\"{text}\" is not an IP address")))
    }
}

impl FromToml for SocketAddr {
    fn wanted() -> Cow<'static, str> {
        "an address and a port such as \"127.0.0.1:9641\" or \"[::1]:9641\"".into()
    }

    fn from_toml(value: &Value<'_>) -> Result<Self, Wrong> {
        let text = text::<Self>(value)?;
        text.parse().map_err(|_| Wrong::new(format!("\"{text}\" is not an address with a port")))
    }
}

impl FromToml for Duration {
    fn wanted() -> Cow<'static, str> {
        "a duration with its unit, such as \"250ms\", \"10s\" or \"5m\"".into()
    }

    fn from_toml(value: &Value<'_>) -> Result<Self, Wrong> {
        match value {
            Value::Integer(number) if *number >= 0 => Err(Wrong {
                what: "a duration needs its unit".into(),
                instead: Some(format!("\"{number}s\" or \"{number}ms\"")),
            }),
            other => units::parse_duration(text::<Self>(other)?),
        }
    }
}

macro_rules! integers {
    ($($type:ty),*) => {$(
        impl FromToml for $type {
            fn wanted() -> Cow<'static, str> {
                format!("a whole number from {} to {}", <$type>::MIN, <$type>::MAX).into()
            }

            fn from_toml(value: &Value<'_>) -> Result<Self, Wrong> {
                match value {
                    Value::Integer(number) => Self::try_from(*number)
                        .map_err(|_| Wrong::new(format!("{number} is out of range"))),
                    Value::String(text) if text.parse::<Self>().is_ok() => Err(Wrong {
                        what: "a number stands without quotes".into(),
                        instead: Some((*text).to_owned()),
                    }),
                    other => Err(other.is_not(&Self::wanted())),
                }
            }
        }
    )*};
}
integers!(u16, u32, u64);

impl<T: FromToml> FromToml for Vec<T> {
    fn wanted() -> Cow<'static, str> {
        format!("a list: each entry {}", T::wanted()).into()
    }

    fn from_toml(value: &Value<'_>) -> Result<Self, Wrong> {
        match value {
            Value::Array(items) => items.iter().map(T::from_toml).collect(),
            other => Err(other.is_not(&Self::wanted())),
        }
    }
}
