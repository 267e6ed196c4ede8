//! The backup: no host, whatever it says in well-formed messages, ends the server, or costs another host of its group
//! anything.
//!
//! Two hosts have a writer each in one group. Host `liar` says what the input makes it say, through the product's encoder,
//! its decoder, the sorting of a connection's frames and the group. After each step host `honest` writes one record and
//! sends one beacon. Both must be answered, and everything that host is told must be true to the rules by which a daemon
//! judges a backup.
//!
//! Input: options (bit 0: times in place of vectors, bit 1: the operator lists the owner of each member, bit 2: the past is
//! kept and compressed, bit 3: the liar is attached before it begins to lie, bits 4 to 7 all set: it may send a whole batch of
//! the journal, which is slow), then the program.
#![no_main]

use bytes::{Bytes, BytesMut};
use libfuzzer_sys::fuzz_target;
use std::collections::BTreeMap;
use tidelock_fuzz::extremes::{Extremes, Known};
use tidelock_protocol::bounds::{self, Plausible};
use tidelock_protocol::frame::{self, Frame};
use tidelock_protocol::hlc::Hlc;
use tidelock_protocol::ids::{
    Channel, DiskId, Epoch, GroupId, Incarnation, MonoNanos, Nonce, RunId, Seq, WriterId,
};
use tidelock_protocol::limits;
use tidelock_protocol::message::{
    Attach, DiskSpec, Form, LastRun, Message, Mode, PROTOCOL, Role, Tagging, Writing,
};
use tidelock_protocol::part::{self, Part};
use tidelock_protocol::record::{DiskChange, Effect, Payload, Record};
use tidelock_protocol::vector::CountVector;
use tidelock_replica::connection::channels::{Channels, Greeting, Heard};
use tidelock_replica::group::{ConnectionId, Group, GroupOptions, Link, Now, Output, Retention};
use tidelock_storage::memory::{Faults, Memory};
use tidelock_store::extents::DiskKey;
use tidelock_store::journal::{self, Compress};

const GROUP: &str = "g";
const HOSTS: [&str; 2] = ["honest", "liar"];
const MEMBERS: [&str; 2] = ["a", "b"];
const HONEST: WriterId = WriterId(0);
const LIAR: WriterId = WriterId(1);
const FOLLOWER: &str = "w";
const RUN: u64 = 1_700_000_000_000_000;
const BEGIN_MS: u64 = 1_700_000_000_000;
const SECTOR: u64 = 512;
const DISK_BYTES: [u64; 2] = [8 * SECTOR, 1 << 20];
/// Room for the disks and the journals of all that a program can write.
const CAPACITY_BYTES: u64 = 256 << 20;
/// Sizes between these would take the memory that only this disk lacks.
const SIZES_LEFT_OUT: std::ops::Range<u64> = (1 << 20) + 1..1 << 40;
const GROUPS_MAX: usize = 3;
/// A writer is asked to give out no more seqs than these for somebody who waits.
const LOST_MAX: u64 = 1 << 24;
/// Steps of the longest program.
const STEPS_MAX: usize = 48;

fuzz_target!(|data: &[u8]| {
    let [options, program @ ..] = data else { return };
    let mut program = Extremes::new(program);
    let mut bench = Bench::new(*options);
    for _ in 0..STEPS_MAX {
        if program.is_at_end() {
            break;
        }
        bench.step(&mut program);
        bench.honest_goes_on();
    }
    bench.end();
});

/// A group and its disk.
struct Slot {
    storage: Memory,
    group: Group<Memory>,
    /// Frames that the group did not accept, by link.
    kept: BTreeMap<Link, Vec<Frame>>,
}

/// One connection of a host.
struct Connection {
    id: ConnectionId,
    host: &'static str,
    is_greeted: bool,
    channels: Channels<String>,
}

/// The host that does as hosts do.
#[derive(Default)]
struct Honest {
    link: Option<Link>,
    seq: u64,
    hlc: Hlc,
    durable: Seq,
    committed: CountVector,
    lease: MonoNanos,
    group_id: Option<GroupId>,
    answers: Vec<Message>,
    disk: Vec<u8>,
}

