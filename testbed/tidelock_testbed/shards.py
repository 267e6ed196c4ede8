"""A sharded store between two sites: stock PostgreSQL servers on the hosts of the primary site, their logs and a stock
standby of each at the backup.

    clients ─┬─ lan ── primary:   s0, s1, tidelockd ═ wan ══╗
             └─ lan ── primary-b: s2, s3, tidelockd ═ wan-b ═ backup: tidelock-backup, standbys of s0 to s3

Hosts are network namespaces, so all clocks are one.

Invariant: after `destroy` no process or link of the primary site is left to recover from, and no file.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from operator import ge
from pathlib import Path

import psycopg

from .backupserver import BackupServer
from .hostdaemon import HostDaemon
from .image import GuestImage
from .net import Net
from .pgserver import PgServer
from .pki import Pki
from .process import Process, kill_at_once, runs, wait_until
from .run import Run, start_time

STORE = "orders"
HOSTS = ("host-a", "host-b")
SHARDS_OF_HOST = 2
FIRST_PORT = 5432
ASSUMED_ERROR = "100us"
NEVER_MIND_S = 300
"""Time after which something will not happen any more."""
LOOK_EVERY_S = 0.02
ENDS_S = 30

MAY_CHANGE_USERS = [
    "setpriv",
    "--bounding-set=-all,+setuid,+setgid,+setpcap,+chown,+kill,+dac_override,+fowner",
    "--inh-caps=-all",
    "--ambient-caps=-all",
]
"""Privileges of a backup server that runs standbys: PostgreSQL's programs refuse root, so they run as another user."""


def host_sections(shards: Iterable[str], here: list[PgServer], store: str = STORE) -> list[str]:
    """Sections of `host.toml` for a host that leads some shards of a store, all of whose clocks are one."""
    lines = ["[clock]", 'source = "assumed"', f'assume_error = "{ASSUMED_ERROR}"']
    lines += ["[[store]]", f'name = "{store}"', f"shards = {json.dumps(list(shards))}"]
    for server in here:
        lines += [
            "[[store.shard]]",
            f'name = "{server.name}"',
            f'servers = ["127.0.0.1:{server.port}"]',
            'user = "postgres"',
        ]
    return lines


def backup_sections(
    hosts: Iterable[str], store: str = STORE, standbys: Path | None = None, watermark: bool = True
) -> list[str]:
    """Sections of `backup.toml` for a store, whose standbys, if any, are in a directory."""
    lines = ["[[store]]", f'name = "{store}"', f"hosts = {json.dumps(list(hosts))}"]
    lines += [] if watermark else ['watermark = "off"']
    return lines + (
        ["[store.standbys]", f'dir = "{standbys}"', 'primary_user = "postgres"', "keep_copies = 0"] if standbys else []
    )


def lsn(text: str) -> int:
    """A position that PostgreSQL writes as two hexadecimal numbers."""
    upper, lower = text.strip().split("/")
    return int(upper, 16) << 32 | int(lower, 16)


def lsn_text(position: int) -> str:
    """A position as PostgreSQL writes it."""
    return f"{position >> 32:X}/{position & 0xFFFFFFFF:X}"


def unix_s(stamp: int) -> float:
    """Time of a stamp: milliseconds, and 2^-16 of them."""
    return stamp / 65536 / 1000


def connect(standby: dict) -> psycopg.Connection:
    """A connection to a standby, or to a server that was one, at its socket."""
    host, port = standby["socket_dir"], standby["port"]
    return psycopg.connect(f"host={host} port={port} user=postgres dbname=postgres", autocommit=True)


def replayed(standby: dict | None) -> int:
    """Position up to which a standby has replayed its log; 0 if it takes no connections."""
    # A server that has just started does not know yet where it is.
    if not standby or not standby["port"]:
        return 0
    try:
        with connect(standby) as connection:
            (found,) = connection.execute("SELECT pg_last_wal_replay_lsn()::text").fetchone()
            return lsn(found) if found else 0
    except psycopg.Error:
        return 0


