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

    @classmethod
    def from_json(cls, read: dict) -> Verdict:
        """As a report has it."""
        faults = Counter(read["faults"])
        # JSON has no numbers for keys.
        checks = Counter({int(rule): count for rule, count in read["checks"].items()})
        return cls(**{**read, "faults": faults, "checks": checks})

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

    def as_text(self) -> str:
        """For people."""
        when = time.strftime("%Y-%m-%d %H:%M", time.gmtime(self.began_unix))
        return f"{when} UTC, {self.machine}, seeds {self.seed} to {self.seed + self.rounds - 1}"


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
        return self.parts or [Part(self.seed, self.began, len(self.verdicts), this_machine())]

    @property
    def status(self) -> int:
        """The exit status that it is worth."""
        return 1 if self.violated or self.failed else 0

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
        checks = sum((verdict.checks for verdict in verdicts), Counter())
        minutes = sum(verdict.seconds for verdict in verdicts) / 60
        lines = [
            "# Torture",
            "",
            *(f"{part.as_text()}\n" for part in self.runs),
            f"{minutes:.0f} minutes in {len(self.runs)} {'run' if len(self.runs) == 1 else 'runs'}: "
            f"{len(verdicts)} rounds, "
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
