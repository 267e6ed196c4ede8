"""What was asked for beside what was measured."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter

from .past import FOLDS
from .settings import LEVEL
from .tagging import CABLES, COVERED, RATES, THROUGHPUT_LEVEL, TRIPS

SYNC_FACTOR = 12
"""PipeCloud 6.1, figure 9."""
ACTIVITY_RATIO = {"1 %": 0.97, "100 %": 0.85}
RESYNC_OF_LINK = 0.9
LIVE_RATIO = 1.1
"""What a resync may add to the commits beside it."""
STEADY_MIB = 4
"""What memory may differ by between the half of an outage and its end: allocators, not a queue."""
INGEST_RATIO = 0.97
FOLD_RATIO = 0.97
"""Folded while a guest writes, of what it writes; the rest waits for the next job."""
OPEN_MS = 20
FIRST_READ_MORE_MS = 1
REPLY_OVER_RTT_MS = 2
TAGS_ADD_US = 5
"""What tags may add to a round trip between two members."""
SHARD_LAG_MS = 0.5
"""Over half a round trip, of synthetic shards."""
POSTGRES_LAG_MS = 2
SHIPPED_RATIO = 0.97
BACK_S = 0.5
READY_MS = 5
JOINT_OVER_RTT_MS = 5
"""What joint pipelining may add to one round trip, however many tiers are protected."""


@dataclass(frozen=True)
class Verdict:
    """One line of the summary."""

    part: str
    target: str
    measured: str
    reached: bool | None
    """`None`: there is no target, only a figure."""
    command: str

    @property
    def word(self) -> str:
        """For tables."""
        return {True: "reached", False: "short", None: ""}[self.reached]


def verdicts(results: dict[str, dict]) -> list[Verdict]:
    """Of the parts that were measured, in their order."""
    makers = {"a": _nbd, "b": _replication, "c": _commits, "d": _gate, "e": _memory}
    makers |= {"f": _work, "g": _tiers, "h": _reads}
    makers |= {"i": _tags, "j": _covered, "k": _release, "l": _reply, "m": _activity, "n": _history}
    makers |= {"o": _comeback, "p": _outage, "q": _switchover, "r": _shards}
    return [verdict for part, make in makers.items() if part in results for verdict in make(results[part])]


def command(part: str) -> str:
    """What measures a part again."""
    return f"make bench ONLY={part}"


def _spread(ratio: dict) -> str:
    return f"×{ratio['median']:.2f} ({ratio['min']:.2f} to {ratio['max']:.2f})"


def _nbd(result: dict) -> list[Verdict]:
    made = []
    for place, where in (("disk", "image on the disk"), ("memory", "image in memory")):
        rows = result[place]["workloads"]
        for one, rows_of in (
            ("one connection, as QEMU uses", [row for row in rows if "connections" not in row["workload"]]),
            ("4 connections", [row for row in rows if "connections" in row["workload"]]),
        ):
            worst = min(rows_of, key=lambda row: row["ratio"]["median"])
            level = sum(row["ratio"]["median"] >= LEVEL for row in rows_of)
            made.append(
                Verdict(
                    "a",
                    f"NBD path, {where}, {one}: level with the better of qemu-nbd and nbdkit",
                    f"{level} of {len(rows_of)} workloads; least {_spread(worst['ratio'])}: {worst['workload']}",
                    level == len(rows_of),
                    command("a"),
                )
            )
    return made


def _replication(result: dict) -> list[Verdict]:
    rows = result["workloads"]
    worst = min(rows, key=lambda row: row["ratio"]["median"])
    level = sum(row["ratio"]["median"] >= LEVEL for row in rows)
    made = [
        Verdict(
            "b",
            f"replicated, pipelined over {result['rtt_ms']} ms: at least 0.95 of the path without",
            f"{level} of {len(rows)} workloads; least {_spread(worst['ratio'])}: {worst['workload']}",
            level == len(rows),
            command("b"),
        )
    ]
    halves = [row for row in rows if "half_load" in row]
    if halves:
        worst = min(halves, key=lambda row: row["half_load"]["ratio"]["median"])
        level = sum(row["half_load"]["ratio"]["median"] >= LEVEL for row in halves)
        made.append(
            Verdict(
                "b",
                "the workloads that are short of it, at half of the plain path's speed, where this machine has cores"
                " for both sites",
                f"{level} of {len(halves)}; least {_spread(worst['half_load']['ratio'])}: {worst['workload']}",
                level == len(halves),
                command("b"),
            )
        )
    return made


def _commits(result: dict) -> list[Verdict]:
    made = []
    full = result["full"]
    if full:
        ratio = full["pipelined_to_async"]
        made.append(
            Verdict(
                "c",
                f"PostgreSQL, commits per second with {full['clients']} clients over {full['rtt_ms']} ms: pipelined"
                " within 5 % of async",
                f"{_spread(ratio)}: {full['modes']['pipelined']['tps']['median']:,.0f} and "
                f"{full['modes']['async']['tps']['median']:,.0f}/s",
                ratio["median"] >= LEVEL,
                command("c"),
            )
        )
    if result["locked"]:
        best = {
            mode: max(cell["modes"][mode]["tps"]["median"] for cell in result["locked"])
            for mode in ("pipelined", "sync")
        }
        factor = best["pipelined"] / best["sync"]
        made.append(
            Verdict(
                "c",
                f"commits that lock one table, {result['locked'][0]['rtt_ms']} ms: at least 12 times sync",
                f"×{factor:.0f}: {best['pipelined']:,.0f} and {best['sync']:,.0f}/s, the greatest over all numbers of"
                " clients",
                factor >= SYNC_FACTOR,
                command("c"),
            )
        )
    return made


def _gate(result: dict) -> list[Verdict]:
    made = []
    for row in result["rows"]:
        if row["path"] != "routed":
            continue
        measured = f"{row['packets_per_s']['median']:,.0f} packets/s"
        if row["traffic"] != "unprotected":
            measured += f", {row['added_us']['median']:.0f} µs added"
        made.append(Verdict("d", f"gate, {row['traffic']} traffic", measured, None, command("d")))
    return made


def _memory(result: dict) -> list[Verdict]:
    names = next(iter(result["loads"].values()))["max_mib"]
    return [
        Verdict(
            "e",
            f"memory of {name} in {result['seconds']:.0f} s at full speed",
            ", ".join(f"{load['max_mib'][name]:,.0f} MiB ({what})" for what, load in result["loads"].items()),
            None,
            command("e"),
        )
        for name in names
    ]


def _work(result: dict) -> list[Verdict]:
    """Where there is more work than a round trip, joint pipelining costs nothing."""
    long = [point for point in result["points"] if point["work_ms"] > result["rtt_ms"]]
    words = _by_layout(
        long,
        lambda p: (
            f"{p['work_ms']:g} ms: {p['mean_ms']['joint']['median']:.0f} and {p['mean_ms']['async']['median']:.0f} ms"
        ),
    )
    target = "front tier's work longer than the round trip: reply times of joint and async"
    return [Verdict("f", target, words, None, command("f"))]


def _tiers(result: dict) -> list[Verdict]:
    """One round trip and 5 ms for joint pipelining, at least a round trip for each tier for sync."""
    rtt_ms, rows = result["rtt_ms"], result["rows"]

    def over(row: dict) -> float:
        return row["added_ms"]["pipelined"]["median"] - rtt_ms

    def trips(row: dict) -> float:
        return row["added_ms"]["sync"]["median"] / rtt_ms

    return [
        Verdict(
            "g",
            f"tiers protected: joint pipelining adds less than {JOINT_OVER_RTT_MS} ms to one RTT",
            _by_layout(rows, lambda row: f"{row['protected']}: {over(row):+.1f} ms"),
            max(map(over, rows)) < JOINT_OVER_RTT_MS,
            command("g"),
        ),
        Verdict(
            "g",
            "tiers protected: round trips that sync adds, at least one for each",
            _by_layout(rows, lambda row: f"{row['protected']}: {trips(row):.1f}"),
            all(trips(row) >= row["protected"] for row in rows),
            command("g"),
        ),
    ]


def _by_layout(rows: list[dict], words: Callable[[dict], str]) -> str:
    """What each row says, and behind those of a layout its name."""
    grouped = groupby(rows, itemgetter("layout"))
    return "; ".join(", ".join(map(words, its)) + f" ({layout})" for layout, its in grouped)


def _reads(result: dict) -> list[Verdict]:
    """What a read takes at the highest rate."""
    last = result["points"][-1]
    words = ", ".join(f"{mode} {figures['mean_ms']['median']:.0f} ms" for mode, figures in last["modes"].items())
    return [Verdict("h", f"reads beside {last['write_rate']} writes a second", words, None, command("h"))]


def _tags(result: dict) -> list[Verdict]:
    """Between two members. How many small datagrams pass has no target: it says what the work on the way costs."""
    worst, trip = max(
        ((row, trip) for row in result["rows"] for trip in row["added_us"]),
        key=lambda one: one[0]["added_us"][one[1]]["median"],
    )
    added = worst["added_us"][trip]
    levels = {rate: None if rate == "packets_per_s" else THROUGHPUT_LEVEL for rate in RATES}
    spread = f"{added['median']:.1f} µs ({added['low']:.1f} to {added['high']:.1f})"
    return [
        Verdict(
            "i",
            f"tags between two members, what a round trip takes longer: {TAGS_ADD_US} µs or less",
            f"most {spread}: {TRIPS[trip]}, {_where(worst)}",
            added["median"] <= TAGS_ADD_US,
            command("i"),
        ),
        *(
            verdict
            for what, is_covered in (("tags between two members", False), ("between two members, all covered", True))
            for verdict in _throughputs(
                "i", what, [row for row in result["rows"] if (row["guard"] == COVERED) == is_covered], levels
            )
        ),
    ]


def _covered(result: dict) -> list[Verdict]:
    """To the outside, beside the queue; through the queue is for comparison."""
    beside = [row for row in result["rows"] if row["guard"] != "queue"]
    what = "covered traffic to the outside, with kernel programs"
    return _throughputs("j", what, beside, dict.fromkeys(RATES, THROUGHPUT_LEVEL))


def _throughputs(part: str, what: str, rows: list[dict], levels: dict[str, float | None]) -> list[Verdict]:
    """Of guests on taps, as VMs are, and of those on veths, whose packets cost least by themselves."""
    verdicts = []
    for cable in reversed(CABLES.values()):
        there = [row for row in rows if row["cable"] == cable]
        for rate, level in levels.items():
            if there and all(rate in row["ratios"] for row in there):
                verdicts.append(_throughput(part, f"{what}, guests on {cable}", there, rate, level))
    return verdicts


def _throughput(part: str, what: str, rows: list[dict], rate: str, level: float | None) -> Verdict:
    """By the path that has most to lose."""
    worst = min(rows, key=lambda row: row["ratios"][rate]["median"])
    ratio = worst["ratios"][rate]
    wanted = f": at least {level} of that without" if level else ", of that without"
    return Verdict(
        part,
        f"{what}, {RATES[rate]}{wanted}",
        f"least ×{ratio['median']:.2f} ({ratio['low']:.2f} to {ratio['high']:.2f}): {_where(worst)}",
        ratio["median"] >= level if level else None,
        command(part),
    )


def _where(row: dict) -> str:
    return f"{row['path']}, {row['guard']}"


def _release(result: dict) -> list[Verdict]:
    """Decided in the release queue, and with the kernel's part."""

    def words(figure: str) -> str:
        return ", ".join(f"{row['stamp']} {row['figures'][figure]['median']:,.0f} ns" for row in result["rows"])

    held = f"release with {result['held_packets']:,} packets held, for each packet"
    return [
        Verdict(
            "k",
            f"{held}: the decision, C covers one after the other",
            words("release_one_by_one_ns"),
            None,
            command("k"),
        ),
        Verdict(
            "k",
            f"release with {result['held_by_kernel']:,} packets in the kernel's queue, for each: all at once",
            words("let_out_ns"),
            None,
            command("k"),
        ),
    ]


