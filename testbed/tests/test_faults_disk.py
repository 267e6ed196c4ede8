"""The local disk and the configuration: what cannot be used is refused before anything starts, and a disk that fails
is the guest's to see, while the sites still agree (DESIGN rule 6)."""

from __future__ import annotations

import fcntl
import subprocess
from pathlib import Path

import pytest

from tidelock_testbed.faultydisk import FaultyDisk
from tidelock_testbed.hostdaemon import writer_of
from tidelock_testbed.nbdwire import EIO, Connection, NbdError
from tidelock_testbed.oracle import BLOCK, Oracle, block_data
from tidelock_testbed.pair import DISK, GROUP, MEMBER, MIB, Options, Pair
from tidelock_testbed.paths import BIN
from tidelock_testbed.process import run_command, wait_until
from tidelock_testbed.risk import word_of


def refused_start(pair: Pair) -> tuple[int, str]:
    """How the daemon ends, and what it says."""
    pair.start_daemon(wait=False)
    status = pair.daemon.wait(60)
    assert not pair.control_socket.exists(), "nothing was started"
    assert not pair.socket.exists()
    return status, pair.daemon.log.read_text()


def test_image_smaller_than_configured(run):
    pair = Pair(run, Options(configured_size="64MiB", disk_mib=32))
    status, log = refused_start(pair)
    assert status == 1, "it may be there as it should be at the next start"
    line = 1 + pair.host_config.read_text().splitlines().index('size = "64MiB"')
    assert f"host.toml:{line}:" in log
    assert "write instead" in log


def test_a_device_that_ends_inside_a_sector_is_refused(run):
    """Its last bytes can neither be read nor copied, so the first copy would never end."""
    image = run.directory / "sectors.img"
    image.write_bytes(bytes(8 * MIB + 512))
    losetup = ["losetup", "--sector-size", "4096", "--find", "--show", image]
    device = run_command(losetup, "make a loop device").strip()
    run.on_close(f"detach {device}", lambda: run_command(["losetup", "--detach", device], "detach"))
    status, log = refused_start(Pair(run, Options(disk=Path(device))))
    assert status != 0
    assert "the last 512 bytes cannot be read" in log and "a multiple of 4096 bytes" in log, log


def test_image_that_shrank_since_it_was_protected(run):
    """The backup knows its size: replicating a shorter disk into a longer one is refused, and status says so."""
    pair = Pair(run)
    pair.start()
    pair.daemon.stop()
    with pair.disk.open("r+b") as disk:
        disk.truncate(16 * MIB)
    pair.start_daemon()
    group = pair.wait_state("stalled")
    assert "size" in group["detail"] or str(32 * MIB) in group["detail"], group["detail"]


