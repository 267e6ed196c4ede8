//! Which requests reach the caller, and which error the others get.

use crate::common::*;
use tidelock_nbd::limits::{MAX_PAYLOAD_BYTES, MAX_SKIPPED_PAYLOAD_BYTES};
use tidelock_nbd::{
    BlockSize, Command, Cookie, Errno, Event, Export, ExportTable, Features, ProtocolError,
    Request, RequestFlags, Session,
};

#[derive(Debug, PartialEq, Eq)]
enum Fate {
    /// Reaches the caller with these flags.
    Pass(RequestFlags),
    /// Answered with success at once.
    Done,
    Fails(Errno),
}
use Fate::{Done, Fails, Pass};

const NONE: RequestFlags = RequestFlags::NONE;

/// Give one request to a fresh session, payload included, and see what becomes of it. The
/// session must be in step afterwards: a second request is understood.
fn fate(exports: ExportTable, name: &str, structured: bool, header: &[u8]) -> Fate {
    let (mut session, _) = opened(exports, name, structured);
    let command = u16::from_be_bytes([header[6], header[7]]);
    let len = u32::from_be_bytes(header[24..28].try_into().unwrap());
    let payload = if command == WRITE { len as usize } else { 0 };
    let step = session.next(header).unwrap();
    assert_eq!(step.consumed, header.len());
    let fate = match step.event {
        Some(Event::Request(request)) => {
            let expected = Request {
                cookie: Cookie(u64::from_be_bytes(header[8..16].try_into().unwrap())),
                offset: u64::from_be_bytes(header[16..24].try_into().unwrap()),
                len,
                command: request.command,
                flags: request.flags,
            };
            assert_eq!(request, expected);
            assert_eq!(session.payload_owed() as usize, payload);
            session.payload_taken(payload as u32);
            assert!(session.output().is_empty());
            Pass(request.flags)
        }
        None => {
            assert_eq!(session.payload_owed(), 0, "a refused payload is not the caller's");
            let junk = vec![0xa5; payload];
            let step = session.next(&junk).unwrap();
            assert_eq!((step.consumed, step.event), (payload, None));
            let is_read = command == READ;
            error_of(&session.output().split(), structured, is_read)
        }
        other => panic!("{other:?}"),
    };
    let step = session.next(&request(0, READ, 2, 0, 512)).unwrap();
    assert!(matches!(step.event, Some(Event::Request(Request { cookie: Cookie(2), .. }))));
    fate
}

fn error_of(reply: &[u8], structured: bool, is_read: bool) -> Fate {
    let word = |at: usize| u32::from_be_bytes(reply[at..at + 4].try_into().unwrap());
    let number = if word(0) == 0x6744_6698 {
        assert!(!(structured && is_read), "a READ has no simple reply here");
        assert_eq!(reply.len(), 16);
        word(4)
    } else {
        assert!(structured);
        assert_eq!(word(0), 0x668e_33ef);
        match word(4) {
            0x0001_8001 => word(20),
            0x0001_0000 => 0,
            other => panic!("flags and type {other:#x}"),
        }
    };
    match number {
        0 => Done,
        1 => Fails(Errno::Perm),
        22 => Fails(Errno::Inval),
        28 => Fails(Errno::NoSpc),
        108 => Fails(Errno::Shutdown),
        other => panic!("error {other}"),
    }
}

#[test]
fn ranges_and_commands() {
    let end = MIB;
    let inval = || Fails(Errno::Inval);
    let cases = [
        // Inside, at the end, past it, overflow.
        (READ, 0, 512, Pass(NONE)),
        (READ, end - 1, 1, Pass(NONE)),
        (READ, 0, end as u32, Pass(NONE)),
        (READ, end - 1, 2, inval()),
        (READ, end, 1, inval()),
        (READ, u64::MAX, 2, inval()),
        (READ, u64::MAX - 511, 512, inval()),
        (WRITE, end - 1, 1, Pass(NONE)),
        (WRITE, end - 1, 2, Fails(Errno::NoSpc)),
        (WRITE, u64::MAX, 2, Fails(Errno::NoSpc)),
        (WRITE_ZEROES, end - 512, 512, Pass(NONE)),
        (WRITE_ZEROES, end - 512, 513, Fails(Errno::NoSpc)),
        (WRITE_ZEROES, 0, u32::MAX, Fails(Errno::NoSpc)),
        (TRIM, end - 512, 512, Pass(NONE)),
        (TRIM, end - 512, 513, inval()),
        (CACHE, 3, 7, Pass(NONE)),
        (CACHE, 0, u32::MAX, inval()),
        // Empty ranges: nothing to do, except that a block status must say something.
        (READ, 0, 0, Done),
        (READ, end, 0, Done),
        (READ, end + 1, 0, inval()),
        (WRITE, 5, 0, Done),
        (WRITE, end + 1, 0, Fails(Errno::NoSpc)),
        (WRITE_ZEROES, 0, 0, Done),
        (TRIM, 0, 0, Done),
        (CACHE, 0, 0, Done),
        (BLOCK_STATUS, 0, 0, inval()),
        // Flush covers everything.
        (FLUSH, 0, 0, Pass(NONE)),
        (FLUSH, 1, 0, inval()),
        (FLUSH, 0, 1, inval()),
        // Unknown commands, among them RESIZE.
        (8, 0, 0, inval()),
        (0xffff, 0, 512, inval()),
    ];
    for (command, offset, len, expected) in cases {
        for structured in [false, true] {
            let header = request(0, command, 0x1122_3344_5566_7788, offset, len);
            let found = fate(exports(), "disk0", structured, &header);
            assert_eq!(found, expected, "command {command} at {offset} + {len}, {structured}");
        }
    }
}