def _activity(result: dict) -> list[Verdict]:
    def verdict(row: dict, ratio: str, whose: str) -> Verdict:
        least = ACTIVITY_RATIO[row["share"]]
        return Verdict(
            "m",
            f"activity log on against off, {row['workload']}, {row['share']} of the disk{whose}: ×{least} or more",
            _spread(row[ratio]),
            row[ratio]["median"] >= least,
            command("m"),
        )

    smaller = ", a map for a quarter of it"
    return [verdict(row, "ratio", "") for row in result["rows"]] + [
        verdict(row, "ratio_small", smaller) for row in result["rows"] if row["share"] == "100 %"
    ]


def _history(result: dict) -> list[Verdict]:
    ingest, busy = result["ingest"]["ratio"], result["busy_fold"]

    def verdict(target: str, measured: str, reached: bool | None) -> Verdict:
        return Verdict("n", target, measured, reached, command("n"))

    def each(figure: str, unit: str, scale: float = 1) -> str:
        told = (f"{one['mib'] / 1024:g} GiB {one[figure]['p50'] / scale:,.1f} {unit}" for one in result["views"])
        return ", ".join(told)

    longest = result["views"][-1]
    more_us = longest["first_read_us"]["p50"] - longest["raw_read_us"]["p50"]

    def reads(peer: str) -> str:
        return ", ".join(f"{row['workload']} ×{row['ratio'][peer]['median']:.2f}" for row in result["reads"])

    rolled = ", ".join(
        f"{row['span_s']} s ({row['written_mib']:g} MiB) {row['seconds']['snapshot']['median']:.2f} s"
        for row in result["rolling"]
    )
    held = ", ".join(f"{one['mib'] / 1024:g} GiB {one['held_kib'] / 1024:.0f} MiB" for one in result["views"])
    return [
        verdict(
            f"ingest with index and window, of a plain append: at least {INGEST_RATIO}",
            _spread(ingest),
            ingest["median"] >= INGEST_RATIO,
        ),
        verdict(
            f"a view at a random instant opens in less than {OPEN_MS} ms, however long the journal",
            each("opened_us", "ms", 1e3),
            all(one["opened_us"]["p50"] < OPEN_MS * 1e3 for one in result["views"]),
        ),
        verdict(
            f"its first 4 KiB: less than {FIRST_READ_MORE_MS} ms more than from a raw file",
            f"{each('first_read_us', 'µs')}; raw {longest['raw_read_us']['p50']:.1f} µs",
            more_us < FIRST_READ_MORE_MS * 1e3,
        ),
        verdict("reads through a view, of a chain of qcow2 overlays of the same depth in time", reads("chain"), None),
        verdict("the same, of an image on btrfs with as many reflinked states", reads("reflink"), None),
        verdict("a snapshot is rolled by a span of a busy disk", rolled, None),
        verdict("memory of a group with so long a journal, all indexed", held, None),
        verdict(
            "folding keeps up with a guest that writes as fast as it can",
            f"{busy['fold_mib_per_s']} MiB/s folded while {busy['ingest_mib_per_s']} came; "
            f"{busy['waiting_mib']['at_the_end']} MiB waited at the end",
            busy["fold_mib_per_s"] >= FOLD_RATIO * busy["ingest_mib_per_s"],
        ),
        verdict(
            "folding, of the rate of a journal that nothing else bounds",
            ", ".join(f"{FOLDS[fold['name']]}: {_spread(fold['ratio'])}" for fold in result["folds"]),
            min(fold["ratio"]["median"] for fold in result["folds"]) >= 1,
        ),
    ]


