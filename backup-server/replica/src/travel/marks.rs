//! Bookmarks and pins of a group: names for points in time, in `marks.json`, replaced as a whole.
//!
//! A **bookmark** is a name, and lives as long as its point: when the window has left it behind, it is gone. A
//! **pin** also holds its point, so that the window's end does not pass it (Retroscope 3: snapshots that outlive the
//! window-log). Either may expire.
//!
//! Invariants: what was answered is durable; after a crash the file is the old one or the new one. A pin's hold is
//! taken before the pin is put on record and given up after it is off record, so a pin on record is always held
//! (rule 5). Marks never change by themselves: setting a name that exists is refused, unless it is said to move. What
//! a host asks for is set once, however often it asks because a link broke before the answer.
//!
//! Format 2 added `asked_by`; format 1 is read.
//!
//! ```json
//! {"format": 2, "marks": {"before-deploy": {"kind": "pin", "point": {"cut": [120, 7], "hlc": 117660..., ...},
//!  "set_at_unix_ms": 1795348800000, "expires_at_unix_ms": null, "asked_by": {"host": "host-a", "id": 1795348800000}}}}
//! ```

use crate::history::Point;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::io;
use thiserror::Error;
use tidelock_protocol::bounds;
use tidelock_protocol::hlc::Hlc;
use tidelock_protocol::limits;
use tidelock_storage::Storage;

/// The file, in the group's directory.
pub const FILE: &str = "marks.json";
/// Its version.
pub const FORMAT: u32 = 1;
/// Marks of one group.
pub const MARKS_MAX: usize = 4096;

/// What a mark does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    /// It names its point.
    Bookmark,
    /// It names its point and holds it.
    Pin,
}

impl Kind {
    /// In sentences.
    #[must_use]
    pub fn word(self) -> &'static str {
        match self {
            Kind::Bookmark => "bookmark",
            Kind::Pin => "pin",
        }
    }
}

/// A request of a host, not of this server's own command line.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Asker {
    /// The host.
    pub host: String,
    /// Which of its requests.
    pub id: u64,
}

/// A bookmark or pin.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Mark {
    /// What it does.
    pub kind: Kind,
    /// What it names.
    pub point: Point,
    /// When it was set, in milliseconds since the Unix epoch.
    pub set_at_unix_ms: u64,
    /// When it goes by itself, in milliseconds since the Unix epoch.
    pub expires_at_unix_ms: Option<u64>,
    /// Who asked for it; `None`: this server's command line.
    pub asked_by: Option<Asker>,
}

impl Mark {
    /// Whether this is what a host has asked for and asks for again.
    fn is_same_request(&self, other: &Mark) -> bool {
        self.kind == other.kind && self.asked_by.is_some() && self.asked_by == other.asked_by
    }

    /// Whether its time is over.
    #[must_use]
    pub fn is_expired(&self, now_unix_ms: u64) -> bool {
        self.expires_at_unix_ms.is_some_and(|at| at <= now_unix_ms)
    }
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Content {
    format: u32,
    marks: BTreeMap<String, Mark>,
}

/// Why a mark was not set, removed or read.
#[derive(Debug, Error)]
pub enum MarkError {
    /// It cannot be called so.
    #[error(
        "{0:?} cannot be a name: letters, digits, `.`, `_` and `-`, not beginning with `.` or `-`, at most \
         {max} characters",
        max = limits::NAME_MAX_BYTES
    )]
    Name(String),
    /// The name is taken.
    #[error(
        "there is a {kind} {name} already, at {at}: give --move to move it, --remove to take it out, or choose \
         another name",
        kind = kind.word()
    )]
    Exists {
        /// Which.
        name: String,
        /// What it is.
        kind: Kind,
        /// Where it is.
        at: Hlc,
    },
    /// There is none.
    #[error("there is no {kind} {name}; there are: {known}", kind = kind.word())]
    Unknown {
        /// What was asked for.
        name: String,
        /// As what.
        kind: Kind,
        /// Those that there are.
        known: String,
    },
    /// There are too many.
    #[error(
        "there are {MARKS_MAX} bookmarks and pins in this group already: remove some, or let them expire"
    )]
    TooMany,
    /// It would be over at once.
    #[error("it would expire at once: --expires is a span from now, like 7d")]
    ExpiresAtOnce,
    /// The file cannot be read or written.
    #[error("cannot {what} {FILE}: {source}")]
    Io {
        /// What was tried.
        what: &'static str,
        /// Why.
        source: io::Error,
    },
    /// The file is not what this program writes.
    #[error(
        "{FILE} is damaged: {0}. Restore it from a copy; without it, all bookmarks and pins are gone"
    )]
    Damaged(String),
    /// A newer program wrote it.
    #[error("{FILE} has format {0}, this program knows {FORMAT}: use a newer one")]
    Version(u64),
}

