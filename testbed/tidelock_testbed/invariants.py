"""What must hold across the databases of an application after a recovery: nothing that a client was told is missing in
any of them, and no row names, or was written after, a row that is not there.

Invariant: the judgement comes from the clients' ledger and from rows that were read out of the recovered databases.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .applications import Application
from .ledger import Ledger, Row, Verdict, compare

Rows = dict[Row, Row | None]
"""The rows of a database, each with the row that it refers to."""


@dataclass(frozen=True)
class Dangling:
    """A row whose cause is missing."""

    database: str
    row: Row
    missing_in: str
    missing: Row

    def __str__(self) -> str:
        return f"row {self.row} of {self.database} depends on row {self.missing} of {self.missing_in}"


@dataclass(frozen=True)
class Findings:
    """What the databases of an application, the ledger and each other say."""

    verdicts: dict[str, Verdict]
    """For each database."""
    dangling: list[Dangling]

    def lost(self) -> set[Row]:
        """Rows that a client was told of and that are missing in one database at least."""
        return {row for verdict in self.verdicts.values() for row in verdict.lost}


def examine(
    application: Application,
    databases: dict[str, Rows],
    ledger: Ledger,
    disaster_at: float,
    judged: Callable[[Row], bool] = lambda row: True,
) -> Findings:
    """Compares the recovered databases with the clients' ledger and with each other.

    Only rows that are `judged` must have what they depend on: others may be under way while the databases are read
    one after the other.
    """
    if set(databases) != set(application.databases):
        raise ValueError(f"{application.name} has {application.databases}, not {list(databases)}")
    verdicts = {name: compare(ledger, set(filter(judged, rows)), disaster_at) for name, rows in databases.items()}
    dangling = [one for one in dangling_rows(application, databases) if judged(one.row)]
    return Findings(verdicts, dangling)


def told_and_missing(
    application: Application, databases: dict[str, Rows], pages: Ledger, before: float
) -> list[tuple[str, Row]]:
    """Rows that a page told a client of before this time, and that are not there."""
    told = [(application.tells[number], row) for (number, row), at in pages.told.items() if at < before]
    return sorted((name, row) for name, row in told if row not in databases[name])


def dangling_rows(application: Application, databases: dict[str, Rows]) -> list[Dangling]:
    """Every row whose cause is missing: the row that it names, or the same row where it was written first."""
    found = []
    for name, other in application.refers.items():
        for row, refers in databases[name].items():
            if refers is not None and refers not in databases[other]:
                found.append(Dangling(name, row, other, refers))
    for name, first in application.follows.items():
        found += [Dangling(name, row, first, row) for row in databases[name] if row not in databases[first]]
    return sorted(found, key=lambda one: (one.database, one.row))
