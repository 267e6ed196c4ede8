"""The way back of a group of several members: it runs at the second site after a disaster, is protected from there to
where it came from, and goes home, with one ledger of the clients for all of it (docs/manual/way-back.md).

    home ── disaster ──> away ── adopted while the guests run, or exported ──> protected by home ── switchover ──> home

Process guests that are to be adopted have `qemu-storage-daemon` between themselves and their disks: the part of QEMU
that moves a VM's disk.
"""

from __future__ import annotations

import filecmp
import json
import re
from dataclasses import replace
from pathlib import Path

from tidelock_testbed.risk import word_of

from .appdrill import AppDrill, TwoWriters
from .backupserver import BackupServer
from .bootfile import link_boot_files
from .drilling import CONFIRMED_MIN, NEVER_MIND_S, SERVED_AGAIN
from .failback import stages_of
from .fleet import DISK, Fleet, FleetRecovery
from .hostdaemon import Group, HostDaemon, Protection
from .ledger import Ledger
from .net import Site
from .pki import Pki
from .process import Process, kill_at_once, wait_until
from .progress import say
from .storagedaemon import StorageDaemon

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
        self.protect_to_the_old_site()
        self.work(1)
        self.go_home()
        self.at_work = self.recovery.guests
        self.work(1)
        self.judge()

    def guest_processes(self) -> list[Process]:
        """What runs as long as the guests do that are at work."""
        # VMs that `recover` has booted are children of one command.
        return list(dict.fromkeys(process for guest in self.at_work.values() for process in guest.processes))

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
            daemon.remove_rules(fleet.name)
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
        if self.rig.image:
            there = link_boot_files(self.home_dir / "data", self.rig.image)
            self.rig.write_machines(self.home_dir, there)
        self.home.seed_all(self.writers, self.rig.name)
        say("home: tidelock-backup runs, seeded with the old disks")

    # -- away ------------------------------------------------------------------------------------------------------

    def protect_to_the_old_site(self) -> None:
        """One daemon for all members; their guests come to write to its disks."""
        fleet = self.rig
        site = fleet.net.backup
        self.away_dir = self.run.directory / HOST_AWAY
        self.away_dir.mkdir()
        self.images = {disk: self.away_dir / f"{disk}.img" for disk in self.writers}
        members = [
            replace(member, host=None, disks={name: self.images[f"{member.name}.{name}"] for name in member.disks})
            for member in fleet.groups[0].members
        ]
        group: Group = replace(fleet.groups[0], members=members)
        tls = self.pki.issue("host", HOST_AWAY, self.away_dir / "tls")
        address = fleet.net.PRIMARY4
        self.daemon = HostDaemon(self.run, site.netns, self.away_dir, [group], address, tls, host=HOST_AWAY)
        self.take_disks()
        self.daemon.wait_state(self.settled, NEVER_MIND_S, [self.home.process, *self.guest_processes()])
        self.protected_at = self.event("protected again")
        found = re.findall(r"compared_bytes=(\d+) sent_bytes=(\d+)", self.daemon.process.log.read_text())
        whole = sum(path.stat().st_size for path in self.images.values())
        compared, sent = (sum(int(pair[n]) for pair in found) for n in (0, 1))
        self.check("the disks of all members were compared as a whole", compared == whole)
        self.check("most of them was not sent", 0 < sent < whole / 2)
        self.wait_answers(self.protected_at)
        note = f"the way back sent {sent >> 10} of {whole >> 10} KiB"
        self.entry.notes.append(note)
        say(f"backup: the group is protected, by the old site: {note}")

    def take_disks(self) -> None:
        """The daemon is started, and the guests write to its disks."""
        raise NotImplementedError

    def wait_answers(self, since: float) -> None:
        """Waits until clients are answered that asked since then."""
        needs = [self.clients.process, *self.guest_processes()]
        wait_until("clients are answered", lambda: self.answered(self.ledger, since) >= SERVED_AGAIN, 120, needs)

    # -- home again ------------------------------------------------------------------------------------------------

    def go_home(self) -> None:
        """As planned: nothing is waited out, and the disks are equal."""
        self.left_at = self.event("switchover")
        over = self.daemon.switch_over([*self.guest_processes(), *self.storage_processes()], self.rig.name)
        self.check("the group is switched over", over["state"] == "over" and over["problem"] is None)
        self.recover_home()
        answer = self.recovery.answers[self.rig.name]
        self.check("nothing was waited for", answer["primary_declared_dead"] is False)
        self.check("nothing was left out", all(writer["left_out"] == 0 for writer in answer["writers"]))
        self.check("the whole group is fenced where it was", word_of(self.daemon.group()) == "fenced")
        seqs = ",".join(f"{member}={seq}" for member, seq in over["seqs"].items())
        for disk, image in self.images.items():
            member, name = disk.split(".")
            out = self.home_dir / f"{disk}-at-the-switch.img"
            self.home.export(name, out, seqs, self.rig.name, member)
            equal = filecmp.cmp(image, out, shallow=False)
            self.check(f"{disk} is equal at both sites at the switch, byte by byte", equal)

    def storage_processes(self) -> list[Process]:
        """What stands between guests and their disks."""
        return []

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
        stages = stages_of(self.gone_at, self.protected_at, self.left_at)
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


