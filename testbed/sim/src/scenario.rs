//! What one seed is made of: machines, groups, guests, sizes and how often what goes wrong.
//!
//! Every seed draws its own mixture (swarm testing, Groce et al. 2012): a fault that is left out
//! makes room for others to meet.

use crate::beating;
use crate::contact;
use crate::disk::SECTOR_BYTES;
use crate::frames::Family;
use crate::growing;
use crate::homing;
use crate::narrow::{self, NarrowPlan};
use crate::rng::Rng;
use crate::schedule::{MS, MachineClock, US};
use crate::spilling::{self, BacklogPlan};
use crate::switching;
use crate::verifying::{self, VerifyPlan};
use std::ops::Range;
use tidelock_daemon_core::activity::Geometry;
use tidelock_daemon_core::heartbeat::HeartbeatSettings;
use tidelock_protocol::ids::{Seq, WriterId};
use tidelock_protocol::message::{Form, Mode};
use tidelock_protocol::tag::{self, Codec};
use tidelock_replica::group::{AtSizeMax, Retention};
use tidelock_store::journal::Compress;

/// The bytes of one row of the guest's ledger.
pub const ROW_BYTES: u64 = SECTOR_BYTES;

const COPY_MAX_BYTES: u64 = tidelock_protocol::limits::COPY_MAX_BYTES as u64;

/// One disk at the beginning.
#[derive(Clone, Debug)]
pub struct DiskPlan {
    /// What it holds.
    pub content: Vec<u8>,
    /// What the file system calls allocated; the rest is zeroes.
    pub allocated: Vec<Range<u64>>,
}

/// One VM.
#[derive(Clone, Debug)]
pub struct VmPlan {
    /// Its name.
    pub name: String,
    /// Its group.
    pub group: usize,
    /// Its number there. Those with disks come first: for them it is their writer index.
    pub writer: u16,
    /// The host that it runs on.
    pub host: usize,
    /// Its disks. None: it follows.
    pub disks: Vec<DiskPlan>,
    /// A disk that the operator may add.
    pub spare: Option<DiskPlan>,
    /// It comes to its group later, if it does.
    pub joins: bool,
    /// Rows of the ledger.
    pub rows: u64,
    /// Where the ledger ends on disk 0: where that did at the beginning.
    pub ledger_end: u64,
    /// The bound of what is admitted and not durable.
    pub backlog_limit_bytes: u64,
    /// Packets that may wait.
    pub gate_capacity: usize,
    /// Requests under way.
    pub queue_depth: usize,
    /// The mean time between two things that the guest does.
    pub think_ns: u64,
    /// Between two writes while links are narrow, about; 0: they never are.
    pub press_ns: u64,
    /// How often it does what: write, zeroes, read, flush, row, packet, message.
    pub weights: [u32; 7],
    /// Copies under way.
    pub copy_window_bytes: u64,
    /// Copies per second; 0: no limit.
    pub copy_rate_bytes_per_s: u64,
    /// Its activity log, if it keeps one.
    pub log: Option<Geometry>,
    /// Its backlog on disk, if it has one.
    pub backlog: Option<BacklogPlan>,
}

impl VmPlan {
    /// Whether it has disks, and so a stream.
    #[must_use]
    pub fn is_writer(&self) -> bool {
        !self.disks.is_empty()
    }

    /// Where the ledger is on disk 0.
    #[must_use]
    pub fn ledger(&self) -> Range<u64> {
        self.ledger_end - self.rows * ROW_BYTES..self.ledger_end
    }

    /// Whose records are its.
    #[must_use]
    pub fn writer_id(&self) -> Option<WriterId> {
        self.is_writer().then_some(WriterId(self.writer))
    }
}

/// One group.
#[derive(Clone, Debug)]
pub struct GroupPlan {
    /// Its name.
    pub name: String,
    /// Its writers, by index.
    pub vms: Vec<usize>,
    /// Its members without disks.
    pub followers: Vec<usize>,
    /// A VM that may become a member.
    pub candidate: Option<usize>,
    /// Writers that were taken out: they keep their places.
    pub removed: Vec<usize>,
    /// Writers that the backup was asked to take out: it may be on record before it says so.
    pub leaving: Vec<usize>,
    /// How its packets are tagged.
    pub form: Form,
    /// The mode at the beginning.
    pub mode: Mode,
    /// Its gate opens when something has waited so long for the backup, if it ever does.
    pub degrade_after_ms: Option<u64>,
    /// Guests are served also if the backup is not reached after a start.
    pub serves_unreached: bool,
    /// Its writers' heartbeats, if they have any.
    pub heartbeat: Option<HeartbeatSettings>,
    /// The lease.
    pub lease_ms: u64,
    /// The grace.
    pub grace_ms: u64,
    /// Unfolded bytes from which the fold works.
    pub fold_min_bytes: u64,
    /// How fast it folds at most.
    pub fold_rate_bytes_s: Option<u64>,
    /// Unfolded bytes at which the backup stops acknowledging.
    pub unfolded_max_bytes: u64,
    /// How long the past is kept.
    pub retention: Retention,
    /// The size of a journal segment.
    pub segment_bytes: u64,
    /// What of the journal is compressed.
    pub compress: Option<Compress>,
    /// The last seq of each of its writers before the beginning: where tags wrap soon, they have a
    /// long past.
    pub past: Seq,
}

