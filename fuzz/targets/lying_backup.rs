//! The host: no backup, whatever it says in well-formed messages, ends the daemon, opens a gate for records that it was
//! never sent, or grants a lease that was not asked for.
//!
//! Two members are on one link. The backup tells one of them what the input makes it say, through the product's encoder,
//! its decoder and the link. After each step it says the truth to the other one, which must hear all of it.
//!
//! One answer ends the run of a daemon on purpose: a backup that has less than it has acknowledged. Only a new run can
//! bring the disks across again.
//!
//! Input: options (bits 0 and 1: how the member is on the link, bit 2: its form, bit 3: it is attached before the backup
//! begins to lie, bits 4 and 5: its account of the last run, bits 6 and 7 both set: a message may come
//! some thousand times, which is slow), then the program.
#![no_main]

use bytes::BytesMut;
use libfuzzer_sys::fuzz_target;
use std::sync::mpsc::Receiver;
use std::sync::{Arc, Mutex};
use std::task::Waker;
use tidelock_daemon_core::link::connection::{self, ConnectionError};
use tidelock_daemon_core::link::member::{Member, MemberError, MemberParts};
use tidelock_daemon_core::link::port::{Agreement, EpochKeeper, FromLink, OwnerPort, ToLink};
use tidelock_daemon_core::link::turns::Turns;
use tidelock_daemon_core::link::{GateControl, HoldReason};
use tidelock_daemon_core::stats::LinkStats;
use tidelock_fuzz::extremes::{Extremes, Known};
use tidelock_protocol::bounds::SEQ_OF_REMOVED;
use tidelock_protocol::frame::{self, Frame};
use tidelock_protocol::hlc::Hlc;
use tidelock_protocol::ids::{
    Channel, DiskId, Epoch, GroupId, Incarnation, MonoNanos, Nonce, RunId, Seq, WriterId,
};
use tidelock_protocol::message::{
    Attach, Attached, Basis, Bookmark, CopyState, Form, LastRun, LogAge, Message, Mode, Policy,
    Progress, Role, StreamState, Tagging, Writing,
};
use tidelock_protocol::record::{DiskChange, Effect, Payload, Record};
use tidelock_protocol::sender::SenderError;
use tidelock_protocol::vector::CountVector;

const BEGIN_MS: u64 = 1_700_000_000_000;
const GROUP_ID: GroupId = GroupId([7; 16]);
const RUN: RunId = RunId { number: Incarnation(BEGIN_MS * 1000), nonce: Nonce(1, 2) };
const LOG: LogAge = LogAge { file: BEGIN_MS * 1000, number: 3 };
const POLICY: Policy =
    Policy { mode: Mode::Pipelined, after_ms: Some(9_000), degraded_since_unix_ms: None };
const LIED_TO: usize = 0;
const WITNESS: usize = 1;
const WRITER: [WriterId; 2] = [WriterId(0), WriterId(1)];
/// More than a member may have to say to a backup that does not read, as answers to its questions and of its own accord.
const ANSWERS_MAX: usize = 4096 + 64;
const STEPS_MAX: usize = 48;

fuzz_target!(|data: &[u8]| {
    let [options, program @ ..] = data else { return };
    let mut program = Extremes::new(program);
    let mut bench = Bench::new(*options);
    for _ in 0..STEPS_MAX {
        if program.is_at_end() || bench.step(&mut program).is_err() {
            break;
        }
        bench.witness_goes_on();
    }
});

/// A daemon that must start anew to go on.
struct RunHasEnded;

/// The last values given to one member's gate and state file.
#[derive(Debug, Default)]
struct Told {
    committed: CountVector,
    lease: Option<MonoNanos>,
    mark: Option<u64>,
    is_fenced: bool,
}

#[derive(Clone, Default)]
struct Gate(Arc<Mutex<Told>>);

impl Gate {
    fn told(&self) -> std::sync::MutexGuard<'_, Told> {
        self.0.lock().expect("no panic while held")
    }
}

