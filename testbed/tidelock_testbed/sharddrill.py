"""The drill of a sharded store: causal chains over four PostgreSQL servers on two hosts, a part that is killed under
load, a disaster, a recovery at one cut, and what is there of each chain then.

The disaster is, by the seed, `sudden`, or the link of one host is `cut` or `slow` first: then the backup has less of
the shards of that host than of the others'. With WATERMARK=off, where the backup applies each shard by itself, the
drill must find chains that are broken, and the link of one host always goes first.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import time
from dataclasses import asdict
from datetime import UTC, datetime

from .chainclients import INSERT, TABLE
from .chains import ChainsVerdict, examine, followed
from .drilling import CONFIRMED_MIN, NEVER_MIND_S, Drill, ProvesNothing
from .image import guest_image
from .ledger import Ledger, Row
from .paths import ROOT
from .process import Process, wait_until
from .progress import say
from .shards import HOSTS, STORE, ShardRig, StoreWatch, connect, kill_server, lsn_text, unix_s
from .svg import Marker, Series, line_chart
from .views import answers_chart

PARTS = ("tidelockd", "backup server", "primary", "standby")
"""Parts that are killed under load, one of them in each run."""
DISASTERS = ("sudden", "cut", "slow")
SHOWN = 10
BROKEN_MIN = 20
"""Chains that a disaster without a watermark must break at least, so that no chance decides."""
SLOW_MS = (30.0, 300.0)
"""Delay that is added to a slow link."""
VERY_SLOW_MS = 5000.0
"""Delay with which the backup hears of nothing more before the disaster."""
CLIENTS_ALONE, CLIENTS_HANDING, HANDED = 6, 4, 3
OTHER_CHAIN = 0
"""Chain of the rows that are written after the recovery."""


class ShardDrill(Drill):
    """The primary site of a sharded store, both hosts of it, is gone from one moment to the next."""

    name = "shards"
    about = (
        "four PostgreSQL shards on two hosts, clients with causal chains across them; a part is killed under load and "
        "comes back; then both hosts are gone, and the shards are recovered at one cut"
    )
    guests = ("process",)
    modes = ("async",)
    default_rtt_ms = 25
    has_watermark = True
    load_s = {"process": (2.0, 5.0)}
    copy_rate = {"process": ""}

    def __init__(self, run, knobs):
        super().__init__(run, knobs)
        self.entry.promise = (
            "what is there of all shards is a prefix of what clients knew, at one cut; what clients lost is counted"
        )
        drawn = random.Random(f"disaster {knobs.seed}")
        self.entry.disaster = drawn.choice(DISASTERS if knobs.watermark else DISASTERS[1:])
        self.host_first = drawn.randrange(len(HOSTS))
        """The host whose link goes first."""
        self.part = drawn.choice(PARTS)
        self.settled_before = 0.0
        """Rows that were confirmed before this time were seen to be applied at the backup."""
        self.found: ChainsVerdict | None = None
        self.figures: dict = {"watermark": "on" if knobs.watermark else "off"}
        self.entry.store = self.figures
        if not knobs.watermark:
            self.entry.notes.append(
                "each shard was applied by itself, without a watermark: chains must be seen to break"
            )

    def make_rig(self, protection) -> ShardRig:
        """Two sites, with the store's servers."""
        del protection
        knobs = self.knobs
        return ShardRig(self.run, guest_image(), knobs.rtt_ms, knobs.seed, knobs.watermark)

    # -- before the disaster ---------------------------------------------------------------------------------------

    def protect(self) -> None:
        """Both sites up, and at the backup a standby of each shard that follows."""
        rig = self.rig
        rig.start_servers(TABLE)
        say(f"primary: {len(rig.servers)} PostgreSQL servers run on {len(HOSTS)} hosts")
        rig.backup.start()
        say("backup: tidelock-backup runs")
        began = time.monotonic()
        for daemon in rig.daemons:
            daemon.start()
            say(f"{daemon.host}: tidelockd runs")
        self.store_watch = StoreWatch(rig.backup)
        self.run.on_close("stop the store's watch", self.store_watch.stop)
        rig.wait_standbys()
        self.entry.copy_s = round(time.monotonic() - began, 2)
        say(f"backup: each shard was copied and has a standby that follows, {self.entry.copy_s:.1f} s later")

    def start_clients(self) -> None:
        """Starts the clients and waits for their first rows."""
        rig = self.rig
        self.ledger = Ledger(self.run.directory / "clients.ledger")
        targets = [rig.address(shard) for shard in range(len(rig.servers))]
        counts = ("--alone", CLIENTS_ALONE, "--handing", CLIENTS_HANDING, "--handed", HANDED)
        program = [sys.executable, "-m", "tidelock_testbed.chainclients"]
        argv = [*program, self.ledger.path, self.knobs.seed, *targets, *counts]
        self.clients_process = Process(
            self.run, "clients", argv, rig.net.clients, env={"PYTHONPATH": str(ROOT / "testbed")}
        )
        self.wait_for_answers(0, CONFIRMED_MIN)
        self.load_from = time.monotonic()
        say(
            f"clients: {CLIENTS_ALONE} write a chain of rows each, "
            f"{CLIENTS_HANDING} hand {HANDED} chains to one another; each row is on another shard than the last"
        )

    def wait_for_answers(self, since: float, count: int) -> None:
        """Waits until so many rows were asked for since then and answered."""
        what = f"{count} rows are confirmed"
        wait_until(what, lambda: self.answered(self.ledger, since) >= count, NEVER_MIND_S, [self.clients_process])

    def load_processes(self) -> list[Process]:
        """Processes that must not end under load."""
        return [self.clients_process, *self.rig.processes()]

    def primary_says(self) -> str:
        """Age of the watermark."""
        ages = self.store_watch.ages_ms(time.monotonic() - 1, time.monotonic())
        return f"; the watermark is {statistics.median(ages):.0f} ms behind" if ages else ""

    def trouble(self) -> None:
        """A random part is killed and comes back, and so does the lag."""
        # The watermark of a quiet store is old: it counts from the first round trip of the load on.
        begin = self.load_from + 2 * self.knobs.rtt_ms / 1e3
        self.figures["lag_ms"] = lag(self.store_watch.ages_ms(begin, self.load_to))
        shard = self.random.randrange(len(self.rig.servers))
        name, kill, start = self.choose_part(shard)
        self.figures["killed"] = name
        kill()
        self.event(f"{name} killed")
        say(f"TROUBLE: {name} is killed under load")
        self.wait_a_while()
        start()
        began = self.event(f"{name} is back")
        self.lag_comes_back(name, began)
        self.rig.note_standby(shard)
        self.work(self.random.uniform(1, 3))
        self.load_to = time.monotonic()

    def choose_part(self, shard: int):
        """The part's name, and how it is killed and started again."""
        rig = self.rig
        daemon, server = rig.daemons[rig.host_of(shard)], rig.servers[shard]
        return {
            "tidelockd": (f"tidelockd of {daemon.host}", daemon.process.kill, daemon.start),
            "backup server": ("the backup server", rig.backup.process.kill, rig.backup.start),
            "primary": (f"the primary of {server.name}", server.kill, server.start),
            # The backup server starts it again by itself.
            "standby": (
                f"the standby of {server.name}",
                lambda: kill_server(rig.data_of_standby(shard)),
                lambda: None,
            ),
        }[self.part]

    def wait_a_while(self) -> None:
        """Lets clients go on without the part."""
        time.sleep(self.random.uniform(0.3, 1.5))

    def lag_comes_back(self, name: str, since: float) -> None:
        """Waits until the backup has applied what all shards had written after that."""
        self.wait_for_answers(since, CONFIRMED_MIN)
        settled_at = time.monotonic()
        self.rig.wait_applied(self.rig.ends())
        self.settled_before = settled_at
        back_s = time.monotonic() - since
        self.figures["back_s"] = round(back_s, 2)
        say(f"{name} is back; {back_s:.1f} s later the backup had applied what was written since")

    # -- the disaster and after it ---------------------------------------------------------------------------------

    def disaster(self) -> None:
        """Both hosts are gone; before that, by the seed, the link of one."""
        kind, host = self.entry.disaster, self.host_first
        if kind != "sudden":
            self.link_goes_first(kind, host)
        cut_first = self.links_go_first()
        self.clocks_differ_s = time.time() - time.monotonic()
        self.disaster_at, self.gone_at = self.rig.destroy_primary(cut_first)
        self.event("disaster", self.disaster_at)
        order = "links, then servers and daemons" if cut_first else "servers and daemons, then links"
        say(f"DISASTER: both hosts are gone ({order}, within {(self.gone_at - self.disaster_at) * 1e3:.0f} ms)")

    def link_goes_first(self, kind: str, host: int) -> None:
        """The backup hears of one host's shards less than of the others', or nothing, for some 100 ms.

        Without a watermark it goes on until what the backup has of the other host's shards must break chains.
        """
        wan = self.rig.net.wans[host]
        if kind == "cut":
            wan.cut()
        else:
            more_ms = self.random.uniform(*SLOW_MS) if self.knobs.watermark else VERY_SLOW_MS
            wan.set(delay_ms=wan.params.delay_ms + more_ms)
        gone_at = self.event(f"link of {HOSTS[host]} {kind}")
        say(f"the link of {HOSTS[host]} is {kind} from now on")
        time.sleep(self.random.uniform(0.06, 0.2))
        if not self.knobs.watermark:
            of_host = set(self.rig.shards_of(host))
            arrives_s = 0.2 + 2 * self.knobs.rtt_ms / 1e3

            def must_break() -> bool:
                until = time.monotonic() - arrives_s
                return followed(self.ledger.follow(), of_host, gone_at, until) >= BROKEN_MIN

            wait_until("rows follow others that the backup lacks", must_break, NEVER_MIND_S, [self.clients_process])
        self.entry.notes.append(
            f"the link of {HOSTS[host]} was {kind} for {(time.monotonic() - gone_at) * 1e3:.0f} ms before the disaster"
        )

    def recover(self, *options: str) -> None:
        """`tidelock-backup recover` of the store."""
        del options
        began = time.monotonic()
        text = self.rig.backup.command("recover", STORE, "--primary-is-dead", "--json")
        self.recovered_at = self.event("recovered")
        self.recovered = json.loads(text)["store"]
        self.store_watch.stop()
        self.clients_process.kill()
        self.figures["recover_ms"] = round((self.recovered_at - began) * 1e3, 1)
        # To recover is a human's or a monitor's decision; the drill has taken it beforehand.
        self.entry.rto_ms = {"total": self.figures["recover_ms"]}
        cut_unix_s = unix_s(self.recovered["recovered"])
        self.cut_at = cut_unix_s - self.clocks_differ_s
        self.figures["cut"] = datetime.fromtimestamp(cut_unix_s, UTC).isoformat(timespec="microseconds")
        self.figures["cut_before_disaster_ms"] = round((self.disaster_at - self.cut_at) * 1e3, 1)
        say(
            f"backup: recovered at {self.figures['cut']}, {self.figures['cut_before_disaster_ms']:.1f} ms before the "
            f"disaster; recover took {self.figures['recover_ms']:.0f} ms, until all shards were promoted"
        )

    def serve_again(self) -> None:
        """Reads what each promoted server has, and writes to it."""
        self.rows: dict[str, list[Row]] = {}
        writes = 0
        for shard in self.recovered["shards"]:
            standby = shard["standby"]
            with connect(standby) as connection:
                found = connection.execute("SELECT chain, n FROM rows").fetchall()
                writes += connection.execute(INSERT, (OTHER_CHAIN, 1, 0)).rowcount
            self.rows[shard["name"]] = found
            promoted = standby["promoted"] or {}
            self.figures.setdefault("shards", {})[shard["name"]] = {
                "apply_to": lsn_text(shard["apply_to"]),
                "durable": lsn_text(shard["durable"]),
                # Commits that the backup had, and that are behind the cut.
                "left_out": len(shard.get("left_out") or []),
                "ready_ms": promoted.get("ready_ms"),
                "promoted_ms": promoted.get("promoted_ms"),
            }
        self.check("each promoted shard takes writes", writes == len(self.rig.servers))

    # -- the judgement ---------------------------------------------------------------------------------------------

    def judge(self) -> None:
        """Compares the ledger with what the promoted servers have."""
        ledger = self.ledger.follow().sent_before(self.gone_at)
        found = self.found = examine(ledger, self.rows, self.disaster_at)
        entry, rows = self.entry, found.rows
        entry.confirmed, entry.recovered = rows.confirmed, rows.recovered
        entry.lost, entry.foreign = len(rows.lost), len(found.strange)
        entry.recovered_unconfirmed = rows.recovered_unconfirmed
        entry.out_of_order, entry.rpo_ms = len(rows.out_of_order), round(rows.rpo_ms, 1)
        entry.dangling = len(found.broken)
        entry.dangling_rows = [f"row {n} of chain {chain} without row {n - 1}" for chain, n in found.broken[:SHOWN]]
        for name, verdict in found.shards.items():
            self.figures["shards"][name] |= asdict(verdict)
        self.figures["chains"] = found.chains
        self.measure(ledger)
        if entry.confirmed < CONFIRMED_MIN:
            raise ProvesNothing(f"only {entry.confirmed} rows were confirmed before the disaster: this proves nothing")
        self.check("of each chain what is there is a prefix: no row without the one before", not found.broken)
        text = (
            "no row is missing that was confirmed before one was asked for that is there, over all shards and clients"
        )
        self.check(text, not rows.out_of_order)
        self.check("no row is there that nobody asked for, and each is on its shard", not found.strange)
        early = [row for row in rows.lost if ledger.confirmed[row] < self.settled_before]
        self.check("every row is there that was confirmed before the lag was seen to be back", not early)
        if self.knobs.watermark:
            early = [row for row in rows.lost if ledger.confirmed[row] < self.cut_at]
            self.check("every row is there that was confirmed before the time of the cut", not early)
        self.conclude()

    def conclude(self) -> None:
        """Without a watermark, only a broken chain shows what it is for."""
        super().conclude()
        if not self.knobs.watermark:
            self.entry.violated = self.entry.dangling > 0

    def measure(self, ledger: Ledger) -> None:
        """Figures of the time under load."""
        entry = self.entry
        confirmed = ledger.confirmed_between(self.load_from, self.load_to)
        entry.commits_per_s = round(confirmed / (self.load_to - self.load_from), 1)
        times = ledger.reply_times_ms(self.load_from, self.load_to)
        if len(times) > 1:
            centiles = statistics.quantiles(times, n=100)
            entry.reply_ms = {
                "least": round(times[0], 1),
                "median": round(centiles[49], 1),
                "p99": round(centiles[98], 1),
            }
        self.charts = [
            answers_chart("Rows confirmed to clients, each second", ledger, self.disaster_at, self.events),
            self.lag_chart(),
        ]

    def lag_chart(self) -> str:
        """Age of the watermark over the run."""
        points = [(at - self.disaster_at, age_s * 1e3) for at, age_s, _ in self.store_watch.samples]
        points = [(x, y) for x, y in points if self.load_from - self.disaster_at <= x <= 0]
        markers = [Marker(at - self.disaster_at, name) for at, name in self.events]
        title = "Age of the watermark at the backup"
        return line_chart(title, "seconds after the disaster", "ms", [Series("age", points, step=True)], markers)


def lag(ages_ms: list[float]) -> dict[str, float]:
    """Figures of the age of the watermark."""
    if len(ages_ms) < 2:
        return {}
    centiles = statistics.quantiles(ages_ms, n=100)
    figures = {"least": ages_ms[0], "median": centiles[49], "p99": centiles[98], "most": ages_ms[-1]}
    return {name: round(value, 1) for name, value in figures.items()}