impl GroupPlan {
    /// Writers and followers.
    pub fn members(&self) -> impl Iterator<Item = usize> + '_ {
        self.writers().chain(self.followers.iter().copied())
    }

    /// Writers that were not taken out.
    pub fn writers(&self) -> impl Iterator<Item = usize> + '_ {
        self.vms.iter().copied().filter(|vm| !self.removed.contains(vm))
    }

    /// Whether it has several members, or may come to have them.
    #[must_use]
    pub fn may_have_several(&self) -> bool {
        self.has_several() || self.candidate.is_some()
    }

    /// Whether packets between members need tags.
    #[must_use]
    pub fn has_several(&self) -> bool {
        self.vms.len() + self.followers.len() > 1
    }
}

/// The network between members.
#[derive(Clone, Copy, Debug)]
pub struct LanPlan {
    /// One way.
    pub delay_ns: u64,
    /// On top of it, at most: what makes packets overtake each other.
    pub jitter_ns: u64,
    /// Packets of a thousand that are lost.
    pub lost: u64,
    /// Packets of a thousand that come twice.
    pub doubled: u64,
    /// Packets of a thousand that have no room for a tag.
    pub untaggable: u64,
    /// Packets of a thousand that a stranger sends, with a tag that looks like the group's.
    pub forged: u64,
    /// Address family of all packets; `None`: packets of both take turns.
    pub family: Option<Family>,
}

/// What can go wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// A connection breaks.
    Break,
    /// The network of a host stops in one or both directions, for a while.
    Partition,
    /// The link is slow for a while.
    SlowLink,
    /// Frames of a connection are lost, doubled, swapped or damaged, and it breaks soon after.
    Mangle,
    /// The daemon of a host is killed; the guests live on.
    KillDaemon,
    /// The daemon of a host is stopped cleanly and started again.
    StopDaemon,
    /// A guest dies, and boots again.
    KillGuest,
    /// A host loses power and comes back.
    PowerHost,
    /// A host is shut down cleanly, its daemon before its power, and started again.
    RestartHost,
    /// The backup server is killed; its page cache lives on.
    KillBackup,
    /// The backup loses power.
    PowerBackup,
    /// The backup's disk is full for a while.
    BackupFull,
    /// The backup's disk fails a sync.
    BackupSyncFails,
    /// A local disk is slow for a while.
    SlowDisk,
    /// A local disk fails requests for a while.
    LocalErrors,
    /// The backup's disk is slow for a while.
    SlowBackup,
    /// The mode is changed.
    Mode,
    /// A wall clock steps.
    WallClock,
    /// The primary site is gone, or cut off, and the group is recovered.
    Disaster,
    /// The operator changes the group's members or disks.
    Change,
}

/// All of them.
pub const FAULTS: [Fault; 20] = [
    Fault::Break,
    Fault::Partition,
    Fault::SlowLink,
    Fault::Mangle,
    Fault::KillDaemon,
    Fault::StopDaemon,
    Fault::KillGuest,
    Fault::PowerHost,
    Fault::RestartHost,
    Fault::KillBackup,
    Fault::PowerBackup,
    Fault::BackupFull,
    Fault::BackupSyncFails,
    Fault::SlowDisk,
    Fault::LocalErrors,
    Fault::SlowBackup,
    Fault::Mode,
    Fault::WallClock,
    Fault::Disaster,
    Fault::Change,
];

