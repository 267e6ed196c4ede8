"""(k) What it costs to take up and to release packets of which 100,000 are held, by the form of their stamps."""

from __future__ import annotations

from ..progress import say
from .servers import run_example
from .settings import Settings
from .spread import Spread

FIGURES = {
    "take_up_ns": "taken up",
    "release_at_once_ns": "released, C covers all at once",
    "release_one_by_one_ns": "released, C covers one after the other",
    "let_out_ns": "let out of the kernel's queue and at the client",
}
"""What netfilter's own benchmark measures, in nanoseconds for each packet."""
ROUND_S = 60
"""No round takes longer."""


def measure(settings: Settings) -> dict:
    """All stamps take turns."""
    say(f"(k) {settings.rounds} rounds")
    return summarise(run_example("release-bench", settings.rounds, timeout_s=ROUND_S * settings.rounds))


def summarise(found: dict) -> dict:
    """A row for each kind of stamp."""
    rows = [
        {
            "stamp": row["stamp"],
            "figures": {name: Spread.of([turn[name] for turn in row["turns"]]).json() for name in FIGURES},
        }
        for row in found["rows"]
    ]
    return {"held_packets": found["held_packets"], "held_by_kernel": found["held_by_kernel"], "rows": rows}
