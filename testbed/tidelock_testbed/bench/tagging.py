"""(i) What tags cost between two members, and (j) what the kernel programs cost covered traffic to the outside.

Netfilter's own benchmark makes the traffic. Without and with tags stand ready at the same time and take short turns, so
that what disturbs the machine disturbs both: each figure is a difference or a ratio of turns beside each other.
"""

from __future__ import annotations

import re
import subprocess
from itertools import product
from statistics import median

from ..process import Process, wait_until
from ..progress import say
from ..run import Run
from .servers import example, run_example
from .settings import Settings
from .spread import Half
from .usage import Profile

PATHS = {"OneBridge": "one host, bridged", "OneRouter": "one host, routed", "TwoHosts": "two hosts"}
CABLES = {"Veth": "veths", "Tap": "taps"}
"""How guests are joined to their hosts."""
_PLACE = {"path": PATHS, "cable": CABLES}
"""What the benchmark's names of a place are called in a row."""
TRIPS = {"ping_us": "ping", "udp_us": "UDP request and reply", "tcp_us": "TCP request and reply"}
"""Round trips, and what they are made of."""
RATES = {
    "gbit_per_s": "one TCP stream as fast as a core carries it",
    "paced_gbit_per_s": "one TCP stream of 10 Gb/s",
    "packets_per_s": "64-byte datagrams",
}
LOADS = {"gbit_per_s": "stream", "packets_per_s": "flood"}
"""Rates whose profile tells why there is less, and what the benchmark calls their load."""
COVERED = "covered"
"""The guard of packets that need no tag, or may leave at once: nobody writes."""
TURN_S = 12
"""No turn of four guards takes longer."""
NOT_JUDGED = "queue"
"""The guard that others stand beside."""
THROUGHPUT_LEVEL = 0.97
"""Throughput is to be within 3 % of that without."""
PROFILE_HERTZ = 1999
"""What a gate adds is a few percent of all samples."""
SET_UP = "the load begins"
"""The benchmark's own words."""
FUNCTIONS = 12
"""So many have a row in a profile."""


def measure_members(settings: Settings) -> dict:
    """Part (i)."""
    return _measure(settings, "members", "db")


def measure_outside(settings: Settings) -> dict:
    """Part (j)."""
    return _measure(settings, "outside", "client")


def _measure(settings: Settings, what: str, to: str) -> dict:
    millis = round(settings.flood_s * 1e3)
    cables = " and ".join(CABLES.values())
    say(f"{what}: {settings.tagging_rounds} rounds on each of {len(PATHS)} paths, guests on {cables}")
    timeout_s = 60 + TURN_S * len(PATHS) * len(CABLES) * settings.tagging_rounds
    found = run_example("tagging-bench", what, settings.tagging_rounds, millis, timeout_s=timeout_s)
    result = summarise(found)
    result["profiles"] = [_compare(settings, row, rate, to) for row, rate in short(result["rows"])]
    return result


def short(rows: list[dict]) -> list[tuple[dict, str]]:
    """Of each cable and rate, with tags and without, the row that has most to lose, where that is too much."""
    found = []
    for cable, rate, is_covered in product(CABLES.values(), LOADS, (False, True)):
        judged = [row for row in rows if row["cable"] == cable and row["guard"] != NOT_JUDGED]
        alike = [row for row in judged if (row["guard"] == COVERED) == is_covered]
        least = min(alike, key=lambda row: row["ratios"][rate]["median"], default=None)
        if least and least["ratios"][rate]["median"] < THROUGHPUT_LEVEL:
            found.append((least, rate))
    return found


def _compare(settings: Settings, row: dict, rate: str, to: str) -> dict:
    """Where the time goes with a guard and without, of all that happens to a packet on this machine."""
    where = [next(name for name, words in names.items() if words == row[of]) for of, names in _PLACE.items()]
    say(f"profile: {RATES[rate]}, {row['path']}, guests on {row['cable']}, {row['guard']}")
    shares = [_functions(settings, [LOADS[rate], *where, to, guard]) for guard in (row["guard"], "none")]
    functions = added(*shares, row["ratios"][rate]["median"]) if all(shares) else []
    return {"rate": rate, **{name: row[name] for name in (*_PLACE, "guard")}, "functions": functions}


def added(with_guard: dict[str, float], without: dict[str, float], ratio: float) -> list[dict]:
    """Percent of the time that a packet takes without a guard, by function; first where most is added."""
    rows = [
        {
            "function": name,
            "percent": round(with_guard.get(name, 0) / ratio, 2),
            "without": round(without.get(name, 0), 2),
        }
        for name in with_guard | without
    ]
    rows.sort(key=lambda row: row["without"] - row["percent"])
    return rows[:FUNCTIONS]


def _functions(settings: Settings, words: list[str]) -> dict[str, float]:
    """The percent of all samples of a load, by function."""
    with Run("bench-tagging") as run:
        load = Process(run, words[0], example("tagging-bench", *words, round(settings.profile_s * 1e3)))
        try:
            wait_until("all is set up", lambda: SET_UP in load.log.read_text(), 60, [load])
            profile = Profile(run, words[0], {"tagging-bench": load.pid}, PROFILE_HERTZ)
            load.wait(settings.profile_s + 60)
            shares: dict[str, float] = {}
            for row in profile.top(None):
                # A program's name has the digest of its code in front.
                function = re.sub("^bpf_prog_[0-9a-f]+_", "bpf: ", row["function"])
                shares[function] = shares.get(function, 0) + row["percent"]
            return shares
        except subprocess.SubprocessError as error:
            say(f"no profile: {error}")
            return {}
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