struct Bench {
    form: Form,
    options: GroupOptions,
    ms: u64,
    groups: BTreeMap<String, Slot>,
    connections: [Connection; 2],
    next_connection: u64,
    honest: Honest,
    /// The liar's stream so far.
    seq: u64,
    hlc: Hlc,
    last_sound: u64,
    full_for: u8,
    /// Or may have none.
    has_burst: bool,
}

impl Bench {
    fn new(options: u8) -> Self {
        let form = if options & 1 == 0 { Form::Vector } else { Form::Hlc };
        let owners = MEMBERS.iter().zip(HOSTS).chain([(&FOLLOWER, HOSTS[1])]);
        let owners = owners.map(|(member, host)| ((*member).to_owned(), host.to_owned()));
        let keeps_past = options & 4 != 0;
        let compress = Compress { block_bytes: 512, percent_max: 1000, ..Compress::default() };
        let options_of_group = GroupOptions {
            journal: journal::Options { segment_bytes: 4000 },
            fold_min_bytes: 1,
            retention: Retention {
                window_ms: if keeps_past { 60_000 } else { 0 },
                ..Retention::default()
            },
            compress: keeps_past.then_some(compress),
            hosts: Some(HOSTS.map(str::to_owned).to_vec()),
            members: if options & 2 == 0 { BTreeMap::new() } else { owners.collect() },
            ..GroupOptions::default()
        };
        let connection = |at: usize| Connection {
            id: ConnectionId(at as u64 + 1),
            host: HOSTS[at],
            is_greeted: false,
            channels: Channels::default(),
        };
        let mut bench = Self {
            form,
            options: options_of_group,
            ms: 0,
            groups: BTreeMap::new(),
            connections: [0, 1].map(connection),
            next_connection: 3,
            honest: Honest { disk: vec![0; DISK_BYTES[0] as usize], ..Honest::default() },
            seq: 0,
            hlc: Hlc(0),
            last_sound: 0,
            full_for: 0,
            has_burst: options < 0xf0,
        };
        bench.greet(0);
        bench.greet(1);
        bench.attaches(0, Channel(1), bench.writer(HONEST, LastRun::Unknown));
        bench.turn();
        assert!(bench.honest.link.is_some(), "the honest host is attached");
        bench.honest_writes(Effect::CopyDone);
        if options & 8 != 0 {
            bench.attaches(1, Channel(1), bench.writer(LIAR, LastRun::Unknown));
            bench.say(1, Channel(1), &Message::Begun);
            let record = bench.next_record(Effect::CopyDone);
            bench.send(1, Channel(1), record);
        }
        bench.honest_goes_on();
        bench
    }

    fn now(&self) -> Now {
        // A server runs a while before its first host.
        Now { mono: MonoNanos((self.ms + 100_000) * 1_000_000), unix_ms: BEGIN_MS + self.ms }
    }

    fn peers() -> Vec<String> {
        [MEMBERS[0], MEMBERS[1], FOLLOWER].map(|name| format!("{name}=10.0.0.1")).to_vec()
    }

    /// An honest attachment.
    fn writer(&self, writer: WriterId, last_run: LastRun) -> Attach {
        let run = RunId { number: Incarnation(RUN), nonce: Nonce(1, 2) };
        let size_bytes = DISK_BYTES[writer.index()];
        Attach {
            group: GROUP.into(),
            group_id: None,
            member: MEMBERS[writer.index()].into(),
            writers: MEMBERS.map(str::to_owned).to_vec(),
            epoch: Epoch(0),
            lease_ms: 10_000,
            grace_ms: 15_000,
            machine: None,
            tagging: Some(Tagging { form: self.form, peers: Self::peers() }),
            role: Role::Writer(Writing {
                writer,
                disks: vec![DiskSpec { id: DiskId(0), name: "root".into(), size_bytes }],
                incarnation: run.number,
                nonce: run.nonce,
                before: Some(run),
                marks: vec!["root image inode=7".into()],
                last_run,
                mode: Mode::Pipelined,
            }),
        }
    }

