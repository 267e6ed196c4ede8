//! What a writer may have known before its stop, what members may have heard, and seqs that were lost.

use super::*;

#[test]
fn a_resync_ends_when_everyone_has_said_how_far_they_were() {
    for form in [Form::Vector, Form::Hlc] {
        let disk = Memory::new();
        let mut group = two(&disk, form);
        let shape = Shape { writers: 2, form };
        group.take_outputs();
        let said = attach(&mut group, at_ms(0), &shape.writer(0, 2, LastRun::Unknown));
        assert_eq!(copy_of(&said), CopyState::Resyncing);
        let Some(Message::Sound { id }) = said.last().cloned() else { panic!("{said:?}") };
        assert!(!said.iter().any(|m| matches!(m, Message::Floor { .. })), "b has not said");
        // b has admitted up to 4 and heard of a's old 9; nothing of it has arrived.
        say(&mut group, 1, Message::Sounded { id, pending: vector(&[9, 4]), hlc: Hlc(90) });
        let said = told(&group.take_outputs(), link(0));
        assert_eq!(said, [Message::Floor { pending: vector(&[9, 4]), hlc: Hlc(90) }]);
        let deps: &[_] = if form == Form::Vector { &[(1, 4)] } else { &[] };
        send(&mut group, record(0, 2, 80, &[]));
        send(&mut group, done(0, 3, 91, deps));
        group.flush();
        assert_eq!(group.cut().get(WriterId(0)), Seq(1), "{form}: b's are missing");
        let early = reopen(&disk.killed()).recover(at_ms(0), true);
        match form {
            Form::Vector => assert_eq!(early.unwrap().writers[0].recovered, Seq(1)),
            // The end of b's own initial copy is later than the time at which a stands still.
            Form::Hlc => assert!(matches!(early, Err(RecoverError::Initialising { .. }))),
        }
        for seq in 2..=4 {
            send(&mut group, record(1, seq, 90 + seq, &[]));
        }
        group.flush();
        assert_eq!(group.cut().get(WriterId(0)), Seq(3), "{form}");
    }
}

#[test]
fn two_resyncs_at_once_and_one_that_has_left() {
    let form = Form::Vector;
    let mut group = two(&Memory::new(), form);
    let shape = Shape { writers: 2, form };
    group.take_outputs();
    attach(&mut group, at_ms(0), &shape.writer(0, 2, LastRun::Unknown));
    let said = attach(&mut group, at_ms(0), &shape.writer(1, 2, LastRun::Unknown));
    let sounds = said.iter().filter_map(|message| match message {
        Message::Sound { id } => Some(*id),
        _ => None,
    });
    let sounds: Vec<_> = sounds.collect();
    assert_eq!(sounds.len(), 2, "each is asked for the other: {said:?}");
    let id = *sounds.iter().max().unwrap();
    for writer in 0..2 {
        say(&mut group, writer, Message::Sounded { id, pending: vector(&[1, 1]), hlc: Hlc(20) });
    }
    let outputs = group.take_outputs();
    for writer in 0..2u16 {
        let floor = told(&outputs, link(writer)).into_iter().find_map(|m| match m {
            Message::Floor { pending, .. } => Some(pending),
            _ => None,
        });
        // What the other's old run had numbered is in its resync, as a whole.
        assert_eq!(floor.unwrap().get(WriterId(1 - writer)), Seq(2));
    }
    let mut group = two(&Memory::new(), form);
    group.take_outputs();
    say(&mut group, 1, Message::Detach { end: None });
    let said = attach(&mut group, at_ms(0), &shape.writer(0, 2, LastRun::Unknown));
    assert!(said.iter().any(|m| matches!(m, Message::Floor { .. })), "b ended cleanly: {said:?}");
}

