"""Stock standbys of one shard at the backup site: they are given the log out of the store's journal, up to apply-to.

The primary is the image's PostgreSQL; the standbys are this machine's, which the programs under test run as an
unprivileged user.
"""

from __future__ import annotations

import contextlib
import json
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
from pathlib import Path

import pytest
from test_pgstream import (
    SETTINGS,
    WAIT_S,
    Program,
    bench,
    ends_of_commits,
    example,
    lsn,
    number,
    receive,
    transactions,
    wait_received,
)

from tidelock_testbed.netns import Netns
from tidelock_testbed.pgserver import PgServer
from tidelock_testbed.process import Process, wait_until

BIN_DIR = Path("/usr/lib/postgresql/15/bin")
USER = "postgres"
SOURCE = "host=127.0.0.1 port=5432 user=postgres"
SEGMENT = 1 << 20


def standbys_place(run) -> Path:
    """A directory that the unprivileged user reaches. Skips the test on a machine without PostgreSQL."""
    if not (BIN_DIR / "pg_basebackup").exists():
        pytest.skip(f"{BIN_DIR}/pg_basebackup is not there (Debian: postgresql-15)")
    try:
        pwd.getpwnam(USER)
    except KeyError:
        pytest.skip(f"there is no user {USER}")
    directory = Path(tempfile.mkdtemp(prefix="tl-", dir="/var/tmp"))
    directory.chmod(0o711)
    run.on_close("remove the standbys", lambda: shutil.rmtree(directory, ignore_errors=True))
    return directory


@pytest.fixture
def place(run):
    return standbys_place(run)


class Lab(Program):
    """`shard-lab`: a journal, and the servers that follow it."""

    def __init__(self, run, netns: Netns, place: Path, log: Path, name: str = "lab"):
        self.run, self.place, self.asked = run, place, 0
        argv = [example("shard-lab", "tidelock-standbys"), place, log, BIN_DIR, USER]
        self.process = Process(run, name, argv, netns, {"RUST_BACKTRACE": "1"}, stdin=subprocess.PIPE)
        self.wait_for("ready")

    def do(self, command: str) -> dict:
        """Has a command done, and returns its event."""
        before = len(self.ends(command))
        self.say(command)
        needs = [self.process]
        found = wait_until(command, lambda: self.ends(command)[before:], WAIT_S, needs)[0]
        if command.startswith("start "):
            self.note(command.split()[1])
        return found

    def ends(self, command: str) -> list[dict]:
        lines = self.process.log.read_text().split("\n")[:-1]
        events = [json.loads(line) for line in lines if line.startswith("{")]
        return [event for event in events if event.get("command") == command and event["event"] in ("done", "failed")]

    def done(self, command: str) -> dict:
        event = self.do(command)
        assert event["event"] == "done", event
        return event

    def failed(self, command: str) -> str:
        event = self.do(command)
        assert event["event"] == "failed", event
        return event["text"]

    def postmaster(self, name: str) -> int | None:
        try:
            return int((self.place / name / "own/data/postmaster.pid").read_text().split()[0])
        except (OSError, IndexError, ValueError):
            return None

    def note(self, name: str) -> None:
        """A server outlives the lab, and must not outlive the run."""

        def end() -> None:
            with contextlib.suppress(OSError, TypeError):
                pid = self.postmaster(name)
                if f"/{name}/own/data" in Path(f"/proc/{pid}/cmdline").read_text():
                    os.kill(pid, signal.SIGQUIT)
                    wait_until(f"{name} ends", lambda: not Path(f"/proc/{pid}").exists() or is_zombie(pid), WAIT_S)

        self.run.on_close(f"end {name}", end)

    def status(self, name: str) -> dict:
        return self.done(f"status {name}")["result"]

    def sql(self, name: str, port: int, text: str) -> str:
        words = ["-h", self.place / name / "own/run", "-p", port, "-U", "postgres", "-qAtX", "-c", text, "postgres"]
        argv = [str(word) for word in (BIN_DIR / "psql", *words)]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=WAIT_S)
        if done.returncode != 0:
            raise RuntimeError(done.stderr)
        return done.stdout

    def transactions(self, name: str, port: int) -> set[int]:
        return {int(xid) for xid in self.sql(name, port, "SELECT xmin::text FROM pgbench_history;").split()}

    def replayed(self, name: str) -> int:
        status = self.status(name)
        return number(status["replayed"]) if status["state"] == "standby" and status["replayed"] else 0

    def wait_replayed(self, name: str, up_to: int) -> None:
        wait_until(f"{name} has the log", lambda: self.replayed(name) >= up_to, WAIT_S, [self.process])


