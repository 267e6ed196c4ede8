"""The way back of a group of several members, there and home again: adopted while the guests run, or exported."""

from __future__ import annotations

from app_drills import drilled

from tidelock_testbed.appdrill import TwoHosts, TwoWriters
from tidelock_testbed.groupfailback import ByAdoption, ByExport, GoesHome, GroupFailback
from tidelock_testbed.paths import BIN
from tidelock_testbed.process import Process, kill_at_once
from tidelock_testbed.progress import say


class SecondDisaster(GoesHome):
    """The second site is lost in a disaster, too, before the group has gone home."""

    def go_home(self) -> None:
        """In place of a switch the disaster: right after a client was told something."""
        self.worst_moment()
        self.left_at = self.event("second disaster")
        kill_at_once([*self.guest_processes(), *self.storage_processes(), self.daemon.process])
        self.rig.net.wans[0].cut()
        say("DISASTER: the second site is gone")
        self.recover_home("--primary-is-dead")


class FromOneHost(ByExport, TwoWriters):
    """All members ran on one host, and go home to it."""

    name = "two-writers-go-home"


class FromTwoHosts(SecondDisaster, ByExport, TwoHosts):
    """They ran on two hosts, run on one away, and are on their own again at home."""

    name = "two-hosts-go-home"


class AdoptedFromTwoHosts(SecondDisaster, ByAdoption, TwoHosts):
    """The same, and away they are never stopped."""

    name = "two-hosts-adopted"

    def take_disks(self) -> None:
        """A daemon that has only a part of the group does not begin."""
        daemon, whole = self.daemon, self.daemon.config.read_text()
        daemon.adopt(*self.monitors(), "--prepare", group=self.rig.name)
        daemon.config.write_text(whole.replace('name = "b"\n', 'name = "b"\nhost = "elsewhere"\n', 1))
        ended = Process(self.run, "part", [BIN / "tidelockd", "--config", daemon.config], daemon.netns)
        assert ended.wait(30) != 0 and "b runs on another host" in ended.tail(), ended.tail()
        daemon.config.write_text(whole)
        super().take_disks()


def test_two_members_of_one_host_come_home_by_a_planned_switch(run):
    entry = drilled(run, FromOneHost, rtt_ms=20, seed=1).entry
    assert entry.passed, str(entry)


def test_two_members_of_two_hosts_come_home_after_a_second_disaster(run):
    entry = drilled(run, FromTwoHosts, rtt_ms=20, seed=1).entry
    assert entry.passed, str(entry)


def test_two_members_are_adopted_while_they_run_and_come_home(run):
    """Rows of one depend on rows of the other that were written while neither was recorded."""
    entry = drilled(run, GroupFailback, rtt_ms=20, seed=2).entry
    assert entry.passed, str(entry)


def test_what_clients_were_told_by_two_adopted_members_survives_the_second_site(run):
    entry = drilled(run, AdoptedFromTwoHosts, rtt_ms=20, seed=2, form="hlc").entry
    assert entry.passed, str(entry)