impl GateControl for Gate {
    fn committed(&self, committed: &CountVector) {
        self.told().committed.merge(committed);
    }
    fn lease_renewed(&self, sent_at: MonoNanos) {
        let mut told = self.told();
        told.lease = told.lease.max(Some(sent_at));
    }
    fn fence(&self) {
        self.told().is_fenced = true;
    }
    fn hold(&self, _: HoldReason, _: bool) {}
    fn awaits_floor(&self) -> Option<u64> {
        self.told().mark
    }
    fn mark_incomplete(&self) {
        self.told().mark = Some(5);
    }
    fn floor(&self, mark: u64, _: &CountVector, _: Hlc) {
        let mut told = self.told();
        told.mark = told.mark.filter(|awaited| *awaited != mark);
    }
}

impl EpochKeeper for Gate {
    fn keep(&mut self, _: Epoch, _: GroupId) -> std::io::Result<()> {
        Ok(())
    }
}

/// A member's owner loop and gate, and what has left for the backup.
struct Owner {
    heard: Receiver<FromLink>,
    port: Arc<OwnerPort<FromLink>>,
    gate: Gate,
    stats: Arc<LinkStats>,
    is_attached: bool,
    epoch: Epoch,
    /// The last record; `None` before the stream begins.
    admitted: Option<Seq>,
    /// The greatest seq that the backup can have.
    sent: Seq,
    beacon: Option<MonoNanos>,
}

struct Bench {
    members: Vec<Member<FromLink>>,
    owners: [Owner; 2],
    turns: Turns,
    /// How often a message may be repeated.
    flood: usize,
    is_follower: bool,
    ms: u64,
}

impl Bench {
    fn new(options: u8) -> Self {
        let form = if options & 4 == 0 { Form::Vector } else { Form::Hlc };
        let peers = vec!["m0=10.0.0.1".to_owned(), "m1=10.0.0.2".to_owned()];
        let tagging = Some(Tagging { form, peers });
        let last_run = match options >> 4 & 3 {
            0 => LastRun::Unknown,
            1 => LastRun::Clean { seq: Seq(4), served: false },
            2 => LastRun::Continues { from: Seq(1) },
            _ => LastRun::Unclean { log: LOG },
        };
        let flood = if options >= 0xc0 { ANSWERS_MAX + 1 } else { 64 };
        let is_follower = options & 3 == 1;
        let writer = writer(LIED_TO, tagging.clone(), last_run);
        let attach = match options & 3 {
            0 => Attach { tagging: None, ..writer },
            1 => Attach { role: Role::Follower, ..writer },
            _ => writer,
        };
        let (lied_to, first) = member(LIED_TO, attach);
        let of_witness = self::writer(WITNESS, tagging, LastRun::Unknown);
        let (witness, second) = member(WITNESS, of_witness);
        let (members, owners) = (vec![lied_to, witness], [first, second]);
        let mut bench =
            Self { members, owners, turns: Turns::default(), flood, is_follower, ms: 0 };
        bench.connect();
        if options & 8 != 0 {
            let mut attached = attached(Seq::ZERO);
            attached.stream.take_if(|_| is_follower);
            let attached = Message::Attached(attached);
            assert!(bench.say(Channel(1), &attached).is_ok(), "it is the truth");
            let kept = bench.say(Channel(1), &Message::PolicyKept(POLICY));
            assert!(kept.is_ok(), "it is the truth");
        }
        bench.witness_goes_on();
        bench
    }

    fn now(&self) -> MonoNanos {
        MonoNanos((self.ms + 100_000) * 1_000_000)
    }

    fn connect(&mut self) {
        let mut out = BytesMut::new();
        for member in &mut self.members {
            member.disconnected();
            member.connected(&mut out);
        }
        self.leaves(out);
        self.owners_hear();
    }

