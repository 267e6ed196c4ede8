"""A failback round: there and back again under faults, and byte by byte the same disk all the way.

    at home, faults ── disaster or partition ──> recovered away, the server there is killed
    ── the old site is the new copy, faults while it is compared ──> protected away, faults
    ── switchover, with a fault in the middle of it ──> recovered at home

Invariant: from the moment that a group was recovered, the daemon that protected it before holds no lease.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from .. import nbdwire
from ..net import Net
from ..oracle import Load
from ..pair import GROUP, LONG_S, Options, Pair
from ..paths import BIN
from ..process import Process, wait_until
from ..progress import say
from ..run import Run
from .marks import NAME
from .tortured_disk import DEPTHS, DISK_MIB, PATIENCE_S, TorturedDisk
from .verdict import Verdict

SWITCHES_MAX = 4
"""So often at most it is tried: with a fault in the middle of it, and at last without."""
SWITCH_TIMEOUT = "2s"


@dataclass(frozen=True)
class _Blow:
    """What may happen in the middle of a switch."""

    name: str
    begin: Callable[[], None]
    end: Callable[[], None]


class FailbackRound(TorturedDisk):
    """One journey of a protected disk to the other site, and home."""

    kind = "failback"

    def __init__(self, run: Run, seed: int):
        super().__init__(run, seed)
        self.net = Net(run, rtt_ms=self.chance.choice([0, 4, 30]))
        self.old: Pair | None = None
        """Whose daemon has protected the group before."""
        self.home = Pair(run, self._options(), self.net)
        self.protect_by(self.home)

    def _options(self, disk: Path | None = None) -> Options:
        return Options(
            mode=self.chance.choice(["pipelined", "pipelined", "sync"]),
            backlog_mib=self.chance.choice([32, 64]),
            copy_rate_mib=self.chance.choice([0, 4, 16]),
            disk_mib=DISK_MIB,
            disk=disk,
            verify=f'every = "1m", rate = "{self.chance.choice([16, 64, 1024])}MiB/s"',
            window="1h",
        )

    def execute(self) -> Verdict:
        """All of it, as far as nothing breaks."""
        self.pair.start()
        say(f"there and back again, in mode {self.pair.options.mode}")
        self.suffer(1, 3)
        if self.rest() and self.go_there_and_back():
            self.retire(self.pair)
        self.verdict.writes = self.oracle.completed
        return self.verdict

    def go_there_and_back(self) -> bool:
        """As far as nothing breaks."""
        self.suffer(0, 1)
        if self.leave() and self.work_recovered() and self.return_behind_a_daemon() and self.switch_home():
            self.work_recovered()
            return True
        return False

    def suffer(self, least: int, most: int) -> None:
        """So many times faults, all of them undone."""
        self.work(0.3)
        for _ in range(self.chance.randrange(least, most + 1)):
            self.trouble.episode(1.5, self.work)
            self.look_at_the_backup()
        self.tell()

    def _watch(self) -> None:
        super()._watch()
        self.watch_old()

    def watch_old(self) -> None:
        """Who protected the group before may answer nobody."""
        if not self.old or not self.old.daemon.alive():
            return
        try:
            group = self.old.status(timeout_s=PATIENCE_S)["groups"][0]
        except OSError:  # it does not answer yet
            return
        self.verdict.check(4, not group["lease"]["held"], f"the old primary holds a lease again: {group}")

    # -- to the other site -------------------------------------------------------------------------------------------

    def leave(self) -> bool:
        """The group is recovered at the backup site."""
        image = self.lose_the_site() if self.chance.random() < 0.5 else self.lose_the_link()
        if not image:
            return False
        self.check_recovered(image, self.pair.options.mode)
        self.marks.check_all()
        self.oracle.rebase(image)
        self.told = 0
        return True

    def lose_the_site(self) -> Path | None:
        """It is gone in the middle of a fault, and somebody says so. Later it is there again, as after a power cut."""
        self.trouble.begin_one()
        self.work(self.chance.uniform(0, 1))
        say("DISASTER: the primary site is gone")
        self.trouble.look()
        self.is_over = True
        self.pair.daemon.kill()
        self.daemon_is_gone()
        self.trouble.heal()
        image = self.recover("--primary-is-dead")
        self.old = self.pair
        self.pair.start_daemon()
        return image

    def lose_the_link(self) -> Path | None:
        """The primary site lives on and is written to; nobody says that it is dead, so the grace is waited out."""
        say("PARTITION: the link is gone, the primary site is not")
        self.verdict.bitten("link: cut for good")
        self.net.wan.cut()
        self.work(self.chance.uniform(0, 1))
        self.is_over = True
        image = self.recover()
        self.old = self.pair
        self.watch_old()
        self._forget_load()
        self.net.wan.mend()
        return image

    def work_recovered(self) -> bool:
        """A guest writes to the recovered disk; what it has flushed survives that the server is killed."""
        export = self.recovered_socket()
        for _ in range(self.chance.randrange(1, 3)):
            load = Load(export, NAME, self.oracle, self._next_seed(), self.chance.choice(DEPTHS))
            self.work_elsewhere(self.chance.uniform(0.2, 1))
            load.finish(LONG_S)
            self.verdict.check(9, not load.errors, f"the recovered disk answered with errors {set(load.errors)}")
            guest = nbdwire.Connection(export, NAME)
            guest.flush()
            guest.close()
            if self.chance.random() < 0.7:
                self.verdict.bitten("kill -9: of a backup that is primary")
                self.pair.backup.kill()
                export.unlink(missing_ok=True)
                self.pair.start_backup()
            image = self._recovered_image()
            lost = self.oracle.violations(image)
            self.verdict.check(9, not lost, f"{len(lost)} blocks of the recovered disk: {lost[:3]}")
            if lost:
                return False
        # What is written to the recovered disk has its place after the past, and changes nothing of it.
        self.marks.check_all()
        return True

    def work_elsewhere(self, seconds: float) -> None:
        """Time passes, and the old primary is watched."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self.watch_old()
            time.sleep(0.05)

    def retire(self, pair: Pair) -> bool:
        """A daemon that was fenced says so, and ends when it is told to."""
        try:
            pair.wait_state("fenced")
            self.watch_old()
            pair.daemon.stop(timeout_s=LONG_S)
        except TimeoutError as error:
            self.verdict.check(4, False, str(error))
            return False
        self.verdict.check(4, "everything in time" not in pair.daemon.log.read_text(), "a fenced daemon waited")
        return True

    # -- the way back ------------------------------------------------------------------------------------------------

    def return_behind_a_daemon(self) -> bool:
        """The disk is protected again, by the old site, whose old disk is the beginning of the copy."""
        home = self.home
        if not self.retire(home):
            return False
        self.old = None
        away = Pair(self.run, self._options(home.export()), self.net.reversed(), name="away")
        away.start_backup()
        away.backup_command("seed", GROUP, f"{NAME}={home.disk}", "--move")
        self.protect_by(away)
        # The first server of these has faults inside, too.
        away.backup.kill()
        away.start_backup()
        away.start_daemon()
        say(f"away, in mode {away.options.mode}: the old site is compared")
        self.suffer(1, 2)
        if not self.rest():
            return False
        self.suffer(0, 1)
        return True

    def switch_home(self) -> bool:
        """As planned, but for what happens in the middle of it."""
        for attempt in range(SWITCHES_MAX):
            try:
                self.pair.wait_state("protected")
                wait_until("the guest writes", self._is_writing, LONG_S, [self.pair.daemon, self.pair.backup])
                self.load.finish(timeout_s=LONG_S)
            except (TimeoutError, ConnectionError) as error:
                self.verdict.check(8, False, f"before a switch: {error}")
                return False
            self._end_load()
            blows = self._blows()
            if self.switch_over(self.chance.choice(blows) if attempt < SWITCHES_MAX - 1 else blows[0]):
                return self.arrive()
        self.verdict.check(8, False, "it could not be switched over, though nothing was in its way")
        return False

    def _blows(self) -> list[_Blow]:
        pair, wan = self.pair, self.net.wan
        delay_ms = wan.params.delay_ms

        def no_matter() -> None:
            pass

        return [
            _Blow("nothing", no_matter, no_matter),
            _Blow("kill -9 of the daemon", pair.daemon.kill, pair.start_daemon),
            _Blow("kill -9 of the backup", pair.backup.kill, pair.start_backup),
            _Blow(
                "SIGSTOP of the backup",
                lambda: pair.backup.signal(signal.SIGSTOP),
                lambda: pair.backup.signal(signal.SIGCONT),
            ),
            _Blow("cut", wan.cut, wan.mend),
            _Blow("delay", lambda: wan.set(delay_ms=delay_ms + 80), lambda: wan.set(delay_ms=delay_ms)),
        ]

    def switch_over(self, blow: _Blow) -> bool:
        """Tries it; returns whether the group is switched. If not it goes on here, as if nothing had been."""
        say(f"switchover, and in the middle of it: {blow.name}")
        self.verdict.bitten(f"switchover: {blow.name}")
        words = [BIN / "tidelock", "switchover", GROUP, "--guest-is-stopped", "--timeout", SWITCH_TIMEOUT, "--json"]
        name = f"switchover-{self._next_seed().replace(' ', '-')}"
        asking = Process(self.run, name, [*words, "--socket", self.pair.control_socket])
        time.sleep(self.chance.uniform(0, 0.1))
        blow.begin()
        said = asking.wait(LONG_S)
        blow.end()
        group = self.pair.wait_state("fenced", "protected")
        is_over = group["switched_over_unix_ms"] is not None
        say("it is over" if is_over else "it was refused")
        self.verdict.check(4, is_over or said != 0, f"the command said that it is over, and it is not: {group}")
        self.verdict.check(4, not (is_over and group["lease"]["held"]), f"switched over with a lease: {group}")
        return is_over

    def arrive(self) -> bool:
        """At home, with all that had completed."""
        self.old = self.pair
        self.is_over = True
        image = self.recover()
        self.watch_old()
        if not image:
            return False
        lost = self.oracle.violations(image)
        self.verdict.check(1, not lost, f"{len(lost)} blocks were lost in the switch: {lost[:3]}")
        return not lost