#[test]
fn block_status_needs_its_context() {
    let status = |offset, len| request(0, BLOCK_STATUS, 1, offset, len);
    assert_eq!(fate(exports(), "disk0", false, &status(0, 512)), Fails(Errno::Inval));
    assert_eq!(fate(exports(), "disk0", true, &status(0, 512)), Pass(NONE));
    assert_eq!(fate(exports(), "disk0", true, &status(1, MIB as u32)), Fails(Errno::Inval));

    // Structured replies without a context, and a context of another export.
    for selected_for in [None, Some("ro")] {
        let mut session = Session::new(exports());
        let mut input = client_flags(FIXED);
        input.extend(option(STRUCTURED_REPLY, &[]));
        if let Some(name) = selected_for {
            input.extend(option(SET_META, &meta_data(name, &["base:allocation"])));
        }
        input.extend(option(GO, &info_data("disk0", &[])));
        session.next(&input).unwrap();
        session.output().clear();
        let step = session.next(&status(0, 512)).unwrap();
        assert_eq!(step.event, None);
        assert_eq!(error_of(session.output(), true, false), Fails(Errno::Inval));
    }
}

#[test]
fn flags() {
    let none = Features::default();
    let zeroes = Features { write_zeroes: true, ..none };
    let table = |features| one(Export { features, ..disk() });
    let inval = || Fails(Errno::Inval);
    let fua = RequestFlags::FUA;
    let cases: Vec<(Features, bool, u16, u16, Fate)> = vec![
        // FUA is valid with every command if it was offered, and kept where it means something.
        (ALL_FEATURES, false, WRITE, FUA, Pass(fua)),
        (ALL_FEATURES, false, TRIM, FUA, Pass(fua)),
        (ALL_FEATURES, false, WRITE_ZEROES, FUA, Pass(fua)),
        (ALL_FEATURES, false, READ, FUA, Pass(NONE)),
        (ALL_FEATURES, false, CACHE, FUA, Pass(NONE)),
        (ALL_FEATURES, true, BLOCK_STATUS, FUA, Pass(NONE)),
        (none, false, WRITE, FUA, inval()),
        (none, false, READ, FUA, inval()),
        // Flags of WRITE_ZEROES.
        (ALL_FEATURES, false, WRITE_ZEROES, NO_HOLE, Pass(RequestFlags::NO_HOLE)),
        (ALL_FEATURES, false, WRITE_ZEROES, FAST_ZERO, Pass(RequestFlags::FAST_ZERO)),
        (
            ALL_FEATURES,
            false,
            WRITE_ZEROES,
            FAST_ZERO | NO_HOLE | FUA,
            Pass(fua.with(RequestFlags::NO_HOLE).with(RequestFlags::FAST_ZERO)),
        ),
        (zeroes, false, WRITE_ZEROES, NO_HOLE, Pass(RequestFlags::NO_HOLE)),
        (zeroes, false, WRITE_ZEROES, FAST_ZERO, inval()),
        (ALL_FEATURES, false, WRITE, NO_HOLE, inval()),
        (ALL_FEATURES, false, TRIM, NO_HOLE, inval()),
        (ALL_FEATURES, false, READ, FAST_ZERO, inval()),
        // DF comes with structured replies.
        (ALL_FEATURES, true, READ, DF, Pass(RequestFlags::DF)),
        (ALL_FEATURES, false, READ, DF, inval()),
        (ALL_FEATURES, true, WRITE, DF, inval()),
        (ALL_FEATURES, true, BLOCK_STATUS, REQ_ONE, Pass(RequestFlags::REQ_ONE)),
        (ALL_FEATURES, true, READ, REQ_ONE, inval()),
        // Unknown flags; bit 5 is PAYLOAD_LEN of the extended headers.
        (ALL_FEATURES, true, READ, 1 << 5, inval()),
        (ALL_FEATURES, true, WRITE, 1 << 15, inval()),
        (ALL_FEATURES, true, CACHE, 1 << 6, inval()),
        // Commands that were not offered.
        (none, false, TRIM, 0, inval()),
        (none, false, WRITE_ZEROES, 0, inval()),
        (none, false, CACHE, 0, inval()),
    ];
    for (features, structured, command, flags, expected) in cases {
        let found = fate(table(features), "disk0", structured, &request(flags, command, 1, 0, 512));
        assert_eq!(found, expected, "command {command} flags {flags:#x} of {features:?}");
    }
    let flush = |features, flags| fate(table(features), "", false, &request(flags, FLUSH, 1, 0, 0));
    assert_eq!(flush(ALL_FEATURES, FUA), Pass(NONE));
    assert_eq!(flush(none, 0), inval());
    assert_eq!(flush(ALL_FEATURES, NO_HOLE), inval());
}

