//! A verification in the owner loop: begun by a message, driven with the copies, and its end told to the view.

use super::copying::Copying;
use super::driver::Driver;
use super::replication::Clocks;
use super::status::VerifyEnded;
use super::{Owner, disk};
use crate::sequencer::{Extent, Sequencer};
use crate::verified::{DifferingExtent, Verified};
use tidelock_protocol::ids::{DiskId, Seq};

/// The verification of a member, if one runs. Sans-I/O: the simulator drives it, too.
#[derive(Debug, Default)]
pub struct Verifying(Option<Begun>);

/// What it began with.
#[derive(Clone, Copy, Debug)]
struct Begun {
    unix_ms: u64,
    seq: Seq,
    compared_bytes: u64,
    /// It has looked at everything, and waits until this is durable at the backup.
    awaits: Option<Seq>,
}

impl Verifying {
    /// Begins one over all of these disks, at this rate at most.
    ///
    /// # Errors
    /// Why not now.
    pub fn begin(
        &mut self,
        copying: &mut Copying,
        sequencer: &Sequencer,
        disks: Vec<Extent>,
        (repair, rate_bytes_per_s): (bool, u64),
        clocks: Clocks,
    ) -> Result<(), &'static str> {
        let compared_bytes = disks.iter().map(|disk| disk.len_bytes).sum();
        copying.begin_verify(repair, disks, rate_bytes_per_s, clocks.now)?;
        let seq = sequencer.last_seq();
        self.0 = Some(Begun { unix_ms: clocks.wall_ms, seq, compared_bytes, awaits: None });
        Ok(())
    }

    /// Whether one runs.
    #[must_use]
    pub fn runs(&self) -> bool {
        self.0.is_some()
    }

    /// Whether it has ended, and how. What it has copied is durable before it ends. `name`: of a disk.
    pub fn follow(
        &mut self,
        copying: &mut Copying,
        sequencer: &Sequencer,
        name: impl Fn(DiskId) -> String,
        wall_ms: u64,
    ) -> Option<VerifyEnded> {
        let begun = self.0.as_mut()?;
        if let Some(why) = copying.take_given_up() {
            self.0 = None;
            return Some(VerifyEnded::GivenUp(why.to_owned()));
        }
        let findings = copying.verified()?;
        let to_seq = *begun.awaits.get_or_insert(sequencer.last_seq());
        if sequencer.durable() < to_seq {
            return None;
        }
        let differing = |extent: &Extent| DifferingExtent {
            disk: name(extent.disk),
            offset: extent.offset,
            len_bytes: extent.len_bytes,
        };
        let verified = Verified {
            begun_unix_ms: begun.unix_ms,
            ended_unix_ms: wall_ms,
            epoch: sequencer.epoch(),
            from_seq: begun.seq,
            to_seq,
            compared_bytes: begun.compared_bytes,
            differing: findings.differing.iter().map(differing).collect(),
            differing_bytes: findings.differing_bytes,
            repaired_bytes: findings.repaired_bytes,
            unreadable_bytes: findings.unreadable_bytes,
        };
        copying.end_verify();
        self.0 = None;
        Some(VerifyEnded::Whole(verified))
    }
}

impl<D: Driver> Owner<D> {
    pub(super) fn begin_verify(&mut self, repair: bool, rate_bytes_per_s: u64) {
        let disks = self.disks.iter().map(super::disk::Disk::whole).collect();
        let (wish, clocks) = ((repair, rate_bytes_per_s), self.clocks());
        match self.verifying.begin(&mut self.copying, &self.sequencer, disks, wish, clocks) {
            Ok(()) => {
                tracing::info!(member = self.member, repair, "a verification has begun");
                self.view.set_verify(self.copying.verify_progress(self.now));
            }
            Err(why) => self.view.verify_has_ended(VerifyEnded::GivenUp(why.to_owned())),
        }
    }

    /// Takes note of how far a verification is.
    pub(super) fn follow_verify(&mut self) {
        if !self.verifying.runs() {
            return;
        }
        let Self { verifying, copying, sequencer, disks, .. } = self;
        let name = |disk: DiskId| disks[disk::nth(disks, disk)].name().to_owned();
        let ended = verifying.follow(copying, sequencer, name, self.wall_ms);
        self.view.set_verify(self.copying.verify_progress(self.now));
        let Some(ended) = ended else { return };
        if let VerifyEnded::GivenUp(why) = &ended {
            tracing::warn!(member = self.member, why, "the verification was given up");
        }
        self.view.verify_has_ended(ended);
    }
}
