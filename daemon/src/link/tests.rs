use super::GateControl;
use super::member::{Member, MemberError, MemberParts, Presence};
use super::port::{Agreement, EpochKeeper, FromLink, OwnerPort, ToLink};
use super::queue::{OnDisk, Spilled};
use crate::backlog::{Directory, Journal, Meter};
use crate::stats::LinkStats;
use bytes::BytesMut;
use std::sync::mpsc::Receiver;
use std::sync::{Arc, Mutex};
use tidelock_protocol::frame::{self, Frame};
use tidelock_protocol::hlc::Hlc;
use tidelock_protocol::ids::{Channel, DiskId, Epoch, Incarnation, MonoNanos, Seq, WriterId};
use tidelock_protocol::message::{
    Attach, Attached, Bookmark, BookmarkPoint, CopyState, Followed, Form, LastRun, Message, Mode,
    PROTOCOL, PROTOCOL_OF_BOOKMARKS, PROTOCOL_OF_FLUSHES, PROTOCOL_OF_JOINT_SWITCHES,
    PROTOCOL_OF_POLICIES, PROTOCOL_OF_RUNS, PROTOCOL_OF_SWITCHES, PROTOCOL_OF_UNREACHED, Policy,
    Progress, RefusalKind, UNASKED,
};
use tidelock_protocol::record::{Effect, Payload, Record};
use tidelock_protocol::vector::CountVector;
use tidelock_uring::EventFd;

const NOW: MonoNanos = MonoNanos(0);
const WRITER: WriterId = WriterId(0);
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
    fn lease_renewed(&self, sent_at: MonoNanos) {
        self.say(format!("lease {sent_at}"));
    }
    fn fence(&self) {
        self.say("fence".into());
    }
    fn hold_for_resync(&self, hold: bool) {
        self.say(format!("hold {hold}"));
    }
    fn hold_unrecorded(&self, hold: bool) {
        self.say(format!("hold unrecorded {hold}"));
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
    fn keep(&mut self, epoch: Epoch) -> std::io::Result<()> {
        self.say(format!("epoch {epoch}"));
        Ok(())
    }
    fn keep_fenced(&mut self) -> std::io::Result<()> {
        self.say("kept fenced".into());
        Ok(())
    }
    fn keep_serves_unreached(&mut self, kept: bool) -> std::io::Result<()> {
        self.say(format!("serves unreached {kept}"));
        Ok(())
    }
}

struct Bench {
    member: Member<FromLink>,
    heard: Receiver<FromLink>,
    told: Told,
    port: Arc<OwnerPort<FromLink>>,
    stats: Arc<LinkStats>,
}

fn bench(last_run: LastRun) -> Bench {
    bench_of(Presence::Alone, last_run)
}

fn bench_of(presence: Presence, last_run: LastRun) -> Bench {
    bench_of_says(presence, last_run, None)
}

fn bench_of_says(presence: Presence, last_run: LastRun, says_unreached: Option<bool>) -> Bench {
    bench_with(presence, last_run, says_unreached, None)
}

fn bench_with(
    presence: Presence,
    last_run: LastRun,
    says_unreached: Option<bool>,
    on_disk: Option<(OnDisk, Spilled)>,
) -> Bench {
    let (on_disk, left) = on_disk.unzip();
    let told = Told::default();
    let (port, heard) = OwnerPort::new(EventFd::new().unwrap());
    let port = Arc::new(port);
    let stats = Arc::<LinkStats>::default();
    let member = Member::new(MemberParts {
        presence,
        attach: Attach {
            group: "g".into(),
            member: "m".into(),
            writer: WRITER,
            writers: vec!["m".into()],
            disks: vec![],
            incarnation: Incarnation(1),
            epoch: Epoch(0),
            last_run,
            mode: Mode::Pipelined,
            lease_ms: 10_000,
            grace_ms: 15_000,
            machine: None,
        },
        policy: POLICY,
        says_unreached,
        channel: Channel(1),
        port: port.clone(),
        to_owner: |message| message,
        gate: Arc::new(told.clone()),
        gives_up: false,
        keeper: Box::new(told.clone()),
        stats: stats.clone(),
        on_disk,
        left,
    });
    Bench { member, heard, told, port, stats }
}

fn attached(durable: u64, committed: u64, copy: CopyState) -> Message {
    Message::Attached(Attached {
        epoch: Epoch(1),
        durable: Seq(durable),
        committed: CountVector::of(WRITER, Seq(committed)),
        last_hlc: Hlc(0),
        copy,
    })
}

fn record(seq: u64) -> Record {
    Record {
        writer: WRITER,
        seq: Seq(seq),
        epoch: Epoch(1),
        hlc: Hlc(seq),
        deps: CountVector::new(),
        disk: DiskId(0),
        offset: 0,
        copy: false,
        flushed: false,
        effect: Effect::Write(Payload::new(vec![1; 512].into())),
    }
}

impl Bench {
    fn connect(&mut self) -> LastRun {
        let mut out = BytesMut::new();
        self.member.connected(PROTOCOL.1, &mut out);
        match frame::decode(&mut out).unwrap() {
            Some(Frame::Control(Channel(1), Message::Attach(attach))) => attach.last_run,
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
                Frame::Control(_, Message::Policy(_)) => None,
                Frame::Control(..) => Some(0),
            })
            .collect()
    }
}

