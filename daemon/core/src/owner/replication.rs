//! What one turn of the owner loop does for replication, without the ring: acknowledgements in,
//! copies out, and when to be woken.

use super::copying::Copying;
use crate::activity::ActivityLog;
use crate::copy_job::PIECE_BYTES;
use crate::link::GateControl;
use crate::link::port::OwnerPort;
use crate::sequencer::Sequencer;
use tidelock_protocol::ids::{MonoNanos, Seq};
use tidelock_protocol::lease::HoldReason;

/// Copies are begun while less than this is being read for them or waits for the connection: a guest's write that is
/// admitted next waits behind no more of the member's queue. The link takes as much in a turn
/// ([`TURN_BYTES`](crate::link::turns::TURN_BYTES)), and the kernel has as much to send meanwhile
/// ([`NOTSENT_LOWAT_BYTES`](crate::link::NOTSENT_LOWAT_BYTES)), so the link stays full while the next pieces are read.
pub const AHEAD_MAX_BYTES: u64 = 256 << 10;
const _: () = assert!(AHEAD_MAX_BYTES >= 2 * PIECE_BYTES);

/// Both clocks of the host.
#[derive(Clone, Copy, Debug)]
pub struct Clocks {
    /// For spans.
    pub now: MonoNanos,
    /// For the HLC.
    pub wall_ms: u64,
}

/// Acts on what the backup has acknowledged since the last turn. `records`: guests' writes have records, and will have.
pub fn take_acks<T>(
    member: &str,
    sequencer: &mut Sequencer,
    copying: &mut Copying,
    port: &OwnerPort<T>,
    gate: &dyn GateControl,
    records: bool,
    clocks: Clocks,
) {
    let (durable, committed) = port.acked();
    if sequencer.is_started() && durable > sequencer.durable() {
        sequencer.committed(durable, clocks.now, clocks.wall_ms);
    }
    if copying.committed(member, committed, clocks.now) && records {
        gate.hold(HoldReason::Gap, false);
    }
}

/// Begins copies while there is room for them, and gives out the seqs that somebody waits for.
pub fn drive_copies<T>(
    sequencer: &mut Sequencer,
    copying: &mut Copying,
    port: &OwnerPort<T>,
    clocks: Clocks,
) {
    if !sequencer.is_started() {
        return;
    }
    while !sequencer.waits_for_ceiling() && copying.wants_more(clocks.now) {
        // Copies wait while guests' writes do, and while they would queue in front of one. But one is always under
        // way, in its turn: else guests that write as much as the link carries would keep the sites apart for ever.
        let has_share = copying.is_below_share(sequencer.copies_on_the_way());
        let taken = port.taken();
        let room_bytes = AHEAD_MAX_BYTES.saturating_sub(copying.reading_bytes());
        let waits = copying.is_window_full(sequencer.lag().bytes)
            || sequencer.is_backlog_full()
            || room_bytes == 0
            || sequencer.has_after(taken, room_bytes);
        if waits && !has_share {
            port.wake_beyond(taken);
            break;
        }
        let Some((extent, kind)) = copying.next(clocks.now) else { break };
        sequencer.submit_copy(extent, kind, clocks.now, clocks.wall_ms);
    }
    let nobody_waits = sequencer.pad_to(copying.pad_to(), clocks.now, clocks.wall_ms);
    if copying.wants_marker() && nobody_waits && sequencer.may_speak() {
        let marker = sequencer.copy_done(clocks.now, clocks.wall_ms);
        copying.set_marker(marker);
    }
}

/// Admits a heartbeat. Returns the seq that it is back with; `None`: nothing can be admitted now. While the
/// backlog is full, or the loop is to end, the last record that was admitted stands for it.
pub fn admit_heartbeat(sequencer: &mut Sequencer, is_ending: bool, clocks: Clocks) -> Option<Seq> {
    if !sequencer.is_started() || sequencer.waits_for_ceiling() {
        return None;
    }
    if !is_ending {
        sequencer.idle(clocks.now, clocks.wall_ms);
    }
    Some(sequencer.last_seq())
}

/// What the turn has shown of where the sites may differ.
pub fn drive_activity(
    activity: &mut ActivityLog,
    sequencer: &Sequencer,
    copying: &mut Copying,
    now: MonoNanos,
) {
    let last_seq = sequencer.last_seq();
    activity.committed(sequencer.durable());
    for extent in copying.take_finished() {
        activity.compared(extent, last_seq);
    }
    activity.step(sequencer.is_started() && copying.is_whole(), last_seq, now);
}

/// At the end of a turn: whether the next acknowledgement must wake the loop. `others`: somebody
/// besides sequencer and copies waits for one.
pub fn ask_for_acks<T>(
    sequencer: &Sequencer,
    copying: &Copying,
    port: &OwnerPort<T>,
    others: bool,
) {
    let wants_acks = sequencer.waiting() > 0
        || sequencer.waiting_for_backup() > 0
        || copying.is_active()
        || others;
    port.set_wants_acks(wants_acks);
    if wants_acks && port.acked().0 > sequencer.durable() {
        // It came between the last look and the wish to be woken.
        port.wake();
    }
}