#[test]
fn a_read_only_export_is_not_written() {
    let mut everything = blocks();
    everything.features = ALL_FEATURES;
    for export in [blocks(), everything] {
        for command in [WRITE, TRIM, WRITE_ZEROES] {
            // Even where another error would do: not aligned, beyond the end.
            for (offset, len) in [(0, 512), (1, 3), (1 << 40, 512), (0, 0)] {
                let header = request(0, command, 1, offset, len);
                let found = fate(one(export.clone()), "", true, &header);
                assert_eq!(found, Fails(Errno::Perm), "{command} {offset} {len}");
            }
        }
        assert_eq!(fate(one(export.clone()), "", true, &request(0, FLUSH, 1, 0, 0)), Pass(NONE));
    }
}

#[test]
fn alignment_to_the_minimum_block_size() {
    for (offset, len, expected) in [
        (512, 1024, Pass(NONE)),
        (512, 0, Done),
        (511, 512, Fails(Errno::Inval)),
        (512, 513, Fails(Errno::Inval)),
        (1, 0, Fails(Errno::Inval)),
    ] {
        for command in [READ, BLOCK_STATUS] {
            let expected = match expected {
                Done if command == BLOCK_STATUS => &Fails(Errno::Inval),
                _ => &expected,
            };
            let found = fate(exports(), "ro", true, &request(0, command, 1, offset, len));
            assert_eq!(&found, expected, "{command} {offset} {len}");
        }
    }
}

/// At each length limit, and one step past it.
#[test]
fn lengths() {
    let block_size = BlockSize { min: 1, preferred: 4096, max: 64 << 10 };
    let small = || one(Export { block_size, size_bytes: 1 << 40, ..disk() });
    let large = || one(Export { size_bytes: 1 << 40, ..disk() });
    let len = |table, command, len| fate(table, "", false, &request(0, command, 1, 0, len));
    for command in [READ, WRITE] {
        assert_eq!(len(small(), command, 64 << 10), Pass(NONE));
        assert_eq!(len(small(), command, (64 << 10) + 1), Fails(Errno::Inval));
        assert_eq!(len(large(), command, MAX_PAYLOAD_BYTES), Pass(NONE));
        assert_eq!(len(large(), command, MAX_PAYLOAD_BYTES + 1), Fails(Errno::Inval));
    }
    // What carries no payload is not limited by the payload's limit.
    for command in [TRIM, WRITE_ZEROES, CACHE] {
        assert_eq!(len(small(), command, u32::MAX), Pass(NONE));
    }
    assert_eq!(len(large(), WRITE, MAX_SKIPPED_PAYLOAD_BYTES), Fails(Errno::Inval));
    let (mut session, _) = opened(large(), "", false);
    let too_long = MAX_SKIPPED_PAYLOAD_BYTES + 1;
    let error = session.next(&request(0, WRITE, 1, 0, too_long)).unwrap_err();
    assert_eq!(error, ProtocolError::WriteTooLong { len: too_long });
}

