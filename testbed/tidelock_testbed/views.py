"""The three views over time, as in PipeCloud's figure 15: rows at the primary, at the secondary, at the client.

The client's view is the ledger. The primary's is the database itself, asked from inside its site, where nothing
is held. The secondary cannot be asked while it is a secondary, so its view is derived: at each sample the daemon says
how many writes there are (pending) and how many the backup holds durably (committed), and the rows that
the backup holds are those that the primary had when its pending count was what is committed now.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass, field

from .ledger import Ledger
from .svg import Marker, Series, line_chart


@dataclass
class Views:
    """Samples of a run, in the order of their times."""

    times: list[float] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    pending: list[int] = field(default_factory=list)
    committed: list[int] = field(default_factory=list)

    def add(self, at: float, rows: int, pending: int, committed: int) -> None:
        """Adds a sample: `rows` must have been asked for before `pending` was, so that its writes are counted."""
        self.times.append(at)
        self.rows.append(rows)
        self.pending.append(pending)
        self.committed.append(committed)

    def secondary_rows(self) -> list[int]:
        """For each sample, rows whose writes are all durable at the backup."""
        rows = []
        for committed in self.committed:
            covered = bisect.bisect_right(self.pending, committed)
            rows.append(self.rows[covered - 1] if covered else 0)
        return rows

    def chart(self, title: str, ledger: Ledger, disaster_at: float, window_s: float = 4.0) -> str:
        """The last seconds before the disaster, as an `<svg>`; times are relative to it."""
        begin = disaster_at - window_s

        def line(name: str, times: list[float], values: list[int]) -> Series:
            points = [
                (at - disaster_at, value) for at, value in zip(times, values, strict=True) if begin <= at <= disaster_at
            ]
            return Series(name, points, step=True)

        confirmed = sorted(ledger.confirmed.values())
        client = line("client: rows confirmed", confirmed, list(range(1, len(confirmed) + 1)))
        series = [
            line("primary: rows committed", self.times, self.rows),
            line("secondary: rows durable", self.times, self.secondary_rows()),
            client,
        ]
        return line_chart(title, "seconds before the disaster", "rows", series, [Marker(0, "disaster")])
