"""Starts that do not reach the backup: with `serve-unprotected` guests are served all the same, and say so; what they
wrote is compared when the backup is there. By default they wait (DESIGN rules 1, 4, 6 and 8)."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import pytest
from answered import answered_rig, check_recovery_without_primary

from tidelock_testbed.drilling import NEVER_MIND_S
from tidelock_testbed.hostdaemon import GROUP as DRILL
from tidelock_testbed.hostdaemon import MEMBER, Group, Protection, gate_of, writer_of
from tidelock_testbed.nbdwire import WRITE, Connection
from tidelock_testbed.oracle import BLOCK, Oracle
from tidelock_testbed.pair import DISK, MIB, Options, Pair
from tidelock_testbed.process import wait_until
from tidelock_testbed.rig import PROCESS_DISK_MIB, Rig
from tidelock_testbed.risk import word_of
from tidelock_testbed.workload import Clients

SERVES = 'before_first_contact = "serve-unprotected"\n'
DISK_MIB = 96
WRITTEN_MIB = 3
PROTECTION = Protection(lease_s=2, grace_s=3, before_first_contact="serve-unprotected")


def write_some(pair: Pair, oracle: Oracle, seed: str, replies: int = 500):
    """A guest that writes in the first part of the disk, and goes on."""
    load = pair.load(oracle, seed, depth=random.Random(seed).choice([1, 16, 64]))
    wait_until("writes are done", lambda: load.replies > replies or not load.alive(), 60, [pair.daemon])
    assert load.alive() and load.errors == []
    return load


def protected_pair(run, **more) -> tuple[Pair, Oracle]:
    """Both sites hold the same, which is not nothing, and a crash would compare the map only."""
    pair = Pair(run, Options(disk_mib=DISK_MIB, group=SERVES, **more))
    noise = random.Random("before").randbytes(MIB)
    with pair.disk.open("r+b") as disk:
        for _ in range(DISK_MIB):
            disk.write(noise)
    pair.start()
    # The guest of these tests knows what it wrote, and what was zero.
    zeroed = Connection(pair.socket, DISK, timeout_s=60)
    zeroed.write(0, bytes(WRITTEN_MIB * MIB))
    zeroed.close()
    pair.wait_settled()
    pair.wait_mapped()
    return pair, Oracle(WRITTEN_MIB * MIB)


@pytest.mark.parametrize("ends", ["cleanly", "killed"])
def test_only_what_was_touched_is_compared(run, ends: str):
    """The backup has an older state of the group: it gets what was written meanwhile, and no more is looked at."""
    pair, oracle = protected_pair(run)
    if ends == "cleanly":
        pair.daemon.stop()
    else:
        pair.kill(pair.daemon)
    pair.kill(pair.backup)
    pair.start_daemon()
    assert word_of(pair.group()) != "unrecorded", "it waits a while for the backup"
    pair.wait_state("unrecorded")
    wait_until("nothing is held", lambda: pair.group()["mode"] == "async", 60, [pair.daemon])
    assert pair.group()["told"] is not None
    load = write_some(pair, oracle, f"unprotected {ends}", 2000)
    assert "UNRECORDED for" in pair.status_text()
    assert writer_of(pair.group())["lag"]["writes"] == 0, "nothing is recorded"
    assert pair.activity()["exposed_bytes"] <= (WRITTEN_MIB + 1) * MIB
    # The stream begins while writes are in flight.
    pair.start_backup()
    pair.wait_state("protected")
    assert load.alive() and load.errors == []
    load.finish()
    assert 0 < pair.compared_bytes() <= (WRITTEN_MIB + 1) * MIB
    group = pair.group()
    assert group["mode"] == "pipelined" and group["told"] is None
    pair.check_sites(oracle)
    log = pair.daemon.log.read_text()
    assert log.index("UNPROTECTED") < log.index("replies are held again") < log.index("no longer degraded")


@pytest.mark.parametrize("seed", [1, 2])
def test_killed_while_it_is_unprotected(run, seed: int):
    """Nothing is lost here, and what was written in any of the runs is compared when the backup is there."""
    chance = random.Random(f"contact {seed}")
    pair, oracle = protected_pair(run)
    pair.kill(pair.daemon, pair.backup)
    for lap in range(3):
        pair.start_daemon()
        pair.wait_state("unrecorded")
        load = write_some(pair, oracle, f"{seed} {lap}", chance.randrange(100, 1500))
        pair.kill(pair.daemon)
        load.vanish()
        oracle.server_died()
        assert oracle.violations(pair.disk) == []
    pair.start_daemon()
    assert pair.group()["told"] is not None, "it is not forgotten"
    if chance.random() < 0.5:
        pair.wait_state("unrecorded")
    assert 0 < pair.activity()["exposed_bytes"] <= (WRITTEN_MIB + 1) * MIB
    stale = pair.disk.read_bytes()
    pair.start_backup()
    pair.wait_state("protected")
    assert pair.disk.read_bytes() == stale, "nobody wrote"
    assert 0 < pair.compared_bytes() <= (WRITTEN_MIB + 1) * MIB
    assert pair.group()["told"] is None
    pair.check_sites(oracle)


def test_a_clean_stop_while_it_is_unprotected_forgets_nothing(run):
    """The stop is no clean end: the next start compares what was written."""
    pair, oracle = protected_pair(run)
    pair.kill(pair.daemon, pair.backup)
    pair.start_daemon()
    pair.wait_state("unrecorded")
    write_some(pair, oracle, "before the stop").finish()
    pair.daemon.stop()
    assert "clean=false" in pair.daemon.log.read_text()
    pair.start_backup()
    pair.start_daemon()
    pair.wait_state("protected")
    assert 0 < pair.compared_bytes() <= (WRITTEN_MIB + 1) * MIB
    pair.check_sites(oracle)


def test_a_backup_that_has_nothing_gets_whole_disks(run):
    """A group that has never reached its backup: the first copy brings across what guests wrote, and writes on."""
    pair = Pair(run, Options(disk_mib=DISK_MIB, group=SERVES))
    pair.start_daemon()
    pair.wait_state("unrecorded")
    oracle = Oracle(DISK_MIB * MIB)
    load = write_some(pair, oracle, "first")
    pair.start_backup()
    pair.wait_state("protected")
    assert load.alive() and load.errors == []
    load.finish()
    assert "purpose=Initial" in pair.daemon.log.read_text()
    pair.check_sites(oracle)


def test_more_than_the_map_holds_is_compared_as_a_whole(run):
    """Guests do not wait for a map that is full: all of the disks are compared then, and that is said."""
    slots = 'activity_log = { extent = "64KiB", slots = 64 }\n'
    pair = Pair(run, Options(disk_mib=DISK_MIB, group=SERVES + slots))
    pair.start()
    oracle = Oracle(DISK_MIB * MIB)
    pair.wait_mapped()
    pair.kill(pair.daemon, pair.backup)
    pair.start_daemon()
    pair.wait_state("unrecorded")
    load = write_some(pair, oracle, "wide", 2000)
    assert pair.activity()["compares"] == "everything"
    pair.kill(pair.daemon)
    load.vanish()
    oracle.server_died()
    pair.start_daemon()
    pair.wait_state("unrecorded")
    load = write_some(pair, oracle, "again", 500)
    pair.start_backup()
    pair.wait_state("protected")
    load.finish()
    assert pair.compared_bytes() == DISK_MIB * MIB
    pair.check_sites(oracle)


def test_by_default_the_guest_waits(run):
    """Without the key no write is answered before the backup was reached."""
    pair = Pair(run)
    pair.start()
    pair.kill(pair.daemon, pair.backup)
    pair.start_daemon()
    pair.wait_state("disconnected")
    guest = Connection(pair.socket, DISK, timeout_s=8)
    guest.send(WRITE, 0, BLOCK, bytes([7]) * BLOCK)
    # Longer than the others wait for the backup.
    with pytest.raises(TimeoutError):
        guest.reply()
    group = pair.group()
    assert word_of(group) == "disconnected" and group["told"] is None
    assert not writer_of(group)["backup_has_all"]
    assert pair.disk.read_bytes() == bytes(pair.options.disk_mib * MIB)
    guest.abort()
    guest.close()
    pair.start_backup()
    pair.wait_state("protected")
    pair.check_sites()


# With a gate, and clients.


def restart_without_the_backup(rig: Rig) -> None:
    """The host comes back while the link is cut."""
    rig.net.wan.cut()
    rig.daemon.process.kill()
    rig.daemon.start()
    rig.daemon.wait_state("unrecorded", NEVER_MIND_S)


def test_a_guest_runs_before_its_backup_is_there(run):
    """As after a recovery, when the next site is not there yet: clients are answered, and later nothing is missing."""
    rig = Rig(run, "process", rtt_ms=10, protection=PROTECTION)
    rig.daemon.start()
    rig.boot_guest()
    rig.guest.wait_ready()
    rig.daemon.wait_state("unrecorded", NEVER_MIND_S)
    clients = Clients(run, rig.net, rig.guest, clients=4)
    clients.wait_for_more(100)
    group = rig.daemon.group()
    assert gate_of(group)["open"] and not group["lease"]["held"]
    rig.backup.start()
    rig.daemon.wait_state("protected", NEVER_MIND_S)
    clients.wait_for_more(100)
    group = rig.daemon.group()
    assert group["mode"] == "pipelined" and group["lease"]["held"]
    check_recovery_without_primary(rig, clients)


def test_a_host_that_comes_back_in_an_outage_answers_and_the_backup_knows(run):
    """It may, because the backup has it on record; when the link is back, the group is protected by itself."""
    rig, clients = answered_rig(run, PROTECTION)
    policy = rig.backup.status()["groups"][0]["policies"]
    assert [known["serves_unreached"] for known in policy.values()] == [True]
    restart_without_the_backup(rig)
    clients.wait_for_more(100)
    assert gate_of(rig.daemon.group())["open"]
    rig.net.wan.mend()
    rig.daemon.wait_state("protected", NEVER_MIND_S)
    clients.wait_for_more(100)
    check_recovery_without_primary(rig, clients)


def test_a_recovery_says_that_it_may_answer_and_afterwards_it_never_does(run):
    """The backup is promoted while the host is unprotected: `recover` says so, and a fenced host waits ever after."""
    rig, clients = answered_rig(run, PROTECTION)
    restart_without_the_backup(rig)
    clients.wait_for_more(20)
    words = rig.backup.recover("--json", name="recover-json")
    assert words.wait(NEVER_MIND_S) == 0
    line = next(line for line in words.log.read_text().splitlines() if line.startswith("{"))
    exposed = json.loads(line)["recovery"]["exposed"]
    assert [(of["serves_unreached"], of["is_known"]) for of in exposed] == [(True, False)], exposed
    words = rig.backup.recover(name="recover-again")
    assert words.wait(NEVER_MIND_S) == 0
    assert "serves also if it has not reached this site" in words.log.read_text()

    clients.wait_for_more(20)
    rig.net.wan.mend()
    rig.daemon.wait_state("fenced", NEVER_MIND_S)
    wait_until("its gate is shut", lambda: not gate_of(rig.daemon.group())["open"], NEVER_MIND_S)
    # It was told once, and that is enough.
    rig.net.wan.cut()
    rig.daemon.process.kill()
    rig.daemon.start()
    answered = len(clients.ledger.follow().confirmed)
    seen: set[str] = set()

    def waits() -> bool:
        group = rig.daemon.group()
        seen.add(word_of(group))
        assert not gate_of(group)["open"]
        return rig.daemon.status()["uptime_ms"] > 8_000

    wait_until("it would have served", waits, NEVER_MIND_S, [rig.daemon.process])
    assert "unrecorded" not in seen
    assert len(clients.ledger.follow().confirmed) == answered


def test_replies_are_held_where_the_backup_does_not_know(run):
    """The key is set during the outage: the guest is served, its clients are not answered."""
    rig, clients = answered_rig(run, replace(PROTECTION, before_first_contact="wait"))
    rig.daemon.configure([Group(DRILL, [rig.member], PROTECTION)])
    restart_without_the_backup(rig)
    answered = len(clients.ledger.follow().confirmed)
    # Where nobody else writes: what is there already.
    disk = Connection(rig.daemon.runtime / DRILL / MEMBER / "data.sock", "data", timeout_s=60)
    last = (PROCESS_DISK_MIB << 20) - BLOCK
    disk.write(last, disk.read(last, BLOCK))
    disk.close()
    wait_until("it answers", lambda: gate_of(rig.daemon.group())["held_packets"], NEVER_MIND_S, [rig.daemon.process])
    group = rig.daemon.group()
    assert not gate_of(group)["open"] and "replies are held" in group["detail"]
    assert len(clients.ledger.follow().confirmed) == answered
    rig.net.wan.mend()
    rig.daemon.wait_state("protected", NEVER_MIND_S)
    clients.wait_for_more(100)
