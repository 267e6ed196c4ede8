"""Faults of a sharded store on real processes. While clients write causal chains over all shards, and whatever happens:
no cut that the backup ever names is inconsistent, the watermark comes back by itself, and what is promoted has the
cut's content."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from stores_site import Clients, ClockSite, Row, Site, dump, missing
from test_pgstream import flushed

from tidelock_testbed.process import wait_until

WAIT_S = 180
TWO_HOSTS = {"host-a": ["s0"], "host-b": ["s1"]}
ONE_HOST = {"host-a": ["s0", "s1"]}


def wait_standbys(site: Site) -> None:
    """Waits until each shard has a standby that follows."""
    for nth in range(len(site.names)):
        wait_until(
            f"s{nth} has a standby", lambda nth=nth: site.standby(nth).get("state") == "following", WAIT_S, site.needs()
        )


def wait_failure(site: Site, shard: str, kind: str) -> str:
    """Waits until the host names this failure of a shard's server; returns what it advises."""

    def named() -> str | None:
        failures = site.at_home("host-a", shard)["failures"]
        return next((of["advice"] for of in failures if of and of["kind"] == kind), None)

    return wait_until(f"{shard}: {kind}", named, WAIT_S, site.needs())


def test_whatever_is_killed_no_cut_is_inconsistent_and_the_watermark_comes_back(run, image):
    site = Site(run, image, TWO_HOSTS)
    site.watch()
    site.start_daemons()
    clients = Clients(site)
    wait_standbys(site)
    clients.wait(20)
    site.wait_covered(clients)

    # The agents of one host.
    site.hosts["host-b"].daemon.kill()
    site.wait_named("s1")
    clients.wait(20)
    site.start_daemon("host-b")
    site.wait_covered(clients)

    # The agents and the watermark service of the backup, and it comes back to a log that has grown.
    site.backup.process.kill()
    clients.wait(20)
    site.backup.start()
    site.wait_covered(clients)

    # Both ends of the link at once.
    site.hosts["host-a"].daemon.kill()
    site.backup.process.kill()
    clients.wait(20)
    site.backup.start()
    site.start_daemon("host-a")
    site.wait_covered(clients)

    # A shard's server, which recovers.
    site.shards["s0"].stop(immediate=True)
    site.wait_named("s0", "no server")
    site.shards["s0"].start()
    clients.wait(20)
    site.wait_covered(clients)

    # A standby: no cut waits for it.
    killed = site.postmaster("s1")
    os.kill(killed, signal.SIGKILL)
    clients.wait(20)
    site.wait_covered(clients)
    # PostgreSQL takes a process that nobody has waited for yet for one that runs.
    wait_until("it is gone", lambda: not Path(f"/proc/{killed}").exists(), WAIT_S)
    wait_until("it is started again", lambda: site.postmaster("s1") not in (killed, None), WAIT_S, site.needs())
    wait_until("it serves", lambda: site.sql_at(1, "SELECT 1;"), WAIT_S, site.needs())

    # The disaster takes clients in the middle of their chains.
    clients.wait(5)
    report = site.recover()
    rows = clients.stop()
    assert site.check_cuts(rows) > 10
    kept = site.check_promoted(report, rows)
    assert len(kept) > 100 * 3