#[test]
fn the_gate_is_held_for_a_resync_before_there_can_be_a_lease() {
    let mut b = bench(LastRun::Unknown);
    assert_eq!(b.connect(), LastRun::Unclean);
    b.member.receive(attached(7, 5, CopyState::Resyncing), NOW).unwrap();
    b.member.receive(Message::Lease { sent_at: NOW }, NOW).unwrap();
    assert_eq!(b.told.take(), ["epoch 1", "hold true", "C <5>", "lease 0"]);
    assert!(matches!(b.heard.try_recv(), Ok(FromLink::Attached { first: true, .. })));
    assert_eq!(b.port.acked(), (Seq(7), Seq(5)));
    b.admit(8..=9);
    assert_eq!(b.sent(), [8, 9]);
}

/// The flag would end the connection to a backup that does not know it.
#[test]
fn an_older_backup_is_not_told_of_flushes() {
    for (protocol, is_told) in [(PROTOCOL_OF_FLUSHES, true), (PROTOCOL_OF_FLUSHES - 1, false)] {
        let mut b = bench(LastRun::Unknown);
        let mut out = BytesMut::new();
        b.member.connected(protocol, &mut out);
        b.member.receive(attached(0, 0, CopyState::Whole), NOW).unwrap();
        let records = vec![Record { flushed: true, ..record(1) }];
        b.member.hear_owner(ToLink::Records { records, admitted_at: NOW }, &mut out);
        out.clear();
        b.member.fill(&mut out, 1 << 20).unwrap();
        let sent = std::iter::from_fn(|| frame::decode(&mut out).unwrap());
        let sent = sent.filter_map(|frame| match frame {
            Frame::Record(_, record) => Some(record.flushed),
            Frame::Control(..) => None,
        });
        assert_eq!(sent.collect::<Vec<_>>(), [is_told]);
    }
}

/// The variant would end the connection to a backup that does not know it.
#[test]
fn an_older_backup_is_not_asked_which_run_it_knew() {
    let mut b = bench(LastRun::Unknown);
    let mut out = BytesMut::new();
    b.member.connected(PROTOCOL_OF_RUNS - 1, &mut out);
    let Some(Frame::Control(_, Message::Attach(attach))) = frame::decode(&mut out).unwrap() else {
        panic!("it attaches");
    };
    assert_eq!(attach.last_run, LastRun::Unknown);
    b.member.receive(attached(7, 5, CopyState::Resyncing), NOW).unwrap();
    let heard = b.heard.try_recv().unwrap();
    assert!(matches!(heard, FromLink::Attached { last_attached: None, .. }));

    let mut b = bench(LastRun::Unknown);
    assert_eq!(b.connect(), LastRun::Unclean);
    let last = Incarnation(3);
    b.member.receive(Message::LastAttached { incarnation: last }, NOW).unwrap();
    b.member.receive(attached(7, 5, CopyState::Resyncing), NOW).unwrap();
    let heard = b.heard.try_recv().unwrap();
    assert!(matches!(heard, FromLink::Attached { last_attached: Some(l), .. } if l == last));
}

#[test]
fn a_clean_run_admits_before_the_backup_is_reached_and_says_so_when_it_has() {
    let mut b = bench(LastRun::Clean { seq: Seq(4) });
    assert_eq!(b.connect(), LastRun::Clean { seq: Seq(4) });
    b.member.disconnected();
    b.admit(5..=6);
    let clean = LastRun::Clean { seq: Seq(4) };
    assert_eq!(b.connect(), clean, "or a guest that writes at once would cost a comparison");
    b.member.receive(attached(4, 4, CopyState::Whole), NOW).unwrap();
    assert!(matches!(b.heard.try_recv(), Ok(FromLink::Attached { first: false, .. })));
    assert_eq!(b.sent(), [5, 6]);
    b.member.disconnected();
    assert!(matches!(b.heard.try_recv(), Ok(FromLink::Detached)));
    assert_eq!(b.connect(), LastRun::Continues { from: Seq(5) });
    b.member.receive(attached(5, 5, CopyState::Whole), NOW).unwrap();
    assert_eq!(b.sent(), [6], "what had arrived is not sent again");
}

#[test]
fn a_backup_that_lost_data_ends_the_run() {
    let mut b = bench(LastRun::Clean { seq: Seq(4) });
    b.connect();
    let lost = b.member.receive(attached(3, 3, CopyState::Resyncing), NOW);
    assert!(matches!(lost, Err(MemberError::Stream { .. })), "{lost:?}");
}

#[test]
fn fenced_is_for_good_and_other_refusals_are_asked_again() {
    let mut b = bench(LastRun::Unknown);
    b.connect();
    let refused = |kind| Message::Refused { kind, reason: "why".into() };
    b.member.receive(refused(RefusalKind::Mismatch), NOW).unwrap();
    assert_eq!(b.told.take(), [""; 0]);
    let mut out = BytesMut::new();
    b.member.beacon(NOW, &mut out);
    assert!(matches!(frame::decode(&mut out), Ok(Some(Frame::Control(_, Message::Attach(_))))));
    b.member.receive(refused(RefusalKind::Fenced), NOW).unwrap();
    assert_eq!(b.told.take(), ["fence", "kept fenced"]);
    b.member.disconnected();
    for _ in 0..2 {
        b.member.connected(PROTOCOL.1, &mut out);
        b.member.beacon(NOW, &mut out);
    }
    assert!(out.is_empty(), "a fenced member does not ask again");
}

