//! Tags in the packets between the members of a group: the kernel programs, and what loads them.
//!
//! The programs (`netfilter/bpf/`) run on the host's side of a member's interface ([`Hooks`]), and
//! outlive the process. What they share with it are kernel maps that both have in memory:
//!
//! | map | of | written by | outlives the daemon |
//! |---|---|---|---|
//! | P ([`PendingCells`]) | a member | the sequencer, the programs, the gate | pinned: found again at the next start |
//! | C ([`CommittedCells`]) | a group | the gate | with the old programs, until new ones take over |
//! | neighbours: the P of each member on this host, by address | a group | the loader | the same |
//! | crossing ([`CrossingCells`]) | a member | the programs count, the gate follows | the same |
//!
//! A packet that may leave gets a random value into its mark, and rules in front of the queue let it through and clear it. Whether a packet to the outside is covered is judged by a program that is
//! reached only through a map of this process: once it has ended, nothing is covered.
//!
//! Needs Linux 5.17, for `bpf_loop`.

mod hook;
mod layout;
mod mapped;
mod pins;

pub use layout::{
    ACK_OPTIONS, AckOption, CommittedCells, Config, CrossingCells, ENTRIES, PendingCells,
    TaggingStats,
};
pub use mapped::{Cells, Mapped};

/// The MTU of an interface in the calling thread's network namespace.
pub fn interface_mtu(interface: &str) -> Result<u32, TaggingError> {
    mapped::interface_mtu(interface).map_err(|_| TaggingError::NoInterface(interface.to_owned()))
}

/// The index of an interface there, if it is there. One that goes away and comes back has another.
#[must_use]
pub fn interface_index(interface: &str) -> Option<u32> {
    u32::try_from(mapped::interface_index(interface).ok()?).ok()
}

/// The name of the interface that has this index there, if there is one.
#[must_use]
pub fn interface_name(index: u32) -> Option<String> {
    mapped::interface_name(index)
}

use hook::Hook;
use libbpf_rs::{
    MapCore, MapFlags, MapHandle, MapType, Object, ObjectBuilder, PrintLevel, Program,
};
use std::hash::{BuildHasher, RandomState};
use std::net::IpAddr;
use std::os::fd::{AsFd, AsRawFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, Once, PoisonError};
use tidelock_protocol::tag::{Codec, Form, IPV6_OPTION, IPV6_WRITERS_MAX};

/// As `build.rs` compiled it.
static PROGRAMS: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/tag.bpf.o"));

/// What the pin of P is called, for vectors and for HLC. The number goes up with every change of its layout.
const PENDING: [&str; 2] = ["pending4", "pending4-hlc"];
/// As in `tag.h`.
const ADDRESSES_MAX: u32 = 4096;
const INTERFACES_MAX: u32 = 4096;
/// A map that is shared has the name that it was made with.
const INTERFACES: &str = "tl_interfaces";
/// Value of a peer's address in the programs' maps: that member is on another host.
pub const WAY_ELSEWHERE: u32 = 1;
/// Value of a peer's address in the programs' maps: that member may be on this host.
pub const WAY_HERE: u32 = 2;

/// What can go wrong. The gate says what follows from it.
#[derive(Debug, thiserror::Error)]
pub enum TaggingError {
    /// The process may not do this.
    #[error(
        "not allowed to load kernel programs: run tidelockd as root or with CAP_BPF, CAP_NET_ADMIN and CAP_PERFMON"
    )]
    NotAllowed,
    /// The kernel does not take the programs.
    #[error(
        "the kernel does not take the tagging programs; they need Linux 5.17 with CONFIG_BPF_SYSCALL, \
         CONFIG_BPF_JIT, CONFIG_NET_CLS_BPF and CONFIG_NET_CLS_ACT ({doing}: {said})"
    )]
    Kernel {
        /// What was tried.
        doing: &'static str,
        /// What the loader said.
        said: String,
    },
    /// There is no such interface.
    #[error(
        "there is no network interface \"{0}\" in the network namespace of tidelockd; the taps of a group \
         of several members must be there before it starts: make one that outlasts its VM with \
         `ip tuntap add dev {0} mode tap user USER`, where USER is whom QEMU runs as, and set it up \
         with `ip link set {0} up`"
    )]
    NoInterface(String),
    /// The file system for pinned maps.
    #[error(
        "cannot keep P at {path}: mount the file system for kernel maps with `mount -t bpf bpf {USUAL}`, or \
         configure a directory of one",
        path = path.display(), USUAL = "/sys/fs/bpf"
    )]
    Pin {
        /// The place.
        path: PathBuf,
        /// The system's reason.
        #[source]
        source: std::io::Error,
    },
    /// More writers than a tag has room for.
    #[error(
        "vector tags have room for {most} writers{why}, and the group has {writers}: use HLC tags"
    )]
    TooManyWriters {
        /// How many there are.
        writers: u16,
        /// How many there may be.
        most: u16,
        /// On what way.
        why: &'static str,
    },
}

