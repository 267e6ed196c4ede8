"""Standbys of a store's shards, run by the backup server: copied through the link, following, and promoted."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import time
from datetime import UTC, datetime
from pathlib import Path

import pytest
from test_standbys import BIN_DIR, USER, standbys_place
from test_stores import WAIT_S, Store

from tidelock_testbed.process import wait_until


class StoreWithStandbys(Store):
    """The store of `test_stores`, and this machine's PostgreSQL behind its backup server."""

    def __init__(self, run, image):
        self.run = run
        self.make_place()
        super().__init__(run, image)

    def make_place(self) -> None:
        """Makes the directory of the standbys, which an unprivileged user reaches."""
        self.place = standbys_place(self.run)
        self.run.on_close("end the standbys", self.end_standbys)

    def backup_toml(self) -> str:
        return f'[store.standbys]\ndir = "{self.place}"\nprimary_user = "postgres"\nkeep_copies = 1\n'

    def postmaster(self, name: str) -> int | None:
        try:
            return int((self.place / name / "standby/own/data/postmaster.pid").read_text().split()[0])
        except (OSError, IndexError, ValueError):
            return None

    def end_standbys(self) -> None:
        """They outlive the backup server, and must not outlive the run."""
        for pid_file in self.place.glob("*/*/own/data/postmaster.pid"):
            with contextlib.suppress(OSError, ValueError, IndexError):
                pid = int(pid_file.read_text().split()[0])
                if str(pid_file.parent) in Path(f"/proc/{pid}/cmdline").read_text():
                    os.kill(pid, signal.SIGQUIT)
                    wait_until("a standby ends", lambda pid=pid: not runs(pid), WAIT_S)

    def standby(self, nth: int) -> dict:
        shards = self.status()["shards"]
        return shards[nth].get("standby") or {} if len(shards) > nth else {}

    def sql_at(self, nth: int, text: str) -> str:
        of = self.standby(nth)
        words = ["-h", of["socket_dir"], "-p", of["port"], "-U", "postgres", "-qAtX", "-c", text, "postgres"]
        done = subprocess.run([str(w) for w in (BIN_DIR / "psql", *words)], capture_output=True, text=True)
        return done.stdout if done.returncode == 0 else ""

    def rows(self, nth: int) -> set[int]:
        return {int(row) for row in self.sql_at(nth, "SELECT id FROM entries;").split()}

    def wait_rows(self, nth: int, rows: set[int]) -> None:
        def there() -> bool:
            of = self.standby(nth)
            return of.get("state") in ("following", "promoted") and self.rows(nth) == rows

        wait_until(f"the standby of s{nth} has {rows}", there, WAIT_S, [self.backup.process])


