"""A protected disk under faults: the test is its guest, over NBD, and knows byte by byte what it may hold.

What rounds have in common: a guest that writes whenever there is a disk to write to, a watch over what the daemon
and the backup say meanwhile, and points in time whose content is known (`marks.py`).
"""

from __future__ import annotations

import json
import random
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from tidelock_testbed.risk import word_of, words_of

from .. import nbdwire
from ..faultshim import FaultShim
from ..faultydisk import FaultyDisk
from ..hostdaemon import writer_of
from ..nbdwire import EIO, NbdError
from ..oracle import BLOCK, Load, Oracle
from ..pair import DISK, GROUP, HOST, LONG_S, MEMBER, MIB, Pair
from ..paths import BIN
from ..process import Process, wait_until
from ..progress import say
from ..run import Run
from .faults import Switch, Troublemaker, Victim, World, inside, rises
from .marks import NAME, Marks
from .other_moment import OtherMoment
from .verdict import Verdict

DISK_MIB = 16
SLOW_BYTES_PER_S = 4e6
"""Of a primary's disk that is slow: less than the guest writes."""
ON_DISK_MIB = 64
"""Of a backlog on disk: the least that there is."""
SEGMENT_MIB = 16
"""By so much more it may have, of records that the backup has already (docs/backlog-on-disk.md): a killed daemon's are
counted until the backup has said which these are."""
UNREACHED_S = 10
"""A daemon that may serve without the backup does so by then."""
EVERY_S = 0.05
PATIENCE_S = 0.2
"""How long the guest and whoever watches wait for a daemon that may be stopped."""
DEPTHS = (1, 8, 64)
"""How many requests a guest has under way."""


