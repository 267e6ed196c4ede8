"""When the backup had a row: found in the journal's records, measured by samples, and judged."""

from __future__ import annotations

import csv
import math
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tidelock_testbed.backupwatch import BackupWatch, Cuts
from tidelock_testbed.bench.postgres import private
from tidelock_testbed.drilling import Drill, Entry, Knobs
from tidelock_testbed.durability import Durability, measure, rowstore_seqs, write_rows
from tidelock_testbed.hostdaemon import GROUP, MEMBER, ControlClient
from tidelock_testbed.image import GuestImage
from tidelock_testbed.ledger import Ledger
from tidelock_testbed.report import summary
from tidelock_testbed.rowblock import BLOCK, checksum, encode
from tidelock_testbed.wal import (
    CONTINUATION_OVERWRITTEN,
    CONTINUES,
    FILE_BYTES,
    FS_COMMIT,
    LONG_HEAD,
    MAGIC,
    PAGE,
    PAGE_HEAD,
    RECORD_HEAD,
    XACT,
    Extent,
    Log,
    Write,
    aligned,
    commits,
    head_bytes,
    record_checksum,
)

LOG_AT = 3 * FILE_BYTES
"""The address at which the logs of these tests begin."""
CHOSEN = 12
"""Transactions of which PostgreSQL's own program is asked."""
TOLD = "no client was told of a row before the backup had it"


class Wal:
    """A log, written by the rules of PostgreSQL."""

    def __init__(self, begin: int = LOG_AT):
        self.begin = self.at = begin
        self.bytes = bytearray()
        self.before = 0

    def commit(self, transaction: int, size: int = 8) -> "Wal":
        """A commit record with so many bytes of data."""
        self._begin_page()
        head = [RECORD_HEAD.size + size, transaction, self.before, 0, XACT]
        record = RECORD_HEAD.pack(*head, 0) + bytes(transaction % 251 for _ in range(size))
        record = RECORD_HEAD.pack(*head, record_checksum(record)) + record[RECORD_HEAD.size :]
        self.before = self.at
        while record:
            self._begin_page(len(record))
            part = record[: PAGE - self.at % PAGE]
            self._add(part)
            record = record[len(part) :]
        self._add(bytes(aligned(self.at) - self.at))
        return self

    def _begin_page(self, rest: int = 0) -> None:
        if self.at % PAGE == 0:
            flags = LONG_HEAD * (self.at % FILE_BYTES == 0) + CONTINUES * bool(rest)
            self._add(PAGE_HEAD.pack(MAGIC, flags, 1, self.at, rest).ljust(head_bytes(flags), b"\0"))

    def _add(self, part: bytes) -> None:
        self.bytes += part
        self.at += len(part)

    def page(self, number: int) -> bytes:
        """As it is now."""
        return bytes(self.bytes[number * PAGE : (number + 1) * PAGE]).ljust(PAGE, b"\0")


def one_file(**more) -> Log:
    return Log([Extent(0, 1 << 20, "one", 0, FILE_BYTES, **more)])


def page_write(seq: int, page: bytes, number: int = 0, copied: bool = False) -> Write:
    return Write(seq, 0, (1 << 20) + number * PAGE, page, copied)


def test_a_page_that_is_written_again_has_what_was_added():
    wal, log = Wal().commit(7), one_file()
    assert log.write(page_write(1, wal.page(0))) == [7]
    assert log.write(page_write(2, wal.page(0))) == []
    wal.commit(8).commit(9)
    assert log.write(page_write(3, wal.page(0))) == [8, 9]


def test_a_page_may_come_in_parts():
    wal, log = Wal().commit(7).commit(8, 6000), one_file()
    page = wal.page(0)
    assert log.write(Write(1, 0, 1 << 20, page[:4096])) == [7]
    assert log.write(Write(2, 0, (1 << 20) + 4096, page[4096:])) == [8]


@pytest.mark.parametrize("order", [(0, 1, 2), (0, 2, 1), (2, 0, 1), (2, 1, 0)])
def test_a_record_over_several_pages_is_whole_with_the_last_of_them(order):
    wal, log = Wal().commit(7).commit(8, 2 * PAGE), one_file()
    # The guest has written to the first page before.
    assert log.write(page_write(1, Wal().commit(7).page(0))) == [7]
    found = [log.write(page_write(2 + n, wal.page(number), number)) for n, number in enumerate(order)]
    assert found == [[], [], [8]]


