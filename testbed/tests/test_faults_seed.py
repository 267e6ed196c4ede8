"""The planned switch to the backup site, and the way back by delta: no byte is lost, no grace is waited for, and only
what differs is sent."""

from __future__ import annotations

import filecmp
import json
import random
import signal
import socket
from pathlib import Path

import pytest
from answered import answered_rig, check_nothing_missing

from tidelock_testbed import hostdaemon, nbdwire
from tidelock_testbed.hostdaemon import Protection, gate_of, writer_of
from tidelock_testbed.oracle import Oracle
from tidelock_testbed.pair import DISK, GROUP, LONG_S, MEMBER, MIB, Options, Pair
from tidelock_testbed.paths import BIN
from tidelock_testbed.process import Process, run_command, wait_until
from tidelock_testbed.rig import Recovery
from tidelock_testbed.risk import word_of

DISK_MIB = 64
WRITTEN_MIB = 4
NAME = f"{MEMBER}.{DISK}"
PATIENT = Options(lease_ms=60_000, grace_ms=120_000)
"""A grace that no test waits out: who recovers did not wait for it."""


def written_image(run, name: str = "old.img") -> Path:
    """A disk that is full of something, but for the part that the load writes to."""
    image = run.directory / name
    content = random.Random("what was there").randbytes((DISK_MIB - WRITTEN_MIB) * MIB)
    image.write_bytes(bytes(WRITTEN_MIB * MIB) + content)
    return image


def switch_over(pair: Pair, *options: str) -> dict:
    """As an operator does."""
    words = [BIN / "tidelock", "switchover", GROUP, "--json", *options, "--socket", pair.control_socket]
    return json.loads(run_command(words, "switch over"))


def recover(pair: Pair) -> dict:
    """Recovers the group, which must not wait for anything."""
    recovery = pair.start_recovery("--json")
    assert recovery.wait(LONG_S) == 0, recovery.tail()
    assert "waiting until" not in recovery.log.read_text()
    return pair.backup_group()["recovered"]


def recovered_disk(pair: Pair) -> nbdwire.Connection:
    """The disk that the backup site offers now."""
    return nbdwire.Connection(pair.sockets / "exports" / GROUP / f"{NAME}.sock", NAME)


def recovered_image(pair: Pair, disk_mib: int) -> Path:
    """All of it."""
    guest = recovered_disk(pair)
    image = pair.directory / "recovered.img"
    image.write_bytes(b"".join(guest.read(at, MIB) for at in range(0, disk_mib * MIB, MIB)))
    guest.close()
    return image


def check_recovered(pair: Pair) -> None:
    """It equals the disk of the old primary, byte by byte."""
    image = recovered_image(pair, DISK_MIB)
    assert filecmp.cmp(pair.disk, image, shallow=False)


def write_for_a_while(pair: Pair, oracle: Oracle, seed: str) -> None:
    load = pair.load(oracle, seed)
    begin = load.replies
    wait_until("some writes", lambda: load.replies > begin + 500, LONG_S, [pair.daemon])
    load.finish()
    assert load.errors == []


def copy_numbers(pair: Pair) -> dict[str, int]:
    """What the last copy has looked at, and what it has sent."""
    last = pair.daemon.log.read_text().split("compared_bytes=")[-1]
    return {"compared": int(last.split()[0]), "sent": int(last.split("sent_bytes=")[1].split()[0])}


def raw_guest(pair: Pair) -> socket.socket:
    """Connected to the disk's socket, and silent."""
    guest = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    guest.settimeout(LONG_S)
    guest.connect(str(pair.socket))
    return guest


def check_turned_away(pair: Pair) -> None:
    """Whoever connects is told so by the end of the connection, without a greeting, and need not wait for long."""
    for guest in [raw_guest(pair) for _ in range(3)]:
        assert guest.recv(1) == b""
        guest.close()
    assert pair.daemon.log.read_text().count("turned away") == 1


def no_connection(pair: Pair) -> bool:
    return writer_of(pair.group())["guest_io"]["connections"] == 0


def test_there_and_back_again(run):
    """Switched over, worked at the backup site, protected to the old site by delta, and switched home."""
    home = Pair(run, Options(disk=written_image(run), lease_ms=PATIENT.lease_ms, grace_ms=PATIENT.grace_ms))
    home.start()
    oracle = Oracle(WRITTEN_MIB * MIB)
    write_for_a_while(home, oracle, "at home")
    wait_until("the guest is gone", lambda: no_connection(home), LONG_S, [home.daemon])
    over = switch_over(home)
    assert over["switchover"]["state"] == "over" and over["switchover"]["problem"] is None, over
    group = home.group()
    assert word_of(group) == "fenced" and "switched over" in group["detail"]
    assert group["switched_over_unix_ms"] and not group["lease"]["held"]
    check_turned_away(home)

    recovered = recover(home)
    assert recovered["primary_declared_dead"] is False
    (writer,) = recovered["writers"]
    assert (writer["left_out"], writer["recovered"]) == (0, over["switchover"]["seqs"][MEMBER])
    check_recovered(home)
    assert oracle.violations(home.disk) == []

    # The backup site works. Then its disk is protected to where the old one still is.
    guest = recovered_disk(home)
    news = random.Random("news").randbytes(MIB)
    guest.write(20 * MIB + 4096, news)
    guest.flush()
    guest.close()
    disk = home.export()
    back = Pair(run, Options(disk=disk, lease_ms=PATIENT.lease_ms, grace_ms=PATIENT.grace_ms), name="back")
    back.start_backup()
    seed = ("seed", GROUP, f"{NAME}={home.disk}", "--move", "--json")
    with pytest.raises(RuntimeError, match="is in use"):
        back.backup_command(*seed)
    home.daemon.stop()
    assert json.loads(back.backup_command(*seed))["disks"][0]["how"] == "moved"
    with pytest.raises(RuntimeError, match="no host has compared its own with them"):
        back.backup_command("recover", GROUP, "--primary-is-dead")
    back.start_daemon()
    back.wait_state("protected")
    numbers = copy_numbers(back)
    assert numbers["compared"] == DISK_MIB * MIB
    assert MIB <= numbers["sent"] <= 3 * MIB, numbers
    write_for_a_while(back, oracle, "at the other site")
    back.check_sites(oracle)

    wait_until("the guest is gone", lambda: no_connection(back), LONG_S, [back.daemon])
    switch_over(back)
    recover(back)
    check_recovered(back)
    assert oracle.violations(back.disk) == []
    home_again = recovered_disk(back)
    assert home_again.read(20 * MIB + 4096, MIB) == news
    home_again.close()


