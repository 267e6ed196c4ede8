"""A sharded store for faults: one or two primary hosts, causal chains of clients, and every cut compared with them.

    host-a: s0, ..., tidelockd ──(loopback)── backup server, its standbys
    host-b: s1, ..., tidelockd ══ a cable that can be cut ══╝

A client asks for row n + 1 of its chain, on the next shard, when it has the answer to row n. So a cut that has row
n + 1 without row n is inconsistent. The end of each row's commit is known by the servers' own logs.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path

import psycopg
from test_pgstream import example, number
from test_store_standbys import BIN_DIR, StoreWithStandbys

from tidelock_testbed.backupserver import BackupServer
from tidelock_testbed.faultshim import FaultShim
from tidelock_testbed.hostdaemon import BACKUP_PORT
from tidelock_testbed.netns import Netns, add_addresses, veth
from tidelock_testbed.paths import BIN
from tidelock_testbed.pgserver import UID, PgServer
from tidelock_testbed.process import Process, run_command, wait_until

WAIT_S = 180
STORE = "orders"
SETTINGS = {
    "wal_level": "replica",
    "fsync": "off",
    "min_wal_size": "2MB",
    "max_wal_size": "4GB",
    "wal_keep_size": "4GB",
    "autovacuum": "off",
    "max_wal_senders": "8",
    "max_prepared_transactions": "8",
}
"""The whole log stays, to compare with."""
TABLE = "CREATE TABLE rows (chain int, n bigint, text text, PRIMARY KEY (chain, n));"
INSERT = "INSERT INTO rows VALUES (%s, %s, repeat('x', 100)) ON CONFLICT DO NOTHING"
FIND = "SELECT xmin::text FROM rows WHERE chain = %s AND n = %s"
SEGMENT = 1 << 20
XID = re.compile(r'"xid":(\d+)')
BURST, PAUSE_S = 10, 0.2
"""A client writes so many rows one behind the other, and rests: the comparison has all of them."""
CABLE = {"store": "10.77.91.1", "host-b": "10.77.91.2"}


@dataclass
class Row:
    """A row of a chain that was answered."""

    chain: int
    n: int
    shard: str
    xid: int


@dataclass
class Host:
    """A primary host: where it runs, how it reaches the backup, and its daemon."""

    name: str
    netns: Netns
    backup: str
    shards: list[str]
    clock: list[str]
    daemon: Process | None = None


class Plaintext:
    """A link without TLS."""

    def toml(self) -> str:
        return ""


class Site(StoreWithStandbys):
    """A store whose hosts lead these shards. Servers are running then, and the backup server."""

    server_type = PgServer

    def __init__(self, run, image, hosts: dict[str, list[str]], clocks: dict[str, list[str]] | None = None):
        self.run, self.image, self.netns = run, image, Netns(run, "store")
        self.make_place()
        self.cable: Netns | None = None
        # A shard that a test adds is of its own site alone.
        self.hosts = {name: self._host(name, [*shards], (clocks or {}).get(name)) for name, shards in hosts.items()}
        self.shards: dict[str, PgServer] = {}
        self.servers: dict[str, list[PgServer]] = {}
        """All servers that a shard ever had, the last one last."""
        self.environment: dict[str, dict[str, str]] = {}
        """Of each host's daemon."""
        for host in self.hosts.values():
            for shard in host.shards:
                self.add_server(shard, host)
        self.backup = BackupServer(run, self.netns, run.directory, Plaintext())
        text = self.backup.config.read_text()
        store = f'[[store]]\nname = "{STORE}"\nhosts = {json.dumps(list(hosts))}\n'
        self.backup.config.write_text("plaintext = true\n" + text + store + self.backup_toml())
        self.backup.confined = []
        self.backup.start()
        self.cuts: list[dict[str, int]] = []
        self._watching = threading.Event()

    def _host(self, name: str, shards: list[str], clock: list[str] | None) -> Host:
        clock = clock or ['source = "assumed"', 'assume_error = "100us"']
        if name == "host-a":
            return Host(name, self.netns, "127.0.0.1", shards, clock)
        self.cable = Netns(self.run, name)
        veth(self.netns, "to-host-b", self.cable, "to-backup")
        add_addresses(self.netns, "to-host-b", f"{CABLE['store']}/24")
        add_addresses(self.cable, "to-backup", f"{CABLE['host-b']}/24")
        return Host(name, self.cable, CABLE["store"], shards, clock)

    def cut(self, is_cut: bool) -> None:
        """Cuts host-b's cable, or mends it."""
        self.netns.ip(f"link set to-host-b {'down' if is_cut else 'up'}")

    def add_server(self, shard: str, host: Host, copy_of: PgServer | None = None, **more: object) -> PgServer:
        """Starts a server of a shard; its first one gets the table of chains."""
        nth = sum(len(servers) for servers in self.servers.values())
        name = f"{shard}-heir" if copy_of else shard
        sockets = "/run/postgresql,/data"
        settings = {**SETTINGS, "unix_socket_directories": sockets, **more}
        server = self.server_type(self.run, self.image, name, 1, host.netns, 5432 + nth, copy_of, **settings)
        self.prepare(host, server)
        server.start()
        (self.run.sockets / name).symlink_to(server.directory)
        self.servers.setdefault(shard, []).append(server)
        if not copy_of:
            server.sql(TABLE)
            self.shards[shard] = server
        return server

    def prepare(self, host: Host, server: PgServer) -> None:
        """More for a server before it starts."""

    def needs(self) -> list[Process]:
        """The backup server and the hosts' daemons."""
        return [self.backup.process, *(host.daemon for host in self.hosts.values())]

    @property
    def names(self) -> list[str]:
        """All shards, in the order of the configuration."""
        return sorted(self.shards)

    def toml(self, host: Host) -> str:
        lines = [
            "[host]",
            f'name = "{host.name}"',
            f'runtime_dir = "{self.run.sockets / host.name}"',
            f'state_dir = "{self.run.directory / host.name}-state"',
            "[backup]",
            f'address = "{host.backup}:{BACKUP_PORT}"',
            "plaintext = true",
            "[clock]",
            *host.clock,
            "[[store]]",
            f'name = "{STORE}"',
            f"shards = {json.dumps(self.names)}",
            'max_clock_error = "5ms"',
        ]
        for shard in host.shards:
            servers = [f"127.0.0.1:{server.port}" for server in self.servers[shard]]
            lines += ["[[store.shard]]", f'name = "{shard}"', f"servers = {json.dumps(servers)}", 'user = "postgres"']
        return "\n".join(lines) + "\n"

    def start_daemon(self, name: str) -> None:
        host = self.hosts[name]
        (self.run.sockets / name).mkdir(exist_ok=True)
        config = self.run.directory / f"{name}.toml"
        config.write_text(self.toml(host))
        environment = {"NO_COLOR": "1", **self.environment.get(name, {})}
        argv = [BIN / "tidelockd", "--config", config]
        host.daemon = Process(self.run, f"tidelockd-{name}", argv, host.netns, environment)
        socket_path = self.run.sockets / name / "control.sock"
        socket_path.unlink(missing_ok=True)
        wait_until("it answers", socket_path.exists, WAIT_S, [host.daemon])

    def start_daemons(self) -> None:
        for name in self.hosts:
            self.start_daemon(name)

    def at_home(self, name: str, shard: str) -> dict:
        """A shard, as its host's status has it."""
        socket = self.run.sockets / name / "control.sock"
        argv = [BIN / "tidelock", "status", "--json", "--socket", socket]
        return json.loads(run_command(argv, "ask the daemon"))["stores"][0]["shards"][shard]

    def stand(self, name: str, shard: str) -> str | None:
        """Kind of the reason for which a shard stands, as its host says."""
        stands = self.at_home(name, shard)["stands"]
        return stands and stands["kind"]

    def wait_stands(self, name: str, shard: str, kind: str | None) -> None:
        def stands() -> bool:
            return self.stand(name, shard) == kind

        wait_until(f"{shard} stands: {kind}", stands, WAIT_S, [self.hosts[name].daemon])

    def of_shard(self, shard: str) -> dict:
        """A shard, as the backup's status has it."""
        return next((of for of in self.status()["shards"] if of["name"] == shard), {})

    def wait_named(self, shard: str, text: str | None = None) -> None:
        """Waits until the backup says that this shard holds the watermark back; for this reason, if one is given."""

        def named() -> bool:
            of = self.of_shard(shard)
            return self.status()["held_back_by"] == shard and (text is None or text in (of["stands"] or ""))

        wait_until(f"the backup names {shard}", named, WAIT_S, [self.backup.process])

    def applied(self) -> dict[str, int]:
        """The cut of now."""
        return {of["name"]: of["apply_to"] for of in self.status()["shards"]}

    def status(self) -> dict:
        """The store at the backup. Asked at the socket: a command that finds no server opens the data itself."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as control:
            control.settimeout(WAIT_S)
            control.connect(str(self.backup.control_socket))
            control.sendall(b'{"do": "status"}\n')
            with control.makefile("rb") as answers:
                stores = json.loads(answers.readline())["stores"]
        return stores[0] if stores else {"shards": [], "held_back_by": None}

    def watch(self) -> None:
        """Keeps every cut that the backup's status shows, from now on."""

        def look() -> None:
            while not self._watching.wait(0.05):
                # The server may be away.
                with contextlib.suppress(ValueError, OSError):
                    if cut := self.applied():
                        self.cuts.append(cut)

        thread = threading.Thread(target=look, daemon=True)
        thread.start()

        def end() -> None:
            self._watching.set()
            thread.join(30)

        self.unwatch = end
        self.run.on_close("stop watching", end)

    def ends(self, rows: list[Row]) -> dict[tuple[str, int], int]:
        """Ends of these rows' commits in the servers' logs, by shard and transaction."""
        wanted = {shard: {row.xid for row in rows if row.shard == shard} for shard in self.servers}
        of_shards = {shard: ends_of_commits(servers, wanted[shard]) for shard, servers in self.servers.items()}
        return {(shard, xid): end for shard, ends in of_shards.items() for xid, end in ends.items()}

    def check_cuts(self, rows: list[Row]) -> int:
        """No cut that was seen has a row without the rows before it. Returns how many different ones were seen."""
        ends = self.ends(rows)
        different = {tuple(sorted(cut.items())) for cut in self.cuts}
        broken = [cut for cut in different if missing(rows, dict(cut), ends)]
        assert not broken, (broken[0], missing(rows, dict(broken[0]), ends))
        return len(different)

    def wait_covered(self, clients: "Clients") -> None:
        """The watermark is back: the cut has all that was answered by now, and moves on."""
        rows = clients.rows()
        last = {row.chain: row for row in rows}.values()

        def covered() -> bool:
            cut, ends = self.applied(), self.ends(list(last))
            return all(ends.get((row.shard, row.xid), 1 << 64) <= cut.get(row.shard, 0) for row in last)

        wait_until("the cut has all that was answered", covered, WAIT_S, self.needs())

    def recover(self) -> dict:
        """A disaster: the hosts are gone. Returns the report."""
        for host in self.hosts.values():
            host.daemon.kill()
        report = json.loads(self.backup.command("recover", STORE, "--primary-is-dead", "--json"))["store"]
        self.unwatch()
        self.cuts.append({of["name"]: of["apply_to"] for of in report["shards"]})
        return report

    def promoted(self, report: dict, shard: str) -> psycopg.Connection:
        """A connection to a server that a recovery has promoted."""
        of = next(of for of in report["shards"] if of["name"] == shard)["standby"]
        words = f"host={of['socket_dir']} port={of['port']} user=postgres dbname=postgres"
        return psycopg.connect(words, autocommit=True)

    def check_promoted(self, report: dict, rows: list[Row]) -> list[Row]:
        """The promoted servers have what the cut has, and no row without the ones before it. Returns what is there."""
        there = set()
        for shard in self.names:
            with self.promoted(report, shard) as connection:
                found = connection.execute("SELECT chain, n FROM rows").fetchall()
                there |= {(chain, n) for chain, n in found}
                # It takes writes.
                connection.execute("INSERT INTO rows VALUES (-1, 1)")
        cut = {of["name"]: of["apply_to"] for of in report["shards"]}
        ends = self.ends(rows)
        kept = [row for row in rows if ends[row.shard, row.xid] <= cut[row.shard]]
        assert {(row.chain, row.n) for row in kept} == {key for key in there if key in {(r.chain, r.n) for r in rows}}
        # A row that nobody was told of may be there, behind all that its client was told of.
        unknown = there - {(row.chain, row.n) for row in rows}
        last = {row.chain: row.n for row in rows}
        assert all(n == last.get(chain, 0) + 1 for chain, n in unknown), unknown
        assert not missing(rows, cut, ends)
        return kept