/// All marks of a group.
#[derive(Clone, Debug)]
pub struct Marks<S> {
    storage: S,
    marks: BTreeMap<String, Mark>,
}

impl<S: Storage> Marks<S> {
    /// Those on record in a group's directory.
    pub fn open(storage: S) -> Result<Self, MarkError> {
        let bytes = tidelock_storage::read_all(&storage, FILE);
        let bytes = bytes.map_err(|source| MarkError::Io { what: "read", source })?;
        let marks = bytes.map_or(Ok(BTreeMap::new()), |bytes| parse(&bytes))?;
        Ok(Self { storage, marks })
    }

    /// All of them, by name; also those whose time is over and that were not taken out yet.
    #[must_use]
    pub fn all(&self) -> &BTreeMap<String, Mark> {
        &self.marks
    }

    /// One of them, of either kind, if its time is not over.
    #[must_use]
    pub fn get(&self, name: &str, now_unix_ms: u64) -> Option<&Mark> {
        self.marks.get(name).filter(|mark| !mark.is_expired(now_unix_ms))
    }

    /// Whether a mark could be set so: to be asked before anything is held for it.
    pub fn check(&self, name: &str, mark: &Mark, moves: bool) -> Result<(), MarkError> {
        if !bounds::is_name(name) {
            return Err(MarkError::Name(name.to_owned()));
        }
        if mark.is_expired(mark.set_at_unix_ms) {
            return Err(MarkError::ExpiresAtOnce);
        }
        match self.get(name, mark.set_at_unix_ms) {
            // Said again, as a script may: the same mark at the same point.
            Some(old) if old.kind == mark.kind && old.point == mark.point => {}
            Some(old) if old.is_same_request(mark) => {}
            Some(old) if !moves || old.kind != mark.kind => {
                let (kind, at) = (old.kind, old.point.hlc);
                return Err(MarkError::Exists { name: name.to_owned(), kind, at });
            }
            Some(_) => {}
            None if !self.marks.contains_key(name) && self.marks.len() >= MARKS_MAX => {
                return Err(MarkError::TooMany);
            }
            None => {}
        }
        Ok(())
    }

    /// Sets a mark, durably. Returns what is on record: of a request that was done already, what was set then.
    pub fn set(&mut self, name: &str, mark: Mark, moves: bool) -> Result<Mark, MarkError> {
        self.check(name, &mark, moves)?;
        if let Some(old) = self.marks.get(name).filter(|old| old.is_same_request(&mark)) {
            return Ok(old.clone());
        }
        let mut marks = self.marks.clone();
        marks.insert(name.to_owned(), mark.clone());
        self.write(marks)?;
        Ok(mark)
    }

    /// Takes a mark out, durably.
    pub fn remove(&mut self, name: &str, kind: Kind) -> Result<(), MarkError> {
        if self.marks.get(name).is_none_or(|mark| mark.kind != kind) {
            let known = self.marks.iter().filter(|(_, mark)| mark.kind == kind);
            let known: Vec<_> = known.map(|(name, _)| name.as_str()).collect();
            let known = if known.is_empty() { "none".to_owned() } else { known.join(", ") };
            return Err(MarkError::Unknown { name: name.to_owned(), kind, known });
        }
        let mut marks = self.marks.clone();
        marks.remove(name);
        self.write(marks)
    }

