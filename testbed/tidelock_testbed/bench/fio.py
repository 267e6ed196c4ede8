"""fio on an NBD export: one turn of one workload."""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass

from ..process import run_command
from ..run import Run
from .settings import Settings


@dataclass(frozen=True)
class Workload:
    """What fio does."""

    name: str
    pattern: str
    block: str
    depth: int
    connections: int = 1
    writes_per_flush: int = 0
    """After how many writes a flush is asked for and waited for; 0: never."""

    @property
    def writes(self) -> bool:
        """Whether it writes; no workload does both."""
        return "write" in self.pattern


WORKLOADS = [
    Workload("4 KiB random write, QD 1", "randwrite", "4k", 1),
    Workload("4 KiB random write, QD 32", "randwrite", "4k", 32),
    Workload("4 KiB random read, QD 1", "randread", "4k", 1),
    Workload("4 KiB random read, QD 32", "randread", "4k", 32),
    Workload("4 KiB random write, each flushed, QD 1", "randwrite", "4k", 1, writes_per_flush=1),
    Workload("4 KiB random write, a flush for 32, QD 32", "randwrite", "4k", 32, writes_per_flush=32),
    Workload("1 MiB sequential write, QD 4", "write", "1m", 4),
    Workload("1 MiB sequential read, QD 4", "read", "1m", 4),
    Workload("4 KiB random write, 4 connections of QD 16", "randwrite", "4k", 16, 4),
    Workload("4 KiB random read, 4 connections of QD 16", "randread", "4k", 16, 4),
]


@dataclass(frozen=True)
class FioResult:
    """One turn."""

    iops: float
    mib_per_s: float
    p50_us: float
    p99_us: float


def run_fio(
    run: Run, uri: str, workload: Workload, settings: Settings, seconds: float | None = None, rate_iops: int = 0
) -> FioResult:
    """One turn; `rate_iops` bounds what all connections do together (0: as much as they can)."""
    seconds = settings.fio_s if seconds is None else seconds
    report = run.directory / "fio.json"
    argv = fio_command(uri, workload, settings, seconds, rate_iops) + ["--output-format=json", f"--output={report}"]
    run_command(argv, f"run fio: {workload.name}", timeout_s=seconds + 120)
    text = report.read_text()
    # The nbd engine's own messages may stand before the report.
    job = json.loads(text[text.index("{") :])["jobs"][0]
    if job["error"]:
        raise RuntimeError(f"fio: {workload.name} at {uri}: error {job['error']}")
    side = job["write" if workload.writes else "read"]
    percentiles = side["clat_ns"].get("percentile", {})
    return FioResult(
        iops=side["iops"],
        mib_per_s=side["bw_bytes"] / (1 << 20),
        p50_us=percentiles.get("50.000000", 0) / 1e3,
        p99_us=percentiles.get("99.000000", 0) / 1e3,
    )


def fio_command(uri: str, workload: Workload, settings: Settings, seconds: float, rate_iops: int = 0) -> list[str]:
    """The command, without where the report goes."""
    return [
        "fio",
        "--name=bench",
        "--ioengine=nbd",
        f"--uri={uri}",
        f"--rw={workload.pattern}",
        f"--bs={workload.block}",
        f"--iodepth={workload.depth}",
        f"--numjobs={workload.connections}",
        f"--size={settings.image_mib}m",
        # Data that no layer can shorten, new for each request.
        "--refill_buffers",
        "--randrepeat=0",
        "--norandommap",
        "--time_based",
        f"--runtime={seconds}",
        f"--ramp_time={settings.fio_ramp_s}",
        "--group_reporting",
        *([f"--fsync={workload.writes_per_flush}"] if workload.writes_per_flush else []),
        *([f"--rate_iops={rate_iops // workload.connections}"] if rate_iops else []),
    ]


def fio_version() -> str:
    """For the description of the machine."""
    return subprocess.run(["fio", "--version"], capture_output=True, text=True, check=True).stdout.strip()