def test_a_gap_ends_the_log_as_it_does_for_recovery():
    wal, log = Wal().commit(7, PAGE).commit(8, PAGE).commit(9), one_file()
    assert log.write(page_write(1, wal.page(0))) == []
    assert log.write(page_write(2, wal.page(2), 2)) == []
    assert log.write(page_write(3, wal.page(1), 1)) == [7, 8, 9]


def test_an_old_page_of_a_file_that_is_used_again_is_not_taken_for_the_new_one():
    old, wal = Wal(LOG_AT - 2 * FILE_BYTES), Wal()
    for log in (old, wal):
        log.commit(100, PAGE)
    old.commit(7).commit(8)
    wal.commit(107)
    log = one_file()
    for number in range(2):
        assert log.write(page_write(1 + number, old.page(number), number, copied=True)) == []
    assert log.write(page_write(3, wal.page(0))) == []
    assert log.write(page_write(4, wal.page(1), 1)) == [100, 107]


def test_a_record_that_names_another_one_before_it_does_not_continue_the_log():
    wal, stale = Wal().commit(8), Wal()
    stale.before = 64
    stale.commit(5)
    rest = bytes(stale.bytes[head_bytes(LONG_HEAD) :])
    assert one_file().write(page_write(1, (bytes(wal.bytes) + rest).ljust(PAGE, b"\0"))) == [8]


