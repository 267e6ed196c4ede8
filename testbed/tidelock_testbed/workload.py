"""The clients as a run uses them: the program in the clients' namespace, and the rows that a guest really has."""

from __future__ import annotations

import sys
from pathlib import Path

from .guest import Guest, VmGuest
from .ledger import Ledger, Row
from .net import Net
from .paths import ROOT
from .process import Process, run_command
from .run import Run


class Clients:
    """The client program at work on one guest."""

    def __init__(
        self, run: Run, net: Net, guest: Guest, clients: int = 8, name: str = "clients", options: list[str] = ()
    ):
        kind = "postgres" if isinstance(guest, VmGuest) else "rowstore"
        self.ledger = Ledger(run.directory / f"{name}.ledger")
        self.process = Process(
            run,
            name,
            [
                sys.executable,
                "-m",
                "tidelock_testbed.clients",
                kind,
                guest.net.ip4,
                guest.port,
                self.ledger.path,
                "--clients",
                clients,
                *options,
            ],
            net.clients,
            env={"PYTHONPATH": str(ROOT / "testbed")},
        )

    def stop(self) -> Ledger:
        """Ends the program and returns the whole ledger."""
        self.process.kill()
        return self.ledger.follow()


def rows_in(net: Net, guest: Guest) -> set[Row]:
    """Every row that the guest has, asked for from the clients' namespace."""
    kind = "postgres" if isinstance(guest, VmGuest) else "rowstore"
    text = run_command(
        [sys.executable, Path(__file__).with_name("dump.py"), kind, guest.net.ip4, guest.port],
        "read the guest's rows",
        net.clients,
        timeout_s=120,
    )
    rows = [tuple(map(int, line.split())) for line in text.splitlines()]
    if len(rows) != len(set(rows)):
        raise RuntimeError("the guest has a row twice")
    return set(rows)
