"""(q) A planned switch: how long a guest's disk and its clients wait, and what that is made of.

A row store answers clients through the gate; beside it something writes to a disk of its own, as a guest would, and
finds it again at the backup site. Both are cut off, not shut down: that takes as long as the guest takes. Whoever
recovers the group does so as soon as the command has ended, and then turns the clients' routes.
"""

from __future__ import annotations

import json
import random
import threading
import time
from pathlib import Path

from ..hostdaemon import GROUP, MEMBER
from ..nbdwire import Connection
from ..paths import BIN
from ..process import run_command, wait_until
from ..progress import say
from ..rig import DISKS, Recovery, Rig
from ..run import Run
from ..workload import Clients
from .settings import Settings
from .spread import Half

LOAD = "load"
LOAD_MIB = 64
BLOCK = 4096
TRY_S = 0.001
"""Between two tries to reach a disk that is not served."""
LONG_S = 120
ROWS = 20
"""Confirmed before the switch."""
EVERY_MS = 5
"""A client's pace, and how long it waits before it tries again: so exactly its pause is known."""
CONNECT_S = 0.05
PATIENCE_RTTS = 2
"""How long it waits for a connection; and for a reply, besides what the load asks for."""
LOADS = {"at idle": (1, 0.002, 0.2), "under write load": (4, 0.0, 1.0)}
"""Connections that write 4 KiB after 4 KiB, how long each rests in between, and a client's patience in seconds: where
the disk's records fill both cores, a reply takes several times the round trip now and then."""
PARTS = ("asked", "drained", "shut", "given_up", "recovered", "served")
WAITED = ("guest", "clients")


class LoadedRig(Rig):
    """With a disk more, which the row store does not know."""

    def __init__(self, run: Run, rtt_ms: float):
        super().__init__(run, "process", rtt_ms)
        self.disks = {DISKS[0]: self.disks[DISKS[0]]}

    def _make_disks(self, count: int) -> dict[str, Path]:
        disks = super()._make_disks(count)
        disks[LOAD] = self.primary / f"{LOAD}.img"
        disks[LOAD].write_bytes(bytes(LOAD_MIB << 20))
        return disks

    def sockets(self) -> list[tuple[Path, str]]:
        """Where the disk is, before and after."""
        name = f"{MEMBER}.{LOAD}"
        return [
            (self.daemon.runtime / GROUP / MEMBER / f"{LOAD}.sock", LOAD),
            (self.backup.exports / GROUP / f"{name}.sock", name),
        ]


