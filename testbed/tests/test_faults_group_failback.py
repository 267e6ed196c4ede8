"""The way back of a group of several members: it runs at the second site after a disaster, is protected from there to
where it came from, by an export and by seeding, and goes home. One ledger of the clients for all of it: nothing that
they were told is lost (docs/operations.md, section 15)."""

from __future__ import annotations

import filecmp
import json
import re
from dataclasses import replace
from pathlib import Path

from app_drills import drilled

from tidelock_testbed.appdrill import AppDrill, TwoHosts, TwoWriters
from tidelock_testbed.backupserver import BackupServer
from tidelock_testbed.drilling import CONFIRMED_MIN, NEVER_MIND_S, SERVED_AGAIN
from tidelock_testbed.fleet import DISK, Fleet, FleetRecovery
from tidelock_testbed.hostdaemon import HostDaemon, Protection
from tidelock_testbed.ledger import Ledger
from tidelock_testbed.net import Site
from tidelock_testbed.paths import BIN
from tidelock_testbed.pki import Pki
from tidelock_testbed.process import Process, kill_at_once, run_command, wait_until
from tidelock_testbed.progress import say

HOST_AWAY = "host-c"


class GoesHome(AppDrill):
    """All members go over to the second site in a disaster, and back to the first one by a planned switch."""

    def make_rig(self, protection: Protection) -> Fleet:
        """Two sites; the first keeps its disks through the disaster."""
        fleet = super().make_rig(protection)
        fleet.site_returns = True
        return fleet

    def execute(self) -> None:
        """The whole way, there and back."""
        self.at_work = self.rig.guests
        self.protect()
        self.load()
        self.disaster()
        self.recover()
        self.serve_again()
        self.at_work = self.recovery.guests
        self.work(1)
        self.old_site_returns()
        self.seed()
        self.export()
        self.protect_to_the_old_site()
        self.work(1)
        self.go_home()
        self.at_work = self.recovery.guests
        self.work(1)
        self.judge()

    def guest_processes(self) -> list[Process]:
        """What runs as long as the guests do that are at work."""
        return [process for guest in self.at_work.values() for process in guest.processes]

    @property
    def writers(self) -> dict[str, Path]:
        """The group's disks, as it is protected, in the order of its configuration."""
        members = self.rig.groups[0].members
        return {f"{member.name}.{disk}": path for member in members for disk, path in member.disks.items()}

    # -- the old site ----------------------------------------------------------------------------------------------

    def old_site_returns(self) -> None:
        """As after a power cut: its daemons start, learn that they are fenced, and let go of disks and interfaces."""
        fleet = self.rig
        for number, daemon in enumerate(fleet.daemons):
            fleet.net.reconnect(number)
            daemon.start()
        fleet.wait_state("fenced", NEVER_MIND_S)
        for number, daemon in enumerate(fleet.daemons):
            site = fleet.net.hosts[number]
            daemon.close_control()
            daemon.process.stop()
            words = [BIN / "tidelock", "remove-rules", fleet.name, "--yes", "--config", daemon.config]
            run_command(words, "take the old gates away", site.netns)
            for name, net in fleet.nets.items():
                if fleet.shape.hosts[name] == number:
                    site.unplug(net)
        say("home: the site is back, its daemons have learned that they are fenced, and were stopped")

    def seed(self) -> None:
        """The old disks, of all members, become the beginning of a copy."""
        self.pki = Pki(self.run.directory / "authority-home")
        self.home_dir = self.run.directory / "home"
        self.home_dir.mkdir()
        net = self.rig.net
        tls = self.pki.issue("backup", net.PRIMARY4, self.home_dir / "tls")
        self.home = BackupServer(self.run, net.primary.netns, self.home_dir, tls, window="1h", name="home")
        self.home.start()
        self.home.seed_all(self.writers, self.rig.name)
        say("home: tidelock-backup runs, seeded with the old disks")

    # -- away ------------------------------------------------------------------------------------------------------

    def export(self) -> None:
        """The guests are stopped, and their disks become images."""
        fleet = self.rig
        self.away_dir = self.run.directory / HOST_AWAY
        self.away_dir.mkdir()
        kill_at_once(self.guest_processes())
        self.event("stopped away")
        self.images: dict[str, Path] = {}
        for disk in self.writers:
            member, name = disk.split(".")
            self.images[disk] = self.away_dir / f"{disk}.img"
            fleet.backup.export(name, self.images[disk], group=fleet.name, member=member)
        fleet.backup.process.stop()
        for net in fleet.nets.values():
            fleet.net.backup.unplug(net)
        say("backup: the disks of all members are exported, and the server that had recovered them is stopped")

    def protect_to_the_old_site(self) -> None:
        """One daemon for all members, and the guests on its sockets."""
        fleet = self.rig
        site = fleet.net.backup
        members = [
            replace(member, host=None, disks={name: self.images[f"{member.name}.{name}"] for name in member.disks})
            for member in fleet.groups[0].members
        ]
        group = replace(fleet.groups[0], members=members)
        tls = self.pki.issue("host", HOST_AWAY, self.away_dir / "tls")
        address = fleet.net.PRIMARY4
        self.daemon = HostDaemon(self.run, site.netns, self.away_dir, [group], address, tls, host=HOST_AWAY)
        self.at_work = {name: fleet.make_guest(name, f"{name}-away") for name in fleet.guests}
        for guest in self.at_work.values():
            guest.plug_in(site)
        self.daemon.start()
        for name, guest in self.at_work.items():
            disks = [self.daemon.uri(DISK, fleet.name, name)] if fleet.is_writer(name) else []
            fleet.boot_at(guest, site, disks, reconnect_s=60)
        for guest in self.at_work.values():
            guest.wait_ready()
        self.daemon.wait_state(self.settled, NEVER_MIND_S, [self.home.process, *self.guest_processes()])
        self.protected_at = self.event("protected again")
        found = re.findall(r"compared_bytes=(\d+) sent_bytes=(\d+)", self.daemon.process.log.read_text())
        whole = sum(path.stat().st_size for path in self.images.values())
        compared, sent = (sum(int(pair[n]) for pair in found) for n in (0, 1))
        self.check("the disks of all members were compared as a whole", compared == whole)
        self.check("most of them was not sent", 0 < sent < whole / 2)
        self.wait_answers(self.protected_at)
        say(f"backup: the group is protected, by the old site; {sent >> 10} of {whole >> 10} KiB were sent")

    def wait_answers(self, since: float) -> None:
        """Waits until clients are answered that asked since then."""
        needs = [self.clients.process, *self.guest_processes()]
        wait_until("clients are answered", lambda: self.answered(self.ledger, since) >= SERVED_AGAIN, 120, needs)

    # -- home again ------------------------------------------------------------------------------------------------

    def go_home(self) -> None:
        """As planned: nothing is waited out, and the disks are equal."""
        pids = " ".join(str(process.pid) for process in self.guest_processes())
        self.left_at = self.event("switchover")
        words = [BIN / "tidelock", "switchover", self.rig.name, "--stop-command", f"kill {pids}", "--json"]
        words += ["--socket", self.daemon.control_socket]
        over = json.loads(run_command(words, "switch over", timeout_s=180))["switchover"]
        self.check("the group is switched over", over["state"] == "over" and over["problem"] is None)
        self.recover_home()
        answer = self.recovery.answers[self.rig.name]
        self.check("nothing was waited for", answer["primary_declared_dead"] is False)
        self.check("nothing was left out", all(writer["left_out"] == 0 for writer in answer["writers"]))
        self.check("the whole group is fenced where it was", self.daemon.group()["state"] == "fenced")
        seqs = ",".join(f"{member}={seq}" for member, seq in over["seqs"].items())
        for disk, image in self.images.items():
            member, name = disk.split(".")
            out = self.home_dir / f"{disk}-at-the-switch.img"
            self.home.export(name, out, seqs, self.rig.name, member)
            equal = filecmp.cmp(image, out, shallow=False)
            self.check(f"{disk} is equal at both sites at the switch, byte by byte", equal)

    def recover_home(self, *options: str) -> None:
        """The same as after the disaster, at the other site."""
        fleet = self.rig

        def at_home(name: str) -> Site:
            return fleet.net.hosts[fleet.shape.hosts[name]]

        self.recovery = FleetRecovery(fleet, *options, server=self.home, site_of=at_home, suffix="home")
        self.recovery.recover(NEVER_MIND_S)
        self.recovery.boot()
        self.recovery.wait_ready()
        self.event("home again", self.recovery.recovered_at)
        self.at_work = self.recovery.guests
        self.wait_answers(self.recovery.recovered_at)

    # -- the judgement ---------------------------------------------------------------------------------------------

    def measure(self, ledger: Ledger) -> None:
        """Also of each stage by itself."""
        super().measure(ledger)
        stages = {
            "at home, before the disaster": (0, self.gone_at),
            "away, before it was protected again": (self.gone_at, self.protected_at),
            "away, protected by the old site": (self.protected_at, self.left_at),
            "at home again": (self.left_at, float("inf")),
        }
        for stage, (begin, end) in stages.items():
            told = sum(begin <= ledger.sent[row] < end for row in ledger.confirmed)
            say(f"{told} rows were confirmed {stage}")
            if told < min(CONFIRMED_MIN, SERVED_AGAIN):
                raise RuntimeError(f"only {told} rows were confirmed {stage}: this proves nothing")
        begin, end = self.protected_at, self.left_at
        asked = [row for row, sent in ledger.sent.items() if begin < sent < end and row in ledger.confirmed]
        least_ms = min(ledger.confirmed[row] - ledger.sent[row] for row in asked) * 1e3
        text = "while the old site was the backup, no reply came sooner than that could have had the rows"
        self.check(text, least_ms >= self.round_trips_ms[0])


class FromOneHost(GoesHome, TwoWriters):
    """All members ran on one host, and go home to it."""

    name = "two-writers-go-home"


class FromTwoHosts(GoesHome, TwoHosts):
    """They ran on two hosts, run on one away, and the second site is lost in a disaster, too."""

    name = "two-hosts-go-home"

    def go_home(self) -> None:
        """In place of a switch the disaster: right after a client was told something."""
        self.worst_moment()
        self.left_at = self.event("second disaster")
        kill_at_once([*self.guest_processes(), self.daemon.process])
        self.rig.net.wans[0].cut()
        say("DISASTER: the second site is gone")
        self.recover_home("--primary-is-dead")


def test_two_members_of_one_host_come_home_by_a_planned_switch(run):
    entry = drilled(run, FromOneHost, rtt_ms=20, seed=1).entry
    assert entry.promise_held, entry


def test_two_members_of_two_hosts_come_home_after_a_second_disaster(run):
    """Away they are on one host; at home each is on its own again."""
    entry = drilled(run, FromTwoHosts, rtt_ms=20, seed=1).entry
    assert entry.promise_held, entry
