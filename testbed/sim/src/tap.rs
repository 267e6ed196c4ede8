//! Guests as NBD clients of production's tap: bytes that come in pieces and late, connections that break within a
//! request or a reply, and clients that connect again and ask again what was not answered, as QEMU does.
//!
//! The checker ([`Checker::Tap`]): what the tap gives to the loop is what the guest has asked, a reply comes once and
//! after the loop has answered, and what was to be on stable storage by then is there.

use crate::disk::SECTOR_BYTES;
use crate::failure::{Checked, Checker, check, fail};
use crate::guest::Ask;
use crate::nbd::{Heard, NbdClient, Style};
use crate::oracle::Point;
use crate::owner::{MemberRun, OtherRequest, Submitted};
use crate::ring::{Receiving, SimFd, SimSocket};
use crate::rng::Rng;
use crate::schedule::{MS, US};
use crate::world::{Event, World, note};
use bytes::{Bytes, BytesMut};
use std::cell::Cell;
use std::collections::BTreeMap;
use std::io;
use std::rc::Rc;
use tidelock_daemon::driver;
use tidelock_daemon::nbd_tap::{ConnectionId, Limits};
use tidelock_daemon_core::owner::driver::{GuestIo, GuestOp};
use tidelock_daemon_core::sequencer::Extent;
use tidelock_nbd::wire::{cmd, cmd_flag};
use tidelock_protocol::ids::DiskId;
use tidelock_protocol::record::Effect;
use tidelock_uring::{Buffer, Completion, SendBufs};

/// Bounds of the tap: small, so that they are reached.
pub(crate) const LIMITS: Limits =
    Limits { requests_max: 6, bytes_max: 256 << 10, staging_bytes: 4 << 10 };
/// So many transfers come in two pieces.
const LATE_ONE_IN: u64 = 24;
/// The delay of the second one, about.
const LATE_NS: u64 = 300 * US;
/// So many transfers of several bytes end short.
const SHORT_ONE_IN: u64 = 32;
/// While there are faults, a connection breaks within so many transfers.
const CUT_ONE_IN: u64 = 600;
/// A client whose connection has ended connects again after about this time.
const AGAIN_NS: u64 = 2 * MS;
/// The same if it had not got the disk.
const REFUSED_NS: u64 = 40 * MS;

/// A guest's way to one of its disks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Plug {
    /// Connects as soon as somebody accepts.
    #[default]
    Away,
    /// Waits before it connects again.
    Resting,
    /// Has this connection.
    At(u64),
}

/// The clients of one VM's disks.
#[derive(Debug)]
pub(crate) struct Clients {
    rng: Rng,
    connected: u64,
    plugs: BTreeMap<usize, Plug>,
    wires: BTreeMap<u64, Wire>,
}

impl Clients {
    pub(crate) fn new(rng: Rng) -> Self {
        Self { rng, connected: 0, plugs: BTreeMap::new(), wires: BTreeMap::new() }
    }

    fn plug(&mut self, disk: usize) -> &mut Plug {
        self.plugs.entry(disk).or_default()
    }

    /// Chance.
    pub(crate) fn rng(&mut self) -> &mut Rng {
        &mut self.rng
    }

    /// The number of the next connection.
    pub(crate) fn next_number(&self) -> u64 {
        self.connected + 1
    }

    /// True in one of so many cases.
    pub(crate) fn chance(&mut self, one_in: u64) -> bool {
        self.rng.chance(1, one_in)
    }
}