def directory_of_standbys(run: Run) -> Path:
    """A directory of the run that users without privileges reach. PostgreSQL servers below it outlive the server that
    has started them, and end with the run."""
    directory = Path(tempfile.mkdtemp(prefix=f"{run.prefix}-", dir="/var/tmp"))
    run.note(directory=str(directory))
    run.on_close(f"remove {directory}", lambda: shutil.rmtree(directory, ignore_errors=True))
    directory.chmod(0o711)

    def end() -> None:
        for file in directory.glob("**/own/data/postmaster.pid"):
            kill_server(file.parent)

    run.on_close("end the standbys", end)
    return directory


def postmaster(data: Path) -> int | None:
    """Number of the first process of the PostgreSQL that runs in a data directory."""
    try:
        pid = int((data / "postmaster.pid").read_text().split()[0])
        return pid if str(data) in Path(f"/proc/{pid}/cmdline").read_text() else None
    except (OSError, IndexError, ValueError):
        return None


def kill_server(data: Path) -> None:
    """Kills the PostgreSQL that runs in a data directory, and waits until it is gone."""
    pid = postmaster(data)
    with contextlib.suppress(OSError, TypeError):
        os.kill(pid, signal.SIGKILL)
        wait_until(f"the server in {data} ends", lambda: not runs(pid), ENDS_S)


@dataclass
class StoreWatch:
    """Samples of what the backup says of its store, taken by a thread of its own."""

    server: BackupServer
    samples: list[tuple[float, float, str | None]] = field(default_factory=list)
    """Time, age of the watermark in seconds, and the shard that holds it back."""
    _stopping: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self._thread = threading.Thread(target=self._run, daemon=True, name="store-watch")
        self._thread.start()

    def stop(self) -> None:
        """Ends it."""
        self._stopping.set()
        self._thread.join(15)

    def _run(self) -> None:
        while not self._stopping.wait(LOOK_EVERY_S):
            # The server may be away.
            with contextlib.suppress(OSError, ValueError, LookupError):
                store = ask(self.server)["stores"][0]
                if store["watermark"]:
                    age_s = time.time() - unix_s(store["watermark"])
                    self.samples.append((time.monotonic(), age_s, store["held_back_by"]))

    def ages_ms(self, begin: float, end: float) -> list[float]:
        """Ages of the watermark in a time, ascending."""
        return sorted(age_s * 1e3 for at, age_s, _ in list(self.samples) if begin <= at < end)


