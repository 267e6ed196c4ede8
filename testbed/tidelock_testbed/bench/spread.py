"""Several turns of the same measurement, and how two things compare over turns that were taken side by side."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from statistics import median


@dataclass(frozen=True)
class Spread:
    """Least, middle and greatest of some turns."""

    min: float
    median: float
    max: float

    @staticmethod
    def of(values: list[float]) -> Spread:
        """Of at least one value."""
        return Spread(min(values), median(values), max(values))

    def json(self) -> dict:
        """As it is stored."""
        return {name: round(value, 4) for name, value in asdict(self).items()}


@dataclass(frozen=True)
class Half:
    """The middle half of many short turns: the quartiles and the median."""

    low: float
    median: float
    high: float

    @staticmethod
    def of(values: list[float]) -> Half:
        """Of at least one value."""
        return Half(percentile(values, 25), median(values), percentile(values, 75))

    def json(self) -> dict:
        """As it is stored."""
        return {name: round(value, 4) for name, value in asdict(self).items()}


def ratio(ours: list[float], theirs: list[float]) -> Spread:
    """Ours divided by theirs, turn by turn: turn k of one ran beside turn k of the other."""
    return Spread.of([a / b if b else float("inf") for a, b in zip(ours, theirs, strict=True)])


def percentile(values: list[float], percent: float) -> float:
    """Of at least one value; the nearest one that was measured."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))]
