//! Control messages of the link, in postcard's encoding.
//!
//! A connection opens with [`Message::Hello`] from the host and [`Message::Welcome`] from the
//! backup (TLS tells a client only after its own connect that its certificate was refused, so
//! nothing is believed before the hello). Then each member is attached on a channel of its own:
//! [`Message::Attach`], answered by [`Message::Attached`] or [`Message::Refused`]. Records follow,
//! answered by [`Message::Progress`]. `docs/protocol.md` has the steps and the failure table.
//!
//! Fields are only ever added behind a new protocol version; [`PROTOCOL`] says which this build
//! speaks.

use crate::hlc::Hlc;
use crate::ids::{DiskId, Epoch, GroupId, Incarnation, MonoNanos, Nonce, RunId, Seq, WriterId};
use crate::machine::Machine;
use crate::part::PartialRecord;
use crate::tag::TagTerms;
use crate::vector::CountVector;
use serde::{Deserialize, Serialize};

/// The versions of the protocol that this build speaks, oldest and newest.
pub const PROTOCOL: (u16, u16) = (1, 1);

/// What [`Message::Sounded`] answers if nobody has asked. Questions are numbered from 1.
pub const UNASKED: u64 = 0;

/// How packets inside a group say what they depend on, and so how the backup finds its cut.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Form {
    /// By count vectors: exact. Records carry the entries that changed.
    #[default]
    Vector,
    /// By the hybrid logical clock: eight bytes for any number of writers.
    Hlc,
}

impl std::fmt::Display for Form {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Form::Vector => "vector",
            Form::Hlc => "hlc",
        })
    }
}

/// How a group treats writes and packets.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Mode {
    /// A guest's write completes when the backup has it, too.
    Sync,
    /// A guest's write completes locally; packets wait for the backup. The default.
    Pipelined,
    /// A guest's write completes locally and nothing waits: a disaster may undo what clients know.
    Async,
}

impl std::fmt::Display for Mode {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Mode::Sync => "sync",
            Mode::Pipelined => "pipelined",
            Mode::Async => "async",
        })
    }
}

impl std::str::FromStr for Mode {
    type Err = String;

    fn from_str(s: &str) -> Result<Self, String> {
        match s {
            "sync" => Ok(Mode::Sync),
            "pipelined" => Ok(Mode::Pipelined),
            "async" => Ok(Mode::Async),
            _ => Err(format!("unknown mode \"{s}\": use sync, pipelined or async")),
        }
    }
}

/// What a member's host does when the backup cannot be reached, and what it does now.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Policy {
    /// The mode in force: [`Mode::Async`] while it is degraded.
    pub mode: Mode,
    /// The gate opens when something has waited so long for the backup, in milliseconds; `None`: it
    /// holds.
    pub after_ms: Option<u64>,
    /// The gate was opened then, by the host's wall clock in milliseconds since the Unix epoch, and
    /// C does not cover all that has left since.
    pub degraded_since_unix_ms: Option<u64>,
}

impl Policy {
    /// In this mode, whatever happens.
    #[must_use]
    pub fn holding(mode: Mode) -> Self {
        Self { mode, after_ms: None, degraded_since_unix_ms: None }
    }
}

/// A protected disk, as the backup needs to know it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DiskSpec {
    /// Its number within its writer.
    pub id: DiskId,
    /// Its name within its member.
    pub name: String,
    /// Its size. 0: the disk was removed from the group; its number and its name are not given again.
    pub size_bytes: u64,
}

impl DiskSpec {
    /// In the place of a disk that was removed.
    #[must_use]
    pub fn removed(id: DiskId, name: String) -> Self {
        Self { id, name, size_bytes: 0 }
    }

    /// Whether it was removed.
    #[must_use]
    pub fn is_removed(&self) -> bool {
        self.size_bytes == 0
    }
}

/// How far an activity log is: transactions are ordered by the file that holds them, then by number.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
pub struct LogAge {
    /// Id of the file: the number of the run that made it.
    pub file: u64,
    /// Number of the last transaction on stable storage.
    pub number: u64,
}

