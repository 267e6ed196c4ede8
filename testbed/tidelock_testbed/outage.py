"""Drills of the policy `async after T`: the WAN is away for longer than T under load.

The group degrades and says so, clients get answers again, and it comes back by itself; or the disaster comes before
that. What the gate let out is judged by the clients' ledger and the recovered rows, as in every drill; what the group
and the recovery say of it is checked against that.
"""

from __future__ import annotations

import re
import time
from datetime import UTC, datetime

from .drilling import CONFIRMED_MIN, NEVER_MIND_S, Drill
from .hostdaemon import writer_of
from .ledger import Ledger, Row
from .paths import BIN
from .process import run_command, wait_until
from .progress import say

CLOCKS_S = 0.05
"""Two readings of two clocks are so far apart at most."""
SLOWER = 3
"""When the WAN comes back it carries so many times what the guest writes, and no more."""
RATE_MIN = 256 << 10
"""Bytes per second; below it what is not the guest's data counts."""


class Outage(Drill):
    """The link is away for longer than the group waits, and comes back slower."""

    name = "outage"
    about = (
        "policy async after T: the WAN is away for longer under load, the group degrades and says so, and comes back "
        "by itself over a slower link; then the primary site is gone"
    )
    modes = ("pipelined",)
    held_again_at = float("inf")
    """When the group was no longer degraded."""
    earliest_unix_s = float("inf")
    """Since when clients may have seen what is not there, as the recovery said."""

    @property
    def after_s(self) -> int:
        """T."""
        return 3 if self.knobs.hurry else 10

    @property
    def when_unreachable(self) -> str:
        """The policy."""
        return f"async after {self.after_s}s"

    def trouble(self) -> None:
        """The outage and its end."""
        self.go_down()
        self.come_back()

    def go_down(self) -> None:
        """Cuts the WAN, waits until clients are answered all the same, and lets them work on."""
        rig = self.rig
        rig.net.wan.cut()
        self.cut_at = self.event("WAN cut")
        say(f"TROUBLE: the WAN is cut; the policy is {self.when_unreachable}")
        rig.daemon.wait_state("told", NEVER_MIND_S, [rig.guest.process, rig.backup.process])
        seen_at = time.monotonic()
        needs = [self.clients.process, rig.guest.process]
        wait_until(
            "clients are answered without the backup",
            lambda: self.answered(self.ledger, seen_at) >= CONFIRMED_MIN,
            120,
            needs,
        )
        self.look()
        began_at, written = time.monotonic(), self.written_bytes()
        self.work(3 if self.knobs.hurry else 30)
        self.bytes_per_s = (self.written_bytes() - written) / (time.monotonic() - began_at)

    def look(self) -> None:
        """What the group says of it, to programs and to people."""
        group = self.rig.daemon.group()
        socket = self.rig.daemon.control_socket
        text = run_command([BIN / "tidelock", "status", "--socket", socket], "ask for the status")
        self.since_unix_s = group["told"]["since_unix_ms"] / 1e3
        self.since = self.event("degraded", self.since_unix_s - time.time() + time.monotonic())
        say(f"the group is degraded, {self.since - self.cut_at:.1f} s after the cut, and clients get answers")
        modes = (group["mode"], group["configured_mode"])
        is_open = group["told"]["leaves"] and modes == ("async", "pipelined")
        self.check("the group says that it is degraded", is_open)
        said = "clients may be told of it, since" in text
        self.check("status says since when clients may see what could be lost", said)
        waited = self.since - self.cut_at >= self.after_s - 1
        self.check("the gate did not open before something had waited for T", waited)
        confirmed = self.ledger.follow().confirmed
        early = [
            row for row, at in confirmed.items() if self.ledger.sent[row] > self.cut_at and at < self.since - CLOCKS_S
        ]
        self.check("from the cut on until then no client was told of a row that it asked for since", not early)

    def written_bytes(self) -> int:
        """What the guest has written."""
        return writer_of(self.rig.daemon.group())["guest_io"]["written_bytes"]

    def come_back(self) -> None:
        """The WAN is back, slower; the group is well again by itself, and only then is the WAN as it was."""
        rig = self.rig
        rate = max(int(SLOWER * self.bytes_per_s), RATE_MIN)
        healed_at = self.event("WAN is back, slower")
        rig.net.wan.set(cut=False, rate_bytes_per_s=rate)
        say(f"the WAN is back with {rate / 1e6:.1f} MB/s; the guest writes {self.bytes_per_s / 1e6:.1f} MB/s")
        rig.daemon.wait_state(self.settled, NEVER_MIND_S, [rig.guest.process, rig.backup.process])
        well_at = self.held_again_at = self.event("held again")
        group = rig.daemon.group()
        is_whole = group["told"] is None
        self.check("it came back to pipelined by itself", group["mode"] == "pipelined" and is_whole)
        rig.net.wan.set(rate_bytes_per_s=0)
        needs = [self.clients.process, rig.guest.process]
        wait_until("clients get answers", lambda: self.answered(self.ledger, well_at) >= 1, 120, needs)
        told = sum(self.since <= at < well_at for at in self.ledger.follow().confirmed.values())
        text = f"{told} rows were confirmed while it was degraded; the backup has them all, and replies are held again"
        self.entry.notes.append(f"{text}, {well_at - healed_at:.1f} s after the WAN was back")
        say(f"the group is {self.settled} again, {well_at - healed_at:.1f} s after the WAN was back")
        self.work(self.random.uniform(1, 3))

    def reply_waited(self, at: float) -> bool:
        """Not while the group was degraded."""
        return at < self.since - CLOCKS_S or at > self.held_again_at + CLOCKS_S

    def recover(self, *options: str) -> None:
        """Recovery says what the policy may have let out: it cannot know that the host was not degraded."""
        super().recover(*options)
        said = "\n".join(self.recovery.lines)
        self.check("recover names the policy", f'"async after {self.after_s} s"' in said)
        loud = "CLIENTS MAY HAVE SEEN WHAT IS NOT HERE" in said and "Make sure that it is off" in said
        self.check("recover says that clients may have seen what is not there", loud)
        found = re.search(r"since (20\d\d-\d\d-\d\dT[\d:]+)Z at the earliest, if it went on without this site", said)
        self.check("recover says since when at the earliest", found is not None)
        if found:
            at = datetime.fromisoformat(found[1]).replace(tzinfo=UTC).timestamp()
            self.earliest_unix_s = at
            self.entry.notes.append(f"recover said: since {found[1]}Z at the earliest, if it went on without this site")


