"""A disk round: the test is the guest, over NBD, and knows byte by byte what the disk may hold.

protect -> (some faults, all of them undone)* -> everything comes back, the sites are equal
                                              -> or a disaster in the middle of it, and a recovery
"""

from __future__ import annotations

from ..faultydisk import FaultyDisk
from ..net import Net
from ..pair import MIB, Options, Pair
from ..progress import say
from ..run import Run
from .tortured_disk import DISK_MIB, TorturedDisk
from .verdict import Verdict

BACKUP_MIB = 640
"""The file system of a backup whose disk is to be full at times. What is written in a resync stays in the journal until
its end, and this guest writes all the while: a backup without room for that needs somebody who makes some."""


class DiskRound(TorturedDisk):
    """One life of a protected disk, from its initial copy to its end."""

    def __init__(self, run: Run, seed: int):
        super().__init__(run, seed)
        self.mode = self.chance.choice(["pipelined", "pipelined", "sync"])
        faulty = FaultyDisk(run, DISK_MIB * MIB) if self.chance.random() < 0.25 else None
        backup_mib = BACKUP_MIB if self.chance.random() < 0.3 else 0
        options = Options(
            mode=self.mode,
            backlog_mib=self.chance.choice([32, 64]),
            copy_rate_mib=self.chance.choice([0, 0, 16]),
            disk_mib=DISK_MIB,
            disk=faulty.device if faulty else None,
            backup_tmpfs_mib=backup_mib,
            # Some are under way when faults come; each run of the daemon begins one.
            verify=f'every = "1m", rate = "{self.chance.choice([16, 64, 1024])}MiB/s"',
        )
        pair = Pair(run, options, Net(run, rtt_ms=self.chance.choice([0, 4, 30])))
        self.protect_by(pair, bool(backup_mib), faulty)

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
        image = self.recover("--primary-is-dead")
        if not image:
            return
        self.check_recovered(image, self.mode)
        image.unlink()
        self.is_over = False
        pair.start_daemon()
        try:
            pair.wait_state("fenced")
            self.verdict.check(4, True, "")
        except TimeoutError as error:
            self.verdict.check(4, False, str(error))
