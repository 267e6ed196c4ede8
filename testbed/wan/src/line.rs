//! One direction of the cable: which frame leaves when, and which never.
//!
//! A frame passes three stages, as in a real path: it may be lost; it waits for the bottleneck link
//! (`rate_bytes_per_s`, with a bounded queue that drops at the tail); then it travels for the delay and its
//! jitter. The bottleneck is a virtual clock, which is exact where a token bucket polls.
//!
//! Invariants: frames leave in the order in which they came, unless `reorder` is set; at most
//! [`HELD_BYTES_MAX`] are held; every frame that came in is held, left, or is counted as dropped.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::time::Duration;

use serde::{Deserialize, Serialize};

/// Length of the `virtio_net_hdr` in front of each frame of a TAP opened with `IFF_VNET_HDR`.
pub const VNET_HDR_LEN_BYTES: usize = 10;

const ETHERNET_HEADER_BYTES: usize = 14;

/// Frames beyond this many bytes in flight are dropped: 5 Gb/s for 400 ms.
pub const HELD_BYTES_MAX: usize = 256 << 20;

/// What a direction does to the frames that pass it. Zero means "not at all", for each of them.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Params {
    /// One-way delay.
    pub delay_ms: f64,
    /// Largest deviation from the delay, either way, uniformly distributed.
    pub jitter_ms: f64,
    /// Bytes per second through the bottleneck, as they would be on the wire.
    pub rate_bytes_per_s: f64,
    /// Bytes that may wait before the bottleneck.
    pub queue_bytes: u64,
    /// Probability that a frame is lost. While it is not zero, frames are single packets.
    pub loss: f64,
    /// Probability that a frame arrives twice.
    pub duplicate: f64,
    /// Probability that a bit of a frame arrives wrong. Of a frame that still lacks its checksums, as frames of
    /// segmentation offload do, the receiver's transport does not notice it: whoever is above it has to.
    pub corrupt: f64,
    /// Whether jitter may change the order of frames.
    pub reorder: bool,
    /// Whether the cable is cut: nothing passes, and what was on its way is gone.
    pub cut: bool,
}

impl Default for Params {
    fn default() -> Self {
        Self {
            delay_ms: 0.0,
            jitter_ms: 0.0,
            rate_bytes_per_s: 0.0,
            queue_bytes: 4 << 20,
            loss: 0.0,
            duplicate: 0.0,
            corrupt: 0.0,
            reorder: false,
            cut: false,
        }
    }
}

impl Params {
    /// Says what is wrong with the values, if anything is.
    pub fn check(&self) -> Result<(), String> {
        let not_negative = [
            ("delay_ms", self.delay_ms),
            ("jitter_ms", self.jitter_ms),
            ("rate_bytes_per_s", self.rate_bytes_per_s),
        ];
        for (name, value) in not_negative {
            if !(0.0..=1e15).contains(&value) {
                return Err(format!("{name} must not be negative, not {value}"));
            }
        }
        for (name, value) in
            [("loss", self.loss), ("duplicate", self.duplicate), ("corrupt", self.corrupt)]
        {
            if !(0.0..=1.0).contains(&value) {
                return Err(format!("{name} is a probability: write 0 to 1, not {value}"));
            }
        }
        Ok(())
    }
}

/// What has happened to frames so far. Their sum over all fates equals what came in and was duplicated.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Counters {
    /// Frames that came in.
    pub frames_in: u64,
    /// Bytes that came in, as on the wire.
    pub bytes_in: u64,
    /// Frames that left.
    pub frames_out: u64,
    /// Bytes that left, as on the wire.
    pub bytes_out: u64,
    /// Frames lost by `loss`.
    pub lost: u64,
    /// Frames added by `duplicate`.
    pub duplicated: u64,
    /// Frames that left with a wrong bit, or will.
    pub corrupted: u64,
    /// Frames dropped because the bottleneck's queue was full.
    pub dropped_queue: u64,
    /// Frames dropped because of `cut`.
    pub dropped_cut: u64,
    /// Frames dropped because of [`HELD_BYTES_MAX`].
    pub dropped_memory: u64,
    /// Frames on their way now.
    pub held: u64,
    /// The most that a frame left after its time.
    pub late_us_max: u64,
}

/// A frame on its way. Ordered by time, then by arrival.
struct Held {
    due: Duration,
    order: u64,
    frame: Box<[u8]>,
}

impl PartialEq for Held {
    fn eq(&self, other: &Self) -> bool {
        (self.due, self.order) == (other.due, other.order)
    }
}
impl Eq for Held {}
impl PartialOrd for Held {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}
impl Ord for Held {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        (self.due, self.order).cmp(&(other.due, other.order))
    }
}