/// What a group's programs are told when they are loaded.
#[derive(Clone, Debug)]
pub struct Settings {
    /// How its tags are written.
    pub codec: Codec,
    /// The number of the IPv4 option.
    pub ipv4_option: u8,
    /// The bits of a packet's mark that the programs write, for the first rules that it meets.
    pub mark_mask: u32,
    /// The longest packet, in bytes from its network header on, that every way between members takes.
    pub path_mtu: u32,
    /// Something between the members takes options away: nothing is tagged.
    pub path_strips_options: bool,
    /// How far a member's time may be ahead of this host's clock and of the watermark.
    pub hlc_ahead_max_ms: u64,
    /// The member's interface is a port of a bridge.
    pub is_bridged: bool,
    /// Packets between members pass untagged, and nothing is merged. Breaks what Tidelock
    /// promises; to show that a test notices.
    pub off_for_a_demonstration: bool,
    /// What runs the programs.
    pub hooks: Hooks,
}

impl Settings {
    /// Configuration of a member's programs. `run`: as in [`PendingCells::run`]. `pass_mark`: in the mark
    /// of packets that may leave.
    #[must_use]
    pub fn config(&self, run: u64, pass_mark: u32) -> Config {
        let writers = match self.codec.form() {
            Form::Vector { writers } => writers.into(),
            Form::Hlc => 0,
        };
        Config {
            hlc_ahead_max_ms: self.hlc_ahead_max_ms,
            run,
            pass_mark,
            mark_mask: self.mark_mask,
            path_mtu: self.path_mtu,
            writers,
            is_hlc: u32::from(self.codec.form() == Form::Hlc),
            path_strips_options: u32::from(self.path_strips_options),
            is_bridged: u32::from(self.is_bridged),
            off: u32::from(self.off_for_a_demonstration),
            context: self.codec.context(),
            ipv4_option: self.ipv4_option,
            ipv6_option: IPV6_OPTION,
            filling: [0; 5],
        }
    }
}

/// What a group's members on a host share: C, and where to find each other's P.
pub struct GroupTags {
    map: MapHandle,
    neighbours: MapHandle,
    interfaces: MapHandle,
    /// The number that the kernel has given that map: while programs of another run are here it is theirs alone.
    run: u64,
    committed: Arc<Mapped<CommittedCells>>,
}

impl GroupTags {
    /// C before anything is known: shut, and no tag is written or believed.
    pub fn new() -> Result<Self, TaggingError> {
        hear_libbpf();
        let map = array("tl_committed", size_of::<CommittedCells>())?;
        let committed = Arc::new(map_it(&map)?);
        let neighbours = neighbours()?;
        let interfaces = interfaces()?;
        let info = neighbours.info().map_err(|e| cannot("look at a map", &e))?;
        Ok(Self { map, neighbours, interfaces, run: info.info.id.into(), committed })
    }

    /// By this interface a member on this host sends: tags of its own are believed from there, and no others. To be called of all
    /// of them before the first programs are attached.
    pub fn sends_by(&self, interface: u32) -> Result<(), TaggingError> {
        sends_by(&self.interfaces, interface)
    }

