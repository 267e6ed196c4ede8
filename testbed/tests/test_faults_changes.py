"""Changes of the configuration: the daemon is started again with it, history is kept, and the sites are equal.

Members that are added or removed, and disks that are added, are in `test_faults_group.py`.
"""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
from shop import bookmark

from tidelock_testbed.hostdaemon import writer_of
from tidelock_testbed.oracle import Oracle
from tidelock_testbed.pair import GROUP, MEMBER, MIB, Options, Pair, free_port
from tidelock_testbed.pki import Pki, TlsFiles
from tidelock_testbed.process import wait_until

DISK_MIB = 64
GROWN_MIB = 80


def started(run, **options) -> tuple[Pair, Oracle]:
    """Protected, with something on the disk, and a name for that point in the past."""
    pair = Pair(run, Options(disk_mib=DISK_MIB, window="1h", **options))
    pair.start()
    oracle = Oracle(DISK_MIB * MIB)
    pair.write(oracle, "first")
    bookmark(pair, "before")
    return pair, oracle


def export_of_before(pair: Pair) -> Path:
    """The disk as it was at the bookmark."""
    out = pair.directory / f"before-{random.randrange(1 << 30)}.img"
    pair.backup_command("export", GROUP, f"{MEMBER}.root", "--at", "bookmark:before", out)
    return out


def configure(pair: Pair, **options) -> None:
    """For the next start of the daemon."""
    pair.options = replace(pair.options, **options)
    pair.write_host_config(pair.host_tls)


def test_the_backup_moves_to_another_address(run):
    """The same data directory behind another port: the stream goes on, and nothing is compared."""
    pair, oracle = started(run)
    old = export_of_before(pair)
    pair.daemon.stop()
    pair.backup.stop()
    pair.port = free_port()
    pair.write_backup_config()
    pair.write_host_config(pair.host_tls)
    pair.start_backup()
    pair.start_daemon()
    pair.wait_state("protected")
    pair.write(oracle, "second")
    pair.check_sites(oracle)
    assert "purpose=" not in pair.daemon.log.read_text()
    assert export_of_before(pair).read_bytes() == old.read_bytes()


def test_certificates_are_renewed_while_both_run(run):
    """By the same authority, and by a new one, to which the old ones are strangers: the daemon is not restarted."""
    pair, oracle = started(run)

    def renewed(pki: Pki) -> None:
        for role, name, files in [("backup", pair.address, pair.backup_tls), ("host", "host-a", pair.host_tls)]:
            new = pki.issue(role, name, pki.directory / "new")
            put(new, files)

    def put(new: TlsFiles, files: TlsFiles) -> None:
        for source, target in [(new.ca, files.ca), (new.certificate, files.certificate), (new.key, files.key)]:
            assert source.name == target.name
            target.write_bytes(source.read_bytes())

    before = pair.host_tls.certificate.read_bytes()
    for pki in [Pki(pair.directory / "again", same_as=pair.pki), Pki(pair.directory / "other")]:
        renewed(pki)
        assert pair.host_tls.certificate.read_bytes() != before
        connects = pair.status()["link"]["connects"]
        pair.kill(pair.backup)
        pair.start_backup()
        wait_until("the link is back", lambda n=connects: pair.status()["link"]["connects"] > n, 60, [pair.daemon])
        pair.wait_state("protected")
        pair.write(oracle, str(pki.directory))
    pair.check_sites(oracle)
    assert "purpose=Compare" not in pair.daemon.log.read_text()


def test_the_mode_is_changed_in_the_file(run):
    """Each mode is in force after the next start, and so is the one before after another."""
    pair, oracle = started(run)
    old = export_of_before(pair)
    for mode, state in [("sync", "protected"), ("async", "following"), ("pipelined", "protected")]:
        pair.daemon.stop()
        configure(pair, mode=mode)
        pair.start_daemon()
        group = pair.wait_state(state)
        assert (group["mode"], group["configured_mode"]) == (mode, mode)
        pair.write(oracle, mode)
        pair.check_sites(oracle)
        assert "purpose=" not in pair.daemon.log.read_text()
    assert export_of_before(pair).read_bytes() == old.read_bytes()


def grow(pair: Pair) -> bytes:
    """The local disk, to hold something at its new end that the backup has never seen. Returns that."""
    new = random.Random("grown").randbytes(MIB)
    with pair.disk.open("r+b") as disk:
        disk.truncate(GROWN_MIB * MIB)
        disk.seek(DISK_MIB * MIB)
        disk.write(new)
    return new


