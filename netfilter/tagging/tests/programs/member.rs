//! The programs of one member, loaded but not attached, and what became of the frames that they were given.

use crate::frames::{OWN, OWN6, PEER, PEER6, address};
use std::io::Write;
use std::net::IpAddr;
use std::os::unix::fs::MetadataExt;
use std::sync::atomic::Ordering::SeqCst;
use tidelock_protocol::ids::{Seq, WriterId};
use tidelock_protocol::limits::WRITERS_MAX;
use tidelock_protocol::tag::{Codec, Form, IPV4_OPTION, Stamp, TagKey, TagKeys, TagTerms};
use tidelock_protocol::vector::CountVector;
use tidelock_tagging::{
    Addresses, Direction, GroupTags, Hooks, MemberTags, Peer, Settings, TaggingError, Tried,
};

pub const MARK_MASK: u32 = 0xffff_0000;
pub const MTU: u32 = 1500;
pub const KEY: TagKey = TagKey([3, 4]);
/// The interface of the other member, on this host, and one of nobody.
pub const HERE: u32 = 7;
pub const ELSEWHERE: u32 = 8;
const PEERS: [&str; 2] = ["10.0.0.2", PEER6];

pub struct Member {
    pub group: GroupTags,
    pub tags: MemberTags,
    pub codec: Codec,
}

pub fn settings(form: Form) -> Settings {
    Settings {
        codec: Codec::new(form, "shop", ["db", "web", "files"]),
        ipv4_option: IPV4_OPTION,
        mark_mask: MARK_MASK,
        path_mtu: MTU,
        path_strips_options: false,
        hlc_ahead_max_ms: 1000,
        hooks: Hooks::Best,
        is_bridged: true,
        off_for_a_demonstration: false,
    }
}

pub fn load(settings: &Settings) -> Option<Member> {
    load_with(settings, true)
}

/// `is_here`: whether the other member may be on this host.
pub fn load_with(settings: &Settings, is_here: bool) -> Option<Member> {
    let group = match GroupTags::new() {
        Ok(group) => group,
        // Root that may not do this is root of a container: there the tests would all pass and try nothing.
        Err(e @ TaggingError::NotAllowed) if !is_root() => {
            // Not by eprintln: the test harness swallows that of a test that passes.
            let _ = writeln!(std::io::stderr(), "SKIP kernel programs: {e}");
            return None;
        }
        Err(e) => panic!("{e}"),
    };
    group.sends_by(HERE).unwrap();
    group.committed().set_tag_terms(&terms(TagKeys::only(KEY)));
    let tags = load_one(settings, &group, &["10.0.0.1", OWN6], (&PEERS, is_here));
    group.committed().trusted_until.store(u64::MAX, SeqCst);
    Some(Member { group, tags, codec: settings.codec })
}

/// Every entry can exist.
pub fn everything() -> CountVector {
    (0..WRITERS_MAX).map(|writer| (WriterId(writer), Seq(u64::MAX))).collect()
}

pub fn terms(keys: TagKeys) -> TagTerms {
    TagTerms { keys, reachable: everything() }
}

fn is_root() -> bool {
    std::fs::metadata("/proc/self").expect("/proc").uid() == 0
}

/// The programs of the member that the other one talks to, on the same host.
pub fn load_peer(settings: &Settings, group: &GroupTags) -> MemberTags {
    load_one(settings, group, &PEERS, (&[], true))
}

fn load_one(
    settings: &Settings,
    group: &GroupTags,
    own: &[&str],
    (peers, is_here): (&[&str], bool),
) -> MemberTags {
    let peers = ips(peers).into_iter().map(|address| Peer { address, is_here }).collect();
    let addresses = Addresses { own: ips(own), peers };
    MemberTags::load(settings, group, &addresses, None).unwrap_or_else(|e| panic!("{e}"))
}

fn ips(texts: &[&str]) -> Vec<IpAddr> {
    texts.iter().map(|text| text.parse().unwrap()).collect()
}

pub fn vector(writers: u16) -> Form {
    Form::Vector { writers }
}

