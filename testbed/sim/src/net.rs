//! The network between hosts and backup: connections that deliver bytes in order until they are
//! cut, at any byte.

use crate::rng::Rng;
use std::collections::{BTreeMap, VecDeque};

/// A connection's number.
pub type ConnId = u64;

/// The two directions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// Host to backup.
    Up,
    /// Backup to host.
    Down,
}

/// One direction of a connection.
#[derive(Debug, Default)]
pub struct Pipe {
    /// When each piece arrives, unless the network stops.
    pieces: VecDeque<(u64, Vec<u8>)>,
    bytes: usize,
    last_at_ns: u64,
    /// What has arrived and was not read.
    pub arrived: Vec<u8>,
}

impl Pipe {
    /// Bytes that it holds.
    #[must_use]
    pub fn held_bytes(&self) -> usize {
        self.bytes + self.arrived.len()
    }

    /// Sends. Returns when each piece arrives.
    pub fn send(
        &mut self,
        rng: &mut Rng,
        now_ns: u64,
        delay_ns: u64,
        bytes_per_ms: u64,
        data: &[u8],
    ) -> Vec<u64> {
        let mut times = Vec::new();
        let mut rest = data;
        while !rest.is_empty() {
            // Frames arrive in pieces.
            let len =
                if rng.chance(1, 4) { rng.index(rest.len()) + 1 } else { rest.len() }.min(64 << 10);
            let (piece, after) = rest.split_at(len);
            let busy_ns = piece.len() as u64 * 1_000_000 / bytes_per_ms;
            self.last_at_ns = (now_ns + delay_ns).max(self.last_at_ns) + busy_ns;
            self.pieces.push_back((self.last_at_ns, piece.to_vec()));
            self.bytes += piece.len();
            times.push(self.last_at_ns);
            rest = after;
        }
        times
    }

    /// What has arrived by now joins what is unread. Returns whether anything did.
    pub fn deliver(&mut self, now_ns: u64) -> bool {
        let before = self.arrived.len();
        while self.pieces.front().is_some_and(|(at, _)| *at <= now_ns) {
            let (_, piece) = self.pieces.pop_front().expect("just seen");
            self.bytes -= piece.len();
            self.arrived.extend_from_slice(&piece);
        }
        self.arrived.len() > before
    }

    /// When the next piece is due.
    #[must_use]
    pub fn next_at_ns(&self) -> Option<u64> {
        self.pieces.front().map(|(at, _)| *at)
    }

    /// The sender is gone: of what is under way only some arrives.
    pub fn cut(&mut self, rng: &mut Rng) {
        let mut keep = if rng.chance(1, 2) { 0 } else { rng.index(self.bytes + 1) };
        let mut pieces = VecDeque::new();
        for (at, mut piece) in self.pieces.drain(..) {
            piece.truncate(keep);
            keep -= piece.len();
            if !piece.is_empty() {
                pieces.push_back((at, piece));
            }
        }
        self.bytes = pieces.iter().map(|(_, p)| p.len()).sum();
        self.pieces = pieces;
    }

    /// What is under way arrives all at once, not before this time. Returns when.
    pub fn delay(&mut self, until_ns: u64) -> Option<u64> {
        let at = until_ns.max(self.last_at_ns);
        self.pieces.iter_mut().for_each(|piece| piece.0 = at);
        self.pieces.front().map(|_| at)
    }

    /// Nobody will read it.
    pub fn clear(&mut self) {
        self.pieces.clear();
        self.arrived.clear();
        self.bytes = 0;
    }

    /// Flips a bit that is under way.
    pub fn damage(&mut self, rng: &mut Rng) -> bool {
        let Some((_, piece)) = self.pieces.back_mut() else { return false };
        let at = rng.index(piece.len());
        piece[at] ^= 1 << rng.below(8);
        true
    }
}

/// A connection.
#[derive(Debug)]
pub struct Conn {
    /// Whose.
    pub host: usize,
    /// Host to backup.
    pub up: Pipe,
    /// Backup to host.
    pub down: Pipe,
    /// Whether the host has it open.
    pub host_open: bool,
    /// Whether the backup has it open.
    pub backup_open: bool,
    /// Records may be lost, doubled or swapped.
    pub mangled: bool,
}

impl Conn {
    /// One direction.
    pub fn pipe(&mut self, way: Way) -> &mut Pipe {
        match way {
            Way::Up => &mut self.up,
            Way::Down => &mut self.down,
        }
    }
}

/// A host's way to the backup.
#[derive(Clone, Copy, Debug, Default)]
pub struct Path {
    /// Nothing gets there.
    pub up_stopped: bool,
    /// Nothing comes back.
    pub down_stopped: bool,
    /// So much slower.
    pub slow_factor: u64,
    /// It carries no more towards the backup, if it is narrow.
    pub bytes_per_ms: Option<u64>,
}

impl Path {
    /// Whether a direction is stopped.
    #[must_use]
    pub fn is_stopped(&self, way: Way) -> bool {
        match way {
            Way::Up => self.up_stopped,
            Way::Down => self.down_stopped,
        }
    }
}

/// All connections.
#[derive(Debug, Default)]
pub struct Net {
    /// By number.
    pub conns: BTreeMap<ConnId, Conn>,
    /// By host.
    pub paths: Vec<Path>,
    next: ConnId,
}

impl Net {
    /// Paths for so many hosts.
    #[must_use]
    pub fn new(hosts: usize) -> Self {
        Self { paths: vec![Path::default(); hosts], ..Self::default() }
    }

    /// A new connection.
    pub fn connect(&mut self, host: usize) -> ConnId {
        self.next += 1;
        let conn = Conn {
            host,
            up: Pipe::default(),
            down: Pipe::default(),
            host_open: true,
            backup_open: true,
            mangled: false,
        };
        self.conns.insert(self.next, conn);
        self.next
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_come_in_order_and_a_cut_leaves_a_prefix() {
        let mut rng = Rng::new(1);
        let sent: Vec<u8> = (0..=255).collect();
        let mut prefixes = std::collections::BTreeSet::new();
        for _ in 0..50 {
            let mut pipe = Pipe::default();
            for part in sent.chunks(64) {
                pipe.send(&mut rng, 0, 1000, 64, part);
            }
            assert!(!pipe.deliver(999));
            let cut = rng.chance(1, 2);
            if cut {
                pipe.cut(&mut rng);
            }
            pipe.deliver(u64::MAX);
            assert!(sent.starts_with(&pipe.arrived));
            assert!(cut || pipe.arrived == sent);
            prefixes.insert(pipe.arrived.len());
        }
        assert!(prefixes.len() > 5, "{prefixes:?}");
    }
}
