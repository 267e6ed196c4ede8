//! Rule 5: what the backup shows of the past equals a replay of its own, which the oracle keeps,
//! whenever and however often it is asked: across folds, retention, holds, restarts, power losses
//! and recoveries.

use crate::backup::GroupSlot;
use crate::failure::{Checked, Checker, check};
use crate::probe::first_difference;
use crate::world::{World, note};
use std::collections::BTreeMap;
use std::sync::Arc;
use tidelock_protocol::hlc::Hlc;
use tidelock_protocol::ids::{DiskId, WriterId};
use tidelock_protocol::message::CopyState;
use tidelock_replica::group::{AtSizeMax, Group};
use tidelock_replica::history::{At, History, Hold, PastError, PastView, Point};
use tidelock_storage::memory::{Memory, MemoryFile};
use tidelock_store::extents::DiskKey;

/// Answers that are remembered.
const ASKED_MAX: usize = 24;
/// Views that are kept open.
const VIEWS_MAX: usize = 3;

/// A time that was asked for, and the answer.
#[derive(Clone, Debug)]
pub struct Asked {
    pub(crate) time: Hlc,
    pub(crate) point: Point,
}

/// A view that stays open.
pub type Kept = (Asked, BTreeMap<DiskKey, PastView<MemoryFile>>);

/// A hold that stays.
pub type Held = (Asked, Hold);

impl World {
    /// Asks the backup for its past, as it is now.
    pub fn check_past(&mut self, group: usize) -> Checked {
        if self.is_past_spoilt {
            return Ok(());
        }
        let asked = self.with_open(group, |world, of| {
            world.check_kept(group)?;
            world.ask_past(group, of, true)?;
            world.travel(group, of)
        });
        self.wake_group_now(group);
        asked.unwrap_or(Ok(()))
    }

    /// Asks for times that were asked for before, and, if `anew`, for others.
    pub(crate) fn ask_past(&mut self, group: usize, of: &mut Group<Memory>, anew: bool) -> Checked {
        let past = match of.history() {
            Ok(past) => past,
            // No room, or it is about to break.
            Err(_) => return Ok(()),
        };
        let (oldest, newest) = (past.oldest_time(), past.newest_time());
        self.check_window(group, of)?;
        self.check_marks(group, of)?;
        if self.rng.chance(1, 4) {
            self.ask_latest(group, of, &past, anew)?;
        }
        let mut times: Vec<Hlc> = Vec::new();
        if anew && oldest <= newest {
            times.push(Hlc(oldest.0 + self.rng.below(newest.0 - oldest.0 + 1)));
            let vm = *self.rng.pick(&self.plan.groups[group].vms);
            let draw = self.rng.number();
            times.extend(self.vms[vm].oracle.some_time(draw));
            times.push(newest);
        }
        let slot = &self.backup.groups[group];
        if !slot.asked.is_empty() {
            let some = self.rng.index(slot.asked.len());
            times.push(self.backup.groups[group].asked[some].time);
        }
        for time in times {
            let before = self.backup.groups[group].asked.iter().find(|a| a.time == time).cloned();
            let point = match past.resolve(&At::Hlc(time)) {
                Ok(point) => point,
                Err(PastError::BeforeWindow { .. }) if time < oldest => continue,
                Err(PastError::Future { .. } | PastError::NotComplete { .. }) if time > newest => {
                    check(before.is_none(), Checker::Past, || {
                        format!("group {group} at {time}: it was complete, and now is not")
                    })?;
                    continue;
                }
                Err(PastError::Initialising { .. }) if before.is_none() => continue,
                Err(error) => {
                    check(false, Checker::Past, || {
                        format!(
                            "group {group} at {time} of {oldest} to {newest}, fold at {:?}: {error}",
                            of.fold_position()
                        )
                    })?;
                    continue;
                }
            };
            check(time >= oldest && time <= newest, Checker::Past, || {
                format!("group {group} at {time}: an answer outside of {oldest} to {newest}")
            })?;
            if let Some(before) = &before {
                let (was, is) = (&before.point.cut, &point.cut);
                check(was == is, Checker::Past, || {
                    format!("group {group} at {time} was {was}, and now is {is}")
                })?;
            }
            self.check_point(group, time, &point, of.state())?;
            let views = match past.open(&point) {
                Ok(views) => views,
                Err(error) => {
                    check(false, Checker::Past, || {
                        format!(
                            "group {group} at {time} of {oldest} to {newest}, fold at {:?}: {error}",
                            of.fold_position()
                        )
                    })?;
                    continue;
                }
            };
            let asked = Asked { time, point };
            self.check_views(group, &asked, &views)?;
            self.counts.pasts += 1;
            if !anew {
                continue;
            }
            self.change_marks(group, of, &asked.point);
            let hold = past.hold(&asked.point, "the simulator");
            let (keep, replace) = (self.rng.chance(1, 4), self.rng.number() as usize);
            let slot = &mut self.backup.groups[group];
            if keep && slot.views.len() < VIEWS_MAX {
                slot.views.push((asked.clone(), views));
            } else if keep
                && slot.held.len() < VIEWS_MAX
                && let Ok(hold) = hold
            {
                slot.held.push((asked.clone(), hold));
            }
            if before.is_none() {
                if slot.asked.len() < ASKED_MAX {
                    slot.asked.push(asked);
                } else {
                    slot.asked[replace % ASKED_MAX] = asked;
                }
            }
        }
        self.check_held(group, of)
    }

