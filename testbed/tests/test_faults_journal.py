"""A journal that cannot be opened: cut before the damage on command, and made whole by the primary's resync. One on a
disk that did not work for a while: a disaster does not wait for it any longer than it must."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from tidelock_testbed.faultshim import FaultShim
from tidelock_testbed.oracle import Oracle
from tidelock_testbed.pair import GROUP, LONG_S, MIB, Options, Pair
from tidelock_testbed.paths import BIN
from tidelock_testbed.process import wait_until

DISK_MIB = 64
WRITTEN_MIB = 3


def repair(pair: Pair, *options: str) -> subprocess.CompletedProcess:
    """As an operator does."""
    words = [BIN / "tidelock-backup", "repair", GROUP, *options, "--config", pair.backup_config]
    return subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)


def written(segment: Path) -> int:
    return len(segment.read_bytes().rstrip(b"\0"))


def damage_headers(segment: Path, size: int) -> None:
    """Whatever is in the middle of its first bytes, much of it is gone. What was written later is there still: without
    it, nothing would tell damage from a write that was not finished."""
    with segment.open("r+b") as file:
        file.seek(size // 2)
        file.write(b"\xa5" * (size // 4))


def test_a_damaged_newest_segment_is_cut_and_the_primary_brings_the_rest_again(run):
    """Refused and told; a dry run changes nothing; cut, the host resyncs; in the end both sites are equal."""
    pair = Pair(run, Options(disk_mib=DISK_MIB, window="1h"))
    pair.start()
    oracle = Oracle(WRITTEN_MIB * MIB)
    load = pair.load(oracle, "before", depth=16)
    wait_until("the guest writes", lambda: load.replies > 300, 60)
    load.finish()
    pair.wait_settled()
    newest = max(pair.data_dir.rglob("*.seg"))
    size = written(newest)
    load = pair.load(oracle, "then", depth=16)
    wait_until("the guest writes", lambda: load.replies > 200, 60)
    load.finish()
    pair.wait_settled()
    assert repair(pair).returncode != 0, "nothing is wrong"
    pair.kill(pair.backup)
    assert max(pair.data_dir.rglob("*.seg")) == newest
    damage_headers(newest, size)
    damaged = newest.read_bytes()
    pair.start_backup()

    def broken() -> str:
        (group,) = json.loads(pair.backup_command("status", "--json"))["groups"]
        return group["broken"] or ""

    wait_until("the group is refused", lambda: "is damaged at byte" in broken(), 60)
    assert "tidelock-backup repair" in broken()
    told = repair(pair)
    assert told.returncode == 0 and "can be cut before it" in told.stdout, told
    assert "writes behind it are lost" in told.stdout
    assert newest.read_bytes() == damaged, "nothing has changed"

    done = json.loads(repair(pair, "--yes", "--json").stdout)
    assert done["is_done"] and done["writers"][0]["kept"] < done["writers"][0]["lost"]
    (kept,) = pair.data_dir.rglob("quarantine/*.seg")
    assert kept.read_bytes() == damaged
    # The host was told of more than is there: its stream cannot go on. Its next run compares everything.
    wait_until("the daemon has ended", lambda: not pair.daemon.alive(), 60)
    assert "has lost acknowledged writes" in pair.daemon.log.read_text()
    pair.start_daemon()
    pair.wait_state("protected")
    load = pair.load(oracle, "after", depth=16)
    wait_until("the guest writes", lambda: load.replies > 100, 60)
    load.finish()
    pair.wait_state("protected")
    pair.check_sites(oracle)


def test_a_recovery_does_not_wait_for_the_next_attempt_of_a_disk_that_works_again(run):
    """The disk's syncs fail, the site is lost, and the disk works again: `recover` works at once."""
    shim = FaultShim(run, "the backup's disk", has_disk=True)
    pair = Pair(run, Options(disk_mib=DISK_MIB))
    pair.backup_environment = shim.environment
    pair.start()
    load = pair.load(Oracle(WRITTEN_MIB * MIB), "before", depth=4)
    wait_until("the guest writes", lambda: load.replies > 500, LONG_S)
    shim.fail_disk("sync", True)
    wait_until("the group does not work", lambda: pair.backup_group()["broken"], LONG_S)
    pair.kill(pair.daemon)
    load.vanish()
    asked = pair.start_recovery("--primary-is-dead")
    assert asked.wait(LONG_S) != 0 and "Input/output error" in asked.tail(), asked.tail()
    shim.fail_disk("sync", False)
    asked = pair.start_recovery("--primary-is-dead")
    assert asked.wait(LONG_S) == 0, asked.tail()
