"""Drills of applications: several protected guests, on one host or two, that are recovered as one thing.

Invariant: as for all drills, what a run ends with is judged from the clients' ledger and the recovered databases alone.
"""

from __future__ import annotations

import random
import time

from .applications import ONE_ASIDE, THREE_TIER, TWO_WRITERS, Application
from .backupwatch import BackupWatch
from .clients import NEWEST
from .drilling import CLIENTS, CONFIRMED_MIN, NEVER_MIND_S, Drill, Knobs, ProvesNothing
from .fleet import Fleet, FleetRecovery, Shape
from .guest import Guest
from .hostdaemon import Protection
from .invariants import Rows, examine, told_and_missing
from .ledger import Ledger, Row
from .process import Process, wait_until
from .progress import say
from .run import Run
from .sampler import FleetSampler
from .views import answers_chart
from .wan import Wan
from .workload import Clients, references_in

READERS = 2
"""Clients that only read, and so hear of writes that are not theirs."""
CONFIRMED_FIRST = 8
DANGLING_SHOWN = 10
OPTIONS_SHOWN = 3
HELD_S = 5
"""How long a rolling disaster takes in the test suite where nobody may be answered meanwhile."""
SLOW_LINK_FACTOR = 3
"""How much longer the slow host's way to the backup is than the other's."""


