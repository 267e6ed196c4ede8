//! Guests and their clients.
//!
//! A guest writes, flushes and reads, and tells clients outside what it has seen. It keeps a
//! ledger of rows: a row is written, flushed, and only then is its client told. What a client was
//! told must be in the recovered disks.

use crate::disk::SECTOR_BYTES;
use crate::failure::{Checked, Checker, check};
use crate::frames::{Node, Room};
use crate::oracle::Point;
use crate::scenario::ROW_BYTES;
use crate::schedule::{MS, US};
use crate::world::{Event, Run, World, note};
use bytes::Bytes;
use std::collections::BTreeMap;
use std::ops::Range;
use tidelock_daemon_core::sequencer::Extent;
use tidelock_netfilter::release_queue::{Flow, Kind};
use tidelock_protocol::ids::DiskId;
use tidelock_protocol::record::{Effect, Payload};

/// What a guest knows of each writer of its group.
pub type Known = Vec<Point>;

/// Raises `known` to `other`.
pub fn learn(known: &mut Known, other: &Known) {
    for (mine, theirs) in known.iter_mut().zip(other) {
        *mine = (*mine).max(*theirs);
    }
}

/// A row of the ledger.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Row {
    /// Place of the row.
    pub slot: u64,
    /// Which write of that place.
    pub version: u64,
}

/// A packet.
#[derive(Clone, Debug)]
pub struct Packet {
    /// What the guest knew.
    pub known: Known,
    /// What it tells of the ledger.
    pub row: Option<Row>,
    /// Its kind.
    pub kind: Kind,
    /// The member that it is for; `None`: a client.
    pub to: Option<usize>,
    /// What the guest knew besides, and nobody answers for.
    pub hearsay: Known,
    /// Its bytes.
    pub frame: Vec<u8>,
}

impl Packet {
    /// It is stamped anew with the answer to what the guest had heard.
    pub fn is_answered_for(&mut self) {
        learn(&mut self.known, &self.hearsay);
    }

    /// All that its receiver comes to know.
    #[must_use]
    pub fn everything(&self) -> Known {
        let mut all = self.known.clone();
        learn(&mut all, &self.hearsay);
        all
    }
}

/// What a guest has asked of a disk.
#[derive(Clone, Debug)]
pub enum Ask {
    /// A write or zeroing.
    Write {
        /// Extent of it.
        extent: Extent,
        /// What.
        effect: Effect,
        /// On stable storage.
        fua: bool,
        /// It is a row.
        row: Option<Row>,
        /// What the guest knew: what the write truly depends on.
        known: Known,
    },
    /// A read. What it must return, unless it is overwritten meanwhile.
    Read {
        /// Extent of it.
        extent: Extent,
        /// What.
        expected: Option<Vec<u8>>,
        /// The guest boots: until this is answered it says nothing.
        boots: bool,
    },
    /// A question about a range, or a hint, which changes nothing.
    Hint {
        /// Extent of it.
        extent: Extent,
    },
    /// A flush.
    Flush {
        /// Which disk.
        disk: DiskId,
        /// The row that waits for it.
        row: Option<Row>,
    },
}

/// A guest.
#[derive(Debug)]
pub struct Guest {
    /// Whether it runs.
    pub alive: bool,
    /// Its boot.
    pub boot: Run,
    /// It has read its disks since: from then on what it says depends on them.
    pub awake: bool,
    /// What it has seen.
    pub known: Known,
    /// What it has heard of others in mode async, in which nobody said what that depends on.
    pub rumours: Known,
    /// What it has heard so and is not answered for yet: see [`crate::hearsay`].
    pub hearsay: Known,
    /// Of that which hosts let out, what their questions on behalf of everyone were answered for.
    pub vouched: Known,
    /// So many of those answers it has heard.
    pub answers_heard: usize,
    /// What its disks may tell it after a boot.
    on_disk: Known,
    /// Of that, what came by rumours.
    rumours_on_disk: Known,
    /// And what nobody answers for.
    pub hearsay_on_disk: Known,
    /// What is under way, by number.
    pub asked: BTreeMap<u64, Ask>,
    /// Numbers of requests.
    pub next: u64,
    /// Version of the last row that was begun, by slot.
    pub rows: BTreeMap<u64, u64>,
    /// Rows that are being written: one at a time for each place.
    pub busy_slots: Vec<u64>,
}

