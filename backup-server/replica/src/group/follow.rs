//! Members without protected disks: they have no stream, but their packets wait for C, their hosts
//! need a lease, and they are booted after a disaster like the others.

use super::{Follower, Group, Link, Now, attach};
use tidelock_protocol::frame::Frame;
use tidelock_protocol::message::{Message, RefusalKind};
use tidelock_storage::Storage;

impl<S: Storage> Group<S> {
    /// A member without disks has attached: it is on this link from now on.
    pub(super) fn follow(&mut self, now: Now, link: Link, member: &str) {
        let same = |old: &Follower| old.member == member && old.link != link;
        if let Some(old) = self.followers.iter().find(|old| same(old)).map(|old| old.link) {
            self.end_link(old, RefusalKind::Superseded, attach::attached_again(member));
        }
        self.followers.retain(|old| old.link != link);
        self.followers.push(Follower { member: member.to_owned(), link, attached_at: now });
    }

    /// A frame of a follower, or of a link that has ended: that is dropped.
    pub(super) fn receive_follower(&mut self, now: Now, link: Link, frame: Frame) -> Option<Frame> {
        if !self.followers.iter().any(|follower| follower.link == link) {
            return None;
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
            Frame::Control(_, Message::Policy(_) | Message::ServesUnreached { .. })
                if !self.takes_policies(link) =>
            {
                return Some(frame);
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
        None
    }
}
