"""A guest that writes as fast as it can, to a backup that folds all of it at once: whether folding keeps up."""

from __future__ import annotations

import json
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

from ..pair import DISK, Options, Pair
from ..process import run_command, wait_until
from ..progress import say
from ..run import Run
from .fio import run_fio
from .images import filled_image
from .settings import Settings
from .travels import BUSY

ITSELF = {
    "random": ["--rw=randwrite", "--bs=4k", "--iodepth=32"],
    "sequential": ["--rw=write", "--bs=256k", "--iodepth=1"],
}
"""How folding writes, and how a journal is written."""
SAMPLE_S = 0.5
DRAINED_S = 600
LEFT_BYTES = 16 << 20
"""`journal.fold_min`: less than this waits for more."""
WRITTEN_BYTES = 4096 + 60
"""A write in the journal."""


@dataclass
class Waiting:
    """What of the journal is not in the images, again and again."""

    pair: Pair
    mib: list[float] = field(default_factory=list)
    _ended: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> Waiting:
        self._thread = threading.Thread(target=self._sample)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._ended.wait(SAMPLE_S):
            self.mib.append(unfolded_bytes(self.pair) / (1 << 20))


def measure(settings: Settings) -> dict:
    """One run; nothing bounds the guest but its disk, the stream and the backup."""
    with Run("bench-folding") as run:
        disk = filled_image(run.directory / "disk.img", settings.image_mib)
        itself = {name: _by_itself(run, disk, words, settings) for name, words in ITSELF.items()}
        pair = Pair(run, Options(disk=disk, disk_mib=settings.image_mib))
        pair.start()
        pair.wait_settled()
        _wait_drained(pair)
        began = time.monotonic()
        with Waiting(pair) as waiting:
            fio = run_fio(run, f"nbd+unix:///{DISK}?socket={pair.socket}", BUSY, settings, settings.busy_s)
        pair.wait_settled()
        arrived_s = time.monotonic() - began
        left_mib = unfolded_bytes(pair) / (1 << 20)
        _wait_drained(pair)
        drained_s = time.monotonic() - began - arrived_s
    came_mib = fio.iops * settings.busy_s * WRITTEN_BYTES / (1 << 20)
    half = len(waiting.mib) // 2
    told = {
        "workload": BUSY.name,
        "seconds": settings.busy_s,
        "disk_mib": settings.image_mib,
        "ingest_mib_per_s": round(came_mib / arrived_s, 1),
        "fold_mib_per_s": round((came_mib - left_mib) / arrived_s, 1),
        "waiting_mib": {
            "first_half": round(max(waiting.mib[:half], default=0), 1),
            "second_half": round(max(waiting.mib[half:], default=0), 1),
            "at_the_end": round(left_mib, 1),
        },
        "drained_s": round(drained_s, 2),
        "disk_itself_mib_per_s": itself,
    }
    say(
        f"(n) a guest that writes all it can: {told['ingest_mib_per_s']} MiB/s came, {told['fold_mib_per_s']} folded "
        f"meanwhile; {told['waiting_mib']['at_the_end']} MiB waited at its end, for {told['drained_s']} s"
    )
    return told


def _by_itself(run: Run, image: Path, words: list[str], settings: Settings) -> float:
    """What fio writes to the image past the page cache, in MiB/s."""
    report = run.directory / "fio.json"
    argv = ["fio", "--name=itself", "--ioengine=io_uring", "--direct=1", f"--filename={image}", "--norandommap"]
    argv += [*words, f"--size={settings.image_mib}m", "--time_based", f"--runtime={settings.fio_s}"]
    run_command([*argv, "--output-format=json", f"--output={report}"], "run fio on the disk itself", timeout_s=120)
    return round(json.loads(report.read_text())["jobs"][0]["write"]["bw_bytes"] / (1 << 20), 1)


def unfolded_bytes(pair: Pair) -> int:
    """What of the journal is not in the images."""
    return pair.backup_group()["unfolded_bytes"]


def _wait_drained(pair: Pair) -> None:
    drained = "what came before is in the images"
    wait_until(drained, lambda: unfolded_bytes(pair) <= LEFT_BYTES, DRAINED_S, [pair.backup])
