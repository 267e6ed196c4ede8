"""(r), continued: four PostgreSQL shards. Their data are in memory, as everything of the backup's is: a machine has one
disk, and a commit that waits for it behind three other servers says nothing of shipping.

The lag begins with the stamp of a commit, which PostgreSQL takes as the commit begins (`track_commit_timestamp`), so a
commit's own time is taken off.
"""

from __future__ import annotations

import contextlib
import re
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import mean

from ..hostdaemon import BACKUP_PORT
from ..image import guest_image
from ..kvstore import Watermarks
from ..paths import BIN
from ..pgserver import PgServer
from ..process import Process, wait_until
from ..progress import say
from .images import disk_directory
from .settings import Settings
from .shards_back import back_after, recover
from .shardsites import BACKUP, HOSTS, PRIMARY, RTT_MS, SETTLE_S, STORE, Sites, lags_ms, settled, sites, summary
from .spread import Spread, percentile, ratio

SHARDS = 4
CLIENTS = 2
DISK_CLIENTS = 4
WAIT_S = 120
SERVER = {
    "max_wal_senders": 8,
    "max_replication_slots": 8,
    "track_commit_timestamp": "on",
    "shared_buffers": "32MB",
    "autovacuum": "off",
}
SCRIPT = "BEGIN;\nINSERT INTO entries (n) VALUES (:client_id);\nCOMMIT;\n"
RATES_PER_S = (200, 2000)
"""Commits of each shard where the lag is measured: a machine that is full says nothing of it."""
PACED_PER_S = RATES_PER_S[0]
POLL_S = 0.5
"""Snapshots of the comparison."""


class PgShards:
    """The servers, their pgbench and the host daemon."""

    def __init__(self, of: Sites, listens: str = "127.0.0.1", wal_level: str = "replica", place: Path | None = None):
        self.of = of
        place = place or of.memory
        image = guest_image()
        settings = {**SERVER, "listen_addresses": listens, "wal_level": wal_level}
        names = [f"s{nth}" for nth in range(SHARDS)]
        self.servers = [
            PgServer(of.run, image, name, 16, of.primary, 5432 + nth, place=place, **settings)
            for nth, name in enumerate(names)
        ]
        for server in self.servers:
            server.start()
            (server.directory / "script.sql").write_text(SCRIPT)
            server.sql("CREATE TABLE entries (id bigserial PRIMARY KEY, n int);")
        self.config = of.run.directory / "host.toml"
        self.config.write_text(self._toml(names))
        self.daemon: Process | None = None
        self._lives = 0

    def _toml(self, names: list[str]) -> str:
        host = HOSTS[0]
        lines = [
            "[host]",
            f'name = "{host}"',
            f'runtime_dir = "{self.of.run.sockets / "host"}"',
            f'state_dir = "{self.of.run.directory / "state"}"',
            "[backup]",
            f'address = "{BACKUP}:{BACKUP_PORT}"',
            'server_name = "backup-a"',
            self.of.tls[host].toml(),
            "[clock]",
            'source = "assumed"',
            'assume_error = "100us"',
            "[[store]]",
            f'name = "{STORE}"',
            "shards = [" + ", ".join(f'"{name}"' for name in names) + "]",
        ]
        for server in self.servers:
            lines += ["[[store.shard]]", f'name = "{server.name}"', f'servers = ["127.0.0.1:{server.port}"]']
            lines += ['user = "postgres"']
        return "\n".join(lines) + "\n"

    def ship(self) -> None:
        """Starts the daemon, and waits until the backup is behind no shard."""
        self._lives += 1
        argv = [BIN / "tidelockd", "--config", self.config]
        self.daemon = Process(self.of.run, f"tidelockd-{self._lives}", argv, self.of.primary, {"NO_COLOR": "1"})
        self.wait_shipped()

    def wait_shipped(self) -> None:
        """Waits until the backup has the logs up to what they are now."""
        ends = [_lsn(server.sql("SELECT pg_current_wal_flush_lsn();")) for server in self.servers]

        def shipped() -> bool:
            shards = self.status()["shards"]
            # What follows the last commit of all may wait for the next one.
            return len(shards) == SHARDS and all(
                shard["durable"] >= end - 512 for shard, end in zip(shards, ends, strict=True)
            )

        wait_until("the backup has the logs", shipped, WAIT_S, [self.daemon, self.of.server.process], every_s=0.1)

    def status(self) -> dict:
        """The store at the backup."""
        stores = self.of.server.status()["stores"]
        return stores[0] if stores else {"shards": []}

    def watch(self) -> Watermarks:
        """Hears watermarks at the backup."""
        return self.of.watch(SHARDS, ",".join(server.name for server in self.servers))

    def bench(self, seconds: float, rate: int = 0, clients: int = CLIENTS) -> list[Process]:
        """pgbench on each of them."""
        paced = ["-R", rate] if rate else []
        words = ["-n", "-M", "prepared", "-r", "-f", "/data/script.sql", "-c", clients, "-j", 1, "-T", seconds, *paced]
        place = ["-h", "127.0.0.1", "postgres"]
        made = []
        for server in self.servers:
            self._lives += 1
            argv = server.inside("pgbench", *words, *place)
            made.append(Process(self.of.run, f"pgbench-{server.name}-{self._lives}", argv))
        return made