    fn follower(&self) -> Attach {
        let role = Role::Follower;
        Attach { member: FOLLOWER.into(), role, ..self.writer(LIAR, LastRun::Unknown) }
    }

    // ---- the connections

    fn greet(&mut self, at: usize) {
        let (oldest, newest) = PROTOCOL;
        let host = self.connections[at].host.to_owned();
        let hello = Message::Hello { oldest, newest, host, software: "fuzz".into() };
        self.say(at, Channel(0), &hello);
    }

    fn say(&mut self, at: usize, channel: Channel, message: &Message) {
        let mut bytes = BytesMut::new();
        frame::encode_control(channel, message, &mut bytes);
        self.hear(at, bytes);
    }

    fn attaches(&mut self, at: usize, channel: Channel, attach: Attach) {
        self.say(at, channel, &Message::Attach(Box::new(attach)));
    }

    fn send(&mut self, at: usize, channel: Channel, record: Record) {
        let mut bytes = BytesMut::new();
        if part::is_cut(&record) {
            let mut sent = 0;
            while sent < record.encoded_len() {
                let part = part::part_of(&record, sent as u32);
                sent += part.data.len();
                frame::encode_part(channel, &part, &mut bytes);
            }
        } else {
            frame::encode_record_head(channel, &record, &mut bytes);
            bytes.extend_from_slice(record.payload().map_or(&[], |payload| payload.data()));
        }
        self.hear(at, bytes);
    }

    /// Bytes of a host arrive.
    fn hear(&mut self, at: usize, mut bytes: BytesMut) {
        loop {
            let id = self.connections[at].id;
            let frame = match frame::decode(&mut bytes) {
                Ok(Some(frame)) => frame,
                Ok(None) => return assert!(bytes.is_empty(), "the encoder makes whole frames"),
                Err(error) => {
                    assert_eq!(at, 1, "the honest host sends good frames: {error}");
                    return self.disconnect(at);
                }
            };
            if self.hear_frame(at, frame).is_err() {
                assert_eq!(at, 1, "the honest host keeps the protocol");
                return self.disconnect(at);
            }
            if self.connections[at].id != id {
                return;
            }
        }
    }

    /// As the server does it. An error ends the connection.
    fn hear_frame(&mut self, at: usize, frame: Frame) -> Result<(), ()> {
        let connection = &mut self.connections[at];
        if !connection.is_greeted {
            let Greeting { host, protocol, .. } = Greeting::of(frame).map_err(drop)?;
            assert!((PROTOCOL.0..=PROTOCOL.1).contains(&protocol));
            if host != connection.host {
                return Err(());
            }
            connection.is_greeted = true;
            return Ok(());
        }
        let link = Link { connection: connection.id, channel: frame.channel() };
        let now =
            Now { mono: MonoNanos((self.ms + 100_000) * 1_000_000), unix_ms: BEGIN_MS + self.ms };
        match connection.channels.hear(frame).map_err(drop)? {
            Heard::Attach(channel, attach) => {
                let name = attach.group.clone();
                let other = connection.channels.get(channel);
                if other.is_some_and(|other| *other != name) {
                    return Err(());
                }
                if self.attach(at, link, &attach) {
                    self.connections[at].channels.give(channel, name);
                }
            }
            Heard::Beacon(name, sent_at) => {
                let slot = self.groups.get_mut(name).expect("it was attached");
                match slot.kept.contains_key(&link) {
                    false => slot.group.beacon(now, link, sent_at),
                    true => slot.group.beacon_ahead(now, link, sent_at),
                }
            }
            Heard::Bookmark(name, _) => {
                let slot = self.groups.get_mut(name).expect("it was attached");
                let _ = slot.group.cover(link);
            }
            Heard::Frame(name, frame) => {
                let slot = self.groups.get_mut(name).expect("it was attached");
                slot.receive(now, link, frame);
            }
        }
        Ok(())
    }

