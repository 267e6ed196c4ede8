//! Bookmarks and pins of a group: notes of the journal ([`Mark`]).
//!
//! Invariants: answers and lists have durable marks only (rule 6). A pin's hold is taken before the pin is put on record
//! and given up after it is off record, so a pin on record is always held (rule 5). Marks never change by themselves:
//! setting a name that exists is refused, unless it is said to move. A host's request is carried out once, however
//! often the host asks because a link broke before the answer.

use super::{Group, Now};
use crate::history::{Hold, PIN, PastError};
use serde::{Deserialize, Serialize};
use thiserror::Error;
use tidelock_planted::Bug;
use tidelock_protocol::bounds;
use tidelock_protocol::hlc::Hlc;
use tidelock_protocol::ids::MonoNanos;
use tidelock_protocol::limits;
use tidelock_storage::Storage;
use tidelock_store::journal::{
    BATCH_TARGET_BYTES, Behind, Closed, MARKS_MAX_BYTES, Mark, MarkKind, Note, Point, State,
};

/// Milliseconds between two looks for marks that are over. None of them is shown meanwhile.
const LOOK_MS: u64 = 1000;

/// Reason why a mark was not set or removed.
#[derive(Debug, Error)]
pub enum MarkError {
    /// No proper name.
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
        /// The name.
        name: String,
        /// Bookmark or pin.
        kind: MarkKind,
        /// The time that it names.
        at: Hlc,
    },
    /// No mark of this name and kind.
    #[error("there is no {kind} {name}; there are: {known}", kind = kind.word())]
    Unknown {
        /// The name that was asked for.
        name: String,
        /// Bookmark or pin.
        kind: MarkKind,
        /// Marks of this kind that the group has.
        known: String,
    },
    /// No room among the marks of the group.
    #[error(
        "the bookmarks and pins of this group have taken all of their {} KiB: remove some, or let them expire",
        MARKS_MAX_BYTES >> 10
    )]
    TooMany,
    /// The mark would be over at once.
    #[error("it would expire at once: --expires is a span from now, like 7d")]
    ExpiresAtOnce,
    /// A pin's point cannot be held.
    #[error(transparent)]
    Past(#[from] PastError),
    /// The note cannot be written.
    #[error("bookmarks and pins cannot be put on record: {0}")]
    Journal(String),
}

/// A bookmark or pin as it is told.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NamedMark {
    /// Name of the mark.
    pub name: String,
    /// The mark.
    pub mark: Mark,
    /// True if its point is gone: a pin's could not be held, or a recovery to an earlier one has left it out.
    pub lost: bool,
}

/// Holds of the pins that are on record, or may be.
#[derive(Debug, Default)]
pub(super) struct Pins {
    held: Vec<(String, Point, Hold)>,
    look_at: MonoNanos,
}

impl Pins {
    fn is_held(&self, name: &str, point: &Point) -> bool {
        let is_it = |(of, at, hold): &(String, Point, Hold)| {
            of == name && at == point && !hold.is_revoked()
        };
        self.held.iter().any(is_it)
    }
}

impl<S: Storage> Group<S> {
    /// Holds the points of all pins. To be called before the first fold.
    pub(super) fn hold_pins(&mut self) {
        if tidelock_planted::is(Bug::PinsNotHeld) {
            return;
        }
        let marks = self.durable_state.marks.clone();
        for (name, mark) in marks.iter().filter(|(_, mark)| mark.kind == MarkKind::Pin) {
            if let Err(error) = self.hold_pin(name, &mark.point) {
                self.notices.push(format!("the point of pin {name} is lost: {error}"));
            }
        }
    }

    fn hold_pin(&mut self, name: &str, point: &Point) -> Result<(), PastError> {
        if !self.pins.is_held(name, point) {
            let hold = self.hold(point, &format!("{PIN}{name}"))?;
            self.pins.held.push((name.to_owned(), point.clone(), hold));
        }
        Ok(())
    }

    /// Gives up what no pin needs, on record or about to be.
    pub(super) fn release_pins(&mut self) {
        let mut pins = std::mem::take(&mut self.pins.held);
        let of = |state: &State, name: &str, point: &Point| {
            let mark = state.marks.get(name);
            mark.is_some_and(|mark| mark.kind == MarkKind::Pin && mark.point == *point)
        };
        pins.retain(|(name, point, _)| {
            let is_known = of(&self.durable_state, name, point) || of(self.state(), name, point);
            is_known && !self.has_left_out(point)
        });
        self.pins.held = pins;
    }

