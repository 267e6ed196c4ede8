"""Row by row, when the backup had what a client was told of.

A row's place in the journal is that of the record with which the database would find the row after a crash. The moment
at which the backup had that record lies between two samples of its cut (`backupwatch.py`). A client was told too early
if the server, asked after that, answered that it did not have the record yet. So sampling may miss a reply that was
early by less than an interval, and reports none that was not early.
"""

from __future__ import annotations

import csv
import math
import statistics
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from .backupwatch import Cuts
from .ledger import Ledger, Row
from .rowblock import BLOCK, MAGIC, checksum, decode, place_of
from .wal import Write

MARK = MAGIC.to_bytes(4, "little")


def rowstore_seqs(writes: Iterable[Write]) -> dict[Row, int]:
    """The seq with which the row store's blocks, up to the one that has a row, are all there: for each row."""
    return {row[:2]: seq for seq, rows in _rowstore_commits(writes) for row in rows}


def _rowstore_commits(writes: Iterable[Write]) -> Iterator[tuple[int, list]]:
    waiting: dict[tuple[int, int], bytes] = {}
    following = (1, 0)
    for write in writes:
        for at in range(0, len(write.data) - BLOCK + 1, BLOCK):
            if write.data[at : at + len(MARK)] == MARK:
                block = bytes(write.data[at : at + BLOCK])
                if (place := place_of(block)) is not None:
                    waiting.setdefault(place, block)
        while (block := waiting.pop(following, None)) is not None:
            yield write.seq, decode(block, *following)
            following = (following[0] + 1, checksum(block))


@dataclass(frozen=True)
class MeasuredRow:
    """The measured times of a row in one database."""

    row: Row
    sent: float
    told: float | None
    """When a client was told of it first, if one was."""
    seq: int | None
    """The seq of the record with which it is whole, if that was found."""
    not_before: float = -math.inf
    by: float = math.inf
    """When the backup had it: between these."""

    @property
    def is_measured(self) -> bool:
        """Whether the backup was seen to have it."""
        return self.by < math.inf

    @property
    def was_told_first(self) -> bool:
        """Whether the backup was asked after a client was told, and had it not."""
        return self.told is not None and self.seq is not None and self.told < self.not_before


def told_first(rows: Iterable[MeasuredRow]) -> int:
    """How many of them a client was told of before the backup had them."""
    return sum(row.was_told_first for row in rows)


@dataclass(frozen=True)
class Durability:
    """All rows of a database that were asked for before the disaster."""

    rows: list[MeasuredRow]
    not_found: str = "no record of the journal has them"
    """Why a row has no seq."""

    @property
    def durable_at(self) -> list[float]:
        """When the backup had each row at the latest, ascending."""
        return sorted(row.by for row in self.rows if row.is_measured)

    def told(self, waited: Callable[[float], bool] = lambda at: True) -> list[MeasuredRow]:
        """The rows that clients were told of, those at times for which `waited` is true."""
        return [row for row in self.rows if row.told is not None and waited(row.told)]

    def summary(self) -> dict:
        """Its figures."""
        told = self.told()
        measured = [row for row in told if row.is_measured]
        figures = {
            "told": len(told),
            "measured": len(measured),
            "told_first": told_first(told),
            "in_one_sample": sum(not row.was_told_first and row.told < row.by for row in measured),
        }
        unfound = sum(row.seq is None for row in told)
        unseen = sum(row.seq is not None and not row.is_measured for row in told)
        reasons = {self.not_found: unfound, "no sample shows that the backup had them": unseen}
        figures["not_measured"] = {reason: count for reason, count in reasons.items() if count}
        if measured:
            waits = sorted((row.told - row.by) * 1e3 for row in measured)
            waits_ms = {"least": waits[0], "median": statistics.median(waits), "most": waits[-1]}
            figures["told_after_ms"] = {name: round(value, 1) for name, value in waits_ms.items()}
        return figures


def measure(
    ledger: Ledger, told: dict[Row, float], seqs: dict[Row, int], cuts: Cuts, not_found: str = Durability.not_found
) -> Durability:
    """Puts together when each row of a ledger was sent and told, and when the backup had it."""
    rows = []
    for row, sent in ledger.sent.items():
        seq = seqs.get(row)
        moment = (-math.inf, math.inf) if seq is None else cuts.moment(seq)
        rows.append(MeasuredRow(row, sent, told.get(row), seq, *moment))
    return Durability(rows, not_found)


def write_rows(path: Path, databases: dict[str, Durability]) -> None:
    """A line for each row of each database, ascending by the time at which it was asked for."""
    with path.open("w", newline="") as file:
        lines = csv.writer(file)
        lines.writerow(["database", "client", "n", "sent", "told", "seq", "not_durable_before", "durable_at"])
        for name, durability in databases.items():
            for one in sorted(durability.rows, key=lambda one: one.sent):
                times = (one.told, one.seq, one.not_before, one.by)
                known = ["" if value is None or math.isinf(value) else value for value in times]
                lines.writerow([name, *one.row, one.sent, *known])
