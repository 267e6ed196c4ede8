//! Random logs, in random pieces, from random places on, and damaged.

use super::*;
use proptest::prelude::*;
use tidelock_wal::{Ending, Gid, Kind, PgTimestamp, Transaction, TwoPhase, Xid};
use writer::{PAGE, Parts, TRANSACTIONS, end, prepare};

#[derive(Clone, Debug)]
enum Step {
    Other(usize),
    /// A record that leaves so many bytes of its last page, or of the next one.
    UpTo(u64),
    End(Ending, i64, Parts),
    Prepare(i64, Vec<u8>, usize),
    Switch,
    GivenUp(u64),
}

fn ending() -> impl Strategy<Value = Ending> {
    prop::sample::select(vec![
        Ending::Commit,
        Ending::Abort,
        Ending::CommitPrepared,
        Ending::AbortPrepared,
    ])
}

fn gid() -> impl Strategy<Value = Vec<u8>> {
    prop::collection::vec(1..=u8::MAX, 0..200)
}

fn end_of_transaction() -> impl Strategy<Value = Step> {
    let list = || prop::option::of(prop_oneof![0..4_u32, 0..2000_u32]);
    let lists = (list(), list(), list(), list());
    let others = (any::<bool>(), any::<bool>(), prop::option::of(gid()));
    (ending(), any::<i64>(), lists, others).prop_map(
        |(ending, stamp, lists, (place, origin, gid))| {
            let was_prepared = matches!(ending, Ending::CommitPrepared | Ending::AbortPrepared);
            let is_commit = matches!(ending, Ending::Commit | Ending::CommitPrepared);
            let parts = Parts {
                place,
                subtransactions: lists.0,
                files: lists.1,
                statistics: lists.2,
                messages: lists.3.filter(|_| is_commit),
                prepared: was_prepared.then_some(4711),
                gid: gid.filter(|_| was_prepared),
                origin,
            };
            Step::End(ending, stamp, parts)
        },
    )
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        6 => prop_oneof![0..100_usize, 0..20_000_usize].prop_map(Step::Other),
        4 => (0..5_u64).prop_map(|words| Step::UpTo(words * 8)),
        4 => end_of_transaction(),
        2 => (any::<i64>(), gid(), 0..9000_usize).prop_map(|(stamp, gid, behind)| Step::Prepare(stamp, gid, behind)),
        1 => Just(Step::Switch),
        1 => (1..4_u64).prop_map(Step::GivenUp),
    ]
}

fn write(writer: &mut Writer, step: &Step) {
    match step {
        Step::Other(bytes) => writer.other(*bytes),
        Step::UpTo(left) => {
            // The head of a page comes first, if one begins here.
            let at = if writer.at().is_multiple_of(PAGE) { writer.at() + 40 } else { writer.at() };
            let bytes = (PAGE - at % PAGE).checked_sub(24 + left);
            writer.other(bytes.unwrap_or(PAGE) as usize);
        }
        Step::End(ending, stamp, parts) => {
            let (info, content) = end(*ending, *stamp, parts);
            let gid = parts.gid.clone();
            let two_phase = parts.prepared.map(|xid| (xid, gid));
            writer.content(TRANSACTIONS, info, 800, &content, ended(*ending, *stamp, two_phase));
        }
        Step::Prepare(stamp, gid, behind) => {
            let content = prepare(*stamp, 801, gid, *behind);
            let kind = ended(Ending::Prepare, *stamp, Some((801, Some(gid.clone()))));
            writer.content(TRANSACTIONS, 0x10, 801, &content, kind);
        }
        Step::Switch => writer.switch(),
        Step::GivenUp(pages) => writer.given_up(*pages),
    }
}

/// The end of a transaction, as a reader finds it.
pub fn ended(ending: Ending, stamp: i64, two_phase: Option<(u32, Option<Vec<u8>>)>) -> Kind {
    let two_phase =
        two_phase.map(|(xid, gid)| TwoPhase { xid: Xid(xid), gid: gid.map(|gid| Gid::new(&gid)) });
    Kind::Transaction(Transaction { ending, stamp: PgTimestamp(stamp), two_phase })
}

/// Begin of a log, and the steps that write it.
type Plan = (u64, Vec<Step>);

fn plan() -> impl Strategy<Value = Plan> {
    // Places for records on a first page, and page boundaries before and behind the end of a segment.
    let start = prop_oneof![
        (0..6_u64).prop_map(|page| START + page * PAGE),
        (5..1024_u64).prop_map(|word| START + word * 8),
    ];
    (start, prop::collection::vec(step(), 1..12))
}

fn carried_out((start, steps): &Plan) -> Writer {
    let mut writer = Writer::new(*start);
    steps.iter().for_each(|step| write(&mut writer, step));
    writer
}