/// A connection.
#[derive(Debug)]
struct Wire {
    disk: usize,
    /// Keeper of the protocol at the client's end; a liar has nothing of the kind.
    client: Option<NbdClient>,
    /// The tap's end. If nobody but this has it, the tap has closed it.
    socket: Rc<SimSocket>,
    /// Bytes at the tap's end.
    up: BytesMut,
    /// Bytes on their way there.
    up_late: BytesMut,
    /// Bytes on their way to the client.
    down_late: BytesMut,
    receiving: Option<Receiving>,
    /// A send to a client that does not read.
    stuck: Option<(u64, SendBufs)>,
    /// The client is gone.
    is_left: bool,
    /// The tap may know that: the client's last bytes are followed by the end of the stream.
    is_ended: bool,
    /// The tap is gone.
    is_closed: bool,
    /// Requests without a reply.
    asked: BTreeMap<u64, Ask>,
    /// The loop's answers whose replies have not come.
    answers: BTreeMap<u64, (bool, Point)>,
}

impl World {
    // ---- connections

    /// The tap accepts one client of a disk.
    pub(crate) fn accepts(&mut self, vm: usize, token: u64, disk: usize) -> Checked {
        self.vms[vm].run.as_mut().expect("runs").accepting.insert(disk, token);
        self.plug_in(vm, disk)
    }

    /// A guest that boots, or whose connection has ended, connects.
    pub(crate) fn plug_in(&mut self, vm: usize, disk: usize) -> Checked {
        let state = &mut self.vms[vm];
        if !state.guest.alive || *state.clients.plug(disk) != Plug::Away {
            return Ok(());
        }
        let Some(token) = self.next_accept(vm, disk) else { return Ok(()) };
        let clients = &mut self.vms[vm].clients;
        let style = *clients.rng.pick(&[Style::Old, Style::Simple, Style::Structured]);
        let number = clients.next_number();
        *clients.plug(disk) = Plug::At(number);
        let client = NbdClient::new(format!("d{disk}"), style);
        self.connects(vm, disk, token, Some(client))
    }

    /// The accept of a disk that is under way, which is about to end.
    pub(crate) fn next_accept(&mut self, vm: usize, disk: usize) -> Option<u64> {
        let run = self.vms[vm].run.as_mut().filter(|run| run.serves())?;
        run.accepting.remove(&disk)
    }

    pub(crate) fn connects(
        &mut self,
        vm: usize,
        disk: usize,
        token: u64,
        client: Option<NbdClient>,
    ) -> Checked {
        let clients = &mut self.vms[vm].clients;
        clients.connected += 1;
        let number = clients.connected;
        let socket = Rc::new(SimSocket { number, has_hung_up: Cell::new(false) });
        let wire = Wire {
            disk,
            client,
            socket: socket.clone(),
            up: BytesMut::new(),
            up_late: BytesMut::new(),
            down_late: BytesMut::new(),
            receiving: None,
            stuck: None,
            is_left: false,
            is_ended: false,
            is_closed: false,
            asked: BTreeMap::new(),
            answers: BTreeMap::new(),
        };
        clients.wires.insert(number, wire);
        self.ring_ends(vm, token, Ok(0), Buffer::Fd(SimFd::Client(socket)))
    }

    /// A guest has waited before it connects again.
    pub(crate) fn plugs_again(&mut self, vm: usize, disk: usize) -> Checked {
        let plug = self.vms[vm].clients.plug(disk);
        if *plug == Plug::Resting {
            *plug = Plug::Away;
        }
        self.plug_in(vm, disk)
    }

    /// The loop goes on: what has come meanwhile is there.
    pub(crate) fn clients_go_on(&mut self, vm: usize) -> Checked {
        (0..self.vms[vm].disks.len()).try_for_each(|disk| self.plug_in(vm, disk))?;
        let wires: Vec<_> = self.vms[vm].clients.wires.keys().copied().collect();
        wires.into_iter().try_for_each(|number| self.arrives_at_tap(vm, number))
    }

