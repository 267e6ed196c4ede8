"""(g) Reply time with one, two and three tiers protected, as PipeCloud's figure 14; one client.

The tiers whose disks are not replicated write to the same server without a backup, and pass on what they hear.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace

from ..applications import THREE_TIER
from ..progress import say
from ..run import Run
from .application import LAYOUTS, BenchFleet, Replies, lay_out, turn
from .settings import Settings
from .spread import Spread

RTT_MS = 50
MODES = ("sync", "pipelined", "async")
INNERMOST_FIRST = tuple(reversed(THREE_TIER.databases))
APPLICATION = replace(THREE_TIER, work_ms={})


def measure(settings: Settings) -> dict:
    """One layout after the other."""
    rows = [row for layout in LAYOUTS for row in summarise(layout, measure_layout(settings, layout))]
    return {"rtt_ms": RTT_MS, "rows": rows}


def measure_layout(settings: Settings, layout: str) -> dict[tuple[int, str], list[Replies]]:
    """One, two and three protected tiers at once, in sites of their own: their turns stand beside each other."""
    with ExitStack() as stack:
        fleets = {}
        for count in range(1, len(INNERMOST_FIRST) + 1):
            run = stack.enter_context(Run(f"bench-tiers-{count}"))
            unprotected = frozenset(INNERMOST_FIRST[count:])
            fleets[count] = BenchFleet(run, lay_out(layout, APPLICATION, RTT_MS, unprotected=unprotected))
            fleets[count].start()
        say(f"(g) three tiers on {layout} are ready, three times")
        turns: dict[tuple[int, str], list[Replies]] = {(count, mode): [] for count in fleets for mode in MODES}
        for _ in range(settings.application_rounds):
            for count, mode in turns:
                turns[count, mode].append(turn(fleets[count], mode, settings.application_s))
        return turns


def summarise(layout: str, turns: dict[tuple[int, str], list[Replies]]) -> list[dict]:
    """Mean reply times by protected tiers and mode; what a mode adds is the difference to async in the same round."""
    rows = []
    for count in sorted({count for count, _ in turns}):
        plain = [one.mean_ms for one in turns[count, "async"]]
        row: dict = {"layout": layout, "protected": count, "mean_ms": {}, "added_ms": {}}
        for mode in MODES:
            means = [one.mean_ms for one in turns[count, mode]]
            row["mean_ms"][mode] = Spread.of(means).json()
            added = [mean - base for mean, base in zip(means, plain, strict=True)]
            row["added_ms"][mode] = Spread.of(added).json()
        row["tagged"] = Spread.of([one.tagged for one in turns[count, "pipelined"]]).json()
        say(f"(g) {count} protected: " + ", ".join(f"{m} {row['mean_ms'][m]['median']:.1f} ms" for m in MODES))
        rows.append(row)
    return rows
