"""A protected guest whose clients are answered, and whether a recovery has all that they were told."""

from __future__ import annotations

from tidelock_testbed.drilling import NEVER_MIND_S
from tidelock_testbed.hostdaemon import Protection
from tidelock_testbed.ledger import Ledger
from tidelock_testbed.rig import Recovery, Rig
from tidelock_testbed.workload import Clients, rows_in


def answered_rig(run, protection: Protection) -> tuple[Rig, Clients]:
    """Both sites with a guest that is a process, and clients of which some were answered."""
    rig = Rig(run, "process", rtt_ms=10, protection=protection)
    rig.backup.start()
    rig.daemon.start()
    rig.boot_guest()
    rig.guest.wait_ready()
    rig.daemon.wait_state("protected", NEVER_MIND_S)
    clients = Clients(run, rig.net, rig.guest, clients=4)
    clients.wait_for_more(100)
    return rig, clients


def check_nothing_missing(rig: Rig, recovery: Recovery, ledger: Ledger) -> None:
    """The recovered guest has every row that a client was told of."""
    rig.net.route_clients_to(rig.net.backup, rig.guest_net)
    missing = set(ledger.confirmed) - rows_in(rig.net, recovery.guest)
    assert not missing, f"{len(missing)} rows that were confirmed are gone"


def check_recovery_without_primary(rig: Rig, clients: Clients) -> None:
    """The primary site is gone, and nothing that clients were told is."""
    ledger = clients.stop()
    rig.destroy_primary(cut_first=False)
    recovery = Recovery(rig, "--primary-is-dead")
    recovery.wait_ready()
    check_nothing_missing(rig, recovery, ledger)
