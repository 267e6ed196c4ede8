"""What rounds found, and the report of a whole run."""

from __future__ import annotations

import json
import os
import platform
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

RULES = {
    1: "output commit: what clients were told is recovered",
    2: "prefix: what is recovered is a state that the guest's disk had",
    3: "no acknowledgement over a gap: what the backup has never falls",
    4: "one writer: the old primary is fenced",
    6: 'no false "in sync": what is called so is equal, byte for byte',
    8: "it comes back by itself",
    9: "killed at any moment, nothing acknowledged is lost",
    10: "bounded: the backlog stays below its limit",
}
"""Those that rounds check. 5 and 7 are about views of the past and drills on them."""


@dataclass
class Verdict:
    """What a round found."""

    kind: str
    seed: int
    faults: Counter[str] = field(default_factory=Counter)
    checks: Counter[int] = field(default_factory=Counter)
    """For each rule, how often it was checked."""
    violations: list[str] = field(default_factory=list)
    failure: str = ""
    """Why it did not come to its end, if so: then it shows nothing, good or bad, beyond what was checked before."""
    writes: int = 0
    """Guest writes that completed."""
    rows: int = 0
    """Rows that clients were told of."""
    seconds: float = 0

    def check(self, rule: int, held: bool, what: str) -> None:
        """Notes that a rule was checked."""
        assert rule in RULES
        self.checks[rule] += 1
        if not held:
            self.violations.append(f"rule {rule}: {what}")


@dataclass
class Report:
    """Written anew after each round, so that a run that is stopped has one, too."""

    out: Path
    seed: int
    began: float = field(default_factory=time.time)
    verdicts: list[Verdict] = field(default_factory=list)

    def add(self, verdict: Verdict) -> None:
        """Adds a round and writes both files."""
        self.verdicts.append(verdict)
        self.out.mkdir(parents=True, exist_ok=True)
        (self.out / "torture-report.json").write_text(json.dumps(self.as_json(), indent=2) + "\n")
        (self.out / "torture-report.md").write_text(self.as_text())

    @property
    def violated(self) -> list[Verdict]:
        """Rounds with violations."""
        return [verdict for verdict in self.verdicts if verdict.violations]

    @property
    def failed(self) -> list[Verdict]:
        """Rounds that did not come to their end."""
        return [verdict for verdict in self.verdicts if verdict.failure]

    def as_json(self) -> dict:
        """For programs."""
        return {"seed": self.seed, "began_unix": self.began, "rounds": [vars(v) for v in self.verdicts]}

    def as_text(self) -> str:
        """For people."""
        verdicts = self.verdicts
        kinds = Counter(verdict.kind for verdict in verdicts)
        faults = sum((verdict.faults for verdict in verdicts), Counter())
        checks = sum((verdict.checks for verdict in verdicts), Counter())
        when = time.strftime("%Y-%m-%d %H:%M", time.gmtime(self.began))
        minutes = sum(verdict.seconds for verdict in verdicts) / 60
        lines = [
            "# Torture",
            "",
            f"{when} UTC, Linux {platform.release()}, {os.cpu_count()} processors. Seeds {self.seed} to "
            f"{self.seed + len(verdicts) - 1}, {minutes:.0f} minutes: {len(verdicts)} rounds, "
            f"{sum(faults.values())} faults, **{sum(len(v.violations) for v in verdicts)} violations**, "
            f"{len(self.failed)} rounds that did not come to their end. "
            f"{sum(v.writes for v in verdicts):,} writes of the byte-exact guest completed, clients were told of "
            f"{sum(v.rows for v in verdicts):,} rows.",
            "",
            *_table("round", "rounds", sorted(kinds.items())),
            *_table("fault", "times", sorted(faults.items())),
            *_table("rule", "checks", [(f"{rule}: {RULES[rule]}", count) for rule, count in sorted(checks.items())]),
        ]
        for verdict in verdicts:
            texts = [*verdict.violations, *([f"not to its end: {verdict.failure}"] if verdict.failure else [])]
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


def _table(name: str, counted: str, rows: list[tuple[str, int]]) -> list[str]:
    return [f"| {name} | {counted} |", "|---|---|", *(f"| {what} | {count:,} |" for what, count in rows), ""]
