//! The negotiation: its whole table, and its replies byte by byte.

use crate::common::*;
use tidelock_nbd::limits::{MAX_OPTION_BYTES, MAX_OPTIONS, MAX_SKIPPED_OPTION_BYTES};
use tidelock_nbd::{
    BlockSize, Event, Export, ExportError, ExportTable, Features, ProtocolError, Session, Users,
};

const GREETING: &str = "4e42444d41474943 49484156454f5054 0003";

/// Feed everything, expect no event, return what was sent.
fn talk(session: &mut Session, input: &[u8]) -> Vec<u8> {
    let step = session.next(input).unwrap();
    assert_eq!((step.consumed, step.event), (input.len(), None));
    session.output().split().to_vec()
}

fn after_flags(exports: ExportTable, flags: u32) -> Session {
    let mut session = Session::new(exports);
    assert_eq!(session.output().split()[..], hex(GREETING));
    assert!(talk(&mut session, &client_flags(flags)).is_empty());
    session
}

/// `option reply type` for each reply in `bytes`.
fn describe_replies(mut bytes: &[u8]) -> String {
    let mut names = vec![];
    while !bytes.is_empty() {
        assert_eq!(bytes[..8], hex("0003e889045565a9"), "reply magic");
        let word = |at: usize| u32::from_be_bytes(bytes[at..at + 4].try_into().unwrap());
        let (kind, len) = (word(12), word(16) as usize);
        let info = || u16::from_be_bytes(bytes[20..22].try_into().unwrap());
        names.push(match kind {
            1 => "ack".into(),
            2 => "server".into(),
            3 => format!("info{}", info()),
            4 => format!("context{}", word(20)),
            0x8000_0001 => "UNSUP".into(),
            0x8000_0003 => "INVALID".into(),
            0x8000_0006 => "UNKNOWN".into(),
            0x8000_0007 => "SHUTDOWN".into(),
            0x8000_0009 => "TOO_BIG".into(),
            other => panic!("reply type {other:#x}"),
        });
        bytes = &bytes[20 + len..];
    }
    names.join(" ")
}

