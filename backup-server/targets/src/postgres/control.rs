//! `pg_controldata`: what a data directory says about itself.

use tidelock_wal::Lsn;

/// Facts of a control file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Control {
    pub system: u64,
    pub state: String,
    /// Timeline of the last checkpoint.
    pub timeline: u32,
    /// Position from which replay begins, unless the data is a base backup.
    pub redo: Lsn,
    pub segment_bytes: u64,
    /// Replay must have come so far before anybody may look.
    pub min_recovery: Lsn,
    pub wal_level: String,
    /// Settings of the primary below which a standby serves nobody, by their names.
    pub at_least: Vec<(&'static str, u64)>,
}

/// Names in the output, and those of the settings.
const AT_LEAST: [(&str, &str); 5] = [
    ("max_connections setting", "max_connections"),
    ("max_worker_processes setting", "max_worker_processes"),
    ("max_wal_senders setting", "max_wal_senders"),
    ("max_prepared_xacts setting", "max_prepared_transactions"),
    ("max_locks_per_xact setting", "max_locks_per_transaction"),
];

impl Control {
    /// Reads the output, which must be in the language `C`. The error says what is wrong with it.
    pub fn parse(text: &str) -> Result<Self, String> {
        if text.contains("WARNING") {
            return Err("the checksum of its control file is wrong".into());
        }
        let field = |name: &str| {
            let line = text.lines().find_map(|line| {
                let (found, value) = line.split_once(':')?;
                (found.trim() == name).then(|| value.trim())
            });
            line.ok_or_else(|| format!("its control file has no \"{name}\""))
        };
        let number = |name: &str| {
            let value = field(name)?;
            value.parse().map_err(|_| format!("its control file says \"{name}: {value}\""))
        };
        let wal_level = field("wal_level setting")?;
        if !matches!(wal_level, "replica" | "logical") {
            return Err(format!(
                "its log has wal_level = {wal_level}, which no standby can follow"
            ));
        }
        let at_least = AT_LEAST.iter().map(|(name, setting)| Ok((*setting, number(name)?)));
        let lsn = |name: &str| field(name)?.parse().map_err(|error| format!("{error}"));
        let segment_bytes: u64 = number("Bytes per WAL segment")?;
        if !segment_bytes.is_power_of_two() {
            return Err(format!("its log has segments of {segment_bytes} bytes"));
        }
        Ok(Self {
            system: number("Database system identifier")?,
            state: field("Database cluster state")?.to_owned(),
            timeline: u32::try_from(number("Latest checkpoint's TimeLineID")?)
                .map_err(|_| "its control file has an impossible timeline".to_owned())?,
            redo: lsn("Latest checkpoint's REDO location")?,
            segment_bytes,
            min_recovery: lsn("Minimum recovery ending location")?,
            wal_level: wal_level.to_owned(),
            at_least: at_least.collect::<Result<_, String>>()?,
        })
    }
}