/// One seed's world.
#[derive(Clone, Debug)]
pub struct Scenario {
    /// Clocks of the hosts.
    pub hosts: Vec<MachineClock>,
    /// The clock of the backup.
    pub backup: MachineClock,
    /// The groups.
    pub groups: Vec<GroupPlan>,
    /// The VMs.
    pub vms: Vec<VmPlan>,
    /// The network between them.
    pub lan: LanPlan,
    /// One way to the backup.
    pub delay_ns: u64,
    /// On top of it, at most.
    pub jitter_ns: u64,
    /// What a connection holds in one direction.
    pub window_bytes: usize,
    /// What the link carries.
    pub bytes_per_ms: u64,
    /// A write of a local disk.
    pub local_ns: u64,
    /// A sync of the backup's disk.
    pub sync_ns: u64,
    /// Between two faults.
    pub fault_ns: u64,
    /// How often which.
    pub fault_weights: [u32; FAULTS.len()],
    /// One committed state in so many is recovered on a copy and compared.
    pub probe_one_in: u64,
    /// Disks become larger.
    pub grows: bool,
    /// Starts often do not reach the backup for longer than guests wait.
    pub cut_off_starts: bool,
    /// Verifications, if there are any.
    pub verify: Option<VerifyPlan>,
    /// Links that carry about as much as guests write, if they do.
    pub narrow: Option<NarrowPlan>,
    /// The first group is switched over then, by several hosts.
    pub switch_after_ns: Option<u64>,
    /// What goes wrong with it.
    pub switch_seed: u64,
    /// What a connection that was cut has left may arrive long after what the next one brings.
    pub late_ends: bool,
    /// There is a way back after a recovery, and the first disaster is then.
    pub disaster_after_ns: Option<u64>,
}

impl Scenario {
    /// Whether a VM is a member of its group now.
    #[must_use]
    pub fn is_member(&self, vm: usize) -> bool {
        self.groups[self.vms[vm].group].members().any(|member| member == vm)
    }

    /// How many writers a group may come to have.
    #[must_use]
    pub fn writers_max(&self, group: usize) -> usize {
        self.groups[group].vms.len() + 1
    }

    /// How packets of a group are tagged, as its configuration is now.
    #[must_use]
    pub fn codec(&self, group: usize) -> Codec {
        let group = &self.groups[group];
        let form = match group.form {
            Form::Vector => tag::Form::Vector { writers: group.vms.len() as u16 },
            Form::Hlc => tag::Form::Hlc,
        };
        let writers = group.vms.iter().map(|vm| self.vms[*vm].name.as_str());
        Codec::new(form, &group.name, writers)
    }

