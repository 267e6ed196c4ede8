//! The simulator itself: seeds pass, a seed is a run, and every planted bug is caught by name.

use tidelock_sim::failure::Checker;
use tidelock_sim::plant::{PLANTS, Plant};
use tidelock_sim::{Options, Outcome, run};

/// Seeds within which each planted bug must be caught.
const PLANT_SEEDS: u64 = 150;

fn report(outcome: &Outcome) -> String {
    let failure = outcome.failure.as_ref().expect("it failed");
    format!(
        "seed {}: {}: {}\n{}",
        outcome.seed,
        failure.checker,
        failure.what,
        outcome.tail.join("\n")
    )
}

#[test]
fn no_rule_is_broken() {
    let options = Options { steps: 6_000, ..Options::default() };
    let (mut probes, mut recoveries, mut copies, mut clean) = (0, 0, 0, 0);
    let (mut merged, mut untagged, mut idles) = (0, 0, 0);
    for seed in 1..=150 {
        let outcome = run(seed, &options);
        assert!(outcome.failure.is_none(), "{}", report(&outcome));
        probes += outcome.counts.probes;
        recoveries += outcome.counts.recoveries;
        copies += outcome.counts.copies;
        clean += outcome.counts.clean_starts;
        merged += outcome.counts.merged;
        untagged += outcome.counts.untagged;
        idles += outcome.counts.idles;
    }
    // A run in which nothing happened would prove nothing.
    assert!(probes > 500 && recoveries > 20 && copies > 100, "{probes} {recoveries} {copies}");
    assert!(clean > 5, "{clean} clean starts");
    assert!(merged > 10_000 && untagged > 1_000 && idles > 500, "{merged} {untagged} {idles}");
}

#[test]
fn the_same_seed_is_the_same_run() {
    let options = Options { steps: 4_000, ..Options::default() };
    for seed in 1..=12 {
        let (first, second) = (run(seed, &options), run(seed, &options));
        assert_eq!((first.hash, first.counts), (second.hash, second.counts), "seed {seed}");
        let elsewhere = std::thread::spawn(move || run(seed, &options).hash).join();
        assert_eq!(first.hash, elsewhere.expect("no panic"), "seed {seed} in another thread");
        assert_ne!(first.hash, run(seed + 100, &options).hash);
    }
}

/// Plants a bug and returns who caught it first, and with which seed.
fn caught(plant: Plant, without: Option<Checker>) -> Option<(u64, Checker)> {
    let options = Options { plant: Some(plant), without, ..Options::default() };
    (1..=PLANT_SEEDS).find_map(|seed| {
        let failure = run(seed, &options).failure?;
        println!("{:<26} seed {seed:>3}: {}: {}", plant.name(), failure.checker, failure.what);
        Some((seed, failure.checker))
    })
}

#[test]
fn every_planted_bug_is_caught() {
    for (name, plant) in PLANTS {
        let Some((_, checker)) = caught(plant, None) else {
            panic!("{name} was not caught within {PLANT_SEEDS} seeds");
        };
        let expected: &[Checker] = match name {
            "ack-before-durable" => &[Checker::AckDurable],
            "ack-over-gap" => &[Checker::AckContiguous],
            "old-epoch-accepted" => &[Checker::OneEpoch],
            "publish-after-completion" => &[Checker::PublishBeforeComplete],
            "overlap-not-ordered" => &[Checker::Overlap],
            "unbounded-backlog" => &[Checker::Bounded],
            "any-entry-covers" | "first-entry-only" | "one-too-early" | "sum-covers" => {
                &[Checker::OutputCommit]
            }
            "lease-ignored" => &[Checker::Lease, Checker::Fence],
            "fence-ignored-in-async" => &[Checker::Fence],
            "merge-forgotten" | "strip-before-merge" => &[Checker::OutputCommit, Checker::Closed],
            "outsider-merged" => &[Checker::Outsider],
            "cut-of-each-maximum" | "watermark-ignores-idle" => {
                &[Checker::OutputCommit, Checker::Closed, Checker::Watermark]
            }
            "hlc-goes-back" => &[Checker::HlcGrows],
            _ => panic!("{name}: say here who must catch it"),
        };
        assert!(expected.contains(&checker), "{name} was caught by {checker}");
    }
}

/// The first checker to notice is often close to the bug. With that one looking away, those that
/// compare what a client knows, or what the disks hold, must notice as well.
#[test]
fn the_checkers_behind_the_first_one_bite_too() {
    for (name, blind, behind) in [
        (
            "publish-after-completion",
            Checker::PublishBeforeComplete,
            &[Checker::OutputCommit, Checker::ToldRows][..],
        ),
        (
            "overlap-not-ordered",
            Checker::Overlap,
            &[
                Checker::ReadOwnWrites,
                Checker::SitesEqual,
                Checker::CopyIsCurrent,
                Checker::Prefix,
                Checker::ToldRows,
            ],
        ),
        (
            "ack-before-durable",
            Checker::AckDurable,
            &[
                Checker::OutputCommit,
                Checker::ToldRows,
                Checker::Prefix,
                Checker::Stream,
                Checker::OpensAgain,
            ],
        ),
        (
            "ack-over-gap",
            Checker::AckContiguous,
            &[Checker::Prefix, Checker::ToldRows, Checker::SitesEqual, Checker::OpensAgain],
        ),
        ("lease-ignored", Checker::Lease, &[Checker::Fence, Checker::OutputCommit]),
        ("one-too-early", Checker::OutputCommit, &[Checker::ToldRows]),
        ("merge-forgotten", Checker::OutputCommit, &[Checker::Closed]),
        ("watermark-ignores-idle", Checker::Watermark, &[Checker::OutputCommit, Checker::Closed]),
        ("outsider-merged", Checker::Outsider, &[Checker::ComesBack, Checker::Watermark]),
    ] {
        let plant = Plant::of(name).expect("it is listed");
        let Some((_, checker)) = caught(plant, Some(blind)) else {
            panic!("{name} without {blind} was not caught within {PLANT_SEEDS} seeds");
        };
        assert!(behind.contains(&checker), "{name} without {blind} was caught by {checker}");
    }
}
