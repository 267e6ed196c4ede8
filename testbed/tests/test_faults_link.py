"""The WAN is cut, the backup is full, the operator switches modes: what waits, what is said, and that it comes back
(DESIGN rules 3, 8 and 10)."""

from __future__ import annotations

import signal
import socket
import time
from pathlib import Path

import pytest

from tidelock_testbed.hostdaemon import writer_of
from tidelock_testbed.nbdwire import WRITE, Connection
from tidelock_testbed.net import Net
from tidelock_testbed.oracle import BLOCK, Oracle, block_data
from tidelock_testbed.pair import DISK, LONG_S, MIB, Options, Pair
from tidelock_testbed.process import wait_until
from tidelock_testbed.room import take_all


def stands_still(load) -> bool:
    """Whether no reply came for a moment. Only ever waited for: a busy machine makes it true later, not wrongly."""
    before = load.replies
    time.sleep(0.3)
    return load.replies == before and load.in_flight() > 0


def test_wan_cut_under_load_with_a_small_backlog(run):
    """Writes go on until the backlog is full, then wait and say so; after it heals everything arrives."""
    net = Net(run, rtt_ms=10)
    pair = Pair(run, Options(backlog_mib=32, disk_mib=64), net)
    pair.start()
    oracle = Oracle(64 * MIB)
    load = pair.load(oracle, "cut", depth=32)
    for _ in range(2):
        wanted = load.replies + 500
        wait_until("the load goes on", lambda wanted=wanted: load.replies > wanted, 60)
        net.wan.cut()
        group = pair.wait_state("disconnected")
        wait_until("writes wait", lambda: writer_of(pair.group())["backlog"]["writes_wait"], 90, [pair.daemon])
        wait_until("no write completes", lambda: stands_still(load), 60)
        group = pair.group()
        assert "the backlog is full" in group["detail"]
        backlog = writer_of(group)["backlog"]
        assert backlog["used_bytes"] <= backlog["limit_bytes"], "the bound is a bound"
        assert "FULL" in pair.status_text()
        # Reads never wait for the link.
        reader = Connection(pair.socket, DISK)
        assert len(reader.read(0, MIB)) == MIB
        reader.close()
        net.wan.mend()
        pair.wait_state("protected")
    load.finish()
    assert load.errors == []
    pair.check_sites(oracle)
    log = pair.daemon.log.read_text()
    assert "purpose=Compare" not in log, "the daemon still had every record"


def test_short_interruptions_and_loss(run):
    """A WAN that loses frames, repeats them, and is cut again and again: the stream stays whole."""
    net = Net(run, rtt_ms=4)
    pair = Pair(run, net=net)
    pair.start()
    net.wan.set(loss=0.01, duplicate=0.01, jitter_ms=1)
    oracle = Oracle(32 * MIB)
    load = pair.load(oracle, "lossy")
    for _ in range(3):
        pair.wait_state("protected")
        connects = pair.status()["link"]["connects"]
        net.wan.cut()
        pair.wait_state("disconnected")
        net.wan.mend()
        wait_until("the link is back", lambda n=connects: pair.status()["link"]["connects"] > n, 60, [pair.daemon])
    net.wan.set(loss=0, duplicate=0)
    load.finish()
    pair.check_sites(oracle)
    assert "purpose=Compare" not in pair.daemon.log.read_text()


def test_modes_are_switched_under_load(run):
    """All three modes in turn, with writes in flight; in `sync` a write completes when the backup has it. Protection
    begins again though there is no moment at which the backup has all."""
    pair = Pair(run, net=Net(run, rtt_ms=20))
    pair.start()
    oracle = Oracle(32 * MIB)
    load = pair.load(oracle, "modes")
    for mode in ["sync", "async", "pipelined", "async", "sync", "pipelined"]:
        pair.set_mode(mode)
        group = pair.wait_state("told" if mode == "async" else "protected")
        assert group["mode"] == mode and group["configured_mode"] == "pipelined"
        if mode == "async":
            assert group["told"] is not None
        wanted = load.replies + 200
        wait_until("the load goes on", lambda wanted=wanted: load.replies > wanted, 60)
    load.finish()
    assert load.errors == []
    pair.check_sites(oracle)