def ask(server: BackupServer) -> dict:
    """The server's status, by its control socket: quicker than by a command."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as control:
        control.settimeout(10)
        control.connect(str(server.control_socket))
        control.sendall(b'{"do": "status"}\n')
        with control.makefile("rb") as answers:
            return json.loads(answers.readline())


class ShardRig:
    """Two sites, with the store's servers, host daemons and backup server: made, not started."""

    def __init__(self, run: Run, image: GuestImage, rtt_ms: float, seed: int, watermark: bool = True):
        self.run = run
        self.net = Net(run, rtt_ms, seed, hosts=len(HOSTS))
        names = [f"s{number}" for number in range(SHARDS_OF_HOST * len(HOSTS))]
        self.servers = [
            PgServer(run, image, name, netns=self.net.hosts[host].netns, port=FIRST_PORT + n, listen_addresses="*")
            for n, name in enumerate(names)
            for host in [n // SHARDS_OF_HOST]
        ]
        self.directories = [run.directory / host for host in HOSTS]
        backup_dir = run.directory / "backup"
        for directory in (*self.directories, backup_dir):
            directory.mkdir()
        pki = Pki(run.directory / "authority")
        self.backup = BackupServer(
            run,
            self.net.backup.netns,
            backup_dir,
            pki.issue("backup", self.net.BACKUP4, backup_dir / "tls"),
            sections=backup_sections(HOSTS, standbys=directory_of_standbys(run), watermark=watermark),
        )
        self.backup.confined = MAY_CHANGE_USERS
        self.daemons = [
            HostDaemon(
                run,
                self.net.hosts[host].netns,
                directory,
                [],
                self.net.backup_address(host),
                pki.issue("host", HOSTS[host], directory / "tls"),
                host=HOSTS[host],
                server_name=self.net.BACKUP4,
                sections=host_sections(names, [self.servers[number] for number in self.shards_of(host)]),
            )
            for host, directory in enumerate(self.directories)
        ]

    @staticmethod
    def host_of(shard: int) -> int:
        """The host on which a shard's server runs."""
        return shard // SHARDS_OF_HOST

    @staticmethod
    def shards_of(host: int) -> range:
        """The shards of a host."""
        return range(host * SHARDS_OF_HOST, (host + 1) * SHARDS_OF_HOST)

    def address(self, shard: int) -> str:
        """Address at which clients find a shard."""
        return f"{self.net.lan_address(self.net.hosts[self.host_of(shard)])}:{self.servers[shard].port}"

    def start_servers(self, table: str) -> None:
        """Starts the store, with a table on each shard."""
        for server in self.servers:
            server.admit("10.77.0.0/16")
            server.start()
            server.sql(table)

    def processes(self) -> list[Process]:
        """Everything that runs as long as nothing has happened."""
        return [self.backup.process, *(daemon.process for daemon in self.daemons), *self._postgres()]

    def _postgres(self) -> list[Process]:
        return [server.process for server in self.servers]

    def store(self) -> dict:
        """The store, as the backup's status has it; without shards if the server is away or has not heard of it yet."""
        with contextlib.suppress(OSError, ValueError, LookupError):
            return ask(self.backup)["stores"][0]
        return {"shards": []}

    def standby_of(self, shard: int) -> dict:
        """A shard's standby, as the status has it."""
        shards = self.store()["shards"]
        return (shards[shard].get("standby") or {}) if shard < len(shards) else {}

    def data_of_standby(self, shard: int) -> Path:
        """Data directory of a shard's standby."""
        return Path(self.standby_of(shard)["socket_dir"]).parent / "data"

    def wait_standbys(self) -> None:
        """Waits until each shard has a standby that follows."""

        def follow() -> bool:
            return all(self.standby_of(shard).get("state") == "following" for shard in range(len(self.servers)))

        self.wait("each shard has a standby", follow)
        for shard in range(len(self.servers)):
            self.note_standby(shard)

    def note_standby(self, shard: int) -> None:
        """A standby must not outlive a run that is killed."""
        if pid := postmaster(self.data_of_standby(shard)):
            self.run.note(pid=pid, start=start_time(pid))

    def ends(self) -> list[int]:
        """End of each shard's log at home now."""
        return [lsn(server.sql("SELECT pg_current_wal_flush_lsn();")) for server in self.servers]

    def wait_applied(self, ends: list[int]) -> None:
        """Waits until the backup may apply each shard's log up to there, and each standby has done so."""

        def all_have(positions: list[int]) -> bool:
            return len(positions) == len(ends) and all(map(ge, positions, ends))

        self.wait(
            "the backup may apply what each shard has written",
            lambda: all_have([shard["apply_to"] for shard in self.store()["shards"]]),
        )
        self.wait(
            "each standby has applied what its shard has written",
            # Not by the status, which is late.
            lambda: all_have([replayed(shard.get("standby")) for shard in self.store()["shards"]]),
        )

    def wait(self, what: str, condition) -> None:
        """Waits for something that needs all processes. An error says what the backup said last."""
        try:
            wait_until(what, condition, NEVER_MIND_S, self.processes())
        except TimeoutError as error:
            raise TimeoutError(f"{error}\nthe store at the backup: {json.dumps(self.store())}") from None

    def destroy_primary(self, cut_first: bool) -> tuple[float, float]:
        """The disaster: both hosts are gone, with servers, daemons and links. Returns when it began and when nothing of
        the site was left."""
        began = time.monotonic()
        if cut_first:
            self._cut_off()
        for server in self.servers:
            server.kill_now()
        kill_at_once([*self._postgres(), *(daemon.process for daemon in self.daemons)])
        if not cut_first:
            self._cut_off()
        ended = time.monotonic()
        for server in self.servers:
            server.destroy()
        for directory in self.directories:
            shutil.rmtree(directory)
        return began, ended

    def _cut_off(self) -> None:
        for wan in self.net.wans:  # all at once, as far as can be: the other cables take a while
            wan.cut()
        self.net.cut_off_primary()
