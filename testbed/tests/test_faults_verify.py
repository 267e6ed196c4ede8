"""Verification: what differs is found while the guest writes on, nothing else is, and it is repaired on command."""

from __future__ import annotations

import json
import random
import subprocess
from itertools import pairwise
from pathlib import Path

from tidelock_testbed.faultshim import FaultShim
from tidelock_testbed.hostdaemon import writer_of
from tidelock_testbed.oracle import Oracle
from tidelock_testbed.pair import DISK, GROUP, MEMBER, MIB, Options, Pair
from tidelock_testbed.paths import BIN
from tidelock_testbed.process import wait_until

DISK_MIB = 64
WRITTEN_MIB = 3
BAD = 40 * MIB + 3 * 4096
"""Where nobody writes."""
EQUAL, REFUSED, DIFFERS = 0, 1, 5
HOUR_S = 3600


def verify(pair: Pair, *options: str) -> subprocess.CompletedProcess:
    """As an operator does."""
    words = [BIN / "tidelock", "verify", GROUP, *options, "--socket", pair.control_socket]
    return subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)


def last(pair: Pair) -> dict:
    """What status says of the last one."""
    return writer_of(pair.group())["verify"]["last"]


def image(pair: Pair) -> Path:
    """The backup's image of the disk."""
    (found,) = pair.data_dir.rglob("*.img")
    return found


def change_a_byte(path: Path, offset: int) -> None:
    """Behind everybody's back."""
    with path.open("r+b") as file:
        file.seek(offset)
        was = file.read(1)
        file.seek(offset)
        file.write(bytes([was[0] ^ 0xFF]))


def test_what_differs_is_found_while_the_guest_writes_and_repaired_on_command(run):
    """Three times equal under load; then one byte is changed at the backup."""
    pair = Pair(run, Options(disk_mib=DISK_MIB, verify='rate = "1GiB/s"'))
    pair.start()
    oracle = Oracle(WRITTEN_MIB * MIB)
    load = pair.load(oracle, "verify", depth=32)
    for _ in range(3):
        wait_until("the guest writes", lambda before=load.replies: load.replies > before, 60)
        done = verify(pair)
        assert (done.returncode, done.stderr) == (EQUAL, ""), done
        assert "equal, 64 MiB compared" in done.stdout
    assert last(pair)["to_seq"] > last(pair)["from_seq"], "it wrote meanwhile"

    change_a_byte(image(pair), BAD + 17)
    done = verify(pair, "--json")
    assert done.returncode == DIFFERS, done
    (member,) = json.loads(done.stdout)["members"]
    place = {"disk": DISK, "offset": BAD, "len_bytes": 4096}
    assert member["member"] == MEMBER
    assert (member["verified"]["differing"], member["verified"]["repaired_bytes"]) == ([place], 0)
    group = pair.wait_state("differs")
    assert f"first at {DISK} offset {BAD}" in group["detail"]
    load.finish()

    pair.wait_state("differs")
    pair.daemon.stop()
    pair.start_daemon()
    pair.wait_state("differs")
    assert last(pair)["differing"] == [place], "a restart forgets nothing"

    load = pair.load(oracle, "repair", depth=32)
    done = verify(pair, "--repair")
    assert done.returncode == EQUAL, done
    assert "4 KiB of 64 MiB differed and were copied" in done.stdout
    load.finish()
    pair.wait_state("protected")
    assert verify(pair).returncode == EQUAL
    pair.check_sites(oracle)


def test_a_killed_site_and_bad_requests(run):
    """It waits while the backup is away, ends on command, and is given up for a resync; what is wrong is said."""
    pair = Pair(run, Options(disk_mib=DISK_MIB, verify='rate = "1MiB/s"'))
    # Holes would be verified at once.
    pair.disk.write_bytes(random.Random("verify").randbytes(DISK_MIB * MIB))
    pair.start()
    done = verify(pair, "--member", "nobody")
    assert done.returncode == REFUSED and f"those are: {MEMBER}" in done.stderr
    assert verify(pair, "--repair", "--stop").returncode == REFUSED

    assert verify(pair, "--no-wait").returncode == EQUAL
    done = verify(pair)
    assert done.returncode == REFUSED and "runs already" in done.stderr
    pair.kill(pair.backup)
    pair.wait_state("disconnected", "stalled")
    pair.start_backup()
    pair.wait_state("protected")

    def done_bytes() -> int:
        return writer_of(pair.group())["verify"]["running"]["done_bytes"]

    before = done_bytes()
    wait_until("it goes on where it was", lambda: done_bytes() > before, 60)
    assert verify(pair, "--stop").returncode == EQUAL
    wait_until("it has ended", lambda: writer_of(pair.group())["verify"]["ended"] == 1, 60)
    assert "stopped on command" in writer_of(pair.group())["verify"]["given_up"]
    assert last(pair) is None, "nothing is claimed of what was not looked at"

    pair.kill(pair.backup)
    pair.wait_state("disconnected", "stalled")
    done = verify(pair)
    assert done.returncode == REFUSED and "does not replicate now" in done.stderr


def test_the_schedule_begins_one(run):
    """At once where there was none."""
    pair = Pair(run, Options(disk_mib=DISK_MIB, verify='every = "1h", rate = "1GiB/s"'))
    pair.start()
    wait_until("it was verified", lambda: last(pair) is not None, 60)
    assert last(pair)["differing_bytes"] == 0 and last(pair)["compared_bytes"] == DISK_MIB * MIB
    assert "equal, 64 MiB compared" in pair.status_text()


def test_the_schedule_begins_the_next_one_when_it_is_due(run):
    """As long after the last one ended, also if that was in another run of the daemon; and not before."""
    shim = FaultShim(run, "the clock of both sites")
    pair = Pair(run, Options(disk_mib=DISK_MIB, verify='every = "1h", rate = "1GiB/s"'))
    pair.daemon_environment = pair.backup_environment = shim.environment
    pair.start()
    ends = []

    def again() -> bool:
        """One more than there were."""
        if last(pair) is not None and last(pair)["ended_unix_ms"] not in ends:
            ends.append(last(pair)["ended_unix_ms"])
            return True
        return False

    for hours in (0, 2, 4):
        shim.step_clock(hours * HOUR_S)
        if hours:
            pair.daemon.stop()
            pair.start_daemon()
        wait_until(f"it was verified, {hours} hours later", again, 60, [pair.daemon])
    assert all(later - earlier >= HOUR_S * 1000 for earlier, later in pairwise(ends))
    pair.daemon.stop()
    pair.start_daemon()
    pair.wait_state("protected")
    assert verify(pair).returncode == EQUAL
    assert writer_of(pair.group())["verify"]["ended"] == 1, "only the one that was asked for"