@pytest.mark.parametrize("ends", ["cleanly", "killed"])
def test_a_disk_grows(run, ends: str):
    """The backup's disk grows with it. Who makes it larger may have written to it, so all of it is compared; earlier
    points have zeroes."""
    pair, oracle = started(run)
    old = export_of_before(pair)
    if ends == "cleanly":
        pair.daemon.stop()
    else:
        pair.kill(pair.daemon)
    new = grow(pair)
    pair.start_daemon()
    pair.wait_state("protected")
    assert writer_of(pair.group())["disks"][0]["size_bytes"] == GROWN_MIB * MIB
    assert pair.compared_bytes() == GROWN_MIB * MIB
    pair.check_sites()
    now = pair.export().read_bytes()
    assert len(now) == GROWN_MIB * MIB and now[DISK_MIB * MIB :][:MIB] == new
    past = export_of_before(pair).read_bytes()
    assert past == old.read_bytes() + bytes((GROWN_MIB - DISK_MIB) * MIB)

    # The guest uses it, over restarts of both sides, and it is there after a recovery.
    larger = Oracle(GROWN_MIB * MIB)
    load = pair.load(larger, "larger")
    wait_until("writes are done", lambda: load.replies > 1000 or not load.alive(), 60, [pair.daemon])
    load.vanish()
    larger.server_died()
    pair.kill(pair.daemon, pair.backup)
    pair.start_backup()
    pair.start_daemon()
    pair.check_sites()
    pair.kill(pair.daemon)
    recovery = pair.start_recovery("--primary-is-dead")
    assert recovery.wait(90) == 0, recovery.tail()
    assert pair.export().read_bytes() == pair.disk.read_bytes()


def test_a_disk_that_has_grown_is_killed_on_the_way(run):
    """Nothing is taken to be equal before all of it was compared."""
    pair, _ = started(run, copy_rate_mib=2)
    pair.daemon.stop()
    grow(pair)
    for _ in range(2):
        pair.start_daemon()
        pair.wait_state("copying")
        wait_until("it is under way", lambda: (writer_of(pair.group())["copy"] or {}).get("done_bytes"), 60)
        pair.kill(pair.daemon)
    pair.kill(pair.backup)
    configure(pair, copy_rate_mib=0)
    pair.start_backup()
    pair.start_daemon()
    pair.wait_state("protected")
    assert pair.compared_bytes() == GROWN_MIB * MIB
    pair.check_sites()


def test_a_disk_does_not_shrink(run):
    """It is refused in words that say so, nothing is lost, and it goes on when it has its size again."""
    pair, oracle = started(run)
    pair.daemon.stop()
    whole = pair.disk.read_bytes()
    with pair.disk.open("r+b") as disk:
        disk.truncate((DISK_MIB - 1) * MIB)
    pair.start_daemon()
    group = pair.wait_state("stalled")
    assert "they do not shrink" in group["detail"]
    pair.kill(pair.daemon)
    pair.disk.write_bytes(whole)
    pair.start_daemon()
    pair.check_sites(oracle)


@pytest.mark.parametrize("table", ["", 'backlog_on_disk = { size = "64MiB" }\n'], ids=["memory", "on-disk"])
def test_a_disk_is_removed(run, table: str):
    """The first of two, so that numbers have a gap: nothing is compared, the other goes on, the past has both."""
    scratch = run.directory / "scratch.img"
    content = random.Random("scratch").randbytes(MIB)
    scratch.write_bytes(content)
    keys = f'name = "scratch"\npath = "{scratch}"\n'
    pair, oracle = started(run, disk_before=keys, group=table)
    old = export_of_before(pair)

    def export_scratch(*at: str) -> bytes:
        out = pair.directory / f"scratch-{random.randrange(1 << 30)}.img"
        pair.backup_command("export", GROUP, f"{MEMBER}.scratch", *at, "--format", "raw", out)
        return out.read_bytes()

    assert export_scratch() == content
    pair.daemon.stop()
    scratch.unlink()
    configure(pair, disk_before=f"{keys}removed = true\n")
    pair.start_daemon()
    pair.wait_state("protected")
    assert "purpose=" not in pair.daemon.log.read_text()
    load = pair.load(oracle, "second")
    wait_until("writes are done", lambda: load.replies > 500 or not load.alive(), 60, [pair.daemon])
    load.vanish()
    oracle.server_died()
    pair.kill(pair.daemon)
    pair.start_daemon()
    pair.check_sites(oracle)
    assert ("going on with the backlog on disk" in pair.daemon.log.read_text()) == bool(table)
    assert [disk["name"] for disk in writer_of(pair.group())["disks"]] == ["root"]
    pair.write(oracle, "third")

    assert export_scratch("--at", "bookmark:before") == content
    assert export_of_before(pair).read_bytes() == old.read_bytes()
    with pytest.raises(RuntimeError, match="scratch"):
        export_scratch()

    # Neither its place nor its name is given again.
    pair.daemon.stop()
    scratch.write_bytes(content)
    for before, said in [(keys, "another name"), ("", "removed = true")]:
        configure(pair, disk_before=before)
        pair.start_daemon()
        assert said in pair.wait_state("stalled")["detail"]
        pair.kill(pair.daemon)
    configure(pair, disk_before='name = "scratch"\nremoved = true\n')
    pair.start_daemon()
    pair.check_sites(oracle)
    pair.kill(pair.daemon)
    recovery = pair.start_recovery("--primary-is-dead")
    assert recovery.wait(90) == 0, recovery.tail()
    assert pair.export().read_bytes() == pair.disk.read_bytes()
    with pytest.raises(RuntimeError, match="scratch"):
        export_scratch()
