"""A backlog on disk in a group of several members, on two hosts: a daemon that is killed goes on with its stream, and
one whose backlog is full lets its guest go on, of which others hear. What they do because of it comes back with all
that it depends on, or not at all (DESIGN rules 1, 2, 8 and 9)."""

from __future__ import annotations

import random
import time
from dataclasses import replace

import pytest
from app_drills import drilled

from tidelock_testbed import nbdwire
from tidelock_testbed.appdrill import TwoHosts
from tidelock_testbed.drilling import NEVER_MIND_S
from tidelock_testbed.fleet import Fleet
from tidelock_testbed.hostdaemon import HostDaemon, Protection
from tidelock_testbed.process import wait_until
from tidelock_testbed.progress import say
from tidelock_testbed.risk import word_of

MIB = 1 << 20
MORE, MORE_MIB = "more", 16
"""A second disk of `a`, which the test fills the backlog with."""
ROWS = 20


class KeepsItsBacklog(TwoHosts):
    """Each writer has the smallest backlog on disk, and the first one a disk more."""

    def make_rig(self, protection: Protection) -> Fleet:
        """Two sites, with it."""
        fleet = super().make_rig(replace(protection, backlog="32MiB", backlog_on_disk="64MiB"))
        a, *others = fleet.groups[0].members
        more = fleet.directories[0] / "more.img"
        more.write_bytes(bytes(MORE_MIB * MIB))
        a = replace(a, disks={**a.disks, MORE: more})
        fleet.groups = [replace(fleet.groups[0], members=[a, *others])]
        for daemon in fleet.daemons:
            daemon.configure(fleet.groups)
        return fleet

    @property
    def first(self) -> HostDaemon:
        """The daemon of `a`."""
        return self.rig.daemons[0]

    def first_log(self) -> str:
        """What it has said since its start."""
        return self.first.process.log.read_text()

    def comes_back(self) -> None:
        """The link is whole again: clients are answered, and the group is protected."""
        mended = self.event("link heals")
        self.rig.net.wans[0].mend()
        needs = [self.clients.process, *self.guest_processes()]
        wait_until("clients get answers", lambda: self.answered(self.ledger, mended) >= ROWS, NEVER_MIND_S, needs)
        self.rig.wait_state(self.settled, NEVER_MIND_S)
        self.work(1)


class GoesOn(KeepsItsBacklog):
    """The daemon of the host without a link is killed, and started again."""

    name = "goes-on"

    def trouble(self) -> None:
        """Before the link is back."""
        self.rig.net.wans[0].cut()
        cut_at = self.event("link of host-a cut")
        self.work(1)
        self.first.process.kill()
        say("TROUBLE: host-a has no link, and its daemon is killed")
        time.sleep(self.random.uniform(0, 0.5))
        self.first.start()
        self.work(1)
        answered = self.answered(self.ledger, cut_at)
        self.check("no client was told of what waits", answered == 0)
        self.comes_back()
        said = "going on with the backlog on disk, nothing is compared"
        self.check("the next daemon goes on with the stream", said in self.first_log())
        self.check("nothing was compared", "purpose=Compare" not in self.first_log())


class Overflows(KeepsItsBacklog):
    """The backlog of the host without a link is full, and its guest goes on."""

    name = "overflows"

    def trouble(self) -> None:
        """Others hear of what has no record."""
        self.overflow()
        self.work(1)
        gate = self.sampler.members["front"]["gates"][0]
        self.check("host-b holds replies that may depend on what has no record", gate["held_packets"] > 0)
        self.check("no client was told of it", self.answered(self.ledger, self.overflowed_at) == 0)
        self.comes_back()
        self.check("what has no record was compared", "purpose=Compare" in self.first_log())

    def overflow(self) -> None:
        """Fills the backlog."""
        self.rig.net.wans[0].cut()
        group = self.rig.name
        disk = nbdwire.Connection(self.first.runtime / group / "a" / f"{MORE}.sock", MORE)
        content = random.Random(f"more {self.knobs.seed}").randbytes(MIB)
        written, end = 0, time.monotonic() + NEVER_MIND_S
        while word_of(self.first.group(group)) != "unrecorded":
            assert time.monotonic() < end, self.first.group(group)
            disk.write(written % MORE_MIB * MIB, content)
            written += 1
        disk.close()
        self.overflowed_at = self.event("host-a overflowed")
        say(f"TROUBLE: host-a has no link, and its backlog is full after {written} MiB")


class DiesOverflowed(Overflows):
    """The disaster comes before the link is back."""

    name = "dies-overflowed"

    def trouble(self) -> None:
        """What of the other writer depends on writes without a record is at the backup, and must not come back."""
        self.overflow()
        self.work(1)
        backup = self.rig.backup
        ahead = "the backup has what depends on writes without a record"
        wait_until(ahead, lambda: backup.status()["groups"][0]["beyond_the_cut"], 60, [backup.process])


def test_a_daemon_that_is_killed_in_an_outage_goes_on_with_its_stream(run):
    entry = drilled(run, GoesOn, rtt_ms=20, seed=1, form="vector").entry
    assert entry.passed, str(entry)


@pytest.mark.parametrize("form", ["vector", "hlc"])
def test_others_wait_for_what_has_no_record_and_all_comes_back(run, form):
    entry = drilled(run, Overflows, rtt_ms=20, seed=1, form=form).entry
    assert entry.passed, str(entry)


@pytest.mark.parametrize("form", ["vector", "hlc"])
def test_a_disaster_leaves_out_what_depends_on_what_has_no_record(run, form):
    entry = drilled(run, DiesOverflowed, rtt_ms=20, seed=1, form=form).entry
    assert entry.passed, str(entry)
    assert any(text.startswith("b: ") for text in entry.left_out), entry
