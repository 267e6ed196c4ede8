"""A tier of a testbed application: a web service that works, writes a row, and asks the next tier.

It runs inside guests, with nothing but Debian's Python and its `psycopg2`.

    tier.py --port 8000 [--store KIND:HOST[:PORT]] [--store ...] [--next HOST:PORT] [--work-ms W]

    POST /rows/<client>/<n>[?work_ms=W&render_ms=R]
                                          works, writes, asks the next tier, works on the answer for R ms; 200 when all
                                          of that is done
    GET /                                 a static page: no work, no row
    GET /newest                           a line for each database that this tier asks, with the newest row that it is
                                          known to have: <number> <client> <n>

What is written where:

- One store, the CompDB shape: row (client, n) is inserted and committed first, then the next tier is asked to do
  the same. The row refers to the newest row that the next tier is known to have.
- Two stores, the transfer shape: an even n is inserted into the first store and then into the second, an odd n the
  other way round. The second insert refers to the first; the first refers to the newest row that the other
  store is known to have. So each store's rows depend on the other's.
- No store: the tier only works and asks.

Invariant: a row is committed, and the store has said so, before anybody else can hear of it. A request that failed is
never tried again here: nobody knows whether its row is there.
"""

import argparse
import hashlib
import http.client
import http.server
import re
import socket
import threading
import time
from urllib.parse import parse_qs, urlsplit

PATIENCE_S = 60
"""For a store or a tier that does not answer. Clients lose theirs much earlier."""
BLOCK = bytes(16384)
ROW_PATH = re.compile(r"/rows/(\d+)/(\d+)")
NOTHING = (None, None)
"""What a row refers to that refers to no row."""


class PostgresStore:
    """Table `rows` of a PostgreSQL; each insert is a transaction of its own. For one thread."""

    PORT = 5432

    def __init__(self, host, port):
        import psycopg2  # here, because a process guest has none and needs none

        self.connection = psycopg2.connect(
            host=host, port=port, user="postgres", dbname="postgres", connect_timeout=PATIENCE_S
        )
        self.connection.autocommit = True
        self.cursor = self.connection.cursor()
        # One at a time: of two that create the table at once, one fails.
        self.cursor.execute(
            "SET client_min_messages = error; BEGIN; SELECT pg_advisory_xact_lock(1);"
            "CREATE TABLE IF NOT EXISTS rows (client int, n bigint, refers_client int, refers_n bigint,"
            " PRIMARY KEY (client, n)); COMMIT"
        )

    def insert(self, row, refers):
        """Returns when the row is committed."""
        self.cursor.execute("INSERT INTO rows VALUES (%s, %s, %s, %s)", (*row, *refers))

    def close(self):
        """Ends the connection."""
        self.connection.close()


class RowStore:
    """The process guest's row store. For one thread."""

    PORT = 7000

    def __init__(self, host, port):
        self.socket = socket.create_connection((host, port), PATIENCE_S)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.answers = self.socket.makefile("rb")

    def insert(self, row, refers):
        """Returns when the row is durable."""
        words = row if refers == NOTHING else (*row, *refers)
        self.socket.sendall(b"INSERT " + b" ".join(b"%d" % word for word in words) + b"\n")
        answer = self.answers.readline()
        if answer != b"OK %d %d\n" % row:
            raise ConnectionError(answer.decode(errors="replace") or "the row store closed the connection")

    def close(self):
        """Ends the connection."""
        self.answers.close()
        self.socket.close()


STORES = {"postgres": PostgresStore, "rowstore": RowStore}


class NextTier:
    """The next tier's web service. For one thread."""

    def __init__(self, host, port):
        self.connection = http.client.HTTPConnection(host, port, timeout=PATIENCE_S)

    def ask(self, row):
        """Returns when the next tier has done its part."""
        client, n = row
        self.connection.request("POST", f"/rows/{client}/{n}")
        answer = self.connection.getresponse()
        text = answer.read()
        if answer.status != 200:
            raise ConnectionError(f"the next tier says: {answer.status} {text.decode(errors='replace').strip()}")

    def close(self):
        """Ends the connection."""
        self.connection.close()


