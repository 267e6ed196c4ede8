"""One drill: a protected guest, clients, a disaster, a recovery, and what the clients say to it.

    protect -> load -> trouble -> disaster -> recover -> serve again -> judge

`Drill` is the plain disaster; `scenarios.py` has those that put something before it or in its place.

Invariant: whatever a run ends with is an `Entry`, made from the clients' ledger and the recovered database alone;
nothing that Tidelock says of itself can make a promise look kept.
"""

from __future__ import annotations

import random
import statistics
import time
from dataclasses import dataclass, field

from . import wal
from .backupwatch import BackupWatch
from .durability import Durability, MeasuredRow, measure, rowstore_seqs, told_first
from .guest import Guest
from .hostdaemon import GROUP, MEMBER, Protection, writer_of
from .ledger import Ledger, Row, compare
from .process import Process, wait_until
from .progress import say
from .rig import Recovery, Rig
from .risk import word_of
from .run import Run
from .sampler import Sampler
from .views import answers_chart
from .wan import Wan
from .workload import Clients, rows_in, transactions_in

CLIENTS = 8
WORST_MOMENT_S = 2
"""How long a disaster waits for a reply to a client."""
ROLLING_S = 30
"""The same, when ways to the backup are gone already: for all of them together."""
CONFIRMED_MIN = 20
"""Below this a run proves nothing and fails."""
SERVED_AGAIN = 2 * CLIENTS
"""Rows that must be confirmed by the recovered guest."""
NEVER_MIND_S = 300
"""What takes longer than this will not happen any more."""

PROMISES = {
    "sync": "nothing that a client was told is lost",
    "pipelined": "nothing that a client was told is lost",
    "async": "what is there is a prefix of what was done; what clients lost is counted",
}


NOT_IN_DATABASE = "the recovered database lacks them, or no record of the journal has them"
"""Why a row of a PostgreSQL was not measured."""


class ProvesNothing(RuntimeError):
    """There was too little to judge."""


@dataclass(frozen=True)
class Knobs:
    """What a run is asked for."""

    scenario: str = "primary-dies"
    mode: str = "pipelined"
    guest: str = "vm"
    rtt_ms: float = 50
    seed: int = 1
    boundary: str = "group"
    """Where packets are held, in drills with several guests: see `fleet.BOUNDARIES`."""
    form: str = "auto"
    """What tags say, in drills with several guests: see `fleet.FORMS`."""
    tagging: bool = True
    """Whether packets between members are tagged. Without tags the promise must be seen to break."""
    watermark: bool = True
    """True if shards of a store are applied at one cut. Without a watermark the promise must be seen to break."""
    postgres: bool = False
    """Whether a guest that is a process has PostgreSQL: only drills with one guest and one disk."""
    hurry: bool = False
    """Shorter leases and cuts, for the test suite."""


@dataclass
class Entry:
    """What a run found. The report's JSON is a list of these, as they are."""

    scenario: str
    mode: str
    guest: str
    seed: int
    rtt_ms: float
    wan: str = ""
    promise: str = ""
    passed: bool = False
    violated: bool = False
    """Whether the promise was seen to break: a run that failed for another reason shows nothing."""
    disaster: str = ""
    """`rolling`, if ways to the backup went first, or `sudden`. Empty where the scenario has one of its own. Of a store
    `cut` or `slow`, if the link of one host was that first."""
    confirmed: int = 0
    recovered: int = 0
    lost: int = 0
    recovered_unconfirmed: int = 0
    foreign: int = 0
    out_of_order: int = 0
    lost_after_recovery: int = 0
    given_up: int | None = None
    """Rows that clients were told of after the point in time that was recovered on purpose."""
    rpo_ms: float = 0
    rto_ms: dict[str, float] | None = None
    commits_per_s: float = 0
    reply_ms: dict[str, float] = field(default_factory=dict)
    longest_hold_ms: float = 0
    held_packets_max: int = 0
    lag_ms_max: float = 0
    lag_writes_max: int = 0
    copy_s: float = 0
    tiers: dict[str, dict] | None = None
    """With several databases, for each: rows confirmed to clients, recovered, lost and so on."""
    dangling: int = 0
    """Rows that depend on a row that is not there."""
    dangling_rows: list[str] = field(default_factory=list)
    """The first of them."""
    told_by_pages: int = 0
    """Rows that pages told clients of."""
    told_by_pages_lost: int = 0
    """Those of them that are not there."""
    cut: dict[str, int] | None = None
    """The cut that was recovered: a count of writes for each writer."""
    left_out: list[str] = field(default_factory=list)
    store: dict | None = None
    """Figures of a sharded store: the cut, lag, the part that was killed; for each shard rows, log, promotion."""
    durability: dict[str, dict] = field(default_factory=dict)
    """For each database, what was measured of when the backup had each row and when a client was told of it."""
    samples_ms: dict[str, float] = field(default_factory=dict)
    """How far apart the moments are between which the backup was seen to get a row."""
    checks: list[dict] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    error: str | None = None
    origin: dict[str, str] = field(default_factory=dict)
    """The commit, the command line, the versions of programs, and digests of the ledgers."""
    configuration: dict[str, str] = field(default_factory=dict)
    """The text of each configuration file, by its path in the run's directory."""


