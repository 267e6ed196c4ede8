//! One member's half of the conversation with the backup. Sans-I/O: messages and records in,
//! frames out.

mod from_backup;
mod from_owner;
mod judging;
mod to_backup;

use super::bookmarks::Bookmarks;
use super::port::{Agreement, FromLink, LeaseGivenUp, OwnerPort};
use super::queue::{OnDisk, Queue, QueueError, Spilled};
use super::{GateControl, Refusal};
use crate::backlog::{self, BacklogError};
use crate::stats::LinkStats;
use bytes::BytesMut;
use std::collections::VecDeque;
use std::sync::Arc;
use tidelock_protocol::bounds::Implausible;
use tidelock_protocol::ids::{Channel, MonoNanos, Seq, WriterId};
use tidelock_protocol::message::{Attach, LogAge, Message, Policy, RefusalKind};
use tidelock_protocol::sender::SenderError;

/// Why a connection ends because of one of its members.
#[derive(Debug, thiserror::Error)]
pub enum MemberError {
    /// The backup's stream and ours do not fit together.
    #[error("member {member}: {source}")]
    Stream {
        /// The member.
        member: String,
        /// Why.
        source: SenderError,
    },
    /// What waits on disk cannot be read back.
    #[error("member {member}: {source}")]
    Backlog {
        /// The member.
        member: String,
        /// Why.
        source: BacklogError,
    },
    /// The backup says what it cannot say now.
    #[error(
        "member {member}: unexpected {what} from the backup. Nothing of it is believed, and the connection ends"
    )]
    Unexpected {
        /// The member.
        member: String,
        /// What it said.
        what: &'static str,
    },
    /// The backup says what cannot be true.
    #[error(
        "member {member}: {source}. The backup server's message is not believed, and the connection ends"
    )]
    Implausible {
        /// The member.
        member: String,
        /// Why.
        source: Implausible,
    },
    /// The granted epoch could not be stored.
    #[error("member {member}: the granted epoch could not be stored: {source}")]
    Epoch {
        /// The member.
        member: String,
        /// Why.
        source: std::io::Error,
    },
}

