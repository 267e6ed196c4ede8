"""What the primary site says of itself while a run goes on: sampled by a thread of its own."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field

from .guest import Guest
from .hostdaemon import ControlClient, HostDaemon, gate_of, writer_of
from .views import Views

EVERY_S = 0.005


@dataclass
class Extremes:
    """The largest value of each kind that any sample had."""

    hold_ms: float = 0
    held_packets: int = 0
    lag_ms: float = 0
    lag_writes: int = 0
    backlog_bytes: int = 0


@dataclass
class Sampler:
    """Samples the daemon's status until `stop`, and asks for it whenever the guest says how many rows it has.

    The daemon may be away for a while: it is asked again.
    """

    daemon: HostDaemon
    guest: Guest
    views: Views = field(default_factory=Views)
    extremes: Extremes = field(default_factory=Extremes)
    states: list[tuple[float, str]] = field(default_factory=list)
    """Each state of the group, with the time at which it was first seen."""

    group: dict | None = None
    """The last status of the group."""

    def __post_init__(self) -> None:
        self._stopping = threading.Event()
        self._at_rows = _Asker(self.daemon)
        self.guest.on_rows = self._take_rows
        self._thread = threading.Thread(target=self._run, daemon=True, name="sampler")
        self._thread.start()

    def stop(self) -> None:
        """Ends it."""
        self.guest.on_rows = None
        self._stopping.set()
        self._thread.join(15)

    def _run(self) -> None:
        asker = _Asker(self.daemon)
        while not self._stopping.wait(EVERY_S):
            before = time.monotonic()
            group = asker.group()
            if group is not None:
                self._take((before + time.monotonic()) / 2, group)

    def _take_rows(self, rows: int) -> None:
        group = self._at_rows.group()
        if group is not None:
            self.views.add_rows(rows, writer_of(group)["pending"])

    def _take(self, at: float, group: dict) -> None:
        self.group = group
        if not self.states or self.states[-1][1] != group["state"]:
            self.states.append((at, group["state"]))
        writer, gate = writer_of(group), gate_of(group)
        self.views.add(at, writer["pending"], writer["committed"])
        top = self.extremes
        top.hold_ms = max(top.hold_ms, gate["oldest_hold_ms"], gate["hold_time"]["max_ns"] / 1e6)
        top.held_packets = max(top.held_packets, gate["held_packets"])
        top.lag_ms = max(top.lag_ms, writer["lag"]["ms"])
        top.lag_writes = max(top.lag_writes, writer["lag"]["writes"])
        top.backlog_bytes = max(top.backlog_bytes, writer["backlog"]["used_bytes"])


class _Asker:
    """A connection to the daemon that is made again when it breaks. For one thread."""

    def __init__(self, daemon: HostDaemon):
        self._path = daemon.control_socket
        self._client: ControlClient | None = None

    def group(self) -> dict | None:
        """The group's status, or `None` if the daemon does not answer."""
        try:
            self._client = self._client or ControlClient(self._path)
            return self._client.ask(command="status")["status"]["groups"][0]
        except OSError:
            if self._client:
                self._client.close()
            self._client = None
            return None