    /// A connection breaks, or its client dies.
    pub(crate) fn leaves(&mut self, vm: usize, number: u64) {
        let Clients { rng, wires, plugs, .. } = &mut self.vms[vm].clients;
        let Some(wire) = wires.get_mut(&number).filter(|wire| !wire.is_left) else { return };
        wire.is_left = true;
        wire.socket.has_hung_up.set(true);
        // The tap may hear of it after the client has come again.
        let (disk, heard) = (wire.disk, rng.span(LATE_NS));
        self.schedule.after(heard, Event::Wire { vm, number });
        if plugs.get(&disk) == Some(&Plug::At(number)) {
            plugs.insert(disk, Plug::Resting);
            let had_it = wire.client.as_ref().is_some_and(NbdClient::is_open);
            let again = rng.span(if had_it { AGAIN_NS } else { REFUSED_NS });
            self.schedule.after(again, Event::Plug { vm, disk });
        }
    }

    /// A guest dies.
    pub(crate) fn guest_leaves(&mut self, vm: usize) {
        let wires: Vec<_> = self.vms[vm].clients.wires.keys().copied().collect();
        wires.into_iter().for_each(|number| self.leaves(vm, number));
    }

    /// Connections that the tap has closed.
    pub(crate) fn notice_closed(&mut self, vm: usize) {
        let wires = &self.vms[vm].clients.wires;
        let is_closed = |wire: &Wire| !wire.is_closed && Rc::strong_count(&wire.socket) == 1;
        let closed = wires.iter().filter(|(_, wire)| is_closed(wire));
        let closed: Vec<_> = closed.map(|(number, _)| *number).collect();
        closed.into_iter().for_each(|number| self.is_closed(vm, number));
    }

    /// A process has ended, with its ends of all connections.
    pub(crate) fn all_closed(&mut self, vm: usize) {
        let wires: Vec<_> = self.vms[vm].clients.wires.keys().copied().collect();
        wires.into_iter().for_each(|number| self.is_closed(vm, number));
    }

    /// The tap has closed its end. The client hears of it when it has all that was sent.
    fn is_closed(&mut self, vm: usize, number: u64) {
        let wires = &mut self.vms[vm].clients.wires;
        let Some(wire) = wires.get_mut(&number) else { return };
        (wire.is_closed, wire.receiving) = (true, None);
        if wire.is_left || wire.down_late.is_empty() {
            self.leaves(vm, number);
            self.vms[vm].clients.wires.remove(&number);
        }
    }

    /// Bytes on their way arrive.
    pub(crate) fn wire_event(&mut self, vm: usize, number: u64) -> Checked {
        let Some(wire) = self.vms[vm].clients.wires.get_mut(&number) else { return Ok(()) };
        let (up, down) = (wire.up_late.split(), wire.down_late.split());
        wire.up.extend_from_slice(&up);
        wire.is_ended = wire.is_left;
        self.arrives_at_client(vm, number, &down)?;
        if self.vms[vm].clients.wires.get(&number).is_some_and(|wire| wire.is_closed) {
            self.is_closed(vm, number);
            return Ok(());
        }
        self.arrives_at_tap(vm, number)
    }

    // ---- bytes

    /// An operation of the ring has ended.
    pub(crate) fn ring_ends(
        &mut self,
        vm: usize,
        token: u64,
        result: io::Result<u32>,
        buffer: Buffer<SimFd>,
    ) -> Checked {
        let completion = Completion { token, result, buffer };
        self.with_owner(vm, |owner| driver::completed(owner, completion));
        self.owner_turn(vm)
    }

    /// Bytes of a client leave.
    fn client_says(&mut self, vm: usize, number: u64) -> Checked {
        let wire = self.vms[vm].clients.wires.get_mut(&number);
        let client = wire.and_then(|wire| wire.client.as_mut());
        let bytes = client.map(|client| client.output.split()).unwrap_or_default();
        self.bytes_leave(vm, number, &bytes)
    }

