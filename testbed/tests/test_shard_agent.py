"""The primary side of a PostgreSQL shard, against stock servers: commits arrive with their stamps, whatever happens at
the primary site. The backup is the example's own: `shard-agent` keeps what arrives in files."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from test_pgstream import SETTINGS, SLOT, WAIT_S, example, flushed, lsn, number

from tidelock_testbed.netns import Netns
from tidelock_testbed.pgserver import PgServer
from tidelock_testbed.process import Process, wait_until
from tidelock_testbed.run import Run


class Agent:
    """The example, whose lines are events."""

    def __init__(self, run: Run, netns: Netns, directory: Path, name: str, *ports: int, user: str = "postgres"):
        directory.mkdir(exist_ok=True)
        self.directory = directory
        argv = [example("shard-agent", "tidelock-shard-agent"), directory, SLOT, user]
        argv += [f"127.0.0.1:{port}" for port in ports]
        self.process = Process(run, f"shard-agent-of-{name}", argv, netns, stdin=subprocess.PIPE)

    def all(self) -> list[dict]:
        """Returns the events so far."""
        lines = self.process.log.read_text().split("\n")[:-1]
        return [json.loads(line) for line in lines if line.startswith("{")]

    def events(self, kind: str) -> list[dict]:
        """The events of a kind so far."""
        return [event for event in self.all() if event["event"] == kind]

    def wait_for(self, kind: str, condition=lambda _: True) -> dict:
        """Waits for an event, and returns the first that meets the condition."""

        def found() -> dict | None:
            return next(filter(condition, self.events(kind)), None)

        return wait_until(f"{self.process.name}: {kind}", found, WAIT_S, [self.process])

    def say(self, command: str) -> None:
        """Gives a command, and waits until it is obeyed."""
        before = len(self.events("command"))
        self.process.popen.stdin.write(f"{command}\n".encode())
        self.process.popen.stdin.flush()
        wait_until(command, lambda: len(self.events("command")) > before, WAIT_S, [self.process])

    def status(self) -> dict:
        """The status of now."""
        self.say("status")
        return self.events("status")[-1]["status"]

    def wait_status(self, what: str, condition) -> dict:
        """Waits until the status meets a condition."""

        def met() -> dict | None:
            status = self.status()
            return status if condition(status) else None

        return wait_until(f"{self.process.name}: {what}", met, WAIT_S, [self.process])

    def wait_shipped(self, server: PgServer) -> dict:
        """Waits until the backup has all that the server has written by now."""
        end = flushed(server)
        return self.wait_status(f"the backup has {lsn(end)}", lambda status: status["b_commit"] >= end)

    def entries(self) -> list[dict]:
        """The entries that the backup has got."""
        return self.events("entry")

    def trusted(self) -> None:
        """Waits until the server's stamps are believed."""
        self.wait_status("stamps are believed", lambda status: status["is_clock_trusted"])


def commits(first: int, *servers: PgServer) -> list[tuple[int, int]]:
    """Ends and stamps (ns since the Unix epoch) of the transactions in the log from a place on. Of a segment that
    several servers have, the one of the last timeline counts."""
    files = sorted((path.name, path) for server in servers for path in server.wal.iterdir())
    last = {name[8:]: path for name, path in files if len(name) == 24}
    histories = [path for name, path in files if name.endswith(".history")][-1:]
    chosen, at = [], first
    while path := last.get(f"{at >> 32:08X}{(at & 0xFFFFFFFF) >> 20:08X}"):
        chosen.append(path)
        at += 1 << 20
    argv = [example("wal-dump", "tidelock-wal"), "65536", *chosen, *histories]
    lines = subprocess.run(argv, capture_output=True, text=True, timeout=WAIT_S, check=True).stdout.splitlines()
    found = [json.loads(line) for line in lines]
    return [(number(item["end"]), item["unix_ns"]) for item in found if "unix_ns" in item]


def check_log(agents: list[Agent], *servers: PgServer) -> list[dict]:
    """Checks that the backup has the servers' log without a gap, and that each end of a transaction has an entry with
    its stamp: the greatest up to it, or one beyond a time of doubt. Returns the entries of transactions."""
    entries = [entry for agent in agents for entry in agent.entries()]
    assert entries[0]["jump"] and not any(entry["jump"] for entry in entries[1:])
    begin = end = number(entries[0]["end"])
    stamp, ends = 0, {}
    for entry in entries[1:]:
        end += entry["bytes"]
        assert number(entry["end"]) == end
        assert entry["stamp"] >= stamp
        stamp = entry["stamp"]
        ends[end] = entry
    assert (agents[0].directory / "log").stat().st_size == end - begin
    of_log = [(at, ns) for at, ns in commits(begin - begin % (1 << 20), *servers) if begin < at <= end]
    assert of_log
    greatest = 0
    for at, ns in of_log:
        entry = ends[at]
        if in_doubt(agents, entry):
            assert entry["unix_ns"] > ns
        else:
            greatest = max(greatest, ns)
            assert abs(entry["unix_ns"] - greatest) < 1000, (lsn(at), entry, ns)
    return [ends[at] for at, _ in of_log]