impl MemberError {
    /// Whether the daemon cannot go on with the member in this run. A new run resyncs.
    #[must_use]
    pub fn ends_run(&self) -> bool {
        !matches!(self, Self::Unexpected { .. } | Self::Implausible { .. })
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Detached,
    Attaching,
    Attached,
    Refused,
}

/// One member on the link.
pub struct Member<T> {
    /// Answers to the backup's questions.
    answers: VecDeque<Message>,
    bookmarks: Bookmarks,
    attach: Attach,
    policy: Policy,
    says_unreached: Option<bool>,
    channel: Channel,
    phase: Phase,
    /// `None` until the backup has told a run that did not know where to go on.
    sender: Option<Queue>,
    on_disk: Option<Arc<OnDisk>>,
    /// The gate is held until C has this: what an earlier process of the run has admitted.
    held_to: Option<Seq>,
    port: Arc<OwnerPort<T>>,
    to_owner: fn(FromLink) -> T,
    gate: Arc<dyn GateControl>,
    keeper: Box<dyn super::port::EpochKeeper>,
    stats: Arc<LinkStats>,
    /// Guests' writes whose commit latency is being measured: the last seq of each batch.
    admitted: VecDeque<(Seq, MonoNanos)>,
    refusal_is_final: bool,
    /// Why it is, in the backup's words.
    shut_because: String,
    /// The last refusal, until the member is attached.
    last_refusal: Option<Refusal>,
    /// How often in a row, and how many beacons pass before it asks again.
    refusals: u32,
    beacons_to_pass: u32,
    /// By the backup, in this run.
    was_attached: bool,
    /// The owner asks for [`FromLink::MayServeUnrecorded`].
    wants_unrecorded: bool,
    /// The backup was reached in this run, and does not want this member as it is.
    is_unwanted: bool,
    /// A lease was had in this run.
    is_heard_from: bool,
    /// Attached since the last beacon.
    wants_lease: bool,
    /// The time of this run's last beacon.
    beacon_sent_at: Option<MonoNanos>,
    /// The backup has told this run what it keeps of the policy: no lease is asked for before.
    policy_is_kept: bool,
    /// When it asks for a floor next, it asks for everyone.
    floor_for_everyone: bool,
    /// The backup has said that it takes no records for now. Sending on would only fill its
    /// buffers, and the beacons that keep the gate open for reads would queue behind.
    is_stalled: bool,
    stall_log: from_backup::StallLog,
    /// The gate is shut for good in this epoch: no lease is asked for, it is given up.
    gives_up: bool,
    /// Who wants to hear that it is.
    given_up: Option<LeaseGivenUp>,
    /// It is about to be given up, together with the leases of other hosts.
    is_ready: bool,
    /// Who wants to hear of the others.
    agreement: Option<Arc<Agreement>>,
    /// The group's disks are elsewhere still: nothing is said to the backup.
    awaits_adoption: bool,
    /// A connection is up.
    is_connected: bool,
    /// Age of the activity log.
    log: LogAge,
    /// Guests are served without records.
    stands: bool,
    /// The owner asks for a comparison.
    wants_compare: bool,
    /// The attachment that is under way asks the backup for it.
    says_differs: bool,
    must_connect_anew: bool,
    /// What is recorded after the guests were served without comes from here on.
    compared_from: Seq,
}

/// What a member is made of.
pub struct MemberParts<T> {
    /// The attachment as at the start of this run. Writes wait for the backup's answer, unless guests are served without it.
    pub attach: Attach,
    /// Age of the activity log.
    pub log: LogAge,
    /// What its group does without the backup.
    pub policy: Policy,
    /// What the backup is to know of whether a run serves that has not reached it; `None`: nothing, as before.
    pub says_unreached: Option<bool>,
    /// Its number on this connection.
    pub channel: Channel,
    /// Its owner loop.
    pub port: Arc<OwnerPort<T>>,
    /// Makes an owner's message.
    pub to_owner: fn(FromLink) -> T,
    /// Its gate.
    pub gate: Arc<dyn GateControl>,
    /// A run before has given up the lease of this epoch, and the gate is shut.
    pub gives_up: bool,
    /// The backup has told a run before that the epoch is over, in these words: nothing is asked of it.
    pub fenced: Option<String>,
    /// Where the epoch is kept.
    pub keeper: Box<dyn super::port::EpochKeeper>,
    /// What status and metrics read.
    pub stats: Arc<LinkStats>,
    /// Where records are that memory has no room for.
    pub on_disk: Option<OnDisk>,
    /// What an earlier process of this run has left there, after which the stream goes on. The gate is held for a resync,
    /// until C has all of it.
    pub left: Option<Spilled>,
}

impl<T> Member<T> {
    /// A member that is not attached yet.
    #[must_use]
    pub fn new(parts: MemberParts<T>) -> Self {
        let MemberParts {
            attach,
            log,
            policy,
            says_unreached,
            channel,
            port,
            to_owner,
            gate,
            gives_up,
            fenced,
            keeper,
            stats,
            on_disk,
            left,
        } = parts;
        let on_disk = on_disk.map(Arc::new);
        // What it asks from its start on it may owe to a run before that was in mode async.
        let floor_for_everyone = gate.awaits_floor().is_some();
        let sender = left.map(|left| {
            let on_disk = on_disk.clone().expect("there is something on disk");
            Queue::left(left, on_disk)
        });
        let mut member = Self {
            answers: VecDeque::new(),
            bookmarks: Bookmarks::default(),
            attach,
            policy,
            says_unreached,
            channel,
            phase: Phase::Detached,
            sender,
            on_disk,
            held_to: left.map(|left| left.last),
            port,
            to_owner,
            gate,
            keeper,
            stats,
            admitted: VecDeque::new(),
            refusal_is_final: false,
            shut_because: String::new(),
            last_refusal: None,
            refusals: 0,
            beacons_to_pass: 0,
            was_attached: false,
            wants_unrecorded: false,
            is_unwanted: false,
            is_heard_from: false,
            wants_lease: false,
            beacon_sent_at: None,
            policy_is_kept: false,
            floor_for_everyone,
            is_stalled: false,
            stall_log: from_backup::StallLog::default(),
            gives_up,
            given_up: None,
            is_ready: false,
            agreement: None,
            awaits_adoption: false,
            is_connected: false,
            log,
            stands: false,
            wants_compare: false,
            says_differs: false,
            must_connect_anew: false,
            compared_from: Seq::ZERO,
        };
        if let Some(reason) = fenced {
            member.shut_for_good(&reason);
            member.tell_refusal(Refusal { kind: RefusalKind::Fenced, reason });
        }
        member.publish_stats();
        member
    }

