"""There and back again: a disaster, work at the backup site, and the way home when the old site is there again.

    home ── disaster ──> away: on the recovered disk, then adopted by a daemon ── switchover ──> home

The steps are those of `docs/manual/way-back.md`: the old site's disk seeds a backup server there, so that only
what differs is sent, a daemon at the backup site adopts the guest, which runs on, and the group is switched over.

A process guest has `qemu-storage-daemon` between itself and its disk: the part of QEMU that moves a VM's disk.

Invariant: clients run from before the disaster until after the way home, with one ledger for all of it.
"""

from __future__ import annotations

import filecmp
import json
import re
from pathlib import Path

from tidelock_testbed.risk import word_of

from .backupserver import BackupServer
from .drilling import CONFIRMED_MIN, NEVER_MIND_S, SERVED_AGAIN, CopyWatch, Drill
from .guest import Guest
from .hostdaemon import GROUP, MEMBER, Group, HostDaemon, Member, Protection
from .ledger import Ledger, Row
from .net import Site
from .process import Process, wait_until
from .progress import say
from .rig import DISKS, Recovery, Rig
from .storagedaemon import StorageDaemon
from .workload import references_in

HOST_AWAY = "host-b"
WINDOW = "1h"
"""Of the past at home, so that its disk can be looked at as it was at the switch."""
DISK = DISKS[0]


def stages_of(gone_at: float, protected_at: float, left_at: float) -> dict[str, tuple[float, float]]:
    """From when until when clients asked whom."""
    return {
        "at home, before the disaster": (0, gone_at),
        "away, before it was protected again": (gone_at, protected_at),
        "away, protected by the old site": (protected_at, left_at),
        "at home again": (left_at, float("inf")),
    }


