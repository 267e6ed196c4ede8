//! What the owner loop of a member and the link share.
//!
//! Acknowledgements come by the thousand and mostly need no action of the owner at once, so they
//! are two atomics that it reads in its next turn; it is woken for them only when it has said that
//! something waits for one.

use super::Refusal;
use super::queue::Spilled;
use futures_channel::oneshot;
use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::task::Waker;
use tidelock_protocol::hlc::Hlc;
use tidelock_protocol::ids::{DiskId, Epoch, GroupId, MonoNanos, RunId, Seq};
use tidelock_protocol::message::{
    Basis, Bookmark, BookmarkPoint, CleanEnd, LogAge, Message, Mode, Policy, StreamState,
};
use tidelock_protocol::record::Record;
use tidelock_protocol::vector::CountVector;

/// From the owner loop to the link.
#[derive(Debug)]
pub enum ToLink {
    /// Admitted records, in seq order.
    Records {
        /// The records.
        records: Vec<Record>,
        /// When.
        admitted_at: MonoNanos,
    },
    /// Admitted records that are on disk only, in seq order.
    Spilled {
        /// Which.
        spilled: Spilled,
        /// The last of them that is a guest's, if any is.
        last_of_guest: Option<Seq>,
        /// When.
        admitted_at: MonoNanos,
    },
    /// A message that keeps its place among the records.
    InOrder(Message),
    /// The group's mode changed.
    Mode(Mode),
    /// What the backup is to know of the group's policy changed.
    Policy(Policy),
    /// What the guest may have heard was not seen: the others are asked how far they are. `everyone`: nor
    /// is it known what they have heard of this one.
    AskFloor {
        /// They are to be told, too.
        everyone: bool,
    },
    /// A point in time is to be named.
    Bookmark(Bookmark, BookmarkDone),
    /// The backup was not reached for so long that guests are to be served without being recorded: as soon as no claim
    /// of this run is under way that the last one ended cleanly.
    ServeUnrecorded,
    /// From here on guests are served without records: the stream stands.
    Stands,
    /// The backup has all of the stream: it is to be told that the disks differ by more, so that what is recorded next
    /// counts with a comparison as a whole.
    AskToCompare,
    /// The group's disks are here: the member may be attached.
    Adopted,
    /// The gate's rules are to be removed when this daemon has stopped: the backup is to know that the guest may answer
    /// clients from here without it.
    LeaveOpen,
    /// The gate is shut for good in this epoch: the lease is given up, on this connection and on all that follow.
    GiveUpLease(Option<LeaseGivenUp>),
    /// All that this member has is at the backup, and its lease is given up as soon as all other hosts are so far. Or it
    /// goes on as before, if it is not too late for that. The answers go to the one that is given.
    ReadyToSwitch(bool, Arc<Agreement>),
    /// The activity log on stable storage is so far: records that follow may have been admitted under it.
    Logged(LogAge),
    /// Everything is committed: leave.
    Detach(Option<CleanEnd>),
}

/// Where C as the backup says it with its answer to a [`ToLink::GiveUpLease`] goes.
pub type LeaseGivenUp = oneshot::Sender<CountVector>;

/// What the backup has told the members of this host, which hand their group over together with other hosts.
#[derive(Debug, Default)]
pub struct Agreement {
    told: Mutex<Told>,
}

#[derive(Clone, Debug, Default)]
struct Told {
    is_reached: bool,
    awaited: Vec<String>,
    released: BTreeSet<String>,
}

impl Agreement {
    /// The link: a member has been told who is not ready yet.
    pub fn told(&self, member: &str, awaited: Vec<String>) {
        let mut told = self.told.lock().expect("no panic while held");
        // Whatever comes later: others have gone by it.
        told.is_reached |= awaited.is_empty();
        if awaited.iter().any(|name| name == member) {
            told.released.insert(member.to_owned());
        }
        told.awaited = awaited;
    }

    /// Whether all were ready at once: then each gives up its lease.
    #[must_use]
    pub fn is_reached(&self) -> bool {
        self.told.lock().expect("no panic while held").is_reached
    }