def is_zombie(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"


class Shard:
    """The primary, what is received of it, and the stamps under which the store takes it."""

    def __init__(self, run, image, netns: Netns, *more_ports: int):
        self.primary = PgServer(run, image, "primary", 1, netns, 5432, **SETTINGS)
        self.primary.start()
        self.primary.command("pgbench", "-h", "/run/postgresql", "-q", "-i", "-s", "1", "postgres")
        self.log = run.directory / "log"
        self.receiver = receive(run, netns, self.log, "shard", 5432, *more_ports)
        self.receiver.wait_for("started")
        self.stamp = 1
        self.timeline = 1

    def bench(self, count: int) -> None:
        bench(self.primary, count)
        wait_received(self.receiver, self.primary)

    @property
    def ends(self) -> dict[int, int]:
        return {
            xid: end
            for timeline in range(1, self.timeline + 1)
            for xid, end in ends_of_commits(self.log, timeline).items()
        }

    def first(self) -> int:
        """Begin of the first segment that was received."""
        name = min(path.name for path in self.log.iterdir() if len(path.name) == 24)
        return (int(name[8:16], 16) << 32) + int(name[16:], 16) * SEGMENT

    def expected(self, bound: int) -> set[int]:
        ends = self.ends
        return {xid for xid in transactions(self.primary) if ends.get(xid, 0) <= bound}

    def allow(self, lab: Lab, bound: int) -> None:
        """Moves apply-to, with log behind it that must wait."""
        self.stamp += 1
        lab.done(f"take {lsn(bound)} {self.stamp}")
        assert lab.done(f"allow {self.stamp}")["apply_to"] == lsn(bound)

    def follows(self, lab: Lab, name: str, port: int, bound: int) -> None:
        """Moves apply-to: the standby has every commit up to it then, and nothing past it."""
        self.allow(lab, bound)
        self.has(lab, name, port, bound)

    def has(self, lab: Lab, name: str, port: int, bound: int) -> None:
        expected = self.expected(bound)
        wait_until(f"{name} serves", lambda: lab.status(name)["state"] == "standby", WAIT_S, [lab.process])
        wait_until("all commits are there", lambda: lab.transactions(name, port) >= expected, WAIT_S, [lab.process])
        assert lab.transactions(name, port) == expected
        assert lab.replayed(name) <= bound
        assert max(number(event["flushed"]) for event in lab.events("status")) <= bound


def behind(wal: Path, bound: int) -> bytes:
    """Content of the standby's log files from a position on."""
    files = sorted(path for path in wal.iterdir() if len(path.name) == 24)
    first = f"{(bound >> 32):08X}{(bound & 0xFFFFFFFF) // SEGMENT:08X}"
    later = [path.read_bytes() for path in files if path.name[8:] >= first]
    return b"".join(later)[bound % SEGMENT :]


def test_a_standby_follows_apply_to_and_is_promoted_there(run, image, place):
    netns = Netns(run, "pg")
    shard = Shard(run, image, netns)
    shard.bench(20)
    lab = Lab(run, netns, place, shard.log)
    lab.done(f"begin {lsn(shard.first())} 1")
    lab.done("wal")
    lab.done("server east 6001")
    assert lab.done("check east 1000")["result"] == []
    assert "has room for" in lab.done(f"check east {1 << 60}")["result"][0]
    assert "there is no data" in lab.failed("start east standby")
    copied = lab.done(f"bootstrap east {SOURCE}")["result"]
    usable = number(copied["usable_from"])
    assert shard.first() <= number(copied["needs_from"]) <= usable
    assert any(0 < event["done_kib"] <= event["all_kib"] for event in lab.events("copying"))
    assert lab.done(f"bootstrap east {SOURCE}")["result"] == copied, "what is whole is left"

    # Before the end of the copy's own log it serves nobody, however long it is given no more.
    shard.bench(100)
    shard.allow(lab, usable - 8)
    lab.done("start east standby")
    assert lab.wait_for("started")["at"] == copied["needs_from"]
    lab.wait_for("status", lambda event: number(event["flushed"]) == usable - 8)
    assert lab.status("east")["state"] == "recovering"
    of_bench = sorted(end for end in shard.ends.values() if end > usable)
    # The last 8 bytes of a commit are what makes it one.
    shard.follows(lab, "east", 6001, of_bench[100] - 8)
    assert not any(behind(place / "east/own/data/pg_wal", of_bench[100] - 8)), "not a byte more"
    shard.follows(lab, "east", 6001, of_bench[100])
    assert Path(f"/proc/{lab.postmaster('east')}").owner() == USER

    # A base for views: a copy of the standby, which nobody starts.
    lab.done("server base 6002")
    base = f"host={place}/east/own/run port=6001 user=postgres"
    at_base = number(lab.done(f"bootstrap base {base}")["result"]["usable_from"])
    assert at_base <= of_bench[100]

    # The standby is killed.
    os.kill(lab.postmaster("east"), signal.SIGKILL)
    wait_until("it has ended", lambda: lab.status("east")["state"] == "stopped", WAIT_S, [lab.process])
    lab.done("start east standby")
    shard.follows(lab, "east", 6001, of_bench[160])

    # The server of the journal is killed: the standby goes on, and is found again.
    postmaster = lab.postmaster("east")
    lab.process.kill()
    lab = Lab(run, netns, place, shard.log, "lab-2")
    assert lab.status("east")["state"] == "standby"
    shard.follows(lab, "east", 6001, of_bench[200] - 8)
    assert lab.postmaster("east") == postmaster

    # The standby is deleted.
    assert "runs" in lab.failed("remove east")
    assert lab.done("stop east")["result"] == "Fast"
    lab.done("remove east")
    assert not (place / "east").exists()
    copied = lab.done(f"bootstrap east {SOURCE}")["result"]
    shard.bench(20)
    of_bench = sorted(shard.ends.values())
    again = next(at for at, end in enumerate(of_bench) if end > number(copied["usable_from"]))
    lab.done("start east standby")
    shard.follows(lab, "east", 6001, of_bench[again + 20] - 8)

    # A view at an earlier cut, while the standby is further.
    cut = next(end for end in of_bench if end > at_base + 3000)
    lab.done(f"server view 6003 {lsn(cut)}")
    lab.done("copy view base")
    lab.done("start view standby")
    lab.wait_replayed("view", cut)
    assert lab.transactions("view", 6003) == shard.expected(cut)
    assert lab.replayed("view") == cut
    with pytest.raises(RuntimeError, match="read-only"):
        lab.sql("view", 6003, "CREATE TABLE t();")
    lab.done(f"server older 6004 {lsn(at_base - 8)}")
    assert "an older copy is needed" in lab.failed("copy older base")
    lab.done("stop view")
    lab.done("remove view")

    # A copy of something else counts for nothing.
    lab.done("server wrong 6005 - 4711")
    assert "and the shard is system 4711" in lab.failed(f"bootstrap wrong {SOURCE}")
    assert "there is no data" in lab.failed("start wrong standby")

    # A disaster: what is beyond the watermark is there, and is not applied.
    final = of_bench[again + 60]
    shard.allow(lab, final)
    lab.done(f"take {lsn(of_bench[-1])} {shard.stamp + 1}")
    assert lab.done("recover")["apply_to"] == lsn(final)
    expected = shard.expected(final)
    assert expected < transactions(shard.primary)
    promoted = lab.done(f"promote east {lsn(final)}")["result"]
    print(f"promotion: {json.dumps(promoted)}")
    assert (promoted["replayed"], promoted["timeline"]) == (lsn(final), 2)
    assert lab.transactions("east", 6001) == expected
    lab.sql("east", 6001, "INSERT INTO pgbench_history(tid) VALUES (0);")
    assert lab.status("east")["state"] == "primary"
    assert lab.done("stop east")["result"] == "Fast"
    assert "that of a promoted server" in lab.failed("start east standby")
    lab.done("start east primary")
    assert lab.status("east")["timeline"] == 2
    lab.done("stop east")


def test_a_standby_that_the_journal_cannot_serve_is_named(run, image, place):
    netns = Netns(run, "pg")
    shard = Shard(run, image, netns)
    shard.bench(20)
    lab = Lab(run, netns, place, shard.log)
    lab.done(f"begin {lsn(shard.first())} 1")
    lab.done("wal")
    lab.done("server east 6001")
    copied = number(lab.done(f"bootstrap east {SOURCE}")["result"]["usable_from"])
    lab.done("server kept 6002")
    lab.done("copy kept east")
    shard.primary.command("pgbench", "-h", "/run/postgresql", "-n", "-q", "-i", "-s", "4", "postgres")
    shard.bench(20)
    of_bench = sorted(end for end in shard.ends.values() if end > copied)
    shard.allow(lab, of_bench[-1])
    lab.done("start east standby")
    lab.wait_replayed("east", of_bench[-1])
    # Segments of the journal go that only a copy of long ago would need.
    lab.done("forget")
    lab.done("start kept standby")
    ended = lab.wait_for("ended", lambda event: event["needs_copy"])
    assert ended["kind"] == "copy-anew" and "must be made anew" in ended["text"]
    assert lab.status("kept")["state"] == "recovering"
    lab.done("stop kept")
    lab.done("stop east")


def test_standbys_follow_a_failover_inside_the_primary_site(run, image, place):
    netns = Netns(run, "pg")
    shard = Shard(run, image, netns, 5433)
    heir_of = {"primary_conninfo": SOURCE, **SETTINGS}
    heir = PgServer(run, image, "heir", 1, netns, 5433, shard.primary, **heir_of)
    heir.start()
    lab = Lab(run, netns, place, shard.log)
    lab.done(f"begin {lsn(shard.first())} 1")
    lab.done("wal")
    lab.done("server east 6001")
    lab.done(f"bootstrap east {SOURCE}")
    lab.done("start east standby")
    shard.bench(20)
    before = transactions(shard.primary)
    shard.primary.stop()
    heir.sql("SELECT pg_promote();")
    switch = shard.receiver.wait_for("timeline-ends", lambda event: event["next"] == 2)
    shard.receiver.wait_for("started", lambda event: event["timeline"] == 2)
    shard.primary, shard.timeline = heir, 2
    shard.bench(20)

    # The timeline is told before its entries are taken, and the standby hears of it when apply-to is there.
    lab.done("wal")
    branch = number(switch["at"])
    of_heir = sorted(end for end in shard.ends.values() if end > branch)
    shard.follows(lab, "east", 6001, branch - 8)
    assert not lab.events("timeline-ended")
    shard.follows(lab, "east", 6001, branch)
    assert lab.transactions("east", 6001) == before
    shard.follows(lab, "east", 6001, of_heir[40] - 8)
    assert lab.events("timeline-ended")[0]["at"] == switch["at"]

    # A new copy, of the heir, begins on its timeline.
    lab.done("server west 6002")
    copied = lab.done(f"bootstrap west {SOURCE.replace('5432', '5433')}")["result"]
    assert copied["timeline"] == 2
    lab.done("start west standby")
    shard.bench(20)
    final = sorted(shard.ends.values())[-10]
    shard.allow(lab, final)
    for name, port in (("east", 6001), ("west", 6002)):
        shard.has(lab, name, port, final)
        # After a recovery each of them is promoted to a timeline that the primary site has not had.
        assert lab.done(f"promote {name} {lsn(final)}")["result"]["timeline"] == 3
        assert lab.transactions(name, port) == shard.expected(final)
        lab.done(f"stop {name}")
