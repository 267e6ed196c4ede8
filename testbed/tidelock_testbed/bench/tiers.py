"""(g) Reply time with one, two and three tiers protected, as PipeCloud's figure 14; one client.

The tiers whose disks are not replicated write to the same server without a backup, and pass on what they hear.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace

from ..applications import THREE_TIER
from ..fleet import Shape
from ..progress import say
from ..run import Run
from .application import BenchFleet, Replies, turn
from .settings import Settings
from .spread import Spread

RTT_MS = 50
MODES = ("sync", "pipelined", "async")
INNERMOST_FIRST = tuple(reversed(THREE_TIER.databases))
APPLICATION = replace(THREE_TIER, work_ms={})


def measure(settings: Settings) -> dict:
    """One, two and three protected tiers at once, in sites of their own: their turns stand beside each other."""
    with ExitStack() as stack:
        fleets = {}
        for count in range(1, len(INNERMOST_FIRST) + 1):
            run = stack.enter_context(Run(f"bench-tiers-{count}"))
            fleets[count] = BenchFleet(run, shape(count))
            fleets[count].start()
        say("(g) three tiers are ready, three times")
        turns: dict[tuple[int, str], list[Replies]] = {(count, mode): [] for count in fleets for mode in MODES}
        for _ in range(settings.application_rounds):
            for count, mode in turns:
                turns[count, mode].append(turn(fleets[count], mode, settings.application_s))
    return summarise(turns)


def shape(count: int) -> Shape:
    """The innermost `count` tiers protected."""
    hosts = dict.fromkeys(THREE_TIER.databases, 0)
    return Shape(APPLICATION, hosts, (RTT_MS,), unprotected=frozenset(INNERMOST_FIRST[count:]))


def summarise(turns: dict[tuple[int, str], list[Replies]]) -> dict:
    """Mean reply times by protected tiers and mode; what a mode adds is the difference to async in the same round."""
    rows = []
    for count in sorted({count for count, _ in turns}):
        plain = [one.mean_ms for one in turns[count, "async"]]
        row: dict = {"protected": count, "mean_ms": {}, "added_ms": {}}
        for mode in MODES:
            means = [one.mean_ms for one in turns[count, mode]]
            row["mean_ms"][mode] = Spread.of(means).json()
            added = [mean - base for mean, base in zip(means, plain, strict=True)]
            row["added_ms"][mode] = Spread.of(added).json()
        say(f"(g) {count} protected: " + ", ".join(f"{m} {row['mean_ms'][m]['median']:.1f} ms" for m in MODES))
        rows.append(row)
    return {"rtt_ms": RTT_MS, "rows": rows}
