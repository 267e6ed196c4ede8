//! Count vectors (PipeCloud 3.2.2): one seq per writer of the group.
//!
//! A member's *pending* vector P holds the writes that anything it does may depend on; the
//! *committed* vector C holds those that are durable at the backup, contiguously. A packet
//! stamped with P may leave when C [`covers`](CountVector::covers) the stamp in **every** entry.
//! A sum or a single entry will not do: the planted bugs of the simulator show why.
//!
//! An entry that is missing at the end counts as 0, so vectors of a group that has grown compare
//! with older ones.

use crate::ids::{Seq, WriterId};
use crate::limits;
use serde::{Deserialize, Serialize};
use smallvec::SmallVec;
use std::fmt;

/// One seq per writer.
#[derive(Clone, Default, Serialize, Deserialize)]
#[serde(try_from = "SmallVec<[Seq; 4]>")]
pub struct CountVector(SmallVec<[Seq; 4]>);

impl CountVector {
    /// The vector before any write.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// A vector with one entry set.
    #[must_use]
    pub fn of(writer: WriterId, seq: Seq) -> Self {
        let mut v = Self::new();
        v.raise(writer, seq);
        v
    }

    /// The entry of a writer.
    #[must_use]
    pub fn get(&self, writer: WriterId) -> Seq {
        self.0.get(writer.index()).copied().unwrap_or(Seq::ZERO)
    }

    /// Raises a writer's entry to at least `seq`. Entries never fall. Returns whether it rose.
    pub fn raise(&mut self, writer: WriterId, seq: Seq) -> bool {
        let i = writer.index();
        if seq == Seq::ZERO {
            return false;
        }
        if self.0.len() <= i {
            self.0.resize(i + 1, Seq::ZERO);
        }
        if self.0[i] < seq {
            self.0[i] = seq;
            return true;
        }
        false
    }

    /// Entrywise maximum. Returns whether any entry rose.
    pub fn merge(&mut self, other: &CountVector) -> bool {
        let mut rose = false;
        for (writer, seq) in other.entries() {
            rose |= self.raise(writer, seq);
        }
        rose
    }

    /// Whether every entry of `other` is covered by the same entry here.
    #[must_use]
    pub fn covers(&self, other: &CountVector) -> bool {
        other.entries().all(|(writer, seq)| self.get(writer) >= seq)
    }

    /// The entries that are not 0, by writer.
    pub fn entries(&self) -> impl Iterator<Item = (WriterId, Seq)> + '_ {
        self.0
            .iter()
            .enumerate()
            .filter(|(_, seq)| **seq != Seq::ZERO)
            .map(|(i, seq)| (WriterId(u16::try_from(i).expect("WRITERS_MAX")), *seq))
    }
}

/// A vector that comes from outside: bounded where it comes in.
impl TryFrom<SmallVec<[Seq; 4]>> for CountVector {
    type Error = &'static str;

    fn try_from(entries: SmallVec<[Seq; 4]>) -> Result<Self, Self::Error> {
        if entries.len() > limits::WRITERS_MAX.into() {
            return Err("a count vector with more entries than writers");
        }
        Ok(Self(entries))
    }
}

impl FromIterator<(WriterId, Seq)> for CountVector {
    fn from_iter<I: IntoIterator<Item = (WriterId, Seq)>>(entries: I) -> Self {
        let mut v = Self::new();
        for (writer, seq) in entries {
            v.raise(writer, seq);
        }
        v
    }
}

impl PartialEq for CountVector {
    fn eq(&self, other: &Self) -> bool {
        self.covers(other) && other.covers(self)
    }
}

impl Eq for CountVector {}

impl fmt::Debug for CountVector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl fmt::Display for CountVector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("<")?;
        for (i, seq) in self.0.iter().enumerate() {
            if i > 0 {
                f.write_str(" ")?;
            }
            write!(f, "{seq}")?;
        }
        f.write_str(">")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn vector(seqs: &[u64]) -> CountVector {
        seqs.iter().enumerate().map(|(i, s)| (WriterId(i as u16), Seq(*s))).collect()
    }

    #[test]
    fn covering_needs_every_entry() {
        assert!(vector(&[3, 2]).covers(&vector(&[3, 2])));
        assert!(vector(&[3, 2]).covers(&vector(&[3])));
        assert!(!vector(&[9, 1]).covers(&vector(&[3, 2])), "a large entry hid a small one");
        assert!(!vector(&[3]).covers(&vector(&[3, 1])), "a missing entry is 0");
    }

    #[test]
    fn trailing_zeros_do_not_distinguish() {
        let mut long = vector(&[1, 5]);
        long.raise(WriterId(7), Seq::ZERO);
        assert_eq!(long, vector(&[1, 5]));
        assert_eq!(vector(&[0, 0]), CountVector::new());
    }

    #[test]
    fn a_vector_from_outside_has_at_most_one_entry_for_each_writer() {
        let decode = |entries: usize| {
            let bytes = postcard::to_stdvec(&vec![1u64; entries]).unwrap();
            postcard::from_bytes::<CountVector>(&bytes)
        };
        let most = usize::from(limits::WRITERS_MAX);
        assert_eq!(decode(most).unwrap().entries().count(), most);
        assert!(decode(most + 1).is_err());
        assert!(decode(70_000).is_err());
    }

    proptest! {
        #[test]
        fn merge_is_the_least_upper_bound(a in prop::collection::vec(0u64..5, 0..6),
                                          b in prop::collection::vec(0u64..5, 0..6),
                                          c in prop::collection::vec(0u64..5, 0..6)) {
            let (a, b, c) = (vector(&a), vector(&b), vector(&c));
            let mut m = a.clone();
            m.merge(&b);
            prop_assert!(m.covers(&a) && m.covers(&b));
            prop_assert!(!(c.covers(&a) && c.covers(&b)) || c.covers(&m));
        }
    }
}
