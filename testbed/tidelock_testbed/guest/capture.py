"""Watches what arrives at a guest, inside it, and says on the console if a packet carries an IP option.

    capture.py

Tags are for hosts alone: no guest may ever see one. It looks at every interface but the loopback, at IPv4 options of
any kind and at IPv6 destination options, in packets to this guest alone: hosts that join multicast groups tell
everybody so with an option. The kernel sorts out all other packets, so that watching costs a guest nothing. It needs
the right to capture packets.
"""

import ctypes
import socket
import struct
import time

ETH_P_ALL = 3
SO_ATTACH_FILTER = 26
PACKET_HOST = 0
SHOWN_BYTES = 80
RETRY_S = 1
"""An interface that is down gives no packets: try again."""

# (code, jump if true, jump if false, k), as in linux/filter.h: `tcpdump -d` shows such programs.
LOAD_HALF, LOAD_BYTE, AND, JUMP_EQUAL, JUMP_GREATER, RETURN = 0x28, 0x30, 0x54, 0x15, 0x25, 0x06
WITH_OPTIONS = [
    (LOAD_HALF, 0, 0, 12),
    (JUMP_EQUAL, 0, 3, 0x0800),
    (LOAD_BYTE, 0, 0, 14),
    (AND, 0, 0, 0x0F),
    (JUMP_GREATER, 3, 4, 5),  # more than five words: options
    (JUMP_EQUAL, 0, 3, 0x86DD),
    (LOAD_BYTE, 0, 0, 20),
    (JUMP_EQUAL, 0, 1, 60),  # destination options
    (RETURN, 0, 0, 0xFFFF),
    (RETURN, 0, 0, 0),
]


def forget_earlier(capture):
    """Drops what came before there was a filter: it is of any kind."""
    capture.setblocking(False)
    try:
        while True:
            capture.recv(1)
    except BlockingIOError:
        capture.setblocking(True)


def main():
    """Watches until it is killed."""
    capture = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ETH_P_ALL))
    program = b"".join(struct.pack("HBBI", *instruction) for instruction in WITH_OPTIONS)
    buffer = ctypes.create_string_buffer(program)
    fprog = struct.pack("HL", len(WITH_OPTIONS), ctypes.addressof(buffer))
    capture.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, fprog)
    forget_earlier(capture)
    print("TIDELOCK-GUEST capture", flush=True)
    while True:
        try:
            frame, (interface, _, kind, *_) = capture.recvfrom(65536)
        except OSError:
            time.sleep(RETRY_S)
            continue
        if kind == PACKET_HOST and interface != "lo":
            print(f"TIDELOCK-GUEST option: {frame[14 : 14 + SHOWN_BYTES].hex()}", flush=True)


if __name__ == "__main__":
    main()
