//! A backup that lies in well-formed messages.

use super::*;
use crate::link::connection::{self, ConnectionError};
use tidelock_protocol::bounds::{EPOCH_MAX, SEQ_OF_REMOVED};
use tidelock_protocol::message::BookmarkPoint;

const FAR: u64 = u64::MAX;
const WALL_MS: u64 = 1_700_000_000_000;

fn hear(b: &mut Bench, message: Message) -> Result<(), ConnectionError> {
    let members = std::slice::from_mut(&mut b.member);
    connection::hear(Frame::Control(Channel(1), message), members, NOW, WALL_MS)
}

/// The connection ends, and the run goes on.
fn disbelieved(b: &mut Bench, message: Message) {
    let error = hear(b, message.clone()).expect_err(&format!("{message:?}"));
    assert!(error.is_of_words(), "{message:?}: {error}");
}

fn terms(reachable: CountVector) -> TagTerms {
    TagTerms { keys: TagKeys::only(TagKey([1, 2])), reachable }
}

/// One such time has ended the daemons of all hosts of a group at every start.
#[test]
fn what_cannot_be_true_ends_the_connection_and_leaves_nothing() {
    let far = Hlc::new(WALL_MS + 8 * 3_600_000, 0);
    let none = CountVector::new();
    let own = |seq| CountVector::of(WRITER, Seq(seq));
    let good = attached(0, 0, CopyState::Whole);
    let with_hlc = |hlc| attached_but(&good, |told| told.stream.as_mut().unwrap().last_hlc = hlc);
    let with_epoch = |epoch| attached_but(&good, |told| told.epoch = epoch);
    let with = |progress| attached_but(&good, |told| told.progress = progress);
    let of_another = CountVector::of(WriterId(9), Seq(FAR - 1));
    for lie in [
        with_hlc(far),
        with_hlc(Hlc(FAR)),
        with_epoch(Epoch(0)),
        with_epoch(Epoch(FAR)),
        with_epoch(EPOCH_MAX.next()),
        with(progress(FAR, 0, Hlc(0), Hlc(0))),
        with(progress(0, 0, far, Hlc(0))),
        with(progress(0, 0, Hlc(0), Hlc(FAR))),
        with(Progress { committed: of_another, ..Progress::default() }),
    ] {
        let mut b = bench(LastRun::Unknown);
        b.connect();
        disbelieved(&mut b, lie);
        assert_eq!(b.told.take(), [""; 0]);
        assert!(b.heard.try_recv().is_err(), "the owner hears nothing of it");
        b.member.disconnected();
        b.connect();
        hear(&mut b, good.clone()).unwrap();
    }
    for lie in [
        Message::Progress(progress(FAR, 0, Hlc(0), Hlc(0))),
        Message::Progress(progress(0, FAR - 1, Hlc(0), Hlc(0))),
        Message::Progress(progress(3, 0, Hlc(0), Hlc(0))),
        Message::Progress(progress(0, 0, far, Hlc(0))),
        Message::Progress(progress(0, 0, Hlc(0), Hlc(FAR))),
        Message::TagTerms(terms(own(1 << 60))),
        Message::Floor { pending: none.clone(), hlc: far },
        Message::Floor { pending: own(FAR - 1), hlc: Hlc(0) },
        Message::Floor { pending: own(1 << 50), hlc: Hlc(0) },
        Message::FloorIs { mark: 1, pending: none.clone(), hlc: Hlc(FAR) },
        Message::LeaseGivenUp { committed: own(FAR - 1) },
        Message::Bookmarked {
            id: 1,
            outcome: Ok(Box::new(BookmarkPoint { hlc: far, seqs: vec![], without: vec![] })),
        },
    ] {
        let mut b = bench(LastRun::Unknown);
        b.connect();
        hear(&mut b, good.clone()).unwrap();
        b.admit(1..=3);
        let mut out = BytesMut::new();
        b.member.fill(&mut out, 600).unwrap();
        b.told.take();
        while b.heard.try_recv().is_ok() {}
        disbelieved(&mut b, lie);
        assert_eq!(b.told.take(), [""; 0]);
        assert!(b.heard.try_recv().is_err());
        // An honest backup goes on with the stream.
        b.member.disconnected();
        b.connect();
        hear(&mut b, good.clone()).unwrap();
        assert_eq!(b.sent(), [1, 2, 3]);
        hear(&mut b, acked(3)).unwrap();
        assert_eq!(b.port.acked(), (Seq(3), Seq(3)));
    }
}

