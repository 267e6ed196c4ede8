"""A protected guest between two sites: everything that a drill needs, and nothing that it does with it.

    out/<run>/primary/   what the primary site has: disks, configuration, certificates, the daemon's state
    out/<run>/backup/    what the backup site has: certificates, the journal and images, kernel and root disk

Invariant: after `destroy_primary` no process or link of the primary site is left to recover from, and no file, unless
the site is to come back.
"""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import time
from pathlib import Path

from .backupserver import BackupServer
from .bootfile import link_boot_files, write_machines
from .guest import READY_S, Guest, ProcessGuest, VmGuest, accelerator, kernel_options
from .hostdaemon import GROUP, HOST, MEMBER, Group, HostDaemon, Member, Protection
from .image import GuestImage, guest_image
from .net import GuestNet, Net, Site
from .pgguest import PostgresProcessGuest
from .pki import Pki
from .process import kill_at_once
from .run import Run

MEMORY_MIB = 512
PROCESS_DISK_MIB = 48
"""A process guest's disk, filled with noise before it is protected: the initial copy has something to bring across."""

DISKS = ["data", "wal"]


class Rig:
    """Two sites, a backup server, a host daemon and a guest of either kind, made but not started."""

    def __init__(
        self,
        run: Run,
        kind: str = "vm",
        rtt_ms: float = 0,
        seed: int = 1,
        disks: int = 1,
        protection: Protection = Protection(),
        window: str = "",
    ):
        self.run, self.kind, self.protection = run, kind, protection
        self.random = random.Random(f"rig {seed}")
        self.image: GuestImage | None = guest_image() if kind == "vm" else None
        self.programs = guest_image() if kind == "postgres" else None
        """Whose PostgreSQL a guest runs that is none of its VMs."""
        self.accelerator = accelerator(self.image) if self.image else []
        """How QEMU runs guests here; finding that out takes a while, once."""
        self.net = Net(run, rtt_ms, seed)
        self.guest_net = GuestNet(0)
        self.net.route_clients_to(self.net.primary, self.guest_net)
        self.primary, self.backup_dir = run.directory / "primary", run.directory / "backup"
        for directory in (self.primary, self.backup_dir):
            directory.mkdir()
        self.site_returns = False
        """Whether a disaster leaves the primary site's files, for when the site is there again."""
        self.pki = pki = Pki(run.directory / "authority")
        backup_tls = pki.issue("backup", self.net.BACKUP4, self.backup_dir / "tls")
        host_tls = pki.issue("host", HOST, self.primary / "tls")
        self.backup = BackupServer(run, self.net.backup.netns, self.backup_dir, backup_tls, window=window)
        self.disks = self._make_disks(disks)
        machine = self.describe_machine(self.backup_dir, self.primary) if self.image else None
        self.member = member = Member(MEMBER, self.guest_net, self.disks, machine=machine)
        self.daemon = HostDaemon(
            run,
            self.net.primary.netns,
            self.primary,
            [Group(GROUP, [member], protection)],
            self.net.BACKUP4,
            host_tls,
        )
        self.guest = self.make_guest("guest")

    def make_guest(self, name: str) -> Guest:
        """The guest, for either site."""
        if self.programs:
            return PostgresProcessGuest(self.run, self.guest_net, name, self.programs)
        return (VmGuest if self.image else ProcessGuest)(self.run, self.guest_net, name)

    def _make_disks(self, count: int) -> dict[str, Path]:
        paths = {name: self.primary / f"{name}.img" for name in DISKS[:count]}
        if image := self.image or self.programs:
            templates = [image.data] if count == 1 else [image.data_split, image.wal]
            for template, path in zip(templates, paths.values(), strict=True):
                subprocess.run(["cp", "--sparse=always", template, path], check=True)
        else:
            for path in paths.values():
                path.write_bytes(self.random.randbytes(PROCESS_DISK_MIB << 20))
        return paths

    def describe_machine(self, backup: Path, directory: Path) -> Path:
        """Writes what a backup server is to boot, and puts kernel, initramfs and root disk at its site."""
        there = link_boot_files(backup / "data", self.image)
        write_machines(backup, there, {(GROUP, MEMBER): kernel_options(self.guest_net)})
        description = {
            "memory_mib": MEMORY_MIB,
            "disks": [{"name": name} for name in self.disks],
            "networks": [{"name": "lan", "mac": self.guest_net.mac}],
        }
        path = directory / "machine.json"
        path.write_text(json.dumps(description, indent=2))
        return path

    def boot_guest(self, reconnect_s: int = 60) -> None:
        """Starts the guest at the primary site, on the daemon's disks."""
        disks = [self.daemon.uri(disk) for disk in self.disks]
        if isinstance(self.guest, VmGuest):
            self.guest.boot(self.net.primary, self.image, disks, MEMORY_MIB, reconnect_s, say_rows=True)
        else:
            self.guest.boot(self.net.primary, disks, reconnect_s)

    def destroy_primary(self, cut_first: bool) -> tuple[float, float]:
        """The disaster. Returns when it began and when nothing of the site was left.

        Links and processes go as close to each other as can be; which go first makes a difference to what is still on
        its way, so both orders are to be tried.
        """
        began = time.monotonic()
        if cut_first:
            self.net.cut_off_primary()
        kill_at_once([*self.guest.processes, self.daemon.process])
        if not cut_first:
            self.net.cut_off_primary()
        ended = time.monotonic()
        if not self.site_returns:
            shutil.rmtree(self.primary)
        return began, ended


