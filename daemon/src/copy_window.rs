//! How much of a copy may be on its way: what keeps the link full, and no more, so that the writes of guests find no queue
//! in front of them, neither in the daemon nor in a router's buffer.
//!
//! Source: BBR (Cardwell, Cheng, Gunn, Yeganeh, Jacobson, "BBR: Congestion-Based Congestion Control", ACM Queue 14 (5),
//! 2016). The path is described by the least delay and the greatest rate of late; their product is what keeps it full.
//! The window is that, a quarter more for one round in eight to find out whether there is more, and a quarter less in the
//! next, which takes the queue away again. Here it is the backup's acknowledgement that ends a delay, so the journal's disk is
//! a part of the path.
//!
//! Of what was sent while something else than the window was the bound, the local disk or the guests, a rate says only that
//! there is at least so much.
//!
//! Sans-I/O: what was sent and what was acknowledged go in, a number of bytes comes out. Guests' writes count like copies: what
//! they take of the link is not there for copies.

use std::collections::VecDeque;
use tidelock_protocol::ids::{MonoNanos, Seq};
use tidelock_protocol::limits::COPY_MAX_BYTES;

/// Of the product, in the rounds of a cycle, in percent. A little more than all of it, because most delays are a little
/// longer than the least.
const CYCLE: [u64; 8] = [125, 75, 103, 103, 103, 103, 103, 103];
/// Until the rate does not grow any more: the window doubles each round.
const STARTUP: u64 = 200;
/// The rate has stopped growing if it was not a quarter more for so many rounds.
const STARTUP_ENDS_AFTER: u32 = 3;
/// How long a rate counts, in rounds.
const RATE_ROUNDS: u64 = 10;
/// How long a delay counts: routes change.
const DELAY_LASTS_NS: u64 = 10_000_000_000;
/// No window is smaller: two pieces of the smallest size.
const WINDOW_MIN_BYTES: u64 = 2 * PIECE_MIN_BYTES;
/// The window of the first round.
const WINDOW_FIRST_BYTES: u64 = 4 * PIECE_MIN_BYTES;
/// A piece of a copy is so much of the window, so that what was sent last does not stand before a write for long,
const PIECES_PER_WINDOW: u64 = 32;
/// but not so small that each costs more than it brings.
const PIECE_MIN_BYTES: u64 = 32 << 10;
/// Moments that are remembered: more than there are in a round.
const MARKS_MAX: usize = 4096;

/// A moment: everything up to a seq was sent by then.
#[derive(Clone, Copy, Debug)]
struct Mark {
    seq: Seq,
    at: MonoNanos,
    /// Acknowledged by then, and when that was; this moment, if nothing was on its way.
    acked_bytes: u64,
    acked_at: MonoNanos,
    /// When the newest of that had been sent.
    acked_sent_at: MonoNanos,
    /// The window was what bounded the copies.
    is_full: bool,
}

/// Where the controller is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// The greatest rate so far, and for how many rounds it has not grown.
    Startup { best: u64, rounds: u32 },
    /// Until what startup has sent too much is gone.
    Drain,
    /// The round of the cycle.
    Cruise(usize),
}

/// The window of a member's copies.
#[derive(Debug)]
pub struct CopyWindow {
    max_bytes: u64,
    marks: VecDeque<Mark>,
    /// A round ends when this is acknowledged.
    round_ends: Seq,
    round: u64,
    phase: Phase,
    /// Bytes per second, with the round in which they were seen; from the greatest down, each later than those before it.
    rates: VecDeque<(u64, u64)>,
    /// The least delay in nanoseconds, and when it was seen.
    delay: Option<(u64, MonoNanos)>,
    acked_bytes: u64,
    acked_at: MonoNanos,
    acked_sent_at: MonoNanos,
    is_full: bool,
}

impl CopyWindow {
    /// `max_bytes`: no window is greater.
    #[must_use]
    pub fn new(max_bytes: u64) -> Self {
        Self {
            max_bytes,
            marks: VecDeque::new(),
            round_ends: Seq::ZERO,
            round: 0,
            phase: Phase::Startup { best: 0, rounds: 0 },
            rates: VecDeque::new(),
            delay: None,
            acked_bytes: 0,
            acked_at: MonoNanos(0),
            acked_sent_at: MonoNanos(0),
            is_full: false,
        }
    }

    /// Everything up to this seq was given to the link. `is_full`: there would have been more.
    pub fn sent(&mut self, last: Seq, is_full: bool, now: MonoNanos) {
        self.is_full |= is_full;
        if self.marks.back().is_none_or(|mark| mark.seq < last) && self.marks.len() < MARKS_MAX {
            if self.marks.is_empty() {
                (self.acked_at, self.acked_sent_at) = (now, now);
            }
            let is_full = std::mem::take(&mut self.is_full);
            let Self { acked_bytes, acked_at, acked_sent_at, .. } = *self;
            let mark = Mark { seq: last, at: now, acked_bytes, acked_at, acked_sent_at, is_full };
            self.marks.push_back(mark);
        }
    }