    /// Whether there is such a group.
    fn attach(&mut self, at: usize, link: Link, attach: &Attach) -> bool {
        let (host, name, now) = (self.connections[at].host, attach.group.clone(), self.now());
        assert!(bounds::is_name(&name), "the decoder lets no other name through");
        if !self.groups.contains_key(&name) {
            if self.groups.len() >= GROUPS_MAX {
                return false;
            }
            let storage = Memory::new();
            storage.set_faults(self.faults());
            match Group::create(storage.clone(), host, attach, now, self.options.clone()) {
                Ok(group) => {
                    let slot = Slot { storage, group, kept: BTreeMap::new() };
                    self.groups.insert(name.clone(), slot);
                }
                Err(error) => {
                    let (kind, reason) = error.refusal();
                    self.tell(link, &Message::Refused { kind, reason });
                    return false;
                }
            }
        }
        let slot = self.groups.get_mut(&name).expect("just made");
        // Earlier messages do not belong to this attachment.
        slot.kept.remove(&link);
        slot.group.attach(now, link, host, attach);
        true
    }

    fn disconnect(&mut self, at: usize) {
        let connection = &mut self.connections[at];
        for slot in self.groups.values_mut() {
            slot.kept.retain(|link, _| link.connection != connection.id);
            slot.group.connection_lost(connection.id);
        }
        connection.id = ConnectionId(self.next_connection);
        connection.is_greeted = false;
        connection.channels = Channels::default();
        self.next_connection += 1;
    }

    // ---- the groups' threads

    fn faults(&self) -> Faults {
        let capacity_bytes = if self.full_for > 0 { 0 } else { CAPACITY_BYTES };
        Faults { capacity_bytes: Some(capacity_bytes), ..Faults::default() }
    }

    /// A turn of each group.
    fn turn(&mut self) {
        let (now, faults) = (self.now(), self.faults());
        let mut outputs = Vec::new();
        for slot in self.groups.values_mut() {
            slot.storage.set_faults(faults);
            slot.group.retry();
            for (link, frames) in std::mem::take(&mut slot.kept) {
                frames.into_iter().for_each(|frame| slot.receive(now, link, frame));
            }
            slot.group.flush();
            slot.group.take_covered();
            slot.group.take_notices();
            outputs.extend(slot.group.take_outputs());
            slot.group.tend_damage(now);
            slot.work(now);
        }
        for output in outputs {
            match output {
                Output::Send(link, message) => self.tell(link, &message),
                Output::Refuse(link, kind, reason) => {
                    self.tell(link, &Message::Refused { kind, reason });
                }
            }
        }
    }

    /// A message of the backup arrives.
    fn tell(&mut self, link: Link, message: &Message) {
        let mut bytes = BytesMut::new();
        frame::encode_control(link.channel, message, &mut bytes);
        let decoded = frame::decode(&mut bytes);
        let Ok(Some(Frame::Control(channel, message))) = decoded else {
            panic!("a host cannot read what the backup says: {decoded:?}")
        };
        assert_eq!(channel, link.channel);
        if let Message::Sound { id } = message {
            self.last_sound = id;
        }
        if link.connection != self.connections[0].id {
            return;
        }
        let judge = Plausible::of_backup(bounds::CLOCK_BOUND_OF_BACKUPS_MS, Hlc(0));
        let judged = judge.message_of_backup(&message, self.now().unix_ms);
        judged.unwrap_or_else(|error| panic!("the honest host is lied to: {error} ({message:?})"));
        let honest = &mut self.honest;
        match message {
            Message::Attached(attached) => {
                honest.link = Some(link);
                honest.durable = attached.progress.durable;
                honest.group_id = Some(attached.group_id);
                honest.answers.push(Message::Begun);
            }
            Message::Progress(progress) => {
                honest.durable = progress.durable;
                honest.committed = progress.committed;
            }
            Message::Lease { sent_at } => honest.lease = sent_at,
            Message::Sound { id } => {
                let pending = CountVector::of(HONEST, Seq(honest.seq));
                honest.answers.push(Message::Sounded { id, pending, hlc: honest.hlc });
            }
            Message::Floor { pending, .. } => {
                let asked = pending.get(HONEST).0;
                assert!(asked <= honest.seq + LOST_MAX, "the honest host is asked for {asked}");
            }
            Message::Refused { kind, reason } => {
                panic!("the honest host is refused: {reason} ({kind:?})")
            }
            Message::Stalled { reason: Some(reason) } => {
                assert!(self.full_for > 0, "the honest host is stalled: {reason}");
            }
            _ => {}
        }
    }