impl Guest {
    /// A guest that is off.
    #[must_use]
    pub fn new(writers: usize) -> Self {
        Self {
            alive: false,
            boot: 0,
            awake: false,
            known: vec![Point::default(); writers],
            rumours: vec![Point::default(); writers],
            hearsay: vec![Point::default(); writers],
            vouched: vec![Point::default(); writers],
            answers_heard: 0,
            on_disk: vec![Point::default(); writers],
            rumours_on_disk: vec![Point::default(); writers],
            hearsay_on_disk: vec![Point::default(); writers],
            asked: BTreeMap::new(),
            next: 0,
            rows: BTreeMap::new(),
            busy_slots: Vec::new(),
        }
    }

    /// A write of its own begins, which came of this.
    pub fn stores(&mut self, writer: u16, point: Point, known: &Known) {
        learn(&mut self.on_disk, known);
        learn(&mut self.rumours_on_disk, &self.rumours);
        learn(&mut self.hearsay_on_disk, &self.hearsay);
        self.holds(writer, point);
    }

    /// Records that the disks have this write of the guest's own.
    pub fn holds(&mut self, writer: u16, point: Point) {
        let own = &mut self.on_disk[usize::from(writer)];
        *own = (*own).max(point);
    }
}

impl Guest {
    /// From now on this is to be covered, of what it has heard and what is on its disks.
    pub fn answers_for(&mut self, heard: &Known, on_disk: &Known) {
        learn(&mut self.rumours, heard);
        learn(&mut self.rumours_on_disk, on_disk);
    }

    /// What a host had let out is in P.
    pub fn is_vouched_for(&mut self, let_out: &Known) {
        learn(&mut self.vouched, let_out);
        let (heard, on_disk) = (
            crate::hearsay::shared(&self.hearsay, &self.vouched),
            crate::hearsay::shared(&self.hearsay_on_disk, &self.vouched),
        );
        self.answers_for(&heard, &on_disk);
    }

    /// All that it knows, whoever vouches for it.
    #[must_use]
    pub fn everything(&self) -> Known {
        let mut all = self.known.clone();
        learn(&mut all, &self.rumours);
        all
    }
}

/// What a guest's clients were told while the mode promised that it lasts.
#[derive(Clone, Debug)]
pub struct Client {
    /// What any packet depended on.
    pub known: Known,
    /// The newest version of each row.
    pub rows: BTreeMap<u64, u64>,
    /// What any packet depended on that left while the group was degraded, until that is over.
    pub unpromised: Vec<Unpromised>,
    /// See [`Unpromised::said_unix_ms`].
    pub said_unix_ms: u64,
}

/// What clients came to know without a promise.
#[derive(Clone, Debug)]
pub struct Unpromised {
    /// What the packets depended on.
    pub known: Known,
    /// Since when the host says that it is degraded, by its wall clock.
    pub since_unix_ms: u64,
    /// The greatest of those that it has ever said: one that its clock said before it was set back is of an earlier moment.
    pub said_unix_ms: u64,
    /// The backup's wall clock when the first packet left.
    pub first_unix_ms: u64,
    /// The time of the member's last record then.
    pub last_record_ms: u64,
}

impl Client {
    /// Was told nothing.
    #[must_use]
    pub fn new(writers: usize) -> Self {
        Self {
            known: vec![Point::default(); writers],
            rows: BTreeMap::new(),
            unpromised: Vec::new(),
            said_unix_ms: 0,
        }
    }
}

