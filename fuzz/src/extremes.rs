//! Valid messages with extreme values, from short programs.
//!
//! A random number is almost never at a bound. So each number of a message is one of a few kinds, which a byte of the
//! program selects: zero, the greatest, a power of two, or a number beside one that the other side knows.

use std::net::Ipv4Addr;
use tidelock_protocol::hlc::Hlc;
use tidelock_protocol::ids::{
    DiskId, Epoch, GroupId, Incarnation, MonoNanos, Nonce, RunId, Seq, WriterId,
};
use tidelock_protocol::limits;
use tidelock_protocol::machine::{Card, Machine, MachineDisk, MachineNetwork};
use tidelock_protocol::message::{
    Attach, Attached, Basis, Bookmark, BookmarkPoint, CleanEnd, CopyState, DiskSpec, Form, LastRun,
    LogAge, Message, Mode, Policy, Progress, RefusalKind, Role, StreamState, Tagging, Writing,
};
use tidelock_protocol::part::PartialRecord;
use tidelock_protocol::tag::{TagKey, TagKeys, TagTerms};
use tidelock_protocol::vector::CountVector;

/// Distances of a time from the wall clock that are at a bound of the protocol, in milliseconds.
const AHEAD_MS: [u64; 8] = [0, 1, 59_999, 60_000, 60_001, 120_000, 120_001, 8 * 3_600_000];

/// Distances of a count from a known one that are at a bound of the protocol.
const BEYOND: [u64; 8] = [1, 2, 16, 1 << 24, (1 << 24) + 1, 1 << 30, 1 << 40, (1 << 40) + 1];

/// Numbers that the other side knows.
#[derive(Clone, Copy, Debug, Default)]
pub struct Known {
    /// Seqs, epochs, runs, sizes.
    pub counts: [u64; 6],
    /// The wall clock.
    pub wall_ms: u64,
    /// The clock that never steps.
    pub mono: MonoNanos,
    /// The group's identity.
    pub group_id: Option<GroupId>,
}

/// A program and how much of it is read. Its bytes are followed by zeroes.
#[derive(Debug)]
pub struct Extremes<'a> {
    bytes: &'a [u8],
    known: Known,
}

impl<'a> Extremes<'a> {
    /// Begins with the program's first byte.
    #[must_use]
    pub fn new(bytes: &'a [u8]) -> Self {
        Self { bytes, known: Known::default() }
    }

    /// Whether all of the program was read.
    #[must_use]
    pub fn is_at_end(&self) -> bool {
        self.bytes.is_empty()
    }

    /// Replaces the numbers that the other side knows.
    pub fn set_known(&mut self, known: Known) {
        self.known = known;
    }

    /// The next byte.
    pub fn byte(&mut self) -> u8 {
        let Some((byte, rest)) = self.bytes.split_first() else { return 0 };
        self.bytes = rest;
        *byte
    }

    /// A number below the limit.
    pub fn below(&mut self, limit: u8) -> u8 {
        self.byte() % limit
    }

    /// Yes or no.
    pub fn flag(&mut self) -> bool {
        self.byte() & 1 == 1
    }

    /// The value in two of three cases, and an extreme one in the third.
    pub fn or_else<T>(&mut self, value: T, extreme: impl FnOnce(&mut Self) -> T) -> T {
        if self.below(3) < 2 { value } else { extreme(self) }
    }

    /// Nothing in one of three cases.
    pub fn maybe<T>(&mut self, some: impl FnOnce(&mut Self) -> T) -> Option<T> {
        if self.below(3) == 0 { None } else { Some(some(self)) }
    }

    /// One of these.
    pub fn one_of<T: Clone>(&mut self, all: &[T]) -> T {
        all[usize::from(self.byte()) % all.len()].clone()
    }

    /// A count.
    pub fn number(&mut self) -> u64 {
        let byte = self.byte();
        let high = usize::from(byte / 16);
        let known = self.known.counts[high % self.known.counts.len()];
        match byte % 16 {
            0 => 0,
            1 => 1,
            2 => u64::MAX,
            3 => u64::MAX - 1,
            4 => 1 << (high * 4 + 3),
            5 => (1 << (high * 4 + 3)) - 1,
            6 => u64::MAX / 2 + 1,
            7 => high as u64,
            8 => known.wrapping_sub(1),
            9 | 10 => known.wrapping_add(1),
            11 | 12 => known.saturating_add(BEYOND[high % 8]),
            _ => known,
        }
    }

    /// A count of 32 bits.
    pub fn number_32(&mut self) -> u32 {
        let number = self.number();
        if self.flag() { number as u32 } else { u32::try_from(number).unwrap_or(u32::MAX) }
    }

