//! What a group's owner keeps of the past besides the group: its bookmarks and pins, and what they and unfinished
//! snapshots hold.
//!
//! Invariant: each pin on record is held from before the first fold on, or it is said that it is lost. If the
//! record cannot be read, everything is held until it can: a pin might be in it (rule 5).

use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::time::{Duration, Instant};
use tidelock_replica::group::Group;
use tidelock_replica::history::Hold;
use tidelock_replica::travel::marks::{Kind, Mark, Marks};
use tidelock_replica::travel::snapshot::Record;
use tidelock_storage::files::Files;
use tidelock_store::journal::Closed;

/// How often it is looked for what is over, to take it off record; it is not shown before.
const LOOK: Duration = Duration::from_secs(1);

/// A bookmark or pin as it is told.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NamedMark {
    /// Its name.
    pub name: String,
    /// What it is.
    pub mark: Mark,
    /// Its point is gone: a pin's could not be held, or a recovery to an earlier one has left it out.
    pub lost: bool,
}

/// The marks of a group that was opened.
#[derive(Debug)]
pub(super) struct Past {
    marks: Result<Marks<Files>, String>,
    holds: BTreeMap<String, Hold>,
    /// Of snapshots that are not whole.
    of_snapshots: BTreeMap<String, Vec<Hold>>,
    /// In place of pins that are not known.
    _everything: Option<Hold>,
    look_at: Instant,
}

impl Past {
    /// To be called before the first fold.
    pub(super) fn open(group: &mut Group<Files>, snapshots: Vec<(String, Record)>) -> Self {
        let marks = Marks::open(group.storage().clone()).map_err(|e| e.to_string());
        let mut past = Self {
            marks,
            holds: BTreeMap::new(),
            of_snapshots: BTreeMap::new(),
            _everything: None,
            look_at: Instant::now(),
        };
        for (name, record) in snapshots {
            for point in record.needs() {
                // What it cannot have its job tells, or does without.
                if let Ok(hold) = group.hold(point, &format!("snapshot {name}")) {
                    past.of_snapshots.entry(name.clone()).or_default().push(hold);
                }
            }
        }
        match &past.marks {
            Ok(marks) => {
                let pins = marks.all().iter().filter(|(_, mark)| mark.kind == Kind::Pin);
                for (name, mark) in pins {
                    match group.hold(&mark.point, &why(name)) {
                        Ok(hold) => {
                            past.holds.insert(name.clone(), hold);
                        }
                        Err(error) => tracing::error!(pin = name, "its point is lost: {error}"),
                    }
                }
            }
            Err(error) => {
                tracing::error!(
                    "bookmarks and pins: {error}; nothing leaves the window until then"
                );
                let oldest =
                    group.history().and_then(|h| h.hold(&h.oldest()?, "what marks.json may pin"));
                past._everything = oldest.ok();
            }
        }
        past
    }

    /// Those that are not over.
    pub(super) fn all(
        &self,
        group: &Group<Files>,
        now_unix_ms: u64,
    ) -> Result<Vec<NamedMark>, String> {
        let marks = self.marks.as_ref().map_err(Clone::clone)?;
        let is_over = |mark: &Mark| {
            mark.is_expired(now_unix_ms)
                || (mark.kind == Kind::Bookmark && is_behind(mark, group.oldest()))
        };
        let all = marks.all().iter().filter(|(_, mark)| !is_over(mark));
        let told = |(name, mark): (&String, &Mark)| NamedMark {
            name: name.clone(),
            mark: mark.clone(),
            lost: group.has_left_out(&mark.point)
                || (mark.kind == Kind::Pin && self.holds.get(name).is_none_or(Hold::is_revoked)),
        };
        Ok(all.map(told).collect())
    }

    /// Sets a mark: what it holds first, then the record. Returns what is on record.
    pub(super) fn set(
        &mut self,
        group: &mut Group<Files>,
        name: &str,
        mark: Mark,
        moves: bool,
    ) -> Result<Mark, String> {
        let marks = self.marks.as_mut().map_err(|e| e.clone())?;
        marks.check(name, &mark, moves).map_err(|e| e.to_string())?;
        let hold = match mark.kind {
            Kind::Pin => Some(group.hold(&mark.point, &why(name)).map_err(|e| e.to_string())?),
            Kind::Bookmark => None,
        };
        let mark = marks.set(name, mark, moves).map_err(|e| e.to_string())?;
        // The old one goes only now.
        match hold {
            Some(hold) => self.holds.insert(name.to_owned(), hold),
            None => self.holds.remove(name),
        };
        Ok(mark)
    }

    /// Takes a mark out: the record first, then what it holds.
    pub(super) fn remove(&mut self, name: &str, kind: Kind) -> Result<(), String> {
        let marks = self.marks.as_mut().map_err(|e| e.clone())?;
        marks.remove(name, kind).map_err(|e| e.to_string())?;
        self.holds.remove(name);
        Ok(())
    }

    /// Nothing is needed for a snapshot any more.
    pub(super) fn snapshot_over(&mut self, name: &str) {
        self.of_snapshots.remove(name);
    }

    /// Takes out what is over, now and then.
    pub(super) fn tend(&mut self, group: &Group<Files>, now_unix_ms: u64) {
        let Ok(marks) = &mut self.marks else { return };
        if Instant::now() < self.look_at || marks.all().is_empty() {
            return;
        }
        self.look_at = Instant::now() + LOOK;
        self.holds.retain(|name, _| {
            marks.all().get(name).is_some_and(|mark| !group.has_left_out(&mark.point))
        });
        match marks.expire(now_unix_ms, |mark| is_behind(mark, group.oldest())) {
            Ok(over) => {
                for name in over {
                    tracing::info!(name, "a bookmark or pin is over");
                    self.holds.remove(&name);
                }
            }
            Err(error) => tracing::warn!("bookmarks and pins that are over stay for now: {error}"),
        }
    }
}

/// Whether the window has left behind what it names.
fn is_behind(mark: &Mark, oldest: &Closed) -> bool {
    mark.point.hlc < oldest.at && !mark.point.cut.covers(&oldest.cut)
}

fn why(name: &str) -> String {
    format!("{}{name}", tidelock_replica::history::PIN)
}
