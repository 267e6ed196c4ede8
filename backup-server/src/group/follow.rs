//! Members without protected disks: they have no stream, but their packets wait for C, their hosts
//! need a lease, and they are booted after a disaster like the others.

use super::attach::{self, Refusal, refuse};
use super::{Follower, Group, Link, Now, Output};
use crate::manifest;
use crate::storage::Storage;
use tidelock_protocol::frame::Frame;
use tidelock_protocol::ids::Seq;
use tidelock_protocol::message::{Follow, Followed, Message, RefusalKind};

impl<S: Storage> Group<S> {
    /// A member without disks is there: the answer is among the outputs.
    pub fn follow(&mut self, now: Now, link: Link, host: &str, follow: &Follow) {
        match self.try_follow(now, link, host, follow) {
            Ok(followed) => {
                self.outputs.push(Output::Send(link, Message::Followed(followed)));
                self.held.is_attached(now.mono, link, &self.all_links());
                self.tell_tag_terms(now, link);
                self.tell_for_everyone(link);
                self.say_stalled(link);
            }
            Err((kind, reason)) => self.outputs.push(Output::Refuse(link, kind, reason)),
        }
    }

    fn try_follow(
        &mut self,
        now: Now,
        link: Link,
        host: &str,
        follow: &Follow,
    ) -> Result<Followed, Refusal> {
        attach::check_follow(follow)?;
        self.check_host(host)?;
        if follow.group != self.manifest.group {
            let reason = format!("this is group {}", self.manifest.group);
            return refuse(RefusalKind::Mismatch, reason);
        }
        self.check_identity(follow.group_id)?;
        self.check_epoch(follow.epoch)?;
        self.check_claim(host, &follow.member)?;
        self.check_newest(&follow.member, link)?;
        self.flush();
        if let Some(reason) = self.broken.clone() {
            return refuse(RefusalKind::Stopping, reason);
        }
        self.check_machine_budget(&follow.member, follow.machine.as_ref())?;
        self.reshape(now, host, &follow.writers, &follow.peers, follow.form)?;
        self.remember_follower(host, follow).map_err(|e| (RefusalKind::Stopping, e.to_string()))?;
        self.grace.set_grace_ms(self.manifest.grace_ms);
        self.may_have_lease(&follow.member);
        self.attached_by.insert(follow.member.clone(), link.connection);
        let same = |old: &Follower| old.member == follow.member && old.link != link;
        if let Some(old) = self.followers.iter().find(|old| same(old)).map(|old| old.link) {
            let reason = attach::attached_again(&follow.member);
            self.end_link(old, RefusalKind::Superseded, reason);
        }
        self.followers.retain(|old| old.link != link);
        self.followers.push(Follower { member: follow.member.clone(), link, attached_at: now });
        let progress = self.progress(Seq::ZERO, &self.told());
        Ok(Followed { group_id: self.manifest.id, epoch: self.epoch(), progress })
    }

    fn remember_follower(
        &mut self,
        host: &str,
        follow: &Follow,
    ) -> Result<(), manifest::ManifestError> {
        self.remember_machine(&follow.member, follow.machine.as_ref())?;
        let mut manifest = self.manifest.clone();
        manifest.grace_ms = manifest.grace_ms.max(follow.grace_ms);
        manifest.followers.insert(follow.member.clone(), host.to_owned());
        if manifest != self.manifest {
            manifest.write(&self.storage)?;
            self.manifest = manifest;
        }
        Ok(())
    }

    /// A frame of a follower, or of a link that has ended: that is dropped.
    pub(super) fn receive_follower(&mut self, now: Now, link: Link, frame: Frame) {
        if !self.followers.iter().any(|follower| follower.link == link) {
            return;
        }
        match frame {
            Frame::Control(_, Message::Beacon { sent_at }) => self.beacon(now, link, sent_at),
            Frame::Control(_, Message::Detach { .. }) => {
                self.followers.retain(|follower| follower.link != link);
                self.readiness_ends();
            }
            Frame::Control(_, Message::Sounded { pending, hlc, .. }) => {
                if let Some((pending, hlc)) = self.plausible_sounded(now, link, pending, hlc) {
                    self.awaited(&pending, hlc);
                }
            }
            Frame::Control(_, Message::AskFloor { mark, everyone }) => {
                self.ask_floor(link, mark, everyone);
            }
            Frame::Control(_, Message::GiveUpLease) => self.lease_given_up(link),
            Frame::Control(_, Message::ReadyToSwitch { ready }) => {
                self.ready_to_switch(link, ready);
            }
            Frame::Control(_, Message::Policy(policy)) => self.policy(now, link, policy),
            Frame::Control(_, Message::ServesUnreached { serves }) => {
                self.serves_unreached(link, serves);
            }
            // Its mode is its host's affair.
            Frame::Control(_, Message::ModeChanged { .. }) => {}
            _ => {
                let reason = "a message that members without disks do not send".to_owned();
                self.end_link(link, RefusalKind::Invalid, reason);
            }
        }
    }
}
