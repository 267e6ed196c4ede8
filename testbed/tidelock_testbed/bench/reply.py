"""(l) A reply at low load: what it takes beyond one round trip, and what that is made of."""

from __future__ import annotations

from ..hostdaemon import BACKUP_PORT
from ..progress import say
from ..run import Run
from .commits import WARM_UP_S, Bench
from .settings import Settings
from .spread import Spread
from .timeline import Captures, phases, summarise

MODES = ("unprotected", "async", "pipelined")


def measure(settings: Settings) -> dict:
    """One client. RTTs descend, as in (c); modes take turns at each."""
    rtts = sorted(settings.rtts_ms, reverse=True)
    with Run("bench-reply") as run:
        bench = Bench(run, rtts[0])
        say("(l) both databases are ready")
        return {"rows": [_row(bench, settings, rtt) for rtt in rtts]}


def _row(bench: Bench, settings: Settings, rtt: int) -> dict:
    bench.pair.net.wan.set(delay_ms=rtt / 2)
    p50_ms: dict[str, list[float]] = {mode: [] for mode in MODES}
    for _ in range(settings.pgbench_rounds):
        for mode in MODES:
            p50_ms[mode].append(bench.turn(mode, "insert", 1, settings.pgbench_s, WARM_UP_S).p50_ms)
    row = {
        "rtt_ms": rtt,
        "p50_ms": {mode: Spread.of(values).json() for mode, values in p50_ms.items()},
        "timeline": _timeline(bench, rtt, settings.pgbench_s),
    }
    say(f"(l) RTT {rtt} ms: " + ", ".join(f"{mode} {row['p50_ms'][mode]['median']:.1f} ms" for mode in MODES))
    return row


def _timeline(bench: Bench, rtt: int, seconds: float) -> dict:
    """In a turn of its own: whoever looks at packets takes time, too."""
    net, guest = bench.pair.net, bench.guests["protected"]
    places = {
        "client": (net.clients, f"lan-{net.primary.name}"),
        "guest": (net.primary.netns, guest.net.interface),
        "host": (net.primary.netns, net.wan.interface),
        "backup": (net.backup.netns, net.wan.interface),
    }
    captures = Captures(bench.pair.run, f"timeline-{rtt}", places)
    bench.turn("pipelined", "insert", 1, seconds, WARM_UP_S)
    return summarise(phases(captures.read(), guest.database_port, BACKUP_PORT, rtt / 2))
