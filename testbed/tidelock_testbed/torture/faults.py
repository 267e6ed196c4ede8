"""The faults, and how a round strings them together.

A `World` is what they are done to: processes that can be killed, stopped and started, the WAN, and what a round has
besides. Each fault has a *subject*; of one subject there is one fault at a time.

Invariant: when `Troublemaker.heal` has returned, every process runs, the WAN is as it was, and nothing is full.
"""

from __future__ import annotations

import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from ..faultshim import FaultShim
from ..process import Process
from ..progress import say
from ..wan import Wan

WORSE = {
    "delay": {"delay_ms": 80},
    "jitter that changes the order": {"delay_ms": 10, "jitter_ms": 8, "reorder": True},
    "loss": {"loss": 0.02},
    "duplicates": {"duplicate": 0.05},
    "corruption": {"corrupt": 0.002},
    "a narrow bottleneck": {"rate_bytes_per_s": 2e6, "queue_bytes": 200_000},
    "all of it": {"delay_ms": 20, "jitter_ms": 10, "reorder": True, "loss": 0.01, "duplicate": 0.01, "corrupt": 0.0005},
}
"""What may happen to packets on the link, and how much of it."""


CLOCK_STEPS_S = [-3600, -30, -0.5, 0.5, 8, 30, 3600]
"""How far a wall clock is set ahead. Hosts follow one that steps a little, and not one that steps far."""
SLOW_MS = {"sync": 40, "write": 5, "read": 2}
"""How much longer a request to a slow disk takes."""

Switch = tuple[Callable[[], None], Callable[[], None]]
"""What brings a fault about, and what undoes it."""


def inside(process: str, shim: FaultShim, chance: random.Random, has_disk: bool) -> dict[str, Switch]:
    """Faults inside a process: its clock, and what it reads, writes and syncs, if it goes there by system calls."""
    faults = {
        f"clock: of {process}": (lambda: shim.step_clock(chance.choice(CLOCK_STEPS_S)), lambda: shim.step_clock(0))
    }
    for kind, delay_ms in SLOW_MS.items() if has_disk else ():
        faults[f"disk: {process}'s {kind}s fail"] = (
            partial(shim.fail_disk, kind, True),
            partial(shim.fail_disk, kind, False),
        )
        faults[f"disk: {process}'s {kind}s are slow"] = (
            partial(shim.slow_disk, kind, delay_ms),
            partial(shim.slow_disk, kind, 0),
        )
    return faults


@dataclass
class Victim:
    """A process that may be killed at any moment."""

    name: str
    process: Callable[[], Process]
    start: Callable[[], None]
    """Starts it again and waits until it answers."""
    vanished: Callable[[], None] = lambda: None
    """Called after it was killed or has ended."""
    stops_cleanly: bool = True
    """Whether it can be asked to end now."""


@dataclass
class World:
    """What faults are done to."""

    victims: list[Victim]
    wans: list[Wan]
    switches: dict[str, Switch] = field(default_factory=dict)
    """Other faults of this kind of round."""


@dataclass(frozen=True)
class Fault:
    """One fault that is under way."""

    kind: str
    """As it is counted."""
    subjects: frozenset[str]
    begin: Callable[[], None]
    end: Callable[[], None]


