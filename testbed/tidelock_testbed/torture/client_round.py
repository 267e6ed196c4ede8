"""A client round: a drill in whose time of trouble random faults come one after the other.

The drill judges as ever: by what clients were told and what the recovered databases have.
"""

from __future__ import annotations

import random
import time

from ..appdrill import AppDrill, ThreeTier, TwoHosts, TwoWriters
from ..drilling import Drill, Knobs
from ..faultshim import FaultShim
from ..hostdaemon import HostDaemon
from ..process import Process, wait_until
from ..progress import say
from ..run import Run
from ..scenarios import TwoDisks
from .faults import Troublemaker, Victim, World, inside
from .verdict import Verdict

KINDS: tuple[type[Drill], ...] = (Drill, TwoDisks, TwoWriters, TwoHosts, ThreeTier)
COMES_BACK_S = 120
RULES_OF_CHECKS = {
    "no confirmed row is lost": 1,
    "no confirmed row is missing in any database": 1,
    "no row is missing that a page told a client of": 1,
    "no row is there that nobody sent": 2,
    "no row depends on a row that is not there": 2,
    "what is there is a prefix of what was done: no earlier row is missing": 2,
}
"""What a drill checks, and the rule that it is about. Its other checks count for the promise as a whole, rule 1."""


class ClientRound:
    """A drill of a random kind, tortured."""

    def __init__(self, run: Run, seed: int, guest: str = "process"):
        chance = random.Random(f"client round {seed}")
        kind = chance.choice(KINDS)
        knobs = Knobs(
            scenario=kind.name,
            mode=chance.choice(["pipelined", "pipelined", "pipelined", "sync"]),
            guest=guest,
            rtt_ms=chance.choice([5, 20, 50]),
            seed=seed,
            form=chance.choice(["auto", "hlc"]) if issubclass(kind, AppDrill) else "auto",
            hurry=True,
        )
        self.verdict = Verdict(f"clients of {kind.name}, {guest}", seed)
        say(f"{kind.name}, {knobs.mode}, {knobs.rtt_ms} ms" + (f", tags: {knobs.form}" if kind.several_guests else ""))
        self.drill = tortured(kind)(run, knobs, chance, self.verdict)

    def execute(self) -> Verdict:
        """All of it."""
        self.drill.execute()
        entry, verdict = self.drill.entry, self.verdict
        for check in entry.checks:
            verdict.check(RULES_OF_CHECKS.get(check["what"], 1), check["held"], f"not so: {check['what']}")
        verdict.rows = entry.confirmed
        return verdict


def tortured(kind: type[Drill]) -> type[Drill]:
    """The drill, with faults before its disaster."""

    class Tortured(kind):
        def __init__(self, run: Run, knobs: Knobs, chance: random.Random, verdict: Verdict):
            super().__init__(run, knobs)
            self.chance, self.verdict = chance, verdict
            self.switches = {}
            for daemon in self.daemons:
                shim = FaultShim(run, daemon.host)
                daemon.environment |= shim.environment
                self.switches |= inside(f"the daemon of {daemon.host}", shim, chance, has_disk=False)
            shim = FaultShim(run, "backup", has_disk=True)
            self.rig.backup.environment |= shim.environment
            self.switches |= inside("the backup", shim, chance, has_disk=True)

        @property
        def daemons(self) -> list[HostDaemon]:
            return self.rig.daemons if self.several_guests else [self.rig.daemon]

        def trouble(self) -> None:
            """Faults, all of them undone. Then it may come back, or the disaster comes at once."""
            maker = Troublemaker(self.world(), self.chance)
            self.verdict.faults = maker.counts
            for _ in range(self.chance.randrange(1, 4)):
                maker.episode(3.0, self.suffer)
            if self.chance.random() < 0.6:
                self.come_back()

        def world(self) -> World:
            """Every daemon, the server and the WANs."""
            victims = [self.victim_of(daemon) for daemon in self.daemons]
            backup = self.rig.backup
            victims.append(Victim("backup", lambda: backup.process, backup.start))
            return World(victims, self.rig.net.wans, self.switches)

        def victim_of(self, daemon: HostDaemon) -> Victim:
            # A clean stop may take the other hosts, and as long as clients go on: it has tests of its own.
            name = f"daemon of {daemon.host}"
            return Victim(name, lambda: daemon.process, daemon.start, stops_cleanly=not self.several_guests)

        def suffer(self, seconds: float) -> None:
            """Lets the clients work; the guests must live through everything."""
            time.sleep(seconds)
            for process in (self.clients.process, *self.guest_processes()):
                if not process.alive():
                    raise RuntimeError(f"{process.name} ended under torture\n{process.tail()}")

        def come_back(self) -> None:
            """Clients get answers again without anybody's help."""
            since = time.monotonic()
            needs: list[Process] = [self.clients.process, *self.guest_processes()]
            try:
                wait_until("clients get answers again", lambda: self.answers_since(since), COMES_BACK_S, needs)
                self.wait_settled()
            except TimeoutError as error:
                self.verdict.check(8, False, str(error))
                return
            self.verdict.check(8, True, "")
            self.work(self.chance.uniform(0.2, 2))

        def wait_settled(self) -> None:
            if self.several_guests:
                self.rig.wait_state(self.settled, COMES_BACK_S)
            else:
                self.rig.daemon.wait_state(self.settled, COMES_BACK_S)

        def answers_since(self, since: float) -> bool:
            ledger = self.ledger.follow()
            return any(at > since and ledger.sent[row] > since for row, at in ledger.confirmed.items())

    return Tortured
