"""(e) Memory of both processes under a full-speed load."""

from __future__ import annotations

import time

from ..hostdaemon import writer_of
from ..process import Process
from ..progress import say
from ..run import Run
from .fio import WORKLOADS, fio_command
from .images import disk_directory, filled_image
from .protected import Protected
from .settings import Settings
from .usage import memory_mib

EVERY_S = 0.25
LOADS = [
    workload for workload in WORKLOADS if workload.name in ("4 KiB random write, QD 32", "1 MiB sequential write, QD 4")
]
RTT_MS = 50


def measure(settings: Settings) -> dict:
    """One after the other, each on processes that were started for it."""
    loads = {}
    for number, workload in enumerate(LOADS):
        with Run(f"bench-memory-{number}") as run:
            images = disk_directory(run)
            image = filled_image(images / "replicated.img", settings.image_mib)
            pair = Protected(run, image, RTT_MS, images)
            pair.wait_protected()
            say(f"(e) {workload.name} for {settings.memory_s:.0f} s")
            loads[workload.name] = _under_load(run, settings, pair, workload)
    return {"seconds": settings.memory_s, "rtt_ms": RTT_MS, "loads": loads}


def _under_load(run: Run, settings: Settings, pair: Protected, workload) -> dict:
    pids = {name: pid for name, pid in pair.processes().items() if name.startswith("tidelock")}
    at_rest = {name: round(memory_mib(pid).now, 1) for name, pid in pids.items()}
    before = writer_of(pair.daemon.group())["guest_io"]["written_bytes"]
    load = Process(run, "fio", fio_command(pair.uri, workload, settings, settings.memory_s))
    began = time.monotonic()
    samples: dict[str, list] = {name: [] for name in pids}
    backlog: list = []
    while load.alive():
        at = round(time.monotonic() - began, 2)
        for name, pid in pids.items():
            samples[name].append([at, round(memory_mib(pid).now, 1)])
        used = writer_of(pair.daemon.group())["backlog"]["used_bytes"]
        backlog.append([at, round(used / (1 << 20), 1)])
        time.sleep(EVERY_S)
    if load.wait(10) != 0:
        raise RuntimeError(f"fio failed\n{load.tail()}")
    written = writer_of(pair.daemon.group())["guest_io"]["written_bytes"] - before
    status = writer_of(pair.daemon.group())["backlog"]
    pair.settle()
    return {
        "at_rest_mib": at_rest,
        "max_mib": {name: round(memory_mib(pid).max, 1) for name, pid in pids.items()},
        "after_mib": {name: round(memory_mib(pid).now, 1) for name, pid in pids.items()},
        "backlog_limit_mib": round(status["limit_bytes"] / (1 << 20), 1),
        "written_mib": round(written / (1 << 20)),
        "rss_mib": samples,
        "backlog_mib": backlog,
    }
