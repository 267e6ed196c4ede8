"""A block device that fails or is slow when it is told to: nbdkit's filters `error` and `rate`, seen through nbdfuse
and a loop device.

Nothing of it outlives its processes: the FUSE mount stands in a mount namespace of theirs, and the loop device
goes away with its last user once `detach` was called.
"""

from __future__ import annotations

from pathlib import Path

from .process import Process, run_command, wait_until
from .run import Run

BURST_S = 0.2
"""What a slow disk does at once after a rest, in seconds of its rate. By default it is longer than a fault."""


class FaultyDisk:
    """`device` works like `image` until `fail` or `slow` is called.

    The filter knows nothing of flushes. A disk whose flushes are to fail is a few shell commands instead of nbdkit's
    own plugin for files, and slow.
    """

    def __init__(self, run: Run, size_bytes: int, with_flush: bool = False):
        directory = run.directory / "faulty"
        directory.mkdir()
        self.image = directory / "backing.img"
        with self.image.open("wb") as file:
            file.truncate(size_bytes)
        self._triggers = {kind: directory / f"fail-{kind}" for kind in ("pread", "pwrite", "flush")}
        plugin = self._commands(size_bytes) if with_flush else ["file", self.image]
        mount = directory / "mount"
        mount.mkdir()
        self._rate = directory / "rate"
        self.slow(0)
        errors = [f"error-{kind}-{what}" for kind in ("pread", "pwrite") for what in self._how(kind)]
        self.process = Process(
            run,
            "faulty-disk",
            [
                *("unshare", "--mount", "--propagation", "private"),
                *("nbdfuse", mount / "disk", "[", "nbdkit", "--filter=rate", "--filter=error", *plugin),
                *(f"rate-file={self._rate}", f"burstiness={BURST_S}", *errors, "]"),
            ],
        )
        # The mount is seen from inside only; a file there can be opened from anywhere.
        file = Path(f"/proc/{self.process.pid}/root{mount}/disk")
        wait_until("nbdfuse serves the disk", lambda: file.exists() and file.stat().st_size, 30, [self.process])
        # Direct: a page cache below the device would answer reads, and hide what became of a failed write.
        losetup = ["losetup", "--find", "--show", "--direct-io=on", file]
        self.device = Path(run_command(losetup, "make a loop device").strip())
        self._attached = True
        run.on_close(f"detach {self.device}", self.detach)

    def _commands(self, size_bytes: int) -> list[str]:
        trigger, image = self._triggers["flush"], self.image
        return [
            "eval",
            f"get_size=echo {size_bytes}",
            f"pread=dd if={image} skip=$4 count=$3 iflag=skip_bytes,count_bytes status=none",
            f"pwrite=dd of={image} seek=$4 conv=notrunc oflag=seek_bytes status=none",
            f"flush=if [ -e {trigger} ]; then echo EIO no flush >&2; exit 1; fi; sync -d {image}",
        ]

    def _how(self, kind: str) -> list[str]:
        # Every read, and every other write: requests that fail stand between some that do not.
        rate = "100%" if kind == "pread" else "50%"
        return [f"rate={rate}", f"file={self._triggers[kind]}"]

    def detach(self) -> None:
        """Lets the device go away with its last user."""
        if self._attached:
            self._attached = False
            run_command(["losetup", "--detach", self.device], f"detach {self.device}")

    def fail(self, *kinds: str) -> None:
        """From now on only these kinds of requests fail: `pread`, `pwrite`, `flush`, or nothing."""
        for kind, trigger in self._triggers.items():
            trigger.touch() if kind in kinds else trigger.unlink(missing_ok=True)

    def slow(self, bytes_per_s: float) -> None:
        """From now on no more than so much is read and written; 0: as much as can be."""
        self._rate.write_text(f"{int(bytes_per_s * 8)}\n")
