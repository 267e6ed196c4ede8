"""A guest whose disk reconnects: QEMU keeps what it has asked for while the daemon is away, and asks again. No request
is lost, none fails, and none is applied twice in a way that could be seen (DESIGN rules 2, 3 and 9)."""

from __future__ import annotations

import filecmp
import random
import signal
import threading

import pytest
from test_faults_kill import random_moment
from test_faults_seed import recovered_image

from tidelock_testbed.hostdaemon import writer_of
from tidelock_testbed.nbdwire import WRITE, Connection
from tidelock_testbed.oracle import BLOCK, Load, Oracle, block_data
from tidelock_testbed.pair import DISK, LONG_S, MIB, Options, Pair
from tidelock_testbed.process import wait_until
from tidelock_testbed.storagedaemon import StorageDaemon

DISK_MIB = 32
KILLS = 5
DEPTH = 16
"""As many as QEMU takes from one client at a time."""
WAYS = {
    "pipelined": Options(disk_mib=DISK_MIB),
    "backlog on disk": Options(disk_mib=DISK_MIB, group='backlog_on_disk = { size = "256MiB" }\n'),
    "sync": Options(disk_mib=DISK_MIB, mode="sync"),
}


class Reader:
    """Reads single blocks on a thread of its own, also while the daemon is away. What nobody is writing to must be
    exactly what was written to it last."""

    def __init__(self, qemu: StorageDaemon, oracle: Oracle, seed: str):
        self.judged = 0
        self.wrong: list[str] = []
        self._oracle = oracle
        self._random = random.Random(f"reader {seed}")
        self._connection = Connection(qemu.socket, DISK, timeout_s=300)
        self._stopping = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stopping:
            block = self._random.randrange(self._oracle.blocks)
            position = self._oracle.position()
            versions = self._oracle.may_hold(block)
            data = self._connection.read(block * BLOCK, BLOCK)
            if len(versions) > 1 or self._oracle.is_issued_since(position, block):
                continue
            (version,) = versions
            self.judged += 1
            if data != (block_data(version, block) if version > 0 else bytes(BLOCK)):
                self.wrong.append(f"block {block} holds {data[:16].hex()}, not version {version}")

    def finish(self) -> None:
        self._stopping = True
        self._thread.join(LONG_S)
        assert not self._thread.is_alive(), "a read has no answer"
        self._connection.close()


def in_front_of(run, pair: Pair) -> StorageDaemon:
    """QEMU's NBD client, which the guest has its disk from, with `reconnect-delay`: docs/manual/guests.md."""
    return StorageDaemon(run, {DISK: f"nbd+unix:///{DISK}?socket={pair.socket}"})


def check_both_disks(pair: Pair, oracle: Oracle) -> None:
    """The primary's, the backup's, and, after a disaster, the recovered one."""
    pair.check_sites(oracle)
    pair.kill(pair.daemon)
    recovery = pair.start_recovery("--primary-is-dead")
    assert recovery.wait(LONG_S) == 0, recovery.tail()
    image = recovered_image(pair, DISK_MIB)
    assert oracle.violations(image) == []
    assert filecmp.cmp(pair.disk, image, shallow=False)


@pytest.mark.parametrize("way", WAYS)
def test_requests_in_flight_are_asked_again(run, way: str):
    """The daemon is killed again and again under load; the guest's one connection to QEMU does not notice."""
    chance = random.Random(f"reconnect {way}")
    pair = Pair(run, WAYS[way])
    pair.start()
    qemu = in_front_of(run, pair)
    oracle = Oracle(DISK_MIB * MIB)
    load = Load(qemu.socket, DISK, oracle, way, DEPTH)
    reader = Reader(qemu, oracle, way)
    for _ in range(KILLS):
        random_moment(chance, load)
        pair.kill(pair.daemon)
        # No reply comes from here on but those that were on their way.
        wait_until("the guest waits", lambda: load.in_flight() == DEPTH, LONG_S, [qemu.process])
        # What was completed is there, whatever else is: what had no reply may be, or not.
        assert oracle.violations(pair.disk) == []
        judged = reader.judged
        pair.start_daemon()
        wait_until("reads are answered", lambda n=judged: reader.judged > n, LONG_S, [qemu.process, pair.daemon])
    pair.wait_state("protected")
    random_moment(chance, load)
    load.finish()
    reader.finish()
    assert load.errors == [] and reader.wrong == []
    assert oracle.completed > KILLS * DEPTH
    check_both_disks(pair, oracle)


def test_requests_that_were_carried_out_without_a_reply_are_asked_again(run):
    """All of them are on the local disk, and the daemon dies before any reply: they are carried out twice, with the
    same outcome as once. What is written over them afterwards stays."""
    pair = Pair(run, WAYS["sync"])
    pair.start()
    qemu = in_front_of(run, pair)
    oracle = Oracle(DISK_MIB * MIB)
    guest = Connection(qemu.socket, DISK, timeout_s=300)
    blocks = range(16)

    def ask() -> dict:
        writes = {}
        for block in blocks:
            write = oracle.issue(range(block, block + 1), zero=False)
            writes[guest.send(WRITE, block * BLOCK, BLOCK, block_data(write.version, block))] = write
        return writes

    def answered(writes: dict) -> None:
        """Each once, and without an error."""
        for _ in blocks:
            error, cookie = guest.reply()
            assert error == 0
            oracle.complete(writes.pop(cookie))

    def carried_out(writes: dict) -> bool:
        with pair.disk.open("rb") as disk:
            held = disk.read(len(blocks) * BLOCK)
        return held == b"".join(block_data(write.version, *write.blocks) for write in writes.values())

    answered(ask())
    for _ in range(3):
        pair.wait_settled()
        # In mode sync no write has a reply before the backup has it.
        pair.backup.signal(signal.SIGSTOP)
        writes = ask()
        wait_until("all are on the local disk", lambda w=writes: carried_out(w), LONG_S, [qemu.process, pair.daemon])
        pair.kill(pair.daemon)
        assert not guest.has_reply()
        pair.backup.signal(signal.SIGCONT)
        pair.start_daemon()
        answered(writes)
        assert writer_of(pair.group())["guest_io"]["writes"] == len(blocks), "the new run was asked for all of them"
        later = ask()
        answered(later)
    guest.flush()
    guest.close()
    assert oracle.completed == len(blocks) * 7
    check_both_disks(pair, oracle)