/// Every kind of option in every state of the negotiation, as a table.
#[test]
fn table_of_the_state_machine() {
    let states: [(&str, u32, Vec<u8>, bool); 5] = [
        ("old", 0, vec![], false),
        ("plain", FIXED, vec![], false),
        ("structured", FIXED, option(STRUCTURED_REPLY, &[]), false),
        (
            "selected",
            FIXED,
            [
                option(STRUCTURED_REPLY, &[]),
                option(SET_META, &meta_data("disk0", &["base:allocation"])),
            ]
            .concat(),
            false,
        ),
        ("shutdown", FIXED, vec![], true),
    ];
    let long_name = "x".repeat(4097);
    let too_big = vec![0; MAX_OPTION_BYTES + 1];
    let inputs: Vec<(&str, u32, Vec<u8>)> = vec![
        ("EXPORT_NAME known", EXPORT_NAME, b"disk0".to_vec()),
        ("EXPORT_NAME unknown", EXPORT_NAME, b"disk9".to_vec()),
        ("EXPORT_NAME empty", EXPORT_NAME, vec![]),
        ("EXPORT_NAME too long", EXPORT_NAME, long_name.clone().into_bytes()),
        ("ABORT", ABORT, vec![]),
        ("ABORT with data", ABORT, b"bye".to_vec()),
        ("LIST", LIST, vec![]),
        ("LIST with data", LIST, vec![0]),
        ("PEEK_EXPORT (4)", 4, vec![]),
        ("STARTTLS", STARTTLS, vec![]),
        ("INFO known", INFO, info_data("disk0", &[])),
        ("INFO all", INFO, info_data("disk0", &[3, 2, 1, 0, 77])),
        ("INFO of min 512", INFO, info_data("ro", &[])),
        ("INFO unknown", INFO, info_data("disk9", &[])),
        ("INFO long name", INFO, info_data(&long_name, &[])),
        ("INFO cut short", INFO, info_data("disk0", &[1])[..12].to_vec()),
        ("INFO data left over", INFO, [info_data("disk0", &[]), vec![0]].concat()),
        ("INFO without data", INFO, vec![]),
        ("INFO too big", INFO, too_big.clone()),
        ("GO known", GO, info_data("disk0", &[])),
        ("GO all", GO, info_data("disk0", &[0, 1, 2, 3])),
        ("GO unknown", GO, info_data("disk9", &[])),
        ("GO cut short", GO, string("disk0")),
        ("STRUCTURED_REPLY", STRUCTURED_REPLY, vec![]),
        ("STRUCTURED_REPLY with data", STRUCTURED_REPLY, vec![0]),
        ("LIST_META no query", LIST_META, meta_data("disk0", &[])),
        ("LIST_META base:", LIST_META, meta_data("disk0", &["base:"])),
        ("LIST_META allocation", LIST_META, meta_data("disk0", &["base:allocation"])),
        ("LIST_META foreign", LIST_META, meta_data("disk0", &["qemu:dirty-bitmap:x"])),
        ("LIST_META unknown", LIST_META, meta_data("disk9", &[])),
        ("LIST_META cut short", LIST_META, string("disk0")),
        ("SET_META no query", SET_META, meta_data("disk0", &[])),
        ("SET_META base:", SET_META, meta_data("disk0", &["base:"])),
        ("SET_META allocation", SET_META, meta_data("disk0", &["base:allocation"])),
        (
            "SET_META twice, foreign",
            SET_META,
            meta_data("disk0", &["base:allocation", "x-y:z", "nocolon", "base:allocation"]),
        ),
        ("SET_META other export", SET_META, meta_data("ro", &["base:allocation"])),
        ("SET_META unknown", SET_META, meta_data("disk9", &["base:allocation"])),
        ("SET_META long name", SET_META, meta_data(&long_name, &["base:allocation"])),
        ("SET_META false count", SET_META, [string("disk0"), vec![0xff; 4]].concat()),
        ("SET_META too big", SET_META, too_big),
        ("EXTENDED_HEADERS (11)", 11, vec![]),
        ("unknown with data", 0xdead_beef, vec![0; 70_000]),
    ];
    let mut table = String::new();
    for (label, number, data) in &inputs {
        for (state, flags, before, shutdown) in &states {
            let mut session = after_flags(exports(), *flags);
            talk(&mut session, before);
            if *shutdown {
                session.begin_shutdown();
            }
            let cell = match session.next(&option(*number, data)) {
                Err(error) => format!("close: {}", error.kind()),
                Ok(step) => {
                    let output = session.output().split();
                    match step.event {
                        None => {
                            // Is `base:allocation` selected for disk0 afterwards? GO tells.
                            let on = selected(session);
                            let mark = if on { " [selected]" } else { "" };
                            format!("{}{mark}", describe_replies(&output))
                        }
                        Some(Event::Opened { export }) if *number == EXPORT_NAME => {
                            format!("{} bytes, open {export}", output.len())
                        }
                        Some(Event::Opened { export }) => {
                            format!("{}, open {export}", describe_replies(&output))
                        }
                        Some(Event::Disconnected) => {
                            format!("{}, closed", describe_replies(&output))
                        }
                        Some(other) => panic!("{other:?}"),
                    }
                }
            };
            table += &format!("{label:26} {state:10} -> {cell}\n");
        }
    }
    println!("{table}");
    let expected = include_str!("negotiation_table.txt");
    let first_difference =
        table.lines().zip(expected.lines()).find(|(found, wanted)| found != wanted);
    assert_eq!(first_difference, None, "found | wanted");
    assert_eq!(table.lines().count(), expected.lines().count());
}

/// Whether BLOCK_STATUS would work on `disk0` from here.
fn selected(mut session: Session) -> bool {
    let go = [option(GO, &info_data("disk0", &[])), request(0, BLOCK_STATUS, 1, 0, 512)].concat();
    match session.next(&go) {
        Ok(step) if step.event == Some(Event::Opened { export: 0 }) => {
            let step = session.next(&go[step.consumed..]).unwrap();
            matches!(step.event, Some(Event::Request(_)))
        }
        _ => false,
    }
}

