//! Until when a member certainly held its packets: since when at the earliest may clients have seen what a
//! recovery lacks, if the member's host has not said that it degrades?
//!
//! What a host says comes in order, so when a beacon comes after a policy that holds, it held when it **sent** the
//! beacon. That may be long before the beacon came: a link that is about to be given up delivers late. The beacon
//! says when it was sent, by a clock of the host that has nothing to do with ours. But the member's first
//! beacon on a link was sent after we had attached it, and none was sent after it came.
//!
//! Invariant: [`Held::at`] is not after the moment at which the last beacon was sent, but for the drift of
//! the two clocks since the attachment, and then by no more than the least time that a beacon took.

use super::Link;
use std::collections::BTreeMap;
use tidelock_protocol::ids::MonoNanos;

/// What is known of one member, since it was attached and has said that it holds.
#[derive(Clone, Copy, Debug)]
struct Held {
    link: Link,
    attached_at: MonoNanos,
    last: Option<Beacon>,
}

#[derive(Clone, Copy, Debug)]
struct Beacon {
    sent_at: MonoNanos,
    /// What to add to a time of the host for one of ours that is not later, in nanoseconds.
    ahead_ns: i128,
}

impl Held {
    fn at(&self) -> MonoNanos {
        let Some(Beacon { sent_at, ahead_ns }) = self.last else { return self.attached_at };
        let at = u64::try_from(i128::from(sent_at.0) + ahead_ns).unwrap_or(0);
        self.attached_at.max(MonoNanos(at))
    }
}

/// Until when each member held. In memory alone: a restart of the server forgets it.
#[derive(Debug, Default)]
pub(super) struct HeldUntil {
    /// Of links on which nothing was said yet of what the member does.
    attached_at: BTreeMap<Link, MonoNanos>,
    members: BTreeMap<String, Held>,
}

impl HeldUntil {
    /// A member is told that it is attached. These links go on being attached.
    pub(super) fn is_attached(&mut self, now: MonoNanos, link: Link, links: &[Link]) {
        self.attached_at.retain(|other, _| links.contains(other));
        self.attached_at.insert(link, now);
    }

    /// The host says its policy for the time without this server, after it was told so. While that is not to hold,
    /// nobody asks until when it held.
    pub(super) fn says_policy(&mut self, member: &str, link: Link) {
        let Some(attached_at) = self.attached_at.remove(&link) else { return };
        if !self.is_of(member, link) {
            self.members.insert(member.to_owned(), Held { link, attached_at, last: None });
        }
    }

    fn is_of(&self, member: &str, link: Link) -> bool {
        self.members.get(member).is_some_and(|held| held.link == link)
    }

    /// Whether a member that is attached has said what it does: until then it may be in mode async.
    pub(super) fn has_said(&self, link: Link) -> bool {
        !self.attached_at.contains_key(&link)
    }

    /// A beacon of it, sent then by its host's clock, comes now.
    pub(super) fn beacon(&mut self, now: MonoNanos, member: &str, link: Link, sent_at: MonoNanos) {
        let Some(held) = self.members.get_mut(member).filter(|held| held.link == link) else {
            return;
        };
        let ahead_of = |ours: MonoNanos| i128::from(ours.0) - i128::from(sent_at.0);
        let first = held.last.map_or(ahead_of(held.attached_at), |last| last.ahead_ns);
        held.last = Some(Beacon { sent_at, ahead_ns: first.min(ahead_of(now)) });
    }

    /// Until when a member held, if it has said so since the group was opened.
    pub(super) fn at(&self, member: &str) -> Option<MonoNanos> {
        self.members.get(member).map(Held::at)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::group::ConnectionId;
    use proptest::prelude::*;
    use tidelock_protocol::ids::Channel;

    const MS: u64 = 1_000_000;

    fn link(connection: u64) -> Link {
        Link { connection: ConnectionId(connection), channel: Channel(1) }
    }

    #[test]
    fn a_beacon_that_comes_late_says_when_it_was_sent() {
        let mut held = HeldUntil::default();
        held.is_attached(MonoNanos(1_000 * MS), link(1), &[]);
        held.beacon(MonoNanos(1_010 * MS), "a", link(1), MonoNanos(5 * MS));
        assert_eq!(held.at("a"), None, "before it has said what it does");
        assert!(!held.has_said(link(1)));
        held.says_policy("a", link(1));
        assert!(held.has_said(link(1)));
        assert_eq!(held.at("a"), Some(MonoNanos(1_000 * MS)));
        held.beacon(MonoNanos(1_010 * MS), "a", link(1), MonoNanos(7 * MS));
        held.beacon(MonoNanos(9_000 * MS), "a", link(1), MonoNanos(1_007 * MS));
        assert_eq!(held.at("a"), Some(MonoNanos(2_000 * MS)), "a second after the first one");
        held.beacon(MonoNanos(9_001 * MS), "a", link(2), MonoNanos(9_000 * MS));
        held.is_attached(MonoNanos(9_500 * MS), link(3), &[]);
        assert_eq!(held.at("a"), Some(MonoNanos(2_000 * MS)), "not on this link");
        held.says_policy("a", link(3));
        assert_eq!(held.at("a"), Some(MonoNanos(9_500 * MS)));
    }

    proptest! {
        /// Whatever the delays: never after it was sent, and before by no more than the handshake took.
        #[test]
        fn never_later_than_the_beacon_was_sent(
            offset in 0u64..1 << 40,
            handshake in 0u64..1_000,
            beacons in prop::collection::vec((0u64..500, 0u64..10_000), 1..40),
        ) {
            let attached_at = 1 << 41;
            let mut held = HeldUntil::default();
            held.is_attached(MonoNanos(attached_at), link(1), &[]);
            held.says_policy("a", link(1));
            let (mut sent, mut came) = (attached_at + handshake, 0);
            for (after, delay) in beacons {
                came = came.max(sent + delay);
                held.beacon(MonoNanos(came), "a", link(1), MonoNanos(sent - offset));
                let at = held.at("a").unwrap().0;
                prop_assert!(at <= sent && sent - at <= handshake, "{at} {sent}");
                sent += after;
            }
        }
    }
}
