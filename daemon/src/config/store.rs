//! `[clock]` and `[[store]]`: stores whose shards this host leads.

use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;
use tidelock_config::{Located, Name, Place, Section};
use tidelock_pgstream::{Login, PasswordMethod, SlotName};
use tidelock_protocol::limits::SHARDS_MAX;
use tidelock_shard_agent::Config as AgentConfig;

/// Source that measures this host's clock.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ClockSource {
    /// No source: no stamp is believed.
    None,
    /// linuxptp.
    Ptp4l {
        /// Its read-write socket.
        socket: PathBuf,
        /// Its domain.
        domain: u8,
    },
    /// chrony, over its command port.
    Chrony {
        /// The port.
        address: SocketAddr,
    },
    /// The operator's word.
    Assumed {
        /// The most that the clock is off.
        epsilon_ns: u64,
    },
}

/// A store.
#[derive(Clone, Debug)]
pub struct Store {
    /// Its name.
    pub name: Located<Name>,
    /// All its shards, also those that other hosts lead.
    pub shards: Vec<Name>,
    /// Greatest error with which a clock is believed.
    pub max_clock_error_ns: u64,
    /// Shards that are led here.
    pub shards_here: Vec<Shard>,
}

/// A shard that is led at this host, or at a host that it can reach.
#[derive(Clone, Debug)]
pub struct Shard {
    /// Its place in the list of all shards.
    pub number: u16,
    /// Its servers, one of which is the primary: `HOST:PORT`, or the path of a socket.
    pub servers: Vec<String>,
    /// The role.
    pub user: String,
    /// The file that holds its password.
    pub password_file: Option<PathBuf>,
    /// The replication slot.
    pub slot: SlotName,
}

impl Shard {
    /// The configuration of its agent.
    ///
    /// # Errors
    /// The password cannot be read.
    pub fn agent(&self, max_clock_error_ns: u64) -> io::Result<AgentConfig> {
        let read = |path: &PathBuf| {
            std::fs::read_to_string(path).map_err(|error| {
                io::Error::new(error.kind(), format!("cannot read {}: {error}", path.display()))
            })
        };
        let password = self.password_file.as_ref().map(read).transpose()?;
        let login = Login {
            user: self.user.clone(),
            password: password.map(|text| text.trim_end_matches(['\n', '\r']).to_owned()),
            application_name: self.slot.to_string(),
            weakest: PasswordMethod::Scram,
        };
        let (servers, slot) = (self.servers.len(), self.slot.clone());
        Ok(AgentConfig {
            mends: true,
            ..AgentConfig::new(servers, login, slot, max_clock_error_ns)
        })
    }
}

pub(super) fn read_clock(root: &mut Section<'_>) -> ClockSource {
    let source = root.optional_table("clock", |clock| {
        let kinds = [("ptp4l", 0), ("chrony", 1), ("assumed", 2)];
        let kind = clock.choice("source", &kinds);
        let socket = clock.or("ptp4l", PathBuf::from("/run/ptp4l"));
        let domain = clock.or("ptp_domain", 0u32);
        let chrony = clock.or("chrony", SocketAddr::from(([127, 0, 0, 1], 323)));
        let assumed = clock.or("assume_error", Duration::from_millis(1));
        if domain.value > 127 {
            clock.fail(&domain.place, "`ptp_domain` is above 127", "0 to 127");
        }
        let Some(kind) = kind else {
            let what = "`source` is missing in [clock]";
            clock.fail(&clock.place(), what, "source = \"ptp4l\", \"chrony\" or \"assumed\"");
            return None;
        };
        Some(match *kind {
            0 => {
                let domain = u8::try_from(domain.value).unwrap_or_default();
                ClockSource::Ptp4l { socket: socket.value, domain }
            }
            1 => ClockSource::Chrony { address: chrony.value },
            _ => {
                let epsilon_ns = u64::try_from(assumed.value.as_nanos()).unwrap_or(u64::MAX);
                ClockSource::Assumed { epsilon_ns }
            }
        })
    });
    source.unwrap_or(ClockSource::None)
}

pub(super) fn read_store(store: &mut Section<'_>) -> Option<Store> {
    let name = store.required::<Name>("name", "name = \"orders\"");
    let shards =
        store.required::<Vec<Name>>("shards", "shards = [\"s0\", \"s1\"], all of the store");
    let error = store.or("max_clock_error", Duration::from_millis(1));
    let (name, shards) = (name?, shards?);
    check_names(store, &shards.place, &shards.value);
    let all = &shards.value;
    let here = store.tables("shard", |shard| read_shard(shard, name.value.as_str(), all));
    let mut numbers: Vec<_> = here.iter().map(|shard| shard.number).collect();
    numbers.sort_unstable();
    if here.is_empty() || numbers.windows(2).any(|two| two[0] == two[1]) {
        let what = "[[store]] has no [[store.shard]], or one of them twice";
        store.fail(&store.place(), what, "one [[store.shard]] for each shard that is led here");
    }
    Some(Store {
        name,
        shards: shards.value,
        max_clock_error_ns: u64::try_from(error.value.as_nanos()).unwrap_or(u64::MAX),
        shards_here: here,
    })
}