class Failback(Drill):
    """The site that was lost comes back, and the group goes home to it."""

    name = "failback"
    about = (
        "the primary site is gone, the guest works at the backup site, the old site is back with its old disk, is made "
        "the new copy by delta while the guest runs on, and the group is switched over to it"
    )
    modes = ("pipelined",)
    work_s = {"vm": (4.0, 8.0), "process": (1.0, 3.0)}
    """At each stage after the disaster."""

    def __init__(self, run, knobs):
        self.qmp = run.sockets / "guest.qmp"
        """Of the QEMU that has the guest's disk, away."""
        self.storage: StorageDaemon | None = None
        super().__init__(run, knobs)
        self.entry.promise = "nothing that a client was told is lost: at home, away, and at home again"

    def make_rig(self, protection: Protection) -> Rig:
        """Two sites; the first keeps its disks through the disaster."""
        rig = super().make_rig(protection)
        rig.site_returns = True
        return rig

    def execute(self) -> None:
        """The whole way, there and back."""
        self.protect()
        self.load()
        self.disaster()
        self.recover()
        self.serve_again()
        self.work_on(self.recovery.guest)
        self.old_site_returns()
        self.seed()
        self.adopt()
        self.protect_to_the_old_site()
        self.work_on(self.guest)
        self.switch_home()
        self.work_on(self.recovery.guest)
        self.judge()

    # -- away ------------------------------------------------------------------------------------------------------

    def work_on(self, guest: Guest) -> None:
        """Lets the clients work with this guest."""
        self.at_work = guest
        self.work(self.random.uniform(*self.work_s[self.knobs.guest]), every_s=1)

    def guest_processes(self) -> list[Process]:
        """What runs as long as the guest that is at work does."""
        return self.at_work.processes if self.disaster_at else super().guest_processes()

    def primary_says(self) -> str:
        """Only until the disaster: afterwards the sampler has nobody to ask."""
        return "" if self.disaster_at else super().primary_says()

    def recover(self, *options: str) -> None:
        """As always; with a way to move the guest's disk."""
        qmp = ("--", "-qmp", f"unix:{self.qmp},server=on,wait=off") if self.rig.image else ()
        super().recover("--primary-is-dead", *qmp)
        if not self.rig.image:
            self.storage = StorageDaemon(self.run, {DISK: self.rig.backup.uri(DISK)}, "away")
            self.qmp, self.recovery.disk_uri = self.storage.qmp, self.storage.uri

    def adopt(self) -> None:
        """A daemon at this site, whose backup is at the old site, takes the guest's disk over while the guest runs."""
        rig = self.rig
        self.guest = self.recovery.guest
        site = rig.backup_dir / "host"
        site.mkdir()
        self.disk = site / f"{DISK}.img"
        self.daemon = self.make_daemon(site)
        began = self.event("adoption begins")
        self.daemon.adopt("--qmp", self.qmp, "--prepare")
        self.daemon.start()
        self.daemon.wait_state("unrecorded", 60, [*self.guest.processes])
        told = json.loads(self.daemon.adopt("--qmp", self.qmp, "--json"))
        self.adopted_at = self.event("adopted")
        self.first_answer(self.adopted_at, self.guest)
        self.check("the guest that was recovered is the one that was adopted", self.guest.process.alive())
        times = self.ledger.reply_times_ms(began, self.adopted_at)
        note = (
            f"away, a daemon adopted the running guest: its disk was copied in {told['copied_ms'] / 1e3:.1f} s and "
            f"moved in {told['moved_ms']} ms; meanwhile {len(times)} rows were confirmed, the slowest after "
            f"{max(times):.0f} ms"
        )
        self.note(f"backup: {note}", note)

    def make_daemon(self, site: Path) -> HostDaemon:
        """The backup site's own host daemon, with the old site for its backup."""
        rig = self.rig
        tls = rig.pki.issue("host", HOST_AWAY, site / "tls")
        protection = Protection(
            mode=self.knobs.mode,
            lease_s=rig.protection.lease_s,
            grace_s=rig.protection.grace_s,
        )
        machine = rig.describe_machine(self.home_dir, site) if rig.image else None
        group = Group(GROUP, [Member(MEMBER, rig.guest_net, {DISK: self.disk}, machine=machine)], protection)
        return HostDaemon(self.run, rig.net.backup.netns, site, [group], self.home_address, tls, host=HOST_AWAY)

    @property
    def home_site(self) -> Site:
        """Where the group is to go."""
        return self.rig.net.primary

    @property
    def home_address(self) -> str:
        """Of the backup server there."""
        return self.rig.net.PRIMARY4

    def old_site_returns(self) -> None:
        """As after a power cut: disks, configuration and state are there, and the daemon starts by itself."""
        rig = self.rig
        self.event("old site is back")
        rig.net.primary.unplug(rig.guest_net)
        rig.net.reconnect()
        rig.daemon.start()
        rig.daemon.wait_state("fenced", NEVER_MIND_S)
        rig.daemon.close_control()
        rig.daemon.process.stop()
        rig.daemon.remove_rules()
        say("home: the site is back with its old disk; its daemon has learned that it is fenced, and was stopped")

    def seed(self) -> None:
        """The old disk becomes the beginning of a copy."""
        rig = self.rig
        self.start_server(rig.primary / "server")
        self.disk_bytes = rig.disks[DISK].stat().st_size
        self.home.seed(rig.disks)
        say("home: tidelock-backup runs, seeded with the old disk")

    def start_server(self, directory: Path) -> None:
        """A backup server where the group is to go."""
        directory.mkdir()
        self.home_dir = directory
        tls = self.rig.pki.issue("backup", self.home_address, directory / "tls")
        self.home = BackupServer(self.run, self.home_site.netns, directory, tls, window=WINDOW, name="home")
        self.home.start()

    def protect_to_the_old_site(self) -> None:
        """The daemon at the backup site finds its backup, compares, and sends what differs; clients write on."""
        needs = [*self.guest.processes, self.home.process]
        self.daemon.wait_state("protected", 120, needs, CopyWatch().show)
        self.protected_at = self.event("protected again")
        self.check_copied(*self.copied())
        rig = self.rig
        rig.backup.process.stop()
        say("backup: the server that had recovered the group is stopped: nothing of the guest is there any more")

    def check_copied(self, compared: int, sent: int) -> None:
        """Only what differs went over the link."""
        whole = self.disk_bytes
        self.check("the old site's disk was compared as a whole", compared == whole)
        self.check("most of it was not sent", 0 < sent < whole / 2)
        note = f"the way back sent {sent / (1 << 20):.1f} MiB of {whole >> 20} MiB"
        self.note(f"backup: {note}; the group is protected, now by the old site", note)

    def copied(self) -> tuple[int, int]:
        """Bytes that the daemon's copies have compared and sent, as its log says."""
        found = re.findall(r"compared_bytes=(\d+) sent_bytes=(\d+)", self.daemon.process.log.read_text())
        return max((int(compared) for compared, _ in found), default=0), sum(int(sent) for _, sent in found)

    # -- home again ------------------------------------------------------------------------------------------------

    def switch_home(self) -> None:
        """As planned: nothing is waited out."""
        rig = self.rig
        self.switched_at = self.event("switchover")
        # A process guest's disk is open as long as QEMU has it.
        self.switch = self.daemon.switch_over([self.guest.process, *self.storage_processes()])
        self.recovery = Recovery(rig, site=self.home_site, server=self.home, name="guest-home")
        self.recovery.wait_recovered(NEVER_MIND_S)
        rig.net.route_clients_to(self.home_site, rig.guest_net)
        self.recovery.wait_ready()
        self.home_at = self.first_answer(self.recovery.recovered_at, self.recovery.guest)
        self.event("home again", self.home_at)
        last = max(at for at in self.ledger.confirmed.values() if at < self.home_at)
        waited = [line for line in self.recovery.lines if "waiting until" in line]
        self.check("the recovery at home waited for no lease to end", not waited)
        fenced = word_of(self.daemon.group()) == "fenced"
        self.check("the daemon that has handed the group over knows that it is fenced", fenced)
        note = (
            f"the switch home was a pause of {self.home_at - last:.2f} s for clients, from the last answer to the first"
        )
        self.note(f"home: {note}", note)

    def storage_processes(self) -> list[Process]:
        """What stands between a process guest and its disk."""
        return [self.storage.process] if self.storage else []

    def first_answer(self, since: float, guest: Guest) -> float:
        """Waits until clients are served by this guest; returns when the first one was, that had asked since then."""
        needs = [self.clients.process, *guest.processes]
        what = f"clients are served by {guest.name}"
        wait_until(what, lambda: self.answered(self.ledger, since) >= SERVED_AGAIN, 120, needs)
        return min(at for row, at in self.ledger.confirmed.items() if self.ledger.sent[row] > since)

    def note(self, spoken: str, written: str) -> None:
        """Says something now, and in the report."""
        say(spoken)
        self.entry.notes.append(written)

    # -- the judgement ---------------------------------------------------------------------------------------------

    def compare(self, ledger: Ledger, rows: set[Row]) -> None:
        """The disaster as in every drill; and then each stage by itself, the order of all, and the disks."""
        super().compare(ledger, rows)
        stages = stages_of(self.gone_at, self.protected_at, self.switched_at)
        for name, (begin, end) in stages.items():
            told = {row for row in ledger.confirmed if begin <= ledger.sent[row] < end}
            if len(told) < CONFIRMED_MIN:
                raise RuntimeError(f"only {len(told)} rows were confirmed {name}: this proves nothing")
            say(f"{len(told)} rows were confirmed {name}, {len(told - rows)} of them are not there")
            self.check(f"no row is lost that was confirmed {name}", told <= rows)
        if not self.rig.image:  # a table of PostgreSQL has no order
            told = "the rows are there in the order in which they were asked for and confirmed"
            self.check(told, self.in_order(ledger))
        self.check_replies(ledger)
        self.check_disks()

    def in_order(self, ledger: Ledger) -> bool:
        """Whether no row stands behind one that was asked for only after it had been confirmed."""
        newest = 0.0
        for row in references_in(self.rig.net, self.recovery.guest):
            if ledger.confirmed.get(row, newest) < newest:
                return False
            newest = max(newest, ledger.sent.get(row, 0.0))
        return True

    def check_replies(self, ledger: Ledger) -> None:
        """Where the old site is the backup replies wait for it."""
        begin, end = self.protected_at, self.switched_at
        asked = [row for row, sent in ledger.sent.items() if begin < sent < end and row in ledger.confirmed]
        least_ms = min(ledger.confirmed[row] - ledger.sent[row] for row in asked) * 1e3
        text = "while the old site was the backup, no reply came sooner than that could have had the row"
        self.check(text, least_ms >= self.round_trip_ms)

    def check_disks(self) -> None:
        """Compares the disk that was switched over with the one at home, as it was at the last write before that."""
        out = self.home_dir / "at-the-switch.img"
        self.home.export(DISK, out, at=f"{MEMBER}={self.switch['seqs'][MEMBER]}")
        equal = filecmp.cmp(self.disk, out, shallow=False)
        self.check("the disks of both sites were equal at the switch, byte by byte", equal)
