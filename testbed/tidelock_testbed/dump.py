"""Prints every row of a guest's database: `dump.py postgres|rowstore HOST PORT`, run where the clients are.

A line for each row: its client and n, and those of the row that it refers to, if any. `dump.py transactions HOST PORT`
prints its client and n and the number of the transaction that wrote it, of a PostgreSQL.
"""

import socket
import sys

import psycopg


def dump_postgres(host: str, port: int, columns: str = "client, n, refers_client, refers_n") -> None:
    """Prints the table `rows`."""
    with psycopg.connect(f"host={host} port={port} user=postgres dbname=postgres connect_timeout=10") as connection:
        # Through the table, not its index: a row that only one of them has must show.
        connection.execute("SET enable_indexscan = off; SET enable_indexonlyscan = off; SET enable_bitmapscan = off")
        if connection.execute("SELECT to_regclass('rows')").fetchone()[0] is not None:
            for row in connection.execute(f"SELECT {columns} FROM rows"):
                print(*(word for word in row if word is not None))


def dump_transactions(host: str, port: int) -> None:
    """Prints which transaction wrote each row of the table `rows`."""
    dump_postgres(host, port, "client, n, xmin")


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
    dumps = {"postgres": dump_postgres, "transactions": dump_transactions, "rowstore": dump_rowstore}
    dumps[kind](host_, int(port_))