    // ---- the honest host

    fn honest_writes(&mut self, effect: Effect) {
        let wall = Hlc::new(self.now().unix_ms, 0);
        let honest = &mut self.honest;
        honest.seq += 1;
        honest.hlc = wall.max(honest.hlc.next());
        let copy = effect == Effect::CopyDone;
        let sector = honest.seq % (DISK_BYTES[0] / SECTOR);
        let offset = if copy { 0 } else { sector * SECTOR };
        if let Effect::Write(payload) = &effect {
            let at = offset as usize;
            honest.disk[at..at + payload.data().len()].copy_from_slice(payload.data());
        }
        let record = Record {
            writer: HONEST,
            seq: Seq(honest.seq),
            epoch: Epoch(1),
            hlc: honest.hlc,
            deps: CountVector::new(),
            body: DiskChange { disk: DiskId(0), offset, copy, flushed: false, effect },
        };
        self.send(0, Channel(1), record);
    }

    /// It writes and asks for its lease, and gets what it asks for.
    fn honest_goes_on(&mut self) {
        self.full_for = self.full_for.saturating_sub(1);
        self.turn();
        for answer in std::mem::take(&mut self.honest.answers) {
            self.say(0, Channel(1), &answer);
        }
        let content = vec![self.honest.seq as u8 + 1; SECTOR as usize];
        self.honest_writes(Effect::Write(Payload::new(content.into())));
        self.ms += 1;
        let sent_at = MonoNanos(self.ms);
        self.say(0, Channel(1), &Message::Beacon { sent_at });
        self.turn();
        assert_eq!(self.honest.lease, sent_at, "the honest host has no lease");
        for (name, slot) in &self.groups {
            assert_eq!(slot.group.broken(), None, "group {name}");
        }
        if self.full_for > 0 {
            return;
        }
        let seq = Seq(self.honest.seq);
        assert!(self.groups[GROUP].group.accepts(), "the group is stalled");
        assert_eq!(self.honest.durable, seq, "the honest host's record is not durable");
        if self.form == Form::Vector {
            assert_eq!(self.honest.committed.get(HONEST), seq, "clients of the honest host wait");
        }
    }

    // ---- the liar

    fn next_record(&mut self, effect: Effect) -> Record {
        self.seq += 1;
        self.hlc = Hlc::new(self.now().unix_ms, 0).max(self.hlc.next());
        let copy = matches!(effect, Effect::CopyDone);
        Record {
            writer: LIAR,
            seq: Seq(self.seq),
            epoch: Epoch(1),
            hlc: self.hlc,
            deps: CountVector::new(),
            body: DiskChange { disk: DiskId(0), offset: 0, copy, flushed: false, effect },
        }
    }

    fn effect(program: &mut Extremes<'_>) -> Effect {
        match program.below(8) {
            0 => Effect::CopyDone,
            1 => Effect::Idle,
            2 => Effect::Zero { len_bytes: program.number_32(), no_hole: program.flag() },
            3 => Effect::Zero { len_bytes: 4096, no_hole: program.flag() },
            4 => {
                let len = program.one_of(&[1, limits::COPY_MAX_BYTES, limits::COPY_MAX_BYTES + 1]);
                Effect::Write(Payload::new(vec![7; len as usize].into()))
            }
            _ => Effect::Write(Payload::new(Bytes::from_static(&[7; 512]))),
        }
    }