/// End of the run that [`Writing::before`] names, as the host has it on record. The backup
/// believes it only where it fits its own record ([`Basis`]).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum LastRun {
    /// It has not ended, or this process goes on with what it left on disk: every record after what
    /// the backup has is here.
    Continues {
        /// The first seq that the host can still send.
        from: Seq,
    },
    /// It ended cleanly, with everything up to `seq` committed and the disks as [`Writing::marks`] says.
    Clean {
        /// Its last seq.
        seq: Seq,
        /// Guests were served since, before the backup was reached. Where they wrote is in the activity log.
        served: bool,
    },
    /// The host has no record of a run before, or one that says nothing of the disks: they may differ
    /// everywhere.
    Unknown,
    /// It was killed. Where the disks may differ is in the activity log.
    Unclean {
        /// The log, as this process found it.
        log: LogAge,
    },
}

/// A clean end, as the host tells it with [`Message::Detach`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CleanEnd {
    /// The last seq: the backup has everything up to here, and equal disks.
    pub seq: Seq,
    /// The identity of each disk when it was closed: its name, a blank, then inode, size and times of
    /// an image, what there is of a device. Compared as a whole, and shown to people.
    pub marks: Vec<String>,
}

impl CleanEnd {
    /// First disk whose mark in `now` differs from its mark in `then`, as text for people. A disk that only one of the
    /// lists names is no difference: the backup has no data of a new disk, and a disk that is gone is not compared.
    #[must_use]
    pub fn difference(then: &[String], now: &[String]) -> Option<String> {
        let name = |mark: &str| mark.split(' ').next().unwrap_or_default().to_owned();
        now.iter().find_map(|now| {
            let then = then.iter().find(|then| name(then) == name(now))?;
            (then != now).then(|| {
                format!(
                    "a disk is not as it was when the daemon stopped: it was restored, replaced or written \
                     meanwhile (then: {then}; now: {now})"
                )
            })
        })
    }
}

/// The backup's verdict on the host's account of the last run. It determines which parts of the disks are compared
/// ([`StreamState::basis`]).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Basis {
    /// The stream goes on after the last durable record.
    Continues,
    /// The last run ended cleanly and nothing has changed since.
    Clean,
    /// The host's activity log is valid: the regions that it names are compared.
    Log,
    /// The host's account is not believed: whole disks are compared.
    Everything {
        /// Why, for people.
        why: String,
    },
}

/// The attachment of one member.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Attach {
    /// The group.
    pub group: String,
    /// The identity of the group that this host was told last; `None`: it was told none yet.
    pub group_id: Option<GroupId>,
    /// The member.
    pub member: String,
    /// All writers of the group, by index: the backup refuses a host that counts differently.
    pub writers: Vec<String>,
    /// The epoch that this host was granted; 0 to ask for the first one.
    pub epoch: Epoch,
    /// The lease that it will ask for: it must be shorter than the grace at the backup.
    pub lease_ms: u64,
    /// Time that the backup waits after the last renewal.
    pub grace_ms: u64,
    /// Machine to boot after a disaster.
    pub machine: Option<Machine>,
    /// `None`: the only member of its group, whose packets are not tagged.
    pub tagging: Option<Tagging>,
    /// The member's part in the group.
    pub role: Role,
}

impl Attach {
    /// A writer's disks and run; `None`: a follower has none.
    #[must_use]
    pub fn writing(&self) -> Option<&Writing> {
        match &self.role {
            Role::Writer(writing) => Some(writing),
            Role::Follower => None,
        }
    }

    /// The same as [`Attach::writing`], mutable.
    pub fn writing_mut(&mut self) -> Option<&mut Writing> {
        match &mut self.role {
            Role::Writer(writing) => Some(writing),
            Role::Follower => None,
        }
    }
}

/// The tags of a group that may have several members, as its hosts must agree on them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Tagging {
    /// The form in which this host tags packets.
    pub form: Form,
    /// All members and their addresses, one line each (`NAME=ADDRESS,ADDRESS`), as this host's
    /// configuration has them: a host that does not know a member would not merge its tags. Before
    /// them, if it is so: `boundary=member`, `tag.option=NUMBER` (not the usual one),
    /// `tag.strip_path=true`, `tagging=off-for-a-demonstration`.
    pub peers: Vec<String>,
}

/// A member's part in its group.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Role {
    /// It has protected disks, and so a stream of records.
    Writer(Writing),
    /// It has no protected disks and no stream. Its packets wait for C like any other member's.
    Follower,
}

