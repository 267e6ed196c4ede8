//! What becomes of a group whose disk is slow, full, or fails.

use super::*;
use tidelock_protocol::limits;
use tidelock_protocol::part::Part;

#[test]
fn folding_keeps_to_its_rate_while_nothing_presses() {
    let disk = Memory::new();
    let mut group = whole(&disk);
    while fold(&mut group) {}
    group.options.fold_rate_bytes_s = Some(1000);
    let mut next = 4;
    let mut feed = |group: &mut Group<Memory>| {
        for _ in 0..10 {
            assert!(send(group, LINK, write(next, 0, 1, 500)));
            group.flush();
            next += 1;
        }
    };
    let fold_at = |group: &mut Group<Memory>, ms| {
        let before = group.unfolded_bytes();
        let job = group.fold_job(at_ms(ms))?;
        let cut = job.cut.clone();
        group.fold_done(cut, job.run());
        Some(before - group.unfolded_bytes())
    };
    feed(&mut group);
    // Two seconds' worth, then nothing until they have passed.
    let first = fold_at(&mut group, 0).unwrap();
    assert!((2000..3000).contains(&first), "{first}");
    assert!(group.fold_is_paced(at_ms(1999)));
    assert_eq!(fold_at(&mut group, 1999), None);
    assert!(!group.fold_is_paced(at_ms(3000)));
    assert!(fold_at(&mut group, 3000).is_some());
    // What waits is half of what may wait: it goes as fast as it can.
    feed(&mut group);
    group.options.unfolded_max_bytes = 2 * group.unfolded_bytes();
    assert!(fold_at(&mut group, 3001).unwrap() > 3000);
    assert_eq!(group.unfolded_bytes(), 0);
}

#[test]
fn at_the_limit_of_unfolded_bytes_the_group_stalls_and_comes_back() {
    let disk = Memory::new();
    let mut group = whole(&disk);
    group.options.unfolded_max_bytes = group.unfolded_bytes() + 3000;
    let pin = group.pin().unwrap();
    assert!(!pin.is_revoked());
    let mut next = 4;
    while !pin.is_revoked() {
        assert!(group.unfolded_bytes() < group.options.unfolded_max_bytes);
        assert!(send(&mut group, LINK, write(next, 0, 1, 500)));
        group.flush();
        next += 1;
        assert!(next < 20, "the pin must give way");
    }
    assert!(group.accepts(), "an export does not stop replication");
    drop(pin);
    while group.accepts() {
        assert!(send(&mut group, LINK, write(next, 0, 1, 500)));
        group.flush();
        next += 1;
        assert!(next < 20, "it must stall");
    }
    // An export that begins now must not keep it so.
    let late = group.pin().unwrap();
    group.check_unfolded();
    assert!(late.is_revoked());
    drop(late);
    assert!(!send(&mut group, LINK, write(next, 0, 1, 500)), "it comes back to the caller");
    let told = |outputs: &[Output], stalled: bool| {
        outputs.iter().any(|output| {
            matches!(output, Output::Send(_, Message::Stalled { reason }) if reason.is_some() == stalled)
        })
    };
    assert!(told(&group.take_outputs(), true));
    while fold(&mut group) {}
    assert!(told(&group.take_outputs(), false));
    assert!(send(&mut group, LINK, write(next, 0, 1, 500)));
    group.flush();
    assert_eq!(acked(&group.take_outputs()), Some((next, next)));
}

#[test]
fn a_full_disk_stalls_and_nothing_is_lost_or_doubled() {
    for room in (0..4000).step_by(61) {
        let disk = Memory::new();
        let mut group = whole(&disk);
        let used: u64 = group.journal().bytes() + SIZE + 2000;
        disk.set_faults(Faults { capacity_bytes: Some(used + room), ..Faults::default() });
        let (mut next, mut stalls) = (4, 0);
        while next < 20 {
            if send(&mut group, LINK, write(next, next * 50, next as u8, 400)) {
                next += 1;
            }
            group.flush();
            assert_eq!(group.broken(), None);
            if !group.accepts() {
                stalls += 1;
                // A new run cannot be told where the stream ends.
                group.attach(at_ms(0), OTHER, "host-a", &attach_message(2, 1, LastRun::Unknown));
                let kind = refusal(&group.take_outputs()).map(|(_, kind)| kind);
                assert_eq!(kind, Some(RefusalKind::Stopping));
                disk.set_faults(Faults::default());
                group.retry();
                group.flush();
                assert!(group.accepts());
                assert_eq!(acked(&group.take_outputs()), Some((next - 1, next - 1)));
            }
        }
        assert!(stalls <= 1 && (stalls == 1 || room > 1000), "room {room}: {stalls} stalls");
        let mut expected = vec![0; SIZE as usize];
        expected[..1000].fill(1);
        expected[500..1500].fill(2);
        (4..20usize).for_each(|n| expected[n * 50..n * 50 + 400].fill(n as u8));
        let mut group = reopen(&disk.crash(&mut || false));
        assert_eq!(read_disk(&mut group), expected);
    }
}

