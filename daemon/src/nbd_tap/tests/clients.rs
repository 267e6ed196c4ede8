//! Clients that open a disk and ask, over sockets whose bytes the test moves.

use super::*;
use bytes::{Buf, BufMut};
use std::collections::BTreeSet;
use tidelock_nbd::wire::{OPTION_MAGIC, REQUEST_MAGIC, SIMPLE_REPLY_MAGIC, cmd, cmd_flag, option};

const DISK_BYTES: u64 = 1 << 20;
const BLOCK: usize = 512;

/// Sockets as the tap has used them.
#[derive(Debug, Default)]
struct Sockets {
    accepts: Vec<usize>,
    receives: BTreeMap<ConnectionId, (AlignedBuf, Range<usize>, bool)>,
    sends: Vec<(ConnectionId, SendBufs)>,
    /// Clients that have closed their ends.
    gone: BTreeSet<u64>,
    hung_up: Vec<u64>,
    looks: usize,
}

impl Network for Sockets {
    type Socket = u64;

    fn accept(&mut self, disk: usize) {
        self.accepts.push(disk);
    }

    fn receive(
        &mut self,
        id: ConnectionId,
        _: &u64,
        buf: AlignedBuf,
        range: Range<usize>,
        all: bool,
    ) {
        assert!(self.receives.insert(id, (buf, range, all)).is_none(), "one at a time");
    }

    fn send(&mut self, id: ConnectionId, _: &u64, bufs: SendBufs) {
        assert!(self.sends.iter().all(|(of, _)| *of != id), "one at a time");
        self.sends.push((id, bufs));
    }

    fn look_after(&mut self, _: Duration) {
        self.looks += 1;
    }

    fn has_hung_up(&self, socket: &u64) -> bool {
        self.gone.contains(socket)
    }

    fn hang_up(&mut self, socket: u64) {
        self.hung_up.push(socket);
    }
}

/// A tap of one disk, and its clients' sockets, which have the numbers of their connections.
struct Tapped {
    tap: NbdTap<u64, NoFile>,
    net: Sockets,
    stats: Arc<OwnerStats>,
}

impl Tapped {
    fn new(connections: usize, limits: Limits) -> Self {
        let spec = DiskSpec { id: DiskId(3), name: "root".into(), size_bytes: DISK_BYTES };
        let disk = TapDisk::new(spec, NoFile::default(), BLOCK as u32, connections).unwrap();
        let (pool, stats) = (BufPool::new(0), Arc::<OwnerStats>::default());
        let tap = NbdTap::new("web".into(), vec![disk], pool, limits, stats.clone(), MonoNanos(1));
        let mut of = Self { tap, net: Sockets::default(), stats };
        of.tap.set_taking(&mut of.net, Taking::All);
        of
    }

    /// A client that has opened the disk; or was refused.
    fn client(&mut self, socket: u64) -> (ConnectionId, bool) {
        self.tap.accepted(&mut self.net, 0, Ok(Some(socket)));
        let id = ConnectionId(socket);
        self.flush();
        let mut opening = 3u32.to_be_bytes().to_vec();
        opening.put_u64(OPTION_MAGIC);
        opening.put_u32(option::GO);
        opening.put_u32(4 + 4 + 2);
        opening.put_u32(4);
        opening.put_slice(b"root");
        opening.put_u16(0);
        assert!(self.arrives(id, &opening).is_empty());
        let answer = self.flush();
        let ack = [&option::GO.to_be_bytes()[..], &1u32.to_be_bytes(), &[0; 4]].concat();
        (id, answer.ends_with(&ack))
    }

    /// Bytes arrive. Returns those that stay in the socket.
    fn arrives(&mut self, id: ConnectionId, mut bytes: &[u8]) -> Vec<u8> {
        while !bytes.is_empty() {
            let Some((mut buf, range, all)) = self.net.receives.remove(&id) else { break };
            let count = bytes.len().min(range.len());
            assert!(!all || count == range.len(), "the test sends data as a whole");
            buf.set_len(range.start);
            buf.extend_from_slice(&bytes[..count]);
            bytes.advance(count);
            self.tap.received(&mut self.net, id, Ok(count as u32), buf);
        }
        bytes.to_vec()
    }