/// What a row looks like on the disk.
#[must_use]
pub fn row_bytes(vm: usize, row: Row) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(ROW_BYTES as usize);
    bytes.extend_from_slice(&row.slot.to_le_bytes());
    bytes.extend_from_slice(&row.version.to_le_bytes());
    let mut filler = crate::rng::Rng::new((vm as u64) << 48 ^ row.slot << 32 ^ row.version);
    while bytes.len() < ROW_BYTES as usize {
        bytes.extend_from_slice(&filler.number().to_le_bytes());
    }
    bytes
}

impl World {
    /// A guest boots: it reads its disks before anything else, and knows what they hold.
    pub fn boot_guest(&mut self, vm: usize) -> Checked {
        let boot = self.new_run();
        let follows = !self.plan.vms[vm].is_writer();
        let guest = &mut self.vms[vm].guest;
        guest.awake = follows;
        guest.known.clone_from(&guest.on_disk);
        guest.rumours.clone_from(&guest.rumours_on_disk);
        guest.hearsay.clone_from(&guest.hearsay_on_disk);
        guest.alive = true;
        guest.boot = boot;
        note!(self, "guest {vm} boots");
        let after = self.rng.span(self.plan.vms[vm].think_ns);
        self.schedule.after(after, Event::Think { vm, boot });
        let sizes: Vec<_> = self.vms[vm].disks.iter().map(|disk| disk.size_bytes()).collect();
        for (disk, len_bytes) in (0..).map(DiskId).zip(sizes) {
            let extent = Extent { disk, offset: 0, len_bytes };
            self.ask(vm, Ask::Read { extent, expected: None, boots: true })?;
            self.plugs_again(vm, usize::from(disk.0))?;
        }
        Ok(())
    }

    /// A guest dies with all that it had under way.
    pub fn kill_guest(&mut self, vm: usize) {
        note!(self, "guest {vm} dies");
        let guest = &mut self.vms[vm].guest;
        guest.alive = false;
        guest.asked.clear();
        guest.busy_slots.clear();
        self.guest_leaves(vm);
    }

    /// True if a guest says anything: it has read its disks.
    #[must_use]
    pub fn is_awake(&self, vm: usize) -> bool {
        self.vms[vm].guest.awake
    }

    /// Guests begin new things again.
    pub(crate) fn guests_go_on(&mut self) {
        self.busy = true;
        for vm in 0..self.vms.len() {
            let boot = self.vms[vm].guest.boot;
            if self.vms[vm].guest.alive {
                let after = self.rng.span(self.plan.vms[vm].think_ns);
                self.schedule.after(after, Event::Think { vm, boot });
            }
        }
    }

    /// A guest does the next thing.
    pub fn think(&mut self, vm: usize, boot: Run) -> Checked {
        let guest = &self.vms[vm].guest;
        if !guest.alive || guest.boot != boot || !self.busy {
            return Ok(());
        }
        // While links are narrow guests write as much as was drawn: see `narrow`.
        let writes = self.squeeze.is_none();
        let full = self.is_at_depth(vm);
        // After the faults that may last long.
        let slow_factor = if writes || self.faulty { 1 } else { 8 };
        let after = self.rng.span(self.plan.vms[vm].think_ns) * slow_factor;
        self.schedule.after(after, Event::Think { vm, boot });
        if !self.is_awake(vm) {
            return Ok(());
        }
        let group = &self.plan.groups[self.plan.vms[vm].group];
        if group.has_several() && self.rng.chance(self.plan.lan.forged, 1000) {
            self.forge(vm)?;
        }
        match self.rng.weighted(&self.plan.vms[vm].weights) {
            5 => {
                let kind = self.draw_kind();
                self.send_packet(vm, None, kind)
            }
            6 => self.send_to_peer(vm),
            _ if full => Ok(()),
            0 | 1 | 4 if !writes => Ok(()),
            0 => self.begin_write(vm),
            1 => self.begin_zeroes(vm),
            2 => self.begin_read(vm),
            3 => {
                let disk = DiskId(self.rng.index(self.vms[vm].disks.len()) as u16);
                self.ask(vm, Ask::Flush { disk, row: None })
            }
            _ => self.begin_row(vm),
        }
    }

