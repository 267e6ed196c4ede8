"""Any point in time at the backup, with a real database on a real file system: looked at, searched and taken out,
while the primary goes on (DESIGN rules 5 and 7).
"""

from __future__ import annotations

import subprocess

import pytest
from shop import COUNT, ROWS, Backup, open_shop, orders

from tidelock_testbed.pair import DISK, GROUP, MEMBER


@pytest.fixture
def shop(run, image):
    """A pair whose guest's disk has a database with orders, all of them at the backup."""
    pair, database, primary = open_shop(run, image)
    pair.wait_settled()
    return pair, database, primary


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
    # PostgreSQL flushes what it commits: its last commit was after the DROP.
    spans = backup.json("timeline", GROUP)["spans"]
    flushed = [span["last_flush"] for span in spans if span["flushes"]][-1]
    at["flushed"] = f"{flushed['member']}={flushed['seq']}"
    said = {}
    for name, when in at.items():
        view = backup.json("view", GROUP, "--at", when, "--write", "--detach", "--name", name)
        said[name] = orders(database.run(view["disks"][0]["uri"], COUNT))
    assert said == {"good": ROWS, "bad": None, "now": None, "flushed": None}
    views = backup.json("view", "--list")["views"]
    assert all(view["used_bytes"] > 0 and not view["lost"] for view in views), views
    out = run.directory / "clean.img"
    pair.backup_command("export", GROUP, f"{MEMBER}.{DISK}", out, "--at", "bookmark:clean")
    view = backup.json("view", GROUP, "--at", "bookmark:clean", "--detach", "--name", "untouched")
    subprocess.run(["qemu-img", "compare", "-f", "raw", "-F", "raw", out, view["disks"][0]["uri"]], check=True)
    pair.check_sites()
