"""PostgreSQL's write-ahead log, followed write by write: which record of the backup's journal completes which commit.

What follows a crash is what counts: a commit is there as soon as its record and all records before it are whole on the
disks. So the files of the log are kept as the journal's records have written them so far, and after each of them the
log is read on for as long as PostgreSQL's own recovery would read: the page's address is the one looked for, the record
names the one before it, and its checksum is right.

    page, 8 KiB     magic u16 | flags u16 | timeline u32 | address u64 | bytes of a record begun earlier u32 | zeros
    record          length u32 | transaction u32 | record before u64 | kind u8 | manager u8 | zeros | CRC-32C u32 | data

A page is rewritten when there is more in it, a record goes on behind the next pages' heads, and a file that is used
again has pages with old addresses until they are written: all of them follow from reading as recovery does.

The file system says where the files are on a disk (`debugfs`). A block that it allocated to a file during the run
belongs to the file only when the file system has committed the allocation: what was written to such a block counts from
the next commit in the file system's own journal on.
"""

from __future__ import annotations

import bisect
import itertools
import re
import struct
import subprocess
import tempfile
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

PAGE = 8192
FILE_BYTES = 16 << 20
MAGIC = 0xD110
"""Of PostgreSQL 15."""
CONTINUES, LONG_HEAD, CONTINUATION_OVERWRITTEN = 1, 2, 8
"""Flags of a page."""
PAGE_HEAD = struct.Struct("<HHIQI4x")
LONG_HEAD_BYTES = PAGE_HEAD.size + 16
RECORD_HEAD = struct.Struct("<IIQBBxxI")
RECORD_MAX = 64 << 20
XLOG, XACT = 0, 1
"""Managers of records."""
SWITCH, COMMIT, COMMIT_PREPARED = 0x40, 0x00, 0x30
FS_COMMIT = struct.pack(">II", 0xC03B3998, 2)
"""How the block begins with which ext4 commits a transaction."""
FS_BLOCK_MIN = 1024
LEAF = re.compile(r"(\d+) *- *\d+ +(\d+) *- *\d+ +(\d+)")
"""An extent as `debugfs` prints it: first block in the file, first block on the disk, blocks."""
LOG_DIRECTORIES = ("/pg/pg_wal", "/pg_wal")
"""On a disk with all of PGDATA, and on one with the log alone."""


class Write(NamedTuple):
    """A record of the journal: its change of one disk of its writer."""

    seq: int
    disk: int
    offset: int
    data: bytes
    copied: bool = False
    """It is a copy of what the disk held, and no write of the guest."""


@dataclass(frozen=True)
class Extent:
    """A part of a file, and where it is."""

    disk: int
    offset: int
    file: str
    at: int
    """In the file."""
    length: int
    is_new: bool = False
    """It was allocated during the run."""