fn controls(b: &mut Bench) -> Vec<Message> {
    let mut out = BytesMut::new();
    b.member.beacon(NOW, &mut out);
    b.member.fill(&mut out, 1 << 20).unwrap();
    let frames = std::iter::from_fn(|| frame::decode(&mut out).unwrap());
    let control = |frame| match frame {
        Frame::Control(_, message) => Some(message),
        Frame::Record(..) => None,
    };
    frames.filter_map(control).collect()
}

/// The gate may open without the backup only if that knows of it, so nobody answers clients before.
#[test]
fn the_policy_is_told_and_kept_before_there_is_a_lease() {
    let mut b = bench(LastRun::Unknown);
    b.connect();
    b.member.receive(attached(0, 0, CopyState::Whole), NOW).unwrap();
    assert_eq!(controls(&mut b), [Message::Policy(POLICY)], "no beacon");
    assert!(!b.member.wants_lease() && !b.stats.is_policy_kept());
    let other = Policy::holding(Mode::Pipelined);
    b.member.receive(Message::PolicyKept(other), NOW).unwrap();
    assert!(b.member.wants_lease() && !b.stats.is_policy_kept(), "it had no room: the group holds");
    b.member.receive(Message::PolicyKept(POLICY), NOW).unwrap();
    assert!(b.stats.is_policy_kept());
    assert_eq!(controls(&mut b), [Message::Beacon { sent_at: NOW }]);
    let open = Policy { mode: Mode::Async, degraded_since_unix_ms: Some(7), ..POLICY };
    let mut out = BytesMut::new();
    b.member.hear_owner(ToLink::Policy(open), &mut out);
    let said = frame::decode(&mut out).unwrap();
    assert_eq!(said, Some(Frame::Control(Channel(1), Message::Policy(open))));
    b.member.disconnected();
    b.connect();
    b.member.receive(attached(0, 0, CopyState::Whole), NOW).unwrap();
    // It has had no lease: it may have to be told who is in mode async.
    assert_eq!(controls(&mut b), [Message::Policy(open)]);
    b.member.receive(Message::PolicyKept(open), NOW).unwrap();
    b.member.receive(Message::Lease { sent_at: NOW }, NOW).unwrap();
    b.member.disconnected();
    b.connect();
    b.member.receive(attached(0, 0, CopyState::Whole), NOW).unwrap();
    assert_eq!(controls(&mut b), [Message::Beacon { sent_at: NOW }, Message::Policy(open)]);
}

#[test]
fn an_older_backup_is_told_of_no_policy() {
    let mut b = bench(LastRun::Unknown);
    b.member.connected(PROTOCOL_OF_POLICIES - 1, &mut BytesMut::new());
    b.member.receive(attached(0, 0, CopyState::Whole), NOW).unwrap();
    assert!(b.member.wants_lease());
    assert_eq!(controls(&mut b), [Message::Beacon { sent_at: NOW }]);
    let mut out = BytesMut::new();
    b.member.hear_owner(ToLink::Policy(POLICY), &mut out);
    assert!(out.is_empty() && !b.stats.is_policy_kept());
}

#[test]
fn what_was_heard_while_others_were_in_mode_async_is_asked_for_by_who_comes_then() {
    let mut b = bench_of(
        Presence::Writer { form: Form::Vector, peers: vec![] },
        LastRun::Clean { seq: Seq(0) },
    );
    b.member.connected(PROTOCOL.1, &mut BytesMut::new());
    b.member.receive(attached(0, 0, CopyState::Whole), NOW).unwrap();
    b.member.receive(Message::Unheard, NOW).unwrap();
    assert!(controls(&mut b).contains(&Message::AskFloor { mark: 5, everyone: false }));
    b.member.receive(Message::PolicyKept(POLICY), NOW).unwrap();
    b.member.receive(Message::Lease { sent_at: NOW }, NOW).unwrap();
    *b.told.mark.lock().unwrap() = None;
    b.member.receive(Message::Unheard, NOW).unwrap();
    assert_eq!(*b.told.mark.lock().unwrap(), None, "it has been here since");
}

#[test]
fn a_bookmark_is_asked_for_on_each_connection_until_it_is_answered() {
    use tokio::sync::oneshot;
    let wanted = |id| Bookmark { id, name: "deploy".into(), expires_in_ms: None, moves: false };
    let asked = |b: &mut Bench| {
        let bookmarks = controls(b).into_iter();
        bookmarks.filter(|m| matches!(m, Message::Bookmark(_))).collect::<Vec<_>>()
    };
    let mut b = bench(LastRun::Unknown);
    let (done, mut outcome) = oneshot::channel();
    let mut out = BytesMut::new();
    b.member.hear_owner(ToLink::Bookmark(wanted(7), done), &mut out);
    let (forgotten, _) = oneshot::channel();
    b.member.hear_owner(ToLink::Bookmark(wanted(8), forgotten), &mut out);
    assert!(out.is_empty(), "there is no connection");
    for _ in 0..2 {
        b.connect();
        b.member.receive(attached(0, 0, CopyState::Whole), NOW).unwrap();
        assert_eq!(asked(&mut b), [Message::Bookmark(Box::new(wanted(7)))]);
        b.member.disconnected();
    }
    b.connect();
    b.member.receive(attached(0, 0, CopyState::Whole), NOW).unwrap();
    let point = BookmarkPoint { hlc: Hlc(3), seqs: vec![], without: vec![] };
    let answer = Message::Bookmarked { id: 7, outcome: Ok(Box::new(point.clone())) };
    b.member.receive(answer, NOW).unwrap();
    assert_eq!(outcome.try_recv(), Ok(Ok(point)));

    // While it is attached, at once; an older backup cannot.
    let (done, _waits) = oneshot::channel();
    b.member.hear_owner(ToLink::Bookmark(wanted(9), done), &mut out);
    let said = frame::decode(&mut out).unwrap();
    assert_eq!(said, Some(Frame::Control(Channel(1), Message::Bookmark(Box::new(wanted(9))))));
    b.member.disconnected();
    b.member.connected(PROTOCOL_OF_BOOKMARKS - 1, &mut BytesMut::new());
    b.member.receive(attached(0, 0, CopyState::Whole), NOW).unwrap();
    let (done, mut outcome) = oneshot::channel();
    b.member.hear_owner(ToLink::Bookmark(wanted(10), done), &mut out);
    assert!(out.is_empty());
    assert!(outcome.try_recv().unwrap().unwrap_err().contains("too old"));
}