def test_a_sync_write_completes_when_the_backup_has_it(run):
    """With the backup stopped a write has no reply; in `pipelined` it has. Switching lets what waits go."""
    pair = Pair(run, Options(mode="sync", lease_ms=20_000, grace_ms=30_000))
    pair.start()
    oracle = Oracle(32 * MIB)
    guest = Connection(pair.socket, DISK)
    write = oracle.issue(range(1), zero=False)
    guest.write(0, block_data(write.version, 0))
    oracle.complete(write)
    writer = writer_of(pair.group())
    assert writer["committed"] >= writer["pending"], "it is at the backup, or it would not have completed"

    pair.backup.signal(signal.SIGSTOP)
    load = pair.load(oracle, "sync", depth=8)
    wait_until("writes are under way", lambda: writer_of(pair.group())["lag"]["writes"] > 0, 60, [pair.daemon])
    wait_until("no write completes", lambda: stands_still(load), 60)
    assert oracle.completed == 1, "nothing that the backup does not have has completed"
    assert guest.read(0, BLOCK) is not None, "reads do not wait"
    pair.backup.signal(signal.SIGCONT)
    wait_until("they complete", lambda: oracle.completed > 100, 60)

    pair.backup.signal(signal.SIGSTOP)
    wait_until("no write completes", lambda: stands_still(load), 60)
    completed = oracle.completed
    pair.set_mode("pipelined")
    wait_until("they complete locally", lambda: oracle.completed > completed + 8, 60)
    pair.backup.signal(signal.SIGCONT)
    load.finish()
    guest.close()
    pair.check_sites(oracle)


def test_disk_full_at_the_backup(run):
    """It stops acknowledging and says so at both sites; with room it goes on, and nothing is lost."""
    pair = Pair(run, Options(backlog_mib=32, backup_tmpfs_mib=160))
    pair.start()
    oracle = Oracle(32 * MIB)
    load = pair.load(oracle, "full", depth=32)
    wait_until("the load goes on", lambda: load.replies > 300, 60)
    ballast = pair.backup_files() / "ballast"
    take_all(ballast)
    group = pair.wait_state("stalled")
    assert "No space left" in group["detail"] or "full" in group["detail"], group["detail"]
    wait_until("the backup's own status says it", lambda: pair.backup_group()["stalled"], LONG_S, [pair.backup])
    wait_until("no write completes", lambda: stands_still(load), 90)
    assert load.alive() and load.errors == []
    ballast.unlink()
    pair.wait_state("protected")
    wanted = load.replies + 300
    wait_until("the load goes on", lambda: load.replies > wanted, 60)
    assert pair.backup_group()["stalled"] is None
    load.finish()
    pair.check_sites(oracle)
    assert "purpose=Compare" not in pair.daemon.log.read_text()


def test_backup_killed_while_its_disk_is_full(run):
    """It starts on a full disk, too. Its reserve lets it fold there, so it may go on before there is room again."""
    pair = Pair(run, Options(backlog_mib=32, backup_tmpfs_mib=160))
    pair.start()
    oracle = Oracle(32 * MIB)
    load = pair.load(oracle, "full and killed", depth=32)
    wait_until("the load goes on", lambda: load.replies > 300, 60)
    ballast = pair.backup_files() / "ballast"
    take_all(ballast)
    wait_until("it stalls", lambda: "stopped acknowledging" in pair.daemon.log.read_text(), LONG_S, [pair.daemon])
    pair.kill(pair.backup)
    pair.wait_state("disconnected")
    pair.start_backup()
    ballast.unlink()
    pair.wait_state("protected")
    wanted = load.replies + 300
    wait_until("the load goes on", lambda: load.replies > wanted, 60)
    load.finish()
    assert load.errors == []
    pair.check_sites(oracle)
    assert "purpose=Compare" not in pair.daemon.log.read_text()


