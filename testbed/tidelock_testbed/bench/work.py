"""(f) Reply time against work in the front tier, as PipeCloud's figure 13: what work is hidden behind the round trip.

Two tiers: the back inserts a row, the front then works on the answer. *joint* holds packets where they leave the group,
*naive* where they leave each member; the other modes are those of the whole group.
"""

from __future__ import annotations

from contextlib import ExitStack

from ..applications import Application, Place
from ..progress import say
from ..run import Run
from .application import LAYOUTS, BenchFleet, Replies, lay_out, turn
from .settings import Settings
from .spread import Spread

FRONT_AND_BACK = Application(
    name="front-and-back",
    places=(Place("front", database=False, web=True, front=True), Place("back", database=True, web=True)),
    chain=True,
    refers={},
    follows={},
    tells=("back",),
    work_ms={},
)
RTT_MS = 50
VARIANTS = {
    "sync": ("group", "sync"),
    "naive": ("member", "pipelined"),
    "joint": ("group", "pipelined"),
    "async": ("group", "async"),
}
"""Each variant's boundary and mode."""


def measure(settings: Settings) -> dict:
    """One layout after the other."""
    points = [point for layout in LAYOUTS for point in measure_layout(settings, layout)]
    return {"rtt_ms": RTT_MS, "points": points}


def measure_layout(settings: Settings, layout: str) -> list[dict]:
    """Both boundaries at once, in sites of their own, so that their turns stand beside each other."""
    with ExitStack() as stack:
        fleets = {}
        for boundary in sorted({boundary for boundary, _ in VARIANTS.values()}):
            run = stack.enter_context(Run(f"bench-work-{boundary}"))
            fleets[boundary] = BenchFleet(run, lay_out(layout, FRONT_AND_BACK, RTT_MS, boundary=boundary))
            fleets[boundary].start()
        say(f"(f) two tiers on {layout} are ready, twice")
        return [{"layout": layout, **point(fleets, settings, ms)} for ms in settings.front_work_ms]


def point(fleets: dict[str, BenchFleet], settings: Settings, work_ms: float) -> dict:
    """All variants with so much work."""
    turns: dict[str, list[Replies]] = {name: [] for name in VARIANTS}
    for _ in range(settings.application_rounds):
        for name, (boundary, mode) in VARIANTS.items():
            replies = turn(fleets[boundary], mode, settings.application_s, "--render-ms", work_ms)
            turns[name].append(replies)
    made = {name: Spread.of([one.mean_ms for one in results]).json() for name, results in turns.items()}
    say(f"(f) {work_ms:g} ms of work: " + ", ".join(f"{name} {ms['median']:.1f} ms" for name, ms in made.items()))
    return {"work_ms": work_ms, "mean_ms": made, "tagged": Spread.of([one.tagged for one in turns["joint"]]).json()}