#[test]
fn the_first_lease_is_asked_for_at_once() {
    let mut b = bench(LastRun::Unknown);
    b.connect();
    assert!(!b.member.wants_lease());
    for _ in 0..2 {
        b.member.receive(attached(0, 0, CopyState::Whole), NOW).unwrap();
        b.member.receive(Message::PolicyKept(POLICY), NOW).unwrap();
        assert!(b.member.wants_lease());
        let mut out = BytesMut::new();
        b.member.beacon(NOW, &mut out);
        assert!(matches!(
            frame::decode(&mut out),
            Ok(Some(Frame::Control(_, Message::Beacon { sent_at: NOW })))
        ));
        assert!(!b.member.wants_lease());
        b.member.disconnected();
        b.connect();
    }
}

#[test]
fn nothing_is_sent_to_a_backup_that_takes_nothing_but_beacons_are() {
    let mut b = bench(LastRun::Unknown);
    b.connect();
    b.member.receive(attached(0, 0, CopyState::Whole), NOW).unwrap();
    b.member.receive(Message::PolicyKept(POLICY), NOW).unwrap();
    b.member.fill(&mut BytesMut::new(), 1 << 20).unwrap();
    b.member.receive(Message::Stalled { reason: Some("full".into()) }, NOW).unwrap();
    b.admit(1..=2);
    assert_eq!(b.sent(), [0; 0]);
    let mut out = BytesMut::new();
    b.member.beacon(NOW, &mut out);
    assert!(!out.is_empty());
    b.member.receive(Message::Stalled { reason: None }, NOW).unwrap();
    assert_eq!(b.sent(), [1, 2]);
    b.member.receive(Message::Stalled { reason: Some("full".into()) }, NOW).unwrap();
    b.member.disconnected();
    b.connect();
    b.member.receive(attached(0, 0, CopyState::Whole), NOW).unwrap();
    assert_eq!(b.sent(), [1, 2], "a new attachment says anew if it is still so");
}

#[test]
fn acknowledgements_reach_the_gate_first_and_are_never_for_what_was_not_sent() {
    let mut b = bench(LastRun::Unknown);
    b.connect();
    b.member.receive(attached(0, 0, CopyState::Whole), NOW).unwrap();
    b.admit(1..=3);
    assert_eq!(b.sent(), [1, 2, 3]);
    b.told.take();
    let ack = |seq| Message::Committed {
        durable: Seq(seq),
        committed: CountVector::of(WRITER, Seq(seq)),
    };
    b.member.receive(ack(2), NOW).unwrap();
    assert_eq!(b.told.take(), ["C <2>"]);
    assert_eq!(b.port.acked(), (Seq(2), Seq(2)));
    assert!(matches!(b.member.receive(ack(4), NOW), Err(MemberError::Stream { .. })));
}

#[test]
fn a_beacon_says_what_the_member_waits_for() {
    for form in [Form::Vector, Form::Hlc] {
        let mut b = bench_of(Presence::Follower { form, peers: vec![] }, LastRun::Unknown);
        let mut out = BytesMut::new();
        b.member.connected(PROTOCOL.1, &mut out);
        out.clear();
        let progress = |seq, hlc| Progress {
            committed: CountVector::of(WRITER, Seq(seq)),
            watermark: Hlc(hlc),
            ..Progress::default()
        };
        let followed = Followed { epoch: Epoch(1), progress: progress(6, 60) };
        b.member.receive(Message::Followed(followed), NOW).unwrap();
        b.member.receive(Message::PolicyKept(POLICY), NOW).unwrap();
        let pending = CountVector::of(WRITER, Seq(7));
        *b.told.pending.lock().unwrap() = (pending.clone(), Hlc(70));
        let mut said = |b: &mut Bench| {
            b.member.beacon(NOW, &mut out);
            let frames = std::iter::from_fn(|| frame::decode(&mut out).unwrap());
            let control = |frame| match frame {
                Frame::Control(_, message) => message,
                Frame::Record(..) => panic!("a follower has none"),
            };
            frames.map(control).collect::<Vec<_>>()
        };
        let beacon = Message::Beacon { sent_at: NOW };
        let waits = Message::Sounded { id: UNASKED, pending, hlc: Hlc(70) };
        assert_eq!(said(&mut b), [waits, beacon.clone()], "{form}");
        b.member.receive(Message::Progress(progress(7, 70)), NOW).unwrap();
        assert_eq!(said(&mut b), [beacon], "{form}: all of it is in C");
    }
}

