"""A protected disk under faults: the test is its guest, over NBD, and knows byte by byte what it may hold.

What rounds have in common: a guest that writes whenever there is a disk to write to, and a watch over what the daemon
and the backup say meanwhile.
"""

from __future__ import annotations

import random
import time
from pathlib import Path

from .. import nbdwire
from ..faultshim import FaultShim
from ..faultydisk import FaultyDisk
from ..hostdaemon import writer_of
from ..nbdwire import EIO
from ..oracle import Load, Oracle
from ..pair import DISK, GROUP, LONG_S, MEMBER, MIB, Pair
from ..paths import BIN
from ..process import run_command, wait_until
from ..progress import say
from ..room import take_all
from ..run import Run
from .faults import Troublemaker, Victim, World, inside
from .verdict import Verdict

DISK_MIB = 16
NAME = f"{MEMBER}.{DISK}"
"""The disk's name at the backup."""
SLOW_BYTES_PER_S = 4e6
"""Of a primary's disk that is slow: less than the guest writes."""
EVERY_S = 0.05
PATIENCE_S = 0.2
"""How long the guest and whoever watches wait for a daemon that may be stopped."""
DEPTHS = (1, 8, 64)
"""How many requests a guest has under way."""


class TorturedDisk:
    """The guest, its memory, and the pair of processes that protect its disk now."""

    kind = "disk"

    def __init__(self, run: Run, seed: int):
        self.run = run
        self.chance = random.Random(f"{self.kind} round {seed}")
        self.verdict = Verdict(self.kind, seed)
        self.oracle = Oracle(DISK_MIB * MIB)
        self.load: Load | None = None
        self.laps = 0
        self.cut_a_resync = False
        self.told = 0
        """So much of what the guest has done was at the backup for certain, and may have been told to anybody."""

    def protect_by(self, pair: Pair, may_be_full: bool = False, faulty: FaultyDisk | None = None) -> None:
        """From now on these processes protect the disk, and suffer."""
        self.pair, self.faulty = pair, faulty
        self.verified_ms = 0
        self.durable = 0
        self.is_over = False
        """The primary site is gone: its daemon is not started again."""
        self.ballast = pair.backup_files() / "ballast"
        self.trouble = Troublemaker(self._world(may_be_full), self.chance)
        self.trouble.counts = self.verdict.faults

    def _world(self, may_be_full: bool) -> World:
        pair = self.pair
        daemon = Victim("daemon", lambda: pair.daemon, self._start_daemon, self._daemon_is_gone)
        backup = Victim("backup", lambda: pair.backup, pair.start_backup)
        in_daemon = FaultShim(self.run, f"daemon of {pair.name}")
        in_backup = FaultShim(self.run, f"backup of {pair.name}", has_disk=True)
        pair.daemon_environment, pair.backup_environment = in_daemon.environment, in_backup.environment
        switches = inside("the daemon", in_daemon, self.chance, has_disk=False)
        switches |= inside("the backup", in_backup, self.chance, has_disk=True)
        if may_be_full:
            switches["disk: the backup's is full"] = (
                lambda: take_all(self.ballast),
                lambda: self.ballast.unlink(missing_ok=True),
            )
        if faulty := self.faulty:
            switches["disk: the primary's fails writes"] = (lambda: faulty.fail("pwrite"), faulty.fail)
            # What cannot be read cannot be compared: it is tried again.
            switches["disk: the primary's fails reads"] = (lambda: faulty.fail("pread"), faulty.fail)
            switches["disk: the primary's is slow"] = (lambda: faulty.slow(SLOW_BYTES_PER_S), lambda: faulty.slow(0))
        return World([daemon, backup], pair.net.wans, switches)

    # -- the guest, and who watches ----------------------------------------------------------------------------------

    def work(self, seconds: float) -> None:
        """Lets the guest write for so long, if there is a disk to write to, and watches."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            self._keep_writing()
            self._watch()
            time.sleep(min(left, EVERY_S))

    def _keep_writing(self) -> None:
        if self.is_over or (self.load and self.load.alive()):
            return
        self._forget_load()  # the daemon has ended the connection
        # After an unclean stop no disk is served before the backup has been asked: try, do not wait.
        try:
            nbdwire.Connection(self.pair.socket, DISK, PATIENCE_S).close()
        except OSError:
            return
        self.load = self.pair.load(self.oracle, self._next_seed(), self.chance.choice(DEPTHS))

    def _next_seed(self) -> str:
        self.laps += 1
        return f"{self.verdict.seed} {self.laps}"

    def _watch(self) -> None:
        try:
            groups = self.pair.status(timeout_s=PATIENCE_S)["groups"]
        except OSError:  # nobody answers: it is dead, or stopped
            return
        self._look_at_verification(writer_of(groups[0])["verify"]["last"])
        backlog = writer_of(groups[0])["backlog"]
        text = f"the backlog has {backlog['used_bytes']} bytes, its limit is {backlog['limit_bytes']}"
        self.verdict.check(10, backlog["used_bytes"] <= backlog["limit_bytes"], text)

    def _look_at_verification(self, last: dict | None) -> None:
        """Nobody has changed a byte behind the daemon's back, so the sites never differ, whatever has failed."""
        if last and last["ended_unix_ms"] != self.verified_ms:
            self.verified_ms = last["ended_unix_ms"]
            text = f"a verification found the sites to differ: {last['differing'][:5]}"
            self.verdict.check(6, last["differing_bytes"] == 0, text)

    def look_at_the_backup(self) -> None:
        """What it has made durable never falls."""

        def writers() -> list[dict]:
            return self.pair.backup_group()["writers"]

        # A group whose files failed has none until it is opened again.
        durable = wait_until("the backup has the group", writers, LONG_S, [self.pair.backup])[0]["durable"]
        self.verdict.check(3, durable >= self.durable, f"the backup had {self.durable} writes, and has {durable}")
        self.durable = durable

    def tell(self) -> None:
        """What has completed by now may be told, if the backup says that it has it: a bookmark has all that was
        written before it."""
        position = self.oracle.position()
        words = [BIN / "tidelock", "bookmark", GROUP, "told", "--move", "--timeout", "2s"]
        try:
            run_command([*words, "--socket", self.pair.control_socket], "set a bookmark")
        except RuntimeError:  # the backup is away, or the daemon
            return
        self.told = position

    # -- ends ----------------------------------------------------------------------------------------------------------

    def come_back(self) -> bool:
        """With all faults gone everything works again, and nothing is lost. The guest holds still then."""
        pair = self.pair
        say("no fault any more: everything has to come back")
        try:
            pair.wait_state("protected")
            wait_until("the guest writes", self._is_writing, LONG_S, [pair.daemon, pair.backup])
            self.load.finish(timeout_s=LONG_S)
        except (TimeoutError, ConnectionError) as error:
            self.verdict.check(8, False, str(error))
            return False
        self.verdict.check(8, True, "")
        expected = {EIO} if self.faulty else set()
        unexpected = set(self.load.errors) - expected
        self.verdict.check(9, not unexpected, f"writes were answered with errors {unexpected}")
        self.load = None
        try:
            pair.check_sites(self.oracle)
        except AssertionError as error:
            self.verdict.check(6, False, str(error))
            return False
        for rule in (2, 6, 9):
            self.verdict.check(rule, True, "")
        return True

    def _is_writing(self) -> bool:
        self._keep_writing()
        return self.load is not None and self.load.replies > 10

    def recover(self, *options: str) -> Path | None:
        """The group is recovered: the disk as the backup offers it now."""
        recover = self.pair.start_recovery(*options)
        if recover.wait(LONG_S) != 0:
            self.verdict.check(8, False, f"the recovery failed\n{recover.tail()}")
            return None
        self.cut_a_resync = "a resync of host" in recover.tail()
        return self._recovered_image()

    def check_recovered(self, image: Path, mode: str) -> None:
        """It is a state that the disk had, with all that was told, or in mode sync all that had completed, unless the
        recovery says that it has left out a resync."""
        prefix = self.oracle.violations_of_prefix(image)
        self.verdict.check(2, not prefix, f"{len(prefix)} blocks are of no prefix: {prefix[:3]}")
        if self.told:
            lacks = self.oracle.violations_of_prefix(image, at_least=self.told)
            self.verdict.check(1, not lacks, f"{len(lacks)} blocks lack what was told: {lacks[:3]}")
        # Until a resync has ended nothing is told, and a recovery goes back to before it.
        if mode == "sync" and not self.cut_a_resync:
            lost = self.oracle.violations(image)
            self.verdict.check(9, not lost, f"{len(lost)} blocks lack what had completed: {lost[:3]}")

    def _recovered_image(self) -> Path:
        export = self.recovered_socket()
        wait_until("the recovered disk is offered", export.exists, LONG_S, [self.pair.backup])
        image = self.pair.directory / "recovered.img"
        guest = nbdwire.Connection(export, NAME)
        image.write_bytes(b"".join(guest.read(at, MIB) for at in range(0, DISK_MIB * MIB, MIB)))
        guest.close()
        return image

    def recovered_socket(self) -> Path:
        """Where the backup offers the recovered disk."""
        return self.pair.sockets / "exports" / GROUP / f"{NAME}.sock"

    # -- what faults do to the guest ---------------------------------------------------------------------------------

    def _start_daemon(self) -> None:
        if not self.is_over:
            self.pair.start_daemon()

    def _daemon_is_gone(self) -> None:
        self._forget_load()

    def _forget_load(self) -> None:
        if self.load:
            self.load.vanish()
            self.oracle.server_died()
            self.load = None
