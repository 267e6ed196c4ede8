"""An application of several protected guests between two sites: everything that a drill needs, as `rig.py` for one.

    out/<run>/host-a/, host-b/   what each host of the primary site has: disks, configuration, certificates, state
    out/<run>/backup/            what the backup site has

Invariant: after `destroy` no process or link of these hosts is left to recover from, and no file, unless the site is to
come back.
"""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from .applications import Application
from .backupserver import BackupServer
from .bootfile import link_boot_files, write_machines
from .guest import READY_S, Guest, ProcessGuest, VmGuest, accelerator, kernel_options
from .hostdaemon import Group, HostDaemon, Member, Protection
from .image import GuestImage, guest_image
from .net import GuestNet, Net, Site
from .pki import Pki
from .process import Process, kill_at_once, wait_until
from .run import Run

MEMORY_MIB = 320
PROCESS_DISK_MIB = 16
DISK = "data"
NETWORK = "lan"
"""What `recover --boot --network` calls the network of each guest."""
PINS = "/sys/fs/bpf/tidelock"
"""Where daemons keep what must outlive them, by the names of group and member."""
HOSTS = ("host-a", "host-b")

BOUNDARIES = ("group", "member", "apart")
"""Where packets are held: where they leave the group, where they leave any member of it (PipeCloud's naive variant),
or, with each guest in a group of its own, where they leave that."""


FORMS = ("auto", "vector", "hlc")
"""What a tag says: a count for each writer, a time, or vectors while they fit."""

TAGGING_OFF = {"tagging": "off-for-a-demonstration"}
"""Tells the daemon, in a group's section, to tag no packet between members: a drill must notice."""


@dataclass(frozen=True)
class Shape:
    """How an application is laid out and protected."""

    application: Application
    hosts: dict[str, int]
    """On which host each guest runs."""
    rtts_ms: tuple[float, ...]
    """Of each host's WAN."""
    boundary: str = "group"
    form: str = "auto"
    tagging: bool = True
    unprotected: frozenset[str] = frozenset()
    """Databases whose disks are not replicated."""


