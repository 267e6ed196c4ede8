"""Concurrent clients that insert numbered rows and keep a ledger of what they were told.

    python -m tidelock_testbed.clients postgres|rowstore|web HOST PORT LEDGER --clients N [--read] [--pause-ms P]

Each client sends its next row when the last one was answered. When an answer does not come, or the
connection breaks, that row is given up (`gone`: it may or may not be there), the client connects again for as
long as it takes, and goes on with the row after it, for which it waits longer. So the program survives the
disaster and finds the recovered server at the same address. It runs until it is killed.

With --read, each request only asks how many rows there are, or for the page that --page names, and nothing is
written; rows that the page tells of are noted (`told`). With --every-ms, requests leave at that pace, as long as each
client's last one was answered.
"""

from __future__ import annotations

import argparse
import asyncio
import time

import h11
import psycopg

RETRY_S = 0.2
PATIENCE_GROWTH_MAX = 4
"""Who was not answered in time waits up to so many times as long for the next row: where a guest is slower than its
clients' patience, what they gave up keeps it so busy that it never answers in time."""
NEWEST = "/newest"
"""The page that tells of rows, `<database> <client> <n>` in each line."""


class PostgresClient:
    """Inserts into table `rows` by PostgreSQL's own protocol; each insert is a transaction of its own."""

    def __init__(self, host: str, port: int, options: argparse.Namespace):
        self._target = f"host={host} port={port} user=postgres dbname=postgres"
        self._insert = "INSERT INTO rows (client, n) VALUES (%s, %s)"
        self._locked = options.locked
        self._connection: psycopg.AsyncConnection | None = None

    async def connect(self) -> None:
        """Opens a connection and makes sure that the table is there."""
        self._connection = await psycopg.AsyncConnection.connect(self._target, autocommit=True)
        # One at a time: of two that create the table at once, one fails.
        await self._connection.execute(
            "SET client_min_messages = error; BEGIN; SELECT pg_advisory_xact_lock(1);"
            "CREATE TABLE IF NOT EXISTS rows (client int, n bigint, refers_client int, refers_n bigint,"
            " PRIMARY KEY (client, n)); COMMIT"
        )

    async def insert(self, client: int, n: int) -> None:
        """Returns when the server has confirmed the row."""
        if self._locked:
            async with self._connection.transaction():
                await self._connection.execute("LOCK TABLE rows IN EXCLUSIVE MODE")
                await self._connection.execute(self._insert, (client, n))
        else:
            await self._connection.execute(self._insert, (client, n))

    async def read(self, client: int, n: int) -> None:
        """Returns when the server has said how many rows there are."""
        del client, n
        await self._connection.execute("SELECT count(*) FROM rows")

    async def close(self) -> None:
        """Gives the connection up without a word to the server, which may not be there."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.pgconn.finish()


class RowstoreClient:
    """Inserts by the process guest's line protocol."""

    def __init__(self, host: str, port: int, options: argparse.Namespace):
        del options  # the row store has one table and one commit at a time
        self._host, self._port = host, port
        self._writer: asyncio.StreamWriter | None = None

    async def connect(self) -> None:
        """Opens a connection."""
        self._reader, self._writer = await asyncio.open_connection(self._host, self._port)

    async def insert(self, client: int, n: int) -> None:
        """Returns when the server has confirmed the row."""
        self._writer.write(b"INSERT %d %d\n" % (client, n))
        answer = await self._reader.readline()
        if answer != b"OK %d %d\n" % (client, n):
            raise ConnectionError(answer.decode(errors="replace") or "closed")

    async def read(self, client: int, n: int) -> None:
        """Returns when the server has said how many rows there are."""
        del client, n
        self._writer.write(b"COUNT\n")
        answer = await self._reader.readline()
        if not answer.startswith(b"COUNT "):
            raise ConnectionError(answer.decode(errors="replace") or "closed")

    async def close(self) -> None:
        """Gives the connection up."""
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.transport.abort()