class AppDrill(Drill):
    """The primary site, with all guests of an application, is gone from one moment to the next."""

    several_guests = True
    application: Application
    hosts: dict[str, int] = {}
    """On which host each guest runs: the first, if not named here."""
    clients_at_once = CLIENTS
    load_s = {"vm": (10.0, 15.0), "process": (2.0, 4.0)}
    patience_s = {"vm": 5.0, "process": 1.0}

    def __init__(self, run: Run, knobs: Knobs):
        drawn = random.Random(f"disaster {knobs.seed}").random() < 0.5
        self.rolls = drawn or not knobs.tagging
        """Whether ways to the backup are gone first, which costs rows without tags; with them in half of the runs."""
        super().__init__(run, knobs)

    def make_rig(self, protection: Protection) -> Fleet:
        """Two sites, and the application's guests."""
        knobs = self.knobs
        if not knobs.tagging:
            self.entry.notes.append("packets between members were not tagged: the promise must be seen to break")
        hosts = {place.name: self.hosts.get(place.name, 0) for place in self.application.places}
        shape = Shape(self.application, hosts, self.round_trips_ms, knobs.boundary, knobs.form, knobs.tagging)
        return Fleet(self.run, knobs.guest, shape, knobs.seed, protection, self.window)

    @property
    def round_trips_ms(self) -> tuple[float, ...]:
        """Between each host and the backup."""
        return (self.knobs.rtt_ms,)

    @property
    def round_trip_ms(self) -> float:
        """Each request writes on every host: out on the slowest link, and back to the front's host on that one's."""
        back = self.round_trips_ms[self.hosts.get(self.application.front, 0)]
        return (max(self.round_trips_ms) + back) / 2

    # -- before the disaster ---------------------------------------------------------------------------------------

    def protect(self) -> None:
        """Both sites up, all guests booted, the initial copies made."""
        fleet = self.rig
        fleet.backup.start()
        self.watch = BackupWatch(self.run, fleet.backup)
        fleet.plug_in()
        began = time.monotonic()
        for daemon in fleet.daemons:
            daemon.start()
            say(f"{daemon.host}: tidelockd runs")
        self.sampler = FleetSampler(fleet.daemons, fleet.writers())
        fleet.boot()
        say(f"primary: {len(fleet.guests)} guests are booting while their disks are copied")
        fleet.wait_state(self.settled, NEVER_MIND_S)
        self.entry.copy_s = round(time.monotonic() - began, 2)
        for name, guest in fleet.guests.items():
            say(f"primary: {name} is ready, {guest.wait_ready():.1f} s after its start")

    def start_clients(self) -> None:
        """Starts the clients and waits for their first rows."""
        fleet = self.rig
        self.clients = Clients(self.run, fleet.net, fleet.front, self.clients_at_once, options=self.patience())
        self.ledger = self.clients.ledger
        options = ["--read", "--page", NEWEST, "--every-ms", str(READERS * 25), *self.patience()]
        self.readers = Clients(self.run, fleet.net, fleet.front, READERS, name="readers", options=options)
        needs = [self.clients.process, *self.guest_processes()]
        wait_until(
            "the first rows are confirmed", lambda: len(self.ledger.follow().confirmed) >= CONFIRMED_FIRST, 180, needs
        )
        self.load_from = time.monotonic()
        front = self.application.front
        say(f"clients: {self.clients_at_once} ask {front} to write numbered rows, {READERS} which are the newest")

    def guest_processes(self) -> list[Process]:
        """Of all guests."""
        return [process for guest in self.rig.guests.values() for process in guest.processes]

    def primary_says(self) -> str:
        """What the daemons say of all members."""
        members = self.sampler.members.values()
        lag = max((member["writer"]["lag"]["ms"] for member in members if member["writer"]), default=0)
        held = sum(gate["held_packets"] for member in members for gate in member["gates"])
        return f"; lag {lag} ms, {held} packets held"

    # -- the disaster and after it ---------------------------------------------------------------------------------

    def disaster(self) -> None:
        """All hosts of the primary site are gone."""
        hosts = list(range(len(self.rig.daemons)))
        self.worst_moment()
        self.disaster_at, self.gone_at = self.rig.destroy(hosts, self.links_go_first())
        self.event("disaster", self.disaster_at)
        self.sampler.stop()
        within_ms = (self.gone_at - self.disaster_at) * 1e3
        say(f"DISASTER ({self.entry.disaster}): the primary site is gone, within {within_ms:.0f} ms")

    def ways_that_go_first(self) -> list[Wan]:
        """The slowest first: what depends on it goes another way. With tags they are those that go without.

        Without tags a front tier that writes waits for its own way, and one that does not for none.
        """
        waits_for_nothing = self.replies_wait_for_nothing()
        if not self.rolls and not waits_for_nothing:
            return []
        wans, front = list(enumerate(self.rig.net.wans)), self.application.front
        if self.rig.is_writer(front) and not waits_for_nothing:
            wans = [(number, wan) for number, wan in wans if number != self.hosts.get(front, 0)]
        return [wan for _, wan in sorted(wans, key=lambda way: -self.round_trips_ms[way[0]])]

    @property
    def rolling_s(self) -> float:
        """With tags nobody is told anything meanwhile, so it always takes all of it."""
        may_be_short = self.knobs.hurry and self.knobs.tagging and not self.replies_wait_for_nothing()
        return HELD_S if may_be_short else super().rolling_s

    def links_go_first(self) -> bool:
        """In a rolling disaster always: what the kernel still sends of a daemon that is dead must not hide a loss."""
        return super().links_go_first() or self.rolls

    def make_recovery(self, *options: str) -> FleetRecovery:
        """What is to be recovered, and how."""
        return FleetRecovery(self.rig, *options)

    def recover(self, *options: str) -> None:
        """Recovers every group, and starts the guests."""
        self.recovery = self.make_recovery(*(options or ("--primary-is-dead",)))
        self.recovery.recover(NEVER_MIND_S)
        self.recovery.boot()
        self.event("recovered", self.recovery.recovered_at)
        self.entry.cut, self.entry.left_out = self.recovery.cut(), self.recovery.left_out()
        seconds = self.recovery.recovered_at - self.disaster_at
        cut = ", ".join(f"{name} {count}" for name, count in self.entry.cut.items())
        say(f"backup: recovered {seconds:.2f} s after the disaster, at the cut {cut}")

    def serve_again(self) -> None:
        """The application answers the clients from the backup site."""
        ready_at = self.recovery.wait_ready()
        say(f"backup: all guests are ready {ready_at - self.disaster_at:.2f} s after the disaster")
        needs = [process for guest in self.recovery.guests.values() for process in guest.processes]
        self.entry.rto_ms = self.rto(self.recovery.phases(), self.first_reply(needs))

    def judge(self) -> None:
        """Compares the ledger with what the recovered databases have, and these with each other."""
        ledger, pages = self.clients.stop(), self.readers.stop()
        say("clients: stopped; reading every row of the recovered databases")
        databases = {name: references_in(self.rig.net, self.recovery.guests[name]) for name in self.databases}
        self.compare_all(ledger, databases)
        missing = told_and_missing(self.application, databases, pages, self.gone_at)
        self.entry.told_by_pages = sum(at < self.gone_at for at in pages.told.values())
        self.entry.told_by_pages_lost = len(missing)
        self.measure_rows(ledger, pages)
        self.measure(ledger)
        entry, tiers = self.entry, self.entry.tiers
        seen = [header for guest in self.rig.guests.values() for header in guest.options_seen]
        entry.notes += [f"a guest received the header {header}" for header in seen[:OPTIONS_SHOWN]]
        self.check("no guest received a packet with an IP option: tags are for hosts alone", not seen)
        self.check("no row is there that nobody sent", not any(tier["foreign"] for tier in tiers.values()))
        text = "what is there is a prefix of what was done: no earlier row is missing"
        self.check(text, not any(tier["out_of_order"] for tier in tiers.values()))
        self.check("no row depends on a row that is not there", entry.dangling == 0)
        self.check("the recovered databases kept everything that was confirmed", entry.lost_after_recovery == 0)
        if self.knobs.mode != "async":
            self.check("no confirmed row is missing in any database", entry.lost == 0)
            self.check("no row is missing that a page told a client of", entry.told_by_pages_lost == 0)
        self.conclude()

    @property
    def databases(self) -> list[str]:
        """The guests that have one."""
        return self.application.databases

    def recovered_databases(self) -> dict[str, tuple[Guest, str, str]]:
        """The application's, of guests with a protected disk: the ledger is of its requests alone."""
        own = [name for name in self.rig.writers() if name in self.databases]
        return {name: (self.recovery.guests[name], self.rig.group_of(name), name) for name in own}

    def told(self, database: str, asked: Ledger, pages: Ledger | None) -> dict[Row, float]:
        """By the answer to the request, or by a page that tells of the row."""
        told = dict(asked.confirmed)
        for (number, row), at in pages.told.items():
            if self.application.tells[number] == database and at < self.gone_at:
                told[row] = min(at, told.get(row, at))
        return told

    def compare_all(self, ledger: Ledger, databases: dict[str, Rows]) -> None:
        """Rows that were asked for before the disaster are what it is about; what they depend on may be any row."""

        def before(row: Row) -> bool:
            return ledger.sent.get(row, 0) < self.gone_at

        asked = ledger.sent_before(self.gone_at)
        found = examine(self.application, databases, asked, self.gone_at, before)
        entry = self.entry
        entry.tiers = {
            name: {
                "confirmed": verdict.confirmed,
                "recovered": verdict.recovered,
                "lost": len(verdict.lost),
                "recovered_unconfirmed": verdict.recovered_unconfirmed - len(verdict.foreign),
                "foreign": len(verdict.foreign),
                "out_of_order": len(verdict.out_of_order),
            }
            for name, verdict in found.verdicts.items()
        }
        whole = set.intersection(*(set(rows) for rows in databases.values()))
        entry.confirmed, entry.lost = len(asked.confirmed), len(found.lost())
        entry.recovered = sum(map(before, whole))
        entry.recovered_unconfirmed = sum(before(row) and row not in asked.confirmed for row in whole)
        entry.foreign = sum(tier["foreign"] for tier in entry.tiers.values())
        entry.out_of_order = sum(tier["out_of_order"] for tier in entry.tiers.values())
        entry.dangling = len(found.dangling)
        entry.dangling_rows = [str(one) for one in found.dangling[:DANGLING_SHOWN]]
        later = set(ledger.confirmed) - set(asked.confirmed)
        entry.lost_after_recovery = len(later - whole)
        entry.rpo_ms = round(max(verdict.rpo_ms for verdict in found.verdicts.values()), 1)
        if entry.confirmed < CONFIRMED_MIN:
            raise ProvesNothing(f"only {entry.confirmed} rows were confirmed before the disaster: this proves nothing")

    def draw(self, ledger: Ledger) -> list[str]:
        """Each database has views of its own, as in PipeCloud's figure 16."""
        charts = [
            views.chart(
                f"Rows of {name} as each side sees them, before the disaster",
                ledger,
                self.durable_at(name),
                self.disaster_at,
            )
            for name, views in self.sampler.views.items()
        ]
        return [*charts, answers_chart("Rows confirmed to clients, each second", ledger, self.disaster_at, self.events)]