    /// The backup has everything up to this seq: so many bytes since the start.
    pub fn acked(&mut self, durable: Seq, acked_bytes: u64, now: MonoNanos) {
        (self.acked_bytes, self.acked_at) = (acked_bytes, now);
        let mut newest = None;
        while let Some(mark) = self.marks.front().filter(|mark| mark.seq <= durable) {
            newest = Some(*mark);
            self.marks.pop_front();
        }
        let Some(mark) = newest else { return };
        let delay_ns = now.since_ns(mark.at).max(1);
        let is_old = |(_, seen): (u64, MonoNanos)| now.since_ns(seen) > DELAY_LASTS_NS;
        if self.delay.is_none_or(|delay| delay_ns <= delay.0 || is_old(delay)) {
            self.delay = Some((delay_ns, now));
        }
        // Acknowledgements that have waited for one packet, or one sync, come at once: of how long it took to send that,
        // and how long to hear of it, the longer counts (BBR's delivery rate sample).
        let bytes = u128::from(acked_bytes - mark.acked_bytes);
        self.acked_sent_at = mark.at;
        let heard_ns = now.since_ns(mark.acked_at).max(delay_ns);
        let took_ns = heard_ns.max(mark.at.since_ns(mark.acked_sent_at));
        let rate = (bytes * 1_000_000_000 / u128::from(took_ns)) as u64;
        if mark.is_full || rate > self.rate() {
            self.saw_rate(rate);
        }
        if !mark.is_full {
            return;
        }
        if durable >= self.round_ends {
            self.round += 1;
            self.round_ends = self.marks.back().map_or(durable.next(), |mark| mark.seq);
            self.end_round();
        }
    }

    /// The connection is another one, perhaps over another path; what was sent before says nothing of it.
    pub fn restart(&mut self) {
        *self = Self { acked_bytes: self.acked_bytes, ..Self::new(self.max_bytes) };
    }

    fn saw_rate(&mut self, rate: u64) {
        while self.rates.back().is_some_and(|(before, _)| *before <= rate) {
            self.rates.pop_back();
        }
        self.rates.push_back((rate, self.round));
        let round = self.round;
        while self.rates.front().is_some_and(|(_, seen)| seen + RATE_ROUNDS < round) {
            self.rates.pop_front();
        }
    }

    fn rate(&self) -> u64 {
        self.rates.front().map_or(0, |(rate, _)| *rate)
    }

    fn end_round(&mut self) {
        self.phase = match self.phase {
            Phase::Startup { best, .. } if self.rate() > best + best / 4 => {
                Phase::Startup { best: self.rate(), rounds: 0 }
            }
            Phase::Startup { best, rounds } if rounds + 1 < STARTUP_ENDS_AFTER => {
                Phase::Startup { best, rounds: rounds + 1 }
            }
            Phase::Startup { .. } => Phase::Drain,
            Phase::Drain => Phase::Cruise(2),
            Phase::Cruise(nth) => Phase::Cruise((nth + 1) % CYCLE.len()),
        };
    }

    /// What keeps the link full.
    fn product_bytes(&self) -> Option<u64> {
        let (delay_ns, _) = self.delay?;
        Some((u128::from(self.rate()) * u128::from(delay_ns) / 1_000_000_000) as u64)
    }

