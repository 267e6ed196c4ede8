"""What a disk may hold: a guest's own memory of what it wrote, and the load that it writes.

Invariant: for each block the oracle has every version that the disk may hold, and no other. A version
leaves only when a write that was issued after its completion has completed (so it was overwritten for
certain); a version whose reply never came stays, because it may have arrived or not.

A disk that a recovery brings back may lack the last writes: it is compared with what the oracle knew at an earlier
moment, that of the youngest write of which the disk has something.
"""

from __future__ import annotations

import random
import struct
import threading
from collections.abc import Callable, Set
from dataclasses import dataclass
from pathlib import Path

from .nbdwire import FLUSH, FUA, WRITE, WRITE_ZEROES, Connection

BLOCK = 4096
HOT_BLOCKS = 64
"""Blocks at the beginning that get a third of all writes."""
ZEROES = 0
"""The version of a block that was never written, or zeroed."""


def block_data(version: int, block: int) -> bytes:
    """What a write of this version puts into a block."""
    return struct.pack("<QQ", version, block) * (BLOCK // 16)


@dataclass
class _Write:
    version: int
    blocks: range
    overwrites: dict[int, frozenset[int]]
    """For each block, what had completed before this write was issued."""


class Oracle:
    """The memory of one disk's guest; outlives its connections."""

    def __init__(self, size_bytes: int):
        self.blocks = size_bytes // BLOCK
        self.completed = 0
        self._settled: dict[int, set[int]] = {}
        self._in_doubt: dict[int, set[int]] = {}
        self._version = 0
        self._history: list[tuple[str, _Write | dict[int, int] | None]] = []
        self._base: dict[int, set[int]] = {}
        """What there was before all that; a block that is not named was zeroes."""

    def issue(self, blocks: range, zero: bool) -> _Write:
        """A write is about to be sent."""
        self._version += 1
        # A zeroing gets a number of its own, too: it may be in doubt beside an older one. Its sign tells it apart.
        return self._issue(blocks, -self._version if zero else self._version)

    def _issue(self, blocks: range, version: int) -> _Write:
        overwrites = {block: frozenset(self._settled.get(block, {ZEROES})) for block in blocks}
        for block in blocks:
            self._in_doubt.setdefault(block, set()).add(version)
        write = _Write(version, blocks, overwrites)
        self._history.append(("issue", write))
        return write

    def complete(self, write: _Write) -> None:
        """Its reply has come, without an error."""
        self.completed += 1
        self._history.append(("complete", write))
        for block in write.blocks:
            settled = self._settled.setdefault(block, {ZEROES})
            settled -= write.overwrites[block]
            settled.add(write.version)
            self._in_doubt[block].discard(write.version)

    def server_died(self) -> None:
        """What had no reply has arrived or never will: a later write overwrites it for certain."""
        self._history.append(("died", None))
        for block, versions in self._in_doubt.items():
            self._settled.setdefault(block, {ZEROES}).update(versions)
        self._in_doubt.clear()

    def restored(self, content: bytes) -> None:
        """Somebody has put an older content of the disk in its place."""
        versions = (struct.unpack_from("<Q", content, block * BLOCK)[0] for block in range(self.blocks))
        self._restore(dict(enumerate(versions)))

    def _restore(self, versions: dict[int, int]) -> None:
        self._history.append(("restored", versions))
        self._in_doubt.clear()
        self._settled = {block: {version} for block, version in versions.items()}

    def position(self) -> int:
        """How much was done so far."""
        return len(self._history)

    def may_hold(self, block: int) -> set[int]:
        """Every version that a block may hold now."""
        return self._settled.get(block, {ZEROES}) | self._in_doubt.get(block, set())

    def is_issued_since(self, position: int, block: int) -> bool:
        """Whether a write to a block was issued after a position."""
        later = self._history[position:]
        return any(what == "issue" and block in write.blocks for what, write in later)

    def rebase(self, image: Path) -> None:
        """A recovery has brought back this image: the disk holds what is in it, and nothing is in doubt."""
        self._in_doubt.clear()
        self._history.clear()
        with image.open("rb") as file:
            for block in range(self.blocks):
                # What it holds is a version of the block: whoever rebases has seen to that.
                self._settled[block] = {struct.unpack_from("<Q", file.read(BLOCK))[0]}
        self._base = {block: set(versions) for block, versions in self._settled.items()}

    def violations_of_prefix(self, image: Path, at_least: int = 0) -> list[str]:
        """Blocks of an image that hold what no prefix of what was done leaves there, or none that goes up to a position
        at least.

        A write that had completed before another was issued comes before it. So if the image has something of a write,
        it has everything that had completed when that one was issued.
        """
        visible = set()
        with image.open("rb") as file:
            while data := file.read(BLOCK):
                visible.add(struct.unpack_from("<Q", data)[0])
        issued = {write.version: n for n, (what, write) in enumerate(self._history) if what == "issue"}
        youngest = max((issued[version] for version in visible if version in issued), default=-1)
        end = max(youngest + 1, at_least)
        then = Oracle(self.blocks * BLOCK)
        then._settled = {block: set(versions) for block, versions in self._base.items()}
        writes: dict[int, _Write] = {}
        for what, write in self._history[:end]:
            if what == "issue":
                writes[write.version] = then._issue(write.blocks, write.version)
            elif what == "complete":
                then.complete(writes[write.version])
            elif what == "restored":
                then._restore(write)
            else:
                then.server_died()
        # Zeroes do not say which write they are of: a later one may be there, too.
        later = [write for what, write in self._history[end:] if what == "issue" and write.version < 0]
        return then.violations(image, {block for write in later for block in write.blocks})

    def has_later_than(self, image: Path, position: int) -> bool:
        """Whether an image has something of a write that was issued after a position."""
        later = {write.version for what, write in self._history[position:] if what == "issue"}
        with image.open("rb") as file:
            while data := file.read(BLOCK):
                if struct.unpack_from("<Q", data)[0] in later:
                    return True
        return False

    def violations(self, image: Path, may_be_zero: Set[int] = frozenset()) -> list[str]:
        """Blocks of an image that hold what they cannot hold."""
        found = []
        with image.open("rb") as file:
            for block in range(self.blocks):
                data = file.read(BLOCK)
                versions = self.may_hold(block) | ({ZEROES} if block in may_be_zero else set())
                # Zeroings have a negative version.
                if not any(data == (block_data(v, block) if v > 0 else bytes(BLOCK)) for v in versions):
                    held = struct.unpack("<QQ", data[:16])
                    found.append(f"block {block} holds {held}, may hold {sorted(versions)}")
        return found


class Load:
    """Random writes, zeroings and flushes at a queue depth, on threads of its own, until the connection ends.

    A few blocks are hot, so that writes overlap others in flight: the order of these must be the same at both sites.
    """

    def __init__(self, path: Path, export: str, oracle: Oracle, seed: str, depth: int = 16):
        self.oracle = oracle
        self.errors: list[int] = []
        self.replies = 0
        self._random = random.Random(f"load {seed}")
        self._depth = depth
        self._connection = Connection(path, export, timeout_s=300)
        self._changed = threading.Condition()
        self._in_flight: dict[int, _Write | None] = {}
        self._stopping = self._broken = False
        self._threads = [threading.Thread(target=self._run, args=(what,)) for what in (self._send, self._receive)]
        for thread in self._threads:
            thread.daemon = True
            thread.start()

    def _run(self, what: Callable[[], None]) -> None:
        try:
            what()
        except OSError:  # the server was killed: what has no reply stays in doubt
            with self._changed:
                self._broken = True
                self._changed.notify_all()

    def _send(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._ends or len(self._in_flight) < self._depth)
                if self._ends:
                    return
                request, payload, flags = self._next_request()
            self._connection.send(*request, payload, flags)

    @property
    def _ends(self) -> bool:
        return self._stopping or self._broken

    def _next_request(self) -> tuple[tuple[int, int, int], bytes, int]:
        dice = self._random.random()
        cookie = self._connection.next_cookie
        if dice < 0.03:
            self._in_flight[cookie] = None
            return (FLUSH, 0, 0), b"", 0
        length = self._random.choice([1, 1, 1, 2, 8, 32])
        within = HOT_BLOCKS if self._random.random() < 0.3 else self.oracle.blocks
        first = self._random.randrange(within - length + 1)
        zero = dice < 0.10
        write = self._in_flight[cookie] = self.oracle.issue(range(first, first + length), zero)
        payload = b"" if zero else b"".join(block_data(write.version, block) for block in write.blocks)
        command = WRITE_ZEROES if zero else WRITE
        return (command, first * BLOCK, length * BLOCK), payload, FUA if dice > 0.95 else 0

    def _receive(self) -> None:
        while True:
            error, cookie = self._connection.reply()
            with self._changed:
                write = self._in_flight.pop(cookie)
                if error:
                    self.errors.append(error)
                elif write is not None:
                    self.oracle.complete(write)
                self.replies += 1
                self._changed.notify_all()

    def in_flight(self) -> int:
        """Requests without a reply."""
        with self._changed:
            return len(self._in_flight)

    def deepen(self, depth: int) -> None:
        """From now on at least so many requests are under way."""
        with self._changed:
            self._depth = max(self._depth, depth)
            self._changed.notify_all()

    def alive(self) -> bool:
        """Whether the connection stands."""
        return not self._broken

    def finish(self, timeout_s: float = 60) -> None:
        """Sends nothing more, waits for every reply, and ends."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._broken or not self._in_flight, timeout_s)
            unanswered, broken = len(self._in_flight), self._broken
        self.vanish()
        if unanswered or broken:
            raise ConnectionError(f"{unanswered} requests have no reply; the connection broke: {broken}")

    def vanish(self) -> None:
        """Ends without a word; what has no reply stays in doubt."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        self._connection.abort()
        for thread in self._threads:
            thread.join(10)
        self._connection.close()
