"""What rounds found, and the report of a whole run."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from ..paths import ROOT

RULES = {
    1: "output commit: what clients were told is recovered",
    2: "prefix: what is recovered is a state that the guest's disk had",
    3: "no acknowledgement over a gap: what the backup has never falls",
    4: "one writer: the old primary is fenced",
    5: "point in time: a view of the past is what it was, byte for byte",
    6: 'no false "in sync": what is called so is equal, byte for byte',
    7: "a drill changes nothing, and replication does not pause for it",
    8: "it comes back by itself",
    9: "killed at any moment, nothing acknowledged is lost",
    10: "bounded: the backlog stays below its limit",
}
"""Which kind of round checks which of them is in docs/torture.md."""


class Unjudged(Exception):
    """A round came to its end and shows nothing, good or bad: it had too little to judge."""


@dataclass
class Verdict:
    """What a round found."""

    kind: str
    seed: int
    faults: Counter[str] = field(default_factory=Counter)
    bites: Counter[str] = field(default_factory=Counter)
    """How many of the faults were met by anything."""
    checks: Counter[int] = field(default_factory=Counter)
    """For each rule, how often it was checked."""
    violations: list[str] = field(default_factory=list)
    failure: str = ""
    """Why it did not come to its end, if so: then it shows nothing, good or bad, beyond what was checked before."""
    unjudged: str = ""
    """Why it came to its end and shows nothing beyond what was checked, if so."""
    writes: int = 0
    """Guest writes that completed."""
    rows: int = 0
    """Rows that clients were told of."""
    seconds: float = 0

    @classmethod
    def from_json(cls, read: dict) -> Verdict:
        """As a report has it."""
        faults, bites = Counter(read["faults"]), Counter(read.get("bites", {}))
        # JSON has no numbers for keys.
        checks = Counter({int(rule): count for rule, count in read["checks"].items()})
        return cls(**{**read, "faults": faults, "bites": bites, "checks": checks})

    def bitten(self, fault: str) -> None:
        """Notes a fault that nobody can fail to meet."""
        self.faults[fault] += 1
        self.bites[fault] += 1

    def check(self, rule: int, held: bool, what: str) -> None:
        """Notes that a rule was checked."""
        assert rule in RULES
        self.checks[rule] += 1
        if not held:
            self.violations.append(f"rule {rule}: {what}")


@dataclass(frozen=True)
class Part:
    """One run, on one machine."""

    seed: int
    """Of its first round."""
    began_unix: float
    rounds: int
    machine: str
    commit: str = ""
    """Of the checkout that it ran in; what was changed there since is told."""

    def as_text(self) -> str:
        """For people."""
        when = time.strftime("%Y-%m-%d %H:%M", time.gmtime(self.began_unix))
        commit = f"commit {self.commit}" if self.commit else "commit unknown"
        return f"{when} UTC, {commit}, {self.machine}, seeds {self.seed} to {self.seed + self.rounds - 1}"


def this_commit() -> str:
    """What is run: the checkout's commit, and whether files differ from it."""

    def git(*words: str) -> str:
        return subprocess.run(["git", "-C", ROOT, *words], capture_output=True, text=True, check=True).stdout.strip()

    try:
        commit = git("rev-parse", "HEAD")[:12]
        return commit + (" with changes" if git("status", "--porcelain") else "")
    except (OSError, subprocess.CalledProcessError):  # not a checkout
        return ""


def this_machine() -> str:
    """What a run is made on."""
    return f"Linux {platform.release()}, {os.cpu_count()} processors"


