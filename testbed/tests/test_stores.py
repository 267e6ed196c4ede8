"""A sharded store from end to end: two PostgreSQL servers at a primary host, their logs at the backup."""

from __future__ import annotations

import json

import pytest

from tidelock_testbed.backupserver import BackupServer
from tidelock_testbed.hostdaemon import BACKUP_PORT
from tidelock_testbed.netns import Netns
from tidelock_testbed.paths import BIN
from tidelock_testbed.pgserver import PgServer
from tidelock_testbed.process import Process, run_command, wait_until
from tidelock_testbed.shards import STORE, backup_sections, host_sections, lsn

WAIT_S = 120
SETTINGS = {"wal_level": "replica", "fsync": "off", "min_wal_size": "2MB", "autovacuum": "off", "max_wal_senders": "8"}


class Plaintext:
    """A link without TLS: both ends are in one namespace."""

    def toml(self) -> str:
        return ""


class Store:
    """A store of two shards, whose servers, host daemon and backup server are in one namespace."""

    def __init__(self, run, image):
        self.run, self.netns = run, Netns(run, "store")
        self.shards = [self.server(image, f"s{nth}", 5432 + nth) for nth in range(2)]
        more = self.backup_toml()
        sections = [*backup_sections(["host-a"]), more]
        self.backup = BackupServer(run, self.netns, run.directory, Plaintext(), sections=sections)
        self.backup.config.write_text("plaintext = true\n" + self.backup.config.read_text())
        if more:
            self.backup.confined = []
        self.backup.start()
        self.config = run.directory / "host.toml"
        self.config.write_text(self.toml())
        self.daemon: Process | None = None

    def backup_toml(self) -> str:
        """More of the store at the backup."""
        return ""

    def server(self, image, name: str, port: int) -> PgServer:
        server = PgServer(self.run, image, name, 1, self.netns, port, **SETTINGS)
        server.start()
        server.sql("CREATE TABLE entries (id bigint PRIMARY KEY, text text);")
        return server

    def toml(self) -> str:
        lines = [
            "[host]",
            'name = "host-a"',
            f'runtime_dir = "{self.run.sockets}"',
            f'state_dir = "{self.run.directory / "state"}"',
            "[backup]",
            f'address = "127.0.0.1:{BACKUP_PORT}"',
            "plaintext = true",
            *host_sections([shard.name for shard in self.shards], self.shards),
        ]
        return "\n".join(lines) + "\n"

    def start_daemon(self) -> None:
        argv = [BIN / "tidelockd", "--config", self.config]
        self.daemon = Process(self.run, "tidelockd", argv, self.netns, {"NO_COLOR": "1"})

    def needs(self) -> list[Process]:
        return [self.daemon, self.backup.process, *(shard.process for shard in self.shards)]

    def status(self) -> dict:
        """The store at the backup."""
        stores = self.backup.status()["stores"]
        return stores[0] if stores else {"shards": []}

    def wait_applied(self, nth: int, lsn: int) -> None:
        """Waits until the backup may apply a shard's log up to there."""

        def applied() -> bool:
            shards = self.status()["shards"]
            return len(shards) > nth and shards[nth]["apply_to"] >= lsn

        wait_until(f"s{nth} may be applied", applied, WAIT_S, self.needs())

    def insert(self, nth: int, number: int) -> int:
        """Writes a row; returns the end of the log then."""
        shard = self.shards[nth]
        shard.sql(f"INSERT INTO entries VALUES ({number}, repeat('x', 1000));")
        return lsn(shard.sql("SELECT pg_current_wal_flush_lsn();"))


@pytest.fixture
def store(run, image):
    return Store(run, image)


def test_what_both_shards_commit_may_be_applied_at_the_backup(store):
    store.start_daemon()
    ends = [store.insert(nth, 1) for nth in range(2)]
    for nth, end in enumerate(ends):
        store.wait_applied(nth, end - 200)
    # One shard writes, and the other lets the watermark pass by NOPs.
    for number in range(2, 12):
        end = store.insert(0, number)
    store.wait_applied(0, end - 200)
    here = json.loads(
        run_command(
            [BIN / "tidelock", "status", "--json", "--socket", store.run.sockets / "control.sock"],
            "ask the daemon",
            store.netns,
        )
    )
    assert here["stores"][0]["shards"]["s0"]["stands"] is None, here
    # A daemon that was killed goes on where the backup is.
    store.daemon.kill()
    end = store.insert(1, 100)
    store.start_daemon()
    store.wait_applied(1, end - 200)
    recovered = json.loads(store.backup.command("recover", STORE, "--primary-is-dead", "--json"))["store"]
    assert recovered["recovered"] and recovered["shards"][1]["apply_to"] >= end - 200


def test_a_server_that_is_gone_holds_the_watermark_back_by_name(store):
    store.start_daemon()
    store.wait_applied(0, store.insert(0, 1) - 200)
    store.shards[1].stop(immediate=True)
    store.insert(0, 2)

    def named() -> bool:
        status = store.status()
        return status["held_back_by"] == "s1" and bool(status["shards"][1]["stands"])

    wait_until("the backup names the shard", named, WAIT_S, [store.daemon, store.backup.process])
    store.shards[1].start()
    store.wait_applied(0, store.insert(0, 3) - 200)
