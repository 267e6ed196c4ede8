"""Drives the test server with libnbd: rules that well-behaved tools never touch.

Argument: a URI with an empty export name.
"""

import errno
import sys

import nbd

BASE = sys.argv[1]
CHUNK = 64 << 10
MIB = 1 << 20


def handle(structured=True):
    h = nbd.NBD()
    # Send what we are told to, even if the server did not offer it.
    h.set_strict_mode(0)
    h.set_request_structured_replies(structured)
    h.add_meta_context("base:allocation")
    return h


def connect(export, structured=True):
    h = handle(structured)
    h.connect_uri(BASE.replace("/?", "/" + export + "?"))
    assert h.get_structured_replies_negotiated() == structured
    return h


def refused(expected, call, *arguments, **keywords):
    try:
        call(*arguments, **keywords)
    except nbd.Error as error:
        assert error.errnum == expected, (errno.errorcode[expected], str(error))
        return str(error)
    raise AssertionError(f"expected {errno.errorcode[expected]}")


def extents(h, count, offset, flags=0):
    found = []

    def collect(context, start, entries, error):
        assert (context, start) == ("base:allocation", offset)
        found.extend(zip(entries[::2], entries[1::2]))

    h.block_status(count, offset, collect, flags)
    return found


def commands(structured):
    h = connect("disk", structured)
    size = h.get_size()
    assert size == 16 * MIB
    h.trim(size, 0)

    # Data, at odd places and in both kinds of chunk.
    data = bytes(range(256)) * 1000
    h.pwrite(data, 12345)
    assert h.pread(len(data), 12345) == data
    assert h.pread(4 * CHUNK, CHUNK)[: 12345 + len(data) - CHUNK] == data[CHUNK - 12345:]
    assert h.pread(1, size - 1) == b"\0"
    h.pwrite(b"x", size - 1, nbd.CMD_FLAG_FUA)
    assert h.pread(1, size - 1) == b"x"

    # Past the end: each command's own error. The stream stays in step.
    refused(errno.ENOSPC, h.pwrite, b"xy", size - 1)
    refused(errno.EINVAL, h.pread, 2, size - 1)
    refused(errno.ENOSPC, h.zero, 2, size - 1)
    refused(errno.EINVAL, h.trim, 2, size - 1)
    refused(errno.EINVAL, h.cache, 2, size - 1)
    refused(errno.EINVAL, h.pread, 512, (1 << 63) - 512)
    assert h.pread(1, size - 1) == b"x"

    # Lengths: 0, the greatest, and beyond.
    assert h.pread(0, 0) == b""
    h.pwrite(b"", 0)
    h.zero(0, 0)
    h.trim(0, 0)
    refused(errno.EINVAL, h.pwrite, bytes(33 * MIB), 0)
    refused(errno.EINVAL, h.pread, 33 * MIB, 0)
    assert h.pread(1, size - 1) == b"x"

    # Flags that a command does not know.
    refused(errno.EINVAL, h.pwrite, b"x", 0, nbd.CMD_FLAG_NO_HOLE)
    refused(errno.EINVAL, h.pread, 1, 0, 0x8000)
    refused(errno.EINVAL, h.trim, 1, 0, nbd.CMD_FLAG_FAST_ZERO)

    # Zeroes.
    h.zero(2 * CHUNK, 0, nbd.CMD_FLAG_FAST_ZERO)
    assert h.pread(2 * CHUNK, 0) == bytes(2 * CHUNK)
    refused(errno.ENOTSUP, h.zero, 100, 50, nbd.CMD_FLAG_FAST_ZERO)
    refused(errno.ENOTSUP, h.zero, CHUNK, 0, nbd.CMD_FLAG_FAST_ZERO | nbd.CMD_FLAG_NO_HOLE)
    h.zero(CHUNK, 0, nbd.CMD_FLAG_NO_HOLE | nbd.CMD_FLAG_FUA)
    h.cache(MIB, 0)
    h.flush()

    if structured:
        hole = nbd.STATE_HOLE | nbd.STATE_ZERO
        assert extents(h, 2 * CHUNK, 0) == [(CHUNK, 0), (CHUNK, hole)]
        assert extents(h, 2 * CHUNK, 100, nbd.CMD_FLAG_REQ_ONE) == [(CHUNK - 100, 0)]
        # Chunk 4 and the last one were written above.
        expected = [(CHUNK, 0), (size - 6 * CHUNK, hole), (CHUNK, 0)]
        assert extents(h, size - 4 * CHUNK, 4 * CHUNK) == expected
        refused(errno.EINVAL, h.block_status, 2, size - 1, lambda *ignored: 0)
        refused(errno.EINVAL, h.block_status, 0, 0, lambda *ignored: 0)

        chunks = []
        note = lambda data, offset, status, error: chunks.append((offset, len(data), status))
        h.pread_structured(2 * CHUNK, 0, note)
        assert chunks == [(CHUNK, CHUNK, nbd.READ_HOLE), (0, CHUNK, nbd.READ_DATA)], chunks
        chunks.clear()
        h.pread_structured(2 * CHUNK, 0, note, nbd.CMD_FLAG_DF)
        assert chunks == [(0, 2 * CHUNK, nbd.READ_DATA)]
    else:
        refused(errno.EINVAL, h.pread, 1, 0, nbd.CMD_FLAG_DF)

    h.shutdown()


