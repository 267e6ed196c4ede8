"""Packets at the gate while the link or the daemon is gone (DESIGN rules 1, 4 and 9): a real gate, clients that
keep a ledger, a guest that is a process."""

from __future__ import annotations

import time

import pytest
from answered import answered_rig

from tidelock_testbed.drilling import NEVER_MIND_S
from tidelock_testbed.hostdaemon import GROUP, MEMBER, Protection, gate_of, writer_of
from tidelock_testbed.nbdwire import Connection
from tidelock_testbed.paths import BIN
from tidelock_testbed.process import run_command, wait_until
from tidelock_testbed.rig import DISKS, Recovery, Rig
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


def guest_is_heard(rig: Rig) -> bool:
    """Whether a packet of the guest behind the old primary reaches the clients."""
    try:
        run_command(["ping", "-c", "1", "-W", "1", rig.guest_net.ip4], "hear the guest", rig.net.clients)
    except RuntimeError:
        return False
    return True


def remove_rules(rig: Rig, *options: str) -> str:
    """As an operator does."""
    words = [BIN / "tidelock", "remove-rules", GROUP, "--config", rig.daemon.config, *options]
    return run_command(words, "take the rules away", rig.net.primary.netns)


def test_a_fenced_daemon_stops_at_once_and_leaves_its_gate_shut(run):
    """Recovered behind its back, with writes that nobody will ever acknowledge: they are not waited for, the rules stay
    until somebody says that the guest is gone, and then nothing is left of them."""
    rig, clients = answered_rig(run, Protection(lease_s=2, grace_s=3))
    rig.net.wan.cut()
    rig.daemon.wait_state("disconnected", NEVER_MIND_S)
    lag = wait_until("writes wait", lambda: writer_of(rig.daemon.group())["lag"]["writes"], NEVER_MIND_S)
    assert lag > 0
    Recovery(rig, "--primary-is-dead").wait_recovered(NEVER_MIND_S)
    rig.net.wan.mend()
    rig.daemon.wait_state("fenced", NEVER_MIND_S)
    rig.daemon.close_control()
    stopped_at = time.monotonic()
    assert rig.daemon.process.stop() == 0
    said = rig.daemon.process.log.read_text()
    assert "takes nothing more" in said and "did not take everything in time" not in said
    assert "the rules stay" in said
    assert not guest_is_heard(rig), "nothing of the old guest leaves, with or without a daemon"
    assert confirmed_since(clients, stopped_at) == []

    rig.daemon.start()
    rig.daemon.wait_state("fenced", NEVER_MIND_S)
    with pytest.raises(RuntimeError, match="tidelockd runs here"):
        remove_rules(rig, "--yes")
    rig.daemon.close_control()
    rig.daemon.process.stop()
    with pytest.raises(RuntimeError, match="Say --yes if this is meant"):
        remove_rules(rig)
    assert not guest_is_heard(rig)
    assert f"the rules of {rig.guest_net.interface} are gone" in remove_rules(rig, "--yes")
    listing = "nft list ruleset; iptables-save -t raw; ip6tables-save -t raw"
    left = run_command(["sh", "-c", listing], "list the rules", rig.net.primary.netns)
    assert "tidelock_" not in left and "TL-" not in left, left
    wait_until("the guest is heard", lambda: guest_is_heard(rig), NEVER_MIND_S)
    remove_rules(rig, "--yes")  # twice is once


def unheld(rig: Rig) -> str:
    """Waits until the group is called unheld, as every way of asking says; returns why."""
    rig.daemon.wait_state("told", NEVER_MIND_S)
    words = [BIN / "tidelock", "status", "--check", "--socket", rig.daemon.control_socket]
    with pytest.raises(RuntimeError):
        run_command(words, "check the status")
    group = rig.daemon.group()
    assert group["told"] is not None
    return group["detail"]


def test_an_interface_that_is_not_there_while_its_disk_is_in_use_is_not_called_protected(run):
    """Renamed while the daemon runs, and not there when it starts: nothing is held, and it is said at once."""
    rig, _ = answered_rig(run, Protection(lease_s=2, grace_s=3))
    interface = rig.guest_net.interface
    netns = rig.net.primary.netns
    rename = ["ip", "link", "set"]
    run_command([*rename, interface, "name", "elsewhere"], "rename the interface", netns)
    assert f"there is no interface {interface}" in unheld(rig)
    rig.daemon.close_control()
    rig.daemon.process.kill()
    rig.daemon.start()
    # The guest asks for its disk again only when it has something to write: this client is one that is back at once.
    disk = Connection(rig.daemon.runtime / GROUP / MEMBER / f"{DISKS[0]}.sock", DISKS[0])
    assert f"there is no interface {interface}" in unheld(rig)
    disk.close()
    run_command([*rename, "elsewhere", "name", interface], "give it its name again", netns)
    rig.daemon.wait_state("protected", NEVER_MIND_S)
    assert rig.daemon.group()["told"] is None


def test_a_clean_stop_leaves_the_guest_silent(run):
    """Everything is at the backup, and the group may be recovered there: the guest that lives on answers nobody. Its
    rules go when the backup knows, and then `recover` names the host."""
    rig, clients = answered_rig(run, Protection(lease_s=2, grace_s=3))
    clients.stop()
    rig.daemon.close_control()
    assert rig.daemon.process.stop() == 0
    assert "the rules stay" in rig.daemon.process.log.read_text()
    assert not guest_is_heard(rig)
    with pytest.raises(RuntimeError, match="the backup does not know"):
        remove_rules(rig, "--yes")
    assert not guest_is_heard(rig)

    rig.daemon.start()
    rig.daemon.wait_state("protected", NEVER_MIND_S)
    assert "No rule is removed yet" in remove_rules(rig)
    rig.daemon.close_control()
    assert rig.daemon.process.stop() == 0
    remove_rules(rig, "--yes")
    wait_until("the guest is heard", lambda: guest_is_heard(rig), NEVER_MIND_S)
    recovery = Recovery(rig)
    recovery.wait_recovered(NEVER_MIND_S)
    said = "\n".join(recovery.lines)
    assert "needs no lease to answer clients" in said, said
