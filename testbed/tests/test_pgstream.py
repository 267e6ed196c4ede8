"""Both ends of PostgreSQL's replication, against stock servers: a log is received over a promotion, and a stock standby
is given it up to a bound."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tidelock_testbed.netns import Netns
from tidelock_testbed.paths import BIN
from tidelock_testbed.pgserver import PgServer
from tidelock_testbed.process import Process, wait_until
from tidelock_testbed.run import Run

WAIT_S = 120
SLOT = "tidelock"
PASSWORD = "s3cret, with a comma"
SETTINGS = {"wal_level": "replica", "fsync": "off", "min_wal_size": "2MB", "max_wal_size": "2GB", "autovacuum": "off"}


def number(lsn: str) -> int:
    upper, lower = lsn.split("/")
    return int(upper, 16) << 32 | int(lower, 16)


def lsn(place: int) -> str:
    return f"{place >> 32:X}/{place & 0xFFFFFFFF:X}"


def example(name: str, package: str = "tidelock-pgstream") -> Path:
    program = BIN / "examples" / name
    assert program.exists(), f"{program} is missing: cargo build --profile bench -p {package} --examples"
    return program


class Program:
    """One of the examples, whose lines are events."""

    def __init__(self, run: Run, netns: Netns, name: str, *words: object, password: str | None = None):
        env = {"PGPASSWORD": password} if password else {}
        argv = [example(name.split("-of-")[0]), *words]
        self.process = Process(run, name, argv, netns, env, stdin=subprocess.PIPE)

    def events(self, kind: str) -> list[dict]:
        """The events of a kind so far."""
        lines = self.process.log.read_text().split("\n")[:-1]
        events = [json.loads(line) for line in lines if line.startswith("{")]
        return [event for event in events if event["event"] == kind]

    def wait_for(self, kind: str, condition=lambda _: True) -> dict:
        """Waits for an event, and returns the first that meets the condition."""

        def found() -> dict | None:
            return next(filter(condition, self.events(kind)), None)

        return wait_until(f"{self.process.name}: {kind}", found, WAIT_S, [self.process])

    def end(self) -> dict:
        """Waits until it has ended by itself, and returns the failure that it named."""
        assert self.process.wait(WAIT_S) == 1, self.process.tail()
        return self.events("failed")[-1]

    def say(self, line: str) -> None:
        self.process.popen.stdin.write(f"{line}\n".encode())
        self.process.popen.stdin.flush()


def receive(run: Run, netns: Netns, directory: Path, name: str, *ports: int, user: str = "postgres", **more) -> Program:
    directory.mkdir(exist_ok=True)
    hosts = [f"127.0.0.1:{port}" for port in ports]
    return Program(run, netns, f"wal-receive-of-{name}", directory, SLOT, user, *hosts, **more)


def received(program: Program) -> int:
    """End of what is durable in the directory."""
    return max((number(event["lsn"]) for event in program.events("flushed")), default=0)


def flushed(server: PgServer) -> int:
    return number(server.sql("SELECT pg_current_wal_flush_lsn();").strip())


def replayed(server: PgServer) -> int:
    return number(server.sql("SELECT pg_last_wal_replay_lsn();").strip())


def wait_received(program: Program, server: PgServer) -> None:
    """Waits until all that the server has written by now is in the directory."""
    end = flushed(server)
    wait_until("the log is received", lambda: received(program) >= end, WAIT_S, [program.process])


def bench(server: PgServer, transactions: int) -> None:
    server.command("pgbench", "-h", "/run/postgresql", "-n", "-c", "4", "-t", transactions, "postgres")


def ends_of_commits(directory: Path, timeline: int) -> dict[int, int]:
    """Ends of the commit records in the received log, by transaction."""
    names = sorted(path.name for path in directory.iterdir() if len(path.name) == 24)
    chosen = {name[8:]: name for name in names if int(name[:8], 16) <= timeline}
    files = [directory / chosen[name] for name in sorted(chosen)]
    histories = [directory / f"{timeline:08X}.history"] if timeline > 1 else []
    argv = [example("wal-dump", "tidelock-wal"), "65536", *files, *histories]
    lines = subprocess.run(argv, capture_output=True, text=True, timeout=WAIT_S, check=True).stdout.splitlines()
    items = [json.loads(line) for line in lines]
    return {item["xid"]: number(item["end"]) for item in items if item.get("kind") == "COMMIT"}


def transactions(server: PgServer) -> set[int]:
    """Transactions of pgbench that the server shows: each writes one row of the history."""
    return {int(xid) for xid in server.sql("SELECT xmin::text FROM pgbench_history;").split()}


class Bounded:
    """A stock standby of `wal-serve`, and the log that it is given."""

    def __init__(self, serve: Program, standby: PgServer, all_transactions):
        self.serve, self.standby, self.all = serve, standby, all_transactions

    def check(self, bound: int, ends: dict[int, int]) -> set[int]:
        """Moves the bound; the standby has every commit up to it then, and nothing past it."""
        self.serve.say(lsn(bound))
        self.serve.wait_for("status", lambda event: number(event["flushed"]) >= bound)
        expected = {xid for xid in self.all() if ends.get(xid, 0) <= bound}
        needs = [self.standby.process, self.serve.process]
        wait_until("all commits are there", lambda: transactions(self.standby) >= expected, WAIT_S, needs)
        assert transactions(self.standby) == expected
        assert replayed(self.standby) <= bound
        assert max(number(event["flushed"]) for event in self.serve.events("status")) == bound
        return expected


def test_a_standby_is_given_the_log_up_to_a_bound_over_a_promotion(run, image):
    netns = Netns(run, "pg")
    primary = PgServer(run, image, "primary", 1, netns, 5432, **SETTINGS)
    primary.start()
    primary.command("pgbench", "-h", "/run/postgresql", "-q", "-i", "-s", "1", "postgres")
    directory = run.directory / "log"
    receiver = receive(run, netns, directory, "shard", 5432, 5433)
    receiver.wait_for("started")

    heir_of = "host=127.0.0.1 port=5432 user=postgres"
    heir = PgServer(run, image, "heir", 1, netns, 5433, primary, primary_conninfo=heir_of, **SETTINGS)
    heir.start()
    serve_at = f"host=127.0.0.1 port=6000 user=standby password='{PASSWORD}' application_name=far"
    # A slot of its own, as an operator may have configured it.
    far = {"primary_conninfo": serve_at, "primary_slot_name": "far", "wal_receiver_status_interval": "1s"}
    standby = PgServer(run, image, "standby", 1, netns, 5434, primary, **SETTINGS, **far)
    bench(primary, 100)
    wait_received(receiver, primary)
    serve = Program(run, netns, "wal-serve", directory, "127.0.0.1:6000", "standby", password=PASSWORD)
    serve.wait_for("listening")
    bounded = Bounded(serve, standby, lambda: transactions(primary))

    ends = ends_of_commits(directory, 1)
    of_bench = sorted(ends[xid] for xid in transactions(primary))
    assert len(of_bench) == 400
    # The last 8 bytes of a commit are what makes it one.
    serve.say(lsn(of_bench[100] - 8))
    standby.start()
    assert len(bounded.check(of_bench[100] - 8, ends)) == 100
    assert len(bounded.check(of_bench[100], ends)) == 101
    assert len(bounded.check(of_bench[300] - 8, ends)) == 300
    assert serve.events("logged-in")[0]["name"] == "far"
    assert serve.events("started")[0]["slot"] == "far"
    with pytest.raises(RuntimeError, match="BASE_BACKUP is not offered here"):
        copy = ["-d", serve_at.replace(" application_name=far", ""), "-D", "/data/never", "-X", "none"]
        standby.command("pg_basebackup", *copy)

    # A failover inside the primary site: nobody tells the receiver.
    bench(primary, 50)
    before = transactions(primary)
    # In order, so that heir and receiver have the same: it ends when both have confirmed all that it wrote.
    primary.stop()
    heir.sql("SELECT pg_promote();")
    switch = receiver.wait_for("timeline-ends", lambda event: event["next"] == 2)
    receiver.wait_for("started", lambda event: event["timeline"] == 2 and event["at"] == switch["at"])
    bench(heir, 100)
    wait_received(receiver, heir)
    bounded.all = lambda: transactions(heir)
    assert transactions(heir) > before

    ends = {**ends_of_commits(directory, 1), **ends_of_commits(directory, 2)}
    branch = number(switch["at"])
    of_heir = sorted(ends[xid] for xid in transactions(heir) - before)
    assert of_heir[0] > branch >= max(ends[xid] for xid in before)
    # Up to the branch the standby knows of one timeline only.
    bounded.check(branch - 8, ends)
    assert not serve.events("timeline-ended")
    assert bounded.check(branch, ends) == before
    assert len(bounded.check(of_heir[50] - 8, ends)) == len(before) + 50
    assert serve.events("timeline-ended")[0]["at"] == switch["at"]
    assert standby.sql("SELECT received_tli FROM pg_stat_wal_receiver;").strip() == "2"
    assert len(bounded.check(of_heir[-1], ends)) == len(before) + 400

    # The standby has what the heir has, and takes writes.
    standby.sql("SELECT pg_promote();")
    sums = "SELECT sum(abalance), (SELECT sum(delta) FROM pgbench_history) FROM pgbench_accounts;"
    assert standby.sql(sums) == heir.sql(sums)
    standby.sql("INSERT INTO pgbench_history(tid) VALUES (0);")


METHODS = {"scram": "scram-sha-256", "md5": "md5", "password": "password", "trust": "trust"}
"""Roles, and the method by which each of them logs in."""


def hba(server: PgServer) -> None:
    """Lets each role replicate by its method, and the superuser by none."""
    lines = [f'host replication "{role}" 127.0.0.1/32 {method}' for role, method in METHODS.items()]
    lines += ["local all postgres trust", "host all,replication postgres 127.0.0.1/32 trust"]
    (server.data / "pg_hba.conf").write_text("\n".join(lines) + "\n")


def test_logins_and_failures_have_names(run, image):
    netns = Netns(run, "pg")
    server = PgServer(run, image, "server", 1, netns, 5432, **SETTINGS)
    hba(server)
    server.start()
    for role in METHODS:
        kind = "md5" if role == "md5" else "scram-sha-256"
        server.sql(f"SET password_encryption = '{kind}'; CREATE ROLE {role} REPLICATION LOGIN PASSWORD '{PASSWORD}';")
    server.sql("CREATE ROLE stranger LOGIN;")
    logs = run.directory

    for role in METHODS:
        password = None if role == "trust" else PASSWORD
        receiver = receive(run, netns, logs / "log", role, 5432, user=role, password=password)
        receiver.wait_for("flushed")
        receiver.process.kill()
    for role in ("scram", "md5", "password"):
        wrong = receive(run, netns, logs / "log", f"{role}-wrong", 5432, user=role, password="wrong")
        assert wrong.end()["kind"] == "password-wrong"
        without = receive(run, netns, logs / "log", f"{role}-without", 5432, user=role)
        assert without.end()["kind"] == "authentication"
    assert receive(run, netns, logs / "log", "stranger", 5432, user="stranger").end()["kind"] == "not-allowed"

    receiver = receive(run, netns, logs / "log", "first", 5432)
    receiver.wait_for("started")
    # The slot exists, and another connection has it: what may pass is tried again.
    second = receive(run, netns, logs / "other-log", "second", 5432)
    failed = second.wait_for("failed")
    assert (failed["kind"], failed["passing"]) == ("slot-in-use", True)
    second.process.kill()
    wait_received(receiver, server)
    receiver.process.kill()

    # The server may drop what the slot keeps.
    server.sql("ALTER SYSTEM SET max_slot_wal_keep_size = '1MB'; SELECT pg_reload_conf();")
    for _ in range(6):
        server.sql("CREATE TABLE t AS SELECT 1; DROP TABLE t; SELECT pg_switch_wal();")
    wait_until(
        "the slot is lost",
        lambda: server.sql("CHECKPOINT; SELECT wal_status FROM pg_replication_slots;").strip() == "lost",
        WAIT_S,
        [server.process],
    )
    lost = receive(run, netns, logs / "log", "lost", 5432).end()
    assert (lost["kind"], lost["passing"]) == ("slot-lost", False)

    server.sql(f"SELECT pg_drop_replication_slot('{SLOT}');")
    dropped = receive(run, netns, logs / "log", "dropped", 5432).end()
    assert dropped["kind"] == "slot-missing" and f'"{SLOT}" does not exist' in dropped["text"]
    # A log that nobody keeps: the slot is made, and the log from before it is gone.
    (logs / "log" / "slots").unlink()
    assert receive(run, netns, logs / "log", "removed", 5432).end()["kind"] == "wal-removed"