class ByExport(GoesHome):
    """The guests are stopped, and started on images of their disks."""

    def take_disks(self) -> None:
        """The guests are stopped, and their disks become images."""
        fleet = self.rig
        site = fleet.net.backup
        kill_at_once(self.guest_processes())
        self.event("stopped away")
        for disk, image in self.images.items():
            member, name = disk.split(".")
            fleet.backup.export(name, image, group=fleet.name, member=member)
        fleet.backup.process.stop()
        for net in fleet.nets.values():
            site.unplug(net)
        say("backup: the disks of all members are exported, and the server that had recovered them is stopped")
        self.at_work = {name: fleet.make_guest(name, f"{name}-away") for name in fleet.guests}
        for guest in self.at_work.values():
            guest.plug_in(site)
        self.daemon.start()
        for name, guest in self.at_work.items():
            disks = [self.daemon.uri(DISK, fleet.name, name)] if fleet.is_writer(name) else []
            fleet.boot_at(guest, site, disks, reconnect_s=60)
        for guest in self.at_work.values():
            guest.wait_ready()


class ByAdoption(GoesHome):
    """The guests run on, and are brought behind the daemon."""

    def __init__(self, run, knobs):
        self.storage: dict[str, StorageDaemon] = {}
        """The QEMU that has a process guest's disk, away."""
        super().__init__(run, knobs)

    def make_recovery(self, *options: str) -> FleetRecovery:
        """With a way to move the guests' disks."""
        recovery = super().make_recovery(*options)
        if self.rig.image:
            recovery.qemu_options = ["-qmp", f"unix:{self.qmp('{member}')},server=on,wait=off"]
        else:
            recovery.disk_uri = self.behind_storage
        return recovery

    def qmp(self, name: str) -> Path:
        """Where the QEMU of a member answers."""
        return self.storage[name].qmp if name in self.storage else self.run.sockets / f"{name}.qmp"

    def monitors(self) -> list[str]:
        """Of each guest that has disks."""
        return [word for name in self.rig.writers() for word in ("--qmp", f"{name}={self.qmp(name)}")]

    def behind_storage(self, name: str) -> str:
        """The disk of a process guest, which can be moved."""
        uri = self.rig.backup.uri(DISK, self.rig.name, name)
        self.storage[name] = StorageDaemon(self.run, {DISK: uri}, f"away-{name}")
        return self.storage[name].uri(DISK)

    def storage_processes(self) -> list[Process]:
        """What stands between guests and their disks."""
        return [storage.process for storage in self.storage.values()]

    def take_disks(self) -> None:
        """A daemon at this site takes the guests' disks over while they run."""
        fleet = self.rig
        before = self.guest_processes()
        monitors = self.monitors()
        began = self.event("adoption begins")
        self.daemon.adopt(*monitors, "--prepare", group=fleet.name)
        self.daemon.start()
        self.daemon.wait_state("unrecorded", NEVER_MIND_S, before, name=fleet.name)
        self.wait_answers(began)
        told = json.loads(self.daemon.adopt(*monitors, "--json", group=fleet.name))
        adopted_at = self.event("adopted")
        self.check("the guests that were recovered are those that were adopted", all(p.alive() for p in before))
        self.wait_answers(adopted_at)
        fleet.backup.process.stop()
        times = self.ledger.reply_times_ms(began, adopted_at)
        note = (
            f"away, a daemon adopted {len(told['adopted'])} running guests: their disks were copied in "
            f"{told['copied_ms'] / 1e3:.1f} s and moved in {told['moved_ms']} ms; meanwhile {len(times)} rows were "
            f"confirmed, the slowest after {max(times):.0f} ms"
        )
        self.entry.notes.append(note)
        say(f"backup: {note}")


class GroupFailback(ByAdoption, TwoWriters):
    """A group of several members is lost, works at the second site, and goes home to the first."""

    name = "group-failback"
    about = (
        "as two-writers; the guests work at the backup site, the old site is back with its old disks, is made the new "
        "copy by delta while they run on, and the group is switched over to it"
    )
    modes = ("pipelined",)
