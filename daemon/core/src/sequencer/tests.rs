use super::completion::is_zero;
use super::*;
use bytes::Bytes;
use tidelock_protocol::ids::WriterId;
use tidelock_protocol::record::Payload;

const NOW: MonoNanos = MonoNanos(0);
const EIO: DiskError = DiskError(5);

fn sequencer(mode: Mode, backlog_limit_bytes: u64) -> Sequencer {
    let mut s = Sequencer::new(Settings {
        writer: WriterId(0),
        mode,
        backlog_limit_bytes,
        lock_align_bytes: 1,
    });
    s.start(Epoch(1), Seq(0), Hlc(0), NOW, 0);
    s
}

fn extent(offset: u64, len_bytes: u64) -> Extent {
    Extent { disk: DiskId(0), offset, len_bytes }
}

fn data(len: u64) -> Effect {
    Effect::Write(Payload::new(vec![7; len as usize].into()))
}

fn write(s: &mut Sequencer, request: u64, offset: u64, len: u64) {
    s.submit(RequestId(request), extent(offset, len), data(len), false, NOW, 0);
}

/// The actions so far, in short: `P1` publish, `S1` send, `W0@8` local write op 0 at 8, `R0`
/// read, `C1` complete, `E1` complete with an error.
fn short(s: &mut Sequencer) -> String {
    std::iter::from_fn(|| s.poll_action())
        .map(|a| match a {
            Action::Publish(seq, _) => format!("P{seq}"),
            Action::Send(r) if r.body.copy => format!("K{}", r.seq),
            Action::Send(r) => format!("S{}", r.seq),
            Action::SendInOrder(_) => "D".into(),
            Action::Write { op, extent, .. } => format!("W{}@{}", op.0, extent.offset),
            Action::Read { op, .. } => format!("R{}", op.0),
            Action::FindHole { op, .. } => format!("H{}", op.0),
            Action::Complete(r, Ok(())) => format!("C{}", r.0),
            Action::Complete(r, Err(_)) => format!("E{}", r.0),
            Action::Copied { outcome, .. } => format!("{outcome:?}"),
            Action::Suspect(_) => "Suspect".into(),
        })
        .collect::<Vec<_>>()
        .join(" ")
}

#[test]
fn pipelined_completes_locally_and_publishes_before() {
    let mut s = sequencer(Mode::Pipelined, 1 << 20);
    write(&mut s, 1, 0, 8);
    assert_eq!(short(&mut s), "S1 P1 W0@0");
    s.written(OpId(0), Ok(()), NOW, 0);
    assert_eq!(short(&mut s), "C1");
}

#[test]
fn the_record_after_a_flush_says_so_but_no_copy() {
    let mut s = sequencer(Mode::Pipelined, 1 << 20);
    let flushed = |s: &mut Sequencer| {
        let sent = std::iter::from_fn(|| s.poll_action()).filter_map(|action| match action {
            Action::Send(record) => Some(record.body.flushed),
            _ => None,
        });
        sent.collect::<Vec<_>>()
    };
    write(&mut s, 1, 0, 8);
    s.flush_asked();
    s.flush_asked();
    s.copy_done(NOW, 0);
    write(&mut s, 2, 8, 8);
    write(&mut s, 3, 16, 8);
    assert_eq!(flushed(&mut s), [false, false, true, false]);
    s.submit(RequestId(4), extent(24, 8), data(8), true, NOW, 0);
    s.idle(NOW, 0);
    s.idle(NOW, 0);
    assert_eq!(flushed(&mut s), [false, true, false], "FUA is a flush after its write");
}

#[test]
fn sync_waits_for_the_backup_and_publishes_what_is_committed_only() {
    let mut s = sequencer(Mode::Sync, 1 << 20);
    write(&mut s, 1, 0, 8);
    write(&mut s, 2, 8, 8);
    assert_eq!(short(&mut s), "S1 W0@0 S2 W1@8");
    s.written(OpId(1), Ok(()), NOW, 0);
    s.committed(Seq(1), NOW, 0);
    assert_eq!(short(&mut s), "");
    s.written(OpId(0), Ok(()), NOW, 0);
    assert_eq!(short(&mut s), "P1 C1");
    s.committed(Seq(2), NOW, 0);
    assert_eq!(short(&mut s), "P2 C2");
}

