"""Packets at the gate while the link or the daemon is gone (DESIGN rules 1, 4 and 9): a real gate, clients that
keep a ledger, a guest that is a process."""

from __future__ import annotations

import time

from answered import answered_rig

from tidelock_testbed.drilling import NEVER_MIND_S
from tidelock_testbed.hostdaemon import Protection, gate_of, writer_of
from tidelock_testbed.process import wait_until
from tidelock_testbed.workload import Clients


def confirmed_since(clients: Clients, at: float) -> list:
    """Rows that were sent and confirmed after this moment."""
    ledger = clients.ledger.follow()
    return [row for row, _ in ledger.confirmed.items() if ledger.sent[row] > at]


def test_packets_are_held_while_the_wan_is_cut(run):
    """No reply leaves for a write that the backup does not have, and after the lease none at all."""
    rig, clients = answered_rig(run, Protection(lease_s=2, grace_s=3))
    rig.net.wan.cut()
    cut_at = time.monotonic()
    rig.daemon.wait_state("disconnected", NEVER_MIND_S)
    held = wait_until("packets are held", lambda: gate_of(rig.daemon.group())["held_packets"], NEVER_MIND_S)
    assert held > 0
    wait_until("the lease has ended", lambda: not gate_of(rig.daemon.group())["open"], NEVER_MIND_S)
    group = rig.daemon.group()
    assert "lease" in gate_of(group)["shut_because"]
    assert not group["lease"]["held"]
    assert writer_of(group)["lag"]["writes"] > 0
    assert confirmed_since(clients, cut_at) == []
    rig.net.wan.mend()
    rig.daemon.wait_state("protected", NEVER_MIND_S)
    clients.wait_for_more(100)
    wait_until("the gate is open", lambda: gate_of(rig.daemon.group())["open"], NEVER_MIND_S)


def test_nothing_leaves_while_the_daemon_is_gone(run):
    """kill -9 of the daemon: the rules stay and nobody answers; after the comparison the clients go on."""
    rig, clients = answered_rig(run, Protection(lease_s=2, grace_s=3))
    rig.daemon.process.kill()
    killed_at = time.monotonic()
    replies = len(clients.ledger.follow().confirmed)
    time.sleep(1)  # long enough for replies to leave if the gate let them
    assert confirmed_since(clients, killed_at) == []
    rig.daemon.start()
    rig.daemon.wait_state("protected", NEVER_MIND_S)
    clients.wait_for_more(100)
    assert len(clients.ledger.follow().confirmed) > replies