    /// Whether it has as much under way as it may.
    pub(crate) fn is_at_depth(&self, vm: usize) -> bool {
        let state = &self.vms[vm];
        let orphans = state.run.as_ref().map_or(0, crate::owner::MemberRun::open_writes);
        state.guest.asked.len().max(orphans) >= self.plan.vms[vm].queue_depth
    }

    fn draw_kind(&mut self) -> Kind {
        let flow = Flow(self.rng.below(3));
        match self.rng.below(8) {
            0 => Kind::PureAck { flow },
            1 => Kind::NeverHeld,
            2 => Kind::Data { flow: None },
            _ => Kind::Data { flow: Some(flow) },
        }
    }

    /// Somewhere before the ledger.
    fn draw_extent(&mut self, vm: usize) -> Extent {
        let disk = self.rng.index(self.vms[vm].disks.len());
        let Range { start, end } = self.draw_place(vm, disk);
        let size = end - start;
        // A small place where much happens, so that writes overlap.
        let size = if self.rng.chance(1, 2) { size.min(8 << 10) } else { size };
        let (offset, len) = if self.rng.chance(2, 3) {
            let sectors = size / SECTOR_BYTES;
            let at = self.rng.below(sectors);
            let most = if self.rng.chance(1, 16) { 64 } else { 8 };
            let len = self.rng.range(1..most + 1).min(sectors - at);
            (at * SECTOR_BYTES, len * SECTOR_BYTES)
        } else {
            let at = self.rng.below(size);
            (at, self.rng.range(1..1500).min(size - at))
        };
        Extent { disk: DiskId(disk as u16), offset: start + offset, len_bytes: len }
    }

    /// A disk, or its part before the ledger or behind it.
    fn draw_place(&mut self, vm: usize, disk: usize) -> Range<u64> {
        let size = self.vms[vm].disks[disk].size_bytes();
        let ledger = self.plan.vms[vm].ledger();
        match disk {
            0 if size > ledger.end && self.rng.chance(1, 3) => ledger.end..size,
            0 => 0..ledger.start,
            _ => 0..size,
        }
    }

    fn begin_write(&mut self, vm: usize) -> Checked {
        let extent = self.draw_extent(vm);
        let fill = self.rng.number();
        let mut data: Vec<u8> = Vec::with_capacity(extent.len_bytes as usize + 8);
        while data.len() < extent.len_bytes as usize {
            data.extend_from_slice(&fill.wrapping_add(data.len() as u64).to_le_bytes());
        }
        data.truncate(extent.len_bytes as usize);
        let effect = Effect::Write(Payload::new(Bytes::from(data)));
        let fua = self.rng.chance(1, 8);
        self.ask_write(vm, extent, effect, fua, None)
    }

    fn begin_zeroes(&mut self, vm: usize) -> Checked {
        let extent = self.draw_extent(vm);
        let no_hole = self.rng.chance(1, 2);
        let effect = Effect::Zero { len_bytes: extent.len_bytes as u32, no_hole };
        self.ask_write(vm, extent, effect, false, None)
    }

    fn begin_read(&mut self, vm: usize) -> Checked {
        let extent = self.draw_extent(vm);
        if self.vms[vm].clients.chance(8) {
            return self.ask(vm, Ask::Hint { extent });
        }
        let state = &self.vms[vm];
        let in_flight = state.guest.asked.values().any(|ask| match ask {
            Ask::Write { extent: other, .. } => other.overlaps(&extent),
            _ => false,
        });
        // A write of a guest that has died may still be under way, or lost with a daemon.
        let orphan = state.run.as_ref().is_none_or(|run| run.is_writing(extent));
        let stable = !in_flight && !orphan && !state.oracle.is_damaged(extent);
        let expected = stable.then(|| state.oracle.logical(extent).to_vec());
        self.ask(vm, Ask::Read { extent, expected, boots: false })
    }