#[test]
fn what_is_read_before_the_backup_has_it_is_published_in_sync_too() {
    let mut s = sequencer(Mode::Sync, 1 << 20);
    write(&mut s, 1, 0, 8);
    write(&mut s, 2, 8, 8);
    write(&mut s, 3, 16, 8);
    short(&mut s);
    s.is_read(extent(24, 8));
    assert_eq!(short(&mut s), "", "nobody wrote there");
    s.is_read(extent(4, 8));
    assert_eq!(short(&mut s), "P2", "the newest of those that it may show");
    s.is_read(extent(0, 8));
    assert_eq!(short(&mut s), "", "once is enough");
    s.is_read(extent(0, 1 << 20));
    assert_eq!(short(&mut s), "P3");
}

#[test]
fn leaving_sync_completes_what_waited_and_publishes_it_first() {
    let mut s = sequencer(Mode::Sync, 1 << 20);
    write(&mut s, 1, 0, 8);
    write(&mut s, 2, 8, 8);
    s.written(OpId(0), Ok(()), NOW, 0);
    short(&mut s);
    s.set_mode(Mode::Pipelined);
    assert_eq!(short(&mut s), "P2 C1");
}

#[test]
fn overlapping_writes_go_one_after_the_other_in_their_order() {
    let mut s = sequencer(Mode::Pipelined, 1 << 20);
    write(&mut s, 1, 0, 8);
    write(&mut s, 2, 4, 8);
    write(&mut s, 3, 11, 2); // overlaps the one that waits, not the one in flight
    write(&mut s, 4, 20, 1);
    assert_eq!(short(&mut s), "S1 P1 W0@0 S2 P2 W1@20");
    s.written(OpId(0), Ok(()), NOW, 0);
    assert_eq!(short(&mut s), "C1 S3 P3 W2@4");
    s.written(OpId(2), Ok(()), NOW, 0);
    assert_eq!(short(&mut s), "C2 S4 P4 W3@11");
}

#[test]
fn unaligned_neighbours_in_one_block_do_not_run_together() {
    let mut s = Sequencer::new(Settings {
        writer: WriterId(0),
        mode: Mode::Pipelined,
        backlog_limit_bytes: 1 << 20,
        lock_align_bytes: 512,
    });
    s.start(Epoch(1), Seq(0), Hlc(0), NOW, 0);
    write(&mut s, 1, 0, 100);
    write(&mut s, 2, 200, 100);
    write(&mut s, 3, 512, 100);
    assert_eq!(short(&mut s), "S1 P1 W0@0 S2 P2 W1@512");
}

#[test]
fn nothing_is_admitted_before_the_start() {
    let mut s = Sequencer::new(Settings {
        writer: WriterId(0),
        mode: Mode::Pipelined,
        backlog_limit_bytes: 1 << 20,
        lock_align_bytes: 1,
    });
    write(&mut s, 1, 0, 8);
    write(&mut s, 2, 0, 8);
    assert_eq!(short(&mut s), "");
    s.start(Epoch(3), Seq(41), Hlc(0), NOW, 0);
    assert_eq!(short(&mut s), "S42 P42 W0@0");
}

#[test]
fn a_full_backlog_lets_writes_wait_in_order_and_one_always_in() {
    let mut s = sequencer(Mode::Pipelined, 1000);
    write(&mut s, 1, 0, 5000); // beyond the limit, but alone
    write(&mut s, 2, 6000, 10);
    write(&mut s, 3, 7000, 10);
    assert_eq!(short(&mut s), "S1 P1 W0@0");
    assert!(s.is_backlog_full());
    s.written(OpId(0), Ok(()), NOW, 0);
    assert_eq!(short(&mut s), "C1");
    s.committed(Seq(1), NOW, 0);
    assert_eq!(short(&mut s), "S2 P2 W1@6000 S3 P3 W2@7000");
    assert!(!s.is_backlog_full());
    assert_eq!(s.lag().bytes, 20);
    assert_eq!(s.backlog_bytes(), 2 * (10 + RECORD_OVERHEAD_BYTES));
}

