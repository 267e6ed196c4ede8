//! Recoveries, and the guests that run on from them.

use super::*;

#[test]
fn nothing_can_be_recovered_before_the_initial_copy_is_durable() {
    let disk = Memory::new();
    let mut group = create(&disk).unwrap();
    let refused = group.recover(at_ms(100_000), false).unwrap_err();
    assert!(matches!(refused, RecoverError::Initialising { .. }), "{refused}");
    join(&mut group, LINK, 1, LastRun::Unknown);
    send(&mut group, LINK, write(1, 0, 1, 10));
    let refused = group.recover(at_ms(100_000), true).unwrap_err();
    assert!(matches!(refused, RecoverError::Initialising { .. }), "{refused}");
    assert!(matches!(group.pin(), Err(RecoverError::Initialising { .. })));
    group.connection_lost(LINK.connection);
    assert_eq!(copy_of(&join(&mut group, OTHER, 2, LastRun::Unknown)), CopyState::Partial);
    send(&mut group, OTHER, copy_done(2));
    assert!(!group.status(at_ms(0)).recoverable, "only staged");
    group.flush();
    assert!(group.status(at_ms(0)).recoverable);
}

#[test]
fn recovery_waits_for_the_grace_fences_for_good_and_repeats_itself() {
    let disk = Memory::new();
    let mut group = whole(&disk);
    group.beacon(at_ms(50_000), LINK, MonoNanos(1));
    assert_eq!(
        group.take_outputs(),
        [Output::Send(LINK, Message::Lease { sent_at: MonoNanos(1) })]
    );
    let early = group.recover(at_ms(50_000 + GRACE_MS - 1), false);
    assert!(matches!(early, Err(RecoverError::Grace { remaining_ms: 1, .. })), "{early:?}");
    let recovery = group.recover(at_ms(50_000 + GRACE_MS), false).unwrap();
    assert_eq!((recovery.epoch, recovery.primary_declared_dead), (Epoch(2), false));
    assert_eq!(refusal(&group.take_outputs()), Some((LINK, RefusalKind::Fenced)));
    send(&mut group, LINK, write(4, 0, 9, 10));
    group.beacon(at_ms(50_000), LINK, MonoNanos(2));
    group.flush();
    assert_eq!(group.take_outputs(), [], "no lease and no acknowledgement for the old primary");
    assert_eq!(group.recover(at_ms(99_000), true).unwrap(), recovery);
    let mut group = reopen(&disk.crash(&mut || false));
    assert_eq!(group.recover(at_ms(99_000), true).unwrap(), recovery);
    for epoch in [0, 1, 2] {
        group.attach(at_ms(0), OTHER, "host-a", &attach_message(9, epoch, LastRun::Unknown));
        assert_eq!(refusal(&group.take_outputs()), Some((OTHER, RefusalKind::Fenced)));
    }
    // A restarted server counts the grace anew: it may have answered a beacon right before.
    let restarted = Memory::new();
    whole(&restarted);
    let early = reopen(&restarted).recover(at_ms(GRACE_MS - 1), false);
    assert!(matches!(early, Err(RecoverError::Grace { .. })));
}

#[test]
fn guests_of_a_recovered_group_keep_what_they_flushed() {
    let disk = Memory::new();
    let mut group = whole(&disk);
    send(&mut group, LINK, write(4, 0, 4, 600));
    group.recover(at_ms(0), true).unwrap();
    let mut expected = read_disk(&mut group);
    assert_eq!(expected[0], 4, "what had arrived is part of it");
    let data = GuestEffect::Write(Bytes::from(vec![9; 700]));
    assert!(group.guest_write(at_ms(1), KEY, 300, data));
    let zero = GuestEffect::Zero { len_bytes: 64, no_hole: false };
    assert!(group.guest_write(at_ms(1), KEY, 320, zero));
    assert!(group.guest_written());
    expected[300..1000].fill(9);
    expected[320..384].fill(0);
    assert_eq!(read_disk(&mut group), expected, "readable before it is durable");
    group.flush();
    let mut crashed = reopen(&disk.crash(&mut || false));
    assert_eq!(read_disk(&mut crashed), expected);
    while fold(&mut crashed) {}
    assert_eq!(crashed.unfolded_bytes(), 0);
    assert_eq!(read_disk(&mut crashed), expected, "folding changes nothing");
    assert!(crashed.guest_write(at_ms(2), KEY, 0, GuestEffect::Write(Bytes::from_static(b"x"))));
    crashed.flush();
    assert_eq!(crashed.state().writers[0].seq, Seq(7), "seqs go on after the cut");
    // A write while a fold runs stays visible when the fold is done.
    let job = crashed.fold_job(at_ms(0)).unwrap();
    assert!(crashed.guest_write(at_ms(2), KEY, 9, GuestEffect::Write(Bytes::from_static(b"y"))));
    assert!(crashed.guest_written());
    let cut = job.cut.clone();
    crashed.fold_done(cut, job.run());
    (expected[0], expected[9]) = (b'x', b'y');
    assert_eq!(read_disk(&mut crashed), expected);
    let beyond = GuestEffect::Write(Bytes::from_static(b"xx"));
    assert!(!crashed.guest_write(at_ms(2), KEY, SIZE - 1, beyond));
}

