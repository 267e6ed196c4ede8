"""Any point in time at the backup, with a real database on a real file system: looked at, searched and taken out,
while the primary goes on (DESIGN rules 5 and 7).
"""

from __future__ import annotations

import json
import os
import subprocess

import pytest

from tidelock_testbed.bench.postgres import database_disk
from tidelock_testbed.pair import DISK, GROUP, MEMBER, Options, Pair
from tidelock_testbed.paths import BIN
from tidelock_testbed.sqlalone import SqlAlone

DATABASE_MIB = 160
ROWS = 300
COUNT = "SELECT count(*) AS orders FROM orders;\n"


class Backup:
    """The command line of a pair's backup."""

    def __init__(self, pair: Pair):
        self.pair = pair

    def json(self, *words: object) -> dict:
        """What a command says to programs."""
        return json.loads(self.pair.backup_command(*words, "--json"))

    def bisect(self, *words: object, env: dict[str, str]) -> dict:
        """The search, to its end."""
        argv = [BIN / "tidelock-backup", "--config", self.pair.backup_config, "bisect", GROUP, "--json", *words]
        done = subprocess.run(argv, env={**os.environ, **env}, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)


@pytest.fixture
def shop(run, image):
    """A pair whose guest's disk has a database with orders."""
    disk = database_disk(run, image, run.directory / "database.img", DATABASE_MIB)
    pair = Pair(run, Options(disk=disk, window="1h"))
    pair.start()
    database = SqlAlone(image.root, run.directory / "sql")
    primary = f"nbd+unix:///{DISK}?socket={pair.socket}"
    rows = f"INSERT INTO orders SELECT n, repeat('x', 200) FROM generate_series(1, {ROWS}) n;\n"
    database.run(primary, "CREATE TABLE orders (id int, what text);\n" + rows + "CHECKPOINT;\n")
    pair.wait_settled()
    return pair, database, primary


def orders(said: str) -> int | None:
    """How many orders there are; None: there is no such table."""
    if 'relation "orders" does not exist' in said:
        return None
    return int(said.split('orders = "')[1].split('"')[0])


def test_a_dropped_table_is_found_by_asking_postgresql_on_views(run, shop):
    """`bisect` finds the instant of the DROP, and the last good point has every row."""
    pair, database, primary = shop
    backup = Backup(pair)
    backup.json("bookmark", GROUP, "before-deploy")
    # The deployment does other things before and after it, as deployments do.
    work = "".join(f"CREATE TABLE t{n} AS SELECT generate_series(1, 500) n;\n" for n in range(3))
    database.run(primary, work + "DROP TABLE orders;\n" + work.replace("TABLE t", "TABLE u"))
    pair.wait_settled()
    check = database.check(MEMBER, DISK, COUNT.strip(), f'orders = "{ROWS}"', ['relation "orders" does not exist'])
    words = ("--from", "bookmark:before-deploy", "--pin", "clean", "--", "sh", "-c", check)
    found = backup.bisect(*words, env={})
    assert found["exact"] and len(found["records"]) >= 1, found
    assert found["last_good"]["hlc_raw"] < found["first_bad"]["hlc_raw"]

    # What it says is so: on views, on an image, and with the primary as it was all the while.
    at = {"good": "bookmark:clean", "bad": f"hlc:{found['first_bad']['hlc']}", "now": "latest"}
    said = {}
    for name, when in at.items():
        view = backup.json("view", GROUP, "--at", when, "--write", "--detach", "--name", name)
        said[name] = orders(database.run(view["disks"][0]["uri"], COUNT))
    assert said == {"good": ROWS, "bad": None, "now": None}
    views = backup.json("view", "--list")["views"]
    assert all(view["used_bytes"] > 0 and not view["lost"] for view in views), views
    out = run.directory / "clean.img"
    pair.backup_command("export", GROUP, f"{MEMBER}.{DISK}", out, "--at", "bookmark:clean")
    view = backup.json("view", GROUP, "--at", "bookmark:clean", "--detach", "--name", "untouched")
    subprocess.run(["qemu-img", "compare", "-f", "raw", "-F", "raw", out, view["disks"][0]["uri"]], check=True)
    pair.check_sites()
