//! A member's activity log as a file of this host, which is locked while the daemon runs.

use crate::config::ActivitySettings;
use crate::driver::thread::LogFile;
use tidelock_daemon_core::activity::place::LogPlace;
use tidelock_daemon_core::activity::{Found, Geometry, Identity, Unusable, geometry};
use tidelock_storage::files::Files;
use tidelock_uring::{FileError, LocalFile, OpenRequest};

/// The geometry of a new log, if one is kept.
pub(super) fn geometry_of(settings: Option<ActivitySettings>) -> Option<Geometry> {
    settings.map(|ActivitySettings { extent, slots }| Geometry {
        extent_bytes: u32::try_from(extent.bytes).expect("checked with the configuration"),
        slots,
        // Slots that each transaction repeats.
        context: geometry::CONTEXT_MAX,
    })
}

/// The log that a run has left. A daemon that was killed may have a write under way: the kernel ends it, and lets go of the
/// lock then.
pub(super) fn found(place: &LogPlace<Files>, identity: &Identity) -> Result<Found, Unusable> {
    if !place.path().exists() {
        return Err(Unusable::Missing);
    }
    let locked = LocalFile::open(place.path(), &OpenRequest::default());
    let _locked = locked.map_err(|error| Unusable::Unreadable(error.to_string()))?;
    place.read(identity)
}

/// Opens the file of a log that is on.
pub(super) fn open(place: LogPlace<Files>) -> Result<LogFile, FileError> {
    let file = LocalFile::open(place.path(), &OpenRequest::default())?;
    Ok(LogFile { file, place })
}
