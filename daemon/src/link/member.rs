//! One member's half of the conversation with the backup. Sans-I/O: messages and records in,
//! frames out.

use super::bookmarks::Bookmarks;
use super::port::{Agreement, FromLink, LeaseGivenUp, OwnerPort, ToLink};
use super::queue::{OnDisk, Queue, QueueError, Spilled};
use super::{GateControl, Refusal};
use crate::backlog::{self, BacklogError};
use crate::stats::LinkStats;
use bytes::BytesMut;
use std::collections::VecDeque;
use std::sync::Arc;
use tidelock_protocol::frame;
use tidelock_protocol::ids::{Channel, Incarnation, MonoNanos, Seq};
use tidelock_protocol::message::{
    Attach, Attached, CopyState, Follow, Followed, Form, Join, LastRun, Message, Mode,
    PROTOCOL_OF_BOOKMARKS, PROTOCOL_OF_FLUSHES, PROTOCOL_OF_GROUPS, PROTOCOL_OF_JOINT_SWITCHES,
    PROTOCOL_OF_POLICIES, PROTOCOL_OF_RUNS, PROTOCOL_OF_SWITCHES, PROTOCOL_OF_UNREACHED, Policy,
    Progress, RefusalKind, UNASKED,
};
use tidelock_protocol::record::{Effect, Record};
use tidelock_protocol::sender::{SenderError, Transmit};

/// Why the daemon cannot go on with a member in this run. A new run resyncs.
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
    #[error("member {member}: unexpected {what} from the backup")]
    Unexpected {
        /// The member.
        member: String,
        /// What it said.
        what: &'static str,
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

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Detached,
    Attaching,
    Attached,
    Refused,
}

/// How a member is on the link.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Presence {
    /// The only member of its group: version 1 of the protocol says all there is to say.
    Alone,
    /// A writer among several members.
    Writer {
        /// How packets are tagged.
        form: Form,
        /// All members and their addresses.
        peers: Vec<String>,
    },
    /// A member without disks: there is no stream.
    Follower {
        /// How packets are tagged.
        form: Form,
        /// All members and their addresses.
        peers: Vec<String>,
    },
}

/// One member on the link.
pub struct Member<T> {
    presence: Presence,
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
    /// The backup has told this run what it keeps of the policy: no lease is asked for before.
    policy_is_kept: bool,
    /// When it asks for a floor next, it asks for everyone.
    floor_for_everyone: bool,
    /// The backup has said that it takes no records for now. Sending on would only fill its
    /// buffers, and the beacons that keep the gate open for reads would queue behind.
    is_stalled: bool,
    /// The gate is shut for good in this epoch: no lease is asked for, it is given up.
    gives_up: bool,
    /// Who wants to hear that it is.
    given_up: Option<LeaseGivenUp>,
    /// It is about to be given up, together with the leases of other hosts.
    is_ready: bool,
    /// Who wants to hear of the others.
    agreement: Option<Arc<Agreement>>,
    /// The version of the protocol that this connection speaks.
    protocol: u16,
    /// The group's disks are elsewhere still: nothing is said to the backup.
    awaits_adoption: bool,
    /// A connection is up.
    is_connected: bool,
    /// The run that the backup knew before this attachment.
    last_attached: Option<Incarnation>,
    /// Guests are served without records.
    stands: bool,
    /// The owner asks for a comparison.
    wants_compare: bool,
    /// The attachment that is under way asks the backup for it.
    says_differs: bool,
    /// What is recorded after the guests were served without comes from here on.
    compared_from: Seq,
}