class WebClient:
    """Asks the front tier of an application (`guest/tier.py`) over one HTTP connection."""

    def __init__(self, host: str, port: int, options: argparse.Namespace):
        self._host, self._port = host, port
        self._page = options.page
        self._query = f"?render_ms={options.render_ms:g}" if options.render_ms else ""
        self._writer: asyncio.StreamWriter | None = None

    async def connect(self) -> None:
        """Opens a connection."""
        self._reader, self._writer = await asyncio.open_connection(self._host, self._port)
        self._http = h11.Connection(h11.CLIENT)

    async def insert(self, client: int, n: int) -> None:
        """Returns when the application has confirmed the row."""
        await self._ask("POST", f"/rows/{client}/{n}{self._query}")

    async def read(self, client: int, n: int) -> str:
        """Returns the page when it has come."""
        del client, n
        return await self._ask("GET", self._page)

    async def _ask(self, method: str, target: str) -> str:
        headers = [("Host", self._host), ("Content-Length", "0")]
        request = h11.Request(method=method, target=target, headers=headers)
        self._writer.write(self._http.send(request) + self._http.send(h11.EndOfMessage()))
        status, text = None, b""
        while True:
            event = self._http.next_event()
            if event is h11.NEED_DATA:
                self._http.receive_data(await self._reader.read(65536))
            elif isinstance(event, h11.Response):
                status = event.status_code
            elif isinstance(event, h11.Data):
                text += event.data
            elif isinstance(event, h11.EndOfMessage):
                break
            else:
                raise ConnectionError("the front tier closed the connection")
        if status != 200:
            raise ConnectionError(f"the front tier says: {status} {text.decode(errors='replace')}")
        self._http.start_next_cycle()
        return text.decode()

    async def close(self) -> None:
        """Gives the connection up."""
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.transport.abort()


CLIENTS = {"postgres": PostgresClient, "rowstore": RowstoreClient, "web": WebClient}


async def ask_on(number: int, client, ledger, options: argparse.Namespace) -> None:
    """One client, for ever."""
    request = client.read if options.read else client.insert

    def note(event: str, n: int) -> None:
        ledger.write(f"{time.monotonic():.6f} {event} {number} {n}\n")

    n = 0
    patience_s, connect_s = options.patience_s, options.connect_s
    # Clients that keep a pace begin one after the other, not all at once.
    due = time.monotonic() + options.every_ms / 1e3 * (number - options.first) / options.clients
    while True:
        try:
            try:
                await asyncio.wait_for(client.connect(), connect_s)
            except TimeoutError:
                if n == 0:
                    # It has never been served: the guest is slow, not gone.
                    connect_s = min(2 * connect_s, PATIENCE_GROWTH_MAX * options.connect_s)
                raise
            connect_s = options.connect_s
            while True:
                if options.every_ms:
                    await asyncio.sleep(due - time.monotonic())
                    due = max(due + options.every_ms / 1e3, time.monotonic())
                n += 1
                note("sent", n)
                try:
                    page = await asyncio.wait_for(request(number, n), patience_s)
                except BaseException as error:
                    note("gone", n)
                    if isinstance(error, TimeoutError):
                        patience_s = min(2 * patience_s, PATIENCE_GROWTH_MAX * options.patience_s)
                    raise
                note("ok", n)
                patience_s = options.patience_s
                if options.page == NEWEST:
                    for line in page.splitlines():
                        ledger.write(f"{time.monotonic():.6f} told {line}\n")
                if options.pause_ms:
                    await asyncio.sleep(options.pause_ms / 1e3)
        except (TimeoutError, OSError, psycopg.Error, h11.RemoteProtocolError):
            await client.close()
            await asyncio.sleep(options.retry_s)


async def main() -> None:
    """Parses the command line and runs all clients."""
    parser = argparse.ArgumentParser(description="Insert numbered rows and keep a ledger")
    parser.add_argument("kind", choices=CLIENTS)
    parser.add_argument("host")
    parser.add_argument("port", type=int)
    parser.add_argument("ledger")
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--first", type=int, default=1, help="number of the first client")
    parser.add_argument("--pause-ms", type=float, default=0, help="between an answer and the next request")
    parser.add_argument("--every-ms", type=float, default=0, help="each client's pace")
    parser.add_argument("--render-ms", type=float, default=0, help="work of the front tier on each answer")
    parser.add_argument("--patience-s", type=float, default=10, help="how long to wait for an answer at first")
    parser.add_argument("--connect-s", type=float, default=2, help="how long to wait for a connection at first")
    parser.add_argument("--retry-s", type=float, default=RETRY_S, help="how long to wait before connecting again")
    parser.add_argument("--read", action="store_true", help="only read")
    parser.add_argument("--page", default="/", help="what to read of a web service")
    parser.add_argument("--locked", action="store_true", help="each insert locks the table")
    options = parser.parse_args()
    # Line buffering: what a client was told is in the ledger before it does anything else.
    with open(options.ledger, "a", buffering=1) as ledger:
        await asyncio.gather(
            *(
                ask_on(number, CLIENTS[options.kind](options.host, options.port, options), ledger, options)
                for number in range(options.first, options.first + options.clients)
            )
        )


if __name__ == "__main__":
    asyncio.run(main())
