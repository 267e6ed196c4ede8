"""(b) The same path with replication, `pipelined` over a 50 ms link, beside the path without.

A far site has a disk of its own; this machine has only one. So the backup's files are in memory, and the workloads that
write are measured once more with everything on the one disk.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

from ..process import Process
from ..progress import say
from ..run import Run
from .fio import WORKLOADS, FioResult, Workload, fio_command, run_fio
from .images import disk_directory, filled_image, forget_cache, memory_directory
from .protected import Protected
from .servers import OURS
from .settings import LEVEL, Settings
from .spread import Spread, percentile, ratio
from .usage import CpuMeter, Profile

RTT_MS = 50
HALF_LOAD = 0.5
"""Where the machine has no core left for the other site, the same is asked at this share of the plain path's speed."""


def measure(settings: Settings) -> dict:
    """Plain and replicated take turns; each has an image of its own, equal at the start."""
    with Run("bench-replication") as run:
        own_disk = _measure_all(run, settings, memory_directory(run), WORKLOADS, explain=True)
    with Run("bench-replication-shared") as run:
        one_disk = _measure_all(run, settings, None, [w for w in WORKLOADS if w.writes], explain=False)
    return {"rtt_ms": RTT_MS, **own_disk, "one_disk": one_disk}


def _measure_all(
    run: Run, settings: Settings, backup_directory: Path | None, workloads: list[Workload], explain: bool
) -> dict:
    images = disk_directory(run)
    plain = filled_image(images / "plain.img", settings.image_mib)
    image = filled_image(images / "replicated.img", settings.image_mib)
    pair = Protected(run, image, RTT_MS, images, backup_directory)
    copy_s = pair.wait_protected()
    where = "memory" if backup_directory else "the same disk"
    say(f"(b) backup in {where}: first copy at {settings.image_mib / copy_s:,.0f} MiB/s")
    rows = []
    for workload in workloads:
        rows.append(_measure(run, settings, pair, plain, workload, explain))
        forget_cache(plain)
    return {"initial_copy_mib_per_s": round(settings.image_mib / copy_s, 1), "workloads": rows}


def _measure(run: Run, settings: Settings, pair: Protected, plain: Path, workload: Workload, explain: bool) -> dict:
    def plain_turn(rate: int = 0) -> FioResult:
        process, uri = OURS.start(run, plain)
        try:
            return run_fio(run, uri, workload, settings, rate_iops=rate)
        finally:
            process.stop()

    def replicated_turn(rate: int = 0) -> tuple[FioResult, dict]:
        meter = CpuMeter(pair.processes())
        result = run_fio(run, pair.uri, workload, settings, rate_iops=rate)
        cores = meter.read()
        pair.settle()
        return result, cores

    turns = [(plain_turn(), *replicated_turn()) for _ in range(settings.rounds)]
    row = _compare(workload, turns)
    text = f"(b) {workload.name:43} {row['replicated']['iops']['median']:9,.0f}/s  x{row['ratio']['median']:.2f}"
    if explain and row["ratio"]["median"] < LEVEL:
        row["profile"] = _profile(run, settings, pair, workload)
        rate = int(row["plain"]["iops"]["median"] * HALF_LOAD)
        row["half_load"] = _compare(
            workload, [(plain_turn(rate), *replicated_turn(rate)) for _ in range(settings.rounds)]
        )
        text += f"; at half of the plain speed x{row['half_load']['ratio']['median']:.2f}"
    say(text)
    return row


def _compare(workload: Workload, turns: list[tuple[FioResult, FioResult, dict]]) -> dict:
    plain, replicated = [turn[0] for turn in turns], [turn[1] for turn in turns]

    def spreads(results: list[FioResult]) -> dict:
        return {
            field: Spread.of([getattr(result, field) for result in results]).json()
            for field in ("iops", "mib_per_s", "p50_us", "p99_us")
        }

    names = turns[0][2]
    return {
        "workload": workload.name,
        "plain": spreads(plain),
        "replicated": spreads(replicated),
        "ratio": ratio([result.iops for result in replicated], [result.iops for result in plain]).json(),
        "added_p50_us": round(percentile([b.p50_us - a.p50_us for a, b, _ in turns], 50), 1),
        "cores": {name: round(percentile([turn[2][name] for turn in turns], 50), 2) for name in names},
    }


def _profile(run: Run, settings: Settings, pair: Protected, workload: Workload) -> list[dict]:
    """Where both processes spend their time under this load."""
    argv = fio_command(pair.uri, workload, settings, settings.profile_s + 1)
    load = Process(run, "fio-profiled", argv)
    try:
        profile = Profile(run, "replication", pair.processes())
        load.wait(settings.profile_s + 60)
        return profile.top()
    except subprocess.SubprocessError as error:
        say(f"(b) no profile: {error}")
        return []
    finally:
        load.kill()
        pair.settle()
