"""The rows of a guest's databases as they were at a point in time: read from views at the backup (rules 5 and 7)."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from .. import nbdwire
from ..ledger import Row
from ..paths import BIN, SYSTEM_PYTHON
from ..process import run_command
from ..run import Run
from ..sqlalone import SqlAlone

READ_ROWS = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parents[1])!r})
import rowstore
store = rowstore.Store([rowstore.Disk(uri) for uri in sys.argv[1:]], 0)
store.recover()
for row in store.rows:
    print(*row[:2])
"""
"""The row store's own way to recover, and nothing more."""
SQL = "SELECT 'row ' || client || ' ' || n AS r FROM rows;\n"


@dataclass
class Database:
    """One guest's, and where its disks are found in a view."""

    group: str
    member: str
    disks: list[str]

    def names(self) -> list[str]:
        """Its disks as the backup names them."""
        return [f"{self.member}.{disk}" for disk in self.disks]


class Past:
    """What a drill's backup shows of the past."""

    def __init__(self, run: Run, command, root_image: Path | None):
        """`command` runs `tidelock-backup` with these words; with a root image databases are PostgreSQL's."""
        self.run, self.command, self.root_image = run, command, root_image
        self._laps = 0

    @contextmanager
    def view(self, group: str, mark: str) -> Iterator[dict[str, dict]]:
        """A writable view of all disks of a group: each disk's URI and socket."""
        self._laps += 1
        name = f"view-of-{self._laps}"
        words = ["view", group, "--at", f"bookmark:{mark}", "--write", "--quota", "64MiB", "--detach", "--name", name]
        said = json.loads(self.command(*words, "--json"))
        try:
            yield {disk["name"]: disk for disk in said["disks"]}
        finally:
            self.command("view", "--close", name)

    def rows(self, database: Database, disks: dict[str, dict]) -> set[Row]:
        """What a database has on a view."""
        uris = [disks[name]["uri"] for name in database.names()]
        if not self.root_image:
            text = run_command([SYSTEM_PYTHON, "-c", READ_ROWS, *uris], "read rows of the past")
            return {(int(client), int(n)) for client, n in (line.split() for line in text.splitlines())}
        self._laps += 1
        alone = SqlAlone(self.root_image, self.run.directory / f"sql-{self._laps}")
        said = alone.run(uris[0], SQL)
        return {(int(client), int(n)) for client, n in re.findall(r'"row (\d+) (\d+)"', said)}

    def digest(self, database: Database, mark: str) -> str:
        """Of all of its disks' bytes at a point."""
        digest = hashlib.blake2b()
        for name in database.names():
            self._laps += 1
            image = self.run.directory / f"past-{self._laps}.img"
            self.command("export", database.group, name, image, "--at", f"bookmark:{mark}")
            with image.open("rb") as file:
                while part := file.read(1 << 20):
                    digest.update(part)
            image.unlink()
        return digest.hexdigest()

    @staticmethod
    def write_over(disks: dict[str, dict], blocks: int) -> None:
        """What somebody does who tries something out on a view."""
        for name, disk in disks.items():
            guest = nbdwire.Connection(Path(disk["socket"]), name)
            for block in range(blocks):
                guest.write(block * 4096, b"\xee" * 4096)
            guest.flush()
            guest.close()


def bookmark(control_socket: Path, group: str, name: str) -> bool:
    """At the primary; whether it is set."""
    words = [BIN / "tidelock", "bookmark", group, name, "--timeout", "20s", "--socket", control_socket]
    try:
        run_command(words, "set a bookmark")
    except RuntimeError:
        return False
    return True
