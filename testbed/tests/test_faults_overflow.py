"""An outage longer than the backlog on disk holds: guests go on, what was recorded arrives in order, the rest is
compared in one step, and until then nothing leaves for clients (DESIGN rules 1, 2, 6, 8, 9 and 10)."""

from __future__ import annotations

import random

import pytest
from answered import answered_rig, check_nothing_missing, check_recovery_without_primary

from tidelock_testbed import nbdwire
from tidelock_testbed.drilling import NEVER_MIND_S
from tidelock_testbed.hostdaemon import GROUP as DRILL
from tidelock_testbed.hostdaemon import MEMBER as DRILL_MEMBER
from tidelock_testbed.hostdaemon import Protection, gate_of, writer_of
from tidelock_testbed.net import Net
from tidelock_testbed.oracle import Load, Oracle
from tidelock_testbed.pair import DISK, GROUP, LONG_S, MEMBER, MIB, Options, Pair
from tidelock_testbed.process import wait_until
from tidelock_testbed.rig import PROCESS_DISK_MIB, Recovery, Rig
from tidelock_testbed.risk import word_of

MEMORY_MIB, BACKLOG_MIB = 32, 64
"""The least that there is."""
WRITTEN_MIB, DISK_MIB = 48, 128
"""The guest writes in the first part of the disk only."""
TABLE = f'backlog_on_disk = {{ size = "{BACKLOG_MIB}MiB" }}\n'
OPTIONS = Options(backlog_mib=MEMORY_MIB, disk_mib=DISK_MIB, group=TABLE)


def backlog(pair: Pair) -> dict:
    """What status says of it."""
    return writer_of(pair.group())["backlog"]


def started(run, options: Options = OPTIONS) -> tuple[Net, Pair, Oracle]:
    """Both sites, and a crash would compare the map only."""
    net = Net(run, rtt_ms=10)
    pair = Pair(run, options, net)
    pair.start()
    compares = lambda: writer_of(pair.group())["activity"]["compares"]  # noqa: E731
    wait_until("the map is all there is", lambda: compares() == "map", LONG_S, [pair.daemon])
    return net, pair, Oracle(WRITTEN_MIB * MIB)


def goes_on(pair: Pair, load: Load, replies: int = 500) -> None:
    """The guest's writes do not wait."""
    wanted = load.replies + replies
    wait_until("the guest goes on", lambda: load.replies > wanted or not load.alive(), LONG_S, [pair.daemon])
    assert load.alive() and load.errors == []


def overflow(net: Net, pair: Pair, load: Load) -> None:
    """The link is cut for longer than the backlog holds."""
    net.wan.cut()
    before = backlog(pair)["on_disk"]["overflows"]
    wait_until("it overflows", lambda: backlog(pair)["on_disk"]["overflows"] > before, LONG_S, [pair.daemon])
    assert word_of(pair.group()) == "unrecorded"
    goes_on(pair, load)


def wait_part_arrived(pair: Pair) -> None:
    """The backup has a part of the stream, and not all of it."""
    at_first = writer_of(pair.group())["lag"]["writes"]
    assert at_first > 0

    def has_part() -> bool:
        group = pair.group()
        assert word_of(group) == "unrecorded"
        return writer_of(group)["lag"]["writes"] < 0.6 * at_first

    wait_until("a part has arrived", has_part, LONG_S, [pair.daemon, pair.backup])


def wait_comparing(pair: Pair) -> None:
    """The backup has all that was recorded, and a part of the rest."""
    pair.wait_state("copying")
    done = lambda: (writer_of(pair.group())["copy"] or {}).get("done_bytes", 0)  # noqa: E731
    wait_until("a part was compared", lambda: done() > 2 * MIB, LONG_S, [pair.daemon, pair.backup])
    assert word_of(pair.group()) == "copying"


def recovered(pair: Pair, run) -> bytes:
    """The primary site is gone; what the backup site has of the disk."""
    pair.kill(pair.daemon)
    recover = pair.start_recovery("--primary-is-dead")
    assert recover.wait(LONG_S) == 0, recover.tail()
    guest = nbdwire.Connection(run.sockets / "exports" / GROUP / f"{MEMBER}.{DISK}.sock", f"{MEMBER}.{DISK}")
    content = b"".join(guest.read(at, MIB) for at in range(0, WRITTEN_MIB * MIB, MIB))
    guest.close()
    return content