fn check_names(store: &Section<'_>, place: &Place, shards: &[Name]) {
    let mut names: Vec<_> = shards.iter().map(Name::as_str).collect();
    names.sort_unstable();
    if names.windows(2).any(|two| two[0] == two[1]) {
        store.fail(
            place,
            "`shards` names a shard twice",
            "each shard once, in the same order on every host",
        );
    }
    if shards.is_empty() || shards.len() > usize::from(SHARDS_MAX) {
        store.fail(place, "`shards` has no shard, or more than 1024", "1 to 1024 names");
    }
}

fn read_shard(shard: &mut Section<'_>, store: &str, all: &[Name]) -> Option<Shard> {
    let name = shard.required::<Name>("name", "name = \"s0\"");
    let servers = shard
        .required::<Vec<String>>("servers", "servers = [\"10.0.0.1:5432\", \"10.0.0.2:5432\"]");
    let user = shard.or("user", "tidelock".to_owned());
    let password_file = shard.optional::<PathBuf>("password_file");
    let slot = shard.optional::<String>("slot");
    let (name, servers) = (name?, servers?);
    let number = all.iter().position(|of| *of == name.value);
    if number.is_none() {
        let what = format!("`shards` of store {store} does not name {}", name.value.as_str());
        shard.fail(&name.place, what, "a name of the list of all shards");
    }
    let is_address = |server: &String| server.starts_with('/') || server.rsplit_once(':').is_some();
    if servers.value.is_empty() || !servers.value.iter().all(is_address) {
        let what = "`servers` is empty, or has something that is no address";
        shard.fail(
            &servers.place,
            what,
            "HOST:PORT, or the path of a socket (/run/postgresql/.s.PGSQL.5432)",
        );
    }
    let plain = |text: &str| text.to_lowercase().replace(|c: char| !c.is_ascii_alphanumeric(), "_");
    let usual = format!("tidelock_{}_{}", plain(store), plain(name.value.as_str()));
    let place = slot.as_ref().map_or_else(|| name.place.clone(), |slot| slot.place.clone());
    let slot = slot.map_or(usual, |slot| slot.value).parse::<SlotName>();
    if slot.is_err() {
        let what = "the name of the replication slot has more than 63 characters, or others than a-z, 0-9, _";
        shard.fail(&place, what, "slot = \"tidelock_s0\"");
    }
    Some(Shard {
        number: number? as u16,
        servers: servers.value,
        user: user.value,
        password_file: password_file.map(|file| file.value),
        slot: slot.ok()?,
    })
}

#[cfg(test)]
mod tests {
    use super::super::parse;

    const HEAD: &str = "[host]\nname = \"h\"\n[backup]\naddress = \"b:1\"\nplaintext = true\n";

    /// A host that leads two of three shards, and has no group.
    const STORE: &str = r#"
[clock]
source = "chrony"
[[store]]
name = "orders"
shards = ["s0", "s1", "s-2"]
[[store.shard]]
name = "s-2"
servers = ["10.0.0.1:5432", "/run/postgresql/.s.PGSQL.5432"]
[[store.shard]]
name = "s0"
servers = ["10.0.0.1:5433"]
"#;

    #[test]
    fn a_host_may_lead_shards_and_have_no_group() {
        let config = parse("f", &format!("{HEAD}{STORE}")).unwrap();
        let store = &config.stores[0];
        assert_eq!(store.max_clock_error_ns, 1_000_000);
        let shards: Vec<_> =
            store.shards_here.iter().map(|of| (of.number, of.slot.to_string())).collect();
        assert_eq!(shards, [(2, "tidelock_orders_s_2".into()), (0, "tidelock_orders_s0".into())]);
        for (from, to, expected) in [
            ("source = \"chrony\"", "", "`source` is missing"),
            ("\"s1\", \"s-2\"]", "\"s1\", \"s0\", \"s-2\"]", "names a shard twice"),
            ("name = \"s0\"", "name = \"s9\"", "does not name s9"),
            ("name = \"s0\"", "name = \"s-2\"", "one of them twice"),
            ("[\"10.0.0.1:5433\"]", "[\"10.0.0.1\"]", "no address"),
            ("[\"10.0.0.1:5433\"]", "[\"10.0.0.1:5433\"]\nslot = \"A-B\"", "replication slot"),
        ] {
            assert!(STORE.contains(from), "{from}");
            let text = format!("{HEAD}{}", STORE.replacen(from, to, 1));
            let found = parse("f", &text).expect_err(&text);
            assert!(found.iter().any(|of| of.what.contains(expected)), "{found}");
        }
    }
}