#[test]
fn a_member_of_whom_it_was_not_seen_what_it_heard_asks_until_it_is_told() {
    let form = Form::Vector;
    let mut b = bench_of(Presence::Writer { form, peers: vec![] }, LastRun::Unknown);
    let asked = |b: &mut Bench| {
        let mut out = BytesMut::new();
        b.member.fill(&mut out, 1 << 20).unwrap();
        let frames = std::iter::from_fn(|| frame::decode(&mut out).unwrap());
        let questions = frames.filter_map(|frame| match frame {
            Frame::Control(_, Message::AskFloor { mark, everyone }) => Some((mark, everyone)),
            _ => None,
        });
        questions.collect::<Vec<_>>()
    };
    let attach = |b: &mut Bench, copy| {
        b.member.connected(PROTOCOL.1, &mut BytesMut::new());
        b.member.receive(attached(0, 0, copy), NOW).unwrap();
        b.told.take();
    };
    attach(&mut b, CopyState::Whole);
    assert_eq!(asked(&mut b), [], "all was seen");
    b.member.disconnected();
    // In the middle of an initial copy: C goes on, and P of the run before may be lost.
    attach(&mut b, CopyState::Partial);
    assert_eq!(asked(&mut b), [(5, false)]);
    b.member.disconnected();
    // A switch from mode async while the link is down is not forgotten.
    b.member.hear_owner(ToLink::AskFloor { everyone: true }, &mut BytesMut::new());
    assert_eq!(asked(&mut b), []);
    attach(&mut b, CopyState::Whole);
    assert_eq!(asked(&mut b), [(5, true)]);
    let floor =
        |mark| Message::FloorIs { mark, pending: CountVector::of(WRITER, Seq(3)), hlc: Hlc(9) };
    b.member.receive(floor(0), NOW).unwrap();
    b.member.receive(floor(5), NOW).unwrap();
    assert_eq!(b.told.take().len(), 2);
    b.member.hear_owner(ToLink::AskFloor { everyone: false }, &mut BytesMut::new());
    assert_eq!(asked(&mut b), [(5, false)], "everyone was told");
}

/// What it says next is that its disks may differ, so the owner may make them differ.
#[test]
fn guests_are_served_unrecorded_only_when_no_clean_end_can_be_believed_any_more() {
    const CLEAN: LastRun = LastRun::Clean { seq: Seq(7) };
    let ask = |b: &mut Bench| b.member.hear_owner(ToLink::ServeUnrecorded, &mut BytesMut::new());
    let may = |b: &Bench| matches!(b.heard.try_recv(), Ok(FromLink::MayServeUnrecorded));

    let mut b = bench(CLEAN);
    ask(&mut b);
    assert!(may(&b), "nobody was told");
    assert_eq!(b.connect(), LastRun::Unclean);
    b.member.receive(attached(7, 7, CopyState::Resyncing), NOW).unwrap();
    assert!(matches!(b.heard.try_recv(), Ok(FromLink::Attached { first: true, .. })));

    // The answer may be on its way, or already there.
    let mut b = bench(CLEAN);
    assert_eq!(b.connect(), CLEAN);
    ask(&mut b);
    assert!(!may(&b));
    b.member.disconnected();
    assert!(may(&b));
    assert_eq!(b.connect(), LastRun::Unclean);

    let mut b = bench(CLEAN);
    b.connect();
    ask(&mut b);
    b.member.receive(attached(7, 7, CopyState::Whole), NOW).unwrap();
    assert!(matches!(b.heard.try_recv(), Ok(FromLink::Attached { first: false, .. })));
    b.member.disconnected();
    assert!(matches!(b.heard.try_recv(), Ok(FromLink::Detached)));
    assert!(!may(&b), "the backup was reached");

    // After an unclean end there is nothing to take back.
    let mut b = bench(LastRun::Unknown);
    assert_eq!(b.connect(), LastRun::Unclean);
    ask(&mut b);
    assert!(may(&b));
}

/// A backup that was reached and refuses may have been promoted.
#[test]
fn guests_are_not_served_unrecorded_while_the_backup_refuses() {
    for (kind, serves) in [
        (RefusalKind::Fenced, false),
        (RefusalKind::Mismatch, false),
        (RefusalKind::Stopping, true),
    ] {
        let mut b = bench(LastRun::Unknown);
        b.connect();
        b.member.receive(Message::Refused { kind, reason: String::new() }, NOW).unwrap();
        assert!(matches!(b.heard.try_recv(), Ok(FromLink::Refused(_))));
        b.member.hear_owner(ToLink::ServeUnrecorded, &mut BytesMut::new());
        b.member.disconnected();
        let heard = b.heard.try_recv();
        assert_eq!(matches!(heard, Ok(FromLink::MayServeUnrecorded)), serves, "{kind:?}");
        let is_fenced = b.told.take().contains(&"kept fenced".to_owned());
        assert_eq!(is_fenced, kind == RefusalKind::Fenced);
    }
}