class ThreeTier(AppDrill):
    """A row in each of three tiers."""

    name = "three-tier"
    about = (
        "three tiers, each a web service with a database of its own, the last one on a host with a slow link: a "
        "request writes in each; the primary site is gone"
    )
    application = THREE_TIER
    hosts = {"back": 1}
    clients_at_once = 1
    """With several, the front's own later writes hold a reply that lacks its tags for almost as long as tags would."""
    load_s = {"vm": (12.0, 16.0), "process": (5.0, 6.0)}

    @property
    def round_trips_ms(self) -> tuple[float, ...]:
        """The last tier's link is the slow one: its row is on its way when the front's own is at the backup."""
        return (self.knobs.rtt_ms, self.knobs.rtt_ms * SLOW_LINK_FACTOR)


class TwoWriters(AppDrill):
    """Two databases that depend on each other."""

    name = "two-writers"
    about = "a front end writes transfers into two databases, in either order; the primary site is gone"
    application = TWO_WRITERS


class TwoHosts(AppDrill):
    """The guests are spread over two hosts, whose ways to the backup differ."""

    name = "two-hosts"
    about = (
        "as two-writers, with the databases on two hosts, each with a daemon and a link of its own, one of them slow; "
        "both hosts are gone"
    )
    application = TWO_WRITERS
    hosts = {"b": 1, "front": 1}

    @property
    def round_trips_ms(self) -> tuple[float, ...]:
        """The first host's link is the slow one."""
        return (self.knobs.rtt_ms * SLOW_LINK_FACTOR, self.knobs.rtt_ms)


