"""Reading of what `rustc -C instrument-coverage` leaves in programs, in libraries, and as a running program's profile.

LLVM's own tools read no newer formats than their own, and Debian's are older than any Rust that builds this project. Of
the formats (LLVM's "Code Coverage Mapping Format" and "Instrumentation Profile Format") only this is read: the place of
each function, and whether one of its counters moved. A format of another version ends the run.
"""

from __future__ import annotations

import hashlib
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

MAPPINGS = (5, 6)
"""Versions of the mapping, as its header counts them (LLVM's Version6 and Version7)."""
PROFILE = 10
"""The version of the profile: LLVM 19 and later."""
PROFILE_MAGIC = 0xFF6C70726F667281
ELF, ARCHIVE = b"\x7fELF", b"!<arch>\n"
CODE, BRANCH, DECISION, CONDITION = 0, 4, 5, 6
"""Kinds of regions, of those that have no counter."""


class Unreadable(Exception):
    """A format of another version, or none."""


@dataclass(frozen=True)
class Function:
    """One function, closure or body of an async function, as often as the compiler made it."""

    key: tuple[int, int]
    """Hashes of its name and of its shape: by these the profile names it."""
    file: Path
    start: tuple[int, int]
    """Line and column of its signature; of a closure: of its body."""
    last: int
    """The last line with code; of an async function: of its signature."""


def functions_of(binary: Path) -> Iterator[Function]:
    """All functions that a program or a library (.rlib) has, also those that nothing in it calls."""
    content = binary.read_bytes()
    for part in [content] if content.startswith(ELF) else _members(content, binary):
        files: dict[bytes, list[str]] = {}
        records = []
        for name, section in _sections(part):
            if name == "__llvm_covmap":
                files |= _files_of(section, binary)
            elif name.startswith("__llvm_covfun"):
                records.append(section)
        for section in records:
            at = 0
            while at + 28 <= len(section):
                name_hash, size, shape, names = struct.unpack_from("<QIQ8s", section, at)
                yield from _function(section[at + 28 : at + 28 + size], (name_hash, shape), files[names])
                at = _aligned(at + 28 + size)


def ran(profile: Path) -> set[tuple[int, int]]:
    """The keys of the functions that a run entered."""
    content = profile.read_bytes()
    magic, version, ids, count, before, *_ = header = struct.unpack_from("<16Q", content)
    if magic != PROFILE_MAGIC or version & 0xFFFFFFFF != PROFILE:
        raise Unreadable(f"{profile}: no raw profile of version {PROFILE} (magic {magic:#x}, version {version:#x})")
    first = struct.calcsize("<16Q") + ids
    size = 64
    counters, distance = first + size * count + before, header[10]
    keys = set()
    for i in range(count):
        name_hash, shape, place, number = struct.unpack_from("<QQQ24xI", content, first + size * i)
        # A place is counted from the record that has it.
        offset = (place + size * i - distance) % 2**64
        if any(struct.unpack_from(f"<{number}Q", content, counters + offset)):
            keys.add((name_hash, shape))
    return keys


def _function(mapping: bytes, key: tuple[int, int], files: list[str]) -> Iterator[Function]:
    numbers = _Numbers(mapping)
    in_file = [numbers.next() for _ in range(numbers.next())]
    for _ in range(2 * numbers.next()):
        numbers.next()
    for file in in_file:
        line, code = 0, []
        for _ in range(numbers.next()):
            # The two lowest bits: a counter or a sum of counters, of code. Else the kind is in the higher ones.
            what = numbers.next()
            kind = CODE if what & 3 else what >> 3
            for _ in range({BRANCH: 2, DECISION: 2, CONDITION: 5}.get(kind, 0)):
                numbers.next()
            line += numbers.next()
            column, lines, end = numbers.next(), numbers.next(), numbers.next()
            if kind == CODE and not end >> 31:
                code.append(((line, column), line + lines))
        if code:
            start = min(begin for begin, _ in code)
            yield Function(key, Path(files[0], files[file]), start, max(last for _, last in code))


def _files_of(section: bytes, binary: Path) -> Iterator[tuple[bytes, list[str]]]:
    """The names of source files by the hash with which functions name their list; the first is the directory."""
    at = 0
    while at + 16 <= len(section):
        _, size, _, version = struct.unpack_from("<4I", section, at)
        if version not in MAPPINGS:
            raise Unreadable(f"{binary}: a coverage mapping of version {version}; known are {MAPPINGS}")
        encoded = section[at + 16 : at + 16 + size]
        yield hashlib.md5(encoded, usedforsecurity=False).digest()[:8], _names(encoded)
        at = _aligned(at + 16 + size)


def _names(encoded: bytes) -> list[str]:
    numbers = _Numbers(encoded)
    count, plain, packed = numbers.next(), numbers.next(), numbers.next()
    content = numbers.take(packed or plain)
    numbers = _Numbers(zlib.decompress(content) if packed else content)
    return [numbers.take(numbers.next()).decode() for _ in range(count)]


def _aligned(at: int) -> int:
    return (at + 7) & ~7


class _Numbers:
    """LEB128."""

    def __init__(self, content: bytes) -> None:
        self.content, self.at = content, 0

    def next(self) -> int:
        number = shift = 0
        while True:
            byte = self.content[self.at]
            self.at += 1
            number |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return number

    def take(self, size: int) -> bytes:
        self.at += size
        return self.content[self.at - size : self.at]


def _members(content: bytes, binary: Path) -> Iterator[bytes]:
    """The object files of an archive."""
    if not content.startswith(ARCHIVE):
        raise Unreadable(f"{binary}: neither a program nor a library")
    at = len(ARCHIVE)
    while at < len(content):
        size = int(content[at + 48 : at + 58])
        member = content[at + 60 : at + 60 + size]
        if member.startswith(ELF):
            yield member
        at += 60 + size + size % 2


def _sections(elf: bytes) -> Iterator[tuple[str, bytes]]:
    """Name and content of an ELF file's sections, 64 bits."""

    def header(i: int) -> tuple[int, int, int, int]:
        """Name, offset, size, link."""
        return struct.unpack_from("<I20xQQI", elf, table + each * i)

    (table,) = struct.unpack_from("<Q", elf, 40)
    each, count, names = struct.unpack_from("<HHH", elf, 58)
    # More than fit into 16 bits: the numbers are in section 0.
    count, names = count or header(0)[2], header(0)[3] if names == 0xFFFF else names
    _, names_at, *_ = header(names)
    for i in range(count):
        name, offset, size, _ = header(i)
        begin = names_at + name
        yield elf[begin : elf.index(b"\0", begin)].decode(), elf[offset : offset + size]
