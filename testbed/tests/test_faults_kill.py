"""kill -9 at random moments under load, and what both sites hold afterwards (DESIGN rules 2, 3, 8 and 9)."""

from __future__ import annotations

import filecmp
import random
import signal
import time

import pytest

from tidelock_testbed.hostdaemon import writer_of
from tidelock_testbed.oracle import BLOCK, Oracle
from tidelock_testbed.pair import MIB, Options, Pair, different_blocks
from tidelock_testbed.process import wait_until
from tidelock_testbed.risk import word_of


def random_moment(chance: random.Random, load) -> None:
    """Waits for a random number of replies and a random moment after them."""
    wanted = load.replies + chance.randrange(50, 1500)
    wait_until("the load goes on", lambda: load.replies >= wanted or not load.alive(), 60, every_s=0.001)
    assert load.alive()
    time.sleep(chance.random() * 0.01)


@pytest.mark.parametrize("seed", [1, 2])
def test_daemon_killed_under_load(run, seed: int):
    """Every completed write is at both sites after the comparison, and status says `copying` until then."""
    chance = random.Random(f"kill daemon {seed}")
    pair = Pair(run, Options(copy_rate_mib=12))
    pair.start()
    oracle = Oracle(32 * MIB)
    for lap in range(3):
        load = pair.load(oracle, f"{seed} {lap}", depth=chance.choice([1, 16, 64]))
        random_moment(chance, load)
        pair.kill(pair.daemon)
        load.vanish()
        oracle.server_died()
        pair.start_daemon()
        group = pair.wait_state("copying")
        assert writer_of(group)["copy"]["kind"] == "resync"
        # A guest may write while the sites are compared.
        load = pair.load(oracle, f"{seed} {lap} meanwhile", depth=4)
        pair.wait_state("protected")
        load.finish()
        pair.check_sites(oracle)


def test_resync_finds_what_was_never_sent(run):
    """The backup takes nothing in while the guest writes and the daemon dies: only a comparison can find it."""
    pair = Pair(run, Options(copy_rate_mib=8))
    pair.start()
    oracle = Oracle(32 * MIB)
    load = pair.load(oracle, "before")
    wait_until("some writes", lambda: load.replies > 500, 60)
    load.finish()
    pair.wait_settled()

    pair.backup.signal(signal.SIGSTOP)
    load = pair.load(oracle, "unsent")
    # More than what the sockets between the two hold: some of it certainly stayed in the daemon.
    wait_until("writes that the backup cannot have", lambda: pair_backlog(pair) > 24 * MIB, 60)
    pair.kill(pair.daemon)
    load.vanish()
    oracle.server_died()
    pair.backup.signal(signal.SIGCONT)
    # The backup has at most what its socket held; it differs from the local disk now, and knows nothing of it.
    wait_until("the backup has seen the end", lambda: not connected(pair), 60)
    stale = pair.export()
    assert oracle.violations(stale), "the case is not the one that is to be tested"
    assert not oracle.violations(pair.disk)

    pair.start_daemon()
    pair.wait_state("copying")
    # Until the comparison ends the backup stands at its last whole state, whatever it has received meanwhile.
    load = pair.load(oracle, "meanwhile")
    wait_until("some writes", lambda: load.replies > 200, 60)
    during = pair.export()
    if word_of(pair.group()) == "copying":
        assert filecmp.cmp(stale, during, shallow=False), different_blocks(stale, during)
    pair.wait_state("protected")
    load.finish()
    pair.check_sites(oracle)
    log = pair.daemon.log.read_text()
    sent = int(log.split("sent_bytes=")[1].split()[0])
    assert sent > 0, "the comparison found nothing"


def pair_backlog(pair: Pair) -> int:
    return writer_of(pair.group())["backlog"]["used_bytes"]


def connected(pair: Pair) -> bool:
    return pair.backup_group()["writers"][0]["connected_since_unix_ms"] is not None


def test_killed_again_while_the_sites_are_compared(run):
    """The daemon, then the backup, during the comparison: it begins again, or goes on; equal in the end."""
    pair = Pair(run, Options(copy_rate_mib=16))
    pair.start()
    oracle = Oracle(32 * MIB)
    load = pair.load(oracle, "first")
    wait_until("some writes", lambda: load.replies > 500, 60)
    for victim in ["daemon", "daemon", "backup"]:
        if victim == "daemon":
            pair.kill(pair.daemon)
            load.vanish()
            oracle.server_died()
            pair.start_daemon()
            pair.wait_state("copying")
            load = pair.load(oracle, f"after {victim}")
        else:
            pair.kill(pair.backup)
            pair.start_backup()
            wait_until("the link is back", lambda: pair.status()["link"]["connects"] > 1, 60, [pair.daemon])
        wait_until("the comparison goes on", lambda: copied(pair) > 4 * MIB or not is_copying(pair), 60)
    pair.wait_state("protected")
    load.finish()
    pair.check_sites(oracle)