    /// Takes out what is over: marks whose time has come, and bookmarks whose point the window has left behind.
    /// Returns their names.
    pub fn expire(
        &mut self,
        now_unix_ms: u64,
        mut is_lost: impl FnMut(&Mark) -> bool,
    ) -> Result<Vec<String>, MarkError> {
        let is_over = |mark: &Mark, is_lost: &mut dyn FnMut(&Mark) -> bool| {
            mark.is_expired(now_unix_ms) || (mark.kind == Kind::Bookmark && is_lost(mark))
        };
        let over: Vec<_> = self
            .marks
            .iter()
            .filter(|(_, mark)| is_over(mark, &mut is_lost))
            .map(|(name, _)| name.clone())
            .collect();
        if !over.is_empty() {
            let mut marks = self.marks.clone();
            marks.retain(|name, _| !over.contains(name));
            self.write(marks)?;
        }
        Ok(over)
    }

    /// On record first, then in memory: what is shown is durable (rule 6).
    fn write(&mut self, marks: BTreeMap<String, Mark>) -> Result<(), MarkError> {
        let content = Content { format: FORMAT, marks };
        let mut text = serde_json::to_vec_pretty(&content).expect("plain data");
        text.push(b'\n');
        tidelock_storage::replace(&self.storage, "", FILE, &text)
            .map_err(|source| MarkError::Io { what: "write", source })?;
        self.marks = content.marks;
        Ok(())
    }
}