/// An acknowledgement to a member without disks has ended the daemon.
#[test]
fn a_member_without_disks_has_no_stream() {
    let followed = || followed(progress(0, 7, Hlc(0), Hlc(0)));
    let follower = || {
        let mut b = bench_of(follower(Form::Vector));
        b.member.connected(&mut BytesMut::new());
        b
    };
    let mut b = follower();
    disbelieved(&mut b, attached(0, 0, CopyState::Empty));
    let mut b = follower();
    hear(&mut b, followed()).unwrap();
    hear(&mut b, acked(9)).unwrap();
    assert_eq!(b.told.take(), ["epoch 1", "C <7>", "C <9>"]);
    for lie in [attached(0, 0, CopyState::Resyncing), followed()] {
        disbelieved(&mut b, lie);
    }
    // What is said to followers is not for writers.
    let mut b = bench(LastRun::Unknown);
    b.connect();
    disbelieved(&mut b, followed());
}

#[test]
fn what_hosts_say_is_not_said_by_a_backup() {
    let mut b = bench(LastRun::Unknown);
    b.connect();
    hear(&mut b, attached(0, 0, CopyState::Whole)).unwrap();
    for lie in [
        Message::Beacon { sent_at: NOW },
        Message::Detach { end: None },
        Message::GiveUpLease,
        Message::Policy(POLICY),
        Message::Sounded { id: UNASKED, pending: CountVector::new(), hlc: Hlc(0) },
        Message::LeaseGivenUp { committed: CountVector::new() },
        Message::ZeroCheck { disk: DiskId(0), offset: FAR, len_bytes: FAR },
    ] {
        disbelieved(&mut b, lie);
    }
    let members = std::slice::from_mut(&mut b.member);
    for channel in [0, 2, u16::MAX] {
        let frame = Frame::Control(Channel(channel), Message::Unheard);
        let error = connection::hear(frame, members, NOW, 0).unwrap_err();
        assert!(error.is_of_words(), "{error}");
    }
    let error = connection::hear(Frame::Record(Channel(1), record(1)), members, NOW, 0);
    assert!(error.unwrap_err().is_of_words());
}

#[test]
fn questions_of_a_backup_that_reads_no_answers_take_bounded_memory() {
    let mut b = bench(LastRun::Unknown);
    b.connect();
    hear(&mut b, attached(0, 0, CopyState::Whole)).unwrap();
    let asked = (1..100_000).find_map(|id| hear(&mut b, Message::Sound { id }).err());
    assert!(asked.unwrap().is_of_words());
    // Each of these is answered by a question, as long as there was no lease.
    let mut b = bench(LastRun::Unknown);
    b.connect();
    hear(&mut b, attached(0, 0, CopyState::Whole)).unwrap();
    let told = (1..100_000).find_map(|_| hear(&mut b, Message::Unheard).err());
    assert!(told.unwrap().is_of_words());
}

/// An attachment beyond the stream of this run has ended the daemon, or was believed where records waited that were never
/// sent.
#[test]
fn an_attachment_does_not_acknowledge_what_was_never_sent() {
    for durable in [3, 5, 6] {
        let mut b = bench(LastRun::Unknown);
        b.connect();
        hear(&mut b, attached(0, 0, CopyState::Whole)).unwrap();
        b.admit(1..=2);
        assert_eq!(b.sent(), [1, 2]);
        b.admit(3..=5);
        b.member.disconnected();
        b.connect();
        disbelieved(&mut b, attached(durable, 0, CopyState::Whole));
        assert_eq!(b.port.acked(), (Seq(0), Seq(0)));
        b.member.disconnected();
        b.connect();
        hear(&mut b, attached(2, 2, CopyState::Whole)).unwrap();
        assert_eq!(b.sent(), [3, 4, 5]);
    }
}

