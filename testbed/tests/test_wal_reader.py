"""The reader of PostgreSQL's log finds in real segments what PostgreSQL's own `pg_waldump` finds in them."""

from __future__ import annotations

import json
import re
import subprocess
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import NamedTuple

import pytest

from tidelock_testbed.paths import BIN
from tidelock_testbed.pgserver import PgServer

PAGE = 8192
PIECES = "7,8191,1,65521,333"
"""Lengths of the pieces in which segments are read."""
EPOCH = datetime(2000, 1, 1, tzinfo=UTC)
RECORD = re.compile(r"rmgr: (\S+) .*? tx: +(\d+), lsn: ([0-9A-F]+/[0-9A-F]+), prev [^,]+, desc: (\S+)(.*)")
ENDED = re.compile(r" (?:gid (?P<gid>.*): |(?P<prepared>\d+): )?(?P<stamp>\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{6}) UTC")
ENDINGS = {"COMMIT", "ABORT", "PREPARE", "COMMIT_PREPARED", "ABORT_PREPARED"}
KINDS = {
    ("XLOG", "SWITCH"): "SWITCH",
    ("XLOG", "OVERWRITE_CONTRECORD"): "OVERWRITES",
    ("XLOG", "END_OF_RECOVERY"): "END_OF_RECOVERY",
    ("XLOG", "CHECKPOINT_SHUTDOWN"): "SHUTDOWN_CHECKPOINT",
    ("LogicalMessage", "MESSAGE"): "MESSAGE",
}
WITHOUT_A_RECORD = {"REST", "GIVEN_UP"}

TWO_PHASES = """
CREATE TABLE doomed AS SELECT generate_series(1, 100) AS n;
BEGIN; CREATE TABLE prepared(n int); INSERT INTO prepared VALUES (1); SAVEPOINT one; INSERT INTO prepared VALUES (2);
SAVEPOINT two; INSERT INTO prepared VALUES (3); DROP TABLE doomed; PREPARE TRANSACTION 'with tables: and a colon';
COMMIT PREPARED 'with tables: and a colon';
BEGIN; INSERT INTO prepared VALUES (4); PREPARE TRANSACTION 'given up'; ROLLBACK PREPARED 'given up';
BEGIN; CREATE TABLE never(n int); PREPARE TRANSACTION 'never'; ROLLBACK PREPARED 'never';
"""
MANY_TABLES = "".join(f"CREATE TABLE t{n}(id serial PRIMARY KEY, word text);\n" for n in range(30))
DDL = f"""
{MANY_TABLES}
BEGIN; {"".join(f"DROP TABLE t{n};" for n in range(20))} COMMIT;
BEGIN; {"".join(f"DROP TABLE t{n};" for n in range(20, 30))} PREPARE TRANSACTION 'drop'; COMMIT PREPARED 'drop';
BEGIN; CREATE TABLE rolled_back(n int); SAVEPOINT s; INSERT INTO rolled_back VALUES (1); ROLLBACK;
VACUUM FULL pg_class;
"""
SUBTRANSACTIONS = """
DO $$ BEGIN FOR n IN 1..3000 LOOP BEGIN INSERT INTO prepared VALUES (n); EXCEPTION WHEN OTHERS THEN NULL; END;
END LOOP; END $$;
"""
OBJECTS = """
SELECT lo_from_bytea(0, decode(repeat('c0ffee', 100000), 'hex'));
SELECT lo_unlink(oid) FROM pg_largeobject_metadata;
"""
MESSAGES = """
SELECT pg_logical_emit_message(true, 'tidelock', 'a transaction of its own');
SELECT pg_logical_emit_message(false, 'tidelock', repeat('more than a segment ', 200000));
"""


class Item(NamedTuple):
    """A record, as the reader and `pg_waldump` both print it."""

    begin: str
    xid: int
    kind: str
    stamp: int | None = None
    """Microseconds since 2000-01-01 00:00 UTC."""
    prepared: int | None = None
    gid: str | None = None


def number(lsn: str) -> int:
    upper, lower = lsn.split("/")
    return int(upper, 16) << 32 | int(lower, 16)


def lsn(place: int) -> str:
    return f"{place >> 32:X}/{place & 0xFFFFFFFF:X}"


def oracle(server: PgServer, timeline: int, begin: str, end: str | None = None) -> list[Item]:
    """Returns the records that `pg_waldump` finds, which ends with an error where the log does."""
    words = ["pg_waldump", "-p", "/data/pg/pg_wal", "-t", timeline, "-s", begin, *(["-e", end] if end else [])]
    argv = [str(word) for word in server.inside(*words)]
    said = subprocess.run(argv, capture_output=True, text=True, timeout=300).stdout
    items = []
    for line in said.splitlines():
        found = RECORD.match(line)
        if not found:
            assert line.startswith("first record is after "), line
            continue
        manager, xid, at, name, desc = found.groups()
        item = Item(lsn(number(at)), int(xid), KINDS.get((manager, name), "OTHER"))
        if manager == "Transaction" and name in ENDINGS:
            ended = ENDED.match(desc)
            assert ended, line
            stamp = (datetime.fromisoformat(ended["stamp"]).replace(tzinfo=UTC) - EPOCH) // timedelta(microseconds=1)
            prepared = int(ended["prepared"]) if ended["prepared"] else None
            item = item._replace(kind=name, stamp=stamp, prepared=prepared, gid=ended["gid"])
        items.append(item)
    return items


