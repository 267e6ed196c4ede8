//! Status of a gate: what becomes of the packets of one network card of a member.

use super::ms;
use crate::stats::LatencySnapshot;
use serde::{Deserialize, Serialize};
use tidelock_protocol::ids::MonoNanos;
use tidelock_protocol::lease::{HoldReason, ShutWhy};

/// A member's gate.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct GateStatus {
    /// The interface whose outbound packets are held.
    pub interface: String,
    /// True if covered packets leave.
    pub open: bool,
    /// Why not, if not.
    pub shut_because: Option<String>,
    /// Packets held now.
    pub held_packets: u64,
    /// Their bytes.
    pub held_bytes: u64,
    /// The longest of them has been held for this long.
    pub oldest_hold_ms: u64,
    /// Packets that have been held and released.
    pub released_packets: u64,
    /// Packets that were covered on arrival, or need no hold.
    pub passed_packets: u64,
    /// Packets dropped because the queue was full, ours or the kernel's, or because the rules that queue them were gone:
    /// TCP sends them again.
    pub dropped_packets: u64,
    /// How often somebody had changed its packet-filter rules, so that packets may have left unheld, and they were put
    /// back.
    #[serde(default)]
    pub rules_restored: u64,
    /// Number of times that its rules were found changed: packets may have left unheld each time.
    #[serde(default)]
    pub may_have_left: u64,
    /// Why packets of the guest leave unheld now, if they may.
    #[serde(default)]
    pub unheld_because: Option<String>,
    /// Why no kernel programs watch the interface, if none do: nothing stops packets while its rules are gone.
    #[serde(default)]
    pub unwatched_because: Option<String>,
    /// Time for which released packets were held.
    pub hold_time: LatencySnapshot,
}

/// The gate of a network card at one moment. Counters are since the daemon's start.
#[derive(Clone, Debug)]
pub struct GateSeen {
    /// The interface.
    pub interface: String,
    /// The reason why covered packets do not leave, if they do not.
    pub shut: Option<ShutWhy>,
    /// Packets that wait.
    pub held_packets: u64,
    /// Bytes of these packets.
    pub held_bytes: u64,
    /// Arrival of the packet that waits longest.
    pub oldest_arrival: Option<MonoNanos>,
    /// Packets that have left after a hold.
    pub released_packets: u64,
    /// Packets that have left without one.
    pub passed_packets: u64,
    /// Packets that were dropped.
    pub dropped_packets: u64,
    /// Number of times that packet-filter rules were put back.
    pub rules_restored: u64,
    /// Number of times that rules were found changed, so that packets may have left unheld.
    pub may_have_left: u64,
    /// Rules are gone, and no kernel programs stop packets: what is wrong, for people.
    pub open_to_all: Option<String>,
    /// True if an interface of that name exists.
    pub is_interface_there: bool,
    /// The reason why no kernel programs watch the interface, if none do.
    pub unwatched_because: Option<String>,
    /// Times of holds.
    pub hold_time: LatencySnapshot,
}

/// The facts of a group and a member by which status words a gate's state.
#[derive(Clone, Copy, Debug)]
pub(super) struct GateContext {
    /// The group was switched over to the backup site.
    pub(super) is_switched: bool,
    /// A newer run of this host's daemon has a member of the group.
    pub(super) is_superseded: bool,
    /// A guest has a disk of the member open.
    pub(super) is_in_use: bool,
    pub(super) now: MonoNanos,
}

impl GateSeen {
    /// The reason why packets of the guest may leave unheld now. `is_in_use`: a guest has a disk of the member open.
    #[must_use]
    pub fn unheld_because(&self, is_in_use: bool) -> Option<String> {
        let interface = &self.interface;
        if let Some(trouble) = &self.open_to_all {
            return Some(format!(
                "what {interface} sends leaves unheld, because its packet-filter rules are gone and no kernel programs stop it: \
                 {trouble}"
            ));
        }
        (is_in_use && !self.is_interface_there).then(|| {
            format!(
                "a guest uses its disk, and there is no interface {interface}: whatever the guest sends by another one leaves \
                 unheld; set `interface` in [[group.member.network]] to the guest's tap (`ip link` lists them), or give the tap \
                 that name"
            )
        })
    }

    pub(super) fn status(&self, context: GateContext) -> GateStatus {
        GateStatus {
            interface: self.interface.clone(),
            open: self.shut.is_none(),
            shut_because: self.shut.map(|why| shut_because(why, context).to_owned()),
            held_packets: self.held_packets,
            held_bytes: self.held_bytes,
            oldest_hold_ms: self.oldest_arrival.map_or(0, |at| ms(context.now.since_ns(at))),
            released_packets: self.released_packets,
            passed_packets: self.passed_packets,
            dropped_packets: self.dropped_packets,
            rules_restored: self.rules_restored,
            may_have_left: self.may_have_left,
            unheld_because: self.unheld_because(context.is_in_use),
            unwatched_because: self.unwatched_because.clone(),
            hold_time: self.hold_time.clone(),
        }
    }
}