    fn asks(&mut self, id: ConnectionId, request: &[u8]) {
        assert!(self.arrives(id, request).is_empty());
    }

    /// Sends until nothing is left to send. Returns it.
    fn flush(&mut self) -> Vec<u8> {
        let mut sent = Vec::new();
        self.tap.send_replies(&mut self.net);
        while let Some((id, bufs)) = self.net.sends.pop() {
            let count: usize = bufs.iter().map(|buf| buf.len()).sum();
            bufs.iter().for_each(|buf| sent.extend_from_slice(buf));
            self.tap.sent(id, Ok(count as u32), bufs);
            self.tap.send_replies(&mut self.net);
        }
        sent
    }

    fn asked(&mut self) -> Vec<GuestIo> {
        std::mem::take(self.tap.asked())
    }

    fn done(&mut self, io: &GuestIo) {
        self.tap.reply(io.id, Ok(Bytes::new()));
    }

    fn connections(&self) -> u64 {
        self.stats.connections.load(Ordering::Relaxed)
    }
}

fn request(command: u16, flags: u16, cookie: u64, offset: u64, len: u32) -> Vec<u8> {
    let mut bytes = REQUEST_MAGIC.to_be_bytes().to_vec();
    bytes.put_u16(flags);
    bytes.put_u16(command);
    bytes.put_u64(cookie);
    bytes.put_u64(offset);
    bytes.put_u32(len);
    bytes
}

fn write(cookie: u64, data: &[u8]) -> Vec<u8> {
    [&request(cmd::WRITE, 0, cookie, 0, data.len() as u32)[..], data].concat()
}

fn reply(cookie: u64, error: u32) -> Vec<u8> {
    let mut bytes = SIMPLE_REPLY_MAGIC.to_be_bytes().to_vec();
    bytes.put_u32(error);
    bytes.put_u64(cookie);
    bytes
}

#[test]
fn every_command_reaches_the_owner_loop_as_what_it_is_and_its_answer_the_client() {
    let mut of = Tapped::new(1, Limits::OF_DISK);
    let (id, opened) = of.client(0);
    assert!(opened && of.connections() == 1);
    let extent = |offset, len_bytes| Extent { disk: DiskId(3), offset, len_bytes };
    let cases = [
        (cmd::READ, 0, "Read"),
        (cmd::FLUSH, 0, "Flush"),
        (cmd::WRITE_ZEROES, 0, "Zero { no_hole: false, only_if_fast: false, fua: false }"),
        (
            cmd::WRITE_ZEROES,
            cmd_flag::NO_HOLE,
            "Zero { no_hole: true, only_if_fast: false, fua: false }",
        ),
        (
            cmd::WRITE_ZEROES,
            cmd_flag::FAST_ZERO,
            "Zero { no_hole: false, only_if_fast: true, fua: false }",
        ),
        (
            cmd::WRITE_ZEROES,
            cmd_flag::FUA,
            "Zero { no_hole: false, only_if_fast: false, fua: true }",
        ),
        (cmd::TRIM, cmd_flag::FUA, "Discard { fua: true }"),
        (cmd::TRIM, 0, "Discard { fua: false }"),
    ];
    for (cookie, (command, flags, op)) in (7..).zip(cases) {
        let (offset, len) = if command == cmd::FLUSH { (0, 0) } else { (1024, BLOCK as u32) };
        of.asks(id, &request(command, flags, cookie, offset, len));
        let asked = of.asked();
        assert_eq!(asked.len(), 1);
        assert_eq!(format!("{:?}", asked[0].op), op);
        assert_eq!(asked[0].extent, extent(offset, len.into()));
        assert_eq!(of.tap.origin(asked[0].id), (id, Cookie(cookie)));
        assert!(of.flush().is_empty() && of.tap.has_sent_answers(), "nothing before the answer");
        let data = if command == cmd::READ { vec![5; BLOCK] } else { Vec::new() };
        of.tap.reply(asked[0].id, Ok(data.clone().into()));
        of.tap.send_replies(&mut of.net);
        assert!(!of.tap.has_sent_answers(), "it is on its way");
        assert_eq!(of.flush(), [reply(cookie, 0), data].concat());
        assert!(of.tap.has_sent_answers());
    }
    for (flags, fua) in [(0, false), (cmd_flag::FUA, true)] {
        let data = vec![9; BLOCK];
        of.asks(id, &[request(cmd::WRITE, flags, 1, 512, BLOCK as u32), data.clone()].concat());
        let [GuestIo { id, op: GuestOp::Write { data: taken, fua: taken_fua }, .. }] =
            &of.asked()[..]
        else {
            panic!("no write")
        };
        assert_eq!((&taken.data()[..], *taken_fua), (&data[..], fua));
        of.tap.reply(*id, Err(DiskError(28)));
        assert_eq!(of.flush(), reply(1, 28), "ENOSPC");
    }
    of.asks(id, &request(cmd::CACHE, 0, 2, 0, BLOCK as u32));
    assert_eq!((of.flush(), of.asked().len()), (reply(2, 0), 0));
}

