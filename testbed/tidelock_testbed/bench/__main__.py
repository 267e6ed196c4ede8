"""`python -m tidelock_testbed.bench [--quick] [--only a,b,...]`; `... table` prints the summary for the README."""

from __future__ import annotations

import argparse
import sys
import time

from ..progress import say
from ..run import handle_signals
from . import (
    activity,
    comeback,
    commits,
    gate,
    history,
    memory,
    nbd,
    outage,
    reads,
    release,
    replication,
    reply,
    report,
    shards,
    switchover,
    tagging,
    tiers,
    work,
)
from .machine import busy, machine
from .servers import EXAMPLES
from .settings import Settings
from .targets import verdicts

MEASURES = {
    "a": nbd.measure,
    "b": replication.measure,
    "c": commits.measure,
    "d": gate.measure,
    "e": memory.measure,
    "f": work.measure,
    "g": tiers.measure,
    "h": reads.measure,
    "i": tagging.measure_members,
    "j": tagging.measure_outside,
    "k": release.measure,
    "l": reply.measure,
    "m": activity.measure,
    "n": history.measure,
    "o": comeback.measure,
    "p": outage.measure,
    "q": switchover.measure,
    "r": shards.measure,
}


OF_GROUPS = ("unreplicated", "gate-bench", "tagging-bench", "release-bench", "history-bench")
"""Programs of the parts that measure groups."""


def main(words: list[str] | None = None) -> int:
    """Measures, or prints what was measured."""
    parser = argparse.ArgumentParser(prog="make bench", description="measure speed against others, side by side")
    parser.add_argument("what", nargs="?", choices=["run", "table", "report"], default="run")
    parser.add_argument("--quick", action="store_true", help="short turns, results into out/bench-quick/")
    parser.add_argument("--only", default=",".join(MEASURES), help="parts, as in a,c (default: all)")
    options = parser.parse_args(words)
    settings = Settings.of(options.quick)
    if options.what == "table":
        print(report.table(settings.results), end="")
        return 0
    if options.what == "report":
        report.write(settings.results)
        return 0
    parts = options.only.split(",")
    unknown = [part for part in parts if part not in MEASURES]
    if unknown:
        parser.error(f"there is no part {', '.join(unknown)}: choose from {', '.join(MEASURES)}")
    for example in (*OF_GROUPS, "kv", "watermarks"):
        if not (EXAMPLES / example).exists():
            parser.error(f"{EXAMPLES / example} is not built: run `make bench`, which builds it")
    handle_signals()
    try:
        return measure(settings, parts)
    except KeyboardInterrupt:
        say("stopped: the parts before this one are kept")
        return 130


def measure(settings: Settings, parts: list[str]) -> int:
    """Each part's results are kept as soon as it is done; the page is written anew after each."""
    began = time.monotonic()
    about = machine()
    for part in parts:
        load = busy()
        say(f"({part}) {MEASURES[part].__module__.rpartition('.')[2]}; load of the machine before: {load:.1f}")
        report.save(settings.results, part, about, load, MEASURES[part](settings))
        report.write(settings.results)
    found = verdicts({part: whole["result"] for part, whole in report.load_all(settings.results).items()})
    say(f"measured in {(time.monotonic() - began) / 60:.0f} minutes: {settings.results / 'README.md'}")
    print(report.summary(found), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
