//! Queues of connections and guests in front of a group.

use super::*;
use tidelock_protocol::limits;

const KEY: DiskKey = DiskKey { writer: WriterId(0), disk: DiskId(0) };

fn beacon() -> Message {
    Message::Beacon { sent_at: MonoNanos(1) }
}

fn frames(messages: impl Iterator<Item = Message>) -> VecDeque<Frame> {
    messages.map(|message| Frame::Control(LINK.channel, message)).collect()
}

/// Small messages, as many as a connection may have handled in one turn.
fn turn_of_work() -> VecDeque<Frame> {
    let each = work_bytes(&Frame::Control(LINK.channel, beacon()));
    frames((0..TURN_WORK_BYTES.div_ceil(each)).map(|_| beacon()))
}

fn is_attached(of: &Looped) -> bool {
    of.state.group().unwrap().status(at_ms(0)).writers[0].connected_since_unix_ms.is_some()
}

#[test]
fn the_end_of_a_connection_does_not_wait_behind_frames_that_wait_for_room() {
    let mut of = Looped::new();
    of.driver.disk.set_faults(Faults { capacity_bytes: Some(0), ..Faults::default() });
    of.record(2);
    of.turn(0);
    assert!(!of.state.group().unwrap().accepts());
    of.state.begin_turn();
    of.host(0, HostEvent::Frames { link: LINK, frames: turn_of_work(), room: Taken::default() });
    of.record(3);
    of.host(0, HostEvent::Lost(LINK.connection));
    assert!(is_attached(&of) && of.state.frames_waiting().count() == 1, "in order, so far");
    of.turn_alone(0);
    assert!(!is_attached(&of) && of.state.frames_waiting().count() == 1);
}

#[test]
fn the_work_of_a_frame_is_what_is_read_or_written_for_it() {
    let work = |message| work_bytes(&Frame::Control(LINK.channel, message));
    let digest = |len_bytes| {
        work(Message::DigestCheck { disk: DiskId(0), offset: 0, len_bytes, digest: [0; 32] })
    };
    let small = work(beacon());
    assert!(small > 0);
    assert_eq!(digest(512), small + 512);
    assert_eq!(digest(u32::MAX), small + u64::from(limits::DIGEST_CHUNK_MAX_BYTES));
    let zero = work(Message::ZeroCheck { disk: DiskId(0), offset: 0, len_bytes: 512 });
    assert!(zero > 10 * small);
    assert_eq!(work(Message::ModeChanged { mode: Mode::Sync }), zero);
    assert_eq!(work(Message::ServesUnreached { serves: true }), zero);
    assert_eq!(work_bytes(&Frame::Record(LINK.channel, copy_done())), 0, "bounded by its bytes");
}

#[test]
fn a_connection_causes_no_more_work_in_a_turn_than_it_may_and_goes_on_in_the_next() {
    let mut of = Looped::new();
    of.state.begin_turn();
    let mut twice = turn_of_work();
    twice.extend(turn_of_work());
    let all = twice.len();
    of.host(0, HostEvent::Frames { link: LINK, frames: twice, room: Taken::default() });
    assert_eq!(of.state.frames_waiting().count(), all / 2);
    assert_eq!(of.state.timeout(at_ms(0)), Some(Duration::ZERO));
    of.turn_alone(0);
    assert_eq!(of.state.frames_waiting().count(), 0);
    of.turn_alone(0);
    assert!(!of.state.has_waiting());
}

fn recovered() -> Looped {
    let mut of = Looped::new();
    let order = Order::Recover { primary_declared_dead: true, point: None, accepts_damage: false };
    of.order(0, 1, order);
    assert!(of.is_recovered());
    of
}

impl Looped {
    fn guest(&mut self, done: u32, request: GuestRequest) {
        self.state.guest(request, done, at_ms(0), &mut self.driver);
    }

    fn guest_writes(&mut self, done: u32, key: DiskKey, durable: bool) {
        let effect = GuestEffect::Write(vec![7; 8192].into());
        self.guest(done, GuestRequest::Write { key, offset: 0, effect, durable });
    }
}

#[test]
fn guests_writes_without_a_flush_are_made_durable_before_they_are_too_many() {
    let mut of = recovered();
    let mut written = 0;
    while of.driver.sync.is_none() {
        of.guest_writes(written, KEY, false);
        of.turn_alone(0);
        written += 1;
        assert_eq!(of.driver.guests.len(), written as usize, "none waits for the disk");
    }
    let bytes = u64::from(written) * 8192;
    assert!(bytes <= 64 << 20 && bytes > 60 << 20, "{bytes}");
    assert!(of.sync_ends(0));
    of.guest_writes(written, KEY, false);
    of.turn_alone(0);
    assert!(of.driver.sync.is_none(), "they are counted anew");
}

#[test]
fn a_guest_s_flush_waits_for_the_disk_and_a_write_elsewhere_is_refused() {
    let mut of = recovered();
    of.guest_writes(1, KEY, false);
    of.guest(2, GuestRequest::Flush(KEY.writer));
    of.turn_alone(0);
    assert_eq!(of.driver.guests, [1]);
    assert!(of.sync_ends(0));
    assert_eq!(of.driver.guests, [1, 2]);
    of.guest_writes(3, DiskKey { disk: DiskId(9), ..KEY }, false);
    of.guest_writes(4, KEY, false);
    of.turn_alone(0);
    assert_eq!(of.driver.guests, [1, 2, 4], "those behind it go on");
    assert_eq!(of.driver.failed, [(3, io::ErrorKind::PermissionDenied)]);
}

#[test]
fn guests_wait_for_room_and_hear_of_a_failure() {
    let mut of = recovered();
    of.driver.disk.set_faults(Faults { capacity_bytes: Some(0), ..Faults::default() });
    of.guest_writes(1, KEY, false);
    of.turn_alone(0);
    of.guest_writes(2, KEY, false);
    assert!(of.state.has_waiting());
    of.turn_alone(0);
    assert!(of.driver.guests.is_empty() && of.driver.failed.is_empty());
    assert_eq!(of.state.timeout(at_ms(0)), Some(Duration::from_millis(RETRY_MS)));
    of.driver.disk.set_faults(Faults::default());
    of.turn_alone(0);
    of.turn_alone(0);
    assert_eq!(of.driver.guests, [1, 2]);
    assert!(!of.state.has_waiting());
}