    /// The world of a seed.
    #[must_use]
    pub fn draw(rng: &mut Rng) -> Self {
        let several = rng.chance(1, 2);
        let group_count = if rng.chance(1, 4) { 2 } else { 1 };
        let host_count = rng.range(1..if several { 5 } else { 3 }) as usize;
        let mut vms = Vec::new();
        let mut groups = Vec::new();
        let big = rng.chance(1, 6);
        let delay_ns = rng.range(50 * US..60 * MS);
        let bytes_per_ms = rng.range(256..65536);
        let window_bytes = rng.range(12 << 10..256 << 10);
        for group in 0..group_count {
            let (writers, followers) = if several && group == 0 {
                (*rng.pick(&[1, 2, 2, 3]), *rng.pick(&[0, 1, 1, 2]))
            } else {
                (1, 0)
            };
            let members = writers + followers;
            let mut of_group = Vec::new();
            for nth in 0..members {
                of_group.push(vms.len());
                let host = rng.index(host_count);
                let kind = VmKind {
                    follows: nth >= writers,
                    has_peers: members > 1,
                    big: big && vms.is_empty(),
                };
                vms.push(draw_vm(rng, group, nth, kind, host));
            }
            let followers = of_group.split_off(writers.into());
            let candidate = (members > 1 && rng.chance(1, 2)).then(|| {
                let follows = rng.chance(1, 3);
                let kind = VmKind { follows, has_peers: true, big: false };
                let number = if follows { members } else { writers };
                let host = rng.index(host_count);
                let name = format!("vm{group}{members}");
                vms.push(VmPlan { name, joins: true, ..draw_vm(rng, group, number, kind, host) });
                vms.len() - 1
            });
            // A lease must outlast the largest record on a slow link: beacons queue behind it.
            let round_ms = 2 * delay_ns / MS + 20;
            let record_ms =
                COPY_MAX_BYTES / bytes_per_ms + round_ms * COPY_MAX_BYTES / window_bytes;
            let lease_ms = rng.range(200..1200) + 2 * (round_ms + record_ms);
            let segment_bytes = *rng.pick(&[2 << 10, 16 << 10, 128 << 10]);
            groups.push(GroupPlan {
                name: format!("g{group}"),
                vms: of_group,
                followers,
                candidate,
                removed: Vec::new(),
                leaving: Vec::new(),
                form: *rng.pick(&[Form::Vector, Form::Hlc]),
                mode: *rng.pick(&[Mode::Pipelined, Mode::Pipelined, Mode::Sync, Mode::Async]),
                degrade_after_ms: (rng.chance(1, 2))
                    .then(|| 4 * round_ms + lease_ms / 2 + rng.range(200..1000)),
                serves_unreached: false,
                heartbeat: None,
                lease_ms,
                grace_ms: lease_ms * 3 / 2,
                fold_min_bytes: *rng.pick(&[1, 4 << 10, 64 << 10]),
                unfolded_max_bytes: *rng.pick(&[96 << 10, 512 << 10, 8 << 20]),
                fold_rate_bytes_s: rng.chance(1, 4).then(|| rng.range(4 << 10..1 << 20)),
                segment_bytes,
                compress: draw_compress(Rng::new(rng.clone().number())),
                retention: draw_retention(rng, segment_bytes),
                past: if rng.chance(1, 3) { Seq((1 << 32) - rng.range(1..200)) } else { Seq::ZERO },
            });
        }
        let mut fault_weights = [0; FAULTS.len()];
        for (weight, fault) in fault_weights.iter_mut().zip(FAULTS) {
            let common = match fault {
                Fault::Break | Fault::Partition | Fault::Mode | Fault::Change => 3,
                _ => 1,
            };
            let left_out = rng.chance(1, 3);
            *weight = if left_out { 0 } else { rng.range(1..5) as u32 * common };
        }
        let calm = rng.chance(1, 10);
        let mut plan = Self {
            hosts: (0..host_count).map(|_| clock(rng)).collect(),
            backup: clock(rng),
            groups,
            vms,
            lan: draw_lan(rng),
            delay_ns,
            jitter_ns: rng.range(0..5 * MS),
            window_bytes: window_bytes as usize,
            bytes_per_ms,
            local_ns: rng.range(20 * US..MS),
            sync_ns: rng.range(20 * US..4 * MS),
            fault_ns: if calm { 5_000 * MS } else { rng.range(60 * MS..900 * MS) },
            fault_weights,
            probe_one_in: rng.range(20..60),
            grows: false,
            cut_off_starts: false,
            verify: None,
            narrow: None,
            switch_after_ns: None,
            late_ends: Rng::new(rng.clone().number().rotate_left(56)).chance(1, 8),
            disaster_after_ns: None,
            switch_seed: 0,
        };
        verifying::draw(&mut Rng::new(rng.clone().number().rotate_left(24)), &mut plan);
        growing::draw(&mut Rng::new(rng.clone().number().rotate_left(8)), &mut plan);
        contact::draw(&mut Rng::new(rng.clone().number().rotate_left(32)), &mut plan);
        beating::draw(&mut Rng::new(!rng.clone().number()), &mut plan);
        switching::draw(&mut Rng::new(rng.clone().number().rotate_left(48)), &mut plan);
        plan.narrow = narrow::draw(&mut Rng::new(rng.clone().number()), &mut plan);
        homing::draw(&mut Rng::new(rng.clone().number().rotate_left(40)), &mut plan);
        spilling::draw(&mut Rng::new(rng.clone().number().rotate_left(16)), &mut plan);
        plan
    }
}

fn draw_lan(rng: &mut Rng) -> LanPlan {
    // The other draws are those of a world without address families.
    let mut families = Rng::new(rng.clone().number().rotate_left(56));
    let family = *families.pick(&[Some(Family::Four), Some(Family::Six), None]);
    let mut per_mille = |most| if rng.chance(1, 2) { 0 } else { rng.below(most) };
    let (lost, doubled, untaggable, forged) =
        (per_mille(200), per_mille(200), per_mille(200), per_mille(100));
    LanPlan {
        delay_ns: rng.range(20 * US..2 * MS),
        jitter_ns: rng.range(1..10 * MS),
        lost,
        doubled,
        untaggable,
        forged,
        family,
    }
}

fn clock(rng: &mut Rng) -> MachineClock {
    MachineClock {
        offset_ns: rng.range(1..1 << 44),
        fast_ppm: rng.range(0..2001) as i64 - 1000,
        wall_offset_ms: rng.range(0..4_000) as i64 - 2_000,
    }
}

#[derive(Clone, Copy)]
struct VmKind {
    follows: bool,
    has_peers: bool,
    big: bool,
}

