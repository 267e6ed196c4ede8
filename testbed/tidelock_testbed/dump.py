"""Prints every row of a guest's database: `dump.py postgres|rowstore HOST PORT`, run where the clients are."""

import socket
import sys

import psycopg


def dump_postgres(host: str, port: int) -> None:
    """Prints the table `rows`."""
    with psycopg.connect(f"host={host} port={port} user=postgres dbname=postgres connect_timeout=10") as connection:
        # Through the table, not its index: a row that only one of them has must show.
        connection.execute("SET enable_indexscan = off; SET enable_indexonlyscan = off; SET enable_bitmapscan = off")
        if connection.execute("SELECT to_regclass('rows')").fetchone()[0] is not None:
            for client, n in connection.execute("SELECT client, n FROM rows"):
                print(client, n)


def dump_rowstore(host: str, port: int) -> None:
    """Prints the row store's rows."""
    with socket.create_connection((host, port), 10) as connection:
        connection.sendall(b"DUMP\n")
        for line in connection.makefile():
            if line == "END\n":
                return
            print(line.removeprefix("ROW "), end="")
    raise ConnectionError("the row store ended its list early")


if __name__ == "__main__":
    _, kind, host_, port_ = sys.argv
    {"postgres": dump_postgres, "rowstore": dump_rowstore}[kind](host_, int(port_))