    /// The memory.
    #[must_use]
    pub fn committed(&self) -> &Arc<Mapped<CommittedCells>> {
        &self.committed
    }
}

/// The programs of one member.
pub struct MemberTags {
    object: Object,
    pending_map: MapHandle,
    pending: Arc<Mapped<PendingCells>>,
    crossing: Arc<Mapped<CrossingCells>>,
    /// The member's addresses.
    own: Vec<IpAddr>,
    found_pending: bool,
    pin: Option<PathBuf>,
    hooks: Hooks,
    /// Where the programs' links are pinned, by the name of their interface.
    links: Option<Links>,
    /// The index of the interface that they are attached to, and how.
    attached: Option<(i32, [Hook; 2])>,
    pass_mark: u32,
}

/// What runs the programs on an interface.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Hooks {
    /// tcx where the kernel has it (Linux 6.6), else clsact.
    #[default]
    Best,
    /// clsact, also where there is tcx: so that both can be tried on one machine.
    Clsact,
}

/// Which of the two programs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// What the guest sends.
    FromGuest,
    /// What the guest receives.
    ToGuest,
}

impl Direction {
    /// What is merged comes first: the guest must not answer what it was never seen to hear.
    const BOTH: [Direction; 2] = [Direction::ToGuest, Direction::FromGuest];

    fn program(self) -> &'static str {
        match self {
            Direction::FromGuest => "from_guest",
            Direction::ToGuest => "to_guest",
        }
    }
}

/// Forgets the P that an ended run has left of a member. To be called before the rules that guard it go.
pub fn forget_left(left: Pinned<'_>) -> Result<(), TaggingError> {
    PENDING.iter().try_for_each(|kind| pins::remove(&pins::path_of(kind, left)))
}

/// Where P of this form is kept. What a run with tags of the other form has left there goes: they have raised what
/// this form does not look at.
fn pending_of(form: Form, pinned: Pinned<'_>) -> Result<PathBuf, TaggingError> {
    let [ours, other] = match (form, PENDING) {
        (Form::Vector { .. }, [vector, hlc]) => [vector, hlc],
        (Form::Hlc, [vector, hlc]) => [hlc, vector],
    };
    pins::remove(&pins::path_of(other, pinned))?;
    let path = pins::path_of(ours, pinned);
    if pinned.anew {
        pins::remove(&path)?;
    }
    Ok(path)
}

/// Takes off an interface the programs that an ended run has left on it. One that is gone has nothing.
pub fn detach_left(interface: &str, left: Pinned<'_>) -> Result<(), TaggingError> {
    hear_libbpf();
    Direction::BOTH.into_iter().try_for_each(|direction| {
        let pin = pins::link_path_of(direction.program(), left, interface);
        hook::detach_left(direction, interface, &pin)
    })
}

impl std::fmt::Debug for MemberTags {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("MemberTags").field("pin", &self.pin).finish_non_exhaustive()
    }
}

/// An address of another member.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Peer {
    /// The address.
    pub address: IpAddr,
    /// Whether that member may be on this host.
    pub is_here: bool,
}

/// Whose packets are a member's own, and whose tags are believed. The programs take them for fixed.
#[derive(Clone, Debug)]
pub struct Addresses {
    /// The member's.
    pub own: Vec<IpAddr>,
    /// The others'.
    pub peers: Vec<Peer>,
}

/// Where a member's P and the links of its programs are kept.
#[derive(Clone, Copy, Debug)]
pub struct Pinned<'a> {
    /// P outlives the process. Nobody needs that of a member that hears no others.
    pub keeps_pending: bool,
    /// What an earlier run has left there means nothing: a new P takes its place.
    pub anew: bool,
    /// A directory for pinned maps.
    pub directory: &'a Path,
    /// The group's name.
    pub group: &'a str,
    /// The member's name.
    pub member: &'a str,
}

/// Where the links of a member's programs are pinned.
#[derive(Debug)]
struct Links {
    directory: PathBuf,
    group: String,
    member: String,
}

impl Links {
    fn path_of(&self, direction: Direction, interface: &str) -> PathBuf {
        let Links { directory, group, member } = self;
        let pinned = Pinned { keeps_pending: true, anew: false, directory, group, member };
        pins::link_path_of(direction.program(), pinned, interface)
    }
}

