"""The backup's progress, sampled from its own status while a run goes on, and the records of its journal.

A thread asks the backup server for its status every few milliseconds, and notes the cut that a recovery would take at
that moment. It also keeps the journal's segments by a second name, so that they can be read after the server has folded
them into its images and removed them.
"""

from __future__ import annotations

import bisect
import contextlib
import json
import math
import mmap
import os
import shutil
import socket
import struct
import subprocess
import threading
import time
from collections import defaultdict
from dataclasses import dataclass, field

from .backupserver import BackupServer
from .paths import BIN
from .run import Run
from .wal import Write

EVERY_S = 0.005
KEEP_EVERY = 20
"""Samples from one look for new segments to the next."""
HEAD = struct.Struct("<QQQIIHHI")
"""The header that `tidelock-records` prints before the data of a record."""


@dataclass
class Cuts:
    """One writer's count in the cut, sample by sample."""

    asked: list[float] = field(default_factory=list)
    """When the server was asked."""
    answered: list[float] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    """The counts in its answers; a cut only grows."""

    def add(self, asked: float, answered: float, count: int) -> None:
        """Adds a sample."""
        self.asked.append(asked)
        self.answered.append(answered)
        self.counts.append(max(count, self.counts[-1]) if self.counts else count)

    def moment(self, seq: int) -> tuple[float, float]:
        """When the backup had a record: not before the first time, and by the second.

        The first is when the server was asked for the last time for which it then said that it had not; the second is
        when it had said for the first time that it had.
        """
        place = bisect.bisect_left(self.counts, seq)
        not_before = self.asked[place - 1] if place else -math.inf
        return not_before, self.answered[place] if place < len(self.counts) else math.inf


class BackupWatch:
    """Watches a backup server until `stop`, the run's end, or until all of its groups are recovered."""

    def __init__(self, run: Run, server: BackupServer):
        self._server = server
        self._kept = server.data.parent / "kept-journals"
        self.cuts: dict[tuple[str, str], Cuts] = defaultdict(Cuts)
        """The samples of each writer, by its group and its name."""
        self._writers: dict[str, list[str]] = {}
        self._epochs: dict[str, int] = {}
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="backup-watch")
        self._thread.start()
        run.on_close("stop the backup's watch", self.stop)

    def stop(self) -> None:
        """Ends it."""
        self._stopping.set()
        self._thread.join(15)

    def _run(self) -> None:
        samples = 0
        while not self._stopping.wait(EVERY_S):
            if samples % KEEP_EVERY == 0:
                self._keep()
            samples += 1
            asked = time.monotonic()
            try:
                groups = self._ask()
            except (OSError, ValueError):  # the server is away
                continue
            if groups and all(group["recovered"] for group in groups):
                break
            for group in groups:
                self._take(asked, time.monotonic(), group)
        self._keep()

    def _ask(self) -> list[dict]:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as control:
            control.settimeout(10)
            control.connect(str(self._server.control_socket))
            control.sendall(b'{"do": "status"}\n')
            with control.makefile("rb") as answers:
                return json.loads(answers.readline())["groups"]

    def _take(self, asked: float, answered: float, group: dict) -> None:
        if group["recovered"] or group.get("broken"):
            return
        name, cut = group["group"], group["cut"]
        self._epochs[name] = group["epoch"]
        self._writers[name] = [writer["member"] for writer in group["writers"]]
        for number, writer in enumerate(self._writers[name]):
            self.cuts[name, writer].add(asked, answered, cut[number] if number < len(cut) else 0)

    def _keep(self) -> None:
        for segment in self._server.data.glob("groups/*/journal/*.seg"):
            kept = self._kept / segment.parts[-3] / segment.name
            kept.parent.mkdir(parents=True, exist_ok=True)
            # It may be kept already, or may just have been removed.
            with contextlib.suppress(FileExistsError, FileNotFoundError):
                os.link(segment, kept)

    def interval_ms(self) -> dict[str, float]:
        """How far apart the moments are between which a change of the cut was seen."""
        times = [(cuts.asked, cuts.answered) for cuts in self.cuts.values()]
        gaps = sorted(
            after - before for asked, answered in times for before, after in zip(asked, answered[1:], strict=False)
        )
        if not gaps:
            return {}
        return {"median": round(gaps[len(gaps) // 2] * 1e3, 1), "most": round(gaps[-1] * 1e3, 1)}

    def writes(self, group: str) -> dict[str, list[Write]]:
        """The writes in a group's journal, by writer, up to its recovery. To be called once, after `stop`."""
        kept = self._kept / group
        if not kept.is_dir():
            return {}
        # Reading cuts a torn tail, and the server may still use the last segment.
        last = max(kept.glob("*.seg"))
        shutil.copyfile(last, kept / "copy")
        (kept / "copy").rename(last)
        out = kept / "records"
        with out.open("wb") as file:
            done = subprocess.run([BIN / "tidelock-records", kept], stdout=file, stderr=subprocess.PIPE, text=True)
        if done.returncode != 0:
            raise RuntimeError(f"the journal of {group} cannot be read: {done.stderr}")
        with out.open("rb") as file:
            content = memoryview(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)) if out.stat().st_size else b""
        out.unlink()
        return self._parse(group, content)

    def _parse(self, group: str, content: memoryview) -> dict[str, list[Write]]:
        names, epoch, at = self._writers.get(group, []), self._epochs.get(group, 0), 0
        writes: dict[str, list[Write]] = {name: [] for name in names}
        zeroes = memoryview(b"")
        while at < len(content):
            of_epoch, seq, offset, length, data_bytes, writer, disk, copied = HEAD.unpack_from(content, at)
            at += HEAD.size
            data = content[at : at + data_bytes]
            at += data_bytes
            if data_bytes == 0:
                if length > len(zeroes):
                    zeroes = memoryview(bytes(length))
                data = zeroes[:length]
            if of_epoch <= epoch and writer < len(names):
                writes[names[writer]].append(Write(seq, disk, offset, data, bool(copied)))
        return writes
