"""(p) Memory while the backup is away for an hour: of a group that goes on without it, and of one that waits.

The guest writes at a steady rate. The group that goes on fills its backlog on disk and keeps a map from then on; the
one that waits has a backlog in memory, and its guest stops when that is full.
"""

from __future__ import annotations

import time
from dataclasses import replace

from tidelock_testbed.risk import word_of

from ..hostdaemon import Protection, gate_of, writer_of
from ..process import Process
from ..progress import say
from ..run import Run
from .fio import Workload, fio_command
from .images import disk_directory, filled_image
from .protected import Protected
from .settings import Settings
from .usage import memory_mib

RTT_MS = 10
BACKLOG_MIB = 64
IOPS = 500
SAMPLES = 60
ON_DISK_MIB = 1024
GROUPS = {
    "goes on": Protection(
        backlog=f"{BACKLOG_MIB}MiB", when_unreachable="async after 5s", backlog_on_disk=f"{ON_DISK_MIB}MiB"
    ),
    "waits": Protection(backlog=f"{BACKLOG_MIB}MiB", when_unreachable="hold"),
}
WORKLOAD = Workload("4 KiB random write, QD 1", "randwrite", "4k", 1)


def measure(settings: Settings) -> dict:
    """One after the other; the one that waits stands still, so a part of the time is enough for it."""
    return {
        "rtt_ms": RTT_MS,
        "backlog_mib": BACKLOG_MIB,
        "on_disk_mib": ON_DISK_MIB,
        "iops": IOPS,
        "outages": {
            name: _outage(name, settings, settings.outage_s / (1 if name == "goes on" else 6)) for name in GROUPS
        },
    }


def _outage(name: str, settings: Settings, seconds: float) -> dict:
    with Run(f"bench-outage-{name.split()[0]}") as run:
        images = disk_directory(run)
        image = filled_image(images / "protected.img", settings.image_mib)
        pair = Protected(run, image, RTT_MS, images, protection=replace(GROUPS[name], lease_s=2, grace_s=3))
        pair.wait_protected()
        pids = {name: pid for name, pid in pair.processes().items() if name.startswith("tidelock")}
        load = Process(run, "fio", fio_command(pair.uri, WORKLOAD, settings, seconds, IOPS))
        pair.net.wan.cut()
        began = time.monotonic()
        samples: list[list[float]] = []
        while (at := time.monotonic() - began) < seconds:
            samples.append([round(at, 1), *(round(memory_mib(pid).now, 1) for pid in pids.values())])
            time.sleep(seconds / SAMPLES)
        group = pair.daemon.group()
        written = writer_of(group)["guest_io"]["written_bytes"]
        state, is_open = word_of(group), gate_of(group)["open"]
        asked = IOPS * 4096 * seconds
        if name == "goes on" and written < asked / 2:
            raise RuntimeError(f"the guest has written {written} bytes of {asked:.0f}: it did not go on")
        pair.net.wan.mend()
        mended = time.monotonic()
        load.wait(600)
        back_s = pair.wait_protected() + time.monotonic() - mended
        after = [round(memory_mib(pid).now, 1) for pid in pids.values()]
    half = samples[len(samples) // 2 :]
    found = {
        "seconds": seconds,
        "state": state,
        "gate_open": is_open,
        "written_mib": round(written / (1 << 20)),
        "rss_mib": samples,
        "first_mib": dict(zip(pids, samples[0][1:], strict=True)),
        "half_mib": dict(zip(pids, half[0][1:], strict=True)),
        "end_mib": dict(zip(pids, half[-1][1:], strict=True)),
        "after_mib": dict(zip(pids, after, strict=True)),
        "back_s": round(back_s, 1),
    }
    say(f"(p) {name} for {seconds:.0f} s: {found['half_mib']} MiB at half of it, {found['end_mib']} at the end")
    return found
