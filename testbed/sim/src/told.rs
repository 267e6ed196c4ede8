//! What the backup tells hosts, past the checkers of rules 3 and 4, and of the watermark.

use crate::failure::{Checked, Checker, check, fail};
use crate::world::{World, note};
use std::collections::BTreeSet;
use tidelock_protocol::ids::{Seq, WriterId};
use tidelock_protocol::message::{Attached, CopyState, Message, Progress, RefusalKind};
use tidelock_protocol::vector::CountVector;
use tidelock_replica::group::{Link, Output};

impl World {
    /// Sends what the group says, past the checkers.
    pub fn send_outputs(&mut self, group: usize) -> Checked {
        let mut told = BTreeSet::new();
        for output in std::mem::take(&mut self.backup.groups[group].outputs) {
            match &output {
                Output::Send(link, message) => {
                    let link = *link;
                    self.check_told(group, link, message)?;
                    self.check_unheard(group, link, message)?;
                    self.check_agreement(group, link, message)?;
                    self.is_taken_for_whole(group, link, message)?;
                    if matches!(message, Message::FloorIs { mark, .. } if *mark != 0) {
                        self.answers(group, link);
                    }
                    note!(
                        self,
                        "group {group} to {}.{}: {}",
                        link.connection.0,
                        link.channel,
                        brief(message)
                    );
                }
                Output::Refuse(link, kind, _) => {
                    note!(
                        self,
                        "group {group} refuses {}.{}: {kind:?}",
                        link.connection.0,
                        link.channel
                    );
                    if *kind == RefusalKind::Invalid {
                        // The stream is damaged: a connection made anew repeats it.
                        let conn = link.connection.0;
                        let mangled = self.net.conns.get(&conn).is_none_or(|c| c.mangled);
                        check(mangled, Checker::Stream, || "a host sends nonsense".to_owned())?;
                    }
                }
            }
            told.insert(self.say(output));
        }
        told.into_iter().try_for_each(|conn| self.backup_writes(conn))
    }

    /// A run that goes on after a clean stop is whole as soon as the backup takes it, also if its loop hangs and never
    /// hears of it: its records arrive.
    fn is_taken_for_whole(&mut self, group: usize, link: Link, message: &Message) -> Checked {
        let Message::Attached(Attached { progress, stream: Some(stream), .. }) = message else {
            return Ok(());
        };
        let whose = self.backup.groups[group].writers.get(&link).copied().flatten();
        let Some((writer, incarnation)) = whose.filter(|_| stream.copy == CopyState::Whole) else {
            return Ok(());
        };
        let mut vms = self.plan.groups[group].writers();
        let vm = vms.find(|vm| WriterId(self.plan.vms[*vm].writer) == writer);
        // What an earlier run has asked may be answered late: that says nothing of this one.
        let is_of_this_run = |vm: &usize| self.vms[*vm].incarnation == incarnation;
        let Some(vm) = vm.filter(is_of_this_run) else { return Ok(()) };
        let oracle = &mut self.vms[vm].oracle;
        if oracle.has_begun()
            && oracle.base_seq() == progress.durable
            && oracle.continues_whole()?
        {
            self.counts.clean_starts += 1;
        }
        Ok(())
    }

    /// Rules 3 and 4, on everything that is told to a host.
    fn check_told(&mut self, group: usize, link: Link, message: &Message) -> Checked {
        let slot = &mut self.backup.groups[group];
        let Some(writer) = slot.writers.get(&link).copied() else {
            return fail(Checker::Stream, format!("{message:?} to nobody"));
        };
        let Progress { durable, committed, watermark, .. } = match message {
            Message::Attached(attached) => &attached.progress,
            Message::Progress(progress) => progress,
            Message::Lease { .. } => {
                return check(slot.recovered.is_none(), Checker::OneEpoch, || {
                    format!("group {group} renews a lease after its recovery")
                });
            }
            _ => return Ok(()),
        };
        check(slot.recovered.is_none(), Checker::OneEpoch, || {
            format!("group {group} tells {message:?} to the old primary after its recovery")
        })?;
        // Nothing waits for a writer that was taken out.
        let waited_for = |(_, seq): &(WriterId, Seq)| seq.0 < u64::MAX;
        let committed: CountVector = committed.entries().filter(waited_for).collect();
        if let Some((writer, _)) = writer {
            let arrived = slot.contiguous.get(writer);
            check(*durable <= arrived, Checker::AckContiguous, || {
                format!("group {group} acknowledges {durable}, without a gap is only {arrived}")
            })?;
            slot.told_durable.raise(writer, *durable);
        }
        check(slot.contiguous.covers(&committed), Checker::AckContiguous, || {
            format!("group {group} calls {committed} committed, of {}", slot.contiguous)
        })?;
        if !slot.told.covers(&committed) {
            slot.told.merge(&committed);
            let newest = slot.group().map(|of| of.state().newest_effective());
            slot.told_at.extend(newest.map(|newest| (newest, slot.told.clone())));
        }
        slot.told_watermark = slot.told_watermark.max(*watermark);
        self.check_watermark(group)?;
        if self.rng.chance(1, self.plan.probe_one_in) {
            self.probe(group)?;
        }
        if self.rng.chance(1, self.plan.probe_one_in) {
            self.check_pin(group)?;
        }
        if self.rng.chance(1, self.plan.probe_one_in) {
            self.check_past(group)?;
        }
        Ok(())
    }

    /// What packets wait for in the HLC form: every record up to the watermark is in the cut.
    fn check_watermark(&mut self, group: usize) -> Checked {
        if !self.is_recoverable(group) {
            return Ok(());
        }
        let slot = &self.backup.groups[group];
        let (told, watermark) = (slot.told.clone(), slot.told_watermark);
        for vm in &self.plan.groups[group].writers().collect::<Vec<_>>() {
            if self.is_left_out(*vm, &told) {
                continue;
            }
            let committed = told.get(WriterId(self.plan.vms[*vm].writer));
            let outside = self.vms[*vm].oracle.outside_of(committed, watermark);
            check(outside.is_none(), Checker::Watermark, || {
                let (point, hlc) = outside.expect("just seen");
                format!(
                    "the watermark is {watermark}, {point:?} of vm {vm} at {hlc} is not in {told}"
                )
            })?;
        }
        Ok(())
    }
}

fn brief(message: &Message) -> String {
    match message {
        Message::Attached(attached) => {
            let copy = attached.stream.as_ref().map(|stream| stream.copy);
            format!("attached {copy:?} {}", brief_progress(&attached.progress))
        }
        Message::Progress(progress) => brief_progress(progress),
        Message::Refused { kind, .. } => format!("refused {kind:?}"),
        other => format!("{other:?}"),
    }
}

fn brief_progress(progress: &Progress) -> String {
    let Progress { durable, committed, watermark, frontier } = progress;
    format!("durable {durable} C {committed} watermark {watermark} of {frontier}")
}