#[test]
fn data_that_arrives_in_pieces_among_requests_is_put_together() {
    let limits = Limits { staging_bytes: 4096, ..Limits::OF_DISK };
    let mut of = Tapped::new(1, limits);
    let (id, _) = of.client(0);
    let data: Vec<u8> = (0..20 * BLOCK).map(|n| (n / 7) as u8).collect();
    let both =
        [write(1, &data), request(cmd::FLUSH, 0, 2, 0, 0), write(3, &data[..BLOCK])].concat();
    let (mut rest, mut sizes) = (&both[..], [10, 18, 100, 3000].into_iter());
    while !rest.is_empty() {
        let (_, range, all) = &of.net.receives[&id];
        // The kernel waits for all of a large write's data.
        let count = if *all { range.len() } else { sizes.next().unwrap_or(4096).min(range.len()) };
        let (now, later) = rest.split_at(count.min(rest.len()));
        of.asks(id, now);
        rest = later;
    }
    let asked = of.asked();
    let found = asked.iter().map(|io| match &io.op {
        GuestOp::Write { data, .. } => data.data().to_vec(),
        _ => Vec::new(),
    });
    assert_eq!(found.collect::<Vec<_>>(), [data.clone(), Vec::new(), data[..BLOCK].to_vec()]);
    asked.iter().for_each(|io| of.done(io));
    assert_eq!(of.flush(), [reply(1, 0), reply(2, 0), reply(3, 0)].concat());
}

#[test]
fn a_client_that_asks_too_much_is_read_again_when_answers_have_left() {
    // Bounds by number, and by bytes: of a write's data, and of a reply that is not sent.
    let by_number = Limits { requests_max: 2, ..Limits::OF_DISK };
    let by_bytes = Limits { bytes_max: 2 * BLOCK, ..Limits::OF_DISK };
    for (limits, command) in
        [(by_number, cmd::FLUSH), (by_bytes, cmd::READ), (by_bytes, cmd::WRITE)]
    {
        let mut of = Tapped::new(1, limits);
        let (id, _) = of.client(0);
        let one = |cookie| match command {
            cmd::FLUSH => request(cmd::FLUSH, 0, cookie, 0, 0),
            cmd::WRITE => write(cookie, &[1; BLOCK]),
            _ => request(cmd::READ, 0, cookie, 0, BLOCK as u32),
        };
        of.arrives(id, &[one(1), one(2), one(3)].concat());
        let first = of.asked();
        assert_eq!(first.len(), 2, "{command}");
        assert!(of.net.receives.is_empty(), "nothing more is read");
        assert!(of.flush().is_empty() && of.asked().is_empty());
        let data = if command == cmd::READ { BLOCK } else { 0 };
        of.tap.reply(first[0].id, Ok(vec![0; data].into()));
        of.tap.send_replies(&mut of.net);
        assert!(of.asked().is_empty(), "the answer has not left");
        assert_eq!(of.flush().len(), 16 + data);
        let second = of.asked();
        assert_eq!(second.len(), 1, "{command}");
        assert!(of.net.receives.is_empty(), "full again");
        for io in [&first[1], &second[0]] {
            of.tap.reply(io.id, Ok(vec![0; data].into()));
            of.flush();
        }
        assert!(of.net.receives.contains_key(&id));
    }
}

