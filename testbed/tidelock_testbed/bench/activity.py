"""(m) What the activity log costs a guest's writes: on against off, in a small working set and over the whole disk.

One pair of sites, whose daemon is stopped cleanly and started with the other setting between turns, so that both write
to the same image over the same link. A third setting has a map for a quarter of the disk, so that most writes wait for
it.
"""

from __future__ import annotations

import dataclasses

from ..hostdaemon import GROUP, MEMBER, Group, Member, Protection
from ..progress import say
from ..run import Run
from .fio import Workload, run_fio
from .images import disk_directory, filled_image, memory_directory
from .protected import DISK, Protected
from .settings import Settings
from .spread import Spread, ratio

RTT_MS = 5
WORKLOADS = [Workload(f"4 KiB random write, QD {depth}", "randwrite", "4k", depth) for depth in (1, 32)]
SHARES = {"1 %": 0.01, "100 %": 1.0}
"""Of the disk, that is written in."""


def measure(settings: Settings) -> dict:
    """All settings take turns in each round."""
    extents = settings.image_mib
    setups = {
        "off": {"activity_log.enabled": False},
        "on": {},
        "small": {"activity_log.slots": max(extents // 4, 64)},
    }
    with Run("bench-activity") as run:
        images = disk_directory(run)
        image = filled_image(images / "protected.img", settings.image_mib)
        pair = Protected(run, image, RTT_MS, images, memory_directory(run))
        pair.wait_protected()
        iops: dict[tuple[str, str, str], list[float]] = {}
        activity: dict[str, dict] = {}
        for _ in range(settings.activity_rounds):
            for setup, keys in setups.items():
                pair.settle()
                pair.daemon.process.stop()
                member = Member(MEMBER, pair.guest_net, {DISK: image})
                pair.daemon.configure([Group(GROUP, [member], Protection(), keys)])
                pair.daemon.start()
                pair.wait_protected()
                for share, part in SHARES.items():
                    size_mib = max(int(settings.image_mib * part), 1)
                    for workload in WORKLOADS:
                        turn = run_fio(run, pair.uri, workload, dataclasses.replace(settings, image_mib=size_mib))
                        iops.setdefault((share, workload.name, setup), []).append(turn.iops)
                        pair.settle()
                (writer,) = (member["writer"] for member in pair.daemon.group()["members"])
                activity[setup] = writer["activity"]
    rows = [_row(share, workload.name, iops) for share in SHARES for workload in WORKLOADS]
    return {"rtt_ms": RTT_MS, "disk_mib": settings.image_mib, "rows": rows, "activity": activity}


def _row(share: str, workload: str, iops: dict[tuple[str, str, str], list[float]]) -> dict:
    of = {setup: iops[share, workload, setup] for setup in ("off", "on", "small")}
    row = {
        "share": share,
        "workload": workload,
        "iops": {setup: Spread.of(values).json() for setup, values in of.items()},
        "ratio": ratio(of["on"], of["off"]).json(),
        "ratio_small": ratio(of["small"], of["off"]).json(),
    }
    say(
        f"(m) {workload}, {share:5} of the disk: {row['iops']['on']['median']:9,.0f}/s  x{row['ratio']['median']:.2f}, "
        f"map of a quarter x{row['ratio_small']['median']:.2f}"
    )
    return row
