"""What hangs, or is wrong without an error: the daemon, the local disk, either side's clock. What is seen of it, as
docs/manual/states.md says under "By what has broken", and that all goes on when it is over (DESIGN rules 6 and 8)."""

from __future__ import annotations

import signal
import subprocess

import pytest

from tidelock_testbed.faultshim import FaultShim
from tidelock_testbed.faultydisk import FaultyDisk
from tidelock_testbed.hostdaemon import writer_of
from tidelock_testbed.oracle import Load, Oracle
from tidelock_testbed.pair import DISK, GROUP, LONG_S, MEMBER, MIB, Options, Pair
from tidelock_testbed.paths import BIN
from tidelock_testbed.process import wait_until
from tidelock_testbed.risk import word_of

HOUR_S = 3600


def writing(pair: Pair, oracle: Oracle, seed: str) -> Load:
    """A guest that has written something."""
    load = pair.load(oracle, seed)
    wait_until("some writes", lambda: load.replies > 100, LONG_S, [pair.daemon])
    return load


def goes_on(pair: Pair, load: Load) -> None:
    """The guest gets answers again, and no request of it has failed."""
    before = load.replies
    wait_until("the guest goes on", lambda: load.replies > before + 100, LONG_S, [pair.daemon])
    load.finish()
    assert load.errors == []


def hang_of(pair: Pair) -> dict | None:
    return writer_of(pair.group())["disk_hang"]


def test_a_daemon_that_is_stopped_goes_on_where_it_was(run):
    """Longer than its lease: nobody can ask it, the backup waits for nothing any more, and then nothing is compared."""
    pair = Pair(run)
    pair.start()
    oracle = Oracle(32 * MIB)
    load = writing(pair, oracle, "stopped")
    pair.daemon.signal(signal.SIGSTOP)
    asked = subprocess.run(
        [BIN / "tidelock", "status", "--socket", pair.control_socket], capture_output=True, text=True, timeout=LONG_S
    )
    assert asked.returncode == 1 and "the daemon did not answer" in asked.stderr
    wait_until("nothing was heard for the grace", lambda: pair.backup_group()["grace_remaining_ms"] == 0, LONG_S)
    pair.daemon.signal(signal.SIGCONT)
    pair.wait_state("protected")
    goes_on(pair, load)
    pair.check_sites(oracle)
    assert "purpose=Compare" not in pair.daemon.log.read_text()


def test_a_local_disk_that_hangs_hangs_the_guest_and_nothing_else(run):
    """Heartbeats come back, what the guest has asked for is at the backup, and the disk is named. It cannot be switched
    over. Killed and recovered without the disk, the group has all that was completed."""
    disk = FaultyDisk(run, 32 * MIB)
    pair = Pair(run, Options(disk=disk.device, heartbeat='interval = "250ms", alarm_after = "3s"'))
    pair.start()
    disk.detach()
    oracle = Oracle(32 * MIB)
    load = writing(pair, oracle, "hangs")
    disk.process.signal(signal.SIGSTOP)
    wait_until("the guest hangs", lambda: load.in_flight() == 16, LONG_S, [pair.daemon])
    pair.wait_settled()
    returned = pair.group()["members"][0]["writer"]["heartbeat"]["returned"]

    def beats() -> bool:
        return pair.group()["members"][0]["writer"]["heartbeat"]["returned"] > returned + 16

    wait_until("heartbeats come back for longer than the alarm", beats, LONG_S, [pair.daemon])
    assert word_of(pair.group()) == "protected" and load.errors == []
    wait_until("the disk is named", lambda: hang_of(pair), LONG_S, [pair.daemon])
    assert hang_of(pair)["disk"] == DISK and hang_of(pair)["ms"] > 3_000
    assert f"disk {DISK} has not answered a request for" in pair.group()["detail"]
    assert "HANGS: no answer for" in pair.status_text()
    wait_until("the log says so", lambda: "DISK HANGS" in pair.daemon.log.read_text(), LONG_S)
    disk.process.signal(signal.SIGCONT)
    goes_on(pair, load)
    wait_until("it is over", lambda: hang_of(pair) is None, LONG_S)
    wait_until("the log says so", lambda: "the local disk answers again" in pair.daemon.log.read_text(), LONG_S)
    pair.check_sites(oracle)

    load = writing(pair, oracle, "hangs again")
    disk.process.signal(signal.SIGSTOP)
    wait_until("the disk is named", lambda: hang_of(pair), LONG_S, [pair.daemon])
    words = ["switchover", GROUP, "--guest-is-stopped", "--timeout", "1s", "--socket", pair.control_socket]
    refused = subprocess.run([BIN / "tidelock", *words], capture_output=True, text=True, timeout=LONG_S)
    assert refused.returncode == 1 and f"disk {DISK} has not answered" in refused.stderr, refused
    pair.wait_settled()
    # Its threads end when the disk answers, but nothing that it did goes on.
    pair.daemon.signal(signal.SIGKILL)
    load.vanish()
    oracle.server_died()
    recovery = pair.start_recovery()
    assert recovery.wait(LONG_S) == 0, recovery.tail()
    assert oracle.violations(pair.export()) == []
    disk.process.signal(signal.SIGCONT)