    /// Bytes leave a client.
    pub(crate) fn bytes_leave(&mut self, vm: usize, number: u64, bytes: &[u8]) -> Checked {
        let may_cut = self.faulty;
        let Clients { rng, wires, .. } = &mut self.vms[vm].clients;
        let Some(wire) = wires.get_mut(&number).filter(|wire| !wire.is_left) else {
            return Ok(());
        };
        if bytes.is_empty() {
            return Ok(());
        }
        let is_cut = may_cut && rng.chance(1, CUT_ONE_IN);
        let is_late = is_cut || !wire.up_late.is_empty() || rng.chance(1, LATE_ONE_IN);
        let at_once = match is_late {
            false => bytes.len(),
            true if wire.up_late.is_empty() => rng.index(bytes.len() + 1),
            true => 0,
        };
        wire.up.extend_from_slice(&bytes[..at_once]);
        if is_cut {
            note!(self, "vm {vm}: connection {number} breaks after {at_once} of {}", bytes.len());
            self.leaves(vm, number);
        } else if is_late {
            wire.up_late.extend_from_slice(&bytes[at_once..]);
            let after = rng.span(LATE_NS);
            self.schedule.after(after, Event::Wire { vm, number });
        }
        self.arrives_at_tap(vm, number)
    }

    /// The tap wants to receive.
    pub(crate) fn receives(&mut self, vm: usize, number: u64, receiving: Receiving) -> Checked {
        let state = &mut self.vms[vm];
        let run = state.run.as_mut().expect("runs");
        run.connections.insert(connection_of(receiving.token), number);
        let Some(wire) = state.clients.wires.get_mut(&number) else { return Ok(()) };
        wire.receiving = Some(receiving);
        self.arrives_at_tap(vm, number)
    }

    /// Bytes are at the tap's end, or the end of the stream.
    fn arrives_at_tap(&mut self, vm: usize, number: u64) -> Checked {
        let state = &mut self.vms[vm];
        let Clients { rng, wires, .. } = &mut state.clients;
        let Some(wire) = wires.get_mut(&number) else { return Ok(()) };
        let (is_end, here) = (wire.is_ended, wire.up.len());
        let is_enough = |of: &mut Receiving| {
            let enough = if of.all { of.range.len() } else { 1 };
            here >= enough || is_end
        };
        if !state.run.as_ref().is_some_and(MemberRun::serves) {
            return Ok(());
        }
        if let Some((token, bufs)) = wire.stuck.take_if(|_| is_end) {
            let gone = Err(io::ErrorKind::BrokenPipe.into());
            self.ring_ends(vm, token, gone, Buffer::Many(bufs))?;
            return self.arrives_at_tap(vm, number);
        }
        let Some(receiving) = wire.receiving.take_if(is_enough) else { return Ok(()) };
        let Receiving { token, mut buf, range, .. } = receiving;
        let count = short(rng, here.min(range.len()));
        buf.set_len(range.start);
        buf.extend_from_slice(&wire.up.split_to(count));
        self.ring_ends(vm, token, Ok(count as u32), Buffer::Aligned(buf))
    }

    /// The tap sends.
    pub(crate) fn sends(&mut self, vm: usize, number: u64, token: u64, bufs: SendBufs) -> Checked {
        let may_cut = self.faulty;
        let Clients { rng, wires, .. } = &mut self.vms[vm].clients;
        let Some(wire) = wires.get_mut(&number).filter(|wire| !wire.is_left) else {
            let gone = Err(io::ErrorKind::BrokenPipe.into());
            return self.ring_ends(vm, token, gone, Buffer::Many(bufs));
        };
        if wire.client.is_none() {
            wire.stuck = Some((token, bufs));
            return Ok(());
        }
        let mut bytes: BytesMut = BytesMut::new();
        bufs.iter().for_each(|part| bytes.extend_from_slice(part));
        let count = short(rng, bytes.len());
        bytes.truncate(count);
        let is_cut = may_cut && rng.chance(1, CUT_ONE_IN);
        let is_late = is_cut || !wire.down_late.is_empty() || rng.chance(1, LATE_ONE_IN);
        let at_once = match is_late {
            false => count,
            true if wire.down_late.is_empty() => rng.index(count + 1),
            true => 0,
        };
        let late = bytes.split_off(at_once);
        if is_late && !is_cut {
            wire.down_late.extend_from_slice(&late);
            let after = rng.span(LATE_NS);
            self.schedule.after(after, Event::Wire { vm, number });
        }
        self.arrives_at_client(vm, number, &bytes)?;
        if is_cut {
            note!(self, "vm {vm}: connection {number} breaks after {at_once} of {count} to it");
            self.leaves(vm, number);
        }
        self.ring_ends(vm, token, Ok(count as u32), Buffer::Many(bufs))
    }