class Fleet:
    """Two sites, a backup server, and on each host of the primary site a daemon and guests: made, not started."""

    def __init__(self, run: Run, kind: str, shape: Shape, seed: int, protection: Protection, window: str = ""):
        self.run, self.kind, self.shape, self.protection = run, kind, shape, protection
        self.random = random.Random(f"fleet {seed}")
        self.image: GuestImage | None = None if kind == "process" else guest_image()
        if kind == "vm":
            accelerator(self.image)  # finding that out takes a while, once
        self.net = Net(run, seed=seed, hosts=len(shape.rtts_ms), segment=True)
        for wan, rtt_ms in zip(self.net.wans, shape.rtts_ms, strict=True):
            wan.set(delay_ms=rtt_ms / 2)
        places = shape.application.places
        self.nets = {p.name: GuestNet(n, True, shape.hosts[p.name]) for n, p in enumerate(places)}
        self.guests = {place.name: self.make_guest(place.name, place.name) for place in places}
        self.directories = [run.directory / HOSTS[number] for number in range(len(shape.rtts_ms))]
        backup_dir = run.directory / "backup"
        for directory in (*self.directories, backup_dir):
            directory.mkdir()
        pki = Pki(run.directory / "authority")
        backup_tls = pki.issue("backup", self.net.BACKUP4, backup_dir / "tls")
        self.name = f"app{run.prefix}"
        """The group's name: no other run's, so that nothing of another run is ever taken up from the kernel."""
        run.remove_at_close(f"{PINS}/*{self.name}*")
        self.site_returns = False
        """Whether a disaster leaves the hosts' files, for when the site is there again."""
        if self.image:
            there = link_boot_files(backup_dir / "data", self.image)
        self.groups = self._make_groups()
        if self.image:
            self.write_machines(backup_dir, there)
        spread = {} if len(self.directories) == 1 else {group.name: list(HOSTS) for group in self.groups}
        self.backup = BackupServer(run, self.net.backup.netns, backup_dir, backup_tls, spread, window)
        self.daemons = [
            HostDaemon(
                run,
                self.net.hosts[number].netns,
                directory,
                [group for group in self.groups if self.is_on(group, number)],
                self.net.backup_address(number),
                pki.issue("host", HOSTS[number], directory / "tls"),
                host=HOSTS[number],
                server_name=self.net.BACKUP4,
            )
            for number, directory in enumerate(self.directories)
        ]

    def make_guest(self, place: str, name: str) -> Guest:
        """The guest of a place, for either site."""
        kind = VmGuest if self.kind == "vm" else ProcessGuest
        web = self.shape.application.web(place, kind.database, self.nets)
        return kind(self.run, self.nets[place], name, web, capture=True)

    def _make_groups(self) -> list[Group]:
        members = []
        for place in self.shape.application.places:
            host = self.shape.hosts[place.name]
            disks = {DISK: self.make_disk(self.directories[host], place.name)} if self.is_writer(place.name) else {}
            machine = self._describe_machine(self.directories[host], place.name) if self.image else None
            outbound = place.front or place.aside
            members.append(Member(place.name, self.nets[place.name], disks, outbound, machine, HOSTS[host]))
        if self.shape.boundary == "apart":
            # What a guest without a disk hears has been held before: it needs no gate.
            return [Group(member.name, [member], self.protection) for member in members if member.disks]
        keys = {"boundary": "member"} if self.shape.boundary == "member" else {}
        keys |= {} if self.shape.form == "auto" else {"form": self.shape.form}
        keys |= {} if self.shape.tagging else TAGGING_OFF
        return [Group(self.name, members, self.protection, keys)]

    def write_machines(self, backup: Path, there: GuestImage) -> None:
        """Says at a backup site how each guest's kernel starts."""
        members = [(group.name, member.name) for group in self.groups for member in group.members]
        options = {
            (group, name): kernel_options(self.nets[name], web=self.guests[name].web, capture=True)
            for group, name in members
        }
        write_machines(backup, there, options)

    def _describe_machine(self, directory: Path, name: str) -> Path:
        """Writes what the backup is to boot in a guest's place."""
        net = self.nets[name]
        description = {
            "memory_mib": MEMORY_MIB,
            "networks": [{"name": NETWORK, "mac": net.mac}],
        }
        path = directory / f"{name}.machine.json"
        path.write_text(json.dumps(description, indent=2))
        return path

    def make_disk(self, directory: Path, name: str) -> Path:
        """A database's disk."""
        path = directory / f"{name}.img"
        if self.image:
            subprocess.run(["cp", "--sparse=always", self.image.data, path], check=True)
        else:
            path.write_bytes(self.random.randbytes(PROCESS_DISK_MIB << 20))
        return path

    def is_writer(self, place: str) -> bool:
        """Whether a guest has a protected disk."""
        return place in self.shape.application.databases and place not in self.shape.unprotected

    def is_on(self, group: Group, host: int) -> bool:
        """Whether a host has a member of a group."""
        return any(member.host == HOSTS[host] for member in group.members)

    def group_of(self, place: str) -> str:
        """The name of the group that a guest is in."""
        return next(group.name for group in self.groups if any(member.name == place for member in group.members))

    def writers(self) -> dict[str, tuple[Guest, HostDaemon]]:
        """Every guest with a protected database, with its host's daemon."""
        hosts = self.shape.hosts
        return {name: (self.guests[name], self.daemons[hosts[name]]) for name in self.guests if self.is_writer(name)}

    @property
    def front(self) -> Guest:
        """The guest that clients talk to."""
        return self.guests[self.shape.application.front]

    def plug_in(self) -> None:
        """Gives all guests their interfaces at the primary site: the daemons want to see them when they start."""
        for name, guest in self.guests.items():
            guest.plug_in(self.net.hosts[self.shape.hosts[name]])

    def boot(self, reconnect_s: int = 60) -> None:
        """Starts all guests at the primary site, and shows the clients the way."""
        for name, guest in self.guests.items():
            self.boot_guest(name, reconnect_s)
            self.net.route_clients_to(self.net.hosts[self.shape.hosts[name]], guest.net)

    def boot_guest(self, name: str, reconnect_s: int = 60) -> None:
        """Starts this guest at the primary site."""
        host = self.shape.hosts[name]
        disks = [self.daemons[host].uri(DISK, self.group_of(name), name)] if self.is_writer(name) else []
        self.boot_at(self.guests[name], self.net.hosts[host], disks, reconnect_s, say_rows=bool(disks))

    def boot_at(self, guest: Guest, site: Site, disks: list[str], reconnect_s: int = 0, say_rows: bool = False) -> None:
        """Starts a guest of either kind. A process guest says how many rows it has in any case."""
        if isinstance(guest, VmGuest):
            guest.boot(site, self.image, disks, MEMORY_MIB, reconnect_s, say_rows)
        else:
            guest.boot(site, disks, reconnect_s)

    def processes(self, hosts: list[int] | None = None) -> list[Process]:
        """Guests and daemons of these hosts, or of all."""
        chosen = range(len(self.daemons)) if hosts is None else hosts
        guests = [guest for name, guest in self.guests.items() if self.shape.hosts[name] in chosen]
        return [p for guest in guests for p in guest.processes] + [self.daemons[host].process for host in chosen]

    def wait_state(self, state: str, timeout_s: float) -> None:
        """Waits until every group is in this state on every host that has members of it."""
        for number, daemon in enumerate(self.daemons):
            for group in self.groups:
                if self.is_on(group, number):
                    daemon.wait_state(state, timeout_s, [self.backup.process], name=group.name)

    def destroy(self, hosts: list[int], cut_first: bool) -> tuple[float, float]:
        """The disaster of these hosts. Returns when it began and when nothing of them was left."""
        began = time.monotonic()
        if cut_first:
            self.cut_off(hosts)
        kill_at_once(self.processes(hosts))
        if not cut_first:
            self.cut_off(hosts)
        ended = time.monotonic()
        if not self.site_returns:
            for host in hosts:
                shutil.rmtree(self.directories[host])
        return began, ended

    def cut_off(self, hosts: list[int]) -> None:
        """No packet enters or leaves these hosts any more."""
        for host in hosts:  # all at once, as far as can be: the other links take a while
            self.net.wans[host].cut()
        for host in hosts:
            self.net.cut_off(host)