#[test]
fn what_we_say_ourselves_keeps_to_the_limit_too() {
    let mut s = sequencer(Mode::Pipelined, 2 * RECORD_OVERHEAD_BYTES + 100);
    write(&mut s, 1, 0, 100);
    s.idle(NOW, 0);
    assert_eq!(short(&mut s), "S1 P1 W0@0 S2");
    s.idle(NOW, 0);
    assert!(
        !s.may_speak() && !s.is_backlog_full(),
        "nobody waits, and there is no room for a word"
    );
    assert!(!s.pad_to(Seq(4), NOW, 0));
    assert_eq!(short(&mut s), "");
    s.committed(Seq(1), NOW, 0);
    assert!(!s.pad_to(Seq(4), NOW, 0), "for one of two");
    s.committed(Seq(3), NOW, 0);
    assert!(s.pad_to(Seq(4), NOW, 0));
    assert_eq!(short(&mut s), "S3 S4");
}

/// What is read becomes a record without asking anybody.
#[test]
fn copies_that_are_being_read_have_their_room_in_the_backlog() {
    let mut s = sequencer(Mode::Pipelined, 2 * (100 + RECORD_OVERHEAD_BYTES));
    for nth in 0..3 {
        s.submit_copy(extent(nth * 100, 100), CopyKind::Copy, NOW, 0);
    }
    s.submit_copy(extent(400, 4000), CopyKind::Digest, NOW, 0);
    assert_eq!(short(&mut s), "R0 R1");
    s.read_done(OpId(0), Ok(Bytes::from_static(&[1; 100])), NOW, 0);
    s.read_done(OpId(1), Err(EIO), NOW, 0);
    assert_eq!(short(&mut s), "K1 Sent Unreadable R2", "what has failed needs no room");
    s.read_done(OpId(2), Ok(Bytes::from_static(&[1; 100])), NOW, 0);
    assert_eq!(short(&mut s), "K2 Sent");
    assert_eq!(s.backlog_bytes(), s.backlog_limit_bytes());
    s.committed(Seq(1), NOW, 0);
    assert_eq!(short(&mut s), "R3", "a digest is no payload");
}

#[test]
fn a_failed_write_is_read_back_and_copied_before_the_guest_hears_of_it() {
    let mut s = sequencer(Mode::Pipelined, 1 << 20);
    write(&mut s, 1, 0, 8);
    write(&mut s, 2, 0, 8);
    short(&mut s);
    s.written(OpId(0), Err(EIO), NOW, 0);
    assert_eq!(short(&mut s), "R0", "the extent is still held");
    s.read_done(OpId(0), Ok(Bytes::from_static(&[1; 8])), NOW, 0);
    assert_eq!(short(&mut s), "K2 P2 E1 S3 P3 W1@0", "the guest may read what the copy says");
    s.written(OpId(1), Err(EIO), NOW, 0);
    short(&mut s);
    s.read_done(OpId(1), Err(EIO), NOW, 0);
    assert_eq!(short(&mut s), "Suspect E2");
}

#[test]
fn what_a_failed_write_has_left_is_read_back_only_if_there_is_room_for_it() {
    let record = 100 + RECORD_OVERHEAD_BYTES;
    let mut s = sequencer(Mode::Pipelined, 4 * record);
    for nth in 0..3 {
        write(&mut s, nth, nth * 100, 100);
    }
    short(&mut s);
    s.written(OpId(0), Err(EIO), NOW, 0);
    assert_eq!(short(&mut s), "R0");
    write(&mut s, 3, 300, 1);
    s.written(OpId(1), Err(EIO), NOW, 0);
    assert_eq!(short(&mut s), "Suspect E1", "the room is set aside for the first");
    s.read_done(OpId(0), Err(EIO), NOW, 0);
    assert_eq!(short(&mut s), "Suspect E0 S4 P4 W3@300", "it needs none any more");
    s.written(OpId(2), Err(EIO), NOW, 0);
    assert_eq!(short(&mut s), "Suspect E2");
    s.committed(Seq(4), NOW, 0);
    write(&mut s, 4, 400, 100);
    short(&mut s);
    s.written(OpId(4), Err(EIO), NOW, 0);
    s.read_done(OpId(4), Ok(Bytes::from_static(&[1; 100])), NOW, 0);
    assert_eq!(short(&mut s), "R4 K6 P6 E4");
    assert_eq!(s.backlog_bytes(), 2 * record);
}