def in_doubt(agents: list[Agent], entry: dict) -> bool:
    """True of an entry in a time of which the backup was told that no cut in it is a prefix."""
    doubts = [doubt for agent in agents for doubt in agent.events("doubt")]
    return any(doubt["after"] < entry["stamp"] < doubt["through"] for doubt in doubts)


def own_stamps(agents: list[Agent], entries: list[dict]) -> int:
    """Number of entries that are in no time of doubt."""
    return sum(not in_doubt(agents, entry) for entry in entries)


def bench(server: PgServer, transactions: int) -> None:
    server.command("pgbench", "-h", "/run/postgresql", "-n", "-c", "4", "-t", transactions, "postgres")


MORE = {**SETTINGS, "wal_keep_size": "1GB"}
"""The whole log stays, to compare with."""


def initialise(server: PgServer) -> None:
    server.start()
    server.command("pgbench", "-h", "/run/postgresql", "-q", "-i", "-s", "1", "postgres")


def test_commits_arrive_with_their_stamps_whatever_happens_to_server_and_agent(run, image):
    netns = Netns(run, "pg")
    server = PgServer(run, image, "server", 1, netns, 5432, **MORE)
    initialise(server)
    directory = run.directory / "backup"
    agent = Agent(run, netns, directory, "first", 5432)
    agent.trusted()
    bench(server, 100)
    agent.wait_shipped(server)
    entries = check_log([agent], server)
    assert len(entries) >= 400 and own_stamps([agent], entries) >= 350
    assert not agent.status()["stands"]

    # The server is killed, recovers, and goes on.
    server.stop(immediate=True)
    stands = agent.wait_for("stands", lambda event: "no server" in (event["reason"] or ""))
    assert "host 0" in stands["reason"]
    server.start()
    bench(server, 50)
    agent.wait_shipped(server)

    # The agent is killed. Another one asks the backup where it stands, and does not know what the clock was meanwhile.
    agent.process.kill()
    bench(server, 50)
    second = Agent(run, netns, directory, "second", 5432)
    second.trusted()
    bench(server, 50)
    second.wait_shipped(server)
    entries = check_log([agent, second], server)
    assert len(entries) >= 1000 and own_stamps([agent, second], entries[-200:]) >= 150
    assert in_doubt([second], entries[-350])

    # While the clock is not believed, the log stands, loudly, from the first commit on.
    second.say("clock bad")
    before = second.status()["b_commit"]
    bench(server, 25)
    held = second.wait_status("commits are held", lambda status: status["held"] >= 100)
    assert held["stands"]["kind"] == "clock-not-believed" and "ptp4l" in held["stands"]["text"]
    ends = [at for at, _ in commits(before - before % (1 << 20), server) if at > before]
    assert held["b_commit"] < ends[0]
    second.say("clock good")
    second.wait_shipped(server)
    bench(server, 25)
    second.wait_shipped(server)
    assert len(check_log([agent, second], server)) >= 1200
    assert not second.status()["stands"]


def test_a_promoted_standby_goes_on_and_an_old_primary_is_refused(run, image):
    netns = Netns(run, "pg")
    primary = PgServer(run, image, "primary", 1, netns, 5432, **MORE)
    initialise(primary)
    agent = Agent(run, netns, run.directory / "backup", "shard", 5432, 5433)
    agent.trusted()
    heir_of = {"primary_conninfo": "host=127.0.0.1 port=5432 user=postgres application_name=heir"}
    heir = PgServer(run, image, "heir", 1, netns, 5433, primary, **heir_of, **MORE)
    heir.start()
    primary.sql("ALTER SYSTEM SET synchronous_standby_names = 'heir'; SELECT pg_reload_conf();")
    agent.wait_status("the standby is seen", lambda status: status["synchronous_standby_names"] == "heir")
    bench(primary, 50)
    agent.wait_shipped(primary)

    # Log that the synchronous standby lacks stays at home.
    heir.stop(immediate=True)
    end = flushed(primary)
    commit = "SET synchronous_commit = local; INSERT INTO pgbench_history(tid) VALUES (1);"
    primary.sql(commit)
    status = agent.wait_status("the standby is missed", lambda status: (status["stands"] or {}).get("kind"))
    assert status["stands"]["kind"] == "standbys-missing"
    agent.wait_status("the log is received", lambda status: status["received"] > end)
    assert agent.status()["b_commit"] <= end
    heir.start()
    agent.wait_shipped(primary)
    assert not agent.wait_status("the standby is back", lambda status: not status["stands"])["stands"]

    # The primary dies; the heir is refused while it is a standby, and used as soon as it is promoted.
    primary.stop(immediate=True)
    agent.wait_for("failed", lambda event: event["kind"] == "in-recovery")
    assert agent.status()["stands"]["kind"] == "no-server"
    heir.sql("SELECT pg_promote();")
    agent.wait_for("origin", lambda event: event["timeline"] == 2)
    agent.trusted()
    bench(heir, 50)
    agent.wait_shipped(heir)
    check_log([agent], primary, heir)

    # The old primary comes back while the new one is away.
    heir.stop()
    settings = primary.settings
    primary.settings = {**settings, "synchronous_standby_names": ""}
    primary.start()
    primary.sql("CREATE TABLE diverged AS SELECT generate_series(1, 1000);")
    refused = agent.wait_for("failed", lambda event: event["host"] == 0 and event["kind"] == "old-timeline")
    assert "pg_rewind" in refused["advice"]
    end = agent.status()["b_commit"]
    heir.start()
    agent.wait_status("the heir is back", lambda status: not status["stands"])
    agent.trusted()
    bench(heir, 25)
    agent.wait_shipped(heir)
    assert agent.status()["b_commit"] > end
    check_log([agent], primary, heir)