def can_view_a_second_ago(pair: Pair) -> bool:
    """Whether the initial copy was complete then; any other refusal is an error."""
    try:
        pair.backup_command("view", GROUP, "--at", "-1s", "--detach")
    except RuntimeError as e:
        if "the initial copy of" not in str(e):
            raise
        return False
    return True


@pytest.mark.parametrize("ahead_s", [2 * HOUR_S, -2 * HOUR_S], ids=["ahead", "behind"])
def test_the_backups_clock_is_wrong(run, ahead_s: float):
    """Replication does not look at it, the past stays, and points in time go by the time of arrival, which a step of
    the clock does not move."""
    shim = FaultShim(run, "the backup's clock")
    pair = Pair(run, Options(window="1h"))
    pair.backup_environment = shim.environment
    pair.start()
    oracle = Oracle(32 * MIB)
    goes_on(pair, writing(pair, oracle, "before"))
    pair.wait_settled()
    pair.backup_command("bookmark", GROUP, "before")
    before = pair.export()
    shim.step_clock(ahead_s)
    goes_on(pair, writing(pair, oracle, "after"))
    pair.wait_state("protected")
    pair.check_sites(oracle)
    wait_until("the disks have had a state for a second", lambda: can_view_a_second_ago(pair), LONG_S, [pair.backup])
    then = pair.directory / "then.img"
    pair.backup_command("export", GROUP, f"{MEMBER}.{DISK}", "--at", "bookmark:before", then)
    assert then.read_bytes() == before.read_bytes()
    shim.step_clock(0)
    goes_on(pair, writing(pair, oracle, "right again"))
    pair.check_sites(oracle)
    assert "purpose=Compare" not in pair.daemon.log.read_text()


@pytest.mark.parametrize("ahead_s", [HOUR_S, -HOUR_S], ids=["ahead", "behind"])
def test_a_hosts_clock_that_jumps_is_not_believed(run, ahead_s: float):
    """It is said what to do, times go on as before, and it is believed when it is back."""
    shim = FaultShim(run, "the daemon's clock")
    pair = Pair(run)
    pair.daemon_environment = shim.environment
    pair.start()
    oracle = Oracle(32 * MIB)
    load = writing(pair, oracle, "jumps")
    shim.step_clock(ahead_s)
    wait_until("status says so", lambda: "is not believed" in (pair.group()["detail"] or ""), LONG_S, [pair.daemon])
    assert "start the daemon again" in pair.group()["detail"] and "start the daemon again" in pair.status_text()
    assert "the wall clock has jumped and is not believed" in pair.daemon.log.read_text()
    assert abs(writer_of(pair.group())["clock_refused_ms"] - ahead_s * 1000) < HOUR_S * 1000 / 2
    goes_on(pair, load)
    pair.wait_state("protected")
    shim.step_clock(0)
    wait_until("it is believed", lambda: writer_of(pair.group())["clock_refused_ms"] is None, LONG_S, [pair.daemon])
    assert pair.group()["detail"] is None
    pair.check_sites(oracle)
    assert "purpose=Compare" not in pair.daemon.log.read_text()


def test_a_backup_whose_clock_is_far_off_says_so(run):
    """No certificate is valid then: no host can connect, and the log says why; when it is set, all goes on."""
    shim = FaultShim(run, "the backup's clock")
    pair = Pair(run)
    pair.backup_environment = shim.environment
    pair.start()
    pair.daemon.stop()
    shim.step_clock(-100 * 24 * HOUR_S)
    pair.start_daemon()
    said = "check this machine's clock"
    wait_until("the server says so", lambda: said in pair.backup.log.read_text(), LONG_S, [pair.backup])
    pair.wait_state("disconnected")
    shim.step_clock(0)
    pair.wait_state("protected")
