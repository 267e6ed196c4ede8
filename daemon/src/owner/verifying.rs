//! A verification in the owner loop: begun by a message, driven with the copies, and its end told to the view.

use super::Owner;
use super::status::VerifyEnded;
use crate::verified::{DifferingExtent, Verified};
use tidelock_protocol::ids::Seq;

/// What the verification that runs began with.
#[derive(Clone, Copy, Debug)]
pub(super) struct Begun {
    unix_ms: u64,
    seq: Seq,
    /// It has looked at everything, and waits until this is durable at the backup.
    awaits: Option<Seq>,
}

impl Owner {
    pub(super) fn begin_verify(&mut self, repair: bool, rate_bytes_per_s: u64) {
        let disks = self.disks.iter().map(super::disk::Disk::whole).collect();
        match self.copying.begin_verify(repair, disks, rate_bytes_per_s, self.now) {
            Ok(()) => {
                tracing::info!(member = self.member, repair, "a verification has begun");
                let seq = self.sequencer.last_seq();
                self.verifying = Some(Begun { unix_ms: self.wall_ms, seq, awaits: None });
                self.view.set_verify(self.copying.verify_progress(self.now));
            }
            Err(why) => self.view.verify_has_ended(VerifyEnded::GivenUp(why.to_owned())),
        }
    }

    /// Takes note of how far a verification is. What it has copied is durable before it ends.
    pub(super) fn follow_verify(&mut self) {
        let Some(begun) = &mut self.verifying else { return };
        if let Some(why) = self.copying.take_given_up() {
            tracing::warn!(member = self.member, why, "the verification was given up");
            self.verifying = None;
            self.view.set_verify(None);
            return self.view.verify_has_ended(VerifyEnded::GivenUp(why.to_owned()));
        }
        self.view.set_verify(self.copying.verify_progress(self.now));
        let Some(findings) = self.copying.verified() else { return };
        let to_seq = *begun.awaits.get_or_insert(self.sequencer.last_seq());
        if self.sequencer.durable() < to_seq {
            return;
        }
        let verified = Verified {
            begun_unix_ms: begun.unix_ms,
            ended_unix_ms: self.wall_ms,
            epoch: self.sequencer.epoch(),
            from_seq: begun.seq,
            to_seq,
            compared_bytes: self.disks.iter().map(|disk| disk.whole().len_bytes).sum(),
            differing: findings
                .differing
                .iter()
                .map(|extent| DifferingExtent {
                    disk: self.disks[self.nth(extent.disk)].name().to_owned(),
                    offset: extent.offset,
                    len_bytes: extent.len_bytes,
                })
                .collect(),
            differing_bytes: findings.differing_bytes,
            repaired_bytes: findings.repaired_bytes,
            unreadable_bytes: findings.unreadable_bytes,
        };
        self.copying.end_verify();
        self.verifying = None;
        self.view.set_verify(None);
        self.view.verify_has_ended(VerifyEnded::Whole(verified));
    }
}
