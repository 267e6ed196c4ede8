mod attaching;
mod leases;
mod lies;
mod turns;
mod unrecorded;

use super::GateControl;
use super::member::{Member, MemberError, MemberParts};
use super::port::{Agreement, EpochKeeper, FromLink, OwnerPort, ToLink};
use super::queue::{OnDisk, Spilled};
use crate::backlog::{Journal, Meter};
use crate::stats::LinkStats;
use bytes::BytesMut;
use std::sync::mpsc::Receiver;
use std::sync::{Arc, Mutex};
use std::task::Waker;
use tidelock_protocol::frame::{self, Frame};
use tidelock_protocol::hlc::Hlc;
use tidelock_protocol::ids::{
    Channel, DiskId, Epoch, GroupId, Incarnation, MonoNanos, Nonce, RunId, Seq, WriterId,
};
use tidelock_protocol::lease::HoldReason;
use tidelock_protocol::message::{
    Attach, Attached, Basis, Bookmark, BookmarkPoint, CopyState, Form, LastRun, LogAge, Message,
    Mode, Policy, Progress, RefusalKind, Role, StreamState, Tagging, UNASKED, Writing,
};
use tidelock_protocol::record::{DiskChange, Effect, Payload, Record};
use tidelock_protocol::tag::{TagKey, TagKeys, TagTerms};
use tidelock_protocol::vector::CountVector;
use tidelock_storage::unsynced::Directory;

const NOW: MonoNanos = MonoNanos(0);
const WRITER: WriterId = WriterId(0);
const LOG: LogAge = LogAge { file: 1, number: 3 };
const UNCLEAN: LastRun = LastRun::Unclean { log: LOG };
const CLEAN: LastRun = LastRun::Clean { seq: Seq(4), served: false };
const POLICY: Policy =
    Policy { mode: Mode::Pipelined, after_ms: Some(9_000), degraded_since_unix_ms: None };

/// What the link told the gate and the disk, in order.
#[derive(Clone, Default)]
struct Told {
    said: Arc<Mutex<Vec<String>>>,
    /// P of the member.
    pending: Arc<Mutex<(CountVector, Hlc)>>,
    /// Since when it may not name all that the guest knows.
    mark: Arc<Mutex<Option<u64>>>,
}

impl Told {
    fn say(&self, text: String) {
        self.said.lock().unwrap().push(text);
    }

    fn take(&self) -> Vec<String> {
        std::mem::take(&mut self.said.lock().unwrap())
    }
}

impl GateControl for Told {
    fn committed(&self, committed: &CountVector) {
        self.say(format!("C {committed}"));
    }
    fn tag_terms(&self, terms: &TagTerms) {
        self.say(format!("tags of period {} up to {}", terms.keys.period, terms.reachable));
    }
    fn lease_renewed(&self, sent_at: MonoNanos) {
        self.say(format!("lease {sent_at}"));
    }
    fn fence(&self) {
        self.say("fence".into());
    }
    fn hold(&self, reason: HoldReason, hold: bool) {
        self.say(format!("hold {reason:?} {hold}"));
    }
    fn awaits_floor(&self) -> Option<u64> {
        *self.mark.lock().unwrap()
    }
    fn mark_incomplete(&self) {
        *self.mark.lock().unwrap() = Some(5);
    }
    fn floor(&self, mark: u64, pending: &CountVector, hlc: Hlc) {
        self.say(format!("floor {mark} {pending} {}", hlc.0));
    }
    fn pending(&self) -> (CountVector, Hlc) {
        self.pending.lock().unwrap().clone()
    }
}

impl EpochKeeper for Told {
    fn keep(&mut self, epoch: Epoch, _: GroupId) -> std::io::Result<()> {
        self.say(format!("epoch {epoch}"));
        Ok(())
    }
    fn keep_served(&mut self) -> std::io::Result<()> {
        self.say("served".into());
        Ok(())
    }
    fn keep_fenced(&mut self, _: &str) -> std::io::Result<()> {
        self.say("kept fenced".into());
        Ok(())
    }
    fn keep_serves_unreached(&mut self, kept: bool) -> std::io::Result<()> {
        self.say(format!("serves unreached {kept}"));
        Ok(())
    }
}

const GROUP_ID: GroupId = GroupId([7; 16]);

struct Bench {
    member: Member<FromLink>,
    heard: Receiver<FromLink>,
    told: Told,
    port: Arc<OwnerPort<FromLink>>,
    stats: Arc<LinkStats>,
}

/// A writer that is alone.
fn alone(last_run: LastRun) -> Attach {
    Attach {
        group: "g".into(),
        group_id: None,
        member: "m".into(),
        writers: vec!["m".into()],
        epoch: Epoch(0),
        lease_ms: 10_000,
        grace_ms: 15_000,
        machine: None,
        tagging: None,
        role: Role::Writer(Writing {
            writer: WRITER,
            disks: vec![],
            incarnation: Incarnation(1),
            nonce: Nonce(1, 2),
            before: None,
            marks: vec![],
            last_run,
            mode: Mode::Pipelined,
        }),
    }
}

/// A writer among several members.
fn tagged(form: Form, last_run: LastRun) -> Attach {
    Attach { tagging: Some(Tagging { form, peers: vec![] }), ..alone(last_run) }
}

