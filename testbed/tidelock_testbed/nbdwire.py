"""A small NBD client on a bare socket: tests decide byte by byte what a guest sends, and when it vanishes.

Its invariant is the protocol's own: a request has completed when its reply was read, and not before. Source: the
NBD specification, `doc/proto.md`, fixed newstyle with `NBD_OPT_GO` and simple replies.
"""

from __future__ import annotations

import select
import socket
import struct
from pathlib import Path

READ, WRITE, DISC, FLUSH, TRIM, WRITE_ZEROES = 0, 1, 2, 3, 4, 6
FUA = 1
EIO, ENOSPC = 5, 28

_GREETING = b"NBDMAGIC" + b"IHAVEOPT"
_OPTION_REPLY_MAGIC = 0x3E889045565A9
_REQUEST_MAGIC, _REPLY_MAGIC = 0x25609513, 0x67446698
_OPT_GO, _REP_ACK, _REP_INFO, _INFO_EXPORT = 7, 1, 3, 0


class NbdError(OSError):
    """The server answered a request with an error."""


class Connection:
    """One connection to an export, past its negotiation."""

    def __init__(self, path: Path, export: str, timeout_s: float = 60):
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.socket.settimeout(timeout_s)
        try:
            self.socket.connect(str(path))
            self.size_bytes = self._negotiate(export.encode())
        except BaseException:
            self.socket.close()
            raise
        self.next_cookie = 1

    def _negotiate(self, export: bytes) -> int:
        greeting = self.receive(18)
        if greeting[:16] != _GREETING:
            raise ConnectionError(f"not an NBD server: {greeting!r}")
        self.socket.sendall(struct.pack(">I", 3))  # fixed newstyle, no zeroes
        option = struct.pack(">I", len(export)) + export + struct.pack(">H", 0)
        self.socket.sendall(b"IHAVEOPT" + struct.pack(">II", _OPT_GO, len(option)) + option)
        size_bytes = 0
        while True:
            magic, _, kind, length = struct.unpack(">QIII", self.receive(20))
            data = self.receive(length)
            if magic != _OPTION_REPLY_MAGIC or kind & 0x8000_0000:
                raise ConnectionError(f"the export is refused: {kind:#x} {data!r}")
            if kind == _REP_ACK:
                return size_bytes
            if kind == _REP_INFO and struct.unpack(">H", data[:2])[0] == _INFO_EXPORT:
                size_bytes = struct.unpack(">Q", data[2:10])[0]

    def receive(self, count: int) -> bytes:
        """Exactly so many bytes."""
        parts = []
        while count:
            part = self.socket.recv(min(count, 1 << 20))
            if not part:
                raise ConnectionError("the NBD server has closed the connection")
            parts.append(part)
            count -= len(part)
        return b"".join(parts)

    def send(self, command: int, offset: int = 0, length: int = 0, payload: bytes = b"", flags: int = 0) -> int:
        """Sends a request and returns its cookie. `payload` may be shorter than `length`: for a guest that vanishes."""
        cookie, self.next_cookie = self.next_cookie, self.next_cookie + 1
        header = struct.pack(">IHHQQI", _REQUEST_MAGIC, flags, command, cookie, offset, length)
        self.socket.sendall(header + payload)
        return cookie

    def reply(self) -> tuple[int, int]:
        """The next simple reply: its error, or 0, and its cookie. The data of a READ is still to be received."""
        magic, error, cookie = struct.unpack(">IIQ", self.receive(16))
        if magic != _REPLY_MAGIC:
            raise ConnectionError(f"not a simple reply: {magic:#x}")
        return error, cookie

    def has_reply(self) -> bool:
        """Whether one has come that was not received."""
        return bool(select.select([self.socket], [], [], 0)[0])

    def _call(self, *request, **more) -> None:
        cookie = self.send(*request, **more)
        error, answered = self.reply()
        assert answered == cookie, "no other request is under way"
        if error:
            raise NbdError(error, f"the server answers with error {error}")

    def write(self, offset: int, data: bytes, flags: int = 0) -> None:
        """Writes and waits."""
        self._call(WRITE, offset, len(data), data, flags)

    def read(self, offset: int, length: int) -> bytes:
        """Reads and waits."""
        self._call(READ, offset, length)
        return self.receive(length)

    def flush(self) -> None:
        """Makes completed writes durable."""
        self._call(FLUSH)

    def abort(self) -> None:
        """Wakes whoever waits for this connection: nothing is sent or received any more."""
        try:
            self.socket.shutdown(socket.SHUT_RDWR)
        except OSError:  # the server was quicker
            pass

    def close(self) -> None:
        """Ends the connection without a word, as a guest does that is killed."""
        self.socket.close()
