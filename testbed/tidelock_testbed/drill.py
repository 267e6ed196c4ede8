"""`make drill`: runs drills, says how they go, and reports what they found.

The exit status says whether each run kept the promise of its mode: 0 if so, 1 if not, 2 if the knobs are wrong, 130
after Ctrl-C. With TAGGING=off, and with WATERMARK=off, it is 0 if each run was seen to break it.

With several guests the disaster is, by the seed, `sudden`, or `rolling`: then ways to the backup are gone first. With
TAGGING=off it is always rolling.
"""

from __future__ import annotations

import argparse
import fcntl
import functools
import hashlib
import os
import platform
import random
import shlex
import shutil
import subprocess
import sys
import traceback
from pathlib import Path
from typing import IO

from .drilling import PROMISES, Drill, Entry, Knobs
from .fleet import BOUNDARIES, FORMS, HOSTS
from .paths import BIN, OUT, ROOT
from .progress import say
from .report import Report, overview, summary
from .run import Run
from .scenarios import SCENARIOS

SEEDS = 1_000_000
DEFAULT_MODE = "pipelined"


def main(words: list[str] | None = None) -> int:
    """Runs what the command line asks for."""
    options = parse(words)
    seed = random.randrange(SEEDS) if options.seed is None else options.seed
    report = Report(options.out / "drill-report.html", options.out / "drill-report.json")
    lock = alone()
    shutil.rmtree(OUT / "drill", ignore_errors=True)
    passed = 0
    for number in range(options.runs):
        knobs = Knobs(
            scenario=options.scenario,
            mode=options.mode,
            guest=options.guest,
            rtt_ms=options.rtt_ms,
            seed=seed + number,
            boundary=options.boundary,
            form=options.form,
            tagging=options.tagging == "on",
            watermark=options.watermark == "on",
            hurry=options.hurry,
        )
        say(f"run {number + 1} of {options.runs}: {knobs.scenario}, {knobs.mode}, seed {knobs.seed}")
        say(SCENARIOS[knobs.scenario].about)
        drill = perform(knobs, f"drill/{number + 1}")
        if drill is None:
            return 1
        report.add(drill)
        print(summary(drill.entry), flush=True)
        passed += drill.entry.passed
    lock.close()
    if options.runs > 1:
        print(overview(report.entries), flush=True)
    lost = sum(entry.lost for entry in report.entries if entry.passed)
    losses = f", with {lost} rows lost, which their promise allows" if lost else ""
    say(f"{passed} of {options.runs} passed{losses}: see {report.html}; each run's own file is in {report.kept}")
    without = [name for name, knob in (("tags", options.tagging), ("a watermark", options.watermark)) if knob == "off"]
    if not without:
        return 0 if passed == options.runs else 1
    violated = sum(entry.violated for entry in report.entries)
    must = "as it must" if violated == options.runs else "but it must in each"
    say(f"without {without[0]}, the promise was seen to break in {violated} of {options.runs}, {must}")
    return 0 if violated == options.runs else 1