#[test]
fn a_member_that_does_not_know_what_it_heard_is_told_how_far_everyone_is() {
    let form = Form::Vector;
    let web = Link { connection: ConnectionId(9), channel: Channel(3) };
    let shape = Shape { writers: 2, form };
    let mut group = two(&Memory::new(), form);
    group.attach(at_ms(0), web, "host-3", &shape.follower());
    group.take_outputs();
    let ask = |group: &mut Group<Memory>, mark, everyone| {
        let frame = Frame::Control(web.channel, Message::AskFloor { mark, everyone });
        assert!(group.receive(at_ms(0), web, frame).is_none());
        let outputs = group.take_outputs();
        assert_eq!(told(&outputs, web), [], "nobody has answered");
        (0..2)
            .map(|writer| match told(&outputs, link(writer))[..] {
                [Message::Sound { id }] => id,
                ref said => panic!("{said:?}"),
            })
            .max()
            .unwrap()
    };
    let answer = |group: &mut Group<Memory>, writer, id, seqs: &[u64]| {
        say(group, writer, Message::Sounded { id, pending: vector(seqs), hlc: Hlc(70) });
        group.take_outputs()
    };
    let first = ask(&mut group, 11, false);
    assert_eq!(told(&answer(&mut group, 0, first, &[5, 1]), web), [], "b has not");
    let second = ask(&mut group, 12, false);
    assert_eq!(told(&answer(&mut group, 0, second, &[6, 1]), web), []);
    assert_eq!(told(&answer(&mut group, 1, first, &[1, 3]), web), [], "before the question");
    let outputs = answer(&mut group, 1, second, &[1, 4]);
    let pending = vector(&[6, 4]);
    let floor = |mark| Message::FloorIs { mark, pending: pending.clone(), hlc: Hlc(70) };
    assert_eq!(told(&outputs, web), [floor(12)]);
    assert_eq!(told(&outputs, link(0)), []);

    // After mode async the others do not know what they heard of it, either.
    let id = ask(&mut group, 13, true);
    answer(&mut group, 0, id, &[6, 1]);
    let outputs = answer(&mut group, 1, id, &[1, 4]);
    assert_eq!(told(&outputs, web), [floor(13)]);
    assert_eq!(
        (told(&outputs, link(0)), told(&outputs, link(1))),
        (vec![floor(0)], vec![floor(0)])
    );

    // Nor does one whose daemon was away, and comes back.
    group.connection_lost(link(1).connection);
    let clean = LastRun::Clean { seq: group.committed().get(WriterId(1)), served: false };
    assert!(attach(&mut group, at_ms(0), &shape.writer(1, 3, clean)).contains(&floor(0)));
    group.attach(at_ms(0), web, "host-3", &shape.follower());
    assert!(told(&group.take_outputs(), web).contains(&floor(0)));

    // A writer that cannot be reached cannot be asked, unless it has left.
    group.connection_lost(link(1).connection);
    let frame = Frame::Control(web.channel, Message::AskFloor { mark: 14, everyone: false });
    assert!(group.receive(at_ms(0), web, frame).is_none());
    let said = told(&group.take_outputs(), link(0));
    let Some(Message::Sound { id }) = said.last() else { panic!("{said:?}") };
    assert_eq!(told(&answer(&mut group, 0, *id, &[6, 1]), web), []);
    group.remove("b").unwrap();
    let said = told(&group.take_outputs(), web);
    assert!(said.iter().any(|m| matches!(m, Message::FloorIs { mark: 14, .. })), "{said:?}");
}

#[test]
fn with_times_a_resync_stands_in_the_floor_with_one_that_is_not_here_yet() {
    let form = Form::Hlc;
    let web = Link { connection: ConnectionId(9), channel: Channel(3) };
    let shape = Shape { writers: 2, form };
    let mut group = two(&Memory::new(), form);
    group.attach(at_ms(0), web, "host-3", &shape.follower());
    let newest = group.journal.state().last_hlc;
    attach(&mut group, at_ms(0), &shape.writer(0, 2, LastRun::Unknown));
    let frame = Frame::Control(web.channel, Message::AskFloor { mark: 12, everyone: false });
    assert!(group.receive(at_ms(0), web, frame).is_none());
    let said = told(&group.take_outputs(), link(1));
    let Some(Message::Sound { id }) = said.last().cloned() else { panic!("{said:?}") };
    // a answers as soon as it has attached, before its P has risen above everything.
    for writer in [0, 1] {
        say(&mut group, writer, Message::Sounded { id, pending: vector(&[]), hlc: Hlc(0) });
    }
    let said = told(&group.take_outputs(), web);
    let floor = said.iter().find_map(|message| match message {
        Message::FloorIs { mark: 12, hlc, .. } => Some(*hlc),
        _ => None,
    });
    assert!(floor.is_some_and(|hlc| hlc > newest), "{said:?}, the newest is at {newest}");
}

