"""The faults, and how a round strings them together.

A `World` is what they are done to: processes that can be killed, stopped and started, the WAN, and what a round has
besides. Each fault has a *subject*; of one subject there is one fault at a time. A fault *bites* when it was met: a
request failed, a frame was lost. What was begun and met by nobody is counted as begun only.

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
from ..process import Process, has_stopped
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

FAVOURITE_SHARE = 0.5
"""How often the next fault is the round's favourite. What only some rounds have would hardly ever be drawn."""

Evidence = Callable[[], Callable[[], bool]]
"""Called before a fault begins; what it returns is asked before the fault ends, whether anything has met it."""


def rises(count: Callable[[], int]) -> Evidence:
    """A fault that is met makes this count rise."""

    def begin() -> Callable[[], bool]:
        before = count()
        return lambda: count() > before

    return begin


@dataclass(frozen=True)
class Switch:
    """A fault that is brought about and undone."""

    begin: Callable[[], None]
    end: Callable[[], None]
    evidence: Evidence
    subjects: frozenset[str] = frozenset()
    """What else it is done to."""


def inside(process: str, shim: FaultShim, chance: random.Random, has_disk: bool) -> dict[str, Switch]:
    """Faults inside a process: its clock, and what it reads, writes and syncs, if it goes there by system calls."""

    def met(field: str) -> Evidence:
        return rises(lambda: shim.met(field))

    faults = {
        f"clock: of {process}": Switch(
            lambda: shim.step_clock(chance.choice(CLOCK_STEPS_S)), lambda: shim.step_clock(0), met("clock_ahead_ns")
        )
    }
    for kind, delay_ms in SLOW_MS.items() if has_disk else ():
        faults[f"disk of {process}: {kind}s fail"] = Switch(
            partial(shim.fail_disk, kind, True), partial(shim.fail_disk, kind, False), met(f"{kind}_fails")
        )
        faults[f"disk of {process}: {kind}s are slow"] = Switch(
            partial(shim.slow_disk, kind, delay_ms), partial(shim.slow_disk, kind, 0), met(f"{kind}_delay_us")
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
    rare: frozenset[str] = frozenset()
    """Those that only some rounds have. One of them is the round's favourite."""


@dataclass(frozen=True)
class Fault:
    """One fault that is under way."""

    kind: str
    """As it is counted."""
    subjects: frozenset[str]
    begin: Callable[[], None]
    end: Callable[[], None]
    evidence: Evidence

    @property
    def group(self) -> str:
        """Faults that are alike."""
        return self.kind.partition(":")[0]


@dataclass
class _UnderWay:
    fault: Fault
    has_bitten: Callable[[], bool]


class Troublemaker:
    """Does one fault after the other, sometimes two at once."""

    def __init__(self, world: World, chance: random.Random):
        self.world, self.chance = world, chance
        self.counts: Counter[str] = Counter()
        self.bites: Counter[str] = Counter()
        """How many of them were met."""
        self.favourite = chance.choice(sorted(world.rare)) if world.rare else None
        self._under_way: list[_UnderWay] = []
        self._plain = [wan.params for wan in world.wans]

    @property
    def is_calm(self) -> bool:
        """Whether no fault is under way."""
        return not self._under_way

    def has_under_way(self, subject: str) -> bool:
        """Whether a fault is under way that has to do with it."""
        return any(subject in this.fault.subjects for this in self._under_way)

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
            this = self._under_way.pop(self.chance.randrange(len(self._under_way)))
            try:
                self._end(this)
            except RuntimeError:
                # Perhaps it cannot start as long as another fault lasts; somebody starts it again later.
                if not self._under_way:
                    raise
                self._under_way.insert(0, this)
                self._end(self._under_way.pop())
            between()

    def look(self) -> None:
        """Counts what has bitten so far: before the processes that it was done to are gone."""
        for this in self._under_way:
            if this.has_bitten():
                self.bites[this.fault.kind] += 1
                this.has_bitten = lambda: False

    def _begin(self, fault: Fault | None) -> None:
        if fault is None:
            return
        say(f"fault: {fault.kind}")
        self.counts[fault.kind] += 1
        # First, so that what was half done is undone, too.
        self._under_way.append(_UnderWay(fault, fault.evidence()))
        fault.begin()

    def _end(self, this: _UnderWay) -> None:
        if this.has_bitten():
            self.bites[this.fault.kind] += 1
            this.has_bitten = lambda: False
        this.fault.end()

    def _choose(self) -> Fault | None:
        busy = frozenset[str]().union(*(this.fault.subjects for this in self._under_way))
        free = [fault for fault in self._all() if not fault.subjects & busy]
        favourites = [fault for fault in free if fault.kind == self.favourite]
        if favourites and self.chance.random() < FAVOURITE_SHARE:
            return favourites[0]
        # Each group of faults equally often, however many there are in it.
        groups = sorted({fault.group for fault in free})
        if not groups:
            return None
        group = self.chance.choice(groups)
        return self.chance.choice([fault for fault in free if fault.group == group])

    def _all(self) -> list[Fault]:
        world = self.world
        faults = [fault for victim in world.victims for fault in self._of_victim(victim)]
        everybody = frozenset(victim.name for victim in world.victims)
        processes = [victim.process for victim in world.victims]
        faults.append(
            Fault(
                "kill -9 at once: all", everybody, self._kill_all, self._start_all, lambda: partial(_ended, processes)
            )
        )
        for number, wan in enumerate(world.wans):
            subject = frozenset({f"wan {number}"})
            faults.append(Fault("link: cut", subject, wan.cut, wan.mend, _on_link(wan, "dropped_cut")))
            for what, changes in WORSE.items():
                begin, end = self._worsen(wan, changes), self._restore(number)
                faults.append(Fault(f"link: {what}", subject, begin, end, _on_link(wan, *COUNTED_AS.get(what, ()))))
        for name, switch in world.switches.items():
            subjects = switch.subjects | {name}
            faults.append(Fault(name, subjects, switch.begin, switch.end, switch.evidence))
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

        has_ended: Evidence = lambda: partial(_ended, [victim.process])  # noqa: E731
        faults = [
            Fault(f"kill -9: {victim.name}", subject, kill, victim.start, has_ended),
            Fault(f"SIGSTOP: {victim.name}", subject, stop, go_on, lambda: partial(_is_stopped, victim.process)),
        ]
        if victim.stops_cleanly:
            # It may take the others to end cleanly: nothing else is under way meanwhile.
            everything = frozenset(v.name for v in self.world.victims) | {f"wan {n}" for n in range(len(self._plain))}
            everything |= set(self.world.switches)
            faults.append(Fault(f"SIGTERM: {victim.name}", everything, end, victim.start, has_ended))
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
            # Of those that were to be started before, one could not be.
            if not victim.process().alive():
                victim.start()

    @staticmethod
    def _worsen(wan: Wan, changes: dict) -> Callable[[], None]:
        def begin() -> None:
            more = {"delay_ms": wan.params.delay_ms + changes["delay_ms"]} if "delay_ms" in changes else {}
            wan.set(**{**changes, **more})

        return begin

    def _restore(self, number: int) -> Callable[[], None]:
        return lambda: self.world.wans[number].set(**self._plain[number].__dict__)


COUNTED_AS = {
    "loss": ("lost",),
    "duplicates": ("duplicated",),
    "corruption": ("corrupted",),
    "a narrow bottleneck": ("dropped_queue",),
    "all of it": ("lost", "duplicated", "corrupted"),
}
"""How a link counts what it does to frames. Delay meets every frame that passes."""


def _on_link(wan: Wan, *counters: str) -> Evidence:
    def count() -> int:
        stats = wan.stats().values()
        # netem has one counter for all that it does not let through.
        return sum(one.get(name, one["dropped"]) for one in stats for name in counters or ("frames_out",))

    return rises(count)


def _ended(processes: list[Callable[[], Process]]) -> bool:
    return not any(process().alive() for process in processes)


def _is_stopped(process: Callable[[], Process]) -> bool:
    return has_stopped(process().pid)
