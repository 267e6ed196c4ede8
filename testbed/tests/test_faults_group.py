"""Groups of several members under faults and changes, with real processes: what depends on what is away waits, what
does not goes on, and members and disks come and go while history stays.
"""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
from app_drills import drilled

from tidelock_testbed import nbdwire
from tidelock_testbed.appdrill import OneHostDies, TwoHosts
from tidelock_testbed.applications import Place
from tidelock_testbed.drilling import NEVER_MIND_S
from tidelock_testbed.fleet import DISK, HOSTS
from tidelock_testbed.hostdaemon import Member
from tidelock_testbed.invariants import Rows
from tidelock_testbed.ledger import compare
from tidelock_testbed.net import GuestNet
from tidelock_testbed.process import wait_until
from tidelock_testbed.progress import say
from tidelock_testbed.workload import Clients, rows_in

MIB = 1 << 20
FAR_BEHIND = 20
MORE = "more"
ROWS = 20


class OneFarBehind(TwoHosts):
    """Each writer depends on the other, and what one of them writes arrives much later."""

    name = "one-far-behind"

    @property
    def round_trips_ms(self) -> tuple[float, ...]:
        return (self.knobs.rtt_ms * FAR_BEHIND, self.knobs.rtt_ms)

    def disaster(self) -> None:
        """It begins with the slow link, until the other has brought what depends on writes that never come."""
        self.check("replies waited for the slow link", self.sampler.extremes.hold_ms >= self.knobs.rtt_ms * 2)
        self.rig.net.wans[0].cut()

        backup = self.rig.backup
        ahead = "the backup has what depends on the slow one"
        wait_until(ahead, lambda: backup.status()["groups"][0]["beyond_the_cut"], 30, [backup.process])
        super().disaster()


@pytest.mark.parametrize("form", ["vector", "hlc"])
def test_writers_with_crossing_dependencies_and_one_slow_link(run, form):
    entry = drilled(run, OneFarBehind, rtt_ms=20, seed=1, form=form).entry
    assert entry.passed, str(entry)
    # All of b had arrived; what of it depends on a, which had not, must not come back.
    assert any(text.startswith("b: ") for text in entry.left_out), entry


class HearsNothing(OneHostDies):
    """The same fault, with packets that carry no tags: the check that something is held must notice."""

    name = "hears-nothing"


def test_without_tags_nothing_waits_for_the_dead_host_and_the_drill_notices(run):
    entry = drilled(run, HearsNothing, rtt_ms=50, seed=1, tagging=False).entry
    broken = {check["what"] for check in entry.checks if not check["passed"]}
    assert "replies that may depend on host-a were held by host-b as long as it was away" in broken
    assert entry.violated