class Log:
    """The log as the writes so far have left it."""

    def __init__(self, extents: Iterable[Extent]):
        self._extents = sorted(extents, key=lambda one: (one.disk, one.offset))
        self._begins = [(one.disk, one.offset) for one in self._extents]
        self._files = {one.file: bytearray(FILE_BYTES) for one in self._extents}
        self._uncommitted: dict[int, list[tuple[str, int, bytes, bool]]] = defaultdict(list)
        """By disk, what was written to new blocks whose allocation the file system has not committed yet."""
        self._committed: set[tuple[str, int]] = set()
        """New blocks whose allocation it has committed."""
        self._pages: dict[int, tuple[str, int]] = {}
        """Where the page of an address is."""
        self._next: int | None = None
        """The address of the record to be read next."""
        self._before: int | None = None
        """The address of the one before it, if it must name that."""

    def write(self, write: Write) -> list[int]:
        """Takes a write; returns the transactions whose commits it has completed."""
        end = write.offset + len(write.data)
        place = max(0, bisect.bisect_right(self._begins, (write.disk, write.offset)) - 1)
        changed = False
        for extent in self._extents[place:]:
            if (extent.disk, extent.offset) >= (write.disk, end):
                break
            first, last = max(extent.offset, write.offset), min(extent.offset + extent.length, end)
            if extent.disk == write.disk and first < last:
                data = write.data[first - write.offset : last - write.offset]
                self._take(extent, extent.at + first - extent.offset, data, write.copied)
                changed = True
        if self._uncommitted[write.disk] and has_fs_commit(write.data):
            for file, at, data, copied in self._uncommitted.pop(write.disk):
                self._put(file, at, data, copied)
                self._committed.add((file, at))
            changed = True
        return self._read_on() if changed else []

    def _take(self, extent: Extent, at: int, data: bytes, copied: bool) -> None:
        if not extent.is_new:
            self._put(extent.file, at, data, copied)
            return
        for begin in range(0, len(data), FS_BLOCK_MIN):
            block = (extent.file, at + begin, data[begin : begin + FS_BLOCK_MIN], copied)
            if block[:2] in self._committed:
                self._put(*block)
            else:
                self._uncommitted[extent.disk].append(block)

    def _put(self, file: str, at: int, data: bytes, copied: bool) -> None:
        content = self._files[file]
        content[at : at + len(data)] = data
        for page in range(at - at % PAGE, at + len(data), PAGE):
            magic, flags, _, address, _ = PAGE_HEAD.unpack_from(content, page)
            if magic != MAGIC or address % FILE_BYTES != page or bool(flags & LONG_HEAD) != (page == 0):
                continue
            self._pages[address] = (file, page)
            if self._next is None and not copied:
                # The guest writes at the log's end from its start on: whatever is before that was there.
                self._next = address

    def _page(self, address: int) -> bytearray | None:
        file, at = self._pages.get(address, ("", 0))
        page = self._files[file][at : at + PAGE] if file else None
        # Another one may have been written there since.
        return page if page and PAGE_HEAD.unpack_from(page)[3] == address else None

    def _read_on(self) -> list[int]:
        committed = []
        while self._next is not None and self._before_a_record() and (record := self._record()) is not None:
            _, transaction, _, kind, manager, _ = RECORD_HEAD.unpack_from(record)
            if manager == XACT and kind & 0x70 in (COMMIT, COMMIT_PREPARED):
                committed.append(transaction)
            if manager == XLOG and kind & 0xF0 == SWITCH:
                self._next += -self._next % FILE_BYTES
        return committed

    def _before_a_record(self) -> bool:
        """Steps over the head of a page, and over what is the rest of an earlier record."""
        while self._next % PAGE == 0:
            page = self._page(self._next)
            if page is None:
                return False
            _, flags, _, _, rest = PAGE_HEAD.unpack_from(page)
            head = head_bytes(flags)
            rest = rest if flags & CONTINUES else 0
            self._next += min(PAGE, head + aligned(rest))
        return True

    def _record(self) -> bytearray | None:
        """The next record, if all of it is there; then the one after it is next."""
        length_at = self._page(self._next - self._next % PAGE)
        if length_at is None:
            return None
        (length,) = struct.unpack_from("<I", length_at, self._next % PAGE)
        if not RECORD_HEAD.size <= length <= RECORD_MAX:
            return None
        record, at = bytearray(), self._next
        while len(record) < length:
            page = self._page(at - at % PAGE)
            if page is None:
                return None
            if at % PAGE == 0:
                _, flags, _, _, rest = PAGE_HEAD.unpack_from(page)
                if flags & CONTINUATION_OVERWRITTEN:
                    # After a crash PostgreSQL has given the record up that began before this page.
                    self._next, self._before = at + head_bytes(flags), None
                    return self._record()
                if not flags & CONTINUES or rest != length - len(record):
                    return None
                at += head_bytes(flags)
            part = page[at % PAGE : at % PAGE + length - len(record)]
            record += part
            at += len(part)
        *_, before, _, _, checksum = RECORD_HEAD.unpack_from(record)
        if self._before not in (None, before) or record_checksum(record) != checksum:
            return None
        self._before, self._next = self._next, aligned(at)
        return record