    /// What a recovery would take. It may be kept.
    fn ask_latest(
        &mut self,
        group: usize,
        of: &mut Group<Memory>,
        past: &History<MemoryFile>,
        anew: bool,
    ) -> Checked {
        let Ok(point) = past.resolve(&At::Latest) else { return self.check_held(group, of) };
        if !of.state().recoveries.iter().any(|start| start.epoch == point.epoch) {
            self.check_closed(group, &point.cut)?;
        }
        let views = match past.open(&point) {
            Ok(views) => views,
            Err(error) => {
                check(false, Checker::Past, || format!("group {group}, latest: {error}"))?;
                return self.check_held(group, of);
            }
        };
        let asked = Asked { time: point.hlc, point };
        self.check_views(group, &asked, &views)?;
        self.counts.pasts += 1;
        let slot = &mut self.backup.groups[group];
        if anew && slot.views.len() < VIEWS_MAX {
            slot.views.push((asked, views));
        } else if anew
            && slot.held.len() < VIEWS_MAX
            && let Ok(hold) = past.hold(&asked.point, "the simulator")
        {
            slot.held.push((asked, hold));
        }
        self.check_held(group, of)
    }

    /// Nothing inside the window is folded.
    fn check_window(&self, group: usize, of: &Group<Memory>) -> Checked {
        let retention = self.plan.groups[group].retention;
        let status = of.past_status();
        if retention.window_ms == 0 || status.shortened || retention.at_size_max == AtSizeMax::Stop
        {
            return Ok(());
        }
        let (oldest, newest) = (status.oldest_unix_ms, status.newest_unix_ms);
        check(oldest <= newest.saturating_sub(retention.window_ms), Checker::Past, || {
            format!(
                "group {group}: what arrived at {oldest} ms is folded, the newest at {newest} ms"
            )
        })
    }

    /// The point is closed, has nothing after its time, but all that was told by then, and of a single writer all up
    /// to it.
    fn check_point(
        &mut self,
        group: usize,
        time: Hlc,
        point: &Point,
        state: &tidelock_store::journal::State,
    ) -> Checked {
        let recoveries = &state.recoveries;
        let recovered = recoveries.iter().any(|start| start.epoch == point.epoch);
        if recovered {
            return Ok(());
        }
        self.check_closed(group, &point.cut)?;
        let vms = self.plan.groups[group].vms.clone();
        for vm in &vms {
            let writer = WriterId(self.plan.vms[*vm].writer);
            if !point.writers.contains(&writer) {
                continue;
            }
            let newest = self.vms[*vm].oracle.newest_in(point.cut.get(writer));
            check(newest <= time, Checker::Past, || {
                format!("group {group} at {time} has a record of vm {vm} at {newest}")
            })?;
        }
        let slot = &self.backup.groups[group];
        let told = slot.told_at.iter().rev().find(|(newest, _)| *newest <= time);
        check(told.is_none_or(|(_, told)| point.cut.covers(told)), Checker::Past, || {
            format!("group {group} at {time} is at {}, told by then was {:?}", point.cut, told)
        })?;
        // Up to a barrier what its writer's clock says of a record is not what counts.
        let counts_by_clock = recoveries.is_empty() && time > state.barrier;
        if let ([vm], true) = (&vms[..], counts_by_clock) {
            let mut of = self.backup.groups[group].contiguous.get(WriterId(0));
            // Who asked to be attached and was turned away for lack of room has begun a resync all the same, and what was
            // still to be taken of the run before is in it.
            let writer = &state.writers[0];
            if writer.copy == CopyState::Resyncing {
                of = of.min(writer.committed);
            }
            let greatest = self.vms[*vm].oracle.greatest_at(time, of);
            let found = point.cut.get(WriterId(0));
            check(found == greatest, Checker::Past, || {
                format!(
                    "group {group} at {time} is at {found}, and could be at {greatest}; {point:?}, {writer:?}"
                )
            })?;
        }
        Ok(())
    }