fn logged(number: u64) -> Frame {
    Frame::Control(LINK.channel, Message::Logged(LogAge { file: 1, number }))
}

/// Ages of an activity log by the hundred thousand, all between two syncs, have filled a batch, and an assertion has ended
/// the server.
#[test]
fn a_flood_of_log_ages_is_written_when_a_batch_is_full() {
    let disk = Memory::new();
    let mut group = whole(&disk);
    let last = (journal::BATCH_TARGET_BYTES / journal::NOTE_HEADER_BYTES) as u64;
    for number in 1..=last {
        assert!(group.receive(at_ms(0), LINK, logged(number)).is_none());
    }
    group.flush();
    let log = LogAge { file: 1, number: last };
    assert_eq!(reopen(&disk.crash(&mut || false)).state().log_of(WRITER), log);
}

/// A disk that is full has left a full batch behind, and the next note has ended the server.
#[test]
fn a_full_batch_that_cannot_be_written_takes_no_log_age_and_is_in_no_attachments_way() {
    let disk = Memory::new();
    let mut group = whole(&disk);
    disk.set_faults(Faults { capacity_bytes: Some(0), ..Faults::default() });
    let mut next = 4;
    while send(&mut group, LINK, write(next, 0, 1, SIZE as usize)) {
        next += 1;
    }
    assert!(group.journal().staged_bytes() >= journal::BATCH_TARGET_BYTES);
    let kept = group.receive(at_ms(0), LINK, logged(1));
    assert_eq!(kept, Some(logged(1)), "it waits as a record does");
    // A larger disk begins a resync, which is put on record by a note.
    let grown = attach_message(1, 1, LastRun::Continues { from: Seq(4) });
    let grown = but(grown, |of| of.disks[0].size_bytes *= 2);
    group.attach(at_ms(0), OTHER, "host-a", &grown);
    assert_eq!(group.broken(), None);
    disk.set_faults(Faults::default());
    group.retry();
    group.flush();
    assert!(group.accepts());
    let kept = reopen(&disk.crash(&mut || false));
    assert_eq!(kept.state().writers[0].seq, Seq(next - 1), "all of the batch");
}

/// A host that is told so sends what it has written since, and takes it for compared later.
#[test]
fn a_resync_is_told_only_once_it_is_on_record_also_to_a_host_that_asks_again() {
    let disk = Memory::new();
    let mut group = whole(&disk);
    disk.set_faults(Faults { capacity_bytes: Some(0), ..Faults::default() });
    let asks = attach_message(1, 1, LastRun::Unclean { log: LogAge::default() });
    for link in [LINK, OTHER, LATEST] {
        group.attach(at_ms(0), link, "host-a", &asks);
        let outputs = group.take_outputs();
        assert_eq!(refusal(&outputs), Some((link, RefusalKind::Stopping)), "{outputs:?}");
    }
    let crashed = reopen(&disk.crash(&mut || false));
    assert_eq!(crashed.state().writers[0].copy, CopyState::Whole);
    disk.set_faults(Faults::default());
    let told = join(&mut group, LATEST, 1, LastRun::Unclean { log: LogAge::default() });
    assert_eq!(copy_of(&told), CopyState::Resyncing);
    let crashed = reopen(&disk.crash(&mut || false));
    assert_eq!(crashed.state().writers[0].copy, CopyState::Resyncing);
}