class Links(threading.local):
    """Each thread's own connections, made when they are first used."""

    def __init__(self):
        self.open = {}

    def get(self, key, make):
        """The connection of this name."""
        if key not in self.open:
            self.open[key] = make()
        return self.open[key]

    def drop(self):
        """After an error: what is still under way on a connection must not be taken for the next answer."""
        while self.open:
            self.open.popitem()[1].close()


class Tier:
    """What this tier does with a request."""

    def __init__(self, stores, next_tier, work_ms):
        self.stores, self.next_tier, self.work_ms = stores, next_tier, work_ms
        self.links = Links()
        self.newest = [NOTHING] * (1 if next_tier else len(stores))
        """The newest row that the next tier, or else each store, is known to have."""

    def perform(self, row, work_ms):
        """Everything that a request asks for."""
        try:
            work(work_ms)
            if len(self.stores) == 2:
                self.transfer(row)
            else:
                self.chain(row)
        except BaseException:
            self.links.drop()
            raise

    def chain(self, row):
        """A row here, then the next tier's part."""
        if self.stores:
            self.store(0).insert(row, self.newest[0] if self.next_tier else NOTHING)
        if self.next_tier:
            self.links.get("next", lambda: NextTier(*self.next_tier)).ask(row)
            self.newest[0] = row

    def transfer(self, row):
        """A row in each store, the second because of the first."""
        first, second = (0, 1) if row[1] % 2 == 0 else (1, 0)
        self.store(first).insert(row, self.newest[second])
        self.newest[first] = row
        self.store(second).insert(row, row)
        self.newest[second] = row

    def store(self, number):
        """This thread's connection to a store."""
        kind, host, port = self.stores[number]
        return self.links.get(number, lambda: STORES[kind](host, port))


def work(milliseconds):
    """Computes for so long, in processor time."""
    end = time.thread_time() + milliseconds / 1e3
    while time.thread_time() < end:
        hashlib.sha256(BLOCK).digest()


class Handler(http.server.BaseHTTPRequestHandler):
    """One connection of a client."""

    tier: Tier
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = -1  # a reply is one packet

    def do_GET(self):
        """A page."""
        if self.path == "/newest":
            known = [(number, *row) for number, row in enumerate(self.tier.newest) if row != NOTHING]
            self.answer(200, "".join(f"{number} {client} {n}\n" for number, client, n in known).encode())
        else:
            self.answer(200, b"static\n")

    def do_POST(self):
        """A row."""
        url = urlsplit(self.path)
        match = ROW_PATH.fullmatch(url.path)
        if not match:
            self.answer(404, b"write /rows/CLIENT/N\n")
            return
        row = tuple(map(int, match.groups()))
        query = {name: float(values[0]) for name, values in parse_qs(url.query).items()}
        try:
            self.tier.perform(row, query.get("work_ms", self.tier.work_ms))
            work(query.get("render_ms", 0))
        except Exception as error:  # whatever it was, this request is not confirmed
            self.answer(503, f"{type(error).__name__}: {error}\n".encode())
        else:
            self.answer(200, b"%d %d\n" % row)

    def answer(self, status, text):
        """Sends a reply."""
        self.send_response(status)
        self.send_header("Content-Type", "text/plain")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *words):
        """Says nothing: requests are in the clients' ledger."""


class Server(http.server.ThreadingHTTPServer):
    """A thread for each connection."""

    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, request, client_address):
        """A client that vanished ends its own connection only."""


def parse_store(text):
    """KIND:HOST[:PORT]"""
    kind, host, *port = text.split(":")
    return kind, host, int(port[0]) if port else STORES[kind].PORT


def parse_next(text):
    """HOST:PORT"""
    host, port = text.split(":")
    return host, int(port)


def main():
    """Serves until it is killed."""
    parser = argparse.ArgumentParser(description="A tier of a testbed application")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--store", type=parse_store, action="append", default=[])
    parser.add_argument("--next", type=parse_next)
    parser.add_argument("--work-ms", type=float, default=0)
    options = parser.parse_args()
    if len(options.store) > 2 or (len(options.store) == 2 and options.next):
        parser.error("one --store and a --next, or two --store")
    Handler.tier = Tier(options.store, options.next, options.work_ms)
    server = Server(("", options.port), Handler)
    print("TIDELOCK-GUEST web", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
