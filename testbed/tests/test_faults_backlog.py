"""The backlog on disk: an outage longer than memory holds is caught up with in order, and nothing is compared; the
backup passes through consistent states only (DESIGN rules 2, 8 and 10). One longer than the disk's share holds stops no
guest: what is recorded arrives in order, and the rest is compared, in one step (rules 1, 2, 6, 8, 9)."""

from __future__ import annotations

import json
import random

import pytest

from tidelock_testbed import nbdwire
from tidelock_testbed.hostdaemon import writer_of
from tidelock_testbed.net import Net
from tidelock_testbed.oracle import Oracle
from tidelock_testbed.pair import DISK, GROUP, MEMBER, MIB, Options, Pair
from tidelock_testbed.paths import BIN
from tidelock_testbed.process import run_command, wait_until

DISK_MIB = 64
MEMORY_MIB = 32
"""The least that there is."""


def on_disk(size_mib: int, **keys: str) -> str:
    """The table of the configuration."""
    more = "".join(f', {key} = "{value}"' for key, value in keys.items())
    return f'backlog_on_disk = {{ size = "{size_mib}MiB"{more} }}\n'


def options(size_mib: int = 1024) -> Options:
    """A backlog on disk behind the least memory. However fast the guest writes, all of it is recorded: at the limit it
    waits (test_faults_overflow.py has what it does by itself)."""
    return Options(backlog_mib=MEMORY_MIB, disk_mib=DISK_MIB, group=on_disk(size_mib, at_limit="wait"))


def both_sites(run, of: Options | None = None) -> tuple[Net, Pair, Oracle]:
    """Started and protected, with what their disk must hold."""
    net = Net(run, rtt_ms=10)
    pair = Pair(run, of or options(), net)
    pair.start()
    return net, pair, Oracle(DISK_MIB * MIB)


def cut(net: Net, pair: Pair) -> None:
    """The backup is away, and the daemon knows it."""
    net.wan.cut()
    pair.wait_state("disconnected")


def backlog(pair: Pair) -> dict:
    """What status says of it."""
    return writer_of(pair.group())["backlog"]


def segments(pair: Pair) -> list:
    """Its files."""
    return sorted(pair.state_file.with_suffix(".backlog").glob("*.segment"))


def write_beyond_memory(pair: Pair, load, factor: float = 2) -> dict:
    """The guest writes on without the backup until the backlog is so many times what memory holds."""
    wanted = factor * MEMORY_MIB * MIB
    wait_until("the backlog outgrows memory", lambda: backlog(pair)["used_bytes"] > wanted, 120, [pair.daemon])
    seen = backlog(pair)
    assert load.errors == [] and load.alive()
    is_full = seen["used_bytes"] + MEMORY_MIB * MIB > seen["limit_bytes"]
    assert is_full or not seen["writes_wait"], "the guest does not wait for memory"
    assert seen["on_disk"]["records"] > 0
    assert seen["on_disk"]["memory_bytes"] <= seen["on_disk"]["memory_limit_bytes"] == MEMORY_MIB * MIB
    assert seen["on_disk"]["file_bytes"] >= seen["used_bytes"] * 0.9 - MEMORY_MIB * MIB
    return seen


def check_nothing_compared(pair: Pair) -> None:
    """No resync was needed."""
    assert "purpose=Compare" not in pair.daemon.log.read_text()


def test_an_outage_beyond_memory_is_caught_up_with_in_order(run):
    """Twice: the link is cut, the guest writes more than memory holds, and all of it arrives, in order."""
    net, pair, oracle = both_sites(run)
    load = pair.load(oracle, "outage", depth=32)
    for _ in range(2):
        cut(net, pair)
        write_beyond_memory(pair, load)
        assert "not in memory" in pair.status_text()
        net.wan.mend()
        pair.wait_state("protected")
        wanted = load.replies + 200
        wait_until("the load goes on", lambda wanted=wanted: load.replies > wanted, 60, [pair.daemon])
    load.finish()
    assert load.errors == []
    pair.check_sites(oracle)
    check_nothing_compared(pair)
    assert backlog(pair)["on_disk"]["records"] == 0
    wait_until("room is given back", lambda: len(segments(pair)) <= 1, 60, [pair.daemon])


def test_recovery_in_the_middle_of_the_catch_up_finds_a_prefix(run):
    """The link comes back, thin, and is cut again when the backup has a part: what is recovered was the disk."""
    net, pair, oracle = both_sites(run)
    load = pair.load(oracle, "catch-up", depth=4)
    cut(net, pair)
    write_beyond_memory(pair, load, 3)
    load.finish()
    full = backlog(pair)["on_disk"]["records"]
    net.wan.set(rate_bytes_per_s=4 * MIB, cut=False)
    # Not before records have arrived that had left memory.
    wait_until(
        "a part has arrived",
        lambda: backlog(pair)["on_disk"]["records"] < 0.6 * full,
        120,
        [pair.daemon, pair.backup],
    )
    net.wan.cut()
    left = backlog(pair)
    assert left["used_bytes"] > 0 and left["on_disk"]["records"] > 0, "it was to be the middle"
    check_nothing_compared(pair)
    pair.kill(pair.daemon)
    recover = pair.start_recovery("--primary-is-dead")
    assert recover.wait(60) == 0, recover.tail()
    export = run.sockets / "exports" / GROUP / f"{MEMBER}.{DISK}.sock"
    guest = nbdwire.Connection(export, f"{MEMBER}.{DISK}")
    image = pair.directory / "recovered.img"
    image.write_bytes(b"".join(guest.read(at, MIB) for at in range(0, DISK_MIB * MIB, MIB)))
    guest.close()
    assert oracle.violations_of_prefix(image) == []
    assert oracle.violations(image) != [], "the last writes are not there"