fn parse(bytes: &[u8]) -> Result<BTreeMap<String, Mark>, MarkError> {
    let damaged = |e: serde_json::Error| MarkError::Damaged(e.to_string());
    // The format comes first: what a newer one means by its other fields is not known.
    let value: serde_json::Value = serde_json::from_slice(bytes).map_err(damaged)?;
    match value.get("format").and_then(serde_json::Value::as_u64) {
        Some(format) if format == u64::from(FORMAT) => {}
        Some(format) => return Err(MarkError::Version(format)),
        None => return Err(MarkError::Damaged("it has no format".into())),
    }
    let content: Content = serde_json::from_value(value).map_err(damaged)?;
    match content.marks.keys().find(|name| !bounds::is_name(name)) {
        Some(name) => Err(MarkError::Damaged(format!("{name:?} cannot be a name"))),
        None => Ok(content.marks),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use tidelock_protocol::ids::{Epoch, Seq, WriterId};
    use tidelock_protocol::vector::CountVector;
    use tidelock_storage::memory::{Faults, Memory};
    use tidelock_store::journal::Position;

    fn mark(kind: Kind, seq: u64) -> Mark {
        let cut = CountVector::of(WriterId(0), Seq(seq));
        let place = Position { segment: 1, offset: seq };
        let writers = vec![WriterId(0)];
        let point = Point {
            cut,
            hlc: Hlc::new(seq, 3),
            arrived_ms: 0,
            epoch: Epoch(1),
            writers,
            end: place,
            beyond: place,
        };
        Mark { kind, point, set_at_unix_ms: 1000, expires_at_unix_ms: None, asked_by: None }
    }

    fn open(disk: &Memory) -> Marks<Memory> {
        Marks::open(disk.clone()).unwrap()
    }

    #[test]
    fn what_a_host_asks_for_again_is_set_once() {
        let disk = Memory::new();
        let mut marks = open(&disk);
        let asked = |id, seq| {
            let asked_by = Some(Asker { host: "host-a".into(), id });
            Mark { asked_by, ..mark(Kind::Bookmark, seq) }
        };
        assert_eq!(marks.set("deploy", asked(7, 5), false).unwrap(), asked(7, 5));
        assert_eq!(marks.set("deploy", asked(7, 6), false).unwrap(), asked(7, 5), "it was set");
        assert!(matches!(marks.set("deploy", asked(8, 6), false), Err(MarkError::Exists { .. })));
        assert_eq!(marks.set("deploy", asked(8, 6), true).unwrap(), asked(8, 6));
        assert_eq!(open(&disk).all()["deploy"], asked(8, 6));
    }

    #[test]
    fn names_are_kept_apart_and_moved_only_when_told() {
        let disk = Memory::new();
        let mut marks = open(&disk);
        marks.set("deploy", mark(Kind::Bookmark, 5), false).unwrap();
        marks.set("deploy", mark(Kind::Bookmark, 5), false).unwrap();
        let exists = marks.set("deploy", mark(Kind::Bookmark, 6), false).unwrap_err().to_string();
        assert!(exists.contains("--move") && exists.contains("5.3"), "{exists}");
        let other = marks.set("deploy", mark(Kind::Pin, 5), true).unwrap_err();
        assert!(matches!(other, MarkError::Exists { kind: Kind::Bookmark, .. }), "{other}");
        marks.set("deploy", mark(Kind::Bookmark, 6), true).unwrap();
        for bad in ["", "../up", "-x", "a b"] {
            let error = marks.set(bad, mark(Kind::Pin, 1), false).unwrap_err();
            assert!(matches!(error, MarkError::Name(_)), "{error}");
        }
        let unknown = marks.remove("deploy", Kind::Pin).unwrap_err().to_string();
        assert!(unknown.contains("no pin deploy; there are: none"), "{unknown}");
        assert_eq!(open(&disk).all(), marks.all());
        marks.remove("deploy", Kind::Bookmark).unwrap();
        assert!(open(&disk).all().is_empty());
    }

    #[test]
    fn what_is_over_goes_and_a_pin_stays_whatever_the_window_does() {
        let disk = Memory::new();
        let mut marks = open(&disk);
        let until = |kind, seq, at| Mark { expires_at_unix_ms: Some(at), ..mark(kind, seq) };
        let at_once = marks.set("x", until(Kind::Pin, 1, 1000), false).unwrap_err();
        assert!(matches!(at_once, MarkError::ExpiresAtOnce));
        marks.set("old", mark(Kind::Bookmark, 1), false).unwrap();
        marks.set("held", mark(Kind::Pin, 1), false).unwrap();
        marks.set("short", until(Kind::Pin, 9, 2000), false).unwrap();
        let window = |mark: &Mark| mark.point.hlc < Hlc::new(5, 0);
        assert_eq!(marks.expire(1999, |_| false).unwrap(), Vec::<String>::new());
        assert!(marks.get("short", 1999).is_some() && marks.get("short", 2000).is_none());
        assert_eq!(marks.expire(2000, window).unwrap(), ["old", "short"]);
        assert_eq!(open(&disk).all().keys().collect::<Vec<_>>(), ["held"]);
    }

    #[test]
    fn a_name_whose_time_is_over_is_free() {
        let mut marks = open(&Memory::new());
        marks
            .set("x", Mark { expires_at_unix_ms: Some(1001), ..mark(Kind::Pin, 1) }, false)
            .unwrap();
        let later = Mark { set_at_unix_ms: 1001, ..mark(Kind::Bookmark, 2) };
        marks.set("x", later, false).unwrap();
    }

    #[test]
    fn there_is_a_limit_and_moving_works_at_it() {
        let disk = Memory::new();
        let mut marks = open(&disk);
        for n in 0..MARKS_MAX {
            marks.marks.insert(format!("m{n}"), mark(Kind::Bookmark, 1));
        }
        let error = marks.set("one-more", mark(Kind::Bookmark, 1), false).unwrap_err();
        assert!(matches!(error, MarkError::TooMany));
        marks.set("m0", mark(Kind::Bookmark, 2), true).unwrap();
    }

    /// What format 1 looks like: this must be read for ever.
    const FORMAT_1: &str = r#"{"format": 1, "marks": {
        "before-deploy": {"kind": "bookmark", "point": {"hlc": 65539, "epoch": 2, "cut": [120, 7],
                          "writers": [0], "end": {"segment": 3, "offset": 64}, "beyond": {"segment": 3, "offset": 4096}},
                          "set_at_unix_ms": 1000, "expires_at_unix_ms": null},
        "gold": {"kind": "pin", "point": {"hlc": 65540, "epoch": 1, "cut": [1],
                 "writers": [0], "end": {"segment": 3, "offset": 64}, "beyond": {"segment": 3, "offset": 4096}},
                 "set_at_unix_ms": 1000, "expires_at_unix_ms": 2000}}}"#;

    #[test]
    fn format_1_is_read_and_what_is_newer_or_damaged_is_refused() {
        let disk = Memory::new();
        tidelock_storage::replace(&disk, "", FILE, FORMAT_1.as_bytes()).unwrap();
        let marks = open(&disk);
        let deploy = &marks.all()["before-deploy"];
        assert_eq!((deploy.kind, deploy.point.hlc), (Kind::Bookmark, Hlc::new(1, 3)));
        assert_eq!(deploy.point.cut.get(WriterId(1)), Seq(7));
        assert_eq!(marks.all()["gold"].expires_at_unix_ms, Some(2000));
        for (text, part) in [
            (r#"{"format": 2, "other": 1}"#, "format 2"),
            (r#"{"marks": {}}"#, "damaged"),
            (r#"{"format": 1, "marks": {"../x": 1}}"#, "damaged"),
            ("{", "damaged"),
        ] {
            tidelock_storage::replace(&disk, "", FILE, text.as_bytes()).unwrap();
            let error = Marks::open(disk.clone()).unwrap_err().to_string();
            assert!(error.contains(part), "{error}");
        }
    }

    #[derive(Clone, Debug)]
    enum Op {
        Set(u8, u64, bool),
        Remove(u8),
        Expire(u64),
    }

    fn any_op() -> impl Strategy<Value = Op> {
        prop_oneof![
            4 => (0u8..4, 0u64..9, any::<bool>()).prop_map(|(name, seq, pin)| Op::Set(name, seq, pin)),
            2 => (0u8..4).prop_map(Op::Remove),
            1 => (0u64..9).prop_map(Op::Expire),
        ]
    }

    fn apply(marks: &mut Marks<Memory>, op: &Op) -> Result<(), MarkError> {
        match op {
            Op::Set(name, seq, pin) => {
                let kind = if *pin { Kind::Pin } else { Kind::Bookmark };
                marks.set(&format!("m{name}"), mark(kind, *seq), true).map(drop)
            }
            Op::Remove(name) => {
                let name = format!("m{name}");
                let kind = marks.all().get(&name).map_or(Kind::Pin, |mark| mark.kind);
                marks.remove(&name, kind)
            }
            Op::Expire(before) => marks.expire(0, |m| m.point.hlc < Hlc::new(*before, 0)).map(drop),
        }
    }

    proptest! {
        /// The power goes off before each of the storage's operations: what is found is what was answered, or
        /// that and the whole of the change under way, however the unsynced parts survive.
        #[test]
        fn power_loss_at_every_operation_keeps_all_or_nothing_of_a_change(
            ops in prop::collection::vec(any_op(), 1..8), survives in prop::collection::vec(any::<bool>(), 64),
        ) {
            let disk = Memory::new();
            let mut marks = open(&disk);
            for op in &ops {
                let before = marks.all().clone();
                let (mut whole, first) = (Marks::open(disk.killed()).unwrap(), disk.ops());
                let _ = apply(&mut whole, op);
                let last = whole.storage.ops();
                for at in first..last {
                    let attempt = disk.killed();
                    let mut cut_off = open(&attempt);
                    attempt.set_faults(Faults { power_off_at: Some(at), ..Faults::default() });
                    prop_assert!(apply(&mut cut_off, op).is_err());
                    prop_assert_eq!(cut_off.all(), &before, "what is shown is durable");
                    for flip in [false, true] {
                        let mut n = 0;
                        let mut chooser = || { n += 1; survives[n % survives.len()] ^ flip };
                        let found = open(&attempt.crash(&mut chooser));
                        prop_assert!(found.all() == &before || found.all() == whole.all());
                    }
                }
                let _ = apply(&mut marks, op);
                let found = open(&disk.crash(&mut || false));
                prop_assert_eq!(found.all(), marks.all(), "what was answered is durable");
            }
        }
    }
}