#[test]
fn the_clients_of_a_disk_share_its_bytes() {
    let limits = Limits::OF_DISK.shared_by(4);
    assert_eq!(limits.bytes_max, Limits::OF_DISK.bytes_max / 4);
    assert_eq!(limits.requests_max, Limits::OF_DISK.requests_max);
}

#[test]
fn a_daemon_that_stops_answers_what_it_has_taken_and_leaves_the_rest_in_the_socket() {
    let mut of = Tapped::new(1, Limits { requests_max: 1, ..Limits::OF_DISK });
    let (id, _) = of.client(0);
    of.arrives(id, &[request(cmd::FLUSH, 0, 1, 0, 0), request(cmd::FLUSH, 0, 2, 0, 0)].concat());
    of.tap.set_taking(&mut of.net, Taking::Nothing);
    of.flush();
    assert!(of.net.hung_up.is_empty() && of.connections() == 1);
    let asked = of.asked();
    of.done(&asked[0]);
    assert_eq!(of.flush(), reply(1, 0));
    assert_eq!((&of.net.hung_up[..], of.connections()), (&[0][..], 0));
    assert!(of.asked().is_empty(), "the second was not taken");
    // A client that comes meanwhile waits until requests are taken again.
    of.net.accepts.clear();
    of.tap.accepted(&mut of.net, 0, Ok(Some(1)));
    assert!(of.net.accepts.is_empty() && of.connections() == 0);
    of.tap.set_taking(&mut of.net, Taking::All);
    assert_eq!(of.net.accepts, [0]);
    of.tap.set_taking(&mut of.net, Taking::All);
    assert_eq!(of.net.accepts, [0], "once");
}

#[test]
fn clients_of_a_group_that_was_switched_over_are_turned_away() {
    let mut of = Tapped::new(1, Limits::OF_DISK);
    of.tap.set_taking(&mut of.net, Taking::TurnAway);
    of.net.accepts.clear();
    for _ in 0..2 {
        of.tap.accepted(&mut of.net, 0, Ok(Some(0)));
    }
    assert_eq!((&of.net.accepts[..], of.connections()), (&[0, 0][..], 0));
}

#[test]
fn a_socket_that_cannot_accept_is_tried_again_at_the_next_look() {
    let mut of = Tapped::new(1, Limits::OF_DISK);
    of.net.accepts.clear();
    of.tap.accepted(&mut of.net, 0, Err(io::ErrorKind::OutOfMemory.into()));
    assert_eq!((of.net.accepts.len(), of.net.looks), (0, 1));
    of.tap.look(&mut of.net);
    assert_eq!(of.net.accepts, [0]);
    of.tap.look(&mut of.net);
    assert_eq!((of.net.accepts.len(), of.net.looks), (1, 1), "nothing to look at");
}

#[test]
fn what_a_client_that_has_gone_asked_for_is_still_done_and_it_hears_nothing() {
    for is_error in [false, true] {
        let mut of = Tapped::new(1, Limits::OF_DISK);
        let (id, _) = of.client(0);
        of.asks(id, &write(1, &[1; BLOCK]));
        let asked = of.asked();
        let (buf, ..) = of.net.receives.remove(&id).unwrap();
        let end = if is_error { Err(io::ErrorKind::ConnectionReset.into()) } else { Ok(0) };
        of.tap.received(&mut of.net, id, end, buf);
        of.flush();
        assert!(of.net.hung_up.is_empty(), "its request is under way");
        of.done(&asked[0]);
        assert_eq!(of.flush().is_empty(), is_error);
        assert_eq!((&of.net.hung_up[..], of.connections()), (&[0][..], 0));
    }
}

