"""Two sites for shard logs: namespaces, the WAN between them, a backup server whose data is in memory; and what lag is.

The lag of an entry is the time from its commit at home until the store's watermark at the backup server has reached
its effective stamp: from then on apply-to of its shard is behind it. Both sites are on one machine and have one clock.

Watermarks are heard by a program in the backup site's namespace that is connected to the backup server as one more
host of the store (`daemon/library/examples/watermarks.rs`). The server tells every host whenever the watermark has
moved, so nothing polls, and no timer is in the way; the time that this message takes inside the backup site counts as
lag. The round trip is what `ping` says in the same minute.
"""

from __future__ import annotations

import bisect
import contextlib
import os
import re
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median

from ..backupserver import BackupServer
from ..hostdaemon import BACKUP_PORT
from ..kvstore import Far, Watermarks
from ..netns import Netns, add_addresses
from ..pki import Pki
from ..process import run_command
from ..run import Run
from ..wan import Wan, WanParams
from .images import memory_directory
from .spread import percentile

RTT_MS = 25
PRIMARY, BACKUP = "10.77.3.1", "10.77.3.2"
STORE = "orders"
HOSTS = ("host-a", "host-b")
WATCHER = "watcher"
SETTLE_S = 0.5
"""The beginning of a load is not counted."""


@dataclass
class Sites:
    """Two namespaces, the WAN between them, and a backup server whose data is in memory."""

    run: Run
    primary: Netns
    backup: Netns
    memory: Path
    tls: dict
    server: BackupServer

    def far(self, shards: int, near: bool = False) -> Far:
        """The server, from the primary site or from beside it."""
        return Far(f"{'127.0.0.1' if near else BACKUP}:{BACKUP_PORT}", STORE, shards)

    def watch(self, shards: int, names: str = "") -> Watermarks:
        """Hears watermarks at the backup."""
        return Watermarks(self.run, self.backup, WATCHER, self.far(shards, near=True), names, self.tls[WATCHER])

    def rtt_ms(self) -> float:
        """The median of some pings."""
        told = run_command(["ping", "-c", "40", "-i", "0.02", BACKUP], "ping the backup", self.primary)
        return median(float(found) for found in re.findall(r"time=([\d.]+) ms", told))


@contextlib.contextmanager
def sites(name: str, with_standbys: bool = False) -> Iterator[Sites]:
    """Both sites, until the end of the `with`."""
    with Run(name) as run:
        primary, backup = Netns(run, "primary"), Netns(run, "backup")
        _at_once(Wan(run, primary, backup, WanParams(delay_ms=RTT_MS / 2)))
        add_addresses(primary, "wan", f"{PRIMARY}/24")
        add_addresses(backup, "wan", f"{BACKUP}/24")
        # BBR paces a burst after a pause by the rate that it has seen: 6 KB of entries took 2 ms to leave.
        for netns in (primary, backup):
            netns.sysctl({"net.ipv4.tcp_congestion_control": "reno"})
        pki = Pki(run.directory / "pki")
        memory = memory_directory(run)
        tls = {host: pki.issue("host", host, run.directory / host) for host in (*HOSTS, WATCHER)}
        # A far site has disks of its own, and this machine has one.
        server = BackupServer(run, backup, memory, pki.issue("backup", "backup-a", run.directory / "backup"))
        hosts = ", ".join(f'"{host}"' for host in (*HOSTS, WATCHER))
        lines = ["[[store]]", f'name = "{STORE}"', f"hosts = [{hosts}]"]
        if with_standbys:
            standbys = memory / "standbys"
            standbys.mkdir()
            for directory in (memory, standbys):
                directory.chmod(0o711)
            lines += ["[store.standbys]", f'dir = "{standbys}"', 'primary_user = "postgres"']
            server.confined = []
            run.on_close("end the standbys", lambda: _end_standbys(standbys))
        server.config.write_text(server.config.read_text() + "\n".join(lines) + "\n")
        server.start()
        yield Sites(run, primary, backup, memory, tls, server)


def _at_once(wan: Wan) -> None:
    """A delay line that waits for a core delays frames further, by milliseconds where programs compute beside it."""
    line = wan.process
    for thread in Path(f"/proc/{line.pid}/task").iterdir() if line else []:
        with contextlib.suppress(OSError):  # not allowed everywhere
            os.sched_setscheduler(int(thread.name), os.SCHED_RR, os.sched_param(1))


def _end_standbys(place: Path) -> None:
    """They outlive the backup server, and must not outlive the run."""
    for pid_file in place.glob("*/*/own/data/postmaster.pid"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            pid = int(pid_file.read_text().split()[0])
            if str(pid_file.parent) in Path(f"/proc/{pid}/cmdline").read_text():
                os.kill(pid, signal.SIGQUIT)


def lags_ms(entries: list[tuple[int, int]], marks: list[tuple[int, int]]) -> list[float]:
    """Of each entry (when it was committed, its stamp) the time until a watermark (when it was heard, its stamp)
    covered it. Entries that none has covered are left out."""
    heard, stamps, highest = [], [], 0
    for at, stamp in marks:
        if stamp > highest:
            highest = stamp
            heard.append(at)
            stamps.append(stamp)
    found = []
    for at, stamp in entries:
        nth = bisect.bisect_left(stamps, stamp)
        if nth < len(stamps):
            found.append((heard[nth] - at) / 1e6)
    return found


def read_entries(path: Path) -> list[tuple[int, int]]:
    """Entries of a load."""
    return [(int(at), int(stamp)) for at, stamp in (line.split() for line in path.read_text().splitlines())]


def settled(entries: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Without those of the beginning, and of the last moment, which nothing follows."""
    first, last = entries[0][0] + SETTLE_S * 1e9, entries[-1][0] - 2e7
    return [entry for entry in entries if first <= entry[0] <= last]


def summary(lags: list[float], rtt_ms: float) -> dict:
    """Over half the round trip, in milliseconds."""
    over = [lag - rtt_ms / 2 for lag in lags]
    return {
        "entries": len(over),
        "mean_ms": round(mean(over), 3),
        "p50_ms": round(percentile(over, 50), 3),
        "p99_ms": round(percentile(over, 99), 3),
    }