class OneHostInTrouble(TwoHosts):
    """One of two hosts is in trouble; what needs nothing of it goes on."""

    application = ONE_ASIDE
    hosts = {"b": 1, "front": 1, "aside": 1}

    def start_clients(self) -> None:
        """Also some that read a page of the guest that has nothing to do with the others."""
        super().start_clients()
        options = ["--read", "--every-ms", "100", *self.patience()]
        aside = self.rig.guests["aside"]
        self.bystanders = Clients(self.run, self.rig.net, aside, READERS, name="bystanders", options=options)

    @property
    def front_waits_for_others(self) -> bool:
        """Otherwise the front hears of nothing that the backup lacks, or holds nothing."""
        return (self.knobs.mode, self.knobs.boundary) == ("pipelined", "group")

    def wait_held(self) -> None:
        """The first host has no way to the backup any more: waits until the front has heard of a write of it since."""
        longer_than_usual_ms = 2 * max(self.round_trips_ms)

        def is_held() -> bool:
            return self.sampler.members["front"]["gates"][0]["oldest_hold_ms"] > longer_than_usual_ms

        # Without tags it never does, and the check after this must notice.
        if self.front_waits_for_others and self.knobs.tagging:
            wait_until("the front waits for host-a", is_held, 60, self.guest_processes())

    def check_the_other(self, since: float) -> None:
        """While the first host is away, what depends on it waits at the second, and nothing else does."""
        if self.front_waits_for_others:
            held = self.sampler.members["front"]["gates"][0]["held_packets"]
            self.check("replies that may depend on host-a were held by host-b as long as it was away", held > 0)
        text = "replies that do not depend on host-a went on from host-b"
        self.check(text, self.answered(self.bystanders.ledger, since) > 0)