/// The floors that a writer was told.
fn floors(outputs: &[Output], writer: u16) -> Vec<CountVector> {
    let of = |message| match message {
        Message::Floor { pending, .. } => Some(pending),
        _ => None,
    };
    told(outputs, link(writer)).into_iter().filter_map(of).collect()
}

#[test]
fn a_seq_that_was_lost_is_given_out_again_for_whoever_waits_for_it() {
    let form = Form::Vector;
    let web = Link { connection: ConnectionId(9), channel: Channel(3) };
    let shape = Shape { writers: 2, form };
    let mut group = two(&Memory::new(), form);
    group.attach(at_ms(0), web, "host-3", &shape.follower());
    attach(&mut group, at_ms(0), &shape.writer(0, 2, LastRun::Unknown));
    // The member without disks has heard of a's old 9. While a's own floor is not known, that
    // would be taken for it.
    let waits = Message::Sounded { id: UNASKED, pending: vector(&[9, 1]), hlc: Hlc(0) };
    let say_again = |group: &mut Group<Memory>| {
        let frame = Frame::Control(web.channel, waits.clone());
        assert!(group.receive(at_ms(0), web, frame).is_none());
        floors(&group.take_outputs(), 0)
    };
    assert_eq!(say_again(&mut group), []);
    say(&mut group, 1, Message::Sounded { id: 1, pending: vector(&[0, 1]), hlc: Hlc(20) });
    assert_eq!(floors(&group.take_outputs(), 0), [vector(&[0, 1])]);
    send(&mut group, done(0, 2, 20, &[(1, 1)]));
    group.flush();
    assert_eq!(say_again(&mut group), [vector(&[9])], "with the next beacon");
    for seq in 3..=9 {
        send(
            &mut group,
            Record {
                body: DiskChange { effect: Effect::Idle, ..record(0, seq, 20 + seq, &[]).body },
                ..record(0, seq, 20 + seq, &[])
            },
        );
    }
    assert_eq!(say_again(&mut group), [], "it has come");
    // A record of b waits, and b has forgotten why.
    send(&mut group, record(1, 2, 40, &[(0, 12)]));
    group.flush();
    group.take_outputs();
    group.beacon(at_ms(0), link(1), MonoNanos(1));
    assert_eq!(floors(&group.take_outputs(), 0), []);
    group.beacon(at_ms(0), link(0), MonoNanos(1));
    assert_eq!(floors(&group.take_outputs(), 0), [vector(&[12])]);
}

#[test]
fn a_run_of_which_nothing_has_arrived_was_served_all_the_same() {
    let shape = Shape { writers: 2, form: Form::Vector };
    let mut group = shape.create(&Memory::new()).unwrap();
    let unknown = LastRun::Unknown;
    assert_eq!(
        copy_of(&attach(&mut group, at_ms(0), &shape.writer(0, 1, unknown))),
        CopyState::Empty
    );
    // Its guest has heard of b's second write. It stops, and that is forgotten.
    attach(&mut group, at_ms(0), &shape.writer(1, 1, unknown));
    let said = attach(&mut group, at_ms(0), &shape.writer(0, 2, unknown));
    assert_eq!(copy_of(&said), CopyState::Partial);
    let Some(Message::Sound { id }) = said.last().cloned() else { panic!("{said:?}") };
    say(&mut group, 1, Message::Sounded { id, pending: vector(&[0, 2]), hlc: Hlc(20) });
    assert_eq!(floors(&group.take_outputs(), 0), [vector(&[0, 2])]);
    let again = shape.writer(0, 2, LastRun::Continues { from: Seq(1) });
    assert_eq!(copy_of(&attach(&mut group, at_ms(0), &again)), CopyState::Partial);
}

#[test]
fn a_time_that_was_lost_with_a_removed_writer_is_passed() {
    let form = Form::Hlc;
    let mut group = two(&Memory::new(), form);
    group.connection_lost(link(1).connection);
    group.remove("b").unwrap();
    group.take_outputs();
    say(&mut group, 0, Message::Sounded { id: UNASKED, pending: vector(&[]), hlc: Hlc(700) });
    let said = progress(&told(&group.take_outputs(), link(0))).unwrap();
    assert_eq!((said.watermark, said.frontier), (Hlc(10), Hlc(700)), "a will speak");
}

