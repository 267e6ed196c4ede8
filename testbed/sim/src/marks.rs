//! Operators who set bookmarks and pins, and take them out. Rules 5 and 6: a mark that was answered is there, whatever
//! happens to the server, until somebody takes it out; and a pin's point shows what it showed.

use crate::backup::Incoming;
use crate::failure::{Checked, Checker, check};
use crate::group_driver::Asker;
use crate::past::Asked;
use crate::world::{World, note};
use std::collections::{BTreeMap, BTreeSet};
use tidelock_replica::group::{AtSizeMax, Group, NamedMark, SEEDED};
use tidelock_replica::group_loop::{Answer, Order};
use tidelock_storage::memory::Memory;
use tidelock_store::journal::{Mark, MarkKind, Point};

/// Most marks of a group that somebody knows of.
const MARKS_MAX: usize = 3;

/// Knowledge of operators on a group's marks.
#[derive(Debug, Default)]
pub(crate) struct Marks {
    last: u64,
    /// Orders without an answer, by the mark's name.
    asked: BTreeMap<Asker, String>,
    /// Marks that are on record, as operators were told. Each name is used once.
    told: BTreeMap<String, (MarkKind, Point, Option<u64>)>,
    /// Marks that are off record, as operators were told.
    gone: BTreeSet<String>,
}

impl Marks {
    /// A group was seeded, and what it was seeded with is pinned.
    pub(crate) fn seeded(point: Point) -> Self {
        let pin = (SEEDED.to_owned(), (MarkKind::Pin, point, None));
        Self { told: BTreeMap::from([pin]), ..Self::default() }
    }

    /// The server is gone, and with it whoever waited.
    pub(crate) fn hang_up(&mut self) {
        self.asked.clear();
    }
}

impl World {
    /// An operator sets a mark at a point that was just asked for, or takes one out.
    pub(crate) fn change_marks(&mut self, group: usize, of: &Group<Memory>, point: &Point) {
        let knows = &self.backup.groups[group].marks;
        let told = knows.told.len();
        if told > 0 && self.rng.chance(1, 16) {
            let nth = self.rng.index(told);
            let name = self.backup.groups[group].marks.told.keys().nth(nth).cloned();
            self.remove_mark(group, &name.expect("just counted"));
        }
        let waits = self.backup.groups[group].marks.asked.len();
        if told + waits >= MARKS_MAX || !self.rng.chance(1, 8) {
            return;
        }
        let kind = if self.rng.chance(2, 3) { MarkKind::Pin } else { MarkKind::Bookmark };
        let expires = self.rng.chance(1, 4).then(|| of.now_ms() + self.rng.range(100..3000));
        let mark = Mark {
            kind,
            point: point.clone(),
            set_at_unix_ms: of.now_ms(),
            expires_at_unix_ms: expires,
            asked_by: None,
        };
        let marks = &mut self.backup.groups[group].marks;
        marks.last += 1;
        let name = format!("m{}", marks.last);
        note!(self, "group {group}: {kind:?} {name} is ordered at {}", point.hlc);
        self.order_of_mark(group, &name, Order::SetMark { name: name.clone(), mark, moves: false });
    }

    fn remove_mark(&mut self, group: usize, name: &str) {
        let marks = &mut self.backup.groups[group].marks;
        let Some((kind, ..)) = marks.told.remove(name) else { return };
        self.order_of_mark(group, name, Order::RemoveMark { name: name.to_owned(), kind });
    }

    /// No more faults: nobody holds a point for ever, known to anybody or not.
    pub(crate) fn take_marks_out(&mut self) {
        for group in 0..self.backup.groups.len() {
            let slot = &mut self.backup.groups[group];
            let listed = slot.group().map(Group::marks).unwrap_or_default();
            for NamedMark { name, mark, .. } in listed {
                let marks = &mut self.backup.groups[group].marks;
                marks.told.remove(&name);
                if !marks.asked.values().any(|of| *of == name) {
                    let order = Order::RemoveMark { name: name.clone(), kind: mark.kind };
                    self.order_of_mark(group, &name, order);
                }
            }
        }
    }

    fn order_of_mark(&mut self, group: usize, name: &str, order: Order) {
        let slot = &mut self.backup.groups[group];
        let asker = slot.operators.newcomer();
        slot.marks.asked.insert(asker, name.to_owned());
        slot.inbox.push_back(Incoming::Order(order, asker));
        self.wake_group_now(group);
    }

    /// An operator has an answer on a mark.
    pub(crate) fn mark_answered(&mut self, group: usize, asker: Asker, answer: Answer) {
        let marks = &mut self.backup.groups[group].marks;
        let Some(name) = marks.asked.remove(&asker) else { return };
        match answer {
            Answer::Marked(Ok(Mark { kind, point, expires_at_unix_ms, .. })) => {
                self.counts.marks += 1;
                marks.told.insert(name, (kind, point, expires_at_unix_ms));
            }
            Answer::Unmarked(Ok(())) => drop(marks.gone.insert(name)),
            // Perhaps carried out all the same.
            answer => note!(self, "group {group}: mark {name}: {answer:?}"),
        }
    }

    /// Compares the marks of a group, or of a copy that was opened after a crash, with what operators were told.
    pub(crate) fn check_marks(&mut self, group: usize, of: &mut Group<Memory>) -> Checked {
        let listed = of.marks();
        let told = self.backup.groups[group].marks.told.clone();
        for (name, (kind, point, expires_at_unix_ms)) in told {
            let found = listed.iter().find(|of| of.name == name);
            let oldest = of.oldest();
            let is_behind = point.hlc < oldest.at && !point.cut.covers(&oldest.cut);
            let is_over = expires_at_unix_ms.is_some_and(|at| at <= of.now_ms())
                || kind == MarkKind::Bookmark && is_behind;
            let is_as_told = match found {
                Some(of) => of.mark.kind == kind && of.mark.point == point,
                None => is_over,
            };
            check(is_as_told && found.is_some() != is_over, Checker::Marks, || {
                format!("group {group}: {kind:?} {name} of {point:?}, over {is_over}: {found:?}")
            })?;
            let Some(found) = found.filter(|_| kind == MarkKind::Pin) else { continue };
            if found.lost {
                let may_be_lost = of.has_left_out(&point)
                    || self.plan.groups[group].retention.at_size_max == AtSizeMax::Shorten;
                check(may_be_lost, Checker::Marks, || {
                    format!("group {group}: pin {name} is lost")
                })?;
                continue;
            }
            let Ok(past) = of.history() else { continue };
            match past.locate(&point).and_then(|at| Ok((past.open(&at)?, at))) {
                Ok((views, point)) => {
                    self.check_views(group, &Asked { time: point.hlc, point }, &views)?;
                }
                Err(error) => check(false, Checker::Marks, || {
                    format!("group {group}: pin {name} at {point:?} cannot be shown: {error}")
                })?,
            }
        }
        let gone = &self.backup.groups[group].marks.gone;
        let back = listed.iter().find(|of| gone.contains(&of.name));
        check(back.is_none(), Checker::Marks, || format!("group {group}: {back:?} was taken out"))
    }
}
