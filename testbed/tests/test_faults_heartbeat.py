"""Replication that stops without a word: nothing fails and nobody complains, only the acknowledgement does not come. It
is found by the heartbeat that is missing (DESIGN rules 6 and 8)."""

from __future__ import annotations

import signal
from pathlib import Path

from tidelock_testbed.hostdaemon import writer_of
from tidelock_testbed.net import Net
from tidelock_testbed.oracle import Oracle
from tidelock_testbed.pair import LONG_S, MIB, Options, Pair
from tidelock_testbed.process import wait_until
from tidelock_testbed.risk import word_of
from tidelock_testbed.run import Run

LONG_LEASE = {"lease_ms": 120_000, "grace_ms": 180_000}
"""Nothing else finds the silence within a test's time: the link is given up after a lease without a word."""
BEAT = 'interval = "250ms", alarm_after = "1s"'


def started(run: Run, heartbeat: str = BEAT, **options) -> Pair:
    """A protected pair at both ends of a WAN, whose heartbeats come back."""
    net = Net(run, rtt_ms=10)
    pair = Pair(run, Options(heartbeat=heartbeat, **{**LONG_LEASE, **options}), net)
    pair.start()
    wait_returned(pair, 3)
    return pair


def beat_of(pair: Pair) -> dict:
    return writer_of(pair.group())["heartbeat"]


def wait_returned(pair: Pair, more: int) -> None:
    """Waits until so many more heartbeats have come back."""
    wanted = beat_of(pair)["returned"] + more
    wait_until("heartbeats come back", lambda: beat_of(pair)["returned"] >= wanted, LONG_S, [pair.daemon])


def journal_bytes(pair: Pair) -> int:
    return sum(path.stat().st_size for path in segments(pair.backup_files()))


def segments(data: Path) -> list[Path]:
    return list(data.glob("groups/*/journal/*.seg"))


def missed(pair: Pair) -> None:
    """Waits until the silence is told in every place where an operator looks."""
    group = pair.wait_state("stalled")
    assert pair.status()["link"]["state"] == "connected", "nothing else has noticed"
    assert "the backup acknowledges nothing" in group["detail"]
    beat = writer_of(group)["heartbeat"]
    assert beat["missing"] == "backup" and beat["age_ms"] >= beat["alarm_after_ms"]
    text = pair.status_text()
    assert "STALLED" in text and "MISSING" in text, text
    assert "NO HEARTBEAT" in pair.daemon.log.read_text()


def back(pair: Pair) -> None:
    """Waits until all is well again by itself."""
    pair.wait_state("protected")
    assert beat_of(pair)["missing"] is None
    assert "heartbeats come back again" in pair.daemon.log.read_text()
    assert pair.status()["link"]["connects"] == 1, "by the same connection"
    wait_returned(pair, 3)


def test_a_backup_that_is_stopped_is_found(run):
    """The server takes connections and says nothing: an idle group would never know."""
    pair = started(run)
    pair.backup.signal(signal.SIGSTOP)
    missed(pair)
    pair.backup.signal(signal.SIGCONT)
    back(pair)


def test_a_link_that_swallows_packets_is_found(run):
    """No reset, no close: packets go in and nothing comes out, while the guest writes."""
    pair = started(run)
    oracle = Oracle(32 * MIB)
    load = pair.load(oracle, "swallowed")
    wait_until("the load goes on", lambda: load.replies > 100, LONG_S)
    pair.net.wan.cut()
    missed(pair)
    lag = writer_of(pair.group())["lag"]
    assert lag["writes"] > 0, "what is written waits"
    pair.net.wan.mend()
    back(pair)
    load.finish()
    assert load.errors == []
    pair.check_sites(oracle)


def test_a_silence_in_a_resync_is_found(run):
    """Copies do not stand for heartbeats, nor delay them: during a resync the alarm is the same."""
    pair = started(run, copy_rate_mib=1)
    oracle = Oracle(32 * MIB)
    load = pair.load(oracle, "before the crash")
    wait_until("the load goes on", lambda: load.replies > 200, LONG_S)
    # All of the disks are compared: there is no map of where they may differ.
    pair.kill(pair.daemon)
    load.vanish()
    oracle.server_died()
    for log in (pair.directory / "state").rglob("*.activity"):
        log.unlink()
    pair.start_daemon()
    pair.wait_state("copying")
    wait_returned(pair, 3)
    assert word_of(pair.group()) == "copying", "C stands still meanwhile, and heartbeats come back all the same"
    pair.backup.signal(signal.SIGSTOP)
    missed(pair)
    pair.backup.signal(signal.SIGCONT)
    pair.wait_state("copying", "protected")
    pair.wait_state("protected")
    pair.check_sites(oracle)


def test_a_quiet_group_is_protected_and_its_journal_grows_by_heartbeats_alone(run):
    """Each costs the journal one small record, and changes no disk."""
    pair = started(run, window="1h")
    pair.wait_settled()
    before, returned, exported = journal_bytes(pair), beat_of(pair)["returned"], pair.export().read_bytes()
    states = set()

    def enough() -> bool:
        group = pair.group()
        states.add(word_of(group))
        return writer_of(group)["heartbeat"]["returned"] >= returned + 20

    wait_until("heartbeats come back", enough, LONG_S, [pair.daemon])
    assert states == {"protected"}
    # At most one more is under way or was sent since.
    beats = beat_of(pair)["returned"] - returned + 2
    grown = journal_bytes(pair) - before
    assert 0 < grown <= 256 * beats, f"{grown} bytes for {beats} heartbeats"
    writer = writer_of(pair.group())
    assert writer["guest_io"]["writes"] == 0 and writer["pending"] == 0, "no guest has written"
    assert pair.export().read_bytes() == exported


def test_a_group_that_writes_sends_no_heartbeats(run):
    """Its own writes come back; they are as good."""
    pair = started(run, heartbeat='interval = "10s", alarm_after = "30s"')
    oracle = Oracle(32 * MIB)
    load = pair.load(oracle, "busy")
    wait_until("the load goes on", lambda: load.replies > 100, LONG_S)
    sent = beat_of(pair)["sent"]
    wait_returned(pair, 20)
    assert beat_of(pair)["sent"] <= sent + 1, "but for one that was due as the load began"
    load.finish()
    pair.check_sites(oracle)


def test_without_heartbeats_a_silence_in_a_quiet_group_is_not_found(run):
    """What they are for: the same stop, and the state says what it said before, until the lease ends."""
    net = Net(run, rtt_ms=10)
    pair = Pair(run, Options(heartbeat='interval = "off"', lease_ms=4_000, grace_ms=6_000), net)
    pair.start()
    assert beat_of(pair)["interval_ms"] is None
    pair.backup.signal(signal.SIGSTOP)
    states = set()

    def given_up() -> bool:
        states.add(word_of(pair.group()))
        return "disconnected" in states

    wait_until("the link is given up", given_up, LONG_S, [pair.daemon])
    assert states == {"protected", "disconnected"}
    pair.backup.signal(signal.SIGCONT)
    pair.wait_state("protected")