fn draw_vm(rng: &mut Rng, group: usize, writer: u16, kind: VmKind, host: usize) -> VmPlan {
    let rows = rng.range(4..24);
    let disk_count = if kind.follows { 0 } else { rng.range(1..4) };
    let disks: Vec<DiskPlan> = (0..disk_count)
        .map(|nth| {
            let sectors = if kind.big && nth == 0 {
                rng.range(512..2700)
            } else {
                rng.range(24 + if nth == 0 { rows } else { 0 }..160)
            };
            draw_disk(rng, sectors * SECTOR_BYTES)
        })
        .collect();
    let ledger_end = disks.first().map_or(0, |disk: &DiskPlan| disk.content.len() as u64);
    let spare = (kind.has_peers && !kind.follows).then(|| {
        let sectors = rng.range(24..160);
        draw_disk(rng, sectors * SECTOR_BYTES)
    });
    let quiet = rng.chance(1, 4);
    let mut weights = [0; 7];
    for (i, weight) in weights.iter_mut().enumerate() {
        *weight = match i {
            0..=4 if kind.follows => 0,
            0 if quiet => 1,
            0 => rng.range(2..20) as u32,
            // Packets that depend on nothing new are what a lease is for.
            5 if quiet => 20,
            5 => rng.range(1..10) as u32,
            6 if !kind.has_peers => 0,
            6 => rng.range(2..16) as u32,
            _ => rng.range(0..6) as u32,
        };
    }
    VmPlan {
        name: format!("vm{group}{writer}"),
        group,
        writer,
        host,
        disks,
        spare,
        joins: false,
        rows,
        ledger_end,
        backlog_limit_bytes: *rng.pick(&[4 << 10, 16 << 10, 64 << 10, 1 << 20]),
        gate_capacity: *rng.pick(&[8, 64, 4096]),
        queue_depth: *rng.pick(&[1, 4, 16, 32]),
        think_ns: rng.range(MS / 4..12 * MS),
        press_ns: 0,
        weights,
        copy_window_bytes: *rng.pick(&[1, 64 << 10, 1 << 20]),
        copy_rate_bytes_per_s: *rng.pick(&[0, 0, 1 << 20]),
        log: draw_log(rng, kind.follows),
        backlog: None,
    }
}

fn draw_log(rng: &mut Rng, follows: bool) -> Option<Geometry> {
    let geometry = Geometry {
        extent_bytes: *rng.pick(&[512, 1024, 4096, 16 << 10]),
        slots: *rng.pick(&[4, 8, 16, 64]),
        context: *rng.pick(&[1, 4, 16]),
    };
    (!follows && !rng.chance(1, 8)).then_some(geometry)
}

fn draw_disk(rng: &mut Rng, size_bytes: u64) -> DiskPlan {
    let mut content = vec![0; size_bytes as usize];
    let mut allocated: Vec<Range<u64>> = Vec::new();
    let mut at = 0;
    while at < size_bytes {
        let len = (rng.range(1..40) * SECTOR_BYTES).min(size_bytes - at);
        let range = at..at + len;
        at += len;
        match rng.below(3) {
            0 => continue,
            1 => {
                for chunk in content[range.start as usize..range.end as usize].chunks_mut(8) {
                    chunk.copy_from_slice(&rng.number().to_le_bytes()[..chunk.len()]);
                }
            }
            // Allocated, and zeroes all the same.
            _ => {}
        }
        match allocated.last_mut() {
            Some(last) if last.end == range.start => last.end = range.end,
            _ => allocated.push(range),
        }
    }
    DiskPlan { content, allocated }
}

/// It draws its own numbers, so that what else a seed is does not depend on it.
fn draw_compress(mut rng: Rng) -> Option<Compress> {
    let after_ms = *rng.pick(&[0, 50, 1_000]);
    let block_bytes = *rng.pick(&[512, 4 << 10, 64 << 10]);
    // Small segments hardly ever get smaller: what is written is what is to be read.
    rng.chance(1, 2).then_some(Compress { after_ms, block_bytes, percent_max: 1_000 })
}

fn draw_retention(rng: &mut Rng, segment_bytes: u64) -> Retention {
    let window_ms = *rng.pick(&[0, 0, 50, 500, 5_000, 3_600_000]);
    // Who stops takes nothing until the window has passed: not in a run, if it is long.
    let at_size_max = match window_ms {
        0..=5_000 if rng.chance(1, 3) => AtSizeMax::Stop,
        _ => AtSizeMax::Shorten,
    };
    let size_max_bytes = (segment_bytes * *rng.pick(&[4, 16, 256])).max(64 << 10);
    Retention { window_ms, size_max_bytes, at_size_max }
}
