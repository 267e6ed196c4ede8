"""The three views over time, as in PipeCloud's figure 15: rows at the primary, at the secondary, at the client.

The client's view is the ledger. The primary's is what the database itself says on the guest's console, where nothing
is held. The secondary cannot be asked while it is a secondary, so its view is derived: at each sample the daemon says
how many writes there are (pending) and how many the backup holds durably (committed), and the rows that
the backup holds are those that the primary had when its pending count was what is committed now.
"""

from __future__ import annotations

import bisect
import math
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
        """Adds a sample: `rows` must have been asked for before `pending` was, so that its writes are counted.

        A daemon that counts anew, after it was killed, ends the usefulness of older samples.
        """
        if self.pending and pending < self.pending[-1]:
            for samples in (self.times, self.rows, self.pending, self.committed):
                samples.clear()
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


def answers_chart(
    title: str, ledger: Ledger, disaster_at: float, events: list[tuple[float, str]], bin_s: float = 1.0
) -> str:
    """How many rows were confirmed in each second of the run, as an `<svg>`; times are relative to the disaster."""
    if not ledger.confirmed:
        return line_chart(title, "", "", [])
    first, last = min(ledger.confirmed.values()) - disaster_at, max(ledger.confirmed.values()) - disaster_at
    low, high = math.floor(first / bin_s), math.ceil(last / bin_s)
    counts = dict.fromkeys(range(low, high + 1), 0)
    for at in ledger.confirmed.values():
        counts[math.floor((at - disaster_at) / bin_s)] += 1
    points = [(number * bin_s, count / bin_s) for number, count in counts.items()]
    markers = [Marker(at - disaster_at, name) for at, name in events]
    return line_chart(title, "seconds after the disaster", "rows/s", [Series("confirmed", points, step=True)], markers)
