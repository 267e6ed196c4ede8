"""Snapshots of each kind and exports, with a real database: each image has the orders of its point, and no others."""

from __future__ import annotations

import subprocess
from pathlib import Path

from shop import COUNT, ROWS, Backup, bookmark, insert, open_shop, orders

from tidelock_testbed.pair import DISK, GROUP, MEMBER, Pair
from tidelock_testbed.process import Process, wait_until
from tidelock_testbed.sqlalone import SqlAlone


def orders_in(pair: Pair, database: SqlAlone, image: Path, form: str) -> int | None:
    """What PostgreSQL finds on an image, which stays as it is."""
    socket = pair.run.sockets / f"{image.name}.nbd"
    words = ["qemu-nbd", "--snapshot", "--socket", socket, "--export-name", "disk", "--format", form, "--persistent"]
    server = Process(pair.run, f"qemu-nbd-{image.parent.name}-{image.name}", [*words, image])
    wait_until("qemu-nbd listens", socket.exists, 30, [server])
    said = database.run(f"nbd+unix:///disk?socket={socket}", COUNT)
    server.kill()
    socket.unlink()
    return orders(said)


def test_each_kind_of_snapshot_has_the_orders_of_its_point(run, image):
    """Instant, of the past, incremental forward and back, several at once, deferred, rolled."""
    pair, database, primary = open_shop(run, image)
    backup = Backup(pair)
    bookmark(pair, "first")
    database.run(primary, insert(ROWS + 1))
    bookmark(pair, "second")
    first, second = ("--at", "bookmark:first"), ("--at", "bookmark:second")

    def snapshots() -> dict[str, dict]:
        return {of["name"]: of for of in backup.json("snapshot", "--list")["snapshots"]}

    for words in [
        ("taken",),
        ("instant",),
        ("past", *first),
        ("forward", *second, "--base", "past"),
        ("back", *first, "--base", "instant"),
        ("one=bookmark:first", "two=bookmark:second"),
        ("later", *first, "--over", "1s"),
        ("rolled", *first),
        ("rolled", "--roll-to", "bookmark:second"),
    ]:
        backup.json("snapshot", GROUP, *words)
    had = {"past": 1, "back": 1, "one": 1, "later": 1, "taken": 2, "instant": 2, "forward": 2, "two": 2, "rolled": 2}
    made = snapshots()
    assert made.keys() == had.keys(), made
    for name, times in had.items():
        assert made[name]["phase"] == "whole", made[name]
        (disk,) = made[name]["disks"]
        assert orders_in(pair, database, Path(disk["path"]), disk["format"]) == times * ROWS, name
        assert backup.json("snapshot", GROUP, "--verify", name)["good"], name
    pair.check_sites()


def test_a_chain_of_exports_has_the_orders_of_each_of_its_points(run, image):
    """Each link over the one before, as `qemu-img` finds it, and one that goes back."""
    pair, database, primary = open_shop(run, image)
    backup = Backup(pair)
    bookmark(pair, "first")
    database.run(primary, insert(ROWS + 1))
    bookmark(pair, "second")
    disk, out = f"{MEMBER}.{DISK}", run.directory / "chain.qcow2"
    points = ("--chain", "bookmark:first", "--chain", "bookmark:second")
    made = backup.json("export", GROUP, disk, out, "--format", "qcow2", *points)["images"]
    links = [Path(link["file"]) for link in made]
    back = run.directory / "back.qcow2"
    words = ("--format", "qcow2", "--base", links[1], "--at", "bookmark:first")
    backup.json("export", GROUP, disk, back, *words)
    for link, times in [(links[0], 1), (links[1], 2), (back, 1)]:
        subprocess.run(["qemu-img", "check", "-q", link], check=True, timeout=120)
        assert orders_in(pair, database, link, "qcow2") == times * ROWS, link
    assert links[1].stat().st_blocks < links[0].stat().st_blocks, "only what changed"
    plain = run.directory / "first.img"
    backup.json("export", GROUP, disk, plain, "--at", "bookmark:first")
    subprocess.run(["qemu-img", "compare", "-q", "-f", "raw", "-F", "qcow2", plain, back], check=True, timeout=120)