class Drill:
    """The primary site is gone from one moment to the next."""

    name = "primary-dies"
    about = "guest, daemon, links and disks of the primary site are gone at a random moment under load"
    disks = 1
    several_guests = False
    has_watermark = False
    """True if the scenario takes WATERMARK."""
    default_rtt_ms = 50.0
    guests = ("vm", "process")
    modes = ("sync", "pipelined", "async")
    copy_rate = {"vm": "", "process": ""}
    window = ""
    """Of the past that the backup keeps, if any."""
    load_s = {"vm": (8.0, 14.0), "process": (2.0, 5.0)}
    patience_s = {"vm": 2.5, "process": 0.5}
    """How long a client waits for an answer before it tries again, and some round trips more."""

    def __init__(self, run: Run, knobs: Knobs):
        self.run, self.knobs = run, knobs
        self.random = random.Random(f"{knobs.scenario} {knobs.seed}")
        self.entry = Entry(knobs.scenario, knobs.mode, knobs.guest, knobs.seed, knobs.rtt_ms)
        self.entry.promise = PROMISES[knobs.mode]
        self.charts: list[str] = []
        self.events: list[tuple[float, str]] = []
        self.sampler: Sampler | None = None
        self.watch: BackupWatch | None = None
        self.durability: dict[str, Durability] = {}
        """Of each protected database."""
        self.ledger: Ledger | None = None
        self.disaster_at = self.gone_at = self.load_from = self.load_to = 0.0
        protection = Protection(
            mode=knobs.mode,
            lease_s=2 if knobs.hurry else 10,
            grace_s=3 if knobs.hurry else 15,
            when_unreachable=self.when_unreachable,
            copy_rate=self.copy_rate[knobs.guest],
        )
        self.rig = self.make_rig(protection)
        self.entry.wan = self.rig.net.wan.kind
        say(f"two sites, {knobs.rtt_ms:g} ms apart ({self.entry.wan}); certificates for both")

    def make_rig(self, protection: Protection) -> Rig:
        """Two sites and what is in them."""
        knobs = self.knobs
        kind = "postgres" if knobs.postgres else knobs.guest
        return Rig(self.run, kind, knobs.rtt_ms, knobs.seed, self.disks, protection, self.window)

    def execute(self) -> None:
        """The whole drill, one step after the other."""
        self.protect()
        self.load()
        self.trouble()
        self.disaster()
        self.recover()
        self.serve_again()
        self.judge()

    # -- before the disaster ---------------------------------------------------------------------------------------

    def protect(self) -> None:
        """Both sites up, the guest booted, the initial copy made."""
        began = self.start_sites()
        watch = CopyWatch()
        needs = [self.rig.guest.process, self.rig.backup.process]
        self.rig.daemon.wait_state(self.settled, NEVER_MIND_S, needs, watch.show)
        self.entry.copy_s = round(time.monotonic() - began, 2)
        seconds = self.rig.guest.wait_ready()
        say(f"primary: the guest serves clients, {seconds:.1f} s after its start; the group is {self.settled}")

    def start_sites(self) -> float:
        """Starts everything but the clients; returns when the daemon was started."""
        rig = self.rig
        rig.backup.start()
        self.watch = BackupWatch(self.run, rig.backup)
        say("backup: tidelock-backup runs, without privileges")
        began = time.monotonic()
        rig.daemon.start()
        say("primary: tidelockd runs")
        rig.boot_guest()
        kind = f"QEMU, {'KVM' if 'kvm' in rig.accelerator else 'TCG'}" if rig.image else "process"
        say(f"primary: the guest is booting ({kind}) while its disks are copied")
        self.sampler = Sampler(rig.daemon, rig.guest)
        return began

    @property
    def when_unreachable(self) -> str:
        """What becomes of replies that have waited too long for the backup."""
        return "hold"

    @property
    def round_trip_ms(self) -> float:
        """What a reply takes at least that waits for the backup."""
        return self.knobs.rtt_ms

    @property
    def settled(self) -> str:
        """The state of a group that is as protected as its mode allows."""
        return "following" if self.knobs.mode == "async" else "protected"

    def load(self) -> None:
        """Clients at work for a random while, and on a slow machine until there is something to judge."""
        self.start_clients()
        self.work(self.random.uniform(*self.load_s[self.knobs.guest]))
        end = time.monotonic() + NEVER_MIND_S
        while len(self.ledger.follow().confirmed) < CONFIRMED_MIN and time.monotonic() < end:
            self.work(1)
        self.load_to = time.monotonic()

    def start_clients(self) -> None:
        """Starts the clients and waits for their first rows."""
        rig = self.rig
        self.clients = Clients(self.run, rig.net, rig.guest, CLIENTS, options=self.patience())
        self.ledger = self.clients.ledger
        needs = [self.clients.process, rig.guest.process]
        wait_until("the first rows are confirmed", lambda: len(self.ledger.follow().confirmed) >= CLIENTS, 60, needs)
        self.load_from = time.monotonic()
        say(f"clients: {CLIENTS} insert numbered rows")

    def patience(self) -> list[str]:
        """How long clients wait: for a server that is gone not long, but for as many round trips as it may take."""
        round_trips_s = 10 * self.knobs.rtt_ms / 1e3
        answer_s = self.patience_s[self.knobs.guest] + round_trips_s
        return ["--patience-s", str(answer_s), "--connect-s", str(2 + round_trips_s)]

    def work(self, seconds: float, every_s: float = 2.0) -> None:
        """Lets the clients work, and says how it goes."""
        end = time.monotonic() + seconds
        shown_at, shown = time.monotonic(), len(self.ledger.follow().confirmed)
        while (left := end - time.monotonic()) > 0:
            time.sleep(min(left, every_s))
            now, confirmed = time.monotonic(), len(self.ledger.follow().confirmed)
            if now - shown_at >= every_s or now >= end:
                rate = (confirmed - shown) / (now - shown_at)
                say(f"clients: {confirmed} rows confirmed, {rate:.0f}/s{self.primary_says()}")
                shown_at, shown = now, confirmed
            for process in self.load_processes():
                if not process.alive():
                    raise RuntimeError(f"{process.name} ended under load\n{process.tail()}")

    def load_processes(self) -> list[Process]:
        """Processes that must not end under load."""
        return [self.clients.process, *self.guest_processes()]

    def guest_processes(self) -> list[Process]:
        """What runs as long as the guest does."""
        return [self.rig.guest.process]

    def primary_says(self) -> str:
        group = self.sampler.group
        if group is None:
            return ""
        lag = writer_of(group)["lag"]
        held = group["members"][0]["gates"][0]["held_packets"]
        return f"; {word_of(group)}, lag {lag['writes']} writes / {lag['ms']} ms, {held} packets held"

    def trouble(self) -> None:
        """What happens before the disaster, if anything."""

    # -- the disaster and after it ---------------------------------------------------------------------------------

    def disaster(self) -> None:
        """The primary site is gone."""
        self.worst_moment()
        cut_first = self.links_go_first()
        self.disaster_at, self.gone_at = self.rig.destroy_primary(cut_first)
        self.event("disaster", self.disaster_at)
        self.sampler.stop()
        order = "links, then guest and daemon" if cut_first else "guest and daemon, then links"
        say(f"DISASTER: the primary site is gone ({order}, within {(self.gone_at - self.disaster_at) * 1e3:.0f} ms)")

    def worst_moment(self) -> None:
        """The worst moment is the one just after a client was told something.

        Where replies do not wait for all that they depend on, it takes a rolling disaster to show that: ways to the
        backup are gone first.
        """
        ways = self.ways_that_go_first()
        self.entry.disaster = "rolling" if ways else "sudden"
        if ways:
            self.roll(ways)
            return
        told, end = len(self.ledger.follow().confirmed), time.monotonic() + WORST_MOMENT_S
        while len(self.ledger.follow().confirmed) <= told and time.monotonic() < end:
            time.sleep(0.0005)

    def roll(self, ways: list[Wan]) -> None:
        """One way to the backup after the other is gone, until a client was told of a row that it asked for since.

        The backup never hears of that one. Between two of them clients are told of more, so that what followed from it
        has arrived by the ways that were left. If all replies wait for what they depend on, nobody is told anything.
        """
        say(f"ROLLING DISASTER: {len(ways)} of {len(self.rig.net.wans)} ways to the backup are gone first")
        gone_at = []
        for number, way in enumerate(ways, 1):
            way.cut()
            gone_at.append(self.event("a way to the backup is gone"))
            answers = 1 if number == len(ways) else 2 * CLIENTS
            end = gone_at[-1] + self.rolling_s / len(ways)
            while self.answered(self.ledger, gone_at[-1]) < answers and time.monotonic() < end:
                time.sleep(0.0005)
        told, seconds = self.answered(self.ledger, gone_at[0]), time.monotonic() - gone_at[0]
        text = f"clients were told of {told} rows that they had asked for since"
        self.entry.notes.append(f"ways to the backup were gone {seconds:.1f} s before the rest; {text}")

    @property
    def rolling_s(self) -> float:
        """How long a rolling disaster takes if nobody is told anything meanwhile."""
        return ROLLING_S

    def ways_that_go_first(self) -> list[Wan]:
        """To the backup, in the order in which a rolling disaster takes them; none, if the disaster is a sudden one."""
        return self.rig.net.wans if self.replies_wait_for_nothing() else []

    def replies_wait_for_nothing(self) -> bool:
        """Whether clients are answered also while the backup cannot be reached."""
        return self.knobs.mode == "async"

    @staticmethod
    def answered(ledger: Ledger, since: float) -> int:
        """How many requests were asked and answered since then."""
        ledger.follow()
        return sum(ledger.sent[row] > since for row in ledger.confirmed)

    def links_go_first(self) -> bool:
        """Whether the links die before the guest and the daemon, by some milliseconds."""
        return self.random.random() < 0.5

    def recover(self, *options: str) -> None:
        """`tidelock-backup recover`, and the clients' way to the backup site."""
        self.recovery = Recovery(self.rig, *(options or ("--primary-is-dead",)))
        self.recovery.wait_recovered(NEVER_MIND_S)
        self.rig.net.route_clients_to(self.rig.net.backup, self.rig.guest_net)
        self.event("recovered", self.recovery.recovered_at)
        seconds = self.recovery.recovered_at - self.disaster_at
        say(f"backup: recovered {seconds:.2f} s after the disaster: epoch raised, disks served")

    def serve_again(self) -> None:
        """The guest at the backup site answers the clients."""
        self.recovery.wait_ready()
        guest = self.recovery.guest
        say(f"backup: the guest is ready {guest.phases['ready'] - self.disaster_at:.2f} s after the disaster")

        first = self.first_reply([guest.process])
        self.entry.rto_ms = self.rto(guest.phases, first)

    def first_reply(self, needs: list[Process]) -> float:
        """Waits until clients are served by what was recovered; returns when the first one was."""

        def again() -> list[float]:
            confirmed = self.ledger.follow().confirmed
            return sorted(at for at in confirmed.values() if at > self.recovery.recovered_at)

        wait_until(
            "clients are served by the recovered guest",
            lambda: len(again()) >= SERVED_AGAIN,
            120,
            [self.clients.process, *needs],
        )
        first = again()[0]
        say(f"clients: first reply from the backup site {first - self.disaster_at:.2f} s after the disaster")
        return first

    def rto(self, guest_phases: dict[str, float], first_reply: float) -> dict[str, float]:
        """How long each phase took, from the disaster to the first reply."""
        moments = {
            # When to recover is a human's or a monitor's decision; the drill has taken it beforehand.
            "decide": self.disaster_at,
            "recover": self.recovery.recovered_at,
            "boot": guest_phases["kernel"],
            "disks": guest_phases["disks"],
            # The guest asks its database now and then whether it is ready; a client may know sooner.
            "database": min(guest_phases["ready"], first_reply),
            "first_reply": first_reply,
        }
        phases, before = {}, self.disaster_at
        for name, at in moments.items():
            phases[name] = round(max(0.0, at - before) * 1e3, 1)
            before = max(before, at)
        return {"total": round((before - self.disaster_at) * 1e3, 1), **phases}

    # -- the judgement ---------------------------------------------------------------------------------------------

    def judge(self) -> None:
        """Compares the ledger with what the recovered database has."""
        ledger = self.clients.stop()
        say("clients: stopped; reading every row of the recovered database")
        rows = rows_in(self.rig.net, self.recovery.guest)
        self.compare(ledger, rows)
        self.measure_rows(ledger)
        self.measure(ledger)
        entry = self.entry
        self.check("no row is there that nobody sent", entry.foreign == 0)
        self.check("what is there is a prefix of what was done: no earlier row is missing", entry.out_of_order == 0)
        self.check("the recovered guest kept everything that it confirmed", entry.lost_after_recovery == 0)
        self.judge_losses(ledger, rows)
        self.conclude()

    def judge_losses(self, ledger: Ledger, rows: set[Row]) -> None:
        """What the mode says of rows that are not there."""
        if self.knobs.mode != "async":
            self.check("no confirmed row is lost", self.entry.lost == 0)
        elif self.entry.lost == 0:
            self.entry.notes.append("this disaster happened to lose nothing; async does not promise that")

    def compare(self, ledger: Ledger, rows: set[Row]) -> None:
        """Rows that were asked for before the disaster are what it is about; later ones are the recovered guest's."""
        before = ledger.sent_before(self.gone_at)
        verdict = compare(before, {row for row in rows if ledger.sent.get(row, 0) < self.gone_at}, self.gone_at)
        later = set(ledger.confirmed) - set(before.confirmed)
        entry = self.entry
        entry.confirmed, entry.recovered = verdict.confirmed, verdict.recovered
        entry.lost, entry.foreign = len(verdict.lost), len(verdict.foreign)
        entry.recovered_unconfirmed = verdict.recovered_unconfirmed - entry.foreign
        entry.out_of_order = len(verdict.out_of_order)
        entry.lost_after_recovery = len(later - rows)
        entry.rpo_ms = round(verdict.rpo_ms, 1)
        if entry.confirmed < CONFIRMED_MIN:
            raise ProvesNothing(f"only {entry.confirmed} rows were confirmed before the disaster: this proves nothing")

    def measure_rows(self, ledger: Ledger, pages: Ledger | None = None) -> None:
        """For each row, in each protected database, when the backup had it and when a client was told of it."""
        self.watch.stop()
        asked = ledger.sent_before(self.gone_at)
        for group in sorted({group for _, group, _ in self.recovered_databases().values()}):
            writes = self.watch.writes(group)
            for name, (guest, of_group, member) in self.recovered_databases().items():
                if of_group == group:
                    seqs = self.seqs(guest, writes.get(member, []))
                    cuts = self.watch.cuts[group, member]
                    not_found = NOT_IN_DATABASE if guest.database == "postgres" else Durability.not_found
                    self.durability[name] = measure(asked, self.told(name, asked, pages), seqs, cuts, not_found)
        self.entry.durability = {name: found.summary() for name, found in self.durability.items()}
        self.entry.samples_ms = self.watch.interval_ms()
        waited = [row for found in self.durability.values() for row in found.told(self.reply_waited)]
        if free := sum(found["told_first"] for found in self.entry.durability.values()) - told_first(waited):
            text = "rows were told before the backup had them at times when replies did not have to wait for it"
            self.entry.notes.append(f"{free} {text}")
        if self.knobs.mode != "async":
            self.check_told(waited)

    def check_told(self, rows: list[MeasuredRow]) -> None:
        """Replies of these rows had to wait for the backup."""
        was_measured = any(row.is_measured for row in rows)
        text = "no client was told of a row before the backup had it"
        self.check(text, was_measured and told_first(rows) == 0)

    def reply_waited(self, at: float) -> bool:
        """Whether a reply that a client got at this time must have waited for the backup."""
        del at
        return self.knobs.mode != "async"

    def recovered_databases(self) -> dict[str, tuple[Guest, str, str]]:
        """Each protected database: the guest that has it now, its group and its member."""
        return {MEMBER: (self.recovery.guest, GROUP, MEMBER)}

    def told(self, database: str, asked: Ledger, pages: Ledger | None) -> dict[Row, float]:
        """When a client was told first that a database has a row."""
        del database, pages
        return asked.confirmed

    def seqs(self, guest: Guest, writes: list[wal.Write]) -> dict[Row, int]:
        """Which of the guest's writes makes each row durable."""
        if guest.database != "postgres":
            return rowstore_seqs(writes)
        commits = wal.commits(writes, self.run.directory)
        transactions = transactions_in(self.rig.net, guest)
        return {row: commits[number] for row, number in transactions.items() if number in commits}

    def measure(self, ledger: Ledger) -> None:
        """Figures of the time under load."""
        entry, top = self.entry, self.sampler.extremes
        if self.load_to > self.load_from:
            confirmed = ledger.confirmed_between(self.load_from, self.load_to)
            entry.commits_per_s = round(confirmed / (self.load_to - self.load_from), 1)
        times = ledger.reply_times_ms(self.load_from, self.load_to)
        if len(times) > 1:
            centiles = statistics.quantiles(times, n=100)
            figures = {"least": times[0], "median": centiles[49], "p99": centiles[98]}
            entry.reply_ms = {name: round(value, 1) for name, value in figures.items()}
            if self.knobs.mode != "async":
                text = "no reply came sooner than the backup could have had the row (one round trip)"
                self.check(text, times[0] >= self.round_trip_ms)
        entry.longest_hold_ms = round(top.hold_ms, 1)
        entry.held_packets_max, entry.lag_writes_max = top.held_packets, top.lag_writes
        entry.lag_ms_max = round(top.lag_ms, 1)
        self.charts = self.draw(ledger)

    def draw(self, ledger: Ledger) -> list[str]:
        """The report's charts."""
        title = "Rows as each side sees them, before the disaster"
        return [
            self.sampler.views.chart(title, ledger, self.durable_at(MEMBER), self.disaster_at),
            answers_chart("Rows confirmed to clients, each second", ledger, self.disaster_at, self.events),
        ]

    def durable_at(self, database: str) -> list[float]:
        """When the backup had each row of a database, ascending."""
        return self.durability[database].durable_at if database in self.durability else []

    def event(self, name: str, at: float | None = None) -> float:
        """Notes a moment for the charts; now, unless another is given. Returns it."""
        at = time.monotonic() if at is None else at
        self.events.append((at, name))
        return at

    def states(self) -> list[tuple[float, str]]:
        """The states that the group went through before the disaster."""
        return self.sampler.states if self.sampler else []

    def check(self, what: str, held: bool) -> None:
        """Notes something that must hold."""
        self.entry.checks.append({"what": what, "passed": held})

    def conclude(self) -> None:
        """The run has passed if every check has."""
        checks = self.entry.checks
        self.entry.passed = bool(checks) and all(check["passed"] for check in checks)
        self.entry.violated = bool(checks) and not self.entry.passed


class CopyWatch:
    """Shows how the initial copy goes, about once a second."""

    def __init__(self, at_once: bool = False) -> None:
        self._shown_at = 0.0 if at_once else time.monotonic()

    def show(self, group: dict) -> None:
        """Looks at a status."""
        copy = writer_of(group)["copy"]
        if copy is None or time.monotonic() - self._shown_at < 1:
            return
        self._shown_at = time.monotonic()
        left = f", {copy['left_ms'] / 1e3:.0f} s left" if copy["left_ms"] else ""
        done, total = copy["done_bytes"] >> 20, copy["total_bytes"] >> 20
        say(f"primary: {word_of(group)}, {done} of {total} MiB, {copy['rate_bytes_per_s'] / 1e6:.0f} MB/s{left}")
