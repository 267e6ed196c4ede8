"""PostgreSQL as a drill's guest: the VM guest's own programs and file system, as processes on this machine's kernel.

    tidelockd ── NBD ── nbdkit ── nbdfuse ── a file ── loop device ── ext4 ── PGDATA

nbdkit's filter `retry` connects again when the server went away, as QEMU's reconnect-delay does. It is ready in about a
second, and runs at the speed of the machine; `bench/postgres.py` has the rest.

Invariant: what stands between the file system and the disk ends before the guest does, so that nothing is written
after a guest was killed: it loses what it had not flushed, as with a power cut.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

from .bench.postgres import PostgresGuest, private
from .image import GuestImage
from .net import GuestNet, Site
from .netns import Netns
from .process import Process, kill_at_once, wait_until
from .run import Run

CONNECTIONS_MAX = 100
RECONNECT_S = 60

_ON_NBDKIT = """
mount -t tmpfs tmpfs "$1" && mkdir "$1/root" "$1/fuse"
exec nbdfuse "$1/fuse/disk" [ nbdkit --exit-with-parent --filter=retry nbd "uri=$2" \
    retry-delay=1 "retries=$3" retry-exponential=no ]
"""


class PostgresProcessGuest(PostgresGuest):
    """One disk, no web service."""

    def __init__(self, run: Run, net: GuestNet, name: str, image: GuestImage):
        super().__init__(run, net, name)
        self.image = image
        self.netns = Netns(run, name)
        self._lives = 0

    def boot(self, site: Site, disks: list[str], reconnect_s: float = RECONNECT_S) -> None:
        """Starts it at a site, on a disk that is an NBD URI."""
        (uri,) = disks
        self.plug_in(site)
        self._lives += 1
        work = self.run.directory / f"{self.name}-mounts-{self._lives}"
        work.mkdir()
        self.started_at = time.monotonic()
        self.phases["kernel"] = self.started_at
        retries = max(1, int(reconnect_s))
        self.fuse = Process(self.run, f"{self.name}-nbdfuse", private(_ON_NBDKIT, work, uri, retries))
        inside = Path(f"/proc/{self.fuse.pid}/root") / str(work / "fuse" / "disk").lstrip("/")
        wait_until("nbdfuse has the disk", inside.exists, 30, [self.fuse])
        script = Path(__file__).parent / "bench" / "postgres-guest"
        argv = [
            *("nsenter", f"--mount=/proc/{self.fuse.pid}/ns/mnt", "--"),
            *("unshare", "--mount", "--propagation", "private", "--pid", "--fork", "--kill-child"),
            *("sh", script, self.image.root, work / "fuse" / "disk", work, CONNECTIONS_MAX),
        ]
        self.process = Process(self.run, self.name, argv, self.netns, on_line=self.hear)
        # Whatever is ended first at the run's end, its disk is.
        self.run.on_close(f"end {self.name}", self.kill)

    def _add_interface(self, site: Site) -> None:
        site.add_veth(self.net, self.netns)

    @property
    def processes(self) -> list[Process]:
        """What its disk hangs on, and then itself."""
        return [self.fuse, self.process]

    def kill(self) -> None:
        """Ends it at once, as a power cut would."""
        kill_at_once(self.processes)

    def postgres(self) -> list[int]:
        """The numbers of PostgreSQL's processes, its first one first."""
        first = self._named(self._children(self.process.pid))
        return [*first, *(child for parent in first for child in self._children(parent))]

    def _named(self, children: list[int]) -> list[int]:
        """The first process of PostgreSQL below a shell."""
        for child in children:
            if (Path(f"/proc/{child}/exe").readlink()).name == "postgres":
                return [child]
            if found := self._named(self._children(child)):
                return found
        return []

    @staticmethod
    def _children(pid: int) -> list[int]:
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]

    def kill_postgres(self, number: int) -> None:
        """kill -9 of a process of PostgreSQL, so that its first one starts all others anew. That one is left: with it
        the guest ends."""
        # They come and go.
        with contextlib.suppress(OSError):
            if pids := self.postgres()[1:]:
                os.kill(pids[number % len(pids)], signal.SIGKILL)
