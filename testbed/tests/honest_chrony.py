"""A stand-in for `chronyd` that reports, as long as it runs, by how much a `FaultShim` has put a host's clock wrong.

    honest_chrony.py ADDRESS PORT FILE

`FILE` is the shim's. The report `tracking` is that of chrony's command protocol, version 6.
"""

from __future__ import annotations

import math
import socket
import struct
import sys
from pathlib import Path

REPLY = struct.Struct(">BBHHHH6xI8xI20xHH12xI20xII4x")
CLOCK = struct.Struct("=q")
DISPERSION_S = 50e-6


def number(value: float) -> int:
    """A number in chrony's own form: an exponent of 7 bits, a coefficient of 25."""
    if value == 0:
        return 0
    coefficient, exponent = math.frexp(value)
    return (exponent + 1 & 0x7F) << 25 | int(coefficient * (1 << 24)) & 0x1FFFFFF


def report(sequence: int, ahead_s: float) -> bytes:
    """The report of a clock that is so far ahead of its reference."""
    values = (number(-ahead_s), number(0), number(DISPERSION_S))
    return REPLY.pack(6, 2, 0, 33, 5, 0, sequence, 0x0A000001, 2, 0, *values)


def main() -> None:
    """Answers until it is killed."""
    address, port, file = sys.argv[1:]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as server:
        server.bind((address, int(port)))
        print("ready", flush=True)
        while True:
            request, sender = server.recvfrom(512)
            (ahead_ns,) = CLOCK.unpack_from(Path(file).read_bytes())
            server.sendto(report(int.from_bytes(request[8:12], "big"), ahead_ns / 1e9), sender)


if __name__ == "__main__":
    main()
