//! Properties over whole input streams: pieces do not matter, and garbage does no harm.

use crate::common::drive::{Trace, drive};
use crate::common::*;
use proptest::prelude::*;
use tidelock_nbd::{Event, ExportTable};

/// Three exports that differ in every respect.
fn table() -> ExportTable {
    let mut all_read_only = blocks();
    all_read_only.name = "all".into();
    all_read_only.features = ALL_FEATURES;
    ExportTable::new(vec![disk(), blocks(), all_read_only]).unwrap()
}

fn a_name() -> impl Strategy<Value = String> {
    prop_oneof![
        4 => prop::sample::select(vec!["disk0", "ro", "all"]).prop_map(String::from),
        1 => "[a-z]{0,8}",
    ]
}

fn an_option() -> impl Strategy<Value = Vec<u8>> {
    let query = prop_oneof![Just("base:allocation"), Just("base:"), Just("x-a:b"), Just("")];
    let queries = prop::collection::vec(query, 0..4);
    prop_oneof![
        2 => Just(option(STRUCTURED_REPLY, &[])),
        1 => Just(option(LIST, &[])),
        2 => (a_name(), prop::collection::vec(0_u16..5, 0..5))
            .prop_map(|(name, asks)| option(INFO, &info_data(&name, &asks))),
        3 => (a_name(), queries).prop_map(|(name, queries)| option(SET_META, &meta_data(&name, &queries))),
        1 => (0_u32..13, prop::collection::vec(any::<u8>(), 0..64))
            .prop_map(|(number, data)| option(number, &data)),
    ]
}

/// Numbers at which something changes.
fn an_edge() -> impl Strategy<Value = u64> {
    let near = prop::sample::select(vec![0, 512, 4096, 32 << 10, 64 << 10, MIB, 1 << 32, u64::MAX]);
    prop_oneof![
        (near, -2_i64..3).prop_map(|(near, by)| near.wrapping_add_signed(by)),
        (0_u64..130).prop_map(|sector| sector * 512),
        0..MIB,
    ]
}

fn a_request() -> impl Strategy<Value = Vec<u8>> {
    let flags = prop_oneof![
        4 => Just(0_u16),
        4 => prop::sample::select(vec![FUA, NO_HOLE, DF, REQ_ONE, FAST_ZERO, FUA | NO_HOLE]),
        1 => any::<u16>(),
    ];
    let command = prop_oneof![8 => 0_u16..8, 1 => any::<u16>()];
    // A long payload says no more than a short one.
    let len = an_edge().prop_map(|len| len.min(u32::MAX.into()) as u32);
    (flags, command, any::<u64>(), an_edge(), len).prop_map(
        |(flags, command, cookie, offset, len)| {
            // A goodbye is rare enough by itself.
            let command = if command == DISC && !cookie.is_multiple_of(8) { READ } else { command };
            let (offset, len) = match command {
                FLUSH if !cookie.is_multiple_of(4) => (0, 0),
                WRITE => (offset, len % 5000),
                _ => (offset, len),
            };
            let mut bytes = request(flags, command, cookie, offset, len);
            if command == WRITE {
                bytes.resize(bytes.len() + len as usize, 0x55);
            }
            bytes
        },
    )
}

/// A client that mostly knows what it does.
fn a_conversation() -> impl Strategy<Value = Vec<u8>> {
    (
        prop_oneof![9 => Just(FIXED | NO_ZEROES), 1 => 0_u32..6],
        prop::collection::vec(an_option(), 0..6),
        a_name(),
        any::<bool>(),
        prop_oneof![4 => Just(GO), 1 => Just(EXPORT_NAME)],
        prop::collection::vec(a_request(), 0..20),
    )
        .prop_map(|(flags, options, name, select, open, requests)| {
            let select = match select {
                true => [
                    option(STRUCTURED_REPLY, &[]),
                    option(SET_META, &meta_data(&name, &["base:allocation"])),
                ]
                .concat(),
                false => vec![],
            };
            let last = match open {
                GO => option(GO, &info_data(&name, &[3])),
                _ => option(EXPORT_NAME, name.as_bytes()),
            };
            [client_flags(flags), options.concat(), select, last, requests.concat()].concat()
        })
}

fn pieces() -> impl Strategy<Value = Vec<usize>> {
    prop::collection::vec(prop_oneof![1_usize..4, 1_usize..100, 1_usize..5000], 1..20)
}

fn whole(input: &[u8]) -> Trace {
    drive(&table(), input, &[])
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1000))]

    #[test]
    fn pieces_do_not_matter(input in a_conversation(), pieces in pieces()) {
        prop_assert_eq!(whole(&input), drive(&table(), &input, &pieces));
    }

    #[test]
    fn changed_bytes_do_no_harm(
        input in a_conversation(),
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..10),
        pieces in pieces(),
    ) {
        let mut input = input;
        for (at, to) in changes {
            let at = at.index(input.len());
            input[at] = to;
        }
        prop_assert_eq!(whole(&input), drive(&table(), &input, &pieces));
    }

    #[test]
    fn garbage_does_no_harm(
        garbage in prop::collection::vec(any::<u8>(), 0..500),
        stage in 0_usize..3,
        pieces in pieces(),
    ) {
        let mut input = vec![];
        if stage > 0 {
            input.extend(client_flags(FIXED));
        }
        if stage > 1 {
            input.extend(option(GO, &info_data("disk0", &[])));
        }
        input.extend(garbage);
        prop_assert_eq!(whole(&input), drive(&table(), &input, &pieces));
    }
}

/// The generator is worth something: it gets past the negotiation and reaches every command.
#[test]
fn conversations_reach_every_command() {
    use proptest::strategy::ValueTree;
    use proptest::test_runner::TestRunner;
    let mut runner = TestRunner::deterministic();
    let mut seen = std::collections::BTreeMap::new();
    for _ in 0..2000 {
        let input = a_conversation().new_tree(&mut runner).unwrap().current();
        for event in whole(&input).events {
            let name = match event {
                Event::Request(request) => format!("{:?}", request.command),
                other => format!("{other:?}").split(' ').next().unwrap().to_string(),
            };
            *seen.entry(name).or_insert(0) += 1;
        }
    }
    println!("{seen:?}");
    for name in [
        "Opened",
        "Read",
        "Write",
        "Flush",
        "Trim",
        "WriteZeroes",
        "BlockStatus",
        "Cache",
        "Disconnected",
    ] {
        assert!(seen.get(name).is_some_and(|&count| count > 20), "{name} is hardly reached");
    }
}