    /// Members that were not ready when that was heard last.
    #[must_use]
    pub fn awaited(&self) -> Vec<String> {
        self.told.lock().expect("no panic while held").awaited.clone()
    }

    /// How many members have been told that nobody counts on them any more.
    #[must_use]
    pub fn released(&self) -> usize {
        self.told.lock().expect("no panic while held").released.len()
    }
}

/// Where the answer to a [`ToLink::Bookmark`] goes. If nobody waits there any more, it is not asked for again.
pub type BookmarkDone = oneshot::Sender<Result<BookmarkPoint, String>>;

/// The backup's answer to a writer, as far as its owner loop goes by it.
#[derive(Clone, Debug)]
pub struct AttachedStream {
    /// The epoch under which records must be sent.
    pub epoch: Epoch,
    /// The last record that the backup has.
    pub durable: Seq,
    /// The state of the stream.
    pub stream: StreamState,
}

/// From the link to the owner loop.
#[derive(Debug)]
pub enum FromLink {
    /// The member is attached (again).
    Attached {
        /// The backup's answer.
        attached: AttachedStream,
        /// Whether this is the first attachment of a run that did not know where to go on: the
        /// sequencer starts now.
        first: bool,
        /// It was told that the disks differ, by [`ToLink::AskToCompare`].
        compares: bool,
    },
    /// The connection is gone.
    Detached,
    /// The answer to a digest check.
    Digest {
        /// The disk.
        disk: DiskId,
        /// Where.
        offset: u64,
        /// Whether it needs no copy.
        equal: bool,
    },
    /// What the member may have known before its stop: the record that ends its copy depends on
    /// all of it. Or only that somebody waits for one of its seqs.
    Floor {
        /// Writes of others; its own entry: a seq that somebody waits for.
        pending: CountVector,
        /// The greatest time of them.
        hlc: Hlc,
    },
    /// The backup refuses the member.
    Refused(Refusal),
    /// Whatever this run says to the backup from now on, first of all it says that its disks may differ: guests may be
    /// served without being recorded until it is attached.
    MayServeUnrecorded,
}

/// What a member's owner loop can be asked, by the link and by others.
#[derive(Debug)]
pub struct OwnerPort<T> {
    inbox: mpsc::Sender<T>,
    wake: Waker,
    durable: AtomicU64,
    committed: AtomicU64,
    wants_acks: AtomicBool,
    taken: AtomicU64,
    wants_room: AtomicBool,
    frontier: AtomicU64,
    wants_frontier: AtomicBool,
    told: Mutex<(CountVector, Hlc)>,
}

impl<T> OwnerPort<T> {
    /// A port and its receiving end. `wake` gives the owner loop a turn.
    #[must_use]
    pub fn new(wake: Waker) -> (Self, mpsc::Receiver<T>) {
        let (inbox, outbox) = mpsc::channel();
        let port = Self {
            inbox,
            wake,
            durable: AtomicU64::new(0),
            committed: AtomicU64::new(0),
            wants_acks: AtomicBool::new(false),
            taken: AtomicU64::new(0),
            wants_room: AtomicBool::new(false),
            frontier: AtomicU64::new(0),
            wants_frontier: AtomicBool::new(false),
            told: Mutex::default(),
        };
        (port, outbox)
    }

    /// Gives the owner loop a turn.
    pub fn wake(&self) {
        self.wake.wake_by_ref();
    }

    /// Sends a message and wakes the owner. A loop that has ended hears nothing.
    pub fn send(&self, message: T) {
        if self.inbox.send(message).is_ok() {
            self.wake();
        }
    }

    /// The link: what is durable and committed of this writer. The wake-up is for all that one answer of the backup says,
    /// so this comes last ([`set_told`](Self::set_told), [`set_frontier`](Self::set_frontier)).
    pub fn set_acked(&self, durable: Seq, committed: Seq) {
        self.durable.fetch_max(durable.0, Ordering::SeqCst);
        self.committed.fetch_max(committed.0, Ordering::SeqCst);
        if self.wants_acks.load(Ordering::SeqCst) {
            self.wake();
        }
    }

