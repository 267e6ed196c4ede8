//! Names and addresses that both sites use.

use std::borrow::Cow;
use std::fmt;

use crate::value::{FromToml, Value, Wrong, text};

/// The longest name: the protocol's limit for groups, members, disks and hosts.
const NAME_MAX_BYTES: usize = 64;

/// The name of a host, group, member or disk. It becomes part of paths, export names and metric
/// labels, so it has only letters, digits, `.`, `_` and `-`, and starts with a letter or digit.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Name(String);

impl Name {
    /// Checks and keeps a name.
    pub fn new(name: &str) -> Result<Self, Wrong> {
        let odd = |c: char| !(c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-'));
        if name.is_empty() {
            Err(Wrong::new("the name is empty"))
        } else if name.len() > NAME_MAX_BYTES {
            Err(Wrong::new(format!("the name has more than {NAME_MAX_BYTES} characters")))
        } else if let Some(c) = name.chars().find(|c| odd(*c)) {
            Err(Wrong::new(format!("the name \"{name}\" contains {c:?}")))
        } else if !name.starts_with(|c: char| c.is_ascii_alphanumeric()) {
            Err(Wrong::new(format!("the name \"{name}\" does not start with a letter or digit")))
        } else {
            Ok(Self(name.to_owned()))
        }
    }

    /// The name.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl FromToml for Name {
    fn wanted() -> Cow<'static, str> {
        "a name of letters, digits, \".\", \"_\" and \"-\" that starts with a letter or digit"
            .into()
    }

    fn from_toml(value: &Value<'_>) -> Result<Self, Wrong> {
        Self::new(text::<Self>(value)?)
    }
}

/// A host name or address with a port, to connect to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostPort {
    /// A DNS name, an IPv4 address, or an IPv6 address without its brackets.
    pub host: String,
    /// The port.
    pub port: u16,
}

/// `host:port`, with brackets around an IPv6 address: what a resolver takes.
impl fmt::Display for HostPort {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.host.contains(':') {
            write!(f, "[{}]:{}", self.host, self.port)
        } else {
            write!(f, "{}:{}", self.host, self.port)
        }
    }
}

impl FromToml for HostPort {
    fn wanted() -> Cow<'static, str> {
        "a host and a port such as \"backup.example.org:9640\"".into()
    }

    fn from_toml(value: &Value<'_>) -> Result<Self, Wrong> {
        let text = text::<Self>(value)?;
        let wrong = || Wrong::new(format!("\"{text}\" is not a host with a port"));
        let (host, port) = text.rsplit_once(':').ok_or_else(wrong)?;
        let bracketed = host.strip_prefix('[').and_then(|host| host.strip_suffix(']'));
        let plain = |host: &&str| !host.contains([':', '/', '[', ']', ' ']);
        let host = bracketed.or_else(|| Some(host).filter(plain)).ok_or_else(wrong)?;
        let port = port.parse().ok().filter(|port| *port != 0).ok_or_else(wrong)?;
        if host.is_empty() {
            return Err(wrong());
        }
        Ok(Self { host: host.to_owned(), port })
    }
}