impl MemberTags {
    /// Loads the programs, with the P that an earlier daemon has left if there is one. Nothing
    /// reaches them before [`attach`](Self::attach). Without `pinned`, P and the links end with the process.
    pub fn load(
        settings: &Settings,
        group: &GroupTags,
        addresses: &Addresses,
        pinned: Option<Pinned<'_>>,
    ) -> Result<Self, TaggingError> {
        Self::load_beside(None, settings, group, addresses, pinned)
    }

    /// As [`load`](Self::load), for another interface of the member whose programs are `beside`: both share P.
    pub fn load_beside(
        beside: Option<&MemberTags>,
        settings: &Settings,
        group: &GroupTags,
        addresses: &Addresses,
        pinned: Option<Pinned<'_>>,
    ) -> Result<Self, TaggingError> {
        hear_libbpf();
        if let Form::Vector { writers } = settings.codec.form()
            && writers > IPV6_WRITERS_MAX
        {
            let most = IPV6_WRITERS_MAX;
            return Err(TaggingError::TooManyWriters { writers, most, why: "" });
        }
        let mut pin = None;
        let mut found_pending = false;
        let pending_map = match (beside, pinned) {
            (Some(beside), _) => {
                (pin, found_pending) = (beside.pin.clone(), beside.found_pending);
                MapHandle::try_from(&beside.pending_map).map_err(|e| cannot("share a map", &e))?
            }
            (None, None) => array("tl_pending", size_of::<PendingCells>())?,
            (None, Some(pinned)) if !pinned.keeps_pending => {
                forget_left(pinned)?;
                pins::prepare(pinned.directory).map_err(|source| TaggingError::Pin {
                    path: pinned.directory.to_owned(),
                    source,
                })?;
                array("tl_pending", size_of::<PendingCells>())?
            }
            (None, Some(pinned)) => {
                let path = pending_of(settings.codec.form(), pinned)?;
                let map = if path.exists() {
                    found_pending = true;
                    MapHandle::from_pinned_path(&path)
                        .map_err(|e| cannot("open the P of an earlier run", &e))?
                } else {
                    let mut map = array("tl_pending", size_of::<PendingCells>())?;
                    pins::pin(&mut map, &path, pinned.directory)?;
                    map
                };
                pin = Some(path);
                map
            }
        };
        let crossing_map = array("tl_crossing", size_of::<CrossingCells>())?;
        let pending = match beside {
            Some(beside) => Arc::clone(&beside.pending),
            None => Arc::new(map_it::<PendingCells>(&pending_map)?),
        };
        let crossing = Arc::new(map_it(&crossing_map)?);
        pending.run.store(group.run, Ordering::SeqCst);
        let pass_mark = random_mark(settings.mark_mask);

        let mut open = ObjectBuilder::default()
            .name("tidelock")
            .and_then(|builder| builder.open_memory(PROGRAMS))
            .map_err(|e| cannot("read the programs", &e))?;
        for mut map in open.maps_mut() {
            let shared = match map.name().to_str() {
                Some("pending") => &pending_map,
                Some("crossing") => &crossing_map,
                Some("committed") => &group.map,
                Some("neighbours") => &group.neighbours,
                Some("interfaces") => &group.interfaces,
                Some(".rodata.config") => {
                    map.set_initial_value(&settings.config(group.run, pass_mark).bytes())
                        .map_err(|e| cannot("set their configuration", &e))?;
                    continue;
                }
                _ => continue,
            };
            map.reuse_fd(shared.as_fd()).map_err(|e| cannot("share a map", &e))?;
        }
        let object = open.load().map_err(|e| cannot("load the programs", &e))?;
        let (hooks, attached) = (settings.hooks, None);
        let links = pinned.map(|pinned| Links {
            directory: pinned.directory.to_owned(),
            group: pinned.group.to_owned(),
            member: pinned.member.to_owned(),
        });
        let this = Self {
            object,
            pending_map,
            pending,
            crossing,
            own: addresses.own.clone(),
            found_pending,
            pin,
            hooks,
            links,
            attached,
            pass_mark,
        };
        let judge = this.program("judge")?.as_fd().as_raw_fd().to_ne_bytes();
        this.map("judges")?
            .update(&0u32.to_ne_bytes(), &judge, MapFlags::ANY)
            .map_err(|e| cannot("install the judge", &e))?;
        this.set_addresses(addresses)?;
        Ok(this)
    }