def test_a_resync_that_is_cut_does_not_do_again_what_it_has_done(run):
    """All of the disk differs. Without the backup the comparison stands where it was; without the daemon it begins
    again, and finds what was sent to be equal."""
    window_mib, chunk_mib, whole = 4, 1, 32 * MIB
    pair = Pair(run, Options(copy_rate_mib=4, copy_more=f', window = "{window_mib}MiB"'))
    pair.start()
    pair.kill(pair.daemon)
    pair.disk.write_bytes(random.Random("behind its back").randbytes(whole))
    pair.state_file.with_suffix(".activity").unlink()
    pair.start_daemon()
    pair.wait_state("copying")

    def wait_done(bytes_done: int) -> int:
        wait_until("a part is done", lambda: copied(pair) >= bytes_done, 60, [pair.daemon])
        return copied(pair)

    done = wait_done(8 * MIB)
    pair.kill(pair.backup)
    pair.start_backup()
    wait_until("the link is back", lambda: pair.status()["link"]["connects"] > 1, 60, [pair.daemon])
    assert copied(pair) >= done, "it goes on where it was"
    done = wait_done(16 * MIB)
    assert is_copying(pair)
    pair.kill(pair.daemon)
    assert "sent_bytes=" not in pair.daemon.log.read_text().split("purpose=Compare")[-1], "it had not ended"

    pair.start_daemon()
    pair.wait_state("protected")
    sent = int(pair.daemon.log.read_text().split("sent_bytes=")[-1].split()[0])
    assert whole - done - chunk_mib * MIB <= sent <= whole - done + (window_mib + chunk_mib) * MIB, (sent, done)
    pair.check_sites()


def is_copying(pair: Pair) -> bool:
    return word_of(pair.group()) == "copying"


@pytest.mark.parametrize("seed", [1, 2])
def test_backup_killed_under_load(run, seed: int):
    """The daemon has everything since the last acknowledgement: the stream goes on, nothing is compared."""
    chance = random.Random(f"kill backup {seed}")
    pair = Pair(run)
    pair.start()
    oracle = Oracle(32 * MIB)
    load = pair.load(oracle, str(seed))
    for _ in range(4):
        random_moment(chance, load)
        connects = pair.status()["link"]["connects"]
        pair.kill(pair.backup)
        pair.wait_state("disconnected")
        pair.start_backup()
        wait_until("the link is back", lambda n=connects: pair.status()["link"]["connects"] > n, 60, [pair.daemon])
    load.finish()
    pair.check_sites(oracle)
    assert "purpose=Compare" not in pair.daemon.log.read_text()
    assert load.errors == []


@pytest.mark.parametrize("seed", [1, 2])
def test_both_killed_at_once(run, seed: int):
    """A power cut at both sites: comparison, then equal, with all that was completed."""
    chance = random.Random(f"kill both {seed}")
    pair = Pair(run)
    pair.start()
    oracle = Oracle(32 * MIB)
    for lap in range(3):
        load = pair.load(oracle, f"{seed} {lap}", depth=32)
        random_moment(chance, load)
        both = [pair.daemon, pair.backup]
        chance.shuffle(both)
        pair.kill(*both)
        load.vanish()
        oracle.server_died()
        # In any order: the daemon waits for its backup.
        starts = [pair.start_backup, pair.start_daemon]
        chance.shuffle(starts)
        for start in starts:
            start()
        pair.check_sites(oracle)


def test_daemon_killed_during_the_initial_copy(run):
    """An initial copy that was cut short is gone on with by comparison; nothing is recoverable before its end."""
    pair = Pair(run, Options(copy_rate_mib=8))
    data = random.Random("initial").randbytes(BLOCK)
    with pair.disk.open("r+b") as disk:
        disk.write(data * (32 * MIB // BLOCK))
    pair.start_backup()
    pair.start_daemon()
    pair.wait_state("copying")
    wait_until("the copy has begun", lambda: copied(pair) > 8 * MIB, 60)
    pair.kill(pair.daemon)
    assert not pair.backup_group()["recoverable"]
    pair.start_daemon()
    pair.wait_state("copying")
    pair.wait_state("protected")
    pair.check_sites()
    assert pair.backup_group()["recoverable"]


def copied(pair: Pair) -> int:
    copy = writer_of(pair.group())["copy"]
    return copy["done_bytes"] if copy else 0


def test_clean_stop_with_lag_drains_and_the_next_start_is_immediate(run):
    """SIGTERM: what guests have written is sent first; then nothing needs to be compared."""
    pair = Pair(run)
    pair.start()
    oracle = Oracle(32 * MIB)
    pair.backup.signal(signal.SIGSTOP)
    load = pair.load(oracle, "lag")
    wait_until("there is lag", lambda: pair_backlog(pair) > 8 * MIB, 60)
    load.vanish()
    pair.daemon.popen.terminate()
    wait_until("it drains", lambda: "draining" in pair.daemon.log.read_text(), 60)
    assert pair.daemon.alive()
    pair.backup.signal(signal.SIGCONT)
    assert pair.daemon.wait(60) == 0
    assert "clean=true" in pair.daemon.log.read_text()
    assert not pair.control_socket.exists()
    assert not pair.socket.exists()
    pair.start_daemon()
    pair.check_sites(oracle)
    log = pair.daemon.log.read_text()
    assert "purpose=" not in log and "why=copying" not in log