#[test]
fn copies_are_never_in_p_and_hold_their_extent() {
    let mut s = sequencer(Mode::Pipelined, 1 << 20);
    s.submit_copy(extent(0, 8), CopyKind::CopyUnlessZero, NOW, 0);
    write(&mut s, 1, 4, 8);
    assert_eq!(short(&mut s), "R0");
    s.read_done(OpId(0), Ok(Bytes::from_static(&[1; 8])), NOW, 0);
    assert_eq!(short(&mut s), "K1 Sent S2 P2 W1@4");
    s.submit_copy(extent(100, 8), CopyKind::CopyUnlessZero, NOW, 0);
    s.read_done(OpId(2), Ok(Bytes::from_static(&[0; 8])), NOW, 0);
    assert_eq!(short(&mut s), "R2 Zero");
    s.submit_copy(extent(100, 8), CopyKind::Digest, NOW, 0);
    s.read_done(OpId(3), Ok(Bytes::from_static(&[0; 8])), NOW, 0);
    assert_eq!(short(&mut s), "R3 D Asked");
    assert_eq!(s.copy_done(NOW, 0), Seq(3));
    assert_eq!(s.published(), Seq(2));
}

#[test]
fn a_record_carries_the_entries_of_others_that_changed() {
    let mut s = sequencer(Mode::Pipelined, 1 << 20);
    let tag = CountVector::of(WriterId(3), Seq(9));
    s.depends_on(&tag);
    write(&mut s, 1, 0, 1);
    s.depends_on(&tag);
    write(&mut s, 2, 1, 1);
    let deps: Vec<CountVector> = std::iter::from_fn(|| s.poll_action())
        .filter_map(|a| match a {
            Action::Send(r) => Some(r.deps),
            _ => None,
        })
        .collect();
    assert_eq!(deps, [tag, CountVector::new()]);
}

#[test]
fn zero_detection_sees_every_byte() {
    for len in 0..200 {
        let mut bytes = vec![0; len];
        assert!(is_zero(&bytes));
        for at in 0..len {
            bytes[at] = 1;
            assert!(!is_zero(&bytes));
            bytes[at] = 0;
        }
    }
}

#[test]
fn what_must_come_after_a_time_beyond_the_ceiling_waits_for_it() {
    let mut s = sequencer(Mode::Pipelined, 1 << 20);
    s.set_ceiling(1_000, NOW, 0);
    s.submit_copy(extent(100, 8), CopyKind::Copy, NOW, 0);
    assert_eq!(short(&mut s), "R0");
    s.observe(Hlc::new(5_000, 0));
    assert!(s.waits_for_ceiling());
    write(&mut s, 1, 0, 8);
    s.idle(NOW, 0);
    assert!(!s.pad_to(Seq(9), NOW, 0));
    assert_eq!(short(&mut s), "");
    // It was read before, so it does not depend on what was heard.
    s.read_done(OpId(0), Ok(vec![1; 8].into()), NOW, 0);
    assert_eq!(short(&mut s), "K1 Sent");
    assert!(s.record_hlc() < Hlc::new(1_000, 0));
    assert_eq!(s.greatest_hlc(), Hlc::new(5_000, 0));
    s.set_ceiling(5_100, NOW, 0);
    assert_eq!(short(&mut s), "S2 P2 W1@0");
    assert!(s.record_hlc() > Hlc::new(5_000, 0));
}