def test_a_leader_fails_over_to_a_synchronous_standby_and_no_cut_is_inconsistent(run, image):
    site = Site(run, image, ONE_HOST)
    primary = site.shards["s0"]
    heir_of = {"primary_conninfo": f"host=127.0.0.1 port={primary.port} user=postgres application_name=heir"}
    heir = site.add_server("s0", site.hosts["host-a"], primary, **heir_of)
    primary.sql("ALTER SYSTEM SET synchronous_standby_names = 'heir'; SELECT pg_reload_conf();")
    site.watch()
    site.start_daemons()
    clients = Clients(site)
    wait_standbys(site)
    clients.wait(20)
    site.wait_covered(clients)

    primary.stop(immediate=True)
    site.wait_named("s0", "no server")
    heir.sql("SELECT pg_promote();")
    site.shards["s0"] = heir
    clients.wait(20)
    site.wait_covered(clients)
    assert site.of_shard("s0")["timeline"] == 2
    wait_standbys(site)

    # The old primary comes back as if nothing had happened. Nobody ships what it writes.
    primary.settings = {**primary.settings, "synchronous_standby_names": ""}
    primary.start()
    primary.sql("INSERT INTO rows VALUES (-2, 1);")
    clients.wait(20)
    site.wait_covered(clients)
    report = site.recover()
    rows = clients.stop()
    site.check_cuts(rows)
    site.check_promoted(report, rows)
    with site.promoted(report, "s0") as connection:
        assert connection.execute("SELECT count(*) FROM rows WHERE chain = -2").fetchone() == (0,)


def test_a_shard_that_is_added_takes_no_cut_back(run, image):
    site = Site(run, image, ONE_HOST)
    site.watch()
    site.start_daemons()
    clients = Clients(site)
    wait_standbys(site)
    clients.wait(20)
    site.wait_covered(clients)
    before = site.status()["watermark"]

    host = site.hosts["host-a"]
    host.daemon.kill()
    host.shards.append("s2")
    # From here on chains go over three shards: the backup hears of the third later.
    site.add_server("s2", host)
    clients.wait(30)
    site.start_daemon("host-a")
    site.wait_covered(clients)
    assert site.status()["watermark"] >= before
    wait_standbys(site)
    report = site.recover()
    rows = clients.stop()
    assert {row.shard for row in rows} == {"s0", "s1", "s2"}
    site.check_cuts(rows)
    site.check_promoted(report, rows)


def test_damage_in_a_log_is_refused_by_name_and_costs_no_cut(run, image):
    site = Site(run, image, ONE_HOST)
    site.watch()
    site.start_daemons()
    clients = Clients(site)
    wait_standbys(site)
    clients.wait(20)
    site.wait_covered(clients)

    # While nobody ships it, a bit of a record on disk flips.
    site.hosts["host-a"].daemon.kill()
    damaged = site.shards["s1"]
    begin = flushed(damaged)
    damaged.sql("INSERT INTO rows VALUES (-3, 1, repeat('damaged', 100));")
    end = flushed(damaged)
    # The server writes whole pages again as long as they are not full.
    damaged.sql("SELECT pg_switch_wal();")
    path = damaged.wal / f"00000001{end >> 32:08X}{(end & 0xFFFFFFFF) >> 20:08X}"
    at = path.read_bytes().rindex(b"damageddamaged")
    assert begin >> 20 == end >> 20 and begin % (1 << 20) < at < end % (1 << 20)
    with path.open("r+b") as file:
        file.seek(at)
        file.write(b"D")
    clients.wait(20)
    site.start_daemon("host-a")
    site.wait_stands("host-a", "s1", "no-server")
    wait_failure(site, "s1", "checksum")
    site.wait_named("s1", "checksum")
    assert site.applied()["s1"] < end
    # Readers of the standby go on, and clients, too.
    clients.wait(20)
    assert site.standby(1)["state"] == "following"

    with path.open("r+b") as file:
        file.seek(at)
        file.write(b"d")
    site.wait_covered(clients)
    report = site.recover()
    rows = clients.stop()
    site.check_cuts(rows)
    site.check_promoted(report, rows)


HUGE = 5 << 20
"""More than the segments of the log that it takes."""