    /// A time of a wall clock.
    pub fn wall_ms(&mut self) -> u64 {
        let byte = self.byte();
        match byte % 4 {
            0 => self.number(),
            1 => self.known.wall_ms.saturating_sub(AHEAD_MS[usize::from(byte / 4) % 8]),
            _ => self.known.wall_ms.saturating_add(AHEAD_MS[usize::from(byte / 4) % 8]),
        }
    }

    /// A time of the hybrid logical clock.
    pub fn hlc(&mut self) -> Hlc {
        match self.below(4) {
            0 => Hlc(self.number()),
            1 => Hlc::new(self.wall_ms(), u16::MAX),
            _ => Hlc::new(self.wall_ms(), 0),
        }
    }

    /// A time of the clock that never steps.
    pub fn mono(&mut self) -> MonoNanos {
        match self.below(4) {
            0 => MonoNanos(self.number()),
            1 => MonoNanos(self.known.mono.0.saturating_add(1)),
            2 => MonoNanos(self.known.mono.0.saturating_sub(1)),
            _ => self.known.mono,
        }
    }

    /// A seq.
    pub fn seq(&mut self) -> Seq {
        Seq(self.number())
    }

    /// A writer, mostly a small number.
    pub fn writer(&mut self) -> WriterId {
        WriterId(self.short())
    }

    /// A disk, mostly a small number.
    pub fn disk(&mut self) -> DiskId {
        DiskId(self.short())
    }

    fn short(&mut self) -> u16 {
        match self.byte() {
            byte @ 0..=199 => u16::from(byte % 3),
            byte @ 200..=247 => u16::from(byte - 200) + 20,
            _ => u16::MAX,
        }
    }

    /// A count vector with few entries.
    pub fn vector(&mut self) -> CountVector {
        let mut vector = CountVector::new();
        for _ in 0..self.below(4) {
            let writer = WriterId(self.short() % limits::WRITERS_MAX);
            vector.raise(writer, self.seq());
        }
        vector
    }

    /// A name at or above a limit.
    pub fn name(&mut self) -> String {
        let byte = self.byte();
        match byte % 8 {
            0 => String::new(),
            1 => "x".repeat(limits::NAME_MAX_BYTES),
            2 => "x".repeat(limits::NAME_MAX_BYTES + 1),
            3 => "..".to_owned(),
            4 => "ü\0\u{1b}[2J".to_owned(),
            5 => "a".to_owned(),
            6 => "b".to_owned(),
            _ => format!("n{}", byte / 8),
        }
    }

    /// A text for people at or above a limit.
    pub fn text(&mut self) -> String {
        match self.below(5) {
            0 => String::new(),
            1 => "ü".repeat(limits::TEXT_MAX_BYTES / 2),
            2 => "ü".repeat(limits::TEXT_MAX_BYTES / 2 + 1),
            3 => "{}\n%s\u{1b}".to_owned(),
            _ => "why".to_owned(),
        }
    }

    /// The identity of a disk.
    pub fn mark(&mut self) -> String {
        match self.below(4) {
            0 => String::new(),
            1 => "m".repeat(limits::MARK_MAX_BYTES),
            2 => "m".repeat(limits::MARK_MAX_BYTES + 1),
            _ => "root image inode=7".to_owned(),
        }
    }

    fn some<T>(&mut self, most: usize, mut each: impl FnMut(&mut Self) -> T) -> Vec<T> {
        // Lists at their limit are long: seldom.
        let byte = self.byte();
        let count = match byte {
            0..=247 => usize::from(byte % 4),
            248..=251 => most,
            _ => most + 1,
        };
        (0..count).map(|_| each(self)).collect()
    }

    /// Names that differ, as many as there may be or few.
    fn names(&mut self, most: usize) -> Vec<String> {
        let mut nth = 0;
        self.some(most, |of| {
            nth += 1;
            of.or_else(format!("n{nth}"), Self::name)
        })
    }

    /// A mode.
    pub fn mode(&mut self) -> Mode {
        self.one_of(&[Mode::Sync, Mode::Pipelined, Mode::Async])
    }

    /// A form.
    pub fn form(&mut self) -> Form {
        self.one_of(&[Form::Vector, Form::Hlc])
    }

    /// A policy.
    pub fn policy(&mut self) -> Policy {
        let mode = self.mode();
        let after_ms = self.maybe(Self::number);
        Policy { mode, after_ms, degraded_since_unix_ms: self.maybe(Self::wall_ms) }
    }

    /// The age of an activity log.
    pub fn log(&mut self) -> LogAge {
        LogAge { file: self.number(), number: self.number() }
    }

    /// An account of the last run.
    pub fn last_run(&mut self) -> LastRun {
        match self.below(4) {
            0 => LastRun::Unknown,
            1 => LastRun::Continues { from: self.seq() },
            2 => LastRun::Clean { seq: self.seq(), served: self.flag() },
            _ => LastRun::Unclean { log: self.log() },
        }
    }

