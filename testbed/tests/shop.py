"""A pair whose guest's disk has a database with orders, and how the backup's command line is asked about its past."""

from __future__ import annotations

import json
import os
import subprocess

from tidelock_testbed.bench.postgres import database_disk
from tidelock_testbed.pair import DISK, GROUP, Options, Pair
from tidelock_testbed.paths import BIN
from tidelock_testbed.run import Run
from tidelock_testbed.sqlalone import SqlAlone

DATABASE_MIB = 160
ROWS = 300
COUNT = "SELECT count(*) AS orders FROM orders;\n"
CREATE = "CREATE TABLE orders (id int, what text);\n"


def insert(first: int) -> str:
    """So many orders more, from this number on."""
    last = first + ROWS - 1
    return f"INSERT INTO orders SELECT n, repeat('x', 200) FROM generate_series({first}, {last}) n;\nCHECKPOINT;\n"


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


def open_shop(run: Run, image, more: str = "") -> tuple[Pair, SqlAlone, str]:
    """The pair, PostgreSQL for one session at a time, and the disk that it has the orders on. `more` is of the backup's
    configuration."""
    disk = database_disk(run, image, run.directory / "database.img", DATABASE_MIB)
    pair = Pair(run, Options(disk=disk, window="1h", backup_more=more))
    pair.start()
    database = SqlAlone(image.root, run.directory / "sql")
    primary = f"nbd+unix:///{DISK}?socket={pair.socket}"
    database.run(primary, CREATE + insert(1))
    return pair, database, primary


def orders(said: str) -> int | None:
    """How many orders there are; None: there is no such table."""
    if 'relation "orders" does not exist' in said:
        return None
    return int(said.split('orders = "')[1].split('"')[0])


def bookmark(pair: Pair, name: str) -> None:
    """At the primary: of what was written so far."""
    words = [BIN / "tidelock", "bookmark", GROUP, name, "--socket", pair.control_socket]
    subprocess.run(words, check=True, capture_output=True, timeout=120)
