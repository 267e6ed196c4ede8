"""NBD servers that are not ours, so that the testbed's parts can be tested without Tidelock."""

from __future__ import annotations

from pathlib import Path

from tidelock_testbed.process import Process, wait_until
from tidelock_testbed.run import Run


class NbdkitDisk:
    """A raw image behind `nbdkit file`."""

    def __init__(self, run: Run, image: Path, name: str = "disk"):
        socket = run.sockets / f"{name}.nbd"
        self.uri = f"nbd+unix:///{name}?socket={socket}"
        self.process = Process(run, f"nbdkit-{name}", ["nbdkit", "-f", "-U", socket, "-e", name, "file", image])
        wait_until("nbdkit listens", socket.exists, 10, [self.process])


class QemuNbdDisk:
    """A raw image behind `qemu-nbd`."""

    def __init__(self, run: Run, image: Path, name: str = "disk"):
        socket = run.sockets / f"{name}.nbd"
        self.uri = f"nbd+unix:///{name}?socket={socket}"
        self.process = Process(
            run,
            f"qemu-nbd-{name}",
            [
                "qemu-nbd",
                "-k",
                socket,
                "-x",
                name,
                "-f",
                "raw",
                "--persistent",
                "--shared=8",
                "--cache=writeback",
                image,
            ],
        )
        wait_until("qemu-nbd listens", socket.exists, 10, [self.process])