class ShimmedServer(PgServer):
    """A server that believes of the clock what its host's shim says."""

    def __init__(self, *words, **more):
        self.environment: list[str] = []
        super().__init__(*words, **more)

    def inside(self, program: str, *words: object) -> list:
        argv = super().inside(program, *words)
        at = argv.index("env") + 1
        return [*argv[:at], *self.environment, *argv[at:]]


class ClockSite(Site):
    """Two hosts, each with a shard and a clock that can be stepped: that of its daemon and of its server. A stand-in
    for chrony reports the truth of it, or the operator gives a word for it (`assumed`)."""

    def __init__(self, run, image, is_guarded: bool):
        self.shims: dict[str, FaultShim] = {}
        clocks = {name: ['source = "chrony"'] for name in ("host-a", "host-b")} if is_guarded else None
        self.is_guarded = is_guarded
        super().__init__(run, image, {"host-a": ["s0"], "host-b": ["s1"]}, clocks)

    server_type = ShimmedServer

    def prepare(self, host: Host, server: ShimmedServer) -> None:
        shim = FaultShim(self.run, f"{server.name}/clock")
        library = server.directory / "faultshim.so"
        shutil.copy(shim.environment["LD_PRELOAD"], library)
        file = server.directory / "clock.faults"
        chown(library, file)
        server.environment = ["LD_PRELOAD=/data/faultshim.so", "TIDELOCK_FAULTS=/data/clock.faults"]
        self.shims[host.name], self.environment[host.name] = shim, shim.environment
        if self.is_guarded:
            argv = [sys.executable, Path(__file__).with_name("honest_chrony.py"), "127.0.0.1", "323", file]
            chrony = Process(self.run, f"chrony-{host.name}", argv, host.netns)
            wait_until("chrony answers", lambda: "ready" in chrony.log.read_text(), WAIT_S, [chrony])

    def step_clock(self, host: str, ahead_s: float) -> None:
        """A host's clock is so far ahead from now on."""
        self.shims[host].step_clock(ahead_s)