def test_at_its_limit_writes_wait_and_it_is_said(run):
    """With `at_limit = "wait"` guests' writes wait as without a disk, log and status say so, and it ends."""
    net, pair, oracle = both_sites(run, options(size_mib=64))
    load = pair.load(oracle, "full", depth=32)
    cut(net, pair)
    wait_until("writes wait", lambda: backlog(pair)["writes_wait"], 120, [pair.daemon])
    full = backlog(pair)
    assert full["used_bytes"] <= full["limit_bytes"] == 64 * MIB
    assert full["full_count"] >= 1
    assert full["on_disk"]["memory_bytes"] <= MEMORY_MIB * MIB
    assert "the backlog is full" in pair.group()["detail"]
    assert "FULL" in pair.status_text()
    assert "the backlog is full: guests' writes wait" in pair.daemon.log.read_text()
    net.wan.mend()
    pair.wait_state("protected")
    load.finish()
    assert load.errors == []
    pair.check_sites(oracle)
    check_nothing_compared(pair)


def kill(pair: Pair, load, oracle: Oracle) -> None:
    """The daemon is gone, and its guest has heard nothing of what was under way."""
    pair.kill(pair.daemon)
    pair.wait_disk_closed()
    load.vanish()
    oracle.server_died()


def test_a_daemon_killed_in_an_outage_goes_on_in_order(run):
    """kill -9 with more waiting than memory holds: nothing is written to the guest's disk before the backup has
    confirmed that no other run had it, then the stream goes on, nothing that waited is lost, and nothing is
    compared."""
    net, pair, oracle = both_sites(run)
    load = pair.load(oracle, "killed", depth=4)
    cut(net, pair)
    write_beyond_memory(pair, load)
    for lap in range(2):
        kill(pair, load, oracle)
        before = pair.disk.read_bytes()
        pair.start_daemon()
        pair.wait_state("disconnected")
        load = pair.load(oracle, f"again {lap}", depth=4)
        assert pair.disk.read_bytes() == before
        assert "going on with the backlog on disk" not in pair.daemon.log.read_text()
        assert load.replies == 0
    net.wan.mend()
    pair.wait_state("protected")
    assert "going on with the backlog on disk" in pair.daemon.log.read_text()
    wait_until("the guest is served", lambda: load.replies > 200, 60, [pair.daemon])
    assert load.errors == []
    load.finish()
    pair.check_sites(oracle)
    check_nothing_compared(pair)
    wait_until("room is given back", lambda: len(segments(pair)) <= 1, 60, [pair.daemon])
    # And with nothing waiting a clean stop is one.
    pair.daemon.stop()
    pair.start_daemon()
    pair.wait_state("protected")
    check_nothing_compared(pair)
    pair.check_sites(oracle)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_killed_at_any_moment_nothing_is_compared_and_the_sites_are_equal(run, seed: int):
    """kill -9 under load, again and again, with the link up or down: what may not have ended on the local disk is done
    again, so both sites have the same."""
    chance = random.Random(f"killed {seed}")
    net, pair, oracle = both_sites(run)
    for lap in range(6):
        load = pair.load(oracle, f"{seed} {lap}", depth=chance.choice([1, 8, 64]))
        wanted = chance.randrange(50, 1200)
        cut_at = wanted - chance.randrange(200) if chance.random() < 0.5 else None
        if cut_at is not None:
            wait_until("the load goes on", lambda load=load, n=cut_at: load.replies >= n, 60, every_s=0.001)
            net.wan.cut()
        wait_until("the load goes on", lambda load=load, n=wanted: load.replies >= n, 60, every_s=0.001)
        assert load.errors == []
        kill(pair, load, oracle)
        pair.start_daemon()
        net.wan.mend()
        said = "going on with the backlog on disk"
        wait_until("it goes on", lambda said=said: said in pair.daemon.log.read_text(), 60, [pair.daemon])
        if chance.random() < 0.5:
            pair.check_sites(oracle)
            check_nothing_compared(pair)
    net.wan.mend()
    pair.check_sites(oracle)
    check_nothing_compared(pair)


