//! The surroundings of a simulated group's loop ([`GroupLoop`]) at the backup: a disk in memory, and lists of what the
//! world is to do about it.

use crate::lying::is_of_liar;
use std::collections::{BTreeSet, VecDeque};
use std::io;
use std::sync::Arc;
use tidelock_protocol::frame::Frame;
use tidelock_protocol::ids::{Epoch, Seq, WriterId};
use tidelock_protocol::message::Message;
use tidelock_protocol::vector::CountVector;
use tidelock_replica::connection::outbox::Outbox;
use tidelock_replica::group::{ConnectionId, Group, GroupOptions, Link, Now, Output};
use tidelock_replica::group_loop::{Answer, Driver, GroupLoop, Job, Wait};
use tidelock_replica::manifest::Manifest;
use tidelock_storage::Storage;
use tidelock_storage::memory::{Faults, Memory, MemoryFile};
use tidelock_store::journal::{self, SyncJob, TornTail};

/// An operator who has ordered something, by number.
pub(crate) type Asker = u64;

/// An event that the checkers have to hear of, in order.
#[derive(Debug)]
pub(crate) enum Seen {
    /// The group was opened, with these records and, perhaps, a torn end.
    Opened { journaled: CountVector, is_torn: bool },
    /// It does not work.
    Broke(String),
    /// An order waits.
    Waits(Asker, Wait),
    /// An order has its answer.
    Answered(Asker, Answer),
    /// It was told this.
    Told(Link, Message),
    /// A connection is gone.
    Left(ConnectionId),
}

/// The driver.
pub(crate) struct SlotDriver {
    storage: Memory,
    /// For a group that is created: its writers have written up to here before it began.
    past: Seq,
    is_new: bool,
    /// Operators who have gone away.
    pub(crate) gone: BTreeSet<Asker>,
    options: GroupOptions,
    now: Now,
    /// The frame that the group is given: a record's writer, seq and epoch, and the epoch in force.
    arriving: Option<(WriterId, Seq, Epoch, Epoch)>,
    /// Or a message that checkers have to hear of.
    saying: Option<(Link, Message)>,
    /// The checker's own count of what has arrived without a gap.
    pub(crate) contiguous: CountVector,
    pub(crate) outputs: Vec<Output>,
    pub(crate) seen: VecDeque<Seen>,
    pub(crate) jobs: VecDeque<(u64, Job<Memory>)>,
    /// A sync that was begun.
    pub(crate) sync: Option<(u64, SyncJob<MemoryFile>)>,
}

/// A group's loop with its driver, while the server runs.
pub(crate) struct GroupRun {
    pub(crate) state: GroupLoop<SlotDriver>,
    pub(crate) driver: SlotDriver,
}

impl std::fmt::Debug for GroupRun {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "opening {}", self.state.generation())
    }
}

impl GroupRun {
    /// The loop of a server that starts.
    pub(crate) fn new(name: &str, storage: Memory, options: GroupOptions, past: Seq) -> Self {
        let driver = SlotDriver {
            storage,
            past,
            is_new: false,
            gone: BTreeSet::new(),
            options: options.clone(),
            now: Now::default(),
            arriving: None,
            saying: None,
            contiguous: CountVector::new(),
            outputs: Vec::new(),
            seen: VecDeque::new(),
            jobs: VecDeque::new(),
            sync: None,
        };
        Self { state: GroupLoop::new(name, options), driver }
    }

    /// Lets the loop do something at a time.
    pub(crate) fn at<R>(
        &mut self,
        now: Now,
        what: impl FnOnce(&mut GroupLoop<SlotDriver>, &mut SlotDriver) -> R,
    ) -> R {
        self.driver.now = now;
        what(&mut self.state, &mut self.driver)
    }
}