/// Whether nothing is left to do here and everything is at the backup.
#[must_use]
pub fn is_settled(sequencer: &Sequencer) -> bool {
    sequencer.is_idle() && (!sequencer.is_started() || sequencer.durable() == sequencer.last_seq())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::copy_job::Bounds;
    use crate::sequencer::{Action, Extent, RequestId, Settings};
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::task::Wake;
    use tidelock_protocol::hlc::Hlc;
    use tidelock_protocol::ids::{DiskId, Epoch, WriterId};
    use tidelock_protocol::message::Mode;
    use tidelock_protocol::record::{Effect, Payload};

    const CLOCKS: Clocks = Clocks { now: MonoNanos(1_000_000), wall_ms: 1_000 };

    fn sequencer() -> Sequencer {
        Sequencer::new(Settings {
            writer: WriterId(0),
            mode: Mode::Pipelined,
            backlog_limit_bytes: 4096 + 512,
            lock_align_bytes: 512,
        })
    }

    fn start(sequencer: &mut Sequencer) {
        sequencer.start(Epoch(1), Seq(7), Hlc(0), CLOCKS.now, CLOCKS.wall_ms);
    }

    fn write(sequencer: &mut Sequencer, offset: u64) {
        let extent = Extent { disk: DiskId(0), offset, len_bytes: 4096 };
        let effect = Effect::Write(Payload::new(vec![1; 4096].into()));
        sequencer.submit(RequestId(offset), extent, effect, false, CLOCKS.now, CLOCKS.wall_ms);
    }

    #[test]
    fn a_heartbeat_is_a_record_that_does_nothing_and_that_no_packet_waits_for() {
        let mut sequencer = sequencer();
        assert_eq!(admit_heartbeat(&mut sequencer, false, CLOCKS), None, "nothing is admitted yet");
        start(&mut sequencer);
        assert_eq!(admit_heartbeat(&mut sequencer, false, CLOCKS), Some(Seq(8)));
        let Some(Action::Send(record)) = sequencer.poll_action() else { panic!("not sent") };
        assert_eq!((record.seq, record.body.effect), (Seq(8), Effect::Idle));
        assert_eq!(sequencer.poll_action(), None, "P does not name it");
    }

    #[test]
    fn with_a_full_backlog_or_at_the_end_the_last_record_stands_for_it() {
        let mut sequencer = sequencer();
        start(&mut sequencer);
        write(&mut sequencer, 0);
        write(&mut sequencer, 4096);
        assert!(sequencer.is_backlog_full());
        assert_eq!(admit_heartbeat(&mut sequencer, false, CLOCKS), Some(Seq(8)));
        assert_eq!(sequencer.last_seq(), Seq(8), "nothing was admitted");
        sequencer.committed(Seq(8), CLOCKS.now, CLOCKS.wall_ms);
        assert_eq!(
            admit_heartbeat(&mut sequencer, true, CLOCKS),
            Some(Seq(9)),
            "the write that waited"
        );
        assert_eq!(sequencer.last_seq(), Seq(9));
    }

    #[derive(Default)]
    struct Woken(AtomicUsize);

    impl Wake for Woken {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::SeqCst);
        }
    }

    /// A word that comes between the look at the words and the wish to be woken has woken nobody.
    #[test]
    fn the_word_that_somebody_waits_for_wakes_the_loop_also_if_it_came_before_the_wish() {
        let wakes = |sequencer: &Sequencer, others, has_come| {
            let woken = Arc::new(Woken::default());
            let (port, _messages) = OwnerPort::<()>::new(woken.clone().into());
            if has_come {
                port.set_acked(Seq(8), Seq(8));
            }
            let copying = Copying::new(Bounds { window_bytes: 1 << 20, rate_bytes_per_s: 0 });
            ask_for_acks(sequencer, &copying, &port, others);
            let at_once = woken.0.load(Ordering::SeqCst);
            port.set_acked(Seq(9), Seq(9));
            (at_once, woken.0.load(Ordering::SeqCst) - at_once)
        };
        let mut idle = sequencer();
        start(&mut idle);
        let mut is_full = sequencer();
        start(&mut is_full);
        (0..2).for_each(|nth| write(&mut is_full, nth * 4096));
        assert_eq!((is_full.waiting(), is_full.waiting_for_backup()), (1, 0));
        let mut is_sync = sequencer();
        is_sync.set_mode(Mode::Sync);
        start(&mut is_sync);
        write(&mut is_sync, 0);
        while let Some(action) = is_sync.poll_action() {
            if let Action::Write { op, .. } = action {
                is_sync.written(op, Ok(()), CLOCKS.now, CLOCKS.wall_ms);
            }
        }
        assert_eq!((is_sync.waiting(), is_sync.waiting_for_backup()), (0, 1));
        for (sequencer, others, waits) in
            [(&idle, false, 0), (&idle, true, 1), (&is_full, false, 1), (&is_sync, false, 1)]
        {
            assert_eq!(wakes(sequencer, others, false), (0, waits));
            assert_eq!(wakes(sequencer, others, true), (waits, waits));
        }
    }
}
