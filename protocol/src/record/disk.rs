//! The change of a disk: what records of a VM's writer are about.
//!
//! | field of the header | meaning |
//! |---|---|
//! | flags | 1 ZERO, 2 NO_HOLE, 4 FLUSHED (a flush of the guest stands before it); the others must be 0 |
//! | object | the writer's disk |
//! | offset, length | the extent, in bytes |

use super::{Body, BodyFields, Misplaced, Payload, Role};
use crate::ids::DiskId;
use crate::limits;
use crate::message::DiskSpec;

const FLAG_ZERO: u8 = 1;
const FLAG_NO_HOLE: u8 = 2;
const FLAG_FLUSHED: u8 = 4;

/// The change of a disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DiskChange {
    /// The writer's disk.
    pub disk: DiskId,
    /// Place on the disk, in bytes.
    pub offset: u64,
    /// Not a guest's write but Tidelock's own copy of what the disk held: never in P.
    pub copy: bool,
    /// Between the writer's record before this one and this one, its guest asked for a flush, or that one was a write with
    /// FUA: what stands just before this record is a state that the guest meant to find again. Never of a copy.
    pub flushed: bool,
    /// The effect on the disk.
    pub effect: Effect,
}

/// The effect of a change on its disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Effect {
    /// The extent now holds the payload.
    Write(Payload),
    /// The extent now reads as zeroes; the disk may drop its blocks unless `no_hole`.
    Zero {
        /// Length of the extent.
        len_bytes: u32,
        /// Blocks stay allocated (NBD's NO_HOLE).
        no_hole: bool,
    },
    /// Every copy of an initial copy or a resync is before this record ([`Role::CopyDone`]).
    CopyDone,
    /// Nothing ([`Role::Idle`]).
    Idle,
}

impl DiskChange {
    /// Length of the extent. Of a header without its data ([`super::Head::peek`]) it is 0 for a write.
    #[must_use]
    pub fn len_bytes(&self) -> u32 {
        match &self.effect {
            Effect::Write(payload) => payload.data().len() as u32,
            Effect::Zero { len_bytes, .. } => *len_bytes,
            Effect::CopyDone | Effect::Idle => 0,
        }
    }
}

impl Body for DiskChange {
    type Objects = Vec<DiskSpec>;

    const OBJECTS_MAX: u16 = limits::DISKS_MAX;

    fn fits(&self, disks: &Vec<DiskSpec>) -> Result<(), Misplaced> {
        if matches!(self.effect, Effect::CopyDone | Effect::Idle) {
            return Ok(());
        }
        let disk = disks.iter().find(|disk| disk.id == self.disk);
        let size_bytes = disk.ok_or(Misplaced::Object(self.disk.0))?.size_bytes;
        // The header was refused if this overflows.
        let end = self.offset + u64::from(self.len_bytes());
        if end <= size_bytes {
            return Ok(());
        }
        Err(Misplaced::Extent { disk: self.disk, end, size_bytes })
    }

    fn role(&self) -> Role {
        match self.effect {
            Effect::CopyDone => Role::CopyDone,
            Effect::Idle => Role::Idle,
            Effect::Write(_) | Effect::Zero { .. } if self.copy => Role::Copy,
            Effect::Write(_) | Effect::Zero { .. } => Role::Change,
        }
    }

    fn fields(&self) -> BodyFields {
        let effect = match &self.effect {
            Effect::Zero { no_hole: true, .. } => FLAG_ZERO | FLAG_NO_HOLE,
            Effect::Zero { no_hole: false, .. } => FLAG_ZERO,
            Effect::Write(_) | Effect::CopyDone | Effect::Idle => 0,
        };
        BodyFields {
            flags: effect | if self.flushed { FLAG_FLUSHED } else { 0 },
            object: self.disk.0,
            offset: self.offset,
            len_bytes: self.len_bytes(),
        }
    }

    fn payload(&self) -> Option<&Payload> {
        match &self.effect {
            Effect::Write(payload) => Some(payload),
            _ => None,
        }
    }

    fn from_parts(
        role: Role,
        fields: &BodyFields,
        payload: Option<(u32, Payload)>,
    ) -> Result<Self, &'static str> {
        let BodyFields { flags, object, offset, len_bytes } = *fields;
        let zeroes = flags & FLAG_ZERO != 0;
        let allowed = match role {
            Role::Change if zeroes => FLAG_ZERO | FLAG_NO_HOLE | FLAG_FLUSHED,
            Role::Copy if zeroes => FLAG_ZERO | FLAG_NO_HOLE,
            Role::Change | Role::Idle => FLAG_FLUSHED,
            Role::Copy | Role::CopyDone => 0,
        };
        if flags & !allowed != 0 {
            return Err("unknown flags");
        }
        let effect = match (role, payload) {
            (Role::CopyDone | Role::Idle, _) if len_bytes != 0 || offset != 0 => {
                return Err("copy-done or idle with an extent");
            }
            (Role::CopyDone, None) => Effect::CopyDone,
            (Role::Idle, None) => Effect::Idle,
            (_, Some((of, payload))) if !zeroes && of == len_bytes => Effect::Write(payload),
            (_, None) if zeroes && len_bytes != 0 => {
                Effect::Zero { len_bytes, no_hole: flags & FLAG_NO_HOLE != 0 }
            }
            (_, None) if zeroes => return Err("zeroing of nothing"),
            (_, None) => return Err("write without its payload"),
            (_, Some(_)) => return Err("unexpected payload"),
        };
        Ok(Self {
            disk: DiskId(object),
            offset,
            copy: matches!(role, Role::Copy | Role::CopyDone),
            flushed: flags & FLAG_FLUSHED != 0,
            effect,
        })
    }

    fn payload_mut(&mut self) -> Option<&mut Payload> {
        match &mut self.effect {
            Effect::Write(payload) => Some(payload),
            _ => None,
        }
    }
}
