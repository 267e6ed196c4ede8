"""Disks without room."""

from __future__ import annotations

import os
from pathlib import Path

from .process import Process, run_command, wait_until
from .run import Run

MIB = 1 << 20


def take_all(ballast: Path) -> None:
    """Takes all the room that the file system of this file has; removing it gives the room back."""
    with ballast.open("wb", buffering=0) as file:
        for size in (MIB, 4096):
            try:
                while file.write(b"\xba" * size) == size:
                    pass
            except OSError:
                pass


class SmallFileSystem:
    """A directory with a file system of its own, in memory, in the mount namespace of a process that only keeps it.

    It can be full at any moment without anything being written, and with the namespace's process it is gone.
    """

    def __init__(self, run: Run, directory: Path, size_mib: int, name: str):
        self.directory, self.size_mib = directory, size_mib
        directory.mkdir(exist_ok=True)
        keep = f'mount -t tmpfs -o size={size_mib}m tmpfs "$1" && echo mounted && exec sleep infinity'
        words = ["unshare", "--mount", "--propagation", "private", "sh", "-c", keep, "-", directory]
        self.keeper = Process(run, name, words)
        wait_until("the file system is there", lambda: "\nmounted" in self.keeper.log.read_text(), 30, [self.keeper])

    def enter(self, argv: list) -> list:
        """The command that runs `argv` where the file system is seen."""
        return ["nsenter", f"--mount=/proc/{self.keeper.pid}/ns/mnt", "--", *argv]

    @property
    def files(self) -> Path:
        """The directory, as seen from outside."""
        return Path(f"/proc/{self.keeper.pid}/root{self.directory}")

    def fill(self) -> None:
        """From now on there is no room for anything more."""
        while True:
            # Its users may have taken more meanwhile, and less than is used it cannot have.
            try:
                return self._resize(f"{self.used_bytes() >> 10}k")
            except RuntimeError:
                continue

    def give_back(self) -> None:
        """There is room again."""
        self._resize(f"{self.size_mib}m")

    def used_bytes(self) -> int:
        """What is used."""
        stat = os.statvfs(self.files)
        return (stat.f_blocks - stat.f_bfree) * stat.f_frsize

    def _resize(self, size: str) -> None:
        words = ["mount", "-o", f"remount,size={size}", self.directory]
        run_command(self.enter(words), "resize a file system")
