//! What the kernel programs share with user space: `netfilter/bpf/tag.h` says the same in C.

use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::SeqCst;
use tidelock_protocol::ids::WriterId;
use tidelock_protocol::limits::WRITERS_MAX;
use tidelock_protocol::tag::TagTerms;

/// Places in a vector.
pub const ENTRIES: usize = WRITERS_MAX as usize;
/// Places of keys: three periods' are believed, and one is written before it comes into use.
const KEYS: u64 = 4;

/// Fixed when the programs are loaded: [`Settings::config`](crate::Settings::config).
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct Config {
    pub(crate) hlc_ahead_max_ms: u64,
    pub(crate) run: u64,
    pub(crate) pass_mark: u32,
    pub(crate) mark_mask: u32,
    pub(crate) path_mtu: u32,
    pub(crate) writers: u32,
    pub(crate) is_hlc: u32,
    pub(crate) path_strips_options: u32,
    pub(crate) is_bridged: u32,
    pub(crate) off: u32,
    pub(crate) context: u8,
    pub(crate) ipv4_option: u8,
    pub(crate) ipv6_option: u8,
    pub(crate) filling: [u8; 5],
}

impl Config {
    /// The bytes as the programs see them.
    pub(crate) fn bytes(&self) -> Vec<u8> {
        let words = [
            self.pass_mark,
            self.mark_mask,
            self.path_mtu,
            self.writers,
            self.is_hlc,
            self.path_strips_options,
            self.is_bridged,
            self.off,
        ];
        let mut bytes = self.hlc_ahead_max_ms.to_ne_bytes().to_vec();
        bytes.extend(self.run.to_ne_bytes());
        bytes.extend(words.iter().flat_map(|word| word.to_ne_bytes()));
        bytes.extend([self.context, self.ipv4_option, self.ipv6_option]);
        bytes.extend(self.filling);
        bytes
    }
}

const _: () = assert!(size_of::<Config>() == 56);

/// P of one member.
#[repr(C)]
#[derive(Debug)]
pub struct PendingCells {
    /// The member's time.
    pub hlc: AtomicU64,
    /// Not 0: the guest may know what this P does not name.
    pub incomplete: AtomicU64,
    /// The run of the daemon that guards it: members on this host that it guards, too, raise P without a tag.
    pub run: AtomicU64,
    /// One for each writer of the group.
    pub entries: [AtomicU64; ENTRIES],
}

impl PendingCells {
    /// P before any write.
    #[must_use]
    pub const fn new() -> Self {
        Self {
            hlc: AtomicU64::new(0),
            incomplete: AtomicU64::new(0),
            run: AtomicU64::new(0),
            entries: [const { AtomicU64::new(0) }; ENTRIES],
        }
    }
}

impl Default for PendingCells {
    fn default() -> Self {
        Self::new()
    }
}

/// C of a group and what goes with it. Times are `CLOCK_BOOTTIME` in nanoseconds.
#[repr(C)]
#[derive(Debug)]
pub struct CommittedCells {
    /// Covered packets may leave until then; 0: shut.
    pub open_until: AtomicU64,
    /// C is recent enough to write and to read tags until then; 0: never heard.
    pub trusted_until: AtomicU64,
    /// Everything may leave until `open_until`.
    pub is_async: AtomicU64,
    /// What every writer has committed, in HLC form.
    pub watermark: AtomicU64,
    /// One for each writer of the group.
    pub entries: [AtomicU64; ENTRIES],
    /// What turns `CLOCK_BOOTTIME` into the wall clock that is believed.
    pub wall_minus_boot: AtomicU64,
    /// The place of the key that tags are sealed with. Seals of the keys in the places before and after it are believed.
    pub key_in_use: AtomicU64,
    /// Keys, each in the place that its period has modulo their number; zeros: not known yet.
    pub tag_keys: [[AtomicU64; 2]; KEYS as usize],
    /// The greatest seq of each writer that a tag is believed of.
    pub reachable: [AtomicU64; ENTRIES],
    /// Not 0: packets that would be left to the packet filter's rules are dropped, because those may be gone.
    pub rules_gone: AtomicU64,
}

impl CommittedCells {
    /// C before anything is known: shut, and no tag is written or believed.
    #[must_use]
    pub const fn new() -> Self {
        Self {
            open_until: AtomicU64::new(0),
            trusted_until: AtomicU64::new(0),
            is_async: AtomicU64::new(0),
            watermark: AtomicU64::new(0),
            entries: [const { AtomicU64::new(0) }; ENTRIES],
            wall_minus_boot: AtomicU64::new(0),
            key_in_use: AtomicU64::new(0),
            tag_keys: [const { [const { AtomicU64::new(0) }; 2] }; KEYS as usize],
            reachable: [const { AtomicU64::new(0) }; ENTRIES],
            rules_gone: AtomicU64::new(0),
        }
    }