fn shut_because(why: ShutWhy, context: GateContext) -> &'static str {
    match why {
        ShutWhy::NoLease => "the host holds no lease from the backup",
        ShutWhy::Held(HoldReason::Gap) => "the sites have not been compared",
        ShutWhy::Held(HoldReason::LeftBacklog) => {
            "the backup does not have what a daemon that was killed had left in its backlog on disk"
        }
        ShutWhy::FloorUnknown => {
            "what the guest may have heard of other members is not known until every writer has said how far it is"
        }
        ShutWhy::Fenced if context.is_switched => "the group was switched over to the backup site",
        ShutWhy::Fenced if context.is_superseded => {
            "another run of this host's daemon has taken over"
        }
        ShutWhy::Fenced => "the group was recovered at the backup site",
    }
}

/// Packets that have left beside the gates of a group, as far as it was seen.
#[derive(Clone, Copy, Debug, Default)]
pub struct UnheldHistory {
    /// The number of times that packets may have left so.
    may_have_left: u64,
    /// The last answer.
    is_unheld: bool,
}

impl UnheldHistory {
    /// Looks at all gates of the group, each with whether its member's guest has a disk open. Returns whether packets may
    /// leave unheld now, or may have since the last look.
    pub fn look<'a>(&mut self, gates: impl Iterator<Item = (&'a GateSeen, bool)>) -> bool {
        let (mut may_have_left, mut is_unheld) = (0, false);
        for (gate, is_in_use) in gates {
            may_have_left += gate.may_have_left;
            is_unheld |= gate.unheld_because(is_in_use).is_some();
        }
        let has_left = is_unheld || may_have_left != self.may_have_left;
        *self = Self { may_have_left, is_unheld };
        has_left
    }

    /// True if packets left unheld at the last look.
    #[must_use]
    pub fn is_unheld(&self) -> bool {
        self.is_unheld
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gate() -> GateSeen {
        GateSeen {
            interface: "tap0".into(),
            shut: None,
            held_packets: 0,
            held_bytes: 0,
            oldest_arrival: None,
            released_packets: 0,
            passed_packets: 0,
            dropped_packets: 0,
            rules_restored: 0,
            may_have_left: 0,
            open_to_all: None,
            is_interface_there: true,
            unwatched_because: None,
            hold_time: LatencySnapshot::default(),
        }
    }

    /// Packets leave unheld where rules are gone, and where a guest that runs has no interface of the name.
    #[test]
    fn a_gate_that_holds_nothing_says_so() {
        let context = |is_in_use| GateContext {
            is_switched: false,
            is_superseded: false,
            is_in_use,
            now: MonoNanos(9_000_000),
        };
        assert_eq!(gate().status(context(true)).unheld_because, None);
        let open = GateSeen { open_to_all: Some("nft: gone".into()), ..gate() };
        assert!(open.status(context(false)).unheld_because.unwrap().ends_with("nft: gone"));
        let nameless = GateSeen { is_interface_there: false, ..gate() };
        assert_eq!(nameless.status(context(false)).unheld_because, None, "no guest runs");
        assert!(nameless.status(context(true)).unheld_because.unwrap().contains("tap0"));
        let mut history = UnheldHistory::default();
        assert!(!history.look([(&gate(), true)].into_iter()));
        let restored = GateSeen { may_have_left: 1, ..gate() };
        assert!(history.look([(&restored, true)].into_iter()), "since the last look");
        assert!(!history.look([(&restored, true)].into_iter()) && !history.is_unheld());
        assert!(history.look([(&open, true)].into_iter()) && history.is_unheld());
    }

    #[test]
    fn a_shut_gate_says_why() {
        let context = GateContext {
            is_switched: false,
            is_superseded: false,
            is_in_use: true,
            now: MonoNanos(9_000_000),
        };
        let of = |shut, context| {
            let oldest_arrival = Some(MonoNanos(2_000_000));
            let seen = GateSeen { shut: Some(shut), held_packets: 1, oldest_arrival, ..gate() };
            let status = seen.status(context);
            assert_eq!((status.open, status.oldest_hold_ms), (false, 7));
            status.shut_because.unwrap()
        };
        assert!(of(ShutWhy::NoLease, context).contains("no lease"));
        assert!(of(ShutWhy::Held(HoldReason::Gap), context).contains("compared"));
        assert!(of(ShutWhy::Fenced, context).contains("recovered"));
        assert!(
            of(ShutWhy::Fenced, GateContext { is_superseded: true, ..context })
                .contains("another run")
        );
        assert!(
            of(ShutWhy::Fenced, GateContext { is_switched: true, ..context }).contains("switched")
        );
    }
}