def _reply(result: dict) -> list[Verdict]:
    """One client, and a wide area between the sites."""
    far = sorted((row for row in result["rows"] if row["rtt_ms"] > 0), key=lambda row: row["rtt_ms"])
    over = {row["rtt_ms"]: row["p50_ms"]["pipelined"]["median"] - row["rtt_ms"] for row in far}
    return [
        Verdict(
            "l",
            f"PostgreSQL, median reply time at low load: RTT + {REPLY_OVER_RTT_MS} ms or less",
            ", ".join(f"{rtt} ms + {more:.2f}" for rtt, more in over.items()),
            max(over.values()) <= REPLY_OVER_RTT_MS,
            command("l"),
        )
    ]


def _comeback(result: dict) -> list[Verdict]:
    killed, stopped = (result["restarts"][how] for how in ("killed", "stopped"))
    link, live = result["resync_of_link"], result["live_ratio"]
    return [
        Verdict(
            "o",
            "from a kill -9 of the daemon, which is started again, to the guest's next completed write",
            f"{killed['median']:.0f} ms ({killed['min']:.0f} to {killed['max']:.0f}); from a clean stop "
            f"{stopped['median']:.0f} ms",
            None,
            command("o"),
        ),
        Verdict(
            "o",
            f"resync, of what one TCP stream gets of the link: ×{RESYNC_OF_LINK} or more",
            _spread(link),
            link["median"] >= RESYNC_OF_LINK,
            command("o"),
        ),
        Verdict(
            "o",
            f"commits of another group beside a resync, of what they take without: ×{LIVE_RATIO} or less",
            _spread(live),
            live["median"] <= LIVE_RATIO,
            command("o"),
        ),
    ]


