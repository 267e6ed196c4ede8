"""(d) The gate: packets per second and added latency, from netfilter's own benchmark on real packets."""

from __future__ import annotations

from ..progress import say
from .servers import run_example
from .settings import Settings
from .spread import Spread, ratio

FIGURES = ("packets_per_s", "round_trip_us_median", "round_trip_us_p99", "release_us_median", "tcp_gbit_per_s")
TRAFFIC = ("unprotected", "covered", "uncovered")


def measure(settings: Settings) -> dict:
    """Each round goes through all kinds of traffic in both topologies, in namespaces of its own."""
    rounds = []
    for number in range(settings.rounds):
        say(f"(d) gate, round {number + 1} of {settings.rounds}")
        rounds.append(run_example("gate-bench", settings.gate_s, timeout_s=60 + 60 * settings.gate_s))
    return summarise(rounds)


def summarise(rounds: list[dict]) -> dict:
    """Rows of all rounds, by path and traffic, with ratios to unprotected traffic of the same round."""

    def values(path: str, traffic: str, figure: str) -> list[float]:
        found = [
            row[figure] for one in rounds for row in one["rows"] if (row["path"], row["traffic"]) == (path, traffic)
        ]
        return [value for value in found if value is not None]

    rows = []
    for path in ("routed", "bridged"):
        for traffic in TRAFFIC:
            row: dict = {"path": path, "traffic": traffic}
            for figure in FIGURES:
                measured = values(path, traffic, figure)
                row[figure] = Spread.of(measured).json() if measured else None
            base = values(path, "unprotected", "packets_per_s")
            row["packets_ratio"] = ratio(values(path, traffic, "packets_per_s"), base).json()
            trips = values(path, traffic, "round_trip_us_median")
            if trips:
                plain = values(path, "unprotected", "round_trip_us_median")
                row["added_us"] = Spread.of([a - b for a, b in zip(trips, plain, strict=True)]).json()
            else:
                # Held packets wait for C; what the gate itself adds is the time from C to the packet's arrival.
                row["added_us"] = row["release_us_median"]
            dropped = [
                one_row["dropped_by_kernel"] or 0
                for one in rounds
                for one_row in one["rows"]
                if (one_row["path"], one_row["traffic"]) == (path, traffic)
            ]
            row["dropped_by_kernel"] = sum(dropped)
            rows.append(row)
    return {"packet_filter": rounds[0]["packet_filter"], "rows": rows}
