"""Faults inside one process: its wall clock steps, its disk syncs fail or take long. See `faultshim.c`.

Invariant: a process without the environment of a `FaultShim` knows nothing of it, and one with it runs on the real
clock and disk until a fault is asked for.
"""

from __future__ import annotations

import mmap
import struct
import subprocess
from pathlib import Path

from .paths import OUT
from .run import Run

_SOURCE = Path(__file__).with_suffix(".c")
_LAYOUT = struct.Struct("=qqq")


def _library() -> Path:
    """The library, built if its source is newer."""
    built = OUT / "faultshim.so"
    if not built.exists() or built.stat().st_mtime < _SOURCE.stat().st_mtime:
        built.parent.mkdir(exist_ok=True)
        fresh = built.with_suffix(".new")
        subprocess.run(["cc", "-O2", "-Wall", "-Werror", "-shared", "-fPIC", "-o", fresh, _SOURCE, "-ldl"], check=True)
        fresh.rename(built)
    return built


class FaultShim:
    """What one process, through all its lives, believes of the clock and of its disk."""

    def __init__(self, run: Run, name: str):
        path = run.directory / f"{name}.faults"
        path.write_bytes(bytes(_LAYOUT.size))
        with path.open("r+b") as file:
            self._mapped = mmap.mmap(file.fileno(), _LAYOUT.size)
        self.environment = {"LD_PRELOAD": str(_library()), "TIDELOCK_FAULTS": str(path)}
        """For the process."""
        self._clock_ahead_s, self._sync_delay_ms, self._sync_fails = 0.0, 0.0, False

    def step_clock(self, ahead_s: float) -> None:
        """From now on its wall clock is so far ahead of the real one, or behind it."""
        self._clock_ahead_s = ahead_s
        self._write()

    def slow_syncs(self, delay_ms: float) -> None:
        """Each sync takes so much longer."""
        self._sync_delay_ms = delay_ms
        self._write()

    def fail_syncs(self, fails: bool) -> None:
        """Each sync fails, and syncs nothing."""
        self._sync_fails = fails
        self._write()

    def _write(self) -> None:
        values = int(self._clock_ahead_s * 1e9), int(self._sync_delay_ms * 1e3), int(self._sync_fails)
        self._mapped[:] = _LAYOUT.pack(*values)