def other_exports(structured):
    h = connect("ro", structured)
    refused(errno.EPERM, h.pwrite, bytes(512), 0)
    refused(errno.EPERM, h.trim, 512, 0)
    refused(errno.EPERM, h.zero, 512, 0)
    refused(errno.EINVAL, h.pread, 512, 1)
    refused(errno.EINVAL, h.pread, 513, 0)
    refused(errno.EINVAL, h.cache, 512, 0)
    refused(errno.EINVAL, h.pread, 512, 0, nbd.CMD_FLAG_FUA)
    assert h.pread(512, 512) == bytes(512)
    h.flush()
    h.shutdown()

    h = connect("bad", structured)
    refused(errno.EIO, h.pread, 3 * CHUNK, 0)
    assert h.pread(2 * CHUNK, 0) == bytes(2 * CHUNK)
    h.shutdown()

    h = connect("sectors", structured)
    refused(errno.EINVAL, h.pwrite, bytes(4096), 512)
    refused(errno.EINVAL, h.pwrite, bytes(MIB + 4096), 0)
    h.pwrite(b"s" * MIB, 0)
    assert h.pread(4096, MIB - 4096) == b"s" * 4096
    h.shutdown()


def negotiation():
    h = handle()
    h.set_opt_mode(True)
    h.connect_uri(BASE)
    names = []
    assert h.opt_list(lambda name, description: names.append((name, description))) == 5
    assert names[0] == ("disk", "first")
    # The empty name means nothing where there are several exports.
    refused(errno.ENOENT, h.opt_info)
    h.set_export_name("nothing")
    refused(errno.ENOENT, h.opt_go)
    h.set_export_name("odd")
    contexts = []
    h.clear_meta_contexts()
    assert h.opt_list_meta_context(contexts.append) == 1
    assert contexts == ["base:allocation"]
    h.add_meta_context("base:allocation")
    h.opt_info()
    assert h.get_size() == 1000001
    h.opt_go()
    assert h.can_meta_context("base:allocation")
    h.pwrite(b"end", 1000001 - 3)
    assert h.pread(3, 1000001 - 3) == b"end"
    h.shutdown()

    h = handle()
    h.set_opt_mode(True)
    h.connect_uri(BASE)
    h.opt_abort()

    # A client that insists on TLS is refused, one that would like it goes on without.
    h = handle()
    h.set_tls(nbd.TLS_ALLOW)
    h.connect_uri(BASE.replace("/?", "/disk?"))
    assert not h.get_tls_negotiated()
    h.shutdown()


def many_in_flight():
    first, second = connect("disk"), connect("disk")
    buffers = {}
    for index in range(64):
        data = nbd.Buffer.from_bytearray(bytearray([index]) * 5000)
        buffers[first.aio_pwrite(data, index * 5000)] = data
    while first.aio_in_flight():
        first.poll(-1)
        cookie = first.aio_peek_command_completed()
        if cookie:
            assert first.aio_command_completed(cookie)
            del buffers[cookie]
    while buffers:
        cookie = first.aio_peek_command_completed()
        assert first.aio_command_completed(cookie)
        del buffers[cookie]
    for index in range(64):
        assert second.pread(5000, index * 5000) == bytes([index]) * 5000
    second.flush()
    first.shutdown()
    second.shutdown()


negotiation()
for mode in (True, False):
    commands(mode)
    other_exports(mode)
many_in_flight()
print("all done")