/// The backup is told once it is attached, and what it has kept of that is put on record.
#[test]
fn the_backup_is_told_who_serves_without_it() {
    for (says, protocol, is_told) in [
        (None, PROTOCOL.1, false),
        (Some(false), PROTOCOL.1, true),
        (Some(true), PROTOCOL.1, true),
        (Some(true), PROTOCOL_OF_UNREACHED - 1, false),
    ] {
        let mut b = bench_of_says(Presence::Alone, LastRun::Unknown, says);
        b.member.connected(protocol, &mut BytesMut::new());
        b.member.receive(attached(0, 0, CopyState::Whole), NOW).unwrap();
        let mut out = BytesMut::new();
        b.member.fill(&mut out, 1 << 20).unwrap();
        let sent = std::iter::from_fn(|| frame::decode(&mut out).unwrap());
        let said: Vec<_> = sent
            .filter_map(|frame| match frame {
                Frame::Control(_, Message::ServesUnreached { serves }) => Some(serves),
                _ => None,
            })
            .collect();
        assert_eq!(said, says.filter(|_| is_told).into_iter().collect::<Vec<_>>());
        b.told.take();
        b.member.receive(Message::ServesUnreachedKept { serves: true }, NOW).unwrap();
        assert_eq!(b.told.take(), ["serves unreached true"]);
    }
}

/// What the link sends of its own with the beacon's timer.
fn beat(b: &mut Bench) -> Vec<Message> {
    let mut out = BytesMut::new();
    b.member.beacon(NOW, &mut out);
    b.member.fill(&mut out, 1 << 20).unwrap();
    let frames = std::iter::from_fn(|| frame::decode(&mut out).unwrap());
    let messages = frames.filter_map(|frame| match frame {
        Frame::Control(_, Message::Policy(_)) => None,
        Frame::Control(_, message) => Some(message),
        Frame::Record(..) => None,
    });
    messages.collect()
}

#[test]
fn who_gives_up_its_lease_asks_for_none_and_says_so_again_and_again() {
    let mut b = bench(LastRun::Unknown);
    b.connect();
    b.member.receive(attached(7, 7, CopyState::Whole), NOW).unwrap();
    b.member.receive(Message::PolicyKept(POLICY), NOW).unwrap();
    assert_eq!(beat(&mut b), [Message::Beacon { sent_at: NOW }]);
    let (given_up, mut answer) = tokio::sync::oneshot::channel();
    let mut out = BytesMut::new();
    b.member.hear_owner(ToLink::GiveUpLease(Some(given_up)), &mut out);
    let said = Frame::Control(Channel(1), Message::GiveUpLease);
    assert_eq!(frame::decode(&mut out).unwrap(), Some(said));
    assert!(!b.member.wants_lease());
    assert_eq!(beat(&mut b), [Message::GiveUpLease], "in the place of a beacon");
    // Not answered, and on the next connection the attachment comes first.
    b.member.disconnected();
    assert_eq!(beat(&mut b), []);
    b.connect();
    b.member.receive(attached(7, 7, CopyState::Whole), NOW).unwrap();
    b.member.receive(Message::PolicyKept(POLICY), NOW).unwrap();
    assert!(!b.member.wants_lease());
    assert!(answer.try_recv().is_err());
    let committed = CountVector::of(WRITER, Seq(7));
    b.member.receive(Message::LeaseGivenUp { committed: committed.clone() }, NOW).unwrap();
    assert_eq!(answer.try_recv(), Ok(committed));
    assert_eq!(beat(&mut b), [Message::GiveUpLease, Message::GiveUpLease]);
    // A server that speaks an older version is asked for nothing.
    b.member.disconnected();
    b.member.connected(PROTOCOL_OF_SWITCHES - 1, &mut BytesMut::new());
    b.member.receive(attached(7, 7, CopyState::Whole), NOW).unwrap();
    assert_eq!(beat(&mut b), []);
}

#[test]
fn who_is_ready_to_switch_says_so_on_each_connection_and_hears_of_the_others() {
    let mut b = bench(LastRun::Unknown);
    let attach = |b: &mut Bench| {
        b.connect();
        b.member.receive(attached(7, 7, CopyState::Whole), NOW).unwrap();
        b.member.receive(Message::PolicyKept(POLICY), NOW).unwrap();
    };
    let awaits = |b: &mut Bench, members: &[&str]| {
        let members = members.iter().map(|name| (*name).to_owned()).collect();
        b.member.receive(Message::SwitchAwaits { members }, NOW).unwrap();
    };
    attach(&mut b);
    let agreement = Arc::new(Agreement::default());
    let mut out = BytesMut::new();
    b.member.hear_owner(ToLink::ReadyToSwitch(true, agreement.clone()), &mut out);
    let said = |ready| Some(Frame::Control(Channel(1), Message::ReadyToSwitch { ready }));
    assert_eq!(frame::decode(&mut out).unwrap(), said(true));
    assert_eq!(beat(&mut b), [Message::Beacon { sent_at: NOW }], "its lease is still its own");
    awaits(&mut b, &["other"]);
    assert_eq!((agreement.awaited(), agreement.is_reached()), (vec!["other".to_owned()], false));
    b.member.disconnected();
    attach(&mut b);
    let ready = Message::ReadyToSwitch { ready: true };
    assert_eq!(beat(&mut b), [Message::Beacon { sent_at: NOW }, ready]);
    // Taken back: only what the backup says of it counts.
    b.member.hear_owner(ToLink::ReadyToSwitch(false, agreement.clone()), &mut out);
    assert_eq!(frame::decode(&mut out).unwrap(), said(false));
    awaits(&mut b, &["other"]);
    assert_eq!(agreement.released(), 0, "an answer to what was said before");
    awaits(&mut b, &["m", "other"]);
    assert_eq!((agreement.released(), agreement.is_reached()), (1, false));
    b.member.disconnected();
    attach(&mut b);
    assert_eq!(beat(&mut b), [Message::Beacon { sent_at: NOW }], "it is not ready any more");
    // Once all were ready, nothing that is said later changes that.
    b.member.hear_owner(ToLink::ReadyToSwitch(true, agreement.clone()), &mut out);
    awaits(&mut b, &[]);
    awaits(&mut b, &["other"]);
    assert!(agreement.is_reached());
    // A server that speaks an older version is told nothing.
    b.member.disconnected();
    b.member.connected(PROTOCOL_OF_JOINT_SWITCHES - 1, &mut BytesMut::new());
    b.member.receive(attached(7, 7, CopyState::Whole), NOW).unwrap();
    b.member.receive(Message::PolicyKept(POLICY), NOW).unwrap();
    assert_eq!(beat(&mut b), [Message::Beacon { sent_at: NOW }]);
}