#[test]
fn a_send_that_fails_ends_the_connection_and_one_that_comes_short_goes_on() {
    let mut of = Tapped::new(1, Limits::OF_DISK);
    let (id, _) = of.client(0);
    of.asks(id, &request(cmd::READ, 0, 1, 0, BLOCK as u32));
    let asked = of.asked();
    of.tap.reply(asked[0].id, Ok(vec![3; BLOCK].into()));
    of.tap.send_replies(&mut of.net);
    let (_, bufs) = of.net.sends.pop().unwrap();
    of.tap.sent(id, Ok(20), bufs);
    assert!(!of.tap.has_sent_answers());
    assert_eq!(of.flush(), vec![3; BLOCK - 4]);
    of.asks(id, &request(cmd::READ, 0, 2, 0, BLOCK as u32));
    let asked = of.asked();
    of.tap.reply(asked[0].id, Ok(vec![3; BLOCK].into()));
    of.tap.send_replies(&mut of.net);
    let (_, bufs) = of.net.sends.pop().unwrap();
    of.tap.sent(id, Err(io::ErrorKind::BrokenPipe.into()), bufs);
    assert!(of.flush().is_empty());
    assert_eq!((&of.net.hung_up[..], of.connections()), (&[0][..], 0));
}

/// The kernel still reads from the buffers of a send that is under way.
#[test]
fn a_connection_that_breaks_is_kept_until_its_send_has_ended() {
    let mut of = Tapped::new(1, Limits::OF_DISK);
    let (id, _) = of.client(0);
    of.asks(id, &request(cmd::FLUSH, 0, 1, 0, 0));
    let asked = of.asked();
    of.done(&asked[0]);
    of.tap.send_replies(&mut of.net);
    let (buf, ..) = of.net.receives.remove(&id).unwrap();
    of.tap.received(&mut of.net, id, Err(io::ErrorKind::ConnectionReset.into()), buf);
    of.tap.send_replies(&mut of.net);
    assert!(of.net.hung_up.is_empty() && of.connections() == 1);
    let (_, bufs) = of.net.sends.pop().unwrap();
    of.tap.sent(id, Ok(4), bufs);
    assert!(of.flush().is_empty());
    assert_eq!((&of.net.hung_up[..], of.connections()), (&[0][..], 0));
}

#[test]
fn a_client_that_breaks_the_protocol_is_read_no_more() {
    let mut of = Tapped::new(1, Limits::OF_DISK);
    let (id, _) = of.client(0);
    of.asks(id, &[0xff; 28]);
    of.flush();
    assert_eq!((&of.net.hung_up[..], of.connections()), (&[0][..], 0));
}

/// Two guests on one disk destroy it; a guest whose hypervisor has died comes back at once.
#[test]
fn a_disk_in_use_is_refused_until_its_client_has_hung_up() {
    let mut of = Tapped::new(1, Limits::OF_DISK);
    let (_, first) = of.client(0);
    let (_, second) = of.client(1);
    assert!(first && !second);
    of.net.gone.insert(0);
    let (third, opened) = of.client(2);
    assert!(opened);
    of.asks(third, &request(cmd::FLUSH, 0, 1, 0, 0));
    let asked = of.asked();
    assert_eq!(asked.len(), 1);
    of.done(&asked[0]);
    let mut of = Tapped::new(2, Limits::OF_DISK);
    assert!(of.client(0).1 && of.client(1).1 && !of.client(2).1);
}

#[test]
fn the_end_of_the_loop_hangs_up_on_everybody() {
    let mut of = Tapped::new(2, Limits::OF_DISK);
    let (id, _) = of.client(0);
    of.client(1);
    of.asks(id, &request(cmd::FLUSH, 0, 1, 0, 0));
    of.tap.hang_up_all(&mut of.net);
    assert_eq!(of.net.hung_up, [0, 1]);
    drop(of);
}