    /// What the mark of a packet has in the bits of [`Settings::mark_mask`] that may pass the rules.
    #[must_use]
    pub fn pass_mark(&self) -> u32 {
        self.pass_mark
    }

    /// Whether P is that of an earlier run, and its programs may have been there all the time. To be asked when these
    /// are attached.
    #[must_use]
    pub fn found_pending(&self) -> bool {
        self.found_pending
    }

    /// P.
    #[must_use]
    pub fn pending(&self) -> &Arc<Mapped<PendingCells>> {
        &self.pending
    }

    /// How far the queue is behind the programs.
    #[must_use]
    pub fn crossing(&self) -> &Arc<Mapped<CrossingCells>> {
        &self.crossing
    }

    fn set_addresses(&self, addresses: &Addresses) -> Result<(), TaggingError> {
        let [peers, ways] = [self.map("peers")?, self.map("ways")?];
        let set = |map: &libbpf_rs::Map<'_>, key: &[u8], value: u32| {
            map.update(key, &value.to_ne_bytes(), MapFlags::ANY)
                .map_err(|e| cannot("set an address", &e))
        };
        for peer in &addresses.peers {
            let way = if peer.is_here { WAY_HERE } else { WAY_ELSEWHERE };
            set(&peers, &key_of(peer.address), way)?;
            for own in &addresses.own {
                set(&ways, &[key_of(*own), key_of(peer.address)].concat(), way)?;
            }
        }
        Ok(())
    }

    /// From now on what others on this host send to this member raises its P when they send it, and gets no tag.
    /// To be called when the programs are attached: what the guest can hear without them is not guarded.
    pub fn join(&self, group: &GroupTags) -> Result<(), TaggingError> {
        let pending = self.pending_map.as_fd().as_raw_fd().to_ne_bytes();
        self.own.iter().try_for_each(|own| {
            group
                .neighbours
                .update(&key_of(*own), &pending, MapFlags::ANY)
                .map_err(|e| cannot("join the members on this host", &e))
        })
    }

    /// Attaches the programs to an interface of the calling thread's network namespace. Those of
    /// an earlier run give way in one step, and the new ones stay when the process ends.
    pub fn attach(&mut self, interface: &str) -> Result<(), TaggingError> {
        let index = mapped::interface_index(interface)
            .map_err(|_| TaggingError::NoInterface(interface.to_owned()))?;
        sends_by(&self.map(INTERFACES)?, index.cast_unsigned())?;
        // A link that is not pinned any more goes now: the kernel takes no program twice.
        let is_first = self.attached.take().is_none();
        let attach = |nth: usize| {
            let direction = Direction::BOTH[nth];
            let pin = self.links.as_ref().map(|links| links.path_of(direction, interface));
            let program = self.program(direction.program())?;
            Hook::attach(&program, (direction, index), pin.as_deref(), self.hooks)
        };
        let [(to_guest, one), (from_guest, other)] = [attach(0)?, attach(1)?];
        if is_first {
            self.found_pending &= one && other;
        }
        self.attached = Some((index, [to_guest, from_guest]));
        Ok(())
    }

    /// The index of the interface that they were attached to.
    #[must_use]
    pub fn attached_to(&self) -> Option<u32> {
        self.attached.as_ref().and_then(|(index, _)| u32::try_from(*index).ok())
    }

    /// Whether they are still where they were attached: others may have taken them off.
    #[must_use]
    pub fn are_attached(&self) -> bool {
        self.attached.as_ref().is_some_and(|(_, hooks)| {
            Direction::BOTH.into_iter().zip(hooks).all(|(direction, hook)| {
                self.program(direction.program()).is_ok_and(|program| hook.has(&program))
            })
        })
    }

    /// What the programs have done since they were loaded.
    pub fn stats(&self) -> Result<TaggingStats, TaggingError> {
        let each_cpu = self
            .map("cpus")?
            .lookup_percpu(&0u32.to_ne_bytes(), MapFlags::ANY)
            .map_err(|e| cannot("read the counters", &e))?;
        let mut values = [0u64; TaggingStats::COUNT];
        for cpu in each_cpu.iter().flatten() {
            for (value, bytes) in values.iter_mut().zip(cpu.as_chunks().0) {
                *value = value.wrapping_add(u64::from_ne_bytes(*bytes));
            }
        }
        Ok(TaggingStats::of(values))
    }

    /// Gives the kernel's test facility an Ethernet frame for one of the programs.
    pub fn try_frame(
        &self,
        direction: Direction,
        frame: &[u8],
        gso_bytes: u32,
    ) -> Result<Tried, TaggingError> {
        self.try_frame_from(0, direction, frame, gso_bytes)
    }

    /// The same of a frame that has come by the interface with this index.
    pub fn try_frame_from(
        &self,
        interface: u32,
        direction: Direction,
        frame: &[u8],
        gso_bytes: u32,
    ) -> Result<Tried, TaggingError> {
        let mut context = [0u8; CONTEXT_BYTES];
        context[CONTEXT_INTERFACE..CONTEXT_INTERFACE + 4].copy_from_slice(&interface.to_ne_bytes());
        context[CONTEXT_GSO..CONTEXT_GSO + 4].copy_from_slice(&gso_bytes.to_ne_bytes());
        let (mut context_out, mut out) = ([0u8; CONTEXT_BYTES], vec![0; frame.len() + 512]);
        let name = direction.program();
        let program = self.object.progs_mut().find(|program| program.name() == name);
        let result = program
            .ok_or_else(|| missing("a program"))?
            .test_run(libbpf_rs::ProgramInput {
                context_in: Some(&mut context),
                context_out: Some(&mut context_out),
                data_in: Some(frame),
                data_out: Some(&mut out),
                ..Default::default()
            })
            .map_err(|e| cannot("try a frame", &e))?;
        let (verdict, len) = (result.return_value, result.data.map_or(0, |data| data.len()));
        let mark = context_out[CONTEXT_MARK..CONTEXT_MARK + 4].try_into().expect("four bytes");
        out.truncate(len);
        Ok(Tried { passed: verdict == u32::MAX, mark: u32::from_ne_bytes(mark), frame: out })
    }

    fn map(&self, name: &str) -> Result<libbpf_rs::Map<'_>, TaggingError> {
        self.object.maps().find(|map| map.name() == name).ok_or_else(|| missing("a map"))
    }

    fn program(&self, name: &str) -> Result<Program<'_>, TaggingError> {
        self.object
            .progs()
            .find(|program| program.name() == name)
            .ok_or_else(|| missing("a program"))
    }
}