    /// What a member's disks were at a point, by the oracle's own replay; `None`: they had no state.
    pub(crate) fn disks_at(
        &mut self,
        vm: usize,
        point: &Point,
    ) -> Checked<Option<Arc<Vec<Vec<u8>>>>> {
        let plan = &self.plan.vms[vm];
        let writer = WriterId(plan.writer);
        if !point.writers.contains(&writer) {
            return Ok(None);
        }
        let seq = point.cut.get(writer);
        let recovered = self.backup.groups[plan.group].recovered.as_ref();
        match recovered.filter(|of| of.epoch == point.epoch) {
            Some(of) => Ok(Some(Arc::new(of.images(usize::from(writer.0), seq)))),
            None => Ok(Some(self.vms[vm].oracle.state_at(seq)?)),
        }
    }

    /// The disks of a point, byte by byte.
    pub(crate) fn check_views(
        &mut self,
        group: usize,
        asked: &Asked,
        views: &BTreeMap<DiskKey, PastView<MemoryFile>>,
    ) -> Checked {
        let Asked { time, point } = asked;
        for vm in self.plan.groups[group].vms.clone() {
            let writer = WriterId(self.plan.vms[vm].writer);
            let Some(expected) = self.disks_at(vm, point)? else { continue };
            for (nth, want) in expected.iter().enumerate() {
                let key = DiskKey { writer, disk: DiskId(nth as u16) };
                let size = views.get(&key).map_or(0, |view| view.size_bytes() as usize);
                let mut have = vec![0; want.len().min(size)];
                let read = views.get(&key).map(|view| (view.read(0, &mut have), view.is_revoked()));
                match read {
                    Some((Ok(()), _)) => {}
                    Some((Err(_), true)) => return Ok(()),
                    read => {
                        check(false, Checker::Past, || {
                            format!("group {group} at {time}: disk {nth} of vm {vm}: {read:?}")
                        })?;
                        return Ok(());
                    }
                }
                let difference = first_difference(want, &have);
                check(difference.is_none(), Checker::Past, || {
                    let at = difference.expect("just seen");
                    format!(
                        "group {group} at {time}: disk {nth} of vm {vm} differs from byte {at} on: {:02x?} instead of {:02x?}; {point:?}",
                        &have[at.min(have.len())..have.len().min(at + 8)],
                        &want[at..want.len().min(at + 8)]
                    )
                })?;
            }
        }
        Ok(())
    }

    /// A view that was opened before still shows the same.
    fn check_kept(&mut self, group: usize) -> Checked {
        if self.backup.groups[group].views.is_empty() {
            return Ok(());
        }
        let nth = self.rng.index(self.backup.groups[group].views.len());
        let (asked, views) = self.backup.groups[group].views.swap_remove(nth);
        self.check_views(group, &asked, &views)?;
        if self.rng.chance(2, 3) {
            self.backup.groups[group].views.push((asked, views));
        }
        Ok(())
    }

    /// What is held can be asked for, whatever the window is.
    fn check_held(&mut self, group: usize, of: &mut Group<Memory>) -> Checked {
        if self.backup.groups[group].held.is_empty() {
            return Ok(());
        }
        let nth = self.rng.index(self.backup.groups[group].held.len());
        let (asked, hold) = self.backup.groups[group].held.swap_remove(nth);
        let Ok(past) = of.history() else { return Ok(()) };
        if hold.is_revoked() {
            note!(self, "group {group}: what was held at {} was given up", asked.time);
            return Ok(());
        }
        let found = past.locate(&asked.point);
        let found = found.and_then(|point| Ok((past.open(&point)?, point)));
        match found {
            Ok((views, point)) => {
                self.check_views(group, &Asked { time: asked.time, point }, &views)?;
            }
            Err(error) => {
                check(false, Checker::Past, || {
                    format!("group {group} at {}, which is held: {error}", asked.time)
                })?;
                return Ok(());
            }
        }
        if self.rng.chance(2, 3) {
            self.backup.groups[group].held.push((asked, hold));
        }
        Ok(())
    }
}

impl GroupSlot {
    /// The server is gone, and with it what it held.
    pub(crate) fn forget_views(&mut self) {
        self.views.clear();
        self.held.clear();
    }
}