def has_fs_commit(data: bytes) -> bool:
    """Whether a write has a block with which ext4 commits a transaction."""
    return any(data[at : at + len(FS_COMMIT)] == FS_COMMIT for at in range(0, len(data), FS_BLOCK_MIN))


def head_bytes(flags: int) -> int:
    """Of a page."""
    return LONG_HEAD_BYTES if flags & LONG_HEAD else PAGE_HEAD.size


def aligned(at: int) -> int:
    """Where the next record begins at the earliest."""
    return at + -at % 8


def record_checksum(record: bytes) -> int:
    """Of the data first, then of the head up to the checksum itself."""
    crc = 0xFFFFFFFF
    for byte in memoryview(record)[RECORD_HEAD.size :]:
        crc = _CRC32C[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    for byte in memoryview(record)[: RECORD_HEAD.size - 4]:
        crc = _CRC32C[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    return crc ^ 0xFFFFFFFF


def _crc32c_of(byte: int) -> int:
    for _ in range(8):
        byte = (byte >> 1) ^ (0x82F63B78 if byte & 1 else 0)
    return byte


_CRC32C = [_crc32c_of(byte) for byte in range(256)]


def commits(writes: list[Write], work: Path) -> dict[int, int]:
    """The seq with which each transaction's commit was whole. `work` is a directory for images of the disks."""
    log, found = Log(log_extents(writes, work)), {}
    for write in writes:
        for transaction in log.write(write):
            found.setdefault(transaction, write.seq)
    return found


def log_extents(writes: list[Write], work: Path) -> list[Extent]:
    """Where the files of the log are after these writes, as the file systems on the disks say."""
    extents = []
    for disk in sorted({write.disk for write in writes}):
        here = [write for write in writes if write.disk == disk]
        # What the guest found: the copies alone.
        before = {place for one in _extents([write for write in here if write.copied], work) for place in _blocks(one)}
        extents += [part for extent in _extents(here, work) for part in _split(extent, disk, before)]
    return extents


def _split(extent: Extent, disk: int, before: set[tuple[int, int]]) -> list[Extent]:
    """The parts of an extent that the file had before, and those that are new."""
    parts = []
    for is_new, run in itertools.groupby(_blocks(extent), lambda place: place not in before):
        blocks = list(run)
        at, offset = blocks[0]
        length = blocks[-1][0] + FS_BLOCK_MIN - at
        parts.append(Extent(disk, offset, f"{disk}{extent.file}", at, length, is_new))
    return parts


def _blocks(extent: Extent) -> list[tuple[int, int]]:
    """The place of each block of an extent in the file and on the disk."""
    return [(extent.at + n, extent.offset + n) for n in range(0, extent.length, FS_BLOCK_MIN)]


def _extents(writes: list[Write], work: Path) -> list[Extent]:
    """Where the files of the log are on the disk that these writes make."""
    with tempfile.NamedTemporaryFile(dir=work, suffix=".img") as image:
        for write in writes:
            image.seek(write.offset)
            image.write(write.data)
        image.flush()
        # What the file system's own journal holds is part of it. The exit status says that it was replayed.
        subprocess.run(["e2fsck", "-fy", "-E", "journal_only", image.name], capture_output=True)
        found = re.search(r"Block size:\s+(\d+)", _debugfs(image.name, "stats -h"))
        if found is None:
            return []
        names = [
            f"{directory}/{name}"
            for directory in LOG_DIRECTORIES
            for name in re.findall(r"/([0-9A-F]{24})/", _debugfs(image.name, f"ls -p {directory}"))
        ]
        leaves = [
            (name, *(int(number) * int(found[1]) for number in leaf))
            for name in names
            for leaf in re.findall(LEAF, _debugfs(image.name, f"dump_extents -l {name}"))
        ]
        return [Extent(0, where, name, at, length) for name, at, where, length in leaves]


def _debugfs(image: str, request: str) -> str:
    done = subprocess.run(["debugfs", "-R", request, image], capture_output=True, text=True, check=True)
    return done.stdout
