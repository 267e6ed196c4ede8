"""Disks, state directories and hosts of another moment: nothing that the host alone knows is taken for equal sites, and
a disk that was restored in place becomes the replica (DESIGN rules 6 and 12)."""

from __future__ import annotations

import os
import shutil
import signal
import stat
import subprocess
from pathlib import Path

import pytest

from tidelock_testbed import nbdwire
from tidelock_testbed.net import Net
from tidelock_testbed.oracle import Oracle
from tidelock_testbed.pair import DISK, GROUP, MEMBER, MIB, Options, Pair
from tidelock_testbed.process import run_command

DISK_MIB = 64


def started(run, **more) -> tuple[Pair, Oracle]:
    """Protected, with something on both sites that the backup keeps the past of."""
    pair = Pair(run, Options(disk_mib=DISK_MIB, window="1h", **more))
    pair.start()
    oracle = Oracle(DISK_MIB * MIB)
    pair.write(oracle, "first")
    pair.wait_settled()
    return pair, oracle


def keep(pair: Pair, name: str) -> Path:
    """State directory and disk as they are at this moment."""
    kept = pair.directory / name
    kept.mkdir()
    shutil.copytree(pair.state_dir, kept / "state")
    shutil.copy(pair.disk, kept / "disk.img")
    return kept


def restore(pair: Pair, kept: Path, state: bool = True, disk: bool = True) -> None:
    """As they were then."""
    if state:
        shutil.rmtree(pair.state_dir)
        shutil.copytree(kept / "state", pair.state_dir)
    if disk:
        shutil.copy(kept / "disk.img", pair.disk)


def check_all_is_compared(pair: Pair, why: str) -> None:
    """The replica becomes what the disk is now, and the log says why."""
    pair.start_daemon()
    pair.wait_state("protected")
    log = pair.daemon.log.read_text()
    assert pair.compared_bytes() == DISK_MIB * MIB
    assert why in log, log
    now = pair.disk.read_bytes()
    assert pair.export().read_bytes() == now


def edit(pair: Pair) -> None:
    """A tool writes to the image."""
    with pair.disk.open("r+b") as disk:
        disk.seek(10 * MIB)
        disk.write(b"fsck was here" * 1000)


def move(pair: Pair) -> None:
    """Another file of the same size takes its place, with the times of the one before."""
    other = pair.disk.with_suffix(".new")
    other.write_bytes(bytes(DISK_MIB * MIB))
    old = pair.disk.stat()
    os.utime(other, ns=(old.st_atime_ns, old.st_mtime_ns))
    other.rename(pair.disk)


@pytest.mark.parametrize("change", [edit, move])
def test_a_disk_that_changed_while_the_daemon_was_stopped_is_compared(run, change):
    """Whatever the host's own record says of a clean stop."""
    pair, _ = started(run)
    assert pair.daemon.stop() == 0
    change(pair)
    check_all_is_compared(pair, "a disk is not as it was when the daemon stopped")


