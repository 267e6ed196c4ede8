"""A group whose policy is `async after T`: it goes on without the backup and says so, comes back by itself, and a
recovery knows of it (DESIGN rules 1, 6 and 8). A real gate, clients that keep a ledger, a guest that is a process."""

from __future__ import annotations

import json
import re
import time

from answered import answered_rig, check_recovery_without_primary

from tidelock_testbed.drilling import NEVER_MIND_S
from tidelock_testbed.hostdaemon import Protection, gate_of
from tidelock_testbed.process import wait_until
from tidelock_testbed.rig import Rig
from tidelock_testbed.workload import Clients

AFTER_S = 3
PROTECTION = Protection(lease_s=2, grace_s=3, when_unreachable=f"async after {AFTER_S}s")


def degraded(rig: Rig, clients: Clients) -> dict:
    """Cuts the link, and waits until clients are answered all the same."""
    cut_at = time.time()
    rig.net.wan.cut()
    rig.daemon.wait_state("disconnected", NEVER_MIND_S)
    rig.daemon.wait_state("told", NEVER_MIND_S)
    # The gate's thread follows, and says so.
    wait_until("the gate is open", lambda: gate_of(rig.daemon.group())["open"], NEVER_MIND_S)
    group = rig.daemon.group()
    assert group["mode"] == "async" and group["configured_mode"] == "pipelined"
    assert not group["lease"]["held"]
    since = group["told"]["since_unix_ms"] / 1e3
    assert since >= cut_at + AFTER_S - 1, "not before something has waited for so long"
    clients.wait_for_more(100)
    return group


def test_it_goes_on_without_the_backup_and_comes_back_by_itself(run):
    """The gate opens after T and not before, status says since when; when the link is back, it is pipelined again."""
    rig, clients = answered_rig(run, PROTECTION)
    group = degraded(rig, clients)
    assert group["when_unreachable"] == f"async after {AFTER_S}s"
    assert group["told"] is not None
    log = rig.daemon.process.log.read_text()
    assert "DEGRADED" in log

    rig.net.wan.mend()
    rig.daemon.wait_state("protected", NEVER_MIND_S)
    group = rig.daemon.group()
    assert group["mode"] == "pipelined" and group["told"] is None
    clients.wait_for_more(100)
    log = rig.daemon.process.log.read_text()
    assert log.index("DEGRADED") < log.index("replies are held again") < log.index("no longer degraded")
    assert log.count("DEGRADED") == 1, "no oscillation"

    # And everything that a client was told meanwhile is in a recovery.
    check_recovery_without_primary(rig, clients)


def test_a_recovery_says_what_clients_may_have_seen(run):
    """A disaster while it is degraded: `recover` names the host and since when, and that it may still answer."""
    rig, clients = answered_rig(run, PROTECTION)
    policy = rig.backup.status()["groups"][0]["policies"]
    assert [known["after_ms"] for known in policy.values()] == [AFTER_S * 1000]
    group = degraded(rig, clients)
    words = rig.backup.recover("--json", name="recover-json")
    assert words.wait(NEVER_MIND_S) == 0
    line = next(line for line in words.log.read_text().splitlines() if line.startswith("{"))
    exposed = json.loads(line)["recovery"]["exposed"]
    assert len(exposed) == 1 and not exposed[0]["is_known"], exposed
    assert exposed[0]["since_unix_ms"] <= group["told"]["since_unix_ms"]

    words = rig.backup.recover(name="recover-again")
    assert words.wait(NEVER_MIND_S) == 0
    text = words.log.read_text()
    assert "CLIENTS MAY HAVE SEEN WHAT IS NOT HERE" in text and "Make sure that it is off" in text
    assert re.search(r"since 20\d\d-.* at the earliest", text), text

    # The old primary answers until it hears of it, and never again afterwards.
    clients.wait_for_more(20)
    rig.net.wan.mend()
    rig.daemon.wait_state("fenced", NEVER_MIND_S)
    wait_until("its gate is shut", lambda: not gate_of(rig.daemon.group())["open"], NEVER_MIND_S)