#[test]
fn a_failing_disk_breaks_the_group_and_opening_it_again_mends_it() {
    let disk = Memory::new();
    let mut group = whole(&disk);
    disk.set_faults(Faults { sync_fails: true, ..Faults::default() });
    send(&mut group, LINK, write(4, 0, 4, 10));
    group.flush();
    let outputs = group.take_outputs();
    assert_eq!((acked(&outputs), refusal(&outputs)), (None, Some((LINK, RefusalKind::Stopping))));
    assert!(group.broken().is_some() && !group.accepts());
    disk.set_faults(Faults::default());
    group.flush();
    assert_eq!(acked(&group.take_outputs()), None, "never again");
    let mut group = reopen(&disk);
    let again = join(&mut group, LINK, 1, LastRun::Continues { from: Seq(4) });
    assert!(again.progress.durable >= Seq(3) && copy_of(&again) == CopyState::Whole);
    send(&mut group, LINK, write(4, 0, 4, 10));
    send(&mut group, LINK, write(5, 0, 5, 10));
    group.flush();
    assert_eq!(acked(&group.take_outputs()), Some((5, 5)));
}

/// The window would keep all of it, and the disk is full to the last byte: folding needs room for its position.
#[test]
fn a_full_disk_shortens_the_window_in_the_reserves_room_and_pins_stay() {
    let disk = Memory::new();
    disk.set_reserve(8000);
    let mut group = whole(&disk);
    group.options.retention.window_ms = 3_600_000;
    let full = |disk: &Memory| {
        let capacity_bytes = Some(disk.used_bytes());
        disk.set_faults(Faults { capacity_bytes, ..Faults::default() });
    };
    let mut next = 4;
    let mut feed = |group: &mut Group<Memory>, records: u64| {
        for _ in 0..records {
            if group.accepts() {
                assert!(send(group, LINK, write(next, next % 10 * 500, next as u8, 400)));
                next += 1;
            }
            group.flush();
        }
    };
    feed(&mut group, 40);
    assert!(group.accepts() && group.journal().segments().len() > 5);
    full(&disk);
    feed(&mut group, 20);
    assert!(!group.accepts(), "no room");
    let before = group.journal().start();
    // As the server does it, each second.
    let step = |group: &mut Group<Memory>| {
        fold(group);
        group.retry();
        group.flush();
        group.accepts()
    };
    assert!((0..10).any(|_| step(&mut group)), "{:?}", group.status(at_ms(0)).stalled);
    assert!(group.journal().start() > before);
    assert!(group.past_status().shortened);
    feed(&mut group, 1);
    assert_eq!(group.broken(), None);
    // A pin stays, whatever that costs.
    let point = group.history().unwrap().newest().unwrap();
    let pin = group.hold(&point, "pin p").unwrap();
    for _ in 0..200 {
        feed(&mut group, 1);
        step(&mut group);
    }
    assert!(!pin.is_revoked() && !group.accepts());
    let stalled = group.status(at_ms(0)).stalled.unwrap();
    assert!(stalled.contains("hold points in time"), "{stalled}");
}

#[test]
fn a_recovery_needs_no_room_and_has_all_that_arrived() {
    let disk = Memory::new();
    disk.set_reserve(8000);
    let mut group = whole(&disk);
    let capacity_bytes = Some(disk.used_bytes());
    disk.set_faults(Faults { capacity_bytes, ..Faults::default() });
    assert!(send(&mut group, LINK, write(4, 0, 4, 900)));
    group.flush();
    assert!(!group.accepts());
    let recovery = group.recover(at_ms(0), true).unwrap();
    assert_eq!(recovery.writers[0].recovered, Seq(4));
    let crashed = reopen(&disk.crash(&mut || false));
    assert_eq!(crashed.recovery().unwrap().writers[0].recovered, Seq(4));
}

#[test]
fn a_guest_that_writes_much_does_not_cost_a_pin_unless_the_operator_prefers_that() {
    for at_size_max in [AtSizeMax::Stop, AtSizeMax::Shorten] {
        let mut group = whole(&Memory::new());
        group.options.unfolded_max_bytes = group.unfolded_bytes() + 3000;
        group.options.retention.at_size_max = at_size_max;
        let point = group.history().unwrap().newest().unwrap();
        let pin = group.hold(&point, "pin p").unwrap();
        for next in 4..20 {
            if group.accepts() {
                send(&mut group, LINK, write(next, 0, 1, 500));
                group.flush();
            }
            while fold(&mut group) {}
        }
        let stops = at_size_max == AtSizeMax::Stop;
        assert_eq!((pin.is_revoked(), group.accepts()), (!stops, !stops), "{at_size_max:?}");
    }
}

