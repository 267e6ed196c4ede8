"""The three views over time, as in PipeCloud's figure 15: rows at the primary, at the secondary, at the client.

The client's view is the ledger. The primary's is what the database itself says on the guest's console, where nothing
is held; between two times at which it says so, rows are in proportion to the daemon's count of writes (P). The
secondary's is measured for each row (`durability.py`).
"""

from __future__ import annotations

import bisect
import math
import threading
from dataclasses import dataclass, field

from .ledger import Ledger
from .svg import Marker, Series, line_chart


@dataclass
class Views:
    """Samples of a run, in the order of their times. They may be added by several threads."""

    times: list[float] = field(default_factory=list)
    pending: list[int] = field(default_factory=list)
    said: list[tuple[int, int]] = field(default_factory=list)
    """(P, rows): the database had said that it has so many rows just before there were so many writes."""

    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, at: float, pending: int) -> None:
        """Adds a sample of the daemon's count.

        A daemon that counts anew, after it was killed, ends the usefulness of older samples.
        """
        with self._lock:
            if self.pending and pending < self.pending[-1]:
                for samples in (self.times, self.pending, self.said):
                    samples.clear()
            self.times.append(at)
            self.pending.append(pending)

    def add_rows(self, rows: int, pending: int) -> None:
        """Adds what the database said, and P as asked for after that."""
        with self._lock:
            if not self.said or pending > self.said[-1][0]:
                self.said.append((pending, rows))

    def rows_after(self, writes: int) -> float:
        """Rows that there were after so many writes; between two times at which they were said, in proportion."""
        place = bisect.bisect_right(self.said, (writes, math.inf))
        if place == 0:
            return 0
        before_writes, before_rows = self.said[place - 1]
        if place == len(self.said):
            return before_rows
        after_writes, after_rows = self.said[place]
        share = (writes - before_writes) / (after_writes - before_writes)
        return before_rows + share * (after_rows - before_rows)

    def primary_rows(self) -> list[float]:
        """For each sample, rows at the primary."""
        return [self.rows_after(writes) for writes in self.pending]

    def chart(
        self, title: str, ledger: Ledger, durable_at: list[float], disaster_at: float, window_s: float = 1.0
    ) -> str:
        """The last moments before the disaster, as an `<svg>`; times are relative to it.

        `durable_at` has for each row when the backup had it, ascending.
        """

        def line(name: str, times: list[float], values: list[float]) -> Series:
            points = [
                ((at - disaster_at) * 1e3, value)
                for at, value in zip(times, values, strict=True)
                if disaster_at - window_s <= at <= disaster_at
            ]
            return Series(name, points, step=True)

        confirmed = sorted(ledger.confirmed.values())
        series = [
            line("primary: rows committed", self.times, self.primary_rows()),
            line("secondary: rows durable", durable_at, list(range(1, len(durable_at) + 1))),
            line("client: rows confirmed", confirmed, list(range(1, len(confirmed) + 1))),
        ]
        return line_chart(title, "ms before the disaster", "rows", series, [Marker(0, "disaster")], from_zero=False)


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