/// The gate has let out packets whose record was never sent: C was believed where it named more than was durable.
#[test]
fn the_gate_is_told_no_cut_beyond_what_is_durable() {
    for lie in [
        Message::Progress(progress(2, 3, Hlc(0), Hlc(0))),
        Message::Progress(progress(2, 1 << 50, Hlc(0), Hlc(0))),
    ] {
        let mut b = bench(LastRun::Unknown);
        b.connect();
        disbelieved(&mut b, attached(2, 3, CopyState::Whole));
        b.member.disconnected();
        b.connect();
        hear(&mut b, attached(0, 0, CopyState::Whole)).unwrap();
        b.admit(1..=3);
        assert_eq!(b.sent(), [1, 2, 3]);
        b.told.take();
        disbelieved(&mut b, lie);
        assert_eq!(b.told.take(), [""; 0]);
    }
    // The entry of a writer that was removed is the greatest there is.
    let mut b = bench(LastRun::Unknown);
    b.connect();
    hear(&mut b, attached(0, 0, CopyState::Whole)).unwrap();
    let removed = progress(0, SEQ_OF_REMOVED.0, Hlc(0), Hlc(0));
    hear(&mut b, Message::Progress(removed)).unwrap();
}

/// A lease from a time to come has kept a degrade from being noticed: the backup counted as heard until then.
#[test]
fn a_lease_answers_a_beacon() {
    let mut b = bench(LastRun::Unknown);
    b.connect();
    hear(&mut b, attached(0, 0, CopyState::Whole)).unwrap();
    hear(&mut b, Message::PolicyKept(POLICY)).unwrap();
    b.told.take();
    disbelieved(&mut b, Message::Lease { sent_at: NOW });
    assert_eq!((b.told.take(), b.stats.lease_sent_at()), (vec![], None));
    let at = MonoNanos(7);
    b.member.beacon(at, &mut BytesMut::new());
    disbelieved(&mut b, Message::Lease { sent_at: MonoNanos(8) });
    hear(&mut b, Message::Lease { sent_at: at }).unwrap();
    assert_eq!(b.told.take(), ["lease 7"]);
}

/// How far the clock is ahead differs each time: it is the same refusal all the same.
#[test]
fn a_lie_that_repeats_is_the_same_for_the_log() {
    let said = |ahead_ms: u64| {
        let mut b = bench(LastRun::Unknown);
        b.connect();
        let lie = attached_but(&attached(0, 0, CopyState::Whole), |told| {
            told.stream.as_mut().unwrap().last_hlc = Hlc::new(WALL_MS + ahead_ms, 0);
        });
        let error = hear(&mut b, lie).unwrap_err();
        (error.to_string(), error.what_repeats())
    };
    let (first, second) = (said(1_000_000), said(2_000_000));
    assert_eq!(first.1, second.1);
    assert_ne!(first.0, second.0);
    assert!(first.0.contains("ahead of the clock of this host"), "{}", first.0);
}

/// Nothing local says what tags are sealed with: a gate hears it of the backup alone, also anew on the same connection.
#[test]
fn what_is_believed_of_tags_is_what_the_backup_tells() {
    let mut b = bench(LastRun::Unknown);
    b.connect();
    hear(&mut b, attached(0, 0, CopyState::Whole)).unwrap();
    assert!(!b.told.take().iter().any(|said| said.starts_with("tags")));
    let mut told = terms(CountVector::of(WRITER, Seq(9)));
    hear(&mut b, Message::TagTerms(told.clone())).unwrap();
    told.keys.period = 1;
    told.reachable = CountVector::of(WRITER, SEQ_OF_REMOVED);
    hear(&mut b, Message::TagTerms(told.clone())).unwrap();
    let [of_9, of_removed] = [Seq(9), SEQ_OF_REMOVED].map(|seq| CountVector::of(WRITER, seq));
    assert_eq!(
        b.told.take(),
        [format!("tags of period 0 up to {of_9}"), format!("tags of period 1 up to {of_removed}")]
    );
}