#[test]
fn payload_is_the_callers() {
    let (mut session, encoder) = opened(exports(), "disk0", false);
    let mut stream = request(0, WRITE, 7, 4096, 10);
    stream.extend(b"0123456789");
    stream.extend(request(0, FLUSH, 8, 0, 0));
    let step = session.next(&stream).unwrap();
    // The header only.
    assert_eq!(step.consumed, 28);
    let Some(Event::Request(write)) = step.event else { panic!("{step:?}") };
    assert_eq!((write.command, write.len, write.end()), (Command::Write, 10, 4106));
    assert_eq!(session.payload_owed(), 10);
    session.payload_taken(4);
    session.payload_taken(0);
    assert_eq!(session.payload_owed(), 6);
    session.payload_taken(6);
    let step = session.next(&stream[38..]).unwrap();
    assert_eq!(step.consumed, 28);
    assert!(matches!(step.event, Some(Event::Request(r)) if r.command == Command::Flush));
    assert_eq!(encoder.done(&write)[..], hex("67446698 00000000 0000000000000007"));
}

/// In a release build a caller's mistake closes the connection; it is never taken for data.
#[test]
#[cfg_attr(debug_assertions, should_panic(expected = "payload bytes are owed"))]
fn going_on_without_taking_the_payload_is_an_error() {
    let (mut session, _) = opened(exports(), "disk0", false);
    session.next(&request(0, WRITE, 7, 0, 10)).unwrap();
    let error = session.next(b"0123456789").unwrap_err();
    assert_eq!(error, ProtocolError::PayloadAccounting { bytes: 10 });
}

/// As above.
#[test]
#[cfg_attr(debug_assertions, should_panic(expected = "11 payload bytes taken, 10 owed"))]
fn taking_more_than_the_payload_is_an_error() {
    let (mut session, _) = opened(exports(), "disk0", false);
    session.next(&request(0, WRITE, 7, 0, 10)).unwrap();
    session.payload_taken(11);
    let error = session.next(b"").unwrap_err();
    assert_eq!(error, ProtocolError::PayloadAccounting { bytes: 1 });
}

#[test]
fn shutting_down_refuses_what_comes() {
    let (mut session, _) = opened(exports(), "disk0", true);
    session.next(&request(0, WRITE, 1, 0, 4)).unwrap();
    session.begin_shutdown();
    // The write that was handed out keeps its payload.
    assert_eq!(session.payload_owed(), 4);
    session.payload_taken(4);
    for command in [READ, WRITE, FLUSH, TRIM, CACHE, WRITE_ZEROES, BLOCK_STATUS] {
        let len = if command == FLUSH { 0 } else { 512 };
        assert_eq!(session.next(&request(0, command, 1, 0, len)).unwrap().event, None);
        if command == WRITE {
            assert!(session.output().is_empty(), "the answer waits for the payload's end");
            session.next(&[0; 512]).unwrap();
        }
        let is_read = command == READ;
        let found = error_of(&session.output().split(), true, is_read);
        assert_eq!(found, Fails(Errno::Shutdown), "{command}");
    }
    let step = session.next(&request(0, DISC, 1, 0, 0)).unwrap();
    assert_eq!(step.event, Some(Event::Disconnected));
}

#[test]
fn disconnect_ends_the_session_whatever_it_carries() {
    for header in [request(0, DISC, 0, 0, 0), request(0xffff, DISC, 9, u64::MAX, u32::MAX)] {
        let (mut session, _) = opened(exports(), "disk0", true);
        let step = session.next(&[header, request(0, READ, 1, 0, 1)].concat()).unwrap();
        assert_eq!((step.consumed, step.event), (28, Some(Event::Disconnected)));
        assert!(session.output().is_empty() && session.is_closed());
        assert_eq!(session.next(&[0; 5]).unwrap().event, Some(Event::Disconnected));
    }
}

#[test]
fn errors_of_the_disk_map_to_the_protocols() {
    let from = |errno| Errno::from(&std::io::Error::from_raw_os_error(errno));
    for (os, nbd) in [
        (1, Errno::Perm),
        (13, Errno::Perm),
        (30, Errno::Perm),
        (5, Errno::Io),
        (12, Errno::NoMem),
        (22, Errno::Inval),
        (28, Errno::NoSpc),
        (122, Errno::NoSpc),
        (27, Errno::NoSpc),
        (108, Errno::Shutdown),
        // Only sent where the document allows them, by the caller.
        (75, Errno::Io),
        (95, Errno::Io),
        // A number of which the protocol knows nothing.
        (61, Errno::Io),
    ] {
        assert_eq!(from(os), nbd, "{os}");
    }
    assert_eq!(Errno::from(&std::io::Error::other("no number")), Errno::Io);
    assert_eq!((Errno::NotSup.number(), Errno::Overflow.number()), (95, 75));
}