/// A member of which an earlier process has left records 4 to 9 on disk.
fn bench_that_goes_on(directory: &std::path::Path) -> Bench {
    let run = Incarnation(1);
    let files = Directory::at(directory);
    let mut journal = Journal::begin(files.clone(), 1 << 20, run, [0; 16], [0; 32]).unwrap();
    let at = (4..=9).map(|seq| journal.append(&record(seq), || Seq(seq)).unwrap()).min().unwrap();
    journal.set_sound(true).unwrap();
    let meter = Arc::new(Meter::new(1 << 20));
    meter.spill(6);
    let on_disk = OnDisk { files, meter };
    let left = Spilled { at, first: Seq(4), last: Seq(9), payload_bytes: 6 * 512 };
    bench_with(Presence::Alone, LastRun::Unknown, None, Some((on_disk, left)))
}

#[test]
fn what_an_earlier_process_left_is_sent_and_the_gate_is_let_go_when_the_backup_has_it() {
    let dir = tempfile::tempdir().unwrap();
    let mut b = bench_that_goes_on(dir.path());
    assert_eq!((b.stats.lag_writes(), b.stats.lag_bytes()), (6, 6 * 512), "it is said at once");
    assert_eq!(b.connect(), LastRun::Continues { from: Seq(4) });
    b.member.receive(attached(5, 5, CopyState::Whole), NOW).unwrap();
    assert!(matches!(b.heard.try_recv(), Ok(FromLink::Attached { first: false, .. })));
    assert_eq!(b.sent(), [6, 7, 8, 9]);
    let committed = |seq| Message::Committed {
        durable: Seq(seq),
        committed: CountVector::of(WRITER, Seq(seq)),
    };
    b.member.receive(committed(8), NOW).unwrap();
    assert_eq!(b.told.take(), ["epoch 1", "C <5>", "C <8>"], "clients may know of 9");
    b.member.receive(committed(9), NOW).unwrap();
    assert_eq!(b.told.take(), ["C <9>", "hold false"]);
    b.admit(10..=10);
    assert_eq!(b.sent(), [10]);
}

#[test]
fn what_goes_on_and_is_compared_all_the_same_keeps_the_gate_shut_until_that_has_ended() {
    let dir = tempfile::tempdir().unwrap();
    let mut b = bench_that_goes_on(dir.path());
    b.connect();
    b.member.receive(attached(9, 9, CopyState::Resyncing), NOW).unwrap();
    assert_eq!(b.told.take(), ["epoch 1", "hold true", "C <9>"]);
}

#[test]
fn what_the_backup_cannot_go_on_with_is_not_gone_on_with_again() {
    for durable in [2, 10] {
        let dir = tempfile::tempdir().unwrap();
        let mut b = bench_that_goes_on(dir.path());
        b.connect();
        assert!(dir.path().join("sound").exists());
        let refused = b.member.receive(attached(durable, 2, CopyState::Whole), NOW);
        assert!(matches!(refused, Err(MemberError::Stream { .. })), "{durable}");
        assert!(!dir.path().join("sound").exists());
    }
}

/// A backlog on disk was full: the stream stands, and the backup is asked on the same connection to compare the rest.
#[test]
fn a_stream_that_stood_goes_on_with_a_comparison() {
    let attaches = |b: &mut Bench| {
        let mut out = BytesMut::new();
        b.member.fill(&mut out, 1 << 20).unwrap();
        let frames = std::iter::from_fn(|| frame::decode(&mut out).unwrap());
        let asked = frames.filter_map(|frame| match frame {
            Frame::Control(_, Message::Attach(attach)) => Some(attach.last_run),
            _ => None,
        });
        asked.collect::<Vec<_>>()
    };
    let say = |b: &mut Bench, message| b.member.hear_owner(message, &mut BytesMut::new());
    let heard = |b: &Bench| match b.heard.try_recv() {
        Ok(FromLink::Attached { compares, first, .. }) => (compares, first),
        other => panic!("{other:?}"),
    };
    let committed = |durable| Message::Committed {
        durable: Seq(durable),
        committed: CountVector::of(WRITER, Seq(durable)),
    };

    let mut b = bench(LastRun::Clean { seq: Seq(4) });
    b.connect();
    b.member.receive(attached(4, 4, CopyState::Whole), NOW).unwrap();
    assert_eq!(heard(&b), (false, false));
    b.admit(5..=6);
    say(&mut b, ToLink::Stands);
    b.member.disconnected();
    b.heard.try_recv().unwrap();
    assert_eq!(b.connect(), LastRun::Continues { from: Seq(5) }, "the stream first");
    b.member.receive(attached(4, 4, CopyState::Whole), NOW).unwrap();
    assert_eq!(heard(&b), (false, false));
    assert_eq!(b.sent(), [5, 6]);
    assert!(attaches(&mut b).is_empty());
    b.member.receive(committed(6), NOW).unwrap();

    say(&mut b, ToLink::AskToCompare);
    assert_eq!(attaches(&mut b), [LastRun::Unclean]);
    assert!(attaches(&mut b).is_empty(), "once");
    // What the backup had on its way.
    b.member.receive(Message::Lease { sent_at: NOW }, NOW).unwrap();
    b.member.receive(committed(6), NOW).unwrap();
    // The answer is lost with the connection.
    b.member.disconnected();
    b.heard.try_recv().unwrap();
    assert_eq!(b.connect(), LastRun::Unclean);
    b.member.receive(Message::LastAttached { incarnation: Incarnation(1) }, NOW).unwrap();
    b.told.take();
    b.member.receive(attached(6, 6, CopyState::Resyncing), NOW).unwrap();
    assert_eq!(heard(&b), (true, false));
    assert_eq!(b.told.take()[1], "hold true", "before the owner hears of it");
    b.member.disconnected();
    b.heard.try_recv().unwrap();
    assert_eq!(b.connect(), LastRun::Continues { from: Seq(7) }, "it was asked, and goes on");
    b.member.receive(attached(6, 6, CopyState::Resyncing), NOW).unwrap();
    assert_eq!(heard(&b), (false, false));
    b.admit(7..=7);
    assert_eq!(b.sent(), [7]);
}