#[test]
fn what_is_written_before_the_stream_begins_has_no_record_and_holds_its_extent() {
    let settings = Settings {
        writer: WriterId(0),
        mode: Mode::Sync,
        backlog_limit_bytes: 1 << 20,
        lock_align_bytes: 1,
    };
    let mut s = Sequencer::new(settings);
    write(&mut s, 1, 0, 8);
    assert_eq!(short(&mut s), "");
    s.serve_unrecorded(NOW, 0);
    write(&mut s, 2, 4, 8);
    write(&mut s, 3, 100, 8);
    write(&mut s, 4, 200, 8);
    assert_eq!(short(&mut s), "W0@0 W1@100 W2@200");
    s.written(OpId(0), Ok(()), NOW, 0);
    assert_eq!(short(&mut s), "C1 W3@4", "in sync, too: nobody can be waited for");
    s.written(OpId(1), Err(EIO), NOW, 0);
    assert_eq!(short(&mut s), "E3", "there is no stream to repair it in");
    assert_eq!(s.published(), Seq(0));

    // In flight when the stream begins: what comes there is recorded, after it; no copy reads what is half written.
    write(&mut s, 5, 8, 8);
    let mut in_flight = s.unrecorded();
    in_flight.sort_by_key(|e| e.offset);
    assert_eq!(in_flight, [extent(4, 8), extent(200, 8)]);
    s.start(Epoch(1), Seq(40), Hlc(0), NOW, 0);
    assert!(!s.serves_unrecorded());
    s.submit_copy(extent(0, 16), CopyKind::Copy, NOW, 0);
    write(&mut s, 6, 208, 8);
    assert_eq!(short(&mut s), "S41 W4@208");
    s.written(OpId(3), Ok(()), NOW, 0);
    assert_eq!(short(&mut s), "C2 S42 W5@8");
    s.written(OpId(2), Ok(()), NOW, 0);
    assert_eq!(short(&mut s), "C4", "it was told so, and has no seq");
    assert!(s.unrecorded().is_empty());
    s.written(OpId(5), Ok(()), NOW, 0);
    assert_eq!(short(&mut s), "R6", "the copy, after both");
    s.committed(Seq(42), NOW, 0);
    assert_eq!(short(&mut s), "P42 C5");
}

#[test]
fn a_stream_that_stands_lets_guests_go_on_and_no_copy() {
    let mut s = sequencer(Mode::Pipelined, 2 * (8 + RECORD_OVERHEAD_BYTES));
    write(&mut s, 1, 0, 8);
    write(&mut s, 2, 8, 8);
    assert_eq!(short(&mut s), "S1 P1 W0@0 S2 P2 W1@8");
    s.submit_copy(extent(100, 8), CopyKind::Copy, NOW, 0);
    assert!(s.is_backlog_full() && !s.guests_wait_for_room(), "a copy waits, no guest does");
    write(&mut s, 3, 100, 8);
    s.submit_copy(extent(0, 8), CopyKind::Digest, NOW, 0);
    write(&mut s, 4, 0, 8);
    assert!(s.guests_wait_for_room());
    assert_eq!(short(&mut s), "");

    s.stop_recording(NOW, 0);
    assert_eq!(
        short(&mut s),
        "Withdrawn W2@100",
        "behind the copy, and the other waits for a write"
    );
    assert!(!s.is_recorded_idle());
    s.written(OpId(0), Err(EIO), NOW, 0);
    assert_eq!(short(&mut s), "Suspect E1 Withdrawn W3@0", "there is no room to repair it");
    s.idle(NOW, 0);
    assert_eq!((short(&mut s).as_str(), s.last_seq()), ("", Seq(2)), "no heartbeat either");
    s.written(OpId(1), Ok(()), NOW, 0);
    s.written(OpId(3), Ok(()), NOW, 0);
    assert_eq!(short(&mut s), "C2 C4");
    assert!(s.is_recorded_idle(), "all that has a record is done");
    s.committed(Seq(2), NOW, 0);
    let left = s.unrecorded();
    assert_eq!(left, [extent(100, 8)]);

    s.record_again(NOW, 0);
    write(&mut s, 5, 104, 8);
    write(&mut s, 6, 200, 8);
    assert_eq!(short(&mut s), "S3 P3 W4@200", "the other waits for what has no record");
    s.written(OpId(2), Ok(()), NOW, 0);
    assert_eq!(short(&mut s), "C3 S4 P4 W5@104");
}