/// One direction. Times are durations since an origin of the caller's choice.
pub struct Line {
    params: Params,
    random: SplitMix64,
    counters: Counters,
    held: BinaryHeap<Reverse<Held>>,
    held_bytes: usize,
    order_next: u64,
    bottleneck_free_at: Duration,
    due_last: Duration,
}

impl Line {
    /// A direction with these parameters; the same seed gives the same losses, jitter and duplicates.
    pub fn new(params: Params, seed: u64) -> Self {
        Self {
            params,
            random: SplitMix64(seed),
            counters: Counters::default(),
            held: BinaryHeap::new(),
            held_bytes: 0,
            order_next: 0,
            bottleneck_free_at: Duration::ZERO,
            due_last: Duration::ZERO,
        }
    }

    /// Changes the parameters for frames that come in from now on. A cut also drops what is on its way.
    pub fn set_params(&mut self, params: Params) {
        self.params = params;
        if params.cut {
            self.counters.dropped_cut += self.held.len() as u64;
            self.held.clear();
            self.held_bytes = 0;
            self.bottleneck_free_at = Duration::ZERO;
        }
    }

    /// The parameters in force.
    pub fn params(&self) -> Params {
        self.params
    }

    /// What has happened to frames so far.
    pub fn counters(&self) -> Counters {
        Counters { held: self.held.len() as u64, ..self.counters }
    }

    /// Takes a frame, with its `virtio_net_hdr` in front, that came in at `now`.
    pub fn accept(&mut self, now: Duration, frame: &[u8]) {
        let wire_bytes = wire_len_bytes(frame);
        self.counters.frames_in += 1;
        self.counters.bytes_in += wire_bytes;
        if self.params.cut {
            self.counters.dropped_cut += 1;
            return;
        }
        if self.random.happens(self.params.loss) {
            self.counters.lost += 1;
            return;
        }
        let copies = if self.random.happens(self.params.duplicate) {
            self.counters.duplicated += 1;
            2
        } else {
            1
        };
        for _ in 0..copies {
            self.send(now, frame, wire_bytes);
        }
    }

    fn send(&mut self, now: Duration, frame: &[u8], wire_bytes: u64) {
        let Some(sent) = self.pass_bottleneck(now, wire_bytes) else {
            self.counters.dropped_queue += 1;
            return;
        };
        if self.held_bytes + frame.len() > HELD_BYTES_MAX {
            self.counters.dropped_memory += 1;
            return;
        }
        let mut travel_ms = self.params.delay_ms;
        // Dice fall only for what is asked for, so frames before that do not change what comes after.
        if self.params.jitter_ms > 0.0 {
            travel_ms += self.params.jitter_ms * (self.random.unit() * 2.0 - 1.0);
        }
        let mut due = sent + Duration::from_secs_f64(travel_ms.max(0.0) / 1e3);
        if !self.params.reorder {
            due = due.max(self.due_last);
            self.due_last = due;
        }
        let mut frame: Box<[u8]> = frame.into();
        if self.random.happens(self.params.corrupt) {
            self.corrupt(&mut frame);
        }
        self.held_bytes += frame.len();
        self.held.push(Reverse(Held { due, order: self.order_next, frame }));
        self.order_next += 1;
    }

    /// Turns one bit around, anywhere behind the addresses.
    fn corrupt(&mut self, frame: &mut [u8]) {
        let body = frame.get_mut(VNET_HDR_LEN_BYTES + ETHERNET_HEADER_BYTES..).unwrap_or_default();
        let bit = (self.random.unit() * body.len() as f64 * 8.0) as usize;
        if let Some(byte) = body.get_mut(bit / 8) {
            *byte ^= 1 << (bit % 8);
            self.counters.corrupted += 1;
        }
    }

    /// When the last bit of a frame has passed the bottleneck; `None` if its queue is full.
    fn pass_bottleneck(&mut self, now: Duration, wire_bytes: u64) -> Option<Duration> {
        let rate = self.params.rate_bytes_per_s;
        if rate == 0.0 {
            return Some(now);
        }
        let start = self.bottleneck_free_at.max(now);
        let waiting_bytes = (start - now).as_secs_f64() * rate;
        if waiting_bytes > 0.0 && waiting_bytes + wire_bytes as f64 > self.params.queue_bytes as f64
        {
            return None;
        }
        self.bottleneck_free_at = start + Duration::from_secs_f64(wire_bytes as f64 / rate);
        Some(self.bottleneck_free_at)
    }