def ends_of_commits(servers: list[PgServer], wanted: set[int]) -> dict[int, int]:
    """Ends of these commits in the log of a shard. Of a segment that several servers have, that of the last timeline
    counts."""
    files = sorted((path.name, path) for server in servers for path in server.wal.iterdir())
    segments = {name[8:]: path for name, path in files if len(name) == 24}
    histories = [path for name, path in files if name.endswith(".history")][-1:]
    chosen, at = [], number(f"0/{min(int(name[8:], 16) for name in segments) * SEGMENT:X}")
    while path := segments.get(f"{at >> 32:08X}{(at & 0xFFFFFFFF) // SEGMENT:08X}"):
        chosen.append(path)
        at += SEGMENT
    argv = [example("wal-dump", "tidelock-wal"), "65536", *chosen, *histories]
    ends = {}
    # Not kept as a whole: there may be a million of others.
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as dumped:
        for line in dumped.stdout:
            if '"COMMIT' in line and int(XID.search(line)[1]) in wanted:
                item = json.loads(line)
                ends[item["xid"]] = number(item["end"])
    assert dumped.returncode == 0
    return ends


def missing(rows: list[Row], cut: dict[str, int], ends: dict[tuple[str, int], int]) -> list[Row]:
    """Rows that a cut lacks, though it has a later row of the same chain."""
    beyond, lacking = {}, []
    for row in rows:
        # Of a shard that the cut does not know yet it has nothing.
        is_there = ends[row.shard, row.xid] <= cut.get(row.shard, 0)
        if is_there and row.chain in beyond:
            lacking.append(beyond[row.chain])
        elif not is_there:
            beyond.setdefault(row.chain, row)
    return lacking


