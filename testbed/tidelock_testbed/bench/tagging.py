"""(i) What tags cost between two members, and (j) what the kernel programs cost covered traffic to the outside.

Netfilter's own benchmark makes the traffic. Without and with tags stand ready at the same time and take short turns, so
that what disturbs the machine disturbs both: each figure is a difference or a ratio of turns beside each other.
"""

from __future__ import annotations

import subprocess
from statistics import median

from ..process import Process
from ..progress import say
from ..run import Run
from .servers import example, run_example
from .settings import Settings
from .spread import Half
from .usage import Profile

PATHS = {"OneBridge": "one host, bridged", "OneRouter": "one host, routed", "TwoHosts": "two hosts"}
CABLES = {"Veth": "veths", "Tap": "taps"}
"""How guests are joined to their hosts."""
TRIPS = {"ping_us": "ping", "udp_us": "UDP request and reply", "tcp_us": "TCP request and reply"}
"""Round trips, and what they are made of."""
RATES = {
    "gbit_per_s": "one TCP stream as fast as a core carries it",
    "paced_gbit_per_s": "one TCP stream of 10 Gb/s",
    "packets_per_s": "64-byte datagrams",
}
LOADS = {
    "stream": ("gbit_per_s", "stream", "Veth"),
    "taps_stream": ("gbit_per_s", "stream", "Tap"),
    "flood": ("packets_per_s", "flood", "Veth"),
}
"""Loads whose profile tells why there is less: the rate, and what the benchmark calls the load and the cable."""
COVERED = "covered"
"""The guard of packets that need no tag, or may leave at once: nobody writes."""
TURN_S = 12
"""No turn of four guards takes longer."""
THROUGHPUT_LEVEL = 0.97
"""Throughput is to be within 3 % of that without."""


def measure_members(settings: Settings) -> dict:
    """Part (i)."""
    return _measure(settings, "members", "db", "vector")


def measure_outside(settings: Settings) -> dict:
    """Part (j)."""
    return _measure(settings, "outside", "client", COVERED)


def _measure(settings: Settings, what: str, to: str, guard: str) -> dict:
    millis = round(settings.flood_s * 1e3)
    cables = " and ".join(CABLES.values())
    say(f"{what}: {settings.tagging_rounds} rounds on each of {len(PATHS)} paths, guests on {cables}")
    timeout_s = 60 + TURN_S * len(PATHS) * len(CABLES) * settings.tagging_rounds
    found = run_example("tagging-bench", what, settings.tagging_rounds, millis, timeout_s=timeout_s)
    result = summarise(found)
    for name, (rate, load, cable) in LOADS.items():
        rows = [row for row in result["rows"] if row["cable"] == CABLES[cable]]
        if any(row["ratios"][rate]["median"] < THROUGHPUT_LEVEL for row in rows):
            result[f"{name}_profile"] = _profile(settings, load, cable, to, guard)
    return result


def _profile(settings: Settings, what: str, cable: str, to: str, guard: str) -> list[dict]:
    """Where the time goes: all that happens to a packet on this machine is done by its sender's thread, and on taps by
    those that carry frames from one to the other."""
    with Run("bench-tagging") as run:
        words = [what, "TwoHosts", cable, to, guard, round(settings.profile_s * 1e3)]
        load = Process(run, what, example("tagging-bench", *words))
        try:
            profile = Profile(run, what, {"tagging-bench": load.pid})
            load.wait(settings.profile_s + 60)
            return profile.top()
        except subprocess.SubprocessError as error:
            say(f"no profile: {error}")
            return []
        finally:
            load.kill()


def _readings(turn: dict, name: str) -> list[float]:
    """Of one turn: the fast stream has one of each burst."""
    read = turn[name]
    return read if isinstance(read, list) else [read]


def _middle(turns: list[dict], name: str) -> float:
    return round(median(reading for turn in turns for reading in _readings(turn, name)), 2)


def _ratio(one: dict, other: dict, name: str) -> float:
    """Of two turns beside each other, by their bursts beside each other: one that was disturbed counts once."""
    pairs = zip(_readings(one, name), _readings(other, name), strict=True)
    return median(ours / theirs for ours, theirs in pairs)


def summarise(found: dict) -> dict:
    """A row for each path and guard: what it adds to round trips (on veths), its share of the throughput without."""
    rows = []
    for path in found["paths"]:
        plain, *guarded = path["guards"]
        for guard in guarded:
            pairs = list(zip(guard["turns"], plain["turns"], strict=True))
            trips = [name for name in TRIPS if name in plain["turns"][0]]
            rates = [name for name in RATES if name in plain["turns"][0]]
            added = {name: Half.of([one[name] - other[name] for one, other in pairs]).json() for name in trips}
            ratios = {name: Half.of([_ratio(one, other, name) for one, other in pairs]).json() for name in rates}
            row = {
                "path": PATHS[path["path"]],
                "cable": CABLES[path["cable"]],
                "guard": guard["guard"],
                "without": {name: _middle(plain["turns"], name) for name in (*trips, *rates)},
                "added_us": added,
                "ratios": ratios,
                "program_ns": guard["program_ns"],
                "counted": guard["counted"],
            }
            rows.append(row)
    # A bridge may have another one than a router.
    filters = dict.fromkeys(path["packet_filter"] for path in found["paths"])
    return {"rounds": found["rounds"], "packet_filter": ", ".join(filters), "rows": rows}