def _outage(result: dict) -> list[Verdict]:
    made = []
    for name, found in result["outages"].items():
        grown = {process: found["end_mib"][process] - found["half_mib"][process] for process in found["end_mib"]}
        told = ", ".join(
            f"{process} {found['half_mib'][process]:g} and {found['end_mib'][process]:g} MiB" for process in grown
        )
        made.append(
            Verdict(
                "p",
                f"memory at half and at the end of {found['seconds'] / 60:g} minutes of an outage; the group {name}",
                told,
                max(grown.values()) <= STEADY_MIB,
                command("p"),
            )
        )
    return made


def _switchover(result: dict) -> list[Verdict]:
    return [
        Verdict(
            "q",
            f"a planned switch {load}: how long the guest's disk and its clients wait",
            ", ".join(
                f"RTT {row['rtt_ms']:g} ms: {row['waited_ms']['guest']['median']:.0f} and "
                f"{row['waited_ms']['clients']['median']:.0f} ms"
                for row in result["rows"]
                if row["load"] == load
            ),
            None,
            command("q"),
        )
        for load in dict.fromkeys(row["load"] for row in result["rows"])
    ]


def _shards(result: dict) -> list[Verdict]:
    """Shard logs: the lag of each load, what shipping costs, and how soon everything is back."""

    def verdict(target: str, measured: str, reached: bool | None) -> Verdict:
        return Verdict("r", target, measured, reached, command("r"))

    rows = [row for row in result["synthetic"] if row["how"] == "together"]
    postgres, back = result["postgres"], {**result["comebacks"], "tidelockd": result["postgres"]["daemon_killed"]}
    fastest = max(postgres["rates"], key=lambda rate: rate["per_s"])
    promotion, snapshots = result["promotion"], result["snapshots"]
    return [
        verdict(
            f"mean lag of synthetic shards over half of {result['rtt_ms']} ms: {SHARD_LAG_MS} ms, however many",
            ", ".join(f"{row['shards']}: {row['mean_ms']['median']:.2f} ms" for row in rows),
            max(row["mean_ms"]["median"] for row in rows) <= SHARD_LAG_MS,
        ),
        verdict(
            f"mean lag of {postgres['shards']} PostgreSQL shards over that and a commit: {POSTGRES_LAG_MS} ms or less",
            ", ".join(
                f"{rate['per_s']} commits/s each: {rate['mean_ms']['median']:.2f} ms" for rate in postgres["rates"]
            ),
            fastest["mean_ms"]["median"] <= POSTGRES_LAG_MS,
        ),
        verdict(
            f"commits with shipping, of those without: ×{SHIPPED_RATIO} or more",
            f"{_spread(postgres['commits']['ratio'])}; in memory, where the cores bound both sites,"
            f" {_spread(postgres['commits_in_memory']['ratio'])}",
            postgres["commits"]["ratio"]["median"] >= SHIPPED_RATIO,
        ),
        verdict(
            f"lag steady again after a kill, from the start of the next process on: {BACK_S} s or less",
            ", ".join(f"{what}: {found['back_s']['median']:.2f} s" for what, found in back.items()),
            max(found["back_s"]["median"] for found in back.values()) <= BACK_S,
        ),
        verdict(
            f"a recovery, from the order to the final apply-to of all shards: {READY_MS} ms or less",
            f"{result['readiness']['ready_ms']['median']:.1f} ms",
            result["readiness"]["ready_ms"]["median"] <= READY_MS,
        ),
        verdict(
            "PostgreSQL: from the order of a recovery until all standbys are promoted and take writes",
            f"{promotion['answered_ms']['median']:.0f} ms",
            None,
        ),
        verdict(
            f"changes fetched from logical slots every {snapshots['every_s']} s instead: lag beyond a commit",
            f"{snapshots['mean_ms']:.0f} ms",
            None,
        ),
    ]