    /// A message of the backup arrives. A connection that ends by it is followed by another one.
    fn say(&mut self, channel: Channel, message: &Message) -> Result<(), RunHasEnded> {
        let mut bytes = BytesMut::new();
        frame::encode_control(channel, message, &mut bytes);
        let (now, wall_ms) = (self.now(), BEGIN_MS + self.ms);
        let heard = match frame::decode(&mut bytes) {
            Ok(Some(frame)) => connection::hear(frame, &mut self.members, now, wall_ms),
            Ok(None) => panic!("the encoder makes whole frames"),
            Err(error) => Err(ConnectionError::Frame(error)),
        };
        match heard {
            Err(ConnectionError::Member(MemberError::Stream {
                source: SenderError::Gap { .. },
                ..
            })) => return Err(RunHasEnded),
            Err(ConnectionError::Member(MemberError::Stream {
                source: SenderError::Unsent { .. },
                ..
            })) if is_of_another_run(message) => return Err(RunHasEnded),
            Err(ConnectionError::Member(error)) if error.ends_run() => {
                panic!("the backup ends the daemon: {error}")
            }
            Err(_) => self.connect(),
            Ok(()) if self.members.iter().any(Member::must_connect_anew) => self.connect(),
            Ok(()) => {}
        }
        self.owners_hear();
        Ok(())
    }

    /// Frames leave for the backup.
    fn leaves(&mut self, mut out: BytesMut) {
        let mut controls = 0;
        loop {
            let frame = match frame::decode(&mut out) {
                Ok(Some(frame)) => frame,
                Ok(None) => break,
                Err(error) => panic!("the host sends what no backup can read: {error}"),
            };
            let owner = &mut self.owners[usize::from(frame.channel().0) - 1];
            match frame {
                Frame::Record(_, record) => owner.sent = owner.sent.max(record.seq),
                Frame::Part(_, part) => {
                    if part.at as usize + part.data.len() == part.total_bytes as usize {
                        owner.sent = owner.sent.max(part.seq);
                    }
                }
                Frame::Control(_, Message::Beacon { sent_at }) => owner.beacon = Some(sent_at),
                Frame::Control(..) => controls += 1,
            }
        }
        assert!(controls <= ANSWERS_MAX, "{controls} answers wait for a backup that does not read");
    }

    /// The connection has room.
    fn fill(&mut self) {
        let mut out = BytesMut::new();
        let filled = self.turns.fill(&mut self.members, &mut out);
        filled.expect("nothing is on disk");
        self.leaves(out);
    }

    fn beacon(&mut self) {
        let (now, mut out) = (self.now(), BytesMut::new());
        self.members.iter_mut().for_each(|member| member.beacon(now, &mut out));
        self.leaves(out);
    }

    fn tell_link(&mut self, which: usize, message: ToLink) {
        let mut out = BytesMut::new();
        self.members[which].hear_owner(message, &mut out);
        self.leaves(out);
    }

    fn owners_hear(&mut self) {
        for (which, owner) in self.owners.iter_mut().enumerate() {
            while let Ok(message) = owner.heard.try_recv() {
                match message {
                    FromLink::Attached { attached, first, .. } => {
                        owner.is_attached = true;
                        owner.epoch = attached.epoch;
                        if first {
                            owner.admitted = Some(attached.durable);
                            owner.sent = attached.durable;
                        }
                    }
                    FromLink::Detached => owner.is_attached = false,
                    FromLink::Refused(refusal) => {
                        assert_eq!(which, LIED_TO, "the witness is refused: {}", refusal.reason);
                        owner.is_attached = false;
                    }
                    FromLink::MayServeUnrecorded => owner.admitted = None,
                    FromLink::Digest { .. } | FromLink::Floor { .. } => {}
                }
            }
        }
        self.check();
    }

    /// Nothing is believed that cannot be.
    fn check(&self) {
        for (which, owner) in self.owners.iter().enumerate() {
            let told = owner.gate.told();
            assert!(told.lease <= owner.beacon, "a lease that was not asked for");
            assert!(owner.stats.lease_sent_at() <= owner.beacon, "contact that there was not");
            if which == LIED_TO && self.is_follower {
                continue;
            }
            let own = Some(told.committed.get(WRITER[which])).filter(|own| *own != SEQ_OF_REMOVED);
            assert!(own <= Some(owner.sent), "the gate is open for what was never sent");
            let (durable, committed) = owner.port.acked();
            assert!(durable <= owner.sent, "{durable} is durable, and {} was sent", owner.sent);
            let committed = Some(committed).filter(|committed| *committed != SEQ_OF_REMOVED);
            assert!(committed <= Some(owner.sent), "guests' writes complete that were never sent");
        }
    }

    // ---- the member that hears the truth

