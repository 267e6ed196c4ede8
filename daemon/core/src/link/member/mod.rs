//! One member's half of the conversation with the backup. Sans-I/O: messages and records in,
//! frames out.

mod from_backup;
mod from_owner;
mod judging;
mod standing;
mod to_backup;

use super::bookmarks::Bookmarks;
use super::port::{FromLink, OwnerPort};
use super::queue::{OnDisk, Queue, QueueError, Spilled};
use super::{GateControl, Refusal};
use crate::backlog::{self, BacklogError};
use crate::stats::LinkStats;
use bytes::BytesMut;
use standing::{Contact, Conversation, LeaseTalk, Recording, Refusing, Switching};
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

/// One member on the link.
pub struct Member<T> {
    /// Answers to the backup's questions.
    answers: VecDeque<Message>,
    bookmarks: Bookmarks,
    attach: Attach,
    policy: Policy,
    says_unreached: Option<bool>,
    channel: Channel,
    conversation: Conversation,
    refusing: Refusing,
    contact: Contact,
    lease_talk: LeaseTalk,
    switching: Switching,
    recording: Recording,
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
    /// The time of this run's last beacon.
    beacon_sent_at: Option<MonoNanos>,
    /// When it asks for a floor next, it asks for everyone.
    floor_for_everyone: bool,
    stall_log: from_backup::StallLog,
    /// The group's disks are elsewhere still: nothing is said to the backup.
    awaits_adoption: bool,
    /// Age of the activity log.
    log: LogAge,
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
            conversation: Conversation::Detached,
            refusing: Refusing::No,
            contact: Contact::None { wants_unrecorded: false, is_unwanted: false },
            lease_talk: LeaseTalk::PolicyUnheard,
            switching: match gives_up {
                true => Switching::GivesUp { answer: None },
                false => Switching::Not,
            },
            recording: Recording::Records,
            sender,
            on_disk,
            held_to: left.map(|left| left.last),
            port,
            to_owner,
            gate,
            keeper,
            stats,
            admitted: VecDeque::new(),
            beacon_sent_at: None,
            floor_for_everyone,
            stall_log: from_backup::StallLog::default(),
            awaits_adoption: false,
            log,
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
        if !self.expects_answers() {
            if self.conversation == Conversation::Detached {
                self.conversation = Conversation::Quiet;
            }
            return;
        }
        self.conversation = Conversation::Attaching;
        self.lease_talk.connected();
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
        if self.conversation.is_attached() {
            self.port.send((self.to_owner)(FromLink::Detached));
        }
        self.conversation = Conversation::Detached;
        self.recording.unanswered();
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

    /// A refusal has crossed with a question, so what comes next could be mistaken for an answer.
    #[must_use]
    pub fn must_connect_anew(&self) -> bool {
        matches!(self.conversation, Conversation::Refused { must_connect_anew: true })
    }

    /// Whether the backup is asked for anything: not for a member that was replaced there, or whose disks are elsewhere
    /// still.
    #[must_use]
    pub fn expects_answers(&self) -> bool {
        !matches!(self.refusing, Refusing::ForGood { .. }) && !self.awaits_adoption
    }

    /// The lease that this member asks for.
    #[must_use]
    pub fn lease_ms(&self) -> u64 {
        self.attach.lease_ms
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
        self.stats.set_attached(self.conversation.is_attached());
    }
}