def test_guests_go_on_and_the_backup_gets_the_stream_and_then_the_rest(run):
    """No write waits. While the stream arrives the backup has earlier states; only what was touched is compared."""
    net, pair, oracle = started(run)
    load = pair.load(oracle, "overflow", depth=32)
    overflow(net, pair, load)
    said = backlog(pair)
    assert said["full_count"] == 0 and not said["writes_wait"]
    assert said["on_disk"]["overflowed"]
    undoes = pair.group()["undoes"]
    assert undoes["what"] == "since" and undoes["since_unix_ms"] > 0, undoes
    assert said["used_bytes"] <= BACKLOG_MIB * MIB
    assert "the backlog was full" in pair.group()["why"]["text"]
    assert "OVERFLOWED:" in pair.status_text()
    assert "everything since 20" in pair.status_text()
    assert not (pair.state_file.with_suffix(".backlog") / "sound").exists()

    net.wan.set(rate_bytes_per_s=4 * MIB, cut=False)
    wait_part_arrived(pair)
    earlier = pair.export()
    assert oracle.violations_of_prefix(earlier) == []
    assert oracle.violations(earlier) != [], "the last writes are not there"
    assert word_of(pair.group()) == "unrecorded"
    goes_on(pair, load)
    net.wan.set(rate_bytes_per_s=0)
    pair.wait_state("copying", "protected")
    load.finish()
    assert load.errors == []
    pair.wait_state("protected")
    assert 0 < pair.compared_bytes() <= (WRITTEN_MIB + 1) * MIB < DISK_MIB * MIB
    pair.check_sites(oracle)
    log = pair.daemon.log.read_text()
    log = log[log.index("OVERFLOWED") :]
    assert "the backlog is full: guests' writes wait" not in log[: log.index("purpose=Compare")]
    steps = ["it is asked to compare", "purpose=Compare", "recorded again", "protected from here on"]
    assert [log.index(step) for step in steps] == sorted(log.index(step) for step in steps)
    wait_until("it is over", lambda: "had been full" in pair.daemon.log.read_text(), LONG_S, [pair.daemon])
    wait_until("the limit is as before", lambda: backlog(pair)["limit_bytes"] == BACKLOG_MIB * MIB, LONG_S)
    assert backlog(pair)["on_disk"]["overflowed"] is False
    assert pair.group()["undoes"]["what"] in ("nothing", "lag")

    # A process that is killed later goes on with what is on disk, and does nothing again that is older.
    load = pair.load(oracle, "afterwards", depth=8)
    net.wan.cut()
    goes_on(pair, load)
    pair.kill(pair.daemon)
    load.vanish()
    oracle.server_died()
    net.wan.mend()
    pair.start_daemon()
    wait_logged(pair, "going on with the backlog on disk")
    pair.check_sites(oracle)
    assert "purpose=Compare" not in pair.daemon.log.read_text()


def wait_logged(pair: Pair, text: str) -> None:
    """The backup's answer decides it."""
    wait_until(text, lambda: text in pair.daemon.log.read_text(), LONG_S, [pair.daemon])


@pytest.mark.parametrize("when", ["cut", "arriving", "comparing"])
def test_killed_while_it_is_overflowed(run, when: str):
    """kill -9: nothing is gone on with that is not all, nothing is lost, and the map says what to compare."""
    net, pair, oracle = started(run)
    load = pair.load(oracle, f"killed {when}", depth=16)
    overflow(net, pair, load)
    if when == "arriving":
        net.wan.set(rate_bytes_per_s=4 * MIB, cut=False)
        wait_part_arrived(pair)
    elif when == "comparing":
        net.wan.set(rate_bytes_per_s=16 * MIB, cut=False)
        wait_comparing(pair)
    pair.kill(pair.daemon)
    load.vanish()
    oracle.server_died()
    assert oracle.violations(pair.disk) == []
    stale = pair.disk.read_bytes()
    net.wan.set(rate_bytes_per_s=0, cut=False)
    pair.start_daemon()
    wait_logged(pair, "the backlog on disk is not gone on with")
    pair.wait_state("protected")
    assert pair.disk.read_bytes() == stale, "nobody wrote"
    assert 0 < pair.compared_bytes() <= (WRITTEN_MIB + 1) * MIB
    pair.check_sites(oracle)


@pytest.mark.parametrize("when", ["arriving", "comparing"])
def test_a_disaster_goes_back_to_before_it(run, when: str):
    """Recovered in the middle of the stream, or of the comparison: a state that the disk had before the backlog was
    full."""
    net, pair, oracle = started(run)
    load = pair.load(oracle, f"disaster {when}", depth=16)
    overflow(net, pair, load)
    until = oracle.position()
    goes_on(pair, load, 2000)
    if when == "arriving":
        net.wan.set(rate_bytes_per_s=4 * MIB, cut=False)
        wait_part_arrived(pair)
    else:
        net.wan.set(rate_bytes_per_s=16 * MIB, cut=False)
        wait_comparing(pair)
    net.wan.cut()
    assert word_of(pair.group()) != "protected", "it was to be the middle"
    content = recovered(pair, run)
    load.vanish()
    image = pair.directory / "recovered.img"
    image.write_bytes(content)
    assert oracle.violations_of_prefix(image) == []
    assert oracle.violations(image) != [], "the last writes are not there"
    assert not oracle.has_later_than(image, until), "nothing of what was not recorded"


