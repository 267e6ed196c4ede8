"""Clients of a sharded store that write causal chains, and keep a ledger of what they were told.

    python -m tidelock_testbed.chainclients LEDGER SEED HOST:PORT... [--alone N] [--handing N] [--handed N]

A row of a chain is asked for on a shard other than that of the row before, and only when that one was answered. Some
clients have a chain of their own. Others hand theirs to one another: whoever gets a chain's number from a client writes
its next row, over connections of its own.

A row without an answer is asked for again, on the same shard, until there is one; only then the chain goes on. The
program runs until it is killed.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from typing import TextIO

import psycopg

TABLE = "CREATE TABLE rows (chain int, n bigint, client int, PRIMARY KEY (chain, n));"
INSERT = "INSERT INTO rows (chain, n, client) VALUES (%s, %s, %s) ON CONFLICT DO NOTHING"
RETRY_S = 0.05
FIRST_HANDED = 101
"""Number of the first chain that is handed from client to client."""


class Client:
    """A client, with a connection to each shard."""

    def __init__(self, number: int, options: argparse.Namespace, ledger: TextIO):
        self.number, self.ledger = number, ledger
        self.targets, self.patience_s = options.targets, options.patience_s
        self.random = random.Random(f"client {options.seed} {number}")
        self._connections: list[psycopg.AsyncConnection | None] = [None] * len(self.targets)

    def note(self, event: str, shard: int, chain: int, n: int) -> None:
        """Writes a line of the ledger."""
        self.ledger.write(f"{time.monotonic():.6f} {event} {shard} {chain} {n}\n")

    def next_shard(self, last: int) -> int:
        """A random shard other than the last one."""
        count = len(self.targets)
        return (last + self.random.randrange(1, count)) % count if count > 1 else 0

    async def write(self, chain: int, n: int, last: int) -> int:
        """Writes a row of a chain whose last one is on shard `last`; returns the shard when it has answered."""
        shard = self.next_shard(last)
        self.note("sent", shard, chain, n)
        while True:
            try:
                await asyncio.wait_for(self._insert(shard, chain, n), self.patience_s)
                break
            except (TimeoutError, OSError, psycopg.Error):
                self.note("again", shard, chain, n)
                self._give_up(shard)
                await asyncio.sleep(RETRY_S)
        self.note("ok", shard, chain, n)
        return shard

    async def _insert(self, shard: int, chain: int, n: int) -> None:
        connection = self._connections[shard]
        if connection is None:
            host, port = self.targets[shard].rsplit(":", 1)
            target = f"host={host} port={port} user=postgres dbname=postgres"
            connection = await psycopg.AsyncConnection.connect(target, autocommit=True)
            self._connections[shard] = connection
        await connection.execute(INSERT, (chain, n, self.number))

    def _give_up(self, shard: int) -> None:
        """Without a word to the server, which may not be there."""
        connection, self._connections[shard] = self._connections[shard], None
        if connection is not None:
            connection.pgconn.finish()


async def alone(client: Client) -> None:
    """A client with a chain of its own, which has its number."""
    n, shard = 0, client.random.randrange(len(client.targets))
    while True:
        n += 1
        shard = await client.write(client.number, n, shard)


async def handing(client: Client, inbox: asyncio.Queue, others: list[asyncio.Queue]) -> None:
    """A client that writes the next row of each chain that it is handed, and hands the chain on."""
    while True:
        chain, n, shard = await inbox.get()
        shard = await client.write(chain, n + 1, shard)
        client.random.choice(others).put_nowait((chain, n + 1, shard))


async def main() -> None:
    """Parses the command line and runs all clients."""
    parser = argparse.ArgumentParser(description="Write causal chains and keep a ledger")
    parser.add_argument("ledger")
    parser.add_argument("seed", type=int)
    parser.add_argument("targets", nargs="+")
    parser.add_argument("--alone", type=int, default=6, help="clients with a chain of their own")
    parser.add_argument("--handing", type=int, default=4, help="clients that hand chains to one another")
    parser.add_argument("--handed", type=int, default=3, help="chains that are handed")
    parser.add_argument("--patience-s", type=float, default=5, help="how long to wait for an answer")
    options = parser.parse_args()
    # Line buffering: what a client was told is in the ledger before it does anything else.
    with open(options.ledger, "a", buffering=1) as ledger:
        numbers = range(1, 1 + options.alone + options.handing)
        clients = [Client(number, options, ledger) for number in numbers]
        inboxes = [asyncio.Queue() for _ in clients[options.alone :]]
        for chain in range(options.handed):
            inboxes[chain % len(inboxes)].put_nowait((FIRST_HANDED + chain, 0, chain % len(options.targets)))
        tasks = [alone(client) for client in clients[: options.alone]]
        for client, inbox in zip(clients[options.alone :], inboxes, strict=True):
            others = [other for other in inboxes if other is not inbox] or [inbox]
            tasks.append(handing(client, inbox, others))
        await asyncio.gather(*tasks)


if __name__ == "__main__":
    asyncio.run(main())