    /// The owner: what is durable, and what C says, of this writer.
    #[must_use]
    pub fn acked(&self) -> (Seq, Seq) {
        (Seq(self.durable.load(Ordering::SeqCst)), Seq(self.committed.load(Ordering::SeqCst)))
    }

    /// The owner: whether to be woken by acknowledgements. Read [`acked`](Self::acked) again after
    /// saying yes.
    pub fn set_wants_acks(&self, wants: bool) {
        if self.wants_acks.load(Ordering::Relaxed) != wants {
            self.wants_acks.store(wants, Ordering::SeqCst);
        }
    }

    /// The link: the greatest time of any record of the group.
    pub fn set_frontier(&self, frontier: Hlc) {
        let before = self.frontier.fetch_max(frontier.0, Ordering::SeqCst);
        if before < frontier.0 && self.wants_frontier.swap(false, Ordering::SeqCst) {
            self.wake();
        }
    }

    /// The owner: that time.
    #[must_use]
    pub fn frontier(&self) -> Hlc {
        Hlc(self.frontier.load(Ordering::SeqCst))
    }

    /// The link: C and the watermark. No wake-up of its own.
    pub fn set_told(&self, committed: &CountVector, watermark: Hlc) {
        let mut told = self.told.lock().expect("no panic while held");
        told.0.merge(committed);
        told.1 = told.1.max(watermark);
    }

    /// The owner: C and the watermark as last heard.
    #[must_use]
    pub fn told(&self) -> (CountVector, Hlc) {
        self.told.lock().expect("no panic while held").clone()
    }

    /// The owner: to be woken, once, when it rises. Read [`frontier`](Self::frontier) again after
    /// this.
    pub fn wake_at_frontier(&self) {
        self.wants_frontier.store(true, Ordering::SeqCst);
    }

    /// The link: the last seq that the connection has taken. A new connection begins with less.
    pub fn set_taken(&self, taken: Seq) {
        let before = self.taken.swap(taken.0, Ordering::SeqCst);
        if before < taken.0 && self.wants_room.swap(false, Ordering::SeqCst) {
            self.wake();
        }
    }

    /// The owner: that seq.
    #[must_use]
    pub fn taken(&self) -> Seq {
        Seq(self.taken.load(Ordering::SeqCst))
    }

    /// The owner: to be woken, once, when the connection has taken more than this.
    pub fn wake_beyond(&self, taken: Seq) {
        self.wants_room.store(true, Ordering::SeqCst);
        if self.taken() > taken {
            self.wake();
        }
    }
}

/// The epoch that was granted, kept where the next run finds it.
pub trait EpochKeeper: Send {
    /// Makes the epoch and the group's identity durable before anything is admitted under it. Fails for an epoch that the
    /// backup has ended before.
    fn keep(&mut self, epoch: Epoch, group_id: GroupId) -> std::io::Result<()>;
    /// A time that no time is above which was given out or taken over here; 0: none is known. May wait for the disk.
    fn greatest(&self) -> Hlc {
        Hlc(0)
    }
    /// The same, and that this run is in force, before anything is admitted or sent under it. `basis`: what the backup has
    /// attached it by.
    fn begin(
        &mut self,
        _run: RunId,
        epoch: Epoch,
        group_id: GroupId,
        _basis: &Basis,
    ) -> std::io::Result<()> {
        self.keep(epoch, group_id)
    }
    /// Guests are to be served before the backup was reached: the disks are not as they were at a clean end any more.
    fn keep_served(&mut self) -> std::io::Result<()> {
        Ok(())
    }
    /// The epoch has ended, in the backup's words: no later run serves guests before a later one is granted.
    fn keep_fenced(&mut self, _reason: &str) -> std::io::Result<()> {
        Ok(())
    }
    /// The backup has on stable storage whether this host serves before it has reached it.
    fn keep_serves_unreached(&mut self, _kept: bool) -> std::io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicUsize;
    use std::task::Wake;