    fn arrives_at_client(&mut self, vm: usize, number: u64, bytes: &[u8]) -> Checked {
        let mut new = Some(bytes);
        loop {
            let wires = &mut self.vms[vm].clients.wires;
            let wire = wires.get_mut(&number).filter(|wire| !wire.is_left);
            let Some(client) = wire.and_then(|wire| wire.client.as_mut()) else { return Ok(()) };
            if let Some(bytes) = new.take() {
                client.hear(bytes);
            }
            match client.next() {
                Ok(Some(Heard::Opened)) => self.opened(vm, number)?,
                Ok(Some(Heard::Refused)) => self.leaves(vm, number),
                Ok(Some(Heard::Reply(cookie, answer))) => {
                    self.replied(vm, number, cookie, answer)?;
                }
                Ok(None) => return self.client_says(vm, number),
                Err(why) => return fail(Checker::Tap, format!("vm {vm}: {why}")),
            }
        }
    }

    // ---- requests

    /// A guest has a disk: it asks what was not answered.
    fn opened(&mut self, vm: usize, number: u64) -> Checked {
        let state = &mut self.vms[vm];
        let Some(wire) = state.clients.wires.get_mut(&number) else { return Ok(()) };
        let disk = DiskId(wire.disk as u16);
        for (cookie, ask) in state.guest.asked.iter().filter(|(_, ask)| ask.disk() == disk) {
            wire.asks(*cookie, ask);
        }
        self.client_says(vm, number)
    }

    /// A guest asks, now if it has a connection.
    pub(crate) fn sends_request(&mut self, vm: usize, cookie: u64) -> Checked {
        let state = &mut self.vms[vm];
        let ask = &state.guest.asked[&cookie];
        let plug = *state.clients.plug(usize::from(ask.disk().0));
        let Plug::At(number) = plug else { return Ok(()) };
        if let Some(wire) = state.clients.wires.get_mut(&number) {
            wire.asks(cookie, ask);
        }
        self.client_says(vm, number)
    }

    /// A reply has come to a guest.
    fn replied(
        &mut self,
        vm: usize,
        number: u64,
        cookie: u64,
        answer: Result<Bytes, u32>,
    ) -> Checked {
        let wire = self.vms[vm].clients.wires.get_mut(&number).expect("the caller has it");
        let Some(ask) = wire.asked.remove(&cookie) else {
            return fail(Checker::Tap, format!("vm {vm}: a reply to {cookie}, which has one"));
        };
        let answered = wire.answers.remove(&cookie);
        if let Ask::Hint { .. } = ask {
            self.vms[vm].guest.asked.remove(&cookie);
            return Ok(());
        }
        let Some((_, point)) = answered.filter(|(ok, _)| *ok == answer.is_ok()) else {
            return fail(
                Checker::Tap,
                format!("vm {vm}: a reply to {cookie}, {answer:?}; the loop says {answered:?}"),
            );
        };
        match ask {
            Ask::Write { .. } => self.guest_write_done(vm, cookie, answer.is_ok(), point),
            Ask::Flush { .. } => self.guest_flush_done(vm, cookie, answer.is_ok()),
            Ask::Read { .. } => self.guest_read_done(vm, cookie, answer.ok().as_deref()),
            Ask::Hint { .. } => unreachable!("seen above"),
        }
    }

