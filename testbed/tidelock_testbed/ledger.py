"""The clients' ledger: what they asked, what they were told, and when.

One line for each event, appended by the client program as it happens:

    <CLOCK_MONOTONIC seconds> <event> <client> <n>

`sent` before a request leaves, `ok` when its confirmation has arrived, `gone` when the request was given up
without one: nobody knows then whether the row is there. A page may tell of other clients' rows:

    <CLOCK_MONOTONIC seconds> told <database> <client> <n>

Where a client writes into several databases, `sent` and `ok` have the database's number in the same place.

The clock is the machine's, so the times of all processes of a run compare.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

Row = tuple[int, int]
"""A client's number and the number of its row."""


@dataclass
class Ledger:
    """A ledger as far as it has been read. `follow` reads what was appended since."""

    path: Path
    sent: dict[Row, float] = field(default_factory=dict)
    confirmed: dict[Row, float] = field(default_factory=dict)
    told: dict[tuple[int, Row], float] = field(default_factory=dict)
    """Rows that a page told of: the number of the database and the row, and when that was first."""
    where: dict[Row, int] = field(default_factory=dict)
    """Number of the database that a row was asked of, if clients write into several."""
    _read_to: int = 0

    def follow(self) -> "Ledger":
        """Reads on, up to the last complete line."""
        if not self.path.exists():
            return self
        with self.path.open("rb") as file:
            file.seek(self._read_to)
            data = file.read()
        complete = data[: data.rfind(b"\n") + 1]
        self._read_to += len(complete)
        for line in complete.splitlines():
            at, event, *database, client, n = line.split()
            row = (int(client), int(n))
            if event == b"sent":
                self.sent[row] = float(at)
                if database:
                    self.where[row] = int(database[0])
            elif event == b"ok":
                self.confirmed[row] = float(at)
            elif event == b"told":
                self.told.setdefault((int(database[0]), row), float(at))
        return self

    def sent_before(self, end: float) -> "Ledger":
        """The rows that were asked for before this time, and what became of them since."""
        sent = {row: at for row, at in self.sent.items() if at < end}
        confirmed = {row: at for row, at in self.confirmed.items() if row in sent}
        return Ledger(self.path, sent, confirmed, where=self.where)

    def confirmed_between(self, begin: float, end: float) -> int:
        """How many confirmations arrived in this time."""
        return sum(begin <= at < end for at in self.confirmed.values())

    def reply_times_ms(self, begin: float = 0, end: float = float("inf")) -> list[float]:
        """How long each request took that was confirmed in this time, ascending."""
        return sorted((at - self.sent[row]) * 1e3 for row, at in self.confirmed.items() if begin <= at < end)


@dataclass(frozen=True)
class Verdict:
    """What a ledger and the rows of a recovered database say about each other."""

    confirmed: int
    recovered: int
    lost: list[Row]
    """Rows that a client was told of and that are not there: must be empty where nothing may be lost."""
    recovered_unconfirmed: int
    """Rows that are there though no client was told so: allowed, they were under way."""
    foreign: list[Row]
    """Rows that nobody ever sent: damage."""

    out_of_order: list[Row]
    """Lost rows that had been confirmed before a row was even sent that is there: not a prefix, so never allowed."""

    rpo_ms: float
    """How long before the disaster the first lost confirmation was given; 0 if none was lost."""


def compare(ledger: Ledger, recovered: set[Row], disaster_at: float) -> Verdict:
    """Compares what clients were told with what there is after recovery."""
    lost = sorted(row for row in ledger.confirmed if row not in recovered)
    newest = max((ledger.sent[row] for row in recovered if row in ledger.sent), default=0.0)
    first_lost = min((ledger.confirmed[row] for row in lost), default=disaster_at)
    return Verdict(
        confirmed=len(ledger.confirmed),
        recovered=len(recovered),
        lost=lost,
        recovered_unconfirmed=sum(row not in ledger.confirmed for row in recovered),
        foreign=sorted(row for row in recovered if row not in ledger.sent),
        out_of_order=[row for row in lost if ledger.confirmed[row] < newest],
        rpo_ms=max(0.0, (disaster_at - first_lost) * 1e3),
    )