def alone() -> IO[str]:
    """Waits until no other drill runs in this checkout: they would write the same files. Let go when closed."""
    OUT.mkdir(exist_ok=True)
    lock = (OUT / ".drill.lock").open("w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        say("another drill runs in this checkout: waiting for its end")
        fcntl.flock(lock, fcntl.LOCK_EX)
    return lock


def perform(knobs: Knobs, directory: str) -> Drill | None:
    """One run, from nothing to nothing. `None` if there could not even be two sites."""
    drill = None
    with Run(directory) as run:
        try:
            drill = SCENARIOS[knobs.scenario](run, knobs)
            drill.execute()
        except Exception as error:  # what went wrong is the run's result
            traceback.print_exc()
            say(f"this run failed; its logs are in {run.directory}")
            if drill is None:
                return None
            drill.entry.error = str(error)
            drill.entry.passed = False
        finally:
            if drill is not None:
                describe(drill.entry, run.directory)
    if drill.entry.passed:
        for large in ("primary", "backup", *HOSTS):
            shutil.rmtree(run.directory / large, ignore_errors=True)
    return drill


def describe(entry: Entry, directory: Path) -> None:
    """Notes where a run comes from."""
    entry.origin = origin()
    for ledger in sorted(directory.rglob("*ledger*")):
        if ledger.is_file():
            digest = hashlib.sha256(ledger.read_bytes()).hexdigest()
            entry.origin[f"SHA-256 of {ledger.relative_to(directory)}"] = digest
    for path in sorted([*directory.rglob("host*.toml"), *directory.rglob("backup*.toml")]):
        entry.configuration[str(path.relative_to(directory))] = path.read_text()


@functools.cache
def origin() -> dict[str, str]:
    """The commit, the command line and the versions of the programs."""

    def first_line(*argv: object) -> str:
        try:
            done = subprocess.run([str(word) for word in argv], capture_output=True, text=True, cwd=ROOT, timeout=30)
        except (OSError, subprocess.TimeoutExpired) as error:
            return f"not known: {error}"
        return (done.stdout or done.stderr).strip().splitlines()[0] if done.stdout or done.stderr else "not known"

    return {
        "commit": first_line("git", "describe", "--always", "--dirty", "--abbrev=40"),
        "command line": shlex.join(["python", "-m", "tidelock_testbed.drill", *sys.argv[1:]]),
        "tidelockd": first_line(BIN / "tidelockd", "--version"),
        "tidelock-backup": first_line(BIN / "tidelock-backup", "--version"),
        "QEMU": first_line("qemu-system-x86_64", "--version"),
        "kernel": f"{platform.system()} {platform.release()}",
    }


def parse(words: list[str] | None) -> argparse.Namespace:
    """The command line, checked."""
    parser = argparse.ArgumentParser(prog="make drill", description=__doc__)
    parser.add_argument("--scenario", default="primary-dies", help=f"SCENARIO: {', '.join(SCENARIOS)}")
    parser.add_argument("--mode", help=f"MODE: {', '.join(PROMISES)}; pipelined where the scenario has it")
    parser.add_argument("--guest", choices=["vm", "process"], help="GUEST; a VM where the scenario has one")
    parser.add_argument("--rtt-ms", type=float, help="RTT, in milliseconds: 50, with shards 25")
    parser.add_argument("--runs", type=int, default=1, help="RUNS: how many, each with the next seed")
    parser.add_argument("--seed", type=int, help="SEED of the first run; random if not given, and printed")
    parser.add_argument("--boundary", default="group", choices=BOUNDARIES, help="BOUNDARY, with several guests")
    parser.add_argument("--form", default="auto", choices=FORMS, help="FORM of tags, with several guests")
    parser.add_argument("--tagging", default="on", choices=["on", "off"], help="TAGGING, with several guests")
    parser.add_argument("--watermark", default="on", choices=["on", "off"], help="WATERMARK, with shards")
    parser.add_argument("--hurry", action="store_true", help="shorter leases and cuts, for the test suite")
    parser.add_argument("--out", type=Path, default=OUT, help="where the report goes")
    options = parser.parse_args(words)
    if options.scenario not in SCENARIOS:
        known = "\n".join(f"  {name:<15} {drill.about}" for name, drill in SCENARIOS.items())
        parser.error(f"there is no SCENARIO={options.scenario}; there is\n{known}")
    kind = SCENARIOS[options.scenario]
    modes = kind.modes
    options.mode = options.mode or (DEFAULT_MODE if DEFAULT_MODE in modes else modes[0])
    options.rtt_ms = kind.default_rtt_ms if options.rtt_ms is None else options.rtt_ms
    if options.mode not in modes:
        parser.error(f"MODE={options.mode} with SCENARIO={options.scenario}: use one of {', '.join(modes)}")
    guests = kind.guests
    options.guest = options.guest or guests[0]
    if options.guest not in guests:
        parser.error(f"GUEST={options.guest} with SCENARIO={options.scenario}: use {' or '.join(guests)}")
    several = sorted(name for name, drill in SCENARIOS.items() if drill.several_guests)
    if options.scenario not in several and (options.boundary, options.form, options.tagging) != ("group", "auto", "on"):
        parser.error(f"BOUNDARY, FORM and TAGGING are for several guests: use SCENARIO={' or '.join(several)}")
    if options.watermark == "off" and not kind.has_watermark:
        stores = sorted(name for name, drill in SCENARIOS.items() if drill.has_watermark)
        parser.error(f"WATERMARK is for shards of a store: use SCENARIO={' or '.join(stores)}")
    if options.boundary == "apart" and options.tagging == "off":
        parser.error("TAGGING=off with BOUNDARY=apart: groups of one guest have nobody to tag for")
    if options.runs < 1:
        parser.error("RUNS must be 1 or more")
    if not 0 <= options.rtt_ms <= 2000:
        parser.error("RTT must be from 0 to 2000 (milliseconds)")
    if os.geteuid() != 0:
        parser.error("the testbed makes network namespaces: run it as root")
    return options


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        say("stopped; everything that the run had made is gone again")
        sys.exit(130)