    /// The tap has taken a request, and gives it to the loop.
    pub(crate) fn taken(
        &mut self,
        vm: usize,
        request: GuestIo,
        connection: ConnectionId,
        cookie: u64,
    ) -> Checked {
        let state = &mut self.vms[vm];
        let run = state.run.as_mut().expect("runs");
        let number = run.connections[&connection];
        let GuestIo { id, extent, op } = request;
        let wire = state.clients.wires.get(&number);
        let is_liar = wire.is_none_or(|wire| wire.client.is_none());
        let ask = wire.and_then(|wire| wire.asked.get(&cookie));
        // Data that a liar asks for in order is read, or made stable.
        let is_right = match ask {
            Some(ask) => ask.is(extent, &op),
            None => is_liar && matches!(op, GuestOp::Read | GuestOp::Flush),
        };
        check(is_right, Checker::Tap, || {
            format!("vm {vm}: {ask:?} was asked, and {op:?} of {extent:?} is taken")
        })?;
        let from = (number, cookie);
        if let Some(Ask::Write { known, fua, .. }) = ask {
            let data = match &op {
                GuestOp::Write { data, .. } => Some(data.data().as_ptr()),
                _ => None,
            };
            let submitted = Submitted {
                nth: run.taken,
                extent,
                data,
                seq: None,
                repair: None,
                failed: false,
                known: known.clone(),
                from,
                fua: *fua,
                written: None,
            };
            run.taken += 1;
            run.submitted.insert(id, submitted);
        } else {
            let disk = &state.disks[usize::from(extent.disk.0)];
            let unsynced = match op {
                GuestOp::Flush => disk.writes_unsynced().collect(),
                _ => Vec::new(),
            };
            run.others.insert(id, OtherRequest { from, extent, unsynced });
        }
        self.check_limits(vm, number)
    }

    /// Rule 10: what one client has under way.
    fn check_limits(&self, vm: usize, number: u64) -> Checked {
        let run = self.vms[vm].run.as_ref().expect("runs");
        let writes = run.submitted.values().map(|of| (of.from, of.data.map(|_| of.extent)));
        let others = run.others.values().map(|of| (of.from, Some(of.extent)));
        let open = writes.chain(others).filter(|((of, _), _)| *of == number);
        let bytes = open.clone().map(|(_, extent)| extent.map_or(0, |extent| extent.len_bytes));
        let (count, bytes, last) =
            (open.count(), bytes.clone().sum::<u64>(), bytes.max().unwrap_or(0));
        let holds = count <= LIMITS.requests_max && bytes <= LIMITS.bytes_max as u64 + last;
        check(holds, Checker::Bounded, || {
            format!("vm {vm}: a client has {count} requests of {bytes} bytes under way")
        })
    }

    /// The loop has answered a read, or a flush.
    pub(crate) fn other_answered(&mut self, vm: usize, of: OtherRequest, ok: bool) -> Checked {
        let disk = &self.vms[vm].disks[usize::from(of.extent.disk.0)];
        let is_synced = |write: &(u64, u64)| !disk.writes_unsynced().any(|other| other == *write);
        let holds = !ok || of.unsynced.iter().all(is_synced);
        check(holds, Checker::Tap, || {
            format!("vm {vm}: a flush is answered, and what was written before is not stable")
        })?;
        self.reply_is_due(vm, of.from, ok, Point::default());
        Ok(())
    }

    /// Data that was to be on stable storage when the write is answered is there.
    pub(crate) fn check_fua(&self, vm: usize, of: &Submitted) -> Checked {
        let Some(written) = of.written.filter(|_| of.fua) else { return Ok(()) };
        let disk = &self.vms[vm].disks[usize::from(of.extent.disk.0)];
        let block = of.extent.aligned_to(SECTOR_BYTES);
        let sectors = block.offset / SECTOR_BYTES..block.end() / SECTOR_BYTES;
        let mut unsynced = disk.writes_unsynced();
        let lost = unsynced.find(|(at, write)| sectors.contains(at) && *write <= written);
        check(lost.is_none(), Checker::Tap, || {
            format!("vm {vm}: a write of {:?} with FUA is answered before it is stable", of.extent)
        })
    }