@dataclass
class Report:
    """Written anew after each round, so that a run that is stopped has one, too."""

    out: Path
    seed: int
    began: float = field(default_factory=time.time)
    verdicts: list[Verdict] = field(default_factory=list)
    parts: list[Part] = field(default_factory=list)
    """Of a sum: the runs that it is of."""
    commit: str = field(default_factory=this_commit)
    """As it is when the run begins."""

    @classmethod
    def sum_of(cls, files: list[Path], out: Path) -> Report:
        """Many reports as one, in the order in which they began. No run may be counted twice."""
        parts: list[Part] = []
        rounds: dict[Part, list[Verdict]] = {}
        for file in files:
            read = json.loads(file.read_text())
            verdicts = [Verdict.from_json(one) for one in read["rounds"]]
            for part in read["parts"]:
                if part["began_unix"] in {known.began_unix for known in parts}:
                    raise ValueError(f"{file}: the run of {part['began_unix']} is in another file, too")
                this = Part(**part)
                parts.append(this)
                rounds[this], verdicts = verdicts[: this.rounds], verdicts[this.rounds :]
            if verdicts:
                raise ValueError(f"{file}: {len(verdicts)} rounds are of no run")
        parts.sort(key=lambda part: part.began_unix)
        if not parts:
            raise ValueError("there is no run in them")
        return cls(out, parts[0].seed, parts[0].began_unix, [v for part in parts for v in rounds[part]], parts)

    def add(self, verdict: Verdict) -> None:
        """Adds a round and writes both files."""
        self.verdicts.append(verdict)
        self.write()

    def write(self) -> None:
        """Writes both files."""
        self.out.mkdir(parents=True, exist_ok=True)
        (self.out / "torture-report.json").write_text(json.dumps(self.as_json(), indent=2) + "\n")
        (self.out / "torture-report.md").write_text(self.as_text())

    @property
    def runs(self) -> list[Part]:
        """The runs that it is of; before it is a sum, one."""
        return self.parts or [Part(self.seed, self.began, len(self.verdicts), this_machine(), self.commit)]

    @property
    def status(self) -> int:
        """The exit status that it is worth. A round that could not be judged is shown, and is no failure."""
        return 1 if self.violated or self.failed else 0

    @property
    def violated(self) -> list[Verdict]:
        """Rounds with violations."""
        return [verdict for verdict in self.verdicts if verdict.violations]

    @property
    def failed(self) -> list[Verdict]:
        """Rounds that did not come to their end."""
        return [verdict for verdict in self.verdicts if verdict.failure]

    @property
    def unjudged(self) -> list[Verdict]:
        """Rounds that came to their end and had too little to judge."""
        return [verdict for verdict in self.verdicts if verdict.unjudged]

    def as_json(self) -> dict:
        """For programs."""
        parts = [vars(part) for part in self.runs]
        return {
            "seed": self.seed,
            "began_unix": self.began,
            "parts": parts,
            "rounds": [vars(verdict) for verdict in self.verdicts],
        }

    def as_text(self) -> str:
        """For people."""
        verdicts = self.verdicts
        kinds = Counter(verdict.kind for verdict in verdicts)
        faults = sum((verdict.faults for verdict in verdicts), Counter())
        bites = sum((verdict.bites for verdict in verdicts), Counter())
        checks = sum((verdict.checks for verdict in verdicts), Counter())
        minutes = sum(verdict.seconds for verdict in verdicts) / 60
        lines = [
            "# Torture",
            "",
            *(f"{part.as_text()}\n" for part in self.runs),
            f"{minutes:.0f} minutes in {len(self.runs)} {'run' if len(self.runs) == 1 else 'runs'}: "
            f"{len(verdicts)} rounds, "
            f"{sum(faults.values())} faults, **{sum(len(v.violations) for v in verdicts)} violations**, "
            f"{len(self.failed)} rounds that did not come to their end, {len(self.unjudged)} that could not be judged. "
            f"{sum(v.writes for v in verdicts):,} writes of the byte-exact guest completed, clients were told of "
            f"{sum(v.rows for v in verdicts):,} rows.",
            "",
            *_table(("round", "rounds"), sorted(kinds.items())),
            *_table(("fault", "times", "seen to bite"), [(f, n, bites[f]) for f, n in sorted(faults.items())]),
            *_table(
                ("rule", "checks", "rounds that checked it"),
                [
                    (f"{rule}: {RULES[rule]}", count, sum(rule in verdict.checks for verdict in verdicts))
                    for rule, count in sorted(checks.items())
                ],
            ),
        ]
        for verdict in verdicts:
            texts = list(verdict.violations)
            texts += [f"not to its end: {verdict.failure}"] if verdict.failure else []
            texts += [f"not judged: {verdict.unjudged}"] if verdict.unjudged else []
            if not texts:
                continue
            lines += [f"## Seed {verdict.seed}, {verdict.kind}", ""]
            for text in texts:
                first, *more = text.splitlines()
                lines += [f"- {first}", *(f"      {line}" for line in more)]
            lines += ["", f"Again: `{again(verdict)}`", ""]
        return "\n".join(lines)


def again(verdict: Verdict) -> str:
    """The command that runs a round again."""
    return f"make torture ROUNDS=1 SEED={verdict.seed}"


def _table(heads: tuple[str, ...], rows: list[tuple]) -> list[str]:
    lines = [f"| {what} | {' | '.join(f'{count:,}' for count in counts)} |" for what, *counts in rows]
    return [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|", *lines, ""]