impl SlotDriver {
    /// Gives the writers of a group that was just created their past. Nothing of this happens in the field, so nothing
    /// goes wrong with it.
    fn give_past(&self, group: &mut Group<Memory>) {
        let mut state = group.state().clone();
        for writer in &mut state.writers {
            (writer.seq, writer.committed) = (self.past, self.past);
        }
        let faults = self.storage.faults();
        self.storage.set_faults(Faults::default());
        for segment in self.storage.list("journal").expect("in memory") {
            self.storage.remove(&format!("journal/{segment}")).expect("in memory");
        }
        let (storage, options) = (self.storage.clone(), self.options.clone());
        let journal = journal::Journal::create(storage, "journal", state, options.journal);
        drop(journal.expect("in memory"));
        let opened = Group::open(self.storage.clone(), self.now, options).expect("in memory");
        *group = opened.expect("just made").0;
        self.storage.set_faults(faults);
    }
}

impl Driver for SlotDriver {
    type Storage = Memory;
    type Done = ();
    type Asker = Asker;

    fn storage(&self) -> Memory {
        self.storage.clone()
    }

    fn exists(&self) -> bool {
        !matches!(Manifest::read(&self.storage), Ok(None))
    }

    fn make_directory(&mut self) -> io::Result<()> {
        self.is_new = true;
        Ok(())
    }

    fn remove_directory(&mut self) {
        self.is_new = false;
    }

    fn opened(&mut self, group: &mut Group<Memory>, torn: Option<TornTail>) {
        if std::mem::take(&mut self.is_new) && self.past != Seq::ZERO {
            self.give_past(group);
        }
        self.contiguous = group.state().journaled();
        let journaled = self.contiguous.clone();
        self.seen.push_back(Seen::Opened { journaled, is_torn: torn.is_some() });
    }

    fn broke(&mut self, reason: &str) {
        self.seen.push_back(Seen::Broke(reason.to_owned()));
    }

    fn tend(&mut self, _: &mut Group<Memory>, _: Now) {}

    fn send(&mut self, _: &Arc<Outbox>, output: Output) {
        self.outputs.push(output);
    }

    fn answer(&mut self, (): (), _: io::Result<()>) {}

    fn sync(&mut self, generation: u64, job: SyncJob<MemoryFile>) {
        self.sync = Some((generation, job));
    }

    fn is_gone(&self, asker: &Asker) -> bool {
        self.gone.contains(asker)
    }

    fn waits(&mut self, asker: &Asker, wait: Wait) {
        self.seen.push_back(Seen::Waits(*asker, wait));
    }

    fn answer_order(&mut self, asker: Asker, answer: Answer) {
        self.seen.push_back(Seen::Answered(asker, answer));
    }

    fn begin(&mut self, generation: u64, job: Job<Memory>) {
        self.jobs.push_back((generation, job));
    }

    fn observe_frame(&mut self, link: Link, frame: &Frame, group: &Group<Memory>) {
        (self.arriving, self.saying) = (None, None);
        if is_of_liar(link) {
            return;
        }
        // A part of a record that arrives is none.
        self.arriving = match frame {
            Frame::Record(_, record) => {
                Some((record.writer, record.seq, record.epoch, group.epoch()))
            }
            Frame::Part(..) | Frame::Control(..) => None,
        };
        self.saying = match frame {
            Frame::Control(
                _,
                message @ (Message::Policy(_) | Message::Detach { .. } | Message::GiveUpLease),
            ) => Some((link, message.clone())),
            _ => None,
        };
    }

    fn observe_taken(&mut self, is_taken: bool) {
        if let Some((link, message)) = self.saying.take().filter(|_| is_taken) {
            self.seen.push_back(Seen::Told(link, message));
        }
        if let Some((writer, seq, epoch, granted)) = self.arriving.take().filter(|_| is_taken)
            && epoch == granted
            && seq == self.contiguous.get(writer).next()
        {
            self.contiguous.raise(writer, seq);
        }
    }

    fn observe_lost(&mut self, connection: ConnectionId) {
        self.seen.push_back(Seen::Left(connection));
    }
}