    /// When the next frame leaves.
    pub fn next_due(&self) -> Option<Duration> {
        self.held.peek().map(|Reverse(held)| held.due)
    }

    /// Hands out the next frame whose time has come.
    pub fn pop_due(&mut self, now: Duration) -> Option<Box<[u8]>> {
        if self.next_due()? > now {
            return None;
        }
        let Reverse(held) = self.held.pop()?;
        self.held_bytes -= held.frame.len();
        self.counters.frames_out += 1;
        self.counters.bytes_out += wire_len_bytes(&held.frame);
        let late_us = (now - held.due).as_micros() as u64;
        self.counters.late_us_max = self.counters.late_us_max.max(late_us);
        Some(held.frame)
    }
}

/// Bytes that a frame takes on the wire: a segmentation-offload frame is counted as its segments, each with headers.
fn wire_len_bytes(frame: &[u8]) -> u64 {
    let len = frame.len().saturating_sub(VNET_HDR_LEN_BYTES);
    if frame.len() < VNET_HDR_LEN_BYTES || frame[1] == 0 {
        return len as u64;
    }
    let headers = usize::from(u16::from_le_bytes([frame[2], frame[3]]));
    let segment = usize::from(u16::from_le_bytes([frame[4], frame[5]])).max(1);
    let segments = len.saturating_sub(headers).div_ceil(segment).max(1);
    (len + (segments - 1) * headers) as u64
}

/// Steele, Lea, Flood: Fast splittable pseudorandom number generators, OOPSLA 2014.
struct SplitMix64(u64);