class DiesInOutage(Outage):
    """The disaster comes while the group is degraded."""

    name = "dies-in-outage"
    about = (
        "as outage, but the primary site is gone while the group is degraded: what was confirmed before is there, what "
        "was confirmed since is counted, and recover says that it may be missing"
    )

    def __init__(self, run, knobs):
        super().__init__(run, knobs)
        self.entry.promise = (
            "what clients were told before the group degraded is there; since when they may know more is said"
        )

    def trouble(self) -> None:
        """The outage does not end."""
        self.go_down()

    def replies_wait_for_nothing(self) -> bool:
        """The gate is open by policy."""
        return True

    def judge_losses(self, ledger: Ledger, rows: set[Row]) -> None:
        """Only what was confirmed while it was degraded may be missing, and some of it must be: the WAN was cut."""
        before = ledger.sent_before(self.gone_at).confirmed
        lost = {row: at for row, at in before.items() if row not in rows}
        early = [row for row, at in lost.items() if at < self.since - CLOCKS_S]
        self.check("no row is lost that was confirmed before the group degraded", not early)
        self.check("the disaster cost rows that were confirmed since: the policy's price is real", bool(lost))
        named = self.earliest_unix_s <= self.since_unix_s
        self.check("recover named a time that is not after the first of them", named)
        self.entry.notes.append(f"{len(lost)} rows that were confirmed while nothing was held are lost")
