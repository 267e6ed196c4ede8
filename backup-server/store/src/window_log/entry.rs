//! The bytes of a change in a record's payload: three lengths (4 bytes each, little-endian; 2^32 - 1 for a value that is
//! not there), then key, old and new value.

use super::diff::Value;
use bytes::{Buf, Bytes};
use tidelock_protocol::limits::RECORD_PAYLOAD_MAX_BYTES;
use tidelock_protocol::record::{Body, BodyFields, Misplaced, Payload, Role};

/// The longest key.
pub const KEY_MAX_BYTES: usize = 64 << 10;
/// The most that key, old and new value have together.
pub const ITEM_MAX_BYTES: usize = RECORD_PAYLOAD_MAX_BYTES as usize - HEAD_BYTES;
const HEAD_BYTES: usize = 12;
const ABSENT: u32 = u32::MAX;

/// A change of one item.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Change {
    pub(super) key: Bytes,
    pub(super) old: Value,
    pub(super) new: Value,
}

/// The body of a record of a log: the bytes of a change.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Item(pub(super) Payload);

impl Body for Item {
    type Objects = ();

    const OBJECTS_MAX: u16 = 1;

    fn fits(&self, (): &()) -> Result<(), Misplaced> {
        Ok(())
    }

    fn role(&self) -> Role {
        Role::Change
    }

    fn fields(&self) -> BodyFields {
        BodyFields::default()
    }

    fn payload(&self) -> Option<&Payload> {
        Some(&self.0)
    }

    fn from_parts(
        role: Role,
        fields: &BodyFields,
        payload: Option<(u32, Payload)>,
    ) -> Result<Self, &'static str> {
        match (role, payload) {
            (Role::Change, Some((_, payload))) if *fields == BodyFields::default() => {
                Ok(Self(payload))
            }
            _ => Err("not a change of an item"),
        }
    }

    fn payload_mut(&mut self) -> Option<&mut Payload> {
        Some(&mut self.0)
    }
}

/// The bytes of a change. The error: how many the key and all have, which is too much.
pub(super) fn encode(
    key: &[u8],
    old: Option<&[u8]>,
    new: Option<&[u8]>,
) -> Result<Bytes, (usize, usize)> {
    let values = [old, new];
    let all = key.len() + values.iter().flatten().map(|value| value.len()).sum::<usize>();
    if key.len() > KEY_MAX_BYTES || all > ITEM_MAX_BYTES {
        return Err((key.len(), all));
    }
    let len = |value: Option<&[u8]>| value.map_or(ABSENT, |value| value.len() as u32);
    let mut bytes = Vec::with_capacity(HEAD_BYTES + all);
    for len in [len(Some(key)), len(old), len(new)] {
        bytes.extend_from_slice(&len.to_le_bytes());
    }
    for part in [Some(key), old, new].into_iter().flatten() {
        bytes.extend_from_slice(part);
    }
    Ok(bytes.into())
}

/// `None`: these are not the bytes of a change.
pub(super) fn decode(mut bytes: Bytes) -> Option<Change> {
    if bytes.len() < HEAD_BYTES {
        return None;
    }
    let [key, old, new] = [(); 3].map(|()| bytes.get_u32_le());
    let mut take = |len: u32| {
        let len = len as usize;
        (bytes.len() >= len).then(|| bytes.split_to(len))
    };
    let mut value = |len: u32| if len == ABSENT { Some(None) } else { take(len).map(Some) };
    let change = Change { key: value(key)??, old: value(old)?, new: value(new)? };
    bytes.is_empty().then_some(change)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn a_change_comes_back_and_a_part_of_it_does_not(
            key in prop::collection::vec(any::<u8>(), 0..9),
            old in prop::option::of(prop::collection::vec(any::<u8>(), 0..9)),
            new in prop::option::of(prop::collection::vec(any::<u8>(), 0..9)),
            cut in any::<prop::sample::Index>(),
        ) {
            let bytes = encode(&key, old.as_deref(), new.as_deref()).unwrap();
            let change = Change { key: key.into(), old: old.map(Bytes::from), new: new.map(Bytes::from) };
            prop_assert_eq!(decode(bytes.clone()), Some(change));
            prop_assert_eq!(decode(bytes.slice(..cut.index(bytes.len()))), None);
            prop_assert_eq!(decode([&bytes[..], &[0]].concat().into()), None);
        }

        #[test]
        fn strange_bytes_are_refused_without_a_panic(bytes in prop::collection::vec(any::<u8>(), 0..40)) {
            let _ = decode(bytes.into());
        }
    }

    #[test]
    fn what_is_too_large_is_not_encoded() {
        let long = vec![0; KEY_MAX_BYTES + 1];
        assert_eq!(encode(&long, None, None), Err((long.len(), long.len())));
        let huge = vec![0; ITEM_MAX_BYTES];
        assert_eq!(encode(b"k", Some(&huge), None), Err((1, ITEM_MAX_BYTES + 1)));
        assert!(encode(b"", Some(&huge), None).is_ok());
    }
}
