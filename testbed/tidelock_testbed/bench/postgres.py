"""PostgreSQL as a process guest: the VM guest's own programs on this machine's kernel, quick enough to measure.

    tidelockd ── NBD ── nbdfuse ── a file ── loop device ── ext4 ── PGDATA

The file system's flushes become NBD flushes, as a VM's do. Everything hangs on two processes: `nbdfuse`, in a mount
namespace of its own, and the guest, in one below it. The first must outlive the second: a file system whose disk
is served by the process that unmounts it waits for itself. Where the guest does not end by itself, `nbdfuse` is
ended before it, which turns what waits into I/O errors.
"""

from __future__ import annotations

import math
import subprocess
from dataclasses import dataclass
from pathlib import Path

from ..guest import Guest
from ..image import GuestImage
from ..net import GuestNet
from ..netns import Netns
from ..process import Process, run_command, wait_until
from ..run import Run
from .spread import percentile

CONNECTIONS_MAX = 900
STOP_S = 20
PGBIN = "/usr/lib/postgresql/15/bin"

_ON_FUSE = """
mount -t tmpfs tmpfs "$1" && mkdir "$1/root" "$1/fuse" && exec nbdfuse "$1/fuse/disk" "$2"
"""

_MAKE_DISK = """
mount -t tmpfs tmpfs "$1" && mkdir "$1/from" && mount -o loop,ro "$2" "$1/from"
mke2fs -q -t ext4 -b 4096 -d "$1/from" "$3"
"""

_TOOLS = """
mount -o loop,ro "$1" "$2" && mount -t tmpfs tmpfs "$2/dev"
touch "$2/dev/null" && mount --bind /dev/null "$2/dev/null"
mount --bind "$3" "$2/tmp" && echo ready && exec sleep infinity
"""


def private(script: str, *words: object) -> list:
    """A command line: a shell script in a mount namespace of its own, whose mounts end with it."""
    return ["unshare", "--mount", "--propagation", "private", "sh", "-ec", script, "-", *words]


def database_disk(run: Run, image: GuestImage, path: Path, size_mib: int) -> Path:
    """A disk with an initialised PGDATA on ext4 with blocks of 4 KiB, every block of it allocated."""
    with path.open("wb") as disk:
        block = bytes(1 << 20)
        for _ in range(size_mib):
            disk.write(block)
    work = run.directory / "make-disk"
    work.mkdir(exist_ok=True)
    run_command(private(_MAKE_DISK, work, image.data, path), "make a database disk", timeout_s=120)
    return path


class PostgresGuest(Guest):
    """PostgreSQL on an NBD disk, in a guest's network namespace, and perhaps a tier's web service beside it."""

    database = "postgres"
    database_port = 5432

    def boot(self, netns: Netns, image: GuestImage, uri: str) -> None:
        """Starts it."""
        work = self.run.directory / f"{self.name}-mounts"
        work.mkdir()
        self.fuse = Process(self.run, f"{self.name}-nbdfuse", private(_ON_FUSE, work, uri))
        # Seen from inside nbdfuse's mount namespace.
        inside = Path(f"/proc/{self.fuse.pid}/root") / str(work / "fuse" / "disk").lstrip("/")
        wait_until("nbdfuse has the disk", inside.exists, 20, [self.fuse])
        script = Path(__file__).with_name("postgres-guest")
        argv = [
            *("nsenter", f"--mount=/proc/{self.fuse.pid}/ns/mnt", "--"),
            *("unshare", "--mount", "--propagation", "private", "--pid", "--fork", "--kill-child"),
            *("sh", script, image.root, work / "fuse" / "disk", work, CONNECTIONS_MAX, *(self.web or [])),
        ]
        self.process = Process(self.run, self.name, argv, netns, on_line=self.hear)
        self.run.on_close(f"end {self.name}", self.end)

    def end(self) -> None:
        """Ends the database, then what its disk hangs on."""
        if self.process.alive():
            # The script is the first process of its namespace, and the only child of `unshare`.
            children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
            for child in children:
                subprocess.run(["kill", "-TERM", child], check=False)
            try:
                self.process.wait(STOP_S)
            except TimeoutError:
                self.fuse.kill()
        self.process.kill()
        self.fuse.kill()


@dataclass(frozen=True)
class Turn:
    """One turn of pgbench."""

    tps: float
    p50_ms: float
    p99_ms: float
    transactions: int


class Pgbench:
    """pgbench of the guest's root image, in the clients' namespace."""

    def __init__(self, run: Run, netns: Netns, image: GuestImage):
        self.run, self.netns = run, netns
        self.shared = run.directory / "pgbench"
        self.shared.mkdir()
        self.shared.chmod(0o777)
        self.root = run.directory / "tools"
        self.root.mkdir()
        self.holder = Process(run, "tools-mount", private(_TOOLS, image.root, self.root, self.shared))
        wait_until("pgbench is mounted", lambda: "\nready" in self.holder.log.read_text(), 10, [self.holder])

    def _enter(self, *words: object) -> list:
        enter = ["nsenter", f"--mount=/proc/{self.holder.pid}/ns/mnt", "--"]
        return [*enter, "chroot", self.root, "env", "LC_ALL=C.UTF-8", "HOME=/tmp", *words]

    def sql(self, net: GuestNet, text: str) -> str:
        """Runs statements as the database's superuser."""
        argv = self._enter(
            f"{PGBIN}/psql", "-h", net.ip4, "-U", "postgres", "-qAtX", "-v", "ON_ERROR_STOP=1", "-c", text
        )
        return run_command(argv, "run SQL", self.netns)

    def script(self, name: str, text: str) -> None:
        """Keeps a script for `turn`."""
        (self.shared / f"{name}.sql").write_text(text)

    def turn(self, net: GuestNet, script: str, clients: int, seconds: float, warm_up_s: float) -> Turn:
        """All clients at full speed, each sending its next transaction when the last was answered.

        What is answered in the first `warm_up_s`, while each new server process fills its caches, is not counted.
        """
        for old in self.shared.glob("log.*"):
            old.unlink()
        whole = math.ceil(seconds + warm_up_s)
        argv = self._enter(
            *(f"{PGBIN}/pgbench", "-h", net.ip4, "-U", "postgres", "-n", "-M", "simple"),
            *("-f", f"/tmp/{script}.sql", "-c", str(clients), "-j", "1", "-T", str(whole)),
            *("--log", "--log-prefix=/tmp/log", "postgres"),
        )
        text = run_command(argv, "run pgbench", self.netns, timeout_s=whole + 180)
        lines = [line for log in self.shared.glob("log.*") for line in log.read_text().splitlines()]
        turn = read_log(lines, warm_up_s, whole)
        if turn is None:
            raise RuntimeError(f"pgbench had no answer within {whole} s:\n{text}")
        return turn


def read_log(lines: list[str], warm_up_s: float, seconds: float) -> Turn | None:
    """What pgbench's log says of the time from `warm_up_s` to `seconds` after its first request."""
    answers = []
    for line in lines:
        _client, _number, took_us, _script, at_s, at_us = map(int, line.split()[:6])
        answers.append((at_s + at_us / 1e6, took_us / 1e3))
    if not answers:
        return None
    first = min(at - took_ms / 1e3 for at, took_ms in answers)
    times_ms = [took_ms for at, took_ms in answers if warm_up_s <= at - first <= seconds]
    if not times_ms:
        return None
    tps = len(times_ms) / (seconds - warm_up_s)
    return Turn(tps, percentile(times_ms, 50), percentile(times_ms, 99), len(times_ms))
