"""A disk round: the test is the guest, over NBD, and knows byte by byte what the disk may hold.

protect -> (some faults, all of them undone)* -> everything comes back, the sites are equal
                                              -> or a disaster in the middle of it, and a recovery
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
from ..net import Net
from ..oracle import Load, Oracle
from ..pair import DISK, GROUP, LONG_S, MEMBER, MIB, Options, Pair
from ..process import wait_until
from ..progress import say
from ..run import Run
from .faults import Troublemaker, Victim, World, inside
from .verdict import Verdict

DISK_MIB = 16
BACKUP_MIB = 160
"""The file system of a backup whose disk is to be full at times."""
EVERY_S = 0.05
PATIENCE_S = 0.2
"""How long the guest and whoever watches wait for a daemon that may be stopped."""


class DiskRound:
    """One life of a protected disk, from its initial copy to its end."""

    def __init__(self, run: Run, seed: int):
        self.run = run
        self.chance = random.Random(f"disk round {seed}")
        self.verdict = Verdict("disk", seed)
        self.mode = self.chance.choice(["pipelined", "pipelined", "sync"])
        self.faulty = FaultyDisk(run, DISK_MIB * MIB) if self.chance.random() < 0.25 else None
        backup_mib = BACKUP_MIB if self.chance.random() < 0.3 else 0
        options = Options(
            mode=self.mode,
            backlog_mib=self.chance.choice([32, 64]),
            copy_rate_mib=self.chance.choice([0, 0, 16]),
            disk_mib=DISK_MIB,
            disk=self.faulty.device if self.faulty else None,
            backup_tmpfs_mib=backup_mib,
            # Some are under way when faults come; each run of the daemon begins one.
            verify=f'every = "1m", rate = "{self.chance.choice([16, 64, 1024])}MiB/s"',
        )
        self.pair = Pair(run, options, Net(run, rtt_ms=self.chance.choice([0, 4, 30])))
        self.oracle = Oracle(DISK_MIB * MIB)
        self.load: Load | None = None
        self.laps = 0
        self.verified_ms = 0
        self.durable = 0
        self.is_over = False
        """The primary site is gone: its daemon is not started again."""
        self.ballast = self.pair.backup_files() / "ballast"
        self.trouble = Troublemaker(self._world(bool(backup_mib)), self.chance)
        self.verdict.faults = self.trouble.counts

    def _world(self, may_be_full: bool) -> World:
        pair = self.pair
        daemon = Victim("daemon", lambda: pair.daemon, self._start_daemon, self._daemon_is_gone)
        backup = Victim("backup", lambda: pair.backup, pair.start_backup)
        in_daemon, in_backup = FaultShim(self.run, "daemon"), FaultShim(self.run, "backup")
        pair.daemon_environment, pair.backup_environment = in_daemon.environment, in_backup.environment
        switches = inside("the daemon", in_daemon, self.chance, has_disk=False)
        switches |= inside("the backup", in_backup, self.chance, has_disk=True)
        if may_be_full:
            switches["disk: the backup's is full"] = (self._fill, lambda: self.ballast.unlink(missing_ok=True))
        if self.faulty:
            # Of what is written; what cannot be read either cannot be compared.
            switches["disk: the primary's fails writes"] = (lambda: self.faulty.fail("pwrite"), self.faulty.fail)
        return World([daemon, backup], pair.net.wans, switches)

    # -- the round -------------------------------------------------------------------------------------------------

    def execute(self) -> Verdict:
        """All of it."""
        pair = self.pair
        pair.start()
        say(f"a disk in mode {self.mode}, {pair.options.backlog_mib} MiB of backlog")
        self.work(0.5)
        for _ in range(self.chance.randrange(2, 6)):
            self.trouble.episode(2.0, self.work)
            self.look_at_the_backup()
        if self.chance.random() < 0.5:
            self.disaster()
        else:
            self.come_back()
        self.verdict.writes = self.oracle.completed
        return self.verdict

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
        if self.load:  # the daemon has ended the connection
            self.load.vanish()
            self.oracle.server_died()
            self.load = None
        # After an unclean stop no disk is served before the backup has been asked: try, do not wait.
        try:
            nbdwire.Connection(self.pair.socket, DISK, PATIENCE_S).close()
        except OSError:
            return
        self.laps += 1
        self.load = self.pair.load(self.oracle, f"{self.verdict.seed} {self.laps}", self.chance.choice([1, 8, 64]))

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

    # -- its ends --------------------------------------------------------------------------------------------------

    def come_back(self) -> None:
        """With all faults gone everything works again, and nothing is lost."""
        pair = self.pair
        say("no fault any more: everything has to come back")
        try:
            pair.wait_state("protected")
            wait_until("the guest writes", self._is_writing, LONG_S, [pair.daemon, pair.backup])
            self.load.finish(timeout_s=LONG_S)
        except (TimeoutError, ConnectionError) as error:
            self.verdict.check(8, False, str(error))
            return
        self.verdict.check(8, True, "")
        expected = {EIO} if self.faulty else set()
        unexpected = set(self.load.errors) - expected
        self.verdict.check(9, not unexpected, f"writes were answered with errors {unexpected}")
        try:
            pair.check_sites(self.oracle)
        except AssertionError as error:
            self.verdict.check(6, False, str(error))
            return
        for rule in (2, 6, 9):
            self.verdict.check(rule, True, "")

    def _is_writing(self) -> bool:
        self._keep_writing()
        return self.load is not None and self.load.replies > 10

    def disaster(self) -> None:
        """The primary site is gone in the middle of a fault, or soon after one."""
        pair = self.pair
        if self.chance.random() < 0.7:
            self.trouble.begin_one()
            self.work(self.chance.uniform(0, 1))
        say("DISASTER: the primary site is gone")
        self.is_over = True
        pair.daemon.kill()
        self._daemon_is_gone()
        self.trouble.heal()
        self.look_at_the_backup()
        recover = pair.start_recovery("--primary-is-dead")
        if recover.wait(LONG_S) != 0:
            self.verdict.check(8, False, f"the recovery failed\n{recover.tail()}")
            return
        image = self._recovered_image()
        prefix = self.oracle.violations_of_prefix(image)
        self.verdict.check(2, not prefix, f"{len(prefix)} blocks are of no prefix: {prefix[:3]}")
        if self.mode == "sync":
            lost = self.oracle.violations(image)
            self.verdict.check(9, not lost, f"{len(lost)} blocks lack what had completed: {lost[:3]}")
        image.unlink()
        self.is_over = False
        pair.start_daemon()
        try:
            pair.wait_state("fenced")
            self.verdict.check(4, True, "")
        except TimeoutError as error:
            self.verdict.check(4, False, str(error))

    def _recovered_image(self) -> Path:
        disk = f"{MEMBER}.{DISK}"
        export = self.run.sockets / "exports" / GROUP / f"{disk}.sock"
        wait_until("the recovered disk is offered", export.exists, LONG_S, [self.pair.backup])
        image = self.pair.directory / "recovered.img"
        guest = nbdwire.Connection(export, disk)
        image.write_bytes(b"".join(guest.read(at, MIB) for at in range(0, DISK_MIB * MIB, MIB)))
        guest.close()
        return image

    # -- what faults do to the guest -------------------------------------------------------------------------------

    def _start_daemon(self) -> None:
        if not self.is_over:
            self.pair.start_daemon()

    def _daemon_is_gone(self) -> None:
        if self.load:
            self.load.vanish()
            self.oracle.server_died()
            self.load = None

    def _fill(self) -> None:
        with self.ballast.open("wb", buffering=0) as file:
            for size in (MIB, 4096):
                try:
                    while file.write(b"\xba" * size) == size:
                        pass
                except OSError:
                    pass