    fn begin_row(&mut self, vm: usize) -> Checked {
        let slot = self.rng.below(self.plan.vms[vm].rows);
        let guest = &mut self.vms[vm].guest;
        if guest.busy_slots.contains(&slot) {
            return Ok(());
        }
        guest.busy_slots.push(slot);
        let version = guest.rows.entry(slot).or_insert(0);
        *version += 1;
        let row = Row { slot, version: *version };
        let extent = self.row_extent(vm, slot);
        let effect = Effect::Write(Payload::new(row_bytes(vm, row).into()));
        let fua = self.rng.chance(1, 4);
        self.ask_write(vm, extent, effect, fua, Some(row))
    }

    /// What a guest writes because of what it has heard.
    pub fn begin_row_or_write(&mut self, vm: usize) -> Checked {
        if self.squeeze.is_some() || self.is_at_depth(vm) {
            return Ok(());
        }
        if self.rng.chance(1, 2) { self.begin_row(vm) } else { self.begin_write(vm) }
    }

    pub(crate) fn ask_write(
        &mut self,
        vm: usize,
        extent: Extent,
        effect: Effect,
        fua: bool,
        row: Option<Row>,
    ) -> Checked {
        let (known, _) = self.known_and_rumours(vm);
        self.ask(vm, Ask::Write { extent, effect, fua, row, known })
    }

    /// Where a row is.
    #[must_use]
    pub fn row_extent(&self, vm: usize, slot: u64) -> Extent {
        let offset = self.plan.vms[vm].ledger().start + slot * ROW_BYTES;
        Extent { disk: DiskId(0), offset, len_bytes: ROW_BYTES }
    }

    fn ask(&mut self, vm: usize, ask: Ask) -> Checked {
        let guest = &mut self.vms[vm].guest;
        if let Ask::Write { extent, .. } = &ask {
            for other in guest.asked.values_mut() {
                // Which of the two it returns is open now.
                if let Ask::Read { extent: read, expected, .. } = other
                    && read.overlaps(extent)
                {
                    *expected = None;
                }
            }
        }
        guest.next += 1;
        let request = guest.next;
        guest.asked.insert(request, ask);
        self.sends_request(vm, request)
    }

    /// A write has ended, as the guest sees it.
    pub fn guest_write_done(&mut self, vm: usize, request: u64, ok: bool, point: Point) -> Checked {
        let writer = usize::from(self.plan.vms[vm].writer);
        let guest = &mut self.vms[vm].guest;
        guest.known[writer] = guest.known[writer].max(point);
        let Some(Ask::Write { extent, fua, row, .. }) = guest.asked.remove(&request) else {
            return Ok(());
        };
        self.counts.writes += 1;
        if let Some(row) = row {
            if !ok {
                self.vms[vm].guest.busy_slots.retain(|s| *s != row.slot);
            } else if fua {
                self.row_is_safe(vm, row)?;
            } else {
                self.ask(vm, Ask::Flush { disk: extent.disk, row: Some(row) })?;
            }
        }
        // A guest answers on another processor at once: what it sends may be taken up before
        // whoever completed the write does anything else.
        if self.busy && self.vms[vm].guest.alive && self.rng.chance(1, 4) {
            self.send_packet(vm, None, Kind::Data { flow: None })?;
            self.gate_turn(vm)?;
        }
        Ok(())
    }

    fn row_is_safe(&mut self, vm: usize, row: Row) -> Checked {
        self.vms[vm].guest.busy_slots.retain(|s| *s != row.slot);
        let kind = Kind::Data { flow: Some(Flow(row.slot % 3)) };
        self.send_packet(vm, Some(row), kind)
    }

