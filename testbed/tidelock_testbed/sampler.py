"""What the primary site says of itself while a run goes on: sampled by a thread of its own.

`Sampler` is for one guest, `FleetSampler` for several, on one host or two.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from functools import partial

from tidelock_testbed.risk import words_of

from .guest import Guest
from .hostdaemon import ControlClient, HostDaemon, gate_of, writer_of
from .views import Views

EVERY_S = 0.005
FLEET_EVERY_S = 0.01


@dataclass
class Extremes:
    """The largest value of each kind that any sample had."""

    hold_ms: float = 0
    held_packets: int = 0
    lag_ms: float = 0
    lag_writes: int = 0
    backlog_bytes: int = 0

    def take(self, writer: dict | None, gate: dict | None) -> None:
        """Takes what a member's status says, of what it has."""
        if gate:
            self.hold_ms = max(self.hold_ms, gate["oldest_hold_ms"], gate["hold_time"]["max_ns"] / 1e6)
            self.held_packets = max(self.held_packets, gate["held_packets"])
        if writer:
            self.lag_ms = max(self.lag_ms, writer["lag"]["ms"])
            self.lag_writes = max(self.lag_writes, writer["lag"]["writes"])
            self.backlog_bytes = max(self.backlog_bytes, writer["backlog"]["used_bytes"])


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
        self._words: set[str] = set()
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
        words = words_of(group)
        self.states.extend((at, word) for word in sorted(words - self._words))
        self._words = words
        writer, gate = writer_of(group), gate_of(group)
        self.views.add(at, writer["pending"])
        self.extremes.take(writer, gate)


class FleetSampler:
    """Samples the status of every daemon until `stop`, each member's for itself.

    `writers` are guests with a protected database, each with the daemon of its host: that one is asked whenever the
    guest says how many rows it has.
    """

    def __init__(self, daemons: list[HostDaemon], writers: dict[str, tuple[Guest, HostDaemon]]):
        self.extremes = Extremes()
        self.states: list[tuple[float, str]] = []
        """Each state of each group as a host sees it, with the time at which it was first seen."""
        self.members: dict[str, dict] = {}
        """The last status of each member, as its own host says it."""
        self.views = {name: Views() for name in writers}
        self._daemons, self._guests = daemons, [guest for guest, _ in writers.values()]
        self._last: dict[tuple[str, str], set[str]] = {}
        self._stopping = threading.Event()
        for name, (guest, daemon) in writers.items():
            guest.on_rows = partial(self._take_rows, name, _Asker(daemon))
        self._thread = threading.Thread(target=self._run, daemon=True, name="sampler")
        self._thread.start()

    def stop(self) -> None:
        """Ends it."""
        for guest in self._guests:
            guest.on_rows = None
        self._stopping.set()
        self._thread.join(15)

    def _run(self) -> None:
        askers = [(daemon.host, _Asker(daemon)) for daemon in self._daemons]
        while not self._stopping.wait(FLEET_EVERY_S):
            for host, asker in askers:
                before = time.monotonic()
                for group in asker.groups():
                    self._take((before + time.monotonic()) / 2, host, group)

    def _take(self, at: float, host: str, group: dict) -> None:
        where = (group["name"], host)
        words = words_of(group)
        new = sorted(words - self._last.get(where, set()))
        self.states.extend((at, f"{group['name']} on {host} {word}") for word in new)
        self._last[where] = words
        for member in group["members"]:
            name, writer, gates = member["name"], member["writer"], member["gates"]
            if writer or gates:
                self.members[name] = member
            for gate in gates or [None]:
                self.extremes.take(writer, gate)
            if writer and name in self.views:
                self.views[name].add(at, writer["pending"])

    def _take_rows(self, name: str, asker: _Asker, rows: int) -> None:
        members = [member for group in asker.groups() for member in group["members"] if member["name"] == name]
        for writer in filter(None, (member["writer"] for member in members)):
            self.views[name].add_rows(rows, writer["pending"])


class _Asker:
    """A connection to the daemon that is made again when it breaks. For one thread."""

    def __init__(self, daemon: HostDaemon):
        self._path = daemon.control_socket
        self._client: ControlClient | None = None

    def group(self) -> dict | None:
        """The first group's status, or `None` if the daemon does not answer."""
        return next(iter(self.groups()), None)

    def groups(self) -> list[dict]:
        """The status of all groups, or of none if the daemon does not answer."""
        try:
            self._client = self._client or ControlClient(self._path)
            return self._client.ask(command="status")["status"]["groups"]
        except OSError:
            if self._client:
                self._client.close()
            self._client = None
            return []
