"""(a) The NBD path without replication, beside qemu-nbd and nbdkit on the same image."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from ..process import Process
from ..progress import say
from ..run import Run
from .fio import WORKLOADS, FioResult, Workload, fio_command, run_fio
from .images import disk_directory, filled_image, forget_cache, memory_directory
from .servers import NBDKIT, NBDKIT_NO_CACHE, OURS, QEMU_NATIVE, QEMU_URING, Server
from .settings import LEVEL, Settings
from .spread import Spread, ratio
from .usage import CpuMeter, Profile

PLACES = {
    "disk": [OURS, QEMU_NATIVE, QEMU_URING, NBDKIT_NO_CACHE, NBDKIT],
    "memory": [OURS, QEMU_NATIVE, QEMU_URING, NBDKIT],
}
"""Where the image lies, and who serves it there. In memory there is no disk to wait for and no cache to be before
others with: what is left is the path itself."""


def is_compared(place: str, server: Server, workload: Workload) -> bool:
    """Whether the server does the same work as the others in this workload.

    On a disk nbdkit, which has no O_DIRECT, answers a write when it is in the page cache: only where a flush is asked
    for does the data get to the disk before the answer. Its reads are of the disk with `cache=none` only.
    """
    if place == "memory" or workload.writes_per_flush:
        return True
    if workload.writes:
        return server not in (NBDKIT, NBDKIT_NO_CACHE)
    return server != NBDKIT


def measure(settings: Settings) -> dict:
    """All servers take turns at each workload, in both places."""
    with Run("bench-nbd") as run:
        places = {
            "disk": filled_image(disk_directory(run) / "nbd.img", settings.image_mib),
            "memory": filled_image(memory_directory(run) / "nbd.img", settings.image_mib),
        }
        return {place: _measure_place(run, settings, place, image) for place, image in places.items()}


def _measure_place(run: Run, settings: Settings, place: str, image: Path) -> dict:
    rows = []
    for workload in WORKLOADS:
        turns: dict[str, list[FioResult]] = {server.key: [] for server in PLACES[place]}
        for _ in range(settings.rounds):
            for server in PLACES[place]:
                turns[server.key].append(_turn(run, settings, server, image, workload))
        compared = {server.key for server in PLACES[place] if is_compared(place, server, workload)}
        row = compare(workload, turns, compared)
        if row["ratio"]["median"] < LEVEL:
            row["profile"] = _profile(run, settings, image, workload)
        say(
            f"(a) {place:6} {workload.name:43} {row['servers'][OURS.key]['iops']['median']:9,.0f}/s  "
            f"x{row['ratio']['median']:.2f} of {row['best_other']}"
        )
        rows.append(row)
    return {"servers": [_describe(server, place) for server in PLACES[place]], "workloads": rows}


def _turn(run: Run, settings: Settings, server: Server, image: Path, workload: Workload) -> FioResult:
    forget_cache(image)
    process, uri = server.start(run, image)
    try:
        return run_fio(run, uri, workload, settings)
    finally:
        process.stop()


def _profile(run: Run, settings: Settings, image: Path, workload: Workload) -> dict:
    """Where our server spends its time under this load, and how much of a core it takes."""
    forget_cache(image)
    process, uri = OURS.start(run, image)
    load = Process(run, "fio-profiled", fio_command(uri, workload, settings, settings.profile_s + 1))
    try:
        profile, meter = Profile(run, "nbd", {"server": process.pid}), CpuMeter({"server": process.pid})
        load.wait(settings.profile_s + 60)
        return {"cores": meter.read(), "top": profile.top()}
    finally:
        load.kill()
        process.stop()


def _describe(server: Server, place: str) -> dict:
    return {
        "key": server.key,
        "name": server.name,
        "caching": server.caching if place == "disk" else "the image is in memory",
    }


def compare(workload: Workload, turns: dict[str, list[FioResult]], compared: set[str]) -> dict:
    """Our turns beside those of the best of the others that do the same work."""
    iops = {key: [turn.iops for turn in results] for key, results in turns.items()}
    others = [key for key in turns if key != OURS.key and key in compared]
    best = max(others, key=lambda key: Spread.of(iops[key]).median)
    return {
        "workload": workload.name,
        "best_other": best,
        "ratio": ratio(iops[OURS.key], iops[best]).json(),
        "servers": {
            key: {
                **{
                    field: Spread.of([asdict(turn)[field] for turn in results]).json()
                    for field in ("iops", "mib_per_s", "p50_us", "p99_us")
                },
                "compared": key in compared,
                "ratio_of_ours": ratio(iops[OURS.key], iops[key]).json(),
            }
            for key, results in turns.items()
        },
    }