#[test]
fn nobody_is_made_to_give_out_more_than_a_run_can_have_lost() {
    let mut group = two(&Memory::new(), Form::Vector);
    for (seq, is_asked) in [(1 << 24, true), ((1 << 24) + 2, false), (1 << 40, false)] {
        group.take_outputs();
        let pending = vector(&[seq]);
        say(&mut group, 1, Message::Sounded { id: UNASKED, pending, hlc: Hlc(0) });
        let said = told(&group.take_outputs(), link(0));
        let floor = |message: &Message| matches!(message, Message::Floor { .. });
        assert_eq!(said.iter().any(floor), is_asked, "{seq}: {said:?}");
    }
    // Nor by what the others answer when it resyncs.
    let said = attach(
        &mut group,
        at_ms(0),
        &Shape { writers: 2, form: Form::Vector }.writer(0, 2, LastRun::Unknown),
    );
    let sound = said.iter().find_map(|message| match message {
        Message::Sound { id } => Some(*id),
        _ => None,
    });
    let pending = vector(&[(1 << 24) + 2, 1]);
    say(&mut group, 1, Message::Sounded { id: sound.unwrap(), pending, hlc: Hlc(0) });
    let said = told(&group.take_outputs(), link(0));
    let floor = said.iter().find_map(|message| match message {
        Message::Floor { pending, .. } => Some(pending.clone()),
        _ => None,
    });
    assert_eq!(floor, Some(vector(&[0, 1])));
}

/// The writer has said itself that it is so far, which a single lost seq makes no further.
#[test]
fn whatever_a_writer_had_admitted_is_believed_of_those_who_have_heard_of_it() {
    const FAR: u64 = 1 << 25;
    let form = Form::Vector;
    let mut group = two(&Memory::new(), form);
    let shape = Shape { writers: 2, form };
    say(&mut group, 0, Message::Sounded { id: UNASKED, pending: vector(&[FAR]), hlc: Hlc(0) });
    group.take_outputs();
    let said = attach(&mut group, at_ms(0), &shape.writer(0, 2, LastRun::Unknown));
    let Some(Message::Sound { id }) = said.last().cloned() else { panic!("{said:?}") };
    say(&mut group, 1, Message::Sounded { id, pending: vector(&[FAR, 1]), hlc: Hlc(20) });
    assert_eq!(floors(&group.take_outputs(), 0), [vector(&[FAR, 1])]);
}

#[test]
fn a_refusal_takes_only_from_the_refused_member_what_waits_for_a_sync() {
    let mut group = two(&Memory::new(), Form::Vector);
    group.take_outputs();
    send(&mut group, record(0, 2, 20, &[]));
    for (writer, heard_of) in [(0, vector(&[0, 9])), (1, vector(&[9]))] {
        say(&mut group, writer, Message::Sounded { id: UNASKED, pending: heard_of, hlc: Hlc(0) });
    }
    let early = group.take_outputs();
    assert!(floors(&early, 0).is_empty() && floors(&early, 1).is_empty(), "{early:?}");
    // The stream has a gap.
    send(&mut group, record(1, 3, 21, &[]));
    group.flush();
    let outputs = group.take_outputs();
    assert_eq!(floors(&outputs, 0), [vector(&[9])]);
    assert!(floors(&outputs, 1).is_empty() && refused(&told(&outputs, link(1))).is_some());
}

#[test]
fn a_writer_that_never_was_here_is_not_waited_for() {
    let form = Form::Vector;
    let web = Link { connection: ConnectionId(9), channel: Channel(3) };
    let shape = Shape { writers: 2, form };
    let mut group = shape.create(&Memory::new()).unwrap();
    attach(&mut group, at_ms(0), &shape.writer(0, 1, LastRun::Unknown));
    group.attach(at_ms(0), web, "host-3", &shape.follower());
    let frame = Frame::Control(web.channel, Message::AskFloor { mark: 12, everyone: false });
    assert!(group.receive(at_ms(0), web, frame).is_none());
    let said = told(&group.take_outputs(), link(0));
    let Some(Message::Sound { id }) = said.last() else { panic!("{said:?}") };
    say(&mut group, 0, Message::Sounded { id: *id, pending: vector(&[3]), hlc: Hlc(0) });
    group.flush();
    let said = told(&group.take_outputs(), web);
    let floor = |m: &Message| matches!(m, Message::FloorIs { mark: 12, pending, .. } if *pending == vector(&[3]));
    assert!(said.iter().any(floor), "{said:?}");
}
