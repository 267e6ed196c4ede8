//! Operators' orders that may have to wait: for the end of a lease that may hold, for room, and for
//! stable storage: an order that is carried out is answered once that is durable.
//!
//! ```text
//!  order ──▶ tried in the next turn ──▶ answered
//!               │        ▲
//!               ▼        │ the deadline has come or has moved; what it stands behind is durable;
//!              waits ────┘ or a turn, if there was no room
//!               └──▶ forgotten: whoever has asked is gone
//! ```
//!
//! Invariant (rule 4): nothing is done for an asker that is gone. An operator who ends a recovery that waits may go on
//! at the primary site.

use super::{Driver, GroupLoop, Phase};
use crate::group::{
    ApproveError, Group, MarkError, MoveError, Moved, NotOnRecord, NotYet, Now, RecoverError,
    RecoverHow, Recovery, RemoveError,
};
use crate::history::Point;
use tidelock_planted::Bug;
use tidelock_protocol::ids::MonoNanos;
use tidelock_protocol::machine::Machine;
use tidelock_storage::Storage;
use tidelock_store::journal::{Behind, Mark, MarkKind, Ticket};

/// Messages that a host had sent before the disaster arrive within this time; later ones show that it lives.
const ON_ITS_WAY_MAX_MS: u64 = 3_000;

/// An order of an operator.
#[derive(Clone, Debug)]
pub enum Order {
    /// Recovers the group.
    Recover {
        /// The operator states that the primary is dead.
        primary_declared_dead: bool,
        /// To a point of the past; `None`: with everything that can be.
        point: Option<Point>,
        /// Also if some of it cannot be read.
        accepts_damage: bool,
    },
    /// Removes a member.
    Remove {
        /// The member.
        member: String,
    },
    /// Gives a member to a host.
    Move {
        /// The member.
        member: String,
        /// The host.
        to: String,
    },
    /// Approves what is to be booted.
    Approve {
        /// The member.
        member: String,
        /// The description that was looked at.
        machine: Machine,
    },
    /// Sets a bookmark or pin.
    SetMark {
        /// Name of the mark.
        name: String,
        /// The mark.
        mark: Mark,
        /// True if one of this name is moved.
        moves: bool,
    },
    /// Waits until everything that has arrived is durable, as far as there is room: for whoever looks at the past next.
    Settle,
    /// Takes a bookmark or pin out.
    RemoveMark {
        /// Name of the mark.
        name: String,
        /// Bookmark or pin, as which it must be there.
        kind: MarkKind,
    },
}

impl Order {
    /// The answer if it cannot be carried out for this reason.
    fn failed(&self, reason: String) -> Answer {
        match self {
            Self::Recover { .. } => Answer::Recovered(Err(RecoverError::Journal(reason))),
            Self::Remove { .. } => Answer::Removed(Err(RemoveError::Journal(reason))),
            Self::Move { .. } => Answer::Moved(Err(MoveError::Unavailable(reason))),
            Self::Approve { .. } => Answer::Approved(Err(ApproveError::Journal(reason))),
            Self::SetMark { .. } => Answer::Marked(Err(MarkError::Journal(reason))),
            Self::RemoveMark { .. } => Answer::Unmarked(Err(MarkError::Journal(reason))),
            Self::Settle => Answer::Settled,
        }
    }
}

/// The reason why an order waits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Wait {
    /// The lease of a host may hold.
    Lease {
        /// Until it is certain to have ended, unless the host is heard again.
        remaining_ms: u64,
        /// Members that have not given up their leases, with their hosts, if others have.
        kept_by: Vec<String>,
    },
    /// No room to put it on record, for this reason.
    Room(String),
}

/// The answer to an order.
#[derive(Debug)]
pub enum Answer {
    /// To [`Order::Recover`].
    Recovered(Result<Recovery, RecoverError>),
    /// To [`Order::Remove`].
    Removed(Result<(), RemoveError>),
    /// To [`Order::Move`].
    Moved(Result<Moved, MoveError>),
    /// To [`Order::Approve`].
    Approved(Result<(), ApproveError>),
    /// To [`Order::SetMark`]: the mark that is on record.
    Marked(Result<Mark, MarkError>),
    /// To [`Order::RemoveMark`].
    Unmarked(Result<(), MarkError>),
    /// To [`Order::Settle`].
    Settled,
}

/// An order that has no answer yet.
pub(super) struct Ordered<Asker> {
    asker: Asker,
    order: Order,
    since: MonoNanos,
    /// True if everything that had arrived when it was tried is durable.
    has_settled: bool,
    until: Until,
    /// The wait that was told last.
    told: Until,
    /// The answer of an order that is carried out, once that is durable.
    carried_out: Option<Behind<Answer>>,
}

/// The outcome of an attempt.
enum Tried {
    Answered(Answer),
    /// The answer, once what the order has changed is durable.
    CarriedOut(Behind<Answer>),
}

