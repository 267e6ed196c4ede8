"""`qemu-storage-daemon`: QEMU's disks without a machine, in front of guests that are processes.

guest ── NBD ──> qemu-storage-daemon ── NBD ──> a view at the backup site, and later a host daemon's disk
                      ▲
                      └── QMP: the same that a VM's QEMU understands
"""

from __future__ import annotations

from .guest import blockdev
from .process import Process, wait_until
from .run import Run

RECONNECT_S = 60


class StorageDaemon:
    """Serves disks that are NBD URIs itself, under their names: what is behind one may change while a guest uses it."""

    def __init__(self, run: Run, disks: dict[str, str], name: str = "storage"):
        directory = run.sockets / name
        directory.mkdir()
        self.qmp = directory / "qmp"
        self.socket = directory / "nbd"
        words = ["qemu-storage-daemon", "--chardev", f"socket,path={self.qmp},server=on,wait=off,id=qmp"]
        words += ["--monitor", "chardev=qmp"]
        words += ["--nbd-server", f"addr.type=unix,addr.path={self.socket},max-connections=0"]
        for number, (disk, uri) in enumerate(disks.items()):
            words += ["--blockdev", f"node-name=disk{number},discard=unmap,{blockdev(uri, RECONNECT_S)}"]
            words += ["--export", f"type=nbd,id={disk},node-name=disk{number},name={disk},writable=on"]
        self.process = Process(run, f"qemu-storage-daemon-{name}", words)
        wait_until("qemu-storage-daemon listens", self._listens, 30, [self.process])

    def _listens(self) -> bool:
        return self.qmp.exists() and self.socket.exists()

    def uri(self, disk: str) -> str:
        """Where a disk is served."""
        return f"nbd+unix:///{disk}?socket={self.socket}"