fn follower(form: Form) -> Attach {
    Attach { role: Role::Follower, ..tagged(form, LastRun::Unknown) }
}

fn bench(last_run: LastRun) -> Bench {
    bench_of(alone(last_run))
}

fn bench_of(attach: Attach) -> Bench {
    bench_with(attach, None, None, None)
}

fn bench_with(
    attach: Attach,
    says_unreached: Option<bool>,
    on_disk: Option<(OnDisk, Spilled)>,
    fenced: Option<&str>,
) -> Bench {
    let (on_disk, left) = on_disk.unzip();
    let told = Told::default();
    let (port, heard) = OwnerPort::new(Waker::noop().clone());
    let port = Arc::new(port);
    let stats = Arc::<LinkStats>::default();
    let member = Member::new(MemberParts {
        attach,
        log: LOG,
        policy: POLICY,
        says_unreached,
        channel: Channel(1),
        port: port.clone(),
        to_owner: |message| message,
        gate: Arc::new(told.clone()),
        gives_up: false,
        fenced: fenced.map(str::to_owned),
        keeper: Box::new(told.clone()),
        stats: stats.clone(),
        on_disk,
        left,
    });
    Bench { member, heard, told, port, stats }
}

fn attached(durable: u64, committed: u64, copy: CopyState) -> Message {
    let basis = if copy == CopyState::Whole { Basis::Continues } else { Basis::Log };
    Message::Attached(Attached {
        group_id: GROUP_ID,
        epoch: Epoch(1),
        progress: progress(durable, committed, Hlc(0), Hlc(0)),
        stream: Some(StreamState { last_hlc: Hlc(0), copy, begun: None, basis }),
    })
}

/// The same with another part of it.
fn attached_but(message: &Message, change: impl FnOnce(&mut Attached)) -> Message {
    let Message::Attached(mut attached) = message.clone() else { panic!("{message:?}") };
    change(&mut attached);
    Message::Attached(attached)
}

fn progress(durable: u64, committed: u64, watermark: Hlc, frontier: Hlc) -> Progress {
    let committed = CountVector::of(WRITER, Seq(committed));
    Progress { durable: Seq(durable), committed, watermark, frontier }
}

/// A member without disks is attached.
fn followed(progress: Progress) -> Message {
    let stream = None;
    Message::Attached(Attached { group_id: GROUP_ID, epoch: Epoch(1), progress, stream })
}

/// Everything up to here is durable, and in C.
fn acked(seq: u64) -> Message {
    Message::Progress(progress(seq, seq, Hlc(0), Hlc(0)))
}

fn record(seq: u64) -> Record {
    Record {
        writer: WRITER,
        seq: Seq(seq),
        epoch: Epoch(1),
        hlc: Hlc(seq),
        deps: CountVector::new(),
        body: DiskChange {
            disk: DiskId(0),
            offset: 0,
            copy: false,
            flushed: false,
            effect: Effect::Write(Payload::new(vec![1; 512].into())),
        },
    }
}

impl Bench {
    fn connect(&mut self) -> LastRun {
        let mut out = BytesMut::new();
        self.member.connected(&mut out);
        match frame::decode(&mut out).unwrap() {
            Some(Frame::Control(Channel(1), Message::Attach(attach))) => {
                attach.writing().unwrap().last_run
            }
            other => panic!("{other:?}"),
        }
    }

    fn admit(&mut self, seqs: std::ops::RangeInclusive<u64>) {
        let records = seqs.map(record).collect();
        let message = ToLink::Records { records, admitted_at: NOW };
        self.member.hear_owner(message, &mut BytesMut::new());
    }

    fn sent(&mut self) -> Vec<u64> {
        let mut out = BytesMut::new();
        self.member.fill(&mut out, 1 << 20).unwrap();
        std::iter::from_fn(|| frame::decode(&mut out).unwrap())
            .filter_map(|frame| match frame {
                Frame::Record(_, record) => Some(record.seq.0),
                Frame::Part(_, part) => Some(part.seq.0),
                Frame::Control(_, Message::Policy(_) | Message::Begun | Message::Logged(_)) => None,
                Frame::Control(..) => Some(0),
            })
            .collect()
    }
}

fn controls(b: &mut Bench) -> Vec<Message> {
    let mut out = BytesMut::new();
    b.member.beacon(NOW, &mut out);
    b.member.fill(&mut out, 1 << 20).unwrap();
    let frames = std::iter::from_fn(|| frame::decode(&mut out).unwrap());
    let control = |frame| match frame {
        Frame::Control(_, message) => Some(message),
        Frame::Record(..) | Frame::Part(..) => None,
    };
    let is_of_the_run = |m: &Message| matches!(m, Message::Begun | Message::Logged(_));
    frames.filter_map(control).filter(|message| !is_of_the_run(message)).collect()
}

/// The messages about its run that the member sends, in order.
fn of_the_run(b: &mut Bench) -> Vec<Message> {
    let mut out = BytesMut::new();
    b.member.fill(&mut out, 1 << 20).unwrap();
    let frames = std::iter::from_fn(|| frame::decode(&mut out).unwrap());
    let of_the_run = |frame| match frame {
        Frame::Control(_, message @ (Message::Begun | Message::Logged(_))) => Some(message),
        _ => None,
    };
    frames.filter_map(of_the_run).collect()
}