fn pieces() -> impl Strategy<Value = Vec<usize>> {
    prop::collection::vec(prop_oneof![1..50_usize, 1..40_000_usize], 1..5)
}

proptest! {
    #[test]
    fn a_log_is_read_whatever_the_pieces(plan in plan(), pieces in pieces()) {
        let writer = carried_out(&plan);
        let (items, end) = read(reader(&writer, writer.start), &writer.bytes, &pieces);
        prop_assert_eq!(end, None);
        prop_assert_eq!(items, writer.items);
    }

    /// A sender can cut the log at the end of any item, and whoever reads on from there finds the others.
    #[test]
    fn a_log_can_be_read_from_the_end_of_any_item(
        plan in plan(),
        pieces in pieces(),
        cut in any::<prop::sample::Index>(),
    ) {
        let writer = carried_out(&plan);
        let cut = cut.index(writer.items.len());
        let (before, behind) = writer.items.split_at(cut + 1);
        let from = before[cut].end;
        let bytes = &writer.bytes[(from.0 - writer.start.0) as usize..];
        let mut first = reader(&writer, writer.start);
        first.push(&writer.bytes[..writer.bytes.len() - bytes.len()]);
        let last = first.last_record();
        // The head of the next page says that a record was given up.
        let unknown = usize::from(before[cut].kind == Kind::GivenUp);
        prop_assert_eq!(first.filter(Result::is_ok).count(), before.len() - unknown);
        let next = reader(&writer, from);
        let next = match last {
            Some(last) => next.after(last),
            None => next,
        };
        let (items, end) = read(next, bytes, &pieces);
        prop_assert_eq!(end, None);
        prop_assert_eq!(items, behind);
    }

    /// A stream may begin with any page: whatever record reaches into it is passed over.
    #[test]
    fn a_log_can_be_read_from_any_page(
        plan in plan(),
        pieces in pieces(),
        page in any::<prop::sample::Index>(),
    ) {
        let writer = carried_out(&plan);
        let first = writer.start.0.next_multiple_of(PAGE);
        let mut pages: Vec<_> = (first..writer.at()).step_by(PAGE as usize).map(Lsn).collect();
        // The rest of a switch cannot be told from another record's, and behind it there are no pages.
        let is_in_switch = |page| {
            let within = |item: &WalItem| item.begin < page && page < item.end;
            writer.items.iter().any(|item| item.kind == Kind::Switch && within(item))
        };
        pages.retain(|&page| !is_in_switch(page));
        prop_assume!(!pages.is_empty());
        let page = *page.get(&pages);
        let mut expected: Vec<_> =
            writer.items.iter().filter(|item| item.end > page).cloned().collect();
        let reaches_in = expected[0].begin < page;
        let bytes = &writer.bytes[(page.0 - writer.start.0) as usize..];
        let (mut items, end) = read(reader(&writer, page), bytes, &pieces);
        prop_assert_eq!(end, None);
        if reaches_in {
            prop_assert_eq!(items[0].begin, page);
            let rest = items.remove(0);
            prop_assert_eq!(rest.end, expected.remove(0).end);
            prop_assert_eq!(rest.kind, Kind::Rest);
        }
        prop_assert_eq!(items, expected);
    }

    /// A wrong bit keeps the record from being handed out, whichever it is.
    #[test]
    fn damage_is_found_before_the_record_is_handed_out(
        plan in plan(),
        pieces in pieces(),
        at in any::<prop::sample::Index>(),
        bit in 0..8_u32,
    ) {
        let writer = carried_out(&plan);
        let at = at.index(writer.bytes.len());
        let mut bytes = writer.bytes.clone();
        bytes[at] ^= 1 << bit;
        let (items, end) = read(reader(&writer, writer.start), &bytes, &pieces);
        if writer.slack.iter().any(|&(slack, bits)| slack == at && bits & (1 << bit) != 0) {
            prop_assert_eq!(end, None);
            prop_assert_eq!(items, writer.items);
        } else {
            let position = writer.start.0 + at as u64;
            // A record that was given up has no checksum, and counts for nothing.
            let can_pass = |item: &&WalItem| item.end.0 <= position || item.kind == Kind::GivenUp;
            let whole = writer.items.iter().take_while(can_pass).count();
            let is_in_given_up = writer.items.iter().any(|item| {
                item.kind == Kind::GivenUp && (item.begin.0..item.end.0).contains(&position)
            });
            prop_assert!(is_in_given_up || items.len() <= whole, "{items:?}, then {end:?}");
            prop_assert!(items.len() <= writer.items.len());
            prop_assert_eq!(&items[..], &writer.items[..items.len()]);
        }
    }
}