/// A writer's disks, and the run that writes to them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Writing {
    /// The member's writer index, as the group's configuration has it.
    pub writer: WriterId,
    /// Its disks.
    pub disks: Vec<DiskSpec>,
    /// Number of the run that this attachment begins or continues.
    pub incarnation: Incarnation,
    /// Drawn at random for that run.
    pub nonce: Nonce,
    /// The run that the host has on record as the last one in force.
    pub before: Option<RunId>,
    /// The identity of each disk, as in [`CleanEnd`], when this process opened it.
    pub marks: Vec<String>,
    /// The end of the last run, as far as the host knows it.
    pub last_run: LastRun,
    /// The mode in force.
    pub mode: Mode,
}

impl Writing {
    /// The run that this attachment begins or continues.
    #[must_use]
    pub fn run(&self) -> RunId {
        RunId { number: self.incarnation, nonce: self.nonce }
    }
}

/// How much of a member's disks the backup has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum CopyState {
    /// Nothing yet: every disk reads as zeroes.
    Empty,
    /// An initial copy has begun and not ended: nothing can be recovered.
    Partial,
    /// Whole up to the committed seq.
    Whole,
    /// Whole at `committed`, which stands still until the resync that has begun after it ends.
    Resyncing,
    /// The disks were here before any host came, and are no host's until one has compared them. To hosts it is said as
    /// `Partial`, which asks for the same.
    Seeded,
}

impl CopyState {
    /// As hosts are told.
    #[must_use]
    pub fn told(self) -> Self {
        match self {
            Self::Seeded => Self::Partial,
            other => other,
        }
    }
}

/// The backup's answer to [`Attach`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Attached {
    /// The identity of the group.
    pub group_id: GroupId,
    /// The epoch in force, under which records must be sent.
    pub epoch: Epoch,
    /// The group's progress. A writer sends what follows its durable seq.
    pub progress: Progress,
    /// The state of a writer's stream; `None`: a follower has none.
    pub stream: Option<StreamState>,
}

/// The backup's record of a writer's stream and copy, by which the attached run goes on.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StreamState {
    /// The greatest HLC that the group's records carry: the host's clock continues after it.
    pub last_hlc: Hlc,
    /// How much of the disks the backup has, and so what the host must do: `Empty` asks for an
    /// initial copy, `Partial` and `Resyncing` for a comparison by digests, `Whole` for nothing.
    pub copy: CopyState,
    /// The part of the next record that has arrived on an earlier connection of this run: sending
    /// goes on inside it.
    pub begun: Option<PartialRecord>,
    /// The backup's verdict on the host's account of the last run.
    pub basis: Basis,
}

/// How far a group is at the backup. Each part only ever grows.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Progress {
    /// The attached writer's durable seq: its host may forget records up to it. 0 for a follower.
    pub durable: Seq,
    /// C: the cut that a recovery would take now, or one below it. A writer that was removed has
    /// the greatest seq there is: nothing waits for it any more.
    pub committed: CountVector,
    /// The group's watermark: every record up to this time is in the cut. 0 in the vector form.
    pub watermark: Hlc,
    /// The greatest time of any record that is not idle, or that a member waits for. A writer
    /// whose last record is older holds the watermark back.
    pub frontier: Hlc,
}

/// A name for a point in time, asked for at the primary.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Bookmark {
    /// Which request: one of its own for each of this host. Asked again with the same, it is set once.
    pub id: u64,
    /// The name.
    pub name: String,
    /// It goes after this time, in milliseconds.
    pub expires_in_ms: Option<u64>,
    /// A bookmark that has the name is moved.
    pub moves: bool,
}

/// Where a bookmark was set.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BookmarkPoint {
    /// The time of the point.
    pub hlc: Hlc,
    /// The last seq of each writer in it, by name.
    pub seqs: Vec<(String, u64)>,
    /// Writers whose hosts were not connected: what they may have written meanwhile is not in it.
    pub without: Vec<String>,
}

