//! Looks at the server: one query that says whether it is a primary, how far its log and its synchronous standbys are,
//! and how the slot stands.

use std::fmt;
use tidelock_pgstream::{Row, SlotName};
use tidelock_wal::Lsn;

/// Settings of the session that looks and appends NOPs. A NOP is committed when it is durable at the server: whether
/// synchronous standbys have it is looked at, as for every commit.
pub(crate) const SETTINGS: &[(&str, &str)] = &[
    ("synchronous_commit", "local"),
    ("default_transaction_read_only", "off"),
    ("statement_timeout", "0"),
    ("idle_session_timeout", "0"),
    ("search_path", "pg_catalog"),
];

/// The query that appends a NOP.
pub(crate) fn nop() -> String {
    format!("SELECT pg_logical_emit_message(true, '{}', '')", crate::cutter::NOP_PREFIX)
}

/// The query that drops a slot which is lost.
pub(crate) fn drop_lost(slot: &SlotName) -> String {
    format!(
        "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots \
         WHERE slot_name = '{slot}' AND wal_status = 'lost' AND NOT active"
    )
}

/// The query: a row for each synchronous standby, or one without any. Names of slots need no quotes. The views
/// `pg_stat_replication` and `pg_replication_slots` are these functions and joins that cost more than all the rest.
pub(crate) fn query(slot: &SlotName) -> String {
    format!(
        "SELECT pg_is_in_recovery(), \
         CASE WHEN pg_is_in_recovery() THEN NULL ELSE pg_current_wal_insert_lsn() END, \
         current_setting('synchronous_standby_names'), \
         pg_has_role('pg_read_all_stats', 'USAGE'), \
         s.slot_name IS NOT NULL, s.wal_status, s.safe_wal_size, s.restart_lsn, \
         (SELECT o.sync_state FROM pg_stat_get_wal_senders() o WHERE o.pid = s.active_pid), \
         r.pid IS NOT NULL, r.flush_lsn \
         FROM (SELECT) n \
         LEFT JOIN pg_get_replication_slots() s ON s.slot_name = '{slot}' \
         LEFT JOIN pg_stat_get_wal_senders() r ON r.sync_state IN ('sync', 'quorum') \
         AND r.pid IS DISTINCT FROM s.active_pid"
    )
}

/// `wal_status` of a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum WalStatus {
    /// The log that the slot keeps is within `max_wal_size`.
    Reserved,
    /// More is kept than `max_wal_size`, because of the slot.
    Extended,
    /// The next checkpoint may remove what the slot needs.
    Unreserved,
    /// The slot is of no use any more.
    Lost,
    /// A status that is not known here, or none.
    Other,
}

/// The slot, as the server shows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
pub struct SlotStanding {
    /// The slot's `wal_status`.
    pub wal_status: WalStatus,
    /// Bytes that may still be written before the slot is in danger of being lost; `None` without a limit
    /// (`max_slot_wal_keep_size`).
    pub safe_wal_bytes: Option<i64>,
    /// Bytes from the oldest log that it keeps to the end of the server's log.
    pub kept_bytes: Option<u64>,
}

/// Outcome of a look.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Look {
    pub is_in_recovery: bool,
    /// End of the server's log.
    pub end: Option<Lsn>,
    pub standby_names: String,
    /// True if the role may see the standbys.
    pub sees_standbys: bool,
    pub slot: Option<SlotStanding>,
    /// True if this side counts as a synchronous standby.
    pub is_synchronous_itself: bool,
    /// Ends of what synchronous standbys have on stable storage; of some nothing is known.
    pub flushed: Vec<Option<Lsn>>,
}

/// The answer is not what the query asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct NotALook;

impl Look {
    pub fn of(rows: &[Row]) -> Result<Look, NotALook> {
        let first = rows.first().ok_or(NotALook)?;
        let text = |row: &Row, at: usize| row.get(at).cloned().flatten();
        let yes = |row: &Row, at: usize| match text(row, at).as_deref() {
            Some("t") => Ok(true),
            Some("f") => Ok(false),
            _ => Err(NotALook),
        };
        let lsn = |row: &Row, at: usize| {
            text(row, at).map(|text| text.parse::<Lsn>()).transpose().map_err(|_| NotALook)
        };
        let end = lsn(first, 1)?;
        let kept = lsn(first, 7)?;
        let slot = yes(first, 4)?.then(|| SlotStanding {
            wal_status: match text(first, 5).as_deref() {
                Some("reserved") => WalStatus::Reserved,
                Some("extended") => WalStatus::Extended,
                Some("unreserved") => WalStatus::Unreserved,
                Some("lost") => WalStatus::Lost,
                _ => WalStatus::Other,
            },
            safe_wal_bytes: text(first, 6).and_then(|text| text.parse().ok()),
            kept_bytes: end.zip(kept).map(|(end, kept)| end.0.saturating_sub(kept.0)),
        });
        let mut flushed = vec![];
        for row in rows {
            if yes(row, 9)? {
                flushed.push(lsn(row, 10)?);
            }
        }
        Ok(Look {
            is_in_recovery: yes(first, 0)?,
            end,
            standby_names: text(first, 2).ok_or(NotALook)?,
            sees_standbys: yes(first, 3)?,
            slot,
            is_synchronous_itself: matches!(text(first, 8).as_deref(), Some("sync" | "quorum")),
            flushed,
        })
    }