def killed(run, disk: Path | None = None) -> Pair:
    """A daemon that a crash has ended, with a log that has half of the disk."""
    pair = Pair(run, Options(disk_mib=DISK_MIB, window="1h", disk=disk))
    pair.start()
    pair.write(Oracle(DISK_MIB // 2 * MIB), "first")
    pair.wait_settled()
    pair.wait_mapped()
    pair.kill(pair.daemon)
    return pair


def test_an_image_that_was_restored_in_place_after_a_crash_is_compared(run):
    """Also with the times that the copy had: the kernel dates a file's last change by itself."""
    pair = killed(run)
    with pair.disk.open("r+b") as disk:
        disk.seek(60 * MIB)
        disk.write(b"restored" * 512)
    long_ago = pair.disk.stat().st_mtime - 600
    for path in pair.disk, pair.state_file.with_suffix(".activity"):
        os.utime(path, (long_ago, long_ago))
    check_all_is_compared(pair, "it was restored or changed meanwhile")


def test_devices_that_have_changed_places_after_a_crash_are_compared(run):
    """The device at the configured path is as large as the one before, and of the same kind."""

    def loop(name: str) -> Path:
        image = run.directory / name
        image.write_bytes(bytes(DISK_MIB * MIB))
        device = run_command(["losetup", "--find", "--show", image], "make a loop device").strip()
        run.on_close(f"detach {device}", lambda: run_command(["losetup", "--detach", device], "detach"))
        return Path(device)

    first, second = loop("first.img"), loop("second.img")
    pair = killed(run, first)
    with second.open("r+b") as disk:
        disk.seek(60 * MIB)
        disk.write(b"another " * 512)
    pair.disk = second
    pair.write_host_config(pair.host_tls)
    check_all_is_compared(pair, "a disk is not as it was when the daemon stopped")


def test_a_clean_stop_costs_nothing_also_if_the_next_start_is_cut_short(run):
    """A start that does not reach the backup, and one that is killed, leave the record of the clean end as it was."""
    pair, oracle = started(run)
    assert pair.daemon.stop() == 0
    pair.backup.signal(signal.SIGSTOP)
    for _ in range(2):
        pair.start_daemon()
        pair.wait_state("disconnected")
        pair.kill(pair.daemon)
    pair.backup.signal(signal.SIGCONT)
    pair.start_daemon()
    pair.wait_state("protected")
    assert "compared_bytes=" not in pair.daemon.log.read_text()
    pair.check_sites(oracle)


@pytest.mark.parametrize("what", ["state", "both"])
def test_an_older_clean_stop_is_no_evidence_at_the_first_start_or_the_second(run, what: str):
    """Restored to an earlier clean stop, and the first start dies before it has compared anything."""
    pair, oracle = started(run)
    assert pair.daemon.stop() == 0
    kept = keep(pair, "then")
    pair.start_daemon()
    pair.wait_state("protected")
    pair.write(oracle, "second")
    pair.wait_settled()
    assert pair.daemon.stop() == 0
    restore(pair, kept, disk=what == "both")
    pair.start_daemon()
    pair.kill(pair.daemon)
    pair.start_daemon()
    pair.wait_state("protected")
    assert pair.compared_bytes() == DISK_MIB * MIB
    now = pair.disk.read_bytes()
    assert pair.export().read_bytes() == now


@pytest.mark.parametrize("started_before", [False, True])
def test_a_snapshot_of_host_and_disk_taken_while_it_ran_is_compared_as_a_whole(run, started_before: bool):
    """Crash-consistent in itself: its activity log is older than the backup has heard, by one transaction. It stays so
    when a daemon was started on it before and did not reach the backup."""
    pair = Pair(run, Options(disk_mib=DISK_MIB, window="1h"))
    pair.start()
    pair.write(Oracle(DISK_MIB // 2 * MIB), "first")
    # From here on the log changes when an extent is written that it does not have, and not otherwise.
    pair.wait_mapped()
    pair.daemon.signal(signal.SIGSTOP)
    kept = keep(pair, "snapshot")
    pair.daemon.signal(signal.SIGCONT)
    pair.wait_state("protected")
    guest = nbdwire.Connection(pair.socket, DISK, timeout_s=60)
    guest.write(60 * MIB, b"after it" * 512)
    guest.flush()
    guest.close()
    pair.wait_settled()
    pair.kill(pair.daemon)
    restore(pair, kept)
    if started_before:
        pair.kill(pair.backup)
        pair.start_daemon()
        pair.kill(pair.daemon)
        pair.start_backup()
    check_all_is_compared(pair, "the activity log is older than the backup has heard")


def test_a_disk_is_restored_in_place_from_an_export_of_the_past(run):
    """An intruder encrypts the disk, and that is replicated. The export of an earlier point is put in its place: the
    replica becomes that, a disaster gives it back with what came after, and the past keeps all of it."""
    pair, _ = started(run)
    good = pair.disk.read_bytes()
    pair.backup_command("bookmark", GROUP, "good")
    guest = nbdwire.Connection(pair.socket, DISK, timeout_s=60)
    for at in range(0, DISK_MIB * MIB, MIB):
        guest.write(at, b"ENCRYPTED!!!!!!!" * (MIB // 16))
    guest.flush()
    guest.close()
    pair.wait_settled()
    restored = pair.directory / "restored.img"
    pair.backup_command("export", GROUP, f"{MEMBER}.{DISK}", restored, "--at", "bookmark:good")
    assert restored.read_bytes() == good
    assert pair.daemon.stop() == 0
    shutil.copy(restored, pair.disk)
    pair.start_daemon()
    pair.wait_state("protected")
    guest = nbdwire.Connection(pair.socket, DISK, timeout_s=60)
    assert guest.read(0, 4096) == good[:4096]
    guest.write(60 * MIB, b"new order" * 100)
    guest.flush()
    guest.close()
    pair.wait_settled()
    pair.kill(pair.daemon)
    recovery = pair.start_recovery("--primary-is-dead")
    assert recovery.wait(90) == 0, recovery.tail()
    now = pair.export().read_bytes()
    assert now[: 60 * MIB] == good[: 60 * MIB]
    assert now[60 * MIB :][:900] == b"new order" * 100


def test_a_backlog_of_a_killed_daemon_is_not_done_again_on_a_disk_that_others_have_used(run):
    """The image is another one when the daemon is started: nothing of the old backlog is written to it."""
    net = Net(run, rtt_ms=10)
    options = Options(disk_mib=DISK_MIB, window="1h", group='backlog_on_disk = { size = "64MiB" }\n')
    pair = Pair(run, options, net)
    pair.start()
    guest = nbdwire.Connection(pair.socket, DISK, timeout_s=60)
    net.wan.cut()
    for nth in range(100):
        guest.write(nth * 4096, b"a%06d " % nth * 512)
    guest.flush()
    pair.kill(pair.daemon)
    move(pair)
    pair.start_daemon()
    pair.wait_state("disconnected")
    assert pair.disk.read_bytes() == bytes(DISK_MIB * MIB)
    net.wan.mend()
    pair.wait_state("protected")
    assert pair.disk.read_bytes() == bytes(DISK_MIB * MIB)
    assert pair.compared_bytes() == DISK_MIB * MIB
    assert pair.export().read_bytes() == bytes(DISK_MIB * MIB)


def test_a_disk_that_others_use_or_that_is_not_raw_is_refused(run):
    """The refusal names what holds the disk, and the command that frees it."""
    pair = Pair(run, Options(disk_mib=DISK_MIB))
    configured = pair.host_config.read_text()

    def refusal(path: Path | str) -> str:
        pair.host_config.write_text(configured.replace(str(pair.disk), str(path)))
        pair.start_daemon(wait=False)
        assert pair.daemon.wait(60) != 0
        return pair.daemon.log.read_text()

    def tool(*words: object) -> str:
        done = subprocess.run([str(word) for word in words], capture_output=True, text=True, check=True)
        return done.stdout.strip()

    image, point = pair.directory / "fs.img", pair.directory / "mounted"
    point.mkdir()
    tool("truncate", "-s", "20M", image)
    tool("mkfs.ext4", "-q", image)
    loop = tool("losetup", "--find", "--show", image)
    run.on_close("loop device", lambda: subprocess.run(["losetup", "-d", loop], check=False))
    assert f"losetup -d {loop}" in refusal(image)
    tool("mount", loop, point)
    run.on_close("mount", lambda: subprocess.run(["umount", str(point)], check=False))
    assert f"umount {point}" in refusal(loop)

    qcow2 = pair.directory / "disk.qcow2"
    qcow2.write_bytes(b"QFI\xfb\0\0\0\3" + bytes(MIB - 8))
    said = refusal(qcow2)
    assert "qcow2" in said and 'format = "raw"' in said
    raw = configured.replace(str(pair.disk), str(qcow2))
    pair.host_config.write_text(raw.replace(f'path = "{qcow2}"', f'path = "{qcow2}"\nformat = "raw"'))
    pair.start_backup()
    pair.start_daemon()
    pair.wait_state("protected")


def test_state_and_backlog_are_for_their_owner_alone(run):
    """With any umask: a backlog is guests' data."""
    before = os.umask(0)
    try:
        pair = Pair(run, Options(group='backlog_on_disk = { size = "64MiB" }\n'))
        pair.start()
        pair.write(Oracle(32 * MIB), "modes")
        pair.wait_settled()
    finally:
        os.umask(before)
    below = [path for path in pair.state_dir.rglob("*") if not path.is_socket()]
    assert any(path.suffix == ".segment" for path in below)
    for path in below:
        wanted = 0o700 if path.is_dir() else 0o600
        assert stat.S_IMODE(path.stat().st_mode) == wanted, path