    /// Takes over what the backup tells. A packet that is sealed or judged meanwhile is so by the old key or by the new one:
    /// the place of the next period's key is not in use yet.
    pub fn set_tag_terms(&self, terms: &TagTerms) {
        for (writer, cell) in (0..WRITERS_MAX).zip(&self.reachable) {
            cell.store(terms.reachable.get(WriterId(writer)).0, SeqCst);
        }
        let keys = terms.keys;
        let place = |periods: u64| (keys.period.wrapping_add(periods) % KEYS) as usize;
        for (at, key) in [(KEYS - 1, keys.previous), (1, keys.next), (0, keys.current)] {
            for (half, to) in self.tag_keys[place(at)].iter().zip(key.0) {
                half.store(to, SeqCst);
            }
        }
        self.key_in_use.store(place(0) as u64, SeqCst);
    }
}

impl Default for CommittedCells {
    fn default() -> Self {
        Self::new()
    }
}

/// How far user space has got with the packets that were sent to its queue.
#[repr(C)]
#[derive(Debug, Default)]
pub struct CrossingCells {
    /// Packets that were left to the queue.
    pub queued: AtomicU64,
    /// Keeps the kernel's line apart from ours.
    filling: [AtomicU64; 7],
    /// The value of `queued` at which the queue was last seen empty.
    pub decided: AtomicU64,
    /// Packets wait in the queue.
    pub waiting: AtomicU64,
}

macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        /// What the programs have done since they were loaded.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        pub struct TaggingStats {
            $($(#[$doc])* pub $name: u64,)*
        }

        impl TaggingStats {
            /// How many counters there are.
            pub const COUNT: usize = [$(stringify!($name)),*].len();

            /// From the counters in the order of `enum counter`.
            #[must_use]
            pub fn of(values: [u64; Self::COUNT]) -> Self {
                let [$($name),*] = values;
                Self { $($name),* }
            }

            /// Each counter by its name.
            pub fn named(&self) -> impl Iterator<Item = (&'static str, u64)> + use<> {
                [$((stringify!($name), self.$name)),*].into_iter()
            }
        }
    };
}

counters! {
    /// Packets to members that got a tag.
    tagged,
    /// Packets to members on this host: their P rose at once, and the packet got no tag.
    merged_here,
    /// GSO packets whose segments were made smaller, so that the tag fits.
    tagged_gso_lowered,
    /// Pure TCP acknowledgements to members, which need no tag.
    untagged_acks,
    /// Packets to members that got no tag, because all that they may depend on is committed.
    untagged_covered,
    /// Packets that were covered, or let out by mode async, without a way through user space.
    covered,
    /// Packets that were left to the queue.
    left_to_queue,
    /// Packets to members that went the way to the outside: the header has no room for a tag.
    gated_no_room,
    /// The same: a fragment that cannot hold a tag.
    gated_fragment,
    /// The same: as large as the path takes.
    gated_mtu,
    /// The same: the path strips options.
    gated_path,
    /// Packets that could not be read, or that name a route of their own.
    gated_unreadable,
    /// The same as `gated_no_room`: the kernel refused to make room.
    gated_refused,
    /// The same: C is not known, or P is further than the backup has said that a writer can be.
    gated_untrusted,
    /// The same: what the member may depend on is not known.
    gated_incomplete,
    /// The guest sent a tag of its own: dropped.
    dropped_guests_own,
    /// Packets that could not leave by themselves while no daemon was there to hold them: dropped.
    dropped_unjudged,
    /// The same while the packet filter's rules that would have queued them were gone.
    dropped_no_rules,
    /// ARP and neighbour discovery while the gate was shut, ARP that is not as it should be, and frames to a bridge itself: dropped.
    dropped_shut,
    /// TCP connections whose segments were made smaller, so that the tag fits.
    mss_lowered,
    /// Packets to members without a tag, because tagging is off for a demonstration.
    untagged_for_a_demonstration,
    /// Packets from members whose tag was merged and stripped.
    merged,
    /// Packets from others whose tags were stripped and not merged.
    stripped_foreign,
    /// Packets from members with a tag that is wrong: dropped, what they depend on is unknown.
    dropped_malformed,
    /// Packets with a member's address and a tag that came by an interface by which that member does not: dropped.
    dropped_wrong_way,
    /// Packets whose header could not be read: dropped.
    dropped_unreadable,
    /// Packets from members whose time is too far ahead of this host's clock: dropped.
    dropped_ahead,
    /// Packets from members that came before C was known: dropped.
    dropped_untrusted,
    /// Packets that were dropped because the kernel could not do what had to be done.
    dropped_failed,
}

/// A TCP option that a pure acknowledgement may have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AckOption {
    /// Its number.
    pub kind: u8,
    /// The length of its shortest form.
    pub least: u8,
    /// The length of its longest form.
    pub most: u8,
    /// The step between lengths.
    pub step: u8,
}

impl AckOption {
    /// Whether an option of this number and length is one of these.
    #[must_use]
    pub fn is(&self, kind: u8, len: u8) -> bool {
        kind == self.kind
            && (self.least..=self.most).contains(&len)
            && (len - self.least).is_multiple_of(self.step)
    }
}

/// The TCP options that a pure acknowledgement may have, beside padding: those of `netfilter/bpf/ack_options.h`, which the kernel
/// programs go by.
pub const ACK_OPTIONS: &[AckOption] = include!(concat!(env!("OUT_DIR"), "/ack_options.rs"));
