"""The replication protocol by hand, for tests that break it: frames, a hello, and a TLS connection.

Written from `docs/protocol.md` and not from the Rust code, so it also says whether the document is right.
"""

from __future__ import annotations

import socket
import ssl
import struct

from .pki import TlsFiles

CONTROL, RECORD = 1, 2
HELLO, WELCOME, REFUSED, BEACON = 0, 1, 4, 9
"""Numbers of messages, in the order of `protocol/src/message.rs`."""
REFUSED_VERSION, REFUSED_FORBIDDEN, REFUSED_INVALID = 0, 1, 5


def _crc32c_table() -> list[int]:
    table = []
    for byte in range(256):
        for _ in range(8):
            byte = byte >> 1 ^ (0x82F63B78 if byte & 1 else 0)
        table.append(byte)
    return table


_TABLE = _crc32c_table()


def crc32c(data: bytes) -> int:
    """CRC-32C (Castagnoli)."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = crc >> 8 ^ _TABLE[(crc ^ byte) & 0xFF]
    return crc ^ 0xFFFFFFFF


def frame(body: bytes, kind: int = CONTROL, channel: int = 0, version: int = 1, length: int | None = None) -> bytes:
    """A frame with a right checksum; `length` is what it says of its body, if that is to be a lie."""
    head = b"TLK1" + struct.pack("<BBHI", version, kind, channel, len(body) if length is None else length)
    return head + struct.pack("<I", crc32c(head + (body if kind == CONTROL else b""))) + body


def _varint(number: int) -> bytes:
    out = b""
    while number > 0x7F:
        out, number = out + bytes([number & 0x7F | 0x80]), number >> 7
    return out + bytes([number])


def _string(text: str) -> bytes:
    return _varint(len(text.encode())) + text.encode()


def hello(host: str, oldest: int = 1, newest: int = 1) -> bytes:
    """The frame that a host begins with."""
    return frame(_varint(HELLO) + _varint(oldest) + _varint(newest) + _string(host) + _string("test"))


class RawLink:
    """A connection to a backup server."""

    def __init__(self, port: int, tls: TlsFiles | None, timeout_s: float = 30):
        self.socket = socket.create_connection(("127.0.0.1", port), timeout_s)
        if tls:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            context.minimum_version = ssl.TLSVersion.TLSv1_3
            context.load_verify_locations(tls.ca)
            context.load_cert_chain(tls.certificate, tls.key)
            context.set_alpn_protocols(["tidelock/1"])
            self.socket = context.wrap_socket(self.socket, server_hostname="127.0.0.1")

    def send(self, data: bytes) -> None:
        """Sends, also to a peer that has closed."""
        try:
            self.socket.sendall(data)
        except OSError:
            pass

    def message(self) -> tuple[int, bytes]:
        """The next control message: its number and what follows."""
        head = self._receive(16)
        body = self._receive(struct.unpack("<I", head[8:12])[0])
        assert head[:4] == b"TLK1" and struct.unpack("<I", head[12:])[0] == crc32c(head[:12] + body)
        return body[0], body[1:]

    def refusal(self) -> tuple[int, str]:
        """The kind and the reason of the refusal that must come next."""
        number, rest = self.message()
        assert number == REFUSED, f"message {number} in place of a refusal: {rest!r}"
        return rest[0], rest[2 if rest[1] < 0x80 else 3 :].decode()

    def _receive(self, count: int) -> bytes:
        data = b""
        while len(data) < count:
            part = self.socket.recv(count - len(data))
            if not part:
                raise ConnectionError(f"closed after {len(data)} of {count} bytes")
            data += part
        return data

    def wait_closed(self) -> None:
        """Reads until the peer has closed; a TimeoutError if it does not."""
        try:
            while self.socket.recv(65536):
                pass
        except TimeoutError:
            raise
        except OSError:  # reset: closed as well
            pass

    def close(self) -> None:
        """Ends it without a word."""
        self.socket.close()