/// Why the backup refuses. Stable: tools may match on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum RefusalKind {
    /// No common protocol version.
    Version,
    /// The certificate's host may not do this.
    Forbidden,
    /// The group was recovered: this primary's epoch has ended, and its gate stays shut.
    Fenced,
    /// A newer run of the same host's daemon has taken the member over.
    Superseded,
    /// The group's shape (writers, disks, sizes) is not what the backup knows.
    Mismatch,
    /// The request is malformed or out of bounds.
    Invalid,
    /// The journal of the group is damaged.
    Damaged,
    /// The backup is stopping.
    Stopping,
    /// A number that cannot be true: a time ahead of the clocks, a count beyond what can exist.
    Implausible,
    /// The backup has no room for more of this host: connections, groups, descriptions.
    Quota,
}

/// A control message.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Message {
    /// Host: the first message of a connection.
    Hello {
        /// Oldest protocol version spoken.
        oldest: u16,
        /// Newest protocol version spoken.
        newest: u16,
        /// The host's name.
        host: String,
        /// Software and version, for the log.
        software: String,
    },
    /// Backup: the answer.
    Welcome {
        /// The version that both will speak.
        protocol: u16,
        /// The server's name.
        server: String,
        /// Software and version, for the log.
        software: String,
    },
    /// Host: attaches a member on this channel.
    Attach(Box<Attach>),
    /// Backup: attached.
    Attached(Attached),
    /// Backup: not attached, or no longer. On channel 0 it ends the connection.
    Refused {
        /// Why, for programs.
        kind: RefusalKind,
        /// Why, and what to do, for people.
        reason: String,
    },
    /// Backup: how far the group is, since [`Message::Attached`]. Cumulative; never over a gap.
    Progress(Progress),
    /// Host: the run that this attachment has begun is on stable storage there. First of all after
    /// [`Message::Attached`]: the backup goes by the run before until it has heard this.
    Begun,
    /// Host: the activity log is so far. Before any record that was admitted under it, so that a log that
    /// is older than this is known to have been restored.
    Logged(LogAge),
    /// Host: the member ends; everything it admitted has been committed.
    Detach {
        /// The disks are equal. The next run is compared with this.
        end: Option<CleanEnd>,
    },
    /// Host: asks for the lease to be renewed (PacificA 2.3: a beacon).
    Beacon {
        /// The host's clock when it was sent; comes back as it is.
        sent_at: MonoNanos,
    },
    /// Backup: the lease runs from when the beacon was *sent*.
    Lease {
        /// The beacon's.
        sent_at: MonoNanos,
    },
    /// Host: the gate of this member is shut, and stays so in this epoch, also after a restart. It asks for no lease
    /// any more. In the place of each beacon from then on.
    GiveUpLease,
    /// Backup: it knows. As long as the server runs, and the member does not attach again.
    LeaseGivenUp {
        /// The group's C.
        committed: CountVector,
    },
    /// Host: all that this member has is at the backup, it takes nothing new, and it is about to give up its lease as
    /// soon as all the others are. Forgotten when the member attaches.
    ReadyToSwitch {
        /// It is; or it is not any more: it goes on as before if it is not too late for that.
        ready: bool,
    },
    /// Backup: who else has to be ready. To each member that is, whenever that changes, and in answer.
    SwitchAwaits {
        /// Members; the one itself, if it may go on as before. Empty: all are or were ready at once, so each gives up its
        /// lease, also one that wanted to go on by then.
        members: Vec<String>,
    },
    /// Host: as soon as the member is attached, and at every change.
    Policy(Policy),
    /// Backup: what it has on stable storage of a member's policy. A run of the daemon asks
    /// for no lease before it has heard this.
    PolicyKept(Policy),
    /// Host: whether a start of its daemon that does not reach the backup serves guests, and lets out their packets
    /// without a lease. After [`Message::Policy`].
    ServesUnreached {
        /// It does.
        serves: bool,
    },
    /// Backup: what it has on stable storage of that. A host that has not heard this answers no clients in
    /// a later run before that has reached the backup.
    ServesUnreachedKept {
        /// It does.
        serves: bool,
    },
    /// Backup: another member is in mode async, or may be: what the guest of this one has heard while
    /// its daemon was away may not have been tagged. Right before
    /// [`Message::PolicyKept`].
    Unheard,
    /// Host: the group's mode has changed.
    ModeChanged {
        /// The mode now in force.
        mode: Mode,
    },
    /// Backup: it has stopped acknowledging (`Some`: why) or goes on (`None`).
    Stalled {
        /// For people.
        reason: Option<String>,
    },
    /// Backup, on channel 0: bytes of a frame have arrived that is not whole yet. A slow link is not a dead one.
    Arriving,
    /// Host: the digest of an extent as it is after exactly the records sent so far. The backup
    /// compares it at that very point of the stream, so equal means equal for good.
    DigestCheck {
        /// The disk.
        disk: DiskId,
        /// Offset of the extent, in bytes.
        offset: u64,
        /// Length of the extent.
        len_bytes: u32,
        /// BLAKE3 of the extent.
        digest: [u8; 32],
    },
    /// Host: this extent, of any length, reads as zeroes after exactly the records sent so far. The
    /// backup looks at that very point of the stream whether it knows the same without reading, and
    /// answers as to a [`Message::DigestCheck`].
    ZeroCheck {
        /// The disk.
        disk: DiskId,
        /// Offset of the extent, in bytes.
        offset: u64,
        /// Length of the extent.
        len_bytes: u64,
    },
    /// Backup: the outcome of a [`Message::DigestCheck`] or [`Message::ZeroCheck`], in the order in which they were asked.
    DigestResult {
        /// The disk.
        disk: DiskId,
        /// Offset of the extent, in bytes.
        offset: u64,
        /// True if the extent needs no copy.
        equal: bool,
    },
    /// Backup: what tags are sealed with, and which of their entries are believed. To each member of a group that may have
    /// several, right after it is attached, and with each answer to a beacon.
    TagTerms(TagTerms),
    /// Backup: say now what this member depends on and has admitted. Another writer resyncs, and
    /// what it knew before its stop is at most that.
    Sound {
        /// Grows; comes back as it is.
        id: u64,
    },
    /// Host: P of the member at a moment after the question arrived, its own entry as far as any
    /// record was admitted. Unasked with each beacon while C does not cover P: the member may wait
    /// for what nobody is going to send.
    Sounded {
        /// The question's, or [`UNASKED`].
        id: u64,
        /// P.
        pending: CountVector,
        /// The same in the HLC form: no record that the member knows of has a greater time.
        hlc: Hlc,
    },
    /// Backup: what this resyncing writer may have known before its stop. Its copy is not done
    /// before a record that depends on all of it. With the writer's own entry alone, at any other
    /// time: somebody waits for that seq.
    Floor {
        /// What the others have said. The writer's own entry: it gives out seqs until there, also
        /// if it has nothing to write.
        pending: CountVector,
        /// The same in the HLC form.
        hlc: Hlc,
    },
    /// Host: it was not seen what the guest of this member may have heard. What is the most that it
    /// can be?
    AskFloor {
        /// Comes back as it is; not 0.
        mark: u64,
        /// The others cannot know either what they have heard of this one: they are to be told,
        /// too.
        everyone: bool,
    },
    /// Backup: all that any writer had admitted at a moment after the question.
    FloorIs {
        /// The question's; 0: somebody else has asked for everyone.
        mark: u64,
        /// As P.
        pending: CountVector,
        /// The same in the HLC form.
        hlc: Hlc,
    },
    /// Host: name a point in time that has all that any writer of the group had written when this arrived, as soon as
    /// it is in the cut.
    Bookmark(Box<Bookmark>),
    /// Backup: the answer to a [`Message::Bookmark`].
    Bookmarked {
        /// The request's.
        id: u64,
        /// Where it is; or why it was not set, for people.
        outcome: Result<Box<BookmarkPoint>, String>,
    },
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_documented_numbers_are_those_of_the_encoding() {
        let document = include_str!("../../docs/protocol.md");
        let documented = document.lines().filter_map(|line| {
            let mut cells = line.split(" | ");
            let number: u8 = cells.next()?.strip_prefix("| ")?.parse().ok()?;
            let name = cells.nth(1)?.strip_prefix('`')?.strip_suffix('`')?;
            Some((number, name.to_owned()))
        });
        // Every message can be decoded from zeroes.
        let encoded = (0..u8::MAX).map_while(|number| {
            let mut bytes = [0; 256];
            bytes[0] = number;
            let (message, _) = postcard::take_from_bytes::<Message>(&bytes).ok()?;
            let text = format!("{message:?}");
            Some((number, text.split([' ', '(']).next()?.to_owned()))
        });
        assert_eq!(documented.collect::<Vec<_>>(), encoded.collect::<Vec<_>>());
    }
}