impl Member {
    pub fn pend(&self, seqs: &[u64]) {
        for (entry, seq) in self.tags.pending().entries.iter().zip(seqs) {
            entry.store(*seq, SeqCst);
        }
    }

    pub fn pending(&self) -> Vec<u64> {
        self.tags.pending().entries[..3].iter().map(|e| e.load(SeqCst)).collect()
    }

    pub fn commit(&self, seqs: &[u64]) {
        for (entry, seq) in self.group.committed().entries.iter().zip(seqs) {
            entry.store(*seq, SeqCst);
        }
    }

    pub fn open(&self) {
        self.group.committed().open_until.store(u64::MAX, SeqCst);
    }

    pub fn send(&self, frame: &[u8]) -> Tried {
        self.tags.try_frame(Direction::FromGuest, frame, 0).unwrap()
    }

    pub fn receive(&self, frame: &[u8]) -> Tried {
        self.receive_by(HERE, frame)
    }

    pub fn receive_by(&self, interface: u32, frame: &[u8]) -> Tried {
        self.tags.try_frame_from(interface, Direction::ToGuest, frame, 0).unwrap()
    }

    /// What has been counted since.
    pub fn counted(&self, what: &str) -> u64 {
        let stats = self.tags.stats().unwrap();
        stats.named().find(|(name, _)| *name == what).expect("a counter").1
    }

    /// For packets from one address to another.
    pub fn sealing(&self, source: impl Into<IpAddr>, destination: impl Into<IpAddr>) -> Codec {
        self.codec.sealing(TagKeys::only(KEY), source.into(), destination.into())
    }

    /// What the other member writes into a packet to this one.
    pub fn tag4(&self, stamp: &Stamp) -> Vec<u8> {
        let mut option = vec![];
        self.sealing(PEER, OWN).encode_ipv4(IPV4_OPTION, stamp, &mut option);
        option
    }

    pub fn tag6(&self, next: u8, stamp: &Stamp) -> Vec<u8> {
        let mut header = vec![];
        self.sealing(address(PEER6), address(OWN6)).encode_ipv6(next, stamp, &mut header);
        header
    }

    /// What this member writes into a packet to the other one.
    pub fn own4(&self, stamp: &Stamp) -> Vec<u8> {
        let mut option = vec![];
        self.sealing(OWN, PEER).encode_ipv4(IPV4_OPTION, stamp, &mut option);
        option
    }

    pub fn own6(&self, next: u8, stamp: &Stamp) -> Vec<u8> {
        let mut header = vec![];
        self.sealing(address(OWN6), address(PEER6)).encode_ipv6(next, stamp, &mut header);
        header
    }

    #[track_caller]
    pub fn is_passed(&self, tried: &Tried, counter: &str) {
        assert!(tried.passed && tried.mark & MARK_MASK != 0, "{:?}", self.tags.stats());
        assert_eq!(self.counted(counter), 1, "{counter}: {:?}", self.tags.stats());
    }

    #[track_caller]
    pub fn is_left(&self, tried: &Tried, frame: &[u8], counter: &str) {
        assert!(tried.passed && tried.mark & MARK_MASK == 0, "{:?}", self.tags.stats());
        assert_eq!(tried.frame, frame, "a packet that is queued is as it was");
        assert_eq!(self.counted(counter), 1, "{counter}: {:?}", self.tags.stats());
    }

    #[track_caller]
    pub fn is_dropped(&self, tried: &Tried, counter: &str) {
        self.is_dropped_times(tried, counter, 1);
    }

    #[track_caller]
    pub fn is_dropped_times(&self, tried: &Tried, counter: &str, times: u64) {
        assert!(!tried.passed, "{:?}", self.tags.stats());
        assert_eq!(self.counted(counter), times, "{counter}: {:?}", self.tags.stats());
    }
}

pub fn stamp(seqs: &[u64]) -> Stamp {
    Stamp::Vector((0..).map(WriterId).zip(seqs.iter().map(|s| Seq(*s))).collect())
}

pub fn boot_ms() -> u64 {
    let uptime = std::fs::read_to_string("/proc/uptime").unwrap();
    (uptime.split_whitespace().next().unwrap().parse::<f64>().unwrap() * 1000.0) as u64
}