    /// The loop has answered a request.
    pub(crate) fn reply_is_due(&mut self, vm: usize, from: (u64, u64), ok: bool, point: Point) {
        let (number, cookie) = from;
        if let Some(wire) = self.vms[vm].clients.wires.get_mut(&number) {
            wire.answers.insert(cookie, (ok, point));
        }
    }
}

impl Wire {
    /// Sends a request, if the disk is open. That of one cookie is always the same.
    fn asks(&mut self, cookie: u64, ask: &Ask) {
        let Some(client) = self.client.as_mut().filter(|client| client.is_open()) else { return };
        let flag = |on: bool, flag: u16| if on { flag } else { 0 };
        let Extent { offset, len_bytes, .. } = ask.extent();
        let (flags, command, data) = match ask {
            Ask::Write { effect: Effect::Write(data), fua, .. } => {
                (flag(*fua, cmd_flag::FUA), cmd::WRITE, data.data().clone())
            }
            Ask::Write { effect: Effect::Zero { no_hole, .. }, fua, .. } => {
                let fua = flag(*fua, cmd_flag::FUA);
                match (*no_hole, cookie % 4) {
                    (false, 0) => (fua, cmd::TRIM, Bytes::new()),
                    (no_hole, of_four) => {
                        let fast = flag(of_four == 1, cmd_flag::FAST_ZERO);
                        let no_hole = flag(no_hole, cmd_flag::NO_HOLE);
                        (fua | fast | no_hole, cmd::WRITE_ZEROES, Bytes::new())
                    }
                }
            }
            Ask::Write { .. } => unreachable!("no guest's"),
            Ask::Read { .. } => (0, cmd::READ, Bytes::new()),
            Ask::Flush { .. } => (0, cmd::FLUSH, Bytes::new()),
            Ask::Hint { .. } if client.has_block_status() => (0, cmd::BLOCK_STATUS, Bytes::new()),
            Ask::Hint { .. } => (0, cmd::CACHE, Bytes::new()),
        };
        client.request(flags, command, cookie, offset, len_bytes as u32, &data);
        self.asked.insert(cookie, ask.clone());
    }
}

impl Ask {
    pub(crate) fn extent(&self) -> Extent {
        match self {
            Ask::Write { extent, .. } | Ask::Read { extent, .. } | Ask::Hint { extent } => *extent,
            Ask::Flush { disk, .. } => Extent { disk: *disk, offset: 0, len_bytes: 0 },
        }
    }

    pub(crate) fn disk(&self) -> DiskId {
        self.extent().disk
    }

    /// True if the loop is asked for this.
    fn is(&self, extent: Extent, op: &GuestOp) -> bool {
        let is_same = match (self, op) {
            (
                Ask::Write { effect: Effect::Write(data), fua, .. },
                GuestOp::Write { data: taken, fua: is_fua },
            ) => data.data() == taken.data() && fua == is_fua,
            (
                Ask::Write { effect: Effect::Zero { no_hole, .. }, fua, .. },
                GuestOp::Zero { no_hole: has_no_hole, fua: is_fua, .. },
            ) => no_hole == has_no_hole && fua == is_fua,
            (
                Ask::Write { effect: Effect::Zero { no_hole: false, .. }, fua, .. },
                GuestOp::Discard { fua: is_fua },
            ) => fua == is_fua,
            (Ask::Read { .. }, GuestOp::Read) | (Ask::Flush { .. }, GuestOp::Flush) => true,
            _ => false,
        };
        is_same && self.extent() == extent
    }
}

/// The part of a transfer that is done at once.
fn short(rng: &mut Rng, count: usize) -> usize {
    match count {
        2.. if rng.chance(1, SHORT_ONE_IN) => 1 + rng.index(count - 1),
        _ => count,
    }
}

fn connection_of(token: u64) -> ConnectionId {
    match driver::token::Token::from_u64(token) {
        driver::token::Token::Receive(id) => id,
        other => panic!("{other:?} is no receive"),
    }
}