def test_what_cannot_be_believed_is_compared(run):
    """The mark is missing, a segment is damaged, the daemon is killed while the sites are compared: the activity log
    says what to compare, as without a disk, and old segments are removed."""
    net, pair, oracle = both_sites(run)
    directory = pair.state_file.with_suffix(".backlog")

    def damage() -> None:
        content = bytearray(segments(pair)[0].read_bytes())
        content[len(content) // 2] ^= 1
        segments(pair)[0].write_bytes(content)

    for spoil, said in [
        ((directory / "sound").unlink, "the sites differed by more than what waited in it"),
        (damage, "is damaged"),
        (lambda: segments(pair)[-2].unlink(), "a part of it is missing"),
    ]:
        load = pair.load(oracle, said, depth=32)
        cut(net, pair)
        write_beyond_memory(pair, load)
        kill(pair, load, oracle)
        spoil()
        net.wan.mend()
        pair.start_daemon()
        pair.wait_state("protected")
        log = pair.daemon.log.read_text()
        assert "purpose=Compare" in log and said in log
        pair.check_sites(oracle)
        wait_until("the old segments are gone", lambda: len(segments(pair)) <= 1, 60, [pair.daemon])
    # Killed while it compares.
    load = pair.load(oracle, "compared", depth=32)
    wait_until("some writes", lambda: load.replies > 500, 60, [pair.daemon])
    kill(pair, load, oracle)
    (directory / "sound").unlink()
    net.wan.set(rate_bytes_per_s=MIB // 2)
    pair.start_daemon()
    pair.wait_state("copying")
    pair.kill(pair.daemon)
    assert not (directory / "sound").exists()
    net.wan.set(rate_bytes_per_s=0)
    pair.start_daemon()
    pair.wait_state("protected")
    assert "purpose=Compare" in pair.daemon.log.read_text()
    pair.check_sites(oracle)


def test_a_clean_stop_leaves_nothing_to_compare(run):
    """All that waited on disk is sent before the daemon ends."""
    net, pair, oracle = both_sites(run)
    load = pair.load(oracle, "stopped", depth=4)
    cut(net, pair)
    write_beyond_memory(pair, load, 1.5)
    load.finish()
    net.wan.mend()
    pair.wait_settled()
    pair.daemon.stop()
    pair.start_daemon()
    pair.wait_state("protected")
    check_nothing_compared(pair)
    pair.check_sites(oracle)


def test_a_disk_that_fails_is_said_and_tried_again(run):
    """No segment can be begun: the backlog is in memory only, with `at_limit = "wait"` writes wait when that is full,
    nothing is lost, and with the backup there the disk is used again."""
    net, pair, oracle = both_sites(run)
    load = pair.load(oracle, "failing", depth=4)
    cut(net, pair)
    write_beyond_memory(pair, load, 1.2)
    # In the way of the segment after the next one.
    last = int(segments(pair)[-1].stem)
    obstacle = pair.state_file.with_suffix(".backlog") / f"{last + 2:012}.segment"
    obstacle.mkdir()
    wait_until("it has failed", lambda: backlog(pair)["on_disk"]["failed"], 120, [pair.daemon])
    wait_until("writes wait", lambda: backlog(pair)["writes_wait"], 120, [pair.daemon])
    assert "the backlog on disk has failed" in pair.group()["detail"]
    assert "FAILED" in pair.status_text()
    assert "the backlog is in memory only" in pair.daemon.log.read_text()
    obstacle.rmdir()
    net.wan.mend()
    pair.wait_state("protected")
    load.finish()
    assert load.errors == []
    pair.wait_settled()
    wait_until("it is used again", lambda: not backlog(pair)["on_disk"]["failed"], 60, [pair.daemon])
    load = pair.load(oracle, "after", depth=4)
    net.wan.cut()
    write_beyond_memory(pair, load, 1.2)
    net.wan.mend()
    load.finish()
    pair.check_sites(oracle)
    check_nothing_compared(pair)


@pytest.mark.parametrize(
    ("table", "said"),
    [
        (on_disk(16), ["`size` in [group.backlog_on_disk]", "64MiB"]),
        ('backlog_on_disk = { directory = "/var" }\n', ["`size`", "20GiB"]),
        ('backlog_on_disk = { size = "1GiB", path = "/var" }\n', ["path"]),
    ],
    ids=["too small", "no size", "unknown key"],
)
def test_a_wrong_table_is_refused_and_says_what_to_write(run, table: str, said: list[str]):
    """As every other mistake of the file, before anything is started."""
    pair = Pair(run, Options(group=table))
    pair.start_daemon(wait=False)
    assert pair.daemon.wait(60) == 2
    for text in said:
        assert text in pair.daemon.log.read_text()


def test_a_directory_that_cannot_be_used_ends_the_start(run):
    """A file is where the directory should be: the daemon says which, and what to do."""
    in_the_way = run.directory / "taken"
    in_the_way.write_text(json.dumps("somebody's"))
    pair = Pair(run, Options(group=on_disk(64, directory=str(in_the_way))))
    pair.start_backup()
    pair.start_daemon(wait=False)
    assert pair.daemon.wait(60) not in (0, None)
    log = pair.daemon.log.read_text()
    assert str(in_the_way) in log and "[group.backlog_on_disk]" in log
    checked = run_command([BIN / "tidelock", "config", "check", "--file-only", pair.host_config], "check it")
    assert checked is not None
