"""What a reply's time is made of: the same packets, seen at four places.

    clients ── [client] ── [guest] ── guest             the request and its reply
    host ── [host] ══ WAN ══ [backup] ── backup server   records and acknowledgements

Looked at backwards from the moment when a reply leaves for its client: the acknowledgement that came last before it,
the record that the backup had received last before that one left.
"""

from __future__ import annotations

import socket
import struct
from bisect import bisect_right
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from ..netns import Netns
from ..process import Process, wait_until
from ..run import Run

PLACES = ("client", "guest", "host", "backup")
PHASES = {
    "request_us": "the request's way to the guest",
    "record_us": "the guest writes its commit; tap, sequencer, sender: until the record is on the WAN",
    "there_us": "the emulated WAN there, beyond half of the RTT",
    "backup_us": "the backup: receives, appends, fdatasync, acknowledges",
    "back_us": "the emulated WAN back, beyond half of the RTT",
    "release_us": "the host: reads the acknowledgement, C rises, the gate releases, the packet leaves",
}
"""What follows one another between the request and the reply."""

_NANOSECOND_PCAP = 0xA1B23C4D
_ETHERNET_BYTES = 14


@dataclass(frozen=True)
class Segment:
    """A TCP segment with a payload, as one place saw it."""

    at_ns: int
    source_port: int
    destination_port: int
    seq: int


class Captures:
    """`tcpdump` at each of the places, until `read`."""

    def __init__(self, run: Run, name: str, places: dict[str, tuple[Netns, str]]):
        self._files = {place: run.directory / f"{name}-{place}.pcap" for place in places}
        self._dumps = []
        for place, (netns, interface) in places.items():
            argv = ["tcpdump", "-i", interface, "-n", "-s", "128", "--time-stamp-precision=nano"]
            argv += ["-w", self._files[place], "tcp"]
            self._dumps.append(Process(run, f"{name}-{place}", argv, netns))
        for dump in self._dumps:
            wait_until("tcpdump listens", lambda d=dump: "listening on" in d.log.read_text(), 10, [dump])

    def read(self) -> dict[str, list[Segment]]:
        """Ends them; what each place saw."""
        for dump in self._dumps:
            dump.stop()
        return {place: read_pcap(path) for place, path in self._files.items()}


def read_pcap(path: Path) -> list[Segment]:
    """The segments with a payload; what is not TCP over IPv4 is left out."""
    data = path.read_bytes()
    (magic,) = struct.unpack_from("<I", data)
    if magic != _NANOSECOND_PCAP:
        raise ValueError(f"{path} is not a capture in nanoseconds of this machine's byte order: {magic:#x}")
    segments, at = [], 24
    while at + 16 <= len(data):
        seconds, nanos, kept, _ = struct.unpack_from("<IIII", data, at)
        segment = _segment(seconds * 10**9 + nanos, data[at + 16 : at + 16 + kept])
        if segment is not None:
            segments.append(segment)
        at += 16 + kept
    return segments


def _segment(at_ns: int, frame: bytes) -> Segment | None:
    ip = frame[_ETHERNET_BYTES:]
    if len(ip) < 20 or frame[12:14] != b"\x08\x00" or ip[9] != socket.IPPROTO_TCP:
        return None
    header = (ip[0] & 15) * 4
    (total,) = struct.unpack_from("!H", ip, 2)
    source, destination, seq = struct.unpack_from("!HHI", ip, header)
    payload = total - header - (ip[header + 12] >> 4) * 4
    return Segment(at_ns, source, destination, seq) if payload > 0 else None


class _Flow:
    """Segments from or to a port at one place."""

    def __init__(self, segments: list[Segment], source_port: int = 0, destination_port: int = 0):
        wanted = (
            [one for one in segments if one.source_port == source_port]
            if source_port
            else [one for one in segments if one.destination_port == destination_port]
        )
        self.segments = sorted(wanted, key=lambda one: one.at_ns)
        self._times = [one.at_ns for one in self.segments]
        self._first: dict[int, int] = {}
        for one in self.segments:
            self._first.setdefault(one.seq, one.at_ns)

    def last_before(self, at_ns: int) -> Segment | None:
        """The last one until then."""
        place = bisect_right(self._times, at_ns)
        return self.segments[place - 1] if place else None

    def at(self, segment: Segment | None) -> int | None:
        """When this place saw the same segment."""
        return self._first.get(segment.seq) if segment else None


def phases(seen: dict[str, list[Segment]], database_port: int, backup_port: int, one_way_ms: float) -> list[dict]:
    """For each reply, the microseconds of each phase. Replies whose packets were not all seen are left out."""
    asked = {place: _Flow(seen[place], destination_port=database_port) for place in ("client", "guest")}
    replies = _Flow(seen["client"], source_port=database_port)
    records = {place: _Flow(seen[place], destination_port=backup_port) for place in ("host", "backup")}
    acks = {place: _Flow(seen[place], source_port=backup_port) for place in ("host", "backup")}
    one_way_ns = one_way_ms * 1e6
    found = []
    for reply in replies.segments:
        request = asked["client"].last_before(reply.at_ns)
        ack_in = acks["host"].last_before(reply.at_ns)
        ack_out = acks["backup"].at(ack_in)
        record_in = records["backup"].last_before(ack_out) if ack_out else None
        record_out = records["host"].at(record_in)
        request_in = asked["guest"].at(request)
        if None in (record_out, request_in) or not request_in <= record_out:
            continue
        steps = (
            request_in - request.at_ns,
            record_out - request_in,
            record_in.at_ns - record_out - one_way_ns,
            ack_out - record_in.at_ns,
            ack_in.at_ns - ack_out - one_way_ns,
            reply.at_ns - ack_in.at_ns,
        )
        found.append(dict(zip(PHASES, (step / 1e3 for step in steps), strict=True)))
    return found


def summarise(found: list[dict]) -> dict:
    """The median of each phase, and of their sum: what a reply takes beyond the RTT."""
    whole = {name: round(median(one[name] for one in found), 1) for name in PHASES}
    return {
        "replies": len(found),
        "phases_us": whole,
        "over_rtt_us": round(median(sum(one.values()) for one in found), 1),
    }