def test_all_that_postgresql_does_is_in_the_promoted_servers(run, image):
    site = Site(run, image, ONE_HOST)
    site.watch()
    site.start_daemons()
    wait_standbys(site)
    clients = Clients(site, chains=1)
    s0, s1 = (site.shards[name] for name in ("s0", "s1"))
    s0.sql(
        """
        CREATE TABLE parts (id int, at timestamptz DEFAULT now()) PARTITION BY RANGE (id);
        CREATE TABLE parts_1 PARTITION OF parts FOR VALUES FROM (0) TO (1000);
        INSERT INTO parts SELECT generate_series(0, 999);
        CREATE INDEX ON parts (at);
        ALTER TABLE parts ADD COLUMN more text DEFAULT 'more';
        CREATE TABLE gone AS SELECT generate_series(1, 10000);
        TRUNCATE gone;
        DROP TABLE gone;
        CREATE SEQUENCE numbers;
        SELECT nextval('numbers') FROM generate_series(1, 100);
        CREATE FUNCTION one() RETURNS int LANGUAGE sql AS 'SELECT 1';
        CREATE ROLE reader;
        GRANT SELECT ON parts TO reader;
        CREATE DATABASE other;
        VACUUM FULL parts;
        SELECT lo_from_bytea(4711, decode(repeat('c0ffee', 1000000), 'hex'));
        SELECT lo_put(4711, 1000, 'tea');
        """
    )
    # One record over many pages and segments, and a commit that names a thousand transactions.
    s0.sql(f"SELECT pg_logical_emit_message(true, 'app', repeat('x', {HUGE}));")
    s0.sql(
        "CREATE TABLE nested (id int);\n"
        "DO $$ BEGIN FOR i IN 1..1000 LOOP BEGIN INSERT INTO nested VALUES (i); EXCEPTION WHEN OTHERS THEN NULL; END;"
        " END LOOP; END $$;"
    )
    # In two phases over both shards: one that ends, and one that is in doubt for ever.
    for name in ("ends", "stays"):
        for server in (s0, s1):
            server.sql(f"BEGIN;\nINSERT INTO rows VALUES (-4, {len(name)}, '{name}');\nPREPARE TRANSACTION '{name}';")
    for server in (s0, s1):
        server.sql("COMMIT PREPARED 'ends';")
    clients.wait(10)
    rows = clients.stop()
    # Answered before it is durable at home, and then it is: only then the backup gets it.
    s1.sql("SET synchronous_commit = off;\nINSERT INTO rows VALUES (-5, 1);")
    for name, server in site.shards.items():
        server.sql("SELECT pg_logical_emit_message(true, 'app', 'the last');")
        end = flushed(server)
        wait_until(f"{name} is applied", lambda name=name, end=end: site.applied()[name] >= end, WAIT_S, site.needs())
    expected = {name: dump(run.sockets / name, server.port) for name, server in site.shards.items()}
    report = site.recover()
    site.check_cuts(rows)
    for name in site.names:
        with site.promoted(report, name) as connection:
            info = connection.info
            assert dump(Path(info.host), info.port) == expected[name], name
            if name == "s0":
                # The log has it by 32 numbers at once, so some may be left out, as after a crash at home.
                (number,) = connection.execute("SELECT nextval('numbers')").fetchone()
                assert number > 100
            prepared = connection.execute("SELECT gid FROM pg_prepared_xacts").fetchall()
            assert prepared == [("stays",)]
            connection.execute("COMMIT PREPARED 'stays'")
            found = connection.execute("SELECT text FROM rows WHERE chain = -4 ORDER BY n").fetchall()
            assert found == [("ends",), ("stays",)]


def test_what_a_crash_undid_at_home_is_not_at_the_backup(run, image):
    site = Site(run, image, ONE_HOST)
    site.watch()
    site.start_daemons()
    wait_standbys(site)
    # Nobody writes the log of such commits while this test runs.
    s0 = site.shards["s0"]
    s0.sql(
        "ALTER SYSTEM SET wal_writer_delay = '10s';\nALTER SYSTEM SET wal_writer_flush_after = 0;\n"
        "SELECT pg_reload_conf();"
    )
    clients = Clients(site)
    clients.wait(10)
    clients.stop()
    lost = 0
    for number in range(20):
        s0.sql(f"SET synchronous_commit = off;\nINSERT INTO rows VALUES (-6, {number});")
        s0.stop(immediate=True)
        s0.start()
        lost += s0.sql(f"SELECT count(*) FROM rows WHERE (chain, n) = (-6, {number});").strip() == "0"
        if lost:
            break
    assert lost, "no commit was undone"
    more = Clients(site, first=11)
    more.wait(10)
    site.wait_covered(more)
    assert site.stand("host-a", "s0") is None
    expected = s0.sql("SELECT n FROM rows WHERE chain = -6 ORDER BY n;").split()
    report = site.recover()
    rows = clients.rows() + more.stop()
    site.check_cuts(rows)
    with site.promoted(report, "s0") as connection:
        found = connection.execute("SELECT n::text FROM rows WHERE chain = -6 ORDER BY n").fetchall()
    assert [n for (n,) in found] == expected