class Troublemaker:
    """Does one fault after the other, sometimes two at once."""

    def __init__(self, world: World, chance: random.Random):
        self.world, self.chance = world, chance
        self.counts: Counter[str] = Counter()
        self._under_way: list[Fault] = []
        self._plain = [wan.params for wan in world.wans]

    def episode(self, longest_s: float, meanwhile: Callable[[float], None] = time.sleep) -> None:
        """Some faults begin, things go on for a while, the faults end in any order."""
        for _ in range(self.chance.choice([1, 1, 2])):
            self.begin_one()
            meanwhile(self.chance.uniform(0, longest_s / 4))
        meanwhile(self.chance.uniform(0.05, longest_s))
        self.heal(lambda: meanwhile(self.chance.uniform(0, longest_s / 4)))

    def begin_one(self) -> None:
        """A fault begins, which is undone by the next `heal`."""
        self._begin(self._choose())

    def heal(self, between: Callable[[], None] = lambda: None) -> None:
        """Ends what is under way."""
        while self._under_way:
            fault = self._under_way.pop(self.chance.randrange(len(self._under_way)))
            try:
                fault.end()
            except RuntimeError:
                # Perhaps it cannot start as long as another fault lasts; somebody starts it again later.
                if not self._under_way:
                    raise
                self._under_way.insert(0, fault)
                self._under_way.pop().end()
            between()

    def _begin(self, fault: Fault | None) -> None:
        if fault is None:
            return
        say(f"fault: {fault.kind}")
        self.counts[fault.kind] += 1
        # First, so that what was half done is undone, too.
        self._under_way.append(fault)
        fault.begin()

    def _choose(self) -> Fault | None:
        busy = frozenset[str]().union(*(fault.subjects for fault in self._under_way))
        free = [fault for fault in self._all() if not fault.subjects & busy]
        # Each group of faults equally often, however many there are in it.
        groups = sorted({fault.kind.partition(":")[0] for fault in free})
        if not groups:
            return None
        group = self.chance.choice(groups)
        return self.chance.choice([fault for fault in free if fault.kind.partition(":")[0] == group])

    def _all(self) -> list[Fault]:
        world = self.world
        faults = [fault for victim in world.victims for fault in self._of_victim(victim)]
        everybody = frozenset(victim.name for victim in world.victims)
        faults.append(Fault("kill -9 at once: all", everybody, self._kill_all, self._start_all))
        for number, wan in enumerate(world.wans):
            subject = frozenset({f"wan {number}"})
            faults.append(Fault("link: cut", subject, wan.cut, wan.mend))
            for what, changes in WORSE.items():
                faults.append(Fault(f"link: {what}", subject, self._worsen(wan, changes), self._restore(number)))
        for name, (begin, end) in world.switches.items():
            faults.append(Fault(name, frozenset({name}), begin, end))
        return faults

    def _of_victim(self, victim: Victim) -> list[Fault]:
        subject = frozenset({victim.name})

        def kill() -> None:
            victim.process().kill()
            victim.vanished()

        def stop() -> None:
            victim.process().signal(signal.SIGSTOP)

        def go_on() -> None:
            victim.process().signal(signal.SIGCONT)

        def end() -> None:
            victim.process().stop(timeout_s=120)
            victim.vanished()

        faults = [
            Fault(f"kill -9: {victim.name}", subject, kill, victim.start),
            Fault(f"SIGSTOP: {victim.name}", subject, stop, go_on),
        ]
        if victim.stops_cleanly:
            # It may take the others to end cleanly: nothing else is under way meanwhile.
            everything = frozenset(v.name for v in self.world.victims) | {f"wan {n}" for n in range(len(self._plain))}
            faults.append(Fault(f"SIGTERM: {victim.name}", everything | set(self.world.switches), end, victim.start))
        return faults

    def _kill_all(self) -> None:
        victims = list(self.world.victims)
        self.chance.shuffle(victims)
        for victim in victims:
            victim.process().signal(signal.SIGKILL)
        for victim in victims:
            victim.process().kill()
            victim.vanished()

    def _start_all(self) -> None:
        victims = list(self.world.victims)
        self.chance.shuffle(victims)
        for victim in victims:
            victim.start()

    @staticmethod
    def _worsen(wan: Wan, changes: dict) -> Callable[[], None]:
        def begin() -> None:
            more = {"delay_ms": wan.params.delay_ms + changes["delay_ms"]} if "delay_ms" in changes else {}
            wan.set(**{**changes, **more})

        return begin

    def _restore(self, number: int) -> Callable[[], None]:
        return lambda: self.world.wans[number].set(**self._plain[number].__dict__)