impl SplitMix64 {
    /// Uniform in [0, 1).
    fn unit(&mut self) -> f64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) >> 11) as f64 / (1u64 << 53) as f64
    }

    fn happens(&mut self, probability: f64) -> bool {
        probability > 0.0 && self.unit() < probability
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn frame(id: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; VNET_HDR_LEN_BYTES + len.max(8)];
        bytes[VNET_HDR_LEN_BYTES..VNET_HDR_LEN_BYTES + 8].copy_from_slice(&id.to_le_bytes());
        bytes
    }

    fn id(frame: &[u8]) -> u64 {
        let body = &frame[VNET_HDR_LEN_BYTES..VNET_HDR_LEN_BYTES + 8];
        u64::from_le_bytes(body.try_into().expect("eight bytes"))
    }

    fn ms(n: f64) -> Duration {
        Duration::from_secs_f64(n / 1e3)
    }

    /// Runs the line until it is empty: (time of leaving, frame) of each.
    fn drain(line: &mut Line) -> Vec<(Duration, Box<[u8]>)> {
        let mut out = Vec::new();
        while let Some(due) = line.next_due() {
            while let Some(frame) = line.pop_due(due) {
                out.push((due, frame));
            }
        }
        out
    }

    #[test]
    fn a_frame_leaves_exactly_after_the_delay() {
        let mut line = Line::new(Params { delay_ms: 25.0, ..Params::default() }, 1);
        line.accept(ms(3.0), &frame(7, 100));
        assert_eq!(line.next_due(), Some(ms(28.0)));
        assert!(line.pop_due(ms(27.999)).is_none());
        assert_eq!(line.pop_due(ms(28.0)).map(|f| id(&f)), Some(7));
        assert_eq!(line.next_due(), None);
    }

    #[test]
    fn the_bottleneck_spaces_frames_by_their_length() {
        let params = Params { rate_bytes_per_s: 1e6, ..Params::default() };
        let mut line = Line::new(params, 1);
        for n in 0..3 {
            line.accept(ms(0.0), &frame(n, 1000));
        }
        let times: Vec<_> = drain(&mut line).into_iter().map(|(at, _)| at).collect();
        assert_eq!(times, [ms(1.0), ms(2.0), ms(3.0)]);
    }

    #[test]
    fn the_queue_drops_at_its_tail_at_the_limit_and_not_before() {
        let params = Params { rate_bytes_per_s: 1e6, queue_bytes: 3000, ..Params::default() };
        let mut line = Line::new(params, 1);
        for n in 0..5 {
            line.accept(ms(0.0), &frame(n, 1000));
        }
        // Three fill the queue of 3000 bytes; the one after it finds no room.
        assert_eq!(line.counters().dropped_queue, 2);
        line.accept(ms(1.0), &frame(9, 1000));
        assert_eq!(line.counters().dropped_queue, 2);
        let ids: Vec<_> = drain(&mut line).into_iter().map(|(_, frame)| id(&frame)).collect();
        assert_eq!(ids, [0, 1, 2, 9]);
    }

    #[test]
    fn a_segmentation_offload_frame_costs_what_its_segments_would() {
        let mut bytes = frame(1, 54 + 14600);
        bytes[1] = 1; // TCPv4
        bytes[2..4].copy_from_slice(&54u16.to_le_bytes());
        bytes[4..6].copy_from_slice(&1460u16.to_le_bytes());
        assert_eq!(wire_len_bytes(&bytes), 10 * (54 + 1460));
        bytes.push(0);
        assert_eq!(wire_len_bytes(&bytes), 10 * (54 + 1460) + 54 + 1);
    }

    #[test]
    fn a_cut_loses_what_is_on_its_way_and_what_comes() {
        let mut line = Line::new(Params { delay_ms: 10.0, ..Params::default() }, 1);
        line.accept(ms(0.0), &frame(0, 64));
        line.set_params(Params { cut: true, ..line.params() });
        line.accept(ms(1.0), &frame(1, 64));
        assert_eq!(line.counters().dropped_cut, 2);
        line.set_params(Params { cut: false, ..line.params() });
        line.accept(ms(2.0), &frame(2, 64));
        assert_eq!(drain(&mut line).iter().map(|(_, f)| id(f)).collect::<Vec<_>>(), [2]);
    }

    #[test]
    fn corruption_turns_one_bit_around_and_spares_the_addresses() {
        let mut line = Line::new(Params { corrupt: 1.0, ..Params::default() }, 1);
        for n in 0..200 {
            line.accept(ms(0.0), &frame(n, 40));
        }
        for (n, (_, left)) in (0..).zip(drain(&mut line)) {
            let sent = frame(n, 40);
            let wrong = |(a, b): (&u8, &u8)| (a ^ b).count_ones();
            assert_eq!(sent.iter().zip(&*left).map(wrong).sum::<u32>(), 1);
            let kept = VNET_HDR_LEN_BYTES + ETHERNET_HEADER_BYTES;
            assert_eq!(sent[..kept], left[..kept]);
        }
        assert_eq!(line.counters().corrupted, 200);
        // Nothing there to turn around.
        line.accept(ms(0.0), &frame(1, 8));
        assert_eq!(line.counters().corrupted, 200);
    }

    #[test]
    fn parameters_out_of_range_are_refused() {
        for bad in [
            Params { loss: 1.5, ..Params::default() },
            Params { corrupt: -0.1, ..Params::default() },
            Params { delay_ms: -1.0, ..Params::default() },
            Params { rate_bytes_per_s: f64::NAN, ..Params::default() },
        ] {
            assert!(bad.check().is_err(), "{bad:?}");
        }
        assert!(Params::default().check().is_ok());
    }

    proptest! {
        /// Whatever is asked for: no frame is unaccounted for, none is early, order holds, and the seed decides.
        #[test]
        fn every_frame_has_one_fate(
            seed in any::<u64>(),
            delay_ms in 0.0..50.0f64,
            jitter_ms in 0.0..50.0f64,
            rate in prop_oneof![Just(0.0), 1e4..1e7f64],
            loss in 0.0..1.0f64,
            duplicate in 0.0..1.0f64,
            gaps_us in prop::collection::vec(0u64..5000, 1..200),
        ) {
            let params = Params {
                delay_ms, jitter_ms, rate_bytes_per_s: rate, queue_bytes: 20_000, loss, duplicate, ..Params::default()
            };
            let run = || {
                let mut line = Line::new(params, seed);
                let mut now = Duration::ZERO;
                let mut came = Vec::new();
                for (n, gap_us) in gaps_us.iter().enumerate() {
                    now += Duration::from_micros(*gap_us);
                    came.push(now);
                    line.accept(now, &frame(n as u64, 300));
                }
                let left: Vec<_> = drain(&mut line).into_iter().map(|(at, f)| (at, id(&f))).collect();
                (came, left, line.counters())
            };
            let (came, left, counters) = run();
            prop_assert_eq!(counters.frames_in + counters.duplicated,
                            counters.frames_out + counters.lost + counters.dropped_queue);
            prop_assert_eq!(counters.frames_out, left.len() as u64);
            prop_assert!(left.windows(2).all(|pair| pair[0].1 <= pair[1].1));
            let least = Duration::from_secs_f64((delay_ms - jitter_ms).max(0.0) / 1e3);
            for (at, n) in &left {
                prop_assert!(*at >= came[*n as usize] + least);
            }
            prop_assert_eq!(run().1, left);
        }
    }
}