def test_a_large_write_crosses_a_link_that_takes_longer_than_a_lease_for_it(run):
    """One record of 16 MiB at 2 MB/s, lease 2 s: beacons pass between its parts, and what has arrived is not sent
    again."""
    net = Net(run, rtt_ms=20)
    pair = Pair(run, Options(disk_mib=64, backlog_mib=64), net)
    pair.start()
    before = pair.status()["link"]["connects"]
    net.wan.set(rate_bytes_per_s=2_000_000, queue_bytes=256 << 10)
    sent = net.wan.stats()["left_to_right"]["bytes_out"]
    size = 16 * MIB
    guest = Connection(pair.socket, DISK)
    guest.write(0, bytes(range(256)) * (size // 256))
    wait_until("the write is at the backup", lambda: writer_of(pair.group())["lag"]["writes"] == 0, 120, [pair.daemon])
    assert pair.status()["link"]["connects"] == before, "the link was never lost"
    sent = net.wan.stats()["left_to_right"]["bytes_out"] - sent
    assert sent < 2 * size, f"{sent} bytes were sent for a write of {size}"
    # The same with a link that breaks in the middle of the record.
    guest.write(size, bytes(range(1, 256)) * (size // 255) + b"\0" * (size % 255))
    sent = net.wan.stats()["left_to_right"]["bytes_out"]
    enough = sent + size // 3
    wait_until("some of it has crossed", lambda: net.wan.stats()["left_to_right"]["bytes_out"] > enough, 60)
    net.wan.cut()
    pair.wait_state("disconnected")
    net.wan.mend()
    wait_until("the write is at the backup", lambda: writer_of(pair.group())["lag"]["writes"] == 0, 120, [pair.daemon])
    sent = net.wan.stats()["left_to_right"]["bytes_out"] - sent
    assert sent < 2 * size, f"{sent} bytes were sent for a write of {size} over a link that broke"
    guest.close()


def test_a_second_guest_is_refused_until_the_first_has_gone(run):
    """Two guests on one disk destroy it. The second hears why; a guest that was killed with writes in flight may come
    back."""
    net = Net(run, rtt_ms=4)
    pair = Pair(run, Options(connections=1, backlog_mib=32), net)
    pair.start()
    first = Connection(pair.socket, DISK)
    first.write(0, b"1" * 4096)
    with pytest.raises(ConnectionError, match="in use"):
        Connection(pair.socket, DISK)
    wait_until("it is logged", lambda: "refused a client of the disk" in pair.daemon.log.read_text(), 10)
    first.write(4096, b"1" * 4096)
    # The backlog fills, so nothing more is read of the guest, and its end is not read either.
    net.wan.cut()
    pair.wait_state("disconnected")
    for nth in range(96):
        first.send(WRITE, nth * 4096, 1 * MIB if nth < 31 else 4096, b"2" * (1 * MIB if nth < 31 else 4096))
    first.socket.close()
    second = Connection(pair.socket, DISK)
    assert len(second.read(0, 4096)) == 4096
    second.close()


def test_clients_that_only_connect_keep_nobody_out(run):
    """300 idle handshakes hold few descriptors, and a guest is served at once."""
    pair = Pair(run, Options(connections=1))
    pair.start()
    descriptors = Path(f"/proc/{pair.daemon.pid}/fd")
    before = len(list(descriptors.iterdir()))
    idle = []
    try:
        for _ in range(300):
            client = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            idle.append(client)
            client.settimeout(30)
            client.connect(str(pair.socket))
        wait_until("most were let go", lambda: len(list(descriptors.iterdir())) < before + 20, 30)
        guest = Connection(pair.socket, DISK)
        guest.write(0, b"x" * 4096)
        guest.close()
        wait_until("all were let go", lambda: len(list(descriptors.iterdir())) <= before + 1, 60)
    finally:
        for client in idle:
            client.close()


def test_a_large_sparse_disk_is_compared_by_its_data(run):
    """8 TiB with three pieces of data: a full comparison ends, at first and after a daemon was killed without its
    log."""
    disk = run.directory / "sparse.img"
    size = 8 << 40
    with disk.open("wb") as file:
        file.truncate(size)
        for at in (0, size // 2, size - 4096):
            file.seek(at)
            file.write(b"data" * 1024)
    pair = Pair(run, Options(disk=disk))
    pair.start()
    pair.kill(pair.daemon)
    for log in pair.state_dir.rglob("*.activity"):
        log.unlink()
    pair.start_daemon()
    pair.wait_state("protected")
    assert "purpose=Compare" in pair.daemon.log.read_text()