def test_the_link_is_lost_again_on_the_way_back(run):
    """During the comparison: the guest goes on again, and in the end the sites are equal."""
    net, pair, oracle = started(run)
    load = pair.load(oracle, "again", depth=32)
    overflow(net, pair, load)
    net.wan.set(rate_bytes_per_s=16 * MIB, cut=False)
    wait_comparing(pair)
    overflow(net, pair, load)
    assert backlog(pair)["on_disk"]["overflows"] == 2
    net.wan.set(rate_bytes_per_s=0, cut=False)
    pair.wait_state("copying", "protected")
    load.finish()
    assert load.errors == []
    pair.wait_state("protected")
    pair.check_sites(oracle)


def test_a_link_that_only_carries_less_is_waited_for_on_the_way_back(run):
    """The link is never cut. Guests that write more than it carries overflow the backlog, and then let the comparison
    go on: it is not begun anew and anew."""
    net, pair, oracle = started(run)
    net.wan.set(rate_bytes_per_s=16 * MIB)
    load = pair.load(oracle, "thin", depth=32)
    wait_until("it overflows", lambda: backlog(pair)["on_disk"]["overflows"] == 1, LONG_S, [pair.daemon])
    wait_comparing(pair)
    limit = backlog(pair)["limit_bytes"]
    wait_until("writes wait", lambda: backlog(pair)["full_count"] > 0, LONG_S, [pair.daemon])
    done = lambda: (writer_of(pair.group())["copy"] or {}).get("done_bytes", DISK_MIB * MIB)  # noqa: E731
    at_first = done()
    wait_until("the comparison goes on beside them", lambda: done() > at_first, LONG_S, [pair.daemon])
    assert limit == MEMORY_MIB * MIB
    assert backlog(pair)["on_disk"]["overflows"] == 1
    load.finish()
    assert load.errors == []
    pair.wait_state("protected")
    pair.check_sites(oracle)


def test_a_clean_stop_while_it_is_overflowed_forgets_nothing(run):
    """The stop is no clean end: the next start compares where guests have written without a record."""
    net, pair, oracle = started(run)
    load = pair.load(oracle, "stopped", depth=16)
    overflow(net, pair, load)
    load.finish()
    net.wan.set(rate_bytes_per_s=4 * MIB, cut=False)
    wait_part_arrived(pair)
    net.wan.set(rate_bytes_per_s=0)
    pair.daemon.stop()
    assert "clean=false" in pair.daemon.log.read_text()
    pair.start_daemon()
    pair.wait_state("protected")
    assert 0 < pair.compared_bytes() <= (WRITTEN_MIB + 1) * MIB
    pair.check_sites(oracle)


def test_a_disk_that_fails_stops_no_guest(run):
    """No segment can be begun in an outage: the limit is that of memory, and there guests go on as well."""
    net, pair, oracle = started(
        run, Options(backlog_mib=MEMORY_MIB, disk_mib=DISK_MIB, group=TABLE.replace("64", "1024"))
    )
    load = pair.load(oracle, "failing", depth=8)
    directory = pair.state_file.with_suffix(".backlog")
    goes_on(pair, load, 50)
    last = max(int(segment.stem) for segment in directory.glob("*.segment"))
    obstacle = directory / f"{last + 2:012}.segment"
    obstacle.mkdir()
    overflow(net, pair, load)
    said = backlog(pair)
    assert said["on_disk"]["failed"] and said["limit_bytes"] == MEMORY_MIB * MIB
    obstacle.rmdir()
    net.wan.mend()
    pair.wait_state("copying", "protected")
    load.finish()
    assert load.errors == []
    pair.wait_state("protected")
    pair.check_sites(oracle)
    wait_until("it is used again", lambda: not backlog(pair)["on_disk"]["failed"], LONG_S, [pair.daemon])


# With a gate, and clients.

PROTECTION = Protection(lease_s=2, grace_s=3, backlog=f"{MEMORY_MIB}MiB", backlog_on_disk=f"{BACKLOG_MIB}MiB")


NOISE_MIB = 8
"""At the end of a disk, where nobody else writes."""


