"""An application of several tiers to measure: PostgreSQL guests of this machine's kernel, each with its web service."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass, replace
from pathlib import Path

from ..applications import Application
from ..fleet import Fleet, Shape
from ..guest import Guest, ProcessGuest
from ..hostdaemon import ControlClient, Protection
from ..ledger import Ledger
from ..net import Site
from ..netns import Netns
from ..process import wait_until
from ..run import Run
from ..workload import Clients
from .postgres import PostgresGuest, database_disk
from .servers import OURS

DISK_MIB = 256
LAYOUTS = {"one host": (0, 0, 0), "two hosts": (0, 1, 0)}
"""On which host each tier runs, from the front on. On two every packet between neighbours crosses the hosts' LAN."""
WARM_UP_REPLIES = 3
"""A connection's first requests open connections of their own behind the front tier: they are not counted."""


def lay_out(layout: str, application: Application, rtt_ms: float, **options) -> Shape:
    """An application's tiers on the hosts of a layout, each of which is this far from the backup."""
    hosts = {place.name: host for place, host in zip(application.places, LAYOUTS[layout], strict=False)}
    return Shape(application, hosts, (rtt_ms,) * (1 + max(hosts.values())), **options)


class TierGuest(PostgresGuest):
    """PostgreSQL and a web service in a namespace of their own."""

    def __init__(self, run: Run, net, name: str, web: list[str] | None):
        super().__init__(run, net, name, web)
        self.netns = Netns(run, name)

    def _add_interface(self, site: Site) -> None:
        site.add_veth(self.net, self.netns)


class BenchFleet(Fleet):
    """Tiers as processes: real databases on replicated disks, quick enough to measure. They are not recovered."""

    def __init__(self, run: Run, shape: Shape):
        super().__init__(run, "postgres", shape, 1, Protection())
        self.turns = 0

    def make_guest(self, place: str, name: str) -> Guest:
        """A tier without a database needs only an interpreter."""
        application = self.shape.application
        kind = TierGuest if place in application.databases else ProcessGuest
        return kind(self.run, self.nets[place], name, application.web(place, "postgres", self.nets))

    def make_disk(self, directory: Path, name: str) -> Path:
        """An initialised database on ext4."""
        return database_disk(self.run, self.image, directory / f"{name}.img", DISK_MIB)

    def boot_at(self, guest: Guest, site: Site, disks: list[str], reconnect_s: int = 0, say_rows: bool = False) -> None:
        """Starts a tier; a database that is not protected is on the same server without a backup."""
        if isinstance(guest, ProcessGuest):
            guest.boot(site, [])
            return
        if not disks:
            image = self.make_disk(self.run.directory, f"plain-{guest.name}")
            disks = [replace(OURS, key=f"plain-{guest.name}").start(self.run, image)[1]]
        guest.plug_in(site)
        guest.boot(guest.netns, self.image, disks[0])

    def start(self) -> None:
        """Everything up, and the first copies made."""
        self.backup.start()
        self.plug_in()
        for daemon in self.daemons:
            daemon.start()
        self.wait_state("protected", 300)
        self.boot()
        for guest in self.guests.values():
            guest.wait_ready()
        self.mode = "pipelined"

    def set_mode(self, mode: str) -> None:
        """Switches every group's mode; in force on return."""
        if mode == self.mode:
            return
        for number, daemon in enumerate(self.daemons):
            for group in self.groups:
                if self.is_on(group, number):
                    control = ControlClient(daemon.control_socket)
                    control.ask(command="mode", group=group.name, mode=mode)
                    control.close()
                    wait_until(f"the mode is {mode}", lambda d=daemon, g=group: d.group(g.name)["mode"] == mode, 10)
        self.mode = mode

    def members(self) -> list[dict]:
        """The status of each member at its own host."""
        return [m for d in self.daemons for group in d.status()["groups"] for m in group["members"]]

    def tagged_packets(self) -> int:
        """Packets that have left a member with a tag so far."""
        return sum(member["tagging"]["tagged_packets"] for member in self.members() if member["tagging"])

    def settle(self) -> None:
        """Waits until the backup has every write, so that the next turn is not disturbed."""

        def settled() -> bool:
            return all(member["writer"]["lag"]["writes"] == 0 for member in self.members() if member["writer"])

        wait_until("the backup has every write", settled, 60, [daemon.process for daemon in self.daemons])

    def clients(self, number: int, *options: object) -> Clients:
        """Clients whose rows no other turn has."""
        self.turns += 1
        words = ["--first", self.turns * 1000, *options]
        return Clients(self.run, self.net, self.front, number, f"turn-{self.turns}", [str(word) for word in words])


@dataclass(frozen=True)
class Replies:
    """Reply times of a turn."""

    mean_ms: float
    p50_ms: float
    deviation_ms: float
    per_s: float
    tagged: float = 0.0
    """Packets with a tag for each reply."""

    @staticmethod
    def of(ledger: Ledger, begin: float, end: float) -> "Replies":
        """Those that came in this time, but each client's first ones."""
        counted = [row for row, at in ledger.confirmed.items() if row[1] > WARM_UP_REPLIES and begin <= at < end]
        times = [(ledger.confirmed[row] - ledger.sent[row]) * 1e3 for row in counted]
        if len(times) < 2:
            raise RuntimeError(f"only {len(times)} replies in {end - begin:.1f} s: {ledger.path}")
        middle, deviation = statistics.median(times), statistics.stdev(times)
        return Replies(statistics.mean(times), middle, deviation, len(times) / (end - begin))


def work(seconds: float, *started: Clients) -> tuple[float, float]:
    """Lets clients work, counted from when each of them has had replies; returns that time's begin and end."""
    for clients in started:
        wait_until("the first replies have come", lambda c=clients: c.ledger.follow().confirmed, 60, [clients.process])
    begin = time.monotonic()
    time.sleep(seconds)
    return begin, time.monotonic()


def turn(fleet: BenchFleet, mode: str, seconds: float, *options: object) -> Replies:
    """One client that writes a row after the other, in a mode."""
    fleet.set_mode(mode)
    tagged = fleet.tagged_packets()
    clients = fleet.clients(1, *options)
    begin, end = work(seconds, clients)
    ledger = clients.stop()
    fleet.settle()
    tagged = fleet.tagged_packets() - tagged
    return replace(Replies.of(ledger, begin, end), tagged=tagged / len(ledger.confirmed))