def _lsn(text: str) -> int:
    upper, lower = text.strip().split("/")
    return int(upper, 16) << 32 | int(lower, 16)


def finish(runs: list[Process], seconds: float) -> tuple[float, float]:
    """Transactions per second of all, and the mean time of a COMMIT in milliseconds."""
    tps, commits = 0.0, []
    for run in runs:
        if run.wait(seconds + WAIT_S) != 0:
            raise RuntimeError(f"pgbench failed\n{run.tail()}")
        text = run.log.read_text()
        tps += float(re.search(r"^tps = ([\d.]+)", text, re.M)[1])
        # Newer versions print the number of failures between.
        commits.append(float(re.search(r"^\s*([\d.]+)\s+(?:\d+\s+)?COMMIT;", text, re.M)[1]))
    return tps, mean(commits)


def stamps(server: PgServer, since_ns: int) -> list[tuple[int, int]]:
    """The commits of the table since then: in nanoseconds, and as stamps."""
    text = server.sql(
        "SELECT (extract(epoch FROM at) * 1000000)::bigint FROM"
        f" (SELECT pg_xact_commit_timestamp(xmin) AS at FROM entries) AS of WHERE at > to_timestamp({since_ns / 1e9})"
        " ORDER BY 1;"
    )
    found = []
    for line in text.split():
        us = int(line)
        found.append((us * 1000, us // 1000 << 16 | (us % 1000 * 1000 << 16) // 1_000_000))
    return found


@contextlib.contextmanager
def pg_sites(name: str, listens: str = "127.0.0.1", wal_level: str = "replica") -> Iterator[PgShards]:
    """Sites with the shards."""
    with sites(name) as of:
        yield PgShards(of, listens, wal_level)


def measure_lag(settings: Settings) -> dict:
    """Lag of commits at a moderate rate, then commits with and without shipping in turns."""
    with pg_sites("bench-shards-pg") as pg:
        pg.ship()
        watch, rtt_ms = pg.watch(), pg.of.rtt_ms()
        rates = [_lag(pg, watch, settings, rate, rtt_ms) for rate in RATES_PER_S]
        in_memory = _commits(pg, settings, CLIENTS)
        kills = [_daemon_killed(pg, watch) for _ in range(settings.shard_rounds)]
    with sites("bench-shards-disk") as of:
        pg = PgShards(of, place=disk_directory(of.run))
        pg.ship()
        commits = _commits(pg, settings, DISK_CLIENTS)
    return {
        "shards": SHARDS,
        "rtt_ms": round(rtt_ms, 3),
        "rates": rates,
        "commits": commits,
        "commits_in_memory": in_memory,
        "daemon_killed": {"turns": kills, "back_s": Spread.of([kill["back_s"] for kill in kills]).json()},
    }


def _lag(pg: PgShards, watch: Watermarks, settings: Settings, rate: int, rtt_ms: float) -> dict:
    """At one rate."""
    turns = []
    for _ in range(settings.shard_rounds):
        since_ns, seconds = time.time_ns(), settings.shard_load_s + SETTLE_S + 1
        _, commit_ms = finish(pg.bench(int(seconds) + 1, rate), seconds)
        time.sleep(0.3)
        entries = sorted(entry for server in pg.servers for entry in stamps(server, since_ns))
        lags = [lag - commit_ms for lag in lags_ms(settled(entries), watch.read())]
        turns.append({"commit_ms": round(commit_ms, 3), **summary(lags, rtt_ms)})
    mean_ms = Spread.of([turn["mean_ms"] for turn in turns])
    say(f"(r) PostgreSQL, {rate}/s each: {mean_ms.median:.2f} ms over half of {rtt_ms:.1f} ms and a commit")
    return {"per_s": rate, "turns": turns, "mean_ms": mean_ms.json()}


def _commits(pg: PgShards, settings: Settings, clients: int) -> dict:
    """Turns without and with the daemon, beside each other."""
    tps: dict[str, list[float]] = {"without": [], "with": []}
    seconds = int(settings.shard_load_s) + 1
    for _ in range(settings.shard_rounds + 1):
        for how, found in tps.items():
            if how == "without":
                pg.daemon.stop()
            else:
                pg.ship()
            found.append(finish(pg.bench(seconds, clients=clients), seconds)[0])
            if how == "with":
                pg.wait_shipped()
    for found in tps.values():
        del found[0]  # files and caches grow in the first turn
    of = ratio(tps["with"], tps["without"])
    say(f"(r) commits with shipping of those without: {of.median:.3f}")
    return {
        "clients": clients * SHARDS,
        **{how: Spread.of(found).json() for how, found in tps.items()},
        "ratio": of.json(),
    }


def _daemon_killed(pg: PgShards, watch: Watermarks) -> dict:
    """The daemon is killed while commits go on, and started again at once."""
    seconds = 10
    runs = pg.bench(seconds, PACED_PER_S)
    time.sleep(2)
    killed_ns = time.time_ns()
    pg.daemon.kill()
    detected_ns = time.time_ns()
    pg.ship()
    finish(runs, seconds)
    found = back_after(watch.read(), killed_ns, detected_ns)
    say(f"(r) tidelockd killed: back after {found['back_s']:.2f} s")
    return found


def measure_recovery(settings: Settings) -> dict:
    """A disaster with standbys that follow: from the order to the final watermark, and to servers that take writes."""
    found: dict[str, list[float]] = {"answered_ms": [], "ready_ms": [], "promoted_ms": []}
    for _ in range(settings.shard_rounds):
        with sites("bench-shards-promote", with_standbys=True) as of:
            pg = PgShards(of)
            pg.ship()

            def follow(pg: PgShards = pg) -> bool:
                shards = pg.status()["shards"]
                return all((shard.get("standby") or {}).get("state") == "following" for shard in shards)

            runs = pg.bench(3, PACED_PER_S)
            wait_until("standbys follow", follow, WAIT_S, [of.server.process], every_s=0.2)
            finish(runs, 3)
            runs = pg.bench(20, PACED_PER_S)
            time.sleep(2)
            took_ms, answer = recover(of)
            for run in runs:
                run.kill()
            shards = answer["store"]["shards"] if "store" in answer else []
            promoted = [((shard.get("standby") or {}).get("promoted") or {}) for shard in shards]
            if len(promoted) != SHARDS or not all(promoted):
                raise RuntimeError(f"not all standbys were promoted: {answer}")
            found["answered_ms"].append(took_ms)
            found["ready_ms"].append(max(one["ready_ms"] for one in promoted))
            found["promoted_ms"].append(max(one["promoted_ms"] for one in promoted))
            say(f"(r) four servers take writes {took_ms:.0f} ms after the order")
    return {"shards": SHARDS, **{what: Spread.of(times).json() for what, times in found.items()}}


class Fetcher:
    """A client at the backup site that takes all changes of one server, over a connection that stays."""

    def __init__(self, pg: PgShards, server: PgServer):
        with (server.data / "pg_hba.conf").open("a") as rules:
            rules.write(f"host all all {BACKUP}/32 trust\n")
        server.sql("SELECT pg_reload_conf(), pg_create_logical_replication_slot('snapshots', 'test_decoding');")
        psql = server.inside("psql", "-h", PRIMARY, "-U", "postgres", "-qAtX", "postgres")
        # The same program, in the other namespace.
        argv = [str(word) for word in psql]
        argv[1] = f"--net={pg.of.backup.path}"
        self._client = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        pg.of.run.on_close("end a client", self._client.kill)

    def ask(self) -> None:
        """Asks for the changes."""
        self._client.stdin.write(
            "SELECT data FROM pg_logical_slot_get_changes('snapshots', NULL, NULL);\n\\echo done\n"
        )
        self._client.stdin.flush()

    def wait(self) -> None:
        """Until they are here."""
        while (line := self._client.stdout.readline()) != "done\n":
            if not line:
                raise RuntimeError("the client has ended")


def measure_snapshots(settings: Settings) -> dict:
    """The same load; every half second a client of each server fetches what a logical slot has, over the same link."""
    with pg_sites("bench-shards-logical", listens=f"127.0.0.1,{PRIMARY}", wal_level="logical") as pg:
        fetchers = [Fetcher(pg, server) for server in pg.servers]
        since_ns, seconds = time.time_ns(), int(settings.shard_load_s) + 3
        runs = pg.bench(seconds, PACED_PER_S)
        fetched: list[tuple[int, int]] = []
        ending = time.monotonic() + seconds
        while (began := time.monotonic()) < ending:
            asked_ns = time.time_ns()
            for fetcher in fetchers:
                fetcher.ask()
            for fetcher in fetchers:
                fetcher.wait()
            # What was committed before the first was asked is here now, of all shards.
            fetched.append((time.time_ns(), _stamp(asked_ns)))
            time.sleep(max(0.0, POLL_S - (time.monotonic() - began)))
        _, commit_ms = finish(runs, seconds)
        entries = sorted(entry for server in pg.servers for entry in stamps(server, since_ns))
        lags = [lag - commit_ms for lag in lags_ms(settled(entries), fetched)]
    of = {"every_s": POLL_S, "mean_ms": round(mean(lags), 1), "p50_ms": round(percentile(lags, 50), 1)}
    say(f"(r) snapshots every {POLL_S} s: {of['mean_ms']:.0f} ms behind a commit, half of {RTT_MS} ms included")
    return of


def _stamp(ns: int) -> int:
    ms, rest = divmod(ns, 1_000_000)
    return ms << 16 | (rest << 16) // 1_000_000