/// 64 writers of each of 32 groups could have 32 MiB each of records that were never finished.
#[test]
fn a_record_in_parts_that_finds_no_memory_is_refused_and_taken_later_from_its_beginning() {
    let disk = Memory::new();
    let mut group = whole(&disk);
    let parts = Arc::clone(&group.options.parts);
    let first = |seq: u64| Part {
        seq: Seq(seq),
        total_bytes: limits::RECORD_MAX_BYTES,
        at: 0,
        data: vec![0; limits::PART_MAX_BYTES as usize].into(),
    };
    let begin = |group: &mut Group<Memory>| {
        assert!(group.receive(at_ms(0), LINK, Frame::Part(LINK.channel, first(4))).is_none());
        refusal(&group.take_outputs())
    };
    let others = || parts.take("host-a", false, parts::PER_HOST_MAX_BYTES / 8);
    let all_of_others = || std::iter::from_fn(others).collect::<Vec<_>>();
    let taken = all_of_others();
    assert_eq!(taken.len(), 8);
    assert_eq!(begin(&mut group), Some((LINK, RefusalKind::Quota)));
    drop(taken);
    let again = join(&mut group, LINK, 1, LastRun::Continues { from: Seq(4) });
    assert_eq!(again.stream.unwrap().begun, None);
    assert_eq!(begin(&mut group), None);
    assert_eq!(all_of_others().len(), 7, "the record has its room");
    // It outlives the connection, and not the run.
    group.connection_lost(LINK.connection);
    let again = join(&mut group, OTHER, 1, LastRun::Continues { from: Seq(4) });
    assert!(again.stream.unwrap().begun.is_some());
    join(&mut group, OTHER, 2, LastRun::Unknown);
    assert_eq!(all_of_others().len(), 8);
}

#[test]
fn checks_reach_to_the_end_of_a_disk_and_no_further() {
    let refused = |message: Message| {
        let mut group = whole(&Memory::new());
        assert!(group.receive(at_ms(0), LINK, Frame::Control(LINK.channel, message)).is_none());
        group.flush();
        refusal(&group.take_outputs()).map(|(_, kind)| kind)
    };
    let disk = DiskId(0);
    for (offset, len_bytes, is_inside) in [
        (0, SIZE, true),
        (SIZE - 1, 1, true),
        (0, 0, false),
        (SIZE, 0, false),
        (0, SIZE + 1, false),
        (SIZE, 1, false),
        (SIZE - 1, 2, false),
        (u64::MAX, 2, false),
    ] {
        let expected = (!is_inside).then_some(RefusalKind::Invalid);
        let zero = Message::ZeroCheck { disk, offset, len_bytes };
        assert_eq!(refused(zero), expected, "zeroes, {len_bytes} at {offset}");
        let (len_bytes, digest) = (len_bytes as u32, [0; 32]);
        let check = Message::DigestCheck { disk, offset, len_bytes, digest };
        assert_eq!(refused(check), expected, "digest, {len_bytes} at {offset}");
    }
}

#[test]
fn an_attachment_is_judged_at_its_limits() {
    let is_taken = |change: &dyn Fn(&mut Attach)| {
        let mut attach = attach_message(1, 0, LastRun::Unknown);
        change(&mut attach);
        Group::create(Memory::new(), "host-a", &attach, at_ms(0), options()).is_ok()
    };
    let writers = |count: usize| {
        move |attach: &mut Attach| {
            let others = (1..count).map(|nth| format!("vm{nth}"));
            attach.writers = std::iter::once("vm".to_owned()).chain(others).take(count).collect();
            let tagging = Tagging { form: Form::Hlc, peers: Vec::new() };
            attach.tagging = (count > 1).then_some(tagging);
        }
    };
    for (count, taken) in [(0, false), (1, true), (64, true), (65, false)] {
        assert_eq!(is_taken(&writers(count)), taken, "{count} writers");
    }
    let hour_ms = 3_600_000;
    for (lease_ms, grace_ms, taken) in [
        (hour_ms - 1, hour_ms, true),
        (hour_ms, hour_ms, false),
        (hour_ms, hour_ms + 1, false),
        (10_000, hour_ms + 1, false),
    ] {
        let times = |attach: &mut Attach| (attach.lease_ms, attach.grace_ms) = (lease_ms, grace_ms);
        assert_eq!(is_taken(&times), taken, "{lease_ms} {grace_ms}");
    }
}