def test_image_that_somebody_else_uses(run):
    """Two writers of one image would ruin it: refused, with the reason."""
    pair = Pair(run)
    with pair.disk.open("r+b") as other:
        fcntl.lockf(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        status, log = refused_start(pair)
        assert status != 0
        assert str(pair.disk) in log and "use" in log, log
    pair.start_backup()
    pair.start_daemon()
    pair.wait_state("protected")
    # A second daemon on the same image, with directories of its own.
    other = pair.directory / "other.toml"
    text = pair.host_config.read_text().replace(str(pair.runtime), f"{pair.runtime}2").replace("/state", "/state2")
    other.write_text(text)
    first, pair.host_config, pair.runtime = pair.daemon, other, pair.runtime.with_name("host2")
    pair.start_daemon(wait=False)
    assert pair.daemon.wait(60) != 0
    assert str(pair.disk) in pair.daemon.log.read_text()
    assert first.alive()


@pytest.mark.parametrize(
    ("right", "wrong", "says"),
    [
        ('mode = "pipelined"', 'mode = "pipelines"', "pipelined"),
        ('backlog = "64MiB"', "backlogs = 7", "backlogs"),
        ('lease = "2000ms"', 'lease = "2000"', "unit"),
        ('grace = "3000ms"', 'grace = "1s"', "grace"),
        ('roles = ["writer"]', 'roles = ["reader"]', "writer"),
    ],
    ids=["value", "unknown-key", "unit", "too-short", "role"],
)
def test_mistakes_in_the_configuration(run, right: str, wrong: str, says: str):
    """Exit code 2, with file, line and what to write instead."""
    pair = Pair(run)
    text = pair.host_config.read_text()
    assert right in text
    pair.host_config.write_text(text.replace(right, wrong))
    status, log = refused_start(pair)
    assert status == 2
    line = 1 + next(n for n, row in enumerate(pair.host_config.read_text().splitlines()) if wrong in row)
    assert f"host.toml:{line}:" in log
    assert says in log
    assert "write instead" in log


def test_a_disk_that_fails(run):
    """The guest gets EIO where the disk gave it; what the disk then holds is what the backup holds."""
    disk = FaultyDisk(run, 32 * MIB)
    pair = Pair(run, Options(disk=disk.device))
    pair.start()
    disk.detach()
    oracle = Oracle(32 * MIB)
    load = pair.load(oracle, "faulty")
    wait_until("the load goes on", lambda: load.replies > 300, 60)

    disk.fail("pwrite")
    wait_until("writes fail", lambda: len(load.errors) > 20, 60)
    disk.fail()
    wanted = load.replies + 200
    wait_until("the load goes on", lambda: load.replies > wanted, 60)
    assert load.alive(), "an error is an answer, not an end"
    load.finish()
    assert set(load.errors) == {EIO}
    assert writer_of(pair.group())["guest_io"]["disk_errors"] >= len(load.errors)
    pair.check_sites(oracle)


def test_a_disk_that_can_neither_be_written_nor_read(run):
    """What may differ is named in status until the disk can be read again; then the sites are made equal."""
    disk = FaultyDisk(run, 32 * MIB)
    pair = Pair(run, Options(disk=disk.device))
    pair.start()
    disk.detach()
    oracle = Oracle(32 * MIB)
    guest = Connection(pair.socket, DISK)
    disk.fail("pwrite", "pread")
    failed = 0
    for block in range(64):
        write = oracle.issue(range(block, block + 1), zero=False)
        try:
            guest.write(block * BLOCK, block_data(write.version, block))
            oracle.complete(write)
        except NbdError as error:
            assert error.errno == EIO
            failed += 1
    assert failed > 0
    with pytest.raises(NbdError):
        guest.read(MIB, BLOCK)
    detail = wait_until("status names what may differ", lambda: pair.group()["detail"], 60, [pair.daemon])
    assert "the sites may differ in" in detail
    assert word_of(pair.group()) != "protected", "not in sync, and not called so"
    disk.fail()
    wait_until("nothing differs any more", lambda: pair.group()["detail"] is None, 60, [pair.daemon])
    guest.close()
    pair.check_sites(oracle)


def test_a_disk_that_fails_a_flush(run):
    """Nobody knows what such a disk has kept, so no later flush is answered as if all were well, also once it works
    again. Writes are at the backup as ever, and the next start compares the sites."""
    disk = FaultyDisk(run, 8 * MIB, with_flush=True)
    pair = Pair(run, Options(disk=disk.device, disk_mib=8))
    pair.start()
    oracle = Oracle(8 * MIB)
    guest = Connection(pair.socket, DISK)

    def write(block: int) -> None:
        issued = oracle.issue(range(block, block + 1), zero=False)
        guest.write(block * BLOCK, block_data(issued.version, block))
        oracle.complete(issued)

    def flush_fails() -> None:
        with pytest.raises(NbdError) as error:
            guest.flush()
        assert error.value.errno == EIO

    write(1)
    guest.flush()
    disk.fail("flush")
    write(2)
    flush_fails()
    detail = pair.group()["detail"]
    assert f"disk {DISK} failed a flush" in detail, detail
    disk.fail()
    flush_fails()
    write(3)
    guest.close()
    pair.wait_settled()
    words = ["switchover", GROUP, "--guest-is-stopped", "--socket", pair.control_socket]
    refused = subprocess.run([BIN / "tidelock", *words], capture_output=True, text=True, timeout=60)
    assert refused.returncode == 1, refused
    assert f"disk {DISK} of {MEMBER} has failed a flush" in refused.stderr, refused
    assert "start the daemon again" in refused.stderr, refused
    pair.daemon.stop()
    assert "clean=false" in pair.daemon.log.read_text()

    pair.start_daemon()
    pair.wait_state("protected")
    disk.detach()
    guest = Connection(pair.socket, DISK)
    guest.flush()
    guest.close()
    pair.check_sites(oracle)
