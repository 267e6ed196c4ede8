"""A client round: a drill in whose time of trouble random faults come one after the other.

The drill judges as ever: by what clients were told and what the recovered databases have. While all is calm a point in
time is named and its rows are read from a view at the backup, with a drill on it, and once more after the recovery.
"""

from __future__ import annotations

import random
import shutil
import threading
import time
from dataclasses import replace
from pathlib import Path

from ..appdrill import AppDrill, ThreeTier, TwoHosts, TwoWriters
from ..drilling import Drill, Knobs, ProvesNothing
from ..durability import MeasuredRow
from ..faultshim import FaultShim
from ..fleet import DISK
from ..guest import Guest
from ..hostdaemon import GROUP, MEMBER, HostDaemon, Protection
from ..ledger import Ledger, Row
from ..paths import BIN
from ..pgguest import PostgresProcessGuest
from ..process import Process, run_command, wait_until
from ..progress import say
from ..rig import Rig
from ..run import Run
from ..scenarios import TwoDisks
from .faults import Switch, Troublemaker, Victim, World, inside, rises
from .past_rows import Database, Past, bookmark
from .verdict import Unjudged, Verdict

KINDS: tuple[type[Drill], ...] = (Drill, TwoDisks, TwoWriters, TwoHosts, ThreeTier)
COMES_BACK_S = 120
UNREACHED_S = 10
"""A daemon that may serve without the backup does so by then."""
CLOCKS_S = 0.05
"""Two readings of two clocks are so far apart at most."""
MARK = "calm"
ONE_OF_POSTGRESQL = "kill -9: a process of PostgreSQL"
RULES_OF_CHECKS = {
    "no confirmed row is lost": 1,
    "no confirmed row is missing in any database": 1,
    "no row is missing that a page told a client of": 1,
    "no row is there that nobody sent": 2,
    "no row depends on a row that is not there": 2,
    "what is there is a prefix of what was done: no earlier row is missing": 2,
    "the recovered guest kept everything that it confirmed": 9,
    "the recovered databases kept everything that was confirmed": 9,
}
"""What a drill checks, and the rule that it is about. Its other checks count for the promise as a whole, rule 1."""


class ClientRound:
    """A drill of a random kind, tortured."""

    def __init__(self, run: Run, seed: int, guest: str = "process"):
        """`guest` is "vm", "process", or "postgres": a process, and a real database."""
        chance = random.Random(f"client round {seed}")
        postgres = guest == "postgres"
        kind = Drill if postgres else chance.choice(KINDS)
        knobs = Knobs(
            scenario=kind.name,
            mode=chance.choice(["pipelined", "pipelined", "pipelined", "sync"]),
            guest="process" if postgres else guest,
            rtt_ms=chance.choice([5, 20, 50]),
            seed=seed,
            form=chance.choice(["auto", "hlc"]) if issubclass(kind, AppDrill) else "auto",
            postgres=postgres,
            hurry=True,
        )
        self.verdict = Verdict(f"clients of {kind.name}, {guest}", seed)
        say(f"{kind.name}, {knobs.mode}, {knobs.rtt_ms} ms" + (f", tags: {knobs.form}" if kind.several_guests else ""))
        self.drill = tortured(kind)(run, knobs, chance, self.verdict)

    def execute(self) -> Verdict:
        """All of it."""
        try:
            self.drill.execute()
        except ProvesNothing as error:
            raise Unjudged(str(error)) from error
        entry, verdict = self.drill.entry, self.verdict
        for check in entry.checks:
            verdict.check(RULES_OF_CHECKS.get(check["what"], 1), check["passed"], f"not so: {check['what']}")
        verdict.rows = entry.confirmed
        return verdict


def settings(chance: random.Random, several_guests: bool) -> dict[str, str]:
    """What a group is to do when the backup is away for long. What lets go of replies has groups of one guest only:
    of several nobody outside can tell which host's replies a row's confirmation has waited for."""
    keys = {}
    if not several_guests and chance.random() < 0.4:
        keys["when_unreachable"] = f"async after {chance.choice([1, 2])}s"
    dice = chance.random()
    if not several_guests and dice < 0.3:
        keys["before_first_contact"] = "serve-unprotected"
    elif dice < 0.6:
        keys |= {"backlog_on_disk": "64MiB", "backlog": "32MiB"}
    return keys