def test_clients_lose_nothing_in_a_switch(run):
    """A real gate, and a guest that was not even stopped: all that clients were told is at the other site."""
    rig, clients = answered_rig(run, Protection(lease_s=60, grace_s=120))
    words = [BIN / "tidelock", "switchover", hostdaemon.GROUP, "--guest-is-stopped", "--json"]
    over = json.loads(run_command([*words, "--socket", rig.daemon.control_socket], "switch over"))
    assert over["switchover"]["problem"] is None, over
    gate = gate_of(rig.daemon.group())
    assert not gate["open"] and "switched over" in gate["shut_because"]
    recovery = Recovery(rig)
    recovery.wait_ready()
    assert not any("waiting until" in line for line in recovery.lines)
    ledger = clients.stop()
    assert len(ledger.confirmed) > 100
    check_nothing_missing(rig, recovery, ledger)


def test_a_switch_that_cannot_be_changes_nothing(run):
    """With a guest that has its disk open, and with a backup that does not take everything: the group goes on."""
    pair = Pair(run, PATIENT)
    pair.start()
    oracle = Oracle(32 * MIB)
    load = pair.load(oracle, "before")
    wait_until("some writes", lambda: load.replies > 300, LONG_S, [pair.daemon])
    with pytest.raises(RuntimeError, match="has its disks open"):
        switch_over(pair)
    with pytest.raises(RuntimeError, match="nothing was switched"):
        switch_over(pair, "--stop-command", "exit 3")
    pair.backup.signal(signal.SIGSTOP)
    written = load.replies
    wait_until("what the backup does not have", lambda: load.replies > written, LONG_S, [pair.daemon])
    load.finish()
    with pytest.raises(RuntimeError, match="did not get everything within 1s: it still lacks"):
        switch_over(pair, "--guest-is-stopped", "--timeout", "1s")
    # Refused: guests are served as before, while the backup is still away.
    write_for_a_while(pair, oracle, "still away")
    pair.backup.signal(signal.SIGCONT)
    pair.wait_state("protected")
    write_for_a_while(pair, oracle, "after")
    pair.check_sites(oracle)
    assert pair.group()["switched_over_unix_ms"] is None


def test_who_asks_and_goes_away_has_changed_nothing(run):
    """The command is killed while the backup lacks something: guests are served again, also one that came meanwhile."""
    pair = Pair(run, PATIENT)
    pair.start()
    oracle = Oracle(32 * MIB)
    write_for_a_while(pair, oracle, "before")
    pair.backup.signal(signal.SIGSTOP)
    write_for_a_while(pair, oracle, "what the backup does not have")
    words = [BIN / "tidelock", "switchover", GROUP, "--guest-is-stopped", "--timeout", "1h"]
    asking = Process(run, "switchover", [*words, "--socket", pair.control_socket])

    def says(text: str) -> bool:
        return text in pair.daemon.log.read_text()

    wait_until("no requests are taken", lambda: says("draining: no new requests"), LONG_S, [asking, pair.daemon])
    early = raw_guest(pair)
    assert early.recv(1) == b"", "nobody is served"
    early.close()
    asking.kill()
    wait_until("it is given up", lambda: says("not switched over: the group goes on"), LONG_S, [pair.daemon])
    write_for_a_while(pair, oracle, "after")
    pair.backup.signal(signal.SIGCONT)
    pair.wait_state("protected")
    write_for_a_while(pair, oracle, "and on")
    pair.check_sites(oracle)


def test_a_crash_after_the_switch_does_not_undo_it(run):
    """The daemon's next run serves nobody, asks for no lease, and the backup site need not wait for it."""
    pair = Pair(run, PATIENT)
    pair.start()
    oracle = Oracle(32 * MIB)
    write_for_a_while(pair, oracle, "before")
    switch_over(pair, "--guest-is-stopped")
    pair.kill(pair.daemon)
    # It forgets what it was told, and so waits out the grace unless it is told again.
    pair.kill(pair.backup)
    pair.start_backup()
    assert pair.backup_group()["grace_remaining_ms"] > 0
    pair.start_daemon()
    pair.wait_state("fenced")
    wait_until("it is told again", lambda: pair.backup_group()["grace_remaining_ms"] == 0, LONG_S, [pair.daemon])
    check_turned_away(pair)
    recover(pair)
    pair.kill(pair.daemon)
    guest = recovered_disk(pair)
    image = pair.directory / "recovered.img"
    image.write_bytes(b"".join(guest.read(at, MIB) for at in range(0, 32 * MIB, MIB)))
    guest.close()
    assert filecmp.cmp(pair.disk, image, shallow=False)
    assert oracle.violations(image) == []
