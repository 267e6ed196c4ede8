"""The activity log: after kill -9 only what may differ is compared, and a log that cannot be believed is not."""

from __future__ import annotations

import random

import pytest

from tidelock_testbed.oracle import Oracle
from tidelock_testbed.pair import GROUP, MEMBER, MIB, Options, Pair
from tidelock_testbed.process import wait_until

DISK_MIB = 96
WRITTEN_MIB = 3


def write_until_killed(pair: Pair, oracle: Oracle, seed: str) -> None:
    """A guest writes in a part of the disk, and the daemon dies at some moment."""
    chance = random.Random(seed)
    load = pair.load(oracle, seed, depth=chance.choice([1, 16, 64]))
    wanted = chance.randrange(100, 1500)
    wait_until("the load goes on", lambda: load.replies >= wanted or not load.alive(), 60, every_s=0.001)
    assert load.alive()
    pair.kill(pair.daemon)
    load.vanish()
    oracle.server_died()


@pytest.mark.parametrize("seed", [1, 2])
def test_only_the_map_is_compared(run, seed: int):
    """Three megabytes of a larger disk are written in; no more than their extents are compared, three times."""
    pair = Pair(run, Options(disk_mib=DISK_MIB))
    pair.start()
    oracle = Oracle(WRITTEN_MIB * MIB)
    for lap in range(3):
        pair.wait_mapped()
        write_until_killed(pair, oracle, f"activity {seed} {lap}")
        pair.start_daemon()
        pair.wait_state("protected")
        assert 0 < pair.compared_bytes() <= (WRITTEN_MIB + 1) * MIB
        pair.check_sites(oracle)
    pair.wait_mapped()
    assert pair.activity()["exposed_bytes"] <= (WRITTEN_MIB + 1) * MIB


def test_a_log_that_says_nothing_costs_a_whole_comparison(run):
    """Removed, damaged, or of a time before the backup lost track of the member: everything is compared, and said."""
    pair = Pair(run, Options(disk_mib=DISK_MIB))
    pair.start()
    oracle = Oracle(WRITTEN_MIB * MIB)
    log = pair.state_file.with_suffix(".activity")
    pair.wait_mapped()
    old = log.read_bytes()

    def damage() -> None:
        content = bytearray(log.read_bytes())
        for block in range(0, len(content), 4096):
            content[block + 40] ^= 1
        log.write_bytes(content)

    # The old one is whole, but another run has attached since.
    for spoil, said in [
        (log.unlink, "there is no activity log"),
        (damage, "the activity log is damaged"),
        (lambda: log.write_bytes(old), "another run"),
    ]:
        pair.wait_mapped()
        write_until_killed(pair, oracle, said)
        spoil()
        pair.start_daemon()
        pair.wait_state("protected")
        assert pair.compared_bytes() == DISK_MIB * MIB
        assert said in pair.daemon.log.read_text(), f"{GROUP}/{MEMBER}: {said}"
        pair.check_sites(oracle)


def test_a_clean_stop_needs_no_comparison_and_a_crash_after_it_only_the_map(run):
    """The log is begun anew after a clean stop."""
    pair = Pair(run, Options(disk_mib=DISK_MIB))
    pair.start()
    oracle = Oracle(WRITTEN_MIB * MIB)
    load = pair.load(oracle, "before")
    wait_until("some writes", lambda: load.replies > 300, 60)
    load.finish()
    pair.wait_settled()
    pair.daemon.stop()
    pair.start_daemon()
    pair.wait_state("protected")
    pair.wait_mapped()
    assert pair.activity()["entries"] == 0
    write_until_killed(pair, oracle, "after")
    pair.start_daemon()
    pair.wait_state("protected")
    assert 0 < pair.compared_bytes() <= (WRITTEN_MIB + 1) * MIB
    pair.check_sites(oracle)