class Writer(threading.Thread):
    """Writes to the first disk until that is taken away, then to the second as soon as it is there."""

    def __init__(self, sockets: list[tuple[Path, str]], seed: int, rest_s: float):
        super().__init__()
        self._sockets, self._chance, self._rest_s = sockets, random.Random(seed), rest_s
        self._ended = threading.Event()
        self.completed: list[list[float]] = [[] for _ in sockets]

    def run(self) -> None:
        """Until `end`."""
        place = 0
        data = self._chance.randbytes(BLOCK)
        while not self._ended.is_set():
            try:
                connection = Connection(*self._sockets[place])
            except OSError:
                # The first one is not served again.
                place = 1 if self.completed[0] else 0
                time.sleep(TRY_S)
                continue
            try:
                connection.read(0, BLOCK)
                while not self._ended.is_set():
                    connection.write(BLOCK * self._chance.randrange((LOAD_MIB << 20) // BLOCK), data)
                    self.completed[place].append(time.monotonic())
                    time.sleep(self._rest_s)
            except OSError:
                pass
            connection.close()

    def end(self) -> None:
        """Returns when it has ended."""
        self._ended.set()
        self.join()


def measure(settings: Settings) -> dict:
    """Each turn on sites of its own: a group is switched over once."""
    turns = {(rtt, load): [] for rtt in settings.rtts_ms for load in LOADS}
    for number in range(settings.switches):
        for (rtt, load), found in turns.items():
            with Run(f"bench-switchover-{rtt}-{list(LOADS).index(load)}-{number}") as run:
                found.append(_turn(run, rtt, load, settings))
    rows = [{"rtt_ms": rtt, "load": load, **summarise(found)} for (rtt, load), found in turns.items()]
    for row in rows:
        waited = ", ".join(f"{who} {row['waited_ms'][who]['median']:.0f} ms" for who in WAITED)
        say(f"(q) RTT {row['rtt_ms']} ms, {row['load']}: {waited}")
    return {"turns": settings.switches, "rows": rows}


def summarise(turns: list[dict[str, float]]) -> dict:
    """Medians and quartiles."""

    def halves(names: tuple[str, ...]) -> dict:
        return {name: Half.of([turn[name] for turn in turns]).json() for name in names}

    return {"waited_ms": halves(WAITED), "parts_ms": halves(PARTS)}


def _turn(run: Run, rtt_ms: float, load: str, settings: Settings) -> dict[str, float]:
    rig = LoadedRig(run, rtt_ms)
    rig.backup.start()
    rig.daemon.start()
    rig.daemon.wait_state("protected", LONG_S, [rig.backup.process])
    rig.boot_guest()
    rig.guest.wait_ready()
    connections, rest_s, longer_s = LOADS[load]
    patience_s = PATIENCE_RTTS * rtt_ms / 1e3 + longer_s
    pace = ["--every-ms", EVERY_MS, "--retry-s", EVERY_MS / 1e3]
    patience = ["--connect-s", CONNECT_S, "--patience-s", patience_s]
    clients = Clients(run, rig.net, rig.guest, 1, options=[*pace, *patience])
    writers = [Writer(rig.sockets(), seed, rest_s) for seed in range(connections)]
    for writer in writers:
        writer.start()
    try:
        clients.wait_for_more(ROWS)
        time.sleep(settings.switch_load_s)
        return _switch(rig, clients, writers)
    finally:
        for writer in writers:
            writer.end()


def _switch(rig: LoadedRig, clients: Clients, writers: list[Writer]) -> dict[str, float]:
    """Milliseconds of each part, in their order, and of the two pauses."""
    words = [BIN / "tidelock", "switchover", GROUP, "--guest-is-stopped", "--json"]
    words += ["--socket", rig.daemon.control_socket]
    began = time.monotonic()
    over = json.loads(run_command(words, "switch over", timeout_s=LONG_S))["switchover"]
    ended = time.monotonic()
    recovery = Recovery(rig)
    recovery.wait_recovered(LONG_S)
    rig.guest.kill()
    rig.net.route_clients_to(rig.net.backup, rig.guest_net)
    recovery.wait_ready()
    ledger = clients.ledger

    def first_answer() -> float:
        after = [at for row, at in ledger.follow().confirmed.items() if ledger.sent[row] > ended]
        return min(after, default=0.0)

    wait_until("clients are answered", first_answer, LONG_S, [clients.process, recovery.guest.process])
    wait_until("the disk is written to", lambda: all(writer.completed[1] for writer in writers), LONG_S)
    answered = first_answer()
    wrote = min(writer.completed[1][0] for writer in writers)
    last_written = max(writer.completed[0][-1] for writer in writers)
    last_answered = max(at for at in ledger.confirmed.values() if at < answered)
    told_ms = over["drained_ms"] + over["gave_up_ms"]
    return {
        "guest": 1e3 * (wrote - last_written),
        "clients": 1e3 * (answered - last_answered),
        "asked": max(0.0, 1e3 * (ended - began) - told_ms),
        "drained": over["drained_ms"],
        "shut": over["shut_ms"],
        "given_up": over["gave_up_ms"] - over["shut_ms"],
        "recovered": 1e3 * (recovery.recovered_at - ended),
        "served": 1e3 * (answered - recovery.recovered_at),
    }