class OneHostDies(OneHostInTrouble):
    """What depends on a dead host stays held."""

    name = "one-host-dies"
    about = (
        "as two-hosts, but one host dies before the other, which goes on: its packets that depend on the dead one stay "
        "held, others leave"
    )

    def trouble(self) -> None:
        """The first host dies: its way to the backup first, so that others have heard of what the backup never will."""
        self.rig.net.wans[0].cut()
        self.wait_held()
        self.died_at, died_by = self.rig.destroy([0], cut_first=self.random.random() < 0.5)
        self.event("host-a dies", self.died_at)
        say("TROUBLE: host-a is gone; host-b goes on, and clients still reach it")
        # What had left the gate by then may still be under way to a client.
        time.sleep(self.random.uniform(1, 2) + self.round_trip_ms / 1e3)
        if not self.rig.daemons[1].process.alive():
            raise RuntimeError(f"tidelockd ended with the other host\n{self.rig.daemons[1].process.tail()}")
        self.check_the_other(died_by)
        pages, rows = self.answered(self.readers.ledger, died_by), self.answered(self.ledger, died_by)
        self.entry.notes.append(f"once host-a was gone, the front answered {pages} readers and {rows} writers")

    def disaster(self) -> None:
        """Then the second host is gone as well."""
        self.load_to = self.died_at
        self.disaster_at, self.gone_at = self.rig.destroy([1], cut_first=self.random.random() < 0.5)
        self.event("disaster", self.disaster_at)
        self.sampler.stop()
        say("DISASTER: host-b is gone as well")


class OneLinkCut(OneHostInTrouble):
    """What depends on a host that the backup does not hear stays held, and leaves when it is heard again."""

    name = "one-link-cut"
    about = (
        "as two-hosts, but first one host loses its link to the backup while the other goes on: what depends on the "
        "first stays held; the link heals; then both hosts are gone"
    )

    def trouble(self) -> None:
        """Cuts the first host's link, heals it, and waits for answers."""
        wan = self.rig.net.wans[0]
        wan.cut()
        cut_at = self.event("link of host-a cut")
        cut_s = 3 if self.knobs.hurry else 20
        say(f"TROUBLE: host-a has no link to the backup, for {cut_s} s; host-b has")
        self.work(cut_s)
        self.check_the_other(cut_at)
        # Before it is mended: a packet that leaves in between is the healed link's.
        healed_at = self.event("link heals")
        wan.mend()
        say("the link is whole again")
        needs = [self.clients.process, *self.guest_processes()]
        wait_until("clients get answers again", lambda: self.answered(self.ledger, healed_at), 120, needs)
        seconds = time.monotonic() - healed_at
        say(f"clients get answers {seconds:.1f} s after the link healed")
        self.entry.notes.append(f"clients got answers again {seconds:.1f} s after the link had healed")
        self.rig.wait_state(self.settled, NEVER_MIND_S)
        self.work(self.random.uniform(1, 3))
        if self.knobs.mode != "async":
            ledger = self.ledger.follow()
            too_early = [row for row, at in ledger.confirmed.items() if ledger.sent[row] > cut_at and at < healed_at]
            text = "while host-a had no link, no client was told of a transfer that it asked for then"
            self.check(text, not too_early)


APP_DRILLS: tuple[type[AppDrill], ...] = (ThreeTier, TwoWriters, TwoHosts, OneHostDies, OneLinkCut)