class TorturedDisk:
    """The guest, its memory, and the pair of processes that protect its disk now."""

    kind = "disk"
    points: type[Marks] = Marks

    def __init__(self, run: Run, seed: int):
        self.run = run
        self.chance = random.Random(f"{self.kind} round {seed}")
        self.verdict = Verdict(self.kind, seed)
        self.oracle = Oracle(DISK_MIB * MIB)
        self.load: Load | None = None
        self.laps = 0
        self.cut_a_resync = False
        self.guest_died = False
        self.told = 0
        """So much of what the guest has done was at the backup for certain, and may have been told to anybody."""

    def protect_by(self, pair: Pair, faulty: FaultyDisk | None = None) -> None:
        """From now on these processes protect the disk, and suffer."""
        self.pair, self.faulty = pair, faulty
        self.marks = self.points(pair, self.oracle, self.verdict, self.chance)
        self.seen: Counter[str] = Counter()
        """Words of the group's status, and how often they were there."""
        self.errors = 0
        """Requests that the guest was answered with an error, but for those of the load that is there now."""
        self.verified_ms = 0
        self.durable = 0
        self.is_over = False
        """The primary site is gone: its daemon is not started again."""
        self.may_end = False
        """The daemon may end by itself, and is started again as systemd would: the backup has less than it was told."""
        self.trouble = Troublemaker(self._world(), self.chance)
        self.trouble.counts, self.trouble.bites = self.verdict.faults, self.verdict.bites

    def _world(self) -> World:
        pair = self.pair
        daemon = Victim("daemon", lambda: pair.daemon, self.start_daemon, self.daemon_is_gone)
        backup = Victim("backup", lambda: pair.backup, pair.start_backup)
        in_daemon = FaultShim(self.run, f"daemon of {pair.name}")
        in_backup = FaultShim(self.run, f"backup of {pair.name}", has_disk=True)
        pair.daemon_environment, pair.backup_environment = in_daemon.environment, in_backup.environment
        switches = inside("the daemon", in_daemon, self.chance, has_disk=False)
        switches |= inside("the backup", in_backup, self.chance, has_disk=True)
        switches["kill -9: guest"] = Switch(self._guest_dies, lambda: None, lambda: self._had_a_guest)
        rare = self._of_rooms() | self._of_the_primary() | self._of_settings()
        if self.kind == "disk":
            rare |= OtherMoment(self).switches()
        return World([daemon, backup], pair.net.wans, switches | rare, frozenset(rare))

    def _of_rooms(self) -> dict[str, Switch]:
        """File systems that are full."""
        pair, faults = self.pair, {}
        if room := pair.backup_room:
            stalled = rises(lambda: self.seen["no room"])
            faults["room: the backup's disk is full"] = Switch(room.fill, room.give_back, stalled)
        if room := pair.state_room:

            def fill() -> None:
                room.fill()
                if self.chance.random() < 0.5:
                    pair.daemon.kill()
                    self.daemon_is_gone()
                    self.try_to_start()

            def give_back() -> None:
                room.give_back()
                if not pair.daemon.alive():
                    self.start_daemon()

            def complaints() -> int:
                return sum(
                    log.read_text().count("No space left") for log in self.run.directory.glob("*tidelockd-*.log")
                )

            subjects = frozenset({"daemon"})
            faults["room: the daemon's disk is full"] = Switch(fill, give_back, rises(complaints), subjects)
        return faults

    def _of_the_primary(self) -> dict[str, Switch]:
        """The guest's own disk."""
        if not (faulty := self.faulty):
            return {}

        def fail_reads() -> None:
            faulty.fail("pread")
            # Who reads is a verification, or a comparison after a crash. What cannot be read is tried again.
            words = [BIN / "tidelock", "verify", GROUP, "--socket", self.pair.control_socket]
            Process(self.run, f"verify-{self._next_seed().replace(' ', '-')}", words)

        return {
            "disk of the primary: writes fail": Switch(
                lambda: faulty.fail("pwrite"), faulty.fail, rises(self._failed_requests)
            ),
            "disk of the primary: reads fail": Switch(fail_reads, faulty.fail, lambda: self._reads_fail),
            "disk of the primary: slow": Switch(
                lambda: faulty.slow(SLOW_BYTES_PER_S), lambda: faulty.slow(0), self._writes_are_slow
            ),
        }

    def _of_settings(self) -> dict[str, Switch]:
        """Outages for which the group has a policy of its own."""
        pair, wan, faults = self.pair, self.pair.net.wans[0], {}
        of_link = frozenset({"wan 0"})
        group = pair.options.group
        if "async after" in group:
            told = rises(lambda: self.seen["told"])
            faults["outage: clients are answered without the backup"] = Switch(
                lambda: self._cut_until("told"), wan.mend, told, of_link
            )
        if "backlog_on_disk" in group:
            on_disk = rises(lambda: self.seen["on disk"])
            faults["outage: longer than memory holds"] = Switch(
                lambda: self._cut_until("on disk"), wan.mend, on_disk, of_link
            )
            is_full = rises(lambda: self.seen["unrecorded"] + self.seen["full"])
            faults["outage: longer than the backlog on disk holds"] = Switch(
                lambda: self._cut_until("unrecorded", "full"), wan.mend, is_full, of_link
            )
        if "serve-unprotected" in group:

            def start_without() -> None:
                wan.cut()
                pair.daemon.kill()
                self.daemon_is_gone()
                self.start_daemon()
                self._work_until(UNREACHED_S, "unrecorded")

            subjects = of_link | {"daemon", "backup"}
            unrecorded = rises(lambda: self.seen["unrecorded"])
            faults["outage: the daemon starts without the backup"] = Switch(
                start_without, wan.mend, unrecorded, subjects
            )
        return faults

    def _cut_until(self, *words: str) -> None:
        self.pair.net.wans[0].cut()
        if self.load:
            self.load.deepen(max(DEPTHS))
        self._work_until(5, *words)

    def _work_until(self, most_s: float, *words: str) -> None:
        """Until the status has one of these words; another fault may keep it from that."""
        before, end = self.seen.copy(), time.monotonic() + most_s
        while time.monotonic() < end and not any(self.seen[word] > before[word] for word in words):
            self.work(0.1)

    # -- whether a fault was met -------------------------------------------------------------------------------------

    def _had_a_guest(self) -> bool:
        return self.guest_died

    def _failed_requests(self) -> int:
        return self.errors + (len(self.load.errors) if self.load else 0)

    def _reads_fail(self) -> bool:
        try:
            guest = nbdwire.Connection(self.pair.socket, DISK, PATIENCE_S)
            guest.read(0, BLOCK)
            guest.close()
        except NbdError:
            return True
        except OSError:  # nobody answers
            pass
        return False

    def _writes_are_slow(self) -> Callable[[], bool]:
        """Whether what was written since is about what the slow disk can do, and not what the guest asks for."""
        began, before = time.monotonic(), self._written_bytes()

        def are_slow() -> bool:
            possible = SLOW_BYTES_PER_S * (time.monotonic() - began)
            return possible / 2 < self._written_bytes() - before < 2 * possible

        return are_slow

    def _written_bytes(self) -> int:
        """What the primary's disk has written."""
        return 512 * int(Path(f"/sys/block/{self.pair.disk.name}/stat").read_text().split()[6])

    # -- the guest, and who watches ----------------------------------------------------------------------------------

    def work(self, seconds: float) -> None:
        """Lets the guest write for so long, if there is a disk to write to, and watches."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            self._supervise()
            self._keep_writing()
            self._watch()
            time.sleep(min(left, EVERY_S))

    def _supervise(self) -> None:
        """As systemd does, unless a fault has to do with the daemon."""
        is_over = self.is_over or self.pair.daemon.alive()
        if self.may_end and not is_over and not self.trouble.has_under_way("daemon"):
            self.daemon_is_gone()
            self.try_to_start()

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
        group = groups[0]
        self._look_at_verification(writer_of(group)["verify"]["last"])
        self._look_at_backlog(writer_of(group)["backlog"])
        self.seen.update(words_of(group))
        self.seen["no room"] += "no room" in (group["detail"] or "")
        if word_of(group) == "protected" and group["told"] is not None:
            self.verdict.check(6, False, f"it is called protected, and clients were told: {group}")

    def _look_at_backlog(self, backlog: dict) -> None:
        """It has no more than it may. While a comparison runs the limit is a lower one, for what comes then."""
        used, limit = backlog["used_bytes"], max(backlog["limit_bytes"], self.pair.options.backlog_mib * MIB)
        on_disk = backlog["on_disk"]
        if on_disk:
            limit = max(limit, (ON_DISK_MIB + SEGMENT_MIB) * MIB)
            memory, memory_limit = on_disk["memory_bytes"], on_disk["memory_limit_bytes"]
            text = f"the backlog has {memory} bytes in memory, its limit is {memory_limit}"
            self.verdict.check(10, memory <= memory_limit, text)
            self.seen["on disk"] += on_disk["records"] > 0
        self.seen["full"] += backlog["writes_wait"]
        self.verdict.check(10, used <= limit, f"the backlog has {used} bytes, its limit is {limit}")

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
        position = self.marks.set_while_writing()
        if position is not None:
            self.told = position

    def rest(self) -> bool:
        """In the middle of a round: everything comes back, a point in time is kept, and a drill on one changes nothing.
        Everything comes back from that, too."""
        if not self.come_back():
            return False
        self.marks.set_while_still()
        self.told = self.oracle.position()
        self.marks.check_all()
        self.marks.drill(self.work)
        if not self.come_back():
            return False
        self.verdict.check(7, True, "")
        return True

    # -- ends ----------------------------------------------------------------------------------------------------------

    def come_back(self) -> bool:
        """With all faults gone everything works again, and nothing is lost. The guest holds still then."""
        pair = self.pair
        say("no fault any more: everything has to come back")
        try:
            self._wait_protected()
            wait_until("the guest writes", self._is_writing, LONG_S, [pair.daemon, pair.backup])
            self.load.finish(timeout_s=LONG_S)
        except (TimeoutError, ConnectionError) as error:
            self.verdict.check(8, False, str(error))
            return False
        self.verdict.check(8, True, "")
        expected = {EIO} if self.faulty else set()
        unexpected = set(self.load.errors) - expected
        self.verdict.check(9, not unexpected, f"writes were answered with errors {unexpected}")
        self._end_load()
        try:
            pair.check_sites(self.oracle)
        except AssertionError as error:
            self.verdict.check(6, False, str(error))
            return False
        for rule in (2, 6, 9):
            self.verdict.check(rule, True, "")
        return True

    def _wait_protected(self) -> None:
        def is_protected() -> bool:
            self._supervise()
            return self._state() == "protected"

        needs = [self.pair.backup] if self.may_end else [self.pair.daemon, self.pair.backup]
        wait_until("the group is protected", is_protected, LONG_S, needs)

    def _state(self) -> str | None:
        try:
            return word_of(self.pair.group())
        except OSError:  # nobody answers
            return None

    def _is_writing(self) -> bool:
        self._keep_writing()
        return self.load is not None and self.load.replies > 10

    def recover(self, *options: str) -> Path | None:
        """The group is recovered: the disk as the backup offers it now."""
        may_have_left = self._has_left()
        recover = self.pair.start_recovery("--json", *options)
        if recover.wait(LONG_S) != 0:
            self.verdict.check(8, False, f"the recovery failed\n{recover.tail()}")
            return None
        line = next(line for line in recover.log.read_text().splitlines() if line.startswith("{"))
        self.cut_a_resync = "a resync of host" in line
        self.check_exposed(json.loads(line)["recovery"]["exposed"], may_have_left)
        return self._recovered_image()

    def degraded_since_ms(self) -> int | None:
        """Since when the host has on record that clients may know more than the backup, if it has that."""
        try:
            return json.loads((self.pair.state_files / GROUP / "_degraded.json").read_text())["since_unix_ms"]
        except FileNotFoundError:
            return None

    def _has_left(self) -> bool:
        """The daemon has ended cleanly, with everything at the backup, and has not attached since."""
        known = self.pair.backup_group()["policies"].get(MEMBER)
        return bool(known and known["has_left"]) and self.degraded_since_ms() is None

    def check_exposed(self, exposed: list[dict], may_have_left: bool = False) -> None:
        """The recovery names who may have told more than is here, and since when; and nobody else."""
        group = self.pair.options.group
        may_be = "async after" in group or "serve-unprotected" in group
        named = [one["host"] for one in exposed]
        is_right = named == [HOST] * may_be or (may_have_left and not named)
        self.verdict.check(6, is_right, f"the policies are {group!r}, and the recovery names {exposed}")
        since_ms = self.degraded_since_ms()
        if since_ms is not None and named and not any(fault.startswith("clock") for fault in self.verdict.faults):
            said_ms = exposed[0]["since_unix_ms"]
            text = f"clients may know more since {since_ms}, and the recovery says {said_ms}"
            self.verdict.check(6, said_ms is None or said_ms <= since_ms, text)

    def check_recovered(self, image: Path, mode: str) -> None:
        """It is a state that the disk had, with all that was told, or in mode sync all that had completed, unless the
        recovery says that it has left out a resync."""
        prefix = self.oracle.violations_of_prefix(image)
        self.verdict.check(2, not prefix, f"{len(prefix)} blocks are of no prefix: {prefix[:3]}")
        if self.told:
            lacks = self.oracle.violations_of_prefix(image, at_least=self.told)
            self.verdict.check(1, not lacks, f"{len(lacks)} blocks lack what was told: {lacks[:3]}")
        # Until a resync has ended nothing is told, and a recovery goes back to before it. By its policy it may go on
        # without the backup.
        had_older_state = any(fault.startswith("state") for fault in self.verdict.faults)
        if mode == "sync" and not self.cut_a_resync and self.degraded_since_ms() is None and not had_older_state:
            lost = self.oracle.violations(image)
            self.verdict.check(9, not lost, f"{len(lost)} blocks lack what had completed: {lost[:3]}")

    def _recovered_image(self) -> Path:
        export = self.recovered_socket()

        def accepts() -> bool:
            # The file is there a moment before anybody listens.
            try:
                nbdwire.Connection(export, NAME, PATIENCE_S).close()
            except OSError:
                return False
            return True

        wait_until("the recovered disk is offered", accepts, LONG_S, [self.pair.backup])
        image = self.pair.directory / "recovered.img"
        guest = nbdwire.Connection(export, NAME)
        image.write_bytes(b"".join(guest.read(at, MIB) for at in range(0, DISK_MIB * MIB, MIB)))
        guest.close()
        return image

    def recovered_socket(self) -> Path:
        """Where the backup offers the recovered disk."""
        return self.pair.sockets / "exports" / GROUP / f"{NAME}.sock"

    # -- what faults do to the guest ---------------------------------------------------------------------------------

    def start_daemon(self) -> None:
        if not self.is_over:
            self.pair.start_daemon()

    def try_to_start(self) -> None:
        try:
            self.start_daemon()
        except RuntimeError as error:  # it cannot go on as long as it can keep nothing, or read nothing
            say(str(error).splitlines()[0])

    def daemon_is_gone(self) -> None:
        self._forget_load()

    def _forget_load(self) -> None:
        if self.load:
            self._end_load()
            self.oracle.server_died()

    def _end_load(self) -> None:
        self.load.vanish()
        self.errors += len(self.load.errors)
        self.load = None

    def _guest_dies(self) -> None:
        """What it had asked for and was not answered may still be done: it stays in doubt."""
        self.work(0.2)
        self.guest_died = self.load is not None and self.load.alive()
        if self.load:
            self._end_load()
