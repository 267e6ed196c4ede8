"""(h) What held replies cost requests that only read, as PipeCloud's figure 12.

One guest, 100 static pages a second, and writes at a rate that rises.
"""

from __future__ import annotations

from ..applications import Application, Place
from ..fleet import Shape
from ..progress import say
from ..run import Run
from .application import BenchFleet, Replies, work
from .settings import Settings
from .spread import Spread

ONE_TIER = Application(
    name="one-tier",
    places=(Place("front", database=True, web=True, front=True),),
    chain=True,
    refers={},
    follows={},
    tells=(),
    work_ms={},
)
RTT_MS = 50
MODES = ("sync", "pipelined", "async")
READS_PER_S = 100
READERS = 25
"""Each keeps its pace as long as a reply takes less than a quarter of a second."""
WRITERS_PER_RATE = 0.25
"""Writers for each write a second: each keeps its pace as long as its reply takes less than a quarter of a second."""


def measure(settings: Settings) -> dict:
    """Modes take turns at each rate."""
    with Run("bench-reads") as run:
        fleet = BenchFleet(run, Shape(ONE_TIER, {"front": 0}, (RTT_MS,)))
        fleet.start()
        say("(h) one tier is ready")
        points = [point(fleet, settings, rate) for rate in settings.write_rates]
    return {"rtt_ms": RTT_MS, "reads_per_s": READS_PER_S, "points": points}


def point(fleet: BenchFleet, settings: Settings, rate: int) -> dict:
    """All modes at this rate of writes."""
    turns: dict[str, list[tuple[Replies, float]]] = {mode: [] for mode in MODES}
    for _ in range(settings.application_rounds):
        for mode in MODES:
            turns[mode].append(read_beside(fleet, mode, rate, settings.application_s))
    figures = {
        mode: {
            "mean_ms": Spread.of([replies.mean_ms for replies, _ in results]).json(),
            "deviation_ms": Spread.of([replies.deviation_ms for replies, _ in results]).json(),
            "reads_per_s": Spread.of([replies.per_s for replies, _ in results]).json(),
            "writes_per_s": Spread.of([writes for _, writes in results]).json(),
        }
        for mode, results in turns.items()
    }
    words = ", ".join(f"{mode} {figures[mode]['mean_ms']['median']:.1f} ms" for mode in MODES)
    say(f"(h) {rate} writes/s: a read takes {words}")
    return {"write_rate": rate, "modes": figures}


def read_beside(fleet: BenchFleet, mode: str, rate: int, seconds: float) -> tuple[Replies, float]:
    """Reply times of reads, and the writes that were done each second beside them."""
    fleet.set_mode(mode)
    every_ms = 1e3 * READERS / READS_PER_S
    readers = fleet.clients(READERS, "--read", "--every-ms", every_ms)
    writers = None
    if rate:
        count = max(1, round(rate * WRITERS_PER_RATE))
        writers = fleet.clients(count, "--every-ms", 1e3 * count / rate)
    begin, end = work(seconds, *(clients for clients in (readers, writers) if clients))
    pages = readers.stop()
    writes = writers.stop().confirmed_between(begin, end) / (end - begin) if writers else 0.0
    fleet.settle()
    return Replies.of(pages, begin, end), writes
