//! The simulator itself: seeds pass, a seed is a run, and every planted bug is caught by name.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use tidelock_sim::counts::Counts;
use tidelock_sim::failure::Checker::{self, *};
use tidelock_sim::plant::Plant;
use tidelock_sim::{Options, Outcome, run};

/// Seeds within which each planted bug must be caught.
const PLANT_SEEDS: u64 = 300;

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

/// Results for each, in order.
fn on_all_processors<T: Sync, R: Send>(all: &[T], of: impl Fn(&T) -> R + Sync) -> Vec<R> {
    let next = AtomicUsize::new(0);
    let found = Mutex::new(BTreeMap::new());
    std::thread::scope(|scope| {
        for _ in 0..std::thread::available_parallelism().map_or(1, usize::from) {
            scope.spawn(|| {
                while let Some((nth, one)) = {
                    let nth = next.fetch_add(1, SeqCst);
                    all.get(nth).map(|one| (nth, one))
                } {
                    let result = of(one);
                    found.lock().expect("no panic while held").insert(nth, result);
                }
            });
        }
    });
    found.into_inner().expect("no panic while held").into_values().collect()
}

#[test]
fn no_rule_is_broken() {
    let options = Options { steps: 6_000, ..Options::default() };
    let seeds: Vec<u64> = (1..=320).collect();
    let mut sum = Counts::default();
    for counts in on_all_processors(&seeds, |seed| {
        let outcome = run(*seed, &options);
        assert!(outcome.failure.is_none(), "{}", report(&outcome));
        outcome.counts
    }) {
        sum.add(&counts);
    }
    // A run in which nothing happened would prove nothing.
    let at_least = Counts {
        probes: 500,
        statuses: 2_000,
        recoveries: 20,
        copies: 100,
        pasts: 1_000,
        marks: 50,
        travels: 800,
        snapshots: 300,
        repairs: 150,
        switches: 1,
        handovers: 2,
        homecomings: 20,
        grown: 40,
        mapped_resyncs: 20,
        logged: 1_000,
        overflows: 20,
        degrades: 20,
        returns: 10,
        narrow_returns: 20,
        heartbeats: 300,
        missed: 5,
        verified: 200,
        differing: 40,
        spoilt: 100,
        unreached: 10,
        unrecorded: 500,
        answered: 5,
        spilled: 5_000,
        gone_on: 20,
        torn: 10,
        stood: 20,
        returned: 10,
        ceilings: 5,
        clean_starts: 400,
        cut_starts: 10,
        merged: 10_000,
        untagged: 1_000,
        idles: 500,
        ahead: 20,
        floors: 100,
        ..Counts::default()
    };
    for ((name, count), (_, least)) in sum.named().zip(at_least.named()) {
        assert!(count >= least, "{name}: {count} and not {least}");
    }
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

/// A bug, who looks away, and a seed that is known to catch it.
type Hunt = (&'static str, Option<Checker>, u64);

/// Plants each bug and returns who caught it first.
fn hunt(hunts: &[Hunt]) -> Vec<Checker> {
    let caught = |&(name, without, known): &Hunt| {
        let plant = Plant::of(name).unwrap_or_else(|| panic!("{name} is not listed"));
        let options = Options { plant: Some(plant), without, ..Options::default() };
        let failure = std::iter::once(known).chain(1..=PLANT_SEEDS).find_map(|seed| {
            let failure = run(seed, &options).failure?;
            let blind = without.map(|w| format!("without {w}")).unwrap_or_default();
            println!("{name:<26} {blind} seed {seed}: {}: {}", failure.checker, failure.what);
            Some(failure)
        });
        failure.unwrap_or_else(|| panic!("{name} was not caught within {PLANT_SEEDS} seeds"))
    };
    on_all_processors(hunts, |hunt| caught(hunt).checker)
}

/// Each planted bug, a seed that catches it, and the checkers of which one is the first to notice. When production or the
/// simulator changes, other seeds are tried.
#[rustfmt::skip]
const CAUGHT: &[(&str, u64, &[Checker])] = &[
    ("ack-before-durable", 1, &[AckDurable, OpensAgain, Past]),
    ("ack-over-gap", 27, &[AckContiguous]),
    ("activity-forgotten", 79, &[Prefix, SitesEqual, Past]),
    ("activity-late", 1, &[InMap]),
    ("activity-unflushed", 2, &[InMap]),
    ("admitted-is-back", 75, &[Silence]),
    ("any-entry-covers", 19, &[OutputCommit]),
    ("applied-before-committed", 2, &[ShardPrefix]),
    ("applied-before-watermark", 1, &[ShardPrefix]),
    ("async-before-contact", 108, &[Degraded]),
    ("boot-ignored", 178, &[NothingCompared, SitesEqual, Prefix, Stream]),
    ("ceiling-passed", 8, &[HlcGrows]),
    ("certificate-ignored", 3, &[Stream]),
    ("cold-not-synced", 1, &[OpensAgain, Past, Prefix]),
    ("copies-starve", 32, &[GoesOn, ComesBack]),
    ("cut-of-each-maximum", 5, &[OutputCommit, Closed, Watermark, Past]),
    ("damage-folded-as-good", 6, &[Past]),
    ("damage-not-listed", 6, &[Past]),
    ("deadline-forgotten", 65, &[ComesBack]),
    ("difference-forgotten", 2, &[VerifyTruthful]),
    ("difference-ignored", 1, &[VerifyTruthful]),
    ("digest-of-image", 2, &[VerifyTruthful, Prefix, SitesEqual]),
    ("end-not-told", 153, &[ComesBack]),
    ("ends-unsettled", 1, &[EndsCleanly]),
    ("epoch-not-durable", 3, &[ComesBack]),
    ("fence-ignored-in-async", 4, &[Fence]),
    ("final-round-forgets-shard", 2, &[ShardPrefix]),
    ("first-entry-only", 19, &[OutputCommit]),
    ("floor-not-awaited", 457, &[OutputCommit, Closed, Degraded]),
    ("fold-passes-the-window", 1, &[Past, Marks]),
    ("fua-forgotten", 1, &[Tap]),
    ("full-group-is-read", 55, &[Bounded]),
    ("given-up-before-shut", 4, &[Fence]),
    ("grace-cut-short", 4, &[Fence, Lease]),
    ("grown-is-whole", 6, &[SitesEqual, Prefix, Past]),
    ("handing-over-forgotten", 5, &[OutputCommit, Closed]),
    ("hlc-goes-back", 11, &[HlcGrows]),
    ("image-not-verified", 42, &[Past]),
    ("last-entry-forgotten", 6, &[OutputCommit, Closed]),
    ("last-extent-forgotten", 1, &[Past]),
    ("lease-ignored", 1, &[Lease, Fence]),
    ("map-keeps-void", 5, &[Past, Prefix]),
    ("map-older-wins", 1, &[Past, Prefix]),
    ("merge-forgotten", 2, &[Tag]),
    ("newcomer-not-told", 6, &[Degraded, OutputCommit, Closed]),
    ("newcomer-not-waited-for", 299, &[Prefix]),
    ("no-calm", 1, &[Steady]),
    ("no-nops", 3, &[ShardsComeBack]),
    ("old-epoch-accepted", 4, &[OneEpoch]),
    ("older-connection-wins", 215, &[ComesBack, NothingCompared]),
    ("oldest-forgotten", 8, &[Past, Marks]),
    ("one-too-early", 3, &[OutputCommit]),
    ("only-when-idle", 5, &[ComesBack]),
    ("ordered-by-time", 5, &[Past]),
    ("others-not-awaited", 12, &[Switch]),
    ("outsider-merged", 2, &[Outsider]),
    ("over-before-covered", 10, &[Degraded]),
    ("overlap-not-ordered", 1, &[Overlap]),
    ("pins-not-held", 9, &[Marks]),
    ("policy-forgotten", 11, &[Degraded]),
    ("publish-after-completion", 1, &[PublishBeforeComplete]),
    ("queue-is-silence", 18, &[Silence]),
    ("rebuilt-next-to-pending", 2, &[Tag, Outsider]),
    ("recovered-for-nobody", 4, &[Ordered]),
    ("redone-backwards", 10, &[SitesEqual]),
    ("removed-holds-watermark", 172, &[ComesBack]),
    ("replied-before-written", 1, &[Tap]),
    ("room-forgotten", 2, &[ComesBack]),
    ("seeded-is-whole", 3, &[SitesEqual, Prefix, NoFalseSync]),
    ("sent-before-committed", 3, &[ShardLog]),
    ("shard-log-with-gap", 1, &[ShardLog]),
    ("shard-not-fenced", 2, &[ShardPrefix]),
    ("silent-shard-ignored", 2, &[ShardPrefix]),
    ("stamps-not-monotone", 1, &[ShardLog]),
    ("status-forgets-gap", 1, &[NoFalseSync]),
    ("strip-before-merge", 2, &[Tag, OutputCommit, Closed]),
    ("sum-covers", 19, &[OutputCommit]),
    ("switch-forgotten", 361, &[Fence, Switch]),
    ("times-alone", 2, &[Past, Closed]),
    ("torn-tail-kept", 975, &[NothingCompared, Stream]),
    ("unattached-is-heard", 1, &[AckContiguous, Past, Prefix]),
    ("unbounded-backlog", 2, &[Bounded]),
    ("unrecorded-unmapped", 400, &[InMap]),
    ("unrecorded-unnamed", 355, &[OutputCommit, Closed]),
    ("view-after-its-time", 2, &[Past, Marks]),
    ("watermark-falls", 2, &[ShardPrefix]),
    ("watermark-ignores-idle", 5, &[OutputCommit, Closed, Watermark, Past]),
    ("waypoint-too-early", 8, &[Past, Prefix]),
    ("wrap-forgotten", 49, &[Tag, Outsider]),
    ("written-before-kept", 41, &[SitesEqual]),
];

#[test]
fn every_planted_bug_is_caught() {
    let (listed, planted): (BTreeSet<_>, BTreeSet<_>) = (
        CAUGHT.iter().map(|row| row.0.to_owned()).collect(),
        Plant::all().map(Plant::name).collect(),
    );
    assert_eq!(listed, planted, "say here who must catch it");
    let hunts: Vec<Hunt> = CAUGHT.iter().map(|(name, known, _)| (*name, None, *known)).collect();
    for ((name, _, expected), checker) in CAUGHT.iter().zip(hunt(&hunts)) {
        assert!(expected.contains(&checker), "{name} was caught by {checker}");
    }
}

/// The first checker to notice is often close to the bug. With that one looking away, those that
/// compare what a client knows, or what the disks hold, must notice as well.
#[test]
fn the_checkers_behind_the_first_one_bite_too() {
    let hunts: [(&str, Checker, u64, &[Checker]); 14] = [
        ("publish-after-completion", PublishBeforeComplete, 150, &[OutputCommit, ToldRows]),
        (
            "overlap-not-ordered",
            Overlap,
            1,
            &[ReadOwnWrites, SitesEqual, CopyIsCurrent, Prefix, ToldRows],
        ),
        (
            "ack-before-durable",
            AckDurable,
            1,
            &[OutputCommit, ToldRows, Prefix, Stream, OpensAgain, Past],
        ),
        ("ack-over-gap", AckContiguous, 38, &[Prefix, ToldRows, SitesEqual, OpensAgain, Past]),
        ("lease-ignored", Lease, 1, &[Fence, OutputCommit]),
        ("one-too-early", OutputCommit, 18, &[ToldRows]),
        ("merge-forgotten", Tag, 6, &[OutputCommit, Closed]),
        ("strip-before-merge", Tag, 6, &[OutputCommit, Closed]),
        ("handing-over-forgotten", OutputCommit, 8, &[Closed]),
        ("floor-not-awaited", OutputCommit, 457, &[Closed, Degraded]),
        ("times-alone", Past, 82, &[Closed]),
        ("watermark-ignores-idle", Watermark, 5, &[OutputCommit, Closed, Prefix, Past]),
        ("outsider-merged", Outsider, 91, &[ComesBack, Watermark, Tag]),
        ("hlc-goes-back", HlcGrows, 76, &[Stream, Outsider, OutputCommit, Closed, Watermark, Past]),
    ];
    let found = hunt(&hunts.map(|(name, blind, known, _)| (name, Some(blind), known)));
    for ((name, blind, _, behind), checker) in hunts.iter().zip(found) {
        assert!(behind.contains(&checker), "{name} without {blind} was caught by {checker}");
    }
}