class Clients:
    """Clients that write chains, until they are stopped. A row without an answer is asked for again."""

    def __init__(self, site: Site, chains: int = 3, first: int = 1):
        self.site, self._rows, self._stopping = site, [], threading.Event()
        self._lock, self._first = threading.Lock(), first
        self._threads = [
            threading.Thread(target=self._write, args=(chain,), daemon=True) for chain in range(first, first + chains)
        ]
        for thread in self._threads:
            thread.start()
        site.run.on_close("stop the clients", self.stop)

    def rows(self) -> list[Row]:
        """Rows that were answered, those of a chain in order."""
        with self._lock:
            return list(self._rows)

    def stop(self) -> list[Row]:
        self._stopping.set()
        for thread in self._threads:
            thread.join(60)
        return self.rows()

    def wait(self, more: int) -> None:
        """Waits until each chain has so many more rows."""
        before = self.longest()

        def grown() -> bool:
            now = self.longest()
            return all(now.get(chain, 0) >= before.get(chain, 0) + more for chain in self.chains())

        wait_until(f"{more} more rows of each chain", grown, WAIT_S)

    def chains(self) -> range:
        return range(self._first, self._first + len(self._threads))

    def longest(self) -> dict[int, int]:
        return {row.chain: row.n for row in self.rows()}

    def _write(self, chain: int) -> None:
        connections: dict[str, psycopg.Connection] = {}
        n = 0
        while not self._stopping.is_set():
            n += 1
            if n % BURST == 0:
                self._stopping.wait(PAUSE_S)
            names = self.site.names
            shard = names[(chain + n) % len(names)]
            while not self._stopping.is_set():
                try:
                    if shard not in connections:
                        connections[shard] = connect(self.site, shard)
                    xid = row_of(connections[shard], chain, n)
                    with self._lock:
                        self._rows.append(Row(chain, n, shard, xid))
                    break
                except psycopg.Error:
                    with contextlib.suppress(KeyError, psycopg.Error):
                        connections.pop(shard).close()
                    self._stopping.wait(0.05)


def connect(site: Site, shard: str) -> psycopg.Connection:
    """A connection to the server that leads a shard."""
    server = site.shards[shard]
    directory = site.run.sockets / server.name
    words = f"host={directory} port={server.port} user=postgres dbname=postgres connect_timeout=5"
    return psycopg.connect(words, autocommit=True)


def row_of(connection: psycopg.Connection, chain: int, n: int) -> int:
    """Writes a row, if it is not there; returns its transaction."""
    connection.execute(INSERT, (chain, n))
    (xid,) = connection.execute(FIND, (chain, n)).fetchone()
    return int(xid)


def dump(directory: Path, port: int) -> str:
    """All content of a server, as text that does not depend on when it was written, but for the state of sequences."""
    argv = [BIN_DIR / "pg_dumpall", "-h", directory, "-p", str(port), "-U", "postgres", "--no-role-passwords"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=WAIT_S, check=True)
    other = re.compile(r"--|\\(un)?restrict|SELECT pg_catalog.setval")
    return "\n".join(line for line in done.stdout.splitlines() if line and not other.match(line))


def chown(*paths: Path) -> None:
    """Gives files to the servers' user."""
    for path in paths:
        os.chown(path, UID, UID)