    /// A clean end.
    pub fn end(&mut self) -> CleanEnd {
        let seq = self.seq();
        CleanEnd { seq, marks: self.some(limits::DISKS_MAX.into(), Self::mark) }
    }

    /// A run.
    pub fn run(&mut self) -> RunId {
        RunId { number: Incarnation(self.number()), nonce: Nonce(self.number(), self.number()) }
    }

    /// Disks.
    pub fn disks(&mut self) -> Vec<DiskSpec> {
        let mut nth = 0;
        self.some(limits::DISKS_MAX.into(), |of| {
            nth += 1;
            let id = of.or_else(DiskId(nth - 1), Self::disk);
            let name = of.or_else(format!("n{nth}"), Self::name);
            DiskSpec { id, name, size_bytes: of.number() }
        })
    }

    /// A description of a machine.
    pub fn machine(&mut self) -> Machine {
        let serial = |of: &mut Self| "s".repeat(usize::from(of.below(40)));
        let mac =
            |of: &mut Self| of.one_of(&["52:54:00:12:34:56", "52:54:00:12:34:5", ""]).to_owned();
        Machine {
            memory_mib: self.number(),
            cpus: self.number_32(),
            disks: self.some(limits::DISKS_MAX.into(), |of| MachineDisk {
                name: of.name(),
                bus: Default::default(),
                serial: of.maybe(serial),
            }),
            networks: self.some(32, |of| MachineNetwork {
                name: of.maybe(Self::name),
                model: Card::default(),
                mac: of.maybe(mac),
            }),
            chipset: Default::default(),
            firmware: Default::default(),
        }
    }

    fn peers(&mut self) -> Vec<String> {
        let mut nth = 0;
        self.some(limits::PEERS_MAX, |of| {
            nth += 1;
            let line = format!("n{nth}={}", Ipv4Addr::from(nth));
            of.or_else(line, |of| match of.below(4) {
                0 => "tag.option=999999".to_owned(),
                1 => "=".to_owned(),
                2 => "p".repeat(limits::PEER_MAX_BYTES),
                _ => "p".repeat(limits::PEER_MAX_BYTES + 1),
            })
        })
    }

    fn id(&mut self) -> Option<GroupId> {
        match self.below(3) {
            0 => None,
            1 => Some(GroupId([0xff; 16])),
            _ => self.known.group_id,
        }
    }

    fn tagging(&mut self) -> Tagging {
        Tagging { form: self.form(), peers: self.peers() }
    }

    /// The attachment with some of its values made extreme.
    pub fn attach(&mut self, good: Attach) -> Attach {
        let mut attach = good;
        for _ in 0..=self.below(3) {
            match self.below(20) {
                0 => attach.group = self.name(),
                1 => attach.group_id = self.id(),
                2 => attach.member = self.name(),
                3 => attach.writers = self.names(limits::WRITERS_MAX.into()),
                4 => attach.writers.push(self.name()),
                5 => attach.epoch = Epoch(self.number()),
                6 => attach.lease_ms = self.number(),
                7 => attach.grace_ms = self.number(),
                8 => attach.machine = self.maybe(Self::machine),
                9 => attach.tagging = self.maybe(Self::tagging),
                10 => attach.role = Role::Follower,
                _ => {
                    if let Role::Writer(writing) = &mut attach.role {
                        self.change_writing(writing);
                    }
                }
            }
        }
        attach
    }

    fn change_writing(&mut self, writing: &mut Writing) {
        match self.below(9) {
            0 => writing.writer = self.writer(),
            1 => writing.disks = self.disks(),
            2 => {
                let size_bytes = self.number();
                writing.disks.iter_mut().for_each(|disk| disk.size_bytes = size_bytes);
            }
            3 => writing.incarnation = Incarnation(self.number()),
            4 => writing.nonce = Nonce(self.number(), self.number()),
            5 => writing.before = self.maybe(Self::run),
            6 => writing.marks = self.some(limits::DISKS_MAX.into(), Self::mark),
            7 => writing.last_run = self.last_run(),
            _ => writing.mode = self.mode(),
        }
    }

