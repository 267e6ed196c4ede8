"""`make torture`: random faults on real processes, round after round, and a report.

With --sum the reports of runs before are added up instead, and none is made.

The exit status is 0 if no rule was seen to break and every round came to its end, 1 if not, 2 if the knobs are wrong,
130 after Ctrl-C.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import shutil
import sys
import time
import traceback
from pathlib import Path

from ..drill import alone
from ..paths import OUT
from ..progress import say
from ..run import Run
from .client_round import ClientRound
from .disk_round import DiskRound
from .failback_round import FailbackRound
from .verdict import Report, Unjudged, Verdict, again

SEEDS = 1_000_000
ROUNDS_OF_SEEDS = ("vm", "disk", "process", "failback", "postgres", "disk", "process", "failback", "postgres", "disk")
"""What a round is, by the last digit of its seed."""
UNITS = {"s": 1, "m": 60, "h": 3600}


def main(words: list[str] | None = None) -> int:
    """Runs what the command line asks for."""
    options = parse(words)
    if options.sum:
        return add_up(options.sum, options.out)
    seed = random.randrange(SEEDS) if options.seed is None else options.seed
    report = Report(options.out, seed)
    lock = alone()
    shutil.rmtree(OUT / "torture", ignore_errors=True)
    end = time.monotonic() + options.time
    number = 0
    while number < options.rounds if options.rounds else time.monotonic() < end:
        say(f"round {number + 1}, seed {seed + number}")
        verdict = perform(seed + number, options.vms)
        report.add(verdict)
        number += 1
        for violation in verdict.violations:
            say(f"VIOLATED: {violation.splitlines()[0]}")
        if verdict.failure:
            say(f"not to its end: {verdict.failure.splitlines()[0]}")
        if verdict.unjudged:
            say(f"not judged: {verdict.unjudged}")
        if verdict.violations or verdict.failure:
            say(f"the round's logs are kept; again: {again(verdict)}")
    lock.close()
    print(report.as_text(), flush=True)
    found = f"{len(report.violated)} with violations, {len(report.failed)} not to their end"
    found += f", {len(report.unjudged)} not judged"
    say(f"{number} rounds, {found}: see {report.out / 'torture-report.md'}")
    return report.status


def add_up(files: list[Path], out: Path) -> int:
    """One report of many; what was counted twice would be a mistake, and is refused."""
    try:
        report = Report.sum_of(files, out)
    except (OSError, ValueError, KeyError, TypeError) as error:
        print(f"torture: cannot add up: {error}", file=sys.stderr)
        return 2
    report.write()
    print(report.as_text(), flush=True)
    return report.status


DISKS = {"disk": DiskRound, "failback": FailbackRound}


def kind_of(seed: int, vms: bool) -> str:
    """What a round is."""
    kind = ROUNDS_OF_SEEDS[seed % len(ROUNDS_OF_SEEDS)]
    return "postgres" if kind == "vm" and not vms else kind


def perform(seed: int, vms: bool = True) -> Verdict:
    """One round, from nothing to nothing."""
    began = time.monotonic()
    kind = kind_of(seed, vms)
    with Run(f"torture/{seed}", keep=False) as run:
        verdict = Verdict(kind, seed)
        try:
            this = DISKS[kind](run, seed) if kind in DISKS else ClientRound(run, seed, kind)
            verdict = this.verdict
            this.execute()
        except Unjudged as error:
            verdict.unjudged = str(error)
        except Exception as error:  # what went wrong is the round's result
            traceback.print_exc()
            verdict.failure = str(error) or type(error).__name__
        run.keep = bool(verdict.violations or verdict.failure)
        verdict.seconds = round(time.monotonic() - began, 1)
    return verdict


def parse(words: list[str] | None) -> argparse.Namespace:
    """The command line, checked."""
    parser = argparse.ArgumentParser(prog="make torture", description=__doc__)
    parser.add_argument("--time", type=seconds, default=300, help="TIME: how long, such as 90s, 5m (the default), 2h")
    parser.add_argument("--rounds", type=int, default=0, help="ROUNDS: so many, in place of TIME")
    parser.add_argument("--seed", type=int, help="SEED of the first round; random if not given, and printed")
    parser.add_argument("--no-vms", dest="vms", action="store_false", help="no round with virtual machines")
    parser.add_argument("--sum", type=Path, nargs="+", metavar="FILE", help="add up these torture-report.json")
    parser.add_argument("--out", type=Path, default=OUT, help="where the report goes")
    options = parser.parse_args(words)
    if options.rounds < 0:
        parser.error("ROUNDS must be 1 or more")
    if not options.sum and os.geteuid() != 0:
        parser.error("the testbed makes network namespaces: run it as root")
    return options


def seconds(text: str) -> float:
    """A time with its unit."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smh])", text)
    if not found:
        raise argparse.ArgumentTypeError(f'TIME={text}: write a number and s, m or h, such as "90s" or "2h"')
    return float(found[1]) * UNITS[found[2]]


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        say("stopped; everything that the run had made is gone again")
        sys.exit(130)