def test_the_log_goes_on_in_the_next_file():
    wal = Wal()
    size = FILE_BYTES - 64 - (FILE_BYTES // PAGE - 1) * PAGE_HEAD.size
    wal.commit(7, size - 8).commit(8)
    log = Log([Extent(0, 1 << 20, "one", 0, FILE_BYTES), Extent(1, 1 << 20, "two", 0, FILE_BYTES)])
    assert log.write(Write(1, 0, 1 << 20, bytes(wal.bytes[:FILE_BYTES]))) == [7]
    assert log.write(Write(2, 1, 1 << 20, bytes(wal.bytes[FILE_BYTES:]))) == [8]


def test_a_record_that_postgresql_gave_up_after_a_crash_is_stepped_over():
    wal, log = Wal().commit(7).commit(8, PAGE), one_file()
    assert log.write(page_write(1, wal.page(0))) == [7]
    after = Wal(LOG_AT + PAGE)
    after.before = LOG_AT + 40
    after.commit(9)
    head = PAGE_HEAD.pack(MAGIC, CONTINUATION_OVERWRITTEN, 1, LOG_AT + PAGE, 0)
    assert log.write(page_write(2, head + after.page(0)[len(head) :], 1)) == [9]


def test_a_new_block_counts_from_the_commit_of_the_file_system_on():
    wal, log = Wal().commit(7), one_file(is_new=True)
    assert log.write(page_write(1, wal.page(0))) == []
    assert log.write(Write(2, 0, 0, bytes(2048))) == []
    assert log.write(Write(2, 1, 0, FS_COMMIT.ljust(1024, b"\0"))) == []
    assert log.write(Write(3, 0, 0, bytes(1024) + FS_COMMIT.ljust(1024, b"\0"))) == [7]
    assert log.write(page_write(4, wal.commit(8).page(0))) == [8]


def test_a_file_in_pieces_is_put_together():
    wal = Wal().commit(7, 6000)
    places = [1 << 20, 5 << 20, 3 << 20]
    pieces = [(0, 1024), (1024, 4096), (5120, PAGE - 5120)]
    log = Log([Extent(0, place, "one", at, length) for place, (at, length) in zip(places, pieces, strict=True)])
    found = [
        log.write(Write(seq, 0, place, wal.page(0)[at : at + length]))
        for seq, (place, (at, length)) in enumerate(zip(places, pieces, strict=True), 1)
    ]
    assert found == [[], [], [7]]


def blocks(*rows: list, sequence: int = 1, before: int = 0) -> list[bytes]:
    made = []
    for n, of_block in enumerate(rows):
        made.append(encode(sequence + n, before, [(*row, 0, 0) for row in of_block]))
        before = checksum(made[-1])
    return made


def test_a_row_of_the_row_store_is_durable_with_its_block_and_all_before_it():
    one, two, three = blocks([(1, 1), (2, 1)], [(1, 2)], [(2, 2)])
    noise = bytes(range(256)) * 8
    writes = [
        Write(3, 0, 0, noise, copied=True),
        Write(4, 0, 0, one),
        Write(6, 0, BLOCK, three),
        Write(7, 0, 4096, noise),
        Write(9, 1, 0, two + noise),
        Write(12, 0, BLOCK, three),
    ]
    assert rowstore_seqs(writes) == {(1, 1): 4, (2, 1): 4, (1, 2): 9, (2, 2): 9}


def test_a_block_of_an_earlier_life_is_no_row_store_s():
    one, two = blocks([(1, 1)], [(1, 2)])
    (other,) = blocks([(9, 9)], sequence=2, before=77)
    damaged = bytearray(two)
    damaged[60] ^= 1
    assert rowstore_seqs([Write(1, 0, 0, one), Write(2, 1, 0, other), Write(3, 1, 0, bytes(damaged))]) == {(1, 1): 1}


def sampled(*samples: tuple[float, int]) -> Cuts:
    """The server answers 2 ms after it was asked."""
    cuts = Cuts()
    for at, count in samples:
        cuts.add(at, at + 0.002, count)
    return cuts


def test_a_moment_lies_between_two_samples():
    cuts = sampled((1.0, 0), (1.005, 10), (1.010, 10), (1.015, 20))
    assert cuts.moment(10) == (1.0, 1.007)
    assert cuts.moment(11) == (1.010, 1.017)
    assert cuts.moment(0) == (-math.inf, 1.002)
    assert cuts.moment(21) == (1.015, math.inf)


def judged(durability: Durability) -> Entry:
    drill = Drill.__new__(Drill)
    drill.entry = Entry("test", "pipelined", "process", 1, 0, promise="p", durability={"db": durability.summary()})
    drill.check_told(durability.told())
    drill.conclude()
    return drill.entry


def ledger_of(tmp_path: Path, told_at: dict[int, float]) -> Ledger:
    path = tmp_path / "ledger"
    path.write_text("".join(f"1.0 sent 1 {n}\n{at} ok 1 {n}\n" for n, at in told_at.items()))
    return Ledger(path).follow()


CUTS = sampled((1.0, 0), (1.1, 10), (1.2, 20), (1.3, 20))


@pytest.mark.parametrize(
    ("told_at", "passed", "in_one_sample"),
    [(1.203, True, 0), (1.150, True, 1), (1.1001, True, 1), (1.0999, False, 0), (1.003, False, 0)],
)
def test_a_client_that_was_told_too_early_is_noticed_and_sampling_accuses_nobody(
    tmp_path, told_at, passed, in_one_sample
):
    ledger = ledger_of(tmp_path, {1: told_at, 2: 1.4})
    entry = judged(measure(ledger, ledger.confirmed, {(1, 1): 20, (1, 2): 10}, CUTS))
    assert [(check["what"], check["passed"]) for check in entry.checks] == [(TOLD, passed)]
    found = entry.durability["db"]
    assert (found["told"], found["measured"], found["told_first"]) == (2, 2, 0 if passed else 1)
    assert found["in_one_sample"] == in_one_sample
    assert ("FAIL" in summary(entry)) != passed


def test_a_client_that_was_told_of_what_the_backup_never_got_is_noticed(tmp_path):
    ledger = ledger_of(tmp_path, {1: 1.25, 2: 1.25})
    entry = judged(measure(ledger, ledger.confirmed, {(1, 1): 21, (1, 2): 10}, CUTS))
    assert not entry.passed and entry.durability["db"]["told_first"] == 1


def test_rows_that_were_not_measured_are_counted_and_prove_nothing(tmp_path):
    ledger = ledger_of(tmp_path, {1: 1.4, 2: 1.4, 3: 1.25})
    durability = measure(ledger, ledger.confirmed, {(1, 2): 30}, CUTS)
    found = judged(durability).durability["db"]
    assert found["measured"] == 0 and sum(found["not_measured"].values()) == 3
    assert "told_after_ms" not in found
    entry = judged(durability)
    assert not entry.passed
    assert sum("could not be measured" in line for line in summary(entry).splitlines()) == 2


def test_every_row_is_in_the_table(tmp_path):
    ledger = ledger_of(tmp_path, {1: 1.4, 2: 1.5})
    write_rows(tmp_path / "rows.csv", {"db": measure(ledger, {(1, 1): 1.4}, {(1, 1): 10}, CUTS)})
    with (tmp_path / "rows.csv").open() as file:
        first, second = csv.DictReader(file)
    assert (first["told"], first["seq"], float(first["durable_at"])) == ("1.4", "10", pytest.approx(1.102))
    assert (second["n"], second["told"], second["seq"], second["durable_at"]) == ("2", "", "", "")


class Liar(Drill):
    """The gate is opened under load while the link is whole: what clients were told reaches the backup later."""

    name = "liar"

    def trouble(self) -> None:
        """Takes the gate away; then clients rest until the backup has everything."""
        control = ControlClient(self.rig.daemon.control_socket)
        control.ask(command="mode", group=GROUP, mode="async")
        control.close()
        self.work(1)
        self.clients.process.signal(signal.SIGSTOP)
        time.sleep(1)

    def recover(self, *options: str) -> None:
        """The clients go on."""
        super().recover(*options)
        self.clients.process.signal(signal.SIGCONT)


def test_a_drill_finds_out_that_clients_were_told_too_early_though_nothing_is_lost(run):
    drill = Liar(run, Knobs(guest="process", rtt_ms=100, seed=6, hurry=True))
    drill.execute()
    entry = drill.entry
    failed = {check["what"] for check in entry.checks if not check["passed"]}
    assert TOLD in failed and entry.durability[MEMBER]["told_first"] > 0, str(entry)
    assert entry.lost == 0


WALDUMP = """
mount -o loop,ro "$1" "$2" && mount --bind "$3" "$2/data"
chroot "$2" /usr/lib/postgresql/15/bin/pg_waldump -p /data -r Transaction 000000010000000000000001
"""


def committed(work: Path, image: GuestImage, writes: list[Write], seq: int) -> set[int]:
    """The transactions that PostgreSQL's own program finds committed on the disk as it was at a record."""
    disk, log, root = work / "at.img", work / "pg_wal", work / "root"
    with disk.open("wb") as file:
        for write in writes:
            if write.seq <= seq:
                file.seek(write.offset)
                file.write(write.data)
    subprocess.run(["e2fsck", "-fy", "-E", "journal_only", disk], capture_output=True)
    shutil.rmtree(log, ignore_errors=True)
    root.mkdir(exist_ok=True)
    subprocess.run(["debugfs", "-R", f"rdump /pg/pg_wal {work}", disk], capture_output=True, check=True)
    argv = [str(word) for word in private(WALDUMP, image.root, root, log)]
    # It ends with an error where the log ends.
    said = subprocess.run(argv, capture_output=True, text=True, timeout=60).stdout
    return {int(number) for number in re.findall(r"tx: +(\d+),.*desc: COMMIT", said)}


def test_the_log_is_read_as_postgresql_reads_it(run, image, monkeypatch):
    """`pg_waldump` is the oracle: it finds a commit on the disk as it is after the record, and not before."""
    kept, writes_of = {}, BackupWatch.writes

    def keep(watch: BackupWatch, group: str) -> dict[str, list[Write]]:
        kept.update(writes_of(watch, group))
        return kept

    monkeypatch.setattr(BackupWatch, "writes", keep)
    drill = Drill(run, Knobs(guest="process", postgres=True, rtt_ms=20, seed=3, hurry=True))
    drill.execute()
    assert drill.entry.passed, str(drill.entry)
    found = drill.entry.durability[MEMBER]
    assert found["measured"] == found["told"] == drill.entry.confirmed
    seqs = commits(kept[MEMBER], run.directory)
    of_rows = {row.seq for row in drill.durability[MEMBER].rows}
    transactions = sorted(number for number, seq in seqs.items() if seq in of_rows)
    for transaction in transactions[:: len(transactions) // CHOSEN]:
        seq = seqs[transaction]
        assert transaction in committed(run.directory, image, kept[MEMBER], seq)
        assert transaction not in committed(run.directory, image, kept[MEMBER], seq - 1)