    #[derive(Default)]
    struct Woken(AtomicUsize);

    impl Wake for Woken {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::SeqCst);
        }
    }

    #[test]
    fn an_acknowledgement_wakes_an_owner_that_waits_for_one_and_no_other() {
        let woken = Arc::new(Woken::default());
        let (port, _messages) = OwnerPort::<()>::new(woken.clone().into());
        let mut acked = 0;
        for (wants, wakes) in [(false, 0), (true, 1), (true, 1), (false, 0), (true, 1)] {
            let before = woken.0.load(Ordering::SeqCst);
            port.set_wants_acks(wants);
            acked += 1;
            port.set_acked(Seq(acked), Seq(acked));
            assert_eq!(woken.0.load(Ordering::SeqCst) - before, wakes, "{acked}");
        }
    }

    /// Wake-ups are asked for anew: an owner that reads what has come needs no other.
    #[test]
    fn an_owner_is_woken_once_when_what_it_waits_for_rises() {
        let woken = Arc::new(Woken::default());
        let (port, _messages) = OwnerPort::<()>::new(woken.clone().into());
        let wakes = |act: &dyn Fn()| {
            let before = woken.0.load(Ordering::SeqCst);
            act();
            woken.0.load(Ordering::SeqCst) - before
        };
        assert_eq!(wakes(&|| port.set_frontier(Hlc(5))), 0, "nobody waits");
        port.wake_at_frontier();
        assert_eq!(wakes(&|| port.set_frontier(Hlc(5))), 0, "no later time");
        assert_eq!(wakes(&|| port.set_frontier(Hlc(4))), 0);
        assert_eq!(wakes(&|| port.set_frontier(Hlc(6))), 1);
        assert_eq!(wakes(&|| port.set_frontier(Hlc(7))), 0, "once");
        assert_eq!(port.frontier(), Hlc(7));

        assert_eq!(wakes(&|| port.set_taken(Seq(3))), 0, "nobody waits");
        assert_eq!(wakes(&|| port.wake_beyond(Seq(3))), 0);
        assert_eq!(wakes(&|| port.set_taken(Seq(2))), 0, "a new connection begins with less");
        assert_eq!(wakes(&|| port.set_taken(Seq(3))), 1);
        assert_eq!(wakes(&|| port.set_taken(Seq(4))), 0, "once");
        assert_eq!(wakes(&|| port.wake_beyond(Seq(3))), 1, "it came before the wish");
        assert_eq!(port.taken(), Seq(4));
    }

    #[test]
    fn what_is_told_only_rises() {
        let (port, messages) = OwnerPort::new(Waker::noop().clone());
        let writer = tidelock_protocol::ids::WriterId(0);
        for (seq, hlc) in [(3, 9), (2, 12), (5, 4)] {
            port.set_told(&CountVector::of(writer, Seq(seq)), Hlc(hlc));
            port.set_acked(Seq(seq), Seq(seq - 1));
        }
        assert_eq!(port.told(), (CountVector::of(writer, Seq(5)), Hlc(12)));
        assert_eq!(port.acked(), (Seq(5), Seq(4)));
        port.send(7);
        assert_eq!(messages.try_recv(), Ok(7));
        drop(messages);
        port.send(8);
    }

    #[test]
    fn an_agreement_that_was_reached_stays_so_and_a_member_is_released_that_counts_as_not_ready() {
        let agreement = Agreement::default();
        agreement.told("db", vec!["web".into()]);
        assert!(!agreement.is_reached() && agreement.released() == 0);
        assert_eq!(agreement.awaited(), ["web"]);
        for _ in 0..2 {
            agreement.told("db", vec!["db".into(), "web".into()]);
            assert_eq!(agreement.released(), 1);
        }
        agreement.told("web", Vec::new());
        agreement.told("db", vec!["web".into()]);
        assert!(agreement.is_reached());
    }
}