def test_a_slot_that_is_gone_has_a_name_and_a_way_on(run, image):
    netns = Netns(run, "pg")
    server = PgServer(run, image, "server", 1, netns, 5432, **SETTINGS)
    initialise(server)
    agent = Agent(run, netns, run.directory / "backup", "shard", 5432)
    agent.trusted()
    agent.wait_shipped(server)

    def drop() -> None:
        server.sql("SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots;")
        server.sql(f"SELECT pg_drop_replication_slot('{SLOT}');")

    def dropped() -> None:
        wait_until("the slot is free", lambda: not attempt(drop), WAIT_S, [server.process])

    dropped()
    failed = agent.wait_for("failed", lambda event: event["kind"] == "slot-missing")
    assert not failed["passing"] and "made again" in failed["advice"]
    bench(server, 10)
    assert agent.status()["stands"]["kind"] == "no-server"
    # The server still has the log: no gap.
    agent.say("make-slot")
    agent.wait_shipped(server)
    check_log([agent], server)

    # The backup is away, and the server may drop what the slot keeps.
    agent.say("backup down")
    assert agent.status()["stands"]["kind"] == "no-backup"
    agent.process.kill()
    server.sql("ALTER SYSTEM SET max_slot_wal_keep_size = '1MB';")
    server.sql("ALTER SYSTEM SET wal_keep_size = 0; SELECT pg_reload_conf();")
    for _ in range(6):
        server.sql("CREATE TABLE t AS SELECT 1; DROP TABLE t; SELECT pg_switch_wal();")
    wait_until(
        "the slot is lost",
        lambda: server.sql("CHECKPOINT; SELECT wal_status FROM pg_replication_slots;").strip() == "lost",
        WAIT_S,
        [server.process],
    )
    second = Agent(run, netns, run.directory / "backup", "second", 5432)
    lost = second.wait_for("failed", lambda event: event["kind"] == "slot-lost")
    assert not lost["passing"] and "pg_drop_replication_slot" in lost["advice"]
    # A copy of the shard covers the gap: the log goes on behind it, and no cut within it is served.
    server.sql(f"SELECT pg_drop_replication_slot('{SLOT}');")
    end = second.status()["b_commit"]
    second.say("copied-anew")
    second.trusted()
    bench(server, 10)
    second.wait_shipped(server)
    jumps = [entry for entry in second.entries() if entry["jump"]]
    assert len(jumps) == 1 and number(jumps[0]["end"]) > end
    doubt = second.events("doubt")[0]
    assert doubt["through"] > jumps[0]["stamp"] > doubt["after"]


def attempt(action) -> Exception | None:
    """Does something that may fail; returns the failure."""
    try:
        return action()
    except RuntimeError as error:
        return error


def test_nops_appear_only_while_another_shard_writes(run, image):
    netns = Netns(run, "pg")
    server = PgServer(run, image, "server", 1, netns, 5432, **MORE)
    initialise(server)
    # A role with what the manual asks for, and no more.
    server.sql("CREATE ROLE shard LOGIN REPLICATION; GRANT pg_monitor TO shard;")
    agent = Agent(run, netns, run.directory / "backup", "shard", 5432, user="shard")
    agent.trusted()
    agent.wait_shipped(server)
    xid = "SELECT pg_current_xact_id_if_assigned(), pg_snapshot_xmax(pg_current_snapshot());"
    before = server.sql(xid)
    # Any number of looks.
    looks = agent.status()["watermark_us"]
    assert looks == 0
    agent.trusted()
    assert not [entry for entry in agent.entries() if entry["nop"] and not entry["jump"]]
    assert server.sql(xid) == before, "a store without writes is silent"

    for count in range(1, 4):
        agent.say("updated")
        nops = wait_until(
            "a NOP arrives",
            lambda count=count: [entry for entry in agent.entries() if entry["nop"] and not entry["jump"]][count - 1 :],
            WAIT_S,
            [agent.process],
        )
        assert nops[0]["stamp"] > 0
    agent.wait_shipped(server)
    # A commit of a client is none.
    server.sql("INSERT INTO pgbench_history(tid) VALUES (1);")
    agent.wait_shipped(server)
    assert not agent.entries()[-1]["nop"]
    check_log([agent], server)
