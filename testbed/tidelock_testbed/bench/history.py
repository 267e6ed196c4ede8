"""(n) What the past costs: ingest with index and window, views of long journals, reads through them, rolling, folding.

The first half is the backup's own benchmark, in one process. The second half is two sites with a busy disk, whose past
is shown beside what else can show one (`travels.py`), and two whose backup keeps none of it (`folding.py`).
"""

from __future__ import annotations

import os
import shutil

from ..progress import say
from ..run import Run
from . import folding, travels
from .images import disk_directory
from .servers import run_example
from .settings import Settings
from .spread import Spread, percentile, ratio

EXAMPLE_S = 3600
SPARSE = 2
"""Of a journal for which the disk has no room with all payloads, one record in so many has one."""
INDEXED = 1.15
"""A journal with its indexes and maps, of a journal: at most."""
SPARE_MIB = 4096


def measure(settings: Settings) -> dict:
    """Both halves."""
    with Run("bench-history") as run:
        found = _own(run, settings) | travels.measure(run, settings)
    return found | {"busy_fold": folding.measure(settings)}


def _own(run: Run, settings: Settings) -> dict:
    directory = disk_directory(run)
    room_mib = (shutil.disk_usage(directory).free >> 20) - SPARE_MIB
    # "10240" has a payload in every record, "51200/4" in one of four. Each journal is removed before the next.
    whole = [f"{mib}" for mib in settings.journals_mib if mib * INDEXED < room_mib]
    sparse = [
        f"{mib}/{SPARSE}"
        for mib in settings.journals_mib
        if mib * INDEXED >= room_mib > mib * (INDEXED - 1 + 1 / SPARSE)
    ]
    say(f"(n) journals of {', '.join(whole + sparse)} MiB")
    words = (directory, settings.history_rounds, settings.history_turn_mib, *whole, *sparse)
    found = run_example("history-bench", *words, timeout_s=EXAMPLE_S)
    shutil.rmtree(directory)
    # What was removed is done with before anything else is measured.
    os.sync()
    ingest = found["ingest"]
    return {
        "turn_mib": found["turn_mib"],
        "ingest": {
            "plain_mib_per_s": Spread.of(ingest["plain_mib_per_s"]).json(),
            "window_mib_per_s": Spread.of(ingest["window_mib_per_s"]).json(),
            "without_indexes_mib_per_s": Spread.of(ingest["without_indexes_mib_per_s"]).json(),
            "ratio": ratio(ingest["window_mib_per_s"], ingest["plain_mib_per_s"]).json(),
            "without_indexes_ratio": ratio(ingest["without_indexes_mib_per_s"], ingest["plain_mib_per_s"]).json(),
        },
        "folds": [_fold(one) for one in found["folds"]],
        "views": [_views(one) for one in found["views"]],
        "left_out_mib": settings.journals_mib[len(whole) + len(sparse) :],
    }


def _fold(one: dict) -> dict:
    """One image's."""
    return {
        "name": one["name"],
        "ingest_mib_per_s": Spread.of(one["ingest_mib_per_s"]).json(),
        "fold_mib_per_s": Spread.of(one["fold_mib_per_s"]).json(),
        "ratio": ratio(one["fold_mib_per_s"], one["ingest_mib_per_s"]).json(),
        "write_amplification": round(one["write_amplification"], 3),
        "written_of_all": round(one["written_of_all"], 3),
    }


def _views(one: dict) -> dict:
    """One journal's."""
    names = ("mib", "one_in", "records", "segments", "disk_bytes", "formula_bytes", "held_kib", "views", "views_kib")
    told = {name: one[name] for name in names}
    steps = zip(one["take_us"], one["resolve_us"], one["open_us"], strict=True)
    times = {"opened": [sum(step) for step in steps], "resolved": one["resolve_us"]}
    times |= {
        "first_read": one["first_read_us"],
        "later_read": one["later_reads_us"],
        "raw_read": one["raw_first_read_us"],
    }
    for name, values in times.items():
        told[f"{name}_us"] = {f"p{percent}": round(percentile(values, percent), 1) for percent in (50, 99)}
    say(
        f"(n) {told['mib'] / 1024:g} GiB: a view opens in {told['opened_us']['p50'] / 1e3:.1f} ms "
        f"(99 %: {told['opened_us']['p99'] / 1e3:.1f}), first read {told['first_read_us']['p50']:.0f} µs"
    )
    return told