    fn extreme_record(&mut self, program: &mut Extremes<'_>) -> Record {
        let effect = Self::effect(program);
        let mut record = self.next_record(effect);
        for _ in 0..=program.below(2) {
            match program.below(9) {
                0 => record.writer = program.writer(),
                1 => record.seq = program.seq(),
                2 => record.epoch = Epoch(program.number()),
                3 => record.hlc = program.hlc(),
                4 => record.deps = program.vector(),
                5 => record.body.disk = program.disk(),
                6 => record.body.offset = program.number(),
                7 => record.body.copy = program.flag(),
                _ => record.body.flushed = program.flag(),
            }
        }
        // A refused record does not count.
        let is_next = record.seq.0 == self.seq;
        self.seq -= u64::from(!is_next);
        record
    }

    fn extreme_part(&mut self, program: &mut Extremes<'_>) -> Part {
        let data = vec![7; usize::from(program.byte()) + 1];
        let (total_bytes, at) = (program.number_32(), program.number_32());
        Part { seq: program.seq(), total_bytes, at, data: data.into() }
    }

    fn known(&self) -> Known {
        let counts = [self.seq, self.honest.seq, self.last_sound, 1, RUN, DISK_BYTES[1]];
        let now = self.now();
        Known { counts, wall_ms: now.unix_ms, mono: now.mono, group_id: self.honest.group_id }
    }

    /// The attachment as the program changes it.
    fn lie(program: &mut Extremes<'_>, good: Attach) -> Attach {
        let mut attach = program.attach(good);
        for disk in attach.writing_mut().into_iter().flat_map(|writing| &mut writing.disks) {
            if SIZES_LEFT_OUT.contains(&disk.size_bytes) {
                disk.size_bytes = 1 << 20;
            }
        }
        attach
    }

    /// One message of the liar, and the group's work after it.
    fn step(&mut self, program: &mut Extremes<'_>) {
        program.set_known(self.known());
        if !self.connections[1].is_greeted {
            self.greet(1);
        }
        let op = program.below(32);
        let channel = match program.byte() {
            0..=239 => Channel(1),
            240..=247 => Channel(2),
            248..=251 => Channel(0),
            _ => Channel(u16::MAX),
        };
        match op {
            0..=2 => {
                let last_run = match self.seq {
                    0 => LastRun::Unknown,
                    seq => LastRun::Continues { from: Seq(seq) },
                };
                self.attaches(1, channel, self.writer(LIAR, last_run));
            }
            3..=5 => {
                let lie = Self::lie(program, self.writer(LIAR, LastRun::Unknown));
                self.attaches(1, channel, lie);
            }
            6 => {
                let alone = Attach { tagging: None, ..self.writer(LIAR, LastRun::Unknown) };
                self.attaches(1, channel, Self::lie(program, alone));
            }
            7 => self.attaches(1, Channel(2), self.follower()),
            8 => {
                let lie = Self::lie(program, self.follower());
                self.attaches(1, Channel(2), lie);
            }
            // In a group of its own.
            9 => {
                let own = Attach { group: "own".into(), ..self.writer(LIAR, LastRun::Unknown) };
                self.attaches(1, Channel(3), Self::lie(program, own));
            }
            10 => {
                let message = program.message_of_host();
                self.say(1, program.one_of(&[Channel(2), Channel(3)]), &message);
            }
            11..=13 => {
                let effect = Self::effect(program);
                let record = self.next_record(effect);
                self.send(1, channel, record);
            }
            14..=17 => {
                let record = self.extreme_record(program);
                if record.encoded_len() <= limits::WHOLE_RECORD_MAX_BYTES as usize + 1 {
                    self.send(1, channel, record);
                }
            }
            18 => {
                let part = self.extreme_part(program);
                let mut bytes = BytesMut::new();
                frame::encode_part(channel, &part, &mut bytes);
                self.hear(1, bytes);
            }
            19..=25 => {
                let message = program.message_of_host();
                for _ in 0..=program.one_of(&[0, 0, 0, 0, 0, 0, 1, 100]) {
                    self.say(1, channel, &message);
                }
            }
            26 => {
                let message = program.message_of_backup();
                self.say(1, channel, &message);
            }
            27 => {
                self.disconnect(1);
                let (oldest, newest) = (program.number() as u16, program.number() as u16);
                let (host, software) = (program.name(), program.text());
                self.say(1, Channel(0), &Message::Hello { oldest, newest, host, software });
            }
            28 => self.disconnect(1),
            29 => self.ms += program.one_of(&[1, 1000, 10_000, 15_001, 120_000, 86_400_000]),
            30 => self.full_for = 1 + program.below(4),
            _ => self.burst(channel, 7 + program.below(3), program.flag()),
        }
    }

