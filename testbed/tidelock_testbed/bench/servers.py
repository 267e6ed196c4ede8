"""The NBD servers that are compared: each serves one raw image on a Unix socket."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ..paths import BIN
from ..process import Process, wait_until
from ..run import Run

EXAMPLES = BIN / "examples"
# Network namespaces and pinned maps are named in mounts, and those are its own: however it ends, they end with it.
_ALONE = 'mkdir -p /run/netns; mount -t tmpfs netns /run/netns; mount -t bpf bpf /sys/fs/bpf; exec "$@"'


def example(name: str, *words: object) -> list:
    """The command for one of the crates' own benchmarks."""
    return ["unshare", "--mount", "sh", "-ec", _ALONE, "sh", EXAMPLES / name, *map(str, words)]


def run_example(name: str, *words: object, timeout_s: float) -> dict:
    """What one of the crates' own benchmarks measured."""
    pipe = subprocess.PIPE
    started = subprocess.Popen(example(name, *words), stdout=pipe, stderr=pipe, text=True, start_new_session=True)
    try:
        said, complaint = started.communicate(timeout=timeout_s)
    except BaseException:
        os.killpg(started.pid, signal.SIGKILL)
        started.wait()
        raise
    if started.returncode != 0:
        raise RuntimeError(f"{name}: {complaint}")
    return json.loads(said)


@dataclass(frozen=True)
class Server:
    """One of the servers, and how it treats the page cache on a real disk."""

    key: str
    name: str
    caching: str
    command: Callable[[Path, Path], list]

    def start(self, run: Run, image: Path) -> tuple[Process, str]:
        """Starts it; returns its process and the URI of the disk."""
        socket = run.sockets / f"{self.key}.nbd"
        socket.unlink(missing_ok=True)
        process = Process(run, self.key, self.command(image, socket))
        wait_until(f"{self.name} listens", socket.exists, 10, [process])
        return process, f"nbd+unix:///disk?socket={socket}"


def _qemu_nbd(aio: str) -> Callable[[Path, Path], list]:
    def command(image: Path, socket: Path) -> list:
        common = ["qemu-nbd", "-k", socket, "-x", "disk", "-f", "raw", "--persistent", "--shared=16"]
        return [*common, "--cache=none", f"--aio={aio}", image]

    return command


def _nbdkit(*options: str) -> Callable[[Path, Path], list]:
    def command(image: Path, socket: Path) -> list:
        return ["nbdkit", "-f", "-U", socket, "-e", "disk", "file", image, *options]

    return command


OURS = Server(
    "tidelock",
    "tidelock",
    "O_DIRECT",
    lambda image, socket: [EXAMPLES / "unreplicated", image, socket],
)
QEMU_NATIVE = Server("qemu-nbd-native", "qemu-nbd, aio=native", "O_DIRECT", _qemu_nbd("native"))
QEMU_URING = Server("qemu-nbd-uring", "qemu-nbd, aio=io_uring", "O_DIRECT", _qemu_nbd("io_uring"))
NBDKIT_NO_CACHE = Server(
    "nbdkit-none",
    "nbdkit file cache=none",
    "through the page cache, which it writes out later and drops behind itself",
    _nbdkit("cache=none"),
)
NBDKIT = Server("nbdkit", "nbdkit file", "the page cache; the disk gets the data later", _nbdkit())
