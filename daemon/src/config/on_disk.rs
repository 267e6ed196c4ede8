//! `[group.backlog_on_disk]`: an outage that memory does not hold.

use std::path::PathBuf;

use tidelock_config::{Located, Section, Size};

use super::{AtLimit, BacklogOnDisk};

const AT_LIMIT: [(&str, AtLimit); 2] = [("map", AtLimit::Map), ("wait", AtLimit::Wait)];

/// Below it memory does as well.
const SIZE_MIN: Size = Size::mib(64);

/// `memory`: the limit of the backlog in memory.
pub(super) fn read_backlog_on_disk(
    section: &mut Section<'_>,
    memory: &Located<Size>,
) -> Option<BacklogOnDisk> {
    let size = section.required::<Size>("size", "size = \"20GiB\"");
    let directory = section.optional::<PathBuf>("directory").map(|directory| directory.value);
    let at_limit = section.choice("at_limit", &AT_LIMIT);
    let size = size?;
    let least = SIZE_MIN.max(memory.value);
    if size.value < least {
        let what = format!(
            "`size` in [group.backlog_on_disk]: {} is less than {least}; what waits in memory is on disk, too \
             (`backlog` is {})",
            size.value, memory.value
        );
        section.fail(&size.place, what, format!("\"{least}\" or more"));
    }
    let at_limit = at_limit.map_or(AtLimit::default(), |at_limit| at_limit.value);
    Some(BacklogOnDisk { size: size.value, directory, at_limit })
}