def runs(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def lsn(at: int) -> str:
    return f"{at >> 32:X}/{at & 0xFFFFFFFF:X}"


def recovered(store: StoreWithStandbys, *words: str) -> dict:
    return json.loads(store.backup.command("recover", "orders", "--primary-is-dead", "--json", *words))["store"]


@pytest.fixture
def store(run, image):
    return StoreWithStandbys(run, image)


def test_standbys_are_made_follow_and_are_promoted_at_one_cut(store):
    store.start_daemon()
    for nth in range(2):
        store.insert(nth, 1)
    for nth in range(2):
        store.wait_rows(nth, {1})
    assert store.sql_at(0, "INSERT INTO entries VALUES (99, '');") == "" and store.rows(0) == {1}, "read-only"
    assert Path(f"/proc/{store.postmaster('s0')}").owner() == USER
    wait_until("a copy is kept", lambda: len(store.standby(0)["kept"]) == 1, WAIT_S, [store.backup.process])

    # The standby is killed, and the backup server: both come back, and the copy is not made again.
    made = (store.place / "s0/standby/own/data/PG_VERSION").stat().st_ino
    os.kill(store.postmaster("s0"), signal.SIGKILL)
    store.insert(0, 2)
    store.wait_rows(0, {1, 2})
    store.backup.process.kill()
    store.insert(1, 2)
    store.backup.start()
    store.wait_rows(1, {1, 2})
    assert (store.place / "s0/standby/own/data/PG_VERSION").stat().st_ino == made

    # The standby is deleted.
    pid = store.postmaster("s1")
    os.kill(pid, signal.SIGKILL)
    wait_until("it has ended", lambda: not runs(pid), WAIT_S)
    shutil.rmtree(store.place / "s1/standby/own")
    store.insert(1, 3)
    store.wait_rows(1, {1, 2, 3})

    # The second shard's server is gone: what the first one commits from here on is beyond the cut.
    store.shards[1].stop(immediate=True)
    wait_until("it is missed", lambda: bool(store.status()["shards"][1]["stands"]), WAIT_S, [store.backup.process])
    end = [store.insert(0, number) for number in (3, 4)][-1]
    wait_until("it is at the backup", lambda: store.status()["shards"][0]["durable"] >= end, WAIT_S, store.needs()[:2])
    report = recovered(store)
    first, second = report["shards"]
    assert len(first["left_out"]) == 2 and first["left_out"][-1]["at"] <= end, report
    assert not second.get("left_out")
    for shard in report["shards"]:
        promoted = shard["standby"]["promoted"]
        assert (promoted["at"], promoted["timeline"]) == (shard["apply_to"], 2), report
    assert store.rows(0) == {1, 2} and store.rows(1) == {1, 2, 3}
    for nth in range(2):
        store.sql_at(nth, "INSERT INTO entries VALUES (100, 'here');")
        assert 100 in store.rows(nth), "it takes writes"
    again = recovered(store)
    assert [shard["standby"]["promoted"] for shard in again["shards"]] == [
        shard["standby"]["promoted"] for shard in report["shards"]
    ]
    text = store.backup.command("recover", "orders", "--primary-is-dead")
    assert "2 commits beyond it are left out" in text and f"promoted: psql -h {store.place}" in text, text
    # A promoted server outlives the backup server, and is on record.
    store.backup.process.kill()
    store.backup.start()
    wait_until("it is known", lambda: store.standby(0).get("state") == "promoted", WAIT_S, [store.backup.process])
    assert 100 in store.rows(0)


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def view_rows(shard: dict) -> set[int]:
    words = ["-h", shard["socket_dir"], "-p", shard["port"], "-U", "postgres", "-qAtX"]
    argv = [str(word) for word in (BIN_DIR / "psql", *words, "-c", "SELECT id FROM entries;", "postgres")]
    return {int(row) for row in subprocess.run(argv, capture_output=True, text=True, check=True).stdout.split()}


def test_the_past_is_viewed_at_one_cut_and_recovered_there(store):
    store.start_daemon()
    for nth in range(2):
        store.wait_rows(nth, set())
        kept = lambda nth=nth: bool(store.standby(nth)["kept"])  # noqa: E731
        wait_until(f"a copy of s{nth} is kept", kept, WAIT_S, [store.backup.process])
        store.insert(nth, 1)
    for nth in range(2):
        store.wait_rows(nth, {1})
    then = now()
    time.sleep(0.002)  # the next stamps are later in milliseconds
    for nth in range(2):
        store.insert(nth, 2)
    for nth in range(2):
        store.wait_rows(nth, {1, 2})

    with pytest.raises(RuntimeError, match="ahead of the watermark"):
        store.backup.command("view", "orders", "--at", "2199-01-01T00:00:00Z", "--detach")
    view = json.loads(store.backup.command("view", "orders", "--at", then, "--detach", "--json"))
    assert [view_rows(shard) for shard in view["shards"]] == [{1}, {1}], view
    assert view["name"] in store.backup.command("view", "--list")
    pids = [int(path.read_text().split()[0]) for path in store.place.glob("*/view-*/own/data/postmaster.pid")]
    assert len(pids) == 2
    store.backup.command("view", "--close", view["name"])
    assert not list(store.place.glob("*/view-*")), "all of it is gone"
    assert not any(runs(pid) for pid in pids)

    # A server that was killed with a view leaves nothing of it.
    store.backup.command("view", "orders", "--at", then, "--detach")
    store.backup.process.kill()
    store.backup.start()
    wait_until("the view is gone", lambda: not list(store.place.glob("*/view-*")), WAIT_S, [store.backup.process])

    report = recovered(store, "--at", then)
    for nth, shard in enumerate(report["shards"]):
        assert shard["standby"]["promoted"]["at"] <= shard["apply_to"], report
        assert store.rows(nth) == {1}
        store.sql_at(nth, "INSERT INTO entries VALUES (100, 'here');")
        assert store.rows(nth) == {1, 100}
    assert recovered(store, "--at", then)["shards"][0]["standby"]["promoted"], "the same again"
    view = json.loads(store.backup.command("view", "orders", "--detach", "--json"))
    assert [view_rows(shard) for shard in view["shards"]] == [{1, 2}, {1, 2}], "what is later is still there"
    store.backup.command("view", "--close", view["name"])
