//! How the members of a host share the connection.

use super::super::turns::{TURN_BYTES, Turns};
use super::*;

/// Attached members, of which those have so many records to send; the seqs of each begin at its place times 100,000.
fn members(records: &[u64]) -> Vec<Bench> {
    let with = |(nth, count): (usize, &u64)| {
        let mut b = bench(LastRun::Unknown);
        b.connect();
        let begin = nth as u64 * 100_000;
        b.member.receive(attached(begin, begin, CopyState::Whole), NOW).unwrap();
        b.sent();
        b.admit(begin + 1..=begin + count);
        b
    };
    records.iter().enumerate().map(with).collect()
}

/// Records of each member in each of so many turns.
fn turns(records: &[u64], count: usize) -> Vec<Vec<usize>> {
    let mut members: Vec<_> = members(records).into_iter().map(|b| b.member).collect();
    let mut turns = Turns::default();
    let turn = |_| {
        let mut out = BytesMut::new();
        turns.fill(&mut members, &mut out).unwrap();
        assert!(out.len() < TURN_BYTES + 1024, "a record more at most");
        let mut sent = vec![0; records.len()];
        while let Some(frame) = frame::decode(&mut out).unwrap() {
            let Frame::Record(_, record) = frame else { panic!("{frame:?}") };
            sent[(record.seq.0 / 100_000) as usize] += 1;
        }
        sent
    };
    (0..count).map(turn).collect()
}

#[test]
fn who_stands_behind_members_with_nothing_to_send_gets_no_more_than_the_others() {
    let turns = turns(&[4000, 0, 0, 4000, 0, 4000], 6);
    let senders = |sent: &Vec<usize>| (0..6).filter(|n| sent[*n] > 0).collect::<Vec<_>>();
    assert_eq!(turns.iter().map(senders).collect::<Vec<_>>(), [[0], [3], [5], [0], [3], [5]]);
}

#[test]
fn what_a_short_turn_lacks_comes_next() {
    let whole = turns(&[4000], 1)[0][0];
    // The first one leaves the second one the smaller half, or the larger one.
    let much = whole * 3 / 4;
    assert_eq!(
        turns(&[much as u64, 4000, 4000], 3),
        [[much, whole - much, 0], [0, whole, 0], [0, 0, whole]]
    );
    let little = whole / 4;
    assert_eq!(
        turns(&[little as u64, 4000, 4000], 3),
        [[little, whole - little, 0], [0, 0, whole], [0, whole, 0]]
    );
}

#[test]
fn nothing_is_left_behind_and_nobody_is_no_fault() {
    assert_eq!(turns(&[3, 0, 5], 2), [[3, 0, 5], [0, 0, 0]]);
    assert_eq!(turns(&[], 1), [[0; 0]]);
}
