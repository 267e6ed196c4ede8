"""A disk round: the test is the guest, over NBD, and knows byte by byte what the disk may hold.

protect -> (some faults, all of them undone)* -> everything comes back, the sites are equal, a drill
        -> (some faults, all of them undone)* -> perhaps everything comes back
        -> a disaster, perhaps in the middle of a fault, and a recovery
"""

from __future__ import annotations

import random

from ..faultydisk import FaultyDisk
from ..net import Net
from ..pair import MIB, Options, Pair
from ..progress import say
from ..run import Run
from .marks import SHORT_WINDOW
from .tortured_disk import DISK_MIB, ON_DISK_MIB, TorturedDisk
from .verdict import Verdict

BACKUP_MIB = 4096
"""The file system of a backup whose disk is to be full at times: more than a guest writes in a round, because all of it
stays, in its window or below a pin. It costs no more memory than is used."""
STATE_MIB = 256
"""The same of the daemon's: a backlog on disk has room in it."""


def settings(chance: random.Random, mode: str) -> str:
    """What a group is to do when the backup is away for long: more keys of its section."""
    keys = chance.choice(["", "", 'when_unreachable = "async after 1s"\n', 'when_unreachable = "async after 2s"\n'])
    dice = chance.random()
    if dice < 0.3:
        # A daemon that goes on with what is on disk does not have to serve without the backup.
        keys += 'before_first_contact = "serve-unprotected"\n'
    elif dice < 0.65 and mode != "sync":  # where a guest waits with each write
        at_limit = chance.choice(["map", "map", "wait"])
        keys += f'backlog_on_disk = {{ size = "{ON_DISK_MIB}MiB", at_limit = "{at_limit}" }}\n'
    if chance.random() < 0.5:
        # Extents come and go in a map that is smaller than the disk; by default it would have all of this one.
        keys += 'activity_log = { extent = "64KiB", slots = 64 }\n'
    return keys


class DiskRound(TorturedDisk):
    """One life of a protected disk, from its initial copy to its end."""

    def __init__(self, run: Run, seed: int):
        super().__init__(run, seed)
        chance = self.chance
        self.mode = chance.choice(["pipelined", "pipelined", "sync"])
        faulty = FaultyDisk(run, DISK_MIB * MIB) if chance.random() < 0.7 else None
        group = settings(chance, self.mode)
        options = Options(
            mode=self.mode,
            # Behind it there must be room on disk for more.
            backlog_mib=32 if "backlog_on_disk" in group else chance.choice([32, 64]),
            copy_rate_mib=chance.choice([0, 0, 16]),
            disk_mib=DISK_MIB,
            disk=faulty.device if faulty else None,
            backup_tmpfs_mib=BACKUP_MIB if chance.random() < 0.7 else 0,
            state_tmpfs_mib=STATE_MIB if chance.random() < 0.7 else 0,
            # Some are under way when faults come; each run of the daemon begins one.
            verify=f'every = "1m", rate = "{chance.choice([16, 64, 1024])}MiB/s"',
            group=group,
            window=chance.choice(["1h", SHORT_WINDOW]),
        )
        pair = Pair(run, options, Net(run, rtt_ms=chance.choice([0, 4, 30])))
        self.protect_by(pair, faulty)

    def execute(self) -> Verdict:
        """All of it."""
        pair = self.pair
        pair.start()
        o = pair.options
        keys = o.group.replace("\n", ", ")
        say(f"a disk in mode {self.mode}, {o.backlog_mib} MiB of backlog, {keys}the past: {o.window}")
        self.work(0.5)
        self.suffer(2, 3)
        if self.rest():
            self.suffer(1, 2)
            if self.chance.random() < 0.6 or self.come_back():
                self.disaster()
        self.verdict.writes = self.oracle.completed
        return self.verdict

    def suffer(self, least: int, most: int) -> None:
        """So many times faults, all of them undone."""
        for _ in range(self.chance.randrange(least, most + 1)):
            self.trouble.episode(2.0, self.work)
            self.look_at_the_backup()
        self.tell()

    def disaster(self) -> None:
        """The primary site is gone in the middle of a fault, or soon after one."""
        pair = self.pair
        if self.chance.random() < 0.7:
            self.trouble.begin_one()
            self.work(self.chance.uniform(0, 1))
        say("DISASTER: the primary site is gone")
        self.trouble.look()
        self.is_over = True
        pair.daemon.kill()
        self.daemon_is_gone()
        self.trouble.heal()
        self.look_at_the_backup()
        image = self.recover("--primary-is-dead")
        if not image:
            return
        self.check_recovered(image, self.mode)
        image.unlink()
        self.marks.check_all()
        self.is_over = False
        pair.start_daemon()
        try:
            pair.wait_state("fenced")
            self.verdict.check(4, True, "")
        except TimeoutError as error:
            self.verdict.check(4, False, str(error))
