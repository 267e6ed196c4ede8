//! Up to where the journal is in the images, and what of them is damaged: `fold.json`, replaced as a whole.

use crate::FORMAT;
use crate::damage::{DamagedRange, ImageDamage};
use crate::journal::{Closed, InImages, Position};
use serde::{Deserialize, Serialize};
use tidelock_protocol::hlc::Hlc;
use tidelock_protocol::vector::CountVector;
use tidelock_storage::Storage;
use tidelock_storage::json::{self, FileError};

const FILE: &str = "fold.json";

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct FoldFile {
    format: u32,
    segment: u64,
    offset: u64,
    oldest: OldestTime,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    folding: Option<Folding>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    damaged: Vec<DamagedRange>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    unknown: Vec<u64>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct OldestTime {
    hlc: Hlc,
    cut: CountVector,
    arrived_ms: u64,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Folding {
    segment: u64,
    offset: u64,
    cut: CountVector,
}

/// Up to where the images are, and their damage.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FoldPosition {
    /// Everything before this place is in the images.
    pub position: Position,
    /// From here on every state has all that is in the images; earlier states cannot be told any more.
    pub oldest: Closed,
    /// End and cut of a fold that has begun: the images may have any of the records before that place that are in
    /// that cut. `None`: they have nothing after `position`.
    pub folding: Option<(Position, CountVector)>,
    /// Parts of the images that are not what was written.
    pub damaged: ImageDamage,
}

impl FoldPosition {
    /// Part of the journal that is in the images, or may be.
    #[must_use]
    pub fn in_images(&self) -> InImages<'_> {
        let begun = self.folding.as_ref().map_or(self.position, |(to, _)| self.position.max(*to));
        InImages { floor: self.position, begun, oldest: &self.oldest }
    }
}

/// Reads `fold.json`; the beginning of the journal if there is none.
pub fn read_position<S: Storage>(storage: &S) -> Result<FoldPosition, FileError> {
    let Some(fold) = json::read::<S, FoldFile>(storage, FILE, FORMAT)? else {
        return Ok(FoldPosition::default());
    };
    let position = Position { segment: fold.segment, offset: fold.offset };
    let OldestTime { hlc: at, cut, arrived_ms } = fold.oldest;
    let oldest = Closed { at, cut, arrived_ms };
    let folding = fold.folding.map(|of| {
        let Folding { segment, offset, cut } = of;
        (Position { segment, offset }, cut)
    });
    let damaged = ImageDamage::from_record(fold.damaged, fold.unknown);
    Ok(FoldPosition { position, oldest, folding, damaged })
}

/// Records the position, durably.
pub fn write_position<S: Storage>(storage: &S, fold: &FoldPosition) -> Result<(), FileError> {
    let Position { segment, offset } = fold.position;
    let Closed { at: hlc, cut, arrived_ms } = fold.oldest.clone();
    let oldest = OldestTime { hlc, cut, arrived_ms };
    let folding = fold.folding.clone().map(|(to, cut)| {
        let Position { segment, offset } = to;
        Folding { segment, offset, cut }
    });
    let (damaged, unknown) = fold.damaged.to_record();
    let file = FoldFile { format: FORMAT, segment, offset, oldest, folding, damaged, unknown };
    json::write(storage, "", FILE, &file)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::damage::LostWith;
    use crate::extents::DiskKey;
    use tidelock_protocol::ids::{DiskId, Seq, WriterId};
    use tidelock_storage::memory::Memory;

    #[test]
    fn it_survives_a_crash_with_what_is_damaged() {
        let disk = Memory::new();
        assert_eq!(read_position(&disk).unwrap(), FoldPosition::default());
        let cut = CountVector::of(WriterId(2), Seq(7));
        let oldest = Closed { at: Hlc(77), cut: cut.clone(), arrived_ms: 5 };
        let position = Position { segment: 3, offset: 99 };
        let folding = Some((Position { segment: 5, offset: 64 }, cut.clone()));
        let fold = FoldPosition { position, oldest, folding, ..FoldPosition::default() };
        write_position(&disk, &fold).unwrap();
        assert_eq!(read_position(&disk.crash(&mut || false)).unwrap(), fold);
        let mut damaged = fold.clone();
        let key = DiskKey { writer: WriterId(1), disk: DiskId(2) };
        damaged.damaged.mark(key, 4096..8192, LostWith(Some(7)));
        damaged.damaged.mark(key, 8192..8704, LostWith(None));
        damaged.damaged.mark_unknown([key].into_iter(), 8);
        write_position(&disk, &damaged).unwrap();
        assert_eq!(read_position(&disk).unwrap(), damaged);
        damaged.damaged.heal(key, 0..u64::MAX);
        write_position(&disk, &damaged).unwrap();
        assert_eq!(read_position(&disk).unwrap(), fold);
    }
}