def dumped(files: list[Path]) -> list[dict]:
    """Returns the items that the reader finds, and at last the fault at which it ended."""
    program = BIN / "examples" / "wal-dump"
    assert program.exists(), f"{program} is missing: cargo build --profile bench -p tidelock-wal --examples"
    said = subprocess.run([program, PIECES, *files], capture_output=True, text=True, timeout=300, check=True).stdout
    return [json.loads(line) for line in said.splitlines()]


def check_ends(lines: list[dict]) -> None:
    """Items follow each other, and nothing is between them but heads of pages."""
    for before, item in zip(lines, lines[1:], strict=False):
        end, begin = number(before["end"]), number(item["begin"])
        assert end % 8 == 0
        assert begin == end or (end % PAGE == 0 and begin - end in (24, 40)), (before, item)


def compare(lines: list[dict], items: list[Item]) -> None:
    records = [line for line in lines if line["kind"] not in WITHOUT_A_RECORD]
    assert len(records) == len(items)
    for line, item in zip(records, items, strict=True):
        found = Item(line["begin"], line["xid"], line["kind"], line.get("stamp"))
        assert found == item._replace(prepared=None, gid=None)
        if item.kind.endswith("_PREPARED"):
            assert line["prepared_xid"] == item.prepared
        if item.kind == "PREPARE":
            assert (line["prepared_xid"], line["gid"]) == (item.xid, item.gid)
        if item.stamp is not None:
            assert line["unix_ns"] == (item.stamp + int(EPOCH.timestamp()) * 1_000_000) * 1000


def segments(server: PgServer, timeline: int) -> list[Path]:
    return sorted(server.wal.glob(f"{timeline:08X}" + "?" * 16))


def begin_of(path: Path, segment_mib: int) -> int:
    """The position at which a segment begins, by its name."""
    return (int(path.name[8:16], 16) << 32) + int(path.name[16:], 16) * (segment_mib << 20)


def work(server: PgServer) -> None:
    server.command("pgbench", "-h", "/run/postgresql", "-q", "-i", "-s", "1", "postgres")
    server.command("pgbench", "-h", "/run/postgresql", "-n", "-c", "4", "-t", "200", "postgres")
    for statements in (TWO_PHASES, DDL, SUBTRANSACTIONS, OBJECTS, MESSAGES):
        server.sql(statements)
        server.sql("SELECT pg_switch_wal();")
    server.sql("SELECT pg_switch_wal();")
    server.command("pgbench", "-h", "/run/postgresql", "-n", "-c", "4", "-t", "50", "postgres")


def leave_a_record_without_its_end(server: PgServer, segment_mib: int) -> None:
    """A crash after which the log ends in the middle of a record."""
    length = 5 * PAGE
    server.sql("CHECKPOINT;")
    server.sql(f"SELECT pg_logical_emit_message(true, 'tidelock', repeat('x', {length}));")
    end = number(server.sql("SELECT pg_current_wal_flush_lsn();").strip())
    server.stop(immediate=True)
    # The last page on which the record can be must be lost, and one before it kept.
    lost = (end - 3 * PAGE) // PAGE * PAGE
    for path in segments(server, 1):
        size = path.stat().st_size
        at = max(lost - begin_of(path, segment_mib), 0)
        if at < size:
            with path.open("r+b") as file:
                file.seek(at)
                file.write(bytes(size - at))


@pytest.mark.parametrize(("segment_mib", "wal_level"), [(1, "logical"), (16, "replica")])
def test_the_log_is_read_as_postgresql_reads_it(run, image, segment_mib, wal_level):
    settings = {"wal_keep_size": "2GB", "max_wal_size": "2GB", "max_prepared_transactions": 8, "fsync": "off"}
    server = PgServer(run, image, "server", segment_mib, wal_level=wal_level, **settings)
    server.start()
    work(server)
    server.stop(immediate=True)
    server.start()
    server.sql("SELECT pg_switch_wal(); CREATE TABLE after_the_crash(n int);")
    leave_a_record_without_its_end(server, segment_mib)
    server.start()
    server.sql("INSERT INTO after_the_crash VALUES (1);")
    server.stop()

    # A standby of nobody becomes a primary of the next timeline.
    (server.data / "standby.signal").touch()
    server.start()
    server.sql("SELECT pg_promote();")
    server.sql("INSERT INTO after_the_crash VALUES (2);" + TWO_PHASES.replace("prepared", "again"))
    server.stop()

    first, second = segments(server, 1), segments(server, 2)
    history = server.wal / "00000002.history"
    branch = history.read_text().split()[1]
    begin = lsn(begin_of(first[0], segment_mib))
    before, behind = oracle(server, 1, begin, branch), oracle(server, 2, branch)
    files = [*[path for path in first if path.name[8:] < second[0].name[8:]], *second]
    *lines, last = dumped([*files, history])
    assert last["fault"] in {"record-length", "link", "magic", "page-address"}, last
    check_ends(lines)
    compare(lines, before + behind)

    kinds = {line["kind"] for line in lines}
    assert kinds >= ENDINGS | set(KINDS.values()) | {"OTHER", "GIVEN_UP"}
    assert len([line for line in lines if line["kind"] == "COMMIT"]) > 1000
    changes = [line for line in lines if line.get("timelines") == [1, 2]]
    assert changes and number(changes[0]["begin"]) >= number(branch)
    gids = {line.get("gid") for line in lines if line["kind"] == "COMMIT_PREPARED"}
    assert gids == ({"with tables: and a colon", "drop"} if wal_level == "logical" else {None})

    # The next timeline is not believed without its history.
    assert dumped(files)[-1]["fault"] in {"page-timeline", "record-timeline"}