class Recovery:
    """`tidelock-backup recover` under way, and the guest that it brings back, at the backup site unless told otherwise.

    A VM is booted by the command itself, from the description that the backup kept. A process guest is started on
    the recovered disks as soon as the command has ended.
    """

    def __init__(
        self,
        rig: Rig,
        *options: str,
        site: Site | None = None,
        server: BackupServer | None = None,
        name: str = "guest-recovered",
    ):
        self.rig = rig
        self.site, self.server = site or rig.net.backup, server or rig.backup
        self.disk_uri = self.server.uri
        """Where a process guest finds its disks."""
        self.lines: list[str] = []
        self.recovered_at: float | None = None
        """When the epoch was raised and the disks could be used."""
        self.guest: Guest = rig.make_guest(name)
        if rig.image:
            self.site.add_tap(rig.guest_net)
            options = (
                *("--boot", "--accept-machine", "--console"),
                *("--network", f"lan=tap:{rig.guest_net.interface}"),
                *("--accelerator", rig.accelerator[1]),
                *options,
            )
        self.began_at = self.guest.started_at = time.monotonic()
        self.command = self.guest.process = self.server.recover(*options, on_line=self._hear)

    def _hear(self, at: float, line: str) -> None:
        self.lines.append(line)
        if line.startswith("group ") and " is recovered" in line:
            self.recovered_at = at
        self.guest.hear(at, line)

    def wait_recovered(self, timeout_s: float) -> None:
        """Waits until the disks can be used."""

        end = time.monotonic() + timeout_s
        while not self.wait_some(1):
            self.check_alive()
            if time.monotonic() > end:
                raise TimeoutError(f"not recovered within {timeout_s:.0f} s\n{self.command.tail()}")

    def wait_some(self, seconds: float) -> bool:
        """Waits for so long at most; returns whether the disks can be used."""
        end = time.monotonic() + seconds
        while self.recovered_at is None and time.monotonic() < end:
            if self.command.popen.poll() not in (None, 0):
                break
            time.sleep(0.01)
        return self.recovered_at is not None

    def check_alive(self) -> None:
        """Fails if the recovery has failed."""
        if self.command.popen.poll() not in (None, 0):
            raise RuntimeError(f"the recovery failed\n{self.command.tail()}")

    def wait_ready(self, timeout_s: float = READY_S) -> None:
        """Waits until the guest serves clients again."""
        if not self.rig.image and self.guest.process is self.command:
            if self.command.wait(timeout_s) != 0:
                raise RuntimeError(f"the recovery failed\n{self.command.tail()}")
            uris = [self.disk_uri(disk) for disk in self.rig.disks]
            self.guest.boot(self.site, uris)
        self.guest.wait_ready(timeout_s)

    def refusal(self, timeout_s: float) -> str:
        """Waits for its end, which must be a refusal, and returns its reason."""
        if self.wait_some(timeout_s):
            raise RuntimeError(f"the recovery was not refused\n{self.command.tail()}")
        if self.command.popen.poll() in (None, 0):
            raise RuntimeError(f"the recovery was neither done nor refused\n{self.command.tail()}")
        self.command.wait(1)
        return "\n".join(self.lines)
