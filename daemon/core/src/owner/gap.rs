//! The gap of a writer: the sites may differ by more than the stream brings, since a time and for a reason.
//!
//! First contact, a full backlog, an unclean stop and a first copy ask one question: where may the sites differ, and may
//! anybody hear of it? A writer has one [`Gap`] or none. [`Copying`](super::Copying) keeps it, because a copy is what
//! closes it, and "the sites are equal but for what is on its way" is said of a writer without a gap and of no other.
//!
//! ```text
//!  start ─► Started ──────────────────────────── attached, whole ───────────────────────────► no gap
//!             │ │                                                                              ▲   │
//!             │ └─ guests are served ─► Unreached ─┐                                           │   │ backlog full
//!             │                                    ├─ attached ─► compared: a record ends ─────┘   ▼
//!             └─ attached, not whole ──────────────┤              the comparison, and is in C   BacklogFull
//!                (FirstCopy, UncleanStop)          └───────────────────────────────────────────────┘
//! ```
//!
//! Invariants:
//! - What opens a gap while one is open moves neither its time nor a first copy: a recovery goes back to before all of it.
//! - While a gap is open that guests may have widened beyond what stamps name, the gate is held for it
//!   (`HoldReason::Gap` of the gate); the end of the comparison lets it go. Where nothing could be recovered anyway
//!   (`FirstCopy`), and before the first lease (`Started`), the gate needs no such hold.
//! - A gap is closed by a record that the backup counts with the whole comparison, never by a flag that was kept.

/// The sites may differ by more than the stream brings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Gap {
    /// The time by the wall clock before which a recovery goes back to. `None`: a time before this run, not known here.
    pub since_unix_ms: Option<u64>,
    /// The reason.
    pub why: GapWhy,
}

/// The reason why the sites may differ by more than the stream brings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GapWhy {
    /// No word of the backup in this run yet.
    Started,
    /// No word of the backup, and guests are served: no record is made of what they write.
    Unreached,
    /// The backlog was full, and guests went on without records.
    BacklogFull,
    /// The backup does not have the disks as a whole yet: nothing can be recovered.
    FirstCopy,
    /// The run before did not end cleanly.
    UncleanStop,
}

impl Gap {
    /// The gap of a run that has just begun.
    pub const STARTED: Self = Self { since_unix_ms: None, why: GapWhy::Started };

    /// The gap after something has opened one, where `before` may be open already.
    #[must_use]
    pub fn opened(before: Option<Self>, since_unix_ms: u64, why: GapWhy) -> Self {
        match before {
            None => Self { since_unix_ms: Some(since_unix_ms), why },
            // The copy's end may be under way: the time is what counts if the backup gets it.
            Some(Self { since_unix_ms: None, why: why @ GapWhy::FirstCopy }) => {
                Self { since_unix_ms: Some(since_unix_ms), why }
            }
            Some(first @ Self { why: GapWhy::FirstCopy, .. }) => first,
            Some(open) => Self { why, ..open },
        }
    }

    /// The gap that a comparison or first copy is to close. `is_first`: nothing can be recovered before.
    /// `whole_at_unix_ms`: the time of the backup's whole state, if it is known.
    #[must_use]
    pub fn compared(before: Option<Self>, is_first: bool, whole_at_unix_ms: Option<u64>) -> Self {
        match before {
            _ if is_first => Self { since_unix_ms: None, why: GapWhy::FirstCopy },
            // The copy's end has reached the backup, which can recover what was before the full backlog.
            Some(open @ Self { why: GapWhy::FirstCopy, .. }) => {
                Self { why: GapWhy::BacklogFull, ..open }
            }
            Some(open) if open.why != GapWhy::Started => open,
            _ => Self { since_unix_ms: whole_at_unix_ms, why: GapWhy::UncleanStop },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_opens_a_gap_again_moves_neither_its_time_nor_a_first_copy() {
        let full = Gap::opened(None, 70, GapWhy::BacklogFull);
        assert_eq!(full, Gap { since_unix_ms: Some(70), why: GapWhy::BacklogFull });
        assert_eq!(Gap::opened(Some(full), 90, GapWhy::BacklogFull), full);
        let unclean = Gap::compared(Some(Gap::STARTED), false, Some(60));
        assert_eq!(unclean, Gap { since_unix_ms: Some(60), why: GapWhy::UncleanStop });
        let both = Gap::opened(Some(unclean), 90, GapWhy::BacklogFull);
        assert_eq!(both, Gap { since_unix_ms: Some(60), why: GapWhy::BacklogFull });
        let first = Gap::compared(Some(Gap::STARTED), true, Some(60));
        assert_eq!(first, Gap { since_unix_ms: None, why: GapWhy::FirstCopy });
        let first = Gap::opened(Some(first), 90, GapWhy::BacklogFull);
        assert_eq!(first, Gap { since_unix_ms: Some(90), why: GapWhy::FirstCopy });
        assert_eq!(Gap::opened(Some(first), 95, GapWhy::BacklogFull), first);
    }

    #[test]
    fn a_first_copy_whose_end_arrives_while_the_backlog_is_full_is_none_any_more() {
        let first = Gap::compared(Some(Gap::STARTED), true, None);
        let full = Gap::opened(Some(first), 90, GapWhy::BacklogFull);
        let now = Gap::compared(Some(full), false, None);
        assert_eq!(now, Gap { since_unix_ms: Some(90), why: GapWhy::BacklogFull });
        assert_eq!(Gap::compared(Some(full), true, None), first);
    }

    #[test]
    fn a_comparison_closes_the_gap_that_was_open_before() {
        let full = Gap::opened(None, 70, GapWhy::BacklogFull);
        assert_eq!(Gap::compared(Some(full), false, Some(95)), full);
        let unreached = Gap::opened(Some(Gap::STARTED), 70, GapWhy::Unreached);
        assert_eq!(Gap::compared(Some(unreached), false, Some(60)), unreached);
        assert_eq!(unreached.since_unix_ms, None, "the run before may have left one");
    }
}
