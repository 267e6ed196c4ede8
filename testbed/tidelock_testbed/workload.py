"""The clients as a run uses them: the program in the clients' namespace, and the rows that a guest really has."""

from __future__ import annotations

import sys
from pathlib import Path

from .guest import Guest
from .ledger import Ledger, Row
from .net import Net
from .paths import ROOT
from .process import Process, run_command, wait_until
from .run import Run


class Clients:
    """The client program at work on one guest."""

    def __init__(
        self, run: Run, net: Net, guest: Guest, clients: int = 8, name: str = "clients", options: list[str] = ()
    ):
        self.ledger = Ledger(run.directory / f"{name}.ledger")
        self.process = Process(
            run,
            name,
            [
                sys.executable,
                "-m",
                "tidelock_testbed.clients",
                guest.speaks,
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

    def wait_for_more(self, rows: int) -> None:
        """Waits until so many more rows are confirmed."""
        wanted = len(self.ledger.follow().confirmed) + rows

        def are_there() -> bool:
            return len(self.ledger.follow().confirmed) >= wanted

        wait_until(f"{rows} more rows are confirmed", are_there, 300, [self.process])

    def stop(self) -> Ledger:
        """Ends the program and returns the whole ledger."""
        self.process.kill()
        return self.ledger.follow()


def rows_in(net: Net, guest: Guest) -> set[Row]:
    """Every row that the guest has."""
    return set(references_in(net, guest))


def references_in(net: Net, guest: Guest) -> dict[Row, Row | None]:
    """Every row that the guest's database has, asked for from the clients' namespace, with the row it refers to."""
    found: dict[Row, Row | None] = {}
    for line in _dump(net, guest, guest.database):
        client, n, *refers = map(int, line.split())
        if (client, n) in found:
            raise RuntimeError("the guest has a row twice")
        found[client, n] = tuple(refers) or None
    return found


def transactions_in(net: Net, guest: Guest) -> dict[Row, int]:
    """Which transaction wrote each row that the guest's PostgreSQL has."""
    rows = (map(int, line.split()) for line in _dump(net, guest, "transactions"))
    return {(client, n): transaction for client, n, transaction in rows}


def _dump(net: Net, guest: Guest, what: str) -> list[str]:
    program = [sys.executable, Path(__file__).with_name("dump.py"), what, guest.net.ip4, guest.database_port]
    return run_command(program, "read the guest's rows", net.clients, timeout_s=120).splitlines()