def test_a_slot_that_is_dropped_is_made_again_without_a_gap(run, image):
    site = Site(run, image, ONE_HOST)
    site.watch()
    site.start_daemons()
    clients = Clients(site)
    wait_standbys(site)
    clients.wait(10)
    site.wait_covered(clients)

    s1 = site.shards["s1"]
    assert site.at_home("host-a", "s1")["slot"]["wal_status"] == "reserved"
    slots = "SELECT slot_name, active_pid FROM pg_replication_slots;"
    name, before = s1.sql(slots).strip().split("|")
    made = site.place / "s1/standby/own/data/PG_VERSION"
    copy = made.stat().st_ino

    def dropped() -> bool:
        try:
            s1.sql("SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots;")
            s1.sql(f"SELECT pg_drop_replication_slot('{name}');")
        except RuntimeError:
            return False
        return True

    wait_until("the slot is dropped", dropped, WAIT_S, site.needs())
    clients.wait(20)
    site.wait_covered(clients)
    again, after = s1.sql(slots).strip().split("|")
    assert again == name and after not in ("", before)
    assert made.stat().st_ino == copy, "the standby goes on"

    report = site.recover()
    rows = clients.stop()
    site.check_cuts(rows)
    site.check_promoted(report, rows)


def test_a_clock_that_jumps_stands_its_shard_and_breaks_no_cut(run, image):
    site = ClockSite(run, image, is_guarded=True)
    site.watch()
    site.start_daemons()
    clients = Clients(site)
    wait_standbys(site)
    for name, shard in (("host-a", "s0"), ("host-b", "s1")):
        site.wait_stands(name, shard, None)
    clients.wait(20)
    site.wait_covered(clients)
    for ahead_s in (0.01, 3600):
        # One clock goes ahead, and later the other one back.
        for name, shard, step_s in (("host-b", "s1", ahead_s), ("host-a", "s0", -ahead_s)):
            site.step_clock(name, step_s)
            site.wait_stands(name, shard, "clock-not-believed")
        wait_until("it is told", lambda: all(of["stands"] for of in site.status()["shards"]), WAIT_S, site.needs())
        # Nobody can stop PostgreSQL: its clients go on.
        clients.wait(20)
        for name in site.hosts:
            site.step_clock(name, 0)
        site.wait_covered(clients)
    report = site.recover()
    rows = clients.stop()
    site.check_cuts(rows)
    site.check_promoted(report, rows)


def test_a_clock_of_which_the_operator_says_too_much_breaks_cuts(run, image):
    """What the guard is for, and what the comparison of cuts finds."""
    site = ClockSite(run, image, is_guarded=False)
    site.watch()
    site.start_daemons()
    clients = Clients(site)
    clients.wait(20)
    site.wait_covered(clients)
    site.step_clock("host-b", 2)

    def is_broken() -> bool:
        rows = clients.rows()
        ends = site.ends(rows)
        return any(missing(rows, cut, ends) for cut in site.cuts[-20:])

    wait_until("a cut has an effect without its cause", is_broken, WAIT_S, site.needs())
    clients.stop()
    site.unwatch()


STAMPS_MAX = 1 << 20
"""Stamps of a shard that wait at the backup for the watermark, at most."""


