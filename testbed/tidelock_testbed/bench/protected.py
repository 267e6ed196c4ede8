"""Two sites with a protected disk between them, for a guest that is not a VM: fio, or a PostgreSQL of this machine."""

from __future__ import annotations

import time
from pathlib import Path

from ..backupserver import BackupServer
from ..hostdaemon import GROUP, HOST, MEMBER, ControlClient, Group, HostDaemon, Member, Protection, writer_of
from ..net import GuestNet, Net
from ..netns import Netns
from ..pki import Pki
from ..process import wait_until
from ..run import Run

DISK = "data"
BESIDE = "beside"
COPY_S = 600
"""The first copy of a disk is complete long before."""


class Protected:
    """Both sites, running, and a guest's namespace behind the gate. Everything shares this machine's cores, and its
    disk, unless the backup is given a directory elsewhere. `beside`: the disk of a second group on the same host."""

    def __init__(
        self,
        run: Run,
        image: Path,
        rtt_ms: float,
        directory: Path,
        backup_directory: Path | None = None,
        protection: Protection = Protection(),
        beside: Path | None = None,
    ):
        self.run = run
        self.net = Net(run, rtt_ms)
        self.guest_net = GuestNet(0)
        self.guest_netns = Netns(run, "guest")
        self.net.primary.add_veth(self.guest_net, self.guest_netns)
        self.net.route_clients_to(self.net.primary, self.guest_net)
        primary, backup = directory / "primary", (backup_directory or directory) / "backup"
        primary.mkdir()
        backup.mkdir()
        pki = Pki(directory / "authority")
        backup_tls = pki.issue("backup", self.net.BACKUP4, backup / "tls")
        host_tls = pki.issue("host", HOST, primary / "tls")
        groups = [Group(GROUP, [Member(MEMBER, self.guest_net, {DISK: image})], protection)]
        if beside:
            other = GuestNet(1)
            self.net.primary.add_veth(other, Netns(run, "guest-beside"))
            # In mode sync a write takes as long as its commit.
            groups.append(Group(BESIDE, [Member(BESIDE, other, {DISK: beside})], Protection(mode="sync")))
        self.backup = BackupServer(run, self.net.backup.netns, backup, backup_tls)
        self.daemon = HostDaemon(
            run,
            self.net.primary.netns,
            primary,
            groups,
            self.net.BACKUP4,
            host_tls,
        )
        self.backup.start()
        self.daemon.start()

    @property
    def uri(self) -> str:
        """The protected disk."""
        return self.daemon.uri(DISK)

    def processes(self) -> dict[str, int]:
        """The programs that replication is made of, by name."""
        pids = {"tidelockd": self.daemon.process.pid, "tidelock-backup": self.backup.process.pid}
        cable = getattr(self.net.wan._cable, "process", None)  # netem has none
        if cable is not None:
            pids["the WAN's delay line"] = cable.pid
        return pids

    def wait_protected(self) -> float:
        """Waits for the first copy; returns the seconds that it took."""
        began = time.monotonic()
        for group in self.daemon.status()["groups"]:
            self.daemon.wait_state("protected", COPY_S, [self.backup.process], name=group["name"])
        return time.monotonic() - began

    def settle(self) -> None:
        """Waits until the backup has everything, so that the next turn of something else is not disturbed."""
        wait_until(
            "the backup has every write",
            lambda: all(writer_of(group)["lag"]["writes"] == 0 for group in self.daemon.status()["groups"]),
            120,
            [self.daemon.process, self.backup.process],
            every_s=0.05,
        )

    def set_mode(self, mode: str) -> None:
        """Switches the group's mode; in force on return."""
        control = ControlClient(self.daemon.control_socket)
        try:
            control.ask(command="mode", group=GROUP, mode=mode)
        finally:
            control.close()
        wait_until(f"the mode is {mode}", lambda: self.daemon.group()["mode"] == mode, 10, [self.daemon.process])
