"""A store with a log of its own and the library: its shards at a backup server, and what is there after a disaster."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tidelock_testbed.backupserver import BackupServer
from tidelock_testbed.hostdaemon import BACKUP_PORT
from tidelock_testbed.kvstore import Far, KvStore
from tidelock_testbed.netns import Netns, add_addresses
from tidelock_testbed.paths import BIN
from tidelock_testbed.pki import Pki
from tidelock_testbed.process import run_command, wait_until
from tidelock_testbed.wan import Wan, WanParams

WAIT_S = 120
SHARDS = 4
HOSTS = ("host-a", "host-b")
BACKUP = "10.77.3.2"


class Store:
    """Two hosts that lead two shards each, and a backup server behind a WAN."""

    def __init__(self, run):
        for name in ("kv", "watermarks"):
            program = BIN / "examples" / name
            assert program.exists(), f"{program} is missing: cargo build --release -p tidelock-shard-library --examples"
        self.run = run
        primary, backup = Netns(run, "primary"), Netns(run, "backup")
        self.wan = Wan(run, primary, backup, WanParams(delay_ms=5))
        add_addresses(primary, "wan", "10.77.3.1/24")
        add_addresses(backup, "wan", f"{BACKUP}/24")
        pki = Pki(run.directory / "pki")
        self.backup = BackupServer(run, backup, run.directory, pki.issue("backup", "backup-a", run.directory / "tls-b"))
        hosts = json.dumps(list(HOSTS))
        text = self.backup.config.read_text() + f'[[store]]\nname = "orders"\nhosts = {hosts}\n'
        self.backup.config.write_text(text)
        self.backup.start()
        far = Far(f"{BACKUP}:{BACKUP_PORT}", "orders", SHARDS)
        self.hosts = []
        for nth, name in enumerate(HOSTS):
            tls, led = pki.issue("host", name, run.directory / f"tls-{name}"), range(2 * nth, 2 * nth + 2)
            self.hosts.append(KvStore(run, primary, name, run.directory / name, far, led, tls))

    def put(self, shard: int, key: object, value: object) -> bool:
        """True if the client was told that it is there."""
        answer = self.hosts[shard // 2].ask("put", shard, key, value)
        return "put" in answer

    def recover(self) -> dict:
        told = self.backup.command("recover", "orders", "--primary-is-dead", "--json")
        return json.loads(told)["store"]

    def applied(self) -> list[dict[str, str]]:
        """What each shard has, up to where the backup applies it; the server is stopped for it."""
        shards = self.backup.status()["stores"][0]["shards"]
        self.backup.process.stop()
        return [entries(self.backup.data / "stores" / "orders", nth, of["apply_to"]) for nth, of in enumerate(shards)]


def entries(directory: Path, shard: int, up_to: int) -> dict[str, str]:
    """Keys and values of a shard's log at the backup."""
    words = ["--store", directory, shard, up_to]
    text = run_command([BIN / "tidelock-records", *words], "read a shard's log")
    found = {}
    for line in text.splitlines():
        data = bytes.fromhex(line.split()[2])
        # The store's own format: stamp, kind, length of the key, key, value.
        if data[8] == 0:
            end = 11 + int.from_bytes(data[9:11], "little")
            found[data[11:end].decode()] = data[end:].decode()
    return found


@pytest.fixture
def store(run):
    return Store(run)


def test_a_recovery_has_a_prefix_of_what_clients_were_told(store):
    # One client: each write was answered before the next was asked for, on whatever shard.
    written = 0
    while store.hosts[0].ask("status")["watermark"] == 0 or written < 40:
        assert store.put(written * 7 % SHARDS, written, written)
        written += 1
    # One host's shards are not shipped any more, and the others' are: what the backup has of those is beyond the cut.
    store.hosts[1].process.kill()
    for number in range(written, written + 20):
        assert store.put(number % 2, number, number)

    def arrived() -> bool:
        shards = store.backup.status()["stores"][0]["shards"]
        return all(shard["durable"] > shard["apply_to"] for shard in shards[:2])

    wait_until("the backup has entries beyond the cut", arrived, WAIT_S, [store.backup.process])
    report = store.recover()
    assert report["recovered"]
    applied = store.applied()
    numbers = sorted(int(key) for shard in applied for key in shard)
    assert numbers == list(range(len(numbers))), "a write is there without one that was answered before it"
    assert 0 < len(numbers) < written + 20
    assert all(shard[key] == key for shard in applied for key in shard)


def test_updates_are_refused_while_the_clock_is_not_believed(store):
    host = store.hosts[0]
    assert store.put(0, "a", 1)
    host.ask("clock", "bad")
    refused = host.ask("put", 0, "a", 2)
    assert "not believed" in refused["error"]
    # Nothing that was refused is in the log, and a read does not return what may be later than it.
    assert "not believed" in host.ask("get", 0, "a")["error"]
    host.ask("clock", "good")
    assert host.ask("get", 0, "a") == {"value": "1"}
    assert store.put(0, "a", 3)
    assert host.ask("get", 0, "a") == {"value": "3"}
    for each in store.hosts:
        each.wait_shipped()


def test_a_log_is_kept_until_the_backup_has_it_whoever_leads_next(store):
    host = store.hosts[0]
    assert store.put(0, "a", 1)
    host.wait_shipped()
    shipped = host.ask("compact", 0)
    assert shipped["head"] > 0
    store.wan.cut()
    for number in range(5):
        assert store.put(0, "b", number)
    kept = host.ask("compact", 0)
    assert (kept["head"], kept["end"]) == (shipped["end"], shipped["end"] + 5), (
        "nothing that the backup lacks is trimmed"
    )
    # The next leader has the same log, and goes on where the backup is.
    host.process.kill()
    host.start()
    # It does not know yet what the backup has.
    assert host.ask("compact", 0) == kept
    assert store.put(0, "c", 9)
    store.wan.mend()
    host.wait_shipped()
    for each in store.hosts:
        each.process.stop()
    store.recover()
    status = store.backup.status()["stores"][0]["shards"][0]
    store.backup.process.stop()
    found = entries(store.backup.data / "stores" / "orders", 0, status["durable"])
    assert found == {"a": "1", "b": "4", "c": "9"}
