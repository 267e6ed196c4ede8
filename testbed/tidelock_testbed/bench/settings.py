"""How long and how often things are measured, and where the results go."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ..paths import OUT, ROOT

DOCS = ROOT / "docs" / "bench"
"""Results of full runs: they are part of the documentation."""

LEVEL = 0.95
"""Two medians whose ratio is at least this are called level: repeated turns of one thing differ by more."""


@dataclass(frozen=True)
class Settings:
    """A full run, or a quick one that only shows that everything works."""

    quick: bool = False
    results: Path = DOCS
    rounds: int = 3
    fio_s: float = 1.0
    """One turn of fio, after `fio_ramp_s` that is not counted."""
    fio_ramp_s: float = 0.3
    image_mib: int = 1024
    """Size of the disks that fio works on."""
    pgbench_s: float = 2.5
    """One turn of pgbench."""
    pgbench_rounds: int = 3
    rtts_ms: tuple[int, ...] = (0, 50, 100, 200)
    client_counts: tuple[int, ...] = (1, 4, 16, 64)
    gate_s: int = 1
    tagging_rounds: int = 16
    """Short turns: their number makes up for their noise."""
    flood_s: float = 0.2
    memory_s: float = 60.0
    application_s: float = 2.5
    """One turn of clients of an application."""
    application_rounds: int = 3
    front_work_ms: tuple[float, ...] = (0, 10, 25, 50, 75, 100)
    write_rates: tuple[int, ...] = (0, 10, 25, 50, 100, 150, 200)
    profile_s: float = 4.0
    activity_rounds: int = 12
    """Some of its ratios are wanted within a few per cent, and one turn differs from the next by more."""
    history_rounds: int = 6
    history_turn_mib: int = 256
    journals_mib: tuple[int, ...] = (1024, 10 * 1024, 50 * 1024)
    """Those for which the disk has room."""
    busy_s: float = 75.0
    roll_spans_s: tuple[int, ...] = (1, 10, 60)
    restarts: int = 9
    resynced_mib: int = 256
    live_s: float = 4.0
    outage_s: float = 3600.0
    switches: int = 7
    switch_load_s: float = 2.0
    """What is written before a switch, so that there is something to drain."""
    shard_counts: tuple[int, ...] = (1, 2, 8, 32, 128, 512)
    shard_rounds: int = 3
    shard_load_s: float = 3.0

    @staticmethod
    def of(quick: bool) -> Settings:
        """Quick results go to `out/`, not into the documentation."""
        if not quick:
            return Settings()
        return Settings(
            quick=True,
            results=OUT / "bench-quick",
            rounds=2,
            fio_s=1.0,
            fio_ramp_s=0.2,
            image_mib=256,
            pgbench_s=2.0,
            pgbench_rounds=1,
            rtts_ms=(0, 50),
            client_counts=(1, 16),
            gate_s=1,
            tagging_rounds=3,
            memory_s=8.0,
            application_s=1.5,
            application_rounds=1,
            front_work_ms=(0, 25, 75),
            write_rates=(0, 25, 100),
            profile_s=2.0,
            activity_rounds=2,
            history_rounds=2,
            history_turn_mib=64,
            journals_mib=(256, 1024),
            busy_s=8.0,
            roll_spans_s=(1, 5),
            restarts=2,
            resynced_mib=96,
            live_s=1.0,
            outage_s=20.0,
            switches=2,
            switch_load_s=0.5,
            shard_counts=(1, 8, 128),
            shard_rounds=1,
            shard_load_s=1.5,
        )