    /// The group's disks are elsewhere still: the member is not attached before [`ToLink::Adopted`](super::port::ToLink::Adopted).
    pub fn await_adoption(&mut self) {
        self.awaits_adoption = true;
    }

    /// Whether it is not to be attached yet.
    #[must_use]
    pub fn awaits_adoption(&self) -> bool {
        self.awaits_adoption
    }

    /// A connection is up: asks to be attached, unless the backup has refused for good.
    pub fn connected(&mut self, out: &mut BytesMut) {
        self.is_connected = true;
        if !self.expects_answers() {
            return;
        }
        self.phase = Phase::Attaching;
        // Before its first lease a run is told who may be in mode async (`Unheard`): in answer to its policy.
        self.policy_is_kept &= self.is_heard_from;
        self.answers.clear();
        self.ask_to_be_attached(out);
    }

    /// True if its group may have several members.
    fn is_of_several(&self) -> bool {
        self.attach.tagging.is_some()
    }

    /// Its index among the writers; `None`: it has no disks, and there is no stream.
    fn writer(&self) -> Option<WriterId> {
        self.attach.writing().map(|writing| writing.writer)
    }

    /// The connection is gone.
    pub fn disconnected(&mut self) {
        if let Some(sender) = &mut self.sender {
            sender.detached();
        }
        if self.phase == Phase::Attached {
            self.port.send((self.to_owner)(FromLink::Detached));
        }
        self.phase = Phase::Detached;
        (self.says_differs, self.must_connect_anew) = (false, false);
        self.is_connected = false;
        self.is_stalled = false;
        self.stats.set_stalled(None);
        self.publish_stats();
        self.let_serve_unrecorded();
    }

    /// The stream cannot go on, nor can a later run go on with what is on disk.
    fn broken(&self, error: QueueError) -> MemberError {
        let member = self.attach.member.clone();
        if let Some(on_disk) = &self.on_disk
            && let Err(error) = backlog::mark(&*on_disk.files, false)
        {
            tracing::error!(member, %error, "remove the segments by hand before the next start");
        }
        match error {
            QueueError::Stream(source) => MemberError::Stream { member, source },
            QueueError::Backlog(source) => MemberError::Backlog { member, source },
        }
    }

    /// A refusal has crossed with a question. What answers the question could be taken for the answer to the next one: on
    /// another connection it cannot.
    #[must_use]
    pub fn must_connect_anew(&self) -> bool {
        self.must_connect_anew
    }

    /// Whether the backup is asked for anything: not for a member that was replaced there, or whose disks are elsewhere
    /// still.
    #[must_use]
    pub fn expects_answers(&self) -> bool {
        !self.refusal_is_final && !self.awaits_adoption
    }

    /// The lease that this member asks for.
    #[must_use]
    pub fn lease_ms(&self) -> u64 {
        self.attach.lease_ms
    }

    /// Its number on the connection.
    #[must_use]
    pub fn channel(&self) -> Channel {
        self.channel
    }

    /// The backup receives bytes of this connection, and has nothing whole to answer yet.
    pub fn bytes_arrive(&self) {
        self.stats.bytes_arrive();
    }

    /// Refuses on behalf of the connection (no common version, wrong certificate...).
    pub fn connection_refused(&mut self, kind: RefusalKind, reason: &str) {
        self.stats.set_refusal(Some(format!("{reason} ({kind:?})")));
    }

    fn publish_stats(&self) {
        let oldest = self.admitted.front().map(|(_, at)| *at);
        if let Some(sender) = &self.sender {
            let writes = sender.admitted().0 - sender.durable().0;
            self.stats.set_lag(writes, sender.backlog_bytes(), oldest);
        }
        self.stats.set_attached(self.phase == Phase::Attached);
    }
}