#[test]
fn a_backup_that_would_not_compare_ends_the_run() {
    let mut b = bench(LastRun::Clean { seq: Seq(4) });
    b.connect();
    b.member.receive(attached(4, 4, CopyState::Whole), NOW).unwrap();
    let again = b.member.receive(attached(4, 4, CopyState::Whole), NOW);
    assert!(matches!(again, Err(MemberError::Unexpected { .. })), "it was not asked");
    let mut b = bench(LastRun::Clean { seq: Seq(4) });
    b.member.hear_owner(ToLink::Stands, &mut BytesMut::new());
    b.member.hear_owner(ToLink::AskToCompare, &mut BytesMut::new());
    assert_eq!(b.connect(), LastRun::Unclean);
    let whole = b.member.receive(attached(4, 4, CopyState::Whole), NOW);
    assert!(matches!(whole, Err(MemberError::Unexpected { .. })), "it would be called in sync");
}

/// A bookmark has all that guests had written when it was set, also what has no record.
#[test]
fn what_has_no_record_is_behind_the_next_one() {
    let reaches = |b: &mut Bench| {
        b.member.receive(Message::Sound { id: 1 }, NOW).unwrap();
        let mut out = BytesMut::new();
        b.member.fill(&mut out, 1 << 20).unwrap();
        let frames = std::iter::from_fn(|| frame::decode(&mut out).unwrap());
        let sounded = frames.filter_map(|frame| match frame {
            Frame::Control(_, Message::Sounded { pending, .. }) => Some(pending.get(WRITER)),
            _ => None,
        });
        sounded.collect::<Vec<_>>()
    };
    let mut b = bench(LastRun::Clean { seq: Seq(4) });
    b.connect();
    b.member.receive(attached(4, 4, CopyState::Whole), NOW).unwrap();
    assert_eq!(reaches(&mut b), [Seq(4)]);
    b.member.hear_owner(ToLink::Stands, &mut BytesMut::new());
    assert_eq!(reaches(&mut b), [Seq(5)]);
    b.member.hear_owner(ToLink::AskToCompare, &mut BytesMut::new());
    b.member.fill(&mut BytesMut::new(), 1 << 20).unwrap();
    b.member.receive(attached(4, 4, CopyState::Resyncing), NOW).unwrap();
    assert_eq!(reaches(&mut b), [Seq(5)], "nothing is recorded yet");
    b.admit(5..=6);
    assert_eq!(reaches(&mut b), [Seq(6)]);
}

/// While the guest's disks are elsewhere the backup hears nothing, on whatever connection; guests may be served.
#[test]
fn a_member_that_awaits_its_adoption_is_not_attached() {
    let adopt = |b: &mut Bench| {
        let mut out = BytesMut::new();
        b.member.hear_owner(ToLink::Adopted, &mut out);
        out
    };
    let mut b = bench(LastRun::Unknown);
    b.member.await_adoption();
    b.member.hear_owner(ToLink::ServeUnrecorded, &mut BytesMut::new());
    assert!(matches!(b.heard.try_recv(), Ok(FromLink::MayServeUnrecorded)));
    for _ in 0..2 {
        let mut out = BytesMut::new();
        b.member.connected(PROTOCOL.1, &mut out);
        b.member.beacon(NOW, &mut out);
        assert!(!b.member.fill(&mut out, 1 << 20).unwrap() && out.is_empty());
        b.member.disconnected();
    }
    b.member.connected(PROTOCOL.1, &mut BytesMut::new());
    assert!(!adopt(&mut b).is_empty(), "it asks to be attached at once");
    assert!(adopt(&mut b).is_empty(), "and once");
    b.member.receive(attached(0, 0, CopyState::Partial), NOW).unwrap();
    assert!(matches!(b.heard.try_recv(), Ok(FromLink::Attached { first: true, .. })));

    // Or with the next connection.
    let mut b = bench(LastRun::Unknown);
    b.member.await_adoption();
    assert!(adopt(&mut b).is_empty() && !b.member.awaits_adoption());
    assert_eq!(b.connect(), LastRun::Unclean);
}