    /// Bookmarks and pins on stable storage that are not over.
    #[must_use]
    pub fn marks(&self) -> Vec<NamedMark> {
        let all = self.durable_state.marks.iter().filter(|(_, mark)| !self.is_over(mark));
        let told = |(name, mark): (&String, &Mark)| NamedMark {
            name: name.clone(),
            mark: mark.clone(),
            lost: self.has_left_out(&mark.point)
                || (mark.kind == MarkKind::Pin && !self.pins.is_held(name, &mark.point)),
        };
        all.map(told).collect()
    }

    fn is_over(&self, mark: &Mark) -> bool {
        let is_behind =
            |oldest: &Closed| mark.point.hlc < oldest.at && !mark.point.cut.covers(&oldest.cut);
        mark.is_expired(self.now_ms())
            || mark.kind == MarkKind::Bookmark && is_behind(self.oldest())
    }

    /// Sets a mark. Gives what is on record once that is durable: of a request that was done already, what was set then.
    pub fn set_mark(
        &mut self,
        name: &str,
        mark: &Mark,
        moves: bool,
    ) -> Result<Behind<Mark>, MarkError> {
        self.check_takes_mark()?;
        let mark = match self.check_mark(name, mark, moves)? {
            Some(old) => old,
            None => {
                if mark.kind == MarkKind::Pin {
                    self.hold_pin(name, &mark.point)?;
                }
                self.note_mark(name, Some(mark.clone())).inspect_err(|_| self.release_pins())?;
                mark.clone()
            }
        };
        Ok(Behind::new(self.journal.ticket(), mark))
    }

    /// Takes a mark out. Answered once that is durable.
    pub fn remove_mark(&mut self, name: &str, kind: MarkKind) -> Result<Behind<()>, MarkError> {
        self.check_takes_mark()?;
        let marks = &self.journal.state().marks;
        if marks.get(name).is_none_or(|mark| mark.kind != kind) {
            let known = marks.iter().filter(|(_, mark)| mark.kind == kind);
            let known: Vec<_> = known.map(|(name, _)| name.as_str()).collect();
            let known = if known.is_empty() { "none".to_owned() } else { known.join(", ") };
            return Err(MarkError::Unknown { name: name.to_owned(), kind, known });
        }
        self.note_mark(name, None)?;
        Ok(Behind::new(self.journal.ticket(), ()))
    }

    /// Checks that a mark can be set. Returns the one that a request has set already.
    fn check_mark(&self, name: &str, mark: &Mark, moves: bool) -> Result<Option<Mark>, MarkError> {
        if !bounds::is_name(name) {
            return Err(MarkError::Name(name.to_owned()));
        }
        if mark.is_expired(mark.set_at_unix_ms) {
            return Err(MarkError::ExpiresAtOnce);
        }
        let old = self.journal.state().marks.get(name);
        match old.filter(|old| !old.is_expired(mark.set_at_unix_ms)) {
            Some(old) if old.is_same_request(mark) => Ok(Some(old.clone())),
            // Said again, as a script may: the same mark at the same point.
            Some(old) if old.kind == mark.kind && old.point == mark.point => Ok(None),
            Some(old) if !moves || old.kind != mark.kind => {
                let (kind, at) = (old.kind, old.point.hlc);
                Err(MarkError::Exists { name: name.to_owned(), kind, at })
            }
            _ => Ok(None),
        }
    }

    /// No mark waits in a batch that has no room, or is full.
    fn check_takes_mark(&self) -> Result<(), MarkError> {
        if let Some(reason) = self.broken() {
            return Err(MarkError::Journal(reason.to_owned()));
        }
        if self.is_stuck() || self.journal.staged_bytes() >= BATCH_TARGET_BYTES {
            let reason =
                self.stall_reason().unwrap_or_else(|| "too much waits for the disk".into());
            return Err(MarkError::Journal(reason));
        }
        Ok(())
    }

    fn note_mark(&mut self, name: &str, mark: Option<Mark>) -> Result<(), MarkError> {
        let note = Note::Mark { name: name.to_owned(), mark };
        self.journal.stage_note(&note).map_err(|_| MarkError::TooMany)
    }

    /// Takes out, now and then, what is over: marks whose time has come, and bookmarks whose point the window has left
    /// behind. Returns their names.
    pub fn tend_marks(&mut self, now: Now) -> Vec<String> {
        if now.mono < self.pins.look_at || self.check_takes_mark().is_err() {
            return Vec::new();
        }
        self.pins.look_at = now.mono.plus_ms(LOOK_MS);
        let marks = self.journal.state().marks.clone();
        let over = marks.iter().filter(|(_, mark)| self.is_over(mark));
        let over: Vec<_> = over.map(|(name, _)| name.clone()).collect();
        let out = |name: &String| self.note_mark(name, None).is_ok();
        over.into_iter().filter(out).collect()
    }
}