    /// Copies are begun while less than this is on its way.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        let Some(product) = self.product_bytes() else {
            return WINDOW_FIRST_BYTES.min(self.max_bytes);
        };
        let percent = match self.phase {
            Phase::Startup { .. } => STARTUP,
            Phase::Drain => CYCLE[1],
            Phase::Cruise(nth) => CYCLE[nth],
        };
        let first = match self.phase {
            Phase::Startup { .. } => WINDOW_FIRST_BYTES,
            _ => WINDOW_MIN_BYTES,
        };
        (product.saturating_mul(percent) / 100).max(first).min(self.max_bytes)
    }

    /// The most of one piece: a power of two.
    #[must_use]
    pub fn piece_bytes(&self) -> u64 {
        let part = (self.bytes() / PIECES_PER_WINDOW).max(PIECE_MIN_BYTES);
        let power = 1 << part.ilog2();
        u64::min(power, COPY_MAX_BYTES.into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;

    const MIB: u64 = 1 << 20;

    /// A bottleneck of this rate behind this delay, and a source that fills the window.
    struct Path {
        rate: u64,
        delay_ns: u64,
        /// When the bottleneck has sent what it was given.
        free_at: u64,
        now: u64,
        sent_bytes: u64,
        seq: u64,
        acks: BTreeMap<(u64, u64), u64>,
        acked: (u64, u64),
    }

    impl Path {
        fn new(rate: u64, delay_ms: u64) -> Self {
            let delay_ns = delay_ms * 1_000_000;
            let acks = BTreeMap::new();
            Self { rate, delay_ns, free_at: 0, now: 0, sent_bytes: 0, seq: 0, acks, acked: (0, 0) }
        }

        fn send(&mut self, bytes: u64) {
            self.seq += 1;
            self.sent_bytes += bytes;
            self.free_at = self.free_at.max(self.now) + bytes * 1_000_000_000 / self.rate;
            self.acks.insert((self.free_at + self.delay_ns, self.seq), bytes);
        }

        /// How long what is sent now waits at the bottleneck.
        fn queue_ns(&self) -> u64 {
            self.free_at.saturating_sub(self.now)
        }

        /// For so long; returns the rate, and the middle one of the waits that a write would have met.
        fn run(&mut self, window: &mut CopyWindow, seconds: u64) -> (u64, u64) {
            let (from, until) = (self.acked.1, self.now + seconds * 1_000_000_000);
            let mut waits = Vec::new();
            loop {
                while self.sent_bytes - self.acked.1 < window.bytes() {
                    let piece = window.piece_bytes();
                    self.send(piece);
                    window.sent(Seq(self.seq), true, MonoNanos(self.now));
                }
                let Some(((at, seq), bytes)) = self.acks.pop_first() else { panic!("it stands") };
                if at > until {
                    self.acks.insert((at, seq), bytes);
                    self.now = until;
                    break;
                }
                self.now = at;
                self.acked = (seq, self.acked.1 + bytes);
                window.acked(Seq(seq), self.acked.1, MonoNanos(self.now));
                waits.push(self.queue_ns());
            }
            waits.sort_unstable();
            ((self.acked.1 - from) / seconds, waits[waits.len() / 2])
        }
    }

    #[test]
    fn the_link_is_full_and_writes_find_no_queue() {
        for (rate, delay_ms) in [(32 * MIB, 10), (32 * MIB, 50), (4 * MIB, 100), (500 * MIB, 20)] {
            let mut path = Path::new(rate, delay_ms);
            let mut window = CopyWindow::new(1 << 30);
            path.run(&mut window, 5);
            let (found, wait_ns) = path.run(&mut window, 30);
            assert!(found * 100 >= rate * 95, "{rate} B/s, {delay_ms} ms: {found} B/s");
            let is_short =
                wait_ns * 100 <= path.delay_ns * 8 + 100 * 1_000_000_000 * 32 * 1024 / rate;
            assert!(is_short, "{rate} B/s, {delay_ms} ms: {wait_ns} ns");
        }
    }

    #[test]
    fn it_follows_a_link_that_becomes_slower_and_faster_again() {
        let mut path = Path::new(64 * MIB, 20);
        let mut window = CopyWindow::new(1 << 30);
        path.run(&mut window, 5);
        for rate in [4 * MIB, 100 * MIB] {
            path.rate = rate;
            path.run(&mut window, 15);
            let (found, wait_ns) = path.run(&mut window, 20);
            assert!(found * 100 >= rate * 90, "{rate} B/s: {found} B/s");
            assert!(wait_ns < 12_000_000, "{rate} B/s: {wait_ns} ns");
        }
    }

    #[test]
    fn what_a_slow_disk_gives_does_not_make_the_link_look_slow() {
        let mut path = Path::new(32 * MIB, 50);
        let mut window = CopyWindow::new(1 << 30);
        path.run(&mut window, 5);
        let before = window.bytes();
        for _ in 0..1000 {
            path.send(32 << 10);
            window.sent(Seq(path.seq), false, MonoNanos(path.now));
            while let Some(((at, seq), bytes)) = path.acks.pop_first() {
                path.now = at;
                path.acked = (seq, path.acked.1 + bytes);
                window.acked(Seq(seq), path.acked.1, MonoNanos(at));
            }
        }
        assert!(window.bytes() * 10 > before * 7, "{before}, then {}", window.bytes());
    }

    #[test]
    fn no_window_is_beyond_the_configured_one_and_none_is_nothing() {
        let mut path = Path::new(500 * MIB, 100);
        let mut window = CopyWindow::new(4 * MIB);
        path.run(&mut window, 5);
        assert_eq!(window.bytes(), 4 * MIB);
        let mut slow = Path::new(100 << 10, 1);
        let mut window = CopyWindow::new(4 * MIB);
        slow.run(&mut window, 100);
        assert!((WINDOW_MIN_BYTES..128 << 10).contains(&window.bytes()), "{}", window.bytes());
        assert_eq!(window.piece_bytes(), PIECE_MIN_BYTES);
        window.restart();
        assert_eq!(window.bytes(), WINDOW_FIRST_BYTES);
    }
}