class FleetRecovery:
    """Every group of the application recovered, and its guests brought back, at the backup site unless told otherwise.

    VMs are booted by the command itself, from the descriptions that the backup kept; it goes on as long as they do.
    Other guests are started on the recovered disks: processes, and VMs that are in no group.
    """

    def __init__(
        self,
        fleet: Fleet,
        *options: str,
        server: BackupServer | None = None,
        site_of: Callable[[str], Site] | None = None,
        suffix: str = "recovered",
    ):
        self.fleet = fleet
        self.server = server or fleet.backup
        self.site_of = site_of or (lambda _: fleet.net.backup)
        """Where each guest is to run."""
        self.recovered_at = 0.0
        """When the disks of all groups could be used."""
        self.answers: dict[str, dict] = {}
        """What `recover --json` said of each group."""
        self.guests = {name: fleet.make_guest(name, f"{name}-{suffix}") for name in fleet.guests}
        self.qemu_options: list[str] = []
        """For each VM that is booted by the command."""
        self.disk_uri = lambda name: self.server.uri(DISK, fleet.group_of(name), name)
        """Where another guest finds its disk."""
        self._options, self._suffix = options, suffix

    def recover(self, timeout_s: float) -> None:
        """Recovers every group."""
        for group in self.fleet.groups:
            self._recover(group, timeout_s)

    def _recover(self, group: Group, timeout_s: float) -> None:
        booted = self._booted_by_recover(group)
        command = self.server.recover(
            "--json",
            *self._options,
            *self._boot_options(booted),
            name=f"recover-{group.name}-{self._suffix}",
            on_line=partial(self._hear, booted),
            group=group.name,
        )
        for guest in booted.values():
            guest.process, guest.started_at = command, time.monotonic()
        wait_until(
            f"{group.name} is recovered",
            lambda: group.name in self.answers or not command.alive(),
            timeout_s,
        )
        if not booted and command.wait(timeout_s) != 0:
            raise RuntimeError(f"the recovery of {group.name} failed\n{command.tail()}")
        if group.name not in self.answers:
            raise RuntimeError(f"the recovery of {group.name} said nothing\n{command.tail()}")

    def _booted_by_recover(self, group: Group) -> dict[str, VmGuest]:
        """The guests that come back by `--boot`, at their interfaces."""
        guests = {member.name: self.guests[member.name] for member in group.members if member.machine}
        for name, guest in guests.items():
            guest.plug_in(self.site_of(name))
        return guests

    def _boot_options(self, booted: dict[str, VmGuest]) -> list[str]:
        if not booted:
            return []
        options = ["--boot", "--accept-machine", "--console", "--accelerator", accelerator(self.fleet.image)[1]]
        for name, guest in booted.items():
            options += ["--network", f"{name}.{NETWORK}=tap:{guest.net.interface}"]
        return [*options, *(["--", *self.qemu_options] if self.qemu_options else [])]

    def _hear(self, booted: dict[str, VmGuest], at: float, line: str) -> None:
        if line.startswith("{"):
            answer = json.loads(line)
            self.answers[answer["recovery"]["group"]] = answer["recovery"]
            self.recovered_at = at
        elif len(booted) == 1:  # it has the console for itself
            next(iter(booted.values())).hear(at, line)
        else:
            name, _, said = line.partition(": ")
            if name in booted:
                booted[name].hear(at, said)

    def cut(self) -> dict[str, int]:
        """What was recovered of each writer."""
        writers = [writer for answer in self.answers.values() for writer in answer["writers"]]
        return {writer["member"]: writer["recovered"] for writer in writers}

    def left_out(self) -> list[str]:
        """Records that the backup had and that are not part of the cut, and why."""
        writers = [writer for answer in self.answers.values() for writer in answer["writers"]]
        return [f"{w['member']}: {w['left_out']} later records left out: {w['why']}" for w in writers if w["why"]]

    def boot(self) -> None:
        """Starts the guests that `recover` has not booted, and shows the clients the way."""
        fleet = self.fleet
        booted = {member.name for group in fleet.groups for member in group.members if member.machine}
        for name, guest in self.guests.items():
            if name not in booted:
                database = name in fleet.shape.application.databases
                disks = [self.disk_uri(name)] if database else []
                fleet.boot_at(guest, self.site_of(name), disks)
            fleet.net.route_clients_to(self.site_of(name), guest.net)

    def wait_ready(self, timeout_s: float = READY_S) -> float:
        """Waits until all guests are ready; returns when the last one was."""
        for guest in self.guests.values():
            guest.wait_ready(timeout_s)
        return max(guest.ready_at for guest in self.guests.values())

    def phases(self) -> dict[str, float]:
        """When the last guest had done each step of its start."""
        last: dict[str, float] = {}
        for guest in self.guests.values():
            for step, at in {**guest.phases, "ready": guest.ready_at}.items():
                last[step] = max(at, last.get(step, at))
        return last