/// A value in these bits that nobody else knows, and that is not 0.
fn random_mark(mask: u32) -> u32 {
    // Its keys are random.
    let random = || RandomState::new().hash_one(mask) as u32 & mask;
    std::iter::repeat_with(random).find(|mark| *mark != 0).expect("the mask is not empty")
}

/// `struct __sk_buff` of linux/bpf.h, and where three of its members lie.
const CONTEXT_BYTES: usize = 192;
const CONTEXT_MARK: usize = 8;
const CONTEXT_INTERFACE: usize = 36;
const CONTEXT_GSO: usize = 176;

/// What became of a frame.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tried {
    /// It goes on, to other filters and the network; else it was dropped.
    pub passed: bool,
    /// Its mark.
    pub mark: u32,
    /// Its bytes.
    pub frame: Vec<u8>,
}

/// An address as the programs' maps have it: an IPv4 address is one of IPv6 (`::ffff:a.b.c.d`).
#[must_use]
pub fn key_of(address: IpAddr) -> [u8; 16] {
    match address {
        IpAddr::V4(v4) => v4.to_ipv6_mapped().octets(),
        IpAddr::V6(v6) => v6.octets(),
    }
}

fn array(name: &str, bytes: usize) -> Result<MapHandle, TaggingError> {
    let bytes = u32::try_from(bytes).expect("cells are small");
    let options =
        libbpf_sys::bpf_map_create_opts { map_flags: libbpf_sys::BPF_F_MMAPABLE, ..map_options() };
    MapHandle::create(MapType::Array, Some(name), 4, bytes, 1, &options)
        .map_err(|e| cannot("make a map", &e))
}

