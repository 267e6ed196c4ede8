"""An earlier release against this one: each with the other over the link, and this one in the place of the other, on
what that has left. `make earlier [FROM=commit]` builds one; `make test` does from the first tag on."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tidelock_testbed.oracle import Oracle
from tidelock_testbed.pair import GROUP, MIB, Pair
from tidelock_testbed.paths import BIN
from tidelock_testbed.process import wait_until

EARLIER = os.environ.get("TIDELOCK_EARLIER", "")
"""Where its programs are."""
DISK_MIB = 32

pytestmark = pytest.mark.skipif(not EARLIER, reason="there is no earlier release: no tag v* before this commit")

DAEMON, BACKUP = "daemon", "backup"


def pair_of(run, *earlier: str) -> Pair:
    """Both sites; these programs are the earlier release's."""
    pair = Pair(run)
    if DAEMON in earlier:
        pair.daemon_programs = Path(EARLIER)
    if BACKUP in earlier:
        pair.backup_programs = Path(EARLIER)
    return pair


def write(pair: Pair, oracle: Oracle, seed: str) -> None:
    """A guest, for a while."""
    load = pair.load(oracle, seed)
    wait_until("some writes", lambda: load.replies > 500, 60, [pair.daemon])
    load.finish()
    assert load.errors == []


def check_recovery(pair: Pair) -> None:
    """The group can be taken over, and the old primary hears of it."""
    pair.backup_command("recover", GROUP, "--primary-is-dead")
    pair.wait_state("fenced")


def break_and_mend(pair: Pair, oracle: Oracle) -> None:
    """What both have to agree on: a stream, an outage, a comparison, an end without a word."""
    write(pair, oracle, "first")
    pair.check_sites(oracle)
    pair.kill(pair.backup)
    pair.wait_state("disconnected")
    write(pair, oracle, "while the backup is away")
    pair.start_backup()
    pair.wait_state("protected")
    pair.check_sites(oracle)
    load = pair.load(oracle, "killed")
    wait_until("some writes", lambda: load.replies > 500, 60, [pair.daemon])
    pair.kill(pair.daemon)
    load.vanish()
    oracle.server_died()
    pair.start_daemon()
    pair.wait_state("protected")
    pair.check_sites(oracle)


@pytest.mark.parametrize("earlier", [DAEMON, BACKUP])
def test_each_speaks_with_the_other(run, earlier: str):
    pair = pair_of(run, earlier)
    pair.start()
    oracle = Oracle(DISK_MIB * MIB)
    break_and_mend(pair, oracle)
    check_recovery(pair)


@pytest.mark.parametrize("ends", ["cleanly", "by kill -9"])
@pytest.mark.parametrize("first", [DAEMON, BACKUP])
def test_this_one_goes_on_with_what_the_other_has_left(run, first: str, ends: str):
    """Either side first, then the other, as sites are upgraded. A clean end is followed by no comparison."""
    pair = pair_of(run, DAEMON, BACKUP)
    pair.start()
    oracle = Oracle(DISK_MIB * MIB)
    write(pair, oracle, "with the earlier release")
    for side in sorted([DAEMON, BACKUP], key=lambda side: side != first):
        process = pair.daemon if side == DAEMON else pair.backup
        if ends == "cleanly":
            pair.wait_settled()
            process.signal(signal.SIGTERM)
            process.wait(60)
        else:
            pair.kill(process)
        if side == DAEMON:
            pair.daemon_programs = BIN
            pair.start_daemon()
        else:
            pair.backup_programs = BIN
            pair.start_backup()
        pair.wait_state("protected")
        write(pair, oracle, f"after the {side}")
    pair.check_sites(oracle)
    compared = "purpose=Compare" in pair.daemon.log.read_text()
    assert compared == (ends == "by kill -9"), "what is compared"
    check_recovery(pair)
