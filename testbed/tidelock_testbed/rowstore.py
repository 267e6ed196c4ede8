"""The process guest's database: rows on NBD disks, durable before they are confirmed.

It is run by Debian's /usr/bin/python3, which alone has the `nbd` module, so it imports nothing of this package.

    rowstore.py --port PORT [--reconnect-s S] URI...

Clients speak lines over TCP:

    INSERT <client> <n> [<client> <n>]  ->  OK <client> <n>     the row is on stable storage on its disk
    COUNT                               ->  COUNT <rows>
    DUMP                                ->  ROW <client> <n> [<client> <n>] for each row, then END

The second client and n are those of a row, in this store or another, that this one refers to.

What a block on a disk looks like: rowblock.py.

With --reconnect-s, a disk whose server went away is connected again, as QEMU's reconnect-delay does, and the blocks
of the commit under way are written again; what had been flushed is the server's to keep.

Each number of rows is said on the console at most every ROWS_EVERY_S, for the drill's views over time.

Invariant: a reply is sent only after a flush of every disk that has a block of its commit, and a
block is written once. Requests that arrive while a commit is under way form the next one (group commit).
"""

import argparse
import asyncio
import struct
import sys
import time

import nbd
from rowblock import BLOCK, NOTHING, ROW, ROWS_PER_BLOCK, checksum, decode, encode

READ_AHEAD = 1 << 20
ROWS_EVERY_S = 0.005
RETRY_S = 0.1


class Disk:
    """One NBD disk."""

    def __init__(self, uri):
        self.uri = uri
        self.connect()
        self.size = self.handle.get_size()
        self.cache_at, self.cache = 0, b""

    def connect(self):
        """Opens a new connection."""
        self.handle = nbd.NBD()
        self.handle.connect_uri(self.uri)

    def read_block(self, place):
        """A block for recovery, which reads in order."""
        offset = place * BLOCK
        if not self.cache_at <= offset < self.cache_at + len(self.cache):
            self.cache_at = offset
            self.cache = bytes(self.handle.pread(min(READ_AHEAD, self.size - offset), offset))
        at = offset - self.cache_at
        return self.cache[at : at + BLOCK]


class Store:
    """The rows, and the one thread that commits."""

    def __init__(self, disks, reconnect_s):
        self.disks = disks
        self.reconnect_s = reconnect_s
        self.rows = []
        self.sequence = 1
        self.before = 0
        self.blocks_max = min(disk.size for disk in disks) // BLOCK * len(disks)

    def recover(self):
        """Reads blocks until the first that is not there."""
        while self.sequence <= self.blocks_max:
            disk, place = self.place(self.sequence)
            block = self.disks[disk].read_block(place)
            rows = decode(block, self.sequence, self.before)
            if rows is None:
                break
            self.rows += rows
            self.before = checksum(block)
            self.sequence += 1
        for disk in self.disks:
            disk.cache = b""

    def place(self, sequence):
        """Which disk, and which block of it."""
        return (sequence - 1) % len(self.disks), (sequence - 1) // len(self.disks)

    def commit(self, rows):
        """Makes rows durable; runs on a thread of its own."""
        blocks = []
        for at in range(0, len(rows), ROWS_PER_BLOCK):
            if self.sequence > self.blocks_max:
                raise OSError("the disks are full")
            disk, place = self.place(self.sequence)
            block = encode(self.sequence, self.before, rows[at : at + ROWS_PER_BLOCK])
            blocks.append((self.disks[disk], place * BLOCK, block))
            self.before = checksum(block)
            self.sequence += 1
        end = time.monotonic() + self.reconnect_s
        while True:
            try:
                self.write(blocks)
                break
            except nbd.Error:
                if time.monotonic() > end:
                    raise
            self.reconnect(end)
        self.rows += rows

    @staticmethod
    def write(blocks):
        """Writes blocks and flushes their disks."""
        for disk, offset, block in blocks:
            disk.handle.pwrite(block, offset)
        for disk in {id(disk): disk for disk, _, _ in blocks}.values():
            disk.handle.flush()

    def reconnect(self, end):
        """Connects every disk again, which may take until their server is back."""
        for disk in self.disks:
            while True:
                try:
                    disk.connect()
                    break
                except nbd.Error:
                    if time.monotonic() > end:
                        raise
                    time.sleep(RETRY_S)


class DiskError(Exception):
    """What reached a disk is unknown: nothing can be confirmed any more."""


class Server:
    """Connections, and the requests that wait for the next commit."""

    def __init__(self, store):
        self.store = store
        self.waiting = []
        self.arrived = asyncio.Event()

    async def commit_loop(self):
        """Commits what has arrived since the last commit began."""
        loop = asyncio.get_running_loop()
        while True:
            await self.arrived.wait()
            self.arrived.clear()
            batch, self.waiting = self.waiting, []
            try:
                await loop.run_in_executor(None, self.store.commit, [row for row, _ in batch])
            except (OSError, nbd.Error) as error:
                # As PostgreSQL does.
                for _, writer in batch:
                    writer.write(f"ERR {error}\n".encode())
                raise DiskError(error) from error
            for (client, n, *_), writer in batch:
                writer.write(b"OK %d %d\n" % (client, n))

    async def say_rows(self):
        """Says how many rows there are, whenever that has changed."""
        said = -1
        while True:
            if len(self.store.rows) != said:
                said = len(self.store.rows)
                print(f"TIDELOCK-GUEST rows: {said}", flush=True)
            await asyncio.sleep(ROWS_EVERY_S)

    async def serve(self, reader, writer):
        """One connection."""
        try:
            while line := await reader.readline():
                words = line.split()
                if words[:1] == [b"INSERT"] and len(words) in (3, 5):
                    row = (*map(int, words[1:3]), *(map(int, words[3:]) if words[3:] else NOTHING))
                    ROW.pack(*row)  # numbers that do not fit are this client's mistake alone
                    self.waiting.append((row, writer))
                    self.arrived.set()
                elif words == [b"COUNT"]:
                    writer.write(b"COUNT %d\n" % len(self.store.rows))
                elif words == [b"DUMP"]:
                    for row in list(self.store.rows):
                        writer.write(b"ROW " + b" ".join(b"%d" % word for word in row[: 4 if row[2] else 2]) + b"\n")
                        await writer.drain()
                    writer.write(b"END\n")
                else:
                    writer.write(b"ERR unknown request\n")
        except (OSError, ValueError, struct.error):
            pass  # a client that vanished or talks nonsense ends its own connection only
        finally:
            writer.close()


async def main():
    """Recovers, then serves until it is killed."""
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--port", type=int, required=True)
    arguments.add_argument("--reconnect-s", type=float, default=0)
    arguments.add_argument("uris", nargs="+")
    options = arguments.parse_args()
    print("TIDELOCK-GUEST kernel", flush=True)
    store = Store([Disk(uri) for uri in options.uris], options.reconnect_s)
    print("TIDELOCK-GUEST disks", flush=True)
    store.recover()
    print(f"TIDELOCK-GUEST recovered: {len(store.rows)} rows", flush=True)
    server = Server(store)
    commits = asyncio.create_task(server.commit_loop())
    listener = await asyncio.start_server(server.serve, None, options.port)
    print("TIDELOCK-GUEST ready", flush=True)
    rows = asyncio.create_task(server.say_rows())
    async with listener:
        try:
            await asyncio.gather(commits, rows)
        except DiskError as error:
            sys.exit(f"TIDELOCK-GUEST disk-error: {error}")


if __name__ == "__main__":
    asyncio.run(main())