/// The event after which an order is tried again.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Until {
    NextTurn,
    Deadline(MonoNanos),
    /// Everything up to this is durable.
    Durable(Ticket),
    /// Room is made. The reason was told.
    Room(String),
}

impl<D: Driver> GroupLoop<D> {
    /// An operator orders something. The answer comes in the next turn at the earliest.
    pub fn order(&mut self, order: Order, asker: D::Asker, now: Now) {
        self.tick(now);
        let until = Until::NextTurn;
        self.orders.push(Ordered {
            asker,
            order,
            since: now.mono,
            has_settled: false,
            until,
            told: Until::NextTurn,
            carried_out: None,
        });
    }

    /// The earliest time at which an order that waits is tried again.
    pub(super) fn deadline(&self) -> Option<MonoNanos> {
        let deadlines = self.orders.iter().filter_map(|of| match of.until {
            Until::NextTurn => Some(MonoNanos(0)),
            Until::Deadline(_) if tidelock_planted::is(Bug::DeadlineForgotten) => None,
            Until::Deadline(at) => Some(at),
            Until::Durable(_) | Until::Room(_) => None,
        });
        deadlines.min()
    }

    pub(super) fn waits_for_room(&self) -> bool {
        self.orders.iter().any(|of| matches!(of.until, Until::Room(_)))
    }

    pub(super) fn order_awaits_durable(&self) -> bool {
        self.orders.iter().any(|of| matches!(of.until, Until::Durable(_)))
    }

    pub(super) fn carry_out_orders(&mut self, now: Now, driver: &mut D) {
        for of in std::mem::take(&mut self.orders) {
            let is_gone = driver.is_gone(&of.asker);
            if is_gone && !tidelock_planted::is(Bug::RecoveredForNobody) {
                continue;
            }
            match self.is_due(&of, now) {
                true => self.carry_out(of, now, driver),
                false => self.orders.push(of),
            }
        }
    }

    fn is_due(&self, of: &Ordered<D::Asker>, now: Now) -> bool {
        let at = match (&of.until, self.group()) {
            (Until::Deadline(at), _) => *at,
            (Until::Durable(ticket), Some(group)) => return group.must_try_again(*ticket),
            _ => return true,
        };
        let is_forgotten = tidelock_planted::is(Bug::DeadlineForgotten);
        let has_moved = match self.group() {
            Some(group) => deadline_of(group, &of.order) != Some(at),
            None => true,
        };
        has_moved || now.mono >= at && !is_forgotten
    }

    fn carry_out(&mut self, of: Ordered<D::Asker>, now: Now, driver: &mut D) {
        let Some(of) = self.answer_if_durable(of, driver) else { return };
        if matches!(of.order, Order::Recover { .. }) {
            // The reason why it failed may be over, and a disaster does not wait for the next attempt.
            self.open_if_broken(now, driver);
            // Frames that have arrived are part of it.
            self.take_all_waiting(now, driver);
        }
        let answer = match self.attempt(&of, now) {
            Tried::Answered(answer) => answer,
            Tried::CarriedOut(behind) => {
                let until = Until::Durable(behind.ticket());
                let of = Ordered { carried_out: Some(behind), until, ..of };
                self.orders.extend(self.answer_if_durable(of, driver));
                return;
            }
        };
        if let Some(NotYet(ticket)) = not_yet(&answer) {
            self.orders.push(Ordered { has_settled: true, until: Until::Durable(ticket), ..of });
            return;
        }
        match self.wait_for(&answer) {
            Some((wait, until)) => {
                if until != of.told {
                    driver.waits(&of.asker, wait);
                }
                let told = until.clone();
                self.orders.push(Ordered { has_settled: false, until, told, ..of });
            }
            None => driver.answer_order(of.asker, answer),
        }
    }

    /// Answers an order that is carried out and durable, or cannot become durable. Gives all others back.
    fn answer_if_durable(
        &self,
        mut of: Ordered<D::Asker>,
        driver: &mut D,
    ) -> Option<Ordered<D::Asker>> {
        let Some(behind) = of.carried_out.take() else { return Some(of) };
        let Some(group) = self.group() else {
            // Perhaps it is durable all the same: the order is tried again when the group is open.
            return Some(of);
        };
        let ticket = behind.ticket();
        match behind.open(&group.durable()) {
            Ok(answer) => driver.answer_order(of.asker, answer),
            Err(behind) => match group.check_on_record(ticket) {
                Err(NotOnRecord::Cannot(reason)) => {
                    let answer = of.order.failed(reason);
                    driver.answer_order(of.asker, answer);
                }
                _ => return Some(Ordered { carried_out: Some(behind), ..of }),
            },
        }
        None
    }