/// What a member is made of.
pub struct MemberParts<T> {
    /// How it is there.
    pub presence: Presence,
    /// The attachment as at the start of this run. `LastRun::Clean` lets writes be admitted at
    /// once, after that seq; `Unknown` lets them wait for the backup.
    pub attach: Attach,
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
            presence,
            attach,
            policy,
            says_unreached,
            channel,
            port,
            to_owner,
            gate,
            gives_up,
            keeper,
            stats,
            on_disk,
            left,
        } = parts;
        let on_disk = on_disk.map(Arc::new);
        // What it asks from its start on it may owe to a run before that was in mode async.
        let floor_for_everyone = gate.awaits_floor().is_some();
        let sender = match (&presence, attach.last_run) {
            (Presence::Follower { .. }, _) => None,
            _ if left.is_some() => {
                let on_disk = on_disk.clone().expect("there is something on disk");
                left.map(|left| Queue::left(left, on_disk))
            }
            (_, LastRun::Clean { seq }) => Some(Queue::new(seq, on_disk.clone())),
            _ => None,
        };
        let member = Self {
            presence,
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
            was_attached: false,
            wants_unrecorded: false,
            is_unwanted: false,
            is_heard_from: false,
            wants_lease: false,
            policy_is_kept: false,
            floor_for_everyone,
            is_stalled: false,
            gives_up,
            given_up: None,
            is_ready: false,
            agreement: None,
            protocol: 0,
            awaits_adoption: false,
            is_connected: false,
            last_attached: None,
            stands: false,
            wants_compare: false,
            says_differs: false,
            compared_from: Seq::ZERO,
        };
        member.publish_stats();
        member
    }

    /// The group's disks are elsewhere still: the member is not attached before [`ToLink::Adopted`].
    pub fn await_adoption(&mut self) {
        self.awaits_adoption = true;
    }

    /// Whether it is not to be attached yet.
    #[must_use]
    pub fn awaits_adoption(&self) -> bool {
        self.awaits_adoption
    }

    fn adopted(&mut self, out: &mut BytesMut) {
        if std::mem::take(&mut self.awaits_adoption) && self.is_connected {
            self.connected(self.protocol, out);
        }
    }

    /// From the owner loop.
    pub fn hear_owner(&mut self, message: ToLink, out: &mut BytesMut) {
        match message {
            ToLink::Records { records, admitted_at } => {
                let sender = self.sender.as_mut().expect("admitted after the start");
                let is_guests = |r: &&Record| !r.copy && r.effect != Effect::Idle;
                if let Some(last) = records.iter().rev().find(is_guests) {
                    self.admitted.push_back((last.seq, admitted_at));
                }
                for record in records {
                    sender.push(record);
                }
                self.publish_stats();
            }
            ToLink::Spilled { spilled, last_of_guest, admitted_at } => {
                let sender = self.sender.as_mut().expect("admitted after the start");
                self.admitted.extend(last_of_guest.map(|seq| (seq, admitted_at)));
                sender.spill(spilled);
                self.publish_stats();
            }
            ToLink::InOrder(message) => {
                if let Some(sender) = &mut self.sender {
                    sender.push_in_order(message);
                }
            }
            ToLink::Mode(mode) => {
                self.attach.mode = mode;
                self.control(Message::ModeChanged { mode }, out);
            }
            ToLink::Policy(policy) => {
                self.policy = policy;
                if self.speaks_of_policies() {
                    self.control(Message::Policy(policy), out);
                }
            }
            ToLink::Bookmark(wanted, done) => {
                let message = self.bookmarks.begin(wanted, done);
                match self.cannot_bookmark() {
                    Some(reason) => self.bookmarks.give_up(reason),
                    // If it is not attached, it asks when it is.
                    None => self.control(message, out),
                }
            }
            ToLink::ReadyToSwitch(ready, agreement) => {
                self.is_ready = ready;
                self.agreement = Some(agreement);
                // If it is not attached, it says so when it is; nobody counts on one that is not.
                if self.protocol >= PROTOCOL_OF_JOINT_SWITCHES {
                    self.control(Message::ReadyToSwitch { ready }, out);
                }
            }
            ToLink::GiveUpLease(given_up) => {
                self.gives_up = true;
                self.is_ready = false;
                self.agreement = None;
                self.given_up = given_up;
                // If it is not attached, it says so when it is.
                self.give_up_lease(out);
            }
            ToLink::Adopted => self.adopted(out),
            ToLink::Detach => self.control(Message::Detach, out),
            ToLink::ServeUnrecorded => {
                self.wants_unrecorded = true;
                self.let_serve_unrecorded();
            }
            ToLink::Stands => self.stands = true,
            // It is asked with what is sent next.
            ToLink::AskToCompare => self.wants_compare = true,
            ToLink::AskFloor { everyone } => {
                self.floor_for_everyone |= everyone;
                // If it is not attached, it asks when it is.
                if self.phase == Phase::Attached {
                    self.ask_floor();
                }
            }
        }
    }

    /// While an answer to "the last run ended cleanly" may come, nothing may be written that makes it untrue. The
    /// connection ends when nothing comes, and then it was not said.
    fn let_serve_unrecorded(&mut self) {
        let may_be_attached = match self.phase {
            Phase::Attached => true,
            Phase::Attaching => self.sender.is_some(),
            Phase::Detached | Phase::Refused => false,
        };
        if !self.wants_unrecorded || self.was_attached || self.is_unwanted || may_be_attached {
            return;
        }
        self.wants_unrecorded = false;
        self.sender = None;
        self.attach.last_run = LastRun::Unknown;
        self.port.send((self.to_owner)(FromLink::MayServeUnrecorded));
    }

    fn give_up_lease(&self, out: &mut BytesMut) {
        // A backup that speaks an older version waits out the grace: nothing is asked of it.
        if self.protocol >= PROTOCOL_OF_SWITCHES {
            self.control(Message::GiveUpLease, out);
        }
    }

    fn say_switch(&mut self) {
        if self.gives_up && self.protocol >= PROTOCOL_OF_SWITCHES {
            self.answers.push_back(Message::GiveUpLease);
        }
        if self.is_ready && self.protocol >= PROTOCOL_OF_JOINT_SWITCHES {
            self.answers.push_back(Message::ReadyToSwitch { ready: true });
        }
    }

    fn control(&self, message: Message, out: &mut BytesMut) {
        if self.phase == Phase::Attached {
            frame::encode_control(self.channel, &message, out);
        }
    }

    /// A connection is up, which speaks this version of the protocol: asks to be attached, unless
    /// the backup has refused for good.
    pub fn connected(&mut self, protocol: u16, out: &mut BytesMut) {
        self.protocol = protocol;
        self.is_connected = true;
        self.stats.set_protocol(protocol);
        if self.refusal_is_final || self.awaits_adoption {
            return;
        }
        self.phase = Phase::Attaching;
        // Before its first lease a run is told who may be in mode async (`Unheard`): in answer to its policy.
        self.policy_is_kept &= self.is_heard_from;
        self.answers.clear();
        self.ask_to_be_attached(out);
    }

    fn ask_to_be_attached(&mut self, out: &mut BytesMut) {
        self.last_attached = None;
        self.says_differs = self.wants_compare;
        let mut attach = self.attach.clone();
        let says_runs = self.protocol >= PROTOCOL_OF_RUNS;
        attach.last_run = match (&self.sender, attach.last_run) {
            (Some(_), _) if self.wants_compare && says_runs => LastRun::Unclean,
            (Some(_), _) if self.wants_compare => LastRun::Unknown,
            // Nothing was sent since the clean stop, and what was admitted since is here: say
            // so, the backup can check it.
            (Some(_), LastRun::Clean { .. }) if !self.was_attached => attach.last_run,
            (Some(sender), _) => sender.last_run(),
            (None, LastRun::Unknown) if says_runs => LastRun::Unclean,
            (None, last_run) => last_run,
        };
        let message = match self.presence.clone() {
            Presence::Alone => Message::Attach(Box::new(attach)),
            Presence::Writer { form, peers } => {
                Message::Join(Box::new(Join { attach, form, peers }))
            }
            Presence::Follower { form, peers } => Message::Follow(Box::new(Follow {
                group: attach.group,
                member: attach.member,
                writers: attach.writers,
                form,
                peers,
                epoch: attach.epoch,
                lease_ms: attach.lease_ms,
                grace_ms: attach.grace_ms,
                machine: attach.machine,
            })),
        };
        frame::encode_control(self.channel, &message, out);
    }

    /// A backup that speaks an older version cannot be told, and the group holds.
    fn speaks_of_policies(&self) -> bool {
        self.protocol >= PROTOCOL_OF_POLICIES
    }

    fn say_policy(&mut self) {
        if self.speaks_of_policies() {
            self.answers.push_back(Message::Policy(self.policy));
        }
        if let Some(serves) = self.says_unreached.filter(|_| self.protocol >= PROTOCOL_OF_UNREACHED)
        {
            self.answers.push_back(Message::ServesUnreached { serves });
        }
    }

    /// Why no bookmark can be set; `None`: it can, or it is not known.
    fn cannot_bookmark(&self) -> Option<&'static str> {
        let is_older = self.phase == Phase::Attached && self.protocol < PROTOCOL_OF_BOOKMARKS;
        if self.refusal_is_final {
            Some("this primary was replaced: the group was recovered at the backup")
        } else if is_older {
            Some(
                "the backup server is too old for bookmarks of hosts: upgrade it, or set the bookmark there",
            )
        } else {
            None
        }
    }

    fn ask_for_bookmarks(&mut self) {
        match self.cannot_bookmark() {
            Some(reason) => self.bookmarks.give_up(reason),
            None => self.answers.extend(self.bookmarks.again()),
        }
    }

    fn may_ask_for_lease(&self) -> bool {
        self.policy_is_kept || !self.speaks_of_policies()
    }

    /// Whether it can only be served by a backup that knows of groups with several members.
    #[must_use]
    pub fn needs_groups(&self) -> bool {
        self.presence != Presence::Alone
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
        self.says_differs = false;
        self.is_connected = false;
        self.is_stalled = false;
        self.stats.set_stalled(None);
        self.publish_stats();
        self.let_serve_unrecorded();
    }

    /// A message of the backup for this member.
    pub fn receive(&mut self, message: Message, now: MonoNanos) -> Result<(), MemberError> {
        match (message, self.phase) {
            (Message::Attached(attached), Phase::Attaching) => self.attached(attached),
            (Message::LastAttached { incarnation }, Phase::Attaching) => {
                self.last_attached = Some(incarnation);
                Ok(())
            }
            // Asked anew on the same connection, to compare.
            (Message::Attached(attached), Phase::Attached) if self.says_differs => {
                self.attached(attached)
            }
            (Message::LastAttached { incarnation }, Phase::Attached) if self.says_differs => {
                self.last_attached = Some(incarnation);
                Ok(())
            }
            (Message::Committed { durable, committed }, Phase::Attached) => {
                self.committed(durable, &committed, now)
            }
            (Message::Followed(followed), Phase::Attaching) if self.is_follower() => {
                self.followed(&followed)
            }
            (Message::Progress(progress), Phase::Attached) => self.progress(&progress, now),
            (Message::Sound { id }, Phase::Attached) => {
                self.sounded(id);
                Ok(())
            }
            (Message::Floor { pending, hlc }, Phase::Attached) => {
                self.port.send((self.to_owner)(FromLink::Floor { pending, hlc }));
                Ok(())
            }
            (Message::FloorIs { mark, pending, hlc }, Phase::Attached) => {
                // Of an older question: then it is asked again.
                if self.gate.awaits_floor() == Some(mark) {
                    self.floor_for_everyone = false;
                }
                self.gate.floor(mark, &pending, hlc);
                Ok(())
            }
            (Message::Lease { sent_at }, Phase::Attached) => {
                self.is_heard_from = true;
                self.gate.lease_renewed(sent_at);
                self.stats.lease_renewed(sent_at);
                Ok(())
            }
            (Message::DigestResult { disk, offset, equal }, Phase::Attached) => {
                self.port.send((self.to_owner)(FromLink::Digest { disk, offset, equal }));
                Ok(())
            }
            (Message::PolicyKept(kept), Phase::Attached) => {
                // Also if it is not what was said: then it has no room, and the group holds.
                self.policy_is_kept = true;
                self.stats.set_policy_kept(kept.after_ms == self.policy.after_ms);
                Ok(())
            }
            (Message::ServesUnreachedKept { serves }, Phase::Attached) => {
                if let Err(error) = self.keeper.keep_serves_unreached(serves) {
                    let member = &self.attach.member;
                    tracing::error!(
                        member, %error,
                        "that the backup knows who serves without it cannot be put on record"
                    );
                }
                Ok(())
            }
            (Message::Unheard, Phase::Attached) => {
                // Who has been here all the time was told what there is to be told.
                if !self.is_heard_from {
                    self.gate.mark_incomplete();
                    self.ask_floor();
                }
                Ok(())
            }
            (Message::Bookmarked { id, outcome }, Phase::Attached) => {
                self.bookmarks.answered(id, outcome.map(|point| *point));
                Ok(())
            }
            (Message::LeaseGivenUp { committed }, Phase::Attached) if self.gives_up => {
                if let Some(given_up) = self.given_up.take() {
                    // Nobody may wait for it any more.
                    let _ = given_up.send(committed);
                }
                Ok(())
            }
            (Message::SwitchAwaits { members }, Phase::Attached) => {
                // Nobody may ask any more.
                if let Some(agreement) = &self.agreement {
                    agreement.told(&self.attach.member, members);
                }
                Ok(())
            }
            (Message::Stalled { reason }, Phase::Attached) => {
                match &reason {
                    Some(reason) => tracing::warn!(
                        member = self.attach.member,
                        reason,
                        "the backup has stopped acknowledging"
                    ),
                    None => {
                        tracing::info!(member = self.attach.member, "the backup goes on");
                    }
                }
                self.is_stalled = reason.is_some();
                self.stats.set_stalled(reason);
                Ok(())
            }
            (Message::Refused { kind, reason }, Phase::Attaching | Phase::Attached) => {
                self.refused(Refusal { kind, reason });
                Ok(())
            }
            (_, Phase::Refused) => Ok(()),
            _ => Err(self.unexpected("message")),
        }
    }

    fn ask_floor(&mut self) {
        if let Some(mark) = self.gate.awaits_floor() {
            let everyone = self.floor_for_everyone;
            self.answers.push_back(Message::AskFloor { mark, everyone });
        }
    }

    fn is_follower(&self) -> bool {
        matches!(self.presence, Presence::Follower { .. })
    }

    fn followed(&mut self, followed: &Followed) -> Result<(), MemberError> {
        let member = || self.attach.member.clone();
        self.keeper
            .keep(followed.epoch)
            .map_err(|source| MemberError::Epoch { member: member(), source })?;
        self.attach.epoch = followed.epoch;
        self.phase = Phase::Attached;
        self.wants_lease = true;
        self.stats.set_stalled(None);
        self.publish_stats();
        self.heard_progress(&followed.progress);
        self.say_policy();
        self.ask_floor();
        self.ask_for_bookmarks();
        self.say_switch();
        Ok(())
    }

    fn progress(&mut self, progress: &Progress, now: MonoNanos) -> Result<(), MemberError> {
        self.heard_progress(progress);
        if self.is_follower() {
            return Ok(());
        }
        self.committed(progress.durable, &progress.committed, now)
    }

    fn heard_progress(&self, progress: &Progress) {
        self.gate.committed(&progress.committed);
        self.gate.watermark(progress.watermark);
        self.stats.set_watermark(progress.watermark, progress.frontier);
        self.port.set_frontier(progress.frontier);
        self.port.set_told(&progress.committed, progress.watermark);
    }

    /// Another writer resyncs: what may it have known of this one? What was published was handed
    /// to a guest, what was admitted may have been.
    fn sounded(&mut self, id: u64) {
        let (mut pending, hlc) = self.gate.pending();
        if let Some(sender) = &self.sender {
            let admitted = sender.admitted();
            // What has no record is there with what is recorded next: C reaches that when all is compared.
            let reaches = if self.stands { admitted.next() } else { admitted };
            pending.raise(self.attach.writer, reaches.max(self.compared_from));
        }
        self.answers.push_back(Message::Sounded { id, pending, hlc });
    }

    fn attached(&mut self, attached: Attached) -> Result<(), MemberError> {
        let member = || self.attach.member.clone();
        let compares = std::mem::take(&mut self.says_differs);
        if compares && attached.copy == CopyState::Whole {
            return Err(self.unexpected("whole copy"));
        }
        self.keeper
            .keep(attached.epoch)
            .map_err(|source| MemberError::Epoch { member: member(), source })?;
        self.attach.epoch = attached.epoch;
        // Before the first lease: nothing leaves that may depend on what the backup lacks.
        let must_compare = attached.copy == CopyState::Resyncing
            || (self.needs_groups() && attached.copy.told() == CopyState::Partial);
        if must_compare {
            self.gate.hold_for_resync(true);
            // The end of the comparison lets it go.
            self.held_to = None;
            if self.needs_groups() {
                // During a resync C stands still, and what the guest tells others waits by its tag.
                // In the middle of an initial copy C goes on. And P of the old run may be lost.
                self.gate.mark_incomplete();
            }
        }
        let first = self.sender.is_none();
        let on_disk = &self.on_disk;
        let sender =
            self.sender.get_or_insert_with(|| Queue::new(attached.durable, on_disk.clone()));
        if compares {
            (self.stands, self.wants_compare) = (false, false);
            self.compared_from = sender.admitted().next();
        }
        if let Err(error) = sender.attached(attached.durable) {
            return Err(self.broken(error));
        }
        self.phase = Phase::Attached;
        self.was_attached = true;
        self.is_unwanted = false;
        self.wants_lease = true;
        // A group that was opened anew since it stalled does not say that it goes on; one that
        // is still stalled says so right after this.
        self.is_stalled = false;
        self.stats.set_stalled(None);
        self.stats.set_takes_idle(self.protocol >= PROTOCOL_OF_GROUPS);
        self.gate.committed(&attached.committed);
        self.let_gate_go(attached.committed.get(self.attach.writer));
        self.port.set_acked(attached.durable, attached.committed.get(self.attach.writer));
        let last_attached = self.last_attached.take();
        let message = FromLink::Attached { attached, first, last_attached, compares };
        self.port.send((self.to_owner)(message));
        self.publish_stats();
        self.say_policy();
        self.ask_floor();
        self.ask_for_bookmarks();
        self.say_switch();
        Ok(())
    }

    fn committed(
        &mut self,
        durable: Seq,
        committed: &tidelock_protocol::vector::CountVector,
        now: MonoNanos,
    ) -> Result<(), MemberError> {
        let sender = self.sender.as_mut().expect("attached");
        if let Err(error) = sender.committed(durable) {
            return Err(self.broken(error.into()));
        }
        // The gate first: clients wait for it.
        self.gate.committed(committed);
        self.let_gate_go(committed.get(self.attach.writer));
        self.port.set_acked(durable, committed.get(self.attach.writer));
        while let Some((_, at)) = self.admitted.front().filter(|(seq, _)| *seq <= durable) {
            self.stats.commit_latency(now.since_ns(*at));
            self.admitted.pop_front();
        }
        self.publish_stats();
        Ok(())
    }

    fn refused(&mut self, refusal: Refusal) {
        tracing::error!(
            member = self.attach.member,
            kind = ?refusal.kind,
            reason = refusal.reason,
            "the backup refuses this member"
        );
        self.is_unwanted |= refusal.kind != RefusalKind::Stopping;
        if refusal.is_final() {
            self.gate.fence();
            self.refusal_is_final = true;
            self.ask_for_bookmarks();
        }
        if refusal.kind == RefusalKind::Fenced
            && let Err(error) = self.keeper.keep_fenced()
        {
            let member = &self.attach.member;
            tracing::error!(member, %error, "that this primary was replaced cannot be put on record");
        }
        if let Some(sender) = &mut self.sender {
            sender.detached();
        }
        self.says_differs = false;
        self.phase = Phase::Refused;
        self.port.send((self.to_owner)(FromLink::Refused(refusal)));
    }

    fn let_gate_go(&mut self, committed: Seq) {
        if self.held_to.take_if(|held_to| committed >= *held_to).is_some() {
            self.gate.hold_for_resync(false);
        }
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

    fn unexpected(&self, what: &'static str) -> MemberError {
        MemberError::Unexpected { member: self.attach.member.clone(), what }
    }

    /// Appends frames until `out` holds `limit_bytes` or nothing is left. Returns whether anything
    /// was appended.
    pub fn fill(&mut self, out: &mut BytesMut, limit_bytes: usize) -> Result<bool, MemberError> {
        let before = out.len();
        if self.phase == Phase::Attached && self.wants_compare && !self.says_differs {
            self.ask_to_be_attached(out);
        }
        if self.phase == Phase::Attached {
            while let Some(answer) = self.answers.pop_front() {
                frame::encode_control(self.channel, &answer, out);
            }
        }
        if let Some(sender) = &mut self.sender {
            while out.len() < limit_bytes && !self.is_stalled {
                let next = match sender.poll_transmit() {
                    Ok(next) => next,
                    Err(error) => return Err(self.broken(error.into())),
                };
                match next {
                    Some(Transmit::Record(mut record)) => {
                        record.flushed &= self.protocol >= PROTOCOL_OF_FLUSHES;
                        out.reserve(frame::HEADER_BYTES + record.encoded_len());
                        frame::encode_record_head(self.channel, &record, out);
                        if let Some(payload) = record.payload() {
                            out.extend_from_slice(payload.data());
                        }
                    }
                    Some(Transmit::InOrder(message)) => {
                        frame::encode_control(self.channel, &message, out);
                    }
                    None => break,
                }
            }
            self.port.set_unsent(sender.unsent());
        }
        Ok(out.len() > before)
    }

    /// Asks for the lease to be renewed; a member that was refused for now asks to be attached.
    pub fn beacon(&mut self, now: MonoNanos, out: &mut BytesMut) {
        if self.phase == Phase::Refused {
            self.connected(self.protocol, out);
        } else if self.gives_up {
            // It may be a new server, which has to hear of it.
            self.give_up_lease(out);
        } else if self.may_ask_for_lease() {
            self.wants_lease = false;
            self.say_what_is_awaited(out);
            self.control(Message::Beacon { sent_at: now }, out);
        }
    }

    /// Packets of this member may wait for records that were lost with a run of their writer, or
    /// for a time that nobody has a reason to reach. Only the backup can see that. Mostly they are
    /// on their way, and nothing comes of it.
    fn say_what_is_awaited(&self, out: &mut BytesMut) {
        let form = match &self.presence {
            Presence::Alone => return,
            Presence::Writer { form, .. } | Presence::Follower { form, .. } => form,
        };
        let (pending, hlc) = self.gate.pending();
        let (committed, watermark) = self.port.told();
        let is_covered = match form {
            Form::Vector => committed.covers(&pending),
            Form::Hlc => watermark >= hlc,
        };
        if !is_covered {
            self.control(Message::Sounded { id: UNASKED, pending, hlc }, out);
        }
    }

    /// Whether a beacon is due at once: replies are held since before the attachment, and a quarter
    /// of a lease is long for the clients that wait for them.
    #[must_use]
    pub fn wants_lease(&self) -> bool {
        self.wants_lease && !self.gives_up && self.may_ask_for_lease()
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

    /// The mode to announce at the next attachment.
    #[must_use]
    pub fn mode(&self) -> Mode {
        self.attach.mode
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