    /// A flush has ended, as the guest sees it.
    pub fn guest_flush_done(&mut self, vm: usize, request: u64, ok: bool) -> Checked {
        let Some(Ask::Flush { row, .. }) = self.vms[vm].guest.asked.remove(&request) else {
            return Ok(());
        };
        match row {
            Some(row) if ok => self.row_is_safe(vm, row),
            Some(row) => {
                self.vms[vm].guest.busy_slots.retain(|s| *s != row.slot);
                Ok(())
            }
            None => Ok(()),
        }
    }

    /// A read has ended, as the guest sees it.
    pub fn guest_read_done(&mut self, vm: usize, request: u64, data: Option<&[u8]>) -> Checked {
        let guest = &mut self.vms[vm].guest;
        let Some(Ask::Read { extent, expected, boots }) = guest.asked.remove(&request) else {
            return Ok(());
        };
        if boots {
            if data.is_none() {
                return self.ask(vm, Ask::Read { extent, expected, boots });
            }
            let is_boot = |ask: &Ask| matches!(ask, Ask::Read { boots: true, .. });
            guest.awake = !guest.asked.values().any(is_boot);
        }
        let (Some(expected), Some(data)) = (expected, data) else { return Ok(()) };
        check(expected == data, Checker::ReadOwnWrites, || {
            format!("guest {vm} reads something else at {extent:?} than it wrote")
        })
    }

    /// What P names of that which a guest knows, and what it has heard besides. Once P is complete it
    /// names all that may be in rumours.
    pub fn known_and_rumours(&mut self, vm: usize) -> (Known, Known) {
        self.notice_question(vm);
        let state = &mut self.vms[vm];
        let guest = &mut state.guest;
        if state.pending.incomplete().is_none() {
            guest.known = guest.everything();
            guest.rumours.fill(Point::default());
        }
        let mut rumours = guest.rumours.clone();
        learn(&mut rumours, &guest.hearsay);
        (guest.known.clone(), rumours)
    }

    /// A guest sends a packet to a client.
    pub fn send_packet(&mut self, vm: usize, row: Option<Row>, kind: Kind) -> Checked {
        let frame = self.frame(Node::Vm(vm), Node::Client, kind, Room::Enough);
        let packet = self.packet(vm, row, kind, None, frame);
        // Neighbour discovery is the queue's business.
        if kind == Kind::NeverHeld {
            return self.queue_packet(vm, packet);
        }
        match self.judged_by_programs(vm, &packet.frame) {
            // The rules queue all that leaves an interface without programs.
            None => self.queue_packet(vm, packet),
            Some(ran) => self.sends_without_tag(vm, packet, &ran),
        }
    }

    /// A packet that no tag answers for.
    pub(crate) fn packet(
        &mut self,
        vm: usize,
        row: Option<Row>,
        kind: Kind,
        to: Option<usize>,
        frame: Vec<u8>,
    ) -> Packet {
        self.notice_question(vm);
        let guest = &self.vms[vm].guest;
        let (known, hearsay) = (guest.everything(), guest.hearsay.clone());
        Packet { known, row, kind, to, hearsay, frame }
    }

    /// A packet comes to the kernel's queue.
    pub fn queue_packet(&mut self, vm: usize, packet: Packet) -> Checked {
        // Fail closed: while no daemon runs, the rules drop it.
        let Some(run) = &self.vms[vm].run else { return Ok(()) };
        if run.gate.queue(vm, packet, self.plan.vms[vm].gate_capacity) {
            self.gate_looks(vm, 300 * US);
        }
        Ok(())
    }

    /// How long a guest that died is away.
    pub fn draw_reboot_ns(&mut self) -> u64 {
        self.rng.range(10 * MS..800 * MS)
    }
}