    /// A host's message about an attached member.
    pub fn message_of_host(&mut self) -> Message {
        match self.below(18) {
            0 => Message::Beacon { sent_at: self.mono() },
            1 => {
                let (disk, offset) = (self.disk(), self.number());
                let digest = [self.byte(); 32];
                Message::DigestCheck { disk, offset, len_bytes: self.number_32(), digest }
            }
            2 => {
                let (disk, offset) = (self.disk(), self.number());
                Message::ZeroCheck { disk, offset, len_bytes: self.number() }
            }
            3 => Message::ModeChanged { mode: self.mode() },
            4 => Message::Detach { end: self.maybe(Self::end) },
            5 | 6 => Message::Begun,
            7 | 8 => Message::Logged(self.log()),
            9..=11 => {
                let (id, pending) = (self.number(), self.vector());
                Message::Sounded { id, pending, hlc: self.hlc() }
            }
            12 => Message::AskFloor { mark: self.number(), everyone: self.flag() },
            13 => Message::Policy(self.policy()),
            14 => Message::Bookmark(Box::new(Bookmark {
                id: self.number(),
                name: self.name(),
                expires_in_ms: self.maybe(Self::number),
                moves: self.flag(),
            })),
            15 => Message::ServesUnreached { serves: self.flag() },
            16 => Message::GiveUpLease,
            _ => Message::ReadyToSwitch { ready: self.flag() },
        }
    }

    fn copy(&mut self) -> CopyState {
        self.one_of(&[
            CopyState::Empty,
            CopyState::Partial,
            CopyState::Whole,
            CopyState::Resyncing,
            CopyState::Seeded,
        ])
    }

    fn basis(&mut self) -> Basis {
        match self.below(4) {
            0 => Basis::Continues,
            1 => Basis::Clean,
            2 => Basis::Log,
            _ => Basis::Everything { why: self.text() },
        }
    }

    fn progress(&mut self) -> Progress {
        let (durable, committed) = (self.seq(), self.vector());
        Progress { durable, committed, watermark: self.hlc(), frontier: self.hlc() }
    }

    fn group_id(&mut self) -> GroupId {
        let other = GroupId([0; 16]);
        let known = self.known.group_id.unwrap_or(other);
        self.or_else(known, |_| other)
    }

    fn stream(&mut self) -> StreamState {
        StreamState {
            last_hlc: self.hlc(),
            copy: self.copy(),
            begun: self.maybe(|of| PartialRecord { seq: of.seq(), bytes: of.number_32() }),
            basis: self.basis(),
        }
    }

    /// The answer to an attachment.
    fn attached(&mut self, stream: Option<StreamState>) -> Attached {
        let group_id = self.group_id();
        let epoch = self.or_else(Epoch(1), |of| Epoch(of.number()));
        Attached { group_id, epoch, progress: self.progress(), stream }
    }

    fn refusal(&mut self) -> RefusalKind {
        self.one_of(&[
            RefusalKind::Version,
            RefusalKind::Forbidden,
            RefusalKind::Fenced,
            RefusalKind::Superseded,
            RefusalKind::Mismatch,
            RefusalKind::Invalid,
            RefusalKind::Damaged,
            RefusalKind::Stopping,
            RefusalKind::Implausible,
            RefusalKind::Quota,
        ])
    }

    /// A backup's message about a member.
    pub fn message_of_backup(&mut self) -> Message {
        match self.below(24) {
            0..=2 => {
                let stream = self.stream();
                Message::Attached(self.attached(Some(stream)))
            }
            3 => Message::Refused { kind: self.refusal(), reason: self.text() },
            4 | 5 | 10 | 11 => Message::Progress(self.progress()),
            6 => Message::Lease { sent_at: self.mono() },
            7 => {
                let (disk, offset) = (self.disk(), self.number());
                Message::DigestResult { disk, offset, equal: self.flag() }
            }
            8 => Message::Stalled { reason: self.maybe(Self::text) },
            9 => Message::Attached(self.attached(None)),
            12 => Message::Sound { id: self.number() },
            13 => Message::Floor { pending: self.vector(), hlc: self.hlc() },
            14 => {
                let (mark, pending) = (self.number(), self.vector());
                Message::FloorIs { mark, pending, hlc: self.hlc() }
            }
            15 => Message::PolicyKept(self.policy()),
            16 => Message::Unheard,
            17 => {
                let id = self.number();
                let outcome = match self.below(3) {
                    0 => Err(self.text()),
                    _ => Ok(Box::new(BookmarkPoint {
                        hlc: self.hlc(),
                        seqs: self.some(limits::WRITERS_MAX.into(), |of| (of.name(), of.number())),
                        without: self.names(limits::MEMBERS_MAX),
                    })),
                };
                Message::Bookmarked { id, outcome }
            }
            18 => Message::ServesUnreachedKept { serves: self.flag() },
            19 => Message::LeaseGivenUp { committed: self.vector() },
            20 => Message::SwitchAwaits { members: self.names(limits::MEMBERS_MAX) },
            21 => Message::Arriving,
            22 => {
                let mut key = || TagKey([self.number(), 0]);
                let (previous, current, next) = (key(), key(), key());
                let period = self.number();
                let keys = TagKeys { period, previous, current, next };
                Message::TagTerms(TagTerms { keys, reachable: self.vector() })
            }
            _ => Message::Welcome { protocol: 1, server: self.name(), software: self.text() },
        }
    }
}