class Grows(TwoHosts):
    """A writer is added to a running group, and a disk to another one, by configuration and a restart."""

    name = "grows"
    window = "1h"

    def __init__(self, *words):
        super().__init__(*words)
        self.past: dict[str, dict[str, bytes]] = {}
        """Points in time by their bookmarks: what each disk had then."""

    def trouble(self) -> None:
        """The change, and work after it."""
        self.add_writer_and_disk()
        self.work_on()

    def add_writer_and_disk(self) -> None:
        """`c` comes to the second host, and `a` has another disk."""
        fleet = self.rig
        shape = fleet.shape
        place = Place("c", database=True, web=False, aside=True)
        application = replace(shape.application, places=(*shape.application.places, place))
        fleet.shape = replace(shape, application=application, hosts={**shape.hosts, place.name: 1})
        net = fleet.nets[place.name] = GuestNet(len(fleet.nets), segment=True, host=1)
        self.c = fleet.guests[place.name] = fleet.make_guest(place.name, place.name)
        self.c.plug_in(fleet.net.hosts[1])
        fleet.net.route_clients_to(fleet.net.hosts[1], net)
        a, *others = fleet.groups[0].members
        self.more = random.Random(f"more {self.knobs.seed}").randbytes(MIB)
        (fleet.directories[0] / "more.img").write_bytes(bytes(4 * MIB))
        a = replace(a, disks={**a.disks, MORE: fleet.directories[0] / "more.img"})
        c = Member(place.name, net, {DISK: fleet.make_disk(fleet.directories[1], place.name)}, host=HOSTS[1])
        self.stop_for("grows")
        self.reconfigure([a, *others, c])
        self.c.boot(fleet.net.hosts[1], [fleet.daemons[1].uri(DISK, fleet.name, place.name)], reconnect_s=60)
        self.c.wait_ready()
        self.clients_of_c = Clients(self.run, fleet.net, self.c, 2, name="clients-of-c", options=self.patience())
        rows = self.clients_of_c.ledger
        wait_until("c has confirmed rows", lambda: len(rows.follow().confirmed) >= ROWS, 60, self.c.processes)
        disk = nbdwire.Connection(fleet.daemons[0].runtime / fleet.name / "a" / f"{MORE}.sock", MORE)
        disk.write(MIB, self.more)
        disk.flush()
        disk.close()

    def reconfigure(self, members: list[Member]) -> None:
        """The same change on every host, whose daemons do not run, and all up again."""
        fleet = self.rig
        fleet.groups = [replace(fleet.groups[0], members=members)]
        for daemon in fleet.daemons:
            daemon.configure(fleet.groups)
        for daemon in fleet.daemons:
            daemon.start()
        fleet.wait_state(self.settled, NEVER_MIND_S)
        self.check_past()
        say(f"the group has the members {', '.join(member.name for member in members)}, and is {self.settled}")

    def stop_for(self, change: str) -> None:
        """Bookmarks before a change: while guests write, and when all is at the backup, with what is there then."""
        fleet = self.rig
        while_writing, at_the_stop = f"before-it-{change}", f"as-it-{change}"
        fleet.daemons[0].bookmark(while_writing, fleet.name)
        self.past[while_writing] = {disk: self.seen(disk, f"bookmark:{while_writing}") for disk in self.disks()}
        self.stop_daemons()
        fleet.backup.bookmark(at_the_stop, fleet.name)
        self.past[at_the_stop] = {disk: path.read_bytes() for disk, path in self.disks().items()}

    def disks(self) -> dict[str, Path]:
        """Of all writers, at the primary site."""
        members = [member for member in self.rig.groups[0].members if not member.removed]
        return {f"{member.name}.{disk}": path for member in members for disk, path in member.disks.items()}

    def seen(self, disk: str, at: str) -> bytes:
        """A disk as the backup shows it at a point in time."""
        fleet = self.rig
        member, name = disk.split(".")
        out = self.run.directory / "past.img"
        fleet.backup.export(name, out, at, fleet.name, member)
        content = out.read_bytes()
        out.unlink()
        return content

    def check_past(self) -> None:
        """The past is what it was, whatever has come to the group, left it and been recovered since."""
        for bookmark, disks in self.past.items():
            same = all(self.seen(disk, f"bookmark:{bookmark}") == content for disk, content in disks.items())
            self.check(f"at {bookmark} the disks {', '.join(disks)} are what they were", same)

    def stop_daemons(self) -> None:
        """All at once: each waits until what it has heard of the others is at the backup."""
        for daemon in self.rig.daemons:
            daemon.process.popen.terminate()
        for daemon in self.rig.daemons:
            assert daemon.process.wait(60) == 0, daemon.process.tail()

    def work_on(self) -> None:
        """Waits until the application's clients are answered, and lets them work."""
        begun = self.event("changed")
        needs = [self.clients.process, *self.guest_processes()]
        wait_until("clients get answers again", lambda: self.answered(self.ledger, begun) >= ROWS, 60, needs)
        self.work(1)

    def judge(self) -> None:
        """Also of what was added, and of the past."""
        self.judge_added()
        self.check_past()
        now = {disk: self.seen(disk, "latest") for disk in ("a.data", "b.data")}
        moved = all(then[disk] != now[disk] for then in self.past.values() for disk in now)
        self.check("guests have written to their disks since", moved)
        super().judge()

    def judge_added(self) -> None:
        """The new writer has every row that it confirmed, the new disk its bytes."""
        fleet = self.rig
        ledger = self.clients_of_c.stop().sent_before(self.gone_at)
        verdict = compare(ledger, self.rows_before_the_disaster(ledger), self.gone_at)
        self.check("the new writer's rows are there", verdict.confirmed >= ROWS and not verdict.lost)
        self.check("the new writer has no row that nobody sent", not verdict.foreign)
        disk = nbdwire.Connection(fleet.backup.exports / fleet.name / f"a.{MORE}.sock", f"a.{MORE}")
        self.check("the new disk has what was written", disk.read(MIB, MIB) == self.more)
        self.check("and zeros elsewhere", disk.read(0, MIB) + disk.read(2 * MIB, 2 * MIB) == bytes(3 * MIB))
        disk.close()

    def rows_before_the_disaster(self, ledger) -> Rows:
        """Of `c`: its clients find it again and go on, and these rows are not the question."""
        later = self.clients_of_c.ledger.sent.keys() - ledger.sent.keys()
        return rows_in(self.rig.net, self.recovery.guests["c"]) - later


def test_a_writer_and_a_disk_are_added_and_history_stays(run):
    entry = drilled(run, Grows, rtt_ms=20, seed=1, form="vector").entry
    assert entry.passed, str(entry)
    assert set(entry.cut) == {"a", "b", "c"}


class Shrinks(Grows):
    """Then it is removed again, and nothing waits for it any more."""

    name = "shrinks"

    def trouble(self) -> None:
        """The writer comes and goes."""
        self.add_writer_and_disk()
        self.work_on()
        fleet = self.rig
        self.stop_for("shrinks")
        self.clients_of_c.stop()
        self.c.kill()
        del fleet.guests["c"]
        fleet.backup.remove(fleet.name, "c")
        *others, c = fleet.groups[0].members
        self.reconfigure([*others, replace(c, removed=True)])
        self.work_on()

    def judge_added(self) -> None:
        """It is not recovered."""
        writers = self.recovery.answers[self.rig.name]["writers"]
        recovered = {writer["member"]: writer["is_recovered"] for writer in writers}
        self.check("the removed writer is not recovered", recovered == {"a": True, "b": True, "c": False})


def test_a_writer_is_removed_and_protection_goes_on(run):
    """With times for tags, in which one silent writer holds everything: a removed one must not."""
    entry = drilled(run, Shrinks, rtt_ms=20, seed=1, form="hlc").entry
    assert entry.passed, str(entry)