#[test]
fn what_is_not_recorded_waits_for_no_ceiling() {
    let mut s = Sequencer::new(Settings {
        writer: WriterId(0),
        mode: Mode::Pipelined,
        backlog_limit_bytes: 1 << 20,
        lock_align_bytes: 1,
    });
    s.set_ceiling(1_000, NOW, 0);
    s.observe(Hlc::new(5_000, 0));
    s.serve_unrecorded(NOW, 0);
    write(&mut s, 1, 0, 8);
    assert_eq!(short(&mut s), "W0@0");
    s.start(Epoch(1), Seq(0), Hlc(0), NOW, 0);
    write(&mut s, 2, 8, 8);
    assert_eq!(short(&mut s), "");
    s.set_ceiling(5_100, NOW, 0);
    assert_eq!(short(&mut s), "S1 P1 W1@8");
}

#[test]
fn a_stream_that_goes_on_publishes_and_counts_what_was_left() {
    let mut s = Sequencer::new(Settings {
        writer: WriterId(0),
        mode: Mode::Pipelined,
        backlog_limit_bytes: 4 * (10 + RECORD_OVERHEAD_BYTES),
        lock_align_bytes: 1,
    });
    let left = |seq| crate::backlog::Waiting {
        seq: Seq(seq),
        payload_bytes: 10,
        is_of_copy: seq == 8,
        is_of_us: seq == 8,
    };
    s.go_on(Epoch(3), &[left(7), left(8), left(9)], Hlc(5 << 16), NOW, 1_000);
    assert_eq!((s.durable(), s.last_seq(), s.published()), (Seq(6), Seq(9), Seq(9)));
    assert_eq!(s.poll_action(), Some(Action::Publish(Seq(9), Hlc(5 << 16))), "guests may know it");
    assert_eq!((s.lag().writes, s.lag().bytes), (3, 30));
    assert_eq!(s.copies_on_the_way(), 1);
    s.committed(Seq(8), NOW, 1_000);
    assert_eq!(s.copies_on_the_way(), 0);
    assert_eq!((s.durable(), s.backlog_bytes()), (Seq(8), 10 + RECORD_OVERHEAD_BYTES));
    s.idle(NOW, 1_000);
    let Some(Action::Send(record)) = s.poll_action() else { panic!("not sent") };
    assert_eq!((record.seq, record.epoch), (Seq(10), Epoch(3)));
    assert!(record.hlc > Hlc(5 << 16));
}

/// The backup is asked for zeroes at the point of the stream at which the hole was seen.
#[test]
fn a_hole_is_asked_about_before_anything_is_written_to_it() {
    let mut s = sequencer(Mode::Pipelined, 1 << 20);
    write(&mut s, 1, 0, 8);
    s.submit_copy(extent(0, 1 << 40), CopyKind::Hole, NOW, 0);
    write(&mut s, 2, 1 << 30, 8);
    assert_eq!(short(&mut s), "S1 P1 W0@0", "the look waits for the write before it");
    s.written(OpId(0), Ok(()), NOW, 0);
    assert_eq!(short(&mut s), "C1 H1", "the write after it waits for the look");
    s.looked(OpId(1), Ok(Look::Hole(1 << 39)), NOW, 0);
    assert_eq!(short(&mut s), format!("D AskedForZeroes({}) S2 P2 W2@{}", 1u64 << 39, 1 << 30));
    s.submit_copy(extent(1 << 39, 1 << 39), CopyKind::Hole, NOW, 0);
    assert_eq!(short(&mut s), "H3");
    s.looked(OpId(3), Err(EIO), NOW, 0);
    assert_eq!(short(&mut s), format!("HasData({})", 1u64 << 39), "reading will tell");
}