/// A map of addresses to P. The kernel goes by one such map when it is made.
fn neighbours() -> Result<MapHandle, TaggingError> {
    let like = array("tl_pending", size_of::<PendingCells>())?;
    let inner_map_fd = u32::try_from(like.as_fd().as_raw_fd()).expect("a descriptor is positive");
    let options = libbpf_sys::bpf_map_create_opts { inner_map_fd, ..map_options() };
    let (name, key_bytes) = (Some("tl_neighbours"), 16);
    MapHandle::create(MapType::HashOfMaps, name, key_bytes, 4, ADDRESSES_MAX, &options)
        .map_err(|e| cannot("make a map", &e))
}

fn interfaces() -> Result<MapHandle, TaggingError> {
    MapHandle::create(MapType::Hash, Some(INTERFACES), 4, 4, INTERFACES_MAX, &map_options())
        .map_err(|e| cannot("make a map", &e))
}

fn sends_by(interfaces: &impl MapCore, interface: u32) -> Result<(), TaggingError> {
    interfaces
        .update(&interface.to_ne_bytes(), &1u32.to_ne_bytes(), MapFlags::ANY)
        .map_err(|e| cannot("set an interface", &e))
}

fn map_options() -> libbpf_sys::bpf_map_create_opts {
    libbpf_sys::bpf_map_create_opts {
        sz: size_of::<libbpf_sys::bpf_map_create_opts>() as libbpf_sys::size_t,
        ..Default::default()
    }
}

fn map_it<T: Cells>(map: &MapHandle) -> Result<Mapped<T>, TaggingError> {
    if map.value_size() as usize != size_of::<T>() {
        return Err(missing("a map of this size"));
    }
    Mapped::new(map.as_fd())
        .map_err(|e| cannot("map a map into memory", &libbpf_rs::Error::from(e)))
}

fn missing(what: &str) -> TaggingError {
    TaggingError::Kernel { doing: "look into the programs", said: format!("{what} is missing") }
}

/// The last texts that libbpf wrote: its errors are bare numbers.
static SAID: Mutex<Vec<String>> = Mutex::new(Vec::new());
const SAID_LINES_MAX: usize = 12;
/// How libbpf begins what the verifier has said.
const VERIFIER_LOG: &str = "BEGIN PROG LOAD LOG";

fn hear_libbpf() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        libbpf_rs::set_print(Some((PrintLevel::Warn, |_, line| {
            let mut said = SAID.lock().unwrap_or_else(PoisonError::into_inner);
            if said.len() == SAID_LINES_MAX {
                said.remove(0);
            }
            said.push(line.trim().to_owned());
        })));
    });
}

/// What came of a try of something that not every kernel has.
fn forget_what_libbpf_said() {
    SAID.lock().unwrap_or_else(PoisonError::into_inner).clear();
}

fn cannot(doing: &'static str, error: &libbpf_rs::Error) -> TaggingError {
    let said = std::mem::take(&mut *SAID.lock().unwrap_or_else(PoisonError::into_inner));
    // The verifier's refusal has the same number as a lack of rights, and a log.
    let is_refusal = said.iter().any(|text| text.contains(VERIFIER_LOG));
    if error.kind() == libbpf_rs::ErrorKind::PermissionDenied && !is_refusal {
        return TaggingError::NotAllowed;
    }
    let lines: Vec<&str> = said.iter().flat_map(|text| text.lines()).collect();
    let last = &lines[lines.len().saturating_sub(SAID_LINES_MAX)..];
    let said = [&[error.to_string().as_str()], last].concat().join("; ");
    TaggingError::Kernel { doing, said }
}