#[test]
fn golden_export_name() {
    // Size 1 MiB. Flags: has-flags, flush, FUA, trim, zeroes, multi-conn, cache, fast-zero.
    let size_and_flags = hex("0000000000100000 0d6d");
    for (flags, zeroes) in [(FIXED, 124), (FIXED | NO_ZEROES, 0), (0, 124), (NO_ZEROES, 0)] {
        let mut session = after_flags(exports(), flags);
        let step = session.next(&option(EXPORT_NAME, b"disk0")).unwrap();
        assert_eq!(step.event, Some(Event::Opened { export: 0 }));
        let expected = [size_and_flags.clone(), vec![0; zeroes]].concat();
        assert_eq!(session.output()[..], expected);
    }
}

#[test]
fn golden_list() {
    let mut session = after_flags(exports(), FIXED);
    let expected = hex("
        0003e889045565a9 00000003 00000002 0000000e 00000005 6469736b30 6669727374
        0003e889045565a9 00000003 00000002 00000006 00000002 726f
        0003e889045565a9 00000003 00000001 00000000");
    assert_eq!(talk(&mut session, &option(LIST, &[])), expected);
}

#[test]
fn golden_info_and_go() {
    let replies = |option: &str, flags: &str| {
        let text = "
            0003e889045565a9 OPT 00000003 0000000c 0000 0000000000100000 FLAGS
            0003e889045565a9 OPT 00000003 00000007 0001 6469736b30
            0003e889045565a9 OPT 00000003 00000007 0002 6669727374
            0003e889045565a9 OPT 00000003 0000000e 0003 00000001 00001000 02000000
            0003e889045565a9 OPT 00000001 00000000";
        hex(&text.replace("OPT", option).replace("FLAGS", flags))
    };
    let ask = info_data("disk0", &[1, 2, 3]);
    let mut session = after_flags(exports(), FIXED);
    assert_eq!(talk(&mut session, &option(INFO, &ask)), replies("00000006", "0d6d"));
    // With structured replies DF is offered too (bit 7).
    let ack = hex("0003e889045565a9 00000008 00000001 00000000");
    assert_eq!(talk(&mut session, &option(STRUCTURED_REPLY, &[])), ack);
    let step = session.next(&option(GO, &ask)).unwrap();
    assert_eq!(step.event, Some(Event::Opened { export: 0 }));
    assert_eq!(session.output()[..], replies("00000007", "0ded"));
}

#[test]
fn golden_read_only_flags() {
    let mut session = after_flags(exports(), FIXED);
    let expected = hex("
        0003e889045565a9 00000006 00000003 0000000c 0000 0000000000010000 0007
        0003e889045565a9 00000006 00000003 0000000e 0003 00000200 00001000 00008000
        0003e889045565a9 00000006 00000001 00000000");
    assert_eq!(talk(&mut session, &option(INFO, &info_data("ro", &[]))), expected);
}

#[test]
fn golden_meta_context() {
    let mut session = after_flags(exports(), FIXED);
    talk(&mut session, &option(STRUCTURED_REPLY, &[]));
    let replies = |option: &str, id: &str| {
        let text = "
            0003e889045565a9 OPT 00000004 00000013 ID 626173653a616c6c6f636174696f6e
            0003e889045565a9 OPT 00000001 00000000";
        hex(&text.replace("OPT", option).replace("ID", id))
    };
    let list = option(LIST_META, &meta_data("disk0", &[]));
    assert_eq!(talk(&mut session, &list), replies("00000009", "00000000"));
    let set = option(SET_META, &meta_data("disk0", &["base:allocation"]));
    assert_eq!(talk(&mut session, &set), replies("0000000a", "00000001"));
}

#[test]
fn golden_refusals() {
    let mut session = after_flags(exports(), FIXED);
    let refused = |option: &str, error: &str, text: &str| {
        let mut bytes = hex(&format!("0003e889045565a9 {option} {error}"));
        bytes.extend((text.len() as u32).to_be_bytes());
        bytes.extend(text.as_bytes());
        bytes
    };
    let tls = refused("00000005", "80000001", "TLS is not supported here");
    assert_eq!(talk(&mut session, &option(STARTTLS, &[])), tls);
    let unknown = refused("00000007", "80000006", "there is no such export");
    assert_eq!(talk(&mut session, &option(GO, &info_data("x", &[]))), unknown);
    let odd = refused("0000002a", "80000001", "unknown option");
    assert_eq!(talk(&mut session, &option(42, b"data")), odd);
    // ABORT is acknowledged, then nothing more is read.
    let step = session.next(&option(ABORT, &[])).unwrap();
    assert_eq!(step.event, Some(Event::Disconnected));
    assert_eq!(session.output().split()[..], hex("0003e889045565a9 00000002 00000001 00000000"));
    assert!(session.is_closed());
    let step = session.next(b"more").unwrap();
    assert_eq!((step.consumed, step.event), (4, Some(Event::Disconnected)));
}

#[test]
fn a_stream_that_is_not_nbd_ends_the_connection() {
    let mut session = Session::new(exports());
    let error = session.next(&client_flags(4)).unwrap_err();
    assert_eq!(error, ProtocolError::ClientFlags { flags: 4 });
    assert_eq!(session.next(&[]).unwrap_err(), error);

    let mut session = after_flags(exports(), FIXED);
    let error = session.next(b"GET / HTTP/1.1\r\n\r\n").unwrap_err();
    assert_eq!(error.kind(), "option-magic");

    let (mut session, _) = opened(exports(), "disk0", false);
    let error = session.next(&[0; 28]).unwrap_err();
    assert_eq!(error, ProtocolError::RequestMagic { magic: 0 });
}

/// At each limit, and one step past it.
#[test]
fn limits_of_the_negotiation() {
    // The longest option that is read past costs no memory, so only its header is sent.
    let header = |option: u32, len: u32| {
        let mut bytes = crate::common::option(option, &[]);
        bytes[12..].copy_from_slice(&len.to_be_bytes());
        bytes
    };
    let mut session = after_flags(exports(), FIXED);
    assert!(talk(&mut session, &header(99, MAX_SKIPPED_OPTION_BYTES)).is_empty());
    let mut session = after_flags(exports(), FIXED);
    let len = MAX_SKIPPED_OPTION_BYTES + 1;
    let error = session.next(&header(99, len)).unwrap_err();
    assert_eq!(error, ProtocolError::OptionTooLong { option: 99, len });

    let mut session = after_flags(exports(), FIXED);
    for _ in 0..MAX_OPTIONS {
        talk(&mut session, &option(99, &[]));
    }
    let error = session.next(&option(99, &[])).unwrap_err();
    assert_eq!(error, ProtocolError::TooManyOptions);

    // The longest name works.
    let name = "n".repeat(4096);
    let mut session = after_flags(one(Export { name: name.clone(), ..disk() }), FIXED);
    let step = session.next(&option(GO, &info_data(&name, &[1]))).unwrap();
    assert_eq!(step.event, Some(Event::Opened { export: 0 }));
}

#[test]
fn a_client_that_does_not_read_replies_is_not_served_on() {
    let mut session = after_flags(exports(), FIXED);
    let flood = option(LIST, &[]).repeat(1000);
    let mut rest = &flood[..];
    let mut pauses = 0;
    let mut sent = 0;
    loop {
        let step = session.next(rest).unwrap();
        rest = &rest[step.consumed..];
        if step.event.is_none() {
            break;
        }
        assert_eq!(step.event, Some(Event::OutputFull));
        // Asking again without sending changes nothing.
        assert_eq!(session.next(rest).unwrap().consumed, 0);
        assert!(session.output().len() < 66 << 10);
        sent += session.output().split().len();
        pauses += 1;
    }
    sent += session.output().split().len();
    let one_list = (20 + 4 + 10) + (20 + 4 + 2) + 20;
    assert_eq!(sent, 1000 * one_list);
    assert_eq!(pauses, sent / (64 << 10));
}

#[test]
fn the_empty_name_means_the_only_export() {
    for structured in [false, true] {
        let (session, _) = opened(one(disk()), "", structured);
        assert_eq!(session.export(), Some(0));
    }
    let mut named_empty = disk();
    named_empty.name = String::new();
    let table = ExportTable::new(vec![blocks(), named_empty]).unwrap();
    let (session, _) = opened(table, "", false);
    assert_eq!(session.export(), Some(1));
}

#[test]
fn exports_are_checked() {
    let check = |change: &dyn Fn(&mut Export)| {
        let mut export = disk();
        change(&mut export);
        ExportTable::new(vec![export]).err()
    };
    assert_eq!(check(&|_| {}), None);
    assert_eq!(check(&|e| e.size_bytes = 0), None);
    let size = |min, preferred, max| BlockSize { min, preferred, max };
    let bad_sizes = [
        (0, 4096, 4096),
        (3, 4096, 4096),
        (1 << 17, 1 << 17, 1 << 20),
        (1, 256, 1 << 20),
        (4096, 512, 1 << 20),
        (1, 6000, 1 << 20),
        (512, 512, (1 << 20) + 1),
        (1, 4096, (32 << 20) + 1),
        (1, 4096, 2048),
    ];
    for (min, preferred, max) in bad_sizes {
        let error = check(&|e| e.block_size = size(min, preferred, max));
        let found = matches!(error, Some(ExportError::BadBlockSize { .. }));
        assert!(found, "{min} {preferred} {max}: {error:?}");
    }
    let misfit = check(&|e| {
        e.size_bytes = 513;
        e.block_size = size(512, 4096, 1 << 20);
    });
    assert!(matches!(misfit, Some(ExportError::BadSize { .. })));
    assert!(matches!(check(&|e| e.size_bytes = 1 << 63), Some(ExportError::BadSize { .. })));
    for text in ["a\0b".to_string(), "x".repeat(4097)] {
        let name = check(&|e| e.name = text.clone());
        assert!(matches!(name, Some(ExportError::BadString { field: "name", .. })));
        let description = check(&|e| e.description = text.clone());
        assert!(matches!(description, Some(ExportError::BadString { field: "description", .. })));
    }
    let alone = check(&|e| e.features = Features { fast_zero: true, ..Features::default() });
    assert!(matches!(alone, Some(ExportError::FastZeroAlone { .. })));
    let twice = ExportTable::new(vec![disk(), disk()]).unwrap_err();
    assert!(matches!(twice, ExportError::DuplicateName { .. }));
    let many = (0..1025).map(|n| Export { name: n.to_string(), ..disk() }).collect();
    assert!(matches!(ExportTable::new(many), Err(ExportError::TooMany { count: 1025 })));
}

/// Two guests on one disk destroy it: the second hears why, and gets its place when the first has gone.
#[test]
fn a_client_that_finds_no_place_is_told_why() {
    let users = Users::new(1, "the disk is in use".into());
    let export = Export { users: Some(users.clone()), ..disk() };
    let table = one(export);
    let (mut first, _) = opened(table.clone(), "disk0", false);
    assert_eq!(users.count(), 1);
    let go = option(GO, &info_data("disk0", &[]));
    let mut second = after_flags(table.clone(), FIXED);
    for _ in 0..2 {
        let step = second.next(&go).unwrap();
        assert_eq!(step.event, Some(Event::Refused { export: 0 }));
        let said = second.output().split();
        assert_eq!(said[12..16], 0x8000_0002u32.to_be_bytes(), "NBD_REP_ERR_POLICY");
        assert_eq!(&said[20..], b"the disk is in use");
    }
    assert_eq!(describe_replies(&talk(&mut second, &option(LIST, &[]))), "server ack");
    // What has no answer ends the connection.
    let mut old = after_flags(table.clone(), 0);
    let step = old.next(&option(EXPORT_NAME, b"disk0")).unwrap();
    assert_eq!((step.event, old.output().len()), (Some(Event::Refused { export: 0 }), 0));
    assert!(old.is_closed());
    first.leave();
    assert_eq!(users.count(), 0);
    let step = second.next(&go).unwrap();
    assert_eq!(step.event, Some(Event::Opened { export: 0 }));
    assert_eq!(users.count(), 1);
    drop(second);
    drop(first);
    assert_eq!(users.count(), 0);
}