def commits(site: Site, shard: str, count: int) -> None:
    """So many small transactions, as fast as they go."""
    loop = f"FOR i IN 1..{count} LOOP PERFORM pg_logical_emit_message(true, 'app', ''); COMMIT; END LOOP;"
    site.shards[shard].sql(f"SET synchronous_commit = off;\nDO $$ BEGIN {loop} END $$;")


def test_a_host_that_is_cut_off_holds_others_back_by_name_up_to_a_bound(run, image):
    site = Site(run, image, TWO_HOSTS)
    site.watch()
    site.start_daemons()
    clients = Clients(site)
    wait_standbys(site)
    clients.wait(20)
    site.wait_covered(clients)
    slot = site.at_home("host-a", "s0")["slot"]["kept_bytes"]

    # Minutes are told by what is written in them.
    site.cut(True)
    site.wait_stands("host-b", "s1", "no-backup")
    site.wait_named("s1")
    wait_until("the host is missed", lambda: site.of_shard("s1")["host"] is None, WAIT_S, [site.backup.process])
    before = site.applied()["s0"]
    clients.wait(20)
    commits(site, "s0", STAMPS_MAX + 50_000)
    site.wait_stands("host-a", "s0", "backup-full")
    full = site.of_shard("s0")
    assert full["apply_to"] - before < 1 << 20 < full["received"] - full["apply_to"]
    # The rest is in the server's log, which its slot keeps; clients do not wait.
    commits(site, "s0", 10_000)
    clients.wait(20)

    def kept() -> bool:
        here = site.at_home("host-a", "s0")
        return here["slot"]["kept_bytes"] > slot and here["lag_bytes"] > 0

    wait_until("the slot keeps the rest", kept, WAIT_S, site.needs())
    assert site.status()["held_back_by"] == "s1"

    site.cut(False)
    site.wait_covered(clients)
    report = site.recover()
    rows = clients.stop()
    site.check_cuts(rows)
    site.check_promoted(report, rows)


def test_a_slot_that_is_lost_costs_a_new_copy_and_no_cut(run, image):
    site = Site(run, image, ONE_HOST)
    site.watch()
    site.start_daemons()
    clients = Clients(site)
    wait_standbys(site)
    clients.wait(20)
    site.wait_covered(clients)
    made = site.place / "s1/standby/own/data/PG_VERSION"
    copy = made.stat().st_ino
    rows = clients.stop()
    assert site.check_cuts(rows)

    site.hosts["host-a"].daemon.kill()
    s1 = site.shards["s1"]
    s1.stop()
    # The log that is kept to compare with is no longer.
    s1.settings = {**s1.settings, "wal_keep_size": "0", "max_slot_wal_keep_size": "1MB"}
    s1.start()

    def lost() -> bool:
        s1.sql("CREATE TABLE t AS SELECT 1;\nDROP TABLE t;\nSELECT pg_switch_wal();\nCHECKPOINT;")
        return s1.sql("SELECT wal_status FROM pg_replication_slots;").strip() == "lost"

    wait_until("the slot is lost", lost, WAIT_S, [s1.process])
    rows += [Row(-7, n, f"s{n % 2}", 0) for n in range(1, 5)]
    for row in rows[-4:]:
        site.shards[row.shard].sql(f"INSERT INTO rows VALUES ({row.chain}, {row.n});")
    site.start_daemon("host-a")
    wait_until("a new copy is made", lambda: made.exists() and made.stat().st_ino != copy, WAIT_S, site.needs())
    wait_standbys(site)
    ends = {name: flushed(server) for name, server in site.shards.items()}
    for name, server in site.shards.items():
        server.sql("INSERT INTO rows VALUES (-8, 1);")
        wait_until(f"{name} goes on", lambda name=name: site.applied()[name] > ends[name], WAIT_S, site.needs())
    wait_standbys(site)
    report = site.recover()
    found = set()
    for name in site.names:
        with site.promoted(report, name) as connection:
            found |= {(name, *row) for row in connection.execute("SELECT chain, n FROM rows").fetchall()}
    assert found >= {(row.shard, row.chain, row.n) for row in rows}