    fn witness_goes_on(&mut self) {
        let durable = self.owners[WITNESS].port.acked().0;
        if !self.owners[WITNESS].is_attached {
            self.say_truth(Message::Attached(attached(durable)));
            self.say_truth(Message::PolicyKept(POLICY));
        }
        assert!(self.owners[WITNESS].is_attached, "the witness is attached");
        self.admit(WITNESS, 1, 512);
        // The other one's records go out in turn with these.
        for _ in 0..4 {
            self.fill();
        }
        let seq = self.owners[WITNESS].admitted.expect("it is attached");
        assert_eq!(self.owners[WITNESS].sent, seq, "the witness sends");
        let committed = CountVector::of(WRITER[WITNESS], seq);
        let progress = Progress { durable: seq, committed, ..Progress::default() };
        self.say_truth(Message::Progress(progress));
        assert_eq!(self.owners[WITNESS].port.acked(), (seq, seq), "the witness hears");
        self.ms += 1;
        self.beacon();
        let sent_at = self.now();
        assert_eq!(self.owners[WITNESS].beacon, Some(sent_at), "the witness asks for its lease");
        self.say_truth(Message::Lease { sent_at });
        let told = self.owners[WITNESS].gate.told();
        assert_eq!(told.lease, Some(sent_at), "the witness has its lease");
        assert!(!told.is_fenced, "the witness is fenced");
    }

    fn say_truth(&mut self, message: Message) {
        assert!(self.say(Channel(2), &message).is_ok(), "the truth ends the daemon: {message:?}");
    }

    // ---- the member that is lied to

    /// Its guest writes.
    fn admit(&mut self, which: usize, count: u64, len_bytes: usize) {
        let owner = &mut self.owners[which];
        let Some(last) = owner.admitted else { return };
        let records = (1..=count).map(|nth| Record {
            writer: WRITER[which],
            seq: Seq(last.0 + nth),
            epoch: owner.epoch,
            hlc: Hlc::new(BEGIN_MS, 0),
            deps: CountVector::new(),
            body: DiskChange {
                disk: DiskId(0),
                offset: 0,
                copy: false,
                flushed: false,
                effect: Effect::Write(Payload::new(vec![1; len_bytes].into())),
            },
        });
        let records = records.collect();
        owner.admitted = Some(Seq(last.0 + count));
        let message = ToLink::Records { records, admitted_at: self.now() };
        self.tell_link(which, message);
    }

    fn known(&self) -> Known {
        let owner = &self.owners[LIED_TO];
        let admitted = owner.admitted.unwrap_or_default();
        let counts = [owner.sent.0, admitted.0, owner.port.acked().0.0, 1, RUN.number.0, 5];
        let mono = owner.beacon.unwrap_or(self.now());
        Known { counts, wall_ms: BEGIN_MS + self.ms, mono, group_id: Some(GROUP_ID) }
    }

    fn step(&mut self, program: &mut Extremes<'_>) -> Result<(), RunHasEnded> {
        program.set_known(self.known());
        match program.below(24) {
            0 => self.admit(LIED_TO, 1 + u64::from(program.below(4)), 512),
            1 => self.admit(LIED_TO, 1, 300_000),
            2 => self.fill(),
            3 => self.beacon(),
            4 => self.connect(),
            5 => self.ms += program.one_of(&[1, 1000, 10_000, 120_000]),
            6 => self.owner_says(program),
            7 => {
                let durable = self.owners[LIED_TO].port.acked().0;
                self.say(Channel(1), &Message::Attached(attached(durable)))?;
            }
            8 => {
                let message = program.message_of_host();
                self.say(Channel(1), &message)?;
            }
            9 => {
                let channel = Channel(program.one_of(&[0, 3, u16::MAX]));
                let message = program.message_of_backup();
                self.say(channel, &message)?;
            }
            10 => {
                // Without reading what it is answered.
                let message = program.message_of_backup();
                for _ in 0..program.one_of(&[2, 16, self.flood]) {
                    self.say(Channel(1), &message)?;
                }
            }
            11 => {
                let bytes = Record {
                    writer: program.writer(),
                    seq: program.seq(),
                    epoch: Epoch(program.number()),
                    hlc: program.hlc(),
                    deps: program.vector(),
                    body: DiskChange {
                        disk: program.disk(),
                        offset: program.number(),
                        copy: false,
                        flushed: false,
                        effect: Effect::Idle,
                    },
                };
                let frame = Frame::Record(Channel(1), bytes);
                let now = self.now();
                let heard = connection::hear(frame, &mut self.members, now, BEGIN_MS);
                assert!(heard.is_err(), "a record of a backup");
                self.connect();
            }
            _ => {
                let message = program.message_of_backup();
                self.say(Channel(1), &message)?;
            }
        }
        Ok(())
    }

