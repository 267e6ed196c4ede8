"""Faults of a disk round in which something is of another moment: the daemon's state directory, its disk or both, a
host of which a clone is started, the backup's data.

Clients may know more than what is put back. So what was told before counts no more once that is done, and what the
sites hold in the end counts all the more.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from ..oracle import BLOCK, block_data
from ..pair import MIB
from ..process import Process
from .faults import Switch, rises

if TYPE_CHECKING:
    from .tortured_disk import TorturedDisk

STOPS_S = 15
"""The time that a daemon is given for a clean stop."""
SETTLES_S = 0.3
"""By then the kernel has done what a process that stands still had given it."""
FULL_BACKUP = "room: the backup's disk is full"


class OtherMoment:
    """What can be put back, and what was kept of it."""

    def __init__(self, of: TorturedDisk):
        self.of, self.pair = of, of.pair
        self.older_state, self.older_data = self.pair.directory / "older state", self.pair.directory / "older data"
        self.clones: list[Process] = []

    def switches(self) -> dict[str, Switch]:
        """The faults, by name."""
        changes = {
            "state: of an older moment": lambda: self._older(state=True, disk=False),
            "state: with the disk, of an older moment": lambda: self._older(state=True, disk=True),
            "state: the disk is of an older moment": lambda: self._older(state=False, disk=True),
            "state: the disk is changed while nobody runs": self._change,
        }
        compares = rises(self._comparisons)
        subjects = frozenset({"daemon"})
        faults = {name: Switch(begin, self._end, compares, subjects) for name, begin in changes.items()}
        faults["state: a clone of the host is started beside it"] = Switch(
            self._clone, self._end_clone, compares, subjects
        )
        of_backup = frozenset({"daemon", "backup", FULL_BACKUP})
        faults["state: the backup's data is of an older moment"] = Switch(
            self._older_backup, self._end, compares, of_backup
        )
        return faults

    def _end(self) -> None:
        if not self.pair.daemon.alive():
            self.of.daemon_is_gone()
            self.of.start_daemon()

    def _comparisons(self) -> int:
        """How often a daemon has found that the sites may differ."""
        said = (" comparing ", "the backup has lost acknowledged writes")
        logs = [log.read_text() for log in self.pair.run.directory.glob("*tidelockd-*.log")]
        return sum(log.count(words) for log in logs for words in said)

    # -- the host ------------------------------------------------------------------------------------------------------

    def _older(self, state: bool, disk: bool) -> None:
        of, kept = self.of, self._keep()
        of.work(of.chance.uniform(0, 2))
        if state:
            self.pair.daemon.kill()
            of.daemon_is_gone()
            _replace(self.pair.state_files, self.older_state)
        if disk and (state or self._stops_cleanly()):
            self._put_back_disk(kept)
        of.try_to_start()
        of.work(1)

    def _keep(self) -> bytes:
        """Keeps the state directory and the disk as they are: as a crash at this moment would leave them."""
        with _stands_still(self.pair.daemon):
            _replace(self.older_state, self.pair.state_files)
            return self.pair.local_content()

    def _put_back_disk(self, content: bytes) -> None:
        """In place, as an operator does who restores it. What clients were told since counts no more."""
        try:
            self._write_to_disk(0, content)
        except OSError:  # a fault of the disk is under way
            self.of.faulty.fail()
            self._write_to_disk(0, content)
        self.of.oracle.restored(content)
        self.of.told = 0

    def _stops_cleanly(self) -> bool:
        """Stops the daemon. After an end that is not clean, a change of the disk is seen only if it comes a minute
        later."""
        daemon = self.pair.daemon
        daemon.signal(signal.SIGTERM)
        with contextlib.suppress(TimeoutError):
            daemon.wait(STOPS_S)
        daemon.kill()
        self.of.daemon_is_gone()
        clean = json.loads(self.pair.state_file.read_text())["clean"]
        return bool(clean) and not clean.get("served")

    def _change(self) -> None:
        """A tool writes to the disk, as the guest would."""
        if self._stops_cleanly():
            oracle = self.of.oracle
            first = self.of.chance.randrange(oracle.blocks - 8)
            write = oracle.issue(range(first, first + 8), zero=False)
            content = b"".join(block_data(write.version, block) for block in write.blocks)
            with contextlib.suppress(OSError):  # one that fails may be done
                self._write_to_disk(first * BLOCK, content)
                oracle.complete(write)
        self.of.try_to_start()

    def _write_to_disk(self, at: int, content: bytes) -> None:
        with self.pair.disk.open("r+b", buffering=0) as disk:
            for offset in range(0, len(content), MIB):
                os.pwrite(disk.fileno(), content[offset : offset + MIB], at + offset)
            os.fsync(disk.fileno())

    def _clone(self) -> None:
        """State directory and disk are copied, and a daemon is started on the copies with the host's name and
        certificate: the newer run takes the member over. What the group has then is an older moment of the disk."""
        of, content = self.of, self._keep()
        of.work(of.chance.uniform(0, 1))
        self.clones.append(self.pair.start_clone(self.older_state, content))
        of.told = 0
        of.work(of.chance.uniform(1, 2))

    def _end_clone(self) -> None:
        """The operator stops the wrong one, and starts the right one again."""
        self.clones.pop().kill()
        self.pair.daemon.kill()
        self._end()

    # -- the backup ----------------------------------------------------------------------------------------------------

    def _older_backup(self) -> None:
        """A copy of its data that was made while it ran takes the place of what it has; perhaps the copy that was
        replaced the last time, as with a clone that has gone on for a while. The host finds that it has less than it
        was told, or the stream of another run."""
        of, files = self.of, self.pair.backup_files()
        if not self.older_data.exists() or of.chance.random() < 0.5:
            with _stands_still(self.pair.backup):
                _replace(self.older_data, files)
            of.work(of.chance.uniform(0, 2))
        self.pair.backup.kill()
        replaced = self.pair.directory / "replaced data"
        _replace(replaced, files)
        _replace(files, self.older_data)
        _replace(self.older_data, replaced)
        of.told = of.durable = 0
        of.marks.forget_all()
        of.may_end = True
        self.pair.start_backup()
        of.work(1)


@contextlib.contextmanager
def _stands_still(process: Process) -> Iterator[None]:
    process.signal(signal.SIGSTOP)
    time.sleep(SETTLES_S)
    try:
        yield
    finally:
        process.signal(signal.SIGCONT)


def _replace(directory: Path, by: Path) -> None:
    """What is in it, by a copy of what is there."""
    directory.mkdir(exist_ok=True)
    for path in directory.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    shutil.copytree(by, directory, dirs_exist_ok=True)