def overwrite(rig: Rig) -> None:
    """Noise until the group is `unrecorded`, then once more all over: the comparison must send NOISE_MIB."""
    disk = nbdwire.Connection(rig.daemon.runtime / DRILL / DRILL_MEMBER / "data.sock", "data", timeout_s=LONG_S)
    noise = random.Random("noise")
    offsets = [mib * MIB for mib in range(PROCESS_DISK_MIB - NOISE_MIB, PROCESS_DISK_MIB)]

    def wrote() -> bool:
        disk.write(noise.choice(offsets), noise.randbytes(MIB))
        return word_of(rig.daemon.group()) == "unrecorded"

    wait_until("the group is unrecorded", wrote, NEVER_MIND_S, [rig.daemon.process])
    for offset in offsets:
        disk.write(offset, noise.randbytes(MIB))
    disk.close()


def overflowed_rig(run) -> tuple:
    """Clients were answered, and the link is cut for longer than the backlog holds."""
    rig, clients = answered_rig(run, PROTECTION)
    rig.net.wan.cut()
    overwrite(rig)
    return rig, clients


def test_nothing_leaves_until_the_sites_are_equal(run):
    """With the link and a lease, also with the whole stream at the backup, clients hear nothing without a record."""
    rig, clients = overflowed_rig(run)
    lease = lambda: rig.daemon.group()["lease"]["held"]  # noqa: E731
    wait_until("the lease has ended", lambda: not lease(), NEVER_MIND_S, [rig.daemon.process])
    answered = len(clients.ledger.follow().confirmed)
    rig.net.wan.set(rate_bytes_per_s=4 * MIB, cut=False)
    seen: list[tuple[str, bool]] = []

    def is_protected() -> bool:
        confirmed = len(clients.ledger.follow().confirmed)
        group = rig.daemon.group()
        if word_of(group) in ("unrecorded", "copying"):
            assert not gate_of(group)["open"], group
            assert confirmed == answered
            seen.append((word_of(group), group["lease"]["held"]))
        return word_of(group) == "protected"

    wait_until("the sites are equal", is_protected, NEVER_MIND_S, [rig.daemon.process])
    assert ("unrecorded", True) in seen and ("copying", True) in seen, "or the gate was shut for want of a lease"
    clients.wait_for_more(100)
    check_recovery_without_primary(rig, clients)


def test_what_clients_were_told_is_in_a_recovery_while_it_is_overflowed(run):
    """The disaster comes when the backup has a part of the stream."""
    rig, clients = overflowed_rig(run)
    lag = lambda: writer_of(rig.daemon.group())["lag"]["writes"]  # noqa: E731
    at_first = lag()
    rig.net.wan.set(rate_bytes_per_s=4 * MIB, cut=False)
    wait_until("a part has arrived", lambda: lag() < 0.7 * at_first, NEVER_MIND_S, [rig.daemon.process])
    assert word_of(rig.daemon.group()) == "unrecorded"
    ledger = clients.stop()
    rig.destroy_primary(cut_first=True)
    recovery = Recovery(rig, "--primary-is-dead")
    recovery.wait_ready()
    check_nothing_missing(rig, recovery, ledger)


def test_a_group_that_degrades_says_so_until_all_is_compared(run):
    """With `async after` clients are answered meanwhile; the group is degraded until the comparison has ended."""
    protection = Protection(
        lease_s=2,
        grace_s=3,
        backlog=PROTECTION.backlog,
        backlog_on_disk=PROTECTION.backlog_on_disk,
        when_unreachable="async after 1s",
    )
    rig, clients = answered_rig(run, protection)
    rig.net.wan.cut()
    rig.daemon.wait_state("told", NEVER_MIND_S)
    overflowed = lambda: writer_of(rig.daemon.group())["backlog"]["on_disk"]["overflowed"]  # noqa: E731
    disk = nbdwire.Connection(rig.daemon.runtime / DRILL / DRILL_MEMBER / "data.sock", "data", timeout_s=LONG_S)
    last = (PROCESS_DISK_MIB - 1) * MIB
    content = disk.read(last, MIB)

    def wrote() -> bool:
        disk.write(last, content)
        return overflowed()

    wait_until("it overflows", wrote, NEVER_MIND_S, [rig.daemon.process])
    disk.close()
    clients.wait_for_more(100)
    rig.net.wan.set(rate_bytes_per_s=8 * MIB, cut=False)
    seen: set[bool] = set()

    def is_compared() -> bool:
        group = rig.daemon.group()
        seen.add(group["told"] is not None)
        return "the sites are equal again" in rig.daemon.process.log.read_text()

    wait_until("all is compared", is_compared, NEVER_MIND_S, [rig.daemon.process])
    assert seen == {True}
    rig.daemon.wait_state("protected", NEVER_MIND_S)
    clients.wait_for_more(100)
    check_recovery_without_primary(rig, clients)
