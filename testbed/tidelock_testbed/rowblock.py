"""A block of the row store, as it stands on a disk. The row store writes it; a drill finds it in the backup's journal.

Bytes on disk: commits of one or more 512-byte blocks, each block

    magic u32 | rows in it u32 | sequence u64 | CRC of the block before u32 |
    (client u32, n u64, of the row referred to: client u32, n u64) * 20 | zeros | CRC-32 of all before u32

Clients and their rows are numbered from 1; zeros refer to no row. Sequence numbers start at 1 and have no gap;
block k stands at place k // disks of disk k % disks. So recovery reads blocks in order until the first that is not
what it must be, and a write that is missing on one disk while a later one is present on another shows as rows that
are lost. Each block names the one before it by its checksum, so a block of an earlier life, beyond where recovery
ended then, is never taken for a later one's.

It imports nothing of this package: the row store runs without it.
"""

import struct
import zlib

MAGIC = 0x54444C52
BLOCK = 512
HEAD = struct.Struct("<IIQI")
ROW = struct.Struct("<IQIQ")
TAIL = struct.Struct("<I")
NOTHING = (0, 0)
ROWS_PER_BLOCK = (BLOCK - HEAD.size - TAIL.size) // ROW.size


def encode(sequence, before, rows):
    """One block; `before` is the checksum of the one before it."""
    body = HEAD.pack(MAGIC, len(rows), sequence, before) + b"".join(ROW.pack(*row) for row in rows)
    body = body.ljust(BLOCK - TAIL.size, b"\0")
    return body + TAIL.pack(zlib.crc32(body))


def checksum(block):
    """The checksum that a block carries."""
    return TAIL.unpack_from(block, BLOCK - TAIL.size)[0]


def place_of(block):
    """The sequence number of a block and the checksum of the one before it, or None if it is no block."""
    magic, _, sequence, before = HEAD.unpack_from(block)
    if magic != MAGIC or checksum(block) != zlib.crc32(block[: -TAIL.size]):
        return None
    return sequence, before


def decode(block, sequence, before):
    """The rows of a block, or None if it is not the block with this sequence number after that block."""
    if place_of(block) != (sequence, before):
        return None
    count = HEAD.unpack_from(block)[1]
    return [ROW.unpack_from(block, HEAD.size + i * ROW.size) for i in range(count)]