    /// Messages of the member's owner loop.
    fn owner_says(&mut self, program: &mut Extremes<'_>) {
        let answer = || futures_channel::oneshot::channel().0;
        let message = match program.below(13) {
            0 => ToLink::InOrder(Message::ZeroCheck { disk: DiskId(0), offset: 0, len_bytes: 512 }),
            1 => ToLink::Mode(program.mode()),
            2 => ToLink::Policy(POLICY),
            3 => ToLink::AskFloor { everyone: program.flag() },
            4 => {
                let name = "point".to_owned();
                let id = u64::from(program.below(8));
                ToLink::Bookmark(Bookmark { id, name, expires_in_ms: None, moves: false }, answer())
            }
            5 => ToLink::ServeUnrecorded,
            6 => ToLink::Stands,
            7 => ToLink::AskToCompare,
            8 => ToLink::LeaveOpen,
            9 => ToLink::GiveUpLease(Some(futures_channel::oneshot::channel().0)),
            10 => ToLink::ReadyToSwitch(program.flag(), Arc::new(Agreement::default())),
            11 => ToLink::Logged(LOG),
            _ => {
                self.owners[LIED_TO].gate.mark_incomplete();
                return;
            }
        };
        self.tell_link(LIED_TO, message);
        self.owners_hear();
    }
}

/// The backup has the data of another moment: the run cannot go on there, and ends.
fn is_of_another_run(message: &Message) -> bool {
    let Message::Attached(Attached { stream: Some(stream), .. }) = message else { return false };
    matches!(stream.basis, Basis::Everything { .. })
}

/// An honest answer to an attachment.
fn attached(durable: Seq) -> Attached {
    Attached {
        group_id: GROUP_ID,
        epoch: Epoch(1),
        progress: Progress { durable, ..Progress::default() },
        stream: Some(StreamState {
            last_hlc: Hlc(0),
            copy: CopyState::Whole,
            begun: None,
            basis: Basis::Continues,
        }),
    }
}

fn writer(which: usize, tagging: Option<Tagging>, last_run: LastRun) -> Attach {
    Attach {
        group: "g".into(),
        group_id: None,
        member: format!("m{which}"),
        writers: vec!["m0".into(), "m1".into()],
        epoch: Epoch(0),
        lease_ms: 10_000,
        grace_ms: 15_000,
        machine: None,
        tagging,
        role: Role::Writer(Writing {
            writer: WRITER[which],
            disks: vec![],
            incarnation: RUN.number,
            nonce: RUN.nonce,
            before: Some(RUN),
            marks: vec![],
            last_run,
            mode: Mode::Pipelined,
        }),
    }
}

fn member(which: usize, attach: Attach) -> (Member<FromLink>, Owner) {
    let (port, heard) = OwnerPort::new(Waker::noop().clone());
    let (port, gate, stats) = (Arc::new(port), Gate::default(), Arc::<LinkStats>::default());
    let member = Member::new(MemberParts {
        attach,
        log: LOG,
        policy: POLICY,
        says_unreached: None,
        channel: Channel(which as u16 + 1),
        port: port.clone(),
        to_owner: |message| message,
        gate: Arc::new(gate.clone()),
        gives_up: false,
        fenced: None,
        keeper: Box::new(gate.clone()),
        stats: stats.clone(),
        on_disk: None,
        left: None,
    });
    let owner = Owner {
        heard,
        port,
        gate,
        stats,
        is_attached: false,
        epoch: Epoch(1),
        admitted: None,
        sent: Seq::ZERO,
        beacon: None,
    };
    (member, owner)
}