    /// Position up to which enough synchronous standbys have the log. `Ok(None)`: none is needed; `Err`: fewer are
    /// connected than are needed.
    pub fn synchronous(&self) -> Result<Option<Lsn>, TooFewStandbys> {
        let Some((method, needed)) = method(&self.standby_names) else { return Ok(None) };
        // The agent does not wait for itself.
        let needed = needed - usize::from(self.is_synchronous_itself).min(needed);
        if needed == 0 {
            return Ok(None);
        }
        let mut known: Vec<Lsn> = self.flushed.iter().copied().flatten().collect();
        let connected = known.len();
        if connected < needed || (method == Method::First && connected < self.flushed.len()) {
            return Err(TooFewStandbys { connected, needed });
        }
        known.sort_unstable();
        // FIRST: the chosen ones, all of them. ANY: as many as are needed.
        let place = if method == Method::First { 0 } else { connected - needed };
        Ok(known.get(place).copied())
    }
}

/// Fewer synchronous standbys than are needed for a commit: the server's clients wait, too.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct TooFewStandbys {
    pub connected: usize,
    pub needed: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Method {
    First,
    Any,
}

/// Reads `synchronous_standby_names`: `[FIRST] n (names)`, `ANY n (names)`, or names. `None`: no standby is
/// synchronous.
fn method(names: &str) -> Option<(Method, usize)> {
    let names = names.trim();
    if names.is_empty() {
        return None;
    }
    let word_end = names.find(|c: char| !c.is_ascii_alphanumeric()).unwrap_or(names.len());
    let (word, rest) = names.split_at(word_end);
    let number = |text: &str| {
        let text = text.trim_start();
        let digits = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
        let is_list = text[digits..].trim_start().starts_with('(');
        text[..digits].parse::<usize>().ok().filter(|_| is_list)
    };
    if word.eq_ignore_ascii_case("ANY")
        && let Some(needed) = number(rest)
    {
        return Some((Method::Any, needed));
    }
    let of_first = if word.eq_ignore_ascii_case("FIRST") { number(rest) } else { None };
    Some((Method::First, of_first.or_else(|| number(names)).unwrap_or(1)))
}

impl fmt::Display for WalStatus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            WalStatus::Reserved => "reserved",
            WalStatus::Extended => "extended",
            WalStatus::Unreserved => "unreserved",
            WalStatus::Lost => "lost",
            WalStatus::Other => "unknown",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn look(names: &str, itself: bool, flushed: &[Option<u64>]) -> Look {
        Look {
            is_in_recovery: false,
            end: Some(Lsn(1000)),
            standby_names: names.into(),
            sees_standbys: true,
            slot: None,
            is_synchronous_itself: itself,
            flushed: flushed.iter().map(|at| at.map(Lsn)).collect(),
        }
    }

    #[test]
    fn the_names_of_standbys_say_how_many_are_needed() {
        use Method::{Any, First};
        for (names, expected) in [
            ("", None),
            ("  ", None),
            ("s1", Some((First, 1))),
            ("*", Some((First, 1))),
            ("s1, s2", Some((First, 1))),
            ("2 (s1, s2, s3)", Some((First, 2))),
            ("FIRST 2 (s1,s2)", Some((First, 2))),
            ("first 3(a,b,c)", Some((First, 3))),
            ("ANY 2 (s1, s2, s3)", Some((Any, 2))),
            ("any 1(*)", Some((Any, 1))),
            // Names, of which some look like words of the grammar.
            ("2, s1", Some((First, 1))),
            ("\"any\", s1", Some((First, 1))),
            ("anybody, s1", Some((First, 1))),
        ] {
            assert_eq!(method(names), expected, "{names:?}");
        }
    }

    #[test]
    fn what_enough_synchronous_standbys_have_is_committed_at_home() {
        let of = |names: &str, flushed: &[Option<u64>]| look(names, false, flushed).synchronous();
        assert_eq!(of("", &[]), Ok(None));
        assert_eq!(of("a", &[Some(5)]), Ok(Some(Lsn(5))));
        assert_eq!(of("2 (a, b)", &[Some(5), Some(3)]), Ok(Some(Lsn(3))));
        assert_eq!(of("ANY 2 (*)", &[Some(5), Some(3), Some(9)]), Ok(Some(Lsn(5))));
        assert_eq!(of("ANY 1 (*)", &[Some(5), None]), Ok(Some(Lsn(5))));
        let few = |connected, needed| Err(TooFewStandbys { connected, needed });
        assert_eq!(of("a", &[]), few(0, 1));
        assert_eq!(of("2 (a, b)", &[Some(5)]), few(1, 2));
        assert_eq!(of("2 (a, b)", &[Some(5), None]), few(1, 2));
        assert_eq!(look("*", true, &[]).synchronous(), Ok(None), "it never waits for itself");
        assert_eq!(look("ANY 2 (*)", true, &[Some(7)]).synchronous(), Ok(Some(Lsn(7))));
    }

    #[test]
    fn answers_are_read_and_other_rows_are_refused() {
        let row = |words: [&str; 11]| -> Row {
            words.iter().map(|word| (*word != "-").then(|| (*word).into())).collect()
        };
        let good = ["f", "0/3E8", "s1", "t", "t", "extended", "5", "0/64", "-", "t", "0/10"];
        let look = Look::of(&[row(good), row(good)]).unwrap();
        let wal_status = WalStatus::Extended;
        let slot = SlotStanding { wal_status, safe_wal_bytes: Some(5), kept_bytes: Some(900) };
        assert_eq!((look.slot, look.flushed.len()), (Some(slot), 2));
        let none = ["f", "0/3E8", "", "t", "f", "-", "-", "-", "-", "f", "-"];
        let look = Look::of(&[row(none)]).unwrap();
        assert_eq!((look.slot, look.flushed.len()), (None, 0));
        let mut bad = good;
        bad[1] = "end";
        assert_eq!(Look::of(&[row(bad)]), Err(NotALook));
        assert_eq!(Look::of(&[vec![]]), Err(NotALook));
        assert_eq!(Look::of(&[]), Err(NotALook));
    }
}
