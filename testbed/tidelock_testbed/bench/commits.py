"""(c) PostgreSQL's commits per second and reply times: unprotected, async, pipelined and sync, over round trip times.

All four run on the same stack at the same time and take turns: one database on a disk of the same NBD server without
a backup and without a gate, one on a protected disk whose mode and whose WAN are changed between turns.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict

from ..image import guest_image
from ..net import GuestNet
from ..netns import Netns
from ..progress import say
from ..run import Run
from .images import disk_directory
from .postgres import Pgbench, PostgresGuest, Turn, database_disk
from .protected import Protected
from .servers import OURS
from .settings import Settings
from .spread import Spread, ratio

MODES = ("unprotected", "async", "pipelined", "sync")
DISK_MIB = 1024

SCRIPTS = {
    # A row of its own for each commit: commits of different clients share a flush.
    "insert": "INSERT INTO rows (n) VALUES (:client_id);\n",
    # PipeCloud 6.1, figure 9: the table is locked until the commit is done. One message, as its clients sent it:
    # with a reply in the middle, each mode that holds replies would hold the lock for a round trip.
    "locked": "BEGIN \\; LOCK TABLE locked IN EXCLUSIVE MODE \\; INSERT INTO locked (n) VALUES (1) \\; COMMIT;\n",
}
TABLES = "CREATE TABLE rows (n int); CREATE TABLE locked (n bigint);"

LOCKED_RTT_MS = 50
"""PipeCloud's figure 9."""
FULL_RTT_MS = 50
FULL_CLIENTS = 800
"""Enough that the machine, not the number of clients, is the limit: 800 clients that each wait 50 ms ask for up to
16000 commits a second."""
FULL_WARM_UP_S = 4.0
FULL_S = 6.0
WARM_UP_S = 0.5


class Bench:
    """Both databases, and one pgbench that asks either."""

    def __init__(self, run: Run, rtt_ms: float):
        image = guest_image()
        disks = disk_directory(run)
        self.pair = Protected(run, database_disk(run, image, disks / "protected.img", DISK_MIB), rtt_ms, disks)
        plain_net, plain_netns = GuestNet(1), Netns(run, "plain")
        self.pair.net.primary.add_veth(plain_net, plain_netns)
        self.pair.net.route_clients_to(self.pair.net.primary, plain_net)
        plain_image = database_disk(run, image, disks / "plain.img", DISK_MIB)
        _, plain_uri = OURS.start(run, plain_image)
        self.pair.wait_protected()
        self.guests = {
            "protected": PostgresGuest(run, self.pair.guest_net, "postgres"),
            "plain": PostgresGuest(run, plain_net, "postgres-plain"),
        }
        self.guests["protected"].boot(self.pair.guest_netns, image, self.pair.uri)
        self.guests["plain"].boot(plain_netns, image, plain_uri)
        self.pgbench = Pgbench(run, self.pair.net.clients, image)
        for guest in self.guests.values():
            guest.wait_ready()
            self.pgbench.sql(guest.net, TABLES)
        for name, text in SCRIPTS.items():
            self.pgbench.script(name, text)
        self.mode = "pipelined"

    def turn(self, mode: str, script: str, clients: int, seconds: float, warm_up_s: float) -> Turn:
        """One turn in a mode; what it left to the backup is waited for."""
        if mode == "unprotected":
            return self.pgbench.turn(self.guests["plain"].net, script, clients, seconds, warm_up_s)
        if mode != self.mode:
            self.pair.set_mode(mode)
            self.mode = mode
        turn = self.pgbench.turn(self.guests["protected"].net, script, clients, seconds, warm_up_s)
        self.pair.settle()
        return turn


def measure(settings: Settings) -> dict:
    """RTTs descend: TCP's congestion control learns of a shorter path at once, of a longer one only by and by."""
    rtts = sorted(settings.rtts_ms, reverse=True)
    with Run("bench-commits") as run:
        bench = Bench(run, rtts[0])
        say("(c) both databases are ready")
        cells, locked, full = [], [], {}
        for rtt in rtts:
            bench.pair.net.wan.set(delay_ms=rtt / 2)
            cells += _cells(bench, settings, rtt, "insert", settings.client_counts, MODES)
            if rtt == LOCKED_RTT_MS:
                locked = _cells(bench, settings, rtt, "locked", settings.client_counts, MODES)
            if rtt == FULL_RTT_MS:
                full = _full(bench, settings, rtt)
        return {"insert": cells, "locked": locked, "full": full}


def _full(bench: Bench, settings: Settings, rtt: int) -> dict:
    modes = ("async", "pipelined")
    return _cell(bench, settings, rtt, "insert", FULL_CLIENTS, modes, FULL_S, FULL_WARM_UP_S)


def _cells(
    bench: Bench, settings: Settings, rtt: int, script: str, client_counts: Iterable[int], modes: tuple[str, ...]
) -> list[dict]:
    return [
        _cell(bench, settings, rtt, script, clients, modes, settings.pgbench_s, WARM_UP_S) for clients in client_counts
    ]


def _cell(
    bench: Bench,
    settings: Settings,
    rtt: int,
    script: str,
    clients: int,
    modes: tuple[str, ...],
    seconds: float,
    warm_up_s: float,
) -> dict:
    turns: dict[str, list[Turn]] = {mode: [] for mode in modes}
    for _ in range(settings.pgbench_rounds):
        for mode in modes:
            turns[mode].append(bench.turn(mode, script, clients, seconds, warm_up_s))
    made = cell(rtt, clients, turns)
    figures = ", ".join(
        f"{mode} {figures['tps']['median']:,.0f}/s {figures['p50_ms']['median']:.1f} ms"
        for mode, figures in made["modes"].items()
    )
    say(f"(c) {script}, RTT {rtt} ms, {clients} clients: {figures}")
    return made


def cell(rtt: int, clients: int, turns: dict[str, list[Turn]]) -> dict:
    """All modes at one RTT with one number of clients; ratios are between turns that ran beside each other."""
    tps = {mode: [turn.tps for turn in results] for mode, results in turns.items()}
    made = {
        "rtt_ms": rtt,
        "clients": clients,
        "modes": {
            mode: {
                field: Spread.of([asdict(turn)[field] for turn in results]).json()
                for field in ("tps", "p50_ms", "p99_ms")
            }
            for mode, results in turns.items()
        },
        "pipelined_to_async": ratio(tps["pipelined"], tps["async"]).json(),
    }
    if "sync" in tps:
        made["pipelined_to_sync"] = ratio(tps["pipelined"], tps["sync"]).json()
    return made