    fn attempt(&mut self, of: &Ordered<D::Asker>, now: Now) -> Tried {
        let unavailable = self.unavailable();
        let Phase::Live(group) = &mut self.phase else {
            return Tried::Answered(match of.order {
                Order::Recover { .. } => Answer::Recovered(Err(unavailable)),
                _ => of.order.failed(unavailable.to_string()),
            });
        };
        Tried::Answered(match &of.order {
            Order::Move { member, to } => Answer::Moved(group.move_member(now, member, to)),
            Order::Remove { member } => Answer::Removed(group.try_remove(member)),
            Order::Approve { member, machine } => match group.approve(member, machine) {
                Ok(approved) => {
                    return Tried::CarriedOut(approved.map(|()| Answer::Approved(Ok(()))));
                }
                Err(error) => Answer::Approved(Err(error)),
            },
            Order::Settle => {
                return Tried::CarriedOut(Behind::new(group.ticket(), Answer::Settled));
            }
            Order::SetMark { name, mark, moves } => match group.set_mark(name, mark, *moves) {
                Ok(mark) => return Tried::CarriedOut(mark.map(|mark| Answer::Marked(Ok(mark)))),
                Err(error) => Answer::Marked(Err(error)),
            },
            Order::RemoveMark { name, kind } => match group.remove_mark(name, *kind) {
                Ok(removed) => {
                    return Tried::CarriedOut(removed.map(|()| Answer::Unmarked(Ok(()))));
                }
                Err(error) => Answer::Unmarked(Err(error)),
            },
            Order::Recover { primary_declared_dead, point, accepts_damage } => {
                let (primary_declared_dead, accepts_damage) =
                    (*primary_declared_dead, *accepts_damage);
                let how =
                    RecoverHow { primary_declared_dead, point: point.as_ref(), accepts_damage };
                let recovered = group.try_recover(now, how, of.has_settled);
                Answer::Recovered(recovered.map_err(|error| lives(group, error, of.since, now)))
            }
        })
    }

    /// The group is to be opened again: no ticket counts any more, and orders are tried again.
    pub(super) fn forget_tickets(&mut self) {
        for of in &mut self.orders {
            (of.carried_out, of.until) = (None, Until::NextTurn);
        }
    }

    /// The reason and the end of a wait, if this is no answer yet.
    fn wait_for(&self, answer: &Answer) -> Option<(Wait, Until)> {
        let group = self.group()?;
        match answer {
            Answer::Recovered(Err(RecoverError::Grace { remaining_ms, kept_by })) => {
                let (remaining_ms, kept_by) = (*remaining_ms, kept_by.clone());
                let until = Until::Deadline(group.may_recover_from());
                Some((Wait::Lease { remaining_ms, kept_by }, until))
            }
            // The journal may be making room by itself, by shortening the window.
            Answer::Recovered(Err(error @ RecoverError::NoRoom(_))) => {
                let reason = error.to_string();
                Some((Wait::Room(reason.clone()), Until::Room(reason)))
            }
            Answer::Moved(Err(MoveError::Lease { remaining_ms, member, .. })) => {
                let wait = Wait::Lease { remaining_ms: *remaining_ms, kept_by: Vec::new() };
                Some((wait, Until::Deadline(group.may_move_from(member)?)))
            }
            _ => None,
        }
    }
}

/// The ticket of an order that is carried out, and not durable yet.
fn not_yet(answer: &Answer) -> Option<NotYet> {
    match answer {
        Answer::Recovered(Err(RecoverError::NotYet(ticket)))
        | Answer::Removed(Err(RemoveError::NotYet(ticket)))
        | Answer::Approved(Err(ApproveError::NotYet(ticket))) => Some(NotYet(*ticket)),
        _ => None,
    }
}

fn deadline_of<S: Storage>(group: &Group<S>, order: &Order) -> Option<MonoNanos> {
    match order {
        Order::Remove { .. }
        | Order::Approve { .. }
        | Order::Settle
        | Order::SetMark { .. }
        | Order::RemoveMark { .. } => None,
        Order::Recover { .. } => Some(group.may_recover_from()),
        Order::Move { member, .. } => group.may_move_from(member),
    }
}

/// A recovery that waits does not go on when the primary turns out to live. With part of the group switched over, the
/// operator already knows the hosts that are waited for.
fn lives<S: Storage>(
    group: &Group<S>,
    error: RecoverError,
    since: MonoNanos,
    now: Now,
) -> RecoverError {
    match &error {
        RecoverError::Grace { kept_by, .. } if kept_by.is_empty() => {
            match group.heard_after(since.plus_ms(ON_ITS_WAY_MAX_MS), now) {
                Some((host, heard_ago_ms)) => {
                    let group = group.manifest().group.clone();
                    RecoverError::Lives { group, host, heard_ago_ms }
                }
                None => error,
            }
        }
        _ => error,
    }
}
