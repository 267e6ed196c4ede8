//! Reads a machine description: Tidelock's own JSON, or a libvirt domain, of which the elements that a recovered machine
//! needs are taken. A host does so when it is configured, so that a mistake is found before the disaster.

mod libvirt;

use thiserror::Error;
use tidelock_protocol::machine::Machine;

/// The largest description that is read.
pub const FILE_MAX_BYTES: usize = 256 << 10;

/// Why a description cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("{what}")]
pub struct DescriptionError {
    /// The fault, for people.
    pub what: String,
    /// The valid alternative, for people.
    pub instead: String,
}

impl DescriptionError {
    fn new(what: impl Into<String>, instead: impl Into<String>) -> Self {
        Self { what: what.into(), instead: instead.into() }
    }
}

/// Reads either form, and checks every bound.
pub fn read(text: &str) -> Result<Machine, DescriptionError> {
    if text.len() > FILE_MAX_BYTES {
        let what = format!("{} bytes are more than {FILE_MAX_BYTES}", text.len());
        return Err(DescriptionError::new(what, "a smaller description"));
    }
    let machine = match text.trim_start().starts_with('<') {
        true => libvirt::translate(text)?,
        false => from_json(text)?,
    };
    let bounded = machine.check();
    bounded.map_err(|what| DescriptionError::new(what, "a value within the bounds"))?;
    Ok(machine)
}

/// Keys that were options and files of QEMU's: they run programs and open files, so only the site that boots names them.
const OF_THE_BACKUP: [&str; 5] = ["extra_arguments", "kernel", "initrd", "append", "cpu"];

fn from_json(text: &str) -> Result<Machine, DescriptionError> {
    // By their order alone, as in a list, values say nothing.
    let object: Result<serde_json::Map<_, _>, _> = serde_json::from_str(text);
    object.and_then(|object| serde_json::from_value(object.into())).map_err(|error| {
        let of_the_backup = || {
            let value: serde_json::Value = serde_json::from_str(text).ok()?;
            OF_THE_BACKUP.into_iter().find(|key| value.get(key).is_some())
        };
        match of_the_backup() {
            Some(key) => DescriptionError::new(
                format!("`{key}` is for the backup site to say, not for a host"),
                format!(
                    "nothing here, and `{key}` in boot.toml at the backup (docs/manual/recovery.md)"
                ),
            ),
            None => DescriptionError::new(
                error.to_string(),
                "a file such as examples/machine.json, or the output of `virsh dumpxml`",
            ),
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_only_the_backup_site_may_say_is_refused_with_where_to_say_it() {
        for key in OF_THE_BACKUP {
            let text = format!(r#"{{"memory_mib": 16, "{key}": ["-incoming", "exec:id"]}}"#);
            let error = read(&text).unwrap_err();
            assert!(error.what.contains(key) && error.instead.contains("boot.toml"), "{error:?}");
        }
    }

    #[test]
    fn mistakes_are_named() {
        let memroy = read(r#"{"memory_mib": 1, "memroy": 2}"#).unwrap_err();
        assert!(memroy.what.contains("memroy"), "{memroy}");
        for bad in ["", "{}", "[]", r#"{"memory_mib": 0}"#, r#"{"memory_mib": 1, "cpus": 0}"#] {
            assert!(read(bad).is_err(), "{bad}");
        }
        let bus = r#"{"memory_mib": 1, "disks": [{"name": "a", "bus": "vhost-user-blk-pci"}]}"#;
        assert!(read(bus).unwrap_err().what.contains("vhost-user-blk-pci"));
        let large = format!("{}{}", " ".repeat(FILE_MAX_BYTES), r#"{"memory_mib": 1}"#);
        assert!(read(&large).unwrap_err().what.contains("bytes are more"));
    }
}