#[test]
fn what_a_recovered_guest_writes_says_where_it_flushed() {
    let disk = Memory::new();
    let mut group = whole(&disk);
    group.options.retention.window_ms = 1_000_000;
    group.recover(at_ms(0), true).unwrap();
    let from = group.history().unwrap().resolve(&At::Latest).unwrap();
    for ms in 1..=4 {
        let byte = GuestEffect::Write(Bytes::from_static(b"x"));
        assert!(group.guest_write(at_ms(ms), KEY, ms, byte));
        if ms == 2 {
            group.guest_flush(WRITER);
        }
    }
    group.flush();
    let history = group.history().unwrap();
    let to = history.resolve(&At::Latest).unwrap();
    let spans = history.timeline(&from, &to, 1).unwrap();
    assert_eq!((spans[0].records, spans[0].flushes), (4, 1));
    let last = spans[0].last_flush.unwrap();
    assert_eq!((last.writer, last.seq.0), (WRITER, from.cut.get(WRITER).0 + 2));
}

#[test]
fn a_pinned_view_stands_still_while_everything_goes_on() {
    let disk = Memory::new();
    let mut group = whole(&disk);
    while fold(&mut group) {}
    send(&mut group, LINK, write(4, 0, 4, 600));
    group.flush();
    let pin = group.pin().unwrap();
    let held = group.journal().durable_end();
    let mut then = vec![0; SIZE as usize];
    pin.disks[0].1.read(0, &mut then).unwrap();
    assert_eq!(then[0], 4);
    for seq in 5..30 {
        send(&mut group, LINK, write(seq, seq * 100, seq as u8, 600));
        group.flush();
        fold(&mut group);
        assert!(group.fold_position() <= held, "images do not pass the cut");
    }
    let mut now = vec![0; SIZE as usize];
    pin.disks[0].1.read(0, &mut now).unwrap();
    assert_eq!(now, then);
    drop(pin);
    assert!(fold(&mut group));
}

#[test]
fn a_recovery_without_room_is_on_record_when_there_is() {
    let disk = Memory::new();
    let mut group = whole(&disk);
    disk.set_faults(Faults { capacity_bytes: Some(0), ..Faults::default() });
    for _ in 0..2 {
        let error = group.recover(at_ms(0), true).unwrap_err();
        assert!(matches!(error, RecoverError::NoRoom(_)), "{error}");
        assert_eq!(group.recovery(), None, "nothing is told before it is durable");
    }
    disk.set_faults(Faults::default());
    group.retry();
    group.flush();
    let recovery = group.recover(at_ms(0), true).unwrap();
    assert_eq!(recovery.epoch, Epoch(2), "it is begun once");
    assert_eq!(reopen(&disk.crash(&mut || false)).recovery(), Some(recovery));
}

/// Records that the sync makes durable are of the epoch before.
#[test]
fn a_sync_that_was_begun_before_a_recovery_acknowledges_nothing_when_it_ends() {
    let mut group = whole(&Memory::new());
    send(&mut group, LINK, write(4, 0, 4, 10));
    let job = group.begin_sync().unwrap();
    let how = RecoverHow { primary_declared_dead: true, point: None, accepts_damage: false };
    let begun = group.try_recover(at_ms(0), how, true);
    assert!(matches!(begun, Err(RecoverError::NotYet(_))), "{begun:?}");
    let status = group.status(at_ms(0));
    assert_eq!((status.cut.get(WRITER), status.recovered), (Seq(3), None), "while it waits");
    group.synced(job.run());
    assert_eq!(group.committed().get(WRITER), Seq(3));
    let recovery = group.recover(at_ms(0), true).unwrap();
    assert_eq!((recovery.writers[0].recovered, recovery.writers[0].left_out), (Seq(3), 1));
}

/// The host's clock is off by decades: a difference of two sites' clocks was told as time for which writes were lost.
#[test]
fn the_recovered_moment_is_told_by_the_clock_of_this_site() {
    let mut group = whole(&Memory::new());
    let frame = Frame::Record(LINK.channel, write(4, 0, 4, 10));
    assert!(group.receive(at_ms(2000), LINK, frame).is_none());
    group.flush();
    group.beacon(at_ms(3000), LINK, MonoNanos(1));
    let recovery = group.recover(at_ms(9000), true).unwrap();
    let told = (recovery.last_write_unix_ms, recovery.last_heard_unix_ms);
    assert_eq!(told, (Some(at_ms(2000).unix_ms), Some(at_ms(3000).unix_ms)));
    assert!(!recovery.is_of_the_past);
}