    /// As much as a batch of the journal takes, before the disk is asked for anything, which may be full by then. Once in a
    /// program: it is slow.
    fn burst(&mut self, channel: Channel, records: u8, is_full: bool) {
        if std::mem::replace(&mut self.has_burst, true) {
            return;
        }
        if is_full {
            self.full_for = 4;
            let faults = self.faults();
            self.groups.values().for_each(|slot| slot.storage.set_faults(faults));
        }
        let payload = Payload::new(vec![7; DISK_BYTES[1] as usize].into());
        for _ in 0..records {
            let record = self.next_record(Effect::Write(payload.clone()));
            self.send(1, channel, record);
        }
    }

    // ---- the end

    /// The records on disk can be read, the server can be started again, and the group recovered.
    fn end(mut self) {
        self.full_for = 0;
        self.turn();
        let now = self.now();
        for slot in self.groups.values_mut() {
            let _ = slot.group.status(now);
            let _ = slot.group.exposed(now);
            slot.group.history().expect("the past can be told");
        }
        self.disk_is_equal();
        for slot in self.groups.values_mut() {
            let opened = Group::open(slot.storage.killed(), now, self.options.clone());
            let (group, _) = opened.expect("it can be opened again").expect("it is there");
            slot.group = group;
            slot.kept.clear();
        }
        for at in 0..2 {
            self.disconnect(at);
            self.greet(at);
        }
        self.honest.link = None;
        let from = Seq(self.honest.seq);
        self.attaches(0, Channel(1), self.writer(HONEST, LastRun::Continues { from }));
        self.turn();
        assert!(self.honest.link.is_some(), "the honest host is attached again");
        assert_eq!(self.honest.durable, from, "the restart has lost the honest host's records");
        self.honest_goes_on();
        self.disk_is_equal();
        let now = self.now();
        for slot in self.groups.values_mut() {
            // A writer whose copy was never whole is in the way, and the operator takes it out.
            if slot.group.recover(now, true).is_err() {
                continue;
            }
            slot.group.recovered_disks().expect("they can be shown");
            let _ = slot.group.status(now);
        }
    }

    fn disk_is_equal(&mut self) {
        let group = &mut self.groups.get_mut(GROUP).expect("made first").group;
        let mut content = vec![0; DISK_BYTES[0] as usize];
        let view = group.view(DiskKey { writer: HONEST, disk: DiskId(0) });
        view.expect("it is there").read(0, &mut content).expect("it can be read");
        assert!(content == self.honest.disk, "the honest host's disk is another at the backup");
    }
}

impl Slot {
    fn receive(&mut self, now: Now, link: Link, frame: Frame) {
        match self.kept.get_mut(&link) {
            Some(kept) => kept.push(frame),
            None => {
                if let Some(frame) = self.group.receive(now, link, frame) {
                    self.kept.entry(link).or_default().push(frame);
                }
            }
        }
    }

    /// The work of the fold's thread.
    fn work(&mut self, now: Now) {
        let group = &mut self.group;
        if let Some(job) = group.fold_job(now) {
            let cut = job.cut.clone();
            group.fold_done(cut, job.run());
        } else if let Some(job) = group.index_job() {
            let segment = job.segment();
            group.index_done(segment, job.run());
        } else if let Some(job) = group.scrub_job(now) {
            group.scrub_done(now, job.run());
        } else if let Some(job) = group.compress_job(now) {
            let (segment, len_bytes) = (job.segment(), job.len_bytes());
            group.compress_done(now, segment, len_bytes, job.run());
        }
    }
}