class Degraded:
    """Watches what a host has on record of replies that have not waited for the backup.

    It is on record before the first of them leaves, and until the backup has all that they say. The file's time is the
    kernel's: no clock that was set inside a process.
    """

    EVERY_S = 0.02

    def __init__(self, record: Path):
        self.record = record
        self.since: float | None = None
        """On this machine's clock that never steps; None: nothing is on record."""
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="degraded")
        self._thread.start()

    def _run(self) -> None:
        while not self._stopping.wait(self.EVERY_S):
            self.look()

    def look(self) -> None:
        """Looks at it now."""
        try:
            written_unix_s = self.record.stat().st_mtime_ns / 1e9
        except OSError:
            self.since = None
            return
        if self.since is None:
            self.since = written_unix_s - time.time() + time.monotonic() - CLOCKS_S

    def stop(self) -> None:
        """Ends it, with a last look."""
        self._stopping.set()
        self._thread.join(5)
        self.look()


def tortured(kind: type[Drill]) -> type[Drill]:
    """The drill, with faults before its disaster."""

    class Tortured(kind):
        window = "1h"

        def __init__(self, run: Run, knobs: Knobs, chance: random.Random, verdict: Verdict):
            self.chance, self.verdict = chance, verdict
            self.keys = settings(chance, self.several_guests)
            super().__init__(run, knobs)
            say(f"settings: {self.keys or 'as they are by default'}")
            self.durable: dict[str, int] = {}
            self.dead: dict[str, Guest] = {}
            """Guests that were killed and are not started again yet."""
            self.away: list[tuple[float, float]] = []
            """From when until when there was no daemon where clients are answered."""
            self.front_gone_at = 0.0
            self.exposed_since: float | None = None
            """What clients were told since may be lost, by the group's policy."""
            self.past: Past | None = None
            self.digests: list[str] = []
            self.switches: dict[str, Switch] = {}
            for daemon in self.daemons:
                shim = FaultShim(run, daemon.host)
                daemon.environment |= shim.environment
                self.switches |= inside(f"the daemon of {daemon.host}", shim, chance, has_disk=False)
            shim = FaultShim(run, "backup", has_disk=True)
            self.rig.backup.environment |= shim.environment
            self.switches |= inside("the backup", shim, chance, has_disk=True)

        def make_rig(self, protection: Protection):
            rig = super().make_rig(replace(protection, **self.keys))
            if isinstance(rig, Rig):
                # Its record is looked at after the disaster.
                rig.site_returns = True
            return rig

        @property
        def daemons(self) -> list[HostDaemon]:
            return self.rig.daemons if self.several_guests else [self.rig.daemon]

        @property
        def guests(self) -> dict[str, Guest]:
            return self.rig.guests if self.several_guests else {"guest": self.rig.guest}

        @property
        def front(self) -> HostDaemon:
            """Whose gate replies to clients leave by."""
            if not self.several_guests:
                return self.rig.daemon
            return self.rig.daemons[self.rig.shape.hosts[self.rig.shape.application.front]]

        @property
        def group(self) -> str:
            return self.rig.name if self.several_guests else GROUP

        # -- faults ------------------------------------------------------------------------------------------------

        def trouble(self) -> None:
            """Faults, all of them undone. Then it may come back, or the disaster comes at once."""
            if not self.several_guests:
                self.record = Degraded(self.rig.primary / "state" / GROUP / "_degraded.json")
            self.maker = maker = Troublemaker(self.world(), self.chance)
            self.verdict.faults, self.verdict.bites = maker.counts, maker.bites
            self.episodes(maker, 1, 2)
            if not self.come_back():
                return
            self.look_at_the_past()
            self.episodes(maker, 0, 2)
            if self.chance.random() < 0.5:
                self.come_back()

        def episodes(self, maker: Troublemaker, least: int, most: int) -> None:
            for _ in range(self.chance.randrange(least, most + 1)):
                maker.episode(3.0, self.suffer)
                self.start_guests()
                self.look_at_the_backup()
                self.check_gate()

        def world(self) -> World:
            """Every daemon, the server, the guests and the WANs."""
            victims = [self.victim_of(daemon) for daemon in self.daemons]
            backup = self.rig.backup
            victims.append(Victim("backup", lambda: backup.process, backup.start))
            guests, rare = self.of_guests(), self.of_settings()
            rare |= {name: guest for name, guest in guests.items() if name == ONE_OF_POSTGRESQL}
            return World(victims, self.rig.net.wans, self.switches | guests | rare, frozenset(rare))

        def victim_of(self, daemon: HostDaemon) -> Victim:
            def gone() -> None:
                if daemon is self.front:
                    self.front_gone_at = time.monotonic()

            def start() -> None:
                if daemon is self.front:
                    self.away.append((self.front_gone_at, time.monotonic()))
                daemon.start()

            # A clean stop may take the other hosts, and as long as clients go on: it has tests of its own.
            name = f"daemon of {daemon.host}"
            return Victim(name, lambda: daemon.process, start, gone, stops_cleanly=not self.several_guests)

        def of_guests(self) -> dict[str, Switch]:
            """A guest that is killed is started again, on its disk as it is, when no fault is under way any more."""
            faults: dict[str, Switch] = {}
            guests = dict(self.guests)
            if self.rig.image:  # it takes a minute until a VM is there again: one of them, and once
                name = self.chance.choice(sorted(guests))
                guests = {name: guests[name]} if self.chance.random() < 0.5 else {}
            for name, guest in guests.items():

                def kill(name=name, guest=guest) -> None:
                    self.dead[name] = guest
                    guest.kill()
                    if self.rig.image:
                        del self.maker.world.switches[f"kill -9: VM {name}"]

                def has_died(guest=guest) -> bool:
                    return not any(process.alive() for process in guest.processes)

                what = "VM" if self.rig.image else "guest"
                faults[f"kill -9: {what} {name}"] = Switch(kill, lambda: None, lambda has_died=has_died: has_died)
            guest = self.guests.get("guest")
            if isinstance(guest, PostgresProcessGuest):

                def kill_one() -> None:
                    if "guest" not in self.dead:
                        guest.kill_postgres(self.chance.randrange(8))

                yes = lambda: lambda: True  # noqa: E731
                subjects = frozenset({"kill -9: guest guest"})
                faults[ONE_OF_POSTGRESQL] = Switch(kill_one, lambda: None, yes, subjects)
            return faults

        def of_settings(self) -> dict[str, Switch]:
            """Outages for which the group has a policy."""
            if self.several_guests:
                return {}
            wan, daemon, faults = self.rig.net.wan, self.rig.daemon, {}
            victim = self.victim_of(daemon)

            def seen(state: str):
                return rises(lambda: sum(name == state for _, name in self.states()))

            def until(state: str) -> None:
                met, end = seen(state)(), time.monotonic() + UNREACHED_S
                while not met() and time.monotonic() < end:
                    self.suffer(0.1)

            def cut() -> None:
                wan.cut()
                until("told")

            def start_without() -> None:
                wan.cut()
                daemon.process.kill()
                victim.vanished()
                victim.start()
                until("unrecorded")

            if "when_unreachable" in self.keys:
                what = "outage: clients are answered without the backup"
                faults[what] = Switch(cut, wan.mend, seen("told"), frozenset({"wan 0"}))
            if "before_first_contact" in self.keys:
                what = "outage: the daemon starts without the backup"
                subjects = frozenset({"wan 0", "backup", victim.name})
                faults[what] = Switch(start_without, wan.mend, seen("unrecorded"), subjects)
            return faults

        def suffer(self, seconds: float) -> None:
            """Lets the clients work; the guests must live through everything that is not done to them."""
            time.sleep(seconds)
            dead = [process for guest in self.dead.values() for process in guest.processes]
            for process in (self.clients.process, *self.guest_processes()):
                if process not in dead and not process.alive():
                    if self.ends_by_itself(process):
                        self.dead["guest"] = self.guests["guest"]
                        continue
                    raise RuntimeError(f"{process.name} ended under torture\n{process.tail()}")
            self.look_at_the_backlogs()

        def ends_by_itself(self, process: Process) -> bool:
            """PostgreSQL's first process may have been killed, and the guest ends with it."""
            guest = self.guests.get("guest")
            was_killed = ONE_OF_POSTGRESQL in self.verdict.faults
            return isinstance(guest, PostgresProcessGuest) and process is guest.process and was_killed

        def start_guests(self) -> None:
            """With all faults gone, guests that were killed are booted at the same site."""
            self.suffer(0)
            while self.dead:
                name, guest = self.dead.popitem()
                guest.kill()
                guest.forget_start()
                if self.several_guests:
                    self.rig.boot_guest(name)
                else:
                    self.rig.boot_guest()
                say(f"{name} is ready again, {guest.wait_ready():.1f} s after its start")

        # -- what is looked at meanwhile ---------------------------------------------------------------------------

        def look_at_the_backup(self) -> None:
            """What it has made durable never falls."""
            groups = [group for group in self.rig.backup.status()["groups"] if group["group"] == self.group]
            for writer in (writer for group in groups for writer in group["writers"]):
                member, durable = writer["member"], writer["durable"]
                before = self.durable.get(member, 0)
                text = f"the backup had {before} writes of {member}, and has {durable}"
                self.verdict.check(3, durable >= before, text)
                self.durable[member] = durable

        def look_at_the_backlogs(self) -> None:
            """None has more than it may, as its host said last."""
            members = (
                self.sampler.members.values() if self.several_guests else (self.sampler.group or {}).get("members")
            )
            for backlog in [member["writer"]["backlog"] for member in members or () if member["writer"]]:
                # While a comparison runs the limit is a lower one, for what comes then.
                limit = max(backlog["limit_bytes"], (64 if "backlog_on_disk" in self.keys else 256) << 20)
                text = f"the backlog has {backlog['used_bytes']} bytes, its limit is {limit}"
                self.verdict.check(10, backlog["used_bytes"] <= limit, text)

        def check_gate(self) -> None:
            """While there was no daemon no client was answered that had asked since."""
            ledger = self.ledger.follow()
            for begin, end in self.away:
                rows = [row for row, at in ledger.confirmed.items() if ledger.sent[row] > begin and at < end]
                self.verdict.check(9, not rows, f"without a daemon clients were told of {rows[:5]}")
            self.away.clear()

        def come_back(self) -> bool:
            """Clients get answers again without anybody's help, and the sites are equal."""
            since = time.monotonic()
            needs: list[Process] = [self.clients.process, *self.guest_processes()]
            try:
                wait_until("clients get answers again", lambda: self.answers_since(since), COMES_BACK_S, needs)
                self.wait_settled()
            except TimeoutError as error:
                self.verdict.check(8, False, str(error))
                return False
            self.verdict.check(8, True, "")
            self.work(self.chance.uniform(0.2, 2))
            return True

        def wait_settled(self) -> None:
            if self.several_guests:
                self.rig.wait_state(self.settled, COMES_BACK_S)
            else:
                self.rig.daemon.wait_state(self.settled, COMES_BACK_S)

        def answers_since(self, since: float) -> bool:
            ledger = self.ledger.follow()
            return any(at > since and ledger.sent[row] > since for row, at in ledger.confirmed.items())

        # -- the past ----------------------------------------------------------------------------------------------

        @property
        def the_databases(self) -> dict[str, Database]:
            """Those that can be read from a view."""
            if self.several_guests:
                return {name: Database(self.group, name, [DISK]) for name in self.rig.shape.application.databases}
            return {"guest": Database(GROUP, MEMBER, list(self.rig.disks))}

        def look_at_the_past(self) -> None:
            """A point has all that clients were told before it and nothing that they asked for since, in every
            database; with a drill on it clients are answered as ever; and the sites are equal."""
            for daemon in self.daemons:
                words = [BIN / "tidelock", "verify", self.group, "--socket", daemon.control_socket]
                try:
                    run_command(words, "verify", timeout_s=COMES_BACK_S)
                except RuntimeError as error:
                    # It may not have been able to compare them, which says nothing.
                    if "differ" in str(error):
                        self.verdict.check(6, False, f"all is called protected, and the sites differ: {error}")
                    continue
                self.verdict.check(6, True, "")
            image = self.rig.image or (None if self.several_guests else self.rig.programs)
            backup = self.rig.backup
            self.past = Past(self.run, backup.command, image.root if image else None)
            told = set(self.ledger.follow().confirmed)
            if not bookmark(self.front.control_socket, self.group, MARK):
                self.verdict.check(8, False, "all is well, and no bookmark can be set")
                return
            after = time.monotonic()
            self.digests = self.read_digests()
            databases = self.the_databases
            with self.past.view(self.group, MARK) as disks:
                if not (image and any(len(database.disks) > 1 for database in databases.values())):
                    for name, database in databases.items():
                        self.judge_past(name, self.past.rows(database, disks), told, after)
                began = time.monotonic()
                self.past.write_over(disks, 64)
                try:
                    wait_until("clients are answered during a drill", lambda: self.answers_since(began), COMES_BACK_S)
                    self.verdict.check(7, True, "")
                except TimeoutError as error:
                    self.verdict.check(7, False, str(error))
            self.check_digests()

        def judge_past(self, name: str, rows: set[Row], told: set[Row], after: float) -> None:
            missing = sorted(told - rows)
            text = (
                f"{len(missing)} rows that clients were told of before are not in {name} at the bookmark: {missing[:3]}"
            )
            self.verdict.check(5, not missing, text)
            sent = self.ledger.follow().sent
            later = sorted(row for row in rows if sent.get(row, after + 1) > after)
            text = f"{len(later)} rows of {name} at the bookmark were asked for later: {later[:3]}"
            self.verdict.check(5, not later, text)

        def read_digests(self) -> list[str]:
            return [self.past.digest(database, MARK) for database in self.the_databases.values()]

        def check_digests(self) -> None:
            """The point is what it was."""
            now = self.read_digests()
            self.verdict.check(5, now == self.digests, f"at the bookmark there were {self.digests}, now {now}")

        # -- the end -----------------------------------------------------------------------------------------------

        def disaster(self) -> None:
            """And what the host had on record of it."""
            super().disaster()
            if not self.several_guests:
                self.record.stop()
                self.exposed_since = self.record.since
                shutil.rmtree(self.rig.primary)

        def recover(self, *options: str) -> None:
            """It names who may have told more, and nobody else; the past is what it was."""
            super().recover(*options)
            if not self.several_guests:
                is_named = "CLIENTS MAY HAVE SEEN WHAT IS NOT HERE" in "\n".join(self.recovery.lines)
                text = f"the settings are {self.keys}, and that clients may have seen more is said: {is_named}"
                self.verdict.check(6, is_named == self.may_open, text)
            if self.digests:
                self.check_digests()

        @property
        def may_open(self) -> bool:
            """Whether a policy may let replies leave that the backup does not cover."""
            return bool(self.keys.keys() & {"when_unreachable", "before_first_contact"})

        def check_told(self, rows: list[MeasuredRow]) -> None:
            """Only if no policy opens the gate: its time is not known to the millisecond."""
            if not self.may_open:
                super().check_told(rows)

        def judge_losses(self, ledger: Ledger, rows: set[Row]) -> None:
            """Of one guest: by its policy what was told since the host had that on record may be lost."""
            if self.exposed_since is None:
                return super().judge_losses(ledger, rows)
            before = ledger.sent_before(self.gone_at).confirmed
            lost = [row for row, at in before.items() if row not in rows and at < self.exposed_since]
            self.check("no confirmed row is lost", not lost)
            return None

    return Tortured
